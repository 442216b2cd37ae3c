//! Launches of attention, and of the storage of its keys and values.

use super::compile::Kernel;
use super::plan::{KernelFormat, Launch};
use crate::device::{HeadShape, KvSpec};

/// `WINDOW` of attention's kernels: the number of positions that a query attends to, or 0 for all.
pub fn window(spec: KvSpec) -> u32 {
    match spec {
        KvSpec::Full => 0,
        KvSpec::Window(window) => window,
    }
}

/// Shape of attention and format of keys and values, as the kernels' macros take them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionShape {
    pub heads: u32,
    /// Key and value heads; where all query heads share one key, the groups in which they read it.
    pub kv_heads: u32,
    pub head_dim: u32,
    /// Numbers of a value that are the first ones of the key, which all heads share. `None`: values are stored by themselves.
    pub value_in_key: Option<u32>,
    pub kv_format: KernelFormat,
    /// Whether attention runs on Hopper.
    pub is_hopper: bool,
    /// Whether rows have queries alone, and no keys and values.
    pub queries_alone: bool,
    /// `None`: a KV block has the keys and values of one layer of this shape, and no others.
    pub block: Option<BlockSizes>,
}

/// Sizes of KV blocks that layers of several shapes share, or several layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockSizes {
    /// Bytes of the keys of a block, which are those of its values.
    pub bytes: u32,
    /// Number of scales of the keys, which is that of the values'.
    pub scales: u32,
}

/// Most query heads that read a latent together: as many rows as decode has in a thread block.
const LATENT_GROUP_MAX: usize = 16;

/// Shared memory per block that every supported card has.
const SHARED_BYTES: u32 = 99 << 10;

/// Tokens per KV block.
pub const BLOCK_TOKENS: u32 = 64;

impl AttentionShape {
    /// The shape of a layer that stores keys and values of its own, alone in its blocks. `kv_format` is asked for; latents are kept in BF16.
    pub fn of(heads: HeadShape, kv_format: KernelFormat, is_hopper: bool) -> AttentionShape {
        let is_group = |count: &usize| heads.heads.is_multiple_of(*count) && heads.heads / count <= LATENT_GROUP_MAX;
        let (kv_heads, kv_format) = match heads.value_in_key {
            None => (heads.kv_heads, kv_format),
            Some(_) => (
                (1..heads.heads).find(is_group).unwrap_or(heads.heads),
                KernelFormat::Bf16,
            ),
        };
        AttentionShape {
            heads: heads.heads as u32,
            kv_heads: kv_heads as u32,
            head_dim: heads.head_dim as u32,
            value_in_key: heads.value_in_key.map(|dim| dim as u32),
            kv_format,
            is_hopper,
            queries_alone: heads.value_in_key.is_some(),
            block: None,
        }
    }

    /// Query heads that share a key and value head.
    pub fn group_size(&self) -> u32 {
        self.heads / self.kv_heads
    }

    /// Heads of a row of the fused projection.
    fn row_heads(&self) -> u32 {
        self.heads + if self.queries_alone { 0 } else { 2 * self.kv_heads }
    }

    /// Macros of the kernels that read or write keys and values.
    fn macros(&self) -> Vec<(&'static str, u32)> {
        let mut macros = vec![
            ("HEADS", self.heads),
            ("KV_HEADS", self.kv_heads),
            ("HEAD_DIM", self.head_dim),
            ("BLOCK", BLOCK_TOKENS),
            ("STORE", self.kv_format as u32),
        ];
        let rows_of_queries = self.queries_alone && self.value_in_key.is_none();
        macros.extend(rows_of_queries.then_some(("ROW_HEADS", self.heads)));
        if let Some(dim) = self.value_in_key {
            macros.extend([("LATENT", 1), ("VALUE_DIM", dim)]);
        }
        let sizes = self.block.iter();
        macros.extend(sizes.flat_map(|block| [("BLOCK_BYTES", block.bytes), ("BLOCK_SCALES", block.scales)]));
        macros
    }

    /// Whether attention uses warpgroup instructions (wgmma).
    fn uses_wgmma(&self) -> bool {
        self.is_hopper && self.head_dim <= 128 && self.value_in_key.is_none()
    }

    /// Whether two warps share 16 rows, since one does not hold their sums.
    fn has_teams(&self) -> bool {
        self.value_dim() > 256
    }

    /// Numbers of a value.
    pub fn value_dim(&self) -> u32 {
        self.value_in_key.unwrap_or(self.head_dim)
    }

    /// `ROW_WARPS` of a wide thread block, for work items with many queries (prefill, shared prefixes):
    /// its warps, or teams of two, each with 16 rows, a row being one head of one query.
    pub fn wide_block_warps(&self) -> u32 {
        match self.uses_wgmma() {
            // More queries do not fit in shared memory.
            false if self.has_teams() && self.kv_format == KernelFormat::Bf16 => 2,
            false => 4,
            // With BF16 and heads this large, the registers suffice for eight warps only.
            true if self.kv_format == KernelFormat::Bf16 && self.head_dim > 112 => 8,
            true => 12,
        }
    }

