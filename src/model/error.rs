//! Errors of a checkpoint, split by what the user can do about them.

use std::path::{Path, PathBuf};

use crate::device::DeviceError;

/// Why a model could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A file cannot be read: look at the path and its permissions.
    #[error("cannot read `{}`: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    /// A file is broken or does not fit the others: fetch the checkpoint again.
    #[error("`{}`: {message}", path.display())]
    Broken { path: PathBuf, message: String },
    /// The checkpoint is sound but needs a feature that gristmill lacks: choose another checkpoint.
    #[error("`{}`: {message}", path.display())]
    Unsupported { path: PathBuf, message: String },
    /// The options do not fit the model: change the job.
    #[error("{0}")]
    Options(String),
    /// The device cannot run the model: choose another device, or other options.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

impl ModelError {
    pub(crate) fn read(path: &Path, source: std::io::Error) -> ModelError {
        ModelError::Read {
            path: path.to_owned(),
            source,
        }
    }
    pub(crate) fn broken(path: &Path, message: impl Into<String>) -> ModelError {
        ModelError::Broken {
            path: path.to_owned(),
            message: message.into(),
        }
    }
    pub(crate) fn unsupported(path: &Path, message: impl Into<String>) -> ModelError {
        ModelError::Unsupported {
            path: path.to_owned(),
            message: message.into(),
        }
    }
}
