//! Attention over INT8 keys and values, or over those in 4 bits, which are expanded to 8 span by span.
//! Queries and weights are quantized to 8 bits, too.
//!
//! Each query head is quantized by its largest magnitude, and so are keys and values, per position
//! and head. One step of the online softmax covers a span of 64 positions. Scores are exact integer
//! sums and are scaled afterwards. Weights are relative to the largest weight of the span. Each
//! weight is multiplied by the scale of its value, which is relative to the largest value scale
//! that the row sees in the span, and is rounded to 0..=255. These weight bytes are multiplied with
//! the value bytes in integers, and the results are added to the row's accumulators in F32. The
//! softmax denominator is the sum of the weights before rounding.
//!
//! Integer sums are exact, and all other operations round in a fixed order, so results are
//! bit-identical with every instruction set. The result of a row depends only on the positions that
//! it sees; other positions of its last span have no effect.
//!
//! See docs/decisions/064-int8-attention-walks-spans-of-64.md.

#![expect(unsafe_code, reason = "kernels take addresses and need instructions")]

use super::float::{AttentionScratch, AttentionTile, VisibleSpan, first_visible};
use super::int8_products::{ROWS_MAX, SPAN_BLOCKS, Scores, ValueProduct, add_values, score};
use super::softmax_int8::{SoftmaxMerge, SoftmaxPartial, SpanSoftmax, merge_on, softmax_step_on};
use crate::device::batch::NO_BLOCK;
use crate::device::cpu::gemm::int8::{OFFSET, QUAD};
use crate::device::cpu::gemm::tile::PANEL;
use crate::device::cpu::kv::{Int8Pages, PageScales, padded};
use crate::device::cpu::kv_int4::{Expanded, Int4Pages};
use crate::device::cpu::math::sum16;
use crate::device::cpu::quantize::quantize_row_on;
use crate::device::cpu::{BLOCK_TOKENS, SPAN_TOKENS};

/// Scratch memory of an INT8 task, in addition to [`AttentionScratch`].
pub(crate) struct Int8Scratch {
    /// `[rows][padded head_dim]`: queries, signed.
    queries: Vec<i8>,
    /// `[rows]`: factor from `score * key scale` to the base-2 logarithm of a weight.
    scales: Vec<f32>,
    /// `[rows]`: initial values of the scores' sums, which cancel the offset of the keys.
    initial_scores: Vec<i32>,
    /// `[rows]`: sums of weights so far, by slot (position within the block).
    weight_sums: Vec<[f32; BLOCK_TOKENS]>,
    bytes: Vec<u8>,
    scores: [[i32; SPAN_TOKENS]; ROWS_MAX],
    weights: [[u8; SPAN_TOKENS]; ROWS_MAX],
    /// A span's keys and values, where they are stored in 4 bits.
    expanded: Expanded,
}

impl Default for Int8Scratch {
    fn default() -> Int8Scratch {
        Int8Scratch {
            queries: Vec::new(),
            scales: Vec::new(),
            initial_scores: Vec::new(),
            weight_sums: Vec::new(),
            bytes: Vec::new(),
            scores: [[0; SPAN_TOKENS]; ROWS_MAX],
            weights: [[0; SPAN_TOKENS]; ROWS_MAX],
            expanded: Expanded::default(),
        }
    }
}

