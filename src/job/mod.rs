//! The job file, the checked job, and the prompts that a job renders from rows.
//!
//! * `file`: the raw job file, read by `parse`, which fills in `parameters` and `included` files;
//!   `unknown` locates an unknown field.
//! * `spec`, `input`, `generate`, `queue`, `recheck`, `on_finish`: the valid job, checked with
//!   `check`. `record` applies the same checks to a job read back from a ledger; nothing downstream
//!   checks again. `sampling` fills unset values from the checkpoint.
//! * `prompt`: converts rows to token ids, using `template` (column templates; `names` finds the
//!   names in them, `python` provides Python's behaviour), `chat` (the checkpoint's chat template),
//!   `guard` (keeps control tokens out of row data), `openai` (lines of OpenAI batch files) and
//!   `responses` (those of its Responses API); `row_error` has the API's codes for rows' errors.

pub mod carry;
pub mod chat;
mod check;
mod closed_schema;
pub mod difference;
pub mod file;
pub mod generate;
mod guard;
mod included;
pub mod input;
mod names;
pub mod on_finish;
mod one_or_many;
mod openai;
pub mod parameters;
mod parse;
pub mod precision;
pub mod prompt;
mod python;
pub mod queue;
pub mod recheck;
mod record;
mod responses;
pub mod row_error;
pub mod sampling;
pub mod spec;
mod template;
pub mod thinking;
mod unknown;
mod wanted;
mod writing;
mod yaml_hint;

use std::path::PathBuf;

pub use file::JobFile;
pub use generate::Generate;
pub(crate) use openai::whole_number;
pub use parameters::Parameters;
pub use prompt::{PromptPreview, RenderSetup, RenderedRow, Renderer};
pub use spec::Job;

use data_encoding::HEXLOWER;

use crate::tokenizer::one_line;

/// Why a job cannot start; someone must edit its file or use another model.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    #[error("cannot read `{}`: {source}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// `location` is the job file, with the line if it is known.
    #[error("{location}: {message}")]
    Invalid { location: String, message: String },
    #[error("{location}: {message}")]
    Template { location: String, message: String },
    /// The job names a column that its input does not have.
    #[error("{location}: column `{column}`, used in `{field}`, does not exist in `{input}`{hint}")]
    Column {
        location: String,
        column: String,
        field: String,
        input: String,
        hint: String,
    },
}

/// The end of a message about the unknown `word`: `; did you mean …?` if one of `known` is similar,
/// else the list of `known` if it is short.
pub(crate) fn suggest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    let known: Vec<&str> = known.into_iter().collect();
    let lower = word.to_lowercase();
    let length = lower.chars().count();
    let distance_max = |name: &str| (name.chars().count() / 3).max(1);
    let nearest = known
        .iter()
        // A large difference in length already rules a name out, so that no distance is computed
        // for a very long word.
        .filter(|name| name.chars().count().abs_diff(length) <= distance_max(name))
        .map(|name| (strsim::damerau_levenshtein(&lower, &name.to_lowercase()), name))
        .filter(|(distance, name)| *distance <= distance_max(name))
        .min_by_key(|(distance, _)| *distance);
    match nearest {
        Some((_, name)) => format!("; did you mean `{name}`?"),
        None if known.is_empty() || known.len() > 24 => String::new(),
        None => format!("; known are `{}`", known.join("`, `")),
    }
}

/// SHA-256 in lower-case hexadecimal.
fn sha256_hex(bytes: impl AsRef<[u8]>) -> String {
    use sha2::Digest;
    let digest = sha2::Sha256::digest(bytes);
    HEXLOWER.encode(&digest)
}
