//! The shards that this worker has received and not yet ended, with their deliveries.
//!
//! A queue may deliver one shard twice (after a restart of the broker, or a `reconcile`): the
//! second delivery joins the first, and both are acknowledged or given back when the work on the
//! shard ends.
//!
//! See docs/decisions/025-an-extended-job-goes-on-by-itself.md.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::queue::Delivery;
use crate::worker::room::CarriedMemory;

/// Identifies a shard within this worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ShardKey {
    /// [`OpenJob::number`](crate::worker::jobs::OpenJob::number).
    pub job: u32,
    pub shard: u32,
}

/// See the module's description.
#[derive(Debug, Default)]
pub struct InFlight {
    shards: Mutex<HashMap<ShardKey, Vec<HeldDelivery>>>,
    /// Accounts for the carried columns of the shards.
    carried_memory: Arc<CarriedMemory>,
}

#[derive(Debug)]
struct HeldDelivery {
    delivery: Arc<Delivery>,
    /// Whether the queue took the delivery back.
    is_recalled: bool,
}

impl InFlight {
    pub fn new(carried_memory: Arc<CarriedMemory>) -> InFlight {
        InFlight {
            shards: Mutex::default(),
            carried_memory,
        }
    }

    /// Adds a delivery. True: the shard was not in flight, and the caller must work on it.
    pub fn add(&self, key: ShardKey, delivery: Arc<Delivery>) -> bool {
        let mut shards = self.shards();
        let deliveries = shards.entry(key).or_default();
        deliveries.push(HeldDelivery {
            delivery,
            is_recalled: false,
        });
        deliveries.len() == 1
    }

    /// Ends the work on a shard and returns the deliveries to acknowledge or give back.
    pub fn remove(&self, key: ShardKey) -> Vec<Arc<Delivery>> {
        let deliveries = self.shards().remove(&key).unwrap_or_default();
        self.carried_memory.release(key);
        deliveries.into_iter().map(|held| held.delivery).collect()
    }

    /// Marks deliveries that the queue takes back. Returns the shards without any other delivery;
    /// they stay in flight until their work ends.
    pub fn mark_recalled(&self, receipts: &[u64]) -> Vec<ShardKey> {
        let mut without_delivery = Vec::new();
        for (key, deliveries) in self.shards().iter_mut() {
            let named = |held: &&mut HeldDelivery| receipts.contains(&held.delivery.receipt);
            let marked = deliveries
                .iter_mut()
                .filter(named)
                .map(|held| held.is_recalled = true)
                .count();
            if marked > 0 && deliveries.iter().all(|held| held.is_recalled) {
                without_delivery.push(*key);
            }
        }
        without_delivery
    }

    /// Whether the shard has a delivery that the queue has not taken back.
    pub fn is_wanted(&self, key: ShardKey) -> bool {
        let shards = self.shards();
        shards
            .get(&key)
            .is_some_and(|deliveries| deliveries.iter().any(|held| !held.is_recalled))
    }

    /// Whether the shard of one of these deliveries is still in flight.
    pub fn holds_any(&self, receipts: &[u64]) -> bool {
        let shards = self.shards();
        let mut all = shards.values().flatten();
        all.any(|held| receipts.contains(&held.delivery.receipt))
    }

    /// Number of shards in flight.
    pub fn count(&self) -> usize {
        self.shards().len()
    }

    /// Number of one job's shards in flight.
    pub fn count_of_job(&self, job: u32) -> usize {
        self.shards().keys().filter(|key| key.job == job).count()
    }

    /// The deliveries of all shards in flight.
    pub fn deliveries(&self) -> Vec<Arc<Delivery>> {
        let shards = self.shards();
        shards.values().flatten().map(|held| held.delivery.clone()).collect()
    }

    pub fn is_empty(&self) -> bool {
        self.shards().is_empty()
    }

    fn shards(&self) -> MutexGuard<'_, HashMap<ShardKey, Vec<HeldDelivery>>> {
        // Every change is a single step, so the state is consistent even after a panic of its
        // holder.
        self.shards.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::queue::Message;
    use crate::worker::room::CARRIED_BYTES_MAX;

    fn delivery(receipt: u64) -> Arc<Delivery> {
        let message = Message::new("a", "memory:///a", 0, 7);
        Arc::new(Delivery::new(message, 1, 0, receipt, None))
    }

    #[test]
    fn a_second_delivery_joins_the_first() {
        let key = ShardKey { job: 0, shard: 7 };
        let in_flight = InFlight::default();
        assert!(in_flight.add(key, delivery(1)));
        assert!(!in_flight.add(key, delivery(2)));
        assert_eq!(
            in_flight.mark_recalled(&[1]),
            [],
            "another delivery still stands for the shard"
        );
        assert!(in_flight.is_wanted(key));
        assert_eq!(in_flight.mark_recalled(&[2]), [key]);
        assert!(!in_flight.is_wanted(key) && in_flight.holds_any(&[2]));
        assert_eq!((in_flight.deliveries().len(), in_flight.count()), (2, 1));
        assert_eq!(in_flight.remove(key).len(), 2);
        assert!(in_flight.is_empty());
        assert!(in_flight.add(key, delivery(3)), "it may come again");
    }

    #[tokio::test]
    async fn who_leaves_makes_room_for_carried_columns() {
        let carried_memory = Arc::new(CarriedMemory::default());
        let in_flight = InFlight::new(carried_memory.clone());
        let key = |shard| ShardKey { job: 0, shard };
        in_flight.add(key(7), delivery(1));
        carried_memory.reserve(key(7), CARRIED_BYTES_MAX).await;
        in_flight.remove(key(7));
        let held = tokio::time::timeout(
            Duration::from_secs(5),
            carried_memory.reserve(key(8), CARRIED_BYTES_MAX),
        );
        held.await.expect("there is room");
    }
}
