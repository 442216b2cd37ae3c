//! Rotary embedding (Su et al. 2021) of query and key heads, in place, after an optional
//! normalisation of each head, or of all heads together.
//!
//! Dimension `d` of a head is paired with `d + head_dim / 2` (the Hugging Face layout):
//! `(a, b) -> (a cos - b sin, b cos + a sin)`.

use super::isa::multiversion;
use super::math::round_bf16;
use super::norm::rms_norm;
use super::step::Step;
use super::{Buffer, ExecContext, Vector};
use crate::device::{QkNorm, RopeStore};

/// Weight and epsilon of a normalisation, which is of as many neighbouring heads as there are
/// weights for.
pub(super) type HeadNorm<'a> = (&'a [f32], f32);

#[inline(always)]
fn normalise_heads(heads: &mut [f32], (weight, eps): HeadNorm<'_>, round_to_bf16: bool) {
    for part in heads.chunks_exact_mut(weight.len()) {
        rms_norm(part, weight, eps, round_to_bf16);
    }
}

/// Rotates consecutive heads by one token's cosines and sines.
#[inline(always)]
fn rotate_heads(heads: &mut [f32], norm: Option<HeadNorm<'_>>, rotation: &[f32], round_to_bf16: bool) {
    let dim = rotation.len();
    let (cos, sin) = rotation.split_at(dim / 2);
    if let Some(norm) = norm {
        normalise_heads(heads, norm, round_to_bf16);
    }
    for head in heads.chunks_exact_mut(dim) {
        let (low, high) = head.split_at_mut(dim / 2);
        for (((a, b), c), s) in low.iter_mut().zip(high).zip(cos).zip(sin) {
            let (x, y) = (*a, *b);
            *a = x * c - y * s;
            *b = y * c + x * s;
        }
        if round_to_bf16 {
            head.iter_mut().for_each(|x| *x = round_bf16(*x));
        }
    }
}

