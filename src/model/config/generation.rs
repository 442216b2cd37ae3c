//! `generation_config.json`: the sampling that the checkpoint's authors recommend.
//!
//! The same keys apply as in vLLM (`--generation-config auto`), whatever `do_sample` says:
//! temperature, top-k, top-p, min-p, repetition penalty and `max_new_tokens`. Keys that decide
//! which tokens may be drawn and where a completion ends apply, too. Every other key is refused,
//! known not to change answers, or reported as unknown. Without `generation_config.json` the same
//! keys are read from `config.json`, where old checkpoints have them (as in transformers and vLLM).

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::reader::{Reader, read_json, short};
use crate::model::error::ModelError;
use crate::model::gguf;

const GENERATION_CONFIG: &str = "generation_config.json";
/// Read in old checkpoints without `generation_config.json`.
const CONFIG: &str = "config.json";
/// What the metadata of a GGUF file are called in messages.
const GGUF: &str = "GGUF metadata";
/// Maximum of `max_new_tokens` and other token counts: more than any model's context.
const TOKENS_MAX: u64 = 1 << 20;

/// Where a checkpoint recommends its sampling.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Origin {
    #[default]
    GenerationConfig,
    /// `config.json`, of old checkpoints.
    Config,
    /// The metadata of a GGUF file.
    Gguf,
}

/// A checkpoint's recommended sampling, checked. `None` fields are not set in the file.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GenerationDefaults {
    pub origin: Origin,
    pub temperature: Option<f32>,
    pub top_k: Option<u32>,
    pub top_p: Option<f32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
    pub max_new_tokens: Option<u32>,
    /// Strings that end a completion.
    pub stop_strings: Vec<String>,
    /// `suppress_tokens`, and the single-token words of `bad_words_ids`.
    pub suppress_tokens: Vec<u32>,
    pub begin_suppress_tokens: Vec<u32>,
    pub min_new_tokens: u32,
    pub min_length: u32,
    /// Whether the file says `do_sample: false`.
    pub is_greedy: bool,
    /// Unknown keys.
    pub unknown: Vec<String>,
}

/// The unchecked sampling keys of a checkpoint.
#[derive(Debug)]
pub struct GenerationFile {
    path: PathBuf,
    origin: Origin,
    map: Map<String, Value>,
}

/// The values with which a key has no effect, besides null, false and empty lists and objects.
enum NeutralSetting {
    /// No other value is neutral.
    Unset,
    Number(f64),
}

/// Keys whose values apply.
const APPLIED: [&str; 13] = [
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "max_new_tokens",
    "stop_strings",
    "suppress_tokens",
    "begin_suppress_tokens",
    "bad_words_ids",
    "min_new_tokens",
    "min_length",
    "do_sample",
];

/// Keys that would change answers and are not implemented. Values that are not neutral are refused.
const REFUSED: [(&str, NeutralSetting); 24] = [
    ("constraints", NeutralSetting::Unset),
    ("diversity_penalty", NeutralSetting::Number(0.0)),
    ("dola_layers", NeutralSetting::Unset),
    ("encoder_no_repeat_ngram_size", NeutralSetting::Number(0.0)),
    ("encoder_repetition_penalty", NeutralSetting::Number(1.0)),
    ("epsilon_cutoff", NeutralSetting::Number(0.0)),
    ("eta_cutoff", NeutralSetting::Number(0.0)),
    ("exponential_decay_length_penalty", NeutralSetting::Unset),
    ("force_words_ids", NeutralSetting::Unset),
    ("forced_bos_token_id", NeutralSetting::Unset),
    ("forced_decoder_ids", NeutralSetting::Unset),
    ("forced_eos_token_id", NeutralSetting::Unset),
    ("guidance_scale", NeutralSetting::Number(1.0)),
    ("max_time", NeutralSetting::Unset),
    ("no_repeat_ngram_size", NeutralSetting::Number(0.0)),
    ("num_beam_groups", NeutralSetting::Number(1.0)),
    ("num_beams", NeutralSetting::Number(1.0)),
    ("num_return_sequences", NeutralSetting::Number(1.0)),
    ("penalty_alpha", NeutralSetting::Number(0.0)),
    ("sequence_bias", NeutralSetting::Unset),
    ("token_healing", NeutralSetting::Unset),
    ("top_h", NeutralSetting::Unset),
    ("typical_p", NeutralSetting::Number(1.0)),
    ("watermarking_config", NeutralSetting::Unset),
];

