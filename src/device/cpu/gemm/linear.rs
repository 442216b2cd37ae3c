//! Linear layers: `y = x W^T + b` over all rows of the step at once.
//!
//! Rows are packed into tiles. F32 tiles have at most 12 rows, `[k][rows of the tile]`. The work is
//! divided by ranges of weight panels and, if these are too few, also by ranges of tiles. It is
//! never divided over k: see [`tile`](super::tile).
//!
//! See docs/decisions/063-few-rows-stream-weights.md.

#![expect(unsafe_code, reason = "kernels take addresses of parts of a buffer")]

use std::ops::Range;

use super::matrix::{Bf16PairPanels, Int8Panels, Matrix, Panels};
use super::row_tiles::RowTiles;
use super::tile::{Element, F32Gemm, PANEL, matmul, max_rows, panels_at_once};
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
/// Bytes of 16 lanes of 32 bits, one per column of a panel. A lane holds four INT8 values of k, or
/// one BF16 pair.
const PANEL_LANE_BYTES: usize = 4 * PANEL;
/// Number of multiplications that take as long as one element of an element-wise operation.
const MULTIPLICATIONS_PER_ELEMENT: usize = 16;

/// The operations of a linear layer after the matmul.
#[derive(Clone, Copy)]
pub(crate) struct Epilogue<'a> {
    /// Added to each row of the output; at least as long as a row.
    pub bias: Option<&'a [f32]>,
    /// Round results to BF16 values.
    pub round_to_bf16: bool,
}

/// Rows in the layout that a kernel reads, one field per format.
#[derive(Debug, Default)]
pub(crate) struct PackedRows {
    /// F32, tile by tile, each `[k][rows of the tile]`.
    f32_tiles: Vec<f32>,
    /// BF16 bits, tile by tile, in the layout that [`bf16::interleaves_rows`] describes.
    bf16_pairs: Vec<u16>,
    quantized: Quantized,
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
    assert_eq!(x.width, matrix.columns);
    assert!(width <= matrix.rows && epilogue.bias.is_none_or(|b| b.len() >= width));
    out.reshape(x.rows, width);
    if x.rows == 0 || width == 0 {
        return;
    }
    match &matrix.panels {
        Panels::F32(p) => multiply(ctx, p, epilogue, x, out, &mut packed.f32_tiles),
        Panels::Bf16(p) => multiply(ctx, p, epilogue, x, out, &mut packed.f32_tiles),
        Panels::F16(p) => multiply(ctx, p, epilogue, x, out, &mut packed.f32_tiles),
        Panels::Bf16Pairs(p) => multiply_bf16_pairs(ctx, p, epilogue, x, out, &mut packed.bf16_pairs),
        Panels::Int8(p) => multiply_int8(ctx, p, epilogue, x, out, &mut packed.quantized),
    }
}

fn pack(ctx: ExecContext<'_>, x: &Buffer, tiles: &RowTiles, packed: &mut Vec<f32>) {
    packed.resize(x.rows * x.width, 0.0);
    let mut parts: Vec<_> = tiles.split(packed, x.width).collect();
    ctx.threads.parallel_for_each(x.data.len(), &mut parts, |_, parts| {
        for (first_row, part) in parts {
            let rows = part.len() / x.width.max(1);
            for r in 0..rows {
                for (k, &value) in x.row(*first_row + r).iter().enumerate() {
                    part[k * rows + r] = value;
                }
            }
        }
    });
}

fn multiply<E: Element>(
    ctx: ExecContext<'_>,
    panels: &[E],
    epilogue: Epilogue<'_>,
    x: &Buffer,
    out: &mut Buffer,
    packed: &mut Vec<f32>,
) {
    let k = x.width;
    let tiles = RowTiles::new(x.rows, max_rows(ctx.isa));
    pack(ctx, x, &tiles, packed);
    assert!(panels.len() >= out.width.div_ceil(PANEL) * k * PANEL && packed.len() >= tiles.rows * k);
    let panels_per_block = panels_at_once(ctx.isa, tiles.rows.div_ceil(tiles.count));
    let width = out.width;
    let target = SharedMut::new(&mut out.data);
    for_blocks(ctx.threads, &tiles, panels_per_block, k, width, |block| {
        // SAFETY: blocks own disjoint (rows, columns) of the output; sizes were asserted above.
        unsafe { block.run(ctx.isa, panels, packed, epilogue, &target) };
    });
}

