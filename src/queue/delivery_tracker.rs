//! State between a broker's thread and the worker: ready messages, outstanding deliveries with
//! their leases, and recalls. It does no I/O and does not depend on the broker. `T` is the broker's
//! identifier of a delivery, its token.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::{Notify, oneshot};

use super::{Delivery, HOPS_MAX, Message, Queue, QueueError, Recall, Settings};

/// A message that a broker delivered.
#[derive(Debug, Clone)]
pub(crate) struct ReceivedMessage<T> {
    pub token: T,
    pub message: Message,
    /// The received bytes, to be passed on unchanged.
    pub body: Vec<u8>,
    pub deliveries: u32,
    pub hops: u32,
    /// When the broker delivered it.
    pub arrived: Instant,
}

/// Maximum number of outstanding deliveries besides those being worked on: deliveries that the
/// worker has set aside or is passing on.
const EXTRA_OUTSTANDING_MAX: usize = 4096;

/// A message to be sent again with this number of hops. Once it is sent, `token` is acknowledged.
#[derive(Debug, Clone)]
pub(crate) struct Republish<T> {
    pub token: T,
    pub body: Vec<u8>,
    pub hops: u32,
}

impl<T> From<ReceivedMessage<T>> for Republish<T> {
    fn from(message: ReceivedMessage<T>) -> Republish<T> {
        let ReceivedMessage { token, body, hops, .. } = message;
        Republish { token, body, hops }
    }
}

/// The worker's decision on a delivery, for the broker's thread.
#[derive(Debug)]
pub(crate) enum Disposition<T> {
    Acknowledge(T),
    GiveBack(ReceivedMessage<T>),
    Republish(Republish<T>),
}

/// A delivery that the worker holds.
struct OutstandingDelivery<T> {
    item: ReceivedMessage<T>,
    /// From this time on, the worker counts as stuck, unless it extends the delivery.
    lease_end: Instant,
}

struct TrackerState<T> {
    ready: VecDeque<ReceivedMessage<T>>,
    outstanding: BTreeMap<u64, OutstandingDelivery<T>>,
    next_receipt: u64,
    recalls: VecDeque<Recall>,
    /// Why the broker refuses access; `None` while it grants access.
    denied: Option<String>,
    /// Whether the broker has registered this consumer.
    is_attached: bool,
}

pub(crate) struct DeliveryTracker<T> {
    state: Mutex<TrackerState<T>>,
    dispositions: UnboundedSender<Disposition<T>>,
    first_lease: Duration,
    /// Maximum number of outstanding deliveries.
    outstanding_max: usize,
    /// Notified when a message is ready, when another delivery is allowed, or when access is
    /// denied.
    ready_notify: Notify,
    /// Notified when a receiver finds no ready message.
    pub starved_notify: Notify,
    recall_notify: Notify,
    /// Counts the worker's calls that show progress.
    progress_count: AtomicU64,
    /// Number of messages that wait to be passed on.
    pub republishing: AtomicUsize,
    is_closing: AtomicBool,
    /// Notified when the queue is closed.
    pub closed_notify: Notify,
}

/// A recall that ends when the worker has stopped work on its deliveries.
pub(crate) struct PendingRecall {
    receipts: Vec<u64>,
    ended: oneshot::Receiver<()>,
}

impl PendingRecall {
    pub(super) fn receipts(&self) -> &[u64] {
        &self.receipts
    }

    pub(super) fn has_ended<T>(&mut self, tracker: &DeliveryTracker<T>) -> bool {
        let dropped = !matches!(self.ended.try_recv(), Err(oneshot::error::TryRecvError::Empty));
        dropped || self.is_settled(tracker)
    }

    /// Whether each of the recalled deliveries has a disposition.
    pub(super) fn is_settled<T>(&self, tracker: &DeliveryTracker<T>) -> bool {
        let state = tracker.state();
        !self
            .receipts
            .iter()
            .any(|receipt| state.outstanding.contains_key(receipt))
    }
}

