//! Sending messages to a queue, for `submit` and `reconcile`.

use super::address::QueueUrl;
use super::kafka::KafkaPublisher;
use super::rabbitmq::RabbitPublisher;
use super::settings::{ResolvedSettings, Settings};
use super::{Message, QueueError};

/// The topic or queue that [`Publisher::prepare`] found or created.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreparedQueue {
    /// Whether this call created the topic or queue.
    pub created: bool,
    /// Maximum number of workers that can share the topic. `None`: any number can.
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
        let resolved = ResolvedSettings::new(url, settings)?;
        Ok(Publisher(match url {
            QueueUrl::Kafka(url) => Broker::Kafka(Box::new(KafkaPublisher::open(url, &resolved).await?)),
            QueueUrl::RabbitMq(url) => Broker::RabbitMq(RabbitPublisher::open(url, &resolved).await?),
        }))
    }

    /// Creates the topic or queue, sized for this number of messages. An existing one is left
    /// unchanged.
    pub async fn prepare(&self, messages: u64) -> Result<PreparedQueue, QueueError> {
        match &self.0 {
            Broker::Kafka(publisher) => publisher.prepare(messages).await,
            Broker::RabbitMq(publisher) => publisher.prepare().await,
        }
    }

    /// The topic or queue, if it exists. Creates nothing.
    pub async fn find_existing(&self) -> Result<Option<PreparedQueue>, QueueError> {
        match &self.0 {
            Broker::Kafka(publisher) => publisher.find_existing().await,
            Broker::RabbitMq(publisher) => publisher.find_existing().await,
        }
    }

    /// Sends messages, and returns when the broker has confirmed all of them. After an error the
    /// broker may have stored some of them.
    pub async fn send(&self, messages: &[Message]) -> Result<(), QueueError> {
        match &self.0 {
            Broker::Kafka(publisher) => publisher.send(messages).await,
            Broker::RabbitMq(publisher) => publisher.send(messages).await,
        }
    }
}
