//! Checks batches before they run.

use super::Transformer;
use crate::device::Device;
use crate::device::batch::StepBatch;

impl<D: Device> Transformer<D> {
    /// Checks that a batch fits the model. An error is the caller's mistake, never a row's.
    pub(super) fn check(&self, batch: &StepBatch) -> Result<(), String> {
        if batch.positions.len() != batch.tokens.len() {
            return Err(format!(
                "{} positions for {} tokens",
                batch.positions.len(),
                batch.tokens.len()
            ));
        }
        if let Some(token) = batch.tokens.iter().find(|t| **t as usize >= self.config.vocab_size) {
            return Err(format!(
                "token id {token} is not below the model's {}",
                self.config.vocab_size
            ));
        }
        let mut next_token = 0u64;
        for (i, s) in batch.sequences.iter().enumerate() {
            let fits = s.first_token as u64 == next_token && s.q_len >= 1 && s.q_len <= s.kv_len;
            next_token += s.q_len as u64;
            if !fits || next_token > batch.tokens.len() as u64 {
                return Err(format!("sequence {i} does not follow the one before it in the batch"));
            }
            if s.kv_len > self.context_tokens {
                return Err(format!(
                    "sequence {i}: {} tokens, more than {}",
                    s.kv_len, self.context_tokens
                ));
            }
            if s.adapter as usize > self.adapters {
                return Err(format!(
                    "sequence {i} is for adapter {}, and the model has {}",
                    s.adapter, self.adapters
                ));
            }
            let positions = &batch.positions[s.first_token as usize..next_token as usize];
            if !positions.iter().copied().eq(s.kv_len - s.q_len..s.kv_len) {
                return Err(format!(
                    "sequence {i}: its positions are not the last {} of {}",
                    s.q_len, s.kv_len
                ));
            }
        }
        if next_token != batch.tokens.len() as u64 {
            return Err(format!(
                "{} tokens belong to no sequence",
                batch.tokens.len() as u64 - next_token
            ));
        }
        self.layout.check(batch, self.device.block_tokens(), self.kv_blocks)?;
        self.check_slots(batch)?;
        if let Some((token, _)) = batch.pending_tokens.first()
            && !self.device.runs_ahead()
        {
            return Err(format!(
                "token {token} is not known yet, and this device does not run ahead"
            ));
        }
        if batch
            .pending_tokens
            .iter()
            .any(|(token, _)| *token as usize >= batch.tokens.len())
        {
            return Err("a sampled position is outside of the step".to_owned());
        }
        if !batch.logits_at.is_sorted_by(|a, b| a < b) {
            return Err("`logits_at` does not ascend".to_owned());
        }
        match batch.logits_at.last() {
            Some(&last) if last as usize >= batch.tokens.len() => Err(format!("`logits_at` has {last}, past the step")),
            _ => Ok(()),
        }
    }

    /// Checks the slots of recurrent states.
    fn check_slots(&self, batch: &StepBatch) -> Result<(), String> {
        let count = if self.config.recurrent.is_some() {
            batch.sequences.len()
        } else {
            0
        };
        if batch.state_slots.len() != count {
            return Err(format!("{} state slots, and not {count}", batch.state_slots.len()));
        }
        let mut is_used = vec![false; self.state_slots as usize];
        for slot in &batch.state_slots {
            match is_used.get_mut(*slot as usize) {
                Some(is_used) if !*is_used => *is_used = true,
                Some(_) => return Err(format!("two sequences have state slot {slot}")),
                None => return Err(format!("state slot {slot} is not below {}", self.state_slots)),
            }
        }
        let mut copied = batch.state_copies.iter().flat_map(|copy| [copy.from, copy.to]);
        match copied.find(|slot| *slot >= self.state_slots) {
            Some(slot) => Err(format!("state slot {slot} to copy is not below {}", self.state_slots)),
            None => Ok(()),
        }
    }
}
