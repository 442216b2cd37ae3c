//! State between a broker's thread and the worker: ready messages, outstanding deliveries with
//! their leases, and recalls. It does no I/O and is independent of the broker. `T` is the broker's
//! identifier of a delivery.

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

/// Maximum number of outstanding deliveries beyond those being worked on: deliveries set aside, or
/// on their way to other workers.
const ASIDE_MAX: usize = 4096;

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

/// The worker's answer to a delivery, for the broker's thread.
#[derive(Debug)]
pub(crate) enum Disposition<T> {
    Acknowledge(T),
    GiveBack(ReceivedMessage<T>),
    Republish(Republish<T>),
}

/// A delivery that the worker holds.
struct Outstanding<T> {
    item: ReceivedMessage<T>,
    /// End of the lease: the worker counts as stuck from then on, unless it extends the delivery.
    until: Instant,
}

struct State<T> {
    ready: VecDeque<ReceivedMessage<T>>,
    out: BTreeMap<u64, Outstanding<T>>,
    next_receipt: u64,
    recalls: VecDeque<Recall>,
    /// Why the broker refuses access; `None` while it grants access.
    denied: Option<String>,
    /// Whether the broker has registered this consumer.
    attached: bool,
}

pub(crate) struct DeliveryTracker<T> {
    state: Mutex<State<T>>,
    dispositions: UnboundedSender<Disposition<T>>,
    first_lease: Duration,
    /// Maximum number of outstanding deliveries.
    out_max: usize,
    /// Notified when a message is ready, when another delivery is allowed, or when access is
    /// denied.
    ready_notify: Notify,
    /// Notified when a receiver finds no ready message.
    pub starved_notify: Notify,
    recall_notify: Notify,
    /// Counts the worker's calls that show progress.
    progress_count: AtomicU64,
    /// Messages that wait to be passed on.
    pub republishing: AtomicUsize,
    closing: AtomicBool,
    /// Notified when the queue is closed.
    pub closed_notify: Notify,
}

/// A recall in progress, which ends when the worker has let go of its deliveries.
pub(crate) struct Recalling {
    receipts: Vec<u64>,
    ended: oneshot::Receiver<()>,
}

impl Recalling {
    pub(super) fn receipts(&self) -> &[u64] {
        &self.receipts
    }

    pub(super) fn has_ended<T>(&mut self, tracker: &DeliveryTracker<T>) -> bool {
        let dropped = !matches!(self.ended.try_recv(), Err(oneshot::error::TryRecvError::Empty));
        dropped || self.is_answered(tracker)
    }

    /// Whether each of the recalled deliveries has been answered.
    pub(super) fn is_answered<T>(&self, tracker: &DeliveryTracker<T>) -> bool {
        let state = tracker.state();
        !self.receipts.iter().any(|receipt| state.out.contains_key(receipt))
    }
}

