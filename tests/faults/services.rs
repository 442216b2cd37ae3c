//! What a fault test needs of the services: which it takes, their addresses, and how to kill them.

use std::path::PathBuf;
use std::time::Duration;

use rdkafka::admin::{AdminClient, AdminOptions};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::message::{Headers, OwnedHeaders};
use rdkafka::producer::{BaseProducer, BaseRecord, Producer};
use rdkafka::{ClientConfig, Message, Offset, TopicPartitionList};

use crate::services::{Action, S3, control, need, rabbitmqctl};

/// The header that counts how often a message was passed on.
pub(super) const HOPS: &str = "gristmill-hops";
const READ_MAX: Duration = Duration::from_secs(40);

pub(super) type Admin = AdminClient<DefaultClientContext>;

/// The services of this run.
#[derive(Debug, Clone)]
pub(super) struct Services {
    pub store: S3,
}

impl Services {
    /// The store and `brokers`, if all of them run; else `test` is noted as skipped.
    pub(super) fn of(test: &str, brokers: &[&str]) -> Option<Services> {
        need(test, "GRISTMILL_TEST_SERVICES_DIR")?;
        for broker in brokers {
            need(test, variable(broker))?;
        }
        Some(Services { store: S3::need(test)? })
    }

    /// SIGKILL.
    pub(super) fn kill(&self, name: &str) {
        control(name, Action::Kill);
    }

    /// Starts a killed service and waits until it answers.
    pub(super) fn start(&self, name: &str) {
        control(name, Action::Start);
    }

    /// Sets a value of RabbitMQ's main application, until the node ends.
    pub(super) fn set_rabbitmq(&self, name: &str, value: u64) {
        rabbitmqctl(&["eval", &format!("application:set_env(rabbit, {name}, {value}).")]);
    }

    /// RabbitMQ's own tool.
    pub(super) fn rabbitmqctl(&self, arguments: &[&str]) {
        rabbitmqctl(arguments);
    }

    /// RabbitMQ's log so far.
    pub(super) fn rabbitmq_log(&self) -> String {
        let dir = PathBuf::from(std::env::var_os("GRISTMILL_TEST_SERVICES_DIR").expect("checked before"));
        std::fs::read_to_string(dir.join("rabbitmq/rabbitmq.log")).expect("the broker's log can be read")
    }
}

/// The address of a broker that runs.
pub(super) fn address(broker: &str) -> String {
    std::env::var(variable(broker)).expect("checked before")
}

/// Asks Kafka for what only an administrator may ask for.
pub(super) fn ask_kafka(request: impl AsyncFnOnce(&Admin)) {
    let admin: Admin = ClientConfig::new()
        .set("bootstrap.servers", address("kafka"))
        .create()
        .expect("a client of the broker");
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(request(&admin));
}

/// Deletes a topic that is there.
pub(super) async fn delete_topic(admin: &Admin, topic: &str) {
    let deleted = admin.delete_topics(&[topic], &AdminOptions::new()).await;
    for result in deleted.expect("the broker answers") {
        result.expect("the topic is deleted");
    }
}

/// Sends any bytes to a topic, as no gristmill of this version would.
pub(super) fn send_to_kafka(topic: &str, body: &[u8], headers: OwnedHeaders) {
    let producer: BaseProducer = ClientConfig::new()
        .set("bootstrap.servers", address("kafka"))
        .create()
        .expect("a client of the broker");
    let record = BaseRecord::<(), [u8]>::to(topic).payload(body).headers(headers);
    producer
        .send(record)
        .map_err(|(error, _)| error)
        .expect("the message is queued");
    producer
        .flush(Duration::from_secs(10))
        .expect("the broker takes the message");
}

/// Every message that a topic holds, acknowledged or not: its bytes, and whether a worker has passed it on.
pub(super) fn read_kafka(topic: &str) -> Vec<(Vec<u8>, bool)> {
    let consumer: BaseConsumer = ClientConfig::new()
        .set("bootstrap.servers", address("kafka"))
        // Of no group that works on the topic.
        .set("group.id", "who-looks-on")
        .set("enable.auto.commit", "false")
        .create()
        .expect("a client of the broker");
    let metadata = consumer.fetch_metadata(Some(topic), READ_MAX);
    let metadata = metadata.expect("the broker answers");
    let (mut from, mut count) = (TopicPartitionList::new(), 0);
    for partition in metadata.topics()[0].partitions() {
        let marks = consumer.fetch_watermarks(topic, partition.id(), READ_MAX);
        let (first, end) = marks.expect("the broker answers");
        count += usize::try_from(end - first).expect("messages are counted up");
        from.add_partition_offset(topic, partition.id(), Offset::Beginning)
            .expect("an offset that there is");
    }
    consumer.assign(&from).expect("it can be read from its beginning");
    let read = |_| {
        let polled = consumer.poll(READ_MAX).expect("all messages come in time");
        let message = polled.expect("the broker answers");
        let passed_on = message
            .headers()
            .is_some_and(|headers| headers.iter().any(|header| header.key == HOPS));
        (message.payload().unwrap_or_default().to_vec(), passed_on)
    };
    (0..count).map(read).collect()
}

fn variable(broker: &str) -> &'static str {
    match broker {
        "kafka" => "GRISTMILL_TEST_KAFKA",
        "rabbitmq" => "GRISTMILL_TEST_RABBITMQ",
        other => panic!("`{other}` is no broker"),
    }
}
