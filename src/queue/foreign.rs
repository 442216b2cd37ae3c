//! What is to become of the bytes that a broker delivered: ours, a newer gristmill's, or nobody's.

use super::{HOPS_MAX, Message, QueueError};

/// The header that counts how often workers passed a message on.
pub(crate) const HOPS_HEADER: &str = "gristmill-hops";
/// Printable characters of a foreign message that may stand in a log.
const SHOWN_CHARS_MAX: usize = 80;

/// What a broker's thread does with a message.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    Deliver(Message),
    /// Send it again, byte for byte, with so many hops.
    PassOn(u32),
    /// Acknowledge it: it can never be worked on, or is left to reconcile.
    Drop,
}

/// Decides, and says in the log what is not delivered. `place` names the queue and the position in it.
pub(crate) fn fate(body: &[u8], hops: u32, place: &str) -> Fate {
    match Message::decode(body) {
        Ok(message) => Fate::Deliver(message),
        Err(QueueError::Newer { found, .. }) if hops < HOPS_MAX => {
            tracing::info!("{place}: a message of version {found} is passed on to a newer gristmill");
            Fate::PassOn(hops + 1)
        }
        Err(QueueError::Newer { found, .. }) => {
            tracing::warn!(
                "{place}: a message of version {found} met no newer gristmill and is left to `gristmill reconcile`"
            );
            Fate::Drop
        }
        Err(error) => {
            tracing::warn!("{place}: {error}; acknowledged and dropped: `{}`", shown(body));
            Fate::Drop
        }
    }
}

/// The first printable characters.
fn shown(body: &[u8]) -> String {
    String::from_utf8_lossy(&body[..body.len().min(4 * SHOWN_CHARS_MAX)])
        .chars()
        .filter(|c| !c.is_control())
        .take(SHOWN_CHARS_MAX)
        .collect()
}

/// A header's text as hops; what cannot be read counts as passed on often enough.
pub(crate) fn hops(header: Option<&[u8]>) -> u32 {
    match header {
        None => 0,
        Some(bytes) => std::str::from_utf8(bytes)
            .ok()
            .and_then(|text| text.parse().ok())
            .unwrap_or(HOPS_MAX),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newer_messages_go_on_a_few_times_and_foreign_ones_are_dropped() {
        let newer = br#"{"v":9,"x":1}"#;
        assert_eq!(fate(newer, 0, "here"), Fate::PassOn(1));
        assert_eq!(fate(newer, HOPS_MAX, "here"), Fate::Drop);
        assert_eq!(fate(b"\xffnot json\x07", 0, "here"), Fate::Drop);
        let message = Message::new("j", "memory:///o", 0, 1);
        assert_eq!(fate(&message.encode().unwrap(), 3, "here"), Fate::Deliver(message));
        assert_eq!((hops(None), hops(Some(b"2")), hops(Some(b"x"))), (0, 2, HOPS_MAX));
        assert_eq!(shown(&[b'a'; 500]).len(), SHOWN_CHARS_MAX);
    }
}
