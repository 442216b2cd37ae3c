//! **Open this first.** A worker: shards from receipt to acknowledgement, of all jobs of one model.
//!
//! ```text
//!            ┌──────────────── opened shard: its job, log, carried columns ──────────────┐
//!            │                                                                           ▼
//! queue ─▶ intake ──(1 shard)──▶ device thread ──(FINISHED_ROWS rows)──▶ router ─▶ a task a shard:
//!          read, render,         submit ▸ step ▸ assemble                          log ▸ part ▸ commit
//!          tokenize                                                                ▸ finish check ▸ acknowledge
//! ```
//!
//! Each arrow is a bounded channel of owned values (what waits for a shard's task is bounded by the shards in flight). A
//! row's result names the row it covers, and the ledger takes nothing else. The stages live in one `JoinSet`; an error of
//! any of them comes back through it and ends the others. Stopping means: intake ends, the device drops what is
//! unfinished, the router has what is finished logged and gives the rest back. Beside the stages, `accounts` looks at each
//! job's orders and spendings.

pub mod access;
mod accounts;
pub mod assemble;
pub mod budget;
mod device;
mod fate;
pub mod idle;
pub mod in_flight;
mod in_hand;
mod intake;
pub mod jobs;
mod limits;
pub mod liveness;
pub mod model;
pub mod opening;
mod owner;
pub mod pace;
pub mod preflight;
mod process;
mod read_time;
mod reading;
pub mod recheck;
pub mod refusals;
pub mod retry_policy;
pub mod room;
mod shard;
mod shard_router;
pub mod spot;
pub mod step_watchdog;
pub mod stop;
pub mod troubles;
pub mod watched;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use crate::dataset::row::RowResult;
use crate::engine::Generator;
use crate::engine::params::GenerationParams;
use crate::ledger::{Ledger, Runner};
use crate::queue::{Delivery, HOPS_MAX, LocalQueue, Message, Queue};
use crate::report::meter::Meter;
use crate::report::one_line;
use crate::worker::in_flight::{InFlight, ShardKey};
use crate::worker::jobs::{JobState, Jobs, OpenJob};
pub use crate::worker::limits::WorkerLimits;
use crate::worker::process::Process;
use crate::worker::retry_policy::{RetryDecision, RetryPolicy};
use crate::worker::step_watchdog::StepWatchdog;
use crate::worker::stop::{Stop, Why};
use crate::worker::troubles::Troubles;
use crate::worker::watched::Watched;

/// Shards read and tokenized ahead of the device: one, so that the next is ready when this one's tail runs.
const READY_SHARDS: usize = 1;
/// Finished rows on their way to the log: enough that the router does not hold up the device.
const FINISHED_ROWS: usize = 16_384;

/// What a worker needs, built at the door.
pub struct Worker {
    /// Tells this process from others in attempts and spendings.
    pub name: String,
    runner: Runner,
    pub queue: Arc<dyn Queue>,
    /// The same queue, where it is this process's own: nobody else fills it again.
    pub own_queue: Option<LocalQueue>,
    pub jobs: Jobs,
    pub watched: Watched,
    pub in_flight: InFlight,
    pub meter: Arc<Meter>,
    pub retry_policy: RetryPolicy,
    /// The stores that fail.
    pub troubles: Troubles,
    pub watchdog: Arc<StepWatchdog>,
    /// Rendering and tokenizing have threads of their own: the device's sampling must not wait for them.
    pub render_threads: rayon::ThreadPool,
    pub options: Options,
    shards_done: watch::Sender<u64>,
}

/// When to write, and when to end.
#[derive(Debug, Clone)]
pub struct Options {
    /// Time between writes of finished rows to the log: the most work that a kill can cost.
    pub log_interval: Duration,
    /// Shards (or narrowed tries) between intake and acknowledgement, at least 1: one running, one whose tail runs, one
    /// ready, one being published, and more where shards are small. Bounds the memory for rows.
    pub shards_in_flight: u32,
    pub until: Until,
    /// How long nothing must come before a worker that has heard of no job, or works once, ends.
    pub idle_after: Duration,
    /// End after so many shards (or narrowed tries).
    pub max_shards: Option<u64>,
}

/// When a worker ends by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Until {
    /// Never.
    Stopped,
    /// When the ledgers of all jobs it has heard of say that they are done.
    Idle,
    /// When the queue has nothing more.
    Once,
}

/// What goes into a [`Worker`] besides what it makes itself.
pub struct WorkerConfig {
    pub name: String,
    pub queue: Arc<dyn Queue>,
    pub own_queue: Option<LocalQueue>,
    pub jobs: Jobs,
    pub watched: Watched,
    pub meter: Arc<Meter>,
    pub retry_policy: RetryPolicy,
    pub watchdog: Arc<StepWatchdog>,
    pub render_threads: rayon::ThreadPool,
    pub options: Options,
}

