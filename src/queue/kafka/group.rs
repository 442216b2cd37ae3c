//! Our membership in the consumer group: assigned partitions, their offsets to commit, and
//! rebalances. librdkafka calls the callbacks here from within `poll`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rdkafka::config::RDKafkaLogLevel;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer, ConsumerContext, Rebalance};
use rdkafka::error::{KafkaError, KafkaResult};
use rdkafka::message::{BorrowedMessage, Headers};
use rdkafka::{ClientContext, Message as _, Offset, TopicPartitionList};
use tokio::sync::mpsc::UnboundedReceiver;

use super::config;
use super::offsets::Offsets;
use super::publisher::Republisher;
use super::trouble::ErrorListener;
use crate::queue::address::KafkaUrl;
use crate::queue::delivery_tracker::{DeliveryTracker, Disposition, ReceivedMessage, Republish};
use crate::queue::foreign::{self, HOPS_HEADER, Handling};
use crate::queue::settings::Resolved;
use crate::signing::Signing;

/// Maximum time for which a rebalance waits while the worker lets go of revoked partitions. A third
/// of the session timeout is a bound too.
const REVOKE_WAIT_MAX: Duration = Duration::from_secs(5);
const REVOKE_STEP: Duration = Duration::from_millis(20);

/// Partition and offset of a delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MessagePosition {
    pub partition: i32,
    pub offset: i64,
    /// Number of this assignment of the partition to us. A recreated log gets a new number too.
    epoch: u64,
}

struct AssignedPartition {
    epoch: u64,
    offsets: Offsets,
    /// Whether the partition is being revoked: its messages are no longer delivered here.
    going: bool,
}

#[derive(Default)]
struct Assignment {
    partitions: BTreeMap<i32, AssignedPartition>,
    next_epoch: u64,
    /// Whether fetching is paused because enough messages are in memory.
    paused: bool,
    /// Whether we leave on our own initiative: a revocation then waits for no worker.
    leaving: bool,
    /// Whether the group has given us an assignment, which may be empty.
    assigned: bool,
}

impl Assignment {
    fn is_current(&self, place: MessagePosition) -> bool {
        self.partitions
            .get(&place.partition)
            .is_some_and(|owned| owned.epoch == place.epoch)
    }

    /// Whether a message that is given back may be delivered again by this process.
    fn is_kept(&self, place: MessagePosition) -> bool {
        self.is_current(place) && self.partitions.get(&place.partition).is_some_and(|owned| !owned.going)
    }

    /// Records a message. Returns its position and, if the partition's log was recreated or is read
    /// again, the epoch of the deliveries that became stale.
    fn delivered(&mut self, partition: i32, offset: i64) -> (MessagePosition, Option<u64>) {
        let next_epoch = &mut self.next_epoch;
        let owned = self.partitions.entry(partition).or_insert_with(|| {
            *next_epoch += 1;
            AssignedPartition {
                epoch: *next_epoch,
                offsets: Offsets::default(),
                going: false,
            }
        });
        let mut stale = None;
        if !owned.offsets.delivered(offset) {
            stale = Some(owned.epoch);
            *next_epoch += 1;
            owned.epoch = *next_epoch;
        }
        let epoch = owned.epoch;
        (
            MessagePosition {
                partition,
                offset,
                epoch,
            },
            stale,
        )
    }
}

