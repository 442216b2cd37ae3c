//! Approximate memory of all compiled shapes together: each row may bring a large shape.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::engine::constraint::growth::Growth;

/// The sum of the weights of all shapes of a compiler that still exist, in bytes.
pub(super) type Live = Arc<AtomicU64>;

/// Memory counters of a compiler's shapes; clones share them.
#[derive(Debug, Clone, Default)]
pub(super) struct Memory {
    pub live: Live,
    pub growth: Growth,
}

/// A shape's share of the sum; dropping it subtracts the share.
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
