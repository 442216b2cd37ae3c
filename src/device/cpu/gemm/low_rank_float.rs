//! The two matrices of an adapter for models that compute in F32 or BF16, or have weights in four bits, and the kernel of both products.
//! The second product is added to the result of a linear operation
//! while the kernel of that operation has just written it.
//!
//! `c[r][n] += sum over k of x[r][k] * m[n][k]`, with fused multiply-adds in the order of k, which begin with what `c` is before: zeros
//! for the first matrix, the result of the linear operation for the second one. The order is the same for every row count, instruction
//! set and division of the work, so results do not depend on the batch. Rows are read as they are: copying them into tiles takes
//! about as many instructions as multiplying them by so few columns.

#![expect(unsafe_code, reason = "kernels take addresses of parts of a buffer")]

use std::ops::Range;

use super::low_rank::{LowRankRun, Part, read_panel};
use super::tile::{Bf16, Element, PANEL};
use crate::device::cpu::isa::{Isa, multiversion};
use crate::device::cpu::math::round_bf16;
use crate::device::cpu::{Buffer, ExecContext, SharedMut};
use crate::device::{Dtype, Tensor, TensorError};

/// Rows whose sums with a panel are in registers at once, where registers have 512 bits.
const WIDE_ROWS: usize = 8;
/// As [`WIDE_ROWS`], where they have 256 bits; and for so few rows.
const ROWS: usize = 4;

/// A matrix of an adapter, in panels of 16 rows. Each panel has only those columns in which one of its rows has a number other
/// than 0, since several projections in one matrix each have first matrices of their own.
pub(crate) struct LowRankPanels {
    values: Values,
    panels: Vec<Panel>,
    rows: usize,
    columns: usize,
}

/// `[k][16]` for each panel.
enum Values {
    F32(Vec<[f32; PANEL]>),
    Bf16(Vec<[Bf16; PANEL]>),
}

struct Panel {
    /// Where its values lie.
    values: Range<usize>,
    first_column: usize,
}

impl LowRankPanels {
    /// The rows of `matrix` in order.
    ///
    /// # Errors
    /// As [`pack`](Self::pack).
    pub(crate) fn pack_rows(matrix: Tensor<'_>, dtype: Dtype) -> Result<LowRankPanels, TensorError> {
        let row_of = |lane| (lane < matrix.rows).then_some(lane);
        LowRankPanels::pack(matrix, dtype, matrix.rows.div_ceil(PANEL), row_of)
    }

    /// `row_of(panel * 16 + lane)` is the row of `matrix` in this lane, or `None` for zeros. `panels`: their number.
    ///
    /// # Errors
    /// If a number is not finite once it is stored as `dtype`, F32 or BF16.
    pub(crate) fn pack(
        matrix: Tensor<'_>,
        dtype: Dtype,
        panels: usize,
        row_of: impl Fn(usize) -> Option<usize>,
    ) -> Result<LowRankPanels, TensorError> {
        let mut packed = LowRankPanels {
            values: match dtype {
                Dtype::F32 => Values::F32(Vec::new()),
                _ => Values::Bf16(Vec::new()),
            },
            panels: Vec::with_capacity(panels),
            rows: matrix.rows,
            columns: matrix.columns,
        };
        let mut rows = vec![0.0f32; PANEL * matrix.columns];
        for panel in 0..panels {
            let is_stored = |x: &f32| x.is_finite() && (dtype == Dtype::F32 || round_bf16(*x).is_finite());
            read_panel(&matrix, |lane| row_of(panel * PANEL + lane), is_stored, &mut rows)?;
            packed.push(&rows);
        }
        Ok(packed)
    }

    /// Adds a panel with these rows.
    fn push(&mut self, rows: &[f32]) {
        let value = |lane: usize, k: usize| rows[lane * self.columns + k];
        let is_used = |k: &usize| (0..PANEL).any(|lane| value(lane, *k) != 0.0);
        let first = (0..self.columns).find(is_used).unwrap_or(0);
        let end = (0..self.columns).rfind(is_used).map_or(first, |last| last + 1);
        let values = match &mut self.values {
            Values::F32(values) => append(values, first..end, value),
            Values::Bf16(values) => append(values, first..end, value),
        };
        self.panels.push(Panel {
            values,
            first_column: first,
        });
    }
}

