//! The topic or queue is deleted in the middle of a job and made anew; `reconcile` brings the shards back.

use std::time::Duration;

use rdkafka::admin::{AdminOptions, NewTopic, TopicReplication};

use super::job::{Broker, Plan};
use super::scene::Scene;
use super::services::{Services, ask_kafka, delete_topic};
use super::suite::Suite;

/// Of the topic made anew.
const PARTITIONS: i32 = 8;

#[test]
fn a_lost_topic_loses_nothing() {
    lost("a_lost_topic_loses_nothing", Broker::Kafka);
}

#[test]
fn a_lost_queue_loses_nothing() {
    lost("a_lost_queue_loses_nothing", Broker::Rabbitmq);
}

fn lost(name: &'static str, broker: Broker) {
    let Some(services) = Services::of(name, &[broker.name()]) else {
        return;
    };
    let mut suite = Suite::begin(name);
    let times = suite.count(1, 10);
    let plan = Plan {
        rows: 12_000,
        ..Plan::default()
    };
    for _ in 0..times {
        let mut scene = Scene::open(&mut suite, &services, broker, &plan);
        scene.begin(3);
        let moment = scene.suite.random.ms(500..3_000);
        scene.live(moment);
        assert!(!scene.finished(), "the job was over before its queue was lost");
        match broker {
            Broker::Kafka => recreate_topic(&scene.job.name),
            // `reconcile`, or a worker that consumes again, declares it anew.
            Broker::Rabbitmq => {
                services.rabbitmqctl(&["delete_queue", &scene.job.name]);
            }
        }
        let passes = scene.reconcile_until_finished();
        scene.suite.add("reconcile_passes", passes);
        scene.conclude();
        suite.add("faults", 1);
    }
    suite.end();
}

fn recreate_topic(topic: &str) {
    ask_kafka(async |admin| {
        let options = AdminOptions::new();
        delete_topic(admin, topic).await;
        let new = NewTopic::new(topic, PARTITIONS, TopicReplication::Fixed(1));
        // Deleting takes a moment; until then the name is taken.
        for _ in 0..100 {
            let made = admin.create_topics([&new], &options).await.expect("the broker answers");
            if made.iter().all(Result::is_ok) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        panic!("the topic could not be made anew");
    });
}
