//! Errors of the ledger, one variant per reaction of the caller.

/// An error of the ledger. The variant determines the reaction of the caller. The text names the
/// failure, the object and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// The store failed `tries` times in a row: give the shard back and retry later.
    #[error("{operation} failed {tries} times in a row")]
    Retryable {
        operation: String,
        tries: u32,
        #[source]
        source: object_store::Error,
    },
    /// An object has unexpected content: this shard is blocked until a person has looked at it.
    /// Other shards can go on.
    #[error("{message}")]
    Damaged { message: String },
    /// The data of finished rows is lost, and their records are voided: open the shard anew and
    /// compute the rows again.
    #[error("{message}")]
    Lost { message: String },
    /// An object was written by a newer gristmill: leave it untouched for a newer worker.
    #[error("`{key}` has version {found}, this gristmill reads up to {known}: use a newer gristmill")]
    Newer { key: String, found: u64, known: u32 },
    /// The output belongs to another job or program: refuse the job, and never overwrite.
    #[error("{message}")]
    Conflict { message: String },
    /// The store refuses this process for lack of permission or valid credentials: pause, report
    /// it, retry.
    #[error("{message}")]
    Denied { message: String },
    /// The job is blocked until a person has acted, for example because the disk is full or the
    /// store cannot keep the guarantee.
    #[error("{message}")]
    Stop { message: String },
}

pub type Result<T, E = LedgerError> = std::result::Result<T, E>;

impl LedgerError {
    pub(crate) fn damaged(message: impl Into<String>) -> LedgerError {
        LedgerError::Damaged {
            message: message.into(),
        }
    }

    pub(crate) fn conflict(message: impl Into<String>) -> LedgerError {
        LedgerError::Conflict {
            message: message.into(),
        }
    }

    pub(crate) fn denied(message: impl Into<String>) -> LedgerError {
        LedgerError::Denied {
            message: message.into(),
        }
    }

    pub(crate) fn stop(message: impl Into<String>) -> LedgerError {
        LedgerError::Stop {
            message: message.into(),
        }
    }

    /// Whether the same call may succeed later without anybody acting.
    pub fn is_retryable(&self) -> bool {
        matches!(self, LedgerError::Retryable { .. })
    }
}

/// Presents an injected error as a store that does not answer.
#[cfg(feature = "faults")]
impl From<crate::faults::Injected> for LedgerError {
    fn from(injected: crate::faults::Injected) -> LedgerError {
        LedgerError::Retryable {
            operation: "a request".into(),
            tries: 1,
            source: object_store::Error::Generic {
                store: "failpoint",
                source: Box::new(injected),
            },
        }
    }
}
