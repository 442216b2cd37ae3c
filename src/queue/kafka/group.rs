//! Our part of the consumer group: which partitions are ours, what of them may be committed, and what happens when they
//! come and go. librdkafka calls this from within `poll`.

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
use super::publisher::Courier;
use super::trouble::Ear;
use crate::queue::address::KafkaUrl;
use crate::queue::desk::{Answer, Desk, Item, Parcel};
use crate::queue::foreign::{self, Fate, HOPS_HEADER};
use crate::queue::settings::Resolved;
use crate::signing::Signing;

/// The group waits for us while we let go of partitions: at most so long, and a third of the session timeout.
const REVOKE_WAIT_MAX: Duration = Duration::from_secs(5);
const REVOKE_STEP: Duration = Duration::from_millis(20);

/// Where a delivery comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub partition: i32,
    pub offset: i64,
    /// Which assignment of the partition to us.
    epoch: u64,
}

struct Held {
    epoch: u64,
    offsets: Offsets,
    /// On its way to another worker: nothing of it goes out any more.
    going: bool,
}

#[derive(Default)]
struct Book {
    partitions: BTreeMap<i32, Held>,
    next_epoch: u64,
    /// Fetching is paused: enough is in flight.
    paused: bool,
    /// We leave by our own will: nobody is waited for.
    leaving: bool,
    /// The group has dealt its partitions out with us in it, be it that there was none for us.
    assigned: bool,
}

impl Book {
    fn is_current(&self, place: Place) -> bool {
        self.partitions
            .get(&place.partition)
            .is_some_and(|held| held.epoch == place.epoch)
    }

    /// What is given back may go out again from here.
    fn is_kept(&self, place: Place) -> bool {
        self.is_current(place) && self.partitions.get(&place.partition).is_some_and(|held| !held.going)
    }

    /// A message came; the deliveries it makes stale are told by their epoch.
    fn delivered(&mut self, partition: i32, offset: i64) -> (Place, Option<u64>) {
        let next_epoch = &mut self.next_epoch;
        let held = self.partitions.entry(partition).or_insert_with(|| {
            *next_epoch += 1;
            Held {
                epoch: *next_epoch,
                offsets: Offsets::default(),
                going: false,
            }
        });
        let mut stale = None;
        if !held.offsets.delivered(offset) {
            stale = Some(held.epoch);
            *next_epoch += 1;
            held.epoch = *next_epoch;
        }
        let epoch = held.epoch;
        (
            Place {
                partition,
                offset,
                epoch,
            },
            stale,
        )
    }
}

