//! What can go wrong with the ledger, split by what the caller does about it.

/// An error of the ledger. The variant is the reaction; the text says what, where, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// The store did not answer as it should, `tries` times in a row: give the shard back, try again later.
    #[error("{what} failed {tries} times in a row")]
    Retryable {
        what: String,
        tries: u32,
        #[source]
        source: object_store::Error,
    },
    /// An object is not what it must be: this shard cannot go on until a person has looked; other shards can.
    #[error("{what}")]
    Damaged { what: String },
    /// Finished rows' data is lost, and the log says so by now: open the shard anew, and compute them again.
    #[error("{what}")]
    Lost { what: String },
    /// An object was written by a newer gristmill: leave it untouched, let a newer worker have it.
    #[error("`{key}` has version {found}, this gristmill reads up to {known}: use a newer gristmill")]
    Newer { key: String, found: u64, known: u32 },
    /// The output belongs to something else: never overwrite, refuse the job.
    #[error("{what}")]
    Conflict { what: String },
    /// The store refuses this process: no permission, or credentials that it does not accept. Pause, say so, try again.
    #[error("{what}")]
    Denied { what: String },
    /// Nothing can go on until a person has acted: full disk, a store that cannot keep the guarantee.
    #[error("{what}")]
    Stop { what: String },
}

/// Shorthand of this folder.
pub type Result<T, E = LedgerError> = std::result::Result<T, E>;

impl LedgerError {
    pub(crate) fn damaged(what: impl Into<String>) -> LedgerError {
        LedgerError::Damaged { what: what.into() }
    }

    pub(crate) fn conflict(what: impl Into<String>) -> LedgerError {
        LedgerError::Conflict { what: what.into() }
    }

    pub(crate) fn denied(what: impl Into<String>) -> LedgerError {
        LedgerError::Denied { what: what.into() }
    }

    pub(crate) fn stop(what: impl Into<String>) -> LedgerError {
        LedgerError::Stop { what: what.into() }
    }

    /// Whether the same call may succeed later without anybody acting.
    pub fn is_retryable(&self) -> bool {
        matches!(self, LedgerError::Retryable { .. })
    }
}
