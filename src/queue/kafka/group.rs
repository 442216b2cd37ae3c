//! This consumer's membership in the consumer group: assigned partitions, their offsets to commit,
//! and rebalances. librdkafka calls the callbacks here from within `poll`.

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
use crate::queue::settings::ResolvedSettings;
use crate::signing::Signing;

/// Maximum time for which a rebalance waits until the worker has ended its work on revoked
/// partitions. It also waits for at most a third of the session timeout.
const REVOKE_WAIT_MAX: Duration = Duration::from_secs(5);
const REVOKE_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Partition and offset of a delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MessagePosition {
    pub partition: i32,
    pub offset: i64,
    /// Number of this assignment of the partition to this consumer. A recreated log also gets a new
    /// number.
    epoch: u64,
}

struct AssignedPartition {
    epoch: u64,
    offsets: Offsets,
    /// Whether the partition is being revoked: its messages are no longer delivered here.
    is_revoking: bool,
}

#[derive(Default)]
struct Assignment {
    partitions: BTreeMap<i32, AssignedPartition>,
    next_epoch: u64,
    /// Whether fetching is paused because enough messages are in memory.
    is_paused: bool,
    /// Whether this consumer leaves by itself: a revocation then does not wait for the worker.
    is_leaving: bool,
    /// Whether the group has given this consumer an assignment, which may be empty.
    has_assignment: bool,
}

impl Assignment {
    fn is_current(&self, position: MessagePosition) -> bool {
        self.partitions
            .get(&position.partition)
            .is_some_and(|owned| owned.epoch == position.epoch)
    }

    /// Whether a message that is given back may be delivered again by this process.
    fn is_kept(&self, position: MessagePosition) -> bool {
        self.is_current(position)
            && self
                .partitions
                .get(&position.partition)
                .is_some_and(|owned| !owned.is_revoking)
    }

