//! Linear layers: `y = x W^T + b` over all rows of the step at once, or over runs of rows
//! (segments) that each have a matrix of their own.
//!
//! Rows are packed into tiles. F32 tiles have at most 12 rows, `[k][rows of the tile]`. The work is
//! divided by ranges of weight panels and, if these are too few, also by ranges of tiles. It is
//! never divided over k: see [`tile`](super::tile).
//!
//! See docs/decisions/063-few-rows-stream-weights.md.

#![expect(unsafe_code, reason = "kernels take addresses of parts of a buffer")]

use std::borrow::Cow;
use std::ops::Range;

use super::blocks::{PanelMemory, WorkBlock, for_blocks};
use super::low_rank::Added;
use super::matrix::{Int8Panels, Matrix, Panels};
use super::row_tiles::{RowTiles, split_by_tiles};
use super::tile::{PANEL, max_rows, panels_at_once};
use super::{bf16, int8, linear_int4};
use crate::device::Activation;
use crate::device::cpu::quantize::{Quantized, int8_tiles, quantize};
use crate::device::cpu::quantize_groups::GroupedRows;
use crate::device::cpu::reused::Reused;
use crate::device::cpu::{Buffer, ExecContext, SharedMut};

/// The operations of a linear layer after the matmul.
#[derive(Clone, Copy, Default)]
pub(crate) struct Epilogue<'a> {
    /// Added to each row of the output; at least as long as a row.
    pub bias: Option<&'a [f32]>,
    /// What adapters add.
    pub added: Option<&'a Added<'a>>,
    /// Round results to BF16 values.
    pub round_to_bf16: bool,
}

/// A run of rows and the matrix by which they are multiplied. The matrices of all segments of a
/// product have one shape.
pub(crate) struct Segment<'a> {
    pub rows: Range<usize>,
    pub matrix: &'a Matrix,
    /// At least as long as a row of the output, or of both factors of a gated activation.
    pub bias: Option<&'a [f32]>,
    /// What adapters add to these rows.
    pub added: Option<&'a Added<'a>>,
}

/// The rows of a product.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a> {
    pub x: &'a Buffer,
    /// The rows of `x`, in order; the same row may occur several times. `None`: all of them.
    pub picked: Option<&'a [u32]>,
}

impl<'a> Rows<'a> {
    pub(super) fn count(&self) -> usize {
        self.picked.map_or(self.x.rows, <[u32]>::len)
    }

    pub(crate) fn row(&self, i: usize) -> &'a [f32] {
        self.x.row(self.picked.map_or(i, |picked| picked[i] as usize))
    }
}

/// Rows in the layout that a kernel reads, one field per format.
#[derive(Debug, Default)]
pub(crate) struct PackedRows {
    /// F32, tile by tile, each `[k][rows of the tile]`.
    f32_tiles: Reused<f32>,
    /// BF16 bits, tile by tile, in the layout that [`bf16::interleaves_rows`] describes.
    bf16_pairs: Reused<u16>,
    quantized: Quantized,
    grouped: GroupedRows,
}

/// Multiplies `x` by the first `width` rows of `matrix`; `out` becomes `[rows][width]`.
pub(crate) fn linear(
    ctx: ExecContext<'_>,
    matrix: &Matrix,
    width: usize,
    epilogue: Epilogue<'_>,
    x: &Buffer,
    out: &mut Buffer,
    packed: &mut PackedRows,
) {
    let segment = Segment {
        rows: 0..x.rows,
        matrix,
        bias: epilogue.bias,
        added: epilogue.added,
    };
    let rows = Rows { x, picked: None };
    grouped_linear(ctx, &[segment], width, epilogue.round_to_bf16, rows, out, packed);
}

