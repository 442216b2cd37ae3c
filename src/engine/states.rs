//! Slots for the states of a model's recurrent layers: each running sequence has one.
//!
//! See docs/decisions/101-recurrent-states-have-slots.md.

/// The slots of a model, or none if it has no recurrent layers.
#[derive(Debug, Clone)]
pub struct StateSlots {
    /// Slots that no sequence has; the last one is given next. `None`: the model needs none.
    free: Option<Vec<u32>>,
}

impl StateSlots {
    /// The slots of a model with `slots` of them. `None`: it has no recurrent layers.
    pub fn new(slots: Option<u32>) -> StateSlots {
        StateSlots {
            free: slots.map(|slots| (0..slots).rev().collect()),
        }
    }

    /// Whether sequences need slots.
    pub fn are_needed(&self) -> bool {
        self.free.is_some()
    }

    /// Gives a sequence without a slot one, if it needs one. Returns `false` if none is free.
    pub fn take(&mut self, slot: &mut Option<u32>) -> bool {
        let Some(free) = &mut self.free else { return true };
        *slot = free.pop();
        slot.is_some()
    }

    /// Takes a sequence's slot back.
    pub fn release(&mut self, slot: &mut Option<u32>) {
        if let (Some(free), Some(slot)) = (&mut self.free, slot.take()) {
            free.push(slot);
        }
    }
}
