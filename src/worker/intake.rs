//! Receive → read → render → tokenize: everything that can be done before the device has room.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use arrow::array::RecordBatch;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

use crate::dataset::DatasetError;
use crate::dataset::row::RowStatus;
use crate::ledger::attempts::Narrowing;
use crate::ledger::log::{ShardLog, ShardState};
use crate::ledger::{Order, RowSet, StopWhy};
use crate::queue::Delivery;
use crate::worker::fate::fate;
use crate::worker::idle::Idle;
use crate::worker::in_flight::ShardKey;
use crate::worker::in_hand::InHand;
use crate::worker::jobs::{Heard, JobState, OpenJob};
use crate::worker::patience::{Pauses, Reaction};
use crate::worker::process::see;
use crate::worker::reading::{close, prepare};
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
            Ok(Opened::Ready { shard, plan }) => {
                // Once: a job may go on meanwhile, and rows without a place at the device must not be waited for.
                let closes = job.state().closes_as();
                let runs = !plan.next.is_empty() && !shard.log.is_complete() && closes.is_none();
                let at_device = match runs {
                    false => None,
                    // A place at the device first, then the attempt: rows that only wait must not be blamed for a kill.
                    true => Some(self.ready.reserve().await?),
                };
                Ok(Found::Shard(Box::new(Begun {
                    in_hand,
                    shard: *shard,
                    plan,
                    closes,
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

    /// Writes the attempt down, reads its rows, and hands the shard to keeper and device.
    async fn begin(&self, begun: Begun<'_>) -> anyhow::Result<Handed> {
        let Begun {
            in_hand,
            mut shard,
            plan,
            closes,
            at_device,
        } = begun;
        let (key, job) = (shard.key, shard.job.clone());
        let (range, unwanted) = (shard.log.rows(), shard.unwanted.clone());
        // Read under an attempt, too: a row may end the process before it is on the device.
        if let Err(error) = self.note_attempt(&mut shard, &plan).await {
            return match self.worker.patience.reaction(&error) {
                Reaction::LeaveShard => {
                    self.worker.leave_to_others(key.shard, &job, &error, in_hand.answer());
                    Ok(Handed::Back)
                }
                _ => Err(error),
            };
        }
        let read = tokio::select! {
            biased;
            () = self.stop.wait() => None,
            read = self.read(&job, &mut shard, &plan, closes) => Some(read),
        };
        let rows = match read {
            Some(Ok(rows)) => rows,
            None => {
                self.end_unread(&mut shard).await;
                return Ok(Handed::ToNobody);
            }
            Some(Err(error)) => {
                self.end_unread(&mut shard).await;
                if !is_changed(&error) && self.worker.patience.reaction(&error) != Reaction::LeaveShard {
                    return Err(error);
                }
                // Also by `run`, which leaves nothing to others: the job is stopped for all, and says why.
                self.leave(&job, in_hand, &error).await?;
                return Ok(Handed::Back);
            }
        };
        // The keeper must know the shard before any of its rows comes.
        if self.kept.send(Kept::Opened(Box::new(shard))).await.is_err() {
            return Ok(Handed::ToNobody);
        }
        in_hand.hand_on();
        if let Some(at_device) = at_device.filter(|_| !rows.is_empty()) {
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

    /// Writes down which rows are about to be read and run.
    async fn note_attempt(&self, shard: &mut OpenShard, plan: &Narrowing) -> anyhow::Result<()> {
        let reads = plan.reads();
        if reads.is_empty() || shard.log.is_complete() {
            return Ok(());
        }
        crate::failpoint!("intake.before-attempt");
        let mut pauses = Pauses::default();
        loop {
            match shard.log.begin(self.worker.runner.clone(), &reads, plan.alone()).await {
                Ok(attempt) => break shard.attempt = Some(attempt),
                Err(error) => self.worker.patience.bear(error.into(), &mut pauses, &self.stop).await?,
            }
        }
        crate::failpoint!("intake.after-attempt");
        Ok(())
    }

    /// Nothing went to the device, and nothing died: the attempt says so, if the store takes it. If not, it counts as one that never
    /// ended, which costs no row anything.
    async fn end_unread(&self, shard: &mut OpenShard) {
        if let Some(attempt) = shard.attempt.clone()
            && let Err(error) = shard.log.end(&attempt).await
        {
            tracing::warn!("an attempt's end could not be written: {}", one_line(&error.into()));
        }
    }

    /// The rows for the device; all else that is known of the shard's rows goes to `shard`.
    async fn read(
        &self,
        job: &Arc<OpenJob>,
        shard: &mut OpenShard,
        plan: &Narrowing,
        closes: Option<RowStatus>,
    ) -> anyhow::Result<Vec<ReadyRow>> {
        if shard.log.is_complete() {
            return Ok(Vec::new());
        }
        let planned = job.ledger.job().shard(shard.key.shard)?.clone();
        crate::failpoint!("intake.before-read");
        let mut pauses = Pauses::default();
        let prepared = loop {
            let prepared = match closes {
                Some(status) => close(job, &planned, &shard.log, status, plan).await,
                None => prepare(&self.worker, job, &planned, &shard.log, plan).await,
            };
            match prepared {
                Ok(prepared) => break prepared,
                Err(error) => self.worker.patience.bear(error, &mut pauses, &self.stop).await?,
            }
        };
        self.worker.patience.over();
        crate::failpoint!("intake.after-read");
        shard.carry = prepared.carry;
        for row in &prepared.results {
            self.worker.meter.add_row(row);
        }
        shard.pending = prepared.results;
        shard.expected = prepared.ready.iter().map(|row| row.row).collect();
        Ok(prepared.ready)
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

    /// Reads the shard's log: what is to be done, or as much of it as may be tried at once.
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
        let shard = OpenShard {
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
        // Where the log is complete, a worker died between the last record and the part: nothing is left to do but to publish.
        Ok(Opened::Ready {
            shard: Box::new(shard),
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
}

/// A shard as it was found.
enum Opened {
    Committed,
    /// These rows are left, and are not to be tried yet.
    Waits(RowSet),
    Ready {
        shard: Box<OpenShard>,
        /// Which of its rows are tried.
        plan: Narrowing,
    },
}

fn is_changed(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(DatasetError::InputChanged { .. }))
}

/// A shard that is about to be begun.
struct Begun<'a> {
    in_hand: InHand<'a>,
    shard: OpenShard,
    plan: Narrowing,
    /// The job is closing: its rows are not run any more, and end so.
    closes: Option<RowStatus>,
    /// `None`: nothing goes to the device.
    at_device: Option<mpsc::Permit<'a, ReadyShard>>,
}
