//! The jobs that must be done before a worker is idle, whatever its queue delivers: the jobs that a
//! person named, and the job whose model was loaded. A job whose store does not answer is opened
//! later and holds up no other job.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::dataset::store::location::Location;
use crate::ledger::Ledger;
use crate::worker::retry_policy::{RetryDecision, RetryPolicy};

/// Maximum time to read one record; no other record is read meanwhile.
const OPEN_MAX: Duration = Duration::from_secs(10);

/// See the module's description.
#[derive(Debug, Default)]
pub struct Watched {
    known: Mutex<Known>,
}

/// An output that a person named holds no job.
#[derive(Debug, thiserror::Error)]
#[error("`{output}` holds no job: there is no `_gristmill/job.json`")]
pub struct NoJob {
    output: String,
}

#[derive(Debug, Default)]
struct Known {
    ledgers: Vec<Ledger>,
    unopened: Vec<Location>,
}

impl Watched {
    /// The jobs in these outputs, all still unopened.
    pub fn new(outputs: Vec<Location>) -> Watched {
        let known = Known {
            ledgers: Vec::new(),
            unopened: outputs,
        };
        Watched {
            known: Mutex::new(known),
        }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        // Every change is a single step, so the state is consistent even after a panic of its
        // holder.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn push(&self, ledger: Ledger) {
        self.known().ledgers.push(ledger);
    }

    /// The jobs that are open.
    pub fn ledgers(&self) -> Vec<Ledger> {
        self.known().ledgers.clone()
    }

    pub fn are_all_open(&self) -> bool {
        self.known().unopened.is_empty()
    }

    /// Tries to open the unopened jobs. `Some`: the error of the last job that failed and will be
    /// tried again.
    ///
    /// # Errors
    /// An output holds no job ([`NoJob`]), or opening failed with an error that is not waited out.
    pub async fn open(&self, retry_policy: &RetryPolicy) -> anyhow::Result<Option<anyhow::Error>> {
        let unopened = self.known().unopened.clone();
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
                    let mut known = self.known();
                    known.unopened.retain(|other| other.url != output.url);
                    known.ledgers.push(ledger);
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
        let watched = Watched::new(vec![location]);
        let error = watched.open(&RetryPolicy::new(true)).await.unwrap_err();
        assert!(error.is::<NoJob>(), "{error}");
        assert!(!watched.are_all_open() && watched.ledgers().is_empty());
    }
}
