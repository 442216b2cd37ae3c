//! Quantized matrices as compressed-tensors stores them: what vLLM, SGLang and transformers read.
//!
//! | scheme | tensors of matrix `NAME` |
//! |---|---|
//! | `int8` (W8A8) | `NAME.weight` INT8, `NAME.weight_scale` `[rows, 1]` |
//! | `fp8` | `NAME.weight` E4M3, `NAME.weight_scale` `[rows, 1]` |
//! | `w4a16` | `NAME.weight_packed` INT32 `[rows, columns / 8]`, the first of eight in the lowest bits, plus 8; `NAME.weight_scale` `[rows, groups]`; `NAME.weight_shape` INT64 |

use safetensors::Dtype;
use serde_json::{Value, json};

use super::grid::{FactorDtype, Grid};

/// What a checkpoint is quantized to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheme {
    /// Weights and activations in INT8: a factor per row, and per token.
    Int8,
    /// Weights and activations in E4M3: a factor per row, and per token.
    Fp8,
    /// Weights in 4 bits, with a factor per group of a row; activations as they are.
    W4a16,
}

/// Columns that share a factor, the largest first: the first that divides all matrices' columns is used.
pub(super) const GROUPS: [usize; 3] = [128, 64, 32];

impl Scheme {
    pub const ALL: [Scheme; 3] = [Scheme::Int8, Scheme::Fp8, Scheme::W4a16];

    /// The name on the command line and in records.
    pub fn name(self) -> &'static str {
        match self {
            Scheme::Int8 => "int8",
            Scheme::Fp8 => "fp8",
            Scheme::W4a16 => "w4a16",
        }
    }

    pub(super) fn grid(self) -> Grid {
        match self {
            Scheme::Int8 => Grid::Int8,
            Scheme::Fp8 => Grid::Fp8,
            Scheme::W4a16 => Grid::Int4,
        }
    }

    /// `quantization_config` of `config.json`. `group`: columns that share a factor, in [`W4a16`](Self::W4a16).
    pub(super) fn description(self, group: usize) -> Value {
        let (format, weights, activations) = match self {
            Scheme::Int8 => (
                "int-quantized",
                arguments(8, "int", "channel", None),
                Some(token("int")),
            ),
            Scheme::Fp8 => (
                "float-quantized",
                arguments(8, "float", "channel", None),
                Some(token("float")),
            ),
            Scheme::W4a16 => ("pack-quantized", arguments(4, "int", "group", Some(group)), None),
        };
        json!({
            "quant_method": "compressed-tensors",
            "format": format,
            "quantization_status": "compressed",
            "config_groups": {"group_0": {
                "targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": null,
            }},
            // The output head, and the routers of experts.
            "ignore": ["lm_head", "re:.*mlp\\.gate$", "re:.*shared_expert_gate$"],
            "kv_cache_scheme": null,
        })
    }

    /// The tensors of the matrix `name` (with `.weight`) with these codes and factors.
    pub(super) fn tensors(
        self,
        name: &str,
        [rows, columns]: [usize; 2],
        codes: Vec<u8>,
        (factors, dtype): (&[f32], FactorDtype),
    ) -> Vec<OutTensor> {
        let stem = name.strip_suffix("weight").unwrap_or(name);
        let of = |rest: &str, dtype, shape: &[usize], data| OutTensor {
            name: format!("{stem}{rest}"),
            dtype,
            shape: shape.to_vec(),
            data,
        };
        let factor_dtype = match dtype {
            FactorDtype::F32 => Dtype::F32,
            FactorDtype::Bf16 => Dtype::BF16,
        };
        let factors = of(
            "weight_scale",
            factor_dtype,
            &[rows, factors.len() / rows],
            dtype.bytes(factors),
        );
        match self {
            Scheme::Int8 => vec![of("weight", Dtype::I8, &[rows, columns], codes), factors],
            Scheme::Fp8 => vec![of("weight", Dtype::F8_E4M3, &[rows, columns], codes), factors],
            Scheme::W4a16 => {
                let packed = codes
                    .as_chunks::<2>()
                    .0
                    .iter()
                    .map(|[low, high]| low | high << 4)
                    .collect();
                let shape = [rows, columns].map(|count| (count as i64).to_le_bytes()).concat();
                vec![
                    of("weight_packed", Dtype::I32, &[rows, columns / 8], packed),
                    factors,
                    of("weight_shape", Dtype::I64, &[2], shape),
                ]
            }
        }
    }
}

/// Activations with a factor per token, found while the model runs.
fn token(kind: &str) -> Value {
    let mut arguments = arguments(8, kind, "token", None);
    arguments["dynamic"] = json!(true);
    arguments["observer"] = json!(null);
    arguments
}

fn arguments(bits: u32, kind: &str, strategy: &str, group: Option<usize>) -> Value {
    json!({
        "num_bits": bits, "type": kind, "symmetric": true, "strategy": strategy, "group_size": group, "dynamic": false,
        "block_structure": null, "actorder": null, "observer": "minmax", "observer_kwargs": {},
    })
}

/// A tensor that is written.
#[derive(Debug)]
pub(super) struct OutTensor {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub data: Vec<u8>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_have_the_layout_of_compressed_tensors() {
        let codes: Vec<u8> = (0..16).collect();
        let four = Scheme::W4a16.tensors("a.weight", [1, 16], codes, (&[0.5, 2.0], FactorDtype::F32));
        let names: Vec<&str> = four.iter().map(|tensor| &tensor.name[..]).collect();
        assert_eq!(names, ["a.weight_packed", "a.weight_scale", "a.weight_shape"]);
        let words: Vec<u32> = four[0]
            .data
            .as_chunks()
            .0
            .iter()
            .map(|word| u32::from_le_bytes(*word))
            .collect();
        assert_eq!(words, [0x7654_3210, 0xfedc_ba98]);
        assert_eq!((&four[0].shape[..], &four[1].shape[..]), (&[1, 2][..], &[1, 2][..]));
        assert_eq!(four[2].data, [1i64.to_le_bytes(), 16i64.to_le_bytes()].concat());
        let eight = Scheme::Int8.tensors("a.weight", [2, 1], vec![1, 255], (&[0.5, 2.0], FactorDtype::Bf16));
        assert_eq!((eight[0].dtype, &eight[0].data[..]), (Dtype::I8, &[1, 255][..]));
        assert_eq!((eight[1].dtype, &eight[1].shape[..]), (Dtype::BF16, &[2, 1][..]));
        assert_eq!(eight[1].data.len(), 4);
    }
}
