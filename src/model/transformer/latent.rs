//! Attention that keeps latents (DeepSeek-V2, DeepSeek-V3, GLM-4.7-Flash).

use super::{Buffers, stream_norm};
use crate::device::{AddNorm, Attention, AttentionInput, Device, DeviceError, KvSpec, LatentInput, LatentStore};
use crate::model::build::LatentWeights;
use crate::model::config::Config;
use crate::model::times::Operation;

/// Epsilon of the norms of latents, whatever that of other norms is.
const NORM_EPS: f32 = 1e-6;

impl<D: Device> LatentWeights<D> {
    /// Stores the latents of layer `index`, computed from the stream's norm, and leaves its queries in `projected`.
    pub(super) fn store(
        &self,
        device: &D,
        (config, index): (&Config, usize),
        (step, pool): (&D::Step, &mut D::KvPool),
        b: &mut Buffers<D>,
        lap: &mut dyn FnMut(Operation) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let workspace = &mut b.workspace;
        let queries = match &self.query_latent {
            None => &b.normed,
            Some((linear, norm)) => {
                device.linear(linear, &b.normed, &mut b.gates, workspace)?;
                let norm = AddNorm {
                    eps: NORM_EPS,
                    ..stream_norm::<D>(config, None, norm)
                };
                device.add_norm(norm, &mut b.gates, &mut b.projected)?;
                &b.projected
            }
        };
        device.linear(&self.queries, queries, &mut b.gated, workspace)?;
        device.linear(&self.latent, &b.normed, &mut b.gates, workspace)?;
        lap(Operation::Linear)?;
        let store = LatentStore {
            place: self.kv.place,
            shape: self.shape,
            heads: &self.keys,
            norm: &self.norm,
            eps: NORM_EPS,
            rope: config.rope_of(index),
        };
        let input = LatentInput {
            queries: &b.gated,
            latents: &b.gates,
        };
        device.latent_store(store, input, (step, pool), &mut b.projected, workspace)?;
        lap(Operation::RopeStore)
    }

    /// Writes what attention makes of a row to `normed`, from the queries in `projected`.
    pub(super) fn attend(
        &self,
        device: &D,
        config: &Config,
        (step, pool): (&D::Step, &D::KvPool),
        b: &mut Buffers<D>,
    ) -> Result<(), DeviceError> {
        let attention = Attention {
            spec: KvSpec::Full,
            place: self.kv.place,
            scale: config.attention_scale,
            soft_cap: None,
        };
        let input = AttentionInput {
            qkv: &b.projected,
            sinks: None,
        };
        device.attention(attention, input, step, pool, &mut b.latents, &mut b.workspace)?;
        device.latent_values(&self.values, &mut b.latents, &mut b.normed, &mut b.workspace)
    }
}
