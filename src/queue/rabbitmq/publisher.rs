//! Publishes persistent messages with confirms, and only to a queue that exists.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::{AMQPValue, FieldTable, LongString};
use lapin::{BasicProperties, Channel, Confirmation, Connection, Event};
use tokio::sync::Mutex;

use super::declare::{declare, queue_exists};
use super::link::{open, queue_error, with_timeout};
use crate::queue::address::RabbitUrl;
use crate::queue::foreign::HOPS_HEADER;
use crate::queue::io::IoThread;
use crate::queue::publisher::PreparedQueue;
use crate::queue::settings::ResolvedSettings;
use crate::queue::{Message, QueueError};

/// Maximum number of messages that wait for their confirmation at once.
const UNCONFIRMED_MAX: usize = 500;
const PERSISTENT: u8 = 2;
const BACKOFF_MIN: Duration = Duration::from_millis(500);
const BACKOFF_MAX: Duration = Duration::from_secs(5);

/// Publishes over its own connection, which is opened on first use.
#[derive(Clone)]
pub(crate) struct RabbitPublisher {
    io: Arc<IoThread>,
    shared: Arc<PublisherState>,
}

struct PublisherState {
    url: RabbitUrl,
    resolved: ResolvedSettings,
    link: Mutex<Option<Link>>,
}

struct Link {
    connection: Connection,
    channel: Channel,
}

/// Why a round of publishing ended early.
enum RoundError {
    /// The broker returned a message as unroutable: the queue is gone.
    NoQueue,
    Failed(QueueError),
}

impl RabbitPublisher {
    /// Creates a publisher without connecting.
    pub(crate) fn new(url: &RabbitUrl, resolved: &ResolvedSettings, io: Arc<IoThread>) -> RabbitPublisher {
        RabbitPublisher {
            io,
            shared: Arc::new(PublisherState {
                url: url.clone(),
                resolved: resolved.clone(),
                link: Mutex::new(None),
            }),
        }
    }

    /// Creates a publisher and waits until it is connected.
    pub(crate) async fn open(url: &RabbitUrl, resolved: &ResolvedSettings) -> Result<RabbitPublisher, QueueError> {
        let io = Arc::new(IoThread::start("gristmill-amqp")?);
        let publisher = RabbitPublisher::new(url, resolved, io.clone());
        let shared = publisher.shared.clone();
        io.run(async move { shared.channel().await.map(drop) }).await?;
        Ok(publisher)
    }

    /// The queue, if it exists.
    pub(crate) async fn find_existing(&self) -> Result<Option<PreparedQueue>, QueueError> {
        let shared = self.shared.clone();
        let queue_exists = self.io.run(async move { shared.find_existing().await }).await?;
        Ok(queue_exists.then_some(PreparedQueue {
            created: false,
            partitions: None,
        }))
    }

    /// Creates the queue if it does not exist.
    pub(crate) async fn prepare(&self) -> Result<PreparedQueue, QueueError> {
        let shared = self.shared.clone();
        let created = self.io.run(async move { shared.prepare().await }).await?;
        Ok(PreparedQueue {
            created,
            partitions: None,
        })
    }

    /// Sends the messages and waits until the broker has confirmed all.
    pub(crate) async fn send(&self, messages: &[Message]) -> Result<(), QueueError> {
        let bodies = messages
            .iter()
            .map(|message| message.encode_signed(&self.shared.resolved.signing))
            .collect::<Result<Vec<_>, _>>()?;
        let shared = self.shared.clone();
        self.io.run(async move { shared.send(bodies, 0).await }).await
    }

    /// Sends bodies unchanged. Must be called on the I/O thread.
    pub(crate) async fn send_bodies(&self, bodies: Vec<Vec<u8>>, hops: u32) -> Result<(), QueueError> {
        self.shared.send(bodies, hops).await
    }
}

impl PublisherState {
    /// The channel for publishing. Connects if there is no open channel.
    async fn channel(&self) -> Result<Channel, QueueError> {
        let mut link = self.link.lock().await;
        if let Some(Link { connection, channel }) = &*link
            && connection.status().connected()
            && channel.status().connected()
        {
            return Ok(channel.clone());
        }
        *link = None;
        let connection = open(&self.url, &self.resolved, "publishing").await?;
        let confirming = async {
            let failed = |error: lapin::Error| queue_error(&self.url, &self.resolved, &error);
            let channel = connection.create_channel().await.map_err(failed)?;
            channel
                .confirm_select(ConfirmSelectOptions::default())
                .await
                .map_err(failed)?;
            Ok(channel)
        };
        let channel = with_timeout(&self.url, confirming).await?;
        tokio::spawn(log_blocking(connection.events_listener(), self.url.to_string()));
        *link = Some(Link {
            connection,
            channel: channel.clone(),
        });
        Ok(channel)
    }

