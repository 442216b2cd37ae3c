//! Launches of the kernels of weights in codes of four bits, as plain values, and the sizes of what they read.
//!
//! The layouts are described in `kernels/common/coded_tile.cuh`. See docs/decisions/115-a-gpu-expands-four-bits-in-registers.md.

use super::compile::Kernel;
use super::expert_plan::ExpertShape;
use super::plan::{self, KernelFormat, Launch};

/// Output features of a panel.
pub(super) const PANEL: usize = 8;
/// Columns of a step of a product, of which a group has whole ones.
pub(super) const STEP: usize = 32;
/// Columns of a panel's unit.
pub(super) const UNIT: usize = 128;
/// Bytes of a panel's codes in a unit.
pub(super) const UNIT_BYTES: usize = PANEL * UNIT / 2;
/// Bytes of a panel's factors and zero points in a group.
pub(super) const RECORD_BYTES: usize = PANEL * 5;

/// How the columns of a matrix are cut into groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CodeGroups {
    /// Columns of the matrix, of which a group has as many as every other one.
    pub columns: usize,
    pub group: usize,
}

impl CodeGroups {
    /// Groups of a row.
    pub fn count(self) -> usize {
        self.columns / self.group
    }

    /// Columns of a group with its padding. A row's single group needs none.
    pub fn padded(self) -> usize {
        match self.count() {
            1 => self.group,
            _ => self.group.next_multiple_of(STEP),
        }
    }

    /// Bytes of a row of activations.
    pub fn row_bytes(self) -> usize {
        self.count() * self.padded()
    }

    /// Units of a panel.
    pub fn units(self) -> usize {
        self.row_bytes().div_ceil(UNIT)
    }

    /// Bytes of the codes of a matrix with `rows` output features, and of its factors and zero points.
    pub fn matrix_bytes(self, rows: usize) -> (usize, usize) {
        let panels = rows.div_ceil(PANEL);
        (panels * self.units() * UNIT_BYTES, panels * self.count() * RECORD_BYTES)
    }

    /// The kernels' `GROUP_STEPS`.
    fn steps(self) -> u32 {
        match self.count() {
            1 => 0,
            _ => (self.padded() / STEP) as u32,
        }
    }

    /// Groups whose factors are in a stage, by the same formula as the kernel.
    fn slots(self) -> u32 {
        match self.steps() {
            0 => 0,
            1 => 4,
            2 => 2,
            steps if steps.is_multiple_of(4) => 1,
            _ => 2,
        }
    }

    /// Launch that quantizes `rows` rows, each group with its scale.
    pub fn quantize(self, rows: usize) -> Launch {
        if self.count() == 1 {
            return plan::quantize(self.columns, KernelFormat::Int8, rows);
        }
        // As many lanes as a group has vectors, up to a warp.
        let lanes = (self.padded() / 8).next_power_of_two().min(32);
        Launch {
            kernel: Kernel::new("quantize_groups", &[("GROUP", self.group as u32)]),
            grid: [(rows * self.count()).div_ceil(128 / lanes) as u32, 1],
            threads: 128,
            shared_bytes: 0,
        }
    }

    /// Matmul of `rows` rows with a matrix of `columns` output features.
    pub fn linear(self, rows: usize, columns: usize) -> Launch {
        let tile = CodedTile::of(rows);
        Launch {
            grid: [rows.div_ceil(tile.rows) as u32, columns.div_ceil(tile.columns) as u32],
            ..self.launch("coded_linear", tile)
        }
    }

    /// Matmul of sorted rows with a matrix of `columns` output features per expert.
    pub fn grouped_linear(self, shape: &ExpertShape, columns: usize) -> Launch {
        let tile = CodedTile::of(shape.tile_rows);
        Launch {
            grid: [shape.tiles_max() as u32, columns.div_ceil(tile.columns) as u32],
            ..self.launch("grouped_coded_linear", tile)
        }
    }

    fn launch(self, name: &'static str, tile: CodedTile) -> Launch {
        Launch {
            kernel: Kernel::new(name, &[("ROWS", tile.rows as u32), ("GROUP_STEPS", self.steps())]),
            grid: [0, 0],
            threads: tile.threads,
            shared_bytes: tile.stages * tile.stage_bytes(self.slots()),
        }
    }
}

