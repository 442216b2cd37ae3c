//! Memory for the carried columns of all shards in flight, which are kept until their parts are
//! published.
//!
//! `dataset/row_memory.rs` bounds the columns of one shard; this module bounds the sum over all
//! shards. A shard that is being read waits until the columns of its next rows fit beside those of
//! the others. The shard that has held columns for the longest time never waits, so that one shard
//! always goes on.
//!
//! See docs/decisions/028-carried-columns-are-bounded.md.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::worker::in_flight::ShardKey;

/// Maximum bytes of all carried columns: two shards of the largest size. The last piece of a
/// waiting shard is not counted.
pub const CARRIED_BYTES_MAX: usize = 512 << 20;

/// See the module's description.
#[derive(Debug)]
pub struct CarriedMemory {
    bytes_max: usize,
    shards: Mutex<HashMap<ShardKey, Reservation>>,
    freed: Notify,
}

#[derive(Debug, Clone, Copy)]
struct Reservation {
    bytes: usize,
    /// Number in the order of arrival.
    arrival: u64,
}

impl Default for CarriedMemory {
    fn default() -> CarriedMemory {
        #[cfg(feature = "faults")]
        let bytes_max = crate::faults::carried_bytes_max().unwrap_or(CARRIED_BYTES_MAX);
        #[cfg(not(feature = "faults"))]
        let bytes_max = CARRIED_BYTES_MAX;
        CarriedMemory {
            bytes_max,
            shards: Mutex::default(),
            freed: Notify::new(),
        }
    }
}

impl CarriedMemory {
    /// Waits until a shard may hold `bytes` in total, including the bytes it has reserved before.
    pub async fn reserve(&self, key: ShardKey, bytes: usize) {
        if self.try_reserve(key, bytes) {
            return;
        }
        tracing::info!(
            "shard {} waits: the carried columns of the shards in hand take {} MiB together",
            key.shard,
            self.bytes_max >> 20
        );
        loop {
            let freed = self.freed.notified();
            tokio::pin!(freed);
            // From here on no notification is missed.
            freed.as_mut().enable();
            if self.try_reserve(key, bytes) {
                return;
            }
            freed.await;
        }
    }

    fn try_reserve(&self, key: ShardKey, bytes: usize) -> bool {
        let mut shards = self.shards();
        let next = shards.values().map(|reserved| reserved.arrival + 1).max().unwrap_or(0);
        let arrival = shards.get(&key).map_or(next, |reserved| reserved.arrival);
        let (mut others, mut is_first) = (0usize, true);
        for (_, reserved) in shards.iter().filter(|(other, _)| **other != key) {
            others = others.saturating_add(reserved.bytes);
            is_first &= reserved.arrival > arrival;
        }
        let fits = is_first || bytes == 0 || others.saturating_add(bytes) <= self.bytes_max;
        if fits {
            let replaced = shards.insert(key, Reservation { bytes, arrival });
            if replaced.is_some_and(|replaced| replaced.bytes > bytes) {
                // The shard is being read again.
                self.freed.notify_waiters();
            }
        }
        fits
    }

    /// Releases all bytes of a shard.
    pub fn release(&self, key: ShardKey) {
        if self.shards().remove(&key).is_some() {
            self.freed.notify_waiters();
        }
    }

    fn shards(&self) -> MutexGuard<'_, HashMap<ShardKey, Reservation>> {
        // Every change is a single step, so the state is consistent even after a panic of its
        // holder.
        self.shards.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;

    const SHARD: usize = CARRIED_BYTES_MAX / 2;

    fn key(shard: u32) -> ShardKey {
        ShardKey { job: 0, shard }
    }

    #[test]
    fn the_sum_is_bounded_and_one_always_goes_on() {
        let carried_memory = CarriedMemory::default();
        assert!(carried_memory.try_reserve(key(1), SHARD) && carried_memory.try_reserve(key(2), SHARD));
        assert!(!carried_memory.try_reserve(key(3), 1), "the third has no room");
        assert!(
            carried_memory.try_reserve(key(1), 3 * SHARD),
            "the first goes on whatever it takes"
        );
        assert!(!carried_memory.try_reserve(key(2), SHARD + 1));
        carried_memory.release(key(1));
        assert!(carried_memory.try_reserve(key(3), SHARD), "what was freed is there");
        assert!(
            carried_memory.try_reserve(key(2), 3 * SHARD),
            "the second is the first now"
        );
        // A shard that is read again releases its earlier bytes.
        assert!(carried_memory.try_reserve(key(2), 0) && carried_memory.try_reserve(key(3), 2 * SHARD));
    }

    #[tokio::test]
    async fn who_waits_goes_on_when_another_leaves() {
        let carried_memory = Arc::new(CarriedMemory::default());
        carried_memory.reserve(key(1), 2 * SHARD).await;
        let waiting = tokio::spawn({
            let carried_memory = carried_memory.clone();
            async move { carried_memory.reserve(key(2), SHARD).await }
        });
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!waiting.is_finished());
        carried_memory.release(key(1));
        tokio::time::timeout(Duration::from_secs(10), waiting)
            .await
            .unwrap()
            .unwrap();
    }

    #[tokio::test]
    async fn who_waits_goes_on_when_another_begins_anew() {
        let carried_memory = Arc::new(CarriedMemory::default());
        carried_memory.reserve(key(1), 2 * SHARD).await;
        let waiting = tokio::spawn({
            let carried_memory = carried_memory.clone();
            async move { carried_memory.reserve(key(2), SHARD).await }
        });
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!waiting.is_finished());
        carried_memory.reserve(key(1), SHARD).await;
        tokio::time::timeout(Duration::from_secs(10), waiting)
            .await
            .unwrap()
            .unwrap();
    }
}
