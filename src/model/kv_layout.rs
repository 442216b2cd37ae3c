//! How a model's layers share KV blocks.
//!
//! Layers of one kind (without a window, or with windows of one size, and with heads of one shape)
//! keep the same positions. They are divided into groups of a fixed number of layers, the last of
//! them perhaps with fewer. Each group has a block table of its own, and a block holds one layer's
//! keys and values for each layer of a group. Blocks of all groups are thus equally large, and one
//! pool serves all of them. In memory, a block's layers lie in as many device pools, and layer `i` of
//! each group uses pool `i`.
//!
//! Where heads differ, the keys and values of some layers are larger than those of others. A device
//! pool has room for the largest, and as many smaller layers of a group as fit share it.
//!
//! See docs/decisions/099-layers-with-windows-keep-a-windows-blocks.md.

use crate::device::batch::StepBatch;
use crate::device::{HeadShape, KvPlace, KvShape, KvSpec};
use crate::model::config::Config;

/// Maximum number of block tables, unless there are more kinds of layers: each costs a little time
/// per block and memory per step.
const TABLES_MAX: usize = 16;

/// The device pool with a layer's part of each block, and the layer's place in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LayerKv {
    pub pool: usize,
    pub place: KvPlace,
}

/// The groups of a model's layers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct KvLayout {
    /// The kind of each block table's layers.
    pub tables: Vec<KvSpec>,
    /// Number of device pools: the largest layers per block.
    pub pools: usize,
    /// The shapes that layers have in each device pool.
    pub shapes: Vec<KvShape>,
    /// One entry per layer that has keys and values.
    pub layers: Vec<LayerKv>,
}

impl KvLayout {
    /// The layout of a model's layers.
    pub(super) fn of(config: &Config) -> KvLayout {
        KvLayout::new(&config.attention_layers())
    }

    /// As [`of`](Self::of), for layers with keys and values: the layout that leaves the fewest parts of blocks unused, and among these the one with the
    /// fewest tables.
    pub(super) fn new(layers: &[(KvSpec, HeadShape)]) -> KvLayout {
        let mut shapes: Vec<KvShape> = Vec::new();
        for (_, heads) in layers {
            if shapes.iter().all(|shape| shape.heads != *heads) {
                shapes.push(KvShape {
                    heads: *heads,
                    layers: 1,
                });
            }
        }
        let numbers = |heads: HeadShape| heads.kv_heads * heads.head_dim;
        let largest = shapes.iter().map(|shape| numbers(shape.heads)).max().unwrap_or(0);
        for shape in &mut shapes {
            shape.layers = largest / numbers(shape.heads);
        }
        let per_pool = |heads: HeadShape| {
            let shape = shapes.iter().find(|shape| shape.heads == heads);
            shape.map_or(1, |shape| shape.layers)
        };
        let mut kinds: Vec<((KvSpec, HeadShape), usize)> = Vec::new();
        for layer in layers {
            match kinds.iter_mut().find(|(kind, _)| kind == layer) {
                Some((_, count)) => *count += 1,
                None => kinds.push((*layer, 1)),
            }
        }
        let tables_with = |pools: usize| {
            let of_kind = |((_, heads), count): &((KvSpec, HeadShape), usize)| count.div_ceil(pools * per_pool(*heads));
            kinds.iter().map(of_kind).sum::<usize>()
        };
        let most = kinds.iter().map(|((_, heads), count)| count.div_ceil(per_pool(*heads)));
        let most = most.max().unwrap_or(1);
        let pools = (1..=most)
            .filter(|pools| *pools == most || tables_with(*pools) <= TABLES_MAX)
            .min_by_key(|pools| (tables_with(*pools) * pools, tables_with(*pools)))
            .unwrap_or(most);
        let (mut tables, mut places) = (Vec::new(), vec![None; layers.len()]);
        for (kind, count) in &kinds {
            let (spec, heads) = *kind;
            let group = pools * per_pool(heads);
            let first = tables.len();
            tables.extend(vec![spec; count.div_ceil(group)]);
            let of_kind = places.iter_mut().zip(layers).filter(|(_, layer)| *layer == kind);
            for (i, (place, _)) in of_kind.enumerate() {
                *place = Some(LayerKv {
                    pool: i % pools,
                    place: KvPlace {
                        heads,
                        table: first + i / group,
                        part: i % group / pools,
                    },
                });
            }
        }
        KvLayout {
            tables,
            pools,
            shapes,
            layers: places.into_iter().flatten().collect(),
        }
    }

