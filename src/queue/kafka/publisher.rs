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
use super::trouble::{ErrorListener, Kind, Trouble, connect_error, denied, kind};
use crate::queue::address::KafkaUrl;
use crate::queue::foreign::HOPS_HEADER;
use crate::queue::io::IoThread;
use crate::queue::publisher::Prepared;
use crate::queue::settings::Resolved;
use crate::queue::{Message, QueueError};

/// Timeout for the first answer of a broker, and for creating a topic.
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long an unknown host name is retried before it is reported.
pub(crate) const RESOLVE_WAIT: Duration = Duration::from_secs(3);
const METADATA_WAIT: Duration = Duration::from_secs(2);
/// Default maximum of partitions of a new topic, and so of workers that share it. Each partition
/// costs the broker files.
const PARTITIONS_MAX: u64 = 96;
/// Maximum number of messages that wait for their confirmation at once.
const WINDOW: usize = 1000;

/// The state of a topic.
pub(crate) enum Topic {
    Partitions(u32),
    Missing,
}

/// Requests the topic's metadata once. The error is the code of the request or of the topic.
pub(crate) fn fetch_topic<C: rdkafka::ClientContext>(client: &Client<C>, topic: &str) -> Result<Topic, Code> {
    let metadata = client
        .fetch_metadata(Some(topic), METADATA_WAIT)
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
        Some(code) if kind(code) == Kind::NoTopic => Ok(Topic::Missing),
        Some(code) => Err(code),
    }
}

/// Requests the topic's metadata until a broker answers or refuses, or the timeout expires. `heard`
/// returns the error that librdkafka has reported since its last call.
pub(crate) fn wait_for_metadata<C: rdkafka::ClientContext>(
    client: &Client<C>,
    url: &KafkaUrl,
    heard: impl Fn() -> Option<Trouble>,
) -> Result<Topic, QueueError> {
    let address = url.to_string();
    let start = Instant::now();
    let mut trouble: Option<Trouble> = None;
    loop {
        let code = match fetch_topic(client, &url.topic) {
            Ok(topic) => return Ok(topic),
            Err(code) => code,
        };
        if kind(code) == Kind::Denied {
            return Err(QueueError::Denied {
                why: denied(&address, code),
            });
        }
        trouble = match (trouble, heard()) {
            (Some(old), Some(new)) => Some(old.or_more_telling(new)),
            (old, new) => new.or(old),
        };
        let wait = match trouble.as_ref().map(|trouble| trouble.kind) {
            Some(Kind::Denied) => Duration::ZERO,
            Some(Kind::UnknownHost) => RESOLVE_WAIT,
            _ => CONNECT_TIMEOUT,
        };
        if start.elapsed() >= wait {
            return Err(connect_error(trouble, &address));
        }
    }
}

/// An idempotent producer for one topic.
#[derive(Clone)]
pub(crate) struct KafkaPublisher {
    producer: FutureProducer<ErrorListener>,
    listener: ErrorListener,
    url: KafkaUrl,
    resolved: Resolved,
    /// Number of partitions of the topic, as last seen; 0 if unknown.
    partitions: Arc<AtomicU32>,
    /// Number of the next message, which selects its partition round-robin.
    turn: Arc<AtomicU32>,
}

impl KafkaPublisher {
    /// Creates a publisher without connecting.
    pub(crate) fn new(url: &KafkaUrl, resolved: &Resolved) -> Result<KafkaPublisher, QueueError> {
        let listener = ErrorListener::new(resolved.scrub.clone());
        let producer = FutureProducer::from_config_and_context(&config::producer(url, resolved)?, listener.clone())
            .map_err(|error| config::refused(error, resolved))?;
        // A random start: workers that pass messages on must not all begin at the same partition.
        let turn = getrandom::u32().unwrap_or(0) % 65_536;
        Ok(KafkaPublisher {
            producer,
            listener,
            url: url.clone(),
            resolved: resolved.clone(),
            partitions: Arc::default(),
            turn: Arc::new(AtomicU32::new(turn)),
        })
    }

