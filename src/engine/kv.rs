//! Which KV blocks each sequence holds.
//!
//! A model has one or several block tables ([`Forward::kv_tables`]), each for layers of one kind. A
//! sequence has its own blocks in each table, from one pool. In a table without a window it holds
//! the blocks of all its tokens. In a table with a window it holds those that its next tokens need:
//! blocks behind the window are released while it runs, and [`NO_BLOCK`] stands in their place. The
//! pool's memory therefore goes to whichever kind of layer needs it.
//!
//! A prefix of whole blocks can be shared if, in each table, the blocks are indexed that the first
//! token behind the prefix needs.
//!
//! [`Forward::kv_tables`]: crate::engine::Forward::kv_tables
//!
//! See docs/decisions/099-layers-with-windows-keep-a-windows-blocks.md.

use std::ops::Range;

use smallvec::SmallVec;

use crate::device::KvSpec;
use crate::device::batch::{BlockCopy, NO_BLOCK};
use crate::engine::blocks::{BlockKey, BlockPool};

/// A sequence's blocks in each table. All tables of a sequence cover the same positions, except
/// that some have one block more than others while the pool is short of blocks.
pub type BlockTables = SmallVec<[Vec<u32>; 1]>;

/// The pool, and the tables for which it has blocks.
#[derive(Debug, Clone)]
pub struct KvCache {
    pool: BlockPool,
    tables: Vec<KvSpec>,
}

impl KvCache {
    /// A cache of `blocks` free blocks of `block_tokens` tokens each.
    pub fn new(blocks: u32, block_tokens: u32, tables: Vec<KvSpec>) -> KvCache {
        KvCache {
            pool: BlockPool::new(blocks, block_tokens),
            tables,
        }
    }

    /// Tokens per block.
    pub fn block_tokens(&self) -> usize {
        self.pool.block_tokens()
    }

    /// Number of tables.
    pub fn tables(&self) -> usize {
        self.tables.len()
    }

    /// All blocks, held or not.
    pub fn total(&self) -> usize {
        self.pool.total()
    }

    /// Blocks that can be allocated now.
    pub fn available(&self) -> usize {
        self.pool.available()
    }

    /// Tables of a sequence that holds no block.
    pub fn empty_tables(&self) -> BlockTables {
        self.tables.iter().map(|_| Vec::new()).collect()
    }

    /// Maximum number of blocks, over all tables, that a sequence of `tokens` tokens holds when it
    /// computes its last token.
    pub fn blocks_of(&self, tokens: usize) -> usize {
        let all = tokens.div_ceil(self.block_tokens());
        let of_table = |table: &KvSpec| match table.needed_before() {
            None => all,
            // With the token itself, the positions may lie in one block more than they fill.
            Some(needed) => all.min((needed as usize).div_ceil(self.block_tokens()) + 1),
        };
        self.tables.iter().map(of_table).sum()
    }

    /// Whether a sequence of `tokens` tokens can run alone.
    pub fn fits(&self, tokens: usize) -> bool {
        self.blocks_of(tokens) <= self.total()
    }

    /// Maximum length of a sequence that runs alone, if some length does not fit.
    pub fn longest_sequence(&self) -> usize {
        let (mut fits, mut too_long) = (0, self.total() * self.block_tokens() + 1);
        while too_long - fits > 1 {
            let middle = fits.midpoint(too_long);
            if self.fits(middle) {
                fits = middle;
            } else {
                too_long = middle;
            }
        }
        fits
    }

    /// First block that a table needs for a token at `position`.
    fn first_block(&self, table: usize, position: usize) -> usize {
        self.tables[table].first_needed(position as u32) as usize / self.block_tokens()
    }

    /// Gives a sequence without blocks the longest indexed prefix of its tokens; `keys` are the keys
    /// of the whole blocks that it may have. Returns the number of blocks of the prefix.
    pub fn hold_prefix(&mut self, tables: &mut BlockTables, tokens: &[u32], keys: &[BlockKey]) -> usize {
        let size = self.block_tokens();
        let find = |table, index: usize| {
            let tokens = &tokens[index * size..][..size];
            self.pool.lookup(table, keys[index], tokens)
        };
        let mut blocks = keys.len();
        for table in (0..self.tables.len()).filter(|table| self.tables[*table] == KvSpec::Full) {
            tables[table] = (0..blocks).map_while(|index| find(table, index)).collect();
            blocks = tables[table].len();
        }
        // Each table may shorten the prefix, which moves the windows of the others.
        loop {
            let before = blocks;
            for table in (0..self.tables.len()).filter(|table| self.tables[*table] != KvSpec::Full) {
                tables[table] = vec![NO_BLOCK; blocks];
                let mut index = blocks;
                while index > self.first_block(table, blocks * size) {
                    index -= 1;
                    match find(table, index) {
                        Some(block) => tables[table][index] = block,
                        None => blocks = index,
                    }
                }
                tables[table].truncate(blocks);
            }
            if blocks == before {
                break;
            }
        }
        tables.iter_mut().for_each(|table| table.truncate(blocks));
        self.hold_again(tables);
        blocks
    }

