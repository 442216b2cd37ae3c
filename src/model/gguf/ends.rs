//! The tokens that end a completion, of which a GGUF file names only some.

use crate::gguf::{Header, Value};

/// Keys of tokens that end a text or a turn.
const KEYS: [&str; 3] = [
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eom_token_id",
];

/// Texts of control tokens that end a turn in the models that have them, as llama.cpp knows them. The other
/// checkpoints of these models list their ids, for which a GGUF file has no place.
const TEXTS: [&str; 8] = [
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<end_of_turn>",
    "<|return|>",
    "<|call|>",
];

/// The type of control tokens.
const CONTROL: u64 = 3;

/// Ids that end a completion, ascending.
///
/// # Errors
/// A key's value is no id.
pub(super) fn end_ids(metadata: &Header) -> Result<Vec<u64>, String> {
    let mut ids = Vec::new();
    for key in KEYS {
        if let Some(value) = metadata.get(key) {
            let id = value.whole().filter(|id| u32::try_from(*id).is_ok());
            ids.push(id.ok_or_else(|| format!("`{key}` is no token id"))?);
        }
    }
    let list = |key: &str| metadata.get(key).and_then(Value::list).unwrap_or_default();
    let tokens = list("tokenizer.ggml.tokens")
        .iter()
        .zip(list("tokenizer.ggml.token_type"));
    let ends = tokens.zip(0..).filter(|((text, kind), _)| {
        kind.whole() == Some(CONTROL) && text.text().is_some_and(|text| TEXTS.contains(&text))
    });
    ids.extend(ends.map(|(_, id)| id));
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}
