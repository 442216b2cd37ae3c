//! Finds the first job for a worker without `--model`, whose model is then loaded: the job of the
//! first usable message.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::cli::exit::{Failure, one_line};
use crate::dataset::store::location::Location;
use crate::fetch::ModelAddress;
use crate::job::Job;
use crate::ledger::Ledger;
use crate::ledger::keys::JOB;
use crate::queue::{Delivery, Queue};
use crate::worker::access::Access;
use crate::worker::idle::IdleState;
use crate::worker::opening::suspect_reason;
use crate::worker::pace::RequeuePace;
use crate::worker::pass_on_later;
use crate::worker::refusals::Refusals;
use crate::worker::retry_policy::{RetryDecision, RetryPolicy};
use crate::worker::stop::Stop;
use crate::worker::watched::{NoJob, WatchedJobs};

/// Timeout of one receive.
const RECEIVE_WAIT: Duration = Duration::from_secs(1);
/// Initial timeout for reading a record, while other messages wait; doubles with each retry.
const OPEN_TIMEOUT: Duration = Duration::from_secs(10);
/// Minimum time between two tries of an output or watched job whose store has failed.
const RETRY_EVERY: Duration = Duration::from_secs(10);

/// Searches for a job that this worker can start with.
pub(super) struct FirstJobSearch<'a> {
    pub queue: &'a Arc<dyn Queue>,
    pub access: &'a Access,
    pub retry_policy: RetryPolicy,
    /// Jobs of `--job`, none of which could be opened yet. The first that can be opened is a
    /// result, too.
    pub watched: &'a WatchedJobs,
    /// Ends the search after this time without a message.
    pub ends_after: Option<Duration>,
    pub stop: &'a Stop,
}

/// Result of the search.
pub(super) enum SearchOutcome {
    Found(Box<FoundJob>),
    /// The worker was told to stop, or no usable message arrived. `refused` counts the messages
    /// that arrived.
    Nothing {
        refused: usize,
    },
}

/// The job to start with.
pub(super) struct FoundJob {
    pub ledger: Ledger,
    pub job: Job,
    /// Whether it is a job of `--job`.
    pub is_watched: bool,
    /// Outputs of other jobs whose stores have failed; their messages are delivered again.
    pub failing_outputs: Vec<(String, anyhow::Error)>,
}

/// Outputs whose stores have failed.
#[derive(Default)]
struct FailingOutputs {
    outputs: HashMap<String, FailedOutput>,
    /// Since when at least one output has been failing.
    since: Option<Instant>,
}

struct FailedOutput {
    tries: u32,
    last_try: Instant,
    error: anyhow::Error,
}

impl FailingOutputs {
    fn is_empty(&self) -> bool {
        self.outputs.is_empty()
    }

    /// Number of tries of this output so far; `None` if the last try was too recent.
    fn tries(&self, output: &str) -> Option<u32> {
        match self.outputs.get(output) {
            Some(failed) if failed.last_try.elapsed() < RETRY_EVERY => None,
            failed => Some(failed.map_or(0, |failed| failed.tries)),
        }
    }

    /// Records a failed try. Returns since when at least one output has been failing.
    fn note(&mut self, output: String, tries: u32, error: anyhow::Error) -> Instant {
        let last_try = Instant::now();
        self.outputs.insert(output, FailedOutput { tries, last_try, error });
        *self.since.get_or_insert(last_try)
    }

    /// Removes an output whose store has responded.
    fn remove(&mut self, output: &str) {
        self.outputs.remove(output);
        self.reset_if_empty();
    }

    /// Forgets outputs of which no message arrived for `after`: another worker has taken it.
    fn forget_older_than(&mut self, after: Duration) {
        self.outputs.retain(|_, failed| failed.last_try.elapsed() < after);
        self.reset_if_empty();
    }

    fn reset_if_empty(&mut self) {
        if self.outputs.is_empty() {
            self.since = None;
        }
    }

    fn into_errors(self) -> Vec<(String, anyhow::Error)> {
        let outputs = self.outputs.into_iter();
        outputs.map(|(output, failed)| (output, failed.error)).collect()
    }
}

/// Result of checking a message.
enum MessageCheck {
    Found(Box<(Ledger, Job)>),
    /// Why this worker cannot start with it; other workers may.
    NotOurs(String),
    /// Its store does not respond.
    Later(anyhow::Error),
}

