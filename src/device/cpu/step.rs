//! A step on the CPU: the batch, the rotations of its positions, and the attention plan that all
//! layers share.

use super::adapters;
use super::gemm::low_rank::AdapterRows;
use super::math::round_bf16;
use super::{BLOCK_TOKENS, SPAN_TOKENS};
use crate::device::batch::{StepBatch, StepSequence};
use crate::device::{HeadShape, KvSpec, RopeSpec};

/// Target rows (queries times query heads per KV head) of an attention task: enough rows to reuse
/// each loaded key often, but few enough that queries, scores and accumulators fit in the L1 cache.
pub(super) const TASK_ROWS: usize = 48;

/// A [`StepBatch`] with the data that its operations share.
pub struct Step {
    pub(super) batch: StepBatch,
    /// The rows of each adapter's sequences.
    pub(super) adapter_rows: Vec<(u32, AdapterRows)>,
    /// Maximum number of queries in a tile.
    tile_queries_max: u32,
    /// Indices of the block tables of layers without a window. Only these layers share a prefix.
    full_tables: Vec<usize>,
    pub(super) rotations: Vec<RotationTable>,
    /// Query tiles, each of which is processed once per KV head.
    pub(super) tiles: Vec<QueryTile>,
    /// The parts of all tiles, in order.
    pub(super) parts: Vec<TilePart>,
    /// For each block table, `(block, first unused slot)` of the last block of each sequence, if
    /// the block is partly filled and this step begins it or copies into it. F32 and BF16 pools
    /// clear its values from that slot on.
    pub(super) new_tail_blocks: Vec<Vec<(u32, u32)>>,
}

/// Cosines and sines of one rotary embedding.
pub(super) struct RotationTable {
    /// `[tokens][head_dim]`, for the tokens of the step: cosines of all pairs, then sines.
    pub token_rotations: Vec<f32>,
    rope: RopeSpec,
    /// As `token_rotations`, for positions from 0 on; grows with the longest sequence so far.
    position_rotations: Vec<f32>,
    round_to_bf16: bool,
}

/// Queries of one attention task: consecutive queries of one sequence, or of several sequences that
/// begin with the same blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct QueryTile {
    /// Range of [`Step::parts`].
    pub parts: std::ops::Range<u32>,
    /// Number of queries of all parts.
    pub queries: u32,
    /// Length of the common prefix, a whole number of spans: positions from 0 on that lie in the
    /// same blocks for all parts and that every query sees.
    pub prefix_len: u32,
}

/// A sequence's queries in a tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TilePart {
    /// Index into the batch's sequences.
    pub sequence: u32,
    /// Index of the first token in the batch's tokens.
    pub first_token: u32,
    /// Position of the first token.
    pub first_position: u32,
    pub queries: u32,
}

/// Number of the positions `0..=position`, rounded down to whole spans.
fn whole_spans(position: u32) -> u32 {
    let span = SPAN_TOKENS as u32;
    (position + 1) / span * span
}

/// Maximum number of queries in a tile.
pub(super) fn queries_per_tile(heads: HeadShape) -> usize {
    (TASK_ROWS / (heads.heads / heads.kv_heads)).max(1)
}

impl Step {
    /// A step for layers of these kinds and with heads of these shapes. All of them share the tiles,
    /// which are small enough for the largest group of query heads.
    pub(super) fn new(ropes: Vec<RopeSpec>, tables: &[(KvSpec, HeadShape)], round_to_bf16: bool) -> Step {
        let queries = tables.iter().map(|(_, heads)| queries_per_tile(*heads));
        let rotations = ropes.into_iter().map(|rope| RotationTable {
            token_rotations: Vec::new(),
            rope,
            position_rotations: Vec::new(),
            round_to_bf16,
        });
        Step {
            batch: StepBatch::default(),
            adapter_rows: Vec::new(),
            tile_queries_max: queries.min().unwrap_or(1) as u32,
            full_tables: (0..tables.len())
                .filter(|table| tables[*table].0 == KvSpec::Full)
                .collect(),
            rotations: rotations.collect(),
            tiles: Vec::new(),
            parts: Vec::new(),
            new_tail_blocks: Vec::new(),
        }
    }

    pub(super) fn upload(&mut self, batch: &StepBatch) {
        self.batch.clone_from(batch);
        self.adapter_rows = adapters::rows_of(batch);
        for rotations in &mut self.rotations {
            rotations.gather(&self.batch.positions);
        }
        self.plan();
    }

