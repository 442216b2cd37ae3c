//! Reads the routed experts of a model from its configuration.

use serde_json::Value;

use super::nemotron::Block;
use super::quantization::TAKE_UNQUANTIZED;
use super::reader::{Reader, short};
use super::{ExpertForm, Experts, Family, SharedExpert};
use crate::device::{ExpertGroups, Routing, Score};
use crate::model::error::ModelError;
use crate::model::expert_forms::MXFP4_GROUP;

/// Maximum number of experts per layer.
const EXPERTS_MAX: usize = 1 << 12;
/// Maximum number of experts that are one shared expert.
const SHARED_MAX: usize = 1 << 6;
/// Maximum width of an expert.
const WIDTH_MAX: usize = 1 << 20;

impl Family {
    /// Experts of a token, if the configuration says nothing of it. `None`: the family has no experts.
    fn experts_per_token(self) -> Option<usize> {
        match self {
            Family::Mixtral
            | Family::GraniteMoe
            | Family::GraniteMoeShared
            | Family::GraniteMoeHybrid
            | Family::NemotronH => Some(2),
            Family::Llama4 => Some(1),
            Family::GptOss | Family::Qwen2Moe => Some(4),
            Family::Glm4MoeLite => Some(4),
            Family::Ernie4_5Moe | Family::DeepseekV2 => Some(6),
            Family::DeepseekV3 | Family::MiniMaxM2 => Some(8),
            Family::Qwen3Moe | Family::Qwen3_5Moe | Family::Olmoe | Family::Glm4Moe => Some(8),
            Family::Qwen3Next => Some(10),
            _ => None,
        }
    }

    /// Whether an expert's score is the sigmoid of its logit.
    fn has_sigmoid_scores(self) -> bool {
        matches!(
            self,
            Family::Glm4Moe
                | Family::DeepseekV3
                | Family::Glm4MoeLite
                | Family::MiniMaxM2
                | Family::NemotronH
                | Family::Llama4
        )
    }

    /// Whether experts are routed as DeepSeek's: they may be in groups, and their weights have a factor.
    pub(super) fn routes_as_deepseek(self) -> bool {
        self.has_latents() || matches!(self, Family::Glm4Moe | Family::NemotronH)
    }

    /// The key of the number of experts.
    fn experts_key(self) -> &'static str {
        match self {
            _ if self.routes_as_deepseek() => "n_routed_experts",
            Family::Ernie4_5Moe => "moe_num_experts",
            Family::Mixtral
            | Family::GptOss
            | Family::Llama4
            | Family::MiniMaxM2
            | Family::GraniteMoe
            | Family::GraniteMoeShared
            | Family::GraniteMoeHybrid => "num_local_experts",
            _ => "num_experts",
        }
    }
}

