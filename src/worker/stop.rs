//! The stop signal of a worker, for async stages and for the device thread.

use std::sync::Arc;

use tokio::sync::watch;

use crate::ledger::StopWhy;

/// Why work stops before the queue is empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopCause {
    /// SIGINT or SIGTERM.
    Interrupted,
    /// The machine will be taken away.
    Preempted,
    Budget,
    Deadline,
    Cancelled,
    /// An input differs from the planned one.
    InputChanged,
    /// A stage failed; its error says why.
    Failed,
}

impl From<StopWhy> for StopCause {
    fn from(why: StopWhy) -> StopCause {
        match why {
            StopWhy::Budget => StopCause::Budget,
            StopWhy::Deadline => StopCause::Deadline,
            StopWhy::Cancelled => StopCause::Cancelled,
            StopWhy::InputChanged => StopCause::InputChanged,
        }
    }
}

/// A stop signal that clones share. The first reason stays.
#[derive(Debug, Clone)]
pub struct Stop {
    sender: Arc<watch::Sender<Option<StopCause>>>,
}

impl Default for Stop {
    fn default() -> Self {
        Stop {
            sender: Arc::new(watch::Sender::new(None)),
        }
    }
}

impl Stop {
    pub fn set(&self, why: StopCause) {
        self.sender.send_if_modified(|now| {
            let first = now.is_none();
            now.get_or_insert(why);
            first
        });
    }

    pub fn why(&self) -> Option<StopCause> {
        *self.sender.borrow()
    }

    pub fn is_set(&self) -> bool {
        self.why().is_some()
    }

    /// Returns once the stop is set.
    pub async fn wait(&self) {
        let mut receiver = self.sender.subscribe();
        // An error would mean that the sender is gone, but `self` holds it.
        let _ = receiver.wait_for(Option::is_some).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_first_reason_stays_and_everybody_sees_it() {
        let stop = Stop::default();
        let other = stop.clone();
        assert!(!other.is_set());
        stop.set(StopCause::Budget);
        stop.set(StopCause::Failed);
        other.wait().await;
        assert_eq!(other.why(), Some(StopCause::Budget));
    }
}
