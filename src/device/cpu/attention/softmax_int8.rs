//! The online softmax of INT8 attention: turns a row's scores in a span into weight bytes, which
//! the kernel multiplies with the values.

#![expect(unsafe_code, reason = "kernels take addresses and need instructions")]

use super::float::SoftmaxState;
use super::int8_products::{ROWS_MAX, SPAN_BLOCKS};
use crate::device::cpu::isa::{Isa, multiversion};
use crate::device::cpu::math::{EXP2_TAYLOR, ROUND, exp2, max16, soft_cap};
use crate::device::cpu::{BLOCK_TOKENS, SPAN_TOKENS};

/// The softmax step of one span for one row.
pub(crate) struct SpanSoftmax<'a> {
    pub blocks: usize,
    /// Positions of the span that the row sees.
    pub visible: std::ops::Range<usize>,
    /// Factor from `score * key scale` to the base-2 logarithm of a weight.
    pub scale: f32,
    pub soft_cap: Option<f32>,
    pub key_scales: [&'a [f32; BLOCK_TOKENS]; SPAN_BLOCKS],
    pub value_scales: [&'a [f32; BLOCK_TOKENS]; SPAN_BLOCKS],
    /// Factor from `weight * value scale` to a weight byte.
    pub inverse_value_scale: f32,
}

/// Results of one span's softmax step, besides the weight bytes.
#[derive(Clone, Copy, Default)]
pub(crate) struct SoftmaxPartial {
    /// Largest `score * key scale`.
    pub max: f32,
    /// Sums of weights relative to `max`, by slot (position within the block).
    pub weight_sums: [f32; BLOCK_TOKENS],
}

/// # Safety
/// The processor has the instructions that `isa` names.
pub(crate) unsafe fn softmax_step_on(
    isa: Isa,
    op: &SpanSoftmax<'_>,
    scores: &[i32; SPAN_TOKENS],
    weights: &mut [u8; SPAN_TOKENS],
    out: &mut SoftmaxPartial,
) {
    if let Some(cap) = op.soft_cap {
        return capped_on(isa, cap, op, scores, weights, out);
    }
    match isa {
        // SAFETY: as the caller guarantees.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Avx512Vnni | Isa::Avx512Bf16 | Isa::Amx => unsafe {
            x86::softmax_step(op, scores, weights, out)
        },
        _ => portable_on(isa, op, scores, weights, out),
    }
}

#[inline(always)]
fn portable(
    op: &SpanSoftmax<'_>,
    scores: &[i32; SPAN_TOKENS],
    weights: &mut [u8; SPAN_TOKENS],
    out: &mut SoftmaxPartial,
) {
    softmax_step(|score| score, op, scores, weights, out);
}

/// As [`portable`], with a soft cap. `op.scale` includes the factor log2(e), so the cap is
/// multiplied by this factor, too.
#[inline(always)]
fn capped(
    cap: f32,
    op: &SpanSoftmax<'_>,
    scores: &[i32; SPAN_TOKENS],
    weights: &mut [u8; SPAN_TOKENS],
    out: &mut SoftmaxPartial,
) {
    let cap = cap * std::f32::consts::LOG2_E;
    // If all values of a query are (nearly) zero, all its scores become 0 and its softmax is
    // uniform.
    let inverse = if op.scale > f32::MIN_POSITIVE {
        1.0 / op.scale
    } else {
        0.0
    };
    softmax_step(
        |score| soft_cap(score * op.scale, cap) * inverse,
        op,
        scores,
        weights,
        out,
    );
}

