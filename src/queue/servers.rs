//! The servers that the operator named in the environment. Only these may get passwords through a
//! queue address of a job file.
//!
//! An address on the command line comes from the operator. An address in a job file may come from
//! anybody: it gets a password of the environment only if `GRISTMILL_QUEUE` or an entry of
//! `GRISTMILL_QUEUE_HOST` names each of its servers.

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::QueueError;
use super::address::{QueueUrl, join_host_port, parse_host_port};

const ADDRESS_VARIABLE: &str = "GRISTMILL_QUEUE";
const LIST_VARIABLE: &str = "GRISTMILL_QUEUE_HOST";
/// Matches any port.
const ANY_PORT: u16 = 0;

/// `[scheme://]host[:port]`
#[derive(Debug, PartialEq, Eq)]
struct Server {
    /// `None` matches every scheme except `amqp` to a remote host, which sends passwords in clear
    /// text.
    scheme: Option<String>,
    host: String,
    port: u16,
}

/// The servers named in the environment.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TrustedServers(Vec<Server>);

fn settings_error(why: String) -> QueueError {
    QueueError::Settings { why }
}

impl Server {
    fn parse(entry: &str) -> Result<Server, QueueError> {
        // The entry may hold a password by mistake, so the error does not repeat it.
        let bad = || {
            settings_error(format!(
                "`{LIST_VARIABLE}` has an invalid entry: write `host`, `host:port` or `amqp://host:port`, separated by commas"
            ))
        };
        let (scheme, rest) = match entry.split_once("://") {
            None => (None, entry),
            Some((scheme @ ("kafka" | "amqp" | "amqps"), rest)) => (Some(scheme.to_owned()), rest),
            Some(_) => return Err(bad()),
        };
        let (host, port) = parse_host_port(rest, ANY_PORT).map_err(|_| bad())?;
        Ok(Server { scheme, host, port })
    }

    fn matches(&self, host: &str, port: u16) -> bool {
        self.host.eq_ignore_ascii_case(host) && (self.port == ANY_PORT || self.port == port)
    }
}

impl TrustedServers {
    /// Reads the servers from the two variables.
    pub(super) fn from_environment(environment: &BTreeMap<String, String>) -> Result<TrustedServers, QueueError> {
        let mut found = Vec::new();
        if let Some(address) = environment.get(ADDRESS_VARIABLE) {
            let url: QueueUrl = address
                .parse()
                .map_err(|error| settings_error(format!("`{ADDRESS_VARIABLE}`: {error}")))?;
            found.extend(endpoints(&url).into_iter().map(|(host, port)| Server {
                scheme: Some(scheme(&url).to_owned()),
                host,
                port,
            }));
        }
        let list = environment.get(LIST_VARIABLE).map_or("", String::as_str);
        for entry in list.split([',', ' ']).filter(|entry| !entry.is_empty()) {
            found.push(Server::parse(entry)?);
        }
        Ok(TrustedServers(found))
    }

    /// Fails unless the operator has named every server of `url`, which comes from a job file.
    /// `credential` is named in the error ("the password", …).
    pub(super) fn check_named(&self, url: &QueueUrl, credential: &str) -> Result<(), QueueError> {
        let scheme = scheme(url);
        let mut refused = Vec::new();
        let mut is_only_cleartext = true;
        for (host, port) in endpoints(url) {
            let is_cleartext = scheme == "amqp" && !is_loopback(&host);
            let mut named = self.0.iter().filter(|server| server.matches(&host, port)).peekable();
            is_only_cleartext &= is_cleartext && named.peek().is_some();
            if !named.any(|server| {
                server
                    .scheme
                    .as_deref()
                    .map_or(!is_cleartext, |wanted| wanted == scheme)
            }) {
                let prefix = if is_cleartext { "amqp://" } else { "" };
                refused.push(format!("{prefix}{}", join_host_port(&host, port)));
            }
        }
        if refused.is_empty() {
            return Ok(());
        }
        let servers = refused.join(",");
        let list = format!("give the address with `--queue`, or list `{servers}` in `{LIST_VARIABLE}`");
        Err(settings_error(if is_only_cleartext {
            format!(
                "`queue.url` of the job file begins with `amqp://`, which would send {credential} in clear text: use `amqps://`, {list}"
            )
        } else {
            format!(
                "the job file's `queue.url` names the server `{servers}`, which is not in your list, and {credential} is sent to listed servers only: {list} in \
             the environment"
            )
        }))
    }
}

fn scheme(url: &QueueUrl) -> &'static str {
    match url {
        QueueUrl::Kafka(_) => "kafka",
        QueueUrl::RabbitMq(url) if url.tls => "amqps",
        QueueUrl::RabbitMq(_) => "amqp",
    }
}

/// Hosts (IPv6 without brackets) and ports of an address.
fn endpoints(url: &QueueUrl) -> Vec<(String, u16)> {
    match url {
        QueueUrl::Kafka(url) => url
            .brokers
            .iter()
            .filter_map(|broker| {
                let (host, port) = broker.rsplit_once(':')?;
                Some((host.trim_matches(['[', ']']).to_owned(), port.parse().ok()?))
            })
            .collect(),
        QueueUrl::RabbitMq(url) => vec![(url.host.clone(), url.port)],
    }
}

