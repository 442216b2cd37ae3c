//! Reads what Llama 4 has besides: which layers rotate and have experts, and the length to which its
//! attention is that of other models.

use serde_json::Value;

use super::reader::{Reader, short};
use super::{Config, Family};
use crate::device::KvSpec;
use crate::model::error::ModelError;

impl Reader<'_> {
    /// Llama 4's layers. Some see the tokens of their own chunk alone, which is a sequence's first in
    /// all contexts that are [allowed](Self::llama4_context).
    pub(super) fn llama4_layers(&self, count: usize) -> Result<Vec<KvSpec>, ModelError> {
        let known = |kind: &Value| matches!(kind.as_str(), Some("chunked_attention" | "full_attention"));
        match self.get("layer_types").and_then(Value::as_array) {
            None if self.get("layer_types").is_none() => {}
            Some(list) if list.len() == count => {
                if let Some(other) = list.iter().find(|kind| !known(kind)) {
                    return Err(self.unsupported(format!("layer type {} is not supported", short(other))));
                }
            }
            _ => return Err(self.broken(format!("`layer_types` is not a list of {count} names, one a layer"))),
        }
        Ok(vec![KvSpec::Full; count])
    }

    /// Whether each layer rotates. An empty list is none.
    pub(super) fn llama4_rotates(&self, count: usize) -> Result<Vec<bool>, ModelError> {
        let list = self.get("no_rope_layers").and_then(Value::as_array);
        if list.is_some_and(Vec::is_empty) {
            return self.rope_layers_by_interval(count);
        }
        self.rope_layers(count)
    }

    /// Whether each layer has experts.
    pub(super) fn llama4_expert_layers(&self, count: usize) -> Result<Vec<bool>, ModelError> {
        let Some(value) = self.get("moe_layers") else {
            let step = self.size_or("interleave_moe_layer_step", 1 << 10, Some(1))?;
            return Ok((1..=count).map(|layer| layer.is_multiple_of(step)).collect());
        };
        let list: Option<Vec<u64>> = value
            .as_array()
            .and_then(|list| list.iter().map(Value::as_u64).collect());
        let list =
            list.ok_or_else(|| self.broken(format!("`moe_layers` is {}, not a list of layers", short(value))))?;
        Ok((0..count as u64).map(|layer| list.contains(&layer)).collect())
    }

    /// Whether queries and keys of layers that rotate are normalised, without weights.
    pub(super) fn unit_qk_norm(&self, family: Family) -> Result<bool, ModelError> {
        Ok(family == Family::Llama4 && self.flag("use_qk_norm")?.unwrap_or(true))
    }

    /// The longest context in which a layer sees all tokens, and no query is scaled.
    pub(super) fn llama4_context(&self) -> Result<Option<u32>, ModelError> {
        if self.map.get("attention_chunk_size").is_some_and(Value::is_null) {
            return Err(self.unsupported("`attention_chunk_size` null is not supported for Llama 4".to_owned()));
        }
        let chunk = self.size_or("attention_chunk_size", 1 << 28, Some(8192))?;
        // Some releases have a number here.
        let tunes = match self.get("attn_temperature_tuning") {
            None => true,
            Some(value) => value
                .as_bool()
                .or_else(|| value.as_u64().map(|n| n > 0))
                .ok_or_else(|| {
                    self.broken(format!(
                        "`attn_temperature_tuning` is {}, not true or false",
                        short(value)
                    ))
                })?,
        };
        let floor = self.size_or("floor_scale", 1 << 28, Some(8192))?;
        self.number("attn_scale")?;
        // The query of token `floor`, counted from 1, is the first that is scaled.
        let longest = if tunes { chunk.min(floor - 1) } else { chunk };
        if longest == 0 {
            return Err(self.unsupported("`floor_scale` 1 is not supported".to_owned()));
        }
        Ok(Some(longest as u32))
    }

    /// That a context ends before the length that a model declares.
    pub(super) fn context_warning(&self, config: &Config) -> Option<String> {
        let max = config.context_max?;
        let unlimited = Config {
            context_max: None,
            ..config.clone()
        };
        if unlimited.context_limit() < max {
            return None;
        }
        let why = match config.family {
            Family::Llama4 => {
                "scales its queries (`attn_temperature_tuning`) or sees chunks alone (`attention_chunk_size`) behind token"
            }
            _ => "scales its queries (`llama_4_scaling_beta`) from token",
        };
        let file = self.path.display();
        Some(format!(
            "{file}: the model {why} {max}, which is not supported: its context ends there"
        ))
    }

    /// Refuses rotations whose factor the norm behind them would take away.
    pub(super) fn check_llama4(&self, family: Family) -> Result<(), ModelError> {
        if family != Family::Llama4 {
            return Ok(());
        }
        let Some(Value::Object(map)) = self.get(self.rope_name()) else {
            return Ok(());
        };
        let inner = Reader { path: self.path, map };
        match inner.rope_kind()? {
            None | Some("default" | "linear" | "llama3") => Ok(()),
            Some(other) => Err(self.unsupported(format!(
                "RoPE scaling `{other}` is not supported for Llama 4; default, linear and llama3 are"
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::device::{KvSpec, Routing, Score};
    use crate::model::config::{Config, ExpertForm, SharedExpert, testing};

    fn parse(changes: Value) -> Result<Config, String> {
        let keys = json!({
            "architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text", "hidden_size": 64,
            "intermediate_size": 40, "intermediate_size_mlp": 96, "num_hidden_layers": 5, "num_attention_heads": 8,
            "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 6, "vocab_size": 100
        });
        testing::parse(keys, &changes)
    }

    #[test]
    fn layers_rotate_and_have_experts_by_their_numbers() {
        let config = parse(json!({"interleave_moe_layer_step": 2, "no_rope_layers": []})).unwrap();
        assert_eq!(config.rotates, [true, true, true, false, true]);
        assert_eq!(config.layers, [KvSpec::Full; 5]);
        assert!(config.unit_qk_norm && !config.qk_norm && config.rotates_neighbours && !config.tied_embeddings);
        let experts = config.experts.clone().unwrap();
        assert_eq!(experts.layers, [false, true, false, true, false]);
        let routing = Routing {
            per_token: 1,
            score: Score::Sigmoid,
            groups: None,
            renormalized: false,
            scale: 1.0,
            scales_input: true,
        };
        assert_eq!((experts.routing, experts.has_correction), (routing, false));
        let shared = SharedExpert {
            intermediate_size: 40,
            is_weighted: false,
        };
        assert_eq!(
            (experts.count, experts.intermediate_size, experts.shared),
            (6, 40, Some(shared))
        );
        assert_eq!(
            (experts.form, config.intermediate_size),
            (ExpertForm::TransposedHalves, 96)
        );
        assert!(config.refuse_on_gpu().is_ok());
        let listed = parse(json!({"moe_layers": [0, 3], "no_rope_layers": [0, 1, 1, 1, 0], "use_qk_norm": false}));
        let listed = listed.unwrap();
        assert_eq!(listed.rotates, [false, true, true, true, false]);
        assert_eq!(listed.experts.unwrap().layers, [true, false, false, true, false]);
        assert!(!listed.unit_qk_norm);
        assert!(parse(json!({"moe_layers": []})).unwrap().experts.is_none());
    }

    #[test]
    fn a_context_ends_where_attention_would_differ() {
        let limit = |changes| parse(changes).unwrap().context_limit();
        assert_eq!(limit(json!({})), 8191);
        assert_eq!(limit(json!({"attn_temperature_tuning": false})), 8192);
        assert_eq!(limit(json!({"attn_temperature_tuning": 4})), 8191);
        assert_eq!(limit(json!({"attention_chunk_size": 64})), 64);
        assert_eq!(
            limit(json!({"floor_scale": 32, "max_position_embeddings": 1_000_000})),
            31
        );
        assert_eq!(limit(json!({"max_position_embeddings": 100})), 100);
        assert!(
            parse(json!({"max_position_embeddings": 100}))
                .unwrap()
                .warnings
                .is_empty()
        );
        let rope = json!({"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
            "original_max_position_embeddings": 8192});
        let config = parse(json!({"rope_scaling": rope})).unwrap();
        assert_eq!((config.max_position_embeddings, config.context_limit()), (8191, 8191));
        assert!(
            config.warnings[0].contains("its context ends there"),
            "{:?}",
            config.warnings
        );
    }

    #[test]
    fn what_is_not_computed_is_refused_by_name() {
        for (changes, words) in [
            (
                json!({"attention_chunk_size": null}),
                "`attention_chunk_size` null is not supported",
            ),
            (
                json!({"attn_temperature_tuning": "yes"}),
                "`attn_temperature_tuning` is \"yes\"",
            ),
            (json!({"floor_scale": 1}), "`floor_scale` 1 is not supported"),
            (
                json!({"layer_types": ["full_attention"]}),
                "`layer_types` is not a list of 5 names",
            ),
            (
                json!({"layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention", "full_attention"]}),
                "layer type \"sliding_attention\"",
            ),
            (json!({"moe_layers": ["a"]}), "`moe_layers` is [\"a\"]"),
            (
                json!({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}),
                "RoPE scaling `yarn`",
            ),
            (json!({"num_experts_per_tok": 7}), "more than the 6 experts"),
        ] {
            let error = parse(changes).unwrap_err();
            assert!(error.contains(words) && !error.contains('\n'), "{error}");
        }
    }
}
