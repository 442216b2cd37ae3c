//! `y = x W^T + b` over all rows of the step at once.
//!
//! Rows are packed into tiles of up to 12 (`[k][rows of the tile]`); threads take ranges of weight panels (and, where
//! there are too few panels, ranges of tiles). Work is never split over k: see [`tile`](super::tile).

use rayon::prelude::*;

use super::isa::Isa;
use super::math::round_bf16;
use super::matrix::{Matrix, Panels};
use super::tile::{Element, PANEL, Product, max_rows, panels_at_once, product};
use super::{Buffer, SharedMut};

/// Longest part of k whose panels are multiplied in one go, so that they stay in the second-level cache.
const K_BLOCK: usize = 2048;
/// Multiplications below which a product is not worth waking another thread for.
const SERIAL_WORK: usize = 1 << 16;

/// What a linear operation does besides multiplying.
#[derive(Clone, Copy)]
pub(super) struct Finish<'a> {
    /// Added to each row, at least as long as the output is wide.
    pub bias: Option<&'a [f32]>,
    /// Round results to BF16 values.
    pub round: bool,
}

/// Rows packed into tiles.
struct Tiles {
    rows: usize,
    count: usize,
}

impl Tiles {
    fn new(rows: usize, isa: Isa) -> Tiles {
        Tiles {
            rows,
            count: rows.div_ceil(max_rows(isa)),
        }
    }
    /// First row of tile `i`; sizes differ by at most one.
    fn start(&self, i: usize) -> usize {
        i * self.rows / self.count
    }
}

/// Multiplies `x` by the first `width` rows of `matrix`; `out` becomes `[rows][width]`.
pub(super) fn linear(
    isa: Isa,
    matrix: &Matrix,
    width: usize,
    finish: Finish<'_>,
    x: &Buffer,
    out: &mut Buffer,
    packed: &mut Vec<f32>,
) {
    assert_eq!(x.width, matrix.columns);
    assert!(width <= matrix.rows && finish.bias.is_none_or(|b| b.len() >= width));
    out.reshape(x.rows, width);
    if x.rows == 0 || width == 0 {
        return;
    }
    let tiles = Tiles::new(x.rows, isa);
    pack(x, &tiles, packed);
    match &matrix.panels {
        Panels::F32(p) => multiply(isa, p, finish, &tiles, packed, x.width, out),
        Panels::Bf16(p) => multiply(isa, p, finish, &tiles, packed, x.width, out),
        Panels::F16(p) => multiply(isa, p, finish, &tiles, packed, x.width, out),
    }
}

fn pack(x: &Buffer, tiles: &Tiles, packed: &mut Vec<f32>) {
    packed.resize(x.rows * x.width, 0.0);
    let mut rest = packed.as_mut_slice();
    let mut parts = Vec::with_capacity(tiles.count);
    for i in 0..tiles.count {
        let (from, to) = (tiles.start(i), tiles.start(i + 1));
        let (part, tail) = rest.split_at_mut((to - from) * x.width);
        parts.push((from, to - from, part));
        rest = tail;
    }
    let pack_tile = |(from, rows, part): (usize, usize, &mut [f32])| {
        for r in 0..rows {
            for (k, &value) in x.row(from + r).iter().enumerate() {
                part[k * rows + r] = value;
            }
        }
    };
    if x.rows * x.width < SERIAL_WORK {
        parts.into_iter().for_each(pack_tile);
    } else {
        parts.into_par_iter().for_each(pack_tile);
    }
}

fn multiply<E: Element>(
    isa: Isa,
    panels: &[E],
    finish: Finish<'_>,
    tiles: &Tiles,
    packed: &[f32],
    k: usize,
    out: &mut Buffer,
) {
    let width = out.width;
    let count = width.div_ceil(PANEL);
    assert!(panels.len() >= count * k * PANEL && packed.len() >= tiles.rows * k);
    let group = panels_at_once(isa, tiles.rows.div_ceil(tiles.count));
    let groups = count.div_ceil(group);
    let threads = if tiles.rows * k * width < SERIAL_WORK {
        1
    } else {
        rayon::current_num_threads()
    };
    // A few tasks a thread even out differences in speed; tiles are split only where panels do not suffice.
    let wanted = if threads == 1 { 1 } else { threads * 4 };
    let column_tasks = groups.min(wanted);
    let row_tasks = (wanted / column_tasks).clamp(1, tiles.count);
    let target = SharedMut::new(&mut out.data);
    let task = |i: usize| {
        let (c, r) = (i % column_tasks, i / column_tasks);
        for g in c * groups / column_tasks..(c + 1) * groups / column_tasks {
            let panel = g * group..((g + 1) * group).min(count);
            for t in r * tiles.count / row_tasks..(r + 1) * tiles.count / row_tasks {
                let (from, to) = (tiles.start(t), tiles.start(t + 1));
                let block = Block {
                    k,
                    panel: panel.clone(),
                    from,
                    rows: to - from,
                    width,
                };
                // SAFETY: tasks own disjoint (rows, columns) of the output; sizes were asserted above.
                unsafe { block.run(isa, panels, packed, finish, &target) };
            }
        }
    };
    if threads == 1 {
        (0..column_tasks * row_tasks).for_each(task);
    } else {
        (0..column_tasks * row_tasks).into_par_iter().for_each(task);
    }
}

/// One tile of rows times one group of panels.
struct Block {
    k: usize,
    panel: std::ops::Range<usize>,
    from: usize,
    rows: usize,
    width: usize,
}

