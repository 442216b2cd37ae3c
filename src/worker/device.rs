//! The thread that owns the device: takes ready shards, steps the engine, hands finished rows on. It never awaits.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context;
use tokio::sync::mpsc::{self, error::TryRecvError};
use tokio::sync::oneshot;

use crate::engine::Engine;
use crate::engine::request::{Request, UnitId};
use crate::worker::assemble::{Assembler, errored};
use crate::worker::stop::Stop;
use crate::worker::{Kept, ReadyRow, ReadyShard, Worker};

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
            let device = Device {
                worker,
                engine,
                kept,
                stop,
                assembler: Assembler::default(),
                backlog: VecDeque::new(),
            };
            // Where the keeper has gone, its own error says why.
            let result = device
                .run(ready)
                .or_else(|error| if error.is::<KeeperGone>() { Ok(()) } else { Err(error) });
            // The receiver is gone only when the whole worker is being dropped.
            let _ = done_tx.send(result);
        })
        .context("cannot start the device thread")?;
    done_rx.await.context("the device thread panicked")?
}

/// Nobody takes finished rows any more.
#[derive(Debug, thiserror::Error)]
#[error("the keeper ended before the device")]
struct KeeperGone;

struct Device {
    worker: Arc<Worker>,
    engine: Engine,
    kept: mpsc::Sender<Kept>,
    stop: Stop,
    assembler: Assembler,
    /// Rows of received shards that the engine has no room to look at yet.
    backlog: VecDeque<ReadyRow>,
}

impl Device {
    fn run(mut self, mut ready: mpsc::Receiver<ReadyShard>) -> anyhow::Result<()> {
        let mut more = true;
        while !self.stop.is_set() {
            // The next shard joins while this one's tail runs, so the batch stays full across shard boundaries.
            while self.engine.wants_more() {
                if let Some(row) = self.backlog.pop_front() {
                    self.submit(row)?;
                    continue;
                }
                if !more {
                    break;
                }
                match ready.try_recv() {
                    Ok(shard) => self.backlog.extend(shard.rows),
                    Err(TryRecvError::Disconnected) => more = false,
                    Err(TryRecvError::Empty) if self.engine.is_idle() => match ready.blocking_recv() {
                        Some(shard) => self.backlog.extend(shard.rows),
                        None => more = false,
                    },
                    Err(TryRecvError::Empty) => break,
                }
            }
            if self.engine.is_idle() && !more && self.backlog.is_empty() {
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
        self.hand_on(Kept::DeviceLeft)
    }

    fn submit(&mut self, ready: ReadyRow) -> anyhow::Result<()> {
        let ReadyRow { row, prompt, params } = ready;
        self.assembler.expect(row, params.samples, &params.shape);
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
                return self.hand_on(Kept::Row(errored(row, refused.to_string())));
            }
        }
        Ok(())
    }

    fn hand_on(&self, kept: Kept) -> anyhow::Result<()> {
        Ok(self.kept.blocking_send(kept).map_err(|_| KeeperGone)?)
    }
}
