//! The pool of KV blocks: which sequences hold each block, which blocks hold a prefix that can be
//! shared, and which may be evicted.
//!
//! Bookkeeping only: it never touches keys, values or the model. A block is in one of three states:
//! *held* (by one or more sequences), *cached* (held by no sequence, but indexed and reusable) or
//! *free*. Blocks are allocated in this order of preference:
//!
//! 1. a free block that was in use before;
//! 2. the cached block that was released longest ago, which is evicted, if more blocks than a bound
//!    are cached;
//! 3. a block that was never in use;
//! 4. the cached block that was released longest ago.
//!
//! So the pool's memory comes into use as it is needed, and a long job does not fill all of it with
//! prefixes that no later sequence shares.
//!
//! A block belongs to one of the model's block tables, which are told apart in the index. In a table
//! without a window, sequences release their last block first, and a sequence that holds a block
//! holds all blocks before it. There, a block is therefore always evicted before the blocks that
//! precede it, and the whole prefix of every indexed block is in the index.

use std::collections::{BTreeMap, HashMap};

use sha2::{Digest, Sha256};

/// Once more blocks are cached than `CACHED_BLOCKS_MIN` and than the pool's blocks /
/// `CACHED_POOL_DIVISOR`, a cached block is evicted before a never-used block is allocated.
const CACHED_BLOCKS_MIN: usize = 1024;
const CACHED_POOL_DIVISOR: usize = 16;

/// Identifies the contents of a full block: all tokens from the start of the sequence to the
/// block's end, and the model and settings that computed their keys and values.
///
/// A key is the first 16 bytes of SHA-256 over the parent's key and the block's token ids (little
/// endian), so it is the same on every machine. A lookup compares the token ids as well.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockKey([u8; 16]);

impl BlockKey {
    /// The parent key of every first block: a hash of `description`, which must hold everything
    /// besides token ids that determines keys and values (model, KV format, …).
    pub fn root(description: &str) -> BlockKey {
        BlockKey::digest(Sha256::new_with_prefix(b"gristmill-kv\0").chain_update(description.as_bytes()))
    }

    /// The root for sequences for which the adapter of this number changes the model; 0: none does.
    #[must_use]
    pub fn adapted(self, adapter: u32) -> BlockKey {
        if adapter == 0 {
            return self;
        }
        let hash = Sha256::new_with_prefix(b"gristmill-adapter\0").chain_update(self.0);
        BlockKey::digest(hash.chain_update(adapter.to_le_bytes()))
    }

    /// The root for prefixes that are shared only among sequences of the same salt.
    pub fn salted(self, salt: &str) -> BlockKey {
        let hash = Sha256::new_with_prefix(b"gristmill-salt\0").chain_update(self.0);
        BlockKey::digest(hash.chain_update(salt.as_bytes()))
    }

    /// The key of the block that holds `tokens` and follows the block with key `self`.
    pub fn child(self, tokens: &[u32]) -> BlockKey {
        let mut hash = Sha256::new_with_prefix(self.0);
        for token in tokens {
            hash.update(token.to_le_bytes());
        }
        BlockKey::digest(hash)
    }

    fn digest(hash: Sha256) -> BlockKey {
        let digest: [u8; 32] = hash.finalize().into();
        let mut key = [0; 16];
        key.copy_from_slice(&digest[..16]);
        BlockKey(key)
    }
}

/// A block table's index, and the key of a block's contents.
type IndexKey = (usize, BlockKey);

/// The state of one block.
#[derive(Debug, Clone, Default)]
struct Block {
    /// Number of sequences that hold it.
    holders: u32,
    /// Its key in the index, and its tokens.
    index_entry: Option<(IndexKey, Box<[u32]>)>,
    /// Value of `releases` at its last release: its key in `cached` while no sequence holds it.
    released_at: u64,
    /// Whether it is the source of a copy in the step being planned. A source must not be
    /// reallocated before the plan ends.
    is_copy_source: bool,
}

