//! Reads the rows of one shard in pieces that fit in memory.
//!
//! Ordinary shards are read in one piece. If the rows may take more than [`PIECE_BYTES_MAX`], the
//! memory of each row is measured, and each piece has as many rows as fit. A row that alone exceeds
//! `ROW_BYTES_MAX` is not read and becomes a row with an error. A caller that tries only some rows
//! of a shard passes them as `wanted`: the other rows are not decoded, so that a row that crashes
//! the process fails only the attempt that it is in.

use std::collections::VecDeque;
use std::ops::Range;

use arrow::array::RecordBatch;
use futures::StreamExt;
use futures::stream::BoxStream;
use serde_json::{Map, Value};

use super::carried::{fitting_rows, memory_bytes, with_nulls_from};
use super::cells::{Cells, FileColumns};
use super::lines;
use super::lines::reader::{LineReader, LineRows, LinesPosition};
use super::parquet::reader::{ReadOutcome, ReadRequest};
use super::plan::{Format, Segment, Shard};
use super::read_tasks::{
    LinesTask, OversizedRows, SPAN_ROWS_MAX, Task, TaskResult, drawn_rows, split_by_group, split_by_memory,
    table_tasks, to_ranges,
};
use super::row_memory::{CARRY_BYTES_MAX, PIECE_BYTES_MAX, carries_too_much, too_large};
use super::store::pinned_file::{PinnedFile, display_name};
use super::table::TableFile;
use super::{DatasetError, InputRow, ShardReader, ShardRows};

/// Advice for a file that cannot be decoded.
const SKIP_ADVICE: &str = "repair the file, or set `input.skip_unreadable: true` in the job: then its unreadable rows end `errored`, and the other rows are answered";

/// Reads a shard piece by piece.
pub struct ShardPieces<'a> {
    reader: &'a ShardReader,
    shard: &'a Shard,
    /// The rows to read, as row ranges of the job's input; `None`: all.
    wanted: Option<Vec<Range<u64>>>,
    tasks: VecDeque<Task>,
    /// The stream of the lines task in progress.
    lines: Option<BoxStream<'static, Result<LineRows, DatasetError>>>,
    /// Number of rows returned so far.
    returned_rows: u64,
    /// Bytes of the carried columns of the returned rows.
    carried_bytes: usize,
}

/// Rows of one input, which all belong to one segment of the shard.
pub(super) struct SegmentRows {
    pub(super) rows: Vec<Result<Map<String, Value>, String>>,
    pub(super) carry: RecordBatch,
}

