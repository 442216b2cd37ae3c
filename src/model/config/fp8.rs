//! Reads which weights of a checkpoint are stored in FP8, with a factor per block.

use serde_json::Value;

use super::reader::{Reader, short};
use crate::model::error::ModelError;
use crate::model::fp8_blocks::Fp8Blocks;

/// The key that describes quantized weights.
pub(super) const KEY: &str = "quantization_config";
/// Maximum rows or columns of a block.
const BLOCK_MAX: u64 = 1 << 16;

impl Reader<'_> {
    /// The blocks of weights in FP8. `None`: the weights are stored plainly, or in a form that is
    /// refused elsewhere.
    ///
    /// # Errors
    /// The weights are in FP8, and something is said of them that is not known.
    pub(super) fn fp8_blocks(&self) -> Result<Option<Fp8Blocks>, ModelError> {
        let Some(Value::Object(quantization)) = self.get(KEY) else {
            return Ok(None);
        };
        let text = |key: &str| quantization.get(key).and_then(Value::as_str);
        let Some(size) = quantization.get("weight_block_size").filter(|size| !size.is_null()) else {
            return Ok(None);
        };
        if text("quant_method") != Some("fp8") {
            return Ok(None);
        }
        for (key, value) in quantization {
            let is_known = match key.as_str() {
                "quant_method" | "weight_block_size" => true,
                "activation_scheme" => value == "dynamic",
                "fmt" => value == "e4m3" || value == "float8_e4m3fn",
                // Where they are `ue8m0`, factors are powers of 2, and stored as F32 nevertheless.
                "scale_fmt" => value == "ue8m0" || value == "float",
                // What transformers 5 writes besides.
                "expert_dtype" => value == "fp8",
                // Which matrices are stored plainly. Their number format says so, too.
                "modules_to_not_convert" | "ignored_layers" => true,
                _ => value.is_null() || value == &Value::Bool(false),
            };
            if !is_known {
                return Err(self.option(&format!("{KEY}."), key, value));
            }
        }
        let sides = size.as_array().map(|sides| sides.iter().map(Value::as_u64));
        let sides: Option<Vec<u64>> = sides.and_then(Iterator::collect);
        match sides.as_deref() {
            Some(&[rows @ 1..=BLOCK_MAX, columns @ 1..=BLOCK_MAX]) => Ok(Some(Fp8Blocks {
                rows: rows as usize,
                columns: columns as usize,
            })),
            _ => Err(self.broken(format!(
                "`{KEY}.weight_block_size` is {}, not two whole numbers from 1 to {BLOCK_MAX}",
                short(size)
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::{Value, json};

    use crate::model::config::Config;
    use crate::model::fp8_blocks::Fp8Blocks;

    fn blocks(quantization: &Value) -> Result<Option<Fp8Blocks>, String> {
        let text = json!({"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
            "vocab_size": 100});
        let mut plain = text.clone();
        plain["architectures"] = json!(["Qwen3ForCausalLM"]);
        plain["quantization_config"] = quantization.clone();
        let images = json!({"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text,
            "quantization_config": quantization});
        let [plain, images] = [plain, images].map(|config| {
            let config = Config::parse(Path::new("config.json"), &config.to_string());
            config.map(|config| config.fp8_blocks).map_err(|e| e.to_string())
        });
        assert_eq!(plain, images);
        plain
    }

    #[test]
    fn blocks_are_those_of_the_configuration() {
        let published = json!({"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
            "weight_block_size": [128, 64], "modules_to_not_convert": ["lm_head"], "dequantize": false});
        let found = Fp8Blocks { rows: 128, columns: 64 };
        assert_eq!(blocks(&published), Ok(Some(found)));
        assert_eq!(blocks(&Value::Null), Ok(None));
    }

    #[test]
    fn what_is_not_known_of_fp8_is_refused_by_name() {
        let of = |key: &str, value: Value| {
            let mut quantization = json!({"quant_method": "fp8", "weight_block_size": [128, 128]});
            quantization[key] = value;
            blocks(&quantization).unwrap_err()
        };
        for (key, value) in [
            ("activation_scheme", json!("static")),
            ("fmt", json!("e5m2")),
            ("scale_fmt", json!("e5m2")),
            ("something_new", json!(3)),
        ] {
            let error = of(key, value);
            assert!(error.contains(&format!("`quantization_config.{key}`")), "{error}");
        }
        for size in [json!([128]), json!([128, 0]), json!(128), json!([128, 1 << 20])] {
            let error = of("weight_block_size", size);
            assert!(error.contains("not two whole numbers"), "{error}");
        }
        // Other forms, and one factor for a whole matrix.
        for other in [
            json!({"quant_method": "fp8"}),
            json!({"quant_method": "fp8", "weight_block_size": null}),
            json!({"quant_method": "awq", "weight_block_size": [128, 128]}),
        ] {
            let error = blocks(&other).unwrap_err();
            assert!(
                error.contains("`quantization_config` (") && error.contains("take the checkpoint in BF16"),
                "{error}"
            );
        }
    }
}
