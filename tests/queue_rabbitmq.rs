//! RabbitMQ for real: foreign messages, a queue made anew, acknowledgement timeouts, alarms, a broker killed.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use gristmill::queue::{HOPS_MAX, PreparedQueue, Publisher, QueueUrl, Settings, connect};
use lapin::options::{BasicPublishOptions, QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Connection, ConnectionProperties};

use crate::queue_brokers::{
    SOON, attached, drain, expect_nothing, fill, filled, messages, need, rabbit_url, receive, settings,
};
use crate::services::{Action, MemoryAlarm, control, rabbitmqctl};
use crate::support::passed;

fn name(url: &QueueUrl) -> &str {
    match url {
        QueueUrl::RabbitMq(url) => &url.queue,
        QueueUrl::Kafka(_) => panic!("a RabbitMQ address"),
    }
}

pub(crate) async fn channel(address: &str) -> (Connection, lapin::Channel) {
    let connection = Connection::connect(&format!("{address}/%2f"), ConnectionProperties::default())
        .await
        .unwrap();
    let channel = connection.create_channel().await.unwrap();
    (connection, channel)
}

/// Messages that are ready.
async fn ready(address: &str, url: &QueueUrl) -> u32 {
    let (_connection, channel) = channel(address).await;
    let options = QueueDeclareOptions {
        passive: true,
        ..QueueDeclareOptions::default()
    };
    let queue = channel
        .queue_declare(name(url).into(), options, FieldTable::default())
        .await;
    queue.unwrap().message_count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rabbitmq_queues_are_made_once_and_left_alone() {
    let Some(address) = need("rabbitmq_queues", "GRISTMILL_TEST_RABBITMQ") else {
        return;
    };
    let url = rabbit_url(&address, "made", "");
    let publisher = Publisher::open(&url, &settings()).await.unwrap();
    for created in [true, false] {
        let partitions = None;
        assert_eq!(
            publisher.prepare(10).await.unwrap(),
            PreparedQueue { created, partitions }
        );
    }
    // A classic queue that somebody made is used as it is.
    let url = rabbit_url(&address, "classic", "");
    let (_connection, channel) = channel(&address).await;
    let options = QueueDeclareOptions {
        durable: true,
        ..QueueDeclareOptions::default()
    };
    channel
        .queue_declare(name(&url).into(), options, FieldTable::default())
        .await
        .unwrap();
    let queue = filled(&url, &messages(0..3)).await;
    drain(&*queue, &(0..3).collect()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rabbitmq_messages_of_others_do_not_stop_the_queue() {
    let Some(address) = need("rabbitmq_messages_of_others", "GRISTMILL_TEST_RABBITMQ") else {
        return;
    };
    let url = rabbit_url(&address, "foreign", "");
    fill(&url, &messages(0..1)).await;
    let (_connection, channel) = channel(&address).await;
    for body in [&b"\xffnothing of ours"[..], br#"{"v":7,"what":"ever"}"#] {
        let sent = channel.basic_publish(
            "".into(),
            name(&url).into(),
            BasicPublishOptions::default(),
            body,
            BasicProperties::default(),
        );
        sent.await.unwrap().await.unwrap();
    }
    fill(&url, &messages(1..2)).await;
    let queue = connect(&url, &settings()).await.unwrap();
    assert_eq!(drain(&*queue, &[0, 1].into()).await, [0, 1]);
    // The newer one is sent again a few times, then left; a worker that ends in between leaves it ready.
    let time = settings().pass_on_delay * (HOPS_MAX * 3 / 2) + Duration::from_secs(3);
    expect_nothing(&*queue, time).await;
    drop(queue);
    let began = Instant::now();
    while ready(&address, &url).await > 0 {
        assert!(began.elapsed() < SOON, "it was passed on more than {HOPS_MAX} times");
        let queue = connect(&url, &settings()).await.unwrap();
        expect_nothing(&*queue, time).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rabbitmq_what_a_worker_leaves_goes_to_another() {
    let Some(address) = need("rabbitmq_leaves", "GRISTMILL_TEST_RABBITMQ") else {
        return;
    };
    let url = rabbit_url(&address, "leaves", "");
    let first = filled(&url, &messages(0..20)).await;
    let held = receive(&*first).await;
    let second = connect(&url, &settings()).await.unwrap();
    let done = receive(&*first).await;
    first.acknowledge(&done).await.unwrap();
    drop(first);
    let wanted: BTreeSet<u32> = (0..20).filter(|&shard| shard != done.message.shard).collect();
    let came = drain(&*second, &wanted).await;
    assert_eq!(came.len(), 19, "each once: {came:?}");
    drop(held);
    expect_nothing(&*second, Duration::from_millis(500)).await;
}

/// Deleted and made anew, slowly and at once: of the latter the broker says nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rabbitmq_a_queue_made_anew_goes_on() {
    let Some(address) = need("rabbitmq_made_anew", "GRISTMILL_TEST_RABBITMQ") else {
        return;
    };
    for pause_s in [3, 0] {
        let url = rabbit_url(&address, "anew", "");
        let queue = filled(&url, &messages(0..3)).await;
        let held = receive(&*queue).await;
        let (_connection, channel) = channel(&address).await;
        channel
            .queue_delete(name(&url).into(), QueueDeleteOptions::default())
            .await
            .unwrap();
        tokio::time::sleep(Duration::from_secs(pause_s)).await;
        fill(&url, &messages(10..15)).await;
        queue.acknowledge(&held).await.unwrap();
        drop(held);
        // Of the old queue, what was fetched already may come.
        let mut came = drain(&*queue, &(10..15).collect()).await;
        came.retain(|&shard| shard >= 10);
        assert_eq!(came.len(), 5, "each once: {came:?}");
        expect_nothing(&*queue, Duration::from_millis(500)).await;
        drop(queue);
        assert_eq!(ready(&address, &url).await, 0);
    }
}

/// Takes ten messages of `url` and holds them until it is killed: what the test below starts as a process of its own.
async fn hold_until_killed(url: &str) {
    let queue = connect(&url.parse().unwrap(), &settings()).await.unwrap();
    let mut held = Vec::new();
    for _ in 0..10 {
        held.push(receive(&*queue).await);
    }
    println!("holds {}", held.len());
    std::future::pending::<()>().await;
}

fn killed_while_holding(test: &str, url: &str) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(HOLD, url)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.map_while(Result::ok).any(|line| line.contains("holds 10")));
    // SIGKILL.
    child.kill().unwrap();
    child.wait().unwrap();
}

/// Set for the process that holds: to the queue's address.
const HOLD: &str = "GRISTMILL_TEST_HOLD";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rabbitmq_what_killed_workers_held_comes_back() {
    if let Ok(url) = std::env::var(HOLD) {
        return hold_until_killed(&url).await;
    }
    let Some(address) = need("rabbitmq_killed_workers", "GRISTMILL_TEST_RABBITMQ") else {
        return;
    };
    let test = "queue_rabbitmq::rabbitmq_what_killed_workers_held_comes_back";
    // Made by us; then, as somebody may have made it, a quorum queue without a limit, and a classic one.
    for kind in [None, Some("quorum"), Some("classic")] {
        let written = format!(
            "{address}/%2f/killed-workers-{}-{}",
            std::process::id(),
            kind.unwrap_or("ours")
        );
        let url: QueueUrl = written.parse().unwrap();
        let (_connection, channel) = channel(&address).await;
        if let Some(kind) = kind {
            let options = QueueDeclareOptions {
                durable: true,
                ..QueueDeclareOptions::default()
            };
            let mut arguments = FieldTable::default();
            arguments.insert("x-queue-type".into(), AMQPValue::LongString(kind.into()));
            let made = channel.queue_declare(name(&url).into(), options, arguments).await;
            made.unwrap();
        }
        fill(&url, &messages(0..20)).await;
        for _ in 0..3 {
            killed_while_holding(test, &written);
        }
        let queue = connect(&url, &settings()).await.unwrap();
        let came = drain(&*queue, &(0..20).collect()).await;
        assert_eq!(came.len(), 20, "{kind:?}: each once: {came:?}");
        expect_nothing(&*queue, Duration::from_millis(500)).await;
        drop(queue);
        assert_eq!(ready(&address, &url).await, 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rabbitmq_long_work_is_recalled_before_the_broker_loses_patience() {
    let Some(address) = need("rabbitmq_recalled", "GRISTMILL_TEST_RABBITMQ") else {
        return;
    };
    let url = rabbit_url(&address, "recalled", "?ack_timeout=5");
    let queue = filled(&url, &messages(0..1)).await;
    let start = Instant::now();
    let held = receive(&*queue).await;
    queue.extend(&held, Duration::from_secs(100)).await.unwrap();
    let recall = tokio::time::timeout(SOON, queue.next_recall()).await.unwrap();
    let after = start.elapsed();
    assert!(
        after > Duration::from_secs(3) && after < Duration::from_secs(5),
        "{after:?}"
    );
    assert_eq!(recall.receipts, [held.receipt]);
    drop((held, recall));
    let again = receive(&*queue).await;
    assert_eq!(again.deliveries, 1, "it was given back in good order");
    // This time the worker does not listen: its message is given back all the same.
    let third = receive(&*queue).await;
    assert_eq!(third.deliveries, 2);
    queue.acknowledge(&again).await.unwrap();
    queue.acknowledge(&third).await.unwrap();
    drop(queue);
    assert_eq!(ready(&address, &url).await, 0);
}

/// Work on a shard may have ended, and its answer wait for a store: what is said before the broker loses patience counts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rabbitmq_an_answer_after_a_recall_counts_while_there_is_time() {
    let Some(address) = need("rabbitmq_answer_in_time", "GRISTMILL_TEST_RABBITMQ") else {
        return;
    };
    let url = rabbit_url(&address, "answer-in-time", "?ack_timeout=10");
    let queue = filled(&url, &messages(0..1)).await;
    let held = receive(&*queue).await;
    queue.extend(&held, Duration::from_secs(100)).await.unwrap();
    let recall = tokio::time::timeout(SOON, queue.next_recall()).await.unwrap();
    assert_eq!(recall.receipts, [held.receipt]);
    drop(recall);
    tokio::time::sleep(Duration::from_millis(500)).await;
    queue.acknowledge(&held).await.unwrap();
    expect_nothing(&*queue, Duration::from_secs(1)).await;
    drop((held, queue));
    assert_eq!(ready(&address, &url).await, 0);
}

/// What a worker was sent and does not ask for goes back before the acknowledgement timeout, and that accuses no row.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rabbitmq_what_nobody_asks_for_is_given_back_in_good_order() {
    let Some(address) = need("rabbitmq_unasked", "GRISTMILL_TEST_RABBITMQ") else {
        return;
    };
    let url = rabbit_url(&address, "unasked", "?ack_timeout=5");
    let queue = filled(&url, &messages(0..2)).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    for _ in 0..2 {
        let delivery = receive(&*queue).await;
        assert_eq!(delivery.deliveries, 1);
        queue.acknowledge(&delivery).await.unwrap();
    }
    drop(queue);
    assert_eq!(ready(&address, &url).await, 0);
}

/// Workers that end in good order accuse no message, however many there are: neither what they hold, nor what they were sent and did not
/// take, nor what is on its way to others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rabbitmq_what_is_given_back_in_good_order_does_not_count() {
    let Some(address) = need("rabbitmq_good_order", "GRISTMILL_TEST_RABBITMQ") else {
        return;
    };
    let url = rabbit_url(&address, "good-order", "");
    fill(&url, &messages(0..3)).await;
    for round in 1..=6 {
        let queue = connect(&url, &settings()).await.unwrap();
        let (held, passed_on) = (receive(&*queue).await, receive(&*queue).await);
        assert_eq!((held.deliveries, passed_on.deliveries), (1, 1), "round {round}");
        assert!(queue.forward(&passed_on).await.unwrap());
        drop((held, passed_on));
        drop(queue);
    }
    let queue = connect(&url, &settings()).await.unwrap();
    for _ in 0..3 {
        let delivery = receive(&*queue).await;
        assert_eq!(delivery.deliveries, 1);
        queue.acknowledge(&delivery).await.unwrap();
    }
    expect_nothing(&*queue, Duration::from_millis(500)).await;
    drop(queue);
    assert_eq!(ready(&address, &url).await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rabbitmq_a_stuck_worker_lets_go() {
    let Some(address) = need("rabbitmq_stuck", "GRISTMILL_TEST_RABBITMQ") else {
        return;
    };
    let url = rabbit_url(&address, "stuck", "");
    let impatient = Settings {
        first_lease: Duration::from_secs(1),
        ..settings()
    };
    fill(&url, &messages(0..5)).await;
    let stuck = connect(&url, &impatient).await.unwrap();
    let held = receive(&*stuck).await;
    let second = connect(&url, &settings()).await.unwrap();
    let recall = tokio::time::timeout(SOON, stuck.next_recall()).await.unwrap();
    assert_eq!(recall.receipts, [held.receipt]);
    drain(&*second, &(0..5).collect()).await;
    assert!(!stuck.is_attached(), "it consumes no more");
    drop((held, recall, second));
    fill(&url, &messages(5..7)).await;
    drain(&*stuck, &(5..7).collect()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "changes the node for everyone: run it alone, with `--ignored --test-threads 1`"]
async fn alone_rabbitmq_channel_closed_by_the_acknowledgement_timeout() {
    let Some(address) = need("alone_rabbitmq_timeout", "GRISTMILL_TEST_RABBITMQ") else {
        return;
    };
    let began = Instant::now();
    let url = rabbit_url(&address, "timeout", "");
    rabbitmqctl(&["eval", "application:set_env(rabbit, consumer_timeout, 2000)."]);
    let queue = filled(&url, &messages(0..4)).await;
    let held = receive(&*queue).await;
    tokio::time::sleep(Duration::from_secs(6)).await;
    rabbitmqctl(&["eval", "application:set_env(rabbit, consumer_timeout, 1800000)."]);
    let wanted: BTreeSet<u32> = (0..4).filter(|&shard| shard != held.message.shard).collect();
    drain(&*queue, &wanted).await;
    // The broker repeated what we hold: it is ours still, on another channel, and does not come twice.
    expect_nothing(&*queue, Duration::from_secs(3)).await;
    queue.acknowledge(&held).await.unwrap();
    drop((held, queue));
    assert_eq!(ready(&address, &url).await, 0);
    passed("alone_rabbitmq_timeout", None, began, serde_json::json!({"faults": 1}));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "changes the node for everyone: run it alone, with `--ignored --test-threads 1`"]
async fn alone_rabbitmq_memory_alarm_only_delays() {
    let Some(address) = need("alone_rabbitmq_alarm", "GRISTMILL_TEST_RABBITMQ") else {
        return;
    };
    let began = Instant::now();
    let url = rabbit_url(&address, "alarm", "");
    let queue = filled(&url, &messages(0..2)).await;
    let publisher = Publisher::open(&url, &settings()).await.unwrap();
    let alarm = MemoryAlarm::raise();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let sending = tokio::spawn(async move { publisher.send(&messages(2..4)).await });
    drain(&*queue, &(0..2).collect()).await;
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert!(!sending.is_finished(), "publishing waits");
    drop(alarm);
    tokio::time::timeout(SOON, sending).await.unwrap().unwrap().unwrap();
    drain(&*queue, &(2..4).collect()).await;
    passed("alone_rabbitmq_alarm", None, began, serde_json::json!({"faults": 1}));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "kills the broker: run it alone, with `--ignored --test-threads 1`"]
async fn alone_rabbitmq_killed_and_restarted() {
    let Some(address) = need("alone_rabbitmq_killed", "GRISTMILL_TEST_RABBITMQ") else {
        return;
    };
    let began = Instant::now();
    let url = rabbit_url(&address, "killed", "");
    let queue = filled(&url, &messages(0..30)).await;
    let held = receive(&*queue).await;
    let mut seen = Vec::new();
    // RabbitMQ 3.10 writes the names of new quorum queues down late: a queue of less than a second does not outlive its
    // node's SIGKILL, whatever its messages' confirmations said.
    tokio::time::sleep(Duration::from_secs(6)).await;
    for seconds in [1, 10] {
        control("rabbitmq", Action::Kill);
        tokio::time::sleep(Duration::from_secs(seconds)).await;
        assert!(!queue.is_attached());
        control("rabbitmq", Action::Start);
        let delivery = receive(&*queue).await;
        queue.acknowledge(&delivery).await.unwrap();
        attached(&*queue).await;
        seen.push(delivery.message.shard);
    }
    let held_shard = held.message.shard;
    queue.acknowledge(&held).await.unwrap();
    drop(held);
    let wanted: BTreeSet<u32> = (0..30)
        .filter(|shard| *shard != held_shard && !seen.contains(shard))
        .collect();
    drain(&*queue, &wanted).await;
    while let Some(delivery) = queue.receive(Duration::from_secs(2)).await.unwrap() {
        queue.acknowledge(&delivery).await.unwrap();
    }
    drop(queue);
    assert_eq!(ready(&address, &url).await, 0);
    passed("alone_rabbitmq_killed", None, began, serde_json::json!({"faults": 2}));
}

/// Both cores compute for longer than two heartbeats: the connections hold.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes both cores for a minute: run it alone, with `--ignored --test-threads 1`"]
async fn alone_rabbitmq_heartbeats_hold_while_every_core_computes() {
    let Some(address) = need("alone_rabbitmq_heartbeats", "GRISTMILL_TEST_RABBITMQ") else {
        return;
    };
    let began = Instant::now();
    let url = rabbit_url(&address, "busy", "");
    let queue = filled(&url, &messages(0..2)).await;
    let held = receive(&*queue).await;
    let cores = std::thread::available_parallelism().unwrap().get();
    let until = Instant::now() + Duration::from_secs(60);
    let busy = (0..2 * cores).map(|_| {
        std::thread::spawn(move || {
            let mut sum = 0u64;
            while Instant::now() < until {
                sum = std::hint::black_box(sum.wrapping_mul(31).wrapping_add(7));
            }
        })
    });
    for thread in busy.collect::<Vec<_>>() {
        thread.join().unwrap();
    }
    queue.acknowledge(&held).await.unwrap();
    drop(held);
    let other = receive(&*queue).await;
    assert_eq!(other.deliveries, 1, "a broken connection would have given it back");
    queue.acknowledge(&other).await.unwrap();
    drop((other, queue));
    assert_eq!(ready(&address, &url).await, 0);
    passed(
        "alone_rabbitmq_heartbeats",
        None,
        began,
        serde_json::json!({"busy_seconds": 60}),
    );
}
