//! The engine's requests and results, one per (row, sample, attempt).
//!
//! See docs/decisions/054-end-ids-belong-to-a-request.md.

use std::sync::Arc;

use crate::engine::params::GenerationParams;
use crate::engine::thinking::Thought;

/// The engine's unit of work. Random numbers are keyed by it, never by a batch slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct UnitId {
    /// Tells the jobs of one engine apart; the caller assigns it. The random stream depends on the
    /// job's seed instead.
    pub job: u32,
    /// 0-based over the job's whole input.
    pub row: u64,
    /// 0-based, below `Params::samples`.
    pub sample: u32,
    /// 0 for the first attempt; higher where a row is generated again on request (`retry`).
    pub attempt: u32,
}

/// One completion to generate.
#[derive(Debug, Clone)]
pub struct Request {
    pub id: UnitId,
    /// Prompt token ids, at least one.
    pub prompt: Arc<[u32]>,
    pub params: Arc<GenerationParams>,
    /// Token ids that end a completion unless `Params::ignore_eos`: the model's own, and the job's end of turn.
    pub eos: Arc<[u32]>,
    /// Prefix caching is limited to sequences of the same salt: otherwise, `cached_tokens` would
    /// reveal whether another user's prompt begins with a guessed text.
    pub cache_salt: Arc<str>,
}

/// Why a completion ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// End of sequence, a stop text, a stop token, or the shape's end.
    Stop,
    /// `max_tokens` or the model's context was reached.
    Length,
}

impl FinishReason {
    /// The word written to outputs (OpenAI's).
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
    pub id: UnitId,
    /// Generated ids, including a thought and its delimiters, without the token that ended the
    /// completion.
    pub token_ids: Vec<u32>,
    /// The text of the answer's ids, without the one space that some tokenizers put in front of
    /// every text (see [`sequence`](crate::engine::sequence)).
    pub text: String,
    pub finish_reason: FinishReason,
    /// Whether the text fits the requested
    /// [`OutputConstraint`](crate::engine::params::OutputConstraint). Always true for `Free`,
    /// unless the thought left no room for an answer.
    pub fits_shape: bool,
    /// One per entry of `token_ids`, if requested.
    pub logprobs: Option<Vec<f32>>,
    /// One per choice, summing to 1, if requested.
    pub choice_probabilities: Option<Vec<f32>>,
    /// The thought before the answer; `None` if there was none.
    pub thought: Option<Thought>,
    pub prompt_tokens: u32,
    /// Prompt tokens whose keys and values another sequence had computed already.
    pub cached_tokens: u32,
}

/// The engine's result for a [`Request`].
#[derive(Debug, Clone)]
pub struct Finished {
    pub id: UnitId,
    /// `Err`: this row cannot be completed; the text is one line for the row's `error` column.
    pub result: Result<Completion, String>,
    /// Tokens that the device computed for it, prompt and completion; recomputed tokens count each
    /// time.
    pub computed_tokens: u64,
}
