//! Activations in 8 bits: each row by its largest magnitude.
//!
//! `q = round(x * 127 / max|x|)`, ties to even, stored + 128 (see [`int8`](super::int8)); `x` is about `q * scale` with
//! `scale = max|x| / 127`. A row that holds a value which is not finite gets a scale of NaN, so that it shows in the logits.

use rayon::prelude::*;

use super::Buffer;
use super::int8::{K_STEP, OFFSET};
use super::isa::{Isa, multiversion};

/// `1.5 * 2^23`: adding it rounds a small float to an integer that then stands in the low bits.
const ROUND: f32 = 12_582_912.0;
/// Rows whose largest magnitude is below it are zero: its inverse would overflow.
const LEAST: f32 = 1e-30;
/// Elements below which rows are not shared out to threads.
const SERIAL_WORK: usize = 1 << 15;

/// Quantized rows.
#[derive(Debug, Default)]
pub(super) struct Quantized {
    /// `[rows][stride]`, each row padded by zeros (128) to whole tiles.
    pub data: Vec<u8>,
    pub stride: usize,
    /// `[rows]`.
    pub scales: Vec<f32>,
}

#[inline(always)]
fn quantize_row(x: &[f32], out: &mut [u8], scale: &mut f32) {
    let mut most = [0.0f32; 16];
    let mut not_finite = [0.0f32; 16];
    let (chunks, rest) = x.as_chunks::<16>();
    for chunk in chunks {
        for i in 0..16 {
            most[i] = most[i].max(chunk[i].abs());
            not_finite[i] += chunk[i] * 0.0;
        }
    }
    for (i, v) in rest.iter().enumerate() {
        most[i] = most[i].max(v.abs());
        not_finite[i] += v * 0.0;
    }
    let most = most.into_iter().fold(0.0, f32::max);
    let not_finite: f32 = not_finite.into_iter().sum();
    let inverse = if most < LEAST { 0.0 } else { 127.0 / most };
    *scale = if most < LEAST { 0.0 } else { most / 127.0 } + not_finite;
    let (out, padding) = out.split_at_mut(x.len());
    for (q, v) in out.iter_mut().zip(x) {
        let bits = v.mul_add(inverse, ROUND).to_bits() as i32;
        *q = bits.wrapping_add(OFFSET) as u8;
    }
    padding.fill(OFFSET as u8);
}

multiversion! {
    /// One row of [`quantize`].
    fn quantize_row_on(x: &[f32], out: &mut [u8], scale: &mut f32) = quantize_row;
}

/// Quantizes all rows of `x`.
pub(super) fn quantize(isa: Isa, x: &Buffer, out: &mut Quantized) {
    out.stride = x.width.next_multiple_of(K_STEP);
    out.data.resize(x.rows * out.stride, 0);
    out.scales.resize(x.rows, 0.0);
    if x.width == 0 {
        return;
    }
    let rows = x.data.chunks_exact(x.width);
    let one = |((x, q), scale): ((&[f32], &mut [u8]), &mut f32)| quantize_row_on(isa, x, q, scale);
    if x.data.len() < SERIAL_WORK {
        rows.zip(out.data.chunks_exact_mut(out.stride))
            .zip(&mut out.scales)
            .for_each(one);
    } else {
        x.data
            .par_chunks_exact(x.width)
            .zip(out.data.par_chunks_exact_mut(out.stride))
            .zip(&mut out.scales)
            .for_each(one);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::testing::{buffer, numbers};

    #[test]
    fn rows_come_back_within_half_a_step_and_alike_everywhere() {
        for (rows, width) in [(1, 1), (3, 15), (2, 16), (5, 17), (70, 512)] {
            let x = buffer(&numbers(1, rows * width), rows, width);
            let mut first: Option<Vec<u8>> = None;
            for isa in Isa::available() {
                let mut q = Quantized::default();
                quantize(isa, &x, &mut q);
                for r in 0..rows {
                    let most = x.row(r).iter().fold(0.0f32, |m, v| m.max(v.abs()));
                    assert_eq!(q.scales[r], most / 127.0);
                    for (i, v) in x.row(r).iter().enumerate() {
                        let back = (i32::from(q.data[r * q.stride + i]) - OFFSET) as f32 * q.scales[r];
                        assert!(
                            (back - v).abs() <= 0.5001 * q.scales[r],
                            "{isa:?} ({r}, {i}): {back} {v}"
                        );
                    }
                    assert!(q.data[r * q.stride..][width..q.stride].iter().all(|b| *b == 128));
                }
                assert_eq!(*first.get_or_insert_with(|| q.data.clone()), q.data, "{isa:?}");
            }
        }
    }

    #[test]
    fn rows_of_zeros_and_rows_that_are_not_finite() {
        for isa in Isa::available() {
            let mut x = numbers(2, 4 * 20);
            x[..20].fill(0.0);
            x[20] = f32::NAN;
            x[59] = f32::NEG_INFINITY;
            let mut q = Quantized::default();
            quantize(isa, &buffer(&x, 4, 20), &mut q);
            assert_eq!(q.scales[0], 0.0);
            assert!(q.data[..20].iter().all(|b| *b == 128));
            assert!(
                q.scales[1].is_nan() && q.scales[2].is_nan() && q.scales[3].is_finite(),
                "{:?}",
                q.scales
            );
        }
    }
}
