//! The thread that polls Kafka: it takes messages in, handles the worker's answers, watches the
//! worker's progress, and reconnects after every kind of outage.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rdkafka::config::FromClientConfigAndContext;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};
use tokio::sync::oneshot;

use super::config;
use super::group::Group;
use super::publisher::{Topic, fetch_topic, wait_for_metadata};
use super::trouble::{Kind, Trouble, denied, kind};
use crate::queue::QueueError;
use crate::queue::address::KafkaUrl;
use crate::queue::outage::Outage;
use crate::queue::settings::Resolved;

/// Timeout of one poll, and so the maximum delay of the worker's answers.
const POLL_WAIT: Duration = Duration::from_millis(25);
/// Timeout of a poll that drains all queued events. It is not 0, because a single log event of
/// librdkafka would then end the draining.
const EVENT_WAIT: Duration = Duration::from_millis(10);
/// Interval between commits.
const COMMIT_EVERY: Duration = Duration::from_millis(100);
/// How often a missing topic or an absent broker is tried again.
const RETRY_INTERVAL: Duration = Duration::from_secs(2);
/// A longer gap between two turns means that the whole process was stopped, the worker included.
const STANDSTILL: Duration = Duration::from_secs(2);
/// Number of ready messages at which fetching pauses; a message takes a few kilobytes. Pauses must
/// be rare, even where a worker passes thousands of messages on: librdkafka drops the fetched
/// messages of a paused partition and needs about a second to fetch them again.
const READY_MAX: usize = 1024;
/// Number of messages waiting to be passed on at which fetching pauses.
const REPUBLISHING_MAX: usize = 4096;

/// Our membership in the consumer group.
enum Mode {
    /// Not a member: the topic is missing or no broker answers. Both are checked again at
    /// `next_retry`.
    Waiting {
        next_retry: Instant,
        said_missing: bool,
    },
    Member,
    /// Not a member: the worker had stopped making progress at this `progress_count`. A higher
    /// count makes us rejoin.
    LeftGroup {
        progress_count: u64,
    },
}

struct PollThread<'a> {
    url: &'a KafkaUrl,
    address: String,
    consumer: BaseConsumer<Group>,
    outage: Outage,
    mode: Mode,
    last_commit: Instant,
    last_turn: Instant,
    next_check: Instant,
}

/// Runs until the queue is closed. `opened` gets the result of opening, once.
pub(crate) fn run(url: &KafkaUrl, resolved: &Resolved, group: Group, opened: oneshot::Sender<Result<(), QueueError>>) {
    // A send to `opened` fails only if the caller has given up, and then the tracker is closed
    // soon.
    match open(url, resolved, group) {
        Err(error) => {
            let _ = opened.send(Err(error));
        }
        Ok(mut poller) => {
            if opened.send(Ok(())).is_ok() {
                while !poller.group().tracker.is_closing() {
                    poller.turn();
                }
            }
            poller.close();
        }
    }
}

fn open<'a>(url: &'a KafkaUrl, resolved: &Resolved, group: Group) -> Result<PollThread<'a>, QueueError> {
    let consumer = BaseConsumer::from_config_and_context(&config::consumer(url, resolved)?, group)
        .map_err(|error| config::refused(error, resolved))?;
    let now = Instant::now();
    let mut poller = PollThread {
        url,
        address: url.to_string(),
        consumer,
        outage: Outage::new(url),
        mode: Mode::Waiting {
            next_retry: now,
            said_missing: false,
        },
        last_commit: now,
        last_turn: now,
        next_check: now,
    };
    let looked = wait_for_metadata(poller.consumer.client(), url, || {
        // Serves the events that carry errors: the most telling one may be queued behind many
        // others.
        while poller.consumer.poll(EVENT_WAIT).is_some() {}
        poller.group().listener.take()
    });
    match looked {
        Ok(topic) => poller.found(topic),
        Err(QueueError::Unavailable { why } | QueueError::UnknownHost { why }) => poller.outage.down(&why),
        Err(error) => return Err(error),
    }
    poller.last_turn = Instant::now();
    Ok(poller)
}

