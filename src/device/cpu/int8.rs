//! The INT8 matrix kernel: a few quantized rows times panels of 16 columns, with scales and bias fused.
//!
//! `c[r][n] = (sum over k of a[r][k] * b[n][k] - 128 * sum over k of b[n][k]) * row_scales[r] * column_scales[n] + bias[n]`,
//! where `a` is unsigned: a signed 8-bit activation + 128, as `vpdpbusd` wants its left side. Sums are exact in 32 bits, so
//! every instruction set gives the same integers, whatever the order; scaling is one order of roundings everywhere.

use super::isa::Isa;
use super::tile::PANEL;

/// Values of k that lie together: a lane of 32 bits.
pub const QUAD: usize = 4;
/// Added to an activation to make it unsigned.
pub const OFFSET: i32 = 128;
/// Values of k that rows are padded to a multiple of: a tile's.
pub const K_STEP: usize = 64;
/// More rows than so go to tiles: fewer would leave most of a tile empty.
#[cfg(target_arch = "x86_64")]
const AMX_ROWS_LEAST: usize = 12;
/// Longest sum that surely fits in 32 bits: `255 * 127 * k < 2^31`.
pub const K_MAX: usize = 1 << 16;

/// A product of `rows` quantized rows and `panels` panels.
#[derive(Clone, Copy)]
pub struct Product {
    /// Length of the sums, in quads.
    pub quads: usize,
    /// Rows, at most [`max_rows`].
    pub rows: usize,
    /// `[rows][a_stride]`, of which `4 * quads` are read.
    pub a: *const u8,
    pub a_stride: usize,
    /// First panel, `[quads][16][4]`.
    pub b: *const i8,
    /// Bytes from one panel to the next.
    pub panel_stride: usize,
    pub panels: usize,
    /// `[rows]`.
    pub row_scales: *const f32,
    /// `[panels * 16]`.
    pub column_scales: *const f32,
    /// `[panels * 16]`: 128 times the column's sum.
    pub offsets: *const i32,
    /// `[panels * 16]`.
    pub bias: *const f32,
    /// `[rows][c_stride]`; 16 columns a panel are written.
    pub c: *mut f32,
    pub c_stride: usize,
}

/// Most rows a product may have.
pub fn max_rows(isa: Isa) -> usize {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Amx => 32,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Vnni => 12,
        #[cfg(target_arch = "x86_64")]
        Isa::AvxVnni => 4,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Avx2 => 2,
        Isa::Portable => 4,
    }
}

/// Most panels that [`product`] keeps in registers at once for so many rows.
pub fn panels_at_once(isa: Isa, rows: usize) -> usize {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Amx if rows > AMX_ROWS_LEAST => 2,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Vnni | Isa::Amx => match rows {
            1..=3 => 8,
            4..=6 => 4,
            _ => 2,
        },
        _ => 1,
    }
}

/// Runs a product.
///
/// # Safety
/// All that [`Product`] names is there, and `rows` rows of `panels * 16` numbers at stride `c_stride` from `c` may be written by
/// nobody else meanwhile.
pub unsafe fn product(isa: Isa, p: Product) {
    debug_assert!(p.rows >= 1 && p.rows <= max_rows(isa));
    let at_once = panels_at_once(isa, p.rows);
    let mut done = 0;
    while done < p.panels {
        let panels = if p.panels - done >= at_once { at_once } else { 1 };
        // SAFETY: panels `done .. done + panels` lie within what the caller vouches for, and `isa` for the processor.
        unsafe {
            let part = Product {
                b: p.b.add(done * p.panel_stride),
                column_scales: p.column_scales.add(done * PANEL),
                offsets: p.offsets.add(done * PANEL),
                bias: p.bias.add(done * PANEL),
                c: p.c.add(done * PANEL),
                panels,
                ..p
            };
            match isa {
                #[cfg(target_arch = "x86_64")]
                Isa::Amx if p.rows > AMX_ROWS_LEAST => super::amx::product(part),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512Vnni | Isa::Amx => x86::avx512_vnni(part),
                #[cfg(target_arch = "x86_64")]
                Isa::AvxVnni => x86::avx_vnni(part),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 | Isa::Avx2 => x86::avx2(part),
                Isa::Portable => portable(part),
            }
        }
        done += panels;
    }
}

