//! Every queue passes the contract.

use std::sync::Arc;
use std::time::Duration;

use gristmill::queue::{LocalQueue, Queue, contract};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_local_queue() {
    contract::check(Duration::from_millis(300), |messages| async move {
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