/// Keys that change no answer here: token ids that are read elsewhere or only pad, caches, outputs,
/// assisted generation, and options of beam search. `max_length` counts the prompt as well; the job
/// sets the maximum length of completions.
const HARMLESS: [&str; 38] = [
    "_commit_hash",
    "_from_model_config",
    "assistant_confidence_threshold",
    "assistant_early_exit",
    "assistant_ensemble_weight",
    "assistant_lookbehind",
    "bos_token_id",
    "cache_config",
    "cache_implementation",
    "compile_config",
    "continuous_batching_config",
    "decoder_start_token_id",
    "disable_compile",
    "early_stopping",
    "eos_token_id",
    "is_assistant",
    "length_penalty",
    "low_memory",
    "max_cache_len",
    "max_length",
    "max_matching_ngram_size",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "output_attentions",
    "output_hidden_states",
    "output_logits",
    "output_scores",
    "pad_token_id",
    "prefill_chunk_size",
    "prompt_lookup_num_tokens",
    "remove_invalid_values",
    "renormalize_logits",
    "return_dict_in_generate",
    "speculation_type",
    "target_lookbehind",
    "transformers_version",
    "use_cache",
    "use_mtp",
];

impl GenerationFile {
    /// Reads `generation_config.json` in `dir`, or the metadata of a GGUF model. Without that file the same keys of `config.json`
    /// are read; its top-level keys take precedence over those of its `text_config`.
    ///
    /// # Errors
    /// A file cannot be read or parsed.
    pub fn load(dir: &Path) -> Result<GenerationFile, ModelError> {
        if let Some(set) = gguf::open(dir)? {
            return Ok(GenerationFile {
                path: set.path().to_owned(),
                origin: Origin::Gguf,
                map: gguf::sampling(set.metadata()),
            });
        }
        let path = dir.join(GENERATION_CONFIG);
        if path.try_exists().map_err(|e| ModelError::read(&path, e))? {
            let map = read_json(&path)?;
            return Ok(GenerationFile {
                path,
                origin: Origin::GenerationConfig,
                map,
            });
        }
        let path = dir.join(CONFIG);
        let config = read_json(&path)?;
        let mut map = Map::new();
        for part in [Some(&config), config.get("text_config").and_then(Value::as_object)] {
            let known = part.into_iter().flatten().filter(|(key, value)| {
                let key = key.as_str();
                !value.is_null()
                    && (key == "eos_token_id" || APPLIED.contains(&key) || REFUSED.iter().any(|(name, _)| *name == key))
            });
            for (key, value) in known {
                map.entry(key.clone()).or_insert_with(|| value.clone());
            }
        }
        Ok(GenerationFile {
            path,
            origin: Origin::Config,
            map,
        })
    }

