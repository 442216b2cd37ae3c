//! Seeded random inputs, rounded to BF16 so that every device is given the same numbers.

use half::bf16;

use crate::device::{Dtype, Tensor};

/// Numbers in [-1, 1) (SplitMix64, Steele et al. 2014).
pub fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed;
    (0..count)
        .map(|_| {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = state;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^= z >> 31;
            let x = (z >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
            bf16::from_f32(x).to_f32()
        })
        .collect()
}

/// A matrix of numbers as a checkpoint would store it, in BF16.
pub struct Stored {
    rows: usize,
    columns: usize,
    data: Vec<u8>,
}

impl Stored {
    /// Numbers times `scale`, a power of two.
    pub fn new(seed: u64, rows: usize, columns: usize, scale: f32) -> Stored {
        let values = numbers(seed, rows * columns);
        Stored {
            rows,
            columns,
            data: values
                .iter()
                .flat_map(|x| bf16::from_f32(x * scale).to_le_bytes())
                .collect(),
        }
    }

    pub fn tensor(&self) -> Tensor<'_> {
        Tensor {
            dtype: Dtype::Bf16,
            rows: self.rows,
            columns: self.columns,
            data: &self.data,
        }
    }
}