    /// A sequence's blocks in a block table.
    pub(super) fn blocks(&self, table: usize, sequence: u32) -> &[u32] {
        let s = &self.batch.sequences[sequence as usize];
        &self.batch.block_tables[table][s.first_block as usize..][..(s.kv_len as usize).div_ceil(BLOCK_TOKENS)]
    }

    /// A tile's parts.
    pub(super) fn parts(&self, tile: &QueryTile) -> &[TilePart] {
        &self.parts[tile.parts.start as usize..tile.parts.end as usize]
    }

    /// Length of the prefix that `part` would share with the last tile. 0 if the tile would have
    /// more than `queries_max` queries.
    fn prefix_shared_with_last_tile(&self, part: &TilePart, queries_max: u32) -> u32 {
        let Some(last) = self
            .tiles
            .last()
            .filter(|tile| tile.queries + part.queries <= queries_max)
        else {
            return 0;
        };
        let first = &self.parts[last.parts.start as usize];
        let prefix_len_max = last.prefix_len.min(whole_spans(part.first_position));
        let equal_blocks = self.full_tables.iter().map(|&table| {
            let pairs = self
                .blocks(table, first.sequence)
                .iter()
                .zip(self.blocks(table, part.sequence));
            let pairs = pairs.take(prefix_len_max as usize / BLOCK_TOKENS);
            pairs.take_while(|(a, b)| a == b).count()
        });
        let equal_blocks = equal_blocks.min().unwrap_or(0);
        (equal_blocks * BLOCK_TOKENS / SPAN_TOKENS * SPAN_TOKENS) as u32
    }

    fn plan(&mut self) {
        let tile_queries_max = self.tile_queries_max;
        self.tiles.clear();
        self.parts.clear();
        for (i, s) in self.batch.sequences.iter().enumerate() {
            let first = s.kv_len - s.q_len;
            for done in (0..s.q_len).step_by(tile_queries_max as usize) {
                let part = TilePart {
                    sequence: i as u32,
                    first_token: s.first_token + done,
                    first_position: first + done,
                    queries: tile_queries_max.min(s.q_len - done),
                };
                let prefix_len = self.prefix_shared_with_last_tile(&part, tile_queries_max);
                let index = self.parts.len() as u32;
                self.parts.push(part);
                match self.tiles.last_mut() {
                    Some(last) if prefix_len > 0 => {
                        last.parts.end = index + 1;
                        last.queries += part.queries;
                        last.prefix_len = prefix_len;
                    }
                    _ => self.tiles.push(QueryTile {
                        parts: index..index + 1,
                        queries: part.queries,
                        prefix_len: whole_spans(part.first_position),
                    }),
                }
            }
        }
        let tail_blocks = |table: &Vec<u32>| new_tail_blocks(&self.batch, table);
        self.new_tail_blocks = self.batch.block_tables.iter().map(tail_blocks).collect();
    }
}

/// [`Step::new_tail_blocks`] of one block table.
fn new_tail_blocks(batch: &StepBatch, table: &[u32]) -> Vec<(u32, u32)> {
    let block_tokens = BLOCK_TOKENS as u32;
    let new_tail = |s: &StepSequence| {
        let used = s.kv_len % block_tokens;
        if used == 0 {
            return None;
        }
        let last = table[(s.first_block + s.kv_len / block_tokens) as usize];
        let is_begun = s.kv_len - s.q_len <= s.kv_len - used;
        (is_begun || batch.block_copies.iter().any(|copy| copy.to == last)).then_some((last, used))
    };
    batch.sequences.iter().filter_map(new_tail).collect()
}

