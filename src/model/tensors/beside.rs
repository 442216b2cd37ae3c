//! The tensors of experts beside an MLP.

use super::{ExpertTensors, GatedTensors, TensorSpec};
use crate::model::config::{Config, Experts};

/// The norm of what experts beside an MLP read.
pub(in crate::model) const EXPERT_NORM: &str = "pre_feedforward_layernorm_2.weight";

/// Tensors of an MLP and of experts beside it.
#[derive(Debug)]
pub(in crate::model) struct BothTensors {
    pub plain: GatedTensors,
    pub experts: ExpertTensors,
    /// A factor of each expert's weight.
    pub scales: TensorSpec,
    /// Of what the router reads, to be divided by the square root of the width.
    pub router_norm: TensorSpec,
    pub expert_norm: TensorSpec,
    /// Of the MLP's output, and of that of the experts, before their sum.
    pub post_norms: [TensorSpec; 2],
}

impl BothTensors {
    pub(super) fn of(c: &Config, layer: usize, experts: &Experts) -> BothTensors {
        let vector = |rest: &str, width| TensorSpec::vector(format!("model.layers.{layer}.{rest}"), width);
        BothTensors {
            plain: GatedTensors::of(c, layer, "mlp", c.mlp_width(layer)),
            experts: ExpertTensors::of(c, layer, experts),
            scales: vector("router.per_expert_scale", experts.count),
            router_norm: vector("router.scale", c.hidden_size),
            expert_norm: vector(EXPERT_NORM, c.hidden_size),
            post_norms: [1, 2].map(|i| vector(&format!("post_feedforward_layernorm_{i}.weight"), c.hidden_size)),
        }
    }

    pub(super) fn stored(&self) -> impl Iterator<Item = &TensorSpec> {
        let vectors = [&self.scales, &self.router_norm, &self.expert_norm];
        let vectors = vectors.into_iter().chain(&self.post_norms);
        self.plain.stored().chain(self.experts.stored()).chain(vectors)
    }
}
