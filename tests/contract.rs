//! The contract of every queue as checks that panic on a violation. Tests run them on each
//! implementation.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use gristmill::queue::{Delivery, HOPS_MAX, Message, Queue};

/// Timeout for a message that is in the queue.
const SOON: Duration = Duration::from_secs(30);

/// Runs every check. `fill` creates a fresh queue that holds the given messages and allows at least
/// [`IN_FLIGHT`] outstanding deliveries. `never` is how long a check waits for a message that must
/// not come.
pub(crate) async fn check<F, Fut>(never: Duration, fill: F)
where
    F: Fn(Vec<Message>) -> Fut,
    Fut: Future<Output = Arc<dyn Queue>>,
{
    let checker = Checker { never };
    checker.an_empty_queue_gives_nothing(&*fill(vec![]).await).await;
    checker
        .a_queue_is_attached_before_anything_comes(&*fill(messages(1)).await)
        .await;
    checker
        .every_message_comes_once_when_acknowledged(&*fill(messages(20)).await)
        .await;
    checker.what_is_given_back_comes_again(&*fill(messages(3)).await).await;
    checker.what_is_dropped_comes_again(&*fill(messages(3)).await).await;
    checker
        .acknowledging_out_of_order_leaves_no_gap(&*fill(messages(10)).await)
        .await;
    checker
        .answers_may_repeat_and_come_late(&*fill(messages(2)).await)
        .await;
    checker.an_extended_delivery_stays_ours(&*fill(messages(1)).await).await;
    deliveries_outlive_their_queue(fill(messages(2)).await).await;
    receivers_share_the_messages(fill(messages(30)).await).await;
    a_waiting_receiver_gets_what_is_given_back(fill(messages(1)).await).await;
    receiving_waits_as_long_as_asked(&*fill(vec![]).await).await;
    nobody_recalls_without_a_reason(&*fill(messages(1)).await).await;
    checker
        .what_is_passed_on_comes_again_a_few_times(&*fill(messages(1)).await)
        .await;
}

/// Number of deliveries that the checks hold at once.
pub(crate) const IN_FLIGHT: u32 = 10;

struct Checker {
    /// How long to wait for a message that must not come.
    never: Duration,
}

fn messages(count: u32) -> Vec<Message> {
    (0..count)
        .map(|shard| Message::new("contract", "memory:///contract", 0, shard))
        .collect()
}

async fn receive(queue: &dyn Queue) -> Delivery {
    queue
        .receive(SOON)
        .await
        .expect("receive works")
        .expect("a message is there")
}

impl Checker {
    async fn expect_nothing(&self, queue: &dyn Queue) {
        let found = queue.receive(self.never).await.expect("receive works");
        assert!(found.is_none(), "nothing may come, {found:?} came");
    }

    /// Receives and acknowledges until no message comes, and returns the shards in order of
    /// arrival.
    async fn drain(&self, queue: &dyn Queue) -> Vec<u32> {
        let mut shards = Vec::new();
        while let Some(delivery) = queue.receive(self.never).await.expect("receive works") {
            shards.push(delivery.message.shard);
            queue.acknowledge(&delivery).await.expect("acknowledge works");
        }
        shards
    }

    /// An empty queue becomes attached and stays so.
    async fn an_empty_queue_gives_nothing(&self, queue: &dyn Queue) {
        let start = Instant::now();
        while !queue.is_attached() {
            assert!(start.elapsed() < SOON, "an empty queue is attached soon");
            self.expect_nothing(queue).await;
        }
        self.expect_nothing(queue).await;
        assert!(
            queue.is_attached(),
            "nothing came of an attached queue, and it stays attached"
        );
    }

    async fn a_queue_is_attached_before_anything_comes(&self, queue: &dyn Queue) {
        let delivery = receive(queue).await;
        assert!(queue.is_attached(), "what gives messages is attached");
        queue.acknowledge(&delivery).await.expect("acknowledge works");
    }

    async fn every_message_comes_once_when_acknowledged(&self, queue: &dyn Queue) {
        let mut shards = Vec::new();
        for _ in 0..20 {
            let delivery = receive(queue).await;
            assert_eq!((delivery.message.job.as_str(), delivery.deliveries), ("contract", 1));
            queue.acknowledge(&delivery).await.expect("acknowledge works");
            shards.push(delivery.message.shard);
        }
        self.expect_nothing(queue).await;
        shards.sort_unstable();
        assert_eq!(shards, (0..20).collect::<Vec<_>>());
    }

    async fn what_is_given_back_comes_again(&self, queue: &dyn Queue) {
        let first = receive(queue).await;
        let shard = first.message.shard;
        queue.give_back(&first).await.expect("give back works");
        drop(first);
        let mut rest = self.drain(queue).await;
        rest.sort_unstable();
        assert_eq!(
            rest,
            [0, 1, 2],
            "shard {shard} was given back and must come again, once"
        );
    }

    async fn what_is_dropped_comes_again(&self, queue: &dyn Queue) {
        let dropped = receive(queue).await;
        let kept = receive(queue).await;
        drop(dropped);
        queue.acknowledge(&kept).await.expect("acknowledge works");
        let rest: BTreeSet<u32> = self.drain(queue).await.into_iter().collect();
        let all: BTreeSet<u32> = (0..3).filter(|&shard| shard != kept.message.shard).collect();
        assert_eq!(rest, all);
    }

