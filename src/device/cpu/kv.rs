//! Paged keys and values, in blocks of 16 positions, laid out as panels for the matrix
//! kernel.
//!
//! Keys: `[stretch][kv_head][block][head_dim][16 positions]`. Values:
//! `[stretch][kv_head][block][head_dim / 16][16 positions][16 dims]`, with head_dim rounded up to a
//! multiple of 16. Numbers are F32 or BF16. For INT8 see [`Int8Pages`], for 4 bits `kv_int4.rs`.
//!
//! In a stretch of [`STRETCH_BLOCKS`] a head's blocks lie one behind the other, which prefetching likes.
//! Since blocks come into use in order (`engine/blocks.rs`), the heads' blocks in use still lie
//! together, on few huge pages of a pool that is much larger.
//!
//! Where layers with heads of several shapes share a pool, or a block holds several layers, a block's
//! numbers lie together, so that blocks do not overlap whichever shape they are of:
//! `[block][layer][kv_head]`. A [`Region`] says where a head's numbers begin.
//!
//! Where a key has its value in it, in its first numbers, there are no values beside it. Attention
//! turns a block's keys into values as it reads them. In 8 or 4 bits such a pool has BF16: one scale for
//! a key of two parts, each as large as it is, would leave too little of the smaller one.
//!
//! Attention multiplies whole blocks, with weight zero at unused positions. Values at unused
//! positions must be finite, since `0 * NaN` is NaN. The step that begins a block therefore clears
//! the values at its unused positions, so that old values of the block's previous sequence cannot
//! affect the result.
//!
//! See docs/decisions/072-values-lie-token-by-token.md.

#![expect(unsafe_code, reason = "threads write heads of one array")]

use std::ops::Range;

use super::aligned::AlignedArray;
use super::gemm::int8::{OFFSET, QUAD};
use super::gemm::tile::{Bf16, Element, PANEL};
use super::kv_int4::Int4Pages;
use super::quantize::quantize_row_on;
use super::step::Step;
use super::{BLOCK_TOKENS, SPAN_TOKENS};
use super::{Buffer, ExecContext, SharedMut};
use crate::device::batch::BlockCopy;
use crate::device::{HeadShape, KvFormat, KvPlace, KvShape};

/// Blocks of a stretch.
const STRETCH_BLOCKS: usize = 32;

/// Keys and values, of one layer per block or of several.
pub struct KvPool {
    shapes: Vec<KvShape>,
    block_lens: Lens,
    pub(super) store: KvStore,
}

pub(super) enum KvStore {
    F32(KvPages<f32>),
    Bf16(KvPages<Bf16>),
    Int8(Int8Pages),
    Int4(Int4Pages),
}

pub(super) struct KvPages<E> {
    pub keys: AlignedArray<E>,
    pub values: AlignedArray<E>,
}

/// Keys and values in INT8 with one scale per position and head: a number is about its byte times
/// its scale.
///
/// Unused positions may have any content: attention masks their scores and multiplies their values
/// by exact zeros.
pub(super) struct Int8Pages {
    /// `[stretch][kv_head][block][quads of dims][16 positions][4]`, with 128 added to each byte. head_dim is
    /// rounded up as for values and padded with zeros (stored as 128).
    pub keys: AlignedArray<u8>,
    /// `[stretch][kv_head][block][quads of positions][dims][4]`.
    pub values: AlignedArray<i8>,
    pub scales: PageScales,
}

/// A scale per position and head: `[stretch][kv_head][block][16 positions]`.
pub(super) struct PageScales {
    pub keys: AlignedArray<f32>,
    pub values: AlignedArray<f32>,
    /// The maximum of the value scales from the span's first position to this position.
    pub values_max: AlignedArray<f32>,
}

/// [`PageScales`] that several threads set, each those of other heads.
pub(super) struct SharedScales<'a> {
    keys: SharedMut<'a, f32>,
    values: SharedMut<'a, f32>,
    values_max: SharedMut<'a, f32>,
}

