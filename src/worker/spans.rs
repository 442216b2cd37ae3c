//! The spans of a worker's log. A span's fields are added to every message that is logged within
//! it.
//!
//! `job` is the job's name, as in the commands' JSON, and `job_id` its id. The spans have the
//! highest level, so that a filter that lets a message through lets its fields through, too.

use tracing::Span;
use tracing::field::{Empty, display as shown};

use crate::ledger::keys::Id;
use crate::queue::Message;
use crate::worker::jobs::OpenJob;

/// The work of one worker.
pub(super) fn of_worker(name: &str) -> Span {
    tracing::error_span!("worker", worker = name)
}

/// The work on a message's shard. Once the job is open, [`name_job`] adds its name.
pub(super) fn of_message(message: &Message) -> Span {
    let Message { job, output, shard, .. } = message;
    tracing::error_span!("shard", job = Empty, job_id = job, shard, output)
}

/// Adds the job's name to the current span, which must be one of [`of_message`].
pub(super) fn name_job(job: &OpenJob) {
    Span::current().record("job", job.ledger.job().name.as_str());
}

/// The work on a shard of an open job, in an attempt if it has one.
pub(super) fn of_shard(job: &OpenJob, shard: u32, attempt: Option<&Id>) -> Span {
    let record = job.ledger.job();
    tracing::error_span!(
        "shard",
        job = record.name,
        job_id = %record.job,
        shard,
        attempt = attempt.map(shown),
        output = %job.ledger.store().url()
    )
}

/// The work on a job, whatever its shard.
pub(super) fn of_job(job: &OpenJob) -> Span {
    let record = job.ledger.job();
    tracing::error_span!("job", job = record.name, job_id = %record.job, output = %job.ledger.store().url())
}
