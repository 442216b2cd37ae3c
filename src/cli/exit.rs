//! Exit codes: one table for all commands, and how errors map to it.

use std::process::ExitCode;

use crate::device::DeviceError;
pub use crate::report::one_line;
use crate::report::summary::RowCounts;

/// How a command ended. The README shows this table; Airflow tasks branch on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// Everything asked for is done.
    Done = 0,
    /// Something failed that is nobody's wish: device, store, a broken guarantee.
    Failure = 1,
    /// The job file, its inputs or the command line are wrong; nothing was started. clap uses the same code.
    BadJob = 2,
    /// The job is done, but some rows did not succeed.
    FailedRows = 3,
    /// Budget or deadline reached; the job can be resumed.
    Stopped = 4,
    /// The job was cancelled.
    Cancelled = 5,
    /// Ended by SIGINT or SIGTERM after writing what was finished; the job can be resumed.
    Interrupted = 6,
    /// The device failed, and this process cannot use it any more; what was finished is written. Start it again.
    Restart = 7,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> ExitCode {
        ExitCode::from(exit as u8)
    }
}

impl Exit {
    /// The code of a finished job.
    pub fn of_rows(rows: &RowCounts) -> Exit {
        if rows.succeeded == rows.total {
            Exit::Done
        } else {
            Exit::FailedRows
        }
    }
}

/// An error that ends a command, with the exit code it ends with.
#[derive(Debug)]
pub struct Failure {
    pub exit: Exit,
    pub error: anyhow::Error,
}

impl Failure {
    /// The job or its inputs are at fault.
    pub fn bad_job(error: impl Into<anyhow::Error>) -> Failure {
        Failure {
            exit: Exit::BadJob,
            error: error.into(),
        }
    }

    /// The same failure, with what was being done said before it.
    pub fn context(self, doing: String) -> Failure {
        Failure {
            exit: self.exit,
            error: self.error.context(doing),
        }
    }
}

impl<E: Into<anyhow::Error>> From<E> for Failure {
    fn from(error: E) -> Failure {
        let error = error.into();
        let is_lost = |cause: &(dyn std::error::Error + 'static)| {
            matches!(cause.downcast_ref::<DeviceError>(), Some(DeviceError::Lost(_)))
        };
        Failure {
            exit: match error.chain().any(is_lost) {
                true => Exit::Restart,
                false => Exit::Failure,
            },
            error,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{EngineError, ForwardError};

    #[test]
    fn a_lost_device_asks_for_a_restart_however_deep_it_lies() {
        let exit = |error: DeviceError| {
            let error = EngineError::Forward(ForwardError::Device(error));
            Failure::from(anyhow::Error::from(error).context("the device cannot go on")).exit
        };
        assert_eq!(exit(DeviceError::Lost("a fault".into())), Exit::Restart);
        assert_eq!(exit(DeviceError::OutOfMemory("full".into())), Exit::Failure);
    }

    #[test]
    fn failed_rows_have_their_own_code() {
        let mut rows = RowCounts {
            total: 2,
            succeeded: 2,
            ..Default::default()
        };
        assert_eq!(Exit::of_rows(&rows), Exit::Done);
        rows.succeeded = 1;
        assert_eq!(Exit::of_rows(&rows), Exit::FailedRows);
    }
}