impl<T> DeliveryTracker<T> {
    /// `settings` gives the length of the first lease and the maximum number of outstanding
    /// deliveries.
    pub(super) fn new(dispositions: UnboundedSender<Disposition<T>>, settings: &Settings) -> DeliveryTracker<T> {
        DeliveryTracker {
            state: Mutex::new(TrackerState {
                ready: VecDeque::new(),
                outstanding: BTreeMap::new(),
                next_receipt: 0,
                recalls: VecDeque::new(),
                denied: None,
                is_attached: false,
            }),
            dispositions,
            first_lease: settings.first_lease,
            outstanding_max: settings.in_flight.max(1) as usize + EXTRA_OUTSTANDING_MAX,
            ready_notify: Notify::new(),
            starved_notify: Notify::new(),
            recall_notify: Notify::new(),
            progress_count: AtomicU64::new(0),
            republishing: AtomicUsize::new(0),
            is_closing: AtomicBool::new(false),
            closed_notify: Notify::new(),
        }
    }

    fn state(&self) -> MutexGuard<'_, TrackerState<T>> {
        // Every change is a single step, so the state is consistent even after a panic under the
        // lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a message for the next receiver.
    pub(super) fn push_ready(&self, item: ReceivedMessage<T>) {
        self.state().ready.push_back(item);
        self.ready_notify.notify_one();
    }

    /// Number of messages that no receiver has taken yet.
    pub(super) fn ready_count(&self) -> usize {
        self.state().ready.len()
    }

    /// Whether the lease of a delivery has expired.
    pub(super) fn is_stuck(&self, now: Instant) -> bool {
        self.state()
            .outstanding
            .values()
            .any(|delivery| delivery.lease_end <= now)
    }

    /// Extends all leases by the time for which the process itself was stopped: the worker could
    /// not extend them.
    pub(super) fn extend_leases(&self, time: Duration) {
        for delivery in self.state().outstanding.values_mut() {
            delivery.lease_end += time;
        }
    }

    /// Number of calls of the worker that have shown progress.
    pub(super) fn progress_count(&self) -> u64 {
        self.progress_count.load(Ordering::SeqCst)
    }

    /// Recalls the outstanding deliveries that match `predicate`.
    pub(super) fn recall(&self, why: &'static str, predicate: impl Fn(&ReceivedMessage<T>) -> bool) -> PendingRecall {
        let mut state = self.state();
        let receipts: Vec<u64> = state
            .outstanding
            .iter()
            .filter(|(_, delivery)| predicate(&delivery.item))
            .map(|(&receipt, _)| receipt)
            .collect();
        let (sender, ended) = oneshot::channel();
        if !receipts.is_empty() {
            state
                .recalls
                .push_back(Recall::new(receipts.clone(), why, Some(sender)));
            self.recall_notify.notify_one();
        }
        PendingRecall { receipts, ended }
    }

    /// Forgets messages and deliveries that match `predicate`. Their later dispositions have no
    /// effect.
    pub(super) fn forget(&self, predicate: impl Fn(&T) -> bool) {
        let mut state = self.state();
        state.ready.retain(|item| !predicate(&item.token));
        state.outstanding.retain(|_, delivery| !predicate(&delivery.item.token));
        drop(state);
        self.ready_notify.notify_one();
    }

    /// Removes and returns the ready messages that match `predicate`.
    pub(super) fn take_ready(&self, predicate: impl Fn(&ReceivedMessage<T>) -> bool) -> Vec<ReceivedMessage<T>> {
        let mut state = self.state();
        let (taken, kept): (Vec<_>, Vec<_>) = state.ready.drain(..).partition(|item| predicate(item));
        state.ready = kept.into();
        taken
    }

    /// Removes an outstanding delivery.
    pub(super) fn take_outstanding(&self, receipt: u64) -> Option<ReceivedMessage<T>> {
        let taken = self.state().outstanding.remove(&receipt).map(|delivery| delivery.item);
        // Another delivery is allowed now.
        self.ready_notify.notify_one();
        taken
    }

