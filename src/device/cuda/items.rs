//! Plans attention: which queries one thread block computes, over which positions, and which
//! partial results are merged. Pure.
//!
//! A work item is the share of one thread block: some queries, and the positions of one block table
//! that it walks for them. A sequence's queries are cut into items of as many queries as fit a
//! block's rows: narrow blocks if all queries of an item fit in them (decode), else wide blocks
//! (prefill). An item of a decoding sequence walks at most [`PART_TOKENS`] positions; a longer
//! sequence has several items, whose partial results are merged afterwards. Decoding sequences that
//! begin with the same KV blocks walk those blocks together, once.
//!
//! In a deterministic step, prefill items are cut into the same pieces, and sequences share only
//! whole pieces. The order of every sum then depends only on the query's position. A piece whose
//! positions are all masked for a query adds nothing to its result.
//!
//! See docs/decisions/074-gpu-attention-is-cut-at-fixed-positions.md and
//! docs/decisions/075-a-deterministic-step-walks-fixed-pieces.md.

use std::ops::Range;

use super::attention_plan::{AttentionShape, BLOCK_TOKENS, window};
use crate::device::KvSpec;
use crate::device::batch::StepBatch;

/// Maximum positions that a decode item walks. It is fixed, so that where a sequence is cut does
/// not depend on the batch.
pub const PART_TOKENS: u32 = 1024;
/// Maximum F32 values of partial sums per plan for deterministic prefill: 128 MiB.
const PART_VALUES_MAX: u32 = 32 << 20;
/// Minimum KV blocks that sequences walk together: sharing fewer does not pay for the merge.
const SHARED_BLOCKS_MIN: u32 = 4;
/// A sequence with at most this many rows (queries times query heads per key-value head) is planned
/// as decode.
const DECODE_ROWS_MAX: u32 = 16;
/// [`AttentionItem::part`] of an item whose result is complete and needs no merge.
pub const NO_PART: u32 = u32::MAX;

/// A work item: queries that walk the same positions. The layout is that of `Item` in
/// `kernels/common/attention.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionItem {
    /// Index in [`AttentionPlan::query_tokens`].
    pub first_query: u32,
    pub queries: u32,
    /// Index in each of the kind's block tables of the block that has position 0.
    pub first_block: u32,
    /// The item walks positions `from..to`; `from` is the first position of a block.
    pub from: u32,
    pub to: u32,
    /// First row of the item's partial result, counted for one key-value head, or [`NO_PART`].
    pub part: u32,
}

/// A partial result of a token. The layout is that of `Part` in `kernels/merge.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionPart {
    /// The item's [`part`](AttentionItem::part).
    pub part: u32,
    /// Index of the token among the item's queries.
    pub query: u32,
    /// The item's rows: queries times query heads per key-value head.
    pub rows: u32,
}

/// The work items of one step, for all layers of one kind.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AttentionPlan {
    /// Items for wide thread blocks.
    pub wide: Vec<AttentionItem>,
    /// Items for narrow thread blocks.
    pub narrow: Vec<AttentionItem>,
    /// The items' queries, as tokens of the step.
    pub query_tokens: Vec<u32>,
    /// Tokens with partial results; those of the i-th token are
    /// `parts[first_parts[i]..first_parts[i + 1]]`.
    pub merged_tokens: Vec<u32>,
    pub first_parts: Vec<u32>,
    pub parts: Vec<AttentionPart>,
    /// Rows of all partial results, counted for one key-value head: the size of their buffers.
    pub part_rows: u32,
}

impl AttentionPlan {
    /// The plans of a step for layers of kind `spec`, whose block tables have the indices `tables`;
    /// the plans are launched one after the other. There is one plan, or several if the
    /// partial results of a deterministic step would take too much memory in one.
    ///
    /// # Panics
    /// The batch is invalid: its model has not checked it.
    pub fn of(batch: &StepBatch, shape: &AttentionShape, (spec, tables): (KvSpec, &[usize])) -> Vec<AttentionPlan> {
        let mut planner = Planner {
            batch,
            tables,
            shape,
            window: window(spec),
            finished: Vec::new(),
            plan: AttentionPlan::default(),
            parts: Vec::new(),
        };
        let mut decoding: Vec<DecodeSequence> = Vec::new();
        for (i, s) in batch.sequences.iter().enumerate() {
            if s.q_len * shape.group_size() > DECODE_ROWS_MAX {
                planner.plan_prefill(i);
            } else {
                let from = planner.first_visible(s.kv_len - s.q_len);
                decoding.push(DecodeSequence { index: i, from });
            }
        }
        planner.plan_decode(&decoding);
        planner.end_plan();
        planner.finished
    }
}

