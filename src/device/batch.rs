//! One step as data, passed from the scheduler to the model.

/// A KV block to copy, by its index in the pool, and the block to copy it to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockCopy {
    pub from: u32,
    pub to: u32,
}

/// Tokens of one step, packed one sequence after the other without padding.
///
/// Everything is a flat array so that it can be copied to a device as it is.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StepBatch {
    /// Token ids, `[tokens]`.
    pub tokens: Vec<u32>,
    /// Absolute position of each token in its sequence, `[tokens]`.
    pub positions: Vec<u32>,
    /// One entry per sequence, in the order of `tokens`.
    pub sequences: Vec<StepSequence>,
    /// Block tables of all sequences, one after the other.
    pub block_tables: Vec<u32>,
    /// Indices into `tokens` of the tokens whose logits are computed, ascending.
    pub logits_at: Vec<u32>,
    /// Tokens that the previous step has yet to draw, ascending: (index into `tokens`, row of the
    /// previous step's logits that the token is drawn from). Their entries in `tokens` are ignored.
    /// Only for devices that [run ahead](super::Device::runs_ahead).
    pub pending_tokens: Vec<(u32, u32)>,
    /// KV blocks to copy (copy on write) before keys and values are stored.
    pub block_copies: Vec<BlockCopy>,
    /// Whether the result of a sequence must be bit-identical whatever other sequences the step
    /// contains and however the sequence's own tokens are divided among steps.
    pub deterministic: bool,
}

impl StepBatch {
    /// Adds a sequence. `tokens` are its last tokens, which the step computes. `kv_len` is the
    /// sequence's length including `tokens`. `blocks` is its block table.
    pub fn push(&mut self, tokens: impl IntoIterator<Item = u32>, kv_len: u32, blocks: impl IntoIterator<Item = u32>) {
        let first_token = self.tokens.len() as u32;
        self.tokens.extend(tokens);
        let q_len = self.tokens.len() as u32 - first_token;
        self.positions.extend(kv_len - q_len..kv_len);
        self.sequences.push(StepSequence {
            first_token,
            q_len,
            kv_len,
            first_block: self.block_tables.len() as u32,
        });
        self.block_tables.extend(blocks);
    }
}

/// One sequence's share of a [`StepBatch`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepSequence {
    /// Index of its first token in `tokens`.
    pub first_token: u32,
    /// Tokens computed in this step, at least 1. Their positions are `kv_len - q_len .. kv_len`.
    pub q_len: u32,
    /// Tokens with keys and values in the KV pool after this step.
    pub kv_len: u32,
    /// Index of its first entry in `block_tables`; it has `kv_len.div_ceil(block_tokens)` entries.
    pub first_block: u32,
}
