//! Removes the objects that a finished job no longer needs: data objects, attempts, and stages,
//! which are the temporary files of local puts (`stage.rs`). Objects that prove the result stay.
//! Log records stay too: they are small, and they keep a worker that wakes late from beginning a
//! log anew.

use chrono::{TimeDelta, Utc};

use super::Ledger;
use super::error::{LedgerError, Result};
use super::keys::{Keys, TMP};
use super::record::{CleanedMark, VERSION, encode};
use super::stage::{STAGE_AGE_MAX, is_stage_name};
use super::store::ListedObject;

/// Number and size of the objects that were removed, or with `dry_run` would be.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RemovedObjects {
    pub objects: u64,
    pub bytes: u64,
}

impl Ledger {
    /// Removes data objects and attempts of every generation, and stages. Refused before `_SUCCESS`
    /// of the newest generation exists. With `dry_run`, only counts the objects. Parts, `job.json`,
    /// log records, commits, digests, retries, commands and spendings always stay.
    ///
    /// Writes a mark first, so that a later retry reads the rows from the parts. Needs the
    /// permission to delete.
    pub async fn clean(&self, dry_run: bool) -> Result<RemovedObjects> {
        let newest = self.newest_generation().await?;
        if newest.success().await?.is_none() {
            return Err(LedgerError::conflict(format!(
                "job `{}` is not finished: its ledger is still needed",
                self.job().name
            )));
        }
        let mut cleaned = RemovedObjects::default();
        for generation in 0..=newest.generation() {
            let ledger = newest.up_to_generation(generation);
            if !dry_run {
                let mark = CleanedMark {
                    v: VERSION,
                    job: self.job().job.clone(),
                };
                ledger
                    .store()
                    .create(&ledger.keys().cleaned_mark(), encode(&mark)?)
                    .await?;
            }
            ledger
                .remove_below(&ledger.keys().shards_prefix(), dry_run, &mut cleaned)
                .await?;
        }
        self.remove_stages(dry_run, &mut cleaned).await?;
        Ok(cleaned)
    }

    async fn remove_below(&self, prefix: &str, dry_run: bool, cleaned: &mut RemovedObjects) -> Result<()> {
        let mut found = self.store().list(prefix).await?;
        found.retain(|object| !Keys::is_log_record(&object.key));
        self.remove(found, dry_run, cleaned).await
    }

    /// Removes only stages older than [`STAGE_AGE_MAX`]: another process may be probing the store
    /// now.
    async fn remove_stages(&self, dry_run: bool, cleaned: &mut RemovedObjects) -> Result<()> {
        let (store, age) = (
            self.store(),
            TimeDelta::from_std(STAGE_AGE_MAX).unwrap_or(TimeDelta::MAX),
        );
        let mut found = store.list(TMP).await?;
        found.retain(|object| {
            let name = object.key.strip_prefix(TMP).and_then(|rest| rest.strip_prefix('/'));
            name.is_some_and(is_stage_name) && Utc::now() - object.modified > age
        });
        self.remove(found, dry_run, cleaned).await
    }

    async fn remove(&self, objects: Vec<ListedObject>, dry_run: bool, cleaned: &mut RemovedObjects) -> Result<()> {
        cleaned.objects += objects.len() as u64;
        cleaned.bytes += objects.iter().map(|object| object.size).sum::<u64>();
        if dry_run {
            return Ok(());
        }
        self.store()
            .delete_all(objects.into_iter().map(|object| object.key))
            .await
    }
}