/// The pool. See the module's description.
#[derive(Debug, Clone)]
pub struct BlockPool {
    block_tokens: usize,
    blocks: Vec<Block>,
    /// Free blocks; the last one is allocated next. Blocks that were never in use are at the front,
    /// so they are allocated after all others.
    free: Vec<u32>,
    /// Blocks with this index or a higher one were never in use.
    high_water: u32,
    /// Indexed blocks that no sequence holds, by `released_at`.
    cached: BTreeMap<u64, u32>,
    index: HashMap<IndexKey, u32>,
    copy_sources: Vec<u32>,
    /// Counts releases; orders `cached`.
    releases: u64,
}

impl BlockPool {
    /// A pool of `blocks` free blocks of `block_tokens` tokens each.
    pub fn new(blocks: u32, block_tokens: u32) -> BlockPool {
        BlockPool {
            block_tokens: block_tokens as usize,
            blocks: vec![Block::default(); blocks as usize],
            free: (0..blocks).rev().collect(),
            high_water: 0,
            cached: BTreeMap::new(),
            index: HashMap::new(),
            copy_sources: Vec::new(),
            releases: 0,
        }
    }

    /// Tokens per block.
    pub fn block_tokens(&self) -> usize {
        self.block_tokens
    }

    /// All blocks, held or not.
    pub fn total(&self) -> usize {
        self.blocks.len()
    }

    /// Blocks that can be allocated now: the free and the cached ones.
    pub fn available(&self) -> usize {
        self.free.len() + self.cached.len()
    }

    /// Number of blocks that were ever in use: the part of the pool whose memory has been written
    /// to.
    pub fn blocks_ever_used(&self) -> usize {
        self.high_water as usize
    }

    /// Allocates a block in the order of preference of the module's description. `None` if all
    /// blocks are held.
    pub fn allocate(&mut self) -> Option<u32> {
        let is_cache_full = self.cached.len() > CACHED_BLOCKS_MIN.max(self.blocks.len() / CACHED_POOL_DIVISOR);
        let block = match self.free.last() {
            Some(block) if !is_cache_full || *block < self.high_water => self.free.pop()?,
            _ => {
                let (_, block) = self.cached.pop_first()?;
                self.remove_from_index(block);
                block
            }
        };
        self.high_water = self.high_water.max(block + 1);
        self.blocks[block as usize].holders = 1;
        Some(block)
    }

    /// Adds a holder to a held or cached block.
    pub fn acquire(&mut self, block: u32) {
        let entry = &mut self.blocks[block as usize];
        if entry.holders == 0 {
            self.cached.remove(&entry.released_at);
        }
        entry.holders += 1;
    }

    /// Removes one holder of this block. A sequence that releases several blocks must release its
    /// last block first.
    pub fn release(&mut self, block: u32) {
        let entry = &mut self.blocks[block as usize];
        assert!(
            entry.holders > 0,
            "block {block} is released more often than it is held"
        );
        entry.holders -= 1;
        if entry.holders > 0 {
            return;
        }
        if entry.index_entry.is_some() {
            self.releases += 1;
            entry.released_at = self.releases;
            self.cached.insert(self.releases, block);
        } else if !entry.is_copy_source {
            self.free.push(block);
        }
    }

    /// Whether several sequences hold the block, which must then be copied before it is written to.
    pub fn is_shared(&self, block: u32) -> bool {
        self.blocks[block as usize].holders > 1
    }

    /// The block of block table `table` that holds `tokens` and whose key is `key`, if there is one.
    pub fn lookup(&self, table: usize, key: BlockKey, tokens: &[u32]) -> Option<u32> {
        let block = *self.index.get(&(table, key))?;
        let (_, indexed_tokens) = self.blocks[block as usize].index_entry.as_ref()?;
        (**indexed_tokens == *tokens).then_some(block)
    }

