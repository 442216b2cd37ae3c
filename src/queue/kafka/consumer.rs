//! The thread that polls Kafka: messages in, dispositions out, the watchdog, and coming back after every kind of absence.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rdkafka::config::FromClientConfigAndContext;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};
use tokio::sync::oneshot;

use super::config;
use super::group::Group;
use super::publisher::{Topic, first_look, look};
use super::trouble::{Kind, Trouble, denied, kind};
use crate::queue::QueueError;
use crate::queue::address::KafkaUrl;
use crate::queue::outage::Outage;
use crate::queue::settings::Resolved;

/// How long one poll waits: answers of the worker wait as long at most.
const POLL_WAIT: Duration = Duration::from_millis(25);
/// How long the next event is waited for where all are wanted: without a wait, one line of librdkafka's log ends a poll.
const EVENT_WAIT: Duration = Duration::from_millis(10);
/// Commits are gathered for so long.
const COMMIT_EVERY: Duration = Duration::from_millis(100);
/// How often an absent topic or broker is asked for.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// The thread itself did not run for so long: the process was stopped, and the worker with it.
const STANDSTILL: Duration = Duration::from_secs(2);
/// Messages that may lie ready before fetching pauses. librdkafka drops what it has fetched of a paused partition and needs about a second
/// to fetch it again, so a pause must be rare even where a worker passes thousands of messages on. Each takes a few kilobytes.
const READY_MAX: usize = 1024;
/// Messages that may wait to be passed on before fetching pauses.
const REPUBLISHING_MAX: usize = 4096;

/// What we are to the group.
enum Mode {
    /// No member: the topic or every broker is absent, asked for again at the instant.
    Waiting {
        next_look: Instant,
        said_missing: bool,
    },
    Member,
    /// No member: the worker had stopped making progress when it had given so many signs of life.
    LetGo {
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

/// Runs until the queue is closed; `opened` is told once whether there is anything to run.
pub(crate) fn run(url: &KafkaUrl, resolved: &Resolved, group: Group, opened: oneshot::Sender<Result<(), QueueError>>) {
    // Nobody waits for an answer where the caller has given up: then the tracker is closed soon.
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
            next_look: now,
            said_missing: false,
        },
        last_commit: now,
        last_turn: now,
        next_check: now,
    };
    let looked = first_look(poller.consumer.client(), url, || {
        // Serves the events that carry errors: the one that tells most may come behind many.
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
        let stood = now - self.last_turn;
        if stood > STANDSTILL {
            self.group().tracker.grant(stood);
        }
        self.last_turn = now;
        self.group().settle();
        if now - self.last_commit >= COMMIT_EVERY {
            self.last_commit = now;
            self.group().commit(&self.consumer, None, CommitMode::Async);
        }
        self.watch(now);
        let group = self.group();
        // Between the two limits it stays as it is: what was paused takes a second to flow again.
        let ready_max = if group.is_paused() { READY_MAX / 2 } else { READY_MAX };
        let full =
            group.tracker.ready() >= ready_max || group.tracker.republishing.load(Ordering::SeqCst) >= REPUBLISHING_MAX;
        group.set_paused(&self.consumer, full);
        let polled = self.consumer.poll(POLL_WAIT);
        // Polling is when partitions come and go.
        let is_member = matches!(self.mode, Mode::Member) && !self.outage.is_down();
        self.group()
            .tracker
            .set_attached(is_member && self.group().is_assigned());
        let trouble = match polled {
            None => None,
            Some(Ok(message)) => {
                self.group().take_in(&message);
                None
            }
            Some(Err(error)) => Some(error),
        };
        if let Some(error) = trouble {
            self.failed(&error);
        }
    }

    /// Lets go of the group, or comes back to it.
    fn watch(&mut self, now: Instant) {
        match self.mode {
            Mode::Member if self.group().tracker.is_stuck(now) => {
                tracing::warn!(
                    "{}: the worker has stopped making progress; leaving the group until it moves on",
                    self.address
                );
                let progress_count = self.group().tracker.progress_count();
                self.group().settle();
                self.group().commit(&self.consumer, None, CommitMode::Async);
                self.group().forget_all("its worker has stopped making progress");
                self.leave();
                self.mode = Mode::LetGo { progress_count };
            }
            Mode::Member if (self.outage.is_down() || self.group().tracker.is_denied()) && now >= self.next_check => {
                self.next_check = now + LOOK_EVERY;
                if look(self.consumer.client(), &self.url.topic).is_ok() {
                    self.outage.up();
                    self.forgive();
                }
            }
            Mode::LetGo { progress_count } if self.group().tracker.progress_count() > progress_count => {
                tracing::info!("{}: the worker moves on; joining the group again", self.address);
                self.join();
            }
            Mode::Waiting { next_look, .. } if now >= next_look => self.look(now),
            _ => {}
        }
    }

    fn join(&mut self) {
        self.group().set_leaving(false);
        match self.consumer.subscribe(&[&self.url.topic]) {
            Ok(()) => self.mode = Mode::Member,
            Err(error) => tracing::debug!("{}: cannot subscribe: {error}", self.address),
        }
    }

    fn leave(&mut self) {
        self.group().set_leaving(true);
        self.consumer.unsubscribe();
    }

    /// Asks for the topic that was not there.
    fn look(&mut self, now: Instant) {
        if let Mode::Waiting { next_look, .. } = &mut self.mode {
            *next_look = now + LOOK_EVERY;
        }
        match look(self.consumer.client(), &self.url.topic) {
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
        // Asking may take long: that is no standstill of the process.
        self.last_turn = Instant::now();
    }

    /// A broker answered.
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
                    tracing::warn!("{}: the topic does not exist (any more); waiting for it", self.address);
                }
            }
        }
    }

    /// A broker answered a member: a refusal may have passed. One that lasts is met again at once. Who has no assignment
    /// may lack the right to the group, which no answer about the topic shows: an assignment will.
    fn forgive(&self) {
        let group = self.group();
        if group.is_assigned() && group.tracker.is_denied() {
            group.tracker.set_denied(None);
            group.fetch_anew(&self.consumer);
        }
    }

    fn deny(&self, why: String) {
        tracing::debug!("refused: {why}");
        self.group().tracker.set_denied(Some(why));
    }

    /// librdkafka reported an error: most it deals with by itself.
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
                // What is known of the old topic says nothing about a new one of its name.
                self.group().forget_all("its topic was deleted");
                self.leave();
                self.mode = Mode::Waiting {
                    next_look: Instant::now() + LOOK_EVERY / 4,
                    said_missing: false,
                };
            }
            Kind::Away if is_member && code == Code::AllBrokersDown && !self.outage.is_down() => {
                // Idle connections close too: one question tells.
                if let Err(code) = look(self.consumer.client(), &self.url.topic) {
                    let why = self
                        .group()
                        .listener
                        .take()
                        .map_or_else(|| code.to_string(), |trouble| trouble.why);
                    self.outage.down(&why);
                }
                self.last_turn = Instant::now();
            }
            _ => tracing::debug!("{}: {code}", self.address),
        }
    }

    /// Says what is finished, and leaves the group.
    fn close(self) {
        self.group().settle();
        self.group().set_leaving(true);
        if !self.outage.is_down() && matches!(self.mode, Mode::Member) {
            self.group().commit(&self.consumer, None, CommitMode::Sync);
        }
    }
}
