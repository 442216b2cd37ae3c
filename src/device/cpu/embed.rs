//! Rows of the embedding table, gathered from the panel layout (a tied table is also the output head).

use super::Buffer;
use super::matrix::Matrix;

/// `out` becomes `[tokens][columns]`. Tokens are below `table.rows`.
pub(super) fn embed(table: &Matrix, tokens: &[u32], out: &mut Buffer) {
    out.reshape(tokens.len(), table.columns);
    for (i, &token) in tokens.iter().enumerate() {
        table.read_row(token as usize, out.row_mut(i));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::testing::{bytes_of, numbers};
    use crate::device::{Dtype, Precision, Tensor};

    #[test]
    fn picks_the_rows_of_the_tokens() {
        let values = numbers(4, 33 * 7);
        let data = bytes_of(&values, Dtype::F32);
        let tensor = Tensor {
            dtype: Dtype::F32,
            rows: 33,
            columns: 7,
            data: &data,
        };
        let table = Matrix::pack(&[tensor], Precision::F32).unwrap();
        let mut out = Buffer::default();
        embed(&table, &[32, 0, 16, 15, 32], &mut out);
        for (i, token) in [32usize, 0, 16, 15, 32].into_iter().enumerate() {
            assert_eq!(out.row(i), &values[token * 7..][..7]);
        }
    }
}