/// The pages that a task reads.
#[derive(Clone, Copy)]
pub(crate) enum Pages<'a> {
    Int8(&'a Int8Pages),
    Int4(&'a Int4Pages),
}

/// Runs a task whose scratch the caller has reset. Afterwards the states' largest scores are
/// scaled, as those of [`float`](super::float) are, and the caller divides each row by its sum of
/// weights.
pub(crate) fn run(task: &AttentionTile<'_>, pages: Pages<'_>, scratch: &mut AttentionScratch) {
    quantize_queries(task, &mut scratch.int8);
    scratch.int8.weight_sums.clear();
    scratch.int8.weight_sums.resize(task.rows(), [0.0; BLOCK_TOKENS]);
    let mut expanded = std::mem::take(&mut scratch.int8.expanded);
    task.visit_spans(SPAN_TOKENS, |span| {
        SpanPages::new(task, pages, &span, &mut expanded).run(&span, scratch);
    });
    scratch.int8.expanded = expanded;
    let states = scratch.softmax.iter_mut().zip(&scratch.int8.weight_sums);
    for ((state, weight_sums), scale) in states.zip(&scratch.int8.scales) {
        state.sum = sum16(*weight_sums);
        state.max *= scale * std::f32::consts::LN_2;
    }
}

fn quantize_queries(task: &AttentionTile<'_>, scratch: &mut Int8Scratch) {
    let dim = task.heads.head_dim;
    let padded_dim = padded(dim);
    scratch.queries.resize(task.rows() * padded_dim, 0);
    scratch.bytes.resize(padded_dim, 0);
    scratch.scales.clear();
    scratch.initial_scores.clear();
    for ((token, head), out) in task
        .token_heads(0..task.rows())
        .zip(scratch.queries.chunks_exact_mut(padded_dim))
    {
        let mut scale = 0.0;
        let query = &task.op.qkv.row(token)[head * dim..][..dim];
        quantize_row_on(task.op.ctx.isa, query, &mut scratch.bytes, &mut scale);
        let mut sum = 0;
        for (q, byte) in out.iter_mut().zip(&scratch.bytes) {
            *q = byte.wrapping_sub(OFFSET as u8) as i8;
            sum += i32::from(*q);
        }
        scratch.initial_scores.push(-OFFSET * sum);
        scratch
            .scales
            .push(scale * std::f32::consts::LOG2_E * task.op.params.scale);
    }
}

/// A span's keys and values.
struct SpanPages<'a> {
    task: &'a AttentionTile<'a>,
    blocks: usize,
    padded_dim: usize,
    /// Of whole blocks, in pages or in scratch memory that is borrowed as long.
    keys: [*const u8; SPAN_BLOCKS],
    values: [*const i8; SPAN_BLOCKS],
    key_scales: [&'a [f32; BLOCK_TOKENS]; SPAN_BLOCKS],
    value_scales: [&'a [f32; BLOCK_TOKENS]; SPAN_BLOCKS],
    value_scale_max: [&'a [f32; BLOCK_TOKENS]; SPAN_BLOCKS],
}

impl<'a> SpanPages<'a> {
    fn new(
        task: &'a AttentionTile<'a>,
        pages: Pages<'a>,
        span: &VisibleSpan<'_>,
        expanded: &'a mut Expanded,
    ) -> SpanPages<'a> {
        let (regions, head) = (task.regions, task.kv_head);
        // The last block, which has visible positions, stands for blocks beyond the end of the
        // sequence and for blocks behind the window.
        let last = span.blocks[span.blocks.len() - 1];
        let held = |i: usize| span.blocks.get(i).copied().filter(|block| *block != NO_BLOCK);
        let blocks: [usize; SPAN_BLOCKS] = std::array::from_fn(|i| held(i).unwrap_or(last) as usize);
        let (keys, values, scales): (_, _, &'a PageScales) = match pages {
            Pages::Int8(pages) => (
                blocks.map(|block| pages.keys[regions.keys.of(head, block)].as_ptr()),
                blocks.map(|block| pages.values[regions.values.of(head, block)].as_ptr()),
                &pages.scales,
            ),
            Pages::Int4(pages) => {
                pages.expand(task.op.ctx.isa, (regions, head), &blocks[..span.blocks.len()], expanded);
                let len = 2 * regions.keys.len;
                let at = |i: usize| i.min(span.blocks.len() - 1) * len..;
                (
                    std::array::from_fn(|i| expanded.keys[at(i)].as_ptr()),
                    std::array::from_fn(|i| expanded.values[at(i)].as_ptr().cast()),
                    &pages.scales,
                )
            }
        };
        let of_blocks = |all: &'a [f32]| -> [&'a [f32; BLOCK_TOKENS]; SPAN_BLOCKS] {
            blocks.map(|block| &all.as_chunks().0[regions.scales.of(head, block).start / BLOCK_TOKENS])
        };
        SpanPages {
            task,
            blocks: span.blocks.len(),
            padded_dim: padded(task.heads.head_dim),
            keys,
            values,
            key_scales: of_blocks(&scales.keys),
            value_scales: of_blocks(&scales.values),
            value_scale_max: of_blocks(&scales.values_max),
        }
    }

    fn run(&self, span: &VisibleSpan<'_>, scratch: &mut AttentionScratch) {
        let isa = self.task.op.ctx.isa;
        let (padded_dim, group_size) = (self.padded_dim, self.task.group_size());
        let AttentionScratch {
            positions,
            accumulators,
            softmax,
            int8,
            ..
        } = scratch;
        for from in span.rows.clone().step_by(ROWS_MAX) {
            let rows = ROWS_MAX.min(span.rows.end - from);
            let queries = &int8.queries[from * padded_dim..(from + rows) * padded_dim];
            let scales = &int8.scales[from..from + rows];
            let op = Scores {
                rows,
                blocks: self.blocks,
                quads: padded_dim / QUAD,
                queries: queries.as_ptr(),
                initial_scores: int8.initial_scores[from..from + rows].as_ptr(),
                keys: self.keys,
            };
            // SAFETY: queries and initial scores have `rows` rows, and each block has its full
            // size.
            unsafe { score(isa, &op, &mut int8.scores) };
            let (mut partials, mut value_scale_max) = ([SoftmaxPartial::default(); ROWS_MAX], [0.0; ROWS_MAX]);
            for r in 0..rows {
                let position = positions[(from + r) / group_size] as usize;
                let visible = first_visible(self.task.op.params.spec, position).saturating_sub(span.start)
                    ..(position + 1 - span.start).min(SPAN_TOKENS);
                let last = visible.end - 1;
                value_scale_max[r] = self.value_scale_max[last / BLOCK_TOKENS][last % BLOCK_TOKENS];
                let step = SpanSoftmax {
                    blocks: self.blocks,
                    visible,
                    scale: scales[r],
                    soft_cap: self.task.op.params.soft_cap,
                    key_scales: self.key_scales,
                    value_scales: self.value_scales,
                    inverse_value_scale: if value_scale_max[r] > f32::MIN_POSITIVE {
                        255.0 / value_scale_max[r]
                    } else {
                        0.0
                    },
                };
                // SAFETY: the processor has the instructions that `isa` names.
                unsafe { softmax_step_on(isa, &step, &int8.scores[r], &mut int8.weights[r], &mut partials[r]) };
            }
            let merge = SoftmaxMerge {
                partials: &partials[..rows],
                value_scale_max: &value_scale_max,
                scales,
            };
            let (mut rescales, mut scales) = ([0.0; ROWS_MAX], [0.0; ROWS_MAX]);
            let (states, weight_sums) = (&mut softmax[from..], &mut int8.weight_sums[from..]);
            merge_on(isa, &merge, states, weight_sums, &mut rescales, &mut scales);
            let op = ValueProduct {
                rows,
                blocks: self.blocks,
                panels: padded_dim / PANEL,
                weights: int8.weights.as_ptr(),
                values: self.values,
                rescales,
                scales,
                accumulators: accumulators[from * padded_dim..(from + rows) * padded_dim].as_mut_ptr(),
            };
            // SAFETY: weights and accumulators have `rows` rows, and each block has its full size.
            unsafe { add_values(isa, &op) };
        }
    }
}
