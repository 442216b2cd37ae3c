//! Linear layers: `y = x W^T + b` over all rows of the step at once.
//!
//! Rows are packed into tiles: in F32 of at most 12 rows, `[k][rows of the tile]`. Each thread
//! takes a range of weight panels and, if there are too few panels, a range of tiles. Work is never
//! split over k: see [`tile`](super::tile).
//!
//! See docs/decisions/063-few-rows-stream-weights.md.

#![expect(unsafe_code, reason = "kernels take addresses of parts of a buffer")]

use std::ops::Range;

use super::matrix::{Int8Panels, Matrix, Pairs, Panels};
use super::tile::{Element, F32Gemm, PANEL, max_rows, panels_at_once, product};
use super::{bf16, int8};
use crate::device::Activation;
use crate::device::cpu::gated::{GatedTile, gated_tile_on};
use crate::device::cpu::math::round_bf16;
use crate::device::cpu::quantize::{Quantized, int8_tiles, quantize};
use crate::device::cpu::{Buffer, ExecContext, Isa, SharedMut, Threads};

/// Maximum values of k per call of the F32 kernel, so that the panels stay in the L2 cache.
const K_BLOCK: usize = 2048;
/// Maximum rows of an INT8 or BF16-pair tile.
const TILE_ROWS_MAX: usize = 32;
/// Bytes of one 32-bit lane per column of a panel: four INT8 values of k, or one BF16 pair, times
/// 16 columns.
const LANES: usize = 4 * PANEL;
/// Multiplications that take as long as one element of an element-wise operation.
const WORK_AN_ELEMENT: usize = 16;

/// The steps of a linear operation after the product.
#[derive(Clone, Copy)]
pub(crate) struct Epilogue<'a> {
    /// Added to each row of the output. At least as long as such a row.
    pub bias: Option<&'a [f32]>,
    /// Round results to BF16 values.
    pub round: bool,
}

/// Rows in the layout that a kernel reads, one field per format.
#[derive(Debug, Default)]
pub(crate) struct PackedRows {
    /// F32, tile by tile, each `[k][rows of the tile]`.
    tiles: Vec<f32>,
    /// BF16 bits, tile by tile, in the layout that [`bf16::is_packed`] reports.
    pairs: Vec<u16>,
    quantized: Quantized,
}

/// Division of rows into tiles, each small enough for one kernel call.
pub(crate) struct RowTiles {
    rows: usize,
    pub count: usize,
}

impl RowTiles {
    /// Tiles of at most `most` rows.
    pub(crate) fn new(rows: usize, most: usize) -> RowTiles {
        RowTiles {
            rows,
            count: rows.div_ceil(most),
        }
    }

    /// First row of tile `i`. The sizes of tiles differ by at most one row.
    pub(crate) fn start(&self, i: usize) -> usize {
        i * self.rows / self.count
    }

    /// Splits `data`, `width` elements per row, by tiles. Each item is a tile's first row and its
    /// part of `data`.
    pub(crate) fn split<'a, E>(&self, data: &'a mut [E], width: usize) -> impl Iterator<Item = (usize, &'a mut [E])> {
        let mut rest = data;
        (0..self.count).map(move |i| {
            let (from, to) = (self.start(i), self.start(i + 1));
            let (part, tail) = std::mem::take(&mut rest).split_at_mut((to - from) * width);
            rest = tail;
            (from, part)
        })
    }
}

/// Multiplies `x` by the first `width` rows of `matrix`; `out` becomes `[rows][width]`.
pub(crate) fn linear(
    on: ExecContext<'_>,
    matrix: &Matrix,
    width: usize,
    epilogue: Epilogue<'_>,
    x: &Buffer,
    out: &mut Buffer,
    packed: &mut PackedRows,
) {
    assert_eq!(x.width, matrix.columns);
    assert!(width <= matrix.rows && epilogue.bias.is_none_or(|b| b.len() >= width));
    out.reshape(x.rows, width);
    if x.rows == 0 || width == 0 {
        return;
    }
    match &matrix.panels {
        Panels::F32(p) => multiply(on, p, epilogue, x, out, &mut packed.tiles),
        Panels::Bf16(p) => multiply(on, p, epilogue, x, out, &mut packed.tiles),
        Panels::F16(p) => multiply(on, p, epilogue, x, out, &mut packed.tiles),
        Panels::Pairs(p) => multiply_pairs(on, p, epilogue, x, out, &mut packed.pairs),
        Panels::Int8(p) => multiply_int8(on, p, epilogue, x, out, &mut packed.quantized),
    }
}

