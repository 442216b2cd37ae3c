//! Reads Nemotron-H: layers that are a recurrence, attention, an MLP or experts alone.

use serde_json::Value;

use super::reader::{Reader, short};
use super::{Config, Family};
use crate::device::{RecurrentKind, RecurrentShape};
use crate::model::error::ModelError;

/// What a layer consists of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerParts {
    /// What mixes tokens, and an MLP or experts behind it.
    Both,
    /// Attention or a recurrence alone.
    Mixer,
    /// An MLP or experts alone.
    Mlp,
}

/// What one of Nemotron-H's layers is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Block {
    Mamba,
    Attention,
    Mlp,
    Experts,
}

/// Other names of keys, which the family's class in transformers prefers to those that it writes.
const OTHER_NAMES: [&str; 9] = [
    "mamba_chunk_size",
    "mamba_conv_bias",
    "mamba_d_conv",
    "mamba_dt_init_floor",
    "mamba_dt_limit",
    "mamba_dt_max",
    "mamba_dt_min",
    "mamba_expand",
    "mamba_n_groups",
];

impl Config {
    /// Whether a layer has attention or a recurrence.
    pub fn has_mixer(&self, layer: usize) -> bool {
        self.parts[layer] != LayerParts::Mlp
    }

    /// Whether a layer has an MLP or experts.
    pub fn has_mlp(&self, layer: usize) -> bool {
        self.parts[layer] != LayerParts::Mixer
    }

    /// Whether layers are one part alone.
    pub(in crate::model) fn has_lone_parts(&self) -> bool {
        self.parts.iter().any(|parts| *parts != LayerParts::Both)
    }
}

