//! Routes finished rows to the tasks of their shards, and tells the queue which shards are still in
//! progress. At the end it has every shard logged and given back.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;
use tracing::Instrument;

use crate::queue::Recall;
use crate::worker::in_flight::ShardKey;
use crate::worker::shard::{OpenShard, ShardCommand, run_shard};
use crate::worker::stop::{Stop, Why};
use crate::worker::{RouterEvent, Worker, one_line, spans};

/// How long the router waits after a stop for [`RouterEvent::DeviceLeft`].
const LAST_STEP: Duration = Duration::from_secs(15);
/// How often the shards in hand are extended at the queue.
const EXTEND_EVERY: Duration = Duration::from_secs(2);

/// Collects rows until all stages have closed their channel. At the end, and also after an error,
/// logs finished rows and gives unfinished shards back.
pub(super) async fn run(
    worker: Arc<Worker>,
    mut router_events: mpsc::Receiver<RouterEvent>,
    stop: Stop,
) -> anyhow::Result<()> {
    let mut router = ShardRouter {
        worker,
        stop,
        shards: HashMap::new(),
        tasks: JoinSet::new(),
        device_left: false,
    };
    let served = router.serve(&mut router_events).await;
    // The other stages' sends must fail at once instead of filling a channel without a reader.
    drop(router_events);
    let left = router.leave().await;
    served.and(left)
}

struct ShardRouter {
    worker: Arc<Worker>,
    stop: Stop,
    /// The tasks of shards in flight.
    shards: HashMap<ShardKey, mpsc::UnboundedSender<ShardCommand>>,
    tasks: JoinSet<(ShardKey, anyhow::Result<()>)>,
    /// The device ended cleanly. If not, a row may have ended it: the attempts then stay without an
    /// end.
    device_left: bool,
}

impl ShardRouter {
    async fn serve(&mut self, router_events: &mut mpsc::Receiver<RouterEvent>) -> anyhow::Result<()> {
        let mut extends = tokio::time::interval(EXTEND_EVERY);
        extends.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let queue = self.worker.queue.clone();
        let stop = self.stop.clone();
        let mut first_error = None;
        let mut stopping = false;
        let last_step = async {
            stop.wait().await;
            tokio::time::sleep(LAST_STEP).await;
        };
        tokio::pin!(last_step);
        loop {
            tokio::select! {
                message = router_events.recv() => match message {
                    Some(RouterEvent::Opened(shard)) => self.open(*shard),
                    Some(RouterEvent::Row(key, row)) => self.tell(key, ShardCommand::Row(row)),
                    Some(RouterEvent::DeviceLeft) => self.device_left = true,
                    None => break,
                },
                Some(ended) = self.tasks.join_next() => if let Err(error) = self.ended(ended) {
                    // The other shards' rows are sound: they are logged and given back in good
                    // order.
                    first_error.get_or_insert(error);
                    self.stop.set(Why::Failed);
                },
                () = stop.wait(), if !stopping => {
                    stopping = true;
                    // The device's step may take long, and finished rows must not wait for it.
                    for shard in self.shards.values() {
                        let _ = shard.send(ShardCommand::Flush);
                    }
                }
                () = &mut last_step => {
                    self.device_left |= self.worker.watchdog.is_alive();
                    break;
                }
                recall = queue.recalled() => self.recall(recall),
                _ = extends.tick() => self.extend().await?,
            }
        }
        first_error.map_or(Ok(()), Err)
    }

    fn open(&mut self, shard: OpenShard) {
        let (tell, told) = mpsc::unbounded_channel();
        let key = shard.key;
        self.shards.insert(key, tell);
        let (worker, stop) = (self.worker.clone(), self.stop.clone());
        let span = spans::of_shard(&shard.job, key.shard, shard.attempt.as_ref());
        let task = async move { (key, run_shard(worker, shard, told, stop).await) };
        self.tasks.spawn(task.instrument(span));
        if !self.worker.in_flight.is_wanted(key) {
            self.tell(key, ShardCommand::Recalled("it was taken back before it began"));
        }
    }

    /// Sends a command to a shard's task; a shard that has ended drops it.
    fn tell(&self, key: ShardKey, tell: ShardCommand) {
        if let Some(shard) = self.shards.get(&key) {
            let _ = shard.send(tell);
        }
    }

    fn ended(&mut self, ended: Result<(ShardKey, anyhow::Result<()>), tokio::task::JoinError>) -> anyhow::Result<()> {
        let (key, result) = ended.map_err(|e| anyhow::anyhow!("the task of a shard panicked: {e}"))?;
        // The same shard may have been opened again in between: its channel is then a new, open
        // one.
        if self.shards.get(&key).is_some_and(mpsc::UnboundedSender::is_closed) {
            self.shards.remove(&key);
        }
        result
    }

    fn recall(&self, recall: Recall) {
        for key in self.worker.in_flight.recall(&recall.receipts) {
            self.tell(key, ShardCommand::Recalled(recall.why));
        }
        // The recall ends, and with it the queue's wait, when none of these deliveries is in hand
        // any more.
        let worker = self.worker.clone();
        tokio::spawn(async move {
            while worker.in_flight.holds_any(&recall.receipts) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            drop(recall);
        });
    }

    /// Extends the shards in hand at the queue. If the device hangs, the queue may give them to
    /// other workers.
    async fn extend(&self) -> anyhow::Result<()> {
        if !self.worker.watchdog.is_alive() {
            return Ok(());
        }
        let time = self.worker.watchdog.limit();
        for delivery in self.worker.in_flight.deliveries() {
            self.worker.queue.extend(&delivery, time).await?;
        }
        Ok(())
    }

    /// Ends all shards: logs finished rows, ends the attempts, gives unfinished shards back. All
    /// shards are handled even if one fails; the first error is returned.
    async fn leave(mut self) -> anyhow::Result<()> {
        let whole = self.device_left;
        for shard in self.shards.values() {
            let _ = shard.send(ShardCommand::Leave { whole });
        }
        let mut first_error = None;
        while let Some(ended) = self.tasks.join_next().await {
            first_error = first_error.or(self.ended(ended).err());
        }
        let jobs = self.worker.jobs.open().await;
        // Workers that owe nothing may fail here silently: the others notice by themselves that
        // they have left.
        let debts = jobs.iter().map(|job| async {
            if let Err(error) = job.end_spend(&self.worker.name).await
                && job.owes()
            {
                tracing::warn!(
                    job = job.ledger.job().name,
                    output = %job.ledger.store().url(),
                    "{}: {:.1} device seconds were not written down: {}",
                    job.title(),
                    job.device_seconds(),
                    one_line(&error)
                );
            }
        });
        futures::future::join_all(debts).await;
        first_error.map_or(Ok(()), Err)
    }
}
