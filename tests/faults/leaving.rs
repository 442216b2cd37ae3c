//! Workers that leave before their job ends: at a cloud's notice, at SIGTERM, after so many shards, at the queue's end.

use std::time::{Duration, Instant};

use super::job::{Broker, Plan};
use super::metadata::Metadata;
use super::scene::{END_MAX, LEAVE_MAX, Scene};
use super::services::Services;
use super::suite::Suite;
use super::worker_set::Ended;

/// `--once` waits so long for a message: longer than joining a group takes.
const IDLE_AFTER: &str = "5";

/// Plays `scene` over `broker` as often as the scale asks for.
fn play(name: &'static str, broker: Broker, plan: Plan, play: impl Fn(Scene)) {
    let Some(services) = Services::of(name, &[broker.name()]) else {
        return;
    };
    let mut suite = Suite::begin(name);
    for _ in 0..suite.count(1, 10) {
        play(Scene::open(&mut suite, &services, broker, &plan));
        suite.add("faults", 1);
    }
    suite.end();
}

/// A first shard that outlasts the look at the metadata service, and a log that is only written at the end: what a worker
/// that leaves does not write is computed again.
fn long_shards() -> Plan {
    Plan {
        rows: 4_000,
        shard_rows: 3_000,
        bad_percent: 0.0,
        log_interval: 60.0,
        ..Plan::default()
    }
}

#[test]
fn aws_takes_the_machine_away() {
    play("aws_takes_the_machine_away", Broker::Kafka, long_shards(), |scene| {
        the_machine_is_taken_away(scene, "aws");
    });
}

#[test]
fn google_takes_the_machine_away() {
    play(
        "google_takes_the_machine_away",
        Broker::Rabbitmq,
        long_shards(),
        |scene| the_machine_is_taken_away(scene, "gcp"),
    );
}

fn the_machine_is_taken_away(mut scene: Scene, cloud: &str) {
    let metadata = Metadata::start();
    let env = [("GRISTMILL_METADATA_URL", metadata.url.as_str())];
    let seat = scene
        .worker_set
        .hire_with(&env, |arguments| add(arguments, &["--spot", cloud, "--json"]));
    scene.until("the first row", END_MAX, |scene| scene.computed() > 0);
    metadata.take_away();
    let ended = scene.worker_set.wait(seat, LEAVE_MAX);
    assert!(
        ended.log.contains("this machine will be taken away"),
        "no notice:\n{}",
        ended.log
    );
    left_in_good_order(&mut scene, &ended);
    another_finishes(scene);
}

#[test]
fn sigterm_in_mid_shard_says_what_it_lost() {
    let name = "sigterm_in_mid_shard_says_what_it_lost";
    let plan = Plan {
        // The known device pays no heed to it; the model writes as many tokens in as many steps.
        fields: serde_json::json!({"generate": {"max_tokens": 64, "temperature": 0, "ignore_eos": true}}),
        ..long_shards()
    };
    play(name, Broker::Rabbitmq, plan, |mut scene| {
        rows_in_halves_are_lost(&mut scene);
        let seat = scene.worker_set.hire_with(&[], |arguments| add(arguments, &["--json"]));
        scene.until("some rows", END_MAX, |scene| scene.computed() > 200);
        let ended = scene.worker_set.dismiss(seat, LEAVE_MAX);
        left_in_good_order(&mut scene, &ended);
        another_finishes(scene);
    });
}

/// A worker that computes with the model itself is told to leave when its rows have a few of their tokens: none is finished, so
/// all that the device did was for nothing.
fn rows_in_halves_are_lost(scene: &mut Scene) {
    let env = [
        ("GRISTMILL_KNOWN_DEVICE", "0"),
        ("GRISTMILL_FAILPOINTS", "device.after-step=pause:3000@3"),
    ];
    let seat = scene
        .worker_set
        .hire_with(&env, |arguments| add(arguments, &["--json"]));
    scene.until("the third step", END_MAX, |scene| {
        scene.worker_set.log(seat).contains("failpoint `device.after-step`")
    });
    let ended = scene.worker_set.dismiss(seat, LEAVE_MAX);
    assert_eq!(ended.status.code(), Some(6), "{}", ended.log);
    let (report, device, lost) = device_and_lost(&ended);
    assert_eq!(report["rows"], 0, "{report}");
    // Both are rounded to microseconds.
    assert!(
        0.0 < lost && lost <= device && device - lost < 0.001,
        "not all is lost: {report}"
    );
}

