//! Two jobs in one worker: what happens to one of them, and what the other notices of it.

use std::time::Duration;

use super::job::{Broker, Job, Plan};
use super::scene::{END_MAX, Scene, play_each};
use crate::support::arg;

const JOIN_EVERY: Duration = Duration::from_millis(1_500);

/// A second job on the scene's queue; what workers of both are started with, holding `in_flight` shards at once.
fn second_job(scene: &mut Scene, plan: &Plan, in_flight: u32) -> (Job, impl Fn(&mut Vec<String>) + use<>) {
    let second = scene.second_job(plan);
    scene
        .run(&["submit", arg(&second.file), "--queue", &scene.queue])
        .expect(0);
    let output = second.output.clone();
    let both = move |arguments: &mut Vec<String>| {
        let in_flight = in_flight.to_string();
        arguments.extend(["--job", &output, "--shards-in-flight", &in_flight].map(String::from));
    };
    (second, both)
}

/// Workers of both jobs give partitions up, with shards in hand, to those that join.
#[test]
fn shards_of_two_jobs_go_to_a_worker_that_joins() {
    let name = "shards_of_two_jobs_go_to_a_worker_that_joins";
    let plan = Plan {
        rows: 8_000,
        shard_rows: 100,
        ..Plan::default()
    };
    play_each(name, &[Broker::Kafka], &plan, 10, |mut scene| {
        let (second, both) = second_job(&mut scene, &plan, 16);
        scene.worker_set.hire_with(&[], &both);
        scene.until("the first rows", END_MAX, |scene| scene.computed() > 0);
        // What a worker has in hand is of few partitions: sooner or later one of them moves.
        let mut workers = 1;
        let gave_up = |scene: &mut Scene, workers: usize| {
            (0..workers).any(|seat| scene.worker_set.log(seat).contains("goes back to the queue"))
        };
        while !scene.comes_true(JOIN_EVERY, |scene| gave_up(scene, workers)) {
            assert!(workers < 8, "nobody gave a shard up\n{}", scene.worker_set.tails());
            scene.worker_set.hire_with(&[], &both);
            workers += 1;
        }
        conclude_both(scene, second);
    });
}

/// Rows of a job that is cancelled do not stay on the device: it is the other's from then on.
#[test]
fn a_cancelled_job_leaves_the_device_to_the_other() {
    let name = "a_cancelled_job_leaves_the_device_to_the_other";
    // The device holds 256 rows that wait: ten seconds of this job.
    let plan = Plan {
        rows: 400,
        shard_rows: 100,
        ms_per_row: 40.0,
        bad_percent: 0.0,
        log_interval: 0.2,
        ..Plan::default()
    };
    play_each(name, &[Broker::Rabbitmq], &plan, 5, |mut scene| {
        scene.job_ended = vec![0, 5];
        let (second, both) = second_job(&mut scene, &plan, 8);
        scene.worker_set.hire_with(&[], &both);
        scene.until("the first rows", END_MAX, |scene| scene.computed() > 0);
        scene.run(&["cancel", &scene.job.output]).expect(0);
        let before = scene.computed();
        let cancelled = std::mem::replace(&mut scene.job, second);
        scene.until("`_SUCCESS` of the other", END_MAX, Scene::finished);
        // The step that is under way, at most 64 rows; the worker hears of it before the next one or the one after.
        let of_first = scene.computed() - scene.job.rows;
        assert!(
            of_first < 250,
            "{of_first} rows of `{}` were computed, {before} when it was cancelled",
            cancelled.name
        );
        scene.conclude();
    });
}

/// Both are finished, and right.
fn conclude_both(mut scene: Scene, second: Job) {
    let first = std::mem::replace(&mut scene.job, second);
    scene.until("`_SUCCESS` of the second job", END_MAX, Scene::finished);
    scene.hold_so_far(&[]);
    scene.suite.add("rows", scene.job.rows);
    scene.job = first;
    scene.conclude();
}
