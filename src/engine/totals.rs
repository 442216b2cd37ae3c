//! Sizes of an engine's steps, and time spent in each phase.

use std::time::Duration;

use crate::engine::scheduler::StepPlan;

/// The size of one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StepShape {
    /// Tokens of sequences that compute more than one token, or one that is not their last:
    /// prefill.
    pub prefill_tokens: usize,
    /// Sequences that compute only their last token: decode.
    pub decode_tokens: usize,
    /// Sequences in the step.
    pub sequences: usize,
    /// Sequences that lost their blocks before the step.
    pub preempted: usize,
}

impl StepShape {
    /// The size of a plan.
    pub fn of(plan: &StepPlan) -> StepShape {
        let decodes = |planned: &&crate::engine::scheduler::Planned| planned.samples && planned.tokens.len() == 1;
        let decode_tokens = plan.sequences.iter().filter(decodes).count();
        let tokens: usize = plan.sequences.iter().map(|planned| planned.tokens.len()).sum();
        StepShape {
            prefill_tokens: tokens - decode_tokens,
            decode_tokens,
            sequences: plan.sequences.len(),
            preempted: plan.preempted.len(),
        }
    }

    /// Tokens computed.
    pub fn tokens(&self) -> usize {
        self.prefill_tokens + self.decode_tokens
    }
}

/// Sums over an engine's steps.
#[derive(Debug, Clone, Copy, Default)]
pub struct StepTotals {
    pub steps: u64,
    /// Time spent planning steps.
    pub planning: Duration,
    /// Time in the model, from input tokens to drawn tokens. On a device of its own, the time spent
    /// waiting for it.
    pub forward: Duration,
    /// Time spent on masks of constrained sequences, and on applying drawn tokens to their
    /// sequences.
    pub advance: Duration,
    pub last: StepShape,
}
