//! Kafka for real: rebalances, foreign messages, a stuck worker, a topic made anew, a broker killed.

use std::collections::BTreeSet;
use std::time::Duration;

use gristmill::queue::{HOPS_MAX, PreparedQueue, Publisher, Queue, QueueError, QueueUrl, Settings, connect};
use rdkafka::admin::{AdminClient, AdminOptions};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::message::{Headers, Message as _};
use rdkafka::mocking::MockCluster;
use rdkafka::producer::{FutureProducer, FutureRecord, Producer as _};
use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};
use rdkafka::{ClientConfig, Offset};

use crate::queue_brokers::{
    SOON, attached, drain, expect_nothing, fill, filled, kafka_url, messages, need, receive, settings,
};
use crate::services::{Action, control};
use crate::support::passed;

fn topic(url: &QueueUrl) -> &str {
    match url {
        QueueUrl::Kafka(url) => &url.topic,
        QueueUrl::RabbitMq(_) => panic!("a Kafka address"),
    }
}

/// Of every partition: the end, and what the group has committed.
fn offsets(address: &str, url: &QueueUrl, partitions: i32) -> Vec<(i64, i64)> {
    let QueueUrl::Kafka(kafka) = url else {
        panic!("a Kafka address")
    };
    let consumer: BaseConsumer = ClientConfig::new()
        .set("bootstrap.servers", address)
        .set("group.id", &kafka.group)
        .create()
        .unwrap();
    (0..partitions)
        .map(|partition| {
            let (_, end) = consumer.fetch_watermarks(&kafka.topic, partition, SOON).unwrap();
            let mut list = rdkafka::TopicPartitionList::new();
            list.add_partition(&kafka.topic, partition);
            let committed = consumer.committed_offsets(list, SOON).unwrap();
            let committed = committed.elements()[0].offset().to_raw().unwrap();
            (end, committed)
        })
        .collect()
}

/// Messages of the topic's only partition that were passed on: their bytes, and their hops.
fn resent(address: &str, url: &QueueUrl, which: std::ops::Range<i64>) -> Vec<(Vec<u8>, String)> {
    let consumer: BaseConsumer = ClientConfig::new()
        .set("bootstrap.servers", address)
        // Of no group that works on the topic.
        .set("group.id", "who-looks-on")
        .set("enable.auto.commit", "false")
        .create()
        .unwrap();
    let mut from = rdkafka::TopicPartitionList::new();
    from.add_partition_offset(topic(url), 0, Offset::Offset(which.start))
        .unwrap();
    consumer.assign(&from).unwrap();
    which
        .map(|_| {
            let message = consumer.poll(SOON).expect("it is there").unwrap();
            let headers = message.headers().expect("it was passed on");
            let mut hops = headers.iter().filter(|header| header.key == "gristmill-hops");
            let hops = hops.next().and_then(|header| header.value).expect("its hops");
            let body = message.payload().unwrap_or_default();
            (body.to_vec(), String::from_utf8(hops.to_vec()).unwrap())
        })
        .collect()
}

