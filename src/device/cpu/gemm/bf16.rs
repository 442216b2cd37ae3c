//! The BF16 matrix kernel: multiplies a few rows by panels of 16 columns with dot products of BF16
//! pairs. Bias and rounding are fused.
//!
//! `c[r][n] = sum over k of a[r][k] * b[n][k] + bias[n]`, rounded to BF16 if
//! [`Bf16Gemm::round_to_bf16`] is set. A 32-bit lane holds two values of k, with the even index in
//! the low half. `vdpbf16ps` adds the product of odd index to the lane's sum, then the product of
//! even index. Each addition rounds once, to the nearest F32. Subnormal inputs and sums are flushed
//! to zero. Pairs are added in the order of k, so the sum of a row is independent of the other rows
//! and of the threads.
//!
//! AMX (`tdpbf16ps`) sums values of even and of odd index separately within 32 values of k. With
//! AMX, even a single row is therefore multiplied in tiles, so that its sum stays independent of
//! the batch. BF16 results are bit-identical on one machine but may differ between machines.
//!
//! See docs/decisions/062-bf16-depends-on-the-processor.md.

#![expect(unsafe_code, reason = "kernels take addresses and need instructions")]

use super::int8::RowTile;
use super::tile::PANEL;
use crate::device::cpu::isa::{Isa, multiversion};
use crate::device::cpu::math::bf16_bits;

/// Adjacent values of k in a 32-bit lane.
pub(crate) const PAIR: usize = 2;
/// Rows are padded to a multiple of this many values of k: the depth of an AMX tile.
pub(crate) const K_STEP: usize = 32;
/// Maximum rows of a matmul that is limited by memory bandwidth rather than by multiplications.
#[cfg(target_arch = "x86_64")]
const MEMORY_BOUND_ROWS_MAX: usize = 4;

/// Parameters of [`matmul`]: rows, in tiles, times a group of panels.
#[derive(Clone, Copy)]
pub(crate) struct Bf16Gemm {
    /// Number of pairs of values of k to sum over.
    pub pairs: usize,
    /// BF16 bits of the rows, tile by tile, in the layout that [`interleaves_rows`] describes.
    pub a: *const u16,
    /// BF16 bits of the first panel, `[pairs][16][2]`.
    pub b: *const u16,
    /// Distance between the starts of two panels, in numbers.
    pub panel_stride: usize,
    /// Number of panels, at most [`panels_at_once`].
    pub panels: usize,
    /// `[panels * 16]`.
    pub bias: *const f32,
    /// Round results to BF16 values.
    pub round_to_bf16: bool,
    /// Output, `[rows][c_stride]`. 16 columns per panel are written. Only the rows of the tile need
    /// valid memory.
    pub c: *mut f32,
    pub c_stride: usize,
}

/// Whether `isa` has dot products of BF16 pairs. Without them, BF16 is multiplied in F32.
pub(crate) fn is_available(isa: Isa) -> bool {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Bf16 | Isa::Amx => true,
        _ => false,
    }
}

/// Maximum rows of a tile.
pub(crate) fn max_rows(isa: Isa) -> usize {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Amx => 32,
        _ => 12,
    }
}

/// Maximum panels per call for tiles of `rows` rows.
pub(crate) fn panels_at_once(isa: Isa, rows: usize) -> usize {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Bf16 => match rows {
            ..=MEMORY_BOUND_ROWS_MAX => 1,
            5..=6 => 4,
            _ => 2,
        },
        _ => 2,
    }
}

/// Whether a tile is laid out as `[pairs][rows][2]`. Otherwise it is `[rows][pairs][2]`.
pub(crate) fn interleaves_rows(isa: Isa) -> bool {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Amx => false,
        _ => true,
    }
}

