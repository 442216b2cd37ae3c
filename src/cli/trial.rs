//! The location of a trial (`--limit N`): beside the output, where readers of the output do not
//! find it.
//!
//! Trials of the output `labels/2026-11` are in `labels/_limit/2026-11-N-HASH`. They are not below
//! the output, since many readers of a folder read every `*.parquet` below it. They are in a folder
//! whose name begins with `_`, so that readers of all of `labels/`, and jobs that use it as input,
//! skip them too.
//!
//! See docs/decisions/010-a-limited-run-is-its-own-job.md.

use std::collections::BTreeSet;

use object_store::path::Path;

use crate::cli::exit::Failure;
use crate::dataset::store::location::Location;
use crate::job::spec::Job;
use crate::ledger::Ledger;

/// Name of the folder that holds the trials of all outputs beside it.
pub(super) const FOLDER: &str = "_limit";

/// The location of the trial of the first `rows` rows: of an existing trial of an older gristmill,
/// or else the location for new trials.
pub(super) async fn location(job: &Job, output: &Location, rows: u64) -> Result<Location, Failure> {
    let older_location = older_location(job, output, rows);
    if Ledger::open(&older_location).await?.is_some() {
        eprintln!(
            "gristmill: this trial was begun by an older gristmill, in `{}`, where readers of the output find it too: remove \
             it when you are done with it",
            older_location.url
        );
        return Ok(older_location);
    }
    beside(job, output, rows).ok_or_else(|| {
        Failure::bad_job(anyhow::anyhow!(
            "{}: `--limit` writes beside the output, and nothing is beside `{}`: name a folder in `output.uri`",
            job.file,
            output.url
        ))
    })
}

/// The ledgers of all of this job's trials, for any number of rows.
pub(super) async fn ledgers(job: &Job, output: &Location) -> Result<Vec<Ledger>, Failure> {
    let mut found = Vec::new();
    for rows in tried_row_counts(job, &older_location(job, output, 1), "").await? {
        found.extend(Ledger::open(&older_location(job, output, rows)).await?);
    }
    if let (Some(example), Some(name)) = (beside(job, output, 1), output.path.filename()) {
        for rows in tried_row_counts(job, &example, &format!("{name}-")).await? {
            if let Some(location) = beside(job, output, rows) {
                found.extend(Ledger::open(&location).await?);
            }
        }
    }
    Ok(found)
}

fn beside(job: &Job, output: &Location, rows: u64) -> Option<Location> {
    output.in_sibling_folder(FOLDER, &format!("-{}", suffix(job, rows)))
}

/// The location that older gristmills used: below the output.
fn older_location(job: &Job, output: &Location, rows: u64) -> Location {
    output.join(FOLDER).join(&suffix(job, rows))
}

/// The end of a trial's folder name. It differs for each version of the job file, so that a job can
/// be tried, changed and tried again.
fn suffix(job: &Job, rows: u64) -> String {
    format!("{rows}-{}", hash(job))
}

fn hash(job: &Job) -> &str {
    &job.hash()[..8]
}

/// The row counts of the job's trials, from the names of folders beside `example` that begin with
/// `prefix`.
async fn tried_row_counts(job: &Job, example: &Location, prefix: &str) -> Result<BTreeSet<u64>, Failure> {
    let folder = example.path.as_ref().rsplit_once('/').map_or("", |(folder, _)| folder);
    let folder = Path::parse(folder).map_err(anyhow::Error::new)?;
    let listed = match example.store.list_with_delimiter(Some(&folder)).await {
        Ok(listed) => listed.common_prefixes,
        Err(object_store::Error::NotFound { .. }) => Vec::new(),
        Err(e) => {
            return Err(anyhow::Error::new(e)
                .context(format!("cannot list what lies beside `{}`", example.url))
                .into());
        }
    };
    let rows = |name: &str| {
        let (rows, job_hash) = name.strip_prefix(prefix)?.rsplit_once('-')?;
        rows.parse().ok().filter(|_| job_hash == hash(job))
    };
    Ok(listed.iter().filter_map(|path| rows(path.filename()?)).collect())
}
