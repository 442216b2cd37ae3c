//! What goes into the engine and what comes out of it: one (row, sample, attempt) at a time.
//!
//! See docs/decisions/054-end-ids-belong-to-a-request.md.

use std::sync::Arc;

use crate::engine::params::GenerationParams;
use crate::engine::thinking::Thought;

/// The engine's unit of work. Random numbers are keyed by it, never by a batch slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct UnitId {
    /// Tells the jobs of one engine apart; whoever submits numbers them. Not part of the random stream: the job's seed is.
    pub job: u32,
    /// 0-based over the job's whole input.
    pub row: u64,
    /// 0-based, below `Params::samples`.
    pub sample: u32,
    /// 0 unless a row is tried again on purpose (a `retry` generation).
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
    /// Sequences find the computed prefixes of sequences that have the same salt, and of no others: `cached_tokens` would tell whether
    /// somebody else's prompt begins with a guessed text.
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
    /// Generated ids, those of a thought and its delimiters included, without the token that ended it.
    pub token_ids: Vec<u32>,
    /// What the answer's ids spell, without the one space that some tokenizers put in front of every text
    /// (see [`sequence`](crate::engine::sequence)).
    pub text: String,
    pub finish_reason: FinishReason,
    /// Does the text fit the asked-for [`OutputConstraint`](crate::engine::params::OutputConstraint)? Always true for `Free`, but where a thought has left
    /// no answer.
    pub fits_shape: bool,
    /// One per entry of `token_ids`, when asked for.
    pub logprobs: Option<Vec<f32>>,
    /// One per choice, summing to 1, when asked for.
    pub choice_probabilities: Option<Vec<f32>>,
    /// What came before the answer; `None`: nothing did.
    pub thought: Option<Thought>,
    pub prompt_tokens: u32,
    /// Prompt tokens that were not computed because another sequence had computed them.
    pub cached_tokens: u32,
}

/// What the engine hands back for a [`Request`].
#[derive(Debug, Clone)]
pub struct Finished {
    pub id: UnitId,
    /// `Err`: this row cannot be completed; one line for the row's `error` column.
    pub result: Result<Completion, String>,
    /// What the device computed for it, prompt and completion, as often as it did.
    pub computed_tokens: u64,
}
