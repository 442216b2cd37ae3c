//! Files and batches as the API shows them.

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};

use super::id;
use super::record::{BatchError, BatchRecord, EndStatus, FileRecord, ResultsKind, Usage};
use super::records::Stages;
use crate::ledger::status::{State, Status};

/// A file, in OpenAI's form.
#[derive(Debug, Clone, Serialize, JsonSchema)]
pub(super) struct FileView {
    pub id: String,
    object: &'static str,
    bytes: u64,
    created_at: i64,
    expires_at: Option<i64>,
    filename: String,
    pub purpose: String,
    /// Deprecated by OpenAI, but its types require it.
    status: &'static str,
    status_details: Option<String>,
}

impl FileView {
    pub(super) fn new(file: FileRecord) -> FileView {
        FileView {
            id: file.id,
            object: "file",
            bytes: file.bytes,
            created_at: file.created_at,
            expires_at: file.expires_at,
            filename: file.filename,
            purpose: file.purpose,
            status: "processed",
            status_details: None,
        }
    }
}

/// A page of a list, in OpenAI's form.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct ListView<T> {
    object: &'static str,
    data: Vec<T>,
    first_id: Option<String>,
    last_id: Option<String>,
    has_more: bool,
}

impl<T> ListView<T> {
    pub(super) fn new(data: Vec<T>, id: impl Fn(&T) -> &str, has_more: bool) -> ListView<T> {
        ListView {
            object: "list",
            first_id: data.first().map(|item| id(item).to_string()),
            last_id: data.last().map(|item| id(item).to_string()),
            data,
            has_more,
        }
    }
}

/// A model on offer, in OpenAI's form.
#[derive(Debug, Clone, Serialize, JsonSchema)]
pub(super) struct ModelView {
    pub id: String,
    object: &'static str,
    /// When the service started.
    created: i64,
    owned_by: &'static str,
}

impl ModelView {
    pub(super) fn new(name: &str, created: i64) -> ModelView {
        ModelView {
            id: name.to_string(),
            object: "model",
            created,
            owned_by: "gristmill",
        }
    }
}

/// The response to a deletion, in OpenAI's form.
#[derive(Debug, Clone, Serialize, JsonSchema)]
pub(super) struct DeletedView {
    id: String,
    object: &'static str,
    deleted: bool,
}

impl DeletedView {
    pub(super) fn file(id: String) -> DeletedView {
        DeletedView {
            id,
            object: "file",
            deleted: true,
        }
    }
}

/// An error, in OpenAI's form.
#[derive(Debug, Clone, Serialize, JsonSchema)]
pub(super) struct ErrorView {
    pub error: ErrorBody,
}

#[derive(Debug, Clone, Serialize, JsonSchema)]
pub(super) struct ErrorBody {
    pub message: String,
    #[serde(rename = "type")]
    pub kind: &'static str,
    pub param: Option<String>,
    pub code: Option<&'static str>,
}

/// State of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum BatchStatus {
    Validating,
    Failed,
    InProgress,
    Finalizing,
    Completed,
    Expired,
    Cancelling,
    Cancelled,
}

/// A batch, in OpenAI's form.
#[derive(Debug, Clone, Serialize, JsonSchema)]
pub(super) struct BatchView {
    pub id: String,
    object: &'static str,
    endpoint: String,
    model: Option<String>,
    errors: Option<ErrorsView>,
    input_file_id: String,
    completion_window: String,
    status: BatchStatus,
    output_file_id: Option<String>,
    error_file_id: Option<String>,
    created_at: i64,
    in_progress_at: Option<i64>,
    expires_at: i64,
    finalizing_at: Option<i64>,
    completed_at: Option<i64>,
    failed_at: Option<i64>,
    expired_at: Option<i64>,
    cancelling_at: Option<i64>,
    cancelled_at: Option<i64>,
    request_counts: RequestCounts,
    metadata: Option<Map<String, Value>>,
    usage: Option<UsageView>,
}

#[derive(Debug, Clone, Serialize, JsonSchema)]
struct ErrorsView {
    object: &'static str,
    data: Vec<BatchError>,
}

#[derive(Debug, Clone, Copy, Default, Serialize, JsonSchema)]
struct RequestCounts {
    total: u64,
    completed: u64,
    failed: u64,
}

