//! Settings of a queue besides its address: librdkafka properties, limits, and secrets from the
//! environment or files.
//!
//! Precedence, the first wins:
//!
//! - User and password: the address, then [`Settings`], then `GRISTMILL_QUEUE_USER` and
//!   `GRISTMILL_QUEUE_PASSWORD`, then the file named by `GRISTMILL_QUEUE_PASSWORD_FILE`.
//! - A librdkafka property: [`Settings::kafka`] (its last entry of the name), then variables such
//!   as `GRISTMILL_KAFKA_SASL_MECHANISM`, then the file named by `GRISTMILL_KAFKA_…_FILE`, then the
//!   address, then gristmill's default.
//!
//! A server that only a job file names gets credentials only if the environment lists it
//! (`servers.rs`).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::time::Duration;

use super::QueueError;
use super::address::{QueueUrl, Secret};
use super::properties::{canonical_name, is_credential, is_secret};
use super::servers::{TrustedServers, remote_servers};
use crate::signing::Signing;

const PROPERTY_PREFIX: &str = "GRISTMILL_KAFKA_";
const FILE_SUFFIX: &str = "_FILE";
/// Minimum length of a secret that is removed from texts: a shorter secret protects nothing, and
/// removing it would garble every line.
const SECRET_BYTES_MIN: usize = 3;

/// Who named the address of a queue.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum AddressOrigin {
    /// The operator, who runs gristmill: credentials in the environment are meant for this address.
    #[default]
    Operator,
    /// A job file, which may come from anybody.
    JobFile,
}

/// Settings for a connection to a queue. The environment supplies absent settings.
#[derive(Clone)]
pub struct Settings {
    /// Who named the address of the connection.
    pub origin: AddressOrigin,
    /// librdkafka properties, passed through.
    pub kafka: Vec<(String, String)>,
    /// Number of deliveries that the worker works on concurrently, at least 1; RabbitMQ's prefetch.
    pub in_flight: u32,
    pub user: Option<String>,
    pub password: Option<Secret>,
    /// PEM file of certificates that are trusted in addition to those of the system.
    pub ca_file: Option<PathBuf>,
    /// Delay before a message for another worker is sent again.
    pub pass_on_delay: Duration,
    /// Length of a delivery's lease until the first [`super::Queue::extend`].
    pub first_lease: Duration,
    /// How long a send waits for a broker that is away.
    pub send_timeout: Duration,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            origin: AddressOrigin::default(),
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
    /// Shows the names of properties, never their values.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<&str> = self.kafka.iter().map(|(name, _)| name.as_str()).collect();
        f.debug_struct("Settings")
            .field("origin", &self.origin)
            .field("kafka", &names)
            .field("in_flight", &self.in_flight)
            .field("user", &self.user)
            .field("password", &self.password)
            .field("ca_file", &self.ca_file)
            .finish_non_exhaustive()
    }
}

/// Address, settings and environment combined.
#[derive(Clone)]
pub(crate) struct ResolvedSettings {
    pub settings: Settings,
    pub user: Option<String>,
    pub password: Option<Secret>,
    pub ca_file: Option<PathBuf>,
    /// librdkafka properties by name. A property with two names has Kafka's name.
    pub kafka: BTreeMap<String, String>,
    pub scrub: SecretScrubber,
    /// How messages are signed and checked.
    pub signing: Signing,
}

