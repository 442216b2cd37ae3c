//! SIGKILL of workers at random moments.

use super::job::{Broker, Plan};
use super::scene::{Scene, Storm};
use super::services::Services;
use super::suite::Suite;

#[test]
fn kills_over_kafka() {
    kills("kills_over_kafka", Broker::Kafka, 1_500..3_500);
}

#[test]
fn kills_over_rabbitmq() {
    kills("kills_over_rabbitmq", Broker::Rabbitmq, 300..1_800);
}

/// Kills come in bursts: a group that never settles would show nothing but that.
fn kills(name: &'static str, broker: Broker, gap_ms: std::ops::Range<u64>) {
    let Some(services) = Services::of(name, &[broker.name()]) else {
        return;
    };
    let mut suite = Suite::begin(name);
    let storm = Storm {
        faults: suite.count(30, 500),
        workers: 4,
        gap_ms,
        plan: Plan {
            rows: 30_000,
            ..Plan::default()
        },
    };
    storm.rage(&mut suite, &services, &[broker], burst);
    suite.end();
}

/// Kills two to all of the workers that are awake, and begins their next lives after a moment.
fn burst(scene: &mut Scene) -> u64 {
    let mut kills = 0;
    let victims = scene
        .suite
        .random
        .within(2..scene.worker_set.awake().len().max(2) as u64 + 1);
    for _ in 0..victims {
        let Some(seat) = random_awake(scene) else { break };
        let killed = scene.worker_set.kill(seat);
        kills += u64::from(killed);
        let pause = scene.suite.random.ms(0..200);
        std::thread::sleep(pause);
        scene.worker_set.begin(seat);
    }
    kills
}

/// A worker that runs and is not paused.
pub(super) fn random_awake(scene: &mut Scene) -> Option<usize> {
    let awake = scene.worker_set.awake();
    (!awake.is_empty()).then(|| *scene.suite.random.pick(&awake))
}
