//! Receive → read → render → tokenize: all work on a shard before the device has room.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow::array::RecordBatch;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tracing::Instrument;

use crate::dataset::row::RowStatus;
use crate::ledger::attempts::Narrowing;
use crate::worker::idle::Idle;
use crate::worker::in_hand::InHand;
use crate::worker::jobs::OpenJob;
use crate::worker::opening::{Opened, Openings, Taken, is_changed};
use crate::worker::pace::Pace;
use crate::worker::read_time::ReadTime;
use crate::worker::reading::{close, prepare};
use crate::worker::retry_policy::{Pauses, RetryDecision};
use crate::worker::shard::OpenShard;
use crate::worker::stop::Stop;
use crate::worker::troubles::Where;
use crate::worker::{ReadyRow, ReadyShard, RouterEvent, Until, Worker, one_line, spans};

/// How long to wait for a message before other checks.
const RECEIVE_WAIT: Duration = Duration::from_millis(250);
/// Time between two looks at a device that hangs.
const HANG_LOOK: Duration = Duration::from_secs(1);

/// Prepares shards until there is nothing more to do or `stop` is set.
pub(super) async fn run(
    worker: Arc<Worker>,
    ready: mpsc::Sender<ReadyShard>,
    router_events: mpsc::Sender<RouterEvent>,
    stop: Stop,
) -> anyhow::Result<()> {
    let places = Arc::new(Semaphore::new(worker.options.shards_in_flight as usize));
    let intake = Intake {
        worker,
        ready,
        router_events,
        places,
        stop,
    };
    intake.serve().await
}

struct Intake {
    worker: Arc<Worker>,
    ready: mpsc::Sender<ReadyShard>,
    router_events: mpsc::Sender<RouterEvent>,
    places: Arc<Semaphore>,
    stop: Stop,
}

/// What became of a shard that was ready.
enum Handed {
    On,
    /// This worker cannot begin it: it is left to others.
    Back,
    /// The other stages have ended; their own errors give the cause.
    ToNobody,
}

/// What the search for the next shard found.
enum Found<'a> {
    Nothing,
    /// The message goes to the end of the queue, to be tried later.
    PutOff,
    /// All jobs are done.
    Over,
    /// A shard that is ready for the router and the device.
    Shard(Box<Begun<'a>>),
}

impl Intake {
    async fn serve(&self) -> anyhow::Result<()> {
        let mut idle = Idle::default();
        let mut openings = Openings::new(self.worker.clone(), self.stop.clone());
        let (mut taken, mut pace) = (0, Pace::default());
        while self.worker.options.max_shards.is_none_or(|most| taken < most) {
            let found = tokio::select! {
                biased;
                () = self.stop.wait() => return Ok(()),
                found = self.find(&mut openings, &mut idle) => found?,
            };
            match found {
                Found::Nothing => {}
                Found::PutOff => pace.rest().await,
                Found::Over => return Ok(()),
                // This future must not be dropped midway: a stop would leave an attempt that never
                // ends.
                Found::Shard(begun) => {
                    let span = spans::of_shard(&begun.shard.job, begun.shard.key.shard, None);
                    match self.begin(*begun, &mut openings).instrument(span).await? {
                        Handed::On => (taken, pace) = (taken + 1, Pace::default()),
                        Handed::Back => {}
                        Handed::ToNobody => return Ok(()),
                    }
                }
            }
        }
        Ok(())
    }

