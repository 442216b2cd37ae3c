//! What a completion may look like, compiled once per distinct shape and shared by all sequences that ask for it.
//!
//! JSON Schemas and regular expressions go through llguidance: a grammar over bytes walks the trie of the vocabulary's bytes
//! and yields the mask of tokens that may come next. JSON has at most one space after a separator. A shape that
//! cannot compile, or that no token can begin, is refused: the job's own before it starts, a row's with its row.
//!
//! Whatever a row brings as its shape, it costs that row alone: [`compiler`] compiles on threads of their own, with a stack and a time of
//! their own, and `schema` and `pattern` refuse beforehand what would take too much of either, or of memory.
//!
//! Where a grammar leaves one way to go on, the bytes up to the next choice are spelled with the tokenizer's own tokens
//! ([`GrammarState::forced`]) and the model is not asked. The last of them are left out where a longer token could also take
//! in what comes next: that is the model's choice.
//!
//! Each sequence walks a matcher of its own. Matchers of one *lane* share what they find out about the grammar (the states of its
//! lexer, which are expensive) and take turns; lanes run in parallel. What a sequence may say does not depend on its
//! neighbours: where a matcher that shares fails, which the neighbours' states may have brought it to, one that shares with
//! none decides. What all of them find out is bounded together (`growth.rs`).
//!
//! See docs/decisions/049-forced-text-is-not-asked-for.md.

mod build;
pub mod compiler;
mod formats;
mod grammar;
mod growth;
pub mod misspelt;
mod numbers;
mod pattern;
mod places;
mod refusal;
mod schema;
#[cfg(test)]
mod tests;
mod text;
mod weight;

use std::sync::Arc;

use crate::engine::choice::Choices;
use crate::engine::params::OutputConstraint;
use crate::model::tokenizer::Tokenizer;

pub use compiler::Compiler;
pub use grammar::{Grammar, GrammarState};
pub use weight::Weight;

/// A shape that no completion can be held to: the job (or the row that brought it) is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConstraintError {
    #[error("`{field}` is too large: {size} {unit}, at most {limit} are read")]
    TooLarge {
        field: &'static str,
        size: usize,
        unit: &'static str,
        limit: usize,
    },
    #[error(
        "`{field}` is too large: its properties, alternatives and definitions multiply to more than {} MiB of grammar",
        schema::WORK_MAX >> 20
    )]
    Work { field: &'static str },
    #[error("`{field}` cannot be compiled: {why}")]
    Invalid { field: &'static str, why: String },
    #[error("`{field}` is not compiled after {seconds} s and was given up")]
    TooSlow { field: &'static str, seconds: u64 },
    #[error(
        "`{field}` cannot be compiled: all {threads} threads for it are held by shapes of earlier rows that were given up"
    )]
    Held { field: &'static str, threads: usize },
    #[error("`{field}` allows no text that this model's vocabulary can spell")]
    Unsatisfiable { field: &'static str },
    #[error("`choice` lists {count} choices of {bytes} bytes together; 1 to 10,000 choices of at most 1 MiB are taken")]
    ChoiceCount { count: usize, bytes: usize },
    #[error("the model's vocabulary cannot spell the choice `{text}`")]
    Unspeakable { text: String },
    #[error("the choice `{text}` begins another one, and the model has no end-of-sequence token to tell them apart")]
    NoEnd { text: String },
    #[error(
        "the choice `{text}` needs token {token}, which the checkpoint's `suppress_tokens`, `begin_suppress_tokens` or \
         `bad_words_ids` forbid; `generate.defaults: neutral` leaves them out"
    )]
    Forbidden { text: String, token: u32 },
    #[error("the vocabulary cannot be used for constrained output: {why}")]
    Vocabulary { why: String },
}

/// A compiled [`OutputConstraint`]; clones share it.
#[derive(Debug, Clone)]
pub enum Constraint {
    Free,
    Choice { choices: Arc<Choices>, probabilities: bool },
    Grammar(Arc<Grammar>),
}

impl Constraint {
    /// Compiles one shape for a vocabulary. Whoever compiles several shapes keeps a [`Compiler`].
    pub fn compile(
        shape: &OutputConstraint,
        tokenizer: &Arc<Tokenizer>,
        eos: &[u32],
    ) -> Result<Constraint, ConstraintError> {
        Compiler::new().compile(shape, tokenizer, &eos.into())
    }

    /// Tokens of the longest text it allows, where that is known.
    pub fn longest(&self) -> Option<usize> {
        match self {
            Constraint::Choice { choices, .. } => Some(choices.longest()),
            Constraint::Free | Constraint::Grammar(_) => None,
        }
    }
}
