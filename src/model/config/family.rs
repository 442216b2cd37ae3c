//! Model families: their names, and what their classes in transformers take for absent keys.

use super::reader::{Reader, cut, short};
use crate::device::Activation;
use crate::model::error::ModelError;

/// A supported model family. It decides defaults and tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    Llama,
    Mistral,
    Ministral,
    Ministral3,
    Qwen2,
    Qwen2Moe,
    Qwen3,
    Qwen3Moe,
    Qwen3Next,
    Qwen3_5,
    Qwen3_5Moe,
    Mixtral,
    Olmoe,
    GptOss,
    Gemma,
    Gemma2,
    Gemma3,
    Gemma4,
    SmolLm3,
    Granite,
    GraniteMoe,
    GraniteMoeShared,
    GraniteMoeHybrid,
    SeedOss,
    Phi3,
    Glm,
    Glm4,
    Glm4Moe,
    Ernie4_5,
    Ernie4_5Moe,
    Exaone4,
    Olmo2,
    Olmo3,
    Cohere,
    Cohere2,
    DeepseekV2,
    DeepseekV3,
    Glm4MoeLite,
    MiniMaxM2,
    NemotronH,
    Llama4,
}

/// Each family with its name, its `model_type` and its `architectures`.
const FAMILIES: [(Family, &str, &str, &str); 41] = [
    (Family::Llama, "Llama", "llama", "LlamaForCausalLM"),
    (Family::Mistral, "Mistral", "mistral", "MistralForCausalLM"),
    (Family::Ministral, "Ministral", "ministral", "MinistralForCausalLM"),
    (Family::Ministral3, "Ministral 3", "ministral3", "Ministral3ForCausalLM"),
    (Family::Qwen2, "Qwen 2", "qwen2", "Qwen2ForCausalLM"),
    (Family::Qwen2Moe, "Qwen 2 MoE", "qwen2_moe", "Qwen2MoeForCausalLM"),
    (Family::Qwen3, "Qwen 3", "qwen3", "Qwen3ForCausalLM"),
    (Family::Qwen3Moe, "Qwen 3 MoE", "qwen3_moe", "Qwen3MoeForCausalLM"),
    (Family::Qwen3Next, "Qwen3-Next", "qwen3_next", "Qwen3NextForCausalLM"),
    (Family::Qwen3_5, "Qwen 3.5", "qwen3_5_text", "Qwen3_5ForCausalLM"),
    (
        Family::Qwen3_5Moe,
        "Qwen 3.5 MoE",
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
    ),
    (Family::Mixtral, "Mixtral", "mixtral", "MixtralForCausalLM"),
    (Family::Olmoe, "OLMoE", "olmoe", "OlmoeForCausalLM"),
    (Family::GptOss, "gpt-oss", "gpt_oss", "GptOssForCausalLM"),
    (Family::Gemma, "Gemma", "gemma", "GemmaForCausalLM"),
    (Family::Gemma2, "Gemma 2", "gemma2", "Gemma2ForCausalLM"),
    (Family::Gemma3, "Gemma 3", "gemma3_text", "Gemma3ForCausalLM"),
    (Family::Gemma4, "Gemma 4", "gemma4_text", "Gemma4ForCausalLM"),
    (Family::SmolLm3, "SmolLM3", "smollm3", "SmolLM3ForCausalLM"),
    (Family::Granite, "Granite", "granite", "GraniteForCausalLM"),
    (Family::GraniteMoe, "Granite MoE", "granitemoe", "GraniteMoeForCausalLM"),
    (
        Family::GraniteMoeShared,
        "Granite MoE with shared experts",
        "granitemoeshared",
        "GraniteMoeSharedForCausalLM",
    ),
    (
        Family::GraniteMoeHybrid,
        "Granite 4",
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
    ),
    (Family::SeedOss, "Seed-OSS", "seed_oss", "SeedOssForCausalLM"),
    (Family::Phi3, "Phi-3", "phi3", "Phi3ForCausalLM"),
    (Family::Glm, "GLM", "glm", "GlmForCausalLM"),
    (Family::Glm4, "GLM-4", "glm4", "Glm4ForCausalLM"),
    (Family::Glm4Moe, "GLM-4.5", "glm4_moe", "Glm4MoeForCausalLM"),
    (Family::Ernie4_5, "ERNIE 4.5", "ernie4_5", "Ernie4_5ForCausalLM"),
    (
        Family::Ernie4_5Moe,
        "ERNIE 4.5 MoE",
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
    ),
    (Family::Exaone4, "EXAONE 4", "exaone4", "Exaone4ForCausalLM"),
    (Family::Olmo2, "OLMo 2", "olmo2", "Olmo2ForCausalLM"),
    (Family::Olmo3, "OLMo 3", "olmo3", "Olmo3ForCausalLM"),
    (Family::Cohere, "Command R", "cohere", "CohereForCausalLM"),
    (Family::Cohere2, "Command R7B", "cohere2", "Cohere2ForCausalLM"),
    (
        Family::DeepseekV2,
        "DeepSeek-V2",
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
    ),
    (
        Family::DeepseekV3,
        "DeepSeek-V3",
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
    ),
    (
        Family::Glm4MoeLite,
        "GLM-4.7-Flash",
        "glm4_moe_lite",
        "Glm4MoeLiteForCausalLM",
    ),
    (Family::MiniMaxM2, "MiniMax M2", "minimax_m2", "MiniMaxM2ForCausalLM"),
    (Family::NemotronH, "Nemotron-H", "nemotron_h", "NemotronHForCausalLM"),
    (Family::Llama4, "Llama 4", "llama4_text", "Llama4ForCausalLM"),
];

