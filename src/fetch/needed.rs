//! Chooses the files of a checkpoint that are fetched: those that are read, and those by which a
//! checkpoint of another form is recognised. Code and pickled weights are never fetched.

use std::collections::BTreeSet;

use serde_json::Value;

pub(super) const CONFIG: &str = "config.json";
const WEIGHTS: &str = "model.safetensors";
pub(super) const ADAPTER_CONFIG: &str = "adapter_config.json";
const ADAPTER_WEIGHTS: &str = "adapter_model.safetensors";
pub(super) const INDEX: &str = "model.safetensors.index.json";
/// The folder of further chat templates.
pub(super) const TEMPLATES: &str = "additional_chat_templates";

/// Small files that describe a checkpoint. The last ones mark forms that are refused: without them,
/// a quantized model or an adapter would pass for another one.
const DESCRIPTION: [&str; 15] = [
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "channels.safetensors",
    INDEX,
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
    "quantization_config.json",
    ADAPTER_CONFIG,
    "model_index.json",
    "modules.json",
];

/// The names among `names` of the files that describe the checkpoint.
pub(super) fn description(names: &BTreeSet<String>) -> Vec<String> {
    let is_template = |name: &str| {
        let file = name
            .strip_prefix(TEMPLATES)
            .and_then(|rest| rest.strip_prefix('/'))
            .and_then(|file| file.strip_suffix(".jinja"));
        file.is_some_and(is_plain)
    };
    let is_needed = |name: &&String| DESCRIPTION.contains(&name.as_str()) || is_template(name);
    names.iter().filter(is_needed).cloned().collect()
}

/// The names of the weight files of a checkpoint, given the text of the index if there is one, or of an
/// adapter.
///
/// # Errors
/// There are no weights in a supported format, or the index is broken. The error is one line
/// without a location.
pub(super) fn weights(names: &BTreeSet<String>, index: Option<&[u8]>) -> Result<Vec<String>, String> {
    if names.contains(WEIGHTS) {
        return Ok(vec![WEIGHTS.to_string()]);
    }
    let Some(index) = index else {
        if names.contains(ADAPTER_CONFIG) && names.contains(ADAPTER_WEIGHTS) {
            return Ok(vec![ADAPTER_WEIGHTS.to_string()]);
        }
        return Err(no_weights(names));
    };
    let broken = |why: &str| Err(format!("`{INDEX}` {why}"));
    let Ok(index) = serde_json::from_slice::<Value>(index) else {
        return broken("is not valid JSON");
    };
    let Some(map) = index.get("weight_map").and_then(Value::as_object) else {
        return broken("has no `weight_map`");
    };
    let files: BTreeSet<&str> = map.values().filter_map(Value::as_str).collect();
    for file in &files {
        if !file.ends_with(".safetensors") || !is_plain(file) {
            return broken("names a file that is no file of safetensors beside it");
        }
        if !names.contains(*file) {
            return broken(&format!("names `{file}`, which is not there"));
        }
    }
    Ok(files.into_iter().map(String::from).collect())
}

/// Whether a text is the name of a file, not a path.
fn is_plain(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\', '\0'])
}

fn no_weights(names: &BTreeSet<String>) -> String {
    let others = [
        ".gguf",
        ".bin",
        ".pt",
        ".pth",
        ".onnx",
        ".safetensors",
        ".h5",
        ".msgpack",
    ];
    let other = names.iter().find(|name| others.iter().any(|end| name.ends_with(end)));
    match other {
        Some(other) => format!(
            "there is neither `{WEIGHTS}` nor `{INDEX}`, only `{}`: choose the repository or folder with its weights as safetensors",
            other.chars().take(100).collect::<String>()
        ),
        None => format!("there is neither `{WEIGHTS}` nor `{INDEX}`"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(list: &[&str]) -> BTreeSet<String> {
        list.iter().map(|name| (*name).to_string()).collect()
    }

    #[test]
    fn code_and_pickles_are_never_needed() {
        let all = names(&[
            "config.json",
            "modeling_x.py",
            "pytorch_model.bin",
            "README.md",
            "tokenizer.json",
            "additional_chat_templates/tools.jinja",
            "additional_chat_templates/../../x.jinja",
            "additional_chat_templates/x.py",
            "original/config.json",
            "consolidated.safetensors",
            "model.safetensors",
            "model-00001-of-00002.safetensors",
        ]);
        assert_eq!(
            description(&all),
            ["additional_chat_templates/tools.jinja", "config.json", "tokenizer.json"]
        );
        assert_eq!(weights(&all, None).unwrap(), ["model.safetensors"]);
    }

    #[test]
    fn an_index_names_files_beside_it() {
        let all = names(&["a.safetensors", "b.safetensors", INDEX]);
        let index = |map: &str| format!("{{\"weight_map\": {map}}}").into_bytes();
        let found = weights(
            &all,
            Some(&index(
                "{\"x\": \"b.safetensors\", \"y\": \"a.safetensors\", \"z\": \"a.safetensors\"}",
            )),
        );
        assert_eq!(found.unwrap(), ["a.safetensors", "b.safetensors"]);
        for (map, words) in [
            ("{\"x\": \"c.safetensors\"}", "`c.safetensors`, which is not there"),
            ("{\"x\": \"../a.safetensors\"}", "no file of safetensors"),
            ("{\"x\": \"a.bin\"}", "no file of safetensors"),
            ("3", "no `weight_map`"),
        ] {
            let why = weights(&all, Some(&index(map))).unwrap_err();
            assert!(why.contains(words), "{why}");
        }
        let why = weights(&names(&["config.json", "model.Q4.gguf"]), None).unwrap_err();
        assert!(why.contains("only `model.Q4.gguf`"), "{why}");
    }
}
