//! Inputs and results of drawing one token from a row of logits, on any device.
//!
//! In this order:
//!
//! 1. the log probability of every token is taken from the raw distribution: softmax over all ids
//!    that both model and tokenizer know, before any step below;
//! 2. tokens that the shape does not allow are removed;
//! 3. repetition penalty: the logit of each token that occurs in the *prompt or the completion* is
//!    divided by the penalty where positive, and multiplied where negative (once, however often the
//!    token occurs; as transformers does);
//! 4. presence and frequency penalty: for tokens that occur in the *completion*, the presence penalty
//!    is subtracted once, the frequency penalty once per occurrence (as OpenAI and vLLM do);
//! 5. temperature 0: the largest logit wins, among equal logits the lowest id. Otherwise logits are
//!    divided by the temperature;
//! 6. top-k keeps the k largest, among equal logits those with the lowest ids;
//! 7. top-p keeps the smallest set of the most probable tokens whose share of the probability that
//!    top-k left reaches p;
//! 8. min-p keeps tokens at least that fraction as probable as the most probable;
//! 9. a token is drawn in proportion to its probability, in order of ids, with [`Draw::uniform`].
//!
//! A draw depends only on its own row of logits and its own history.
//!
//! See docs/decisions/078-drawing-is-an-operation-of-the-device.md.

use serde::{Deserialize, Serialize};

/// Which tokens may be drawn.
#[derive(Debug, Clone, Copy)]
pub enum Allowed<'a> {
    /// All but these ids, which belong to no token.
    AllBut(&'a [u32]),
    /// One bit per id, 32 to a word; ids beyond its end are not allowed.
    Mask(&'a [u32]),
    /// These ids, without repetition.
    Ids(&'a [u32]),
}

/// Sampling parameters: temperature, filters and penalties.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    /// 0 means greedy: the largest logit wins. Finite, not negative.
    pub temperature: f32,
    /// Keep the k most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set of tokens whose probability reaches this; in (0, 1], 1 keeps all.
    pub top_p: f32,
    /// Keep tokens whose probability is at least this fraction of the highest; in [0, 1], 0 keeps
    /// all.
    pub min_p: f32,
    /// Divides positive logits, and multiplies negative ones, of tokens that occur in prompt or
    /// completion; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted once from the logits of tokens that occur in the completion; 0 is off.
    pub presence_penalty: f32,
    /// Subtracted per occurrence from the logits of tokens that occur in the completion; 0 is off.
    pub frequency_penalty: f32,
}

impl Sampling {
    /// The most probable token, without penalties.
    pub const GREEDY: Sampling = Sampling {
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        repetition_penalty: 1.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
    };

    /// Whether any penalty changes logits.
    pub fn penalises(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    /// The temperature's inverse, clamped to a finite value.
    pub fn inverse_temperature(&self) -> f32 {
        (1.0 / self.temperature).min(f32::MAX)
    }
}

/// Draws in proportion to the model's own probabilities.
impl Default for Sampling {
    fn default() -> Sampling {
        Sampling {
            temperature: 1.0,
            ..Sampling::GREEDY
        }
    }
}

/// How a token is to be drawn from its row of logits.
#[derive(Debug, Clone, Copy)]
pub struct Draw<'a> {
    pub sampling: Sampling,
    pub allowed: Allowed<'a>,
    /// The prompt's ids, ascending, each once; read only for the repetition penalty.
    pub prompt: &'a [u32],
    pub completion: &'a [u32],
    /// In [0, 1).
    pub uniform: f64,
    /// Whether [`Drawn::log_sum`] is requested.
    pub log_sum: bool,
    /// Whether [`Drawn::logits`] are requested.
    pub logits: bool,
}

impl Draw<'static> {
    /// The most probable token, without penalties.
    pub const GREEDY: Self = Draw {
        sampling: Sampling::GREEDY,
        allowed: Allowed::AllBut(&[]),
        prompt: &[],
        completion: &[],
        uniform: 0.0,
        log_sum: false,
        logits: false,
    };
}

/// A token that was drawn.
#[derive(Debug, Clone, PartialEq)]
pub struct Drawn {
    pub token: u32,
    /// The token's raw logit.
    pub logit: f32,
    /// Natural logarithm of the sum of the exponentials of all raw logits if requested, else 0.
    pub log_sum: f64,
    /// Raw logits of [`Allowed::Ids`] if requested; minus infinity for ids that the model does not
    /// have.
    pub logits: Vec<f32>,
}

impl Drawn {
    /// Natural logarithm of the probability, in the raw distribution, of a token with this logit.
    pub fn log_probability_of(&self, logit: f32) -> f32 {
        (f64::from(logit) - self.log_sum) as f32
    }

    /// Natural logarithm of the probability of the drawn token, in the raw distribution.
    pub fn log_probability(&self) -> f32 {
        self.log_probability_of(self.logit)
    }
}

/// Why no token can be drawn. The error fails the row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DrawError {
    #[error("the model's logits are not finite")]
    NotFinite,
    #[error("no token that the shape allows has a probability")]
    NothingAllowed,
}
