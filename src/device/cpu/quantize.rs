//! Quantization of activations to INT8, each row by its largest magnitude.
//!
//! `q = round(x * 127 / max|x|)`, ties to even, stored as `q + 128` (see
//! [`int8`](super::gemm::int8)). `x` is about `q * scale` with `scale = max|x| / 127`. A row with a
//! value that is NaN or infinite gets a scale of NaN, so that the error reaches the logits.

use std::ops::Range;

use super::ExecContext;
use super::gemm::int8::{K_STEP, OFFSET, QUAD, interleaves_rows, max_rows};
use super::gemm::linear::Rows;
use super::gemm::row_tiles::{RowTiles, split_by_tiles};
use super::isa::{Isa, multiversion};
use super::math::{ROUND, max16, sum16};

/// A row whose largest magnitude is below this is quantized to zeros, so that the inverse cannot
/// overflow.
const MAGNITUDE_MIN: f32 = 1e-30;

/// Quantized rows.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Quantized {
    /// Tile by tile, in the layout that
    /// [`int8::interleaves_rows`](super::gemm::int8::interleaves_rows) describes. Each row is
    /// padded with zeros (stored as 128) to `stride` bytes.
    pub data: Vec<u8>,
    pub stride: usize,
    /// `[rows]`.
    pub scales: Vec<f32>,
}

#[inline(always)]
fn quantize_row(x: &[f32], out: &mut [u8], scale: &mut f32) {
    let mut max_abs = [0.0f32; 16];
    // Products with 0: NaN if a value is NaN or infinite.
    let mut not_finite = [0.0f32; 16];
    let (chunks, rest) = x.as_chunks::<16>();
    for chunk in chunks {
        for i in 0..16 {
            let size = chunk[i].abs();
            max_abs[i] = if size > max_abs[i] { size } else { max_abs[i] };
            not_finite[i] = chunk[i].mul_add(0.0, not_finite[i]);
        }
    }
    for (i, v) in rest.iter().enumerate() {
        max_abs[i] = if v.abs() > max_abs[i] { v.abs() } else { max_abs[i] };
        not_finite[i] = v.mul_add(0.0, not_finite[i]);
    }
    let (max_abs, not_finite) = (max16(max_abs), sum16(not_finite));
    let inverse = if max_abs < MAGNITUDE_MIN { 0.0 } else { 127.0 / max_abs };
    *scale = if max_abs < MAGNITUDE_MIN { 0.0 } else { max_abs / 127.0 } + not_finite;
    let (out, padding) = out.split_at_mut(x.len());
    for (q, v) in out.iter_mut().zip(x) {
        let bits = v.mul_add(inverse, ROUND).to_bits() as i32;
        *q = bits.wrapping_add(OFFSET) as u8;
    }
    padding.fill(OFFSET as u8);
}

multiversion! {
    /// Quantizes one row to `out`, which is at least as long as `x`, and pads `out` with zeros
    /// (stored as 128).
    pub(super) fn quantize_row_on(x: &[f32], out: &mut [u8], scale: &mut f32) = quantize_row;
}

impl Quantized {
    /// Resizes to the rows of all segments and returns their tiles, which the caller must fill.
    pub(super) fn tiles(&mut self, isa: Isa, segments: &[RowTiles], width: usize) -> Vec<QuantizedTile<'_>> {
        let rows = segments.iter().map(|tiles| tiles.rows).sum::<usize>();
        let stride = width.next_multiple_of(K_STEP);
        self.stride = stride;
        self.data.resize(rows * stride, 0);
        self.scales.resize(rows, 0.0);
        let data = split_by_tiles(segments, &mut self.data, stride);
        let scales = split_by_tiles(segments, &mut self.scales, 1);
        data.zip(scales)
            .map(|((first_row, data), (_, scales))| QuantizedTile {
                first_row,
                interleaves_rows: interleaves_rows(isa, scales.len()),
                data,
                stride,
                scales,
            })
            .collect()
    }
}

/// A tile of [`Quantized`] rows to be written.
pub(super) struct QuantizedTile<'a> {
    pub first_row: usize,
    interleaves_rows: bool,
    data: &'a mut [u8],
    stride: usize,
    scales: &'a mut [f32],
}