impl RotationTable {
    /// Sets `token_rotations` for tokens at `positions`, and extends `position_rotations` if
    /// needed.
    fn gather(&mut self, positions: &[u32]) {
        let width = self.rope.inverse_frequencies.len() * 2;
        let longest = positions.iter().max().map_or(0, |&p| p as usize + 1);
        for position in self.position_rotations.len() / width..longest {
            let round_to_bf16 = self.round_to_bf16;
            let stored = |y: f32| if round_to_bf16 { round_bf16(y) } else { y };
            self.position_rotations.extend(self.rope.rotation(position).map(stored));
        }
        self.token_rotations.clear();
        for &p in positions {
            self.token_rotations
                .extend_from_slice(&self.position_rotations[p as usize * width..][..width]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::batch::BlockCopy;

    #[test]
    fn tiles_cover_every_query_once_and_tail_blocks_are_listed() {
        let heads = HeadShape {
            heads: 4,
            kv_heads: 2,
            head_dim: 2,
            value_in_key: None,
        };
        let rope = RopeSpec {
            inverse_frequencies: vec![0.5],
            scale: 2.0,
        };
        let mut step = Step::new(vec![rope], &[(KvSpec::Full, heads)], false);
        let sequence = |first_token, q_len, kv_len, first_block| StepSequence {
            first_token,
            q_len,
            kv_len,
            first_block,
            adapter: 0,
        };
        let batch = StepBatch {
            tokens: vec![0; 62],
            positions: (0..60).chain([17, 32]).collect(),
            // 60 new tokens; one token in a block begun earlier; one token that begins a block.
            sequences: vec![sequence(0, 60, 60, 0), sequence(60, 1, 18, 4), sequence(61, 1, 33, 6)],
            block_tables: vec![(0..9).collect()],
            logits_at: vec![59, 60, 61],
            ..StepBatch::default()
        };
        step.upload(&batch);
        assert_eq!(step.new_tail_blocks, [[(3, 12), (8, 1)]]);
        let covered: Vec<u32> = step
            .parts
            .iter()
            .flat_map(|p| p.first_token..p.first_token + p.queries)
            .collect();
        assert_eq!(covered, (0..62).collect::<Vec<_>>());
        assert!(step.tiles.iter().all(|t| t.queries as usize <= queries_per_tile(heads)));
        assert_eq!(step.blocks(0, 1), [4, 5]);
        let angle = 17.0f32 * 0.5;
        assert!((step.rotations[0].token_rotations[60 * 2] - 2.0 * angle.cos()).abs() < 1e-6);
        assert!((step.rotations[0].token_rotations[60 * 2 + 1] - 2.0 * angle.sin()).abs() < 1e-6);
        let copied = StepBatch {
            block_copies: vec![BlockCopy { from: 1, to: 5 }],
            ..batch
        };
        step.upload(&copied);
        assert_eq!(step.new_tail_blocks, [[(3, 12), (5, 2), (8, 1)]]);
    }

    #[test]
    fn sequences_with_a_common_prefix_share_a_tile() {
        let heads = HeadShape {
            heads: 12,
            kv_heads: 2,
            head_dim: 2,
            value_in_key: None,
        };
        let rope = RopeSpec {
            inverse_frequencies: vec![0.5],
            scale: 1.0,
        };
        let mut step = Step::new(vec![rope], &[(KvSpec::Full, heads)], false);
        assert_eq!(queries_per_tile(heads), 8);
        // Each block from 100 on belongs to one sequence. The fourth sequence differs after 7
        // blocks, the sixth from the start.
        let tables: [Vec<u32>; 6] = [
            (0..9).chain([100]).collect(),
            (0..9).chain([101]).collect(),
            (0..9).chain([102]).collect(),
            (0..7).chain([103, 104, 105]).collect(),
            (0..9).chain([106]).collect(),
            (200..210).collect(),
        ];
        let queries = [1, 1, 2, 1, 4, 1];
        let mut batch = StepBatch::default();
        for (table, q_len) in tables.iter().zip(queries) {
            batch.push((0..q_len).map(|_| 0), 150, table.iter().copied());
        }
        step.upload(&batch);
        let tiles: Vec<_> = step
            .tiles
            .iter()
            .map(|t| (t.parts.clone(), t.queries, t.prefix_len))
            .collect();
        // The fifth does not fit the first tile; the sixth shares nothing with it.
        assert_eq!(tiles, [(0..4, 5, 64), (4..5, 4, 128), (5..6, 1, 128)]);
        // A second table without a window, in which the second sequence differs after 3 blocks. What a
        // table with a window has does not count.
        let mut second = batch.block_tables[0].clone();
        second[batch.sequences[1].first_block as usize + 3] += 1000;
        let unshared = (1000..).take(second.len()).collect();
        let tables = [KvSpec::Full, KvSpec::Window(9), KvSpec::Full];
        batch.block_tables.extend([unshared, second]);
        let rope = step.rotations.remove(0).rope;
        let mut step = Step::new(vec![rope], &tables.map(|kind| (kind, heads)), false);
        step.upload(&batch);
        let tiles: Vec<_> = step.tiles.iter().map(|t| (t.parts.clone(), t.prefix_len)).collect();
        assert_eq!(tiles, [(0..1, 128), (1..2, 128), (2..5, 64), (5..6, 128)]);
    }
}