impl Reader<'_> {
    /// The experts of a model with `layers` layers. `None`: every layer has a plain MLP.
    pub(super) fn experts(
        &self,
        family: Family,
        layers: usize,
        hidden_size: usize,
    ) -> Result<Option<Experts>, ModelError> {
        if family == Family::Gemma4 {
            return self.gemma4_experts(layers);
        }
        let Some(default) = family.experts_per_token() else {
            return Ok(None);
        };
        if family == Family::GraniteMoeHybrid && self.is_zero("num_local_experts") {
            return Ok(None);
        }
        // The class has these norms, whatever the key says.
        if !family.routes_as_deepseek() && family != Family::Llama4 && self.flag("use_qk_norm")? == Some(false) {
            return Err(self.unsupported(format!("`use_qk_norm` false is not supported for {}", family.name())));
        }
        let names = [
            "num_local_experts",
            "num_experts",
            "n_routed_experts",
            "moe_num_experts",
        ];
        let default_count = match family {
            Family::Qwen3Next => Some(512),
            Family::Qwen3_5Moe => Some(256),
            Family::GraniteMoeHybrid | Family::NemotronH => Some(8),
            Family::Llama4 => Some(16),
            Family::DeepseekV3 | Family::MiniMaxM2 => Some(256),
            Family::DeepseekV2 | Family::Glm4MoeLite => Some(64),
            _ => None,
        };
        let count = self.size_of_names(&names, EXPERTS_MAX)?.or(default_count);
        let count = count.ok_or_else(|| self.broken(format!("`{}` is missing", family.experts_key())))?;
        let per_token = self.size_of_names(&["num_experts_per_tok", "moe_k"], EXPERTS_MAX)?;
        if family == Family::DeepseekV2 && per_token.is_none() {
            return Err(self.broken("`num_experts_per_tok` is missing".to_owned()));
        }
        let per_token = per_token.unwrap_or(default);
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
        let width = match family {
            Family::Qwen2Moe | Family::Qwen3Moe | Family::Ernie4_5Moe => "moe_intermediate_size",
            _ if family.has_delta_layers() || family.routes_as_deepseek() => "moe_intermediate_size",
            _ => "intermediate_size",
        };
        let default_width = match family {
            Family::DeepseekV2 => Some(1407),
            Family::DeepseekV3 => Some(2048),
            Family::Glm4MoeLite => Some(1536),
            Family::NemotronH => Some(7688),
            Family::Llama4 => Some(8192),
            _ => family.has_delta_layers().then_some(512),
        };
        let intermediate_size = self.size_or(width, WIDTH_MAX, default_width)?;
        let layers = self.layers_with_experts(family, layers)?;
        Ok(layers.contains(&true).then_some(Experts {
            count,
            routing: self.routing(family, per_token, count)?,
            router_bias: family == Family::GptOss,
            has_correction: (family.has_sigmoid_scores() && family != Family::Llama4) || family == Family::Ernie4_5Moe,
            form: self.expert_form(family, [hidden_size, intermediate_size])?,
            intermediate_size,
            shared: self.shared_expert(family, intermediate_size)?,
            beside_mlp: false,
            layers,
        }))
    }

    /// Gemma 4's experts, which stand beside the MLP of every layer.
    fn gemma4_experts(&self, layers: usize) -> Result<Option<Experts>, ModelError> {
        if !self.flag("enable_moe_block")?.unwrap_or(false) {
            return Ok(None);
        }
        let count = self.required_size("num_experts", EXPERTS_MAX)?;
        let per_token = self.required_size("top_k_experts", EXPERTS_MAX)?;
        if count < per_token {
            return Err(self.broken(format!("`top_k_experts` is {per_token}, more than the {count} experts")));
        }
        Ok(Some(Experts {
            count,
            routing: Routing {
                per_token,
                score: Score::Softmax,
                groups: None,
                renormalized: true,
                scale: 1.0,
                scales_input: false,
            },
            router_bias: false,
            has_correction: false,
            form: ExpertForm::Matrices,
            intermediate_size: self.required_size("moe_intermediate_size", WIDTH_MAX)?,
            shared: None,
            beside_mlp: true,
            layers: vec![true; layers],
        }))
    }

    fn routing(&self, family: Family, per_token: usize, count: usize) -> Result<Routing, ModelError> {
        let by_key = |default: bool| Ok::<_, ModelError>(self.flag("norm_topk_prob")?.unwrap_or(default));
        let has_sigmoids = family.has_sigmoid_scores();
        // The least sum that weights are divided by; softmaxes of chosen experts add up to far more.
        if family == Family::Ernie4_5Moe && self.number("moe_norm_min")?.is_some_and(|min| min > 1e-6) {
            return Err(self.unsupported("`moe_norm_min` above 0.000001 is not supported".to_owned()));
        }
        let scale = if family.routes_as_deepseek() {
            let default = match family {
                Family::DeepseekV3 => 2.5,
                Family::Glm4MoeLite => 1.8,
                _ => 1.0,
            };
            self.number_in("routed_scaling_factor", 1e-6, 1e6)?.unwrap_or(default)
        } else {
            1.0
        };
        Ok(Routing {
            per_token,
            score: if has_sigmoids { Score::Sigmoid } else { Score::Softmax },
            groups: self.expert_groups(family, per_token, count)?,
            renormalized: match family {
                Family::Qwen2Moe | Family::Qwen3Moe | Family::Olmoe => by_key(false)?,
                Family::Qwen3Next => by_key(true)?,
                // The class does not read the key; a value of true is refused.
                Family::DeepseekV2 | Family::Llama4 => false,
                _ if family.routes_as_deepseek() => by_key(true)?,
                _ => true,
            },
            scale: scale as f32,
            scales_input: family == Family::Llama4,
        })
    }

    /// The groups that experts are in. `None`: all are in one.
    fn expert_groups(
        &self,
        family: Family,
        per_token: usize,
        count: usize,
    ) -> Result<Option<ExpertGroups>, ModelError> {
        let is_limited = match family {
            Family::DeepseekV2 => self.text("topk_method")? == Some("group_limited_greedy"),
            _ => family.routes_as_deepseek(),
        };
        if !is_limited {
            return Ok(None);
        }
        let default = match family {
            Family::DeepseekV2 => None,
            Family::DeepseekV3 => Some((8, 4)),
            _ => Some((1, 1)),
        };
        let groups = self.size_or("n_group", EXPERTS_MAX, default.map(|(count, _)| count))?;
        let chosen = self.size_or("topk_group", EXPERTS_MAX, default.map(|(_, chosen)| chosen))?;
        if chosen > groups {
            return Err(self.broken(format!("`topk_group` is {chosen}, more than the {groups} groups")));
        }
        if groups == 1 {
            return Ok(None);
        }
        let best = if family == Family::DeepseekV2 { 1 } else { 2 };
        let size = count / groups;
        if !count.is_multiple_of(groups) || size < best {
            return Err(self.broken(format!(
                "{count} experts are not in {groups} groups (`n_group`) of equal size, of {best} or more each"
            )));
        }
        if per_token > size * chosen {
            return Err(self.broken(format!(
                "`num_experts_per_tok` is {per_token}, more than {chosen} groups of {size} experts have"
            )));
        }
        Ok(Some(ExpertGroups {
            count: groups,
            chosen,
            best,
        }))
    }

    fn shared_expert(&self, family: Family, expert: usize) -> Result<Option<SharedExpert>, ModelError> {
        // Without the key, transformers takes this size or number.
        let size = |name: &str, max: usize, default: usize| {
            let size = self.size_or_zero(name, max)?;
            Ok::<_, ModelError>(size.unwrap_or(default))
        };
        let intermediate_size = match family {
            Family::Qwen2Moe => size("shared_expert_intermediate_size", WIDTH_MAX, 5632)?,
            Family::Qwen3Next | Family::Qwen3_5Moe => size("shared_expert_intermediate_size", WIDTH_MAX, 512)?,
            Family::GraniteMoeShared | Family::GraniteMoeHybrid => size("shared_intermediate_size", WIDTH_MAX, 1024)?,
            Family::Llama4 => expert,
            Family::NemotronH => self.size_or("moe_shared_expert_intermediate_size", WIDTH_MAX, Some(7688))?,
            Family::DeepseekV2 => expert * size("n_shared_experts", SHARED_MAX, 2)?,
            _ if family.routes_as_deepseek() => expert * size("n_shared_experts", SHARED_MAX, 1)?,
            Family::Ernie4_5Moe => expert * size("moe_num_shared_experts", SHARED_MAX, 2)?,
            _ => 0,
        };
        Ok((intermediate_size > 0).then_some(SharedExpert {
            intermediate_size,
            is_weighted: family == Family::Qwen2Moe || family.has_delta_layers(),
        }))
    }

    /// Whether each layer has experts.
    fn layers_with_experts(&self, family: Family, count: usize) -> Result<Vec<bool>, ModelError> {
        let number = |name: &str, default: usize| match self.get(name) {
            None => Ok(default),
            Some(value) => match value.as_u64() {
                Some(n) if n <= 1 << 20 => Ok(n as usize),
                _ => Err(self.broken(format!("`{name}` is {}, not a number of layers", short(value)))),
            },
        };
        match family {
            Family::Qwen2Moe | Family::Qwen3Moe | Family::Qwen3Next => self.sparse_layers(count),
            Family::Llama4 => self.llama4_expert_layers(count),
            Family::NemotronH => Ok(self.blocks()?.iter().map(|block| *block == Block::Experts).collect()),
            Family::Glm4Moe | Family::DeepseekV2 | Family::DeepseekV3 => {
                let default = match family {
                    Family::Glm4Moe => 1,
                    Family::DeepseekV2 => 0,
                    _ => 3,
                };
                let dense = number("first_k_dense_replace", default)?;
                Ok((0..count).map(|layer| layer >= dense).collect())
            }
            Family::Glm4MoeLite => {
                let layers = self.mlp_layer_types(count)?;
                let dense = number("first_k_dense_replace", 1)?;
                let is_listed = self.get("mlp_layer_types").is_some();
                // The class does not read this key. Where it says something else, somebody meant it.
                if !is_listed && dense != 1 {
                    return Err(self.unsupported(format!(
                        "`first_k_dense_replace` {dense} without `mlp_layer_types` is not supported for {}; 1 is",
                        family.name()
                    )));
                }
                Ok(layers)
            }
            Family::Ernie4_5Moe => {
                let last = match self.get("moe_layer_end_index") {
                    Some(value) if value.as_i64() == Some(-1) => count,
                    _ => number("moe_layer_end_index", count)?,
                };
                let layers = number("moe_layer_start_index", 1)?..=last;
                let interval = self.size_or("moe_layer_interval", 1 << 10, Some(1))?;
                let has_experts = |layer: usize| (layer + 1).is_multiple_of(interval) && layers.contains(&layer);
                Ok((0..count).map(has_experts).collect())
            }
            _ => Ok(vec![true; count]),
        }
    }

    /// `mlp_layer_types`. Without it, all layers but the first have experts.
    fn mlp_layer_types(&self, count: usize) -> Result<Vec<bool>, ModelError> {
        let Some(value) = self.get("mlp_layer_types") else {
            return Ok((0..count).map(|layer| layer > 0).collect());
        };
        let has_experts = |kind: &Value| match kind.as_str() {
            Some("sparse") => Some(true),
            Some("dense") => Some(false),
            _ => None,
        };
        let list = value.as_array().filter(|list| list.len() == count);
        let list: Option<Vec<bool>> = list.and_then(|list| list.iter().map(has_experts).collect());
        list.ok_or_else(|| {
            self.broken(format!(
                "`mlp_layer_types` is {}, not `dense` or `sparse` for each of {count} layers",
                short(value)
            ))
        })
    }

    /// How experts are stored, which gpt-oss' `quantization_config` says. `widths` are those of the
    /// matrices' rows.
    fn expert_form(&self, family: Family, widths: [usize; 2]) -> Result<ExpertForm, ModelError> {
        match family {
            Family::GptOss => {}
            Family::Llama4 => return Ok(ExpertForm::TransposedHalves),
            _ => return Ok(ExpertForm::Matrices),
        }
        let Some(quantization) = self.get("quantization_config") else {
            return Ok(ExpertForm::Transposed);
        };
        if quantization.get("quant_method").and_then(Value::as_str) != Some("mxfp4") {
            return Err(self.unsupported(format!(
                "`quantization_config` {} is not supported, except for experts in `mxfp4`; {TAKE_UNQUANTIZED}",
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

    /// A size that has several names.
    ///
    /// # Errors
    /// Two of them differ.
    fn size_of_names(&self, names: &[&str], max: usize) -> Result<Option<usize>, ModelError> {
        let mut found: Option<(&str, usize)> = None;
        for name in names {
            match (self.size(name, max)?, found) {
                (Some(size), None) => found = Some((name, size)),
                (Some(size), Some((first, other))) if size != other => {
                    return Err(self.broken(format!("`{first}` is {other}, and `{name}` is {size}")));
                }
                _ => (),
            }
        }
        Ok(found.map(|(_, size)| size))
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
    use serde_json::{Value, json};

    use super::*;
    use crate::device::{Activation, KvSpec};
    use crate::model::config::{Config, testing};

    fn parse(architecture: &str, changes: &Value) -> Result<Config, String> {
        let keys = json!({
            "architectures": [architecture], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 200
        });
        testing::parse(keys, changes)
    }

    const QWEN3: &str = "Qwen3MoeForCausalLM";
    const MIXTRAL: &str = "MixtralForCausalLM";

    #[test]
    fn qwen3_has_experts_in_some_layers() {
        let of = |changes: Value| {
            let all = json!({"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40});
            parse(QWEN3, &testing::with(all, &changes)).unwrap()
        };
        let plain = of(json!({"use_qk_norm": true}));
        assert!(plain.qk_norm && !plain.qkv_bias && plain.intermediate_size == 96);
        let experts = plain.experts.unwrap();
        let routing = Routing {
            per_token: 2,
            score: Score::Softmax,
            groups: None,
            renormalized: false,
            scale: 1.0,
            scales_input: false,
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
            score: Score::Softmax,
            groups: None,
            renormalized: true,
            scale: 1.0,
            scales_input: false,
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
        let all = json!({"num_local_experts": 32, "rope_scaling": yarn, "head_dim": null, "num_key_value_heads": 4});
        parse("GptOssForCausalLM", &testing::with(all, changes))
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

    const GLM: &str = "Glm4MoeForCausalLM";
    const ERNIE: &str = "Ernie4_5_MoeForCausalLM";

    #[test]
    fn glm_has_sigmoids_corrections_and_a_shared_expert_behind_dense_layers() {
        let base = json!({"n_routed_experts": 9, "moe_intermediate_size": 40, "attention_bias": true});
        let of = |changes: Value| parse(GLM, &testing::with(base.clone(), &changes));
        let config = of(json!({})).unwrap();
        assert!(config.qkv_bias && !config.o_bias && !config.qk_norm && !config.rotates_neighbours);
        assert_eq!((config.rotary_dims, config.norm_eps, config.mtp_layers), (8, 1e-5, 0));
        let experts = config.experts.unwrap();
        let routing = Routing {
            per_token: 8,
            score: Score::Sigmoid,
            groups: None,
            renormalized: true,
            scale: 1.0,
            scales_input: false,
        };
        assert_eq!((experts.routing, experts.has_correction), (routing, true));
        let shared = SharedExpert {
            intermediate_size: 40,
            is_weighted: false,
        };
        assert_eq!((experts.count, experts.shared), (9, Some(shared)));
        assert_eq!(experts.layers, [false, true, true, true, true]);
        let other = of(
            json!({"use_qk_norm": true, "norm_topk_prob": false, "routed_scaling_factor": 2.5, "n_group": 1,
            "first_k_dense_replace": 3, "n_shared_experts": 2, "num_nextn_predict_layers": 1}),
        );
        let other = other.unwrap();
        assert!(other.qk_norm && other.mtp_layers == 1);
        let experts = other.experts.unwrap();
        assert!(!experts.routing.renormalized && experts.routing.scale == 2.5);
        assert_eq!(experts.shared.unwrap().intermediate_size, 80);
        assert_eq!(experts.layers, [false, false, false, true, true]);
        assert_eq!(
            of(json!({"n_shared_experts": 0})).unwrap().experts.unwrap().shared,
            None
        );
        assert!(of(json!({"first_k_dense_replace": 9})).unwrap().experts.is_none());
        let groups = of(json!({"n_group": 8})).unwrap_err();
        assert!(groups.contains("9 experts are not in 8 groups"), "{groups}");
        let unnamed = parse(GLM, &json!({"moe_intermediate_size": 40})).unwrap_err();
        assert!(unnamed.contains("`n_routed_experts` is missing"), "{unnamed}");
    }

    #[test]
    fn shared_experts_of_qwen_granite_and_ernie() {
        let base = json!({"num_experts": 8, "moe_intermediate_size": 40});
        let qwen = parse("Qwen2MoeForCausalLM", &base).unwrap();
        assert!(qwen.qkv_bias && !qwen.o_bias);
        let experts = qwen.experts.unwrap();
        assert!(experts.routing.per_token == 4 && !experts.routing.renormalized && !experts.has_correction);
        let shared = |intermediate_size, is_weighted| {
            Some(SharedExpert {
                intermediate_size,
                is_weighted,
            })
        };
        assert_eq!(experts.shared, shared(5632, true));
        let windows = json!({"num_experts": 8, "moe_intermediate_size": 40, "use_sliding_window": true});
        assert!(
            parse("Qwen2MoeForCausalLM", &windows)
                .unwrap_err()
                .contains("`use_sliding_window`")
        );

        let granite = |architecture, shared: usize| {
            let factors = json!({"num_local_experts": 8, "residual_multiplier": 0.5, "embedding_multiplier": 12,
                "shared_intermediate_size": shared});
            parse(architecture, &factors).unwrap()
        };
        let config = granite("GraniteMoeSharedForCausalLM", 72);
        assert_eq!((config.embedding_scale, config.mlp_bias), (24.0, false));
        let experts = config.experts.unwrap();
        assert!(experts.routing.renormalized && experts.routing.per_token == 2);
        assert_eq!((experts.intermediate_size, experts.shared), (96, shared(72, false)));
        assert_eq!(granite("GraniteMoeSharedForCausalLM", 0).experts.unwrap().shared, None);
        assert_eq!(granite("GraniteMoeForCausalLM", 72).experts.unwrap().shared, None);

        let of = |changes: Value| {
            let all = json!({"moe_num_experts": 8, "moe_intermediate_size": 40});
            parse(ERNIE, &testing::with(all, &changes))
        };
        let ernie = of(json!({"num_experts": 8, "use_bias": false})).unwrap();
        assert!(ernie.rotates_neighbours && ernie.tied_embeddings && ernie.rope.theta == 5e5);
        let experts = ernie.experts.unwrap();
        assert!(experts.has_correction && experts.routing.renormalized && experts.routing.score == Score::Softmax);
        assert_eq!((experts.routing.per_token, experts.shared), (6, shared(80, false)));
        assert_eq!(experts.layers, [false, true, true, true, true]);
        let layers = |changes| of(changes).unwrap().experts.unwrap().layers;
        let (x, o) = (true, false);
        assert_eq!(layers(json!({"moe_layer_end_index": 2})), [o, x, x, o, o]);
        assert_eq!(
            layers(json!({"moe_layer_end_index": -1, "moe_layer_start_index": 0, "moe_layer_interval": 2})),
            [o, x, o, x, o]
        );
        let error = of(json!({"use_bias": true})).unwrap_err();
        assert!(error.contains("option `use_bias` (true)"), "{error}");
        let error = of(json!({"moe_norm_min": 0.5})).unwrap_err();
        assert!(error.contains("`moe_norm_min` above"), "{error}");
        let error = of(json!({"moe_layer_start_index": "a"})).unwrap_err();
        assert!(error.contains("`moe_layer_start_index` is \"a\""), "{error}");
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
                "is not supported, except for experts in `mxfp4`; take",
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
}
