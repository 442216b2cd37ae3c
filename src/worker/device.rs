//! The thread that owns the device: takes ready shards, steps the engine, hands finished rows on. It never awaits.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use tokio::sync::mpsc::{self, error::TryRecvError};
use tokio::sync::oneshot;

use crate::engine::Generator;
use crate::worker::assemble::{Assembler, errored};
use crate::worker::in_flight::ShardKey;
use crate::worker::jobs::OpenJob;
use crate::worker::stop::Stop;
use crate::worker::{ReadyRow, ReadyShard, RouterEvent, Worker};

/// Runs the device on a thread of its own until no more shards come, or `stop` is set.
pub(super) async fn run(
    worker: Arc<Worker>,
    engine: Box<dyn Generator>,
    ready: mpsc::Receiver<ReadyShard>,
    router_events: mpsc::Sender<RouterEvent>,
    stop: Stop,
) -> anyhow::Result<()> {
    let (done_tx, done_rx) = oneshot::channel();
    let span = tracing::Span::current();
    std::thread::Builder::new()
        .name("device".into())
        .spawn(move || {
            let _entered = span.enter();
            let device = Device {
                worker,
                engine,
                router_events,
                stop,
                assembler: Assembler::default(),
                backlog: VecDeque::new(),
                jobs: HashMap::new(),
                tries: Vec::new(),
                tokens: Tokens::default(),
            };
            // If the router has ended, its own error gives the cause.
            let result = device
                .run(ready)
                .or_else(|error| if error.is::<RouterGone>() { Ok(()) } else { Err(error) });
            // The receiver is gone only when the whole worker is being dropped.
            let _ = done_tx.send(result);
        })
        .context("cannot start the device thread")?;
    done_rx.await.context("the device thread panicked")?
}

/// The router no longer takes finished rows.
#[derive(Debug, thiserror::Error)]
#[error("the router ended before the device")]
struct RouterGone;

struct Device {
    worker: Arc<Worker>,
    engine: Box<dyn Generator>,
    router_events: mpsc::Sender<RouterEvent>,
    stop: Stop,
    assembler: Assembler,
    /// Rows of received shards that the engine has no room for yet.
    backlog: VecDeque<(ShardKey, ReadyRow)>,
    /// Jobs with rows on the device, by number.
    jobs: HashMap<u32, Arc<OpenJob>>,
    /// Tries whose rows may be on the device.
    tries: Vec<Try>,
    tokens: Tokens,
}

/// A try at a shard's rows.
#[derive(Debug)]
struct Try {
    job: u32,
    rows: Range<u64>,
    unwanted: Arc<AtomicBool>,
}

/// Tokens that were computed, and the share of them in finished rows.
#[derive(Debug, Default)]
struct Tokens {
    computed: u64,
    finished: u64,
}

impl Device {
    fn run(mut self, mut ready: mpsc::Receiver<ReadyShard>) -> anyhow::Result<()> {
        let mut more = true;
        while !self.stop.is_set() {
            self.cancel();
            self.fill(&mut ready, &mut more)?;
            if self.engine.is_idle() && !more && self.backlog.is_empty() {
                break;
            }
            self.step()?;
        }
        self.report_lost_work();
        self.hand_on(RouterEvent::DeviceLeft)
    }

    /// The next shard joins while this one's tail runs, so the batch stays full across shards and jobs.
    fn fill(&mut self, ready: &mut mpsc::Receiver<ReadyShard>, more: &mut bool) -> anyhow::Result<()> {
        while self.engine.wants_more() {
            if let Some((key, row)) = self.backlog.pop_front() {
                self.submit(key, row)?;
                continue;
            }
            if !*more {
                break;
            }
            let shard = match ready.try_recv() {
                Ok(shard) => Some(shard),
                Err(TryRecvError::Disconnected) => None,
                Err(TryRecvError::Empty) if self.engine.is_idle() => {
                    // The device is empty: it must not keep finished jobs open.
                    self.tries.clear();
                    self.jobs.clear();
                    ready.blocking_recv()
                }
                Err(TryRecvError::Empty) => break,
            };
            match shard {
                Some(shard) => self.take(shard),
                None => *more = false,
            }
        }
        Ok(())
    }