impl<T> DeliveryTracker<T> {
    /// `settings` gives the length of the first lease and the maximum number of outstanding
    /// deliveries.
    pub(super) fn new(dispositions: UnboundedSender<Disposition<T>>, settings: &Settings) -> DeliveryTracker<T> {
        DeliveryTracker {
            state: Mutex::new(State {
                ready: VecDeque::new(),
                out: BTreeMap::new(),
                next_receipt: 0,
                recalls: VecDeque::new(),
                denied: None,
                attached: false,
            }),
            dispositions,
            first_lease: settings.first_lease,
            out_max: settings.in_flight.max(1) as usize + ASIDE_MAX,
            ready_notify: Notify::new(),
            starved_notify: Notify::new(),
            recall_notify: Notify::new(),
            progress_count: AtomicU64::new(0),
            republishing: AtomicUsize::new(0),
            closing: AtomicBool::new(false),
            closed_notify: Notify::new(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State<T>> {
        // Every change is a single step, so the state is consistent even after a panic under the
        // lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a message for the next receiver.
    pub(super) fn put(&self, item: ReceivedMessage<T>) {
        self.state().ready.push_back(item);
        self.ready_notify.notify_one();
    }

    /// Number of messages that no receiver has taken yet.
    pub(super) fn ready(&self) -> usize {
        self.state().ready.len()
    }

    /// Whether the lease of a delivery has expired.
    pub(super) fn is_stuck(&self, now: Instant) -> bool {
        self.state().out.values().any(|out| out.until <= now)
    }

    /// Extends all leases by the time in which the process itself was stopped: the worker could not
    /// extend.
    pub(super) fn extend_leases(&self, time: Duration) {
        for out in self.state().out.values_mut() {
            out.until += time;
        }
    }

    /// How many calls of the worker have shown progress so far.
    pub(super) fn progress_count(&self) -> u64 {
        self.progress_count.load(Ordering::SeqCst)
    }

    /// Recalls the outstanding deliveries that match `which`.
    pub(super) fn recall(&self, why: &'static str, which: impl Fn(&ReceivedMessage<T>) -> bool) -> Recalling {
        let mut state = self.state();
        let receipts: Vec<u64> = state
            .out
            .iter()
            .filter(|(_, out)| which(&out.item))
            .map(|(&receipt, _)| receipt)
            .collect();
        let (sender, ended) = oneshot::channel();
        if !receipts.is_empty() {
            state
                .recalls
                .push_back(Recall::new(receipts.clone(), why, Some(sender)));
            self.recall_notify.notify_one();
        }
        Recalling { receipts, ended }
    }

    /// Forgets messages and deliveries that match `which`. Later answers to them do nothing.
    pub(super) fn forget(&self, which: impl Fn(&T) -> bool) {
        let mut state = self.state();
        state.ready.retain(|item| !which(&item.token));
        state.out.retain(|_, out| !which(&out.item.token));
        drop(state);
        self.ready_notify.notify_one();
    }

    /// Removes and returns the ready messages that match `which`.
    pub(super) fn take_ready(&self, which: impl Fn(&ReceivedMessage<T>) -> bool) -> Vec<ReceivedMessage<T>> {
        let mut state = self.state();
        let (taken, kept): (Vec<_>, Vec<_>) = state.ready.drain(..).partition(|item| which(item));
        state.ready = kept.into();
        taken
    }

    /// Removes a delivery from those that the worker holds.
    pub(super) fn take_out(&self, receipt: u64) -> Option<ReceivedMessage<T>> {
        let taken = self.state().out.remove(&receipt).map(|out| out.item);
        // Another delivery is allowed now.
        self.ready_notify.notify_one();
        taken
    }

    /// Replaces the token of the outstanding delivery of `message` that matches `which` by `token`,
    /// and returns the old token. `None` where there is no such delivery.
    pub(super) fn adopt(&self, message: &Message, arrived: Instant, token: T, which: impl Fn(&T) -> bool) -> Option<T> {
        let mut state = self.state();
        let held = state
            .out
            .values_mut()
            .find(|out| out.item.message == *message && which(&out.item.token));
        match held {
            Some(out) => {
                out.item.arrived = arrived;
                Some(std::mem::replace(&mut out.item.token, token))
            }
            None => None,
        }
    }

    /// Sets why access is refused; `None` where it is granted.
    pub(super) fn set_denied(&self, why: Option<String>) {
        self.state().denied = why;
        self.ready_notify.notify_one();
    }

    pub(super) fn is_denied(&self) -> bool {
        self.state().denied.is_some()
    }

    /// Sets whether the broker has registered this consumer.
    pub(super) fn set_attached(&self, attached: bool) {
        self.state().attached = attached;
    }

    pub(super) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::SeqCst)
    }

    pub(super) fn close(&self) {
        self.closing.store(true, Ordering::SeqCst);
        self.closed_notify.notify_one();
    }

    fn note_progress(&self) {
        self.progress_count.fetch_add(1, Ordering::SeqCst);
    }

    /// Ends an outstanding delivery. Does nothing if the delivery has ended already.
    fn answer(&self, receipt: u64, answer: impl FnOnce(ReceivedMessage<T>) -> Disposition<T>) {
        if let Some(item) = self.take_out(receipt) {
            self.note_progress();
            // The broker's thread ends only with the queue; the broker then delivers the message
            // again.
            let _ = self.dispositions.send(answer(item));
        }
    }
}

impl<T: Clone + Send + 'static> DeliveryTracker<T> {
    fn try_receive(self: &Arc<Self>) -> Option<Result<Delivery, QueueError>> {
        let mut state = self.state();
        if let Some(why) = &state.denied {
            return Some(Err(QueueError::Denied { why: why.clone() }));
        }
        if state.out.len() >= self.out_max {
            return None;
        }
        let item = state.ready.pop_front()?;
        let receipt = state.next_receipt;
        state.next_receipt += 1;
        let (message, deliveries, hops) = (item.message.clone(), item.deliveries, item.hops);
        let until = Instant::now() + self.first_lease;
        state.out.insert(receipt, Outstanding { item, until });
        if !state.ready.is_empty() {
            // One notification may represent several messages: notify the next receiver.
            self.ready_notify.notify_one();
        }
        drop(state);
        let tracker = self.clone();
        let on_drop = move || tracker.answer(receipt, Disposition::GiveBack);
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
pub(crate) struct Brokered<T> {
    tracker: Arc<DeliveryTracker<T>>,
    /// Closed when the broker's thread has ended.
    ended: Mutex<std::sync::mpsc::Receiver<()>>,
}

/// How long dropping a queue waits for its last answers to reach the broker.
const CLOSE_WAIT: Duration = Duration::from_secs(5);

impl<T> Brokered<T> {
    pub(super) fn new(tracker: Arc<DeliveryTracker<T>>, ended: std::sync::mpsc::Receiver<()>) -> Brokered<T> {
        Brokered {
            tracker,
            ended: Mutex::new(ended),
        }
    }
}

impl<T> Drop for Brokered<T> {
    fn drop(&mut self) {
        self.tracker.close();
        let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner);
        if ended.recv_timeout(CLOSE_WAIT) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            tracing::debug!("the queue did not close within {CLOSE_WAIT:?}");
        }
    }
}

#[async_trait]
impl<T: Clone + Send + 'static> Queue for Brokered<T> {
    async fn receive(&self, wait: Duration) -> Result<Option<Delivery>, QueueError> {
        // A worker that asks for more makes progress. A late answer to a recalled delivery does not
        // count.
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
        if let Some(out) = self.tracker.state().out.get_mut(&delivery.receipt) {
            out.until = Instant::now() + time;
        }
        Ok(())
    }