/// Multiplies the rows of one tile.
///
/// # Safety
/// [`is_available`] is true for `isa`. All pointers of [`Bf16Gemm`] are valid for the rows of the
/// tile. No other code reads or writes these rows of `c` during the call.
pub(crate) unsafe fn matmul(isa: Isa, p: &Bf16Gemm, tile: RowTile) {
    debug_assert!(tile.rows >= 1 && tile.rows <= max_rows(isa) && is_available(isa));
    // SAFETY: the caller upholds the same contract, and `isa` guarantees the instructions.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => super::amx::bf16_matmul(p, tile),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => {
                if p.panels == panels_at_once(isa, tile.rows) {
                    x86::avx512_bf16(p, tile);
                } else {
                    for panel in 0..p.panels {
                        x86::avx512_bf16(&p.single_panel(panel), tile);
                    }
                }
            }
            _ => unreachable!("{isa} has no dot products of pairs"),
        }
    }
}

impl Bf16Gemm {
    /// The same matmul with only one of its panels.
    ///
    /// # Safety
    /// `panel` is below `self.panels`.
    #[cfg(target_arch = "x86_64")]
    unsafe fn single_panel(&self, panel: usize) -> Bf16Gemm {
        // SAFETY: as the caller guarantees.
        unsafe {
            Bf16Gemm {
                b: self.b.add(panel * self.panel_stride),
                bias: self.bias.add(panel * PANEL),
                c: self.c.add(panel * PANEL),
                panels: 1,
                ..*self
            }
        }
    }
}

#[inline(always)]
fn round_row(x: &[f32], out: &mut [u16]) {
    let (out, padding) = out.split_at_mut(x.len());
    for (bits, x) in out.iter_mut().zip(x) {
        *bits = bf16_bits(*x);
    }
    padding.fill(0);
}

multiversion! {
    /// Rounds a row to BF16 and writes its bits to `out`, which is at least as long as `x`. The
    /// rest of `out` is filled with zeros.
    pub(crate) fn round_row_on(x: &[f32], out: &mut [u16]) = round_row;
}

#[cfg(target_arch = "x86_64")]
pub(crate) mod x86 {
    //! The kernel in intrinsics. Loops over `ROWS` and `PANELS` are unrolled, so that all sums stay
    //! in registers.

    // Loops index arrays of registers.
    #![allow(clippy::needless_range_loop)]

    use std::arch::x86_64::*;

    use super::{Bf16Gemm, PAIR, PANEL, RowTile};

    /// Numbers of one pair of k in all 16 columns of a panel.
    const PAIR_NUMBERS: usize = PANEL * PAIR;

    #[target_feature(enable = "avx512f,avx512bf16")]
    unsafe fn pairs_512<const ROWS: usize, const PANELS: usize>(p: &Bf16Gemm, tile: RowTile) {
        // SAFETY: indices stay within the bounds that `matmul` requires. Both register types have
        // 512 bits.
        unsafe {
            let pairs = |bits: __m512i| -> __m512bh { std::mem::transmute(bits) };
            let mut sums = [[_mm512_setzero_ps(); PANELS]; ROWS];
            let (mut a, mut b) = (p.a.add(tile.first_row * p.pairs * PAIR), p.b);
            let mut prefetch = tile.prefetch;
            for pair in 0..p.pairs {
                if pair < ROWS {
                    tile.output.prefetch(pair);
                }
                // A single panel is read sequentially, which the hardware prefetches better.
                if PANELS > 1 {
                    for n in 0..PANELS {
                        _mm_prefetch::<_MM_HINT_T1>(prefetch.wrapping_add(n * PAIR_NUMBERS * size_of::<u16>()));
                    }
                    prefetch = prefetch.wrapping_add(tile.prefetch_step);
                }
                let mut w = [pairs(_mm512_setzero_si512()); PANELS];
                for n in 0..PANELS {
                    w[n] = pairs(_mm512_loadu_si512(b.add(n * p.panel_stride).cast()));
                }
                for r in 0..ROWS {
                    let x = _mm512_set1_epi32(a.add(r * PAIR).cast::<i32>().read_unaligned());
                    for n in 0..PANELS {
                        sums[r][n] = _mm512_dpbf16_ps(sums[r][n], pairs(x), w[n]);
                    }
                }
                a = a.add(ROWS * PAIR);
                b = b.add(PAIR_NUMBERS);
            }
            for n in 0..PANELS {
                let bias = _mm512_loadu_ps(p.bias.add(n * PANEL));
                for r in 0..ROWS {
                    let c = p.c.wrapping_add((tile.first_row + r) * p.c_stride + n * PANEL);
                    _mm512_storeu_ps(c, _mm512_add_ps(sums[r][n], bias));
                }
            }
            // Rounding is a separate pass: otherwise the compiler would spill the sums to memory.
            round_tile(p, tile);
        }
    }

