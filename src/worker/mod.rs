//! **Open this first.** The worker takes shards of all jobs of one model from the queue and works
//! on each until its part is committed and its message acknowledged.
//!
//! ```text
//!            ┌──────────────── opened shard: its job, log, carried columns ──────────────┐
//!            │                                                                           ▼
//! queue ─▶ intake ──(1 shard)──▶ device thread ──(FINISHED_ROWS rows)──▶ router ─▶ a task a shard:
//!          read, render,         submit ▸ step ▸ assemble                          log ▸ part ▸ commit
//!          tokenize                                                                ▸ finish check ▸ acknowledge
//! ```
//!
//! Each arrow is a bounded channel of owned values. (The channel to a shard's task is unbounded,
//! but the number of shards in flight bounds its rows.) Each result carries its row number, because
//! rows finish in any order. The stages are tasks of one `JoinSet`: an error of one stage stops the
//! others. On a stop the intake ends, the device drops unfinished rows, and
//! the router has finished rows logged and unfinished shards given back. Beside the stages,
//! `accounts` reads each job's commands and spendings.

pub mod access;
mod accounts;
pub mod assemble;
pub mod budget;
mod device;
pub mod error_counts;
mod fate;
pub mod idle;
pub mod in_flight;
mod in_hand;
mod intake;
pub mod job_state;
pub mod jobs;
mod limits;
pub mod liveness;
pub mod metrics;
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
mod shard_trace;
mod spans;
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
use tracing::{Instrument, Span};

use crate::dataset::row::RowResult;
use crate::engine::Generator;
use crate::engine::params::GenerationParams;
use crate::error_line::one_line;
use crate::ledger::{AttemptWorker, Ledger};
use crate::queue::{Delivery, HOPS_MAX, LocalQueue, Message, Queue};
use crate::report::meter::Meter;
use crate::worker::in_flight::{InFlight, ShardKey};
use crate::worker::job_state::JobState;
use crate::worker::jobs::{Jobs, OpenJob};
pub use crate::worker::limits::WorkerLimits;
use crate::worker::metrics::Metrics;
use crate::worker::process::Process;
use crate::worker::retry_policy::{RetryDecision, RetryPolicy};
use crate::worker::shard_trace::GenerationSpan;
use crate::worker::step_watchdog::StepWatchdog;
use crate::worker::stop::{Stop, StopCause};
use crate::worker::troubles::Troubles;
use crate::worker::watched::WatchedJobs;

/// Number of shards that are read and tokenized ahead of the device. One is enough, because it is
/// ready when the last rows of the current shard run.
const READY_SHARDS: usize = 1;
/// Capacity of the channel of finished rows: large enough that the router does not hold up the
/// device.
const FINISHED_ROWS: usize = 16_384;

/// The parts of a worker, built at its start.
pub struct Worker {
    /// Identifies this process in attempts and spendings.
    pub name: String,
    attempt_worker: AttemptWorker,
    pub queue: Arc<dyn Queue>,
    /// The same queue if it is embedded in this process, which then must refill it.
    pub embedded_queue: Option<LocalQueue>,
    pub jobs: Jobs,
    pub watched: WatchedJobs,
    pub in_flight: InFlight,
    pub meter: Arc<Meter>,
    pub metrics: Arc<Metrics>,
    pub retry_policy: RetryPolicy,
    /// Stores that have failed lately, and jobs that are not for this worker.
    pub troubles: Troubles,
    pub watchdog: Arc<StepWatchdog>,
    /// Threads for rendering and tokenizing, so that the device's sampling does not wait for them.
    pub render_threads: rayon::ThreadPool,
    pub options: WorkerOptions,
    shards_done: watch::Sender<u64>,
}

