//! SIGSTOP past session and log interval, then SIGCONT: a worker that believes it still owns its shards.

use std::time::Duration;

use super::job::{Broker, Plan};
use super::kills::random_awake;
use super::scene::{Scene, Storm};
use super::services::Services;
use super::suite::Suite;

#[test]
fn pauses_past_the_session() {
    let name = "pauses_past_the_session";
    let Some(services) = Services::of(name, &["kafka", "rabbitmq"]) else {
        return;
    };
    let mut suite = Suite::begin(name);
    // A connection of RabbitMQ is as good as a session: its heartbeats decide how long a silent worker keeps its shards.
    services.set_rabbitmq("heartbeat", 2);
    let storm = Storm {
        faults: suite.count(10, 200),
        workers: 4,
        gap_ms: 500..1_500,
        plan: Plan {
            rows: 30_000,
            log_interval: 0.5,
            ..Plan::default()
        },
    };
    storm.rage(&mut suite, &services, &Broker::ALL, pause);
    services.set_rabbitmq("heartbeat", 60);
    suite.end();
}

/// Stops one to three workers until others must have taken over their shards, then lets them go on.
fn pause(scene: &mut Scene) -> u64 {
    let mut paused = Vec::new();
    for _ in 0..scene.suite.random.within(1..4) {
        if let Some(seat) = random_awake(scene) {
            scene.worker_set.pause(seat);
            paused.push(seat);
        }
    }
    let time = match scene.broker {
        Broker::Kafka => scene.suite.random.ms(2_500..4_500),
        // Two missed heartbeats.
        Broker::Rabbitmq => Duration::from_millis(2_000) + scene.suite.random.ms(2_500..4_500),
    };
    scene.live(time);
    for seat in &paused {
        scene.worker_set.wake(*seat);
    }
    paused.len() as u64
}
