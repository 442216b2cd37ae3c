//! Queue addresses: `kafka://…` and `amqp://…`, parsed once and displayed without their secrets.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use super::QueueError;

/// RabbitMQ's default acknowledgement timeout: RabbitMQ closes a channel with a delivery that is
/// unacknowledged for longer.
pub const ACK_TIMEOUT_DEFAULT: Duration = Duration::from_secs(30 * 60);
const KAFKA_PORT: u16 = 9092;
const AMQP_PORT: u16 = 5672;
const AMQPS_PORT: u16 = 5671;
/// Kafka's own bound on topic names, in bytes.
const TOPIC_BYTES_MAX: usize = 249;
/// Prefix of the default name of a consumer group; the topic follows.
const GROUP_PREFIX: &str = "gristmill-";
/// Maximum length of a group's name in bytes: the default name of any topic fits.
const GROUP_BYTES_MAX: usize = GROUP_PREFIX.len() + TOPIC_BYTES_MAX;
/// Maximum length of an AMQP short string, in bytes.
const NAME_BYTES_MAX: usize = 255;
const PARTITIONS_MAX: u32 = 10_000;

/// A text that is never displayed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    pub fn new(text: impl Into<String>) -> Secret {
        Secret(text.into())
    }

    /// The text itself, to be sent to the broker only.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// The address of a queue. Its `Display` and `Debug` hide the password.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum QueueUrl {
    Kafka(KafkaUrl),
    RabbitMq(RabbitUrl),
}

/// `kafka://[user[:password]@]host[:port],…/topic[?group=…][&partitions=…]`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KafkaUrl {
    pub user: Option<String>,
    pub password: Option<Secret>,
    /// Brokers as `host:port`.
    pub brokers: Vec<String>,
    pub topic: String,
    /// The consumer group that workers share.
    pub group: String,
    /// Number of partitions of a new topic, if the address sets it.
    pub partitions: Option<u32>,
}

/// `amqp[s]://[user[:password]@]host[:port][/vhost]/queue[?ack_timeout=SECONDS]`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RabbitUrl {
    pub tls: bool,
    pub user: Option<String>,
    pub password: Option<Secret>,
    /// A host name or an IP address; an IPv6 address has no brackets here.
    pub host: String,
    pub port: u16,
    pub vhost: String,
    pub queue: String,
    /// The node's acknowledgement timeout (`consumer_timeout`).
    pub ack_timeout: Duration,
}

/// The components of an address after `://`.
struct AddressParts<'a> {
    user: Option<String>,
    password: Option<Secret>,
    hosts: &'a str,
    path: &'a str,
    query: Vec<(String, String)>,
}

fn settings_error(why: impl Into<String>) -> QueueError {
    QueueError::Settings { why: why.into() }
}

impl FromStr for QueueUrl {
    type Err = QueueError;

    /// Errors never repeat text that may be a secret: they quote only text after the last `@`.
    fn from_str(text: &str) -> Result<QueueUrl, QueueError> {
        let (scheme, rest) = text
            .split_once("://")
            .ok_or_else(|| settings_error("a queue address begins with `kafka://`, `amqp://` or `amqps://`"))?;
        match scheme {
            "kafka" => Ok(QueueUrl::Kafka(kafka_url(split_address(rest)?)?)),
            "amqp" => Ok(QueueUrl::RabbitMq(rabbit_url(split_address(rest)?, false)?)),
            "amqps" => Ok(QueueUrl::RabbitMq(rabbit_url(split_address(rest)?, true)?)),
            _ => Err(settings_error(
                "a queue address begins with `kafka://`, `amqp://` or `amqps://`, not with another scheme",
            )),
        }
    }
}

fn split_address(rest: &str) -> Result<AddressParts<'_>, QueueError> {
    if rest.chars().any(|c| c.is_control() || c.is_whitespace()) {
        return Err(settings_error(
            "the queue address has a space or a control character in it: percent-encode it",
        ));
    }
    let (rest, query) = match rest.split_once('?') {
        Some((rest, query)) => (rest, query_pairs(query)?),
        None => (rest, Vec::new()),
    };
    let (authority, path) = rest
        .split_once('/')
        .ok_or_else(|| settings_error("the queue address names no topic or queue: `…host:port/NAME`"))?;
    if rest.contains('#') || path.contains('@') {
        return Err(settings_error(
            "the queue address has a `#` in it, or an `@` after the first `/`: percent-encode `/`, `?`, `#` and `@` in user and password",
        ));
    }
    let (user, password, hosts) = match authority.rsplit_once('@') {
        None => (None, None, authority),
        Some((user, hosts)) => match user.split_once(':') {
            None => (Some(decode(user, "user")?), None, hosts),
            Some((user, password)) => (
                Some(decode(user, "user")?),
                Some(Secret(decode(password, "password")?)),
                hosts,
            ),
        },
    };
    if user.as_deref() == Some("") {
        return Err(settings_error("the queue address has an `@` but no user before it"));
    }
    Ok(AddressParts {
        user,
        password,
        hosts,
        path,
        query,
    })
}

