//! The report of a job, as its ledger tells it.

use crate::dataset::layout::SkippedFile;
use crate::ledger::Ledger;
use crate::ledger::status::Status;
use crate::report::one_line;
use crate::report::summary::Summary;

/// All of it.
pub async fn summary(ledger: &Ledger, status: &Status, output: &str) -> Summary {
    let mut summary = without_failures(ledger, status, output);
    if summary.rows.errored + summary.rows.invalid_output > 0 {
        match ledger.failures().await {
            Ok(failures) => summary.failures = Some(failures),
            Err(error) => eprintln!("gristmill: why rows failed cannot be read: {}", one_line(&error.into())),
        }
    }
    summary
}

/// The same, but for why rows failed, which stands in parts.
pub fn without_failures(ledger: &Ledger, status: &Status, output: &str) -> Summary {
    let skipped = ledger.job().layout.skipped.iter().map(SkippedFile::line);
    Summary {
        skipped_inputs: skipped.collect(),
        ..Summary::of(status, output)
    }
}
