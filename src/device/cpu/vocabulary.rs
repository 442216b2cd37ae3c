//! Vectorised passes over one row of logits, for sampling on the host. They use the processor's
//! best instruction set.
//!
//! Each pass gives the same bits on every instruction set.

use std::sync::LazyLock;

use super::isa::{Isa, multiversion};
use super::math::{exp, sum16};

/// Number of weights per partial sum. A partial sum is computed in F32; partial sums are added in
/// F64.
pub const SUM_CHUNK: usize = 1024;
/// Thresholds of [`TokenWeights::over`], descending.
pub const STEPS: [f32; 3] = [1.0 / 64.0, 1.0 / 1024.0, 1.0 / 65536.0];

static ISA: LazyLock<Isa> = LazyLock::new(Isa::detect);

/// The largest logit, or minus infinity if there is none. `None` if a logit is NaN or plus
/// infinity.
pub fn largest(logits: &[f32]) -> Option<f32> {
    let (mut max, mut broken) = (f32::NEG_INFINITY, false);
    largest_on(*ISA, logits, &mut max, &mut broken);
    (!broken).then_some(max)
}

/// Copies the logits to `row`, with minus infinity for tokens that `mask` excludes. The mask has
/// one bit per token, 32 per word; tokens beyond its end are excluded. Returns the largest logit of
/// the allowed tokens, or minus infinity if there is none. Returns `None` if any logit, even of an
/// excluded token, is NaN or plus infinity.
pub fn restrict(logits: &[f32], mask: &[u32], row: &mut Vec<f32>) -> Option<f32> {
    row.resize(logits.len(), 0.0);
    let (mut max, mut broken) = (f32::NEG_INFINITY, false);
    restrict_on(*ISA, logits, mask, row, &mut max, &mut broken);
    (!broken).then_some(max)
}

/// Weights of all tokens, relative to the most probable token, whose weight is 1.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TokenWeights {
    pub each: Vec<f32>,
    /// Sum of each chunk of [`SUM_CHUNK`] weights.
    pub sums: Vec<f32>,
    /// For each of [`STEPS`], the approximate sum of the weights that are at least as large.
    pub over: [f32; STEPS.len()],
}

/// `each[i] = e^((logits[i] - max) * inverse_temperature)`, and their sums.
///
/// `max` must be finite and at least the largest logit.
pub fn weigh(logits: &[f32], max: f32, inverse_temperature: f32, weights: &mut TokenWeights) {
    weights.each.resize(logits.len(), 0.0);
    weights.sums.resize(logits.len().div_ceil(SUM_CHUNK), 0.0);
    weigh_on(*ISA, logits, max, inverse_temperature, weights);
}

/// Writes the indices of the weights that are at least `least` to `indices`, ascending.
pub fn not_below(weights: &[f32], least: f32, indices: &mut Vec<u32>) {
    indices.clear();
    not_below_on(*ISA, weights, least, indices);
}

#[inline(always)]
fn largest_body(logits: &[f32], max: &mut f32, broken: &mut bool) {
    let mut lanes = [f32::NEG_INFINITY; 16];
    let mut bad = [0u32; 16];
    let (chunks, rest) = logits.as_chunks::<16>();
    for chunk in chunks {
        for i in 0..16 {
            lanes[i] = if chunk[i] > lanes[i] { chunk[i] } else { lanes[i] };
            bad[i] |= u32::from(chunk[i].is_nan()) | u32::from(chunk[i] == f32::INFINITY);
        }
    }
    for (i, l) in rest.iter().enumerate() {
        lanes[i] = if *l > lanes[i] { *l } else { lanes[i] };
        bad[i] |= u32::from(l.is_nan()) | u32::from(*l == f32::INFINITY);
    }
    *max = lanes.into_iter().fold(f32::NEG_INFINITY, f32::max);
    *broken = bad.into_iter().any(|b| b != 0);
}

multiversion! {
    fn largest_on(logits: &[f32], max: &mut f32, broken: &mut bool) = largest_body;
}

#[inline(always)]
fn restrict_body(logits: &[f32], mask: &[u32], row: &mut [f32], max: &mut f32, broken: &mut bool) {
    let mut lanes = [f32::NEG_INFINITY; 16];
    let mut bad = [0u32; 16];
    // Half a word of the mask at a time.
    let half = |at: usize| mask.get(at / 2).map_or(0, |word| word >> (16 * (at % 2)) & 0xFFFF);
    let (from, from_rest) = logits.as_chunks::<16>();
    let (to, to_rest) = row.as_chunks_mut::<16>();
    for (at, (from, to)) in from.iter().zip(to).enumerate() {
        let bits = half(at);
        for i in 0..16 {
            let kept = if bits >> i & 1 == 1 { from[i] } else { f32::NEG_INFINITY };
            to[i] = kept;
            lanes[i] = if kept > lanes[i] { kept } else { lanes[i] };
            bad[i] |= u32::from(from[i].is_nan()) | u32::from(from[i] == f32::INFINITY);
        }
    }
    let bits = half(from.len());
    for (i, (from, to)) in from_rest.iter().zip(to_rest).enumerate() {
        *to = if bits >> i & 1 == 1 { *from } else { f32::NEG_INFINITY };
        lanes[i] = if *to > lanes[i] { *to } else { lanes[i] };
        bad[i] |= u32::from(from.is_nan()) | u32::from(*from == f32::INFINITY);
    }
    *max = lanes.into_iter().fold(f32::NEG_INFINITY, f32::max);
    *broken = bad.into_iter().any(|b| b != 0);
}

