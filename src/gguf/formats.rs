//! The number formats of tensors, and what their blocks hold.
//!
//! Numbers of a row are stored in blocks of 32 or 256 neighbours with a common factor, which may have
//! an offset beside it. In formats of 4 and 5 bits a byte holds the numbers `i` and `i + 16` of 32, the first in
//! the lower bits.

use half::{bf16, f16};
use rayon::prelude::*;

use super::k_formats;

/// Numbers of a small block.
const BLOCK: usize = 32;
/// Numbers of a large block.
pub(super) const LARGE: usize = 256;
/// Rows of a task are at least so many numbers.
const TASK_NUMBERS: usize = 1 << 14;

/// A number format that is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Format {
    F32,
    F16,
    Bf16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
    Iq4Nl,
    Iq4Xs,
    Mxfp4,
}

use Format::{Bf16, F16, F32, Iq4Nl, Iq4Xs, Mxfp4, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};

/// Each format with its number in files, its name, and a block's numbers and bytes.
const FORMATS: [(Format, u32, &str, usize, usize); 16] = [
    (F32, 0, "F32", 1, 4),
    (F16, 1, "F16", 1, 2),
    (Bf16, 30, "BF16", 1, 2),
    (Q4_0, 2, "Q4_0", BLOCK, 18),
    (Q4_1, 3, "Q4_1", BLOCK, 20),
    (Q5_0, 6, "Q5_0", BLOCK, 22),
    (Q5_1, 7, "Q5_1", BLOCK, 24),
    (Q8_0, 8, "Q8_0", BLOCK, 34),
    (Q2K, 10, "Q2_K", LARGE, 84),
    (Q3K, 11, "Q3_K", LARGE, 110),
    (Q4K, 12, "Q4_K", LARGE, 144),
    (Q5K, 13, "Q5_K", LARGE, 176),
    (Q6K, 14, "Q6_K", LARGE, 210),
    (Iq4Nl, 20, "IQ4_NL", BLOCK, 18),
    (Iq4Xs, 23, "IQ4_XS", LARGE, 136),
    (Mxfp4, 39, "MXFP4", BLOCK, 17),
];

