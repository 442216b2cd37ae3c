//! What RabbitMQ does by itself: a delivery nobody answers in time closes its channel; short memory blocks publishers.

use std::fs::File;
use std::time::Duration;

use super::job::{Broker, Plan};
use super::scene::Scene;
use super::services::Services;
use super::suite::Suite;
use crate::services::MemoryAlarm;

const TIMED_OUT: &str = "Timeout value used";
/// Within which the broker blocks publishing, or lets it go on.
const BLOCKED_MAX: Duration = Duration::from_secs(60);
const ALARM: &str = "Publishers will be blocked until this alarm clears";

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
    // Rows enough that the workers have some to compute until the alarm is lifted.
    let plan = Plan {
        rows: 16_000,
        ..Plan::default()
    };
    for _ in 0..times {
        let mut scene = Scene::open(&mut suite, &services, Broker::Rabbitmq, &plan);
        scene.begin(2);
        let alarms = services.rabbitmq_log().matches(ALARM).count();
        let memory_alarm = MemoryAlarm::raise();
        scene.until("the alarm", BLOCKED_MAX, |scene| {
            scene.services.rabbitmq_log().matches(ALARM).count() > alarms
        });
        // Publishes into the alarm: it must wait, it must not lose a message nor fail.
        let url = scene.queue.clone();
        let output = scene.job.output.clone();
        let said = scene.suite.dir.join("reconcile.log");
        let mut blocked = scene
            .command(&["reconcile", &output, "--queue", &url, "--interval", "0.2"])
            .stderr(File::create(&said).unwrap())
            .spawn()
            .unwrap();
        scene.until("that publishing is blocked", BLOCKED_MAX, |_| {
            let said = std::fs::read_to_string(&said).unwrap();
            said.contains("the broker blocks publishing")
        });
        let computed = scene.computed();
        let alarm = scene.suite.random.ms(4_000..7_000);
        scene.live(alarm);
        assert!(
            blocked.try_wait().unwrap().is_none(),
            "it did not wait for the alarm's end"
        );
        assert!(scene.computed() > computed, "the alarm held up the workers");
        drop(memory_alarm);
        scene.until("the end of the publishing that was blocked", BLOCKED_MAX, |_| {
            blocked.try_wait().unwrap().is_some()
        });
        assert_eq!(blocked.wait().unwrap().code(), Some(0), "reconcile failed");
        scene.conclude();
        suite.add("faults", 1);
    }
    suite.end();
}
