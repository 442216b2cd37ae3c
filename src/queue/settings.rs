//! What a queue needs besides its address: librdkafka properties, limits, and secrets from the environment or files.
//!
//! Precedence, first wins. User and password: the address, then [`Settings`], then `GRISTMILL_QUEUE_USER`,
//! `GRISTMILL_QUEUE_PASSWORD`, then the file that `GRISTMILL_QUEUE_PASSWORD_FILE` names. A librdkafka property:
//! [`Settings::kafka`] (the last of one name), then `GRISTMILL_KAFKA_SASL_MECHANISM` and its like, then the file that
//! `GRISTMILL_KAFKA_…_FILE` names, then what the address says, then gristmill's default.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::QueueError;
use super::address::{QueueUrl, Secret};

const PROPERTY_PREFIX: &str = "GRISTMILL_KAFKA_";
const FILE_SUFFIX: &str = "_FILE";
/// Properties of librdkafka that have two names (its CONFIGURATION.md: "Alias for"), and the one used here: Kafka's. Each is set
/// once and under one name: of two names, librdkafka takes whichever it is told last.
const ALIASES: &[(&str, &str)] = &[
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
/// Shorter texts are no secrets worth hiding, and hiding them would garble every line.
const SECRET_BYTES_MIN: usize = 3;

/// How to talk to a queue; the environment fills in what is absent.
#[derive(Clone)]
pub struct Settings {
    /// librdkafka properties, passed through.
    pub kafka: Vec<(String, String)>,
    /// Deliveries that may be with the worker at once; at least 1.
    pub in_flight: u32,
    pub user: Option<String>,
    pub password: Option<Secret>,
    /// Certificates that are trusted besides the system's, PEM.
    pub ca_file: Option<PathBuf>,
    /// How long a message that is for another worker is held before it is sent again.
    pub pass_on_delay: Duration,
    /// How long a delivery may go without a first [`super::Queue::extend`].
    pub first_lease: Duration,
    /// How long a send may wait for a broker that is away.
    pub send_timeout: Duration,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            kafka: Vec::new(),
            in_flight: 4,
            user: None,
            password: None,
            ca_file: None,
            pass_on_delay: Duration::from_secs(5),
            first_lease: Duration::from_secs(600),
            send_timeout: Duration::from_secs(60),
        }
    }
}

impl std::fmt::Debug for Settings {
    /// Names of properties, never their values.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<&str> = self.kafka.iter().map(|(name, _)| name.as_str()).collect();
        f.debug_struct("Settings")
            .field("kafka", &names)
            .field("in_flight", &self.in_flight)
            .field("user", &self.user)
            .field("password", &self.password)
            .field("ca_file", &self.ca_file)
            .finish_non_exhaustive()
    }
}

/// Address, settings and environment, put together.
#[derive(Clone)]
pub(crate) struct Resolved {
    pub settings: Settings,
    pub user: Option<String>,
    pub password: Option<Secret>,
    pub ca_file: Option<PathBuf>,
    /// librdkafka properties by name; of [`ALIASES`], the one used here.
    pub kafka: BTreeMap<String, String>,
    pub scrub: Scrub,
}