/// Other names of families, each a `model_type` of checkpoints whose own code is the family's.
const OTHER_TYPES: [(&str, Family); 1] = [("kimi_k2", Family::DeepseekV3)];

/// Models that see images, each with the families that its text part may have. A text part that
/// names none has the first.
const MULTIMODAL: [(&str, &str, &[Family]); 6] = [
    ("llama4", "Llama4ForConditionalGeneration", &[Family::Llama4]),
    ("gemma3", "Gemma3ForConditionalGeneration", &[Family::Gemma3]),
    ("gemma4", "Gemma4ForConditionalGeneration", &[Family::Gemma4]),
    ("qwen3_5", "Qwen3_5ForConditionalGeneration", &[Family::Qwen3_5]),
    (
        "qwen3_5_moe",
        "Qwen3_5MoeForConditionalGeneration",
        &[Family::Qwen3_5Moe],
    ),
    (
        "mistral3",
        "Mistral3ForConditionalGeneration",
        &[Family::Mistral, Family::Ministral, Family::Ministral3],
    ),
];

impl Family {
    /// The family with this `model_type` or architecture.
    fn by_name(name: &str) -> Option<Family> {
        let mut families = FAMILIES.iter();
        let found = families.find_map(|(family, _, kind, class)| (name == *kind || name == *class).then_some(*family));
        found.or_else(|| {
            OTHER_TYPES
                .iter()
                .find(|(kind, _)| name == *kind)
                .map(|(_, family)| *family)
        })
    }

    pub(super) fn is_gemma(self) -> bool {
        matches!(self, Family::Gemma | Family::Gemma2 | Family::Gemma3 | Family::Gemma4)
    }

    /// Whether layers without attention are recurrent.
    pub(super) fn has_recurrent_layers(self) -> bool {
        self.has_delta_layers() || matches!(self, Family::GraniteMoeHybrid | Family::NemotronH)
    }

    /// Whether recurrent layers are delta networks, and attention has gates.
    pub(super) fn has_delta_layers(self) -> bool {
        matches!(self, Family::Qwen3Next | Family::Qwen3_5 | Family::Qwen3_5Moe)
    }

    pub(super) fn is_cohere(self) -> bool {
        matches!(self, Family::Cohere | Family::Cohere2)
    }

    pub(super) fn is_granite(self) -> bool {
        matches!(
            self,
            Family::Granite | Family::GraniteMoe | Family::GraniteMoeShared | Family::GraniteMoeHybrid
        )
    }

    pub(super) fn is_ernie(self) -> bool {
        matches!(self, Family::Ernie4_5 | Family::Ernie4_5Moe)
    }

    /// Whether dimensions 2d and 2d + 1 of a head rotate as a pair.
    pub(super) fn rotates_neighbours(self) -> bool {
        self.is_cohere() || self.is_ernie() || matches!(self, Family::Glm | Family::Glm4 | Family::Llama4)
    }

