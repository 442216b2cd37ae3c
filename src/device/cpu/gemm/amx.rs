//! INT8 and BF16 matmuls on AMX tiles (Intel, Architecture Instruction Set Extensions Programming
//! Reference, chapter 3).
//!
//! A tile is 16 rows of 64 bytes. Two tiles of activations times two panels of weights use all
//! eight tile registers: four for accumulators and two for each operand. The panel layout of
//! [`int8`] is that of AMX's right operand: 64 values of k of a panel are one tile. In the layout
//! of [`bf16`], 32 values of k are one tile. `tdpbusd` multiplies unsigned by signed bytes, so its
//! sums are the same integers as those of `vpdpbusd`.
//!
//! Rust's intrinsics for AMX are unstable. All instructions from loading the tile configuration to
//! releasing the tiles are in one `asm!` block: only this guarantees that the tile registers keep
//! their contents.

#![expect(unsafe_code, reason = "AMX has no stable intrinsics")]

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::sync::OnceLock;

use super::int8::{QUAD, RowTile};
use super::tile::PANEL;
use super::{bf16, int8};

/// Rows of a tile, and bytes of each row.
const TILE_ROWS: usize = 16;
const ROW_BYTES: usize = 64;

/// Whether the processor has AMX-INT8 and AMX-BF16 and the system lets this process use them.
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
    let has_amx = __cpuid_count(7, 0).edx & (BF16 | TILE | INT8) == BF16 | TILE | INT8;
    has_amx && enabled & TILE_STATE == TILE_STATE
}

