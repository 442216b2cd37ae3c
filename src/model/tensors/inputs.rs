//! The tensors of inputs that each layer has besides the stream.

use super::{LinearTensors, TensorSpec};
use crate::model::config::{Config, LayerInputs};

/// Tensors of what a layer makes of its own inputs.
#[derive(Debug)]
pub(in crate::model) struct InputTensors {
    pub gate: LinearTensors,
    pub projection: LinearTensors,
    pub post_norm: TensorSpec,
}

impl InputTensors {
    pub(super) fn of(c: &Config, layer: usize, inputs: LayerInputs) -> InputTensors {
        let (gate, projection) = ("per_layer_input_gate", "per_layer_projection");
        let norm = format!("model.layers.{layer}.post_per_layer_input_norm.weight");
        InputTensors {
            gate: LinearTensors::of(layer, &[(gate, inputs.width)], c.hidden_size, false),
            projection: LinearTensors::of(layer, &[(projection, c.hidden_size)], inputs.width, false),
            post_norm: TensorSpec::vector(norm, c.hidden_size),
        }
    }

    pub(super) fn stored(&self) -> impl Iterator<Item = &TensorSpec> {
        let linear = [&self.gate, &self.projection]
            .into_iter()
            .flat_map(LinearTensors::stored);
        linear.chain([&self.post_norm])
    }
}

/// Tensors of the inputs of all layers.
#[derive(Debug)]
pub(in crate::model) struct AllInputsTensors {
    pub table: TensorSpec,
    pub projection: LinearTensors,
    pub norm: TensorSpec,
}

impl AllInputsTensors {
    pub(super) fn of(c: &Config, inputs: LayerInputs) -> AllInputsTensors {
        let width = c.layers.len() * inputs.width;
        let name = |name: &str| format!("model.{name}.weight");
        AllInputsTensors {
            table: TensorSpec::matrix(name("embed_tokens_per_layer"), inputs.vocab_size, width),
            projection: LinearTensors {
                weights: vec![TensorSpec::matrix(
                    name("per_layer_model_projection"),
                    width,
                    c.hidden_size,
                )],
                biases: Vec::new(),
                stored_instead: None,
            },
            norm: TensorSpec::vector(name("per_layer_projection_norm"), inputs.width),
        }
    }

    pub(super) fn stored(&self) -> impl Iterator<Item = &TensorSpec> {
        [&self.table, &self.norm].into_iter().chain(self.projection.stored())
    }
}
