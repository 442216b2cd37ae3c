//! The queue's address and properties, from the command line or the job file, for commands that
//! enqueue and workers that receive.

use std::sync::Arc;

use anyhow::anyhow;
use serde_json::{Value, json};

use crate::cli::args::QueueArgs;
use crate::cli::exit::Failure;
use crate::job::queue::{JobQueue, environment_name};
use crate::ledger::Ledger;
use crate::queue::properties::is_secret;
use crate::queue::{self, AddressOrigin, PreparedQueue, Publisher, Queue, QueueError, QueueUrl, Settings};
use crate::report::summary::{counted, number};
use crate::worker::messages;

/// A queue that is not connected yet.
pub(super) struct QueueTarget {
    url: QueueUrl,
    settings: Settings,
}

/// A connected queue.
pub(super) struct Enqueuer {
    /// The address without secrets.
    pub url: String,
    publisher: Publisher,
}

/// Result of enqueuing.
pub(super) struct Enqueued {
    /// The address without secrets.
    pub url: String,
    pub messages: u64,
    pub prepared: PreparedQueue,
}

impl QueueTarget {
    /// The queue at `url`, with these properties of librdkafka from the command line.
    ///
    /// # Errors
    /// An invalid address or property, or a secret on the command line.
    pub(super) fn new(url: &str, kafka: Vec<(String, String)>, in_flight: u32) -> Result<QueueTarget, Failure> {
        if let Some((name, _)) = kafka.iter().find(|(name, _)| is_secret(name)) {
            let variable = environment_name(name);
            return Err(Failure::bad_job(anyhow!(
                "`--kafka {name}=…` puts a secret on the command line, where other users see it: put it in `{variable}` in \
                 the environment, or in a file that `{variable}_FILE` names"
            )));
        }
        Ok(QueueTarget {
            url: url.parse().map_err(Failure::bad_job)?,
            settings: Settings {
                kafka,
                in_flight,
                ..Settings::default()
            },
        })
    }

    /// The queue of `--queue`, else of the job file; `None` if neither names one. The job file's
    /// properties apply only to the address that the job file names.
    ///
    /// # Errors
    /// Like [`QueueTarget::new`].
    pub(super) fn find(args: &QueueArgs, job: Option<&JobQueue>) -> Result<Option<QueueTarget>, Failure> {
        let in_flight = Settings::default().in_flight;
        match (&args.queue, job) {
            (Some(url), _) => QueueTarget::new(url, args.kafka.clone(), in_flight).map(Some),
            (None, None) => Ok(None),
            (None, Some(job)) => {
                let mut target = QueueTarget::new(&job.url, args.kafka.clone(), in_flight)?;
                target.settings.origin = AddressOrigin::JobFile;
                // The last value of a name is used, so the command line overrides the job file.
                target.settings.kafka.splice(0..0, job.kafka.iter().cloned());
                Ok(Some(target))
            }
        }
    }

    /// Like [`QueueTarget::find`], but a queue must be named.
    pub(super) fn required(args: &QueueArgs) -> Result<QueueTarget, Failure> {
        QueueTarget::find(args, None)?.ok_or_else(|| Failure::bad_job(anyhow!("no queue: give `--queue URL`")))
    }

    /// Connects as a consumer.
    pub(super) async fn consume(&self) -> Result<Arc<dyn Queue>, QueueError> {
        queue::connect(&self.url, &self.settings).await
    }

    /// The address without secrets.
    pub(super) fn url(&self) -> String {
        self.url.to_string()
    }

    /// Connects to the broker and describes the topic or queue; `None` if it does not exist.
    /// Creates nothing.
    pub(super) async fn probe(&self) -> Result<Option<PreparedQueue>, Failure> {
        let publisher = Publisher::open(&self.url, &self.settings)
            .await
            .map_err(queue_failure)?;
        publisher.find_existing().await.map_err(queue_failure)
    }

    /// Connects as a producer.
    pub(super) async fn connect(&self) -> Result<Enqueuer, Failure> {
        self.open().await.map_err(queue_failure)
    }

    /// Like [`QueueTarget::connect`], for callers that distinguish errors.
    pub(super) async fn open(&self) -> Result<Enqueuer, QueueError> {
        Ok(Enqueuer {
            url: self.url.to_string(),
            publisher: Publisher::open(&self.url, &self.settings).await?,
        })
    }
}