/// The softmax step. `cap_score` is applied to each `score * key scale` first.
#[inline(always)]
fn softmax_step(
    cap_score: impl Fn(f32) -> f32,
    op: &SpanSoftmax<'_>,
    scores: &[i32; SPAN_TOKENS],
    weights: &mut [u8; SPAN_TOKENS],
    out: &mut SoftmaxPartial,
) {
    let (scores, _) = scores.as_chunks::<BLOCK_TOKENS>();
    let (weights, _) = weights.as_chunks_mut::<BLOCK_TOKENS>();
    let visible = |b: usize, j: usize| op.visible.contains(&(b * BLOCK_TOKENS + j));
    let mut scaled = [[0.0f32; BLOCK_TOKENS]; SPAN_BLOCKS];
    let mut largest = [f32::NEG_INFINITY; BLOCK_TOKENS];
    for b in 0..op.blocks {
        for j in 0..BLOCK_TOKENS {
            let score = cap_score(scores[b][j] as f32 * op.key_scales[b][j]);
            let score = if visible(b, j) { score } else { f32::NEG_INFINITY };
            largest[j] = if score > largest[j] { score } else { largest[j] };
            scaled[b][j] = score;
        }
    }
    let max = max16(largest);
    let scaled_max = max * op.scale;
    let mut weight_sums = [0.0f32; BLOCK_TOKENS];
    for b in 0..op.blocks {
        for j in 0..BLOCK_TOKENS {
            let weight = exp2(scaled[b][j].mul_add(op.scale, -scaled_max));
            let byte = (weight * op.value_scales[b][j])
                .mul_add(op.inverse_value_scale, ROUND)
                .to_bits() as u8;
            // Positions that were never written may have any content.
            weight_sums[j] += if visible(b, j) { weight } else { 0.0 };
            weights[b][j] = if visible(b, j) { byte } else { 0 };
        }
    }
    *out = SoftmaxPartial { max, weight_sums };
}

multiversion! {
    fn portable_on(
        op: &SpanSoftmax<'_>,
        scores: &[i32; SPAN_TOKENS],
        weights: &mut [u8; SPAN_TOKENS],
        out: &mut SoftmaxPartial,
    ) = portable;
}

multiversion! {
    fn capped_on(
        cap: f32,
        op: &SpanSoftmax<'_>,
        scores: &[i32; SPAN_TOKENS],
        weights: &mut [u8; SPAN_TOKENS],
        out: &mut SoftmaxPartial,
    ) = capped;
}

/// Parameters of [`merge_on`]: softmax steps to merge into the running states of their rows.
pub(crate) struct SoftmaxMerge<'a> {
    pub partials: &'a [SoftmaxPartial],
    /// `[rows]`: the largest scale of the values that a row sees in the span.
    pub value_scale_max: &'a [f32],
    /// As [`SpanSoftmax::scale`].
    pub scales: &'a [f32],
}

#[inline(always)]
fn merge(
    op: &SoftmaxMerge<'_>,
    states: &mut [SoftmaxState],
    weight_sums: &mut [[f32; BLOCK_TOKENS]],
    rescales: &mut [f32; ROWS_MAX],
    scales: &mut [f32; ROWS_MAX],
) {
    for (r, new) in op.partials.iter().enumerate() {
        let (state, scale) = (&mut states[r], op.scales[r]);
        let max = if new.max > state.max { new.max } else { state.max };
        let old_factor = exp2((state.max - max) * scale);
        let new_factor = exp2((new.max - max) * scale);
        state.max = max;
        for (total, new) in weight_sums[r].iter_mut().zip(new.weight_sums) {
            *total = new.mul_add(new_factor, *total * old_factor);
        }
        (rescales[r], scales[r]) = (old_factor, new_factor * (op.value_scale_max[r] / 255.0));
    }
}

