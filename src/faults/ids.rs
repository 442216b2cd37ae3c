//! Derives ids from a seed, so that a simulation can be replayed exactly.

use std::cell::Cell;

use crate::engine::philox::philox4x32;

thread_local! {
    /// The seed, and the number of ids that were derived from it.
    static STATE: Cell<Option<(u64, u64)>> = const { Cell::new(None) };
}

/// Derives all further ids of this thread from `seed`.
pub fn seed_thread(seed: u64) {
    STATE.set(Some((seed, 0)));
}

/// The next id's bytes, at most 16; `None` if this thread has no seed.
pub fn next_id<const N: usize>() -> Option<[u8; N]> {
    let (seed, count) = STATE.get()?;
    STATE.set(Some((seed, count + 1)));
    let words = philox4x32(
        [seed as u32, (seed >> 32) as u32],
        [count as u32, (count >> 32) as u32, 0, 0],
    );
    Some(std::array::from_fn(|i| words[i / 4].to_le_bytes()[i % 4]))
}