/// Requests permission to use the tile registers, which Linux grants only on request.
#[cfg(target_os = "linux")]
fn system_permits() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: the call takes two numbers and only changes the permissions of this process.
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
    /// Tiles 0 to 3 hold accumulators, 4 and 5 activations, 6 and 7 weights. In tiles 0 to 5, even
    /// tiles have `upper` rows and odd tiles `lower` rows.
    fn new(upper: u8, lower: u8) -> Configuration {
        let full = TILE_ROWS as u8;
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

/// Results of up to 32 rows by two panels: integers, or the bits of F32.
#[repr(C, align(64))]
struct Accumulators([[i32; 2 * PANEL]; 2 * TILE_ROWS]);

/// The operands of a matmul, measured in bytes: 1 to 32 rows, and one or two panels. A 32-bit lane
/// holds four INT8 or two BF16 values of k.
struct AmxOperands {
    /// First of the rows, which are contiguous.
    a: *const u8,
    rows: usize,
    b: *const u8,
    panel_stride: usize,
    panels: usize,
    /// Bytes per row, a multiple of [`ROW_BYTES`].
    depth: usize,
}

/// Tile configuration, operand addresses and remaining iterations of the kernel's loop.
struct LoopState {
    configuration: Configuration,
    a: *const u8,
    a_lower: *const u8,
    b: *const u8,
    b_second: *const u8,
    steps: usize,
}

impl LoopState {
    fn new(operands: &AmxOperands) -> LoopState {
        debug_assert!(
            operands.rows <= 2 * TILE_ROWS
                && (1..=2).contains(&operands.panels)
                && operands.depth.is_multiple_of(ROW_BYTES)
        );
        let upper = operands.rows.min(TILE_ROWS);
        let lower = operands.rows - upper;
        LoopState {
            // AMX rejects a tile of zero rows. Without a lower half, the lower tiles have one row,
            // whose results are ignored.
            configuration: Configuration::new(upper as u8, lower.max(1) as u8),
            a: operands.a,
            // Without a lower half or a second panel, the upper half or first panel is read
            // instead, and the results are ignored.
            a_lower: operands
                .a
                .wrapping_add(if lower > 0 { TILE_ROWS * operands.depth } else { 0 }),
            b: operands.b,
            b_second: operands
                .b
                .wrapping_add(if operands.panels == 2 { operands.panel_stride } else { 0 }),
            steps: operands.depth / ROW_BYTES,
        }
    }
}

/// Defines a function that multiplies the [`AmxOperands`] with the instruction `$instruction`. It writes the sums of these rows: zeroing all
/// of them before would take a thirtieth of the time.
macro_rules! amx_kernel {
    ($name:ident, $instruction:literal) => {
        /// # Safety
        /// All pointers of [`AmxOperands`] are valid, and [`is_available`].
        unsafe fn $name(operands: &AmxOperands, sums: &mut MaybeUninit<Accumulators>) {
            let state = LoopState::new(operands);
            if state.steps == 0 {
                sums.write(Accumulators([[0; 2 * PANEL]; 2 * TILE_ROWS]));
                return;
            }
            let sums: *mut i32 = sums.as_mut_ptr().cast();
            // SAFETY: the caller guarantees these rows and panels.
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
                    concat!($instruction, " tmm0, tmm4, tmm6"),
                    "tileloadd tmm5, [{a_lower} + {a_stride}*1]",
                    concat!($instruction, " tmm1, tmm5, tmm6"),
                    "tileloadd tmm7, [{b_second} + {row}*1]",
                    concat!($instruction, " tmm2, tmm4, tmm7"),
                    concat!($instruction, " tmm3, tmm5, tmm7"),
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
                    configuration = in(reg) &state.configuration,
                    a = inout(reg) state.a => _,
                    a_lower = inout(reg) state.a_lower => _,
                    a_stride = in(reg) operands.depth,
                    b = inout(reg) state.b => _,
                    b_second = inout(reg) state.b_second => _,
                    row = in(reg) ROW_BYTES,
                    steps = inout(reg) state.steps => _,
                    sums = in(reg) sums,
                    sums_lower = in(reg) sums.add(TILE_ROWS * 2 * PANEL),
                    sums_stride = in(reg) 2 * PANEL * size_of::<i32>(),
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }
    };
}

amx_kernel!(int8_sums, "tdpbusd");
amx_kernel!(bf16_sums, "tdpbf16ps");

/// Multiplies 1 to 32 rows by one or two panels.
///
/// # Safety
/// As [`matmul`](super::int8::matmul), and [`is_available`]; `quads` is a multiple of 16.
pub(crate) unsafe fn int8_matmul(p: &int8::Int8Gemm, tile: RowTile) {
    let depth = p.quads * QUAD;
    // SAFETY: the caller upholds the same contract.
    unsafe {
        let operands = AmxOperands {
            a: p.a.add(tile.first_row * depth),
            rows: tile.rows,
            b: p.b.cast(),
            panel_stride: p.panel_stride,
            panels: p.panels,
            depth,
        };
        let mut sums = MaybeUninit::uninit();
        int8_sums(&operands, &mut sums);
        store_int8(p, tile, sums.as_ptr());
    }
}

/// Multiplies 1 to 32 rows by one or two panels.
///
/// # Safety
/// As [`matmul`](super::bf16::matmul), and [`is_available`]; `pairs` is a multiple of 16.
pub(crate) unsafe fn bf16_matmul(p: &bf16::Bf16Gemm, tile: RowTile) {
    let depth = p.pairs * bf16::PAIR * size_of::<u16>();
    // SAFETY: the caller upholds the same contract.
    unsafe {
        let operands = AmxOperands {
            a: p.a.cast::<u8>().add(tile.first_row * depth),
            rows: tile.rows,
            b: p.b.cast(),
            panel_stride: p.panel_stride * size_of::<u16>(),
            panels: p.panels,
            depth,
        };
        let mut sums = MaybeUninit::uninit();
        bf16_sums(&operands, &mut sums);
        store_bf16(p, tile, sums.as_ptr());
    }
}

/// Adds the bias, rounds if `p.round_to_bf16` is set, and stores.
#[target_feature(enable = "avx512f")]
unsafe fn store_bf16(p: &bf16::Bf16Gemm, tile: RowTile, sums: *const Accumulators) {
    // SAFETY: indices stay within the bounds that `matmul` requires.
    unsafe {
        for n in 0..p.panels {
            let bias = _mm512_loadu_ps(p.bias.add(n * PANEL));
            for r in 0..tile.rows {
                let sum = _mm512_load_ps((&raw const (*sums).0[r][n * PANEL]).cast());
                let c = p.c.wrapping_add((tile.first_row + r) * p.c_stride + n * PANEL);
                _mm512_storeu_ps(c, _mm512_add_ps(sum, bias));
            }
        }
        bf16::x86::round_tile(p, tile);
    }
}

/// Subtracts the offsets, scales, adds the bias and stores.
#[target_feature(enable = "avx512f")]
unsafe fn store_int8(p: &int8::Int8Gemm, tile: RowTile, sums: *const Accumulators) {
    // SAFETY: indices stay within the bounds that `matmul` requires.
    unsafe {
        for n in 0..p.panels {
            let offset = _mm512_loadu_si512(p.offsets.add(n * PANEL).cast());
            let scale = _mm512_loadu_ps(p.column_scales.add(n * PANEL));
            let bias = _mm512_loadu_ps(p.bias.add(n * PANEL));
            for r in 0..tile.rows {
                let row = tile.first_row + r;
                let sum = _mm512_load_si512((&raw const (*sums).0[r][n * PANEL]).cast());
                let value = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(sum, offset)), scale);
                let value = _mm512_fmadd_ps(value, _mm512_set1_ps(*p.row_scales.add(row)), bias);
                _mm512_storeu_ps(p.c.wrapping_add(row * p.c_stride + n * PANEL), value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    //! A software model of the instructions, after Intel's manual (Intel 64 and IA-32 Architectures
    //! Software Developer's Manual, volume 2: LDTILECFG, TILELOADD, TDPBUSD, TDPBF16PS). It runs on
    //! every processor, with the layouts that the kernel's loop reads.

    use super::*;
    use crate::device::cpu::testing::{lacks, numbers};

    /// A tile register: 16 rows of 64 bytes.
    type Register = [[u8; ROW_BYTES]; TILE_ROWS];

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
            // LDTILECFG faults if rows or bytes are zero or exceed the limits of palette 1.
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
                registers: [[[0; ROW_BYTES]; TILE_ROWS]; 8],
            }
        }

        /// TILELOADD: loads each configured row; the rest of the register is zero.
        unsafe fn load(&mut self, tile: usize, from: *const u8, stride: usize) {
            self.registers[tile] = [[0; ROW_BYTES]; TILE_ROWS];
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

        /// `c[m][n] = instruction(c[m][n], a[m][k], b[k][n])` for each k in order, on doublewords.
        fn products(&mut self, [c, a, b]: [usize; 3], instruction: impl Fn([u8; 4], [u8; 4], [u8; 4]) -> [u8; 4]) {
            let rows = self.configuration.rows;
            let words = |tile: usize| usize::from(self.configuration.row_bytes[tile]) / 4;
            // TDP* faults unless the shapes fit.
            assert_eq!((rows[c], words(c), usize::from(rows[b])), (rows[a], words(b), words(a)));
            for m in 0..usize::from(rows[c]) {
                for k in 0..words(a) {
                    for n in 0..words(c) {
                        let sum = instruction(self.word(c, m, n), self.word(a, m, k), self.word(b, k, n));
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

    /// TDPBF16PS: two products of BF16. Rounding and flushing of the real instruction are not
    /// modelled, since all sums in these tests are exact.
    fn tdpbf16ps(c: [u8; 4], a: [u8; 4], b: [u8; 4]) -> [u8; 4] {
        let number = |word: [u8; 4], i: usize| {
            f32::from_bits(u32::from(u16::from_le_bytes([word[2 * i], word[2 * i + 1]])) << 16)
        };
        let products = [0, 1].map(|i| number(a, i) * number(b, i));
        (f32::from_le_bytes(c) + (products[0] + products[1])).to_le_bytes()
    }

    /// The loop of [`amx_kernel`] with a function in place of its instruction.
    unsafe fn run_model(
        operands: &AmxOperands,
        instruction: impl Fn([u8; 4], [u8; 4], [u8; 4]) -> [u8; 4] + Copy,
    ) -> Accumulators {
        let mut state = LoopState::new(operands);
        let configuration = LoopState::new(operands).configuration;
        let mut tiles = AmxTiles::new(&configuration);
        let mut sums = Accumulators([[0; 2 * PANEL]; 2 * TILE_ROWS]);
        for _ in 0..state.steps {
            // SAFETY: as the caller guarantees.
            unsafe {
                tiles.load(4, state.a, operands.depth);
                tiles.load(6, state.b, ROW_BYTES);
                tiles.load(5, state.a_lower, operands.depth);
                tiles.load(7, state.b_second, ROW_BYTES);
            }
            for registers in [[0, 4, 6], [1, 5, 6], [2, 4, 7], [3, 5, 7]] {
                tiles.products(registers, instruction);
            }
            for (at, bytes) in [
                (&mut state.a, 64),
                (&mut state.a_lower, 64),
                (&mut state.b, 1024),
                (&mut state.b_second, 1024),
            ] {
                *at = at.wrapping_add(bytes);
            }
        }
        for (tile, row, column) in [(0, 0, 0), (1, TILE_ROWS, 0), (2, 0, PANEL), (3, TILE_ROWS, PANEL)] {
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
        fn operands(&self) -> AmxOperands {
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
        fn offset(&self, n: usize, i: usize) -> usize {
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

    /// Byte `i` of a sequence of BF16 numbers, low byte first. The numbers have few significant
    /// bits, so that F32 sums are exact in any order.
    fn few_bits(i: usize) -> u8 {
        let number = (numbers(9, 4096)[i / 2 % 4096] * 8.0).round() / 4.0;
        (number.to_bits() >> 16).to_le_bytes()[i % 2]
    }

    /// Compares the results of an INT8 and a BF16 implementation with sums in scalar code over the
    /// same bytes.
    fn check(int8: impl Fn(&AmxOperands) -> Accumulators, bf16: impl Fn(&AmxOperands) -> Accumulators) {
        let random = numbers(3, 8192);
        for case in cases(|i| (random[i % 8192] * 128.0 + 128.0) as u8) {
            let sums = int8(&case.operands());
            for (r, n) in (0..case.rows).flat_map(|r| (0..case.panels * PANEL).map(move |n| (r, n))) {
                let product =
                    |i: usize| i32::from(case.a[r * case.depth + i]) * i32::from(case.b[case.offset(n, i)] as i8);
                let want: i32 = (0..case.depth).map(product).sum();
                assert_eq!(
                    sums.0[r][n], want,
                    "{} rows, {} panels, {} bytes at ({r}, {n})",
                    case.rows, case.panels, case.depth
                );
            }
        }
        // A BF16 number starts at an even byte of a row in the left operand, and at an even byte of
        // a column's four bytes in the right operand.
        let table: Vec<u8> = (0..8192).map(few_bits).collect();
        for case in cases(|i| table[i % 8192]) {
            let case = aligned(case, &table);
            let sums = bf16(&case.operands());
            let number =
                |low: u8, high: u8| f64::from(f32::from_bits(u32::from(u16::from_le_bytes([low, high])) << 16));
            for (r, n) in (0..case.rows).flat_map(|r| (0..case.panels * PANEL).map(move |n| (r, n))) {
                let product = |i: usize| {
                    let a = &case.a[r * case.depth + i..];
                    number(a[0], a[1]) * number(case.b[case.offset(n, i)], case.b[case.offset(n, i + 1)])
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
    fn the_software_model_gives_correct_sums() {
        // SAFETY: each case's arrays have the sizes that its fields state.
        check(
            |operands| unsafe { run_model(operands, tdpbusd) },
            |operands| unsafe { run_model(operands, tdpbf16ps) },
        );
    }

    #[test]
    fn the_processor_gives_correct_sums() {
        if !is_available() {
            let name = "device::cpu::gemm::amx::tests::the_processor_gives_correct_sums";
            return lacks(name, "AMX");
        }
        /// The sums that a kernel writes; others are zeros.
        fn sums_of(multiply: impl FnOnce(&mut MaybeUninit<Accumulators>)) -> Accumulators {
            let mut sums = MaybeUninit::zeroed();
            multiply(&mut sums);
            // SAFETY: zeros are numbers.
            unsafe { sums.assume_init() }
        }
        // SAFETY: each case's arrays have the sizes that its fields state, and the processor has
        // AMX.
        check(
            |operands| sums_of(|sums| unsafe { int8_sums(operands, sums) }),
            |operands| sums_of(|sums| unsafe { bf16_sums(operands, sums) }),
        );
    }
}
