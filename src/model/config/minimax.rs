//! Reads what MiniMax M2's configuration has besides. Most of it says that the model lacks what the
//! makers' earlier ones have.

use serde_json::Value;

use super::Family;
use super::reader::{Reader, short};
use crate::model::error::ModelError;

/// Factors of the residual stream of an earlier model, refused unless they are 1.
pub(super) const FACTORS: [&str; 6] = [
    "layernorm_full_attention_alpha",
    "layernorm_full_attention_beta",
    "layernorm_linear_attention_alpha",
    "layernorm_linear_attention_beta",
    "layernorm_mlp_alpha",
    "layernorm_mlp_beta",
];

impl Reader<'_> {
    /// Refuses what MiniMax M2's class does not compute, whatever its configuration says.
    pub(super) fn check_minimax(&self, family: Family) -> Result<(), ModelError> {
        if family != Family::MiniMaxM2 {
            return Ok(());
        }
        let refused = |key: &str, found: &str, known: &str| {
            let name = family.name();
            self.unsupported(format!("`{key}` {found} is not supported for {name}; {known} is"))
        };
        for (key, known) in [("scoring_func", "sigmoid"), ("qk_norm_type", "per_layer")] {
            if let Some(found) = self.text(key)?.filter(|found| *found != known) {
                return Err(refused(key, &format!("{found:?}"), &format!("`{known}`")));
            }
        }
        if self.flag("use_routing_bias")? == Some(false) {
            return Err(refused("use_routing_bias", "false", "true"));
        }
        if self.size_or_zero("shared_intermediate_size", 1 << 20)?.unwrap_or(0) > 0 {
            return Err(refused("shared_intermediate_size", "above 0", "0"));
        }
        if self.size("mtp_transformer_layers", 1 << 4)?.is_some_and(|n| n > 1) {
            return Err(refused("mtp_transformer_layers", "above 1", "1"));
        }
        // A 1 for each layer with attention, and a 0 for those of an earlier model's that have none.
        if let Some(list) = self.get("attn_type_list") {
            let is_one = |kind: &Value| kind.as_u64() == Some(1);
            if list.as_array().is_none_or(|list| !list.iter().all(is_one)) {
                return Err(refused("attn_type_list", &short(list), "a list of 1"));
            }
        }
        for key in FACTORS {
            if let Some(other) = self.number(key)?.filter(|factor| *factor != 1.0) {
                return Err(refused(key, &other.to_string(), "1"));
            }
        }
        Ok(())
    }

    /// The share of a head that `rotary_dim` says rotates. `shares`: what other keys say.
    pub(super) fn share_of_rotary_dim(&self, head_dim: usize, shares: &[f64]) -> Result<Option<f64>, ModelError> {
        let Some(dims) = self.size("rotary_dim", 1 << 10)? else {
            return Ok(None);
        };
        let share = dims as f64 / head_dim as f64;
        match shares.iter().find(|other| **other != share) {
            Some(other) => Err(self.broken(format!(
                "`rotary_dim` is {dims} of {head_dim} dimensions, and `partial_rotary_factor` is {other}"
            ))),
            None => Ok(Some(share)),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::device::{Routing, Score};
    use crate::model::config::{Config, testing};

    fn parse(changes: Value) -> Result<Config, String> {
        let keys = json!({
            "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "hidden_size": 64,
            "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 8, "head_dim": 16,
            "num_local_experts": 9, "vocab_size": 100
        });
        testing::parse(keys, &changes)
    }

    #[test]
    fn every_layer_has_experts_and_norms_of_all_heads() {
        let config = parse(
            json!({"rotary_dim": 8, "use_qk_norm": true, "num_mtp_modules": 3, "use_mtp": true,
            "attn_type_list": [1, 1, 1], "shared_intermediate_size": 0, "layernorm_mlp_beta": 1.0}),
        );
        let config = config.unwrap();
        assert_eq!(config.warnings, [] as [&str; 0]);
        assert!(config.qk_norm && config.joint_qk_norm && !config.qkv_bias && !config.tied_embeddings);
        assert_eq!(
            (config.rotary_dims, config.heads.kv_heads, config.mtp_layers),
            (8, 8, 3)
        );
        assert_eq!((config.rope.theta, config.max_position_embeddings), (5e6, 196_608));
        let experts = config.experts.clone().unwrap();
        let routing = Routing {
            per_token: 8,
            score: Score::Sigmoid,
            groups: None,
            renormalized: true,
            scale: 1.0,
            scales_input: false,
        };
        assert_eq!((experts.routing, experts.has_correction), (routing, true));
        assert_eq!(
            (experts.count, experts.intermediate_size, experts.shared),
            (9, 40, None)
        );
        assert_eq!(experts.layers, [true; 3]);
        assert!(config.refuse_on_gpu().is_ok());
        assert_eq!(parse(json!({})).unwrap().rotary_dims, 16);
        let by_share = parse(json!({"partial_rotary_factor": 0.25, "rotary_dim": 4})).unwrap();
        assert_eq!(by_share.rotary_dims, 4);
        // Keys of other families' routers are not read.
        let others = parse(json!({"n_group": 3, "n_shared_experts": 1, "norm_topk_prob": false})).unwrap();
        assert_eq!(others.experts.unwrap(), experts);
        assert_eq!(others.warnings.len(), 1);
    }

    #[test]
    fn what_the_class_does_not_compute_is_refused_by_name() {
        for (changes, words) in [
            (
                json!({"scoring_func": "softmax"}),
                "`scoring_func` \"softmax\" is not supported",
            ),
            (json!({"qk_norm_type": "per_head"}), "`qk_norm_type` \"per_head\""),
            (json!({"use_qk_norm": false}), "`use_qk_norm` false is not supported"),
            (json!({"use_routing_bias": false}), "`use_routing_bias` false"),
            (
                json!({"shared_intermediate_size": 8}),
                "`shared_intermediate_size` above 0",
            ),
            (json!({"mtp_transformer_layers": 2}), "`mtp_transformer_layers` above 1"),
            (json!({"attn_type_list": [1, 0, 1]}), "`attn_type_list` [1,0,1]"),
            (json!({"layernorm_mlp_alpha": 3.5}), "`layernorm_mlp_alpha` 3.5"),
            (
                json!({"rotary_dim": 8, "partial_rotary_factor": 1.0}),
                "`rotary_dim` is 8 of 16",
            ),
            (json!({"rotary_dim": 7}), "`partial_rotary_factor` 0.4375"),
            (json!({"rotary_dim": 32}), "`partial_rotary_factor` 2"),
            (
                json!({"routed_scaling_factor": 2.0}),
                "option `routed_scaling_factor` (2.0)",
            ),
            (
                json!({"quantization_config": {"quant_method": "hqq"}}),
                "option `quantization_config`",
            ),
        ] {
            let error = parse(changes).unwrap_err();
            assert!(error.contains(words) && !error.contains('\n'), "{error}");
        }
    }
}
