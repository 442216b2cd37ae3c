//! Sends messages to Kafka and creates the topic.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::Client;
use rdkafka::config::FromClientConfigAndContext;
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord, Producer};

use super::config;
use super::trouble::{ErrorClass, ErrorListener, ReportedError, connect_error, denied_message, error_class};
use crate::queue::address::KafkaUrl;
use crate::queue::foreign::HOPS_HEADER;
use crate::queue::io::IoThread;
use crate::queue::publisher::PreparedQueue;
use crate::queue::settings::ResolvedSettings;
use crate::queue::{Message, QueueError};

/// Timeout for the first answer of a broker, and for creating a topic.
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long an unknown host name is retried before it is reported.
pub(crate) const RESOLVE_WAIT: Duration = Duration::from_secs(3);
const METADATA_TIMEOUT: Duration = Duration::from_secs(2);
/// Default maximum number of partitions of a new topic, and so of workers that share it. Each
/// partition takes files on the broker.
const PARTITIONS_MAX: u64 = 96;
/// Maximum number of messages that wait for their confirmation at once.
const UNCONFIRMED_MAX: usize = 1000;

/// The state of a topic.
pub(crate) enum Topic {
    Partitions(u32),
    Missing,
}

/// Requests the topic's metadata once. The error is the code of the request or of the topic.
pub(crate) fn fetch_topic<C: rdkafka::ClientContext>(client: &Client<C>, topic: &str) -> Result<Topic, Code> {
    let metadata = client
        .fetch_metadata(Some(topic), METADATA_TIMEOUT)
        .map_err(|error| error.rdkafka_error_code().unwrap_or(Code::Unknown))?;
    let found = metadata.topics().iter().find(|found| found.name() == topic);
    let Some(found) = found else {
        return Ok(Topic::Missing);
    };
    match found.error().map(Code::from) {
        None => Ok(match found.partitions().len() {
            0 => Topic::Missing,
            n => Topic::Partitions(u32::try_from(n).unwrap_or(u32::MAX)),
        }),
        Some(code) if error_class(code) == ErrorClass::NoTopic => Ok(Topic::Missing),
        Some(code) => Err(code),
    }
}

/// Requests the topic's metadata until a broker answers or refuses, or the timeout expires.
/// `take_error` returns the error that librdkafka has reported since its last call.
pub(crate) fn wait_for_metadata<C: rdkafka::ClientContext>(
    client: &Client<C>,
    url: &KafkaUrl,
    take_error: impl Fn() -> Option<ReportedError>,
) -> Result<Topic, QueueError> {
    let address = url.to_string();
    let start = Instant::now();
    let mut reported_error: Option<ReportedError> = None;
    loop {
        let code = match fetch_topic(client, &url.topic) {
            Ok(topic) => return Ok(topic),
            Err(code) => code,
        };
        if error_class(code) == ErrorClass::Denied {
            return Err(QueueError::Denied {
                why: denied_message(&address, code),
            });
        }
        reported_error = match (reported_error, take_error()) {
            (Some(old), Some(new)) => Some(old.or_more_specific(new)),
            (old, new) => new.or(old),
        };
        let wait = match reported_error.as_ref().map(|reported_error| reported_error.class) {
            Some(ErrorClass::Denied) => Duration::ZERO,
            Some(ErrorClass::UnknownHost) => RESOLVE_WAIT,
            _ => CONNECT_TIMEOUT,
        };
        if start.elapsed() >= wait {
            return Err(connect_error(reported_error, &address));
        }
    }
}

/// An idempotent producer for one topic.
#[derive(Clone)]
pub(crate) struct KafkaPublisher {
    producer: FutureProducer<ErrorListener>,
    listener: ErrorListener,
    url: KafkaUrl,
    resolved: ResolvedSettings,
    /// Number of partitions of the topic, as last seen; 0 if unknown.
    partitions: Arc<AtomicU32>,
    /// Number of the next message, by which its partition is chosen round-robin.
    next_message: Arc<AtomicU32>,
}

impl KafkaPublisher {
    /// Creates a publisher without connecting.
    pub(crate) fn new(url: &KafkaUrl, resolved: &ResolvedSettings) -> Result<KafkaPublisher, QueueError> {
        let listener = ErrorListener::new(resolved.scrub.clone());
        let producer = FutureProducer::from_config_and_context(&config::producer(url, resolved)?, listener.clone())
            .map_err(|error| config::property_error(error, resolved))?;
        // A random start, so that workers that pass messages on begin at different partitions.
        let next_message = getrandom::u32().unwrap_or(0) % 65_536;
        Ok(KafkaPublisher {
            producer,
            listener,
            url: url.clone(),
            resolved: resolved.clone(),
            partitions: Arc::default(),
            next_message: Arc::new(AtomicU32::new(next_message)),
        })
    }

