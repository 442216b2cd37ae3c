//! GPTQ (Frantar et al. 2022): weights are rounded one column after the other, and the columns that are
//! left make up for what rounding changed of the layer's outputs.
//!
//! The squared error of outputs over some inputs is dᵀHd for the difference d of a row, where H is the
//! sum of x xᵀ over the inputs x. With H = RᵀR (Cholesky, R upper triangular), that is the sum over
//! columns i of (R_ii d_i + Σ_{j>i} R_ij d_j)². From the last column on, each is rounded so that its term
//! is as small as it can be, given the columns behind it. That gives the numbers that the formulation by
//! the inverse of H gives (columns in reverse order), and needs no inverse.
//!
//! Columns whose inputs are large come first (`act_order`, as static groups): they have the most columns
//! left to make up for them. Their groups are still those of neighbours.

use rayon::prelude::*;

use super::grid::{Grid, inverse};

/// Rows that are rounded together: each number of R is read once for all of them.
const TILE: usize = 16;
/// Columns of a step of the factorization.
const BLOCK: usize = 64;
/// The share of the mean of H's diagonal that is added to it, as in GPTQ's own program.
const DAMPING: f32 = 0.01;
/// Times by which damping is raised tenfold where H cannot be factorized.
const TRIES: u32 = 4;

/// Inputs of a matrix, as rounding reads them.
pub(super) struct Inputs {
    columns: usize,
    /// Column of the matrix at each place of `root`, the least important first.
    order: Vec<usize>,
    /// R, `[columns][columns]`, upper triangular.
    root: Vec<f32>,
    /// The mean square of each column's inputs, by column.
    pub(super) squares: Vec<f32>,
}

/// A rounded matrix.
pub(super) struct Rounded {
    /// `[rows][columns]`
    pub codes: Vec<u8>,
    /// Sums over the matrix: the squared change of outputs, and the squared outputs, or of weights without inputs.
    pub error: f64,
    pub total: f64,
}

impl Inputs {
    /// `sums`: H, `[columns][columns]`, symmetric. `None`: all inputs were zero, as behind a norm whose weights
    /// are, and no output tells one rounding from another.
    ///
    /// # Errors
    /// The sums are no finite numbers.
    pub(super) fn of(sums: &[f32], columns: usize) -> Result<Option<Inputs>, String> {
        let squares: Vec<f32> = (0..columns).map(|i| sums[i * columns + i]).collect();
        let mean = squares.iter().sum::<f32>() / columns.max(1) as f32;
        if !mean.is_finite() {
            return Err("the inputs of a layer are no finite numbers".into());
        }
        if mean == 0.0 {
            return Ok(None);
        }
        let mut order: Vec<usize> = (0..columns).collect();
        order.sort_by(|a, b| squares[*a].total_cmp(&squares[*b]));
        let mut damping = DAMPING;
        for _ in 0..TRIES {
            let mut root = vec![0.0; columns * columns];
            root.par_chunks_mut(columns.max(1)).enumerate().for_each(|(i, row)| {
                let of_column = &sums[order[i] * columns..][..columns];
                for (j, x) in row.iter_mut().enumerate() {
                    *x = of_column[order[j]];
                }
                row[i] += damping * mean;
            });
            if factorize(&mut root, columns) {
                return Ok(Some(Inputs {
                    columns,
                    root: transposed(&root, columns),
                    order,
                    squares,
                }));
            }
            damping *= 10.0;
        }
        Err("the sums over a layer's inputs cannot be factorized".into())
    }

    /// Rounds `values`, `[rows][columns]`, with factors `[rows][columns / group]`.
    pub(super) fn round(&self, grid: Grid, values: &[f32], factors: &[f32], group: usize) -> Rounded {
        let columns = self.columns;
        let groups = columns / group;
        let mut codes = vec![0; values.len()];
        let tiles = codes.par_chunks_mut(TILE * columns).enumerate();
        let (error, total) = tiles
            .map(|(tile, codes)| {
                let first = tile * TILE;
                let rows = codes.len() / columns;
                // By place, then by row: a place is one vector.
                let mut weights = vec![[0.0f32; TILE]; columns];
                for (place, column) in self.order.iter().enumerate() {
                    for row in 0..rows {
                        weights[place][row] = values[(first + row) * columns + column];
                    }
                }
                let mut changes = vec![[0.0f32; TILE]; columns];
                let (mut error, mut total) = (0.0f64, 0.0f64);
                for place in (0..columns).rev() {
                    let column = self.order[place];
                    let root = &self.root[place * columns..][..columns];
                    let behind = combine(&root[place + 1..], &changes[place + 1..]);
                    let outputs = combine(&root[place..], &weights[place..]);
                    for row in 0..rows {
                        let factor = factors[(first + row) * groups + column / group];
                        let wanted = weights[place][row] + behind[row] / root[place];
                        let code = grid.code(wanted * inverse(factor));
                        let value = grid.value(code) * factor;
                        codes[row * columns + column] = code;
                        changes[place][row] = weights[place][row] - value;
                        error += f64::from(root[place] * (wanted - value)).powi(2);
                        total += f64::from(outputs[row]).powi(2);
                    }
                }
                (error, total)
            })
            .reduce(|| (0.0, 0.0), |a, b| (a.0 + b.0, a.1 + b.1));
        Rounded { codes, error, total }
    }
}

