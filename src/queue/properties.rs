//! Properties of librdkafka by name, and who may set each: a job file, only the operator, or
//! nobody.
//!
//! See docs/decisions/020-a-job-file-is-not-its-operator.md.

/// Properties that only gristmill sets, each with the reason: the guarantee depends on them, or the
/// address contains them.
pub(crate) const RESERVED: &[(&str, &str)] = &[
    ("bootstrap.servers", "name the brokers in the address"),
    ("metadata.broker.list", "name the brokers in the address"),
    ("group.id", "name the group in the address: `?group=…`"),
    ("enable.auto.commit", "gristmill commits what is finished"),
    ("enable.auto.offset.store", "gristmill commits what is finished"),
    ("enable.idempotence", "gristmill needs it on"),
    ("acks", "gristmill needs `all`"),
    ("request.required.acks", "gristmill needs `all`"),
    ("transactional.id", "gristmill uses no transactions"),
    (
        "allow.auto.create.topics",
        "gristmill makes topics itself: the broker would make one with few partitions",
    ),
];

/// Properties of librdkafka with two names ("Alias for" in its CONFIGURATION.md), as (alias,
/// Kafka's name). Only Kafka's name is used here, so that each property is set once: of two names,
/// librdkafka would take the one that is set last.
pub(crate) const ALIASES: &[(&str, &str)] = &[
    ("compression.codec", "compression.type"),
    ("fetch.message.max.bytes", "max.partition.fetch.bytes"),
    ("max.in.flight", "max.in.flight.requests.per.connection"),
    ("message.send.max.retries", "retries"),
    ("message.timeout.ms", "delivery.timeout.ms"),
    ("queue.buffering.max.ms", "linger.ms"),
    ("sasl.mechanisms", "sasl.mechanism"),
    (
        "sasl.oauthbearer.client.credentials.client.id",
        "sasl.oauthbearer.client.id",
    ),
    (
        "sasl.oauthbearer.client.credentials.client.secret",
        "sasl.oauthbearer.client.secret",
    ),
];

/// Properties that a job file may set: they tune sending, fetching and timeouts, and name the
/// client. The list leaves out properties that name a file, a host or a library, hold a secret,
/// change security settings, or allow gigabytes of memory (`receive.message.max.bytes`) or an
/// endless wait (`delivery.timeout.ms`: 0). Only the operator may set unlisted properties, such as
/// those of later librdkafka versions.
pub(crate) const JOB_FILE_ALLOWED: &[&str] = &[
    "batch.num.messages",
    "batch.size",
    "broker.address.family",
    "broker.address.ttl",
    "check.crcs",
    "client.id",
    "client.rack",
    "compression.level",
    "compression.type",
    "connections.max.idle.ms",
    "coordinator.query.interval.ms",
    "fetch.error.backoff.ms",
    "fetch.max.bytes",
    "fetch.min.bytes",
    "fetch.queue.backoff.ms",
    "fetch.wait.max.ms",
    "heartbeat.interval.ms",
    "linger.ms",
    "max.in.flight.requests.per.connection",
    "max.partition.fetch.bytes",
    "max.poll.interval.ms",
    "message.copy.max.bytes",
    "message.max.bytes",
    "metadata.max.age.ms",
    "metadata.recovery.rebootstrap.trigger.ms",
    "metadata.recovery.strategy",
    "queue.buffering.backpressure.threshold",
    "queue.buffering.max.kbytes",
    "queue.buffering.max.messages",
    "queued.max.messages.kbytes",
    "queued.min.messages",
    "reconnect.backoff.max.ms",
    "reconnect.backoff.ms",
    "request.timeout.ms",
    "retries",
    "retry.backoff.max.ms",
    "retry.backoff.ms",
    "session.timeout.ms",
    "socket.connection.setup.timeout.ms",
    "socket.keepalive.enable",
    "socket.max.fails",
    "socket.nagle.disable",
    "socket.receive.buffer.bytes",
    "socket.send.buffer.bytes",
    "socket.timeout.ms",
    "sticky.partitioning.linger.ms",
    "topic.metadata.propagation.max.ms",
    "topic.metadata.refresh.fast.interval.ms",
    "topic.metadata.refresh.interval.ms",
    "topic.metadata.refresh.sparse",
];

/// Properties that make librdkafka or OpenSSL load a library.
const CODE_LOADING: &[&str] = &[
    "plugin.library.paths",
    "interceptors",
    "ssl.engine.id",
    "ssl.engine.location",
    "ssl.providers",
    "ssl_engine_callback_data",
];

