//! Whether a job has used up its budget or time. Without state, so that stopping and resuming
//! follow the same rule.

use std::time::Duration;

use crate::ledger::spend::dollars;
use crate::ledger::{JobLimits, StopWhy};

/// The budget and the deadline of a job, as a worker compares them.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct WorkerLimits {
    pub usd: Option<f64>,
    /// Without a price, `usd` cannot be reached.
    pub usd_per_hour: Option<f64>,
    /// Maximum time since the job's creation.
    pub deadline: Option<Duration>,
}

impl WorkerLimits {
    /// The limits of a job, as recorded or extended.
    pub fn of(limits: &JobLimits) -> WorkerLimits {
        WorkerLimits {
            usd: limits.usd,
            usd_per_hour: limits.usd_per_hour,
            deadline: limits.deadline_seconds.map(Duration::from_secs),
        }
    }

    /// Whether spending can reach a limit: there is a budget and a price.
    pub fn has_budget(&self) -> bool {
        self.usd.is_some() && self.usd_per_hour.is_some_and(|price| price > 0.0)
    }

    /// The limit that `device_seconds` of work or `age` of the job has reached, if any.
    pub fn reached(&self, device_seconds: f64, age: Duration) -> Option<StopWhy> {
        let spent = dollars(device_seconds, self.usd_per_hour);
        if self.usd.zip(spent).is_some_and(|(max, spent)| spent >= max) {
            return Some(StopWhy::Budget);
        }
        self.deadline.is_some_and(|max| age >= max).then_some(StopWhy::Deadline)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn money_and_time_end_work_and_nothing_else_does() {
        let limits = WorkerLimits {
            usd: Some(1.0),
            usd_per_hour: Some(3600.0),
            deadline: Some(Duration::from_secs(60)),
        };
        let minute = Duration::from_secs(60);
        assert_eq!(limits.reached(0.9, Duration::ZERO), None);
        assert_eq!(limits.reached(1.0, Duration::ZERO), Some(StopWhy::Budget));
        assert_eq!(limits.reached(0.0, minute), Some(StopWhy::Deadline));
        assert_eq!(limits.reached(9.0, minute), Some(StopWhy::Budget));
        assert_eq!(
            WorkerLimits {
                usd_per_hour: None,
                ..limits
            }
            .reached(1e9, Duration::ZERO),
            None
        );
        assert_eq!(WorkerLimits::default().reached(1e9, minute), None);
    }
}
