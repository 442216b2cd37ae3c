//! The checkpoint's tokenizer (`tokenizer.json`), and the properties of it that other modules need.
//!
//! There are three encodings of a text. To confuse them gives wrong prompts without an error:
//!
//! - [`Tokenizer::encode`]: a whole prompt, as Hugging Face transformers encodes it. Added tokens
//!   in it are recognised.
//! - [`Tokenizer::encode_piece`]: a section of a prompt between two added tokens. No added token is
//!   recognised in it.
//! - [`Tokenizer::encode_plain`]: text in the middle of a prompt or completion. No added token is
//!   recognised, and the text gets no prefix (some tokenizers put a space mark before every text).

mod bytes;
mod config;
mod declared;
mod encode;
mod fit;
mod foreign;
mod guarded;
mod other_forms;
mod prefix;
mod shared;
mod stream;
pub(crate) mod trie;

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use data_encoding::HEXLOWER;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokenizers::{AddedToken as HfAddedToken, AddedVocabulary, PostProcessorWrapper};

use declared::{RawTokenizerFile, check_post_processor, check_prefix_chains};
use encode::{EncodeBounds, StreamEncoders, encode_with};
use guarded::guarded;
use other_forms::describe_other_format;
use prefix::{StripPrefix, puts_space_in_front, without_prefix};
use shared::HfTokenizer;

pub use config::{ChatTemplateSource, TokenizerConfig};
pub use encode::Encoded;

/// Maximum size of `tokenizer.json` in bytes. The largest known file has 34 MB (a vocabulary of
/// 262,144 tokens).
const TOKENIZER_BYTES_MAX: u64 = 128 << 20;
/// Maximum token id. Tables have an entry for each id up to the largest.
const TOKEN_ID_MAX: u32 = 1 << 24;

/// The reason why a tokenizer is unusable. It stops the job before it starts.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    #[error(
        "`{}` holds no tokenizer: neither `tokenizer.json` nor `tokenizer.model`, `tekken.json` or a vocabulary of tiktoken",
        .0.display()
    )]
    Missing(PathBuf),
    /// The tokenizer exists in a format that is not read.
    #[error("`{}` {what}", dir.display())]
    OtherFormat { dir: PathBuf, what: String },
    #[error("cannot read `{}`: {source}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("`{}` is not a usable tokenizer: {why}", path.display())]
    Broken { path: PathBuf, why: String },
}

impl TokenizerError {
    /// Whether the folder has no tokenizer in a format that is read.
    pub fn is_missing(&self) -> bool {
        use TokenizerError::{Missing, OtherFormat};
        matches!(self, Missing(_) | OtherFormat { .. })
    }
}

/// An added token: a text that becomes one token wherever it occurs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AddedToken {
    pub id: u32,
    pub content: String,
    /// Whether this is a control token, which never appears in a completion's text.
    pub special: bool,
    /// Whether it matches only between non-word characters.
    pub single_word: bool,
    /// Whether the match includes white space on its left (`rstrip`: on its right).
    pub lstrip: bool,
    pub rstrip: bool,
    /// Whether it matches in the normalized text rather than in the original text.
    pub normalized: bool,
}

/// A loaded tokenizer. It encodes prompts, decodes completions, and knows every token's bytes.
pub struct Tokenizer {
    /// The tokenizer as transformers uses it.
    full: HfTokenizer,
    /// Like `full`, without added tokens. Puts the same prefix before a text.
    first_piece: HfTokenizer,
    /// Like `first_piece`, for text after the first piece. `None` where the two are equal.
    later_piece: Option<HfTokenizer>,
    /// Without added tokens and without any prefix. `None` where `first_piece` has no prefix.
    plain: Option<HfTokenizer>,
    bytes: bytes::TokenBytes,
    /// Whether each token id is a control token.
    special: Vec<bool>,
    added: Vec<AddedToken>,
    /// Whether the tokenizer puts a space mark before a text, as SentencePiece does.
    prefixes_space: bool,
    /// Id of the unknown token, the only special token that plain text may yield.
    unknown_id: Option<u32>,
    /// Encoders for long texts.
    stream_encoders: StreamEncoders,
    bounds: EncodeBounds,
    config: TokenizerConfig,
    hash: String,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size())
            .field("hash", &self.hash)
            .finish()
    }
}

