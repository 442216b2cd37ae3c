//! Vectorised passes over one row of logits, for sampling on the host. They use the processor's
//! best instruction set.
//!
//! Each pass gives the same bits on every instruction set.

use std::sync::LazyLock;

use super::isa::{Isa, multiversion};
use super::math::{exp, sum16};

/// Number of weights per partial sum. Partial sums are computed in F32 and added up in F64.
pub const SUM_CHUNK: usize = 1024;
/// Thresholds of [`TokenWeights::threshold_sums`], descending.
pub const WEIGHT_THRESHOLDS: [f32; 3] = [1.0 / 64.0, 1.0 / 1024.0, 1.0 / 65536.0];

static ISA: LazyLock<Isa> = LazyLock::new(Isa::detect);

/// The largest logit (minus infinity without logits), or `None` if a logit is NaN or plus infinity.
pub fn max_logit(logits: &[f32]) -> Option<f32> {
    let (mut max, mut is_invalid) = (f32::NEG_INFINITY, false);
    max_logit_on(*ISA, logits, &mut max, &mut is_invalid);
    (!is_invalid).then_some(max)
}

/// Copies the logits to `row`, with minus infinity for tokens that `mask` excludes. The mask has
/// one bit per token, 32 per word; tokens beyond its end are excluded. Returns the largest logit of
/// the allowed tokens (minus infinity without allowed tokens), or `None` if any logit, even of an
/// excluded token, is NaN or plus infinity.
pub fn apply_mask(logits: &[f32], mask: &[u32], row: &mut Vec<f32>) -> Option<f32> {
    row.resize(logits.len(), 0.0);
    let (mut max, mut is_invalid) = (f32::NEG_INFINITY, false);
    apply_mask_on(*ISA, logits, mask, row, &mut max, &mut is_invalid);
    (!is_invalid).then_some(max)
}

/// Weights of all tokens, relative to the most probable token, whose weight is 1.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TokenWeights {
    pub values: Vec<f32>,
    /// Sum of each chunk of [`SUM_CHUNK`] weights.
    pub chunk_sums: Vec<f32>,
    /// For each of [`WEIGHT_THRESHOLDS`], the approximate sum of the weights that are not below it.
    pub threshold_sums: [f32; WEIGHT_THRESHOLDS.len()],
}

/// Computes the weights `e^((logits[i] - max) * inverse_temperature)` and their sums.
///
/// `max` must be finite and no smaller than the largest logit.
pub fn compute_weights(logits: &[f32], max: f32, inverse_temperature: f32, weights: &mut TokenWeights) {
    weights.values.resize(logits.len(), 0.0);
    weights.chunk_sums.resize(logits.len().div_ceil(SUM_CHUNK), 0.0);
    compute_weights_on(*ISA, logits, max, inverse_temperature, weights);
}

/// Writes the indices of the weights that are at least `weight_min` to `indices`, ascending.
pub fn indices_at_least(weights: &[f32], weight_min: f32, indices: &mut Vec<u32>) {
    indices.clear();
    indices_at_least_on(*ISA, weights, weight_min, indices);
}

#[inline(always)]
fn max_logit_body(logits: &[f32], max: &mut f32, is_invalid: &mut bool) {
    let mut lanes = [f32::NEG_INFINITY; 16];
    let mut invalid = [0u32; 16];
    let (chunks, rest) = logits.as_chunks::<16>();
    for chunk in chunks {
        for i in 0..16 {
            lanes[i] = if chunk[i] > lanes[i] { chunk[i] } else { lanes[i] };
            invalid[i] |= u32::from(chunk[i].is_nan()) | u32::from(chunk[i] == f32::INFINITY);
        }
    }
    for (i, l) in rest.iter().enumerate() {
        lanes[i] = if *l > lanes[i] { *l } else { lanes[i] };
        invalid[i] |= u32::from(l.is_nan()) | u32::from(*l == f32::INFINITY);
    }
    *max = lanes.into_iter().fold(f32::NEG_INFINITY, f32::max);
    *is_invalid = invalid.into_iter().any(|b| b != 0);
}

multiversion! {
    fn max_logit_on(logits: &[f32], max: &mut f32, is_invalid: &mut bool) = max_logit_body;
}

