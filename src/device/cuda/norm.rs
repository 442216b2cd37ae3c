//! Launches the kernel that adds to the residual stream and normalises it.

use super::driver::Argument;
use super::memory::Buffer;
use super::plan::{self, KernelFormat};
use super::{Cuda, Norm, not_supported};
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
        if op.delta.as_ref().is_some_and(|delta| delta.scale != 1.0) {
            return Err(not_supported("factors of the residual stream"));
        }
        out.reshape(&self.context, rows, residual.width, format)?;
        let delta_norm = op.delta.as_ref().and_then(|delta| delta.norm);
        self.launch(
            &plan::add_norm(residual.width, format, (delta_norm.is_some(), op.centered), rows),
            &[
                residual.data(),
                op.delta
                    .as_ref()
                    .map_or(Argument::Address(0), |delta| delta.rows.data()),
                Argument::Address(delta_norm.map_or(0, |norm| norm.0.address())),
                Argument::Address(op.weight.0.address()),
                Argument::Address(row_indices),
                Argument::Float(op.eps),
                out.data(),
                out.scales(),
            ],
        )
    }
}
