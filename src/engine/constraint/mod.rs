//! Constraints on a completion's text (*shapes*: choices, JSON Schemas, regular expressions),
//! compiled once per distinct shape and shared by all sequences that request the shape.
//!
//! llguidance compiles JSON Schemas and regular expressions: a grammar over bytes walks the trie of
//! the vocabulary's bytes and yields the mask of tokens that may come next. JSON has at most one
//! space after a separator. A shape that cannot compile, or that no token can begin, is refused: a
//! job's shape before the job starts, a row's shape together with its row.
//!
//! An expensive shape fails only the row that brought it. [`compiler`] compiles each shape on a
//! thread of its own, with a stack and a time limit of its own. Before that, `schema` and `pattern`
//! refuse shapes that would need too much stack, time or memory.
//!
//! Where a grammar allows only one continuation, the bytes up to the next choice are tokenized with
//! the tokenizer's own tokens ([`GrammarState::forced_tokens`]), and the model computes no logits
//! for them. The last of these tokens are left out where a longer token could also cover the bytes
//! that follow: that decision is the model's.
//!
//! Each sequence has its own matcher. The matchers of one *lane* share the states of the grammar's
//! lexer, which are expensive to compute, and take turns; lanes run in parallel. The tokens that a
//! sequence may draw must not depend on other sequences, whose states may make a shared matcher
//! fail. So after such a failure, a matcher with a lexer of its own decides. `lexer_memory.rs`
//! bounds the memory of all lexer states together.
//!
//! See docs/decisions/049-forced-text-is-not-asked-for.md.

mod build;
pub mod compiler;
mod formats;
mod grammar;
mod lexer_memory;
mod memory;
pub mod misspelt;
mod numbers;
mod pattern;
mod refusal;
mod schema;
mod subschemas;
#[cfg(test)]
mod tests;
mod text;

use std::sync::Arc;

use crate::engine::choice::ChoiceTrie;
use crate::engine::params::OutputConstraint;
use crate::tokenizer::Tokenizer;

pub use compiler::Compiler;
pub use grammar::{Grammar, GrammarState};
pub use memory::MemoryCharge;

/// The reason why a shape cannot be applied: the job (or the row that brought the shape) is
/// refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConstraintError {
    #[error("`{field}` is too large: {size} {unit}, at most {limit} are allowed")]
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
    TooMuchWork { field: &'static str },
    #[error("`{field}` cannot be compiled: {why}")]
    Invalid { field: &'static str, why: String },
    #[error("`{field}` did not compile within {seconds} s")]
    TooSlow { field: &'static str, seconds: u64 },
    #[error(
        "`{field}` cannot be compiled: all {threads} compiler threads are still busy with schemas of earlier rows that timed out"
    )]
    ThreadsBusy { field: &'static str, threads: usize },
    #[error("`{field}` allows no text that this model's vocabulary can produce")]
    Unsatisfiable { field: &'static str },
    #[error(
        "`choice` lists {count} choices of {bytes} bytes together; it may list 1 to 10,000 choices of 1 MiB together"
    )]
    ChoiceCount { count: usize, bytes: usize },
    #[error("the model's vocabulary cannot produce the choice `{text}`")]
    NotInVocabulary { text: String },
    #[error(
        "the choice `{text}` is the beginning of another choice, and the model has no end-of-sequence token to tell them apart"
    )]
    NoEnd { text: String },
    #[error(
        "the choice `{text}` needs token {token}, which the checkpoint's `suppress_tokens`, `begin_suppress_tokens` or \
         `bad_words_ids` forbid; `generate.defaults: neutral` ignores these settings"
    )]
    Forbidden { text: String, token: u32 },
    #[error("the vocabulary cannot be used for constrained output: {why}")]
    Vocabulary { why: String },
}

/// A compiled [`OutputConstraint`]; clones share the compiled shape.
#[derive(Debug, Clone)]
pub enum Constraint {
    Free,
    Choice {
        choices: Arc<ChoiceTrie>,
        probabilities: bool,
    },
    Grammar(Arc<Grammar>),
}

impl Constraint {
    /// Compiles one shape for a vocabulary. To compile several shapes, keep a [`Compiler`].
    pub fn compile(
        shape: &OutputConstraint,
        tokenizer: &Arc<Tokenizer>,
        eos: &[u32],
    ) -> Result<Constraint, ConstraintError> {
        Compiler::new().compile(shape, tokenizer, &eos.into())
    }

    /// Number of tokens of the longest text that the constraint allows, where it is known.
    pub fn longest_tokens(&self) -> Option<usize> {
        match self {
            Constraint::Choice { choices, .. } => Some(choices.longest_tokens()),
            Constraint::Free | Constraint::Grammar(_) => None,
        }
    }
}