fn query_pairs(query: &str) -> Result<Vec<(String, String)>, QueueError> {
    let mut found: Vec<(String, String)> = Vec::new();
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair
            .split_once('=')
            .ok_or_else(|| settings_error("after `?` the queue address takes `name=value`, joined by `&`"))?;
        let name = decode(name, "name after `?`")?;
        if found.iter().any(|(other, _)| *other == name) {
            return Err(settings_error("the queue address sets a parameter after `?` twice"));
        }
        found.push((name, decode(value, "value after `?`")?));
    }
    Ok(found)
}

/// Decodes percent-encoding; `+` remains a plus.
fn decode(text: &str, part: &str) -> Result<String, QueueError> {
    let bad = || {
        settings_error(format!(
            "the {part} of the queue address is not percent-encoded UTF-8: a `%` takes two hexadecimal digits"
        ))
    };
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let mut digit = || rest.next().and_then(|b| char::from(b).to_digit(16)).ok_or_else(bad);
        let value = digit()? * 16 + digit()?;
        bytes.push(u8::try_from(value).map_err(|_| bad())?);
    }
    String::from_utf8(bytes).map_err(|_| bad())
}

fn encode(text: &str) -> String {
    text.bytes()
        .map(|byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => char::from(byte).to_string(),
            _ => format!("%{byte:02X}"),
        })
        .collect()
}

/// Parses a host and an optional port; IPv6 addresses are in brackets.
pub(super) fn parse_host_port(text: &str, default: u16) -> Result<(String, u16), QueueError> {
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (host, rest) = rest
                .split_once(']')
                .ok_or_else(|| settings_error("an IPv6 address in the queue address lacks its `]`"))?;
            if host.parse::<std::net::Ipv6Addr>().is_err() || !(rest.is_empty() || rest.starts_with(':')) {
                return Err(settings_error(
                    "the text in `[…]` of the queue address is not an IPv6 address",
                ));
            }
            (host, rest.strip_prefix(':'))
        }
        None => match text.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        },
    };
    let is_legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_' | ':');
    if host.is_empty() || !host.chars().all(is_legal) {
        return Err(settings_error(
            "the queue address has an empty or impossible host: `scheme://user:password@host:port/NAME`",
        ));
    }
    let port = match port {
        None => default,
        // The text may be the start of a password with an unencoded `/`, so the error does not
        // repeat it.
        Some(port) => port.parse().ok().filter(|&port| port > 0).ok_or_else(|| {
            settings_error(
                "the queue address has a port that is no number from 1 to 65535 (a `/` or `@` in a password is to be percent-encoded)",
            )
        })?,
    };
    Ok((host.to_owned(), port))
}

pub(super) fn join_host_port(host: &str, port: u16) -> String {
    if host.contains(':') {
        format!("[{host}]:{port}")
    } else {
        format!("{host}:{port}")
    }
}

fn kafka_url(parts: AddressParts<'_>) -> Result<KafkaUrl, QueueError> {
    let brokers = parts
        .hosts
        .split(',')
        .map(|text| parse_host_port(text, KAFKA_PORT).map(|(host, port)| join_host_port(&host, port)))
        .collect::<Result<Vec<_>, _>>()?;
    let topic = decode(parts.path, "topic")?;
    let is_legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    if topic.is_empty()
        || topic.len() > TOPIC_BYTES_MAX
        || !topic.chars().all(is_legal)
        || [".", ".."].contains(&&*topic)
    {
        return Err(settings_error(format!(
            "a Kafka topic has 1 to {TOPIC_BYTES_MAX} letters, digits, `.`, `_` and `-`: `kafka://host:port/TOPIC`"
        )));
    }
    let mut group = format!("{GROUP_PREFIX}{topic}");
    let mut partitions = None;
    for (name, value) in parts.query {
        match name.as_str() {
            "group" if !value.is_empty() && value.len() <= GROUP_BYTES_MAX => group = value,
            "group" => {
                return Err(settings_error(format!(
                    "`group` takes a name of 1 to {GROUP_BYTES_MAX} bytes"
                )));
            }
            "partitions" => {
                partitions = Some(
                    value
                        .parse()
                        .ok()
                        .filter(|n| (1..=PARTITIONS_MAX).contains(n))
                        .ok_or_else(|| {
                            settings_error(format!("`partitions` takes a number from 1 to {PARTITIONS_MAX}"))
                        })?,
                );
            }
            _ => {
                return Err(settings_error(
                    "a Kafka address takes `group` and `partitions` after `?`; anything else is a property: `--kafka name=value`",
                ));
            }
        }
    }
    Ok(KafkaUrl {
        user: parts.user,
        password: parts.password,
        brokers,
        topic,
        group,
        partitions,
    })
}

