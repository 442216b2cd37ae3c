//! The F32 matrix kernel: a few packed rows times panels of 16 columns.
//!
//! `c[r][n] (+)= sum over k of a[k][r] * b[panel(n)][k][n % 16]`. Each output element is summed
//! over k in order, with fused multiply-adds. The sum starts from 0, or from `c` if an earlier call
//! multiplied the previous part of k. The order is the same for every row count, instruction set
//! and division of the work, so results do not depend on the batch.
//!
//! Linear layers pass weights as panels. Attention passes keys (`[head_dim][16 positions]`) and
//! values (`[16 positions][16 dims]`) as panels.

#![expect(unsafe_code, reason = "kernels take addresses and need instructions")]

use crate::device::cpu::aligned::ZeroBits;
use crate::device::cpu::isa::Isa;

/// Columns of a panel.
pub(crate) const PANEL: usize = 16;

/// Parameters of [`matmul`]: `rows` packed rows times `panels` panels.
#[derive(Clone, Copy)]
pub(crate) struct F32Gemm<E> {
    /// Number of values of k to sum over.
    pub k: usize,
    /// Rows, at most [`max_rows`].
    pub rows: usize,
    /// `[k][rows]`.
    pub a: *const f32,
    /// First panel, `[k][16]`.
    pub b: *const E,
    /// Distance between the starts of two panels, in elements.
    pub panel_stride: usize,
    pub panels: usize,
    /// Output, `[rows][c_stride]`. 16 columns per panel are written.
    pub c: *mut f32,
    pub c_stride: usize,
    /// Whether to add to the contents of `c` instead of overwriting them.
    pub accumulate: bool,
}

/// Maximum rows per call.
pub(crate) fn max_rows(isa: Isa) -> usize {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Avx512Vnni | Isa::Avx512Bf16 | Isa::Amx => 12,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 | Isa::AvxVnni => 6,
        Isa::Portable => 4,
    }
}

/// Maximum number of panels whose sums for `rows` rows fit in the registers together.
pub(crate) fn panels_at_once(isa: Isa, rows: usize) -> usize {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Avx512Vnni | Isa::Avx512Bf16 | Isa::Amx => match rows {
            1..=3 => 8,
            4..=6 => 4,
            _ => 2,
        },
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 | Isa::AvxVnni => match rows {
            1 => 4,
            2..=3 => 2,
            _ => 1,
        },
        Isa::Portable => 1,
    }
}

/// A stored number that kernels widen to F32 exactly.
pub(crate) trait Element: ZeroBits + Default + Send + Sync + 'static {
    /// The value in F32.
    fn widen(self) -> f32;
    /// The number nearest to `x`.
    fn narrow(x: f32) -> Self;
    /// Runs a matmul of 1 or [`panels_at_once`] panels.
    ///
    /// # Safety
    /// As [`matmul`].
    unsafe fn tile(isa: Isa, p: F32Gemm<Self>);
}

/// BF16 as its bits.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[repr(transparent)]
pub(crate) struct Bf16(pub u16);

/// IEEE half precision as its bits.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[repr(transparent)]
pub(crate) struct F16(pub u16);

/// Multiplies as described by `p`.
///
/// # Safety
/// `a` has `k * rows` numbers and `b` has `(panels - 1) * panel_stride + k * 16` elements. The
/// caller has exclusive access to `rows` rows of `panels * 16` numbers, which start at `c` with
/// stride `c_stride`.
pub(crate) unsafe fn matmul<E: Element>(isa: Isa, p: F32Gemm<E>) {
    debug_assert!(p.rows >= 1 && p.rows <= max_rows(isa));
    let at_once = panels_at_once(isa, p.rows);
    let mut done = 0;
    while done < p.panels {
        let panels = if p.panels - done >= at_once { at_once } else { 1 };
        // SAFETY: the caller guarantees panels `done .. done + panels`.
        unsafe {
            let part = F32Gemm {
                b: p.b.add(done * p.panel_stride),
                c: p.c.add(done * PANEL),
                panels,
                ..p
            };
            E::tile(isa, part);
        }
        done += panels;
    }
}

