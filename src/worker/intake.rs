//! Receive → read → render → tokenize: all work on a shard before it goes to the device.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow::array::RecordBatch;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tracing::Instrument;

use crate::dataset::row::RowStatus;
use crate::ledger::attempts::AttemptPlan;
use crate::traces::names;
use crate::worker::idle::IdleState;
use crate::worker::in_hand::ReceivedShard;
use crate::worker::jobs::OpenJob;
use crate::worker::opening::{OpenedShard, Openings, TakeOutcome, is_input_changed};
use crate::worker::pace::RequeuePace;
use crate::worker::read_time::ReadTime;
use crate::worker::reading::{close, prepare};
use crate::worker::retry_policy::{Pauses, RetryDecision};
use crate::worker::shard::ShardWork;
use crate::worker::stop::Stop;
use crate::worker::troubles::JobStore;
use crate::worker::{ReadyRow, ReadyShard, RouterEvent, Until, Worker, one_line, spans};

/// How long one receive waits for a message; other checks follow.
const RECEIVE_WAIT: Duration = Duration::from_millis(250);
/// Time between two checks of a device that hangs.
const HANG_POLL: Duration = Duration::from_secs(1);

/// Prepares shards until all jobs are done, `max_shards` is reached, or `stop` is set.
pub(super) async fn run(
    worker: Arc<Worker>,
    ready: mpsc::Sender<ReadyShard>,
    router_events: mpsc::Sender<RouterEvent>,
    stop: Stop,
) -> anyhow::Result<()> {
    let shard_slots = Arc::new(Semaphore::new(worker.options.shards_in_flight as usize));
    let intake = Intake {
        worker,
        ready,
        router_events,
        shard_slots,
        stop,
    };
    intake.serve().await
}

struct Intake {
    worker: Arc<Worker>,
    ready: mpsc::Sender<ReadyShard>,
    router_events: mpsc::Sender<RouterEvent>,
    shard_slots: Arc<Semaphore>,
    stop: Stop,
}

/// Result of [`Intake::begin`].
enum Handover {
    ToRouter,
    /// The shard could not begin: it was set aside, or left to other workers.
    NotBegun,
    /// The worker stops, or the other stages have ended; their own errors are the cause.
    StagesEnded,
}

/// Result of [`Intake::next_shard`].
enum NextShard<'a> {
    NotYet,
    /// The message was put at the end of the queue.
    Requeued,
    /// All jobs are done.
    AllDone,
    /// A shard that is ready for the router and the device.
    Shard(Box<PlannedShard<'a>>),
}

impl Intake {
    async fn serve(&self) -> anyhow::Result<()> {
        let mut idle = IdleState::default();
        let mut openings = Openings::new(self.worker.clone(), self.stop.clone());
        let (mut shards_begun, mut pace) = (0, RequeuePace::default());
        while self.worker.options.max_shards.is_none_or(|max| shards_begun < max) {
            let next = tokio::select! {
                biased;
                () = self.stop.wait() => return Ok(()),
                next = self.next_shard(&mut openings, &mut idle) => next?,
            };
            match next {
                NextShard::NotYet => {}
                NextShard::Requeued => pace.pause().await,
                NextShard::AllDone => return Ok(()),
                // This future must not be dropped midway: the attempt would stay without an end.
                NextShard::Shard(planned_shard) => {
                    let span = spans::of_shard(&planned_shard.shard.job, planned_shard.shard.key.shard, None);
                    match self.begin(*planned_shard, &mut openings).instrument(span).await? {
                        Handover::ToRouter => {
                            (shards_begun, pace) = (shards_begun + 1, RequeuePace::default());
                            if self.worker.embedded_queue.is_some() {
                                idle.check_at_once();
                            }
                        }
                        Handover::NotBegun => {}
                        Handover::StagesEnded => return Ok(()),
                    }
                }
            }
        }
        Ok(())
    }