impl ResolvedSettings {
    /// Reads the environment. Fails if a file named there is unreadable, a setting is invalid, or a
    /// password would go to a server that only a job file names.
    pub(crate) fn new(url: &QueueUrl, settings: &Settings) -> Result<ResolvedSettings, QueueError> {
        let mut resolved = ResolvedSettings::with(
            url,
            settings,
            std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?))),
        )?;
        resolved.signing = Signing::of_process().map_err(|why| QueueError::Settings { why })?;
        if let Some(warning) = resolved.cleartext_warning(url) {
            static ONCE: Once = Once::new();
            ONCE.call_once(|| tracing::warn!("{warning}"));
        }
        Ok(resolved)
    }

    fn with(
        url: &QueueUrl,
        settings: &Settings,
        environment: impl IntoIterator<Item = (String, String)>,
    ) -> Result<ResolvedSettings, QueueError> {
        let environment: BTreeMap<String, String> = environment
            .into_iter()
            .filter(|(name, value)| name.starts_with("GRISTMILL_") && !value.is_empty())
            .collect();
        let (url_user, url_password) = match url {
            QueueUrl::Kafka(url) => (url.user.clone(), url.password.clone()),
            QueueUrl::RabbitMq(url) => (url.user.clone(), url.password.clone()),
        };
        let ca_file = settings
            .ca_file
            .clone()
            .or_else(|| environment.get("GRISTMILL_QUEUE_CA_FILE").map(PathBuf::from));
        let credentials = Credentials {
            user: settings
                .user
                .clone()
                .or_else(|| environment.get("GRISTMILL_QUEUE_USER").cloned())
                .filter(|_| url_user.is_none()),
            password: match url_password {
                None => password(settings, &environment)?,
                Some(_) => None,
            },
            kafka: kafka_properties(settings, &environment)?,
        };
        if settings.origin == AddressOrigin::JobFile
            && let Some(credential) = credentials.first_credential(url)
        {
            TrustedServers::from_environment(&environment)?.check_named(url, &credential)?;
        }
        let Credentials { user, password, kafka } = credentials;
        let (user, password) = (url_user.or(user), url_password.or(password));
        let mut scrub = SecretScrubber::default();
        scrub.add_secrets(password.as_ref().map(Secret::reveal));
        // The value may be an address that contains a password.
        let may_hold_password = |value: &str| value.contains("://") && value.contains('@');
        scrub.add_secrets(
            kafka
                .iter()
                .filter(|(name, value)| is_secret(name) || may_hold_password(value))
                .map(|(_, value)| &**value),
        );
        Ok(ResolvedSettings {
            settings: Settings {
                in_flight: settings.in_flight.max(1),
                ..settings.clone()
            },
            user,
            password,
            ca_file,
            kafka,
            scrub,
            signing: Signing::default(),
        })
    }

    /// The warning if a password crosses a network in clear text, as the operator has chosen by an
    /// address that begins with `amqp://`, or by `security.protocol`.
    fn cleartext_warning(&self, url: &QueueUrl) -> Option<String> {
        let is_one_of = |name: &str, values: &[&str]| {
            let value = self.kafka.get(name);
            value.is_some_and(|value| values.iter().any(|other| value.eq_ignore_ascii_case(other)))
        };
        let remedy = match url {
            QueueUrl::RabbitMq(url) if !url.tls && self.password.is_some() => "`amqps://` encrypts it",
            QueueUrl::Kafka(_)
                if is_one_of("security.protocol", &["SASL_PLAINTEXT"])
                    && is_one_of("sasl.mechanism", &["PLAIN", "OAUTHBEARER"]) =>
            {
                "`security.protocol=SASL_SSL` encrypts it"
            }
            _ => return None,
        };
        let servers = remote_servers(url);
        (!servers.is_empty()).then(|| {
            let servers = servers.join(",");
            format!("the password goes to `{servers}` over the network in clear text: {remedy}")
        })
    }
}

/// User, password and properties that do not come from the address.
struct Credentials {
    user: Option<String>,
    password: Option<Secret>,
    kafka: BTreeMap<String, String>,
}

impl Credentials {
    /// Describes the first of these settings that authenticates us to the broker, if there is one.
    fn first_credential(&self, url: &QueueUrl) -> Option<String> {
        if self.password.is_some() {
            return Some("the password of the environment".to_owned());
        }
        if self.user.is_some() {
            return Some("the user of the environment".to_owned());
        }
        let mut names = self.kafka.keys().filter(|name| is_credential(name));
        match url {
            QueueUrl::Kafka(_) => names.next().map(|name| format!("the value of `{name}`")),
            QueueUrl::RabbitMq(_) => None,
        }
    }
}

fn password(settings: &Settings, environment: &BTreeMap<String, String>) -> Result<Option<Secret>, QueueError> {
    let set = settings
        .password
        .clone()
        .or_else(|| environment.get("GRISTMILL_QUEUE_PASSWORD").map(Secret::new));
    let name = "GRISTMILL_QUEUE_PASSWORD_FILE";
    match (set, environment.get(name)) {
        (None, Some(path)) => Ok(Some(Secret::new(read(name, Path::new(path))?))),
        (set, _) => Ok(set),
    }
}