    /// The kind of each block table's layers, and their heads.
    pub(super) fn kinds(&self) -> Vec<(KvSpec, HeadShape)> {
        let mut kinds: Vec<(KvSpec, Option<HeadShape>)> = self.tables.iter().map(|kind| (*kind, None)).collect();
        for layer in &self.layers {
            kinds[layer.place.table].1 = Some(layer.place.heads);
        }
        kinds
            .into_iter()
            .filter_map(|(kind, heads)| Some((kind, heads?)))
            .collect()
    }

    /// Checks that a batch's block tables have the blocks that its tokens need, all below
    /// `kv_blocks`.
    pub(super) fn check(&self, batch: &StepBatch, block_tokens: u32, kv_blocks: u32) -> Result<(), String> {
        if batch.block_tables.len() != self.tables.len() {
            let (found, want) = (batch.block_tables.len(), self.tables.len());
            return Err(format!("{found} block tables for a model with {want}"));
        }
        for (kind, table) in self.tables.iter().zip(&batch.block_tables) {
            for (i, s) in batch.sequences.iter().enumerate() {
                let first = kind.first_needed(s.kv_len - s.q_len) / block_tokens;
                let [from, to] = [first, s.kv_len.div_ceil(block_tokens)].map(|b| s.first_block as usize + b as usize);
                let Some(needed) = table.get(from..to) else {
                    return Err(format!("sequence {i}: its block table is too short"));
                };
                if let Some(block) = needed.iter().find(|block| **block >= kv_blocks) {
                    return Err(format!("sequence {i}: KV block {block} is not below {kv_blocks}"));
                }
            }
        }
        let mut copied = batch.block_copies.iter().flat_map(|copy| [copy.from, copy.to]);
        match copied.find(|block| *block >= kv_blocks) {
            Some(block) => Err(format!("KV block {block} to copy is not below {kv_blocks}")),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heads(kv_heads: usize, head_dim: usize) -> HeadShape {
        HeadShape {
            heads: kv_heads,
            kv_heads,
            head_dim,
            value_in_key: None,
        }
    }

    /// Layers of these kinds with heads of one shape.
    fn alike(kinds: &[KvSpec]) -> Vec<(KvSpec, HeadShape)> {
        kinds.iter().map(|kind| (*kind, heads(2, 8))).collect()
    }

    /// Layers as in Gemma 3: every `period`-th has no window.
    fn alternating(count: usize, period: usize) -> Vec<(KvSpec, HeadShape)> {
        differing(count, period, [heads(2, 8); 2])
    }

    /// Layers as in Gemma 4: those without windows have other heads.
    fn differing(count: usize, period: usize, [window, full]: [HeadShape; 2]) -> Vec<(KvSpec, HeadShape)> {
        let kind = |layer: usize| {
            if (layer + 1).is_multiple_of(period) {
                (KvSpec::Full, full)
            } else {
                (KvSpec::Window(1024), window)
            }
        };
        (0..count).map(kind).collect()
    }

    /// Pools, tables without and with a window, and parts of blocks that no layer uses.
    fn summary(layers: &[(KvSpec, HeadShape)]) -> (usize, usize, usize, usize) {
        let layout = KvLayout::new(layers);
        let mut used = vec![0; layout.pools * layout.tables.len()];
        let mut taken = std::collections::HashSet::new();
        for (at, (spec, heads)) in layout.layers.iter().zip(layers) {
            let place = at.place;
            assert_eq!((layout.tables[place.table], place.heads), (*spec, *heads));
            assert!(
                taken.insert((at.pool, place.table, place.part)),
                "two layers in one place"
            );
            let shape = layout.shapes.iter().find(|shape| shape.heads == *heads).unwrap();
            assert!(place.part < shape.layers && at.pool < layout.pools);
            used[place.table * layout.pools + at.pool] += 1;
        }
        let full = layout.tables.iter().filter(|table| **table == KvSpec::Full).count();
        let unused = used.iter().filter(|count| **count == 0).count();
        (layout.pools, full, layout.tables.len() - full, unused)
    }

    #[test]
    fn layers_of_one_kind_have_one_table() {
        assert_eq!(summary(&alike(&[KvSpec::Full; 80])), (80, 1, 0, 0));
        assert_eq!(summary(&alike(&[KvSpec::Window(4096); 32])), (32, 0, 1, 0));
        assert_eq!(KvLayout::new(&[]).tables, []);
    }

    #[test]
    fn groups_of_published_models_waste_little() {
        // Gemma 2 2B, 9B and 27B; gpt-oss 20B has its layers in the same way.
        assert_eq!(summary(&alternating(26, 2)), (13, 1, 1, 0));
        assert_eq!(summary(&alternating(42, 2)), (21, 1, 1, 0));
        assert_eq!(summary(&alternating(46, 2)), (23, 1, 1, 0));
        // Gemma 3 1B, 4B, 12B and 27B.
        assert_eq!(summary(&alternating(26, 6)), (2, 2, 11, 0));
        assert_eq!(summary(&alternating(34, 6)), (5, 1, 6, 1));
        assert_eq!(summary(&alternating(48, 6)), (8, 1, 5, 0));
        assert_eq!(summary(&alternating(62, 6)), (4, 3, 13, 2));
        // OLMo 3 7B and 32B, EXAONE 4 32B.
        assert_eq!(summary(&alternating(32, 4)), (8, 1, 3, 0));
        assert_eq!(summary(&alternating(64, 4)), (16, 1, 3, 0));
    }

    #[test]
    fn smaller_layers_share_the_room_of_a_larger_one() {
        let parts = |[window, full]: [HeadShape; 2]| {
            let layout = KvLayout::new(&differing(6, 6, [window, full]));
            let layers = |heads| layout.shapes.iter().find(|shape| shape.heads == heads).unwrap().layers;
            (layers(window), layers(full))
        };
        // Gemma 4 31B and 26B-A4B: a layer without a window is half as large.
        let (dense, experts) = ([heads(16, 256), heads(4, 512)], [heads(8, 256), heads(2, 512)]);
        assert_eq!((parts(dense), parts(experts)), ((1, 2), (1, 2)));
        let kinds = KvLayout::new(&differing(6, 6, dense)).kinds();
        assert_eq!(kinds.last(), Some(&(KvSpec::Full, dense[1])));
        assert!(
            kinds[..kinds.len() - 1]
                .iter()
                .all(|kind| *kind == (KvSpec::Window(1024), dense[0]))
        );
        assert_eq!(summary(&differing(60, 6, dense)), (5, 1, 10, 0));
        assert_eq!(summary(&differing(30, 6, experts)), (5, 1, 5, 0));
        // As in E2B, a layer with a window may be half as large.
        let small = [heads(2, 256), heads(2, 512)];
        assert_eq!(parts(small), (2, 1));
        assert_eq!(summary(&differing(24, 6, small)), (2, 2, 5, 0));
        // Neither fits twice.
        let odd = [heads(2, 24), heads(1, 32)];
        assert_eq!((parts(odd), summary(&differing(4, 2, odd))), ((1, 1), (2, 1, 1, 0)));
    }

    #[test]
    fn blocks_that_a_step_needs_are_checked() {
        let layout = KvLayout::new(&alike(&[KvSpec::Full, KvSpec::Window(17)]));
        // One token at position 64: its window begins at position 48, block 3 of 16 tokens.
        let with = |change: &dyn Fn(&mut StepBatch)| {
            let mut batch = StepBatch::default();
            batch.push([0], 65, 0..5);
            let mut batch = batch.with_tables(2);
            change(&mut batch);
            layout.check(&batch, 16, 10)
        };
        let none = crate::device::batch::NO_BLOCK;
        assert_eq!(with(&|_| ()), Ok(()));
        assert_eq!(with(&|batch| batch.block_tables[1][..3].fill(none)), Ok(()));
        let behind = with(&|batch| batch.block_tables[1][..4].fill(none)).unwrap_err();
        assert!(behind.contains("KV block 4294967295"), "{behind}");
        assert!(with(&|batch| batch.block_tables[0][0] = none).is_err());
        assert!(with(&|batch| batch.block_tables[0][2] = 10).is_err());
        assert!(
            with(&|batch| batch.block_tables[1].truncate(4))
                .unwrap_err()
                .contains("too short")
        );
        assert!(
            with(&|batch| batch.block_tables.truncate(1))
                .unwrap_err()
                .contains("1 block tables")
        );
    }
}
