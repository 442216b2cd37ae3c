//! The format of a checkpoint's weights, as far as its JSON files say it.

use std::path::Path;

use serde_json::Value;

use super::reader::{read_json, short};
use crate::device::Dtype;
use crate::model::error::ModelError;

/// The format of a checkpoint's weights by its `config.json`, which need not be right. `None`: it
/// names none, or none that is supported.
///
/// # Errors
/// The file cannot be read or parsed.
pub fn declared_dtype(dir: &Path) -> Result<Option<Dtype>, ModelError> {
    let config = read_json(&dir.join("config.json"))?;
    let parts = [Some(&config), config.get("text_config").and_then(Value::as_object)];
    let names = parts
        .into_iter()
        .flatten()
        .flat_map(|part| ["dtype", "torch_dtype"].map(|key| part.get(key).and_then(Value::as_str)));
    Ok(names
        .flatten()
        .find_map(|name| match name.trim_start_matches("torch.") {
            "float32" => Some(Dtype::F32),
            "float16" => Some(Dtype::F16),
            "bfloat16" => Some(Dtype::Bf16),
            _ => None,
        }))
}

/// Files of ModelOpt, GPTQ, AWQ and AutoRound that describe quantized weights. `config.json` may be
/// silent about the quantization.
const QUANTIZATION_FILES: [&str; 4] = [
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
    "quantization_config.json",
];

/// What to do where weights are quantized.
pub(super) const TAKE_UNQUANTIZED: &str =
    "take the checkpoint in BF16, F16 or F32, which a job's `precision` quantizes";

/// Refuses a checkpoint whose weights are quantized.
///
/// # Errors
/// They are, or a file cannot be read.
pub(super) fn refuse_quantized(dir: &Path) -> Result<(), ModelError> {
    for name in QUANTIZATION_FILES {
        let path = dir.join(name);
        if path.try_exists().map_err(|e| ModelError::read(&path, e))? {
            let says =
                read_json(&path).map_or_else(|_| String::new(), |map| format!(" ({})", short(&Value::Object(map))));
            return Err(ModelError::unsupported(
                &path,
                format!("the weights of this checkpoint are quantized{says}; {TAKE_UNQUANTIZED}"),
            ));
        }
    }
    Ok(())
}