/// Multiplies the rows of each segment by the first `width` rows of the segment's matrix. The
/// segments follow each other and cover all rows; none is empty unless there are no rows.
pub(crate) fn grouped_linear(
    ctx: ExecContext<'_>,
    segments: &[Segment<'_>],
    width: usize,
    round_to_bf16: bool,
    rows: Rows<'_>,
    out: &mut Buffer,
    packed: &mut PackedRows,
) {
    check_segments(segments, rows);
    for segment in segments {
        assert!(width <= segment.matrix.rows && segment.bias.is_none_or(|b| b.len() >= width));
    }
    out.reshape(rows.count(), width);
    if rows.count() == 0 || width == 0 {
        return;
    }
    match &segments[0].matrix.panels {
        Panels::F32(_) | Panels::Bf16(_) | Panels::F16(_) => {
            multiply(ctx, segments, round_to_bf16, rows, out, &mut packed.f32_tiles);
        }
        Panels::Bf16Pairs(_) => multiply_bf16_pairs(ctx, segments, round_to_bf16, rows, out, &mut packed.bf16_pairs),
        Panels::Int8(_) => multiply_int8(ctx, segments, rows, out, &mut packed.quantized),
        Panels::Int4(_) => linear_int4::multiply(ctx, segments, rows, out, &mut packed.grouped),
    }
}

fn check_segments(segments: &[Segment<'_>], rows: Rows<'_>) {
    let mut next = 0;
    for segment in segments {
        assert_eq!((segment.rows.start, segment.matrix.columns), (next, rows.x.width));
        next = segment.rows.end;
    }
    assert_eq!(next, rows.count());
}

fn row_tiles(segments: &[Segment<'_>], rows_max: usize) -> Vec<RowTiles> {
    let tiles = |segment: &Segment<'_>| RowTiles::new(segment.rows.clone(), rows_max);
    segments.iter().map(tiles).collect()
}

fn pack(ctx: ExecContext<'_>, rows: Rows<'_>, tiles: &[RowTiles], packed: &mut Reused<f32>) {
    let width = rows.x.width;
    packed.set_len(rows.count() * width);
    let elements = packed.len();
    let mut parts: Vec<_> = split_by_tiles(tiles, packed, width).collect();
    ctx.threads.parallel_for_each(elements, &mut parts, |_, parts| {
        for (first_row, part) in parts {
            let tile_rows = part.len() / width.max(1);
            for r in 0..tile_rows {
                for (k, &value) in rows.row(*first_row + r).iter().enumerate() {
                    part[k * tile_rows + r] = value;
                }
            }
        }
    });
}

fn multiply(
    ctx: ExecContext<'_>,
    segments: &[Segment<'_>],
    round_to_bf16: bool,
    rows: Rows<'_>,
    out: &mut Buffer,
    packed: &mut Reused<f32>,
) {
    let (k, width) = (rows.x.width, out.width);
    let tiles = row_tiles(segments, max_rows(ctx.isa));
    pack(ctx, rows, &tiles, packed);
    assert!(packed.len() >= rows.count() * k);
    let target = SharedMut::new(&mut out.data);
    for_blocks(
        ctx.threads,
        &tiles,
        |rows| panels_at_once(ctx.isa, rows),
        (k, width),
        |segment, block| {
            let Segment {
                matrix, bias, added, ..
            } = &segments[segment];
            let epilogue = Epilogue {
                bias: *bias,
                added: *added,
                round_to_bf16,
            };
            // SAFETY: blocks own disjoint (rows, columns) of the output; `run` checks the panels'
            // size, and that of the rows was asserted above.
            unsafe {
                match &matrix.panels {
                    Panels::F32(p) => block.run(ctx.isa, p, packed, epilogue, &target),
                    Panels::Bf16(p) => block.run(ctx.isa, p, packed, epilogue, &target),
                    Panels::F16(p) => block.run(ctx.isa, p, packed, epilogue, &target),
                    Panels::Bf16Pairs(_) | Panels::Int8(_) | Panels::Int4(_) => {
                        unreachable!("the matrices of one product are for one kernel")
                    }
                }
            }
        },
    );
}

fn multiply_int8(
    ctx: ExecContext<'_>,
    segments: &[Segment<'_>],
    rows: Rows<'_>,
    out: &mut Buffer,
    quantized: &mut Quantized,
) {
    let width = out.width;
    let columns = width.next_multiple_of(PANEL);
    let target = SharedMut::new(&mut out.data);
    for_int8_blocks(ctx, segments, width, rows, quantized, |segment, panels, block, x| {
        assert!(panels.zero_bias.len() >= columns);
        let memory = PanelMemory {
            start: panels.data.as_ptr(),
            lanes: x.stride / int8::QUAD,
        };
        let run = |range, bias, c, tile| {
            // SAFETY: the block guarantees output and bias; sizes were asserted.
            unsafe { int8::matmul(ctx.isa, &panels.gemm(range, bias, x, c), tile) };
        };
        let Segment { bias, added, .. } = segments[segment];
        // SAFETY: blocks own disjoint (rows, columns) of the output.
        unsafe { block.run_with_epilogue(ctx.isa, (bias, &panels.zero_bias, added), memory, &target, run) };
    });
}

/// Packs rows into tiles, rounded to BF16. Each row is padded with zeros to `depth` values.
fn pack_bf16_pairs(ctx: ExecContext<'_>, rows: Rows<'_>, tiles: &[RowTiles], depth: usize, packed: &mut Reused<u16>) {
    packed.set_len(rows.count() * depth);
    let elements = packed.len();
    let mut parts: Vec<_> = split_by_tiles(tiles, packed, depth).collect();
    ctx.threads.parallel_for_each(elements, &mut parts, |_, parts| {
        let mut row = vec![0; depth];
        for (first_row, part) in parts {
            let tile_rows = part.len() / depth.max(1);
            for r in 0..tile_rows {
                let values = rows.row(*first_row + r);
                if !bf16::interleaves_rows(ctx.isa) {
                    bf16::round_row_on(ctx.isa, values, &mut part[r * depth..][..depth]);
                    continue;
                }
                bf16::round_row_on(ctx.isa, values, &mut row);
                let (pairs, slots) = (row.as_chunks::<{ bf16::PAIR }>().0, part.as_chunks_mut().0);
                for i in 0..pairs.len() {
                    slots[i * tile_rows + r] = pairs[i];
                }
            }
        }
    });
}

fn multiply_bf16_pairs(
    ctx: ExecContext<'_>,
    segments: &[Segment<'_>],
    round_to_bf16: bool,
    rows: Rows<'_>,
    out: &mut Buffer,
    packed: &mut Reused<u16>,
) {
    let (width, depth) = (out.width, rows.x.width.next_multiple_of(bf16::K_STEP));
    let tiles = row_tiles(segments, bf16::max_rows(ctx.isa));
    pack_bf16_pairs(ctx, rows, &tiles, depth, packed);
    let columns = width.next_multiple_of(PANEL);
    assert!(packed.len() >= rows.count() * depth);
    let target = SharedMut::new(&mut out.data);
    for_blocks(
        ctx.threads,
        &tiles,
        |rows| bf16::panels_at_once(ctx.isa, rows),
        (depth, width),
        |segment, block| {
            let Panels::Bf16Pairs(panels) = &segments[segment].matrix.panels else {
                unreachable!("the matrices of one product are for one kernel")
            };
            assert!(panels.data.len() >= columns * depth && panels.zero_bias.len() >= columns);
            let memory = PanelMemory {
                start: panels.data.as_ptr().cast(),
                lanes: depth / bf16::PAIR,
            };
            let run = |range: Range<usize>, bias, (c, c_stride), tile| {
                let gemm = bf16::Bf16Gemm {
                    pairs: depth / bf16::PAIR,
                    a: packed.as_ptr(),
                    b: panels.data[range.start * depth * PANEL..].as_ptr().cast(),
                    panel_stride: depth * PANEL,
                    panels: range.len(),
                    bias,
                    round_to_bf16,
                    c,
                    c_stride,
                };
                // SAFETY: the block guarantees output and bias; sizes were asserted above.
                unsafe { bf16::matmul(ctx.isa, &gemm, tile) };
            };
            let Segment { bias, added, .. } = segments[segment];
            // SAFETY: blocks own disjoint (rows, columns) of the output.
            unsafe { block.run_with_epilogue(ctx.isa, (bias, &panels.zero_bias, added), memory, &target, run) };
        },
    );
}

/// Quantizes the rows unless they are already quantized, then calls `run` with the quantized rows
/// for each block of tiles and panels of a segment. The blocks cover the first `width` columns of
/// the panels. Each block starts at an even panel and has an even number of panels (except the
/// last), so that gate and up panels stay together.
fn for_int8_blocks(
    ctx: ExecContext<'_>,
    segments: &[Segment<'_>],
    width: usize,
    rows: Rows<'_>,
    quantized: &mut Quantized,
    run: impl Fn(usize, &Int8Panels, WorkBlock<'_>, &Quantized) + Sync,
) {
    let tiles: Vec<_> = segments
        .iter()
        .map(|segment| int8_tiles(ctx.isa, segment.rows.clone()))
        .collect();
    let quantized_before = || segments[0].added.and_then(Added::quantized);
    let x = match rows.x.quantized().or_else(quantized_before) {
        Some(x) => {
            // Quantized rows lie in the tiles of one segment, in order.
            assert!(segments.len() == 1 && rows.picked.is_none());
            x
        }
        None => {
            quantize(ctx, rows, &tiles, quantized);
            &*quantized
        }
    };
    let columns = width.next_multiple_of(PANEL);
    assert!(x.data.len() >= rows.count() * x.stride && x.scales.len() >= rows.count());
    for_blocks(
        ctx.threads,
        &tiles,
        |rows| int8::panels_at_once(ctx.isa, rows).max(2),
        (x.stride, width),
        |segment, block| {
            let Panels::Int8(panels) = &segments[segment].matrix.panels else {
                unreachable!("the matrices of one product are for one kernel")
            };
            assert!(panels.data.len() >= columns * x.stride);
            assert!(panels.scales.len() >= columns && panels.offsets.len() >= columns);
            run(segment, panels, block, x);
        },
    );
}

/// Multiplies the rows of each segment by a matrix of [`Matrix::pack_gated`] or [`Matrix::pack_gated_codes`] and writes
/// `activation(gate) * up`, `[rows][width]`, to `out`. Segments are as in [`grouped_linear`].
pub(crate) fn gated_panels(
    ctx: ExecContext<'_>,
    segments: &[Segment<'_>],
    (width, activation): (usize, Activation),
    rows: Rows<'_>,
    out: &mut Buffer,
    packed: &mut PackedRows,
) {
    check_segments(segments, rows);
    out.reshape(rows.count(), width);
    if rows.count() == 0 || width == 0 {
        return;
    }
    if let Panels::Int4(_) = &segments[0].matrix.panels {
        return linear_int4::gated(ctx, segments, (width, activation), rows, out, &mut packed.grouped);
    }
    let panel_columns = width.next_multiple_of(PANEL) * 2;
    let biases = gated_biases(segments, width, panel_columns);
    let target = SharedMut::new(&mut out.data);
    let quantized = &mut packed.quantized;
    for_int8_blocks(
        ctx,
        segments,
        panel_columns,
        rows,
        quantized,
        |segment, panels, block, x| {
            let bias: &[f32] = &biases[segment];
            let memory = PanelMemory {
                start: panels.data.as_ptr(),
                lanes: x.stride / int8::QUAD,
            };
            let run = |range, bias, c, tile| {
                // SAFETY: the block guarantees its memory; sizes were asserted.
                unsafe { int8::matmul(ctx.isa, &panels.gemm(range, bias, x, c), tile) };
            };
            let added = segments[segment].added;
            // SAFETY: blocks own disjoint (rows, columns) of the output; sizes were asserted.
            unsafe { block.run_gated(ctx.isa, activation, (bias, added, memory), (&target, width), run) };
        },
    );
}

/// The biases of a gated operation's segments, in the order of the panels.
pub(super) fn gated_biases<'a>(segments: &'a [Segment<'_>], width: usize, panel_columns: usize) -> Vec<Cow<'a, [f32]>> {
    let biases: Vec<Cow<'_, [f32]>> = segments
        .iter()
        .map(|segment| match segment.bias {
            Some(bias) => Cow::Owned(gated_bias(bias, width, panel_columns)),
            None => Cow::Borrowed(segment.matrix.zero_bias()),
        })
        .collect();
    assert!(biases.iter().all(|bias| bias.len() >= panel_columns));
    biases
}

/// The bias of a gated operation, `[gate][up]`, in the order of the panels.
fn gated_bias(bias: &[f32], width: usize, panel_columns: usize) -> Vec<f32> {
    let feature = |i: usize| i / (2 * PANEL) * PANEL + i % PANEL;
    let value = |i: usize| {
        if i / PANEL % 2 == 1 {
            bias[width + feature(i)]
        } else {
            bias[feature(i)]
        }
    };
    (0..panel_columns)
        .map(|i| if feature(i) < width { value(i) } else { 0.0 })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::blocks::K_BLOCK;
    use super::*;
    use crate::device::cpu::Isa;
    use crate::device::cpu::math::round_bf16;
    use crate::device::cpu::testing::{buffer, bytes_of, ctx, ctx_with_threads, numbers};
    use crate::device::{Dtype, Precision, Tensor};

    /// The output of a linear operation on `x`.
    fn product_of(ctx: ExecContext<'_>, matrix: &Matrix, width: usize, epilogue: Epilogue<'_>, x: &Buffer) -> Buffer {
        let mut out = Buffer::default();
        linear(ctx, matrix, width, epilogue, x, &mut out, &mut PackedRows::default());
        out
    }

    fn check(isa: Isa, threads: usize, m: usize, n: usize, k: usize, dtype: Dtype, with_bias: bool) -> Vec<u32> {
        let data = bytes_of(&numbers(n as u64, n * k), dtype);
        let matrix = Matrix::pack(
            &[Tensor {
                dtype,
                rows: n,
                columns: k,
                data: &data,
            }],
            Precision::F32,
        )
        .unwrap();
        let x = buffer(&numbers(k as u64, m * k), m, k);
        let bias = numbers(7, n);
        let epilogue = Epilogue {
            bias: with_bias.then_some(&bias[..]),
            added: None,
            round_to_bf16: false,
        };
        let out = product_of(ctx_with_threads(isa, threads), &matrix, n, epilogue, &x);
        let mut row = vec![0.0; k];
        for (j, bias) in bias.iter().enumerate() {
            matrix.read_row(j, &mut row);
            for i in 0..m {
                let want: f64 = x
                    .row(i)
                    .iter()
                    .zip(&row)
                    .map(|(a, b)| *a as f64 * *b as f64)
                    .sum::<f64>()
                    + if with_bias { *bias as f64 } else { 0.0 };
                let got = out.row(i)[j] as f64;
                let bound = 1e-5 * (k as f64).sqrt().max(1.0);
                assert!(
                    (got - want).abs() <= bound,
                    "{isa:?} {m}x{n}x{k} {dtype:?} at ({i}, {j}): {got} not {want}"
                );
            }
        }
        out.data.iter().map(|x| x.to_bits()).collect()
    }

    #[test]
    fn results_match_f64_and_are_bit_identical_on_all_sets() {
        for (m, n, k) in [
            (1, 1, 1),
            (1, 15, 16),
            (2, 16, 17),
            (11, 17, 33),
            (12, 31, 8),
            (13, 129, 40),
            (25, 300, 5),
        ] {
            for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
                let all: Vec<_> = Isa::available()
                    .into_iter()
                    .flat_map(|isa| [1, 2].map(|threads| check(isa, threads, m, n, k, dtype, n % 2 == 1)))
                    .collect();
                assert!(
                    all.iter().all(|bits| bits == &all[0]),
                    "bits differ at {m}x{n}x{k} {dtype:?}"
                );
            }
        }
    }

    #[test]
    fn int8_is_close_and_bit_identical_on_all_sets() {
        for (m, n, k) in [(1, 1, 1), (2, 16, 17), (13, 129, 40), (25, 300, 130), (64, 33, 512)] {
            let weights = numbers(1, n * k);
            let data = bytes_of(&weights, Dtype::F32);
            let tensor = Tensor {
                dtype: Dtype::F32,
                rows: n,
                columns: k,
                data: &data,
            };
            let matrix = Matrix::pack(&[tensor], Precision::Int8).unwrap();
            let (values, bias) = (numbers(2, m * k), numbers(3, n));
            let x = buffer(&values, m, k);
            let mut first: Option<Vec<f32>> = None;
            for (isa, threads, width) in Isa::available()
                .into_iter()
                .flat_map(|isa| [(isa, 1, n), (isa, 2, n), (isa, 2, n.div_ceil(2))])
            {
                let epilogue = Epilogue {
                    bias: Some(&bias),
                    added: None,
                    round_to_bf16: false,
                };
                let out = product_of(ctx_with_threads(isa, threads), &matrix, width, epilogue, &x);
                let all = first.get_or_insert_with(|| out.data.to_vec());
                for i in 0..m {
                    assert_eq!(out.row(i), &all[i * n..][..width], "{isa:?} {m}x{n}x{k} row {i}");
                }
            }
            // Each factor is off by at most half a quantization step, over k products.
            let bound = 1.2 * (k as f64).sqrt() / 127.0;
            for (i, got) in first.unwrap().into_iter().enumerate() {
                let (row, column) = (i / n, i % n);
                let want: f64 = (0..k)
                    .map(|j| f64::from(values[row * k + j]) * f64::from(weights[column * k + j]))
                    .sum::<f64>()
                    + f64::from(bias[column]);
                assert!(
                    (f64::from(got) - want).abs() <= bound,
                    "{m}x{n}x{k} at {i}: {got} not {want}"
                );
            }
            let mut row = vec![0.0; k];
            matrix.read_row(n - 1, &mut row);
            let max_abs = weights[(n - 1) * k..].iter().fold(0.0f32, |max, w| max.max(w.abs()));
            for (got, want) in row.iter().zip(&weights[(n - 1) * k..]) {
                assert!((got - want).abs() <= 0.501 * max_abs / 127.0, "{got} {want}");
            }
        }
    }

    #[test]
    fn bf16_pairs_are_close_and_rows_are_bit_identical_in_any_batch() {
        for isa in Isa::available().into_iter().filter(|isa| bf16::is_available(*isa)) {
            for (m, n, k) in [(1, 1, 1), (2, 16, 17), (13, 129, 40), (30, 300, 130), (64, 33, 515)] {
                let (values, weights, bias) = (numbers(1, m * k), numbers(2, n * k), numbers(3, n));
                let data = bytes_of(&weights, Dtype::F32);
                let tensor = Tensor {
                    dtype: Dtype::F32,
                    rows: n,
                    columns: k,
                    data: &data,
                };
                let matrix = Matrix::pack_bf16_pairs(&[tensor]).unwrap();
                let run = |threads, width, round_to_bf16, values: &[f32]| {
                    let epilogue = Epilogue {
                        bias: Some(&bias),
                        added: None,
                        round_to_bf16,
                    };
                    let x = buffer(values, values.len() / k, k);
                    product_of(ctx_with_threads(isa, threads), &matrix, width, epilogue, &x)
                };
                let whole = run(2, n, false, &values);
                for (i, got) in whole.data.iter().enumerate() {
                    let (row, column) = (i / n, i % n);
                    let product = |j: usize| {
                        f64::from(round_bf16(values[row * k + j])) * f64::from(round_bf16(weights[column * k + j]))
                    };
                    let want = (0..k).map(product).sum::<f64>() + f64::from(bias[column]);
                    assert!(
                        (f64::from(*got) - want).abs() <= 1e-5 * (k as f64).sqrt(),
                        "{isa:?} {m}x{n}x{k} at {i}: {got} not {want}"
                    );
                }
                let rounded: Vec<f32> = whole.data.iter().map(|x| round_bf16(*x)).collect();
                assert_eq!(run(1, n, true, &values).data, rounded, "{isa:?} {m}x{n}x{k}");
                for (i, row) in values.chunks(k).enumerate() {
                    let alone = run(1, n.div_ceil(2), false, row);
                    assert_eq!(alone.data, whole.row(i)[..n.div_ceil(2)], "{isa:?} {m}x{n}x{k} row {i}");
                }
            }
        }
    }

    #[test]
    fn sums_longer_than_a_k_block_are_independent_of_other_rows() {
        let (m, n, k) = (30, 40, K_BLOCK + 3);
        let whole = check(Isa::detect(), 2, m, n, k, Dtype::Bf16, true);
        let data = bytes_of(&numbers(n as u64, n * k), Dtype::Bf16);
        let tensor = Tensor {
            dtype: Dtype::Bf16,
            rows: n,
            columns: k,
            data: &data,
        };
        let matrix = Matrix::pack(&[tensor], Precision::F32).unwrap();
        let x = numbers(k as u64, m * k);
        let bias = numbers(7, n);
        for i in 0..m {
            let one = buffer(&x[i * k..(i + 1) * k], 1, k);
            let epilogue = Epilogue {
                bias: Some(&bias),
                added: None,
                round_to_bf16: false,
            };
            let out = product_of(ctx(Isa::detect()), &matrix, n, epilogue, &one);
            let bits: Vec<u32> = out.data.iter().map(|x| x.to_bits()).collect();
            assert_eq!(bits, whole[i * n..(i + 1) * n], "row {i}");
        }
    }

    #[test]
    fn a_narrower_output_omits_the_last_rows_of_the_matrix() {
        let data = bytes_of(&numbers(1, 20 * 4), Dtype::F32);
        let tensor = Tensor {
            dtype: Dtype::F32,
            rows: 20,
            columns: 4,
            data: &data,
        };
        let matrix = Matrix::pack(&[tensor], Precision::F32).unwrap();
        let x = buffer(&numbers(2, 2 * 4), 2, 4);
        let epilogue = Epilogue::default();
        let all = product_of(ctx(Isa::detect()), &matrix, 20, epilogue, &x);
        let some = product_of(ctx(Isa::detect()), &matrix, 18, epilogue, &x);
        assert_eq!(some.width, 18);
        for i in 0..2 {
            assert_eq!(some.row(i), &all.row(i)[..18]);
        }
    }
}
