//! Opens deliveries: finds the job of each message and reads its commands and the shard's log, so
//! that the shard can begin.
//!
//! Each delivery is opened in a task of its own. If its store does not answer, the delivery is set
//! aside: the task goes on alone, with its own pauses, while the intake takes the next message. A
//! delivery that is set aside takes no slot of the shards in flight. It stays with this worker,
//! which extends it at the queue. After a while it is put at the end of the queue, where other
//! workers may get it. This does not count as a hop, so that an outage loses no message.
//!
//! See docs/decisions/018-stopped-jobs-messages-are-acknowledged.md and
//! docs/decisions/021-each-delivery-is-a-task.md.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use tracing::Instrument;

use crate::dataset::DatasetError;
use crate::ledger::log::{ShardLog, ShardState};
use crate::ledger::{JobCommand, StopWhy};
use crate::queue::{Delivery, Message};
use crate::worker::fate::fate;
use crate::worker::in_flight::ShardKey;
use crate::worker::in_hand::ReceivedShard;
use crate::worker::job_state::JobState;
use crate::worker::jobs::{JobLookup, OpenJob};
use crate::worker::process::process_state;
use crate::worker::refusals::Refusals;
use crate::worker::retry_policy::{Pauses, RetryDecision};
use crate::worker::shard_trace::ShardTrace;
use crate::worker::stop::Stop;
use crate::worker::troubles::JobStore;
use crate::worker::{Worker, one_line, spans};

/// How long the intake waits for an opening before it takes the next message. The wait is shorter
/// (`OPEN_WAIT_SLOW`) if an earlier wait for the same output was in vain, less than `SLOW_TIME`
/// ago.
const OPEN_WAIT: Duration = Duration::from_secs(2);
const OPEN_WAIT_SLOW: Duration = Duration::from_millis(250);
const SLOW_TIME: Duration = Duration::from_secs(60);
/// After a failed try, the pause is this many times as long as the try.
const PAUSE_TIMES_TRY: u32 = 4;
const TRY_PAUSE_MAX: Duration = Duration::from_secs(240);
/// A worker that has not opened a message's job before does not open it after this many earlier
/// deliveries of the message: opening the job may have crashed the workers that received it.
const DELIVERIES_MAX: u32 = 5;

/// The deliveries that are being opened. When dropped, they go back to the queue.
pub(super) struct Openings {
    pub opener: Arc<Opener>,
    tasks: JoinSet<anyhow::Result<Option<OpenedShard>>>,
    /// Outputs for which the intake waited in vain, and when.
    slow_outputs: HashMap<String, Instant>,
}

/// Opens deliveries one by one.
pub(super) struct Opener {
    worker: Arc<Worker>,
    stop: Stop,
    refusals: Refusals,
    bounds: AsideBounds,
}

/// Bounds on the deliveries that are set aside.
#[derive(Debug, Clone, Copy)]
struct AsideBounds {
    /// Maximum number of deliveries set aside; further deliveries of failing jobs go to the end of
    /// the queue.
    aside_max: usize,
    /// How long a delivery stays set aside: shorter than a broker's own timeout.
    aside_time_max: Duration,
    /// Pause before the next try of a shard that waits because the inputs of its job have failed
    /// for another shard.
    held_up_pause: Duration,
    /// Time between two extensions of a delivery at the queue while it is being opened.
    extend_every: Duration,
}

impl Default for AsideBounds {
    fn default() -> AsideBounds {
        AsideBounds {
            aside_max: 64,
            aside_time_max: Duration::from_secs(600),
            held_up_pause: Duration::from_secs(5),
            extend_every: Duration::from_secs(5),
        }
    }
}

impl AsideBounds {
    /// Whether a shard that was opened at `opened_at` may be set aside beside `others`.
    fn allow(&self, others: usize, opened_at: Instant) -> bool {
        others < self.aside_max && opened_at.elapsed() < self.aside_time_max
    }
}

/// An opened shard with work left to do.
pub(super) struct OpenedShard {
    pub received_shard: ReceivedShard,
    pub job: Arc<OpenJob>,
    pub log: Box<ShardLog>,
    /// When the shard was opened.
    pub opened_at: Instant,
    /// The pauses between tries to begin the shard.
    pub pauses: Pauses,
}

impl OpenedShard {
    fn output(&self) -> String {
        self.job.ledger.store().url().to_string()
    }
}

