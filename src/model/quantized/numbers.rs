//! Formats of numbers of 8 bits and less.

use half::{bf16, f16};
use safetensors::Dtype;

/// The numbers of four bits (E2M1; Open Compute Project, Microscaling formats 1.0): a sign, two bits of
/// exponent, and one of fraction.
pub(in crate::model) const FP4: [f32; 16] = [
    0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
];

/// What each code of up to 8 bits stands for.
pub(super) type Table = [f32; 256];

/// Codes of `bits` bits that stand for whole numbers from `first` on.
pub(super) fn whole(bits: u32, first: f32) -> Table {
    let mask = (1u32 << bits) - 1;
    std::array::from_fn(|code| (code as u32 & mask) as f32 + first)
}

/// Codes of 8 bits that stand for whole numbers in two's complement.
pub(super) fn signed_bytes() -> Table {
    std::array::from_fn(|code| f32::from(code as u8 as i8))
}

/// Codes of four bits with a table of their own.
pub(super) fn of_four_bits(table: [f32; 16]) -> Table {
    std::array::from_fn(|code| table[code % 16])
}

/// Codes of 8 bits in E4M3 (Open Compute Project, 8-bit floating point specification 1.0).
pub(super) fn e4m3_table() -> Table {
    std::array::from_fn(|code| e4m3(code as u8))
}

/// A sign, four bits of exponent with bias 7, three of fraction. There are no infinities; all ones but
/// the sign are no number.
pub(in crate::model) fn e4m3(byte: u8) -> f32 {
    let (exponent, fraction) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
    let magnitude = match (exponent, byte & 7) {
        (15, 7) => f32::NAN,
        (0, _) => fraction / 8.0 * 2f32.powi(-6),
        _ => (1.0 + fraction / 8.0) * 2f32.powi(exponent - 7),
    };
    if byte & 0x80 == 0 { magnitude } else { -magnitude }
}

/// A power of 2 (E8M0; Open Compute Project, Microscaling formats 1.0). All ones are no number.
pub(super) fn e8m0(byte: u8) -> f32 {
    match byte {
        255 => f32::NAN,
        // 2^-127, which is below the smallest normal number.
        0 => f32::from_bits(0x0040_0000),
        _ => f32::from_bits(u32::from(byte) << 23),
    }
}

/// Whether [`floats`] reads the format.
pub(super) fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16 | Dtype::F8_E4M3)
}

/// Numbers of a format that [is a float's](is_float).
pub(super) fn floats(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        Dtype::F32 => bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        Dtype::F16 => {
            let numbers = bytes.as_chunks().0.iter();
            numbers.map(|b| f16::from_le_bytes(*b).to_f32()).collect()
        }
        Dtype::BF16 => {
            let numbers = bytes.as_chunks().0.iter();
            numbers.map(|b| bf16::from_le_bytes(*b).to_f32()).collect()
        }
        Dtype::F8_E4M3 => bytes.iter().map(|byte| e4m3(*byte)).collect(),
        other => unreachable!("{other:?} was refused when the checkpoint was checked"),
    }
}

/// Words of 32 bits.
pub(super) fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_format() {
        // The largest and smallest numbers that the specification names.
        for (byte, number) in [
            (0x7e, 448.0),
            (0x08, 0.015_625),
            (0x07, 0.875 * 0.015_625),
            (0x01, 0.001_953_125),
            (0x38, 1.0),
            (0xc4, -3.0),
            (0, 0.0),
        ] {
            assert_eq!(e4m3(byte), number, "{byte:08b}");
        }
        assert!(e4m3(0x7f).is_nan() && e4m3(0xff).is_nan());
        assert_eq!((0..=255).filter(|byte| e4m3(*byte).is_nan()).count(), 2);
    }

    #[test]
    fn powers_of_two_are_those_of_the_format() {
        assert_eq!(
            [0, 1, 126, 127, 254].map(e8m0),
            [-127, -126, -1, 0, 127].map(|x| 2f64.powi(x) as f32)
        );
        assert!(e8m0(255).is_nan());
    }

    #[test]
    fn codes_stand_for_their_numbers() {
        assert_eq!(
            [0, 7, 15, 0xf3].map(|code| whole(4, -8.0)[code]),
            [-8.0, -1.0, 7.0, -5.0]
        );
        assert_eq!(
            [0, 1, 127, 128, 255].map(|code| signed_bytes()[code]),
            [0.0, 1.0, 127.0, -128.0, -1.0]
        );
        assert_eq!([2, 0x1a].map(|code| of_four_bits(FP4)[code]), [1.0, -1.0]);
    }
}
