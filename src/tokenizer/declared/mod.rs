//! Checks a `tokenizer.json` before the library reads it. Limits on its sizes bound the time and
//! memory of loading it, and of encoding texts with it.

mod expressions;
mod sizes;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;
use tokenizers::ModelWrapper;

use super::encode::{EncodeBounds, MODEL_INPUT_BYTES_MAX};
use super::one_line;
use super::shared::HfTokenizer;
use super::stream::{STRETCH_BYTES_MAX, flatten};
use expressions::check_expressions;
use sizes::Sizes;

/// Maximum number of added tokens, maximum length of one, and maximum total length, in bytes.
const ADDED_TOKENS_MAX: usize = 1 << 18;
const ADDED_TOKEN_BYTES_MAX: usize = 512;
const ADDED_TOKENS_BYTES_MAX: usize = 4 << 20;
/// Maximum number of steps of a normalizer or pre-tokenizer.
const STEPS_MAX: usize = 64;
/// Maximum output bytes of normalizer and pre-tokenizer together per input byte.
const GROWTH_MAX: usize = 512;
/// Maximum length of a word that a WordPiece model splits. The model looks up each prefix of each
/// remainder in its vocabulary, so the lookups grow with the square of this length.
const WORD_CHARS_MAX: u64 = 200;
/// Maximum total bytes of a chain of Unigram tokens, each of which is a prefix of the next.
const PREFIX_CHAIN_BYTES_MAX: usize = 32 << 10;
/// Maximum BPE dropout. With a larger dropout, BPE mostly retries merges that it has dropped.
const DROPOUT_MAX: f64 = 0.5;

/// Parts of the file that the library does not expose.
#[derive(serde::Deserialize)]
#[serde(rename = "Declared")]
pub(super) struct RawTokenizerFile {
    #[serde(default)]
    added_tokens: Vec<RawAddedToken>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    decoder: Value,
    pub(super) model: RawTokenizerModel,
}

#[derive(serde::Deserialize)]
#[serde(rename = "DeclaredToken")]
struct RawAddedToken {
    id: u32,
    content: String,
}

#[derive(serde::Deserialize)]
#[serde(rename = "DeclaredModel")]
pub(super) struct RawTokenizerModel {
    #[serde(default)]
    pub(super) unk_token: Option<String>,
    #[serde(default)]
    pub(super) unk_id: Option<u32>,
    #[serde(default)]
    max_input_chars_per_word: Option<u64>,
    #[serde(default)]
    dropout: Option<f64>,
}

impl RawTokenizerFile {
    /// Reads and checks the file. The sizes are checked first, to bound memory.
    pub(super) fn read(json: &[u8]) -> Result<RawTokenizerFile, String> {
        let sizes: Sizes = serde_json::from_slice(json).map_err(|e| one_line(&e.to_string()))?;
        sizes.check()?;
        let declared: RawTokenizerFile = serde_json::from_slice(json).map_err(|e| one_line(&e.to_string()))?;
        declared.check()?;
        Ok(declared)
    }

    fn check(&self) -> Result<(), String> {
        check_max("added tokens", self.added_tokens.len(), ADDED_TOKENS_MAX)?;
        let lengths = || self.added_tokens.iter().map(|token| token.content.len());
        check_max(
            "bytes in an added token",
            lengths().max().unwrap_or(0),
            ADDED_TOKEN_BYTES_MAX,
        )?;
        check_max("bytes in its added tokens", lengths().sum(), ADDED_TOKENS_BYTES_MAX)?;
        if let Some(chars) = self
            .model
            .max_input_chars_per_word
            .filter(|chars| *chars > WORD_CHARS_MAX)
        {
            return Err(format!(
                "its `max_input_chars_per_word` is {chars}, more than {WORD_CHARS_MAX}"
            ));
        }
        if let Some(dropout) = self.model.dropout.filter(|dropout| *dropout > DROPOUT_MAX) {
            return Err(format!("its `dropout` is {dropout}, more than {DROPOUT_MAX}"));
        }
        let growth = self.normalizer_growth()?.saturating_mul(self.pre_tokenizer_growth()?);
        check_max(
            "output bytes of its normalizer and pre-tokenizer for one input byte",
            growth,
            GROWTH_MAX,
        )?;
        check_expressions(&[&self.normalizer, &self.pre_tokenizer, &self.decoder])
    }

    /// Maximum output bytes of the normalizer per input byte.
    fn normalizer_growth(&self) -> Result<usize, String> {
        let mut steps = Vec::new();
        flatten(&self.normalizer, "normalizers", &mut steps);
        check_max("steps in its normalizer", steps.len(), STEPS_MAX)?;
        let growth = |step: &Value| match step["type"].as_str() {
            Some("NFKC" | "NFKD") => 11,
            Some("NFC" | "NFD" | "BertNormalizer") => 3,
            Some("Lowercase" | "ByteLevel") => 2,
            Some("Replace") => {
                let content = step["content"].as_str().map_or(0, str::len);
                let pattern = step["pattern"]["String"].as_str().map_or(1, str::len);
                content.div_ceil(pattern.max(1)).max(1)
            }
            Some("Prepend") => 1 + step["prepend"].as_str().map_or(0, str::len) / 4,
            Some("Precompiled") => step["precompiled_charsmap"].as_str().map_or(1, charsmap_growth),
            _ => 1,
        };
        Ok(steps.into_iter().map(growth).fold(1, usize::saturating_mul))
    }

