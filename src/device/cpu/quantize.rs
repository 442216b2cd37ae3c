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
use super::math::ROUND;
use super::reused::Reused;

/// A row whose largest magnitude is below this is quantized to zeros, so that the inverse cannot
/// overflow.
const MAGNITUDE_MIN: f32 = 1e-30;

/// The bit of a number's sign.
const SIGN: u32 = 1 << 31;
/// Rows that are written to an interleaved tile together.
pub(super) const ROWS_AT_ONCE: usize = 4;

/// Quantized rows.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Quantized {
    /// Tile by tile, in the layout that
    /// [`int8::interleaves_rows`](super::gemm::int8::interleaves_rows) describes. Each row is
    /// padded with zeros (stored as 128) to `stride` bytes.
    pub data: Reused<u8>,
    pub stride: usize,
    /// `[rows]`.
    pub scales: Vec<f32>,
}

#[inline(always)]
pub(super) fn quantize_row(x: &[f32], out: &mut [u8], scale: &mut f32) {
    // Magnitudes are in the order of their bits, and those that are not finite are the largest. Compilers make good code of a
    // maximum of integers.
    let magnitude = |v: &f32| v.to_bits() & !SIGN;
    let max_abs = f32::from_bits(x.iter().fold(0, |max, v| max.max(magnitude(v))));
    let inverse = if max_abs < MAGNITUDE_MIN { 0.0 } else { 127.0 / max_abs };
    *scale = if !max_abs.is_finite() {
        f32::NAN
    } else if max_abs < MAGNITUDE_MIN {
        0.0
    } else {
        max_abs / 127.0
    };
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
        self.data.set_len(rows * stride);
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

    /// Quantizes `values` to the tile's row `r`. A tile's rows are set in order, with the same `bytes`, which are scratch.
    pub(super) fn set_row(&mut self, isa: Isa, r: usize, values: &[f32], bytes: &mut Vec<u8>) {
        let (rows, stride) = (self.rows(), self.stride);
        let scale = &mut self.scales[r];
        if !self.interleaves_rows {
            return quantize_row_on(isa, values, &mut self.data[r * stride..][..stride], scale);
        }
        bytes.resize(ROWS_AT_ONCE * stride, 0);
        let waiting = r % ROWS_AT_ONCE;
        quantize_row_on(isa, values, &mut bytes[waiting * stride..][..stride], scale);
        if waiting + 1 == ROWS_AT_ONCE || r + 1 == rows {
            let first = r - waiting;
            interleave_on(
                isa,
                &bytes[..(waiting + 1) * stride],
                stride,
                &mut self.data[first * QUAD..],
                rows * QUAD,
            );
        }
    }
}

/// Copies the quads of rows that lie one after the other, `stride` bytes each, so that those of one
/// place are adjacent: at the beginning of each `step` bytes of `out`.
#[inline(always)]
fn interleave(rows: &[u8], stride: usize, out: &mut [u8], step: usize) {
    let places = out.chunks_mut(step);
    if rows.len() == ROWS_AT_ONCE * stride {
        let (a, rest) = rows.split_at(stride);
        let (b, rest) = rest.split_at(stride);
        let (c, d) = rest.split_at(stride);
        let [a, b, c, d] = [a, b, c, d].map(|row| row.as_chunks::<QUAD>().0);
        for ((((a, b), c), d), place) in a.iter().zip(b).zip(c).zip(d).zip(places) {
            let quads = [*a, *b, *c, *d];
            place[..ROWS_AT_ONCE * QUAD].copy_from_slice(quads.as_flattened());
        }
        return;
    }
    let quads: Vec<_> = rows.chunks_exact(stride).map(|row| row.as_chunks::<QUAD>().0).collect();
    for (i, place) in places.enumerate().take(stride / QUAD) {
        for (row, slot) in quads.iter().zip(place.as_chunks_mut::<QUAD>().0) {
            *slot = row[i];
        }
    }
}

multiversion! {
    pub(super) fn interleave_on(rows: &[u8], stride: usize, out: &mut [u8], step: usize) = interleave;
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