impl Tokenizer {
    /// Reads `tokenizer.json` and its companions (`tokenizer_config.json`,
    /// `special_tokens_map.json`, `chat_template.jinja`, `additional_chat_templates/*.jinja`) from
    /// a checkpoint's folder. Without `tokenizer.json`, a tokenizer in another form.
    pub fn load(dir: &Path) -> Result<Tokenizer, TokenizerError> {
        let path = dir.join("tokenizer.json");
        if !path.exists() {
            let dir = dir.to_path_buf();
            return foreign::load(&dir)?.ok_or_else(|| match describe_other_format(&dir) {
                Some(what) => TokenizerError::OtherFormat { dir, what },
                None => TokenizerError::Missing(dir),
            });
        }
        let json = config::read_limited(&path, TOKENIZER_BYTES_MAX)?;
        let config = TokenizerConfig::load(dir)?;
        Tokenizer::build(&json, config).map_err(|why| TokenizerError::Broken { path, why })
    }

    /// Builds a tokenizer from the text of a `tokenizer.json` and, optionally, of a
    /// `tokenizer_config.json`.
    pub fn from_json(tokenizer: &str, tokenizer_config: Option<&str>) -> Result<Tokenizer, TokenizerError> {
        let broken = |file: &str, why: String| TokenizerError::Broken {
            path: PathBuf::from(file),
            why,
        };
        let config = match tokenizer_config {
            Some(text) => TokenizerConfig::parse(text).map_err(|why| broken("tokenizer_config.json", why))?,
            None => TokenizerConfig::default(),
        };
        Tokenizer::build(tokenizer.as_bytes(), config).map_err(|why| broken("tokenizer.json", why))
    }

    /// A small byte-level tokenizer, for tests and for benchmarks without a checkpoint.
    ///
    /// Ids 0 to 255 are the bytes. Then come the `words` and their prefixes, merged from left to
    /// right. The `specials` come last, and the last of them is the end-of-sequence token.
    pub fn from_words(words: &[&str], specials: &[&str]) -> Result<Tokenizer, TokenizerError> {
        let eos_token = specials.last().map(|token| token.to_string());
        Tokenizer::from_words_with(
            words,
            specials,
            TokenizerConfig {
                eos_token,
                ..Default::default()
            },
        )
    }

    /// Like [`Tokenizer::from_words`], with the given config.
    pub fn from_words_with(
        words: &[&str],
        specials: &[&str],
        config: TokenizerConfig,
    ) -> Result<Tokenizer, TokenizerError> {
        let mut vocab = byte_vocab();
        let mut merges = Vec::new();
        for word in words {
            let chars: Vec<String> = word.bytes().map(|byte| bytes::byte_char(byte).to_string()).collect();
            let Some((first, rest)) = chars.split_first() else {
                continue;
            };
            let mut sofar = first.clone();
            for next in rest {
                let joined = format!("{sofar}{next}");
                if !vocab.contains(&joined) {
                    merges.push((sofar.clone(), next.clone()));
                    vocab.push(joined.clone());
                }
                sofar = joined;
            }
        }
        Tokenizer::byte_level(&vocab, &merges, specials, config)
    }

    /// A byte-level tokenizer of `size` ids (at least 256), for benchmarks without a checkpoint.
    /// Encoding never yields ids above 255, since their texts cannot be merged.
    pub fn with_vocab_size(size: usize) -> Result<Tokenizer, TokenizerError> {
        let mut vocab = byte_vocab();
        vocab.extend((vocab.len()..size).map(|id| format!("w{id}")));
        Tokenizer::byte_level(&vocab, &[], &[], TokenizerConfig::default())
    }

