//! The jobs that must be done before a worker counts as idle, even if its queue delivers none of
//! their messages: the jobs of `--job`, and the job whose model was loaded. A job whose store does
//! not answer is opened later and holds up no other job.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::dataset::store::location::Location;
use crate::ledger::Ledger;
use crate::worker::retry_policy::{RetryDecision, RetryPolicy};

/// Maximum time to read one job's record. The records are read one after another.
const OPEN_MAX: Duration = Duration::from_secs(10);

/// See the module's description.
#[derive(Debug, Default)]
pub struct WatchedJobs {
    state: Mutex<WatchedState>,
}

/// An output of `--job` holds no job.
#[derive(Debug, thiserror::Error)]
#[error("`{output}` holds no job: there is no `_gristmill/job.json`")]
pub struct NoJob {
    output: String,
}

#[derive(Debug, Default)]
struct WatchedState {
    ledgers: Vec<Ledger>,
    unopened: Vec<Location>,
}

impl WatchedJobs {
    /// The jobs in these outputs, none of them open yet.
    pub fn new(outputs: Vec<Location>) -> WatchedJobs {
        let state = WatchedState {
            ledgers: Vec::new(),
            unopened: outputs,
        };
        WatchedJobs {
            state: Mutex::new(state),
        }
    }

    fn state(&self) -> MutexGuard<'_, WatchedState> {
        // Every change is a single step, so the state is consistent even after a panic of its
        // holder.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn push(&self, ledger: Ledger) {
        self.state().ledgers.push(ledger);
    }

    /// The jobs that are open.
    pub fn ledgers(&self) -> Vec<Ledger> {
        self.state().ledgers.clone()
    }

    pub fn are_all_open(&self) -> bool {
        self.state().unopened.is_empty()
    }

    /// Tries to open the unopened jobs. `Some`: the last error of a job that will be tried again.
    ///
    /// # Errors
    /// An output holds no job ([`NoJob`]), or opening failed with an error that is not waited out.
    pub async fn open(&self, retry_policy: &RetryPolicy) -> anyhow::Result<Option<anyhow::Error>> {
        let unopened = self.state().unopened.clone();
        let mut failed = None;
        for output in unopened {
            let opened = match tokio::time::timeout(OPEN_MAX, Ledger::open(&output)).await {
                Ok(opened) => opened.map_err(anyhow::Error::from),
                Err(_) => {
                    let seconds = OPEN_MAX.as_secs();
                    failed = Some(anyhow::anyhow!("`{}` has not answered for {seconds} s", output.url));
                    continue;
                }
            };
            match opened {
                Ok(Some(ledger)) => {
                    let mut state = self.state();
                    state.unopened.retain(|other| other.url != output.url);
                    state.ledgers.push(ledger);
                }
                Ok(None) => {
                    let output = output.url.to_string();
                    return Err(NoJob { output }.into());
                }
                Err(error) if retry_policy.decision(&error) == RetryDecision::Wait => failed = Some(error),
                Err(error) => return Err(error),
            }
        }
        Ok(failed)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[tokio::test]
    async fn an_output_without_a_job_is_an_error_and_stays_unopened() {
        let location = Location::parse("/nowhere/at/all", Path::new("/")).unwrap();
        let watched = WatchedJobs::new(vec![location]);
        let error = watched.open(&RetryPolicy::new(true)).await.unwrap_err();
        assert!(error.is::<NoJob>(), "{error}");
        assert!(!watched.are_all_open() && watched.ledgers().is_empty());
    }
}