#[inline(always)]
fn apply_mask_body(logits: &[f32], mask: &[u32], row: &mut [f32], max: &mut f32, is_invalid: &mut bool) {
    let mut lanes = [f32::NEG_INFINITY; 16];
    let mut invalid = [0u32; 16];
    // The mask bits of 16 tokens, which are half a word.
    let half_word = |chunk: usize| {
        mask.get(chunk / 2)
            .map_or(0, |word| word >> (16 * (chunk % 2)) & 0xFFFF)
    };
    let (from, from_rest) = logits.as_chunks::<16>();
    let (to, to_rest) = row.as_chunks_mut::<16>();
    for (chunk, (from, to)) in from.iter().zip(to).enumerate() {
        let bits = half_word(chunk);
        for i in 0..16 {
            let kept = if bits >> i & 1 == 1 { from[i] } else { f32::NEG_INFINITY };
            to[i] = kept;
            lanes[i] = if kept > lanes[i] { kept } else { lanes[i] };
            invalid[i] |= u32::from(from[i].is_nan()) | u32::from(from[i] == f32::INFINITY);
        }
    }
    let bits = half_word(from.len());
    for (i, (from, to)) in from_rest.iter().zip(to_rest).enumerate() {
        *to = if bits >> i & 1 == 1 { *from } else { f32::NEG_INFINITY };
        lanes[i] = if *to > lanes[i] { *to } else { lanes[i] };
        invalid[i] |= u32::from(from.is_nan()) | u32::from(*from == f32::INFINITY);
    }
    *max = lanes.into_iter().fold(f32::NEG_INFINITY, f32::max);
    *is_invalid = invalid.into_iter().any(|b| b != 0);
}

multiversion! {
    fn apply_mask_on(
        logits: &[f32],
        mask: &[u32],
        row: &mut [f32],
        max: &mut f32,
        is_invalid: &mut bool,
    ) = apply_mask_body;
}

#[inline(always)]
fn compute_weights_body(logits: &[f32], max: f32, inverse_temperature: f32, weights: &mut TokenWeights) {
    let chunks = logits.chunks(SUM_CHUNK).zip(weights.values.chunks_mut(SUM_CHUNK));
    let mut threshold_sums = [[0.0f32; 16]; WEIGHT_THRESHOLDS.len()];
    for ((logits, chunk_weights), sum) in chunks.zip(&mut weights.chunk_sums) {
        for (w, l) in chunk_weights.iter_mut().zip(logits) {
            *w = exp((l - max) * inverse_temperature);
        }
        let mut lanes = [0.0f32; 16];
        let (whole, rest) = chunk_weights.as_chunks::<16>();
        for chunk in whole {
            for i in 0..16 {
                lanes[i] += chunk[i];
                for (sums, threshold) in threshold_sums.iter_mut().zip(WEIGHT_THRESHOLDS) {
                    sums[i] += if chunk[i] >= threshold { chunk[i] } else { 0.0 };
                }
            }
        }
        for (i, w) in rest.iter().enumerate() {
            lanes[i] += w;
            for (sums, threshold) in threshold_sums.iter_mut().zip(WEIGHT_THRESHOLDS) {
                sums[i] += if *w >= threshold { *w } else { 0.0 };
            }
        }
        *sum = sum16(lanes);
    }
    weights.threshold_sums = threshold_sums.map(sum16);
}

multiversion! {
    fn compute_weights_on(
        logits: &[f32],
        max: f32,
        inverse_temperature: f32,
        weights: &mut TokenWeights,
    ) = compute_weights_body;
}

#[inline(always)]
fn indices_at_least_body(weights: &[f32], weight_min: f32, indices: &mut Vec<u32>) {
    for (chunk_index, chunk) in weights.chunks(64).enumerate() {
        let mut any = 0u32;
        for w in chunk {
            any |= u32::from(*w >= weight_min);
        }
        if any != 0 {
            for (i, w) in chunk.iter().enumerate() {
                if *w >= weight_min {
                    indices.push((chunk_index * 64 + i) as u32);
                }
            }
        }
    }
}