/// Result of [`Openings::take`].
pub(super) enum TakeOutcome {
    /// The delivery is being opened. `wait`: how long the intake waits for the result.
    Opening { output: String, wait: Duration },
    /// The delivery was passed on to other workers.
    PassedOn,
    /// The delivery was put at the end of the queue.
    Requeued,
}

impl Openings {
    pub(super) fn new(worker: Arc<Worker>, stop: Stop) -> Openings {
        Openings {
            opener: Arc::new(Opener {
                worker,
                stop,
                refusals: Refusals::default(),
                bounds: AsideBounds::default(),
            }),
            tasks: JoinSet::new(),
            slow_outputs: HashMap::new(),
        }
    }

    /// Whether nothing is being opened and no store has failed lately.
    pub(super) fn is_quiet(&self) -> bool {
        self.tasks.is_empty() && !self.opener.worker.troubles.has_recent()
    }

    /// Begins to open a delivery that was just received.
    pub(super) async fn take(&mut self, delivery: Delivery) -> anyhow::Result<TakeOutcome> {
        let (opener, message) = (self.opener.clone(), &delivery.message);
        let output = message.output.clone();
        let is_failing = [JobStore::Output, JobStore::Inputs]
            .iter()
            .any(|store| opener.worker.troubles.is_failing(*store, &message.output));
        let (opening_count, aside_max) = (self.tasks.len(), opener.bounds.aside_max);
        if is_failing && opening_count >= aside_max || opening_count >= 2 * aside_max {
            opener.worker.queue.requeue_last(&delivery).await?;
            return Ok(TakeOutcome::Requeued);
        }
        let delivery = Arc::new(delivery);
        if let Some(why) = opener.refusal_before_open(&delivery).await {
            opener.refuse_and_pass_on(delivery, &why);
            return Ok(TakeOutcome::PassedOn);
        }
        let span = spans::of_message(&delivery.message);
        let opening = async move { opener.open_and_extend(delivery).await };
        self.tasks.spawn(opening.instrument(span));
        let was_slow = self
            .slow_outputs
            .get(&output)
            .is_some_and(|since| since.elapsed() < SLOW_TIME);
        let wait = match (is_failing, was_slow) {
            (true, _) => Duration::ZERO,
            (false, true) => OPEN_WAIT_SLOW,
            (false, false) => OPEN_WAIT,
        };
        Ok(TakeOutcome::Opening { output, wait })
    }

    /// Remembers that the intake waited for a delivery of this output in vain.
    pub(super) fn note_slow(&mut self, output: String) {
        self.slow_outputs.retain(|_, since| since.elapsed() < SLOW_TIME);
        self.slow_outputs.insert(output, Instant::now());
    }

    /// The next opening that ends: a shard to begin, or `None` if nothing of it is left to do.
    /// Waits for ever if nothing is being opened. Cancel-safe.
    pub(super) async fn next(&mut self) -> anyhow::Result<Option<OpenedShard>> {
        match self.tasks.join_next().await {
            Some(Ok(opened)) => opened,
            Some(Err(error)) => Err(anyhow::anyhow!("the task that opens a shard panicked: {error}")),
            None => std::future::pending().await,
        }
    }

    /// Sets a shard aside whose store failed while the shard began. That try lasted `try_time`, in
    /// which no other shard could begin. An error that is not waited out ends the worker.
    pub(super) fn set_aside(
        &mut self,
        mut opened: OpenedShard,
        store: JobStore,
        error: anyhow::Error,
        try_time: Duration,
    ) {
        let opener = self.opener.clone();
        opened.received_shard.release_memory();
        let span = spans::of_shard(&opened.job, opened.received_shard.key.shard, None);
        let waiting = async move {
            let output = opened.output();
            if opener.backoff(store, &output, error, &mut opened.pauses).await? {
                // The pause leaves most of the intake's time to other shards.
                tokio::time::sleep(try_time.saturating_mul(PAUSE_TIMES_TRY).min(TRY_PAUSE_MAX)).await;
                Ok(opened.received_shard.is_wanted().then_some(opened))
            } else {
                opener.requeue_last(opened.received_shard.take_deliveries()).await
            }
        };
        self.tasks.spawn(waiting.instrument(span));
    }

