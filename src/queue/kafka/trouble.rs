//! Classifies librdkafka's errors, and listens for them.

use std::sync::{Arc, Mutex, PoisonError};

use rdkafka::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};

use crate::queue::QueueError;
use crate::queue::settings::Scrub;

/// Classes of errors, by our reaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Password, certificate or permission: the operator must act.
    Denied,
    /// The resolver does not know the host.
    UnknownHost,
    /// No broker answers.
    Away,
    /// The topic, or a partition of it, does not exist.
    NoTopic,
    /// Any other error: librdkafka retries by itself.
    Passing,
}

pub(crate) fn kind(code: Code) -> Kind {
    match code {
        Code::Authentication
        | Code::SSL
        | Code::SaslAuthenticationFailed
        | Code::TopicAuthorizationFailed
        | Code::GroupAuthorizationFailed
        | Code::ClusterAuthorizationFailed => Kind::Denied,
        Code::Resolve => Kind::UnknownHost,
        Code::AllBrokersDown | Code::BrokerTransportFailure | Code::OperationTimedOut => Kind::Away,
        Code::UnknownTopic | Code::UnknownPartition | Code::UnknownTopicOrPartition | Code::UnknownTopicId => {
            Kind::NoTopic
        }
        _ => Kind::Passing,
    }
}

/// The last error that concerns a caller who is waiting for the broker.
#[derive(Debug, Clone)]
pub(crate) struct Trouble {
    pub kind: Kind,
    /// One line without secrets.
    pub why: String,
}

impl Trouble {
    /// Returns the newer of two errors, unless the older tells more about what the operator must
    /// do.
    pub(super) fn or_more_telling(self, newer: Trouble) -> Trouble {
        let telling = |trouble: &Trouble| match trouble.kind {
            Kind::Denied => 0,
            Kind::UnknownHost => 1,
            _ => 2,
        };
        if telling(&newer) <= telling(&self) { newer } else { self }
    }
}

/// Keeps the most telling error that librdkafka reports. librdkafka's log goes to the debug level.
#[derive(Clone)]
pub(crate) struct ErrorListener {
    scrub: Scrub,
    last: Arc<Mutex<Option<Trouble>>>,
}

impl ErrorListener {
    pub(super) fn new(scrub: Scrub) -> ErrorListener {
        ErrorListener {
            scrub,
            last: Arc::default(),
        }
    }

    /// Takes the error kept since the last call.
    pub(super) fn take(&self) -> Option<Trouble> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn hear(&self, code: Code, reason: &str) {
        let new = Trouble {
            kind: kind(code),
            why: self.line(code, reason),
        };
        // `AllBrokersDown` only follows from errors reported before it, and says less.
        if new.kind == Kind::Passing || code == Code::AllBrokersDown {
            return;
        }
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        *last = Some(match last.take() {
            Some(old) => old.or_more_telling(new),
            None => new,
        });
    }

    /// The helpful part of librdkafka's `thread:instance/broker: reason (after 3ms in state …)`.
    pub(super) fn line(&self, code: Code, reason: &str) -> String {
        let line = self.scrub.line(reason);
        let line = line.split(" (after ").next().unwrap_or(&line);
        if line.is_empty() {
            self.scrub.line(&code.to_string())
        } else {
            line.to_owned()
        }
    }
}

impl ClientContext for ErrorListener {
    fn log(&self, _: RDKafkaLogLevel, facility: &str, line: &str) {
        tracing::debug!(target: "librdkafka", "{facility} {}", self.scrub.line(line));
    }

    fn error(&self, error: KafkaError, reason: &str) {
        if let Some(code) = error.rdkafka_error_code() {
            tracing::debug!(target: "librdkafka", "{code}: {}", self.scrub.line(reason));
            self.hear(code, reason);
        }
    }
}

/// The error reported to the caller who opens the queue or sends to it.
pub(crate) fn connect_error(trouble: Option<Trouble>, address: &str) -> QueueError {
    match trouble {
        Some(Trouble {
            kind: Kind::Denied,
            why,
        }) => QueueError::Denied {
            why: format!("{address}: {why}"),
        },
        Some(Trouble {
            kind: Kind::UnknownHost,
            why,
        }) => QueueError::UnknownHost {
            why: format!("{address}: no such host: {why}"),
        },
        Some(Trouble { why, .. }) => QueueError::Unavailable {
            why: format!("{address}: {why}"),
        },
        None => QueueError::Unavailable {
            why: format!("{address}: no answer"),
        },
    }
}

/// The message for a refused topic or group.
pub(crate) fn denied(address: &str, code: Code) -> String {
    match code {
        Code::TopicAuthorizationFailed => {
            format!("{address}: no right to this topic (READ and DESCRIBE to work, WRITE to submit)")
        }
        Code::GroupAuthorizationFailed => format!("{address}: no right to this consumer group (READ)"),
        code => format!("{address}: {code}"),
    }
}
