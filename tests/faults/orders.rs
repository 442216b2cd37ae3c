//! Orders to a job in flight: budget reached and extended, cancelled, retried; a worker that slept through a retry; a stop
//! since an input changed.

use std::time::Duration;

use super::job::{Broker, Plan};
use super::kills::random_awake;
use super::scene::{END_MAX, IDLE_MAX, Scene, play_each};

const WORKERS: usize = 3;
/// Rows of the known device's longest step, and those that wait on it (`src/faults/known.rs`).
const STEP_ROWS: u64 = 64;
const WAITING_ROWS: u64 = 256;
/// At this price a second on the device costs a dollar.
const USD_PER_HOUR: f64 = 3600.0;
/// A device that fails every row whose first id is below this: one in ten.
const OUT_OF_ORDER: (&str, &str) = ("GRISTMILL_KNOWN_ERRORS_BELOW", "200");

fn orders(name: &'static str, plan: Plan, play: fn(Scene)) {
    play_each(name, &Broker::ALL, &plan, 10, play);
}

#[test]
fn a_budget_is_reached_and_extended() {
    let plan = Plan {
        rows: 8_000,
        fields: serde_json::json!({"budget": {"usd": 8.0, "usd_per_hour": USD_PER_HOUR}}),
        ..Plan::default()
    };
    orders("a_budget_is_reached_and_extended", plan, |mut scene| {
        scene.job_ended = vec![0, 3, 4];
        scene.begin(WORKERS);
        scene.until("that the budget stops all workers", END_MAX, |scene| {
            scene.worker_set.all_done()
        });
        let status = scene.status();
        assert_eq!(status["state"], "budget_reached", "{status}");
        within_bounds(&status, 8.0);
        assert!(scene.computed() < scene.job.rows, "the budget stopped nothing");
        scene.run(&["extend", &scene.job.output, "--usd", "1000"]).expect(0);
        scene.job_ended = vec![0, 3];
        scene.worker_set.begin_all();
        scene.reconcile_until_finished();
        scene.conclude();
    });
}

/// `docs/job-file.md` says where a budget stops work: with a log interval of a second, at a dollar a second. A step of the known
/// device takes an eighth of a second.
#[track_caller]
fn within_bounds(status: &serde_json::Value, budget: f64) {
    let (usd, workers, interval, step) = (status["usd"].as_f64().unwrap(), WORKERS as f64, 1.0, 0.13);
    let (least, most) = (
        budget - 3.0 * (workers - 1.0) * interval,
        budget + workers * (2.0 + step),
    );
    assert!(
        least <= usd && usd <= most,
        "{usd} dollars of {budget}, not between {least} and {most}"
    );
    let note = status["note"].as_str().unwrap_or_default();
    assert!(note.contains(" are spent"), "{note}");
}

/// Workers are at it, without a limit; one that stands in the file when it is submitted again stops them.
#[test]
fn a_budget_is_added_to_the_file() {
    let plan = Plan {
        rows: 16_000,
        fields: serde_json::json!({"budget": {"usd_per_hour": USD_PER_HOUR}}),
        ..Plan::default()
    };
    orders("a_budget_is_added_to_the_file", plan, |mut scene| {
        scene.job_ended = vec![0, 3, 4];
        scene.begin(WORKERS);
        let begun = std::fs::read_to_string(&scene.job.file).unwrap();
        let with = |usd: f64| {
            let mut job: serde_json::Value = serde_json::from_str(&begun).unwrap();
            job["budget"]["usd"] = usd.into();
            job.to_string()
        };
        std::fs::write(&scene.job.file, with(16.0)).unwrap();
        scene.submit();
        scene.until("that the budget stops all workers", END_MAX, |scene| {
            scene.worker_set.all_done()
        });
        let status = scene.status();
        assert_eq!(
            (&status["state"], &status["budget"]["usd"]),
            (&"budget_reached".into(), &16.0.into())
        );
        // Orders are heard of once an interval: the limit is new to all of them.
        within_bounds(&status, 16.0);
        assert!(scene.computed() < scene.job.rows, "the budget stopped nothing");
        // Without it again, it goes on.
        std::fs::write(&scene.job.file, &begun).unwrap();
        scene.submit();
        scene.job_ended = vec![0, 3];
        scene.worker_set.begin_all();
        scene.reconcile_until_finished();
        scene.conclude();
    });
}

