//! Bounds the memory that lexers take beyond their compiled grammars, over all lanes of all
//! grammars of a worker.
//!
//! A lexer keeps each state that a text leads to, one or two kilobytes per state, and the states
//! that a model's texts reach cannot be foreseen. While the sum is above the bound, a lexer with
//! more than its share (the bound divided by the number of lexers) is given up. A sequence that
//! shares this lexer gets a new lexer of its own, and a sequence that already has its own fails.
//! Sequences whose lexer is within its share go on. So the sum stays below about twice the bound,
//! plus the growth of one step.

use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex};

use llguidance::earley::Parser;
use llguidance::{TokenParser, panic_utils};

use crate::engine::constraint::grammar::{LANE_COUNT, lock};
use crate::engine::constraint::text::one_line;

/// The default bound is `BYTES_PER_LANE` for each lane of one grammar, and at least
/// `LIMIT_MIN_BYTES`.
const BYTES_PER_LANE: u64 = 32 << 20;
const LIMIT_MIN_BYTES: u64 = 512 << 20;

/// The bound, and the sum over all lexers; clones share both.
#[derive(Debug, Clone)]
pub(super) struct LexerMemory(Arc<LexerTotals>);

#[derive(Debug)]
struct LexerTotals {
    limit: u64,
    bytes: AtomicU64,
    lexers: AtomicU64,
}

impl Default for LexerMemory {
    fn default() -> LexerMemory {
        static DEFAULT_LIMIT: LazyLock<u64> =
            LazyLock::new(|| LIMIT_MIN_BYTES.max(BYTES_PER_LANE * *LANE_COUNT as u64));
        LexerMemory::with_limit(*DEFAULT_LIMIT)
    }
}

impl LexerMemory {
    /// A sum with this bound in bytes.
    pub(super) fn with_limit(limit: u64) -> LexerMemory {
        LexerMemory(Arc::new(LexerTotals {
            limit,
            bytes: AtomicU64::new(0),
            lexers: AtomicU64::new(0),
        }))
    }

    /// Bytes that all lexers take beyond their grammars.
    pub(super) fn bytes(&self) -> u64 {
        self.0.bytes.load(Ordering::Relaxed)
    }

    /// Whether more than half of the bound is used. If so, a lexer is dropped with its last
    /// sequence.
    pub(super) fn under_pressure(&self) -> bool {
        self.bytes() > self.0.limit / 2
    }
}

/// A lexer that matchers share, counted in the sum until the last of them is dropped.
pub(super) struct Lexer {
    /// A parser that shares the lexer, used only to read the lexer's size.
    parser: Mutex<Parser>,
    /// Bytes of the lexer when it was created.
    initial_bytes: u64,
    /// Growth in bytes since then, as far as it is counted in the sum.
    grown_bytes: AtomicU64,
    lexer_memory: LexerMemory,
}

impl Lexer {
    /// The lexer of `parser`.
    pub(super) fn new(parser: &TokenParser, lexer_memory: LexerMemory) -> Lexer {
        lexer_memory.0.lexers.fetch_add(1, Ordering::Relaxed);
        Lexer {
            parser: Mutex::new(parser.parser.clone()),
            initial_bytes: lexer_bytes(&parser.parser),
            grown_bytes: AtomicU64::new(0),
            lexer_memory,
        }
    }

    /// Adds the lexer's growth to the sum.
    ///
    /// # Errors
    /// The lexer must be given up: the sum is above the bound, and this lexer above its share.
    pub(super) fn check(&self) -> Result<(), String> {
        // A lexer that has panicked panics again when its size is read.
        let size = panic_utils::catch_unwind(AssertUnwindSafe(|| Ok(lexer_bytes(&lock(&self.parser)))));
        let grown_bytes = size
            .map_err(|e| one_line(&e.to_string()))?
            .saturating_sub(self.initial_bytes);
        let before = self.grown_bytes.fetch_max(grown_bytes, Ordering::Relaxed);
        let totals = &self.lexer_memory.0;
        totals
            .bytes
            .fetch_add(grown_bytes.saturating_sub(before), Ordering::Relaxed);
        let share = totals.limit / totals.lexers.load(Ordering::Relaxed).max(1);
        if self.lexer_memory.bytes() <= totals.limit || grown_bytes <= share {
            return Ok(());
        }
        Err(format!(
            "the grammars of the running rows take more than {} MiB of memory, {} KiB of it this row's; use a simpler schema or expression",
            totals.limit >> 20,
            grown_bytes >> 10
        ))
    }

    pub(super) fn under_pressure(&self) -> bool {
        self.lexer_memory.under_pressure()
    }
}

impl Drop for Lexer {
    fn drop(&mut self) {
        let totals = &self.lexer_memory.0;
        totals.bytes.fetch_sub(*self.grown_bytes.get_mut(), Ordering::Relaxed);
        totals.lexers.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Approximate bytes of a parser's lexer.
fn lexer_bytes(parser: &Parser) -> u64 {
    parser.lexer_stats().num_bytes as u64
}
