//! What an engine's steps held, and where their time went.

use std::time::Duration;

use crate::engine::scheduler::StepPlan;

/// One step in numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StepShape {
    /// Tokens of sequences that compute more than one, or one that is not their last: prefill.
    pub prefill_tokens: usize,
    /// Sequences that compute their last token alone: decode.
    pub decode_tokens: usize,
    /// Sequences in the step.
    pub sequences: usize,
    /// Sequences that lost their blocks before it.
    pub preempted: usize,
}

impl StepShape {
    /// A plan in numbers.
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
    /// Saying what a step computes.
    pub planning: Duration,
    /// The model, from tokens to the tokens that it draws; waiting for it where it computes on a device of its own.
    pub forward: Duration,
    /// Masks of constrained sequences, and what becomes of sequences with the tokens drawn.
    pub advance: Duration,
    pub last: StepShape,
}
