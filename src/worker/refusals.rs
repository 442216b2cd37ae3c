//! Warnings about messages that are not for this worker: one per job, and one per minute while more
//! of the job's messages come. A queue may hold thousands of them.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::queue::{Delivery, Message};

/// Time between two warnings about one job.
const SAY_EVERY: Duration = Duration::from_secs(60);
/// Maximum number of remembered jobs; beyond it, all are forgotten.
const JOBS_MAX: usize = 1024;

/// Output and job.
type JobKey = (String, String);

/// See the module's description.
#[derive(Debug, Default)]
pub struct Refusals {
    jobs: Mutex<HashMap<JobKey, Refused>>,
}

#[derive(Debug)]
struct Refused {
    said: Instant,
    /// Messages since the last warning.
    unsaid: u64,
}

impl Refusals {
    /// Reports a delivery that is not for this worker.
    pub fn say(&self, delivery: &Delivery, why: &str) {
        let message = &delivery.message;
        let Message {
            job: job_id,
            shard,
            output,
            ..
        } = message;
        let line = format!(
            "shard {} of `{}` is not for this worker (at hop {}): {why}",
            message.shard,
            message.output,
            delivery.hops + 1
        );
        let key = (message.output.clone(), message.job.clone());
        match self.note(key, Instant::now()) {
            Some(0) => tracing::warn!(job_id, shard, output, "{line}"),
            Some(unsaid) => tracing::warn!(
                job_id,
                shard,
                output,
                unsaid,
                "{line}; so were {unsaid} messages of its job since this was said last"
            ),
            None => tracing::info!(job_id, shard, output, "{line}"),
        }
    }

    /// Number of unreported messages, where a warning is due.
    fn note(&self, key: JobKey, now: Instant) -> Option<u64> {
        // Every change is a single step, so the state is consistent even after a panic of its
        // holder.
        let mut jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(refused) = jobs.get_mut(&key) {
            if now.saturating_duration_since(refused.said) < SAY_EVERY {
                refused.unsaid += 1;
                return None;
            }
            refused.said = now;
            return Some(std::mem::take(&mut refused.unsaid));
        }
        if jobs.len() >= JOBS_MAX {
            jobs.clear();
        }
        jobs.insert(key, Refused { said: now, unsaid: 0 });
        Some(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_is_said_once_a_minute_and_how_much_went_unsaid() {
        let refusals = Refusals::default();
        let began = Instant::now();
        let note = |job: &str, seconds| {
            let key = ("s3://a/out".to_string(), job.to_string());
            refusals.note(key, began + Duration::from_secs(seconds))
        };
        assert_eq!([note("a", 0), note("a", 1), note("a", 59)], [Some(0), None, None]);
        assert_eq!(note("b", 59), Some(0), "another job");
        assert_eq!([note("a", 60), note("a", 61), note("a", 120)], [Some(2), None, Some(1)]);
    }
}