/// The context of the consumer.
pub(crate) struct Group {
    pub ear: Ear,
    pub desk: Arc<Desk<Place>>,
    pub courier: Courier,
    topic: String,
    address: String,
    book: Arc<Mutex<Book>>,
    answers: Mutex<UnboundedReceiver<Answer<Place>>>,
    revoke_wait: Duration,
    signing: Signing,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every change is a single step: what a panicking holder left is whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Group {
    pub fn new(
        url: &KafkaUrl,
        resolved: &Resolved,
        desk: Arc<Desk<Place>>,
        answers: UnboundedReceiver<Answer<Place>>,
        courier: Courier,
    ) -> Group {
        let session = config::consumer(url, resolved).map_or(0, |config| config::session_timeout_ms(&config));
        Group {
            ear: Ear::new(resolved.scrub.clone()),
            desk,
            courier,
            topic: url.topic.clone(),
            address: url.to_string(),
            book: Arc::default(),
            answers: Mutex::new(answers),
            revoke_wait: REVOKE_WAIT_MAX.min(Duration::from_millis(session / 3)),
            signing: resolved.signing.clone(),
        }
    }

    /// Takes a polled message in.
    pub fn take_in(&self, message: &BorrowedMessage<'_>) {
        // Who gets messages is not refused (any more).
        self.desk.set_denied(None);
        let (place, stale) = locked(&self.book).delivered(message.partition(), message.offset());
        if let Some(epoch) = stale {
            self.let_go("its topic was made anew or is read again", |held| held.epoch == epoch);
        }
        let hops = message.headers().and_then(|headers| {
            let mut found = headers.iter().filter(|header| header.key == HOPS_HEADER);
            found.next().map(|header| foreign::hops(header.value))
        });
        let (hops, body) = (hops.unwrap_or(0), message.payload().unwrap_or_default());
        let position = format!("{} partition {} offset {}", self.address, place.partition, place.offset);
        match foreign::fate(body, hops, &position, &self.signing) {
            Fate::Deliver(message) => self.desk.put(Item {
                token: place,
                message,
                body: body.to_vec(),
                deliveries: 1,
                hops,
                arrived: Instant::now(),
            }),
            Fate::PassOn(hops) => self.carry(Parcel {
                token: place,
                body: body.to_vec(),
                hops,
            }),
            Fate::Drop => self.done(place),
        }
    }

    fn done(&self, place: Place) {
        done(&mut locked(&self.book), place);
    }

    /// Recalls deliveries without waiting, and forgets them.
    fn let_go(&self, why: &'static str, which: impl Fn(&Place) -> bool) {
        self.desk.recall(why, |item| which(&item.token));
        self.desk.forget(which);
    }

    /// All partitions are gone, with what was known of them.
    pub fn forget_all(&self, why: &'static str) {
        locked(&self.book).partitions.clear();
        self.let_go(why, |_| true);
    }

    pub fn set_leaving(&self, leaving: bool) {
        let mut book = locked(&self.book);
        book.leaving = leaving;
        book.assigned = false;
    }

    pub fn is_assigned(&self) -> bool {
        locked(&self.book).assigned
    }

    /// Acts on what the worker said.
    pub fn settle(&self) {
        let mut answers = locked(&self.answers);
        while let Ok(answer) = answers.try_recv() {
            match answer {
                Answer::Done(place) => self.done(place),
                Answer::Back(item) => {
                    if locked(&self.book).is_kept(item.token) {
                        self.desk.put(item);
                    }
                }
                Answer::PassOn(parcel) => self.carry(parcel),
            }
        }
    }

    fn carry(&self, parcel: Parcel<Place>) {
        let Parcel { token, body, hops } = parcel;
        self.desk.parcels.fetch_add(1, Ordering::SeqCst);
        let (book, finished, desk) = (self.book.clone(), self.book.clone(), self.desk.clone());
        self.courier.carry(
            body,
            hops,
            move || !locked(&book).is_current(token),
            move |sent| {
                desk.parcels.fetch_sub(1, Ordering::SeqCst);
                if sent {
                    done(&mut locked(&finished), token);
                }
            },
        );
    }

    /// Commits what is finished and not committed yet, of all partitions or of some. One that is waited for is the last of its
    /// partitions: it says all that is finished.
    pub fn commit(&self, consumer: &BaseConsumer<Group>, of: Option<&BTreeSet<i32>>, mode: CommitMode) {
        let mut list = TopicPartitionList::new();
        for (&partition, held) in &mut locked(&self.book).partitions {
            if of.is_some_and(|of| !of.contains(&partition)) {
                continue;
            }
            let position = match mode {
                CommitMode::Async => held.offsets.take_due(),
                CommitMode::Sync => held.offsets.take_last(),
            };
            if let Some(position) = position
                && let Err(error) = list.add_partition_offset(&self.topic, partition, Offset::Offset(position))
            {
                tracing::debug!("cannot name partition {partition}: {error}");
            }
        }
        if list.count() > 0
            && let Err(error) = consumer.commit(&list, mode)
        {
            self.commit_failed(&error, &list);
        }
    }

    fn commit_failed(&self, error: &KafkaError, list: &TopicPartitionList) {
        // Tried again with the next commit, as long as the partition is ours.
        tracing::debug!("a commit to {} failed: {error}", self.address);
        let mut book = locked(&self.book);
        for element in list.elements() {
            if let Some(held) = book.partitions.get_mut(&element.partition()) {
                held.offsets.commit_failed();
            }
        }
    }

    pub fn is_paused(&self) -> bool {
        locked(&self.book).paused
    }

    /// Pauses or resumes fetching, where that is a change.
    pub fn set_paused(&self, consumer: &BaseConsumer<Group>, paused: bool) {
        if locked(&self.book).paused == paused {
            return;
        }
        let assigned = match consumer.assignment() {
            Ok(assigned) => assigned,
            Err(error) => return tracing::debug!("no assignment to pause: {error}"),
        };
        let changed = if paused {
            consumer.pause(&assigned)
        } else {
            consumer.resume(&assigned)
        };
        match changed {
            Ok(()) => locked(&self.book).paused = paused,
            Err(error) => tracing::debug!("cannot pause or resume: {error}"),
        }
    }

    /// Has librdkafka fetch anew: of a refusal that lasts, it says nothing more otherwise.
    pub fn fetch_anew(&self, consumer: &BaseConsumer<Group>) {
        let paused = locked(&self.book).paused;
        // What is paused is fetched anew when it is resumed.
        if !paused {
            self.set_paused(consumer, true);
            self.set_paused(consumer, false);
        }
    }

    /// Partitions go to another worker: what is finished of them is committed, then they are given up.
    fn revoked(&self, consumer: &BaseConsumer<Group>, partitions: &BTreeSet<i32>) {
        let ours = |place: &Place| partitions.contains(&place.partition);
        let lost = consumer.assignment_lost();
        let leaving = locked(&self.book).leaving;
        let why = if lost {
            "its partition was lost to another worker"
        } else {
            "its partition goes to another worker"
        };
        // While deliveries are recalled, no other message of these partitions may go out: it could not be acknowledged any more, and
        // another worker would do its work again. What is taken out of the desk here was not acknowledged: it comes to that worker.
        for (partition, held) in &mut locked(&self.book).partitions {
            held.going |= partitions.contains(partition);
        }
        self.desk.take_ready(|item| ours(&item.token));
        let mut recalling = self.desk.recall(why, |item| ours(&item.token));
        // Where the partitions are lost or we leave by our own will, nobody is waited for.
        let wait = if lost || leaving {
            Duration::ZERO
        } else {
            self.revoke_wait
        };
        let deadline = Instant::now() + wait;
        while !recalling.has_ended(&self.desk) && Instant::now() < deadline {
            self.settle();
            self.commit(consumer, Some(partitions), CommitMode::Async);
            std::thread::sleep(REVOKE_STEP);
        }
        if !lost {
            self.settle();
            self.commit(consumer, Some(partitions), CommitMode::Sync);
        }
        self.desk.forget(ours);
        locked(&self.book)
            .partitions
            .retain(|partition, _| !partitions.contains(partition));
    }
}

fn done(book: &mut Book, place: Place) {
    if book.is_current(place)
        && let Some(held) = book.partitions.get_mut(&place.partition)
    {
        held.offsets.acknowledged(place.offset);
    }
}

fn numbers(list: &TopicPartitionList) -> BTreeSet<i32> {
    list.elements().iter().map(|element| element.partition()).collect()
}

impl ClientContext for Group {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, line: &str) {
        self.ear.log(level, facility, line);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        self.ear.error(error, reason);
    }
}

