//! Reads what only Gemma 4 has: layers whose heads differ from the others', layers that read keys and
//! values of an earlier one, inputs of each layer, and a RoPE of which only the fastest pairs of a head
//! turn.
//!
//! Published models say the heads of layers without windows by two keys of their own. What
//! transformers stores anew says them by layer (`per_layer_config`), and then has not these keys.

use serde_json::{Map, Value};

use super::reader::{Reader, cut, short};
use super::{Family, GlobalLayers, LayerInputs};
use crate::device::{HeadShape, KvSpec, Placeholders};
use crate::model::error::ModelError;
use crate::model::rope::{Rope, Scaling};

/// Size of a head in layers without windows, if the configuration says nothing of it.
const GLOBAL_HEAD_DIM: usize = 512;

impl Reader<'_> {
    /// Refuses options of Gemma 4 that are not implemented, among them those that its class has by
    /// default.
    pub(super) fn check_gemma4(&self, family: Family) -> Result<(), ModelError> {
        if family != Family::Gemma4 {
            return Ok(());
        }
        let option = |key: &str| {
            let value = self.get(key).map_or_else(|| "absent".to_owned(), short);
            Err(self.unsupported(format!("option `{key}` ({value}) is not supported")))
        };
        // Tokens of images see each other in both directions; those of texts do not.
        if self
            .text("use_bidirectional_attention")?
            .is_some_and(|what| what != "vision")
        {
            return option("use_bidirectional_attention");
        }
        for key in ["rope_scaling", "rope_theta", "partial_rotary_factor"] {
            if self.get(key).is_some() {
                return Err(self.unsupported(format!(
                    "`{key}` is not supported for Gemma 4, whose `rope_parameters` hold it by layer type"
                )));
            }
        }
        Ok(())
    }

    /// The inputs of each layer, which a configuration that does not mention them has.
    pub(super) fn layer_inputs(&self, family: Family) -> Result<Option<LayerInputs>, ModelError> {
        let (width, rows) = ("hidden_size_per_layer_input", "vocab_size_per_layer_input");
        if family != Family::Gemma4 || self.is_zero(width) {
            return Ok(None);
        }
        Ok(Some(LayerInputs {
            vocab_size: self.size_or(rows, 1 << 24, Some(262_144))?,
            width: self.size_or(width, 1 << 14, Some(256))?,
        }))
    }

    /// The tokens that stand for images, videos and sounds in a model that sees them. `text` is the
    /// configuration of its text part.
    pub(super) fn placeholders(
        &self,
        family: Family,
        text: &Reader<'_>,
        vocab_size: usize,
    ) -> Result<Option<Placeholders>, ModelError> {
        if family != Family::Gemma4 {
            return Ok(None);
        }
        let id = |reader: &Reader<'_>, key: &str, default: u32| match reader.get(key) {
            None => Ok(default),
            Some(value) => {
                let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
                id.ok_or_else(|| self.broken(format!("`{key}` is {}, not a token id", short(value))))
            }
        };
        let read_as = id(text, "pad_token_id", 0)?;
        if read_as as usize >= vocab_size {
            return Err(self.broken(format!(
                "`pad_token_id` {read_as} is not in the vocabulary of {vocab_size}"
            )));
        }
        let ids = [
            id(self, "image_token_id", 258_880)?,
            id(self, "video_token_id", 258_884)?,
            id(self, "audio_token_id", 258_881)?,
        ];
        Ok(Some(Placeholders { ids, read_as }))
    }

    /// For each of the last `num_kv_shared_layers` layers, the last one before them of the same type.
    pub(super) fn kv_sources(&self, family: Family, layers: &[KvSpec]) -> Result<Vec<Option<usize>>, ModelError> {
        let key = "num_kv_shared_layers";
        let shared = match family {
            Family::Gemma4 => self.size_or_zero(key, 1 << 10)?.unwrap_or(0),
            _ => 0,
        };
        let own = &layers[..layers.len().saturating_sub(shared)];
        let source = |(layer, kind): (usize, &KvSpec)| {
            if layer < own.len() {
                return Ok(None);
            }
            let source = own.iter().rposition(|own| own == kind);
            source.map(Some).ok_or_else(|| {
                self.broken(format!(
                    "`{key}` is {shared}, and no layer before them has keys and values for layer {layer}"
                ))
            })
        };
        layers.iter().enumerate().map(source).collect()
    }

    /// The layers whose heads differ from `heads`, or whose values are their keys.
    pub(super) fn global_layers(
        &self,
        family: Family,
        heads: HeadShape,
        layers: &[KvSpec],
    ) -> Result<Option<GlobalLayers>, ModelError> {
        if family != Family::Gemma4 {
            return Ok(None);
        }
        let values_are_keys = self.flag("attention_k_eq_v")?.unwrap_or(false);
        let is_global: Vec<bool> = layers.iter().map(|layer| *layer == KvSpec::Full).collect();
        let global = match self.get("per_layer_config") {
            Some(value) => self.heads_by_layer(value, heads, &is_global)?,
            None => {
                let kv_heads = self
                    .size("num_global_key_value_heads", 1 << 12)?
                    .filter(|_| values_are_keys);
                HeadShape {
                    kv_heads: kv_heads.unwrap_or(heads.kv_heads),
                    head_dim: self.size_or("global_head_dim", 1 << 10, Some(GLOBAL_HEAD_DIM))?,
                    ..heads
                }
            }
        };
        self.check_heads(global, "num_global_key_value_heads")?;
        Ok(Some(GlobalLayers {
            heads: global,
            values_are_keys,
            layers: is_global,
        }))
    }

    /// The heads of layers without windows, of which `per_layer_config` has those of each that differ.
    fn heads_by_layer(&self, value: &Value, heads: HeadShape, is_global: &[bool]) -> Result<HeadShape, ModelError> {
        let empty = Map::new();
        let map = match value {
            Value::Object(map) => map,
            other => return Err(self.broken(format!("`per_layer_config` is {}, not an object", short(other)))),
        };
        // `01` is no number of a layer.
        let number = |key: &String| {
            let number: usize = key.parse().ok()?;
            (number < is_global.len() && number.to_string() == *key).then_some(number)
        };
        if let Some(key) = map.keys().find(|key| number(key).is_none()) {
            return Err(self.broken(format!("`per_layer_config` has `{}`, which is no layer", cut(key))));
        }
        let mut global = None;
        for (layer, is_global) in is_global.iter().enumerate() {
            let own = match map.get(&layer.to_string()) {
                None => &empty,
                Some(Value::Object(own)) => own,
                Some(other) => {
                    let other = short(other);
                    return Err(self.broken(format!("`per_layer_config` holds {other}, not an object")));
                }
            };
            if let Some(key) = own
                .keys()
                .find(|key| !["head_dim", "num_key_value_heads"].contains(&&key[..]))
            {
                let key = cut(key);
                return Err(self.unsupported(format!("`{key}` in `per_layer_config` is not supported")));
            }
            let inner = Reader {
                path: self.path,
                map: own,
            };
            let of_layer = HeadShape {
                kv_heads: inner.size_or("num_key_value_heads", 1 << 12, Some(heads.kv_heads))?,
                head_dim: inner.size_or("head_dim", 1 << 10, Some(heads.head_dim))?,
                ..heads
            };
            let of_kind = if *is_global {
                *global.get_or_insert(of_layer)
            } else {
                heads
            };
            if of_layer != of_kind {
                return Err(self.unsupported(format!(
                    "`per_layer_config` that differs within layers of one type is not supported: layer {layer} has {} key \
                     and value heads of {} dimensions, others have {} of {}",
                    of_layer.kv_heads, of_layer.head_dim, of_kind.kv_heads, of_kind.head_dim
                )));
            }
        }
        Ok(global.unwrap_or(heads))
    }

    /// The RoPE of layers without windows, and that of layers with them.
    pub(super) fn gemma4_ropes(&self) -> Result<(Rope, Option<Rope>), ModelError> {
        let kinds = ["full_attention", "sliding_attention"];
        let [full, window] = match self.get("rope_parameters") {
            None => {
                let proportional = Scaling::Proportional {
                    share: 0.25,
                    factor: 1.0,
                };
                [(1e6, proportional), (1e4, Scaling::None)].map(|(theta, scaling)| Rope { theta, scaling })
            }
            Some(Value::Object(map)) => {
                let of_kind = |kind: &str| match map.get(kind) {
                    Some(Value::Object(map)) => Reader { path: self.path, map }.gemma4_rope(kind),
                    _ => Err(self.broken(format!("`rope_parameters` has no object `{kind}`"))),
                };
                [of_kind(kinds[0])?, of_kind(kinds[1])?]
            }
            Some(other) => return Err(self.broken(format!("`rope_parameters` is {}, not an object", short(other)))),
        };
        Ok((full, Some(window)))
    }

    /// The RoPE of this object, that of layers of one type.
    fn gemma4_rope(&self, kind: &str) -> Result<Rope, ModelError> {
        let theta = self.number_in("rope_theta", 1.0, 1e18)?;
        let theta = theta.ok_or_else(|| self.broken(format!("`rope_parameters.{kind}` has no `rope_theta`")))?;
        let share = self.number_in("partial_rotary_factor", 0.0, 1.0)?.unwrap_or(1.0);
        let factor = self.number_in("factor", 1.0, 1e6)?.unwrap_or(1.0);
        let scaling = match self.rope_kind()?.unwrap_or("default") {
            "proportional" => Scaling::Proportional { share, factor },
            "default" if share != 1.0 || factor != 1.0 => {
                return Err(self.unsupported(format!(
                    "`rope_parameters.{kind}` has a `partial_rotary_factor` or a `factor`, and no `rope_type` that would use it"
                )));
            }
            "default" => Scaling::None,
            other => {
                return Err(self.unsupported(format!(
                    "RoPE scaling `{}` is not supported for Gemma 4; default and proportional are",
                    cut(other)
                )));
            }
        };
        Ok(Rope { theta, scaling })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::{Value, json};

    use crate::device::{HeadShape, KvSpec};
    use crate::model::config::{Config, GlobalLayers, LayerInputs, testing};
    use crate::model::rope::{Rope, Scaling};

    fn parse(changes: Value) -> Result<Config, String> {
        let keys = json!({
            "architectures": ["Gemma4ForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7,
            "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 100, "hidden_size_per_layer_input": 0
        });
        testing::parse(keys, &changes)
    }

    fn heads(kv_heads: usize, head_dim: usize) -> HeadShape {
        HeadShape {
            heads: 8,
            kv_heads,
            head_dim,
            value_in_key: None,
        }
    }

    #[test]
    fn layers_without_windows_have_heads_of_their_own() {
        let plain = parse(json!({})).unwrap();
        let (window, full) = (KvSpec::Window(512), KvSpec::Full);
        // The last layer has no window, wherever the pattern ends.
        assert_eq!(plain.layers, [window, window, window, window, window, full, full]);
        let layers = vec![false, false, false, false, false, true, true];
        let of = |heads, values_are_keys| {
            Some(GlobalLayers {
                heads,
                values_are_keys,
                layers: layers.clone(),
            })
        };
        assert_eq!((plain.heads, &plain.global), (heads(4, 256), &of(heads(4, 512), false)));
        assert_eq!([plain.heads_of(0), plain.heads_of(5)], [heads(4, 256), heads(4, 512)]);
        assert!(
            plain.value_norm && plain.layer_scalars && !plain.unit_offset_norms && plain.post_norms && plain.qk_norm
        );
        assert_eq!((plain.attention_scale, plain.embedding_scale), (1.0, 8.0));
        assert!(plain.tied_embeddings && plain.logit_soft_cap.is_none() && plain.warnings.is_empty());
        let proportional = Scaling::Proportional {
            share: 0.25,
            factor: 1.0,
        };
        let ropes = [(1e6, proportional), (1e4, Scaling::None)].map(|(theta, scaling)| Rope { theta, scaling });
        assert_eq!([plain.rope.clone(), plain.window_rope.clone().unwrap()], ropes);
        let specs = plain.rope_specs(16);
        assert_eq!([plain.rope_of(0), plain.rope_of(6)], [1, 0]);
        let lens: Vec<usize> = specs.iter().map(|spec| spec.inverse_frequencies.len()).collect();
        assert_eq!(lens, [256, 128]);
        assert!(specs[0].inverse_frequencies[63] > 0.0 && specs[0].inverse_frequencies[64] == 0.0);

        // The number counts only where values are keys.
        let number = json!({"num_global_key_value_heads": 2, "global_head_dim": 32, "head_dim": 16});
        assert_eq!(parse(number.clone()).unwrap().global, of(heads(4, 32), false));
        let mut keys = number;
        keys["attention_k_eq_v"] = json!(true);
        let keys = parse(keys).unwrap();
        assert_eq!(keys.global, of(heads(2, 32), true));
        assert!(keys.values_are_keys(6) && !keys.values_are_keys(0));
        let by_layer = json!({"attention_k_eq_v": true, "head_dim": 16, "use_bidirectional_attention": "vision",
            "per_layer_config": {"5": {"head_dim": 32, "num_key_value_heads": 2},
            "6": {"head_dim": 32, "num_key_value_heads": 2}}});
        assert_eq!(parse(by_layer).unwrap().global, of(heads(2, 32), true));
    }

    #[test]
    fn last_layers_read_earlier_ones_and_each_layer_has_inputs() {
        let types = [
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "sliding_attention",
        ];
        let types = [&types[..], &["full_attention", "sliding_attention", "full_attention"]].concat();
        let shared = json!({"layer_types": types, "num_kv_shared_layers": 3, "use_double_wide_mlp": true,
            "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 120});
        let config = parse(shared).unwrap();
        assert_eq!(config.kv_sources, [None, None, None, None, Some(1), Some(3), Some(1)]);
        assert_eq!([3, 4].map(|layer| config.mlp_width(layer)), [96, 192]);
        assert_eq!(config.attention_layers().len(), 4);
        let inputs = |vocab_size, width| Some(LayerInputs { vocab_size, width });
        assert_eq!(config.layer_inputs, inputs(120, 8));
        let by_default = parse(json!({"hidden_size_per_layer_input": null})).unwrap();
        assert_eq!(by_default.layer_inputs, inputs(262_144, 256));
        let plain = parse(json!({"use_double_wide_mlp": true})).unwrap();
        assert_eq!((plain.kv_sources.clone(), plain.mlp_width(6)), (vec![None; 7], 96));
    }

    #[test]
    fn experts_stand_beside_the_mlp_of_every_layer() {
        let mut keys = json!({"num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24});
        assert_eq!(parse(keys.clone()).unwrap().experts, None);
        keys["enable_moe_block"] = json!(true);
        let config = parse(keys).unwrap();
        assert_eq!(config.intermediate_size, 96);
        let experts = config.experts.unwrap();
        assert!(experts.beside_mlp && experts.routing.renormalized && experts.shared.is_none());
        assert_eq!((experts.count, experts.routing.per_token), (6, 2));
        assert_eq!((experts.intermediate_size, experts.layers), (24, vec![true; 7]));
    }

    #[test]
    fn tokens_of_images_are_read_as_padding() {
        let images = |top: Value, pad: Value| {
            let text = json!({
                "model_type": "gemma4_text", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
                "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 100, "hidden_size_per_layer_input": 0,
                "pad_token_id": pad
            });
            let mut map = json!({"architectures": ["Gemma4ForConditionalGeneration"], "text_config": text});
            map.as_object_mut().unwrap().extend(top.as_object().unwrap().clone());
            Config::parse(Path::new("config.json"), &map.to_string()).map_err(|e| e.to_string())
        };
        let config = images(json!({"image_token_id": 90, "audio_token_id": 91}), json!(7)).unwrap();
        let placeholders = config.placeholders.unwrap();
        assert_eq!((placeholders.ids, placeholders.read_as), ([90, 258_884, 91], 7));
        assert_eq!([1, 90, 91, 92].map(|token| placeholders.read(token)), [1, 7, 7, 92]);
        assert_eq!(images(json!({}), Value::Null).unwrap().placeholders.unwrap().read_as, 0);
        let error = images(json!({}), json!(100)).unwrap_err();
        assert!(
            error.contains("`pad_token_id` 100 is not in the vocabulary of 100"),
            "{error}"
        );
        assert_eq!(parse(json!({})).unwrap().placeholders, None);
    }

    #[test]
    fn a_gpu_runs_it_where_it_has_kernels_for_both_sizes_of_heads() {
        let refused = |changes: Value| parse(changes).unwrap().refuse_on_gpu().map_err(|e| e.to_string());
        for changes in [
            json!({}),
            json!({"attention_k_eq_v": true, "num_global_key_value_heads": 1}),
            json!({"num_kv_shared_layers": 1, "hidden_size_per_layer_input": 16, "layer_types": ["full_attention",
                "sliding_attention", "sliding_attention", "full_attention", "full_attention", "full_attention", "full_attention"]}),
            json!({"enable_moe_block": true, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}),
        ] {
            assert_eq!(refused(changes), Ok(()));
        }
        let why = refused(json!({"global_head_dim": 520})).unwrap_err();
        assert!(
            why.contains("8 heads of 520 numbers over 4 key and value heads"),
            "{why}"
        );
        let why = refused(json!({"head_dim": 24})).unwrap_err();
        assert!(why.contains("heads of 24 numbers"), "{why}");
    }

    #[test]
    fn what_a_gemma_4_must_not_have_is_refused() {
        let rope = |full: Value| json!({"rope_parameters": {"full_attention": full, "sliding_attention": {"rope_theta": 9.0}}});
        for (changes, words) in [
            (
                json!({"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 99}),
                "`vocab_size_per_layer_input` is 99, less than `vocab_size` 100",
            ),
            (json!({"enable_moe_block": true}), "`num_experts` is missing"),
            (
                json!({"enable_moe_block": true, "num_experts": 4, "top_k_experts": 2}),
                "`moe_intermediate_size` is missing",
            ),
            (
                json!({"enable_moe_block": true, "num_experts": 4, "top_k_experts": 5, "moe_intermediate_size": 9}),
                "`top_k_experts` is 5, more than the 4 experts",
            ),
            (
                json!({"num_kv_shared_layers": 2}),
                "`num_kv_shared_layers` is 2, and no layer before them has keys and values for layer 5",
            ),
            (json!({"num_kv_shared_layers": 8}), "for layer 0"),
            (
                json!({"use_bidirectional_attention": "all"}),
                "option `use_bidirectional_attention` (\"all\")",
            ),
            (json!({"rope_theta": 9.0}), "`rope_theta` is not supported for Gemma 4"),
            (
                json!({"rope_parameters": {"full_attention": {"rope_theta": 9.0}}}),
                "no object `sliding_attention`",
            ),
            (rope(json!({})), "`rope_parameters.full_attention` has no `rope_theta`"),
            (
                rope(json!({"rope_theta": 9.0, "partial_rotary_factor": 0.5})),
                "no `rope_type` that would use it",
            ),
            (
                rope(json!({"rope_theta": 9.0, "rope_type": "yarn"})),
                "RoPE scaling `yarn` is not supported for Gemma 4",
            ),
            (
                rope(json!({"rope_theta": 9.0, "type": "longrope"})),
                "RoPE scaling `longrope` is not supported for Gemma 4",
            ),
            (
                json!({"per_layer_config": {"05": {"head_dim": 32}}}),
                "has `05`, which is no layer",
            ),
            (
                json!({"attention_k_eq_v": true, "num_global_key_value_heads": 3}),
                "not a multiple of `num_global_key_value_heads` 3",
            ),
            (json!({"global_head_dim": 15}), "heads of 15 dimensions"),
            (json!({"per_layer_config": {"7": {}}}), "has `7`, which is no layer"),
            (
                json!({"per_layer_config": {"5": {"head_dim": 32}}}),
                "layer 6 has 4 key and value heads of 256 dimensions, others have 4 of 32",
            ),
            (
                json!({"per_layer_config": {"0": {"head_dim": 32}}}),
                "layer 0 has 4 key and value heads of 32 dimensions, others have 4 of 256",
            ),
            (
                json!({"per_layer_config": {"5": {"sliding_window": 9}}}),
                "`sliding_window` in `per_layer_config`",
            ),
        ] {
            let error = parse(changes.clone()).unwrap_err();
            assert!(error.contains(words) && !error.contains('\n'), "{changes}: {error}");
        }
    }
}
