//! Finishes a job: writes the digest of each block whose shards are all committed, and `_SUCCESS`
//! when all blocks have a digest.
//!
//! The check is cheap enough to run after every commit: it lists the commits of the shard's own
//! block. Only the commit that fills a block reads more. Each worker checks after its own commit or
//! digest is written, so the last one sees all of them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{MutexGuard, PoisonError};

use data_encoding::HEXLOWER;
use futures::{FutureExt, StreamExt, TryStreamExt};

use super::Ledger;
use super::error::{LedgerError, Result};
use super::keys::{Keys, SHARDS_PER_BLOCK, SUCCESS};
use super::record::{Commit, Digest, Record, Success, Tally, VERSION, decode, encode, read};
use super::spend::dollars;
use super::store::CreateOutcome;

/// Maximum concurrent requests while a job's records are read.
pub(super) const READS_AT_ONCE: usize = 16;

/// Maximum number of commits in the cache.
const CACHED_COMMITS_MAX: usize = 10_000;

impl Ledger {
    /// The result of the job, if this generation or a later one is finished.
    pub async fn success(&self) -> Result<Option<Success>> {
        let current = self.current_success().await?;
        Ok(current.filter(|success| success.generation >= self.generation()))
    }

    /// The current result of the job, of any generation. A `_SUCCESS` of another job is ignored: a
    /// late worker of the job that had the folder before may have written it.
    pub(super) async fn current_success(&self) -> Result<Option<Success>> {
        match read::<Success>(self.store(), SUCCESS).await? {
            Some(success) if success.job == self.job().job => Ok(Some(success)),
            // Fails if the folder belongs to that other job by now.
            Some(_) => self.check_job_unchanged().await.map(|()| None),
            None => Ok(None),
        }
    }

    /// Writes the digest of a full block, and `_SUCCESS` when all blocks have a digest.
    ///
    /// `committed`: the shard that was committed just now; only its block is checked. `None`:
    /// checks every block (when idle, on resume).
    pub async fn finish_check(&self, committed: Option<u32>) -> Result<Option<Success>> {
        match committed {
            Some(shard) => {
                let block = Keys::block_of(shard);
                if self.committed_shards(block).await?.len() < self.block_shards(block).len() {
                    return Ok(None);
                }
                // A redelivered message must not cost the reads of a whole block.
                if self.store().object_version(&self.keys().digest(block)).await?.is_none() {
                    self.close_block(block).await?;
                }
            }
            None => {
                if let Some(success) = self.success().await? {
                    return Ok(self.has_all_parts().await?.then_some(success));
                }
                let closed = self.closed_blocks().await?;
                for block in self.blocks().into_iter().filter(|block| !closed.contains(block)) {
                    if self.committed_shards(block).await?.len() < self.block_shards(block).len() {
                        return Ok(None);
                    }
                    self.close_block(block).await?;
                }
            }
        }
        if self.closed_blocks().await?.len() < self.blocks().len() {
            return Ok(None);
        }
        if !self.has_all_parts().await? {
            return Ok(None);
        }
        crate::failpoint!("keeper.between-digest-and-success");
        self.write_success().await.map(Some)
    }

    /// The blocks with shards to do in this generation, ascending.
    pub(super) fn blocks(&self) -> Vec<u32> {
        let mut blocks: Vec<u32> = match self.inner.generations.last() {
            None => (0..(self.job().shards.len() as u32).div_ceil(SHARDS_PER_BLOCK)).collect(),
            Some(retry) => retry
                .shards
                .iter()
                .map(|retried| Keys::block_of(retried.shard))
                .collect(),
        };
        blocks.dedup();
        blocks
    }

    /// The shards of a block to do in this generation, ascending.
    pub(super) fn block_shards(&self, block: u32) -> Vec<u32> {
        let start = block.saturating_mul(SHARDS_PER_BLOCK);
        let end = start
            .saturating_add(SHARDS_PER_BLOCK)
            .min(self.job().shards.len() as u32);
        match self.inner.generations.last() {
            None => (start..end).collect(),
            Some(retry) => {
                let first = retry.shards.partition_point(|retried| retried.shard < start);
                let shards = retry.shards[first..].iter().map(|retried| retried.shard);
                shards.take_while(|&shard| shard < end).collect()
            }
        }
    }

