//! How many KV blocks a model has: as its options say, or what its device has left.
//!
//! See docs/decisions/059-memory-is-taken-before-the-first-row.md.

use crate::device::batch::StepBatch;
use crate::device::{Device, DeviceError, Precision};
use crate::model::config::Config;
use crate::model::error::ModelError;

/// Of a device's memory, what is left free for what nobody can foresee: kernels that are loaded later, fragmentation.
const MARGIN_BYTES: u64 = 512 << 20;

/// Fewer tokens a step are not tried where memory is short: it is the model that is too large, not the step.
pub const STEP_TOKENS_MIN: u32 = 128;

/// Bytes of a block over all layers.
fn block_bytes<D: Device>(device: &D, config: &Config) -> u64 {
    (device.kv_block_bytes(config.heads) * config.layers.len()) as u64
}

/// As many whole blocks as fit.
pub fn blocks_of<D: Device>(device: &D, config: &Config, bytes: u64) -> Result<u32, ModelError> {
    let blocks = bytes / block_bytes(device, config);
    checked(device, config, blocks.min(u64::from(u32::MAX)) as u32)
}

/// A pool of at least one block, of a size that can be.
pub fn checked<D: Device>(device: &D, config: &Config, blocks: u32) -> Result<u32, ModelError> {
    let block = block_bytes(device, config);
    if blocks == 0 {
        return Err(ModelError::Options(format!(
            "the KV pool holds no block: one takes {block} bytes"
        )));
    }
    if u64::from(blocks)
        .checked_mul(block)
        .is_none_or(|bytes| bytes > isize::MAX as u64)
    {
        return Err(ModelError::Options(format!(
            "a KV pool of {blocks} blocks of {block} bytes is too large"
        )));
    }
    Ok(blocks)
}

/// A pool for each layer.
pub fn pools<D: Device>(device: &D, config: &Config, blocks: u32) -> Result<Vec<D::KvPool>, DeviceError> {
    let pool = |_| device.kv_pool(config.heads, blocks as usize);
    config.layers.iter().map(pool).collect()
}

/// A step of so many tokens, in sequences as long as they may be, with logits for as many rows as sequences may run. Its blocks are
/// numbered from 0 on.
pub fn largest_step(tokens: u32, sequences: u32, context: u32, block_tokens: u32) -> StepBatch {
    let mut batch = StepBatch::default();
    // Where sequences are shorter than blocks, they share what no one reads.
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

/// Refuses a model whose weights alone are more than the device has free. Linear layers are in the precision's format; the embedding
/// table and the output head in BF16.
pub fn check_fits<D: Device>(device: &D, config: &Config, precision: Precision) -> Result<(), ModelError> {
    let Some(free) = device.free_bytes()? else {
        return Ok(());
    };
    let (linear, tables) = weights_bytes(config, precision);
    if linear + tables <= free {
        return Ok(());
    }
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    Err(DeviceError::OutOfMemory(format!(
        "the model's weights take {} MiB in {} ({} of linear layers, {} of the embedding table and the output head), and {} MiB are free: {}",
        mib(linear + tables),
        precision.word(),
        mib(linear),
        mib(tables),
        mib(free),
        if precision.bits() > 8 { "ask for 8 bits, or take a larger card" } else { "take a larger card" },
    ))
    .into())
}

/// Bytes of the linear layers' weights, and of the tables'.
fn weights_bytes(config: &Config, precision: Precision) -> (u64, u64) {
    let (hidden, mlp) = (config.hidden_size as u64, config.intermediate_size as u64);
    let heads = config.heads;
    let attended = (heads.heads * heads.head_dim) as u64;
    let layer = hidden * (heads.qkv_width() as u64 + attended) + 3 * hidden * mlp;
    let linear = config.layers.len() as u64 * layer * u64::from(precision.bits()) / 8;
    let tables = if config.tied_embeddings { 1 } else { 2 };
    (linear, tables * config.vocab_size as u64 * hidden * 2)
}

/// Whole blocks in what a device has left, or in `bytes` of it.
pub fn blocks_of_the_rest<D: Device>(device: &D, config: &Config, bytes: Option<u64>) -> Result<u32, ModelError> {
    if let Some(bytes) = bytes {
        return blocks_of(device, config, bytes);
    }
    let Some(free) = device.free_bytes()? else {
        return Err(ModelError::Options(
            "this device has no memory of its own: say how large its KV pool is to be".into(),
        ));
    };
    let block = block_bytes(device, config);
    let blocks = free.saturating_sub(MARGIN_BYTES) / block;
    if blocks == 0 {
        let mib = |bytes: u64| bytes >> 20;
        return Err(DeviceError::OutOfMemory(format!(
            "with the model and a step's activations loaded, {} MiB are left; {} MiB of them stay free, and a KV block takes {} KiB: ask for fewer `--step-tokens`, or for 8 bits",
            mib(free),
            mib(MARGIN_BYTES),
            block.div_ceil(1 << 10)
        ))
        .into());
    }
    checked(device, config, blocks.min(u64::from(u32::MAX)) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_take_what_they_take() {
        let config = crate::model::shapes::named("llama-3.1-8b").unwrap().unwrap();
        let (linear, tables) = weights_bytes(&config, Precision::Fp8);
        // 8.03 billion parameters, 1.05 billion of them in the two tables.
        assert_eq!((linear, tables), (6_979_321_856, 2 * 2 * 128_256 * 4096));
        assert_eq!(weights_bytes(&config, Precision::Bf16).0, 2 * linear);
    }

    #[test]
    fn the_largest_step_is_sound() {
        for (tokens, sequences, context) in [(2048, 256, 4096), (2048, 256, 100), (10, 4, 3), (1, 1, 1)] {
            let batch = largest_step(tokens, sequences, context, 64);
            assert_eq!(batch.tokens.len() as u32, tokens);
            assert_eq!(batch.sequences.iter().map(|s| s.q_len).sum::<u32>(), tokens);
            assert_eq!(batch.logits_at.len() as u32, sequences.min(tokens));
            for s in &batch.sequences {
                assert!(s.kv_len <= context);
                let blocks = &batch.block_tables[s.first_block as usize..][..s.kv_len.div_ceil(64) as usize];
                assert!(blocks.iter().all(|block| *block < tokens.div_ceil(64) + 1));
            }
        }
    }
}
