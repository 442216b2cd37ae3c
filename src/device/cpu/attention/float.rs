//! Attention over paged keys and values, for any mix of prefill and decode.
//!
//! A task is one tile of queries with one KV head. Keys and values are loaded once for all query
//! heads of the KV head's group and, in the blocks of a common prefix, for all sequences of the
//! tile. The task visits the blocks of 16 positions in order, aligned to absolute positions, with
//! an online softmax (Milakov and Gimelshein 2018). For each block it computes scores and their
//! maximum, rescales the accumulators, and adds the weighted values. A query skips blocks without a
//! visible position. The computation for a query thus depends only on its position and window. It
//! is independent of how its sequence is chunked, of shared prefixes and of the rest of the batch.
//!
//! Where a KV head has very many query heads, they are divided among several tasks. Where keys have
//! their values in them, a task reads a block once and turns it into values.
//!
//! [`int8`](super::int8) implements attention over INT8 keys and values. It visits positions in the
//! same way, in spans of 64.
//!
//! See docs/decisions/065-common-prefixes-are-attended-once.md.

#![expect(unsafe_code, reason = "kernels take addresses of parts of a buffer")]

use std::ops::Range;
use std::sync::Mutex;

use super::int8;
use super::int8::{Int8Scratch, Pages};
use crate::device::cpu::BLOCK_TOKENS;
use crate::device::cpu::gemm::tile::{Element, F32Gemm, PANEL, matmul, max_rows};
use crate::device::cpu::hadamard::turn_on;
use crate::device::cpu::isa::multiversion;
use crate::device::cpu::kv::{KvPages, KvPool, KvStore, Regions, padded};
use crate::device::cpu::math::{exp, round_bf16, soft_cap, sum16};
use crate::device::cpu::step::{QueryTile, Step, TASK_ROWS, TilePart};
use crate::device::cpu::{Buffer, ExecContext, SharedMut};
use crate::device::{Attention, HeadShape, KvSpec};

/// An attention operation's inputs besides the pool.
pub(crate) struct AttentionOp<'a> {
    pub ctx: ExecContext<'a>,
    pub round_to_bf16: bool,
    pub params: Attention,
    /// The sink of each query head.
    pub sinks: Option<&'a [f32]>,
    pub step: &'a Step,
    /// `[tokens]` rows of `[q][k][v]`, of `[q]`, or, where keys have their values in them, of `[q][k]`.
    pub qkv: &'a Buffer,
}

/// One scratch per thread. A thread locks only its own scratch, so the locks are uncontended.
#[derive(Default)]
pub(crate) struct Scratches(Vec<Mutex<AttentionScratch>>);

impl Scratches {
    pub(crate) fn new(threads: usize) -> Scratches {
        Scratches((0..threads).map(|_| Mutex::default()).collect())
    }
}

/// Scratch memory of a task. A row is one query head of one query; rows are ordered by query, then
/// by head of the group.
#[derive(Default)]
pub(crate) struct AttentionScratch {
    /// Queries, packed in tiles of rows: `[tile][head_dim][rows of the tile]`.
    queries: Vec<f32>,
    /// `[rows][16]`: the scores of a block, later overwritten by its weights.
    scores: Vec<f32>,
    /// `[tile][16][rows of the tile]`: the weights, packed.
    weights: Vec<f32>,
    /// `[queries]`: positions of the queries.
    pub positions: Vec<u32>,
    /// A block's values, where its keys have them in them: as in a pool, in F32.
    values: Vec<f32>,
    /// `[rows][padded value_dim]`: weighted sums of the values.
    pub accumulators: Vec<f32>,
    /// `[rows]`.
    pub softmax: Vec<SoftmaxState>,
    pub int8: Int8Scratch,
}

/// State of a row's online softmax between two blocks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SoftmaxState {
    /// Largest score so far.
    pub max: f32,
    /// Sum of weights so far, relative to `max`.
    pub sum: f32,
}

/// First position that a query at `position` sees.
pub(crate) fn first_visible(spec: KvSpec, position: usize) -> usize {
    match spec {
        KvSpec::Full => 0,
        KvSpec::Window(window) => (position + 1).saturating_sub(window as usize),
    }
}