/// The consumer's context, whose callbacks librdkafka calls.
pub(crate) struct Group {
    pub listener: ErrorListener,
    pub tracker: Arc<DeliveryTracker<MessagePosition>>,
    pub republisher: Republisher,
    topic: String,
    address: String,
    assignment: Arc<Mutex<Assignment>>,
    dispositions: Mutex<UnboundedReceiver<Disposition<MessagePosition>>>,
    revoke_wait: Duration,
    signing: Signing,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every change is a single step, so the state is consistent even after a panic under the lock.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Group {
    pub(super) fn new(
        url: &KafkaUrl,
        resolved: &Resolved,
        tracker: Arc<DeliveryTracker<MessagePosition>>,
        dispositions: UnboundedReceiver<Disposition<MessagePosition>>,
        republisher: Republisher,
    ) -> Group {
        let session = config::consumer(url, resolved).map_or(0, |config| config::session_timeout_ms(&config));
        Group {
            listener: ErrorListener::new(resolved.scrub.clone()),
            tracker,
            republisher,
            topic: url.topic.clone(),
            address: url.to_string(),
            assignment: Arc::default(),
            dispositions: Mutex::new(dispositions),
            revoke_wait: REVOKE_WAIT_MAX.min(Duration::from_millis(session / 3)),
            signing: resolved.signing.clone(),
        }
    }

    /// Handles a polled message.
    pub(super) fn handle_message(&self, message: &BorrowedMessage<'_>) {
        // A consumer that gets messages has access (again).
        self.tracker.set_denied(None);
        let (place, stale) = locked(&self.assignment).delivered(message.partition(), message.offset());
        if let Some(epoch) = stale {
            self.recall_and_forget("its topic was made anew or is read again", |owned| owned.epoch == epoch);
        }
        let hops = message.headers().and_then(|headers| {
            let mut found = headers.iter().filter(|header| header.key == HOPS_HEADER);
            found.next().map(|header| foreign::hops(header.value))
        });
        let (hops, body) = (hops.unwrap_or(0), message.payload().unwrap_or_default());
        let position = format!("{} partition {} offset {}", self.address, place.partition, place.offset);
        match foreign::classify(body, hops, &position, &self.signing) {
            Handling::Deliver(message) => self.tracker.put(ReceivedMessage {
                token: place,
                message,
                body: body.to_vec(),
                deliveries: 1,
                hops,
                arrived: Instant::now(),
            }),
            Handling::PassOn(hops) => self.republish_later(Republish {
                token: place,
                body: body.to_vec(),
                hops,
            }),
            Handling::Drop => self.done(place),
        }
    }

    fn done(&self, place: MessagePosition) {
        done(&mut locked(&self.assignment), place);
    }

    /// Recalls deliveries without waiting for the worker, and forgets them.
    fn recall_and_forget(&self, why: &'static str, which: impl Fn(&MessagePosition) -> bool) {
        self.tracker.recall(why, |item| which(&item.token));
        self.tracker.forget(which);
    }

    /// Drops all partitions with their offsets and deliveries.
    pub(super) fn forget_all(&self, why: &'static str) {
        locked(&self.assignment).partitions.clear();
        self.recall_and_forget(why, |_| true);
    }

    pub(super) fn set_leaving(&self, leaving: bool) {
        let mut assignment = locked(&self.assignment);
        assignment.leaving = leaving;
        assignment.assigned = false;
    }

    pub(super) fn is_assigned(&self) -> bool {
        locked(&self.assignment).assigned
    }

    /// Handles the worker's answers.
    pub(super) fn process_answers(&self) {
        let mut dispositions = locked(&self.dispositions);
        while let Ok(answer) = dispositions.try_recv() {
            match answer {
                Disposition::Acknowledge(place) => self.done(place),
                Disposition::GiveBack(item) => {
                    if locked(&self.assignment).is_kept(item.token) {
                        self.tracker.put(item);
                    }
                }
                Disposition::Republish(republish) => self.republish_later(republish),
            }
        }
    }

    fn republish_later(&self, republish: Republish<MessagePosition>) {
        let Republish { token, body, hops } = republish;
        self.tracker.republishing.fetch_add(1, Ordering::SeqCst);
        let (assignment, finished, tracker) = (self.assignment.clone(), self.assignment.clone(), self.tracker.clone());
        self.republisher.republish_later(
            body,
            hops,
            move || !locked(&assignment).is_current(token),
            move |sent| {
                tracker.republishing.fetch_sub(1, Ordering::SeqCst);
                if sent {
                    done(&mut locked(&finished), token);
                }
            },
        );
    }

    /// Commits finished offsets that are not committed yet: of the partitions in `of`, or of all. A
    /// synchronous commit is the last one of its partitions, so it repeats positions that may still
    /// be in flight.
    pub(super) fn commit(&self, consumer: &BaseConsumer<Group>, of: Option<&BTreeSet<i32>>, mode: CommitMode) {
        let mut list = TopicPartitionList::new();
        for (&partition, owned) in &mut locked(&self.assignment).partitions {
            if of.is_some_and(|of| !of.contains(&partition)) {
                continue;
            }
            let position = match mode {
                CommitMode::Async => owned.offsets.take_due(),
                CommitMode::Sync => owned.offsets.take_last(),
            };
            if let Some(position) = position
                && let Err(error) = list.add_partition_offset(&self.topic, partition, Offset::Offset(position))
            {
                tracing::debug!(queue = %self.address, "cannot name partition {partition}: {error}");
            }
        }
        if list.count() > 0
            && let Err(error) = consumer.commit(&list, mode)
        {
            self.commit_failed(&error, &list);
        }
    }

    fn commit_failed(&self, error: &KafkaError, list: &TopicPartitionList) {
        // The next commit retries, as long as the partition is ours.
        tracing::debug!(queue = %self.address, "a commit to {} failed: {error}", self.address);
        let mut assignment = locked(&self.assignment);
        for element in list.elements() {
            if let Some(owned) = assignment.partitions.get_mut(&element.partition()) {
                owned.offsets.commit_failed();
            }
        }
    }

    pub(super) fn is_paused(&self) -> bool {
        locked(&self.assignment).paused
    }

    /// Pauses or resumes fetching; does nothing if the state is already the desired one.
    pub(super) fn set_paused(&self, consumer: &BaseConsumer<Group>, paused: bool) {
        if locked(&self.assignment).paused == paused {
            return;
        }
        let assigned = match consumer.assignment() {
            Ok(assigned) => assigned,
            Err(error) => return tracing::debug!(queue = %self.address, "no assignment to pause: {error}"),
        };
        let changed = if paused {
            consumer.pause(&assigned)
        } else {
            consumer.resume(&assigned)
        };
        match changed {
            Ok(()) => locked(&self.assignment).paused = paused,
            Err(error) => tracing::debug!(queue = %self.address, "cannot pause or resume: {error}"),
        }
    }

    /// Restarts fetching: without a restart, librdkafka does not report a persistent refusal again.
    pub(super) fn fetch_anew(&self, consumer: &BaseConsumer<Group>) {
        let paused = locked(&self.assignment).paused;
        // Paused partitions are fetched anew when they resume.
        if !paused {
            self.set_paused(consumer, true);
            self.set_paused(consumer, false);
        }
    }

    /// Handles a revocation: commits the finished offsets of the partitions, then drops them.
    fn revoked(&self, consumer: &BaseConsumer<Group>, partitions: &BTreeSet<i32>) {
        let ours = |place: &MessagePosition| partitions.contains(&place.partition);
        let lost = consumer.assignment_lost();
        let leaving = locked(&self.assignment).leaving;
        let why = if lost {
            "its partition was lost to another worker"
        } else {
            "its partition goes to another worker"
        };
        // While deliveries are recalled, further messages of these partitions are held back: their
        // acknowledgements would come too late, and another worker would repeat the work. The ready
        // messages removed here are unacknowledged, so the next owner of the partition gets them.
        for (partition, owned) in &mut locked(&self.assignment).partitions {
            owned.going |= partitions.contains(partition);
        }
        self.tracker.take_ready(|item| ours(&item.token));
        let mut recalling = self.tracker.recall(why, |item| ours(&item.token));
        // Lost partitions, or our own leaving, leave nothing to wait for.
        let wait = if lost || leaving {
            Duration::ZERO
        } else {
            self.revoke_wait
        };
        let deadline = Instant::now() + wait;
        while !recalling.has_ended(&self.tracker) && Instant::now() < deadline {
            self.process_answers();
            self.commit(consumer, Some(partitions), CommitMode::Async);
            std::thread::sleep(REVOKE_STEP);
        }
        if !lost {
            self.process_answers();
            self.commit(consumer, Some(partitions), CommitMode::Sync);
        }
        self.tracker.forget(ours);
        locked(&self.assignment)
            .partitions
            .retain(|partition, _| !partitions.contains(partition));
    }
}

fn done(assignment: &mut Assignment, place: MessagePosition) {
    if assignment.is_current(place)
        && let Some(owned) = assignment.partitions.get_mut(&place.partition)
    {
        owned.offsets.acknowledged(place.offset);
    }
}

fn numbers(list: &TopicPartitionList) -> BTreeSet<i32> {
    list.elements().iter().map(|element| element.partition()).collect()
}

impl ClientContext for Group {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, line: &str) {
        self.listener.log(level, facility, line);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        self.listener.error(error, reason);
    }
}

