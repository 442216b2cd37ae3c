//! Launches the kernel of activations, which combines gates and up projections.

use super::driver::Argument;
use super::memory::Buffer;
use super::{Cuda, plan};
use crate::device::{Activation, DeviceError};

impl Cuda {
    /// Combines the gate and the up projection of each row. Without a gate, rows have the latter alone.
    pub(super) fn activate(
        &self,
        activation: Activation,
        gate_up: &Buffer,
        out: &mut Buffer,
    ) -> Result<(), DeviceError> {
        let (alpha, limit) = match activation {
            Activation::ClampedSwiglu { alpha, limit } => (alpha, limit),
            Activation::Silu | Activation::GeluTanh | Activation::SquaredRelu => (0.0, 0.0),
        };
        let width = gate_up.width / if activation.has_gate() { 2 } else { 1 };
        out.reshape(&self.context, gate_up.rows, width, self.row_format)?;
        self.launch(
            &plan::gated(width, self.row_format, activation, gate_up.rows),
            &[
                gate_up.data(),
                out.data(),
                out.scales(),
                Argument::Float(alpha),
                Argument::Float(limit),
            ],
        )
    }
}
