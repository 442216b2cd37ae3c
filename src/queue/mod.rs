//! Which shard next: messages that point at shards, received, extended, acknowledged or given back.
//!
//! The queue is a hint. It may lose or repeat any message; the ledger alone decides what is done. A message is
//! acknowledged after its shard is committed, never before. Implementations reconnect by themselves: while a broker is
//! away, nothing comes, and answers to deliveries that it will repeat anyway do nothing.
//!
//! See docs/decisions/017-deliveries-are-taken-back-by-recall.md.

pub mod address;
pub mod contract;
mod delivery_tracker;
mod foreign;
mod io;
mod kafka;
pub mod local;
pub mod message;
mod outage;
pub(crate) mod properties;
pub mod publisher;
mod rabbitmq;
mod servers;
pub mod settings;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::oneshot;

pub use address::{QueueUrl, Secret};
pub use local::LocalQueue;
pub use message::{MESSAGE_VERSION, Message};
pub use publisher::{Prepared, Publisher};
pub use settings::{Origin, Settings};

/// How often a message is passed on to other workers before it is left to `reconcile`. Workers wait ever longer before they pass one
/// on: with these hops it is offered for about 20 minutes.
pub const HOPS_MAX: u32 = 20;

/// What can go wrong with a queue, split by reaction.
#[derive(Debug, thiserror::Error)]
pub enum QueueError {
    /// The broker does not answer: try again later.
    #[error("the queue does not answer: {why}")]
    Unavailable { why: String },
    /// The broker's name means nothing to the resolver. Who sends should know at once, for it may be misspelt; who receives waits:
    /// names come and go with the processes behind them.
    #[error("{why}")]
    UnknownHost { why: String },
    /// The broker refuses us (password, certificate, right): somebody must act.
    #[error("the queue refuses access: {why}")]
    Denied { why: String },
    /// An address or a setting that no broker can be reached with.
    #[error("{what}")]
    Settings { what: String },
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
    /// How often this message was delivered, as far as the queue knows; from 1. Deliveries that were given back or dropped by a process
    /// that lived on do not count, unless the broker could not be told so.
    pub deliveries: u32,
    /// How often workers passed this message on because it was not for them.
    pub hops: u32,
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
        hops: u32,
        receipt: u64,
        on_drop: Option<Box<dyn FnOnce() + Send + Sync>>,
    ) -> Delivery {
        Delivery {
            message,
            deliveries,
            hops,
            receipt,
            on_drop,
        }
    }
}

impl QueueError {
    /// Whether time alone may mend it.
    pub(crate) fn is_passing(&self) -> bool {
        matches!(self, QueueError::Unavailable { .. } | QueueError::UnknownHost { .. })
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
            hops,
            receipt,
            on_drop: _,
        } = self;
        write!(
            f,
            "Delivery({message:?}, deliveries: {deliveries}, hops: {hops}, receipt: {receipt})"
        )
    }
}

/// The broker takes deliveries back: their partitions go to another worker, or their time runs out. What is finished of
/// them is to be logged now and the rest dropped; dropping this tells the queue that work on them has ended. Answers to
/// them are harmless.
#[derive(Debug)]
pub struct Recall {
    /// Of deliveries in somebody's hands.
    pub receipts: Vec<u64>,
    /// For the log: "its partition goes to another worker".
    pub why: &'static str,
    /// Closed when this is dropped.
    _ended: Option<oneshot::Sender<()>>,
}

impl Recall {
    /// For implementations of [`Queue`]: `ended` is closed when the work on these deliveries has ended.
    pub fn new(receipts: Vec<u64>, why: &'static str, ended: Option<oneshot::Sender<()>>) -> Recall {
        Recall {
            receipts,
            why,
            _ended: ended,
        }
    }
}

/// Where messages come from. Every implementation passes [`contract::check`].
#[async_trait]
pub trait Queue: Send + Sync {
    /// The next message, waiting for one at most `wait`; `None` where none came.
    async fn receive(&self, wait: Duration) -> Result<Option<Delivery>, QueueError>;

    /// Says that the delivery is being worked on still, for at least `time` from now. A queue may recall deliveries
    /// that nobody extends: their worker has stopped making progress.
    async fn extend(&self, delivery: &Delivery, time: Duration) -> Result<(), QueueError>;

    /// The message is done with. Acknowledging again, or too late, is harmless and does nothing.
    async fn acknowledge(&self, delivery: &Delivery) -> Result<(), QueueError>;

    /// Somebody else shall have the message, soon. Harmless after an answer.
    async fn give_back(&self, delivery: &Delivery) -> Result<(), QueueError>;

    /// The message is for a worker of another kind: sends it again, one hop further, and acknowledges this delivery.
    /// After [`HOPS_MAX`] hops it is acknowledged only, left to `reconcile`. Returns whether it was sent again.
    async fn pass_on(&self, delivery: &Delivery) -> Result<bool, QueueError>;

    /// The message is for later, and others come first: sends it again at the end, with the hops that it has, and acknowledges this
    /// delivery. Harmless after an answer.
    async fn put_off(&self, delivery: &Delivery) -> Result<(), QueueError>;

    /// Waits until deliveries must be given up (see [`Recall`]); never returns where that cannot happen.
    async fn recalled(&self) -> Recall;

    /// Whether what lies there would come: only then does it mean anything that nothing comes. Not so while the broker is
    /// away or refuses us, and until it has made us one of its consumers; an outage counts from when it is noticed.
    fn is_attached(&self) -> bool;
}

/// Connects to receive. A broker that refuses us is an error, within about 15 s; one that does not answer, or whose name is
/// unknown, is not: the queue says so in the log, goes on trying, and gives nothing meanwhile.
pub async fn connect(url: &QueueUrl, settings: &Settings) -> Result<Arc<dyn Queue>, QueueError> {
    let resolved = settings::Resolved::new(url, settings)?;
    match url {
        QueueUrl::Kafka(url) => kafka::connect(url, &resolved).await,
        QueueUrl::RabbitMq(url) => rabbitmq::connect(url, &resolved).await,
    }
}
