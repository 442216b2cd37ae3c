//! Reads the routed experts of a model from its configuration.

use serde_json::Value;

use super::reader::{Reader, short};
use super::{ExpertForm, Experts, Family};
use crate::device::Routing;
use crate::model::error::ModelError;
use crate::model::expert_forms::MXFP4_GROUP;

/// Maximum number of experts per layer.
const EXPERTS_MAX: usize = 1 << 12;

impl Reader<'_> {
    /// The experts of a model with `layers` layers. `None`: every layer has a plain MLP.
    pub(super) fn experts(
        &self,
        family: Family,
        layers: usize,
        hidden_size: usize,
    ) -> Result<Option<Experts>, ModelError> {
        let (per_token, renormalized, intermediate_size, layers) = match family {
            Family::Mixtral => (2, true, "intermediate_size", vec![true; layers]),
            Family::GptOss => (4, true, "intermediate_size", vec![true; layers]),
            Family::Qwen3Moe => (
                8,
                self.flag("norm_topk_prob")?.unwrap_or(false),
                "moe_intermediate_size",
                self.sparse_layers(layers)?,
            ),
            Family::Olmoe => (
                8,
                self.flag("norm_topk_prob")?.unwrap_or(false),
                "intermediate_size",
                vec![true; layers],
            ),
            _ => return Ok(None),
        };
        // The class has these norms, whatever the key says.
        if self.flag("use_qk_norm")? == Some(false) {
            return Err(self.unsupported(format!("`use_qk_norm` false is not supported for {}", family.name())));
        }
        let count = self.experts_count()?;
        let per_token = self.size_or("num_experts_per_tok", EXPERTS_MAX, Some(per_token))?;
        if per_token > count {
            return Err(self.broken(format!(
                "`num_experts_per_tok` is {per_token}, more than the {count} experts"
            )));
        }
        if let Some(other) = self.size("experts_per_token", EXPERTS_MAX)?.filter(|n| *n != per_token) {
            return Err(self.broken(format!(
                "`num_experts_per_tok` is {per_token}, and `experts_per_token` is {other}"
            )));
        }
        let intermediate_size = self.required_size(intermediate_size, 1 << 20)?;
        Ok(layers.contains(&true).then_some(Experts {
            count,
            routing: Routing {
                per_token,
                renormalized,
            },
            router_bias: family == Family::GptOss,
            form: self.expert_form(family, [hidden_size, intermediate_size])?,
            intermediate_size,
            layers,
        }))
    }

    /// How experts are stored, which gpt-oss' `quantization_config` says. `widths` are those of the
    /// matrices' rows.
    fn expert_form(&self, family: Family, widths: [usize; 2]) -> Result<ExpertForm, ModelError> {
        if family != Family::GptOss {
            return Ok(ExpertForm::Matrices);
        }
        let Some(quantization) = self.get("quantization_config") else {
            return Ok(ExpertForm::Transposed);
        };
        if quantization.get("quant_method").and_then(Value::as_str) != Some("mxfp4") {
            return Err(self.unsupported(format!(
                "`quantization_config` {} is not supported; experts in `mxfp4`, and weights that are not quantized, are",
                short(quantization)
            )));
        }
        match widths.iter().find(|width| !width.is_multiple_of(MXFP4_GROUP)) {
            None => Ok(ExpertForm::Mxfp4),
            Some(width) => Err(self.broken(format!(
                "rows of {width} numbers are not stored in MXFP4, which has groups of {MXFP4_GROUP}"
            ))),
        }
    }

    /// The number of experts, which has two names.
    fn experts_count(&self) -> Result<usize, ModelError> {
        let [local, plain] = ["num_local_experts", "num_experts"].map(|name| self.size(name, EXPERTS_MAX));
        match (local?, plain?) {
            (Some(local), Some(plain)) if local != plain => {
                Err(self.broken(format!("`num_local_experts` is {local}, and `num_experts` is {plain}")))
            }
            (Some(count), _) | (None, Some(count)) => Ok(count),
            (None, None) => Err(self.broken("`num_experts` is missing".to_owned())),
        }
    }

    /// Whether each layer has experts: every `decoder_sparse_step`-th layer, except those of
    /// `mlp_only_layers`.
    fn sparse_layers(&self, count: usize) -> Result<Vec<bool>, ModelError> {
        let step = self.size("decoder_sparse_step", 1 << 10)?.unwrap_or(1);
        let mut sparse: Vec<bool> = (1..=count).map(|number| number.is_multiple_of(step)).collect();
        let Some(value) = self.get("mlp_only_layers") else {
            return Ok(sparse);
        };
        let wrong = || self.broken(format!("`mlp_only_layers` is {}, not a list of layers", short(value)));
        for layer in value.as_array().ok_or_else(wrong)? {
            let layer = layer.as_u64().and_then(|layer| usize::try_from(layer).ok());
            *layer.and_then(|layer| sparse.get_mut(layer)).ok_or_else(wrong)? = false;
        }
        Ok(sparse)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::{Value, json};

    use super::*;
    use crate::device::{Activation, KvSpec};
    use crate::model::config::Config;

    fn parse(architecture: &str, changes: &Value) -> Result<Config, String> {
        let mut text = json!({
            "architectures": [architecture], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 200
        });
        let map = text.as_object_mut().unwrap();
        map.extend(changes.as_object().unwrap().clone());
        Config::parse(Path::new("config.json"), &text.to_string()).map_err(|e| e.to_string())
    }

    const QWEN3: &str = "Qwen3MoeForCausalLM";
    const MIXTRAL: &str = "MixtralForCausalLM";

    #[test]
    fn qwen3_has_experts_in_some_layers() {
        let of = |changes: Value| {
            let mut all = json!({"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40});
            all.as_object_mut()
                .unwrap()
                .extend(changes.as_object().unwrap().clone());
            parse(QWEN3, &all).unwrap()
        };
        let plain = of(json!({"use_qk_norm": true}));
        assert!(plain.qk_norm && !plain.qkv_bias && plain.intermediate_size == 96);
        let experts = plain.experts.unwrap();
        let routing = Routing {
            per_token: 2,
            renormalized: false,
        };
        assert_eq!(
            (experts.count, experts.routing, experts.intermediate_size),
            (6, routing, 40)
        );
        assert_eq!(experts.layers, [true; 5]);
        let renormalized = of(json!({"norm_topk_prob": true})).experts.unwrap();
        assert!(renormalized.routing.renormalized);
        let sparse = |changes: Value| of(changes).experts.map(|experts| experts.layers);
        let (x, o) = (true, false);
        assert_eq!(sparse(json!({"decoder_sparse_step": 2})), Some(vec![o, x, o, x, o]));
        assert_eq!(sparse(json!({"mlp_only_layers": [0, 4]})), Some(vec![o, x, x, x, o]));
        assert_eq!(
            sparse(json!({"mlp_only_layers": [3], "decoder_sparse_step": 2})),
            Some(vec![o, x, o, o, o])
        );
        assert_eq!(sparse(json!({"decoder_sparse_step": 9})), None);
        let config = of(json!({"mlp_only_layers": [1]}));
        assert!(config.experts_of(0).is_some() && config.experts_of(1).is_none());
    }

    #[test]
    fn mixtral_has_experts_in_every_layer() {
        let config = parse(MIXTRAL, &json!({"num_local_experts": 8})).unwrap();
        assert_eq!(config.rope.theta, 1e6);
        assert_eq!(config.norm_eps, 1e-5);
        assert_eq!(config.layers, [crate::device::KvSpec::Full; 5]);
        let experts = config.experts.unwrap();
        let routing = Routing {
            per_token: 2,
            renormalized: true,
        };
        assert_eq!(
            (experts.count, experts.routing, experts.intermediate_size),
            (8, routing, 96)
        );
        assert_eq!(experts.layers, [true; 5]);
        let windows = parse(MIXTRAL, &json!({"num_local_experts": 8, "sliding_window": 9})).unwrap();
        assert_eq!(windows.layers, [crate::device::KvSpec::Window(9); 5]);
    }

    #[test]
    fn olmoe_normalises_all_heads_together() {
        let config = parse("OlmoeForCausalLM", &json!({"num_experts": 64, "clip_qkv": null})).unwrap();
        assert!(config.qk_norm && config.joint_qk_norm);
        assert_eq!((config.norm_eps, config.max_position_embeddings), (1e-5, 4096));
        let experts = config.experts.unwrap();
        assert_eq!(
            (experts.count, experts.routing.per_token, experts.intermediate_size),
            (64, 8, 96)
        );
        assert!(!experts.routing.renormalized && experts.layers == [true; 5]);
    }

    const YARN: &str =
        r#"{"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": false}"#;

    fn gpt_oss(changes: &Value) -> Result<Config, String> {
        let yarn: Value = serde_json::from_str(YARN).unwrap();
        let mut all =
            json!({"num_local_experts": 32, "rope_scaling": yarn, "head_dim": null, "num_key_value_heads": 4});
        let map = all.as_object_mut().unwrap();
        map.extend(changes.as_object().unwrap().clone());
        parse("GptOssForCausalLM", &all)
    }

    #[test]
    fn gpt_oss_has_experts_sinks_and_biases_in_every_layer() {
        let config = gpt_oss(&json!({"experts_per_token": 4, "initial_context_length": 4096})).unwrap();
        assert!(config.attention_sinks && config.qkv_bias && config.o_bias && config.mlp_bias && !config.qk_norm);
        assert_eq!(
            (config.rope.theta, config.norm_eps, config.max_position_embeddings),
            (150_000.0, 1e-5, 131_072)
        );
        let clamped = |alpha, limit| Activation::ClampedSwiglu { alpha, limit };
        assert_eq!(config.activation, clamped(1.702, 7.0));
        let (window, full) = (KvSpec::Window(128), KvSpec::Full);
        assert_eq!(config.layers, [window, full, window, full, window]);
        let experts = config.experts.unwrap();
        assert!(experts.router_bias && experts.routing.renormalized && experts.layers == [true; 5]);
        assert_eq!((experts.routing.per_token, experts.intermediate_size), (4, 96));
        assert_eq!(experts.form, ExpertForm::Transposed);
        let other = gpt_oss(&json!({"swiglu_alpha": 2.0, "swiglu_limit": 5, "quantization_config":
            {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}));
        let other = other.unwrap();
        assert_eq!(
            (other.activation, other.expert_form()),
            (clamped(2.0, 5.0), ExpertForm::Mxfp4)
        );
        assert!(
            !parse(MIXTRAL, &json!({"num_local_experts": 8}))
                .unwrap()
                .attention_sinks
        );
    }

    #[test]
    fn what_is_wrong_with_a_gpt_oss_is_named() {
        let mxfp4 = json!({"quant_method": "mxfp4"});
        for (changes, words) in [
            (json!({"rope_scaling": null}), "`rope_scaling` is missing"),
            (
                json!({"experts_per_token": 5}),
                "`num_experts_per_tok` is 4, and `experts_per_token` is 5",
            ),
            (
                json!({"quantization_config": {"quant_method": "awq"}}),
                "is not supported; experts in `mxfp4`",
            ),
            (
                json!({"quantization_config": mxfp4.clone(), "intermediate_size": 100}),
                "rows of 100 numbers are not stored in MXFP4",
            ),
            (
                json!({"quantization_config": mxfp4, "hidden_size": 80, "head_dim": 64}),
                "rows of 80 numbers",
            ),
            (json!({"swiglu_limit": 0}), "`swiglu_limit` is 0"),
        ] {
            let error = gpt_oss(&changes).unwrap_err();
            assert!(error.contains(words), "{changes}: {error}");
        }
        let other = json!({"num_local_experts": 8, "swiglu_alpha": 1.0});
        assert!(parse(MIXTRAL, &other).unwrap_err().contains("`swiglu_alpha`"));
    }

    #[test]
    fn what_is_wrong_with_experts_is_named() {
        for (architecture, changes, words) in [
            (QWEN3, json!({}), "`num_experts` is missing"),
            (QWEN3, json!({"num_experts": 0}), "`num_experts` is 0"),
            (QWEN3, json!({"num_experts": 8}), "`moe_intermediate_size` is missing"),
            (
                QWEN3,
                json!({"num_experts": 4, "num_experts_per_tok": 5, "moe_intermediate_size": 40}),
                "`num_experts_per_tok` is 5, more than the 4 experts",
            ),
            (
                QWEN3,
                json!({"num_experts": 8, "num_local_experts": 9, "moe_intermediate_size": 40}),
                "`num_local_experts` is 9, and `num_experts` is 8",
            ),
            (
                QWEN3,
                json!({"num_experts": 8, "mlp_only_layers": [5], "moe_intermediate_size": 40}),
                "`mlp_only_layers` is [5], not a list of layers",
            ),
            (
                QWEN3,
                json!({"num_experts": 8, "norm_topk_prob": 1, "moe_intermediate_size": 40}),
                "`norm_topk_prob` is 1",
            ),
            (
                QWEN3,
                json!({"num_experts": 8, "moe_intermediate_size": 40, "use_sliding_window": true, "sliding_window": 9}),
                "`use_sliding_window` is not supported for Qwen 3 MoE",
            ),
            (
                QWEN3,
                json!({"num_experts": 8, "moe_intermediate_size": 40, "use_qk_norm": false}),
                "`use_qk_norm` false is not supported for Qwen 3 MoE",
            ),
            (
                QWEN3,
                json!({"num_experts": 8, "moe_intermediate_size": 40, "routed_scaling_factor": 2.5}),
                "option `routed_scaling_factor` (2.5) is not supported",
            ),
            (
                "OlmoeForCausalLM",
                json!({"num_experts": 64, "clip_qkv": 8.0}),
                "option `clip_qkv` (8.0)",
            ),
            (MIXTRAL, json!({"num_local_experts": -1}), "`num_local_experts` is -1"),
            (
                "Qwen3ForCausalLM",
                json!({"num_experts": 8}),
                "option `num_experts` (8)",
            ),
        ] {
            let error = parse(architecture, &changes).unwrap_err();
            assert!(error.contains(words), "{architecture} {changes}: {error}");
        }
    }

    #[test]
    fn a_gpu_refuses_experts_by_the_familys_name() {
        let error = parse(MIXTRAL, &json!({"num_local_experts": 8}))
            .unwrap()
            .refuse_on_gpu();
        let error = error.unwrap_err().to_string();
        assert!(
            error.contains("Mixtral does not run on a GPU yet, because it has experts"),
            "{error}"
        );
        let dense = parse("MistralForCausalLM", &json!({})).unwrap();
        assert!(dense.refuse_on_gpu().is_ok());
    }
}
