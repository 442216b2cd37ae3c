//! How completions are to be generated: checked values, shared by all rows of a job (or one row of a batch file).

use std::sync::Arc;

use crate::engine::forbidden::Forbidden;
use crate::engine::thinking::Thinking;

/// Checked generation parameters. Built at the door (`job/`), never checked again.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerationParams {
    /// Most tokens to generate per sample, thought and answer together; at least 1.
    pub max_tokens: u32,
    /// 0 means greedy; finite, not negative.
    pub temperature: f32,
    /// Keep the k most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set of tokens whose probability reaches this; in (0, 1], 1 keeps all.
    pub top_p: f32,
    /// Keep tokens at least this fraction as likely as the likeliest; in [0, 1], 0 keeps all.
    pub min_p: f32,
    /// Divides (multiplies, where negative) the logits of tokens seen in prompt or completion; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted once from the logits of tokens that the completion holds; 0 is off.
    pub presence_penalty: f32,
    /// Subtracted per occurrence from the logits of tokens that the completion holds; 0 is off.
    pub frequency_penalty: f32,
    /// Key of the random stream; the job's seed, or derived from the job id when the job names none.
    pub seed: u64,
    /// Texts that end a completion; the text before them is kept.
    pub stop: Vec<String>,
    /// Token ids that end a completion, besides the model's own end-of-sequence ids.
    pub stop_token_ids: Vec<u32>,
    /// Go on at the model's end-of-sequence ids, up to `max_tokens`.
    pub ignore_eos: bool,
    /// Tokens that are never drawn, or not yet.
    pub forbidden: Forbidden,
    /// Return the log probability of each chosen token (of the raw distribution: before penalties and filters).
    pub logprobs: bool,
    /// Samples a row, at least 1.
    pub samples: u32,
    /// Compute it so that no bit depends on what else is in the batch, where that costs time.
    pub deterministic: bool,
    /// What an answer may look like.
    pub shape: OutputConstraint,
    /// How the model thinks; `None`: it answers at once.
    pub thinking: Option<Arc<Thinking>>,
}

/// What a completion may look like.
#[derive(Debug, Clone, PartialEq)]
pub enum OutputConstraint {
    Free,
    /// One of these texts. With `probabilities`, the probability of each is returned as well.
    Choice {
        choices: Vec<String>,
        probabilities: bool,
    },
    /// JSON that fits this JSON Schema.
    JsonSchema(serde_json::Value),
    /// Text that fits this regular expression (Rust `regex` syntax), whole.
    Regex(String),
}

impl Default for GenerationParams {
    fn default() -> Self {
        GenerationParams {
            max_tokens: 256,
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: 0,
            stop: Vec::new(),
            stop_token_ids: Vec::new(),
            ignore_eos: false,
            forbidden: Forbidden::default(),
            logprobs: false,
            samples: 1,
            deterministic: false,
            shape: OutputConstraint::Free,
            thinking: None,
        }
    }
}
