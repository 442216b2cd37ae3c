//! Whether a job's rows may run.

use crate::dataset::row::RowStatus;
use crate::ledger::StopWhy;

/// Whether a job's rows may run, by its commands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JobState {
    Running,
    /// No further rows run; unfinished rows stay open.
    Stopped(StopWhy),
    /// No further rows run; unfinished rows end as `cancelled` or `expired`.
    Closing(StopWhy),
    /// This version cannot read its commands: other workers should continue it.
    Unreadable,
}

impl JobState {
    /// The status with which unfinished rows end; `None`: they stay open.
    pub fn close_status(self) -> Option<RowStatus> {
        match self {
            JobState::Closing(StopWhy::Cancelled) => Some(RowStatus::Cancelled),
            JobState::Closing(StopWhy::Budget | StopWhy::Deadline | StopWhy::InputChanged) => Some(RowStatus::Expired),
            JobState::Running | JobState::Stopped(_) | JobState::Unreadable => None,
        }
    }
}
