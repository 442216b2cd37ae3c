//! A step on the card: all arrays that its operations share are in one allocation, which one copy
//! uploads.

use std::sync::Arc;

use super::attention_plan::{AttentionShape, BLOCK_TOKENS};
use super::driver::{Context, Memory, PinnedTransfer};
use super::items::{AttentionItem, AttentionPlan};
use super::memory::{ensure_capacity, reuse_staging};
use super::recurrent;
use crate::device::batch::{BlockCopy, StepBatch};
use crate::device::{DeviceError, HeadShape, KvSpec, RopeSpec};

/// Alignment of each array, in bytes.
const ALIGN: usize = 16;

/// A [`StepBatch`] on the card.
pub struct Step {
    pub(super) tokens: usize,
    /// Tokens whose logits are computed.
    pub(super) logits_rows: usize,
    pub(super) block_copies: Vec<BlockCopy>,
    pub(super) state_copies: Vec<BlockCopy>,
    /// Sequences whose recurrent states are updated.
    pub(super) states: usize,
    /// One entry per kind of block table, heads included.
    pub(super) attention: Vec<AttentionStep>,
    offsets: ArrayOffsets,
    memory: Option<Memory>,
    /// The last upload.
    staging: Option<PinnedTransfer>,
    /// All arrays, before they are copied to pinned memory.
    bytes: Vec<u8>,
    rotations: Vec<Rotations>,
}

/// Offsets of a step's arrays in its memory, in bytes.
#[derive(Debug, Clone, Default)]
struct ArrayOffsets {
    tokens: usize,
    positions: usize,
    logits_at: usize,
    state_sequences: usize,
    /// One entry per block table, as in `tables`.
    slots: Vec<usize>,
    tables: Vec<usize>,
}

/// Attention in layers of one kind: its plans, run one after the other. They hold for each of the
/// kind's block tables.
pub(super) struct AttentionStep {
    pub spec: KvSpec,
    pub heads: HeadShape,
    tables: Vec<usize>,
    pub plans: Vec<UploadedPlan>,
}

/// Sizes of an [`AttentionPlan`] whose arrays are on the card.
pub(super) struct UploadedPlan {
    pub wide_items: usize,
    pub narrow_items: usize,
    pub merged_tokens: usize,
    pub part_rows: usize,
    offsets: PlanOffsets,
}

/// Offsets of a plan's arrays in the step's memory, in bytes.
#[derive(Debug, Clone, Copy, Default)]
struct PlanOffsets {
    wide: usize,
    narrow: usize,
    query_tokens: usize,
    merged_tokens: usize,
    first_parts: usize,
    parts: usize,
}

/// Addresses of an attention plan's arrays on the card.
pub(super) struct PlanAddresses {
    pub wide: u64,
    pub narrow: u64,
    pub query_tokens: u64,
    pub merged_tokens: u64,
    pub first_parts: u64,
    pub parts: u64,
}

/// RoPE's cosines and sines at positions `0..positions`; the table grows as needed.
struct Rotations {
    rope: RopeSpec,
    positions: usize,
    /// `[positions][cosines, sines]`.
    memory: Option<Memory>,
}

impl Step {
    pub(super) fn new(ropes: Vec<RopeSpec>, tables: &[(KvSpec, HeadShape)]) -> Step {
        let mut attention: Vec<AttentionStep> = Vec::new();
        for (table, &(spec, heads)) in tables.iter().enumerate() {
            let is_known = |known: &&mut AttentionStep| (known.spec, known.heads) == (spec, heads);
            match attention.iter_mut().find(is_known) {
                Some(known) => known.tables.push(table),
                None => attention.push(AttentionStep {
                    spec,
                    heads,
                    tables: vec![table],
                    plans: Vec::new(),
                }),
            }
        }
        let rotations = ropes.into_iter().map(|rope| Rotations {
            rope,
            positions: 0,
            memory: None,
        });
        Step {
            tokens: 0,
            logits_rows: 0,
            block_copies: Vec::new(),
            state_copies: Vec::new(),
            states: 0,
            attention,
            offsets: ArrayOffsets::default(),
            memory: None,
            staging: None,
            bytes: Vec::new(),
            rotations: rotations.collect(),
        }
    }

