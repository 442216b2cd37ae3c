//! Reads the recurrent layers of a model from its configuration.

use serde_json::Value;

use super::reader::{Reader, short};
use super::{Family, Recurrent};
use crate::device::RecurrentShape;
use crate::model::error::ModelError;

/// Maximum number of heads, and of a head's dimensions.
const HEADS_MAX: usize = 1 << 10;
/// Maximum tokens that a convolution sees.
const CONV_MAX: usize = 1 << 6;

impl Reader<'_> {
    /// The recurrent layers of a model with `count` layers. `None`: all layers have attention.
    pub(super) fn recurrent(&self, family: Family, count: usize) -> Result<Option<Recurrent>, ModelError> {
        if !family.has_recurrent_layers() {
            return Ok(None);
        }
        if self.flag("attn_output_gate")? == Some(false) {
            return Err(self.unsupported("`attn_output_gate` false is not supported".to_owned()));
        }
        if self.flag("attention_bias")? == Some(true) {
            return Err(self.unsupported(format!("`attention_bias` is not supported for {}", family.name())));
        }
        let layers = self.recurrent_layers(count)?;
        if !layers.contains(&false) {
            return Err(self.unsupported("a model without any layer of `full_attention` is not supported".to_owned()));
        }
        if !layers.contains(&true) {
            return Ok(None);
        }
        let size = |name: &str, max: usize, default: usize| self.size_or(name, max, Some(default));
        let shape = RecurrentShape {
            key_heads: size("linear_num_key_heads", HEADS_MAX, 16)?,
            value_heads: size("linear_num_value_heads", HEADS_MAX, 32)?,
            key_dim: size("linear_key_head_dim", HEADS_MAX, 128)?,
            value_dim: size("linear_value_head_dim", HEADS_MAX, 128)?,
            conv_width: size("linear_conv_kernel_dim", CONV_MAX, 4)?,
        };
        if !shape.value_heads.is_multiple_of(shape.key_heads) {
            return Err(self.broken(format!(
                "`linear_num_value_heads` {} is not a multiple of `linear_num_key_heads` {}",
                shape.value_heads, shape.key_heads
            )));
        }
        Ok(Some(Recurrent {
            shape,
            layers,
            by_key_head: family == Family::Qwen3Next,
        }))
    }

    /// Whether each layer is recurrent.
    fn recurrent_layers(&self, count: usize) -> Result<Vec<bool>, ModelError> {
        let Some(value) = self.get("layer_types") else {
            let interval = self.size_or("full_attention_interval", 1 << 10, Some(4))?;
            return Ok((1..=count).map(|layer| !layer.is_multiple_of(interval)).collect());
        };
        let list = value
            .as_array()
            .filter(|list| list.len() == count)
            .ok_or_else(|| self.broken(format!("`layer_types` is not a list of {count} names, one a layer")))?;
        let is_recurrent = |v: &Value| match v.as_str() {
            Some("full_attention") => Ok(false),
            Some("linear_attention") => Ok(true),
            _ => Err(self.unsupported(format!("layer type {} is not supported", short(v)))),
        };
        list.iter().map(is_recurrent).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::{Value, json};

    use crate::model::config::Config;

    fn parse(changes: Value) -> Result<Config, String> {
        let mut map = json!({
            "architectures": ["Qwen3_5ForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5,
            "vocab_size": 100, "num_attention_heads": 8
        });
        map.as_object_mut()
            .unwrap()
            .extend(changes.as_object().unwrap().clone());
        Config::parse(Path::new("config.json"), &map.to_string()).map_err(|e| e.to_string())
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
        let error = config.refuse_on_gpu().unwrap_err().to_string();
        assert!(
            error.contains("Qwen 3.5 does not run on a GPU yet, because it has recurrent layers"),
            "{error}"
        );
        let attention = parse(json!({"full_attention_interval": 1})).unwrap();
        assert!(attention.recurrent.is_none() && attention.refuse_on_gpu().is_err());
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

    #[test]
    fn positions_of_images_are_known_where_a_text_does_not_see_them() {
        let rope = json!({"rope_parameters": {"rope_type": "default", "mrope_section": [11, 11, 10], "mrope_interleaved": true}});
        assert!(parse(rope.clone()).unwrap().warnings.is_empty());
        let mut llama = rope;
        llama["architectures"] = json!(["LlamaForCausalLM"]);
        assert!(parse(llama).unwrap_err().contains("mrope_"));
    }
}