impl PageScales {
    pub(super) fn new(len: usize) -> PageScales {
        PageScales {
            keys: AlignedArray::on_small_pages(len),
            values: AlignedArray::on_small_pages(len),
            values_max: AlignedArray::on_small_pages(len),
        }
    }

    pub(super) fn copy_blocks(&mut self, heads: usize, region: Region, copies: &[BlockCopy]) {
        for scales in [&mut self.keys, &mut self.values, &mut self.values_max] {
            copy_within(scales, (heads, region), copies);
        }
    }

    pub(super) fn shared(&mut self) -> SharedScales<'_> {
        SharedScales {
            keys: SharedMut::new(&mut self.keys),
            values: SharedMut::new(&mut self.values),
            values_max: SharedMut::new(&mut self.values_max),
        }
    }
}

impl SharedScales<'_> {
    /// Sets the scales of a head's key and value.
    ///
    /// # Safety
    /// No other thread reads or writes this head's scales.
    pub(super) unsafe fn set(&self, (region, head): (Region, usize), place: KvSlot, [key, value]: [f32; 2]) {
        let KvSlot { block, slot, previous } = place;
        // SAFETY: the caller upholds the same contract, and no slice outlives its statement.
        unsafe {
            let previous_max = previous.map_or(0.0, |(block, slot)| {
                head_block(&self.values_max, region.of(head, block))[slot]
            });
            head_block(&self.keys, region.of(head, block))[slot] = key;
            head_block(&self.values, region.of(head, block))[slot] = value;
            head_block(&self.values_max, region.of(head, block))[slot] = value.max(previous_max);
        }
    }
}

/// head_dim as stored in values: rounded up to whole panels.
pub(super) fn padded(head_dim: usize) -> usize {
    head_dim.next_multiple_of(PANEL)
}

/// Numbers of keys, of values and of their scales; in 4 bits, pairs of numbers.
#[derive(Debug, Clone, Copy)]
struct Lens {
    keys: usize,
    values: usize,
    /// Only in INT8 and in 4 bits.
    scales: usize,
}

impl Lens {
    /// Those of one head's block.
    fn of_head(heads: HeadShape, format: KvFormat) -> Lens {
        let values = padded(heads.head_dim) * BLOCK_TOKENS;
        match format {
            KvFormat::F32 | KvFormat::Bf16 => Lens {
                keys: heads.head_dim * BLOCK_TOKENS,
                values: if heads.value_in_key.is_some() { 0 } else { values },
                scales: 0,
            },
            // `Cpu::new` rejects FP8.
            KvFormat::Int8 | KvFormat::Fp8 => Lens {
                keys: values,
                values,
                scales: BLOCK_TOKENS,
            },
            KvFormat::Int4 => Lens {
                keys: values / 2,
                values: values / 2,
                scales: BLOCK_TOKENS,
            },
        }
    }

    /// Those of a block, which is large enough for the layers of each shape.
    fn of_block(shapes: &[KvShape], format: KvFormat) -> Lens {
        let most = |len: fn(Lens) -> usize| {
            let of_shape =
                |shape: &KvShape| shape.layers * shape.heads.kv_heads * len(Lens::of_head(shape.heads, format));
            shapes.iter().map(of_shape).max().unwrap_or(0)
        };
        Lens {
            keys: most(|lens| lens.keys),
            values: most(|lens| lens.values),
            scales: most(|lens| lens.scales),
        }
    }
}

/// The format of a pool's numbers, where `format` is asked for.
fn stored_format(shapes: &[KvShape], format: KvFormat) -> KvFormat {
    match format {
        KvFormat::Int8 | KvFormat::Int4 if shapes.iter().any(|shape| shape.heads.value_in_key.is_some()) => {
            KvFormat::Bf16
        }
        format => format,
    }
}

/// Where the blocks of a layer's heads lie in an array.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Region {
    first: usize,
    stretch_stride: usize,
    head_stride: usize,
    block_stride: usize,
    /// Numbers of one head's block.
    pub len: usize,
}