    pub(super) fn upload(
        &mut self,
        context: &Arc<Context>,
        shape_of: impl Fn(HeadShape) -> AttentionShape,
        batch: &StepBatch,
    ) -> Result<(), DeviceError> {
        // The previous step may still run. The stream starts this copy only after it.
        self.tokens = batch.tokens.len();
        self.logits_rows = batch.logits_at.len();
        self.block_copies.clone_from(&batch.block_copies);
        self.state_copies.clone_from(&batch.state_copies);
        self.states = batch.state_slots.len();
        self.bytes.clear();
        self.offsets = ArrayOffsets {
            tokens: append_array(&mut self.bytes, &tokens(batch)),
            positions: append_array(&mut self.bytes, &batch.positions),
            logits_at: append_array(&mut self.bytes, &batch.logits_at),
            state_sequences: append_array(&mut self.bytes, &recurrent::sequences(batch)),
            slots: Vec::new(),
            tables: Vec::new(),
        };
        for table in &batch.block_tables {
            let slots = append_array(&mut self.bytes, &slots(batch, table));
            self.offsets.slots.push(slots);
            self.offsets.tables.push(append_array(&mut self.bytes, table));
        }
        for layer in &mut self.attention {
            let item_words = |i: &AttentionItem| [i.first_query, i.queries, i.first_block, i.from, i.to, i.part];
            layer.plans.clear();
            let shape = shape_of(layer.heads);
            for plan in AttentionPlan::of(batch, &shape, (layer.spec, &layer.tables)) {
                let parts = flatten(&plan.parts, |p| [p.part, p.query, p.rows]);
                layer.plans.push(UploadedPlan {
                    wide_items: plan.wide.len(),
                    narrow_items: plan.narrow.len(),
                    merged_tokens: plan.merged_tokens.len(),
                    part_rows: plan.part_rows as usize,
                    offsets: PlanOffsets {
                        wide: append_array(&mut self.bytes, &flatten(&plan.wide, item_words)),
                        narrow: append_array(&mut self.bytes, &flatten(&plan.narrow, item_words)),
                        query_tokens: append_array(&mut self.bytes, &plan.query_tokens),
                        merged_tokens: append_array(&mut self.bytes, &plan.merged_tokens),
                        first_parts: append_array(&mut self.bytes, &plan.first_parts),
                        parts: append_array(&mut self.bytes, &parts),
                    },
                });
            }
        }
        let positions = batch.positions.iter().max().map_or(0, |last| *last as usize + 1);
        for rotations in &mut self.rotations {
            rotations.grow_to(context, positions)?;
        }
        let bytes = self.bytes.len();
        ensure_capacity(context, &mut self.memory, bytes.next_power_of_two(), "a step's plan")?;
        let mut staging = reuse_staging(context, self.staging.take(), bytes)?;
        staging[..bytes].copy_from_slice(&self.bytes);
        if let Some(memory) = &self.memory {
            self.staging = Some(context.send(staging, bytes, memory)?);
        }
        Ok(())
    }

    fn address_of(&self, offset: usize) -> u64 {
        self.memory
            .as_ref()
            .map_or(0, |memory| memory.address() + offset as u64)
    }

    pub(super) fn token_ids(&self) -> u64 {
        self.address_of(self.offsets.tokens)
    }

    pub(super) fn positions(&self) -> u64 {
        self.address_of(self.offsets.positions)
    }

    pub(super) fn slots(&self, table: usize) -> u64 {
        self.address_of(self.offsets.slots[table])
    }

    pub(super) fn logits_at(&self) -> u64 {
        self.address_of(self.offsets.logits_at)
    }

    pub(super) fn state_sequences(&self) -> u64 {
        self.address_of(self.offsets.state_sequences)
    }

    pub(super) fn tables(&self, table: usize) -> u64 {
        self.address_of(self.offsets.tables[table])
    }

    pub(super) fn rotations(&self, rope: usize) -> u64 {
        self.rotations[rope].memory.as_ref().map_or(0, Memory::address)
    }

    pub(super) fn plan_addresses(&self, plan: &UploadedPlan) -> PlanAddresses {
        let offsets = plan.offsets;
        PlanAddresses {
            wide: self.address_of(offsets.wide),
            narrow: self.address_of(offsets.narrow),
            query_tokens: self.address_of(offsets.query_tokens),
            merged_tokens: self.address_of(offsets.merged_tokens),
            first_parts: self.address_of(offsets.first_parts),
            parts: self.address_of(offsets.parts),
        }
    }
}

