//! Tokenizers of models without `tokenizer.json`: `tekken.json`, tiktoken's ranks, SentencePiece's model, the metadata of
//! a GGUF file.
//!
//! Each is written as a `tokenizer.json` in memory, which then goes the way of a file of that name, with its limits and
//! checks. What a file says that this form cannot say is refused by name.
//!
//! See docs/decisions/100-other-tokenizers-become-one-form.md.

mod gguf;
mod merges;
mod sentencepiece;
mod splits;
mod tekken;
mod tiktoken;

use std::path::{Path, PathBuf};

use data_encoding::HEXLOWER;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

pub(super) use gguf::{config as gguf_config, warning as gguf_warning};

use super::config::{TokenizerConfig, read_limited};
use super::{Tokenizer, TokenizerError};
use crate::regular;

/// Maximum size of a `tekken.json` in bytes. The largest known one has 19 MB.
const TEKKEN_BYTES_MAX: u64 = 64 << 20;
/// Maximum size of the other files, whose tokens take fewer bytes. The largest known ones have 5 MB.
const OTHER_BYTES_MAX: u64 = 16 << 20;

/// A tokenizer as a `tokenizer.json`, and the special tokens that its own file names.
#[derive(Debug)]
pub(super) struct Converted {
    json: Value,
    names: SpecialNames,
}

/// Special tokens that a file names, for where `tokenizer_config.json` names none.
#[derive(Debug, Default)]
struct SpecialNames {
    bos: Option<String>,
    eos: Option<String>,
    unk: Option<String>,
    pad: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    Tekken,
    Tiktoken,
    SentencePiece,
}

/// The tokenizer of a folder that has one of these forms. `None`: it has none of them.
pub(super) fn load(dir: &Path) -> Result<Option<Tokenizer>, TokenizerError> {
    if let Some(tokenizer) = gguf::load(dir)? {
        return Ok(Some(tokenizer));
    }
    let Some(path) = find(dir) else { return Ok(None) };
    let is_tekken = path.extension().is_some_and(|end| end == "json");
    let bytes = read_limited(&path, if is_tekken { TEKKEN_BYTES_MAX } else { OTHER_BYTES_MAX })?;
    let config = TokenizerConfig::load(dir)?;
    let format = match is_tekken {
        true => Format::Tekken,
        false if tiktoken::is_ranks(&bytes) => Format::Tiktoken,
        false => Format::SentencePiece,
    };
    let broken = |why| TokenizerError::Broken {
        path: path.clone(),
        why,
    };
    let converted = convert(format, &bytes, &config).map_err(broken)?;
    build(converted, config, &bytes).map(Some).map_err(broken)
}

/// The file that is read if a folder has several: Mistral's own, then SentencePiece's name, then tiktoken's.
fn find(dir: &Path) -> Option<PathBuf> {
    let names = regular::entry_names(dir).ok()?;
    let fixed = ["tekken.json", "tokenizer.model", "tiktoken.model"].map(String::from);
    let mut ranks = names.iter().filter(|name| name.ends_with(".tiktoken"));
    // Two files of ranks are no tokenizer that could be told.
    let only = ranks.next().filter(|_| ranks.next().is_none());
    fixed
        .iter()
        .find(|name| names.contains(*name))
        .or(only)
        .map(|name| dir.join(name))
}

fn convert(format: Format, bytes: &[u8], config: &TokenizerConfig) -> Result<Converted, String> {
    match format {
        Format::Tekken => tekken::convert(bytes),
        Format::Tiktoken => tiktoken::convert(bytes, config),
        Format::SentencePiece => sentencepiece::convert(bytes, config),
    }
}

fn build(converted: Converted, mut config: TokenizerConfig, file: &[u8]) -> Result<Tokenizer, String> {
    let SpecialNames { bos, eos, unk, pad } = converted.names;
    for (slot, name) in [
        (&mut config.bos_token, bos),
        (&mut config.eos_token, eos),
        (&mut config.unk_token, unk),
        (&mut config.pad_token, pad),
    ] {
        *slot = slot.take().or(name);
    }
    // The models of these files begin each prompt with this token, unless the configuration says otherwise.
    config.add_bos_token.get_or_insert(config.bos_token.is_some());
    let mut tokenizer = Tokenizer::build(converted.json.to_string().as_bytes(), config)?;
    tokenizer.hash = HEXLOWER.encode(&Sha256::digest(file));
    Ok(tokenizer)
}

/// A token's entry among `added_tokens`.
fn added_token(id: u32, content: &str, is_special: bool) -> Value {
    json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
           "special": is_special})
}

/// A tokenizer of bytes: text is split by `pattern`, and each piece is merged by rank.
fn of_ranks(ranks: &[(Vec<u8>, u32)], pattern: &str, specials: &[(String, u32)]) -> Result<Value, String> {
    let ranked = merges::RankedTokens::of_bytes(ranks)?;
    let merges = ranked.merges()?;
    let mut vocab: serde_json::Map<String, Value> = ranks
        .iter()
        .map(|(bytes, id)| (merges::written(bytes), json!(id)))
        .collect();
    for (content, id) in specials {
        if vocab.insert(content.clone(), json!(id)).is_some() {
            return Err(format!(
                "its special token `{content}` is a token of its vocabulary, too"
            ));
        }
    }
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    let split = json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
    Ok(json!({
        "version": "1.0",
        "added_tokens": specials.iter().map(|(content, id)| added_token(*id, content, true)).collect::<Vec<_>>(),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "decoder": byte_level,
        // A piece that is a token is that token, whatever merges would make of it.
        "model": {"type": "BPE", "ignore_merges": true, "vocab": vocab, "merges": merges},
    }))
}

#[cfg(test)]
mod tests;
