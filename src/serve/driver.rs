//! Moves batches on, step by step: checks the input, creates and enqueues the job, counts the
//! results.
//!
//! Each step ends with a record that is created once, and a step that is done again changes nothing.
//! So several processes may move the same batch, and a killed one leaves nothing half done.

use std::collections::{HashMap, VecDeque};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use async_trait::async_trait;
use chrono::Utc;
use tokio::task::{JoinError, JoinHandle, JoinSet};
use tokio::time::MissedTickBehavior;

use super::expiry::sweep;
use super::models::ServedModel;
use super::records::BatchKey;
use super::service::Service;
use super::step::move_batch;
use super::traces::note_step;
use crate::dataset::store::location::{Location, LocationError};
use crate::error_line::one_line;
use crate::ledger::Ledger;

/// Number of batches that are moved concurrently, without those that take long.
const BATCHES_AT_ONCE: usize = 8;
/// Number of batches that are moved concurrently, with those that take long: the check of a large
/// input takes minutes, and some 50 MB of memory.
const BATCHES_AT_ONCE_MAX: usize = 24;
/// Time after which a move takes long.
const LONG_MOVE: Duration = Duration::from_secs(5);
/// Time between two searches for what has expired.
const SWEEP_EVERY: Duration = Duration::from_secs(600);
/// Maximum factor by which the pause of a batch without changes grows.
const PAUSE_FACTOR_MAX: u32 = 2;

/// A batch whose input was checked, ready to become a job.
#[derive(Debug, Clone)]
pub struct BatchJob {
    /// The job's name: the batch's id.
    pub name: String,
    pub model: ServedModel,
    /// The uploaded file.
    pub input: Location,
    pub output: Location,
    /// Seconds from the job's creation to the end of the completion window.
    pub deadline_seconds: u64,
    /// Answers per request.
    pub samples: u32,
}

impl BatchJob {
    /// A job of `model` without an input, for checks of the model's settings.
    pub(crate) fn for_check(model: &ServedModel) -> Result<BatchJob, LocationError> {
        let nowhere = Location::parse("file:///nowhere", Path::new("/"))?;
        Ok(BatchJob {
            name: "check".into(),
            model: model.clone(),
            input: nowhere.join("input.jsonl"),
            output: nowhere.join("output"),
            deadline_seconds: 1,
            samples: 1,
        })
    }
}

/// Why a batch has no job.
#[derive(Debug)]
pub enum StartError {
    /// The service is not ready yet: the batch waits.
    NotReady,
    /// No try can succeed: the batch fails with this message.
    Refused(String),
    /// A later try may succeed.
    Later(anyhow::Error),
}

/// Creates and enqueues the jobs of batches.
#[async_trait]
pub trait BatchJobs: Send + Sync {
    /// Creates the job of a batch unless it exists, and enqueues its shards.
    async fn start(&self, batch: &BatchJob) -> Result<Ledger, StartError>;

    /// The maximum tokens of an answer whose request states none.
    fn answer_tokens(&self, model: &ServedModel) -> u32;

    /// Enqueues shards that make no progress. Called at each look at an unfinished job.
    async fn reconcile(&self, ledger: &Ledger) -> anyhow::Result<()>;

    /// Publishes the unfinished rows of a job that was told to close, if its workers do not.
    async fn close(&self, model: &ServedModel, ledger: &Ledger) -> anyhow::Result<()>;
}

/// Whether a batch was moved on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Moved {
    Ended,
    Changed,
    Waits,
}

/// When an unfinished batch is looked at next.
#[derive(Debug, Clone, Copy)]
struct NextLook {
    due: Instant,
    factor: u32,
}

/// The batches that are being moved, and when the others are looked at next.
struct Driver {
    service: Arc<Service>,
    jobs: Arc<dyn BatchJobs>,
    /// Time between two looks at a batch; it grows while nothing changes.
    pause: Duration,
    looks: HashMap<BatchKey, NextLook>,
    /// The batches that are due and wait for their turn, the first one in front.
    due: VecDeque<BatchKey>,
    /// When each move that runs has begun.
    running: HashMap<BatchKey, Instant>,
    /// Whether the service was ready at the last look.
    was_ready: bool,
    moves: JoinSet<(BatchKey, Moved)>,
    /// The last sweep.
    sweep: Option<JoinHandle<()>>,
}