    /// Delays a shard because its job's inputs have failed for another shard: the next try comes
    /// after a pause. The number of such shards and the time of each are bounded.
    pub(super) async fn hold_up(&mut self, opened: OpenedShard) -> anyhow::Result<()> {
        let bounds = self.opener.bounds;
        if !bounds.allow(self.tasks.len(), opened.opened_at) {
            return self
                .opener
                .requeue_last(opened.received_shard.take_deliveries())
                .await
                .map(drop);
        }
        self.tasks.spawn(async move {
            tokio::time::sleep(bounds.held_up_pause).await;
            Ok(opened.received_shard.is_wanted().then_some(opened))
        });
        Ok(())
    }
}

impl Opener {
    /// Why a message is refused without opening its job; `None`: it may be opened.
    async fn refusal_before_open(&self, delivery: &Delivery) -> Option<Arc<str>> {
        if let Some(why) = self.worker.troubles.not_ours(&delivery.message) {
            return Some(why);
        }
        let why = suspect_reason(delivery)?;
        if self.worker.jobs.is_known(&delivery.message).await {
            None
        } else {
            Some(why.into())
        }
    }

    async fn open_and_extend(&self, delivery: Arc<Delivery>) -> anyhow::Result<Option<OpenedShard>> {
        self.extend_during(&delivery, self.open(delivery.clone())).await
    }

    /// Extends the delivery at the queue while `work` runs.
    async fn extend_during<T>(
        &self,
        delivery: &Delivery,
        work: impl Future<Output = anyhow::Result<T>>,
    ) -> anyhow::Result<T> {
        let mut work = std::pin::pin!(work);
        loop {
            tokio::select! {
                biased;
                done = &mut work => return done,
                () = tokio::time::sleep(self.bounds.extend_every) => if self.worker.watchdog.is_alive() {
                    self.worker.queue.extend(delivery, self.worker.watchdog.step_max()).await?;
                }
            }
        }
    }

    #[expect(clippy::too_many_lines, reason = "one message's way, in order")]
    async fn open(&self, delivery: Arc<Delivery>) -> anyhow::Result<Option<OpenedShard>> {
        let worker = &self.worker;
        let output = delivery.message.output.clone();
        let mut pauses = Pauses::default();
        let job = loop {
            let error = match self.resolve(&delivery.message).await {
                Ok(JobLookup::Job(job)) => break job,
                Ok(JobLookup::Stale(why) | JobLookup::NotOurs(why)) => {
                    self.worker.troubles.note_recovery(JobStore::Output, &output);
                    self.worker.troubles.note_not_ours(&delivery.message, why.clone());
                    self.refuse_and_pass_on(delivery, &why);
                    return Ok(None);
                }
                Err(error) => error,
            };
            if !self.backoff(JobStore::Output, &output, error, &mut pauses).await? {
                return self.requeue_last(vec![delivery]).await;
            }
        };
        spans::name_job(&job);
        match job.state() {
            JobState::Unreadable => {
                worker.pass_on_later(vec![delivery]);
                return Ok(None);
            }
            JobState::Stopped(_) => {
                self.worker.troubles.note_recovery(JobStore::Output, &output);
                // Whoever extends the job enqueues its shards again.
                worker.queue.acknowledge(&delivery).await?;
                return Ok(None);
            }
            JobState::Running | JobState::Closing(_) => {}
        }
        let key = ShardKey {
            job: job.number,
            shard: delivery.message.shard,
        };
        let received_at = delivery.received_at;
        if !worker.in_flight.add(key, delivery) {
            tracing::info!(
                "shard {} of {} is in progress already: both messages are acknowledged or given back together",
                key.shard,
                job.title()
            );
            return Ok(None);
        }
        let mut received_shard = ReceivedShard::new(worker, key);
        let log = loop {
            let error = match self.read_log(&job, key.shard).await {
                Ok(Some(log)) => break log,
                Ok(None) => {
                    self.worker.troubles.note_recovery(JobStore::Output, &output);
                    for delivery in received_shard.take_deliveries() {
                        worker.queue.acknowledge(&delivery).await?;
                    }
                    return Ok(None);
                }
                Err(error) => error,
            };
            if worker.retry_policy.decision(&error) == RetryDecision::LeaveShard || is_input_changed(&error) {
                return self.leave_shard(&job, received_shard, &error).await.map(|()| None);
            }
            if !self.backoff(JobStore::Output, &output, error, &mut pauses).await? {
                return self.requeue_last(received_shard.take_deliveries()).await;
            }
            if !received_shard.is_wanted() {
                return Ok(None);
            }
        };
        self.worker.troubles.note_recovery(JobStore::Output, &output);
        let plan = log.plan_attempt();
        if plan.next_rows.is_empty()
            && plan.accused.is_empty()
            && !plan.waiting.is_empty()
            && job.state() == JobState::Running
        {
            received_shard.give_back_later(&job, &plan.waiting);
            return Ok(None);
        }
        received_shard.trace = ShardTrace::begin(worker, &job, key.shard, received_at);
        Ok(Some(OpenedShard {
            received_shard,
            job,
            log,
            opened_at: Instant::now(),
            pauses: Pauses::default(),
        }))
    }

