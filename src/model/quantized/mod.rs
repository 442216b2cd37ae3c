//! Matrices that a checkpoint stores quantized, undone where weights are read.
//!
//! A weight is (number − zero point) × factor. Numbers have 2 to 8 bits; a factor, and a zero point where
//! there are any, belong to a matrix, a row, a block, or a group of a row's neighbours.
//!
//! | `quant_method` | matrix `NAME.weight` is stored as |
//! |---|---|
//! | `fp8`, `fbgemm_fp8` | `weight` in E4M3, `weight_scale_inv` or `weight_scale` |
//! | `compressed-tensors` | `weight` in E4M3 or INT8, or `weight_packed`, of whole numbers or of E2M1; `weight_scale` |
//! | `modelopt` | `weight` in E4M3, or bytes of two numbers in E2M1; `weight_scale`, `weight_scale_2` |
//! | `awq`, `gptq` | `qweight`, `qzeros`, `scales`; GPTQ's `g_idx` names each column's group |
//! | `bitsandbytes` | `weight` in INT8 with `SCB`, or bytes of two codes of a table, with `weight.absmax` |
//!
//! `config.json` names the method. How a matrix is stored follows from its tensors, their formats and
//! shapes: other matrices of the checkpoint are stored plainly. Tensors that describe activations are not
//! read: activations are not rounded.
//!
//! See docs/decisions/107-quantized-weights-are-decoded-where-they-are-read.md.

mod bitsandbytes;
mod codes;
mod decode;
mod matrix;
mod numbers;
mod packing;

use safetensors::Dtype;

use crate::model::headers::Headers;

pub(super) use codes::{codes_of_blocks, group_of_blocks};
pub(super) use matrix::{Problem, StoredMatrix};
pub(super) use numbers::{FP4, e4m3};

/// How `config.json` says that matrices are quantized.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quantization {
    pub method: Method,
    /// The blocks that have one factor, if the configuration names their size.
    pub blocks: Option<Blocks>,
    /// Whether each matrix has zero points, where a format has them by choice.
    pub has_zeros: bool,
    /// Whether each matrix names the groups of its columns.
    pub has_column_groups: bool,
}

/// Whose format it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    Fp8,
    CompressedTensors,
    ModelOpt,
    Awq,
    Gptq {
        /// Zero points are stored less 1, as in the format's first version.
        zeros_less_one: bool,
    },
    BitsAndBytes,
}

/// Rows and columns of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Blocks {
    pub rows: usize,
    pub columns: usize,
}

impl From<Method> for Quantization {
    fn from(method: Method) -> Quantization {
        Quantization {
            method,
            blocks: None,
            has_zeros: false,
            has_column_groups: false,
        }
    }
}

impl Method {
    /// The format's name, as `config.json` has it.
    pub fn name(self) -> &'static str {
        match self {
            Method::Fp8 => "fp8",
            Method::CompressedTensors => "compressed-tensors",
            Method::ModelOpt => "modelopt",
            Method::Awq => "awq",
            Method::Gptq { .. } => "gptq",
            Method::BitsAndBytes => "bitsandbytes",
        }
    }
}

/// Whether a checkpoint's quantized matrices are INT8 with a factor per row.
pub(super) fn is_int8_by_row(quantization: Option<Quantization>, headers: &Headers) -> bool {
    if quantization.is_none_or(|quantization| quantization.method != Method::CompressedTensors) {
        return false;
    }
    let entries = || headers.files.iter().flat_map(|file| &file.tensors);
    let is_factor = |name: &str| name.ends_with(".weight_scale");
    let mut factors = entries().filter(|(name, _)| is_factor(name)).peekable();
    let is_int8 = entries().any(|(name, entry)| name.ends_with(".weight") && entry.dtype == Dtype::I8);
    let is_packed = entries().any(|(name, _)| name.ends_with(".weight_packed"));
    is_int8
        && !is_packed
        && factors.peek().is_some()
        && factors.all(|(_, entry)| matches!(entry.shape[..], [rows] | [rows, 1] if rows > 1))
}

/// Last parts of names of a quantized matrix' numbers: the name of a matrix in models that are built ends
/// in `weight`.
const NUMBERS: [&str; 2] = ["qweight", "weight_packed"];

/// The name of the matrix whose numbers the tensor `name` holds. `None`: it is that name, or of another
/// tensor.
pub(super) fn matrix_name(name: &str) -> Option<String> {
    let (stem, last) = name.rsplit_once('.')?;
    NUMBERS.contains(&last).then(|| format!("{stem}.weight"))
}

/// What follows an expert's projection in the names of its tensors.
pub(super) fn is_part_of_matrix(name: &str) -> bool {
    let first = name.split('.').next().unwrap_or(name);
    first == "weight" || NUMBERS.contains(&first) || BESIDE.contains(&first) || UNREAD.contains(&first)
}

/// Last parts of names of tensors beside a quantized matrix' numbers.
const BESIDE: [&str; 10] = [
    "weight_scale_inv",
    "weight_scale",
    "weight_scale_2",
    "weight_global_scale",
    "weight_zero_point",
    "weight_g_idx",
    "scales",
    "qzeros",
    "g_idx",
    "SCB",
];

/// Last parts of names of tensors that are not read: what activations, keys and values are rounded with,
/// and sizes that shapes say, too.
const UNREAD: [&str; 14] = [
    "activation_scale",
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "input_scale_ub",
    "output_scale",
    "output_zero_point",
    "weight_shape",
    "q_scale",
    "k_scale",
    "v_scale",
    "q_zero_point",
    "k_zero_point",
    "v_zero_point",
];

/// Whether no weight of a quantized checkpoint depends on the tensor `name`.
pub(super) fn is_unread(name: &str) -> bool {
    name.rsplit('.').next().is_some_and(|last| UNREAD.contains(&last))
}
