//! `tekken.json`, the tokenizer of Mistral's own library.

use std::collections::HashSet;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde::de::IgnoredAny;

use super::{Converted, SpecialNames, of_ranks};
use crate::tokenizer::one_line;

/// Versions of the file. Later ones differ in chat formats, which templates say.
const VERSIONS: [&str; 7] = ["v1", "v2", "v3", "v7", "v11", "v13", "v15"];
/// The last version whose files may leave out their special tokens.
const LAST_WITHOUT_SPECIALS: usize = 3;
/// Maximum number of special tokens.
const SPECIALS_MAX: usize = 1 << 16;

/// Special tokens of files that list none.
const SPECIALS: [&str; 20] = [
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    config: Config,
    vocab: Vec<Token>,
    #[serde(default)]
    special_tokens: Option<Vec<SpecialToken>>,
    // How images and audio become tokens, and what a chat's settings may be: no part of a text's tokens.
    #[serde(default, rename = "image")]
    _image: IgnoredAny,
    #[serde(default, rename = "multimodal")]
    _multimodal: IgnoredAny,
    #[serde(default, rename = "audio")]
    _audio: IgnoredAny,
    #[serde(default, rename = "model_settings_builder")]
    _model_settings_builder: IgnoredAny,
    #[serde(default, rename = "version")]
    _version: IgnoredAny,
    #[serde(default, rename = "type")]
    _kind: IgnoredAny,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    pattern: String,
    default_vocab_size: usize,
    default_num_special_tokens: usize,
    version: String,
    #[serde(default, rename = "num_vocab_tokens")]
    _num_vocab_tokens: IgnoredAny,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Token {
    rank: u32,
    token_bytes: String,
    #[serde(default, rename = "token_str")]
    _token_str: IgnoredAny,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SpecialToken {
    rank: u32,
    token_str: String,
    is_control: bool,
}

/// Ids of special tokens come first; a token's id is its rank behind them.
pub(super) fn convert(bytes: &[u8]) -> Result<Converted, String> {
    let file: File = serde_json::from_slice(bytes).map_err(|e| one_line(&e.to_string()))?;
    let Config {
        pattern,
        default_vocab_size: size,
        default_num_special_tokens: special_count,
        ..
    } = &file.config;
    let specials = specials(&file)?;
    let count = size
        .checked_sub(*special_count)
        .filter(|count| *count <= file.vocab.len())
        .ok_or_else(|| {
            format!(
                "its `default_vocab_size` of {size} is not its {special_count} special tokens and at most {} others",
                file.vocab.len()
            )
        })?;
    let mut ranks = Vec::with_capacity(count);
    for (number, token) in (0..).zip(&file.vocab[..count]) {
        if token.rank != number {
            return Err(format!("its token {number} has the rank {}", token.rank));
        }
        let bytes = STANDARD.decode(&token.token_bytes);
        let bytes = bytes.map_err(|_| format!("the bytes of its token {number} are not in Base64"))?;
        ranks.push((bytes, number + *special_count as u32));
    }
    let named = |name: &str| {
        specials
            .iter()
            .find(|(text, _)| text == name)
            .map(|(text, _)| text.clone())
    };
    Ok(Converted {
        json: of_ranks(&ranks, pattern, &specials)?,
        names: SpecialNames {
            bos: named("<s>"),
            eos: named("</s>"),
            unk: named("<unk>"),
            pad: named("<pad>"),
        },
    })
}

/// The special tokens and their ids. Ids that the file gives no token have one that says its number.
fn specials(file: &File) -> Result<Vec<(String, u32)>, String> {
    let Config {
        version,
        default_num_special_tokens: count,
        ..
    } = &file.config;
    let Some(number) = VERSIONS.iter().position(|known| known == version) else {
        return Err(format!(
            "its version `{version}` is not known; {} are",
            VERSIONS.join(", ")
        ));
    };
    if *count > SPECIALS_MAX {
        return Err(format!("it has {count} special tokens, more than {SPECIALS_MAX}"));
    }
    let mut specials: Vec<(String, u32)> = match &file.special_tokens {
        Some(list) => {
            if let Some(token) = list.iter().find(|token| !token.is_control) {
                return Err(format!(
                    "its special token `{}` is text (`is_control` is false), which is not supported",
                    token.token_str
                ));
            }
            list.iter().map(|token| (token.token_str.clone(), token.rank)).collect()
        }
        None if number <= LAST_WITHOUT_SPECIALS => SPECIALS.map(String::from).into_iter().zip(0..).collect(),
        None => return Err(format!("it is of version `{version}` and lists no `special_tokens`")),
    };
    specials.sort_by_key(|(_, rank)| *rank);
    let (mut texts, mut next) = (HashSet::new(), 0);
    for (text, rank) in &specials {
        if *rank != next || !texts.insert(text) {
            return Err(format!(
                "its special token `{text}` has the rank {rank}, and {next} is the next"
            ));
        }
        next += 1;
    }
    if specials.len() > *count {
        return Err(format!(
            "it lists {} special tokens, and `default_num_special_tokens` is {count}",
            specials.len()
        ));
    }
    specials.extend((next..*count as u32).map(|id| (format!("<SPECIAL_{id}>"), id)));
    Ok(specials)
}
