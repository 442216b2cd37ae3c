//! Measures a card's ceilings, with which kernels are compared, and how long kernels take.

use std::time::Instant;

use super::driver::Argument;
use super::{Cuda, plan};
use crate::device::DeviceError;

/// Measured ceilings of a card.
#[derive(Debug, Clone, Copy, serde::Serialize)]
pub struct Ceilings {
    /// Copy bandwidth within the card's memory, counting reads and writes.
    pub bytes_per_second: f64,
    /// Matmuls from registers and shared memory; a multiply-add counts as two operations.
    pub operations_per_second: f64,
}

impl Cuda {
    /// Measures the card: bytes moved per second, and operations per second in the linear layers'
    /// format.
    ///
    /// # Errors
    /// The card failed.
    pub fn ceilings(&self, brief: bool) -> Result<Ceilings, DeviceError> {
        let (bytes, rounds) = if brief { (1 << 20, 2) } else { (512 << 20, 20_000) };
        let card = self.context.card();
        let (from, to) = (
            self.context.allocate(bytes, "a copy")?,
            self.context.allocate(bytes, "a copy")?,
        );
        let seconds = self.best_of_three(|| self.context.copy(&from, &to, 0, bytes))?;
        let (launch, operations) = plan::peak(self.format, card.is_hopper(), card.multiprocessors, rounds);
        let arguments = [Argument::Address(to.address()), Argument::Int(rounds as i32)];
        let peak_seconds = self.best_of_three(|| self.launch(&launch, &arguments))?;
        Ok(Ceilings {
            // Each byte is read and written.
            bytes_per_second: 2.0 * bytes as f64 / seconds,
            operations_per_second: operations / peak_seconds,
        })
    }

    /// Seconds that the work issued by `run` takes with cold caches, including the copy that evicts
    /// them. `None`: there is no memory for that copy.
    ///
    /// # Errors
    /// The card failed.
    pub(super) fn seconds_uncached(
        &self,
        run: impl Fn() -> Result<(), DeviceError>,
    ) -> Result<Option<f64>, DeviceError> {
        const EVICTION_BYTES: usize = 64 << 20;
        const RUNS_MAX: u32 = 8;
        // Runs that together take this many seconds are measured precisely enough.
        const SECONDS_MIN: f64 = 5e-3;
        let Ok(memory) = self.context.allocate(2 * EVICTION_BYTES, "memory that evicts caches") else {
            return Ok(None);
        };
        let evict_and_run = || {
            self.context.copy_within(&memory, 0, EVICTION_BYTES, EVICTION_BYTES)?;
            run()
        };
        let once = self.best_of_three(evict_and_run)?;
        let runs = ((SECONDS_MIN / once) as u32).min(RUNS_MAX);
        if runs < 2 {
            return Ok(Some(once));
        }
        let seconds = self.best_of_three(|| (0..runs).try_for_each(|_| evict_and_run()))?;
        Ok(Some(seconds / f64::from(runs)))
    }

    /// Seconds of the fastest of three runs, after one warm-up run.
    fn best_of_three(&self, run: impl Fn() -> Result<(), DeviceError>) -> Result<f64, DeviceError> {
        let mut best = f64::INFINITY;
        for round in 0..4 {
            self.context.wait()?;
            let start = Instant::now();
            run()?;
            self.context.wait()?;
            if round > 0 {
                best = best.min(start.elapsed().as_secs_f64());
            }
        }
        Ok(best)
    }
}
