//! The messages of a queue: pointers to shards, as JSON with a version.
//!
//! See docs/decisions/016-a-message-names-output-generation-and-shard.md.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::QueueError;
use crate::signing::{Purpose, SignatureError, Signing};

/// Version of the messages written by this gristmill.
pub const MESSAGE_VERSION: u32 = 1;
/// The address to which signatures of messages are bound: no address, because a message means the
/// same in every queue, and workers of another model pass messages on.
const ANY_QUEUE: &str = "";
/// Maximum size of a message: a pointer is short, so longer bytes are not a message of gristmill.
const MESSAGE_BYTES_MAX: usize = 4096;

/// A pointer to one shard: never data.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(title = "gristmill message", transform = crate::signing::add_signature_field)]
pub struct Message {
    /// Version of the message; readers leave a newer one untouched.
    pub v: u32,
    /// The job's id.
    pub job: String,
    /// The job's output, as a URL: where its ledger lies.
    pub output: String,
    /// 0, or the number of the retry that the shard is worked on for.
    pub generation: u32,
    /// Index into the shard table of the job's record.
    pub shard: u32,
}

impl Message {
    /// Creates a message of the current version.
    pub fn new(job: impl Into<String>, output: impl Into<String>, generation: u32, shard: u32) -> Message {
        Message {
            v: MESSAGE_VERSION,
            job: job.into(),
            output: output.into(),
            generation,
            shard,
        }
    }

    /// The JSON Schema of messages, as `schemas/message.schema.json` holds it.
    pub fn schema() -> serde_json::Value {
        schemars::schema_for!(Message).to_value()
    }

    /// Encodes the message as JSON for a broker.
    pub fn encode(&self) -> Result<Vec<u8>, QueueError> {
        serde_json::to_vec(self).map_err(|error| QueueError::Malformed { why: error.to_string() })
    }

    /// As [`Message::encode`], and signs the message if a key is set.
    pub(crate) fn encode_signed(&self, signing: &Signing) -> Result<Vec<u8>, QueueError> {
        let bytes = signing.sign(Purpose::Message, ANY_QUEUE, self.encode()?.into());
        if bytes.len() > MESSAGE_BYTES_MAX {
            // Every reader would reject a longer message.
            Err(QueueError::Malformed {
                why: format!("the output's address is too long: a message has at most {MESSAGE_BYTES_MAX} bytes"),
            })
        } else {
            Ok(bytes.into())
        }
    }

    /// Checks that `bytes` have the signature of one of the keys, as a message.
    pub(crate) fn check_signature(bytes: &[u8], signing: &Signing) -> Result<(), SignatureError> {
        signing.check(Purpose::Message, ANY_QUEUE, bytes)
    }

    /// Decodes the bytes that a broker delivered. A message of a newer version gives
    /// [`QueueError::Newer`]: leave it to a newer worker.
    pub fn decode(bytes: &[u8]) -> Result<Message, QueueError> {
        #[derive(Deserialize)]
        struct Versioned {
            v: u64,
        }
        let malformed = |why: String| QueueError::Malformed { why };
        if bytes.len() > MESSAGE_BYTES_MAX {
            return Err(malformed(format!(
                "{} bytes, more than {MESSAGE_BYTES_MAX}",
                bytes.len()
            )));
        }
        let Versioned { v } = serde_json::from_slice(bytes).map_err(|error| malformed(error.to_string()))?;
        if v > u64::from(MESSAGE_VERSION) {
            return Err(QueueError::Newer {
                found: v,
                known: MESSAGE_VERSION,
            });
        }
        serde_json::from_slice(bytes).map_err(|error| malformed(error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_round_trip_and_foreign_bytes_are_errors() {
        let message = Message::new("0123", "s3://bucket/out", 0, 7);
        assert_eq!(Message::decode(&message.encode().unwrap()).unwrap(), message);
        assert!(matches!(
            Message::decode(br#"{"v":2,"anything":[]}"#),
            Err(QueueError::Newer { found: 2, known: 1 })
        ));
        let mut long = message.encode().unwrap().to_vec();
        long.resize(MESSAGE_BYTES_MAX + 1, b' ');
        for bad in [
            &b""[..],
            b"{",
            b"[]",
            br#"{"v":1}"#,
            br#"{"v":1,"job":"x","shard":-1}"#,
            b"\xff",
            &long,
        ] {
            assert!(
                matches!(Message::decode(bad), Err(QueueError::Malformed { .. })),
                "{bad:?}"
            );
        }
    }
}
