//! The kernel of weights in four bits: a few rows of activations in 8 bits times panels of 16 columns. Factors and bias are fused.
//!
//! A row of `a` and the columns of `b` are cut into the same groups of k. A group's sum is exact in 32 bits:
//! `sum over k of a[r][k] * (b[n][k] - zero[n])`. It is computed as the sum of the products with codes, from 0 to 15, less the
//! zero point times the sum of the row's values, which is known with the row. So `b` is the unsigned operand of `vpdpbusd`, `a`
//! the signed one, and no number needs a correction of its own.
//!
//! `c[r][n]` starts as the bias; each group adds its sum times `factor[n] * scale[r]`, in the order of the groups. All instruction
//! sets add and round alike, so results are the same bits everywhere.
//!
//! See docs/decisions/112-four-bits-stay-as-they-are-stored.md.

#![expect(unsafe_code, reason = "kernels take addresses and need instructions")]

use super::int8::{QUAD, RowTile};
use super::tile::PANEL;
use crate::device::codes::MIDDLE;
use crate::device::cpu::isa::Isa;

/// Values of k whose codes lie in one vector: in each of 16 columns, a quad in the lower halves of four bytes and the next quad
/// in the upper halves.
pub(crate) const OCTET: usize = 2 * QUAD;
/// Bytes of an octet of all columns of a panel.
pub(crate) const OCTET_BYTES: usize = PANEL * QUAD;
/// Maximum k whose sums fit in 32 bits: `15 * 127 * k < 2^31`.
pub(crate) const K_MAX: usize = 1 << 20;
/// Maximum rows of a matmul that is limited by memory bandwidth.
#[cfg(target_arch = "x86_64")]
const MEMORY_BOUND_ROWS_MAX: usize = 4;

/// Parameters of [`matmul`]: rows, in tiles, times a group of panels.
#[derive(Clone, Copy)]
pub(crate) struct Int4Gemm {
    /// Number of groups, and octets of each.
    pub groups: usize,
    pub octets: usize,
    /// The rows, tile by tile, each `[quads][rows of the tile][4]`.
    pub a: *const i8,
    /// Tile by tile, each `[groups][rows of the tile]`.
    pub row_scales: *const f32,
    /// As `row_scales`: the sum of a row's group, negated.
    pub row_sums: *const i32,
    /// First panel, `[groups][octets][16][4]`.
    pub b: *const u8,
    /// First panel's factors, `[groups][16]`.
    pub factors: *const f32,
    /// First panel's zero points, as `factors`. Null: all are [`MIDDLE`].
    pub zeros: *const u8,
    /// Number of panels, at most [`panels_at_once`].
    pub panels: usize,
    /// `[panels * 16]`.
    pub bias: *const f32,
    /// Output, `[rows][c_stride]`. 16 columns per panel are written. Only the rows of the tile need valid memory.
    pub c: *mut f32,
    pub c_stride: usize,
}

/// Maximum rows of a tile.
pub(crate) fn max_rows(isa: Isa) -> usize {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Vnni | Isa::Avx512Bf16 | Isa::Amx => 12,
        _ => 4,
    }
}

/// Maximum panels per call for tiles of `rows` rows.
pub(crate) fn panels_at_once(isa: Isa, rows: usize) -> usize {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Vnni | Isa::Avx512Bf16 | Isa::Amx if rows > MEMORY_BOUND_ROWS_MAX => 2,
        _ => 1,
    }
}

