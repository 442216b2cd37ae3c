//! Rows that the device need not finish: their shards were given back, stopped or closed.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// Told by shards, taken by the device thread before each step.
#[derive(Debug, Default)]
pub struct Cancels {
    any: AtomicBool,
    rows: Mutex<Vec<(u32, Range<u64>)>>,
}

impl Cancels {
    /// Rows of `job` (its number within the worker) are not wanted any more.
    pub fn push(&self, job: u32, rows: Range<u64>) {
        let mut all = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        all.push((job, rows));
        self.any.store(true, Ordering::Release);
    }

    /// What was pushed since the last time.
    pub fn take(&self) -> Vec<(u32, Range<u64>)> {
        if !self.any.swap(false, Ordering::Acquire) {
            return Vec::new();
        }
        std::mem::take(&mut *self.rows.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
