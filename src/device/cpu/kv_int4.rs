//! Keys and values in 4 bits, with one scale and one zero point per position and head: a number is
//! about its scale times the difference of its code, 0 to 15, and the zero point.
//!
//! Attention reads them as 8 bits, of the same scales: it [expands](Int4Pages::expand) a span's codes, once
//! for all queries of its task.
//!
//! The layout is that of [`Int8Pages`](super::kv::Int8Pages), in groups of 64 numbers: a byte has the
//! codes of two numbers 32 apart.
//!
//! Unused positions may have any content, as in 8 bits.
//!
//! See docs/decisions/119-four-bits-of-keys-and-values.md.

#![expect(unsafe_code, reason = "threads write heads of one array")]

use super::aligned::AlignedArray;
use super::gemm::int8::{OFFSET, QUAD};
use super::gemm::tile::PANEL;
use super::isa::{Isa, multiversion};
use super::kv::{
    KvSlot, PageScales, Regions, copy_within, for_each_head, for_each_token, head_block, key_and_value, padded,
};
use super::math::ROUND;
use super::step::Step;
use super::{BLOCK_TOKENS, Buffer, ExecContext, SharedMut};
use crate::device::KvPlace;
use crate::device::batch::BlockCopy;

/// Numbers of a group: of four dimensions and a block's positions, or of four positions and a panel's dimensions.
const GROUP: usize = QUAD * PANEL;
/// Its bytes.
const GROUP_BYTES: usize = GROUP / 2;
/// The largest code.
const CODE_MAX: i32 = 15;
/// A row whose numbers differ by less is stored as zeros, so that the inverse cannot overflow.
const RANGE_MIN: f32 = 1e-30;

pub(super) struct Int4Pages {
    /// `[stretch][kv_head][block][quads of dims][32]`, with head_dim rounded up to whole panels.
    keys: AlignedArray<u8>,
    /// `[stretch][kv_head][block][quads of positions][panels of dims][32]`.
    values: AlignedArray<u8>,
    pub scales: PageScales,
    /// As the scales.
    key_zeros: AlignedArray<u8>,
    value_zeros: AlignedArray<u8>,
}

/// Codes of a row, padded with zeros, its scale and its zero point.
struct CodedRow {
    codes: Vec<u8>,
    scale: f32,
    zero: u8,
}

impl CodedRow {
    fn new(len: usize) -> CodedRow {
        CodedRow {
            codes: vec![0; len],
            scale: 0.0,
            zero: 0,
        }
    }
}