fn rabbit_url(parts: AddressParts<'_>, tls: bool) -> Result<RabbitUrl, QueueError> {
    if parts.hosts.contains(',') {
        return Err(settings_error(
            "a RabbitMQ address takes one host: name a load balancer, or one node",
        ));
    }
    let (host, port) = parse_host_port(parts.hosts, if tls { AMQPS_PORT } else { AMQP_PORT })?;
    let (vhost, queue) = match parts.path.split_once('/') {
        None => ("/".to_owned(), decode(parts.path, "queue")?),
        Some((_, queue)) if queue.contains('/') => {
            return Err(settings_error(
                "a RabbitMQ address is `host:port/VHOST/QUEUE`: a `/` within a name is written `%2f`",
            ));
        }
        Some((vhost, queue)) => (decode(vhost, "vhost")?, decode(queue, "queue")?),
    };
    if vhost.is_empty() || vhost.len() > NAME_BYTES_MAX {
        return Err(settings_error(
            "the vhost of the queue address is empty or too long: the default vhost is `%2f`",
        ));
    }
    if queue.is_empty() || queue.len() > NAME_BYTES_MAX || queue.starts_with("amq.") {
        return Err(settings_error(format!(
            "a RabbitMQ queue has a name of 1 to {NAME_BYTES_MAX} bytes that does not begin with `amq.`: `host:port/VHOST/QUEUE`"
        )));
    }
    let mut ack_timeout = ACK_TIMEOUT_DEFAULT;
    for (name, value) in parts.query {
        if name != "ack_timeout" {
            return Err(settings_error("a RabbitMQ address takes only `ack_timeout` after `?`"));
        }
        ack_timeout = value
            .parse()
            .ok()
            .filter(|seconds| (1..=u64::from(u32::MAX)).contains(seconds))
            .map(Duration::from_secs)
            .ok_or_else(|| settings_error("`ack_timeout` takes whole seconds, at least 1"))?;
    }
    Ok(RabbitUrl {
        tls,
        user: parts.user,
        password: parts.password,
        host,
        port,
        vhost,
        queue,
        ack_timeout,
    })
}

fn write_user(f: &mut fmt::Formatter<'_>, user: Option<&str>, password: Option<&Secret>) -> fmt::Result {
    match (user, password) {
        (None, _) => Ok(()),
        (Some(user), None) => write!(f, "{}@", encode(user)),
        (Some(user), Some(_)) => write!(f, "{}:***@", encode(user)),
    }
}

impl fmt::Display for QueueUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            QueueUrl::Kafka(url) => url.fmt(f),
            QueueUrl::RabbitMq(url) => url.fmt(f),
        }
    }
}

