//! Recurrent layers: gated delta networks (Yang et al. 2024), which keep a state of a fixed size in
//! place of keys and values.
//!
//! Each token has a row `[q][k][v][z][b][a]`. A convolution over a channel's last
//! [`conv_width`](RecurrentShape::conv_width) tokens, followed by SiLU, makes queries, keys and
//! values of `[q][k][v]`. A query and a key are divided by their length, a query also by the square
//! root of its dimension. A value head's state `S`, a matrix of keys and values, is then read and
//! written token by token:
//!
//! `S = S * e^-(e^A * softplus(a + dt))`, `S = S + k (sigmoid(b) * (v - k S))`, `o = q S`.
//!
//! The output of a head is `o`, normalised (RMS), times its weight and the SiLU of `z`.

use crate::device::Linear;

/// Sizes of a recurrent layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecurrentShape {
    pub key_heads: usize,
    /// A multiple of `key_heads`: so many value heads share a query and a key.
    pub value_heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
    /// Tokens that the convolution sees, at least 1.
    pub conv_width: usize,
}

impl RecurrentShape {
    /// Width of `[q]` and of `[k]`.
    pub fn key_width(&self) -> usize {
        self.key_heads * self.key_dim
    }

    /// Width of `[v]`, of `[z]` and of the output.
    pub fn value_width(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Channels of the convolution: the width of `[q][k][v]`.
    pub fn conv_channels(&self) -> usize {
        2 * self.key_width() + self.value_width()
    }

    /// Width of a row `[q][k][v][z][b][a]`.
    pub fn input_width(&self) -> usize {
        self.conv_channels() + self.value_width() + 2 * self.value_heads
    }

    /// Numbers of a sequence's state in one layer: the last inputs of the convolution, and a matrix
    /// per value head.
    pub fn state_len(&self) -> usize {
        (self.conv_width - 1) * self.conv_channels() + self.value_width() * self.key_dim
    }

    /// Bytes of a sequence's state in one layer, which is in F32 at every precision: roundings would
    /// add up over a sequence.
    pub fn state_bytes(&self) -> usize {
        self.state_len() * size_of::<f32>()
    }
}

/// Weights of a recurrent layer, without the projection of its output.
pub struct RecurrentWeights<M, V> {
    pub shape: RecurrentShape,
    /// Makes the rows `[q][k][v][z][b][a]`.
    pub input: Linear<M, V>,
    /// `[channels][conv_width]`, the factor of the current token last. These vectors are F32 at every
    /// precision.
    pub conv: V,
    /// `[value heads]`: `A`.
    pub decay: V,
    /// `[value heads]`: `dt`.
    pub decay_bias: V,
    /// `[value_dim]`: the weight of the output's norm.
    pub norm: V,
    pub norm_eps: f32,
}