multiversion! {
    fn restrict_on(logits: &[f32], mask: &[u32], row: &mut [f32], max: &mut f32, broken: &mut bool) = restrict_body;
}

#[inline(always)]
fn weigh_body(logits: &[f32], max: f32, inverse_temperature: f32, weights: &mut TokenWeights) {
    let chunks = logits.chunks(SUM_CHUNK).zip(weights.each.chunks_mut(SUM_CHUNK));
    let mut over = [[0.0f32; 16]; STEPS.len()];
    for ((logits, each), sum) in chunks.zip(&mut weights.sums) {
        for (w, l) in each.iter_mut().zip(logits) {
            *w = exp((l - max) * inverse_temperature);
        }
        let mut lanes = [0.0f32; 16];
        let (whole, rest) = each.as_chunks::<16>();
        for chunk in whole {
            for i in 0..16 {
                lanes[i] += chunk[i];
                for (over, step) in over.iter_mut().zip(STEPS) {
                    over[i] += if chunk[i] >= step { chunk[i] } else { 0.0 };
                }
            }
        }
        for (i, w) in rest.iter().enumerate() {
            lanes[i] += w;
            for (over, step) in over.iter_mut().zip(STEPS) {
                over[i] += if *w >= step { *w } else { 0.0 };
            }
        }
        *sum = sum16(lanes);
    }
    weights.over = over.map(sum16);
}

multiversion! {
    fn weigh_on(logits: &[f32], max: f32, inverse_temperature: f32, weights: &mut TokenWeights) = weigh_body;
}

#[inline(always)]
fn not_below_body(weights: &[f32], least: f32, indices: &mut Vec<u32>) {
    for (at, chunk) in weights.chunks(64).enumerate() {
        let mut any = 0u32;
        for w in chunk {
            any |= u32::from(*w >= least);
        }
        if any != 0 {
            for (i, w) in chunk.iter().enumerate() {
                if *w >= least {
                    indices.push((at * 64 + i) as u32);
                }
            }
        }
    }
}

multiversion! {
    fn not_below_on(weights: &[f32], least: f32, indices: &mut Vec<u32>) = not_below_body;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::testing::numbers;

    #[test]
    fn passes_match_the_plain_ones_in_the_same_bits_everywhere() {
        for n in [1, 15, 16, 17, 1023, 1024, 1025, 5000] {
            let logits: Vec<f32> = numbers(n as u64, n).into_iter().map(|x| x * 20.0).collect();
            let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let mut first: Option<TokenWeights> = None;
            for isa in Isa::available() {
                let (mut found, mut broken) = (0.0, true);
                largest_on(isa, &logits, &mut found, &mut broken);
                assert_eq!((found, broken), (max, false));
                let mut weights = TokenWeights {
                    each: vec![0.0; n],
                    sums: vec![0.0; n.div_ceil(SUM_CHUNK)],
                    over: [0.0; STEPS.len()],
                };
                weigh_on(isa, &logits, max, 1.25, &mut weights);
                for (w, l) in weights.each.iter().zip(&logits) {
                    let want = (f64::from(l - max) * 1.25).exp();
                    assert!(
                        (f64::from(*w) - want).abs() <= 4e-6 * want + 1e-37,
                        "{isa:?}: {w} not {want}"
                    );
                }
                let total_from = |least: f32| -> f64 {
                    let from = weights.each.iter().filter(|w| **w >= least);
                    from.map(|w| f64::from(*w)).sum()
                };
                let total = total_from(0.0);
                let summed: f64 = weights.sums.iter().map(|s| f64::from(*s)).sum();
                assert!((summed - total).abs() <= 1e-5 * total);
                for (over, step) in weights.over.iter().zip(STEPS) {
                    assert!((f64::from(*over) - total_from(step)).abs() <= 1e-5 * total);
                }
                let mut indices = Vec::new();
                not_below_on(isa, &weights.each, 0.01, &mut indices);
                let plain: Vec<u32> = (0..n as u32).filter(|i| weights.each[*i as usize] >= 0.01).collect();
                assert_eq!(indices, plain);
                assert_eq!(first.get_or_insert_with(|| weights.clone()), &weights, "{isa:?}");
            }
        }
    }

    #[test]
    fn a_mask_leaves_what_it_has_bits_for() {
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
                    let (mut row, mut max, mut broken) = (vec![9.0; n], 0.0, true);
                    restrict_on(isa, &logits, &mask, &mut row, &mut max, &mut broken);
                    assert_eq!((&row, broken), (&plain, false), "{isa:?}");
                    assert_eq!(max, plain.iter().copied().fold(f32::NEG_INFINITY, f32::max));
                }
            }
        }
        let mut row = Vec::new();
        assert_eq!(
            restrict(&[1.0, f32::NAN], &[1], &mut row),
            None,
            "seen though it is masked"
        );
    }

    #[test]
    fn what_is_not_finite_is_seen_wherever_it_stands() {
        for bad in [f32::NAN, f32::INFINITY] {
            for at in [0, 15, 16, 31, 34] {
                let mut logits = numbers(3, 35);
                logits[at] = bad;
                assert_eq!(largest(&logits), None);
            }
        }
        assert_eq!(largest(&[f32::NEG_INFINITY; 20]), Some(f32::NEG_INFINITY));
        assert_eq!(largest(&[f32::NEG_INFINITY, 2.0]), Some(2.0));
        assert_eq!(largest(&[]), Some(f32::NEG_INFINITY));
    }
}
