//! How far a quantized model is from the one that it was made of.

use crate::device::batch::StepBatch;
use crate::device::cpu::BLOCK_TOKENS;
use crate::engine::{Forward, ForwardError};
use crate::model::channels::cut;
use crate::model::transformer::Transformer;

/// Prompts that are compared, tokens of each, and places of each.
const PROMPTS_MAX: usize = 64;
const TOKENS_MAX: usize = 2048;
const PLACES: usize = 8;

/// What a quantized model predicts, compared with the model that it was made of.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Distance {
    /// Places of prompts whose next token was predicted.
    pub places: usize,
    /// Mean KL divergence of the quantized model's predictions, in nats.
    pub kl: f64,
    /// Share of places with the same most likely token.
    pub same_top: f64,
}

/// A model's logits at some places of the prompts.
///
/// # Errors
/// The prompts do not fit the model.
pub fn logits(model: &mut Transformer, prompts: &[Vec<u32>]) -> Result<Vec<Vec<f32>>, ForwardError> {
    let tables = model.kv_tables().len();
    let vocabulary = model.vocab_size();
    let mut found = Vec::new();
    for prompt in prompts.iter().take(PROMPTS_MAX) {
        let prompt = cut(model, &prompt[..prompt.len().min(TOKENS_MAX)]);
        let mut batch = StepBatch::default();
        let blocks = 0..prompt.len().div_ceil(BLOCK_TOKENS) as u32;
        batch.push(prompt.iter().copied(), prompt.len() as u32, blocks);
        let places = PLACES.min(prompt.len());
        batch.logits_at = (1..=places)
            .map(|place| (place * prompt.len() / places) as u32 - 1)
            .collect();
        let rows = model.forward(&batch.with_tables(tables))?;
        found.extend(rows.chunks_exact(vocabulary).map(<[f32]>::to_vec));
    }
    Ok(found)
}

/// The distance of predictions from others at the same places.
pub fn distance(reference: &[Vec<f32>], found: &[Vec<f32>]) -> Distance {
    let places = reference.len();
    let (mut kl, mut same) = (0.0, 0);
    for (reference, found) in reference.iter().zip(found) {
        let [p, q] = [reference, found].map(|logits| log_probabilities(logits));
        kl += p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>();
        same += usize::from(top(reference) == top(found));
    }
    let mean = |sum: f64| if places == 0 { 0.0 } else { sum / places as f64 };
    Distance {
        places,
        kl: mean(kl),
        same_top: mean(same as f64),
    }
}

fn log_probabilities(logits: &[f32]) -> Vec<f64> {
    let largest = logits.iter().fold(f32::NEG_INFINITY, |largest, x| largest.max(*x));
    let shifted = logits.iter().map(|x| f64::from(x - largest));
    let sum = shifted.clone().map(f64::exp).sum::<f64>().ln();
    shifted.map(|x| x - sum).collect()
}

fn top(logits: &[f32]) -> Option<usize> {
    let logits = logits.iter().enumerate();
    logits.max_by(|a, b| a.1.total_cmp(b.1)).map(|(index, _)| index)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_are_those_of_the_definition() {
        let reference = vec![vec![0.0, 0.0], vec![3.0, 1.0]];
        assert_eq!(
            distance(&reference, &reference),
            Distance {
                places: 2,
                kl: 0.0,
                same_top: 1.0
            }
        );
        // One half and one half, against a quarter and three quarters.
        let found = distance(&reference[..1], &[vec![0.0, 3f32.ln()]]);
        let wanted = 0.5 * (0.5f64 / 0.25).ln() + 0.5 * (0.5f64 / 0.75).ln();
        assert!((found.kl - wanted).abs() < 1e-7, "{found:?}");
        assert_eq!(distance(&reference[1..], &[vec![1.0, 2.0]]).same_top, 0.0);
    }
}