/// A shard whose prompts are ready for the device.
struct ReadyShard {
    key: ShardKey,
    job: Arc<OpenJob>,
    /// The shard's rows, all of them.
    range: Range<u64>,
    rows: Vec<ReadyRow>,
    /// Set when nobody wants the rows any more: the shard was given back, stopped or closed.
    unwanted: Arc<AtomicBool>,
}

/// A row that can go to the device as it is.
struct ReadyRow {
    row: u64,
    prompt: Arc<[u32]>,
    params: Arc<GenerationParams>,
}

/// What the router hears of.
enum RouterEvent {
    /// Always before any row of that shard.
    Opened(Box<shard::OpenShard>),
    Row(ShardKey, RowResult),
    /// The device's last word, unless it failed.
    DeviceLeft,
}

/// Before a message for others is passed on: it must not spin among workers that cannot use it. Doubles with each hop up to the second.
const PASS_ON_PAUSE: Duration = Duration::from_secs(5);
const PASS_ON_PAUSE_MAX: Duration = Duration::from_secs(60);

/// Longest time that a stop may take; what is not written by then is computed again.
const DRAIN_MAX: Duration = Duration::from_secs(25);

impl Worker {
    pub fn new(config: WorkerConfig) -> Worker {
        let WorkerConfig {
            name,
            queue,
            own_queue,
            jobs,
            watched,
            meter,
            retry_policy,
            watchdog,
            render_threads,
            options,
        } = config;
        Worker {
            runner: Runner {
                worker: name.clone(),
                process: Process::own().map(|process| process.as_str().to_string()),
                signs_every: Some(options.log_interval.as_secs_f64()),
            },
            name,
            queue,
            own_queue,
            in_flight: InFlight::new(jobs.room().clone()),
            jobs,
            watched,
            meter,
            retry_policy,
            troubles: Troubles::default(),
            watchdog,
            render_threads,
            options,
            shards_done: watch::Sender::new(0),
        }
    }

    /// Shards that this worker has committed.
    pub fn shards_done(&self) -> u64 {
        *self.shards_done.borrow()
    }

    /// Whether all jobs that it has heard of are done or stopped; `None`: it has heard of none. Writes what is due where
    /// the last worker died before it could.
    async fn all_done(&self) -> anyhow::Result<Option<bool>> {
        let jobs = self.jobs.open().await;
        for job in &jobs {
            match is_done(job).await {
                Ok(true) => {}
                Ok(false) => return Ok(Some(false)),
                // What a newer gristmill goes on with is done here.
                Err(error) if self.retry_policy.decision(&error) == RetryDecision::LeaveShard => job.set_unreadable(),
                Err(error) => return Err(error),
            }
        }
        if let Some(error) = self.watched.open(&self.retry_policy).await? {
            self.retry_policy.say(&error);
            return Ok(Some(false));
        }
        let watched = self.watched.ledgers();
        for ledger in &watched {
            match is_over(ledger).await {
                Ok(true) => {}
                Ok(false) => return Ok(Some(false)),
                Err(error) if self.retry_policy.decision(&error) == RetryDecision::LeaveShard => {}
                Err(error) => return Err(error),
            }
        }
        Ok((!jobs.is_empty() || !watched.is_empty()).then_some(true))
    }

    /// Nothing is in hand, and jobs are to go on: a queue of our own gets what is not committed. A stopped job's messages are
    /// gone; over a broker, whoever extends the job enqueues its shards again.
    async fn refill(&self) -> anyhow::Result<()> {
        let Some(queue) = self.own_queue.as_ref().filter(|queue| queue.unacknowledged() == 0) else {
            return Ok(());
        };
        for job in self.jobs.open().await {
            if let JobState::Going | JobState::Closing(_) = job.state() {
                let shards = job.ledger.unfinished().await?;
                queue.send(messages(&job.ledger, &shards));
            }
        }
        Ok(())
    }

    /// Something is wrong with a shard or its job that other workers, or a person, must see to.
    fn leave_to_others(&self, shard: u32, job: &OpenJob, error: &anyhow::Error, held: Vec<Arc<Delivery>>) {
        tracing::error!(
            "shard {shard} of {} is left to others: {}",
            job.title(),
            one_line(error)
        );
        self.pass_on_later(held);
    }

    /// Sends deliveries that are not for this worker on, after a pause.
    fn pass_on_later(&self, deliveries: Vec<Arc<Delivery>>) {
        for delivery in deliveries {
            pass_on_later(self.queue.clone(), delivery);
        }
    }
}

