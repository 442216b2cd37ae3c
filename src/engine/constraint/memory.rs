//! Counts the approximate memory of all compiled shapes together, since each row may bring a large
//! shape.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::engine::constraint::lexer_memory::LexerMemory;

/// Approximate bytes of all shapes of a compiler that still exist.
pub(super) type LiveBytes = Arc<AtomicU64>;

/// Memory counters of a compiler's shapes; clones share them.
#[derive(Debug, Clone, Default)]
pub(super) struct ShapeMemory {
    pub live_bytes: LiveBytes,
    pub lexer_memory: LexerMemory,
}

/// A shape's bytes in the sum. Dropping the charge subtracts them.
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
