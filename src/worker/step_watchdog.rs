//! Whether the worker makes progress, for liveness checks and for the queue's timeouts.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

/// The device's current step, and how long it may take.
#[derive(Debug)]
pub struct StepWatchdog {
    step_max: Duration,
    /// Start of the step that is running.
    step_began: Mutex<Option<Instant>>,
    /// End of the last step; the start of this process's work before the first step.
    step_ended: Mutex<Instant>,
}

impl StepWatchdog {
    /// A device that spends more than `step_max` on one step counts as hanging.
    pub fn new(step_max: Duration) -> StepWatchdog {
        StepWatchdog {
            step_max,
            step_began: Mutex::new(None),
            step_ended: Mutex::new(Instant::now()),
        }
    }

    /// Runs a step of the device.
    pub fn step<T>(&self, step: impl FnOnce() -> T) -> T {
        self.set_step_began(Some(Instant::now()));
        let done = step();
        self.set_step_began(None);
        *self.step_ended.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        done
    }

    /// Time since the device ended a step; before its first step, time since the start.
    pub fn last_step_age(&self) -> Duration {
        self.step_ended.lock().unwrap_or_else(PoisonError::into_inner).elapsed()
    }

    /// False: the device has spent too long on one step. A worker that waits (for work, for the
    /// store) is alive.
    pub fn is_alive(&self) -> bool {
        let began = *self.step_began.lock().unwrap_or_else(PoisonError::into_inner);
        began.is_none_or(|began| began.elapsed() <= self.step_max)
    }

    /// Maximum time of a step, and so the time that the queue should wait for the next extension.
    pub fn step_max(&self) -> Duration {
        self.step_max
    }

    fn set_step_began(&self, began: Option<Instant>) {
        *self.step_began.lock().unwrap_or_else(PoisonError::into_inner) = began;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_step_that_takes_too_long_is_a_sign_of_death() {
        let watchdog = StepWatchdog::new(Duration::from_millis(20));
        assert!(watchdog.is_alive(), "waiting is no hang");
        watchdog.step(|| {
            assert!(watchdog.is_alive());
            std::thread::sleep(Duration::from_millis(30));
            assert!(!watchdog.is_alive());
            assert!(watchdog.last_step_age() >= Duration::from_millis(30));
        });
        assert!(watchdog.is_alive());
        std::thread::sleep(Duration::from_millis(30));
        let age = watchdog.last_step_age();
        watchdog.step(|| ());
        assert!(watchdog.last_step_age() < age, "a step has ended since");
    }
}
