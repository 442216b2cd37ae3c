//! The products of INT8 attention: of queries with keys, and of weights with values, for each instruction set.

#![expect(unsafe_code, reason = "kernels take addresses and need instructions")]

use crate::device::cpu::gemm::int8::{OFFSET, QUAD};
use crate::device::cpu::gemm::tile::PANEL;
use crate::device::cpu::isa::Isa;
use crate::device::cpu::{BLOCK_TOKENS, SPAN_TOKENS};

/// Blocks of a span.
pub(crate) const SPAN_BLOCKS: usize = SPAN_TOKENS / BLOCK_TOKENS;
/// Maximum rows per kernel call.
pub(crate) const ROWS_MAX: usize = 6;

/// Scores of `rows` queries with the keys of `blocks` blocks:
/// `out[r][j] = initial_scores[r] + sum over d of queries[r][d] * keys[j / 16][d][j % 16]`.
pub(super) struct Scores {
    pub rows: usize,
    pub blocks: usize,
    /// Quads of head_dim.
    pub quads: usize,
    /// `[rows][4 * quads]`.
    pub queries: *const i8,
    pub initial_scores: *const i32,
    /// One pointer per block, to `[quads][16][4]`.
    pub keys: [*const u8; SPAN_BLOCKS],
}

/// Adds weighted values to the accumulators `acc` of `rows` rows:
/// `acc[r][d] = acc[r][d] * rescales[r] + scales[r] * (sum over j of weights[r][j] * values[j / 16][j % 16][d])`.
pub(super) struct ValueProduct {
    pub rows: usize,
    pub blocks: usize,
    pub panels: usize,
    pub weights: *const [u8; SPAN_TOKENS],
    /// One pointer per block, to `[quads of positions][16 * panels][4]`.
    pub values: [*const i8; SPAN_BLOCKS],
    pub rescales: [f32; ROWS_MAX],
    pub scales: [f32; ROWS_MAX],
    /// `[rows][16 * panels]`.
    pub accumulators: *mut f32,
}

/// # Safety
/// All pointers of [`Scores`] are valid.
pub(super) unsafe fn score(isa: Isa, op: &Scores, out: &mut [[i32; SPAN_TOKENS]; ROWS_MAX]) {
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
/// All pointers of [`ValueProduct`] are valid, and no other code reads or writes the accumulators.
pub(super) unsafe fn add_values(isa: Isa, op: &ValueProduct) {
    // SAFETY: as above.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni | Isa::Avx512Bf16 | Isa::Amx => x86::add_values(op),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 | Isa::AvxVnni | Isa::Avx512 => avx2::add_values(op),
            Isa::Portable => portable_add_values(op),
        }
    }
}

