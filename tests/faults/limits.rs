//! What RabbitMQ does by itself: a delivery nobody answers in time closes its channel; short memory blocks publishers.

use std::time::Duration;

use super::job::{Broker, Plan};
use super::scene::Scene;
use super::services::Services;
use super::suite::Suite;

const TIMED_OUT: &str = "Timeout value used";

#[test]
fn the_acknowledgement_timeout_strikes() {
    let name = "the_acknowledgement_timeout_strikes";
    let Some(services) = Services::of(name, &["rabbitmq"]) else {
        return;
    };
    let mut suite = Suite::begin(name);
    let times = suite.count(1, 10);
    // Shards that take longer than the broker has patience: the whole job comes through only by its log.
    let plan = Plan {
        rows: 4_500,
        shard_rows: 1_500,
        ms_per_row: 6.0,
        ..Plan::default()
    };
    services.set_rabbitmq("consumer_timeout", 5_000);
    for _ in 0..times {
        let before = services.rabbitmq_log().matches(TIMED_OUT).count();
        let mut scene = Scene::open(&mut suite, &services, Broker::Rabbitmq, &plan);
        scene.begin(2);
        scene.conclude();
        let strikes = services.rabbitmq_log().matches(TIMED_OUT).count() - before;
        assert!(strikes > 0, "the timeout never struck: nothing was shown");
        suite.add("faults", strikes as u64);
    }
    services.set_rabbitmq("consumer_timeout", 1_800_000);
    suite.end();
}

#[test]
fn the_memory_alarm_blocks_publishers() {
    let name = "the_memory_alarm_blocks_publishers";
    let Some(services) = Services::of(name, &["rabbitmq"]) else {
        return;
    };
    let mut suite = Suite::begin(name);
    let times = suite.count(1, 10);
    let plan = Plan {
        rows: 8_000,
        ..Plan::default()
    };
    for _ in 0..times {
        let mut scene = Scene::open(&mut suite, &services, Broker::Rabbitmq, &plan);
        scene.begin(2);
        services.rabbitmqctl(&["set_vm_memory_high_watermark", "0.00001"]);
        // Publishes into the alarm: it may wait, it must not lose a message nor fail.
        let url = scene.queue.clone();
        let output = scene.job.output.clone();
        let mut blocked = scene
            .command(&["reconcile", &output, "--queue", &url, "--interval", "0.2"])
            .spawn()
            .unwrap();
        let alarm = scene.suite.random.ms(4_000..7_000);
        scene.live(alarm);
        services.rabbitmqctl(&["set_vm_memory_high_watermark", "0.4"]);
        scene.until(
            "the end of the publishing that was blocked",
            Duration::from_secs(60),
            |_| blocked.try_wait().unwrap().is_some(),
        );
        assert_eq!(blocked.wait().unwrap().code(), Some(0), "reconcile failed");
        scene.conclude();
        suite.add("faults", 1);
    }
    suite.end();
}
