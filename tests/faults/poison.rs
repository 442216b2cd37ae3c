//! Rows that have no answer, and rows that end the process which computes them: error rows, and nobody else is accused.

use super::job::{Broker, Plan};
use super::scene::Scene;
use super::services::Services;
use super::suite::Suite;

#[test]
fn poison_harms_nobody_else() {
    let name = "poison_harms_nobody_else";
    let Some(services) = Services::of(name, &["rabbitmq"]) else {
        return;
    };
    let mut suite = Suite::begin(name);
    let abort_rows = suite.count(3, 20);
    let plan = Plan {
        rows: suite.count(20_000, 200_000),
        shard_rows: 512,
        bad_percent: 1.0,
        abort_rows,
        ms_per_row: 0.5,
        log_interval: 0.5,
        ..Plan::default()
    };
    let bad_rows = plan.rows / 100;
    let mut scene = Scene::open(&mut suite, &services, Broker::Rabbitmq, &plan);
    scene.tolerated = |ended| ended.aborted() && ended.log.contains("a row that aborts the process");
    scene.begin(3);
    scene.conclude();
    suite.add("bad_rows", bad_rows);
    suite.add("abort_rows", abort_rows);
    suite.end();
}
