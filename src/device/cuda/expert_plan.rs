//! Launches of the kernels of experts, as plain values.
//!
//! See docs/decisions/102-a-gpu-sorts-experts-rows-by-itself.md.

use super::compile::Kernel;
use super::plan::{KernelFormat, Launch, Tile};

/// Shape of experts' products.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertShape {
    pub experts: usize,
    /// Rows that are sorted by expert.
    pub rows: usize,
    /// Rows of a tile, which are of one expert: at most those of the products' tiles.
    pub tile_rows: usize,
}

impl ExpertShape {
    /// Maximum number of tiles: each expert that has rows may have one that is not full.
    pub fn tiles_max(&self) -> usize {
        self.rows / self.tile_rows + self.experts.min(self.rows)
    }

    /// Launch that sorts rows by expert.
    pub fn sort_rows(&self) -> Launch {
        Launch {
            kernel: Kernel::new("sort_rows", &[]),
            grid: [self.experts as u32, 1],
            threads: 512,
            shared_bytes: self.experts as u32 * 4,
        }
    }

    /// Matmul of sorted rows with a matrix of `columns` output features per expert, by the tiles of
    /// [`linear`](super::plan::linear) on every card.
    pub fn grouped_linear(&self, format: KernelFormat, columns: usize) -> Launch {
        let tile = Tile::MMA_SYNC;
        Launch {
            kernel: Kernel::new("grouped_linear", &[("FORMAT", format as u32), ("WIDE", 0)]),
            grid: [self.tiles_max() as u32, (columns as u32).div_ceil(tile.columns)],
            threads: 256,
            shared_bytes: 3 * tile.stage_bytes(),
        }
    }
}

/// Launch over `tokens` rows and the logits of `experts` experts: 8 x 16 per block.
pub fn router(tokens: usize, experts: usize) -> Launch {
    Launch {
        kernel: Kernel::new("router", &[]),
        grid: [tokens.div_ceil(8) as u32, experts.div_ceil(16) as u32],
        threads: 128,
        shared_bytes: 0,
    }
}

/// Launch over `tokens` rows of a router's logits, one warp per row. Warps have the scores of `groups` groups of experts in
/// shared memory, if there are several.
pub fn choose_experts(tokens: usize, groups: usize) -> Launch {
    Launch {
        kernel: Kernel::new("choose_experts", &[]),
        grid: [tokens.div_ceil(4) as u32, 1],
        threads: 128,
        shared_bytes: if groups > 1 { 4 * groups as u32 * 4 } else { 0 },
    }
}

/// Launch over `rows` sorted rows, which are those of tokens times the experts' weights.
pub fn scale_rows(rows: usize) -> Launch {
    Launch {
        kernel: Kernel::new("scale_rows", &[]),
        grid: [rows as u32, 1],
        threads: 128,
        shared_bytes: 0,
    }
}

/// Launch over `tokens` rows of sums over experts.
pub fn combine_experts(tokens: usize) -> Launch {
    Launch {
        kernel: Kernel::new("combine_experts", &[]),
        grid: [tokens as u32, 1],
        threads: 128,
        shared_bytes: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of up to 4,096 experts, in groups of two or one.
    #[test]
    fn scores_of_groups_fit_in_shared_memory() {
        let bytes = [1, 8, 4096].map(|groups| choose_experts(9, groups).shared_bytes);
        assert_eq!(bytes, [0, 8 * 4 * 4, 64 << 10]);
    }

    /// As many tiles as rows may fill, however they spread over the experts.
    #[test]
    fn every_spread_of_rows_has_its_tiles() {
        for (spread, experts) in [
            (vec![1], 4),
            (vec![129, 1, 1], 3),
            (vec![127, 127, 257], 3),
            (vec![1; 5], 200),
        ] {
            for tile_rows in [16, 128] {
                let shape = ExpertShape {
                    experts,
                    rows: spread.iter().sum(),
                    tile_rows,
                };
                let tiles: usize = spread.iter().map(|rows| rows.div_ceil(tile_rows)).sum();
                assert!(tiles <= shape.tiles_max(), "{spread:?} of {experts}");
            }
        }
        let none = ExpertShape {
            experts: 4,
            rows: 0,
            tile_rows: 128,
        };
        assert_eq!(none.tiles_max(), 0);
    }
}
