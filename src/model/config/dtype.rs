//! The format of a checkpoint's weights, as far as its JSON files say it.

use std::path::Path;

use serde_json::Value;

use super::reader::read_json;
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