multiversion! {
    /// Merges the steps into `states` and `weight_sums`. Sets `rescales` to the factors of each
    /// row's earlier accumulators, and `scales` to the factors of the integer sums to be added.
    pub(crate) fn merge_on(
        op: &SoftmaxMerge<'_>,
        states: &mut [SoftmaxState],
        weight_sums: &mut [[f32; BLOCK_TOKENS]],
        rescales: &mut [f32; ROWS_MAX],
        scales: &mut [f32; ROWS_MAX],
    ) = merge;
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    //! The softmax step in AVX-512 intrinsics.

    use std::arch::x86_64::*;

    use super::{BLOCK_TOKENS, EXP2_TAYLOR, ROUND, SPAN_BLOCKS, SPAN_TOKENS, SoftmaxPartial, SpanSoftmax};

    /// The 16 lanes of a block that are visible.
    fn mask(op: &SpanSoftmax<'_>, block: usize) -> __mmask16 {
        let below = |end: usize| ((1u32 << end.saturating_sub(block * BLOCK_TOKENS).min(BLOCK_TOKENS)) - 1) as u16;
        below(op.visible.end) & !below(op.visible.start)
    }

    /// As [`super::portable`], operation by operation.
    ///
    /// # Safety
    /// The processor has AVX-512.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    pub(crate) unsafe fn softmax_step(
        op: &SpanSoftmax<'_>,
        scores: &[i32; SPAN_TOKENS],
        weights: &mut [u8; SPAN_TOKENS],
        out: &mut SoftmaxPartial,
    ) {
        let mut scaled = [_mm512_setzero_ps(); SPAN_BLOCKS];
        let none = _mm512_set1_ps(f32::NEG_INFINITY);
        let mut largest = none;
        for b in 0..op.blocks {
            // SAFETY: each block has 16 scores and 16 scales.
            let (score, scale) = unsafe {
                (
                    _mm512_loadu_si512(scores[b * BLOCK_TOKENS..].as_ptr().cast()),
                    _mm512_loadu_ps(op.key_scales[b].as_ptr()),
                )
            };
            let score = _mm512_mul_ps(_mm512_cvtepi32_ps(score), scale);
            scaled[b] = _mm512_mask_mov_ps(none, mask(op, b), score);
            largest = _mm512_max_ps(scaled[b], largest);
        }
        // Halves are folded onto each other, as in `max16`. The maximum is the same in any order.
        let half = _mm256_max_ps(_mm512_extractf32x8_ps::<1>(largest), _mm512_castps512_ps256(largest));
        let quarter = _mm_max_ps(_mm256_extractf128_ps::<1>(half), _mm256_castps256_ps128(half));
        let pair = _mm_max_ps(_mm_movehl_ps(quarter, quarter), quarter);
        let max = _mm_cvtss_f32(_mm_max_ss(_mm_movehdup_ps(pair), pair));
        let (row_scale, minus_scaled_max) = (_mm512_set1_ps(op.scale), _mm512_set1_ps(-(max * op.scale)));
        let (round, inverse) = (_mm512_set1_ps(ROUND), _mm512_set1_ps(op.inverse_value_scale));
        let mut weight_sums = _mm512_setzero_ps();
        for b in 0..op.blocks {
            let exponent = _mm512_fmadd_ps(scaled[b], row_scale, minus_scaled_max);
            let clamped = _mm512_max_ps(_mm512_set1_ps(-125.0), exponent);
            let shifted = _mm512_add_ps(clamped, round);
            let r = _mm512_sub_ps(clamped, _mm512_sub_ps(shifted, round));
            let mut p = _mm512_set1_ps(EXP2_TAYLOR[0]);
            for c in &EXP2_TAYLOR[1..] {
                p = _mm512_fmadd_ps(r, p, _mm512_set1_ps(*c));
            }
            let power = _mm512_slli_epi32::<23>(_mm512_castps_si512(shifted));
            let weight = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), power));
            let visible = mask(op, b);
            weight_sums = _mm512_mask_add_ps(weight_sums, visible, weight_sums, weight);
            // SAFETY: each block has 16 scales and 16 weights.
            unsafe {
                let value_scale = _mm512_loadu_ps(op.value_scales[b].as_ptr());
                let byte = _mm512_fmadd_ps(_mm512_mul_ps(weight, value_scale), inverse, round);
                let byte = _mm512_maskz_cvtepi32_epi8(visible, _mm512_castps_si512(byte));
                _mm_storeu_si128(weights[b * BLOCK_TOKENS..].as_mut_ptr().cast(), byte);
            }
        }
        out.max = max;
        // SAFETY: `weight_sums` has 16 elements.
        unsafe { _mm512_storeu_ps(out.weight_sums.as_mut_ptr(), weight_sums) };
    }
}
