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
const TEXTS: [&str; 9] = [
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<end_of_turn>",
    "<|return|>",
    "<|call|>",
    END,
];

/// It ends Phi-3's answers. In gpt-oss another message of the answer may follow it, and it is known by the tokens that end answers there.
const END: &str = "<|end|>";
const WHERE_END_IS_NONE: [&str; 2] = ["<|return|>", "<|call|>"];

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
    let control = tokens.zip(0..).filter(|((_, kind), _)| kind.whole() == Some(CONTROL));
    let control = control.filter_map(|((text, _), id)| Some((text.text()?, id)));
    let ends: Vec<(&str, u64)> = control.filter(|(text, _)| TEXTS.contains(text)).collect();
    let has = |end: &&str| ends.iter().any(|(text, _)| text == end);
    let end_is_none = WHERE_END_IS_NONE.iter().all(has);
    ids.extend(
        ends.iter()
            .filter(|(text, _)| *text != END || !end_is_none)
            .map(|(_, id)| id),
    );
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}
