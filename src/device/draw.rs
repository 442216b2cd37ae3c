//! Inputs and results of drawing one token from a row of logits, on any device.
//!
//! In this order:
//!
//! 1. the log probability of every token is taken from the raw distribution: softmax over all ids
//!    that both model and tokenizer know, before any step below;
//! 2. tokens that the output constraint does not allow are removed;
//! 3. repetition penalty: the logit of each token that occurs in the *prompt or the completion* is
//!    divided by the penalty if it is positive, and multiplied by the penalty if it is negative
//!    (once, however often the token occurs; as transformers does);
//! 4. presence and frequency penalty: for tokens that occur in the *completion*, the presence
//!    penalty is subtracted once, the frequency penalty once per occurrence (as OpenAI and vLLM
//!    do);
//! 5. at temperature 0, the token with the largest logit is chosen, and the lowest id among equal
//!    logits. At any other temperature, logits are divided by the temperature;
//! 6. top-k keeps the k largest, among equal logits those with the lowest ids;
//! 7. top-p keeps the smallest set of the most probable tokens whose probabilities, renormalised
//!    after top-k, sum to at least p;
//! 8. min-p keeps tokens whose probability is at least min-p times the highest probability;
//! 9. a token is drawn in proportion to its probability: the first token, in order of ids, at which
//!    the cumulative probability exceeds [`Draw::uniform`].
//!
//! A draw depends only on its own row of logits and its own history.
//!
//! See docs/decisions/078-drawing-is-an-operation-of-the-device.md.

use serde::{Deserialize, Serialize};

/// Which tokens may be drawn.
#[derive(Debug, Clone, Copy)]
pub enum Allowed<'a> {
    /// All ids except these, which belong to no token.
    AllBut(&'a [u32]),
    /// One bit per id, 32 per word; ids beyond the end of the mask are not allowed.
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
    /// completion; 1 has no effect.
    pub repetition_penalty: f32,
    /// Subtracted once from the logits of tokens that occur in the completion; 0 has no effect.
    pub presence_penalty: f32,
    /// Subtracted per occurrence from the logits of tokens that occur in the completion; 0 has no
    /// effect.
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

/// Samples from the model's own distribution: temperature 1, without filters or penalties.
impl Default for Sampling {
    fn default() -> Sampling {
        Sampling {
            temperature: 1.0,
            ..Sampling::GREEDY
        }
    }
}

/// Parameters of drawing one token from a row of logits.
#[derive(Debug, Clone, Copy)]
pub struct Draw<'a> {
    pub sampling: Sampling,
    pub allowed: Allowed<'a>,
    /// The prompt's ids, ascending, each once; read only for the repetition penalty.
    pub prompt: &'a [u32],
    pub completion: &'a [u32],
    /// Uniform random number in [0, 1).
    pub uniform: f64,
    /// Whether [`DrawnToken::log_sum_exp`] is requested.
    pub wants_log_sum_exp: bool,
    /// Whether [`DrawnToken::logits`] are requested.
    pub wants_logits: bool,
}

impl Draw<'static> {
    /// The most probable token, without penalties.
    pub const GREEDY: Self = Draw {
        sampling: Sampling::GREEDY,
        allowed: Allowed::AllBut(&[]),
        prompt: &[],
        completion: &[],
        uniform: 0.0,
        wants_log_sum_exp: false,
        wants_logits: false,
    };
}

/// A token that was drawn.
#[derive(Debug, Clone, PartialEq)]
pub struct DrawnToken {
    pub token: u32,
    /// The token's raw logit.
    pub logit: f32,
    /// Natural logarithm of the sum of the exponentials of all raw logits if requested, else 0.
    pub log_sum_exp: f64,
    /// Raw logits of [`Allowed::Ids`] if requested; minus infinity for ids that the model does not
    /// have.
    pub logits: Vec<f32>,
}

impl DrawnToken {
    /// Natural logarithm of the probability, in the raw distribution, of a token with this logit.
    pub fn log_probability_of(&self, logit: f32) -> f32 {
        (f64::from(logit) - self.log_sum_exp) as f32
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
    #[error("no token that the output constraint allows has a nonzero probability")]
    NothingAllowed,
}
