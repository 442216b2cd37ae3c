//! Receive → read → render → tokenize: everything that can be done before the device has room.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use arrow::array::RecordBatch;
use rayon::prelude::*;
use tokio::sync::{Semaphore, mpsc};

use crate::dataset::plan::Shard;
use crate::dataset::row::{InputRow, RowResult};
use crate::job::RenderedRow;
use crate::ledger::attempts::Narrowing;
use crate::ledger::log::{ShardLog, ShardState};
use crate::queue::Delivery;
use crate::worker::assemble::errored;
use crate::worker::keeper::OpenShard;
use crate::worker::stop::Stop;
use crate::worker::{Kept, ReadyRow, ReadyShard, Worker};

/// How long to wait for a message before asking the ledger whether the job is done.
const RECEIVE_WAIT: Duration = Duration::from_millis(100);

/// Prepares shards until the queue is empty or `stop` is set.
pub(super) async fn run(
    worker: Arc<Worker>,
    ready: mpsc::Sender<ReadyShard>,
    kept: mpsc::Sender<Kept>,
    stop: Stop,
) -> anyhow::Result<()> {
    let places = Arc::new(Semaphore::new(worker.options.shards_in_flight as usize));
    let intake = Intake {
        worker,
        ready,
        kept,
        places,
    };
    loop {
        let delivery = tokio::select! {
            biased;
            _ = stop.wait() => return Ok(()),
            delivery = intake.worker.queue.receive(RECEIVE_WAIT) => delivery?,
        };
        let Some(delivery) = delivery else {
            if intake.places.available_permits() < intake.worker.options.shards_in_flight as usize {
                continue;
            }
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
        let places = if plan.alone() {
            worker.options.shards_in_flight
        } else {
            1
        };
        let permit = tokio::select! {
            biased;
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
        // Until the attempt is written down, a stop may end this anywhere.
        let prepared = tokio::select! {
            biased;
            _ = stop.wait() => None,
            prepared = self.prepare(&shard, &plan) => Some(prepared?),
        };
        let Some(Prepared {
            carry,
            ready,
            mut results,
        }) = prepared
        else {
            worker.queue.give_back(&delivery).await?;
            return Ok(false);
        };
        let accused = |row| {
            errored(
                row,
                "the process died three times while this row was alone on the device".into(),
            )
        };
        results.extend(plan.accused.iter().map(accused));
        for row in &results {
            worker.meter.add_row(row);
        }
        let mut shard = OpenShard::new(log, carry, delivery, permit);
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

    /// Reads the shard; renders and tokenizes the rows to try.
    async fn prepare(&self, shard: &Shard, plan: &Narrowing) -> anyhow::Result<Prepared> {
        let read = self.worker.reader.read(shard).await?;
        let rows: Vec<InputRow> = read
            .rows
            .into_iter()
            .filter(|row| plan.next.contains(row.row))
            .collect();
        let worker = self.worker.clone();
        let rendered = tokio::task::spawn_blocking(move || {
            let render = |row: &InputRow| (row.row, worker.renderer.render(row));
            worker
                .render_threads
                .install(|| rows.par_iter().map(render).collect::<Vec<_>>())
        });
        let mut prepared = Prepared {
            carry: read.carry,
            ready: Vec::new(),
            results: Vec::new(),
        };
        for (row, prompt) in rendered.await.context("rendering panicked")? {
            match prompt {
                Ok(RenderedRow {
                    tokens,
                    params,
                    text: _,
                }) => {
                    prepared.ready.push(ReadyRow {
                        row,
                        prompt: tokens.into(),
                        params,
                    });
                }
                Err(why) => prepared.results.push(errored(row, why)),
            }
        }
        Ok(prepared)
    }
}

/// A shard's rows, ready for the device or already done with.
struct Prepared {
    carry: RecordBatch,
    ready: Vec<ReadyRow>,
    results: Vec<RowResult>,
}
