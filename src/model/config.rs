//! `config.json` and `generation_config.json`: what a checkpoint's model is, as one value.
//!
//! Four families (Llama, Mistral, Qwen2, Qwen3) differ only in the fields of [`Config`]. What is not supported is
//! refused by name; what the reference ignores is ignored.

use std::path::Path;

use serde_json::{Map, Value};

use crate::device::{HeadShape, KvSpec};
use crate::model::error::ModelError;
use crate::model::rope::{Rope, Scaling, Yarn, yarn_attention_factor};

/// Largest `config.json` read.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// A supported family: its defaults and its tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
}

/// A decoder-only transformer with RMS norms before attention and a gated SiLU network.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    pub family: Family,
    /// Rows of the embedding table, padding included.
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    /// Attention of each layer: full or a window.
    pub layers: Vec<KvSpec>,
    pub heads: HeadShape,
    pub norm_eps: f32,
    pub qkv_bias: bool,
    pub o_bias: bool,
    pub mlp_bias: bool,
    /// RMS norm of each query and key head.
    pub qk_norm: bool,
    pub rope: Rope,
    /// The output head is the embedding table.
    pub tied_embeddings: bool,
    /// Longest sequence the checkpoint declares.
    pub max_position_embeddings: u32,
    /// Ids that end a sequence, of `config.json` and `generation_config.json` together; ascending.
    pub eos_token_ids: Vec<u32>,
}

impl Config {
    /// Reads `config.json` and, where there is one, `generation_config.json` of a checkpoint folder.
    ///
    /// # Errors
    /// A file that cannot be read or parsed, a size out of bounds, an architecture or option that is not supported.
    pub fn load(dir: &Path) -> Result<Config, ModelError> {
        let path = dir.join("config.json");
        let config = Reader {
            path: &path,
            map: &read_json(&path)?,
        }
        .config()?;
        let path = dir.join("generation_config.json");
        if !path.try_exists().map_err(|e| ModelError::read(&path, e))? {
            return Ok(config);
        }
        let generation = read_json(&path)?;
        let more = Reader {
            path: &path,
            map: &generation,
        }
        .eos_token_ids()?;
        Ok(config.with_eos_token_ids(more))
    }

    /// The sizes of a model as `config.json` text gives them; `path` is named in errors.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn parse(path: &Path, text: &str) -> Result<Config, ModelError> {
        let value: Value =
            serde_json::from_str(text).map_err(|e| ModelError::broken(path, format!("not valid JSON: {e}")))?;
        let Value::Object(map) = value else {
            return Err(ModelError::broken(path, "not a JSON object"));
        };
        Reader { path, map: &map }.config()
    }

    fn with_eos_token_ids(mut self, more: Vec<u32>) -> Config {
        self.eos_token_ids.extend(more);
        self.eos_token_ids.sort_unstable();
        self.eos_token_ids.dedup();
        self
    }

    /// Longest context the model can be asked for: what it declares, or what its RoPE scaling stretches that to.
    pub fn context_limit(&self) -> u32 {
        let stretched = |factor: f64, tokens: u32| (tokens as f64 * factor).min(u32::MAX as f64) as u32;
        let scaled = match &self.rope.scaling {
            Scaling::Dynamic {
                factor,
                pretrained_tokens,
            } => stretched(*factor, *pretrained_tokens),
            Scaling::Llama3 {
                factor,
                pretrained_tokens,
                ..
            } => stretched(*factor, *pretrained_tokens),
            Scaling::Yarn(yarn) => stretched(yarn.factor, yarn.pretrained_tokens),
            Scaling::None | Scaling::Linear { .. } => 0,
        };
        scaled.max(self.max_position_embeddings)
    }
}

fn read_json(path: &Path) -> Result<Map<String, Value>, ModelError> {
    let bytes = super::read_limited(path, CONFIG_BYTES_MAX)?;
    match serde_json::from_slice(&bytes) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(ModelError::broken(path, "not a JSON object")),
        Err(e) => Err(ModelError::broken(path, format!("not valid JSON: {e}"))),
    }
}

