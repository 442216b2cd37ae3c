//! What lexers take beyond their compiled grammars while rows run, bounded over all lanes of all grammars of a worker.
//!
//! A lexer keeps each state that a text leads it to, one or two kilobytes each, and nobody can foresee which states a model's texts reach.
//! While all together are beyond the bound, one that has more than its part of it gives way: a sequence that shares it begins anew with
//! one of its own, and a sequence whose own has more than its part fails. Who has less goes on, so the sum stays below twice the bound,
//! give or take what one step adds.

use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex};

use llguidance::earley::Parser;
use llguidance::{TokenParser, panic_utils};

use crate::engine::constraint::grammar::{LANES, locked};
use crate::engine::constraint::text::one_line;

/// Bytes that lexers may take beyond their grammars: of each lane of one grammar, and at least.
const LANE_BYTES: u64 = 32 << 20;
const LEAST_BYTES: u64 = 512 << 20;

/// The bound, and what all lexers take; clones share it.
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
    /// One with this bound.
    pub fn of(most: u64) -> Growth {
        Growth(Arc::new(Sum {
            most,
            bytes: AtomicU64::new(0),
            lexers: AtomicU64::new(0),
        }))
    }

    /// What all lexers take.
    pub fn bytes(&self) -> u64 {
        self.0.bytes.load(Ordering::Relaxed)
    }

    /// Is more than half of it taken? Then no lexer is kept that nobody uses.
    pub fn is_tight(&self) -> bool {
        self.bytes() > self.0.most / 2
    }
}

/// The lexer of matchers that share it, counted for as long as one of them is there.
pub(super) struct Lexer {
    /// Shares it, too; asked for its size alone.
    parser: Mutex<Parser>,
    /// What it took at first.
    first: u64,
    grown: AtomicU64,
    growth: Growth,
}

impl Lexer {
    /// That of `parser`.
    pub fn new(parser: &TokenParser, growth: Growth) -> Lexer {
        growth.0.lexers.fetch_add(1, Ordering::Relaxed);
        Lexer {
            parser: Mutex::new(parser.parser.clone()),
            first: bytes(&parser.parser),
            grown: AtomicU64::new(0),
            growth,
        }
    }

    /// Counts what it has come to. An error: it has to give way.
    pub fn check(&self) -> Result<(), String> {
        // A lexer that panicked once says nothing more.
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
            "the states of the shapes that run take more than {} MiB, and its own {} KiB of them; ask for a simpler shape",
            sum.most >> 20,
            grown >> 10
        ))
    }

    pub fn is_tight(&self) -> bool {
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

/// About what a parser's lexer takes.
fn bytes(parser: &Parser) -> u64 {
    parser.lexer_stats().num_bytes as u64
}
