//! Quantization of activations to INT8, each row by its largest magnitude.
//!
//! `q = round(x * 127 / max|x|)`, ties to even, stored + 128 (see [`int8`](super::gemm::int8)). `x` is
//! about `q * scale` with `scale = max|x| / 127`. A row with a value that is NaN or infinite gets a
//! scale of NaN, so that the error reaches the logits.

use super::gemm::int8::{K_STEP, OFFSET, QUAD, is_packed, max_rows};
use super::gemm::linear::RowTiles;
use super::isa::{Isa, multiversion};
use super::math::{ROUND, max16, sum16};
use super::{Buffer, ExecContext};

/// A row whose largest magnitude is below this is quantized to zeros, so that the inverse cannot
/// overflow.
const LEAST: f32 = 1e-30;

/// Quantized rows.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Quantized {
    /// Tile by tile, in the layout that [`int8::is_packed`](super::gemm::int8::is_packed) reports. Each
    /// row is padded with zeros (stored as 128) to `stride` bytes.
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
            let size = chunk[i].abs();
            most[i] = if size > most[i] { size } else { most[i] };
            not_finite[i] = chunk[i].mul_add(0.0, not_finite[i]);
        }
    }
    for (i, v) in rest.iter().enumerate() {
        most[i] = if v.abs() > most[i] { v.abs() } else { most[i] };
        not_finite[i] = v.mul_add(0.0, not_finite[i]);
    }
    let (most, not_finite) = (max16(most), sum16(not_finite));
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
    /// Quantizes one row to `out`, which is at least as long, and pads `out` with zeros (stored as
    /// 128).
    pub(super) fn quantize_row_on(x: &[f32], out: &mut [u8], scale: &mut f32) = quantize_row;
}

impl Quantized {
    /// Resizes to `rows` rows and returns their tiles, which the caller must fill.
    pub(super) fn tiles(&mut self, isa: Isa, rows: usize, width: usize) -> Vec<QuantizedTile<'_>> {
        let tiles = int8_tiles(isa, rows);
        let stride = width.next_multiple_of(K_STEP);
        self.stride = stride;
        self.data.resize(rows * stride, 0);
        self.scales.resize(rows, 0.0);
        let data = tiles.split(&mut self.data, stride);
        let scales = tiles.split(&mut self.scales, 1);
        data.zip(scales)
            .map(|((from, data), (_, scales))| QuantizedTile {
                from,
                is_packed: is_packed(isa, scales.len()),
                data,
                stride,
                scales,
            })
            .collect()
    }
}

/// A tile to fill.
pub(super) struct QuantizedTile<'a> {
    /// First row of the tile.
    pub from: usize,
    is_packed: bool,
    data: &'a mut [u8],
    stride: usize,
    scales: &'a mut [f32],
}

impl QuantizedTile<'_> {
    pub(super) fn rows(&self) -> usize {
        self.scales.len()
    }

    /// Fills the tile's row `r`; `bytes` is scratch.
    pub(super) fn fill(&mut self, isa: Isa, r: usize, values: &[f32], bytes: &mut Vec<u8>) {
        let rows = self.rows();
        let scale = &mut self.scales[r];
        if !self.is_packed {
            return quantize_row_on(isa, values, &mut self.data[r * self.stride..][..self.stride], scale);
        }
        bytes.resize(self.stride, 0);
        quantize_row_on(isa, values, bytes, scale);
        let places = self.data[r * QUAD..].chunks_mut(rows * QUAD);
        for (quad, place) in bytes.as_chunks::<QUAD>().0.iter().zip(places) {
            place[..QUAD].copy_from_slice(quad);
        }
    }
}

/// Division of rows into tiles for INT8 products.
pub(super) fn int8_tiles(isa: Isa, rows: usize) -> RowTiles {
    RowTiles::new(rows, max_rows(isa))
}

/// Quantizes all rows of `x`, in tiles.
pub(super) fn quantize(on: ExecContext<'_>, x: &Buffer, out: &mut Quantized) {
    let mut tiles = out.tiles(on.isa, x.rows, x.width);
    on.threads.share_mut(x.data.len(), &mut tiles, |_, tiles| {
        let mut bytes = Vec::new();
        for tile in tiles {
            for r in 0..tile.rows() {
                tile.fill(on.isa, r, x.row(tile.from + r), &mut bytes);
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::testing::{buffer, numbers, on};

    /// The bytes, row by row instead of tile by tile.
    fn plain(isa: Isa, q: &Quantized, tiles: &RowTiles) -> Vec<u8> {
        let mut plain = vec![0; q.data.len()];
        for tile in 0..tiles.count {
            let (from, rows) = (tiles.start(tile), tiles.start(tile + 1) - tiles.start(tile));
            for r in 0..rows {
                for i in 0..q.stride {
                    let at = if is_packed(isa, rows) {
                        from * q.stride + (i / QUAD * rows + r) * QUAD + i % QUAD
                    } else {
                        (from + r) * q.stride + i
                    };
                    plain[(from + r) * q.stride + i] = q.data[at];
                }
            }
        }
        plain
    }

    #[test]
    fn rows_come_back_within_half_a_step_and_alike_everywhere() {
        for (rows, width) in [(1, 1), (3, 15), (2, 16), (5, 17), (70, 512)] {
            let x = buffer(&numbers(1, rows * width), rows, width);
            let mut first: Option<Vec<u8>> = None;
            for isa in Isa::available() {
                let mut q = Quantized::default();
                quantize(on(isa), &x, &mut q);
                let plain = plain(isa, &q, &int8_tiles(isa, rows));
                for r in 0..rows {
                    let most = x.row(r).iter().fold(0.0f32, |m, v| m.max(v.abs()));
                    assert_eq!(q.scales[r], most / 127.0);
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
    fn rows_of_zeros_and_rows_that_are_not_finite() {
        for isa in Isa::available() {
            let mut x = numbers(2, 4 * 20);
            x[..20].fill(0.0);
            x[20] = f32::NAN;
            x[59] = f32::NEG_INFINITY;
            let mut q = Quantized::default();
            quantize(on(isa), &buffer(&x, 4, 20), &mut q);
            assert_eq!(q.scales[0], 0.0);
            assert!(plain(isa, &q, &int8_tiles(isa, 4))[..20].iter().all(|b| *b == 128));
            assert!(
                q.scales[1].is_nan() && q.scales[2].is_nan() && q.scales[3].is_finite(),
                "{:?}",
                q.scales
            );
        }
    }
}