async fn delete_topic(address: &str, url: &QueueUrl) {
    let admin: AdminClient<DefaultClientContext> =
        ClientConfig::new().set("bootstrap.servers", address).create().unwrap();
    let options = AdminOptions::new().operation_timeout(Some(SOON));
    admin.delete_topics(&[topic(url)], &options).await.unwrap()[0]
        .as_ref()
        .unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kafka_topics_are_made_once_and_left_alone() {
    let Some(address) = need("kafka_topics", "GRISTMILL_TEST_KAFKA") else {
        return;
    };
    let chosen = kafka_url(&address, "made", 3);
    let url: QueueUrl = format!("kafka://{address}/{}-b", topic(&chosen)).parse().unwrap();
    for (url, partitions) in [(&chosen, 3), (&url, 96)] {
        let publisher = Publisher::open(url, &settings()).await.unwrap();
        for created in [true, false] {
            let partitions = Some(partitions);
            assert_eq!(
                publisher.prepare(1000).await.unwrap(),
                PreparedQueue { created, partitions }
            );
        }
    }
}

/// The broker makes topics by itself, as brokers do: neither a worker that is there first nor the publisher may bring it to
/// that, for such a topic has one partition.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kafka_topics_are_made_by_nobody_but_the_publisher() {
    let Some(address) = need("kafka_made_by_nobody_else", "GRISTMILL_TEST_KAFKA") else {
        return;
    };
    let raw: FutureProducer = ClientConfig::new().set("bootstrap.servers", &address).create().unwrap();
    let other = kafka_url(&address, "by-the-broker", 3);
    let made_by_the_broker = || {
        let seen = raw.client().fetch_metadata(Some(topic(&other)), SOON).unwrap();
        seen.topics()[0].partitions().len()
    };
    let start = std::time::Instant::now();
    while made_by_the_broker() != 1 {
        assert!(start.elapsed() < SOON, "this broker makes no topics: nothing is shown");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }

    let url = kafka_url(&address, "by-us", 3);
    let queue = connect(&url, &settings()).await.unwrap();
    // Long enough that the worker asks again, and again.
    expect_nothing(&*queue, Duration::from_secs(3)).await;
    let publisher = Publisher::open(&url, &settings()).await.unwrap();
    let (created, partitions) = (true, Some(3));
    assert_eq!(
        publisher.prepare(6).await.unwrap(),
        PreparedQueue { created, partitions }
    );
    publisher.send(&messages(0..6)).await.unwrap();
    drain(&*queue, &(0..6).collect()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kafka_messages_of_others_do_not_stop_the_queue() {
    let Some(address) = need("kafka_messages_of_others", "GRISTMILL_TEST_KAFKA") else {
        return;
    };
    let url = kafka_url(&address, "foreign", 1);
    fill(&url, &messages(0..1)).await;
    let producer: FutureProducer = ClientConfig::new().set("bootstrap.servers", &address).create().unwrap();
    // Spaces and the order of fields are no business of ours.
    let newer = br#"{ "what":"ever", "v":7 }"#;
    for body in [&b"\xffnothing of ours"[..], newer] {
        let record: FutureRecord<'_, (), [u8]> = FutureRecord::to(topic(&url)).payload(body);
        producer.send(record, SOON).await.unwrap();
    }
    fill(&url, &messages(1..2)).await;
    let queue = connect(&url, &settings()).await.unwrap();
    assert_eq!(drain(&*queue, &[0, 1].into()).await, [0, 1]);
    // The newer one is sent again a few times, then left.
    expect_nothing(
        &*queue,
        settings().pass_on_delay * (HOPS_MAX * 3 / 2) + Duration::from_secs(3),
    )
    .await;
    drop(queue);
    let end = 4 + i64::from(HOPS_MAX);
    assert_eq!(offsets(&address, &url, 1), [(end, end)]);
    let again = resent(&address, &url, 4..end);
    let hops = (1..=i64::from(HOPS_MAX)).map(|hops| (newer.to_vec(), hops.to_string()));
    assert_eq!(again, hops.collect::<Vec<_>>());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kafka_commits_only_the_finished_prefix() {
    let Some(address) = need("kafka_prefix", "GRISTMILL_TEST_KAFKA") else {
        return;
    };
    let url = kafka_url(&address, "prefix", 1);
    let queue = filled(&url, &messages(0..5)).await;
    let mut held = Vec::new();
    for _ in 0..5 {
        held.push(receive(&*queue).await);
    }
    for place in [0, 1, 3, 4] {
        queue.acknowledge(&held[place]).await.unwrap();
    }
    drop(queue);
    assert_eq!(offsets(&address, &url, 1), [(5, 2)]);
    let queue = connect(&url, &settings()).await.unwrap();
    assert_eq!(drain(&*queue, &[2, 3, 4].into()).await, [2, 3, 4]);
}

/// A second worker joins and leaves: nothing is lost, and nothing comes twice but what was out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kafka_rebalances_lose_and_repeat_nothing() {
    let Some(address) = need("kafka_rebalances", "GRISTMILL_TEST_KAFKA") else {
        return;
    };
    let url = kafka_url(&address, "rebalance", 4);
    let few = Settings {
        in_flight: 4,
        ..settings()
    };
    // One in each partition: whichever of them go to the second, the first has a delivery of theirs.
    fill(&url, &messages(0..4)).await;
    let first = connect(&url, &few).await.unwrap();
    let mut held = Vec::new();
    let mut acknowledged = Vec::new();
    for _ in 0..4 {
        held.push(receive(&*first).await);
    }
    fill(&url, &messages(4..60)).await;
    let out: BTreeSet<u32> = held.iter().map(|delivery| delivery.message.shard).collect();

    let second = connect(&url, &few).await.unwrap();
    let recall = tokio::time::timeout(SOON, first.next_recall()).await.unwrap();
    assert!(recall.why.contains("to another worker"), "{}", recall.why);
    let (mut going, mut kept): (Vec<_>, Vec<_>) = held
        .into_iter()
        .partition(|delivery| recall.receipts.contains(&delivery.receipt));
    assert_eq!(going.len(), recall.receipts.len(), "what is recalled was held");
    assert!(going.len() > 1, "one is given back, and one is held for a while");
    let given_back = going.pop().map(|delivery| delivery.message.shard);
    // The partitions go when the last of their deliveries is let go of. Until then the worker gets nothing that lies in them, neither
    // what was fetched before nor what it gave back: it could not acknowledge that any more.
    while let Some(delivery) = first.receive(Duration::from_millis(500)).await.unwrap() {
        assert_ne!(Some(delivery.message.shard), given_back);
        first.acknowledge(&delivery).await.unwrap();
        acknowledged.push(delivery.message.shard);
    }
    drop((recall, going));
    for delivery in kept.drain(..) {
        first.acknowledge(&delivery).await.unwrap();
        acknowledged.push(delivery.message.shard);
    }
    // Both work for a while, then the second leaves.
    let (mut by_second, start) = (0, std::time::Instant::now());
    while by_second < 10 && start.elapsed() < SOON {
        for queue in [&first, &second] {
            if let Some(delivery) = queue.receive(Duration::from_millis(100)).await.unwrap() {
                queue.acknowledge(&delivery).await.unwrap();
                acknowledged.push(delivery.message.shard);
                by_second += u32::from(std::sync::Arc::ptr_eq(queue, &second));
            }
        }
    }
    assert_eq!(by_second, 10, "the second got its share");
    drop(second);
    let missing: BTreeSet<u32> = (0..60).filter(|shard| !acknowledged.contains(shard)).collect();
    acknowledged.extend(drain(&*first, &missing).await);
    expect_nothing(&*first, Duration::from_secs(2)).await;
    let twice = acknowledged.len() - 60;
    let again: BTreeSet<u32> = (0..60)
        .filter(|shard| acknowledged.iter().filter(|other| *other == shard).count() > 1)
        .collect();
    assert!(
        again.is_subset(&out) && twice <= out.len(),
        "{again:?} came twice, {out:?} were out; in this order: {acknowledged:?}"
    );
    drop(first);
    assert!(
        offsets(&address, &url, 4)
            .iter()
            .all(|(end, committed)| end == committed)
    );
}

/// A worker more than partitions has nothing to wait for: the group says so, and tells that from not having answered yet.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kafka_a_member_without_partitions_is_attached() {
    let Some(address) = need("kafka_without_partitions", "GRISTMILL_TEST_KAFKA") else {
        return;
    };
    let url = kafka_url(&address, "spare", 1);
    fill(&url, &messages(0..1)).await;
    let queues = [
        connect(&url, &settings()).await.unwrap(),
        connect(&url, &settings()).await.unwrap(),
    ];
    for queue in &queues {
        attached(&**queue).await;
    }
    let mut came = 0;
    for queue in &queues {
        came += u32::from(queue.receive(Duration::from_secs(2)).await.unwrap().is_some());
        assert!(queue.is_attached());
    }
    assert!(came >= 1);
}

/// What nobody extends goes to another worker, and the stuck one comes back when it moves on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kafka_a_stuck_worker_lets_go() {
    let Some(address) = need("kafka_stuck", "GRISTMILL_TEST_KAFKA") else {
        return;
    };
    let url = kafka_url(&address, "stuck", 2);
    fill(&url, &messages(0..6)).await;
    let impatient = Settings {
        first_lease: Duration::from_secs(2),
        ..settings()
    };
    let stuck = connect(&url, &impatient).await.unwrap();
    let held = receive(&*stuck).await;
    let recall = tokio::time::timeout(SOON, async {
        loop {
            let recall = stuck.next_recall().await;
            if recall.why.contains("progress") {
                return recall;
            }
        }
    })
    .await
    .unwrap();
    assert_eq!(recall.receipts, [held.receipt]);
    let second = connect(&url, &settings()).await.unwrap();
    drain(&*second, &(0..6).collect()).await;
    assert!(!stuck.is_attached(), "it has left the group");
    drop((recall, held));
    fill(&url, &messages(6..12)).await;
    let start = std::time::Instant::now();
    let mut came = 0;
    while came == 0 {
        assert!(start.elapsed() < SOON, "the worker that moves on gets messages again");
        for queue in [&stuck, &second] {
            if let Some(delivery) = queue.receive(Duration::from_millis(200)).await.unwrap() {
                queue.acknowledge(&delivery).await.unwrap();
                came += u32::from(std::sync::Arc::ptr_eq(queue, &stuck));
            }
        }
        if start.elapsed() > Duration::from_secs(5) {
            fill(&url, &messages(12..16)).await;
        }
    }
}