impl FirstJobSearch<'_> {
    /// # Errors
    /// The queue, or every store that messages name, has been unavailable for longer than the
    /// worker waits.
    pub(super) async fn find(&self) -> Result<SearchOutcome, Failure> {
        let (mut idle, mut pace) = (IdleState::default(), RequeuePace::default());
        let (mut failing, refusals) = (FailingOutputs::default(), Refusals::default());
        let mut polling = WatchPolling::default();
        // One message arrives several times, with its hop count increased each time.
        let mut refused = HashSet::new();
        while !self.stop.is_set() {
            if let Some((ledger, job)) = self.open_watched(&mut polling).await? {
                let failing = failing.into_errors();
                return Ok(found_job(ledger, job, true, failing));
            }
            let mut is_refused = false;
            let received = match self.queue.receive(RECEIVE_WAIT).await {
                Ok(received) => received,
                Err(error) => {
                    is_refused = true;
                    self.retry_policy
                        .backoff(error.into(), &mut idle.refusal_pauses, self.stop)
                        .await?;
                    None
                }
            };
            let Some(delivery) = received else {
                let away = idle.note_empty(self.queue.is_attached());
                if !is_refused {
                    self.retry_policy.check_queue_wait(away)?;
                }
                let must_wait = !failing.is_empty() || !self.watched.are_all_open();
                if !must_wait && self.ends_after.is_some_and(|time| idle.clock.has_run_for(time)) {
                    break;
                }
                // Messages of failing outputs arrive again, unless another worker has taken them.
                failing.forget_older_than(2 * RETRY_EVERY);
                continue;
            };
            idle = IdleState::default();
            let output = delivery.message.output.clone();
            let Some(tries) = failing.tries(&output) else {
                self.queue.requeue_last(&delivery).await?;
                pace.pause().await;
                continue;
            };
            match self.check_message(&delivery, tries).await {
                MessageCheck::Found(opened) => {
                    self.queue.give_back(&delivery).await?;
                    failing.remove(&output);
                    let (ledger, job) = *opened;
                    return Ok(found_job(ledger, job, false, failing.into_errors()));
                }
                MessageCheck::NotOurs(why) => {
                    failing.remove(&output);
                    refusals.report(&delivery, &why);
                    let message = &delivery.message;
                    refused.insert((output, message.job.clone(), message.generation, message.shard));
                    pass_on_later(self.queue.clone(), Arc::new(delivery));
                }
                MessageCheck::Later(error) => {
                    self.retry_policy.report(&error);
                    let why = one_line(&error);
                    let since = failing.note(output, tries + 1, error);
                    self.check_wait(since, why)?;
                    self.queue.requeue_last(&delivery).await?;
                }
            }
        }
        Ok(SearchOutcome::Nothing { refused: refused.len() })
    }

    /// # Errors
    /// The store, which last failed for the reason `why`, has failed for too long.
    fn check_wait(&self, since: Instant, why: String) -> Result<(), Failure> {
        let waited = since.elapsed();
        if self.retry_policy.is_wait_over(waited) {
            Err(anyhow::anyhow!("waited for {} s: {why}", waited.as_secs()).into())
        } else {
            Ok(())
        }
    }

    /// Opens watched jobs; returns the first that could be opened.
    async fn open_watched(&self, polling: &mut WatchPolling) -> Result<Option<(Ledger, Job)>, Failure> {
        if self.watched.are_all_open() || polling.last_try.is_some_and(|last| last.elapsed() < RETRY_EVERY) {
            return Ok(None);
        }
        let failed = self.watched.open(&self.retry_policy).await.map_err(watch_failure)?;
        polling.last_try = Some(Instant::now());
        if let Some(ledger) = self.watched.ledgers().into_iter().next() {
            let job = watched_job(&ledger, self.access)?;
            return Ok(Some((ledger, job)));
        }
        if let Some(error) = failed {
            self.retry_policy.report(&error);
            let since = *polling.failing_since.get_or_insert_with(Instant::now);
            self.check_wait(since, one_line(&error))?;
        }
        Ok(None)
    }

    /// Checks whether this worker can start with the message's job. Reads nothing if the output is
    /// not accepted, and tries a store once.
    async fn check_message(&self, delivery: &Delivery, tries: u32) -> MessageCheck {
        if let Some(why) = suspect_reason(delivery) {
            return MessageCheck::NotOurs(why);
        }
        let output = match Location::parse(&delivery.message.output, Path::new("/")) {
            Ok(output) => output,
            Err(error) => return MessageCheck::NotOurs(one_line(&error.into())),
        };
        if let Some(why) = self.access.output_refusal(&output) {
            return MessageCheck::NotOurs(why);
        }
        let timeout = OPEN_TIMEOUT.saturating_mul(1 << tries.min(4));
        let ledger = match tokio::time::timeout(timeout, Ledger::open(&output)).await {
            Ok(Ok(Some(ledger))) => ledger,
            Ok(Ok(None)) => return MessageCheck::NotOurs("it holds no job".to_string()),
            Ok(Err(error)) => {
                let error = anyhow::Error::from(error);
                return match self.retry_policy.decision(&error) {
                    RetryDecision::Wait => MessageCheck::Later(error),
                    RetryDecision::LeaveShard | RetryDecision::End => MessageCheck::NotOurs(one_line(&error)),
                };
            }
            Err(_) => {
                let (output, seconds) = (&delivery.message.output, timeout.as_secs());
                return MessageCheck::Later(anyhow::anyhow!("`{output}` has not answered for {seconds} s"));
            }
        };
        let inputs = ledger.job().inputs.iter().map(|input| input.url.as_str());
        if let Some(why) = self.access.inputs_refusal(&output, inputs) {
            return MessageCheck::NotOurs(why);
        }
        let job = match Job::from_record(&ledger.job().resolved, &ledger.store().address(JOB)) {
            Ok(job) => job,
            Err(error) => return MessageCheck::NotOurs(error.to_string()),
        };
        match model_refusal(&job, self.access) {
            None => MessageCheck::Found(Box::new((ledger, job))),
            Some(why) => MessageCheck::NotOurs(why),
        }
    }
}