/// Rounds `values`, `[rows][columns]`, each to the nearest code, with factors `[rows][columns / group]`.
pub(super) fn nearest(grid: Grid, values: &[f32], factors: &[f32], group: usize) -> Rounded {
    let mut codes = vec![0; values.len()];
    let groups = values.par_chunks(group).zip(codes.par_chunks_mut(group)).zip(factors);
    let (error, total) = groups
        .map(|((values, codes), factor)| {
            let inverse = inverse(*factor);
            let (mut error, mut total) = (0.0, 0.0);
            for (x, code) in values.iter().zip(codes) {
                *code = grid.code(x * inverse);
                error += f64::from(x - grid.value(*code) * factor).powi(2);
                total += f64::from(*x).powi(2);
            }
            (error, total)
        })
        .reduce(|| (0.0, 0.0), |a, b| (a.0 + b.0, a.1 + b.1));
    Rounded { codes, error, total }
}

/// The sum of vectors, each times its number.
fn combine(numbers: &[f32], vectors: &[[f32; TILE]]) -> [f32; TILE] {
    let mut sums = [0.0; TILE];
    for (number, vector) in numbers.iter().zip(vectors) {
        for (sum, x) in sums.iter_mut().zip(vector) {
            *sum += number * x;
        }
    }
    sums
}

fn transposed(matrix: &[f32], n: usize) -> Vec<f32> {
    let mut out = vec![0.0; n * n];
    out.par_chunks_mut(n.max(1)).enumerate().for_each(|(i, row)| {
        for (j, x) in row.iter_mut().enumerate().skip(i) {
            *x = matrix[j * n + i];
        }
    });
    out
}

/// Replaces the lower half of a symmetric matrix by L, where the matrix is L Lᵀ. `false`: it is not
/// positive definite.
fn factorize(matrix: &mut [f32], n: usize) -> bool {
    for first in (0..n).step_by(BLOCK) {
        let end = (first + BLOCK).min(n);
        let width = end - first;
        if !factorize_block(matrix, n, first..end) {
            return false;
        }
        let (above, below) = matrix.split_at_mut(end * n);
        let block = &above[first * n..];
        below.par_chunks_mut(n.max(1)).for_each(|row| {
            for j in 0..width {
                let of_block = &block[j * n + first..][..=j];
                let sum: f32 = row[first..first + j].iter().zip(of_block).map(|(a, b)| a * b).sum();
                row[first + j] = (row[first + j] - sum) / of_block[j];
            }
        });
        // The new columns, one after the other, so that the update reads neighbours.
        let count = n - end;
        let mut columns = vec![0.0f32; width * count];
        for (i, row) in below.chunks(n.max(1)).enumerate() {
            for j in 0..width {
                columns[j * count + i] = row[first + j];
            }
        }
        below.par_chunks_mut(n.max(1)).enumerate().for_each(|(i, row)| {
            let own: Vec<f32> = row[first..end].to_vec();
            for start in (0..=i).step_by(BLOCK) {
                let length = BLOCK.min(i + 1 - start);
                let mut sums = [0.0f32; BLOCK];
                for (j, factor) in own.iter().enumerate() {
                    let column = &columns[j * count + start..][..length];
                    for (sum, x) in sums.iter_mut().zip(column) {
                        *sum += factor * x;
                    }
                }
                for (x, sum) in row[end + start..][..length].iter_mut().zip(sums) {
                    *x -= sum;
                }
            }
        });
    }
    true
}