/// Unfinished rows would expire with the budget; a worker that holds the job for closing hears in time that it is not.
#[test]
fn a_closing_job_is_extended() {
    let plan = Plan {
        rows: 8_000,
        fields: serde_json::json!({"budget": {"usd": 2.0, "usd_per_hour": USD_PER_HOUR, "unfinished": "expire"}}),
        // It reads orders at its start and not again.
        log_interval: 60.0,
        ..Plan::default()
    };
    orders("a_closing_job_is_extended", plan, |mut scene| {
        // While it waits with a message in hand, the budget is reached.
        let paused = "intake.after-receive=pause:8000@8";
        scene.worker_set.hire(&[("GRISTMILL_FAILPOINTS", paused)]);
        scene.until("that the budget is reached", END_MAX, |scene| {
            scene.computed() > 500 && scene.status()["state"] == "budget_reached"
        });
        scene.run(&["extend", &scene.job.output, "--usd", "1000"]).expect(0);
        scene.reconcile_until_finished();
        scene.until("that the worker leaves", IDLE_MAX, |scene| scene.worker_set.all_done());
        let expired = scene.status()["rows"]["expired"].as_u64().unwrap();
        assert!(expired > 0, "nothing had expired when the job was extended");
        assert!(
            expired <= scene.job.rows / 4,
            "{expired} rows expired after the job was extended"
        );
        scene.hold(&["--allow", "expired"]);
    });
}

/// The job is extended and submitted again while its shard writes its last record: the new message joins those that the shard has,
/// and is not acknowledged with them.
#[test]
fn a_message_joins_a_shard_that_stops() {
    let plan = Plan {
        rows: 1_000,
        shard_rows: 1_000,
        fields: serde_json::json!({"budget": {"usd": 0.5, "usd_per_hour": USD_PER_HOUR}}),
        log_interval: 60.0,
        ..Plan::default()
    };
    orders("a_message_joins_a_shard_that_stops", plan, |mut scene| {
        scene.job_ended = vec![0, 3, 4];
        // A worker's first record is due when its job stops: no interval ends before.
        scene
            .worker_set
            .hire(&[("GRISTMILL_FAILPOINTS", "keeper.before-log=pause:10000@1")]);
        scene.until("that the budget stops it", END_MAX, |scene| {
            scene.computed() > 0 && scene.status()["state"] == "budget_reached"
        });
        scene.run(&["extend", &scene.job.output, "--usd", "1000"]).expect(0);
        scene.submit();
        scene.until("that the worker has the message", END_MAX, |scene| {
            scene.worker_set.log(0).contains("is in progress already")
        });
        scene.conclude();
    });
}

#[test]
fn a_budget_is_extended_before_it_is_reached() {
    let plan = Plan {
        rows: 8_000,
        fields: serde_json::json!({"budget": {"usd": 12.0, "usd_per_hour": USD_PER_HOUR}}),
        ..Plan::default()
    };
    orders("a_budget_is_extended_before_it_is_reached", plan, |mut scene| {
        scene.begin(WORKERS);
        scene.run(&["extend", &scene.job.output, "--usd", "1000"]).expect(0);
        scene.conclude();
    });
}

#[test]
fn a_job_is_cancelled_and_closed() {
    // So many that the bound on what is computed after the cancel is far from all that is left.
    let plan = Plan {
        rows: 12_000,
        ..Plan::default()
    };
    orders("a_job_is_cancelled_and_closed", plan, |mut scene| {
        scene.job_ended = vec![0, 3, 5];
        scene.begin(WORKERS);
        let moment = scene.suite.random.ms(500..2_500);
        scene.live(moment);
        scene.run(&["cancel", &scene.job.output]).expect(0);
        let ordered = scene.computed();
        scene.until("that all workers leave a cancelled job", IDLE_MAX, |scene| {
            scene.worker_set.all_done()
        });
        assert_eq!(scene.status()["state"], "cancelled");
        let computed = scene.computed();
        // Each worker hears of it within a log interval, and ends the step that it is in; twice that, for slow machines.
        let plan = Plan::default();
        let interval_rows = (plan.log_interval * 1000.0 / plan.ms_per_row) as u64;
        let most = 2 * WORKERS as u64 * (interval_rows + STEP_ROWS);
        assert!(
            computed - ordered <= most,
            "{} rows were computed after the cancel, more than {most}",
            computed - ordered
        );
        scene.run(&["cancel", &scene.job.output, "--finish"]).expect(0);
        scene.worker_set.begin_all();
        scene.reconcile_until_finished();
        scene.until("that all workers leave a closed job", IDLE_MAX, |scene| {
            scene.worker_set.all_done()
        });
        assert_eq!(scene.computed(), computed, "rows were computed after the cancel");
        let cancelled = scene.status()["rows"]["cancelled"].as_u64().unwrap();
        assert!(cancelled > 0, "nothing was left to cancel");
        scene.hold(&["--allow", "cancelled"]);
    });
}

