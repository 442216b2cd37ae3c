//! Formats with blocks of 256 numbers: small groups in them have factors of their own, in few bits.

use super::formats::{IQ4, number, of_four_bits};

/// 16 groups of 16 numbers of 2 bits; a byte has the factor of a group in its lower bits and its offset
/// in the others.
pub(super) fn q2(data: &[u8], out: &mut [f32]) {
    let (groups, codes) = (&data[..16], &data[16..80]);
    let (factor, offset) = (number(data, 80), number(data, 82));
    for (group, out) in out.chunks_exact_mut(16).enumerate() {
        let factor = factor * f32::from(groups[group] & 15);
        let offset = offset * f32::from(groups[group] >> 4);
        let codes = of_two_bits(codes, group);
        out.iter_mut()
            .zip(codes)
            .for_each(|(x, code)| *x = factor * f32::from(code) - offset);
    }
}

/// 16 groups of 16 numbers of 3 bits, whose highest ones lie by themselves; factors have 6 bits.
pub(super) fn q3(data: &[u8], out: &mut [f32]) {
    let (highest, codes, factors) = (&data[..32], &data[32..96], &data[96..108]);
    let factor = number(data, 108);
    for (group, out) in out.chunks_exact_mut(16).enumerate() {
        let low = factors[group % 8] >> (4 * (group / 8)) & 15;
        let high = factors[8 + group % 4] >> (2 * (group / 4)) & 3;
        let factor = factor * (f32::from(low | high << 4) - 32.0);
        let highest = &highest[16 * (group % 2)..][..16];
        for ((x, code), byte) in out.iter_mut().zip(of_two_bits(codes, group)).zip(highest) {
            // A bit of 0 takes 4 away.
            let bit = byte >> (group / 2) & 1;
            *x = factor * (f32::from(code | bit << 2) - 4.0);
        }
    }
}

/// 8 groups of 32 numbers of 4 bits.
pub(super) fn q4(data: &[u8], out: &mut [f32]) {
    let codes = &data[16..];
    for (pair, out) in out.chunks_exact_mut(64).enumerate() {
        let codes = &codes[32 * pair..][..32];
        for (half, out) in out.chunks_exact_mut(32).enumerate() {
            let (factor, offset) = factor_and_offset(data, 2 * pair + half);
            let numbers = out.iter_mut().zip(codes);
            numbers.for_each(|(x, code)| *x = factor * f32::from(code >> (4 * half) & 15) - offset);
        }
    }
}

/// 8 groups of 32 numbers of 5 bits: bit `g` of 32 bytes is the highest of those of group `g`.
pub(super) fn q5(data: &[u8], out: &mut [f32]) {
    let (highest, codes) = (&data[16..48], &data[48..]);
    for (group, out) in out.chunks_exact_mut(32).enumerate() {
        let (factor, offset) = factor_and_offset(data, group);
        let codes = &codes[32 * (group / 2)..][..32];
        for ((x, code), byte) in out.iter_mut().zip(codes).zip(highest) {
            let code = code >> (4 * (group % 2)) & 15 | (byte >> group & 1) << 4;
            *x = factor * f32::from(code) - offset;
        }
    }
}

/// 16 groups of 16 numbers of 6 bits, with factors of 8 bits.
pub(super) fn q6(data: &[u8], out: &mut [f32]) {
    let (low, high, factors) = (&data[..128], &data[128..192], &data[192..208]);
    let factor = number(data, 208);
    for (group, out) in out.chunks_exact_mut(16).enumerate() {
        let factor = factor * f32::from(factors[group].cast_signed());
        for (i, x) in out.iter_mut().enumerate() {
            // Each half has four runs of 32: two in the lower bits of 64 bytes, two in the others.
            let at = 16 * group + i;
            let (half, run, column) = (at / 128, at % 128 / 32, at % 32);
            let low = low[64 * half + 32 * (run % 2) + column] >> (4 * (run / 2)) & 15;
            let high = high[32 * half + column] >> (2 * run) & 3;
            *x = factor * (f32::from(low | high << 4) - 32.0);
        }
    }
}

/// 8 groups of 32 codes of a table, with factors of 6 bits.
pub(super) fn iq4(data: &[u8], out: &mut [f32]) {
    let factor = number(data, 0);
    let high = u16::from_le_bytes([data[2], data[3]]);
    for (group, out) in out.chunks_exact_mut(32).enumerate() {
        let low = data[4 + group / 2] >> (4 * (group % 2)) & 15;
        let high = (high >> (2 * group) & 3) as u8;
        let factor = factor * (f32::from(low | high << 4) - 32.0);
        let codes = &data[8 + 16 * group..][..16];
        of_four_bits(codes, out, |code| factor * f32::from(IQ4[usize::from(code)]));
    }
}

/// The numbers of 2 bits of a group of 16. Each half of a block has four runs of 32 in its 32 bytes.
fn of_two_bits(codes: &[u8], group: usize) -> impl Iterator<Item = u8> {
    let (half, run, first) = (group / 8, group % 8 / 2, 16 * (group % 2));
    codes[32 * half + first..][..16]
        .iter()
        .map(move |byte| byte >> (2 * run) & 3)
}

/// The factor and the offset of a group in Q4_K and Q5_K, of 6 bits each times those of the block. The first
/// four groups have the lower bits of 4 bytes each; those of the others lie in 4 further bytes, and their highest
/// bits in what the first leave.
fn factor_and_offset(data: &[u8], group: usize) -> (f32, f32) {
    let bytes = &data[4..16];
    let (factor, offset) = if group < 4 {
        (bytes[group] & 63, bytes[group + 4] & 63)
    } else {
        let low = bytes[group + 4];
        (low & 15 | bytes[group - 4] >> 6 << 4, low >> 4 | bytes[group] >> 6 << 4)
    };
    (number(data, 0) * f32::from(factor), number(data, 2) * f32::from(offset))
}