/// Appends these columns of a panel, and returns where they lie.
fn append<E: Element>(
    values: &mut Vec<[E; PANEL]>,
    columns: Range<usize>,
    value: impl Fn(usize, usize) -> f32,
) -> Range<usize> {
    let start = values.len();
    values.extend(columns.map(|k| std::array::from_fn(|lane| E::narrow(value(lane, k)))));
    start..values.len()
}

/// The two matrices of an adapter.
pub(crate) struct FloatLowRank {
    /// `[rank][in features]`.
    pub down: LowRankPanels,
    /// `[out features][rank]`.
    pub up: LowRankPanels,
}

/// Computes the first products of all runs: `low` becomes `[rows of all runs, one run after the other][rank]`. All `down` have one shape.
pub(crate) fn multiply_down(
    ctx: ExecContext<'_>,
    runs: &[LowRankRun<'_, FloatLowRank>],
    round_to_bf16: bool,
    x: &Buffer,
    low: &mut Buffer,
) {
    let rank = runs.first().map_or(0, |run| run.matrices.down.rows);
    low.reshape(runs.iter().map(|run| run.rows.rows().len()).sum(), rank);
    let rows_at_once = rows_at_once(ctx.isa);
    let mut tasks = Vec::new();
    for run in runs {
        let down = &run.matrices.down;
        assert_eq!((down.rows, down.columns), (rank, x.width));
        let parts = run.rows.rows().chunks(rows_at_once);
        for (rows, at) in parts.zip((run.first..).step_by(rows_at_once)) {
            tasks.extend((0..down.panels.len()).map(|panel| (down, rows, at, panel)));
        }
    }
    let products = low.data.len() * x.width;
    let out = SharedMut::new(&mut low.data);
    ctx.threads.parallel_for_each(products, &mut tasks, |_, tasks| {
        for (down, rows, at, panel) in tasks {
            let column = *panel * PANEL;
            let columns = (rank - column).min(PANEL);
            let c = |i: usize| out.ptr_at((*at + i) * rank + column);
            for i in 0..rows.len() {
                // SAFETY: each task has rows and columns of its own.
                unsafe { std::slice::from_raw_parts_mut(c(i), columns) }.fill(0.0);
            }
            let tile = RowsAndPanels {
                panels: &down.panels[*panel..=*panel],
                columns,
                count: rows.len(),
            };
            // SAFETY: as above.
            unsafe { tile.multiply(ctx.isa, &down.values, round_to_bf16, |i| x.row(rows[i] as usize), c) };
        }
    });
}

/// What adapters add to the result of a linear operation.
pub(crate) struct FloatAdded<'a> {
    /// Of different adapters, whose rows are different, too.
    pub runs: Vec<LowRankRun<'a, FloatLowRank>>,
    /// The rows after the first matrix.
    pub low: &'a Buffer,
    /// Round results to BF16 values.
    pub round_to_bf16: bool,
}

impl FloatAdded<'_> {
    /// Adds to a part of the result.
    ///
    /// # Safety
    /// The memory of the part's rows and columns is valid, and no other code reads or writes it during the call.
    pub(super) unsafe fn add(&self, isa: Isa, part: &Part) {
        for run in &self.runs {
            let places = run.rows.places(&part.rows);
            // Sequences of an adapter lie side by side, so most tiles have rows of one adapter alone.
            if places.is_empty() {
                continue;
            }
            let (rows, up) = (&run.rows.rows()[places.clone()], &run.matrices.up);
            let tile = RowsAndPanels {
                panels: &up.panels[part.panels.clone()],
                columns: part.columns,
                count: rows.len(),
            };
            let low = |i: usize| self.low.row(run.first + places.start + i);
            let c = |i: usize| part.c.wrapping_add(rows[i] as usize * part.c_stride);
            // SAFETY: within the part, whose memory is the caller's alone.
            unsafe { tile.multiply(isa, &up.values, self.round_to_bf16, low, c) };
        }
    }
}

