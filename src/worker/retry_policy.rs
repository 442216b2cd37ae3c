//! The reaction of a worker to an error: wait, leave the shard to others, or end.
//!
//! See docs/decisions/023-a-jobs-ledger-error-ends-no-worker.md.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::dataset::DatasetError;
use crate::ledger::LedgerError;
use crate::queue::QueueError;
use crate::worker::error_counts::ErrorCounts;
use crate::worker::stop::Stop;

/// First pause of an outage; doubles from there.
const PAUSE_MIN: Duration = Duration::from_millis(500);
const PAUSE_MAX: Duration = Duration::from_secs(30);
/// Time between two log lines about the same outage.
const REPORT_EVERY: Duration = Duration::from_secs(60);

/// How to go on after an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RetryDecision {
    /// The store or the queue is unavailable, or refuses access: wait and keep the rows.
    Wait,
    /// Something is wrong with this shard or its job: other workers, or a person, must deal with
    /// it.
    LeaveShard,
    /// The worker cannot go on.
    End,
}

/// The reaction of a worker that waits out outages (see [`RetryPolicy::decision`]).
pub fn decision(error: &anyhow::Error) -> RetryDecision {
    for cause in error.chain() {
        if let Some(error) = cause.downcast_ref::<LedgerError>() {
            return match error {
                LedgerError::Retryable { .. } | LedgerError::Denied { .. } => RetryDecision::Wait,
                // A full disk, or a store without put-if-absent: this job cannot go on here, but
                // other jobs may.
                LedgerError::Damaged { .. }
                | LedgerError::Lost { .. }
                | LedgerError::Newer { .. }
                | LedgerError::Conflict { .. }
                | LedgerError::Stop { .. } => RetryDecision::LeaveShard,
            };
        }
        if let Some(error) = cause.downcast_ref::<DatasetError>() {
            return match error {
                DatasetError::Store { .. } => RetryDecision::Wait,
                _ => RetryDecision::LeaveShard,
            };
        }
        if let Some(error) = cause.downcast_ref::<QueueError>() {
            return match error {
                QueueError::Unavailable { .. } | QueueError::UnknownHost { .. } | QueueError::Denied { .. } => {
                    RetryDecision::Wait
                }
                _ => RetryDecision::End,
            };
        }
    }
    RetryDecision::End
}

/// Decides whether to wait after an error, waits, and logs each outage: one line at the beginning,
/// one per minute, and one at the end.
#[derive(Debug)]
pub struct RetryPolicy {
    is_patient: bool,
    /// Maximum waiting time of one operation; `None`: unbounded.
    wait_max: Option<Duration>,
    outage: Mutex<Option<ReportedOutage>>,
    errors: ErrorCounts,
}

#[derive(Debug, Clone, Copy)]
struct ReportedOutage {
    began: Instant,
    reported_at: Instant,
}

/// The pauses of one operation.
#[derive(Debug, Default)]
pub struct Pauses {
    rounds: u32,
    /// Start of the first pause.
    began: Option<Instant>,
}

impl Pauses {
    /// Time since the first pause began, which may be now.
    fn begin(&mut self) -> Duration {
        self.began.get_or_insert_with(Instant::now).elapsed()
    }

    pub fn rounds(&self) -> u32 {
        self.rounds
    }

    /// Time since the first pause began.
    pub fn waited(&self) -> Duration {
        self.began.map_or(Duration::ZERO, |began| began.elapsed())
    }
}

impl RetryPolicy {
    /// `is_patient`: waits out outages of any length; otherwise every error ends the work.
    pub fn new(is_patient: bool) -> RetryPolicy {
        RetryPolicy {
            is_patient,
            wait_max: None,
            outage: Mutex::new(None),
            errors: ErrorCounts::default(),
        }
    }

    /// Waits out outages, but ends the work if one operation has waited for `wait_max`.
    pub fn with_wait_max(wait_max: Duration) -> RetryPolicy {
        RetryPolicy {
            wait_max: Some(wait_max),
            ..RetryPolicy::new(true)
        }
    }

    /// The errors that were waited out, or left to other workers.
    pub fn errors(&self) -> &ErrorCounts {
        &self.errors
    }

    /// Whether outages are waited out.
    pub fn is_patient(&self) -> bool {
        self.is_patient
    }

    /// The reaction to `error`.
    pub fn decision(&self, error: &anyhow::Error) -> RetryDecision {
        if self.is_patient {
            decision(error)
        } else {
            RetryDecision::End
        }
    }

    /// Pauses after an error that is waited out, and logs it; returns any other error, and every
    /// error once the worker stops.
    pub async fn backoff(&self, error: anyhow::Error, pauses: &mut Pauses, stop: &Stop) -> anyhow::Result<()> {
        self.wait(error, pauses, stop, |error| self.log(error)).await
    }