/// librdkafka properties of the environment, overridden by those of the settings.
fn kafka_properties(
    settings: &Settings,
    environment: &BTreeMap<String, String>,
) -> Result<BTreeMap<String, String>, QueueError> {
    let mut found = environment_properties(environment)?;
    let own = settings.kafka.iter();
    found.extend(own.map(|(name, value)| (canonical_name(name).to_owned(), value.clone())));
    Ok(found)
}

/// librdkafka properties of the environment: `GRISTMILL_KAFKA_SASL_MECHANISM` sets
/// `sasl.mechanism`.
fn environment_properties(environment: &BTreeMap<String, String>) -> Result<BTreeMap<String, String>, QueueError> {
    let name = |text: &str| canonical_name(&text.to_ascii_lowercase().replace('_', ".")).to_owned();
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

/// Maximum size of a file with a password or key.
const SECRET_BYTES_MAX: u64 = 1 << 20;

/// Reads a secret from a file and removes trailing line breaks.
fn read(variable: &str, path: &Path) -> Result<String, QueueError> {
    let text = crate::regular::read_text(path, SECRET_BYTES_MAX).map_err(|error| QueueError::Settings {
        why: format!("cannot read `{}`, which `{variable}` names: {error}", path.display()),
    })?;
    Ok(text.trim_end_matches(['\r', '\n']).to_owned())
}

/// Removes secrets from texts of other programs, such as errors of librdkafka.
#[derive(Clone, Default)]
pub(crate) struct SecretScrubber(Vec<String>);

impl SecretScrubber {
    fn add_secrets<'a>(&mut self, secrets: impl IntoIterator<Item = &'a str>) {
        for secret in secrets {
            if secret.len() >= SECRET_BYTES_MIN {
                self.0.push(secret.to_owned());
            }
        }
        // A longer secret may contain a shorter one.
        self.0.sort_by_key(|secret| std::cmp::Reverse(secret.len()));
    }

    /// `text` as one line, with every secret replaced by `***`.
    pub(crate) fn clean_line(&self, text: &str) -> String {
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

    fn resolve(url: &str, settings: &Settings, environment: &[(&str, &str)]) -> ResolvedSettings {
        let environment = environment
            .iter()
            .map(|&(name, value)| (name.to_owned(), value.to_owned()));
        ResolvedSettings::with(&url.parse().unwrap(), settings, environment).unwrap()
    }

    #[test]
    fn precedence_is_address_settings_environment_files() {
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
        assert_eq!(found.scrub.clean_line("a from-file\nb"), "a *** b");
    }

    #[test]
    fn an_alias_sets_the_property_itself() {
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
    }

    #[test]
    fn credentials_go_only_to_servers_that_the_operator_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("secret");
        std::fs::write(&file, "hunter2").unwrap();
        let refused = |url: &str, origin, environment: &[(&str, &str)], kafka: &[(&str, &str)]| {
            let settings = Settings {
                origin,
                kafka: kafka.iter().map(|&(a, b)| (a.to_owned(), b.to_owned())).collect(),
                ..Settings::default()
            };
            let environment = environment
                .iter()
                .map(|&(name, value)| (name.to_owned(), value.to_owned()));
            let found = ResolvedSettings::with(&url.parse().unwrap(), &settings, environment);
            found.err().map(|error| error.to_string())
        };
        let named = ("GRISTMILL_QUEUE_HOST", "h,amqp://h");
        for (url, variable, value) in [
            ("kafka://h/t", "GRISTMILL_QUEUE_PASSWORD", "hunter2"),
            ("kafka://u@h/t", "GRISTMILL_QUEUE_PASSWORD_FILE", file.to_str().unwrap()),
            ("amqp://u@h/q", "GRISTMILL_QUEUE_PASSWORD", "hunter2"),
            ("amqps://h/q", "GRISTMILL_QUEUE_USER", "hunter2"),
            ("kafka://h/t", "GRISTMILL_KAFKA_SASL_PASSWORD", "hunter2"),
            ("kafka://h/t", "GRISTMILL_KAFKA_SASL_OAUTHBEARER_CONFIG", "hunter2"),
            ("kafka://h/t", "GRISTMILL_KAFKA_SSL_KEY_LOCATION", "hunter2"),
            ("kafka://h/t", "GRISTMILL_KAFKA_SSL_KEYSTORE_LOCATION", "hunter2"),
        ] {
            let set = (variable, value);
            let line = refused(url, AddressOrigin::JobFile, &[set], &[]).unwrap_or_else(|| panic!("{url} {variable}"));
            assert!(
                line.contains("GRISTMILL_QUEUE_HOST") && !line.contains("hunter2"),
                "{line}"
            );
            assert_eq!(
                refused(url, AddressOrigin::Operator, &[set], &[]),
                None,
                "{url} {variable}"
            );
            assert_eq!(
                refused(url, AddressOrigin::JobFile, &[set, named], &[]),
                None,
                "{url} {variable}"
            );
        }
        let line = refused("kafka://h/t", AddressOrigin::JobFile, &[], &[("sasl.username", "u")]).unwrap();
        assert!(line.contains("`sasl.username`"), "{line}");
        // Settings that are not credentials go to any server, and an address without a password
        // needs no entry.
        for (variable, value) in [
            ("GRISTMILL_QUEUE_CA_FILE", "ca.pem"),
            ("GRISTMILL_KAFKA_SECURITY_PROTOCOL", "SSL"),
            ("GRISTMILL_KAFKA_SSL_CA_LOCATION", "ca.pem"),
            ("GRISTMILL_KAFKA_LINGER_MS", "5"),
            ("GRISTMILL_QUEUE_HOST", "nonsense/entry"),
            ("GRISTMILL_QUEUE_PASSWORD", ""),
        ] {
            assert_eq!(
                refused("kafka://h/t", AddressOrigin::JobFile, &[(variable, value)], &[]),
                None
            );
            assert_eq!(
                refused("amqp://u@h/q", AddressOrigin::JobFile, &[(variable, value)], &[]),
                None
            );
        }
        let of_kafka = [("GRISTMILL_KAFKA_SASL_PASSWORD", "hunter2")];
        assert_eq!(
            refused("amqp://h/q", AddressOrigin::JobFile, &of_kafka, &[]),
            None,
            "not sent there"
        );
    }

    #[test]
    fn a_password_in_clear_text_gives_a_warning() {
        let said = |url: &str, environment: &[(&str, &str)]| {
            let found = resolve(url, &Settings::default(), environment);
            found.cleartext_warning(&url.parse().unwrap())
        };
        let protocol = |value| ("GRISTMILL_KAFKA_SECURITY_PROTOCOL", value);
        let mechanism = |value| ("GRISTMILL_KAFKA_SASL_MECHANISM", value);
        let line = said("amqp://u:hunter2@10.0.0.5/q", &[]).unwrap();
        assert!(line.contains("`10.0.0.5:5672`") && !line.contains("hunter2"), "{line}");
        let line = said(
            "kafka://localhost,h/t",
            &[protocol("sasl_plaintext"), mechanism("Plain")],
        );
        assert!(line.is_some_and(|line| line.contains("`h:9092`")));
        for (url, environment) in [
            ("amqp://u:p@127.0.0.1/q", [protocol(""), mechanism("")]),
            ("amqps://u:p@h/q", [protocol(""), mechanism("")]),
            ("amqp://h/q", [protocol(""), mechanism("")]),
            ("kafka://u:p@h/t", [protocol("SASL_SSL"), mechanism("PLAIN")]),
            (
                "kafka://u:p@h/t",
                [protocol("SASL_PLAINTEXT"), mechanism("SCRAM-SHA-256")],
            ),
            (
                "kafka://u:p@localhost/t",
                [protocol("SASL_PLAINTEXT"), mechanism("PLAIN")],
            ),
        ] {
            assert_eq!(said(url, &environment), None, "{url}");
        }
    }

    #[test]
    fn a_missing_file_is_named_and_debug_hides_values() {
        let url = "amqp://h/q".parse().unwrap();
        let environment = [("GRISTMILL_QUEUE_PASSWORD_FILE".to_owned(), "/nowhere/x".to_owned())];
        let error = ResolvedSettings::with(&url, &Settings::default(), environment)
            .err()
            .unwrap();
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
