//! Compares the inputs of a begun job with their current state.

use std::collections::HashSet;

use anyhow::anyhow;
use futures::{StreamExt, stream};

use crate::cli::exit::Failure;
use crate::cli::output::output_of;
use crate::cli::prepare::PreparedJob;
use crate::dataset::DatasetError;
use crate::dataset::layout::SkippedFile;
use crate::dataset::plan::inputs::{Inputs, find_inputs};
use crate::dataset::store::job_inputs::{JobInputs, VerifiedVersion};
use crate::ledger::Ledger;

/// Number of inputs checked concurrently.
const CHECKS_AT_ONCE: usize = 32;

/// Refuses to report a job as done if its inputs have changed: a nightly job with constant file
/// names would otherwise seem to have run. Inputs that are gone or inaccessible are ignored.
pub(super) async fn check_inputs_unchanged(prepared: &PreparedJob, ledger: &Ledger) -> Result<(), Failure> {
    let Some(change) = find_change(prepared, ledger).await? else {
        return Ok(());
    };
    let instead = match prepared.limit {
        None => "To process what is there now, give it another `output.uri`".into(),
        Some(_) => format!("To try what is there now, remove `{}`", ledger.store().url()),
    };
    Err(Failure::bad_job(anyhow!(
        "job `{}` is done, but not of its inputs as they are now: {change}. {instead}",
        ledger.job().name
    )))
}

/// Describes a change of the inputs; `None` if there is none. Warns if the inputs cannot be
/// checked.
async fn find_change(prepared: &PreparedJob, ledger: &Ledger) -> Result<Option<String>, Failure> {
    let mut check_error = None;
    for error in changed_inputs(ledger).await? {
        match error {
            DatasetError::InputChanged { .. } => return Ok(Some(error.to_string())),
            DatasetError::InputMissing { .. } => {}
            other => check_error = Some(other),
        }
    }
    // A trial and a job with a row limit cover only the first files, so new files do not matter.
    let input = &prepared.job.input;
    if prepared.limit.is_none() && input.options.limit.is_none() && check_error.is_none() {
        let output = output_of(&prepared.job)?;
        match find_inputs(&input.uris, &input.options, &prepared.job.base_dir, Some(&output)).await {
            Ok(found) => return Ok(describe_new_files(&found, ledger).or(describe_changed_skipped_file(ledger).await)),
            Err(DatasetError::NoMatch { .. }) => {}
            Err(error) => check_error = Some(error),
        }
    }
    if let Some(error) = check_error {
        eprintln!("gristmill: warning: cannot check whether the job's inputs are unchanged: {error}");
    }
    Ok(None)
}

/// Names the files found that are neither planned nor skipped; `None` if there are none.
fn describe_new_files(found: &Inputs, ledger: &Ledger) -> Option<String> {
    let job = ledger.job();
    let skipped = job.layout.skipped.iter().map(|skipped| skipped.url.as_str());
    let planned = job.inputs.iter().map(|input| input.url.as_str());
    let known: HashSet<&str> = planned.chain(skipped).collect();
    let files = found.files.iter().map(|input| &input.file);
    let mut new = files.filter(|file| !known.contains(file.location.url.as_str()));
    let first = &new.next()?.name;
    Some(match new.count() {
        0 => format!("`{first}` has come since"),
        others => format!("`{first}` and {others} more have come since"),
    })
}

/// A note about files that were skipped as unreadable, for a job that continues: its plan stays
/// without them, even if they are readable now.
pub(super) async fn skipped_files_note(ledger: &Ledger) -> Option<String> {
    let summary = SkippedFile::summary(&ledger.job().layout.skipped)?;
    let changed = match describe_changed_skipped_file(ledger).await {
        None => String::new(),
        Some(which) => format!("; {which}: for its rows, run the job to another `output.uri`"),
    };
    Some(format!("the job goes on as it was planned: {summary}{changed}"))
}

/// Names a skipped file that has changed since the job was planned; `None` if no change is found.
pub(super) async fn describe_changed_skipped_file(ledger: &Ledger) -> Option<String> {
    let skipped = &ledger.job().layout.skipped;
    let checks = skipped.iter().map(|skipped| async move {
        let file = skipped.pinned_file().ok()?;
        let is_changed = match file.current_version().await {
            Ok(now) => now.etag != skipped.etag,
            Err(DatasetError::InputChanged { .. }) => true,
            Err(_) => false,
        };
        is_changed.then_some(file.name)
    });
    let found: Vec<Option<String>> = stream::iter(checks).buffered(CHECKS_AT_ONCE).collect().await;
    let mut others = found.into_iter().flatten();
    let first = others.next()?;
    let others = match others.count() {
        0 => String::new(),
        others => format!(" and {others} more"),
    };
    Some(format!(
        "`{first}`{others} could not be read when the job was planned, and has changed since"
    ))
}

/// The errors of inputs that changed or cannot be checked, in input order; inputs that still hold
/// the planned bytes are omitted. The check writes nothing to the ledger.
pub(super) async fn changed_inputs(ledger: &Ledger) -> Result<Vec<DatasetError>, Failure> {
    let inputs = JobInputs::new(ledger.job().inputs.clone());
    inputs.add_verified(ledger.control().await?.pins().map(VerifiedVersion::from));
    let checks = (0..ledger.job().inputs.len() as u32).map(|input| inputs.check(input));
    let found: Vec<_> = stream::iter(checks).buffered(CHECKS_AT_ONCE).collect().await;
    Ok(found.into_iter().filter_map(Result::err).collect())
}
