//! Reads the kind of each layer: its attention, and whether it rotates queries and keys.

use serde_json::Value;

use super::Family;
use super::reader::{Reader, cut, short};
use crate::device::KvSpec;
use crate::model::error::ModelError;

impl Reader<'_> {
    /// The attention of each layer, by the rules of its family.
    pub(super) fn layers(&self, family: Family, count: usize) -> Result<Vec<KvSpec>, ModelError> {
        if family.has_recurrent_layers() {
            return Ok(vec![KvSpec::Full; count]);
        }
        if family == Family::Llama4 {
            return self.llama4_layers(count);
        }
        let never_slides = matches!(
            family,
            Family::Llama
                | Family::Qwen2Moe
                | Family::Qwen3Moe
                | Family::Olmoe
                | Family::Gemma
                | Family::Granite
                | Family::GraniteMoe
                | Family::GraniteMoeShared
                | Family::SeedOss
                | Family::Glm
                | Family::Glm4
                | Family::Glm4Moe
                | Family::Ernie4_5
                | Family::Ernie4_5Moe
                | Family::Olmo2
                | Family::Cohere
                | Family::DeepseekV2
                | Family::DeepseekV3
                | Family::Glm4MoeLite
                | Family::MiniMaxM2
        );
        // Programs disagree about which layers of Qwen's models with experts would have windows.
        if matches!(family, Family::Qwen2Moe | Family::Qwen3Moe) && self.flag("use_sliding_window")?.unwrap_or(false) {
            let name = family.name();
            return Err(self.unsupported(format!("`use_sliding_window` is not supported for {name}")));
        }
        let window = match family {
            _ if never_slides => None,
            Family::Qwen2 | Family::Qwen3 | Family::SmolLm3 if !self.flag("use_sliding_window")?.unwrap_or(false) => {
                None
            }
            _ => self.window(family)?,
        };
        let is_uniform = never_slides
            || matches!(
                family,
                Family::Mistral | Family::Mixtral | Family::Ministral3 | Family::Phi3
            );
        let types = self.layer_types(count)?;
        if is_uniform && types.iter().flatten().any(|slides| *slides != window.is_some()) {
            let what = if never_slides {
                "with windows"
            } else {
                "other than `sliding_window` says"
            };
            return Err(self.unsupported(format!("`layer_types` {what} is not supported for {}", family.name())));
        }
        let types = match types {
            Some(types) => types,
            None => self.default_types(family, count, window)?,
        };
        let last = types.len().saturating_sub(1);
        // Gemma 4's class has full attention in the last layer, whatever the configuration says.
        let slides = types.into_iter().enumerate();
        let slides = slides.map(|(layer, slides)| slides && !(family == Family::Gemma4 && layer == last));
        self.specs(slides, window)
    }

    /// Whether each layer has a sliding window, without `layer_types`.
    fn default_types(&self, family: Family, count: usize, window: Option<u32>) -> Result<Vec<bool>, ModelError> {
        // Every `pattern`-th layer has full attention.
        let by_pattern = |pattern: usize| (1..=count).map(|layer| !layer.is_multiple_of(pattern)).collect();
        let pattern = |default: usize| self.size_or("sliding_window_pattern", 1 << 10, Some(default));
        Ok(match family {
            Family::Gemma2 | Family::GptOss => by_pattern(2),
            Family::Gemma3 => by_pattern(pattern(6)?),
            Family::Gemma4 => by_pattern(6),
            Family::Olmo3 => by_pattern(4),
            Family::Cohere2 => by_pattern(pattern(4)?),
            // Published models write the pattern as letters, and have `layer_types`.
            Family::Exaone4 if window.is_some() => by_pattern(pattern(4)?),
            Family::SmolLm3 => {
                let rotates = self.rope_layers(count)?;
                rotates.iter().map(|rotates| window.is_some() && !rotates).collect()
            }
            Family::Qwen2 | Family::Qwen3 => {
                let from = match self.get("max_window_layers") {
                    None => 28,
                    Some(v) => v.as_u64().ok_or_else(|| {
                        self.broken(format!("`max_window_layers` is {}, not a whole number", short(v)))
                    })?,
                };
                (0..count as u64)
                    .map(|layer| window.is_some() && layer >= from)
                    .collect()
            }
            _ => vec![window.is_some(); count],
        })
    }

    /// The tokens of a window. `None`: the model has no windows.
    fn window(&self, family: Family) -> Result<Option<u32>, ModelError> {
        match self.size("sliding_window", 1 << 30)? {
            Some(n) => Ok(Some(n as u32)),
            None if self.map.contains_key("sliding_window") => Ok(None),
            None => Ok(family.window()),
        }
    }

    /// Whether each layer rotates queries and keys, by the rules of its family.
    pub(super) fn rotates(&self, family: Family, layers: &[KvSpec]) -> Result<Vec<bool>, ModelError> {
        match family {
            Family::SmolLm3 => self.rope_layers(layers.len()),
            Family::Llama4 => self.llama4_rotates(layers.len()),
            Family::GraniteMoeHybrid => match self.text("position_embedding_type")? {
                None | Some("nope") => Ok(vec![false; layers.len()]),
                Some("rope") => Ok(vec![true; layers.len()]),
                Some(other) => Err(self.unsupported(format!(
                    "`position_embedding_type` `{}` is not supported; `rope` and `nope` are",
                    cut(other)
                ))),
            },
            Family::NemotronH => Ok(vec![false; layers.len()]),
            // A model with windows rotates only there.
            Family::Cohere2 => Ok(layers.iter().map(|layer| *layer != KvSpec::Full).collect()),
            Family::Exaone4 if self.window(family)?.is_some() => {
                Ok(layers.iter().map(|layer| *layer != KvSpec::Full).collect())
            }
            _ => Ok(vec![true; layers.len()]),
        }
    }

    /// `no_rope_layers`, in which a layer that rotates has a 1. Without it, every
    /// `no_rope_layer_interval`-th layer does not rotate.
    pub(super) fn rope_layers(&self, count: usize) -> Result<Vec<bool>, ModelError> {
        let by_interval = self.rope_layers_by_interval(count)?;
        let Some(value) = self.get("no_rope_layers") else {
            return Ok(by_interval);
        };
        let rotates = |v: &Value| match v.as_u64() {
            Some(0) => Some(false),
            Some(1) => Some(true),
            _ => v.as_bool(),
        };
        let list = value.as_array().filter(|list| list.len() >= count);
        let list: Option<Vec<bool>> = list.and_then(|list| list[..count].iter().map(rotates).collect());
        list.ok_or_else(|| {
            self.broken(format!(
                "`no_rope_layers` is {}, not a 0 or 1 for each of {count} layers",
                short(value)
            ))
        })
    }

    pub(super) fn rope_layers_by_interval(&self, count: usize) -> Result<Vec<bool>, ModelError> {
        let interval = self.size_or("no_rope_layer_interval", 1 << 10, Some(4))?;
        Ok((1..=count).map(|layer| !layer.is_multiple_of(interval)).collect())
    }

    fn specs(&self, sliding: impl Iterator<Item = bool>, window: Option<u32>) -> Result<Vec<KvSpec>, ModelError> {
        let spec = |sliding: bool| match (sliding, window) {
            (false, _) => Ok(KvSpec::Full),
            (true, Some(w)) => Ok(KvSpec::Window(w)),
            (true, None) => Err(self.broken(
                "there are layers of `sliding_attention`, but `use_sliding_window` or `sliding_window` is not set"
                    .to_owned(),
            )),
        };
        sliding.map(spec).collect()
    }

    /// `layer_types`: whether each layer has a sliding window.
    fn layer_types(&self, count: usize) -> Result<Option<Vec<bool>>, ModelError> {
        let Some(value) = self.get("layer_types") else {
            return Ok(None);
        };
        let list = value
            .as_array()
            .filter(|l| l.len() == count)
            .ok_or_else(|| self.broken(format!("`layer_types` is not a list of {count} names, one a layer")))?;
        let sliding = |v: &Value| match v.as_str() {
            Some("full_attention") => Ok(false),
            Some("sliding_attention") => Ok(true),
            _ => Err(self.unsupported(format!("layer type {} is not supported", short(v)))),
        };
        list.iter().map(sliding).collect::<Result<_, _>>().map(Some)
    }
}