/// Multiplies the rows of one tile.
///
/// # Safety
/// All pointers of [`Int4Gemm`] are valid for the rows of the tile. No other code reads or writes these rows of `c` during the
/// call.
pub(crate) unsafe fn matmul(isa: Isa, p: &Int4Gemm, tile: RowTile) {
    debug_assert!(tile.rows >= 1 && tile.rows <= max_rows(isa));
    // SAFETY: the caller upholds the same contract, and `isa` guarantees the instructions.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni | Isa::Avx512Bf16 | Isa::Amx if tile.rows > MEMORY_BOUND_ROWS_MAX => {
                debug_assert!(p.panels <= 2);
                x86::avx512_vnni(p, tile);
            }
            _ => {
                for panel in 0..p.panels {
                    let single = p.single_panel(panel);
                    match isa {
                        #[cfg(target_arch = "x86_64")]
                        Isa::Avx512Vnni | Isa::Avx512Bf16 | Isa::Amx => x86::avx512_vnni_stream(&single, tile),
                        #[cfg(target_arch = "x86_64")]
                        Isa::AvxVnni => x86::avx_vnni(&single, tile),
                        #[cfg(target_arch = "x86_64")]
                        Isa::Avx512 | Isa::Avx2 => x86::avx2(&single, tile),
                        Isa::Portable => portable(&single, tile),
                    }
                }
            }
        }
    }
}

impl Int4Gemm {
    /// Bytes of a panel's codes.
    fn panel_bytes(&self) -> usize {
        self.groups * self.octets * OCTET_BYTES
    }

    /// Factors of a panel.
    fn panel_factors(&self) -> usize {
        self.groups * PANEL
    }

    /// The same matmul with only one of its panels.
    ///
    /// # Safety
    /// `panel` is below `self.panels`.
    unsafe fn single_panel(&self, panel: usize) -> Int4Gemm {
        // SAFETY: as the caller guarantees.
        unsafe {
            Int4Gemm {
                b: self.b.add(panel * self.panel_bytes()),
                factors: self.factors.add(panel * self.panel_factors()),
                zeros: self.zeros.wrapping_add(if self.zeros.is_null() {
                    0
                } else {
                    panel * self.panel_factors()
                }),
                bias: self.bias.add(panel * PANEL),
                c: self.c.wrapping_add(panel * PANEL),
                panels: 1,
                ..*self
            }
        }
    }

    /// A tile's part of the rows.
    ///
    /// # Safety
    /// As [`matmul`].
    unsafe fn rows_of(&self, tile: RowTile) -> TileRows {
        // SAFETY: the caller upholds the same contract.
        unsafe {
            TileRows {
                a: self.a.add(tile.first_row * self.groups * self.octets * OCTET),
                scales: self.row_scales.add(tile.first_row * self.groups),
                sums: self.row_sums.add(tile.first_row * self.groups),
            }
        }
    }
}

/// The rows of a tile: what is left of them, while groups are computed one after the other.
#[derive(Clone, Copy)]
struct TileRows {
    a: *const i8,
    scales: *const f32,
    sums: *const i32,
}

