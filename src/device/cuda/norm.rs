//! Launches the kernel that adds to the residual stream and normalises it.

use super::driver::Argument;
use super::memory::Buffer;
use super::plan::{self, KernelFormat, NormKind};
use super::{Cuda, Norm};
use crate::device::{AddNorm, DeviceError};

impl Cuda {
    /// Adds the delta, then normalises all rows, or those listed at address `row_indices` (0: all).
    pub(super) fn launch_add_norm(
        &self,
        op: &AddNorm<'_, Buffer, Norm>,
        residual: &Buffer,
        (row_indices, rows): (u64, usize),
        format: KernelFormat,
        out: &mut Buffer,
    ) -> Result<(), DeviceError> {
        out.reshape(&self.context, rows, residual.width, format)?;
        let delta_norm = op.delta.as_ref().and_then(|delta| delta.norm);
        let factor = op.delta.as_ref().map_or(1.0, |delta| delta.scale);
        let kind = NormKind {
            of_delta: delta_norm.is_some(),
            is_centered: op.centered,
            is_scaled: factor != 1.0,
        };
        self.launch(
            &plan::add_norm(residual.width, format, kind, rows),
            &[
                residual.data(),
                op.delta
                    .as_ref()
                    .map_or(Argument::Address(0), |delta| delta.rows.data()),
                Argument::Address(delta_norm.map_or(0, |norm| norm.0.address())),
                Argument::Address(op.weight.0.address()),
                Argument::Address(row_indices),
                Argument::Float(op.eps),
                Argument::Float(factor),
                out.data(),
                out.scales(),
            ],
        )
    }
}
