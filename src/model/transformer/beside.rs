//! Experts beside an MLP: both read the residual stream through norms of their own, and so does the
//! router. What they write is normalised before it is added up.

use super::{Buffers, stream_norm};
use crate::device::{AddNorm, Delta, Device, DeviceError, ExpertInput};
use crate::model::build::BothWeights;
use crate::model::config::Config;
use crate::model::times::Operation;

impl<D: Device> BothWeights<D> {
    /// Computes what is added to the stream, in `projected`, from the stream and from `normed`, the MLP's input.
    pub(super) fn run(
        &self,
        device: &D,
        config: &Config,
        b: &mut Buffers<D>,
        lap: &mut dyn FnMut(Operation) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let norm = |delta, weight| AddNorm {
            in_f32: true,
            ..stream_norm::<D>(config, delta, weight)
        };
        device.gated_linear(
            &self.gate_up,
            config.activation,
            &b.normed,
            &mut b.gated,
            &mut b.workspace,
        )?;
        lap(Operation::GatedLinear)?;
        device.linear(&self.down, &b.gated, &mut b.projected, &mut b.workspace)?;
        lap(Operation::Linear)?;
        device.add_norm(norm(None, &self.router_norm), &mut b.residual, &mut b.router_rows)?;
        device.add_norm(norm(None, &self.expert_norm), &mut b.residual, &mut b.normed)?;
        lap(Operation::Norm)?;
        let input = ExpertInput {
            rows: &b.normed,
            router_rows: &b.router_rows,
        };
        device.experts(
            &self.experts,
            config.activation,
            input,
            &mut b.experts,
            &mut b.workspace,
        )?;
        lap(Operation::Experts)?;
        let [of_mlp, of_experts] = &self.post_norms;
        // What is added up begins with the MLP's output. The norm of the sum has no use.
        device.add_norm(norm(None, of_mlp), &mut b.projected, &mut b.router_rows)?;
        std::mem::swap(&mut b.projected, &mut b.router_rows);
        let delta = Delta {
            rows: &b.experts,
            norm: Some(of_experts),
            scale: 1.0,
        };
        device.add_norm(norm(Some(delta), of_mlp), &mut b.projected, &mut b.router_rows)?;
        lap(Operation::Norm)
    }
}
