//! Random weights: a model of any size without a checkpoint.

use std::borrow::Cow;
use std::path::Path;

use rayon::prelude::*;

use crate::device::Dtype;
use crate::device::random::{RandomMatrix, uniform};
use crate::model::error::ModelError;
use crate::model::weights::{StoredTensor, WeightSource};

/// Random numbers per task of a thread.
const RANDOM_TASK_VALUES: usize = 1 << 16;

/// Random weights, the same for the same seed. Matrices are uniform with variance 1 / columns,
/// norms are 1, biases 0.
pub struct RandomWeights {
    pub seed: u64,
    pub dtype: Dtype,
}

impl RandomWeights {
    /// The parameters of the matrix `name`; its seed depends on the name.
    pub fn matrix(&self, name: &str, rows: usize, columns: usize) -> RandomMatrix {
        RandomMatrix {
            seed: name
                .bytes()
                .fold(self.seed, |s, b| (s ^ b as u64).wrapping_mul(0x0100_0000_01b3)),
            rows,
            columns,
            scale: (3.0 / columns as f32).sqrt(),
        }
    }
}

impl WeightSource for RandomWeights {
    fn tensor(&self, name: &str, rows: Option<usize>, columns: usize) -> Result<StoredTensor<'_>, ModelError> {
        let count = rows
            .unwrap_or(1)
            .checked_mul(columns)
            .filter(|n| *n <= isize::MAX as usize / 4)
            .ok_or_else(|| ModelError::Options(format!("tensor `{name}` is too large")))?;
        let constant = match rows {
            Some(_) => None,
            None if name.ends_with("bias") => Some(0.0),
            None => Some(1.0),
        };
        let RandomMatrix { seed, scale, .. } = self.matrix(name, rows.unwrap_or(1), columns);
        let size = self.dtype.bytes();
        let mut data = vec![0u8; count * size];
        // Each number depends only on its position, so threads can generate them independently.
        data.par_chunks_mut(RANDOM_TASK_VALUES * size)
            .enumerate()
            .for_each(|(task, part)| {
                for (i, out) in part.chunks_exact_mut(size).enumerate() {
                    let index = (task * RANDOM_TASK_VALUES + i) as u64;
                    let x = constant.unwrap_or_else(|| scale * uniform(seed, index));
                    match self.dtype {
                        Dtype::F32 => out.copy_from_slice(&x.to_le_bytes()),
                        Dtype::F16 => out.copy_from_slice(&half::f16::from_f32(x).to_le_bytes()),
                        Dtype::Bf16 => out.copy_from_slice(&half::bf16::from_f32(x).to_le_bytes()),
                    }
                }
            });
        Ok(StoredTensor {
            dtype: self.dtype,
            rows: rows.unwrap_or(1),
            columns,
            data: Cow::Owned(data),
        })
    }

    fn path_of(&self, _name: &str) -> &Path {
        Path::new("random weights")
    }

    fn random(&self) -> Option<&RandomWeights> {
        (self.dtype == Dtype::Bf16).then_some(self)
    }

    fn is_canonical(&self) -> bool {
        true
    }
}
