//! Decides how the bytes of a delivery are handled: as our message, a newer gristmill's, or foreign
//! bytes.

use super::{HOPS_MAX, Message, QueueError};
use crate::signing::{Signing, Unsigned};

/// The header that counts how often workers passed a message on.
pub(crate) const HOPS_HEADER: &str = "gristmill-hops";
/// Maximum number of characters of a foreign message in the log.
const SHOWN_CHARS_MAX: usize = 80;

/// The action of the broker's thread on a message.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Handling {
    Deliver(Message),
    /// Send the message again unchanged, with this number of hops.
    PassOn(u32),
    /// Acknowledge the message: no worker can process it, or it is left to `reconcile`.
    Drop,
}

/// Decides, and logs why a message is not delivered. `place` names the queue and the position in
/// it.
pub(crate) fn classify(body: &[u8], hops: u32, place: &str, signing: &Signing) -> Handling {
    match Message::decode(body) {
        Ok(message) => match Message::check_signature(body, signing) {
            Ok(()) => Handling::Deliver(message),
            Err(why) => unsigned(&message, why, hops, place),
        },
        Err(QueueError::Newer { found, .. }) if hops < HOPS_MAX => {
            tracing::info!(
                place,
                "{place}: a message of version {found} is passed on to a newer gristmill"
            );
            Handling::PassOn(hops + 1)
        }
        Err(QueueError::Newer { found, .. }) => {
            tracing::warn!(
                place,
                "{place}: a message of version {found} met no newer gristmill and is left to `gristmill reconcile`"
            );
            Handling::Drop
        }
        Err(error) => {
            tracing::warn!(place, "{place}: {error}; acknowledged and dropped: `{}`", shown(body));
            Handling::Drop
        }
    }
}

/// Handles a message without a valid signature: another worker may have the right key, or no key.
fn unsigned(message: &Message, why: Unsigned, hops: u32, place: &str) -> Handling {
    let Message {
        job: job_id,
        output,
        shard,
        ..
    } = message;
    let (handling, then) = if hops < HOPS_MAX {
        (Handling::PassOn(hops + 1), "it is passed on")
    } else {
        (
            Handling::Drop,
            "no worker took it, and it is left to `gristmill reconcile` with a key of this worker",
        )
    };
    tracing::warn!(
        place,
        job_id,
        shard,
        output,
        "{place}: the message for shard {shard} of `{output}` {why}: {then}"
    );
    handling
}

/// The first printable characters of the body.
fn shown(body: &[u8]) -> String {
    String::from_utf8_lossy(&body[..body.len().min(4 * SHOWN_CHARS_MAX)])
        .chars()
        .filter(|c| !c.is_control())
        .take(SHOWN_CHARS_MAX)
        .collect()
}

/// Parses the header that counts hops. An unreadable header counts as the maximum.
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

    const KEY: &str = "0123456789abcdef0123456789abcdef";

    #[test]
    fn where_a_key_is_set_messages_without_it_go_on_a_few_times() {
        let (signing, other) = (
            Signing::with(KEY).unwrap(),
            Signing::with(&KEY.replace('0', "x")).unwrap(),
        );
        let classified = |body: &[u8], hops| classify(body, hops, "here", &signing);
        let message = Message::new("j", "memory:///o", 2, 1);
        let signed = message.encode_signed(&signing).unwrap();
        assert_eq!(
            classified(&signed, HOPS_MAX),
            Handling::Deliver(message.clone()),
            "hops are not signed"
        );
        let altered = String::from_utf8(signed).unwrap().replace("\"shard\":1", "\"shard\":3");
        for unsigned in [
            message.encode().unwrap(),
            message.encode_signed(&other).unwrap(),
            altered.into_bytes(),
        ] {
            assert_eq!(classified(&unsigned, 0), Handling::PassOn(1));
            assert_eq!(classified(&unsigned, HOPS_MAX), Handling::Drop);
        }
    }

    #[test]
    fn newer_messages_go_on_a_few_times_and_foreign_ones_are_dropped() {
        let newer = br#"{"v":9,"x":1}"#;
        let classified = |body: &[u8], hops, place| classify(body, hops, place, &Signing::default());
        assert_eq!(classified(newer, 0, "here"), Handling::PassOn(1));
        assert_eq!(classified(newer, HOPS_MAX, "here"), Handling::Drop);
        assert_eq!(classified(b"\xffnot json\x07", 0, "here"), Handling::Drop);
        let message = Message::new("j", "memory:///o", 0, 1);
        assert_eq!(
            classified(&message.encode().unwrap(), 3, "here"),
            Handling::Deliver(message.clone())
        );
        let signed = message.encode_signed(&Signing::with(KEY).unwrap()).unwrap();
        assert_eq!(
            classified(&signed, 0, "here"),
            Handling::Deliver(message),
            "signed, and no key here"
        );
        assert_eq!((hops(None), hops(Some(b"2")), hops(Some(b"x"))), (0, 2, HOPS_MAX));
        assert_eq!(shown(&[b'a'; 500]).len(), SHOWN_CHARS_MAX);
    }
}
