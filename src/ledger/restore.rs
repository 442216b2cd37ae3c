//! Restores committed parts that are gone: a job is complete only with all of its parts, and the
//! log gives the same bytes again.
//!
//! See docs/decisions/006-no-job-is-complete-without-its-parts.md.

use std::collections::HashSet;
use std::fmt::Display;

use arrow::array::RecordBatch;
use bytes::Bytes;
use futures::FutureExt;

use super::Ledger;
use super::error::{LedgerError, Result};
use super::log::ShardLog;
use super::publish::Assembled;
use super::record::Commit;
use super::store::Created;

impl Ledger {
    /// The shards of the job that have no part, ascending: one request per thousand parts.
    pub(super) async fn without_part(&self) -> Result<Vec<u32>> {
        let (objects, _) = self.store().list_folder("").await?;
        let there: HashSet<String> = objects.into_iter().map(|object| object.key).collect();
        let shards = 0..self.job().shards.len() as u32;
        Ok(shards
            .filter(|&shard| !there.contains(&self.keys().part(shard)))
            .collect())
    }

    /// Whether every shard has its part. Call this when all shards are committed. Missing parts
    /// must be restored: until then the job is unfinished, even if `_SUCCESS` was written.
    pub(super) async fn has_all_parts(&self) -> Result<bool> {
        let gone = self.without_part().await?;
        // A retry only publishes parts of its own shards.
        if let Some(&shard) = gone.iter().find(|&&shard| self.rows_to_do(shard).is_empty()) {
            return Err(self.cannot_restore(shard, "the retry in progress does not include this shard"));
        }
        for shard in &gone {
            tracing::info!(
                shard,
                output = %self.store().url(),
                "`{}` is missing and will be built again",
                self.store().address(&self.keys().part(*shard))
            );
        }
        Ok(gone.is_empty())
    }

    /// Puts the part of a commit again if it is gone. Returns false if the part exists.
    pub async fn restore_part<E: Display>(
        &self,
        commit: &Commit,
        make_part: impl Fn(&[RecordBatch], &[(String, String)]) -> Result<Bytes, E>,
    ) -> Result<bool> {
        let (shard, name) = (commit.shard, &commit.part.name);
        if self.store().object_version(name).await?.is_some() {
            return Ok(false);
        }
        let log = match ShardLog::load(self, shard).await {
            Err(LedgerError::Damaged { .. }) => {
                return Err(self.cannot_restore(shard, "its rows are no longer in the ledger"));
            }
            log => log?,
        };
        if !log.is_complete() {
            return Err(self.cannot_restore(shard, "its rows are no longer in the ledger"));
        }
        let bytes = match log.assemble(make_part).await? {
            Assembled::Part(bytes, _) => bytes,
            Assembled::Damaged(_) => return Err(self.cannot_restore(shard, "the data of its rows is lost")),
        };
        if log.described(&bytes) != commit.part {
            return Err(self.cannot_restore(
                shard,
                "the part built again from the ledger differs from the committed one",
            ));
        }
        let look = || self.check_still_ours().boxed();
        if self.store().create_after(name, bytes, &look).await?.created == Created::Ours {
            tracing::warn!(
                shard,
                output = %self.store().url(),
                "`{}` was missing and has been built again",
                self.store().address(name)
            );
        }
        self.finish_check(Some(shard)).await?;
        Ok(true)
    }

    fn cannot_restore(&self, shard: u32, why: &str) -> LedgerError {
        LedgerError::damaged(format!(
            "`{}` is missing and cannot be built again, since {why}: restore it from a backup or an earlier version of the object, or \
             run the job to a new `output.uri`",
            self.store().address(&self.keys().part(shard))
        ))
    }
}
