//! Reads the answers of single rows back from the published parts.

use std::collections::{BTreeMap, BTreeSet};

use arrow::array::{AsArray, RecordBatch};
use arrow::datatypes::Int64Type;
use parquet::arrow::ProjectionMask;
use serde_json::Value;

use crate::dataset::part_in;
use crate::dataset::row::{RowResult, SampleResult};
use crate::dataset::value::cell;
use crate::ledger::{Ledger, LedgerError};

/// Maximum size of a part. Gristmill writes a part in a single put; a larger object is foreign.
const PART_BYTES_MAX: u64 = 1 << 30;

/// The answer to a row, with one text per sample.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RowAnswer {
    /// At least one.
    pub texts: Vec<String>,
    /// Log probabilities of each sample's tokens; empty if the job writes none.
    pub logprobs: Vec<Vec<f32>>,
    /// Probabilities of the choices in the job's order; empty if the job writes none.
    pub probabilities: Vec<f32>,
}

impl RowAnswer {
    /// The answer in a row's result; `None` if a sample failed or there is none.
    pub fn of_result(row: RowResult) -> Option<RowAnswer> {
        let mut answer = RowAnswer::default();
        if !row.samples.iter().all(SampleResult::has_completion) {
            return None;
        }
        for sample in row.samples {
            answer.texts.push(sample.text);
            answer.logprobs.push(sample.logprobs);
            answer.probabilities.extend(sample.choice_probabilities);
        }
        (!answer.texts.is_empty()).then_some(answer)
    }
}

/// A part whose answers cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum AnswersError {
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    #[error("the answers in `{part}` cannot be read: {why}; `gristmill verify` says more")]
    Part { part: String, why: String },
}

/// Reads the answers to these rows of a shard; `None` for a row that failed.
pub async fn read_part(
    ledger: &Ledger,
    shard: u32,
    rows: &BTreeSet<u64>,
) -> Result<BTreeMap<u64, Option<RowAnswer>>, AnswersError> {
    let part = ledger.keys().part(shard);
    let bytes = ledger.store().get(&part, PART_BYTES_MAX).await?;
    let bad = |why: String| AnswersError::Part {
        part: part.clone(),
        why,
    };
    let bytes = bytes.ok_or_else(|| bad("it is missing".into()))?;
    let builder = part_in::open(&bytes).map_err(bad)?;
    let columns = ["row", "completion", "logprobs", "choice_probabilities"];
    let columns = ProjectionMask::columns(builder.parquet_schema(), columns);
    let reader = builder.with_projection(columns).build();
    let mut found = BTreeMap::new();
    for batch in reader.map_err(|e| bad(e.to_string()))? {
        let batch = batch.map_err(|e| bad(e.to_string()))?;
        found.extend(answers_in_batch(&batch, rows).map_err(bad)?);
    }
    match rows.iter().find(|row| !found.contains_key(row)) {
        None => Ok(found),
        Some(row) => Err(bad(format!("row {row} is not in it"))),
    }
}

fn answers_in_batch(batch: &RecordBatch, rows: &BTreeSet<u64>) -> Result<Vec<(u64, Option<RowAnswer>)>, String> {
    let row_numbers = batch
        .column_by_name("row")
        .and_then(|column| column.as_primitive_opt::<Int64Type>())
        .ok_or("it has no column `row` of whole numbers")?;
    let value = |name: &str, index: usize| match batch.column_by_name(name) {
        Some(column) => cell(column, index),
        None => Ok(Value::Null),
    };
    let mut found = Vec::new();
    for (index, &row) in row_numbers.values().iter().enumerate() {
        let row = row as u64;
        if !rows.contains(&row) {
            continue;
        }
        let logprobs = value("logprobs", index)?;
        let answer = match value("completion", index)? {
            Value::Null => None,
            // One of the row's samples failed.
            Value::Array(texts) if texts.iter().any(Value::is_null) => None,
            // With one sample per row, each column holds the value itself instead of a list of
            // samples.
            Value::String(text) => Some((vec![text], vec![to_numbers(&logprobs)])),
            Value::Array(texts) => Some((
                texts
                    .iter()
                    .map(|text| text.as_str().unwrap_or_default().to_string())
                    .collect(),
                logprobs.as_array().into_iter().flatten().map(to_numbers).collect(),
            )),
            other => return Err(format!("its column `completion` holds {other}")),
        };
        let probabilities: Vec<f32> = match value("choice_probabilities", index)? {
            Value::Object(choices) => choices.values().map(to_number).collect(),
            _ => Vec::new(),
        };
        let answer = answer.map(|(texts, logprobs)| RowAnswer {
            texts,
            logprobs,
            probabilities,
        });
        found.push((row, answer.filter(|answer| !answer.texts.is_empty())));
    }
    Ok(found)
}

fn to_numbers(list: &Value) -> Vec<f32> {
    list.as_array().into_iter().flatten().map(to_number).collect()
}

/// Converts to a number. Any other value becomes NaN, so that the recheck's mean differences show
/// the fault.
fn to_number(value: &Value) -> f32 {
    value.as_f64().map_or(f32::NAN, |number| number as f32)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::datatypes::Schema;

    use super::*;
    use crate::dataset::output::{OutputColumns, OutputSchema};
    use crate::dataset::row::{RowStatus, SampleResult};

    fn row(row: u64, texts: &[&str]) -> RowResult {
        let sample = |text: &&str| SampleResult {
            status: RowStatus::Succeeded,
            error: None,
            text: text.to_string(),
            parsed: None,
            finish_reason: "stop",
            reasoning: None,
            reasoning_tokens: 0,
            completion_tokens: 2,
            token_ids: vec![1, 2],
            logprobs: vec![-0.1, -2.5],
            choice_probabilities: Vec::new(),
        };
        RowResult {
            row,
            status: if texts.is_empty() {
                RowStatus::Errored
            } else {
                RowStatus::Succeeded
            },
            samples: texts.iter().map(sample).collect(),
            error: None,
            prompt_tokens: 3,
            cached_tokens: 0,
        }
    }

    /// Answers read back equal the device's results, with one sample per row and with several.
    #[test]
    fn answers_come_back_as_they_were() {
        for texts in [&["one"][..], &["one", "two"]] {
            let columns = OutputColumns {
                samples: texts.len() as u32,
                thinking: false,
                token_ids: false,
                logprobs: true,
                choices: None,
                parsed: None,
                sample_status: false,
            };
            let schema = OutputSchema::new(&Schema::empty(), columns);
            let results = [row(4, texts), row(5, &[]), row(6, texts)];
            let options = arrow::array::RecordBatchOptions::new().with_row_count(Some(3));
            let carry = RecordBatch::try_new_with_options(Arc::new(Schema::empty()), Vec::new(), &options).unwrap();
            let batch = schema.to_batch(&carry, 4, &results).unwrap();
            let found = answers_in_batch(&batch, &BTreeSet::from([4, 5])).unwrap();
            let expected = [(4, RowAnswer::of_result(row(4, texts))), (5, None)];
            assert!(expected[0].1.is_some());
            assert_eq!(found, expected);
        }
    }
}
