//! Launches: kernel, grid, block, shared memory. Plans are plain values, so that tests can compare
//! them with a snapshot.

use std::fmt::{self, Display, Formatter};

use super::compile::Kernel;
use crate::device::{Activation, KvFormat, KvSpec, Precision};

/// A kernel's launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    pub kernel: Kernel,
    /// Blocks: x, y.
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
}

impl KernelFormat {
    /// Format of linear layers' weights and activations; `None` where the card does not support it.
    pub fn of(precision: Precision) -> Option<KernelFormat> {
        match precision {
            Precision::F32 => None,
            Precision::Bf16 => Some(KernelFormat::Bf16),
            Precision::Int8 => Some(KernelFormat::Int8),
            Precision::Fp8 => Some(KernelFormat::E4m3),
        }
    }

    /// Format of keys and values; `None` where the card does not support it.
    pub fn of_kv(format: KvFormat) -> Option<KernelFormat> {
        match format {
            KvFormat::F32 => None,
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
        }
    }

    pub fn is_scaled(self) -> bool {
        self != KernelFormat::Bf16
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
    more: Option<(&'static str, u32)>,
    rows: usize,
) -> Launch {
    let threads = row_threads(width);
    let mut macros = vec![("WIDTH", width as u32), ("OUTPUT", output as u32), ("THREADS", threads)];
    macros.extend(more);
    Launch {
        kernel: Kernel::new(name, &macros),
        grid: [rows as u32, 1],
        threads,
        shared_bytes: 0,
    }
}

/// Launch over `rows` rows; `delta_norm`: whether the delta is normalised before it is added.
pub fn add_norm(width: usize, output: KernelFormat, delta_norm: bool, rows: usize) -> Launch {
    row_kernel("add_norm", width, output, Some(("DELTA_NORM", delta_norm.into())), rows)
}

/// Launch over `rows` rows of `2 * width` values (gate and up).
pub fn gated(width: usize, output: KernelFormat, activation: Activation, rows: usize) -> Launch {
    let gelu = activation == Activation::GeluTanh;
    row_kernel("gated", width, output, Some(("GELU", gelu.into())), rows)
}

/// Launch over `rows` rows of activations or weights.
pub fn quantize(width: usize, output: KernelFormat, rows: usize) -> Launch {
    row_kernel("quantize", width, output, None, rows)
}

/// Launch over `rows` rows of `ids` logits, 1024 logits per block.
pub fn soft_cap(rows: usize, ids: usize) -> Launch {
    Launch {
        kernel: Kernel::new("soft_cap", &[]),
        grid: [rows as u32, ids.div_ceil(1024) as u32],
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
    pub bytes: usize,
    /// Whether the result is F32.
    pub wide: bool,
}

/// Launch that scales the INT32 accumulators of an INT8 product, `rows` rows of `columns`: 512 per
/// block.
pub fn scale_sums(rows: usize, columns: usize) -> Launch {
    Launch {
        kernel: Kernel::new("scale_sums", &[]),
        grid: [rows as u32, (columns as u32).div_ceil(512)],
        threads: 256,
        shared_bytes: 0,
    }
}

/// Bytes per row in one pipeline stage.
const STAGE: u32 = 128;

/// Product by `mma.sync`: one [tile](Tile::SYNC) per block, three stages in shared memory.
pub fn linear(shape: &LinearShape) -> Launch {
    let tile = Tile::SYNC;
    Launch {
        kernel: Kernel::new(
            "linear",
            &[("FORMAT", shape.format as u32), ("WIDE", shape.wide.into())],
        ),
        grid: [
            (shape.rows as u32).div_ceil(tile.rows()),
            (shape.columns as u32).div_ceil(tile.columns),
        ],
        threads: 256,
        shared_bytes: 3 * tile.stage_bytes(),
    }
}

/// Output tile of one thread block of a matrix product; on Hopper there are several sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Tile {
    pub columns: u32,
    /// Warpgroups that multiply, 64 rows each.
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
        let mut at = 0;
        while at < 8 {
            all[at] = Tile {
                columns: 256 >> (at / 2),
                consumers: 2 - at as u32 % 2,
            };
            at += 1;
        }
        all
    };

    /// Tile of a block of `linear`.
    pub const SYNC: Tile = Tile {
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

    /// Tiles whose estimated time is at most `times` the best tile's.
    pub fn within(shape: &LinearShape, multiprocessors: u32, times: f64) -> impl Iterator<Item = Tile> {
        let cost = move |tile: &Tile| tile.cycles(shape, multiprocessors);
        let most = times * cost(&Tile::of(shape, multiprocessors));
        Self::ALL.into_iter().filter(move |tile| cost(tile) <= most)
    }

    /// Estimated cycles of a product; see `kernels/linear_sm90.cu`.
    fn cycles(self, shape: &LinearShape, multiprocessors: u32) -> f64 {
        // Bytes per cycle into one multiprocessor, and out of the L2 cache to all of them:
        // estimates that no card has confirmed yet.
        const BYTES_IN: f64 = 56.0;
        const BYTES_IN_ALL: f64 = 4400.0;
        // Cycles to start a tile and to write its results.
        const AROUND: f64 = 1500.0;
        let (rows, columns, groups) = (
            f64::from(self.rows()),
            f64::from(self.columns),
            f64::from(self.consumers),
        );
        let tiles = (shape.rows as f64 / rows).ceil() * (shape.columns as f64 / columns).ceil();
        let multiprocessors = f64::from(multiprocessors);
        // Tensor core cycles per stage.
        let products = rows * columns / 32.0;
        // E4M3 reads its rows again for every 128 columns.
        let again = if shape.format == KernelFormat::E4m3 && self.columns > 128 {
            64.0
        } else {
            0.0
        };
        let shared = rows + columns + groups * (64.0 + again + columns);
        let bytes = f64::from(STAGE) * (rows.min(shape.rows as f64) + columns);
        let brought = bytes * (tiles.min(multiprocessors) / BYTES_IN_ALL).max(1.0 / BYTES_IN);
        let stages = (shape.bytes as f64 / f64::from(STAGE)).ceil();
        (tiles / multiprocessors).ceil() * (stages * products.max(shared).max(brought) + AROUND)
    }

    fn stage_bytes(self) -> u32 {
        (self.rows() + self.columns) * STAGE
    }

    /// Pipeline stages, by the same formula as the kernel.
    fn stages(self) -> u32 {
        ((225 << 10) / self.stage_bytes()).min(16)
    }
}

/// Product on Hopper, with persistent blocks: at most one per multiprocessor.
pub fn linear_sm90(shape: &LinearShape, tile: Tile, multiprocessors: u32) -> Launch {
    let tiles = (shape.rows as u32).div_ceil(tile.rows()) * (shape.columns as u32).div_ceil(tile.columns);
    Launch {
        kernel: Kernel::new(
            "linear_sm90",
            &[
                ("FORMAT", shape.format as u32),
                ("COLUMNS", tile.columns),
                ("CONSUMERS", tile.consumers),
                ("WIDE", shape.wide.into()),
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
pub fn peak(format: KernelFormat, hopper: bool, multiprocessors: u32, rounds: u32) -> (Launch, f64) {
    let macros = [("FORMAT", format as u32), ("WARPGROUPS", hopper.into())];
    // Rows and columns of one instruction's product; products in flight per block.
    let (rows, columns, at_once) = if hopper { (64, 128, 2 * 8) } else { (16, 8, 8 * 8) };
    let depth = 32 / format.bytes() as u32;
    let launch = Launch {
        kernel: Kernel::new("peak", &macros),
        // Two blocks of `mma.sync` share a multiprocessor.
        grid: [multiprocessors * if hopper { 1 } else { 2 }, 1],
        threads: 256,
        shared_bytes: if hopper { 192 * STAGE + 1024 } else { 0 },
    };
    let products = f64::from(launch.grid[0]) * f64::from(rounds) * f64::from(at_once);
    (launch, products * f64::from(2 * rows * columns * depth))
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

/// `WINDOW` of attention's kernels: the number of positions that a query sees, or 0 for all.
pub fn window(spec: KvSpec) -> u32 {
    match spec {
        KvSpec::Full => 0,
        KvSpec::Window(window) => window,
    }
}

/// Shape of attention and format of keys and values, as the kernels' macros take them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    pub heads: u32,
    pub kv_heads: u32,
    pub dim: u32,
    pub store: KernelFormat,
    /// Whether attention runs on Hopper.
    pub hopper: bool,
}

/// Shared memory per block that every supported card has.
const SHARED_BYTES: u32 = 99 << 10;

/// Tokens per KV block.
pub const BLOCK_TOKENS: u32 = 64;

impl Heads {
    /// Query heads that share a key and value head.
    pub fn group(&self) -> u32 {
        self.heads / self.kv_heads
    }

    /// Whether attention uses warpgroup instructions (wgmma).
    fn by_warpgroups(&self) -> bool {
        self.hopper && self.dim <= 128
    }

    /// Warps per thread block for many queries (prefill), 16 rows each.
    pub fn wide_warps(&self) -> u32 {
        match self.by_warpgroups() {
            false => 4,
            // With BF16 and such heads, registers suffice for eight warps only.
            true if self.store == KernelFormat::Bf16 && self.dim > 112 => 8,
            true => 12,
        }
    }

    /// Warps per narrow block.
    pub fn narrow_warps(&self) -> u32 {
        if self.by_warpgroups() { 4 } else { 1 }
    }

    /// Maximum queries per work item (one thread block's share) with `warps` warps.
    pub fn queries(&self, warps: u32) -> u32 {
        warps * 16 / self.group()
    }

    /// Launch over `tokens` tokens, one warp per head.
    pub fn rope_store(&self, tokens: usize) -> Launch {
        Launch {
            kernel: Kernel::new(
                "rope_store",
                &[
                    ("HEADS", self.heads),
                    ("KV_HEADS", self.kv_heads),
                    ("HEAD_DIM", self.dim),
                    ("BLOCK", BLOCK_TOKENS),
                    ("STORE", self.store as u32),
                ],
            ),
            grid: [tokens as u32, (self.heads + 2 * self.kv_heads).div_ceil(4)],
            threads: 128,
            shared_bytes: 0,
        }
    }

    /// Launch over `items` items with `warps` warps each. `window`: positions that a query sees, or
    /// 0 for all. `soft_cap`: bound of the scores.
    pub fn attention(&self, warps: u32, (window, soft_cap): (u32, Option<f32>), items: usize) -> Launch {
        let mut macros = vec![
            ("HEADS", self.heads),
            ("KV_HEADS", self.kv_heads),
            ("HEAD_DIM", self.dim),
            ("BLOCK", BLOCK_TOKENS),
            ("STORE", self.store as u32),
            ("ROW_WARPS", warps),
            ("WINDOW", window),
        ];
        macros.extend(soft_cap.map(|cap| ("SOFT_CAP", cap.to_bits())));
        let (name, shared_bytes) = if self.by_warpgroups() {
            ("attention_sm90", self.shared_by_warpgroups(warps))
        } else {
            let stages = self.stages(warps);
            macros.push(("STAGES", stages));
            ("attention", stages * self.stage_bytes() + self.query_bytes(warps))
        };
        Launch {
            kernel: Kernel::new(name, &macros),
            grid: [items as u32, self.kv_heads],
            threads: warps * 32,
            shared_bytes,
        }
    }

    /// Bytes of a KV block's keys for one head; its values have the same size.
    fn tile_bytes(&self) -> u32 {
        BLOCK_TOKENS * self.dim * self.store.bytes() as u32
    }

    /// Bytes of the scales of keys and values.
    fn scale_bytes(&self) -> u32 {
        if self.store.is_scaled() {
            2 * BLOCK_TOKENS * 4
        } else {
            0
        }
    }

    fn stage_bytes(&self) -> u32 {
        2 * self.tile_bytes() + self.scale_bytes()
    }

    /// With heads of more than 128 dimensions, queries are kept in shared memory, too.
    fn query_bytes(&self, warps: u32) -> u32 {
        if self.dim > 128 {
            warps * 16 * self.dim * self.store.bytes() as u32
        } else {
            0
        }
    }

    /// Pipeline stages: two, or one where two do not fit in [`SHARED_BYTES`].
    fn stages(&self, warps: u32) -> u32 {
        if 2 * self.stage_bytes() + self.query_bytes(warps) <= SHARED_BYTES {
            2
        } else {
            1
        }
    }

    /// Shared memory per block on Hopper, by the same formula as the kernel.
    fn shared_by_warpgroups(&self, warps: u32) -> u32 {
        let key_row = (self.dim * self.store.bytes() as u32).next_multiple_of(32);
        let stage = BLOCK_TOKENS * key_row + self.tile_bytes() + self.scale_bytes();
        // Blocks per multiprocessor.
        let sharing = match warps {
            4 if self.store == KernelFormat::Bf16 && self.dim > 112 => 2,
            4 => 3,
            _ => 1,
        };
        let stages = (((228 / sharing - 2) << 10) / stage).min(6);
        // Tiles are aligned to 1024 bytes.
        stages * stage + 1024
    }

    /// Launch over `tokens` tokens.
    pub fn merge(&self, tokens: usize) -> Launch {
        Launch {
            kernel: Kernel::new(
                "merge",
                &[
                    ("HEADS", self.heads),
                    ("KV_HEADS", self.kv_heads),
                    ("HEAD_DIM", self.dim),
                ],
            ),
            grid: [tokens as u32, 1],
            threads: 128,
            shared_bytes: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_follow_rows_and_columns() {
        let tile = |rows, columns, bytes| {
            let shape = LinearShape {
                format: KernelFormat::Int8,
                rows,
                columns,
                bytes,
                wide: false,
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

    /// A thread of the kernel scales two sums.
    #[test]
    fn every_sum_is_scaled_once() {
        for columns in [1, 511, 512, 513, 4096, 28_672] {
            let launch = scale_sums(3, columns);
            let scaled = 2 * launch.threads as usize;
            assert_eq!(launch.grid[0], 3);
            assert_eq!(launch.grid[1] as usize, columns.div_ceil(scaled), "{columns}");
        }
    }

    #[test]
    fn every_tile_fits() {
        for tile in Tile::ALL {
            assert!(
                tile.stages() >= 4 && tile.stages() * tile.stage_bytes() + 1024 <= 227 << 10,
                "{tile:?}"
            );
        }
    }
}