/// Formats that are not read, by their numbers in files.
const OTHERS: [(u32, &str); 27] = [
    (9, "Q8_1"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (31, "Q4_0_4_4"),
    (32, "Q4_0_4_8"),
    (33, "Q4_0_8_8"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (36, "IQ4_NL_4_4"),
    (37, "IQ4_NL_4_8"),
    (38, "IQ4_NL_8_8"),
    (40, "NVFP4"),
    (41, "Q1_0"),
    (4, "Q4_2"),
    (5, "Q4_3"),
    (42, "Q2_0"),
];

/// What the codes of IQ4_NL and IQ4_XS stand for.
pub(super) const IQ4: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
/// Twice what the codes of MXFP4 stand for.
const FP4_TWICE: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

impl Format {
    /// The format with this number in files.
    ///
    /// # Errors
    /// It is none that is read.
    pub(super) fn of(number: u32) -> Result<Format, String> {
        if let Some((format, ..)) = FORMATS.iter().find(|(_, id, ..)| *id == number) {
            return Ok(*format);
        }
        let read: Vec<&str> = FORMATS.iter().map(|(_, _, name, ..)| *name).collect();
        let read = format!("{} are read", read.join(", "));
        Err(match OTHERS.iter().find(|(id, _)| *id == number) {
            Some((_, name)) => format!("is stored as {name}; {read}"),
            None => format!("is stored in a format of the number {number}; {read}"),
        })
    }

    fn entry(self) -> &'static (Format, u32, &'static str, usize, usize) {
        // Each format has an entry, as a test checks.
        FORMATS
            .iter()
            .find(|(format, ..)| *format == self)
            .unwrap_or(&FORMATS[0])
    }

    pub fn name(self) -> &'static str {
        self.entry().2
    }

    /// Numbers and bytes of a block.
    pub(super) fn block(self) -> (usize, usize) {
        let (_, _, _, numbers, bytes) = self.entry();
        (*numbers, *bytes)
    }

    /// Bytes of so many numbers. `None`: they are more than can be counted.
    pub(super) fn bytes(self, numbers: usize) -> Option<usize> {
        let (block, bytes) = self.block();
        (numbers / block)
            .checked_mul(bytes)
            .filter(|bytes| *bytes < isize::MAX as usize)
    }

    /// The numbers of rows of `columns` each, as the bytes of F32.
    pub fn to_f32(self, data: &[u8], columns: usize) -> Vec<u8> {
        let (block, bytes) = self.block();
        let row_bytes = columns / block * bytes;
        let rows = data.len().checked_div(row_bytes).unwrap_or(0);
        let mut out = vec![0; rows * columns * 4];
        let task_rows = (TASK_NUMBERS / columns.max(1)).max(1);
        let tasks = out.par_chunks_mut((task_rows * columns * 4).max(1));
        tasks
            .zip(data.par_chunks((task_rows * row_bytes).max(1)))
            .for_each(|(out, data)| {
                let mut numbers = [0.0; LARGE];
                let numbers = &mut numbers[..block];
                for (out, block) in out.chunks_exact_mut(block * 4).zip(data.chunks_exact(bytes)) {
                    self.read_block(block, numbers);
                    let places = out.as_chunks_mut::<4>().0.iter_mut();
                    places
                        .zip(&*numbers)
                        .for_each(|(place, number)| *place = number.to_le_bytes());
                }
            });
        out
    }

    /// The numbers of one block.
    fn read_block(self, data: &[u8], out: &mut [f32]) {
        let number = |at: usize| number(data, at);
        match self {
            F32 => out[0] = f32::from_le_bytes([data[0], data[1], data[2], data[3]]),
            F16 => out[0] = number(0),
            Bf16 => out[0] = bf16::from_le_bytes([data[0], data[1]]).to_f32(),
            Q4_0 => of_four_bits(&data[2..], out, |code| number(0) * (f32::from(code) - 8.0)),
            Q4_1 => of_four_bits(&data[4..], out, |code| number(0) * f32::from(code) + number(2)),
            Q5_0 => of_five_bits(&data[2..6], &data[6..], out, |code| {
                number(0) * (f32::from(code) - 16.0)
            }),
            Q5_1 => of_five_bits(&data[4..8], &data[8..], out, |code| {
                number(0) * f32::from(code) + number(2)
            }),
            Q8_0 => {
                let numbers = out.iter_mut().zip(&data[2..]);
                numbers.for_each(|(x, byte)| *x = f32::from(byte.cast_signed()) * number(0));
            }
            Iq4Nl => of_four_bits(&data[2..], out, |code| number(0) * f32::from(IQ4[usize::from(code)])),
            Mxfp4 => {
                let factor = half_of_power(data[0]);
                of_four_bits(&data[1..], out, |code| factor * f32::from(FP4_TWICE[usize::from(code)]));
            }
            Q2K => k_formats::q2(data, out),
            Q3K => k_formats::q3(data, out),
            Q4K => k_formats::q4(data, out),
            Q5K => k_formats::q5(data, out),
            Q6K => k_formats::q6(data, out),
            Iq4Xs => k_formats::iq4(data, out),
        }
    }
}

/// The F16 at a byte.
pub(super) fn number(data: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([data[at], data[at + 1]]).to_f32()
}

/// Numbers of four bits: those of the lower bits first.
pub(super) fn of_four_bits(codes: &[u8], out: &mut [f32], value: impl Fn(u8) -> f32) {
    let (low, high) = out.split_at_mut(codes.len());
    for ((code, low), high) in codes.iter().zip(low).zip(high) {
        *low = value(code & 15);
        *high = value(code >> 4);
    }
}

/// Numbers of five bits, whose highest ones are the bits of one word.
fn of_five_bits(highest: &[u8], codes: &[u8], out: &mut [f32], value: impl Fn(u8) -> f32) {
    let bit = |i: usize| (highest[i / 8] >> (i % 8) & 1) << 4;
    for (i, code) in codes.iter().enumerate() {
        out[i] = value(code & 15 | bit(i));
        out[i + codes.len()] = value(code >> 4 | bit(i + codes.len()));
    }
}

