//! Ids that follow from a seed, so that a simulation can be played again to the letter.

use std::cell::Cell;

thread_local! {
    static STATE: Cell<Option<u64>> = const { Cell::new(None) };
}

/// From now on, the ids that this thread makes follow from `seed`.
pub fn follow(seed: u64) {
    STATE.set(Some(seed));
}

/// The next id's bytes, where this thread's ids follow from a seed (SplitMix64).
pub fn next<const N: usize>() -> Option<[u8; N]> {
    let mut state = STATE.get()?;
    let bytes = std::array::from_fn(|_| {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z >> 56) as u8
    });
    STATE.set(Some(state));
    Some(bytes)
}