    /// The shards of a block that have a commit.
    pub(super) async fn committed_shards(&self, block: u32) -> Result<BTreeSet<u32>> {
        let listed = self.store().list(&self.keys().commits_prefix(block)).await?;
        let keys: BTreeSet<String> = listed.into_iter().map(|object| object.key).collect();
        Ok(self
            .block_shards(block)
            .into_iter()
            .filter(|&shard| keys.contains(&self.keys().commit(shard)))
            .collect())
    }

    /// The blocks that have a digest.
    pub(super) async fn closed_blocks(&self) -> Result<BTreeSet<u32>> {
        let listed = self.store().list(&self.keys().digests_prefix()).await?;
        let keys: BTreeSet<String> = listed.into_iter().map(|object| object.key).collect();
        Ok(self
            .blocks()
            .into_iter()
            .filter(|&block| keys.contains(&self.keys().digest(block)))
            .collect())
    }

    /// Reads the commits of `shards`; a missing commit is an error.
    pub(super) async fn read_commits(&self, shards: impl IntoIterator<Item = u32>) -> Result<Vec<Commit>> {
        let shards: Vec<u32> = shards.into_iter().collect();
        futures::stream::iter(shards)
            .map(|shard| {
                // Clones the ledger so that the future is `Send` wherever it is awaited.
                let ledger = self.clone();
                async move {
                    let missing = || LedgerError::damaged(format!("the commit of shard {shard} has gone"));
                    ledger.commit_of(shard).await?.ok_or_else(missing)
                }
            })
            .buffered(READS_AT_ONCE)
            .try_collect()
            .await
    }

    /// Writes the digest of a full block.
    async fn close_block(&self, block: u32) -> Result<()> {
        let commits = self.commits_to_close(block).await?;
        let tally = sum_tallies(&commits);
        let digest = Digest {
            v: VERSION,
            job: self.job().job.clone(),
            block,
            commits,
            tally,
        };
        let key = self.keys().digest(block);
        match self.store().create(&key, encode(&digest)?).await? {
            CreateOutcome::Ours => Ok(()),
            // Another process made it from the same commits, perhaps with another version of
            // gristmill.
            CreateOutcome::Theirs(bytes) => self.check_digest(block, &decode(self.store(), &key, &bytes)?),
        }
    }

    /// Caches a commit until its block is closed.
    pub(super) fn cache_commit(&self, commit: &Commit) {
        let mut cache = self.commit_cache();
        cache.insert(commit.shard, commit.clone());
        if cache.len() > CACHED_COMMITS_MAX {
            // Another worker has most likely closed the block of this commit. Otherwise the commit
            // is read again.
            cache.pop_first();
        }
    }

    fn commit_cache(&self) -> MutexGuard<'_, BTreeMap<u32, Commit>> {
        self.inner.commit_cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The commits of a full block, from the cache or else from the store.
    async fn commits_to_close(&self, block: u32) -> Result<Vec<Commit>> {
        let shards = self.block_shards(block);
        let mut commits: BTreeMap<u32, Commit> = {
            let mut cache = self.commit_cache();
            let known = shards.iter().filter_map(|shard| cache.remove_entry(shard));
            known.collect()
        };
        let unknown: Vec<u32> = shards.iter().copied().filter(|s| !commits.contains_key(s)).collect();
        for commit in self.read_commits(unknown).await? {
            commits.insert(commit.shard, commit);
        }
        Ok(commits.into_values().collect())
    }

    /// The digest of a closed block.
    pub(super) async fn digest(&self, block: u32) -> Result<Digest> {
        let key = self.keys().digest(block);
        let missing = || LedgerError::damaged(format!("`{}` has gone", self.store().address(&key)));
        let digest: Digest = read(self.store(), &key).await?.ok_or_else(missing)?;
        self.check_digest(block, &digest)?;
        Ok(digest)
    }

