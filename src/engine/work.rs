//! A step's work, from the scheduler's plan to the results of its samples.

use smallvec::SmallVec;

use crate::device::batch::StepBatch;
use crate::device::cpu::Threads;
use crate::device::draw::{DrawError, DrawnToken};
use crate::engine::Forward;
use crate::engine::choice::NodeId;
use crate::engine::constraint::GrammarState;
use crate::engine::kv::KvCache;
use crate::engine::plan::{SequenceId, StepPlan};
use crate::engine::request::{Completion, FinishedSample, SampleId};
use crate::engine::sequence::{SampleState, TokenOutcome};

/// The empty KV cache of a model.
pub(super) fn kv_cache(forward: &dyn Forward) -> KvCache {
    let tables = forward.kv_tables().to_vec();
    KvCache::new(forward.kv_blocks(), forward.block_tokens().max(1), tables)
}

/// A sample, and the sequences that compute it.
pub(super) struct ActiveSample {
    pub state: SampleState,
    /// Ids of the requests that get this result: the first request and equal ones. Ids of cancelled
    /// requests are removed.
    pub ids: Vec<SampleId>,
    pub sequences: SmallVec<[SequenceId; 2]>,
    pub computed_tokens: u64,
}

/// A sequence's row of a step's logits.
pub(super) struct LogitsRow {
    pub sequence: SequenceId,
    pub node: NodeId,
    /// Index of the row in the step's logits.
    pub index: usize,
}

/// One sample's share of a step's logits.
pub(super) struct SampleWork {
    /// Key of the sample in the engine's `samples`.
    pub sample_key: u64,
    pub sample: Box<ActiveSample>,
    pub rows: SmallVec<[LogitsRow; 1]>,
    pub drawn: SmallVec<[Result<DrawnToken, DrawError>; 1]>,
    /// The outcome of each row's token, in the order of `rows`.
    pub outcomes: SmallVec<[TokenOutcome; 1]>,
}

/// A step whose tokens are being drawn.
pub(super) struct PendingStep {
    /// Each sequence, with the index of its row in the logits.
    pub rows: Vec<(SequenceId, usize)>,
    /// Number of rows of the logits, including rows of sequences that have ended.
    pub logits_rows: usize,
    /// Tokens computed, by job.
    pub tokens: Vec<(u32, u64)>,
}

/// Computes the grammars' masks. The grammars of one lane run one after the other.
pub(super) fn compute_masks(threads: &Threads, work: &mut [SampleWork]) {
    let mut lanes: Vec<Vec<&mut GrammarState>> = Vec::new();
    for state in work.iter_mut().filter_map(|w| w.sample.state.grammar()) {
        lanes.resize_with(GrammarState::lane_count(), Vec::new);
        lanes[state.lane()].push(state);
    }
    threads.parallel_for_each(usize::MAX, &mut lanes, |_, lanes| {
        lanes.flatten().for_each(|state| state.prepare());
    });
}

/// One result per request that waits for it. The first result carries the computed tokens; the
/// prompts of the others count as cached.
pub(super) fn results(
    ids: Vec<SampleId>,
    result: Result<Completion, String>,
    computed_tokens: u64,
) -> impl Iterator<Item = FinishedSample> {
    ids.into_iter().enumerate().map(move |(index, id)| FinishedSample {
        id,
        result: result.clone().map(|completion| Completion {
            id,
            cached_tokens: if index == 0 {
                completion.cached_tokens
            } else {
                completion.prompt_tokens
            },
            ..completion
        }),
        computed_tokens: if index == 0 { computed_tokens } else { 0 },
    })
}

/// Flattens a plan into a batch for the device, and takes its block tables.
pub(super) fn batch(plan: &mut StepPlan) -> StepBatch {
    let mut batch = StepBatch {
        block_tables: std::mem::take(&mut plan.blocks),
        block_copies: plan.copies.clone(),
        state_slots: plan.sequences.iter().filter_map(|planned| planned.state).collect(),
        state_copies: plan.state_copies.clone(),
        deterministic: plan.sequences.iter().any(|planned| planned.deterministic),
        ..StepBatch::default()
    };
    for planned in &plan.sequences {
        let end = planned.start + planned.tokens.len();
        let (tokens, first_block) = (planned.tokens.iter().copied(), planned.blocks.start as u32);
        batch.push_sequence(tokens, end as u32, first_block, planned.adapter);
        if let Some(row) = planned.placeholder_row {
            batch.pending_tokens.push((batch.tokens.len() as u32 - 1, row));
        }
        if planned.needs_logits {
            batch.logits_at.push(batch.tokens.len() as u32 - 1);
        }
    }
    batch
}
