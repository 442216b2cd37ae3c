//! A model's vocabulary in the form that grammars need: a trie of all tokens' bytes in which the
//! end-of-sequence ids are marked, and the tokenization of bytes that a grammar forces.

use std::sync::Arc;

use toktrie::{INVALID_TOKEN, TokRxInfo, TokTrie, TokenId, TokenizerEnv};

use crate::tokenizer::Tokenizer;

/// Maximum bytes of a token under a grammar, since the trie stores a depth in one byte. Longer
/// tokens (runs of white space) are not used.
const TOKEN_BYTES_MAX: usize = 255;

/// See the module's description.
pub struct Vocabulary {
    tokenizer: Arc<Tokenizer>,
    trie: TokTrie,
}

impl Vocabulary {
    /// `eos`: the model's end-of-sequence ids. Ids beyond the tokenizer's vocabulary are ignored.
    pub fn new(tokenizer: &Arc<Tokenizer>, eos: &[u32]) -> Vocabulary {
        let size = tokenizer.vocab_size() as u32;
        let token_texts: Vec<Vec<u8>> = (0..size)
            .map(|id| {
                let bytes = tokenizer.token_bytes(id);
                if tokenizer.is_special(id) || eos.contains(&id) {
                    // The trie recognizes special tokens by a first byte that never occurs in
                    // UTF-8.
                    [&[TokTrie::SPECIAL_TOKEN_MARKER], format!("<|{id}|>").as_bytes()].concat()
                } else if bytes.first() == Some(&TokTrie::SPECIAL_TOKEN_MARKER) || bytes.len() > TOKEN_BYTES_MAX {
                    Vec::new()
                } else {
                    bytes.to_vec()
                }
            })
            .collect();
        let known_eos: Vec<u32> = eos.iter().copied().filter(|id| *id < size).collect();
        let mut trie = TokTrie::from(
            &TokRxInfo::new(size, known_eos.first().copied().unwrap_or(INVALID_TOKEN)),
            &token_texts,
        );
        if !known_eos.is_empty() {
            trie = trie.with_eos_tokens(&known_eos);
        }
        Vocabulary {
            tokenizer: tokenizer.clone(),
            trie,
        }
    }
}

impl TokenizerEnv for Vocabulary {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    /// The tokenizer's own tokens, as in the middle of a text. If the bytes are not whole
    /// characters, or a normalizer would change the text, the result is the longest matching tokens
    /// from left to right, as far as the vocabulary has the bytes.
    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        let bytes_of = |tokens: &[TokenId]| self.trie.decode_raw(tokens);
        if let Ok(text) = str::from_utf8(bytes) {
            let tokens = self.tokenizer.encode_plain(text);
            if bytes_of(&tokens) == bytes {
                return tokens;
            }
        }
        let mut tokens = self.trie.greedy_tokenize(bytes);
        while !bytes.starts_with(&bytes_of(&tokens)) {
            tokens.pop();
        }
        tokens
    }
}
