//! Counts the errors of stores and queues by kind, for a worker's metrics.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::dataset::DatasetError;
use crate::ledger::LedgerError;
use crate::queue::QueueError;
use crate::traces::names;

/// Kind of an error of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreErrorKind {
    /// The store does not answer, or fails.
    Unavailable,
    /// The store refuses access.
    Denied,
    /// A record is damaged, lost, of a newer version, or of another job.
    Record,
    /// An input is missing, has changed, or cannot be read.
    Input,
    /// The output cannot be written: the disk is full, for example.
    Unusable,
}

impl StoreErrorKind {
    pub const ALL: [StoreErrorKind; 5] = [
        StoreErrorKind::Unavailable,
        StoreErrorKind::Denied,
        StoreErrorKind::Record,
        StoreErrorKind::Input,
        StoreErrorKind::Unusable,
    ];

    /// The kind's name in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            StoreErrorKind::Unavailable => "unavailable",
            StoreErrorKind::Denied => "denied",
            StoreErrorKind::Record => "record",
            StoreErrorKind::Input => "input",
            StoreErrorKind::Unusable => "unusable",
        }
    }
}

/// Kind of an error of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueueErrorKind {
    /// The broker does not answer, or its name is unknown.
    Unavailable,
    /// The broker refuses access.
    Denied,
    /// A message or a setting is invalid.
    Invalid,
}

impl QueueErrorKind {
    pub const ALL: [QueueErrorKind; 3] = [
        QueueErrorKind::Unavailable,
        QueueErrorKind::Denied,
        QueueErrorKind::Invalid,
    ];

    /// The kind's name in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            QueueErrorKind::Unavailable => "unavailable",
            QueueErrorKind::Denied => "denied",
            QueueErrorKind::Invalid => "invalid",
        }
    }
}

/// See the module's description. No decision depends on the counts, so relaxed atomics suffice.
#[derive(Debug, Default)]
pub struct ErrorCounts {
    store: [AtomicU64; StoreErrorKind::ALL.len()],
    queue: [AtomicU64; QueueErrorKind::ALL.len()],
}

impl ErrorCounts {
    /// Counts an error once, by the first of its causes that is of a store or a queue. Other errors
    /// do not count.
    pub fn add(&self, error: &anyhow::Error) {
        match error.chain().find_map(ErrorKind::of_cause) {
            Some(ErrorKind::Store(kind)) => self.store[kind as usize].fetch_add(1, Relaxed),
            Some(ErrorKind::Queue(kind)) => self.queue[kind as usize].fetch_add(1, Relaxed),
            None => 0,
        };
    }

    /// Number of errors of stores by kind.
    pub fn store_errors(&self) -> [(StoreErrorKind, u64); StoreErrorKind::ALL.len()] {
        StoreErrorKind::ALL.map(|kind| (kind, self.store[kind as usize].load(Relaxed)))
    }

    /// Number of errors of queues by kind.
    pub fn queue_errors(&self) -> [(QueueErrorKind, u64); QueueErrorKind::ALL.len()] {
        QueueErrorKind::ALL.map(|kind| (kind, self.queue[kind as usize].load(Relaxed)))
    }
}

/// Kind of an error of a store or a queue.
#[derive(Debug, Clone, Copy)]
enum ErrorKind {
    Store(StoreErrorKind),
    Queue(QueueErrorKind),
}

impl ErrorKind {
    fn of_cause(cause: &(dyn std::error::Error + 'static)) -> Option<ErrorKind> {
        let store = store_error_kind(cause).map(ErrorKind::Store);
        store.or_else(|| cause.downcast_ref().map(queue_error_kind).map(ErrorKind::Queue))
    }
}

/// The word for an error's kind in traces, which show no error's text: that of its first cause
/// that is of a store or a queue.
pub(crate) fn error_kind_name(error: &anyhow::Error) -> &'static str {
    match error.chain().find_map(ErrorKind::of_cause) {
        Some(ErrorKind::Store(kind)) => kind.as_str(),
        Some(ErrorKind::Queue(kind)) => kind.as_str(),
        None => names::OTHER_ERROR,
    }
}

fn store_error_kind(cause: &(dyn std::error::Error + 'static)) -> Option<StoreErrorKind> {
    if let Some(error) = cause.downcast_ref::<LedgerError>() {
        return Some(match error {
            LedgerError::Retryable { .. } => StoreErrorKind::Unavailable,
            LedgerError::Denied { .. } => StoreErrorKind::Denied,
            LedgerError::Damaged { .. }
            | LedgerError::Lost { .. }
            | LedgerError::Newer { .. }
            | LedgerError::Conflict { .. } => StoreErrorKind::Record,
            LedgerError::Stop { .. } => StoreErrorKind::Unusable,
        });
    }
    let error = cause.downcast_ref::<DatasetError>()?;
    Some(match error {
        DatasetError::Store { .. } => StoreErrorKind::Unavailable,
        DatasetError::Output(_) => StoreErrorKind::Unusable,
        _ => StoreErrorKind::Input,
    })
}

fn queue_error_kind(error: &QueueError) -> QueueErrorKind {
    match error {
        QueueError::Unavailable { .. } | QueueError::UnknownHost { .. } => QueueErrorKind::Unavailable,
        QueueError::Denied { .. } => QueueErrorKind::Denied,
        QueueError::Settings { .. } | QueueError::Malformed { .. } | QueueError::Newer { .. } => {
            QueueErrorKind::Invalid
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_counts_once_under_its_kind() {
        let counts = ErrorCounts::default();
        let damaged = anyhow::Error::from(LedgerError::damaged("x")).context("shard 3");
        counts.add(&damaged);
        counts.add(&LedgerError::stop("the disk is full").into());
        counts.add(&DatasetError::InputMissing { file: "x".into() }.into());
        counts.add(&QueueError::Denied { why: "x".into() }.into());
        counts.add(&anyhow::anyhow!("something else"));
        let by_name = |name: &str| {
            let mut store = counts.store_errors().into_iter();
            store.find(|(kind, _)| kind.as_str() == name).map(|(_, errors)| errors)
        };
        assert_eq!(
            ["unavailable", "denied", "record", "input", "unusable"].map(by_name),
            [0, 0, 1, 1, 1].map(Some)
        );
        assert_eq!(counts.queue_errors().map(|(_, errors)| errors), [0, 1, 0]);
        assert_eq!(error_kind_name(&damaged), "record");
        assert_eq!(
            error_kind_name(&QueueError::Denied { why: "x".into() }.into()),
            "denied"
        );
        assert_eq!(error_kind_name(&anyhow::anyhow!("something else")), "_OTHER");
    }
}
