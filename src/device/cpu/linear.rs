//! `y = x W^T + b` over all rows of the step at once.
//!
//! Rows are packed into tiles of up to 12 (`[k][rows of the tile]`); threads take ranges of weight panels (and, where
//! there are too few panels, ranges of tiles). Work is never split over k: see [`tile`](super::tile).

use rayon::prelude::*;

use super::int8;
use super::isa::Isa;
use super::math::round_bf16;
use super::matrix::{Int8Panels, Matrix, Panels};
use super::quantize::{Quantized, quantize};
use super::tile::{Element, PANEL, Product, max_rows, panels_at_once, product};
use super::{Buffer, SharedMut};

/// Longest part of k whose panels are multiplied in one go, so that they stay in the second-level cache.
const K_BLOCK: usize = 2048;
/// Rows of a block of eight bits, at most.
const INT8_ROWS_MAX: usize = 32;
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

/// Rows as a kernel reads them.
#[derive(Debug, Default)]
pub(super) struct PackedRows {
    /// Tile by tile, each `[k][rows of the tile]`.
    tiles: Vec<f32>,
    quantized: Quantized,
}

/// Rows in tiles of what the kernel takes at once.
struct Tiles {
    rows: usize,
    count: usize,
}

impl Tiles {
    fn new(rows: usize, most: usize) -> Tiles {
        Tiles {
            rows,
            count: rows.div_ceil(most),
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
    packed: &mut PackedRows,
) {
    assert_eq!(x.width, matrix.columns);
    assert!(width <= matrix.rows && finish.bias.is_none_or(|b| b.len() >= width));
    out.reshape(x.rows, width);
    if x.rows == 0 || width == 0 {
        return;
    }
    match &matrix.panels {
        Panels::F32(p) => multiply(isa, p, finish, x, out, &mut packed.tiles),
        Panels::Bf16(p) => multiply(isa, p, finish, x, out, &mut packed.tiles),
        Panels::F16(p) => multiply(isa, p, finish, x, out, &mut packed.tiles),
        Panels::Int8(p) => multiply_int8(isa, p, finish, x, out, &mut packed.quantized),
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
    x: &Buffer,
    out: &mut Buffer,
    packed: &mut Vec<f32>,
) {
    let k = x.width;
    let tiles = Tiles::new(x.rows, max_rows(isa));
    pack(x, &tiles, packed);
    assert!(panels.len() >= out.width.div_ceil(PANEL) * k * PANEL && packed.len() >= tiles.rows * k);
    let group = panels_at_once(isa, tiles.rows.div_ceil(tiles.count));
    let width = out.width;
    let target = SharedMut::new(&mut out.data);
    for_blocks(&tiles, group, k, width, |block| {
        // SAFETY: blocks own disjoint (rows, columns) of the output; sizes were asserted above.
        unsafe { block.run(isa, panels, packed, finish, &target) };
    });
}

fn multiply_int8(
    isa: Isa,
    panels: &Int8Panels,
    finish: Finish<'_>,
    x: &Buffer,
    out: &mut Buffer,
    quantized: &mut Quantized,
) {
    let rows = x.rows;
    quantize(isa, x, quantized);
    let x = &*quantized;
    let padded = out.width.next_multiple_of(PANEL);
    assert!(panels.data.len() >= padded * x.stride && x.data.len() >= rows * x.stride && x.scales.len() >= rows);
    assert!(panels.scales.len() >= padded && panels.offsets.len() >= padded && panels.zeros.len() >= padded);
    let tiles = Tiles::new(rows, int8::max_rows(isa));
    let group = int8::panels_at_once(isa, rows.div_ceil(tiles.count));
    let width = out.width;
    let target = SharedMut::new(&mut out.data);
    for_blocks(&tiles, group, x.stride, width, |block| {
        // SAFETY: blocks own disjoint (rows, columns) of the output; sizes were asserted above.
        unsafe { block.run_int8(isa, panels, finish.bias, x, &target) };
    });
}

/// Calls `run` for each tile of rows and group of `group` panels, shared out to threads.
fn for_blocks(tiles: &Tiles, group: usize, k: usize, width: usize, run: impl Fn(Block) + Sync) {
    let count = width.div_ceil(PANEL);
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
    let task = |i: usize| {
        let (c, r) = (i % column_tasks, i / column_tasks);
        for g in c * groups / column_tasks..(c + 1) * groups / column_tasks {
            let panel = g * group..((g + 1) * group).min(count);
            for t in r * tiles.count / row_tasks..(r + 1) * tiles.count / row_tasks {
                let (from, to) = (tiles.start(t), tiles.start(t + 1));
                run(Block {
                    k,
                    panel: panel.clone(),
                    from,
                    rows: to - from,
                    width,
                });
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

    /// # Safety
    /// As [`run`](Self::run).
    unsafe fn run_int8(&self, isa: Isa, panels: &Int8Panels, bias: Option<&[f32]>, x: &Quantized, out: &SharedMut) {
        let full = (self.width / PANEL).clamp(self.panel.start, self.panel.end);
        let product_of = |range: std::ops::Range<usize>, bias: *const f32, c: *mut f32, c_stride: usize| {
            let column = range.start * PANEL;
            int8::Product {
                quads: self.k / int8::QUAD,
                rows: self.rows,
                a: x.data[self.from * x.stride..].as_ptr(),
                a_stride: x.stride,
                b: panels.data[column * self.k..].as_ptr(),
                panel_stride: self.k * PANEL,
                panels: range.len(),
                row_scales: x.scales[self.from..].as_ptr(),
                column_scales: panels.scales[column..].as_ptr(),
                offsets: panels.offsets[column..].as_ptr(),
                bias,
                c,
                c_stride,
            }
        };
        if self.panel.start < full {
            let column = self.panel.start * PANEL;
            let bias = bias.unwrap_or(&panels.zeros)[column..].as_ptr();
            let c = out.at(self.from * self.width + column);
            // SAFETY: these panels lie within the output's width, and so within the bias.
            unsafe { int8::product(isa, product_of(self.panel.start..full, bias, c, self.width)) };
        }
        if full < self.panel.end {
            // The last panel overhangs the output and the bias: it goes through a tile of its own.
            let (mut tile, mut last) = ([0.0f32; INT8_ROWS_MAX * PANEL], [0.0f32; PANEL]);
            let columns = self.width - full * PANEL;
            if let Some(bias) = bias {
                last[..columns].copy_from_slice(&bias[full * PANEL..][..columns]);
            }
            let product_of = product_of(full..self.panel.end, last.as_ptr(), tile.as_mut_ptr(), PANEL);
            // SAFETY: the tile takes one panel of as many rows as any set does.
            unsafe { int8::product(isa, product_of) };
            for r in 0..self.rows {
                // SAFETY: within this block's rows and columns.
                let row = unsafe { out.slice((self.from + r) * self.width + full * PANEL, columns) };
                row.copy_from_slice(&tile[r * PANEL..r * PANEL + columns]);
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
            linear(isa, &matrix, n, finish, &x, &mut out, &mut PackedRows::default())
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
                let finish = Finish {
                    bias: Some(&bias),
                    round: false,
                };
                let mut out = Buffer::default();
                in_pool(threads, || {
                    linear(isa, &matrix, width, finish, &x, &mut out, &mut PackedRows::default())
                });
                let all = first.get_or_insert_with(|| out.data.clone());
                for i in 0..m {
                    assert_eq!(out.row(i), &all[i * n..][..width], "{isa:?} {m}x{n}x{k} row {i}");
                }
            }
            // Half a step of each factor, at most, over k products.
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
            linear(
                Isa::detect(),
                &matrix,
                n,
                finish,
                &one,
                &mut out,
                &mut PackedRows::default(),
            );
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
        linear(
            Isa::detect(),
            &matrix,
            20,
            finish,
            &x,
            &mut all,
            &mut PackedRows::default(),
        );
        linear(
            Isa::detect(),
            &matrix,
            18,
            finish,
            &x,
            &mut some,
            &mut PackedRows::default(),
        );
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
        for (dtype, precision) in [
            (Dtype::F32, Precision::F32),
            (Dtype::Bf16, Precision::F32),
            (Dtype::Bf16, Precision::Int8),
        ] {
            let data = bytes_of(&numbers(1, n * k), dtype);
            let tensor = Tensor {
                dtype,
                rows: n,
                columns: k,
                data: &data,
            };
            let matrix = Matrix::pack(&[tensor], precision).unwrap();
            for isa in Isa::available().into_iter().filter(|isa| *isa != Isa::Portable) {
                for (threads, m) in [(1, 1), (1, 64), (1, 256), (2, 1), (2, 16), (2, 64), (2, 256)] {
                    let x = buffer(&numbers(2, m * k), m, k);
                    let (mut out, mut packed) = (Buffer::default(), PackedRows::default());
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
                    println!("{isa:?} {dtype:?} weights in {precision:?}, {threads} threads, M={m}: {rate:.1} GFLOP/s");
                }
            }
        }
    }
}
