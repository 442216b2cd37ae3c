//! Launches: kernel, grid, block, shared memory. Plans are plain values, so that tests can compare
//! them with a snapshot.

use std::fmt::{self, Display, Formatter};

use super::attention_plan::BLOCK_TOKENS;
use super::compile::Kernel;
use crate::device::{Activation, KvFormat, LatentShape, Precision};

/// A kernel's launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    pub kernel: Kernel,
    /// Thread blocks: x, y.
    pub grid: [u32; 2],
    /// Threads per block.
    pub threads: u32,
    /// Dynamic shared memory per block.
    pub shared_bytes: u32,
}

impl Display for Launch {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let [x, y] = self.grid;
        write!(
            f,
            "{}: {x} x {y} blocks of {}, {} B",
            self.kernel, self.threads, self.shared_bytes
        )
    }
}

/// Number format on the card. The discriminant is the kernels' `FORMAT`, `OUTPUT` and `STORE`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KernelFormat {
    Int8 = 0,
    E4m3 = 1,
    Bf16 = 2,
    /// Of routers' weights alone.
    F32 = 3,
}

impl KernelFormat {
    /// Format of linear layers' weights and activations, but for weights in codes of four bits; `None`: the card does not support
    /// it.
    pub fn of(precision: Precision) -> Option<KernelFormat> {
        match precision {
            Precision::F32 => None,
            Precision::Bf16 => Some(KernelFormat::Bf16),
            Precision::Int8 | Precision::W4a8 => Some(KernelFormat::Int8),
            Precision::Fp8 => Some(KernelFormat::E4m3),
        }
    }

    /// Format of keys and values; `None`: the card does not support it.
    pub fn of_kv(format: KvFormat) -> Option<KernelFormat> {
        match format {
            KvFormat::F32 | KvFormat::Int4 => None,
            KvFormat::Bf16 => Some(KernelFormat::Bf16),
            KvFormat::Int8 => Some(KernelFormat::Int8),
            KvFormat::Fp8 => Some(KernelFormat::E4m3),
        }
    }

    /// Bytes per value.
    pub fn bytes(self) -> usize {
        match self {
            KernelFormat::Int8 | KernelFormat::E4m3 => 1,
            KernelFormat::Bf16 => 2,
            KernelFormat::F32 => 4,
        }
    }

    pub fn is_scaled(self) -> bool {
        matches!(self, KernelFormat::Int8 | KernelFormat::E4m3)
    }
}

/// Threads per block of the kernels with one row per block: up to rows of 32,768, each thread holds
/// at most four vectors of eight values.
pub fn row_threads(width: usize) -> u32 {
    match width {
        0..=4096 => 128,
        4097..=8192 => 256,
        8193..=16384 => 512,
        _ => 1024,
    }
}

