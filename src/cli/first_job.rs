//! Finds the first job for a worker without `--model`, whose model is then loaded: the job of the
//! first usable message.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::cli::exit::{Failure, one_line};
use crate::cli::prepare::model_dir;
use crate::dataset::store::location::Location;
use crate::job::Job;
use crate::ledger::Ledger;
use crate::ledger::keys::JOB;
use crate::queue::{Delivery, Queue};
use crate::worker::access::Access;
use crate::worker::idle::Idle;
use crate::worker::opening::is_suspect;
use crate::worker::pace::Pace;
use crate::worker::pass_on_later;
use crate::worker::refusals::Refusals;
use crate::worker::retry_policy::{RetryDecision, RetryPolicy};
use crate::worker::stop::Stop;
use crate::worker::watched::{NoJob, Watched};

/// Timeout of one receive.
const RECEIVE_WAIT: Duration = Duration::from_secs(1);
/// Initial timeout for reading a record, while other messages wait; doubles with each retry.
const OPEN_MAX: Duration = Duration::from_secs(10);
/// Minimum time between two tries of an output whose store has failed.
const LOOK_EVERY: Duration = Duration::from_secs(10);

/// Searches for a job that this worker can start with.
pub(super) struct FirstJob<'a> {
    pub queue: &'a Arc<dyn Queue>,
    pub access: &'a Access,
    pub retry_policy: RetryPolicy,
    /// Jobs of `--job`, of which none could be opened yet: the first that opens is a result too.
    pub watched: &'a Watched,
    /// Ends the search after this time without a message.
    pub ends_after: Option<Duration>,
    pub stop: &'a Stop,
}

/// Result of the search.
pub(super) enum Search {
    Found(Box<First>),
    /// The worker was told to stop, or no usable message arrived. `refused` counts the messages
    /// that arrived.
    Nothing {
        refused: usize,
    },
}

/// The job to start with.
pub(super) struct First {
    pub ledger: Ledger,
    pub job: Job,
    /// Whether it is a job of `--job`.
    pub is_watched: bool,
    /// Outputs of other jobs whose stores have failed; their messages are delivered again.
    pub failing: Vec<(String, anyhow::Error)>,
}

/// Outputs whose stores have failed.
#[derive(Default)]
struct Failing {
    outputs: HashMap<String, Failed>,
    /// Start of the period in which some output has failed.
    since: Option<Instant>,
}

struct Failed {
    tries: u32,
    last: Instant,
    error: anyhow::Error,
}

impl Failing {
    fn is_empty(&self) -> bool {
        self.outputs.is_empty()
    }

    /// Number of tries of this output so far; `None` if the last try was too recent.
    fn tries(&self, output: &str) -> Option<u32> {
        match self.outputs.get(output) {
            Some(failed) if failed.last.elapsed() < LOOK_EVERY => None,
            failed => Some(failed.map_or(0, |failed| failed.tries)),
        }
    }

    /// Records a failed try. Returns since when some output has failed.
    fn note(&mut self, output: String, tries: u32, error: anyhow::Error) -> Instant {
        let last = Instant::now();
        self.outputs.insert(output, Failed { tries, last, error });
        *self.since.get_or_insert(last)
    }

    /// Removes an output whose store has responded.
    fn remove(&mut self, output: &str) {
        self.outputs.remove(output);
        self.end_where_empty();
    }

    /// Forgets outputs without a message for `after`: another worker has them.
    fn forget(&mut self, after: Duration) {
        self.outputs.retain(|_, failed| failed.last.elapsed() < after);
        self.end_where_empty();
    }

    fn end_where_empty(&mut self) {
        if self.outputs.is_empty() {
            self.since = None;
        }
    }

    fn into_errors(self) -> Vec<(String, anyhow::Error)> {
        let outputs = self.outputs.into_iter();
        outputs.map(|(output, failed)| (output, failed.error)).collect()
    }
}

/// Result of inspecting a message.
enum Looked {
    Found(Box<(Ledger, Job)>),
    /// Other workers may take it; the reason.
    NotOurs(String),
    /// Its store does not respond.
    Later(anyhow::Error),
}