    /// Adds a holder to all blocks of these tables.
    pub fn hold_again(&mut self, tables: &BlockTables) {
        held(tables).for_each(|block| self.pool.acquire(block));
    }

    /// Copies the shared blocks of these indices, which are to be written to. `None` if no block is
    /// available for a copy; then the sequence has some of the copies.
    pub fn copy_shared(
        &mut self,
        tables: &mut BlockTables,
        indices: Range<usize>,
        copies: &mut Vec<BlockCopy>,
    ) -> Option<()> {
        for table in tables {
            for block in table.iter_mut().take(indices.end).skip(indices.start) {
                if self.pool.is_shared(*block) {
                    let to = self.pool.copy_on_write(*block)?;
                    copies.push(BlockCopy { from: *block, to });
                    *block = to;
                }
            }
        }
        Some(())
    }

    /// Allocates blocks until each table has `blocks`, or none is available. Returns the number of
    /// blocks that each table has.
    pub fn grow(&mut self, tables: &mut BlockTables, blocks: usize) -> usize {
        // Block by block, so that a short pool does not give all its blocks to the first tables.
        let first = tables.iter().map(Vec::len).min().unwrap_or(0);
        for index in first..blocks {
            for table in tables.iter_mut().filter(|table| table.len() == index) {
                let Some(block) = self.pool.allocate() else {
                    return index;
                };
                table.push(block);
            }
        }
        first.max(blocks)
    }

    /// Releases the blocks of tables with a window that no token at `position` or behind it needs.
    pub fn release_behind(&mut self, tables: &mut BlockTables, position: usize) {
        for (index, table) in tables.iter_mut().enumerate() {
            let first = self.first_block(index, position).min(table.len());
            for block in table[..first].iter_mut().rev().take_while(|block| **block != NO_BLOCK) {
                self.pool.release(std::mem::replace(block, NO_BLOCK));
            }
        }
    }

    /// Releases all blocks of a sequence: in each table, the last one first.
    pub fn release_all(&mut self, tables: &mut BlockTables) {
        for table in tables {
            let blocks = table.drain(..).rev().filter(|block| *block != NO_BLOCK);
            blocks.for_each(|block| self.pool.release(block));
        }
    }

    /// Adds the full blocks at `index` of a sequence to the prefix index. A table whose window is
    /// shorter than a block may have released its block already.
    pub fn register(&mut self, tables: &BlockTables, index: usize, key: BlockKey, tokens: &[u32]) {
        for (table, blocks) in tables.iter().enumerate() {
            if blocks[index] != NO_BLOCK {
                self.pool.register(blocks[index], table, key, tokens);
            }
        }
    }

    /// Ends a plan; see [`BlockPool::end_plan`].
    pub fn end_plan(&mut self) {
        self.pool.end_plan();
    }

    /// Empties the prefix index, because the contents of the blocks are invalid.
    pub fn clear_index(&mut self) {
        self.pool.clear_index();
    }

    /// Panics unless the pool's state is consistent with the blocks that sequences hold. For tests.
    #[cfg(test)]
    pub fn check<'a>(&self, sequences: impl Iterator<Item = &'a BlockTables>) {
        let held: Vec<Vec<u32>> = sequences.map(|tables| held(tables).collect()).collect();
        self.pool.check(held.iter().map(|blocks| &blocks[..]));
    }
}