#[derive(Debug, Clone, Copy, Serialize, JsonSchema)]
struct UsageView {
    input_tokens: u64,
    input_tokens_details: InputTokens,
    output_tokens: u64,
    output_tokens_details: OutputTokens,
    total_tokens: u64,
}

#[derive(Debug, Clone, Copy, Serialize, JsonSchema)]
struct InputTokens {
    cached_tokens: u64,
}

#[derive(Debug, Clone, Copy, Serialize, JsonSchema)]
struct OutputTokens {
    reasoning_tokens: u64,
}

impl From<Usage> for UsageView {
    fn from(usage: Usage) -> UsageView {
        UsageView {
            input_tokens: usage.input_tokens,
            input_tokens_details: InputTokens {
                cached_tokens: usage.cached_tokens,
            },
            output_tokens: usage.output_tokens,
            output_tokens_details: OutputTokens {
                reasoning_tokens: usage.reasoning_tokens,
            },
            total_tokens: usage.input_tokens + usage.output_tokens,
        }
    }
}

impl BatchView {
    /// `job`: the creation time and the progress of the batch's job, if it exists.
    pub(super) fn new(record: &BatchRecord, stages: &Stages, job: Option<&(i64, Status)>) -> BatchView {
        let status = batch_status(stages, job.map(|(_, status)| status));
        let ended_as = |end: EndStatus| {
            stages
                .ended
                .as_ref()
                .filter(|ended| ended.status == end)
                .map(|ended| ended.at)
        };
        let checked = stages.checked.as_ref();
        let failed = stages.ended.as_ref().filter(|ended| ended.status == EndStatus::Failed);
        BatchView {
            id: record.id.clone(),
            object: "batch",
            endpoint: record.endpoint.clone(),
            model: checked.map(|checked| checked.model.clone()),
            errors: failed.map(|failed| ErrorsView {
                object: "list",
                data: failed.errors.clone(),
            }),
            input_file_id: record.input_file_id.clone(),
            completion_window: record.completion_window.clone(),
            status,
            output_file_id: results_file(record, stages, job.is_some(), ResultsKind::Output),
            error_file_id: results_file(record, stages, job.is_some(), ResultsKind::Errors),
            created_at: record.created_at,
            in_progress_at: checked.map(|checked| job.map_or(checked.at, |(created, _)| *created)),
            expires_at: record.expires_at(),
            finalizing_at: stages.results.as_ref().map(|results| results.at),
            completed_at: ended_as(EndStatus::Completed),
            failed_at: failed.map(|failed| failed.at),
            expired_at: ended_as(EndStatus::Expired),
            cancelling_at: stages.cancel.as_ref().map(|cancel| cancel.at),
            cancelled_at: ended_as(EndStatus::Cancelled),
            request_counts: request_counts(stages, job.map(|(_, status)| status)),
            metadata: record.metadata.clone(),
            usage: stages.results.as_ref().map(|results| results.usage.into()),
        }
    }

    /// Whether the batch never changes again.
    pub(super) fn has_ended(&self) -> bool {
        use BatchStatus::{Cancelled, Completed, Expired, Failed};
        matches!(self.status, Completed | Failed | Expired | Cancelled)
    }

    /// Whether a request to cancel it has an effect.
    pub(super) fn can_be_cancelled(&self) -> bool {
        use BatchStatus::{InProgress, Validating};
        matches!(self.status, Validating | InProgress)
    }

    pub(super) fn status_name(&self) -> String {
        let name = serde_json::to_value(self.status).ok();
        name.and_then(|name| name.as_str().map(str::to_string))
            .unwrap_or_default()
    }
}

/// The id of a file of results, once it exists: at the batch's end, or early with its job.
fn results_file(record: &BatchRecord, stages: &Stages, has_job: bool, kind: ResultsKind) -> Option<String> {
    if stages.ended.is_none() {
        return (record.early_output && has_job).then(|| id::file_of_batch(&record.id, kind.name()));
    }
    let file = stages.results.as_ref()?.file(kind)?;
    Some(file.id.clone())
}