impl FirstJob<'_> {
    /// # Errors
    /// The queue, or every store that messages name, has been unavailable for longer than the
    /// worker waits.
    pub(super) async fn find(&self) -> Result<Search, Failure> {
        let (mut idle, mut pace) = (Idle::default(), Pace::default());
        let (mut failing, refusals) = (Failing::default(), Refusals::default());
        let mut watch = Watch::default();
        // One message arrives several times, with its hop count increased each time.
        let mut refused = HashSet::new();
        while !self.stop.is_set() {
            if let Some((ledger, job)) = self.look_at_watched(&mut watch).await? {
                let failing = failing.into_errors();
                return Ok(found(ledger, job, true, failing));
            }
            let mut denied = false;
            let received = match self.queue.receive(RECEIVE_WAIT).await {
                Ok(received) => received,
                Err(error) => {
                    denied = true;
                    self.retry_policy
                        .backoff(error.into(), &mut idle.refused, self.stop)
                        .await?;
                    None
                }
            };
            let Some(delivery) = received else {
                let away = idle.look(self.queue.is_attached());
                if !denied {
                    self.retry_policy.still_waits_for_queue(away)?;
                }
                let waits = !failing.is_empty() || !self.watched.are_all_open();
                if !waits && self.ends_after.is_some_and(|time| idle.clock.has_run(time)) {
                    break;
                }
                // Deferred messages arrive again, unless another worker has taken them.
                failing.forget(2 * LOOK_EVERY);
                continue;
            };
            idle = Idle::default();
            let output = delivery.message.output.clone();
            let Some(tries) = failing.tries(&output) else {
                self.queue.requeue_last(&delivery).await?;
                pace.rest().await;
                continue;
            };
            match self.look(&delivery, tries).await {
                Looked::Found(looked) => {
                    self.queue.give_back(&delivery).await?;
                    failing.remove(&output);
                    let (ledger, job) = *looked;
                    return Ok(found(ledger, job, false, failing.into_errors()));
                }
                Looked::NotOurs(why) => {
                    failing.remove(&output);
                    refusals.say(&delivery, &why);
                    let message = &delivery.message;
                    refused.insert((output, message.job.clone(), message.generation, message.shard));
                    pass_on_later(self.queue.clone(), Arc::new(delivery));
                }
                Looked::Later(error) => {
                    self.retry_policy.say(&error);
                    let why = one_line(&error);
                    let since = failing.note(output, tries + 1, error);
                    self.still_waits(since, why)?;
                    self.queue.requeue_last(&delivery).await?;
                }
            }
        }
        Ok(Search::Nothing { refused: refused.len() })
    }

    fn still_waits(&self, since: Instant, why: String) -> Result<(), Failure> {
        let waited = since.elapsed();
        if self.retry_policy.gives_up_after(waited) {
            Err(anyhow::anyhow!("waited for {} s: {why}", waited.as_secs()).into())
        } else {
            Ok(())
        }
    }

    /// The first of the watched jobs that can be opened.
    async fn look_at_watched(&self, watch: &mut Watch) -> Result<Option<(Ledger, Job)>, Failure> {
        if self.watched.are_all_open() || watch.last.is_some_and(|last| last.elapsed() < LOOK_EVERY) {
            return Ok(None);
        }
        let failed = self.watched.open(&self.retry_policy).await.map_err(cannot_watch)?;
        watch.last = Some(Instant::now());
        if let Some(ledger) = self.watched.ledgers().into_iter().next() {
            let job = watched_job(&ledger, self.access)?;
            return Ok(Some((ledger, job)));
        }
        if let Some(error) = failed {
            self.retry_policy.say(&error);
            let since = *watch.since.get_or_insert_with(Instant::now);
            self.still_waits(since, one_line(&error))?;
        }
        Ok(None)
    }

    /// Inspects a message. Reads nothing if the output is not accepted, and tries a store once.
    async fn look(&self, delivery: &Delivery, tries: u32) -> Looked {
        if let Some(why) = is_suspect(delivery) {
            return Looked::NotOurs(why);
        }
        let output = match Location::parse(&delivery.message.output, Path::new("/")) {
            Ok(output) => output,
            Err(error) => return Looked::NotOurs(one_line(&error.into())),
        };
        if let Some(why) = self.access.refuses_output(&output) {
            return Looked::NotOurs(why);
        }
        let most = OPEN_MAX.saturating_mul(1 << tries.min(4));
        let ledger = match tokio::time::timeout(most, Ledger::open(&output)).await {
            Ok(Ok(Some(ledger))) => ledger,
            Ok(Ok(None)) => return Looked::NotOurs("it holds no job".to_string()),
            Ok(Err(error)) => {
                let error = anyhow::Error::from(error);
                return match self.retry_policy.decision(&error) {
                    RetryDecision::Wait => Looked::Later(error),
                    RetryDecision::LeaveShard | RetryDecision::End => Looked::NotOurs(one_line(&error)),
                };
            }
            Err(_) => {
                let (output, seconds) = (&delivery.message.output, most.as_secs());
                return Looked::Later(anyhow::anyhow!("`{output}` has not answered for {seconds} s"));
            }
        };
        let inputs = ledger.job().inputs.iter().map(|input| input.url.as_str());
        if let Some(why) = self.access.refuses_inputs(&output, inputs) {
            return Looked::NotOurs(why);
        }
        let job = match Job::of_record(&ledger.job().resolved, &ledger.store().address(JOB)) {
            Ok(job) => job,
            Err(error) => return Looked::NotOurs(error.to_string()),
        };
        match refused_model(&job, self.access) {
            None => Looked::Found(Box::new((ledger, job))),
            Some(why) => Looked::NotOurs(why),
        }
    }
}