fn multiply_int8(
    ctx: ExecContext<'_>,
    panels: &Int8Panels,
    epilogue: Epilogue<'_>,
    x: &Buffer,
    out: &mut Buffer,
    quantized: &mut Quantized,
) {
    let width = out.width;
    let columns = width.next_multiple_of(PANEL);
    assert!(panels.zero_bias.len() >= columns);
    let target = SharedMut::new(&mut out.data);
    for_int8_blocks(ctx, panels, width, x, quantized, |block, x| {
        let memory = PanelMemory {
            start: panels.data.as_ptr(),
            lanes: x.stride / int8::QUAD,
        };
        let run = |range, bias, c, tile| {
            // SAFETY: the block guarantees output and bias; sizes were asserted above.
            unsafe { int8::matmul(ctx.isa, &block.int8_gemm(panels, range, bias, x, c), tile) };
        };
        // SAFETY: blocks own disjoint (rows, columns) of the output.
        unsafe { block.run_with_epilogue((epilogue.bias, &panels.zero_bias), memory, &target, run) };
    });
}

/// Packs the rows of `x` into tiles, rounded to BF16. Each row is padded with zeros to `depth`
/// values.
fn pack_bf16_pairs(ctx: ExecContext<'_>, x: &Buffer, tiles: &RowTiles, depth: usize, packed: &mut Vec<u16>) {
    packed.resize(x.rows * depth, 0);
    let mut parts: Vec<_> = tiles.split(packed, depth).collect();
    ctx.threads.parallel_for_each(x.data.len(), &mut parts, |_, parts| {
        let mut row = vec![0; depth];
        for (first_row, part) in parts {
            let rows = part.len() / depth.max(1);
            for r in 0..rows {
                let values = x.row(*first_row + r);
                if !bf16::interleaves_rows(ctx.isa) {
                    bf16::round_row_on(ctx.isa, values, &mut part[r * depth..][..depth]);
                    continue;
                }
                bf16::round_row_on(ctx.isa, values, &mut row);
                let slots = part[r * bf16::PAIR..].chunks_mut(rows * bf16::PAIR);
                for (pair, slot) in row.as_chunks::<{ bf16::PAIR }>().0.iter().zip(slots) {
                    slot[..bf16::PAIR].copy_from_slice(pair);
                }
            }
        }
    });
}

fn multiply_bf16_pairs(
    ctx: ExecContext<'_>,
    panels: &Bf16PairPanels,
    epilogue: Epilogue<'_>,
    x: &Buffer,
    out: &mut Buffer,
    packed: &mut Vec<u16>,
) {
    let (width, depth) = (out.width, x.width.next_multiple_of(bf16::K_STEP));
    let tiles = RowTiles::new(x.rows, bf16::max_rows(ctx.isa));
    pack_bf16_pairs(ctx, x, &tiles, depth, packed);
    let columns = width.next_multiple_of(PANEL);
    assert!(
        panels.data.len() >= columns * depth && packed.len() >= tiles.rows * depth && panels.zero_bias.len() >= columns
    );
    let panels_per_block = bf16::panels_at_once(ctx.isa, tiles.rows.div_ceil(tiles.count));
    let target = SharedMut::new(&mut out.data);
    for_blocks(ctx.threads, &tiles, panels_per_block, depth, width, |block| {
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
                round_to_bf16: epilogue.round_to_bf16,
                c,
                c_stride,
            };
            // SAFETY: the block guarantees output and bias; sizes were asserted above.
            unsafe { bf16::matmul(ctx.isa, &gemm, tile) };
        };
        // SAFETY: blocks own disjoint (rows, columns) of the output.
        unsafe { block.run_with_epilogue((epilogue.bias, &panels.zero_bias), memory, &target, run) };
    });
}

