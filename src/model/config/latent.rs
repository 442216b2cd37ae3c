//! Reads multi-head latent attention: the sizes of DeepSeek-V2, DeepSeek-V3 and GLM-4.7-Flash.

use serde_json::Value;

use super::reader::{Reader, short};
use super::{Family, LatentAttention};
use crate::device::{HeadShape, LatentShape};
use crate::model::error::ModelError;

/// Maximum numbers of a latent.
const RANK_MAX: usize = 1 << 12;
/// Maximum numbers of a part of a head.
const DIM_MAX: usize = 1 << 10;

impl Family {
    /// Whether attention keeps latents.
    pub(super) fn has_latents(self) -> bool {
        matches!(self, Family::DeepseekV2 | Family::DeepseekV3 | Family::Glm4MoeLite)
    }
}

impl Reader<'_> {
    /// The latent attention of a family that has it.
    pub(super) fn latent(&self, family: Family) -> Result<Option<LatentAttention>, ModelError> {
        if !family.has_latents() {
            return Ok(None);
        }
        let is_glm = family == Family::Glm4MoeLite;
        let dim = |key: &str, default: usize| self.size_or(key, DIM_MAX, Some(default));
        let shape = LatentShape {
            rank: self.size_or("kv_lora_rank", RANK_MAX, Some(512))?,
            rope_dim: dim("qk_rope_head_dim", 64)?,
            plain_dim: dim("qk_nope_head_dim", if is_glm { 192 } else { 128 })?,
            value_dim: dim("v_head_dim", if is_glm { 256 } else { 128 })?,
        };
        if !shape.rope_dim.is_multiple_of(2) {
            return Err(self.unsupported(format!(
                "`qk_rope_head_dim` {} is not supported; an even number is",
                shape.rope_dim
            )));
        }
        // For GLM's class this is another name of the same number. The others do not read it.
        if let (true, Some(dim)) = (is_glm, self.size("head_dim", DIM_MAX)?)
            && dim != shape.rope_dim
        {
            return Err(self.broken(format!(
                "`qk_rope_head_dim` is {}, and `head_dim` is {dim}",
                shape.rope_dim
            )));
        }
        // Null means that queries have no latents.
        let query_rank = if self.map.get("q_lora_rank").is_some_and(Value::is_null) {
            None
        } else {
            Some(self.size_or("q_lora_rank", 1 << 14, Some(if is_glm { 768 } else { 1536 }))?)
        };
        self.check_latent(family)?;
        Ok(Some(LatentAttention { shape, query_rank }))
    }

    /// Refuses what programs compute in different ways, or not at all.
    fn check_latent(&self, family: Family) -> Result<(), ModelError> {
        let (function, method) = match family {
            Family::DeepseekV2 => ("softmax", ["greedy", "group_limited_greedy"]),
            _ => ("sigmoid", ["noaux_tc"; 2]),
        };
        for (key, known) in [("scoring_func", [function; 2]), ("topk_method", method)] {
            if let Some(found) = self.text(key)?
                && !known.contains(&found)
            {
                let name = family.name();
                return Err(self.unsupported(format!(
                    "`{key}` {found:?} is not supported for {name}; `{}` is",
                    known[0]
                )));
            }
        }
        // The family's first programs have experts in each `moe_layer_freq`-th layer; its class in
        // transformers has them in every layer.
        let every = self.get("moe_layer_freq");
        if let Some(other) = every.filter(|every| every.as_u64() != Some(1)) {
            return Err(self.unsupported(format!("`moe_layer_freq` {} is not supported; 1 is", short(other))));
        }
        if family == Family::DeepseekV2 {
            // The family's first programs divide weights by their sum, and then have no factor. Its class in
            // transformers does neither.
            for key in ["norm_topk_prob", "mlp_bias"] {
                if self.flag(key)?.unwrap_or(false) {
                    return Err(self.unsupported(format!("option `{key}` (true) is not supported")));
                }
            }
        }
        Ok(())
    }

    /// The heads of attention over latents: all of them share one key.
    pub(super) fn latent_heads(&self, shape: LatentShape) -> Result<HeadShape, ModelError> {
        let heads = self.required_size("num_attention_heads", 1 << 12)?;
        match self.size("num_key_value_heads", 1 << 12)? {
            Some(other) if other != heads => Err(self.unsupported(format!(
                "`num_key_value_heads` {other} is not supported beside {heads} heads: those of latents are as many"
            ))),
            _ => Ok(HeadShape {
                heads,
                kv_heads: 1,
                head_dim: shape.kept(),
                value_in_key: Some(shape.rank),
            }),
        }
    }

    /// The factor of dot products, of heads of `dim` numbers. YaRN's `mscale_all_dim` makes it larger.
    pub(super) fn latent_scale(&self, dim: usize) -> Result<f64, ModelError> {
        let plain = 1.0 / (dim as f64).sqrt();
        let Some(Value::Object(map)) = self.get(self.rope_name()) else {
            return Ok(plain);
        };
        let inner = Reader { path: self.path, map };
        let kind = inner.rope_kind()?;
        let share = inner.number_in("mscale_all_dim", 0.0, 1e3)?.unwrap_or(0.0);
        if share == 0.0 || kind.is_none_or(|kind| kind == "default") {
            return Ok(plain);
        }
        let factor = inner.number_in("factor", 1.0, 1e6)?;
        let factor = factor.ok_or_else(|| self.broken(format!("`{}` has no `factor`", self.rope_name())))?;
        let larger = if factor <= 1.0 {
            1.0
        } else {
            0.1 * share * factor.ln() + 1.0
        };
        Ok(plain * larger * larger)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::device::{ExpertGroups, HeadShape, KvSpec, LatentShape, Score};
    use crate::model::config::{Config, Family, LatentAttention, SharedExpert, testing};

    const V2: &str = "DeepseekV2ForCausalLM";
    const V3: &str = "DeepseekV3ForCausalLM";
    const GLM: &str = "Glm4MoeLiteForCausalLM";

    fn parse(architecture: &str, changes: Value) -> Result<Config, String> {
        let keys = json!({
            "architectures": [architecture], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5,
            "num_attention_heads": 4, "num_experts_per_tok": 2, "vocab_size": 100
        });
        testing::parse(keys, &changes)
    }

    fn of(architecture: &str, changes: Value) -> Config {
        parse(architecture, changes).unwrap()
    }

    #[test]
    fn sizes_that_are_not_given_are_those_of_the_class() {
        let shape = |rank, plain_dim, value_dim| LatentShape {
            rank,
            rope_dim: 64,
            plain_dim,
            value_dim,
        };
        for (architecture, shape, query_rank) in [
            (V2, shape(512, 128, 128), 1536),
            (V3, shape(512, 128, 128), 1536),
            (GLM, shape(512, 192, 256), 768),
        ] {
            let config = of(architecture, json!({}));
            let query_rank = Some(query_rank);
            assert_eq!(config.latent, Some(LatentAttention { shape, query_rank }));
            let heads = HeadShape {
                heads: 4,
                kv_heads: 1,
                head_dim: 576,
                value_in_key: Some(512),
            };
            assert_eq!((config.heads, config.rotary_dims), (heads, 64));
            assert_eq!(config.layers, [KvSpec::Full; 5]);
            assert!(config.rotates_neighbours && !config.tied_embeddings && !config.qkv_bias && !config.qk_norm);
            let scale = 1.0 / (shape.query_dim() as f32).sqrt();
            assert_eq!(config.attention_scale, scale);
            assert_eq!(config.rope_specs(9)[0].inverse_frequencies.len(), 32);
        }
        assert_eq!(of(GLM, json!({})).norm_eps, 1e-5);
        let lengths = [V2, V3, GLM].map(|name| of(name, json!({})).max_position_embeddings);
        assert_eq!(lengths, [2048, 4096, 202_752]);
        let other = json!({"q_lora_rank": null, "kv_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12,
            "v_head_dim": 10, "attention_bias": true, "rope_interleave": false, "num_key_value_heads": 4});
        let other = of(V3, other);
        let latent = other.latent.unwrap();
        assert_eq!(latent.query_rank, None);
        assert_eq!((latent.shape.kept(), latent.shape.query_dim()), (28, 20));
        assert!(other.qkv_bias && other.o_bias && !other.rotates_neighbours);
        assert_eq!(
            of("DeepseekV3ForCausalLM", json!({"model_type": "kimi_k2"})).family,
            Family::DeepseekV3
        );
    }

    #[test]
    fn yarn_changes_the_factor_of_scores() {
        let scale = |rope: Value| of(V2, json!({"rope_scaling": rope})).attention_scale * 192.0f32.sqrt();
        let yarn = |changes: Value| {
            let mut rope = json!({"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096});
            rope.as_object_mut()
                .unwrap()
                .extend(changes.as_object().unwrap().clone());
            scale(rope)
        };
        let near = |found: f32, want: f64| assert!((f64::from(found) - want).abs() < 1e-5, "{found} {want}");
        near(
            yarn(json!({"mscale": 0.707, "mscale_all_dim": 0.707})),
            1.260_804_f64.powi(2),
        );
        near(yarn(json!({"mscale_all_dim": 1.0})), 1.368_888_f64.powi(2));
        for rope in [
            json!({"mscale": 2.0}),
            json!({"mscale_all_dim": 0}),
            json!({"factor": 1, "mscale_all_dim": 1.0}),
        ] {
            near(yarn(rope), 1.0);
        }
        near(scale(json!({"type": "default", "mscale_all_dim": 1.0})), 1.0);
    }

    #[test]
    fn experts_are_those_of_the_class() {
        let v2 = of(V2, json!({"first_k_dense_replace": 1})).experts.unwrap();
        assert_eq!(
            (v2.count, v2.intermediate_size, v2.routing.score),
            (64, 1407, Score::Softmax)
        );
        assert!(!v2.routing.renormalized && !v2.has_correction && v2.routing.groups.is_none());
        let shared = |intermediate_size| {
            Some(SharedExpert {
                intermediate_size,
                is_weighted: false,
            })
        };
        assert_eq!(v2.shared, shared(2 * 1407));
        assert_eq!(v2.layers, [false, true, true, true, true]);
        let limited = json!({"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3,
            "routed_scaling_factor": 16.0, "scoring_func": "softmax"});
        let limited = of(V2, limited).experts.unwrap();
        let groups = |count, chosen, best| Some(ExpertGroups { count, chosen, best });
        assert_eq!((limited.routing.groups, limited.routing.scale), (groups(8, 3, 1), 16.0));
        assert_eq!(limited.layers, [true; 5]);

        let v3 = of(V3, json!({})).experts.unwrap();
        assert_eq!(
            (v3.count, v3.intermediate_size, v3.routing.score),
            (256, 2048, Score::Sigmoid)
        );
        assert_eq!(
            (v3.routing.groups, v3.routing.scale, v3.shared),
            (groups(8, 4, 2), 2.5, shared(2048))
        );
        assert!(v3.routing.renormalized && v3.has_correction);
        assert_eq!(v3.layers, [false, false, false, true, true]);
        let one = json!({"n_group": 1, "topk_group": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"});
        assert_eq!(of(V3, one).experts.unwrap().routing.groups, None);

        let glm = of(GLM, json!({"first_k_dense_replace": 1, "head_dim": 64}))
            .experts
            .unwrap();
        assert_eq!((glm.count, glm.routing.scale, glm.routing.groups), (64, 1.8, None));
        assert_eq!(glm.layers, [false, true, true, true, true]);
        let types = ["sparse", "dense", "dense", "sparse", "dense"];
        let listed = of(GLM, json!({"mlp_layer_types": types, "first_k_dense_replace": 3}));
        assert_eq!(listed.experts.unwrap().layers, [true, false, false, true, false]);
        let groups_of_glm = json!({"n_routed_experts": 8, "moe_intermediate_size": 40, "n_group": 4, "topk_group": 2,
            "num_key_value_heads": 2});
        let other = of("Glm4MoeForCausalLM", groups_of_glm).experts.unwrap();
        assert_eq!(other.routing.groups, groups(4, 2, 2));
    }

    #[test]
    fn what_is_computed_in_several_ways_or_not_at_all_is_refused() {
        for (architecture, changes, words) in [
            (V2, json!({"norm_topk_prob": true}), "option `norm_topk_prob` (true)"),
            (V2, json!({"mlp_bias": true}), "option `mlp_bias` (true)"),
            (V2, json!({"use_mla": false}), "option `use_mla` (false)"),
            (
                V2,
                json!({"topk_method": "noaux_tc"}),
                "`topk_method` \"noaux_tc\" is not supported",
            ),
            (
                V2,
                json!({"scoring_func": "sigmoid"}),
                "`scoring_func` \"sigmoid\" is not supported",
            ),
            (
                V2,
                json!({"num_experts_per_tok": null}),
                "`num_experts_per_tok` is missing",
            ),
            (
                V2,
                json!({"topk_method": "group_limited_greedy"}),
                "`n_group` is missing",
            ),
            (
                V3,
                json!({"topk_method": "greedy"}),
                "`topk_method` \"greedy\" is not supported",
            ),
            (V3, json!({"moe_layer_freq": 2}), "`moe_layer_freq` 2 is not supported"),
            (
                V3,
                json!({"num_key_value_heads": 2}),
                "`num_key_value_heads` 2 is not supported",
            ),
            (
                V3,
                json!({"qk_rope_head_dim": 7}),
                "`qk_rope_head_dim` 7 is not supported",
            ),
            (V3, json!({"q_lora_rank": 0}), "`q_lora_rank` is 0"),
            (V3, json!({"partial_rotary_factor": 0.5}), "`partial_rotary_factor` 0.5"),
            (V3, json!({"n_group": 3}), "`topk_group` is 4, more than the 3 groups"),
            (V3, json!({"n_group": 5}), "256 experts are not in 5 groups"),
            (V3, json!({"n_group": 256}), "256 experts are not in 256 groups"),
            (
                V3,
                json!({"n_group": 64, "topk_group": 1, "num_experts_per_tok": 5}),
                "`num_experts_per_tok` is 5, more than 1 groups of 4 experts",
            ),
            (
                V3,
                json!({"quantization_config": {"quant_method": "hqq"}}),
                "`quantization_config`",
            ),
            (
                V3,
                json!({"rope_scaling": {"type": "linear", "mscale_all_dim": 1.0}}),
                "no `factor`",
            ),
            (
                GLM,
                json!({"head_dim": 32}),
                "`qk_rope_head_dim` is 64, and `head_dim` is 32",
            ),
            (
                GLM,
                json!({"first_k_dense_replace": 2}),
                "`first_k_dense_replace` 2 without",
            ),
            (
                GLM,
                json!({"mlp_layer_types": ["dense"]}),
                "`mlp_layer_types` is [\"dense\"]",
            ),
            (
                "LlamaForCausalLM",
                json!({"kv_lora_rank": 512}),
                "option `kv_lora_rank` (512)",
            ),
        ] {
            let error = parse(architecture, changes.clone()).expect_err(&changes.to_string());
            assert!(error.contains(words) && !error.contains('\n'), "{changes}: {error}");
        }
        let groups = json!({"n_routed_experts": 8, "moe_intermediate_size": 40, "n_group": 4, "topk_group": 2,
            "num_key_value_heads": 2, "hidden_size": 256});
        let groups = of("Glm4MoeForCausalLM", groups);
        assert!(groups.experts.clone().unwrap().routing.groups.is_some());
        assert!(groups.refuse_on_gpu().is_ok());
        for runs in [
            json!({}),
            json!({"kv_lora_rank": 48, "qk_rope_head_dim": 16}),
            json!({"kv_lora_rank": 288, "qk_rope_head_dim": 32}),
        ] {
            assert!(of(V3, runs.clone()).refuse_on_gpu().is_ok(), "{runs}");
        }
        // Both must be multiples of 16 or, beyond 128 and 256, of 32.
        for refused in [
            json!({"kv_lora_rank": 40}),
            json!({"kv_lora_rank": 272}),
            json!({"qk_rope_head_dim": 48}),
            json!({"kv_lora_rank": 544}),
            json!({"qk_rope_head_dim": 128}),
        ] {
            let error = of(V3, refused.clone()).refuse_on_gpu().unwrap_err().to_string();
            assert!(
                error.contains("the model keeps latents of") && error.contains("--device cpu"),
                "{refused}: {error}"
            );
        }
    }
}
