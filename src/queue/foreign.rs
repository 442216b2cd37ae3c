//! Decides how the bytes of a delivery are handled: as a message, as a newer gristmill's message,
//! or as foreign bytes.

use super::{HOPS_MAX, Message, QueueError};
use crate::signing::{SignatureError, Signing};

/// The header that counts how often workers passed a message on.
pub(crate) const HOPS_HEADER: &str = "gristmill-hops";
/// Maximum number of characters of a foreign message in the log.
const EXCERPT_CHARS_MAX: usize = 80;

/// The action of the broker's thread on a message.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Handling {
    Deliver(Message),
    /// Send the message again unchanged, with this number of hops.
    PassOn(u32),
    /// Acknowledge the message: no worker can process it, or it is left to `reconcile`.
    Drop,
}

/// Decides how a message is handled, and logs the reason if it is not delivered. `source` names the
/// queue and, in Kafka, the message's position in it.
pub(crate) fn classify(body: &[u8], hops: u32, source: &str, signing: &Signing) -> Handling {
    match Message::decode(body) {
        Ok(message) => match Message::check_signature(body, signing) {
            Ok(()) => Handling::Deliver(message),
            Err(why) => handle_unsigned(&message, why, hops, source),
        },
        Err(QueueError::Newer { found, .. }) if hops < HOPS_MAX => {
            tracing::info!(
                place = source,
                "{source}: a message of version {found} is passed on to a newer gristmill"
            );
            Handling::PassOn(hops + 1)
        }
        Err(QueueError::Newer { found, .. }) => {
            tracing::warn!(
                place = source,
                "{source}: a message of version {found} met no newer gristmill and is left to `gristmill reconcile`"
            );
            Handling::Drop
        }
        Err(error) => {
            tracing::warn!(
                place = source,
                "{source}: {error}; acknowledged and dropped: `{}`",
                excerpt(body)
            );
            Handling::Drop
        }
    }
}

/// Handles a message without a valid signature. It is passed on: another worker may have its key,
/// or no key.
fn handle_unsigned(message: &Message, why: SignatureError, hops: u32, source: &str) -> Handling {
    let Message {
        job: job_id,
        output,
        shard,
        ..
    } = message;
    let (handling, outcome) = if hops < HOPS_MAX {
        (Handling::PassOn(hops + 1), "it is passed on")
    } else {
        (
            Handling::Drop,
            "no worker accepted its signature; `gristmill reconcile` with the workers' key enqueues the shard again",
        )
    };
    tracing::warn!(
        place = source,
        job_id,
        shard,
        output,
        "{source}: the message for shard {shard} of `{output}` {why}: {outcome}"
    );
    handling
}

/// The first printable characters of the body.
fn excerpt(body: &[u8]) -> String {
    String::from_utf8_lossy(&body[..body.len().min(4 * EXCERPT_CHARS_MAX)])
        .chars()
        .filter(|c| !c.is_control())
        .take(EXCERPT_CHARS_MAX)
        .collect()
}

/// Parses the header that counts hops. An unreadable header counts as the maximum.
pub(crate) fn parse_hops(header: Option<&[u8]>) -> u32 {
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
    fn with_a_key_unsigned_messages_are_passed_on_until_the_hop_limit() {
        let (signing, other) = (
            Signing::parse(KEY).unwrap(),
            Signing::parse(&KEY.replace('0', "x")).unwrap(),
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
    fn newer_messages_are_passed_on_and_foreign_bytes_are_dropped() {
        let newer = br#"{"v":9,"x":1}"#;
        let classified = |body: &[u8], hops, source| classify(body, hops, source, &Signing::default());
        assert_eq!(classified(newer, 0, "here"), Handling::PassOn(1));
        assert_eq!(classified(newer, HOPS_MAX, "here"), Handling::Drop);
        assert_eq!(classified(b"\xffnot json\x07", 0, "here"), Handling::Drop);
        let message = Message::new("j", "memory:///o", 0, 1);
        assert_eq!(
            classified(&message.encode().unwrap(), 3, "here"),
            Handling::Deliver(message.clone())
        );
        let signed = message.encode_signed(&Signing::parse(KEY).unwrap()).unwrap();
        assert_eq!(
            classified(&signed, 0, "here"),
            Handling::Deliver(message),
            "signed, and no key here"
        );
        assert_eq!(
            (parse_hops(None), parse_hops(Some(b"2")), parse_hops(Some(b"x"))),
            (0, 2, HOPS_MAX)
        );
        assert_eq!(excerpt(&[b'a'; 500]).len(), EXCERPT_CHARS_MAX);
    }
}