/// The kernel without intrinsics: one panel, `ROWS` rows.
#[inline(always)]
unsafe fn portable<E: Element, const ROWS: usize>(p: F32Gemm<E>) {
    // SAFETY: indices stay within the bounds that `matmul` requires.
    unsafe {
        let mut sums = [[0f32; PANEL]; ROWS];
        if p.accumulate {
            for (r, row) in sums.iter_mut().enumerate() {
                for (n, sum) in row.iter_mut().enumerate() {
                    *sum = *p.c.add(r * p.c_stride + n);
                }
            }
        }
        for k in 0..p.k {
            for (r, row) in sums.iter_mut().enumerate() {
                let x = *p.a.add(k * ROWS + r);
                for (n, sum) in row.iter_mut().enumerate() {
                    *sum = x.mul_add((*p.b.add(k * PANEL + n)).widen(), *sum);
                }
            }
        }
        for (r, row) in sums.iter().enumerate() {
            for (n, sum) in row.iter().enumerate() {
                *p.c.add(r * p.c_stride + n) = *sum;
            }
        }
    }
}

#[inline(always)]
unsafe fn portable_tile<E: Element>(p: F32Gemm<E>) {
    // SAFETY: the caller upholds the same contract.
    unsafe {
        match p.rows {
            1 => portable::<E, 1>(p),
            2 => portable::<E, 2>(p),
            3 => portable::<E, 3>(p),
            _ => portable::<E, 4>(p),
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    //! The kernels in intrinsics. Loops over `ROWS` and `PANELS` are unrolled, so that all sums
    //! stay in registers.

    use std::arch::x86_64::*;

    use super::{Bf16, F16, F32Gemm, PANEL};

    macro_rules! avx512_kernel {
        ($name:ident, $pick:ident, $element:ty, |$at:ident| $load:expr) => {
            #[target_feature(enable = "avx512f")]
            unsafe fn $name<const ROWS: usize, const PANELS: usize>(p: F32Gemm<$element>) {
                // SAFETY: indices stay within the bounds that `matmul` requires.
                unsafe {
                    let mut sums = [[_mm512_setzero_ps(); PANELS]; ROWS];
                    if p.accumulate {
                        for r in 0..ROWS {
                            for n in 0..PANELS {
                                sums[r][n] = _mm512_loadu_ps(p.c.add(r * p.c_stride + n * PANEL));
                            }
                        }
                    }
                    let (mut a, mut b) = (p.a, p.b);
                    for _ in 0..p.k {
                        // The operand with fewer vectors (rows or panels) is kept in registers. The
                        // sums take up to 24 of the 32 registers.
                        if ROWS < PANELS {
                            let mut x = [_mm512_setzero_ps(); ROWS];
                            for r in 0..ROWS {
                                x[r] = _mm512_set1_ps(*a.add(r));
                            }
                            for n in 0..PANELS {
                                let $at = b.add(n * p.panel_stride);
                                let w = $load;
                                for r in 0..ROWS {
                                    sums[r][n] = _mm512_fmadd_ps(x[r], w, sums[r][n]);
                                }
                            }
                        } else {
                            let mut w = [_mm512_setzero_ps(); PANELS];
                            for n in 0..PANELS {
                                let $at = b.add(n * p.panel_stride);
                                w[n] = $load;
                            }
                            for r in 0..ROWS {
                                let x = _mm512_set1_ps(*a.add(r));
                                for n in 0..PANELS {
                                    sums[r][n] = _mm512_fmadd_ps(x, w[n], sums[r][n]);
                                }
                            }
                        }
                        a = a.add(ROWS);
                        b = b.add(PANEL);
                    }
                    for r in 0..ROWS {
                        for n in 0..PANELS {
                            _mm512_storeu_ps(p.c.add(r * p.c_stride + n * PANEL), sums[r][n]);
                        }
                    }
                }
            }

            /// # Safety
            /// As [`super::matmul`], on a processor with AVX-512.
            pub(crate) unsafe fn $pick(p: F32Gemm<$element>) {
                // SAFETY: the caller upholds the same contract.
                unsafe {
                    match (p.rows, p.panels) {
                        (1, 1) => $name::<1, 1>(p),
                        (2, 1) => $name::<2, 1>(p),
                        (3, 1) => $name::<3, 1>(p),
                        (4, 1) => $name::<4, 1>(p),
                        (5, 1) => $name::<5, 1>(p),
                        (6, 1) => $name::<6, 1>(p),
                        (7, 1) => $name::<7, 1>(p),
                        (8, 1) => $name::<8, 1>(p),
                        (9, 1) => $name::<9, 1>(p),
                        (10, 1) => $name::<10, 1>(p),
                        (11, 1) => $name::<11, 1>(p),
                        (12, 1) => $name::<12, 1>(p),
                        (1, _) => $name::<1, 8>(p),
                        (2, _) => $name::<2, 8>(p),
                        (3, _) => $name::<3, 8>(p),
                        (4, _) => $name::<4, 4>(p),
                        (5, _) => $name::<5, 4>(p),
                        (6, _) => $name::<6, 4>(p),
                        (7, _) => $name::<7, 2>(p),
                        (8, _) => $name::<8, 2>(p),
                        (9, _) => $name::<9, 2>(p),
                        (10, _) => $name::<10, 2>(p),
                        (11, _) => $name::<11, 2>(p),
                        _ => $name::<12, 2>(p),
                    }
                }
            }
        };
    }

    avx512_kernel!(f32_512, avx512_f32, f32, |at| _mm512_loadu_ps(at));
    avx512_kernel!(bf16_512, avx512_bf16, Bf16, |at| _mm512_castsi512_ps(
        _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(at.cast())))
    ));
    avx512_kernel!(f16_512, avx512_f16, F16, |at| _mm512_cvtph_ps(_mm256_loadu_si256(
        at.cast()
    )));

    macro_rules! avx2_kernel {
        ($name:ident, $pick:ident, $element:ty, |$at:ident| $load:expr) => {
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn $name<const ROWS: usize, const PANELS: usize>(p: F32Gemm<$element>) {
                // SAFETY: indices stay within the bounds that `matmul` requires.
                unsafe {
                    let mut sums = [[[_mm256_setzero_ps(); 2]; PANELS]; ROWS];
                    if p.accumulate {
                        for r in 0..ROWS {
                            for n in 0..PANELS {
                                let c = p.c.add(r * p.c_stride + n * PANEL);
                                sums[r][n] = [_mm256_loadu_ps(c), _mm256_loadu_ps(c.add(8))];
                            }
                        }
                    }
                    let (mut a, mut b) = (p.a, p.b);
                    for _ in 0..p.k {
                        for n in 0..PANELS {
                            let mut w = [_mm256_setzero_ps(); 2];
                            for half in 0..2 {
                                let $at = b.add(n * p.panel_stride + half * 8);
                                w[half] = $load;
                            }
                            for r in 0..ROWS {
                                let x = _mm256_broadcast_ss(&*a.add(r));
                                for half in 0..2 {
                                    sums[r][n][half] = _mm256_fmadd_ps(x, w[half], sums[r][n][half]);
                                }
                            }
                        }
                        a = a.add(ROWS);
                        b = b.add(PANEL);
                    }
                    for r in 0..ROWS {
                        for n in 0..PANELS {
                            let c = p.c.add(r * p.c_stride + n * PANEL);
                            _mm256_storeu_ps(c, sums[r][n][0]);
                            _mm256_storeu_ps(c.add(8), sums[r][n][1]);
                        }
                    }
                }
            }

            /// # Safety
            /// As [`super::matmul`], on a processor with AVX2, FMA and F16C.
            pub(crate) unsafe fn $pick(p: F32Gemm<$element>) {
                // SAFETY: the caller upholds the same contract.
                unsafe {
                    match (p.rows, p.panels) {
                        (1, 1) => $name::<1, 1>(p),
                        (2, 1) => $name::<2, 1>(p),
                        (3, 1) => $name::<3, 1>(p),
                        (4, _) => $name::<4, 1>(p),
                        (5, _) => $name::<5, 1>(p),
                        (1, _) => $name::<1, 4>(p),
                        (2, _) => $name::<2, 2>(p),
                        (3, _) => $name::<3, 2>(p),
                        _ => $name::<6, 1>(p),
                    }
                }
            }
        };
    }

    avx2_kernel!(f32_256, avx2_f32, f32, |at| _mm256_loadu_ps(at));
    avx2_kernel!(bf16_256, avx2_bf16, Bf16, |at| _mm256_castsi256_ps(
        _mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(at.cast())))
    ));
    avx2_kernel!(f16_256, avx2_f16, F16, |at| _mm256_cvtph_ps(_mm_loadu_si128(at.cast())));
}

