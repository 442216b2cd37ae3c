//! A model's vocabulary as grammars walk it: the bytes of each token in a trie, end-of-sequence ids apart, and the tokens that
//! spell bytes which a grammar forces.

use std::sync::Arc;

use toktrie::{INVALID_TOKEN, TokRxInfo, TokTrie, TokenId, TokenizerEnv};

use crate::model::tokenizer::Tokenizer;

/// Longer tokens (runs of white space) are not used under a grammar: the trie counts depth in a byte.
const TOKEN_BYTES_MAX: usize = 255;

/// See the module's description.
pub struct Vocabulary {
    tokenizer: Arc<Tokenizer>,
    trie: TokTrie,
}

impl Vocabulary {
    /// `eos`: the model's end-of-sequence ids; those that the tokenizer does not have are left out.
    pub fn new(tokenizer: &Arc<Tokenizer>, eos: &[u32]) -> Vocabulary {
        let size = tokenizer.vocab_size() as u32;
        let words: Vec<Vec<u8>> = (0..size)
            .map(|id| {
                let bytes = tokenizer.token_bytes(id);
                if tokenizer.is_special(id) || eos.contains(&id) {
                    // The trie tells special tokens by a first byte that UTF-8 never has.
                    [&[TokTrie::SPECIAL_TOKEN_MARKER], format!("<|{id}|>").as_bytes()].concat()
                } else if bytes.first() == Some(&TokTrie::SPECIAL_TOKEN_MARKER) || bytes.len() > TOKEN_BYTES_MAX {
                    Vec::new()
                } else {
                    bytes.to_vec()
                }
            })
            .collect();
        let known: Vec<u32> = eos.iter().copied().filter(|id| *id < size).collect();
        let mut trie = TokTrie::from(
            &TokRxInfo::new(size, known.first().copied().unwrap_or(INVALID_TOKEN)),
            &words,
        );
        if !known.is_empty() {
            trie = trie.with_eos_tokens(&known);
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

    /// The tokenizer's own tokens, as in the middle of a text; where they spell something else (a normalizer may change it,
    /// bytes may be no whole characters) the longest tokens from left to right, as far as the vocabulary has the bytes.
    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        let spelled = |tokens: &[TokenId]| self.trie.decode_raw(tokens);
        if let Ok(text) = str::from_utf8(bytes) {
            let tokens = self.tokenizer.encode_plain(text);
            if spelled(&tokens) == bytes {
                return tokens;
            }
        }
        let mut tokens = self.trie.greedy_tokenize(bytes);
        while !bytes.starts_with(&spelled(&tokens)) {
            tokens.pop();
        }
        tokens
    }
}
