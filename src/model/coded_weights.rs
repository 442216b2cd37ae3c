//! Random weights in codes of four bits: a model of any size without a checkpoint, for `doctor` and for tests.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use crate::device::codes::{CODES, MIDDLE};
use crate::device::random::uniform;
use crate::device::{CodedMatrix, Dtype};
use crate::model::error::ModelError;
use crate::model::random_weights::RandomWeights;
use crate::model::weights::{StoredTensor, WeightSource};

/// Random weights, of which matrices are stored in codes.
pub struct CodedWeights {
    inner: RandomWeights,
    is_canonical: bool,
    /// Columns of a group of a matrix, by its name.
    group: fn(&str) -> Option<usize>,
    /// The matrices whose codes were read, each with its number of values.
    pub(super) read: Mutex<BTreeMap<String, usize>>,
}

impl CodedWeights {
    /// `group`: the columns of a group of a matrix, by its name; `None`: it is not in codes. `is_canonical`: see
    /// [`WeightSource::is_canonical`].
    pub fn new(is_canonical: bool, group: fn(&str) -> Option<usize>) -> CodedWeights {
        CodedWeights {
            inner: RandomWeights {
                seed: 1,
                dtype: Dtype::F32,
            },
            is_canonical,
            group,
            read: Mutex::default(),
        }
    }

    fn matrix(&self, name: &str, rows: usize, columns: usize, group: usize) -> CodedMatrix {
        let random = self.inner.matrix(name, rows, columns);
        let codes = |seed: u64, count: usize| {
            let numbers = (0..count).map(move |i| uniform(seed, i as u64));
            numbers.map(|x| ((x + 1.0) * f32::from(CODES) / 2.0) as u8).collect()
        };
        let groups = rows * columns / group;
        CodedMatrix {
            rows,
            columns,
            group,
            codes: codes(random.seed, rows * columns),
            // So weights are about as large as those of the random matrix.
            factors: (0..groups)
                .map(|i| random.scale / 16.0 * (2.0 + uniform(!random.seed, i as u64)))
                .collect(),
            zeros: Some(codes(random.seed ^ 1, groups)),
        }
    }
}

/// The numbers of a matrix of codes.
pub(super) fn numbers_of(matrix: &CodedMatrix) -> Vec<f32> {
    let number = |(i, code): (usize, &u8)| {
        let group = i / matrix.group;
        let zero = matrix.zeros.as_ref().map_or(MIDDLE, |zeros| zeros[group]);
        (f32::from(*code) - f32::from(zero)) * matrix.factors[group]
    };
    matrix.codes.iter().enumerate().map(number).collect()
}

impl WeightSource for CodedWeights {
    fn tensor(&self, name: &str, rows: Option<usize>, columns: usize) -> Result<StoredTensor<'_>, ModelError> {
        let count = rows.unwrap_or(1);
        let group = self.code_group(name, count, columns)?.filter(|_| rows.is_some());
        let Some(group) = group else {
            return self.inner.tensor(name, rows, columns);
        };
        let numbers = numbers_of(&self.matrix(name, count, columns, group));
        Ok(StoredTensor {
            dtype: Dtype::F32,
            rows: count,
            columns,
            data: Cow::Owned(numbers.iter().flat_map(|x| x.to_le_bytes()).collect()),
        })
    }

    fn code_group(&self, name: &str, _rows: usize, columns: usize) -> Result<Option<usize>, ModelError> {
        Ok((self.group)(name).filter(|group| CodedMatrix::has_groups_of(columns, *group)))
    }

    fn codes(&self, name: &str, rows: usize, columns: usize) -> Result<CodedMatrix, ModelError> {
        let group = self.code_group(name, rows, columns)?;
        let group = group.ok_or_else(|| ModelError::Options(format!("tensor `{name}` is not in codes")))?;
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        read.insert(name.to_owned(), rows * columns);
        Ok(self.matrix(name, rows, columns, group))
    }

    fn shown(&self, name: &str) -> String {
        self.inner.shown(name)
    }

    fn path_of(&self, name: &str) -> &Path {
        self.inner.path_of(name)
    }

    fn is_canonical(&self) -> bool {
        self.is_canonical
    }
}
