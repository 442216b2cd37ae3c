//! One step as data, passed from the scheduler to the model.

/// Stands in a block table for a block that the sequence no longer holds, because all its positions
/// are behind the table's window.
pub const NO_BLOCK: u32 = u32::MAX;

/// A KV block (or a slot) to copy, by its index in the pool, and the one to copy it to.
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
    /// For each of the model's block tables: the blocks of all sequences, one sequence after the
    /// other.
    pub block_tables: Vec<Vec<u32>>,
    /// Indices into `tokens` of the tokens whose logits are computed, ascending.
    pub logits_at: Vec<u32>,
    /// Tokens that the previous step has yet to draw, ascending: (index into `tokens`, row of the
    /// previous step's logits that the token is drawn from). Their entries in `tokens` are ignored.
    /// Only for devices that [run ahead](super::Device::runs_ahead).
    pub pending_tokens: Vec<(u32, u32)>,
    /// KV blocks to copy (copy on write) before keys and values are stored.
    pub block_copies: Vec<BlockCopy>,
    /// For a model with recurrent layers: the slot of each sequence's state, all different. A
    /// sequence's state is that of its `kv_len - q_len` tokens before the step.
    pub state_slots: Vec<u32>,
    /// Slots whose states are copied, in this order, before anything is computed.
    pub state_copies: Vec<BlockCopy>,
    /// Whether the result of a sequence must be bit-identical whatever other sequences the step
    /// contains and however the sequence's own tokens are divided among steps.
    pub deterministic: bool,
}

impl StepBatch {
    /// Adds a sequence of a model with one table. `tokens` are its last tokens, which the step
    /// computes. `kv_len` is the sequence's length including `tokens`. `blocks` is its block table.
    pub fn push(&mut self, tokens: impl IntoIterator<Item = u32>, kv_len: u32, blocks: impl IntoIterator<Item = u32>) {
        if self.block_tables.is_empty() {
            self.block_tables.push(Vec::new());
        }
        self.push_sequence(tokens, kv_len, self.block_tables[0].len() as u32, 0);
        self.block_tables[0].extend(blocks);
    }

    /// As [`push`](Self::push), for a sequence whose blocks are in `block_tables`, from index
    /// `first_block` on in each table, and which `adapter` changes the model for.
    pub fn push_sequence(
        &mut self,
        tokens: impl IntoIterator<Item = u32>,
        kv_len: u32,
        first_block: u32,
        adapter: u32,
    ) {
        let first_token = self.tokens.len() as u32;
        self.tokens.extend(tokens);
        let q_len = self.tokens.len() as u32 - first_token;
        self.positions.extend(kv_len - q_len..kv_len);
        self.sequences.push(StepSequence {
            first_token,
            q_len,
            kv_len,
            first_block,
            adapter,
        });
    }

    /// The tokens whose logits are computed, alone, for operations that follow the last storing of keys, values and states. A
    /// sequence becomes one per run of such tokens that follow each other.
    #[must_use]
    pub fn logits_tokens(&self) -> StepBatch {
        let mut batch = StepBatch {
            block_tables: self.block_tables.clone(),
            logits_at: (0..self.logits_at.len() as u32).collect(),
            deterministic: self.deterministic,
            ..StepBatch::default()
        };
        let mut picked = self.logits_at.iter().copied().peekable();
        for s in &self.sequences {
            while let Some(first) = picked.next_if(|token| *token < s.first_token + s.q_len) {
                let mut end = first + 1;
                while picked
                    .next_if(|token| *token == end && end < s.first_token + s.q_len)
                    .is_some()
                {
                    end += 1;
                }
                let tokens = self.tokens[first as usize..end as usize].iter().copied();
                let kv_len = self.positions[end as usize - 1] + 1;
                batch.push_sequence(tokens, kv_len, s.first_block, s.adapter);
            }
        }
        batch
    }

    /// Makes a batch with one table a batch with `count` tables: block `b` becomes block
    /// `b * count + table` of each table.
    pub fn with_tables(mut self, count: usize) -> StepBatch {
        let blocks = self.block_tables.concat();
        let of_table = |block: u32, table: usize| block * count as u32 + table as u32;
        let tables = (0..count).map(|table| blocks.iter().map(|block| of_table(*block, table)).collect());
        self.block_tables = tables.collect();
        let copies = self.block_copies.iter().flat_map(|copy| {
            (0..count).map(|table| BlockCopy {
                from: of_table(copy.from, table),
                to: of_table(copy.to, table),
            })
        });
        self.block_copies = copies.collect();
        self
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
    /// Index of its first entry in each of `block_tables`; it has `kv_len.div_ceil(block_tokens)`
    /// entries. Blocks before the one of [`KvSpec::first_needed`](super::KvSpec::first_needed) of
    /// its first token may be [`NO_BLOCK`].
    pub first_block: u32,
    /// The number of the adapter that changes the model for it, from 1 on. 0: none does.
    pub adapter: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tokens_with_logits_are_the_last_of_shorter_sequences() {
        let mut batch = StepBatch::default();
        batch.push([10, 11, 12, 13, 14], 25, [7, 8]);
        batch.push([20], 17, [3, 4]);
        batch.push([30, 31], 2, [5]);
        batch.push([40, 41], 2, [6]);
        (batch.logits_at, batch.deterministic) = (vec![0, 2, 3, 5, 7, 8, 9], true);
        batch.sequences[1].adapter = 3;
        let alone = batch.logits_tokens();
        assert_eq!(alone.tokens, [10, 12, 13, 20, 31, 40, 41]);
        assert_eq!(alone.positions, [20, 22, 23, 16, 1, 0, 1]);
        let sequence = |first_token, q_len, kv_len, first_block, adapter| StepSequence {
            first_token,
            q_len,
            kv_len,
            first_block,
            adapter,
        };
        let want = [
            sequence(0, 1, 21, 0, 0),
            sequence(1, 2, 24, 0, 0),
            sequence(3, 1, 17, 2, 3),
            sequence(4, 1, 2, 4, 0),
            sequence(5, 2, 2, 5, 0),
        ];
        assert_eq!(alone.sequences, want);
        assert_eq!(alone.block_tables, batch.block_tables);
        assert_eq!(alone.logits_at, [0, 1, 2, 3, 4, 5, 6]);
        assert!(alone.deterministic);
        batch.logits_at.clear();
        assert!(batch.logits_tokens().sequences.is_empty());
    }
}