    async fn acknowledging_out_of_order_leaves_no_gap(&self, queue: &dyn Queue) {
        let mut held = Vec::new();
        for _ in 0..10 {
            held.push(receive(queue).await);
        }
        // The later half is acknowledged and the earlier half is lost: every lost message must come
        // again.
        let lost: BTreeSet<u32> = held.drain(..5).map(|delivery| delivery.message.shard).collect();
        for delivery in held.iter().rev() {
            queue.acknowledge(delivery).await.expect("acknowledge works");
        }
        drop(held);
        let again: BTreeSet<u32> = self.drain(queue).await.into_iter().collect();
        assert!(lost.is_subset(&again), "lost {lost:?}, came again {again:?}");
    }

    async fn answers_may_repeat_and_come_late(&self, queue: &dyn Queue) {
        let first = receive(queue).await;
        for _ in 0..2 {
            queue
                .acknowledge(&first)
                .await
                .expect("acknowledging twice is harmless");
        }
        queue
            .give_back(&first)
            .await
            .expect("giving back after acknowledging is harmless");
        let second = receive(queue).await;
        assert_ne!(
            first.message.shard, second.message.shard,
            "an acknowledged message does not come again"
        );
        for _ in 0..2 {
            queue.give_back(&second).await.expect("giving back twice is harmless");
        }
        let again = receive(queue).await;
        // A delivery that was given back is not counted.
        assert_eq!((again.message.shard, again.deliveries), (second.message.shard, 1));
        // The first holder answers late, when another holds the message.
        queue.acknowledge(&second).await.expect("a late answer is harmless");
        drop(second);
        self.expect_nothing(queue).await;
        queue.give_back(&again).await.expect("give back works");
        assert_eq!(
            self.drain(queue).await,
            [again.message.shard],
            "a late answer must not lose the message"
        );
    }

    async fn an_extended_delivery_stays_ours(&self, queue: &dyn Queue) {
        let delivery = receive(queue).await;
        queue
            .extend(&delivery, Duration::from_secs(60))
            .await
            .expect("extend works");
        self.expect_nothing(queue).await;
        queue.acknowledge(&delivery).await.expect("acknowledge works");
        drop(delivery);
        self.expect_nothing(queue).await;
    }

    async fn what_is_passed_on_comes_again_a_few_times(&self, queue: &dyn Queue) {
        for hops in 0..=HOPS_MAX {
            let delivery = receive(queue).await;
            assert_eq!((delivery.message.shard, delivery.hops), (0, hops));
            let sent = queue.forward(&delivery).await.expect("pass on works");
            assert_eq!(sent, hops < HOPS_MAX);
        }
        self.expect_nothing(queue).await;
    }
}

async fn receivers_share_the_messages(queue: Arc<dyn Queue>) {
    let found = Arc::new(Mutex::new(Vec::new()));
    let receivers = (0..3).map(|_| {
        let (queue, found) = (queue.clone(), found.clone());
        tokio::spawn(async move {
            let start = Instant::now();
            while found.lock().expect("no receiver panics").len() < 30 && start.elapsed() < SOON {
                let next = queue.receive(Duration::from_millis(100)).await.expect("receive works");
                if let Some(delivery) = next {
                    queue.acknowledge(&delivery).await.expect("acknowledge works");
                    found.lock().expect("no receiver panics").push(delivery.message.shard);
                }
            }
        })
    });
    for receiver in futures::future::join_all(receivers).await {
        receiver.expect("a receiver ends");
    }
    let mut all = found.lock().expect("no receiver panics").clone();
    all.sort_unstable();
    assert_eq!(all, (0..30).collect::<Vec<_>>());
}

async fn a_waiting_receiver_gets_what_is_given_back(queue: Arc<dyn Queue>) {
    let held = receive(&*queue).await;
    let waiting = tokio::spawn({
        let queue = queue.clone();
        async move { receive(&*queue).await.message.shard }
    });
    tokio::time::sleep(Duration::from_millis(50)).await;
    queue.give_back(&held).await.expect("give back works");
    assert_eq!(waiting.await.expect("the receiver ends"), held.message.shard);
}

/// Answers to deliveries whose queue is gone are harmless.
async fn deliveries_outlive_their_queue(queue: Arc<dyn Queue>) {
    let (first, second) = (receive(&*queue).await, receive(&*queue).await);
    queue.acknowledge(&first).await.expect("acknowledge works");
    queue.give_back(&second).await.expect("give back works");
    drop(queue);
    drop((first, second));
}

async fn receiving_waits_as_long_as_asked(queue: &dyn Queue) {
    let start = Instant::now();
    let wait = Duration::from_millis(200);
    assert!(queue.receive(wait).await.expect("receive works").is_none());
    let waited = start.elapsed();
    assert!(waited >= wait && waited < wait + Duration::from_secs(2), "{waited:?}");
    assert!(queue.receive(Duration::ZERO).await.expect("receive works").is_none());
}

async fn nobody_recalls_without_a_reason(queue: &dyn Queue) {
    let delivery = receive(queue).await;
    let recalled = tokio::time::timeout(Duration::from_millis(300), queue.next_recall()).await;
    assert!(recalled.is_err(), "nothing is to be recalled: {recalled:?}");
    queue.acknowledge(&delivery).await.expect("acknowledge works");
}
