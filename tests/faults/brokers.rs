//! SIGKILL of a broker in the middle of jobs, and its return some time later.

use super::job::{Broker, Plan};
use super::scene::{Scene, Storm};
use super::services::Services;
use super::suite::Suite;

#[test]
fn kafka_dies_and_comes_back() {
    broker_dies("kafka_dies_and_comes_back", Broker::Kafka);
}

#[test]
fn rabbitmq_dies_and_comes_back() {
    broker_dies("rabbitmq_dies_and_comes_back", Broker::Rabbitmq);
}

fn broker_dies(name: &'static str, broker: Broker) {
    let Some(services) = Services::of(name, &[broker.name()]) else {
        return;
    };
    let mut suite = Suite::begin(name);
    let storm = Storm {
        faults: suite.count(3, 50),
        workers: 3,
        gap_ms: 1_000..4_000,
        plan: Plan {
            rows: 20_000,
            ..Plan::default()
        },
    };
    storm.rage(&mut suite, &services, &[broker], kill_broker);
    suite.end();
}

fn kill_broker(scene: &mut Scene) -> u64 {
    let name = scene.broker.name();
    let services = scene.services.clone();
    services.kill(name);
    let away = scene.suite.random.ms(0..3_000);
    scene.live(away);
    services.start(name);
    1
}
