//! When a job has used up its money or time. Pure: the same rule decides about stopping and about
//! going on.

use std::time::Duration;

use crate::ledger::spend::dollars;
use crate::ledger::{JobLimits, StopWhy};

/// What a job may cost, and how long it may take.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct WorkerLimits {
    pub usd: Option<f64>,
    /// Without a price, `usd` cannot be reached.
    pub usd_per_hour: Option<f64>,
    /// Time since the job was created.
    pub deadline: Option<Duration>,
}

impl WorkerLimits {
    /// The limits in these terms.
    pub fn of(terms: &JobLimits) -> WorkerLimits {
        WorkerLimits {
            usd: terms.usd,
            usd_per_hour: terms.usd_per_hour,
            deadline: terms.deadline_seconds.map(Duration::from_secs),
        }
    }

    /// Whether spending can reach a limit.
    pub fn count_money(&self) -> bool {
        self.usd.is_some() && self.usd_per_hour.is_some_and(|price| price > 0.0)
    }

    /// Which limit is reached, if any, by `device_seconds` of work and `age` of the job.
    pub fn reached(&self, device_seconds: f64, age: Duration) -> Option<StopWhy> {
        let spent = dollars(device_seconds, self.usd_per_hour);
        if self.usd.zip(spent).is_some_and(|(most, spent)| spent >= most) {
            return Some(StopWhy::Budget);
        }
        self.deadline
            .is_some_and(|most| age >= most)
            .then_some(StopWhy::Deadline)
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
