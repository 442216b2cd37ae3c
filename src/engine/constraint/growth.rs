//! Bounds the memory that lexers take beyond their compiled grammars, over all lanes of all
//! grammars of a worker.
//!
//! A lexer keeps each state that a text leads to, one or two kilobytes per state, and nobody can
//! foresee which states a model's texts reach. While the sum is above the bound, a lexer with more
//! than its share (the bound divided by the number of lexers) gives way. A sequence that shares
//! this lexer gets a new lexer of its own, and a sequence that already has its own fails. Sequences
//! whose lexer is within its share go on. So the sum stays below about twice the bound, plus the
//! growth of one step.

use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex};

use llguidance::earley::Parser;
use llguidance::{TokenParser, panic_utils};

use crate::engine::constraint::grammar::{LANES, locked};
use crate::engine::constraint::text::one_line;

/// The bound in bytes is `LANE_BYTES` for each lane of one grammar, and at least `LEAST_BYTES`.
const LANE_BYTES: u64 = 32 << 20;
const LEAST_BYTES: u64 = 512 << 20;

/// The bound, and the sum over all lexers; clones share both.
#[derive(Debug, Clone)]
pub(super) struct Growth(Arc<Sum>);

#[derive(Debug)]
struct Sum {
    most: u64,
    bytes: AtomicU64,
    lexers: AtomicU64,
}

impl Default for Growth {
    fn default() -> Growth {
        static MOST: LazyLock<u64> = LazyLock::new(|| LEAST_BYTES.max(LANE_BYTES * *LANES as u64));
        Growth::of(*MOST)
    }
}

impl Growth {
    /// A sum with this bound in bytes.
    pub(super) fn of(most: u64) -> Growth {
        Growth(Arc::new(Sum {
            most,
            bytes: AtomicU64::new(0),
            lexers: AtomicU64::new(0),
        }))
    }

    /// Bytes that all lexers take beyond their grammars.
    pub(super) fn bytes(&self) -> u64 {
        self.0.bytes.load(Ordering::Relaxed)
    }

    /// Whether more than half of the bound is used. Then a lexer is dropped with its last sequence.
    pub(super) fn is_tight(&self) -> bool {
        self.bytes() > self.0.most / 2
    }
}

/// A lexer that matchers share, counted in the sum until the last of them is dropped.
pub(super) struct Lexer {
    /// A parser that shares the lexer; used only to read the lexer's size.
    parser: Mutex<Parser>,
    /// Bytes of the lexer at its start.
    first: u64,
    grown: AtomicU64,
    growth: Growth,
}

impl Lexer {
    /// The lexer of `parser`.
    pub(super) fn new(parser: &TokenParser, growth: Growth) -> Lexer {
        growth.0.lexers.fetch_add(1, Ordering::Relaxed);
        Lexer {
            parser: Mutex::new(parser.parser.clone()),
            first: bytes(&parser.parser),
            grown: AtomicU64::new(0),
            growth,
        }
    }

    /// Adds the lexer's growth to the sum.
    ///
    /// # Errors
    /// The lexer must give way: the sum is above the bound, and this lexer above its share.
    pub(super) fn check(&self) -> Result<(), String> {
        // A lexer that has panicked panics again when its size is read.
        let size = panic_utils::catch_unwind(AssertUnwindSafe(|| Ok(bytes(&locked(&self.parser)))));
        let grown = size.map_err(|e| one_line(&e.to_string()))?.saturating_sub(self.first);
        let before = self.grown.fetch_max(grown, Ordering::Relaxed);
        let sum = &self.growth.0;
        sum.bytes.fetch_add(grown.saturating_sub(before), Ordering::Relaxed);
        let part = sum.most / sum.lexers.load(Ordering::Relaxed).max(1);
        if self.growth.bytes() <= sum.most || grown <= part {
            return Ok(());
        }
        Err(format!(
            "the grammars of the running rows take more than {} MiB of memory, {} KiB of it this row's; use a simpler schema or expression",
            sum.most >> 20,
            grown >> 10
        ))
    }

    pub(super) fn is_tight(&self) -> bool {
        self.growth.is_tight()
    }
}

impl Drop for Lexer {
    fn drop(&mut self) {
        let sum = &self.growth.0;
        sum.bytes.fetch_sub(*self.grown.get_mut(), Ordering::Relaxed);
        sum.lexers.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Approximate bytes of a parser's lexer.
fn bytes(parser: &Parser) -> u64 {
    parser.lexer_stats().num_bytes as u64
}
