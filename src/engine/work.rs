//! A step's work, from the scheduler's plan to the results of its units.

use smallvec::SmallVec;

use crate::device::batch::StepBatch;
use crate::device::cpu::Threads;
use crate::device::draw::{DrawError, Drawn};
use crate::engine::choice::NodeId;
use crate::engine::constraint::GrammarState;
use crate::engine::request::{Completion, Finished, UnitId};
use crate::engine::scheduler::{SequenceId, StepPlan};
use crate::engine::sequence::{Next, SampleState};

/// A unit and the sequences that work for it.
pub(super) struct ActiveUnit {
    pub unit: SampleState,
    /// Ids of the requests that get this result: the first one and identical ones. Cancelled ones are
    /// removed.
    pub ids: Vec<UnitId>,
    pub sequences: SmallVec<[SequenceId; 2]>,
    pub computed_tokens: u64,
}

/// A sequence's row of a step's logits.
pub(super) struct LogitsRow {
    pub sequence: SequenceId,
    pub node: NodeId,
    pub at: usize,
}

/// One unit's share of a step's logits.
pub(super) struct UnitWork {
    pub key: u64,
    pub active: Box<ActiveUnit>,
    pub rows: SmallVec<[LogitsRow; 1]>,
    pub drawn: SmallVec<[Result<Drawn, DrawError>; 1]>,
    /// How each row's sequence goes on, in the order of `rows`.
    pub next: SmallVec<[Next; 1]>,
}

/// A step whose tokens are being drawn.
pub(super) struct PendingStep {
    /// Sequences, and the index of each one's row of the logits.
    pub rows: Vec<(SequenceId, usize)>,
    /// Rows of the logits, including rows whose token nobody waits for.
    pub count: usize,
    /// Tokens computed, by job.
    pub tokens: Vec<(u32, u64)>,
}

/// Computes the masks of grammars. Grammars of one lane run one after the other.
pub(super) fn prepare(threads: &Threads, work: &mut [UnitWork]) {
    let mut lanes: Vec<Vec<&mut GrammarState>> = Vec::new();
    for state in work.iter_mut().filter_map(|w| w.active.unit.grammar()) {
        lanes.resize_with(GrammarState::lanes(), Vec::new);
        lanes[state.lane()].push(state);
    }
    threads.share_mut(usize::MAX, &mut lanes, |_, lanes| {
        lanes.flatten().for_each(|state| state.prepare());
    });
}

/// One result per request that waits for it. The first one carries the computed tokens; the prompts
/// of the others count as cached.
pub(super) fn results(
    ids: Vec<UnitId>,
    result: Result<Completion, String>,
    computed_tokens: u64,
) -> impl Iterator<Item = Finished> {
    ids.into_iter().enumerate().map(move |(at, id)| Finished {
        id,
        result: result.clone().map(|completion| Completion {
            id,
            cached_tokens: if at == 0 {
                completion.cached_tokens
            } else {
                completion.prompt_tokens
            },
            ..completion
        }),
        computed_tokens: if at == 0 { computed_tokens } else { 0 },
    })
}

/// Flattens a plan into a batch for the device.
pub(super) fn batch(plan: &StepPlan) -> StepBatch {
    let mut batch = StepBatch {
        block_copies: plan.copies.clone(),
        deterministic: plan.sequences.iter().any(|planned| planned.deterministic),
        ..StepBatch::default()
    };
    for planned in &plan.sequences {
        let end = planned.start + planned.tokens.len();
        let blocks = &plan.blocks[planned.blocks.clone()];
        batch.push(planned.tokens.iter().copied(), end as u32, blocks.iter().copied());
        if let Some(row) = planned.guessed {
            batch.drawn.push((batch.tokens.len() as u32 - 1, row));
        }
        if planned.samples {
            batch.logits_at.push(batch.tokens.len() as u32 - 1);
        }
    }
    batch
}
