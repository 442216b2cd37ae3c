//! Receive → read → render → tokenize: everything that can be done before the device has room.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use arrow::array::RecordBatch;
use rayon::prelude::*;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

use crate::dataset::DatasetError;
use crate::dataset::plan::Shard;
use crate::dataset::row::{InputRow, RowResult, RowStatus, ShardRows};
use crate::job::RenderedRow;
use crate::ledger::attempts::Narrowing;
use crate::ledger::log::{ShardLog, ShardState};
use crate::ledger::{Order, RowSet, StopWhy};
use crate::queue::Delivery;
use crate::worker::assemble::{closed, errored};
use crate::worker::fate::fate;
use crate::worker::idle::Idle;
use crate::worker::in_flight::ShardKey;
use crate::worker::in_hand::InHand;
use crate::worker::jobs::{Heard, JobState, OpenJob};
use crate::worker::patience::{Pauses, Reaction};
use crate::worker::process::see;
use crate::worker::shard::OpenShard;
use crate::worker::stop::Stop;
use crate::worker::{Kept, ReadyRow, ReadyShard, Until, Worker, one_line};

/// How long to wait for a message before looking around.
const RECEIVE_WAIT: Duration = Duration::from_millis(250);
/// Between two looks at a device that hangs.
const HANG_LOOK: Duration = Duration::from_secs(1);

/// Prepares shards until there is nothing more to do or `stop` is set.
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
        stop,
    };
    intake.serve().await
}

struct Intake {
    worker: Arc<Worker>,
    ready: mpsc::Sender<ReadyShard>,
    kept: mpsc::Sender<Kept>,
    places: Arc<Semaphore>,
    stop: Stop,
}

/// What became of a shard that was ready.
enum Handed {
    On,
    /// This worker cannot begin it: it is left to others.
    Back,
    /// The other stages have ended; their own errors say why.
    ToNobody,
}

/// What came of looking for a shard.
enum Found<'a> {
    Nothing,
    /// Everything there was to do is done.
    Over,
    /// Ready for keeper and device.
    Shard(Box<Begun<'a>>),
}

impl Intake {
    async fn serve(&self) -> anyhow::Result<()> {
        let mut idle = Idle::new();
        let mut taken = 0;
        while self.worker.options.max_shards.is_none_or(|most| taken < most) {
            let found = tokio::select! {
                biased;
                () = self.stop.wait() => return Ok(()),
                found = self.find(&mut idle) => found?,
            };
            match found {
                Found::Nothing => {}
                Found::Over => return Ok(()),
                // Not to be dropped in between: a stop must not leave an attempt behind that never ends.
                Found::Shard(begun) => match self.begin(*begun).await? {
                    Handed::On => taken += 1,
                    Handed::Back => {}
                    Handed::ToNobody => return Ok(()),
                },
            }
        }
        Ok(())
    }

