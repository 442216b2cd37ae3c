//! A row as it comes in, and its outcome: the same words everywhere.

use arrow::array::RecordBatch;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// What became of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RowStatus {
    Succeeded,
    /// The model answered, but not as asked; its raw text is kept.
    InvalidOutput,
    Errored,
    Expired,
    Cancelled,
}

impl RowStatus {
    /// All statuses, in the order in which reports list them.
    pub const ALL: [RowStatus; 5] = [
        RowStatus::Succeeded,
        RowStatus::InvalidOutput,
        RowStatus::Errored,
        RowStatus::Expired,
        RowStatus::Cancelled,
    ];

    /// The word in outputs, reports and records.
    pub fn as_str(self) -> &'static str {
        match self {
            RowStatus::Succeeded => "succeeded",
            RowStatus::InvalidOutput => "invalid_output",
            RowStatus::Errored => "errored",
            RowStatus::Expired => "expired",
            RowStatus::Cancelled => "cancelled",
        }
    }
}

/// In the error of a row that was closed when nobody could read its input any more: its carried columns are null, and why.
pub const WITHOUT_COLUMNS: &str = "its columns are not there: ";

/// The `finish_reason` of a completion that `max_tokens` or the context cut off.
pub const CUT_OFF: &str = "length";

/// One sample of a row's completion.
#[derive(Debug, Clone, PartialEq)]
pub struct SampleResult {
    /// `Succeeded`, `InvalidOutput`, or `Errored`: then there is nothing of it.
    pub status: RowStatus,
    /// One line that says why, for every status but `succeeded`.
    pub error: Option<String>,
    /// The answer.
    pub text: String,
    /// The thought before it; `None`: there was none.
    pub reasoning: Option<String>,
    pub reasoning_tokens: u32,
    /// The answer as asked for: the choice, the JSON as compact text, the regex match; `None` where it does not fit
    /// or nothing was asked.
    pub parsed: Option<String>,
    pub finish_reason: &'static str,
    /// Of thought and answer.
    pub completion_tokens: u32,
    pub token_ids: Vec<u32>,
    /// Natural logarithm, one per entry of `token_ids`; empty where not asked for.
    pub logprobs: Vec<f32>,
    /// One per choice; empty where not asked for.
    pub choice_probabilities: Vec<f32>,
}

/// A finished row, ready to be logged. Progress travels with it: it names the row that it covers.
#[derive(Debug, Clone, PartialEq)]
pub struct RowResult {
    /// 0-based over the job's whole input.
    pub row: u64,
    pub status: RowStatus,
    /// Empty where there is no completion, else one per asked-for sample.
    pub samples: Vec<SampleResult>,
    /// One line that says why, for every status but `succeeded`.
    pub error: Option<String>,
    pub prompt_tokens: u32,
    pub cached_tokens: u32,
}

impl SampleResult {
    /// One that the model has not answered, and why.
    pub fn failed(error: String) -> SampleResult {
        SampleResult {
            status: RowStatus::Errored,
            error: Some(error),
            text: String::new(),
            reasoning: None,
            reasoning_tokens: 0,
            parsed: None,
            finish_reason: "",
            completion_tokens: 0,
            token_ids: Vec::new(),
            logprobs: Vec::new(),
            choice_probabilities: Vec::new(),
        }
    }

    /// Whether the model has answered at all.
    pub fn is_there(&self) -> bool {
        self.status != RowStatus::Errored
    }
}

impl RowResult {
    /// Whether a completion of it was cut off.
    pub fn is_truncated(&self) -> bool {
        self.samples.iter().any(|sample| sample.finish_reason == CUT_OFF)
    }
}

/// One row as it is read, before it is rendered.
#[derive(Debug, Clone, PartialEq)]
pub struct InputRow {
    /// 0-based over the job's whole input.
    pub row: u64,
    /// The columns that the prompt uses; `Err`: this row cannot be read, one line why. The row ends `errored`, its
    /// neighbours live.
    pub fields: Result<Map<String, Value>, String>,
}

/// The rows of one shard.
#[derive(Debug, Clone)]
pub struct ShardRows {
    /// Of the first entry of `rows`, 0-based over the job's whole input.
    pub first_row: u64,
    pub rows: Vec<InputRow>,
    /// The carried columns, one row per entry of `rows` (null where the row cannot be read).
    pub carry: RecordBatch,
}