/// What a worker reports, and of that the device's seconds and those that were lost.
fn device_and_lost(ended: &Ended) -> (serde_json::Value, f64, f64) {
    let report = ended.report();
    let seconds = |name: &str| report[name].as_f64().unwrap_or_else(|| panic!("no `{name}`: {report}"));
    let (device, lost) = (seconds("device_seconds"), seconds("lost_seconds"));
    (report, device, lost)
}

/// A worker that was told to leave in mid-shard: what it has computed is logged, the rest is nobody's, and it says so.
fn left_in_good_order(scene: &mut Scene, ended: &Ended) {
    assert_eq!(ended.status.code(), Some(6), "{}", ended.log);
    let (report, device, lost) = device_and_lost(ended);
    // This device has no row in halves, and one that failed is done with.
    assert!(device > 0.0 && lost == 0.0, "{report}");
    let computed = scene.computed();
    assert!(computed < scene.job.rows, "it was done before it was told to leave");
    assert_eq!(report["rows"], computed, "{report}");
    let status = scene.status();
    assert_eq!(
        status["rows"]["succeeded"], computed,
        "not all of it is logged: {status}"
    );
    let open = status["open_shards"].as_array().expect("a list");
    assert!(!open.is_empty(), "it was in no shard: {status}");
    assert!(
        open.iter().all(|shard| shard["attempts"] == 0),
        "an attempt was not ended: {status}"
    );
}

fn another_finishes(mut scene: Scene) {
    scene.worker_set.hire(&[]);
    let rows = scene.job.rows;
    scene.until("the last row", END_MAX, |scene| scene.computed() >= rows);
    assert_eq!(scene.computed(), rows, "rows were computed twice");
    scene.conclude();
}

#[test]
fn so_many_shards_and_once_over_kafka() {
    so_many_shards_and_once("so_many_shards_and_once_over_kafka", Broker::Kafka);
}

#[test]
fn so_many_shards_and_once_over_rabbitmq() {
    so_many_shards_and_once("so_many_shards_and_once_over_rabbitmq", Broker::Rabbitmq);
}

fn so_many_shards_and_once(name: &'static str, broker: Broker) {
    let plan = Plan {
        rows: 600,
        shard_rows: 100,
        ms_per_row: 1.0,
        bad_percent: 0.0,
        ..Plan::default()
    };
    play(name, broker, plan, |mut scene| {
        let seat = scene.worker_set.hire_with(&[], |arguments| {
            instead_of_until_idle(arguments, &["--max-shards", "2", "--json"]);
        });
        let ended = scene.worker_set.wait(seat, END_MAX);
        assert_eq!(ended.status.code(), Some(0), "{}", ended.log);
        assert_eq!(ended.report()["shards"], 2);
        assert_eq!(scene.computed(), 200, "it began more than two shards");
        let status = scene.status();
        assert_eq!(status["shards"]["done"], 2, "{status}");
        assert_eq!(status["open_shards"].as_array().map(Vec::len), Some(0), "{status}");

        let began = Instant::now();
        let seat = scene.worker_set.hire_with(&[], |arguments| {
            instead_of_until_idle(arguments, &["--once", "--idle-after", IDLE_AFTER, "--json"]);
        });
        let ended = scene.worker_set.wait(seat, END_MAX);
        assert_eq!(ended.status.code(), Some(0), "{}", ended.log);
        assert_eq!(
            ended.report()["shards"],
            4,
            "it left before the queue was empty:\n{}",
            ended.log
        );
        assert_eq!(scene.computed(), 600);
        assert!(
            began.elapsed() >= Duration::from_secs(IDLE_AFTER.parse().unwrap()),
            "it did not wait for more"
        );
        scene.until("`_SUCCESS`", END_MAX, Scene::finished);
        scene.hold(&[]);
    });
}

fn add(arguments: &mut Vec<String>, more: &[&str]) {
    arguments.extend(more.iter().map(|word| word.to_string()));
}

fn instead_of_until_idle(arguments: &mut Vec<String>, others: &[&str]) {
    arguments.retain(|word| word != "--until-idle");
    add(arguments, others);
}
