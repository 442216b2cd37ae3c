//! The weights of a quantized matrix.

use std::borrow::Cow;

use rayon::prelude::*;
use safetensors::Dtype as StoredDtype;

use super::matrix::{FactorSource, Meaning, Shared, StoredMatrix, Whole, Zeros};
use super::numbers::{self, Table};
use crate::device::Dtype;
use crate::model::error::ModelError;
use crate::model::weights::{StoredTensor, WeightSource, Weights};

/// Rows of a task. Codes of many rows may lie in one line of the processor's cache.
const TASK_ROWS: usize = 64;

impl Weights {
    /// The number format and the bytes of a tensor that was checked.
    pub(super) fn part(&self, name: &str) -> Result<(StoredDtype, Cow<'_, [u8]>), ModelError> {
        let (header, location) = self.locate(name)?;
        let dtype = header.tensors[&location.name].dtype;
        Ok((dtype, self.data(header, location)))
    }

    /// The factors of a matrix, row by row, and which numbers share one.
    pub(super) fn factors(&self, matrix: &StoredMatrix) -> Result<(Vec<f32>, Shared), ModelError> {
        let floats = |name: &str| self.floats(name);
        let size = (matrix.rows, matrix.columns);
        let (mut factors, shared) = match &matrix.factors.source {
            FactorSource::Numbers { tensor, whole } => {
                let mut factors = floats(tensor)?;
                if let Some(Whole::Times(name) | Whole::DividedBy(name)) = whole {
                    let number = floats(name)?[0];
                    let is_inverse = matches!(whole, Some(Whole::DividedBy(_)));
                    for factor in &mut factors {
                        *factor = if is_inverse { *factor / number } else { *factor * number };
                    }
                }
                (factors, matrix.factors.shared)
            }
            FactorSource::PowersOfTwo(name) => {
                let exponents = self.part(name)?.1;
                (
                    exponents.iter().map(|byte| numbers::e8m0(*byte)).collect(),
                    matrix.factors.shared,
                )
            }
            FactorSource::BitsAndBytes(factors) => self.bitsandbytes_factors(factors, size)?,
        };
        let (down, across) = shared.count(size);
        if matrix.factors.is_transposed {
            factors = transposed(&factors, across, down);
        }
        Ok((factors, shared))
    }

    fn floats(&self, name: &str) -> Result<Vec<f32>, ModelError> {
        let (dtype, bytes) = self.part(name)?;
        Ok(numbers::floats(dtype, &bytes))
    }

    /// The weights of a matrix, as F32.
    ///
    /// # Errors
    /// What its tensors hold does not fit together.
    pub(in crate::model) fn quantized(&self, matrix: &StoredMatrix) -> Result<StoredTensor<'_>, ModelError> {
        let (factors, shared) = self.factors(matrix)?;
        let (down, across) = shared.count((matrix.rows, matrix.columns));
        let zeros = match &matrix.zeros {
            None => None,
            Some(zeros) => Some(self.zero_points(zeros, (down, across))?),
        };
        let column_groups = match &matrix.column_groups {
            None => None,
            Some(name) => Some(self.column_groups(name, across)?),
        };
        let table: Cow<'_, Table> = match &matrix.numbers.meaning {
            Meaning::Known(table) => Cow::Borrowed(table),
            Meaning::Stored(name) => {
                let stored: [f32; 16] = self.floats(name)?.try_into().expect("checked to be 16");
                Cow::Owned(numbers::of_four_bits(stored))
            }
        };
        let (_, codes) = self.part(&matrix.numbers.tensor)?;
        let decoder = Decoder {
            matrix,
            table: &table,
            factors: &factors,
            zeros: zeros.as_deref(),
            shared,
            column_groups: column_groups.as_deref(),
        };
        Ok(StoredTensor {
            dtype: Dtype::F32,
            rows: matrix.rows,
            columns: matrix.columns,
            data: Cow::Owned(decoder.decode(&codes)),
        })
    }

    /// The zero points of a matrix with so many rows and columns of factors.
    pub(super) fn zero_points(&self, zeros: &Zeros, (down, across): (usize, usize)) -> Result<Vec<f32>, ModelError> {
        let mut bytes = self.part(&zeros.tensor)?.1;
        if let Some(bits) = zeros.less_one {
            bytes = Cow::Owned(with_one_added(&bytes, bits));
        }
        let mut values = vec![0.0; down * across];
        for (row, values) in values.chunks_exact_mut(across).enumerate() {
            let take = |column: usize, code: u8| values[column] = zeros.table[usize::from(code)];
            zeros.packing.for_row(&bytes, (down, across), row, take);
        }
        Ok(values)
    }

    /// The group of each column.
    fn column_groups(&self, name: &str, count: usize) -> Result<Vec<usize>, ModelError> {
        let (_, bytes) = self.part(name)?;
        let groups: Vec<usize> = numbers::words(&bytes).iter().map(|group| *group as usize).collect();
        if let Some(group) = groups.iter().find(|group| **group >= count) {
            let why = format!("tensor `{name}` names a group {group}, and there are {count}");
            return Err(ModelError::broken(self.path_of(name), why));
        }
        Ok(groups)
    }
}