    /// Replaces the token of the outstanding delivery of `message` whose token matches `predicate`,
    /// and returns the old token. `None`: there is no such delivery.
    pub(super) fn replace_token(
        &self,
        message: &Message,
        arrived: Instant,
        token: T,
        predicate: impl Fn(&T) -> bool,
    ) -> Option<T> {
        let mut state = self.state();
        let found = state
            .outstanding
            .values_mut()
            .find(|delivery| delivery.item.message == *message && predicate(&delivery.item.token));
        match found {
            Some(delivery) => {
                delivery.item.arrived = arrived;
                Some(std::mem::replace(&mut delivery.item.token, token))
            }
            None => None,
        }
    }

    /// Sets the reason why the broker refuses access. `None`: the broker grants access.
    pub(super) fn set_denied(&self, why: Option<String>) {
        self.state().denied = why;
        self.ready_notify.notify_one();
    }

    pub(super) fn is_denied(&self) -> bool {
        self.state().denied.is_some()
    }

    /// Sets whether the broker has registered this consumer.
    pub(super) fn set_attached(&self, is_attached: bool) {
        self.state().is_attached = is_attached;
    }

    pub(super) fn is_closing(&self) -> bool {
        self.is_closing.load(Ordering::SeqCst)
    }

    pub(super) fn close(&self) {
        self.is_closing.store(true, Ordering::SeqCst);
        self.closed_notify.notify_one();
    }

    fn note_progress(&self) {
        self.progress_count.fetch_add(1, Ordering::SeqCst);
    }

    /// Ends an outstanding delivery by a disposition. Does nothing if the delivery has ended
    /// already.
    fn settle(&self, receipt: u64, disposition: impl FnOnce(ReceivedMessage<T>) -> Disposition<T>) {
        if let Some(item) = self.take_outstanding(receipt) {
            self.note_progress();
            // The broker's thread ends only with the queue; the broker then delivers the message
            // again.
            let _ = self.dispositions.send(disposition(item));
        }
    }
}

impl<T: Clone + Send + 'static> DeliveryTracker<T> {
    fn try_receive(self: &Arc<Self>) -> Option<Result<Delivery, QueueError>> {
        let mut state = self.state();
        if let Some(why) = &state.denied {
            return Some(Err(QueueError::Denied { why: why.clone() }));
        }
        if state.outstanding.len() >= self.outstanding_max {
            return None;
        }
        let item = state.ready.pop_front()?;
        let receipt = state.next_receipt;
        state.next_receipt += 1;
        let (message, deliveries, hops) = (item.message.clone(), item.deliveries, item.hops);
        let lease_end = Instant::now() + self.first_lease;
        state
            .outstanding
            .insert(receipt, OutstandingDelivery { item, lease_end });
        if !state.ready.is_empty() {
            // One notification may represent several messages: notify the next receiver.
            self.ready_notify.notify_one();
        }
        drop(state);
        let tracker = self.clone();
        let on_drop = move || tracker.settle(receipt, Disposition::GiveBack);
        Some(Ok(Delivery::new(
            message,
            deliveries,
            hops,
            receipt,
            Some(Box::new(on_drop)),
        )))
    }
}

/// A queue whose broker has threads of its own.
pub(crate) struct BrokeredQueue<T> {
    tracker: Arc<DeliveryTracker<T>>,
    /// Closed when the broker's thread has ended.
    ended: Mutex<std::sync::mpsc::Receiver<()>>,
}

/// How long dropping a queue waits until its last dispositions have reached the broker.
const CLOSE_WAIT: Duration = Duration::from_secs(5);

impl<T> BrokeredQueue<T> {
    pub(super) fn new(tracker: Arc<DeliveryTracker<T>>, ended: std::sync::mpsc::Receiver<()>) -> BrokeredQueue<T> {
        BrokeredQueue {
            tracker,
            ended: Mutex::new(ended),
        }
    }
}

impl<T> Drop for BrokeredQueue<T> {
    fn drop(&mut self) {
        self.tracker.close();
        let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner);
        if ended.recv_timeout(CLOSE_WAIT) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            tracing::debug!("the queue did not close within {CLOSE_WAIT:?}");
        }
    }
}

