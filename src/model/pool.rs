//! The number of KV blocks of a model, from its options or from the free memory of its device.
//!
//! See docs/decisions/059-memory-is-taken-before-the-first-row.md.

use crate::device::batch::StepBatch;
use crate::device::{Device, DeviceError, Precision};
use crate::model::config::Config;
use crate::model::error::ModelError;
use crate::model::kv_layout::KvLayout;
use crate::model::size::ModelSize;

/// Device memory that stays free for allocations that cannot be foreseen: kernels that load later,
/// and fragmentation.
const MARGIN_BYTES: u64 = 512 << 20;

/// Minimum tokens per step to which steps are reduced when memory is short. If even such a step
/// does not fit, the model is too large for the device.
pub(super) const STEP_TOKENS_MIN: u32 = 128;

/// Size of the KV pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvBudget {
    /// Bytes over all layers; the pool gets as many whole blocks as fit.
    Bytes(u64),
    /// So many blocks in each block table.
    Blocks(u32),
    /// For a device with its own memory. The pool is allocated after a trial step of `step_tokens`
    /// tokens with logits for `sequences` sequences, so that no later step runs out of memory.
    Profiled {
        step_tokens: u32,
        sequences: u32,
        /// `None`: all memory that is left after the trial step.
        bytes: Option<u64>,
    },
}

/// In a budget of bytes, there is a slot of states for so many tokens with keys and values.
const TOKENS_PER_SLOT: u32 = 1024;

/// The number of slots for states of recurrent layers with which a model is loaded, one for each running
/// sequence: those of the budget, of which [`first_blocks`] gives the rest to keys and values, or the one
/// of trial steps. 0 without such layers.
pub(super) fn state_slots<D: Device>(device: &D, config: &Config, budget: KvBudget) -> u32 {
    match budget {
        _ if config.recurrent.is_none() => 0,
        KvBudget::Blocks(blocks) => blocks,
        KvBudget::Bytes(bytes) => slots_in_bytes(device, config, bytes),
        KvBudget::Profiled { .. } => 1,
    }
}

/// The number of slots that a budget of bytes has.
fn slots_in_bytes<D: Device>(device: &D, config: &Config, bytes: u64) -> u32 {
    let tables = KvLayout::of(config).tables.len() as u64;
    let blocks = u64::from(TOKENS_PER_SLOT.div_ceil(device.block_tokens())) * tables;
    let slots = bytes / (config.state_bytes() + blocks * block_bytes(device, config));
    slots.clamp(1, u64::from(u32::MAX)) as u32
}

/// The number of slots and of blocks that fit into `bytes`, or, for `None`, into the device's free memory
/// less `MARGIN_BYTES`. A pool has no more slots than `sequences` running sequences and the states kept
/// beside them use.
pub(super) fn settle<D: Device>(
    device: &D,
    config: &Config,
    bytes: Option<u64>,
    sequences: u32,
) -> Result<(u32, u32), ModelError> {
    let Some(recurrent) = &config.recurrent else {
        return Ok((0, blocks_in_free_memory(device, config, bytes)?));
    };
    let free = match bytes {
        Some(bytes) => bytes,
        None => device.free_bytes()?.unwrap_or(0).saturating_sub(MARGIN_BYTES),
    };
    let slots_max = sequences.saturating_add(sequences / 3).saturating_add(1);
    let slots = slots_in_bytes(device, config, free).min(slots_max);
    let rest = free.saturating_sub(u64::from(slots) * config.state_bytes());
    let blocks = blocks_in_bytes(device, config, rest).map_err(|error| match error {
        ModelError::Options(why) => {
            let layers = recurrent.layers.iter().filter(|is_recurrent| **is_recurrent).count();
            ModelError::Options(format!(
                "{why}, beside a sequence's states of {layers} recurrent layers, {} MiB, of {} MiB: use fewer `--step-tokens`, or an 8-bit `precision`",
                config.state_bytes().div_ceil(1 << 20),
                free >> 20
            ))
        }
        other => other,
    })?;
    Ok((slots, blocks))
}

/// Allocates the pools of `slots` slots, one for each recurrent layer.
pub(super) fn allocate_states<D: Device>(
    device: &D,
    config: &Config,
    slots: u32,
) -> Result<Vec<D::StatePool>, DeviceError> {
    let Some(recurrent) = &config.recurrent else {
        return Ok(Vec::new());
    };
    let layers = recurrent.layers.iter().filter(|is_recurrent| **is_recurrent);
    layers
        .map(|_| device.state_pool(recurrent.shape, slots as usize))
        .collect()
}

/// Bytes per block.
fn block_bytes<D: Device>(device: &D, config: &Config) -> u64 {
    let layout = KvLayout::of(config);
    (device.kv_block_bytes(&layout.shapes) * layout.pools) as u64
}

/// The number of blocks with which a model is loaded: those of the budget, or those of the trial
/// step after which the budget is settled.
pub(super) fn first_blocks<D: Device>(device: &D, config: &Config, budget: KvBudget) -> Result<u32, ModelError> {
    let tables = KvLayout::of(config).tables.len() as u32;
    match budget {
        KvBudget::Profiled { step_tokens, .. } => Ok((step_tokens.div_ceil(device.block_tokens()) + 1) * tables),
        KvBudget::Bytes(bytes) => {
            let states = u64::from(state_slots(device, config, budget)) * config.state_bytes();
            blocks_in_bytes(device, config, bytes.saturating_sub(states))
        }
        KvBudget::Blocks(blocks) => check_blocks(device, config, blocks.saturating_mul(tables)),
    }
}