impl QuantizedTile<'_> {
    pub(super) fn rows(&self) -> usize {
        self.scales.len()
    }

    /// Quantizes `values` to the tile's row `r`; `bytes` is scratch.
    pub(super) fn set_row(&mut self, isa: Isa, r: usize, values: &[f32], bytes: &mut Vec<u8>) {
        let rows = self.rows();
        let scale = &mut self.scales[r];
        if !self.interleaves_rows {
            return quantize_row_on(isa, values, &mut self.data[r * self.stride..][..self.stride], scale);
        }
        bytes.resize(self.stride, 0);
        quantize_row_on(isa, values, bytes, scale);
        let slots = self.data[r * QUAD..].chunks_mut(rows * QUAD);
        for (quad, slot) in bytes.as_chunks::<QUAD>().0.iter().zip(slots) {
            slot[..QUAD].copy_from_slice(quad);
        }
    }
}

/// Division of rows into tiles for INT8 matmuls.
pub(super) fn int8_tiles(isa: Isa, rows: Range<usize>) -> RowTiles {
    RowTiles::new(rows, max_rows(isa))
}

/// Quantizes rows, in the tiles of these segments.
pub(super) fn quantize(ctx: ExecContext<'_>, rows: Rows<'_>, segments: &[RowTiles], out: &mut Quantized) {
    let mut tiles = out.tiles(ctx.isa, segments, rows.x.width);
    let elements = rows.x.width * segments.iter().map(|tiles| tiles.rows).sum::<usize>();
    ctx.threads.parallel_for_each(elements, &mut tiles, |_, tiles| {
        let mut bytes = Vec::new();
        for tile in tiles {
            for r in 0..tile.rows() {
                tile.set_row(ctx.isa, r, rows.row(tile.first_row + r), &mut bytes);
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::Buffer;
    use crate::device::cpu::testing::{buffer, ctx, numbers};

    fn quantize_all(isa: Isa, x: &Buffer, out: &mut Quantized) {
        let rows = Rows { x, picked: None };
        quantize(ctx(isa), rows, &[int8_tiles(isa, 0..x.rows)], out);
    }

    /// The bytes in row-major order instead of tile by tile.
    fn row_major(isa: Isa, q: &Quantized, tiles: &RowTiles) -> Vec<u8> {
        let mut bytes = vec![0; q.data.len()];
        for tile in 0..tiles.count {
            let (from, rows) = (tiles.start(tile), tiles.start(tile + 1) - tiles.start(tile));
            for r in 0..rows {
                for i in 0..q.stride {
                    let at = if interleaves_rows(isa, rows) {
                        from * q.stride + (i / QUAD * rows + r) * QUAD + i % QUAD
                    } else {
                        (from + r) * q.stride + i
                    };
                    bytes[(from + r) * q.stride + i] = q.data[at];
                }
            }
        }
        bytes
    }

    #[test]
    fn errors_are_at_most_half_a_step_and_bits_are_the_same_on_all_sets() {
        for (rows, width) in [(1, 1), (3, 15), (2, 16), (5, 17), (70, 512)] {
            let x = buffer(&numbers(1, rows * width), rows, width);
            let mut first: Option<Vec<u8>> = None;
            for isa in Isa::available() {
                let mut q = Quantized::default();
                quantize_all(isa, &x, &mut q);
                let plain = row_major(isa, &q, &int8_tiles(isa, 0..rows));
                for r in 0..rows {
                    let max_abs = x.row(r).iter().fold(0.0f32, |m, v| m.max(v.abs()));
                    assert_eq!(q.scales[r], max_abs / 127.0);
                    for (i, v) in x.row(r).iter().enumerate() {
                        let back = (i32::from(plain[r * q.stride + i]) - OFFSET) as f32 * q.scales[r];
                        assert!(
                            (back - v).abs() <= 0.5001 * q.scales[r],
                            "{isa:?} ({r}, {i}): {back} {v}"
                        );
                    }
                    assert!(plain[r * q.stride..][width..q.stride].iter().all(|b| *b == 128));
                }
                assert_eq!(*first.get_or_insert_with(|| plain.clone()), plain, "{isa:?}");
            }
        }
    }

    #[test]
    fn rows_of_zeros_have_scale_0_and_rows_that_are_not_finite_nan() {
        for isa in Isa::available() {
            let mut x = numbers(2, 4 * 20);
            x[..20].fill(0.0);
            x[20] = f32::NAN;
            x[59] = f32::NEG_INFINITY;
            let mut q = Quantized::default();
            quantize_all(isa, &buffer(&x, 4, 20), &mut q);
            assert_eq!(q.scales[0], 0.0);
            assert!(
                row_major(isa, &q, &int8_tiles(isa, 0..4))[..20]
                    .iter()
                    .all(|b| *b == 128)
            );
            assert!(
                q.scales[1].is_nan() && q.scales[2].is_nan() && q.scales[3].is_finite(),
                "{:?}",
                q.scales
            );
        }
    }
}