/// Moves all unfinished batches until `stop` completes. `pause`: time between two looks at a batch;
/// it grows while nothing changes.
pub async fn drive(service: Arc<Service>, jobs: Arc<dyn BatchJobs>, pause: Duration, stop: impl Future<Output = ()>) {
    let mut stop = std::pin::pin!(stop);
    let mut driver = Driver {
        service,
        jobs,
        pause,
        looks: HashMap::new(),
        due: VecDeque::new(),
        running: HashMap::new(),
        was_ready: false,
        moves: JoinSet::new(),
        sweep: None,
    };
    let mut sweeps = tokio::time::interval(SWEEP_EVERY);
    let mut ticks = tokio::time::interval(pause);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            Some(moved) = driver.moves.join_next() => driver.finish(moved),
            _ = ticks.tick() => driver.find_due().await,
            _ = sweeps.tick() => driver.begin_sweep(),
            () = driver.service.has_changed.notified() => driver.find_due().await,
            // Moves that are dropped have done nothing by halves.
            () = &mut stop => return,
        }
        driver.begin_due();
    }
}

impl Driver {
    /// Begins a sweep, unless the last one still runs.
    fn begin_sweep(&mut self) {
        if self.sweep.as_ref().is_some_and(|sweep| !sweep.is_finished()) {
            return;
        }
        let service = self.service.clone();
        self.sweep = Some(tokio::spawn(async move {
            if let Err(error) = sweep(&service, Utc::now()).await {
                tracing::warn!("expired files could not be removed: {}", one_line(&error.into()));
            }
        }));
    }

    /// Finds the batches that are due: first those that clients have changed, then those that wait
    /// longest.
    async fn find_due(&mut self) {
        if !self.was_ready && self.service.is_ready() {
            self.was_ready = true;
            // Batches that waited for it begin at once.
            self.looks.clear();
        }
        let changed = self.service.take_changed();
        let open = match self.service.records.open_batches().await {
            Ok(open) => open,
            Err(error) => {
                tracing::warn!(
                    "the unfinished batches could not be listed: {}",
                    one_line(&error.into())
                );
                return;
            }
        };
        self.service.metrics.set_open(open.len());
        self.looks.retain(|key, _| open.binary_search(key).is_ok());
        let now = Instant::now();
        // A batch that was never looked at has waited longest.
        let waits_since = |key: &BatchKey| match self.looks.get(key) {
            _ if changed.contains(key) => Some((false, None)),
            None => Some((true, None)),
            Some(look) => (look.due <= now).then_some((true, Some(look.due))),
        };
        let idle = open.into_iter().filter(|key| !self.running.contains_key(key));
        let mut due: Vec<_> = idle.filter_map(|key| Some((waits_since(&key)?, key))).collect();
        due.sort_unstable();
        self.due = due.into_iter().map(|(_, key)| key).collect();
    }

    /// Begins to move the batches that are due, as many as may run. A batch that takes long holds up
    /// no other.
    fn begin_due(&mut self) {
        while self.has_room()
            && let Some(key) = self.due.pop_front()
        {
            self.running.insert(key.clone(), Instant::now());
            let (service, jobs) = (self.service.clone(), self.jobs.clone());
            self.moves.spawn(async move {
                let began = SystemTime::now();
                let moved = move_batch(&service, jobs.as_ref(), &key).await;
                note_step(&key, began, &moved);
                let moved = moved.unwrap_or_else(|error| {
                    let id = &key.id;
                    tracing::warn!(batch = id, "batch {id} could not be moved on: {}", one_line(&error));
                    service.metrics.count_driver_error();
                    Moved::Waits
                });
                (key, moved)
            });
        }
    }

    fn has_room(&self) -> bool {
        let short = self.running.values().filter(|begun| begun.elapsed() < LONG_MOVE);
        self.running.len() < BATCHES_AT_ONCE_MAX && short.count() < BATCHES_AT_ONCE
    }