impl fmt::Display for KafkaUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("kafka://")?;
        write_user(f, self.user.as_deref(), self.password.as_ref())?;
        write!(
            f,
            "{}/{}?group={}",
            self.brokers.join(","),
            self.topic,
            encode(&self.group)
        )?;
        match self.partitions {
            Some(partitions) => write!(f, "&partitions={partitions}"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for RabbitUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.tls { "amqps://" } else { "amqp://" })?;
        write_user(f, self.user.as_deref(), self.password.as_ref())?;
        write!(
            f,
            "{}/{}/{}",
            join_host_port(&self.host, self.port),
            encode(&self.vhost),
            encode(&self.queue)
        )?;
        if self.ack_timeout == ACK_TIMEOUT_DEFAULT {
            return Ok(());
        }
        write!(f, "?ack_timeout={}", self.ack_timeout.as_secs())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn shown(text: &str) -> String {
        text.parse::<QueueUrl>()
            .map_or_else(|e| e.to_string(), |url| url.to_string())
    }

    #[test]
    fn addresses_are_read_and_shown_without_their_password() {
        assert_eq!(shown("kafka://a,b:9/t"), "kafka://a:9092,b:9/t?group=gristmill-t");
        assert_eq!(
            shown("kafka://u%40x:p%2Fw@[::1]:9/t?partitions=7&group=g%20h"),
            "kafka://u%40x:***@[::1]:9/t?group=g%20h&partitions=7"
        );
        let longest = shown(&format!("kafka://a/{}", "t".repeat(249)));
        assert_eq!(shown(&longest), longest);
        assert_eq!(shown("amqp://h/q"), "amqp://h:5672/%2F/q");
        assert_eq!(shown("amqps://u:p@h/%2f/q%20r"), "amqps://u:***@h:5671/%2F/q%20r");
        assert_eq!(shown("amqp://h:1/v/q?ack_timeout=60"), "amqp://h:1/v/q?ack_timeout=60");
        let QueueUrl::Kafka(url) = "kafka://u:p%25w@h/t".parse().unwrap() else {
            panic!("a Kafka address");
        };
        assert_eq!(
            (url.user.as_deref(), url.password.as_ref().unwrap().reveal()),
            (Some("u"), "p%w")
        );
        assert!(!format!("{url:?}").contains("p%w"));
    }

    #[test]
    fn each_invalid_address_gives_one_line() {
        for (text, part) in [
            ("h:9092/t", "begins with"),
            ("redis://h/t", "begins with"),
            ("kafka://h:9092", "names no topic"),
            ("kafka://h:9092/", "1 to 249"),
            ("kafka://h/a/b", "1 to 249"),
            ("kafka://h,/t", "impossible host"),
            ("kafka://h:0/t", "port"),
            ("kafka://h:70000/t", "port"),
            ("kafka://[::1/t", "`]`"),
            ("kafka://h/t?grp=x", "`group` and `partitions`"),
            ("kafka://h/t?group=", "`group` takes"),
            ("kafka://h/t?partitions=0", "`partitions` takes"),
            ("kafka://h/t?group", "name=value"),
            ("kafka://h/t?group=a&group=b", "twice"),
            ("kafka://@h/t", "no user"),
            ("kafka://u:%zz@h/t", "hexadecimal"),
            ("amqp://a,b/q", "one host"),
            ("amqp://h//q", "default vhost is `%2f`"),
            ("amqp://h/v/w/q", "`%2f`"),
            ("amqp://h/v/", "1 to 255"),
            ("amqp://h/v/amq.x", "`amq.`"),
            ("amqp://h/q?ack_timeout=0", "whole seconds"),
            ("amqp://h/q?prefetch=3", "only `ack_timeout`"),
            ("amqp://u:p w@h/q", "space"),
        ] {
            let line = text.parse::<QueueUrl>().expect_err(text).to_string();
            assert!(line.contains(part) && !line.contains('\n'), "{text}: {line}");
        }
    }

    #[test]
    fn no_error_repeats_a_password() {
        for text in [
            "kafka://u:hunter2/x@h/t",
            "amqp://u:hunter2?x@h/q",
            "amqp://u:hunter2#x@h/q",
            "amqp://u:hunter2%@h/q",
            "amqp://u:hunter2@h",
            "amqp://u:hunter2@h:x/q",
            "foo://u:hunter2@h/q",
        ] {
            let line = text.parse::<QueueUrl>().expect_err(text).to_string();
            assert!(!line.contains("hunter2"), "{text}: {line}");
        }
    }

    proptest! {
        #[test]
        fn any_text_gives_an_address_or_a_one_line_error(text in ".{0,80}") {
            if let Err(error) = text.parse::<QueueUrl>() {
                prop_assert!(!error.to_string().contains('\n'));
            }
        }

        #[test]
        fn addresses_without_password_round_trip(
            user in "[ -~]{1,12}", vhost in "\\PC{1,12}", queue in "q\\PC{1,12}", port in 1u16.., tls: bool,
        ) {
            let url = QueueUrl::RabbitMq(RabbitUrl {
                tls, user: Some(user), password: None, host: "h".into(), port, vhost, queue,
                ack_timeout: ACK_TIMEOUT_DEFAULT,
            });
            prop_assert_eq!(url.to_string().parse::<QueueUrl>().unwrap(), url);
        }
    }
}
