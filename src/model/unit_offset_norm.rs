//! Norm weights that a checkpoint stores as w − 1 (Gemma), restored to w.
//!
//! See docs/decisions/088-family-differences-end-where-weights-are-read.md.

use std::borrow::Cow;
use std::path::Path;

use crate::device::Dtype;
use crate::model::error::ModelError;
use crate::model::weights::{StoredTensor, WeightSource};

/// A checkpoint's weights with 1 added to its norm weights, which become F32.
pub(super) struct UnitOffsetNorm<'a>(pub &'a dyn WeightSource);

impl WeightSource for UnitOffsetNorm<'_> {
    fn tensor(&self, name: &str, rows: Option<usize>, columns: usize) -> Result<StoredTensor<'_>, ModelError> {
        let tensor = self.0.tensor(name, rows, columns)?;
        if !name.ends_with("norm.weight") {
            return Ok(tensor);
        }
        let mut values = vec![0.0; columns];
        tensor.view().read_row(0, &mut values);
        let data: Vec<u8> = values.iter().flat_map(|x| (1.0 + x).to_le_bytes()).collect();
        Ok(StoredTensor {
            dtype: Dtype::F32,
            data: Cow::Owned(data),
            ..tensor
        })
    }

    fn path_of(&self, name: &str) -> &Path {
        self.0.path_of(name)
    }
}