/// Options of a worker: its log interval, its capacity, and when it ends.
#[derive(Debug, Clone)]
pub struct WorkerOptions {
    /// Time between writes of finished rows to the log, and so the maximum work that a kill loses.
    pub log_interval: Duration,
    /// Maximum number of shards (or narrowed tries) between intake and acknowledgement, at least 1:
    /// one whose last rows run, one that runs, one ready, one being published, and more if shards
    /// are small. Bounds the memory for rows.
    pub shards_in_flight: u32,
    pub until: Until,
    /// For `Once`, and for a worker that has heard of no job: how long the queue must deliver
    /// nothing before the worker ends.
    pub idle_after: Duration,
    /// Number of shards (or narrowed tries) after which the worker ends.
    pub max_shards: Option<u64>,
}

/// When a worker ends without being told to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Until {
    /// Never.
    Stopped,
    /// When the ledgers of all jobs that the worker has heard of say that they are done.
    Idle,
    /// When the queue is empty.
    Once,
}

/// The parameters of [`Worker::new`].
pub struct WorkerConfig {
    pub name: String,
    pub queue: Arc<dyn Queue>,
    pub embedded_queue: Option<LocalQueue>,
    pub jobs: Jobs,
    pub watched: WatchedJobs,
    pub meter: Arc<Meter>,
    pub metrics: Arc<Metrics>,
    pub retry_policy: RetryPolicy,
    pub watchdog: Arc<StepWatchdog>,
    pub render_threads: rayon::ThreadPool,
    pub options: WorkerOptions,
}

/// A shard whose prompts are ready for the device.
struct ReadyShard {
    key: ShardKey,
    job: Arc<OpenJob>,
    /// All rows of the shard.
    range: Range<u64>,
    rows: Vec<ReadyRow>,
    /// Set when the rows are no longer needed: the shard was given back, stopped or closed.
    is_unwanted: Arc<AtomicBool>,
    generation_span: GenerationSpan,
}

/// A rendered and tokenized row.
struct ReadyRow {
    row: u64,
    prompt: Arc<[u32]>,
    params: Arc<GenerationParams>,
}

/// The router's input.
enum RouterEvent {
    /// Always sent before any row of that shard.
    Opened(Box<shard::ShardWork>),
    Row(ShardKey, RowResult),
    /// The device's last event, sent only if it ended without an error.
    DeviceEnded,
}

/// Pause before a message for other workers is passed on, so that it does not circulate in a tight
/// loop among workers that cannot use it. Doubles with each hop up to `PASS_ON_PAUSE_MAX`.
const PASS_ON_PAUSE: Duration = Duration::from_secs(5);
const PASS_ON_PAUSE_MAX: Duration = Duration::from_secs(60);

/// Maximum time from a stop to the worker's end; rows not written by then are computed again.
const DRAIN_MAX: Duration = Duration::from_secs(25);

impl Worker {
    pub fn new(config: WorkerConfig) -> Worker {
        let WorkerConfig {
            name,
            queue,
            embedded_queue,
            jobs,
            watched,
            meter,
            metrics,
            retry_policy,
            watchdog,
            render_threads,
            options,
        } = config;
        Worker {
            attempt_worker: AttemptWorker {
                worker: name.clone(),
                process: Process::own().map(|process| process.as_str().to_string()),
                heartbeat_seconds: Some(options.log_interval.as_secs_f64()),
            },
            name,
            queue,
            embedded_queue,
            in_flight: InFlight::new(jobs.carried_memory().clone()),
            jobs,
            watched,
            meter,
            metrics,
            retry_policy,
            troubles: Troubles::default(),
            watchdog,
            render_threads,
            options,
            shards_done: watch::Sender::new(0),
        }
    }

    /// The log span of this worker.
    pub fn span(&self) -> Span {
        spans::of_worker(&self.name)
    }

    /// Number of shards that this worker has committed.
    pub fn shards_done(&self) -> u64 {
        *self.shards_done.borrow()
    }