    fn byte_level(
        vocab: &[String],
        merges: &[(String, String)],
        specials: &[&str],
        config: TokenizerConfig,
    ) -> Result<Tokenizer, TokenizerError> {
        let broken = |why: String| TokenizerError::Broken {
            path: PathBuf::from("tokenizer.json"),
            why,
        };
        let added = specials.iter().zip(vocab.len()..).map(|(content, id)| {
            json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                   "normalized": false, "special": true})
        });
        let json = json!({
            "version": "1.0",
            "added_tokens": added.collect::<Vec<_>>(),
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false},
            "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false},
            "model": {
                "type": "BPE",
                "vocab": vocab.iter().zip(0u32..).collect::<HashMap<_, _>>(),
                "merges": merges,
            },
        })
        .to_string();
        Tokenizer::build(json.as_bytes(), config).map_err(broken)
    }

    fn build(json: &[u8], config: TokenizerConfig) -> Result<Tokenizer, String> {
        let declared = RawTokenizerFile::read(json)?;
        let mut full = guarded("it", || HfTokenizer::from_bytes(json))?;
        // Truncation and padding would change prompts unasked.
        full.with_truncation(None).map_err(|e| e.to_string())?;
        full.with_padding(None);
        declared.check_added_ids(&full)?;
        check_prefix_chains(&full)?;
        add_missing(&mut full, &config)?;
        follow_bos_eos_flags(&mut full, &config)?;
        if let Some(processor) = full.get_post_processor() {
            check_post_processor(&serde_json::to_value(processor).map_err(|e| e.to_string())?)?;
        }

        let added = added_tokens(&full, &config);
        let bytes = bytes::TokenBytes::new(&full, &added, TOKEN_ID_MAX)?;
        let mut special = vec![false; bytes.len()];
        for token in added.iter().filter(|token| token.special) {
            special[token.id as usize] = true;
        }

        let mut first_piece = full.clone();
        first_piece.with_added_vocabulary(AddedVocabulary::new());
        let later_piece = without_prefix(&first_piece, StripPrefix::FirstOnly)?;
        let plain = without_prefix(&first_piece, StripPrefix::All)?;
        let prefixes_space = puts_space_in_front(&first_piece)?;
        let unknown_text = declared.model.unk_token.as_ref().or(config.unk_token.as_ref());
        let unknown_id = declared.model.unk_id.or_else(|| full.token_to_id(unknown_text?));
        let hash = HEXLOWER.encode(&Sha256::digest(json));
        let tokenizer = Tokenizer {
            full,
            first_piece,
            later_piece,
            plain,
            bytes,
            special,
            added,
            prefixes_space,
            unknown_id,
            stream_encoders: StreamEncoders::default(),
            bounds: declared.bounds()?,
            config,
            hash,
        };
        // Some models fail at characters outside their vocabulary if they have no unknown token.
        // Some post-processors fail at any text. Both are detected now.
        for add_special in [false, true] {
            tokenizer
                .encode("a\u{10FFFD}", add_special)
                .map_err(|why| format!("it cannot encode every text: {why}"))?;
        }
        fit::check(&tokenizer)?;
        Ok(tokenizer)
    }

    /// Number of token ids (ids `0..vocab_size()`). A model's padded vocabulary may be larger.
    pub fn vocab_size(&self) -> usize {
        self.bytes.len()
    }

    /// Warnings if it has far fewer tokens than the model in `dir`, whose vocabulary has `vocabulary` ids, or others than a GGUF
    /// file says: texts would be cut into other tokens than those that the model has learned. Vocabularies are padded by less than
    /// that.
    pub fn warnings(&self, dir: &Path, vocabulary: usize) -> Vec<String> {
        let own = self.vocab_size();
        let has_few = (own < vocabulary / 4 * 3).then(|| {
            format!(
                "`{}`: the tokenizer has {own} tokens, and the model {vocabulary}: it may be another model's, and answers wrong",
                dir.display()
            )
        });
        has_few.into_iter().chain(foreign::gguf_warning(dir)).collect()
    }

    /// The bytes that a token adds to a text when it is decoded after other tokens.
    ///
    /// Empty for special tokens, for ids that the vocabulary skips, and for ids beyond it.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.bytes.get(id)
    }

    /// Ids below [`vocab_size`](Self::vocab_size) without a token, ascending.
    pub fn unused_ids(&self) -> &[u32] {
        self.bytes.unused_ids()
    }

    /// Whether the tokenizer puts a space before a text (SentencePiece's `▁`). Answers then begin
    /// with a space, too.
    pub fn prefixes_space(&self) -> bool {
        self.prefixes_space
    }

    /// Whether `id` is a special (control) token, which never appears in a completion's text.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }

    /// Ids of the special tokens, ascending.
    pub fn special_ids(&self) -> Vec<u32> {
        (0u32..)
            .zip(&self.special)
            .filter(|(_, special)| **special)
            .map(|(id, _)| id)
            .collect()
    }

    /// All added tokens, special or not, by ascending id.
    pub fn added_tokens(&self) -> &[AddedToken] {
        &self.added
    }

    /// The id of a token by its text in the vocabulary (such as `<|im_end|>`). Vocabularies that
    /// write a space as `▁` or `Ġ` need that mark in `token`.
    pub fn id_of(&self, token: &str) -> Option<u32> {
        self.full.token_to_id(token)
    }

    /// The id of the end-of-sequence token that `tokenizer_config.json` names.
    pub fn eos_id(&self) -> Option<u32> {
        self.id_of(self.config.eos_token.as_deref()?)
    }

    /// Settings from `tokenizer_config.json` and its companion files.
    pub fn config(&self) -> &TokenizerConfig {
        &self.config
    }

    /// SHA-256 of the tokenizer's file, in hexadecimal.
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// The ids of the special tokens that the tokenizer puts before and after a whole prompt.
    pub fn surrounding_ids(&self) -> Result<(Vec<u32>, Vec<u32>), String> {
        let bare = encode_with(&self.full, "a", false)?;
        let whole = encode_with(&self.full, "a", true)?;
        let at = whole
            .windows(bare.len().max(1))
            .position(|window| window == bare)
            .unwrap_or(whole.len());
        Ok((
            whole[..at].to_vec(),
            whole[(at + bare.len()).min(whole.len())..].to_vec(),
        ))
    }

    /// Decodes a whole completion into the text that it adds to its prompt, without special tokens.
    ///
    /// A leading space is kept. Invalid UTF-8 becomes U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> String {
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| self.token_bytes(id)).copied().collect();
        match String::from_utf8(bytes) {
            Ok(text) => text,
            Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
        }
    }
}

