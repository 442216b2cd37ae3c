//! The thread that owns the device: takes ready shards, steps the engine, hands finished rows on. It never awaits.

use std::sync::Arc;
use std::time::Instant;

use anyhow::Context;
use tokio::sync::mpsc::{self, error::TryRecvError};
use tokio::sync::oneshot;

use crate::engine::Engine;
use crate::engine::request::{Request, UnitId};
use crate::worker::assemble::{Assembler, errored};
use crate::worker::stop::Stop;
use crate::worker::{Kept, ReadyShard, Worker};

/// Runs the device on a thread of its own until no more shards come, or `stop` is set.
pub(super) async fn run(
    worker: Arc<Worker>,
    engine: Engine,
    ready: mpsc::Receiver<ReadyShard>,
    kept: mpsc::Sender<Kept>,
    stop: Stop,
) -> anyhow::Result<()> {
    let (done_tx, done_rx) = oneshot::channel();
    std::thread::Builder::new()
        .name("device".into())
        .spawn(move || {
            let result = Device {
                worker,
                engine,
                kept,
                stop,
                assembler: Assembler::default(),
            }
            .run(ready);
            // The receiver is gone only when the whole worker is being dropped.
            let _ = done_tx.send(result);
        })
        .context("cannot start the device thread")?;
    done_rx.await.context("the device thread panicked")?
}

struct Device {
    worker: Arc<Worker>,
    engine: Engine,
    kept: mpsc::Sender<Kept>,
    stop: Stop,
    assembler: Assembler,
}

impl Device {
    fn run(mut self, mut ready: mpsc::Receiver<ReadyShard>) -> anyhow::Result<()> {
        let mut more = true;
        while !self.stop.is_set() {
            // The next shard joins while this one's tail runs, so the batch stays full across shard boundaries.
            while more && self.engine.wants_more() {
                match ready.try_recv() {
                    Ok(shard) => self.submit(shard)?,
                    Err(TryRecvError::Disconnected) => more = false,
                    Err(TryRecvError::Empty) if self.engine.is_idle() => match ready.blocking_recv() {
                        Some(shard) => self.submit(shard)?,
                        None => more = false,
                    },
                    Err(TryRecvError::Empty) => break,
                }
            }
            if self.engine.is_idle() {
                break;
            }
            let began = Instant::now();
            let finished = self.engine.step().context("the device cannot go on")?;
            self.worker.meter.add_device_time(began.elapsed());
            for unit in finished {
                if let Some(row) = self.assembler.add(unit) {
                    self.hand_on(Kept::Row(row))?;
                }
            }
        }
        Ok(())
    }

    fn submit(&mut self, shard: ReadyShard) -> anyhow::Result<()> {
        for (row, rendered) in shard.rows {
            let params = rendered.params;
            self.assembler.expect(row, params.samples, &params.shape);
            let prompt: Arc<[u32]> = rendered.tokens.into();
            for sample in 0..params.samples {
                let request = Request {
                    id: UnitId {
                        row,
                        sample,
                        attempt: 0,
                    },
                    prompt: prompt.clone(),
                    params: params.clone(),
                };
                if let Err(refused) = self.engine.submit(request) {
                    self.assembler.forget(row);
                    self.hand_on(Kept::Row(errored(row, refused.to_string())))?;
                    break;
                }
            }
        }
        Ok(())
    }

    fn hand_on(&self, kept: Kept) -> anyhow::Result<()> {
        self.kept
            .blocking_send(kept)
            .map_err(|_| anyhow::anyhow!("the keeper ended before the device"))
    }
}
