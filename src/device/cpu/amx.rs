//! The products of INT8 and BF16 on AMX tiles (Intel, Architecture Instruction Set Extensions Programming Reference, chapter 3).
//!
//! A tile is 16 rows of 64 bytes. Two tiles of activations times two panels of weights fill the eight tile registers: four
//! sums, two and two factors. The panel layout of [`int8`](super::int8) is that of AMX's right factor: 64 values of k of a
//! panel are one tile, and so are 32 of k in the layout of [`bf16`](super::bf16). `tdpbusd` multiplies unsigned by signed, so that sums
//! are the same integers as `vpdpbusd`'s.
//!
//! Intrinsics for AMX are not stable: everything between loading the tile configuration and releasing the tiles stands in one
//! `asm!` block, since nothing else promises that tiles survive.

use std::arch::asm;
use std::arch::x86_64::*;
use std::sync::OnceLock;

use super::int8::{QUAD, Tile};
use super::tile::PANEL;
use super::{bf16, int8};

/// Rows of a tile, and bytes of a row.
const ROWS: usize = 16;
const ROW_BYTES: usize = 64;

/// Whether the processor has AMX-INT8 and AMX-BF16 and the system lets this process use it.
pub fn is_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| has_instructions() && system_permits())
}

/// AMX-TILE, AMX-INT8 and AMX-BF16 in the processor, tile state enabled by the system.
fn has_instructions() -> bool {
    const BF16: u32 = 1 << 22;
    const TILE: u32 = 1 << 24;
    const INT8: u32 = 1 << 25;
    const TILE_STATE: u64 = 0b11 << 17;
    if !is_x86_feature_detected!("xsave") || !is_x86_feature_detected!("avx512vnni") || __cpuid(0).eax < 7 {
        return false;
    }
    // SAFETY: the processor has XGETBV where it has XSAVE, enabled by the system: AVX-512 could not be detected without.
    let enabled = unsafe { _xgetbv(0) };
    let has = __cpuid_count(7, 0).edx & (BF16 | TILE | INT8) == BF16 | TILE | INT8;
    has && enabled & TILE_STATE == TILE_STATE
}

/// Asks Linux for the tile registers' state, which is given to processes that want it only.
#[cfg(target_os = "linux")]
fn system_permits() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: the call takes two numbers and changes nothing but what this process may use.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn system_permits() -> bool {
    false
}

/// What `ldtilecfg` reads: palette 1, then bytes a row and rows of each of the eight tiles.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Configuration {
    /// Sums in tiles 0 to 3 and activations in 4 and 5, `upper` rows in the even ones, `lower` in the odd ones; weights in 6
    /// and 7.
    fn new(upper: u8, lower: u8) -> Configuration {
        let full = ROWS as u8;
        let mut rows = [0; 16];
        rows[..8].copy_from_slice(&[upper, lower, upper, lower, upper, lower, full, full]);
        let mut row_bytes = [0; 16];
        row_bytes[..8].fill(ROW_BYTES as u16);
        Configuration {
            palette: 1,
            start_row: 0,
            reserved: [0; 14],
            row_bytes,
            rows,
        }
    }
}

/// Sums of two panels by up to 32 rows: whole numbers, or the bits of F32.
#[repr(C, align(64))]
struct Sums([[i32; 2 * PANEL]; 2 * ROWS]);

/// 1 to 32 rows times one or two panels, in bytes: lanes of 32 bits hold four or two values of k.
struct Factors {
    /// First of the rows, which lie one after the other.
    a: *const u8,
    rows: usize,
    b: *const u8,
    panel_stride: usize,
    panels: usize,
    /// Bytes of a row: whole rows of tiles.
    depth: usize,
}

