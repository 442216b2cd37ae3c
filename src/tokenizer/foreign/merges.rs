//! Merges of BPE from ranks of whole tokens.
//!
//! Tiktoken and SentencePiece merge whichever two neighbours make the token of the lowest rank; `tokenizer.json` lists pairs.
//! So each token gives a pair for each way to split it into two tokens, and pairs stand in the order of the tokens.

use std::collections::HashSet;

use super::super::bytes::byte_char;

/// Maximum number of merges, as of a `tokenizer.json`.
const MERGES_MAX: usize = 1 << 21;
/// Maximum length of a token in bytes, as of a `tokenizer.json`.
const TOKEN_BYTES_MAX: usize = 4 << 10;

/// Tokens in the order of their ranks, as `tokenizer.json` writes them.
pub(super) struct RankedTokens {
    texts: Vec<String>,
}

/// Bytes as byte-level vocabularies write them: a character a byte.
pub(super) fn written(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| byte_char(*byte)).collect()
}

impl RankedTokens {
    /// Tokens of bytes, each with its rank. All single bytes must be among them, or texts could not be encoded.
    pub(super) fn of_bytes(ranks: &[(Vec<u8>, u32)]) -> Result<RankedTokens, String> {
        let mut known = [false; 256];
        for (bytes, rank) in ranks {
            match bytes[..] {
                [] => return Err(format!("its token {rank} is empty")),
                [byte] => known[usize::from(byte)] = true,
                _ => {}
            }
        }
        if let Some(byte) = known.iter().position(|known| !known) {
            return Err(format!("its vocabulary lacks the byte {byte:#04x}"));
        }
        let mut ordered: Vec<(u32, &[u8])> = ranks.iter().map(|(bytes, rank)| (*rank, &bytes[..])).collect();
        ordered.sort_unstable();
        if let Some(pair) = ordered.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            return Err(format!("two of its tokens have the rank {}", pair[0].0));
        }
        RankedTokens::of_texts(ordered.into_iter().map(|(_, bytes)| written(bytes)).collect())
    }

    /// Tokens of characters, by ascending rank.
    pub(super) fn of_texts(texts: Vec<String>) -> Result<RankedTokens, String> {
        if let Some(text) = texts.iter().find(|text| text.len() > TOKEN_BYTES_MAX) {
            return Err(format!(
                "it has a token of {} bytes, more than {TOKEN_BYTES_MAX}",
                text.len()
            ));
        }
        Ok(RankedTokens { texts })
    }

    /// All pairs that make a token, by the token's rank; of one token, the pair with the longest first part comes first: what
    /// merges from the left leaves shorter parts behind longer ones.
    pub(super) fn merges(&self) -> Result<Vec<(&str, &str)>, String> {
        let mut known: HashSet<&str> = HashSet::with_capacity(self.texts.len());
        for text in &self.texts {
            if !known.insert(text) {
                return Err(format!("its token `{}` occurs twice", text.escape_debug()));
            }
        }
        let mut merges = Vec::new();
        for text in &self.texts {
            for (at, _) in text.char_indices().rev().filter(|(at, _)| *at > 0) {
                let (first, second) = text.split_at(at);
                if known.contains(first) && known.contains(second) {
                    merges.push((first, second));
                }
            }
            if merges.len() > MERGES_MAX {
                return Err(format!("its tokens make more than {MERGES_MAX} pairs"));
            }
        }
        Ok(merges)
    }
}