    /// The job of a message, with its commands. If they stopped or closed the job, they are read
    /// again, because the job may have been extended since.
    async fn resolve(&self, message: &Message) -> anyhow::Result<JobLookup> {
        let lookup = match self.worker.jobs.resolve(message).await {
            Err(error) if self.worker.retry_policy.decision(&error) == RetryDecision::LeaveShard => {
                return Ok(JobLookup::NotOurs(one_line(&error).into()));
            }
            lookup => lookup?,
        };
        if let JobLookup::Job(job) = &lookup
            && let JobState::Stopped(_) | JobState::Closing(_) = job.state()
            && let Err(error) = job.refresh().await
        {
            match self.worker.retry_policy.decision(&error) {
                RetryDecision::LeaveShard => job.leave_to_others(&error),
                _ => return Err(error),
            }
        }
        Ok(lookup)
    }

    /// The log of a shard; `None`: the shard is committed. Also decides for attempts without an end
    /// whether their workers are dead.
    async fn read_log(&self, job: &OpenJob, shard: u32) -> anyhow::Result<Option<Box<ShardLog>>> {
        let mut log = match job.ledger.shard(shard).await? {
            ShardState::Committed(commit) => {
                // The message of a committed shard comes again if its acknowledgement or the part
                // was lost.
                let make_part = |batches: &[_], metadata: &[_]| job.make_part(batches, metadata);
                job.ledger.restore_part(&commit, make_part).await?;
                return Ok(None);
            }
            ShardState::Open(log) => log,
        };
        if log.has_suspect_attempts() {
            // The store's timestamp of this write is its current time.
            job.write_heartbeat(&self.worker.name).await?;
            let heartbeats = job.ledger.heartbeats().await?;
            log.set_fates(|attempt| fate(attempt, &heartbeats, process_state));
        }
        Ok(Some(log))
    }

    /// Waits before the next try. False: the delivery has been set aside for the maximum time.
    /// Returns an error that is not waited out.
    async fn backoff(
        &self,
        store: JobStore,
        output: &str,
        error: anyhow::Error,
        pauses: &mut Pauses,
    ) -> anyhow::Result<bool> {
        let report = |error: &anyhow::Error| self.worker.troubles.note_failure(store, output, error);
        self.worker.retry_policy.wait(error, pauses, &self.stop, report).await?;
        Ok(pauses.waited() < self.bounds.aside_time_max)
    }

    async fn requeue_last(&self, deliveries: Vec<Arc<Delivery>>) -> anyhow::Result<Option<OpenedShard>> {
        for delivery in deliveries {
            self.worker.queue.requeue_last(&delivery).await?;
        }
        Ok(None)
    }

    /// Passes on a message that this worker cannot use. It is never dropped at once, because
    /// another worker may reach a store that this one cannot.
    fn refuse_and_pass_on(&self, delivery: Arc<Delivery>, why: &str) {
        self.refusals.report(&delivery, why);
        self.worker.pass_on_later(vec![delivery]);
    }

    /// Leaves a shard that this worker cannot begin to other workers, unless its input stops the
    /// job for all.
    pub(super) async fn leave_shard(
        &self,
        job: &OpenJob,
        received_shard: ReceivedShard,
        error: &anyhow::Error,
    ) -> anyhow::Result<()> {
        if is_input_changed(error) && self.stop_job(job, error).await? {
            // Whoever continues the job enqueues its shards again.
            for delivery in received_shard.take_deliveries() {
                self.worker.queue.acknowledge(&delivery).await?;
            }
        } else {
            let shard = received_shard.key.shard;
            self.worker
                .leave_to_others(shard, job, error, received_shard.take_deliveries());
        }
        Ok(())
    }

