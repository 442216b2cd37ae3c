//! How much memory compiled shapes hold together, about: rows may each bring a large one.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::engine::constraint::growth::Growth;

/// The sum of all weights of a compiler's shapes that are still there.
pub(super) type Live = Arc<AtomicU64>;

/// What a compiler's shapes are counted in; clones share it.
#[derive(Debug, Clone, Default)]
pub(super) struct Memory {
    pub live: Live,
    pub growth: Growth,
}

/// A shape's part of the sum, for as long as it is there.
#[derive(Debug, Default)]
pub struct Weight {
    bytes: u64,
    live: Live,
}

impl Weight {
    pub(super) fn new(bytes: u64, live: &Live) -> Weight {
        live.fetch_add(bytes, Ordering::Relaxed);
        Weight {
            bytes,
            live: live.clone(),
        }
    }
}

impl Drop for Weight {
    fn drop(&mut self) {
        self.live.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
