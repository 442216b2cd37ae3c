//! Seeded random inputs, rounded to BF16 so that every device gets the same numbers.

use half::bf16;
use rayon::prelude::*;

use crate::device::random::uniform;
use crate::device::{Dtype, Precision, Tensor};

/// Uniform random numbers in [-1, 1).
pub(super) fn numbers(seed: u64, count: usize) -> Vec<f32> {
    (0..count)
        .into_par_iter()
        .with_min_len(1 << 14)
        .map(|index| bf16::from_f32(uniform(seed, index as u64)).to_f32())
        .collect()
}

/// Random rows that `precision` represents exactly, with scales that are powers of two.
/// Quantization leaves such operands unchanged, so a matmul is exact up to the rounding of its
/// result.
pub(super) fn exact_rows(precision: Precision, seed: u64, rows: usize, width: usize) -> Vec<f32> {
    let mut values = numbers(seed, rows * width);
    if !matches!(precision, Precision::Int8 | Precision::Fp8 | Precision::W4a8) {
        return values;
    }
    let int8 = precision != Precision::Fp8;
    // The largest magnitude of each row, which determines its scale: 127 or 448 times a power of
    // two.
    let magnitude_max = if int8 { 127.0 / 128.0 } else { 448.0 / 512.0 };
    values
        .par_chunks_exact_mut(width)
        .enumerate()
        .for_each(|(row, values)| {
            for value in &mut *values {
                *value = if int8 {
                    (*value * 127.0).round() / 128.0
                } else {
                    round_to_four_bits(*value * magnitude_max)
                };
            }
            let index = row * 7 % width;
            values[index] = magnitude_max.copysign(values[index]);
        });
    values
}

/// Rounds to four significant bits, the precision of E4M3; magnitudes below 2^-10 become zero.
fn round_to_four_bits(x: f32) -> f32 {
    if x.abs() < 1.0 / 1024.0 {
        return 0.0;
    }
    let half = 1 << 19;
    f32::from_bits((x.to_bits() + half) & !((1 << 20) - 1))
}

/// A matrix in BF16, as a checkpoint would store it.
#[derive(Clone)]
pub(super) struct TestTensor {
    rows: usize,
    columns: usize,
    data: Vec<u8>,
}

impl TestTensor {
    /// A matrix of random numbers times `scale`, a power of two.
    pub(super) fn new(seed: u64, rows: usize, columns: usize, scale: f32) -> TestTensor {
        TestTensor::from_values(&numbers(seed, rows * columns), rows, columns, scale)
    }

    /// A matrix of `values` times `scale`.
    pub(super) fn from_values(values: &[f32], rows: usize, columns: usize, scale: f32) -> TestTensor {
        let mut data = vec![0; values.len() * 2];
        data.par_chunks_exact_mut(2)
            .with_min_len(1 << 14)
            .zip(values)
            .for_each(|(to, x)| to.copy_from_slice(&bf16::from_f32(x * scale).to_le_bytes()));
        TestTensor { rows, columns, data }
    }

    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    pub(super) fn tensor(&self) -> Tensor<'_> {
        Tensor {
            dtype: Dtype::Bf16,
            rows: self.rows,
            columns: self.columns,
            data: &self.data,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exact_rows_are_representable_with_their_scale() {
        for (precision, top) in [(Precision::Int8, 127.0), (Precision::Fp8, 448.0)] {
            let rows = exact_rows(precision, 3, 4, 100);
            for row in rows.chunks_exact(100) {
                let scale = row.iter().fold(0.0f32, |most, x| most.max(x.abs())) / top;
                assert_eq!(scale.log2().fract(), 0.0);
                for x in row {
                    let step = x / scale;
                    let is_exact = match precision {
                        Precision::Int8 => step.fract() == 0.0,
                        // Four significant bits, none below 2^-9.
                        _ => step.to_bits() & 0xfffff == 0 && (step * 512.0).fract() == 0.0,
                    };
                    assert!(is_exact, "{step} in {precision:?}");
                    assert_eq!(bf16::from_f32(*x).to_f32(), *x);
                }
            }
        }
    }
}
