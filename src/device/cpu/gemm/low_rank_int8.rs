//! The two matrices of an adapter in INT8, for models that compute in INT8.
//!
//! The first product is one of the [INT8 kernel](super::int8), whose rows are those that the model's own matrix multiplies. Its columns
//! are quantized again, 16 at a time (a group): each row by the largest magnitude of the group. The second matrix is quantized in
//! the same groups of columns.
//!
//! `c[r][n] += ((sum over the group's k of low[r][k] * up[n][k]) * column_scale[n]) * row_scale[r]`, group by group. Sums are exact and
//! scaling rounds in one order, so results have the same bits on all instruction sets and in any batch, as in [`int8`](super::int8).

#![expect(
    unsafe_code,
    reason = "kernels take addresses of parts of a buffer and need instructions"
)]

use std::ops::Range;

use super::blocks::MULTIPLICATIONS_PER_ELEMENT;
use super::int8::{self, OutputLines, QUAD, RowTile};
use super::low_rank::{LowRankRun, Part, read_panel};
use super::matrix::{Int8Panels, Matrix, Panels, pack_lane};
use super::tile::PANEL;
use crate::device::cpu::aligned::AlignedArray;
use crate::device::cpu::isa::Isa;
use crate::device::cpu::quantize::{Quantized, int8_tiles, quantize_row_on};
use crate::device::cpu::reused::Reused;
use crate::device::cpu::{ExecContext, SharedMut};
use crate::device::{Tensor, TensorError};

/// Columns of the second matrix that are quantized together: those that one panel of the first matrix has made.
const GROUP: usize = PANEL;
/// Bytes of a panel's weights in a group of columns.
const BLOCK_BYTES: usize = GROUP * PANEL;
/// Rows times panels that one call of the INT8 kernel multiplies, at most: 32 rows by 2 panels.
const TILE_PANELS: usize = 2 * 32;
/// How far ahead of the multiplication the first matrix is prefetched, in bytes.
const PREFETCH_AHEAD: usize = 1024;

/// The second matrix of an adapter, in panels of 16 rows. Each panel has only those groups in which one of its rows has a number other
/// than 0, since several projections in one matrix each have first matrices of their own.
pub(crate) struct Int8Ups {
    /// The blocks of each panel.
    panels: Vec<Range<usize>>,
    /// The group of each block.
    groups: Vec<usize>,
    /// `[block][quad of columns][16][4]`.
    codes: AlignedArray<i8>,
    /// `[block][16]`.
    scales: Vec<f32>,
    /// `[block][16]`: the amount that the rows' [`int8::OFFSET`] adds to each sum.
    offsets: Vec<i32>,
}

impl Int8Ups {
    /// `row_of(panel * 16 + lane)` is the row of `matrix` in this lane, or `None` for zeros. `panels`: their number.
    ///
    /// # Errors
    /// If a number is not finite.
    pub(crate) fn pack(
        matrix: Tensor<'_>,
        panels: usize,
        row_of: impl Fn(usize) -> Option<usize>,
    ) -> Result<Int8Ups, TensorError> {
        let (mut codes, mut scales, mut offsets) = (Vec::new(), Vec::new(), Vec::new());
        let (mut blocks, mut groups) = (Vec::with_capacity(panels), Vec::new());
        let width = matrix.columns.next_multiple_of(GROUP);
        let mut rows = vec![0.0f32; PANEL * width];
        for panel in 0..panels {
            read_panel(
                &matrix,
                |lane| row_of(panel * PANEL + lane),
                |x| x.is_finite(),
                &mut rows,
            )?;
            let first = groups.len();
            for group in 0..width / GROUP {
                let of_lane = |lane: usize| &rows[lane * width + group * GROUP..][..GROUP];
                if (0..PANEL).all(|lane| of_lane(lane).iter().all(|x| *x == 0.0)) {
                    continue;
                }
                groups.push(group);
                let block = codes.len();
                codes.resize(block + BLOCK_BYTES, 0i8);
                for lane in 0..PANEL {
                    let (scale, offset) = pack_lane(of_lane(lane), lane, &mut codes[block..]);
                    scales.push(scale);
                    offsets.push(offset);
                }
            }
            blocks.push(first..groups.len());
        }
        let mut aligned = AlignedArray::new(codes.len());
        aligned.copy_from_slice(&codes);
        Ok(Int8Ups {
            panels: blocks,
            groups,
            codes: aligned,
            scales,
            offsets,
        })
    }
}

