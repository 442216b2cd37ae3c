//! Weights in FP8 with one factor per block of a matrix, as DeepSeek, Kimi, MiniMax and Qwen publish
//! them, undone where weights are read.
//!
//! A matrix `NAME.weight` of E4M3 numbers (Open Compute Project, 8-bit floating point specification
//! 1.0) has a matrix `NAME.weight_scale_inv` of factors, in F32 or, as Qwen has them, in BF16. A weight
//! is its number times the factor of its block. Blocks at the right and lower edges may be cut. Other
//! matrices of the checkpoint are stored plainly.

use std::borrow::Cow;

use rayon::prelude::*;

use crate::device::Dtype;
use crate::model::error::ModelError;
use crate::model::weights::{Header, StoredTensor, WeightSource, Weights};

/// Rows and columns of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fp8Blocks {
    pub rows: usize,
    pub columns: usize,
}

/// The name of the factors of the matrix `name`.
pub(super) fn scales_name(name: &str) -> String {
    format!("{name}_scale_inv")
}

impl Fp8Blocks {
    /// Rows and columns of the factors of a matrix.
    pub(super) fn scales_shape(self, rows: usize, columns: usize) -> (usize, usize) {
        (rows.div_ceil(self.rows), columns.div_ceil(self.columns))
    }

    /// The weights of a matrix of `columns` columns, as F32 in little-endian bytes.
    pub(super) fn decode(self, numbers: &[u8], scales: &[f32], columns: usize) -> Vec<u8> {
        let table: [f32; 256] = std::array::from_fn(|byte| e4m3(byte as u8));
        let mut out = vec![0; numbers.len() * 4];
        if columns == 0 {
            return out;
        }
        let rows = out.par_chunks_mut(columns * 4).zip(numbers.par_chunks(columns));
        rows.enumerate().for_each(|(row, (out, numbers))| {
            let scales = &scales[row / self.rows * columns.div_ceil(self.columns)..];
            let blocks = out.chunks_mut(self.columns * 4).zip(numbers.chunks(self.columns));
            for ((out, numbers), scale) in blocks.zip(scales) {
                for (out, number) in out.as_chunks_mut::<4>().0.iter_mut().zip(numbers) {
                    *out = (table[usize::from(*number)] * scale).to_le_bytes();
                }
            }
        });
        out
    }
}

/// The number of eight bits: a sign, four bits of exponent with bias 7, three of fraction. There are no
/// infinities; all ones but the sign are no number.
fn e4m3(byte: u8) -> f32 {
    let (exponent, fraction) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
    let magnitude = match (exponent, byte & 7) {
        (15, 7) => f32::NAN,
        (0, _) => fraction / 8.0 * 2f32.powi(-6),
        _ => (1.0 + fraction / 8.0) * 2f32.powi(exponent - 7),
    };
    if byte & 0x80 == 0 { magnitude } else { -magnitude }
}

impl Header {
    /// Whether the tensor `name` is stored in FP8.
    pub(super) fn is_fp8(&self, name: &str) -> bool {
        let entry = self.tensors.get(name);
        entry.is_some_and(|entry| entry.dtype == safetensors::Dtype::F8_E4M3)
    }
}

impl Weights {
    /// A matrix that is stored in FP8.
    pub(super) fn fp8_tensor(
        &self,
        blocks: Fp8Blocks,
        name: &str,
        rows: usize,
        columns: usize,
    ) -> Result<StoredTensor<'_>, ModelError> {
        let (header, location) = self.locate(name)?;
        header.check_shape(&location.name, Some(rows), columns)?;
        let numbers = self.data(header, location);
        let (scale_rows, scale_columns) = blocks.scales_shape(rows, columns);
        let stored = self.tensor(&scales_name(name), Some(scale_rows), scale_columns)?;
        let mut scales = vec![0.0; scale_rows * scale_columns];
        for (row, scales) in scales.chunks_exact_mut(scale_columns).enumerate() {
            stored.view().read_row(row, scales);
        }
        Ok(StoredTensor {
            dtype: Dtype::F32,
            rows,
            columns,
            data: Cow::Owned(blocks.decode(&numbers, &scales, columns)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_format() {
        // The largest and smallest numbers that the specification names.
        for (byte, number) in [
            (0x7e, 448.0),
            (0x08, 0.015_625),
            (0x07, 0.875 * 0.015_625),
            (0x01, 0.001_953_125),
            (0x38, 1.0),
            (0xc4, -3.0),
            (0, 0.0),
        ] {
            assert_eq!(e4m3(byte), number, "{byte:08b}");
        }
        assert!(e4m3(0x7f).is_nan() && e4m3(0xff).is_nan());
        assert_eq!((0..=255).filter(|byte| e4m3(*byte).is_nan()).count(), 2);
    }

    #[test]
    fn each_block_has_its_factor() {
        let blocks = Fp8Blocks { rows: 2, columns: 3 };
        assert_eq!(blocks.scales_shape(3, 4), (2, 2));
        assert_eq!(blocks.scales_shape(2, 3), (1, 1));
        let scales = [1.0, 10.0, 100.0, 1000.0];
        // Ones, of which the last is a two.
        let mut numbers = [0x38u8; 12];
        numbers[11] = 0x40;
        let decoded = blocks.decode(&numbers, &scales, 4);
        let values: Vec<f32> = decoded.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        assert_eq!(
            values,
            [1.0, 1.0, 1.0, 10.0, 1.0, 1.0, 1.0, 10.0, 100.0, 100.0, 100.0, 2000.0]
        );
    }
}
