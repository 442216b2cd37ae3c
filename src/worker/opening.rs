//! Opens deliveries: finds the job of each message and reads its orders and the shard's log, so
//! that the shard can begin.
//!
//! Each delivery is opened in a task of its own. If its store does not answer, the delivery is set
//! aside: the task goes on alone, with its own pauses, while the intake takes the next message. A
//! delivery that is set aside needs none of the places for shards in flight and stays with this
//! worker, which extends it at the queue. After a while it is put at the end of the queue, where
//! other workers may get it. That counts as no hop: an outage must lose no message.
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
use crate::worker::in_hand::InHand;
use crate::worker::jobs::{JobLookup, JobState, OpenJob};
use crate::worker::process::see;
use crate::worker::refusals::Refusals;
use crate::worker::retry_policy::{Pauses, RetryDecision};
use crate::worker::stop::Stop;
use crate::worker::troubles::Where;
use crate::worker::{Worker, one_line, spans};

/// How long the intake waits for an opening before it takes the next message. The wait is shorter
/// (`OPEN_WAIT_SLOW`) where the intake has waited for a delivery of the same output in vain less
/// than `SLOW_HOLDS` ago.
const OPEN_WAIT: Duration = Duration::from_secs(2);
const OPEN_WAIT_SLOW: Duration = Duration::from_millis(250);
const SLOW_HOLDS: Duration = Duration::from_secs(60);
/// A try that fails is followed by a pause of this many times its own length.
const TRY_SHARE: u32 = 4;
const TRY_PAUSE_MAX: Duration = Duration::from_secs(240);
/// A process does not open a message of an unknown job after this many deliveries since the message
/// was sent: it may have ended the processes that had it.
const DELIVERIES_MAX: u32 = 5;

/// The deliveries that are being opened. When dropped, they go back to the queue.
pub(super) struct Openings {
    pub opener: Arc<Opener>,
    tasks: JoinSet<anyhow::Result<Option<Opened>>>,
    /// Outputs for whose deliveries the intake waited in vain, and when.
    slow: HashMap<String, Instant>,
}

/// Opens deliveries one by one.
pub(super) struct Opener {
    worker: Arc<Worker>,
    stop: Stop,
    refusals: Refusals,
    bounds: Bounds,
}

/// Bounds on deliveries that are set aside, and intervals.
#[derive(Debug, Clone, Copy)]
struct Bounds {
    /// Maximum number of deliveries set aside; further deliveries of failing jobs go to the end of
    /// the queue.
    aside: usize,
    /// How long a delivery stays set aside: shorter than a broker's own timeout.
    aside_time: Duration,
    /// Pause before the next look at a shard that was set aside because another shard of its job
    /// had failed.
    held_up: Duration,
    /// How often the queue is told that a delivery is still being opened.
    extend_every: Duration,
}

impl Default for Bounds {
    fn default() -> Bounds {
        Bounds {
            aside: 64,
            aside_time: Duration::from_secs(600),
            held_up: Duration::from_secs(5),
            extend_every: Duration::from_secs(5),
        }
    }
}

impl Bounds {
    /// Whether a delivery that came at `since` may be set aside beside `others`.
    fn allow(&self, others: usize, since: Instant) -> bool {
        others < self.aside && since.elapsed() < self.aside_time
    }
}

/// A shard that was opened and has something left to do.
pub(super) struct Opened {
    pub in_hand: InHand,
    pub job: Arc<OpenJob>,
    pub log: Box<ShardLog>,
    /// When the shard was opened.
    pub since: Instant,
    /// The pauses between tries to begin the shard.
    pub pauses: Pauses,
}

impl Opened {
    fn output(&self) -> String {
        self.job.ledger.store().url().to_string()
    }
}

/// What became of a delivery that the intake handed over.
pub(super) enum Taken {
    /// The delivery is being opened. `wait`: how long the intake waits for the result.
    Opening { output: String, wait: Duration },
    /// The delivery was passed on to other workers.
    PassedOn,
    /// The delivery went to the end of the queue.
    PutOff,
}

