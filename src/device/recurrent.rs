//! Recurrent layers, which keep a state of a fixed size in place of keys and values: gated delta
//! networks (Yang et al. 2024), and Mamba-2 (Dao and Gu 2024).
//!
//! A convolution over a channel's last [`conv_width`](RecurrentShape::conv_width) tokens, followed by
//! SiLU, makes queries, keys and values of a token's row. A value head's state `S`, a matrix of keys
//! and values, is then read and written token by token.
//!
//! In a delta network, a query and a key are divided by their length, a query also by the square root
//! of its dimension:
//!
//! `S = S * e^-(e^A * softplus(a + dt))`, `S = S + k (sigmoid(b) * (v - k S))`, `o = q S`.
//!
//! The output of a head is `o`, normalised (RMS), times its weight and the SiLU of `z`.
//!
//! In Mamba-2, whose papers call query, key and value `C`, `B` and `x`:
//!
//! `t = softplus(a + dt)`, `S = S * e^-(e^A * t) + k (t * v)`, `o = q S + D v`.
//!
//! The outputs of the heads that share a query and a key are `o` times the SiLU of `z`, normalised
//! together (RMS), times their weights.

use crate::device::Linear;

/// Maximum value of [`task_heads`](RecurrentShape::task_heads) in Mamba-2.
const TASK_HEADS_MAX: usize = 8;

/// What a recurrent layer computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecurrentKind {
    DeltaNet,
    Mamba2,
}

/// Sizes of a recurrent layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecurrentShape {
    pub kind: RecurrentKind,
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

    /// Where the parts of a row begin.
    pub fn row(&self) -> RecurrentRow {
        let (key, value) = (self.key_width(), self.value_width());
        match self.kind {
            RecurrentKind::DeltaNet => RecurrentRow {
                q: 0,
                k: key,
                v: 2 * key,
                z: 2 * key + value,
                b: 2 * (key + value),
                a: 2 * (key + value) + self.value_heads,
            },
            RecurrentKind::Mamba2 => RecurrentRow {
                z: 0,
                v: value,
                k: 2 * value,
                q: 2 * value + key,
                b: 2 * (value + key),
                a: 2 * (value + key),
            },
        }
    }

    /// Width of a row.
    pub fn input_width(&self) -> usize {
        self.row().a + self.value_heads
    }

    /// Number of value heads that are computed together, all with the same query and key. They keep
    /// their own last inputs of the convolution, so more of them need less memory, and fewer of them
    /// divide a sequence's work among more threads.
    pub fn task_heads(&self) -> usize {
        let group = self.value_heads / self.key_heads;
        match self.kind {
            RecurrentKind::DeltaNet => group,
            // A single query and key serve all value heads of most models.
            RecurrentKind::Mamba2 => (1..=TASK_HEADS_MAX.min(group))
                .rev()
                .find(|heads| group.is_multiple_of(*heads))
                .unwrap_or(1),
        }
    }

    /// Numbers of a sequence's state that belong to one task: the last inputs of the convolution, and
    /// a matrix per value head.
    pub fn task_len(&self) -> usize {
        let values = self.task_heads() * self.value_dim;
        (self.conv_width - 1) * (2 * self.key_dim + values) + values * self.key_dim
    }

    /// Numbers of a sequence's state in one layer.
    pub fn state_len(&self) -> usize {
        self.value_heads / self.task_heads() * self.task_len()
    }

    /// Bytes of a sequence's state in one layer, which is in F32 at every precision: roundings would
    /// add up over a sequence.
    pub fn state_bytes(&self) -> usize {
        self.state_len() * size_of::<f32>()
    }
}

/// Where the parts of a token's row begin, the convolution's channels side by side: `[q][k][v][z][b][a]`
/// in a delta network, and `[z][v][k][q][a]` in Mamba-2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecurrentRow {
    pub q: usize,
    pub k: usize,
    pub v: usize,
    pub z: usize,
    /// Mamba-2 has none.
    pub b: usize,
    pub a: usize,
}

impl RecurrentRow {
    /// Where the convolution's channels begin.
    pub fn conv(&self) -> usize {
        self.q.min(self.v)
    }
}

/// Weights of a recurrent layer, without the projection of its output.
pub struct RecurrentWeights<M, V> {
    pub shape: RecurrentShape,
    /// Makes the rows.
    pub input: Linear<M, V>,
    /// `[channels][conv_width]`, the factor of the current token last. These vectors are F32 at every
    /// precision.
    pub conv: V,
    /// `[channels]`.
    pub conv_bias: Option<V>,
    /// `[value heads]`: `A`.
    pub decay: V,
    /// `[value heads]`: `dt`.
    pub decay_bias: V,
    /// `[value heads]`: `D` of Mamba-2.
    pub skip: Option<V>,
    /// The weight of the output's norm: `[value_dim]`, in Mamba-2 `[value heads][value_dim]`.
    pub norm: V,
    pub norm_eps: f32,
}
