//! Attention over INT8 keys and values. Queries and weights are quantized to 8 bits, too.
//!
//! A query head is quantized by its largest magnitude; keys and values are quantized in the same
//! way per position and head. One step of the online softmax covers a span of 64 positions. Scores
//! are exact integer sums, scaled afterwards. Weights are relative to the largest weight of the
//! span. Each weight is multiplied by the scale of its value, relative to the largest value scale
//! that the row sees in the span, and rounded to 0..=255. These weight bytes are multiplied with
//! the value bytes in integers, and the products are added to the row's sums in F32. The softmax
//! denominator sums the weights before rounding.
//!
//! Integer sums are exact and the rest has a fixed order of roundings, so every instruction set
//! gives the same bits. The result of a row depends only on the positions that it sees, whatever
//! else its last span holds at that time.
//!
//! See docs/decisions/064-int8-attention-walks-spans-of-64.md.

#![expect(unsafe_code, reason = "kernels take addresses and need instructions")]

use super::float::{AttentionScratch, AttentionTile, VisibleSpan, first_visible};
use super::softmax_int8::{SoftmaxMerge, SoftmaxPartial, SpanSoftmax, merge_on, softmax_step_on};
use crate::device::cpu::gemm::int8::{OFFSET, QUAD};
use crate::device::cpu::gemm::tile::PANEL;
use crate::device::cpu::isa::Isa;
use crate::device::cpu::kv::{Int8Pages, padded};
use crate::device::cpu::math::sum16;
use crate::device::cpu::quantize::quantize_row_on;
use crate::device::cpu::{BLOCK_TOKENS, SPAN_TOKENS};

/// Blocks of a span.
pub(crate) const BLOCKS: usize = SPAN_TOKENS / BLOCK_TOKENS;
/// Maximum rows per kernel call.
pub(crate) const ROWS_MAX: usize = 6;

/// Working memory of an INT8 task, in addition to [`AttentionScratch`].
pub(crate) struct Int8Scratch {
    /// `[rows][padded head_dim]`: queries, signed.
    queries: Vec<i8>,
    /// `[rows]`: factor from `score * key scale` to the base-2 logarithm of a weight.
    scales: Vec<f32>,
    /// `[rows]`: initial values of the score sums, which cancel the offset of the keys.
    starts: Vec<i32>,
    /// `[rows]`: sums of weights so far, by slot (position within the block).
    totals: Vec<[f32; BLOCK_TOKENS]>,
    bytes: Vec<u8>,
    scores: [[i32; SPAN_TOKENS]; ROWS_MAX],
    weights: [[u8; SPAN_TOKENS]; ROWS_MAX],
}

impl Default for Int8Scratch {
    fn default() -> Int8Scratch {
        Int8Scratch {
            queries: Vec::new(),
            scales: Vec::new(),
            starts: Vec::new(),
            totals: Vec::new(),
            bytes: Vec::new(),
            scores: [[0; SPAN_TOKENS]; ROWS_MAX],
            weights: [[0; SPAN_TOKENS]; ROWS_MAX],
        }
    }
}

/// Scores of `rows` queries with the keys of `blocks` blocks:
/// `out[r][j] = starts[r] + sum over d of queries[r][d] * keys[j / 16][d][j % 16]`.
struct Scores {
    rows: usize,
    blocks: usize,
    /// Quads of head_dim.
    quads: usize,
    /// `[rows][4 * quads]`.
    queries: *const i8,
    starts: *const i32,
    /// One pointer per block, to `[quads][16][4]`.
    keys: [*const u8; BLOCKS],
}

/// Adds weighted values to the sums of `rows` rows:
/// `sums[r][d] = sums[r][d] * rescales[r] + scales[r] * (sum over j of weights[r][j] * values[j / 16][j % 16][d])`.
struct ValueProduct {
    rows: usize,
    blocks: usize,
    panels: usize,
    weights: *const [u8; SPAN_TOKENS],
    /// One pointer per block, to `[quads of positions][16 * panels][4]`.
    values: [*const i8; BLOCKS],
    rescales: [f32; ROWS_MAX],
    scales: [f32; ROWS_MAX],
    /// `[rows][16 * panels]`.
    sums: *mut f32,
}

