//! Attention as a plan: which queries walk which positions together, and which partial results are
//! merged. Pure.
//!
//! A sequence's queries are cut into items of as many queries as fit a block's rows: wide blocks
//! for prefill, narrow blocks where the queries fit in them. An item of a decoding sequence walks
//! at most [`PART_TOKENS`] positions; a longer sequence has several items, merged afterwards.
//! Decoding sequences that begin with the same KV blocks walk those blocks together, once.
//!
//! In a deterministic step, prefill items are cut into the same pieces, and sequences share only
//! whole pieces. The order of every sum then follows from the query's position alone. A piece in
//! which a query sees no position adds nothing to its result.
//!
//! See docs/decisions/074-gpu-attention-is-cut-at-fixed-positions.md and
//! docs/decisions/075-a-deterministic-step-walks-fixed-pieces.md.

use std::ops::Range;

use super::plan::{BLOCK_TOKENS, Heads, window};
use crate::device::KvSpec;
use crate::device::batch::StepBatch;

/// Maximum positions that a decode item walks. It is fixed, so that the cuts of a sequence do not
/// depend on the batch.
pub const PART_TOKENS: u32 = 1024;
/// F32 values of partial sums after which a plan takes no more deterministic prefill: 128 MiB.
const PART_NUMBERS: u32 = 32 << 20;
/// Minimum blocks that sequences walk together: sharing fewer does not pay for the merge.
const SHARED_BLOCKS_MIN: u32 = 4;
/// A sequence with at most this many rows (queries times the heads of a group) is planned as
/// decode.
const SINGLE_ROWS: u32 = 16;
/// `AttentionItem::part` of an item whose result is complete and needs no merge.
pub const WHOLE: u32 = u32::MAX;

/// Queries that walk the same positions; the layout of `Item` in `kernels/attention.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionItem {
    pub first_query: u32,
    pub queries: u32,
    pub table: u32,
    pub from: u32,
    pub to: u32,
    /// First row of the item's partial result, counted for one key-value head, or [`WHOLE`].
    pub part: u32,
}

/// A partial result of a token; the layout of `Part` in `kernels/merge.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionPart {
    /// The item's `part`.
    pub part: u32,
    /// Index of the token among the item's queries.
    pub query: u32,
    /// The item's rows: queries times the heads of a group.
    pub rows: u32,
}

/// Attention's launches in one step, for all layers of one kind.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// Items for wide blocks, and for narrow ones.
    pub wide: Vec<AttentionItem>,
    pub narrow: Vec<AttentionItem>,
    /// Tokens of the step, grouped by item.
    pub queries: Vec<u32>,
    /// Tokens with partial results; those of the i-th token are `parts[first[i]..first[i + 1]]`.
    pub merged: Vec<u32>,
    pub first: Vec<u32>,
    pub parts: Vec<AttentionPart>,
    /// Rows of all partial results, counted for one key-value head: the size of part sums and
    /// states.
    pub part_rows: u32,
}

impl Plan {
    /// The plans of a step, launched one after the other. There is one plan, except where a
    /// deterministic step's partial results would take too much memory.
    ///
    /// # Panics
    /// The batch has not been checked by a model.
    pub fn of(batch: &StepBatch, heads: &Heads, spec: KvSpec) -> Vec<Plan> {
        let mut planner = Planner {
            batch,
            heads,
            window: window(spec),
            done: Vec::new(),
            plan: Plan::default(),
            parts: Vec::new(),
        };
        let mut singles: Vec<Single> = Vec::new();
        for (i, s) in batch.sequences.iter().enumerate() {
            if s.q_len * heads.group() > SINGLE_ROWS {
                planner.prompt(i);
            } else {
                let from = planner.first_seen(s.kv_len - s.q_len);
                singles.push(Single { sequence: i, from });
            }
        }
        planner.singles(&singles);
        planner.end_plan();
        planner.done
    }
}

/// A decoding sequence, and the first position that its tokens see, rounded down to a block.
#[derive(Debug, Clone, Copy)]
struct Single {
    sequence: usize,
    from: u32,
}