impl PollThread<'_> {
    fn group(&self) -> &Group {
        self.consumer.context()
    }

    fn turn(&mut self) {
        let now = Instant::now();
        let stalled = now - self.last_turn;
        if stalled > STANDSTILL {
            self.group().tracker.extend_leases(stalled);
        }
        self.last_turn = now;
        self.group().process_answers();
        if now - self.last_commit >= COMMIT_EVERY {
            self.last_commit = now;
            self.group().commit(&self.consumer, None, CommitMode::Async);
        }
        self.watch(now);
        let group = self.group();
        // Hysteresis: a paused partition takes a second to deliver again, so it resumes only at
        // half the limit.
        let ready_max = if group.is_paused() { READY_MAX / 2 } else { READY_MAX };
        let full =
            group.tracker.ready() >= ready_max || group.tracker.republishing.load(Ordering::SeqCst) >= REPUBLISHING_MAX;
        group.set_paused(&self.consumer, full);
        let polled = self.consumer.poll(POLL_WAIT);
        // Assignments change only within `poll`, so this check follows it.
        let is_member = matches!(self.mode, Mode::Member) && !self.outage.is_down();
        self.group()
            .tracker
            .set_attached(is_member && self.group().is_assigned());
        let trouble = match polled {
            None => None,
            Some(Ok(message)) => {
                self.group().handle_message(&message);
                None
            }
            Some(Err(error)) => Some(error),
        };
        if let Some(error) = trouble {
            self.failed(&error);
        }
    }

    /// Leaves the group or rejoins it, and checks whether an absent broker is back.
    fn watch(&mut self, now: Instant) {
        match self.mode {
            Mode::Member if self.group().tracker.is_stuck(now) => {
                tracing::warn!(
                    queue = %self.address,
                    "{}: the worker has stopped making progress; leaving the consumer group until it makes progress again",
                    self.address
                );
                let progress_count = self.group().tracker.progress_count();
                self.group().process_answers();
                self.group().commit(&self.consumer, None, CommitMode::Async);
                self.group().forget_all("its worker has stopped making progress");
                self.leave();
                self.mode = Mode::LeftGroup { progress_count };
            }
            Mode::Member if (self.outage.is_down() || self.group().tracker.is_denied()) && now >= self.next_check => {
                self.next_check = now + RETRY_INTERVAL;
                if fetch_topic(self.consumer.client(), &self.url.topic).is_ok() {
                    self.outage.up();
                    self.forgive();
                }
            }
            Mode::LeftGroup { progress_count } if self.group().tracker.progress_count() > progress_count => {
                tracing::info!(
                    queue = %self.address,
                    "{}: the worker makes progress again; rejoining the consumer group",
                    self.address
                );
                self.join();
            }
            Mode::Waiting { next_retry, .. } if now >= next_retry => self.fetch_topic(now),
            _ => {}
        }
    }

    fn join(&mut self) {
        self.group().set_leaving(false);
        match self.consumer.subscribe(&[&self.url.topic]) {
            Ok(()) => self.mode = Mode::Member,
            Err(error) => tracing::debug!(queue = %self.address, "{}: cannot subscribe: {error}", self.address),
        }
    }

    fn leave(&mut self) {
        self.group().set_leaving(true);
        self.consumer.unsubscribe();
    }

    /// Asks the broker for the missing topic.
    fn fetch_topic(&mut self, now: Instant) {
        if let Mode::Waiting { next_retry, .. } = &mut self.mode {
            *next_retry = now + RETRY_INTERVAL;
        }
        match fetch_topic(self.consumer.client(), &self.url.topic) {
            Ok(topic) => self.found(topic),
            Err(code) if kind(code) == Kind::Denied => self.deny(denied(&self.address, code)),
            Err(code) => match self.group().listener.take() {
                Some(Trouble {
                    kind: Kind::Denied,
                    why,
                }) => self.deny(format!("{}: {why}", self.address)),
                Some(Trouble { why, .. }) => self.outage.down(&why),
                None => self.outage.down(&code.to_string()),
            },
        }
        // Asking may take long, and must not count as a stop of the process.
        self.last_turn = Instant::now();
    }

    /// Handles an answer of the broker.
    fn found(&mut self, topic: Topic) {
        self.outage.up();
        self.group().tracker.set_denied(None);
        match topic {
            Topic::Partitions(n) => {
                self.group().republisher.publisher.learn(n);
                self.join();
            }
            Topic::Missing => {
                if let Mode::Waiting { said_missing, .. } = &mut self.mode
                    && !*said_missing
                {
                    *said_missing = true;
                    tracing::warn!(queue = %self.address, "{}: the topic does not exist (any more); waiting for it", self.address);
                }
            }
        }
    }

    /// Clears a refusal after the broker has answered; a refusal that persists is reported again at
    /// once. Applies only to a member with an assignment: without one, the member may lack the
    /// right to the group, and answers about the topic say nothing about that right.
    fn forgive(&self) {
        let group = self.group();
        if group.is_assigned() && group.tracker.is_denied() {
            group.tracker.set_denied(None);
            group.fetch_anew(&self.consumer);
        }
    }

    fn deny(&self, why: String) {
        tracing::debug!(queue = %self.address, "the broker refuses this worker: {why}");
        self.group().tracker.set_denied(Some(why));
    }

    /// Handles an error of librdkafka, which recovers from most of them by itself.
    fn failed(&mut self, error: &KafkaError) {
        let code = error.rdkafka_error_code().unwrap_or(Code::Unknown);
        if matches!(error, KafkaError::MessageConsumptionFatal(_)) {
            return self.deny(format!("{}: librdkafka gives up: {code}", self.address));
        }
        let is_member = matches!(self.mode, Mode::Member);
        match kind(code) {
            Kind::Denied => {
                let heard = self
                    .group()
                    .listener
                    .take()
                    .filter(|_| matches!(code, Code::SSL | Code::Authentication));
                let why = heard.map_or_else(
                    || denied(&self.address, code),
                    |t| format!("{}: {}", self.address, t.why),
                );
                self.deny(why);
            }
            Kind::NoTopic if is_member => {
                // Offsets of the old topic say nothing about a new topic of the same name.
                self.group().forget_all("its topic was deleted");
                self.leave();
                self.mode = Mode::Waiting {
                    next_retry: Instant::now() + RETRY_INTERVAL / 4,
                    said_missing: false,
                };
            }
            Kind::Away if is_member && code == Code::AllBrokersDown && !self.outage.is_down() => {
                // Idle connections close too, so ask the broker once before reporting an outage.
                if let Err(code) = fetch_topic(self.consumer.client(), &self.url.topic) {
                    let why = self
                        .group()
                        .listener
                        .take()
                        .map_or_else(|| code.to_string(), |trouble| trouble.why);
                    self.outage.down(&why);
                }
                self.last_turn = Instant::now();
            }
            _ => tracing::debug!(queue = %self.address, "{}: {code}", self.address),
        }
    }

    /// Commits finished messages and leaves the group.
    fn close(self) {
        self.group().process_answers();
        self.group().set_leaving(true);
        if !self.outage.is_down() && matches!(self.mode, Mode::Member) {
            self.group().commit(&self.consumer, None, CommitMode::Sync);
        }
    }
}
