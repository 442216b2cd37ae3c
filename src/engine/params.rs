//! Checked generation parameters, shared by all rows of a job (or of one row of a batch file).

use std::sync::Arc;

use crate::device::draw::Sampling;
use crate::engine::forbidden::ForbiddenTokens;
use crate::engine::thinking::Thinking;

/// Checked generation parameters. `job/` validates them once, when the job is read.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerationParams {
    /// Maximum tokens to generate per sample, thought and answer together; at least 1.
    pub max_tokens: u32,
    pub sampling: Sampling,
    /// Seed of the random streams; derived from the job id when the job gives none.
    pub seed: u64,
    /// Texts that end a completion; the text before them is kept.
    pub stop: Vec<String>,
    /// Token ids that end a completion, besides the model's own end-of-sequence ids.
    pub stop_token_ids: Vec<u32>,
    /// Whether to continue past the model's end-of-sequence ids, up to `max_tokens`.
    pub ignore_eos: bool,
    /// Tokens that must not be drawn: anywhere, as the first token, or before a minimum length.
    pub forbidden: ForbiddenTokens,
    /// Whether to return the log probability of each chosen token (of the raw distribution, before
    /// penalties and filters).
    pub logprobs: bool,
    /// Samples per row, at least 1.
    pub samples: u32,
    /// Whether every bit of the result must be independent of the rest of the batch, at the cost of
    /// speed.
    pub deterministic: bool,
    /// Constraint on the answer's text. In names and comments, *shape* means an output constraint.
    pub shape: OutputConstraint,
    /// Delimiters and limits of thoughts; `None`: the model does not think.
    pub thinking: Option<Arc<Thinking>>,
}

/// Constraint on a completion's text.
#[derive(Debug, Clone, PartialEq)]
pub enum OutputConstraint {
    Free,
    /// One of these texts. With `probabilities`, the probability of each text is returned as well.
    Choice {
        choices: Vec<String>,
        probabilities: bool,
    },
    /// JSON that is valid under this JSON Schema.
    JsonSchema(serde_json::Value),
    /// Text that matches this regular expression (Rust `regex` syntax) as a whole.
    Regex(String),
}

impl Default for GenerationParams {
    fn default() -> Self {
        GenerationParams {
            sampling: Sampling::default(),
            max_tokens: 256,
            seed: 0,
            stop: Vec::new(),
            stop_token_ids: Vec::new(),
            ignore_eos: false,
            forbidden: ForbiddenTokens::default(),
            logprobs: false,
            samples: 1,
            deterministic: false,
            shape: OutputConstraint::Free,
            thinking: None,
        }
    }
}