    /// Records a message. Returns its position and, if the partition's log was recreated or is read
    /// again, the epoch of the deliveries that became stale.
    fn record_delivery(&mut self, partition: i32, offset: i64) -> (MessagePosition, Option<u64>) {
        let next_epoch = &mut self.next_epoch;
        let owned = self.partitions.entry(partition).or_insert_with(|| {
            *next_epoch += 1;
            AssignedPartition {
                epoch: *next_epoch,
                offsets: Offsets::default(),
                is_revoking: false,
            }
        });
        let mut stale = None;
        if !owned.offsets.record_delivery(offset) {
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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every change is a single step, so the state is consistent even after a panic under the lock.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Group {
    pub(super) fn new(
        url: &KafkaUrl,
        resolved: &ResolvedSettings,
        tracker: Arc<DeliveryTracker<MessagePosition>>,
        dispositions: UnboundedReceiver<Disposition<MessagePosition>>,
        republisher: Republisher,
    ) -> Group {
        let session_timeout_ms =
            config::consumer(url, resolved).map_or(0, |config| config::session_timeout_ms(&config));
        Group {
            listener: ErrorListener::new(resolved.scrub.clone()),
            tracker,
            republisher,
            topic: url.topic.clone(),
            address: url.to_string(),
            assignment: Arc::default(),
            dispositions: Mutex::new(dispositions),
            revoke_wait: REVOKE_WAIT_MAX.min(Duration::from_millis(session_timeout_ms / 3)),
            signing: resolved.signing.clone(),
        }
    }

    /// Handles a polled message.
    pub(super) fn handle_message(&self, message: &BorrowedMessage<'_>) {
        // A consumer that gets messages has access.
        self.tracker.set_denied(None);
        let (position, stale) = lock(&self.assignment).record_delivery(message.partition(), message.offset());
        if let Some(epoch) = stale {
            self.recall_and_forget("its topic was made anew or is read again", |owned| owned.epoch == epoch);
        }
        let hops = message.headers().and_then(|headers| {
            let mut found = headers.iter().filter(|header| header.key == HOPS_HEADER);
            found.next().map(|header| foreign::parse_hops(header.value))
        });
        let (hops, body) = (hops.unwrap_or(0), message.payload().unwrap_or_default());
        let source = format!(
            "{} partition {} offset {}",
            self.address, position.partition, position.offset
        );
        match foreign::classify(body, hops, &source, &self.signing) {
            Handling::Deliver(message) => self.tracker.push_ready(ReceivedMessage {
                token: position,
                message,
                body: body.to_vec(),
                deliveries: 1,
                hops,
                arrived: Instant::now(),
            }),
            Handling::PassOn(hops) => self.republish_later(Republish {
                token: position,
                body: body.to_vec(),
                hops,
            }),
            Handling::Drop => self.acknowledge(position),
        }
    }

    fn acknowledge(&self, position: MessagePosition) {
        acknowledge(&mut lock(&self.assignment), position);
    }

    /// Recalls deliveries without waiting for the worker, and forgets them.
    fn recall_and_forget(&self, why: &'static str, which: impl Fn(&MessagePosition) -> bool) {
        self.tracker.recall(why, |item| which(&item.token));
        self.tracker.forget(which);
    }

    /// Drops all partitions with their offsets and deliveries.
    pub(super) fn forget_all(&self, why: &'static str) {
        lock(&self.assignment).partitions.clear();
        self.recall_and_forget(why, |_| true);
    }

    pub(super) fn set_leaving(&self, leaving: bool) {
        let mut assignment = lock(&self.assignment);
        assignment.is_leaving = leaving;
        assignment.has_assignment = false;
    }

    pub(super) fn is_assigned(&self) -> bool {
        lock(&self.assignment).has_assignment
    }

    /// Handles the worker's dispositions.
    pub(super) fn process_dispositions(&self) {
        let mut dispositions = lock(&self.dispositions);
        while let Ok(disposition) = dispositions.try_recv() {
            match disposition {
                Disposition::Acknowledge(position) => self.acknowledge(position),
                Disposition::GiveBack(item) => {
                    if lock(&self.assignment).is_kept(item.token) {
                        self.tracker.push_ready(item);
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
            move || !lock(&assignment).is_current(token),
            move |sent| {
                tracker.republishing.fetch_sub(1, Ordering::SeqCst);
                if sent {
                    acknowledge(&mut lock(&finished), token);
                }
            },
        );
    }

    /// Commits finished offsets that are not committed yet, of all partitions or of those in
    /// `only`. A synchronous commit is the last commit of its partitions, so it repeats positions
    /// that may still be in flight.
    pub(super) fn commit(&self, consumer: &BaseConsumer<Group>, only: Option<&BTreeSet<i32>>, mode: CommitMode) {
        let mut list = TopicPartitionList::new();
        for (&partition, owned) in &mut lock(&self.assignment).partitions {
            if only.is_some_and(|only| !only.contains(&partition)) {
                continue;
            }
            let position = match mode {
                CommitMode::Async => owned.offsets.take_changed_position(),
                CommitMode::Sync => owned.offsets.take_final_position(),
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
        // The next commit retries, as long as the partition is assigned to this consumer.
        tracing::debug!(queue = %self.address, "a commit to {} failed: {error}", self.address);
        let mut assignment = lock(&self.assignment);
        for element in list.elements() {
            if let Some(owned) = assignment.partitions.get_mut(&element.partition()) {
                owned.offsets.mark_commit_failed();
            }
        }
    }

    pub(super) fn is_paused(&self) -> bool {
        lock(&self.assignment).is_paused
    }

    /// Pauses or resumes fetching, if that changes the state.
    pub(super) fn set_paused(&self, consumer: &BaseConsumer<Group>, paused: bool) {
        if lock(&self.assignment).is_paused == paused {
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
            Ok(()) => lock(&self.assignment).is_paused = paused,
            Err(error) => tracing::debug!(queue = %self.address, "cannot pause or resume: {error}"),
        }
    }

    /// Restarts fetching: only then does librdkafka report a persistent refusal again.
    pub(super) fn restart_fetching(&self, consumer: &BaseConsumer<Group>) {
        let paused = lock(&self.assignment).is_paused;
        // Fetching of paused partitions restarts when they are resumed.
        if !paused {
            self.set_paused(consumer, true);
            self.set_paused(consumer, false);
        }
    }

    /// Handles a revocation: commits the finished offsets of the partitions, then drops them.
    fn handle_revocation(&self, consumer: &BaseConsumer<Group>, partitions: &BTreeSet<i32>) {
        let is_revoked = |position: &MessagePosition| partitions.contains(&position.partition);
        let is_lost = consumer.assignment_lost();
        let leaving = lock(&self.assignment).is_leaving;
        let why = if is_lost {
            "its partition was lost to another worker"
        } else {
            "its partition goes to another worker"
        };
        // While deliveries are recalled, further messages of these partitions are not delivered:
        // their acknowledgements would come too late, and another worker would repeat the work. The
        // ready messages removed here are unacknowledged, so the next owner of the partition gets
        // them.
        for (partition, owned) in &mut lock(&self.assignment).partitions {
            owned.is_revoking |= partitions.contains(partition);
        }
        self.tracker.take_ready(|item| is_revoked(&item.token));
        let mut recalling = self.tracker.recall(why, |item| is_revoked(&item.token));
        // If the partitions are lost or this consumer leaves by itself, waiting is of no use.
        let wait = if is_lost || leaving {
            Duration::ZERO
        } else {
            self.revoke_wait
        };
        let deadline = Instant::now() + wait;
        while !recalling.has_ended(&self.tracker) && Instant::now() < deadline {
            self.process_dispositions();
            self.commit(consumer, Some(partitions), CommitMode::Async);
            std::thread::sleep(REVOKE_POLL_INTERVAL);
        }
        if !is_lost {
            self.process_dispositions();
            self.commit(consumer, Some(partitions), CommitMode::Sync);
        }
        self.tracker.forget(is_revoked);
        lock(&self.assignment)
            .partitions
            .retain(|partition, _| !partitions.contains(partition));
    }
}

fn acknowledge(assignment: &mut Assignment, position: MessagePosition) {
    if assignment.is_current(position)
        && let Some(owned) = assignment.partitions.get_mut(&position.partition)
    {
        owned.offsets.acknowledge(position.offset);
    }
}

fn partition_numbers(list: &TopicPartitionList) -> BTreeSet<i32> {
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
            let partitions = partition_numbers(list);
            tracing::debug!(queue = %self.address, "{}: gives up partitions {partitions:?}", self.address);
            // A member that stays in the group gets its remaining assignment in the next callback.
            lock(&self.assignment).has_assignment = false;
            self.handle_revocation(consumer, &partitions);
        }
    }

    fn post_rebalance(&self, consumer: &BaseConsumer<Self>, rebalance: &Rebalance<'_>) {
        match rebalance {
            Rebalance::Assign(list) => {
                tracing::debug!(queue = %self.address, "{}: gets partitions {:?}", self.address, partition_numbers(list));
                self.tracker.set_denied(None);
                lock(&self.assignment).has_assignment = true;
                // librdkafka keeps the pause state of partitions across a rebalance, so it is set
                // explicitly.
                let changed = if lock(&self.assignment).is_paused {
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
