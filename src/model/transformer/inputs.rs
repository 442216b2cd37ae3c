//! Inputs that each layer has besides the stream (Gemma 4 E2B and E4B).

use super::Buffers;
use crate::device::{Device, DeviceError, LayerInputs};
use crate::model::build::{AllInputsWeights, InputWeights};
use crate::model::config::Config;

impl<D: Device> AllInputsWeights<D> {
    /// Computes the inputs of all layers from the step's tokens and from their embeddings, which the
    /// stream holds.
    pub(super) fn run(
        &self,
        device: &D,
        config: &Config,
        step: &D::Step,
        b: &mut Buffers<D>,
    ) -> Result<(), DeviceError> {
        let width = config.layer_inputs.map_or(1, |inputs| inputs.width);
        let how = ((width as f32).sqrt(), config.placeholders.as_ref());
        device.embed(&self.table, how, step, &mut b.inputs, &b.workspace)?;
        device.linear(&self.projection, &b.residual, &mut b.gates, &mut b.workspace)?;
        let op = LayerInputs {
            projected: &b.gates,
            norm: &self.norm,
            // The model divides what is normalised by the square root of the stream's width: only the
            // epsilon shows it.
            eps: config.norm_eps * config.hidden_size as f32,
            scale: std::f32::consts::FRAC_1_SQRT_2,
        };
        device.add_layer_inputs(op, &mut b.inputs)
    }
}

impl<D: Device> InputWeights<D> {
    /// Computes what layer `index` adds to the stream, of which a gate reads what it has so far.
    pub(super) fn run(&self, device: &D, config: &Config, index: usize, b: &mut Buffers<D>) -> Result<(), DeviceError> {
        device.linear(&self.gate, &b.residual, &mut b.gates, &mut b.workspace)?;
        device.gate_layer_input(config.activation, &b.gates, (&b.inputs, index), &mut b.gated)?;
        device.linear(&self.projection, &b.gated, &mut b.projected, &mut b.workspace)
    }
}