/// Waits until `receive` says that access is refused (`true`), or no longer; takes and acknowledges what comes meanwhile.
async fn until_refused(queue: &dyn Queue, refused: bool) -> Vec<u32> {
    let start = std::time::Instant::now();
    let mut came = Vec::new();
    loop {
        assert!(start.elapsed() < SOON, "refused: {refused}");
        let received = queue.receive(Duration::from_millis(100)).await;
        if let Ok(Some(delivery)) = &received {
            queue.acknowledge(delivery).await.unwrap();
            came.push(delivery.message.shard);
        }
        match received {
            Err(QueueError::Denied { .. }) if refused => return came,
            Ok(_) if !refused && queue.is_attached() => return came,
            Ok(_) | Err(QueueError::Denied { .. }) => tokio::time::sleep(Duration::from_millis(20)).await,
            Err(error) => panic!("{error}"),
        }
    }
}

/// A refusal that is over is forgotten, whether messages follow it or not; one that lasts is said again and again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kafka_a_passing_refusal_passes() {
    let refusal = RDKafkaRespErr::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED;
    // librdkafka's own: it refuses what it is told to.
    let cluster = MockCluster::new(1).unwrap();
    cluster.create_topic("t", 1, 1).unwrap();
    let url: QueueUrl = format!("kafka://{}/t", cluster.bootstrap_servers()).parse().unwrap();
    let queue = filled(&url, &messages(0..1)).await;
    drain(&*queue, &[0].into()).await;

    let begin = || cluster.request_errors(RDKafkaApiKey::Fetch, &[refusal; 1000]);
    let end = || cluster.clear_request_errors(RDKafkaApiKey::Fetch);
    begin();
    until_refused(&*queue, true).await;
    end();
    until_refused(&*queue, false).await;

    begin();
    until_refused(&*queue, true).await;
    fill(&url, &messages(1..3)).await;
    end();
    let mut came = until_refused(&*queue, false).await;
    came.extend(drain(&*queue, &(1..3).filter(|shard| !came.contains(shard)).collect()).await);
    assert_eq!(came, [1, 2]);

    begin();
    for _ in 0..3 {
        until_refused(&*queue, true).await;
        tokio::time::sleep(Duration::from_secs(3)).await;
    }
    end();
    fill(&url, &messages(3..4)).await;
    let came = until_refused(&*queue, false).await;
    let missing = [3].into_iter().filter(|shard| !came.contains(shard)).collect();
    drain(&*queue, &missing).await;
}