fn row_kernel(
    name: &'static str,
    width: usize,
    output: KernelFormat,
    extra_macros: &[(&'static str, u32)],
    rows: usize,
) -> Launch {
    let threads = row_threads(width);
    let mut macros = vec![("WIDTH", width as u32), ("OUTPUT", output as u32), ("THREADS", threads)];
    macros.extend(extra_macros);
    Launch {
        kernel: Kernel::new(name, &macros),
        grid: [rows as u32, 1],
        threads,
        shared_bytes: 0,
    }
}

/// What [`add_norm`] does besides.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NormKind {
    /// Whether the delta is normalised before it is added.
    pub of_delta: bool,
    /// Whether the mean is subtracted.
    pub is_centered: bool,
    /// Whether the sum has a factor.
    pub is_scaled: bool,
}

/// Launch over `rows` rows.
pub fn add_norm(width: usize, output: KernelFormat, kind: NormKind, rows: usize) -> Launch {
    let mut macros = vec![("DELTA_NORM", kind.of_delta.into())];
    macros.extend(kind.is_centered.then_some(("CENTERED", 1)));
    macros.extend(kind.is_scaled.then_some(("SCALED", 1)));
    row_kernel("add_norm", width, output, &macros, rows)
}

/// Launch over `tokens` tokens, of each of which `width` values are normalised.
pub fn norm_heads(width: usize, tokens: usize) -> Launch {
    row_kernel("norm_heads", width, KernelFormat::Bf16, &[], tokens)
}

/// Launch over `rows` rows of `2 * width` values (gate and up), or of `width` without a gate.
pub fn gated(width: usize, output: KernelFormat, activation: Activation, rows: usize) -> Launch {
    let activation = match activation {
        Activation::Silu => 0,
        Activation::GeluTanh => 1,
        Activation::ClampedSwiglu { .. } => 2,
        Activation::SquaredRelu => 3,
    };
    row_kernel("gated", width, output, &[("ACTIVATION", activation)], rows)
}

/// Launch over `rows` rows, of which a layer's part of its inputs has `width` values.
pub fn gate_input(width: usize, output: KernelFormat, rows: usize) -> Launch {
    row_kernel("gate_input", width, output, &[], rows)
}

/// Launch over `parts` parts of rows, one warp each.
pub fn add_inputs(parts: usize) -> Launch {
    Launch {
        kernel: Kernel::new("add_inputs", &[]),
        grid: [parts.div_ceil(4) as u32, 1],
        threads: 128,
        shared_bytes: 0,
    }
}

/// Launch over `rows` rows of `heads` heads, each with a matrix of `columns` output features, by the tiles of [`linear`] on every card.
pub fn head_linear(rows: usize, heads: usize, columns: usize) -> Launch {
    let tile = Tile::MMA_SYNC;
    let column_tiles = (columns as u32).div_ceil(tile.columns);
    Launch {
        kernel: Kernel::new("head_linear", &[]),
        grid: [(rows as u32).div_ceil(tile.rows()), heads as u32 * column_tiles],
        threads: 256,
        shared_bytes: 3 * tile.stage_bytes(),
    }
}

/// Launch over `tokens` tokens, a warp for each query head and one for the key. `block_bytes`: from a block to the next one.
pub fn latent_store(heads: usize, shape: LatentShape, block_bytes: u32, tokens: usize) -> Launch {
    let macros = [
        ("HEADS", heads as u32),
        ("RANK", shape.rank as u32),
        ("PLAIN_DIM", shape.plain_dim as u32),
        ("ROPE_DIM", shape.rope_dim as u32),
        ("BLOCK", BLOCK_TOKENS),
        ("BLOCK_BYTES", block_bytes),
    ];
    Launch {
        kernel: Kernel::new("latent_store", &macros),
        grid: [tokens as u32, (heads as u32 + 1).div_ceil(4)],
        threads: 128,
        shared_bytes: 0,
    }
}

/// Launch over `rows` rows of activations or weights.
pub fn quantize(width: usize, output: KernelFormat, rows: usize) -> Launch {
    row_kernel("quantize", width, output, &[], rows)
}

/// Launch over `rows` rows of logits, 1024 logits per block.
pub fn soft_cap(rows: usize, vocab_size: usize) -> Launch {
    Launch {
        kernel: Kernel::new("soft_cap", &[]),
        grid: [rows as u32, vocab_size.div_ceil(1024) as u32],
        threads: 256,
        shared_bytes: 0,
    }
}

/// Launch over `rows` tokens, one warp per row.
pub fn embed(width: usize, rows: usize) -> Launch {
    Launch {
        kernel: Kernel::new("embed", &[("WIDTH", width as u32)]),
        grid: [rows.div_ceil(4) as u32, 1],
        threads: 128,
        shared_bytes: 0,
    }
}

/// Launch for `count` values, eight per thread.
pub fn random_weights(count: usize) -> Launch {
    Launch {
        kernel: Kernel::new("random_weights", &[]),
        grid: [count.div_ceil(256 * 8) as u32, 1],
        threads: 256,
        shared_bytes: 0,
    }
}

/// A linear operation's shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LinearShape {
    pub format: KernelFormat,
    pub rows: usize,
    /// Output features.
    pub columns: usize,
    /// Bytes per row of activations, and per row of weights.
    pub row_bytes: usize,
    /// Whether the result is F32, not BF16.
    pub f32_output: bool,
}

/// Launch that scales the INT32 accumulators of an INT8 matmul, `rows` x `columns`: 512 per block.
pub fn scale_sums(rows: usize, columns: usize) -> Launch {
    Launch {
        kernel: Kernel::new("scale_sums", &[]),
        grid: [rows as u32, (columns as u32).div_ceil(512)],
        threads: 256,
        shared_bytes: 0,
    }
}

/// Bytes per row of an operand in one pipeline stage.
const STAGE_ROW_BYTES: u32 = 128;