impl Openings {
    pub(super) fn new(worker: Arc<Worker>, stop: Stop) -> Openings {
        Openings {
            opener: Arc::new(Opener {
                worker,
                stop,
                refusals: Refusals::default(),
                bounds: Bounds::default(),
            }),
            tasks: JoinSet::new(),
            slow: HashMap::new(),
        }
    }

    /// Whether nothing is being opened and no store has failed lately.
    pub(super) fn is_quiet(&self) -> bool {
        self.tasks.is_empty() && !self.opener.worker.troubles.any()
    }

    /// Begins to open a delivery that was just received.
    pub(super) async fn take(&mut self, delivery: Delivery) -> anyhow::Result<Taken> {
        let (opener, message) = (self.opener.clone(), &delivery.message);
        let output = message.output.clone();
        let is_failing = [Where::Output, Where::Inputs]
            .iter()
            .any(|place| opener.worker.troubles.holds(*place, &message.output));
        let (on_their_way, most) = (self.tasks.len(), opener.bounds.aside);
        if is_failing && on_their_way >= most || on_their_way >= 2 * most {
            opener.worker.queue.requeue_last(&delivery).await?;
            return Ok(Taken::PutOff);
        }
        let delivery = Arc::new(delivery);
        if let Some(why) = opener.refuses_unseen(&delivery).await {
            opener.leave_message(delivery, &why);
            return Ok(Taken::PassedOn);
        }
        let span = spans::of_message(&delivery.message);
        let opening = async move { opener.open_and_extend(delivery).await };
        self.tasks.spawn(opening.instrument(span));
        let was_slow = self.slow.get(&output).is_some_and(|since| since.elapsed() < SLOW_HOLDS);
        let wait = match (is_failing, was_slow) {
            (true, _) => Duration::ZERO,
            (false, true) => OPEN_WAIT_SLOW,
            (false, false) => OPEN_WAIT,
        };
        Ok(Taken::Opening { output, wait })
    }

    /// Remembers that the intake waited for a delivery of this output in vain.
    pub(super) fn note_slow(&mut self, output: String) {
        self.slow.retain(|_, since| since.elapsed() < SLOW_HOLDS);
        self.slow.insert(output, Instant::now());
    }

    /// The next opening that ends: a shard to begin, or `None` where the delivery was dealt with.
    /// Waits for ever where nothing is being opened. Cancel-safe.
    pub(super) async fn next(&mut self) -> anyhow::Result<Option<Opened>> {
        match self.tasks.join_next().await {
            Some(Ok(opened)) => opened,
            Some(Err(error)) => Err(anyhow::anyhow!("the task that opens a shard panicked: {error}")),
            None => std::future::pending().await,
        }
    }

    /// Sets a shard aside whose store failed while the shard began. Nothing else could begin during
    /// that try, which lasted `took`. An error that is not waited out ends the worker.
    pub(super) fn set_aside(&mut self, mut opened: Opened, place: Where, error: anyhow::Error, took: Duration) {
        let opener = self.opener.clone();
        opened.in_hand.holds_no_rows();
        let span = spans::of_shard(&opened.job, opened.in_hand.key.shard, None);
        let waiting = async move {
            let output = opened.output();
            if opener.backoff(place, &output, error, &mut opened.pauses).await? {
                // The pause leaves most of the intake's time to other shards.
                tokio::time::sleep(took.saturating_mul(TRY_SHARE).min(TRY_PAUSE_MAX)).await;
                Ok(opened.in_hand.is_wanted().then_some(opened))
            } else {
                opener.requeue_last(opened.in_hand.answer()).await
            }
        };
        self.tasks.spawn(waiting.instrument(span));
    }

