//! Multi-head latent attention (DeepSeek-AI 2024): keys and values of all heads are projections of one
//! latent per token, and only the latent is kept.
//!
//! A head's score with a token is its query times the head's projection of the latent. The query is
//! multiplied by that projection instead, once. Then all heads share one key, the latent, and one
//! value, the same latent: the head's projection of values is applied to the weighted sum of latents.
//! Beside the latent a token has a key that rotates, which all heads share, too.
//!
//! See docs/decisions/104-latents-are-key-and-value.md.

use super::{KvPlace, Linear};

/// Sizes of latent attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LatentShape {
    /// Numbers of a latent.
    pub rank: usize,
    /// Numbers of the key beside the latent, and of the part of a query that rotates with it; even.
    pub rope_dim: usize,
    /// Numbers of the part of a head's query that does not rotate.
    pub plain_dim: usize,
    /// Numbers of a head's value.
    pub value_dim: usize,
}

impl LatentShape {
    /// Numbers that are kept of a token: the latent, then the rotated key.
    pub fn kept(&self) -> usize {
        self.rank + self.rope_dim
    }

    /// Numbers of a head's query before it is multiplied: the plain part, then the one that rotates.
    pub fn query_dim(&self) -> usize {
        self.plain_dim + self.rope_dim
    }
}

/// Parameters of [`Device::latent_store`](crate::device::Device::latent_store).
pub struct LatentStore<'a, M, V, N> {
    /// Its heads have as many dimensions as are [kept](LatentShape::kept) of a token.
    pub place: KvPlace,
    pub shape: LatentShape,
    /// For each head, the matrix by which the plain part of its query is multiplied: `[rank][plain_dim]`.
    pub heads: &'a [Linear<M, V>],
    /// `[rank]`: weights of an RMS norm of latents.
    pub norm: &'a N,
    pub eps: f32,
    /// Index into the step's `ropes`.
    pub rope: usize,
}

/// What [`Device::latent_store`](crate::device::Device::latent_store) reads, row by row.
pub struct LatentInput<'a, B> {
    /// `[tokens][heads * query_dim]`.
    pub queries: &'a B,
    /// `[tokens][rank + rope_dim]`: latents before their norm, and keys before their rotation.
    pub latents: &'a B,
}