#[async_trait]
impl<T: Clone + Send + 'static> Queue for BrokeredQueue<T> {
    async fn receive(&self, wait: Duration) -> Result<Option<Delivery>, QueueError> {
        // A worker that asks for more makes progress. A late disposition of a recalled delivery
        // does not count as progress.
        self.tracker.note_progress();
        let arrival = async {
            loop {
                if let Some(found) = self.tracker.try_receive() {
                    return found;
                }
                self.tracker.starved_notify.notify_one();
                self.tracker.ready_notify.notified().await;
            }
        };
        tokio::time::timeout(wait, arrival).await.ok().transpose()
    }

    async fn extend(&self, delivery: &Delivery, time: Duration) -> Result<(), QueueError> {
        self.tracker.note_progress();
        if let Some(delivery) = self.tracker.state().outstanding.get_mut(&delivery.receipt) {
            delivery.lease_end = Instant::now() + time;
        }
        Ok(())
    }

    async fn acknowledge(&self, delivery: &Delivery) -> Result<(), QueueError> {
        self.tracker
            .settle(delivery.receipt, |item| Disposition::Acknowledge(item.token));
        Ok(())
    }

    async fn give_back(&self, delivery: &Delivery) -> Result<(), QueueError> {
        self.tracker.settle(delivery.receipt, Disposition::GiveBack);
        Ok(())
    }

    async fn forward(&self, delivery: &Delivery) -> Result<bool, QueueError> {
        let may_send = delivery.hops < HOPS_MAX;
        let mut is_sent = false;
        self.tracker.settle(delivery.receipt, |item| {
            is_sent = may_send;
            let ReceivedMessage { token, body, hops, .. } = item;
            if may_send {
                Disposition::Republish(Republish {
                    token,
                    body,
                    hops: hops + 1,
                })
            } else {
                Disposition::Acknowledge(token)
            }
        });
        Ok(is_sent)
    }

    async fn requeue_last(&self, delivery: &Delivery) -> Result<(), QueueError> {
        self.tracker.settle(delivery.receipt, |item| {
            let ReceivedMessage { token, body, hops, .. } = item;
            Disposition::Republish(Republish { token, body, hops })
        });
        Ok(())
    }

    async fn next_recall(&self) -> Recall {
        loop {
            let recall = {
                let mut state = self.tracker.state();
                let recall = state.recalls.pop_front();
                if !state.recalls.is_empty() {
                    self.tracker.recall_notify.notify_one();
                }
                recall
            };
            match recall {
                Some(recall) => return recall,
                None => self.tracker.recall_notify.notified().await,
            }
        }
    }

    fn is_attached(&self) -> bool {
        let state = self.tracker.state();
        state.is_attached && state.denied.is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// After a reconnect the broker repeats unacknowledged messages: a repetition replaces only the
    /// delivery of its own message.
    #[test]
    fn a_repeated_delivery_replaces_the_token_of_its_message() {
        let (dispositions, _answered) = tokio::sync::mpsc::unbounded_channel();
        let tracker = DeliveryTracker::new(dispositions, &Settings::default());
        let now = Instant::now();
        let message = |shard| Message::new("a", "memory:///a", 0, shard);
        for (receipt, token) in [(1, 10), (2, 20)] {
            let item = ReceivedMessage {
                token,
                message: message(receipt as u32),
                body: Vec::new(),
                deliveries: 1,
                hops: 0,
                arrived: now,
            };
            tracker
                .state()
                .outstanding
                .insert(receipt, OutstandingDelivery { item, lease_end: now });
        }
        let is_old = |token: &i32| *token < 100;
        assert_eq!(tracker.replace_token(&message(2), now, 200, is_old), Some(20));
        assert_eq!(
            tracker.replace_token(&message(2), now, 300, is_old),
            None,
            "it is of the new channel"
        );
        assert_eq!(
            tracker.replace_token(&message(3), now, 400, is_old),
            None,
            "nobody holds it"
        );
        assert_eq!(tracker.take_outstanding(1).map(|item| item.token), Some(10));
        assert_eq!(tracker.take_outstanding(2).map(|item| item.token), Some(200));
    }
}
