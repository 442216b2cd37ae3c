//! The forms in which gpt-oss and Llama 4 store their experts, undone where weights are read.
//!
//! A layer's experts lie in a few tensors, of which expert 3's parts get names like
//! `mlp.experts.3.gate_up_proj`. Rows (or columns) of gate and up alternate; Llama 4 has the columns of
//! gate before those of up. Matrices are stored transposed, `[in features][out features]`, or in MXFP4
//! (Open Compute Project, Microscaling formats 1.0): 32 numbers of a row are 16 bytes of two 4-bit
//! numbers each, the first in the lower bits, and a byte with the exponent of their common factor.
//!
//! See docs/decisions/088-family-differences-end-where-weights-are-read.md.

use std::borrow::Cow;

use half::bf16;

use crate::device::Dtype;
use crate::model::config::{Config, ExpertForm};
use crate::model::error::ModelError;
use crate::model::quantized::FP4;
use crate::model::tensors::TensorSpec;
use crate::model::weights::{StoredTensor, WeightSource};

/// Numbers of a row that have a common factor in MXFP4.
pub(super) const MXFP4_GROUP: usize = 32;

/// The tensors that a layer's experts are stored as. `None`: each expert's matrices by themselves.
pub(super) fn stored(config: &Config, layer: usize) -> Option<Vec<TensorSpec>> {
    let experts = config.experts_of(layer)?;
    let (hidden, width) = (config.hidden_size, experts.intermediate_size);
    let both = 2 * width;
    let of_expert = |expert: usize| {
        let name = |part: &str| format!("model.layers.{layer}.mlp.experts.{expert}.{part}");
        let bytes = |part: &str, rows: usize, columns: usize| TensorSpec {
            is_bytes: true,
            ..TensorSpec::matrix(name(part), rows, columns)
        };
        let biases = [("gate_up_proj_bias", both), ("down_proj_bias", hidden)];
        let biases = biases.map(|(part, width)| TensorSpec::vector(name(part), width));
        let matrices = match experts.form {
            ExpertForm::Matrices => return None,
            ExpertForm::Transposed | ExpertForm::TransposedHalves => vec![
                TensorSpec::matrix(name("gate_up_proj"), hidden, both),
                TensorSpec::matrix(name("down_proj"), width, hidden),
            ],
            ExpertForm::Mxfp4 => vec![
                bytes("gate_up_proj_blocks", both, hidden / 2),
                bytes("gate_up_proj_scales", both, hidden / MXFP4_GROUP),
                bytes("down_proj_blocks", hidden, width / 2),
                bytes("down_proj_scales", hidden, width / MXFP4_GROUP),
            ],
        };
        let biases = biases
            .into_iter()
            .filter(|_| experts.form != ExpertForm::TransposedHalves);
        Some(matrices.into_iter().chain(biases))
    };
    let all: Option<Vec<_>> = (0..experts.count).map(of_expert).collect();
    Some(all?.into_iter().flatten().collect())
}

/// Which part of a stored tensor an expert's tensor is: every `step`-th row or number from `first`
/// on.
#[derive(Debug, Clone, PartialEq)]
struct Part {
    /// The stored tensor's name, for MXFP4 without `_blocks` or `_scales`.
    stored: String,
    first: usize,
    step: usize,
}

impl Part {
    /// `None`: the tensor does not belong to an expert.
    fn of(name: &str) -> Option<Part> {
        let (layer, rest) = name.split_once(".mlp.experts.")?;
        let (expert, part) = rest.split_once('.')?;
        let (projection, kind) = part.rsplit_once('.')?;
        let (projection, first, step) = match projection {
            "gate_proj" => ("gate_up_proj", 0, 2),
            "up_proj" => ("gate_up_proj", 1, 2),
            other => (other, 0, 1),
        };
        let end = if kind == "bias" { "_bias" } else { "" };
        let stored = format!("{layer}.mlp.experts.{expert}.{projection}{end}");
        Some(Part { stored, first, step })
    }
}

/// The name of a stored tensor that holds the expert's tensor `name`. `None`: it is stored as it
/// is.
pub(super) fn stored_name(form: ExpertForm, name: &str) -> Option<String> {
    let stored = Part::of(name)?.stored;
    match form {
        ExpertForm::Matrices => None,
        ExpertForm::Mxfp4 if !stored.ends_with("_bias") => Some(format!("{stored}_blocks")),
        _ => Some(stored),
    }
}

/// An expert's tensor from the form in which it is stored. `None`: it is stored as it is.
pub(super) fn read<'a>(
    form: ExpertForm,
    source: &'a dyn WeightSource,
    name: &str,
    rows: Option<usize>,
    columns: usize,
) -> Result<Option<StoredTensor<'a>>, ModelError> {
    let Some(part) = Part::of(name).filter(|_| form != ExpertForm::Matrices) else {
        return Ok(None);
    };
    let Some(rows) = rows else {
        let whole = source.tensor(&part.stored, None, columns * part.step)?;
        return Ok(Some(transposed(&whole, &part, columns, 1)));
    };
    Ok(Some(if form != ExpertForm::Mxfp4 {
        let whole = source.tensor(&part.stored, Some(columns), rows * part.step)?;
        let part = match form {
            ExpertForm::TransposedHalves => Part {
                first: part.first * rows,
                step: 1,
                ..part
            },
            _ => part,
        };
        transposed(&whole, &part, rows, columns)
    } else {
        let (all, name) = (rows * part.step, |end: &str| format!("{}{end}", part.stored));
        let blocks = source.bytes(&name("_blocks"), all, columns / 2)?;
        let scales = source.bytes(&name("_scales"), all, columns / MXFP4_GROUP)?;
        StoredTensor {
            dtype: Dtype::Bf16,
            rows,
            columns,
            data: Cow::Owned(mxfp4(&blocks, &scales, &part, columns)),
        }
    }))
}

