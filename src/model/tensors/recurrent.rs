//! The tensors of recurrent layers.

use super::{FusedPart, LinearTensors, TensorSpec};
use crate::device::{RecurrentKind, RecurrentShape};
use crate::model::config::{Config, Recurrent};

const IN_PROJ_QKVZ: &str = "linear_attn.in_proj_qkvz.weight";
const IN_PROJ_BA: &str = "linear_attn.in_proj_ba.weight";

/// The parts of a recurrent layer's fused tensors: for each key head its query and key, and the
/// values and gates of its value heads.
pub(super) fn recurrent_parts(shape: RecurrentShape) -> Vec<FusedPart> {
    let heads = shape.value_heads / shape.key_heads;
    let (key, value) = (shape.key_dim, heads * shape.value_dim);
    let part = |name, stored, sizes: &[usize], index: usize| FusedPart {
        name,
        stored,
        stored_rows: sizes.iter().sum::<usize>() * shape.key_heads,
        first_row: sizes[..index].iter().sum(),
        run: sizes[index],
        stride: sizes.iter().sum(),
    };
    let qkvz = [
        "linear_attn.in_proj_q.weight",
        "linear_attn.in_proj_k.weight",
        "linear_attn.in_proj_v.weight",
        "linear_attn.in_proj_z.weight",
    ];
    let qkvz = qkvz.into_iter().enumerate();
    let ba = ["linear_attn.in_proj_b.weight", "linear_attn.in_proj_a.weight"];
    let ba = ba.into_iter().enumerate();
    let qkvz = qkvz.map(|(index, name)| part(name, IN_PROJ_QKVZ, &[key, key, value, value], index));
    qkvz.chain(ba.map(|(index, name)| part(name, IN_PROJ_BA, &[heads, heads], index)))
        .collect()
}

/// Tensors of a recurrent layer.
#[derive(Debug)]
pub(in crate::model) struct RecurrentTensors {
    pub shape: RecurrentShape,
    pub norm_eps: f32,
    pub input: LinearTensors,
    pub conv: TensorSpec,
    pub conv_bias: Option<TensorSpec>,
    pub decay: TensorSpec,
    pub decay_bias: TensorSpec,
    pub skip: Option<TensorSpec>,
    pub norm: TensorSpec,
}

impl RecurrentTensors {
    pub(super) fn of(c: &Config, layer: usize, recurrent: &Recurrent) -> RecurrentTensors {
        let (shape, hidden) = (recurrent.shape, c.hidden_size);
        let (key, value, heads) = (shape.key_width(), shape.value_width(), shape.value_heads);
        let name = |rest: &str| format!("model.layers.{layer}.{}.{rest}", recurrent_name(shape.kind));
        let parts = recurrent_input(recurrent);
        let parts: Vec<(&str, usize)> = parts.iter().map(|(name, rows)| (&**name, *rows)).collect();
        let mut input = LinearTensors::of(layer, &parts, hidden, false);
        if recurrent.by_key_head {
            let stored = [(IN_PROJ_QKVZ, 2 * (key + value)), (IN_PROJ_BA, 2 * heads)];
            input = input.stored_as(layer, &stored, hidden);
        }
        RecurrentTensors {
            shape,
            norm_eps: recurrent.norm_eps,
            input,
            conv: TensorSpec::matrix(name("conv1d.weight"), shape.conv_channels(), shape.conv_width),
            conv_bias: recurrent
                .conv_bias
                .then(|| TensorSpec::vector(name("conv1d.bias"), shape.conv_channels())),
            decay: TensorSpec::vector(name("A_log"), heads),
            decay_bias: TensorSpec::vector(name("dt_bias"), heads),
            skip: (shape.kind == RecurrentKind::Mamba2).then(|| TensorSpec::vector(name("D"), heads)),
            norm: TensorSpec::vector(
                name("norm.weight"),
                match shape.kind {
                    RecurrentKind::DeltaNet => shape.value_dim,
                    RecurrentKind::Mamba2 => value,
                },
            ),
        }
    }

    pub(super) fn stored(&self) -> impl Iterator<Item = &TensorSpec> {
        let vectors = [&self.conv, &self.decay, &self.decay_bias, &self.norm];
        self.input
            .stored()
            .chain(vectors)
            .chain(&self.conv_bias)
            .chain(&self.skip)
    }
}

/// The name of a layer's tensors that belong to recurrence.
pub(super) fn recurrent_name(kind: RecurrentKind) -> &'static str {
    match kind {
        RecurrentKind::DeltaNet => "linear_attn",
        RecurrentKind::Mamba2 => "mamba",
    }
}

/// The projections that make the input of a recurrent layer, each with its rows.
pub(in crate::model) fn recurrent_input(recurrent: &Recurrent) -> Vec<(&'static str, usize)> {
    let shape = recurrent.shape;
    if shape.kind == RecurrentKind::Mamba2 {
        return vec![("mamba.in_proj", shape.input_width())];
    }
    let (key, value, heads) = (shape.key_width(), shape.value_width(), shape.value_heads);
    let qkv = if recurrent.by_key_head {
        vec![
            ("linear_attn.in_proj_q", key),
            ("linear_attn.in_proj_k", key),
            ("linear_attn.in_proj_v", value),
        ]
    } else {
        vec![("linear_attn.in_proj_qkv", shape.conv_channels())]
    };
    let rest = [
        ("linear_attn.in_proj_z", value),
        ("linear_attn.in_proj_b", heads),
        ("linear_attn.in_proj_a", heads),
    ];
    qkv.into_iter().chain(rest).collect()
}