/// Appends an aligned array and returns its offset in bytes.
fn append_array(bytes: &mut Vec<u8>, array: &[u32]) -> usize {
    bytes.resize(bytes.len().next_multiple_of(ALIGN), 0);
    let offset = bytes.len();
    bytes.extend(array.iter().flat_map(|word| word.to_ne_bytes()));
    offset
}

/// The records' fields in the order of their layout on the card.
fn flatten<T, const N: usize>(records: &[T], fields: impl Fn(&T) -> [u32; N]) -> Vec<u32> {
    records.iter().flat_map(fields).collect()
}

/// Marks a token that the previous step draws; the other bits are the row of logits that it is
/// drawn from. `IS_DRAWN` in `kernels/common/drawn.cuh`.
const IS_DRAWN: u32 = 1 << 31;

/// Token ids; for tokens that the previous step draws, [`IS_DRAWN`] and their row.
fn tokens(batch: &StepBatch) -> Vec<u32> {
    let mut tokens = batch.tokens.clone();
    for &(token, row) in &batch.pending_tokens {
        tokens[token as usize] = IS_DRAWN | row;
    }
    tokens
}

/// KV slot of each token's key and value in the blocks of one block table: block index times tokens
/// per block, plus the offset in the block.
fn slots(batch: &StepBatch, table: &[u32]) -> Vec<u32> {
    let mut slots = Vec::with_capacity(batch.tokens.len());
    for s in &batch.sequences {
        for position in s.kv_len - s.q_len..s.kv_len {
            let block = table[(s.first_block + position / BLOCK_TOKENS) as usize];
            slots.push(block * BLOCK_TOKENS + position % BLOCK_TOKENS);
        }
    }
    slots
}

impl Rotations {
    /// Grows the table to at least the first `positions` positions.
    fn grow_to(&mut self, context: &Arc<Context>, positions: usize) -> Result<(), DeviceError> {
        if positions <= self.positions {
            return Ok(());
        }
        let positions = positions.next_power_of_two().max(1024);
        let mut table: Vec<u8> = Vec::with_capacity(positions * self.rope.inverse_frequencies.len() * 8);
        for position in 0..positions {
            table.extend(self.rope.rotation(position).flat_map(f32::to_ne_bytes));
        }
        self.memory = None;
        self.memory = Some(context.allocate_copy(&table, "the rotations of all positions")?);
        self.positions = positions;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::batch::StepSequence;

    #[test]
    fn slots_follow_the_block_tables() {
        let batch = StepBatch {
            tokens: vec![0; 5],
            positions: vec![62, 63, 64, 65, 0],
            sequences: vec![
                StepSequence {
                    first_token: 0,
                    q_len: 4,
                    kv_len: 66,
                    first_block: 0,
                    adapter: 0,
                },
                StepSequence {
                    first_token: 4,
                    q_len: 1,
                    kv_len: 1,
                    first_block: 2,
                    adapter: 0,
                },
            ],
            block_tables: vec![vec![7, 3, 9]],
            ..StepBatch::default()
        };
        assert_eq!(
            slots(&batch, &batch.block_tables[0]),
            [7 * 64 + 62, 7 * 64 + 63, 3 * 64, 3 * 64 + 1, 9 * 64]
        );
    }

    #[test]
    fn each_kind_of_layers_and_shape_of_heads_has_plans_of_its_own() {
        let heads = |kv_heads, head_dim| HeadShape {
            heads: 8,
            kv_heads,
            head_dim,
            value_in_key: None,
        };
        let (small, large, window) = (heads(8, 64), heads(1, 512), KvSpec::Window(20));
        let tables = [
            (window, small),
            (KvSpec::Full, large),
            (window, small),
            (KvSpec::Full, small),
        ];
        let step = Step::new(Vec::new(), &tables);
        let kinds = step
            .attention
            .iter()
            .map(|kind| (kind.spec, kind.heads, &kind.tables[..]));
        assert_eq!(
            kinds.collect::<Vec<_>>(),
            [
                (window, small, &[0, 2][..]),
                (KvSpec::Full, large, &[1]),
                (KvSpec::Full, small, &[3])
            ]
        );
    }

    #[test]
    fn arrays_are_aligned() {
        let mut bytes = Vec::new();
        assert_eq!(append_array(&mut bytes, &[1, 2, 3]), 0);
        assert_eq!(append_array(&mut bytes, &[4]), 16);
        assert_eq!(append_array(&mut bytes, &[]), 32);
        assert_eq!(bytes.len(), 32);
    }
}
