//! Builds a job's report from its ledger.

use crate::dataset::layout::SkippedFile;
use crate::error_line::one_line;
use crate::ledger::Ledger;
use crate::ledger::status::Status;
use crate::report::summary::Summary;

/// The full report.
pub(super) async fn summary(ledger: &Ledger, status: &Status, output: &str) -> Summary {
    let mut summary = without_failures(ledger, status, output);
    if summary.rows.errored + summary.rows.invalid_output > 0 {
        match ledger.failures().await {
            Ok(failures) => summary.failures = Some(failures),
            Err(error) => eprintln!("gristmill: why rows failed cannot be read: {}", one_line(&error.into())),
        }
    }
    summary
}

/// The report without the failures of rows, which would require reading parts.
pub(super) fn without_failures(ledger: &Ledger, status: &Status, output: &str) -> Summary {
    let skipped = ledger.job().layout.skipped.iter().map(SkippedFile::name_and_reason);
    Summary {
        skipped_inputs: skipped.collect(),
        ..Summary::of(status, output)
    }
}