/// Sends a delivery that is not for this worker on, after a pause.
pub fn pass_on_later(queue: Arc<dyn Queue>, delivery: Arc<Delivery>) {
    tokio::spawn(async move {
        tokio::time::sleep(pass_on_pause(delivery.hops)).await;
        match queue.pass_on(&delivery).await {
            Ok(true) => {}
            Ok(false) => tracing::warn!(
                "shard {} of `{}` is left to `gristmill reconcile`: no worker here could use it",
                delivery.message.shard,
                delivery.message.output
            ),
            // Dropped without an answer, it comes again.
            Err(error) => tracing::warn!(
                "the message of shard {} of `{}` could not be passed on: {}",
                delivery.message.shard,
                delivery.message.output,
                one_line(&error.into())
            ),
        }
    });
}

/// Who could use the message may be busy for long: it is offered ever more slowly.
fn pass_on_pause(hops: u32) -> Duration {
    match hops < HOPS_MAX {
        true => PASS_ON_PAUSE.saturating_mul(1 << hops.min(16)).min(PASS_ON_PAUSE_MAX),
        false => PASS_ON_PAUSE,
    }
}

/// Pointers to these shards of the ledger's generation.
pub fn messages(ledger: &Ledger, shards: &[u32]) -> Vec<Message> {
    let job = ledger.job().job.to_string();
    let output = ledger.store().url().to_string();
    let message = |&shard: &u32| Message::new(job.clone(), output.clone(), ledger.generation(), shard);
    shards.iter().map(message).collect()
}

/// Whether a job is finished or stopped. Writes what is due.
async fn is_done(job: &OpenJob) -> anyhow::Result<bool> {
    if job.ledger.finish_check(None).await?.is_some() {
        return Ok(true);
    }
    // Somebody else may have stopped it while nothing of it was here.
    job.refresh().await?;
    Ok(matches!(job.state(), JobState::Stopped(_)))
}

/// As [`is_done`], of a job that may be another model's.
async fn is_over(ledger: &Ledger) -> anyhow::Result<bool> {
    if ledger.finish_check(None).await?.is_some() {
        return Ok(true);
    }
    let control = ledger.control().await?;
    Ok(control.stopped().is_some() && !control.closes())
}

/// Works until it is told to stop, or until its options say that it is done: then `Ok(None)`.
pub async fn run(worker: Arc<Worker>, engine: Box<dyn Generator>, stop: Stop) -> anyhow::Result<Option<Why>> {
    let (ready_tx, ready_rx) = mpsc::channel::<ReadyShard>(READY_SHARDS);
    let (kept_tx, kept_rx) = mpsc::channel::<RouterEvent>(FINISHED_ROWS);

    let mut stages: JoinSet<anyhow::Result<()>> = JoinSet::new();
    stages.spawn(intake::run(worker.clone(), ready_tx, kept_tx.clone(), stop.clone()));
    stages.spawn(device::run(worker.clone(), engine, ready_rx, kept_tx, stop.clone()));
    stages.spawn(shard_router::run(worker.clone(), kept_rx, stop.clone()));
    let mut accounts = tokio::spawn(accounts::run(worker.clone(), stop.clone()));

    let mut accounts_over = false;
    let mut first_error = None;
    let drained = async {
        stop.wait().await;
        tokio::time::sleep(DRAIN_MAX).await;
    };
    tokio::pin!(drained);
    loop {
        let joined = tokio::select! {
            joined = stages.join_next() => joined,
            ended = &mut accounts, if !accounts_over => {
                accounts_over = true;
                Some(ended)
            }
            () = &mut drained => {
                tracing::warn!("stopping took more than {} s: what is not written yet is left", DRAIN_MAX.as_secs());
                stages.abort_all();
                worker.meter.lose_unwritten();
                break;
            }
        };
        let Some(joined) = joined else { break };
        let result = joined.unwrap_or_else(|e| Err(anyhow::anyhow!("a stage of the worker panicked: {e}")));
        if let Err(error) = result {
            // The others end by themselves: they see the stop, or their channel closes. Only the first error is the cause.
            stop.set(Why::Failed);
            first_error.get_or_insert(error);
        }
    }
    accounts.abort();
    match first_error {
        // Told to leave while the store was away: what could not be written is computed again.
        Some(error)
            if matches!(stop.why(), Some(Why::Interrupted | Why::Preempted))
                && worker.retry_policy.decision(&error) == RetryDecision::Wait =>
        {
            tracing::warn!("left without writing everything: {}", one_line(&error));
            worker.meter.lose_unwritten();
            Ok(stop.why())
        }
        Some(error) => Err(error),
        None => Ok(stop.why()),
    }
}
