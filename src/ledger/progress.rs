//! Finds shards without a worker: shards without a commit that gained no ledger object between two
//! listings.

use std::collections::BTreeMap;

use super::Ledger;
use super::error::Result;

/// The number of ledger objects of every shard without a commit, from one listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Progress {
    generation: u32,
    /// Number of log, data and attempt objects of each shard without a commit. These objects are
    /// created once and stay until the shard is committed, so an equal number means that no new
    /// object was written.
    object_counts: BTreeMap<u32, u64>,
}

impl Progress {
    /// Shards without a commit that gained no object since `earlier`, ascending. Empty if a retry
    /// began in between.
    pub fn stalled_since(&self, earlier: &Progress) -> Vec<u32> {
        if self.generation != earlier.generation {
            return Vec::new();
        }
        let stalled = self
            .object_counts
            .iter()
            .filter(|(shard, count)| earlier.object_counts.get(shard) == Some(count));
        stalled.map(|(&shard, _)| shard).collect()
    }

    /// Whether some worker has begun the shard: the shard then has objects.
    pub fn is_begun(&self, shard: u32) -> bool {
        self.object_counts.get(&shard).is_some_and(|count| *count > 0)
    }

    /// Shards without a commit, ascending.
    pub fn uncommitted(&self) -> Vec<u32> {
        self.object_counts.keys().copied().collect()
    }
}

impl Ledger {
    /// Counts the objects of every shard without a commit.
    ///
    /// Requests: one listing of the digests, one listing per open block, and one listing of all
    /// shards' objects, which a store answers in pages of 1,000. For a job of S shards with K
    /// objects each, these are about 2 + S/100 + S*K/1000 requests.
    pub async fn progress(&self) -> Result<Progress> {
        // List the objects first: a shard that is committed in between is then left out.
        let prefix = self.keys().shards_prefix();
        let mut counts: BTreeMap<u32, u64> = BTreeMap::new();
        for object in self.store().list(&prefix).await? {
            let shard = object
                .key
                .get(prefix.len() + 1..)
                .and_then(|rest| rest.split('/').next());
            if let Some(shard) = shard.and_then(|shard| shard.parse().ok()) {
                *counts.entry(shard).or_default() += 1;
            }
        }
        let unfinished = self.unfinished_shards().await?.into_iter();
        Ok(Progress {
            generation: self.generation(),
            object_counts: unfinished
                .map(|shard| (shard, counts.get(&shard).copied().unwrap_or(0)))
                .collect(),
        })
    }
}