    /// Stops the job because an input differs from the planned one: a person must act before any
    /// worker goes on. False: the job keeps another state, or is left to other workers.
    async fn stop_job(&self, job: &OpenJob, error: &anyhow::Error) -> anyhow::Result<bool> {
        // A job that is stopped or cancelled already keeps its state.
        if job.state() != JobState::Running {
            return Ok(false);
        }
        let retry_policy = &self.worker.retry_policy;
        let note = one_line(error);
        // `run` ends with this error and prints it as its last line.
        if retry_policy.decision(error) != RetryDecision::End {
            tracing::error!("{}: {note}", job.title());
        }
        let order = JobCommand::Stop {
            why: StopWhy::InputChanged,
            close: false,
            note: Some(note),
        };
        let mut pauses = Pauses::default();
        while let Err(error) = job.order_stop(order.clone()).await {
            match retry_policy.backoff(error, &mut pauses, &self.stop).await {
                Ok(()) => {}
                Err(error) if retry_policy.decision(&error) == RetryDecision::LeaveShard => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        // A job that closes instead still needs this shard's rows.
        Ok(matches!(job.state(), JobState::Stopped(_)))
    }
}

/// Why the message must not be opened by a process that has not opened its job before.
pub fn suspect_reason(delivery: &Delivery) -> Option<String> {
    let times = delivery.deliveries.saturating_sub(1);
    (times >= DELIVERIES_MAX)
        .then(|| format!("it was delivered {times} times before, and may have crashed those workers"))
}

pub(super) fn is_input_changed(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(DatasetError::InputChanged { .. }))
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use async_trait::async_trait;

    use super::*;
    use crate::device::Precision;
    use crate::job::precision::RequestedKvFormat;
    use crate::ledger::LedgerError;
    use crate::queue::{LocalQueue, Queue, QueueError, Recall};
    use crate::report::meter::Meter;
    use crate::worker::jobs::Jobs;
    use crate::worker::metrics::Metrics;
    use crate::worker::model::{Formats, Model, ModelFiles};
    use crate::worker::retry_policy::RetryPolicy;
    use crate::worker::step_watchdog::StepWatchdog;
    use crate::worker::watched::WatchedJobs;
    use crate::worker::{Until, WorkerConfig, WorkerOptions};

    /// An in-memory queue that counts calls.
    #[derive(Default)]
    struct Counting {
        queue: LocalQueue,
        extended: AtomicUsize,
        requeue_last: AtomicUsize,
    }

    #[async_trait]
    impl Queue for Counting {
        async fn receive(&self, wait: Duration) -> Result<Option<Delivery>, QueueError> {
            self.queue.receive(wait).await
        }
        async fn extend(&self, _: &Delivery, _: Duration) -> Result<(), QueueError> {
            self.extended.fetch_add(1, Ordering::SeqCst);
            Ok(())
        }
        async fn acknowledge(&self, delivery: &Delivery) -> Result<(), QueueError> {
            self.queue.acknowledge(delivery).await
        }
        async fn give_back(&self, delivery: &Delivery) -> Result<(), QueueError> {
            self.queue.give_back(delivery).await
        }
        async fn forward(&self, delivery: &Delivery) -> Result<bool, QueueError> {
            self.queue.forward(delivery).await
        }
        async fn requeue_last(&self, delivery: &Delivery) -> Result<(), QueueError> {
            self.requeue_last.fetch_add(1, Ordering::SeqCst);
            self.queue.requeue_last(delivery).await
        }
        async fn next_recall(&self) -> Recall {
            self.queue.next_recall().await
        }
        fn is_attached(&self) -> bool {
            true
        }
    }

    const NOWHERE: &str = "/nowhere/at/all";

    /// The openings of a worker of the demo model, and its queue with `messages` messages for an
    /// output that does not exist.
    fn openings(messages: u32, bounds: AsideBounds) -> (Openings, Arc<Counting>) {
        let queue = Arc::new(Counting::default());
        queue
            .queue
            .send((0..messages).map(|shard| Message::new("gone", NOWHERE, 0, shard)));
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("jobs/demo/model");
        let formats = Formats::of(Precision::F32.into(), RequestedKvFormat::Auto, Precision::F32);
        let model = Model::new(ModelFiles::open(dir).unwrap(), formats, 128, "m".to_owned());
        let worker = Worker::new(WorkerConfig {
            name: "test".into(),
            queue: queue.clone(),
            embedded_queue: None,
            jobs: Jobs::new(model),
            watched: WatchedJobs::default(),
            meter: Arc::new(Meter::default()),
            metrics: Arc::new(Metrics::new().unwrap()),
            retry_policy: RetryPolicy::new(true),
            watchdog: Arc::new(StepWatchdog::new(Duration::from_secs(60))),
            render_threads: rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap(),
            options: WorkerOptions {
                log_interval: Duration::from_secs(1),
                shards_in_flight: 4,
                until: Until::Stopped,
                idle_after: Duration::ZERO,
                max_shards: None,
            },
        });
        let opener = Opener {
            worker: Arc::new(worker),
            stop: Stop::default(),
            refusals: Refusals::default(),
            bounds,
        };
        let openings = Openings {
            opener: Arc::new(opener),
            tasks: JoinSet::new(),
            slow_outputs: HashMap::new(),
        };
        (openings, queue)
    }

    async fn received(queue: &Counting) -> Delivery {
        queue.receive(Duration::from_secs(5)).await.unwrap().unwrap()
    }

    fn away() -> anyhow::Error {
        let source = object_store::Error::Generic {
            store: "S3",
            source: "connection refused".into(),
        };
        let operation = "reading `x`".into();
        let tries = 7;
        LedgerError::Retryable {
            operation,
            tries,
            source,
        }
        .into()
    }

    /// A delivery that was taken counts until `next` returns its result.
    #[tokio::test]
    async fn the_number_of_deliveries_set_aside_is_bounded() {
        for (is_failing, most) in [(true, 2), (false, 4)] {
            let bounds = AsideBounds {
                aside_max: 2,
                ..AsideBounds::default()
            };
            let (mut openings, queue) = openings(6, bounds);
            if is_failing {
                openings
                    .opener
                    .worker
                    .troubles
                    .note_failure(JobStore::Output, NOWHERE, &away());
            }
            for number in 0..6 {
                let taken = openings.take(received(&queue).await).await.unwrap();
                assert_eq!(
                    matches!(taken, TakeOutcome::Requeued),
                    number >= most,
                    "{is_failing} {number}"
                );
            }
            assert_eq!(queue.requeue_last.load(Ordering::SeqCst), 6 - most);
            assert_eq!(queue.queue.unacknowledged(), 6, "none is dropped");
        }
    }

    #[tokio::test]
    async fn a_delivery_is_set_aside_for_a_bounded_time() {
        for (aside_time_max, stays) in [(Duration::from_secs(600), true), (Duration::ZERO, false)] {
            let bounds = AsideBounds {
                aside_time_max,
                ..AsideBounds::default()
            };
            let (openings, _) = openings(0, bounds);
            let opener = &openings.opener;
            let mut pauses = Pauses::default();
            let again = opener
                .backoff(JobStore::Output, "s3://a/out", away(), &mut pauses)
                .await;
            assert_eq!(again.unwrap(), stays);
            assert!(opener.worker.troubles.is_failing(JobStore::Output, "s3://a/out"));
            let since = Instant::now();
            assert_eq!(bounds.allow(0, since), stays);
            assert!(!bounds.allow(bounds.aside_max, since), "there are enough");
        }
    }

    #[tokio::test]
    async fn a_delivery_is_extended_while_it_is_opened() {
        let bounds = AsideBounds {
            extend_every: Duration::from_millis(20),
            ..AsideBounds::default()
        };
        let (openings, queue) = openings(1, bounds);
        let delivery = received(&queue).await;
        let work = async {
            tokio::time::sleep(Duration::from_millis(500)).await;
            Ok(7)
        };
        let done = openings.opener.extend_during(&delivery, work).await;
        assert_eq!(done.unwrap(), 7);
        assert!(queue.extended.load(Ordering::SeqCst) >= 2);
    }

    /// A shard that is set aside needs no memory for carried columns.
    #[tokio::test]
    async fn a_shard_set_aside_releases_its_memory() {
        use crate::worker::room::CARRIED_BYTES_MAX;
        let (openings, queue) = openings(1, AsideBounds::default());
        let worker = &openings.opener.worker;
        let key = |shard| ShardKey { job: 0, shard };
        worker.in_flight.add(key(0), Arc::new(received(&queue).await));
        let received_shard = ReceivedShard::new(worker, key(0));
        worker.jobs.carried_memory().reserve(key(0), CARRIED_BYTES_MAX).await;
        received_shard.release_memory();
        let held = worker.jobs.carried_memory().reserve(key(1), CARRIED_BYTES_MAX);
        tokio::time::timeout(Duration::from_secs(5), held)
            .await
            .expect("there is room");
        assert!(received_shard.is_wanted(), "it stays in hand");
    }
}