    fn pre_tokenizer_growth(&self) -> Result<usize, String> {
        let mut steps = Vec::new();
        flatten(&self.pre_tokenizer, "pretokenizers", &mut steps);
        check_max("steps in its pre-tokenizer", steps.len(), STEPS_MAX)?;
        let growth = |step: &Value| match step["type"].as_str() {
            Some("Metaspace") => 3,
            Some("ByteLevel") => 2,
            _ => 1,
        };
        Ok(steps.into_iter().map(growth).fold(1, usize::saturating_mul))
    }

    /// Limits for texts that are encoded at once.
    pub(super) fn bounds(&self) -> Result<EncodeBounds, String> {
        let pre_tokenizer_growth = self.pre_tokenizer_growth()?;
        let growth = self.normalizer_growth()?.saturating_mul(pre_tokenizer_growth);
        Ok(EncodeBounds {
            whole_bytes_max: (MODEL_INPUT_BYTES_MAX / growth).clamp(1, STRETCH_BYTES_MAX),
            pre_tokenizer_growth,
        })
    }

    /// Refuses a file whose added tokens get other ids from the library than the file says. The
    /// library assigns these ids itself.
    pub(super) fn check_added_ids(&self, full: &HfTokenizer) -> Result<(), String> {
        for RawAddedToken { id, content } in &self.added_tokens {
            match full.token_to_id(content) {
                Some(actual) if actual == *id => {}
                Some(actual) => {
                    return Err(format!(
                        "its added token `{content}` declares the id {id}, but has the id {actual}"
                    ));
                }
                None => return Err(format!("its added token `{content}` cannot be added")),
            }
        }
        Ok(())
    }
}
/// Refuses post-processor templates that name an undefined special token, since the library would
/// panic when it encodes a text.
pub(super) fn check_post_processor(processor: &Value) -> Result<(), String> {
    for part in processor["processors"].as_array().into_iter().flatten() {
        check_post_processor(part)?;
    }
    if processor["type"] != "TemplateProcessing" {
        return Ok(());
    }
    let pieces = ["single", "pair"].map(|name| processor[name].as_array());
    for piece in pieces.into_iter().flatten().flatten() {
        let Some(id) = piece["SpecialToken"]["id"].as_str() else {
            continue;
        };
        let token = &processor["special_tokens"][id];
        let count = |list: &str| token[list].as_array().map(Vec::len);
        if count("ids").is_none() || count("ids") != count("tokens") {
            return Err(format!(
                "its post-processor puts the special token `{id}` around texts, but does not define it"
            ));
        }
    }
    Ok(())
}

fn check_max(what: &str, count: usize, limit: usize) -> Result<(), String> {
    if count > limit {
        Err(format!("{what}: {count}, more than {limit}"))
    } else {
        Ok(())
    }
}

/// Refuses a Unigram vocabulary with a long chain of tokens, each of which is a prefix of the next.
/// At each position of a text the model visits, and copies, every token that begins there.
pub(super) fn check_prefix_chains(full: &HfTokenizer) -> Result<(), String> {
    if !matches!(&**full.get_model(), ModelWrapper::Unigram(_)) {
        return Ok(());
    }
    let mut texts: Vec<String> = full.get_vocab(false).into_keys().collect();
    texts.sort_unstable();
    let mut chain: Vec<&str> = Vec::new();
    let mut bytes = 0;
    for text in &texts {
        while let Some(prefix) = chain.pop_if(|prefix| !text.starts_with(*prefix)) {
            bytes -= prefix.len();
        }
        chain.push(text);
        bytes += text.len();
        check_max(
            "bytes in vocabulary tokens that are prefixes of other tokens",
            bytes,
            PREFIX_CHAIN_BYTES_MAX,
        )?;
    }
    Ok(())
}

/// The growth factor of SentencePiece's table of character replacements: the length of its longest
/// replacement, divided by three bytes, rounded up.
fn charsmap_growth(table: &str) -> usize {
    let Ok(table) = STANDARD.decode(table) else { return 1 };
    let trie = table.first_chunk().map_or(0, |size| u32::from_le_bytes(*size) as usize);
    let texts = table.get(trie.saturating_add(4)..).unwrap_or_default();
    let longest = texts.split(|byte| *byte == 0).map(<[u8]>::len).max();
    longest.unwrap_or(0).div_ceil(3).max(1)
}