    /// Creates a publisher and waits for an answer of the broker.
    pub(crate) async fn open(url: &KafkaUrl, resolved: &Resolved) -> Result<KafkaPublisher, QueueError> {
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

    /// Returns the existing topic, if there is one.
    pub(crate) async fn find_existing(&self) -> Result<Option<Prepared>, QueueError> {
        let found = self.clone().blocking(|publisher| publisher.wait_for_metadata()).await?;
        Ok(match found {
            Topic::Partitions(n) => Some(Prepared {
                created: false,
                partitions: Some(n),
            }),
            Topic::Missing => None,
        })
    }

    /// Creates the topic if it does not exist.
    pub(crate) async fn prepare(&self, messages: u64) -> Result<Prepared, QueueError> {
        let first = self.clone().blocking(|publisher| publisher.wait_for_metadata()).await?;
        if let Topic::Partitions(n) = first {
            if let Some(asked) = self.url.partitions.filter(|&asked| asked > n) {
                tracing::warn!(
                    queue = %self.url,
                    "{}: the topic was made before, with {n} of the {asked} partitions asked for: it feeds {n} workers at most, \
                     unless you add partitions to it",
                    self.url
                );
            }
            return Ok(Prepared {
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
        Ok(Prepared {
            created,
            partitions: Some(partitions),
        })
    }

    /// Returns whether this call created the topic; false if another process was faster.
    async fn create(&self, partitions: i32) -> Result<bool, QueueError> {
        let address = self.url.to_string();
        let config = config::producer(&self.url, &self.resolved)?;
        let admin: AdminClient<ErrorListener> = AdminClient::from_config_and_context(&config, self.listener.clone())
            .map_err(|error| config::refused(error, &self.resolved))?;
        // A replication factor of -1 selects the broker's default.
        let topic = NewTopic::new(&self.url.topic, partitions, TopicReplication::Fixed(-1));
        let options = AdminOptions::new()
            .request_timeout(Some(CONNECT_TIMEOUT))
            .operation_timeout(Some(CONNECT_TIMEOUT));
        let unavailable = |why: String| QueueError::Unavailable {
            why: format!("{address}: cannot create the topic: {}", self.resolved.scrub.line(&why)),
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
        for window in messages.chunks(WINDOW) {
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
            let turn = self.turn.fetch_add(1, Ordering::SeqCst) % partitions;
            record = record.partition(i32::try_from(turn).unwrap_or(0));
        }
        match self.producer.send(record, self.resolved.settings.send_timeout).await {
            Ok(_) => Ok(()),
            Err((error, _)) => Err(self.failed(&error)),
        }
    }

    fn failed(&self, error: &KafkaError) -> QueueError {
        let address = self.url.to_string();
        let code = error.rdkafka_error_code().unwrap_or(Code::Unknown);
        if kind(code) == Kind::Denied {
            return QueueError::Denied {
                why: denied(&address, code),
            };
        }
        match self.listener.take() {
            Some(trouble) if trouble.kind == Kind::Denied => connect_error(Some(trouble), &address),
            Some(Trouble { why, .. }) => QueueError::Unavailable {
                why: format!("{address}: {code}: {why}"),
            },
            None => QueueError::Unavailable {
                why: format!("{address}: {code}"),
            },
        }
    }

    /// Sets the number of partitions over which messages are spread.
    pub(crate) fn learn(&self, partitions: u32) {
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
    /// `is_stale` returns true. Then calls `sent` with whether the message was sent.
    pub(super) fn republish_later(
        &self,
        body: Vec<u8>,
        hops: u32,
        is_stale: impl Fn() -> bool + Send + 'static,
        sent: impl FnOnce(bool) + Send + 'static,
    ) {
        let (publisher, delay) = (self.publisher.clone(), self.delay);
        self.io.spawn(async move {
            loop {
                tokio::time::sleep(delay).await;
                if is_stale() {
                    return sent(false);
                }
                match publisher.send_body(&body, hops).await {
                    Ok(()) => return sent(true),
                    Err(error) => {
                        tracing::warn!(queue = %publisher.url, "cannot pass a message on, trying again: {error}")
                    }
                }
            }
        });
    }
}