impl<'a> ShardPieces<'a> {
    pub(super) fn new(reader: &'a ShardReader, shard: &'a Shard, wanted: Option<Vec<Range<u64>>>) -> ShardPieces<'a> {
        let files = reader.inputs().files();
        let tasks_of = |(index, segment): (usize, &Segment)| match files[segment.input as usize].format {
            format if format.is_table() => table_tasks(index, segment),
            _ => vec![Task::Lines(LinesTask {
                segment: index,
                position: LinesPosition {
                    bytes: segment.bytes.map_or(0..0, |(start, end)| start..end),
                    row: segment.first_row,
                    line: segment.line.unwrap_or(1),
                },
            })],
        };
        // Segments without drawn rows are skipped, so their files are not opened.
        let has_rows = |(_, segment): &(usize, &Segment)| segment.picks.as_ref().is_none_or(|picks| !picks.is_empty());
        ShardPieces {
            reader,
            shard,
            wanted,
            tasks: shard
                .segments
                .iter()
                .enumerate()
                .filter(has_rows)
                .flat_map(tasks_of)
                .collect(),
            lines: None,
            returned_rows: 0,
            carried_bytes: 0,
        }
    }

    /// The next rows; `None` at the end. An unreadable line becomes a row with an error; a changed
    /// input stops the job.
    pub async fn next(&mut self) -> Result<Option<ShardRows>, DatasetError> {
        while let Some(task) = self.tasks.pop_front() {
            match self.run(&task).await {
                Ok(TaskResult::NoRows) => {}
                Ok(TaskResult::Split(tasks)) => tasks.into_iter().rev().for_each(|task| self.tasks.push_front(task)),
                Ok(TaskResult::Rows(rows)) => {
                    let segment = &self.shard.segments[task.segment()];
                    let (numbers, rows) = drawn_rows(segment, task.first_row(), rows)?;
                    if !rows.rows.is_empty() {
                        let rows = self
                            .reader
                            .with_added_columns(segment.input, rows, numbers.into_iter())?;
                        return self.number_rows(rows).map(Some);
                    }
                }
                Err(error) => {
                    // The task stays queued, so that a retry continues here.
                    self.tasks.push_front(task);
                    return Err(error);
                }
            }
        }
        if self.returned_rows != self.shard.rows {
            let why = format!(
                "its shard at row {} has {} rows, the plan says {}",
                self.shard.first_row, self.returned_rows, self.shard.rows
            );
            let files = self.reader.inputs().files();
            let file = self.shard.segments.first().and_then(|s| files.get(s.input as usize));
            let name = file.map_or(String::new(), |file| display_name(&file.url));
            return Err(DatasetError::unreadable(&name, why));
        }
        Ok(None)
    }

    /// The next rows of the shard, with their row numbers in the job. Rows whose carried columns
    /// exceed the memory limit become rows with an error.
    fn number_rows(&mut self, piece: SegmentRows) -> Result<ShardRows, DatasetError> {
        let first_row = self.shard.first_row + self.returned_rows;
        self.returned_rows += piece.rows.len() as u64;
        let SegmentRows { mut rows, carry } = piece;
        let output_error = |e: arrow::error::ArrowError| DatasetError::Output(format!("carried columns: {e}"));
        let fitting = fitting_rows(&carry, CARRY_BYTES_MAX.saturating_sub(self.carried_bytes));
        let carry = if fitting < rows.len() {
            let bytes_before = self.carried_bytes + memory_bytes(&carry.slice(0, fitting));
            for row in &mut rows[fitting..] {
                *row = Err(carries_too_much(bytes_before));
            }
            self.carried_bytes = CARRY_BYTES_MAX;
            with_nulls_from(&carry, fitting).map_err(output_error)?
        } else {
            self.carried_bytes = self.carried_bytes.saturating_add(memory_bytes(&carry));
            carry
        };
        let rows = rows.into_iter().zip(first_row..);
        Ok(ShardRows {
            first_row,
            rows: rows.map(|(fields, row)| InputRow { row, fields }).collect(),
            carry,
        })
    }

    /// Runs a task. If the input's ETag or version differs from the plan, its hash decides.
    async fn run(&mut self, task: &Task) -> Result<TaskResult, DatasetError> {
        let number = self.shard.segments[task.segment()].input;
        let input = self.reader.inputs().open(number).await?;
        match self.read(&input, task).await {
            Err(DatasetError::InputChanged { .. }) => {}
            // If the planned version was removed, the current one may still hold the planned bytes.
            Err(DatasetError::InputMissing { .. }) if input.version.is_some() => {}
            read => return read,
        }
        self.reader.verify_current(number, &input).await?;
        let input = self.reader.inputs().open(number).await?;
        self.read(&input, task).await
    }

    async fn read(&mut self, input: &PinnedFile, task: &Task) -> Result<TaskResult, DatasetError> {
        let (segment, rows, read) = match task {
            Task::Lines(task) => return self.read_lines(input, task).await,
            Task::ByColumn { segment, rows } => return self.read_by_column(input, *segment, rows).await,
            Task::Rows { segment, rows } => (*segment, rows, self.read_rows(input, *segment, rows).await),
            Task::Fitting {
                segment,
                rows,
                oversized,
            } => {
                let read = self.read_fitting(input, *segment, rows, oversized).await;
                (*segment, rows, read)
            }
        };
        let Err(DatasetError::Unreadable { file, why }) = read else {
            return read;
        };
        if !self.reader.skips_unreadable() {
            let why = format!("{why}; {SKIP_ADVICE}");
            return Err(DatasetError::Unreadable { file, why });
        }
        let table = self
            .reader
            .table_file(input, self.shard.segments[segment].input)
            .await?;
        let groups = split_by_group(&table, rows);
        if groups.len() > 1 && matches!(task, Task::Rows { .. }) {
            let task = |rows| Task::Rows { segment, rows };
            return Ok(TaskResult::Split(groups.into_iter().map(task).collect()));
        }
        let task = |rows| Task::ByColumn { segment, rows };
        Ok(TaskResult::Split(groups.into_iter().map(task).collect()))
    }

    /// Reads rows column by column; a row with an undecodable cell becomes a row with an error.
    async fn read_by_column(
        &mut self,
        input: &PinnedFile,
        segment: usize,
        rows: &Range<u64>,
    ) -> Result<TaskResult, DatasetError> {
        let file = self
            .reader
            .table_file(input, self.shard.segments[segment].input)
            .await?;
        let columns = FileColumns::of(self.reader, &file);
        let wanted = self.wanted_in(segment, rows);
        let mut cells = Cells::empty(rows);
        for column in columns.to_read.iter().filter(|_| !wanted.is_empty()) {
            let request = ReadRequest {
                rows: wanted.clone(),
                columns: vec![column.clone()],
                json_columns: columns.shown.iter().filter(|shown| *shown == column).cloned().collect(),
            };
            let why = match file.read_rows(request, Some(PIECE_BYTES_MAX)).await {
                Ok(ReadOutcome::Rows(batch, bad)) => {
                    let read = Cells::of(batch, bad, rows, &wanted);
                    cells.append(read.map_err(|why| unreadable(&file, why))?);
                    continue;
                }
                Ok(ReadOutcome::OverLimit) => "its rows exceed the memory limit".to_string(),
                Err(DatasetError::Unreadable { why, .. }) => why,
                Err(error) => return Err(error),
            };
            let nulls = Cells::null_column(&file, column, rows);
            cells.append(nulls.map_err(|why| unreadable(&file, why))?);
            for row in wanted.iter().cloned().flatten() {
                let index = (row - rows.start) as usize;
                let why = || format!("column `{column}`: {why}");
                cells.errors.entry(index).or_insert_with(why);
            }
        }
        self.finish(&file, rows, cells, &wanted).await
    }

    /// The wanted rows among `rows`, as row ranges of the file.
    fn wanted_in(&self, segment: usize, rows: &Range<u64>) -> Vec<Range<u64>> {
        let rows_before: u64 = self.shard.segments[..segment].iter().map(Segment::taken_rows).sum();
        // The segment's first row: its number in the job, and in the file.
        let first = self.shard.first_row + rows_before;
        let first_in_file = self.shard.segments[segment].first_row;
        if let Some(picks) = &self.shard.segments[segment].picks {
            let is_wanted = |row: u64| {
                self.wanted
                    .as_ref()
                    .is_none_or(|wanted| wanted.iter().any(|r| r.contains(&row)))
            };
            let picks = (first..).zip(picks).filter(|(row, _)| is_wanted(*row));
            let file_rows = picks.map(|(_, pick)| first_in_file + u64::from(*pick));
            return to_ranges(file_rows.filter(|row| rows.contains(row)));
        }
        let Some(wanted) = &self.wanted else {
            return vec![rows.clone()];
        };
        let in_file = |row: u64| (row.max(first) - first).saturating_add(first_in_file);
        let wanted = wanted
            .iter()
            .map(|r| in_file(r.start).max(rows.start)..in_file(r.end).min(rows.end));
        wanted.filter(|r| !r.is_empty()).collect()
    }

    async fn read_rows(
        &mut self,
        input: &PinnedFile,
        segment: usize,
        rows: &Range<u64>,
    ) -> Result<TaskResult, DatasetError> {
        if rows.is_empty() {
            return Ok(TaskResult::NoRows);
        }
        let number = self.shard.segments[segment].input;
        let file = self.reader.table_file(input, number).await?;
        let columns = FileColumns::of(self.reader, &file);
        let wanted = self.wanted_in(segment, rows);
        if columns.to_read.is_empty() || wanted.is_empty() {
            return self.finish(&file, rows, Cells::empty(rows), &wanted).await;
        }
        let request = ReadRequest {
            rows: wanted.clone(),
            columns: columns.to_read.clone(),
            json_columns: columns.shown.clone(),
        };
        match file.read_rows(request, Some(PIECE_BYTES_MAX)).await? {
            ReadOutcome::Rows(batch, bad) => {
                let cells = Cells::of(batch, bad, rows, &wanted).map_err(|why| unreadable(&file, why))?;
                self.finish(&file, rows, cells, &wanted).await
            }
            ReadOutcome::OverLimit => {
                let shown_bytes = row_costs(&file, rows, &columns.shown, &columns.shown).await?;
                let carried_bytes = row_costs(&file, rows, &columns.carried, &[]).await?;
                let tasks = split_by_memory(segment, rows, &shown_bytes, &carried_bytes);
                Ok(TaskResult::Split(tasks))
            }
        }
    }

    /// Reads rows column by column, so that only one column's pages are held at a time.
    async fn read_fitting(
        &mut self,
        input: &PinnedFile,
        segment: usize,
        rows: &Range<u64>,
        oversized: &OversizedRows,
    ) -> Result<TaskResult, DatasetError> {
        let number = self.shard.segments[segment].input;
        let file = self.reader.table_file(input, number).await?;
        let columns = FileColumns::of(self.reader, &file);
        let wanted = self.wanted_in(segment, rows);
        let mut cells = Cells::empty(rows);
        for (row, bytes) in oversized.shown.iter().chain(&oversized.carried) {
            let index = (row - rows.start) as usize;
            cells.errors.entry(index).or_insert_with(|| too_large(*bytes));
        }
        for column in &columns.to_read {
            let is_shown = columns.shown.contains(column);
            let is_carried = columns.carried.contains(column);
            let is_read = |row: &u64| {
                (is_shown && !oversized.shown.contains_key(row)) || (is_carried && !oversized.carried.contains_key(row))
            };
            let request = ReadRequest {
                rows: to_ranges(wanted.iter().cloned().flatten().filter(is_read)),
                columns: vec![column.clone()],
                json_columns: Vec::new(),
            };
            let read_rows = request.rows.clone();
            let read = if read_rows.is_empty() {
                Cells::null_column(&file, column, rows)
            } else {
                match file.read_rows(request, None).await? {
                    ReadOutcome::Rows(batch, bad) => Cells::of(batch, bad, rows, &read_rows),
                    ReadOutcome::OverLimit => Err("its rows exceed the memory limit".into()),
                }
            };
            cells.append(read.map_err(|why| unreadable(&file, why))?);
        }
        self.finish(&file, rows, cells, &wanted).await
    }

    /// Builds the rows from their cells; a row that is not wanted gets the error `NOT_READ`.
    async fn finish(
        &mut self,
        file: &TableFile,
        rows: &Range<u64>,
        mut cells: Cells,
        wanted: &[Range<u64>],
    ) -> Result<TaskResult, DatasetError> {
        let mut wanted = wanted.iter().cloned().flatten().peekable();
        for row in rows.clone() {
            if wanted.next_if_eq(&row).is_none() {
                let index = (row - rows.start) as usize;
                cells
                    .errors
                    .entry(index)
                    .or_insert_with(|| lines::reader::NOT_READ.into());
            }
        }
        let columns = FileColumns::of(self.reader, file);
        let (carry, name, first_row) = (
            self.reader.carry_of_files().clone(),
            file.name().to_string(),
            rows.start,
        );
        let built = tokio::task::spawn_blocking(move || cells.into_rows(&columns, carry, &name, first_row));
        let built = built.await.map_err(|e| e.to_string()).and_then(|r| r);
        Ok(TaskResult::Rows(built.map_err(|why| unreadable(file, why))?))
    }

    async fn read_lines(&mut self, file: &PinnedFile, task: &LinesTask) -> Result<TaskResult, DatasetError> {
        let segment = &self.shard.segments[task.segment];
        let unreadable = |why: String| DatasetError::unreadable(&file.name, why);
        let Some((start, end)) = segment.bytes else {
            return Err(unreadable("the plan has no byte range for its lines".into()));
        };
        let planned = &self.reader.inputs().files()[segment.input as usize];
        let size = planned
            .compressed
            .as_ref()
            .map_or(file.size, |compressed| compressed.bytes);
        if start > end || end > size {
            let why = format!("the plan names bytes {start} to {end}, it has {size}");
            return Err(unreadable(why));
        }
        // The stream is taken out, so that a retry after an error opens it again at this position.
        let mut lines = match self.lines.take() {
            Some(lines) => lines,
            None => {
                let reader = self.line_reader(segment.input).map_err(unreadable)?;
                let wanted = self.wanted_in(task.segment, &(task.position.row..u64::MAX));
                let text = self.reader.text_file(file, planned);
                lines::reader::read(&text, reader, task.position.clone(), wanted)
            }
        };
        let (mut piece, mut next) = (LineRows::default(), task.clone());
        // At the end of the bytes the stream is polled once more: only a stream that is read to its
        // end keeps its decoder for the next shard.
        while (piece.bytes <= PIECE_BYTES_MAX / 2 && (piece.rows.len() as u64) < SPAN_ROWS_MAX)
            || next.position.bytes.is_empty()
        {
            let Some(block) = lines.next().await else {
                next.position.bytes.start = next.position.bytes.end;
                break;
            };
            let mut block = block?;
            next.position = next.position.after(&block);
            piece.bytes = piece.bytes.saturating_add(block.bytes);
            let rows_before = piece.rows.len();
            let partial = block.partial_rows.into_iter();
            piece
                .partial_rows
                .extend(partial.map(|(index, row)| (rows_before + index, row)));
            piece.rows.append(&mut block.rows);
        }
        if !next.position.bytes.is_empty() {
            self.tasks.push_front(Task::Lines(next));
            self.lines = Some(lines);
        }
        if piece.rows.is_empty() {
            return Ok(TaskResult::NoRows);
        }
        let (carry, columns) = (
            self.reader.carry_of_files().clone(),
            self.reader.columns().map(<[String]>::to_vec),
        );
        let built = tokio::task::spawn_blocking(move || piece.into_columns(carry, columns));
        let built = built.await.map_err(|e| e.to_string()).and_then(|r| r);
        let (rows, carry) = built.map_err(unreadable)?;
        Ok(TaskResult::Rows(SegmentRows { rows, carry }))
    }
}

impl ShardPieces<'_> {
    fn line_reader(&self, input: u32) -> Result<LineReader, String> {
        match (self.reader.inputs().files()[input as usize].format, self.reader.csv()) {
            (Format::Csv, None) => Err("the plan has no columns of its CSV".into()),
            (Format::Csv, Some(csv)) => Ok(LineReader::Csv(csv.clone())),
            (format, _) => Ok(LineReader::Lines(format)),
        }
    }
}

/// The memory in bytes that each of `rows` takes in these columns; `json_columns` become JSON.
async fn row_costs(
    file: &TableFile,
    rows: &Range<u64>,
    columns: &[String],
    json_columns: &[String],
) -> Result<Vec<u64>, DatasetError> {
    if columns.is_empty() {
        return Ok(vec![0; (rows.end - rows.start) as usize]);
    }
    file.row_costs(rows.clone(), columns, json_columns).await
}

fn unreadable(file: &TableFile, why: String) -> DatasetError {
    DatasetError::unreadable(file.name(), why)
}
