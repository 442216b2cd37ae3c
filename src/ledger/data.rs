//! Encodes finished rows as Parquet and decodes them: the data objects that log records point to.

use std::collections::HashMap;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, Int64Array, ListArray, RecordBatch, StringArray, UInt64Array};
use arrow::compute::{concat_batches, interleave_record_batch, take_record_batch};
use bytes::Bytes;
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;

use super::record::Tally;
use super::rowset::RowSet;
use crate::dataset::part_in;
use crate::dataset::row::{CUT_OFF, RowStatus};

/// Rows per batch that is written into a part. Bounds the memory of the writer.
const PART_BATCH_ROWS: usize = 8192;

/// The `row` column of a batch: the number of each row, counted over the whole input of the job.
pub(super) fn row_numbers(batch: &RecordBatch) -> Result<Vec<u64>, String> {
    let column = int64(batch, "row")?;
    if column.null_count() > 0 {
        return Err("column `row` has nulls".into());
    }
    let row = |&row: &i64| u64::try_from(row).map_err(|_| format!("column `row` holds {row}"));
    column.values().iter().map(row).collect()
}

/// The rows of `batch` that are in `keep`, in ascending order of row.
pub(super) fn select(batch: &RecordBatch, keep: &RowSet) -> Result<RecordBatch, String> {
    let rows = row_numbers(batch)?;
    let mut kept: Vec<usize> = (0..rows.len()).filter(|&i| keep.contains(rows[i])).collect();
    kept.sort_by_key(|&i| rows[i]);
    let indices = UInt64Array::from_iter_values(kept.into_iter().map(|i| i as u64));
    take_record_batch(batch, &indices).map_err(|error| error.to_string())
}

/// The rows of `batch` that are in `selected` and did not succeed.
pub(super) fn failed_rows(batch: &RecordBatch, selected: &RowSet) -> Result<RowSet, String> {
    let rows = row_numbers(batch)?;
    let status = statuses(batch)?;
    let succeeded = RowStatus::Succeeded.as_str();
    let failed = (0..rows.len()).filter(|&i| status.is_null(i) || status.value(i) != succeeded);
    Ok(RowSet::from_rows(failed.map(|i| rows[i])).intersection(selected))
}

/// The rows of `batch` that are in `selected`, except expired and cancelled rows, which were not
/// finished when their job ended.
pub(super) fn finished_rows(batch: &RecordBatch, selected: &RowSet) -> Result<RowSet, String> {
    let rows = row_numbers(batch)?;
    let status = statuses(batch)?;
    let unfinished = [RowStatus::Expired, RowStatus::Cancelled].map(|status| status.as_str());
    let finished = (0..rows.len()).filter(|&i| status.is_null(i) || !unfinished.contains(&status.value(i)));
    Ok(RowSet::from_rows(finished.map(|i| rows[i])).intersection(selected))
}

/// The rows of `batch` that are in `selected` and have a truncated completion.
pub(super) fn truncated_rows(batch: &RecordBatch, selected: &RowSet) -> Result<RowSet, String> {
    let rows = row_numbers(batch)?;
    let is_truncated = truncated_flags(batch)?.ok_or("column `finish_reason` is missing")?;
    let truncated = (0..rows.len()).filter(|&i| is_truncated[i]);
    Ok(RowSet::from_rows(truncated.map(|i| rows[i])).intersection(selected))
}

/// For each row, whether one of its completions was truncated. `None`: the batch lacks the column
/// `finish_reason`.
fn truncated_flags(batch: &RecordBatch) -> Result<Option<Vec<bool>>, String> {
    let Some(column) = batch.column_by_name("finish_reason") else {
        return Ok(None);
    };
    let texts = |array: &dyn Array| -> Result<Vec<bool>, String> {
        let texts = array.as_any().downcast_ref::<StringArray>();
        let texts = texts.ok_or("column `finish_reason` holds no texts")?;
        Ok(texts.iter().map(|reason| reason == Some(CUT_OFF)).collect())
    };
    // With several samples per row, the column holds a list of reasons for each row.
    let Some(lists) = column.as_any().downcast_ref::<ListArray>() else {
        return texts(column).map(Some);
    };
    let any_truncated = |list: Option<ArrayRef>| -> Result<bool, String> {
        match list {
            Some(samples) => Ok(texts(&samples)?.contains(&true)),
            None => Ok(false),
        }
    };
    lists.iter().map(any_truncated).collect::<Result<_, String>>().map(Some)
}

