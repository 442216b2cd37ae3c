//! Single rows of published parts: failed ones with their reasons and prompts, and answers.

use std::ops::Range;

use arrow::array::{AsArray, RecordBatch};
use arrow::datatypes::Int64Type;
use serde_json::Value;

use super::error::ApiError;
use super::hub::Hub;
use super::prompts::add_prompts;
use super::source::Viewer;
use super::view::{RowList, RowView};
use crate::dataset::row::RowStatus;
use crate::dataset::value::cell;
use crate::ledger::{Commit, Ledger};

/// Maximum number of parts that are read for one page.
const PARTS_MAX: usize = 16;
/// Maximum length of a prompt or an answer, in characters.
const TEXT_CHARS_MAX: usize = 4_000;
/// Maximum length of an id or a reason, in characters.
const LINE_CHARS_MAX: usize = 1_000;
const COLUMNS: [&str; 6] = ["row", "status", "error", "custom_id", "completion", "finish_reason"];

/// The rows of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RowKind {
    /// Errored rows, and those whose answer does not have the requested form.
    Failed,
    /// Rows with an answer.
    Answers,
}

impl RowKind {
    fn has_status(self, status: &str) -> bool {
        let kinds = match self {
            RowKind::Failed => [RowStatus::Errored, RowStatus::InvalidOutput],
            RowKind::Answers => [RowStatus::Succeeded, RowStatus::InvalidOutput],
        };
        kinds.iter().any(|kind| kind.as_str() == status)
    }

    /// Number of such rows in a part.
    fn count(self, commit: &Commit) -> u64 {
        match self {
            RowKind::Failed => commit.tally.errored + commit.tally.invalid_output,
            RowKind::Answers => commit.tally.succeeded + commit.tally.invalid_output,
        }
    }
}

/// A page of rows, as a client asks for it.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowQuery {
    pub kind: RowKind,
    pub limit: usize,
    /// The last row of the page before.
    pub after: Option<u64>,
}

impl Hub {
    /// A page of a job's published rows, in the order of the input.
    pub(super) async fn rows(&self, viewer: &Viewer, id: &str, query: RowQuery) -> Result<RowList, ApiError> {
        let mut list = RowList {
            object: "list",
            data: Vec::new(),
            has_more: false,
        };
        let Some((ledger, commits)) = self.job_parts(viewer, id).await? else {
            return Ok(list);
        };
        // The semaphore is never closed.
        let _permit = self.part_reads.acquire().await;
        list.has_more = self.scan_parts(&ledger, &commits, query, &mut list.data).await?;
        if !self.shows_prompts {
            list.data.iter_mut().for_each(RowView::hide);
        } else if self.source.may_read_inputs(viewer, &ledger) {
            add_prompts(&ledger, &mut list.data).await;
        }
        Ok(list)
    }

