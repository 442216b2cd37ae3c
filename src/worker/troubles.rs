//! Stores that have failed lately, and jobs that are not for this worker, so that it does not check
//! them again for each message.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::error_line::one_line;
use crate::queue::Message;
use crate::worker::jobs::JobKey;

/// Time after a failure in which shards of the same job are set aside at once: the intake does not
/// wait for their tries.
const FAILING_TIME: Duration = Duration::from_secs(60);
/// Time after the last failure in which a worker does not count as idle.
const REMEMBERED_TIME: Duration = Duration::from_secs(120);
/// Time for which a job is remembered as not for this worker: a queue may hold thousands of its
/// messages.
const NOT_OURS_TIME: Duration = Duration::from_secs(10);
/// Time between two log lines about the same trouble.
const REPORT_EVERY: Duration = Duration::from_secs(60);

/// One of the stores of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum JobStore {
    /// The store of the job's record, ledger and parts.
    Output,
    Inputs,
}

/// See the module's description.
#[derive(Debug, Default)]
pub struct Troubles {
    /// Key: the job's output.
    stores: Mutex<HashMap<(JobStore, String), StoreTrouble>>,
    not_ours: Mutex<HashMap<JobKey, (Instant, Arc<str>)>>,
}

#[derive(Debug, Clone, Copy)]
struct StoreTrouble {
    began: Instant,
    reported_at: Instant,
    last_failure: Instant,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every change is a single step, so the state is consistent even after a panic of its holder.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn key(message: &Message) -> JobKey {
    (message.output.clone(), message.job.clone(), message.generation)
}

impl Troubles {
    /// Notes that a store failed. Logs the error, at most once a minute.
    pub fn note_failure(&self, job_store: JobStore, output: &str, error: &anyhow::Error) {
        let now = Instant::now();
        let mut stores = locked(&self.stores);
        stores.retain(|_, trouble| now - trouble.last_failure < REMEMBERED_TIME);
        let mut is_due = false;
        let trouble = stores.entry((job_store, output.to_string())).or_insert_with(|| {
            is_due = true;
            StoreTrouble {
                began: now,
                reported_at: now,
                last_failure: now,
            }
        });
        trouble.last_failure = now;
        if is_due || now - trouble.reported_at >= REPORT_EVERY {
            trouble.reported_at = now;
            tracing::warn!(output, "the shards of `{output}` wait, set aside: {}", one_line(error));
        }
    }

    /// Notes that the store answered, and logs the end of its outage.
    pub fn note_recovery(&self, job_store: JobStore, output: &str) {
        let ended = locked(&self.stores).remove(&(job_store, output.to_string()));
        if let Some(trouble) = ended {
            let seconds = trouble.began.elapsed().as_secs();
            let store = match job_store {
                JobStore::Output => "the store",
                JobStore::Inputs => "the store of the inputs",
            };
            tracing::warn!(output, "{store} of `{output}` works again, after {seconds} s");
        }
    }

    /// Whether this store of the job failed within `FAILING_TIME` and has not answered since.
    pub fn is_failing(&self, job_store: JobStore, output: &str) -> bool {
        let stores = locked(&self.stores);
        let trouble = stores.get(&(job_store, output.to_string()));
        trouble.is_some_and(|trouble| trouble.last_failure.elapsed() < FAILING_TIME)
    }

    /// Whether a store failed within `REMEMBERED_TIME` and has not answered since.
    pub fn has_recent(&self) -> bool {
        let stores = locked(&self.stores);
        stores
            .values()
            .any(|trouble| trouble.last_failure.elapsed() < REMEMBERED_TIME)
    }

    /// Notes that the message's job is not for this worker.
    pub fn note_not_ours(&self, message: &Message, why: Arc<str>) {
        let now = Instant::now();
        let mut jobs = locked(&self.not_ours);
        jobs.retain(|_, (since, _)| now - *since < NOT_OURS_TIME);
        jobs.insert(key(message), (now, why));
    }

    /// Why the message's job is not for this worker, if that was noted within `NOT_OURS_TIME`.
    pub fn not_ours(&self, message: &Message) -> Option<Arc<str>> {
        let jobs = locked(&self.not_ours);
        let (since, why) = jobs.get(&key(message))?;
        (since.elapsed() < NOT_OURS_TIME).then(|| why.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_concerns_one_store_of_one_job() {
        let troubles = Troubles::default();
        troubles.note_failure(JobStore::Inputs, "s3://a/out", &anyhow::anyhow!("refused"));
        assert!(troubles.is_failing(JobStore::Inputs, "s3://a/out") && troubles.has_recent());
        assert!(
            !troubles.is_failing(JobStore::Output, "s3://a/out")
                && !troubles.is_failing(JobStore::Inputs, "s3://b/out")
        );
        troubles.note_recovery(JobStore::Output, "s3://a/out");
        assert!(troubles.has_recent());
        troubles.note_recovery(JobStore::Inputs, "s3://a/out");
        assert!(!troubles.has_recent() && !troubles.is_failing(JobStore::Inputs, "s3://a/out"));
    }

    #[test]
    fn a_job_that_is_not_ours_is_so_in_one_generation() {
        let troubles = Troubles::default();
        troubles.note_not_ours(&Message::new("a", "s3://a/out", 0, 1), "gone".into());
        let found = |job: &str, generation| troubles.not_ours(&Message::new(job, "s3://a/out", generation, 2));
        assert_eq!(found("a", 0).as_deref(), Some("gone"));
        assert_eq!((found("b", 0), found("a", 1)), (None, None));
    }
}
