//! Settings from `tokenizer_config.json` and its companion files: named special tokens, flags and
//! chat templates.

use std::io::Read;
use std::path::Path;

use serde_json::Value;

use super::foreign::gguf_config;
use super::{AddedToken, TokenizerError};
use crate::python_json;

/// Maximum size of a companion file in bytes.
const CONFIG_BYTES_MAX: u64 = 32 << 20;
/// Maximum number of chat templates of a checkpoint.
const TEMPLATES_MAX: usize = 64;

/// A chat template of the checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChatTemplateSource {
    /// `default`, or the template's name if the checkpoint has several.
    pub name: String,
    pub source: String,
}

/// The parts of `tokenizer_config.json` that prompts need.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TokenizerConfig {
    pub bos_token: Option<String>,
    pub eos_token: Option<String>,
    pub unk_token: Option<String>,
    pub pad_token: Option<String>,
    /// Special tokens without a role (`additional_special_tokens`, `extra_special_tokens`).
    pub more_special_tokens: Vec<String>,
    /// `None` where the file has no such flag.
    pub add_bos_token: Option<bool>,
    pub add_eos_token: Option<bool>,
    /// The class that transformers reads the tokenizer with.
    pub tokenizer_class: Option<String>,
    /// Whether text behind a special token begins with a space mark (of SentencePiece's models alone).
    pub legacy: Option<bool>,
    /// Tokens of `added_tokens_decoder`, by ascending id.
    pub added_tokens: Vec<AddedToken>,
    pub chat_templates: Vec<ChatTemplateSource>,
}

impl TokenizerConfig {
    /// Reads the companion files of `tokenizer.json` that exist in `dir`, or the metadata of a GGUF model without
    /// such a file.
    ///
    /// A `chat_template.jinja` file replaces the template in `tokenizer_config.json`, as in
    /// transformers.
    pub fn load(dir: &Path) -> Result<TokenizerConfig, TokenizerError> {
        if let Some(config) = gguf_config(dir)? {
            return Ok(config);
        }
        let path = dir.join("tokenizer_config.json");
        let mut config = if path.exists() {
            let text = read_text(&path)?;
            TokenizerConfig::parse(&text).map_err(|why| TokenizerError::Broken { path, why })?
        } else {
            TokenizerConfig::default()
        };
        let path = dir.join("special_tokens_map.json");
        if path.exists() {
            let text = read_text(&path)?;
            let map: Value = python_json::from_slice(text.as_bytes()).map_err(|e| TokenizerError::Broken {
                path,
                why: format!("not JSON: {e}"),
            })?;
            config.fill_from_map(&map);
        }
        let path = dir.join("chat_template.jinja");
        if path.exists() {
            config.set_template("default", read_text(&path)?);
        }
        let folder = dir.join("additional_chat_templates");
        if folder.is_dir() {
            let read = |source| TokenizerError::Read {
                path: folder.clone(),
                source,
            };
            let mut files = Vec::new();
            for entry in std::fs::read_dir(&folder).map_err(read)? {
                files.push(entry.map_err(read)?.path());
            }
            files.retain(|file| file.extension().is_some_and(|e| e == "jinja"));
            files.sort();
            for file in files.iter().take(TEMPLATES_MAX) {
                let name = file
                    .file_stem()
                    .map(|stem| stem.to_string_lossy().into_owned())
                    .unwrap_or_default();
                config.set_template(&name, read_text(file)?);
            }
        }
        Ok(config)
    }

