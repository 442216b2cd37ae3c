//! The task of one shard: finished rows → log → part → commit → finish check → acknowledge.
//!
//! Each shard in flight is a task of its own, so that a slow store holds up no other shard.
//!
//! See docs/decisions/022-each-shard-is-a-task.md.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use arrow::array::RecordBatch;
use tokio::sync::{OwnedSemaphorePermit, mpsc, watch};
use tokio::time::{Instant, Interval, MissedTickBehavior};

use crate::dataset::row::{RowResult, RowStatus};
use crate::ledger::LedgerError;
use crate::ledger::keys::Id;
use crate::ledger::log::ShardLog;
use crate::queue::Delivery;
use crate::traces::names;
use crate::worker::in_flight::ShardKey;
use crate::worker::job_state::JobState;
use crate::worker::jobs::{OpenJob, RunningShardGuard};
use crate::worker::retry_policy::{Pauses, RetryDecision};
use crate::worker::shard_trace::ShardTrace;
use crate::worker::stop::Stop;
use crate::worker::{Worker, assemble};

/// A try at a shard's unfinished rows. Where two attempts at the same rows never ended, one of the
/// rows may have crashed the worker. The try is then narrowed: a narrowed try has at most 256 rows
/// and the device to itself (see [`attempts`](crate::ledger::attempts)).
pub(super) struct ShardWork {
    pub job: Arc<OpenJob>,
    pub key: ShardKey,
    pub log: ShardLog,
    /// The attempt recorded for the shard; `None`: no row is read or run.
    pub attempt: Option<Id>,
    /// Rows that will come from the device.
    pub expected: HashSet<u64>,
    /// Carried columns of the whole shard.
    pub carry: RecordBatch,
    /// Its slots among the shards in flight; released when dropped.
    pub _permit: OwnedSemaphorePermit,
    /// Finished rows that no log record covers yet.
    pub pending: Vec<RowResult>,
    /// Set to tell the device that these rows are no longer needed.
    pub is_unwanted: Arc<AtomicBool>,
    pub trace: ShardTrace,
}

/// Commands to a shard's task.
#[derive(Debug)]
pub(super) enum ShardCommand {
    Row(RowResult),
    /// Log finished rows now, because the worker will end soon.
    Flush,
    /// The queue takes the shard back; holds the reason.
    Recalled(&'static str),
    /// No more rows will come: the worker ends. `is_device_sound`: the device ended cleanly. If
    /// not, a row may have crashed it, so the attempt stays without an end.
    Leave {
        is_device_sound: bool,
    },
}

/// How work on a shard ended.
enum ShardOutcome {
    Committed,
    /// The try has ended, but unfinished rows are left: the try was narrowed, or data of finished
    /// rows was lost. The message comes again for these rows.
    TriedSome,
    /// Another worker should continue the shard.
    GivenBack,
    /// This version cannot continue the job.
    LeftToOthers,
    /// The job is stopped, so its messages are obsolete.
    JobStopped,
}

impl ShardOutcome {
    /// The outcome's name in traces.
    fn as_str(&self) -> &'static str {
        match self {
            ShardOutcome::Committed => "committed",
            ShardOutcome::TriedSome => "tried_some",
            ShardOutcome::GivenBack => "given_back",
            ShardOutcome::LeftToOthers => "left_to_others",
            ShardOutcome::JobStopped => "job_stopped",
        }
    }
}

/// Works on a shard until its messages are acknowledged, given back or passed on. Returns only an
/// error that ends the worker.
pub(super) async fn run_shard(
    worker: Arc<Worker>,
    mut shard: ShardWork,
    mut commands: mpsc::UnboundedReceiver<ShardCommand>,
    stop: Stop,
) -> anyhow::Result<()> {
    let key = shard.key;
    let outcome = ShardTask {
        worker: &worker,
        running: Some(RunningShardGuard::of(shard.job.clone())),
        is_last: false,
        shard: &mut shard,
        stop: &stop,
    }
    .run_to_end(&mut commands)
    .await;
    if !matches!(outcome, Ok(ShardOutcome::Committed | ShardOutcome::TriedSome)) {
        shard.is_unwanted.store(true, Ordering::Release);
    }
    match &outcome {
        Ok(outcome) => shard.trace.note_outcome(outcome.as_str()),
        Err(error) => shard.trace.fail(error),
    }
    let deliveries = worker.in_flight.remove(key);
    match outcome {
        Ok(ShardOutcome::Committed) => {
            if let Some(received_at) = deliveries.iter().map(|delivery| delivery.received_at).min() {
                worker.metrics.observe_shard(received_at.elapsed());
            }
            crate::failpoint!("keeper.before-acknowledge");
            acknowledge(&worker, &deliveries).await?;
            crate::failpoint!("keeper.after-acknowledge");
            worker.shards_done.send_modify(|done| *done += 1);
            tracing::info!("shard {} of {} is done", key.shard, shard.job.title());
            Ok(())
        }
        Ok(ShardOutcome::JobStopped) => settle_stopped_job(&worker, &shard.job, &deliveries, &stop).await,
        Ok(ShardOutcome::TriedSome | ShardOutcome::GivenBack) => give_back(&worker, &deliveries).await,
        Ok(ShardOutcome::LeftToOthers) => {
            worker.pass_on_later(deliveries);
            Ok(())
        }
        Err(error) if worker.retry_policy.decision(&error) == RetryDecision::LeaveShard => {
            worker.leave_to_others(key.shard, &shard.job, &error, deliveries);
            Ok(())
        }
        Err(error) => {
            give_back(&worker, &deliveries).await?;
            Err(error)
        }
    }
}