#[inline(always)]
fn portable_score(op: &Scores, out: &mut [[i32; SPAN_TOKENS]; ROWS_MAX]) {
    for (r, out) in out.iter_mut().enumerate().take(op.rows) {
        let (out, _) = out.as_chunks_mut::<BLOCK_TOKENS>();
        for (b, out) in out.iter_mut().enumerate().take(op.blocks) {
            // SAFETY: the caller of `score` guarantees rows, blocks and quads.
            let mut sums = [unsafe { *op.initial_scores.add(r) }; BLOCK_TOKENS];
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
fn portable_add_values(op: &ValueProduct) {
    let padded_dim = op.panels * PANEL;
    for r in 0..op.rows {
        for panel in 0..op.panels {
            let mut sums = [0i32; PANEL];
            for j in 0..op.blocks * BLOCK_TOKENS {
                // SAFETY: the caller of `add_values` guarantees rows and blocks.
                let weight = i32::from(unsafe { (&*op.weights.add(r))[j] });
                let (block, slot) = (op.values[j / BLOCK_TOKENS], j % BLOCK_TOKENS);
                let at = (slot / QUAD * padded_dim + panel * PANEL) * QUAD + slot % QUAD;
                for (d, sum) in sums.iter_mut().enumerate() {
                    // SAFETY: as above.
                    *sum += weight * i32::from(unsafe { *block.add(at + d * QUAD) });
                }
            }
            for (d, sum) in sums.into_iter().enumerate() {
                // SAFETY: as above; only this call uses the accumulators.
                let y = unsafe { &mut *op.accumulators.add(r * padded_dim + panel * PANEL + d) };
                *y = (sum as f32).mul_add(op.scales[r], *y * op.rescales[r]);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    //! The kernels in AVX2 intrinsics, on signed bytes. The sign of one factor is moved to the
    //! other factor, so that its magnitude is the unsigned operand of the multiplication.

    // Loops index arrays of registers.
    #![allow(clippy::needless_range_loop)]

    use std::arch::x86_64::*;

    use super::{BLOCK_TOKENS, OFFSET, PANEL, QUAD, ROWS_MAX, SPAN_TOKENS, Scores, ValueProduct};
    use crate::device::cpu::gemm::int8::x86::{add_quads, magnitudes};

    /// Maximum rows whose sums fit in the registers.
    const REGISTER_ROWS_MAX: usize = 4;
    /// Bytes of a quad of 16 positions or dims.
    const QUAD_BYTES: usize = PANEL * QUAD;

    /// Scores of `ROWS` rows, from row `first_row` on, with the keys of a block. The keys' offset
    /// is removed before the multiplication, so the sums start at zero instead of `initial_scores`.
    #[target_feature(enable = "avx2")]
    unsafe fn score_rows<const ROWS: usize>(
        op: &Scores,
        (block, first_row): (usize, usize),
        out: &mut [[i32; SPAN_TOKENS]; ROWS_MAX],
    ) {
        // SAFETY: indices stay within the bounds that `score` requires.
        unsafe {
            let mut sums = [[_mm256_setzero_si256(); 2]; ROWS];
            let offset = _mm256_set1_epi8(OFFSET as u8 as i8);
            let stride = op.quads * QUAD;
            let (mut keys, mut queries) = (op.keys[block], op.queries.add(first_row * stride));
            for _ in 0..op.quads {
                let load = |at: usize| _mm256_xor_si256(_mm256_loadu_si256(keys.add(at).cast()), offset);
                let quad_keys = [load(0), load(QUAD_BYTES / 2)];
                let magnitudes = magnitudes(quad_keys);
                for r in 0..ROWS {
                    let q = _mm256_set1_epi32(queries.add(r * stride).cast::<i32>().read_unaligned());
                    for half in 0..2 {
                        sums[r][half] =
                            add_quads(sums[r][half], magnitudes[half], _mm256_sign_epi8(q, quad_keys[half]));
                    }
                }
                keys = keys.add(QUAD_BYTES);
                queries = queries.add(QUAD);
            }
            for r in 0..ROWS {
                for half in 0..2 {
                    let at = &mut out[first_row + r][block * BLOCK_TOKENS + half * BLOCK_TOKENS / 2..];
                    _mm256_storeu_si256(at.as_mut_ptr().cast(), sums[r][half]);
                }
            }
        }
    }

    /// # Safety
    /// As [`super::score`], on a processor with AVX2.
    pub(crate) unsafe fn score(op: &Scores, out: &mut [[i32; SPAN_TOKENS]; ROWS_MAX]) {
        for block in 0..op.blocks {
            for first_row in (0..op.rows).step_by(REGISTER_ROWS_MAX) {
                // SAFETY: the caller upholds the same contract.
                unsafe {
                    match op.rows - first_row {
                        1 => score_rows::<1>(op, (block, first_row), out),
                        2 => score_rows::<2>(op, (block, first_row), out),
                        3 => score_rows::<3>(op, (block, first_row), out),
                        _ => score_rows::<REGISTER_ROWS_MAX>(op, (block, first_row), out),
                    }
                }
            }
        }
    }

    /// Adds a panel's weighted values to the accumulators of `ROWS` rows, from row `first_row` on.
    /// 128 is subtracted from each weight, which makes it a signed byte. The missing part, 128
    /// times the sum of the values, is the same for all rows and is added at the end.
    #[target_feature(enable = "avx2,fma")]
    unsafe fn add_panel_values<const ROWS: usize>(op: &ValueProduct, (panel, first_row): (usize, usize)) {
        // SAFETY: indices stay within the bounds that `add_values` requires.
        unsafe {
            let padded_dim = op.panels * PANEL;
            let offset = _mm256_set1_epi8(OFFSET as u8 as i8);
            let mut sums = [[_mm256_setzero_si256(); 2]; ROWS];
            let mut value_sums = [_mm256_setzero_si256(); 2];
            for b in 0..op.blocks {
                for quad in 0..BLOCK_TOKENS / QUAD {
                    let from = op.values[b].add((quad * padded_dim + panel * PANEL) * QUAD);
                    // A position that was never written may hold -128, whose sign `vpsignb` cannot
                    // flip.
                    let byte_min = _mm256_set1_epi8(-127);
                    let load = |at: usize| _mm256_max_epi8(_mm256_loadu_si256(from.add(at).cast()), byte_min);
                    let values = [load(0), load(QUAD_BYTES / 2)];
                    for half in 0..2 {
                        value_sums[half] = add_quads(value_sums[half], _mm256_set1_epi8(1), values[half]);
                    }
                    for r in 0..ROWS {
                        let at = op
                            .weights
                            .add(first_row + r)
                            .cast::<u8>()
                            .add(b * BLOCK_TOKENS + quad * QUAD);
                        let w = _mm256_xor_si256(_mm256_set1_epi32(at.cast::<i32>().read_unaligned()), offset);
                        let magnitude = _mm256_abs_epi8(w);
                        for half in 0..2 {
                            sums[r][half] = add_quads(sums[r][half], magnitude, _mm256_sign_epi8(values[half], w));
                        }
                    }
                }
            }
            let correction = [
                _mm256_slli_epi32::<7>(value_sums[0]),
                _mm256_slli_epi32::<7>(value_sums[1]),
            ];
            for r in 0..ROWS {
                let row = first_row + r;
                let (rescale, scale) = (_mm256_set1_ps(op.rescales[row]), _mm256_set1_ps(op.scales[row]));
                for half in 0..2 {
                    let sum = _mm256_cvtepi32_ps(_mm256_add_epi32(sums[r][half], correction[half]));
                    let at = op.accumulators.add(row * padded_dim + panel * PANEL + half * PANEL / 2);
                    let rescaled = _mm256_mul_ps(_mm256_loadu_ps(at), rescale);
                    _mm256_storeu_ps(at, _mm256_fmadd_ps(sum, scale, rescaled));
                }
            }
        }
    }

    /// # Safety
    /// As [`super::add_values`], on a processor with AVX2.
    pub(crate) unsafe fn add_values(op: &ValueProduct) {
        for panel in 0..op.panels {
            for first_row in (0..op.rows).step_by(REGISTER_ROWS_MAX) {
                // SAFETY: the caller upholds the same contract.
                unsafe {
                    match op.rows - first_row {
                        1 => add_panel_values::<1>(op, (panel, first_row)),
                        2 => add_panel_values::<2>(op, (panel, first_row)),
                        3 => add_panel_values::<3>(op, (panel, first_row)),
                        _ => add_panel_values::<REGISTER_ROWS_MAX>(op, (panel, first_row)),
                    }
                }
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    //! The kernels in AVX-512 intrinsics. Loops over `ROWS`, `BLOCKS` and `PANELS` are unrolled, so
    //! that all sums stay in registers.

    // Loops index arrays of registers.
    #![allow(clippy::needless_range_loop)]

    use std::arch::x86_64::*;

    use super::{BLOCK_TOKENS, PANEL, QUAD, ROWS_MAX, SPAN_TOKENS, Scores, ValueProduct};

    /// Bytes of a quad of 16 positions or dims.
    const QUAD_BYTES: usize = PANEL * QUAD;

    #[target_feature(enable = "avx512f,avx512vnni")]
    unsafe fn score_rows<const ROWS: usize, const BLOCKS: usize>(
        op: &Scores,
        out: &mut [[i32; SPAN_TOKENS]; ROWS_MAX],
    ) {
        // SAFETY: indices stay within the bounds that `score` requires.
        unsafe {
            let mut sums = [[_mm512_setzero_si512(); BLOCKS]; ROWS];
            for (r, sums) in sums.iter_mut().enumerate() {
                *sums = [_mm512_set1_epi32(*op.initial_scores.add(r)); BLOCKS];
            }
            let stride = op.quads * QUAD;
            for quad in 0..op.quads {
                let mut keys = [_mm512_setzero_si512(); BLOCKS];
                for b in 0..BLOCKS {
                    keys[b] = _mm512_loadu_si512(op.keys[b].add(quad * QUAD_BYTES).cast());
                }
                for r in 0..ROWS {
                    let q = op.queries.add(r * stride + quad * QUAD).cast::<i32>().read_unaligned();
                    for b in 0..BLOCKS {
                        sums[r][b] = _mm512_dpbusd_epi32(sums[r][b], keys[b], _mm512_set1_epi32(q));
                    }
                }
            }
            for r in 0..ROWS {
                for b in 0..BLOCKS {
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
                    1 => score_rows::<$rows, 1>(op, out),
                    2 => score_rows::<$rows, 2>(op, out),
                    3 => score_rows::<$rows, 3>(op, out),
                    _ => score_rows::<$rows, 4>(op, out),
                }
            };
        }
        // SAFETY: the caller upholds the same contract.
        unsafe { by_rows!(op.rows, pick) }
    }

    #[target_feature(enable = "avx512f,avx512vnni")]
    unsafe fn add_panel_values<const ROWS: usize, const PANELS: usize>(op: &ValueProduct, first_panel: usize) {
        // SAFETY: indices stay within the bounds that `add_values` requires.
        unsafe {
            let padded_dim = op.panels * PANEL;
            let mut sums = [[_mm512_setzero_si512(); PANELS]; ROWS];
            for b in 0..op.blocks {
                let block = op.values[b].add(first_panel * QUAD_BYTES);
                for quad in 0..BLOCK_TOKENS / QUAD {
                    let mut values = [_mm512_setzero_si512(); PANELS];
                    for n in 0..PANELS {
                        values[n] = _mm512_loadu_si512(block.add(quad * padded_dim * QUAD + n * QUAD_BYTES).cast());
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
                    let at = op.accumulators.add(r * padded_dim + (first_panel + n) * PANEL);
                    let rescaled = _mm512_mul_ps(_mm512_loadu_ps(at), rescale);
                    _mm512_storeu_ps(at, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[r][n]), scale, rescaled));
                }
            }
        }
    }

    /// # Safety
    /// As [`super::add_values`], on a processor with AVX-512 VNNI.
    pub(crate) unsafe fn add_values(op: &ValueProduct) {
        let mut first_panel = 0;
        while first_panel < op.panels {
            let has_four = op.panels - first_panel >= 4;
            macro_rules! pick {
                ($rows:literal) => {
                    if has_four {
                        add_panel_values::<$rows, 4>(op, first_panel)
                    } else {
                        add_panel_values::<$rows, 1>(op, first_panel)
                    }
                };
            }
            // SAFETY: the caller upholds the same contract.
            unsafe { by_rows!(op.rows, pick) }
            first_panel += if has_four { 4 } else { 1 };
        }
    }
}
