//! Launches the kernel that combines gates and up projections.

use super::driver::Argument;
use super::memory::Buffer;
use super::{Cuda, plan};
use crate::device::{Activation, DeviceError, no_mlps_without_gates};

impl Cuda {
    /// Combines the gate and the up projection of each row.
    pub(super) fn activate(
        &self,
        activation: Activation,
        gate_up: &Buffer,
        out: &mut Buffer,
    ) -> Result<(), DeviceError> {
        let (alpha, limit) = match activation {
            Activation::ClampedSwiglu { alpha, limit } => (alpha, limit),
            Activation::Silu | Activation::GeluTanh => (0.0, 0.0),
            Activation::SquaredRelu => return Err(no_mlps_without_gates()),
        };
        let width = gate_up.width / 2;
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
