//! Dataset errors, split by how the caller reacts to them.

use super::store::error::cause;
use super::store::location::LocationError;
use super::store::web::refusal;

/// An error about inputs or outputs as a whole; an error of a single row is stored in that row.
#[derive(Debug, thiserror::Error)]
pub enum DatasetError {
    /// The job file is at fault: the job must not start.
    #[error(transparent)]
    Location(#[from] LocationError),
    /// The job file is at fault: the job must not start.
    #[error("no input matches `{uri}`: {why}")]
    NoMatch { uri: String, why: String },
    /// The inputs do not fit the job's settings: the job must not start.
    #[error("{0}")]
    Refused(String),
    /// The file is broken or is not of its claimed format: stop the job.
    #[error("`{file}` cannot be read: {why}")]
    Unreadable { file: String, why: String },
    /// The file has changed since planning: stop the job.
    #[error("`{file}` is not what it was when the job was planned: {why}; restore it, or run the job to a new output")]
    InputChanged { file: String, why: String },
    /// The file may be out of reach for this process only, so another worker may continue.
    #[error(
        "`{file}` is not there; it was when the job was planned: restore it, or let workers reach it; if it is gone for good, end the job \
         by `gristmill cancel OUTPUT --finish`"
    )]
    InputMissing { file: String },
    /// The store failed: try again later.
    #[error("cannot read `{file}`: {}", cause(error))]
    Store {
        file: String,
        error: Box<object_store::Error>,
    },
    /// Results do not fit the output, or a part is malformed: stop, since publishing is impossible.
    #[error("output: {0}")]
    Output(String),
}

impl DatasetError {
    pub(crate) fn store(file: &str, error: object_store::Error) -> DatasetError {
        if let Some(why) = refusal(&error) {
            return DatasetError::Refused(format!("`{file}` is not read: {why}"));
        }
        DatasetError::Store {
            file: file.to_string(),
            error: Box::new(error),
        }
    }

    /// Reading a shard of the job in `output` takes longer than `limit`.
    pub(crate) fn slow(output: &str, limit: std::time::Duration) -> DatasetError {
        DatasetError::Store {
            file: format!("inputs of {output}"),
            error: Box::new(object_store::Error::Generic {
                store: "input",
                source: format!("reading a shard takes more than {} s", limit.as_secs()).into(),
            }),
        }
    }

    pub(crate) fn unreadable(file: &str, why: impl ToString) -> DatasetError {
        DatasetError::Unreadable {
            file: file.to_string(),
            why: why.to_string(),
        }
    }

    /// Whether the same call could succeed later without an action by the operator.
    pub fn is_transient(&self) -> bool {
        use object_store::Error::*;
        match self {
            DatasetError::Store { error, .. } => !matches!(
                **error,
                PermissionDenied { .. } | Unauthenticated { .. } | NotSupported { .. } | NotImplemented { .. }
            ),
            _ => false,
        }
    }
}

/// Wraps any displayable error of building or reading output batches.
pub(crate) fn output_error(error: impl std::fmt::Display) -> DatasetError {
    DatasetError::Output(error.to_string())
}