impl Resolved {
    /// Reads the environment. Fails where a file named there cannot be read, or a setting is impossible.
    pub fn new(url: &QueueUrl, settings: &Settings) -> Result<Resolved, QueueError> {
        Resolved::with(
            url,
            settings,
            std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?))),
        )
    }

    fn with(
        url: &QueueUrl,
        settings: &Settings,
        environment: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Resolved, QueueError> {
        let environment: BTreeMap<String, String> = environment
            .into_iter()
            .filter(|(name, value)| name.starts_with("GRISTMILL_") && !value.is_empty())
            .collect();
        let (url_user, url_password) = match url {
            QueueUrl::Kafka(url) => (url.user.clone(), url.password.clone()),
            QueueUrl::RabbitMq(url) => (url.user.clone(), url.password.clone()),
        };
        let password_file = || -> Result<Option<Secret>, QueueError> {
            let name = "GRISTMILL_QUEUE_PASSWORD_FILE";
            let Some(path) = environment.get(name) else {
                return Ok(None);
            };
            Ok(Some(Secret::new(read(name, Path::new(path))?)))
        };
        let user = url_user
            .or_else(|| settings.user.clone())
            .or_else(|| environment.get("GRISTMILL_QUEUE_USER").cloned());
        let password = url_password
            .or_else(|| settings.password.clone())
            .or_else(|| environment.get("GRISTMILL_QUEUE_PASSWORD").map(Secret::new));
        let password = match password {
            None => password_file()?,
            found => found,
        };
        let ca_file = settings
            .ca_file
            .clone()
            .or_else(|| environment.get("GRISTMILL_QUEUE_CA_FILE").map(PathBuf::from));
        let mut kafka = properties(&environment)?;
        kafka.extend(
            settings
                .kafka
                .iter()
                .map(|(name, value)| (one_name(name), value.clone())),
        );
        let mut scrub = Scrub::default();
        scrub.hide(password.as_ref().map(Secret::reveal));
        scrub.hide(
            kafka
                .iter()
                .filter(|(name, _)| is_secret(name))
                .map(|(_, value)| &**value),
        );
        Ok(Resolved {
            settings: Settings {
                in_flight: settings.in_flight.max(1),
                ..settings.clone()
            },
            user,
            password,
            ca_file,
            kafka,
            scrub,
        })
    }
}

/// librdkafka properties of the environment: `GRISTMILL_KAFKA_SASL_MECHANISM` is `sasl.mechanism`.
fn properties(environment: &BTreeMap<String, String>) -> Result<BTreeMap<String, String>, QueueError> {
    let name = |text: &str| one_name(&text.to_ascii_lowercase().replace('_', "."));
    let mut found = BTreeMap::new();
    for (variable, path) in environment {
        let Some(property) = variable
            .strip_prefix(PROPERTY_PREFIX)
            .and_then(|rest| rest.strip_suffix(FILE_SUFFIX))
        else {
            continue;
        };
        found.insert(name(property), read(variable, Path::new(path))?);
    }
    for (variable, value) in environment {
        if let Some(property) = variable.strip_prefix(PROPERTY_PREFIX)
            && !property.ends_with(FILE_SUFFIX)
        {
            found.insert(name(property), value.clone());
        }
    }
    Ok(found)
}

/// The name used here of a property that has two.
fn one_name(property: &str) -> String {
    let found = ALIASES.iter().find(|(alias, _)| *alias == property);
    found.map_or(property, |(_, name)| name).to_owned()
}

/// Largest file of a password or key.
const SECRET_BYTES_MAX: u64 = 1 << 20;

/// A secret's file, without its last line break.
fn read(variable: &str, path: &Path) -> Result<String, QueueError> {
    let text = crate::regular::read_text(path, SECRET_BYTES_MAX).map_err(|error| QueueError::Settings {
        what: format!("cannot read `{}`, which `{variable}` names: {error}", path.display()),
    })?;
    Ok(text.trim_end_matches(['\r', '\n']).to_owned())
}

/// Whether a property's value is nobody's business.
fn is_secret(property: &str) -> bool {
    ["password", "secret", "key.pem", "oauthbearer", "jaas", "ssl_key"]
        .iter()
        .any(|word| property.contains(word))
}

/// Takes secrets out of texts that others wrote.
#[derive(Clone, Default)]
pub(crate) struct Scrub(Vec<String>);

