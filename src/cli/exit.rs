//! Exit codes, shared by all commands, and the mapping of errors to exit codes.

use std::process::ExitCode;

use crate::device::DeviceError;
pub(super) use crate::error_line::one_line;
use crate::report::summary::RowCounts;

/// How a command ended. The README documents these codes, and Airflow tasks branch on them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// All requested work is done.
    Done = 0,
    /// An unexpected failure: device, store, a broken guarantee.
    Failure = 1,
    /// The job file, its inputs or the command line are invalid; nothing was started. clap uses the
    /// same code.
    BadJob = 2,
    /// The job is done, but some rows did not succeed.
    FailedRows = 3,
    /// Budget or deadline reached; the job can be resumed.
    Stopped = 4,
    /// The job was cancelled.
    Cancelled = 5,
    /// Ended by SIGINT or SIGTERM after finished rows were written; the job can be resumed.
    Interrupted = 6,
    /// The device failed, and this process can no longer use it; finished rows are written. Restart
    /// the process.
    Restart = 7,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> ExitCode {
        ExitCode::from(exit as u8)
    }
}

impl Exit {
    /// The exit code of a finished job.
    pub fn of_rows(rows: &RowCounts) -> Exit {
        if rows.succeeded == rows.total {
            Exit::Done
        } else {
            Exit::FailedRows
        }
    }
}

/// An error that ends a command, with its exit code.
#[derive(Debug)]
pub(super) struct Failure {
    pub exit: Exit,
    pub error: anyhow::Error,
}

impl Failure {
    /// The job or its inputs are at fault.
    pub(super) fn bad_job(error: impl Into<anyhow::Error>) -> Failure {
        Failure {
            exit: Exit::BadJob,
            error: error.into(),
        }
    }

    /// The same failure, prefixed with the operation in progress.
    pub(super) fn context(self, operation: String) -> Failure {
        Failure {
            exit: self.exit,
            error: self.error.context(operation),
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
            exit: if error.chain().any(is_lost) {
                Exit::Restart
            } else {
                Exit::Failure
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
