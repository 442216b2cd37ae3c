//! An input row, and the result of a row with its status.

use arrow::array::RecordBatch;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Result status of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RowStatus {
    Succeeded,
    /// The model answered, but not in the requested form; the raw text is kept.
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

    /// The status's name in outputs, reports and records.
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

/// Error prefix of a row that was closed after its input had become unreadable, so that its carried
/// columns are null. The reason follows.
pub const WITHOUT_COLUMNS: &str = "its columns are not there: ";

/// The `finish_reason` of a completion that `max_tokens` or the context length cut off.
pub const CUT_OFF: &str = "length";
/// The `finish_reason` of a completion that ended by itself.
pub const WHOLE: &str = "stop";

/// One sample of a row's completion.
#[derive(Debug, Clone, PartialEq)]
pub struct SampleResult {
    /// `Succeeded` or `InvalidOutput`; `Errored` if the sample has no completion.
    pub status: RowStatus,
    /// The reason in one line, for every status except `succeeded`.
    pub error: Option<String>,
    /// The answer.
    pub text: String,
    /// The thought before the answer, if any.
    pub reasoning: Option<String>,
    pub reasoning_tokens: u32,
    /// The answer in the requested form: the choice, the JSON as compact text, the regex match.
    /// `None` if the answer does not fit, or if no form was requested.
    pub parsed: Option<String>,
    pub finish_reason: &'static str,
    /// Tokens of thought and answer together.
    pub completion_tokens: u32,
    pub token_ids: Vec<u32>,
    /// Natural logarithm, one per entry of `token_ids`; empty if not requested.
    pub logprobs: Vec<f32>,
    /// One per choice; empty if not requested.
    pub choice_probabilities: Vec<f32>,
}

/// A finished row, ready to be logged. Logged results are also the record of a shard's progress,
/// since each result names its row.
#[derive(Debug, Clone, PartialEq)]
pub struct RowResult {
    /// 0-based over the job's whole input.
    pub row: u64,
    pub status: RowStatus,
    /// Empty if there is no completion, else one per requested sample.
    pub samples: Vec<SampleResult>,
    /// The reason in one line, for every status except `succeeded`.
    pub error: Option<String>,
    pub prompt_tokens: u32,
    pub cached_tokens: u32,
}

impl SampleResult {
    /// A sample without a completion, with the reason.
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

    pub fn has_completion(&self) -> bool {
        self.status != RowStatus::Errored
    }
}

impl RowResult {
    /// Whether a completion of the row was cut off.
    pub fn is_truncated(&self) -> bool {
        self.samples.iter().any(|sample| sample.finish_reason == CUT_OFF)
    }
}

/// An input row before rendering.
#[derive(Debug, Clone, PartialEq)]
pub struct InputRow {
    /// 0-based over the job's whole input.
    pub row: u64,
    /// The columns that the prompt uses, or the reason in one line why this row is unreadable. An
    /// unreadable row ends `errored`; its neighbours are unaffected.
    pub fields: Result<Map<String, Value>, String>,
}

/// The rows of one shard.
#[derive(Debug, Clone)]
pub struct ShardRows {
    /// Row number of the first entry of `rows`, 0-based over the job's whole input.
    pub first_row: u64,
    pub rows: Vec<InputRow>,
    /// The carried columns, one row per entry of `rows` (null where the row is unreadable).
    pub carry: RecordBatch,
}
