//! Paged keys and values, in blocks of 16 positions, laid out as panels for the matrix
//! kernel.
//!
//! Keys: `[kv_head][block][head_dim][16 positions]`. Values:
//! `[kv_head][block][head_dim / 16][16 positions][16 dims]`, with head_dim rounded up to a multiple
//! of 16. Numbers are F32 or BF16. For INT8 see [`Int8Pages`].
//!
//! Attention multiplies whole blocks, with weight zero at unused positions. Values at unused
//! positions must be finite, since `0 * NaN` is NaN. The step that begins a block therefore clears
//! the values at its unused positions, so that old values of the block's previous sequence cannot
//! affect the result.
//!
//! See docs/decisions/072-values-lie-token-by-token.md.

use super::aligned::AlignedArray;
use super::gemm::int8::{OFFSET, QUAD};
use super::gemm::tile::{Bf16, Element, PANEL};
use super::quantize::quantize_row_on;
use super::step::Step;
use super::{BLOCK_TOKENS, SPAN_TOKENS};
use super::{Buffer, ExecContext, Threads};
use crate::device::batch::BlockCopy;
use crate::device::{HeadShape, KvFormat};

/// Keys and values of one layer per block.
pub struct KvPool {
    pub(super) blocks: usize,
    pub(super) heads: HeadShape,
    pub(super) store: KvStore,
}

pub(super) enum KvStore {
    F32(KvPages<f32>),
    Bf16(KvPages<Bf16>),
    Int8(Int8Pages),
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
    /// `[kv_head][block][quads of dims][16 positions][4]`, with 128 added to each byte. head_dim is
    /// rounded up as for values and padded with zeros (stored as 128).
    pub keys: AlignedArray<u8>,
    /// `[kv_head][block][quads of positions][dims][4]`.
    pub values: AlignedArray<i8>,
    /// `[kv_head][block][16 positions]`.
    pub key_scales: AlignedArray<f32>,
    /// As `key_scales`.
    pub value_scales: AlignedArray<f32>,
    /// `[kv_head][block][16 positions]`: the maximum of the value scales from the span's first
    /// position to this position.
    pub value_scale_max: AlignedArray<f32>,
}

/// head_dim as stored in values: rounded up to whole panels.
pub(super) fn padded(head_dim: usize) -> usize {
    head_dim.next_multiple_of(PANEL)
}

impl KvPool {
    pub(super) fn new(heads: HeadShape, blocks: usize, format: KvFormat) -> KvPool {
        let tokens = heads.kv_heads * blocks * BLOCK_TOKENS;
        let (keys, values) = (tokens * heads.head_dim, tokens * padded(heads.head_dim));
        let store = match format {
            KvFormat::F32 => KvStore::F32(KvPages {
                keys: AlignedArray::new(keys),
                values: AlignedArray::new(values),
            }),
            KvFormat::Bf16 => KvStore::Bf16(KvPages {
                keys: AlignedArray::new(keys),
                values: AlignedArray::new(values),
            }),
            // `Cpu::new` rejects FP8.
            KvFormat::Int8 | KvFormat::Fp8 => KvStore::Int8(Int8Pages {
                keys: AlignedArray::new(values),
                values: AlignedArray::new(values),
                key_scales: AlignedArray::on_small_pages(tokens),
                value_scales: AlignedArray::on_small_pages(tokens),
                value_scale_max: AlignedArray::on_small_pages(tokens),
            }),
        };
        KvPool { blocks, heads, store }
    }

    pub(super) fn block_bytes(heads: HeadShape, format: KvFormat) -> usize {
        let (dim, padded_dim) = (heads.head_dim, padded(heads.head_dim));
        let position = match format {
            KvFormat::F32 => (dim + padded_dim) * size_of::<f32>(),
            KvFormat::Bf16 => (dim + padded_dim) * size_of::<Bf16>(),
            KvFormat::Int8 | KvFormat::Fp8 => 2 * padded_dim + 3 * size_of::<f32>(),
        };
        heads.kv_heads * BLOCK_TOKENS * position
    }

    /// Copies blocks `(from, to)`, in order.
    pub(super) fn copy_blocks(&mut self, copies: &[BlockCopy]) {
        match &mut self.store {
            KvStore::F32(pages) => pages.copy_blocks(self.heads, self.blocks, copies),
            KvStore::Bf16(pages) => pages.copy_blocks(self.heads, self.blocks, copies),
            KvStore::Int8(pages) => pages.copy_blocks(self.heads, self.blocks, copies),
        }
    }