/// Half of 2 to the power of an exponent with an offset of 127.
fn half_of_power(exponent: u8) -> f32 {
    let bits = match u32::from(exponent) {
        // These are subnormal.
        exponent @ 0..2 => 0x0020_0000 << exponent,
        exponent => (exponent - 1) << 23,
    };
    f32::from_bits(bits)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(data: &[u8], format: Format, columns: usize) -> Vec<f32> {
        let bytes = format.to_f32(data, columns);
        bytes
            .as_chunks::<4>()
            .0
            .iter()
            .map(|x| f32::from_le_bytes(*x))
            .collect()
    }

    #[test]
    fn each_format_has_one_entry() {
        for (index, (format, number, name, block, bytes)) in FORMATS.iter().enumerate() {
            assert_eq!((Format::of(*number).unwrap(), format.name()), (*format, *name));
            assert_eq!((format.block(), *format as usize <= 15), ((*block, *bytes), true));
            assert_eq!(format.bytes(block * 3), Some(bytes * 3));
            assert!(
                !FORMATS[..index]
                    .iter()
                    .any(|other| other.1 == *number || other.2 == *name)
            );
            assert!(!OTHERS.iter().any(|other| other.0 == *number));
        }
    }

    #[test]
    fn small_blocks_have_a_factor_and_an_offset() {
        let [two, minus] = [f16::from_f32(2.0), f16::from_f32(-0.5)].map(f16::to_le_bytes);
        let codes: Vec<u8> = (0..16).map(|i| i << 4 | 3).collect();
        let four = of(&[&two[..], &codes].concat(), Q4_0, 32);
        assert_eq!((&four[..2], four[16], four[31]), (&[-10.0, -10.0][..], -16.0, 14.0));
        let one = of(&[&two[..], &minus, &codes].concat(), Q4_1, 32);
        assert_eq!((one[0], one[16], one[31]), (5.5, -0.5, 29.5));
        let highest = [1, 0, 0, 0x80];
        let five = of(&[&two[..], &highest, &codes].concat(), Q5_0, 32);
        assert_eq!((five[0], five[1], five[31]), (6.0, -26.0, 30.0));
        let five = of(&[&two[..], &minus, &highest, &codes].concat(), Q5_1, 32);
        assert_eq!((five[0], five[1], five[31]), (37.5, 5.5, 61.5));
        let eight: Vec<u8> = (0..32).map(|i| 0u8.wrapping_sub(i)).collect();
        let eight = of(&[&two[..], &eight].concat(), Q8_0, 32);
        assert_eq!((eight[0], eight[1], eight[31]), (0.0, -2.0, -62.0));
        let table = of(&[&two[..], &codes].concat(), Iq4Nl, 32);
        assert_eq!((table[0], table[16], table[31]), (-130.0, -254.0, 226.0));
        let fp4 = of(&[&[128][..], &codes].concat(), Mxfp4, 32);
        assert_eq!((fp4[0], fp4[17], fp4[23], fp4[31]), (3.0, 1.0, 12.0, -12.0));
        for exponent in [0u8, 1, 2, 127, 254] {
            let want = (f64::from(exponent) - 128.0).exp2() as f32;
            assert_eq!(half_of_power(exponent), want, "{exponent}");
        }
    }

    /// Blocks of random bits, and what the Python package `gguf` makes of them, bit by bit.
    #[test]
    fn blocks_are_those_of_the_reference() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/gguf_blocks.json");
        let made: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let made = made.as_object().unwrap();
        assert_eq!(made.len(), 13);
        for (name, of) in made {
            let format = Format::of(of["id"].as_u64().unwrap() as u32).unwrap();
            assert_eq!(format.name(), name);
            let rows = data_encoding::HEXLOWER
                .decode(of["rows"].as_str().unwrap().as_bytes())
                .unwrap();
            let numbers = format.to_f32(&rows, of["columns"].as_u64().unwrap() as usize);
            assert_eq!(numbers.len(), 6 * 4 * of["columns"].as_u64().unwrap() as usize);
            let hash = <sha2::Sha256 as sha2::Digest>::digest(&numbers);
            assert_eq!(
                data_encoding::HEXLOWER.encode(&hash),
                of["sha256"].as_str().unwrap(),
                "{name}"
            );
        }
    }

    /// Rows are read by several threads, each into its place.
    #[test]
    fn rows_keep_their_places() {
        let rows = 300;
        let data: Vec<u8> = (0..rows * 64).flat_map(|i| (i as f32).to_le_bytes()).collect();
        assert_eq!(F32.to_f32(&data, 64), data);
        let halves: Vec<u8> = (0..2000).flat_map(|i| bf16::from_f32(i as f32).to_le_bytes()).collect();
        let numbers = of(&halves, Bf16, 20);
        assert!((0..2000).all(|i| numbers[i] == bf16::from_f32(i as f32).to_f32()));
        let factors: Vec<u8> = (0..rows)
            .flat_map(|row| [&f16::from_f32(row as f32).to_le_bytes()[..], &[1; 32]].concat())
            .collect();
        let numbers = of(&factors, Q8_0, 32);
        assert!(
            numbers
                .chunks(32)
                .enumerate()
                .all(|(row, numbers)| numbers == [row as f32; 32])
        );
    }
}