/// Matmul with `mma.sync`: one [tile](Tile::MMA_SYNC) per thread block, three stages in shared
/// memory.
pub fn linear(shape: &LinearShape) -> Launch {
    let tile = Tile::MMA_SYNC;
    Launch {
        kernel: Kernel::new(
            "linear",
            &[("FORMAT", shape.format as u32), ("WIDE", shape.f32_output.into())],
        ),
        grid: [
            (shape.rows as u32).div_ceil(tile.rows()),
            (shape.columns as u32).div_ceil(tile.columns),
        ],
        threads: 256,
        shared_bytes: 3 * tile.stage_bytes(),
    }
}

/// Output tile of one thread block of the matmul kernel; on Hopper, several sizes are available.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Tile {
    pub columns: u32,
    /// Warpgroups that multiply, each 64 rows of the tile.
    pub consumers: u32,
}

impl Display for Tile {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{} x {}", self.rows(), self.columns)
    }
}

impl Tile {
    /// All tiles that `linear_sm90` supports.
    pub const ALL: [Tile; 8] = {
        let mut all = [Tile {
            columns: 0,
            consumers: 0,
        }; 8];
        let mut i = 0;
        while i < 8 {
            all[i] = Tile {
                columns: 256 >> (i / 2),
                consumers: 2 - i as u32 % 2,
            };
            i += 1;
        }
        all
    };

    /// The tile of kernel `linear`.
    pub const MMA_SYNC: Tile = Tile {
        columns: 128,
        consumers: 2,
    };

    pub fn rows(self) -> u32 {
        self.consumers * 64
    }

    /// The tile with the lowest estimated time for this shape; among equals, the largest.
    pub fn of(shape: &LinearShape, multiprocessors: u32) -> Tile {
        let cost = |tile: &Tile| tile.cycles(shape, multiprocessors);
        let best = Self::ALL.into_iter().min_by(|a, b| cost(a).total_cmp(&cost(b)));
        best.unwrap_or(Self::ALL[0])
    }

    /// Tiles whose estimated time is at most `factor` times the best tile's.
    pub fn within_factor(shape: &LinearShape, multiprocessors: u32, factor: f64) -> impl Iterator<Item = Tile> {
        let cost = move |tile: &Tile| tile.cycles(shape, multiprocessors);
        let cost_max = factor * cost(&Tile::of(shape, multiprocessors));
        Self::ALL.into_iter().filter(move |tile| cost(tile) <= cost_max)
    }

    /// Estimated cycles of a matmul; see `kernels/linear_sm90.cu`.
    fn cycles(self, shape: &LinearShape, multiprocessors: u32) -> f64 {
        // Bandwidth of one multiprocessor, and of the L2 cache to all multiprocessors: estimates,
        // not yet calibrated on a GPU.
        const SM_BYTES_PER_CYCLE: f64 = 56.0;
        const L2_BYTES_PER_CYCLE: f64 = 4400.0;
        // Cycles to start a tile and to write its results.
        const TILE_OVERHEAD_CYCLES: f64 = 1500.0;
        let (rows, columns, warpgroups) = (
            f64::from(self.rows()),
            f64::from(self.columns),
            f64::from(self.consumers),
        );
        let tiles = (shape.rows as f64 / rows).ceil() * (shape.columns as f64 / columns).ceil();
        let multiprocessors = f64::from(multiprocessors);
        // Tensor core cycles per stage.
        let mma_cycles = rows * columns / 32.0;
        // With E4M3, a warpgroup reads its 64 rows again for every 128 columns.
        let reread_rows = if shape.format == KernelFormat::E4m3 && self.columns > 128 {
            64.0
        } else {
            0.0
        };
        // Shared memory moves 128 bytes, one row of a stage, per cycle: rows are written once, then
        // read by each warpgroup.
        let shared_memory_cycles = rows + columns + warpgroups * (64.0 + reread_rows + columns);
        let bytes = f64::from(STAGE_ROW_BYTES) * (rows.min(shape.rows as f64) + columns);
        let load_cycles = bytes * (tiles.min(multiprocessors) / L2_BYTES_PER_CYCLE).max(1.0 / SM_BYTES_PER_CYCLE);
        let stage_cycles = mma_cycles.max(shared_memory_cycles).max(load_cycles);
        let stages = (shape.row_bytes as f64 / f64::from(STAGE_ROW_BYTES)).ceil();
        (tiles / multiprocessors).ceil() * (stages * stage_cycles + TILE_OVERHEAD_CYCLES)
    }

