//! The tensors of attention that keeps latents.

use super::{LinearTensors, TensorSpec};
use crate::device::LatentShape;
use crate::model::config::{Config, LatentAttention};

/// The projection of a latent before its norm, and of the key that rotates.
const LATENT: &str = "self_attn.kv_a_proj_with_mqa";

/// Tensors of attention that keeps latents, without the projection of its output.
#[derive(Debug)]
pub(in crate::model) struct LatentTensors {
    pub shape: LatentShape,
    /// The projection of the latent that queries are made of, and its norm.
    pub query_latent: Option<(LinearTensors, TensorSpec)>,
    pub queries: LinearTensors,
    pub latent: LinearTensors,
    pub norm: TensorSpec,
    /// For each head, a projection of latents: `plain_dim` rows of keys, then `value_dim` of values.
    pub heads: TensorSpec,
}

impl LatentTensors {
    pub(super) fn of(c: &Config, layer: usize, attention: LatentAttention) -> LatentTensors {
        let (shape, heads, hidden) = (attention.shape, c.heads.heads, c.hidden_size);
        let name = |rest: &str| format!("model.layers.{layer}.self_attn.{rest}.weight");
        let linear = |part: &str, rows: usize, columns: usize, has_bias: bool| {
            LinearTensors::of(layer, &[(part, rows)], columns, has_bias)
        };
        let width = heads * shape.query_dim();
        let (query_latent, queries) = match attention.query_rank {
            None => (None, linear("self_attn.q_proj", width, hidden, false)),
            Some(rank) => (
                Some((
                    linear("self_attn.q_a_proj", rank, hidden, c.qkv_bias),
                    TensorSpec::vector(name("q_a_layernorm"), rank),
                )),
                linear("self_attn.q_b_proj", width, rank, false),
            ),
        };
        LatentTensors {
            shape,
            query_latent,
            queries,
            latent: linear(LATENT, shape.kept(), hidden, c.qkv_bias),
            norm: TensorSpec::vector(name("kv_a_layernorm"), shape.rank),
            heads: TensorSpec::matrix(
                name("kv_b_proj"),
                heads * (shape.plain_dim + shape.value_dim),
                shape.rank,
            ),
        }
    }

    pub(super) fn stored(&self) -> impl Iterator<Item = &TensorSpec> {
        let linear = [&self.queries, &self.latent].into_iter();
        let linear = linear.chain(self.query_latent.as_ref().map(|(linear, _)| linear));
        let vectors = self.query_latent.as_ref().map(|(_, norm)| norm);
        linear
            .flat_map(LinearTensors::stored)
            .chain(vectors)
            .chain([&self.norm, &self.heads])
    }
}

/// The projections that read the stream's norm, each with its rows.
pub(in crate::model) fn latent_input(c: &Config, attention: LatentAttention) -> Vec<(&'static str, usize)> {
    let width = c.heads.heads * attention.shape.query_dim();
    let queries = attention
        .query_rank
        .map_or(("self_attn.q_proj", width), |rank| ("self_attn.q_a_proj", rank));
    vec![queries, (LATENT, attention.shape.kept())]
}
