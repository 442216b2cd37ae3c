//! Trial steps: they show how much memory a step takes, and give the device shapes to measure its kernels at.

use super::{Buffers, Transformer};
use crate::device::draw::Draw;
use crate::device::{Device, DeviceError};
use crate::model::error::ModelError;
use crate::model::pool::{self, KvBudget};
use crate::model::times::Times;

/// Minimum rows for which a device measures its matmul kernels. For fewer rows, it uses the choice
/// for this number.
const TUNED_ROWS_MIN: u32 = 16;

impl<D: Device> Transformer<D> {
    /// Gives keys and values, and recurrent states, what trial steps leave of the device's memory, if they are to have that.
    pub(super) fn fill_memory(&mut self, budget: KvBudget) -> Result<(), ModelError> {
        let KvBudget::Profiled {
            step_tokens,
            sequences,
            bytes,
        } = budget
        else {
            return Ok(());
        };
        let tokens = self.run_largest_step(step_tokens, sequences)?;
        self.run_tuning_steps(tokens, sequences)?;
        self.pools.clear();
        self.state_pools.clear();
        (self.state_slots, self.kv_blocks) = pool::settle(&self.device, &self.config, bytes, sequences)?;
        self.state_pools = pool::allocate_states(&self.device, &self.config, self.state_slots)?;
        self.pools = pool::allocate(&self.device, &self.config, self.kv_blocks)?;
        Ok(())
    }

    /// Runs a trial step of the maximum size, so that all memory besides the KV pool is allocated;
    /// if it does not fit in memory, smaller ones. Returns the tokens of the step that fits.
    fn run_largest_step(&mut self, step_tokens: u32, sequences: u32) -> Result<u32, ModelError> {
        let mut tokens = step_tokens;
        loop {
            match self.run_trial_step(tokens, sequences) {
                Ok(()) => break,
                Err(DeviceError::OutOfMemory(why)) if tokens > pool::STEP_TOKENS_MIN => {
                    tokens = (tokens / 2).max(pool::STEP_TOKENS_MIN);
                    tracing::warn!("a step does not fit in memory, {why}: steps now have at most {tokens} tokens");
                    self.buffers = Buffers::new(&self.device);
                }
                Err(error) => return Err(error.into()),
            }
        }
        self.times = Times::default();
        self.step_tokens_max = Some(tokens);
        Ok(tokens)
    }

    /// Runs trial steps at each power of two of tokens, and of sequences, below the largest step.
    /// At each size the device measures its matmul kernels, and libraries load theirs. Both need
    /// memory, so this precedes the allocation of the pool.
    fn run_tuning_steps(&mut self, step_tokens: u32, sequences: u32) -> Result<(), ModelError> {
        if !self.device.autotunes_matmuls() {
            return Ok(());
        }
        let mut tokens = step_tokens.next_power_of_two();
        while tokens > TUNED_ROWS_MIN {
            tokens /= 2;
            self.run_trial_step(tokens, sequences.min(tokens))?;
        }
        let mut rows = sequences.min(step_tokens).next_power_of_two();
        while rows > TUNED_ROWS_MIN {
            rows /= 2;
            self.run_trial_step(rows.max(step_tokens.min(pool::STEP_TOKENS_MIN)), rows)?;
        }
        self.times = Times::default();
        Ok(())
    }

    /// Runs a step of `tokens` tokens with logits for `rows` rows and discards its results.
    fn run_trial_step(&mut self, tokens: u32, rows: u32) -> Result<(), DeviceError> {
        let step = pool::largest_step(tokens, rows, self.context_tokens, self.device.block_tokens());
        let mut step = step.with_tables(self.layout.tables.len());
        if self.config.recurrent.is_some() {
            // The one slot that there is: results are discarded.
            step.state_slots = vec![0; step.sequences.len()];
        }
        let draws = vec![Draw::GREEDY; step.logits_at.len()];
        self.run(&step, None)?;
        self.device.draw(self.vocab_size, &draws, &mut self.buffers.workspace)?;
        self.device.take_drawn(&mut self.buffers.workspace)?;
        Ok(())
    }
}