    /// Notes the end of a move.
    fn finish(&mut self, moved: Result<(BatchKey, Moved), JoinError>) {
        let Ok((key, moved)) = moved else {
            // A move has panicked; which one is not known, so all are looked at again.
            self.running.clear();
            self.service.metrics.count_driver_error();
            return;
        };
        self.running.remove(&key);
        if moved != Moved::Waits {
            self.service.forget_view(&key);
        }
        let factor = match (moved, self.looks.get(&key)) {
            (Moved::Waits, Some(look)) => (look.factor * 2).min(PAUSE_FACTOR_MAX),
            _ => 1,
        };
        let due = match moved {
            // The next step is due at once.
            Moved::Changed => Instant::now(),
            Moved::Waits | Moved::Ended => Instant::now() + self.pause * factor,
        };
        self.looks.insert(key, NextLook { due, factor });
        if moved == Moved::Changed {
            self.service.has_changed.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::super::id;
    use super::super::keys::{Keys, Tenant};
    use super::super::metrics::ServeMetrics;
    use super::super::record::{BatchRecord, CheckedInput};
    use super::super::records::tests::{batch, root};
    use super::super::service::now;
    use super::super::webhooks::Webhooks;
    use super::*;

    const PAUSE: Duration = Duration::from_millis(50);

    /// Counts how often each batch is looked at. None of them ever begins.
    #[derive(Default)]
    struct Looks {
        counts: Mutex<HashMap<String, u32>>,
        /// Batches whose first step never ends.
        hanging: Vec<String>,
    }

    #[async_trait]
    impl BatchJobs for Looks {
        async fn start(&self, batch: &BatchJob) -> Result<Ledger, StartError> {
            *self.counts.lock().unwrap().entry(batch.name.clone()).or_default() += 1;
            if self.hanging.contains(&batch.name) {
                std::future::pending::<()>().await;
            }
            Err(StartError::NotReady)
        }

        fn answer_tokens(&self, _: &ServedModel) -> u32 {
            1
        }

        async fn reconcile(&self, _: &Ledger) -> anyhow::Result<()> {
            Ok(())
        }

        async fn close(&self, _: &ServedModel, _: &Ledger) -> anyhow::Result<()> {
            Ok(())
        }
    }

    /// A service with this many unfinished batches of each tenant, and their keys.
    async fn service(tenants: [&str; 3], batches: usize) -> (Arc<Service>, Vec<BatchKey>) {
        let model = ServedModel {
            name: "demo".into(),
            address: "/nowhere".into(),
            job: serde_json::Map::new(),
        };
        let metrics = ServeMetrics::new(None).unwrap();
        let service = Service::open(root(), vec![model], Keys::Open, Webhooks::default(), metrics);
        let service = service.await.unwrap();
        let mut keys = Vec::new();
        for tenant in tenants {
            for _ in 0..batches {
                let key = BatchKey::new(&Tenant::new(tenant).unwrap(), id::new_id(id::BATCH).unwrap());
                let record = BatchRecord {
                    created_at: now(),
                    ..batch(&key.id)
                };
                service.records.create_batch(&key, record).await.unwrap();
                let checked = CheckedInput {
                    at: now(),
                    model: "demo".into(),
                    requests: 1,
                    samples: 1,
                    tokens: 1,
                    refused: None,
                };
                service.records.checked(&key, checked).await.unwrap();
                keys.push(key);
            }
        }
        (Arc::new(service), keys)
    }

    #[tokio::test]
    async fn each_of_many_batches_is_looked_at_again_and_again() {
        // A store lists `team-b/` before `team/`.
        let (service, keys) = service(["team", "team-b", "z"], 40).await;
        let looks = Arc::new(Looks::default());
        let jobs = looks.clone();
        let stop = async {
            let all_seen = || {
                let counts = looks.counts.lock().unwrap();
                keys.iter()
                    .all(|key| counts.get(&key.id).is_some_and(|&count| count >= 4))
            };
            for _ in 0..200 {
                if all_seen() {
                    return;
                }
                tokio::time::sleep(PAUSE).await;
            }
            panic!("{:?} of {} batches", looks.counts.lock().unwrap(), keys.len());
        };
        drive(service, jobs, PAUSE, stop).await;
    }

    #[tokio::test]
    async fn batches_that_take_long_hold_up_no_other() {
        let (service, keys) = service(["a", "b", "c"], 6).await;
        let hanging: Vec<String> = keys[..BATCHES_AT_ONCE].iter().map(|key| key.id.clone()).collect();
        let others = keys.len() - hanging.len();
        let looks = Arc::new(Looks {
            hanging,
            ..Looks::default()
        });
        let jobs = looks.clone();
        let stop = async {
            let end = Instant::now() + 3 * LONG_MOVE;
            while looks
                .counts
                .lock()
                .unwrap()
                .values()
                .filter(|&&count| count >= 2)
                .count()
                < others
            {
                assert!(Instant::now() < end, "{:?}", looks.counts.lock().unwrap());
                tokio::time::sleep(PAUSE).await;
            }
        };
        drive(service, jobs, PAUSE, stop).await;
    }
}
