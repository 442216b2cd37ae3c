//! Finished rows → log → part → commit → finish check → acknowledge.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use arrow::array::RecordBatch;
use chrono::TimeDelta;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::time::{Instant, Interval, MissedTickBehavior};

use crate::dataset::part::{part_openai, part_parquet};
use crate::dataset::row::RowResult;
use crate::ledger::keys::Id;
use crate::ledger::log::ShardLog;
use crate::ledger::{Order, StopWhy};
use crate::queue::Delivery;
use crate::worker::stop::{Stop, Why};
use crate::worker::{Kept, PartFormat, Worker};

/// How often the budget is looked at with this process's own counters: no request is needed for that.
const BUDGET_EVERY: Duration = Duration::from_secs(1);

/// A shard, or the part of it that is tried at once, while its rows are on the device.
pub(super) struct OpenShard {
    pub log: ShardLog,
    /// The attempt written down for it; `None` where nothing goes to the device.
    pub attempt: Option<Id>,
    /// Rows that will come.
    pub missing: u64,
    /// Carried columns of the whole shard.
    pub carry: RecordBatch,
    pub delivery: Delivery,
    /// Its place among the shards in flight; free again when this is dropped.
    pub _permit: OwnedSemaphorePermit,
    /// Finished rows that no record covers yet.
    pub pending: Vec<RowResult>,
}

impl OpenShard {
    /// A shard of which nothing goes to the device.
    pub fn new(log: ShardLog, carry: RecordBatch, delivery: Delivery, permit: OwnedSemaphorePermit) -> OpenShard {
        OpenShard {
            log,
            attempt: None,
            missing: 0,
            carry,
            delivery,
            _permit: permit,
            pending: Vec::new(),
        }
    }
}

/// Keeps rows until no stage can send any more; at the end, and after an error too, logs what is finished and gives the
/// rest back.
pub(super) async fn run(worker: Arc<Worker>, mut kept: mpsc::Receiver<Kept>, stop: Stop) -> anyhow::Result<()> {
    let mut keeper = Keeper {
        worker,
        open: BTreeMap::new(),
        others_seconds: 0.0,
        device_left: false,
    };
    let served = keeper.serve(&mut kept, &stop).await;
    // Nobody waits for an answer of the other stages: their sends must fail at once, not fill the channel.
    drop(kept);
    let left = keeper.leave().await;
    served.and(left)
}

struct Keeper {
    worker: Arc<Worker>,
    /// By first row of the shard.
    open: BTreeMap<u64, OpenShard>,
    /// What other workers have spent, and may spend until the next look.
    others_seconds: f64,
    /// The device ended as it should. If not, a row may have been the end of it, and the attempts say so by having none.
    device_left: bool,
}

impl Keeper {
    async fn serve(&mut self, kept: &mut mpsc::Receiver<Kept>, stop: &Stop) -> anyhow::Result<()> {
        self.look(stop).await?;
        let mut flushes = ticks(self.worker.options.log_interval);
        let mut budgets = ticks(BUDGET_EVERY.min(self.worker.options.log_interval));
        loop {
            tokio::select! {
                message = kept.recv() => match message {
                    Some(Kept::Opened(shard)) if shard.missing == 0 => self.finish(*shard).await?,
                    Some(Kept::Opened(shard)) => { self.open.insert(shard.log.rows().start, *shard); }
                    Some(Kept::Row(row)) => self.row(row).await?,
                    Some(Kept::DeviceLeft) => self.device_left = true,
                    None => return Ok(()),
                },
                _ = flushes.tick() => {
                    self.flush().await?;
                    self.look(stop).await?;
                }
                _ = budgets.tick() => self.check_limits(stop).await?,
            }
        }
    }

    async fn row(&mut self, row: RowResult) -> anyhow::Result<()> {
        self.worker.meter.add_row(&row);
        let number = row.row;
        let found = self.open.range_mut(..=number).next_back();
        let (&first, shard) = found.with_context(|| format!("row {number} belongs to no open shard"))?;
        shard.pending.push(row);
        shard.missing -= 1;
        if shard.missing == 0
            && let Some(shard) = self.open.remove(&first)
        {
            self.finish(shard).await?;
        }
        Ok(())
    }

    /// All rows of the try are there. After an error the shard stays open, so that leaving ends its attempt.
    async fn finish(&mut self, mut shard: OpenShard) -> anyhow::Result<()> {
        let finished = self.publish(&mut shard).await;
        if finished.is_err() {
            self.open.insert(shard.log.rows().start, shard);
        }
        finished
    }