/// Rows whose sums with a panel are in registers at once.
fn rows_at_once(isa: Isa) -> usize {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Avx512Vnni | Isa::Avx512Bf16 | Isa::Amx => WIDE_ROWS,
        _ => ROWS,
    }
}

/// Some rows and panels.
struct RowsAndPanels<'a> {
    panels: &'a [Panel],
    /// Columns of the result from the first panel on.
    columns: usize,
    /// Number of rows.
    count: usize,
}

impl RowsAndPanels<'_> {
    /// Adds the products of rows `x(i)` to the rows `c(i)` of the result, which begin with the first panel's first column.
    ///
    /// # Safety
    /// The rows of the result have `columns` numbers of valid memory, which no other code reads or writes during the call.
    unsafe fn multiply<'x>(
        &self,
        isa: Isa,
        values: &Values,
        round_to_bf16: bool,
        x: impl Fn(usize) -> &'x [f32],
        c: impl Fn(usize) -> *mut f32,
    ) {
        let mut start = 0;
        while start < self.count {
            // Without a row, the last one is computed once more, to the same result.
            let row = |i: usize| (start + i).min(self.count - 1);
            if rows_at_once(isa) == WIDE_ROWS && self.count - start > ROWS {
                let tile = self.tile::<WIDE_ROWS>((&x, &c), row);
                match values {
                    Values::F32(values) => multiply_f32_wide(isa, &tile, values),
                    Values::Bf16(values) => multiply_bf16_wide(isa, &tile, values),
                }
                start += WIDE_ROWS;
            } else {
                let tile = self.tile::<ROWS>((&x, &c), row);
                match values {
                    Values::F32(values) => multiply_f32(isa, &tile, values),
                    Values::Bf16(values) => multiply_bf16(isa, &tile, values),
                }
                start += ROWS;
            }
        }
        if round_to_bf16 {
            for i in 0..self.count {
                // SAFETY: as the caller guarantees.
                let c = unsafe { std::slice::from_raw_parts_mut(c(i), self.columns) };
                round_to_bf16_on(isa, c);
            }
        }
    }

    fn tile<'x, const R: usize>(
        &self,
        (x, c): (&impl Fn(usize) -> &'x [f32], &impl Fn(usize) -> *mut f32),
        row: impl Fn(usize) -> usize,
    ) -> LowTile<'_, 'x, R> {
        LowTile {
            x: std::array::from_fn(|i| x(row(i))),
            panels: self.panels,
            columns: self.columns,
            c: std::array::from_fn(|i| c(row(i))),
        }
    }
}

#[inline(always)]
fn round_all_to_bf16(values: &mut [f32]) {
    for x in values {
        *x = round_bf16(*x);
    }
}

multiversion! {
    fn round_to_bf16_on(values: &mut [f32]) = round_all_to_bf16;
}