/// A decoding sequence.
#[derive(Debug, Clone, Copy)]
struct DecodeSequence {
    /// Index in the batch.
    index: usize,
    /// First position that its tokens attend to, rounded down to a block.
    from: u32,
}

struct Planner<'a> {
    batch: &'a StepBatch,
    /// Indices of the kind's block tables.
    tables: &'a [usize],
    shape: &'a AttentionShape,
    /// Number of positions that a query attends to; 0: all.
    window: u32,
    finished: Vec<AttentionPlan>,
    /// The plan in progress.
    plan: AttentionPlan,
    /// Its partial results so far, each with its token.
    parts: Vec<(u32, AttentionPart)>,
}

impl Planner<'_> {
    /// First position that a query at `position` attends to, rounded down to a block.
    fn first_visible(&self, position: u32) -> u32 {
        match self.window {
            0 => 0,
            window => (position + 1).saturating_sub(window) / BLOCK_TOKENS * BLOCK_TOKENS,
        }
    }

    /// Adds items for a prefilling sequence. An item walks all positions that its queries attend
    /// to; in a deterministic step, where results must not depend on the number of queries, it
    /// walks one piece of them.
    fn plan_prefill(&mut self, sequence: usize) {
        let s = self.batch.sequences[sequence];
        let queries_max = self.shape.queries_max(self.shape.wide_block_warps());
        for offset in (0..s.q_len).step_by(queries_max as usize) {
            let queries = queries_max.min(s.q_len - offset);
            let position = s.kv_len - s.q_len + offset;
            let first = s.first_token + offset;
            let (tokens, range) = (first..first + queries, self.first_visible(position)..position + queries);
            if !self.batch.deterministic {
                self.add_items(tokens, s.first_block, std::iter::once(range), true);
                continue;
            }
            let pieces = pieces(range);
            let rows = self.plan.part_rows + queries * self.shape.group_size() * pieces.len() as u32;
            if rows * self.shape.kv_heads * self.shape.value_dim() > PART_VALUES_MAX {
                self.end_plan();
            }
            self.add_items(tokens, s.first_block, pieces, true);
        }
    }

    /// Adds one item per range of positions, each with all `tokens` as queries; the block table
    /// begins at `first_block`. `has_all_positions`: these tokens get no other items.
    fn add_items(
        &mut self,
        tokens: impl ExactSizeIterator<Item = u32> + Clone,
        first_block: u32,
        ranges: impl ExactSizeIterator<Item = Range<u32>>,
        has_all_positions: bool,
    ) {
        let queries = tokens.len() as u32;
        let first_query = self.plan.query_tokens.len() as u32;
        self.plan.query_tokens.extend(tokens.clone());
        let is_complete = has_all_positions && ranges.len() == 1;
        let rows = queries * self.shape.group_size();
        for range in ranges {
            let part = if is_complete { NO_PART } else { self.plan.part_rows };
            if !is_complete {
                self.plan.part_rows += rows;
                let parts = (0..).map(|query| AttentionPart { part, query, rows });
                self.parts.extend(tokens.clone().zip(parts));
            }
            let item = AttentionItem {
                first_query,
                queries,
                first_block,
                from: range.start,
                to: range.end,
                part,
            };
            if queries <= self.shape.queries_max(self.shape.narrow_block_warps()) {
                self.plan.narrow.push(item)
            } else {
                self.plan.wide.push(item)
            }
        }
    }

    /// Finishes the plan: lists the partial results of each token in the order of their positions.
    fn end_plan(&mut self) {
        let mut plan = std::mem::take(&mut self.plan);
        self.parts.sort_by_key(|(token, _)| *token);
        for (token, part) in self.parts.drain(..) {
            if plan.merged_tokens.last() != Some(&token) {
                plan.merged_tokens.push(token);
                plan.first_parts.push(plan.parts.len() as u32);
            }
            plan.parts.push(part);
        }
        plan.first_parts.push(plan.parts.len() as u32);
        self.finished.push(plan);
    }

    /// Number of leading KV blocks that two sequences share and may walk together.
    fn shared_block_count(&self, a: DecodeSequence, b: DecodeSequence) -> u32 {
        if a.from > 0 || b.from > 0 {
            return 0;
        }
        // Only blocks before the first query, so that each sequence still has positions of its own
        // to walk.
        let context_blocks = |table: usize, decoding: DecodeSequence| {
            let s = self.batch.sequences[decoding.index];
            let blocks = (s.kv_len - s.q_len) / BLOCK_TOKENS;
            &self.batch.block_tables[table][s.first_block as usize..][..blocks as usize]
        };
        let shared = self.tables.iter().map(|&table| {
            let pairs = context_blocks(table, a).iter().zip(context_blocks(table, b));
            pairs.take_while(|(a, b)| a == b).count() as u32
        });
        let blocks = shared.min().unwrap_or(0);
        if self.batch.deterministic {
            // Only whole pieces, which each sequence would also walk alone.
            blocks - blocks % (PART_TOKENS / BLOCK_TOKENS)
        } else {
            blocks
        }
    }

    /// Adds items for the decoding sequences: for each prefix that several of them share, and for
    /// the rest of each sequence.
    fn plan_decode(&mut self, decoding: &[DecodeSequence]) {
        let mut start = 0;
        while start < decoding.len() {
            let (end, blocks) = self.shared_run(decoding, start);
            let shared = blocks * BLOCK_TOKENS;
            if shared > 0 {
                self.plan_shared_prefix(&decoding[start..end], shared);
            }
            for sequence in &decoding[start..end] {
                let s = self.batch.sequences[sequence.index];
                let (tokens, from) = (s.first_token..s.first_token + s.q_len, sequence.from.max(shared));
                self.add_items(tokens, s.first_block, pieces(from..s.kv_len), shared == 0);
            }
            start = end;
        }
    }

    /// Finds the sequences from `start` on that walk their first blocks together. Returns the end
    /// of their range and the number of shared blocks; 0: the first sequence shares none.
    fn shared_run(&self, decoding: &[DecodeSequence], start: usize) -> (usize, u32) {
        let mut blocks = u32::MAX;
        let mut end = start + 1;
        while end < decoding.len() {
            let common = self.shared_block_count(decoding[start], decoding[end]).min(blocks);
            // A sequence that shares less than half as many blocks begins the next run.
            if common < SHARED_BLOCKS_MIN || (blocks != u32::MAX && common * 2 < blocks) {
                break;
            }
            blocks = common;
            end += 1;
        }
        if end == start + 1 { (end, 0) } else { (end, blocks) }
    }

    /// Adds items that walk the first `shared` positions once for several sequences.
    fn plan_shared_prefix(&mut self, decoding: &[DecodeSequence], shared: u32) {
        let tokens: Vec<u32> = decoding
            .iter()
            .flat_map(|sequence| {
                let s = self.batch.sequences[sequence.index];
                s.first_token..s.first_token + s.q_len
            })
            .collect();
        let first_block = self.batch.sequences[decoding[0].index].first_block;
        let queries_max = self.shape.queries_max(self.shape.wide_block_warps());
        for tokens in tokens.chunks(queries_max as usize) {
            self.add_items(tokens.iter().copied(), first_block, pieces(0..shared), false);
        }
    }
}

