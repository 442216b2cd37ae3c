//! Every queue passes the contract.

use std::sync::Arc;
use std::time::Duration;

use gristmill::queue::{LocalQueue, Queue};

use crate::contract;

use crate::queue_brokers::{filled, kafka_url, need, rabbit_url};

/// How long a broker's message that must not come is waited for.
const NEVER: Duration = Duration::from_millis(1500);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_local_queue() {
    let never = Duration::from_millis(300);
    contract::check(never, |messages| async move {
        Arc::new(LocalQueue::new(messages)) as Arc<dyn Queue>
    })
    .await;
}

#[tokio::test]
async fn the_local_queue_counts_what_is_not_acknowledged() {
    let queue = LocalQueue::new([
        gristmill::queue::Message::new("a", "memory:///a", 0, 0),
        gristmill::queue::Message::new("a", "memory:///a", 0, 1),
    ]);
    let delivery = queue.receive(std::time::Duration::ZERO).await.unwrap().unwrap();
    assert_eq!(queue.unacknowledged(), 2);
    queue.acknowledge(&delivery).await.unwrap();
    drop(delivery);
    assert_eq!(queue.unacknowledged(), 1);
}

async fn over_kafka(address: &str, partitions: u32) {
    contract::check(NEVER, |messages| async move {
        filled(&kafka_url(address, "contract", partitions), &messages).await
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kafka_with_one_partition() {
    if let Some(address) = need("kafka_with_one_partition", "GRISTMILL_TEST_KAFKA") {
        over_kafka(&address, 1).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kafka_with_partitions() {
    if let Some(address) = need("kafka_with_partitions", "GRISTMILL_TEST_KAFKA") {
        over_kafka(&address, 4).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rabbitmq() {
    let Some(address) = need("rabbitmq", "GRISTMILL_TEST_RABBITMQ") else {
        return;
    };
    contract::check(NEVER, |messages| {
        let url = rabbit_url(&address, "contract", "");
        async move { filled(&url, &messages).await }
    })
    .await;
}
