//! The one way in which a worker is told to stop, seen by async stages and by the device thread.

use std::sync::Arc;

use tokio::sync::watch;

use crate::ledger::StopWhy;

/// Why work stops before the queue is empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
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

impl From<StopWhy> for Why {
    fn from(why: StopWhy) -> Why {
        match why {
            StopWhy::Budget => Why::Budget,
            StopWhy::Deadline => Why::Deadline,
            StopWhy::Cancelled => Why::Cancelled,
            StopWhy::InputChanged => Why::InputChanged,
        }
    }
}

/// A stop signal with many holders; the first reason stays.
#[derive(Debug, Clone)]
pub struct Stop {
    sender: Arc<watch::Sender<Option<Why>>>,
}

impl Default for Stop {
    fn default() -> Self {
        Stop {
            sender: Arc::new(watch::Sender::new(None)),
        }
    }
}

impl Stop {
    pub fn set(&self, why: Why) {
        self.sender.send_if_modified(|now| {
            let first = now.is_none();
            now.get_or_insert(why);
            first
        });
    }

    pub fn why(&self) -> Option<Why> {
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
        stop.set(Why::Budget);
        stop.set(Why::Failed);
        other.wait().await;
        assert_eq!(other.why(), Some(Why::Budget));
    }
}