/// Counts rows by status, and tokens, over the rows of `batch` that are in `selected`.
pub(super) fn tally(batch: &RecordBatch, selected: &RowSet) -> Result<Tally, String> {
    let rows = row_numbers(batch)?;
    let status = statuses(batch)?;
    let (prompt, cached) = (int64(batch, "prompt_tokens")?, int64(batch, "cached_tokens")?);
    let completion = int64(batch, "completion_tokens")?;
    let count_at = |column: &Int64Array, i: usize| {
        if column.is_null(i) {
            0
        } else {
            column.value(i).max(0) as u64
        }
    };
    let truncated = truncated_flags(batch)?;
    let mut out = Tally {
        truncated: truncated.is_some().then_some(0),
        ..Tally::default()
    };
    for (i, _) in rows.iter().enumerate().filter(|(_, row)| selected.contains(**row)) {
        let name = if status.is_null(i) { "" } else { status.value(i) };
        let known = RowStatus::ALL.into_iter().find(|status| status.as_str() == name);
        out.add_row(known.ok_or_else(|| format!("row {}: unknown status `{name}`", rows[i]))?);
        // Saturating, because a foreign part or data object may hold any numbers.
        out.prompt_tokens = out.prompt_tokens.saturating_add(count_at(prompt, i));
        out.cached_tokens = out.cached_tokens.saturating_add(count_at(cached, i));
        out.completion_tokens = out.completion_tokens.saturating_add(count_at(completion, i));
        let is_truncated = truncated.as_ref().is_some_and(|flags| flags[i]);
        out.truncated = out.truncated.map(|count| count + u64::from(is_truncated));
    }
    Ok(out)
}

/// `batch` as Parquet.
pub(super) fn encode(batch: &RecordBatch) -> Result<Bytes, String> {
    let text = |error: parquet::errors::ParquetError| error.to_string();
    let level = ZstdLevel::try_new(1).map_err(text)?;
    let properties = WriterProperties::builder()
        .set_compression(Compression::ZSTD(level))
        .build();
    let mut writer = ArrowWriter::try_new(Vec::new(), batch.schema(), Some(properties)).map_err(text)?;
    writer.write(batch).map_err(text)?;
    writer.into_inner().map(Bytes::from).map_err(text)
}

/// Decodes Parquet `bytes` as one batch, in bounded memory. The caller must have checked the hash
/// of `bytes`.
pub(super) fn decode(bytes: Bytes) -> Result<RecordBatch, String> {
    part_in::catch_panics(|| decode_all(bytes))
}

fn decode_all(bytes: Bytes) -> Result<RecordBatch, String> {
    let builder = part_in::open(&bytes)?;
    // The schemas of all batches must be equal. Data objects have no schema metadata, so the
    // metadata of parts is dropped.
    let schema = Arc::new(
        builder
            .schema()
            .as_ref()
            .clone()
            .with_metadata(HashMap::<String, String>::new()),
    );
    let reader = builder
        .with_batch_size(PART_BATCH_ROWS)
        .build()
        .map_err(|error| error.to_string())?;
    let without_metadata = |batch: Result<RecordBatch, arrow::error::ArrowError>| batch?.with_schema(schema.clone());
    let batches = reader
        .map(without_metadata)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| error.to_string())?;
    concat_batches(&schema, &batches).map_err(|error| error.to_string())
}

/// Merges the selected rows of the sources, in row order. Each source is a data object or a part,
/// with the rows that are taken from it. Together they must be the rows of `wanted`, each once.
///
/// The resulting batches depend only on the rows, so that two publishers make identical parts.
pub(super) fn merge(
    sources: &[(RecordBatch, RowSet)],
    wanted: std::ops::Range<u64>,
) -> Result<Vec<RecordBatch>, String> {
    let mut sources_of_rows = Vec::new();
    for (source, (batch, selected)) in sources.iter().enumerate() {
        if batch.schema() != sources[0].0.schema() {
            return Err("its data objects differ in their columns".into());
        }
        let mut seen = 0;
        for (i, row) in row_numbers(batch)?
            .into_iter()
            .enumerate()
            .filter(|(_, row)| selected.contains(*row))
        {
            sources_of_rows.push((row, source, i));
            seen += 1;
        }
        if seen != selected.len() {
            return Err(format!(
                "a data object must hold {} recorded rows, each once, but {seen} were found",
                selected.len()
            ));
        }
    }
    sources_of_rows.sort_unstable();
    if !sources_of_rows.iter().map(|&(row, _, _)| row).eq(wanted.clone()) {
        return Err(format!(
            "the recorded rows are not rows {} to {}, each once",
            wanted.start,
            wanted.end.saturating_sub(1)
        ));
    }
    let batches: Vec<&RecordBatch> = sources.iter().map(|(batch, _)| batch).collect();
    let mut out = Vec::new();
    for chunk in sources_of_rows.chunks(PART_BATCH_ROWS) {
        let indices: Vec<(usize, usize)> = chunk.iter().map(|&(_, source, i)| (source, i)).collect();
        out.push(interleave_record_batch(&batches, &indices).map_err(|error| error.to_string())?);
    }
    Ok(out)
}

