//! The bytes of every token, computed once into one arena.
//!
//! A token's bytes are the text that it adds after other tokens. The file's decoder determines
//! them. Byte-level vocabularies write each byte as one printable character (GPT-2's table).
//! SentencePiece vocabularies write a space as `▁`, and a single byte as `<0x0A>`.

use tokenizers::DecoderWrapper;

use super::AddedToken;
use super::shared::HfTokenizer;

/// Bytes by token id.
pub(super) struct TokenBytes {
    arena: Vec<u8>,
    /// `ends[id]` is the end of the token's bytes. They begin at the end of the bytes of `id - 1`.
    ends: Vec<usize>,
    /// Ids that the vocabulary skips, ascending.
    unused_ids: Vec<u32>,
}

/// A transformation that a decoder applies to each token.
enum DecoderRule {
    ByteLevel,
    ByteFallback,
    Replace(String, String),
    /// A token without this prefix starts a word, and a space precedes it.
    WordPrefix(String),
}

impl TokenBytes {
    /// Computes the bytes of all tokens of `tokenizer`. Ids above `id_max` are refused.
    pub(super) fn new(tokenizer: &HfTokenizer, added: &[AddedToken], id_max: u32) -> Result<TokenBytes, String> {
        let vocab = tokenizer.get_vocab(true);
        let last = vocab.values().copied().chain(added.iter().map(|token| token.id)).max();
        let Some(last) = last else {
            return Err("its vocabulary is empty".into());
        };
        if last > id_max {
            return Err(format!(
                "it has token id {last}, and ids above {id_max} are not supported"
            ));
        }
        let model_vocab = tokenizer.get_vocab(false);
        // The text of each token, and whether the text is literal; otherwise the decoder applies.
        let mut texts: Vec<Option<(&str, bool)>> = vec![None; last as usize + 1];
        let mut known = vec![false; texts.len()];
        for (text, &id) in &vocab {
            texts[id as usize] = Some((text, false));
            known[id as usize] = true;
        }
        for token in added {
            known[token.id as usize] = true;
            // Control tokens have no bytes. Other added tokens that are in the model's own
            // vocabulary are decoded like its other tokens (for example Gemma's runs of spaces).
            // Tokens that were added later are literal text, because no normalizer or pre-tokenizer
            // has rewritten them.
            let is_literal = model_vocab.get(&token.content) != Some(&token.id);
            texts[token.id as usize] = (!token.special).then_some((token.content.as_str(), is_literal));
        }
        let rules = rules(tokenizer)?;
        let table = byte_of_char_table();
        let mut out = TokenBytes {
            arena: Vec::with_capacity(vocab.len() * 8),
            ends: Vec::with_capacity(texts.len()),
            unused_ids: (0..=last).filter(|id| !known[*id as usize]).collect(),
        };
        for text in texts {
            match text {
                Some((text, true)) => out.arena.extend_from_slice(text.as_bytes()),
                Some((text, false)) => apply_rules(&rules, text, &table, &mut out.arena),
                None => {}
            }
            out.ends.push(out.arena.len());
        }
        Ok(out)
    }

    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    pub(super) fn unused_ids(&self) -> &[u32] {
        &self.unused_ids
    }

    pub(super) fn get(&self, id: u32) -> &[u8] {
        let id = id as usize;
        let Some(&end) = self.ends.get(id) else { return &[] };
        let start = if id == 0 { 0 } else { self.ends[id - 1] };
        &self.arena[start..end]
    }
}

/// Converts the file's decoder to rules for single tokens.
fn rules(tokenizer: &HfTokenizer) -> Result<Vec<DecoderRule>, String> {
    let mut rules = Vec::new();
    match tokenizer.get_decoder() {
        Some(decoder) => collect_rules(decoder, &mut rules)?,
        // Without a decoder, tokens are words, joined by spaces.
        None => rules.push(DecoderRule::WordPrefix("\u{0}".into())),
    }
    Ok(rules)
}

fn collect_rules(decoder: &DecoderWrapper, rules: &mut Vec<DecoderRule>) -> Result<(), String> {
    match decoder {
        DecoderWrapper::ByteLevel(_) => rules.push(DecoderRule::ByteLevel),
        DecoderWrapper::ByteFallback(_) => rules.push(DecoderRule::ByteFallback),
        DecoderWrapper::Metaspace(meta) => {
            rules.push(DecoderRule::Replace(meta.get_replacement().to_string(), " ".into()))
        }
        DecoderWrapper::BPE(bpe) => rules.push(DecoderRule::Replace(bpe.suffix.clone(), " ".into())),
        DecoderWrapper::WordPiece(words) => rules.push(DecoderRule::WordPrefix(words.prefix.clone())),
        DecoderWrapper::Sequence(sequence) => {
            for part in sequence.get_decoders() {
                collect_rules(part, rules)?;
            }
        }
        DecoderWrapper::Replace(_) => {
            let value = serde_json::to_value(decoder).map_err(|e| e.to_string())?;
            match (value["pattern"]["String"].as_str(), value["content"].as_str()) {
                (Some(pattern), Some(content)) => rules.push(DecoderRule::Replace(pattern.into(), content.into())),
                _ => return Err("its decoder replaces by a regular expression, which is not supported".into()),
            }
        }
        // Both work on whole texts: the first joins tokens, the second strips characters at the
        // text's ends.
        DecoderWrapper::Fuse(_) | DecoderWrapper::Strip(_) => {}
        DecoderWrapper::CTC(_) => return Err("its decoder is for speech (`CTC`), which is not supported".into()),
    }
    Ok(())
}

fn apply_rules(rules: &[DecoderRule], token: &str, table: &[Option<u8>], out: &mut Vec<u8>) {
    let mut text = token.to_string();
    for rule in rules {
        match rule {
            DecoderRule::ByteLevel => {
                let bytes: Option<Vec<u8>> = text.chars().map(|c| table.get(c as usize).copied().flatten()).collect();
                return out.extend_from_slice(bytes.as_deref().unwrap_or(text.as_bytes()));
            }
            DecoderRule::ByteFallback => {
                let hex = text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
                let byte = hex
                    .filter(|hex| hex.len() == 2)
                    .and_then(|hex| u8::from_str_radix(hex, 16).ok());
                if let Some(byte) = byte {
                    return out.push(byte);
                }
            }
            DecoderRule::Replace(pattern, with) if !pattern.is_empty() => text = text.replace(pattern, with),
            DecoderRule::Replace(..) => {}
            DecoderRule::WordPrefix(prefix) => {
                text = match text.strip_prefix(prefix.as_str()) {
                    Some(rest) => rest.to_string(),
                    None => format!(" {text}"),
                }
            }
        }
    }
    out.extend_from_slice(text.as_bytes());
}

/// The printable character that stands for `byte` in byte-level vocabularies: the byte's own
/// character if it is printable in Latin-1; the other bytes, in order, have the characters from
/// U+0100 on.
pub(crate) fn byte_char(byte: u8) -> char {
    let is_printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    if is_printable(byte) {
        return byte as char;
    }
    let before = (0..byte).filter(|&b| !is_printable(b)).count() as u32;
    char::from_u32(0x100 + before).unwrap_or('\u{FFFD}')
}

/// The inverse of [`byte_char`], by character code.
pub(super) fn byte_of_char_table() -> Vec<Option<u8>> {
    let mut table = vec![None; 0x100 + 256];
    for byte in 0..=255u8 {
        table[byte_char(byte) as usize] = Some(byte);
    }
    table
}