    /// Rounds the results of the tile in place if `p.round_to_bf16` is set.
    ///
    /// # Safety
    /// As [`super::matmul`], on a processor with AVX-512.
    #[target_feature(enable = "avx512f")]
    pub(crate) unsafe fn round_tile(p: &Bf16Gemm, tile: RowTile) {
        if !p.round_to_bf16 {
            return;
        }
        for r in 0..tile.rows {
            for n in 0..p.panels {
                // SAFETY: indices stay within the bounds that `matmul` requires.
                unsafe {
                    let c = p.c.wrapping_add((tile.first_row + r) * p.c_stride + n * PANEL);
                    _mm512_storeu_ps(c, round_512(_mm512_loadu_ps(c)));
                }
            }
        }
    }

    /// As [`round_bf16`](crate::device::cpu::math::round_bf16). The processor's own conversion
    /// would flush subnormal numbers to zero.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn round_512(x: __m512) -> __m512 {
        let bits = _mm512_castps_si512(x);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040_0000));
        let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
        let rounded = _mm512_mask_mov_epi32(rounded, is_nan, quiet);
        _mm512_castsi512_ps(_mm512_and_si512(rounded, _mm512_set1_epi32(!0xffff)))
    }

    /// # Safety
    /// As [`super::matmul`], with one panel or [`super::panels_at_once`], on a processor with
    /// AVX-512 BF16.
    pub(crate) unsafe fn avx512_bf16(p: &Bf16Gemm, tile: RowTile) {
        // SAFETY: the caller upholds the same contract.
        unsafe {
            match (tile.rows, p.panels) {
                (1, _) => pairs_512::<1, 1>(p, tile),
                (2, _) => pairs_512::<2, 1>(p, tile),
                (3, _) => pairs_512::<3, 1>(p, tile),
                (4, _) => pairs_512::<4, 1>(p, tile),
                (5, 1) => pairs_512::<5, 1>(p, tile),
                (6, 1) => pairs_512::<6, 1>(p, tile),
                (7, 1) => pairs_512::<7, 1>(p, tile),
                (8, 1) => pairs_512::<8, 1>(p, tile),
                (9, 1) => pairs_512::<9, 1>(p, tile),
                (10, 1) => pairs_512::<10, 1>(p, tile),
                (11, 1) => pairs_512::<11, 1>(p, tile),
                (12, 1) => pairs_512::<12, 1>(p, tile),
                (5, _) => pairs_512::<5, 4>(p, tile),
                (6, _) => pairs_512::<6, 4>(p, tile),
                (7, _) => pairs_512::<7, 2>(p, tile),
                (8, _) => pairs_512::<8, 2>(p, tile),
                (9, _) => pairs_512::<9, 2>(p, tile),
                (10, _) => pairs_512::<10, 2>(p, tile),
                (11, _) => pairs_512::<11, 2>(p, tile),
                _ => pairs_512::<12, 2>(p, tile),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::gemm::int8::OutputLines;
    use crate::device::cpu::math::round_bf16;
    use crate::device::cpu::testing::numbers;

    fn bits(seed: u64, n: usize) -> Vec<u16> {
        numbers(seed, n).into_iter().map(bf16_bits).collect()
    }

    fn check(isa: Isa, rows: usize, panels: usize, pairs: usize, round_to_bf16: bool) {
        let k = pairs * PAIR;
        // Another tile, of 2 rows, precedes this tile.
        let first_row = 2;
        let all = first_row + rows;
        let columns = panels * PANEL;
        let (a, b, bias) = (bits(1, all * k), bits(2, columns * k), numbers(5, columns));
        let mut c = vec![0.0f32; all * (columns + 3)];
        let gemm = Bf16Gemm {
            pairs,
            a: a.as_ptr(),
            b: b.as_ptr(),
            panel_stride: PANEL * k,
            panels,
            bias: bias.as_ptr(),
            round_to_bf16,
            c: c.as_mut_ptr(),
            c_stride: columns + 3,
        };
        let tile = RowTile {
            first_row,
            rows,
            prefetch: b.as_ptr().cast(),
            prefetch_step: 3,
            output: OutputLines::NONE,
        };
        // SAFETY: the vectors have the sizes that `gemm` states.
        unsafe { matmul(isa, &gemm, tile) };
        assert!(c[..first_row * (columns + 3)].iter().all(|x| *x == 0.0));
        let widen = |bits: u16| f32::from_bits(u32::from(bits) << 16);
        for r in 0..rows {
            for n in 0..columns {
                let value = |i: usize| {
                    if interleaves_rows(isa) {
                        a[first_row * k + (i / PAIR * rows + r) * PAIR + i % PAIR]
                    } else {
                        a[(first_row + r) * k + i]
                    }
                };
                let weight =
                    |i: usize| b[n / PANEL * PANEL * k + i / PAIR * PANEL * PAIR + n % PANEL * PAIR + i % PAIR];
                let product = |i: usize, sum: f32| widen(value(i)).mul_add(widen(weight(i)), sum);
                let sum = (0..pairs).fold(0.0, |sum, pair| product(pair * PAIR, product(pair * PAIR + 1, sum)));
                let want = sum + bias[n];
                let want = if round_to_bf16 { round_bf16(want) } else { want };
                let got = c[(first_row + r) * (columns + 3) + n];
                // AMX tiles sum in another order, so their results are only close.
                let is_right = if interleaves_rows(isa) {
                    got.to_bits() == want.to_bits()
                } else {
                    (got - want).abs() <= 1e-2 * want.abs().max(1.0)
                };
                assert!(
                    is_right,
                    "{isa:?} rows {rows} panels {panels} pairs {pairs} at ({r}, {n}): {got} not {want}"
                );
            }
        }
    }

    #[test]
    fn sums_have_the_documented_order() {
        let sets: Vec<Isa> = Isa::available().into_iter().filter(|isa| is_available(*isa)).collect();
        if sets.is_empty() {
            println!("skipped: this processor has no dot products of BF16");
        }
        for isa in sets {
            for rows in 1..=max_rows(isa) {
                for panels in 1..=panels_at_once(isa, rows) {
                    for pairs in [0, 16, 32, 80] {
                        check(isa, rows, panels, pairs, false);
                        check(isa, rows, panels, pairs, true);
                    }
                }
            }
        }
    }

    #[test]
    fn nan_inputs_give_nan_results() {
        for isa in Isa::available().into_iter().filter(|isa| is_available(*isa)) {
            let mut a = [0u16; K_STEP];
            a[3] = bf16_bits(f32::NAN);
            let (b, bias) = ([bf16_bits(1.0); PANEL * K_STEP], [0.0; PANEL]);
            let mut c = [0.0; PANEL];
            let gemm = Bf16Gemm {
                pairs: K_STEP / PAIR,
                a: a.as_ptr(),
                b: b.as_ptr(),
                panel_stride: 0,
                panels: 1,
                bias: bias.as_ptr(),
                round_to_bf16: true,
                c: c.as_mut_ptr(),
                c_stride: PANEL,
            };
            let tile = RowTile {
                first_row: 0,
                rows: 1,
                prefetch: b.as_ptr().cast(),
                prefetch_step: 0,
                output: OutputLines::NONE,
            };
            // SAFETY: the arrays have the sizes that `gemm` states.
            unsafe { matmul(isa, &gemm, tile) };
            assert!(c.iter().all(|x| x.is_nan()), "{isa:?}: {c:?}");
        }
    }
}