/// The servers of an address that are on other machines, as `host:port`: traffic to them crosses a
/// network.
pub(crate) fn remote_servers(url: &QueueUrl) -> Vec<String> {
    let all = endpoints(url).into_iter();
    let remote = all.filter(|(host, _)| !is_loopback(host));
    remote.map(|(host, port)| join_host_port(&host, port)).collect()
}

fn is_loopback(host: &str) -> bool {
    let name = host.to_ascii_lowercase();
    name == "localhost" || name.ends_with(".localhost") || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The line of the refusal, if there is one.
    fn refused(environment: &[(&str, &str)], url: &str) -> Option<String> {
        let environment = environment
            .iter()
            .map(|&(name, value)| (name.to_owned(), value.to_owned()))
            .collect();
        let servers = match TrustedServers::from_environment(&environment) {
            Ok(servers) => servers,
            Err(error) => return Some(error.to_string()),
        };
        let found = servers.check_named(&url.parse().unwrap(), "the password");
        found.err().map(|error| error.to_string())
    }

    #[test]
    fn named_servers_get_passwords() {
        for (variable, value, url) in [
            (LIST_VARIABLE, "broker", "kafka://broker:1/t"),
            (LIST_VARIABLE, "broker:9092", "kafka://Broker/t"),
            (LIST_VARIABLE, "x, a:1,kafka://b", "kafka://a:1,b:2/t"),
            (LIST_VARIABLE, "[::1]:9092", "kafka://[::1]/t"),
            (LIST_VARIABLE, "mq", "amqps://u@mq/q"),
            (LIST_VARIABLE, "amqp://mq:5672", "amqp://u@mq/q"),
            (LIST_VARIABLE, "localhost", "amqp://localhost/q"),
            (ADDRESS_VARIABLE, "kafka://u:p@a,b:9/t?group=g", "kafka://b:9,a/other"),
            (ADDRESS_VARIABLE, "amqp://mq/q", "amqp://mq/other"),
        ] {
            assert_eq!(refused(&[(variable, value)], url), None, "{variable}={value} {url}");
        }
    }

    #[test]
    fn other_servers_get_no_password_and_the_error_names_the_variable() {
        for (variable, value, url, words) in [
            (
                LIST_VARIABLE,
                "",
                "kafka://h/t",
                "list `h:9092` in `GRISTMILL_QUEUE_HOST`",
            ),
            (LIST_VARIABLE, "broker:9092", "kafka://broker:9093/t", "`broker:9093`"),
            (LIST_VARIABLE, "a", "kafka://a,b,c:1/t", "names the server `b:9092,c:1`"),
            (
                LIST_VARIABLE,
                "broker",
                "kafka://broker.evil.example/t",
                "`broker.evil.example:9092`",
            ),
            (LIST_VARIABLE, "kafka://h", "amqps://h/q", "`h:5671`"),
            (LIST_VARIABLE, "amqps://h", "amqp://h/q", "list `amqp://h:5672`"),
            (LIST_VARIABLE, "h", "amqp://h/q", "in clear text: use `amqps://`"),
            (LIST_VARIABLE, "", "amqp://h/q", "list `amqp://h:5672`"),
            (LIST_VARIABLE, "", "amqp://127.0.0.1/q", "list `127.0.0.1:5672`"),
            (LIST_VARIABLE, "", "kafka://[::1]/t", "list `[::1]:9092`"),
            (ADDRESS_VARIABLE, "amqps://mq/q", "amqp://mq:5671/q", "in clear text"),
            (ADDRESS_VARIABLE, "kafka://a/t", "kafka://a:1/t", "`a:1`"),
            (
                ADDRESS_VARIABLE,
                "redis://u:hunter2@a/t",
                "kafka://a:1/t",
                "`GRISTMILL_QUEUE`: a queue address",
            ),
            (LIST_VARIABLE, "u:hunter2@h", "kafka://h/t", "has an invalid entry"),
            (LIST_VARIABLE, "https://h", "kafka://h/t", "has an invalid entry"),
            (LIST_VARIABLE, "h:9092/t", "kafka://h/t", "has an invalid entry"),
        ] {
            let line = refused(&[(variable, value)], url).unwrap_or_else(|| panic!("{variable}={value} {url}"));
            assert!(
                line.contains(words) && !line.contains("hunter2"),
                "{variable}={value} {url}: {line}"
            );
        }
    }

    #[test]
    fn loopback_addresses_are_not_remote() {
        for (url, remote) in [
            ("amqp://localhost/q", 0),
            ("amqp://127.9.9.9/q", 0),
            ("kafka://[::1],a.localhost,LOCALHOST/t", 0),
            ("kafka://localhost,10.0.0.5/t", 1),
            ("amqp://localhost.example.com/q", 1),
            ("amqp://0.0.0.0/q", 1),
        ] {
            assert_eq!(remote_servers(&url.parse().unwrap()).len(), remote, "{url}");
        }
    }
}
