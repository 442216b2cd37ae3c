//! Compares the inputs of a begun job with their current state.

use std::collections::HashSet;

use anyhow::anyhow;
use futures::{StreamExt, stream};

use crate::cli::exit::Failure;
use crate::cli::output::output_of;
use crate::cli::prepare::PreparedJob;
use crate::dataset::DatasetError;
use crate::dataset::layout::SkippedFile;
use crate::dataset::plan::inputs::{Inputs, find};
use crate::dataset::store::pins::{PinnedAnew, Pins};
use crate::ledger::Ledger;

/// Number of inputs checked concurrently.
const LOOKS_AT_ONCE: usize = 32;

/// Refuses to report a job as done if its inputs have changed: a nightly job with constant file
/// names would seem to have run. Inputs that are gone or inaccessible are ignored.
pub(super) async fn check_done(prepared: &PreparedJob, ledger: &Ledger) -> Result<(), Failure> {
    let Some(what) = what_is_new(prepared, ledger).await? else {
        return Ok(());
    };
    let instead = match prepared.limit {
        None => "To process what is there now, give it another `output.uri`".into(),
        Some(_) => format!("To try what is there now, remove `{}`", ledger.store().url()),
    };
    Err(Failure::bad_job(anyhow!(
        "job `{}` is done, but not of its inputs as they are now: {what}. {instead}",
        ledger.job().name
    )))
}

async fn what_is_new(prepared: &PreparedJob, ledger: &Ledger) -> Result<Option<String>, Failure> {
    let mut unseen = None;
    for found in differences(ledger).await? {
        match found {
            DatasetError::InputChanged { .. } => return Ok(Some(found.to_string())),
            DatasetError::InputMissing { .. } => {}
            other => unseen = Some(other),
        }
    }
    // A trial and a job with a row limit cover only the first files, so new files do not matter.
    let input = &prepared.job.input;
    if prepared.limit.is_none() && input.options.limit.is_none() && unseen.is_none() {
        let own = output_of(&prepared.job)?;
        match find(&input.uris, &input.options, &prepared.job.base_dir, Some(&own)).await {
            Ok(found) => return Ok(new_among(&found, ledger).or(mended(ledger).await)),
            Err(DatasetError::NoMatch { .. }) => {}
            Err(error) => unseen = Some(error),
        }
    }
    if let Some(error) = unseen {
        eprintln!("gristmill: warning: whether its inputs are still the same cannot be seen: {error}");
    }
    Ok(None)
}

fn new_among(found: &Inputs, ledger: &Ledger) -> Option<String> {
    let job = ledger.job();
    let skipped = job.layout.skipped.iter().map(|skipped| skipped.url.as_str());
    let planned = job.inputs.iter().map(|input| input.url.as_str());
    let known: HashSet<&str> = planned.chain(skipped).collect();
    let files = found.files.iter().map(|input| &input.file);
    let mut new = files.filter(|file| !known.contains(file.location.url.as_str()));
    let first = &new.next()?.name;
    Some(match new.count() {
        0 => format!("`{first}` has come since"),
        more => format!("`{first}` and {more} more have come since"),
    })
}

/// A note about files that were skipped as unreadable, for a job that continues: the plan is
/// unchanged, whatever the files hold now.
pub(super) async fn left_out(ledger: &Ledger) -> Option<String> {
    let summary = SkippedFile::summary(&ledger.job().layout.skipped)?;
    let changed = match mended(ledger).await {
        None => String::new(),
        Some(which) => format!("; {which}: for its rows, run the job to another `output.uri`"),
    };
    Some(format!("the job goes on as it was planned: {summary}{changed}"))
}

/// Names a skipped file that has changed since; `None` if none has, as far as can be checked.
pub(super) async fn mended(ledger: &Ledger) -> Option<String> {
    let skipped = &ledger.job().layout.skipped;
    let looks = skipped.iter().map(|skipped| async move {
        let file = skipped.open().ok()?;
        let is_other = match file.look().await {
            Ok(now) => now.etag != skipped.etag,
            Err(DatasetError::InputChanged { .. }) => true,
            Err(_) => false,
        };
        is_other.then_some(file.name)
    });
    let found: Vec<Option<String>> = stream::iter(looks).buffered(LOOKS_AT_ONCE).collect().await;
    let mut others = found.into_iter().flatten();
    let first = others.next()?;
    let more = match others.count() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    Some(format!(
        "`{first}`{more} could not be read when the job was planned, and has changed since"
    ))
}

/// Differences between inputs and plan, in input order; inputs that still hold the planned bytes
/// are omitted. The check itself changes no pins.
pub(super) async fn differences(ledger: &Ledger) -> Result<Vec<DatasetError>, Failure> {
    let pins = Pins::new(ledger.job().inputs.clone());
    pins.know(ledger.control().await?.pins().map(PinnedAnew::from));
    let looks = (0..ledger.job().inputs.len() as u32).map(|input| pins.check(input));
    let found: Vec<_> = stream::iter(looks).buffered(LOOKS_AT_ONCE).collect().await;
    Ok(found.into_iter().filter_map(Result::err).collect())
}
