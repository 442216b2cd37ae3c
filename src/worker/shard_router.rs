//! Routes finished rows to the tasks of their shards, tells the queue which shards are worked on still, and at the end has
//! every shard logged and given back.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

use crate::queue::Recall;
use crate::worker::in_flight::ShardKey;
use crate::worker::shard::{OpenShard, ShardCommand, run_shard};
use crate::worker::stop::{Stop, Why};
use crate::worker::{RouterEvent, Worker, one_line};

/// How long the device may go on after a stop before the router leaves without its last word.
const LAST_STEP: Duration = Duration::from_secs(15);
/// How often the queue hears of the shards in hand.
const EXTEND_EVERY: Duration = Duration::from_secs(2);

/// Keeps rows until no stage can send any more; at the end, and after an error too, logs what is finished and gives the
/// rest back.
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
    // Nobody waits for an answer of the other stages: their sends must fail at once, not fill the channel.
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
    /// The device ended as it should. If not, a row may have been the end of it, and the attempts say so by having none.
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
                    // The others' rows are sound: they are logged and given back in good order.
                    first_error.get_or_insert(error);
                    self.stop.set(Why::Failed);
                },
                () = stop.wait(), if !stopping => {
                    stopping = true;
                    // The device may be long over its step: what is finished must not wait for that.
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
        self.tasks
            .spawn(async move { (key, run_shard(worker, shard, told, stop).await) });
        if !self.worker.in_flight.is_wanted(key) {
            self.tell(key, ShardCommand::Recalled("it was taken back before it began"));
        }
    }

    /// A shard that is gone needs nothing: its rows are dropped.
    fn tell(&self, key: ShardKey, tell: ShardCommand) {
        if let Some(shard) = self.shards.get(&key) {
            let _ = shard.send(tell);
        }
    }

    fn ended(&mut self, ended: Result<(ShardKey, anyhow::Result<()>), tokio::task::JoinError>) -> anyhow::Result<()> {
        let (key, result) = ended.map_err(|e| anyhow::anyhow!("the task of a shard panicked: {e}"))?;
        // The same shard may have been opened again in between: its channel is another, and open.
        if self.shards.get(&key).is_some_and(mpsc::UnboundedSender::is_closed) {
            self.shards.remove(&key);
        }
        result
    }

    fn recall(&self, recall: Recall) {
        for key in self.worker.in_flight.recall(&recall.receipts) {
            self.tell(key, ShardCommand::Recalled(recall.why));
        }
        // The queue hears that work on them has ended when the last of their shards is no longer in hand.
        let worker = self.worker.clone();
        tokio::spawn(async move {
            while worker.in_flight.holds_any(&recall.receipts) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            drop(recall);
        });
    }

    /// Says which shards are worked on still, unless the device hangs: then the queue may give them to others.
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

    /// The last act: logs what is finished, ends the attempts, gives unfinished shards back. A shard that fails does not keep
    /// the others from it; the first error is returned.
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
        // Of one that owes nothing, the others find out by themselves that it has left.
        let debts = jobs.iter().map(|job| async {
            if let Err(error) = job.end_spend(&self.worker.name).await
                && job.owes()
            {
                tracing::warn!(
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