    /// Parses the text of a `tokenizer_config.json`.
    pub fn parse(text: &str) -> Result<TokenizerConfig, String> {
        let value: Value = python_json::from_slice(text.as_bytes()).map_err(|e| format!("not JSON: {e}"))?;
        let Value::Object(map) = &value else {
            return Err("not a JSON object".into());
        };
        let mut config = TokenizerConfig {
            add_bos_token: map.get("add_bos_token").and_then(Value::as_bool),
            add_eos_token: map.get("add_eos_token").and_then(Value::as_bool),
            tokenizer_class: map.get("tokenizer_class").and_then(Value::as_str).map(String::from),
            legacy: map.get("legacy").and_then(Value::as_bool),
            ..Default::default()
        };
        config.fill_from_map(&value);
        for (id, token) in map
            .get("added_tokens_decoder")
            .and_then(Value::as_object)
            .into_iter()
            .flatten()
        {
            let id: u32 = id
                .parse()
                .map_err(|_| format!("`added_tokens_decoder` has the key `{id}`, not an id"))?;
            let flag = |name: &str| token.get(name).and_then(Value::as_bool).unwrap_or(false);
            let content = token_text(token).ok_or_else(|| format!("added token {id} has no `content`"))?;
            config.added_tokens.push(AddedToken {
                id,
                content,
                special: flag("special"),
                single_word: flag("single_word"),
                lstrip: flag("lstrip"),
                rstrip: flag("rstrip"),
                normalized: flag("normalized"),
            });
        }
        config.added_tokens.sort_by_key(|token| token.id);
        match map.get("chat_template") {
            None | Some(Value::Null) => {}
            Some(Value::String(source)) => config.set_template("default", source.clone()),
            Some(Value::Array(list)) => {
                for entry in list.iter().take(TEMPLATES_MAX) {
                    let (Some(name), Some(source)) = (entry["name"].as_str(), entry["template"].as_str()) else {
                        return Err("`chat_template` is a list with an entry that lacks `name` or `template`".into());
                    };
                    config.set_template(name, source.to_string());
                }
            }
            Some(_) => return Err("`chat_template` is neither a text nor a list of named templates".into()),
        }
        Ok(config)
    }

    /// The chat template of this name.
    pub fn chat_template(&self, name: &str) -> Option<&str> {
        self.chat_templates
            .iter()
            .find(|t| t.name == name)
            .map(|t| t.source.as_str())
    }

    /// All tokens that the files name as special.
    pub(super) fn named_specials(&self) -> impl Iterator<Item = &str> {
        let roles = [&self.bos_token, &self.eos_token, &self.unk_token, &self.pad_token];
        roles
            .into_iter()
            .filter_map(|t| t.as_deref())
            .chain(self.more_special_tokens.iter().map(String::as_str))
    }

    /// Fills empty roles from a map of role to token.
    fn fill_from_map(&mut self, map: &Value) {
        let roles = [
            ("bos_token", &mut self.bos_token),
            ("eos_token", &mut self.eos_token),
            ("unk_token", &mut self.unk_token),
            ("pad_token", &mut self.pad_token),
        ];
        for (name, slot) in roles {
            if slot.is_none() {
                *slot = map.get(name).and_then(token_text);
            }
        }
        for name in ["additional_special_tokens", "extra_special_tokens"] {
            let more: Vec<String> = match map.get(name) {
                Some(Value::Array(list)) => list.iter().filter_map(token_text).collect(),
                Some(Value::Object(named)) => named.values().filter_map(token_text).collect(),
                _ => Vec::new(),
            };
            for token in more {
                if !self.more_special_tokens.contains(&token) {
                    self.more_special_tokens.push(token);
                }
            }
        }
    }

    pub(super) fn set_template(&mut self, name: &str, source: String) {
        match self.chat_templates.iter_mut().find(|t| t.name == name) {
            Some(known) => known.source = source,
            None => self.chat_templates.push(ChatTemplateSource {
                name: name.to_string(),
                source,
            }),
        }
    }
}

/// A token's text: a string, or an object with `content`.
fn token_text(value: &Value) -> Option<String> {
    let text = value
        .as_str()
        .or_else(|| value.get("content").and_then(Value::as_str))?;
    (!text.is_empty()).then(|| text.to_string())
}

/// Reads a file of at most `limit` bytes.
pub(super) fn read_limited(path: &Path, limit: u64) -> Result<Vec<u8>, TokenizerError> {
    let read = |source| TokenizerError::Read {
        path: path.to_path_buf(),
        source,
    };
    let too_large = || TokenizerError::Broken {
        path: path.to_path_buf(),
        why: format!("it is larger than {} MB", limit >> 20),
    };
    let (file, size) = crate::regular::open(path).map_err(read)?;
    if size > limit {
        return Err(too_large());
    }
    let mut bytes = Vec::new();
    file.take(limit + 1).read_to_end(&mut bytes).map_err(read)?;
    if bytes.len() as u64 > limit {
        Err(too_large())
    } else {
        Ok(bytes)
    }
}

fn read_text(path: &Path) -> Result<String, TokenizerError> {
    String::from_utf8(read_limited(path, CONFIG_BYTES_MAX)?).map_err(|_| TokenizerError::Broken {
        path: path.to_path_buf(),
        why: "not UTF-8".into(),
    })
}