impl Region {
    /// A head's block.
    pub(super) fn of(&self, head: usize, block: usize) -> Range<usize> {
        let (stretch, block) = (block / STRETCH_BLOCKS, block % STRETCH_BLOCKS);
        let start = self.first + stretch * self.stretch_stride + head * self.head_stride + block * self.block_stride;
        start..start + self.len
    }
}

/// Where the blocks of a layer's heads lie in a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Regions {
    pub keys: Region,
    pub values: Region,
    pub scales: Region,
}

impl KvPool {
    pub(super) fn new(shapes: &[KvShape], blocks: usize, format: KvFormat) -> KvPool {
        let format = stored_format(shapes, format);
        let block_lens = Lens::of_block(shapes, format);
        let blocks = blocks.next_multiple_of(STRETCH_BLOCKS);
        let [keys, values, scales] = [block_lens.keys, block_lens.values, block_lens.scales].map(|len| len * blocks);
        let store = match format {
            KvFormat::F32 => KvStore::F32(KvPages {
                keys: AlignedArray::new(keys),
                values: AlignedArray::new(values),
            }),
            KvFormat::Bf16 => KvStore::Bf16(KvPages {
                keys: AlignedArray::new(keys),
                values: AlignedArray::new(values),
            }),
            KvFormat::Int8 | KvFormat::Fp8 => KvStore::Int8(Int8Pages {
                keys: AlignedArray::new(keys),
                values: AlignedArray::new(values),
                scales: PageScales::new(scales),
            }),
            KvFormat::Int4 => KvStore::Int4(Int4Pages::new([keys, values, scales])),
        };
        KvPool {
            shapes: shapes.to_vec(),
            block_lens,
            store,
        }
    }

    pub(super) fn block_bytes(shapes: &[KvShape], format: KvFormat) -> usize {
        let format = stored_format(shapes, format);
        let lens = Lens::of_block(shapes, format);
        let number = match format {
            KvFormat::F32 => size_of::<f32>(),
            KvFormat::Bf16 => size_of::<Bf16>(),
            KvFormat::Int8 | KvFormat::Fp8 | KvFormat::Int4 => 1,
        };
        let zeros = if format == KvFormat::Int4 { 2 * lens.scales } else { 0 };
        (lens.keys + lens.values) * number + 3 * lens.scales * size_of::<f32>() + zeros
    }

    fn format(&self) -> KvFormat {
        match &self.store {
            KvStore::F32(_) => KvFormat::F32,
            KvStore::Bf16(_) => KvFormat::Bf16,
            KvStore::Int8(_) => KvFormat::Int8,
            KvStore::Int4(_) => KvFormat::Int4,
        }
    }

    /// Whether the pool holds keys and values of heads that are turned, so that queries must be, too (`hadamard.rs`).
    pub(super) fn turns_heads(&self) -> bool {
        matches!(self.store, KvStore::Int4(_))
    }

    /// The heads of the pool's only layer per block, whose blocks lie head by head in a stretch. `None`:
    /// numbers lie block by block.
    fn only_heads(&self) -> Option<HeadShape> {
        match self.shapes[..] {
            [KvShape { heads, layers: 1 }] if heads.value_in_key.is_none() => Some(heads),
            _ => None,
        }
    }

    /// Where a layer's heads lie.
    ///
    /// # Panics
    /// The pool was made without layers of this shape.
    pub(super) fn regions(&self, place: KvPlace) -> Regions {
        let KvPlace { heads, part, .. } = place;
        let has = |shape: &KvShape| shape.heads == heads && part < shape.layers;
        assert!(self.shapes.iter().any(has), "{place:?} in a pool of {:?}", self.shapes);
        let (lens, is_alone) = (Lens::of_head(heads, self.format()), self.only_heads().is_some());
        let region = |len: usize, block_len: usize| Region {
            first: part * heads.kv_heads * len,
            stretch_stride: STRETCH_BLOCKS * block_len,
            head_stride: if is_alone { STRETCH_BLOCKS * len } else { len },
            block_stride: if is_alone { len } else { block_len },
            len,
        };
        Regions {
            keys: region(lens.keys, self.block_lens.keys),
            values: region(lens.values, self.block_lens.values),
            scales: region(lens.scales, self.block_lens.scales),
        }
    }