/// Runs the operation; `out` becomes `[tokens][heads * value_dim]`.
pub(crate) fn attention(op: &AttentionOp<'_>, pool: &KvPool, out: &mut Buffer, scratches: &Scratches) {
    let place = op.params.place;
    let (heads, value_dim) = (place.heads, place.heads.value_dim());
    assert!([heads.q_width(), place.heads.row_width()].contains(&op.qkv.width));
    assert!(op.sinks.is_none_or(|sinks| sinks.len() == heads.heads));
    out.reshape(op.qkv.rows, heads.heads * value_dim);
    let width = out.width;
    let target = SharedMut::new(&mut out.data);
    let group = heads.heads / heads.kv_heads;
    let task_heads = group.div_ceil(group.div_ceil(TASK_ROWS));
    let parts = group.div_ceil(task_heads);
    let tasks = op.step.tiles.len() * heads.kv_heads * parts;
    let regions = pool.regions(op.params.place);
    op.ctx.threads.parallel_for(tasks, |thread, tasks| {
        let mut scratch = scratches.0[thread]
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        for i in tasks {
            let (tile, kv_head) = (i / parts / heads.kv_heads, i / parts % heads.kv_heads);
            let first = i % parts * task_heads;
            let task = AttentionTile {
                op,
                heads,
                tile: &op.step.tiles[tile],
                kv_head,
                query_heads: kv_head * group + first..kv_head * group + (first + task_heads).min(group),
                regions,
            };
            task.reset(&mut scratch);
            match &pool.store {
                KvStore::F32(pages) => task.run(pages, &mut scratch),
                KvStore::Bf16(pages) => task.run(pages, &mut scratch),
                KvStore::Int8(pages) => int8::run(&task, Pages::Int8(pages), &mut scratch),
                KvStore::Int4(pages) => int8::run(&task, Pages::Int4(pages), &mut scratch),
            }
            for (r, (token, head)) in task.token_heads(0..task.rows()).enumerate() {
                // SAFETY: this task alone owns these tokens of these heads.
                let row = unsafe { target.slice(token * width + head * value_dim, value_dim) };
                let state = scratch.softmax[r];
                let sink = op.sinks.map_or(0.0, |sinks| exp(sinks[head] - state.max));
                let total = state.sum + sink;
                for (y, x) in row.iter_mut().zip(&scratch.accumulators[r * padded(value_dim)..]) {
                    *y = x / total;
                }
                if pool.turns_heads() {
                    turn_on(op.ctx.isa, row, value_dim);
                }
                if op.round_to_bf16 {
                    row.iter_mut().for_each(|y| *y = round_bf16(*y));
                }
            }
        }
    });
}

/// A tile of queries with one KV head, and all or some of the query heads that share it.
pub(crate) struct AttentionTile<'a> {
    pub op: &'a AttentionOp<'a>,
    pub heads: HeadShape,
    tile: &'a QueryTile,
    pub kv_head: usize,
    query_heads: Range<usize>,
    /// Where the layer's keys and values lie in the pool.
    pub regions: Regions,
}

/// A range of positions (a block or a span) and the rows that attend to it.
pub(crate) struct VisibleSpan<'a> {
    /// Rows whose sequences have these blocks: all rows of the tile within the common prefix, after
    /// it the rows of one part.
    pub part_rows: Range<usize>,
    /// The rows of `part_rows` that see at least one position of the range.
    pub rows: Range<usize>,
    /// First position of the range.
    pub start: usize,
    /// KV blocks of the range, up to the end of the sequence. Blocks without a visible position may
    /// be [`NO_BLOCK`](crate::device::batch::NO_BLOCK).
    pub blocks: &'a [u32],
}

