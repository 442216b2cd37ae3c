//! The output of a job: its location, and the ledger in it.

use std::path::Path;
use std::time::Duration;

use crate::cli::exit::Failure;
use crate::dataset::store::clients::redacted;
use crate::dataset::store::location::Location;
use crate::job::Job;
use crate::ledger::{self, Ledger};

/// A store that has not responded for this long is reported as slow.
const SLOW_AFTER: Duration = Duration::from_secs(3);

/// The output location of the full job.
pub(super) fn output_of(job: &Job) -> Result<Location, Failure> {
    let field = format!("{}: `output.uri`", job.file);
    let output = Location::parse(&job.output.uri, &job.base_dir)
        .map_err(|error| Failure::bad_job(error).context(field.clone()))?;
    let bad = |why: &str| {
        Err(Failure::bad_job(anyhow::anyhow!(
            "{field}: `{}` {why}",
            redacted(&output.url)
        )))
    };
    if output.is_web() {
        return bad("is on a web server, which takes no files: give a folder, or a bucket (`s3://`, `gs://`, `az://`)");
    }
    if output.local_path().is_some_and(|path| path.is_file()) {
        return bad("is a file: give a folder, which the job fills with files");
    }
    Ok(output)
}

/// The ledger of the job at `output`; an error if there is none.
pub(super) async fn ledger_at(output: &str) -> Result<Ledger, Failure> {
    let here = std::env::current_dir()?;
    let location = Location::parse(output, &here).map_err(Failure::bad_job)?;
    let file = location.local_path().filter(|path| path.is_file());
    if let Some(folder) = file.as_deref().and_then(Path::parent) {
        return Err(Failure::bad_job(anyhow::anyhow!(
            "`{output}` is a file: name the folder of the job's output, such as `{}`",
            folder.display()
        )));
    }
    let opened = open_ledger(&location).await?;
    opened.ok_or_else(|| no_job_failure(&location))
}

/// The ledger of the job at `output`, to be changed by hand; an error if there is none, or if it is
/// the job of a batch.
pub(super) async fn own_ledger_at(output: &str) -> Result<Ledger, Failure> {
    let ledger = ledger_at(output).await?;
    if is_job_of_batch(&ledger.job().name, ledger.store().url().as_str()) {
        return Err(Failure::bad_job(anyhow::anyhow!(
            "`{output}` is the job of a batch of `gristmill serve`, whose files are recorded when it ends: submit the \
             requests again as a new batch"
        )));
    }
    Ok(ledger)
}

/// Whether a job with this name and output is that of a batch of the service.
pub(super) fn is_job_of_batch(name: &str, output: &str) -> bool {
    crate::serve::is_batch_id(name) && output.trim_end_matches('/').ends_with(&format!("/work/{name}/output"))
}

/// The ledger at `output`, if any. Reports a slow store, which is retried for up to half a minute.
pub(super) async fn open_ledger(output: &Location) -> ledger::Result<Option<Ledger>> {
    let mut opening = std::pin::pin!(Ledger::open(output));
    match tokio::time::timeout(SLOW_AFTER, &mut opening).await {
        Ok(opened) => opened,
        Err(_) => {
            eprintln!(
                "gristmill: `{}` does not answer yet, trying again for a while",
                redacted(&output.url)
            );
            opening.await
        }
    }
}

/// The error if there is no job at `output`.
pub(super) fn no_job_failure(output: &Location) -> Failure {
    Failure::bad_job(anyhow::anyhow!(
        "`{}` holds no job: there is no `_gristmill/job.json`; `gristmill jobs` lists the jobs below a folder",
        output.url
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_of_batches_are_told_by_name_and_place() {
        let id = format!("batch_{}", "0".repeat(26));
        let output = format!("s3://bucket/tenants/a/work/{id}/output/");
        assert!(is_job_of_batch(&id, &output));
        assert!(!is_job_of_batch("nightly", &output));
        assert!(!is_job_of_batch(&id, "s3://bucket/output"));
    }
}