    /// Whether all jobs that this worker has heard of are done or stopped; `None`: it has heard of
    /// no job. Also writes the final records of jobs whose last worker died before writing them.
    async fn all_done(&self) -> anyhow::Result<Option<bool>> {
        let jobs = self.jobs.open().await;
        for job in &jobs {
            match is_done(job).await {
                Ok(true) => {}
                Ok(false) => return Ok(Some(false)),
                // A job that only another version can continue does not keep this worker waiting.
                Err(error) if self.retry_policy.decision(&error) == RetryDecision::LeaveShard => job.set_unreadable(),
                Err(error) => return Err(error),
            }
        }
        if let Some(error) = self.watched.open(&self.retry_policy).await? {
            self.retry_policy.report(&error);
            return Ok(Some(false));
        }
        let watched = self.watched.ledgers();
        for ledger in &watched {
            match is_ledger_done(ledger).await {
                Ok(true) => {}
                Ok(false) => return Ok(Some(false)),
                Err(error) if self.retry_policy.decision(&error) == RetryDecision::LeaveShard => {}
                Err(error) => return Err(error),
            }
        }
        Ok((!jobs.is_empty() || !watched.is_empty()).then_some(true))
    }

    /// Sends the uncommitted shards of unfinished jobs to the embedded queue, if it is empty: an
    /// extended job has lost its messages when it was stopped. (With a broker, whoever extends the
    /// job enqueues its shards again.)
    async fn refill_embedded_queue(&self) -> anyhow::Result<()> {
        let Some(queue) = self.embedded_queue.as_ref().filter(|queue| queue.unacknowledged() == 0) else {
            return Ok(());
        };
        for job in self.jobs.open().await {
            if let JobState::Running | JobState::Closing(_) = job.state() {
                let shards = job.ledger.unfinished_shards().await?;
                queue.send(messages(&job.ledger, &shards));
            }
        }
        Ok(())
    }

    /// Logs the error of a shard that this worker cannot do, and passes its deliveries on: other
    /// workers, or a person, must deal with it.
    fn leave_to_others(&self, shard: u32, job: &OpenJob, error: &anyhow::Error, deliveries: Vec<Arc<Delivery>>) {
        self.retry_policy.errors().add(error);
        tracing::error!(
            shard,
            job = job.ledger.job().name,
            output = %job.ledger.store().url(),
            "shard {shard} of {} is left to others: {}",
            job.title(),
            one_line(error)
        );
        self.pass_on_later(deliveries);
    }

    /// After a pause, passes on deliveries that are not for this worker.
    fn pass_on_later(&self, deliveries: Vec<Arc<Delivery>>) {
        for delivery in deliveries {
            pass_on_later(self.queue.clone(), delivery);
        }
    }
}

/// After a pause, passes on a delivery that is not for this worker.
pub fn pass_on_later(queue: Arc<dyn Queue>, delivery: Arc<Delivery>) {
    let span = spans::of_message(&delivery.message);
    let passing = async move {
        tokio::time::sleep(pass_on_pause(delivery.hops)).await;
        match queue.forward(&delivery).await {
            Ok(true) => {}
            Ok(false) => tracing::warn!(
                "shard {} of `{}` is left to `gristmill reconcile`: no worker here could use it",
                delivery.message.shard,
                delivery.message.output
            ),
            // The delivery is dropped without an acknowledgement, so the queue delivers it again.
            Err(error) => tracing::warn!(
                "the message of shard {} of `{}` could not be passed on: {}",
                delivery.message.shard,
                delivery.message.output,
                one_line(&error.into())
            ),
        }
    };
    tokio::spawn(passing.instrument(span));
}

/// The pause grows with the hops, because the worker that can use the message may be busy for long.
fn pass_on_pause(hops: u32) -> Duration {
    if hops < HOPS_MAX {
        PASS_ON_PAUSE.saturating_mul(1 << hops.min(16)).min(PASS_ON_PAUSE_MAX)
    } else {
        PASS_ON_PAUSE
    }
}

