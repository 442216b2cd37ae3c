//! Slots for the states of a model's recurrent layers: each running sequence has one.
//!
//! Further slots hold states that were kept: those at the end of a prefix, from which other sequences
//! begin. They are the ones used last, at most a quarter of all slots, and all but the last of them
//! give way to running sequences.
//!
//! See docs/decisions/101-recurrent-states-have-slots.md.

use crate::device::batch::BlockCopy;
use crate::engine::blocks::BlockKey;

/// One in so many slots may hold a kept state.
const SLOTS_PER_KEPT: usize = 4;

/// A state that was kept, of a prefix of whole blocks.
#[derive(Debug, Clone)]
struct KeptState {
    /// Key of the prefix's last block.
    key: BlockKey,
    tokens: Box<[u32]>,
    slot: u32,
}

/// Copies the state in slot `from` to slot `to`, where there are both.
pub fn copy(from: Option<u32>, to: Option<u32>) -> Option<BlockCopy> {
    from.zip(to).map(|(from, to)| BlockCopy { from, to })
}

/// The slots of a model, or none if it has no recurrent layers.
#[derive(Debug, Clone)]
pub struct StateSlots {
    /// Slots without a state; the last one is given next. `None`: the model needs none.
    free: Option<Vec<u32>>,
    /// The one used last is at the end.
    kept: Vec<KeptState>,
    kept_max: usize,
}

impl StateSlots {
    /// The slots of a model with `slots` of them. `None`: it has no recurrent layers.
    pub fn new(slots: Option<u32>) -> StateSlots {
        StateSlots {
            free: slots.map(|slots| (0..slots).rev().collect()),
            kept: Vec::new(),
            kept_max: slots.map_or(0, |slots| slots as usize / SLOTS_PER_KEPT),
        }
    }

    /// Whether sequences need slots.
    pub fn are_needed(&self) -> bool {
        self.free.is_some()
    }

    /// Whether states may be kept.
    pub fn may_keep(&self) -> bool {
        self.kept_max > 0
    }

    /// Gives a sequence without a slot one, if it needs one. Returns `false` if there is none for it.
    /// While others run, the kept state that was used last stays.
    pub fn take(&mut self, slot: &mut Option<u32>, others_run: bool) -> bool {
        let Some(free) = &mut self.free else { return true };
        *slot = free.pop();
        if slot.is_none() && self.kept.len() > usize::from(others_run) {
            *slot = Some(self.kept.remove(0).slot);
        }
        slot.is_some()
    }

    /// Takes a sequence's slot back.
    pub fn release(&mut self, slot: &mut Option<u32>) {
        if let (Some(free), Some(slot)) = (&mut self.free, slot.take()) {
            free.push(slot);
        }
    }

    /// The slot into which the state behind `tokens`, whose last block has this key, is to be copied.
    /// `None` if that state is kept already, or there is no slot for it.
    pub fn keep(&mut self, key: BlockKey, tokens: &[u32]) -> Option<u32> {
        if let Some(kept) = self.kept.iter().find(|kept| kept.key == key && *kept.tokens == *tokens) {
            self.mark_used(kept.slot);
            return None;
        }
        let free = self.free.as_mut().filter(|_| self.kept.len() < self.kept_max);
        let slot = match free.and_then(Vec::pop) {
            Some(slot) => slot,
            None if self.kept.is_empty() => return None,
            None => self.kept.remove(0).slot,
        };
        self.kept.push(KeptState {
            key,
            tokens: tokens.into(),
            slot,
        });
        Some(slot)
    }

    /// The prefixes of `tokens` whose state is kept, the longest first: the number of blocks of each,
    /// and the state's slot. `keys` are the keys of the blocks that may be shared.
    pub fn kept_prefixes(&self, keys: &[BlockKey], tokens: &[u32], block_tokens: usize) -> Vec<(usize, u32)> {
        let found = self.kept.iter().filter_map(|kept| {
            let blocks = kept.tokens.len() / block_tokens;
            let key = keys.get(blocks.checked_sub(1)?)?;
            (*key == kept.key && tokens.starts_with(&kept.tokens)).then_some((blocks, kept.slot))
        });
        let mut found: Vec<_> = found.collect();
        found.sort_unstable_by_key(|(blocks, _)| std::cmp::Reverse(*blocks));
        found
    }

