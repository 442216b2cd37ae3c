//! Why a model cannot be fetched: one line that says what to do.

use std::path::Path;

use crate::dataset::store::location::LocationError;

/// Why a model cannot be fetched.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// The text is no address.
    #[error(transparent)]
    Address(#[from] LocationError),
    /// The address, a token or the environment must be changed.
    #[error("`{address}`: {why}")]
    Refused { address: String, why: String },
    /// The server, the network or the disk failed; the same command may succeed later.
    #[error("`{address}`: {why}")]
    Failed { address: String, why: String },
}

impl FetchError {
    pub(super) fn refused(address: &impl ToString, why: impl Into<String>) -> FetchError {
        FetchError::Refused {
            address: address.to_string(),
            why: why.into(),
        }
    }

    pub(super) fn failed(address: &impl ToString, why: impl Into<String>) -> FetchError {
        FetchError::Failed {
            address: address.to_string(),
            why: why.into(),
        }
    }

    /// For a file of the cache that cannot be read or written.
    pub(super) fn cache(address: &impl ToString, path: &Path, error: &std::io::Error) -> FetchError {
        let hint = match error.kind() {
            std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => {
                ": the disk is full; make room and run it again, it goes on where it stopped"
            }
            _ => "",
        };
        FetchError::failed(
            address,
            format!("cannot use `{}` of the cache: {error}{hint}", path.display()),
        )
    }
}
