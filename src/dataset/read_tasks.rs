//! The tasks that a shard is read in, and how they are split: by row group, by memory, and for a
//! sample by spans of nearby rows.

use std::collections::BTreeMap;
use std::ops::Range;

use arrow::array::{RecordBatch, RecordBatchOptions, UInt64Array};
use arrow::compute::take_record_batch;

use super::DatasetError;
use super::lines::reader::LinesPosition;
use super::pieces::SegmentRows;
use super::plan::Segment;
use super::row_memory::{PIECE_BYTES_MAX, ROW_BYTES_MAX};
use super::table::TableFile;

/// Maximum number of rows in one span: drawn rows of a sample, and the rows between them.
pub(super) const SPAN_ROWS_MAX: u64 = 1 << 16;

/// A part of the shard that is still to be read. `segment` is an index into the shard's segments,
/// `rows` is a row range of the segment's file.
#[derive(Debug, Clone)]
pub(super) enum Task {
    Lines(LinesTask),
    /// Rows of a table whose memory is not measured yet.
    Rows {
        segment: usize,
        rows: Range<u64>,
    },
    /// Rows of one row group that cannot all be decoded: each column is read separately.
    ByColumn {
        segment: usize,
        rows: Range<u64>,
    },
    /// Rows that fit in one piece without the oversized ones.
    Fitting {
        segment: usize,
        rows: Range<u64>,
        oversized: OversizedRows,
    },
}

impl Task {
    /// Index of the shard's segment.
    pub(super) fn segment(&self) -> usize {
        match self {
            Task::Lines(task) => task.segment,
            Task::Rows { segment, .. } | Task::ByColumn { segment, .. } | Task::Fitting { segment, .. } => *segment,
        }
    }

    /// First row in the file.
    pub(super) fn first_row(&self) -> u64 {
        match self {
            Task::Lines(task) => task.position.row,
            Task::Rows { rows, .. } | Task::ByColumn { rows, .. } | Task::Fitting { rows, .. } => rows.start,
        }
    }
}

/// The read tasks for a table's segment, which has index `index` in the shard; for a sample, one
/// task per span of nearby drawn rows.
pub(super) fn table_tasks(index: usize, segment: &Segment) -> Vec<Task> {
    let task = |rows| Task::Rows { segment: index, rows };
    let Some(picks) = &segment.picks else {
        return vec![task(segment.first_row..segment.first_row + segment.rows)];
    };
    let mut spans: Vec<Range<u64>> = Vec::new();
    for row in picks.iter().map(|pick| segment.first_row + u64::from(*pick)) {
        match spans.last_mut().filter(|span| row - span.start < SPAN_ROWS_MAX) {
            Some(span) => span.end = row + 1,
            None => spans.push(row..row + 1),
        }
    }
    spans.into_iter().map(task).collect()
}

/// The drawn rows of `rows`, with their numbers in the file. `first_row` is the number of the first
/// entry of `rows`.
pub(super) fn drawn_rows(
    segment: &Segment,
    first_row: u64,
    rows: SegmentRows,
) -> Result<(Vec<u64>, SegmentRows), DatasetError> {
    let end = first_row + rows.rows.len() as u64;
    let Some(picks) = &segment.picks else {
        return Ok(((first_row..end).collect(), rows));
    };
    let drawn = picks.iter().map(|pick| segment.first_row + u64::from(*pick));
    let numbers: Vec<u64> = drawn.filter(|row| (first_row..end).contains(row)).collect();
    let indices = UInt64Array::from_iter_values(numbers.iter().map(|row| row - first_row));
    let options = RecordBatchOptions::new().with_row_count(Some(numbers.len()));
    let carry = match rows.carry.num_columns() {
        0 => RecordBatch::try_new_with_options(rows.carry.schema(), Vec::new(), &options),
        _ => take_record_batch(&rows.carry, &indices),
    };
    let carry = carry.map_err(|e| DatasetError::Output(format!("carried columns: {e}")))?;
    let mut drawn = numbers.iter().map(|row| (row - first_row) as usize).peekable();
    let rows = rows
        .rows
        .into_iter()
        .enumerate()
        .filter(|(index, _)| drawn.next_if_eq(index).is_some());
    let rows = rows.map(|(_, row)| row).collect();
    Ok((numbers, SegmentRows { rows, carry }))
}

/// The remaining lines of a segment.
#[derive(Debug, Clone)]
pub(super) struct LinesTask {
    pub(super) segment: usize,
    pub(super) position: LinesPosition,
}

/// Rows that alone exceed the memory limit: their bytes in shown columns, and in carried columns,
/// by row number in the file.
#[derive(Debug, Clone, Default)]
pub(super) struct OversizedRows {
    pub(super) shown: BTreeMap<u64, u64>,
    pub(super) carried: BTreeMap<u64, u64>,
}

/// Result of a task.
pub(super) enum TaskResult {
    Rows(SegmentRows),
    /// The rows must be read as these smaller tasks.
    Split(Vec<Task>),
    NoRows,
}

/// Splits `rows` into tasks that each fill a piece, by the rows' bytes in shown and in carried
/// columns.
pub(super) fn split_by_memory(
    segment: usize,
    rows: &Range<u64>,
    shown_bytes: &[u64],
    carried_bytes: &[u64],
) -> Vec<Task> {
    let (mut tasks, mut oversized) = (Vec::new(), OversizedRows::default());
    let (mut start, mut sum) = (rows.start, 0u64);
    let mut add_task = |rows: Range<u64>, oversized: OversizedRows| {
        if !rows.is_empty() {
            tasks.push(Task::Fitting {
                segment,
                rows,
                oversized,
            });
        }
    };
    for (row, (&shown, &carried)) in rows.clone().zip(shown_bytes.iter().zip(carried_bytes)) {
        let read_bytes = |bytes: u64| if bytes > ROW_BYTES_MAX { 0 } else { bytes };
        let bytes = read_bytes(shown).saturating_add(read_bytes(carried));
        if sum.saturating_add(bytes) > PIECE_BYTES_MAX {
            add_task(start..row, std::mem::take(&mut oversized));
            (start, sum) = (row, 0);
        }
        sum = sum.saturating_add(bytes);
        if shown > ROW_BYTES_MAX {
            oversized.shown.insert(row, shown);
        }
        if carried > ROW_BYTES_MAX {
            oversized.carried.insert(row, carried);
        }
    }
    add_task(start..rows.end, oversized);
    tasks
}

/// Splits `rows` at the boundaries of row groups.
pub(super) fn split_by_group(file: &TableFile, rows: &Range<u64>) -> Vec<Range<u64>> {
    let mut start = 0;
    let groups = (0..file.group_count()).map(|group| {
        let group = start..start + file.group_rows(group);
        start = group.end;
        group.start.max(rows.start)..group.end.min(rows.end)
    });
    groups.filter(|rows| !rows.is_empty()).collect()
}

/// Sorted row numbers as ranges.
pub(super) fn to_ranges(rows: impl Iterator<Item = u64>) -> Vec<Range<u64>> {
    let mut out: Vec<Range<u64>> = Vec::new();
    for row in rows {
        match out.last_mut() {
            Some(last) if last.end == row => last.end += 1,
            _ => out.push(row..row + 1),
        }
    }
    out
}