    pub(super) fn stage_bytes(self) -> u32 {
        (self.rows() + self.columns) * STAGE_ROW_BYTES
    }

    /// Pipeline stages, by the same formula as the kernel.
    fn stages(self) -> u32 {
        ((225 << 10) / self.stage_bytes()).min(16)
    }
}

/// Matmul on Hopper, with persistent thread blocks: at most one per multiprocessor.
pub fn linear_sm90(shape: &LinearShape, tile: Tile, multiprocessors: u32) -> Launch {
    let tiles = (shape.rows as u32).div_ceil(tile.rows()) * (shape.columns as u32).div_ceil(tile.columns);
    Launch {
        kernel: Kernel::new(
            "linear_sm90",
            &[
                ("FORMAT", shape.format as u32),
                ("COLUMNS", tile.columns),
                ("CONSUMERS", tile.consumers),
                ("WIDE", shape.f32_output.into()),
            ],
        ),
        grid: [tiles.min(multiprocessors), 1],
        threads: 128 + tile.consumers * 128,
        // Tiles are aligned to 1024 bytes.
        shared_bytes: tile.stages() * tile.stage_bytes() + 1024,
    }
}

/// Launch that keeps the tensor cores of all `multiprocessors` busy for `rounds` rounds, and its
/// number of operations.
pub fn peak(format: KernelFormat, is_hopper: bool, multiprocessors: u32, rounds: u32) -> (Launch, f64) {
    let macros = [("FORMAT", format as u32), ("WARPGROUPS", is_hopper.into())];
    // Output rows and columns of one matmul instruction; instructions per thread block and round.
    let (rows, columns, per_round) = if is_hopper { (64, 128, 2 * 8) } else { (16, 8, 8 * 8) };
    let depth = 32 / format.bytes() as u32;
    let launch = Launch {
        kernel: Kernel::new("peak", &macros),
        // With `mma.sync`, two thread blocks share a multiprocessor.
        grid: [multiprocessors * if is_hopper { 1 } else { 2 }, 1],
        threads: 256,
        shared_bytes: if is_hopper { 192 * STAGE_ROW_BYTES + 1024 } else { 0 },
    };
    let instructions = f64::from(launch.grid[0]) * f64::from(rounds) * f64::from(per_round);
    (launch, instructions * f64::from(2 * rows * columns * depth))
}

/// Launch that draws one token from each of `rows` rows of logits.
pub fn sample(rows: usize) -> Launch {
    Launch {
        kernel: Kernel::new("sample", &[]),
        grid: [rows as u32, 1],
        threads: 1024,
        shared_bytes: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chosen_tiles_grow_with_rows_and_columns() {
        let tile = |rows, columns, row_bytes| {
            let shape = LinearShape {
                format: KernelFormat::Int8,
                rows,
                columns,
                row_bytes,
                f32_output: false,
            };
            let tile = Tile::of(&shape, 132);
            (tile.columns, tile.consumers)
        };
        // Few rows: as many multiprocessors as possible read weights.
        assert_eq!(tile(1, 4096, 4096), (32, 1));
        assert_eq!(tile(64, 6144, 4096), (64, 1));
        // Many rows: large tiles reuse each byte that is loaded.
        assert_eq!(tile(2048, 4096, 4096), (256, 2));
        assert_eq!(tile(512, 28672, 4096), (256, 2));
    }

    /// A thread of the kernel scales two accumulators.
    #[test]
    fn every_accumulator_is_scaled_once() {
        for columns in [1, 511, 512, 513, 4096, 28_672] {
            let launch = scale_sums(3, columns);
            let scaled = 2 * launch.threads as usize;
            assert_eq!(launch.grid[0], 3);
            assert_eq!(launch.grid[1] as usize, columns.div_ceil(scaled), "{columns}");
        }
    }

    #[test]
    fn every_tile_fits_in_shared_memory() {
        for tile in Tile::ALL {
            assert!(
                tile.stages() >= 4 && tile.stages() * tile.stage_bytes() + 1024 <= 227 << 10,
                "{tile:?}"
            );
        }
    }
}