impl Block {
    /// # Safety
    /// Nobody else touches this block's rows and columns of `out`, and all sizes fit.
    unsafe fn run<E: Element>(&self, isa: Isa, panels: &[E], packed: &[f32], finish: Finish<'_>, out: &SharedMut) {
        let full = (self.width / PANEL).clamp(self.panel.start, self.panel.end);
        let first_column = self.panel.start * PANEL;
        // SAFETY: the first `full` panels lie within the output's width.
        unsafe {
            let c = out.at(self.from * self.width + first_column);
            self.sum(isa, panels, packed, self.panel.start..full, c, self.width);
        }
        if full < self.panel.end {
            // The last panel overhangs the output: it goes through a tile of its own.
            let mut tile = [0.0f32; 12 * PANEL];
            let columns = self.width - full * PANEL;
            // SAFETY: the tile takes 12 rows of one panel.
            unsafe { self.sum(isa, panels, packed, full..self.panel.end, tile.as_mut_ptr(), PANEL) };
            for r in 0..self.rows {
                // SAFETY: within this block's rows and columns.
                let row = unsafe { out.slice((self.from + r) * self.width + full * PANEL, columns) };
                row.copy_from_slice(&tile[r * PANEL..r * PANEL + columns]);
            }
        }
        if finish.bias.is_none() && !finish.round {
            return;
        }
        let columns = (self.panel.end * PANEL).min(self.width) - first_column;
        for r in 0..self.rows {
            // SAFETY: within this block's rows and columns.
            let row = unsafe { out.slice((self.from + r) * self.width + first_column, columns) };
            if let Some(bias) = finish.bias {
                row.iter_mut().zip(&bias[first_column..]).for_each(|(y, b)| *y += b);
            }
            if finish.round {
                row.iter_mut().for_each(|y| *y = round_bf16(*y));
            }
        }
    }

    /// Sums over all of k into `c`.
    ///
    /// # Safety
    /// `c` takes this block's rows of these panels.
    unsafe fn sum<E: Element>(
        &self,
        isa: Isa,
        panels: &[E],
        packed: &[f32],
        range: std::ops::Range<usize>,
        c: *mut f32,
        c_stride: usize,
    ) {
        if range.is_empty() {
            return;
        }
        let mut k = 0;
        loop {
            let depth = (self.k - k).min(K_BLOCK);
            // SAFETY: `packed` holds `k * rows` numbers of this tile, `panels` k * 16 of each panel.
            unsafe {
                product(
                    isa,
                    Product {
                        k: depth,
                        rows: self.rows,
                        a: packed.as_ptr().add(self.from * self.k + k * self.rows),
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
    use crate::device::cpu::testing::{buffer, bytes_of, in_pool, numbers};
    use crate::device::{Dtype, Precision, Tensor};

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
        let finish = Finish {
            bias: with_bias.then_some(&bias[..]),
            round: false,
        };
        let mut out = Buffer::default();
        in_pool(threads, || {
            linear(isa, &matrix, n, finish, &x, &mut out, &mut Vec::new())
        });
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
            let mut out = Buffer::default();
            let finish = Finish {
                bias: Some(&bias),
                round: false,
            };
            linear(Isa::detect(), &matrix, n, finish, &one, &mut out, &mut Vec::new());
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
        let (mut all, mut some) = (Buffer::default(), Buffer::default());
        let finish = Finish {
            bias: None,
            round: false,
        };
        linear(Isa::detect(), &matrix, 20, finish, &x, &mut all, &mut Vec::new());
        linear(Isa::detect(), &matrix, 18, finish, &x, &mut some, &mut Vec::new());
        assert_eq!(some.width, 18);
        for i in 0..2 {
            assert_eq!(some.row(i), &all.row(i)[..18]);
        }
    }

    /// Prints speeds; run by hand: `cargo test --release --lib speed_of_products -- --ignored --nocapture`.
    #[test]
    #[ignore = "a measurement, not a check"]
    fn speed_of_products() {
        let (n, k) = (1024, 1024);
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let data = bytes_of(&numbers(1, n * k), dtype);
            let tensor = Tensor {
                dtype,
                rows: n,
                columns: k,
                data: &data,
            };
            let matrix = Matrix::pack(&[tensor], Precision::F32).unwrap();
            for isa in Isa::available().into_iter().filter(|isa| *isa != Isa::Portable) {
                for (threads, m) in [(1, 1), (1, 64), (1, 256), (2, 1), (2, 16), (2, 64), (2, 256)] {
                    let x = buffer(&numbers(2, m * k), m, k);
                    let (mut out, mut packed) = (Buffer::default(), Vec::new());
                    let finish = Finish {
                        bias: None,
                        round: false,
                    };
                    let repeats = 1 + 512 / m;
                    let seconds = in_pool(threads, || {
                        let mut best = f64::INFINITY;
                        for _ in 0..20 {
                            let start = std::time::Instant::now();
                            for _ in 0..repeats {
                                linear(isa, &matrix, n, finish, &x, &mut out, &mut packed);
                            }
                            best = best.min(start.elapsed().as_secs_f64() / repeats as f64);
                        }
                        best
                    });
                    let rate = 2.0 * (m * n * k) as f64 / seconds / 1e9;
                    println!("{isa:?} {dtype:?} weights, {threads} threads, M={m}: {rate:.1} GFLOP/s");
                }
            }
        }
    }
}
