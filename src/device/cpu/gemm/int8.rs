//! The INT8 matrix kernel: a few quantized rows times panels of 16 columns. Scales and bias are
//! fused.
//!
//! `c[r][n] = (sum over k of a[r][k] * b[n][k] - offset[n]) * column_scale[n] * row_scale[r] + bias[n]`.
//! `a` is unsigned, as `vpdpbusd` requires of its left operand: a signed 8-bit activation + 128.
//! `offset[n]` is 128 times the sum of `b[n]`. Kernels that multiply signed activations do not need
//! the offset. Activations and weights range from -127 to 127.
//!
//! Sums are exact in 32 bits, so all instruction sets give the same integers, in any order of
//! additions. Scaling rounds in the same order everywhere.
//!
//! See docs/decisions/061-int8-does-not-depend-on-the-batch.md.

#![expect(unsafe_code, reason = "kernels take addresses and need instructions")]

use super::tile::PANEL;
use crate::device::cpu::isa::Isa;

/// Adjacent values of k in a 32-bit lane.
pub(crate) const QUAD: usize = 4;
/// Added to an activation to make it unsigned.
pub(crate) const OFFSET: i32 = 128;
/// Rows are padded to a multiple of this many values of k: the depth of an AMX tile.
pub(crate) const K_STEP: usize = 64;
/// Maximum rows of a matmul that is limited by memory bandwidth rather than by multiplications.
#[cfg(target_arch = "x86_64")]
const MEMORY_BOUND_ROWS_MAX: usize = 4;
/// Tiles with more rows than this use AMX. Fewer rows would leave most of an AMX tile empty.
#[cfg(target_arch = "x86_64")]
const AMX_ROWS_ABOVE: usize = 12;
/// Maximum k whose sums fit in 32 bits: `255 * 127 * k < 2^31`.
pub(crate) const K_MAX: usize = 1 << 16;

/// Parameters of [`matmul`]: rows, in tiles, times a group of panels.
#[derive(Clone, Copy)]
pub(crate) struct Int8Gemm {
    /// Number of quads of values of k to sum over.
    pub quads: usize,
    /// The rows, tile by tile, in the layout that [`interleaves_rows`] describes.
    pub a: *const u8,
    /// First panel, `[quads][16][4]`.
    pub b: *const i8,
    /// Distance between the starts of two panels, in bytes.
    pub panel_stride: usize,
    /// Number of panels, at most [`panels_at_once`].
    pub panels: usize,
    /// `[rows]`.
    pub row_scales: *const f32,
    /// `[panels * 16]`.
    pub column_scales: *const f32,
    /// `[panels * 16]`.
    pub offsets: *const i32,
    /// `[panels * 16]`.
    pub bias: *const f32,
    /// Output, `[rows][c_stride]`. 16 columns per panel are written. Only the rows of the tile need
    /// valid memory.
    pub c: *mut f32,
    pub c_stride: usize,
}

/// A range of a matmul's rows.
#[derive(Clone, Copy)]
pub(crate) struct RowTile {
    pub first_row: usize,
    /// Number of rows, 1 to [`max_rows`].
    pub rows: usize,
    /// First address to prefetch during the matmul, which may be invalid. The address advances by
    /// `prefetch_step` bytes per 32-bit lane of k.
    pub prefetch: *const i8,
    pub prefetch_step: usize,
    pub output: OutputLines,
}

/// Cache lines that are written after a tile's matmul. Kernels with many rows prefetch them: else each store would wait for its line.
#[derive(Clone, Copy)]
pub(crate) struct OutputLines {
    /// The first line of the tile's first row, which may be invalid.
    pub first: *const f32,
    /// Numbers from one row to the next.
    pub stride: usize,
    /// Lines in each row.
    pub count: usize,
}

impl OutputLines {
    /// For what is in the cache anyway.
    pub(crate) const NONE: OutputLines = OutputLines {
        first: std::ptr::null(),
        stride: 0,
        count: 0,
    };

    /// Prefetches those of row `row` for writing.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(super) fn prefetch(&self, row: usize) {
        let first = self.first.wrapping_add(row * self.stride);
        for line in 0..self.count {
            let address = first.wrapping_add(line * PANEL);
            // SAFETY: a prefetch has no effect on memory, whatever the address; processors without the instruction skip it.
            unsafe { std::arch::asm!("prefetchw [{}]", in(reg) address, options(nostack, preserves_flags)) };
        }
    }
}