/// Acknowledges a stopped job's messages, because whoever extends the job enqueues its shards
/// again. Such a new message may already be among these deliveries, so the job's commands are read
/// again: if the job goes on, the deliveries are given back.
async fn settle_stopped_job(
    worker: &Worker,
    job: &OpenJob,
    deliveries: &[Arc<Delivery>],
    stop: &Stop,
) -> anyhow::Result<()> {
    let mut pauses = Pauses::default();
    while let Err(error) = job.refresh().await {
        if let Err(error) = worker.retry_policy.backoff(error, &mut pauses, stop).await {
            give_back(worker, deliveries).await?;
            return match worker.retry_policy.decision(&error) {
                RetryDecision::LeaveShard => {
                    job.leave_to_others(&error);
                    Ok(())
                }
                _ => Err(error),
            };
        }
    }
    match job.state() {
        JobState::Stopped(_) => acknowledge(worker, deliveries).await,
        _ => give_back(worker, deliveries).await,
    }
}

async fn acknowledge(worker: &Worker, deliveries: &[Arc<Delivery>]) -> anyhow::Result<()> {
    for delivery in deliveries {
        worker.queue.acknowledge(delivery).await?;
    }
    Ok(())
}

async fn give_back(worker: &Worker, deliveries: &[Arc<Delivery>]) -> anyhow::Result<()> {
    for delivery in deliveries {
        worker.queue.give_back(delivery).await?;
    }
    Ok(())
}

struct ShardTask<'a> {
    worker: &'a Worker,
    /// Present while rows may come.
    running: Option<RunningShardGuard>,
    /// Whether no other shard of the job had rows on the device when the last row of this one came.
    is_last: bool,
    shard: &'a mut ShardWork,
    stop: &'a Stop,
}

