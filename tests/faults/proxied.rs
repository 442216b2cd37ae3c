//! A store that fails in every way it can: the fault proxy before it, and requests counted.

use std::time::Duration;

use super::job::{Broker, Plan};
use super::scene::Scene;
use super::services::Services;
use super::suite::Suite;
use crate::proxy::{Counters, Plan as Faults, Proxy};

/// Of the requests, this share meets a fault.
const SHARE: f64 = 0.2;
/// Stalls are longer than a client's patience.
const STALL: Duration = Duration::from_secs(2);
const CLIENT_TIMEOUT: &str = "1s";
/// Requests that one fault may cause: its retry by the client, the read that settles a create, and theirs again.
const REQUESTS_PER_FAULT: u64 = 6;

#[test]
fn the_store_fails_in_every_way() {
    let name = "the_store_fails_in_every_way";
    let Some(services) = Services::of(name, &["kafka", "rabbitmq"]) else {
        return;
    };
    let mut suite = Suite::begin(name);
    let faults = suite.count(1_000, 20_000);
    // Small shards and a short interval: many requests in little time.
    let plan = Plan {
        rows: 12_000,
        shard_rows: 60,
        ms_per_row: 1.0,
        log_interval: 0.3,
        ..Plan::default()
    };
    let proxy = Proxy::start(&services.store.endpoint, Faults::clean());
    let (mut done, mut requests) = (0, 0);
    for broker in Broker::ALL.iter().cycle() {
        proxy.set_plan(Faults::clean());
        let mut scene = Scene::open_through(&mut suite, &services, *broker, &plan, &proxy.url());
        scene.worker_set.set_env("AWS_TIMEOUT", CLIENT_TIMEOUT);
        let seed = scene.suite.random.next();
        proxy.take_counters();
        proxy.set_plan(Faults::mixed(seed, SHARE, STALL).at_most(faults - done));
        scene.begin(4);
        scene.until("`_SUCCESS`", 3 * super::scene::END_MAX, Scene::finished);
        // The verdict needs a store that answers.
        proxy.set_plan(Faults::clean());
        let counters = proxy.take_counters();
        let shards = plan.rows.div_ceil(plan.shard_rows);
        assert_bounded(
            &counters,
            shards,
            scene.age().as_secs_f64() / 60.0,
            scene.worker_set.lives(),
        );
        done += counters.faults();
        requests += counters.requests();
        for (fault, count) in &counters.faults {
            scene.suite.add(fault, *count);
        }
        scene.conclude();
        if done >= faults {
            break;
        }
    }
    suite.add("faults", done);
    suite.add("requests", requests);
    suite.end();
}

/// DESIGN's bound on requests, and what faults may cost on top: the retries that they cause are bounded.
fn assert_bounded(counters: &Counters, shards: u64, minutes: f64, workers: u64) {
    // A shard: 10, its input (a row group or two, 2 requests each), and 2 for each further interval that it ran over.
    let per_shard = 10 + 4 + 2 * 4;
    // A worker: 4 + live workers a minute by DESIGN at an interval of a minute; here the interval is 0.3 s, so 200 of them.
    let per_worker_minute = 200.0 * (4 + workers) as f64;
    // Opening the job, the probe, and looking for the end.
    let per_worker = 60;
    let expected = shards * per_shard + workers * per_worker + (workers as f64 * minutes * per_worker_minute) as u64;
    let bound = expected + REQUESTS_PER_FAULT * counters.faults();
    let requests = counters.requests();
    assert!(
        requests <= bound,
        "{requests} requests, more than {bound}: {:?}",
        counters.requests
    );
}