/// Runs a task that the caller has prepared. Afterwards the caller divides by the row's sum.
pub(crate) fn run(task: &AttentionTile<'_>, pages: &Int8Pages, pool_blocks: usize, scratch: &mut AttentionScratch) {
    quantize_queries(task, &mut scratch.int8);
    scratch.int8.totals.clear();
    scratch.int8.totals.resize(task.rows(), [0.0; BLOCK_TOKENS]);
    task.walk(SPAN_TOKENS, |seen| {
        Span::new(task, pages, pool_blocks, &seen).run(&seen, scratch)
    });
    for (state, totals) in scratch.softmax.iter_mut().zip(&scratch.int8.totals) {
        state.sum = sum16(*totals);
    }
}

fn quantize_queries(task: &AttentionTile<'_>, scratch: &mut Int8Scratch) {
    let dim = task.heads.head_dim;
    let padded_dim = padded(dim);
    scratch.queries.resize(task.rows() * padded_dim, 0);
    scratch.bytes.resize(padded_dim, 0);
    scratch.scales.clear();
    scratch.starts.clear();
    for ((token, head), out) in task
        .rows_of(0..task.rows())
        .zip(scratch.queries.chunks_exact_mut(padded_dim))
    {
        let mut scale = 0.0;
        let query = &task.op.qkv.row(token)[head * dim..][..dim];
        quantize_row_on(task.op.on.isa, query, &mut scratch.bytes, &mut scale);
        let mut sum = 0;
        for (q, byte) in out.iter_mut().zip(&scratch.bytes) {
            *q = byte.wrapping_sub(OFFSET as u8) as i8;
            sum += i32::from(*q);
        }
        scratch.starts.push(-OFFSET * sum);
        scratch.scales.push(scale * std::f32::consts::LOG2_E * task.op.of.scale);
    }
}

