//! Passes over one row of logits that sampling makes on the host, with the processor's best instructions.
//!
//! Each gives the same bits on every instruction set.

use std::sync::LazyLock;

use super::isa::{Isa, multiversion};
use super::math::{exp, sum16};

/// Weights that are summed in F32 before the sum goes on in F64.
pub const SUM_CHUNK: usize = 1024;

static ISA: LazyLock<Isa> = LazyLock::new(Isa::detect);

/// The largest logit, minus infinity where there is none; `None`: some are NaN or infinite.
pub fn largest(logits: &[f32]) -> Option<f32> {
    let (mut max, mut broken) = (f32::NEG_INFINITY, false);
    largest_on(*ISA, logits, &mut max, &mut broken);
    (!broken).then_some(max)
}

/// `weights[i] = e^((logits[i] - max) * inverse_temperature)`; their sums by [`SUM_CHUNK`] go to `sums`.
///
/// No logit is larger than `max`, which is finite.
pub fn weigh(logits: &[f32], max: f32, inverse_temperature: f32, weights: &mut Vec<f32>, sums: &mut Vec<f32>) {
    weights.resize(logits.len(), 0.0);
    sums.resize(logits.len().div_ceil(SUM_CHUNK), 0.0);
    weigh_on(*ISA, logits, max, inverse_temperature, weights, sums);
}

/// Indices of the weights that are not below `least`, ascending, to `indices`.
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
fn weigh_body(logits: &[f32], max: f32, inverse_temperature: f32, weights: &mut [f32], sums: &mut [f32]) {
    let chunks = logits.chunks(SUM_CHUNK).zip(weights.chunks_mut(SUM_CHUNK));
    for ((logits, weights), sum) in chunks.zip(sums) {
        for (w, l) in weights.iter_mut().zip(logits) {
            *w = exp((l - max) * inverse_temperature);
        }
        let mut lanes = [0.0f32; 16];
        let (whole, rest) = weights.as_chunks::<16>();
        for chunk in whole {
            for i in 0..16 {
                lanes[i] += chunk[i];
            }
        }
        for (lane, w) in lanes.iter_mut().zip(rest) {
            *lane += w;
        }
        *sum = sum16(lanes);
    }
}

multiversion! {
    fn weigh_on(logits: &[f32], max: f32, inverse_temperature: f32, weights: &mut [f32], sums: &mut [f32]) = weigh_body;
}

#[inline(always)]
fn not_below_body(weights: &[f32], least: f32, indices: &mut Vec<u32>) {
    for (at, chunk) in weights.chunks(64).enumerate() {
        let mut any = 0u32;
        for w in chunk {
            any |= u32::from(*w >= least);
        }
        if any != 0 {
            let found = chunk.iter().enumerate().filter(|(_, w)| **w >= least);
            indices.extend(found.map(|(i, _)| (at * 64 + i) as u32));
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
            let mut first: Option<(Vec<f32>, Vec<f32>)> = None;
            for isa in Isa::available() {
                let (mut found, mut broken) = (0.0, true);
                largest_on(isa, &logits, &mut found, &mut broken);
                assert_eq!((found, broken), (max, false));
                let (mut weights, mut sums) = (vec![0.0; n], vec![0.0; n.div_ceil(SUM_CHUNK)]);
                weigh_on(isa, &logits, max, 1.25, &mut weights, &mut sums);
                for (w, l) in weights.iter().zip(&logits) {
                    let want = (f64::from(l - max) * 1.25).exp();
                    assert!(
                        (f64::from(*w) - want).abs() <= 4e-6 * want + 1e-37,
                        "{isa:?}: {w} not {want}"
                    );
                }
                let total: f64 = weights.iter().map(|w| f64::from(*w)).sum();
                let summed: f64 = sums.iter().map(|s| f64::from(*s)).sum();
                assert!((summed - total).abs() <= 1e-5 * total);
                let mut indices = Vec::new();
                not_below_on(isa, &weights, 0.01, &mut indices);
                let plain: Vec<u32> = (0..n as u32).filter(|i| weights[*i as usize] >= 0.01).collect();
                assert_eq!(indices, plain);
                let bits = (weights, sums);
                assert_eq!(first.get_or_insert_with(|| bits.clone()), &bits, "{isa:?}");
            }
        }
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
