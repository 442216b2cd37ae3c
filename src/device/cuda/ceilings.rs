//! A card's measured ceilings, with which its kernels are compared, and how long kernels take.

use std::time::Instant;

use super::driver::Argument;
use super::{Cuda, plan};
use crate::device::DeviceError;

/// Measured ceilings of a card.
#[derive(Debug, Clone, Copy, serde::Serialize)]
pub struct Ceilings {
    /// Copy bandwidth within the card's memory, counting reads and writes.
    pub bytes_per_second: f64,
    /// Matrix products from registers and shared memory; a multiply-add counts as two operations.
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
        let (from, to) = (self.context.take(bytes, "a copy")?, self.context.take(bytes, "a copy")?);
        let seconds = self.best_of_three(|| self.context.copy(&from, &to, 0, bytes))?;
        let hopper = card.is_hopper();
        let (launch, operations) = plan::peak(self.format, hopper, card.multiprocessors, rounds);
        let arguments = [Argument::Address(to.address()), Argument::Int(rounds as i32)];
        let computing = self.best_of_three(|| self.launch(&launch, &arguments))?;
        Ok(Ceilings {
            // Each byte is read and written.
            bytes_per_second: 2.0 * bytes as f64 / seconds,
            operations_per_second: operations / computing,
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
        const BYTES: usize = 64 << 20;
        const RUNS: u32 = 8;
        // Runs that together take this many seconds are measured precisely enough.
        const LONG: f64 = 5e-3;
        let Ok(memory) = self.context.take(2 * BYTES, "what fills caches") else {
            return Ok(None);
        };
        let both = || {
            self.context.copy_within(&memory, 0, BYTES, BYTES)?;
            run()
        };
        let once = self.best_of_three(both)?;
        let runs = ((LONG / once) as u32).min(RUNS);
        if runs < 2 {
            return Ok(Some(once));
        }
        let seconds = self.best_of_three(|| (0..runs).try_for_each(|_| both()))?;
        Ok(Some(seconds / f64::from(runs)))
    }

    /// Seconds of the fastest of three runs, after one warm-up run.
    fn best_of_three(&self, run: impl Fn() -> Result<(), DeviceError>) -> Result<f64, DeviceError> {
        let mut best = f64::INFINITY;
        for round in 0..4 {
            self.context.wait()?;
            let began = Instant::now();
            run()?;
            self.context.wait()?;
            if round > 0 {
                best = best.min(began.elapsed().as_secs_f64());
            }
        }
        Ok(best)
    }
}