    /// Copies blocks `(from, to)`, in order.
    pub(super) fn copy_blocks(&mut self, copies: &[BlockCopy]) {
        let heads = self.only_heads().map_or(1, |heads| heads.kv_heads);
        let len = self.block_lens;
        // Numbers that lie block by block are those of a single head.
        let region = |block_len: usize| Region {
            first: 0,
            stretch_stride: STRETCH_BLOCKS * block_len,
            head_stride: STRETCH_BLOCKS * block_len / heads,
            block_stride: block_len / heads,
            len: block_len / heads,
        };
        let (keys, values, scales) = (region(len.keys), region(len.values), region(len.scales));
        match &mut self.store {
            KvStore::F32(pages) => pages.copy_blocks(heads, (keys, values), copies),
            KvStore::Bf16(pages) => pages.copy_blocks(heads, (keys, values), copies),
            KvStore::Int8(pages) => {
                copy_within(&mut pages.keys, (heads, keys), copies);
                copy_within(&mut pages.values, (heads, values), copies);
                pages.scales.copy_blocks(heads, scales, copies);
            }
            KvStore::Int4(pages) => {
                let regions = Regions { keys, values, scales };
                pages.copy_blocks(heads, regions, copies);
            }
        }
    }

    /// Stores the keys and values of all tokens of the step from their `[q][k][v]` rows, or `[q][k]`
    /// rows where keys have their values in them, at a layer's place.
    pub(super) fn store(&mut self, ctx: ExecContext<'_>, step: &Step, place: KvPlace, qkv: &Buffer) {
        let regions = self.regions(place);
        match &mut self.store {
            KvStore::F32(pages) => pages.store(ctx, regions, (step, place), qkv),
            KvStore::Bf16(pages) => pages.store(ctx, regions, (step, place), qkv),
            KvStore::Int8(pages) => pages.store(ctx, regions, (step, place), qkv),
            KvStore::Int4(pages) => pages.store(ctx, regions, (step, place), qkv),
        }
    }
}

/// Copies blocks of each of so many heads, in the order of `copies`.
pub(super) fn copy_within<E: Copy>(data: &mut [E], (heads, region): (usize, Region), copies: &[BlockCopy]) {
    for head in 0..heads {
        for &BlockCopy { from, to } in copies {
            let to = region.of(head, to as usize).start;
            data.copy_within(region.of(head, from as usize), to);
        }
    }
}

/// The location in the pool where a token of the step is stored.
#[derive(Clone, Copy)]
pub(super) struct KvSlot {
    pub block: usize,
    /// Position within the block.
    pub slot: usize,
    /// `(block, slot)` of the previous position. `None` if this position begins a span.
    pub previous: Option<(usize, usize)>,
}

/// Calls `store` for each token of the step, with the token's row of `qkv`.
pub(super) fn for_each_token<'a>(
    (step, table): (&Step, usize),
    qkv: &'a Buffer,
    mut store: impl FnMut(&'a [f32], KvSlot),
) {
    for (i, s) in step.batch.sequences.iter().enumerate() {
        let table = step.blocks(table, i as u32);
        let slot_of = |position: usize| (table[position / BLOCK_TOKENS] as usize, position % BLOCK_TOKENS);
        for q in 0..s.q_len as usize {
            let position = (s.kv_len - s.q_len) as usize + q;
            let (block, slot) = slot_of(position);
            let previous = (!position.is_multiple_of(SPAN_TOKENS)).then(|| slot_of(position - 1));
            store(qkv.row(s.first_token as usize + q), KvSlot { block, slot, previous });
        }
    }
}

