//! Steps as the [scheduler](crate::engine::scheduler) plans them, and their limits.

use std::ops::Range;

use smallvec::SmallVec;

use crate::device::batch::BlockCopy;

/// Identifies a sequence for as long as the scheduler knows it.
pub type SequenceId = u64;

/// Limits of a step.
#[derive(Debug, Clone, Copy)]
pub struct StepLimits {
    /// Maximum tokens computed in one step.
    pub max_step_tokens: usize,
    /// Maximum number of sequences in one step. A sequence is started only if fewer are running,
    /// not counting those that have nothing to compute until their next token is drawn.
    pub max_sequences: usize,
    pub policy: Policy,
}

/// The techniques by which the scheduler fills steps. All are on, except when the effect of a
/// technique is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// Whether to order the window; otherwise sequences start in order of arrival.
    pub sort_window: bool,
    /// Whether to share computed blocks of common prefixes.
    pub share_prefixes: bool,
    /// Whether to mix prefill and decode in one step; otherwise prefill runs first, in steps of its
    /// own.
    pub mix_phases: bool,
    /// Whether to start sequences as others end; otherwise they start only when all have ended.
    pub refill: bool,
}

impl Default for Policy {
    fn default() -> Policy {
        Policy {
            sort_window: true,
            share_prefixes: true,
            mix_phases: true,
            refill: true,
        }
    }
}

/// One sequence's share of a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedSequence {
    pub id: SequenceId,
    /// Position of the first token computed.
    pub start: usize,
    /// The tokens computed.
    pub tokens: SmallVec<[u32; 4]>,
    /// Range in each of [`StepPlan::blocks`] of the blocks that hold all tokens up to the last one
    /// computed.
    pub blocks: Range<usize>,
    /// The slot of its recurrent state.
    pub state: Option<u32>,
    /// Whether the last token computed is the sequence's last, so that the next token is sampled
    /// from its logits.
    pub needs_logits: bool,
    /// If the last token computed is a placeholder: the row of the previous step's logits from
    /// which the token is drawn.
    pub placeholder_row: Option<u32>,
    /// The number of the adapter that changes the model for it; 0: none does.
    pub adapter: u32,
    /// Whether its results must be bitwise independent of other sequences.
    pub deterministic: bool,
}

/// A step to run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StepPlan {
    pub sequences: Vec<PlannedSequence>,
    /// For each block table, blocks of all sequences, one sequence after the other.
    pub blocks: Vec<Vec<u32>>,
    /// Blocks to copy before anything is computed.
    pub copies: Vec<BlockCopy>,
    /// Slots of recurrent states to copy, in this order, before anything is computed.
    pub state_copies: Vec<BlockCopy>,
    /// Sequences started for the first time, each with the number of its tokens that the prefix
    /// index held.
    pub started: Vec<(SequenceId, usize)>,
    /// Sequences that lost their blocks.
    pub preempted: Vec<SequenceId>,
}
