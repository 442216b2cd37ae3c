//! How long a queue has had nothing.

use std::time::{Duration, Instant};

use crate::worker::retry_policy::Pauses;

/// Runs while nothing comes from a queue that is attached: what a broker that is away does not send proves nothing.
#[derive(Debug, Default)]
pub struct IdleClock {
    since: Option<Instant>,
}

impl IdleClock {
    /// Nothing came from a queue that is attached, or from one that is not.
    pub fn look(&mut self, attached: bool) {
        self.since = attached.then(|| self.since.unwrap_or_else(Instant::now));
    }

    /// Whether it has run for so long.
    pub fn has_run(&self, time: Duration) -> bool {
        self.since.is_some_and(|since| since.elapsed() >= time)
    }
}

/// Between two looks at the ledgers while nothing comes; doubles up to the second, which costs about eight requests a minute,
/// or up to the log interval: jobs that write more often end sooner, too.
const LOOK_MIN: Duration = Duration::from_secs(1);
const LOOK_MAX: Duration = Duration::from_secs(30);
/// A worker for which nothing comes, of a job that is not finished, says so after this time.
const SAY_AFTER: Duration = Duration::from_secs(60);

/// How long nothing has come, and when to look at the ledgers next.
pub struct Idle {
    pub clock: IdleClock,
    /// While the queue refuses us.
    pub refused: Pauses,
    /// Since when the queue has not been attached.
    away: Option<Instant>,
    pause: Duration,
    next_look: Instant,
    /// That nothing comes, though a job is not finished.
    said: bool,
}

impl Default for Idle {
    fn default() -> Idle {
        Idle {
            clock: IdleClock::default(),
            refused: Pauses::default(),
            away: None,
            pause: LOOK_MIN,
            next_look: Instant::now() + LOOK_MIN,
            said: false,
        }
    }
}

impl Idle {
    /// Nothing came from a queue that is attached, or from one that is not: for how long it has not been.
    pub fn look(&mut self, attached: bool) -> Duration {
        self.clock.look(attached);
        if attached {
            (self.refused, self.away) = (Pauses::default(), None);
            return Duration::ZERO;
        }
        self.away.get_or_insert_with(Instant::now).elapsed()
    }

    /// Whether a look is due, of a worker that writes its log in this interval; the next one is later.
    pub fn looks_now(&mut self, log_interval: Duration) -> bool {
        let is_due = self.next_look <= Instant::now();
        if is_due {
            self.pause = (2 * self.pause).min(log_interval.clamp(LOOK_MIN, LOOK_MAX));
            self.next_look = Instant::now() + self.pause;
        }
        is_due
    }

    /// Says once that a job is not finished and nothing of it comes here.
    pub fn say_unfinished(&mut self) {
        if !self.said && self.clock.has_run(SAY_AFTER) {
            self.said = true;
            tracing::warn!(
                "nothing has come for {} s, and a job is not finished: what no other worker has is enqueued by `gristmill reconcile`",
                SAY_AFTER.as_secs()
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_time_in_which_the_queue_was_attached_counts() {
        let short = Duration::from_millis(20);
        let mut clock = IdleClock::default();
        assert!(!clock.has_run(Duration::ZERO));
        clock.look(true);
        std::thread::sleep(short);
        clock.look(true);
        assert!(clock.has_run(short));
        clock.look(false);
        assert!(!clock.has_run(Duration::ZERO));
        clock.look(true);
        assert!(clock.has_run(Duration::ZERO) && !clock.has_run(Duration::from_secs(60)));
    }
}
