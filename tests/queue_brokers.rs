//! Real brokers for the tests of queues: addresses from the environment, topics and queues that no other test uses.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use gristmill::queue::{Delivery, Message, Publisher, Queue, QueueUrl, Settings, connect};

use crate::contract;

pub(crate) use crate::services::need;

/// Long enough for whatever a broker has to do.
pub(crate) const SOON: Duration = Duration::from_secs(40);

fn unique(name: &str) -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::SeqCst);
    let nanos = std::time::UNIX_EPOCH.elapsed().map_or(0, |time| time.subsec_nanos());
    format!("{name}-{}-{nanos}-{number}", std::process::id())
}

/// A fresh topic with so many partitions, made by the first who prepares it.
pub(crate) fn kafka_url(address: &str, name: &str, partitions: u32) -> QueueUrl {
    let topic = unique(name);
    format!("kafka://{address}/{topic}?partitions={partitions}")
        .parse()
        .unwrap()
}

/// A fresh queue; `query` begins with `?` or is empty.
pub(crate) fn rabbit_url(address: &str, name: &str, query: &str) -> QueueUrl {
    format!("{address}/%2f/{}{query}", unique(name)).parse().unwrap()
}

/// Short times, so that tests need not wait.
pub(crate) fn settings() -> Settings {
    Settings {
        kafka: [("session.timeout.ms", "6000"), ("heartbeat.interval.ms", "500")]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into(),
        in_flight: contract::IN_FLIGHT,
        pass_on_delay: Duration::from_millis(200),
        ..Settings::default()
    }
}

pub(crate) fn messages(numbers: std::ops::Range<u32>) -> Vec<Message> {
    numbers
        .map(|shard| Message::new("contract", "memory:///contract", 0, shard))
        .collect()
}

/// With `RUST_LOG=gristmill=debug`, tests show what queues say.
fn show_log() {
    // The first test of the process sets it up for all.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_test_writer()
        .try_init();
}

pub(crate) async fn fill(url: &QueueUrl, messages: &[Message]) {
    show_log();
    let publisher = Publisher::open(url, &settings()).await.unwrap();
    publisher.prepare(u64::try_from(messages.len()).unwrap()).await.unwrap();
    publisher.send(messages).await.unwrap();
}

pub(crate) async fn filled(url: &QueueUrl, messages: &[Message]) -> Arc<dyn Queue> {
    fill(url, messages).await;
    connect(url, &settings()).await.unwrap()
}

pub(crate) async fn receive(queue: &dyn Queue) -> Delivery {
    queue.receive(SOON).await.unwrap().expect("a message comes")
}

/// Waits until the queue is attached.
pub(crate) async fn attached(queue: &dyn Queue) {
    let start = Instant::now();
    while !queue.is_attached() {
        assert!(start.elapsed() < SOON, "the queue is attached in the end");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Acknowledges whatever comes until `wanted` were seen; how often each came.
pub(crate) async fn drain(queue: &dyn Queue, wanted: &BTreeSet<u32>) -> Vec<u32> {
    let start = Instant::now();
    let mut came = Vec::new();
    while !wanted.iter().all(|shard| came.contains(shard)) {
        assert!(start.elapsed() < SOON, "wanted {wanted:?}, came {came:?}");
        if let Some(delivery) = queue.receive(Duration::from_millis(200)).await.unwrap() {
            queue.acknowledge(&delivery).await.unwrap();
            came.push(delivery.message.shard);
        }
    }
    came
}

pub(crate) async fn expect_nothing(queue: &dyn Queue, time: Duration) {
    let found = queue.receive(time).await.unwrap();
    assert!(found.is_none(), "nothing may come, {found:?} came");
}
