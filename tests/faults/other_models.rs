//! A worker whose model is not the job's: it passes shards on, slowly, and a few times only.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use gristmill::queue::{HOPS_MAX, Message};
use rdkafka::message::{Header, OwnedHeaders};

use super::job::{Broker, Plan};
use super::scene::{END_MAX, LEAVE_MAX, Scene};
use super::services::{HOPS, Services, send_to_kafka};
use super::suite::Suite;
use crate::support::{arg, is_full, root};

/// Between receiving a message for others and passing it on.
const PAUSE: Duration = Duration::from_secs(5);
const SHARDS: usize = 4;
const LEFT: &str = "is left to `gristmill reconcile`: no worker here could use it";

/// One that has come far already is left to `reconcile`; in the full run, the others are passed on several times.
#[test]
fn a_worker_of_another_model_passes_shards_on() {
    let name = "a_worker_of_another_model_passes_shards_on";
    let Some(services) = Services::of(name, &["kafka"]) else {
        return;
    };
    let mut suite = Suite::begin(name);
    let plan = Plan {
        rows: 1_000,
        shard_rows: 1_000 / SHARDS as u64,
        bad_percent: 0.0,
        ..Plan::default()
    };
    let mut scene = Scene::open(&mut suite, &services, Broker::Kafka, &plan);
    let job = scene.status()["id"].as_str().expect("the job has an id").to_string();
    send_hopped(&scene.job.name, &Message::new(job, &scene.job.output, 0, 0));

    let other = another_model(&scene.job.file.with_file_name("model"));
    let began = Instant::now();
    let wrong = scene.worker_set.hire_with(&[], |arguments| {
        arguments.extend(["--model", arg(&other), "--precision", "f32"].map(str::to_string));
    });
    let count = |scene: &Scene, words: &str| scene.worker_set.log(wrong).matches(words).count();
    let last = if is_full() { 4 } else { 1 };
    scene.until(
        "that shards are passed on, and one is left to `reconcile`",
        END_MAX,
        |scene| count(scene, LEFT) == 1 && count(scene, &format!("(at hop {last}): it is for model")) == SHARDS,
    );
    // Passing on is slow work: each message is looked at once a pause at most.
    let looks = count(&scene, "is not for this worker (at hop");
    let pauses = (began.elapsed().as_secs_f64() / PAUSE.as_secs_f64()).ceil() as usize;
    assert!(
        looks <= pauses * (SHARDS + 1),
        "{looks} looks in {:?}:\n{}",
        began.elapsed(),
        scene.worker_set.tails()
    );
    if is_full() {
        for hop in ["(at hop 1)", "(at hop 2)", "(at hop 3)"] {
            assert_eq!(count(&scene, hop), SHARDS, "{hop}:\n{}", scene.worker_set.log(wrong));
        }
    }
    assert_eq!(scene.computed(), 0, "a row of another model was computed");

    scene.worker_set.hire(&[]);
    if is_full() {
        // Half of the partitions are the wrong worker's still.
        scene.reconcile_until_finished();
    } else {
        scene.until("the first row", END_MAX, |scene| scene.computed() > 0);
        let ended = scene.worker_set.dismiss(wrong, LEAVE_MAX);
        assert!(matches!(ended.status.code(), Some(0 | 6)), "{}", ended.log);
    }
    scene.conclude();
    suite.add("faults", (SHARDS * last + 1) as u64);
    suite.end();
}

/// The jobs' model in `folder`, with one weight changed.
fn another_model(folder: &Path) -> PathBuf {
    fs::create_dir_all(folder).unwrap();
    for entry in fs::read_dir(root().join("jobs/demo/model")).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), folder.join(entry.file_name())).unwrap();
    }
    let weights = folder.join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&weights, bytes).unwrap();
    folder.to_path_buf()
}

/// A message that has been passed on as often as it may.
fn send_hopped(topic: &str, message: &Message) {
    let body = message.encode().expect("it can be encoded");
    let hops = Header {
        key: HOPS,
        value: Some(&HOPS_MAX.to_string()),
    };
    send_to_kafka(topic, &body, OwnedHeaders::new().insert(hops));
}
