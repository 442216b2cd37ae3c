//! Models in GGUF files: their metadata as a configuration, their tensors by the names that other
//! checkpoints have.
//!
//! | what the file has otherwise | where it ends |
//! |---|---|
//! | metadata in place of `config.json` | `config.rs` writes the keys that `config.json` would have |
//! | other names of tensors, all experts of a layer in one | `tensors.rs` |
//! | rows of queries and keys so that neighbours rotate | `Config::rotates_neighbours` |
//! | norms of Gemma with 1 added | `Config::unit_offset_norms` |
//! | numbers in blocks | `Weights::tensor` |
//!
//! See docs/decisions/110-a-gguf-file-becomes-what-other-checkpoints-are.md.

mod architecture;
mod config;
mod ends;
mod keys;
mod sampling;
mod tensors;

use std::path::Path;

pub(super) use architecture::Architecture;
pub use config::config;
pub(super) use sampling::sampling;
pub(super) use tensors::{header, stored_name};

use crate::gguf::{GgufError, GgufSet, Problem};
use crate::model::error::ModelError;

/// The GGUF model at `path`: see [`GgufSet::open`].
///
/// # Errors
/// A file cannot be read, or is no sound GGUF file, or one of another set.
pub fn open(path: &Path) -> Result<Option<GgufSet>, ModelError> {
    Ok(GgufSet::open(path)?)
}

impl From<GgufError> for ModelError {
    fn from(error: GgufError) -> ModelError {
        match error {
            GgufError::Read { path, source } => ModelError::Read { path, source },
            GgufError::File { path, problem } => match problem {
                Problem::Broken(message) => ModelError::Broken { path, message },
                Problem::Unsupported(message) => ModelError::Unsupported { path, message },
            },
        }
    }
}