multiversion! {
    fn indices_at_least_on(weights: &[f32], weight_min: f32, indices: &mut Vec<u32>) = indices_at_least_body;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::testing::numbers;

    #[test]
    fn passes_match_scalar_code_and_are_bit_identical_on_all_sets() {
        for n in [1, 15, 16, 17, 1023, 1024, 1025, 5000] {
            let logits: Vec<f32> = numbers(n as u64, n).into_iter().map(|x| x * 20.0).collect();
            let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let mut first: Option<TokenWeights> = None;
            for isa in Isa::available() {
                let (mut found, mut is_invalid) = (0.0, true);
                max_logit_on(isa, &logits, &mut found, &mut is_invalid);
                assert_eq!((found, is_invalid), (max, false));
                let mut weights = TokenWeights {
                    values: vec![0.0; n],
                    chunk_sums: vec![0.0; n.div_ceil(SUM_CHUNK)],
                    threshold_sums: [0.0; WEIGHT_THRESHOLDS.len()],
                };
                compute_weights_on(isa, &logits, max, 1.25, &mut weights);
                for (w, l) in weights.values.iter().zip(&logits) {
                    let want = (f64::from(l - max) * 1.25).exp();
                    assert!(
                        (f64::from(*w) - want).abs() <= 4e-6 * want + 1e-37,
                        "{isa:?}: {w} not {want}"
                    );
                }
                let total_from = |weight_min: f32| -> f64 {
                    let from = weights.values.iter().filter(|w| **w >= weight_min);
                    from.map(|w| f64::from(*w)).sum()
                };
                let total = total_from(0.0);
                let summed: f64 = weights.chunk_sums.iter().map(|s| f64::from(*s)).sum();
                assert!((summed - total).abs() <= 1e-5 * total);
                for (over, step) in weights.threshold_sums.iter().zip(WEIGHT_THRESHOLDS) {
                    assert!((f64::from(*over) - total_from(step)).abs() <= 1e-5 * total);
                }
                let mut indices = Vec::new();
                indices_at_least_on(isa, &weights.values, 0.01, &mut indices);
                let plain: Vec<u32> = (0..n as u32).filter(|i| weights.values[*i as usize] >= 0.01).collect();
                assert_eq!(indices, plain);
                assert_eq!(first.get_or_insert_with(|| weights.clone()), &weights, "{isa:?}");
            }
        }
    }

    #[test]
    fn a_mask_keeps_the_tokens_with_a_set_bit() {
        for n in [1usize, 15, 16, 31, 33, 64, 100, 1000] {
            let logits = numbers(n as u64, n);
            for words in [0, 1, n / 32, n.div_ceil(32) + 1] {
                let mask: Vec<u32> = (0..words as u32)
                    .map(|w| w.wrapping_mul(0x9E37_79B9) ^ 0x5555_0FF0)
                    .collect();
                let has = |i: usize| mask.get(i / 32).is_some_and(|word| word >> (i % 32) & 1 == 1);
                let plain: Vec<f32> = (0..n)
                    .map(|i| if has(i) { logits[i] } else { f32::NEG_INFINITY })
                    .collect();
                for isa in Isa::available() {
                    let (mut row, mut max, mut is_invalid) = (vec![9.0; n], 0.0, true);
                    apply_mask_on(isa, &logits, &mask, &mut row, &mut max, &mut is_invalid);
                    assert_eq!((&row, is_invalid), (&plain, false), "{isa:?}");
                    assert_eq!(max, plain.iter().copied().fold(f32::NEG_INFINITY, f32::max));
                }
            }
        }
        let mut row = Vec::new();
        assert_eq!(
            apply_mask(&[1.0, f32::NAN], &[1], &mut row),
            None,
            "seen though it is masked"
        );
    }

    #[test]
    fn values_that_are_not_finite_are_found_at_any_index() {
        for bad in [f32::NAN, f32::INFINITY] {
            for at in [0, 15, 16, 31, 34] {
                let mut logits = numbers(3, 35);
                logits[at] = bad;
                assert_eq!(max_logit(&logits), None);
            }
        }
        assert_eq!(max_logit(&[f32::NEG_INFINITY; 20]), Some(f32::NEG_INFINITY));
        assert_eq!(max_logit(&[f32::NEG_INFINITY, 2.0]), Some(2.0));
        assert_eq!(max_logit(&[]), Some(f32::NEG_INFINITY));
    }
}
