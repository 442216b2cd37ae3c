//! Division of matmuls into blocks of work, and the kernel calls of a block.
//!
//! A matmul has one or several segments: runs of rows, each with a matrix of its own. Blocks of all
//! segments form one parallel region.

#![expect(unsafe_code, reason = "kernels take addresses of parts of a buffer")]

use std::ops::Range;

use super::int8::{self, OutputLines};
use super::linear::Epilogue;
use super::low_rank::{Added, Part};
use super::row_tiles::RowTiles;
use super::tile::{Element, F32Gemm, PANEL, matmul};
use crate::device::Activation;
use crate::device::cpu::gated::{GatedTile, gated_tile_on};
use crate::device::cpu::math::round_bf16;
use crate::device::cpu::{Isa, SharedMut, Threads};

/// Maximum values of k per call of the F32 kernel, so that the panels stay in the L2 cache.
pub(super) const K_BLOCK: usize = 2048;
/// Maximum rows of an INT8 or BF16-pair tile.
const TILE_ROWS_MAX: usize = 32;
/// Bytes of 16 lanes of 32 bits, one per column of a panel. A lane holds four INT8 values of k, or
/// one BF16 pair.
const PANEL_LANE_BYTES: usize = 4 * PANEL;
/// Number of multiplications that take as long as one element of an element-wise operation.
pub(super) const MULTIPLICATIONS_PER_ELEMENT: usize = 16;
/// A segment with fewer rows takes about as long as one with this number, because reading its
/// weights takes most of the time.
const STREAMED_ROWS: usize = 16;

/// Begins with a cache line, so that no row of a panel lies in two.
#[repr(align(64))]
struct Aligned<T>(T);

/// Panel groups and tiles of one segment that one thread multiplies.
struct Task {
    segment: usize,
    panels_per_block: usize,
    groups: Range<usize>,
    tiles: Range<usize>,
}

