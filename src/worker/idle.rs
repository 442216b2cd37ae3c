//! How long a queue has had nothing.

use std::time::{Duration, Instant};

use crate::worker::retry_policy::Pauses;

/// Runs while an attached queue delivers nothing. The silence of a broker that is away proves
/// nothing.
#[derive(Debug, Default)]
pub struct IdleClock {
    since: Option<Instant>,
}

impl IdleClock {
    /// Notes that the queue delivered nothing; `attached`: whether it was attached.
    pub fn look(&mut self, attached: bool) {
        self.since = attached.then(|| self.since.unwrap_or_else(Instant::now));
    }

    /// Whether the clock has run for this time.
    pub fn has_run(&self, time: Duration) -> bool {
        self.since.is_some_and(|since| since.elapsed() >= time)
    }
}

/// Pause between two looks at the ledgers while the queue delivers nothing. Doubles from `LOOK_MIN`
/// up to `LOOK_MAX` (about eight requests a minute) or the log interval, so that jobs with a short
/// log interval also end sooner.
const LOOK_MIN: Duration = Duration::from_secs(1);
const LOOK_MAX: Duration = Duration::from_secs(30);
/// Time after which a worker reports that a job is unfinished and the queue delivers nothing.
const SAY_AFTER: Duration = Duration::from_secs(60);

/// How long the queue has delivered nothing, and when to look at the ledgers next.
pub struct Idle {
    pub clock: IdleClock,
    /// Pauses while the queue refuses this worker.
    pub refused: Pauses,
    /// Since when the queue has not been attached.
    away: Option<Instant>,
    pause: Duration,
    next_look: Instant,
    /// Whether the worker has reported that a job is unfinished and the queue delivers nothing.
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
    /// Notes that the queue delivered nothing. Returns for how long the queue has not been
    /// attached.
    pub fn look(&mut self, attached: bool) -> Duration {
        self.clock.look(attached);
        if attached {
            (self.refused, self.away) = (Pauses::default(), None);
            return Duration::ZERO;
        }
        self.away.get_or_insert_with(Instant::now).elapsed()
    }

    /// Whether a look at the ledgers is due, for a worker with this log interval. If so, schedules
    /// the next look.
    pub fn looks_now(&mut self, log_interval: Duration) -> bool {
        let is_due = self.next_look <= Instant::now();
        if is_due {
            self.pause = (2 * self.pause).min(log_interval.clamp(LOOK_MIN, LOOK_MAX));
            self.next_look = Instant::now() + self.pause;
        }
        is_due
    }

    /// Reports once that a job is unfinished and none of its messages comes here.
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
