//! Matrices whose numbers of four bits a device may keep as they are stored.
//!
//! These are whole numbers in groups of neighbours, with a factor and maybe a zero point for each group of a row.
//!
//! See docs/decisions/112-four-bits-stay-as-they-are-stored.md.

use super::matrix::{FactorSource, Meaning, Shared, StoredMatrix};
use super::numbers;
use crate::device::CodedMatrix;
use crate::device::codes::{CODES, MIDDLE};
use crate::gguf::Format;
use crate::model::error::ModelError;
use crate::model::weights::{WeightSource, Weights};

/// Numbers of a block of Q4_0, and its bytes: a factor in F16, and two codes in a byte, the first half of them in the lower bits.
const BLOCK: usize = 32;
const BLOCK_BYTES: usize = 2 + BLOCK / 2;

impl StoredMatrix {
    /// The number that the code 0 stands for. `None`: codes are not four bits of neighbouring whole numbers.
    fn first_number(&self) -> Option<f32> {
        let Meaning::Known(table) = &self.numbers.meaning else {
            return None;
        };
        let are_neighbours = (0..CODES).all(|code| table[usize::from(code)] == table[0] + f32::from(code));
        (self.numbers.packing.bits() == 4 && are_neighbours).then_some(table[0])
    }

    /// Columns of a group, if all of the matrix but the columns' order fits.
    fn group(&self) -> Option<usize> {
        let Shared::Groups(groups) = self.factors.shared else {
            return None;
        };
        self.first_number()?;
        let are_numbers = matches!(&self.factors.source, FactorSource::Numbers { whole: None, .. });
        let group = self.columns.checked_div(groups)?;
        let fits = are_numbers && group * groups == self.columns && CodedMatrix::has_groups_of(self.columns, group);
        fits.then_some(group)
    }
}

impl Weights {
    /// Columns of a group of a matrix that a device may keep. `None`: the matrix is another.
    pub(in crate::model) fn group_of(&self, matrix: &StoredMatrix) -> Result<Option<usize>, ModelError> {
        let Some(group) = matrix.group() else {
            return Ok(None);
        };
        if let Some(name) = &matrix.column_groups {
            // Where columns name their groups, these may lie anywhere.
            let (_, bytes) = self.part(name)?;
            let groups = numbers::words(&bytes).into_iter().enumerate();
            if !{ groups }.all(|(column, named)| named as usize == column / group) {
                return Ok(None);
            }
        }
        Ok(Some(group))
    }

    /// The codes of a matrix with groups of so many columns.
    ///
    /// # Errors
    /// A zero point is none of the codes.
    pub(in crate::model) fn codes_of(&self, matrix: &StoredMatrix, group: usize) -> Result<CodedMatrix, ModelError> {
        let (factors, shared) = self.factors(matrix)?;
        let (rows, columns) = (matrix.rows, matrix.columns);
        let first = matrix.first_number().unwrap_or_default();
        let zeros = match &matrix.zeros {
            None => vec![0.0],
            Some(zeros) => self.zero_points(zeros, shared.count((rows, columns)))?,
        };
        // A zero point counts from the number that the code 0 stands for.
        let zero_of = |zero: &f32| {
            let code = zero - first;
            (code >= 0.0 && code < f32::from(CODES) && code.fract() == 0.0).then_some(code as u8)
        };
        let Some(zeros) = zeros.iter().map(zero_of).collect::<Option<Vec<u8>>>() else {
            let name = &matrix.numbers.tensor;
            let why = format!("a zero point of `{name}` is none of its numbers of four bits");
            return Err(ModelError::broken(self.path_of(name), why));
        };
        let (_, bytes) = self.part(&matrix.numbers.tensor)?;
        let mut codes = vec![0; rows * columns];
        for (row, codes) in codes.chunks_exact_mut(columns).enumerate() {
            let packing = &matrix.numbers.packing;
            packing.for_row(&bytes, (rows, columns), row, |column, code| codes[column] = code);
        }
        let zeros = if matrix.zeros.is_none() {
            vec![zeros[0]; factors.len()]
        } else {
            zeros
        };
        Ok(CodedMatrix {
            rows,
            columns,
            group,
            codes,
            factors,
            zeros: zeros.iter().any(|zero| *zero != MIDDLE).then_some(zeros),
        })
    }
}