    /// Logs the rows of the try, and publishes the shard if its log is whole.
    async fn publish(&self, shard: &mut OpenShard) -> anyhow::Result<()> {
        append(&self.worker, shard).await?;
        if !shard.log.is_complete() {
            // A narrowed try: the rest of the shard comes round again.
            end_attempt(shard).await?;
            self.worker.queue.give_back(&shard.delivery).await?;
            return Ok(());
        }
        // No end is written for the attempt: strikes on rows that are covered never count.
        if self.open.is_empty() {
            // `_SUCCESS` may follow at once, and it sums up what was spent.
            self.write_spend().await?;
        }
        let schema = self.worker.output.schema();
        let make_part = |batches: &[RecordBatch], metadata: &[(String, String)]| match &self.worker.format {
            PartFormat::Parquet => part_parquet(&schema, batches, metadata),
            PartFormat::Openai(meta) => part_openai(batches, meta),
        };
        shard.log.publish(make_part).await?;
        self.worker.queue.acknowledge(&shard.delivery).await?;
        Ok(())
    }

    /// Logs what is finished of all open shards.
    async fn flush(&mut self) -> anyhow::Result<()> {
        for shard in self.open.values_mut() {
            append(&self.worker, shard).await?;
        }
        self.write_spend().await
    }

    async fn write_spend(&self) -> anyhow::Result<()> {
        let seconds = self.worker.meter.read().device_seconds;
        self.worker.ledger.write_spend(&self.worker.name, seconds).await?;
        Ok(())
    }

    /// Reads the orders and what the others have spent.
    async fn look(&mut self, stop: &Stop) -> anyhow::Result<()> {
        let worker = &self.worker;
        if let Some(why) = worker.ledger.control().await?.stopped() {
            stop.set(why.into());
        }
        let spent = worker.ledger.spent().await?;
        let interval = worker.options.log_interval;
        let window = TimeDelta::from_std(2 * interval).unwrap_or(TimeDelta::MAX);
        let ahead = f64::from(spent.live_others(&worker.name, window)) * interval.as_secs_f64();
        self.others_seconds = spent.device_seconds_of_others(&worker.name) + ahead;
        self.check_limits(stop).await
    }

    /// Orders a stop where budget or deadline are reached.
    async fn check_limits(&self, stop: &Stop) -> anyhow::Result<()> {
        let worker = &self.worker;
        if stop.is_set() {
            return Ok(());
        }
        let seconds = self.others_seconds + worker.meter.read().device_seconds;
        let age = (chrono::Utc::now() - worker.ledger.created_at())
            .to_std()
            .unwrap_or_default();
        let Some(why) = worker.options.limits.reached(seconds, age) else {
            return Ok(());
        };
        let mut control = worker.ledger.control().await?;
        if control.stopped().is_none() && worker.ledger.success().await?.is_none() {
            control.give(Order::Stop { why, close: false }).await?;
        }
        stop.set(why.into());
        Ok(())
    }

    /// The last act: logs what is finished, ends the attempts, gives unfinished shards back. A shard that fails does not keep
    /// the others from it; the first error is returned.
    async fn leave(mut self) -> anyhow::Result<()> {
        let mut first_error = None;
        for mut shard in std::mem::take(&mut self.open).into_values() {
            let logged = append(&self.worker, &mut shard).await;
            let ended = match self.device_left {
                true => end_attempt(&mut shard).await,
                false => Ok(()),
            };
            let given_back = self
                .worker
                .queue
                .give_back(&shard.delivery)
                .await
                .map_err(anyhow::Error::from);
            first_error = first_error.or(logged.and(ended).and(given_back).err());
        }
        first_error = first_error.or(self.write_spend().await.err());
        first_error.map_or(Ok(()), Err)
    }
}

impl From<StopWhy> for Why {
    fn from(why: StopWhy) -> Why {
        match why {
            StopWhy::Budget => Why::Budget,
            StopWhy::Deadline => Why::Deadline,
            StopWhy::Cancelled => Why::Cancelled,
        }
    }
}

/// A ticker whose first tick comes after one period.
fn ticks(every: Duration) -> Interval {
    let mut ticks = tokio::time::interval_at(Instant::now() + every, every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

/// Logs the shard's pending rows.
async fn append(worker: &Worker, shard: &mut OpenShard) -> anyhow::Result<()> {
    if shard.pending.is_empty() {
        return Ok(());
    }
    let batch = worker
        .output
        .to_batch(&shard.carry, shard.log.rows().start, &shard.pending)?;
    shard.log.append(&batch).await?;
    shard.pending.clear();
    Ok(())
}

async fn end_attempt(shard: &mut OpenShard) -> anyhow::Result<()> {
    if let Some(attempt) = &shard.attempt {
        shard.log.end(attempt).await?;
    }
    Ok(())
}
