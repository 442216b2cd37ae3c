//! The shards in hand at this worker, with their deliveries.
//!
//! A queue may deliver one shard twice (a broker that restarted, a `reconcile`): the second delivery joins the first, and
//! both are answered when the work on the shard ends.
//!
//! See docs/decisions/025-an-extended-job-goes-on-by-itself.md.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::queue::Delivery;
use crate::worker::room::Room;

/// A shard within this worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ShardKey {
    /// [`OpenJob::number`](crate::worker::jobs::OpenJob::number).
    pub job: u32,
    pub shard: u32,
}

/// See the module's description.
#[derive(Debug, Default)]
pub struct InFlight {
    shards: Mutex<HashMap<ShardKey, Vec<Held>>>,
    /// Accounts for the carried columns of the shards.
    room: Arc<Room>,
}

#[derive(Debug)]
struct Held {
    delivery: Arc<Delivery>,
    /// Whether the queue took the delivery back.
    recalled: bool,
}

impl InFlight {
    pub fn new(room: Arc<Room>) -> InFlight {
        InFlight {
            shards: Mutex::default(),
            room,
        }
    }

    /// Adds a delivery. True: the shard was not in hand, and the caller works on it now.
    pub fn enter(&self, key: ShardKey, delivery: Arc<Delivery>) -> bool {
        let mut shards = self.shards();
        let held = shards.entry(key).or_default();
        held.push(Held {
            delivery,
            recalled: false,
        });
        held.len() == 1
    }

    /// Ends the work on a shard and returns the deliveries to acknowledge or give back.
    pub fn leave(&self, key: ShardKey) -> Vec<Arc<Delivery>> {
        let held = self.shards().remove(&key).unwrap_or_default();
        self.room.leave(key);
        held.into_iter().map(|held| held.delivery).collect()
    }

    /// Marks deliveries that the queue takes back. Returns the shards without any other delivery;
    /// they stay in hand until their work ends.
    pub fn recall(&self, receipts: &[u64]) -> Vec<ShardKey> {
        let mut lost = Vec::new();
        for (key, held) in self.shards().iter_mut() {
            let named = |held: &&mut Held| receipts.contains(&held.delivery.receipt);
            let hit = held.iter_mut().filter(named).map(|held| held.recalled = true).count();
            if hit > 0 && held.iter().all(|held| held.recalled) {
                lost.push(*key);
            }
        }
        lost
    }

    /// Whether the shard has a delivery that the queue has not taken back.
    pub fn is_wanted(&self, key: ShardKey) -> bool {
        let shards = self.shards();
        shards
            .get(&key)
            .is_some_and(|held| held.iter().any(|held| !held.recalled))
    }

    /// Whether one of these deliveries is still in hand.
    pub fn holds_any(&self, receipts: &[u64]) -> bool {
        let shards = self.shards();
        let mut held = shards.values().flatten();
        held.any(|held| receipts.contains(&held.delivery.receipt))
    }

    /// Number of one job's shards in hand.
    pub fn of_job(&self, job: u32) -> usize {
        self.shards().keys().filter(|key| key.job == job).count()
    }

    /// All deliveries in hand.
    pub fn deliveries(&self) -> Vec<Arc<Delivery>> {
        let shards = self.shards();
        shards.values().flatten().map(|held| held.delivery.clone()).collect()
    }

    pub fn is_empty(&self) -> bool {
        self.shards().is_empty()
    }

    fn shards(&self) -> MutexGuard<'_, HashMap<ShardKey, Vec<Held>>> {
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
    use crate::worker::room::ROOM_BYTES;

    fn delivery(receipt: u64) -> Arc<Delivery> {
        let message = Message::new("a", "memory:///a", 0, 7);
        Arc::new(Delivery::new(message, 1, 0, receipt, None))
    }

    #[test]
    fn a_second_delivery_joins_the_first() {
        let key = ShardKey { job: 0, shard: 7 };
        let in_flight = InFlight::default();
        assert!(in_flight.enter(key, delivery(1)));
        assert!(!in_flight.enter(key, delivery(2)));
        assert_eq!(
            in_flight.recall(&[1]),
            [],
            "another delivery still stands for the shard"
        );
        assert!(in_flight.is_wanted(key));
        assert_eq!(in_flight.recall(&[2]), [key]);
        assert!(!in_flight.is_wanted(key) && in_flight.holds_any(&[2]));
        assert_eq!(in_flight.deliveries().len(), 2);
        assert_eq!(in_flight.leave(key).len(), 2);
        assert!(in_flight.is_empty());
        assert!(in_flight.enter(key, delivery(3)), "it may come again");
    }

    #[tokio::test]
    async fn who_leaves_makes_room_for_carried_columns() {
        let room = Arc::new(Room::default());
        let in_flight = InFlight::new(room.clone());
        let key = |shard| ShardKey { job: 0, shard };
        in_flight.enter(key(7), delivery(1));
        room.hold(key(7), ROOM_BYTES).await;
        in_flight.leave(key(7));
        let held = tokio::time::timeout(Duration::from_secs(5), room.hold(key(8), ROOM_BYTES));
        held.await.expect("there is room");
    }
}