/// Who may set a property.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// A job file or the operator.
    JobFile,
    /// Only the operator, by the environment or `--kafka`. The text is the reason.
    Operator(&'static str),
    /// Only the operator. The property is in no list here, and librdkafka may not know it.
    Unlisted,
    /// Nobody. The text is the reason.
    Nobody(&'static str),
}

/// Who may set the property of this name.
pub(crate) fn owner(property: &str) -> Owner {
    if let Some((_, why)) = RESERVED.iter().find(|(ours, _)| *ours == property) {
        return Owner::Nobody(why);
    }
    if JOB_FILE_ALLOWED.contains(&canonical_name(property)) {
        return Owner::JobFile;
    }
    if CODE_LOADING.contains(&property) {
        return Owner::Operator("loads native code, which a job file may not do");
    }
    let security = ["sasl", "ssl", "security.", "https.", "oauth"];
    if security.iter().any(|word| property.contains(word)) {
        return Owner::Operator("is a security setting (how the broker is trusted), which a job file may not change");
    }
    Owner::Unlisted
}

/// Whether the property authenticates us to a broker. Such properties go only to servers that the
/// operator chose.
pub(crate) fn is_credential(property: &str) -> bool {
    ["sasl.", "ssl.key", "ssl.certificate", "ssl_key", "ssl_certificate"]
        .iter()
        .any(|start| property.starts_with(start))
}

/// Whether the property's value is a secret, to be kept out of job files, command lines and
/// messages. The path of a secret's file is not secret.
pub(crate) fn is_secret(property: &str) -> bool {
    let name = property.to_ascii_lowercase();
    ["password", "passphrase", "secret", "key.pem", "jaas", "ssl_key"]
        .iter()
        .any(|word| name.contains(word))
        || name == "sasl.oauthbearer.config"
}

/// Whether librdkafka accepts this value of a property.
pub(crate) fn accepts(property: &str, value: &str) -> bool {
    rdkafka::ClientConfig::new()
        .set(property, value)
        .create_native_config()
        .is_ok()
}

/// The name that is used here for a property: Kafka's name if `property` is an alias.
pub(crate) fn canonical_name(property: &str) -> &str {
    let found = ALIASES.iter().find(|(alias, _)| *alias == property);
    found.map_or(property, |(_, name)| name)
}

#[cfg(test)]
mod tests {
    use rdkafka::error::KafkaError;
    use rdkafka::types::RDKafkaConfRes;

    use super::*;

    #[test]
    fn no_alias_maps_to_an_alias() {
        for (alias, name) in ALIASES {
            assert!(
                !ALIASES.iter().any(|(other, _)| other == name),
                "`{alias}` leads to an alias"
            );
        }
    }

    #[test]
    fn job_files_set_only_harmless_properties() {
        for name in JOB_FILE_ALLOWED {
            // `?` is an invalid number, switch and keyword: librdkafka rejects it for every known
            // property but plain texts.
            let native = rdkafka::ClientConfig::new().set(*name, "?").create_native_config();
            match native.err() {
                None => assert!(name.starts_with("client."), "`{name}` takes any text"),
                Some(KafkaError::ClientConfig(code, ..)) => {
                    assert_eq!(
                        code,
                        RDKafkaConfRes::RD_KAFKA_CONF_INVALID,
                        "librdkafka knows no `{name}`"
                    );
                }
                Some(other) => panic!("{name}: {other}"),
            }
            assert_eq!(canonical_name(name), *name, "is listed by its other name");
            assert!(!is_credential(name), "{name}");
            let forbidden_words = "location path file plugin sasl ssl security pem password secret oauth url server debug log _cb offset commit \
                            https events report";
            for word in forbidden_words.split_whitespace() {
                assert!(!name.contains(word), "`{name}` holds `{word}`");
            }
        }
        for alias in ["queue.buffering.max.ms", "compression.codec", "linger.ms"] {
            assert_eq!(owner(alias), Owner::JobFile, "{alias}");
        }
    }

    #[test]
    fn docs_list_the_properties_for_job_files() {
        let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/queues.md")).unwrap();
        let listed: Vec<&str> = page
            .lines()
            .filter_map(|line| line.strip_prefix("> "))
            .flat_map(|line| line.split([',', ' ']))
            .filter(|name| !name.is_empty())
            .map(|name| name.trim_matches('`'))
            .collect();
        assert_eq!(listed, JOB_FILE_ALLOWED);
    }

    #[test]
    fn only_the_operator_sets_code_security_and_unlisted_properties() {
        for (name, why) in [
            ("plugin.library.paths", "native code"),
            ("ssl.engine.location", "native code"),
            ("ssl.providers", "native code"),
            ("ssl_engine_callback_data", "native code"),
            ("security.protocol", "trusted"),
            ("sasl.mechanism", "trusted"),
            ("sasl.mechanisms", "trusted"),
            ("sasl.kerberos.kinit.cmd", "trusted"),
            ("sasl.oauthbearer.token.endpoint.url", "trusted"),
            ("ssl.ca.location", "trusted"),
            ("ssl.endpoint.identification.algorithm", "trusted"),
            ("enable.ssl.certificate.verification", "trusted"),
            ("enable.sasl.oauthbearer.unsecure.jwt", "trusted"),
            ("https.ca.pem", "trusted"),
        ] {
            let Owner::Operator(said) = owner(name) else {
                panic!("{name}")
            };
            assert!(said.contains(why), "{name}: {said}");
        }
        for name in [
            "debug",
            "offset.store.path",
            "delivery.report.only.error",
            "Linger.ms",
            "linger.ms ",
            "",
        ] {
            assert_eq!(owner(name), Owner::Unlisted, "{name}");
        }
        for (name, _) in RESERVED {
            assert!(matches!(owner(name), Owner::Nobody(_)), "{name}");
        }
    }

    #[test]
    fn secret_properties_are_known_by_name() {
        for name in [
            "sasl.password",
            "ssl.key.password",
            "SASL.OAUTHBEARER.CLIENT.SECRET",
            "ssl.key.pem",
            "sasl.oauthbearer.assertion.private.key.passphrase",
            "sasl.oauthbearer.assertion.private.key.pem",
            "sasl.oauthbearer.config",
            "sasl.jaas.config",
        ] {
            assert!(is_secret(name), "{name}");
        }
        for name in [
            "sasl.username",
            "ssl.ca.location",
            "ssl.key.location",
            "sasl.oauthbearer.method",
            "sasl.oauthbearer.token.endpoint.url",
        ] {
            assert!(!is_secret(name), "{name}");
        }
    }
}