    fn check_digest(&self, block: u32, digest: &Digest) -> Result<()> {
        let shards = self.block_shards(block);
        let commits = &digest.commits;
        let is_valid = digest.job == self.job().job
            && digest.block == block
            && commits.len() == shards.len()
            && shards
                .into_iter()
                .zip(commits)
                .all(|(shard, commit)| self.check_commit(commit, shard).is_ok())
            && digest.tally.agrees_with(&sum_tallies(commits));
        if is_valid {
            return Ok(());
        }
        let address = self.store().address(&self.keys().digest(block));
        Err(LedgerError::damaged(format!(
            "`{address}` is no digest of block {block}"
        )))
    }

    /// Writes `_SUCCESS` for a generation whose blocks are all closed. The key may hold the result
    /// of the previous generation, or of another job that had the folder before.
    async fn write_success(&self) -> Result<Success> {
        let mut current = self.store().get_versioned(SUCCESS, Success::MAX_BYTES).await?;
        let mut written: Option<Success> = None;
        // The folder may belong to another job by now if this worker was paused.
        let precheck = || self.check_job_unchanged().boxed();
        loop {
            if let Some((bytes, _)) = &current {
                let success: Success = decode(self.store(), SUCCESS, bytes)?;
                if success.job == self.job().job && success.generation >= self.generation() {
                    return Ok(success);
                }
            }
            let success = match written.take() {
                Some(success) => success,
                None => self.build_success().await?,
            };
            let bytes = encode(&success)?;
            let outcome = match &current {
                None => self.store().create_checked(SUCCESS, bytes, &precheck).await?.outcome,
                Some((_, version)) => self.store().conditional_put(SUCCESS, version, bytes, &precheck).await?,
            };
            if outcome == CreateOutcome::Ours {
                self.mark_result_written();
                return Ok(success);
            }
            // Another worker was first. A result of this generation is the result of the job; an
            // earlier result is replaced in the next round.
            current = self.store().get_versioned(SUCCESS, Success::MAX_BYTES).await?;
            written = Some(success);
        }
    }

    /// The result of the job, from the commits and spendings.
    async fn build_success(&self) -> Result<Success> {
        let mut tally = Tally::default();
        let mut hash = PartsHash::default();
        for commit in self.current_commits().await? {
            tally.add(&commit.tally);
            hash.add(&commit);
        }
        let seconds = self.spendings().await?.device_seconds();
        let price = self.current_limits().await?.usd_per_hour;
        let (job, id) = (self.job(), &self.job().identity);
        Ok(Success {
            v: VERSION,
            job: job.job.clone(),
            name: job.name.clone(),
            rows: job.rows(),
            parts: job.shards.len() as u32,
            tally,
            seconds,
            usd: dollars(seconds, price),
            job_hash: id.job_hash.clone(),
            model_hash: id.model_hash.clone(),
            tokenizer_hash: id.tokenizer_hash.clone(),
            template_hash: id.template_hash.clone(),
            parts_sha256: hash.finish(),
            generation: self.generation(),
        })
    }
}

fn sum_tallies(commits: &[Commit]) -> Tally {
    commits.iter().fold(Tally::default(), |mut sum, commit| {
        sum.add(&commit.tally);
        sum
    })
}

/// The hash over the names, sizes and hashes of all parts, in order.
#[derive(Debug, Default)]
pub(super) struct PartsHash {
    lines: sha2::Sha256,
}

impl PartsHash {
    pub(super) fn add(&mut self, commit: &Commit) {
        use sha2::Digest as _;
        self.lines.update(format!(
            "{} {} {}\n",
            commit.part.name, commit.part.size, commit.part.sha256
        ));
    }

    pub(super) fn finish(self) -> String {
        use sha2::Digest as _;
        HEXLOWER.encode(&self.lines.finalize())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_parts_hash_to_the_empty_hash() {
        assert_eq!(PartsHash::default().finish(), super::super::keys::sha256(b""));
    }
}