/// A head's key and value in a row of `[q][k][v]`. The value is empty if the key has it in it.
pub(super) fn key_and_value(row: &[f32], place: KvPlace, head: usize) -> (&[f32], &[f32]) {
    let heads = place.heads;
    let head_part = |index: usize| &row[index * heads.head_dim..][..heads.head_dim];
    let value = match heads.value_in_key {
        None => head_part(heads.heads + heads.kv_heads + head),
        Some(_) => &[],
    };
    (head_part(heads.heads + head), value)
}

/// The numbers of a head's block.
///
/// # Safety
/// As of [`SharedMut::slice`].
#[allow(clippy::mut_from_ref)]
pub(super) unsafe fn head_block<'a, E>(all: &'a SharedMut<'_, E>, block: Range<usize>) -> &'a mut [E] {
    // SAFETY: the caller upholds the same contract.
    unsafe { all.slice(block.start, block.len()) }
}

/// Calls `store` for each head of `place`, on all threads if there are many numbers to store.
pub(super) fn for_each_head(ctx: ExecContext<'_>, place: KvPlace, numbers: usize, store: impl Fn(usize) + Sync) {
    let mut heads: Vec<usize> = (0..place.heads.kv_heads).collect();
    ctx.threads.parallel_for_each(numbers, &mut heads, |_, heads| {
        heads.for_each(|head| store(*head));
    });
}

impl Int8Pages {
    fn store(&mut self, ctx: ExecContext<'_>, regions: Regions, (step, place): (&Step, KvPlace), qkv: &Buffer) {
        let padded_dim = padded(place.heads.head_dim);
        let (keys, values) = (SharedMut::new(&mut self.keys), SharedMut::new(&mut self.values));
        let scales = self.scales.shared();
        for_each_head(ctx, place, qkv.data.len(), |head| {
            let mut bytes = vec![0u8; padded_dim];
            for_each_token((step, place.table), qkv, |row, at| {
                let (KvSlot { block, slot, .. }, (key, value)) = (at, key_and_value(row, place, head));
                let mut found = [0.0; 2];
                // SAFETY: this task alone reads and writes this head's blocks, which overlap no other head's.
                let (keys, values) = unsafe {
                    (
                        head_block(&keys, regions.keys.of(head, block)),
                        head_block(&values, regions.values.of(head, block)),
                    )
                };
                quantize_row_on(ctx.isa, key, &mut bytes, &mut found[0]);
                let quads = bytes.as_chunks::<QUAD>().0.iter();
                for (quad, out) in quads.zip(keys[slot * QUAD..].chunks_mut(BLOCK_TOKENS * QUAD)) {
                    out[..QUAD].copy_from_slice(quad);
                }
                quantize_row_on(ctx.isa, value, &mut bytes, &mut found[1]);
                let offset = slot / QUAD * padded_dim * QUAD + slot % QUAD;
                for (byte, out) in bytes.iter().zip(values[offset..].iter_mut().step_by(QUAD)) {
                    *out = byte.wrapping_sub(OFFSET as u8) as i8;
                }
                // SAFETY: as above.
                unsafe { scales.set((regions.scales, head), at, found) };
            });
        });
    }
}

impl<E: Element> KvPages<E> {
    fn copy_blocks(&mut self, heads: usize, (keys, values): (Region, Region), copies: &[BlockCopy]) {
        copy_within(&mut self.keys, (heads, keys), copies);
        copy_within(&mut self.values, (heads, values), copies);
    }

