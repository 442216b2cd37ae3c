//! The queue of open shards: messages that name shards are received, extended, acknowledged or
//! given back.
//!
//! The queue is a hint: it may lose or repeat any message, and the ledger alone decides which
//! shards are done. A message is acknowledged only after its shard is committed. Implementations
//! reconnect by themselves. While a broker is away, `receive` returns no message, and calls for
//! deliveries that the broker will repeat have no effect.
//!
//! See docs/decisions/017-deliveries-are-taken-back-by-recall.md.

pub mod address;
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
use std::time::{Duration, Instant};

use async_trait::async_trait;
use tokio::sync::oneshot;

pub use address::{QueueUrl, Secret};
pub use local::LocalQueue;
pub use message::{MESSAGE_VERSION, Message};
pub use publisher::{PreparedQueue, Publisher};
pub use settings::{AddressOrigin, Settings};

/// Maximum number of times that workers pass a message on before it is left to `reconcile`. The
/// pause before each hop grows, so that all hops together take about 20 minutes.
pub const HOPS_MAX: u32 = 20;

/// Errors of a queue, split by the caller's reaction.
#[derive(Debug, thiserror::Error)]
pub enum QueueError {
    /// The broker does not answer: try again later.
    #[error("the queue does not answer: {why}")]
    Unavailable { why: String },
    /// The resolver does not know the broker's name. A sender should fail at once, because the name
    /// may be misspelt. A receiver waits, because names appear and disappear with the processes
    /// behind them.
    #[error("{why}")]
    UnknownHost { why: String },
    /// The broker refuses access (password, certificate or permission): the operator must act.
    #[error("the queue refuses access: {why}")]
    Denied { why: String },
    /// An address or a setting with which no broker can be reached.
    #[error("{why}")]
    Settings { why: String },
    /// The bytes are not a message of gristmill: no worker can ever process them.
    #[error("a message that does not name a shard: {why}")]
    Malformed { why: String },
    /// The message was written by a newer gristmill: give it back unchanged.
    #[error("a message of version {found}, this gristmill reads up to {known}: use a newer gristmill")]
    Newer { found: u64, known: u32 },
}

/// A message that a worker holds. It is delivered again if it is dropped without a disposition: a
/// call of [`Queue::acknowledge`], [`Queue::give_back`], [`Queue::forward`] or
/// [`Queue::requeue_last`].
pub struct Delivery {
    pub message: Message,
    /// How often this message was delivered, as far as the queue knows, from 1. A delivery that was
    /// given back, or dropped by a process that kept running, counts only if this could not be
    /// reported to the broker.
    pub deliveries: u32,
    /// How often workers passed this message on because it was for another kind of worker.
    pub hops: u32,
    /// Distinguishes this delivery from others of the same message.
    pub receipt: u64,
    /// When the worker received it.
    pub received_at: Instant,
    /// Called when the delivery is dropped.
    on_drop: Option<Box<dyn FnOnce() + Send + Sync>>,
}

impl Delivery {
    /// For implementations of [`Queue`]; `on_drop` gives back a delivery without a disposition.
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
            received_at: Instant::now(),
            on_drop,
        }
    }
}

impl QueueError {
    /// Whether the error may go away by itself.
    pub(crate) fn is_transient(&self) -> bool {
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
            received_at: _,
            on_drop: _,
        } = self;
        write!(
            f,
            "Delivery({message:?}, deliveries: {deliveries}, hops: {hops}, receipt: {receipt})"
        )
    }
}

/// The broker takes deliveries back, because their partitions go to another worker or their time
/// runs out. The worker logs the finished rows of these deliveries now and drops the rest. Dropping
/// the `Recall` signals to the queue that work on the deliveries has ended. Later dispositions of
/// them are harmless.
#[derive(Debug)]
pub struct Recall {
    /// Receipts of the recalled deliveries.
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

/// A source of messages. Every implementation passes the suite in `tests/contract.rs`.
#[async_trait]
pub trait Queue: Send + Sync {
    /// Returns the next message, or `None` if no message came within `wait`.
    async fn receive(&self, wait: Duration) -> Result<Option<Delivery>, QueueError>;

    /// Extends the delivery's lease until `time` from now: the worker still works on it. A queue
    /// may recall deliveries that are not extended: their worker has stopped making progress.
    async fn extend(&self, delivery: &Delivery, time: Duration) -> Result<(), QueueError>;

    /// Acknowledges the message: its work is done. A repeated or late acknowledgement is harmless.
    async fn acknowledge(&self, delivery: &Delivery) -> Result<(), QueueError>;

    /// Gives the message back, so that another worker gets it soon. Harmless after another
    /// disposition.
    async fn give_back(&self, delivery: &Delivery) -> Result<(), QueueError>;

    /// Passes on a message for another kind of worker: sends it again with one hop more, and
    /// acknowledges this delivery. After [`HOPS_MAX`] hops it is only acknowledged and left to
    /// `reconcile`. Returns whether the message was sent again.
    async fn forward(&self, delivery: &Delivery) -> Result<bool, QueueError>;

    /// Defers the message behind all others: sends it again at the end of the queue with the same
    /// number of hops, and acknowledges this delivery. Harmless after another disposition.
    async fn requeue_last(&self, delivery: &Delivery) -> Result<(), QueueError>;

    /// Waits for the next recall (see [`Recall`]). Never returns for queues that recall nothing.
    async fn next_recall(&self) -> Recall;

    /// Whether messages in the queue would reach this worker. Only then does an empty `receive`
    /// mean that the queue is empty. False while the broker is away or refuses access, and until it
    /// has registered this consumer. True in an outage until the outage is noticed.
    fn is_attached(&self) -> bool;
}

/// Connects to receive. Fails within about 15 s if the broker refuses access. If the broker does
/// not answer, or its name is unknown, the queue is returned all the same: it logs the outage,
/// retries, and delivers nothing meanwhile.
pub async fn connect(url: &QueueUrl, settings: &Settings) -> Result<Arc<dyn Queue>, QueueError> {
    let resolved = settings::ResolvedSettings::new(url, settings)?;
    match url {
        QueueUrl::Kafka(url) => kafka::connect(url, &resolved).await,
        QueueUrl::RabbitMq(url) => rabbitmq::connect(url, &resolved).await,
    }
}
