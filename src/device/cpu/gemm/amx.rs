//! The products of INT8 and BF16 on AMX tiles (Intel, Architecture Instruction Set Extensions Programming Reference, chapter 3).
//!
//! A tile is 16 rows of 64 bytes. Two tiles of activations times two panels of weights use all
//! eight tile registers: four for sums and two for each factor. The panel layout of
//! [`int8`] is that of AMX's right factor: 64 values of k of a panel are one tile. In
//! the layout of [`bf16`], 32 values of k are one tile. `tdpbusd` multiplies unsigned
//! by signed bytes, so its sums are the same integers as those of `vpdpbusd`.
//!
//! Rust's intrinsics for AMX are unstable. All instructions from loading the tile configuration to
//! releasing the tiles are in one `asm!` block: only then are the tile registers sure to keep their
//! contents.

#![expect(unsafe_code, reason = "AMX has no stable intrinsics")]

use std::arch::asm;
use std::arch::x86_64::*;
use std::sync::OnceLock;

use super::int8::{QUAD, RowTile};
use super::tile::PANEL;
use super::{bf16, int8};

/// Rows of a tile, and bytes of a row.
const ROWS: usize = 16;
const ROW_BYTES: usize = 64;

/// Whether the processor has AMX-INT8 and AMX-BF16 and the system lets this process use it.
pub(crate) fn is_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| has_instructions() && system_permits())
}

/// Whether the processor has AMX-TILE, AMX-INT8 and AMX-BF16 and the system has enabled tile state.
fn has_instructions() -> bool {
    const BF16: u32 = 1 << 22;
    const TILE: u32 = 1 << 24;
    const INT8: u32 = 1 << 25;
    const TILE_STATE: u64 = 0b11 << 17;
    if !is_x86_feature_detected!("xsave") || !is_x86_feature_detected!("avx512vnni") || __cpuid(0).eax < 7 {
        return false;
    }
    // SAFETY: a processor with XSAVE has XGETBV. Detection of AVX-512 above implies that the system
    // has enabled XGETBV.
    let enabled = unsafe { _xgetbv(0) };
    let has = __cpuid_count(7, 0).edx & (BF16 | TILE | INT8) == BF16 | TILE | INT8;
    has && enabled & TILE_STATE == TILE_STATE
}

/// Asks Linux for the tile registers' state, which is given only to processes that request it.
#[cfg(target_os = "linux")]
fn system_permits() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: the call takes two numbers and only changes what this process may use.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn system_permits() -> bool {
    false
}

/// The operand of `ldtilecfg`: palette 1, then bytes per row and rows of each of the eight tiles.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Configuration {
    /// Tiles 0 to 3 hold sums, 4 and 5 activations, 6 and 7 weights. In tiles 0 to 5, even tiles
    /// have `upper` rows and odd tiles `lower` rows.
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

/// Sums of up to 32 rows by two panels: integers, or the bits of F32.
#[repr(C, align(64))]
struct Sums([[i32; 2 * PANEL]; 2 * ROWS]);

/// The operands of a product, in bytes: 1 to 32 rows, and one or two panels. A 32-bit lane holds
/// four INT8 or two BF16 values of k.
struct AmxOperands {
    /// First row. The rows are contiguous.
    a: *const u8,
    rows: usize,
    b: *const u8,
    panel_stride: usize,
    panels: usize,
    /// Bytes per row, a multiple of [`ROW_BYTES`].
    depth: usize,
}

/// Configuration, start addresses and number of iterations of the loop.
struct Start {
    configuration: Configuration,
    a: *const u8,
    a_lower: *const u8,
    b: *const u8,
    b_second: *const u8,
    steps: usize,
}

impl Start {
    fn of(f: &AmxOperands) -> Start {
        debug_assert!(f.rows <= 2 * ROWS && (1..=2).contains(&f.panels) && f.depth.is_multiple_of(ROW_BYTES));
        let upper = f.rows.min(ROWS);
        let lower = f.rows - upper;
        Start {
            // AMX rejects a tile of zero rows. Without a lower half, the lower tiles have one row,
            // whose sums are ignored.
            configuration: Configuration::new(upper as u8, lower.max(1) as u8),
            a: f.a,
            // Without a lower half or a second panel, the first one is read in its place, and the
            // resulting sums are ignored.
            a_lower: f.a.wrapping_add(if lower > 0 { ROWS * f.depth } else { 0 }),
            b: f.b,
            b_second: f.b.wrapping_add(if f.panels == 2 { f.panel_stride } else { 0 }),
            steps: f.depth / ROW_BYTES,
        }
    }
}