    /// Receives and opens the next shard. Cancel-safe: a received delivery goes back to the queue
    /// when it is dropped.
    async fn next_shard(&self, openings: &mut Openings, idle: &mut IdleState) -> anyhow::Result<NextShard<'_>> {
        while !self.worker.watchdog.is_alive() {
            // The device hangs: other workers should take the remaining messages.
            tokio::time::sleep(HANG_POLL).await;
        }
        // Reserve a slot among the shards in flight first. Until one is free, other workers should
        // get the messages, and also shards that were set aside here and could begin now.
        let slot = loop {
            tokio::select! {
                biased;
                slot = self.shard_slots.clone().acquire_owned() => break slot?,
                opened = openings.next() => drop(opened?),
            }
        };
        crate::failpoint!("intake.before-receive");
        let received = tokio::select! {
            biased;
            opened = openings.next() => return self.plan_shard(openings, opened?, slot).await,
            received = self.worker.queue.receive(RECEIVE_WAIT) => received,
        };
        let mut is_refused = false;
        let received = match received {
            Ok(received) => received,
            Err(error) => {
                is_refused = true;
                self.worker
                    .retry_policy
                    .backoff(error.into(), &mut idle.refusal_pauses, &self.stop)
                    .await?;
                None
            }
        };
        let Some(delivery) = received else {
            drop(slot);
            let away = idle.note_empty(self.worker.queue.is_attached());
            if !is_refused {
                self.worker.retry_policy.check_queue_wait(away)?;
            }
            let is_done = self.worker.in_flight.is_empty() && openings.is_quiet() && self.is_done(idle).await?;
            return Ok(if is_done { NextShard::AllDone } else { NextShard::NotYet });
        };
        *idle = IdleState::default();
        crate::failpoint!("intake.after-receive");
        #[cfg(feature = "faults")]
        if crate::faults::is_switched_on("ack-before-commit") {
            self.worker.queue.acknowledge(&delivery).await?;
        }
        match openings.take(delivery).await? {
            TakeOutcome::Requeued => Ok(NextShard::Requeued),
            TakeOutcome::PassedOn => Ok(NextShard::NotYet),
            TakeOutcome::Opening { output, wait } => tokio::select! {
                biased;
                opened = openings.next() => self.plan_shard(openings, opened?, slot).await,
                () = tokio::time::sleep(wait) => {
                    // The opening goes on in its own task.
                    openings.note_slow(output);
                    Ok(NextShard::NotYet)
                }
            },
        }
    }

    /// Plans the attempt at an opened shard: all of its open rows, or a part of them. Reserves the
    /// slots that the attempt needs.
    async fn plan_shard(
        &self,
        openings: &mut Openings,
        opened: Option<OpenedShard>,
        slot: OwnedSemaphorePermit,
    ) -> anyhow::Result<NextShard<'_>> {
        let Some(opened) = opened else {
            return Ok(NextShard::NotYet);
        };
        let plan = opened.log.plan_attempt();
        let is_complete = opened.log.is_complete();
        let troubles = &self.worker.troubles;
        if !is_complete && !plan.rows_to_read().is_empty() && opened.pauses.waited().is_zero() {
            let output = opened.job.ledger.store().url().to_string();
            if troubles.is_failing(JobStore::Inputs, &output) {
                openings.hold_up(opened).await?;
                return Ok(NextShard::NotYet);
            }
        }
        let OpenedShard {
            received_shard,
            job,
            log,
            opened_at,
            pauses,
        } = opened;
        let permit = if plan.is_alone() {
            // A narrowed try has the device to itself, so it takes all slots.
            self.all_slots(slot).await?
        } else {
            slot
        };
        let shard = ShardWork {
            job: job.clone(),
            key: received_shard.key,
            attempt: None,
            expected: HashSet::new(),
            carry: RecordBatch::new_empty(job.output.schema()),
            _permit: permit,
            pending: Vec::new(),
            is_unwanted: Arc::default(),
            trace: received_shard.trace.clone(),
            log: *log,
        };
        // Read the state only once, because the job may be resumed meanwhile: the shard's task must
        // not wait for rows that were not sent to the device.
        let close_status = job.state().close_status();
        // If the log is complete, a worker died between the last record and the part, and only the
        // publishing is left.
        let has_rows_to_run = !plan.next_rows.is_empty() && !is_complete && close_status.is_none();
        // Reserve the device's slot before the attempt is recorded, so that rows that only wait are
        // not suspected when the worker is killed.
        let device_slot = if has_rows_to_run {
            Some(self.ready.reserve().await?)
        } else {
            None
        };
        Ok(NextShard::Shard(Box::new(PlannedShard {
            received_shard,
            shard,
            plan,
            close_status,
            device_slot,
            opened_at,
            pauses,
        })))
    }

    /// Writes the attempt record, reads its rows, and hands the shard to the router and the device.
    #[expect(clippy::too_many_lines, reason = "one shard's way, in order")]
    async fn begin(&self, planned_shard: PlannedShard<'_>, openings: &mut Openings) -> anyhow::Result<Handover> {
        let PlannedShard {
            received_shard,
            mut shard,
            plan,
            close_status,
            device_slot,
            opened_at,
            pauses,
        } = planned_shard;
        let (key, job) = (shard.key, shard.job.clone());
        let (range, is_unwanted) = (shard.log.rows(), shard.is_unwanted.clone());
        let trace = shard.trace.clone();
        let output = job.ledger.store().url().to_string();
        let began = Instant::now();
        // The attempt covers reading, too: a row may end the process before it is on the device.
        let (failed_store, error, rows) = match self.record_attempt(&mut shard, &plan).await {
            Err(error) => (JobStore::Output, Some(error), Vec::new()),
            Ok(()) => {
                self.worker.troubles.note_recovery(JobStore::Output, &output);
                let read = self.read(&job, &mut shard, &plan, close_status, pauses.rounds());
                let read = tokio::select! {
                    biased;
                    () = self.stop.wait() => None,
                    read = trace.step(names::READ, read) => Some(read),
                };
                let Some(read) = read else {
                    self.end_attempt_unread(&mut shard).await;
                    return Ok(Handover::StagesEnded);
                };
                if read.is_err() {
                    self.end_attempt_unread(&mut shard).await;
                }
                match read {
                    Ok(rows) => {
                        self.worker.troubles.note_recovery(JobStore::Inputs, &output);
                        (JobStore::Inputs, None, rows)
                    }
                    Err(error) => (JobStore::Inputs, Some(error), Vec::new()),
                }
            }
        };
        if let Some(error) = error {
            let decision = self.worker.retry_policy.decision(&error);
            // A changed input stops the job for all workers, with the reason. This holds for `run`,
            // too.
            if is_input_changed(&error) || decision == RetryDecision::LeaveShard {
                trace.fail(&error);
                openings.opener.leave_shard(&job, received_shard, &error).await?;
            } else if decision == RetryDecision::Wait && !self.stop.is_set() {
                let log = Box::new(shard.log);
                let opened = OpenedShard {
                    received_shard,
                    job,
                    log,
                    opened_at,
                    pauses,
                };
                openings.set_aside(opened, failed_store, error, began.elapsed());
            } else {
                trace.fail(&error);
                return Err(error);
            }
            return Ok(Handover::NotBegun);
        }
        // The router must know the shard before any of its rows arrives.
        if self
            .router_events
            .send(RouterEvent::Opened(Box::new(shard)))
            .await
            .is_err()
        {
            return Ok(Handover::StagesEnded);
        }
        received_shard.hand_over();
        if let Some(device_slot) = device_slot.filter(|_| !rows.is_empty()) {
            device_slot.send(ReadyShard {
                key,
                job,
                range,
                rows,
                is_unwanted,
                generation_span: trace.generation(),
            });
        }
        Ok(Handover::ToRouter)
    }

    /// Records the attempt: the rows that are about to be read and run.
    async fn record_attempt(&self, shard: &mut ShardWork, plan: &AttemptPlan) -> anyhow::Result<()> {
        let rows_to_read = plan.rows_to_read();
        if rows_to_read.is_empty() || shard.log.is_complete() {
            return Ok(());
        }
        crate::failpoint!("intake.before-attempt");
        let attempt = shard
            .log
            .begin(self.worker.attempt_worker.clone(), &rows_to_read, plan.is_alone())
            .await?;
        shard.trace.note_attempt(&attempt);
        shard.attempt = Some(attempt);
        crate::failpoint!("intake.after-attempt");
        Ok(())
    }

    /// Records the end of an attempt of which no row went to the device. If that fails, the attempt
    /// stays without an end, which alone makes no row errored.
    async fn end_attempt_unread(&self, shard: &mut ShardWork) {
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

    /// Reads the rows for the device. Results that need no device go to `shard`.
    async fn read(
        &self,
        job: &Arc<OpenJob>,
        shard: &mut ShardWork,
        plan: &AttemptPlan,
        close_status: Option<RowStatus>,
        tries: u32,
    ) -> anyhow::Result<Vec<ReadyRow>> {
        if shard.log.is_complete() {
            return Ok(Vec::new());
        }
        let planned = job.ledger.job().shard(shard.key.shard)?.clone();
        crate::failpoint!("intake.before-read");
        let output = job.ledger.store().url().to_string();
        let time = if self.worker.retry_policy.is_patient() {
            ReadTime::for_try(output, tries)
        } else {
            // No other shard waits.
            ReadTime::unbounded(output)
        };
        let prepared = match close_status {
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

    /// Whether the worker is done; to be called when the queue delivers nothing and no shard is in
    /// flight. An empty queue does not show that the jobs are done, so the ledgers decide.
    async fn is_done(&self, idle: &mut IdleState) -> anyhow::Result<bool> {
        if self.worker.options.until == Until::Once {
            return Ok(idle.clock.has_run_for(self.worker.options.idle_after));
        }
        if !idle.take_due_check(self.worker.options.log_interval) {
            return Ok(false);
        }
        let done = match self.check_ledgers().await {
            Ok(done) => done,
            Err(error) if self.worker.retry_policy.decision(&error) == RetryDecision::Wait => {
                self.worker.retry_policy.report(&error);
                return Ok(false);
            }
            Err(error) => return Err(error),
        };
        if done == Some(false) {
            idle.report_unfinished();
        }
        Ok(match (self.worker.options.until, done) {
            (Until::Stopped, _) | (_, Some(false)) => false,
            (_, Some(true)) => true,
            // The worker has heard of no job.
            (_, None) => idle.clock.has_run_for(self.worker.options.idle_after),
        })
    }

    /// Whether all jobs are done (see [`Worker::all_done`]). If not, unfinished shards are sent to
    /// the embedded queue again.
    async fn check_ledgers(&self) -> anyhow::Result<Option<bool>> {
        let done = self.worker.all_done().await?;
        if done == Some(false) {
            self.worker.refill_embedded_queue().await?;
        }
        Ok(done)
    }

    async fn all_slots(&self, mut slot: OwnedSemaphorePermit) -> anyhow::Result<OwnedSemaphorePermit> {
        let others = self.worker.options.shards_in_flight.saturating_sub(1);
        slot.merge(self.shard_slots.clone().acquire_many_owned(others).await?);
        Ok(slot)
    }
}

/// An opened shard with its planned attempt, about to begin.
struct PlannedShard<'a> {
    received_shard: ReceivedShard,
    shard: ShardWork,
    plan: AttemptPlan,
    /// If the job is closing, the status of its unfinished rows, which do not run any more.
    close_status: Option<RowStatus>,
    /// `None`: no row goes to the device.
    device_slot: Option<mpsc::Permit<'a, ReadyShard>>,
    /// See [`OpenedShard::opened_at`].
    opened_at: Instant,
    /// The pauses between tries to begin the shard.
    pauses: Pauses,
}
