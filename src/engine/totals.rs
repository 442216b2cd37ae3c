//! Sizes of an engine's steps, and the time spent in each phase.

use std::time::Duration;

use crate::engine::plan::{PlannedSequence, StepPlan};

/// The size of one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StepSize {
    /// Tokens of sequences that compute several tokens, or a single token that is not their last:
    /// prefill.
    pub prefill_tokens: usize,
    /// Tokens of sequences that compute only their last token: decode.
    pub decode_tokens: usize,
    /// Sequences in the step.
    pub sequences: usize,
    /// Sequences that lost their blocks before the step.
    pub preempted: usize,
}

impl StepSize {
    /// The size of a plan.
    pub fn of(plan: &StepPlan) -> StepSize {
        let is_decode = |planned: &&PlannedSequence| planned.needs_logits && planned.tokens.len() == 1;
        let decode_tokens = plan.sequences.iter().filter(is_decode).count();
        let tokens: usize = plan.sequences.iter().map(|planned| planned.tokens.len()).sum();
        StepSize {
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

/// What an engine holds after a step, for metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EngineLoad {
    /// Sequences that run.
    pub running: usize,
    /// Sequences that wait to be started or resumed, and requests whose shape is being compiled.
    pub waiting: usize,
    /// KV blocks that sequences hold. A cached block that no sequence holds does not count.
    pub kv_blocks_held: usize,
    /// All KV blocks.
    pub kv_blocks: usize,
    /// How often a sequence has lost its blocks so far.
    pub preemptions: u64,
}

/// Sums over an engine's steps.
#[derive(Debug, Clone, Copy, Default)]
pub struct StepTotals {
    pub steps: u64,
    /// How often a sequence has lost its blocks.
    pub preemptions: u64,
    /// Time spent planning steps.
    pub planning: Duration,
    /// Time in the model, from input tokens to drawn tokens. On a GPU, the time spent waiting for
    /// it.
    pub forward: Duration,
    /// Time spent on computing masks and on applying drawn tokens to their sequences.
    pub advance: Duration,
    pub last_step: StepSize,
}