struct Planner<'a> {
    batch: &'a StepBatch,
    heads: &'a Heads,
    /// 0: all positions are seen.
    window: u32,
    done: Vec<Plan>,
    /// The plan in progress, and its partial results so far as (token, part).
    plan: Plan,
    parts: Vec<(u32, AttentionPart)>,
}

impl Planner<'_> {
    /// First position that a query at `position` sees, rounded down to a block.
    fn first_seen(&self, position: u32) -> u32 {
        match self.window {
            0 => 0,
            window => (position + 1).saturating_sub(window) / BLOCK_TOKENS * BLOCK_TOKENS,
        }
    }

    /// Items of a prefilling sequence's queries. An item walks its whole range, or pieces in a
    /// deterministic step, where bits must not depend on the number of queries.
    fn prompt(&mut self, sequence: usize) {
        let s = self.batch.sequences[sequence];
        let most = self.heads.queries(self.heads.wide_warps());
        for done in (0..s.q_len).step_by(most as usize) {
            let queries = most.min(s.q_len - done);
            let position = s.kv_len - s.q_len + done;
            let first = s.first_token + done;
            let (tokens, range) = (first..first + queries, self.first_seen(position)..position + queries);
            if !self.batch.deterministic {
                self.walk(tokens, s.first_block, std::iter::once(range), true);
                continue;
            }
            let pieces = pieces(range);
            let rows = self.plan.part_rows + queries * self.heads.group() * pieces.len() as u32;
            if rows * self.heads.kv_heads * self.heads.dim > PART_NUMBERS {
                self.end_plan();
            }
            self.walk(tokens, s.first_block, pieces, true);
        }
    }

    /// Adds items of `tokens` that walk `ranges` of one block table, one item per range. `alone`:
    /// these tokens have no other items.
    fn walk(
        &mut self,
        tokens: impl ExactSizeIterator<Item = u32> + Clone,
        table: u32,
        ranges: impl ExactSizeIterator<Item = Range<u32>>,
        alone: bool,
    ) {
        let queries = tokens.len() as u32;
        let first_query = self.plan.queries.len() as u32;
        self.plan.queries.extend(tokens.clone());
        let whole = alone && ranges.len() == 1;
        let rows = queries * self.heads.group();
        for range in ranges {
            let part = if whole { WHOLE } else { self.plan.part_rows };
            if !whole {
                self.plan.part_rows += rows;
                let parts = (0..).map(|query| AttentionPart { part, query, rows });
                self.parts.extend(tokens.clone().zip(parts));
            }
            let item = AttentionItem {
                first_query,
                queries,
                table,
                from: range.start,
                to: range.end,
                part,
            };
            // The narrowest block that fits.
            if queries <= self.heads.queries(self.heads.narrow_warps()) {
                self.plan.narrow.push(item)
            } else {
                self.plan.wide.push(item)
            }
        }
    }

    /// Closes the plan: lists the partial results of each token in the order of their positions.
    fn end_plan(&mut self) {
        let mut plan = std::mem::take(&mut self.plan);
        self.parts.sort_by_key(|(token, _)| *token);
        for (token, part) in self.parts.drain(..) {
            if plan.merged.last() != Some(&token) {
                plan.merged.push(token);
                plan.first.push(plan.parts.len() as u32);
            }
            plan.parts.push(part);
        }
        plan.first.push(plan.parts.len() as u32);
        self.done.push(plan);
    }

    /// Number of leading blocks that two sequences have in common and that both may walk as a
    /// whole.
    fn shared_blocks(&self, a: Single, b: Single) -> u32 {
        if a.from > 0 || b.from > 0 {
            return 0;
        }
        // Positions before the first query: the range that a sequence walks alone keeps at least
        // its own token.
        let before = |single: Single| {
            let s = self.batch.sequences[single.sequence];
            let blocks = (s.kv_len - s.q_len) / BLOCK_TOKENS;
            &self.batch.block_tables[s.first_block as usize..][..blocks as usize]
        };
        let blocks = before(a).iter().zip(before(b)).take_while(|(a, b)| a == b).count() as u32;
        if self.batch.deterministic {
            // Only whole pieces, which each sequence would also walk alone.
            blocks - blocks % (PART_TOKENS / BLOCK_TOKENS)
        } else {
            blocks
        }
    }

    fn singles(&mut self, singles: &[Single]) {
        let mut at = 0;
        while at < singles.len() {
            let (end, blocks) = self.run(singles, at);
            let shared = blocks * BLOCK_TOKENS;
            if shared > 0 {
                self.together(&singles[at..end], shared);
            }
            for single in &singles[at..end] {
                let s = self.batch.sequences[single.sequence];
                let (tokens, from) = (s.first_token..s.first_token + s.q_len, single.from.max(shared));
                self.walk(tokens, s.first_block, pieces(from..s.kv_len), shared == 0);
            }
            at = end;
        }
    }

    /// Finds the sequences from `at` on that walk their first blocks together. Returns the end of
    /// their range and the number of shared blocks; 0: the sequence walks alone.
    fn run(&self, singles: &[Single], at: usize) -> (usize, u32) {
        let mut blocks = u32::MAX;
        let mut end = at + 1;
        while end < singles.len() {
            let common = self.shared_blocks(singles[at], singles[end]).min(blocks);
            // A sequence that shares much less begins a run of its own.
            if common < SHARED_BLOCKS_MIN || (blocks != u32::MAX && common * 2 < blocks) {
                break;
            }
            blocks = common;
            end += 1;
        }
        if end == at + 1 { (end, 0) } else { (end, blocks) }
    }

    /// Walks positions up to `shared` once for several sequences.
    fn together(&mut self, singles: &[Single], shared: u32) {
        let tokens: Vec<u32> = singles
            .iter()
            .flat_map(|single| {
                let s = self.batch.sequences[single.sequence];
                s.first_token..s.first_token + s.q_len
            })
            .collect();
        let table = self.batch.sequences[singles[0].sequence].first_block;
        for tokens in tokens.chunks(self.heads.queries(self.heads.wide_warps()) as usize) {
            self.walk(tokens.iter().copied(), table, pieces(0..shared), false);
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

    const HEADS: Heads = Heads {
        heads: 32,
        kv_heads: 8,
        dim: 128,
        store: KernelFormat::E4m3,
        hopper: false,
    };

    /// Sequences of (computed, stored) tokens. All begin with `shared` blocks of one prompt, as far
    /// as their lengths reach.
    fn batch(sequences: &[(u32, u32)], shared: u32) -> StepBatch {
        let mut batch = StepBatch::default();
        let mut fresh = 1000;
        for &(q_len, kv_len) in sequences {
            let table = (0..kv_len.div_ceil(BLOCK_TOKENS)).map(|block| {
                fresh += 1;
                // A block that is still being filled belongs to one sequence.
                let whole = (block + 1) * BLOCK_TOKENS <= kv_len - q_len;
                if block < shared && whole { block } else { fresh }
            });
            batch.push((0..q_len).map(|_| 0), kv_len, table);
        }
        batch
    }

    /// Checks that every token walks each position that it sees exactly once, through its own
    /// blocks, and that items fit their blocks.
    fn check(batch: &StepBatch, heads: &Heads, spec: KvSpec) {
        let mut seen: HashMap<u32, Vec<(u32, u32)>> = HashMap::new();
        for plan in Plan::of(batch, heads, spec) {
            check_plan(&plan, batch, heads, &mut seen);
        }
        assert_eq!(seen.len(), batch.tokens.len());
        for (token, mut ranges) in seen {
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

    /// Checks one plan, and adds the ranges that its tokens walk to `seen`.
    fn check_plan(plan: &Plan, batch: &StepBatch, heads: &Heads, seen: &mut HashMap<u32, Vec<(u32, u32)>>) {
        let mut part_rows = vec![false; plan.part_rows as usize];
        let wide = plan.wide.iter().map(|item| (item, heads.wide_warps()));
        for (item, warps) in wide.chain(plan.narrow.iter().map(|item| (item, heads.narrow_warps()))) {
            assert!(item.queries >= 1 && item.queries <= heads.queries(warps), "{item:?}");
            let rows = item.queries * heads.group();
            assert!(item.from % BLOCK_TOKENS == 0 && item.from < item.to, "{item:?}");
            if item.part != WHOLE {
                for row in &mut part_rows[item.part as usize..][..rows as usize] {
                    assert!(!std::mem::replace(row, true), "two parts in one place: {item:?}");
                }
            }
            let blocks = &batch.block_tables[item.table as usize..];
            for (query, &token) in plan.queries[item.first_query as usize..][..item.queries as usize]
                .iter()
                .enumerate()
            {
                let s = batch.sequences.iter().rfind(|s| s.first_token <= token).unwrap();
                let own = &batch.block_tables[s.first_block as usize..];
                for block in item.from / BLOCK_TOKENS..item.to.div_ceil(BLOCK_TOKENS) {
                    assert_eq!(blocks[block as usize], own[block as usize], "{item:?} of token {token}");
                }
                seen.entry(token).or_default().push((item.from, item.to));
                let merged = plan.merged.binary_search(&token);
                assert_eq!(merged.is_ok(), item.part != WHOLE);
                if let Ok(i) = merged {
                    let parts = &plan.parts[plan.first[i] as usize..plan.first[i + 1] as usize];
                    let part = AttentionPart {
                        part: item.part,
                        query: query as u32,
                        rows,
                    };
                    assert_eq!(parts.iter().filter(|p| **p == part).count(), 1, "{item:?}");
                }
            }
        }
        assert!(part_rows.iter().all(|taken| *taken));
        // The parts of a token are in the order of their positions.
        let position_of: HashMap<u32, u32> = plan.wide.iter().chain(&plan.narrow).map(|i| (i.part, i.from)).collect();
        for i in 0..plan.merged.len() {
            let parts = &plan.parts[plan.first[i] as usize..plan.first[i + 1] as usize];
            assert!(parts.is_sorted_by_key(|part| position_of[&part.part]));
        }
    }

    proptest! {
        #[test]
        fn every_query_walks_every_position_once(
            lengths in prop::collection::vec((1u32..150, 0u32..5000), 1..12),
            singles in prop::collection::vec((1u32..4, 0u32..5000), 0..12),
            shared in 0u32..40,
            window in prop::option::of(1u32..3000),
            hopper in any::<bool>(),
            deterministic in any::<bool>(),
        ) {
            let sequences: Vec<_> = lengths.into_iter().chain(singles).map(|(q, stored)| (q, q + stored)).collect();
            let heads = Heads { hopper, ..HEADS };
            let batch = StepBatch { deterministic, ..batch(&sequences, shared) };
            check(&batch, &heads, window.map_or(KvSpec::Full, KvSpec::Window));
        }
    }

    #[test]
    fn sequences_that_begin_alike_walk_it_once() {
        // 600 tokens in common; the fourth has none of them.
        let mut step = batch(&[(1, 700), (1, 650), (1, 1025), (1, 700)], 9);
        let last = step.sequences[3].first_block as usize;
        step.block_tables[last..].iter_mut().for_each(|block| *block += 5000);
        let [plan] = Plan::of(&step, &HEADS, KvSpec::Full).try_into().unwrap();
        let ranges = |items: &[AttentionItem]| items.iter().map(|i| (i.queries, i.from, i.to)).collect::<Vec<_>>();
        // The twelve rows fit a narrow block.
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
        assert_eq!((plan.merged, plan.first), (vec![0, 1, 2], vec![0, 2, 4, 7]));
        check(&step, &HEADS, KvSpec::Full);
        // The shared range contains no whole piece.
        step.deterministic = true;
        let [plan] = Plan::of(&step, &HEADS, KvSpec::Full).try_into().unwrap();
        let alone = [(1, 0, 700), (1, 0, 650), (1, 0, 1024), (1, 1024, 1025), (1, 0, 700)];
        assert_eq!(ranges(&plan.narrow), alone);
        assert_eq!((plan.merged, plan.first), (vec![2], vec![0, 2]));
    }

    #[test]
    fn long_deterministic_prompts_take_several_plans() {
        let step = StepBatch {
            deterministic: true,
            ..batch(&[(3000, 9000), (1, 5000)], 0)
        };
        let plans = Plan::of(&step, &HEADS, KvSpec::Full);
        assert!(plans.len() > 1);
        for plan in &plans {
            assert!(plan.part_rows * HEADS.kv_heads * HEADS.dim <= PART_NUMBERS);
        }
        check(&step, &HEADS, KvSpec::Full);
    }
}
