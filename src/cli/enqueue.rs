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
use crate::queue::{self, Origin, Prepared, Publisher, Queue, QueueError, QueueUrl, Settings};
use crate::report::summary::{counted, number};
use crate::worker::messages;

/// A queue that is not connected yet.
pub(super) struct Target {
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
pub(super) struct Sent {
    /// The address without secrets.
    pub url: String,
    pub messages: u64,
    pub prepared: Prepared,
}

impl Target {
    /// The queue at `url`, with these properties of librdkafka from the command line.
    ///
    /// # Errors
    /// An invalid address or property, or a secret on the command line.
    pub(super) fn new(url: &str, kafka: Vec<(String, String)>, in_flight: u32) -> Result<Target, Failure> {
        if let Some((name, _)) = kafka.iter().find(|(name, _)| is_secret(name)) {
            let variable = environment_name(name);
            return Err(Failure::bad_job(anyhow!(
                "`--kafka {name}=…` puts a secret on the command line, where other users see it: put it in `{variable}` in \
                 the environment, or in a file that `{variable}_FILE` names"
            )));
        }
        Ok(Target {
            url: url.parse().map_err(Failure::bad_job)?,
            settings: Settings {
                kafka,
                in_flight,
                ..Settings::default()
            },
        })
    }

    /// The queue of `--queue`, else of the job file; `None` if neither names one. The job file's
    /// properties only apply to the job file's own address.
    ///
    /// # Errors
    /// Like [`Target::new`].
    pub(super) fn find(args: &QueueArgs, job: Option<&JobQueue>) -> Result<Option<Target>, Failure> {
        let in_flight = Settings::default().in_flight;
        match (&args.queue, job) {
            (Some(url), _) => Target::new(url, args.kafka.clone(), in_flight).map(Some),
            (None, None) => Ok(None),
            (None, Some(job)) => {
                let mut target = Target::new(&job.url, args.kafka.clone(), in_flight)?;
                target.settings.origin = Origin::JobFile;
                // For duplicate names, the last value is used.
                target.settings.kafka.splice(0..0, job.kafka.iter().cloned());
                Ok(Some(target))
            }
        }
    }

    /// Like [`Target::find`], but a queue must be named.
    pub(super) fn required(args: &QueueArgs) -> Result<Target, Failure> {
        Target::find(args, None)?.ok_or_else(|| Failure::bad_job(anyhow!("no queue: give `--queue URL`")))
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
    pub(super) async fn look(&self) -> Result<Option<Prepared>, Failure> {
        let publisher = Publisher::open(&self.url, &self.settings).await.map_err(refusal)?;
        publisher.look().await.map_err(refusal)
    }

    /// Connects as a producer.
    pub(super) async fn connect(&self) -> Result<Enqueuer, Failure> {
        let publisher = Publisher::open(&self.url, &self.settings).await.map_err(refusal)?;
        Ok(Enqueuer {
            url: self.url.to_string(),
            publisher,
        })
    }
}

impl Enqueuer {
    /// Creates the topic or queue if necessary, and sends a message for each of these shards of the
    /// ledger's generation. Returns when the broker has confirmed all messages.
    pub(super) async fn send(&self, ledger: &Ledger, shards: &[u32]) -> Result<Sent, Failure> {
        let doing = || format!("enqueuing to `{}`", self.url);
        let count = shards.len() as u64;
        let prepared = self.publisher.prepare(count).await.map_err(refusal);
        let prepared = prepared.map_err(|failure| failure.context(doing()))?;
        let messages = messages(ledger, &in_runs(shards, prepared.partitions.unwrap_or(1)));
        let sent = self.publisher.send(&messages).await.map_err(refusal);
        sent.map_err(|failure| failure.context(doing()))?;
        Ok(Sent {
            url: self.url.clone(),
            messages: count,
            prepared,
        })
    }
}

impl Sent {
    /// For the terminal: `2,442 shards to kafka://…, whose 256 partitions feed up to 256 workers`.
    pub(super) fn line(&self) -> String {
        let feeds = feeds(&self.prepared);
        let made = if self.prepared.created { " (made now)" } else { "" };
        format!("{} to {}{made}{feeds}", counted(self.messages, "shard"), self.url)
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

/// The number of workers that a topic or queue can feed, in words; the text follows the queue's
/// name.
pub(super) fn feeds(prepared: &Prepared) -> String {
    match prepared.partitions {
        Some(1) => ", whose one partition feeds one worker".to_string(),
        Some(n) => format!(", whose {0} partitions feed up to {0} workers", number(n.into())),
        None => ", which feeds any number of workers".to_string(),
    }
}

/// Orders the shards so that each partition gets a run of neighbouring shards, given that messages
/// are distributed round-robin. Shards of one row group share pages, and a partition has one
/// worker.
fn in_runs(shards: &[u32], partitions: u32) -> Vec<u32> {
    let parts = (partitions as usize).max(1);
    let (length, longer) = (shards.len() / parts, shards.len() % parts);
    let start = |part: usize| part * length + part.min(longer);
    let rounds = 0..=length;
    let turns = rounds.flat_map(|round| (0..parts).map(move |part| (round, part)));
    let dealt = turns.filter_map(|(round, part)| shards[start(part)..start(part + 1)].get(round));
    dealt.copied().collect()
}

/// Settings that cannot reach the broker are the caller's error (exit code 2); other errors are
/// failures.
fn refusal(error: QueueError) -> Failure {
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
        let target = Target::find(&args, Some(job)).ok().flatten().expect("a queue");
        target.settings
    }

    #[test]
    fn what_a_job_file_says_of_its_queue_holds_for_its_own_address_alone() {
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let job = JobQueue {
            url: "kafka://h/t".into(),
            kafka: vec![pair("linger.ms", "5"), pair("batch.size", "9")],
        };
        let own = found(None, &[("linger.ms", "7")], &job);
        assert_eq!(own.origin, Origin::JobFile);
        assert_eq!(
            own.kafka,
            [pair("linger.ms", "5"), pair("batch.size", "9"), pair("linger.ms", "7")]
        );
        let other = found(Some("kafka://h/t"), &[("linger.ms", "7")], &job);
        assert_eq!(other.origin, Origin::Operator);
        assert_eq!(other.kafka, [pair("linger.ms", "7")]);
    }

    #[test]
    fn a_partition_gets_neighbours() {
        for (count, partitions) in [(0, 3), (2, 5), (6, 3), (8, 3), (7, 1), (100, 7)] {
            let shards: Vec<u32> = (0..count).map(|n| n * 10).collect();
            let dealt = in_runs(&shards, partitions);
            let mut sorted = dealt.clone();
            sorted.sort();
            assert_eq!(sorted, shards, "each once");
            for part in 0..partitions as usize {
                let own: Vec<u32> = dealt.iter().skip(part).step_by(partitions as usize).copied().collect();
                assert!(
                    own.windows(2).all(|pair| pair[1] == pair[0] + 10),
                    "{count} over {partitions}: {own:?}"
                );
            }
        }
    }
}
