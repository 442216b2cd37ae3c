//! The most frequent error messages of failed rows, from published parts.

use std::collections::HashMap;

use arrow::array::{Array, AsArray, RecordBatch};
use bytes::Bytes;
use parquet::arrow::ProjectionMask;
use serde::Serialize;

use super::Ledger;
use super::error::Result;
use super::lines::lines;
use super::published::PART_BYTES_MAX;
use super::record::Commit;
use crate::dataset::part_in;
use crate::dataset::row::RowStatus;

/// Maximum number of parts that are read: the parts with the most failed rows.
const PARTS_MAX: usize = 4;
/// Number of messages in a report.
const REPORTED_REASONS: usize = 3;

/// The most frequent messages of rows that did not succeed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Failures {
    /// Failed rows in the parts that were read.
    pub looked_at: u64,
    /// Most frequent first. Messages that differ only in numbers count as one, and the first of
    /// them is shown.
    pub most: Vec<Reason>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Reason {
    pub message: String,
    pub rows: u64,
}

impl Ledger {
    /// The most frequent messages of published rows that are errored or invalid, as a report has
    /// them. Reads only a few parts, so a large job is sampled.
    pub async fn failures(&self) -> Result<Failures> {
        let commits = self.published_commits().await?;
        self.failures_in(commits.into_values(), REPORTED_REASONS).await
    }

    /// As [`Ledger::failures`], of these commits, with up to `reasons_max` messages.
    pub async fn failures_in(&self, commits: impl IntoIterator<Item = Commit>, reasons_max: usize) -> Result<Failures> {
        let failed = |commit: &Commit| commit.tally.errored + commit.tally.invalid_output;
        let mut parts: Vec<Commit> = commits.into_iter().filter(|commit| failed(commit) > 0).collect();
        parts.retain(|commit| commit.part.size <= PART_BYTES_MAX);
        parts.sort_by_key(|commit| std::cmp::Reverse(failed(commit)));
        let mut count = ReasonCounts::default();
        for commit in parts.iter().take(PARTS_MAX) {
            let Some(bytes) = self.store().get(&commit.part.name, PART_BYTES_MAX).await? else {
                continue;
            };
            // Damaged parts are skipped here: `verify` reports them.
            let _ = match self.job().part_extension.as_str() {
                "jsonl" => count.lines(&bytes),
                _ => part_in::catch_panics(|| count.parquet(&bytes)),
            };
        }
        Ok(count.into_failures(reasons_max))
    }
}

/// Numbers of rows by message.
#[derive(Default)]
struct ReasonCounts {
    /// By the message text with every number replaced by 0.
    by_pattern: HashMap<String, Reason>,
}

impl ReasonCounts {
    fn add(&mut self, status: &str, message: &str) {
        if ![RowStatus::Errored, RowStatus::InvalidOutput]
            .iter()
            .any(|failed| failed.as_str() == status)
        {
            return;
        }
        let mut pattern: Vec<String> = message
            .split(|c: char| c.is_ascii_digit())
            .map(str::to_string)
            .collect();
        pattern.dedup();
        let first = || Reason {
            message: message.to_string(),
            rows: 0,
        };
        self.by_pattern.entry(pattern.join("0")).or_insert_with(first).rows += 1;
    }

    fn parquet(&mut self, bytes: &Bytes) -> Result<(), String> {
        let to_text = |error: &dyn std::fmt::Display| error.to_string();
        let builder = part_in::open(bytes)?;
        let mask = ProjectionMask::columns(builder.parquet_schema(), ["status", "error"]);
        let reader = builder.with_projection(mask).build().map_err(|e| to_text(&e))?;
        for batch in reader {
            let batch: RecordBatch = batch.map_err(|e| to_text(&e))?;
            let column = |name: &str| batch.column_by_name(name)?.as_string_opt::<i32>();
            let (Some(status), Some(error)) = (column("status"), column("error")) else {
                return Err("has other columns".into());
            };
            for row in (0..batch.num_rows()).filter(|&row| error.is_valid(row) && status.is_valid(row)) {
                self.add(status.value(row), error.value(row));
            }
        }
        Ok(())
    }

    fn lines(&mut self, bytes: &[u8]) -> Result<(), String> {
        for line in lines(bytes)? {
            let (_, line) = line?;
            if let Some((status, message)) = line.failure() {
                self.add(status, message);
            }
        }
        Ok(())
    }

    fn into_failures(self, reasons_max: usize) -> Failures {
        let mut most: Vec<Reason> = self.by_pattern.into_values().collect();
        most.sort_by(|a, b| b.rows.cmp(&a.rows).then_with(|| a.message.cmp(&b.message)));
        let looked_at = most.iter().map(|reason| reason.rows).sum();
        most.truncate(reasons_max);
        Failures { looked_at, most }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_that_differ_in_numbers_are_one() {
        let mut count = ReasonCounts::default();
        for (status, message) in [
            ("errored", "the prompt has 900 tokens, 512 fit"),
            ("errored", "the prompt has 12345 tokens, 512 fit"),
            ("errored", "column `text` is null"),
            ("invalid_output", "no JSON"),
            ("invalid_output", "no JSON"),
            ("invalid_output", "no JSON"),
            ("errored", "another"),
            ("expired", "the job's deadline"),
        ] {
            count.add(status, message);
        }
        let found = count.into_failures(REPORTED_REASONS);
        let named: Vec<(&str, u64)> = found.most.iter().map(|one| (one.message.as_str(), one.rows)).collect();
        assert_eq!(
            named,
            [
                ("no JSON", 3),
                ("the prompt has 900 tokens, 512 fit", 2),
                ("another", 1)
            ]
        );
        assert_eq!(found.looked_at, 7);
    }
}