fn pack(on: ExecContext<'_>, x: &Buffer, tiles: &RowTiles, packed: &mut Vec<f32>) {
    packed.resize(x.rows * x.width, 0.0);
    let mut parts: Vec<_> = tiles.split(packed, x.width).collect();
    on.threads.share_mut(x.data.len(), &mut parts, |_, parts| {
        for (from, part) in parts {
            let rows = part.len() / x.width.max(1);
            for r in 0..rows {
                for (k, &value) in x.row(*from + r).iter().enumerate() {
                    part[k * rows + r] = value;
                }
            }
        }
    });
}

fn multiply<E: Element>(
    on: ExecContext<'_>,
    panels: &[E],
    epilogue: Epilogue<'_>,
    x: &Buffer,
    out: &mut Buffer,
    packed: &mut Vec<f32>,
) {
    let k = x.width;
    let tiles = RowTiles::new(x.rows, max_rows(on.isa));
    pack(on, x, &tiles, packed);
    assert!(panels.len() >= out.width.div_ceil(PANEL) * k * PANEL && packed.len() >= tiles.rows * k);
    let group = panels_at_once(on.isa, tiles.rows.div_ceil(tiles.count));
    let width = out.width;
    let target = SharedMut::new(&mut out.data);
    for_blocks(on.threads, &tiles, group, k, width, |block| {
        // SAFETY: blocks own disjoint (rows, columns) of the output; sizes were asserted above.
        unsafe { block.run(on.isa, panels, packed, epilogue, &target) };
    });
}

fn multiply_int8(
    on: ExecContext<'_>,
    panels: &Int8Panels,
    epilogue: Epilogue<'_>,
    x: &Buffer,
    out: &mut Buffer,
    quantized: &mut Quantized,
) {
    let width = out.width;
    let columns = width.next_multiple_of(PANEL);
    assert!(panels.zeros.len() >= columns);
    let target = SharedMut::new(&mut out.data);
    for_int8_blocks(on, panels, width, x, quantized, |block, x| {
        let memory = (panels.data.as_ptr(), x.stride / int8::QUAD);
        let run = |range, bias, c, tile| {
            // SAFETY: the block vouches for the output and for the bias; sizes were asserted.
            unsafe { int8::product(on.isa, &block.product_int8(panels, range, bias, x, c), tile) };
        };
        // SAFETY: blocks own disjoint (rows, columns) of the output.
        unsafe { block.run_with_epilogue((epilogue.bias, &panels.zeros), memory, &target, run) };
    });
}

/// Packs the rows of `x` into tiles, rounded to BF16. Each row is padded with zeros to `depth`
/// values.
fn pack_pairs(on: ExecContext<'_>, x: &Buffer, tiles: &RowTiles, depth: usize, packed: &mut Vec<u16>) {
    packed.resize(x.rows * depth, 0);
    let mut parts: Vec<_> = tiles.split(packed, depth).collect();
    on.threads.share_mut(x.data.len(), &mut parts, |_, parts| {
        let mut row = vec![0; depth];
        for (from, part) in parts {
            let rows = part.len() / depth.max(1);
            for r in 0..rows {
                let values = x.row(*from + r);
                if !bf16::is_packed(on.isa) {
                    bf16::round_row_on(on.isa, values, &mut part[r * depth..][..depth]);
                    continue;
                }
                bf16::round_row_on(on.isa, values, &mut row);
                let places = part[r * bf16::PAIR..].chunks_mut(rows * bf16::PAIR);
                for (pair, place) in row.as_chunks::<{ bf16::PAIR }>().0.iter().zip(places) {
                    place[..bf16::PAIR].copy_from_slice(pair);
                }
            }
        }
    });
}