/// The two matrices of an adapter.
pub(crate) struct Int8LowRank {
    /// `[rank][in features]`.
    pub down: Matrix,
    /// `[out features][rank]`.
    pub up: Int8Ups,
}

/// Rows after the first matrix, quantized.
#[derive(Debug, Default)]
pub(crate) struct Int8Lows {
    /// `[row][group][16]`, stored as the number + 128.
    codes: Reused<u8>,
    /// `[row][group]`.
    scales: Reused<f32>,
    /// Groups of a row.
    groups: usize,
}

/// A part of the first products: all rows of a tile times some panels, of which the rows of one adapter are kept.
struct DownTask<'a> {
    panels: &'a Int8Panels,
    range: Range<usize>,
    /// First row and number of rows of the tile.
    tile: (usize, usize),
    /// Those that are kept.
    rows: &'a [u32],
    /// The place of the first of them in [`Int8Lows`].
    first: usize,
}

/// Computes the first products of all runs: `low` becomes the rows of all runs, one run after the other. All `down` have one shape. `x`:
/// all `rows` of the step, in the tiles of one segment.
pub(crate) fn multiply_down(
    ctx: ExecContext<'_>,
    runs: &[LowRankRun<'_, Int8LowRank>],
    (x, rows): (&Quantized, usize),
    low: &mut Int8Lows,
) {
    let rank = runs.first().map_or(0, |run| run.matrices.down.rows);
    let count: usize = runs.iter().map(|run| run.rows.rows().len()).sum();
    low.groups = rank.div_ceil(GROUP);
    low.codes.set_len(count * low.groups * GROUP);
    low.scales.set_len(count * low.groups);
    let tiles = int8_tiles(ctx.isa, 0..rows);
    assert!(x.data.len() >= rows * x.stride && x.scales.len() >= rows);
    let mut tasks = Vec::new();
    for run in runs {
        let down = &run.matrices.down;
        let Panels::Int8(panels) = &down.panels else {
            unreachable!("the first matrix is packed in INT8")
        };
        assert_eq!((down.rows, panels.data.len()), (rank, low.groups * PANEL * x.stride));
        for tile in (0..tiles.count).map(|i| tiles.start(i)..tiles.start(i + 1)) {
            let places = run.rows.places(&tile);
            if places.is_empty() {
                continue;
            }
            let at_once = int8::panels_at_once(ctx.isa, tile.len());
            tasks.extend((0..low.groups).step_by(at_once).map(|panel| DownTask {
                panels,
                range: panel..(panel + at_once).min(low.groups),
                tile: (tile.start, tile.len()),
                rows: &run.rows.rows()[places.clone()],
                first: run.first + places.start,
            }));
        }
    }
    let (groups, codes) = (low.groups, SharedMut::new(&mut low.codes));
    let scales = SharedMut::new(&mut low.scales);
    let elements = count * rank * x.stride / MULTIPLICATIONS_PER_ELEMENT;
    ctx.threads.parallel_for_each(elements, &mut tasks, |_, tasks| {
        let mut products = [0.0f32; TILE_PANELS * PANEL];
        for task in tasks {
            let stride = task.range.len() * PANEL;
            task.multiply(ctx.isa, x, &mut products);
            for (i, row) in task.rows.iter().enumerate() {
                let values = &products[(*row as usize - task.tile.0) * stride..][..stride];
                for (group, values) in task.range.clone().zip(values.chunks_exact(GROUP)) {
                    let at = (task.first + i) * groups + group;
                    // SAFETY: each task has rows and groups of its own.
                    let (codes, scale) = unsafe { (codes.slice(at * GROUP, GROUP), scales.slice(at, 1)) };
                    quantize_row_on(ctx.isa, values, codes, &mut scale[0]);
                }
            }
        }
    });
}

impl DownTask<'_> {
    /// Writes the products of all rows of the tile, `[rows][panels * 16]`.
    fn multiply(&self, isa: Isa, x: &Quantized, products: &mut [f32]) {
        let (first_row, rows) = self.tile;
        let stride = self.range.len() * PANEL;
        assert!(rows * stride <= products.len());
        let bias = self.panels.zero_bias[self.range.start * PANEL..].as_ptr();
        // The kernel counts rows from the matmul's first row.
        let c = products.as_mut_ptr().wrapping_sub(first_row * stride);
        let gemm = self.panels.gemm(self.range.clone(), bias, x, (c, stride));
        let tile = RowTile {
            first_row,
            rows,
            prefetch: gemm.b.wrapping_add(PREFETCH_AHEAD),
            prefetch_step: QUAD * PANEL,
            output: OutputLines::NONE,
        };
        // SAFETY: the rows and the panels are as long as they say (asserted by `multiply_down`); the products have room for the tile.
        unsafe { int8::matmul(isa, &gemm, tile) };
    }
}