    async fn find_existing(&self) -> Result<bool, QueueError> {
        self.channel().await?;
        let link = self.link.lock().await;
        with_timeout(
            &self.url,
            queue_exists(self.connected(&link)?, &self.url, &self.resolved),
        )
        .await
    }

    async fn prepare(&self) -> Result<bool, QueueError> {
        self.channel().await?;
        let link = self.link.lock().await;
        let declared = declare(self.connected(&link)?, &self.url, &self.resolved);
        let (_channel, created) = with_timeout(&self.url, declared).await?;
        Ok(created)
    }

    fn connected<'a>(&self, link: &'a Option<Link>) -> Result<&'a Connection, QueueError> {
        let lost_error = || QueueError::Unavailable {
            why: format!("{}: the connection was lost", self.url),
        };
        link.as_ref().map(|link| &link.connection).ok_or_else(lost_error)
    }

    /// Sends the bodies and returns when all are confirmed. While the broker is away, retries until
    /// `send_timeout` has passed without progress. A memory alarm only delays the confirms.
    async fn send(&self, bodies: Vec<Vec<u8>>, hops: u32) -> Result<(), QueueError> {
        let mut confirmed = 0;
        let mut backoff = BACKOFF_MIN;
        let mut failing_since: Option<Instant> = None;
        loop {
            let confirmed_before = confirmed;
            let round_error = match self.publish_round(&bodies, hops, &mut confirmed).await {
                Ok(()) => return Ok(()),
                Err(round_error) => round_error,
            };
            if confirmed > confirmed_before {
                (failing_since, backoff) = (None, BACKOFF_MIN);
            }
            let error = match round_error {
                RoundError::NoQueue => {
                    tracing::warn!(queue = %self.url, "{}: the queue is gone; making it again", self.url);
                    match self.prepare().await {
                        Ok(_) => QueueError::Unavailable {
                            why: format!("{}: the queue was deleted repeatedly", self.url),
                        },
                        Err(error) => error,
                    }
                }
                RoundError::Failed(error) => error,
            };
            let since = *failing_since.get_or_insert_with(Instant::now);
            if !error.is_transient() || since.elapsed() >= self.resolved.settings.send_timeout {
                return Err(error);
            }
            tokio::time::sleep(backoff).await;
            backoff = (backoff * 2).min(BACKOFF_MAX);
        }
    }

    /// Publishes the unconfirmed bodies, window by window.
    async fn publish_round(&self, bodies: &[Vec<u8>], hops: u32, confirmed: &mut usize) -> Result<(), RoundError> {
        let failed = |error: lapin::Error| RoundError::Failed(queue_error(&self.url, &self.resolved, &error));
        let channel = self.channel().await.map_err(RoundError::Failed)?;
        let options = BasicPublishOptions {
            mandatory: true,
            ..BasicPublishOptions::default()
        };
        while *confirmed < bodies.len() {
            let window = &bodies[*confirmed..bodies.len().min(*confirmed + UNCONFIRMED_MAX)];
            let mut confirms = Vec::with_capacity(window.len());
            for body in window {
                let queue = self.url.queue.as_str().into();
                let confirm = channel.basic_publish("".into(), queue, options, body, properties(hops));
                confirms.push(confirm.await.map_err(failed)?);
            }
            for confirm in confirms {
                match confirm.await.map_err(failed)? {
                    Confirmation::Ack(None) => *confirmed += 1,
                    Confirmation::Ack(Some(_)) | Confirmation::Nack(Some(_)) => return Err(RoundError::NoQueue),
                    Confirmation::Nack(None) | Confirmation::NotRequested => {
                        return Err(RoundError::Failed(QueueError::Unavailable {
                            why: format!("{}: the broker could not store a message", self.url),
                        }));
                    }
                }
            }
        }
        Ok(())
    }
}

fn properties(hops: u32) -> BasicProperties {
    let properties = BasicProperties::default()
        .with_delivery_mode(PERSISTENT)
        .with_content_type("application/json".into());
    if hops == 0 {
        return properties;
    }
    let mut headers = FieldTable::default();
    headers.insert(
        HOPS_HEADER.into(),
        AMQPValue::LongString(LongString::from(hops.to_string())),
    );
    properties.with_headers(headers)
}

async fn log_blocking(events: impl futures::Stream<Item = Event>, address: String) {
    let mut events = std::pin::pin!(events);
    while let Some(event) = events.next().await {
        match event {
            Event::ConnectionBlocked(reason) => {
                tracing::warn!(
                    queue = address,
                    "{address}: the broker blocks publishing ({reason}); waiting"
                );
            }
            Event::ConnectionUnblocked => {
                tracing::warn!(queue = address, "{address}: the broker accepts messages again")
            }
            _ => {}
        }
    }
}
