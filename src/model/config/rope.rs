//! Reads a checkpoint's RoPE (rotary embedding) from its configuration.

use serde_json::{Map, Value};

use super::reader::{Reader, cut, short};
use super::{Config, Family};
use crate::device::{KvSpec, RopeSpec};
use crate::model::error::ModelError;
use crate::model::rope::{LongRope, Rope, Scaling, Yarn, longrope_attention_factor, yarn_attention_factor};

/// Maximum base of the wavelengths.
const THETA_MAX: f64 = 1e18;

/// The family that a RoPE object is read for, and the object's key.
#[derive(Clone, Copy)]
struct RopeNames {
    family: Family,
    name: &'static str,
}

impl Config {
    /// The rotations of all layers, for a maximum sequence length of `context` tokens:
    /// [`rope`](Self::rope), [`window_rope`](Self::window_rope) and, for layers that do not rotate,
    /// one that changes nothing, as far as the model has them. If heads differ, the first is that of
    /// global layers, and the second that of the others.
    pub fn rope_specs(&self, context: u32) -> Vec<RopeSpec> {
        let dim = match &self.latent {
            Some(latent) => latent.shape.rope_dim,
            None => self.heads.head_dim,
        };
        let (first, second) = match &self.global {
            Some(global) => {
                let dim = global.heads.head_dim;
                let others = self.window_rope.as_ref().unwrap_or(&self.rope);
                (self.rope.spec(dim, dim, context), Some(others))
            }
            None => (
                self.rope.spec(dim, self.rotary_dims, context),
                self.window_rope.as_ref(),
            ),
        };
        let second = second.map(|rope| rope.spec(dim, self.rotary_dims, context));
        let mut specs: Vec<RopeSpec> = std::iter::once(first).chain(second).collect();
        if self.rotates.contains(&false) {
            specs.push(RopeSpec {
                inverse_frequencies: vec![0.0; dim / 2],
                scale: 1.0,
            });
        }
        specs
    }

    /// The index of a layer's rotation in [`rope_specs`](Self::rope_specs).
    pub fn rope_of(&self, layer: usize) -> usize {
        if self.global.is_some() {
            return usize::from(!self.is_global(layer));
        }
        match (self.rotates[layer], &self.window_rope, self.layers[layer]) {
            (false, ..) => 1 + usize::from(self.window_rope.is_some()),
            (true, Some(_), KvSpec::Window(_)) => 1,
            _ => 0,
        }
    }
}

