//! Sending messages to a queue, for `submit` and `reconcile`.

use super::address::QueueUrl;
use super::kafka::KafkaPublisher;
use super::rabbitmq::RabbitPublisher;
use super::settings::{Resolved, Settings};
use super::{Message, QueueError};

/// The topic or queue that [`Publisher::prepare`] found or created.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prepared {
    /// Whether this call created the topic or queue.
    pub created: bool,
    /// Maximum number of workers that can share the topic; `None` where any number can.
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

    /// Creates the topic or queue, sized for this number of messages. An existing one is left
    /// unchanged.
    pub async fn prepare(&self, messages: u64) -> Result<Prepared, QueueError> {
        match &self.0 {
            Broker::Kafka(publisher) => publisher.prepare(messages).await,
            Broker::RabbitMq(publisher) => publisher.prepare().await,
        }
    }

    /// Returns the existing topic or queue without creating one; `None` where there is none.
    pub async fn look(&self) -> Result<Option<Prepared>, QueueError> {
        match &self.0 {
            Broker::Kafka(publisher) => publisher.find_existing().await,
            Broker::RabbitMq(publisher) => publisher.find_existing().await,
        }
    }

    /// Returns when the broker has confirmed every message. After an error the broker may have
    /// stored some of them.
    pub async fn send(&self, messages: &[Message]) -> Result<(), QueueError> {
        match &self.0 {
            Broker::Kafka(publisher) => publisher.send(messages).await,
            Broker::RabbitMq(publisher) => publisher.send(messages).await,
        }
    }
}
