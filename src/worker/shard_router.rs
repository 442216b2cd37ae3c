//! Routes finished rows to the tasks of their shards, and extends the deliveries of shards in
//! flight at the queue. At the end, it has finished rows logged and unfinished shards given back.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;
use tracing::Instrument;

use crate::queue::Recall;
use crate::worker::in_flight::ShardKey;
use crate::worker::shard::{ShardCommand, ShardWork, run_shard};
use crate::worker::stop::{Stop, StopCause};
use crate::worker::{RouterEvent, Worker, one_line, spans};

/// How long the router waits after a stop for [`RouterEvent::DeviceEnded`].
const LAST_STEP_WAIT: Duration = Duration::from_secs(15);
/// Time between two extensions of the shards in flight at the queue.
const EXTEND_EVERY: Duration = Duration::from_secs(2);

/// Routes rows until the other stages have closed the channel. At the end, and also after an error,
/// has finished rows logged and unfinished shards given back.
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
        has_device_ended: false,
    };
    let served = router.serve(&mut router_events).await;
    // The other stages' sends must fail at once instead of filling a channel without a reader.
    drop(router_events);
    let left = router.end_all().await;
    served.and(left)
}

struct ShardRouter {
    worker: Arc<Worker>,
    stop: Stop,
    /// The tasks of shards in flight.
    shards: HashMap<ShardKey, mpsc::UnboundedSender<ShardCommand>>,
    tasks: JoinSet<(ShardKey, anyhow::Result<()>)>,
    /// Whether the device ended cleanly. If not, a row may have crashed it, so the attempts stay
    /// without an end.
    has_device_ended: bool,
}

impl ShardRouter {
    async fn serve(&mut self, router_events: &mut mpsc::Receiver<RouterEvent>) -> anyhow::Result<()> {
        let mut extends = tokio::time::interval(EXTEND_EVERY);
        extends.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let queue = self.worker.queue.clone();
        let stop = self.stop.clone();
        let mut first_error = None;
        let mut is_stopping = false;
        let last_step = async {
            stop.wait().await;
            tokio::time::sleep(LAST_STEP_WAIT).await;
        };
        tokio::pin!(last_step);
        loop {
            tokio::select! {
                message = router_events.recv() => match message {
                    Some(RouterEvent::Opened(shard)) => self.open(*shard),
                    Some(RouterEvent::Row(key, row)) => self.send(key, ShardCommand::Row(row)),
                    Some(RouterEvent::DeviceEnded) => self.has_device_ended = true,
                    None => break,
                },
                Some(ended) = self.tasks.join_next() => if let Err(error) = self.note_ended(ended) {
                    // The other shards are not affected: their rows are logged before they are
                    // given back.
                    first_error.get_or_insert(error);
                    self.stop.set(StopCause::Failed);
                },
                () = stop.wait(), if !is_stopping => {
                    is_stopping = true;
                    // Finished rows must not wait for the device's step, which may take long.
                    for shard in self.shards.values() {
                        let _ = shard.send(ShardCommand::Flush);
                    }
                }
                () = &mut last_step => {
                    self.has_device_ended |= self.worker.watchdog.is_alive();
                    break;
                }
                recall = queue.next_recall() => self.recall(recall),
                _ = extends.tick() => self.extend().await?,
            }
        }
        first_error.map_or(Ok(()), Err)
    }

    fn open(&mut self, shard: ShardWork) {
        let (commands_tx, commands_rx) = mpsc::unbounded_channel();
        let key = shard.key;
        self.shards.insert(key, commands_tx);
        let (worker, stop) = (self.worker.clone(), self.stop.clone());
        let span = spans::of_shard(&shard.job, key.shard, shard.attempt.as_ref());
        let task = async move { (key, run_shard(worker, shard, commands_rx, stop).await) };
        self.tasks.spawn(task.instrument(span));
        if !self.worker.in_flight.is_wanted(key) {
            self.send(key, ShardCommand::Recalled("the queue took it back before it began"));
        }
    }

    /// Sends a command to a shard's task; a shard that has ended drops it.
    fn send(&self, key: ShardKey, command: ShardCommand) {
        if let Some(shard) = self.shards.get(&key) {
            let _ = shard.send(command);
        }
    }

    fn note_ended(
        &mut self,
        ended: Result<(ShardKey, anyhow::Result<()>), tokio::task::JoinError>,
    ) -> anyhow::Result<()> {
        let (key, result) = ended.map_err(|e| anyhow::anyhow!("the task of a shard panicked: {e}"))?;
        // If the same shard has been opened again meanwhile, its channel is a new one and open.
        if self.shards.get(&key).is_some_and(mpsc::UnboundedSender::is_closed) {
            self.shards.remove(&key);
        }
        result
    }

    fn recall(&self, recall: Recall) {
        for key in self.worker.in_flight.mark_recalled(&recall.receipts) {
            self.send(key, ShardCommand::Recalled(recall.why));
        }
        // The queue waits until the recall is dropped: when none of these deliveries is in flight
        // any more.
        let worker = self.worker.clone();
        tokio::spawn(async move {
            while worker.in_flight.holds_any(&recall.receipts) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            drop(recall);
        });
    }

    /// Extends the shards in flight at the queue. If the device hangs, the queue may give them to
    /// other workers.
    async fn extend(&self) -> anyhow::Result<()> {
        if !self.worker.watchdog.is_alive() {
            return Ok(());
        }
        let time = self.worker.watchdog.step_max();
        for delivery in self.worker.in_flight.deliveries() {
            self.worker.queue.extend(&delivery, time).await?;
        }
        Ok(())
    }

    /// Has the tasks of all shards log finished rows, end their attempts and give unfinished shards
    /// back, even if one fails. Returns the first error.
    async fn end_all(mut self) -> anyhow::Result<()> {
        let is_device_sound = self.has_device_ended;
        for shard in self.shards.values() {
            let _ = shard.send(ShardCommand::Leave { is_device_sound });
        }
        let mut first_error = None;
        while let Some(ended) = self.tasks.join_next().await {
            first_error = first_error.or(self.note_ended(ended).err());
        }
        let jobs = self.worker.jobs.open().await;
        // Without unwritten spending, a failure is not reported: other workers notice by themselves
        // that this one has left.
        let final_spends = jobs.iter().map(|job| async {
            if let Err(error) = job.write_final_spend(&self.worker.name).await
                && job.has_unwritten_spend()
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
        futures::future::join_all(final_spends).await;
        first_error.map_or(Ok(()), Err)
    }
}
