//! How long a queue has had nothing.

use std::time::{Duration, Instant};

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