    fn store(&mut self, ctx: ExecContext<'_>, regions: Regions, (step, place): (&Step, KvPlace), qkv: &Buffer) {
        let (keys, values) = (SharedMut::new(&mut self.keys), SharedMut::new(&mut self.values));
        for_each_head(ctx, place, qkv.data.len(), |head| {
            // SAFETY: this task alone reads and writes this head's blocks, which overlap no other head's.
            let key_block = |block: usize| unsafe { head_block(&keys, regions.keys.of(head, block)) };
            // SAFETY: as above.
            let value_block = |block: usize| unsafe { head_block(&values, regions.values.of(head, block)) };
            for &(block, used) in &step.new_tail_blocks[place.table] {
                for panel in value_block(block as usize).chunks_exact_mut(BLOCK_TOKENS * PANEL) {
                    panel[used as usize * PANEL..].fill(E::default());
                }
                if place.heads.value_in_key.is_some() {
                    for number in key_block(block as usize).chunks_exact_mut(BLOCK_TOKENS) {
                        number[used as usize..].fill(E::default());
                    }
                }
            }
            for_each_token((step, place.table), qkv, |row, KvSlot { block, slot, .. }| {
                let (key, value) = key_and_value(row, place, head);
                let out = &mut key_block(block)[slot..];
                for (d, x) in key.iter().enumerate() {
                    out[d * BLOCK_TOKENS] = E::narrow(*x);
                }
                let out = value_block(block);
                for (panel, x) in value.chunks(PANEL).enumerate() {
                    let offset = (panel * BLOCK_TOKENS + slot) * PANEL;
                    for (y, x) in out[offset..].iter_mut().zip(x) {
                        *y = E::narrow(*x);
                    }
                }
            });
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::batch::{StepBatch, StepSequence};
    use crate::device::cpu::Isa;
    use crate::device::cpu::testing::{buffer, ctx, numbers};
    use crate::device::{KvSpec, RopeSpec};

    #[test]
    fn rows_are_stored_and_the_rest_of_new_blocks_is_cleared() {
        let heads = HeadShape {
            heads: 2,
            kv_heads: 2,
            head_dim: 18,
            value_in_key: None,
        };
        let mut pool = KvPool::new(&heads.alone(), 35, KvFormat::F32);
        let KvStore::F32(pages) = &mut pool.store else {
            panic!("F32 pool")
        };
        pages.values.fill(f32::NAN);
        let mut step = Step::new(
            vec![RopeSpec {
                inverse_frequencies: vec![1.0; 9],
                scale: 1.0,
            }],
            &[(KvSpec::Full, heads)],
            false,
        );
        step.upload(&StepBatch {
            tokens: vec![0; 20],
            positions: (0..20).collect(),
            sequences: vec![StepSequence {
                first_token: 0,
                q_len: 20,
                kv_len: 20,
                first_block: 0,
                adapter: 0,
            }],
            block_tables: vec![vec![2, 33]],
            logits_at: vec![],
            ..StepBatch::default()
        });
        let rows = numbers(1, 20 * heads.qkv_width());
        let qkv = buffer(&rows, 20, heads.qkv_width());
        pool.store(ctx(Isa::Portable), &step, KvPlace::alone(heads), &qkv);
        pool.copy_blocks(&[BlockCopy { from: 33, to: 34 }]);
        let KvStore::F32(pages) = &pool.store else {
            panic!("F32 pool")
        };
        // The first stretch has both heads' blocks 0 to 31, the second the others.
        let place = |head: usize, block: usize| block / 32 * 64 + head * 32 + block % 32;
        for block_of_tail in [33, 34] {
            for head in 0..2 {
                for position in 0..20 {
                    let block = [2, block_of_tail][position / 16];
                    let slot = position % 16;
                    for d in 0..18 {
                        let key = pages.keys[(place(head, block) * 18 + d) * 16 + slot];
                        assert_eq!(key, qkv.row(position)[(2 + head) * 18 + d]);
                        let value = pages.values[((place(head, block) * 2 + d / 16) * 16 + slot) * 16 + d % 16];
                        assert_eq!(value, qkv.row(position)[(4 + head) * 18 + d]);
                    }
                }
                let tail = &pages.values[place(head, block_of_tail) * 32 * 16..][..32 * 16];
                assert!(
                    tail[4 * 16..16 * 16].iter().all(|x| *x == 0.0),
                    "rest of the block is cleared"
                );
            }
        }
        assert!(
            (0..35)
                .filter(|block| ![2, 33, 34].contains(block))
                .flat_map(|block| [place(0, block), place(1, block)])
                .all(|at| pages.values[at * 32 * 16..][..32 * 16].iter().all(|x| x.is_nan())),
            "other blocks are left alone"
        );
    }

    /// Layers with heads of two shapes take turns with the blocks of one pool.
    #[test]
    fn blocks_of_several_shapes_do_not_overlap() {
        let [small, large] = [(4, 2, 10), (4, 1, 34)].map(|(heads, kv_heads, head_dim)| HeadShape {
            heads,
            kv_heads,
            head_dim,
            value_in_key: None,
        });
        let shapes = [(small, 2), (large, 1)].map(|(heads, layers)| KvShape { heads, layers });
        let place = |heads, table, part| KvPlace { heads, table, part };
        let places = [place(small, 0, 0), place(small, 0, 1), place(large, 1, 0)];
        let mut batch = StepBatch::default();
        batch.push((0..20).map(|_| 0), 20, [0, 3]);
        batch.block_tables.push(vec![2, 1]);
        for format in [KvFormat::F32, KvFormat::Bf16, KvFormat::Int8, KvFormat::Int4] {
            let mut step = Step::new(vec![], &[small, large].map(|heads| (KvSpec::Full, heads)), false);
            step.upload(&batch);
            let mut pool = KvPool::new(&shapes, 5, format);
            let number = format.bits() as usize / 8;
            // Two layers with two heads of 10 numbers take the most keys, which INT8 rounds up to 16 as all
            // formats do values, and the most scales. In 4 bits there are zero points, too.
            let want = match format {
                KvFormat::Int8 => 16 * (2 * (2 * 2 * 16) + 3 * 4 * (2 * 2)),
                KvFormat::Int4 => 16 * (2 * 2 * 16 + (3 * 4 + 2) * (2 * 2)),
                _ => 16 * (2 * 2 * 10 + 2 * 2 * 16) * number,
            };
            assert_eq!(KvPool::block_bytes(&shapes, format), want, "{format:?}");
            let mut taken = std::collections::HashSet::new();
            for (i, place) in places.into_iter().enumerate() {
                let width = place.heads.qkv_width();
                let qkv = buffer(&numbers(i as u64 + 1, 20 * width), 20, width);
                pool.store(ctx(Isa::Portable), &step, place, &qkv);
                let regions = pool.regions(place);
                for block in &batch.block_tables[place.table] {
                    for head in 0..place.heads.kv_heads {
                        for (kind, region) in [regions.keys, regions.values, regions.scales].into_iter().enumerate() {
                            let numbers = region.of(head, *block as usize);
                            assert!(numbers.clone().all(|i| taken.insert((kind, i))), "{place:?} {block}");
                        }
                    }
                }
            }
            pool.copy_blocks(&[BlockCopy { from: 3, to: 4 }, BlockCopy { from: 1, to: 3 }]);
            let KvStore::F32(pages) = &pool.store else { continue };
            for (i, place) in places.into_iter().enumerate() {
                let (dim, kv_heads) = (place.heads.head_dim, place.heads.kv_heads);
                let width = place.heads.qkv_width();
                let rows = numbers(i as u64 + 1, 20 * width);
                let regions = pool.regions(place);
                let blocks = [[0, 4], [2, 3]][place.table];
                for (position, head) in (0..20).flat_map(|position| (0..kv_heads).map(move |head| (position, head))) {
                    let (block, slot) = (blocks[position / 16], position % 16);
                    let (keys, values) = (regions.keys.of(head, block), regions.values.of(head, block));
                    for d in 0..dim {
                        let stored = |first: usize| rows[position * width + (first + head) * dim + d];
                        assert_eq!(pages.keys[keys.start + d * 16 + slot], stored(4), "{place:?}");
                        let value = values.start + (d / 16 * 16 + slot) * 16 + d % 16;
                        assert_eq!(pages.values[value], stored(4 + kv_heads), "{place:?}");
                    }
                }
            }
        }
    }
}