/// State of polling the watched jobs.
#[derive(Default)]
struct WatchPolling {
    last_try: Option<Instant>,
    /// Time of the first failure to open them.
    failing_since: Option<Instant>,
}

fn found_job(
    ledger: Ledger,
    job: Job,
    is_watched: bool,
    failing_outputs: Vec<(String, anyhow::Error)>,
) -> SearchOutcome {
    SearchOutcome::Found(Box::new(FoundJob {
        ledger,
        job,
        is_watched,
        failing_outputs,
    }))
}

/// The error for a watched job; a missing job is the caller's mistake.
pub(super) fn watch_failure(error: anyhow::Error) -> Failure {
    if error.is::<NoJob>() {
        Failure::bad_job(error)
    } else {
        Failure::from(error)
    }
}

/// The job of a watched ledger; fails if its model must not be loaded.
pub(super) fn watched_job(ledger: &Ledger, access: &Access) -> Result<Job, Failure> {
    let job = Job::from_record(&ledger.job().resolved, &ledger.store().address(JOB))?;
    match model_refusal(&job, access) {
        Some(why) => Err(Failure::bad_job(anyhow::anyhow!(why))),
        None => Ok(job),
    }
}

/// Why the operator's settings forbid to load the job's model or its adapter; `None` if they allow it.
fn model_refusal(job: &Job, access: &Access) -> Option<String> {
    let mut addresses = std::iter::once(&job.model).chain(&job.adapter);
    addresses.find_map(|address| address_refusal(job, address, access))
}

/// An address that leads nowhere is reported later, when it is opened.
fn address_refusal(job: &Job, address: &str, access: &Access) -> Option<String> {
    match ModelAddress::parse(address, &job.base_dir).ok()? {
        ModelAddress::Folder(dir) if dir.exists() => access.model_refusal(&dir),
        ModelAddress::Folder(_) => None,
        ModelAddress::Hub(model) => access.fetched_model_refusal(&model.repository_address()),
        ModelAddress::Store(location) => access.fetched_model_refusal(location.url.as_str()),
    }
}

#[cfg(test)]
mod tests {
    use async_trait::async_trait;

    use super::*;
    use crate::job::Parameters;
    use crate::queue::{LocalQueue, Message, QueueError, Recall};
    use crate::worker::access::AccessOptions;

    /// A queue that refuses connections, or an in-memory queue.
    struct MaybeRefusing(Option<LocalQueue>);