/// The name of each row's status.
fn statuses(batch: &RecordBatch) -> Result<&StringArray, String> {
    let status = column(batch, "status")?.as_any().downcast_ref();
    status.ok_or_else(|| "column `status` is not utf8".into())
}

fn column<'a>(batch: &'a RecordBatch, name: &str) -> Result<&'a ArrayRef, String> {
    batch
        .column_by_name(name)
        .ok_or_else(|| format!("column `{name}` is missing"))
}

fn int64<'a>(batch: &'a RecordBatch, name: &str) -> Result<&'a Int64Array, String> {
    column(batch, name)?
        .as_any()
        .downcast_ref()
        .ok_or_else(|| format!("column `{name}` is not int64"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn rows(rows: &[i64]) -> RecordBatch {
        let texts = StringArray::from_iter(rows.iter().map(|row| (row % 3 != 0).then(|| format!("text {row}"))));
        RecordBatch::try_from_iter_with_nullable([
            (
                "row",
                Arc::new(Int64Array::from(rows.to_vec())) as Arc<dyn Array>,
                false,
            ),
            ("text", Arc::new(texts) as Arc<dyn Array>, true),
        ])
        .unwrap()
    }

    /// Rows 0 to 2, all `succeeded`, with these finish reasons. `None` omits the column.
    fn ended(reasons: Option<ArrayRef>) -> RecordBatch {
        let numbers = |n: i64| Arc::new(Int64Array::from(vec![n; 3])) as ArrayRef;
        let mut columns = vec![
            ("row", Arc::new(Int64Array::from(vec![0, 1, 2])) as ArrayRef),
            ("status", Arc::new(StringArray::from(vec!["succeeded"; 3])) as ArrayRef),
            ("prompt_tokens", numbers(5)),
            ("cached_tokens", numbers(0)),
            ("completion_tokens", numbers(2)),
        ];
        columns.extend(reasons.map(|reasons| ("finish_reason", reasons)));
        RecordBatch::try_from_iter(columns).unwrap()
    }

    #[test]
    fn a_row_with_a_truncated_sample_is_truncated() {
        let some: ArrayRef = Arc::new(StringArray::from(vec![Some("length"), Some("stop"), None]));
        let mut lists = arrow::array::ListBuilder::new(arrow::array::StringBuilder::new());
        for samples in [Some(["stop", "stop"]), Some(["stop", "length"]), None] {
            samples
                .iter()
                .flatten()
                .for_each(|reason| lists.values().append_value(reason));
            lists.append(samples.is_some());
        }
        let all = RowSet::from_range(0..3);
        for (reasons, row) in [(some, 0), (Arc::new(lists.finish()) as ArrayRef, 1)] {
            let batch = ended(Some(reasons));
            assert_eq!(truncated_rows(&batch, &all).unwrap(), RowSet::from_rows([row]));
            assert_eq!(tally(&batch, &all).unwrap().truncated, Some(1));
            // Only selected rows are counted.
            assert_eq!(tally(&batch, &RowSet::from_rows([2])).unwrap().truncated, Some(0));
        }
        assert_eq!(
            tally(&ended(None), &all).unwrap().truncated,
            None,
            "unknown is not none"
        );
        assert!(
            truncated_rows(&ended(None), &all)
                .unwrap_err()
                .contains("finish_reason")
        );
        let numbers: ArrayRef = Arc::new(Int64Array::from(vec![1, 2, 3]));
        assert!(tally(&ended(Some(numbers)), &all).is_err());
    }

    proptest! {
        /// The part gets the same batches, however the rows are distributed over data objects.
        #[test]
        fn merged_rows_depend_on_the_rows_alone(
            order in Just((10i64..40).collect::<Vec<_>>()).prop_shuffle(),
            cut in 1usize..29,
            extra in 0usize..29,
        ) {
            let (first, second) = (rows(&order[..cut]), rows(&order[extra.min(cut)..]));
            let counted_first = RowSet::from_rows(order[..cut].iter().map(|&row| row as u64));
            let counted_second = RowSet::from_rows(order[cut..].iter().map(|&row| row as u64));
            let again = decode(encode(&second).unwrap()).unwrap();
            let merged = merge(&[(first, counted_first.clone()), (again, counted_second)], 10..40).unwrap();
            prop_assert_eq!(merged, vec![rows(&(10..40).collect::<Vec<_>>())]);
            // A selected row that is absent is an error. So is a wanted row that is not selected.
            prop_assert!(merge(&[(rows(&order[1..]), counted_first.clone())], 10..40).is_err());
            prop_assert!(merge(&[(rows(&order), counted_first)], 10..40).is_err());
        }
    }
}