/// Defines a function that adds up the products of [`Factors`] by the instruction `$product`.
macro_rules! tiles {
    ($name:ident, $product:literal) => {
        /// # Safety
        /// All that [`Factors`] names is there, and [`is_available`].
        unsafe fn $name(f: &Factors) -> Sums {
            debug_assert!(f.rows <= 2 * ROWS && (1..=2).contains(&f.panels) && f.depth.is_multiple_of(ROW_BYTES));
            let upper = f.rows.min(ROWS);
            let lower = f.rows - upper;
            let mut sums = Sums([[0; 2 * PANEL]; 2 * ROWS]);
            // A tile of no rows is not allowed: where there is no lower half, its tiles take one row, which nobody looks at.
            let configuration = Configuration::new(upper as u8, lower.max(1) as u8);
            let steps = f.depth / ROW_BYTES;
            if steps == 0 {
                return sums;
            }
            // SAFETY: rows and panels lie within what the caller vouches for. Where there is no second panel or no lower half,
            // the first stands in for it: it is read twice, and nobody looks at those sums.
            unsafe {
                let a_lower = if lower > 0 { f.a.add(ROWS * f.depth) } else { f.a };
                let b_second = if f.panels == 2 { f.b.add(f.panel_stride) } else { f.b };
                asm!(
                    "ldtilecfg [{configuration}]",
                    "tilezero tmm0",
                    "tilezero tmm1",
                    "tilezero tmm2",
                    "tilezero tmm3",
                    "2:",
                    "tileloadd tmm4, [{a} + {a_stride}*1]",
                    "tileloadd tmm6, [{b} + {row}*1]",
                    concat!($product, " tmm0, tmm4, tmm6"),
                    "tileloadd tmm5, [{a_lower} + {a_stride}*1]",
                    concat!($product, " tmm1, tmm5, tmm6"),
                    "tileloadd tmm7, [{b_second} + {row}*1]",
                    concat!($product, " tmm2, tmm4, tmm7"),
                    concat!($product, " tmm3, tmm5, tmm7"),
                    "add {a}, 64",
                    "add {a_lower}, 64",
                    "add {b}, 1024",
                    "add {b_second}, 1024",
                    "dec {steps}",
                    "jnz 2b",
                    "tilestored [{sums} + {sums_stride}*1], tmm0",
                    "tilestored [{sums_lower} + {sums_stride}*1], tmm1",
                    "tilestored [{sums} + {sums_stride}*1 + 64], tmm2",
                    "tilestored [{sums_lower} + {sums_stride}*1 + 64], tmm3",
                    "tilerelease",
                    configuration = in(reg) &configuration,
                    a = inout(reg) f.a => _,
                    a_lower = inout(reg) a_lower => _,
                    a_stride = in(reg) f.depth,
                    b = inout(reg) f.b => _,
                    b_second = inout(reg) b_second => _,
                    row = in(reg) ROW_BYTES,
                    steps = inout(reg) steps => _,
                    sums = in(reg) sums.0.as_mut_ptr(),
                    sums_lower = in(reg) sums.0[ROWS..].as_mut_ptr(),
                    sums_stride = in(reg) 2 * PANEL * size_of::<i32>(),
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
            sums
        }
    };
}

tiles!(int8_sums, "tdpbusd");
tiles!(bf16_sums, "tdpbf16ps");

/// 1 to 32 rows times one or two panels.
///
/// # Safety
/// As [`product`](super::int8::product) where [`is_available`]; `quads` is a multiple of 16.
pub unsafe fn int8_product(p: &int8::Product, tile: Tile) {
    let depth = p.quads * QUAD;
    // SAFETY: passed on.
    unsafe {
        let factors = Factors {
            a: p.a.add(tile.from * depth),
            rows: tile.rows,
            b: p.b.cast(),
            panel_stride: p.panel_stride,
            panels: p.panels,
            depth,
        };
        finish(p, tile, &int8_sums(&factors));
    }
}

/// 1 to 32 rows times one or two panels.
///
/// # Safety
/// As [`product`](super::bf16::product) where [`is_available`]; `pairs` is a multiple of 16.
pub unsafe fn bf16_product(p: &bf16::Product, tile: Tile) {
    let depth = p.pairs * bf16::PAIR * size_of::<u16>();
    // SAFETY: passed on.
    unsafe {
        let factors = Factors {
            a: p.a.cast::<u8>().add(tile.from * depth),
            rows: tile.rows,
            b: p.b.cast(),
            panel_stride: p.panel_stride * size_of::<u16>(),
            panels: p.panels,
            depth,
        };
        finish_bf16(p, tile, &bf16_sums(&factors));
    }
}

/// Adds the bias, rounds where asked for, and stores.
#[target_feature(enable = "avx512f")]
unsafe fn finish_bf16(p: &bf16::Product, tile: Tile, sums: &Sums) {
    // SAFETY: indices stay within the bounds that `product` asks for.
    unsafe {
        for n in 0..p.panels {
            let bias = _mm512_loadu_ps(p.bias.add(n * PANEL));
            for r in 0..tile.rows {
                let sum = _mm512_load_ps(sums.0[r][n * PANEL..].as_ptr().cast());
                let c = p.c.wrapping_add((tile.from + r) * p.c_stride + n * PANEL);
                _mm512_storeu_ps(c, _mm512_add_ps(sum, bias));
            }
        }
        bf16::x86::round_tile(p, tile);
    }
}

/// Subtracts, scales, adds the bias and stores.
#[target_feature(enable = "avx512f")]
unsafe fn finish(p: &int8::Product, tile: Tile, sums: &Sums) {
    // SAFETY: indices stay within the bounds that `product` asks for.
    unsafe {
        for n in 0..p.panels {
            let offset = _mm512_loadu_si512(p.offsets.add(n * PANEL).cast());
            let scale = _mm512_loadu_ps(p.column_scales.add(n * PANEL));
            let bias = _mm512_loadu_ps(p.bias.add(n * PANEL));
            for r in 0..tile.rows {
                let row = tile.from + r;
                let sum = _mm512_load_si512(sums.0[r][n * PANEL..].as_ptr().cast());
                let value = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(sum, offset)), scale);
                let value = _mm512_fmadd_ps(value, _mm512_set1_ps(*p.row_scales.add(row)), bias);
                _mm512_storeu_ps(p.c.wrapping_add(row * p.c_stride + n * PANEL), value);
            }
        }
    }
}