/// Options of other models that change results; none may be set.
const REFUSED: [&str; 16] = [
    // MLX's; the other is everyone else's.
    "quantization",
    "quantization_config",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "num_local_experts",
    "num_experts",
    "query_pre_attn_scalar",
    "attention_multiplier",
    "residual_multiplier",
    "embedding_multiplier",
    "logits_scaling",
    "logit_scale",
    "no_rope_layers",
    "attention_chunk_size",
    "text_config",
    "vision_config",
];

/// A JSON object with the file it comes from.
struct Reader<'a> {
    path: &'a Path,
    map: &'a Map<String, Value>,
}

impl Reader<'_> {
    fn broken(&self, message: String) -> ModelError {
        ModelError::broken(self.path, message)
    }

    fn unsupported(&self, message: String) -> ModelError {
        ModelError::unsupported(self.path, message)
    }

    /// The value of a field that is there and not null.
    fn get(&self, name: &str) -> Option<&Value> {
        self.map.get(name).filter(|v| !v.is_null())
    }

    fn size(&self, name: &str, max: usize) -> Result<Option<usize>, ModelError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match value.as_u64() {
            Some(n) if n >= 1 && n <= max as u64 => Ok(Some(n as usize)),
            _ => Err(self.broken(format!(
                "`{name}` is {}, not a whole number from 1 to {max}",
                short(value)
            ))),
        }
    }

    fn required_size(&self, name: &str, max: usize) -> Result<usize, ModelError> {
        self.size(name, max)?
            .ok_or_else(|| self.broken(format!("`{name}` is missing")))
    }

    fn flag(&self, name: &str) -> Result<Option<bool>, ModelError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        value
            .as_bool()
            .map(Some)
            .ok_or_else(|| self.broken(format!("`{name}` is {}, not true or false", short(value))))
    }

    fn number(&self, name: &str) -> Result<Option<f64>, ModelError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match value.as_f64() {
            Some(x) if x.is_finite() => Ok(Some(x)),
            _ => Err(self.broken(format!("`{name}` is {}, not a number", short(value)))),
        }
    }

    fn number_in(&self, name: &str, min: f64, max: f64) -> Result<Option<f64>, ModelError> {
        match self.number(name)? {
            Some(x) if x < min || x > max => Err(self.broken(format!("`{name}` is {x}, not from {min} to {max}"))),
            x => Ok(x),
        }
    }

    fn text(&self, name: &str) -> Result<Option<&str>, ModelError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        value
            .as_str()
            .map(Some)
            .ok_or_else(|| self.broken(format!("`{name}` is {}, not a text", short(value))))
    }

    fn config(&self) -> Result<Config, ModelError> {
        let family = self.family()?;
        self.refuse_options()?;
        let hidden_size = self.required_size("hidden_size", 1 << 17)?;
        let num_layers = self.required_size("num_hidden_layers", 1 << 10)?;
        let heads = self.heads(family, hidden_size)?;
        let max_position_embeddings = match self.size("max_position_embeddings", 1 << 28)? {
            Some(n) => n as u32,
            None => match family {
                Family::Llama => 2048,
                Family::Mistral => 4096 * 32,
                Family::Qwen2 | Family::Qwen3 => 32_768,
            },
        };
        let attention_bias = self.flag("attention_bias")?.unwrap_or(false);
        Ok(Config {
            family,
            vocab_size: self.required_size("vocab_size", 1 << 24)?,
            hidden_size,
            intermediate_size: self.required_size("intermediate_size", 1 << 20)?,
            layers: self.layers(family, num_layers)?,
            heads,
            norm_eps: self.number_in("rms_norm_eps", 0.0, 1.0)?.unwrap_or(1e-6) as f32,
            qkv_bias: match family {
                Family::Llama | Family::Qwen3 => attention_bias,
                Family::Mistral => false,
                Family::Qwen2 => true,
            },
            o_bias: matches!(family, Family::Llama | Family::Qwen3) && attention_bias,
            mlp_bias: family == Family::Llama && self.flag("mlp_bias")?.unwrap_or(false),
            qk_norm: family == Family::Qwen3,
            rope: self.rope(heads.head_dim, max_position_embeddings)?,
            tied_embeddings: self.flag("tie_word_embeddings")?.unwrap_or(false),
            max_position_embeddings,
            eos_token_ids: self.eos_token_ids()?,
        })
    }

    fn family(&self) -> Result<Family, ModelError> {
        let of_type = |name: &str| match name {
            "llama" | "LlamaForCausalLM" => Some(Family::Llama),
            "mistral" | "MistralForCausalLM" => Some(Family::Mistral),
            "qwen2" | "Qwen2ForCausalLM" => Some(Family::Qwen2),
            "qwen3" | "Qwen3ForCausalLM" => Some(Family::Qwen3),
            _ => None,
        };
        let mut names = Vec::new();
        if let Some(value) = self.get("architectures") {
            let list = value
                .as_array()
                .filter(|l| !l.is_empty())
                .ok_or_else(|| self.broken(format!("`architectures` is {}, not a list of names", short(value))))?;
            for name in list {
                names.push(
                    name.as_str()
                        .ok_or_else(|| self.broken("`architectures` holds no names".to_owned()))?,
                );
            }
        }
        names.extend(self.text("model_type")?);
        let mut found = None;
        for name in names {
            let family = of_type(name).ok_or_else(|| {
                self.unsupported(format!(
                    "architecture `{}` is not supported; supported are Llama, Mistral, Qwen2 and Qwen3",
                    cut(name)
                ))
            })?;
            if found.is_some_and(|f| f != family) {
                return Err(self.broken("`architectures` and `model_type` name different models".to_owned()));
            }
            found = Some(family);
        }
        found.ok_or_else(|| self.broken("neither `architectures` nor `model_type` names a model".to_owned()))
    }

    fn refuse_options(&self) -> Result<(), ModelError> {
        for name in REFUSED {
            let unset = |v: &Value| matches!(v, Value::Bool(false)) || v.as_u64() == Some(0);
            if let Some(value) = self.get(name).filter(|v| !unset(v)) {
                return Err(self.unsupported(format!("option `{name}` ({}) is not supported", short(value))));
            }
        }
        if let Some(act) = self.text("hidden_act")?
            && act != "silu"
            && act != "swish"
        {
            return Err(self.unsupported(format!("`hidden_act` `{}` is not supported; `silu` is", cut(act))));
        }
        self.refuse_partial_rotation()
    }

    fn refuse_partial_rotation(&self) -> Result<(), ModelError> {
        match self.number("partial_rotary_factor")? {
            Some(x) if x != 1.0 => Err(self.unsupported(format!("`partial_rotary_factor` {x} is not supported; 1 is"))),
            _ => Ok(()),
        }
    }

    fn heads(&self, family: Family, hidden_size: usize) -> Result<HeadShape, ModelError> {
        let heads = self.required_size("num_attention_heads", 1 << 12)?;
        let kv_heads = match self.size("num_key_value_heads", 1 << 12)? {
            Some(n) => n,
            // A missing field takes the family's default; null means one key head a query head.
            None if family == Family::Mistral && !self.map.contains_key("num_key_value_heads") => 8,
            None => heads,
        };
        if heads % kv_heads != 0 {
            return Err(self.broken(format!(
                "`num_attention_heads` {heads} is not a multiple of `num_key_value_heads` {kv_heads}"
            )));
        }
        let head_dim = match self.size("head_dim", 1 << 10)? {
            Some(n) => n,
            None if family == Family::Qwen3 && !self.map.contains_key("head_dim") => 128,
            None if hidden_size.is_multiple_of(heads) => hidden_size / heads,
            None => {
                return Err(self.broken(format!(
                    "`hidden_size` {hidden_size} is not a multiple of `num_attention_heads` {heads}, and there is no \
                     `head_dim`"
                )));
            }
        };
        if head_dim % 2 != 0 || head_dim > 1 << 10 {
            return Err(self.unsupported(format!(
                "heads of {head_dim} dimensions are not supported; even ones to 1,024 are"
            )));
        }
        Ok(HeadShape {
            heads,
            kv_heads,
            head_dim,
        })
    }

    /// Which layers attend through a window, as each family decides it.
    fn layers(&self, family: Family, count: usize) -> Result<Vec<KvSpec>, ModelError> {
        let window = || -> Result<Option<u32>, ModelError> {
            match self.size("sliding_window", 1 << 30)? {
                Some(n) => Ok(Some(n as u32)),
                None if self.map.contains_key("sliding_window") => Ok(None),
                None => Ok(Some(4096)),
            }
        };
        let types = self.layer_types(count)?;
        match family {
            Family::Llama => {
                if types.is_some_and(|t| t.contains(&true)) {
                    return Err(self.unsupported("`layer_types` with windows is not supported for Llama".to_owned()));
                }
                Ok(vec![KvSpec::Full; count])
            }
            Family::Mistral => {
                let window = window()?;
                if types.is_some_and(|t| t.iter().any(|sliding| *sliding != window.is_some())) {
                    return Err(self.unsupported(
                        "`layer_types` that differ from `sliding_window` are not supported for Mistral".to_owned(),
                    ));
                }
                Ok(vec![window.map_or(KvSpec::Full, KvSpec::Window); count])
            }
            Family::Qwen2 | Family::Qwen3 => {
                let window = if self.flag("use_sliding_window")?.unwrap_or(false) {
                    window()?
                } else {
                    None
                };
                let from = match self.get("max_window_layers") {
                    None => 28,
                    Some(v) => v.as_u64().ok_or_else(|| {
                        self.broken(format!("`max_window_layers` is {}, not a whole number", short(v)))
                    })?,
                };
                let sliding = |i: usize| match &types {
                    Some(types) => types[i],
                    None => window.is_some() && i as u64 >= from,
                };
                (0..count)
                    .map(|i| match (sliding(i), window) {
                        (false, _) => Ok(KvSpec::Full),
                        (true, Some(w)) => Ok(KvSpec::Window(w)),
                        (true, None) => Err(self.broken(
                            "`layer_types` has `sliding_attention`, but `use_sliding_window` or `sliding_window` is \
                             not set"
                                .to_owned(),
                        )),
                    })
                    .collect()
            }
        }
    }

    /// `layer_types`: for each layer, does it slide?
    fn layer_types(&self, count: usize) -> Result<Option<Vec<bool>>, ModelError> {
        let Some(value) = self.get("layer_types") else {
            return Ok(None);
        };
        let list = value
            .as_array()
            .filter(|l| l.len() == count)
            .ok_or_else(|| self.broken(format!("`layer_types` is not a list of {count} names, one a layer")))?;
        let sliding = |v: &Value| match v.as_str() {
            Some("full_attention") => Ok(false),
            Some("sliding_attention") => Ok(true),
            _ => Err(self.unsupported(format!("layer type {} is not supported", short(v)))),
        };
        list.iter().map(sliding).collect::<Result<_, _>>().map(Some)
    }

    fn rope(&self, head_dim: usize, max_position_embeddings: u32) -> Result<Rope, ModelError> {
        let empty = Map::new();
        // The older name wins where both stand, as in the reference.
        let set = |v: &&Value| v.as_object().is_none_or(|map| !map.is_empty());
        let name = if self.get("rope_scaling").filter(set).is_some() {
            "rope_scaling"
        } else {
            "rope_parameters"
        };
        let map = match self.get(name) {
            None => &empty,
            Some(Value::Object(map)) => map,
            Some(other) => return Err(self.broken(format!("`{name}` is {}, not an object", short(other)))),
        };
        if map.contains_key("full_attention") || map.contains_key("sliding_attention") {
            return Err(self.unsupported(format!("`{name}` that differs by layer type is not supported")));
        }
        let inner = Reader { path: self.path, map };
        inner.refuse_partial_rotation()?;
        let theta_max = 1e18;
        let theta = match inner.number_in("rope_theta", 1.0, theta_max)? {
            Some(theta) => theta,
            None => self.number_in("rope_theta", 1.0, theta_max)?.unwrap_or(10_000.0),
        };
        let kind = match inner.text("rope_type")? {
            Some(kind) => Some(kind),
            None => inner.text("type")?,
        };
        let factor = || {
            let factor = inner.number_in("factor", 1.0, 1e6)?;
            factor.ok_or_else(|| self.broken(format!("`{name}` has no `factor`")))
        };
        let pretrained = || -> Result<u32, ModelError> {
            match self.size("original_max_position_embeddings", 1 << 28)? {
                Some(n) => Ok(n as u32),
                None => {
                    let n = inner.size("original_max_position_embeddings", 1 << 28)?;
                    Ok(n.map_or(max_position_embeddings, |n| n as u32))
                }
            }
        };
        let scaling = match kind.unwrap_or("default") {
            "default" => Scaling::None,
            "linear" => Scaling::Linear { factor: factor()? },
            "dynamic" if head_dim <= 2 => {
                return Err(self.unsupported("dynamic RoPE scaling of heads of 2 dimensions".to_owned()));
            }
            "dynamic" => Scaling::Dynamic {
                factor: factor()?,
                pretrained_tokens: max_position_embeddings,
            },
            "llama3" => inner.llama3(factor()?, pretrained()?)?,
            "yarn" => Scaling::Yarn(inner.yarn(theta, max_position_embeddings, pretrained()?)?),
            other => {
                return Err(self.unsupported(format!(
                    "RoPE scaling `{}` is not supported; default, linear, dynamic, llama3 and yarn are",
                    cut(other)
                )));
            }
        };
        Ok(Rope { theta, scaling })
    }

    fn llama3(&self, factor: f64, pretrained_tokens: u32) -> Result<Scaling, ModelError> {
        let need = |name: &str| {
            self.number_in(name, 1e-6, 1e6)?
                .ok_or_else(|| self.broken(format!("llama3 RoPE scaling has no `{name}`")))
        };
        let (low, high) = (need("low_freq_factor")?, need("high_freq_factor")?);
        if low >= high {
            return Err(self.broken(format!(
                "`low_freq_factor` {low} is not below `high_freq_factor` {high}"
            )));
        }
        Ok(Scaling::Llama3 {
            factor,
            low_freq_factor: low,
            high_freq_factor: high,
            pretrained_tokens,
        })
    }

    fn yarn(&self, theta: f64, max_position_embeddings: u32, pretrained_tokens: u32) -> Result<Yarn, ModelError> {
        if theta <= 1.0 {
            return Err(self.broken("YaRN needs a `rope_theta` above 1".to_owned()));
        }
        let factor = match self.number_in("factor", 1.0, 1e6)? {
            Some(factor) => factor,
            None => max_position_embeddings as f64 / pretrained_tokens as f64,
        };
        let mscale = self.number_in("mscale", 0.0, 1e3)?;
        let mscale_all_dim = self.number_in("mscale_all_dim", 0.0, 1e3)?;
        // Zero counts as not given, as in the reference.
        let beta = |name: &str, default: f64| {
            Ok::<_, ModelError>(self.number_in(name, 0.0, 1e6)?.filter(|x| *x != 0.0).unwrap_or(default))
        };
        Ok(Yarn {
            factor,
            attention_factor: match self.number_in("attention_factor", 0.0, 1e3)? {
                Some(x) => x,
                None => yarn_attention_factor(factor, mscale, mscale_all_dim),
            },
            beta_fast: beta("beta_fast", 32.0)?,
            beta_slow: beta("beta_slow", 1.0)?,
            pretrained_tokens,
            truncate: self.flag("truncate")?.unwrap_or(true),
        })
    }

    fn eos_token_ids(&self) -> Result<Vec<u32>, ModelError> {
        let Some(value) = self.get("eos_token_id") else {
            return Ok(Vec::new());
        };
        let id = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok());
        let ids: Option<Vec<u32>> = match value {
            Value::Array(list) => list.iter().map(id).collect(),
            one => id(one).map(|id| vec![id]),
        };
        let mut ids = ids.ok_or_else(|| self.broken(format!("`eos_token_id` is {}, not token ids", short(value))))?;
        ids.sort_unstable();
        ids.dedup();
        Ok(ids)
    }
}