    /// Cancel-safe: a delivery in hand goes back to the queue when it is dropped.
    async fn find(&self, openings: &mut Openings, idle: &mut Idle) -> anyhow::Result<Found<'_>> {
        while !self.worker.watchdog.is_alive() {
            // The device hangs: other workers should take the remaining messages.
            tokio::time::sleep(HANG_LOOK).await;
        }
        // Reserve a place among the shards in flight first. Until one is free, another worker
        // should have the messages, and shards that were set aside and could begin now.
        let place = loop {
            tokio::select! {
                biased;
                place = self.places.clone().acquire_owned() => break place?,
                opened = openings.next() => drop(opened?),
            }
        };
        crate::failpoint!("intake.before-receive");
        let received = tokio::select! {
            biased;
            opened = openings.next() => return self.found(openings, opened?, place).await,
            received = self.worker.queue.receive(RECEIVE_WAIT) => received,
        };
        let mut refused = false;
        let received = match received {
            Ok(received) => received,
            Err(error) => {
                refused = true;
                self.worker
                    .retry_policy
                    .backoff(error.into(), &mut idle.refused, &self.stop)
                    .await?;
                None
            }
        };
        let Some(delivery) = received else {
            drop(place);
            let away = idle.look(self.worker.queue.is_attached());
            if !refused {
                self.worker.retry_policy.still_waits_for_queue(away)?;
            }
            let over = self.worker.in_flight.is_empty() && openings.is_quiet() && self.is_over(idle).await?;
            return Ok(if over { Found::Over } else { Found::Nothing });
        };
        *idle = Idle::default();
        crate::failpoint!("intake.after-receive");
        #[cfg(feature = "faults")]
        if crate::faults::switch("ack-before-commit") {
            self.worker.queue.acknowledge(&delivery).await?;
        }
        match openings.take(delivery).await? {
            Taken::PutOff => Ok(Found::PutOff),
            Taken::PassedOn => Ok(Found::Nothing),
            Taken::Opening { output, wait } => tokio::select! {
                biased;
                opened = openings.next() => self.found(openings, opened?, place).await,
                () = tokio::time::sleep(wait) => {
                    // The opening goes on by itself, set aside.
                    openings.note_slow(output);
                    Ok(Found::Nothing)
                }
            },
        }
    }

    /// Plans an opened shard: all of its open rows, or those that may be tried at once.
    async fn found(
        &self,
        openings: &mut Openings,
        opened: Option<Opened>,
        place: OwnedSemaphorePermit,
    ) -> anyhow::Result<Found<'_>> {
        let Some(opened) = opened else {
            return Ok(Found::Nothing);
        };
        let plan = opened.log.narrowing();
        let is_complete = opened.log.is_complete();
        let troubles = &self.worker.troubles;
        if !is_complete && !plan.reads().is_empty() && opened.pauses.waited().is_zero() {
            let output = opened.job.ledger.store().url().to_string();
            if troubles.holds(Where::Inputs, &output) {
                openings.hold_up(opened).await?;
                return Ok(Found::Nothing);
            }
        }
        let Opened {
            in_hand,
            job,
            log,
            since,
            pauses,
        } = opened;
        let permit = if plan.alone() {
            // A narrowed try has the device to itself, so it takes all places.
            self.all_places(place).await?
        } else {
            place
        };
        let shard = OpenShard {
            job: job.clone(),
            key: in_hand.key,
            attempt: None,
            expected: HashSet::new(),
            carry: RecordBatch::new_empty(job.output.schema()),
            _permit: permit,
            pending: Vec::new(),
            unwanted: Arc::default(),
            log: *log,
        };
        // Read the state once: the job may be resumed meanwhile, and rows that were not sent to the
        // device must not be waited for.
        let closes = job.state().closes_as();
        // A complete log means that a worker died between the last record and the part: only
        // publishing is left.
        let runs = !plan.next.is_empty() && !is_complete && closes.is_none();
        // Reserve the device's slot before the attempt is written: rows that only wait must not be
        // blamed for a kill.
        let at_device = if runs { Some(self.ready.reserve().await?) } else { None };
        Ok(Found::Shard(Box::new(Begun {
            in_hand,
            shard,
            plan,
            closes,
            at_device,
            since,
            pauses,
        })))
    }

    /// Writes the attempt record, reads its rows, and hands the shard to the router and the device.
    #[expect(clippy::too_many_lines, reason = "one shard's way, in order")]
    async fn begin(&self, begun: Begun<'_>, openings: &mut Openings) -> anyhow::Result<Handed> {
        let Begun {
            in_hand,
            mut shard,
            plan,
            closes,
            at_device,
            since,
            pauses,
        } = begun;
        let (key, job) = (shard.key, shard.job.clone());
        let (range, unwanted) = (shard.log.rows(), shard.unwanted.clone());
        let output = job.ledger.store().url().to_string();
        let began = Instant::now();
        // Rows are read under the attempt, too: a row may end the process before it is on the
        // device.
        let (place, error, rows) = match self.note_attempt(&mut shard, &plan).await {
            Err(error) => (Where::Output, Some(error), Vec::new()),
            Ok(()) => {
                self.worker.troubles.end(Where::Output, &output);
                let read = tokio::select! {
                    biased;
                    () = self.stop.wait() => None,
                    read = self.read(&job, &mut shard, &plan, closes, pauses.rounds()) => Some(read),
                };
                let Some(read) = read else {
                    self.end_unread(&mut shard).await;
                    return Ok(Handed::ToNobody);
                };
                if read.is_err() {
                    self.end_unread(&mut shard).await;
                }
                match read {
                    Ok(rows) => {
                        self.worker.troubles.end(Where::Inputs, &output);
                        (Where::Inputs, None, rows)
                    }
                    Err(error) => (Where::Inputs, Some(error), Vec::new()),
                }
            }
        };
        if let Some(error) = error {
            let decision = self.worker.retry_policy.decision(&error);
            // This holds for `run`, too, which has no other workers: the job is stopped for all,
            // with the reason.
            if is_changed(&error) || decision == RetryDecision::LeaveShard {
                openings.opener.leave(&job, in_hand, &error).await?;
            } else if decision == RetryDecision::Wait && !self.stop.is_set() {
                let log = Box::new(shard.log);
                let opened = Opened {
                    in_hand,
                    job,
                    log,
                    since,
                    pauses,
                };
                openings.set_aside(opened, place, error, began.elapsed());
            } else {
                return Err(error);
            }
            return Ok(Handed::Back);
        }
        // The router must know the shard before any of its rows arrives.
        if self
            .router_events
            .send(RouterEvent::Opened(Box::new(shard)))
            .await
            .is_err()
        {
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

    /// Records which rows are about to be read and run.
    async fn note_attempt(&self, shard: &mut OpenShard, plan: &Narrowing) -> anyhow::Result<()> {
        let reads = plan.reads();
        if reads.is_empty() || shard.log.is_complete() {
            return Ok(());
        }
        crate::failpoint!("intake.before-attempt");
        let attempt = shard
            .log
            .begin(self.worker.runner.clone(), &reads, plan.alone())
            .await?;
        shard.attempt = Some(attempt);
        crate::failpoint!("intake.after-attempt");
        Ok(())
    }

    /// Records the end of an attempt of which no row went to the device. If the store refuses, the
    /// attempt counts as one that never ended, which alone makes no row errored.
    async fn end_unread(&self, shard: &mut OpenShard) {
        if let Some(attempt) = shard.attempt.take()
            && let Err(error) = shard.log.end(&attempt).await
        {
            tracing::warn!(
                "shard {} of {}: an attempt's end could not be written: {}",
                shard.key.shard,
                shard.job.title(),
                one_line(&error.into())
            );
        }
    }

    /// Reads the rows for the device; results that are already known go to `shard`.
    async fn read(
        &self,
        job: &Arc<OpenJob>,
        shard: &mut OpenShard,
        plan: &Narrowing,
        closes: Option<RowStatus>,
        tries: u32,
    ) -> anyhow::Result<Vec<ReadyRow>> {
        if shard.log.is_complete() {
            return Ok(Vec::new());
        }
        let planned = job.ledger.job().shard(shard.key.shard)?.clone();
        crate::failpoint!("intake.before-read");
        let output = job.ledger.store().url().to_string();
        let time = if self.worker.retry_policy.is_patient() {
            ReadTime::of_try(output, tries)
        } else {
            // No other shard waits.
            ReadTime::endless(output)
        };
        let prepared = match closes {
            Some(status) => close(job, &planned, &shard.log, status, plan, time).await?,
            None => prepare(&self.worker, job, &planned, &shard.log, plan, time).await?,
        };
        crate::failpoint!("intake.after-read");
        shard.carry = prepared.carry;
        for row in &prepared.results {
            self.worker.meter.add_row(row);
        }
        shard.pending = prepared.results;
        shard.expected = prepared.ready.iter().map(|row| row.row).collect();
        Ok(prepared.ready)
    }

    /// Whether the worker is done, while the queue delivers nothing and nothing is in hand. An
    /// empty queue proves nothing, so the ledgers decide.
    async fn is_over(&self, idle: &mut Idle) -> anyhow::Result<bool> {
        if self.worker.options.until == Until::Once {
            return Ok(idle.clock.has_run(self.worker.options.idle_after));
        }
        if !idle.looks_now(self.worker.options.log_interval) {
            return Ok(false);
        }
        let done = match self.look_around().await {
            Ok(done) => done,
            Err(error) if self.worker.retry_policy.decision(&error) == RetryDecision::Wait => {
                self.worker.retry_policy.say(&error);
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
            // The worker has heard of no job.
            (_, None) => idle.clock.has_run(self.worker.options.idle_after),
        })
    }

    /// Whether all jobs are done (see [`Worker::all_done`]). If one goes on, its shards are sent to
    /// the process's own queue again.
    async fn look_around(&self) -> anyhow::Result<Option<bool>> {
        let done = self.worker.all_done().await?;
        if done == Some(false) {
            self.worker.refill().await?;
        }
        Ok(done)
    }

    async fn all_places(&self, mut place: OwnedSemaphorePermit) -> anyhow::Result<OwnedSemaphorePermit> {
        let others = self.worker.options.shards_in_flight.saturating_sub(1);
        place.merge(self.places.clone().acquire_many_owned(others).await?);
        Ok(place)
    }
}

/// A shard that is about to begin.
struct Begun<'a> {
    in_hand: InHand,
    shard: OpenShard,
    plan: Narrowing,
    /// Status of the unfinished rows where the job is closing: they do not run any more.
    closes: Option<RowStatus>,
    /// `None`: no row goes to the device.
    at_device: Option<mpsc::Permit<'a, ReadyShard>>,
    /// See [`Opened::since`].
    since: Instant,
    /// The pauses between tries to begin the shard.
    pauses: Pauses,
}
