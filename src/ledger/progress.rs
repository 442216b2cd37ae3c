//! Finds shards without a worker: shards without a commit that gained no ledger object between two
//! looks.

use std::collections::BTreeMap;

use super::Ledger;
use super::error::Result;

/// What one look at the ledger found of every shard without a commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Progress {
    generation: u32,
    /// Of each shard without a commit, how many objects its log, data and attempts have. They are created once and stay
    /// as long as the shard is not committed, so that an equal number means that nothing is new.
    objects: BTreeMap<u32, u64>,
}

impl Progress {
    /// Shards without a commit that saw no new object since `earlier`, ascending; none where a retry began in between.
    pub fn still_since(&self, earlier: &Progress) -> Vec<u32> {
        if self.generation != earlier.generation {
            return Vec::new();
        }
        let still = self
            .objects
            .iter()
            .filter(|(shard, count)| earlier.objects.get(shard) == Some(count));
        still.map(|(&shard, _)| shard).collect()
    }

    /// Whether the shard has objects of its own: some worker has begun it.
    pub fn is_begun(&self, shard: u32) -> bool {
        self.objects.get(&shard).is_some_and(|count| *count > 0)
    }

    /// Shards without a commit, ascending.
    pub fn open(&self) -> Vec<u32> {
        self.objects.keys().copied().collect()
    }
}

impl Ledger {
    /// Looks at every shard without a commit.
    ///
    /// Requests: one listing of the digests and one a block that is not closed, then one listing of all shards' objects (a
    /// store answers it in pages of 1,000): for a job of S shards with K objects each, about 2 + S/100 + S*K/1000.
    pub async fn progress(&self) -> Result<Progress> {
        // The objects first: a shard committed in between is simply not looked at.
        let prefix = self.keys().shards();
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
        let open = self.unfinished().await?.into_iter();
        Ok(Progress {
            generation: self.generation(),
            objects: open
                .map(|shard| (shard, counts.get(&shard).copied().unwrap_or(0)))
                .collect(),
        })
    }
}
