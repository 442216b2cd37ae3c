//! Filling a queue: `submit`'s and `reconcile`'s side.

use super::address::QueueUrl;
use super::kafka::KafkaPublisher;
use super::rabbitmq::RabbitPublisher;
use super::settings::{Resolved, Settings};
use super::{Message, QueueError};

/// What [`Publisher::prepare`] found or made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prepared {
    /// Whether the topic or queue was made by this call.
    pub created: bool,
    /// How many workers can share the topic; `None` where any number can.
    pub partitions: Option<u32>,
}

/// Sends messages to one queue.
pub struct Publisher(Broker);

enum Broker {
    Kafka(Box<KafkaPublisher>),
    RabbitMq(RabbitPublisher),
}

impl Publisher {
    /// Connects, within about 15 s.
    pub async fn open(url: &QueueUrl, settings: &Settings) -> Result<Publisher, QueueError> {
        let resolved = Resolved::new(url, settings)?;
        Ok(Publisher(match url {
            QueueUrl::Kafka(url) => Broker::Kafka(Box::new(KafkaPublisher::open(url, &resolved).await?)),
            QueueUrl::RabbitMq(url) => Broker::RabbitMq(RabbitPublisher::open(url, &resolved).await?),
        }))
    }

    /// Makes the topic or queue for so many messages, where it is not there yet; what exists is left as it is.
    pub async fn prepare(&self, messages: u64) -> Result<Prepared, QueueError> {
        match &self.0 {
            Broker::Kafka(publisher) => publisher.prepare(messages).await,
            Broker::RabbitMq(publisher) => publisher.prepare().await,
        }
    }

    /// What is there, made by nobody now; `None`: no such topic or queue.
    pub async fn look(&self) -> Result<Option<Prepared>, QueueError> {
        match &self.0 {
            Broker::Kafka(publisher) => publisher.look().await,
            Broker::RabbitMq(publisher) => publisher.look().await,
        }
    }

    /// Returns when the broker has confirmed every message. After an error some of them may be there.
    pub async fn send(&self, messages: &[Message]) -> Result<(), QueueError> {
        match &self.0 {
            Broker::Kafka(publisher) => publisher.send(messages).await,
            Broker::RabbitMq(publisher) => publisher.send(messages).await,
        }
    }
}
