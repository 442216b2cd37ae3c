//! Memory for the carried columns of all shards in hand, which are kept until their parts are
//! published.
//!
//! `dataset/row_memory.rs` bounds the columns of one shard; this module bounds their sum. A shard
//! that is being read waits until the columns of its next rows fit beside those of the others. The
//! shard that has held columns for the longest time never waits, so that one shard always goes on.
//!
//! See docs/decisions/028-carried-columns-are-bounded.md.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::worker::in_flight::ShardKey;

/// Maximum bytes of all carried columns, except the last piece of a waiting shard: two shards of
/// the largest size.
pub const ROOM_BYTES: usize = 512 << 20;

/// See the module's description.
#[derive(Debug)]
pub struct Room {
    most: usize,
    shards: Mutex<HashMap<ShardKey, Held>>,
    freed: Notify,
}

#[derive(Debug, Clone, Copy)]
struct Held {
    bytes: usize,
    /// Order of arrival.
    turn: u64,
}

impl Default for Room {
    fn default() -> Room {
        #[cfg(feature = "faults")]
        let most = crate::faults::room_bytes().unwrap_or(ROOM_BYTES);
        #[cfg(not(feature = "faults"))]
        let most = ROOM_BYTES;
        Room {
            most,
            shards: Mutex::default(),
            freed: Notify::new(),
        }
    }
}

impl Room {
    /// Waits until a shard may hold `bytes` in total, earlier bytes included.
    pub async fn hold(&self, key: ShardKey, bytes: usize) {
        if self.try_hold(key, bytes) {
            return;
        }
        tracing::info!(
            "shard {} waits: the carried columns of the shards in hand take {} MiB together",
            key.shard,
            self.most >> 20
        );
        loop {
            let freed = self.freed.notified();
            tokio::pin!(freed);
            // From here on no notification is missed.
            freed.as_mut().enable();
            if self.try_hold(key, bytes) {
                return;
            }
            freed.await;
        }
    }

    fn try_hold(&self, key: ShardKey, bytes: usize) -> bool {
        let mut shards = self.shards();
        let next = shards.values().map(|held| held.turn + 1).max().unwrap_or(0);
        let turn = shards.get(&key).map_or(next, |held| held.turn);
        let (mut others, mut is_first) = (0usize, true);
        for (_, held) in shards.iter().filter(|(other, _)| **other != key) {
            others = others.saturating_add(held.bytes);
            is_first &= held.turn > turn;
        }
        let may = is_first || bytes == 0 || others.saturating_add(bytes) <= self.most;
        if may {
            let before = shards.insert(key, Held { bytes, turn });
            if before.is_some_and(|before| before.bytes > bytes) {
                // The shard is being read again.
                self.freed.notify_waiters();
            }
        }
        may
    }

    /// Releases all bytes of a shard.
    pub fn leave(&self, key: ShardKey) {
        if self.shards().remove(&key).is_some() {
            self.freed.notify_waiters();
        }
    }

    fn shards(&self) -> MutexGuard<'_, HashMap<ShardKey, Held>> {
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

    const SHARD: usize = ROOM_BYTES / 2;

    fn key(shard: u32) -> ShardKey {
        ShardKey { job: 0, shard }
    }

    #[test]
    fn the_sum_is_bounded_and_one_always_goes_on() {
        let room = Room::default();
        assert!(room.try_hold(key(1), SHARD) && room.try_hold(key(2), SHARD));
        assert!(!room.try_hold(key(3), 1), "the third has no room");
        assert!(room.try_hold(key(1), 3 * SHARD), "the first goes on whatever it takes");
        assert!(!room.try_hold(key(2), SHARD + 1));
        room.leave(key(1));
        assert!(room.try_hold(key(3), SHARD), "what was freed is there");
        assert!(room.try_hold(key(2), 3 * SHARD), "the second is the first now");
        // A shard that is read again releases its earlier bytes.
        assert!(room.try_hold(key(2), 0) && room.try_hold(key(3), 2 * SHARD));
    }

    #[tokio::test]
    async fn who_waits_goes_on_when_another_leaves() {
        let room = Arc::new(Room::default());
        room.hold(key(1), 2 * SHARD).await;
        let waiting = tokio::spawn({
            let room = room.clone();
            async move { room.hold(key(2), SHARD).await }
        });
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!waiting.is_finished());
        room.leave(key(1));
        tokio::time::timeout(Duration::from_secs(10), waiting)
            .await
            .unwrap()
            .unwrap();
    }

    #[tokio::test]
    async fn who_waits_goes_on_when_another_begins_anew() {
        let room = Arc::new(Room::default());
        room.hold(key(1), 2 * SHARD).await;
        let waiting = tokio::spawn({
            let room = room.clone();
            async move { room.hold(key(2), SHARD).await }
        });
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!waiting.is_finished());
        room.hold(key(1), SHARD).await;
        tokio::time::timeout(Duration::from_secs(10), waiting)
            .await
            .unwrap()
            .unwrap();
    }
}