/// Maximum rows of a tile.
pub(crate) fn max_rows(isa: Isa) -> usize {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Amx => 32,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Vnni | Isa::Avx512Bf16 => 12,
        _ => 4,
    }
}

/// Maximum panels per call for tiles of `rows` rows.
pub(crate) fn panels_at_once(isa: Isa, rows: usize) -> usize {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Amx if rows > AMX_ROWS_ABOVE => 2,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Vnni | Isa::Avx512Bf16 | Isa::Amx => match rows {
            ..=MEMORY_BOUND_ROWS_MAX => 1,
            5..=6 => 4,
            _ => 2,
        },
        _ => 1,
    }
}

/// Whether a tile of `rows` rows is laid out as `[quads][rows][4]`. Otherwise it is
/// `[rows][quads][4]`.
pub(crate) fn interleaves_rows(isa: Isa, rows: usize) -> bool {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Amx => rows <= AMX_ROWS_ABOVE,
        _ => rows > 0,
    }
}

/// Multiplies the rows of one tile.
///
/// # Safety
/// All pointers of [`Int8Gemm`] are valid for the rows of the tile. No other code reads or writes
/// these rows of `c` during the call.
pub(crate) unsafe fn matmul(isa: Isa, p: &Int8Gemm, tile: RowTile) {
    debug_assert!(tile.rows >= 1 && tile.rows <= max_rows(isa));
    // SAFETY: the caller upholds the same contract, and `isa` guarantees the instructions.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Amx if tile.rows > AMX_ROWS_ABOVE => super::amx::int8_matmul(p, tile),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni | Isa::Avx512Bf16 | Isa::Amx => {
                if tile.rows <= MEMORY_BOUND_ROWS_MAX {
                    for panel in 0..p.panels {
                        x86::avx512_vnni_stream(&p.single_panel(panel), tile);
                    }
                } else if p.panels <= 2 || p.panels == panels_at_once(isa, tile.rows) {
                    x86::avx512_vnni(p, tile);
                } else {
                    for panel in 0..p.panels {
                        x86::avx512_vnni(&p.single_panel(panel), tile);
                    }
                }
            }
            _ => {
                for panel in 0..p.panels {
                    let single = p.single_panel(panel);
                    match isa {
                        #[cfg(target_arch = "x86_64")]
                        Isa::AvxVnni => x86::avx_vnni(&single, tile),
                        #[cfg(target_arch = "x86_64")]
                        Isa::Avx512 | Isa::Avx2 => x86::avx2(&single, tile),
                        _ => portable(&single, tile),
                    }
                }
            }
        }
    }
}

impl Int8Gemm {
    /// The same matmul with only one of its panels.
    ///
    /// # Safety
    /// `panel` is below `self.panels`.
    unsafe fn single_panel(&self, panel: usize) -> Int8Gemm {
        // SAFETY: as the caller guarantees.
        unsafe {
            Int8Gemm {
                b: self.b.add(panel * self.panel_stride),
                column_scales: self.column_scales.add(panel * PANEL),
                offsets: self.offsets.add(panel * PANEL),
                bias: self.bias.add(panel * PANEL),
                c: self.c.add(panel * PANEL),
                panels: 1,
                ..*self
            }
        }
    }
}