/// A few rows and panels.
struct LowTile<'a, 'x, const R: usize> {
    x: [&'x [f32]; R],
    panels: &'a [Panel],
    columns: usize,
    /// The rows of the result, `[columns]` each, at the first panel's first column; valid and the caller's alone.
    c: [*mut f32; R],
}

// Loops over indices: the compiler inlines no closures into functions with other instruction sets.
#[inline(always)]
#[expect(clippy::needless_range_loop)]
fn multiply_panels<E: Element, const R: usize>(tile: &LowTile<'_, '_, R>, values: &[[E; PANEL]]) {
    for p in 0..tile.panels.len() {
        let panel = &tile.panels[p];
        let values = &values[panel.values.start..panel.values.end];
        let (first, end) = (panel.first_column, panel.first_column + values.len());
        let mut x = tile.x;
        for r in 0..R {
            x[r] = &tile.x[r][first..end];
        }
        let columns = tile.columns - p * PANEL;
        if columns >= PANEL {
            let mut sums = [[0.0f32; PANEL]; R];
            for r in 0..R {
                // SAFETY: within the tile's memory.
                sums[r] = unsafe { tile.c[r].add(p * PANEL).cast::<[f32; PANEL]>().read() };
            }
            let sums = add_products(sums, x, values);
            for r in 0..R {
                // SAFETY: as above.
                unsafe { tile.c[r].add(p * PANEL).cast::<[f32; PANEL]>().write(sums[r]) };
            }
        } else {
            // Arrays of their own: those with places that are known at run time alone are kept in memory.
            let mut before = [[0.0f32; PANEL]; R];
            for r in 0..R {
                for lane in 0..columns {
                    // SAFETY: as above.
                    before[r][lane] = unsafe { *tile.c[r].add(p * PANEL + lane) };
                }
            }
            let after = add_products(before, x, values);
            for r in 0..R {
                for lane in 0..columns {
                    // SAFETY: as above.
                    unsafe { *tile.c[r].add(p * PANEL + lane) = after[r][lane] };
                }
            }
        }
    }
}

#[inline(always)]
fn add_products<E: Element, const R: usize>(
    mut sums: [[f32; PANEL]; R],
    x: [&[f32]; R],
    values: &[[E; PANEL]],
) -> [[f32; PANEL]; R] {
    for k in 0..values.len() {
        let mut widened = [0.0f32; PANEL];
        for lane in 0..PANEL {
            widened[lane] = values[k][lane].widen();
        }
        for r in 0..R {
            let x = x[r][k];
            for lane in 0..PANEL {
                sums[r][lane] = x.mul_add(widened[lane], sums[r][lane]);
            }
        }
    }
    sums
}

multiversion! {
    fn multiply_f32(tile: &LowTile<'_, '_, ROWS>, values: &[[f32; PANEL]]) = multiply_panels;
}

multiversion! {
    fn multiply_bf16(tile: &LowTile<'_, '_, ROWS>, values: &[[Bf16; PANEL]]) = multiply_panels;
}

multiversion! {
    fn multiply_f32_wide(tile: &LowTile<'_, '_, WIDE_ROWS>, values: &[[f32; PANEL]]) = multiply_panels;
}

multiversion! {
    fn multiply_bf16_wide(tile: &LowTile<'_, '_, WIDE_ROWS>, values: &[[Bf16; PANEL]]) = multiply_panels;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Precision;
    use crate::device::cpu::gemm::linear::{Epilogue, PackedRows, linear};
    use crate::device::cpu::gemm::low_rank::{AdapterRows, Added};
    use crate::device::cpu::gemm::matrix::Matrix;
    use crate::device::cpu::testing::{buffer, bytes_of, ctx_with_threads, numbers, tensor, two_parts};

    #[test]
    fn rows_of_adapters_get_what_is_theirs_in_any_batch() {
        let (rows, width, k, rank) = (29, 53, 40, 7);
        let weights = bytes_of(&numbers(1, width * k), Dtype::F32);
        let x = buffer(&numbers(2, rows * k), rows, k);
        let lows = numbers(3, rows * rank);
        // Every fifth row has no adapter.
        let of_adapter = |adapter: u32| move |row: &u32| !row.is_multiple_of(5) && row % 2 == adapter;
        for (precision, dtype) in [
            (Precision::F32, Dtype::F32),
            (Precision::Int8, Dtype::Bf16),
            (Precision::Bf16, Dtype::Bf16),
        ] {
            let matrix = Matrix::pack(&[tensor(&weights, width, k)], precision).unwrap();
            let stored = |x: f32| if dtype == Dtype::Bf16 { round_bf16(x) } else { x };
            let values: Vec<Vec<f32>> = (4..6).map(|seed| two_parts(seed, [20, width], rank)).collect();
            let packed =
                |values: &Vec<f32>| LowRankPanels::pack_rows(tensor(&bytes_of(values, Dtype::F32), width, rank), dtype);
            let unused = bytes_of(&numbers(6, rank * k), Dtype::F32);
            let matrices: Vec<FloatLowRank> = values
                .iter()
                .map(|values| FloatLowRank {
                    down: LowRankPanels::pack_rows(tensor(&unused, rank, k), dtype).unwrap(),
                    up: packed(values).unwrap(),
                })
                .collect();
            let round_to_bf16 = precision == Precision::Bf16;
            let product = |isa, threads, x: &Buffer, rows: [Vec<u32>; 2], low: &Buffer| {
                let first = [0, rows[0].len()];
                let rows = rows.map(|rows| AdapterRows::new(rows, x.rows));
                let runs = rows.iter().zip(first).zip(&matrices);
                let run = |((rows, first), matrices)| LowRankRun { rows, first, matrices };
                let added = Added::Float(FloatAdded {
                    runs: runs.map(run).collect(),
                    low,
                    round_to_bf16,
                });
                let epilogue = Epilogue {
                    bias: None,
                    added: Some(&added),
                    round_to_bf16,
                };
                let (mut out, ctx) = (Buffer::default(), ctx_with_threads(isa, threads));
                linear(ctx, &matrix, width, epilogue, x, &mut out, &mut PackedRows::default());
                out
            };
            let picked = [0, 1].map(|adapter| (0..rows as u32).filter(of_adapter(adapter)).collect::<Vec<_>>());
            let order: Vec<u32> = picked.iter().flatten().copied().collect();
            let low_rows: Vec<f32> = order
                .iter()
                .flat_map(|row| &lows[*row as usize * rank..][..rank])
                .copied()
                .collect();
            let low = buffer(&low_rows, order.len(), rank);
            let mut first: Option<Vec<f32>> = None;
            for isa in Isa::available() {
                let plain = product(isa, 2, &x, [Vec::new(), Vec::new()], &low);
                let out = product(isa, 2, &x, picked.clone(), &low);
                let place = |row: usize| order.iter().position(|r| *r as usize == row);
                for (row, column) in (0..rows).flat_map(|row| (0..width).map(move |column| (row, column))) {
                    let (got, base) = (out.row(row)[column], plain.row(row)[column]);
                    if place(row).is_none() {
                        assert_eq!(got, base, "{isa:?} {precision:?} ({row}, {column})");
                        continue;
                    }
                    let up = &values[row % 2][column * rank..][..rank];
                    let products = up.iter().zip(&lows[row * rank..]);
                    let want = f64::from(base)
                        + products
                            .map(|(u, l)| f64::from(stored(*u)) * f64::from(*l))
                            .sum::<f64>();
                    let bound = if round_to_bf16 { want.abs() / 256.0 } else { 1e-5 };
                    assert!(
                        (f64::from(got) - want).abs() <= bound,
                        "{isa:?} {precision:?} ({row}, {column}): {got} {want}"
                    );
                }
                assert_eq!(
                    *first.get_or_insert_with(|| out.data.to_vec()),
                    out.data,
                    "{isa:?} {precision:?}"
                );
                assert_eq!(
                    product(isa, 1, &x, picked.clone(), &low).data,
                    out.data,
                    "{isa:?} {precision:?}"
                );
                // A row by itself.
                for row in [1, 2, 28] {
                    let mut own = [Vec::new(), Vec::new()];
                    own[row % 2] = vec![0];
                    let alone = product(
                        isa,
                        2,
                        &buffer(x.row(row), 1, k),
                        own,
                        &buffer(&lows[row * rank..][..rank], 1, rank),
                    );
                    assert_eq!(alone.data, out.row(row), "{isa:?} {precision:?} {row}");
                }
            }
        }
    }

    #[test]
    fn first_products_have_the_same_bits_in_any_batch() {
        let (rows, k, rank) = (31, 70, 21);
        let x = buffer(&numbers(1, rows * k), rows, k);
        let downs = [2, 3].map(|seed| numbers(seed, rank * k));
        // Every third row has no adapter.
        let picked = [0, 1].map(|adapter| (0..rows as u32).filter(|row| row % 3 == adapter).collect::<Vec<_>>());
        for (dtype, round_to_bf16) in [(Dtype::F32, false), (Dtype::Bf16, false), (Dtype::Bf16, true)] {
            let stored = |x: f32| if dtype == Dtype::Bf16 { round_bf16(x) } else { x };
            let matrices = downs.each_ref().map(|down| FloatLowRank {
                down: LowRankPanels::pack_rows(tensor(&bytes_of(down, Dtype::F32), rank, k), dtype).unwrap(),
                up: LowRankPanels::pack_rows(tensor(&bytes_of(&numbers(4, rank), Dtype::F32), 1, rank), dtype).unwrap(),
            });
            let product = |isa, threads, picked: &[(usize, &[u32])]| {
                let of_adapter = |(_, rows): &(usize, &[u32])| AdapterRows::new(rows.to_vec(), x.rows);
                let rows: Vec<AdapterRows> = picked.iter().map(of_adapter).collect();
                let mut first = 0;
                let runs = picked.iter().zip(&rows).map(|((adapter, _), rows)| {
                    first += rows.rows().len();
                    LowRankRun {
                        rows,
                        first: first - rows.rows().len(),
                        matrices: &matrices[*adapter],
                    }
                });
                // What was in the memory before does not matter.
                let mut low = buffer(&[9.0; 700], 7, 100);
                let ctx = ctx_with_threads(isa, threads);
                multiply_down(ctx, &runs.collect::<Vec<_>>(), round_to_bf16, &x, &mut low);
                low
            };
            let both = [(0, &picked[0][..]), (1, &picked[1][..])];
            let mut first: Option<Vec<f32>> = None;
            for isa in Isa::available() {
                let low = product(isa, 2, &both);
                assert_eq!((low.rows, low.width), (picked[0].len() + picked[1].len(), rank));
                assert!(*first.get_or_insert_with(|| low.data.to_vec()) == low.data, "{isa:?}");
                assert!(product(isa, 1, &both).data == low.data, "{isa:?}, one thread");
                let of = picked
                    .iter()
                    .enumerate()
                    .flat_map(|(adapter, rows)| rows.iter().map(move |row| (adapter, *row)));
                for (at, (adapter, row)) in of.enumerate() {
                    assert_eq!(
                        product(isa, 2, &[(adapter, &[row])]).data,
                        low.row(at),
                        "{isa:?} row {row}"
                    );
                    for n in 0..rank {
                        let products = downs[adapter][n * k..][..k].iter().zip(x.row(row as usize));
                        let want: f64 = products.map(|(m, x)| f64::from(stored(*m)) * f64::from(*x)).sum();
                        let bound = if round_to_bf16 { 1e-5 + want.abs() / 256.0 } else { 1e-5 };
                        let got = f64::from(low.row(at)[n]);
                        assert!(
                            (got - want).abs() <= bound,
                            "{isa:?} {dtype:?} ({row}, {n}): {got} {want}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn columns_of_zeros_are_not_kept() {
        let (rows, rank) = (40, 7);
        let data = bytes_of(&two_parts(1, [20, rows], rank), Dtype::F32);
        let up = LowRankPanels::pack_rows(tensor(&data, rows, rank), Dtype::F32).unwrap();
        let kept: Vec<_> = up
            .panels
            .iter()
            .map(|panel| (panel.first_column, panel.values.len()))
            .collect();
        // Rows 0 to 15, 16 to 31 (of both parts), 32 to 39.
        assert_eq!(kept, [(0, 3), (0, 7), (3, 4)]);
    }

    #[test]
    fn numbers_that_cannot_be_stored_are_refused() {
        let refused = |x: f32, dtype: Dtype| {
            let mut values = vec![0.5; 20 * 2];
            values[17 * 2 + 1] = x;
            let data = bytes_of(&values, Dtype::F32);
            LowRankPanels::pack_rows(tensor(&data, 20, 2), dtype).err()
        };
        assert!(matches!(
            refused(f32::NAN, Dtype::F32),
            Some(TensorError::NotFinite { row: 17, .. })
        ));
        assert!(matches!(
            refused(f32::MAX, Dtype::Bf16),
            Some(TensorError::NotFinite { row: 17, .. })
        ));
        assert!(refused(f32::MAX, Dtype::F32).is_none());
    }
}
