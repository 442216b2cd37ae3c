//! What the records of files and batches hold.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// A file: an upload, or the results of a batch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct FileRecord {
    pub id: String,
    /// Seconds since 1970, like all times of records.
    pub created_at: i64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<i64>,
    pub bytes: u64,
    pub filename: String,
    pub purpose: String,
    /// Where the content comes from, if it is no upload.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub results: Option<ResultsOf>,
}

impl FileRecord {
    pub(super) fn has_expired(&self, now: i64) -> bool {
        self.expires_at.is_some_and(|at| at <= now)
    }
}

/// A file whose content is computed from the parts of a batch's job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ResultsOf {
    pub batch: String,
    pub kind: ResultsKind,
}

/// The two files of a batch's results.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ResultsKind {
    /// Requests with an answer.
    Output,
    /// Requests without one.
    Errors,
}

impl ResultsKind {
    pub(super) const ALL: [ResultsKind; 2] = [ResultsKind::Output, ResultsKind::Errors];

    /// As names of files have it.
    pub(super) fn name(self) -> &'static str {
        match self {
            ResultsKind::Output => "output",
            ResultsKind::Errors => "error",
        }
    }
}

/// A batch, as its client created it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct BatchRecord {
    pub id: String,
    pub created_at: i64,
    pub endpoint: String,
    pub input_file_id: String,
    /// As the client wrote it, for example `24h`.
    pub completion_window: String,
    pub window_seconds: u64,
    /// Seconds after their creation at which the files of results expire.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_expires_after: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<Map<String, Value>>,
    #[serde(default)]
    pub invalid_lines: InvalidLines,
    /// Whether the files of results exist while the batch runs.
    #[serde(default)]
    pub early_output: bool,
}

/// What becomes of lines of the input that are no requests.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum InvalidLines {
    /// The whole batch fails, before anything runs.
    #[default]
    Fail,
    /// Each is a line of the error file.
    Error,
}

impl BatchRecord {
    /// When the batch expires.
    pub(super) fn expires_at(&self) -> i64 {
        self.created_at.saturating_add_unsigned(self.window_seconds)
    }
}

/// The input was checked, and can become a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct CheckedInput {
    pub at: i64,
    /// The model that all lines name.
    pub model: String,
    /// Lines of the input, refused ones included.
    pub requests: u64,
    /// The number of answers per request (`n`), as the first line has it.
    pub samples: u32,
    /// Estimated tokens of all prompts and answers; 0 in records of older versions.
    #[serde(default)]
    pub tokens: u64,
    /// Lines that are no requests, if the batch keeps the others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<RefusedLines>,
}

/// Lines of an input that are no requests, and the size of their part of the error file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RefusedLines {
    pub lines: u64,
    pub bytes: u64,
}

/// Why a batch was refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub(super) struct BatchError {
    pub code: String,
    /// Line of the input, from 1.
    pub line: Option<u64>,
    pub message: String,
    pub param: Option<String>,
}

/// A client asked to cancel the batch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct CancelRequest {
    pub at: i64,
}

/// All rows are published, and counted by file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Results {
    pub at: i64,
    /// Generation of the job whose parts were counted.
    pub generation: u32,
    /// `None`: there is no line for this file.
    pub output: Option<ResultsFile>,
    pub errors: Option<ResultsFile>,
    pub completed: u64,
    pub failed: u64,
    pub expired: u64,
    pub cancelled: u64,
    pub usage: Usage,
}

impl Results {
    pub(super) fn file(&self, kind: ResultsKind) -> Option<&ResultsFile> {
        match kind {
            ResultsKind::Output => self.output.as_ref(),
            ResultsKind::Errors => self.errors.as_ref(),
        }
    }
}

/// The id and size of a file of results.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ResultsFile {
    pub id: String,
    pub bytes: u64,
}

/// Tokens of a batch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Usage {
    pub input_tokens: u64,
    pub cached_tokens: u64,
    pub output_tokens: u64,
    pub reasoning_tokens: u64,
}

impl Usage {
    pub(super) fn add(&mut self, other: Usage) {
        self.input_tokens += other.input_tokens;
        self.cached_tokens += other.cached_tokens;
        self.output_tokens += other.output_tokens;
        self.reasoning_tokens += other.reasoning_tokens;
    }
}

/// The batch has ended, and its files of results exist.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct EndedBatch {
    pub at: i64,
    pub status: EndStatus,
    /// Why it has failed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub errors: Vec<BatchError>,
}

/// How a batch has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum EndStatus {
    Completed,
    /// Refused before anything ran.
    Failed,
    Expired,
    Cancelled,
}

impl EndStatus {
    pub(super) const ALL: [EndStatus; 4] = [
        EndStatus::Completed,
        EndStatus::Failed,
        EndStatus::Expired,
        EndStatus::Cancelled,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            EndStatus::Completed => "completed",
            EndStatus::Failed => "failed",
            EndStatus::Expired => "expired",
            EndStatus::Cancelled => "cancelled",
        }
    }
}

/// The batch that a request to create one has made, for repeated requests.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Creation {
    pub at: i64,
    pub batch: String,
    /// SHA-256 of the request's body.
    pub body: String,
}

/// A file that is uploaded in parts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct UploadRecord {
    pub id: String,
    pub created_at: i64,
    /// The size that the client announced.
    pub bytes: u64,
    pub filename: String,
    pub purpose: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_after: Option<u64>,
}

/// How an upload in parts has ended. Created by the first request to complete or cancel it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct UploadEnd {
    pub at: i64,
    /// The file and its parts in order; `None`: the upload was cancelled.
    pub file: Option<UploadedFile>,
}

/// The file that the parts of an upload make.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct UploadedFile {
    pub id: String,
    pub parts: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_expired_file_is_told_by_its_time() {
        let file = FileRecord {
            id: "file-x".into(),
            created_at: 1,
            expires_at: Some(5),
            bytes: 2,
            filename: "x".into(),
            purpose: "batch".into(),
            results: None,
        };
        assert_eq!([4, 5, 6].map(|now| file.has_expired(now)), [false, true, true]);
    }
}
