//! A step on the card: the arrays that its operations share lie in one allocation, uploaded in one
//! copy.

use std::sync::Arc;

use super::driver::{Busy, Context, Memory};
use super::items::{AttentionItem, Plan};
use super::memory::{staged, want};
use super::plan::{BLOCK_TOKENS, Heads};
use crate::device::batch::StepBatch;
use crate::device::{DeviceError, HeadShape, KvSpec, RopeSpec};

/// Alignment of each array, in bytes.
const ALIGN: usize = 16;

/// A [`StepBatch`] with the arrays that its operations share.
pub struct Step {
    pub(super) shape: HeadShape,
    pub(super) tokens: usize,
    pub(super) logits: usize,
    pub(super) block_copies: Vec<(u32, u32)>,
    /// One per kind of layer.
    pub(super) attention: Vec<AttentionStep>,
    offsets: ArrayOffsets,
    memory: Option<Memory>,
    /// Pinned memory of the last upload.
    staging: Option<Busy>,
    bytes: Vec<u8>,
    rotations: Vec<Rotations>,
}

/// Offsets of a step's arrays, in bytes from the start of its memory.
#[derive(Debug, Clone, Copy, Default)]
struct ArrayOffsets {
    tokens: usize,
    positions: usize,
    slots: usize,
    logits_at: usize,
    tables: usize,
}

/// Attention of layers of one kind: its plans, run one after the other.
pub(super) struct AttentionStep {
    pub spec: KvSpec,
    pub plans: Vec<PlanStep>,
}

/// A plan on the card.
pub(super) struct PlanStep {
    pub wide: usize,
    pub narrow: usize,
    pub merged: usize,
    pub part_rows: usize,
    offsets: PlanPlaces,
}

#[derive(Debug, Clone, Copy, Default)]
struct PlanPlaces {
    wide: usize,
    narrow: usize,
    queries: usize,
    merged: usize,
    first: usize,
    parts: usize,
}

/// Addresses of an attention plan's arrays on the card.
pub(super) struct PlanAddresses {
    pub wide: u64,
    pub narrow: u64,
    pub queries: u64,
    pub merged: u64,
    pub first: u64,
    pub parts: u64,
}

/// Cosines and sines of all positions up to the longest seen so far.
struct Rotations {
    rope: RopeSpec,
    positions: usize,
    /// `[positions][cosines, sines]`.
    memory: Option<Memory>,
}