impl ConsumerContext for Group {
    fn pre_rebalance(&self, consumer: &BaseConsumer<Self>, rebalance: &Rebalance<'_>) {
        if let Rebalance::Revoke(list) = rebalance {
            let partitions = numbers(list);
            tracing::debug!(queue = %self.address, "{}: gives up partitions {partitions:?}", self.address);
            // A member that stays in the group gets its remaining assignment right after this.
            locked(&self.assignment).assigned = false;
            self.revoked(consumer, &partitions);
        }
    }

    fn post_rebalance(&self, consumer: &BaseConsumer<Self>, rebalance: &Rebalance<'_>) {
        match rebalance {
            Rebalance::Assign(list) => {
                tracing::debug!(queue = %self.address, "{}: gets partitions {:?}", self.address, numbers(list));
                self.tracker.set_denied(None);
                locked(&self.assignment).assigned = true;
                // librdkafka keeps the pause state of partitions across a rebalance, so it is set
                // explicitly.
                let changed = if locked(&self.assignment).paused {
                    consumer.pause(list)
                } else {
                    consumer.resume(list)
                };
                if let Err(error) = changed {
                    tracing::debug!(queue = %self.address, "cannot pause or resume: {error}");
                }
            }
            Rebalance::Revoke(_) => {}
            Rebalance::Error(error) => {
                tracing::debug!(queue = %self.address, "{}: rebalance failed: {error}", self.address)
            }
        }
    }

    fn commit_callback(&self, result: KafkaResult<()>, list: &TopicPartitionList) {
        if let Err(error) = result {
            self.commit_failed(&error, list);
        }
    }
}
