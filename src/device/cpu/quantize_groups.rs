//! Quantization of activations to 8 bits, each group of a row by its largest magnitude: what the kernel of weights in four bits
//! reads (see [`int4`](super::gemm::int4)).
//!
//! Groups are those of the weights, so a group's sum of products has one factor. A row's large values leave few steps to the
//! others of their group only.

use super::ExecContext;
use super::gemm::int4::OCTET;
use super::gemm::int8::{OFFSET, QUAD};
use super::gemm::linear::Rows;
use super::gemm::row_tiles::{RowTiles, split_by_tiles};
use super::isa::multiversion;
use super::quantize::{ROWS_AT_ONCE, interleave_on, quantize_row};
use super::reused::Reused;

/// Rows that are quantized by groups.
#[derive(Debug, Default)]
pub(super) struct GroupedRows {
    /// Signed bytes, tile by tile, each `[quads][rows of the tile][4]`. A group that is no multiple of an octet is padded with zeros.
    pub data: Reused<u8>,
    /// Tile by tile, each `[groups][rows of the tile]`.
    pub scales: Reused<f32>,
    /// As `scales`: the sum of a group's bytes, negated.
    pub sums: Reused<i32>,
}

#[inline(always)]
fn quantize_groups(x: &[f32], group: usize, out: &mut [u8], scales: &mut [f32], sums: &mut [i32]) {
    let padded = group.next_multiple_of(OCTET);
    let groups = x.chunks_exact(group).zip(out.chunks_exact_mut(padded));
    for ((x, out), (scale, sum)) in groups.zip(scales.iter_mut().zip(sums)) {
        quantize_row(x, out, scale);
        let mut all = 0;
        for byte in out {
            let signed = byte.wrapping_sub(OFFSET as u8);
            *byte = signed;
            all += i32::from(signed as i8);
        }
        *sum = -all;
    }
}

multiversion! {
    fn quantize_groups_on(x: &[f32], group: usize, out: &mut [u8], scales: &mut [f32], sums: &mut [i32]) = quantize_groups;
}

/// Quantizes rows by groups of `group` columns, which divide a row, in the tiles of these segments.
pub(super) fn quantize(
    ctx: ExecContext<'_>,
    rows: Rows<'_>,
    segments: &[RowTiles],
    group: usize,
    out: &mut GroupedRows,
) {
    let width = rows.x.width;
    let (count, groups) = (segments.iter().map(|tiles| tiles.rows).sum::<usize>(), width / group);
    let stride = groups * group.next_multiple_of(OCTET);
    out.data.set_len(count * stride);
    out.scales.set_len(count * groups);
    out.sums.set_len(count * groups);
    let data = split_by_tiles(segments, &mut out.data, stride);
    let scales = split_by_tiles(segments, &mut out.scales, groups);
    let sums = split_by_tiles(segments, &mut out.sums, groups);
    let mut tiles: Vec<_> = data.zip(scales).zip(sums).collect();
    ctx.threads.parallel_for_each(count * width, &mut tiles, |_, tiles| {
        let mut bytes = vec![0; ROWS_AT_ONCE * stride];
        let (mut row_scales, mut row_sums) = (vec![0.0; groups], vec![0; groups]);
        for (((first_row, data), (_, scales)), (_, sums)) in tiles {
            let tile_rows = data.len() / stride;
            for r in 0..tile_rows {
                let waiting = r % ROWS_AT_ONCE;
                let row = rows.row(*first_row + r);
                let place = &mut bytes[waiting * stride..][..stride];
                quantize_groups_on(ctx.isa, row, group, place, &mut row_scales, &mut row_sums);
                for (g, (scale, sum)) in row_scales.iter().zip(&row_sums).enumerate() {
                    (scales[g * tile_rows + r], sums[g * tile_rows + r]) = (*scale, *sum);
                }
                if waiting + 1 == ROWS_AT_ONCE || r + 1 == tile_rows {
                    let place = &mut data[(r - waiting) * QUAD..];
                    interleave_on(
                        ctx.isa,
                        &bytes[..(waiting + 1) * stride],
                        stride,
                        place,
                        tile_rows * QUAD,
                    );
                }
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::Isa;
    use crate::device::cpu::testing::{buffer, ctx, numbers};

    /// Values of a group are off by at most half of their own group's step, wherever they lie in a tile.
    #[test]
    fn each_group_has_its_scale_and_its_sum() {
        let mut first = None;
        for (isa, rows_max) in Isa::available().into_iter().flat_map(|isa| [(isa, 4), (isa, 12)]) {
            for (rows, width, group) in [(1, 7, 7usize), (3, 32, 8), (13, 96, 32), (6, 256, 128)] {
                let (groups, padded) = (width / group, group.next_multiple_of(OCTET));
                let mut values = numbers(1, rows * width);
                // Groups of several sizes: a scale of another group would not do.
                values
                    .iter_mut()
                    .enumerate()
                    .for_each(|(i, x)| *x *= (1 + i / group % 3 * 10) as f32);
                let x = buffer(&values, rows, width);
                let tiles = RowTiles::new(0..rows, rows_max);
                let mut out = GroupedRows::default();
                quantize(
                    ctx(isa),
                    Rows { x: &x, picked: None },
                    std::slice::from_ref(&tiles),
                    group,
                    &mut out,
                );
                for tile in 0..tiles.count {
                    let (start, count) = (tiles.start(tile), tiles.start(tile + 1) - tiles.start(tile));
                    for (r, g) in (0..count).flat_map(|r| (0..groups).map(move |g| (r, g))) {
                        let part = &x.row(start + r)[g * group..][..group];
                        let at = start * groups + g * count + r;
                        let max = part.iter().fold(0.0f32, |max, x| max.max(x.abs()));
                        assert_eq!(out.scales[at], max / 127.0);
                        let byte = |i: usize| {
                            let k = g * padded + i;
                            out.data[start * groups * padded + (k / QUAD * count + r) * QUAD + k % QUAD] as i8
                        };
                        for (i, x) in part.iter().enumerate() {
                            let back = f32::from(byte(i)) * out.scales[at];
                            assert!((back - x).abs() <= 0.5001 * out.scales[at], "{isa:?} {back} {x}");
                        }
                        assert!((group..padded).all(|i| byte(i) == 0));
                        assert_eq!(out.sums[at], -(0..group).map(|i| i32::from(byte(i))).sum::<i32>());
                    }
                }
                if (rows, rows_max) == (13, 4) {
                    assert!(*first.get_or_insert_with(|| out.data.to_vec()) == *out.data, "{isa:?}");
                }
            }
        }
    }

    #[test]
    fn a_group_that_is_not_finite_has_no_scale() {
        for isa in Isa::available() {
            let mut values = numbers(1, 24);
            values[9] = f32::INFINITY;
            values[16..].fill(0.0);
            let x = buffer(&values, 1, 24);
            let mut out = GroupedRows::default();
            quantize(
                ctx(isa),
                Rows { x: &x, picked: None },
                &[RowTiles::new(0..1, 4)],
                8,
                &mut out,
            );
            assert!(out.scales[0].is_finite() && out.scales[1].is_nan() && out.scales[2] == 0.0);
        }
    }
}