impl ShardTask<'_> {
    async fn run_to_end(
        &mut self,
        commands: &mut mpsc::UnboundedReceiver<ShardCommand>,
    ) -> anyhow::Result<ShardOutcome> {
        let mut flushes = ticks(self.worker.options.log_interval);
        let mut state = self.shard.job.watch_state();
        while !self.shard.expected.is_empty() {
            tokio::select! {
                biased;
                command = commands.recv() => match command {
                    Some(ShardCommand::Row(row)) => self.add_row(row),
                    Some(ShardCommand::Recalled(why)) => {
                        let (shard, title) = (self.shard.key.shard, self.shard.job.title());
                        tracing::info!("shard {shard} of {title} goes back to the queue: {why}");
                        // If the device hangs, one of these rows may be the cause: the attempt
                        // stays without an end.
                        let is_device_sound = self.worker.watchdog.is_alive();
                        return self.give_back(is_device_sound).await;
                    }
                    Some(ShardCommand::Flush) => self.flush().await?,
                    Some(ShardCommand::Leave { is_device_sound }) => return self.give_back(is_device_sound).await,
                    None => return Ok(ShardOutcome::GivenBack),
                },
                state = wait_for_stop(&mut state) => {
                    match state.close_status() {
                        Some(status) => self.close(status),
                        None => {
                            self.shard.is_unwanted.store(true, Ordering::Release);
                            self.append().await?;
                            self.end_attempt().await?;
                            return Ok(match state {
                                JobState::Unreadable => ShardOutcome::LeftToOthers,
                                _ => ShardOutcome::JobStopped,
                            });
                        }
                    }
                }
                _ = flushes.tick() => self.flush().await?,
            }
        }
        self.is_last = self.running.take().is_some_and(RunningShardGuard::end);
        self.append().await?;
        if !self.shard.log.is_complete() {
            self.end_attempt().await?;
            return Ok(ShardOutcome::TriedSome);
        }
        self.publish().await
    }

    fn add_row(&mut self, row: RowResult) {
        // A row of an earlier try may come late; it is ignored.
        if self.shard.expected.remove(&row.row) {
            self.worker.meter.add_row(&row);
            self.shard.trace.add_row(&row);
            self.shard.pending.push(row);
        }
    }

    /// Logs pending rows, if the store answers; otherwise they stay pending.
    async fn flush(&mut self) -> anyhow::Result<()> {
        match append(self.worker, self.shard).await {
            Ok(()) => self.worker.retry_policy.note_success(),
            Err(error) if self.worker.retry_policy.decision(&error) == RetryDecision::Wait => {
                self.worker.retry_policy.report(&error)
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Logs finished rows before the shard goes back to the queue. Ends the attempt only if the
    /// device is sound.
    async fn give_back(&mut self, is_device_sound: bool) -> anyhow::Result<ShardOutcome> {
        // First cancel the rows on the device, where further work on them would be wasted.
        self.shard.is_unwanted.store(true, Ordering::Release);
        self.append().await?;
        if is_device_sound {
            self.end_attempt().await?;
        }
        Ok(ShardOutcome::GivenBack)
    }

    async fn end_attempt(&mut self) -> anyhow::Result<()> {
        let mut pauses = Pauses::default();
        let Some(attempt) = self.shard.attempt.clone() else {
            return Ok(());
        };
        while let Err(error) = self.shard.log.end(&attempt).await {
            self.worker
                .retry_policy
                .backoff(error.into(), &mut pauses, self.stop)
                .await?;
        }
        Ok(())
    }

    /// Ends all rows still expected from the device with `status`.
    fn close(&mut self, status: RowStatus) {
        self.shard.is_unwanted.store(true, Ordering::Release);
        for row in std::mem::take(&mut self.shard.expected) {
            let row = assemble::closed_row(row, status);
            self.worker.meter.add_row(&row);
            self.shard.pending.push(row);
        }
    }

    /// Logs the pending rows once no more will come, waiting out outages of the store.
    async fn append(&mut self) -> anyhow::Result<()> {
        self.shard.trace.end_generation();
        let mut pauses = Pauses::default();
        while let Err(error) = append(self.worker, self.shard).await {
            self.worker.retry_policy.backoff(error, &mut pauses, self.stop).await?;
        }
        self.worker.retry_policy.note_success();
        Ok(())
    }

    /// Publishes the complete log.
    async fn publish(&self) -> anyhow::Result<ShardOutcome> {
        let mut pauses = Pauses::default();
        while let Err(error) = self.shard.trace.step(names::PUBLISH, self.try_publish()).await {
            // Rows whose objects were lost are open again and need another try.
            if let Some(LedgerError::Lost { .. }) = error.downcast_ref() {
                return Ok(ShardOutcome::TriedSome);
            }
            self.worker.retry_policy.backoff(error, &mut pauses, self.stop).await?;
        }
        self.worker.retry_policy.note_success();
        Ok(ShardOutcome::Committed)
    }

    async fn try_publish(&self) -> anyhow::Result<()> {
        let job = &self.shard.job;
        // The attempt needs no end: rows that a record covers are never suspected.
        if self.is_last {
            // The commit may finish the job, and `_SUCCESS` sums up the spending.
            job.write_spend(&self.worker.name).await?;
        }
        crate::failpoint!("keeper.before-part");
        self.shard
            .log
            .publish(|batches, metadata| job.make_part(batches, metadata))
            .await?;
        crate::failpoint!("keeper.after-commit");
        Ok(())
    }
}

/// Waits until the job is no longer running, and returns its state.
async fn wait_for_stop(state: &mut watch::Receiver<JobState>) -> JobState {
    let changed = state.wait_for(|state| *state != JobState::Running).await;
    let state = changed.ok().map(|state| *state);
    match state {
        Some(state) => state,
        // Cannot happen: the shard holds the job, which holds the sender.
        None => std::future::pending().await,
    }
}

/// A ticker whose first tick comes after one period.
fn ticks(every: Duration) -> Interval {
    let mut ticks = tokio::time::interval_at(Instant::now() + every, every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

/// Logs the shard's pending rows. After an error they stay pending; if a record was written all the
/// same, the log counts each row once.
async fn append(worker: &Worker, shard: &mut ShardWork) -> anyhow::Result<()> {
    if shard.pending.is_empty() {
        return Ok(());
    }
    let trace = shard.trace.clone();
    trace.step(names::LOG, log_pending(shard)).await?;
    trace.add_logged(shard.pending.len());
    worker.meter.add_logged(&shard.pending);
    shard.pending.clear();
    Ok(())
}

async fn log_pending(shard: &mut ShardWork) -> anyhow::Result<()> {
    let job = &shard.job;
    let batch = job
        .output
        .to_batch(&shard.carry, job.first_row(shard.key.shard)?, &shard.pending)?;
    crate::failpoint!("keeper.before-log");
    shard.log.append(&batch).await?;
    crate::failpoint!("keeper.after-log");
    Ok(())
}