    /// As [`wide_block_warps`](Self::wide_block_warps), of a narrow one, for work items with few queries (decode).
    pub fn narrow_block_warps(&self) -> u32 {
        if self.uses_wgmma() { 4 } else { 1 }
    }

    /// Maximum queries per work item of a thread block with `warps` warps, or teams.
    pub fn queries_max(&self, warps: u32) -> u32 {
        warps * 16 / self.group_size()
    }

    /// Launch over `tokens` tokens, one warp per head. `value_norm`: whether values are normalised.
    pub fn rope_store(&self, value_norm: bool, tokens: usize) -> Launch {
        let mut macros = self.macros();
        macros.extend(value_norm.then_some(("VALUE_NORM", 1)));
        Launch {
            kernel: Kernel::new("rope_store", &macros),
            grid: [tokens as u32, self.row_heads().div_ceil(4)],
            threads: 128,
            shared_bytes: 0,
        }
    }

    /// Launch over `items` work items, with `warps` warps, or teams, per thread block. `window`: the number of
    /// positions that a query attends to, or 0 for all. `soft_cap`: bound of the scores.
    /// `has_sinks`: whether each query head has a sink.
    pub fn attention(
        &self,
        warps: u32,
        (window, soft_cap, has_sinks): (u32, Option<f32>, bool),
        items: usize,
    ) -> Launch {
        let mut macros = self.macros();
        macros.extend([("ROW_WARPS", warps), ("WINDOW", window)]);
        macros.extend(soft_cap.map(|cap| ("SOFT_CAP", cap.to_bits())));
        macros.extend(has_sinks.then_some(("SINKS", 1)));
        let (name, shared_bytes) = if self.uses_wgmma() {
            ("attention_sm90", self.wgmma_shared_bytes(warps))
        } else {
            let stages = self.stages(warps);
            macros.push(("STAGES", stages));
            macros.extend(self.has_teams().then_some(("STAGE_TOKENS", self.stage_tokens())));
            ("attention", stages * self.stage_bytes() + self.fixed_bytes(warps))
        };
        Launch {
            kernel: Kernel::new(name, &macros),
            grid: [items as u32, self.kv_heads],
            threads: warps * if self.has_teams() { 64 } else { 32 },
            shared_bytes,
        }
    }

    /// Tokens of a KV block that are in shared memory at once: all, or half of them where heads are large.
    fn stage_tokens(&self) -> u32 {
        if self.has_teams() {
            BLOCK_TOKENS / 2
        } else {
            BLOCK_TOKENS
        }
    }

    /// Bytes of the keys of a stage's tokens for one head; their values have the same size.
    fn tile_bytes(&self) -> u32 {
        self.stage_tokens() * self.head_dim * self.kv_format.bytes() as u32
    }

    /// Bytes of the scales of a stage's keys and values, for one head.
    fn scale_bytes(&self) -> u32 {
        if self.kv_format.is_scaled() {
            2 * self.stage_tokens() * 4
        } else {
            0
        }
    }

    fn stage_bytes(&self) -> u32 {
        let tiles = if self.value_in_key.is_some() { 1 } else { 2 };
        tiles * self.tile_bytes() + self.scale_bytes()
    }

    /// Shared memory beside stages: for the queries, with `head_dim` > 128, and for the scores that teams exchange, where they cannot
    /// overwrite keys with them because the keys are values, too.
    fn fixed_bytes(&self, warps: u32) -> u32 {
        let queries = if self.head_dim > 128 {
            warps * 16 * self.head_dim * self.kv_format.bytes() as u32
        } else {
            0
        };
        let exchanged = if self.value_in_key.is_some() && self.has_teams() {
            warps * 16 * 32 * 4
        } else {
            0
        };
        queries + exchanged
    }

    /// Pipeline stages: two, or one if two do not fit in [`SHARED_BYTES`].
    fn stages(&self, warps: u32) -> u32 {
        if 2 * self.stage_bytes() + self.fixed_bytes(warps) <= SHARED_BYTES {
            2
        } else {
            1
        }
    }

    /// Shared memory per block on Hopper, by the same formula as the kernel.
    fn wgmma_shared_bytes(&self, warps: u32) -> u32 {
        let key_row_bytes = (self.head_dim * self.kv_format.bytes() as u32).next_multiple_of(32);
        let stage_bytes = BLOCK_TOKENS * key_row_bytes + self.tile_bytes() + self.scale_bytes();
        // Thread blocks that share a multiprocessor.
        let blocks_per_sm = match warps {
            4 if self.kv_format == KernelFormat::Bf16 && self.head_dim > 112 => 2,
            4 => 3,
            _ => 1,
        };
        let stages = (((228 / blocks_per_sm - 2) << 10) / stage_bytes).min(6);
        // Tiles are aligned to 1024 bytes.
        stages * stage_bytes + 1024
    }

    /// Launch that merges the partial attention results of `tokens` tokens (split KV).
    pub fn merge_partial_attention(&self, tokens: usize) -> Launch {
        Launch {
            kernel: Kernel::new(
                "merge",
                &[
                    ("HEADS", self.heads),
                    ("KV_HEADS", self.kv_heads),
                    ("HEAD_DIM", self.value_dim()),
                ],
            ),
            grid: [tokens as u32, 1],
            threads: 128,
            shared_bytes: 0,
        }
    }
}
