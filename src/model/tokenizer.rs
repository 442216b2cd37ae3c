//! The checkpoint's tokenizer (`tokenizer.json`) and what the rest needs of it.

/// A loaded tokenizer: encodes prompts, decodes completions, knows every token's bytes.
pub struct Tokenizer {}

impl Tokenizer {
    /// Number of token ids the tokenizer knows (ids `0..vocab_size()`); a model's padded vocabulary may be larger.
    pub fn vocab_size(&self) -> usize {
        unimplemented!()
    }
    /// The bytes a token stands for when it is decoded in the middle of a text; empty for special tokens.
    pub fn token_bytes(&self, _id: u32) -> &[u8] {
        unimplemented!()
    }
    /// Is this id a special (control) token, one that never shows in a completion's text?
    pub fn is_special(&self, _id: u32) -> bool {
        unimplemented!()
    }
    /// Encodes `text` as it would stand in the middle of a prompt: no special tokens are added, none are recognised.
    pub fn encode_plain(&self, _text: &str) -> Vec<u32> {
        unimplemented!()
    }
    /// Decodes a whole completion, leaving out special tokens.
    pub fn decode(&self, _ids: &[u32]) -> String {
        unimplemented!()
    }
}
