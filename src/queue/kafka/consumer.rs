//! The thread that polls Kafka: it receives messages, handles the worker's dispositions, watches
//! the worker's progress, and reconnects after every kind of outage.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rdkafka::config::FromClientConfigAndContext;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};
use tokio::sync::oneshot;

use super::config;
use super::group::Group;
use super::publisher::{Topic, fetch_topic, wait_for_metadata};
use super::trouble::{ErrorClass, ReportedError, denied_message, error_class};
use crate::queue::QueueError;
use crate::queue::address::KafkaUrl;
use crate::queue::outage::Outage;
use crate::queue::settings::ResolvedSettings;

/// Timeout of one poll, and so the maximum delay of the worker's dispositions.
const POLL_WAIT: Duration = Duration::from_millis(25);
/// Timeout of a poll that drains all queued events. With 0, a single log event of librdkafka would
/// end the draining.
const EVENT_WAIT: Duration = Duration::from_millis(10);
/// Interval between commits.
const COMMIT_INTERVAL: Duration = Duration::from_millis(100);
/// Interval between checks for a missing topic or an absent broker.
const RETRY_INTERVAL: Duration = Duration::from_secs(2);
/// A longer gap between two polls means that the whole process was stopped, the worker included.
const STALL_MIN: Duration = Duration::from_secs(2);
/// Number of ready messages at which fetching pauses; a message takes a few kilobytes. Pauses must
/// be rare, even if a worker passes thousands of messages on: librdkafka drops the fetched messages
/// of a paused partition and needs about a second to fetch them again.
const READY_MAX: usize = 1024;
/// Number of messages waiting to be passed on at which fetching pauses.
const REPUBLISHING_MAX: usize = 4096;

/// The thread's membership in the consumer group.
enum Membership {
    /// Not a member: the topic is missing or no broker answers. Both are checked again at
    /// `next_retry`.
    Waiting {
        next_retry: Instant,
        has_warned_missing: bool,
    },
    Member,
    /// Not a member: the worker had stopped making progress at this `progress_count`. The thread
    /// rejoins when the count is higher.
    LeftGroup {
        progress_count: u64,
    },
}

struct PollThread<'a> {
    url: &'a KafkaUrl,
    address: String,
    consumer: BaseConsumer<Group>,
    outage: Outage,
    membership: Membership,
    last_commit: Instant,
    last_poll: Instant,
    next_check: Instant,
}

/// Runs until the queue is closed. `opened` gets the result of opening, once.
pub(crate) fn run(
    url: &KafkaUrl,
    resolved: &ResolvedSettings,
    group: Group,
    opened: oneshot::Sender<Result<(), QueueError>>,
) {
    // A send to `opened` fails only if the caller has given up, and then the tracker is closed
    // soon.
    match open(url, resolved, group) {
        Err(error) => {
            let _ = opened.send(Err(error));
        }
        Ok(mut poller) => {
            if opened.send(Ok(())).is_ok() {
                while !poller.group().tracker.is_closing() {
                    poller.poll_once();
                }
            }
            poller.close();
        }
    }
}

fn open<'a>(url: &'a KafkaUrl, resolved: &ResolvedSettings, group: Group) -> Result<PollThread<'a>, QueueError> {
    let consumer = BaseConsumer::from_config_and_context(&config::consumer(url, resolved)?, group)
        .map_err(|error| config::property_error(error, resolved))?;
    let now = Instant::now();
    let mut poller = PollThread {
        url,
        address: url.to_string(),
        consumer,
        outage: Outage::new(url),
        membership: Membership::Waiting {
            next_retry: now,
            has_warned_missing: false,
        },
        last_commit: now,
        last_poll: now,
        next_check: now,
    };
    let result = wait_for_metadata(poller.consumer.client(), url, || {
        // Polling serves the events that carry errors. The most specific error may be queued behind
        // many others.
        while poller.consumer.poll(EVENT_WAIT).is_some() {}
        poller.group().listener.take()
    });
    match result {
        Ok(topic) => poller.handle_topic(topic),
        Err(QueueError::Unavailable { why } | QueueError::UnknownHost { why }) => poller.outage.report_down(&why),
        Err(error) => return Err(error),
    }
    poller.last_poll = Instant::now();
    Ok(poller)
}

