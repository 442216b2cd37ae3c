//! What the output of a job may hold: nothing, or that job.

use crate::cli::exit::{Exit, Failure, one_line};
use crate::cli::inputs::check_inputs_unchanged;
use crate::cli::prepare::PreparedJob;
use crate::dataset::store::location::Location;
use crate::job::difference::{Difference, differences};
use crate::job::precision::RequestedPrecision;
use crate::ledger::{JobIdentity, Ledger, LedgerError, Store};

impl PreparedJob {
    /// Whether `ledger` is of a job file with this content, also by the hash of an older gristmill.
    pub(super) fn is_record_of_job(&self, ledger: &Ledger) -> bool {
        let record = ledger.job();
        let recorded_hash = &record.identity.job_hash;
        let matches_older_hash = self.limit.is_none() && self.job.has_hash(recorded_hash, record.usd_per_hour);
        matches_older_hash || *recorded_hash == self.job_hash()
    }

    /// Checks that `ledger` is of this job, also by the hash of an older gristmill. Warns about
    /// changed settings of the job file that a begun job ignores.
    pub(super) fn check_same_job(&self, ledger: &Ledger, identity: &JobIdentity) -> Result<(), LedgerError> {
        self.check_same_file(ledger)?;
        let mut identity = identity.clone();
        if self.is_record_of_job(ledger) {
            identity.job_hash = ledger.job().identity.job_hash.clone();
        }
        ledger.check_same_job(&self.job.name, &identity)?;
        let changes = differences(&ledger.job().resolved, &self.job.resolved());
        if let Some(what) = Difference::list(changes.iter().filter(|one| one.is_fixed_at_start())) {
            eprintln!(
                "gristmill: warning: {}: the job goes on as it began: {what}",
                self.job.file
            );
        }
        Ok(())
    }

    /// Checks that the fields of the job file are those of the job in `ledger`.
    pub(super) fn check_same_file(&self, ledger: &Ledger) -> Result<(), LedgerError> {
        if self.is_record_of_job(ledger) {
            return Ok(());
        }
        let changes = differences(&ledger.job().resolved, &self.job.resolved());
        match Difference::list(changes.iter().filter(|one| one.makes_another_job())) {
            None => Ok(()),
            Some(what) => Err(LedgerError::conflict(format!(
                "output `{}` belongs to job `{}` ({}), whose job file differed from this one: {what}; take that back, or choose \
                 another `output.uri`",
                ledger.store().url(),
                ledger.job().name,
                ledger.job().job,
            ))),
        }
    }

    /// Why `run` would refuse the job because of what its output holds; `None` if it would not. The
    /// checkpoint's bytes are not compared with those that the job began with.
    pub(super) async fn output_refusal(&self, begun: Option<&Ledger>) -> Result<Option<String>, Failure> {
        let checked = match begun {
            None => check_empty(&self.output).await,
            Some(ledger) => {
                let recorded = &ledger.job().identity;
                let mut identity = self.identity_with(recorded.model_hash.clone())?;
                if self.job.precision == RequestedPrecision::Auto {
                    // It follows from the device that runs the job, which may be another than that here.
                    identity.precision.clone_from(&recorded.precision);
                    identity.kv_cache.clone_from(&recorded.kv_cache);
                }
                match self.check_same_job(ledger, &identity) {
                    Err(conflict) => Err(Failure::bad_job(conflict)),
                    Ok(()) if ledger.success().await?.is_some() && ledger.has_all_parts().await? => {
                        check_inputs_unchanged(self, ledger).await
                    }
                    Ok(()) => Ok(()),
                }
            }
        };
        match checked {
            Ok(()) => Ok(None),
            Err(refused) if refused.exit == Exit::BadJob => Ok(Some(one_line(&refused.error))),
            Err(failed) => Err(failed),
        }
    }
}

/// Checks that a new job's output is empty.
pub(super) async fn check_empty(output: &Location) -> Result<(), Failure> {
    match Store::new(output)?.first_visible().await? {
        None => Ok(()),
        Some(found) => Err(Failure::bad_job(anyhow::anyhow!(
            "`{}` holds `{found}`, which no job of gristmill put there: choose an empty folder as `output.uri`",
            output.url
        ))),
    }
}