    /// The file's name.
    pub fn name(&self) -> &'static str {
        match self.origin {
            Origin::GenerationConfig => GENERATION_CONFIG,
            Origin::Config => CONFIG,
            Origin::Gguf => GGUF,
        }
    }

    /// The keys that the file sets, each with its value, except neutral values.
    pub fn settings(&self) -> Vec<String> {
        let setting = |key: &str, neutral: &NeutralSetting| {
            let value = self.map.get(key).filter(|value| !neutral.includes(value))?;
            Some(format!("{key} {}", short(value)))
        };
        let applied = APPLIED.iter().filter_map(|key| {
            let neutral = match *key {
                "temperature" | "top_p" | "repetition_penalty" => NeutralSetting::Number(1.0),
                "do_sample" => return None,
                _ => NeutralSetting::Number(0.0),
            };
            setting(key, &neutral)
        });
        applied
            .chain(REFUSED.iter().filter_map(|(key, neutral)| setting(key, neutral)))
            .collect()
    }

    /// Checks the values.
    ///
    /// # Errors
    /// A value is out of range or has another type, or a key would change answers and is not
    /// implemented.
    pub fn check(&self) -> Result<GenerationDefaults, ModelError> {
        let reader = Reader {
            path: &self.path,
            map: &self.map,
        };
        for (key, neutral) in &REFUSED {
            if let Some(value) = self.map.get(*key).filter(|value| !neutral.includes(value)) {
                return Err(reader.unsupported(format!("`{key}` ({}) is not supported", short(value))));
            }
        }
        let number = |key, min, max| reader.number_in(key, min, max).map(|x| x.map(|x| x as f32));
        let top_p = number("top_p", 0.0, 1.0)?;
        if top_p == Some(0.0) {
            return Err(reader.broken("`top_p` is 0, and at 0 no token is left".to_owned()));
        }
        let mut suppress_tokens = reader.ids("suppress_tokens")?;
        suppress_tokens.extend(reader.bad_words()?);
        Ok(GenerationDefaults {
            origin: self.origin,
            temperature: number("temperature", 0.0, 100.0)?,
            top_k: reader.top_k()?,
            top_p,
            min_p: number("min_p", 0.0, 1.0)?,
            repetition_penalty: number("repetition_penalty", 0.01, 100.0)?,
            max_new_tokens: reader.count("max_new_tokens")?.filter(|tokens| *tokens > 0),
            stop_strings: reader.stop_strings()?,
            suppress_tokens,
            begin_suppress_tokens: reader.ids("begin_suppress_tokens")?,
            min_new_tokens: reader.count("min_new_tokens")?.unwrap_or(0),
            min_length: reader.count("min_length")?.unwrap_or(0),
            is_greedy: reader.flag("do_sample")? == Some(false),
            unknown: self.unknown(),
        })
    }

    fn unknown(&self) -> Vec<String> {
        let keys = self
            .map
            .iter()
            .filter(|(_, value)| !NeutralSetting::Unset.includes(value));
        keys.map(|(key, _)| key.clone()).filter(|key| !is_key(key)).collect()
    }
}

/// Whether `key` is a known key of `generation_config.json`.
pub(super) fn is_key(key: &str) -> bool {
    APPLIED.contains(&key) || HARMLESS.contains(&key) || REFUSED.iter().any(|(refused, _)| *refused == key)
}

impl NeutralSetting {
    fn includes(&self, value: &Value) -> bool {
        match value {
            Value::Null | Value::Bool(false) => true,
            Value::Array(items) => items.is_empty(),
            Value::Object(map) => map.is_empty(),
            Value::Number(x) => matches!(self, NeutralSetting::Number(neutral) if x.as_f64() == Some(*neutral)),
            Value::Bool(true) | Value::String(_) => false,
        }
    }
}

