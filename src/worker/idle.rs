//! How long a queue has delivered nothing.

use std::time::{Duration, Instant};

use crate::worker::retry_policy::Pauses;

/// Measures the time in which an attached queue delivers nothing. Time without a connection to the
/// broker does not count.
#[derive(Debug, Default)]
pub struct IdleClock {
    since: Option<Instant>,
}

impl IdleClock {
    /// Notes that the queue, `attached` or not, delivered nothing.
    pub fn note_empty(&mut self, attached: bool) {
        self.since = attached.then(|| self.since.unwrap_or_else(Instant::now));
    }

    /// Whether the attached queue has delivered nothing for this time.
    pub fn has_run_for(&self, time: Duration) -> bool {
        self.since.is_some_and(|since| since.elapsed() >= time)
    }
}

/// Pause between two checks of the ledgers while the queue delivers nothing. Doubles from the
/// minimum up to the maximum (about eight requests a minute) or the log interval, so that jobs with
/// a short log interval also end sooner.
const CHECK_PAUSE_MIN: Duration = Duration::from_secs(1);
const CHECK_PAUSE_MAX: Duration = Duration::from_secs(30);
/// Time after which a worker reports that a job is unfinished and the queue delivers nothing.
const REPORT_AFTER: Duration = Duration::from_secs(60);

/// How long the queue has delivered nothing, and when to check the ledgers next.
pub struct IdleState {
    pub clock: IdleClock,
    /// Pauses after errors of `receive`.
    pub refusal_pauses: Pauses,
    /// Since when the queue has not been attached.
    detached_since: Option<Instant>,
    pause: Duration,
    next_check: Instant,
    /// Whether the worker has reported that a job is unfinished and the queue delivers nothing.
    has_reported: bool,
}

impl Default for IdleState {
    fn default() -> IdleState {
        IdleState {
            clock: IdleClock::default(),
            refusal_pauses: Pauses::default(),
            detached_since: None,
            pause: CHECK_PAUSE_MIN,
            next_check: Instant::now() + CHECK_PAUSE_MIN,
            has_reported: false,
        }
    }
}

impl IdleState {
    /// Notes that the queue delivered nothing. Returns how long it has not been attached.
    pub fn note_empty(&mut self, attached: bool) -> Duration {
        self.clock.note_empty(attached);
        if attached {
            (self.refusal_pauses, self.detached_since) = (Pauses::default(), None);
            return Duration::ZERO;
        }
        self.detached_since.get_or_insert_with(Instant::now).elapsed()
    }

    /// Makes the next check due at once. Called for an embedded queue when a shard begins: if the
    /// queue is empty when the shard ends, the jobs are mostly done. A broker may still be about to
    /// deliver another one.
    pub fn check_at_once(&mut self) {
        (self.pause, self.next_check) = (Duration::ZERO, Instant::now());
    }

    /// Whether a check of the ledgers is due, for a worker with this log interval. If so, schedules
    /// the next one.
    pub fn take_due_check(&mut self, log_interval: Duration) -> bool {
        let is_due = self.next_check <= Instant::now();
        if is_due {
            let max = log_interval.clamp(CHECK_PAUSE_MIN, CHECK_PAUSE_MAX);
            self.pause = (2 * self.pause).clamp(CHECK_PAUSE_MIN, max);
            self.next_check = Instant::now() + self.pause;
        }
        is_due
    }

    /// Warns once that a job is unfinished although the queue delivers nothing.
    pub fn report_unfinished(&mut self) {
        if !self.has_reported && self.clock.has_run_for(REPORT_AFTER) {
            self.has_reported = true;
            tracing::warn!(
                "the queue has delivered nothing for {} s, but a job is not finished: `gristmill reconcile` enqueues the shards that no worker has",
                REPORT_AFTER.as_secs()
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checks_become_rarer() {
        let mut idle = IdleState::default();
        assert!(!idle.take_due_check(CHECK_PAUSE_MAX));
        idle.check_at_once();
        assert!(idle.take_due_check(CHECK_PAUSE_MAX) && !idle.take_due_check(CHECK_PAUSE_MAX));
        assert_eq!(idle.pause, CHECK_PAUSE_MIN);
        for _ in 0..10 {
            idle.next_check = Instant::now();
            assert!(idle.take_due_check(CHECK_PAUSE_MAX));
        }
        assert_eq!(idle.pause, CHECK_PAUSE_MAX);
    }

    #[test]
    fn only_time_in_which_the_queue_was_attached_counts() {
        let short = Duration::from_millis(20);
        let mut clock = IdleClock::default();
        assert!(!clock.has_run_for(Duration::ZERO));
        clock.note_empty(true);
        std::thread::sleep(short);
        clock.note_empty(true);
        assert!(clock.has_run_for(short));
        clock.note_empty(false);
        assert!(!clock.has_run_for(Duration::ZERO));
        clock.note_empty(true);
        assert!(clock.has_run_for(Duration::ZERO) && !clock.has_run_for(Duration::from_secs(60)));
    }
}
