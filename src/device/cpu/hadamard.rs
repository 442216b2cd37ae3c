//! Turns heads by a Hadamard transform, so that no number of a head is much larger than the others.
//!
//! The transform is orthogonal: products of two turned heads are those of the heads, and a sum of
//! turned values, turned once more, is the sum of the values. Four bits lose least where a head's
//! numbers are of one size (Ashkboos et al. 2024, QuaRot).
//!
//! A head is turned in parts of the largest power of two that divides its size.
//!
//! See docs/decisions/119-four-bits-of-keys-and-values.md.

use super::isa::multiversion;
use super::{Buffer, ExecContext};
use crate::device::KvPlace;

/// Numbers whose last sums are computed together.
const LANES: usize = 16;

/// Replaces `low` by the sums with `high`, and `high` by the differences.
#[inline(always)]
fn add_and_subtract(low: &mut [f32], high: &mut [f32]) {
    for (a, b) in low.iter_mut().zip(high) {
        (*a, *b) = (*a + *b, *a - *b);
    }
}

/// One stage of neighbours `DISTANCE` apart.
#[inline(always)]
fn stage_of_lanes<const DISTANCE: usize>(lanes: &mut [f32; LANES]) {
    let before = *lanes;
    for i in 0..LANES {
        let own = if i & DISTANCE == 0 { before[i] } else { -before[i] };
        lanes[i] = own + before[i ^ DISTANCE];
    }
}

#[inline(always)]
fn turn(heads: &mut [f32], head_dim: usize) {
    let part_len = 1 << head_dim.trailing_zeros();
    let factor = 1.0 / (part_len as f32).sqrt();
    for part in heads.chunks_exact_mut(part_len) {
        let mut distance = part_len / 2;
        while distance >= LANES || (part_len < LANES && distance > 0) {
            for pair in part.chunks_exact_mut(2 * distance) {
                let (low, high) = pair.split_at_mut(distance);
                add_and_subtract(low, high);
            }
            distance /= 2;
        }
        for lanes in part.as_chunks_mut::<LANES>().0 {
            stage_of_lanes::<8>(lanes);
            stage_of_lanes::<4>(lanes);
            stage_of_lanes::<2>(lanes);
            stage_of_lanes::<1>(lanes);
        }
        part.iter_mut().for_each(|x| *x *= factor);
    }
}

multiversion! {
    /// Turns consecutive heads of `head_dim` numbers.
    pub(super) fn turn_on(heads: &mut [f32], head_dim: usize) = turn;
}

/// Turns all heads of rows of `[q][k][v]`, or of `[q]`.
pub(super) fn turn_rows(ctx: ExecContext<'_>, place: KvPlace, rows: &mut Buffer) {
    rows.each_row(ctx, |_, row| turn_on(ctx.isa, row, place.heads.head_dim));
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::device::batch::StepBatch;
    use crate::device::cpu::testing::numbers;
    use crate::device::cpu::{Cpu, Isa, Threads};
    use crate::device::{
        Attention, AttentionInput, Device, HeadShape, KvFormat, KvSpec, Precision, RopeSpec, RopeStore,
    };

    /// Entry (i, j) of the transform is the parity of the bits that both have.
    fn by_definition(head: &[f32], part_len: usize) -> Vec<f64> {
        let entry = |i: usize, j: usize| {
            if (i & j).count_ones().is_multiple_of(2) {
                1.0
            } else {
                -1.0
            }
        };
        let parts = head.chunks_exact(part_len);
        let turned = parts.flat_map(|part| {
            (0..part_len).map(move |i| {
                let terms = part.iter().enumerate().map(|(j, x)| entry(i, j) * f64::from(*x));
                terms.sum::<f64>() / (part_len as f64).sqrt()
            })
        });
        turned.collect()
    }

    #[test]
    fn heads_are_turned_as_defined_alike_on_all_sets_and_back() {
        for (head_dim, part_len) in [
            (64, 64),
            (128, 128),
            (80, 16),
            (96, 32),
            (18, 2),
            (12, 4),
            (7, 1),
            (256, 256),
        ] {
            let heads = numbers(head_dim as u64, 3 * head_dim);
            let mut first: Option<Vec<f32>> = None;
            for isa in Isa::available() {
                let mut turned = heads.clone();
                turn_on(isa, &mut turned, head_dim);
                for (turned, head) in turned.chunks_exact(head_dim).zip(heads.chunks_exact(head_dim)) {
                    let want = by_definition(head, part_len);
                    assert!(
                        turned.iter().zip(want).all(|(x, y)| (f64::from(*x) - y).abs() < 1e-5),
                        "{isa:?} {head_dim}"
                    );
                }
                assert_eq!(
                    *first.get_or_insert_with(|| turned.clone()),
                    turned,
                    "{isa:?} {head_dim}"
                );
                turn_on(isa, &mut turned, head_dim);
                assert!(turned.iter().zip(&heads).all(|(x, y)| (x - y).abs() < 1e-5));
            }
        }
    }

    /// One number of a value is thirty times as large as the others. By itself it would make steps of 2.
    #[test]
    fn a_large_number_costs_the_others_little() {
        let heads = HeadShape {
            heads: 1,
            kv_heads: 1,
            head_dim: 64,
            value_in_key: None,
        };
        let cpu = Cpu::new(Precision::F32, KvFormat::Int4, Arc::new(Threads::new(1).unwrap()));
        let rope = RopeSpec {
            inverse_frequencies: vec![1.0; 32],
            scale: 1.0,
        };
        let mut step = cpu.step(vec![rope], &[(KvSpec::Full, heads)]).unwrap();
        let mut workspace = cpu.workspace();
        let mut batch = StepBatch::default();
        batch.push([0], 1, [0]);
        cpu.upload(&batch, &mut step, &mut workspace).unwrap();
        let mut pool = cpu.kv_pool(&heads.alone(), 1).unwrap();
        let mut rows = numbers(1, heads.qkv_width());
        rows[2 * 64 + 7] = 30.0;
        let (mut qkv, mut out) = (cpu.buffer(), cpu.buffer());
        cpu.write(&rows, rows.len(), &mut qkv).unwrap();
        let place = KvPlace::alone(heads);
        let store = RopeStore {
            place,
            qk_norm: None,
            value_norm: None,
            rope: 0,
            stores: true,
        };
        cpu.rope_store(store, &step, &mut qkv, &mut pool).unwrap();
        let op = Attention::plain(heads, KvSpec::Full);
        let input = AttentionInput { qkv: &qkv, sinks: None };
        cpu.attention(op, input, &step, &pool, &mut out, &mut workspace)
            .unwrap();
        let errors = cpu
            .read(&out)
            .unwrap()
            .into_iter()
            .zip(&rows[2 * 64..])
            .map(|(x, y)| (x - y).powi(2));
        let error = (errors.sum::<f32>() / 64.0).sqrt();
        assert!(error < 0.3, "{error}");
    }
}
