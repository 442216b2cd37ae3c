//! GGUF, llama.cpp's format: a file's metadata, the places of its tensors, and their number formats.
//!
//! Here is what any such file says. What it means for a model is in `model/gguf/`, and for a tokenizer
//! in `tokenizer/foreign/gguf.rs`.
//!
//! See docs/decisions/110-a-gguf-file-becomes-what-other-checkpoints-are.md.

mod cursor;
mod files;
mod formats;
mod header;
mod k_formats;
#[cfg(test)]
pub(crate) mod testing;

pub use files::{GgufFile, GgufSet, is_gguf, models, paths};
pub use formats::Format;
pub use header::{Header, StoredTensor, Value};

/// Why bytes are no GGUF file that can be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Problem {
    /// The file is damaged.
    Broken(String),
    /// The file is sound, but has what is not read.
    Unsupported(String),
}

impl Problem {
    pub fn message(&self) -> &str {
        match self {
            Problem::Broken(why) | Problem::Unsupported(why) => why,
        }
    }
}

/// Why a set of GGUF files cannot be read, with the file.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    #[error("cannot read `{}`: {source}", path.display())]
    Read {
        path: std::path::PathBuf,
        source: std::io::Error,
    },
    #[error("`{}`: {}", path.display(), problem.message())]
    File { path: std::path::PathBuf, problem: Problem },
}