/// Columns of a group of a matrix in blocks of this format, if a device may keep them.
pub(in crate::model) fn group_of_blocks(format: Format, columns: usize) -> Option<usize> {
    (format == Format::Q4_0 && columns.is_multiple_of(BLOCK)).then_some(BLOCK)
}

/// The codes of a matrix in blocks of Q4_0.
pub(in crate::model) fn codes_of_blocks(data: &[u8], rows: usize, columns: usize) -> CodedMatrix {
    let mut codes = Vec::with_capacity(rows * columns);
    let mut factors = Vec::with_capacity(rows * columns / BLOCK);
    for block in data.chunks_exact(BLOCK_BYTES) {
        let (factor, halves) = block.split_at(2);
        factors.extend(numbers::floats(safetensors::Dtype::F16, factor));
        codes.extend(halves.iter().map(|byte| byte & 15));
        codes.extend(halves.iter().map(|byte| byte >> 4));
    }
    CodedMatrix {
        rows,
        columns,
        group: BLOCK,
        codes,
        factors,
        zeros: None,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use safetensors::Dtype as StoredDtype;
    use safetensors::tensor::TensorView;

    use super::*;
    use crate::model::coded_weights::numbers_of;
    use crate::model::config::ExpertForm;
    use crate::model::quantized::Method;
    use crate::model::stored_form::StoredForm;

    #[test]
    fn blocks_hold_their_second_half_in_the_upper_bits() {
        let block = |factor: f32, low: u8| {
            let halves = (0..16u8).map(move |i| (low + i % 4) | ((15 - i) << 4));
            half::f16::from_f32(factor).to_le_bytes().into_iter().chain(halves)
        };
        let data: Vec<u8> = block(0.5, 1).chain(block(-2.0, 3)).collect();
        let matrix = codes_of_blocks(&data, 2, 32);
        assert_eq!(matrix.factors, [0.5, -2.0]);
        assert_eq!(matrix.codes[..6], [1, 2, 3, 4, 1, 2]);
        assert_eq!(matrix.codes[16..20], [15, 14, 13, 12]);
        assert_eq!(matrix.codes[32..34], [3, 4]);
        let mut plain = vec![0.0; 64];
        for (i, plain) in plain.iter_mut().enumerate() {
            *plain = (f32::from(matrix.codes[i]) - 8.0) * matrix.factors[i / 32];
        }
        assert_eq!(
            Format::Q4_0.to_f32(&data, 32),
            plain.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>()
        );
        assert_eq!(group_of_blocks(Format::Q4_0, 64), Some(32));
        assert_eq!(group_of_blocks(Format::Q8_0, 64), None);
    }

    /// A tensor's name behind the matrix', its format, shape and words.
    type Part<'a> = (&'a str, StoredDtype, [usize; 2], &'a [u32]);

    /// The weights of the matrix `m.weight` that is stored so.
    fn weights(method: Method, parts: &[Part<'_>]) -> Weights {
        let dir = tempfile::tempdir().unwrap();
        let bytes: Vec<Vec<u8>> = parts
            .iter()
            .map(|part| part.3.iter().flat_map(|x| x.to_le_bytes()).collect())
            .collect();
        let views: BTreeMap<String, TensorView<'_>> = parts
            .iter()
            .zip(&bytes)
            .map(|((name, dtype, shape, _), bytes)| {
                let shape: Vec<usize> = shape.iter().copied().filter(|size| *size > 0).collect();
                (format!("m.{name}"), TensorView::new(*dtype, shape, bytes).unwrap())
            })
            .collect();
        std::fs::write(
            dir.path().join("model.safetensors"),
            safetensors::serialize(views, None).unwrap(),
        )
        .unwrap();
        let form = StoredForm {
            quantization: Some(method.into()),
            ..ExpertForm::Matrices.into()
        };
        Weights::open(dir.path(), form).unwrap()
    }

    fn factors(count: usize) -> Vec<u32> {
        (0..count).map(|i| (i as f32 - 2.5).to_bits()).collect()
    }

    const WORDS: [u32; 32] = {
        let (mut words, mut i) = ([0u32; 32], 0);
        while i < 32 {
            words[i] = (i as u32 + 1).wrapping_mul(0x9e37_79b9);
            i += 1;
        }
        words
    };

    /// Codes, factors and zero points are those of the numbers that are decoded, in each form.
    #[test]
    fn codes_stand_for_the_numbers_that_are_decoded() {
        use StoredDtype::{F32, I32};
        let named: Vec<u32> = (0..16).map(|column| column / 8).collect();
        let gptq = |zeros_less_one| Method::Gptq { zeros_less_one };
        // Zero points of which none is the highest before 1 is added.
        let zeros = [0x1234_5670, 0x6543_2107];
        let in_groups = factors(16);
        for (method, zero, parts) in [
            (
                gptq(false),
                true,
                vec![
                    ("qweight", I32, [2, 8], &WORDS[..16]),
                    ("g_idx", I32, [16, 0], &named),
                    ("qzeros", I32, [2, 1], &zeros),
                ],
            ),
            (
                gptq(true),
                true,
                vec![
                    ("qweight", I32, [2, 8], &WORDS[..16]),
                    ("g_idx", I32, [16, 0], &named),
                    ("qzeros", I32, [2, 1], &zeros),
                ],
            ),
            (
                Method::Awq,
                true,
                vec![("qweight", I32, [16, 1], &WORDS[..16]), ("qzeros", I32, [2, 1], &zeros)],
            ),
            (
                Method::CompressedTensors,
                false,
                vec![("weight_packed", I32, [8, 2], &WORDS[..16])],
            ),
        ] {
            let is_compressed = method == Method::CompressedTensors;
            let of_factors = if is_compressed {
                ("weight_scale", F32, [8, 2], &in_groups[..])
            } else {
                ("scales", F32, [2, 8], &in_groups[..])
            };
            let parts: Vec<Part<'_>> = parts.into_iter().chain([of_factors]).collect();
            let source = weights(method, &parts);
            assert_eq!(source.code_group("m.weight", 8, 16).unwrap(), Some(8), "{method:?}");
            let matrix = source.codes("m.weight", 8, 16).unwrap();
            let decoded = source.tensor("m.weight", Some(8), 16).unwrap();
            assert_eq!(numbers_of(&matrix), numbers::floats(F32, &decoded.data), "{method:?}");
            assert_eq!(matrix.zeros.is_some(), zero, "{method:?}");
        }
    }

    #[test]
    fn columns_in_an_order_of_their_own_are_not_kept() {
        use StoredDtype::{F32, I32};
        let named: Vec<u32> = (0..16).map(|column| column % 2).collect();
        let parts = [
            ("qweight", I32, [2, 8], &WORDS[..16]),
            ("g_idx", I32, [16, 0], &named[..]),
            ("qzeros", I32, [2, 1], &WORDS[..2]),
            ("scales", F32, [2, 8], &factors(16)),
        ];
        let source = weights(Method::Gptq { zeros_less_one: false }, &parts);
        assert_eq!(source.code_group("m.weight", 8, 16).unwrap(), None);
    }

    /// Zero points of a byte each may be anything: here 9, of numbers from -8 to 7.
    #[test]
    fn a_zero_point_is_one_of_the_codes() {
        use StoredDtype::{F32, I8, I32};
        for (zeros, is_kept) in [
            ([0x0007_f800, 0, 0, 0], true),
            ([0x0000_0009, 0, 0, 0], false),
            ([0xf7, 0, 0, 0], false),
        ] {
            let parts = [
                ("weight_packed", I32, [8, 2], &WORDS[..16]),
                ("weight_scale", F32, [8, 2], &factors(16)),
                ("weight_zero_point", I8, [8, 2], &zeros[..]),
            ];
            let codes = weights(Method::CompressedTensors, &parts).codes("m.weight", 8, 16);
            assert_eq!(codes.is_ok(), is_kept, "{zeros:x?}");
        }
    }
}
