//! The queue in memory: a job's open shards, for the workers of one process.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::Notify;

use super::{Delivery, HOPS_MAX, Message, Queue, QueueError, Recall};

/// Messages in memory. Jobs take turns, so a small job does not wait for the end of a large one; the
/// messages of a job are delivered in order. A message that is given back is delivered next.
#[derive(Debug, Clone, Default)]
pub struct LocalQueue {
    shared: Arc<SharedQueue>,
}

#[derive(Debug, Default)]
struct SharedQueue {
    state: Mutex<LocalState>,
    /// Notified when a message becomes available.
    ready_notify: Notify,
}

#[derive(Debug, Default)]
struct LocalState {
    /// By the job's output. No list is empty.
    queued: HashMap<String, VecDeque<QueuedMessage>>,
    /// The jobs with queued messages; the first one is next.
    turns: VecDeque<String>,
    /// Deliveries without a disposition, by receipt.
    delivered: HashMap<u64, QueuedMessage>,
    next_receipt: u64,
}

/// A message with its counters, queued or delivered.
#[derive(Debug, Clone)]
struct QueuedMessage {
    message: Message,
    /// See [`Delivery::deliveries`].
    deliveries: u32,
    hops: u32,
}

impl LocalState {
    /// Adds a message as the last one of its job.
    fn push_last(&mut self, queued: QueuedMessage) {
        let output = queued.message.output.clone();
        let list = self.queued.entry(output.clone()).or_default();
        if list.is_empty() {
            self.turns.push_back(output);
        }
        list.push_back(queued);
    }

    /// Adds a message that is delivered next.
    fn push_next(&mut self, queued: QueuedMessage) {
        let output = queued.message.output.clone();
        self.turns.retain(|other| *other != output);
        self.turns.push_front(output.clone());
        self.queued.entry(output).or_default().push_front(queued);
    }

    /// Takes the next message. Its job comes last from then on.
    fn pop(&mut self) -> Option<QueuedMessage> {
        let output = self.turns.pop_front()?;
        let list = self.queued.get_mut(&output)?;
        let popped = list.pop_front();
        if list.is_empty() {
            self.queued.remove(&output);
        } else {
            self.turns.push_back(output);
        }
        popped
    }
}

impl SharedQueue {
    fn state(&self) -> MutexGuard<'_, LocalState> {
        // Every change is a single step, so the state is consistent even after a panic under the
        // lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, message: Message, hops: u32) {
        self.state().push_last(QueuedMessage {
            message,
            deliveries: 0,
            hops,
        });
        self.ready_notify.notify_one();
    }

    fn give_back(&self, receipt: u64) {
        let mut state = self.state();
        if let Some(mut returned) = state.delivered.remove(&receipt) {
            // A delivery that is given back is not counted.
            returned.deliveries -= 1;
            state.push_next(returned);
            drop(state);
            self.ready_notify.notify_one();
        }
    }
}

impl LocalQueue {
    /// A queue of `messages`.
    pub fn new(messages: impl IntoIterator<Item = Message>) -> LocalQueue {
        let queue = LocalQueue::default();
        queue.send(messages);
        queue
    }

    /// Adds messages, each as the last one of its job.
    pub fn send(&self, messages: impl IntoIterator<Item = Message>) {
        for message in messages {
            self.shared.push(message, 0);
        }
    }

    /// Number of messages, queued or delivered, that are not acknowledged.
    pub fn unacknowledged(&self) -> usize {
        let state = self.shared.state();
        state.queued.values().map(VecDeque::len).sum::<usize>() + state.delivered.len()
    }

    /// Whether messages of this job, queued or delivered, are not acknowledged.
    pub fn has_any_of(&self, output: &str) -> bool {
        let state = self.shared.state();
        let mut delivered = state.delivered.values();
        state.queued.contains_key(output) || delivered.any(|delivered| delivered.message.output == output)
    }

    fn try_receive(&self) -> Option<Delivery> {
        let mut state = self.shared.state();
        let mut queued = state.pop()?;
        let receipt = state.next_receipt;
        state.next_receipt += 1;
        queued.deliveries += 1;
        let QueuedMessage {
            message,
            deliveries,
            hops,
        } = queued.clone();
        state.delivered.insert(receipt, queued);
        let has_more = !state.turns.is_empty();
        drop(state);
        if has_more {
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
        self.shared.state().delivered.remove(&delivery.receipt);
        Ok(())
    }

    async fn give_back(&self, delivery: &Delivery) -> Result<(), QueueError> {
        self.shared.give_back(delivery.receipt);
        Ok(())
    }

    async fn forward(&self, delivery: &Delivery) -> Result<bool, QueueError> {
        let taken = self.shared.state().delivered.remove(&delivery.receipt);
        let Some(QueuedMessage { message, hops, .. }) = taken.filter(|queued| queued.hops < HOPS_MAX) else {
            return Ok(false);
        };
        self.shared.push(message, hops + 1);
        Ok(true)
    }

    async fn requeue_last(&self, delivery: &Delivery) -> Result<(), QueueError> {
        let taken = self.shared.state().delivered.remove(&delivery.receipt);
        if let Some(QueuedMessage { message, hops, .. }) = taken {
            self.shared.push(message, hops);
        }
        Ok(())
    }

    /// Deliveries in memory are never recalled.
    async fn next_recall(&self) -> Recall {
        std::future::pending().await
    }

    /// The queue in memory is always attached.
    fn is_attached(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(output: &str, shard: u32) -> Message {
        Message::new("job", output, 0, shard)
    }

    fn received(queue: &LocalQueue) -> Option<(Delivery, String)> {
        let delivery = queue.try_receive()?;
        let name = format!("{}{}", delivery.message.output, delivery.message.shard);
        Some((delivery, name))
    }

    #[tokio::test]
    async fn jobs_take_turns() {
        let queue = LocalQueue::new((0..4).map(|shard| message("large", shard)));
        let (first, name) = received(&queue).unwrap();
        assert_eq!(name, "large0");
        queue.send([message("small", 0), message("small", 1)]);
        let mut order = Vec::new();
        while let Some((delivery, name)) = received(&queue) {
            queue.acknowledge(&delivery).await.unwrap();
            order.push(name);
        }
        assert_eq!(order, ["large1", "small0", "large2", "small1", "large3"]);
        queue.send([message("small", 2), message("large", 4)]);
        queue.give_back(&first).await.unwrap();
        assert!(queue.has_any_of("small") && queue.has_any_of("large") && !queue.has_any_of("other"));
        assert_eq!(queue.unacknowledged(), 3);
        // A delivery that is dropped is given back.
        let last = [(); 3].map(|()| received(&queue).unwrap());
        let order = last.each_ref().map(|(_, name)| name);
        assert_eq!(order, ["large0", "small2", "large4"], "what was given back comes next");
        assert!(queue.has_any_of("small"), "it is delivered");
    }
}
