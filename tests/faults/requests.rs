//! What the ledger costs: requests at the store without faults, counted by the proxy, against DESIGN's bound.

use std::time::{Duration, Instant};

use super::job::{Broker, Plan};
use super::scene::{END_MAX, LEAVE_MAX, Scene};
use super::services::Services;
use super::suite::Suite;
use crate::proxy::{Counters, Kind, Plan as Clean, Proxy};

const WORKERS: usize = 2;
/// `_SUCCESS`, the digests, and a block or two that are not closed.
const REQUESTS_OF_A_LOOK: u64 = 4;
/// Requests for `_SUCCESS` of a worker that finishes the job, or finds that it is finished, and leaves.
const LOOKS_AT_THE_END: u64 = 8;
/// Opening the job, the store's probe, the looks for the job's end.
const REQUESTS_OF_A_START: u64 = 40;

/// Of the ledger; inputs, orders and spendings are counted apart.
fn about_shards(counters: &Counters) -> u64 {
    let others = [Kind::Other, Kind::Control, Kind::Spend];
    counters.requests() - others.iter().map(|kind| counters.of_kind(*kind)).sum::<u64>()
}

#[test]
fn requests_stay_within_their_bound() {
    let name = "requests_stay_within_their_bound";
    let Some(services) = Services::of(name, &["kafka", "rabbitmq"]) else {
        return;
    };
    let mut suite = Suite::begin(name);
    let proxy = Proxy::start(&services.store.endpoint, Clean::clean());
    let shards = a_shard(&mut suite, &services, &proxy);
    let minutes = a_worker_minute(&mut suite, &services, &proxy);
    suite.note("requests_a_shard", shards);
    suite.note("requests_a_worker_interval", minutes);
    suite.end();
}

/// Many small shards within one log interval: requests a shard.
fn a_shard(suite: &mut Suite, services: &Services, proxy: &Proxy) -> f64 {
    let plan = Plan {
        rows: 12_000,
        shard_rows: 100,
        ms_per_row: 0.0,
        log_interval: 30.0,
        ..Plan::default()
    };
    let mut scene = Scene::open_through(suite, services, Broker::Kafka, &plan, &proxy.url());
    proxy.take_counters();
    let began = Instant::now();
    scene.begin(WORKERS);
    scene.until("`_SUCCESS`", END_MAX, Scene::finished);
    let counters = proxy.take_counters();
    let seconds = began.elapsed().as_secs() + 1;
    let shards = plan.rows / plan.shard_rows;
    let about = about_shards(&counters);
    // A worker that got nothing for a second looks whether the job is done.
    let looks = counters.of_kind(Kind::Success);
    let looks_max = WORKERS as u64 * (seconds + LOOKS_AT_THE_END);
    assert!(
        looks <= looks_max,
        "{looks} looks in {seconds} s, more than {looks_max}"
    );
    // Where a partition moves to a worker that starts late, messages of committed shards come again: a listing, and the commit.
    let again = counters.of_kind(Kind::Commit).saturating_sub(2 * shards).min(shards);
    let bound = 10 * shards + 2 * again + REQUESTS_OF_A_LOOK * looks + WORKERS as u64 * REQUESTS_OF_A_START;
    assert!(
        about <= bound,
        "{about} requests for {shards} shards and {looks} looks, more than {bound}: {:?}",
        counters.requests
    );
    // Footers are read once a worker, row groups in two requests at most; a shard has rows of one or two.
    let inputs = counters.of_kind(Kind::Other);
    assert!(
        inputs <= 4 * shards + WORKERS as u64 * REQUESTS_OF_A_START,
        "{inputs} requests for inputs: {:?}",
        counters.requests
    );
    // By themselves they would look for the job's end a log interval later.
    for seat in scene.worker_set.awake() {
        scene.worker_set.dismiss(seat, LEAVE_MAX).assert_left();
    }
    scene.hold(&[]);
    (about - REQUESTS_OF_A_LOOK * looks) as f64 / shards as f64
}

/// Large shards over many log intervals: requests of a worker in each of them.
fn a_worker_minute(suite: &mut Suite, services: &Services, proxy: &Proxy) -> f64 {
    let plan = Plan {
        rows: 6_000,
        shard_rows: 1_500,
        ms_per_row: 5.0,
        log_interval: 1.0,
        ..Plan::default()
    };
    let seconds = 5;
    let mut scene = Scene::open_through(suite, services, Broker::Rabbitmq, &plan, &proxy.url());
    scene.begin(WORKERS);
    scene.live(Duration::from_secs(2));
    proxy.take_counters();
    scene.live(Duration::from_secs(seconds));
    let counters = proxy.take_counters();
    let mine = counters.requests() as f64 / (WORKERS as f64 * seconds as f64);
    // What it looks at, and two requests for each shard with rows to write: one that runs, one whose tail does.
    let bound = (4 + WORKERS) as f64 + 2.0 * 2.0;
    assert!(
        mine <= bound,
        "{mine:.1} requests a worker and interval, more than {bound}: {:?}",
        counters.requests
    );
    assert!(
        counters.of_kind(Kind::Log) > 0,
        "nothing was logged: {:?}",
        counters.requests
    );
    scene.conclude();
    mine
}