impl AttentionTile<'_> {
    /// Number of the task's query heads.
    pub(crate) fn group_size(&self) -> usize {
        self.query_heads.len()
    }

    /// Numbers of a row of accumulators.
    fn padded_value_dim(&self) -> usize {
        padded(self.op.params.place.heads.value_dim())
    }

    pub(crate) fn rows(&self) -> usize {
        self.tile.queries as usize * self.group_size()
    }

    /// The (token, query head) of each of these rows.
    pub(crate) fn token_heads(&self, rows: Range<usize>) -> impl Iterator<Item = (usize, usize)> + '_ {
        let group_size = self.group_size();
        let tokens = self
            .op
            .step
            .parts(self.tile)
            .iter()
            .flat_map(|part| part.first_token as usize..(part.first_token + part.queries) as usize);
        let first = self.query_heads.start;
        let all = tokens.flat_map(move |token| (0..group_size).map(move |g| (token, first + g)));
        all.skip(rows.start).take(rows.len())
    }

    fn reset(&self, scratch: &mut AttentionScratch) {
        let rows = self.rows();
        scratch.positions.clear();
        for part in self.op.step.parts(self.tile) {
            scratch
                .positions
                .extend(part.first_position..part.first_position + part.queries);
        }
        scratch.accumulators.clear();
        scratch.accumulators.resize(rows * self.padded_value_dim(), 0.0);
        scratch.softmax.clear();
        scratch.softmax.resize(
            rows,
            SoftmaxState {
                max: f32::NEG_INFINITY,
                sum: 0.0,
            },
        );
    }

    /// Calls `visit` for all positions that the tile's queries see, in ranges of `range_len`
    /// positions: first the common prefix of the parts, then the other positions of each part.
    pub(crate) fn visit_spans(&self, range_len: usize, mut visit: impl FnMut(VisibleSpan<'_>)) {
        let step = self.op.step;
        let parts = step.parts(self.tile);
        let prefix_len = match self.op.params.spec {
            KvSpec::Full => self.tile.prefix_len as usize,
            // The start of a window differs from query to query, so no range is shared.
            KvSpec::Window(_) => 0,
        };
        let blocks_of = |sequence: u32, start: usize| -> &[u32] {
            let blocks = &step.blocks(self.op.params.place.table, sequence)[start / BLOCK_TOKENS..];
            &blocks[..blocks.len().min(range_len / BLOCK_TOKENS)]
        };
        for start in (0..prefix_len).step_by(range_len) {
            visit(VisibleSpan {
                part_rows: 0..self.rows(),
                rows: 0..self.rows(),
                start,
                blocks: blocks_of(parts[0].sequence, start),
            });
        }
        let mut row = 0;
        for part in parts {
            let part_rows = row..row + part.queries as usize * self.group_size();
            row = part_rows.end;
            let position = part.first_position as usize;
            let from = (first_visible(self.op.params.spec, position) / range_len * range_len).max(prefix_len);
            for start in (from..position + part.queries as usize).step_by(range_len) {
                let queries = self.queries_that_see(part, start..start + range_len);
                let (first, end) = (queries.start * self.group_size(), queries.end * self.group_size());
                let rows = part_rows.start + first..part_rows.start + end;
                if !rows.is_empty() {
                    visit(VisibleSpan {
                        part_rows: part_rows.clone(),
                        rows,
                        start,
                        blocks: blocks_of(part.sequence, start),
                    });
                }
            }
        }
    }

    /// The queries of a part that see at least one of these positions: a contiguous range, since
    /// later queries see later positions.
    fn queries_that_see(&self, part: &TilePart, positions: Range<usize>) -> Range<usize> {
        let (first, queries) = (part.first_position as usize, part.queries as usize);
        let from = positions.start.saturating_sub(first).min(queries);
        let sees = |q: usize| first_visible(self.op.params.spec, first + q) < positions.end;
        from..(from..queries).take_while(|&q| sees(q)).count() + from
    }

    fn run<E: Element>(&self, pages: &KvPages<E>, scratch: &mut AttentionScratch) {
        let padded_dim = self.padded_value_dim();
        scratch.scores.resize(self.rows() * PANEL, 0.0);
        scratch.weights.resize(self.rows() * PANEL, 0.0);
        let mut packed = 0..0;
        self.visit_spans(BLOCK_TOKENS, |span| {
            let block = span.blocks[0] as usize;
            let keys = &pages.keys[self.regions.keys.of(self.kv_head, block)];
            if packed != span.part_rows {
                self.pack_queries(span.part_rows.clone(), scratch);
                packed = span.part_rows.clone();
            }
            self.score(span.part_rows, keys, scratch);
            let step = BlockSoftmax {
                spec: self.op.params.spec,
                positions: &scratch.positions,
                group_size: self.group_size(),
                rows: span.rows.clone(),
                start: span.start,
                scale: self.op.params.scale,
                soft_cap: self.op.params.soft_cap,
                padded_dim,
            };
            softmax_step_on(
                self.op.ctx.isa,
                &step,
                &mut scratch.scores,
                &mut scratch.softmax,
                &mut scratch.accumulators,
            );
            if let Some(value_dim) = self.op.params.place.heads.value_in_key {
                let mut values = std::mem::take(&mut scratch.values);
                values.resize(padded_dim * BLOCK_TOKENS, 0.0);
                values_of_keys(&keys[..value_dim * BLOCK_TOKENS], &mut values);
                self.add_values(span.rows, &values, scratch);
                scratch.values = values;
            } else {
                let values = &pages.values[self.regions.values.of(self.kv_head, block)];
                self.add_values(span.rows, values, scratch);
            }
        });
    }

    /// Divides rows into tiles for the kernel: (first row, number of rows).
    fn row_tiles(&self, range: Range<usize>) -> impl Iterator<Item = (usize, usize)> + use<> {
        let rows_max = max_rows(self.op.ctx.isa);
        let end = range.end;
        range
            .step_by(rows_max)
            .map(move |from| (from, rows_max.min(end - from)))
    }

    fn pack_queries(&self, range: Range<usize>, scratch: &mut AttentionScratch) {
        let dim = self.heads.head_dim;
        scratch.queries.resize(self.rows() * dim, 0.0);
        for (from, rows) in self.row_tiles(range) {
            let out = &mut scratch.queries[from * dim..(from + rows) * dim];
            for (r, (token, head)) in self.token_heads(from..from + rows).enumerate() {
                for (d, x) in self.op.qkv.row(token)[head * dim..][..dim].iter().enumerate() {
                    out[d * rows + r] = *x;
                }
            }
        }
    }

    /// Computes the dot products of these rows with the block's 16 keys.
    fn score<E: Element>(&self, range: Range<usize>, keys: &[E], scratch: &mut AttentionScratch) {
        let dim = self.heads.head_dim;
        for (from, rows) in self.row_tiles(range) {
            let (a, c) = (
                &scratch.queries[from * dim..][..rows * dim],
                &mut scratch.scores[from * PANEL..],
            );
            assert!(keys.len() == dim * PANEL && c.len() >= rows * PANEL);
            // SAFETY: `a`, `keys` and `c` have the sizes that `F32Gemm` states.
            unsafe {
                matmul(
                    self.op.ctx.isa,
                    F32Gemm {
                        k: dim,
                        rows,
                        a: a.as_ptr(),
                        b: keys.as_ptr(),
                        panel_stride: 0,
                        panels: 1,
                        c: c.as_mut_ptr(),
                        c_stride: PANEL,
                        accumulate: false,
                    },
                );
            }
        }
    }

    /// Adds the block's weighted values to the accumulators of the rows `range`.
    fn add_values<E: Element>(&self, range: Range<usize>, values: &[E], scratch: &mut AttentionScratch) {
        let padded_dim = self.padded_value_dim();
        for (from, rows) in self.row_tiles(range) {
            let a = &mut scratch.weights[..rows * PANEL];
            for r in 0..rows {
                for j in 0..PANEL {
                    a[j * rows + r] = scratch.scores[(from + r) * PANEL + j];
                }
            }
            let c = &mut scratch.accumulators[from * padded_dim..];
            assert!(values.len() == padded_dim * BLOCK_TOKENS && c.len() >= rows * padded_dim);
            // SAFETY: `a`, `values` and `c` have the sizes that `F32Gemm` states.
            unsafe {
                matmul(
                    self.op.ctx.isa,
                    F32Gemm {
                        k: BLOCK_TOKENS,
                        rows,
                        a: a.as_ptr(),
                        b: values.as_ptr(),
                        panel_stride: BLOCK_TOKENS * PANEL,
                        panels: padded_dim / PANEL,
                        c: c.as_mut_ptr(),
                        c_stride: padded_dim,
                        accumulate: true,
                    },
                );
            }
        }
    }
}

