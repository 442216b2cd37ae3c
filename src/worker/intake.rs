//! Receive → read → render → tokenize: everything that can be done before the device has room.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use arrow::array::RecordBatch;
use rayon::prelude::*;
use tokio::sync::{Semaphore, mpsc};

use crate::dataset::row::{InputRow, RowResult};
use crate::job::{RenderedRow, Renderer};
use crate::ledger::log::{ShardLog, ShardState};
use crate::queue::Delivery;
use crate::worker::assemble::errored;
use crate::worker::keeper::OpenShard;
use crate::worker::stop::Stop;
use crate::worker::{Kept, ReadyShard, SHARDS_IN_FLIGHT, Worker};

/// How long to wait for a message before asking the ledger whether the job is done.
const RECEIVE_WAIT: Duration = Duration::from_millis(100);

/// Prepares shards until the queue is empty or `stop` is set.
pub(super) async fn run(
    worker: Arc<Worker>,
    ready: mpsc::Sender<ReadyShard>,
    kept: mpsc::Sender<Kept>,
    stop: Stop,
) -> anyhow::Result<()> {
    let places = Arc::new(Semaphore::new(SHARDS_IN_FLIGHT as usize));
    let intake = Intake {
        worker,
        ready,
        kept,
        places,
    };
    loop {
        let delivery = tokio::select! {
            _ = stop.wait() => return Ok(()),
            delivery = intake.worker.queue.receive(RECEIVE_WAIT) => delivery?,
        };
        let Some(delivery) = delivery else {
            // An empty queue proves nothing: a shard may come back. The ledger says when the job is done.
            if intake.worker.ledger.finish_check(None).await?.is_some() {
                return Ok(());
            }
            continue;
        };
        match intake.worker.ledger.shard(delivery.message.shard).await? {
            ShardState::Committed(_) => intake.worker.queue.acknowledge(&delivery).await?,
            ShardState::Open(log) => {
                if !intake.open(delivery, *log, &stop).await? {
                    return Ok(());
                }
            }
        }
    }
}

struct Intake {
    worker: Arc<Worker>,
    ready: mpsc::Sender<ReadyShard>,
    kept: mpsc::Sender<Kept>,
    places: Arc<Semaphore>,
}

impl Intake {
    /// Sends a shard, or as much of it as may be tried at once, to keeper and device. False once they no longer listen.
    async fn open(&self, delivery: Delivery, log: ShardLog, stop: &Stop) -> anyhow::Result<bool> {
        let worker = &self.worker;
        let plan = log.narrowing();
        // A narrowed try has the device to itself: it takes every place there is.
        let places = if plan.alone() { SHARDS_IN_FLIGHT } else { 1 };
        let permit = tokio::select! {
            _ = stop.wait() => None,
            permit = self.places.clone().acquire_many_owned(places) => Some(permit.context("the places are never closed")?),
        };
        let Some(permit) = permit else {
            worker.queue.give_back(&delivery).await?;
            return Ok(false);
        };
        if log.is_complete() {
            // A worker died between the last record and the part: nothing is left to do but to publish.
            let shard = OpenShard::new(log, RecordBatch::new_empty(worker.output.schema()), delivery, permit);
            return Ok(self.kept.send(Kept::Opened(Box::new(shard))).await.is_ok());
        }
        let shard = worker.ledger.job().shard(log.shard())?.clone();
        let read = worker.reader.read(&shard).await?;
        let mut results: Vec<RowResult> = plan
            .accused
            .iter()
            .map(|row| {
                errored(
                    row,
                    "the process died twice while this row was alone on the device".into(),
                )
            })
            .collect();
        let wanted: Vec<InputRow> = read
            .rows
            .into_iter()
            .filter(|row| plan.next.contains(row.row))
            .collect();
        let (ready, broken) = render(worker.renderer.clone(), wanted).await?;
        results.extend(broken);
        for row in &results {
            worker.meter.add_row(row);
        }
        let mut shard = OpenShard::new(log, read.carry, delivery, permit);
        shard.pending = results;
        if ready.is_empty() {
            return Ok(self.kept.send(Kept::Opened(Box::new(shard))).await.is_ok());
        }
        // A place first, then the attempt: rows that only wait must not be blamed for a kill.
        let place = tokio::select! {
            _ = stop.wait() => None,
            place = self.ready.reserve() => place.ok(),
        };
        let Some(place) = place else {
            worker.queue.give_back(&shard.delivery).await?;
            return Ok(false);
        };
        shard.attempt = Some(shard.log.begin(&worker.name, &plan.next, plan.alone()).await?);
        shard.missing = ready.len() as u64;
        // The keeper must know the shard before any of its rows comes.
        if self.kept.send(Kept::Opened(Box::new(shard))).await.is_err() {
            return Ok(false);
        }
        place.send(ReadyShard { rows: ready });
        Ok(true)
    }
}

/// Renders and tokenizes on all cores: prompts, and the rows that have none.
async fn render(
    renderer: Arc<Renderer>,
    rows: Vec<InputRow>,
) -> anyhow::Result<(Vec<(u64, RenderedRow)>, Vec<RowResult>)> {
    let rendered = tokio::task::spawn_blocking(move || {
        rows.par_iter()
            .map(|row| (row.row, renderer.render(row)))
            .collect::<Vec<_>>()
    })
    .await
    .context("rendering panicked")?;
    let mut ready = Vec::with_capacity(rendered.len());
    let mut broken = Vec::new();
    for (row, prompt) in rendered {
        match prompt {
            Ok(prompt) => ready.push((row, prompt)),
            Err(why) => broken.push(errored(row, why)),
        }
    }
    Ok((ready, broken))
}
