//! Removes what a finished job no longer needs: logs, data, attempts and stages. What proves the result stays.

use super::Ledger;
use super::error::{LedgerError, Result};
use super::keys::TMP;
use super::record::{CleanedMark, VERSION, encode};

/// What was removed, or would be.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Cleaned {
    pub objects: u64,
    pub bytes: u64,
}

impl Ledger {
    /// Removes logs, data and attempts of every generation, and stages; only after `_SUCCESS` of the newest generation.
    /// With `dry_run`, only counts them. Parts, `job.json`, commits, digests, retries, orders and spendings always stay.
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
        self.remove_below(TMP, dry_run, &mut cleaned).await?;
        Ok(cleaned)
    }

    async fn remove_below(&self, prefix: &str, dry_run: bool, cleaned: &mut Cleaned) -> Result<()> {
        let found = self.store().list(prefix).await?;
        let kept = |key: &str| self.store().is_lock(key);
        let keys: Vec<_> = found.into_iter().filter(|object| !kept(&object.key)).collect();
        cleaned.objects += keys.len() as u64;
        cleaned.bytes += keys.iter().map(|object| object.size).sum::<u64>();
        if dry_run {
            return Ok(());
        }
        self.store().delete_all(keys.into_iter().map(|object| object.key)).await
    }
}
