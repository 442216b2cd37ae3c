//! Reads the recurrent layers of a model from its configuration.

use serde_json::Value;

use super::nemotron::Block;
use super::reader::{Reader, short};
use super::{Family, Recurrent};
use crate::device::{RecurrentKind, RecurrentShape};
use crate::model::error::ModelError;

/// Maximum number of heads, and of a head's dimensions.
const HEADS_MAX: usize = 1 << 10;
/// Maximum tokens that a convolution sees.
const CONV_MAX: usize = 1 << 6;

impl Reader<'_> {
    /// The recurrent layers of a model with `count` layers. `None`: all layers have attention.
    /// `norm_eps`: the epsilon of norms, as it is stored.
    pub(super) fn recurrent(
        &self,
        family: Family,
        count: usize,
        norm_eps: f32,
    ) -> Result<Option<Recurrent>, ModelError> {
        if !family.has_recurrent_layers() {
            return Ok(None);
        }
        if family.has_delta_layers() {
            if self.flag("attn_output_gate")? == Some(false) {
                return Err(self.unsupported("`attn_output_gate` false is not supported".to_owned()));
            }
            if self.flag("attention_bias")? == Some(true) {
                return Err(self.unsupported(format!("`attention_bias` is not supported for {}", family.name())));
            }
        }
        let layers = self.recurrent_layers(family, count)?;
        if !layers.contains(&false) {
            return Err(self.unsupported("a model without any layer of `full_attention` is not supported".to_owned()));
        }
        if !layers.contains(&true) {
            return Ok(None);
        }
        let shape = if family.has_delta_layers() {
            self.delta_shape()?
        } else {
            self.check_time_steps()?;
            match family {
                Family::NemotronH => self.nemotron_shape()?,
                _ => self.mamba_shape()?,
            }
        };
        Ok(Some(Recurrent {
            shape,
            layers,
            by_key_head: family == Family::Qwen3Next,
            conv_bias: shape.kind == RecurrentKind::Mamba2 && self.conv_bias(family)?,
            norm_eps,
        }))
    }

    /// Whether convolutions of Mamba-2 have biases. Null means none.
    fn conv_bias(&self, family: Family) -> Result<bool, ModelError> {
        let key = match family {
            Family::NemotronH => "use_conv_bias",
            _ => "mamba_conv_bias",
        };
        let is_absent = !self.map.contains_key(key);
        Ok(self.flag(key)?.unwrap_or(is_absent))
    }

    /// The shape of Qwen's recurrent layers.
    fn delta_shape(&self) -> Result<RecurrentShape, ModelError> {
        let keys = [
            ("linear_num_key_heads", 16),
            ("linear_num_value_heads", 32),
            ("linear_key_head_dim", 128),
            ("linear_value_head_dim", 128),
            ("linear_conv_kernel_dim", 4),
        ];
        self.recurrent_shape(RecurrentKind::DeltaNet, keys)
    }

    /// The shape of recurrent layers. `keys` are those of the heads of keys and of values, their
    /// dimensions and the width of the convolution, each with its default.
    pub(super) fn recurrent_shape(
        &self,
        kind: RecurrentKind,
        keys: [(&str, usize); 5],
    ) -> Result<RecurrentShape, ModelError> {
        let size = |index: usize, max: usize| {
            let (name, default): (&str, usize) = keys[index];
            self.size_or(name, max, Some(default))
        };
        let shape = RecurrentShape {
            kind,
            key_heads: size(0, HEADS_MAX)?,
            value_heads: size(1, HEADS_MAX)?,
            key_dim: size(2, HEADS_MAX)?,
            value_dim: size(3, HEADS_MAX)?,
            conv_width: size(4, CONV_MAX)?,
        };
        if !shape.value_heads.is_multiple_of(shape.key_heads) {
            let [(key_heads, _), (value_heads, _), ..] = keys;
            return Err(self.broken(format!(
                "`{value_heads}` {} is not a multiple of `{key_heads}` {}",
                shape.value_heads, shape.key_heads
            )));
        }
        Ok(shape)
    }

    /// Refuses bounds of the time step: programs bound those of prompts, and not those of answers.
    fn check_time_steps(&self) -> Result<(), ModelError> {
        if let Some(limit) = self.get("time_step_limit") {
            let is_infinite = |end: &Value| end == "Infinity" || end["__float__"] == "Infinity";
            let is_none = match limit.as_array().map(Vec::as_slice) {
                Some([least, most]) => least.as_f64() == Some(0.0) && is_infinite(most),
                _ => false,
            };
            if !is_none {
                return Err(self.unsupported(format!("`time_step_limit` {} is not supported", short(limit))));
            }
        }
        Ok(())
    }

    /// The shape of Granite's recurrent layers.
    fn mamba_shape(&self) -> Result<RecurrentShape, ModelError> {
        if self.flag("mamba_proj_bias")? == Some(true) {
            return Err(self.unsupported("`mamba_proj_bias` is not supported".to_owned()));
        }
        let size = |name: &str, max: usize, default: usize| self.size_or(name, max, Some(default));
        let hidden = self.required_size("hidden_size", 1 << 17)?;
        let (value_heads, key_heads) = (
            size("mamba_n_heads", HEADS_MAX, 128)?,
            size("mamba_n_groups", HEADS_MAX, 1)?,
        );
        let width = size("mamba_expand", 1 << 6, 2)? * hidden;
        let value_dim = match self.get("mamba_d_head") {
            Some(value) if value != "auto" => size("mamba_d_head", HEADS_MAX, 1)?,
            _ => width / value_heads,
        };
        if value_heads * value_dim != width || value_dim == 0 {
            return Err(self.broken(format!(
                "`mamba_n_heads` {value_heads} heads of {value_dim} dimensions are not `mamba_expand` times \
                 `hidden_size`, {width}"
            )));
        }
        if !value_heads.is_multiple_of(key_heads) {
            return Err(self.broken(format!(
                "`mamba_n_heads` {value_heads} is not a multiple of `mamba_n_groups` {key_heads}"
            )));
        }
        Ok(RecurrentShape {
            kind: RecurrentKind::Mamba2,
            key_heads,
            value_heads,
            key_dim: size("mamba_d_state", HEADS_MAX, 256)?,
            value_dim,
            conv_width: size("mamba_d_conv", CONV_MAX, 4)?,
        })
    }

    /// Whether each layer is recurrent.
    fn recurrent_layers(&self, family: Family, count: usize) -> Result<Vec<bool>, ModelError> {
        if family == Family::NemotronH {
            return Ok(self.blocks()?.iter().map(|block| *block == Block::Mamba).collect());
        }
        let Some(value) = self.get("layer_types") else {
            if !family.has_delta_layers() {
                return Ok(vec![true; count]);
            }
            let interval = self.size_or("full_attention_interval", 1 << 10, Some(4))?;
            return Ok((1..=count).map(|layer| !layer.is_multiple_of(interval)).collect());
        };
        let list = value
            .as_array()
            .filter(|list| list.len() == count)
            .ok_or_else(|| self.broken(format!("`layer_types` is not a list of {count} names, one a layer")))?;
        let is_recurrent = |v: &Value| match v.as_str() {
            Some("full_attention" | "attention") => Ok(false),
            Some("linear_attention" | "mamba") => Ok(true),
            _ => Err(self.unsupported(format!("layer type {} is not supported", short(v)))),
        };
        list.iter().map(is_recurrent).collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::device::{RecurrentKind, RecurrentShape};
    use crate::model::config::{Config, testing};

    fn parse(changes: Value) -> Result<Config, String> {
        let keys = json!({
            "architectures": ["Qwen3_5ForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5,
            "vocab_size": 100, "num_attention_heads": 8
        });
        testing::parse(keys, &changes)
    }

    #[test]
    fn layers_are_recurrent_by_list_or_interval() {
        let layers = |changes| parse(changes).unwrap().recurrent.unwrap().layers;
        assert_eq!(layers(json!({})), [true, true, true, false, true]);
        assert_eq!(
            layers(json!({"full_attention_interval": 2})),
            [true, false, true, false, true]
        );
        let types = json!([
            "full_attention",
            "full_attention",
            "full_attention",
            "linear_attention",
            "full_attention"
        ]);
        let config = parse(json!({"layer_types": types, "full_attention_interval": 2})).unwrap();
        assert_eq!(
            config.recurrent.as_ref().unwrap().layers,
            [false, false, false, true, false]
        );
        assert_eq!(config.attention_layers().len(), 4);
        assert!(config.attention_gates && config.unit_offset_norms && config.qk_norm);
        assert_eq!((config.heads.head_dim, config.rotary_dims), (256, 64));
        // 32 heads of 128 by 128, and 3 tokens of 8,192 channels.
        assert_eq!(config.state_bytes(), (32 * 128 * 128 + 3 * 8192) * 4);
        assert!(config.refuse_on_gpu().is_ok());
        // Layers that a GPU's kernels do not compute.
        let wide = parse(json!({"linear_key_head_dim": 300})).unwrap();
        let error = wide.refuse_on_gpu().unwrap_err().to_string();
        assert!(error.contains("recurrent layers with 32 heads of 300 x 128"), "{error}");
        let attention = parse(json!({"full_attention_interval": 1})).unwrap();
        assert!(attention.recurrent.is_none() && attention.refuse_on_gpu().is_ok());
    }

    #[test]
    fn what_recurrent_layers_must_not_have_is_refused_by_name() {
        let kinds = |kind: &str| json!([kind, kind, kind, kind, kind]);
        for (changes, words) in [
            (
                json!({"layer_types": kinds("linear_attention")}),
                "without any layer of `full_attention`",
            ),
            (
                json!({"layer_types": kinds("sliding_attention")}),
                "layer type \"sliding_attention\" is not supported",
            ),
            (json!({"layer_types": ["full_attention"]}), "not a list of 5 names"),
            (json!({"attn_output_gate": false}), "`attn_output_gate` false"),
            (
                json!({"attention_bias": true}),
                "`attention_bias` is not supported for Qwen 3.5",
            ),
            (
                json!({"linear_num_key_heads": 5}),
                "`linear_num_value_heads` 32 is not a multiple",
            ),
            (json!({"linear_conv_kernel_dim": 0}), "`linear_conv_kernel_dim` is 0"),
        ] {
            let error = parse(changes).unwrap_err();
            assert!(error.contains(words) && !error.contains('\n'), "{error}");
        }
    }

    fn granite(changes: Value) -> Result<Config, String> {
        let map = json!({
            "architectures": ["GraniteMoeHybridForCausalLM"], "intermediate_size": 8, "shared_intermediate_size": 24,
            "layer_types": ["mamba", "attention", "mamba", "mamba", "mamba"], "mamba_n_heads": 8, "num_local_experts": 0,
            "residual_multiplier": 0.5, "rms_norm_eps": 0.01
        });
        parse(testing::with(map, &changes))
    }

    #[test]
    fn granites_mamba_layers_are_read() {
        let config =
            granite(json!({"mamba_d_state": 32, "time_step_limit": [0.0, {"__float__": "Infinity"}]})).unwrap();
        let recurrent = config.recurrent.clone().unwrap();
        let shape = RecurrentShape {
            kind: RecurrentKind::Mamba2,
            key_heads: 1,
            value_heads: 8,
            key_dim: 32,
            value_dim: 16,
            conv_width: 4,
        };
        assert_eq!((recurrent.shape, recurrent.conv_bias), (shape, true));
        assert_eq!(recurrent.layers, [true, false, true, true, true]);
        // The residual stream is divided by its factor, and what a recurrent layer normalises is not.
        assert_eq!((config.norm_eps, recurrent.norm_eps), (0.04, 0.01));
        assert_eq!(config.rotates, [false; 5]);
        assert!(!config.attention_gates && !config.unit_offset_norms && !config.qk_norm);
        assert_eq!((config.intermediate_size, config.experts.clone()), (24, None));
        // 128 values, and heads of 16 numbers; not heads of 8.
        assert!(granite(json!({"head_dim": 16})).unwrap().refuse_on_gpu().is_ok());
        for (stored, bias) in [(json!(null), false), (json!(false), false), (json!(true), true)] {
            let config = granite(json!({"mamba_conv_bias": stored})).unwrap();
            assert_eq!(config.recurrent.unwrap().conv_bias, bias);
        }
        let experts = granite(json!({"num_local_experts": 3})).unwrap();
        assert_eq!(experts.experts.unwrap().shared.unwrap().intermediate_size, 24);
        let kinds = json!(["attention", "attention", "attention", "attention", "attention"]);
        let attention =
            granite(json!({"layer_types": kinds, "position_embedding_type": "rope", "head_dim": 64})).unwrap();
        assert!(attention.recurrent.is_none() && attention.refuse_on_gpu().is_ok());
        assert_eq!(attention.rotates, [true; 5]);
    }

    #[test]
    fn what_mamba_layers_must_not_have_is_refused_by_name() {
        for (changes, words) in [
            (json!({"mamba_proj_bias": true}), "`mamba_proj_bias` is not supported"),
            (
                json!({"time_step_limit": [0.001, "Infinity"]}),
                "`time_step_limit` [0.001,\"Infinity\"]",
            ),
            (json!({"time_step_limit": [0.0, 0.5]}), "`time_step_limit` [0.0,0.5]"),
            (json!({"time_step_limit": 1}), "`time_step_limit` 1 is not supported"),
            (json!({"mamba_d_head": 24}), "8 heads of 24 dimensions are not"),
            (json!({"mamba_n_heads": 24}), "24 heads of 5 dimensions are not"),
            (json!({"mamba_n_groups": 3}), "is not a multiple of `mamba_n_groups` 3"),
            (json!({"mamba_d_conv": 65}), "`mamba_d_conv` is 65"),
            (
                json!({"position_embedding_type": "alibi"}),
                "`position_embedding_type` `alibi` is not supported",
            ),
            (json!({"layer_types": null}), "without any layer of `full_attention`"),
        ] {
            let error = granite(changes).unwrap_err();
            assert!(error.contains(words) && !error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn positions_of_images_are_known_where_a_text_does_not_see_them() {
        let rope = json!({"rope_parameters": {"rope_type": "default", "mrope_section": [11, 11, 10], "mrope_interleaved": true}});
        assert!(parse(rope.clone()).unwrap().warnings.is_empty());
        let mut llama = rope;
        llama["architectures"] = json!(["LlamaForCausalLM"]);
        assert!(parse(llama).unwrap_err().contains("mrope_"));
    }
}