/// Queue messages for these shards, in the ledger's generation.
pub fn messages(ledger: &Ledger, shards: &[u32]) -> Vec<Message> {
    let job = ledger.job().job.to_string();
    let output = ledger.store().url().to_string();
    let message = |&shard: &u32| Message::new(job.clone(), output.clone(), ledger.generation(), shard);
    shards.iter().map(message).collect()
}

/// Whether a job is finished or stopped. Also writes its final records if they are due.
async fn is_done(job: &OpenJob) -> anyhow::Result<bool> {
    if job.ledger.finish_check(None).await?.is_some() {
        return Ok(true);
    }
    // Another process may have stopped the job while this worker had none of its shards.
    job.refresh().await?;
    Ok(matches!(job.state(), JobState::Stopped(_)))
}

/// Like [`is_done`], for a job that may be of another model.
async fn is_ledger_done(ledger: &Ledger) -> anyhow::Result<bool> {
    if ledger.finish_check(None).await?.is_some() {
        return Ok(true);
    }
    let control = ledger.control().await?;
    Ok(control.stop_reason().is_some() && !control.is_closing())
}

/// Works until `stop` is set, and returns its reason; or until the worker is done by its options,
/// and returns `Ok(None)`.
pub async fn run(worker: Arc<Worker>, engine: Box<dyn Generator>, stop: Stop) -> anyhow::Result<Option<StopCause>> {
    let span = worker.span();
    run_stages(worker, engine, stop).instrument(span).await
}

async fn run_stages(worker: Arc<Worker>, engine: Box<dyn Generator>, stop: Stop) -> anyhow::Result<Option<StopCause>> {
    let (ready_tx, ready_rx) = mpsc::channel::<ReadyShard>(READY_SHARDS);
    let (router_tx, router_rx) = mpsc::channel::<RouterEvent>(FINISHED_ROWS);

    let mut stages: JoinSet<anyhow::Result<()>> = JoinSet::new();
    stages.spawn(intake::run(worker.clone(), ready_tx, router_tx.clone(), stop.clone()).in_current_span());
    stages.spawn(device::run(worker.clone(), engine, ready_rx, router_tx, stop.clone()).in_current_span());
    stages.spawn(shard_router::run(worker.clone(), router_rx, stop.clone()).in_current_span());
    let mut accounts = tokio::spawn(accounts::run(worker.clone(), stop.clone()).in_current_span());

    let mut accounts_ended = false;
    let mut first_error = None;
    let drain_timeout = async {
        stop.wait().await;
        tokio::time::sleep(DRAIN_MAX).await;
    };
    tokio::pin!(drain_timeout);
    loop {
        let joined = tokio::select! {
            joined = stages.join_next() => joined,
            ended = &mut accounts, if !accounts_ended => {
                accounts_ended = true;
                Some(ended)
            }
            () = &mut drain_timeout => {
                tracing::warn!("the worker did not stop within {} s: rows that are not written yet are left", DRAIN_MAX.as_secs());
                stages.abort_all();
                worker.meter.add_unlogged_to_lost();
                break;
            }
        };
        let Some(joined) = joined else { break };
        let result = joined.unwrap_or_else(|e| Err(anyhow::anyhow!("a stage of the worker panicked: {e}")));
        if let Err(error) = result {
            // The other stages end by themselves: they see the stop, or their channel closes. Their
            // later errors are consequences of the first.
            stop.set(StopCause::Failed);
            first_error.get_or_insert(error);
        }
    }
    accounts.abort();
    match first_error {
        // The worker was stopped during an outage of the store: rows that could not be written are
        // computed again.
        Some(error)
            if matches!(stop.why(), Some(StopCause::Interrupted | StopCause::Preempted))
                && worker.retry_policy.decision(&error) == RetryDecision::Wait =>
        {
            tracing::warn!(
                "the worker left without writing all finished rows: {}",
                one_line(&error)
            );
            worker.meter.add_unlogged_to_lost();
            Ok(stop.why())
        }
        Some(error) => Err(error),
        None => Ok(stop.why()),
    }
}