    /// Creates a publisher and waits for an answer of the broker.
    pub(crate) async fn open(url: &KafkaUrl, resolved: &ResolvedSettings) -> Result<KafkaPublisher, QueueError> {
        let publisher = KafkaPublisher::new(url, resolved)?;
        publisher
            .clone()
            .blocking(|publisher| publisher.wait_for_metadata())
            .await?;
        Ok(publisher)
    }

    fn wait_for_metadata(&self) -> Result<Topic, QueueError> {
        let topic = wait_for_metadata(self.producer.client(), &self.url, || self.listener.take())?;
        if let Topic::Partitions(n) = topic {
            self.partitions.store(n, Ordering::SeqCst);
        }
        Ok(topic)
    }

    async fn blocking<R: Send + 'static>(
        self,
        work: impl FnOnce(KafkaPublisher) -> Result<R, QueueError> + Send + 'static,
    ) -> Result<R, QueueError> {
        tokio::task::spawn_blocking(move || work(self))
            .await
            .map_err(|error| QueueError::Unavailable {
                why: format!("asking Kafka failed: {error}"),
            })?
    }

    /// The topic, if it exists.
    pub(crate) async fn find_existing(&self) -> Result<Option<PreparedQueue>, QueueError> {
        let found = self.clone().blocking(|publisher| publisher.wait_for_metadata()).await?;
        Ok(match found {
            Topic::Partitions(n) => Some(PreparedQueue {
                created: false,
                partitions: Some(n),
            }),
            Topic::Missing => None,
        })
    }

    /// Creates the topic if it does not exist.
    pub(crate) async fn prepare(&self, messages: u64) -> Result<PreparedQueue, QueueError> {
        let first = self.clone().blocking(|publisher| publisher.wait_for_metadata()).await?;
        if let Topic::Partitions(n) = first {
            if let Some(asked) = self.url.partitions.filter(|&asked| asked > n) {
                tracing::warn!(
                    queue = %self.url,
                    "{}: the topic exists already, with {n} partitions instead of {asked}: at most {n} workers can share it, \
                     unless you add partitions to it",
                    self.url
                );
            }
            return Ok(PreparedQueue {
                created: false,
                partitions: Some(n),
            });
        }
        let wanted = u64::from(self.url.partitions.unwrap_or(0));
        let wanted = if wanted > 0 {
            wanted
        } else {
            messages.clamp(1, PARTITIONS_MAX)
        };
        let created = self.create(i32::try_from(wanted).unwrap_or(i32::MAX)).await?;
        let publisher = self.clone();
        let partitions = publisher.blocking(|publisher| publisher.wait_for_topic()).await?;
        Ok(PreparedQueue {
            created,
            partitions: Some(partitions),
        })
    }

    /// Returns whether this call created the topic; false if another process was faster.
    async fn create(&self, partitions: i32) -> Result<bool, QueueError> {
        let address = self.url.to_string();
        let config = config::producer(&self.url, &self.resolved)?;
        let admin: AdminClient<ErrorListener> = AdminClient::from_config_and_context(&config, self.listener.clone())
            .map_err(|error| config::property_error(error, &self.resolved))?;
        // A replication factor of -1 selects the broker's default.
        let topic = NewTopic::new(&self.url.topic, partitions, TopicReplication::Fixed(-1));
        let options = AdminOptions::new()
            .request_timeout(Some(CONNECT_TIMEOUT))
            .operation_timeout(Some(CONNECT_TIMEOUT));
        let unavailable = |why: String| QueueError::Unavailable {
            why: format!(
                "{address}: cannot create the topic: {}",
                self.resolved.scrub.clean_line(&why)
            ),
        };
        let results = admin
            .create_topics([&topic], &options)
            .await
            .map_err(|error| unavailable(error.to_string()))?;
        match results.into_iter().next() {
            Some(Ok(_)) => Ok(true),
            Some(Err((_, Code::TopicAlreadyExists))) => Ok(false),
            Some(Err((_, Code::TopicAuthorizationFailed | Code::ClusterAuthorizationFailed))) => {
                Err(QueueError::Denied {
                    why: format!(
                        "{address}: the topic does not exist and there is no right to create it: have it made, or grant CREATE"
                    ),
                })
            }
            Some(Err((_, code))) => Err(unavailable(code.to_string())),
            None => Err(unavailable("the broker said nothing".to_owned())),
        }
    }

    fn wait_for_topic(&self) -> Result<u32, QueueError> {
        let start = Instant::now();
        loop {
            if let Topic::Partitions(n) = self.wait_for_metadata()? {
                return Ok(n);
            }
            if start.elapsed() > CONNECT_TIMEOUT {
                return Err(QueueError::Unavailable {
                    why: format!("{}: the new topic does not appear", self.url),
                });
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Sends the messages and waits until the broker has confirmed all.
    pub(crate) async fn send(&self, messages: &[Message]) -> Result<(), QueueError> {
        if self.partitions.load(Ordering::SeqCst) == 0 {
            self.clone().blocking(|publisher| publisher.wait_for_metadata()).await?;
        }
        for window in messages.chunks(UNCONFIRMED_MAX) {
            let bodies = window
                .iter()
                .map(|message| message.encode_signed(&self.resolved.signing))
                .collect::<Result<Vec<_>, _>>()?;
            let sends = bodies.iter().map(|body| self.send_body(body, 0));
            futures::future::try_join_all(sends).await?;
        }
        Ok(())
    }

    /// Sends one message unchanged.
    pub(crate) async fn send_body(&self, body: &[u8], hops: u32) -> Result<(), QueueError> {
        let hops = hops.to_string();
        let mut record: FutureRecord<'_, (), [u8]> = FutureRecord::to(&self.url.topic).payload(body);
        if hops != "0" {
            record = record.headers(OwnedHeaders::new().insert(Header {
                key: HOPS_HEADER,
                value: Some(&hops),
            }));
        }
        let partitions = self.partitions.load(Ordering::SeqCst);
        if partitions > 0 {
            // Round-robin by hand: the default partitioner sticks to one partition for a while.
            let next_message = self.next_message.fetch_add(1, Ordering::SeqCst) % partitions;
            record = record.partition(i32::try_from(next_message).unwrap_or(0));
        }
        match self.producer.send(record, self.resolved.settings.send_timeout).await {
            Ok(_) => Ok(()),
            Err((error, _)) => Err(self.send_error(&error)),
        }
    }

    fn send_error(&self, error: &KafkaError) -> QueueError {
        let address = self.url.to_string();
        let code = error.rdkafka_error_code().unwrap_or(Code::Unknown);
        if error_class(code) == ErrorClass::Denied {
            return QueueError::Denied {
                why: denied_message(&address, code),
            };
        }
        match self.listener.take() {
            Some(reported_error) if reported_error.class == ErrorClass::Denied => {
                connect_error(Some(reported_error), &address)
            }
            Some(ReportedError { why, .. }) => QueueError::Unavailable {
                why: format!("{address}: {code}: {why}"),
            },
            None => QueueError::Unavailable {
                why: format!("{address}: {code}"),
            },
        }
    }

    /// Sets the number of partitions over which messages are spread.
    pub(crate) fn set_partitions(&self, partitions: u32) {
        self.partitions.store(partitions, Ordering::SeqCst);
    }
}

/// Passes messages on after a delay, on its own thread.
pub(crate) struct Republisher {
    io: IoThread,
    pub publisher: KafkaPublisher,
    delay: Duration,
}

impl Republisher {
    pub(super) fn new(publisher: KafkaPublisher, delay: Duration) -> Result<Republisher, QueueError> {
        Ok(Republisher {
            io: IoThread::start("gristmill-kafka")?,
            publisher,
            delay,
        })
    }

    /// Sends the message after the delay, and retries until the broker has confirmed it or
    /// `is_stale` returns true. Then calls `on_end` with true if the message was sent.
    pub(super) fn republish_later(
        &self,
        body: Vec<u8>,
        hops: u32,
        is_stale: impl Fn() -> bool + Send + 'static,
        on_end: impl FnOnce(bool) + Send + 'static,
    ) {
        let (publisher, delay) = (self.publisher.clone(), self.delay);
        self.io.spawn(async move {
            loop {
                tokio::time::sleep(delay).await;
                if is_stale() {
                    return on_end(false);
                }
                match publisher.send_body(&body, hops).await {
                    Ok(()) => return on_end(true),
                    Err(error) => {
                        tracing::warn!(queue = %publisher.url, "cannot pass a message on, trying again: {error}")
                    }
                }
            }
        });
    }
}