/// Output tile of one thread block. All tiles add up in the same order, so the choice changes no bit.
#[derive(Debug, Clone, Copy)]
struct CodedTile {
    rows: usize,
    columns: usize,
    threads: u32,
    stages: u32,
}

impl CodedTile {
    const ALL: [CodedTile; 3] = [
        CodedTile {
            rows: 16,
            columns: 32,
            threads: 128,
            stages: 8,
        },
        CodedTile {
            rows: 64,
            columns: 64,
            threads: 128,
            stages: 4,
        },
        CodedTile {
            rows: 128,
            columns: 128,
            threads: 256,
            stages: 3,
        },
    ];

    /// The smallest tile with so many rows, or the largest of all. So up to 128 rows read each weight once.
    fn of(rows: usize) -> CodedTile {
        let [.., largest] = Self::ALL;
        Self::ALL.into_iter().find(|tile| rows <= tile.rows).unwrap_or(largest)
    }

    /// By the same formula as the kernel.
    fn stage_bytes(self, slots: u32) -> u32 {
        let (rows, panels) = (self.rows as u32, (self.columns / PANEL) as u32);
        let codes = panels * UNIT_BYTES as u32;
        let scales = slots * (rows * 4 + panels * RECORD_BYTES as u32);
        (rows * UNIT as u32 + codes + scales).next_multiple_of(128)
    }
}

/// Rows of the tiles into which `rows` rows of `experts` experts are cut, as most experts have about as many.
pub fn expert_tile_rows(rows: usize, experts: usize) -> usize {
    CodedTile::of(rows.div_ceil(experts)).rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_padded_to_whole_steps() {
        for (columns, group, count, padded, units, steps) in [
            (4096, 128, 32, 128, 32, 4),
            (2880, 32, 90, 32, 23, 1),
            (2880, 96, 30, 96, 23, 3),
            (64, 8, 8, 32, 2, 1),
            (144, 144, 1, 144, 2, 0),
        ] {
            let groups = CodeGroups { columns, group };
            let found = (groups.count(), groups.padded(), groups.units(), groups.steps());
            assert_eq!(found, (count, padded, units, steps), "{groups:?}");
        }
    }

    #[test]
    fn a_matrix_takes_half_a_byte_per_code_and_five_per_group() {
        let groups = CodeGroups {
            columns: 4096,
            group: 128,
        };
        assert_eq!(groups.matrix_bytes(4096), (4096 * 2048, 4096 * 32 * 5));
        assert_eq!(groups.matrix_bytes(9), groups.matrix_bytes(16), "panels are whole");
    }

    /// As many groups as begin or go on in four steps, wherever a stage begins.
    #[test]
    fn a_stage_has_the_factors_of_its_groups() {
        for steps in 1..20usize {
            let groups = CodeGroups {
                columns: steps * STEP * 60,
                group: steps * STEP,
            };
            let in_stage = |stage: usize| (stage * 4 + 3) / steps - stage * 4 / steps + 1;
            let most = (0..15 * steps).map(in_stage).max().unwrap();
            assert_eq!(groups.slots() as usize, most, "{steps} steps");
        }
    }

    #[test]
    fn tiles_grow_with_rows_and_fit_in_shared_memory() {
        let rows = |rows| CodedTile::of(rows).rows;
        assert_eq!(
            [1, 16, 17, 64, 65, 129, 5000].map(rows),
            [16, 16, 64, 64, 128, 128, 128]
        );
        assert_eq!((expert_tile_rows(256, 32), expert_tile_rows(8192, 32)), (16, 128));
        for tile in CodedTile::ALL {
            assert!(tile.stages * tile.stage_bytes(4) <= 99 << 10, "{tile:?}");
        }
    }

    #[test]
    fn every_group_is_quantized() {
        for (columns, group) in [(64, 8), (2880, 32), (4096, 128), (1920, 96), (4096, 2048)] {
            let launch = CodeGroups { columns, group }.quantize(7);
            let vectors = group.next_multiple_of(STEP) / 8;
            let lanes = [4, 8, 16, 32].into_iter().find(|lanes| *lanes >= vectors).unwrap_or(32);
            assert!(
                launch.grid[0] as usize * (128 / lanes) >= 7 * columns / group,
                "{columns} {group}"
            );
        }
    }
}