/// A value as text for an error, cut to a line.
fn short(value: &Value) -> String {
    cut(&value.to_string())
}

fn cut(text: &str) -> String {
    match text.char_indices().nth(60) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn llama() -> Value {
        json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 100, "hidden_size": 64,
            "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
            "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
            "eos_token_id": [7, 3], "head_dim": null, "rope_scaling": null, "quantization_config": null
        })
    }

    fn parse(changes: Value) -> Result<Config, String> {
        let mut value = llama();
        let (Value::Object(map), Value::Object(changes)) = (&mut value, changes) else {
            panic!("objects")
        };
        map.extend(changes);
        Config::parse(Path::new("config.json"), &value.to_string()).map_err(|e| e.to_string())
    }

    fn refused(changes: Value, words: &str) {
        let error = parse(changes.clone()).expect_err(&format!("{changes} is accepted"));
        assert!(error.contains(words), "{changes}: {error}");
        assert!(error.contains("config.json") && !error.contains('\n'), "{error}");
    }

    #[test]
    fn a_llama_is_read() {
        let config = parse(json!({})).unwrap();
        assert_eq!(
            config.heads,
            HeadShape {
                heads: 4,
                kv_heads: 2,
                head_dim: 16
            }
        );
        assert_eq!(config.eos_token_ids, [3, 7]);
        assert_eq!(
            config.rope,
            Rope {
                theta: 500_000.0,
                scaling: Scaling::None
            }
        );
        assert_eq!(config.layers, [KvSpec::Full; 3]);
        assert!(!config.qkv_bias && !config.qk_norm && !config.tied_embeddings);
        assert_eq!(config.context_limit(), 256);
    }

    #[test]
    fn families_differ_in_biases_norms_and_windows() {
        let of = |name: &str, more: Value| {
            let mut changes = json!({"architectures": [name], "model_type": null});
            changes
                .as_object_mut()
                .unwrap()
                .extend(more.as_object().unwrap().clone());
            parse(changes).unwrap()
        };
        let mistral = of("MistralForCausalLM", json!({"sliding_window": 9}));
        assert_eq!(mistral.layers, [KvSpec::Window(9); 3]);
        assert_eq!(
            of("MistralForCausalLM", json!({"sliding_window": null})).layers,
            [KvSpec::Full; 3]
        );
        assert_eq!(of("MistralForCausalLM", json!({})).layers, [KvSpec::Window(4096); 3]);
        let qwen2 = of("Qwen2ForCausalLM", json!({"sliding_window": 9, "max_window_layers": 1}));
        assert!(qwen2.qkv_bias && !qwen2.o_bias);
        assert_eq!(qwen2.layers, [KvSpec::Full; 3]);
        let slides = json!({"sliding_window": 9, "max_window_layers": 1, "use_sliding_window": true});
        let windows = [KvSpec::Full, KvSpec::Window(9), KvSpec::Window(9)];
        assert_eq!(of("Qwen2ForCausalLM", slides).layers, windows);
        let types = json!({"sliding_window": 9, "use_sliding_window": true,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]});
        assert_eq!(of("Qwen3ForCausalLM", types).layers, windows);
        let mut qwen3 = llama();
        qwen3["architectures"] = json!(["Qwen3ForCausalLM"]);
        qwen3["model_type"] = json!("qwen3");
        qwen3.as_object_mut().unwrap().remove("head_dim");
        let qwen3 = Config::parse(Path::new("c"), &qwen3.to_string()).unwrap();
        assert!(qwen3.qk_norm && !qwen3.qkv_bias);
        assert_eq!(qwen3.heads.head_dim, 128);
    }

    #[test]
    fn both_spellings_of_rope_are_read() {
        let linear = parse(json!({"rope_scaling": {"type": "linear", "factor": 2.0}})).unwrap();
        assert_eq!(
            linear.rope,
            Rope {
                theta: 500_000.0,
                scaling: Scaling::Linear { factor: 2.0 }
            }
        );
        let new = json!({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}});
        let dynamic = parse(new).unwrap();
        let scaling = Scaling::Dynamic {
            factor: 2.0,
            pretrained_tokens: 256,
        };
        assert_eq!(dynamic.rope, Rope { theta: 100.0, scaling });
        assert_eq!(dynamic.context_limit(), 512);
        let empty =
            json!({"rope_scaling": {}, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}});
        assert_eq!(parse(empty).unwrap().rope.scaling, Scaling::Linear { factor: 2.0 });
        assert_eq!(parse(json!({"rope_scaling": {}})).unwrap().rope.scaling, Scaling::None);
        let yarn = json!({"rope_scaling": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 64}});
        let Scaling::Yarn(yarn) = parse(yarn).unwrap().rope.scaling else {
            panic!("yarn")
        };
        assert_eq!(
            (yarn.beta_fast, yarn.beta_slow, yarn.pretrained_tokens),
            (32.0, 1.0, 64)
        );
        assert!((yarn.attention_factor - 1.138_629_4).abs() < 1e-6);
    }

    #[test]
    fn what_is_not_supported_is_refused_by_name() {
        refused(
            json!({"architectures": ["GemmaForCausalLM"]}),
            "`GemmaForCausalLM` is not supported",
        );
        refused(json!({"model_type": "mistral"}), "different models");
        refused(json!({"hidden_act": "gelu"}), "`gelu` is not supported");
        refused(
            json!({"quantization_config": {"quant_method": "gptq"}}),
            "`quantization_config`",
        );
        refused(
            json!({"quantization": {"group_size": 64, "bits": 4}}),
            "`quantization` (",
        );
        refused(json!({"partial_rotary_factor": 0.5}), "`partial_rotary_factor` 0.5");
        refused(
            json!({"rope_parameters": {"partial_rotary_factor": 0.5}}),
            "`partial_rotary_factor` 0.5",
        );
        refused(json!({"num_local_experts": 8}), "`num_local_experts` (8)");
        refused(json!({"final_logit_softcapping": 30.0}), "`final_logit_softcapping`");
        refused(
            json!({"rope_scaling": {"type": "longrope"}}),
            "`longrope` is not supported",
        );
        refused(
            json!({"rope_parameters": {"full_attention": {}}}),
            "differs by layer type",
        );
        refused(
            json!({"layer_types": ["full_attention", "linear_attention", "full_attention"]}),
            "linear_attention",
        );
    }

    #[test]
    fn broken_values_are_refused_by_name() {
        refused(json!({"hidden_size": null}), "`hidden_size` is missing");
        refused(json!({"hidden_size": 1u64 << 40}), "`hidden_size` is 1099511627776");
        refused(json!({"vocab_size": -1}), "`vocab_size` is -1");
        refused(json!({"num_hidden_layers": 1e9}), "`num_hidden_layers`");
        refused(json!({"num_key_value_heads": 3}), "not a multiple");
        refused(json!({"hidden_size": 66}), "not a multiple");
        refused(json!({"head_dim": 15}), "15 dimensions");
        refused(json!({"rms_norm_eps": "small"}), "`rms_norm_eps`");
        refused(json!({"rope_theta": 0}), "`rope_theta` is 0");
        refused(json!({"rope_scaling": {"type": "linear"}}), "no `factor`");
        refused(json!({"rope_scaling": "linear"}), "not an object");
        refused(
            json!({"rope_scaling": {"type": "llama3", "factor": 8.0}}),
            "no `low_freq_factor`",
        );
        refused(json!({"eos_token_id": "</s>"}), "`eos_token_id`");
        refused(json!({"architectures": null, "model_type": null}), "names a model");
        let error = Config::parse(Path::new("config.json"), "[1").unwrap_err().to_string();
        assert!(error.contains("not valid JSON"), "{error}");
    }
}
