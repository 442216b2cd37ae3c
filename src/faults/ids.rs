//! Derives ids from a seed, so that a simulation can be replayed exactly.

use std::cell::Cell;

use crate::engine::philox::philox4x32;

thread_local! {
    /// The seed, and the number of ids made.
    static STATE: Cell<Option<(u64, u64)>> = const { Cell::new(None) };
}

/// Derives all further ids of this thread from `seed`.
pub fn follow(seed: u64) {
    STATE.set(Some((seed, 0)));
}

/// The next id's bytes, at most 16; `None` if this thread has no seed.
pub fn next<const N: usize>() -> Option<[u8; N]> {
    let (seed, made) = STATE.get()?;
    STATE.set(Some((seed, made + 1)));
    let words = philox4x32(
        [seed as u32, (seed >> 32) as u32],
        [made as u32, (made >> 32) as u32, 0, 0],
    );
    Some(std::array::from_fn(|i| words[i / 4].to_le_bytes()[i % 4]))
}
