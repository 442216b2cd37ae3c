//! Removes what a finished job no longer needs: data objects, attempts and stages. What proves the result stays, and so do the
//! records of the logs: small, and what keeps a worker that wakes late from beginning a log anew.

use std::time::{Duration, SystemTime};

use chrono::{TimeDelta, Utc};

use super::Ledger;
use super::error::{LedgerError, Result};
use super::exchange::LOCK_NAME;
use super::keys::{Keys, TMP};
use super::record::{CleanedMark, VERSION, encode};
use super::store::{Listed, STAGE_AGE_MAX, Store};

/// What was removed, or would be.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Cleaned {
    pub objects: u64,
    pub bytes: u64,
}

impl Ledger {
    /// Removes data and attempts of every generation, and stages; only after `_SUCCESS` of the newest generation.
    /// With `dry_run`, only counts them. Parts, `job.json`, log records, commits, digests, retries, orders and spendings always stay.
    ///
    /// A mark is written first, so that a retry takes its rows from the parts. Needs the right to delete.
    pub async fn clean(&self, dry_run: bool) -> Result<Cleaned> {
        let newest = self.newest().await?;
        if newest.success().await?.is_none() {
            return Err(LedgerError::conflict(format!(
                "job `{}` is not finished: its ledger is still needed",
                self.job().name
            )));
        }
        let mut cleaned = Cleaned::default();
        for generation in 0..=newest.generation() {
            let ledger = newest.back_to(generation);
            if !dry_run {
                let mark = CleanedMark {
                    v: VERSION,
                    job: self.job().job.clone(),
                };
                ledger.store().create(&ledger.keys().cleaned(), encode(&mark)?).await?;
            }
            ledger
                .remove_below(&ledger.keys().shards(), dry_run, &mut cleaned)
                .await?;
        }
        self.remove_stages(dry_run, &mut cleaned).await?;
        Ok(cleaned)
    }

    async fn remove_below(&self, prefix: &str, dry_run: bool, cleaned: &mut Cleaned) -> Result<()> {
        let mut found = self.store().list(prefix).await?;
        found.retain(|object| !Keys::is_log_record(&object.key));
        self.remove(found, dry_run, cleaned).await
    }

    /// Those of the living stay: another process may be about to try the store.
    async fn remove_stages(&self, dry_run: bool, cleaned: &mut Cleaned) -> Result<()> {
        let (store, age) = (
            self.store(),
            TimeDelta::from_std(STAGE_AGE_MAX).unwrap_or(TimeDelta::MAX),
        );
        let mut found = store.list(TMP).await?;
        found.retain(|object| !store.is_lock(&object.key) && Utc::now() - object.modified > age);
        self.remove(found, dry_run, cleaned).await
    }

    async fn remove(&self, keys: Vec<Listed>, dry_run: bool, cleaned: &mut Cleaned) -> Result<()> {
        cleaned.objects += keys.len() as u64;
        cleaned.bytes += keys.iter().map(|object| object.size).sum::<u64>();
        if dry_run {
            return Ok(());
        }
        self.store().delete_all(keys.into_iter().map(|object| object.key)).await
    }
}

impl Store {
    /// Removes stages that dead runs left: by age, since a live writer needs its stage for seconds. (Would one vanish
    /// all the same, its put fails and is staged again.)
    pub async fn clean_stages(&self) -> Result<()> {
        let Some(folder) = &self.shared.folder else {
            return Ok(());
        };
        let folder = folder.join(TMP);
        let cleaned = tokio::task::spawn_blocking(move || clean_old_files(&folder, STAGE_AGE_MAX)).await;
        match cleaned {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(LedgerError::stop(format!("cleaning `{}`: {error}", self.address(TMP)))),
            Err(error) => Err(LedgerError::stop(format!("cleaning `{}`: {error}", self.address(TMP)))),
        }
    }
}

/// Removes the files directly in `folder` that were last written more than `age` ago.
fn clean_old_files(folder: &std::path::Path, age: Duration) -> std::io::Result<()> {
    let entries = match std::fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    let now = SystemTime::now();
    for entry in entries {
        let entry = entry?;
        // Another run may be cleaning too: a file that is gone is what was wanted.
        let Ok(meta) = entry.metadata() else { continue };
        let old = meta
            .modified()
            .is_ok_and(|at| now.duration_since(at).is_ok_and(|since| since > age));
        if meta.is_file() && old && entry.file_name() != LOCK_NAME {
            match std::fs::remove_file(entry.path()) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
    }
    Ok(())
}