    fn step(&mut self) -> anyhow::Result<()> {
        crate::failpoint!(blocking "device.before-step");
        let began = Instant::now();
        let worker = self.worker.clone();
        let finished = worker
            .watchdog
            .step(|| self.engine.step())
            .context("the device cannot go on")?;
        self.charge(began.elapsed());
        crate::failpoint!(blocking "device.after-step");
        for unit in finished {
            self.tokens.finished += unit.computed_tokens;
            if let Some((key, row)) = self.assembler.add(unit) {
                self.hand_on(RouterEvent::Row(key, row))?;
            }
        }
        Ok(())
    }

    /// Splits a step's time among jobs by their tokens in it.
    fn charge(&mut self, time: Duration) {
        self.worker.meter.add_device_time(time);
        let tokens = self.engine.step_tokens();
        let all: u64 = tokens.iter().map(|(_, tokens)| tokens).sum();
        self.tokens.computed += all;
        for (number, tokens) in tokens {
            if let Some(job) = self.jobs.get(number) {
                job.add_device_time(time.mul_f64(*tokens as f64 / all as f64));
            }
        }
    }

    fn take(&mut self, shard: ReadyShard) {
        // Drop rows of an earlier try at the same shard first.
        self.cancel();
        let ReadyShard {
            key,
            job,
            range,
            rows,
            unwanted,
        } = shard;
        if unwanted.load(Ordering::Acquire) {
            return;
        }
        self.jobs.insert(key.job, job);
        self.tries.push(Try {
            job: key.job,
            rows: range,
            unwanted,
        });
        self.backlog.extend(rows.into_iter().map(|row| (key, row)));
    }

    /// Drops rows that are not needed any more.
    fn cancel(&mut self) {
        let dropped = self
            .tries
            .extract_if(.., |shard| shard.unwanted.load(Ordering::Acquire));
        for Try { job, rows, .. } in dropped {
            self.backlog
                .retain(|(key, row)| key.job != job || !rows.contains(&row.row));
            self.engine.cancel(job, &|row| rows.contains(&row));
            self.assembler.forget_rows(job, &rows);
        }
    }

    fn submit(&mut self, key: ShardKey, ready: ReadyRow) -> anyhow::Result<()> {
        crate::failpoint!(blocking "device.before-submit");
        let ReadyRow { row, prompt, params } = ready;
        let Some(job) = self.jobs.get(&key.job).cloned() else {
            anyhow::bail!("row {row} is of a job that never came");
        };
        self.assembler
            .expect(key, row, params.samples, &params.shape, &job.columns);
        // A row of a retry draws other random numbers.
        for request in job.requests(row, prompt, params, job.ledger.generation()) {
            if let Err(refused) = self.engine.submit(request) {
                self.assembler.forget(key.job, row);
                return self.hand_on(RouterEvent::Row(key, errored(row, refused.to_string())));
            }
        }
        Ok(())
    }

    /// Reports the device time spent on unfinished rows: the worker that continues them spends it
    /// again.
    fn report_lost_work(&self) {
        let lost = self.tokens.computed.saturating_sub(self.tokens.finished);
        if self.tokens.computed > 0 && !self.engine.is_idle() {
            let seconds = self.worker.meter.read().device_seconds;
            self.worker
                .meter
                .set_lost_seconds(seconds * lost as f64 / self.tokens.computed as f64);
        }
    }

    fn hand_on(&self, event: RouterEvent) -> anyhow::Result<()> {
        Ok(self.router_events.blocking_send(event).map_err(|_| RouterGone)?)
    }
}