/// Quantizes `x` unless it is already quantized, then calls `run` with the quantized rows for each
/// block of tiles and panels. The blocks cover the first `width` columns of `panels`. Each block
/// starts at an even panel and has an even number of panels (except the last), so that gate and up
/// panels stay together.
fn for_int8_blocks(
    ctx: ExecContext<'_>,
    panels: &Int8Panels,
    width: usize,
    x: &Buffer,
    quantized: &mut Quantized,
    run: impl Fn(WorkBlock<'_>, &Quantized) + Sync,
) {
    let tiles = int8_tiles(ctx.isa, x.rows);
    let x = match &x.quantized {
        Some(x) => x,
        None => {
            quantize(ctx, x, quantized);
            &*quantized
        }
    };
    let columns = width.next_multiple_of(PANEL);
    assert!(panels.data.len() >= columns * x.stride && x.data.len() >= tiles.rows * x.stride);
    assert!(x.scales.len() >= tiles.rows && panels.scales.len() >= columns && panels.offsets.len() >= columns);
    let panels_per_block = int8::panels_at_once(ctx.isa, tiles.rows.div_ceil(tiles.count)).max(2);
    for_blocks(ctx.threads, &tiles, panels_per_block, x.stride, width, |block| {
        run(block, x)
    });
}

/// Multiplies `x` by a matrix of [`Matrix::pack_gated`] and writes `activation(gate) * up`,
/// `[rows][width]`, to `out`.
pub(crate) fn gated_int8(
    ctx: ExecContext<'_>,
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
    let panel_columns = width.next_multiple_of(PANEL) * 2;
    // The bias in the order of the panels.
    let bias: Option<Vec<f32>> = bias.map(|bias| {
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
    });
    let bias = bias.as_deref().unwrap_or(&panels.zero_bias);
    assert!(bias.len() >= panel_columns);
    let target = SharedMut::new(&mut out.data);
    for_int8_blocks(ctx, panels, panel_columns, x, &mut packed.quantized, |block, x| {
        // SAFETY: blocks own disjoint (rows, columns) of the output; sizes were asserted.
        unsafe { block.run_gated(ctx.isa, activation, (panels, bias), x, (&target, width)) };
    });
}

/// Divides tiles and panels into blocks of at most `panels_per_block` panels, and calls `run` for
/// each block on all threads. `k` is the depth of the product, `width` the width of the output.
fn for_blocks(
    threads: &Threads,
    tiles: &RowTiles,
    panels_per_block: usize,
    k: usize,
    width: usize,
    run: impl Fn(WorkBlock<'_>) + Sync,
) {
    let panels = width.div_ceil(PANEL);
    let panel_groups = panels.div_ceil(panels_per_block);
    // Tiles are divided among tasks only if there are too few panel groups.
    let tasks_wanted = threads.parts(tiles.rows * k * width / MULTIPLICATIONS_PER_ELEMENT);
    let column_tasks = panel_groups.min(tasks_wanted);
    let row_tasks = (tasks_wanted / column_tasks).clamp(1, tiles.count);
    let task = |i: usize| {
        let (c, r) = (i % column_tasks, i / column_tasks);
        for g in c * panel_groups / column_tasks..(c + 1) * panel_groups / column_tasks {
            run(WorkBlock {
                k,
                panel_range: g * panels_per_block..((g + 1) * panels_per_block).min(panels),
                tiles,
                tile_range: r * tiles.count / row_tasks..(r + 1) * tiles.count / row_tasks,
                width,
            });
        }
    };
    threads.parallel_for(column_tasks * row_tasks, |_, tasks| tasks.for_each(task));
}

/// The panels of a matrix in memory, for prefetching.
#[derive(Clone, Copy)]
struct PanelMemory {
    start: *const i8,
    /// 32-bit lanes per column of a panel.
    lanes: usize,
}

/// A unit of work: a range of row tiles times a range of panels.
struct WorkBlock<'a> {
    k: usize,
    panel_range: Range<usize>,
    tiles: &'a RowTiles,
    tile_range: Range<usize>,
    /// Width of the output.
    width: usize,
}

impl WorkBlock<'_> {
    /// First row and number of rows of each tile.
    fn tiles(&self) -> impl Iterator<Item = (usize, usize)> {
        self.tile_range
            .clone()
            .map(|i| (self.tiles.start(i), self.tiles.start(i + 1) - self.tiles.start(i)))
    }

    /// The block's panels that lie fully within the output's width, and the number of columns of
    /// the partial panel after them (0 without one).
    fn full_panels(&self) -> (Range<usize>, usize) {
        let end = (self.width / PANEL).clamp(self.panel_range.start, self.panel_range.end);
        (
            self.panel_range.start..end,
            if end < self.panel_range.end {
                self.width - end * PANEL
            } else {
                0
            },
        )
    }

    /// # Safety
    /// No other code uses this block's rows and columns of `out`, and all sizes fit.
    unsafe fn run<E: Element>(&self, isa: Isa, panels: &[E], packed: &[f32], epilogue: Epilogue<'_>, out: &SharedMut) {
        for (first_row, rows) in self.tiles() {
            // SAFETY: the caller upholds the same contract.
            unsafe { self.run_tile(isa, panels, packed, epilogue, (first_row, rows), out) };
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
        (first_row, rows): (usize, usize),
        out: &SharedMut,
    ) {
        let (full, rest_columns) = self.full_panels();
        let first_column = self.panel_range.start * PANEL;
        // SAFETY: these panels lie within the output's width.
        unsafe {
            let c = out.ptr_at(first_row * self.width + first_column);
            self.multiply_panels(isa, panels, packed, (first_row, rows), full.clone(), c, self.width);
        }
        if rest_columns > 0 {
            // The last panel is wider than the rest of the output, so it is written through a
            // temporary tile.
            let mut tile = [0.0f32; 12 * PANEL];
            // SAFETY: the temporary tile has 12 rows of one panel.
            unsafe {
                let c = tile.as_mut_ptr();
                self.multiply_panels(
                    isa,
                    panels,
                    packed,
                    (first_row, rows),
                    full.end..self.panel_range.end,
                    c,
                    PANEL,
                );
            }
            for r in 0..rows {
                // SAFETY: within this block's rows and columns.
                let row = unsafe { out.slice((first_row + r) * self.width + full.end * PANEL, rest_columns) };
                row.copy_from_slice(&tile[r * PANEL..r * PANEL + rest_columns]);
            }
        }
        if epilogue.bias.is_none() && !epilogue.round_to_bf16 {
            return;
        }
        let columns = (self.panel_range.end * PANEL).min(self.width) - first_column;
        for r in 0..rows {
            // SAFETY: within this block's rows and columns.
            let row = unsafe { out.slice((first_row + r) * self.width + first_column, columns) };
            if let Some(bias) = epilogue.bias {
                row.iter_mut().zip(&bias[first_column..]).for_each(|(y, b)| *y += b);
            }
            if epilogue.round_to_bf16 {
                row.iter_mut().for_each(|y| *y = round_bf16(*y));
            }
        }
    }

    /// Kernel parameters that multiply `x` by the panels of `range` and write to `c`.
    fn int8_gemm(
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
    /// multiplied, each tile prefetches its share of the panels that follow them.
    fn tiles_with_prefetch(&self, range: &Range<usize>, memory: PanelMemory) -> impl Iterator<Item = int8::RowTile> {
        let next_panels = memory.start.wrapping_add(range.end * memory.lanes * PANEL_LANE_BYTES);
        let step = (range.len() * PANEL_LANE_BYTES).div_ceil(self.tile_range.len());
        self.tiles()
            .enumerate()
            .map(move |(i, (first_row, rows))| int8::RowTile {
                first_row,
                rows,
                prefetch: next_panels.wrapping_add(i * step * memory.lanes),
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
        let mut gate_up = [[0.0f32; 2 * PANEL]; TILE_ROWS_MAX];
        let gate_up_stride = self.panel_range.len() * PANEL;
        let bias = bias[self.panel_range.start * PANEL..].as_ptr();
        let gemm = self.int8_gemm(
            panels,
            self.panel_range.clone(),
            bias,
            x,
            (gate_up.as_flattened_mut().as_mut_ptr(), 0),
        );
        let memory = PanelMemory {
            start: panels.data.as_ptr(),
            lanes: gemm.quads,
        };
        let column = self.panel_range.start / 2 * PANEL;
        let columns = (self.panel_range.end / 2 * PANEL).min(width) - column;
        for tile in self.tiles_with_prefetch(&self.panel_range, memory) {
            assert!(tile.rows * gate_up_stride <= gate_up.as_flattened().len());
            let gemm = int8::Int8Gemm {
                // The kernel counts rows from the matmul's first row.
                c: gate_up
                    .as_flattened_mut()
                    .as_mut_ptr()
                    .wrapping_sub(tile.first_row * gate_up_stride),
                c_stride: gate_up_stride,
                ..gemm
            };
            // SAFETY: `gate_up` is large enough for the tile's rows of these panels; only this
            // block writes to its rows and columns of the output.
            unsafe { int8::matmul(isa, &gemm, tile) };
            let pairs_per_row = self.panel_range.len() / 2;
            gated_tile_on(
                isa,
                &GatedTile {
                    activation,
                    panel_pairs: &gate_up[..tile.rows * pairs_per_row],
                    pairs_per_row,
                    out: out.ptr_at(tile.first_row * width + column),
                    out_stride: width,
                    columns,
                },
            );
        }
    }

    /// Runs a kernel that adds the bias itself: `run(panels, bias, (c, c_stride), tile)`.
    ///
    /// # Safety
    /// As [`run`](Self::run).
    unsafe fn run_with_epilogue(
        &self,
        (bias, zeros): (Option<&[f32]>, &[f32]),
        memory: PanelMemory,
        out: &SharedMut,
        run: impl Fn(Range<usize>, *const f32, (*mut f32, usize), int8::RowTile),
    ) {
        let (full, rest_columns) = self.full_panels();
        if !full.is_empty() {
            let column = full.start * PANEL;
            // These panels lie within the output's width, and so within the bias.
            let bias = bias.unwrap_or(zeros)[column..].as_ptr();
            for tile in self.tiles_with_prefetch(&full, memory) {
                run(full.clone(), bias, (out.ptr_at(column), self.width), tile);
            }
        }
        if rest_columns > 0 {
            // The last panel is wider than the rest of the output and of the bias, so both go
            // through temporary memory.
            let mut last_bias = [0.0f32; PANEL];
            if let Some(bias) = bias {
                last_bias[..rest_columns].copy_from_slice(&bias[full.end * PANEL..][..rest_columns]);
            }
            for tile in self.tiles_with_prefetch(&(full.end..self.panel_range.end), memory) {
                let mut panel = [0.0f32; TILE_ROWS_MAX * PANEL];
                // The kernel counts rows from the matmul's first row.
                let c = panel.as_mut_ptr().wrapping_sub(tile.first_row * PANEL);
                run(full.end..self.panel_range.end, last_bias.as_ptr(), (c, PANEL), tile);
                for r in 0..tile.rows {
                    // SAFETY: within this block's rows and columns.
                    let row = unsafe { out.slice((tile.first_row + r) * self.width + full.end * PANEL, rest_columns) };
                    row.copy_from_slice(&panel[r * PANEL..r * PANEL + rest_columns]);
                }
            }
        }
    }

    /// Multiplies the rows of a tile by the panels of `range`, over all of k, and writes to `c`.
    ///
    /// # Safety
    /// `c` is valid for these rows of these panels.
    #[allow(clippy::too_many_arguments)]
    unsafe fn multiply_panels<E: Element>(
        &self,
        isa: Isa,
        panels: &[E],
        packed: &[f32],
        (first_row, rows): (usize, usize),
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
                matmul(
                    isa,
                    F32Gemm {
                        k: depth,
                        rows,
                        a: packed.as_ptr().add(first_row * self.k + k * rows),
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
                    round_to_bf16: false,
                };
                let out = product_of(ctx_with_threads(isa, threads), &matrix, width, epilogue, &x);
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
        let epilogue = Epilogue {
            bias: None,
            round_to_bf16: false,
        };
        let all = product_of(ctx(Isa::detect()), &matrix, 20, epilogue, &x);
        let some = product_of(ctx(Isa::detect()), &matrix, 18, epilogue, &x);
        assert_eq!(some.width, 18);
        for i in 0..2 {
            assert_eq!(some.row(i), &all.row(i)[..18]);
        }
    }
}
