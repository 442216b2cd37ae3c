//! Reads `adapter_config.json` of a LoRA adapter in PEFT's layout.

use std::path::Path;

use serde_json::{Map, Value};

use super::reader::{Reader, read_json, short};
use crate::model::error::ModelError;

/// The file's name.
pub const ADAPTER_CONFIG: &str = "adapter_config.json";
/// Maximum rank.
const RANK_MAX: usize = 1 << 12;

/// Keys that say how an adapter was trained, or what its tensors show, too.
const NOTES: [&str; 20] = [
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
    "use_rslora",
];
/// Ways of training whose adapters belong to weights that the training has changed, too.
const CHANGES_BASE: [&str; 5] = ["corda", "loftq", "lora_ga", "olora", "pissa"];

/// What a LoRA adapter's changes are multiplied with.
#[derive(Debug, Clone, PartialEq)]
pub struct AdapterConfig {
    ranks: Pattern,
    alphas: Pattern,
    /// The factor is alpha / √rank, not alpha / rank.
    is_rank_stabilized: bool,
}

/// A number for all matrices, and others for those whose names end so.
#[derive(Debug, Clone, PartialEq)]
struct Pattern {
    all: f64,
    of_modules: Vec<(String, f64)>,
}

impl Pattern {
    /// The number of the module `name`: that of the first key that is the end of its path.
    fn of(&self, name: &str) -> f64 {
        let is_end = |key: &str| {
            let rest = name.strip_suffix(key);
            rest.is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
        };
        let found = self.of_modules.iter().find(|(key, _)| is_end(key));
        found.map_or(self.all, |(_, number)| *number)
    }
}

impl AdapterConfig {
    /// Reads the file in the adapter's folder.
    ///
    /// # Errors
    /// The file cannot be read, or describes something other than LoRA, or something that is not known.
    pub fn load(dir: &Path) -> Result<AdapterConfig, ModelError> {
        let path = dir.join(ADAPTER_CONFIG);
        let map = read_json(&path)?;
        Reader { path: &path, map: &map }.adapter()
    }

    /// The rank of the change of the module `name`.
    pub(in crate::model) fn rank(&self, name: &str) -> f64 {
        self.ranks.of(name)
    }

    /// The factor of the change of the module `name`.
    pub(in crate::model) fn factor(&self, name: &str) -> f32 {
        let rank = self.rank(name);
        let by = if self.is_rank_stabilized { rank.sqrt() } else { rank };
        (self.alphas.of(name) / by) as f32
    }
}

impl Reader<'_> {
    fn adapter(&self) -> Result<AdapterConfig, ModelError> {
        let kind = self.text("peft_type")?.unwrap_or_default();
        if kind != "LORA" {
            return Err(self.unsupported(format!("`peft_type` is `{kind}`; `LORA` is read")));
        }
        for (key, value) in self.map {
            if !is_known(key, value) {
                let remedy = "merge the adapter into the model with PEFT (`merge_and_unload`), and name the merged folder as `model`";
                let value = short(value);
                return Err(self.unsupported(format!("`{key}` ({value}) of an adapter is not supported: {remedy}")));
            }
        }
        let rank = self.required_size("r", RANK_MAX)? as f64;
        let alpha = self.number("lora_alpha")?.unwrap_or(8.0);
        Ok(AdapterConfig {
            ranks: self.pattern("rank_pattern", rank)?,
            alphas: self.pattern("alpha_pattern", alpha)?,
            is_rank_stabilized: self.flag("use_rslora")?.unwrap_or(false),
        })
    }

    fn pattern(&self, name: &str, all: f64) -> Result<Pattern, ModelError> {
        let empty = Map::new();
        let map = match self.get(name) {
            None => &empty,
            Some(Value::Object(map)) => map,
            Some(other) => return Err(self.broken(format!("`{name}` is {}, not an object", short(other)))),
        };
        let number = |(key, value): (&String, &Value)| {
            // PEFT takes keys for regular expressions. In one of these letters a dot alone is special, and stands for itself, too.
            let is_plain = !key.is_empty() && key.chars().all(|c| c.is_ascii_alphanumeric() || "._".contains(c));
            match value.as_f64() {
                Some(number) if is_plain && number > 0.0 => Ok((key.clone(), number)),
                _ => Err(self.unsupported(format!(
                    "`{name}` has {}: {}; the end of a module's name and a number above 0 are read",
                    short(&Value::String(key.clone())),
                    short(value)
                ))),
            }
        };
        Ok(Pattern {
            all,
            of_modules: map.iter().map(number).collect::<Result<_, _>>()?,
        })
    }
}

