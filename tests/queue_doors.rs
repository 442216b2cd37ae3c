//! At the door of a broker: what is refused says so in one clear line, without secrets, and soon.

use std::time::{Duration, Instant};

use gristmill::queue::{Publisher, QueueError, QueueUrl, Settings, connect};

use crate::queue_brokers::{drain, fill, filled, kafka_url, messages, need, rabbit_url, settings};

/// What a door may take.
const DOOR: Duration = Duration::from_secs(15);

/// Both doors refuse, in time, with one line that has `words`, names the address and keeps the secret.
async fn refused(url: &QueueUrl, settings: &Settings, secret: &str, words: &[&str]) {
    for publishing in [true, false] {
        let start = Instant::now();
        let error = if publishing {
            Publisher::open(url, settings).await.map(drop)
        } else {
            // A broker that takes its time refuses at the first message.
            match connect(url, settings).await {
                Ok(queue) => queue.receive(DOOR).await.map(drop),
                Err(error) => Err(error),
            }
        };
        let error = error.expect_err("a closed door");
        let line = error.to_string();
        eprintln!("{line}");
        assert!(start.elapsed() < DOOR, "{:?}: {line}", start.elapsed());
        assert!(!line.contains('\n') && !line.contains(secret), "{line}");
        assert!(line.contains(&url.to_string()), "{line}");
        assert!(words.iter().all(|word| line.contains(word)), "{line}");
        assert!(!matches!(error, QueueError::Unavailable { .. }), "{error:?}");
    }
}

fn with_ca(variable: &str) -> Settings {
    Settings {
        ca_file: std::env::var_os(variable).map(Into::into),
        ..settings()
    }
}