    /// Stores the keys and values of all tokens of the step from their `[q][k][v]` rows, in the
    /// blocks of one block table.
    pub(super) fn store(&mut self, ctx: ExecContext<'_>, (step, table): (&Step, usize), qkv: &Buffer) {
        assert_eq!(step.heads, self.heads);
        match &mut self.store {
            KvStore::F32(pages) => pages.store(ctx.threads, self.heads, self.blocks, (step, table), qkv),
            KvStore::Bf16(pages) => pages.store(ctx.threads, self.heads, self.blocks, (step, table), qkv),
            KvStore::Int8(pages) => pages.store(ctx, self.heads, self.blocks, (step, table), qkv),
        }
    }
}

/// Copies blocks of `block_len` elements within each head's part of `data`, in the order of
/// `copies`.
fn copy_within<E: Copy>(data: &mut [E], heads: HeadShape, blocks: usize, block_len: usize, copies: &[BlockCopy]) {
    for head in 0..heads.kv_heads {
        for &BlockCopy { from, to } in copies {
            let from = (head * blocks + from as usize) * block_len;
            data.copy_within(from..from + block_len, (head * blocks + to as usize) * block_len);
        }
    }
}

/// The location in the pool where a token of the step is stored.
#[derive(Clone, Copy)]
struct KvSlot {
    block: usize,
    /// Position within the block.
    slot: usize,
    /// `(block, slot)` of the previous position. `None` if this position begins a span.
    previous: Option<(usize, usize)>,
}

