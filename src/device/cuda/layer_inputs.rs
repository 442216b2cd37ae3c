//! Launches of the kernels for inputs of each layer.

use super::driver::{Argument, Memory};
use super::memory::Buffer;
use super::plan::{self, KernelFormat};
use super::{Cuda, Norm, not_supported};
use crate::device::{Activation, DeviceError, LayerInputs};

impl Cuda {
    /// Implements [`add_layer_inputs`](crate::device::Device::add_layer_inputs).
    pub(super) fn add_inputs(&self, op: &LayerInputs<'_, Buffer, Norm>, inputs: &Buffer) -> Result<(), DeviceError> {
        let width = op.norm.values();
        assert_eq!(
            (op.projected.rows, op.projected.width),
            (inputs.rows, inputs.width),
            "a projection of other rows"
        );
        assert!(width.is_multiple_of(8) && inputs.width.is_multiple_of(width));
        let parts = inputs.rows * inputs.width / width;
        self.launch(
            &plan::add_inputs(parts),
            &[
                op.projected.data(),
                Argument::Address(op.norm.0.address()),
                inputs.data(),
                Argument::Int(parts as i32),
                Argument::Int(width as i32),
                Argument::Float(op.eps),
                Argument::Float(op.scale),
            ],
        )
    }

    /// Implements [`gate_layer_input`](crate::device::Device::gate_layer_input).
    pub(super) fn gate_input(
        &self,
        activation: Activation,
        gate: &Buffer,
        (inputs, layer): (&Buffer, usize),
        out: &mut Buffer,
    ) -> Result<(), DeviceError> {
        if activation != Activation::GeluTanh {
            return Err(not_supported("inputs of layers with this activation"));
        }
        let (rows, width) = (gate.rows, gate.width);
        assert!(rows == inputs.rows && (layer + 1) * width <= inputs.width && width.is_multiple_of(8));
        assert!([gate.format, inputs.format] == [KernelFormat::Bf16; 2]);
        out.reshape(&self.context, rows, width, self.row_format)?;
        let part = inputs.data.as_ref().map_or(0, Memory::address) + (layer * width * 2) as u64;
        self.launch(
            &plan::gate_input(width, self.row_format, rows),
            &[
                gate.data(),
                Argument::Address(part),
                Argument::Int(inputs.width as i32),
                out.data(),
                out.scales(),
            ],
        )
    }
}
