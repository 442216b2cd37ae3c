//! The queue in memory: a job's open shards, for the workers of one process.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::Notify;

use super::{Delivery, HOPS_MAX, Message, Queue, QueueError, Recall};

/// Messages in memory, delivered in order. A message that is given back is delivered next.
#[derive(Debug, Clone, Default)]
pub struct LocalQueue {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// Notified when a message becomes available.
    ready_notify: Notify,
}

#[derive(Debug, Default)]
struct State {
    waiting: VecDeque<Waiting>,
    /// Deliveries without an answer, by receipt.
    out: HashMap<u64, Waiting>,
    next_receipt: u64,
}

/// A message with its counters.
#[derive(Debug, Clone)]
struct Waiting {
    message: Message,
    /// See [`Delivery::deliveries`].
    deliveries: u32,
    hops: u32,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // Every change is a single step, so the state is consistent even after a panic under the
        // lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, message: Message, hops: u32) {
        self.state().waiting.push_back(Waiting {
            message,
            deliveries: 0,
            hops,
        });
        self.ready_notify.notify_one();
    }

    fn give_back(&self, receipt: u64) {
        let mut state = self.state();
        if let Some(mut returned) = state.out.remove(&receipt) {
            // A delivery that is given back is not counted.
            returned.deliveries -= 1;
            state.waiting.push_front(returned);
            drop(state);
            self.ready_notify.notify_one();
        }
    }
}

impl LocalQueue {
    /// A queue that delivers `messages` in order.
    pub fn new(messages: impl IntoIterator<Item = Message>) -> LocalQueue {
        let queue = LocalQueue::default();
        queue.send(messages);
        queue
    }

    /// Adds messages at the end.
    pub fn send(&self, messages: impl IntoIterator<Item = Message>) {
        for message in messages {
            self.shared.push(message, 0);
        }
    }

    /// Messages that are not acknowledged, waiting and delivered.
    pub fn unacknowledged(&self) -> usize {
        let state = self.shared.state();
        state.waiting.len() + state.out.len()
    }

    fn try_receive(&self) -> Option<Delivery> {
        let mut state = self.shared.state();
        let mut waiting = state.waiting.pop_front()?;
        let receipt = state.next_receipt;
        state.next_receipt += 1;
        waiting.deliveries += 1;
        let Waiting {
            message,
            deliveries,
            hops,
        } = waiting.clone();
        state.out.insert(receipt, waiting);
        let more = !state.waiting.is_empty();
        drop(state);
        if more {
            // One notification may represent several messages: notify the next receiver.
            self.shared.ready_notify.notify_one();
        }
        let shared = self.shared.clone();
        Some(Delivery::new(
            message,
            deliveries,
            hops,
            receipt,
            Some(Box::new(move || shared.give_back(receipt))),
        ))
    }
}

#[async_trait]
impl Queue for LocalQueue {
    async fn receive(&self, wait: Duration) -> Result<Option<Delivery>, QueueError> {
        let arrival = async {
            loop {
                if let Some(delivery) = self.try_receive() {
                    return delivery;
                }
                self.shared.ready_notify.notified().await;
            }
        };
        Ok(tokio::time::timeout(wait, arrival).await.ok())
    }

    /// Nothing expires in memory.
    async fn extend(&self, _: &Delivery, _: Duration) -> Result<(), QueueError> {
        Ok(())
    }

    async fn acknowledge(&self, delivery: &Delivery) -> Result<(), QueueError> {
        self.shared.state().out.remove(&delivery.receipt);
        Ok(())
    }

    async fn give_back(&self, delivery: &Delivery) -> Result<(), QueueError> {
        self.shared.give_back(delivery.receipt);
        Ok(())
    }

    async fn forward(&self, delivery: &Delivery) -> Result<bool, QueueError> {
        let taken = self.shared.state().out.remove(&delivery.receipt);
        let Some(Waiting { message, hops, .. }) = taken.filter(|waiting| waiting.hops < HOPS_MAX) else {
            return Ok(false);
        };
        self.shared.push(message, hops + 1);
        Ok(true)
    }

    async fn requeue_last(&self, delivery: &Delivery) -> Result<(), QueueError> {
        let taken = self.shared.state().out.remove(&delivery.receipt);
        if let Some(Waiting { message, hops, .. }) = taken {
            self.shared.push(message, hops);
        }
        Ok(())
    }

    /// Deliveries in memory are never recalled.
    async fn recalled(&self) -> Recall {
        std::future::pending().await
    }

    /// The queue in memory is always attached.
    fn is_attached(&self) -> bool {
        true
    }
}
