//! Reads a checkpoint's RoPE (rotary embedding) from its configuration.

use serde_json::{Map, Value};

use super::Family;
use super::reader::{Reader, cut, short};
use crate::model::error::ModelError;
use crate::model::rope::{Rope, Scaling, Yarn, yarn_attention_factor};

/// Maximum base of the wavelengths.
const THETA_MAX: f64 = 1e18;

impl Reader<'_> {
    /// The RoPE of all layers and `None`; or, if the family has a second RoPE for sliding-window
    /// layers, the RoPE of full-attention layers and that of sliding-window layers.
    pub(super) fn ropes(
        &self,
        family: Family,
        head_dim: usize,
        max_positions: u32,
    ) -> Result<(Rope, Option<Rope>), ModelError> {
        let empty = Map::new();
        // If both are set, the older name takes precedence, as in the reference.
        let is_set = |name: &str| {
            let value = self.get(name);
            value.is_some_and(|v| v.as_object().is_none_or(|map| !map.is_empty()))
        };
        let name = if is_set("rope_scaling") {
            "rope_scaling"
        } else {
            "rope_parameters"
        };
        let map = match self.get(name) {
            None => &empty,
            Some(Value::Object(map)) => map,
            Some(other) => return Err(self.broken(format!("`{name}` is {}, not an object", short(other)))),
        };
        let by_type = ["full_attention", "sliding_attention"].map(|kind| map.get(kind));
        if family != Family::Gemma3 {
            if by_type.iter().any(Option::is_some) {
                return Err(self.unsupported(format!("`{name}` that differs by layer type is not supported")));
            }
            let default = if family == Family::Mixtral { 1e6 } else { 10_000.0 };
            let theta = self.theta("rope_theta", default)?;
            return Ok((self.rope((name, map), theta, head_dim, max_positions)?, None));
        }
        if is_set("rope_scaling") && is_set("rope_parameters") {
            return Err(self.unsupported("both `rope_scaling` and `rope_parameters` are given".to_owned()));
        }
        if name == "rope_parameters" && !map.is_empty() && by_type.iter().all(Option::is_none) {
            return Err(self.unsupported("`rope_parameters` without layer types is not supported".to_owned()));
        }
        let (theta, window_theta) = (
            self.theta("rope_theta", 1e6)?,
            self.theta("rope_local_base_freq", 10_000.0)?,
        );
        // Without layer types the object applies to full-attention layers.
        let [full, window] = match by_type {
            [None, None] => [Ok(map), Ok(&empty)],
            kinds => kinds.map(|kind| match kind {
                None | Some(Value::Null) => Ok(&empty),
                Some(Value::Object(map)) => Ok(map),
                Some(other) => Err(self.broken(format!("`{name}` holds {}, not an object", short(other)))),
            }),
        };
        Ok((
            self.rope((name, full?), theta, head_dim, max_positions)?,
            Some(self.rope((name, window?), window_theta, head_dim, max_positions)?),
        ))
    }

    fn theta(&self, name: &str, default: f64) -> Result<f64, ModelError> {
        Ok(self.number_in(name, 1.0, THETA_MAX)?.unwrap_or(default))
    }

    /// Reads a RoPE from `map`, the value of `name`. `theta` is the default base.
    fn rope(
        &self,
        (name, map): (&str, &Map<String, Value>),
        theta: f64,
        head_dim: usize,
        max_position_embeddings: u32,
    ) -> Result<Rope, ModelError> {
        let inner = Reader { path: self.path, map };
        inner.refuse_partial_rotation()?;
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
                None => {
                    let n = inner.size("original_max_position_embeddings", 1 << 28)?;
                    Ok(n.map_or(max_position_embeddings, |n| n as u32))
                }
            }
        };
        let scaling = match kind.unwrap_or("default") {
            "default" => match inner.number("factor")? {
                Some(factor) if factor != 1.0 => {
                    return Err(self.broken(format!(
                        "`{name}` has a `factor` of {factor}, and no `rope_type` that would use it"
                    )));
                }
                _ => Scaling::None,
            },
            "linear" => Scaling::Linear { factor: factor()? },
            "dynamic" if head_dim <= 2 => {
                return Err(self.unsupported("dynamic RoPE scaling of heads of 2 dimensions".to_owned()));
            }
            "dynamic" => Scaling::Dynamic {
                factor: factor()?,
                pretrained_tokens: max_position_embeddings,
            },
            "llama3" => inner.llama3(factor()?, pretrained()?)?,
            "yarn" => Scaling::Yarn(inner.yarn(theta, max_position_embeddings, pretrained()?)?),
            other => {
                return Err(self.unsupported(format!(
                    "RoPE scaling `{}` is not supported; default, linear, dynamic, llama3 and yarn are",
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
        if low >= high {
            return Err(self.broken(format!(
                "`low_freq_factor` {low} is not below `high_freq_factor` {high}"
            )));
        }
        Ok(Scaling::Llama3 {
            factor,
            low_freq_factor: low,
            high_freq_factor: high,
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
