//! How many KV blocks a model has: as its options say, or what its device has left.

use crate::device::batch::{StepBatch, StepSequence};
use crate::device::{Device, DeviceError};
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
        batch.sequences.push(StepSequence {
            first_token,
            q_len: length,
            kv_len: length,
            first_block: batch.block_tables.len() as u32,
        });
        batch.tokens.extend((0..length).map(|_| 0));
        batch.positions.extend(0..length);
        let first = first_token / block_tokens;
        batch
            .block_tables
            .extend((first..first + length.div_ceil(block_tokens)).map(|block| block.min(last_block)));
    }
    batch.logits_at = (0..sequences.min(tokens)).collect();
    batch
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