fn multiply_pairs(
    on: ExecContext<'_>,
    panels: &Pairs,
    epilogue: Epilogue<'_>,
    x: &Buffer,
    out: &mut Buffer,
    packed: &mut Vec<u16>,
) {
    let (width, depth) = (out.width, x.width.next_multiple_of(bf16::K_STEP));
    let tiles = RowTiles::new(x.rows, bf16::max_rows(on.isa));
    pack_pairs(on, x, &tiles, depth, packed);
    let columns = width.next_multiple_of(PANEL);
    assert!(
        panels.data.len() >= columns * depth && packed.len() >= tiles.rows * depth && panels.zeros.len() >= columns
    );
    let group = bf16::panels_at_once(on.isa, tiles.rows.div_ceil(tiles.count));
    let target = SharedMut::new(&mut out.data);
    for_blocks(on.threads, &tiles, group, depth, width, |block| {
        let memory = (panels.data.as_ptr().cast(), depth / bf16::PAIR);
        let run = |range: Range<usize>, bias, (c, c_stride), tile| {
            let product = bf16::Bf16Gemm {
                pairs: depth / bf16::PAIR,
                a: packed.as_ptr(),
                b: panels.data[range.start * depth * PANEL..].as_ptr().cast(),
                panel_stride: depth * PANEL,
                panels: range.len(),
                bias,
                round: epilogue.round,
                c,
                c_stride,
            };
            // SAFETY: the block vouches for the output and for the bias; sizes were asserted.
            unsafe { bf16::product(on.isa, &product, tile) };
        };
        // SAFETY: blocks own disjoint (rows, columns) of the output.
        unsafe { block.run_with_epilogue((epilogue.bias, &panels.zeros), memory, &target, run) };
    });
}