impl Enqueuer {
    /// Creates the topic or queue if necessary, and sends a message for each of these shards of the
    /// ledger's generation. Returns when the broker has confirmed all messages.
    pub(super) async fn send(&self, ledger: &Ledger, shards: &[u32]) -> Result<Enqueued, Failure> {
        let operation = || format!("enqueuing to `{}`", self.url);
        let count = shards.len() as u64;
        let prepared = self.publisher.prepare(count).await.map_err(queue_failure);
        let prepared = prepared.map_err(|failure| failure.context(operation()))?;
        let messages = messages(ledger, &order_for_partitions(shards, prepared.partitions.unwrap_or(1)));
        let sent = self.publisher.send(&messages).await.map_err(queue_failure);
        sent.map_err(|failure| failure.context(operation()))?;
        Ok(Enqueued {
            url: self.url.clone(),
            messages: count,
            prepared,
        })
    }
}

impl Enqueued {
    /// For the terminal: `2,442 shards to kafka://…, whose 256 partitions feed up to 256 workers`.
    pub(super) fn line(&self) -> String {
        let capacity_text = capacity_text(&self.prepared);
        let created = if self.prepared.created { " (made now)" } else { "" };
        format!(
            "{} to {}{created}{capacity_text}",
            counted(self.messages, "shard"),
            self.url
        )
    }

    /// For `--json`.
    pub(super) fn json(&self) -> Value {
        json!({
            "url": self.url,
            "messages": self.messages,
            "created": self.prepared.created,
            "partitions": self.prepared.partitions,
        })
    }
}

/// Says how many workers a topic or queue can feed; the text follows the queue's address.
pub(super) fn capacity_text(prepared: &PreparedQueue) -> String {
    match prepared.partitions {
        Some(1) => ", whose one partition feeds one worker".to_string(),
        Some(n) => format!(", whose {0} partitions feed up to {0} workers", number(n.into())),
        None => ", which feeds any number of workers".to_string(),
    }
}

/// Orders the shards so that each partition gets a run of neighbouring shards, although messages
/// are distributed round-robin. A partition has one worker, and shards of one row group share
/// pages.
fn order_for_partitions(shards: &[u32], partitions: u32) -> Vec<u32> {
    let partitions = (partitions as usize).max(1);
    let (length, longer_runs) = (shards.len() / partitions, shards.len() % partitions);
    let start = |partition: usize| partition * length + partition.min(longer_runs);
    let rounds = 0..=length;
    let slots = rounds.flat_map(|round| (0..partitions).map(move |partition| (round, partition)));
    let ordered = slots.filter_map(|(round, partition)| shards[start(partition)..start(partition + 1)].get(round));
    ordered.copied().collect()
}

/// Settings that cannot reach the broker are the caller's error (exit code 2); other errors are
/// failures.
pub(super) fn queue_failure(error: QueueError) -> Failure {
    match error {
        QueueError::Settings { .. } | QueueError::UnknownHost { .. } => Failure::bad_job(error),
        _ => Failure::from(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(queue: Option<&str>, kafka: &[(&str, &str)], job: &JobQueue) -> Settings {
        let args = QueueArgs {
            queue: queue.map(str::to_owned),
            kafka: kafka.iter().map(|&(a, b)| (a.to_owned(), b.to_owned())).collect(),
        };
        let target = QueueTarget::find(&args, Some(job)).ok().flatten().expect("a queue");
        target.settings
    }

    #[test]
    fn properties_of_a_job_file_apply_to_its_own_address_only() {
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let job = JobQueue {
            url: "kafka://h/t".into(),
            kafka: vec![pair("linger.ms", "5"), pair("batch.size", "9")],
        };
        let own = found(None, &[("linger.ms", "7")], &job);
        assert_eq!(own.origin, AddressOrigin::JobFile);
        assert_eq!(
            own.kafka,
            [pair("linger.ms", "5"), pair("batch.size", "9"), pair("linger.ms", "7")]
        );
        let other = found(Some("kafka://h/t"), &[("linger.ms", "7")], &job);
        assert_eq!(other.origin, AddressOrigin::Operator);
        assert_eq!(other.kafka, [pair("linger.ms", "7")]);
    }

    #[test]
    fn a_partition_gets_neighbouring_shards() {
        for (count, partitions) in [(0, 3), (2, 5), (6, 3), (8, 3), (7, 1), (100, 7)] {
            let shards: Vec<u32> = (0..count).map(|n| n * 10).collect();
            let ordered = order_for_partitions(&shards, partitions);
            let mut sorted = ordered.clone();
            sorted.sort();
            assert_eq!(sorted, shards, "each once");
            for partition in 0..partitions as usize {
                let own: Vec<u32> = ordered
                    .iter()
                    .skip(partition)
                    .step_by(partitions as usize)
                    .copied()
                    .collect();
                assert!(
                    own.windows(2).all(|pair| pair[1] == pair[0] + 10),
                    "{count} over {partitions}: {own:?}"
                );
            }
        }
    }
}