/// Deleted and made anew, slowly and at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kafka_a_topic_made_anew_goes_on() {
    let Some(address) = need("kafka_made_anew", "GRISTMILL_TEST_KAFKA") else {
        return;
    };
    for pause_s in [6, 0] {
        let url = kafka_url(&address, "anew", 2);
        let queue = filled(&url, &messages(0..8)).await;
        let held = receive(&*queue).await;
        drain(&*queue, &(0..8).filter(|&shard| shard != held.message.shard).collect()).await;
        // Until what is finished is committed.
        tokio::time::sleep(Duration::from_secs(1)).await;
        delete_topic(&address, &url).await;
        tokio::time::sleep(Duration::from_secs(pause_s)).await;
        fill(&url, &messages(100..130)).await;
        if pause_s > 0 {
            let came = drain(&*queue, &(100..130).collect()).await;
            assert_eq!(came.len(), 30, "{came:?}");
        }
        // Made anew at once, it may be read from the old one's position on (`reconcile` enqueues what that passes over):
        // what is sent later comes in any case.
        while let Some(delivery) = queue.receive(Duration::from_secs(12)).await.unwrap() {
            queue.acknowledge(&delivery).await.unwrap();
        }
        fill(&url, &messages(200..230)).await;
        drain(&*queue, &(200..230).collect()).await;
        queue.acknowledge(&held).await.unwrap();
        drop(queue);
        assert!(
            offsets(&address, &url, 2)
                .iter()
                .all(|(end, committed)| end == committed)
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "kills the broker: run it alone, with `--ignored --test-threads 1`"]
async fn alone_kafka_killed_and_restarted() {
    let Some(address) = need("alone_kafka_killed", "GRISTMILL_TEST_KAFKA") else {
        return;
    };
    let began = std::time::Instant::now();
    let url = kafka_url(&address, "killed", 3);
    let queue = filled(&url, &messages(0..30)).await;
    let held = receive(&*queue).await;
    for seconds in [1, 15] {
        control("kafka", Action::Kill);
        tokio::time::sleep(Duration::from_secs(seconds)).await;
        assert!(
            queue.receive(Duration::from_millis(500)).await.is_ok(),
            "an outage is no error"
        );
        assert!(seconds < 10 || !queue.is_attached(), "a longer one is noticed");
        control("kafka", Action::Start);
        let delivery = receive(&*queue).await;
        queue.acknowledge(&delivery).await.unwrap();
        attached(&*queue).await;
    }
    queue.acknowledge(&held).await.unwrap();
    drop(held);
    let start = std::time::Instant::now();
    while offsets(&address, &url, 3)
        .iter()
        .any(|(end, committed)| end != committed)
    {
        assert!(start.elapsed() < SOON, "{:?}", offsets(&address, &url, 3));
        if let Some(delivery) = queue.receive(Duration::from_millis(300)).await.unwrap() {
            queue.acknowledge(&delivery).await.unwrap();
        }
    }
    passed("alone_kafka_killed", None, began, serde_json::json!({"faults": 2}));
}