/// `[rows][columns]` as `[columns][rows]`.
fn transposed(values: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    let by_column = (0..columns).flat_map(|column| (0..rows).map(move |row| values[row * columns + column]));
    by_column.collect()
}

/// Words with 1 added to each of their codes of `bits` bits. As in the programs that write them, a code's
/// overflow goes into the next one: it was borrowed from there.
fn with_one_added(bytes: &[u8], bits: u32) -> Vec<u8> {
    let ones = (0..32 / bits).fold(0u32, |ones, place| ones | 1 << (place * bits));
    let words = numbers::words(bytes).into_iter();
    words.flat_map(|word| word.wrapping_add(ones).to_le_bytes()).collect()
}

/// What a matrix' codes become weights with.
struct Decoder<'a> {
    matrix: &'a StoredMatrix,
    table: &'a Table,
    factors: &'a [f32],
    zeros: Option<&'a [f32]>,
    shared: Shared,
    column_groups: Option<&'a [usize]>,
}

impl Decoder<'_> {
    /// The weights in little-endian bytes.
    fn decode(&self, codes: &[u8]) -> Vec<u8> {
        let size = (self.matrix.rows, self.matrix.columns);
        let (rows, columns) = size;
        let mut out = vec![0; rows * columns * 4];
        if columns == 0 {
            return out;
        }
        let tasks = out.par_chunks_mut(TASK_ROWS * columns * 4).enumerate();
        tasks.for_each(|(task, out)| {
            let mut values = vec![0.0; columns];
            for (i, out) in out.chunks_exact_mut(columns * 4).enumerate() {
                let row = task * TASK_ROWS + i;
                let take = |column: usize, code: u8| values[column] = self.table[usize::from(code)];
                self.matrix.numbers.packing.for_row(codes, size, row, take);
                self.scale(row, &mut values);
                for (out, value) in out.as_chunks_mut().0.iter_mut().zip(&values) {
                    *out = value.to_le_bytes();
                }
            }
        });
        out
    }

    /// Turns a row's numbers into weights.
    fn scale(&self, row: usize, values: &mut [f32]) {
        let columns = values.len();
        let (_, across) = self.shared.count((self.matrix.rows, columns));
        let apply = |values: &mut [f32], index: usize| {
            let (factor, zero) = (self.factors[index], self.zeros.map_or(0.0, |zeros| zeros[index]));
            for value in values {
                *value = (*value - zero) * factor;
            }
        };
        if let Some(groups) = self.column_groups {
            for (value, group) in values.iter_mut().zip(groups) {
                apply(std::slice::from_mut(value), row * across + group);
            }
            return;
        }
        match self.shared {
            Shared::Blocks(blocks) => {
                let first = row / blocks.rows * across;
                let blocks = values.chunks_mut(blocks.columns).enumerate();
                blocks.for_each(|(block, values)| apply(values, first + block));
            }
            Shared::Groups(groups) => {
                let groups = values.chunks_mut(columns / groups).enumerate();
                groups.for_each(|(group, values)| apply(values, row * across + group));
            }
            Shared::Run(length) => {
                let mut rest = values;
                while !rest.is_empty() {
                    let at = row * columns + (columns - rest.len());
                    let (values, others) = rest.split_at_mut(rest.len().min(length - at % length));
                    apply(values, at / length);
                    rest = others;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use safetensors::tensor::TensorView;

    use super::*;
    use crate::model::config::ExpertForm;
    use crate::model::quantized::{Blocks, Method, Quantization};
    use crate::model::stored_form::StoredForm;

    /// A tensor's name, format, shape and bytes.
    type Part = (&'static str, StoredDtype, Vec<usize>, Vec<u8>);

    /// The weights of the matrix `m.weight` that is stored so.
    fn weights(quantization: Quantization, size: (usize, usize), parts: &[Part]) -> Vec<f32> {
        let dir = tempfile::tempdir().unwrap();
        let views = parts.iter().map(|(name, dtype, shape, bytes)| {
            (
                format!("m.{name}"),
                TensorView::new(*dtype, shape.clone(), bytes).unwrap(),
            )
        });
        let views: BTreeMap<String, TensorView<'_>> = views.collect();
        let bytes = safetensors::serialize(views, None).unwrap();
        std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
        let form = StoredForm {
            quantization: Some(quantization),
            ..ExpertForm::Matrices.into()
        };
        let source = Weights::open(dir.path(), form).unwrap();
        let stored = source.tensor("m.weight", Some(size.0), size.1).unwrap();
        assert_eq!(
            (stored.dtype, stored.rows, stored.columns),
            (Dtype::F32, size.0, size.1)
        );
        numbers::floats(StoredDtype::F32, &stored.data)
    }

    fn f32s(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|x| x.to_le_bytes()).collect()
    }

    #[test]
    fn each_block_has_its_factor() {
        let blocks = Some(Blocks { rows: 2, columns: 3 });
        let quantization = Quantization {
            blocks,
            ..Method::Fp8.into()
        };
        // Ones, of which the last is a two.
        let mut numbers = vec![0x38u8; 12];
        numbers[11] = 0x40;
        let parts = [
            ("weight", StoredDtype::F8_E4M3, vec![3, 4], numbers),
            (
                "weight_scale_inv",
                StoredDtype::F32,
                vec![2, 2],
                f32s(&[1.0, 10.0, 100.0, 1000.0]),
            ),
        ];
        assert_eq!(
            weights(quantization, (3, 4), &parts),
            [1.0, 1.0, 1.0, 10.0, 1.0, 1.0, 1.0, 10.0, 100.0, 100.0, 100.0, 2000.0]
        );
    }

    /// A row has several tasks' rows above it, and its groups have zero points.
    #[test]
    fn each_group_of_each_row_has_its_factor_and_its_zero_point() {
        const ROWS: usize = 2 * TASK_ROWS + 1;
        let numbers: Vec<u8> = (0..ROWS as u8).flat_map(|row| [row % 100, 1, 2, 3]).collect();
        let factors: Vec<f32> = (0..ROWS).flat_map(|row| [row as f32, -1.0]).collect();
        let zeros: Vec<u8> = (0..ROWS as u8).flat_map(|row| [row % 50, 255]).collect();
        let parts = [
            ("weight", StoredDtype::I8, vec![ROWS, 4], numbers),
            ("weight_scale", StoredDtype::F32, vec![ROWS, 2], f32s(&factors)),
            ("weight_zero_point", StoredDtype::I8, vec![ROWS, 2], zeros),
        ];
        let want: Vec<f32> = (0..ROWS)
            .flat_map(|row| {
                let (factor, zero) = (row as f32, (row % 50) as f32);
                [((row % 100) as f32 - zero) * factor, (1.0 - zero) * factor, -3.0, -4.0]
            })
            .collect();
        assert_eq!(weights(Method::CompressedTensors.into(), (ROWS, 4), &parts), want);
    }

    /// The factors are numbers of 8 bits with factors of runs of two.
    #[test]
    fn runs_of_runs_have_their_factors() {
        let codes: Vec<f32> = (0..256).map(|code| code as f32).collect();
        let state = br#"{"blocksize": 3, "shape": [2, 5], "nested_blocksize": 2, "nested_offset": 0.5}"#;
        let state_name = "weight.quant_state.bitsandbytes__nf4";
        let map: Vec<f32> = (0..16).map(|code| code as f32).collect();
        let parts = [
            // 1 to 10, the first of two in the upper half.
            (
                "weight",
                StoredDtype::U8,
                vec![5, 1],
                vec![0x12, 0x34, 0x56, 0x78, 0x9a],
            ),
            ("weight.absmax", StoredDtype::U8, vec![4], vec![1, 2, 3, 4]),
            ("weight.quant_map", StoredDtype::F32, vec![16], f32s(&map)),
            ("weight.nested_absmax", StoredDtype::F32, vec![2], f32s(&[1.0, 10.0])),
            ("weight.nested_quant_map", StoredDtype::F32, vec![256], f32s(&codes)),
            (state_name, StoredDtype::U8, vec![state.len()], state.to_vec()),
        ];
        let factors = [1.5, 1.5, 1.5, 2.5, 2.5, 2.5, 30.5, 30.5, 30.5, 40.5];
        let want: Vec<f32> = factors
            .iter()
            .zip(1..)
            .map(|(factor, number)| factor * number as f32)
            .collect();
        assert_eq!(weights(Method::BitsAndBytes.into(), (2, 5), &parts), want);
    }

    #[test]
    fn one_is_added_to_each_code() {
        let add = |word: u32, bits: u32| numbers::words(&with_one_added(&word.to_le_bytes(), bits))[0];
        assert_eq!(add(0x0123_4567, 4), 0x1234_5678);
        assert_eq!(add(0x0000_fe01, 8), 0x0101_ff02);
        assert_eq!(add(0, 2), 0x5555_5555);
        // What was borrowed goes back.
        assert_eq!(add(0xeeee_eeff, 4), 0x0000_0010);
    }
}
