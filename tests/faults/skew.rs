//! Workers of two versions: what a newer one wrote, an older one leaves as it is.

use std::time::Duration;

use gristmill::queue::Message;
use rdkafka::message::OwnedHeaders;

use super::job::{Broker, Plan};
use super::scene::{END_MAX, LEAVE_MAX, Scene};
use super::services::{Services, read_kafka, send_to_kafka};
use super::suite::Suite;

/// A message and a record of a version that does not exist yet.
const NEWER: &[u8] = b"{\"v\":99,\"what\":\"nobody here can know\"}\n";

/// A message for others is passed on after 5 s, which begin anew where its partition goes to another worker.
const PASSED_ON_MAX: Duration = Duration::from_secs(60);

#[test]
fn newer_messages_and_records_are_left_alone() {
    let name = "newer_messages_and_records_are_left_alone";
    let Some(services) = Services::of(name, &["kafka"]) else {
        return;
    };
    let mut suite = Suite::begin(name);
    let plan = Plan {
        rows: 2_000,
        shard_rows: 250,
        ms_per_row: 0.5,
        ..Plan::default()
    };
    let mut scene = Scene::open(&mut suite, &services, Broker::Kafka, &plan);
    let root = format!("{}/out/_gristmill", scene.job.key);
    let job = scene
        .bucket
        .get(&format!("{root}/job.json"))
        .expect("the job is submitted");
    let job: serde_json::Value = serde_json::from_slice(&job).unwrap();
    let home = format!("{root}/{}", job["job"].as_str().expect("the job has an id"));
    let record = format!("{home}/shards/000003/log/000000.json");
    scene.bucket.put(&record, NEWER.to_vec());
    send_to_kafka(&scene.job.name, NEWER, OwnedHeaders::new());
    scene.begin(2);
    let others = |scene: &mut Scene| scene.bucket.list(&format!("{home}/commits")).len() == 7;
    scene.until("that all other shards are committed", END_MAX, others);
    // Time to do what must not be done: overwrite it, publish without it, end over it.
    scene.live(Duration::from_secs(4));
    assert_eq!(scene.worker_set.awake().len(), 2, "a worker has left");
    assert_eq!(scene.bucket.get(&record).as_deref(), Some(NEWER));
    scene.until("that the newer message is passed on", PASSED_ON_MAX, |scene| {
        let of_others = of_others(&scene.job.name);
        assert!(of_others.iter().all(|(body, _)| body == NEWER), "{of_others:?}");
        of_others.iter().any(|(_, passed_on)| *passed_on)
    });
    let parts = scene.bucket.list(&format!("{}/out", scene.job.key));
    assert_eq!(parts.iter().filter(|key| key.contains("/part-")).count(), 7);
    // The newer worker's part of the story ends here: its record never was, as far as the rest goes.
    scene.bucket.delete(&record);
    scene.reconcile(3.0);
    scene.conclude();
    suite.end();
}

/// What lies in the topic and is no message of this gristmill, and whether it was passed on.
fn of_others(topic: &str) -> Vec<(Vec<u8>, bool)> {
    let mut messages = read_kafka(topic);
    messages.retain(|(body, _)| Message::decode(body).is_err());
    messages
}

#[test]
fn two_versions_finish_a_job_side_by_side() {
    let name = "two_versions_finish_a_job_side_by_side";
    let Some(services) = Services::of(name, &["kafka"]) else {
        return;
    };
    let mut suite = Suite::begin(name);
    let plan = Plan {
        rows: 6_000,
        shard_rows: 200,
        ..Plan::default()
    };
    let mut scene = Scene::open(&mut suite, &services, Broker::Kafka, &plan);
    let newer = ("GRISTMILL_FAULT_SWITCHES", "next-version");
    let older = [scene.worker_set.hire(&[]), scene.worker_set.hire(&[])];
    scene.until("the first row", END_MAX, |scene| scene.computed() > 0);
    scene.worker_set.hire(&[newer]);
    scene.worker_set.hire(&[newer]);
    // Whoever looks after such a job has the newer version.
    scene.set_env(newer.0, newer.1);
    scene.reconcile_until_finished();
    for seat in older {
        // It may have seen the end, or be waiting for what it cannot read.
        if scene.worker_set.awake().contains(&seat) {
            scene.worker_set.dismiss(seat, LEAVE_MAX).assert_left();
        }
    }
    scene.conclude();
    suite.end();
}
