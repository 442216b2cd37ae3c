//! librdkafka properties from the address, the settings and the environment.

use rdkafka::ClientConfig;
use rdkafka::error::KafkaError;

use crate::queue::QueueError;
use crate::queue::address::KafkaUrl;
use crate::queue::properties::RESERVED;
use crate::queue::settings::ResolvedSettings;

/// Properties that consumer and producer share: brokers, gristmill's defaults, TLS and SASL. Fails
/// on a property of `RESERVED`.
fn common_config(url: &KafkaUrl, resolved: &ResolvedSettings) -> Result<ClientConfig, QueueError> {
    for name in resolved.kafka.keys() {
        if let Some((_, why)) = RESERVED.iter().find(|(ours, _)| ours == name) {
            return Err(QueueError::Settings {
                why: format!("the Kafka property `{name}` cannot be set: {why}"),
            });
        }
    }
    let mut config = ClientConfig::new();
    config
        .set("client.id", "gristmill")
        .set("bootstrap.servers", url.brokers.join(","))
        .set("reconnect.backoff.max.ms", "5000")
        .set("socket.keepalive.enable", "true")
        // A topic that is deleted and created again is noticed within seconds.
        .set("topic.metadata.refresh.interval.ms", "10000")
        // Brokers create topics by default: the producer's metadata request would create our topic,
        // with the broker's default number of partitions, usually 1.
        .set("allow.auto.create.topics", "false");
    if let Some(file) = &resolved.ca_file {
        config
            .set("security.protocol", "SSL")
            .set("ssl.ca.location", file.to_string_lossy());
    }
    if let Some(user) = &resolved.user {
        config
            .set("security.protocol", "SASL_SSL")
            .set("sasl.mechanism", "SCRAM-SHA-512")
            .set("sasl.username", user);
    }
    if let Some(password) = &resolved.password {
        config.set("sasl.password", password.reveal());
    }
    Ok(config)
}

fn apply_user_properties(config: &mut ClientConfig, resolved: &ResolvedSettings) {
    for (name, value) in &resolved.kafka {
        config.set(name, value);
    }
}

/// The consumer's properties.
pub(crate) fn consumer(url: &KafkaUrl, resolved: &ResolvedSettings) -> Result<ClientConfig, QueueError> {
    let mut config = common_config(url, resolved)?;
    config
        .set("group.id", &url.group)
        .set("partition.assignment.strategy", "cooperative-sticky")
        .set("auto.offset.reset", "earliest")
        // Short, so that a missing topic is reported soon: `consumer.rs` itself asks again.
        .set("topic.metadata.propagation.max.ms", "1000")
        // Messages are pointers, so few are fetched ahead, and a resumed partition must not wait
        // behind a long poll.
        .set("fetch.wait.max.ms", "100")
        .set("max.partition.fetch.bytes", "32768")
        .set("queued.min.messages", "16");
    apply_user_properties(&mut config, resolved);
    config
        .set("enable.auto.commit", "false")
        .set("enable.auto.offset.store", "false");
    Ok(config)
}

/// The producer's properties, also used to create topics.
pub(crate) fn producer(url: &KafkaUrl, resolved: &ResolvedSettings) -> Result<ClientConfig, QueueError> {
    let mut config = common_config(url, resolved)?;
    let timeout_ms = resolved.settings.send_timeout.as_millis().max(1000);
    config.set("delivery.timeout.ms", timeout_ms.to_string());
    apply_user_properties(&mut config, resolved);
    config.set("enable.idempotence", "true").set("acks", "all");
    Ok(config)
}

/// The error for a property that librdkafka rejects. Its text never contains the property's value.
pub(crate) fn property_error(error: KafkaError, resolved: &ResolvedSettings) -> QueueError {
    let why = match error {
        KafkaError::ClientConfig(_, _, name, _) => {
            format!("librdkafka does not know the property `{name}`, or not with the value given")
        }
        other => format!(
            "librdkafka refuses its properties: {}",
            resolved.scrub.clean_line(&other.to_string())
        ),
    };
    QueueError::Settings { why }
}

/// The consumer's `session.timeout.ms`: the maximum time for which the group waits for this member.
pub(crate) fn session_timeout_ms(config: &ClientConfig) -> u64 {
    const LIBRDKAFKA_DEFAULT: u64 = 45_000;
    config
        .get("session.timeout.ms")
        .and_then(|text| text.parse().ok())
        .unwrap_or(LIBRDKAFKA_DEFAULT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::queue::{QueueUrl, Settings};

    fn resolved(pairs: &[(&str, &str)]) -> (KafkaUrl, ResolvedSettings) {
        let url: QueueUrl = "kafka://u:pass@h/t?group=g".parse().unwrap();
        let settings = Settings {
            kafka: pairs.iter().map(|&(a, b)| (a.to_owned(), b.to_owned())).collect(),
            ..Settings::default()
        };
        let resolved = ResolvedSettings::new(&url, &settings).unwrap();
        let QueueUrl::Kafka(url) = url else {
            panic!("a Kafka address")
        };
        (url, resolved)
    }

    #[test]
    fn an_alias_of_a_property_replaces_our_default() {
        let (url, ok) = resolved(&[
            ("sasl.mechanisms", "PLAIN"),
            ("fetch.message.max.bytes", "1000"),
            ("message.timeout.ms", "7000"),
        ]);
        for config in [consumer(&url, &ok).unwrap(), producer(&url, &ok).unwrap()] {
            for (alias, name, value) in [
                ("sasl.mechanisms", "sasl.mechanism", "PLAIN"),
                ("fetch.message.max.bytes", "max.partition.fetch.bytes", "1000"),
                ("message.timeout.ms", "delivery.timeout.ms", "7000"),
            ] {
                assert_eq!((config.get(alias), config.get(name)), (None, Some(value)));
            }
        }
    }

    #[test]
    fn properties_pass_through_except_reserved_ones() {
        let (url, ok) = resolved(&[("sasl.mechanism", "PLAIN"), ("session.timeout.ms", "2000")]);
        let config = consumer(&url, &ok).unwrap();
        for (name, value) in [
            ("sasl.mechanism", "PLAIN"),
            ("sasl.password", "pass"),
            ("security.protocol", "SASL_SSL"),
            ("group.id", "g"),
            ("enable.auto.commit", "false"),
            ("enable.auto.offset.store", "false"),
            ("auto.offset.reset", "earliest"),
            ("allow.auto.create.topics", "false"),
        ] {
            assert_eq!(config.get(name), Some(value), "{name}");
        }
        assert_eq!(session_timeout_ms(&config), 2000);
        assert_eq!(producer(&url, &ok).unwrap().get("acks"), Some("all"));
        assert_eq!(
            producer(&url, &ok).unwrap().get("allow.auto.create.topics"),
            Some("false")
        );
        for (name, _) in RESERVED {
            let (url, bad) = resolved(&[(name, "x")]);
            assert!(
                matches!(consumer(&url, &bad), Err(QueueError::Settings { .. })),
                "{name}"
            );
        }
    }
}