multiversion! {
    pub(super) fn normalise_heads_on(heads: &mut [f32], norm: HeadNorm<'_>, round_to_bf16: bool) = normalise_heads;
}

multiversion! {
    pub(super) fn rotate_heads_on(heads: &mut [f32], norm: Option<HeadNorm<'_>>, rotation: &[f32], round_to_bf16: bool) = rotate_heads;
}

/// Normalises and rotates the query and key heads of all rows.
pub(super) fn rotate(
    ctx: ExecContext<'_>,
    round_to_bf16: bool,
    op: &RopeStore<'_, Vector>,
    step: &Step,
    qkv: &mut Buffer,
) {
    let heads = op.place.heads;
    let dim = heads.head_dim;
    let rotations = &step.rotations[op.rope].token_rotations;
    let (width, kv_heads) = if op.stores {
        (heads.qkv_width(), heads.kv_heads)
    } else {
        (heads.q_width(), 0)
    };
    assert!(qkv.width == width && rotations.len() == qkv.rows * dim);
    let norm = op.qk_norm.as_ref();
    let q_norm = norm.map(|n| (&n.q.0[..], n.eps));
    let k_norm = norm.and_then(|n| Some((&n.k?.0[..], n.eps)));
    let fits = |weights: usize, heads: usize| [dim, heads * dim].contains(&weights);
    let fits_keys = |n: &QkNorm<'_, Vector>| n.k.map_or(!op.stores, |k| fits(k.0.len(), heads.kv_heads));
    assert!(norm.is_none_or(|n| fits(n.q.0.len(), heads.heads) && fits_keys(n)));
    let ones = vec![1.0; dim];
    let value_norm = op.value_norm.map(|eps| (&ones[..], eps));
    let elements = qkv.data.len();
    let mut parts: Vec<_> = qkv.parts_mut(ctx.threads.parts(elements)).collect();
    ctx.threads.parallel_for_each(elements, &mut parts, |_, parts| {
        for (first, part) in parts {
            let rotations = rotations[*first * dim..].chunks_exact(dim);
            for (row, rotation) in part.chunks_exact_mut(width).zip(rotations) {
                let (q, rest) = row.split_at_mut(heads.q_width());
                let (k, v) = rest.split_at_mut(kv_heads * dim);
                rotate_heads_on(ctx.isa, q, q_norm, rotation, round_to_bf16);
                rotate_heads_on(ctx.isa, k, k_norm, rotation, round_to_bf16);
                if let Some(norm) = value_norm {
                    normalise_heads_on(ctx.isa, v, norm, round_to_bf16);
                }
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::batch::{StepBatch, StepSequence};
    use crate::device::cpu::Isa;
    use crate::device::cpu::testing::{buffer, ctx, numbers};
    use crate::device::{HeadShape, KvPlace, KvSpec, RopeSpec};

    /// `normed`: query heads that a norm is of, 0 without a norm.
    fn check(dim: usize, tokens: usize, normed: usize) {
        let with_norm = normed > 0;
        let heads = HeadShape {
            heads: 3,
            kv_heads: 1,
            head_dim: dim,
            value_in_key: None,
        };
        let frequencies: Vec<f32> = (0..dim / 2).map(|d| 0.7f32.powi(d as i32)).collect();
        let mut step = Step::new(
            vec![
                RopeSpec {
                    inverse_frequencies: vec![0.0; dim / 2],
                    scale: 1.0,
                },
                RopeSpec {
                    inverse_frequencies: frequencies.clone(),
                    scale: 1.5,
                },
            ],
            &[(KvSpec::Full, heads)],
            false,
        );
        step.upload(&StepBatch {
            tokens: vec![0; tokens],
            positions: (3..3 + tokens as u32).collect(),
            sequences: vec![StepSequence {
                first_token: 0,
                q_len: tokens as u32,
                kv_len: 3 + tokens as u32,
                first_block: 0,
                adapter: 0,
            }],
            block_tables: vec![(0..(3 + tokens as u32).div_ceil(16)).collect()],
            logits_at: vec![],
            ..StepBatch::default()
        });
        let (q, k) = (Vector(numbers(5, dim * normed.max(1))), Vector(numbers(6, dim)));
        let rows = numbers(1, tokens * heads.qkv_width());
        let mut first: Option<Vec<f32>> = None;
        for isa in Isa::available() {
            let mut got = buffer(&rows, tokens, heads.qkv_width());
            let qk_norm = with_norm.then_some(QkNorm {
                q: &q,
                k: Some(&k),
                eps: 1e-3,
            });
            let op = RopeStore {
                place: KvPlace::alone(heads),
                qk_norm,
                value_norm: with_norm.then_some(1e-3),
                rope: 1,
                stores: true,
            };
            rotate(ctx(isa), false, &op, &step, &mut got);
            for t in 0..tokens {
                for head in 0..5 {
                    let x: Vec<f64> = rows[t * heads.qkv_width() + head * dim..][..dim]
                        .iter()
                        .map(|v| *v as f64)
                        .collect();
                    let is_joint = normed == 3 && head < 3;
                    let weight = match (is_joint, head < 3) {
                        (true, _) => &q.0[head * dim..],
                        (_, true) => &q.0,
                        _ => &k.0,
                    };
                    let row = &rows[t * heads.qkv_width()..];
                    let together = if is_joint {
                        &row[..3 * dim]
                    } else {
                        &row[head * dim..][..dim]
                    };
                    let mean = together.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / together.len() as f64;
                    let scale = if with_norm { 1.0 / (mean + 1e-3).sqrt() } else { 1.0 };
                    let y: Vec<f64> = (0..dim)
                        .map(|d| x[d] * scale * if with_norm { weight[d] as f64 } else { 1.0 })
                        .collect();
                    for (d, kept) in x.iter().enumerate() {
                        let pair = d % (dim / 2);
                        let angle = frequencies[pair] as f64 * (t + 3) as f64;
                        let (a, b) = (y[pair], y[pair + dim / 2]);
                        let want = match (head < 4, d < dim / 2) {
                            (true, true) => 1.5 * (a * angle.cos() - b * angle.sin()),
                            (true, false) => 1.5 * (b * angle.cos() + a * angle.sin()),
                            // The value head is not rotated, and its norm has no weights.
                            (false, _) => *kept * scale,
                        };
                        let got = got.row(t)[head * dim + d] as f64;
                        assert!(
                            (got - want).abs() < 2e-5,
                            "{isa:?} token {t} head {head} dim {d}: {got} not {want}"
                        );
                    }
                }
            }
            assert_eq!(*first.get_or_insert_with(|| got.data.to_vec()), got.data, "{isa:?}");
        }
    }

    #[test]
    fn matches_the_formula_and_is_bit_identical_on_all_sets() {
        for (dim, tokens) in [(2, 1), (16, 15), (30, 17), (128, 40)] {
            for normed in [0, 1, 3] {
                check(dim, tokens, normed);
            }
        }
    }
}