    /// May be dropped anywhere: a delivery in hand goes back to the queue by being dropped.
    async fn find(&self, idle: &mut Idle) -> anyhow::Result<Found<'_>> {
        while !self.worker.pulse.is_alive() {
            // The device hangs: others shall have what is left.
            tokio::time::sleep(HANG_LOOK).await;
        }
        // A place first: what cannot be begun is better in another worker's hands.
        let place = self.places.clone().acquire_owned().await?;
        crate::failpoint!("intake.before-receive");
        let received = match self.worker.queue.receive(RECEIVE_WAIT).await {
            Ok(received) => received,
            Err(error) => {
                let mut pauses = Pauses::default();
                self.worker.patience.bear(error.into(), &mut pauses, &self.stop).await?;
                None
            }
        };
        let Some(delivery) = received else {
            drop(place);
            idle.clock.look(self.worker.queue.is_attached());
            let over = self.worker.in_flight.is_empty() && self.is_over(idle).await?;
            return Ok(if over { Found::Over } else { Found::Nothing });
        };
        *idle = Idle::new();
        crate::failpoint!("intake.after-receive");
        #[cfg(feature = "faults")]
        if crate::faults::switch("ack-before-commit") {
            self.worker.queue.acknowledge(&delivery).await?;
        }
        let Some(job) = self.job_of(delivery).await? else {
            return Ok(Found::Nothing);
        };
        let (job, delivery) = job;
        let key = ShardKey {
            job: job.number,
            shard: delivery.message.shard,
        };
        if !self.worker.in_flight.enter(key, Arc::new(delivery)) {
            tracing::info!(
                "shard {} is in hand already: both messages are answered together",
                key.shard
            );
            return Ok(Found::Nothing);
        }
        let in_hand = InHand::new(&self.worker, key);
        match self.open(&job, key, place).await {
            Ok(Opened::Ready { shard, rows, plan }) => {
                let at_device = match rows.is_empty() {
                    true => None,
                    // A place at the device first, then the attempt: rows that only wait must not be blamed for a kill.
                    false => Some(self.ready.reserve().await?),
                };
                Ok(Found::Shard(Box::new(Begun {
                    in_hand,
                    shard: *shard,
                    rows,
                    plan,
                    at_device,
                })))
            }
            Ok(Opened::Waits(rows)) => {
                in_hand.give_back_later(&job, &rows);
                Ok(Found::Nothing)
            }
            Ok(Opened::Committed) => {
                for delivery in in_hand.answer() {
                    self.worker.queue.acknowledge(&delivery).await?;
                }
                Ok(Found::Nothing)
            }
            // Also by `run`, which leaves nothing to others: the job is stopped for all, and says why.
            Err(error) if is_changed(&error) || self.worker.patience.reaction(&error) == Reaction::LeaveShard => {
                self.leave(&job, in_hand, &error).await?;
                Ok(Found::Nothing)
            }
            Err(error) => Err(error),
        }
    }

    /// A shard that this worker cannot begin: others may, unless its input stops the job for all.
    async fn leave(&self, job: &OpenJob, in_hand: InHand<'_>, error: &anyhow::Error) -> anyhow::Result<()> {
        if is_changed(error) && self.stop_job(job, error).await? {
            // Who goes on with the job enqueues its shards again.
            for delivery in in_hand.answer() {
                self.worker.queue.acknowledge(&delivery).await?;
            }
        } else {
            let shard = in_hand.key.shard;
            self.worker.leave_to_others(shard, job, error, in_hand.answer());
        }
        Ok(())
    }

    /// An input is not what was planned: no worker may go on, until a person has seen to it. False: somebody ordered
    /// otherwise just now.
    async fn stop_job(&self, job: &OpenJob, error: &anyhow::Error) -> anyhow::Result<bool> {
        // A job that is stopped or cancelled already stays what it is.
        if job.state() != JobState::Going {
            return Ok(false);
        }
        let note = one_line(error);
        // `run` ends by it, and prints it as its last line.
        if self.worker.patience.reaction(error) != Reaction::End {
            tracing::error!("{}: {note}", job.title());
        }
        let order = Order::Stop {
            why: StopWhy::InputChanged,
            close: false,
            note: Some(note),
        };
        let mut pauses = Pauses::default();
        while let Err(error) = job.order_stop(order.clone()).await {
            match self.worker.patience.bear(error, &mut pauses, &self.stop).await {
                Ok(()) => {}
                Err(error) if self.worker.patience.reaction(&error) == Reaction::LeaveShard => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        // One that closes instead still wants this shard's rows.
        Ok(matches!(job.state(), JobState::Stopped(_)))
    }

    /// Writes the attempt down and hands the shard to keeper and device.
    async fn begin(&self, begun: Begun<'_>) -> anyhow::Result<Handed> {
        let Begun {
            in_hand,
            mut shard,
            rows,
            plan,
            at_device,
        } = begun;
        let (key, job) = (shard.key, shard.job.clone());
        let (range, unwanted) = (shard.log.rows(), shard.unwanted.clone());
        if at_device.is_some() {
            crate::failpoint!("intake.before-attempt");
            let mut pauses = Pauses::default();
            loop {
                match shard
                    .log
                    .begin(self.worker.runner.clone(), &plan.next, plan.alone())
                    .await
                {
                    Ok(attempt) => break shard.attempt = Some(attempt),
                    Err(error) => match self.worker.patience.bear(error.into(), &mut pauses, &self.stop).await {
                        Ok(()) => {}
                        Err(error) if self.worker.patience.reaction(&error) == Reaction::LeaveShard => {
                            self.worker.leave_to_others(key.shard, &job, &error, in_hand.answer());
                            return Ok(Handed::Back);
                        }
                        Err(error) => return Err(error),
                    },
                }
            }
        }
        crate::failpoint!("intake.after-attempt");
        // The keeper must know the shard before any of its rows comes.
        if self.kept.send(Kept::Opened(Box::new(shard))).await.is_err() {
            return Ok(Handed::ToNobody);
        }
        in_hand.hand_on();
        if let Some(at_device) = at_device {
            at_device.send(ReadyShard {
                key,
                job,
                range,
                rows,
                unwanted,
            });
        }
        Ok(Handed::On)
    }

    /// Nothing came and nothing is in hand. An empty queue proves nothing: the ledgers say whether the jobs are done.
    async fn is_over(&self, idle: &mut Idle) -> anyhow::Result<bool> {
        if self.worker.options.until == Until::Once {
            return Ok(idle.clock.has_run(self.worker.options.idle_after));
        }
        if !idle.looks_now(self.worker.options.log_interval) {
            return Ok(false);
        }
        let done = match self.look_around().await {
            Ok(done) => done,
            Err(error) if self.worker.patience.reaction(&error) == Reaction::Wait => {
                self.worker.patience.say(&error);
                return Ok(false);
            }
            Err(error) => return Err(error),
        };
        if done == Some(false) {
            idle.say_unfinished();
        }
        Ok(match (self.worker.options.until, done) {
            (Until::Stopped, _) | (_, Some(false)) => false,
            (_, Some(true)) => true,
            // It has heard of no job at all.
            (_, None) => idle.clock.has_run(self.worker.options.idle_after),
        })
    }

    /// Whether all jobs are done (see [`Worker::all_done`]); where one goes on, its shards join our own queue again.
    async fn look_around(&self) -> anyhow::Result<Option<bool>> {
        let done = self.worker.all_done().await?;
        if done == Some(false) {
            self.worker.refill().await?;
        }
        Ok(done)
    }

    /// The job of a delivery; `None`: the delivery was dealt with.
    async fn job_of(&self, delivery: Delivery) -> anyhow::Result<Option<(Arc<OpenJob>, Delivery)>> {
        let worker = &self.worker;
        let mut pauses = Pauses::default();
        let heard = loop {
            match worker.jobs.hear(&delivery.message).await {
                Ok(heard) => break heard,
                Err(error) if worker.patience.reaction(&error) == Reaction::LeaveShard => {
                    break Heard::NotOurs(one_line(&error).into());
                }
                Err(error) => {
                    worker.queue.extend(&delivery, worker.pulse.patience()).await?;
                    worker.patience.bear(error, &mut pauses, &self.stop).await?;
                }
            }
        };
        match heard {
            Heard::Job(job) => match self.fresh_state(&job).await? {
                JobState::Unreadable => {
                    worker.pass_on_later(vec![Arc::new(delivery)]);
                    Ok(None)
                }
                JobState::Stopped(_) => {
                    // Who extends the job enqueues its shards again.
                    worker.queue.acknowledge(&delivery).await?;
                    Ok(None)
                }
                JobState::Going | JobState::Closing(_) => Ok(Some((job, delivery))),
            },
            // Another worker may reach a store that this one does not: never drop what cannot be found here.
            Heard::Stale(why) | Heard::NotOurs(why) => {
                let Delivery { message, hops, .. } = &delivery;
                tracing::warn!(
                    "shard {} of `{}` is not for this worker (at hop {}): {why}",
                    message.shard,
                    message.output,
                    hops + 1
                );
                worker.pass_on_later(vec![Arc::new(delivery)]);
                Ok(None)
            }
        }
    }

    /// Whether the job's rows may run. What stopped or closed it may have been taken back since this worker heard of it.
    async fn fresh_state(&self, job: &OpenJob) -> anyhow::Result<JobState> {
        let mut pauses = Pauses::default();
        while let JobState::Stopped(_) | JobState::Closing(_) = job.state() {
            let Err(error) = job.refresh().await else { break };
            match self.worker.patience.bear(error, &mut pauses, &self.stop).await {
                Ok(()) => {}
                Err(error) if self.worker.patience.reaction(&error) == Reaction::LeaveShard => {
                    job.leave_to_others(&error);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(job.state())
    }

    /// Reads the shard's log and prepares it, or as much of it as may be tried at once.
    async fn open(&self, job: &Arc<OpenJob>, key: ShardKey, place: OwnedSemaphorePermit) -> anyhow::Result<Opened> {
        let mut pauses = Pauses::default();
        let mut log = loop {
            match job.ledger.shard(key.shard).await {
                Ok(ShardState::Committed(commit)) => {
                    // A message of a committed shard comes again where an acknowledgement was lost, or a part.
                    let make_part = |batches: &[_], metadata: &[_]| job.make_part(batches, metadata);
                    while let Err(error) = job.ledger.restore_part(&commit, make_part).await {
                        self.worker.patience.bear(error.into(), &mut pauses, &self.stop).await?;
                    }
                    return Ok(Opened::Committed);
                }
                Ok(ShardState::Open(log)) => break *log,
                Err(error) => self.worker.patience.bear(error.into(), &mut pauses, &self.stop).await?,
            }
        };
        while let Err(error) = self.judge(job, &mut log).await {
            self.worker.patience.bear(error, &mut pauses, &self.stop).await?;
        }
        self.worker.patience.over();
        let plan = log.narrowing();
        if plan.next.is_empty() && plan.accused.is_empty() && !plan.waiting.is_empty() && job.state() == JobState::Going
        {
            return Ok(Opened::Waits(plan.waiting));
        }
        let permit = match plan.alone() {
            // A narrowed try has the device to itself: it takes every place there is.
            true => self.all_places(place).await?,
            false => place,
        };
        let mut shard = OpenShard {
            job: job.clone(),
            key,
            attempt: None,
            expected: HashSet::new(),
            carry: RecordBatch::new_empty(job.output.schema()),
            _permit: permit,
            pending: Vec::new(),
            unwanted: Arc::default(),
            log,
        };
        if shard.log.is_complete() {
            // A worker died between the last record and the part: nothing is left to do but to publish.
            return Ok(Opened::Ready {
                shard: Box::new(shard),
                rows: Vec::new(),
                plan,
            });
        }
        let planned = job.ledger.job().shard(key.shard)?.clone();
        crate::failpoint!("intake.before-read");
        let prepared = loop {
            match self.prepare(job, &planned, &shard.log, &plan).await {
                Ok(prepared) => break prepared,
                Err(error) => self.worker.patience.bear(error, &mut pauses, &self.stop).await?,
            }
        };
        crate::failpoint!("intake.after-read");
        shard.carry = prepared.carry;
        for row in &prepared.results {
            self.worker.meter.add_row(row);
        }
        shard.pending = prepared.results;
        shard.expected = prepared.ready.iter().map(|row| row.row).collect();
        Ok(Opened::Ready {
            shard: Box::new(shard),
            rows: prepared.ready,
            plan,
        })
    }

    /// Finds out what has become of attempts in which a row was alone on the device and which did not end.
    async fn judge(&self, job: &OpenJob, log: &mut ShardLog) -> anyhow::Result<()> {
        if !log.has_suspects() {
            return Ok(());
        }
        // What we write now says what time it is.
        job.sign(&self.worker.name).await?;
        let signs = job.ledger.signs_of_life().await?;
        log.judge(|attempt| fate(attempt, &signs, see));
        Ok(())
    }

    async fn all_places(&self, mut place: OwnedSemaphorePermit) -> anyhow::Result<OwnedSemaphorePermit> {
        let others = self.worker.options.shards_in_flight.saturating_sub(1);
        place.merge(self.places.clone().acquire_many_owned(others).await?);
        Ok(place)
    }

    /// Reads the shard; renders and tokenizes the rows to try, or ends them where the job is closing.
    async fn prepare(
        &self,
        job: &Arc<OpenJob>,
        shard: &Shard,
        log: &ShardLog,
        plan: &Narrowing,
    ) -> anyhow::Result<Prepared> {
        let read = job.reader.read(shard).await;
        if let Some(status) = job.state().closes_as() {
            return close(job, shard, log, status, read);
        }
        let read = read?;
        job.write_pins().await?;
        let mut prepared = Prepared {
            carry: read.carry,
            ready: Vec::new(),
            results: Vec::new(),
        };
        prepared.results = plan.accused.iter().map(accused).collect();
        for (row, prompt) in self.render(job, read.rows, &plan.next).await? {
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

    async fn render(
        &self,
        job: &Arc<OpenJob>,
        rows: Vec<InputRow>,
        wanted: &RowSet,
    ) -> anyhow::Result<Vec<(u64, Result<RenderedRow, String>)>> {
        let rows: Vec<InputRow> = rows.into_iter().filter(|row| wanted.contains(row.row)).collect();
        let (worker, job) = (self.worker.clone(), job.clone());
        let rendered = tokio::task::spawn_blocking(move || {
            let render = |row: &InputRow| (row.row, job.renderer.render(row));
            worker
                .render_threads
                .install(|| rows.par_iter().map(render).collect::<Vec<_>>())
        });
        rendered.await.context("rendering panicked")
    }
}

/// A shard as it was found.
enum Opened {
    Committed,
    /// These rows are left, and are not to be tried yet.
    Waits(RowSet),
    Ready {
        shard: Box<OpenShard>,
        /// For the device.
        rows: Vec<ReadyRow>,
        /// The plan that they follow.
        plan: Narrowing,
    },
}

/// Ends the rows that no record covers. Those whose input nobody can read any more have no carried columns, and say why.
fn close(
    job: &OpenJob,
    shard: &Shard,
    log: &ShardLog,
    status: RowStatus,
    read: Result<ShardRows, DatasetError>,
) -> anyhow::Result<Prepared> {
    let (carry, why) = match read {
        Ok(read) => (read.carry, None),
        Err(
            error @ (DatasetError::InputChanged { .. }
            | DatasetError::InputMissing { .. }
            | DatasetError::Unreadable { .. }),
        ) => (job.reader.no_carry(shard)?, Some(one_line(&error.into()))),
        Err(error) => return Err(error.into()),
    };
    let end = |row: u64| {
        let mut row = closed(row, status);
        if let (Some(error), Some(why)) = (&mut row.error, &why) {
            error.push_str(&format!("; its columns are not there: {why}"));
        }
        row
    };
    Ok(Prepared {
        carry,
        ready: Vec::new(),
        results: log.uncovered().iter().map(end).collect(),
    })
}

fn accused(row: u64) -> RowResult {
    errored(
        row,
        "the process died three times while this row was alone on the device".into(),
    )
}

fn is_changed(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(DatasetError::InputChanged { .. }))
}

/// A shard's rows, ready for the device or already done with.
struct Prepared {
    carry: RecordBatch,
    ready: Vec<ReadyRow>,
    results: Vec<RowResult>,
}

/// A prepared shard.
struct Begun<'a> {
    in_hand: InHand<'a>,
    shard: OpenShard,
    rows: Vec<ReadyRow>,
    plan: Narrowing,
    /// `None`: nothing goes to the device.
    at_device: Option<mpsc::Permit<'a, ReadyShard>>,
}