    #[async_trait]
    impl Queue for MaybeRefusing {
        async fn receive(&self, wait: Duration) -> Result<Option<Delivery>, QueueError> {
            match &self.0 {
                Some(queue) => queue.receive(wait).await,
                None => Err(QueueError::Denied {
                    why: "a wrong password".into(),
                }),
            }
        }
        async fn extend(&self, _: &Delivery, _: Duration) -> Result<(), QueueError> {
            Ok(())
        }
        async fn acknowledge(&self, _: &Delivery) -> Result<(), QueueError> {
            Ok(())
        }
        async fn give_back(&self, _: &Delivery) -> Result<(), QueueError> {
            Ok(())
        }
        async fn forward(&self, _: &Delivery) -> Result<bool, QueueError> {
            Ok(true)
        }
        async fn requeue_last(&self, _: &Delivery) -> Result<(), QueueError> {
            Ok(())
        }
        async fn next_recall(&self) -> Recall {
            std::future::pending().await
        }
        fn is_attached(&self) -> bool {
            self.0.is_some()
        }
    }

    async fn search(queue: Option<LocalQueue>) -> Result<SearchOutcome, Failure> {
        let queue: Arc<dyn Queue> = Arc::new(MaybeRefusing(queue));
        let search = FirstJobSearch {
            queue: &queue,
            access: &Access::everything(),
            retry_policy: RetryPolicy::with_wait_max(Duration::from_secs(1)),
            watched: &WatchedJobs::default(),
            ends_after: Some(Duration::from_millis(100)),
            stop: &Stop::default(),
        };
        tokio::time::timeout(Duration::from_secs(30), search.find())
            .await
            .unwrap()
    }

    #[tokio::test]
    async fn a_queue_that_refuses_is_waited_for_with_a_limit() {
        let failure = search(None).await.map(drop).unwrap_err();
        let error = format!("{:#}", failure.error);
        assert!(
            error.starts_with("waited for ") && error.contains("a wrong password"),
            "{error}"
        );
    }

    #[tokio::test]
    async fn messages_without_a_job_are_counted_as_refused() {
        let message = |shard| Message::new("gone", "/nowhere/at/all", 0, shard);
        let queue = LocalQueue::new((0..100).map(message));
        let refused = match search(Some(queue)).await.unwrap() {
            SearchOutcome::Nothing { refused } => refused,
            SearchOutcome::Found(first) => panic!("{}", first.ledger.store().url()),
        };
        assert_eq!(refused, 100, "they came, and that is told");
    }

    #[test]
    fn the_wait_for_stores_begins_anew_once_none_fails() {
        let away = || anyhow::anyhow!("away");
        let mut failing = FailingOutputs::default();
        assert_eq!(failing.tries("a"), Some(0));
        let first = failing.note("a".into(), 1, away());
        assert_eq!(failing.tries("a"), None, "it was tried a moment ago");
        assert_eq!(failing.note("b".into(), 1, away()), first);
        failing.remove("a");
        assert_eq!(failing.since, Some(first), "the other one fails still");
        failing.remove("b");
        assert_eq!(failing.since, None);
        failing.note("a".into(), 1, away());
        failing.forget_older_than(Duration::from_secs(60));
        assert!(failing.since.is_some() && !failing.is_empty());
        failing.forget_older_than(Duration::ZERO);
        assert!(failing.since.is_none() && failing.into_errors().is_empty());
    }

    /// An adapter is read, and may be fetched, as a model is.
    #[test]
    fn an_adapter_needs_the_permission_of_a_model() {
        let folder = tempfile::tempdir().unwrap();
        let refusal = |adapter: &str, models: &[&str]| {
            let path = folder.path().join("job.yaml");
            let text = format!(
                "name: a\nmodel: hf://org/base\nadapter: {adapter}\ninput: {{uri: rows.jsonl}}\nprompt: {{text: x}}\n\
                 output: {{uri: out}}\n"
            );
            std::fs::write(&path, text).unwrap();
            let job = Job::load(&path, &Parameters::new(&[]).unwrap()).unwrap();
            let models: Vec<String> = models.iter().map(|model| (*model).to_string()).collect();
            let options = AccessOptions {
                accept_models: &models,
                ..AccessOptions::default()
            };
            model_refusal(&job, &Access::new(&options, Path::new("/")).unwrap())
        };
        let why = refusal("hf://org/adapter", &["hf://org/base"]).unwrap();
        assert!(why.contains("`hf://org/adapter`"), "{why}");
        assert_eq!(
            refusal("hf://org/adapter", &["hf://org/base", "hf://org/adapter"]),
            None
        );
        let dir = folder.path().join("adapter");
        std::fs::create_dir(&dir).unwrap();
        let why = refusal("adapter", &["hf://org/base"]).unwrap();
        assert!(why.contains("adapter"), "{why}");
        assert_eq!(refusal("adapter", &["hf://org/base", &dir.to_string_lossy()]), None);
    }
}
