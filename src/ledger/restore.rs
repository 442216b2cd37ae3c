//! Restores committed parts that are missing: a job is complete only with all of its parts, and
//! each can be built from the log again, with the same bytes.
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
use super::publish::AssembleResult;
use super::record::Commit;
use super::store::CreateOutcome;

impl Ledger {
    /// The shards of the job that have no part, ascending: one request per thousand parts.
    pub(super) async fn shards_without_part(&self) -> Result<Vec<u32>> {
        let (objects, _) = self.store().list_folder("").await?;
        let existing: HashSet<String> = objects.into_iter().map(|object| object.key).collect();
        let shards = 0..self.job().shards.len() as u32;
        Ok(shards
            .filter(|&shard| !existing.contains(&self.keys().part(shard)))
            .collect())
    }

    /// Whether every shard has its part. Call this when all shards are committed. While a part is
    /// missing, the job is unfinished, even if `_SUCCESS` was written.
    pub async fn has_all_parts(&self) -> Result<bool> {
        let missing = self.shards_without_part().await?;
        // A retry only publishes parts of its own shards.
        if let Some(&shard) = missing.iter().find(|&&shard| self.rows_to_do(shard).is_empty()) {
            return Err(self.restore_error(shard, "the retry in progress does not include this shard"));
        }
        for shard in &missing {
            tracing::info!(
                shard,
                output = %self.store().url(),
                "`{}` is missing and will be built again",
                self.store().address(&self.keys().part(*shard))
            );
        }
        Ok(missing.is_empty())
    }

    /// Builds and puts the part of a commit again if it is missing. Returns false if the part
    /// exists.
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
                return Err(self.restore_error(shard, "its rows are no longer in the ledger"));
            }
            log => log?,
        };
        if !log.is_complete() {
            return Err(self.restore_error(shard, "its rows are no longer in the ledger"));
        }
        let bytes = match log.assemble(make_part).await? {
            AssembleResult::Part(bytes, _) => bytes,
            AssembleResult::Damaged(_) => return Err(self.restore_error(shard, "the data of its rows is lost")),
        };
        if log.part_object(&bytes) != commit.part {
            return Err(self.restore_error(
                shard,
                "the part built again from the ledger differs from the committed one",
            ));
        }
        let precheck = || self.check_job_unchanged().boxed();
        if self.store().create_checked(name, bytes, &precheck).await?.outcome == CreateOutcome::Ours {
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

    fn restore_error(&self, shard: u32, why: &str) -> LedgerError {
        LedgerError::damaged(format!(
            "`{}` is missing and cannot be built again, since {why}: restore it from a backup or an earlier version of the object, or \
             run the job to a new `output.uri`",
            self.store().address(&self.keys().part(shard))
        ))
    }
}