/// A span's keys and values.
struct Span<'a> {
    task: &'a AttentionTile<'a>,
    blocks: usize,
    padded_dim: usize,
    keys: [&'a [u8]; BLOCKS],
    values: [&'a [i8]; BLOCKS],
    key_scales: [&'a [f32; BLOCK_TOKENS]; BLOCKS],
    value_scales: [&'a [f32; BLOCK_TOKENS]; BLOCKS],
    value_scale_max: [&'a [f32; BLOCK_TOKENS]; BLOCKS],
}

impl<'a> Span<'a> {
    fn new(task: &'a AttentionTile<'a>, pages: &'a Int8Pages, pool_blocks: usize, seen: &VisibleSpan<'_>) -> Span<'a> {
        let padded_dim = padded(task.heads.head_dim);
        let size = padded_dim * BLOCK_TOKENS;
        // If the sequence ends within the span, its last block fills the remaining entries.
        let at = |i: usize| task.head * pool_blocks + seen.blocks[i.min(seen.blocks.len() - 1)] as usize;
        let scales = |all: &'a [f32], i: usize| -> &'a [f32; BLOCK_TOKENS] { &all.as_chunks().0[at(i)] };
        Span {
            task,
            blocks: seen.blocks.len(),
            padded_dim,
            keys: std::array::from_fn(|i| &pages.keys[at(i) * size..][..size]),
            values: std::array::from_fn(|i| &pages.values[at(i) * size..][..size]),
            key_scales: std::array::from_fn(|i| scales(&pages.key_scales, i)),
            value_scales: std::array::from_fn(|i| scales(&pages.value_scales, i)),
            value_scale_max: std::array::from_fn(|i| scales(&pages.value_scale_max, i)),
        }
    }

    fn run(&self, seen: &VisibleSpan<'_>, scratch: &mut AttentionScratch) {
        let isa = self.task.op.on.isa;
        let (padded_dim, group) = (self.padded_dim, self.task.group());
        let AttentionScratch {
            positions,
            sums,
            softmax,
            int8,
            ..
        } = scratch;
        for from in seen.rows.clone().step_by(ROWS_MAX) {
            let rows = ROWS_MAX.min(seen.rows.end - from);
            let queries = &int8.queries[from * padded_dim..(from + rows) * padded_dim];
            let scales = &int8.scales[from..from + rows];
            let op = Scores {
                rows,
                blocks: self.blocks,
                quads: padded_dim / QUAD,
                queries: queries.as_ptr(),
                starts: int8.starts[from..from + rows].as_ptr(),
                keys: self.keys.map(<[u8]>::as_ptr),
            };
            // SAFETY: queries and starts have `rows` rows, and each block has its full size.
            unsafe { score(isa, &op, &mut int8.scores) };
            let (mut partials, mut value_scale_max) = ([SoftmaxPartial::default(); ROWS_MAX], [0.0; ROWS_MAX]);
            for r in 0..rows {
                let position = positions[(from + r) / group] as usize;
                let visible = first_visible(self.task.op.of.spec, position).saturating_sub(seen.start)
                    ..(position + 1 - seen.start).min(SPAN_TOKENS);
                let last = visible.end - 1;
                value_scale_max[r] = self.value_scale_max[last / BLOCK_TOKENS][last % BLOCK_TOKENS];
                let step = SpanSoftmax {
                    blocks: self.blocks,
                    visible,
                    scale: scales[r],
                    soft_cap: self.task.op.of.soft_cap,
                    key_scales: self.key_scales,
                    value_scales: self.value_scales,
                    inverse: if value_scale_max[r] > f32::MIN_POSITIVE {
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
            let (states, totals) = (&mut softmax[from..], &mut int8.totals[from..]);
            merge_on(isa, &merge, states, totals, &mut rescales, &mut scales);
            let op = ValueProduct {
                rows,
                blocks: self.blocks,
                panels: padded_dim / PANEL,
                weights: int8.weights.as_ptr(),
                values: self.values.map(<[i8]>::as_ptr),
                rescales,
                scales,
                sums: sums[from * padded_dim..(from + rows) * padded_dim].as_mut_ptr(),
            };
            // SAFETY: weights and sums have `rows` rows, and each block has its full size.
            unsafe { add_values(isa, &op) };
        }
    }
}

/// # Safety
/// All memory that [`Scores`] names is valid.
unsafe fn score(isa: Isa, op: &Scores, out: &mut [[i32; SPAN_TOKENS]; ROWS_MAX]) {
    // SAFETY: the caller upholds the same contract; the processor has the instructions that `isa`
    // names.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni | Isa::Avx512Bf16 | Isa::Amx => x86::score(op, out),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 | Isa::AvxVnni | Isa::Avx512 => avx2::score(op, out),
            Isa::Portable => portable_score(op, out),
        }
    }
}

/// # Safety
/// All memory that [`ValueProduct`] names is valid, and nobody else reads or writes the sums.
unsafe fn add_values(isa: Isa, op: &ValueProduct) {
    // SAFETY: as above.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni | Isa::Avx512Bf16 | Isa::Amx => x86::add_values(op),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 | Isa::AvxVnni | Isa::Avx512 => avx2::add_values(op),
            Isa::Portable => portable_values(op),
        }
    }
}

#[inline(always)]
fn portable_score(op: &Scores, out: &mut [[i32; SPAN_TOKENS]; ROWS_MAX]) {
    for (r, out) in out.iter_mut().enumerate().take(op.rows) {
        let (out, _) = out.as_chunks_mut::<BLOCK_TOKENS>();
        for (b, out) in out.iter_mut().enumerate().take(op.blocks) {
            // SAFETY: `score`'s caller vouches for rows, blocks and quads.
            let mut sums = [unsafe { *op.starts.add(r) }; BLOCK_TOKENS];
            for quad in 0..op.quads {
                for i in 0..QUAD {
                    // SAFETY: as above.
                    let q = i32::from(unsafe { *op.queries.add((r * op.quads + quad) * QUAD + i) });
                    for (j, sum) in sums.iter_mut().enumerate() {
                        // SAFETY: as above.
                        *sum += q * i32::from(unsafe { *op.keys[b].add((quad * BLOCK_TOKENS + j) * QUAD + i) });
                    }
                }
            }
            *out = sums;
        }
    }
}

#[inline(always)]
fn portable_values(op: &ValueProduct) {
    let padded_dim = op.panels * PANEL;
    for r in 0..op.rows {
        for panel in 0..op.panels {
            let mut sums = [0i32; PANEL];
            for j in 0..op.blocks * BLOCK_TOKENS {
                // SAFETY: `add_values`' caller vouches for rows and blocks.
                let weight = i32::from(unsafe { (&*op.weights.add(r))[j] });
                let (block, slot) = (op.values[j / BLOCK_TOKENS], j % BLOCK_TOKENS);
                let at = (slot / QUAD * padded_dim + panel * PANEL) * QUAD + slot % QUAD;
                for (d, sum) in sums.iter_mut().enumerate() {
                    // SAFETY: as above.
                    *sum += weight * i32::from(unsafe { *block.add(at + d * QUAD) });
                }
            }
            for (d, sum) in sums.into_iter().enumerate() {
                // SAFETY: as above; the sums are the caller's own.
                let y = unsafe { &mut *op.sums.add(r * padded_dim + panel * PANEL + d) };
                *y = (sum as f32).mul_add(op.scales[r], *y * op.rescales[r]);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    //! The kernels in AVX2 intrinsics, on signed bytes. The sign of one factor is moved to the
    //! other factor, and its magnitude becomes the unsigned operand of the product.

    // The loops index registers by number.
    #![allow(clippy::needless_range_loop)]

    use std::arch::x86_64::*;

    use super::{BLOCK_TOKENS, OFFSET, PANEL, QUAD, ROWS_MAX, SPAN_TOKENS, Scores, ValueProduct};
    use crate::device::cpu::gemm::int8::x86::add_quads;

    /// Maximum rows whose sums fit in registers.
    const ROWS: usize = 4;
    /// Bytes of a quad of 16 positions or dims.
    const STEP: usize = PANEL * QUAD;

    /// Scores of `COUNT` rows from `first` on with the keys of a block. The offset of the keys is
    /// removed first, so the sums start at zero instead of `starts`.
    #[target_feature(enable = "avx2")]
    unsafe fn score_of<const COUNT: usize>(
        op: &Scores,
        (block, first): (usize, usize),
        out: &mut [[i32; SPAN_TOKENS]; ROWS_MAX],
    ) {
        // SAFETY: indices stay within the bounds that `score` asks for.
        unsafe {
            let mut sums = [[_mm256_setzero_si256(); 2]; COUNT];
            let offset = _mm256_set1_epi8(OFFSET as u8 as i8);
            let stride = op.quads * QUAD;
            let (mut keys, mut queries) = (op.keys[block], op.queries.add(first * stride));
            for _ in 0..op.quads {
                let load = |at: usize| _mm256_xor_si256(_mm256_loadu_si256(keys.add(at).cast()), offset);
                let keys_here = [load(0), load(STEP / 2)];
                let sizes = keys_here.map(|keys| _mm256_abs_epi8(keys));
                for r in 0..COUNT {
                    let q = _mm256_set1_epi32(queries.add(r * stride).cast::<i32>().read_unaligned());
                    for half in 0..2 {
                        sums[r][half] = add_quads(sums[r][half], sizes[half], _mm256_sign_epi8(q, keys_here[half]));
                    }
                }
                keys = keys.add(STEP);
                queries = queries.add(QUAD);
            }
            for r in 0..COUNT {
                for half in 0..2 {
                    let at = &mut out[first + r][block * BLOCK_TOKENS + half * BLOCK_TOKENS / 2..];
                    _mm256_storeu_si256(at.as_mut_ptr().cast(), sums[r][half]);
                }
            }
        }
    }

    /// # Safety
    /// As [`super::score`], on a processor with AVX2.
    pub(crate) unsafe fn score(op: &Scores, out: &mut [[i32; SPAN_TOKENS]; ROWS_MAX]) {
        for block in 0..op.blocks {
            for first in (0..op.rows).step_by(ROWS) {
                // SAFETY: the caller upholds the same contract.
                unsafe {
                    match op.rows - first {
                        1 => score_of::<1>(op, (block, first), out),
                        2 => score_of::<2>(op, (block, first), out),
                        3 => score_of::<3>(op, (block, first), out),
                        _ => score_of::<ROWS>(op, (block, first), out),
                    }
                }
            }
        }
    }

    /// Adds a panel's values to the sums of `COUNT` rows from `first` on. A weight minus 128 is a
    /// signed byte. The subtracted part, 128 times the sum of the values, is the same for all rows
    /// and is added back at the end.
    #[target_feature(enable = "avx2,fma")]
    unsafe fn values_of<const COUNT: usize>(op: &ValueProduct, (panel, first): (usize, usize)) {
        // SAFETY: indices stay within the bounds that `add_values` asks for.
        unsafe {
            let padded_dim = op.panels * PANEL;
            let offset = _mm256_set1_epi8(OFFSET as u8 as i8);
            let mut sums = [[_mm256_setzero_si256(); 2]; COUNT];
            let mut of_values = [_mm256_setzero_si256(); 2];
            for b in 0..op.blocks {
                for quad in 0..BLOCK_TOKENS / QUAD {
                    let from = op.values[b].add((quad * padded_dim + panel * PANEL) * QUAD);
                    // A position that was never written may hold -128, whose sign `vpsignb` cannot
                    // flip.
                    let least = _mm256_set1_epi8(-127);
                    let load = |at: usize| _mm256_max_epi8(_mm256_loadu_si256(from.add(at).cast()), least);
                    let values = [load(0), load(STEP / 2)];
                    for half in 0..2 {
                        of_values[half] = add_quads(of_values[half], _mm256_set1_epi8(1), values[half]);
                    }
                    for r in 0..COUNT {
                        let at = op
                            .weights
                            .add(first + r)
                            .cast::<u8>()
                            .add(b * BLOCK_TOKENS + quad * QUAD);
                        let w = _mm256_xor_si256(_mm256_set1_epi32(at.cast::<i32>().read_unaligned()), offset);
                        let size = _mm256_abs_epi8(w);
                        for half in 0..2 {
                            sums[r][half] = add_quads(sums[r][half], size, _mm256_sign_epi8(values[half], w));
                        }
                    }
                }
            }
            let taken_off = of_values.map(|sum| _mm256_slli_epi32::<7>(sum));
            for r in 0..COUNT {
                let row = first + r;
                let (rescale, scale) = (_mm256_set1_ps(op.rescales[row]), _mm256_set1_ps(op.scales[row]));
                for half in 0..2 {
                    let sum = _mm256_cvtepi32_ps(_mm256_add_epi32(sums[r][half], taken_off[half]));
                    let at = op.sums.add(row * padded_dim + panel * PANEL + half * PANEL / 2);
                    let before = _mm256_mul_ps(_mm256_loadu_ps(at), rescale);
                    _mm256_storeu_ps(at, _mm256_fmadd_ps(sum, scale, before));
                }
            }
        }
    }

    /// # Safety
    /// As [`super::add_values`], on a processor with AVX2.
    pub(crate) unsafe fn add_values(op: &ValueProduct) {
        for panel in 0..op.panels {
            for first in (0..op.rows).step_by(ROWS) {
                // SAFETY: the caller upholds the same contract.
                unsafe {
                    match op.rows - first {
                        1 => values_of::<1>(op, (panel, first)),
                        2 => values_of::<2>(op, (panel, first)),
                        3 => values_of::<3>(op, (panel, first)),
                        _ => values_of::<ROWS>(op, (panel, first)),
                    }
                }
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    //! The kernels in intrinsics. Loops over `ROWS`, `BLOCKS` and `PANELS` are unrolled, so that all sums stay in registers.

    // The loops index registers by number.
    #![allow(clippy::needless_range_loop)]

    use std::arch::x86_64::*;

    use super::{BLOCK_TOKENS, PANEL, QUAD, ROWS_MAX, SPAN_TOKENS, Scores, ValueProduct};

    /// Bytes of a quad of 16 positions or dims.
    const STEP: usize = PANEL * QUAD;

    #[target_feature(enable = "avx512f,avx512vnni")]
    unsafe fn score_of<const ROWS: usize, const COUNT: usize>(op: &Scores, out: &mut [[i32; SPAN_TOKENS]; ROWS_MAX]) {
        // SAFETY: indices stay within the bounds that `score` asks for.
        unsafe {
            let mut sums = [[_mm512_setzero_si512(); COUNT]; ROWS];
            for (r, sums) in sums.iter_mut().enumerate() {
                *sums = [_mm512_set1_epi32(*op.starts.add(r)); COUNT];
            }
            let stride = op.quads * QUAD;
            for quad in 0..op.quads {
                let mut keys = [_mm512_setzero_si512(); COUNT];
                for b in 0..COUNT {
                    keys[b] = _mm512_loadu_si512(op.keys[b].add(quad * STEP).cast());
                }
                for r in 0..ROWS {
                    let q = op.queries.add(r * stride + quad * QUAD).cast::<i32>().read_unaligned();
                    for b in 0..COUNT {
                        sums[r][b] = _mm512_dpbusd_epi32(sums[r][b], keys[b], _mm512_set1_epi32(q));
                    }
                }
            }
            for r in 0..ROWS {
                for b in 0..COUNT {
                    _mm512_storeu_si512(out[r][b * BLOCK_TOKENS..].as_mut_ptr().cast(), sums[r][b]);
                }
            }
        }
    }

    /// Calls `$pick` with the number of rows, 1 to [`ROWS_MAX`], as a literal.
    macro_rules! by_rows {
        ($rows:expr, $pick:ident) => {
            match $rows {
                1 => $pick!(1),
                2 => $pick!(2),
                3 => $pick!(3),
                4 => $pick!(4),
                5 => $pick!(5),
                _ => $pick!(6),
            }
        };
    }

    /// # Safety
    /// As [`super::score`], on a processor with AVX-512 VNNI.
    pub(crate) unsafe fn score(op: &Scores, out: &mut [[i32; SPAN_TOKENS]; ROWS_MAX]) {
        macro_rules! pick {
            ($rows:literal) => {
                match op.blocks {
                    1 => score_of::<$rows, 1>(op, out),
                    2 => score_of::<$rows, 2>(op, out),
                    3 => score_of::<$rows, 3>(op, out),
                    _ => score_of::<$rows, 4>(op, out),
                }
            };
        }
        // SAFETY: the caller upholds the same contract.
        unsafe { by_rows!(op.rows, pick) }
    }

    #[target_feature(enable = "avx512f,avx512vnni")]
    unsafe fn values_of<const ROWS: usize, const PANELS: usize>(op: &ValueProduct, first: usize) {
        // SAFETY: indices stay within the bounds that `add_values` asks for.
        unsafe {
            let padded_dim = op.panels * PANEL;
            let mut sums = [[_mm512_setzero_si512(); PANELS]; ROWS];
            for b in 0..op.blocks {
                let block = op.values[b].add(first * STEP);
                for quad in 0..BLOCK_TOKENS / QUAD {
                    let mut values = [_mm512_setzero_si512(); PANELS];
                    for n in 0..PANELS {
                        values[n] = _mm512_loadu_si512(block.add(quad * padded_dim * QUAD + n * STEP).cast());
                    }
                    for r in 0..ROWS {
                        let at = op.weights.add(r).cast::<u8>().add(b * BLOCK_TOKENS + quad * QUAD);
                        let w = _mm512_set1_epi32(at.cast::<i32>().read_unaligned());
                        for n in 0..PANELS {
                            sums[r][n] = _mm512_dpbusd_epi32(sums[r][n], w, values[n]);
                        }
                    }
                }
            }
            for r in 0..ROWS {
                let (rescale, scale) = (_mm512_set1_ps(op.rescales[r]), _mm512_set1_ps(op.scales[r]));
                for n in 0..PANELS {
                    let at = op.sums.add(r * padded_dim + (first + n) * PANEL);
                    let before = _mm512_mul_ps(_mm512_loadu_ps(at), rescale);
                    _mm512_storeu_ps(at, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[r][n]), scale, before));
                }
            }
        }
    }

    /// # Safety
    /// As [`super::add_values`], on a processor with AVX-512 VNNI.
    pub(crate) unsafe fn add_values(op: &ValueProduct) {
        let mut first = 0;
        while first < op.panels {
            let four = op.panels - first >= 4;
            macro_rules! pick {
                ($rows:literal) => {
                    if four {
                        values_of::<$rows, 4>(op, first)
                    } else {
                        values_of::<$rows, 1>(op, first)
                    }
                };
            }
            // SAFETY: the caller upholds the same contract.
            unsafe { by_rows!(op.rows, pick) }
            first += if four { 4 } else { 1 };
        }
    }
}
