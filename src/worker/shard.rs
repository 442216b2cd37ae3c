//! One shard in hand: finished rows → log → part → commit → finish check → acknowledge.
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
use crate::worker::in_flight::ShardKey;
use crate::worker::jobs::{JobState, OpenJob, Running};
use crate::worker::retry_policy::{Pauses, RetryDecision};
use crate::worker::stop::Stop;
use crate::worker::{Worker, assemble};

/// A shard, or the part of it that is tried at once, while its rows are on the device.
pub(super) struct OpenShard {
    pub job: Arc<OpenJob>,
    pub key: ShardKey,
    pub log: ShardLog,
    /// The attempt recorded for the shard; `None` where no row goes to the device.
    pub attempt: Option<Id>,
    /// Rows that will come from the device.
    pub expected: HashSet<u64>,
    /// Carried columns of the whole shard.
    pub carry: RecordBatch,
    /// Its place among the shards in flight; released when dropped.
    pub _permit: OwnedSemaphorePermit,
    /// Finished rows that no record covers yet.
    pub pending: Vec<RowResult>,
    /// Tells the device that these rows are not needed any more.
    pub unwanted: Arc<AtomicBool>,
}

/// Commands to a shard's task.
#[derive(Debug)]
pub(super) enum ShardCommand {
    Row(RowResult),
    /// Log finished rows now: the worker will end soon.
    Flush,
    /// The queue takes the shard back.
    Recalled(&'static str),
    /// No more rows will come: the worker ends. `whole`: the device ended cleanly. If not, a row
    /// may have ended it, so the attempt stays without an end.
    Leave {
        whole: bool,
    },
}

/// How work on a shard ended.
enum Ended {
    Committed,
    /// A narrowed try has ended: the rest of the shard comes round again.
    TriedSome,
    /// Another worker should continue the shard.
    GivenBack,
    /// This gristmill cannot go on with the job.
    LeftToOthers,
    /// The job is stopped: its messages are obsolete.
    JobStopped,
}

/// Sees a shard through. Returns only an error that ends the worker.
pub(super) async fn run_shard(
    worker: Arc<Worker>,
    mut shard: OpenShard,
    mut told: mpsc::UnboundedReceiver<ShardCommand>,
    stop: Stop,
) -> anyhow::Result<()> {
    let key = shard.key;
    let ended = Tending {
        worker: &worker,
        running: Some(Running::of(shard.job.clone())),
        is_last: false,
        shard: &mut shard,
        stop: &stop,
    }
    .until_it_ends(&mut told)
    .await;
    if !matches!(ended, Ok(Ended::Committed | Ended::TriedSome)) {
        shard.unwanted.store(true, Ordering::Release);
    }
    let deliveries = worker.in_flight.leave(key);
    match ended {
        Ok(Ended::Committed) => {
            crate::failpoint!("keeper.before-acknowledge");
            acknowledge(&worker, &deliveries).await?;
            crate::failpoint!("keeper.after-acknowledge");
            worker.shards_done.send_modify(|done| *done += 1);
            tracing::info!("shard {} of {} is done", key.shard, shard.job.title());
            Ok(())
        }
        Ok(Ended::JobStopped) => leave_stopped(&worker, &shard.job, &deliveries, &stop).await,
        Ok(Ended::TriedSome | Ended::GivenBack) => give_back(&worker, &deliveries).await,
        Ok(Ended::LeftToOthers) => {
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

/// Acknowledges a stopped job's messages: whoever extends the job enqueues its shards again. Such a
/// new message may already be among these deliveries; then the job's orders say that it goes on.
async fn leave_stopped(
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

struct Tending<'a> {
    worker: &'a Worker,
    /// Present while rows may come.
    running: Option<Running>,
    /// Whether no other shard of the job had rows on the device when the last row of this one came.
    is_last: bool,
    shard: &'a mut OpenShard,
    stop: &'a Stop,
}

impl Tending<'_> {
    async fn until_it_ends(&mut self, told: &mut mpsc::UnboundedReceiver<ShardCommand>) -> anyhow::Result<Ended> {
        let mut flushes = ticks(self.worker.options.log_interval);
        let mut state = self.shard.job.watch_state();
        while !self.shard.expected.is_empty() {
            tokio::select! {
                biased;
                tell = told.recv() => match tell {
                    Some(ShardCommand::Row(row)) => self.take(row),
                    Some(ShardCommand::Recalled(why)) => {
                        let (shard, title) = (self.shard.key.shard, self.shard.job.title());
                        tracing::info!("shard {shard} of {title} goes back to the queue: {why}");
                        // If the device hangs, one of these rows may be the cause: the attempt
                        // stays without an end.
                        let whole = self.worker.watchdog.is_alive();
                        return self.give_back(whole).await;
                    }
                    Some(ShardCommand::Flush) => self.flush().await?,
                    Some(ShardCommand::Leave { whole }) => return self.give_back(whole).await,
                    None => return Ok(Ended::GivenBack),
                },
                state = stopped(&mut state) => {
                    match state.closes_as() {
                        Some(status) => self.close(status),
                        None => {
                            self.shard.unwanted.store(true, Ordering::Release);
                            self.append().await?;
                            self.end_attempt().await?;
                            return Ok(match state {
                                JobState::Unreadable => Ended::LeftToOthers,
                                _ => Ended::JobStopped,
                            });
                        }
                    }
                }
                _ = flushes.tick() => self.flush().await?,
            }
        }
        self.is_last = self.running.take().is_some_and(Running::end);
        self.append().await?;
        if !self.shard.log.is_complete() {
            self.end_attempt().await?;
            return Ok(Ended::TriedSome);
        }
        self.publish().await
    }

    fn take(&mut self, row: RowResult) {
        // A row of an earlier try may come late; it is ignored.
        if self.shard.expected.remove(&row.row) {
            self.worker.meter.add_row(&row);
            self.shard.pending.push(row);
        }
    }

    /// Logs pending rows, if the store answers; otherwise they stay pending.
    async fn flush(&mut self) -> anyhow::Result<()> {
        match append(self.worker, self.shard).await {
            Ok(()) => self.worker.retry_policy.over(),
            Err(error) if self.worker.retry_policy.decision(&error) == RetryDecision::Wait => {
                self.worker.retry_policy.say(&error)
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Prepares the shard for another worker. `whole`: the device is sound, and the attempt ends.
    async fn give_back(&mut self, whole: bool) -> anyhow::Result<Ended> {
        // First stop the device: its further work on these rows would be wasted.
        self.shard.unwanted.store(true, Ordering::Release);
        self.append().await?;
        if whole {
            self.end_attempt().await?;
        }
        Ok(Ended::GivenBack)
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

    /// Ends the rows that have not come with `status`.
    fn close(&mut self, status: RowStatus) {
        self.shard.unwanted.store(true, Ordering::Release);
        for row in std::mem::take(&mut self.shard.expected) {
            let row = assemble::closed(row, status);
            self.worker.meter.add_row(&row);
            self.shard.pending.push(row);
        }
    }

    /// Logs the pending rows, waiting out outages of the store.
    async fn append(&mut self) -> anyhow::Result<()> {
        let mut pauses = Pauses::default();
        while let Err(error) = append(self.worker, self.shard).await {
            self.worker.retry_policy.backoff(error, &mut pauses, self.stop).await?;
        }
        self.worker.retry_policy.over();
        Ok(())
    }

    /// Publishes the complete log.
    async fn publish(&self) -> anyhow::Result<Ended> {
        let mut pauses = Pauses::default();
        while let Err(error) = self.try_publish().await {
            // Lost rows are open again.
            if let Some(LedgerError::Lost { .. }) = error.downcast_ref() {
                return Ok(Ended::TriedSome);
            }
            self.worker.retry_policy.backoff(error, &mut pauses, self.stop).await?;
        }
        self.worker.retry_policy.over();
        Ok(Ended::Committed)
    }

    async fn try_publish(&self) -> anyhow::Result<()> {
        let job = &self.shard.job;
        // The attempt needs no end: strikes on rows that are covered never count.
        if self.is_last {
            // `_SUCCESS` may follow at once, and it sums up the spending.
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

/// Waits until the job is no longer going.
async fn stopped(state: &mut watch::Receiver<JobState>) -> JobState {
    let changed = state.wait_for(|state| *state != JobState::Going).await;
    let state = changed.ok().map(|state| *state);
    match state {
        Some(state) => state,
        // The shard holds the job, which is the sender.
        None => std::future::pending().await,
    }
}

/// A ticker whose first tick comes after one period.
fn ticks(every: Duration) -> Interval {
    let mut ticks = tokio::time::interval_at(Instant::now() + every, every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

/// Logs the shard's pending rows. After an error they stay pending: the log settles which of them
/// count.
async fn append(worker: &Worker, shard: &mut OpenShard) -> anyhow::Result<()> {
    if shard.pending.is_empty() {
        return Ok(());
    }
    let job = &shard.job;
    let batch = job
        .output
        .to_batch(&shard.carry, job.first_row(shard.key.shard)?, &shard.pending)?;
    crate::failpoint!("keeper.before-log");
    shard.log.append(&batch).await?;
    crate::failpoint!("keeper.after-log");
    worker.meter.add_written(&shard.pending);
    shard.pending.clear();
    Ok(())
}