    /// Adds a full held block of block table `table` to the index, unless a block of the same table
    /// and contents is in the index.
    pub fn register(&mut self, block: u32, table: usize, key: BlockKey, tokens: &[u32]) {
        assert_eq!(tokens.len(), self.block_tokens, "only full blocks are indexed");
        let entry = &mut self.blocks[block as usize];
        assert!(entry.holders > 0, "block {block} is indexed while nobody holds it");
        let key = (table, key);
        if entry.index_entry.is_none() && !self.index.contains_key(&key) {
            entry.index_entry = Some((key, tokens.into()));
            self.index.insert(key, block);
        }
    }

    /// Replaces the caller's hold on a shared block by a new block. The contents must be copied
    /// before the step runs.
    ///
    /// The shared block is not reallocated before [`BlockPool::end_plan`], so copies of one step
    /// may run in any order. `None` if no block is available; then nothing has changed.
    pub fn copy_on_write(&mut self, block: u32) -> Option<u32> {
        let copy = self.allocate()?;
        let entry = &mut self.blocks[block as usize];
        entry.is_copy_source = true;
        self.copy_sources.push(block);
        self.release(block);
        Some(copy)
    }

    /// Ends the plan: sources of copies that no sequence holds become free.
    pub fn end_plan(&mut self) {
        for block in std::mem::take(&mut self.copy_sources) {
            let entry = &mut self.blocks[block as usize];
            if std::mem::take(&mut entry.is_copy_source) && entry.holders == 0 && entry.index_entry.is_none() {
                self.free.push(block);
            }
        }
    }

    /// Empties the index, because the contents of the blocks are invalid.
    pub fn clear_index(&mut self) {
        self.index.clear();
        self.blocks.iter_mut().for_each(|block| block.index_entry = None);
        self.free.extend(std::mem::take(&mut self.cached).into_values());
    }

    /// Removes an evicted block from the index.
    fn remove_from_index(&mut self, block: u32) {
        if let Some((key, _)) = self.blocks[block as usize].index_entry.take() {
            self.index.remove(&key);
        }
    }

