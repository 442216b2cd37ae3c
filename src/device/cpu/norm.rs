//! RMS normalisation (Zhang and Sennrich 2019), with the residual addition before it.
//!
//! `y = x / sqrt(mean(x^2) + eps) * weight`, where a layer normalisation (Ba et al. 2016, without a
//! bias) subtracts the mean from `x` first. Numbers are summed in 16 interleaved lanes, then the
//! lanes are summed in a fixed order.
//!
//! See docs/decisions/069-normalised-rows-are-written-in-int8.md.

#![expect(unsafe_code, reason = "tasks write rows of one buffer")]

use super::isa::multiversion;
use super::math::{round_bf16, sum16};
use super::quantize::int8_tiles;
use super::{Buffer, ExecContext, SharedMut};

/// The sum of `term` over `x`.
#[inline(always)]
fn sum_of(x: &[f32], term: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [0.0f32; 16];
    let (chunks, rest) = x.as_chunks::<16>();
    for chunk in chunks {
        for (sum, v) in lanes.iter_mut().zip(chunk) {
            *sum = term(*sum, *v);
        }
    }
    for (sum, v) in lanes.iter_mut().zip(rest) {
        *sum = term(*sum, *v);
    }
    sum16(lanes)
}

/// Subtracts the mean of `x` from it.
#[inline(always)]
fn center(x: &mut [f32]) {
    let mean = sum_of(x, |sum, v| sum + v) / x.len() as f32;
    x.iter_mut().for_each(|v| *v -= mean);
}

/// Normalises `x` in place. At BF16 precision the product with the weight is rounded. (The
/// reference implementation also rounds the normalised value, in all model families except Gemma.)
#[inline(always)]
pub(super) fn rms_norm(x: &mut [f32], weight: &[f32], eps: f32, round_to_bf16: bool) {
    let squares = sum_of(x, |sum, v| v.mul_add(v, sum));
    let scale = 1.0 / (squares / x.len() as f32 + eps).sqrt();
    if round_to_bf16 {
        for (v, w) in x.iter_mut().zip(weight) {
            *v = round_bf16(*v * scale * w);
        }
    } else {
        for (v, w) in x.iter_mut().zip(weight) {
            *v = *v * scale * w;
        }
    }
}

/// A row to add to the residual stream, the weights of a norm that is applied to the row before the
/// addition, and the factor of the sum.
type DeltaRow<'a> = Option<(&'a [f32], Option<&'a [f32]>, f32)>;

#[inline(always)]
fn add_norm_row(
    delta: DeltaRow<'_>,
    residual: &mut [f32],
    weight: &[f32],
    (eps, centered): (f32, bool),
    round_to_bf16: bool,
    out: &mut [f32],
) {
    if let Some((mut delta, norm, scale)) = delta {
        if let Some(weight) = norm {
            out.copy_from_slice(delta);
            rms_norm(out, weight, eps, round_to_bf16);
            delta = out;
        }
        for (x, d) in residual.iter_mut().zip(delta) {
            *x += d;
        }
        if round_to_bf16 {
            residual.iter_mut().for_each(|x| *x = round_bf16(*x));
        }
        if scale != 1.0 {
            residual.iter_mut().for_each(|x| *x *= scale);
            if round_to_bf16 {
                residual.iter_mut().for_each(|x| *x = round_bf16(*x));
            }
        }
    }
    out.copy_from_slice(residual);
    if centered {
        center(out);
    }
    rms_norm(out, weight, eps, round_to_bf16);
}

multiversion! {
    /// One row of [`add_norm`].
    fn add_norm_row_on(
        delta: DeltaRow<'_>,
        residual: &mut [f32],
        weight: &[f32],
        eps_and_centered: (f32, bool),
        round_to_bf16: bool,
        out: &mut [f32],
    ) = add_norm_row;
}

/// The inputs of an add-norm that are the same for all rows.
pub(super) struct NormOp<'a> {
    pub ctx: ExecContext<'a>,
    pub delta: Option<&'a Buffer>,
    /// Weights of a norm that is applied to `delta` before the addition.
    pub delta_weight: Option<&'a [f32]>,
    /// Factor of the stream with `delta`.
    pub delta_scale: f32,
    pub weight: &'a [f32],
    pub eps: f32,
    /// Whether the norm of the sum subtracts the mean first.
    pub centered: bool,
    pub round_to_bf16: bool,
    /// Whether normalised rows are written in INT8.
    pub quantize: bool,
}

impl NormOp<'_> {
    /// Adds row `row` of `delta` to `residual` and writes the normalised sum to `out`.
    fn add_norm_row(&self, row: usize, residual: &mut [f32], out: &mut [f32]) {
        let delta = self.delta.map(|d| (d.row(row), self.delta_weight, self.delta_scale));
        add_norm_row_on(
            self.ctx.isa,
            delta,
            residual,
            self.weight,
            (self.eps, self.centered),
            self.round_to_bf16,
            out,
        );
    }

    /// Writes `rows` rows to `out`, in F32 or INT8. `compute_row(i, row)` computes row `i`.
    fn write_rows(&self, rows: usize, out: &mut Buffer, compute_row: impl Fn(usize, &mut [f32]) + Sync) {
        let (isa, threads) = (self.ctx.isa, self.ctx.threads);
        let width = self.weight.len();
        let elements = rows * width;
        if self.quantize {
            let segment = [int8_tiles(isa, 0..rows)];
            let mut tiles = out.reshape_quantized(rows, width).tiles(isa, &segment, width);
            threads.parallel_for_each(elements, &mut tiles, |_, tiles| {
                let (mut row, mut bytes) = (vec![0.0; width], Vec::new());
                for tile in tiles {
                    for r in 0..tile.rows() {
                        compute_row(tile.first_row + r, &mut row);
                        tile.set_row(isa, r, &row, &mut bytes);
                    }
                }
            });
        } else {
            out.reshape(rows, width);
            let mut parts: Vec<_> = out.parts_mut(threads.parts(elements)).collect();
            threads.parallel_for_each(elements, &mut parts, |_, parts| {
                for (first, part) in parts {
                    let rows = part.chunks_exact_mut(width).enumerate();
                    rows.for_each(|(i, row)| compute_row(*first + i, row));
                }
            });
        }
    }
}

