//! Prefixes that pre-tokenizers and normalizers put before a text, and tokenizers without them.

use serde_json::{Value, json};
use tokenizers::{NormalizerWrapper, PreTokenizerWrapper};

use super::shared::HfTokenizer;

/// The prefixes to remove from a tokenizer.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum StripPrefix {
    /// Prefixes that only the first text of a prompt gets.
    FirstOnly,
    /// All prefixes.
    All,
}

/// A copy of `from` without these prefixes. `None` if `from` has none of them.
pub(super) fn without_prefix(from: &HfTokenizer, which: StripPrefix) -> Result<Option<HfTokenizer>, String> {
    let mut changed = false;
    let mut out = from.clone();
    if let Some(pre) = from.get_pre_tokenizer() {
        let mut value = serde_json::to_value(pre).map_err(|e| e.to_string())?;
        let mut stripped = false;
        strip_prefix(&mut value, which, &mut stripped);
        if stripped {
            let pre: PreTokenizerWrapper = serde_json::from_value(value).map_err(|e| e.to_string())?;
            out.with_pre_tokenizer(Some(pre));
            changed = true;
        }
    }
    if let Some(normalizer) = from.get_normalizer() {
        let mut value = serde_json::to_value(normalizer).map_err(|e| e.to_string())?;
        let mut stripped = false;
        strip_prefix(&mut value, which, &mut stripped);
        if stripped {
            let normalizer: NormalizerWrapper = serde_json::from_value(value).map_err(|e| e.to_string())?;
            out.with_normalizer(Some(normalizer)).map_err(|e| e.to_string())?;
            changed = true;
        }
    }
    Ok(changed.then_some(out))
}

/// Whether a pre-tokenizer or normalizer puts SentencePiece's space mark before a text.
pub(super) fn puts_space_in_front(tokenizer: &HfTokenizer) -> Result<bool, String> {
    let pre = tokenizer.get_pre_tokenizer().map(serde_json::to_value);
    let normalizer = tokenizer.get_normalizer().map(serde_json::to_value);
    for part in [pre, normalizer].into_iter().flatten() {
        if has_space_prefix(&part.map_err(|e| e.to_string())?) {
            return Ok(true);
        }
    }
    Ok(false)
}

fn has_space_prefix(value: &Value) -> bool {
    match value["type"].as_str() {
        Some("Sequence") => ["pretokenizers", "normalizers"]
            .iter()
            .filter_map(|key| value[*key].as_array())
            .flatten()
            .any(has_space_prefix),
        Some("Metaspace") => value["prepend_scheme"] != "never",
        Some("Prepend") => matches!(value["prepend"].as_str(), Some("▁" | " ")),
        _ => false,
    }
}

/// Removes prefixes from a serialized pre-tokenizer or normalizer, also inside sequences.
fn strip_prefix(value: &mut Value, which: StripPrefix, changed: &mut bool) {
    match value.get("type").and_then(Value::as_str) {
        Some("Sequence") => {
            for key in ["pretokenizers", "normalizers"] {
                for part in value.get_mut(key).and_then(Value::as_array_mut).into_iter().flatten() {
                    strip_prefix(part, which, changed);
                }
            }
        }
        Some("Metaspace") => {
            let scheme = value["prepend_scheme"].as_str().unwrap_or("always");
            if scheme == "first" || (scheme == "always" && which == StripPrefix::All) {
                value["prepend_scheme"] = "never".into();
                *changed = true;
            }
        }
        Some("ByteLevel") if which == StripPrefix::All && value["add_prefix_space"] == true => {
            value["add_prefix_space"] = false.into();
            *changed = true;
        }
        Some("Prepend") if which == StripPrefix::All => {
            // An empty sequence is a normalizer that changes nothing.
            *value = json!({"type": "Sequence", "normalizers": []});
            *changed = true;
        }
        _ => {}
    }
}
