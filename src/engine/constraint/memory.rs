//! Approximate memory of all compiled shapes together: each row may bring a large shape.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::engine::constraint::lexer_memory::LexerMemory;

/// The sum of the weights of all shapes of a compiler that still exist, in bytes.
pub(super) type LiveBytes = Arc<AtomicU64>;

/// Memory counters of a compiler's shapes; clones share them.
#[derive(Debug, Clone, Default)]
pub(super) struct ShapeMemory {
    pub live: LiveBytes,
    pub lexer_memory: LexerMemory,
}

/// A shape's share of the sum; dropping it subtracts the share.
#[derive(Debug, Default)]
pub struct MemoryCharge {
    bytes: u64,
    live: LiveBytes,
}

impl MemoryCharge {
    pub(super) fn new(bytes: u64, live: &LiveBytes) -> MemoryCharge {
        live.fetch_add(bytes, Ordering::Relaxed);
        MemoryCharge {
            bytes,
            live: live.clone(),
        }
    }
}

impl Drop for MemoryCharge {
    fn drop(&mut self) {
        self.live.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