    /// As [`RetryPolicy::backoff`], but calls `report` for an error that is waited out. Counts the
    /// error.
    pub async fn wait(
        &self,
        error: anyhow::Error,
        pauses: &mut Pauses,
        stop: &Stop,
        report: impl FnOnce(&anyhow::Error),
    ) -> anyhow::Result<()> {
        if self.decision(&error) != RetryDecision::Wait || stop.is_set() {
            return Err(error);
        }
        let waited = pauses.begin();
        if self.is_wait_over(waited) {
            return Err(error.context(format!("waited for {} s", waited.as_secs())));
        }
        self.errors.add(&error);
        report(&error);
        let pause = PAUSE_MIN.saturating_mul(1 << pauses.rounds.min(16)).min(PAUSE_MAX);
        pauses.rounds += 1;
        tokio::select! {
            () = tokio::time::sleep(pause) => Ok(()),
            () = stop.wait() => Err(error),
        }
    }

    /// Whether an operation that has waited for this time must give up.
    pub fn is_wait_over(&self, waited: Duration) -> bool {
        self.wait_max.is_some_and(|wait_max| waited >= wait_max)
    }

    /// Returns an error if the queue has been detached for the maximum time.
    pub fn check_queue_wait(&self, detached: Duration) -> anyhow::Result<()> {
        if self.is_wait_over(detached) {
            Err(anyhow::anyhow!(
                "the queue has not answered for {} s",
                detached.as_secs()
            ))
        } else {
            Ok(())
        }
    }

    /// Notes that the store answered, and logs the end of an outage.
    pub fn note_success(&self) {
        let ended = self.outage.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(outage) = ended {
            let seconds = outage.began.elapsed().as_secs();
            tracing::warn!("work goes on, after a wait of {seconds} s");
        }
    }

    /// Counts an error that is waited out, and logs it, at most once per `REPORT_EVERY` of an
    /// outage.
    pub fn report(&self, error: &anyhow::Error) {
        self.errors.add(error);
        self.log(error);
    }

    fn log(&self, error: &anyhow::Error) {
        let now = Instant::now();
        let mut outage = self.outage.lock().unwrap_or_else(PoisonError::into_inner);
        let is_due = outage.is_none_or(|o| now - o.reported_at >= REPORT_EVERY);
        let began = outage.map_or(now, |o| o.began);
        if is_due {
            *outage = Some(ReportedOutage {
                began,
                reported_at: now,
            });
            tracing::warn!("work waits: {}", crate::error_line::one_line(error));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::worker::stop::StopCause;

    fn away() -> anyhow::Error {
        let source = object_store::Error::Generic {
            store: "S3",
            source: "connection refused".into(),
        };
        let error = LedgerError::Retryable {
            operation: "reading `x`".into(),
            tries: 7,
            source,
        };
        anyhow::Error::from(error).context("shard 3")
    }

    #[tokio::test]
    async fn outages_are_waited_out_and_other_errors_are_returned() {
        let (retry_policy, stop) = (RetryPolicy::new(true), Stop::default());
        let mut pauses = Pauses::default();
        let began = Instant::now();
        for _ in 0..2 {
            assert!(retry_policy.backoff(away(), &mut pauses, &stop).await.is_ok());
        }
        assert!(began.elapsed() >= 3 * PAUSE_MIN, "the pauses grow");
        let unavailable = retry_policy.errors().store_errors()[0];
        assert_eq!((unavailable.0.as_str(), unavailable.1), ("unavailable", 2));
        retry_policy.note_success();
        let damaged = anyhow::Error::from(LedgerError::damaged("x"));
        assert_eq!(retry_policy.decision(&damaged), RetryDecision::LeaveShard);
        let full = anyhow::Error::from(LedgerError::stop("the disk is full"));
        assert_eq!(
            retry_policy.decision(&full),
            RetryDecision::LeaveShard,
            "other jobs go on"
        );
        assert!(retry_policy.backoff(damaged, &mut pauses, &stop).await.is_err());
        stop.set(StopCause::Interrupted);
        assert!(
            retry_policy.backoff(away(), &mut pauses, &stop).await.is_err(),
            "a stop ends the waiting"
        );
        assert_eq!(RetryPolicy::new(false).decision(&away()), RetryDecision::End);
    }

    #[tokio::test]
    async fn one_operation_waits_for_at_most_the_maximum() {
        let (retry_policy, stop) = (RetryPolicy::with_wait_max(2 * PAUSE_MIN), Stop::default());
        let mut pauses = Pauses::default();
        let began = Instant::now();
        let error = loop {
            if let Err(error) = retry_policy.backoff(away(), &mut pauses, &stop).await {
                break error;
            }
            assert!(began.elapsed() < 20 * PAUSE_MIN);
        };
        assert!(
            began.elapsed() >= 2 * PAUSE_MIN && error.to_string().starts_with("waited for "),
            "{error}"
        );
        // Another operation has its own maximum.
        assert!(
            retry_policy
                .backoff(away(), &mut Pauses::default(), &stop)
                .await
                .is_ok()
        );
    }
}