/// State of polling the watched jobs.
#[derive(Default)]
struct Watch {
    last: Option<Instant>,
    /// Time of the first failure to open them.
    since: Option<Instant>,
}

fn found(ledger: Ledger, job: Job, is_watched: bool, failing: Vec<(String, anyhow::Error)>) -> Search {
    Search::Found(Box::new(First {
        ledger,
        job,
        is_watched,
        failing,
    }))
}

/// The error for a watched job; a missing job is the caller's mistake.
pub(super) fn cannot_watch(error: anyhow::Error) -> Failure {
    if error.is::<NoJob>() {
        Failure::bad_job(error)
    } else {
        Failure::from(error)
    }
}

/// The job of a watched ledger; fails if its model must not be loaded.
pub(super) fn watched_job(ledger: &Ledger, access: &Access) -> Result<Job, Failure> {
    let job = Job::of_record(&ledger.job().resolved, &ledger.store().address(JOB))?;
    match refused_model(&job, access) {
        Some(why) => Err(Failure::bad_job(anyhow::anyhow!(why))),
        None => Ok(job),
    }
}

/// Why the job's model must not be loaded. A path that is no folder is reported later, when it is
/// opened.
fn refused_model(job: &Job, access: &Access) -> Option<String> {
    access.refuses_model(&model_dir(job).ok()?)
}

#[cfg(test)]
mod tests {
    use async_trait::async_trait;

    use super::*;
    use crate::queue::{LocalQueue, Message, QueueError, Recall};

    /// A queue that refuses connections, or an in-memory queue.
    struct Refusing(Option<LocalQueue>);

    #[async_trait]
    impl Queue for Refusing {
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
        async fn recalled(&self) -> Recall {
            std::future::pending().await
        }
        fn is_attached(&self) -> bool {
            self.0.is_some()
        }
    }

    async fn searched(queue: Option<LocalQueue>) -> Result<Search, Failure> {
        let queue: Arc<dyn Queue> = Arc::new(Refusing(queue));
        let search = FirstJob {
            queue: &queue,
            access: &Access::everything(),
            retry_policy: RetryPolicy::within(Duration::from_secs(1)),
            watched: &Watched::default(),
            ends_after: Some(Duration::from_millis(100)),
            stop: &Stop::default(),
        };
        tokio::time::timeout(Duration::from_secs(30), search.find())
            .await
            .unwrap()
    }

    #[tokio::test]
    async fn a_queue_that_refuses_is_not_waited_for_without_end() {
        let failure = searched(None).await.map(drop).unwrap_err();
        let error = format!("{:#}", failure.error);
        assert!(
            error.starts_with("waited for ") && error.contains("a wrong password"),
            "{error}"
        );
    }

    #[tokio::test]
    async fn nothing_comes_of_messages_that_point_nowhere() {
        let nowhere = |shard| Message::new("gone", "/nowhere/at/all", 0, shard);
        let queue = LocalQueue::new((0..100).map(nowhere));
        let refused = match searched(Some(queue)).await.unwrap() {
            Search::Nothing { refused } => refused,
            Search::Found(first) => panic!("{}", first.ledger.store().url()),
        };
        assert_eq!(refused, 100, "they came, and that is told");
    }

    #[test]
    fn the_wait_for_stores_begins_anew_once_none_fails() {
        let away = || anyhow::anyhow!("away");
        let mut failing = Failing::default();
        assert_eq!(failing.tries("a"), Some(0));
        let first = failing.note("a".into(), 1, away());
        assert_eq!(failing.tries("a"), None, "it was tried a moment ago");
        assert_eq!(failing.note("b".into(), 1, away()), first);
        failing.remove("a");
        assert_eq!(failing.since, Some(first), "the other one fails still");
        failing.remove("b");
        assert_eq!(failing.since, None);
        failing.note("a".into(), 1, away());
        failing.forget(Duration::from_secs(60));
        assert!(failing.since.is_some() && !failing.is_empty());
        failing.forget(Duration::ZERO);
        assert!(failing.since.is_none() && failing.into_errors().is_empty());
    }
}