impl Reader<'_> {
    /// A number of tokens.
    fn count(&self, key: &str) -> Result<Option<u32>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_u64().filter(|n| *n <= TOKENS_MAX) {
            Some(n) => Ok(Some(n as u32)),
            None => Err(self.broken(format!(
                "`{key}` is {}, not a whole number from 0 to {TOKENS_MAX}",
                short(value)
            ))),
        }
    }

    /// `top_k`. The values 0 and -1 keep all tokens.
    fn top_k(&self) -> Result<Option<u32>, ModelError> {
        let Some(value) = self.get("top_k") else {
            return Ok(None);
        };
        match value.as_i64() {
            Some(-1) => Ok(Some(0)),
            Some(k @ 0..) if k <= i64::from(i32::MAX) => Ok(Some(k as u32)),
            _ => Err(self.broken(format!("`top_k` is {}, not a number of tokens", short(value)))),
        }
    }

    fn ids(&self, key: &str) -> Result<Vec<u32>, ModelError> {
        let Some(value) = self.get(key) else {
            return Ok(Vec::new());
        };
        id_list(value).ok_or_else(|| self.broken(format!("`{key}` is {}, not a list of token ids", short(value))))
    }

    /// Token ids of single-token words, without end-of-sequence ids (which transformers drops,
    /// too).
    fn bad_words(&self) -> Result<Vec<u32>, ModelError> {
        let key = "bad_words_ids";
        let Some(value) = self.get(key) else {
            return Ok(Vec::new());
        };
        let words: Option<Vec<Vec<u32>>> = value.as_array().and_then(|list| list.iter().map(id_list).collect());
        let words = words.filter(|words| words.iter().all(|word| !word.is_empty()));
        let words = words.ok_or_else(|| self.broken(format!("`{key}` is {}, not lists of token ids", short(value))))?;
        if let Some(word) = words.iter().find(|word| word.len() > 1) {
            return Err(self.unsupported(format!(
                "`{key}` holds a word of several tokens ({word:?}), which is not supported; words of one token are"
            )));
        }
        let ends = self.eos_token_ids()?;
        let mut ids = words.concat();
        ids.retain(|id| !ends.contains(id));
        Ok(ids)
    }

    fn stop_strings(&self) -> Result<Vec<String>, ModelError> {
        let key = "stop_strings";
        let Some(value) = self.get(key) else {
            return Ok(Vec::new());
        };
        let texts: Option<Vec<String>> = match value {
            Value::String(text) => Some(vec![text.clone()]),
            Value::Array(list) => list.iter().map(|text| text.as_str().map(str::to_owned)).collect(),
            _ => None,
        };
        texts
            .filter(|texts| texts.iter().all(|text| !text.is_empty()))
            .ok_or_else(|| self.broken(format!("`{key}` is {}, not texts", short(value))))
    }
}

