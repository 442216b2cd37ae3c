//! The engine's requests and results, one per (row, sample, attempt).
//!
//! See docs/decisions/054-end-ids-belong-to-a-request.md.

use std::sync::Arc;

use crate::engine::constraint::ConstraintError;
use crate::engine::params::GenerationParams;
use crate::engine::thinking::Thought;

/// Identifies a sample: one answer to generate for a row. Random numbers are keyed by this id,
/// never by a batch slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SampleId {
    /// Number of the job, assigned by the caller; unique within an engine. The random stream
    /// depends on the job's seed instead.
    pub job: u32,
    /// Index of the row in the job's whole input.
    pub row: u64,
    /// Index of the sample, below `GenerationParams::samples`.
    pub sample: u32,
    /// 0 for the first attempt; higher where a row is generated again on request (`retry`).
    pub attempt: u32,
}

/// One completion to generate.
#[derive(Debug, Clone)]
pub struct Request {
    pub id: SampleId,
    /// Prompt token ids, at least one.
    pub prompt: Arc<[u32]>,
    pub params: Arc<GenerationParams>,
    /// Token ids that end a completion unless `GenerationParams::ignore_eos` is set: the model's
    /// own, and the job's end of turn.
    pub eos: Arc<[u32]>,
    /// Only sequences of the same salt share cached prefixes. Otherwise `cached_tokens` would
    /// reveal whether another user's prompt begins with a guessed text.
    pub cache_salt: Arc<str>,
    /// The number of the adapter that changes the model for it, among those beside the model, from 1 on. 0: none does.
    pub adapter: u32,
}

/// The reason why a completion ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// End of sequence, a stop text, a stop token, or the shape's end.
    Stop,
    /// `max_tokens` or the model's context was reached.
    Length,
}

impl FinishReason {
    /// The value written to outputs, as in OpenAI's API.
    pub fn as_str(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
        }
    }
}

/// One finished completion.
#[derive(Debug, Clone)]
pub struct Completion {
    pub id: SampleId,
    /// Generated ids, including a thought and its delimiters, without the token that ended the
    /// completion.
    pub token_ids: Vec<u32>,
    /// The text of the answer's ids, without the one space that some tokenizers put in front of
    /// every text (see [`sequence`](crate::engine::sequence)).
    pub text: String,
    pub finish_reason: FinishReason,
    /// Whether the text fits the requested
    /// [`OutputConstraint`](crate::engine::params::OutputConstraint). Always true for `Free`,
    /// except when the thought used up all tokens.
    pub fits_shape: bool,
    /// One per entry of `token_ids`, if requested.
    pub logprobs: Option<Vec<f32>>,
    /// One per choice, summing to 1, if requested.
    pub choice_probabilities: Option<Vec<f32>>,
    /// The thought before the answer, if there was one.
    pub thought: Option<Thought>,
    pub prompt_tokens: u32,
    /// Prompt tokens whose keys and values another sequence had computed already.
    pub cached_tokens: u32,
}

/// The engine's result for a [`Request`].
#[derive(Debug, Clone)]
pub struct FinishedSample {
    pub id: SampleId,
    /// `Err`: this row cannot be completed; the text is one line for the row's `error` column.
    pub result: Result<Completion, String>,
    /// Number of tokens that the device computed for the request, prompt and completion. Recomputed
    /// tokens count each time.
    pub computed_tokens: u64,
}

/// The reason why this engine cannot complete a request. It fails the row.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    #[error("the prompt has no tokens")]
    EmptyPrompt,
    #[error("the prompt holds token {token}, and the model's vocabulary has {vocabulary}")]
    UnknownToken { token: u32, vocabulary: usize },
    #[error(
        "the prompt has {prompt} tokens, and an answer needs at least {min_tokens}: together more than the model's context of {context}"
    )]
    Context {
        prompt: usize,
        min_tokens: usize,
        context: usize,
    },
    #[error(
        "the prompt has {prompt} tokens, and an answer up to {max_tokens}: together more than the {pool} tokens that the KV pool holds of one sequence"
    )]
    Pool {
        prompt: usize,
        max_tokens: usize,
        pool: usize,
    },
    #[error(transparent)]
    OutputConstraint(#[from] ConstraintError),
}