/// The values of a block whose keys have them in them, `[value_dim][16 positions]`: as they lie in a
/// pool. The rest of the last panel stays as it is: zero.
fn values_of_keys<E: Element>(keys: &[E], values: &mut [f32]) {
    let panels = values.chunks_exact_mut(BLOCK_TOKENS * PANEL);
    for (keys, panel) in keys.chunks(PANEL * BLOCK_TOKENS).zip(panels) {
        for (d, numbers) in keys.chunks_exact(BLOCK_TOKENS).enumerate() {
            for (value, key) in panel[d..].iter_mut().step_by(PANEL).zip(numbers) {
                *value = key.widen();
            }
        }
    }
}

/// The softmax step of one block for some rows.
struct BlockSoftmax<'a> {
    spec: KvSpec,
    /// Positions of the tile's queries.
    positions: &'a [u32],
    group_size: usize,
    rows: Range<usize>,
    /// The block's first position.
    start: usize,
    scale: f32,
    soft_cap: Option<f32>,
    padded_dim: usize,
}

/// Turns scores into weights (0 at invisible positions), updates the softmax states and rescales
/// the accumulators.
#[inline(always)]
fn softmax_step(op: &BlockSoftmax<'_>, scores: &mut [f32], states: &mut [SoftmaxState], accumulators: &mut [f32]) {
    let start = op.start;
    for r in op.rows.clone() {
        let position = op.positions[r / op.group_size] as usize;
        let from = first_visible(op.spec, position).saturating_sub(start);
        let to = (position + 1 - start).min(BLOCK_TOKENS);
        let Some(row) = scores[r * PANEL..].first_chunk_mut::<PANEL>() else {
            return;
        };
        let state = &mut states[r];
        row.iter_mut().for_each(|score| *score *= op.scale);
        if let Some(cap) = op.soft_cap {
            row.iter_mut().for_each(|score| *score = soft_cap(*score, cap));
        }
        let mut masked = [f32::NEG_INFINITY; PANEL];
        for j in 0..PANEL {
            let visible = j >= from && j < to;
            masked[j] = if visible { row[j] } else { f32::NEG_INFINITY };
        }
        let mut max = state.max;
        for s in masked {
            max = if s > max { s } else { max };
        }
        let mut weights = [0.0f32; PANEL];
        for j in 0..PANEL {
            let visible = j >= from && j < to;
            let w = exp(masked[j] - max);
            weights[j] = if visible { w } else { 0.0 };
        }
        let rescale = exp(state.max - max);
        *state = SoftmaxState {
            max,
            sum: state.sum.mul_add(rescale, sum16(weights)),
        };
        *row = weights;
        if rescale != 1.0 {
            for x in &mut accumulators[r * op.padded_dim..(r + 1) * op.padded_dim] {
                *x *= rescale;
            }
        }
    }
}