impl ConsumerContext for Group {
    fn pre_rebalance(&self, consumer: &BaseConsumer<Self>, rebalance: &Rebalance<'_>) {
        if let Rebalance::Revoke(list) = rebalance {
            let partitions = numbers(list);
            tracing::debug!("{}: gives up partitions {partitions:?}", self.address);
            // Who stays in the group is assigned what it keeps, at once.
            locked(&self.book).assigned = false;
            self.revoked(consumer, &partitions);
        }
    }

    fn post_rebalance(&self, consumer: &BaseConsumer<Self>, rebalance: &Rebalance<'_>) {
        match rebalance {
            Rebalance::Assign(list) => {
                tracing::debug!("{}: gets partitions {:?}", self.address, numbers(list));
                self.desk.set_denied(None);
                locked(&self.book).assigned = true;
                // librdkafka remembers over a rebalance which partitions were paused: either state is set anew.
                let changed = if locked(&self.book).paused {
                    consumer.pause(list)
                } else {
                    consumer.resume(list)
                };
                if let Err(error) = changed {
                    tracing::debug!("cannot pause or resume: {error}");
                }
            }
            Rebalance::Revoke(_) => {}
            Rebalance::Error(error) => tracing::debug!("{}: rebalance failed: {error}", self.address),
        }
    }

    fn commit_callback(&self, result: KafkaResult<()>, list: &TopicPartitionList) {
        if let Err(error) = result {
            self.commit_failed(&error, list);
        }
    }
}