/// What adapters add to the result of an INT8 operation.
pub(crate) struct Int8Added<'a> {
    /// Of different adapters, whose rows are different, too.
    pub runs: Vec<LowRankRun<'a, Int8LowRank>>,
    pub low: &'a Int8Lows,
    /// The rows that the operation multiplies, which the first product has read, too.
    pub x: &'a Quantized,
}

impl Int8Added<'_> {
    /// Adds to a part of the result.
    ///
    /// # Safety
    /// The memory of the part's rows and columns is valid, and no other code reads or writes it during the call.
    pub(super) unsafe fn add(&self, isa: Isa, part: &Part) {
        assert_eq!(part.columns, part.panels.len() * PANEL);
        let groups = self.low.groups;
        for run in &self.runs {
            let places = run.rows.places(&part.rows);
            if places.is_empty() {
                continue;
            }
            let first = run.first + places.start;
            let product = UpProduct {
                ups: &run.matrices.up,
                panels: &run.matrices.up.panels[part.panels.clone()],
                rows: &run.rows.rows()[places],
                low_codes: &self.low.codes[first * groups * GROUP..],
                low_scales: &self.low.scales[first * groups..],
                groups,
                c: part.c,
                c_stride: part.c_stride,
            };
            // SAFETY: within the part, whose memory is the caller's alone.
            unsafe { product.add(isa) };
        }
    }
}

/// Some rows times some panels of the second matrix.
struct UpProduct<'a> {
    ups: &'a Int8Ups,
    /// The blocks of each panel.
    panels: &'a [Range<usize>],
    /// Rows of the result.
    rows: &'a [u32],
    /// `[row][group][16]`, from the first of these rows on.
    low_codes: &'a [u8],
    /// `[row][group]`, from the first of these rows on.
    low_scales: &'a [f32],
    /// Groups of a row.
    groups: usize,
    /// Row 0 of the result, at the first panel's first column.
    c: *mut f32,
    c_stride: usize,
}