fn batch_status(stages: &Stages, job: Option<&Status>) -> BatchStatus {
    if let Some(ended) = &stages.ended {
        return match ended.status {
            EndStatus::Completed => BatchStatus::Completed,
            EndStatus::Failed => BatchStatus::Failed,
            EndStatus::Expired => BatchStatus::Expired,
            EndStatus::Cancelled => BatchStatus::Cancelled,
        };
    }
    let is_published = stages.results.is_some() || job.is_some_and(|job| job.state == State::Finished);
    match (&stages.cancel, job) {
        (Some(_), _) => BatchStatus::Cancelling,
        (None, _) if is_published => BatchStatus::Finalizing,
        (None, Some(_)) => BatchStatus::InProgress,
        (None, None) => BatchStatus::Validating,
    }
}

fn request_counts(stages: &Stages, job: Option<&Status>) -> RequestCounts {
    let checked = stages.checked.as_ref();
    let total = checked.map_or(0, |checked| checked.requests);
    let refused = checked
        .and_then(|checked| checked.refused)
        .map_or(0, |refused| refused.lines);
    match (&stages.results, job) {
        (Some(results), _) => RequestCounts {
            total,
            completed: results.completed,
            failed: results.failed + results.expired + results.cancelled,
        },
        (None, Some(job)) => RequestCounts {
            total,
            completed: job.tally.succeeded + job.tally.invalid_output,
            failed: job.tally.errored + job.tally.expired + job.tally.cancelled + refused,
        },
        (None, None) => RequestCounts {
            total,
            ..RequestCounts::default()
        },
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::record::{CancelRequest, CheckedInput, EndedBatch, InvalidLines, Results, ResultsFile};
    use super::*;

    pub(in crate::serve) fn record() -> BatchRecord {
        BatchRecord {
            id: "batch_x".into(),
            created_at: 100,
            endpoint: "/v1/chat/completions".into(),
            input_file_id: "file-x".into(),
            completion_window: "24h".into(),
            window_seconds: 86_400,
            output_expires_after: None,
            metadata: None,
            invalid_lines: InvalidLines::Fail,
            early_output: false,
        }
    }

    fn results() -> Results {
        Results {
            at: 300,
            generation: 0,
            output: Some(ResultsFile {
                id: "file-o".into(),
                bytes: 9,
            }),
            errors: None,
            completed: 2,
            failed: 0,
            expired: 1,
            cancelled: 1,
            usage: Usage {
                input_tokens: 7,
                output_tokens: 3,
                ..Usage::default()
            },
        }
    }

    #[test]
    fn the_records_give_the_state() {
        let mut stages = Stages::default();
        let status = |stages: &Stages| BatchView::new(&record(), stages, None).status_name();
        assert_eq!(status(&stages), "validating");
        stages.checked = Some(CheckedInput {
            at: 200,
            model: "demo".into(),
            requests: 4,
            samples: 1,
            refused: None,
            tokens: 0,
        });
        stages.cancel = Some(CancelRequest { at: 250 });
        assert_eq!(status(&stages), "cancelling");
        stages.results = Some(results());
        let before = BatchView::new(&record(), &stages, None);
        assert_eq!(before.output_file_id, None, "the file's record may not exist yet");
        stages.ended = Some(EndedBatch {
            at: 400,
            status: EndStatus::Cancelled,
            errors: Vec::new(),
        });
        let view = BatchView::new(&record(), &stages, None);
        assert_eq!(
            (view.status_name().as_str(), view.cancelled_at),
            ("cancelled", Some(400))
        );
        assert_eq!(view.output_file_id.as_deref(), Some("file-o"));
        assert_eq!((view.request_counts.completed, view.request_counts.failed), (2, 2));
        assert_eq!(view.usage.unwrap().total_tokens, 10);
        assert_eq!((view.completed_at, view.expires_at), (None, 86_500));
        assert!(view.has_ended() && !view.can_be_cancelled());
    }

    #[test]
    fn a_failed_batch_lists_its_errors() {
        let error = BatchError {
            code: "empty_file".into(),
            line: None,
            message: "no request".into(),
            param: None,
        };
        let stages = Stages {
            ended: Some(EndedBatch {
                at: 150,
                status: EndStatus::Failed,
                errors: vec![error],
            }),
            ..Stages::default()
        };
        let view = serde_json::to_value(BatchView::new(&record(), &stages, None)).unwrap();
        assert_eq!(view["status"], "failed");
        assert_eq!(view["failed_at"], 150);
        assert_eq!(view["errors"]["data"][0]["code"], "empty_file");
    }
}
