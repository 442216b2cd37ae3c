//! SIGKILL of the store in the middle of jobs, and its return some time later.

use super::job::{Broker, Plan};
use super::scene::{Scene, Storm};
use super::services::Services;
use super::suite::Suite;

#[test]
fn the_store_dies_and_comes_back() {
    let name = "the_store_dies_and_comes_back";
    let Some(services) = Services::of(name, &["kafka", "rabbitmq"]) else {
        return;
    };
    let mut suite = Suite::begin(name);
    let storm = Storm {
        faults: suite.count(3, 50),
        workers: 3,
        gap_ms: 1_000..3_000,
        plan: Plan::default(),
    };
    storm.rage(&mut suite, &services, &Broker::ALL, kill_store);
    suite.end();
}

fn kill_store(scene: &mut Scene) -> u64 {
    let services = scene.services.clone();
    services.kill("minio");
    let away = scene.suite.random.ms(0..5_000);
    scene.live(away);
    services.start("minio");
    1
}