fn secured(address: &str, user: &str, password: &str) -> String {
    format!("{user}:{password}@{address}")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kafka_with_tls_and_scram() {
    let test = "kafka_with_tls_and_scram";
    let Some(address) = need(test, "GRISTMILL_TEST_KAFKA_TLS") else {
        return;
    };
    let Some(user) = need(test, "GRISTMILL_TEST_SASL_USER") else {
        return;
    };
    let password = std::env::var("GRISTMILL_TEST_SASL_PASSWORD").unwrap();
    let good = with_ca("GRISTMILL_TEST_CA");
    let url = kafka_url(&secured(&address, &user, &password), "tls", 2);
    let publisher = Publisher::open(&url, &good).await.unwrap();
    publisher.prepare(4).await.unwrap();
    publisher.send(&messages(0..4)).await.unwrap();
    let queue = connect(&url, &good).await.unwrap();
    drain(&*queue, &(0..4).collect()).await;

    let wrong = kafka_url(&secured(&address, &user, "not-the-password"), "tls", 2);
    refused(&wrong, &good, "not-the-password", &["refuses access", "uthentication"]).await;
    let wrong_ca = with_ca("GRISTMILL_TEST_WRONG_CA");
    refused(&url, &wrong_ca, &password, &["refuses access", "certificate"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kafka_without_the_right_to_create() {
    let test = "kafka_without_the_right_to_create";
    let Some(address) = need(test, "GRISTMILL_TEST_KAFKA_TLS") else {
        return;
    };
    let Some(user) = need(test, "GRISTMILL_TEST_SASL_RESTRICTED_USER") else {
        return;
    };
    let password = std::env::var("GRISTMILL_TEST_SASL_RESTRICTED_PASSWORD").unwrap();
    let good = with_ca("GRISTMILL_TEST_CA");
    let url = kafka_url(&secured(&address, &user, &password), "rights", 2);
    let publisher = Publisher::open(&url, &good).await.unwrap();
    let error = publisher.prepare(4).await.expect_err("no right to create");
    let line = error.to_string();
    assert!(matches!(error, QueueError::Denied { .. }), "{line}");
    assert!(
        line.contains("no right to create") && !line.contains(&password),
        "{line}"
    );
    // Somebody who may makes the topic: then nothing is lacking.
    let plain = need(test, "GRISTMILL_TEST_KAFKA").unwrap();
    let QueueUrl::Kafka(kafka) = &url else {
        panic!("a Kafka address")
    };
    fill(
        &format!("kafka://{plain}/{}", kafka.topic).parse().unwrap(),
        &messages(0..1),
    )
    .await;
    assert!(!publisher.prepare(4).await.unwrap().created);
    publisher.send(&messages(1..4)).await.unwrap();
    let queue = connect(&url, &good).await.unwrap();
    drain(&*queue, &(0..4).collect()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rabbitmq_with_tls() {
    let Some(address) = need("rabbitmq_with_tls", "GRISTMILL_TEST_RABBITMQ_TLS") else {
        return;
    };
    let good = with_ca("GRISTMILL_TEST_CA");
    let url = rabbit_url(&address, "tls", "");
    let publisher = Publisher::open(&url, &good).await.unwrap();
    publisher.prepare(4).await.unwrap();
    publisher.send(&messages(0..4)).await.unwrap();
    let queue = connect(&url, &good).await.unwrap();
    drain(&*queue, &(0..4).collect()).await;
    let wrong_ca = with_ca("GRISTMILL_TEST_WRONG_CA");
    refused(&url, &wrong_ca, "gristmill:0", &["refuses access", "certificate"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rabbitmq_refuses() {
    let Some(address) = need("rabbitmq_refuses", "GRISTMILL_TEST_RABBITMQ") else {
        return;
    };
    let (_, host) = address.rsplit_once('@').unwrap();
    let url = format!("amqp://gristmill:not-the-password@{host}/q").parse().unwrap();
    refused(
        &url,
        &settings(),
        "not-the-password",
        &["refuses access", "ACCESS_REFUSED"],
    )
    .await;
    let url = format!("{address}/no-such-vhost/q").parse().unwrap();
    refused(&url, &settings(), "gristmill:0", &["refuses access", "no-such-vhost"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unknown_hosts_are_named() {
    for url in [
        "kafka://u:secret@no-such-host.invalid/t",
        "amqp://u:secret@no-such-host.invalid/q",
    ] {
        let url = url.parse().unwrap();
        let start = Instant::now();
        let error = Publisher::open(&url, &settings()).await.map(drop).expect_err("no host");
        let line = error.to_string();
        assert!(matches!(error, QueueError::UnknownHost { .. }), "{error:?}");
        assert!(
            line.contains("no such host") && line.contains(&url.to_string()),
            "{line}"
        );
        assert!(!line.contains('\n') && !line.contains("secret"), "{line}");
        // Who receives waits until there is one.
        let queue = connect(&url, &settings()).await.unwrap();
        assert!(queue.receive(Duration::from_secs(2)).await.unwrap().is_none());
        assert!(!queue.is_attached());
        assert!(start.elapsed() < DOOR, "{:?}", start.elapsed());
    }
}

/// Nobody listens there: publishing fails in time, receiving begins and gives nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn brokers_that_are_away_are_waited_for() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = free.local_addr().unwrap().port();
    drop(free);
    for scheme in ["kafka", "amqp"] {
        let url: QueueUrl = format!("{scheme}://127.0.0.1:{port}/q").parse().unwrap();
        let start = Instant::now();
        let error = Publisher::open(&url, &settings())
            .await
            .map(drop)
            .expect_err("nobody is there");
        assert!(matches!(error, QueueError::Unavailable { .. }), "{error:?}");
        assert!(error.to_string().contains(&url.to_string()), "{error}");
        let queue = connect(&url, &settings()).await.unwrap();
        assert!(queue.receive(Duration::from_millis(300)).await.unwrap().is_none());
        assert!(!queue.is_attached(), "that nothing came says nothing");
        drop(queue);
        assert!(
            start.elapsed() < 2 * DOOR + Duration::from_secs(6),
            "{:?}",
            start.elapsed()
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn impossible_properties_are_named_without_their_values() {
    for (name, value) in [
        ("no.such.property", "hunter2"),
        ("enable.auto.commit", "true"),
        ("session.timeout.ms", "hunter2"),
    ] {
        let settings = Settings {
            kafka: vec![(name.to_owned(), value.to_owned())],
            ..settings()
        };
        let url = "kafka://127.0.0.1:1/t".parse().unwrap();
        let error = connect(&url, &settings).await.map(drop).expect_err("refused");
        let line = error.to_string();
        assert!(matches!(error, QueueError::Settings { .. }), "{line}");
        assert!(line.contains(name) && !line.contains("hunter2"), "{line}");
    }
}

/// Ten thousand messages are sent within seconds, each confirmed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_messages_are_sent_quickly() {
    let kafka = need("many_messages", "GRISTMILL_TEST_KAFKA").map(|address| kafka_url(&address, "many", 8));
    let rabbit = need("many_messages", "GRISTMILL_TEST_RABBITMQ").map(|address| rabbit_url(&address, "many", ""));
    for url in [kafka, rabbit].into_iter().flatten() {
        let start = Instant::now();
        let queue = filled(&url, &messages(0..10_000)).await;
        eprintln!("{url}: 10,000 messages in {:?}", start.elapsed());
        assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
        drop(queue);
    }
}