    async fn acknowledge(&self, delivery: &Delivery) -> Result<(), QueueError> {
        self.tracker
            .answer(delivery.receipt, |item| Disposition::Acknowledge(item.token));
        Ok(())
    }

    async fn give_back(&self, delivery: &Delivery) -> Result<(), QueueError> {
        self.tracker.answer(delivery.receipt, Disposition::GiveBack);
        Ok(())
    }

    async fn forward(&self, delivery: &Delivery) -> Result<bool, QueueError> {
        let again = delivery.hops < HOPS_MAX;
        let mut sent = false;
        self.tracker.answer(delivery.receipt, |item| {
            sent = again;
            let ReceivedMessage { token, body, hops, .. } = item;
            if again {
                Disposition::Republish(Republish {
                    token,
                    body,
                    hops: hops + 1,
                })
            } else {
                Disposition::Acknowledge(token)
            }
        });
        Ok(sent)
    }

    async fn requeue_last(&self, delivery: &Delivery) -> Result<(), QueueError> {
        self.tracker.answer(delivery.receipt, |item| {
            let ReceivedMessage { token, body, hops, .. } = item;
            Disposition::Republish(Republish { token, body, hops })
        });
        Ok(())
    }

    async fn recalled(&self) -> Recall {
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
        state.attached && state.denied.is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// After a reconnect the broker repeats unacknowledged messages: a repetition replaces only the
    /// delivery of its own message.
    #[test]
    fn a_repeated_delivery_is_adopted_by_its_own_message() {
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
            tracker.state().out.insert(receipt, Outstanding { item, until: now });
        }
        let is_old = |token: &i32| *token < 100;
        assert_eq!(tracker.adopt(&message(2), now, 200, is_old), Some(20));
        assert_eq!(
            tracker.adopt(&message(2), now, 300, is_old),
            None,
            "it is of the new channel"
        );
        assert_eq!(tracker.adopt(&message(3), now, 400, is_old), None, "nobody holds it");
        assert_eq!(tracker.take_out(1).map(|item| item.token), Some(10));
        assert_eq!(tracker.take_out(2).map(|item| item.token), Some(200));
    }
}
