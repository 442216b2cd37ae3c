//! Recent findings that this worker need not repeat for each message: stores that fail, and jobs
//! that are not for it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::error_line::one_line;
use crate::queue::Message;

/// Time after a failure in which the intake does not wait for tries of shards of the same job; they
/// are set aside at once.
const HOLDS: Duration = Duration::from_secs(60);
/// Time after the last failure in which a worker does not count as idle.
const REMEMBERED: Duration = Duration::from_secs(120);
/// How long a job stays known as not for this worker: a queue may hold thousands of its messages.
const NOT_OURS_HOLDS: Duration = Duration::from_secs(10);
/// Time between two log lines about the same trouble.
const SAY_EVERY: Duration = Duration::from_secs(60);

/// Which of a job's stores fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Where {
    /// The store of the job's record, ledger and parts.
    Output,
    Inputs,
}

/// See the module's description.
#[derive(Debug, Default)]
pub struct Troubles {
    /// Key: the job's output.
    stores: Mutex<HashMap<(Where, String), Trouble>>,
    not_ours: Mutex<HashMap<JobKey, (Instant, Arc<str>)>>,
}

/// Output, job and generation.
type JobKey = (String, String, u32);

#[derive(Debug, Clone, Copy)]
struct Trouble {
    began: Instant,
    said: Instant,
    last: Instant,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every change is a single step, so the state is consistent even after a panic of its holder.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn key(message: &Message) -> JobKey {
    (message.output.clone(), message.job.clone(), message.generation)
}

impl Troubles {
    /// Notes that a store failed. Reported at once, and every minute while it lasts.
    pub fn note(&self, place: Where, output: &str, error: &anyhow::Error) {
        let now = Instant::now();
        let mut stores = locked(&self.stores);
        stores.retain(|_, trouble| now - trouble.last < REMEMBERED);
        let mut is_due = false;
        let trouble = stores.entry((place, output.to_string())).or_insert_with(|| {
            is_due = true;
            Trouble {
                began: now,
                said: now,
                last: now,
            }
        });
        trouble.last = now;
        if is_due || now - trouble.said >= SAY_EVERY {
            trouble.said = now;
            tracing::warn!(output, "the shards of `{output}` wait, set aside: {}", one_line(error));
        }
    }

    /// Notes that the store answered.
    pub fn end(&self, place: Where, output: &str) {
        let ended = locked(&self.stores).remove(&(place, output.to_string()));
        if let Some(trouble) = ended {
            let seconds = trouble.began.elapsed().as_secs();
            let store = match place {
                Where::Output => "the store",
                Where::Inputs => "the store of the inputs",
            };
            tracing::warn!(output, "{store} of `{output}` works again, after {seconds} s");
        }
    }

    /// Whether this store of the job failed within `HOLDS`.
    pub fn holds(&self, place: Where, output: &str) -> bool {
        let stores = locked(&self.stores);
        let trouble = stores.get(&(place, output.to_string()));
        trouble.is_some_and(|trouble| trouble.last.elapsed() < HOLDS)
    }

    /// Whether a store failed within `REMEMBERED` and has not answered since.
    pub fn any(&self) -> bool {
        let stores = locked(&self.stores);
        stores.values().any(|trouble| trouble.last.elapsed() < REMEMBERED)
    }

    /// Notes that the message's job is not for this worker.
    pub fn note_not_ours(&self, message: &Message, why: Arc<str>) {
        let now = Instant::now();
        let mut jobs = locked(&self.not_ours);
        jobs.retain(|_, (since, _)| now - *since < NOT_OURS_HOLDS);
        jobs.insert(key(message), (now, why));
    }

    /// Why the message's job is not for this worker, where that was found within `NOT_OURS_HOLDS`.
    pub fn not_ours(&self, message: &Message) -> Option<Arc<str>> {
        let jobs = locked(&self.not_ours);
        let (since, why) = jobs.get(&key(message))?;
        (since.elapsed() < NOT_OURS_HOLDS).then(|| why.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trouble_is_of_one_store_of_one_job() {
        let troubles = Troubles::default();
        troubles.note(Where::Inputs, "s3://a/out", &anyhow::anyhow!("refused"));
        assert!(troubles.holds(Where::Inputs, "s3://a/out") && troubles.any());
        assert!(!troubles.holds(Where::Output, "s3://a/out") && !troubles.holds(Where::Inputs, "s3://b/out"));
        troubles.end(Where::Output, "s3://a/out");
        assert!(troubles.any());
        troubles.end(Where::Inputs, "s3://a/out");
        assert!(!troubles.any() && !troubles.holds(Where::Inputs, "s3://a/out"));
    }

    #[test]
    fn a_job_that_is_not_ours_is_that_job_in_that_generation() {
        let troubles = Troubles::default();
        troubles.note_not_ours(&Message::new("a", "s3://a/out", 0, 1), "gone".into());
        let found = |job: &str, generation| troubles.not_ours(&Message::new(job, "s3://a/out", generation, 2));
        assert_eq!(found("a", 0).as_deref(), Some("gone"));
        assert_eq!((found("b", 0), found("a", 1)), (None, None));
    }
}
