//! Negative controls: with the guarantee broken on purpose, the suite fails; the same scene without the switch holds.
//!
//! Each scene has one shard, so that it is known who works on what. The first worker is held up right before it writes
//! its rows, with answers of its own for some of them (its device is out of order): whatever it writes too late shows.

use std::time::Duration;

use super::job::{Broker, Plan};
use super::scene::{IDLE_MAX, Scene};
use super::services::Services;
use super::suite::Suite;

/// Longest time for a job of one shard, its redelivery among it.
const COMPLETE_MAX: Duration = Duration::from_secs(15);
/// Longer than any test waits: the worker is killed, or stopped and woken, in that time.
const HELD: &str = "keeper.before-log=pause:4000@1";
const NOT_COMPLETE: &str = "the job is not complete";
const DIES_BEFORE_COMMIT: (&str, &str) = ("GRISTMILL_FAILPOINTS", "keeper.between-part-and-commit=abort@1");

#[test]
fn acknowledging_before_committing_is_found() {
    control(
        "acknowledging_before_committing_is_found",
        "ack-before-commit",
        |scene, on| {
            let first = held(scene, on);
            scene.worker_set.kill(first);
            scene.worker_set.hire(on);
            complete(scene)
        },
    );
}

#[test]
fn putting_without_the_condition_is_found() {
    control(
        "putting_without_the_condition_is_found",
        "put-unconditional",
        |scene, on| {
            let first = held(scene, on);
            scene.worker_set.pause(first);
            scene.worker_set.hire(on);
            complete(scene)?;
            scene.worker_set.wake(first);
            // What it does now, it does too late.
            scene.until("that it leaves", IDLE_MAX, |scene| scene.worker_set.all_done());
            Ok(())
        },
    );
}

#[test]
fn taking_already_exists_for_success_is_found() {
    control(
        "taking_already_exists_for_success_is_found",
        "exists-is-success",
        |scene, on| {
            let first = held(scene, on);
            scene.worker_set.pause(first);
            dies_before_commit(scene, on);
            scene.worker_set.wake(first);
            if !scene.comes_true(Duration::from_secs(8), Scene::finished) {
                scene.worker_set.hire(on);
            }
            complete(scene)
        },
    );
}

/// Where a commit stands and its part does not, the worker that comes next makes the part.
#[test]
fn a_commit_without_its_part_is_made_good() {
    let name = "a_commit_without_its_part_is_made_good";
    let Some(services) = Services::of(name, &["kafka"]) else {
        return;
    };
    let mut suite = Suite::begin(name);
    let mut scene = Scene::open(&mut suite, &services, Broker::Kafka, &one_shard());
    scene.tolerated = |_| false;
    dies_before_commit(&mut scene, &[("GRISTMILL_FAULT_SWITCHES", "part-after-commit")]);
    let second = scene.worker_set.hire(&[]);
    complete(&mut scene).unwrap();
    let log = scene.worker_set.log(second);
    assert!(log.contains("was missing and has been built again"), "{log}");
    scene.conclude();
    suite.end();
}

/// Environment of a worker besides what all have.
type Env<'e> = &'e [(&'e str, &'e str)];

fn one_shard() -> Plan {
    Plan {
        rows: 400,
        shard_rows: 1_000,
        ms_per_row: 0.5,
        // One write of the log a shard.
        log_interval: 6.0,
        ..Plan::default()
    }
}

/// Plays `scene` with the switch and without.
fn control(name: &'static str, switch: &str, play: fn(&mut Scene, Env) -> Result<(), String>) {
    let Some(services) = Services::of(name, &["kafka"]) else {
        return;
    };
    let mut suite = Suite::begin(name);
    let plan = one_shard();
    let switched = [("GRISTMILL_FAULT_SWITCHES", switch)];
    for on in [&[][..], &switched] {
        let mut scene = Scene::open(&mut suite, &services, Broker::Kafka, &plan);
        scene.tolerated = |_| false;
        let found = play(&mut scene, on).and_then(|()| scene.inspect(&["--allow", "errored"]));
        let tails = scene.worker_set.tails();
        drop(scene);
        let seed = suite.seed;
        match (on.is_empty(), found) {
            (true, Ok(())) => {}
            (true, Err(found)) => panic!("seed {seed}: the scene fails without `{switch}`:\n{found}\n{tails}"),
            (false, Err(found)) if is_found(switch, &found) => {
                println!("seed {seed}: `{switch}` was found: {found}");
            }
            (false, Err(found)) => panic!("seed {seed}: `{switch}` shows in another way:\n{found}\n{tails}"),
            (false, Ok(())) => panic!("seed {seed}: `{switch}` was not found\n{tails}"),
        }
    }
    suite.add("found", 1);
    suite.end();
}

/// Whether this is how the switch shows: a lost message by a job that does not end, all else by what `verify` or the checker find.
fn is_found(switch: &str, found: &str) -> bool {
    match switch {
        "ack-before-commit" => found.contains(NOT_COMPLETE),
        _ => found.contains("\"holds\":false") || found.contains(" findings over "),
    }
}

/// A worker that is held up right before its first write of the log; its device fails half of the rows.
fn held(scene: &mut Scene, on: Env) -> usize {
    let mut env = vec![("GRISTMILL_FAILPOINTS", HELD), ("GRISTMILL_KNOWN_ERRORS_BELOW", "1000")];
    env.extend_from_slice(on);
    let seat = scene.worker_set.hire(&env);
    scene.until("that the first worker is held up", COMPLETE_MAX, |scene| {
        scene.worker_set.log(seat).contains("failpoint `keeper.before-log`")
    });
    seat
}

/// A worker that dies between part and commit, and has done so.
fn dies_before_commit(scene: &mut Scene, on: Env) {
    let mut env = vec![DIES_BEFORE_COMMIT];
    env.extend_from_slice(on);
    let seat = scene.worker_set.hire(&env);
    let ended = scene.worker_set.wait(seat, COMPLETE_MAX);
    assert!(
        ended.aborted(),
        "worker {seat} ended with {}:\n{}",
        ended.status,
        ended.log
    );
}

fn complete(scene: &mut Scene) -> Result<(), String> {
    if scene.comes_true(COMPLETE_MAX, Scene::finished) {
        Ok(())
    } else {
        Err(format!("{NOT_COMPLETE} after {COMPLETE_MAX:?}"))
    }
}