/// As [`factorize`], for the rows and columns of a block alone.
fn factorize_block(matrix: &mut [f32], n: usize, block: std::ops::Range<usize>) -> bool {
    for i in block.clone() {
        for j in block.start..=i {
            let product = |k: usize| f64::from(matrix[i * n + k]) * f64::from(matrix[j * n + k]);
            let left = f64::from(matrix[i * n + j]) - (block.start..j).map(product).sum::<f64>();
            if i == j {
                if !(left > 0.0 && left.is_finite()) {
                    return false;
                }
                matrix[i * n + i] = left.sqrt() as f32;
            } else {
                matrix[i * n + j] = (left / f64::from(matrix[j * n + j])) as f32;
            }
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::super::grid::FactorDtype;
    use super::*;
    use crate::device::cpu::testing::numbers;

    /// Inputs that depend on each other, and the sums over them.
    fn inputs(columns: usize) -> (Vec<f32>, Vec<f32>) {
        let tokens = 3 * columns;
        let plain = numbers(3, tokens * columns);
        let x: Vec<f32> = (0..tokens * columns)
            .map(|i| {
                let column = i % columns;
                let before = if column == 0 { 0.0 } else { plain[i - 1] };
                (plain[i] + 0.9 * before) * if column % 7 == 2 { 4.0 } else { 1.0 }
            })
            .collect();
        let mut sums = vec![0.0; columns * columns];
        for row in x.chunks(columns) {
            for i in 0..columns {
                for j in 0..columns {
                    sums[i * columns + j] += row[i] * row[j];
                }
            }
        }
        (x, sums)
    }

    /// The squared change of the outputs over the inputs themselves.
    fn output_error(x: &[f32], columns: usize, values: &[f32], rounded: &[f32]) -> f64 {
        let mut error = 0.0;
        for x in x.chunks(columns) {
            for (values, rounded) in values.chunks(columns).zip(rounded.chunks(columns)) {
                let both = values.iter().zip(rounded).zip(x);
                let change: f64 = both.map(|((v, r), x)| f64::from(v - r) * f64::from(*x)).sum();
                error += change * change;
            }
        }
        error
    }

    #[test]
    fn a_matrix_is_the_product_of_its_root() {
        // Also where blocks are cut.
        for n in [1, 5, 64, 65, 150] {
            let (_, mut sums) = inputs(n);
            (0..n).for_each(|i| sums[i * n + i] += 1.0);
            let mut root = sums.clone();
            assert!(factorize(&mut root, n));
            for i in 0..n {
                for j in 0..=i {
                    let product: f64 = (0..=j)
                        .map(|k| f64::from(root[i * n + k]) * f64::from(root[j * n + k]))
                        .sum();
                    let wanted = f64::from(sums[i * n + j]);
                    assert!(
                        (product - wanted).abs() < 1e-4 * f64::from(sums[i * n + i]),
                        "{n} {i} {j}: {product} {wanted}"
                    );
                }
            }
        }
        assert!(!factorize(&mut [1.0, 2.0, 2.0, 1.0], 2));
        assert!(!factorize(&mut [0.0], 1));
    }

    #[test]
    fn outputs_change_less_than_by_nearest_numbers() {
        let (columns, rows, group) = (96, 21, 32);
        let (x, sums) = inputs(columns);
        let values = numbers(8, rows * columns);
        let inputs = Inputs::of(&sums, columns).unwrap().unwrap();
        let factors: Vec<f32> = values
            .chunks(group)
            .map(|group| Grid::Int4.factor(group, None, FactorDtype::F32))
            .collect();
        let decoded = |codes: &[u8]| -> Vec<f32> {
            let groups = codes.chunks(group).zip(&factors);
            groups
                .flat_map(|(codes, factor)| codes.iter().map(move |code| Grid::Int4.value(*code) * factor))
                .collect()
        };
        let rounded = inputs.round(Grid::Int4, &values, &factors, group);
        let plain = nearest(Grid::Int4, &values, &factors, group);
        let (with, without) = (
            output_error(&x, columns, &values, &decoded(&rounded.codes)),
            output_error(&x, columns, &values, &decoded(&plain.codes)),
        );
        assert!(with < 0.6 * without, "{with} {without}");
        // What is reported is that error, with that of damping.
        assert!(
            rounded.error > with && rounded.error < 1.2 * with,
            "{} {with}",
            rounded.error
        );
        let outputs = output_error(&x, columns, &values, &vec![0.0; values.len()]);
        assert!(
            (rounded.total / outputs - 1.0).abs() < 0.1,
            "{} {outputs}",
            rounded.total
        );
        // Inputs that are independent of each other leave nothing to make up for.
        let identity: Vec<f32> = (0..columns * columns)
            .map(|i| f32::from(i % (columns + 1) == 0))
            .collect();
        let independent = Inputs::of(&identity, columns).unwrap().unwrap();
        assert_eq!(
            independent.round(Grid::Int4, &values, &factors, group).codes,
            plain.codes
        );
    }

    #[test]
    fn sums_of_zeros_are_no_inputs() {
        assert!(Inputs::of(&vec![0.0; 32 * 32], 32).unwrap().is_none());
        // Of a single column, they are.
        assert!(Inputs::of(&[0.0, 0.0, 0.0, 1.0], 2).unwrap().is_some());
        assert!(Inputs::of(&[f32::NAN], 1).is_err());
    }
}