impl UpProduct<'_> {
    /// Adds to the result.
    ///
    /// # Safety
    /// The rows of the result have 16 numbers of valid memory for each panel, which no other code reads or writes during the call.
    unsafe fn add(&self, isa: Isa) {
        let low = self.rows.len() * self.groups;
        assert!(self.low_codes.len() >= low * GROUP && self.low_scales.len() >= low);
        // SAFETY: the caller upholds the same contract, and `isa` guarantees the instructions.
        unsafe {
            match isa {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512Vnni | Isa::Avx512Bf16 | Isa::Amx => x86::add_512(self),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 | Isa::Avx2 | Isa::AvxVnni => x86::add_256(self),
                Isa::Portable => self.add_portable(),
            }
        }
    }

    /// # Safety
    /// As [`add`](Self::add).
    unsafe fn add_portable(&self) {
        for (panel, blocks) in self.panels.iter().enumerate() {
            for block in blocks.clone() {
                let group = self.ups.groups[block];
                let codes = &self.ups.codes[block * BLOCK_BYTES..][..BLOCK_BYTES];
                for (i, row) in self.rows.iter().enumerate() {
                    let at = i * self.groups + group;
                    let low = &self.low_codes[at * GROUP..][..GROUP];
                    for lane in 0..PANEL {
                        let code = |k: usize| i32::from(codes[(k / QUAD * PANEL + lane) * QUAD + k % QUAD]);
                        let sum: i32 = (0..GROUP).map(|k| i32::from(low[k]) * code(k)).sum();
                        let of_lane = block * PANEL + lane;
                        let value = (sum - self.ups.offsets[of_lane]) as f32 * self.ups.scales[of_lane];
                        let c = self
                            .c
                            .wrapping_add(*row as usize * self.c_stride + panel * PANEL + lane);
                        // SAFETY: as the caller guarantees.
                        unsafe { *c = value.mul_add(self.low_scales[at], *c) };
                    }
                }
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    //! The kernels in intrinsics. A block's weights stay in registers while its rows pass.

    // Loops index arrays of registers.
    #![allow(clippy::needless_range_loop)]

    use std::arch::x86_64::*;

    use super::{BLOCK_BYTES, GROUP, PANEL, QUAD, UpProduct};
    use crate::device::cpu::gemm::int8::OFFSET;
    use crate::device::cpu::gemm::int8::x86::{add_quads, magnitudes};

    const QUADS: usize = GROUP / QUAD;

    /// # Safety
    /// As [`UpProduct::add`], on a processor with AVX-512 VNNI.
    #[target_feature(enable = "avx512f,avx512vnni")]
    pub(super) unsafe fn add_512(p: &UpProduct<'_>) {
        for panel in 0..p.panels.len() {
            for block in p.panels[panel].start..p.panels[panel].end {
                let group = p.ups.groups[block];
                // SAFETY: a block has as many codes, scales and offsets; `add` has checked the rows; the caller owns the result.
                unsafe {
                    let weights = p.ups.codes.as_ptr().add(block * BLOCK_BYTES);
                    let mut w = [_mm512_setzero_si512(); QUADS];
                    for q in 0..QUADS {
                        w[q] = _mm512_loadu_si512(weights.add(q * PANEL * QUAD).cast());
                        // Most often, the next call reads the panels that follow.
                        let next = weights.wrapping_add(p.panels.len() * BLOCK_BYTES + q * PANEL * QUAD);
                        _mm_prefetch::<_MM_HINT_T0>(next);
                    }
                    let scale = _mm512_loadu_ps(p.ups.scales.as_ptr().add(block * PANEL));
                    let offset = _mm512_loadu_si512(p.ups.offsets.as_ptr().add(block * PANEL).cast());
                    let start = _mm512_sub_epi32(_mm512_setzero_si512(), offset);
                    let mut codes = p.low_codes.as_ptr().add(group * GROUP);
                    let mut scales = p.low_scales.as_ptr().add(group);
                    for i in 0..p.rows.len() {
                        let mut sums = start;
                        for q in 0..QUADS {
                            let x = _mm512_set1_epi32(codes.add(q * QUAD).cast::<i32>().read_unaligned());
                            sums = _mm512_dpbusd_epi32(sums, x, w[q]);
                        }
                        let value = _mm512_mul_ps(_mm512_cvtepi32_ps(sums), scale);
                        let c = p.c.wrapping_add(p.rows[i] as usize * p.c_stride + panel * PANEL);
                        let sum = _mm512_fmadd_ps(value, _mm512_set1_ps(*scales), _mm512_loadu_ps(c));
                        _mm512_storeu_ps(c, sum);
                        codes = codes.wrapping_add(p.groups * GROUP);
                        scales = scales.wrapping_add(p.groups);
                    }
                }
            }
        }
    }

    /// Multiplies signed numbers, without their offset, as the INT8 kernel for AVX2 does.
    ///
    /// # Safety
    /// As [`UpProduct::add`], on a processor with AVX2.
    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn add_256(p: &UpProduct<'_>) {
        let offset = _mm256_set1_epi8(OFFSET as u8 as i8);
        for panel in 0..p.panels.len() {
            for block in p.panels[panel].start..p.panels[panel].end {
                let group = p.ups.groups[block];
                for half in 0..2 {
                    let at = half * PANEL / 2;
                    // SAFETY: as in `add_512`.
                    unsafe {
                        let weights = p.ups.codes.as_ptr().add(block * BLOCK_BYTES + at * QUAD);
                        let mut w = [_mm256_setzero_si256(); QUADS];
                        for q in 0..QUADS {
                            w[q] = _mm256_loadu_si256(weights.add(q * PANEL * QUAD).cast());
                        }
                        let [low, high] = [magnitudes([w[0], w[1]]), magnitudes([w[2], w[3]])];
                        let magnitudes = [low[0], low[1], high[0], high[1]];
                        let scale = _mm256_loadu_ps(p.ups.scales.as_ptr().add(block * PANEL + at));
                        let mut codes = p.low_codes.as_ptr().add(group * GROUP);
                        let mut scales = p.low_scales.as_ptr().add(group);
                        for i in 0..p.rows.len() {
                            let mut sums = _mm256_setzero_si256();
                            for q in 0..QUADS {
                                let x = _mm256_set1_epi32(codes.add(q * QUAD).cast::<i32>().read_unaligned());
                                let x = _mm256_sign_epi8(_mm256_xor_si256(x, offset), w[q]);
                                sums = add_quads(sums, magnitudes[q], x);
                            }
                            let value = _mm256_mul_ps(_mm256_cvtepi32_ps(sums), scale);
                            let c = p.c.wrapping_add(p.rows[i] as usize * p.c_stride + panel * PANEL + at);
                            let sum = _mm256_fmadd_ps(value, _mm256_set1_ps(*scales), _mm256_loadu_ps(c));
                            _mm256_storeu_ps(c, sum);
                            codes = codes.wrapping_add(p.groups * GROUP);
                            scales = scales.wrapping_add(p.groups);
                        }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::Buffer;
    use crate::device::cpu::gemm::linear::{Epilogue, PackedRows, Rows, linear};
    use crate::device::cpu::gemm::low_rank::{AdapterRows, Added};
    use crate::device::cpu::quantize::quantize;
    use crate::device::cpu::testing::{buffer, bytes_of, ctx_with_threads, numbers, tensor, two_parts};
    use crate::device::{Dtype, Precision};

    const ROWS: usize = 47;
    const K: usize = 130;
    const WIDTH: usize = 53;
    const RANK: usize = 21;

    fn ups(seed: u64) -> Vec<f32> {
        two_parts(seed, [32, WIDTH], RANK)
    }

    fn in_order(lane: usize) -> Option<usize> {
        (lane < WIDTH).then_some(lane)
    }

    fn matrices(seed: u64) -> Int8LowRank {
        let (down, up) = (
            bytes_of(&numbers(seed, RANK * K), Dtype::F32),
            bytes_of(&ups(seed + 1), Dtype::F32),
        );
        Int8LowRank {
            down: Matrix::pack(&[tensor(&down, RANK, K)], Precision::Int8).unwrap(),
            up: Int8Ups::pack(tensor(&up, WIDTH, RANK), WIDTH.div_ceil(PANEL), in_order).unwrap(),
        }
    }

    /// The rows as their bytes say, each by its largest magnitude in each group of `width` columns; and half a step of each group.
    fn quantized(values: &[f64], columns: usize, width: usize) -> (Vec<f64>, Vec<f64>) {
        let (mut stored, mut halves) = (Vec::new(), Vec::new());
        for group in values.chunks(columns).flat_map(|row| row.chunks(width)) {
            let step = group.iter().fold(0.0f64, |max, x| max.max(x.abs())) / 127.0;
            stored.extend(group.iter().map(|x| (x / step.max(1e-30)).round_ties_even() * step));
            halves.push(step / 2.0);
        }
        (stored, halves)
    }

    fn doubles(values: &[f32]) -> Vec<f64> {
        values.iter().map(|x| f64::from(*x)).collect()
    }

    /// Rows of each of two adapters among the rows of a step, and a product with what they add.
    struct Case {
        base: Matrix,
        adapters: [Int8LowRank; 2],
    }

    impl Case {
        fn product(&self, isa: Isa, threads: usize, x: &Buffer, rows: [Vec<u32>; 2]) -> Buffer {
            let ctx = ctx_with_threads(isa, threads);
            let rows = rows.map(|rows| AdapterRows::new(rows, x.rows));
            let first = [0, rows[0].rows().len()];
            let of_adapter = |((rows, first), matrices)| LowRankRun { rows, first, matrices };
            let runs: Vec<_> = rows.iter().zip(first).zip(&self.adapters).map(of_adapter).collect();
            let (mut quantized, mut low) = (Quantized::default(), Int8Lows::default());
            // What was in the memory before does not matter.
            low.codes.set_len(4000);
            low.codes.fill(7);
            quantize(
                ctx,
                Rows { x, picked: None },
                &[int8_tiles(isa, 0..x.rows)],
                &mut quantized,
            );
            multiply_down(ctx, &runs, (&quantized, x.rows), &mut low);
            let added = Added::Int8(Int8Added {
                runs,
                low: &low,
                x: &quantized,
            });
            let epilogue = Epilogue {
                added: Some(&added),
                ..Epilogue::default()
            };
            let mut out = Buffer::default();
            linear(
                ctx,
                &self.base,
                WIDTH,
                epilogue,
                x,
                &mut out,
                &mut PackedRows::default(),
            );
            out
        }
    }

    fn case() -> Case {
        let weights = bytes_of(&numbers(1, WIDTH * K), Dtype::F32);
        Case {
            base: Matrix::pack(&[tensor(&weights, WIDTH, K)], Precision::Int8).unwrap(),
            adapters: [matrices(10), matrices(20)],
        }
    }

    /// The change of a row, and by how much rounding of the first product may change it.
    fn want(x: &[f32], seed: u64, column: usize) -> (f64, f64) {
        let (x, _) = quantized(&doubles(x), K, K);
        let (down, _) = quantized(&doubles(&numbers(seed, RANK * K)), K, K);
        let (up, _) = quantized(&doubles(&ups(seed + 1)), RANK, GROUP);
        let product = |n: usize| x.iter().zip(&down[n * K..]).map(|(x, m)| x * m).sum::<f64>();
        let low: Vec<f64> = (0..RANK).map(product).collect();
        let (_, halves) = quantized(&low, RANK, GROUP);
        let up = &up[column * RANK..][..RANK];
        let change = up.iter().zip(&low).map(|(u, l)| u * l).sum();
        let bound = up.iter().enumerate().map(|(k, u)| u.abs() * halves[k / GROUP]).sum();
        (change, bound)
    }

    #[test]
    fn rows_of_adapters_get_what_is_theirs_in_any_batch() {
        let case = case();
        let x = buffer(&numbers(2, ROWS * K), ROWS, K);
        // Every fifth row has no adapter; the last ones are one adapter's alone.
        let of_adapter =
            |adapter: u32| move |row: &u32| !row.is_multiple_of(5) && (*row > 30 || row % 2 == 1) == (adapter == 1);
        let picked = [0, 1].map(|adapter| (0..ROWS as u32).filter(of_adapter(adapter)).collect::<Vec<_>>());
        let mut first: Option<Vec<f32>> = None;
        for isa in Isa::available() {
            let plain = case.product(isa, 2, &x, [Vec::new(), Vec::new()]);
            let out = case.product(isa, 2, &x, picked.clone());
            for (row, column) in (0..ROWS).flat_map(|row| (0..WIDTH).map(move |column| (row, column))) {
                let (got, base) = (out.row(row)[column], plain.row(row)[column]);
                let Some(adapter) = picked.iter().position(|rows| rows.contains(&(row as u32))) else {
                    assert_eq!(got, base, "{isa:?} ({row}, {column})");
                    continue;
                };
                let (change, bound) = want(x.row(row), [10, 20][adapter], column);
                let got = f64::from(got) - f64::from(base);
                assert!(
                    (got - change).abs() <= bound * 1.01 + 1e-5,
                    "{isa:?} ({row}, {column}): {got} {change} {bound}"
                );
            }
            assert_eq!(*first.get_or_insert_with(|| out.data.to_vec()), out.data, "{isa:?}");
            assert_eq!(case.product(isa, 1, &x, picked.clone()).data, out.data, "{isa:?}");
            for (adapter, row) in [(0, 2), (1, 1), (1, 46)] {
                let mut own = [Vec::new(), Vec::new()];
                own[adapter] = vec![0];
                let alone = case.product(isa, 2, &buffer(x.row(row), 1, K), own);
                assert_eq!(alone.data, out.row(row), "{isa:?} {row}");
            }
        }
    }

    #[test]
    fn rows_that_are_not_finite_stay_so() {
        let case = case();
        let mut values = numbers(2, 3 * K);
        values[K + 7] = f32::INFINITY;
        let x = buffer(&values, 3, K);
        for isa in Isa::available() {
            let out = case.product(isa, 1, &x, [vec![0, 1], vec![2]]);
            assert!(out.row(1).iter().all(|x| x.is_nan()), "{isa:?}");
            assert!(out.row(0).iter().chain(out.row(2)).all(|x| x.is_finite()), "{isa:?}");
        }
    }

    #[test]
    fn groups_of_zeros_are_not_kept() {
        let up = matrices(1).up;
        // Rows 0 to 31 have numbers in the first 3 columns, the others in the rest.
        assert_eq!(up.panels, [0..1, 1..2, 2..4, 4..6]);
        assert_eq!(up.groups, [0, 0, 0, 1, 0, 1]);
    }

    #[test]
    fn numbers_that_are_not_finite_are_refused() {
        let mut values = ups(1);
        values[17 * RANK + 20] = f32::NAN;
        let data = bytes_of(&values, Dtype::F32);
        let refused = Int8Ups::pack(tensor(&data, WIDTH, RANK), WIDTH.div_ceil(PANEL), in_order).err();
        assert_eq!(refused, Some(TensorError::NotFinite { part: 0, row: 17 }));
    }
}