impl Scrub {
    fn hide<'a>(&mut self, secrets: impl IntoIterator<Item = &'a str>) {
        for secret in secrets {
            if secret.len() >= SECRET_BYTES_MIN {
                self.0.push(secret.to_owned());
            }
        }
        // A longer secret may contain a shorter one.
        self.0.sort_by_key(|secret| std::cmp::Reverse(secret.len()));
    }

    /// The text on one line, without any secret.
    pub fn line(&self, text: &str) -> String {
        let mut line = text.split_whitespace().collect::<Vec<_>>().join(" ");
        for secret in &self.0 {
            line = line.replace(secret.as_str(), "***");
        }
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(url: &str, settings: &Settings, environment: &[(&str, &str)]) -> Resolved {
        let environment = environment
            .iter()
            .map(|&(name, value)| (name.to_owned(), value.to_owned()));
        Resolved::with(&url.parse().unwrap(), settings, environment).unwrap()
    }

    #[test]
    fn the_address_wins_over_settings_over_environment_over_files() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("secret");
        std::fs::write(&file, "from-file\n").unwrap();
        let file = file.to_str().unwrap();
        let password = |url, settings: &Settings, environment: &[(&str, &str)]| {
            let found = resolve(url, settings, environment);
            found.password.map(|secret| secret.reveal().to_owned())
        };
        let files = [("GRISTMILL_QUEUE_PASSWORD_FILE", file)];
        let both = [files[0], ("GRISTMILL_QUEUE_PASSWORD", "from-env")];
        let set = Settings {
            password: Some(Secret::new("from-settings")),
            ..Settings::default()
        };
        let none = Settings::default();
        assert_eq!(password("amqp://h/q", &none, &[]), None);
        assert_eq!(password("amqp://h/q", &none, &files).as_deref(), Some("from-file"));
        assert_eq!(password("amqp://h/q", &none, &both).as_deref(), Some("from-env"));
        assert_eq!(password("amqp://h/q", &set, &both).as_deref(), Some("from-settings"));
        assert_eq!(password("amqp://u:url@h/q", &set, &both).as_deref(), Some("url"));

        let set = Settings {
            kafka: vec![("sasl.mechanism".into(), "PLAIN".into())],
            ..Settings::default()
        };
        let found = resolve(
            "kafka://h/t",
            &set,
            &[
                ("GRISTMILL_KAFKA_SASL_MECHANISM", "SCRAM-SHA-256"),
                ("GRISTMILL_KAFKA_SSL_KEY_PASSWORD_FILE", file),
                ("GRISTMILL_KAFKA_SECURITY_PROTOCOL", "SASL_SSL"),
            ],
        );
        let pairs: Vec<_> = found.kafka.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
        assert_eq!(
            pairs,
            [
                ("sasl.mechanism", "PLAIN"),
                ("security.protocol", "SASL_SSL"),
                ("ssl.key.password", "from-file")
            ]
        );
        assert_eq!(found.scrub.line("a from-file\nb"), "a *** b");
    }

    #[test]
    fn two_names_of_a_property_are_one() {
        let set = Settings {
            kafka: vec![("sasl.mechanisms".into(), "PLAIN".into())],
            ..Settings::default()
        };
        let environment = [
            ("GRISTMILL_KAFKA_SASL_MECHANISM", "SCRAM-SHA-256"),
            ("GRISTMILL_KAFKA_MESSAGE_TIMEOUT_MS", "7000"),
        ];
        let found = resolve("kafka://h/t", &set, &environment);
        let pairs: Vec<_> = found.kafka.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
        assert_eq!(pairs, [("delivery.timeout.ms", "7000"), ("sasl.mechanism", "PLAIN")]);
        for (alias, name) in ALIASES {
            assert!(
                !ALIASES.iter().any(|(other, _)| other == name),
                "`{alias}` leads to an alias"
            );
        }
    }

    #[test]
    fn a_missing_file_is_named_and_debug_hides_values() {
        let url = "amqp://h/q".parse().unwrap();
        let environment = [("GRISTMILL_QUEUE_PASSWORD_FILE".to_owned(), "/nowhere/x".to_owned())];
        let error = Resolved::with(&url, &Settings::default(), environment).err().unwrap();
        assert!(error.to_string().contains("`/nowhere/x`"), "{error}");
        let settings = Settings {
            kafka: vec![("sasl.password".into(), "hunter2".into())],
            password: Some(Secret::new("hunter3")),
            ..Settings::default()
        };
        let shown = format!("{settings:?}");
        assert!(shown.contains("sasl.password") && !shown.contains("hunter"), "{shown}");
    }
}
