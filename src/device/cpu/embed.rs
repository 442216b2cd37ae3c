//! Reads rows of the embedding table, which is stored in panels because a tied table is also the
//! output head.

use super::Buffer;
use super::gemm::matrix::Matrix;
use super::math::round_bf16;

/// Writes `[tokens][columns]` to `out`: the table row of each token, times `scale`. Every token
/// must be below `table.rows`.
pub(super) fn embed(table: &Matrix, scale: f32, round_to_bf16: bool, tokens: &[u32], out: &mut Buffer) {
    out.reshape(tokens.len(), table.columns);
    for (i, &token) in tokens.iter().enumerate() {
        table.read_row(token as usize, out.row_mut(i));
    }
    if scale == 1.0 {
        return;
    }
    if round_to_bf16 {
        // The reference implementation also rounds the scale to BF16.
        out.data
            .iter_mut()
            .for_each(|x| *x = round_bf16(*x * round_bf16(scale)))
    } else {
        out.data.iter_mut().for_each(|x| *x *= scale)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::testing::{bytes_of, numbers};
    use crate::device::{Dtype, Precision, Tensor};

    #[test]
    fn reads_the_rows_of_the_tokens() {
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
        for scale in [1.0, 55.4256] {
            embed(&table, scale, false, &[32, 0, 16, 15, 32], &mut out);
            for (i, token) in [32usize, 0, 16, 15, 32].into_iter().enumerate() {
                let want: Vec<f32> = values[token * 7..][..7].iter().map(|x| x * scale).collect();
                assert_eq!(out.row(i), want);
            }
        }
        embed(&table, 55.4256, true, &[3], &mut out);
        let want: Vec<f32> = values[21..28].iter().map(|x| round_bf16(x * 55.5)).collect();
        assert_eq!(out.row(0), want);
    }
}
