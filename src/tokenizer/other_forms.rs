//! Tokenizers in other formats than `tokenizer.json`, recognised by file names and first bytes.

use std::path::Path;

use crate::regular::{self, beginning};

/// Names the tokenizer that a folder without `tokenizer.json` has. `None`: no known tokenizer, or
/// SentencePiece's.
pub(super) fn other_tokenizer(dir: &Path) -> Option<String> {
    let names = regular::names(dir).ok()?;
    let has = |name: &str| names.contains(name) && dir.join(name).is_file();
    let convert = "transformers makes a `tokenizer.json` of it, where it knows the model: \
                   `AutoTokenizer.from_pretrained(folder).save_pretrained(folder)`";
    if has("tokenizer.model") {
        let is_ranks = is_tiktoken(&beginning(&dir.join("tokenizer.model")));
        return is_ranks.then(|| format!("has its tokenizer only in tiktoken's form (`tokenizer.model`), and gristmill reads `tokenizer.json`: {convert}"));
    }
    if has("tekken.json") {
        return Some(
            "has its tokenizer only in Mistral's own form (`tekken.json`), and gristmill reads `tokenizer.json`: take it from the \
             checkpoint in the Hugging Face layout, or have transformers make it of this one"
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
            "has a tokenizer that is code of its own (`{name}`), which gristmill does not run; it reads `tokenizer.json`"
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
    fn tiktokens_form_is_told_from_sentencepieces() {
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