/// `residual += delta; out = norm(residual)`, over all rows.
pub(super) fn add_norm(op: &NormOp<'_>, residual: &mut Buffer, out: &mut Buffer) {
    let (rows, width) = (residual.rows, residual.width);
    assert!(op.weight.len() == width && op.delta.is_none_or(|d| (d.rows, d.width) == (rows, width)));
    let residual = SharedMut::new(&mut residual.data);
    op.write_rows(rows, out, |i, row| {
        // SAFETY: each row is computed once.
        op.add_norm_row(i, unsafe { residual.slice(i * width, width) }, row);
    });
}

/// As [`add_norm`], but only for the rows listed in `rows`: row `i` of `out` is computed from row
/// `rows[i]`. `residual` stays unchanged.
pub(super) fn add_norm_rows(op: &NormOp<'_>, rows: &[u32], residual: &Buffer, out: &mut Buffer) {
    assert!(op.weight.len() == residual.width);
    op.write_rows(rows.len(), out, |i, row| {
        let from = rows[i] as usize;
        op.add_norm_row(from, &mut residual.row(from).to_vec(), row);
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::gemm::linear::Rows;
    use crate::device::cpu::isa::Isa;
    use crate::device::cpu::quantize::{Quantized, quantize};
    use crate::device::cpu::testing::{buffer, ctx, numbers};

    #[test]
    fn matches_the_formula_and_is_bit_identical_on_all_sets() {
        for (rows, width) in [(1, 1), (3, 15), (2, 16), (5, 17), (40, 512)] {
            let (x, d, w) = (numbers(1, rows * width), numbers(2, rows * width), numbers(3, width));
            let delta = buffer(&d, rows, width);
            let mut first: Option<Vec<f32>> = None;
            for isa in Isa::available() {
                let op = NormOp {
                    ctx: ctx(isa),
                    delta: Some(&delta),
                    delta_weight: None,
                    delta_scale: 1.0,
                    weight: &w,
                    eps: 1e-5,
                    centered: false,
                    round_to_bf16: false,
                    quantize: false,
                };
                let (mut residual, mut out) = (buffer(&x, rows, width), Buffer::default());
                add_norm(&op, &mut residual, &mut out);
                for i in 0..rows {
                    let sum: Vec<f64> = (0..width)
                        .map(|j| (x[i * width + j] + d[i * width + j]) as f64)
                        .collect();
                    let mean = sum.iter().map(|v| v * v).sum::<f64>() / width as f64;
                    for j in 0..width {
                        assert_eq!(residual.row(i)[j] as f64, sum[j]);
                        let want = sum[j] / (mean + 1e-5).sqrt() * w[j] as f64;
                        assert!((out.row(i)[j] as f64 - want).abs() < 1e-5, "{isa:?} ({i}, {j})");
                    }
                }
                let layer = NormOp { centered: true, ..op };
                let mut normed = Buffer::default();
                add_norm(&layer, &mut buffer(&x, rows, width), &mut normed);
                for i in 0..rows {
                    let sum: Vec<f64> = (i * width..(i + 1) * width).map(|j| f64::from(x[j] + d[j])).collect();
                    let mean = sum.iter().sum::<f64>() / width as f64;
                    let variance = sum.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / width as f64;
                    for j in 0..width {
                        let want = (sum[j] - mean) / (variance + 1e-5).sqrt() * f64::from(w[j]);
                        assert!((f64::from(normed.row(i)[j]) - want).abs() < 1e-4, "{isa:?} ({i}, {j})");
                    }
                }
                let mut picked = Buffer::default();
                add_norm_rows(&op, &[rows as u32 - 1], &buffer(&x, rows, width), &mut picked);
                assert_eq!(picked.row(0), out.row(rows - 1));
                let op = NormOp { quantize: true, ..op };
                let (mut bytes, mut want) = (Buffer::default(), Quantized::default());
                add_norm(&op, &mut buffer(&x, rows, width), &mut bytes);
                let all = Rows { x: &out, picked: None };
                quantize(ctx(isa), all, &[int8_tiles(isa, 0..rows)], &mut want);
                assert_eq!(bytes.quantized(), Some(&want), "{isa:?}");
                assert_eq!(*first.get_or_insert_with(|| out.data.to_vec()), out.data, "{isa:?}");

                let own = numbers(4, width);
                let op = NormOp {
                    delta_weight: Some(&own),
                    quantize: false,
                    ..op
                };
                let mut residual = buffer(&x, rows, width);
                add_norm(&op, &mut residual, &mut out);
                for i in 0..rows {
                    let d = &d[i * width..][..width];
                    let mean = d.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / width as f64;
                    for j in 0..width {
                        let want = x[i * width + j] as f64 + d[j] as f64 / (mean + 1e-5).sqrt() * own[j] as f64;
                        assert!((residual.row(i)[j] as f64 - want).abs() < 1e-5, "{isa:?} ({i}, {j})");
                    }
                }
                let mut want = Buffer::default();
                let plain = NormOp {
                    delta: None,
                    delta_weight: None,
                    ..op
                };
                add_norm(&plain, &mut residual, &mut want);
                assert_eq!(out.data, want.data, "{isa:?}");
            }
        }
    }
}
