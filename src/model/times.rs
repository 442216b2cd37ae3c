//! Time that a model spends, by kind of operation.

use std::time::{Duration, Instant};

/// A kind of operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operation {
    Embed,
    Norm,
    Linear,
    RopeStore,
    Attention,
    Recurrent,
    GatedLinear,
    Experts,
    Logits,
    Draw,
}

impl Operation {
    const ALL: [(Operation, &'static str); 10] = [
        (Operation::Embed, "embed"),
        (Operation::Norm, "norm"),
        (Operation::Linear, "linear"),
        (Operation::RopeStore, "rope_store"),
        (Operation::Attention, "attention"),
        (Operation::Recurrent, "recurrent"),
        (Operation::GatedLinear, "gated_linear"),
        (Operation::Experts, "experts"),
        (Operation::Logits, "logits"),
        (Operation::Draw, "draw"),
    ];
}

/// Time by operation, summed over steps.
#[derive(Debug, Default)]
pub(super) struct Times([Duration; Operation::ALL.len()]);

impl Times {
    /// Starts a stopwatch. Each call of the returned function adds the time since its last call (at
    /// first, since the start) to an operation.
    pub(super) fn stopwatch(&mut self) -> impl FnMut(Operation) {
        let mut last = Instant::now();
        move |operation| {
            let now = Instant::now();
            self.0[operation as usize] += now - last;
            last = now;
        }
    }

    /// The total time of each operation, with the operation's name.
    pub(super) fn totals(&self) -> Vec<(&'static str, Duration)> {
        Operation::ALL
            .iter()
            .map(|(operation, name)| (*name, self.0[*operation as usize]))
            .collect()
    }
}