/// Defines a function that multiplies the [`AmxOperands`] with the instruction `$product`.
macro_rules! tiles {
    ($name:ident, $product:literal) => {
        /// # Safety
        /// All memory that [`AmxOperands`] names is valid, and [`is_available`].
        unsafe fn $name(f: &AmxOperands) -> Sums {
            let mut sums = Sums([[0; 2 * PANEL]; 2 * ROWS]);
            let start = Start::of(f);
            if start.steps == 0 {
                return sums;
            }
            // SAFETY: rows and panels lie within what the caller vouches for.
            unsafe {
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
                    configuration = in(reg) &start.configuration,
                    a = inout(reg) start.a => _,
                    a_lower = inout(reg) start.a_lower => _,
                    a_stride = in(reg) f.depth,
                    b = inout(reg) start.b => _,
                    b_second = inout(reg) start.b_second => _,
                    row = in(reg) ROW_BYTES,
                    steps = inout(reg) start.steps => _,
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
pub(crate) unsafe fn int8_product(p: &int8::Int8Gemm, tile: RowTile) {
    let depth = p.quads * QUAD;
    // SAFETY: the caller upholds the same contract.
    unsafe {
        let factors = AmxOperands {
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
pub(crate) unsafe fn bf16_product(p: &bf16::Bf16Gemm, tile: RowTile) {
    let depth = p.pairs * bf16::PAIR * size_of::<u16>();
    // SAFETY: the caller upholds the same contract.
    unsafe {
        let factors = AmxOperands {
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

/// Adds the bias, rounds if `p.round` is set, and stores.
#[target_feature(enable = "avx512f")]
unsafe fn finish_bf16(p: &bf16::Bf16Gemm, tile: RowTile, sums: &Sums) {
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

/// Subtracts the offsets, scales, adds the bias and stores.
#[target_feature(enable = "avx512f")]
unsafe fn finish(p: &int8::Int8Gemm, tile: RowTile, sums: &Sums) {
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

#[cfg(test)]
mod tests {
    //! A model of the instructions in plain code, after their operation in Intel's manual (Intel 64
    //! and IA-32 Architectures Software Developer's Manual, volume 2: LDTILECFG, TILELOADD,
    //! TDPBUSD, TDPBF16PS). It runs on every processor, over the layouts that the loop above reads.

    use super::*;
    use crate::device::cpu::testing::{lacks, numbers};

    /// A tile register: 16 rows of 64 bytes.
    type Register = [[u8; ROW_BYTES]; ROWS];

    /// The eight registers and their configuration.
    struct AmxTiles<'a> {
        configuration: &'a Configuration,
        registers: [Register; 8],
    }

    impl AmxTiles<'_> {
        fn new(configuration: &Configuration) -> AmxTiles<'_> {
            assert_eq!(
                (configuration.palette, configuration.start_row, configuration.reserved),
                (1, 0, [0; 14])
            );
            // LDTILECFG faults if rows or bytes exceed the limits of palette 1, or if one of them
            // is zero.
            for tile in 0..8 {
                let (rows, bytes) = (configuration.rows[tile], configuration.row_bytes[tile]);
                assert!(
                    (1..=16).contains(&rows) && (1..=64).contains(&bytes),
                    "tile {tile}: {rows} rows of {bytes}"
                );
            }
            assert!(configuration.rows[8..].iter().all(|rows| *rows == 0));
            AmxTiles {
                configuration,
                registers: [[[0; ROW_BYTES]; ROWS]; 8],
            }
        }

        /// TILELOADD: loads each configured row; the rest of the register is zero.
        unsafe fn load(&mut self, tile: usize, from: *const u8, stride: usize) {
            self.registers[tile] = [[0; ROW_BYTES]; ROWS];
            for row in 0..usize::from(self.configuration.rows[tile]) {
                for byte in 0..usize::from(self.configuration.row_bytes[tile]) {
                    // SAFETY: the caller passes valid memory for each row of the tile.
                    self.registers[tile][row][byte] = unsafe { *from.add(row * stride + byte) };
                }
            }
        }

        /// Doubleword `n` of row `m`.
        fn word(&self, tile: usize, m: usize, n: usize) -> [u8; 4] {
            self.registers[tile][m][n * 4..][..4].try_into().unwrap()
        }

        /// `c[m][n] = of(c[m][n], a[m][k], b[k][n])` for each k in order, on doublewords.
        fn products(&mut self, [c, a, b]: [usize; 3], of: impl Fn([u8; 4], [u8; 4], [u8; 4]) -> [u8; 4]) {
            let rows = self.configuration.rows;
            let words = |tile: usize| usize::from(self.configuration.row_bytes[tile]) / 4;
            // TDP* faults unless the shapes fit.
            assert_eq!((rows[c], words(c), usize::from(rows[b])), (rows[a], words(b), words(a)));
            for m in 0..usize::from(rows[c]) {
                for k in 0..words(a) {
                    for n in 0..words(c) {
                        let sum = of(self.word(c, m, n), self.word(a, m, k), self.word(b, k, n));
                        self.registers[c][m][n * 4..][..4].copy_from_slice(&sum);
                    }
                }
            }
        }
    }

    /// TDPBUSD: four products of an unsigned byte of `a` and a signed one of `b`.
    fn tdpbusd(c: [u8; 4], a: [u8; 4], b: [u8; 4]) -> [u8; 4] {
        let products = a.into_iter().zip(b).map(|(a, b)| i32::from(a) * i32::from(b as i8));
        products.fold(i32::from_le_bytes(c), i32::wrapping_add).to_le_bytes()
    }

    /// TDPBF16PS: two products of BF16. The instruction's rounding and flushing are not modelled,
    /// since the sums of these tests are exact.
    fn tdpbf16ps(c: [u8; 4], a: [u8; 4], b: [u8; 4]) -> [u8; 4] {
        let number =
            |of: [u8; 4], i: usize| f32::from_bits(u32::from(u16::from_le_bytes([of[2 * i], of[2 * i + 1]])) << 16);
        let products = [0, 1].map(|i| number(a, i) * number(b, i));
        (f32::from_le_bytes(c) + (products[0] + products[1])).to_le_bytes()
    }

    /// The loop of [`tiles`] with a function in place of its instruction.
    unsafe fn modelled(f: &AmxOperands, of: impl Fn([u8; 4], [u8; 4], [u8; 4]) -> [u8; 4] + Copy) -> Sums {
        let mut start = Start::of(f);
        let configuration = Start::of(f).configuration;
        let mut tiles = AmxTiles::new(&configuration);
        let mut sums = Sums([[0; 2 * PANEL]; 2 * ROWS]);
        for _ in 0..start.steps {
            // SAFETY: as the caller vouches.
            unsafe {
                tiles.load(4, start.a, f.depth);
                tiles.load(6, start.b, ROW_BYTES);
                tiles.load(5, start.a_lower, f.depth);
                tiles.load(7, start.b_second, ROW_BYTES);
            }
            for registers in [[0, 4, 6], [1, 5, 6], [2, 4, 7], [3, 5, 7]] {
                tiles.products(registers, of);
            }
            for (at, bytes) in [
                (&mut start.a, 64),
                (&mut start.a_lower, 64),
                (&mut start.b, 1024),
                (&mut start.b_second, 1024),
            ] {
                *at = at.wrapping_add(bytes);
            }
        }
        for (tile, row, column) in [(0, 0, 0), (1, ROWS, 0), (2, 0, PANEL), (3, ROWS, PANEL)] {
            for m in 0..usize::from(configuration.rows[tile]) {
                for n in 0..PANEL {
                    sums.0[row + m][column + n] = i32::from_le_bytes(tiles.word(tile, m, n));
                }
            }
        }
        sums
    }

    /// Pseudorandom bytes of rows and of panels. There is a gap after each panel.
    struct OperandCase {
        rows: usize,
        panels: usize,
        depth: usize,
        a: Vec<u8>,
        b: Vec<u8>,
    }

    impl OperandCase {
        fn factors(&self) -> AmxOperands {
            AmxOperands {
                a: self.a.as_ptr(),
                rows: self.rows,
                b: self.b.as_ptr(),
                panel_stride: self.stride(),
                panels: self.panels,
                depth: self.depth,
            }
        }

        fn stride(&self) -> usize {
            self.depth * PANEL + 64
        }

        /// Offset of byte `i` of column `n`. A panel is `[bytes of a row / 4][16][4]`.
        fn place(&self, n: usize, i: usize) -> usize {
            n / PANEL * self.stride() + i / 4 * PANEL * 4 + n % PANEL * 4 + i % 4
        }
    }

    fn cases(byte: impl Fn(usize) -> u8) -> impl Iterator<Item = OperandCase> {
        [1, 5, 15, 16, 17, 31, 32].into_iter().flat_map(move |rows| {
            [(1, 64), (2, 64), (1, 192), (2, 320)].map(|(panels, depth)| {
                let bytes = |seed: usize, count: usize| (0..count).map(|i| byte(i * 7 + seed)).collect();
                OperandCase {
                    rows,
                    panels,
                    depth,
                    a: bytes(1, rows * depth),
                    b: bytes(5, panels * (depth * PANEL + 64)),
                }
            })
        })
    }

    /// Byte `i` of a sequence of BF16 numbers, low byte first. They have few bits, so that F32 sums
    /// are exact in any order.
    fn few_bits(i: usize) -> u8 {
        let number = (numbers(9, 4096)[i / 2 % 4096] * 8.0).round() / 4.0;
        (number.to_bits() >> 16).to_le_bytes()[i % 2]
    }

    /// Compares the sums of two implementations, INT8 and BF16, with plain sums over the same
    /// bytes.
    fn check(int8: impl Fn(&AmxOperands) -> Sums, bf16: impl Fn(&AmxOperands) -> Sums) {
        let random = numbers(3, 8192);
        for case in cases(|i| (random[i % 8192] * 128.0 + 128.0) as u8) {
            let sums = int8(&case.factors());
            for (r, n) in (0..case.rows).flat_map(|r| (0..case.panels * PANEL).map(move |n| (r, n))) {
                let product =
                    |i: usize| i32::from(case.a[r * case.depth + i]) * i32::from(case.b[case.place(n, i)] as i8);
                let want: i32 = (0..case.depth).map(product).sum();
                assert_eq!(
                    sums.0[r][n], want,
                    "{} rows, {} panels, {} bytes at ({r}, {n})",
                    case.rows, case.panels, case.depth
                );
            }
        }
        // A BF16 number starts at an even byte of a row in the left factor, and at an even byte of
        // a column's four bytes in the right factor.
        let table: Vec<u8> = (0..8192).map(few_bits).collect();
        for case in cases(|i| table[i % 8192]) {
            let case = aligned(case, &table);
            let sums = bf16(&case.factors());
            let number =
                |low: u8, high: u8| f64::from(f32::from_bits(u32::from(u16::from_le_bytes([low, high])) << 16));
            for (r, n) in (0..case.rows).flat_map(|r| (0..case.panels * PANEL).map(move |n| (r, n))) {
                let product = |i: usize| {
                    let a = &case.a[r * case.depth + i..];
                    number(a[0], a[1]) * number(case.b[case.place(n, i)], case.b[case.place(n, i + 1)])
                };
                let want: f64 = (0..case.depth).step_by(2).map(product).sum();
                let got = f64::from(f32::from_bits(sums.0[r][n] as u32));
                assert_eq!(
                    got, want,
                    "{} rows, {} panels, {} bytes at ({r}, {n})",
                    case.rows, case.panels, case.depth
                );
            }
        }
    }

    /// The case with complete BF16 numbers of `table` in place of its bytes.
    fn aligned(mut case: OperandCase, table: &[u8]) -> OperandCase {
        for (seed, bytes) in [(6, &mut case.a), (40, &mut case.b)] {
            bytes
                .iter_mut()
                .enumerate()
                .for_each(|(i, byte)| *byte = table[(i / 2 * 14 + seed + i % 2) % table.len()]);
        }
        case
    }

    #[test]
    fn tiles_in_plain_code_give_the_plain_sums() {
        // SAFETY: each case's arrays have the sizes that its fields name.
        check(
            |f| unsafe { modelled(f, tdpbusd) },
            |f| unsafe { modelled(f, tdpbf16ps) },
        );
    }

    #[test]
    fn tiles_of_the_processor_give_the_plain_sums() {
        if !is_available() {
            let name = "device::cpu::amx::tests::tiles_of_the_processor_give_the_plain_sums";
            return lacks(name, "AMX");
        }
        // SAFETY: each case's arrays have the sizes that its fields name, and the processor has
        // AMX.
        check(|f| unsafe { int8_sums(f) }, |f| unsafe { bf16_sums(f) });
    }
}