/// Quantizes `x` unless it is already quantized. Then calls `run` with the quantized rows for each
/// block of tiles and panels, over the first `width` columns of `panels`. Blocks start at an even
/// panel and end at an even panel or the last one, so that gate and up panels stay together.
fn for_int8_blocks(
    on: ExecContext<'_>,
    panels: &Int8Panels,
    width: usize,
    x: &Buffer,
    quantized: &mut Quantized,
    run: impl Fn(WorkBlock<'_>, &Quantized) + Sync,
) {
    let tiles = int8_tiles(on.isa, x.rows);
    let x = match &x.quantized {
        Some(x) => x,
        None => {
            quantize(on, x, quantized);
            &*quantized
        }
    };
    let columns = width.next_multiple_of(PANEL);
    assert!(panels.data.len() >= columns * x.stride && x.data.len() >= tiles.rows * x.stride);
    assert!(x.scales.len() >= tiles.rows && panels.scales.len() >= columns && panels.offsets.len() >= columns);
    let group = int8::panels_at_once(on.isa, tiles.rows.div_ceil(tiles.count)).max(2);
    for_blocks(on.threads, &tiles, group, x.stride, width, |block| run(block, x));
}

/// Multiplies `x` by a matrix of [`Matrix::pack_gated`] and writes `activation(gate) * up`,
/// `[rows][width]`, to `out`.
pub(crate) fn gated_int8(
    on: ExecContext<'_>,
    panels: &Int8Panels,
    (width, activation): (usize, Activation),
    bias: Option<&[f32]>,
    x: &Buffer,
    out: &mut Buffer,
    packed: &mut PackedRows,
) {
    out.reshape(x.rows, width);
    if x.rows == 0 || width == 0 {
        return;
    }
    let both = width.next_multiple_of(PANEL) * 2;
    // The bias in the panels' order.
    let bias: Option<Vec<f32>> = bias.map(|bias| {
        let at = |i: usize| i / (2 * PANEL) * PANEL + i % PANEL;
        let value = |i: usize| {
            if i / PANEL % 2 == 1 {
                bias[width + at(i)]
            } else {
                bias[at(i)]
            }
        };
        (0..both).map(|i| if at(i) < width { value(i) } else { 0.0 }).collect()
    });
    let bias = bias.as_deref().unwrap_or(&panels.zeros);
    assert!(bias.len() >= both);
    let target = SharedMut::new(&mut out.data);
    for_int8_blocks(on, panels, both, x, &mut packed.quantized, |block, x| {
        // SAFETY: blocks own disjoint (rows, columns) of the output; sizes were asserted.
        unsafe { block.run_gated(on.isa, activation, (panels, bias), x, (&target, width)) };
    });
}

/// Divides tiles and panels into blocks of at most `group` panels, and calls `run` for each block
/// on all threads.
fn for_blocks(
    threads: &Threads,
    tiles: &RowTiles,
    group: usize,
    k: usize,
    width: usize,
    run: impl Fn(WorkBlock<'_>) + Sync,
) {
    let count = width.div_ceil(PANEL);
    let groups = count.div_ceil(group);
    // Tiles are divided among tasks only if there are too few groups of panels.
    let wanted = threads.parts(tiles.rows * k * width / WORK_AN_ELEMENT);
    let column_tasks = groups.min(wanted);
    let row_tasks = (wanted / column_tasks).clamp(1, tiles.count);
    let task = |i: usize| {
        let (c, r) = (i % column_tasks, i / column_tasks);
        for g in c * groups / column_tasks..(c + 1) * groups / column_tasks {
            run(WorkBlock {
                k,
                panel: g * group..((g + 1) * group).min(count),
                tiles,
                range: r * tiles.count / row_tasks..(r + 1) * tiles.count / row_tasks,
                width,
            });
        }
    };
    threads.share(column_tasks * row_tasks, |_, tasks| tasks.for_each(task));
}

/// A unit of work: a range of tiles of rows, times one group of panels.
struct WorkBlock<'a> {
    k: usize,
    panel: Range<usize>,
    tiles: &'a RowTiles,
    range: Range<usize>,
    width: usize,
}

impl WorkBlock<'_> {
    /// First row and number of rows of each tile.
    fn tiles(&self) -> impl Iterator<Item = (usize, usize)> {
        self.range
            .clone()
            .map(|i| (self.tiles.start(i), self.tiles.start(i + 1) - self.tiles.start(i)))
    }

    /// The block's panels that lie fully within the output's width, and the number of columns of
    /// the partial panel after them (0 without one).
    fn whole_panels(&self) -> (Range<usize>, usize) {
        let full = (self.width / PANEL).clamp(self.panel.start, self.panel.end);
        (
            self.panel.start..full,
            if full < self.panel.end {
                self.width - full * PANEL
            } else {
                0
            },
        )
    }

    /// # Safety
    /// Nobody else touches this block's rows and columns of `out`, and all sizes fit.
    unsafe fn run<E: Element>(&self, isa: Isa, panels: &[E], packed: &[f32], epilogue: Epilogue<'_>, out: &SharedMut) {
        for (from, rows) in self.tiles() {
            // SAFETY: the caller upholds the same contract.
            unsafe { self.run_tile(isa, panels, packed, epilogue, (from, rows), out) };
        }
    }

    /// # Safety
    /// As [`run`](Self::run).
    unsafe fn run_tile<E: Element>(
        &self,
        isa: Isa,
        panels: &[E],
        packed: &[f32],
        epilogue: Epilogue<'_>,
        (from, rows): (usize, usize),
        out: &SharedMut,
    ) {
        let (whole, columns) = self.whole_panels();
        let first_column = self.panel.start * PANEL;
        // SAFETY: these panels lie within the output's width.
        unsafe {
            let c = out.at(from * self.width + first_column);
            self.sum(isa, panels, packed, (from, rows), whole.clone(), c, self.width);
        }
        if columns > 0 {
            // The last panel is wider than the rest of the output, so it is written through a
            // temporary tile.
            let mut tile = [0.0f32; 12 * PANEL];
            // SAFETY: the temporary tile has room for 12 rows of one panel.
            unsafe {
                let c = tile.as_mut_ptr();
                self.sum(isa, panels, packed, (from, rows), whole.end..self.panel.end, c, PANEL);
            }
            for r in 0..rows {
                // SAFETY: within this block's rows and columns.
                let row = unsafe { out.slice((from + r) * self.width + whole.end * PANEL, columns) };
                row.copy_from_slice(&tile[r * PANEL..r * PANEL + columns]);
            }
        }
        if epilogue.bias.is_none() && !epilogue.round {
            return;
        }
        let columns = (self.panel.end * PANEL).min(self.width) - first_column;
        for r in 0..rows {
            // SAFETY: within this block's rows and columns.
            let row = unsafe { out.slice((from + r) * self.width + first_column, columns) };
            if let Some(bias) = epilogue.bias {
                row.iter_mut().zip(&bias[first_column..]).for_each(|(y, b)| *y += b);
            }
            if epilogue.round {
                row.iter_mut().for_each(|y| *y = round_bf16(*y));
            }
        }
    }

    /// The product of `x` and the panels of `range`, to be written to `c`.
    fn product_int8(
        &self,
        panels: &Int8Panels,
        range: Range<usize>,
        bias: *const f32,
        x: &Quantized,
        (c, c_stride): (*mut f32, usize),
    ) -> int8::Int8Gemm {
        let column = range.start * PANEL;
        int8::Int8Gemm {
            quads: self.k / int8::QUAD,
            a: x.data.as_ptr(),
            b: panels.data[column * self.k..].as_ptr(),
            panel_stride: self.k * PANEL,
            panels: range.len(),
            row_scales: x.scales.as_ptr(),
            column_scales: panels.scales[column..].as_ptr(),
            offsets: panels.offsets[column..].as_ptr(),
            bias,
            c,
            c_stride,
        }
    }

    /// The block's tiles for the kernel, with prefetching: while the panels of `range` are
    /// multiplied, each tile prefetches its share of the panels that follow. A panel has `lanes`
    /// 32-bit lanes per column.
    fn tiles_with_prefetch(
        &self,
        range: &Range<usize>,
        (panels, lanes): (*const i8, usize),
    ) -> impl Iterator<Item = int8::RowTile> {
        let next = panels.wrapping_add(range.end * lanes * LANES);
        let step = (range.len() * LANES).div_ceil(self.range.len());
        self.tiles().enumerate().map(move |(i, (from, rows))| int8::RowTile {
            from,
            rows,
            prefetch: next.wrapping_add(i * step * lanes),
            prefetch_step: step,
        })
    }

    /// Computes gate and up panels, which alternate, and writes the gated activation to rows of
    /// `width` columns.
    ///
    /// # Safety
    /// As [`run`](Self::run).
    unsafe fn run_gated(
        &self,
        isa: Isa,
        activation: Activation,
        (panels, bias): (&Int8Panels, &[f32]),
        x: &Quantized,
        (out, width): (&SharedMut, usize),
    ) {
        let mut both = [[0.0f32; 2 * PANEL]; TILE_ROWS_MAX];
        let both_stride = self.panel.len() * PANEL;
        let bias = bias[self.panel.start * PANEL..].as_ptr();
        let product = self.product_int8(
            panels,
            self.panel.clone(),
            bias,
            x,
            (both.as_flattened_mut().as_mut_ptr(), 0),
        );
        let column = self.panel.start / 2 * PANEL;
        let columns = (self.panel.end / 2 * PANEL).min(width) - column;
        for tile in self.tiles_with_prefetch(&self.panel, (panels.data.as_ptr(), product.quads)) {
            assert!(tile.rows * both_stride <= both.as_flattened().len());
            let product = int8::Int8Gemm {
                // The kernel counts rows from the product's first row.
                c: both
                    .as_flattened_mut()
                    .as_mut_ptr()
                    .wrapping_sub(tile.from * both_stride),
                c_stride: both_stride,
                ..product
            };
            // SAFETY: `both` has room for the tile's rows of these panels; the output's rows and
            // columns belong to this block.
            unsafe { int8::product(isa, &product, tile) };
            let per_row = self.panel.len() / 2;
            gated_tile_on(
                isa,
                &GatedTile {
                    activation,
                    pairs: &both[..tile.rows * per_row],
                    per_row,
                    out: out.at(tile.from * width + column),
                    stride: width,
                    columns,
                },
            );
        }
    }

    /// Runs a kernel that adds the bias itself: `run(panels, bias, (c, stride), tile)`. `memory` is
    /// the start of the matrix and the number of 32-bit lanes per column of a panel.
    ///
    /// # Safety
    /// As [`run`](Self::run).
    unsafe fn run_with_epilogue(
        &self,
        (bias, zeros): (Option<&[f32]>, &[f32]),
        memory: (*const i8, usize),
        out: &SharedMut,
        run: impl Fn(Range<usize>, *const f32, (*mut f32, usize), int8::RowTile),
    ) {
        let (whole, columns) = self.whole_panels();
        if !whole.is_empty() {
            let column = whole.start * PANEL;
            // These panels lie within the output's width, and so within the bias.
            let bias = bias.unwrap_or(zeros)[column..].as_ptr();
            for tile in self.tiles_with_prefetch(&whole, memory) {
                run(whole.clone(), bias, (out.at(column), self.width), tile);
            }
        }
        if columns > 0 {
            // The last panel is wider than the rest of the output and of the bias, so both go
            // through temporary memory.
            let mut last = [0.0f32; PANEL];
            if let Some(bias) = bias {
                last[..columns].copy_from_slice(&bias[whole.end * PANEL..][..columns]);
            }
            for tile in self.tiles_with_prefetch(&(whole.end..self.panel.end), memory) {
                let mut end = [0.0f32; TILE_ROWS_MAX * PANEL];
                // The kernel counts rows from the product's first row.
                let c = end.as_mut_ptr().wrapping_sub(tile.from * PANEL);
                run(whole.end..self.panel.end, last.as_ptr(), (c, PANEL), tile);
                for r in 0..tile.rows {
                    // SAFETY: within this block's rows and columns.
                    let row = unsafe { out.slice((tile.from + r) * self.width + whole.end * PANEL, columns) };
                    row.copy_from_slice(&end[r * PANEL..r * PANEL + columns]);
                }
            }
        }
    }

    /// Sums over all of k into `c`.
    ///
    /// # Safety
    /// `c` has room for these rows of these panels.
    #[allow(clippy::too_many_arguments)]
    unsafe fn sum<E: Element>(
        &self,
        isa: Isa,
        panels: &[E],
        packed: &[f32],
        (from, rows): (usize, usize),
        range: Range<usize>,
        c: *mut f32,
        c_stride: usize,
    ) {
        if range.is_empty() {
            return;
        }
        let mut k = 0;
        loop {
            let depth = (self.k - k).min(K_BLOCK);
            // SAFETY: `packed` holds `k * rows` numbers of this tile, and `panels` holds `k * 16`
            // numbers of each panel.
            unsafe {
                product(
                    isa,
                    F32Gemm {
                        k: depth,
                        rows,
                        a: packed.as_ptr().add(from * self.k + k * rows),
                        b: panels.as_ptr().add((range.start * self.k + k) * PANEL),
                        panel_stride: self.k * PANEL,
                        panels: range.len(),
                        c,
                        c_stride,
                        accumulate: k > 0,
                    },
                );
            }
            k += depth;
            if k >= self.k {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::testing::{buffer, bytes_of, numbers, on, on_threads};
    use crate::device::{Dtype, Precision, Tensor};

    /// The output of a linear operation on `x`.
    fn product_of(on: ExecContext<'_>, matrix: &Matrix, width: usize, epilogue: Epilogue<'_>, x: &Buffer) -> Buffer {
        let mut out = Buffer::default();
        linear(on, matrix, width, epilogue, x, &mut out, &mut PackedRows::default());
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
            round: false,
        };
        let out = product_of(on_threads(isa, threads), &matrix, n, epilogue, &x);
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
    fn matches_the_plain_sum_in_the_same_bits_everywhere() {
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
    fn eight_bits_give_the_same_bits_everywhere_and_are_close() {
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
                    round: false,
                };
                let out = product_of(on_threads(isa, threads), &matrix, width, epilogue, &x);
                let all = first.get_or_insert_with(|| out.data.clone());
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
            let most = weights[(n - 1) * k..].iter().fold(0.0f32, |most, w| most.max(w.abs()));
            for (got, want) in row.iter().zip(&weights[(n - 1) * k..]) {
                assert!((got - want).abs() <= 0.501 * most / 127.0, "{got} {want}");
            }
        }
    }

    #[test]
    fn pairs_give_a_row_the_same_bits_in_any_batch_and_are_close() {
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
                let matrix = Matrix::pack_pairs(&[tensor]).unwrap();
                let run = |threads, width, round, values: &[f32]| {
                    let epilogue = Epilogue {
                        bias: Some(&bias),
                        round,
                    };
                    let x = buffer(values, values.len() / k, k);
                    product_of(on_threads(isa, threads), &matrix, width, epilogue, &x)
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
    fn long_sums_go_over_blocks_and_rows_do_not_see_each_other() {
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
                round: false,
            };
            let out = product_of(on(Isa::detect()), &matrix, n, epilogue, &one);
            let bits: Vec<u32> = out.data.iter().map(|x| x.to_bits()).collect();
            assert_eq!(bits, whole[i * n..(i + 1) * n], "row {i}");
        }
    }

    #[test]
    fn a_narrower_output_leaves_the_last_rows_of_the_matrix_out() {
        let data = bytes_of(&numbers(1, 20 * 4), Dtype::F32);
        let tensor = Tensor {
            dtype: Dtype::F32,
            rows: 20,
            columns: 4,
            data: &data,
        };
        let matrix = Matrix::pack(&[tensor], Precision::F32).unwrap();
        let x = buffer(&numbers(2, 2 * 4), 2, 4);
        let epilogue = Epilogue {
            bias: None,
            round: false,
        };
        let all = product_of(on(Isa::detect()), &matrix, 20, epilogue, &x);
        let some = product_of(on(Isa::detect()), &matrix, 18, epilogue, &x);
        assert_eq!(some.width, 18);
        for i in 0..2 {
            assert_eq!(some.row(i), &all.row(i)[..18]);
        }
    }
}