/// Whether it is known what a key says, with this value.
fn is_known(key: &str, value: &Value) -> bool {
    let is_unset = value.is_null() || value == &Value::Bool(false) || value == &Value::Array(Vec::new());
    let is_empty = value.as_object().is_some_and(Map::is_empty);
    match key {
        "peft_type" | "r" | "lora_alpha" | "rank_pattern" | "alpha_pattern" => true,
        "bias" => is_unset || value == "none",
        "init_lora_weights" => {
            let name = value.as_str().unwrap_or_default();
            !CHANGES_BASE.iter().any(|changes| name.starts_with(changes))
        }
        "task_type" => is_unset || value == "CAUSAL_LM",
        _ => is_unset || is_empty || NOTES.contains(&key),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parsed(change: &Value) -> Result<AdapterConfig, String> {
        // What PEFT 0.21 writes.
        let mut config = json!({
            "alora_invocation_tokens": null, "alpha_pattern": {}, "arrow_config": null, "auto_mapping": null,
            "base_model_name_or_path": "base", "bias": "none", "corda_config": null, "ensure_weight_tying": false,
            "eva_config": null, "exclude_modules": null, "fan_in_fan_out": false, "inference_mode": true,
            "init_lora_weights": true, "layer_replication": null, "layers_pattern": null, "layers_to_transform": null,
            "loftq_config": {}, "lora_alpha": 16, "lora_bias": false, "lora_dropout": 0.05, "megatron_config": null,
            "megatron_core": "megatron.core", "modules_to_save": null, "peft_type": "LORA", "peft_version": "0.21.2",
            "qalora_group_size": 16, "r": 4, "rank_pattern": {}, "revision": null, "target_modules": ["q_proj"],
            "target_parameters": null, "task_type": "CAUSAL_LM", "trainable_token_indices": null, "use_dora": false,
            "use_qalora": false, "use_rslora": false,
        });
        for (key, value) in change.as_object().unwrap() {
            config[key] = value.clone();
        }
        let path = Path::new("adapter_config.json");
        let reader = Reader {
            path,
            map: config.as_object().unwrap(),
        };
        reader.adapter().map_err(|error| error.to_string())
    }

    #[test]
    fn factors_are_those_of_peft() {
        let name = "model.layers.1.mlp.up_proj";
        assert_eq!(parsed(&json!({})).unwrap().factor(name), 4.0);
        assert_eq!(parsed(&json!({"use_rslora": true})).unwrap().factor(name), 8.0);
        let of = |pattern: Value| parsed(&pattern).unwrap();
        assert_eq!(of(json!({"alpha_pattern": {"up_proj": 2}})).factor(name), 0.5);
        assert_eq!(
            of(json!({"alpha_pattern": {"layers.1.mlp.up_proj": 2}})).factor(name),
            0.5
        );
        assert_eq!(
            of(json!({"alpha_pattern": {"p_proj": 2, "down_proj": 3}})).factor(name),
            4.0
        );
        let ranks = of(json!({"rank_pattern": {"up_proj": 16}}));
        assert_eq!((ranks.rank(name), ranks.factor(name)), (16.0, 1.0));
        assert_eq!(ranks.rank("model.layers.1.mlp.down_proj"), 4.0);
    }

    #[test]
    fn what_is_not_known_of_an_adapter_is_refused_by_name() {
        for (key, value) in [
            ("peft_type", json!("IA3")),
            ("bias", json!("lora_only")),
            ("fan_in_fan_out", json!(true)),
            ("init_lora_weights", json!("pissa_niter_4")),
            ("init_lora_weights", json!("olora")),
            ("layer_replication", json!([[0, 4], [2, 5]])),
            ("lora_bias", json!(true)),
            ("modules_to_save", json!(["lm_head"])),
            ("target_parameters", json!(["mlp.experts.gate_up_proj"])),
            ("task_type", json!("SEQ_CLS")),
            ("trainable_token_indices", json!([1])),
            ("use_dora", json!(true)),
            ("alora_invocation_tokens", json!([5])),
            ("something_new", json!(3)),
            ("alpha_pattern", json!({"^up": 3})),
            ("rank_pattern", json!({"up": 0})),
            ("rank_pattern", json!([3])),
            ("r", json!(0)),
        ] {
            let mut change = json!({});
            change[key] = value;
            let error = parsed(&change).unwrap_err();
            assert!(error.contains(&format!("`{key}`")) && !error.contains('\n'), "{error}");
        }
        for (key, value) in [
            ("init_lora_weights", json!("gaussian")),
            ("modules_to_save", json!([])),
            ("bias", Value::Null),
        ] {
            let mut change = json!({});
            change[key] = value;
            assert!(parsed(&change).is_ok(), "{key}");
        }
    }
}
