//! Tokenizers in other formats than `tokenizer.json`, recognised by file names and first bytes.

use std::path::Path;

use crate::regular::{self, first_bytes};

/// Describes the tokenizer of a folder without `tokenizer.json`. `None` if the folder has no known
/// tokenizer, or SentencePiece's.
pub(super) fn describe_other_format(dir: &Path) -> Option<String> {
    let names = regular::entry_names(dir).ok()?;
    let has = |name: &str| names.contains(name) && dir.join(name).is_file();
    let convert = "if transformers supports the model, it can write a `tokenizer.json`: \
                   `AutoTokenizer.from_pretrained(folder).save_pretrained(folder)`";
    if has("tokenizer.model") {
        let is_ranks = is_tiktoken(&first_bytes(&dir.join("tokenizer.model")));
        return is_ranks.then(|| format!("has its tokenizer only in tiktoken's form (`tokenizer.model`), and gristmill reads `tokenizer.json`: {convert}"));
    }
    if has("tekken.json") {
        return Some(
            "has its tokenizer only in Mistral's own form (`tekken.json`), and gristmill reads `tokenizer.json`: use the \
             checkpoint in the Hugging Face layout, or write a `tokenizer.json` for this one with transformers"
                .into(),
        );
    }
    let by_end = |end: &str| names.iter().find(|name| name.ends_with(end));
    if let Some(name) = by_end(".tiktoken") {
        return Some(format!(
            "has its tokenizer only in tiktoken's form (`{name}`), and gristmill reads `tokenizer.json`: {convert}"
        ));
    }
    let is_code = |name: &&String| name.starts_with("tokenization_") && name.ends_with(".py");
    if let Some(name) = names.iter().find(is_code) {
        return Some(format!(
            "has its tokenizer only as Python code (`{name}`), which gristmill does not run: it needs a `tokenizer.json`"
        ));
    }
    (has("vocab.json") && has("merges.txt")).then(|| {
        format!(
            "has its tokenizer only as `vocab.json` and `merges.txt`, and gristmill reads `tokenizer.json`: {convert}"
        )
    })
}

/// Whether a file begins like tiktoken's text format: one line per token, with the token's bytes in
/// Base64 and its rank. SentencePiece's format is binary.
fn is_tiktoken(beginning: &[u8]) -> bool {
    let line = beginning.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let is_base64 = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/' | b'=');
    match line.iter().position(|byte| *byte == b' ') {
        Some(at) => {
            let (token, rank) = (&line[..at], &line[at + 1..]);
            let rank = rank.trim_ascii_end();
            !token.is_empty() && token.iter().all(is_base64) && !rank.is_empty() && rank.iter().all(u8::is_ascii_digit)
        }
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiktoken_files_are_distinguished_from_sentencepiece_files() {
        for text in [&b"IQ== 0\nIg== 1\n"[..], b"IQ== 0\r\n", b"IQ== 12"] {
            assert!(is_tiktoken(text), "{text:?}");
        }
        for text in [
            &b"\x0a\x0e\x0a\x05<unk>\x15"[..],
            b"",
            b"x",
            b" 0",
            b"IQ== ",
            b"IQ== a",
            b"a b c\n",
        ] {
            assert!(!is_tiktoken(text), "{text:?}");
        }
    }
}