impl Step {
    pub(super) fn new(shape: HeadShape, ropes: Vec<RopeSpec>, specs: &[KvSpec]) -> Step {
        let mut attention: Vec<AttentionStep> = Vec::new();
        for spec in specs {
            if !attention.iter().any(|known| known.spec == *spec) {
                attention.push(AttentionStep {
                    spec: *spec,
                    plans: Vec::new(),
                });
            }
        }
        let rotations = ropes.into_iter().map(|rope| Rotations {
            rope,
            positions: 0,
            memory: None,
        });
        Step {
            shape,
            tokens: 0,
            logits: 0,
            block_copies: Vec::new(),
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
        heads: &Heads,
        batch: &StepBatch,
    ) -> Result<(), DeviceError> {
        // The step before may still run. The copy follows it in the stream's order.
        self.tokens = batch.tokens.len();
        self.logits = batch.logits_at.len();
        self.block_copies.clone_from(&batch.block_copies);
        self.bytes.clear();
        self.offsets = ArrayOffsets {
            tokens: put(&mut self.bytes, &tokens(batch)),
            positions: put(&mut self.bytes, &batch.positions),
            slots: put(&mut self.bytes, &slots(batch)),
            logits_at: put(&mut self.bytes, &batch.logits_at),
            tables: put(&mut self.bytes, &batch.block_tables),
        };
        for layer in &mut self.attention {
            let item = |i: &AttentionItem| [i.first_query, i.queries, i.table, i.from, i.to, i.part];
            layer.plans.clear();
            for plan in Plan::of(batch, heads, layer.spec) {
                layer.plans.push(PlanStep {
                    wide: plan.wide.len(),
                    narrow: plan.narrow.len(),
                    merged: plan.merged.len(),
                    part_rows: plan.part_rows as usize,
                    offsets: PlanPlaces {
                        wide: put(&mut self.bytes, &words(&plan.wide, item)),
                        narrow: put(&mut self.bytes, &words(&plan.narrow, item)),
                        queries: put(&mut self.bytes, &plan.queries),
                        merged: put(&mut self.bytes, &plan.merged),
                        first: put(&mut self.bytes, &plan.first),
                        parts: put(&mut self.bytes, &words(&plan.parts, |p| [p.part, p.query, p.rows])),
                    },
                });
            }
        }
        let longest = batch.positions.iter().max().map_or(0, |last| *last as usize + 1);
        for rotations in &mut self.rotations {
            rotations.cover(context, longest)?;
        }
        let bytes = self.bytes.len();
        want(context, &mut self.memory, bytes.next_power_of_two(), "a step's plan")?;
        let mut staging = staged(context, self.staging.take(), bytes)?;
        staging[..bytes].copy_from_slice(&self.bytes);
        if let Some(memory) = &self.memory {
            self.staging = Some(context.send(staging, bytes, memory)?);
        }
        Ok(())
    }

    fn at(&self, place: usize) -> u64 {
        self.memory.as_ref().map_or(0, |memory| memory.address() + place as u64)
    }

    pub(super) fn token_ids(&self) -> u64 {
        self.at(self.offsets.tokens)
    }

    pub(super) fn positions(&self) -> u64 {
        self.at(self.offsets.positions)
    }

    pub(super) fn slots(&self) -> u64 {
        self.at(self.offsets.slots)
    }

    pub(super) fn logits_at(&self) -> u64 {
        self.at(self.offsets.logits_at)
    }

    pub(super) fn tables(&self) -> u64 {
        self.at(self.offsets.tables)
    }

    pub(super) fn rotations(&self, rope: usize) -> u64 {
        self.rotations[rope].memory.as_ref().map_or(0, Memory::address)
    }

    pub(super) fn plan(&self, plan: &PlanStep) -> PlanAddresses {
        let offsets = plan.offsets;
        PlanAddresses {
            wide: self.at(offsets.wide),
            narrow: self.at(offsets.narrow),
            queries: self.at(offsets.queries),
            merged: self.at(offsets.merged),
            first: self.at(offsets.first),
            parts: self.at(offsets.parts),
        }
    }
}

/// Appends an aligned array and returns its offset.
fn put(bytes: &mut Vec<u8>, array: &[u32]) -> usize {
    bytes.resize(bytes.len().next_multiple_of(ALIGN), 0);
    let at = bytes.len();
    bytes.extend(array.iter().flat_map(|word| word.to_ne_bytes()));
    at
}

/// Records as the words of their layout on the card.
fn words<T, const N: usize>(records: &[T], of: impl Fn(&T) -> [u32; N]) -> Vec<u32> {
    records.iter().flat_map(of).collect()
}

/// Marks a token that the step before draws: the other bits are its row. `IS_DRAWN` in
/// `kernels/common/drawn.cuh`.
const IS_DRAWN: u32 = 1 << 31;

/// Token ids, or [`IS_DRAWN`] with the row that draws the token.
fn tokens(batch: &StepBatch) -> Vec<u32> {
    let mut tokens = batch.tokens.clone();
    for &(token, row) in &batch.drawn {
        tokens[token as usize] = IS_DRAWN | row;
    }
    tokens
}

/// KV slot of each token's key and value: block index times tokens per block, plus the offset in
/// the block.
fn slots(batch: &StepBatch) -> Vec<u32> {
    let mut slots = Vec::with_capacity(batch.tokens.len());
    for s in &batch.sequences {
        for position in s.kv_len - s.q_len..s.kv_len {
            let block = batch.block_tables[(s.first_block + position / BLOCK_TOKENS) as usize];
            slots.push(block * BLOCK_TOKENS + position % BLOCK_TOKENS);
        }
    }
    slots
}

impl Rotations {
    /// Grows the table to at least the first `positions` positions.
    fn cover(&mut self, context: &Arc<Context>, positions: usize) -> Result<(), DeviceError> {
        if positions <= self.positions {
            return Ok(());
        }
        let positions = positions.next_power_of_two().max(1024);
        let mut table: Vec<u8> = Vec::with_capacity(positions * self.rope.inverse_frequencies.len() * 8);
        for position in 0..positions {
            // The angle is rounded to F32, as in the reference. Its sine and cosine are computed in
            // F64, so they are exact to F32.
            let angle = |f: &f32| f64::from(*f * position as f32);
            for part in [f64::cos, f64::sin] {
                for frequency in &self.rope.inverse_frequencies {
                    let value = part(angle(frequency)) as f32 * self.rope.scale;
                    table.extend(value.to_ne_bytes());
                }
            }
        }
        self.memory = None;
        self.memory = Some(context.take_copy(&table, "the rotations of all positions")?);
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
                },
                StepSequence {
                    first_token: 4,
                    q_len: 1,
                    kv_len: 1,
                    first_block: 2,
                },
            ],
            block_tables: vec![7, 3, 9],
            ..StepBatch::default()
        };
        assert_eq!(slots(&batch), [7 * 64 + 62, 7 * 64 + 63, 3 * 64, 3 * 64 + 1, 9 * 64]);
    }

    #[test]
    fn arrays_begin_where_the_card_can_read_them() {
        let mut bytes = Vec::new();
        assert_eq!(put(&mut bytes, &[1, 2, 3]), 0);
        assert_eq!(put(&mut bytes, &[4]), 16);
        assert_eq!(put(&mut bytes, &[]), 32);
        assert_eq!(bytes.len(), 32);
    }
}