/// Cuts positions into pieces that end at multiples of [`PART_TOKENS`].
fn pieces(range: Range<u32>) -> impl ExactSizeIterator<Item = Range<u32>> {
    let (first, last) = (range.start / PART_TOKENS, range.end.div_ceil(PART_TOKENS));
    (first..last).map(move |i| range.start.max(i * PART_TOKENS)..range.end.min((i + 1) * PART_TOKENS))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::super::plan::KernelFormat;
    use super::*;

    const SHAPE: AttentionShape = AttentionShape {
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        value_in_key: None,
        kv_format: KernelFormat::E4m3,
        is_hopper: false,
        queries_alone: false,
        block: None,
    };

    /// Sequences of (`q_len`, `kv_len`) tokens. All begin with the same `shared` blocks, as far as
    /// they are that long.
    fn batch(sequences: &[(u32, u32)], shared: u32) -> StepBatch {
        let mut batch = StepBatch::default();
        let mut next_block = 1000;
        for &(q_len, kv_len) in sequences {
            let table = (0..kv_len.div_ceil(BLOCK_TOKENS)).map(|block| {
                next_block += 1;
                // A block that is still being filled belongs to one sequence.
                let is_full = (block + 1) * BLOCK_TOKENS <= kv_len - q_len;
                if block < shared && is_full { block } else { next_block }
            });
            batch.push((0..q_len).map(|_| 0), kv_len, table);
        }
        batch
    }

    /// Checks that every token walks each position that it attends to exactly once, through its own
    /// KV blocks, and that items fit their thread blocks.
    fn check(batch: &StepBatch, shape: &AttentionShape, spec: KvSpec) {
        let mut walked: HashMap<u32, Vec<(u32, u32)>> = HashMap::new();
        for plan in AttentionPlan::of(batch, shape, (spec, &[0])) {
            check_plan(&plan, batch, shape, &mut walked);
        }
        assert_eq!(walked.len(), batch.tokens.len());
        for (token, mut ranges) in walked {
            ranges.sort_unstable();
            let position = batch.positions[token as usize];
            let first = match spec {
                KvSpec::Full => 0,
                KvSpec::Window(window) => (position + 1).saturating_sub(window),
            };
            assert!(
                ranges[0].0 <= first && ranges.last().unwrap().1 > position,
                "{ranges:?}"
            );
            assert!(ranges.windows(2).all(|pair| pair[0].1 == pair[1].0), "{ranges:?}");
            if batch.deterministic {
                // One range per piece, so that all queries at a position add up in the same order.
                let piece = |(from, to): &(u32, u32)| (from / PART_TOKENS, (to - 1) / PART_TOKENS);
                assert!(ranges.iter().all(|r| piece(r).0 == piece(r).1), "{ranges:?}");
                assert!(ranges.windows(2).all(|r| piece(&r[0]) != piece(&r[1])), "{ranges:?}");
            }
        }
    }

    /// Checks one plan, and adds the ranges that its tokens walk to `walked`.
    fn check_plan(
        plan: &AttentionPlan,
        batch: &StepBatch,
        shape: &AttentionShape,
        walked: &mut HashMap<u32, Vec<(u32, u32)>>,
    ) {
        let mut used_rows = vec![false; plan.part_rows as usize];
        let wide = plan.wide.iter().map(|item| (item, shape.wide_block_warps()));
        for (item, warps) in wide.chain(plan.narrow.iter().map(|item| (item, shape.narrow_block_warps()))) {
            assert!(
                item.queries >= 1 && item.queries <= shape.queries_max(warps),
                "{item:?}"
            );
            let rows = item.queries * shape.group_size();
            assert!(item.from % BLOCK_TOKENS == 0 && item.from < item.to, "{item:?}");
            if item.part != NO_PART {
                for row in &mut used_rows[item.part as usize..][..rows as usize] {
                    assert!(!std::mem::replace(row, true), "two parts in one place: {item:?}");
                }
            }
            let blocks = &batch.block_tables[0][item.first_block as usize..];
            for (query, &token) in plan.query_tokens[item.first_query as usize..][..item.queries as usize]
                .iter()
                .enumerate()
            {
                let s = batch.sequences.iter().rfind(|s| s.first_token <= token).unwrap();
                let own = &batch.block_tables[0][s.first_block as usize..];
                for block in item.from / BLOCK_TOKENS..item.to.div_ceil(BLOCK_TOKENS) {
                    assert_eq!(blocks[block as usize], own[block as usize], "{item:?} of token {token}");
                }
                walked.entry(token).or_default().push((item.from, item.to));
                let merged = plan.merged_tokens.binary_search(&token);
                assert_eq!(merged.is_ok(), item.part != NO_PART);
                if let Ok(i) = merged {
                    let parts = &plan.parts[plan.first_parts[i] as usize..plan.first_parts[i + 1] as usize];
                    let part = AttentionPart {
                        part: item.part,
                        query: query as u32,
                        rows,
                    };
                    assert_eq!(parts.iter().filter(|p| **p == part).count(), 1, "{item:?}");
                }
            }
        }
        assert!(used_rows.iter().all(|used| *used));
        // The parts of a token are in the order of their positions.
        let position_of: HashMap<u32, u32> = plan.wide.iter().chain(&plan.narrow).map(|i| (i.part, i.from)).collect();
        for i in 0..plan.merged_tokens.len() {
            let parts = &plan.parts[plan.first_parts[i] as usize..plan.first_parts[i + 1] as usize];
            assert!(parts.is_sorted_by_key(|part| position_of[&part.part]));
        }
    }

    proptest! {
        #[test]
        fn every_query_walks_every_position_once(
            lengths in prop::collection::vec((1u32..150, 0u32..5000), 1..12),
            decode_lengths in prop::collection::vec((1u32..4, 0u32..5000), 0..12),
            shared in 0u32..40,
            window in prop::option::of(1u32..3000),
            is_hopper in any::<bool>(),
            deterministic in any::<bool>(),
        ) {
            let sequences: Vec<_> = lengths.into_iter().chain(decode_lengths).map(|(q, stored)| (q, q + stored)).collect();
            let shape = AttentionShape { is_hopper, ..SHAPE };
            let batch = StepBatch { deterministic, ..batch(&sequences, shared) };
            check(&batch, &shape, window.map_or(KvSpec::Full, KvSpec::Window));
        }
    }

    #[test]
    fn sequences_walk_a_shared_prefix_once() {
        // 600 tokens in common; the fourth has none of them.
        let mut step = batch(&[(1, 700), (1, 650), (1, 1025), (1, 700)], 9);
        let last = step.sequences[3].first_block as usize;
        step.block_tables[0][last..].iter_mut().for_each(|block| *block += 5000);
        let [plan] = AttentionPlan::of(&step, &SHAPE, (KvSpec::Full, &[0]))
            .try_into()
            .unwrap();
        let ranges = |items: &[AttentionItem]| items.iter().map(|i| (i.queries, i.from, i.to)).collect::<Vec<_>>();
        // The twelve rows of three sequences fit a narrow block.
        assert!(plan.wide.is_empty());
        assert_eq!(
            ranges(&plan.narrow),
            [
                (3, 0, 576),
                (1, 576, 700),
                (1, 576, 650),
                (1, 576, 1024),
                (1, 1024, 1025),
                (1, 0, 700)
            ]
        );
        assert_eq!(
            (plan.merged_tokens, plan.first_parts),
            (vec![0, 1, 2], vec![0, 2, 4, 7])
        );
        check(&step, &SHAPE, KvSpec::Full);
        // The shared range contains no whole piece.
        step.deterministic = true;
        let [plan] = AttentionPlan::of(&step, &SHAPE, (KvSpec::Full, &[0]))
            .try_into()
            .unwrap();
        let alone = [(1, 0, 700), (1, 0, 650), (1, 0, 1024), (1, 1024, 1025), (1, 0, 700)];
        assert_eq!(ranges(&plan.narrow), alone);
        assert_eq!((plan.merged_tokens, plan.first_parts), (vec![2], vec![0, 2]));
    }

    #[test]
    fn a_prefix_is_shared_as_far_as_all_tables_share_it() {
        let mut step = batch(&[(1, 700), (1, 700)], 9);
        let mut second = step.block_tables[0].clone();
        second[step.sequences[1].first_block as usize + 5] += 5000;
        step.block_tables.push(second);
        for (tables, shared) in [(&[0][..], 576), (&[1], 320), (&[0, 1], 320)] {
            let [plan] = AttentionPlan::of(&step, &SHAPE, (KvSpec::Full, tables))
                .try_into()
                .unwrap();
            assert_eq!((plan.narrow[0].queries, plan.narrow[0].to), (2, shared), "{tables:?}");
        }
    }

    #[test]
    fn long_deterministic_prompts_take_several_plans() {
        let step = StepBatch {
            deterministic: true,
            ..batch(&[(3000, 9000), (1, 5000)], 0)
        };
        let plans = AttentionPlan::of(&step, &SHAPE, (KvSpec::Full, &[0]));
        assert!(plans.len() > 1);
        for plan in &plans {
            assert!(plan.part_rows * SHAPE.kv_heads * SHAPE.head_dim <= PART_VALUES_MAX);
        }
        check(&step, &SHAPE, KvSpec::Full);
    }
}