/// The kernel without intrinsics: one panel.
///
/// # Safety
/// As [`matmul`].
unsafe fn portable(p: &Int8Gemm, tile: RowTile) {
    // SAFETY: indices stay within the bounds that `matmul` requires.
    unsafe {
        let a = p.a.add(tile.first_row * p.quads * QUAD);
        for r in 0..tile.rows {
            let mut sums: [i32; PANEL] = std::array::from_fn(|n| -*p.offsets.add(n));
            for q in 0..p.quads {
                for (n, sum) in sums.iter_mut().enumerate() {
                    for i in 0..QUAD {
                        let x = i32::from(*a.add((q * tile.rows + r) * QUAD + i));
                        *sum = sum.wrapping_add(x * i32::from(*p.b.add((q * PANEL + n) * QUAD + i)));
                    }
                }
            }
            let row = tile.first_row + r;
            for (n, sum) in sums.iter().enumerate() {
                let value = *sum as f32 * *p.column_scales.add(n);
                *p.c.wrapping_add(row * p.c_stride + n) = value.mul_add(*p.row_scales.add(row), *p.bias.add(n));
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) mod x86 {
    //! The kernels in intrinsics. Loops over `ROWS` and `PANELS` are unrolled, so that all sums
    //! stay in registers. Sums start at `-offset`, except in `avx2`.

    // Loops index arrays of registers.
    #![allow(clippy::needless_range_loop)]

    use std::arch::x86_64::*;

    use super::{Int8Gemm, OFFSET, PANEL, QUAD, RowTile};

    /// Bytes of one quad of k in all 16 columns of a panel.
    const QUAD_BYTES: usize = PANEL * QUAD;

    #[target_feature(enable = "avx512f,avx512vnni")]
    unsafe fn vnni_512<const ROWS: usize, const PANELS: usize>(p: &Int8Gemm, tile: RowTile) {
        // SAFETY: indices stay within the bounds that `matmul` requires.
        unsafe {
            let mut sums = [[_mm512_setzero_si512(); PANELS]; ROWS];
            for n in 0..PANELS {
                let offset = _mm512_loadu_si512(p.offsets.add(n * PANEL).cast());
                let start = _mm512_sub_epi32(_mm512_setzero_si512(), offset);
                for r in 0..ROWS {
                    sums[r][n] = start;
                }
            }
            let (mut a, mut b) = (p.a.add(tile.first_row * p.quads * QUAD), p.b);
            let mut prefetch = tile.prefetch;
            for quad in 0..p.quads {
                if quad < ROWS {
                    tile.output.prefetch(quad);
                }
                for n in 0..PANELS {
                    _mm_prefetch::<_MM_HINT_T1>(prefetch.wrapping_add(n * QUAD_BYTES));
                }
                prefetch = prefetch.wrapping_add(tile.prefetch_step);
                // The weights are kept in registers; the sums take up to 24 of the 32 registers.
                let mut w = [_mm512_setzero_si512(); PANELS];
                for n in 0..PANELS {
                    w[n] = _mm512_loadu_si512(b.add(n * p.panel_stride).cast());
                }
                for r in 0..ROWS {
                    let x = _mm512_set1_epi32(a.add(r * QUAD).cast::<i32>().read_unaligned());
                    for n in 0..PANELS {
                        sums[r][n] = _mm512_dpbusd_epi32(sums[r][n], x, w[n]);
                    }
                }
                a = a.add(ROWS * QUAD);
                b = b.add(QUAD_BYTES);
            }
            for n in 0..PANELS {
                let scale = _mm512_loadu_ps(p.column_scales.add(n * PANEL));
                let bias = _mm512_loadu_ps(p.bias.add(n * PANEL));
                for r in 0..ROWS {
                    let row = tile.first_row + r;
                    let value = _mm512_mul_ps(_mm512_cvtepi32_ps(sums[r][n]), scale);
                    let value = _mm512_fmadd_ps(value, _mm512_set1_ps(*p.row_scales.add(row)), bias);
                    _mm512_storeu_ps(p.c.wrapping_add(row * p.c_stride + n * PANEL), value);
                }
            }
        }
    }

    /// The kernel for few rows: one panel, whose weights are read sequentially, because hardware
    /// prefetching in this order is faster than prefetch instructions. `UNROLL` quads have separate
    /// sums, so that their multiplications do not wait for each other.
    #[target_feature(enable = "avx512f,avx512vnni")]
    unsafe fn stream_512<const ROWS: usize, const UNROLL: usize>(p: &Int8Gemm, tile: RowTile) {
        debug_assert!(p.quads.is_multiple_of(UNROLL));
        // SAFETY: indices stay within the bounds that `matmul` requires.
        unsafe {
            let mut sums = [[_mm512_setzero_si512(); ROWS]; UNROLL];
            let start = _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_loadu_si512(p.offsets.cast()));
            sums[0] = [start; ROWS];
            let (mut a, mut b) = (p.a.add(tile.first_row * p.quads * QUAD), p.b);
            for _ in 0..p.quads / UNROLL {
                for unrolled in 0..UNROLL {
                    let w = _mm512_loadu_si512(b.add(unrolled * QUAD_BYTES).cast());
                    for r in 0..ROWS {
                        let x = _mm512_set1_epi32(a.add((unrolled * ROWS + r) * QUAD).cast::<i32>().read_unaligned());
                        sums[unrolled][r] = _mm512_dpbusd_epi32(sums[unrolled][r], x, w);
                    }
                }
                a = a.add(UNROLL * ROWS * QUAD);
                b = b.add(UNROLL * QUAD_BYTES);
            }
            let (scale, bias) = (_mm512_loadu_ps(p.column_scales), _mm512_loadu_ps(p.bias));
            for r in 0..ROWS {
                let row = tile.first_row + r;
                let mut sum = sums[0][r];
                for unrolled in 1..UNROLL {
                    sum = _mm512_add_epi32(sum, sums[unrolled][r]);
                }
                let value = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), scale);
                let value = _mm512_fmadd_ps(value, _mm512_set1_ps(*p.row_scales.add(row)), bias);
                _mm512_storeu_ps(p.c.wrapping_add(row * p.c_stride), value);
            }
        }
    }

    /// # Safety
    /// As [`super::matmul`], with one panel and at most [`super::MEMORY_BOUND_ROWS_MAX`] rows, on a
    /// processor with AVX-512 VNNI.
    pub(crate) unsafe fn avx512_vnni_stream(p: &Int8Gemm, tile: RowTile) {
        // SAFETY: the caller upholds the same contract.
        unsafe {
            match tile.rows {
                1 => stream_512::<1, 4>(p, tile),
                2 => stream_512::<2, 4>(p, tile),
                3 => stream_512::<3, 2>(p, tile),
                _ => stream_512::<4, 2>(p, tile),
            }
        }
    }

    /// # Safety
    /// As [`super::matmul`], with 1, 2 or [`super::panels_at_once`] panels and more than
    /// [`super::MEMORY_BOUND_ROWS_MAX`] rows, on a processor with AVX-512 VNNI.
    pub(crate) unsafe fn avx512_vnni(p: &Int8Gemm, tile: RowTile) {
        // SAFETY: the caller upholds the same contract.
        unsafe {
            match (tile.rows, p.panels) {
                (5, 1) => vnni_512::<5, 1>(p, tile),
                (6, 1) => vnni_512::<6, 1>(p, tile),
                (7, 1) => vnni_512::<7, 1>(p, tile),
                (8, 1) => vnni_512::<8, 1>(p, tile),
                (9, 1) => vnni_512::<9, 1>(p, tile),
                (10, 1) => vnni_512::<10, 1>(p, tile),
                (11, 1) => vnni_512::<11, 1>(p, tile),
                (12, 1) => vnni_512::<12, 1>(p, tile),
                (5, 2) => vnni_512::<5, 2>(p, tile),
                (6, 2) => vnni_512::<6, 2>(p, tile),
                (5, _) => vnni_512::<5, 4>(p, tile),
                (6, _) => vnni_512::<6, 4>(p, tile),
                (7, _) => vnni_512::<7, 2>(p, tile),
                (8, _) => vnni_512::<8, 2>(p, tile),
                (9, _) => vnni_512::<9, 2>(p, tile),
                (10, _) => vnni_512::<10, 2>(p, tile),
                (11, _) => vnni_512::<11, 2>(p, tile),
                _ => vnni_512::<12, 2>(p, tile),
            }
        }
    }

    /// Scales the sums of one row and panel (two halves of 8 columns), adds the bias and stores.
    ///
    /// # Safety
    /// As [`super::matmul`], on a processor with AVX2.
    #[target_feature(enable = "avx2,fma")]
    unsafe fn store_256(p: &Int8Gemm, row: usize, sums: [__m256i; 2]) {
        // SAFETY: indices stay within the bounds that `matmul` requires.
        unsafe {
            for (half, sum) in sums.into_iter().enumerate() {
                let at = half * PANEL / 2;
                let value = _mm256_mul_ps(_mm256_cvtepi32_ps(sum), _mm256_loadu_ps(p.column_scales.add(at)));
                let (scale, bias) = (_mm256_set1_ps(*p.row_scales.add(row)), _mm256_loadu_ps(p.bias.add(at)));
                _mm256_storeu_ps(
                    p.c.wrapping_add(row * p.c_stride + at),
                    _mm256_fmadd_ps(value, scale, bias),
                );
            }
        }
    }

    #[target_feature(enable = "avx2,fma,avxvnni")]
    unsafe fn vnni_256<const ROWS: usize>(p: &Int8Gemm, tile: RowTile) {
        // SAFETY: indices stay within the bounds that `matmul` requires.
        unsafe {
            let mut start = [_mm256_setzero_si256(); 2];
            for half in 0..2 {
                let offset = _mm256_loadu_si256(p.offsets.add(half * PANEL / 2).cast());
                start[half] = _mm256_sub_epi32(start[half], offset);
            }
            let mut sums = [start; ROWS];
            let (mut a, mut b) = (p.a.add(tile.first_row * p.quads * QUAD), p.b);
            for _ in 0..p.quads {
                let w = [
                    _mm256_loadu_si256(b.cast()),
                    _mm256_loadu_si256(b.add(QUAD_BYTES / 2).cast()),
                ];
                for r in 0..ROWS {
                    let x = _mm256_set1_epi32(a.add(r * QUAD).cast::<i32>().read_unaligned());
                    for half in 0..2 {
                        sums[r][half] = _mm256_dpbusd_avx_epi32(sums[r][half], x, w[half]);
                    }
                }
                a = a.add(ROWS * QUAD);
                b = b.add(QUAD_BYTES);
            }
            for (r, row) in sums.into_iter().enumerate() {
                store_256(p, tile.first_row + r, row);
            }
        }
    }

    /// # Safety
    /// As [`super::matmul`] with one panel, on a processor with AVX-VNNI.
    pub(crate) unsafe fn avx_vnni(p: &Int8Gemm, tile: RowTile) {
        // SAFETY: the caller upholds the same contract.
        unsafe {
            match tile.rows {
                1 => vnni_256::<1>(p, tile),
                2 => vnni_256::<2>(p, tile),
                3 => vnni_256::<3>(p, tile),
                _ => vnni_256::<4>(p, tile),
            }
        }
    }

    /// Adds four products `u * s` of bytes to each 32-bit sum. Either `u` is at most 128 and `s`
    /// from -127 to 127, or `u` is at most 127 and `s` from -128 to 127. Thus the sum of two
    /// products fits in 16 bits, where `vpmaddubsw` would otherwise saturate.
    #[inline]
    #[target_feature(enable = "avx2")]
    pub(crate) fn add_quads(sums: __m256i, u: __m256i, s: __m256i) -> __m256i {
        let pairs = _mm256_maddubs_epi16(u, s);
        _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
    }

    /// The magnitudes of the bytes of both halves.
    #[inline]
    #[target_feature(enable = "avx2")]
    pub(crate) fn magnitudes(bytes: [__m256i; 2]) -> [__m256i; 2] {
        [_mm256_abs_epi8(bytes[0]), _mm256_abs_epi8(bytes[1])]
    }

    /// Multiplies signed activations, without their offset. The sign of each weight is moved to the
    /// activation, so that the weight's magnitude is the unsigned operand.
    #[target_feature(enable = "avx2,fma")]
    unsafe fn avx2_rows<const ROWS: usize>(p: &Int8Gemm, tile: RowTile) {
        // SAFETY: indices stay within the bounds that `matmul` requires.
        unsafe {
            let mut sums = [[_mm256_setzero_si256(); 2]; ROWS];
            let (mut a, mut b) = (p.a.add(tile.first_row * p.quads * QUAD), p.b);
            let offset = _mm256_set1_epi8(OFFSET as u8 as i8);
            for _ in 0..p.quads {
                let w = [
                    _mm256_loadu_si256(b.cast()),
                    _mm256_loadu_si256(b.add(QUAD_BYTES / 2).cast()),
                ];
                let magnitudes = magnitudes(w);
                for r in 0..ROWS {
                    let x = _mm256_set1_epi32(a.add(r * QUAD).cast::<i32>().read_unaligned());
                    let x = _mm256_xor_si256(x, offset);
                    for half in 0..2 {
                        sums[r][half] = add_quads(sums[r][half], magnitudes[half], _mm256_sign_epi8(x, w[half]));
                    }
                }
                a = a.add(ROWS * QUAD);
                b = b.add(QUAD_BYTES);
            }
            for (r, row) in sums.into_iter().enumerate() {
                store_256(p, tile.first_row + r, row);
            }
        }
    }

    /// # Safety
    /// As [`super::matmul`] with one panel, on a processor with AVX2.
    pub(crate) unsafe fn avx2(p: &Int8Gemm, tile: RowTile) {
        // SAFETY: the caller upholds the same contract.
        unsafe {
            match tile.rows {
                1 => avx2_rows::<1>(p, tile),
                2 => avx2_rows::<2>(p, tile),
                3 => avx2_rows::<3>(p, tile),
                _ => avx2_rows::<4>(p, tile),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::testing::numbers;

    fn bytes(seed: u64, n: usize) -> Vec<u8> {
        numbers(seed, n)
            .into_iter()
            .map(|x| (x * 128.0 + 128.0) as u8)
            .collect()
    }

    fn check(isa: Isa, rows: usize, panels: usize, quads: usize, extreme: bool) {
        let k = quads * QUAD;
        // Another tile, of 2 rows, precedes this tile.
        let first_row = 2;
        let all = first_row + rows;
        let mut a: Vec<u8> = bytes(1, all * k).into_iter().map(|x| x.max(1)).collect();
        let b = bytes(2, panels * PANEL * k).into_iter().map(|x| (x as i8).max(-127));
        let mut b: Vec<i8> = b.collect();
        if extreme {
            // Extreme values, at which 16-bit sums would saturate.
            a.fill(255);
            b.iter_mut()
                .enumerate()
                .for_each(|(i, w)| *w = if (i / QUAD).is_multiple_of(2) { 127 } else { -127 });
        }
        let columns = panels * PANEL;
        let (row_scales, column_scales, bias) = (numbers(3, all), numbers(4, columns), numbers(5, columns));
        let place = |n: usize, i: usize| n / PANEL * PANEL * k + i / QUAD * PANEL * QUAD + n % PANEL * QUAD + i % QUAD;
        let sum_of = |n: usize| (0..k).map(|i| i32::from(b[place(n, i)])).sum::<i32>();
        let offsets: Vec<i32> = (0..columns).map(|n| OFFSET * sum_of(n)).collect();
        let mut c = vec![0.0f32; all * (columns + 3)];
        let gemm = Int8Gemm {
            quads,
            a: a.as_ptr(),
            b: b.as_ptr(),
            panel_stride: PANEL * k,
            panels,
            row_scales: row_scales.as_ptr(),
            column_scales: column_scales.as_ptr(),
            offsets: offsets.as_ptr(),
            bias: bias.as_ptr(),
            c: c.as_mut_ptr(),
            c_stride: columns + 3,
        };
        let tile = RowTile {
            first_row,
            rows,
            prefetch: b.as_ptr(),
            prefetch_step: 3,
            output: OutputLines::NONE,
        };
        // SAFETY: the vectors have the sizes that `gemm` states.
        unsafe { matmul(isa, &gemm, tile) };
        assert!(c[..first_row * (columns + 3)].iter().all(|x| *x == 0.0));
        for r in 0..rows {
            for n in 0..columns {
                let value = |i: usize| {
                    let (quad, i) = (i / QUAD, i % QUAD);
                    if interleaves_rows(isa, rows) {
                        a[first_row * k + (quad * rows + r) * QUAD + i]
                    } else {
                        a[(first_row + r) * k + quad * QUAD + i]
                    }
                };
                let sum: i64 = (0..k).map(|i| i64::from(value(i)) * i64::from(b[place(n, i)])).sum();
                let scaled = (sum - i64::from(offsets[n])) as i32 as f32 * column_scales[n];
                let want = scaled.mul_add(row_scales[first_row + r], bias[n]);
                let got = c[(first_row + r) * (columns + 3) + n];
                assert_eq!(
                    got.to_bits(),
                    want.to_bits(),
                    "{isa:?} rows {rows} panels {panels} quads {quads} at ({r}, {n}): {got} not {want}"
                );
            }
        }
    }

    #[test]
    fn every_set_is_bit_identical_to_scalar_code() {
        for isa in Isa::available() {
            for rows in 1..=max_rows(isa) {
                for panels in 1..=panels_at_once(isa, rows) {
                    for quads in [0, 16, 32, 80] {
                        check(isa, rows, panels, quads, false);
                        check(isa, rows, panels, quads, true);
                    }
                }
            }
            // The longest supported sums.
            check(isa, 1, 1, K_MAX / QUAD, true);
        }
    }
}