macro_rules! element {
    ($element:ty, $avx512:ident, $avx2:ident, |$x:ident| $widen:expr, |$y:ident| $narrow:expr) => {
        impl Element for $element {
            #[inline(always)]
            fn widen(self) -> f32 {
                let $x = self;
                $widen
            }
            #[inline(always)]
            fn narrow($y: f32) -> Self {
                $narrow
            }
            unsafe fn tile(isa: Isa, p: F32Gemm<Self>) {
                // SAFETY: the caller guarantees the operands, and `isa` guarantees the
                // instructions.
                unsafe {
                    match isa {
                        #[cfg(target_arch = "x86_64")]
                        Isa::Avx512 | Isa::Avx512Vnni | Isa::Avx512Bf16 | Isa::Amx => x86::$avx512(p),
                        #[cfg(target_arch = "x86_64")]
                        Isa::Avx2 | Isa::AvxVnni => x86::$avx2(p),
                        Isa::Portable => portable_tile(p),
                    }
                }
            }
        }
    };
}

element!(f32, avx512_f32, avx2_f32, |x| x, |y| y);
element!(
    Bf16,
    avx512_bf16,
    avx2_bf16,
    |x| f32::from_bits((x.0 as u32) << 16),
    |y| Bf16(crate::device::cpu::math::bf16_bits(y))
);
element!(F16, avx512_f16, avx2_f16, |x| half::f16::from_bits(x.0).to_f32(), |y| {
    F16(half::f16::from_f32(y).to_bits())
});

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::testing::numbers;

    fn run<E: Element>(isa: Isa, rows: usize, panels: usize, k: usize, accumulate: bool) {
        let a = numbers(1, k * rows);
        let b: Vec<E> = numbers(2, k * panels * PANEL).into_iter().map(E::narrow).collect();
        let mut c = numbers(3, rows * panels * PANEL);
        let mut want = c.clone();
        for r in 0..rows {
            for n in 0..panels * PANEL {
                let out = &mut want[r * panels * PANEL + n];
                if !accumulate {
                    *out = 0.0;
                }
                for i in 0..k {
                    let w = b[(n / PANEL) * k * PANEL + i * PANEL + n % PANEL].widen();
                    *out = a[i * rows + r].mul_add(w, *out);
                }
            }
        }
        let gemm = F32Gemm {
            k,
            rows,
            a: a.as_ptr(),
            b: b.as_ptr(),
            panel_stride: k * PANEL,
            panels,
            c: c.as_mut_ptr(),
            c_stride: panels * PANEL,
            accumulate,
        };
        // SAFETY: the vectors have the sizes that `gemm` states.
        unsafe { matmul(isa, gemm) };
        for (i, (got, want)) in c.iter().zip(&want).enumerate() {
            assert_eq!(
                got.to_bits(),
                want.to_bits(),
                "{isa:?} rows {rows} panels {panels} k {k} at {i}: {got} {want}"
            );
        }
    }

    #[test]
    fn every_shape_is_bit_identical_to_scalar_code() {
        for isa in Isa::available() {
            for rows in 1..=max_rows(isa) {
                for panels in [1, 2, 3, 4, 5, 8, 9, 17] {
                    for k in [0, 1, 15, 16, 17] {
                        run::<f32>(isa, rows, panels, k, false);
                        run::<Bf16>(isa, rows, panels, k, true);
                        run::<F16>(isa, rows, panels, k, false);
                    }
                }
            }
        }
    }
}