/// The number of whole blocks that fit into `bytes`.
fn blocks_in_bytes<D: Device>(device: &D, config: &Config, bytes: u64) -> Result<u32, ModelError> {
    let blocks = bytes / block_bytes(device, config);
    check_blocks(device, config, blocks.min(u64::from(u32::MAX)) as u32)
}

/// Checks that a pool has at least one block of each table and a size that can be allocated; returns
/// its blocks.
fn check_blocks<D: Device>(device: &D, config: &Config, blocks: u32) -> Result<u32, ModelError> {
    let (bytes, tables) = (block_bytes(device, config), KvLayout::of(config).tables.len());
    if (blocks as usize) < tables {
        return Err(ModelError::Options(format!(
            "the KV pool holds no block of all layers: one takes {} bytes",
            bytes * tables as u64
        )));
    }
    if u64::from(blocks)
        .checked_mul(bytes)
        .is_none_or(|total| total > isize::MAX as u64)
    {
        return Err(ModelError::Options(format!(
            "a KV pool of {blocks} blocks of {bytes} bytes is too large"
        )));
    }
    Ok(blocks)
}

/// Allocates the device pools of `blocks` blocks.
pub(super) fn allocate<D: Device>(device: &D, config: &Config, blocks: u32) -> Result<Vec<D::KvPool>, DeviceError> {
    let layout = KvLayout::of(config);
    let pool = |_| device.kv_pool(&layout.shapes, blocks as usize);
    (0..layout.pools).map(pool).collect()
}

/// A step of `tokens` tokens, in sequences as long as `context` allows, with logits for `sequences`
/// rows, or for every token if the step has fewer tokens. It has one block table, and its block
/// numbers begin at 0.
pub(super) fn largest_step(tokens: u32, sequences: u32, context: u32, block_tokens: u32) -> StepBatch {
    let mut batch = StepBatch::default();
    // Sequences whose length is not a multiple of the block size share blocks. Sharing is harmless
    // here, because the step's results are discarded.
    let last_block = tokens / block_tokens;
    while (batch.tokens.len() as u32) < tokens {
        let first_token = batch.tokens.len() as u32;
        let length = context.min(tokens - first_token);
        let first = first_token / block_tokens;
        let table = (first..first + length.div_ceil(block_tokens)).map(|block| block.min(last_block));
        batch.push((0..length).map(|_| 0), length, table);
    }
    batch.logits_at = (0..sequences.min(tokens)).collect();
    batch
}

/// Refuses a model whose weights alone exceed the device's free memory. Linear layers count in the
/// precision's format, the embedding table and the output head in BF16.
pub(super) fn check_fits<D: Device>(device: &D, size: &ModelSize, precision: Precision) -> Result<(), ModelError> {
    let Some(free) = device.free_bytes()? else {
        return Ok(());
    };
    let (linear, tables) = (size.linear_bytes(precision), size.gpu_table_bytes());
    if linear + tables <= free {
        return Ok(());
    }
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    Err(DeviceError::OutOfMemory(format!(
        "the model's weights take {} MiB in {} ({} of linear layers, {} of the embedding table and the output head), and {} MiB are free: {}",
        mib(linear + tables),
        precision.name(),
        mib(linear),
        mib(tables),
        mib(free),
        if precision.bits() > 8 { "ask for 8 bits, or take a larger card" } else { "take a larger card" },
    ))
    .into())
}

/// The number of whole blocks that fit into `bytes`, or, for `None`, into the device's free memory
/// less `MARGIN_BYTES`.
pub(super) fn blocks_in_free_memory<D: Device>(
    device: &D,
    config: &Config,
    bytes: Option<u64>,
) -> Result<u32, ModelError> {
    if let Some(bytes) = bytes {
        return blocks_in_bytes(device, config, bytes);
    }
    let Some(free) = device.free_bytes()? else {
        return Err(ModelError::Options(
            "this device has no memory of its own: give the KV pool's size".into(),
        ));
    };
    let block = block_bytes(device, config);
    let blocks = free.saturating_sub(MARGIN_BYTES) / block;
    if blocks == 0 {
        let mib = |bytes: u64| bytes >> 20;
        return Err(DeviceError::OutOfMemory(format!(
            "{} MiB are free beside the model and a step's activations; {} MiB of them are reserved, and a KV block takes {} KiB: use fewer `--step-tokens`, or an 8-bit `precision`",
            mib(free),
            mib(MARGIN_BYTES),
            block.div_ceil(1 << 10)
        ))
        .into());
    }
    check_blocks(device, config, blocks.min(u64::from(u32::MAX)) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_step_is_valid() {
        for (tokens, sequences, context) in [(2048, 256, 4096), (2048, 256, 100), (10, 4, 3), (1, 1, 1)] {
            let batch = largest_step(tokens, sequences, context, 64);
            assert_eq!(batch.tokens.len() as u32, tokens);
            assert_eq!(batch.sequences.iter().map(|s| s.q_len).sum::<u32>(), tokens);
            assert_eq!(batch.logits_at.len() as u32, sequences.min(tokens));
            for s in &batch.sequences {
                assert!(s.kv_len <= context);
                let blocks = &batch.block_tables[0][s.first_block as usize..][..s.kv_len.div_ceil(64) as usize];
                assert!(blocks.iter().all(|block| *block < tokens.div_ceil(64) + 1));
            }
        }
    }
}