impl Reader<'_> {
    /// Number of a model's layers.
    pub(super) fn layer_count(&self, family: Family) -> Result<usize, ModelError> {
        match family {
            Family::NemotronH => Ok(self.blocks()?.len()),
            _ => self.required_size("num_hidden_layers", 1 << 10),
        }
    }

    /// What each layer consists of.
    pub(super) fn parts(&self, family: Family, count: usize) -> Result<Vec<LayerParts>, ModelError> {
        if family != Family::NemotronH {
            return Ok(vec![LayerParts::Both; count]);
        }
        let parts = |block: &Block| match block {
            Block::Mamba | Block::Attention => LayerParts::Mixer,
            Block::Mlp | Block::Experts => LayerParts::Mlp,
        };
        Ok(self.blocks()?.iter().map(parts).collect())
    }

    /// Nemotron-H's layers, as names or as letters.
    pub(super) fn blocks(&self) -> Result<Vec<Block>, ModelError> {
        let mut found: Option<Vec<Block>> = None;
        for key in ["layers_block_type", "layer_types", "hybrid_override_pattern"] {
            let Some(value) = self.get(key) else { continue };
            let names: Vec<String> = match value {
                Value::String(letters) => letters.chars().map(String::from).collect(),
                Value::Array(names) => names
                    .iter()
                    .map(|name| name.as_str().unwrap_or("").to_owned())
                    .collect(),
                _ => Vec::new(),
            };
            let block = |name: &String| match name.as_str() {
                "M" | "mamba" | "linear_attention" => Some(Block::Mamba),
                "*" | "attention" | "full_attention" => Some(Block::Attention),
                "-" | "mlp" => Some(Block::Mlp),
                "E" | "moe" => Some(Block::Experts),
                _ => None,
            };
            let blocks: Option<Vec<Block>> = names.iter().map(block).collect();
            let blocks = blocks.filter(|blocks| (1..=1 << 10).contains(&blocks.len()));
            let blocks =
                blocks.ok_or_else(|| self.unsupported(format!("`{key}` {} is not supported", short(value))))?;
            if found.as_ref().is_some_and(|found| *found != blocks) {
                return Err(self.broken(format!("`{key}` and other keys of layers name different layers")));
            }
            found = Some(blocks);
        }
        let blocks = found.ok_or_else(|| self.broken("`hybrid_override_pattern` is missing".to_owned()))?;
        match self.size("num_hidden_layers", 1 << 10)? {
            Some(count) if count != blocks.len() => Err(self.broken(format!(
                "`num_hidden_layers` is {count}, and there are kinds of {} layers",
                blocks.len()
            ))),
            _ if !blocks.contains(&Block::Attention) => {
                Err(self.unsupported("a model without any layer of attention is not supported".to_owned()))
            }
            _ => Ok(blocks),
        }
    }

    /// Refuses what Nemotron-H's class does not compute, or what programs compute in different ways.
    pub(super) fn check_nemotron(&self, family: Family) -> Result<(), ModelError> {
        if family != Family::NemotronH {
            return Ok(());
        }
        let refused = |what: String| Err(self.unsupported(format!("{what} is not supported for {}", family.name())));
        for key in ["attention_bias", "mamba_proj_bias", "mlp_bias", "use_bias"] {
            if self.flag(key)?.unwrap_or(false) {
                return refused(format!("`{key}`"));
            }
        }
        if let Some(key) = OTHER_NAMES.iter().find(|key| self.get(key).is_some()) {
            return refused(format!("option `{key}`"));
        }
        if let Some(act) = self
            .text("mamba_hidden_act")?
            .filter(|act| !["silu", "swish"].contains(act))
        {
            return refused(format!("`mamba_hidden_act` {act:?}"));
        }
        if self.get("moe_latent_size").is_some() {
            return refused("option `moe_latent_size` (experts that read a projection of the stream)".to_owned());
        }
        if let Some(shared) = self
            .size_or_zero("n_shared_experts", 1 << 6)?
            .filter(|count| *count != 1)
        {
            return refused(format!("`n_shared_experts` {shared}"));
        }
        // The class takes `layer_norm_epsilon` and the sizes of `head_dim`.
        let epsilon = self.number("layer_norm_epsilon")?.unwrap_or(1e-5);
        for key in ["rms_norm_eps", "norm_eps"] {
            if let Some(other) = self.number(key)?.filter(|other| *other != epsilon) {
                return Err(self.broken(format!("`layer_norm_epsilon` is {epsilon}, and `{key}` is {other}")));
            }
        }
        for (other, key, default) in [
            ("attention_head_dim", "head_dim", 128),
            ("mamba_state_dim", "ssm_state_size", 128),
            ("mamba_num_groups", "n_groups", 8),
        ] {
            let size = self.size_or(key, 1 << 10, Some(default))?;
            if let Some(found) = self.size(other, 1 << 10)?.filter(|found| *found != size) {
                return Err(self.broken(format!("`{other}` is {found}, and `{key}` is {size}")));
            }
        }
        Ok(())
    }

    /// The shape of Nemotron-H's recurrent layers.
    pub(super) fn nemotron_shape(&self) -> Result<RecurrentShape, ModelError> {
        let keys = [
            ("n_groups", 8),
            ("mamba_num_heads", 128),
            ("ssm_state_size", 128),
            ("mamba_head_dim", 64),
            ("conv_kernel", 4),
        ];
        self.recurrent_shape(RecurrentKind::Mamba2, keys)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::LayerParts;
    use crate::device::{Activation, RecurrentKind, RecurrentShape, Score};
    use crate::model::config::{Config, SharedExpert, testing};

    fn parse(changes: Value) -> Result<Config, String> {
        let keys = json!({
            "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hidden_size": 64,
            "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16,
            "hybrid_override_pattern": "M-*EM", "mamba_num_heads": 6, "mamba_head_dim": 10, "n_groups": 3,
            "ssm_state_size": 12, "moe_intermediate_size": 40, "moe_shared_expert_intermediate_size": 56,
            "vocab_size": 100
        });
        testing::parse(keys, &changes)
    }

    #[test]
    fn layers_are_one_part_each() {
        let config = parse(
            json!({"num_hidden_layers": 5, "rms_norm_eps": 1e-5, "n_routed_experts": 9, "expand": 2,
            "routed_scaling_factor": 2.5, "time_step_min": 0.001, "time_step_limit": [0.0, "Infinity"]}),
        );
        let config = config.unwrap();
        assert_eq!(config.warnings, [] as [&str; 0]);
        let (mixer, mlp) = (LayerParts::Mixer, LayerParts::Mlp);
        assert_eq!(config.parts, [mixer, mlp, mixer, mlp, mixer]);
        assert_eq!(
            [0, 1, 2, 3, 4].map(|layer| config.has_kv(layer)),
            [false, false, true, false, false]
        );
        let recurrent = config.recurrent.clone().unwrap();
        let shape = RecurrentShape {
            kind: RecurrentKind::Mamba2,
            key_heads: 3,
            value_heads: 6,
            key_dim: 12,
            value_dim: 10,
            conv_width: 4,
        };
        assert_eq!(
            (recurrent.shape, recurrent.conv_bias, recurrent.norm_eps),
            (shape, true, 1e-5)
        );
        assert_eq!(recurrent.layers, [true, false, false, false, true]);
        let experts = config.experts.clone().unwrap();
        assert_eq!(experts.layers, [false, false, false, true, false]);
        assert_eq!(
            (experts.count, experts.intermediate_size, experts.has_correction),
            (9, 40, true)
        );
        let shared = SharedExpert {
            intermediate_size: 56,
            is_weighted: false,
        };
        assert_eq!(experts.shared, Some(shared));
        let routing = experts.routing;
        assert_eq!(
            (routing.per_token, routing.score, routing.scale),
            (2, Score::Sigmoid, 2.5)
        );
        assert!(routing.renormalized && routing.groups.is_none());
        assert_eq!(
            (config.activation, config.rotates.clone()),
            (Activation::SquaredRelu, vec![false; 5])
        );
        // Heads of sizes that fill no sixteen.
        let odd = config.refuse_on_gpu().unwrap_err().to_string();
        assert!(odd.contains("recurrent layers with 6 heads of 12 x 10"), "{odd}");
        let names = json!({"hybrid_override_pattern": null, "use_conv_bias": false,
            "layers_block_type": ["mamba", "mlp", "full_attention", "moe", "linear_attention"]});
        let named = parse(names).unwrap();
        assert_eq!((named.parts, named.recurrent.unwrap().conv_bias), (config.parts, false));
        let attention = parse(json!({"hybrid_override_pattern": "*-"})).unwrap();
        assert!(attention.recurrent.is_none() && attention.experts.is_none());
        assert!(attention.refuse_on_gpu().is_ok());
    }

    #[test]
    fn what_the_class_does_not_compute_is_refused_by_name() {
        for (changes, words) in [
            (
                json!({"hybrid_override_pattern": "M|*"}),
                "`hybrid_override_pattern` \"M|*\" is not supported",
            ),
            (json!({"hybrid_override_pattern": ""}), "`hybrid_override_pattern` \"\""),
            (
                json!({"hybrid_override_pattern": null}),
                "`hybrid_override_pattern` is missing",
            ),
            (
                json!({"hybrid_override_pattern": "M-"}),
                "without any layer of attention",
            ),
            (
                json!({"layers_block_type": ["mlp", "attention"]}),
                "name different layers",
            ),
            (
                json!({"num_hidden_layers": 6}),
                "`num_hidden_layers` is 6, and there are kinds of 5 layers",
            ),
            (json!({"use_bias": true}), "`use_bias` is not supported for Nemotron-H"),
            (json!({"mlp_bias": true}), "`mlp_bias` is not supported"),
            (json!({"mamba_d_conv": 3}), "option `mamba_d_conv` is not supported"),
            (
                json!({"mlp_hidden_act": "silu"}),
                "`mlp_hidden_act` `silu` is not supported; `relu2` is",
            ),
            (json!({"mamba_hidden_act": "gelu"}), "`mamba_hidden_act` \"gelu\""),
            (json!({"moe_latent_size": 16}), "option `moe_latent_size`"),
            (json!({"n_shared_experts": 2}), "`n_shared_experts` 2"),
            (
                json!({"moe_shared_expert_intermediate_size": 0}),
                "`moe_shared_expert_intermediate_size` is 0",
            ),
            (
                json!({"norm_eps": 1e-6}),
                "`layer_norm_epsilon` is 0.00001, and `norm_eps` is 0.000001",
            ),
            (
                json!({"mamba_state_dim": 16}),
                "`mamba_state_dim` is 16, and `ssm_state_size` is 12",
            ),
            (
                json!({"attention_head_dim": 32}),
                "`attention_head_dim` is 32, and `head_dim` is 16",
            ),
            (
                json!({"time_step_limit": [0.001, "Infinity"]}),
                "`time_step_limit` [0.001,\"Infinity\"]",
            ),
            (
                json!({"n_groups": 4}),
                "`mamba_num_heads` 6 is not a multiple of `n_groups` 4",
            ),
        ] {
            let error = parse(changes).unwrap_err();
            assert!(error.contains(words) && !error.contains('\n'), "{error}");
        }
    }
}
