//! Counts how often answers equal a gold column, from the published parts.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch, StringArray};
use arrow::compute::cast;
use arrow::datatypes::DataType;
use parquet::arrow::ProjectionMask;

use crate::dataset::answer::json::Answer;
use crate::dataset::part_in;
use crate::ledger::{Ledger, LedgerError};
use crate::report::summary::Agreement;

/// Maximum size of a part. Gristmill writes a part in a single put; a larger object is foreign.
const PART_BYTES_MAX: u64 = 1 << 30;

/// A part whose answers and gold column are not comparable.
#[derive(Debug, thiserror::Error)]
pub enum AgreementError {
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    #[error("cannot compare `{part}` with its gold column `{gold}`: {why}")]
    Part { part: String, gold: String, why: String },
}

/// Compares the carried column `gold` with `parsed`, or with `completion` in rows without `parsed`;
/// both are compared as text.
///
/// Rows without a gold value are not counted. Rows without an answer count as different.
pub async fn of_parts(ledger: &Ledger, gold: &str) -> Result<Agreement, AgreementError> {
    let mut sum = Agreement::default();
    for shard in 0..ledger.job().shards.len() as u32 {
        let part = ledger.keys().part(shard);
        let bytes = ledger.store().get(&part, PART_BYTES_MAX).await?;
        let bad = |why: String| AgreementError::Part {
            part: part.clone(),
            gold: gold.to_string(),
            why,
        };
        let bytes = bytes.ok_or_else(|| bad("it is missing".into()))?;
        let builder = part_in::open(&bytes).map_err(bad)?;
        let columns = ProjectionMask::columns(builder.parquet_schema(), ["completion", "parsed", gold]);
        let reader = builder
            .with_projection(columns)
            .build()
            .map_err(|e| bad(e.to_string()))?;
        for batch in reader {
            let batch = batch.map_err(|e| bad(e.to_string()))?;
            let counted = compare(&batch, gold).map_err(bad)?;
            sum.equal += counted.equal;
            sum.rows += counted.rows;
            sum.unanswered += counted.unanswered;
        }
    }
    Ok(sum)
}

fn compare(batch: &RecordBatch, gold: &str) -> Result<Agreement, String> {
    let text = |name: &str| {
        let column = batch
            .column_by_name(name)
            .ok_or_else(|| format!("it has no column `{name}`"))?;
        cast(column, &DataType::Utf8).map_err(|e| e.to_string())
    };
    let is_fraction = batch
        .column_by_name(gold)
        .is_some_and(|gold| gold.data_type().is_floating());
    let (completion, gold) = (text("completion")?, text(gold)?);
    let parsed = match batch.column_by_name("parsed") {
        // Objects, lists and fractions are compared as the answer's compact JSON, which has `3`
        // where Arrow would write `3.0`.
        Some(typed) if typed.data_type().is_nested() || typed.data_type().is_floating() && !is_fraction => {
            compact_answers(completion.as_string::<i32>(), typed)
        }
        _ => text("parsed")?,
    };
    let (completion, parsed, gold) = (
        completion.as_string::<i32>(),
        parsed.as_string::<i32>(),
        gold.as_string::<i32>(),
    );
    let mut sum = Agreement::default();
    for row in (0..batch.num_rows()).filter(|&row| gold.is_valid(row)) {
        let answer = [parsed, completion].into_iter().find(|answers| answers.is_valid(row));
        sum.rows += 1;
        sum.unanswered += u64::from(answer.is_none());
        sum.equal += u64::from(answer.is_some_and(|answers| answers.value(row) == gold.value(row)));
    }
    Ok(sum)
}

/// The answers as compact JSON; null in rows without a value of `parsed`.
fn compact_answers(completion: &StringArray, parsed: &ArrayRef) -> ArrayRef {
    let of = |row: usize| {
        let answer = parsed.is_valid(row).then(|| Answer::parse(completion.value(row)));
        answer?.ok().map(|answer| answer.compact())
    };
    Arc::new((0..completion.len()).map(of).collect::<StringArray>())
}

#[cfg(test)]
mod tests {
    use arrow::array::{Float64Array, Int64Array, StructArray};
    use arrow::datatypes::Field;

    use super::*;

    #[test]
    fn parsed_answers_are_compared_and_missing_ones_are_different() {
        let counts = |equal, rows, unanswered| Agreement {
            equal,
            rows,
            unanswered,
        };
        let column = |values: [Option<&str>; 4]| Arc::new(StringArray::from(values.to_vec())) as ArrayRef;
        let batch = RecordBatch::try_from_iter_with_nullable([
            ("completion", column([Some(" a"), Some("b"), None, Some("x")]), true),
            ("parsed", column([Some("a"), None, None, Some("x")]), true),
            ("gold", column([Some("a"), Some("b"), Some("c"), None]), true),
        ])
        .unwrap();
        assert_eq!(compare(&batch, "gold").unwrap(), counts(2, 3, 1));
        assert!(compare(&batch, "other").unwrap_err().contains("other"));
        let answers = Arc::new(Int64Array::from(vec![Some(1), None, None, Some(2)])) as ArrayRef;
        let objects = StructArray::from(vec![(
            Arc::new(Field::new("a", DataType::Int64, true)),
            answers.clone(),
        )]);
        for (parsed, completion, gold) in [
            (Arc::new(objects) as ArrayRef, "{\"a\": 1}", "{\"a\":1}"),
            (answers, "1 ", "1"),
            (
                Arc::new(Float64Array::from(vec![Some(3.0), None, None, Some(2.5)])),
                "3",
                "3",
            ),
        ] {
            let batch = RecordBatch::try_from_iter_with_nullable([
                (
                    "completion",
                    column([Some(completion), Some("x"), None, Some("x")]),
                    true,
                ),
                ("parsed", parsed, true),
                ("gold", column([Some(gold), Some("b"), Some("c"), None]), true),
            ])
            .unwrap();
            assert_eq!(compare(&batch, "gold").unwrap(), counts(1, 3, 1));
        }
    }
}