/// Quantizes numbers from the smallest to the largest, both sides of zero. A row with a number that is not finite gets a scale of NaN, so that
/// the error reaches the logits.
#[inline(always)]
fn quantize(x: &[f32], row: &mut CodedRow) {
    let (mut low, mut high, mut largest) = (0.0f32, 0.0f32, 0u32);
    for v in x {
        low = if *v < low { *v } else { low };
        high = if *v > high { *v } else { high };
        largest = largest.max(v.abs().to_bits());
    }
    // Each by itself, since their difference may be infinite.
    let scale = high / CODE_MAX as f32 - low / CODE_MAX as f32;
    let inverse = if scale * (CODE_MAX as f32) < RANGE_MIN {
        0.0
    } else {
        1.0 / scale
    };
    row.scale = if !f32::from_bits(largest).is_finite() {
        f32::NAN
    } else if inverse == 0.0 {
        0.0
    } else {
        scale
    };
    let rounded = |v: f32| (v.mul_add(inverse, ROUND).to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let zero = rounded(-low).clamp(0, CODE_MAX);
    row.zero = zero as u8;
    let (codes, padding) = row.codes.split_at_mut(x.len());
    for (code, v) in codes.iter_mut().zip(x) {
        *code = rounded(*v).wrapping_add(zero).clamp(0, CODE_MAX) as u8;
    }
    padding.fill(zero as u8);
}

multiversion! {
    fn quantize_on(x: &[f32], row: &mut CodedRow) = quantize;
}

/// Sets number `at` of a group.
fn set(group: &mut [u8; GROUP_BYTES], at: usize, code: u8) {
    let byte = &mut group[at % GROUP_BYTES];
    *byte = match at / GROUP_BYTES {
        0 => *byte & 0xf0 | code,
        _ => *byte & 0x0f | code << 4,
    };
}

/// The numbers of groups of codes, each plus its place's offset.
#[inline(always)]
fn expand_groups(groups: &[[u8; GROUP_BYTES]], offsets: &[u8; GROUP], out: &mut [[u8; GROUP]]) {
    for (group, out) in groups.iter().zip(out) {
        for i in 0..GROUP_BYTES {
            out[i] = (group[i] & 0x0f).wrapping_add(offsets[i]);
            out[GROUP_BYTES + i] = (group[i] >> 4).wrapping_add(offsets[GROUP_BYTES + i]);
        }
    }
}

/// As [`expand_groups`], of a block: its keys, in whose groups a position has four neighbouring numbers, and its values, whose
/// groups have the numbers of four positions, one after the other.
#[inline(always)]
fn expand_block((keys, values): (&[u8], &[u8]), zeros: [&[u8]; 2], (key_bytes, value_bytes): (&mut [u8], &mut [u8])) {
    let [key_zeros, value_zeros] = zeros;
    let offsets = std::array::from_fn(|i| (OFFSET as u8).wrapping_sub(key_zeros[i / QUAD]));
    expand_groups(keys.as_chunks().0, &offsets, key_bytes.as_chunks_mut().0);
    let quads = values.len() / (BLOCK_TOKENS / QUAD);
    let parts = values.chunks_exact(quads).zip(value_bytes.chunks_exact_mut(2 * quads));
    for ((values, out), zeros) in parts.zip(value_zeros.as_chunks::<QUAD>().0) {
        let offsets = std::array::from_fn(|i| 0u8.wrapping_sub(zeros[i % QUAD]));
        expand_groups(values.as_chunks().0, &offsets, out.as_chunks_mut().0);
    }
}

multiversion! {
    fn expand_block_on(codes: (&[u8], &[u8]), zeros: [&[u8]; 2], out: (&mut [u8], &mut [u8])) = expand_block;
}

/// A span's keys and values in 8 bits, block by block, in the layout of [`Int8Pages`](super::kv::Int8Pages).
#[derive(Default)]
pub(crate) struct Expanded {
    /// With 128 added.
    pub keys: Vec<u8>,
    /// Two's complement.
    pub values: Vec<u8>,
}

impl Int4Pages {
    pub(super) fn new([keys, values, scales]: [usize; 3]) -> Int4Pages {
        Int4Pages {
            keys: AlignedArray::new(keys),
            values: AlignedArray::new(values),
            scales: PageScales::new(scales),
            key_zeros: AlignedArray::on_small_pages(scales),
            value_zeros: AlignedArray::on_small_pages(scales),
        }
    }

    pub(super) fn copy_blocks(&mut self, heads: usize, regions: Regions, copies: &[BlockCopy]) {
        copy_within(&mut self.keys, (heads, regions.keys), copies);
        copy_within(&mut self.values, (heads, regions.values), copies);
        self.scales.copy_blocks(heads, regions.scales, copies);
        for zeros in [&mut self.key_zeros, &mut self.value_zeros] {
            copy_within(zeros, (heads, regions.scales), copies);
        }
    }

    /// Expands these blocks of a head, one after the other.
    pub(super) fn expand(&self, isa: Isa, (regions, head): (Regions, usize), blocks: &[usize], out: &mut Expanded) {
        let len = 2 * regions.keys.len;
        out.keys.resize(blocks.len() * len, 0);
        out.values.resize(blocks.len() * len, 0);
        let outs = out.keys.chunks_exact_mut(len).zip(out.values.chunks_exact_mut(len));
        for (block, out) in blocks.iter().zip(outs) {
            let codes = (
                &self.keys[regions.keys.of(head, *block)],
                &self.values[regions.values.of(head, *block)],
            );
            let zeros = [&self.key_zeros, &self.value_zeros].map(|zeros| &zeros[regions.scales.of(head, *block)]);
            expand_block_on(isa, codes, zeros, out);
        }
    }

    pub(super) fn store(
        &mut self,
        ctx: ExecContext<'_>,
        regions: Regions,
        (step, place): (&Step, KvPlace),
        qkv: &Buffer,
    ) {
        let padded_dim = padded(place.heads.head_dim);
        let (keys, values) = (SharedMut::new(&mut self.keys), SharedMut::new(&mut self.values));
        let zeros = [&mut self.key_zeros, &mut self.value_zeros].map(|zeros| SharedMut::new(zeros));
        let scales = self.scales.shared();
        for_each_head(ctx, place, qkv.data.len(), |head| {
            let [mut key_row, mut value_row] = [(); 2].map(|()| CodedRow::new(padded_dim));
            for_each_token((step, place.table), qkv, |row, at| {
                let (KvSlot { block, slot, .. }, (key, value)) = (at, key_and_value(row, place, head));
                quantize_on(ctx.isa, key, &mut key_row);
                quantize_on(ctx.isa, value, &mut value_row);
                // SAFETY: this task alone reads and writes this head's blocks, which overlap no other head's.
                let (keys, values, [key_zeros, value_zeros]) = unsafe {
                    scales.set((regions.scales, head), at, [key_row.scale, value_row.scale]);
                    (
                        head_block(&keys, regions.keys.of(head, block)),
                        head_block(&values, regions.values.of(head, block)),
                        zeros
                            .each_ref()
                            .map(|zeros| head_block(zeros, regions.scales.of(head, block))),
                    )
                };
                (key_zeros[slot], value_zeros[slot]) = (key_row.zero, value_row.zero);
                for (quad, group) in key_row.codes.as_chunks::<QUAD>().0.iter().zip(keys.as_chunks_mut().0) {
                    for (i, code) in quad.iter().enumerate() {
                        set(group, slot * QUAD + i, *code);
                    }
                }
                let groups = &mut values.as_chunks_mut().0[slot / QUAD * (padded_dim / PANEL)..];
                for (d, code) in value_row.codes.iter().enumerate() {
                    set(&mut groups[d / PANEL], d % PANEL * QUAD + slot % QUAD, *code);
                }
            });
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::batch::StepBatch;
    use crate::device::cpu::kv::{KvPool, KvStore};
    use crate::device::cpu::testing::{buffer, ctx, numbers};
    use crate::device::{HeadShape, KvFormat, KvSpec};

    const HEADS: HeadShape = HeadShape {
        heads: 2,
        kv_heads: 2,
        head_dim: 18,
        value_in_key: None,
    };

    /// A pool with the keys and values of 20 tokens in blocks 2 and 33, the latter copied to 34.
    fn pool(isa: Isa, rows: &[f32]) -> KvPool {
        let mut batch = StepBatch::default();
        batch.push((0..20).map(|_| 0), 20, [2, 33]);
        let mut step = Step::new(vec![], &[(KvSpec::Full, HEADS)], false);
        step.upload(&batch);
        let mut pool = KvPool::new(&HEADS.alone(), 35, KvFormat::Int4);
        pool.store(
            ctx(isa),
            &step,
            KvPlace::alone(HEADS),
            &buffer(rows, 20, HEADS.qkv_width()),
        );
        pool.copy_blocks(&[BlockCopy { from: 33, to: 34 }]);
        pool
    }

    #[test]
    fn stored_rows_are_within_half_a_step_and_have_the_same_bits_on_all_sets() {
        let mut rows = numbers(1, 20 * HEADS.qkv_width());
        // Numbers of one sign, and numbers that are all zero.
        rows[..HEADS.qkv_width()].iter_mut().for_each(|x| *x = x.abs() + 1.0);
        rows[HEADS.qkv_width()..2 * HEADS.qkv_width()].fill(0.0);
        let mut first: Option<(Vec<u8>, Vec<u8>)> = None;
        for isa in Isa::available() {
            let pool = pool(isa, &rows);
            let KvStore::Int4(pages) = &pool.store else {
                panic!("4 bits")
            };
            let (regions, mut expanded) = (pool.regions(KvPlace::alone(HEADS)), Expanded::default());
            for (head, tail) in [(0, 33), (1, 33), (0, 34), (1, 34)] {
                pages.expand(isa, (regions, head), &[2, tail], &mut expanded);
                for position in 0..20 {
                    let (block, slot) = (position / 16, position % 16);
                    let scale_at = regions.scales.of(head, [2, tail][block]).start + slot;
                    for (d, part) in (0..18).flat_map(|d| [(d, 0), (d, 1)]) {
                        let stored = rows[position * HEADS.qkv_width() + (2 + 2 * part + head) * 18 + d];
                        let (byte, scale) = match part {
                            0 => {
                                let at = block * 32 * 16 + d / 4 * 64 + slot * 4 + d % 4;
                                (i32::from(expanded.keys[at]) - OFFSET, pages.scales.keys[scale_at])
                            }
                            _ => {
                                let at = block * 32 * 16 + slot / 4 * 32 * 4 + d * 4 + slot % 4;
                                (i32::from(expanded.values[at] as i8), pages.scales.values[scale_at])
                            }
                        };
                        let found = byte as f32 * scale;
                        assert!(
                            (found - stored).abs() <= 0.501 * scale,
                            "{isa:?} head {head} position {position} number {d}: {found} for {stored}"
                        );
                        assert!(scale <= 2.0 / 15.0 * 1.01, "{scale}");
                    }
                }
            }
            let found = (expanded.keys.clone(), expanded.values.clone());
            assert_eq!(*first.get_or_insert(found.clone()), found, "{isa:?}");
        }
    }

    #[test]
    fn rows_of_zeros_have_scale_0_and_rows_that_are_not_finite_nan() {
        for isa in Isa::available() {
            let of = |x: &[f32]| {
                let mut row = CodedRow::new(32);
                quantize_on(isa, x, &mut row);
                assert!(row.codes[x.len()..].iter().all(|code| *code == row.zero));
                (row.scale, row.codes[0] == row.zero)
            };
            let mut x = numbers(2, 20);
            assert_eq!(of(&[0.0; 20]), (0.0, true));
            assert_eq!(of(&[1e-38; 20]), (0.0, true));
            // The range of these is infinite.
            let (scale, _) = of(&[f32::MAX, -f32::MAX]);
            assert!((scale / (f32::MAX / 7.5) - 1.0).abs() < 1e-6, "{scale}");
            for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                x[7] = bad;
                assert!(of(&x).0.is_nan(), "{isa:?} {bad}");
            }
        }
    }
}
