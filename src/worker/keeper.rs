//! Finished rows → log → part → commit → finish check → acknowledge.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::Context;
use arrow::array::RecordBatch;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::time::MissedTickBehavior;

use crate::dataset::part::{part_openai, part_parquet};
use crate::dataset::row::RowResult;
use crate::ledger::keys::Id;
use crate::ledger::log::ShardLog;
use crate::ledger::{Order, StopWhy};
use crate::queue::Delivery;
use crate::report::cost::dollars;
use crate::worker::stop::{Stop, Why};
use crate::worker::{Kept, PartFormat, Worker};

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
    /// Its place among the shards in flight.
    pub permit: OwnedSemaphorePermit,
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
            permit,
            pending: Vec::new(),
        }
    }
}

/// Keeps rows until no stage can send any more; on a stop, logs what is finished and gives the rest back.
pub(super) async fn run(worker: Arc<Worker>, mut kept: mpsc::Receiver<Kept>, stop: Stop) -> anyhow::Result<()> {
    let mut keeper = Keeper {
        worker,
        open: BTreeMap::new(),
    };
    let mut ticks = tokio::time::interval(keeper.worker.options.log_interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks.tick().await;
    loop {
        tokio::select! {
            message = kept.recv() => match message {
                Some(Kept::Opened(shard)) => keeper.opened(*shard).await?,
                Some(Kept::Row(row)) => keeper.row(row).await?,
                None => break,
            },
            _ = ticks.tick() => {
                keeper.flush().await?;
                keeper.check_orders(&stop).await?;
            }
        }
    }
    keeper.leave().await
}

struct Keeper {
    worker: Arc<Worker>,
    /// By first row of the shard.
    open: BTreeMap<u64, OpenShard>,
}

impl Keeper {
    async fn opened(&mut self, shard: OpenShard) -> anyhow::Result<()> {
        if shard.missing == 0 {
            return self.finish(shard).await;
        }
        self.open.insert(shard.log.rows().start, shard);
        Ok(())
    }

    async fn row(&mut self, row: RowResult) -> anyhow::Result<()> {
        self.worker.meter.add_row(&row);
        let number = row.row;
        let (&first, shard) = self
            .open
            .range_mut(..=number)
            .next_back()
            .with_context(|| format!("row {number} belongs to no open shard"))?;
        shard.pending.push(row);
        shard.missing -= 1;
        if shard.missing == 0
            && let Some(shard) = self.open.remove(&first)
        {
            self.finish(shard).await?;
        }
        Ok(())
    }

    /// All rows of the try are there: log them, and publish the shard if its log is whole.
    async fn finish(&mut self, mut shard: OpenShard) -> anyhow::Result<()> {
        append(&self.worker, &mut shard).await?;
        if let Some(attempt) = &shard.attempt {
            shard.log.end(attempt).await?;
        }
        if !shard.log.is_complete() {
            // A narrowed try: the rest of the shard comes round again.
            self.worker.queue.give_back(&shard.delivery).await?;
            return Ok(());
        }
        // `_SUCCESS` may follow at once, and it sums up what was spent.
        self.write_spend().await?;
        let schema = self.worker.output.schema();
        let publish = |batches: &[RecordBatch], metadata: &[(String, String)]| match &self.worker.format {
            PartFormat::Parquet => part_parquet(&schema, batches, metadata),
            PartFormat::Openai(meta) => part_openai(batches, meta),
        };
        shard.log.publish(publish).await?;
        self.worker.queue.acknowledge(&shard.delivery).await?;
        drop(shard.permit);
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

    /// Stops at an order, and gives one where budget or deadline are reached.
    async fn check_orders(&self, stop: &Stop) -> anyhow::Result<()> {
        let (ledger, options) = (&self.worker.ledger, &self.worker.options);
        let mut control = ledger.control().await?;
        let spent = ledger.spent().await?;
        let interval_seconds = options.log_interval.as_secs_f64();
        // What all workers may spend until they look again is kept back.
        let ahead = f64::from(spent.workers) * interval_seconds;
        let usd = dollars(spent.device_seconds + ahead, options.usd_per_hour);
        let over_budget = options.usd_max.zip(usd).is_some_and(|(most, usd)| usd >= most);
        let over_deadline = options.deadline.zip(spent.store_now).is_some_and(|(deadline, now)| {
            (now - ledger.created_at())
                .to_std()
                .is_ok_and(|passed| passed >= deadline)
        });
        for (reached, why) in [(over_budget, StopWhy::Budget), (over_deadline, StopWhy::Deadline)] {
            if reached && control.stopped().is_none() {
                control.give(Order::Stop { why }).await?;
            }
        }
        if let Some(why) = control.stopped() {
            stop.set(match why {
                StopWhy::Budget => Why::Budget,
                StopWhy::Deadline => Why::Deadline,
                StopWhy::Cancelled => Why::Cancelled,
            });
        }
        Ok(())
    }

    /// The last act: logs what is finished, ends the attempts, gives unfinished shards back.
    async fn leave(mut self) -> anyhow::Result<()> {
        self.flush().await?;
        for mut shard in std::mem::take(&mut self.open).into_values() {
            if let Some(attempt) = &shard.attempt {
                shard.log.end(attempt).await?;
            }
            self.worker.queue.give_back(&shard.delivery).await?;
        }
        Ok(())
    }
}

/// Logs the shard's pending rows.
async fn append(worker: &Worker, shard: &mut OpenShard) -> anyhow::Result<()> {
    if shard.pending.is_empty() {
        return Ok(());
    }
    let rows = std::mem::take(&mut shard.pending);
    let batch = worker.output.to_batch(&shard.carry, shard.log.rows().start, &rows)?;
    shard.log.append(&batch).await?;
    Ok(())
}
