//! Tiktoken's files of ranks: a line a token, its bytes in Base64 and its rank.
//!
//! The file holds neither the expression that splits a text nor the special tokens. The expression is that of a known
//! vocabulary, which is told by its size and by two of its tokens; special tokens come from `tokenizer_config.json`.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use super::{Converted, SpecialNames, of_ranks};
use crate::tokenizer::TokenizerConfig;

/// The expression of OpenAI's cl100k, which Llama 3 took over.
pub(super) const CL100K: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The same with numbers of single digits.
const QWEN: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// A vocabulary whose expression is known: its number of tokens, and the ranks of `Hello` and ` world`.
struct Known {
    name: &'static str,
    tokens: usize,
    hello_world: [u32; 2],
    pattern: &'static str,
}

const KNOWN: [Known; 3] = [
    Known {
        name: "Llama 3",
        tokens: 128_000,
        hello_world: [9906, 1917],
        pattern: CL100K,
    },
    Known {
        name: "cl100k",
        tokens: 100_256,
        hello_world: [9906, 1917],
        pattern: CL100K,
    },
    Known {
        name: "Qwen",
        tokens: 151_643,
        hello_world: [9707, 1879],
        pattern: QWEN,
    },
];

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
    let rank_of = |text: &[u8]| ranks.iter().find(|(bytes, _)| bytes == text).map(|(_, rank)| *rank);
    let known = KNOWN
        .iter()
        .filter(|known| known.tokens == ranks.len())
        .find(|known| [rank_of(b"Hello"), rank_of(b" world")] == known.hello_world.map(Some));
    let Some(known) = known else {
        let names: Vec<&str> = KNOWN.iter().map(|known| known.name).collect();
        return Err(format!(
            "it holds {} ranks of tiktoken's and not the expression that splits texts, which is known for the vocabularies of {}: \
             write a `tokenizer.json` with transformers",
            ranks.len(),
            names.join(", ")
        ));
    };
    if config.added_tokens.is_empty() {
        return Err(
            "it holds no special tokens, and `tokenizer_config.json` beside it has no `added_tokens_decoder`".into(),
        );
    }
    Ok(Converted {
        json: of_ranks(&ranks, known.pattern, &[])?,
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