/// Calls `store` for each token of the step, with the token's row of `qkv`.
fn for_each_token<'a>((step, table): (&Step, usize), qkv: &'a Buffer, mut store: impl FnMut(&'a [f32], KvSlot)) {
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

/// A head's key and value in a row of `[q][k][v]`.
fn key_and_value(row: &[f32], heads: HeadShape, head: usize) -> (&[f32], &[f32]) {
    let head_part = |index: usize| &row[index * heads.head_dim..][..heads.head_dim];
    (
        head_part(heads.heads + head),
        head_part(heads.heads + heads.kv_heads + head),
    )
}

impl Int8Pages {
    fn copy_blocks(&mut self, heads: HeadShape, blocks: usize, copies: &[BlockCopy]) {
        let block_len = padded(heads.head_dim) * BLOCK_TOKENS;
        copy_within(&mut self.keys, heads, blocks, block_len, copies);
        copy_within(&mut self.values, heads, blocks, block_len, copies);
        copy_within(&mut self.key_scales, heads, blocks, BLOCK_TOKENS, copies);
        copy_within(&mut self.value_scales, heads, blocks, BLOCK_TOKENS, copies);
        copy_within(&mut self.value_scale_max, heads, blocks, BLOCK_TOKENS, copies);
    }

    fn store(&mut self, ctx: ExecContext<'_>, heads: HeadShape, blocks: usize, step: (&Step, usize), qkv: &Buffer) {
        let padded_dim = padded(heads.head_dim);
        let block_len = padded_dim * BLOCK_TOKENS;
        let keys = self.keys.chunks_exact_mut(blocks * block_len);
        let values = self.values.chunks_exact_mut(blocks * block_len);
        let key_scales = self.key_scales.chunks_exact_mut(blocks * BLOCK_TOKENS);
        let value_scales = self.value_scales.chunks_exact_mut(blocks * BLOCK_TOKENS);
        let value_scale_max = self.value_scale_max.chunks_exact_mut(blocks * BLOCK_TOKENS);
        let scales = key_scales.zip(value_scales).zip(value_scale_max);
        let mut head_pages: Vec<_> = keys.zip(values).zip(scales).enumerate().collect();
        ctx.threads
            .parallel_for_each(qkv.data.len(), &mut head_pages, |_, head_pages| {
                let mut bytes = vec![0u8; padded_dim];
                for (head, ((keys, values), ((key_scales, value_scales), value_scale_max))) in head_pages {
                    for_each_token(step, qkv, |row, KvSlot { block, slot, previous }| {
                        let (key, value) = key_and_value(row, heads, *head);
                        let scale = block * BLOCK_TOKENS + slot;
                        quantize_row_on(ctx.isa, key, &mut bytes, &mut key_scales[scale]);
                        let out = &mut keys[block * block_len + slot * QUAD..(block + 1) * block_len];
                        let quads = bytes.as_chunks::<QUAD>().0.iter();
                        for (quad, out) in quads.zip(out.chunks_mut(BLOCK_TOKENS * QUAD)) {
                            out[..QUAD].copy_from_slice(quad);
                        }
                        quantize_row_on(ctx.isa, value, &mut bytes, &mut value_scales[scale]);
                        let previous_max =
                            previous.map_or(0.0, |(block, slot)| value_scale_max[block * BLOCK_TOKENS + slot]);
                        value_scale_max[scale] = value_scales[scale].max(previous_max);
                        let offset = block * block_len + slot / QUAD * padded_dim * QUAD + slot % QUAD;
                        let out = &mut values[offset..(block + 1) * block_len];
                        for (byte, out) in bytes.iter().zip(out.iter_mut().step_by(QUAD)) {
                            *out = byte.wrapping_sub(OFFSET as u8) as i8;
                        }
                    });
                }
            });
    }
}

impl<E: Element> KvPages<E> {
    fn copy_blocks(&mut self, heads: HeadShape, blocks: usize, copies: &[BlockCopy]) {
        copy_within(&mut self.keys, heads, blocks, heads.head_dim * BLOCK_TOKENS, copies);
        copy_within(
            &mut self.values,
            heads,
            blocks,
            padded(heads.head_dim) * BLOCK_TOKENS,
            copies,
        );
    }

    fn store(
        &mut self,
        threads: &Threads,
        heads: HeadShape,
        blocks: usize,
        (step, table): (&Step, usize),
        qkv: &Buffer,
    ) {
        let dim = heads.head_dim;
        let (key_block, value_block) = (dim * BLOCK_TOKENS, padded(dim) * BLOCK_TOKENS);
        let keys = self.keys.chunks_exact_mut(blocks * key_block);
        let values = self.values.chunks_exact_mut(blocks * value_block);
        let mut head_pages: Vec<_> = keys.zip(values).enumerate().collect();
        threads.parallel_for_each(qkv.data.len(), &mut head_pages, |_, head_pages| {
            for (head, (keys, values)) in head_pages {
                for &(block, used) in &step.new_tail_blocks[table] {
                    let block = &mut values[block as usize * value_block..][..value_block];
                    for panel in block.chunks_exact_mut(BLOCK_TOKENS * PANEL) {
                        panel[used as usize * PANEL..].fill(E::default());
                    }
                }
                for_each_token((step, table), qkv, |row, KvSlot { block, slot, .. }| {
                    let (key, value) = key_and_value(row, heads, *head);
                    let out = &mut keys[block * key_block + slot..(block + 1) * key_block];
                    for (d, x) in key.iter().enumerate() {
                        out[d * BLOCK_TOKENS] = E::narrow(*x);
                    }
                    let out = &mut values[block * value_block..][..value_block];
                    for (panel, x) in value.chunks(PANEL).enumerate() {
                        let offset = (panel * BLOCK_TOKENS + slot) * PANEL;
                        for (y, x) in out[offset..].iter_mut().zip(x) {
                            *y = E::narrow(*x);
                        }
                    }
                });
            }
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
        };
        let mut pool = KvPool::new(heads, 4, KvFormat::F32);
        let KvStore::F32(pages) = &mut pool.store else {
            panic!("F32 pool")
        };
        pages.values.fill(f32::NAN);
        let mut step = Step::new(
            heads,
            vec![RopeSpec {
                inverse_frequencies: vec![1.0; 9],
                scale: 1.0,
            }],
            &[KvSpec::Full],
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
            }],
            block_tables: vec![vec![2, 0]],
            logits_at: vec![],
            ..StepBatch::default()
        });
        let rows = numbers(1, 20 * heads.qkv_width());
        let qkv = buffer(&rows, 20, heads.qkv_width());
        pool.store(ctx(Isa::Portable), (&step, 0), &qkv);
        pool.copy_blocks(&[BlockCopy { from: 0, to: 3 }]);
        let KvStore::F32(pages) = &pool.store else {
            panic!("F32 pool")
        };
        for block_of_tail in [0, 3] {
            for head in 0..2 {
                for position in 0..20 {
                    let block = [2, block_of_tail][position / 16];
                    let slot = position % 16;
                    for d in 0..18 {
                        let key = pages.keys[((head * 4 + block) * 18 + d) * 16 + slot];
                        assert_eq!(key, qkv.row(position)[(2 + head) * 18 + d]);
                        let value = pages.values[(((head * 4 + block) * 2 + d / 16) * 16 + slot) * 16 + d % 16];
                        assert_eq!(value, qkv.row(position)[(4 + head) * 18 + d]);
                    }
                }
                let tail = &pages.values[(head * 4 + block_of_tail) * 32 * 16..][..32 * 16];
                assert!(
                    tail[4 * 16..16 * 16].iter().all(|x| *x == 0.0),
                    "rest of the block is cleared"
                );
            }
        }
        assert!(
            pages.values[16 * 32..2 * 16 * 32].iter().all(|x| x.is_nan()),
            "other blocks are left alone"
        );
    }
}