impl PollThread<'_> {
    fn group(&self) -> &Group {
        self.consumer.context()
    }

    /// One round of the thread: dispositions, commits, membership, and one poll.
    fn poll_once(&mut self) {
        let now = Instant::now();
        let gap = now - self.last_poll;
        if gap > STALL_MIN {
            self.group().tracker.extend_leases(gap);
        }
        self.last_poll = now;
        self.group().process_dispositions();
        if now - self.last_commit >= COMMIT_INTERVAL {
            self.last_commit = now;
            self.group().commit(&self.consumer, None, CommitMode::Async);
        }
        self.update_membership(now);
        let group = self.group();
        // Hysteresis: a paused partition takes a second to deliver again, so it resumes only at
        // half the limit.
        let ready_max = if group.is_paused() { READY_MAX / 2 } else { READY_MAX };
        let is_full = group.tracker.ready_count() >= ready_max
            || group.tracker.republishing.load(Ordering::SeqCst) >= REPUBLISHING_MAX;
        group.set_paused(&self.consumer, is_full);
        let polled = self.consumer.poll(POLL_WAIT);
        // Assignments change only within `poll`, so this check follows it.
        let is_member = matches!(self.membership, Membership::Member) && !self.outage.is_down();
        self.group()
            .tracker
            .set_attached(is_member && self.group().is_assigned());
        let reported_error = match polled {
            None => None,
            Some(Ok(message)) => {
                self.group().handle_message(&message);
                None
            }
            Some(Err(error)) => Some(error),
        };
        if let Some(error) = reported_error {
            self.handle_error(&error);
        }
    }

    /// Leaves the group or rejoins it, and checks whether an absent broker is back.
    fn update_membership(&mut self, now: Instant) {
        match self.membership {
            Membership::Member if self.group().tracker.is_stuck(now) => {
                tracing::warn!(
                    queue = %self.address,
                    "{}: the worker has stopped making progress; leaving the consumer group until it makes progress again",
                    self.address
                );
                let progress_count = self.group().tracker.progress_count();
                self.group().process_dispositions();
                self.group().commit(&self.consumer, None, CommitMode::Async);
                self.group().forget_all("its worker has stopped making progress");
                self.leave();
                self.membership = Membership::LeftGroup { progress_count };
            }
            Membership::Member
                if (self.outage.is_down() || self.group().tracker.is_denied()) && now >= self.next_check =>
            {
                self.next_check = now + RETRY_INTERVAL;
                if fetch_topic(self.consumer.client(), &self.url.topic).is_ok() {
                    self.outage.report_up();
                    self.clear_denied();
                }
            }
            Membership::LeftGroup { progress_count } if self.group().tracker.progress_count() > progress_count => {
                tracing::info!(
                    queue = %self.address,
                    "{}: the worker makes progress again; rejoining the consumer group",
                    self.address
                );
                self.join();
            }
            Membership::Waiting { next_retry, .. } if now >= next_retry => self.fetch_topic(now),
            _ => {}
        }
    }

    fn join(&mut self) {
        self.group().set_leaving(false);
        match self.consumer.subscribe(&[&self.url.topic]) {
            Ok(()) => self.membership = Membership::Member,
            Err(error) => tracing::debug!(queue = %self.address, "{}: cannot subscribe: {error}", self.address),
        }
    }

    fn leave(&mut self) {
        self.group().set_leaving(true);
        self.consumer.unsubscribe();
    }

    /// Requests the metadata of the missing topic, and joins the group if the topic exists.
    fn fetch_topic(&mut self, now: Instant) {
        if let Membership::Waiting { next_retry, .. } = &mut self.membership {
            *next_retry = now + RETRY_INTERVAL;
        }
        match fetch_topic(self.consumer.client(), &self.url.topic) {
            Ok(topic) => self.handle_topic(topic),
            Err(code) if error_class(code) == ErrorClass::Denied => {
                self.report_denied(denied_message(&self.address, code))
            }
            Err(code) => match self.group().listener.take() {
                Some(ReportedError {
                    class: ErrorClass::Denied,
                    why,
                }) => self.report_denied(format!("{}: {why}", self.address)),
                Some(ReportedError { why, .. }) => self.outage.report_down(&why),
                None => self.outage.report_down(&code.to_string()),
            },
        }
        // A long request must not count as a stop of the process.
        self.last_poll = Instant::now();
    }

    /// Handles the topic's metadata.
    fn handle_topic(&mut self, topic: Topic) {
        self.outage.report_up();
        self.group().tracker.set_denied(None);
        match topic {
            Topic::Partitions(n) => {
                self.group().republisher.publisher.set_partitions(n);
                self.join();
            }
            Topic::Missing => {
                if let Membership::Waiting { has_warned_missing, .. } = &mut self.membership
                    && !*has_warned_missing
                {
                    *has_warned_missing = true;
                    tracing::warn!(queue = %self.address, "{}: the topic does not exist (any more); waiting for it", self.address);
                }
            }
        }
    }

    /// Clears a refusal after the broker has answered; a refusal that persists is reported again at
    /// once. Applies only to a member with an assignment: a member without one may lack the right
    /// to the group, and metadata of the topic does not show that right.
    fn clear_denied(&self) {
        let group = self.group();
        if group.is_assigned() && group.tracker.is_denied() {
            group.tracker.set_denied(None);
            group.restart_fetching(&self.consumer);
        }
    }

    fn report_denied(&self, why: String) {
        tracing::debug!(queue = %self.address, "the broker refuses this worker: {why}");
        self.group().tracker.set_denied(Some(why));
    }

    /// Handles an error of librdkafka, which recovers from most of them by itself.
    fn handle_error(&mut self, error: &KafkaError) {
        let code = error.rdkafka_error_code().unwrap_or(Code::Unknown);
        if matches!(error, KafkaError::MessageConsumptionFatal(_)) {
            return self.report_denied(format!("{}: librdkafka gives up: {code}", self.address));
        }
        let is_member = matches!(self.membership, Membership::Member);
        match error_class(code) {
            ErrorClass::Denied => {
                let reported = self
                    .group()
                    .listener
                    .take()
                    .filter(|_| matches!(code, Code::SSL | Code::Authentication));
                let why = reported.map_or_else(
                    || denied_message(&self.address, code),
                    |t| format!("{}: {}", self.address, t.why),
                );
                self.report_denied(why);
            }
            ErrorClass::NoTopic if is_member => {
                // Offsets of the old topic are meaningless in a new topic of the same name.
                self.group().forget_all("its topic was deleted");
                self.leave();
                self.membership = Membership::Waiting {
                    next_retry: Instant::now() + RETRY_INTERVAL / 4,
                    has_warned_missing: false,
                };
            }
            ErrorClass::Unavailable if is_member && code == Code::AllBrokersDown && !self.outage.is_down() => {
                // Idle connections close too, so send one request before reporting an outage.
                if let Err(code) = fetch_topic(self.consumer.client(), &self.url.topic) {
                    let why = self
                        .group()
                        .listener
                        .take()
                        .map_or_else(|| code.to_string(), |reported_error| reported_error.why);
                    self.outage.report_down(&why);
                }
                self.last_poll = Instant::now();
            }
            _ => tracing::debug!(queue = %self.address, "{}: {code}", self.address),
        }
    }

    /// Commits finished messages and leaves the group.
    fn close(self) {
        self.group().process_dispositions();
        self.group().set_leaving(true);
        if !self.outage.is_down() && matches!(self.membership, Membership::Member) {
            self.group().commit(&self.consumer, None, CommitMode::Sync);
        }
    }
}