/// The 256 bytes, each as the character that stands for it in byte-level vocabularies.
fn byte_vocab() -> Vec<String> {
    (0..=255).map(|byte| bytes::byte_char(byte).to_string()).collect()
}

/// Adds the tokens of `added_tokens_decoder` that `tokenizer.json` lacks, and registers special
/// tokens of the vocabulary, so that they are recognised in text. Transformers does the same.
fn add_missing(full: &mut HfTokenizer, config: &TokenizerConfig) -> Result<(), String> {
    let known = full.get_added_vocabulary().get_vocab();
    let missing: Vec<_> = config
        .added_tokens
        .iter()
        .filter(|token| !known.contains_key(&token.content))
        .collect();
    let added = missing.iter().map(|token| {
        HfAddedToken::from(token.content.clone(), token.special)
            .single_word(token.single_word)
            .lstrip(token.lstrip)
            .rstrip(token.rstrip)
            .normalized(token.normalized)
    });
    // One call for all tokens, since each call rebuilds the library's tables.
    full.add_tokens(added.collect::<Vec<_>>()).map_err(|e| e.to_string())?;
    for token in missing {
        if full.token_to_id(&token.content) != Some(token.id) {
            return Err(format!(
                "`tokenizer_config.json` adds the token `{}` as id {}, which is not the next free one",
                token.content, token.id
            ));
        }
    }
    for token in config.named_specials() {
        let known = full.get_added_vocabulary().get_vocab().contains_key(token);
        if !known && full.token_to_id(token).is_some() {
            full.add_special_tokens([HfAddedToken::from(token, true)])
                .map_err(|e| e.to_string())?;
        }
    }
    Ok(())
}

/// If `tokenizer_config.json` has `add_bos_token` or `add_eos_token`, these flags replace the
/// post-processor (as in transformers 5).
fn follow_bos_eos_flags(full: &mut HfTokenizer, config: &TokenizerConfig) -> Result<(), String> {
    if config.add_bos_token.is_none() && config.add_eos_token.is_none() {
        return Ok(());
    }
    let token_if = |is_enabled: Option<bool>, token: &Option<String>| -> Option<(String, u32)> {
        let token = token.clone().filter(|_| is_enabled == Some(true))?;
        let id = full.token_to_id(&token)?;
        Some((token, id))
    };
    let bos = token_if(config.add_bos_token, &config.bos_token);
    let eos = token_if(config.add_eos_token, &config.eos_token);
    let text = |id: &str| json!({"Sequence": {"id": id, "type_id": 0}});
    let token = |(token, _): &(String, u32)| json!({"SpecialToken": {"id": token, "type_id": 0}});
    let single: Vec<Value> = bos
        .iter()
        .map(token)
        .chain([text("A")])
        .chain(eos.iter().map(token))
        .collect();
    let specials: serde_json::Map<String, Value> = bos
        .into_iter()
        .chain(eos)
        .map(|(token, id)| (token.clone(), json!({"id": token, "ids": [id], "tokens": [token]})))
        .collect();
    let processor: PostProcessorWrapper = serde_json::from_value(json!({
        "type": "TemplateProcessing", "single": single, "pair": [text("A"), text("B")], "special_tokens": specials,
    }))
    .map_err(|e| e.to_string())?;
    full.with_post_processor(Some(processor));
    Ok(())
}

/// The added tokens by ascending id. Tokens that the config names (`eos_token`, …) are special.
fn added_tokens(full: &HfTokenizer, config: &TokenizerConfig) -> Vec<AddedToken> {
    let named: BTreeSet<u32> = config
        .named_specials()
        .filter_map(|token| full.token_to_id(token))
        .collect();
    let mut added: Vec<AddedToken> = full
        .get_added_vocabulary()
        .get_added_tokens_decoder()
        .iter()
        .map(|(id, token)| AddedToken {
            id: *id,
            content: token.content.clone(),
            special: token.special || named.contains(id),
            single_word: token.single_word,
            lstrip: token.lstrip,
            rstrip: token.rstrip,
            normalized: token.normalized,
        })
        .collect();
    added.sort_by_key(|token| token.id);
    added
}

/// Puts an error text on one line. The library's errors may span lines, but a row's or job's error
/// is one line.
pub(crate) fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
pub(crate) mod tests;
#[cfg(test)]
pub(crate) use bytes::byte_char;
