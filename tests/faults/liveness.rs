//! What a liveness probe reads: the file goes stale while the device hangs, and stays fresh while a worker waits.

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use super::job::{Broker, Plan};
use super::scene::{END_MAX, Scene};
use super::services::Services;
use super::suite::Suite;
use crate::services::{Action, control};
use crate::support::arg;

/// The file is touched each second.
const STALE: Duration = Duration::from_secs(4);

fn age(file: &Path) -> Duration {
    let touched = std::fs::metadata(file).and_then(|found| found.modified());
    touched.expect("the file is there").elapsed().unwrap_or_default()
}

/// It never grows stale within `time`.
#[track_caller]
fn stays_fresh(scene: &mut Scene, file: &Path, time: Duration, while_what: &str) {
    let stale = scene.comes_true(time, |_| age(file) > STALE);
    assert!(!stale, "it went stale while {while_what}");
}

#[test]
fn the_liveness_file_tells_a_hang_from_waiting() {
    let name = "the_liveness_file_tells_a_hang_from_waiting";
    let Some(services) = Services::of(name, &["rabbitmq"]) else {
        return;
    };
    let mut suite = Suite::begin(name);
    // A step of 16 rows takes eight seconds, and hangs after two.
    let plan = Plan {
        rows: 16,
        shard_rows: 16,
        bad_percent: 0.0,
        ms_per_row: 500.0,
        ..Plan::default()
    };
    let mut scene = Scene::open(&mut suite, &services, Broker::Rabbitmq, &plan);
    let file = scene.job.file.with_file_name("alive");
    let queue = scene.queue.clone();
    let mut command = scene.command(&["worker", "--queue", &queue, "--liveness-file", arg(&file), "--quiet"]);
    command.env("GRISTMILL_STEP_MAX_MS", "2000");
    let mut worker = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    scene.until("the file", END_MAX, |_| file.exists());
    scene.until("that it goes stale while the device hangs", END_MAX, |_| {
        age(&file) > STALE
    });
    scene.until("`_SUCCESS`", END_MAX, Scene::finished);
    // The queue took the shard back from the device that hung, so a second try at it may be under way.
    let mut rests_since = Instant::now();
    scene.until("that it stays fresh, since the worker is idle", END_MAX, |_| {
        if age(&file) > STALE / 2 {
            rests_since = Instant::now();
        }
        rests_since.elapsed() > 2 * STALE
    });
    control("rabbitmq", Action::Stop);
    stays_fresh(&mut scene, &file, 2 * STALE, "the broker was away");
    control("rabbitmq", Action::Cont);
    worker.kill().unwrap();
    worker.wait().unwrap();
    scene.hold(&[]);
    suite.end();
}