    /// Collects rows until the page is full. Returns whether there are more.
    async fn scan_parts(
        &self,
        ledger: &Ledger,
        commits: &[Commit],
        query: RowQuery,
        rows: &mut Vec<RowView>,
    ) -> Result<bool, ApiError> {
        let first_wanted = query.after.map_or(0, |after| after.saturating_add(1));
        let mut parts_read = 0;
        for commit in commits.iter().filter(|commit| query.kind.count(commit) > 0) {
            let shard = ledger.job().shard(commit.shard)?;
            let range = shard.first_row..shard.first_row + shard.rows;
            if range.end <= first_wanted {
                continue;
            }
            if parts_read >= PARTS_MAX && !rows.is_empty() {
                return Ok(true);
            }
            parts_read += 1;
            let scan = RowScan {
                kind: query.kind,
                wanted: first_wanted.max(range.start)..range.end,
                // One more tells whether there are more.
                left: query.limit + 1 - rows.len(),
                rows: Vec::new(),
            };
            match ledger.scan_part(commit, &COLUMNS, scan, RowScan::add).await? {
                Ok(scan) => rows.extend(scan.rows),
                // Others are shown; `verify` reports it.
                Err(why) => tracing::warn!("rows of `{}` cannot be shown: {why}", commit.part.name),
            }
            if rows.len() > query.limit {
                rows.truncate(query.limit);
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// Collects rows of a part.
struct RowScan {
    kind: RowKind,
    wanted: Range<u64>,
    left: usize,
    rows: Vec<RowView>,
}

impl RowScan {
    /// Adds the rows of a batch. Returns whether more are wanted.
    fn add(&mut self, batch: &RecordBatch) -> Result<bool, String> {
        let numbers = batch.column_by_name("row");
        let numbers = numbers.and_then(|column| column.as_primitive_opt::<Int64Type>());
        let numbers = numbers.ok_or("it has no column `row` of whole numbers")?;
        let statuses = batch.column_by_name("status");
        let statuses = statuses.and_then(|column| column.as_string_opt::<i32>());
        let statuses = statuses.ok_or("it has no column `status` of texts")?;
        for index in 0..batch.num_rows() {
            if self.rows.len() >= self.left {
                return Ok(false);
            }
            let (row, status) = (numbers.value(index) as u64, statuses.value(index));
            if self.wanted.contains(&row) && self.kind.has_status(status) {
                self.rows.push(view_of(batch, index, row, status)?);
            }
        }
        Ok(true)
    }
}

fn view_of(batch: &RecordBatch, index: usize, row: u64, status: &str) -> Result<RowView, String> {
    let text = |name: &str| match batch.column_by_name(name) {
        Some(column) => cell(column, index).map(text_of),
        None => Ok(None),
    };
    let line = |name: &str| Ok::<_, String>(text(name)?.map(|text| cut(text, LINE_CHARS_MAX).0));
    let answer = text("completion")?.map(|text| cut(text, TEXT_CHARS_MAX));
    let (answer, answer_cut) = answer.map_or((None, false), |(text, is_cut)| (Some(text), is_cut));
    Ok(RowView {
        row,
        custom_id: line("custom_id")?,
        status: status.to_string(),
        reason: line("error")?,
        prompt: None,
        prompt_cut: false,
        answer,
        answer_cut,
        finish_reason: line("finish_reason")?,
        hidden: false,
    })
}

/// The text of a cell. Several samples are shown one after the other.
fn text_of(value: Value) -> Option<String> {
    match value {
        Value::Null => None,
        Value::String(text) => Some(text),
        Value::Array(samples) => {
            let texts: Vec<String> = samples.into_iter().filter_map(text_of).collect();
            (!texts.is_empty()).then(|| texts.join("\n\n"))
        }
        other => Some(other.to_string()),
    }
}

/// Cuts a text after `chars_max` characters. Returns whether something is cut off.
fn cut(mut text: String, chars_max: usize) -> (String, bool) {
    match text.char_indices().nth(chars_max) {
        Some((end, _)) => {
            text.truncate(end);
            (text, true)
        }
        None => (text, false),
    }
}

impl RowView {
    /// Sets the prompt, cut to its maximum length.
    pub(super) fn set_prompt(&mut self, text: String) {
        let (text, is_cut) = cut(text, TEXT_CHARS_MAX);
        (self.prompt, self.prompt_cut) = (Some(text), is_cut);
    }

    /// Hides prompt and answer. The reason may quote the prompt, so it goes, too.
    fn hide(&mut self) {
        *self = RowView {
            reason: None,
            prompt: None,
            answer: None,
            answer_cut: false,
            hidden: true,
            ..self.clone()
        };
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{ArrayRef, Int64Array, ListBuilder, StringArray, StringBuilder};

    use super::*;

    fn batch() -> RecordBatch {
        let texts = |values: [Option<&str>; 4]| Arc::new(StringArray::from(values.to_vec())) as ArrayRef;
        let mut samples = ListBuilder::new(StringBuilder::new());
        for list in [
            Some(vec![Some("a"), Some("b")]),
            None,
            Some(vec![None]),
            Some(vec![Some("ü")]),
        ] {
            match list {
                Some(list) => samples.append_value(list),
                None => samples.append_null(),
            }
        }
        let status = ["succeeded", "errored", "cancelled", "invalid_output"].map(Some);
        RecordBatch::try_from_iter_with_nullable([
            ("row", Arc::new(Int64Array::from(vec![4, 5, 6, 7])) as ArrayRef, true),
            ("status", texts(status), true),
            (
                "error",
                texts([None, Some("too long"), Some("stopped"), Some("no JSON")]),
                true,
            ),
            ("completion", Arc::new(samples.finish()) as ArrayRef, true),
        ])
        .unwrap()
    }

    fn scan(kind: RowKind, wanted: Range<u64>, left: usize) -> (Vec<RowView>, bool) {
        let rows = Vec::new();
        let mut scan = RowScan {
            kind,
            wanted,
            left,
            rows,
        };
        let goes_on = scan.add(&batch()).unwrap();
        (scan.rows, goes_on)
    }

    #[test]
    fn rows_are_those_asked_for() {
        let numbers = |kind, wanted, left| scan(kind, wanted, left).0.iter().map(|row| row.row).collect::<Vec<_>>();
        assert_eq!(numbers(RowKind::Failed, 0..9, 9), [5, 7]);
        assert_eq!(numbers(RowKind::Answers, 0..9, 9), [4, 7]);
        assert_eq!(numbers(RowKind::Failed, 6..9, 9), [7]);
        assert_eq!(numbers(RowKind::Failed, 0..9, 1), [5]);
        assert!(!scan(RowKind::Failed, 0..9, 1).1 && scan(RowKind::Failed, 0..9, 3).1);
        let (rows, _) = scan(RowKind::Answers, 0..9, 9);
        assert_eq!(
            (rows[0].answer.as_deref(), rows[1].answer.as_deref()),
            (Some("a\n\nb"), Some("ü"))
        );
        assert_eq!(
            (rows[1].reason.as_deref(), rows[0].custom_id.as_deref()),
            (Some("no JSON"), None)
        );
        assert_eq!(scan(RowKind::Failed, 0..9, 9).0[0].answer, None);
    }

    #[test]
    fn hidden_rows_keep_no_text() {
        let (mut rows, _) = scan(RowKind::Answers, 7..8, 9);
        rows[0].set_prompt("secret".into());
        rows[0].hide();
        let json = serde_json::to_string(&rows[0]).unwrap();
        assert!(json.contains("\"hidden\":true") && json.contains("\"row\":7"), "{json}");
        for text in ["secret", "ü", "no JSON"] {
            assert!(!json.contains(text), "{json}");
        }
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        assert_eq!(cut("üü".into(), 2), ("üü".into(), false));
        assert_eq!(cut("üüü".into(), 2), ("üü".into(), true));
    }
}
