//! Paged keys and values of one layer, in blocks of 16 positions, laid out as panels for the matrix kernel.
//!
//! Keys: `[kv_head][block][head_dim][16 positions]`. Values: `[kv_head][block][head_dim / 16][16 positions][16 dims]`,
//! head_dim rounded up to a multiple of 16. F32 or BF16.
//!
//! Attention multiplies whole blocks, unused positions by zero. Those must hold finite values, so whoever begins a
//! block clears the rest of its values: what an earlier owner left there (NaN, at worst) cannot reach a neighbour.

use rayon::prelude::*;

use super::Buffer;
use super::aligned::Aligned;
use super::step::Step;
use super::tile::{Bf16, Element, PANEL};
use crate::device::{BLOCK_TOKENS, HeadShape, Precision};

/// One layer's keys and values.
pub struct KvPool {
    pub(super) blocks: usize,
    pub(super) heads: HeadShape,
    pub(super) store: Store,
}

pub(super) enum Store {
    F32(Pages<f32>),
    Bf16(Pages<Bf16>),
}

pub(super) struct Pages<E> {
    pub keys: Aligned<E>,
    pub values: Aligned<E>,
}

/// head_dim in values: a whole number of panels.
pub(super) fn padded(head_dim: usize) -> usize {
    head_dim.next_multiple_of(PANEL)
}

impl KvPool {
    pub(super) fn new(heads: HeadShape, blocks: usize, precision: Precision) -> KvPool {
        let tokens = heads.kv_heads * blocks * BLOCK_TOKENS;
        let (keys, values) = (tokens * heads.head_dim, tokens * padded(heads.head_dim));
        let store = match precision {
            Precision::F32 => Store::F32(Pages {
                keys: Aligned::new(keys),
                values: Aligned::new(values),
            }),
            Precision::Bf16 | Precision::Int8 => Store::Bf16(Pages {
                keys: Aligned::new(keys),
                values: Aligned::new(values),
            }),
        };
        KvPool { blocks, heads, store }
    }

    pub(super) fn block_bytes(heads: HeadShape, precision: Precision) -> usize {
        let element = match precision {
            Precision::F32 => 4,
            Precision::Bf16 | Precision::Int8 => 2,
        };
        heads.kv_heads * BLOCK_TOKENS * (heads.head_dim + padded(heads.head_dim)) * element
    }

    /// Copies blocks, in order.
    pub(super) fn copy_blocks(&mut self, copies: &[(u32, u32)]) {
        match &mut self.store {
            Store::F32(pages) => pages.copy_blocks(self.heads, self.blocks, copies),
            Store::Bf16(pages) => pages.copy_blocks(self.heads, self.blocks, copies),
        }
    }

    /// Stores the keys and values of all tokens of the step from their `[q][k][v]` rows.
    pub(super) fn store(&mut self, step: &Step, qkv: &Buffer) {
        assert_eq!(step.heads, self.heads);
        match &mut self.store {
            Store::F32(pages) => pages.store(self.heads, self.blocks, step, qkv),
            Store::Bf16(pages) => pages.store(self.heads, self.blocks, step, qkv),
        }
    }
}

impl<E: Element> Pages<E> {
    fn copy_blocks(&mut self, heads: HeadShape, blocks: usize, copies: &[(u32, u32)]) {
        for (data, size) in [
            (&mut self.keys, heads.head_dim * BLOCK_TOKENS),
            (&mut self.values, padded(heads.head_dim) * BLOCK_TOKENS),
        ] {
            for head in 0..heads.kv_heads {
                for &(from, to) in copies {
                    let from = (head * blocks + from as usize) * size;
                    data.copy_within(from..from + size, (head * blocks + to as usize) * size);
                }
            }
        }
    }

    fn store(&mut self, heads: HeadShape, blocks: usize, step: &Step, qkv: &Buffer) {
        let dim = heads.head_dim;
        let (key_block, value_block) = (dim * BLOCK_TOKENS, padded(dim) * BLOCK_TOKENS);
        let keys = self.keys.par_chunks_exact_mut(blocks * key_block);
        let values = self.values.par_chunks_exact_mut(blocks * value_block);
        keys.zip(values).enumerate().for_each(|(head, (keys, values))| {
            for &(block, used) in &step.begun {
                let block = &mut values[block as usize * value_block..][..value_block];
                for panel in block.chunks_exact_mut(BLOCK_TOKENS * PANEL) {
                    panel[used as usize * PANEL..].fill(E::default());
                }
            }
            for (i, s) in step.batch.sequences.iter().enumerate() {
                let table = step.blocks(i as u32);
                for q in 0..s.q_len as usize {
                    let position = (s.kv_len - s.q_len) as usize + q;
                    let (block, slot) = (table[position / BLOCK_TOKENS] as usize, position % BLOCK_TOKENS);
                    let row = qkv.row(s.first_token as usize + q);
                    let key = &row[(heads.heads + head) * dim..][..dim];
                    let value = &row[(heads.heads + heads.kv_heads + head) * dim..][..dim];
                    let out = &mut keys[block * key_block + slot..(block + 1) * key_block];
                    for (d, x) in key.iter().enumerate() {
                        out[d * BLOCK_TOKENS] = E::narrow(*x);
                    }
                    let out = &mut values[block * value_block..][..value_block];
                    for (panel, x) in value.chunks(PANEL).enumerate() {
                        let at = (panel * BLOCK_TOKENS + slot) * PANEL;
                        for (y, x) in out[at..].iter_mut().zip(x) {
                            *y = E::narrow(*x);
                        }
                    }
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::RopeSpec;
    use crate::device::batch::{StepBatch, StepSequence};
    use crate::device::cpu::testing::{buffer, numbers};

    #[test]
    fn stored_rows_are_found_and_begun_blocks_cleared() {
        let heads = HeadShape {
            heads: 2,
            kv_heads: 2,
            head_dim: 18,
        };
        let mut pool = KvPool::new(heads, 4, Precision::F32);
        let Store::F32(pages) = &mut pool.store else {
            panic!("F32 pool")
        };
        pages.values.fill(f32::NAN);
        let mut step = Step::new(
            heads,
            RopeSpec {
                inverse_frequencies: vec![1.0; 9],
                scale: 1.0,
            },
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
            block_tables: vec![2, 0],
            logits_at: vec![],
            block_copies: vec![],
        });
        let rows = numbers(1, 20 * heads.qkv_width());
        let qkv = buffer(&rows, 20, heads.qkv_width());
        pool.store(&step, &qkv);
        pool.copy_blocks(&[(0, 3)]);
        let Store::F32(pages) = &pool.store else {
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