/// The kernel without intrinsics: one panel.
///
/// # Safety
/// As [`product`].
unsafe fn portable(p: Product) {
    // SAFETY: indices stay within the bounds that `product` asks for.
    unsafe {
        for r in 0..p.rows {
            let mut sums = [0i32; PANEL];
            for q in 0..p.quads {
                for (n, sum) in sums.iter_mut().enumerate() {
                    for i in 0..QUAD {
                        let x = i32::from(*p.a.add(r * p.a_stride + q * QUAD + i));
                        *sum += x * i32::from(*p.b.add((q * PANEL + n) * QUAD + i));
                    }
                }
            }
            for (n, sum) in sums.iter().enumerate() {
                let value = (sum - *p.offsets.add(n)) as f32 * *p.column_scales.add(n) * *p.row_scales.add(r);
                *p.c.add(r * p.c_stride + n) = value + *p.bias.add(n);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    //! The kernels in intrinsics. Loops over `ROWS` and `PANELS` are unrolled, so that all sums stay in registers.

    use std::arch::x86_64::*;

    use super::{PANEL, Product, QUAD};

    /// Bytes of a panel's quad.
    const STEP: usize = PANEL * QUAD;

    #[target_feature(enable = "avx512f,avx512vnni")]
    unsafe fn vnni_512<const ROWS: usize, const PANELS: usize>(p: Product) {
        // SAFETY: indices stay within the bounds that `product` asks for.
        unsafe {
            let mut sums = [[_mm512_setzero_si512(); PANELS]; ROWS];
            let (mut a, mut b) = (p.a, p.b);
            for _ in 0..p.quads {
                // Whichever of rows and panels are fewer wait in registers; the sums take up to 24 of the 32.
                if ROWS < PANELS {
                    let mut x = [_mm512_setzero_si512(); ROWS];
                    for r in 0..ROWS {
                        x[r] = _mm512_set1_epi32(a.add(r * p.a_stride).cast::<i32>().read_unaligned());
                    }
                    for n in 0..PANELS {
                        let w = _mm512_loadu_si512(b.add(n * p.panel_stride).cast());
                        for r in 0..ROWS {
                            sums[r][n] = _mm512_dpbusd_epi32(sums[r][n], x[r], w);
                        }
                    }
                } else {
                    let mut w = [_mm512_setzero_si512(); PANELS];
                    for n in 0..PANELS {
                        w[n] = _mm512_loadu_si512(b.add(n * p.panel_stride).cast());
                    }
                    for r in 0..ROWS {
                        let x = _mm512_set1_epi32(a.add(r * p.a_stride).cast::<i32>().read_unaligned());
                        for n in 0..PANELS {
                            sums[r][n] = _mm512_dpbusd_epi32(sums[r][n], x, w[n]);
                        }
                    }
                }
                a = a.add(QUAD);
                b = b.add(STEP);
            }
            for n in 0..PANELS {
                let offset = _mm512_loadu_si512(p.offsets.add(n * PANEL).cast());
                let scale = _mm512_loadu_ps(p.column_scales.add(n * PANEL));
                let bias = _mm512_loadu_ps(p.bias.add(n * PANEL));
                for r in 0..ROWS {
                    let sum = _mm512_cvtepi32_ps(_mm512_sub_epi32(sums[r][n], offset));
                    let value = _mm512_mul_ps(_mm512_mul_ps(sum, scale), _mm512_set1_ps(*p.row_scales.add(r)));
                    _mm512_storeu_ps(p.c.add(r * p.c_stride + n * PANEL), _mm512_add_ps(value, bias));
                }
            }
        }
    }

    /// # Safety
    /// As [`super::product`], on a processor with AVX-512 VNNI.
    pub unsafe fn avx512_vnni(p: Product) {
        // SAFETY: passed on.
        unsafe {
            match (p.rows, p.panels) {
                (1, 1) => vnni_512::<1, 1>(p),
                (2, 1) => vnni_512::<2, 1>(p),
                (3, 1) => vnni_512::<3, 1>(p),
                (4, 1) => vnni_512::<4, 1>(p),
                (5, 1) => vnni_512::<5, 1>(p),
                (6, 1) => vnni_512::<6, 1>(p),
                (7, 1) => vnni_512::<7, 1>(p),
                (8, 1) => vnni_512::<8, 1>(p),
                (9, 1) => vnni_512::<9, 1>(p),
                (10, 1) => vnni_512::<10, 1>(p),
                (11, 1) => vnni_512::<11, 1>(p),
                (12, 1) => vnni_512::<12, 1>(p),
                (1, _) => vnni_512::<1, 8>(p),
                (2, _) => vnni_512::<2, 8>(p),
                (3, _) => vnni_512::<3, 8>(p),
                (4, _) => vnni_512::<4, 4>(p),
                (5, _) => vnni_512::<5, 4>(p),
                (6, _) => vnni_512::<6, 4>(p),
                (7, _) => vnni_512::<7, 2>(p),
                (8, _) => vnni_512::<8, 2>(p),
                (9, _) => vnni_512::<9, 2>(p),
                (10, _) => vnni_512::<10, 2>(p),
                (11, _) => vnni_512::<11, 2>(p),
                _ => vnni_512::<12, 2>(p),
            }
        }
    }

    /// One panel as two halves of 8 columns: subtracts, scales, adds the bias and stores.
    ///
    /// # Safety
    /// As [`super::product`], on a processor with AVX2.
    #[target_feature(enable = "avx2")]
    unsafe fn finish_256(p: &Product, row: usize, sums: [__m256i; 2]) {
        // SAFETY: indices stay within the bounds that `product` asks for.
        unsafe {
            for (half, sum) in sums.into_iter().enumerate() {
                let at = half * PANEL / 2;
                let sum = _mm256_sub_epi32(sum, _mm256_loadu_si256(p.offsets.add(at).cast()));
                let value = _mm256_mul_ps(_mm256_cvtepi32_ps(sum), _mm256_loadu_ps(p.column_scales.add(at)));
                let value = _mm256_mul_ps(value, _mm256_set1_ps(*p.row_scales.add(row)));
                let value = _mm256_add_ps(value, _mm256_loadu_ps(p.bias.add(at)));
                _mm256_storeu_ps(p.c.add(row * p.c_stride + at), value);
            }
        }
    }

    #[target_feature(enable = "avx2,avxvnni")]
    unsafe fn vnni_256<const ROWS: usize>(p: Product) {
        // SAFETY: indices stay within the bounds that `product` asks for.
        unsafe {
            let mut sums = [[_mm256_setzero_si256(); 2]; ROWS];
            let (mut a, mut b) = (p.a, p.b);
            for _ in 0..p.quads {
                let w = [_mm256_loadu_si256(b.cast()), _mm256_loadu_si256(b.add(STEP / 2).cast())];
                for r in 0..ROWS {
                    let x = _mm256_set1_epi32(a.add(r * p.a_stride).cast::<i32>().read_unaligned());
                    for half in 0..2 {
                        sums[r][half] = _mm256_dpbusd_avx_epi32(sums[r][half], x, w[half]);
                    }
                }
                a = a.add(QUAD);
                b = b.add(STEP);
            }
            for (r, row) in sums.into_iter().enumerate() {
                finish_256(&p, r, row);
            }
        }
    }

    /// # Safety
    /// As [`super::product`] with one panel, on a processor with AVX-VNNI.
    pub unsafe fn avx_vnni(p: Product) {
        // SAFETY: passed on.
        unsafe {
            match p.rows {
                1 => vnni_256::<1>(p),
                2 => vnni_256::<2>(p),
                3 => vnni_256::<3>(p),
                _ => vnni_256::<4>(p),
            }
        }
    }

    /// Widens to 16 bits and multiplies by `vpmaddwd`: `vpmaddubsw` would saturate.
    #[target_feature(enable = "avx2")]
    unsafe fn avx2_rows<const ROWS: usize>(p: Product) {
        // SAFETY: indices stay within the bounds that `product` asks for.
        unsafe {
            // Four columns a register, each as two sums of two products.
            let mut sums = [[_mm256_setzero_si256(); 4]; ROWS];
            let (mut a, mut b) = (p.a, p.b);
            for _ in 0..p.quads {
                let mut x = [_mm256_setzero_si256(); ROWS];
                for r in 0..ROWS {
                    let quad = _mm_cvtsi32_si128(a.add(r * p.a_stride).cast::<i32>().read_unaligned());
                    x[r] = _mm256_broadcastq_epi64(_mm_cvtepu8_epi16(quad));
                }
                for n in 0..4 {
                    let w = _mm256_cvtepi8_epi16(_mm_loadu_si128(b.add(n * STEP / 4).cast()));
                    for r in 0..ROWS {
                        sums[r][n] = _mm256_add_epi32(sums[r][n], _mm256_madd_epi16(x[r], w));
                    }
                }
                a = a.add(QUAD);
                b = b.add(STEP);
            }
            for (r, [s0, s1, s2, s3]) in sums.into_iter().enumerate() {
                // Pairs are added within halves of a register, which leaves columns 0 1 4 5 2 3 6 7.
                let low = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_hadd_epi32(s0, s1));
                let high = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_hadd_epi32(s2, s3));
                finish_256(&p, r, [low, high]);
            }
        }
    }

    /// # Safety
    /// As [`super::product`] with one panel, on a processor with AVX2.
    pub unsafe fn avx2(p: Product) {
        // SAFETY: passed on.
        unsafe {
            match p.rows {
                1 => avx2_rows::<1>(p),
                _ => avx2_rows::<2>(p),
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
        let stride = k + 8;
        let mut a = bytes(1, rows * stride);
        let mut b: Vec<i8> = bytes(2, panels * PANEL * k).into_iter().map(|x| x as i8).collect();
        if extreme {
            // Where 16 bits would saturate.
            a.fill(255);
            b.iter_mut()
                .enumerate()
                .for_each(|(i, w)| *w = if i / QUAD % 2 == 0 { 127 } else { -127 });
        }
        let columns = panels * PANEL;
        let (row_scales, column_scales, bias) = (numbers(3, rows), numbers(4, columns), numbers(5, columns));
        let offsets: Vec<i32> = numbers(6, columns).into_iter().map(|x| (x * 1e6) as i32).collect();
        let mut c = vec![0.0f32; rows * (columns + 3)];
        let product_of = Product {
            quads,
            rows,
            a: a.as_ptr(),
            a_stride: stride,
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
        // SAFETY: the vectors have the sizes that the product names.
        unsafe { product(isa, product_of) };
        for r in 0..rows {
            for n in 0..columns {
                let weight =
                    |i: usize| b[n / PANEL * PANEL * k + i / QUAD * PANEL * QUAD + n % PANEL * QUAD + i % QUAD];
                let sum: i64 = (0..k)
                    .map(|i| i64::from(a[r * stride + i]) * i64::from(weight(i)))
                    .sum();
                let want = (sum - i64::from(offsets[n])) as i32 as f32 * column_scales[n] * row_scales[r] + bias[n];
                let got = c[r * (columns + 3) + n];
                assert_eq!(
                    got.to_bits(),
                    want.to_bits(),
                    "{isa:?} rows {rows} panels {panels} quads {quads} at ({r}, {n}): {got} not {want}"
                );
            }
        }
    }

    #[test]
    fn every_set_gives_the_integers_of_the_plain_sum() {
        for isa in Isa::available() {
            for rows in 1..=max_rows(isa) {
                for panels in [1, 2, 3, 4, 5, 8, 9, 17] {
                    for quads in [0, 16, 32, 80] {
                        check(isa, rows, panels, quads, false);
                        check(isa, rows, panels, quads, true);
                    }
                }
            }
            // The longest sums that are promised.
            check(isa, 1, 1, K_MAX / QUAD, true);
        }
    }
}
