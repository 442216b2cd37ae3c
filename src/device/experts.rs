//! Routed experts: how a layer's router chooses among them, and their weights.

use super::Linear;

/// What a router makes of an expert's logit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Score {
    /// Its softmax over all experts.
    Softmax,
    /// `1 / (1 + e^-logit)`.
    Sigmoid,
}

/// Experts in groups of equal size, of which a token uses some.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertGroups {
    /// Divides the number of experts.
    pub count: usize,
    /// Groups whose experts a token may use.
    pub chosen: usize,
    /// A group's score is the sum of so many of its experts' largest scores, corrections included.
    pub best: usize,
}

/// How a router chooses a token's experts: those with the largest scores, each plus its
/// [correction](ExpertWeights::correction). Their weights are the scores, without corrections.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Routing {
    /// From 1 to the number of experts.
    pub per_token: usize,
    pub score: Score,
    /// `None`: all experts are one group.
    pub groups: Option<ExpertGroups>,
    /// Whether the weights of a token's experts are divided by their sum.
    pub renormalized: bool,
    /// Factor of the weights, after the division.
    pub scale: f32,
    /// Whether weights are factors of what experts read, and not of what they write.
    pub scales_input: bool,
}

/// Weights of a layer's routed experts, MLPs of which each token uses some.
pub struct ExpertWeights<M, V> {
    /// `[experts][hidden]`, of [`Device::router_matrix`](crate::device::Device::router_matrix).
    pub router: Linear<M, V>,
    pub routing: Routing,
    /// `[experts]`: added to scores where experts are chosen. In F32, whatever the precision.
    pub correction: Option<V>,
    /// `[experts]`: a factor of each expert's weight, after all else. In F32, whatever the precision.
    pub scales: Option<V>,
    /// For each expert, the linear operation of [`Device::gated_linear`](crate::device::Device::gated_linear). A device that
    /// [stacks experts](crate::device::Device::stacks_experts) has a single one here.
    pub gate_up: Vec<Linear<M, V>>,
    pub down: Vec<Linear<M, V>>,
    pub shared: Option<SharedExpert<M, V>>,
}

/// What [`Device::experts`](crate::device::Device::experts) reads, row by row.
pub struct ExpertInput<'a, B> {
    pub rows: &'a B,
    /// What the router reads: mostly the same.
    pub router_rows: &'a B,
}

impl<'a, B> ExpertInput<'a, B> {
    /// Input of which the router and the experts read the same.
    pub fn same(rows: &'a B) -> ExpertInput<'a, B> {
        ExpertInput {
            rows,
            router_rows: rows,
        }
    }
}

/// Weights of an MLP that every token uses beside those that its router chooses.
pub struct SharedExpert<M, V> {
    /// The linear operation of [`Device::gated_linear`](crate::device::Device::gated_linear).
    pub gate_up: Linear<M, V>,
    pub down: Linear<M, V>,
    /// Whether the router has one row more, whose sigmoid is this MLP's weight. Otherwise the weight
    /// is 1.
    pub is_weighted: bool,
}