/// A matrix of `rows` rows of `columns` numbers, or a vector of `rows` numbers: some columns of
/// `whole`.
fn transposed(whole: &StoredTensor<'_>, part: &Part, rows: usize, columns: usize) -> StoredTensor<'static> {
    /// Rows of `whole` of which a piece stays in the cache.
    const TILE: usize = 32;
    let size = whole.dtype.bytes();
    let mut data = vec![0; rows * columns * size];
    let stored: Vec<&[u8]> = whole.data.chunks_exact(whole.columns * size).collect();
    for (tile, stored) in stored.chunks(TILE).enumerate() {
        for row in 0..rows {
            let from = (part.first + row * part.step) * size;
            let out = &mut data[(row * columns + tile * TILE) * size..];
            for (out, stored) in out.chunks_exact_mut(size).zip(stored) {
                out.copy_from_slice(&stored[from..from + size]);
            }
        }
    }
    StoredTensor {
        dtype: whole.dtype,
        rows: if columns == 1 { 1 } else { rows },
        columns: if columns == 1 { rows } else { columns },
        data: Cow::Owned(data),
    }
}

/// BF16 numbers of some rows of MXFP4. All numbers are exact, except for the largest factor's, which
/// are infinite or not numbers, and which are refused where matrices are made.
fn mxfp4(blocks: &[u8], scales: &[u8], part: &Part, columns: usize) -> Vec<u8> {
    let rows = blocks.chunks_exact(columns / 2);
    let rows = rows.zip(scales.chunks_exact(columns / MXFP4_GROUP));
    let mut data = Vec::new();
    for (blocks, scales) in rows.skip(part.first).step_by(part.step) {
        for (block, scale) in blocks.chunks_exact(MXFP4_GROUP / 2).zip(scales) {
            let factor = match scale {
                // The smallest factor is below the normal numbers.
                0 => f32::from_bits(1 << 22),
                255 => f32::NAN,
                exponent => f32::from_bits(u32::from(*exponent) << 23),
            };
            let numbers = FP4.map(|x| bf16::from_f32(x * factor).to_le_bytes());
            for byte in block {
                data.extend_from_slice(&numbers[usize::from(byte & 15)]);
                data.extend_from_slice(&numbers[usize::from(byte >> 4)]);
            }
        }
    }
    data
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_stored_tensors() {
        let name = "model.layers.2.mlp.experts.31";
        for (part, columns, mxfp4) in [
            ("gate_proj.weight", "gate_up_proj", "gate_up_proj_blocks"),
            ("up_proj.weight", "gate_up_proj", "gate_up_proj_blocks"),
            ("up_proj.bias", "gate_up_proj_bias", "gate_up_proj_bias"),
            ("down_proj.weight", "down_proj", "down_proj_blocks"),
            ("down_proj.bias", "down_proj_bias", "down_proj_bias"),
        ] {
            let of = |form| stored_name(form, &format!("{name}.{part}"));
            assert_eq!(of(ExpertForm::Matrices), None);
            assert_eq!(of(ExpertForm::Transposed), Some(format!("{name}.{columns}")));
            assert_eq!(of(ExpertForm::Mxfp4), Some(format!("{name}.{mxfp4}")));
        }
        assert_eq!(
            stored_name(ExpertForm::Mxfp4, "model.layers.2.mlp.gate.weight"),
            None,
            "the router"
        );
    }

    #[test]
    fn columns_become_rows() {
        // 70 rows of 4 columns, of which each holds its row and column.
        let data: Vec<u8> = (0..70u16)
            .flat_map(|row| (0..4u16).flat_map(move |column| (row * 10 + column).to_le_bytes()))
            .collect();
        let whole = StoredTensor {
            dtype: Dtype::F16,
            rows: 70,
            columns: 4,
            data: Cow::Borrowed(&data),
        };
        let part = Part {
            stored: String::new(),
            first: 1,
            step: 2,
        };
        let up = transposed(&whole, &part, 2, 70);
        let numbers = up.data.as_chunks::<2>().0.iter().map(|x| u16::from_le_bytes(*x));
        let want = [1, 3]
            .into_iter()
            .flat_map(|column| (0..70).map(move |row| row * 10 + column));
        assert!(numbers.eq(want) && (up.rows, up.columns) == (2, 70));
    }

    #[test]
    fn every_number_of_mxfp4() {
        let all: Vec<u8> = (0..16).map(|i| (15 - i) << 4 | i).collect();
        let part = Part {
            stored: String::new(),
            first: 0,
            step: 1,
        };
        for scale in [0u8, 1, 126, 127, 128, 251] {
            let data = mxfp4(&all, &[scale], &part, 32);
            let numbers = data.as_chunks::<2>().0.iter().map(|x| bf16::from_le_bytes(*x).to_f64());
            let factor = (f64::from(scale) - 127.0).exp2();
            let want = (0..16).flat_map(|i| [f64::from(FP4[i]), f64::from(FP4[15 - i])].map(|x| x * factor));
            assert!(numbers.eq(want), "{scale}");
        }
        for scale in [254, 255] {
            let data = mxfp4(&[0x77; 16], &[scale], &part, 32);
            assert!(!bf16::from_le_bytes([data[0], data[1]]).is_finite(), "{scale}");
        }
    }
}