#[test]
fn failed_rows_are_retried() {
    let plan = Plan {
        rows: 8_000,
        ms_per_row: 1.0,
        // Most of the bad ones fail before they come to the device: they are not computed, and so not counted here.
        bad_percent: 0.0,
        ..Plan::default()
    };
    orders("failed_rows_are_retried", plan, |mut scene| {
        first_generation_fails(&mut scene);
        scene.until("`_SUCCESS`", END_MAX, Scene::finished);
        scene.until("that all workers leave", IDLE_MAX, |scene| scene.worker_set.all_done());
        scene.hold_so_far(&["--allow", "errored"]);
        let failed = scene.status()["rows"]["errored"].as_u64().expect("a count");
        assert!(failed > 0, "no row has failed");
        let before = scene.computed();
        scene
            .run(&["retry", &scene.job.output, "--queue", &scene.queue])
            .expect(0);
        scene.worker_set.begin_all();
        scene.until("the first row of the retry", END_MAX, |scene| scene.computed() > before);
        if let Some(seat) = random_awake(&mut scene) {
            scene.worker_set.kill(seat);
            scene.worker_set.begin(seat);
        }
        scene.until("that all workers leave the retry", END_MAX, |scene| {
            scene.worker_set.all_done()
        });
        let again = scene.computed() - before;
        // Computed twice are those that the killed worker had in hand, and steps whose shards were recalled meanwhile: less than
        // fits on a device, for the four shards in a worker's hands have some hundred failed rows.
        let most = failed + WAITING_ROWS + STEP_ROWS;
        assert!(
            failed <= again && again <= most,
            "{again} rows were computed again, not the {failed} failed ones and what a worker has in hand"
        );
        scene.hold(&[]);
    });
}

#[test]
fn a_worker_sleeps_through_a_retry() {
    let plan = Plan {
        rows: 6_000,
        ..Plan::default()
    };
    orders("a_worker_sleeps_through_a_retry", plan, |mut scene| {
        // Its deliveries go to others when its heartbeats are missed, not a minute later.
        let services = scene.services.clone();
        services.set_rabbitmq("heartbeat", 2);
        first_generation_fails(&mut scene);
        let moment = scene.suite.random.ms(500..2_000);
        scene.live(moment);
        let sleeper = random_awake(&mut scene).expect("a worker that works");
        scene.worker_set.pause(sleeper);
        scene.until("`_SUCCESS` without the sleeper", END_MAX, Scene::finished);
        // Their devices are out of order: none of them may have a hand in the retry.
        scene.until("that all others leave", IDLE_MAX, |scene| {
            scene.worker_set.awake().is_empty()
        });
        scene
            .run(&["retry", &scene.job.output, "--queue", &scene.queue])
            .expect(0);
        let wakes_late = scene.suite.random.coin();
        scene.live(Duration::from_secs(1));
        scene.worker_set.begin_all();
        if !wakes_late {
            scene.worker_set.wake(sleeper);
        }
        scene.until("the retry's end", END_MAX, |scene| scene.worker_set.awake().is_empty());
        if wakes_late {
            scene.worker_set.wake(sleeper);
        }
        scene.until("that the sleeper leaves", IDLE_MAX, |scene| scene.worker_set.all_done());
        // A sleeper that woke early may have taken shards of the retry, and its device is out of order.
        scene.hold(if wakes_late { &[] } else { &["--allow", "errored"] });
        services.set_rabbitmq("heartbeat", 60);
    });
}

#[test]
fn an_input_changes_and_is_restored() {
    let plan = Plan {
        rows: 8_000,
        ..Plan::default()
    };
    orders("an_input_changes_and_is_restored", plan, |mut scene| {
        scene.job_ended = vec![2];
        scene.begin(WORKERS);
        let inputs = scene.bucket.list(&format!("{}/in", scene.job.key));
        let last = inputs.last().expect("an input").clone();
        let bytes = scene.bucket.get(&last).expect("its bytes");
        let mut other = bytes.clone();
        other[10] ^= 1;
        scene.bucket.put(&last, other);
        scene.until("that the workers leave a job whose input changed", END_MAX, |scene| {
            scene.worker_set.all_done()
        });
        let status = scene.status();
        assert_eq!(status["state"], "input_changed", "{status}");
        let note = status["note"].as_str().unwrap_or_default();
        assert!(
            note.contains(&last) && note.contains("when the job was planned"),
            "{note}"
        );
        scene.bucket.put(&last, bytes);
        scene.job_ended = vec![0, 3];
        scene.submit();
        scene.worker_set.begin_all();
        scene.reconcile_until_finished();
        scene.conclude();
    });
}

/// Workers whose device fails one row in ten.
fn first_generation_fails(scene: &mut Scene) {
    for _ in 0..WORKERS {
        scene.worker_set.hire(&[OUT_OF_ORDER]);
    }
    scene.until("the first row", END_MAX, |scene| scene.computed() > 0);
}