    /// Holds up a shard of a job whose store failed with another shard: the next try comes after a
    /// pause. The number of such shards and the time of each are bounded.
    pub(super) async fn hold_up(&mut self, opened: Opened) -> anyhow::Result<()> {
        let bounds = self.opener.bounds;
        if !bounds.allow(self.tasks.len(), opened.since) {
            return self.opener.requeue_last(opened.in_hand.answer()).await.map(drop);
        }
        self.tasks.spawn(async move {
            tokio::time::sleep(bounds.held_up).await;
            Ok(opened.in_hand.is_wanted().then_some(opened))
        });
        Ok(())
    }
}

impl Opener {
    /// Why a message is refused before its job is opened.
    async fn refuses_unseen(&self, delivery: &Delivery) -> Option<Arc<str>> {
        if let Some(why) = self.worker.troubles.not_ours(&delivery.message) {
            return Some(why);
        }
        let why = is_suspect(delivery)?;
        if self.worker.jobs.knows(&delivery.message).await {
            None
        } else {
            Some(why.into())
        }
    }

    async fn open_and_extend(&self, delivery: Arc<Delivery>) -> anyhow::Result<Option<Opened>> {
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
                    self.worker.queue.extend(delivery, self.worker.watchdog.limit()).await?;
                }
            }
        }
    }

    #[expect(clippy::too_many_lines, reason = "one message's way, in order")]
    async fn open(&self, delivery: Arc<Delivery>) -> anyhow::Result<Option<Opened>> {
        let worker = &self.worker;
        let output = delivery.message.output.clone();
        let mut pauses = Pauses::default();
        let job = loop {
            let error = match self.resolve(&delivery.message).await {
                Ok(JobLookup::Job(job)) => break job,
                Ok(JobLookup::Stale(why) | JobLookup::NotOurs(why)) => {
                    self.worker.troubles.end(Where::Output, &output);
                    self.worker.troubles.note_not_ours(&delivery.message, why.clone());
                    self.leave_message(delivery, &why);
                    return Ok(None);
                }
                Err(error) => error,
            };
            if !self.backoff(Where::Output, &output, error, &mut pauses).await? {
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
                self.worker.troubles.end(Where::Output, &output);
                // Whoever extends the job enqueues its shards again.
                worker.queue.acknowledge(&delivery).await?;
                return Ok(None);
            }
            JobState::Going | JobState::Closing(_) => {}
        }
        let key = ShardKey {
            job: job.number,
            shard: delivery.message.shard,
        };
        if !worker.in_flight.enter(key, delivery) {
            tracing::info!(
                "shard {} of {} is in hand already: both messages are answered together",
                key.shard,
                job.title()
            );
            return Ok(None);
        }
        let in_hand = InHand::new(worker, key);
        let log = loop {
            let error = match self.read_log(&job, key.shard).await {
                Ok(Some(log)) => break log,
                Ok(None) => {
                    self.worker.troubles.end(Where::Output, &output);
                    for delivery in in_hand.answer() {
                        worker.queue.acknowledge(&delivery).await?;
                    }
                    return Ok(None);
                }
                Err(error) => error,
            };
            if worker.retry_policy.decision(&error) == RetryDecision::LeaveShard || is_changed(&error) {
                return self.leave(&job, in_hand, &error).await.map(|()| None);
            }
            if !self.backoff(Where::Output, &output, error, &mut pauses).await? {
                return self.requeue_last(in_hand.answer()).await;
            }
            if !in_hand.is_wanted() {
                return Ok(None);
            }
        };
        self.worker.troubles.end(Where::Output, &output);
        let plan = log.narrowing();
        if plan.next.is_empty() && plan.accused.is_empty() && !plan.waiting.is_empty() && job.state() == JobState::Going
        {
            in_hand.give_back_later(&job, &plan.waiting);
            return Ok(None);
        }
        Ok(Some(Opened {
            in_hand,
            job,
            log,
            since: Instant::now(),
            pauses: Pauses::default(),
        }))
    }

    /// The job of a message, with its orders. Orders are read again where they stopped or closed
    /// the job: they may have been revoked since.
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

    /// The log of a shard; `None`: the shard is committed. Also judges attempts that have no end
    /// and in which a row was alone on the device.
    async fn read_log(&self, job: &OpenJob, shard: u32) -> anyhow::Result<Option<Box<ShardLog>>> {
        let mut log = match job.ledger.shard(shard).await? {
            ShardState::Committed(commit) => {
                // A message of a committed shard comes again where an acknowledgement or a part was
                // lost.
                let make_part = |batches: &[_], metadata: &[_]| job.make_part(batches, metadata);
                job.ledger.restore_part(&commit, make_part).await?;
                return Ok(None);
            }
            ShardState::Open(log) => log,
        };
        if log.has_suspects() {
            // The store's timestamp of this write tells the current time.
            job.sign(&self.worker.name).await?;
            let signs = job.ledger.signs_of_life().await?;
            log.judge(|attempt| fate(attempt, &signs, see));
        }
        Ok(Some(log))
    }

    /// Waits before the next try. False: the delivery was set aside for long enough. Returns an
    /// error that is not waited out.
    async fn backoff(
        &self,
        place: Where,
        output: &str,
        error: anyhow::Error,
        pauses: &mut Pauses,
    ) -> anyhow::Result<bool> {
        let say = |error: &anyhow::Error| self.worker.troubles.note(place, output, error);
        self.worker.retry_policy.wait(error, pauses, &self.stop, say).await?;
        Ok(pauses.waited() < self.bounds.aside_time)
    }

    async fn requeue_last(&self, deliveries: Vec<Arc<Delivery>>) -> anyhow::Result<Option<Opened>> {
        for delivery in deliveries {
            self.worker.queue.requeue_last(&delivery).await?;
        }
        Ok(None)
    }

    /// Passes a message on that this worker cannot use. It is never dropped at once: another worker
    /// may reach a store that this one cannot.
    fn leave_message(&self, delivery: Arc<Delivery>, why: &str) {
        self.refusals.say(&delivery, why);
        self.worker.pass_on_later(vec![delivery]);
    }

    /// Leaves a shard that this worker cannot begin to other workers, unless its input stops the
    /// job for all.
    pub(super) async fn leave(&self, job: &OpenJob, in_hand: InHand, error: &anyhow::Error) -> anyhow::Result<()> {
        if is_changed(error) && self.stop_job(job, error).await? {
            // Whoever continues the job enqueues its shards again.
            for delivery in in_hand.answer() {
                self.worker.queue.acknowledge(&delivery).await?;
            }
        } else {
            let shard = in_hand.key.shard;
            self.worker.leave_to_others(shard, job, error, in_hand.answer());
        }
        Ok(())
    }

    /// Stops the job because an input differs from the planned one: a person must act before any
    /// worker goes on. False: another order came first.
    async fn stop_job(&self, job: &OpenJob, error: &anyhow::Error) -> anyhow::Result<bool> {
        // A job that is stopped or cancelled already keeps its state.
        if job.state() != JobState::Going {
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

/// Why a process that has not opened the message's job before must not open the message.
pub fn is_suspect(delivery: &Delivery) -> Option<String> {
    let times = delivery.deliveries.saturating_sub(1);
    (times >= DELIVERIES_MAX)
        .then(|| format!("it was in workers' hands {times} times before, and may have been the end of them"))
}

pub(super) fn is_changed(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(DatasetError::InputChanged { .. }))
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use async_trait::async_trait;

    use super::*;
    use crate::device::Precision;
    use crate::job::precision::RequestedPrecision;
    use crate::ledger::LedgerError;
    use crate::queue::{LocalQueue, Queue, QueueError, Recall};
    use crate::report::meter::Meter;
    use crate::worker::jobs::Jobs;
    use crate::worker::model::{Formats, Model, ModelFiles};
    use crate::worker::retry_policy::RetryPolicy;
    use crate::worker::step_watchdog::StepWatchdog;
    use crate::worker::watched::Watched;
    use crate::worker::{Options, Until, WorkerConfig};

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
        async fn recalled(&self) -> Recall {
            self.queue.recalled().await
        }
        fn is_attached(&self) -> bool {
            true
        }
    }

    const NOWHERE: &str = "/nowhere/at/all";

    /// The openings of a worker of the demo model, and its queue with `messages` messages that
    /// point nowhere.
    fn openings(messages: u32, bounds: Bounds) -> (Openings, Arc<Counting>) {
        let queue = Arc::new(Counting::default());
        queue
            .queue
            .send((0..messages).map(|shard| Message::new("gone", NOWHERE, 0, shard)));
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("jobs/demo/model");
        let formats = Formats::of(Precision::F32.into(), RequestedPrecision::Auto, Precision::F32);
        let model = Model::new(ModelFiles::open(dir).unwrap(), formats, 128, "m".into());
        let worker = Worker::new(WorkerConfig {
            name: "test".into(),
            queue: queue.clone(),
            own_queue: None,
            jobs: Jobs::new(model),
            watched: Watched::default(),
            meter: Arc::new(Meter::default()),
            retry_policy: RetryPolicy::new(true),
            watchdog: Arc::new(StepWatchdog::new(Duration::from_secs(60))),
            render_threads: rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap(),
            options: Options {
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
            slow: HashMap::new(),
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
        let what = "reading `x`".into();
        LedgerError::Retryable { what, tries: 7, source }.into()
    }

    /// Each delivery that is taken counts until `next` returns it.
    #[tokio::test]
    async fn of_jobs_in_trouble_a_bounded_number_is_set_aside() {
        for (is_failing, most) in [(true, 2), (false, 4)] {
            let bounds = Bounds {
                aside: 2,
                ..Bounds::default()
            };
            let (mut openings, queue) = openings(6, bounds);
            if is_failing {
                openings.opener.worker.troubles.note(Where::Output, NOWHERE, &away());
            }
            for number in 0..6 {
                let taken = openings.take(received(&queue).await).await.unwrap();
                assert_eq!(matches!(taken, Taken::PutOff), number >= most, "{is_failing} {number}");
            }
            assert_eq!(queue.requeue_last.load(Ordering::SeqCst), 6 - most);
            assert_eq!(queue.queue.unacknowledged(), 6, "none is dropped");
        }
    }

    #[tokio::test]
    async fn a_delivery_is_set_aside_for_a_bounded_time() {
        for (aside_time, stays) in [(Duration::from_secs(600), true), (Duration::ZERO, false)] {
            let bounds = Bounds {
                aside_time,
                ..Bounds::default()
            };
            let (openings, _) = openings(0, bounds);
            let opener = &openings.opener;
            let mut pauses = Pauses::default();
            let again = opener.backoff(Where::Output, "s3://a/out", away(), &mut pauses).await;
            assert_eq!(again.unwrap(), stays);
            assert!(opener.worker.troubles.holds(Where::Output, "s3://a/out"));
            let since = Instant::now();
            assert_eq!(bounds.allow(0, since), stays);
            assert!(!bounds.allow(bounds.aside, since), "there are enough");
        }
    }

    #[tokio::test]
    async fn the_queue_hears_of_a_delivery_on_its_way() {
        let bounds = Bounds {
            extend_every: Duration::from_millis(20),
            ..Bounds::default()
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

    /// A shard that is set aside needs no room for carried columns.
    #[tokio::test]
    async fn what_is_set_aside_gives_its_room_away() {
        use crate::worker::room::ROOM_BYTES;
        let (openings, queue) = openings(1, Bounds::default());
        let worker = &openings.opener.worker;
        let key = |shard| ShardKey { job: 0, shard };
        worker.in_flight.enter(key(0), Arc::new(received(&queue).await));
        let in_hand = InHand::new(worker, key(0));
        worker.jobs.room().hold(key(0), ROOM_BYTES).await;
        in_hand.holds_no_rows();
        let held = worker.jobs.room().hold(key(1), ROOM_BYTES);
        tokio::time::timeout(Duration::from_secs(5), held)
            .await
            .expect("there is room");
        assert!(in_hand.is_wanted(), "it stays in hand");
    }
}
