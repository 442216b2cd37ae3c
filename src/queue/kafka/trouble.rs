//! Classifies librdkafka's errors, and listens for them.

use std::sync::{Arc, Mutex, PoisonError};

use rdkafka::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};

use crate::queue::QueueError;
use crate::queue::settings::SecretScrubber;

/// Classes of errors, by our reaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ErrorClass {
    /// Password, certificate or permission: the operator must act.
    Denied,
    /// The resolver does not know the host.
    UnknownHost,
    /// No broker answers.
    Unavailable,
    /// The topic, or a partition of it, does not exist.
    NoTopic,
    /// Any other error: librdkafka retries by itself.
    Transient,
}

pub(crate) fn error_class(code: Code) -> ErrorClass {
    match code {
        Code::Authentication
        | Code::SSL
        | Code::SaslAuthenticationFailed
        | Code::TopicAuthorizationFailed
        | Code::GroupAuthorizationFailed
        | Code::ClusterAuthorizationFailed => ErrorClass::Denied,
        Code::Resolve => ErrorClass::UnknownHost,
        Code::AllBrokersDown | Code::BrokerTransportFailure | Code::OperationTimedOut => ErrorClass::Unavailable,
        Code::UnknownTopic | Code::UnknownPartition | Code::UnknownTopicOrPartition | Code::UnknownTopicId => {
            ErrorClass::NoTopic
        }
        _ => ErrorClass::Transient,
    }
}

/// An error that explains why the broker does not answer.
#[derive(Debug, Clone)]
pub(crate) struct ReportedError {
    pub class: ErrorClass,
    /// One line without secrets.
    pub why: String,
}

impl ReportedError {
    /// Returns the newer of two errors, unless the older says more precisely what the operator must
    /// do.
    pub(super) fn or_more_specific(self, newer: ReportedError) -> ReportedError {
        let rank = |reported_error: &ReportedError| match reported_error.class {
            ErrorClass::Denied => 0,
            ErrorClass::UnknownHost => 1,
            _ => 2,
        };
        if rank(&newer) <= rank(&self) { newer } else { self }
    }
}

/// Keeps the most specific error that librdkafka reports. Logs librdkafka's log at the debug level.
#[derive(Clone)]
pub(crate) struct ErrorListener {
    scrub: SecretScrubber,
    last: Arc<Mutex<Option<ReportedError>>>,
}

impl ErrorListener {
    pub(super) fn new(scrub: SecretScrubber) -> ErrorListener {
        ErrorListener {
            scrub,
            last: Arc::default(),
        }
    }

    /// Takes the error that was reported since the last call.
    pub(super) fn take(&self) -> Option<ReportedError> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn record(&self, code: Code, reason: &str) {
        let new = ReportedError {
            class: error_class(code),
            why: self.line(code, reason),
        };
        // `AllBrokersDown` only follows from errors that were reported before, and is less
        // specific.
        if new.class == ErrorClass::Transient || code == Code::AllBrokersDown {
            return;
        }
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        *last = Some(match last.take() {
            Some(old) => old.or_more_specific(new),
            None => new,
        });
    }

    /// One line without secrets: librdkafka's text up to ` (after 3ms in state …)`.
    pub(super) fn line(&self, code: Code, reason: &str) -> String {
        let line = self.scrub.clean_line(reason);
        let line = line.split(" (after ").next().unwrap_or(&line);
        if line.is_empty() {
            self.scrub.clean_line(&code.to_string())
        } else {
            line.to_owned()
        }
    }
}

impl ClientContext for ErrorListener {
    fn log(&self, _: RDKafkaLogLevel, facility: &str, line: &str) {
        tracing::debug!(target: "librdkafka", "{facility} {}", self.scrub.clean_line(line));
    }

    fn error(&self, error: KafkaError, reason: &str) {
        if let Some(code) = error.rdkafka_error_code() {
            tracing::debug!(target: "librdkafka", "{code}: {}", self.scrub.clean_line(reason));
            self.record(code, reason);
        }
    }
}

/// The error reported to the caller who opens the queue or sends to it.
pub(crate) fn connect_error(reported_error: Option<ReportedError>, address: &str) -> QueueError {
    match reported_error {
        Some(ReportedError {
            class: ErrorClass::Denied,
            why,
        }) => QueueError::Denied {
            why: format!("{address}: {why}"),
        },
        Some(ReportedError {
            class: ErrorClass::UnknownHost,
            why,
        }) => QueueError::UnknownHost {
            why: format!("{address}: no such host: {why}"),
        },
        Some(ReportedError { why, .. }) => QueueError::Unavailable {
            why: format!("{address}: {why}"),
        },
        None => QueueError::Unavailable {
            why: format!("{address}: no answer"),
        },
    }
}

/// The message for a refused topic or group.
pub(crate) fn denied_message(address: &str, code: Code) -> String {
    match code {
        Code::TopicAuthorizationFailed => {
            format!("{address}: no right to this topic (READ and DESCRIBE to work, WRITE to submit)")
        }
        Code::GroupAuthorizationFailed => format!("{address}: no right to this consumer group (READ)"),
        code => format!("{address}: {code}"),
    }
}
