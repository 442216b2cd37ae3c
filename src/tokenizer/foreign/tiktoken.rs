//! Tiktoken's files of ranks: a line a token, its bytes in Base64 and its rank.
//!
//! The file holds neither the expression that splits a text nor the special tokens. The expression is known for Llama 3's
//! vocabulary, which is told by its size and by two of its tokens; special tokens come from `tokenizer_config.json`. Others that
//! have such files alone bring code, which may also normalise texts (Qwen's first models do).

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use super::{Converted, SpecialNames, of_ranks};
use crate::tokenizer::TokenizerConfig;

/// The expression of Llama 3.
pub(super) const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The number of its tokens, and the ranks of two.
const LLAMA3_TOKENS: usize = 128_000;
const LLAMA3_RANKS: [(&[u8], u32); 2] = [(b"Hello", 9906), (b" world", 1917)];

/// Whether a file begins like one of ranks. SentencePiece's format is binary.
pub(super) fn is_ranks(bytes: &[u8]) -> bool {
    let line = bytes.split(|byte| *byte == b'\n').next().unwrap_or_default();
    parse_line(line).is_some()
}

fn parse_line(line: &[u8]) -> Option<(Vec<u8>, u32)> {
    let (token, rank) = str::from_utf8(line).ok()?.trim_ascii_end().split_once(' ')?;
    let is_number = !rank.is_empty() && rank.bytes().all(|byte| byte.is_ascii_digit());
    let token = STANDARD.decode(token).ok().filter(|token| !token.is_empty());
    Some((token?, is_number.then(|| rank.parse().ok()).flatten()?))
}

pub(super) fn convert(bytes: &[u8], config: &TokenizerConfig) -> Result<Converted, String> {
    let ranks = ranks(bytes)?;
    let has = |(text, rank): &(&[u8], u32)| ranks.iter().any(|token| token.0 == *text && token.1 == *rank);
    if ranks.len() != LLAMA3_TOKENS || !LLAMA3_RANKS.iter().all(has) {
        return Err(format!(
            "it holds {} ranks of tiktoken's and not the expression that splits texts, which is known for Llama 3's vocabulary \
             alone: write a `tokenizer.json` with transformers",
            ranks.len()
        ));
    }
    if config.added_tokens.is_empty() {
        return Err(
            "it holds no special tokens, and `tokenizer_config.json` beside it has no `added_tokens_decoder`".into(),
        );
    }
    Ok(Converted {
        json: of_ranks(&ranks, LLAMA3, &[])?,
        names: SpecialNames::default(),
    })
}

pub(super) fn ranks(bytes: &[u8]) -> Result<Vec<(Vec<u8>, u32)>, String> {
    let lines = bytes.split(|byte| *byte == b'\n').enumerate();
    lines
        .filter(|(_, line)| !line.trim_ascii().is_empty())
        .map(|(number, line)| {
            parse_line(line).ok_or_else(|| format!("line {} is not a token in Base64 and its rank", number + 1))
        })
        .collect()
}