fn id_list(value: &Value) -> Option<Vec<u32>> {
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    value.as_array()?.iter().map(id).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn file(text: Value) -> GenerationFile {
        let Value::Object(map) = text else { panic!("an object") };
        GenerationFile {
            path: GENERATION_CONFIG.into(),
            origin: Origin::GenerationConfig,
            map,
        }
    }

    fn check(text: Value) -> Result<GenerationDefaults, String> {
        file(text).check().map_err(|e| e.to_string())
    }

    #[test]
    fn a_published_file_is_read() {
        let qwen = check(json!({
            "bos_token_id": 151643, "pad_token_id": 151643, "do_sample": true, "eos_token_id": [151645, 151643],
            "repetition_penalty": 1.1, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "transformers_version": "4.37.0"
        }))
        .unwrap();
        let expected = GenerationDefaults {
            temperature: Some(0.7),
            top_k: Some(20),
            top_p: Some(0.8),
            repetition_penalty: Some(1.1),
            ..GenerationDefaults::default()
        };
        assert_eq!(qwen, expected);
    }

    #[test]
    fn every_applied_key_is_read() {
        let all = check(json!({
            "temperature": 0, "top_k": -1, "top_p": null, "min_p": 0.05, "max_new_tokens": 512, "stop_strings": "END",
            "suppress_tokens": [7, 3], "begin_suppress_tokens": [9], "bad_words_ids": [[5], [2]], "eos_token_id": 2,
            "min_new_tokens": 4, "min_length": 6, "do_sample": false, "chat_format": "chatml", "sampler": null
        }))
        .unwrap();
        let expected = GenerationDefaults {
            origin: Origin::GenerationConfig,
            temperature: Some(0.0),
            top_k: Some(0),
            top_p: None,
            min_p: Some(0.05),
            repetition_penalty: None,
            max_new_tokens: Some(512),
            stop_strings: vec!["END".into()],
            suppress_tokens: vec![7, 3, 5],
            begin_suppress_tokens: vec![9],
            min_new_tokens: 4,
            min_length: 6,
            is_greedy: true,
            unknown: vec!["chat_format".into()],
        };
        assert_eq!(all, expected, "an end is no bad word");
    }

    #[test]
    fn neutral_values_of_unsupported_keys_pass() {
        let passed = check(json!({
            "num_beams": 1, "num_beam_groups": 1, "diversity_penalty": 0.0, "typical_p": 1.0, "guidance_scale": null,
            "forced_decoder_ids": [], "sequence_bias": {}, "token_healing": false, "no_repeat_ngram_size": 0,
            "penalty_alpha": 0, "encoder_repetition_penalty": 1, "num_return_sequences": 1, "epsilon_cutoff": 0.0
        }));
        assert_eq!(passed, Ok(GenerationDefaults::default()));
    }

    #[test]
    fn unsupported_keys_are_refused_by_name() {
        for (key, value) in [
            ("num_beams", json!(4)),
            ("forced_bos_token_id", json!(0)),
            ("forced_eos_token_id", json!([2])),
            ("forced_decoder_ids", json!([[1, 50]])),
            ("no_repeat_ngram_size", json!(3)),
            ("guidance_scale", json!(1.5)),
            ("typical_p", json!(0.9)),
            ("exponential_decay_length_penalty", json!([5, 1.1])),
            ("sequence_bias", json!([[[1], 0.5]])),
            ("watermarking_config", json!({"bias": 2})),
            ("max_time", json!(0.0)),
            ("token_healing", json!(true)),
        ] {
            let error = check(json!({key: value})).unwrap_err();
            let words = format!("`generation_config.json`: `{key}` ({value}) is not supported");
            assert_eq!(error, words);
        }
        let error = check(json!({"bad_words_ids": [[3], [4, 5]]})).unwrap_err();
        assert!(
            error.contains("`bad_words_ids` holds a word of several tokens ([4, 5])"),
            "{error}"
        );
    }

    #[test]
    fn invalid_values_are_refused_by_name() {
        for (key, value) in [
            ("temperature", json!("hot")),
            ("temperature", json!(-0.1)),
            ("temperature", json!(101)),
            ("top_k", json!(1.5)),
            ("top_k", json!(-2)),
            ("top_p", json!(1.01)),
            ("top_p", json!(0)),
            ("min_p", json!(2)),
            ("repetition_penalty", json!(0)),
            ("repetition_penalty", json!([1.1])),
            ("max_new_tokens", json!("many")),
            ("min_new_tokens", json!(-1)),
            ("min_length", json!(1u64 << 40)),
            ("suppress_tokens", json!([-1])),
            ("begin_suppress_tokens", json!(5)),
            ("bad_words_ids", json!([5])),
            ("bad_words_ids", json!([[]])),
            ("stop_strings", json!([""])),
            ("do_sample", json!("yes")),
        ] {
            let error = check(json!({key: value})).unwrap_err();
            let words = format!("`generation_config.json`: `{key}` is ");
            assert!(error.starts_with(&words), "{key} {value}: {error}");
        }
    }

    #[test]
    fn settings_are_listed() {
        let settings =
            file(json!({"temperature": 0.7, "top_p": 1.0, "num_beams": 4, "top_k": 0, "do_sample": true, "x": 1}))
                .settings();
        assert_eq!(settings, ["temperature 0.7", "num_beams 4"]);
    }

    #[test]
    fn config_json_stands_in_for_a_missing_file() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: Value| std::fs::write(dir.path().join(name), text.to_string()).unwrap();
        write(
            CONFIG,
            json!({"hidden_size": 8, "temperature": 0.5, "text_config": {"temperature": 0.6, "top_k": 3}}),
        );
        let old = GenerationFile::load(dir.path()).unwrap();
        let defaults = old.check().unwrap();
        assert_eq!((old.name(), defaults.origin), (CONFIG, Origin::Config));
        assert_eq!((defaults.temperature, defaults.top_k), (Some(0.5), Some(3)));
        assert!(
            defaults.unknown.is_empty(),
            "the keys of a model's sizes are none of ours"
        );
        write(GENERATION_CONFIG, json!({"top_p": 0.9}));
        let own = GenerationFile::load(dir.path()).unwrap().check().unwrap();
        assert_eq!(
            (own.top_p, own.temperature, own.origin),
            (Some(0.9), None, Origin::GenerationConfig)
        );
    }
}