/// The blocks that a sequence holds.
pub fn held(tables: &BlockTables) -> impl Iterator<Item = u32> {
    tables.iter().flatten().copied().filter(|block| *block != NO_BLOCK)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Blocks of two tokens, in a table without a window and in one with a window of five.
    const TABLES: [KvSpec; 2] = [KvSpec::Full, KvSpec::Window(5)];
    const TOKENS: [u32; 14] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14];

    fn cache(blocks: u32) -> KvCache {
        KvCache::new(blocks, 2, TABLES.to_vec())
    }

    fn keys() -> Vec<BlockKey> {
        let child = |key: &mut BlockKey, tokens: &[u32]| {
            *key = key.child(tokens);
            Some(*key)
        };
        TOKENS.chunks(2).scan(BlockKey::root("test"), child).collect()
    }

    /// A sequence that has computed and indexed its first `blocks` blocks.
    fn computed(cache: &mut KvCache, blocks: usize) -> BlockTables {
        let mut tables = cache.empty_tables();
        assert_eq!(cache.grow(&mut tables, blocks), blocks);
        for (index, key) in keys()[..blocks].iter().enumerate() {
            cache.register(&tables, index, *key, &TOKENS[index * 2..][..2]);
        }
        tables
    }

    #[test]
    fn only_blocks_behind_the_window_are_released() {
        for (position, kept_from) in [(0, 0), (4, 0), (5, 0), (6, 1), (7, 1), (8, 2), (11, 3), (12, 4)] {
            let mut cache = cache(14);
            let mut tables = computed(&mut cache, 7);
            // A token at 8 sees the positions from 4 on, which begin block 2.
            cache.release_behind(&mut tables, position);
            assert!(
                tables[1][..kept_from].iter().all(|block| *block == NO_BLOCK),
                "{position}"
            );
            assert!(
                tables[1][kept_from..].iter().all(|block| *block != NO_BLOCK),
                "{position}"
            );
            assert!(!tables[0].contains(&NO_BLOCK), "the other table keeps all");
            cache.check([&tables].into_iter());
            cache.release_all(&mut tables);
            assert_eq!(cache.available(), 14);
        }
    }

    #[test]
    fn a_prefix_needs_the_blocks_of_its_last_window() {
        let mut cache = cache(13);
        let mut first = computed(&mut cache, 6);
        cache.release_behind(&mut first, 12);
        assert_eq!(held(&first).count(), 6 + 2);
        let found = |cache: &mut KvCache, blocks: usize| {
            let mut tables = cache.empty_tables();
            let shared = cache.hold_prefix(&mut tables, &TOKENS, &keys()[..blocks]);
            assert!(tables.iter().all(|table| table.len() == shared));
            let held: Vec<bool> = tables[1].iter().map(|block| *block != NO_BLOCK).collect();
            cache.release_all(&mut tables);
            (shared, held)
        };
        let (no, yes) = (false, true);
        // What was released is still in the index.
        assert_eq!(found(&mut cache, 6), (6, vec![no, no, no, no, yes, yes]));
        assert_eq!(found(&mut cache, 4), (4, vec![no, no, yes, yes]));
        // Two blocks are allocated anew: the one that was never in use, and of the released ones the
        // one that nobody has held for longest, with tokens 3 and 4 in the table with a window.
        let mut other = cache.empty_tables();
        assert_eq!(cache.grow(&mut other, 1), 1);
        assert_eq!(found(&mut cache, 5), (5, vec![no, no, no, yes, yes]));
        assert_eq!(found(&mut cache, 3), (1, vec![yes]), "3 blocks and 2 need the lost one");
        cache.check([&first, &other].into_iter());
    }

    #[test]
    fn all_tables_shorten_the_prefix() {
        let mut cache = KvCache::new(40, 2, vec![KvSpec::Window(5), KvSpec::Window(3), KvSpec::Full]);
        let mut tables = cache.empty_tables();
        cache.grow(&mut tables, 7);
        let keys = keys();
        // Missing: in the first table block 4, in the second block 2, in the last block 6.
        for (index, key) in keys.iter().enumerate() {
            let mut indexed = tables.clone();
            for (table, missing) in [4, 2, 6]
                .into_iter()
                .enumerate()
                .filter(|(_, missing)| *missing == index)
            {
                indexed[table][missing] = NO_BLOCK;
            }
            cache.register(&indexed, index, *key, &TOKENS[index * 2..][..2]);
        }
        let mut found = cache.empty_tables();
        // 6 blocks: the first table needs 4 and 5. 4 blocks: it needs 2 and 3, the second one 3.
        assert_eq!(cache.hold_prefix(&mut found, &TOKENS, &keys), 4);
        assert_eq!(found[0][..2], [NO_BLOCK; 2]);
        assert_eq!(found[1][..3], [NO_BLOCK; 3]);
        assert_eq!(found[2][..], tables[2][..4]);
        cache.check([&tables, &found].into_iter());
    }

    #[test]
    fn a_window_takes_its_blocks_and_no_more() {
        let of =
            |tables: &[KvSpec], block_tokens, tokens| KvCache::new(1, block_tokens, tables.to_vec()).blocks_of(tokens);
        let window = |window, tokens| of(&[KvSpec::Window(window)], 16, tokens);
        assert_eq!((window(1024, 16), window(1024, 17)), (1, 2));
        // 1,023 positions before a token, and the token: 64 blocks, or 65 where they begin within
        // one.
        assert_eq!((window(1024, 1040), window(1024, 1 << 17)), (65, 65));
        assert_eq!((window(1, 1 << 17), window(2, 1 << 17), window(17, 1 << 17)), (2, 2, 2));
        assert_eq!(window(18, 1 << 17), 3);
        // A model with one layer in six without a window, at 131,072 tokens: 8,192 blocks and five
        // times 65, not six times 8,192.
        let tables = [&[KvSpec::Full][..], &[KvSpec::Window(1024); 5]].concat();
        assert_eq!(of(&tables, 16, 1 << 17), 8192 + 5 * 65);
        let longest = |blocks| KvCache::new(blocks, 2, TABLES.to_vec()).longest_sequence();
        // Three blocks of the window.
        assert_eq!(
            (longest(1), longest(2), longest(6), longest(7), longest(20)),
            (0, 2, 6, 8, 34)
        );
    }

    #[test]
    fn a_short_pool_gives_each_table_its_share() {
        let mut cache = cache(5);
        let mut tables = cache.empty_tables();
        assert_eq!(cache.grow(&mut tables, 6), 2);
        assert_eq!((tables[0].len(), tables[1].len()), (3, 2));
        cache.release_behind(&mut tables, 4);
        assert_eq!(cache.grow(&mut tables, 3), 2, "block 0 is still needed");
        cache.release_behind(&mut tables, 6);
        assert_eq!(cache.grow(&mut tables, 3), 3);
        cache.release_all(&mut tables);
        assert_eq!(cache.available(), 5);
    }
}
