//! A shard between receipt and handover to the router.

use std::sync::Arc;
use std::time::Duration;

use tracing::Instrument;

use crate::error_line::one_line;
use crate::ledger::RowSet;
use crate::queue::Delivery;
use crate::worker::Worker;
use crate::worker::in_flight::ShardKey;
use crate::worker::jobs::OpenJob;

/// Pause before another look at a shard whose last rows may be running elsewhere.
const WAITING_PAUSE: Duration = Duration::from_secs(5);

/// See the module's description. When dropped, the shard goes back to the queue.
pub(super) struct InHand {
    worker: Arc<Worker>,
    pub key: ShardKey,
    kept: bool,
}

impl InHand {
    /// Guards a shard that is in flight.
    pub(super) fn new(worker: &Arc<Worker>, key: ShardKey) -> InHand {
        InHand {
            worker: worker.clone(),
            key,
            kept: true,
        }
    }

    /// Ends the work on the shard and returns the deliveries to acknowledge or give back.
    pub(super) fn answer(mut self) -> Vec<Arc<Delivery>> {
        self.kept = false;
        self.worker.in_flight.leave(self.key)
    }

    /// Keeps the shard in hand for a while and then gives it back to the queue, so that its message
    /// is not redelivered in a tight loop. `rows` may be running on another worker.
    pub(super) fn give_back_later(mut self, job: &OpenJob, rows: &RowSet) {
        self.kept = false;
        tracing::info!(
            "shard {} of {} waits: rows {rows} may be running elsewhere, alone on a device",
            self.key.shard,
            job.title()
        );
        let (worker, key, title) = (self.worker.clone(), self.key, job.title());
        let waiting = async move {
            tokio::time::sleep(WAITING_PAUSE).await;
            for delivery in worker.in_flight.leave(key) {
                if let Err(error) = worker.queue.give_back(&delivery).await {
                    // The delivery is dropped without an acknowledgement, so the queue delivers it
                    // again.
                    tracing::warn!(
                        "the message of shard {} of {title} could not be given back: {}",
                        key.shard,
                        one_line(&error.into())
                    );
                }
            }
        };
        tokio::spawn(waiting.in_current_span());
    }

    /// Releases the memory reserved for the shard, whose carried columns have been dropped.
    pub(super) fn holds_no_rows(&self) {
        self.worker.jobs.room().leave(self.key);
    }

    /// Whether the queue still wants this worker to do the shard.
    pub(super) fn is_wanted(&self) -> bool {
        self.worker.in_flight.is_wanted(self.key)
    }

    /// The router takes over the shard.
    pub(super) fn hand_on(mut self) {
        self.kept = false;
    }
}

impl Drop for InHand {
    fn drop(&mut self) {
        if self.kept {
            // Dropping the deliveries gives them back.
            drop(self.worker.in_flight.leave(self.key));
        }
    }
}
