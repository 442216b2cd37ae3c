//! Warnings about messages that are not for this worker: one per job, and then one per minute while
//! more of the job's messages come, because a queue may hold thousands of them.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::queue::{Delivery, Message};

/// Time between two warnings about one job.
const REPORT_EVERY: Duration = Duration::from_secs(60);
/// Maximum number of remembered jobs. The next job clears the list.
const JOBS_MAX: usize = 1024;

/// Output and job id.
type OutputAndJob = (String, String);

/// See the module's description.
#[derive(Debug, Default)]
pub struct Refusals {
    jobs: Mutex<HashMap<OutputAndJob, RefusedJob>>,
}

#[derive(Debug)]
struct RefusedJob {
    reported_at: Instant,
    /// Messages since the last warning.
    unreported: u64,
}

impl Refusals {
    /// Reports a delivery that is not for this worker.
    pub fn report(&self, delivery: &Delivery, why: &str) {
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
                "{line}; nor were {unsaid} other messages of its job since the last such warning"
            ),
            None => tracing::info!(job_id, shard, output, "{line}"),
        }
    }

    /// Notes a message. If a warning is due, returns the number of messages since the last one.
    fn note(&self, key: OutputAndJob, now: Instant) -> Option<u64> {
        // Every change is a single step, so the state is consistent even after a panic of its
        // holder.
        let mut jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(refused) = jobs.get_mut(&key) {
            if now.saturating_duration_since(refused.reported_at) < REPORT_EVERY {
                refused.unreported += 1;
                return None;
            }
            refused.reported_at = now;
            return Some(std::mem::take(&mut refused.unreported));
        }
        if jobs.len() >= JOBS_MAX {
            jobs.clear();
        }
        jobs.insert(
            key,
            RefusedJob {
                reported_at: now,
                unreported: 0,
            },
        );
        Some(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_is_reported_once_a_minute_with_the_unreported_count() {
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
