//! The output head: logits of the wanted rows, and which of them are not finite.

use rayon::prelude::*;

use super::Buffer;
use super::isa::Isa;
use super::linear::{Finish, PackedRows, linear};
use super::matrix::Matrix;

/// Logits of each row of `x` over the first `ids` rows of `head`; returns the rows that are not finite.
///
/// Logits are not rounded to BF16 even where activations are: rounding would only make ties.
pub(super) fn logits(
    isa: Isa,
    head: &Matrix,
    ids: usize,
    x: &Buffer,
    out: &mut Vec<f32>,
    rows: &mut PackedRows,
) -> Vec<usize> {
    let mut buffer = Buffer {
        data: std::mem::take(out),
        rows: 0,
        width: 0,
    };
    linear(
        isa,
        head,
        ids,
        Finish {
            bias: None,
            round: false,
        },
        x,
        &mut buffer,
        rows,
    );
    *out = buffer.data;
    if ids == 0 {
        return Vec::new();
    }
    let bad = |(i, row): (usize, &[f32])| {
        // NaN and infinity are what times zero is not zero; the sum does not depend on order then.
        let sum = row.iter().fold(0.0f32, |sum, x| sum + x * 0.0);
        (sum != 0.0 || sum.is_nan()).then_some(i)
    };
    out.par_chunks_exact(ids)
        .with_min_len(8)
        .enumerate()
        .filter_map(bad)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::testing::{buffer, bytes_of, numbers};
    use crate::device::{Dtype, Precision, Tensor};

    #[test]
    fn rows_that_are_not_finite_are_named_and_the_others_stay() {
        let data = bytes_of(&numbers(1, 19 * 6), Dtype::F32);
        let tensor = Tensor {
            dtype: Dtype::F32,
            rows: 19,
            columns: 6,
            data: &data,
        };
        let head = Matrix::pack(&[tensor], Precision::F32).unwrap();
        let mut x = numbers(2, 5 * 6);
        let mut want = Vec::new();
        assert!(
            logits(
                Isa::detect(),
                &head,
                17,
                &buffer(&x, 5, 6),
                &mut want,
                &mut PackedRows::default()
            )
            .is_empty()
        );
        assert_eq!(want.len(), 5 * 17);
        x[6 + 2] = f32::NAN;
        x[4 * 6] = f32::INFINITY;
        let mut got = Vec::new();
        let bad = logits(
            Isa::detect(),
            &head,
            17,
            &buffer(&x, 5, 6),
            &mut got,
            &mut PackedRows::default(),
        );
        assert_eq!(bad, [1, 4]);
        for row in [0, 2, 3] {
            assert_eq!(got[row * 17..][..17], want[row * 17..][..17]);
        }
    }
}
