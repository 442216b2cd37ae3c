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
use crate::worker::shard_trace::ShardTrace;

/// Pause before a shard whose last rows may be running on another worker goes back to the queue.
const WAITING_PAUSE: Duration = Duration::from_secs(5);

/// See the module's description. When dropped, the shard goes back to the queue.
pub(super) struct ReceivedShard {
    worker: Arc<Worker>,
    pub key: ShardKey,
    /// Without spans until the shard is open.
    pub trace: ShardTrace,
    give_back_on_drop: bool,
}

impl ReceivedShard {
    /// Guards a shard that is in flight.
    pub(super) fn new(worker: &Arc<Worker>, key: ShardKey) -> ReceivedShard {
        ReceivedShard {
            worker: worker.clone(),
            key,
            trace: ShardTrace::default(),
            give_back_on_drop: true,
        }
    }

    /// Ends the work on the shard and returns the deliveries to acknowledge or give back.
    pub(super) fn take_deliveries(mut self) -> Vec<Arc<Delivery>> {
        self.give_back_on_drop = false;
        self.worker.in_flight.remove(self.key)
    }

    /// Keeps the shard for a while and then gives it back to the queue, so that its message is not
    /// redelivered in a tight loop. `rows`: the rows that may be running on another worker.
    pub(super) fn give_back_later(mut self, job: &OpenJob, rows: &RowSet) {
        self.give_back_on_drop = false;
        tracing::info!(
            "shard {} of {} waits: rows {rows} may be running on another worker, one at a time because an attempt with them failed",
            self.key.shard,
            job.title()
        );
        let (worker, key, title) = (self.worker.clone(), self.key, job.title());
        let waiting = async move {
            tokio::time::sleep(WAITING_PAUSE).await;
            for delivery in worker.in_flight.remove(key) {
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

    /// Releases the memory reserved for the shard. The caller has dropped its carried columns.
    pub(super) fn release_memory(&self) {
        self.worker.jobs.carried_memory().release(self.key);
    }

    /// Whether the queue still wants this worker to do the shard.
    pub(super) fn is_wanted(&self) -> bool {
        self.worker.in_flight.is_wanted(self.key)
    }

    /// The router takes over the shard.
    pub(super) fn hand_over(mut self) {
        self.give_back_on_drop = false;
    }
}

impl Drop for ReceivedShard {
    fn drop(&mut self) {
        if self.give_back_on_drop {
            // Dropping the deliveries gives them back.
            drop(self.worker.in_flight.remove(self.key));
        }
    }
}