    pub fn name(self) -> &'static str {
        let names = FAMILIES.iter().find(|(family, ..)| *family == self);
        names.map_or("", |(_, name, ..)| name)
    }

    /// Whether attention and MLP read the residual stream as it is, and only what they write is
    /// normalised.
    pub(super) fn has_norms_behind_alone(self) -> bool {
        matches!(self, Family::Exaone4 | Family::Olmo2 | Family::Olmo3)
    }

    pub(super) fn vocab_size(self) -> Option<usize> {
        match self {
            Family::Gemma2 => Some(256_000),
            Family::Gemma3 => Some(262_208),
            Family::Gemma4 => Some(262_144),
            _ => None,
        }
    }

    pub(super) fn kv_heads(self) -> Option<usize> {
        match self {
            Family::Mistral
            | Family::Mixtral
            | Family::GptOss
            | Family::Ministral
            | Family::Ministral3
            | Family::SeedOss
            | Family::Glm4Moe
            | Family::MiniMaxM2
            | Family::NemotronH
            | Family::Llama4 => Some(8),
            Family::Gemma | Family::Qwen2Moe => Some(16),
            Family::Gemma2
            | Family::Gemma3
            | Family::Gemma4
            | Family::SmolLm3
            | Family::Qwen3Moe
            | Family::Qwen3_5
            | Family::Ernie4_5Moe => Some(4),
            Family::Glm | Family::Glm4 | Family::Ernie4_5 | Family::Qwen3Next | Family::Qwen3_5Moe => Some(2),
            Family::Exaone4 => Some(32),
            _ => None,
        }
    }

    pub(super) fn head_dim(self) -> Option<usize> {
        match self {
            Family::GptOss => Some(64),
            Family::Gemma | Family::Gemma2 | Family::Gemma3 | Family::Gemma4 => Some(256),
            _ if self.has_delta_layers() => Some(256),
            Family::Qwen3
            | Family::Ministral3
            | Family::SeedOss
            | Family::Glm
            | Family::Glm4
            | Family::Ernie4_5
            | Family::MiniMaxM2
            | Family::NemotronH
            | Family::Llama4 => Some(128),
            _ => None,
        }
    }

    fn max_position_embeddings(self) -> u32 {
        match self {
            Family::Llama
            | Family::Granite
            | Family::GraniteMoe
            | Family::GraniteMoeShared
            | Family::GraniteMoeHybrid
            | Family::Exaone4
            | Family::Olmo2
            | Family::Olmo3
            | Family::DeepseekV2 => 2048,
            Family::Phi3 | Family::Olmoe | Family::DeepseekV3 | Family::NemotronH => 4096,
            Family::Gemma | Family::Gemma2 | Family::Cohere | Family::Cohere2 => 8192,
            Family::Qwen2
            | Family::Qwen2Moe
            | Family::Qwen3
            | Family::Qwen3Moe
            | Family::Qwen3Next
            | Family::Qwen3_5
            | Family::Qwen3_5Moe
            | Family::SmolLm3 => 32_768,
            Family::Mistral
            | Family::Mixtral
            | Family::GptOss
            | Family::Ministral
            | Family::Gemma3
            | Family::Gemma4
            | Family::Glm
            | Family::Glm4
            | Family::Glm4Moe
            | Family::Llama4
            | Family::Ernie4_5
            | Family::Ernie4_5Moe => 131_072,
            Family::MiniMaxM2 => 196_608,
            Family::Glm4MoeLite => 202_752,
            Family::Ministral3 => 262_144,
            Family::SeedOss => 524_288,
        }
    }

    pub(super) fn window(self) -> Option<u32> {
        match self {
            Family::SmolLm3 | Family::Phi3 | Family::Ministral3 | Family::Mixtral => None,
            Family::GptOss => Some(128),
            Family::Gemma4 => Some(512),
            _ => Some(4096),
        }
    }

    pub(super) fn rope_theta(self) -> f64 {
        match self {
            Family::MiniMaxM2 => 5_000_000.0,
            Family::SmolLm3 => 2_000_000.0,
            Family::Mixtral => 1_000_000.0,
            Family::GptOss => 150_000.0,
            Family::Olmo3 | Family::Llama4 | Family::Cohere | Family::Ernie4_5 | Family::Ernie4_5Moe => 500_000.0,
            _ => 10_000.0,
        }
    }

    /// The share of a head's dimensions that rotate. `None`: the family has no such key.
    pub(super) fn rotary_share(self) -> Option<f64> {
        match self {
            Family::Phi3 | Family::MiniMaxM2 => Some(1.0),
            Family::Glm | Family::Glm4 | Family::Glm4Moe => Some(0.5),
            _ if self.has_delta_layers() => Some(0.25),
            _ => None,
        }
    }

    fn norm_eps(self) -> f64 {
        match self {
            Family::Phi3
            | Family::Mixtral
            | Family::GptOss
            | Family::Olmoe
            | Family::Exaone4
            | Family::Ministral3
            | Family::Olmo2
            | Family::Olmo3
            | Family::Cohere
            | Family::Cohere2
            | Family::Glm4Moe
            | Family::Glm4MoeLite
            | Family::NemotronH
            | Family::Llama4
            | Family::Ernie4_5
            | Family::Ernie4_5Moe => 1e-5,
            Family::Glm | Family::Glm4 => 1.5625e-7,
            _ => 1e-6,
        }
    }

    pub(super) fn ties_embeddings(self) -> bool {
        self.is_gemma() || self.is_cohere() || self.is_ernie() || self == Family::SmolLm3
    }
}

