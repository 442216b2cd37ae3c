//! The thread that owns the device: takes ready shards, steps the engine, and sends finished rows
//! to the router. It never awaits.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use tokio::sync::mpsc::{self, error::TryRecvError};
use tokio::sync::oneshot;

use crate::engine::Generator;
use crate::worker::assemble::{Assembler, errored_row};
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
            // If the router has ended, its own error is the cause.
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
    /// Rows of taken shards, until the engine has capacity for them.
    backlog: VecDeque<(ShardKey, ReadyRow)>,
    /// Jobs with rows on the device, by their number within the worker.
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
    is_unwanted: Arc<AtomicBool>,
}

/// Number of computed tokens, and how many of them are in finished samples.
#[derive(Debug, Default)]
struct Tokens {
    computed: u64,
    finished: u64,
}

impl Device {
    fn run(mut self, mut ready: mpsc::Receiver<ReadyShard>) -> anyhow::Result<()> {
        let mut intake_open = true;
        while !self.stop.is_set() {
            self.cancel();
            self.fill(&mut ready, &mut intake_open)?;
            if self.engine.is_idle() && !intake_open && self.backlog.is_empty() {
                break;
            }
            self.step()?;
        }
        self.report_lost_work();
        self.send_event(RouterEvent::DeviceEnded)
    }

    /// Submits rows while the engine has capacity. The next shard joins while the last rows of the
    /// current one run, so that the batch stays full across shards and jobs.
    fn fill(&mut self, ready: &mut mpsc::Receiver<ReadyShard>, intake_open: &mut bool) -> anyhow::Result<()> {
        while self.engine.wants_more() {
            if let Some((key, row)) = self.backlog.pop_front() {
                self.submit(key, row)?;
                continue;
            }
            if !*intake_open {
                break;
            }
            let shard = match ready.try_recv() {
                Ok(shard) => Some(shard),
                Err(TryRecvError::Disconnected) => None,
                Err(TryRecvError::Empty) if self.engine.is_idle() => {
                    // The device is empty: drop its references, which would keep finished jobs
                    // open.
                    self.tries.clear();
                    self.jobs.clear();
                    self.worker.metrics.set_load(&self.engine.load());
                    ready.blocking_recv()
                }
                Err(TryRecvError::Empty) => break,
            };
            match shard {
                Some(shard) => self.take_shard(shard),
                None => *intake_open = false,
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
        worker.metrics.set_load(&self.engine.load());
        crate::failpoint!(blocking "device.after-step");
        for sample in finished {
            self.tokens.finished += sample.computed_tokens;
            if let Some((key, row)) = self.assembler.add(sample) {
                self.send_event(RouterEvent::Row(key, row))?;
            }
        }
        Ok(())
    }

    /// Splits a step's time among the jobs in proportion to their tokens in the step.
    fn charge(&mut self, time: Duration) {
        self.worker.meter.add_device_time(time);
        let tokens = self.engine.step_tokens();
        let all: u64 = tokens.iter().map(|(_, tokens)| tokens).sum();
        self.tokens.computed += all;
        if all > 0 {
            self.worker.metrics.observe_step(all);
        }
        for (number, tokens) in tokens {
            if let Some(job) = self.jobs.get(number) {
                job.add_device_time(time.mul_f64(*tokens as f64 / all as f64));
            }
        }
    }

    fn take_shard(&mut self, shard: ReadyShard) {
        // Drop rows of an earlier try at the same shard first.
        self.cancel();
        let ReadyShard {
            key,
            job,
            range,
            rows,
            is_unwanted,
            generation_span,
        } = shard;
        if is_unwanted.load(Ordering::Acquire) {
            return;
        }
        generation_span.begin();
        self.jobs.insert(key.job, job);
        self.tries.push(Try {
            job: key.job,
            rows: range,
            is_unwanted,
        });
        self.backlog.extend(rows.into_iter().map(|row| (key, row)));
    }

    /// Drops rows that are not needed any more.
    fn cancel(&mut self) {
        let dropped = self
            .tries
            .extract_if(.., |shard| shard.is_unwanted.load(Ordering::Acquire));
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
        // The generation keys the random numbers, so that a retried row draws others.
        for request in job.requests(row, prompt, params, job.ledger.generation()) {
            if let Err(refused) = self.engine.submit(request) {
                self.assembler.forget(key.job, row);
                return self.send_event(RouterEvent::Row(key, errored_row(row, refused.to_string())));
            }
        }
        Ok(())
    }

    /// Reports the device time of unfinished rows, which the next worker spends again.
    fn report_lost_work(&self) {
        let lost = self.tokens.computed.saturating_sub(self.tokens.finished);
        if self.tokens.computed > 0 && !self.engine.is_idle() {
            let seconds = self.worker.meter.read().device_seconds;
            self.worker
                .meter
                .set_lost_seconds(seconds * lost as f64 / self.tokens.computed as f64);
        }
    }

    fn send_event(&self, event: RouterEvent) -> anyhow::Result<()> {
        Ok(self.router_events.blocking_send(event).map_err(|_| RouterGone)?)
    }
}
