//! A step on the CPU: the batch, the rotations of its positions, and the attention plan that all layers share.

use super::math::round_bf16;
use crate::device::batch::StepBatch;
use crate::device::{BLOCK_TOKENS, HeadShape, RopeSpec};

/// Rows (queries times heads of a group) that one attention task takes: enough to use each loaded key often, few
/// enough that queries, scores and sums stay in the first-level cache.
const TASK_ROWS: usize = 48;

/// A [`StepBatch`] with what its operations share.
pub struct Step {
    pub(super) batch: StepBatch,
    pub(super) heads: HeadShape,
    /// `[tokens][head_dim]`: cosines of all pairs, then sines.
    pub(super) rotations: Vec<f32>,
    /// Query tiles, each done once per key-value head.
    pub(super) tiles: Vec<QueryTile>,
    /// (block, first unused position): last blocks that were begun in this step, whose rest must be cleared.
    pub(super) begun: Vec<(u32, u32)>,
    rope: RopeSpec,
    /// As `rotations`, for positions from 0; grows with the longest sequence seen.
    table: Vec<f32>,
    round: bool,
}

/// Queries of one sequence that attend together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct QueryTile {
    /// Index into the batch's sequences.
    pub sequence: u32,
    /// First token (index into the batch's tokens).
    pub token: u32,
    /// Position of the first token.
    pub position: u32,
    pub queries: u32,
}

/// Most queries of a tile.
pub(super) fn queries_per_tile(heads: HeadShape) -> usize {
    (TASK_ROWS / (heads.heads / heads.kv_heads)).max(1)
}

impl Step {
    pub(super) fn new(heads: HeadShape, rope: RopeSpec, round: bool) -> Step {
        assert_eq!(rope.inverse_frequencies.len() * 2, heads.head_dim);
        Step {
            batch: StepBatch::default(),
            heads,
            rotations: Vec::new(),
            tiles: Vec::new(),
            begun: Vec::new(),
            rope,
            table: Vec::new(),
            round,
        }
    }

    pub(super) fn upload(&mut self, batch: &StepBatch) {
        self.batch.clone_from(batch);
        self.rotate_positions();
        self.plan();
    }

    /// Block table of a sequence.
    pub(super) fn blocks(&self, sequence: u32) -> &[u32] {
        let s = &self.batch.sequences[sequence as usize];
        &self.batch.block_tables[s.first_block as usize..][..(s.kv_len as usize).div_ceil(BLOCK_TOKENS)]
    }

    fn rotate_positions(&mut self) {
        let width = self.heads.head_dim;
        let longest = self.batch.positions.iter().max().map_or(0, |&p| p as usize + 1);
        for position in self.table.len() / width..longest {
            // The angle is rounded to F32, as in the reference; sine and cosine of it are exact to F32.
            let angle = |f: &f32| (*f * position as f32) as f64;
            let scale = self.rope.scale;
            let round = self.round;
            let store = move |x: f64| {
                let y = x as f32 * scale;
                if round { round_bf16(y) } else { y }
            };
            self.table
                .extend(self.rope.inverse_frequencies.iter().map(|f| store(angle(f).cos())));
            self.table
                .extend(self.rope.inverse_frequencies.iter().map(|f| store(angle(f).sin())));
        }
        self.rotations.clear();
        for &p in &self.batch.positions {
            self.rotations
                .extend_from_slice(&self.table[p as usize * width..][..width]);
        }
    }

    fn plan(&mut self) {
        let per_tile = queries_per_tile(self.heads) as u32;
        self.tiles.clear();
        self.begun.clear();
        for (i, s) in self.batch.sequences.iter().enumerate() {
            let first = s.kv_len - s.q_len;
            for done in (0..s.q_len).step_by(per_tile as usize) {
                self.tiles.push(QueryTile {
                    sequence: i as u32,
                    token: s.first_token + done,
                    position: first + done,
                    queries: per_tile.min(s.q_len - done),
                });
            }
            let block_tokens = BLOCK_TOKENS as u32;
            let used = s.kv_len % block_tokens;
            if used == 0 {
                continue;
            }
            let last = self.batch.block_tables[(s.first_block + s.kv_len / block_tokens) as usize];
            let copied = self.batch.block_copies.iter().any(|&(_, to)| to == last);
            if first <= s.kv_len - used || copied {
                self.begun.push((last, used));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::batch::StepSequence;

    #[test]
    fn tiles_cover_every_query_once_and_begun_blocks_are_named() {
        let heads = HeadShape {
            heads: 4,
            kv_heads: 2,
            head_dim: 2,
        };
        let rope = RopeSpec {
            inverse_frequencies: vec![0.5],
            scale: 2.0,
        };
        let mut step = Step::new(heads, rope, false);
        let sequence = |first_token, q_len, kv_len, first_block| StepSequence {
            first_token,
            q_len,
            kv_len,
            first_block,
        };
        let batch = StepBatch {
            tokens: vec![0; 62],
            positions: (0..60).chain([17, 32]).collect(),
            // 60 fresh tokens; one token into a block begun earlier; one that begins a block.
            sequences: vec![sequence(0, 60, 60, 0), sequence(60, 1, 18, 4), sequence(61, 1, 33, 6)],
            block_tables: (0..9).collect(),
            logits_at: vec![59, 60, 61],
            block_copies: vec![],
        };
        step.upload(&batch);
        assert_eq!(step.begun, [(3, 12), (8, 1)]);
        let covered: Vec<u32> = step.tiles.iter().flat_map(|t| t.token..t.token + t.queries).collect();
        assert_eq!(covered, (0..62).collect::<Vec<_>>());
        assert!(step.tiles.iter().all(|t| t.queries as usize <= queries_per_tile(heads)));
        assert_eq!(step.blocks(1), [4, 5]);
        let angle = 17.0f32 * 0.5;
        assert!((step.rotations[60 * 2] - 2.0 * angle.cos()).abs() < 1e-6);
        assert!((step.rotations[60 * 2 + 1] - 2.0 * angle.sin()).abs() < 1e-6);
        let copied = StepBatch {
            block_copies: vec![(1, 5)],
            ..batch
        };
        step.upload(&copied);
        assert_eq!(step.begun, [(3, 12), (5, 2), (8, 1)]);
    }
}