    /// The kept state in this slot is used.
    pub fn mark_used(&mut self, slot: u32) {
        if let Some(index) = self.kept.iter().position(|kept| kept.slot == slot) {
            let kept = self.kept.remove(index);
            self.kept.push(kept);
        }
    }

    /// Frees the slots of all kept states, because their contents are invalid.
    pub fn discard_kept(&mut self) {
        if let Some(free) = &mut self.free {
            free.extend(self.kept.drain(..).map(|kept| kept.slot));
        }
    }

    /// Panics unless each of `slots` slots is free, kept or one of `held`. For tests.
    #[cfg(test)]
    pub fn check(&self, slots: u32, held: impl Iterator<Item = u32>) {
        let free = self.free.iter().flatten().copied();
        let mut all: Vec<u32> = free.chain(self.kept.iter().map(|kept| kept.slot)).chain(held).collect();
        all.sort_unstable();
        assert_eq!(all, (0..slots).collect::<Vec<_>>(), "a slot leaked or has two holders");
        assert!(self.kept.len() <= self.kept_max);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(of: &str) -> BlockKey {
        BlockKey::root(of)
    }

    fn take(slots: &mut StateSlots, others_run: bool) -> Option<u32> {
        let mut slot = None;
        assert_eq!(slots.take(&mut slot, others_run), slot.is_some());
        slot
    }

    #[test]
    fn a_quarter_of_the_slots_keeps_the_states_used_last() {
        let mut slots = StateSlots::new(Some(9));
        assert_eq!(slots.keep(key("a"), &[1, 2]), Some(0));
        assert_eq!(slots.keep(key("b"), &[1, 2, 3, 4]), Some(1));
        assert_eq!(slots.keep(key("a"), &[1, 2]), None, "it is kept already");
        // The one used last stays, of two that may be kept.
        assert_eq!(slots.keep(key("c"), &[7, 8]), Some(1));
        let found = |slots: &StateSlots, keys: &[&str], tokens: &[u32]| {
            let keys: Vec<BlockKey> = keys.iter().map(|name| key(name)).collect();
            slots.kept_prefixes(&keys, tokens, 2)
        };
        assert_eq!(found(&slots, &["a", "b"], &[1, 2, 3, 4]), [(1, 0)]);
        assert_eq!(found(&slots, &["a"], &[1, 3]), [], "the same key, other tokens");
        assert_eq!(found(&slots, &["salted"], &[1, 2]), [], "the same tokens, another key");
        assert_eq!(found(&slots, &[], &[1, 2]), [], "no block may be shared");
        assert_eq!(slots.keep(key("b"), &[1, 2, 3, 4]), Some(0));
        slots.mark_used(1);
        let running: Vec<u32> = (0..7).filter_map(|_| take(&mut slots, true)).collect();
        assert_eq!(running, [2, 3, 4, 5, 6, 7, 8]);
        // All but the one used last gives way while others run.
        assert_eq!((take(&mut slots, true), take(&mut slots, true)), (Some(0), None));
        assert_eq!((take(&mut slots, false), take(&mut slots, false)), (Some(1), None));
        assert_eq!(slots.keep(key("a"), &[1, 2]), None, "no slot is left");
    }

    #[test]
    fn few_slots_are_for_running_sequences_alone() {
        let mut slots = StateSlots::new(Some(3));
        assert!(!slots.may_keep());
        let mut slot = None;
        assert!(slots.take(&mut slot, false));
        slots.release(&mut slot);
        slots.check(3, std::iter::empty());
        // A model without recurrent layers needs none.
        let mut slots = StateSlots::new(None);
        assert!(slots.take(&mut slot, true) && slot.is_none() && !slots.are_needed());
    }
}