/// The kernel without intrinsics: one panel.
///
/// # Safety
/// As [`matmul`].
unsafe fn portable(p: &Int4Gemm, tile: RowTile) {
    // SAFETY: indices stay within the bounds that `matmul` requires.
    unsafe {
        let rows = p.rows_of(tile);
        for r in 0..tile.rows {
            let mut totals: [f32; PANEL] = std::array::from_fn(|n| *p.bias.add(n));
            for g in 0..p.groups {
                let start = *rows.sums.add(g * tile.rows + r);
                let mut sums: [i32; PANEL] = std::array::from_fn(|n| {
                    let zero = if p.zeros.is_null() {
                        MIDDLE
                    } else {
                        *p.zeros.add(g * PANEL + n)
                    };
                    start * i32::from(zero)
                });
                for octet in g * p.octets..(g + 1) * p.octets {
                    for (n, sum) in sums.iter_mut().enumerate() {
                        for i in 0..QUAD {
                            let byte = *p.b.add(octet * OCTET_BYTES + n * QUAD + i);
                            let x = |quad: usize| i32::from(*rows.a.add((quad * tile.rows + r) * QUAD + i));
                            *sum += x(2 * octet) * i32::from(byte & 15) + x(2 * octet + 1) * i32::from(byte >> 4);
                        }
                    }
                }
                let scale = *rows.scales.add(g * tile.rows + r);
                for (n, (total, sum)) in totals.iter_mut().zip(sums).enumerate() {
                    *total = (sum as f32).mul_add(*p.factors.add(g * PANEL + n) * scale, *total);
                }
            }
            for (n, total) in totals.into_iter().enumerate() {
                *p.c.wrapping_add((tile.first_row + r) * p.c_stride + n) = total;
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) mod x86 {
    //! The kernels in intrinsics. Loops over `ROWS` and `PANELS` are unrolled, so that a group's sums stay in registers.

    // Loops index arrays of registers.
    #![allow(clippy::needless_range_loop)]

    use std::arch::x86_64::*;

    use super::{Int4Gemm, OCTET_BYTES, PANEL, QUAD, RowTile};

    /// The logarithm of [`MIDDLE`](crate::device::codes::MIDDLE), by which sums are shifted.
    const MIDDLE_BITS: u32 = 3;

    /// What a group's sum starts with, where zero points differ and where all are in the middle.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn start_512<const HAS_ZEROS: bool>(zeros: __m512i, sum: i32) -> __m512i {
        let sum = _mm512_set1_epi32(sum);
        if HAS_ZEROS {
            _mm512_mullo_epi32(zeros, sum)
        } else {
            _mm512_slli_epi32::<MIDDLE_BITS>(sum)
        }
    }

    /// Zero points of a panel, if there are any.
    #[target_feature(enable = "avx512f")]
    unsafe fn zeros_512<const HAS_ZEROS: bool>(zeros: *const u8, at: usize) -> __m512i {
        if HAS_ZEROS {
            // SAFETY: the caller has a panel's zero points at this place.
            unsafe { _mm512_cvtepu8_epi32(_mm_loadu_si128(zeros.add(at).cast())) }
        } else {
            _mm512_setzero_si512()
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    unsafe fn vnni_512<const ROWS: usize, const PANELS: usize, const HAS_ZEROS: bool>(p: &Int4Gemm, tile: RowTile) {
        // SAFETY: indices stay within the bounds that `matmul` requires.
        unsafe {
            let mut rows = p.rows_of(tile);
            // These and the sums of a group do not fit into registers together.
            let mut totals = [[_mm512_setzero_ps(); PANELS]; ROWS];
            for n in 0..PANELS {
                for r in 0..ROWS {
                    totals[r][n] = _mm512_loadu_ps(p.bias.add(n * PANEL));
                }
            }
            let mask = _mm512_set1_epi8(15);
            let (mut b, panel_bytes, panel_factors) = (p.b, p.panel_bytes(), p.panel_factors());
            let mut prefetch = tile.prefetch;
            for g in 0..p.groups {
                let mut sums = [[_mm512_setzero_si512(); PANELS]; ROWS];
                for n in 0..PANELS {
                    let zeros = zeros_512::<HAS_ZEROS>(p.zeros, n * panel_factors + g * PANEL);
                    for r in 0..ROWS {
                        sums[r][n] = start_512::<HAS_ZEROS>(zeros, *rows.sums.add(r));
                    }
                }
                if g < ROWS {
                    tile.output.prefetch(g);
                }
                for _ in 0..p.octets {
                    for n in 0..PANELS {
                        _mm_prefetch::<_MM_HINT_T1>(prefetch.wrapping_add(n * OCTET_BYTES));
                    }
                    prefetch = prefetch.wrapping_add(tile.prefetch_step);
                    let mut low = [_mm512_setzero_si512(); PANELS];
                    let mut high = [_mm512_setzero_si512(); PANELS];
                    for n in 0..PANELS {
                        let codes = _mm512_loadu_si512(b.add(n * panel_bytes).cast());
                        low[n] = _mm512_and_si512(codes, mask);
                        high[n] = _mm512_and_si512(_mm512_srli_epi16::<4>(codes), mask);
                    }
                    for r in 0..ROWS {
                        let x = _mm512_set1_epi32(rows.a.add(r * QUAD).cast::<i32>().read_unaligned());
                        for n in 0..PANELS {
                            sums[r][n] = _mm512_dpbusd_epi32(sums[r][n], low[n], x);
                        }
                    }
                    for r in 0..ROWS {
                        let x = _mm512_set1_epi32(rows.a.add((ROWS + r) * QUAD).cast::<i32>().read_unaligned());
                        for n in 0..PANELS {
                            sums[r][n] = _mm512_dpbusd_epi32(sums[r][n], high[n], x);
                        }
                    }
                    rows.a = rows.a.add(2 * ROWS * QUAD);
                    b = b.add(OCTET_BYTES);
                }
                for n in 0..PANELS {
                    let factors = _mm512_loadu_ps(p.factors.add(n * panel_factors + g * PANEL));
                    for r in 0..ROWS {
                        let factor = _mm512_mul_ps(factors, _mm512_set1_ps(*rows.scales.add(r)));
                        totals[r][n] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[r][n]), factor, totals[r][n]);
                    }
                }
                (rows.scales, rows.sums) = (rows.scales.add(ROWS), rows.sums.add(ROWS));
            }
            for n in 0..PANELS {
                for r in 0..ROWS {
                    let at = (tile.first_row + r) * p.c_stride + n * PANEL;
                    _mm512_storeu_ps(p.c.wrapping_add(at), totals[r][n]);
                }
            }
        }
    }

    /// The kernel for few rows: one panel, whose weights are read sequentially, without instructions that ask for them. The
    /// halves of a vector have separate sums, so that their multiplications do not wait for each other.
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    unsafe fn stream_512<const ROWS: usize, const HAS_ZEROS: bool>(p: &Int4Gemm, tile: RowTile) {
        // SAFETY: indices stay within the bounds that `matmul` requires.
        unsafe {
            let mut rows = p.rows_of(tile);
            let mut totals = [_mm512_loadu_ps(p.bias); ROWS];
            let mask = _mm512_set1_epi8(15);
            let mut b = p.b;
            for g in 0..p.groups {
                let zeros = zeros_512::<HAS_ZEROS>(p.zeros, g * PANEL);
                let mut sums = [[_mm512_setzero_si512(); 2]; ROWS];
                for r in 0..ROWS {
                    sums[r][0] = start_512::<HAS_ZEROS>(zeros, *rows.sums.add(r));
                }
                for _ in 0..p.octets {
                    let codes = _mm512_loadu_si512(b.cast());
                    let low = _mm512_and_si512(codes, mask);
                    let high = _mm512_and_si512(_mm512_srli_epi16::<4>(codes), mask);
                    for r in 0..ROWS {
                        let x = _mm512_set1_epi32(rows.a.add(r * QUAD).cast::<i32>().read_unaligned());
                        sums[r][0] = _mm512_dpbusd_epi32(sums[r][0], low, x);
                        let x = _mm512_set1_epi32(rows.a.add((ROWS + r) * QUAD).cast::<i32>().read_unaligned());
                        sums[r][1] = _mm512_dpbusd_epi32(sums[r][1], high, x);
                    }
                    rows.a = rows.a.add(2 * ROWS * QUAD);
                    b = b.add(OCTET_BYTES);
                }
                let factors = _mm512_loadu_ps(p.factors.add(g * PANEL));
                for r in 0..ROWS {
                    let sum = _mm512_cvtepi32_ps(_mm512_add_epi32(sums[r][0], sums[r][1]));
                    let factor = _mm512_mul_ps(factors, _mm512_set1_ps(*rows.scales.add(r)));
                    totals[r] = _mm512_fmadd_ps(sum, factor, totals[r]);
                }
                (rows.scales, rows.sums) = (rows.scales.add(ROWS), rows.sums.add(ROWS));
            }
            for r in 0..ROWS {
                _mm512_storeu_ps(p.c.wrapping_add((tile.first_row + r) * p.c_stride), totals[r]);
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    unsafe fn single_512<const ROWS: usize, const HAS_ZEROS: bool>(p: &Int4Gemm, tile: RowTile) {
        // SAFETY: the caller upholds the same contract.
        unsafe { vnni_512::<ROWS, 1, HAS_ZEROS>(p, tile) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    unsafe fn double_512<const ROWS: usize, const HAS_ZEROS: bool>(p: &Int4Gemm, tile: RowTile) {
        // SAFETY: the caller upholds the same contract.
        unsafe { vnni_512::<ROWS, 2, HAS_ZEROS>(p, tile) }
    }

    /// Calls a kernel of so many rows, with zero points or without.
    macro_rules! kernel_of {
        ($p:ident, $tile:ident, $kernel:ident, [$($rows:literal),*]) => {
            match ($tile.rows, $p.zeros.is_null()) {
                $(
                    ($rows, true) => $kernel::<$rows, false>($p, $tile),
                    ($rows, false) => $kernel::<$rows, true>($p, $tile),
                )*
                (rows, _) => unreachable!("a tile has no {rows} rows"),
            }
        };
    }

    /// # Safety
    /// As [`super::matmul`], with one panel and at most [`super::MEMORY_BOUND_ROWS_MAX`] rows, on a processor with AVX-512 VNNI.
    pub(crate) unsafe fn avx512_vnni_stream(p: &Int4Gemm, tile: RowTile) {
        // SAFETY: the caller upholds the same contract.
        unsafe { kernel_of!(p, tile, stream_512, [1, 2, 3, 4]) }
    }

    /// # Safety
    /// As [`super::matmul`], with one or two panels and more than [`super::MEMORY_BOUND_ROWS_MAX`] rows, on a processor with
    /// AVX-512 VNNI.
    pub(crate) unsafe fn avx512_vnni(p: &Int4Gemm, tile: RowTile) {
        // SAFETY: the caller upholds the same contract.
        unsafe {
            if p.panels == 1 {
                kernel_of!(p, tile, single_512, [5, 6, 7, 8, 9, 10, 11, 12]);
            } else {
                kernel_of!(p, tile, double_512, [5, 6, 7, 8, 9, 10, 11, 12]);
            }
        }
    }

    /// A group's sums of one row, in two halves of 8 columns.
    type Halves = [__m256i; 2];

    /// Defines a kernel of 256 bits for one panel. `$add(sums, low codes, quad, high codes, next quad)` adds the products of an
    /// octet.
    macro_rules! kernel_256 {
        ($name:ident, $rows_name:ident, $features:literal, $add:ident) => {
            #[target_feature(enable = $features)]
            unsafe fn $rows_name<const ROWS: usize, const HAS_ZEROS: bool>(p: &Int4Gemm, tile: RowTile) {
                // SAFETY: indices stay within the bounds that `matmul` requires.
                unsafe {
                    let mut rows = p.rows_of(tile);
                    let bias = [_mm256_loadu_ps(p.bias), _mm256_loadu_ps(p.bias.add(PANEL / 2))];
                    let mut totals = [bias; ROWS];
                    let mask = _mm256_set1_epi8(15);
                    let mut b = p.b;
                    for g in 0..p.groups {
                        let mut sums: [Halves; ROWS] = [[_mm256_setzero_si256(); 2]; ROWS];
                        for r in 0..ROWS {
                            let sum = _mm256_set1_epi32(*rows.sums.add(r));
                            for half in 0..2 {
                                sums[r][half] = if HAS_ZEROS {
                                    let zeros = p.zeros.add(g * PANEL + half * PANEL / 2);
                                    _mm256_mullo_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64(zeros.cast())), sum)
                                } else {
                                    _mm256_slli_epi32::<{ MIDDLE_BITS as i32 }>(sum)
                                };
                            }
                        }
                        for _ in 0..p.octets {
                            let (mut low, mut high) = ([mask; 2], [mask; 2]);
                            for half in 0..2 {
                                let codes = _mm256_loadu_si256(b.add(half * OCTET_BYTES / 2).cast());
                                low[half] = _mm256_and_si256(codes, mask);
                                high[half] = _mm256_and_si256(_mm256_srli_epi16::<4>(codes), mask);
                            }
                            for r in 0..ROWS {
                                let quad =
                                    |r: usize| _mm256_set1_epi32(rows.a.add(r * QUAD).cast::<i32>().read_unaligned());
                                let (x, next) = (quad(r), quad(ROWS + r));
                                for half in 0..2 {
                                    sums[r][half] = $add(sums[r][half], low[half], x, high[half], next);
                                }
                            }
                            rows.a = rows.a.add(2 * ROWS * QUAD);
                            b = b.add(OCTET_BYTES);
                        }
                        for half in 0..2 {
                            let factors = _mm256_loadu_ps(p.factors.add(g * PANEL + half * PANEL / 2));
                            for r in 0..ROWS {
                                let factor = _mm256_mul_ps(factors, _mm256_set1_ps(*rows.scales.add(r)));
                                let sum = _mm256_cvtepi32_ps(sums[r][half]);
                                totals[r][half] = _mm256_fmadd_ps(sum, factor, totals[r][half]);
                            }
                        }
                        (rows.scales, rows.sums) = (rows.scales.add(ROWS), rows.sums.add(ROWS));
                    }
                    for r in 0..ROWS {
                        for half in 0..2 {
                            let at = (tile.first_row + r) * p.c_stride + half * PANEL / 2;
                            _mm256_storeu_ps(p.c.wrapping_add(at), totals[r][half]);
                        }
                    }
                }
            }

            /// # Safety
            /// As [`super::matmul`] with one panel, on a processor with these instructions.
            pub(crate) unsafe fn $name(p: &Int4Gemm, tile: RowTile) {
                // SAFETY: the caller upholds the same contract.
                unsafe { kernel_of!(p, tile, $rows_name, [1, 2, 3, 4]) }
            }
        };
    }

    /// Four products of a column are at most `4 * 15 * 127`, which fits in 16 bits.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn add_octet(sums: __m256i, low: __m256i, x: __m256i, high: __m256i, next: __m256i) -> __m256i {
        let pairs = _mm256_add_epi16(_mm256_maddubs_epi16(low, x), _mm256_maddubs_epi16(high, next));
        _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
    }

    #[inline]
    #[target_feature(enable = "avx2,avxvnni")]
    fn dot_octet(sums: __m256i, low: __m256i, x: __m256i, high: __m256i, next: __m256i) -> __m256i {
        _mm256_dpbusd_avx_epi32(_mm256_dpbusd_avx_epi32(sums, low, x), high, next)
    }

    kernel_256!(avx2, avx2_rows, "avx2,fma", add_octet);
    kernel_256!(avx_vnni, avx_vnni_rows, "avx2,fma,avxvnni", dot_octet);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::gemm::int8::OutputLines;
    use crate::device::cpu::testing::numbers;

    /// A number of the rows, two codes and a zero point, as far from zero as they may be together.
    type Extreme = (i8, u8, u8);
    const EXTREMES: [Extreme; 3] = [(-127, 255, 0), (-127, 0, 15), (127, 0, 15)];

    /// A product whose numbers are random, or as large as they may be.
    struct Case {
        rows: usize,
        panels: usize,
        groups: usize,
        octets: usize,
        has_zeros: bool,
        extreme: Option<Extreme>,
    }

    impl Case {
        fn k(&self) -> usize {
            self.groups * self.octets * OCTET
        }

        /// Compares the kernel's result with sums that are computed number by number.
        fn check(&self, isa: Isa) {
            // Another tile, of 2 rows, precedes this tile.
            let (first_row, k, groups, columns) = (2, self.k(), self.groups, self.panels * PANEL);
            let all = first_row + self.rows;
            let whole = |seed: u64, n: usize, top: f32| numbers(seed, n).into_iter().map(move |x| (x * top).round());
            let mut a: Vec<i8> = whole(1, all * k, 127.0).map(|x| x as i8).collect();
            let mut b: Vec<u8> = whole(2, columns * k / 2, 128.0).map(|x| (x + 127.0) as u8).collect();
            let mut zeros: Vec<u8> = whole(3, columns * groups, 8.0).map(|x| (x + 7.5) as u8).collect();
            if let Some((number, codes, zero)) = self.extreme {
                a.fill(number);
                b.fill(codes);
                zeros.fill(zero);
            }
            let value = |r: usize, i: usize| i64::from(a[first_row * k + (i / QUAD * self.rows + r) * QUAD + i % QUAD]);
            let code = |n: usize, i: usize| {
                let octet = n / PANEL * (k / OCTET) + i / OCTET;
                let byte = b[octet * OCTET_BYTES + n % PANEL * QUAD + i % QUAD];
                i64::from(byte >> (i / QUAD % 2 * 4) & 15)
            };
            let factor_at = |n: usize, g: usize| (n / PANEL * groups + g) * PANEL + n % PANEL;
            let zero = |n: usize, g: usize| i64::from(if self.has_zeros { zeros[factor_at(n, g)] } else { MIDDLE });
            let of_group = |g: usize| g * (k / groups)..(g + 1) * (k / groups);
            let (factors, bias) = (numbers(4, columns * groups), numbers(5, columns));
            let scales = numbers(6, all * groups);
            let mut sums = vec![0i32; all * groups];
            for (g, r) in (0..groups).flat_map(|g| (0..self.rows).map(move |r| (g, r))) {
                let sum: i64 = of_group(g).map(|i| value(r, i)).sum();
                sums[first_row * groups + g * self.rows + r] = -sum as i32;
            }
            let stride = columns + 3;
            let mut c = vec![0.0f32; all * stride];
            let gemm = Int4Gemm {
                groups,
                octets: self.octets,
                a: a.as_ptr(),
                row_scales: scales.as_ptr(),
                row_sums: sums.as_ptr(),
                b: b.as_ptr(),
                factors: factors.as_ptr(),
                zeros: if self.has_zeros {
                    zeros.as_ptr()
                } else {
                    std::ptr::null()
                },
                panels: self.panels,
                bias: bias.as_ptr(),
                c: c.as_mut_ptr(),
                c_stride: stride,
            };
            let tile = RowTile {
                first_row,
                rows: self.rows,
                prefetch: b.as_ptr().cast(),
                prefetch_step: 3,
                output: OutputLines::NONE,
            };
            // SAFETY: the vectors have the sizes that `gemm` states.
            unsafe { matmul(isa, &gemm, tile) };
            assert!(c[..first_row * stride].iter().all(|x| *x == 0.0));
            for (r, n) in (0..self.rows).flat_map(|r| (0..columns).map(move |n| (r, n))) {
                let mut want = bias[n];
                for g in 0..groups {
                    let sum: i64 = of_group(g).map(|i| value(r, i) * (code(n, i) - zero(n, g))).sum();
                    let scale = scales[first_row * groups + g * self.rows + r];
                    want = (sum as i32 as f32).mul_add(factors[factor_at(n, g)] * scale, want);
                }
                let got = c[(first_row + r) * stride + n];
                assert_eq!(
                    got.to_bits(),
                    want.to_bits(),
                    "{isa:?} {} rows {} panels {groups} groups of {} octets at ({r}, {n}): {got} not {want}",
                    self.rows,
                    self.panels,
                    self.octets
                );
            }
        }
    }

    #[test]
    fn every_set_is_bit_identical_to_scalar_code() {
        for isa in Isa::available() {
            let tiles = (1..=max_rows(isa)).flat_map(|rows| (1..=panels_at_once(isa, rows)).map(move |n| (rows, n)));
            for (rows, panels) in tiles {
                for (groups, octets) in [(1, 1), (3, 1), (3, 4), (2, 8), (2, 16), (1, 37)] {
                    let extremes = EXTREMES.iter().map(|extreme| (true, Some(*extreme)));
                    let cases = [(false, None), (true, None), (false, Some(EXTREMES[0]))];
                    for (has_zeros, extreme) in cases.into_iter().chain(extremes) {
                        let case = Case {
                            rows,
                            panels,
                            groups,
                            octets,
                            has_zeros,
                            extreme,
                        };
                        case.check(isa);
                    }
                }
            }
        }
    }

    /// The longest supported sums.
    #[test]
    fn sums_of_the_longest_rows_fit() {
        for isa in Isa::available() {
            for extreme in EXTREMES {
                let case = Case {
                    rows: 1,
                    panels: 1,
                    groups: 1,
                    octets: K_MAX / OCTET,
                    has_zeros: true,
                    extreme: Some(extreme),
                };
                case.check(isa);
            }
        }
    }
}