impl Reader<'_> {
    /// The kind of a RoPE. The older name of the key counts where the newer one is absent.
    pub(super) fn rope_kind(&self) -> Result<Option<&str>, ModelError> {
        match self.text("rope_type")? {
            Some(kind) => Ok(Some(kind)),
            None => self.text("type"),
        }
    }

    /// Whether dimensions 2d and 2d + 1 of a head rotate as a pair.
    pub(super) fn rotates_neighbours(&self, family: Family) -> Result<bool, ModelError> {
        match family {
            Family::DeepseekV2 => Ok(true),
            Family::DeepseekV3 | Family::Glm4MoeLite => Ok(self.flag("rope_interleave")?.unwrap_or(true)),
            _ => Ok(family.rotates_neighbours()),
        }
    }

    /// The RoPE of all layers and `None`; or, if the family has a second RoPE for sliding-window
    /// layers, the RoPE of full-attention layers and that of sliding-window layers.
    pub(super) fn ropes(
        &self,
        family: Family,
        rotary_dims: usize,
        max_positions: u32,
    ) -> Result<(Rope, Option<Rope>), ModelError> {
        if family == Family::Gemma4 {
            return self.gemma4_ropes();
        }
        let empty = Map::new();
        let name = self.rope_name();
        let map = match self.get(name) {
            None => &empty,
            Some(Value::Object(map)) => map,
            Some(other) => return Err(self.broken(format!("`{name}` is {}, not an object", short(other)))),
        };
        if family == Family::GptOss && map.is_empty() {
            return Err(self.broken("`rope_scaling` is missing".to_owned()));
        }
        let by_type = ["full_attention", "sliding_attention"].map(|kind| map.get(kind));
        if !matches!(family, Family::Gemma3 | Family::Olmo3) {
            if by_type.iter().any(Option::is_some) {
                return Err(self.unsupported(format!("`{name}` that differs by layer type is not supported")));
            }
            let theta = self.theta("rope_theta", family.rope_theta())?;
            let names = RopeNames { family, name };
            return Ok((self.rope(names, map, theta, rotary_dims, max_positions)?, None));
        }
        if self.is_rope_set("rope_scaling") && self.is_rope_set("rope_parameters") {
            return Err(self.unsupported("both `rope_scaling` and `rope_parameters` are given".to_owned()));
        }
        if name == "rope_parameters" && !map.is_empty() && by_type.iter().all(Option::is_none) {
            return Err(self.unsupported("`rope_parameters` without layer types is not supported".to_owned()));
        }
        let (theta, window_theta) = match family {
            Family::Olmo3 => (self.theta("rope_theta", family.rope_theta())?, family.rope_theta()),
            _ => (
                self.theta("rope_theta", 1e6)?,
                self.theta("rope_local_base_freq", 10_000.0)?,
            ),
        };
        // Without layer types the object applies to full-attention layers.
        let [full, window] = match by_type {
            [None, None] => [Ok(map), Ok(&empty)],
            kinds => kinds.map(|kind| match kind {
                None | Some(Value::Null) => Ok(&empty),
                Some(Value::Object(map)) => Ok(map),
                Some(other) => Err(self.broken(format!("`{name}` holds {}, not an object", short(other)))),
            }),
        };
        let window = window?;
        if family == Family::Olmo3 && theta != window_theta && !window.contains_key("rope_theta") {
            return Err(self.unsupported(format!(
                "`rope_theta` is {theta}, and releases of transformers differ in whether layers with windows take it: give \
                 `rope_parameters` by layer type"
            )));
        }
        let names = RopeNames { family, name };
        Ok((
            self.rope(names, full?, theta, rotary_dims, max_positions)?,
            Some(self.rope(names, window, window_theta, rotary_dims, max_positions)?),
        ))
    }

    fn is_rope_set(&self, name: &str) -> bool {
        let value = self.get(name);
        value.is_some_and(|v| v.as_object().is_none_or(|map| !map.is_empty()))
    }

    /// The key of the RoPE object. If both are set, the older name takes precedence, as in the
    /// reference.
    pub(super) fn rope_name(&self) -> &'static str {
        if self.is_rope_set("rope_scaling") {
            "rope_scaling"
        } else {
            "rope_parameters"
        }
    }

    /// Number of a head's dimensions that rotate. (Those of Gemma 4 have frequencies of 0 where they
    /// do not.)
    ///
    /// # Errors
    /// Only some dimensions rotate in a family that rotates all; or their number is odd.
    pub(super) fn rotary_dims(&self, family: Family, head_dim: usize) -> Result<usize, ModelError> {
        if family == Family::Gemma4 {
            return Ok(head_dim);
        }
        let mut shares = Vec::new();
        if let Some(Value::Object(map)) = self.get(self.rope_name()) {
            let by_type = ["full_attention", "sliding_attention"].map(|kind| map.get(kind).and_then(Value::as_object));
            for map in by_type.into_iter().flatten().chain([map]) {
                let inner = Reader { path: self.path, map };
                shares.extend(inner.number("partial_rotary_factor")?);
            }
        }
        shares.extend(self.number("partial_rotary_factor")?);
        if family == Family::MiniMaxM2 {
            shares.extend(self.share_of_rotary_dim(head_dim, &shares)?);
        }
        let Some(default) = family.rotary_share() else {
            return match shares.iter().find(|share| **share != 1.0) {
                Some(x) => Err(self.unsupported(format!("`partial_rotary_factor` {x} is not supported; 1 is"))),
                None => Ok(head_dim),
            };
        };
        let share = shares.first().copied().unwrap_or(default);
        let dims = (head_dim as f64 * share) as usize;
        if !(0.0..=1.0).contains(&share) || dims < 2 || !dims.is_multiple_of(2) {
            return Err(self.unsupported(format!(
                "`partial_rotary_factor` {share} of heads of {head_dim} dimensions is not supported; an even number of \
                 dimensions is"
            )));
        }
        Ok(dims)
    }

    /// The position from which on a model scales its queries, or attends otherwise, which is not
    /// implemented. `None`: it never does.
    pub(super) fn query_scaling_from(&self, family: Family) -> Result<Option<u32>, ModelError> {
        if family == Family::Llama4 {
            return self.llama4_context();
        }
        if family != Family::Ministral3 {
            return Ok(None);
        }
        let name = self.rope_name();
        let empty = Map::new();
        let map = self.get(name).and_then(Value::as_object).unwrap_or(&empty);
        let inner = Reader { path: self.path, map };
        let beta = inner.number("llama_4_scaling_beta")?;
        match beta.ok_or_else(|| self.broken(format!("`{name}` has no `llama_4_scaling_beta`")))? {
            0.0 => Ok(None),
            _ => Ok(Some(
                inner.required_size("original_max_position_embeddings", 1 << 28)? as u32
            )),
        }
    }

    fn theta(&self, name: &str, default: f64) -> Result<f64, ModelError> {
        Ok(self.number_in(name, 1.0, THETA_MAX)?.unwrap_or(default))
    }

    /// Reads a RoPE from `map`. `theta` is the default base.
    fn rope(
        &self,
        RopeNames { family, name }: RopeNames,
        map: &Map<String, Value>,
        theta: f64,
        rotary_dims: usize,
        max_position_embeddings: u32,
    ) -> Result<Rope, ModelError> {
        let inner = Reader { path: self.path, map };
        let theta = inner.theta("rope_theta", theta)?;
        let kind = match (inner.text("rope_type")?, inner.text("type")?) {
            (Some(kind), Some(other)) if kind != other => {
                return Err(self.broken(format!(
                    "`{name}` has `rope_type` `{}` and `type` `{}`",
                    cut(kind),
                    cut(other)
                )));
            }
            (kind, older) => kind.or(older),
        };
        let factor = || {
            let factor = inner.number_in("factor", 1.0, 1e6)?;
            factor.ok_or_else(|| self.broken(format!("`{name}` has no `factor`")))
        };
        let pretrained = || -> Result<u32, ModelError> {
            match self.size("original_max_position_embeddings", 1 << 28)? {
                Some(n) => Ok(n as u32),
                // The class sets the outer key, so that the inner one never counts.
                None if family == Family::Phi3 => Ok(4096),
                None => {
                    let n = inner.size("original_max_position_embeddings", 1 << 28)?;
                    Ok(n.map_or(max_position_embeddings, |n| n as u32))
                }
            }
        };
        let kind = match kind.unwrap_or("default") {
            // Names of earlier releases.
            "su" | "yarn" if family == Family::Phi3 => "longrope",
            kind => kind,
        };
        let scaling = match kind {
            "default" => match inner.number("factor")? {
                Some(factor) if factor != 1.0 => {
                    return Err(self.broken(format!(
                        "`{name}` has a `factor` of {factor}, and no `rope_type` that would use it"
                    )));
                }
                _ => Scaling::None,
            },
            "linear" => Scaling::Linear { factor: factor()? },
            "dynamic" if rotary_dims <= 2 => {
                return Err(self.unsupported("dynamic RoPE scaling of heads of 2 dimensions".to_owned()));
            }
            "dynamic" => Scaling::Dynamic {
                factor: factor()?,
                pretrained_tokens: max_position_embeddings,
            },
            "llama3" => inner.llama3(factor()?, pretrained()?)?,
            "yarn" => Scaling::Yarn(inner.yarn(theta, max_position_embeddings, pretrained()?)?),
            "longrope" => Scaling::LongRope(inner.longrope(rotary_dims, max_position_embeddings, pretrained()?)?),
            other => {
                return Err(self.unsupported(format!(
                    "RoPE scaling `{}` is not supported; default, linear, dynamic, llama3, yarn and longrope are",
                    cut(other)
                )));
            }
        };
        Ok(Rope { theta, scaling })
    }

    fn llama3(&self, factor: f64, pretrained_tokens: u32) -> Result<Scaling, ModelError> {
        let required = |name: &str| {
            self.number_in(name, 1e-6, 1e6)?
                .ok_or_else(|| self.broken(format!("llama3 RoPE scaling has no `{name}`")))
        };
        let (low, high) = (required("low_freq_factor")?, required("high_freq_factor")?);
        // Llama 4's are equal: no frequency lies between.
        if low > high {
            return Err(self.broken(format!("`low_freq_factor` {low} is above `high_freq_factor` {high}")));
        }
        Ok(Scaling::Llama3 {
            factor,
            low_freq_factor: low,
            high_freq_factor: high,
            pretrained_tokens,
        })
    }

    fn longrope(
        &self,
        rotary_dims: usize,
        max_position_embeddings: u32,
        pretrained_tokens: u32,
    ) -> Result<LongRope, ModelError> {
        let factors = |name: &str| {
            let value = self.get(name);
            let value = value.ok_or_else(|| self.broken(format!("longrope RoPE scaling has no `{name}`")))?;
            let number = |x: &Value| x.as_f64().filter(|x| (1e-6..=1e6).contains(x)).map(|x| x as f32);
            let list = value.as_array().filter(|list| list.len() == rotary_dims / 2);
            let list: Option<Vec<f32>> = list.and_then(|list| list.iter().map(number).collect());
            list.ok_or_else(|| {
                self.broken(format!(
                    "`{name}` is {}, not a list of {} positive numbers, one a pair",
                    short(value),
                    rotary_dims / 2
                ))
            })
        };
        let factor = match self.number_in("factor", 1.0, 1e6)? {
            Some(factor) => factor,
            None => f64::from(max_position_embeddings) / f64::from(pretrained_tokens),
        };
        if pretrained_tokens < 2 {
            return Err(self.broken("longrope needs `original_max_position_embeddings` above 1".to_owned()));
        }
        Ok(LongRope {
            short_factors: factors("short_factor")?,
            long_factors: factors("long_factor")?,
            attention_factor: match self.number_in("attention_factor", 0.0, 1e3)? {
                Some(x) => x,
                None => longrope_attention_factor(factor, pretrained_tokens),
            },
            pretrained_tokens,
        })
    }

    fn yarn(&self, theta: f64, max_position_embeddings: u32, pretrained_tokens: u32) -> Result<Yarn, ModelError> {
        if theta <= 1.0 {
            return Err(self.broken("YaRN needs a `rope_theta` above 1".to_owned()));
        }
        let factor = match self.number_in("factor", 1.0, 1e6)? {
            Some(factor) => factor,
            None => max_position_embeddings as f64 / pretrained_tokens as f64,
        };
        let mscale = self.number_in("mscale", 0.0, 1e3)?;
        let mscale_all_dim = self.number_in("mscale_all_dim", 0.0, 1e3)?;
        // Zero counts as absent, as in the reference.
        let beta = |name: &str, default: f64| {
            Ok::<_, ModelError>(self.number_in(name, 0.0, 1e6)?.filter(|x| *x != 0.0).unwrap_or(default))
        };
        Ok(Yarn {
            factor,
            attention_factor: match self.number_in("attention_factor", 0.0, 1e3)? {
                Some(x) => x,
                None => yarn_attention_factor(factor, mscale, mscale_all_dim),
            },
            beta_fast: beta("beta_fast", 32.0)?,
            beta_slow: beta("beta_slow", 1.0)?,
            pretrained_tokens,
            truncate: self.flag("truncate")?.unwrap_or(true),
        })
    }
}