    /// Panics unless every block is in exactly one state and is held as often as it occurs in
    /// `tables`. For tests.
    #[cfg(test)]
    pub fn check<'a>(&self, tables: impl Iterator<Item = &'a [u32]>) {
        let mut holders = vec![0; self.blocks.len()];
        for block in tables.flatten() {
            holders[*block as usize] += 1;
        }
        let mut seen = vec![0; self.blocks.len()];
        self.free
            .iter()
            .chain(self.cached.values())
            .for_each(|b| seen[*b as usize] += 1);
        for (i, block) in self.blocks.iter().enumerate() {
            assert_eq!(block.holders, holders[i], "holders of block {i}");
            assert_eq!(
                seen[i],
                u32::from(block.holders == 0),
                "block {i} is in no list or in two"
            );
            if let Some((key, _)) = &block.index_entry {
                assert_eq!(self.index.get(key), Some(&(i as u32)), "index of block {i}");
            }
        }
        assert!(
            self.free.iter().all(|b| self.blocks[*b as usize].index_entry.is_none()),
            "a free block is indexed"
        );
        assert!(
            self.index
                .values()
                .all(|b| self.blocks[*b as usize].index_entry.is_some()),
            "a stale index entry"
        );
        assert!(self.copy_sources.is_empty(), "the plan was not ended");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool_with_chain(pool_blocks: u32, chain: &[[u32; 2]]) -> (BlockPool, Vec<u32>, Vec<BlockKey>) {
        let mut pool = BlockPool::new(pool_blocks, 2);
        let mut key = BlockKey::root("test");
        let (mut blocks, mut keys) = (Vec::new(), Vec::new());
        for tokens in chain {
            key = key.child(tokens);
            let block = pool.allocate().unwrap();
            pool.register(block, 0, key, tokens);
            blocks.push(block);
            keys.push(key);
        }
        (pool, blocks, keys)
    }

    #[test]
    fn keys_depend_on_root_parent_and_tokens() {
        let root = BlockKey::root("model a");
        assert_ne!(root, BlockKey::root("model b"));
        assert_ne!(root.child(&[1, 2]), root.child(&[2, 1]));
        assert_ne!(root.child(&[1, 2]).child(&[3, 4]), root.child(&[9, 9]).child(&[3, 4]));
        assert_eq!(root.child(&[1, 2]), BlockKey::root("model a").child(&[1, 2]));
    }

    #[test]
    fn a_key_with_other_tokens_is_not_found() {
        let (pool, blocks, keys) = pool_with_chain(4, &[[1, 2]]);
        assert_eq!(pool.lookup(0, keys[0], &[1, 2]), Some(blocks[0]));
        assert_eq!(
            pool.lookup(0, keys[0], &[1, 3]),
            None,
            "a collision must not mix contents"
        );
    }

    #[test]
    fn the_tail_is_evicted_before_its_beginning() {
        let (mut pool, blocks, keys) = pool_with_chain(2, &[[1, 2], [3, 4]]);
        assert_eq!(pool.available(), 0);
        blocks.iter().rev().for_each(|b| pool.release(*b));
        assert_eq!(pool.available(), 2);
        assert_eq!(pool.allocate(), Some(blocks[1]));
        assert_eq!(pool.lookup(0, keys[0], &[1, 2]), Some(blocks[0]));
        assert_eq!(pool.lookup(0, keys[1], &[3, 4]), None);
        pool.acquire(blocks[0]);
        assert_eq!(pool.allocate(), None);
        pool.check([&blocks[..]].into_iter());
    }

    #[test]
    fn a_reused_cached_block_becomes_the_newest() {
        let (mut pool, blocks, _) = pool_with_chain(2, &[[1, 2], [3, 4]]);
        pool.release(blocks[0]);
        pool.release(blocks[1]);
        pool.acquire(blocks[0]);
        pool.release(blocks[0]);
        assert_eq!(pool.allocate(), Some(blocks[1]), "the one used longest ago goes first");
    }

    /// Rows come and go, each with its own prefix. The cache of old prefixes stays bounded, and the
    /// newest prefixes are still found.
    #[test]
    fn finished_rows_do_not_fill_the_pool() {
        let mut pool = BlockPool::new(100_000, 1);
        let root = BlockKey::root("test");
        let blocks: Vec<u32> = (0..10).map(|_| pool.allocate().unwrap()).collect();
        for token in 0..20_000u32 {
            let block = pool.allocate().unwrap();
            pool.register(block, 0, root.child(&[token]), &[token]);
            pool.release(block);
        }
        assert_eq!(pool.blocks_ever_used(), 10 + 100_000 / CACHED_POOL_DIVISOR + 1);
        assert!(pool.lookup(0, root.child(&[19_999]), &[19_999]).is_some());
        assert!(pool.lookup(0, root.child(&[15_000]), &[15_000]).is_some());
        assert_eq!(pool.lookup(0, root.child(&[0]), &[0]), None);
        pool.check([&blocks[..]].into_iter());
    }

    #[test]
    fn copying_keeps_the_source_until_the_plan_ends() {
        let mut pool = BlockPool::new(3, 2);
        let shared = pool.allocate().unwrap();
        pool.acquire(shared);
        let copy = pool.copy_on_write(shared).unwrap();
        assert!(!pool.is_shared(shared) && copy != shared);
        pool.release(shared);
        let other = pool.allocate().unwrap();
        assert_ne!(other, shared, "a source is not given away within the plan");
        assert_eq!(pool.allocate(), None);
        pool.end_plan();
        assert_eq!(pool.allocate(), Some(shared));
        pool.check([&[shared, copy, other][..]].into_iter());
    }
}
