//! Which shard next: messages that point at shards, received, extended, acknowledged or given back.
//!
//! The queue is a hint. It may lose or repeat any message; the ledger alone decides what is done. A message is
//! acknowledged after its shard is committed, never before.

pub mod contract;
pub mod local;

use std::time::Duration;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};

pub use local::LocalQueue;

/// Version of the messages written by this gristmill.
pub const MESSAGE_VERSION: u32 = 1;
/// A pointer is short; more bytes are no message of ours.
const MESSAGE_BYTES_MAX: usize = 4096;

/// A pointer to one shard.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    pub v: u32,
    /// The job's id.
    pub job: String,
    pub shard: u32,
}

impl Message {
    pub fn new(job: impl Into<String>, shard: u32) -> Message {
        Message {
            v: MESSAGE_VERSION,
            job: job.into(),
            shard,
        }
    }

    /// As a broker carries it: JSON.
    pub fn encode(&self) -> Result<Vec<u8>, QueueError> {
        serde_json::to_vec(self).map_err(|error| QueueError::Malformed { why: error.to_string() })
    }

    /// Reads what a broker delivered. A newer version is an error of its own: leave that message for a newer worker.
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

/// What can go wrong with a queue, split by reaction.
#[derive(Debug, thiserror::Error)]
pub enum QueueError {
    /// The broker does not answer: try again later.
    #[error("the queue does not answer: {why}")]
    Unavailable { why: String },
    /// Not a message of gristmill: it can never be worked on.
    #[error("a message that is no pointer to a shard: {why}")]
    Malformed { why: String },
    /// Written by a newer gristmill: give it back untouched.
    #[error("a message of version {found}, this gristmill reads up to {known}: use a newer gristmill")]
    Newer { found: u64, known: u32 },
}

/// A message in somebody's hands. Dropped without an answer, it is delivered again.
pub struct Delivery {
    pub message: Message,
    /// How often this message was delivered, as far as the queue knows; from 1.
    pub deliveries: u32,
    /// Tells this delivery from others of the same message.
    pub receipt: u64,
    /// Called when the delivery is dropped.
    on_drop: Option<Box<dyn FnOnce() + Send + Sync>>,
}

impl Delivery {
    /// For implementations of [`Queue`]; `on_drop` gives back what was not answered.
    pub fn new(
        message: Message,
        deliveries: u32,
        receipt: u64,
        on_drop: Option<Box<dyn FnOnce() + Send + Sync>>,
    ) -> Delivery {
        Delivery {
            message,
            deliveries,
            receipt,
            on_drop,
        }
    }
}

impl Drop for Delivery {
    fn drop(&mut self) {
        if let Some(on_drop) = self.on_drop.take() {
            on_drop();
        }
    }
}

impl std::fmt::Debug for Delivery {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Delivery {
            message,
            deliveries,
            receipt,
            on_drop: _,
        } = self;
        write!(f, "Delivery({message:?}, deliveries: {deliveries}, receipt: {receipt})")
    }
}

/// Where messages come from. Every implementation passes [`contract::check`].
#[async_trait]
pub trait Queue: Send + Sync {
    /// The next message, waiting for one at most `wait`; `None` where none came.
    async fn receive(&self, wait: Duration) -> Result<Option<Delivery>, QueueError>;

    /// Says that the delivery is being worked on still, for at least `time` from now.
    async fn extend(&self, delivery: &Delivery, time: Duration) -> Result<(), QueueError>;

    /// The message is done with. Acknowledging again, or too late, is harmless and does nothing.
    async fn acknowledge(&self, delivery: &Delivery) -> Result<(), QueueError>;

    /// Somebody else shall have the message, soon. Harmless after an answer.
    async fn give_back(&self, delivery: &Delivery) -> Result<(), QueueError>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive_the_wire_and_foreign_bytes_do_not_panic() {
        let message = Message::new("0123", 7);
        assert_eq!(Message::decode(&message.encode().unwrap()).unwrap(), message);
        assert!(matches!(
            Message::decode(br#"{"v":2,"anything":[]}"#),
            Err(QueueError::Newer { found: 2, known: 1 })
        ));
        let long = vec![b' '; MESSAGE_BYTES_MAX + 1];
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