/// Divides the tiles and panels of all segments into blocks of at most `panels_at_once(rows)`
/// panels, and calls `run` for each block on all threads, with the index of its segment. `rows` is
/// the number of rows of the segment's largest tile. `k` is the depth of the product, `width` the
/// width of the output.
pub(super) fn for_blocks(
    threads: &Threads,
    segments: &[RowTiles],
    panels_at_once: impl Fn(usize) -> usize,
    (k, width): (usize, usize),
    run: impl Fn(usize, WorkBlock<'_>) + Sync,
) {
    let panels = width.div_ceil(PANEL);
    let rows: usize = segments.iter().map(|tiles| tiles.rows).sum();
    let elements = rows * k * width / MULTIPLICATIONS_PER_ELEMENT;
    let tasks_wanted = threads.parts(elements);
    let cost = |tiles: &RowTiles| tiles.rows.max(STREAMED_ROWS);
    let total_cost: usize = segments.iter().map(cost).sum();
    let mut tasks = Vec::new();
    for (segment, tiles) in segments.iter().enumerate() {
        let panels_per_block = panels_at_once(tiles.rows_max());
        let panel_groups = panels.div_ceil(panels_per_block);
        // Tiles are divided among tasks only if there are too few panel groups.
        let segment_tasks = (tasks_wanted * cost(tiles)).div_ceil(total_cost);
        let column_tasks = panel_groups.min(segment_tasks);
        let row_tasks = (segment_tasks / column_tasks).clamp(1, tiles.count);
        tasks.extend((0..column_tasks * row_tasks).map(|i| {
            let (c, r) = (i % column_tasks, i / column_tasks);
            Task {
                segment,
                panels_per_block,
                groups: c * panel_groups / column_tasks..(c + 1) * panel_groups / column_tasks,
                tiles: r * tiles.count / row_tasks..(r + 1) * tiles.count / row_tasks,
            }
        }));
    }
    threads.parallel_for_each(elements, &mut tasks, |_, tasks| {
        for task in tasks {
            for g in task.groups.clone() {
                let block = WorkBlock {
                    k,
                    panel_range: g * task.panels_per_block..((g + 1) * task.panels_per_block).min(panels),
                    tiles: &segments[task.segment],
                    tile_range: task.tiles.clone(),
                    width,
                };
                run(task.segment, block);
            }
        }
    });
}

/// The panels of a matrix in memory, for prefetching.
#[derive(Clone, Copy)]
pub(super) struct PanelMemory {
    pub start: *const i8,
    /// 32-bit lanes per column of a panel.
    pub lanes: usize,
}

/// A unit of work: a range of row tiles times a range of panels.
pub(super) struct WorkBlock<'a> {
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
    pub(super) unsafe fn run<E: Element>(
        &self,
        isa: Isa,
        panels: &[E],
        packed: &[f32],
        epilogue: Epilogue<'_>,
        out: &SharedMut,
    ) {
        assert!(panels.len() >= self.panel_range.end * self.k * PANEL);
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
        let columns = (self.panel_range.end * PANEL).min(self.width) - first_column;
        if epilogue.bias.is_some() || epilogue.round_to_bf16 {
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
        if let Some(added) = epilogue.added {
            let part = Part {
                rows: first_row..first_row + rows,
                panels: self.panel_range.clone(),
                columns,
                c: out.ptr_at(first_column),
                c_stride: self.width,
            };
            // SAFETY: within this block's rows and columns.
            unsafe { added.add(isa, &part) };
        }
    }

    /// The block's tiles for the kernel, with prefetching: while the panels of `range` are
    /// multiplied, each tile prefetches its share of the panels that follow them, and what it writes. `output`: the lines of row 0.
    fn tiles_with_prefetch(
        &self,
        range: &Range<usize>,
        memory: PanelMemory,
        output: OutputLines,
    ) -> impl Iterator<Item = int8::RowTile> {
        let next_panels = memory.start.wrapping_add(range.end * memory.lanes * PANEL_LANE_BYTES);
        let step = (range.len() * PANEL_LANE_BYTES).div_ceil(self.tile_range.len());
        self.tiles()
            .enumerate()
            .map(move |(i, (first_row, rows))| int8::RowTile {
                first_row,
                rows,
                prefetch: next_panels.wrapping_add(i * step * memory.lanes),
                prefetch_step: step,
                output: OutputLines {
                    first: output.first.wrapping_add(first_row * output.stride),
                    ..output
                },
            })
    }

    /// Computes gate and up panels, which alternate, by `run(panels, bias, (c, c_stride), tile)`, and writes the gated
    /// activation to rows of `width` columns.
    ///
    /// # Safety
    /// As [`run`](Self::run).
    pub(super) unsafe fn run_gated(
        &self,
        isa: Isa,
        activation: Activation,
        (bias, added, memory): (&[f32], Option<&Added<'_>>, PanelMemory),
        (out, width): (&SharedMut, usize),
        run: impl Fn(Range<usize>, *const f32, (*mut f32, usize), int8::RowTile),
    ) {
        let mut aligned = Aligned([[0.0f32; 2 * PANEL]; TILE_ROWS_MAX]);
        let gate_up = &mut aligned.0;
        let gate_up_stride = self.panel_range.len() * PANEL;
        let bias = bias[self.panel_range.start * PANEL..].as_ptr();
        let column = self.panel_range.start / 2 * PANEL;
        let columns = (self.panel_range.end / 2 * PANEL).min(width) - column;
        let output = OutputLines {
            first: out.ptr_at(column),
            stride: width,
            count: columns.div_ceil(PANEL),
        };
        for tile in self.tiles_with_prefetch(&self.panel_range, memory, output) {
            assert!(tile.rows * gate_up_stride <= gate_up.as_flattened().len());
            // The kernel counts rows from the matmul's first row.
            let c = gate_up
                .as_flattened_mut()
                .as_mut_ptr()
                .wrapping_sub(tile.first_row * gate_up_stride);
            let rows = tile.first_row..tile.first_row + tile.rows;
            run(self.panel_range.clone(), bias, (c, gate_up_stride), tile);
            if let Some(added) = added {
                let part = Part::whole(rows.clone(), self.panel_range.clone(), (c, gate_up_stride));
                // SAFETY: the memory of the gate and up values is this call's alone.
                unsafe { added.add(isa, &part) };
            }
            let pairs_per_row = self.panel_range.len() / 2;
            gated_tile_on(
                isa,
                &GatedTile {
                    activation,
                    panel_pairs: &gate_up[..rows.len() * pairs_per_row],
                    pairs_per_row,
                    out: out.ptr_at(rows.start * width + column),
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
    pub(super) unsafe fn run_with_epilogue(
        &self,
        isa: Isa,
        (bias, zeros, added): (Option<&[f32]>, &[f32], Option<&Added<'_>>),
        memory: PanelMemory,
        out: &SharedMut,
        run: impl Fn(Range<usize>, *const f32, (*mut f32, usize), int8::RowTile),
    ) {
        let (full, rest_columns) = self.full_panels();
        if !full.is_empty() {
            let column = full.start * PANEL;
            // These panels lie within the output's width, and so within the bias.
            let bias = bias.unwrap_or(zeros)[column..].as_ptr();
            let output = OutputLines {
                first: out.ptr_at(column),
                stride: self.width,
                count: full.len(),
            };
            for tile in self.tiles_with_prefetch(&full, memory, output) {
                let (c, rows) = (
                    (out.ptr_at(column), self.width),
                    tile.first_row..tile.first_row + tile.rows,
                );
                run(full.clone(), bias, c, tile);
                if let Some(added) = added {
                    // SAFETY: within this block's rows and columns.
                    unsafe { added.add(isa, &Part::whole(rows, full.clone(), c)) };
                }
            }
        }
        if rest_columns > 0 {
            // The last panel is wider than the rest of the output and of the bias, so both go
            // through temporary memory.
            let mut last_bias = [0.0f32; PANEL];
            if let Some(bias) = bias {
                last_bias[..rest_columns].copy_from_slice(&bias[full.end * PANEL..][..rest_columns]);
            }
            let last = full.end..self.panel_range.end;
            for tile in self.tiles_with_prefetch(&last, memory, OutputLines::NONE) {
                let mut aligned = Aligned([0.0f32; TILE_ROWS_MAX * PANEL]);
                let panel = &mut aligned.0;
                // The kernel counts rows from the matmul's first row.
                let c = panel.as_mut_ptr().wrapping_sub(tile.first_row * PANEL);
                let rows = tile.first_row..tile.first_row + tile.rows;
                run(last.clone(), last_bias.as_ptr(), (c, PANEL), tile);
                if let Some(added) = added {
                    // SAFETY: the panel's memory is this call's alone.
                    unsafe { added.add(isa, &Part::whole(rows.clone(), last.clone(), (c, PANEL))) };
                }
                for (r, row) in rows.enumerate() {
                    // SAFETY: within this block's rows and columns.
                    let row = unsafe { out.slice(row * self.width + full.end * PANEL, rest_columns) };
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