multiversion! {
    fn softmax_step_on(
        op: &BlockSoftmax<'_>,
        scores: &mut [f32],
        states: &mut [SoftmaxState],
        accumulators: &mut [f32],
    ) = softmax_step;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::batch::StepBatch;
    use crate::device::cpu::Isa;
    use crate::device::cpu::hadamard::turn_rows;
    use crate::device::cpu::testing::{buffer, ctx_with_threads, numbers};
    use crate::device::{KvFormat, KvPlace, KvShape, RopeSpec};

    /// A batch of sequences given as `(q_len, kv_len)`. Block numbers are in descending order.
    fn batch(sequences: &[(u32, u32)]) -> StepBatch {
        let mut batch = StepBatch::default();
        for &(q_len, kv_len) in sequences {
            batch.push((0..q_len).map(|_| 0), kv_len, (0..kv_len.div_ceil(16)).map(|_| 0));
        }
        let blocks = batch.block_tables[0].len() as u32;
        batch.block_tables[0]
            .iter_mut()
            .enumerate()
            .for_each(|(i, b)| *b = blocks - 1 - i as u32);
        batch
    }

    fn new_step(heads: HeadShape, batch: &StepBatch) -> Step {
        let rope = RopeSpec {
            inverse_frequencies: vec![0.0; heads.head_dim / 2],
            scale: 1.0,
        };
        let mut step = Step::new(vec![rope], &[(KvSpec::Full, heads)], false);
        step.upload(batch);
        step
    }

    /// The `[q][k][v]` row of a token, which is independent of how the tokens are split into steps.
    fn row_of(heads: HeadShape, sequence: usize, position: u32) -> Vec<f32> {
        let scaled = numbers(1000 * sequence as u64 + position as u64, heads.qkv_width());
        scaled.into_iter().map(|x| x * 3.0).collect()
    }

    /// Parameters of an attention run.
    #[derive(Debug, Clone, Copy)]
    struct Setup {
        isa: Isa,
        threads: usize,
        heads: HeadShape,
        params: Attention,
        format: KvFormat,
        /// All sequences begin with the contents of this many blocks of the first sequence.
        prefix_blocks: usize,
        /// Whether the sequences share these blocks. Otherwise each sequence has its own copy.
        is_shared: bool,
    }

    fn run(setup: Setup, sequences: &[(u32, u32)]) -> Vec<Vec<f32>> {
        let Setup {
            isa,
            threads,
            heads,
            params,
            format,
            prefix_blocks,
            is_shared,
        } = setup;
        // The first step stores all keys and values. The second step computes the tokens under
        // test.
        let all: Vec<(u32, u32)> = sequences.iter().map(|&(_, kv)| (kv, kv)).collect();
        let blocks = batch(&all).block_tables[0].len();
        let mut pool = match params.place.part {
            0 => KvPool::new(&heads.alone(), blocks, format),
            part => {
                let other = HeadShape { head_dim: 34, ..heads };
                let shapes = [(other, 1), (heads, part + 1)].map(|(heads, layers)| KvShape { heads, layers });
                KvPool::new(&shapes, blocks, format)
            }
        };
        let mut out = Buffer::default();
        for part in [&all[..], sequences] {
            let mut batch = batch(part);
            let first = batch.block_tables[0].clone();
            for s in &batch.sequences[1..] {
                let table = &mut batch.block_tables[0][s.first_block as usize..][..s.kv_len.div_ceil(16) as usize];
                // As in the engine, only whole blocks are shared.
                let shared = if is_shared {
                    prefix_blocks.min(s.kv_len as usize / 16)
                } else {
                    0
                };
                table[..shared].copy_from_slice(&first[..shared]);
            }
            let step = new_step(heads, &batch);
            let owner = |i: usize, position: u32| if (position as usize) < prefix_blocks * 16 { 0 } else { i };
            let rows: Vec<f32> = batch
                .sequences
                .iter()
                .enumerate()
                .flat_map(|(i, s)| (s.kv_len - s.q_len..s.kv_len).flat_map(move |p| row_of(heads, owner(i, p), p)))
                .collect();
            let mut qkv = buffer(&rows, batch.tokens.len(), heads.qkv_width());
            let ctx = ctx_with_threads(isa, threads);
            if pool.turns_heads() {
                turn_rows(ctx, params.place, &mut qkv);
            }
            let op = AttentionOp {
                ctx,
                round_to_bf16: false,
                params,
                sinks: None,
                step: &step,
                qkv: &qkv,
            };
            pool.store(op.ctx, &step, params.place, &qkv);
            attention(&op, &pool, &mut out, &Scratches::new(threads));
        }
        (0..out.rows).map(|i| out.row(i).to_vec()).collect()
    }

    /// Attention with a soft cap: some scores are far above the cap, others far below it.
    fn capped(heads: HeadShape, spec: KvSpec) -> Attention {
        Attention {
            scale: 0.3,
            soft_cap: Some(4.0),
            ..Attention::plain(heads, spec)
        }
    }

    /// A key or a value as its codes of four bits say, with a scale and a zero point of its own.
    fn in_four_bits(head: &mut [f32]) {
        let dim = head.len();
        turn_on(Isa::Portable, head, dim);
        let [low, high] = [f32::min as fn(f32, f32) -> f32, f32::max].map(|of| head.iter().copied().fold(0.0, of));
        let scale = (high - low) / 15.0;
        let zero = (-low / scale).round();
        for x in &mut *head {
            *x = ((*x / scale).round_ties_even().clamp(-zero, 15.0 - zero)) * scale;
        }
        turn_on(Isa::Portable, head, dim);
    }

    fn check(heads: HeadShape, params: Attention, format: KvFormat, sequences: &[(u32, u32)]) {
        let spec = params.spec;
        let group_size = heads.heads / heads.kv_heads;
        let dim = heads.head_dim;
        // INT8: the error of keys, queries, values and weights is at most half a step of 3/127.
        // In four bits, keys and values are compared as they are stored.
        let tolerance = match format {
            KvFormat::Int8 | KvFormat::Int4 => 0.15,
            _ => 2e-5,
        };
        let mut first: Option<Vec<Vec<f32>>> = None;
        for isa in Isa::available() {
            let setup = Setup {
                isa,
                threads: 1 + (dim / 2) % 2,
                heads,
                params,
                format,
                prefix_blocks: 0,
                is_shared: false,
            };
            let got = run(setup, sequences);
            let mut token = 0;
            for (i, &(q_len, kv_len)) in sequences.iter().enumerate() {
                let mut rows: Vec<Vec<f32>> = (0..kv_len).map(|p| row_of(heads, i, p)).collect();
                if format == KvFormat::Int4 {
                    let stored = rows
                        .iter_mut()
                        .flat_map(|row| row[heads.q_width()..].chunks_exact_mut(dim));
                    stored.for_each(in_four_bits);
                }
                for position in (kv_len - q_len) as usize..kv_len as usize {
                    for head in 0..heads.heads {
                        let part = |p: usize, h: usize| &rows[p][h * dim..][..dim];
                        let (k, v) = (
                            heads.heads + head / group_size,
                            heads.heads + heads.kv_heads + head / group_size,
                        );
                        let seen = match spec {
                            KvSpec::Full => 0,
                            KvSpec::Window(w) => (position + 1).saturating_sub(w as usize),
                        };
                        let scores: Vec<f64> = (seen..=position)
                            .map(|j| {
                                let dot: f64 = part(position, head)
                                    .iter()
                                    .zip(part(j, k))
                                    .map(|(a, b)| *a as f64 * *b as f64)
                                    .sum();
                                let score = dot * f64::from(params.scale);
                                let capped = |cap: f32| f64::from(cap) * (score / f64::from(cap)).tanh();
                                params.soft_cap.map_or(score, capped).exp()
                            })
                            .collect();
                        let total: f64 = scores.iter().sum();
                        for d in 0..dim {
                            let want: f64 = scores
                                .iter()
                                .zip(seen..)
                                .map(|(s, j)| s / total * part(j, v)[d] as f64)
                                .sum();
                            let got = got[token][head * dim + d] as f64;
                            assert!(
                                (got - want).abs() < tolerance,
                                "{isa:?} {params:?} {format:?} sequence {i} position {position} head {head} dim {d}: {got} {want}"
                            );
                        }
                    }
                    token += 1;
                }
            }
            assert!(
                *first.get_or_insert_with(|| got.clone()) == got,
                "bits differ on {isa:?}"
            );
        }
    }

    #[test]
    fn matches_the_formula_and_is_bit_identical_on_all_sets() {
        let sequences = [
            (1, 1),
            (1, 15),
            (16, 16),
            (17, 17),
            (1, 16),
            (1, 17),
            (5, 40),
            (70, 70),
            (1, 50),
            (3, 64),
            (1, 130),
        ];
        for (kv_heads, group_size, head_dim) in [(1, 1, 2), (2, 3, 16), (1, 5, 18), (2, 1, 64)] {
            let heads = HeadShape {
                heads: kv_heads * group_size,
                kv_heads,
                head_dim,
                value_in_key: None,
            };
            for spec in [
                KvSpec::Full,
                KvSpec::Window(1),
                KvSpec::Window(8),
                KvSpec::Window(16),
                KvSpec::Window(17),
                KvSpec::Window(70),
            ] {
                check(heads, Attention::plain(heads, spec), KvFormat::F32, &sequences);
                check(heads, Attention::plain(heads, spec), KvFormat::Int8, &sequences);
                check(heads, Attention::plain(heads, spec), KvFormat::Int4, &sequences);
            }
            for spec in [KvSpec::Full, KvSpec::Window(17)] {
                check(heads, capped(heads, spec), KvFormat::F32, &sequences);
                check(heads, capped(heads, spec), KvFormat::Int8, &sequences);
                check(heads, capped(heads, spec), KvFormat::Int4, &sequences);
            }
        }
    }

    /// Keys that have their values in them give the same bits as the same keys and values side by side,
    /// with more query heads than a task computes, too.
    #[test]
    fn values_in_keys_give_the_same_bits_as_values_beside_them() {
        let (value_dim, sequences) = (18, [(1, 1), (17, 17), (1, 40), (70, 70), (3, 64)]);
        for heads in [3, 50, 97] {
            let beside = HeadShape {
                heads,
                kv_heads: 1,
                head_dim: 25,
                value_in_key: None,
            };
            let within = HeadShape {
                value_in_key: Some(value_dim),
                ..beside
            };
            for format in [KvFormat::F32, KvFormat::Bf16, KvFormat::Int8] {
                let mut outputs = Vec::new();
                for place in [beside, within].map(KvPlace::alone) {
                    // Keys with values in them are in BF16 where 8 bits are asked for.
                    let stored = if place.heads.value_in_key.is_none() && format == KvFormat::Int8 {
                        KvFormat::Bf16
                    } else {
                        format
                    };
                    let batch = batch(&sequences.map(|(_, kv_len)| (kv_len, kv_len)));
                    let blocks = batch.block_tables[0].len();
                    let mut pool = KvPool::new(&place.heads.alone(), blocks, stored);
                    match &mut pool.store {
                        KvStore::F32(pages) => [&mut pages.keys, &mut pages.values].map(|all| all.fill(f32::NAN)),
                        KvStore::Bf16(pages) => {
                            [&mut pages.keys, &mut pages.values].map(|all| all.fill(Element::narrow(f32::NAN)))
                        }
                        KvStore::Int8(_) | KvStore::Int4(_) => panic!("8 or 4 bits"),
                    };
                    let step = new_step(place.heads, &batch);
                    let rows: Vec<f32> = (0..batch.tokens.len() as u64)
                        .flat_map(|token| {
                            let mut row = numbers(token, place.heads.row_width());
                            let queries = beside.q_width();
                            if place.heads.value_in_key.is_none() {
                                let key: Vec<f32> = row[queries..queries + beside.head_dim].to_vec();
                                row[queries + beside.head_dim..].copy_from_slice(&key);
                            }
                            row
                        })
                        .collect();
                    let qkv = buffer(&rows, batch.tokens.len(), place.heads.row_width());
                    let op = AttentionOp {
                        ctx: ctx_with_threads(Isa::detect(), 2),
                        round_to_bf16: false,
                        params: Attention {
                            place,
                            ..Attention::plain(beside, KvSpec::Full)
                        },
                        sinks: None,
                        step: &step,
                        qkv: &qkv,
                    };
                    pool.store(op.ctx, &step, place, &qkv);
                    let mut out = Buffer::default();
                    attention(&op, &pool, &mut out, &Scratches::new(2));
                    assert_eq!(out.width, heads * place.heads.value_dim());
                    let head_width = place.heads.value_dim();
                    let values = out
                        .rows()
                        .flat_map(|row| row.chunks(head_width).map(|head| head[..value_dim].to_vec()));
                    outputs.push(values.collect::<Vec<_>>());
                }
                assert!(outputs[0] == outputs[1], "{heads} heads, {format:?}");
                assert!(outputs[0].iter().flatten().all(|x| x.is_finite()));
            }
        }
    }

    #[test]
    fn results_are_bit_identical_for_any_chunk_size() {
        let heads = HeadShape {
            heads: 6,
            kv_heads: 2,
            head_dim: 20,
            value_in_key: None,
        };
        let all = [
            Attention::plain(heads, KvSpec::Full),
            Attention::plain(heads, KvSpec::Window(9)),
            Attention::plain(heads, KvSpec::Window(70)),
            capped(heads, KvSpec::Window(70)),
        ];
        for (params, format) in all
            .into_iter()
            .flat_map(|params| [KvFormat::F32, KvFormat::Int8, KvFormat::Int4].map(|format| (params, format)))
        {
            let setup = Setup {
                isa: Isa::detect(),
                threads: 2,
                heads,
                params,
                format,
                prefix_blocks: 0,
                is_shared: false,
            };
            let whole = run(setup, &[(131, 131)]);
            for chunk in [1, 2, 7, 15, 16, 17, 33, 66] {
                for end in (chunk..=131).step_by(5) {
                    let part = run(setup, &[(chunk, end)]);
                    // Only the end of the sequence differs. A query sees the same positions.
                    assert!(
                        part[..] == whole[(end - chunk) as usize..end as usize],
                        "{params:?} {format:?} chunk {chunk} to {end}"
                    );
                }
            }
        }
    }

    #[test]
    fn results_are_bit_identical_with_shared_prefixes() {
        let heads = HeadShape {
            heads: 6,
            kv_heads: 2,
            head_dim: 20,
            value_in_key: None,
        };
        // Of the 144 shared positions (9 blocks), 64 or 128 are whole spans. Chunks begin within
        // the prefix and after it.
        let sequences = [(1, 200), (1, 150), (4, 145), (1, 144), (20, 160), (3, 90), (1, 129)];
        let all = [
            Attention::plain(heads, KvSpec::Full),
            Attention::plain(heads, KvSpec::Window(70)),
            capped(heads, KvSpec::Full),
        ];
        for (params, format) in all
            .into_iter()
            .flat_map(|params| KvFormat::ON_CPU.map(|format| (params, format)))
        {
            let setup = Setup {
                isa: Isa::detect(),
                threads: 2,
                heads,
                params,
                format,
                prefix_blocks: 9,
                is_shared: true,
            };
            let [together, apart] = [true, false].map(|is_shared| run(Setup { is_shared, ..setup }, &sequences));
            assert!(together == apart, "{params:?} {format:?}");
            let place = KvPlace {
                part: 1,
                ..params.place
            };
            let params = Attention { place, ..params };
            let mixed = run(Setup { params, ..setup }, &sequences);
            assert!(mixed == together, "{params:?} {format:?}: a pool of several shapes");
        }
    }
}