/// Which projections have biases.
pub(super) struct Biases {
    pub qkv: bool,
    pub o: bool,
    pub mlp: bool,
}

/// A model's factors, and the epsilon of its norms.
pub(super) struct Scales {
    pub attention: f32,
    pub logits: f32,
    pub embedding: f32,
    pub norm_eps: f32,
    /// The epsilon as the configuration has it.
    pub stored_norm_eps: f32,
}

impl Reader<'_> {
    /// Whether query and key heads have norms.
    pub(super) fn qk_norm(&self, family: Family) -> Result<bool, ModelError> {
        match family {
            Family::Glm4Moe => Ok(self.flag("use_qk_norm")?.unwrap_or(false)),
            Family::Qwen3 | Family::Qwen3Moe | Family::Gemma3 | Family::Gemma4 | Family::Olmoe | Family::MiniMaxM2 => {
                Ok(true)
            }
            _ if family.has_delta_layers() => Ok(true),
            _ => Ok(family.has_norms_behind_alone()),
        }
    }

    /// Layers that predict further tokens, which transformers appends to the others.
    pub(super) fn mtp_layers(&self, family: Family) -> Result<usize, ModelError> {
        let key = match family {
            Family::MiniMaxM2 => "num_mtp_modules",
            _ => "num_nextn_predict_layers",
        };
        Ok(self.size_or_zero(key, 1 << 4)?.unwrap_or(0))
    }

    pub(super) fn max_position_embeddings(&self, family: Family) -> Result<u32, ModelError> {
        let positions = self.size("max_position_embeddings", 1 << 28)?;
        Ok(positions.map_or(family.max_position_embeddings(), |n| n as u32))
    }

    /// The family, and whether the model is multimodal, with its configuration in `text_config`.
    pub(super) fn family(&self) -> Result<(Family, bool), ModelError> {
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
            let family = self.family_of(name)?;
            if found.is_some_and(|f| f != family) {
                return Err(self.broken("`architectures` and `model_type` name different models".to_owned()));
            }
            found = Some(family);
        }
        found.ok_or_else(|| self.broken("neither `architectures` nor `model_type` names a model".to_owned()))
    }

    fn family_of(&self, name: &str) -> Result<(Family, bool), ModelError> {
        if let Some(family) = Family::by_name(name) {
            return Ok((family, false));
        }
        let mut multimodal = MULTIMODAL.iter();
        let Some((.., parts)) = multimodal.find(|(kind, class, _)| name == *kind || name == *class) else {
            let names: Vec<&str> = FAMILIES.iter().map(|(_, name, ..)| *name).collect();
            return Err(self.unsupported(format!(
                "architecture `{}` is not supported; supported are {}",
                cut(name),
                names.join(", ")
            )));
        };
        let text = self.get("text_config").and_then(|text| text.get("model_type"));
        let family = match text {
            None => Some(parts[0]),
            Some(text) => text
                .as_str()
                .and_then(Family::by_name)
                .filter(|family| parts.contains(family)),
        };
        let family = family.ok_or_else(|| {
            let text = text.map(short).unwrap_or_default();
            self.unsupported(format!(
                "`text_config.model_type` {text} is not supported for `{}`",
                cut(name)
            ))
        })?;
        Ok((family, true))
    }

    pub(super) fn activation(&self, family: Family) -> Result<Activation, ModelError> {
        // `swish` is another name of `silu`. The first Gemma's `gelu` means the approximation by tanh.
        let tanh = "gelu_pytorch_tanh";
        let known: &[(&str, [&str; 2])] = match family {
            Family::Gemma => &[("hidden_act", [tanh, "gelu"]), ("hidden_activation", [tanh; 2])],
            Family::Gemma2 | Family::Gemma3 | Family::Gemma4 => &[("hidden_activation", [tanh; 2])],
            Family::NemotronH => &[("mlp_hidden_act", ["relu2"; 2])],
            _ => &[("hidden_act", ["silu", "swish"])],
        };
        for (field, known) in known {
            if let Some(act) = self.text(field)?
                && !known.contains(&act)
            {
                return Err(self.unsupported(format!("`{field}` `{}` is not supported; `{}` is", cut(act), known[0])));
            }
        }
        Ok(match family {
            Family::GptOss => Activation::ClampedSwiglu {
                alpha: self.number_in("swiglu_alpha", 1e-3, 1e3)?.unwrap_or(1.702) as f32,
                limit: self.number_in("swiglu_limit", 1e-3, 1e6)?.unwrap_or(7.0) as f32,
            },
            Family::NemotronH => Activation::SquaredRelu,
            _ if family.is_gemma() => Activation::GeluTanh,
            _ => Activation::Silu,
        })
    }

    pub(super) fn biases(&self, family: Family) -> Result<Biases, ModelError> {
        let flag = |name: &str, default: bool| Ok::<_, ModelError>(self.flag(name)?.unwrap_or(default));
        let by_default = matches!(family, Family::SeedOss | Family::Glm | Family::Glm4 | Family::GptOss);
        let attention = flag("attention_bias", by_default)?;
        let (qkv, o) = match family {
            Family::Mistral
            | Family::Mixtral
            | Family::Ministral
            | Family::Ministral3
            | Family::Phi3
            | Family::MiniMaxM2
            | Family::NemotronH
            | Family::Exaone4 => (false, false),
            Family::Qwen2 => (true, false),
            Family::Qwen2Moe => (flag("qkv_bias", true)?, false),
            // `use_bias` is refused, because it stands for a bias of the output head, too.
            Family::Ernie4_5 | Family::Ernie4_5Moe => (false, false),
            Family::Glm | Family::Glm4 | Family::Glm4Moe => (attention, false),
            Family::SeedOss => (attention, flag("attention_out_bias", false)?),
            _ => (attention, attention),
        };
        let has_mlp_bias = matches!(
            family,
            Family::Llama | Family::SmolLm3 | Family::Granite | Family::SeedOss
        );
        let mlp = family == Family::GptOss || (has_mlp_bias && flag("mlp_bias", false)?);
        Ok(Biases { qkv, o, mlp })
    }

    pub(super) fn scales(&self, family: Family, hidden_size: usize, head_dim: usize) -> Result<Scales, ModelError> {
        let norm_eps = match family {
            Family::Cohere | Family::Cohere2 => "layer_norm_eps",
            Family::NemotronH => "layer_norm_epsilon",
            _ => "rms_norm_eps",
        };
        let norm_eps = self.number_in(norm_eps, 0.0, 1.0)?.unwrap_or(family.norm_eps());
        if family.is_granite() {
            let factor = |name: &str| Ok::<_, ModelError>(self.number_in(name, 1e-6, 1e6)?.unwrap_or(1.0));
            // Granite multiplies all that is added to the residual stream by m. The stream divided by
            // m needs no such factor, and its norms are those of the stream if their epsilon is
            // divided by the square of m.
            let m = factor("residual_multiplier")?;
            return Ok(Scales {
                attention: factor("attention_multiplier")? as f32,
                logits: (1.0 / factor("logits_scaling")?) as f32,
                embedding: (factor("embedding_multiplier")? / m) as f32,
                norm_eps: (norm_eps / (m * m)) as f32,
                stored_norm_eps: norm_eps as f32,
            });
        }
        if family.has_latents() {
            return Ok(Scales {
                attention: self.latent_scale(head_dim)? as f32,
                logits: 1.0,
                embedding: 1.0,
                norm_eps: norm_eps as f32,
                stored_norm_eps: norm_eps as f32,
            });
        }
        let scalar = match family {
            Family::Gemma2 | Family::Gemma3 => self.number_in("query_pre_attn_scalar", 1e-6, 1e9)?.unwrap_or(256.0),
            // Its queries and keys are normalised, and not scaled.
            Family::Gemma4 => 1.0,
            _ => head_dim as f64,
        };
        Ok(Scales {
            attention: 1.0 / (scalar as f32).sqrt(),
            logits: match family {
                Family::Cohere | Family::Cohere2 => self.number_in("logit_scale", 1e-6, 1e6)?.unwrap_or(0.0625) as f32,
                _ => 1.0,
            },
            embedding: if family.is_gemma() {
                (hidden_size as f64).sqrt() as f32
            } else {
                1.0
            },
            norm_eps: norm_eps as f32,
            stored_norm_eps: norm_eps as f32,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::{Value, json};

    use crate::device::KvSpec;
    use crate::model::config::{Config, Family, testing};
    use crate::model::rope::{LongRope, Scaling};

    fn parse(architecture: &str, changes: Value) -> Result<Config, String> {
        let keys = json!({
            "architectures": [architecture], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100
        });
        testing::parse(keys, &changes)
    }

    #[track_caller]
    fn refused(architecture: &str, changes: Value, words: &str) {
        let error = parse(architecture, changes).unwrap_err();
        assert!(error.contains(words) && !error.contains('\n'), "{error}");
    }

    #[test]
    fn granites_factors_end_in_scales_and_epsilon() {
        let factors = json!({"attention_multiplier": 0.5, "embedding_multiplier": 12.0, "residual_multiplier": 0.25,
            "logits_scaling": 8.0, "rms_norm_eps": 1e-3});
        let config = parse("GraniteForCausalLM", factors).unwrap();
        assert_eq!((config.attention_scale, config.logit_scale), (0.5, 0.125));
        assert_eq!((config.embedding_scale, config.norm_eps), (48.0, 0.016));
        // The class's defaults are factors of 1, of the dot products, too.
        let plain = parse("GraniteForCausalLM", json!({})).unwrap();
        assert_eq!((plain.attention_scale, plain.embedding_scale), (1.0, 1.0));
        refused(
            "GraniteForCausalLM",
            json!({"residual_multiplier": 0}),
            "`residual_multiplier` is 0",
        );
        refused("GraniteForCausalLM", json!({"scale_emb": 2}), "option `scale_emb` (2)");
    }

    #[test]
    fn smollm3_rotates_in_the_layers_that_its_list_or_interval_says() {
        let of = |changes| parse("SmolLM3ForCausalLM", changes).unwrap();
        assert_eq!(of(json!({})).rotates, [true, true, true, false]);
        assert_eq!(
            of(json!({"no_rope_layer_interval": 2})).rotates,
            [true, false, true, false]
        );
        let listed = json!({"no_rope_layers": [0, 1, 1, 0, 1], "use_sliding_window": true, "sliding_window": 7});
        let listed = of(listed);
        assert_eq!(listed.rotates, [false, true, true, false]);
        let (window, full) = (KvSpec::Window(7), KvSpec::Full);
        assert_eq!(listed.layers, [window, full, full, window]);
        assert_eq!(
            (0..4).map(|layer| listed.rope_of(layer)).collect::<Vec<_>>(),
            [1, 0, 0, 1]
        );
        assert_eq!(listed.rope_specs(9).len(), 2);
        for list in [json!([1, 1, 1]), json!([1, 1, 1, 2]), json!("1111")] {
            refused(
                "SmolLM3ForCausalLM",
                json!({"no_rope_layers": list}),
                "`no_rope_layers` is",
            );
        }
        refused(
            "LlamaForCausalLM",
            json!({"no_rope_layers": [1, 1, 1, 0]}),
            "option `no_rope_layers`",
        );
    }

    #[test]
    fn parts_of_heads_rotate_where_the_family_has_them() {
        let of = |architecture, changes| parse(architecture, changes).unwrap();
        let glm = of("Glm4ForCausalLM", json!({}));
        assert_eq!((glm.rotary_dims, glm.rotates_neighbours), (8, true));
        assert!(glm.qkv_bias && !glm.o_bias && glm.post_norms && glm.fused_gate_up && !glm.fused_qkv);
        assert!(!of("GlmForCausalLM", json!({})).post_norms);
        let inner = json!({"partial_rotary_factor": 0.75, "rope_parameters": {"partial_rotary_factor": 0.25}});
        let phi = of("Phi3ForCausalLM", inner);
        assert_eq!((phi.rotary_dims, phi.rotates_neighbours), (4, false));
        assert!(phi.fused_qkv && phi.fused_gate_up && !phi.qkv_bias);
        for share in [0.0, 0.2, 1.5] {
            refused(
                "Phi3ForCausalLM",
                json!({"partial_rotary_factor": share}),
                "`partial_rotary_factor`",
            );
        }
        refused(
            "GraniteForCausalLM",
            json!({"partial_rotary_factor": 0.5}),
            "`partial_rotary_factor` 0.5 is not supported",
        );
    }

    #[test]
    fn longrope_has_a_factor_for_each_pair() {
        let of = |short: Value, kind: &str| {
            let rope = json!({"type": kind, "short_factor": short, "long_factor": [2.0, 3.0]});
            parse(
                "Phi3ForCausalLM",
                json!({"partial_rotary_factor": 0.25, "max_position_embeddings": 131_072, "rope_scaling": rope}),
            )
        };
        let scaling = of(json!([1, 1.5]), "su").unwrap().rope.scaling;
        let Scaling::LongRope(LongRope {
            short_factors,
            attention_factor,
            pretrained_tokens,
            ..
        }) = scaling
        else {
            panic!("{scaling:?}")
        };
        // Phi-3's class has a default of the pretrained length.
        assert_eq!((short_factors, pretrained_tokens), (vec![1.0, 1.5], 4096));
        assert!((attention_factor - 1.190_238_f64).abs() < 1e-6);
        for short in [json!([1.0]), json!([1.0, 0.0]), json!(["a", 1.0]), json!(3)] {
            let error = of(short, "longrope").unwrap_err();
            assert!(error.contains("`short_factor` is"), "{error}");
        }
        assert!(of(Value::Null, "longrope").unwrap_err().contains("no `short_factor`"));
    }

    #[test]
    fn a_text_part_has_a_family_of_its_own() {
        let of = |text: Value| {
            let whole = json!({"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3",
                "image_token_index": 10, "vision_config": {"a": 1}, "text_config": text});
            Config::parse(Path::new("config.json"), &whole.to_string()).map_err(|e| e.to_string())
        };
        let text = |kind: &str| {
            json!({"model_type": kind, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 9,
            "num_hidden_layers": 2, "num_attention_heads": 8, "sliding_window": null, "tie_word_embeddings": false})
        };
        let mistral = of(text("mistral")).unwrap();
        assert_eq!(
            (mistral.family, &mistral.layers[..]),
            (Family::Mistral, &[KvSpec::Full; 2][..])
        );
        assert!(
            !mistral.tied_embeddings && mistral.warnings.is_empty(),
            "{:?}",
            mistral.warnings
        );
        assert_eq!(of(text("ministral")).unwrap().family, Family::Ministral);
        let error = of(text("llama")).unwrap_err();
        assert!(
            error.contains("`text_config.model_type` \"llama\" is not supported"),
            "{error}"
        );
    }

    #[test]
    fn exaone_rotates_in_windows_or_everywhere() {
        let of = |changes| parse("Exaone4ForCausalLM", changes).unwrap();
        let (window, full) = (KvSpec::Window(4096), KvSpec::Full);
        let hybrid = of(json!({}));
        assert_eq!(hybrid.layers, [window, window, window, full]);
        assert_eq!(hybrid.rotates, [true, true, true, false]);
        assert!(!hybrid.pre_norms && hybrid.post_norms && hybrid.qk_norm);
        let plain = of(json!({"sliding_window": null}));
        assert_eq!(
            (&plain.layers[..], &plain.rotates[..]),
            (&[full; 4][..], &[true; 4][..])
        );
        let types = json!([
            "sliding_attention",
            "full_attention",
            "full_attention",
            "sliding_attention"
        ]);
        let listed = of(json!({"layer_types": types, "sliding_window_pattern": "LLLG"}));
        assert_eq!(listed.rotates, [true, false, false, true]);
        refused(
            "Exaone4ForCausalLM",
            json!({"sliding_window_pattern": "LLLG"}),
            "`sliding_window_pattern` is \"LLLG\"",
        );
    }

    #[test]
    fn ministral3_ends_where_its_queries_would_be_scaled() {
        let of = |rope: Value| parse("Ministral3ForCausalLM", json!({"rope_parameters": rope}));
        let rope = |beta: Value| {
            json!({"type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0,
            "original_max_position_embeddings": 16384, "max_position_embeddings": 262_144, "mscale": 1.0,
            "mscale_all_dim": 1.0, "llama_4_scaling_beta": beta})
        };
        let config = of(rope(json!(0.1))).unwrap();
        assert_eq!(
            (config.max_position_embeddings, config.context_limit()),
            (16_384, 16_384)
        );
        assert!(
            matches!(&config.warnings[..], [warning] if warning.contains("`llama_4_scaling_beta`")),
            "{:?}",
            config.warnings
        );
        let plain = of(rope(json!(0))).unwrap();
        assert_eq!((plain.context_limit(), plain.warnings.len()), (262_144, 0));
        assert!(of(rope(Value::Null)).unwrap_err().contains("no `llama_4_scaling_beta`"));
        refused("Ministral3ForCausalLM", json!({}), "no `llama_4_scaling_beta`");
        let other = json!({"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}});
        let other = parse("LlamaForCausalLM", other).unwrap();
        assert!(
            other.warnings[0].contains("`rope_parameters.llama_4_scaling_beta`"),
            "{:?}",
            other.warnings
        );
    }

    #[test]
    fn olmo_normalises_all_heads_together() {
        let olmo = parse("Olmo2ForCausalLM", json!({})).unwrap();
        assert!(!olmo.pre_norms && olmo.post_norms && olmo.qk_norm && olmo.joint_qk_norm);
        assert_eq!(olmo.layers, [KvSpec::Full; 4]);

        let of = |changes| parse("Olmo3ForCausalLM", changes);
        let olmo = of(json!({"rope_scaling": {"rope_type": "yarn", "factor": 8.0}})).unwrap();
        let (window, full) = (KvSpec::Window(4096), KvSpec::Full);
        assert_eq!(olmo.layers, [window, window, window, full]);
        let windows = olmo.window_rope.unwrap();
        assert_eq!((olmo.rope.theta, windows.theta), (500_000.0, 500_000.0));
        assert!(olmo.rope.scaling != Scaling::None && windows.scaling == Scaling::None);
        assert!(
            of(json!({"rope_theta": 10_000.0}))
                .unwrap_err()
                .contains("`rope_theta` is 10000")
        );
        let both = json!({"full_attention": {"rope_theta": 10_000.0}, "sliding_attention": {"rope_theta": 10_000.0}});
        assert_eq!(of(json!({"rope_parameters": both})).unwrap().rope.theta, 10_000.0);
    }

    #[test]
    fn command_r_has_layer_norms_and_a_parallel_mlp() {
        let command = parse("CohereForCausalLM", json!({"layer_norm_eps": 1e-3, "logit_scale": 0.5})).unwrap();
        assert!(command.layer_norms && command.parallel_mlp && command.rotates_neighbours && command.tied_embeddings);
        assert_eq!((command.norm_eps, command.logit_scale), (1e-3, 0.5));
        assert_eq!(parse("CohereForCausalLM", json!({})).unwrap().logit_scale, 0.0625);
        refused(
            "CohereForCausalLM",
            json!({"use_qk_norm": true}),
            "option `use_qk_norm` (true)",
        );
        refused("CohereForCausalLM", json!({"logit_scale": 0}), "`logit_scale` is 0");
        let of = |changes| parse("Cohere2ForCausalLM", changes).unwrap();
        let (window, full) = (KvSpec::Window(4096), KvSpec::Full);
        assert_eq!(of(json!({})).layers, [window, window, window, full]);
        assert_eq!(of(json!({})).rotates, [true, true, true, false]);
        let pattern = of(json!({"sliding_window_pattern": 2, "sliding_window": 9}));
        assert_eq!(pattern.rotates, [true, false, true, false]);
    }

    #[test]
    fn the_first_gemma_is_read() {
        let gemma = parse("GemmaForCausalLM", json!({"hidden_act": "gelu", "head_dim": 256})).unwrap();
        assert!(gemma.unit_offset_norms && !gemma.post_norms && gemma.tied_embeddings);
        assert_eq!((gemma.attention_scale, gemma.embedding_scale), (1.0 / 16.0, 8.0));
        refused(
            "GemmaForCausalLM",
            json!({"hidden_activation": "gelu"}),
            "`hidden_activation` `gelu` is not supported",
        );
        let seed = parse("SeedOssForCausalLM", json!({})).unwrap();
        assert!(seed.qkv_bias && !seed.o_bias && !seed.mlp_bias);
    }
}
