//! Reads the rows of one shard in pieces that fit in memory.
//!
//! Ordinary shards are read in one piece. If the rows may take more than [`PIECE_BYTES_MAX`], the
//! cost of each row is measured, and the rows are read in pieces of as many rows as fit. A row that
//! alone exceeds the limit is not read and becomes a row with an error. If a shard is retried in
//! parts, only the rows of the current part are read, so that a row that crashes the process does
//! not take its neighbours down.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use arrow::array::{RecordBatch, RecordBatchOptions, UInt64Array};
use arrow::compute::take_record_batch;
use futures::StreamExt;
use futures::stream::BoxStream;
use serde_json::{Map, Value};

use super::carried::{blank_from, fitting_rows, memory};
use super::cells::{Cells, Columns};
use super::lines;
use super::lines::reader::{LineReader, LineRows, LinesFrom};
use super::parquet::reader::{Read, Wanted};
use super::plan::{Format, Segment, Shard};
use super::row_memory::{CARRY_BYTES_MAX, PIECE_BYTES_MAX, ROW_BYTES_MAX, carries_too_much, too_large};
use super::store::pinned::{PinnedFile, display_name};
use super::table::TableFile;
use super::{DatasetError, InputRow, ShardReader, ShardRows};

/// Maximum rows between a sample's drawn rows that are read in one span.
const SPAN_ROWS_MAX: u64 = 1 << 16;

/// Advice for a file that cannot be decoded.
const GO_ON_WITHOUT: &str = "mend the file, or give the job `input.skip_unreadable: true`: then rows that lie there end `errored`, and the others are answered";

/// Reads a shard piece by piece.
pub struct Pieces<'a> {
    reader: &'a ShardReader,
    shard: &'a Shard,
    /// The rows to read, as row ranges of the job's input; `None`: all.
    wanted: Option<Vec<Range<u64>>>,
    todo: VecDeque<Task>,
    /// The stream of the lines task in progress.
    lines: Option<BoxStream<'static, Result<LineRows, DatasetError>>>,
    /// Number of rows returned so far.
    given: u64,
    /// Bytes of the carried columns of those rows.
    carried: usize,
}

#[derive(Debug, Clone)]
enum Task {
    Lines(LinesAt),
    /// Rows of a table, of unknown cost.
    Rows {
        segment: usize,
        rows: Range<u64>,
    },
    /// Rows of one row group that cannot all be decoded: read each column by itself.
    Apart {
        segment: usize,
        rows: Range<u64>,
    },
    /// Rows that fit in one piece, except the blank ones.
    Fitting {
        segment: usize,
        rows: Range<u64>,
        blanks: Blanks,
    },
}

impl Task {
    /// Index of the shard's segment.
    fn segment(&self) -> usize {
        match self {
            Task::Lines(at) => at.segment,
            Task::Rows { segment, .. } | Task::Apart { segment, .. } | Task::Fitting { segment, .. } => *segment,
        }
    }

    /// First row in the file.
    fn first_row(&self) -> u64 {
        match self {
            Task::Lines(at) => at.from.row,
            Task::Rows { rows, .. } | Task::Apart { rows, .. } | Task::Fitting { rows, .. } => rows.start,
        }
    }
}

/// The read tasks for a table's segment; for a sample, one task per span of nearby drawn rows.
fn table_tasks(segment: usize, at: &Segment) -> Vec<Task> {
    let Some(picks) = &at.picks else {
        let rows = at.first_row..at.first_row + at.rows;
        return vec![Task::Rows { segment, rows }];
    };
    let mut spans: Vec<Range<u64>> = Vec::new();
    for row in picks.iter().map(|pick| at.first_row + u64::from(*pick)) {
        match spans.last_mut().filter(|span| row - span.start < SPAN_ROWS_MAX) {
            Some(span) => span.end = row + 1,
            None => spans.push(row..row + 1),
        }
    }
    spans.into_iter().map(|rows| Task::Rows { segment, rows }).collect()
}

/// The drawn rows of `rows`, with their numbers in the file; `first`: the first row's number.
fn picked(segment: &Segment, first: u64, rows: SegmentRows) -> Result<(Vec<u64>, SegmentRows), DatasetError> {
    let end = first + rows.rows.len() as u64;
    let Some(picks) = &segment.picks else {
        return Ok(((first..end).collect(), rows));
    };
    let drawn = picks.iter().map(|pick| segment.first_row + u64::from(*pick));
    let places: Vec<u64> = drawn.filter(|row| (first..end).contains(row)).collect();
    let at = UInt64Array::from_iter_values(places.iter().map(|row| row - first));
    let options = RecordBatchOptions::new().with_row_count(Some(places.len()));
    let carry = match rows.carry.num_columns() {
        0 => RecordBatch::try_new_with_options(rows.carry.schema(), Vec::new(), &options),
        _ => take_record_batch(&rows.carry, &at),
    };
    let carry = carry.map_err(|e| DatasetError::Output(format!("carried columns: {e}")))?;
    let mut wanted = places.iter().map(|row| (row - first) as usize).peekable();
    let rows = rows
        .rows
        .into_iter()
        .enumerate()
        .filter(|(at, _)| wanted.next_if_eq(at).is_some());
    let rows = rows.map(|(_, row)| row).collect();
    Ok((places, SegmentRows { rows, carry }))
}

/// The remaining lines of a segment.
#[derive(Debug, Clone)]
struct LinesAt {
    segment: usize,
    from: LinesFrom,
}

/// Rows that alone exceed the memory limit, with their cost: in shown columns, and in carried ones.
#[derive(Debug, Clone, Default)]
struct Blanks {
    shown: BTreeMap<u64, u64>,
    carried: BTreeMap<u64, u64>,
}

/// Result of a task.
enum Done {
    Rows(SegmentRows),
    /// The rows must be read as these smaller tasks.
    Split(Vec<Task>),
    /// There were no rows.
    Nothing,
}

/// Rows of one input.
pub(super) struct SegmentRows {
    pub(super) rows: Vec<Result<Map<String, Value>, String>>,
    pub(super) carry: RecordBatch,
}

impl<'a> Pieces<'a> {
    pub(super) fn new(reader: &'a ShardReader, shard: &'a Shard, wanted: Option<Vec<Range<u64>>>) -> Pieces<'a> {
        let files = reader.pins().files();
        let task = |(segment, at): (usize, &Segment)| match (files[at.input as usize].format, at.bytes) {
            (format, _) if format.is_table() => table_tasks(segment, at),
            (_, bytes) => vec![Task::Lines(LinesAt {
                segment,
                from: LinesFrom {
                    bytes: bytes.map_or(0..0, |(start, end)| start..end),
                    row: at.first_row,
                    line: at.line.unwrap_or(1),
                },
            })],
        };
        // Segments without drawn rows are skipped, so their files are not opened.
        let is_drawn_from = |(_, at): &(usize, &Segment)| at.picks.as_ref().is_none_or(|picks| !picks.is_empty());
        Pieces {
            reader,
            shard,
            wanted,
            todo: shard
                .segments
                .iter()
                .enumerate()
                .filter(is_drawn_from)
                .flat_map(task)
                .collect(),
            lines: None,
            given: 0,
            carried: 0,
        }
    }

    /// The next rows; `None` at the end. An unreadable line becomes a row with an error; a changed
    /// input stops the job.
    pub async fn next(&mut self) -> Result<Option<ShardRows>, DatasetError> {
        while let Some(task) = self.todo.pop_front() {
            match self.settled(&task).await {
                Ok(Done::Nothing) => {}
                Ok(Done::Split(tasks)) => tasks.into_iter().rev().for_each(|task| self.todo.push_front(task)),
                Ok(Done::Rows(rows)) => {
                    let segment = &self.shard.segments[task.segment()];
                    let (places, rows) = picked(segment, task.first_row(), rows)?;
                    if !rows.rows.is_empty() {
                        let rows = self.reader.with_added(segment.input, rows, places.into_iter())?;
                        return self.hand_out(rows).map(Some);
                    }
                }
                Err(error) => {
                    // The task stays queued, so that a retry continues here.
                    self.todo.push_front(task);
                    return Err(error);
                }
            }
        }
        if self.given != self.shard.rows {
            let why = format!(
                "its shard at row {} has {} rows, the plan says {}",
                self.shard.first_row, self.given, self.shard.rows
            );
            let files = self.reader.pins().files();
            let file = self.shard.segments.first().and_then(|s| files.get(s.input as usize));
            let name = file.map_or(String::new(), |file| display_name(&file.url));
            return Err(DatasetError::unreadable(&name, why));
        }
        Ok(None)
    }

    fn hand_out(&mut self, piece: SegmentRows) -> Result<ShardRows, DatasetError> {
        let first_row = self.shard.first_row + self.given;
        self.given += piece.rows.len() as u64;
        let SegmentRows { mut rows, carry } = piece;
        let output = |e: arrow::error::ArrowError| DatasetError::Output(format!("carried columns: {e}"));
        let fitting = fitting_rows(&carry, CARRY_BYTES_MAX.saturating_sub(self.carried));
        let carry = if fitting < rows.len() {
            let taken = self.carried + memory(&carry.slice(0, fitting));
            for row in &mut rows[fitting..] {
                *row = Err(carries_too_much(taken));
            }
            self.carried = CARRY_BYTES_MAX;
            blank_from(&carry, fitting).map_err(output)?
        } else {
            self.carried = self.carried.saturating_add(memory(&carry));
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
    async fn settled(&mut self, task: &Task) -> Result<Done, DatasetError> {
        let number = self.shard.segments[task.segment()].input;
        let input = self.reader.pins().open(number).await?;
        match self.read(&input, task).await {
            Err(DatasetError::InputChanged { .. }) => {}
            // If the planned version was removed, the current one may still hold the planned bytes.
            Err(DatasetError::InputMissing { .. }) if input.version.is_some() => {}
            read => return read,
        }
        self.reader.settle(number, &input).await?;
        let input = self.reader.pins().open(number).await?;
        self.read(&input, task).await
    }

    async fn read(&mut self, input: &PinnedFile, task: &Task) -> Result<Done, DatasetError> {
        let (segment, rows, read) = match task {
            Task::Lines(at) => return self.read_lines(input, at).await,
            Task::Apart { segment, rows } => return self.read_apart(input, *segment, rows).await,
            Task::Rows { segment, rows } => (*segment, rows, self.read_rows(input, *segment, rows).await),
            Task::Fitting { segment, rows, blanks } => {
                let read = self.read_fitting(input, *segment, rows, blanks).await;
                (*segment, rows, read)
            }
        };
        let Err(DatasetError::Unreadable { file, why }) = read else {
            return read;
        };
        if !self.reader.skips_unreadable() {
            let why = format!("{why}; {GO_ON_WITHOUT}");
            return Err(DatasetError::Unreadable { file, why });
        }
        let table = self
            .reader
            .table_file(input, self.shard.segments[segment].input)
            .await?;
        let groups = by_group(&table, rows);
        if groups.len() > 1 && matches!(task, Task::Rows { .. }) {
            let task = |rows| Task::Rows { segment, rows };
            return Ok(Done::Split(groups.into_iter().map(task).collect()));
        }
        let task = |rows| Task::Apart { segment, rows };
        Ok(Done::Split(groups.into_iter().map(task).collect()))
    }

    /// Reads rows column by column; a row with an undecodable cell becomes a row with an error.
    async fn read_apart(
        &mut self,
        input: &PinnedFile,
        segment: usize,
        rows: &Range<u64>,
    ) -> Result<Done, DatasetError> {
        let file = self
            .reader
            .table_file(input, self.shard.segments[segment].input)
            .await?;
        let columns = Columns::of(self.reader, &file);
        let wanted = self.wanted_of(segment, rows);
        let mut cells = Cells::none(rows);
        for column in columns.all.iter().filter(|_| !wanted.is_empty()) {
            let asked = Wanted {
                rows: wanted.clone(),
                columns: vec![column.clone()],
                shown: columns.shown.iter().filter(|shown| *shown == column).cloned().collect(),
            };
            let why = match file.read_rows(asked, Some(PIECE_BYTES_MAX)).await {
                Ok(Read::Rows(batch, bad)) => {
                    let read = Cells::of(batch, bad, rows, &wanted);
                    cells.join(read.map_err(|why| unreadable(&file, why))?);
                    continue;
                }
                Ok(Read::TooMuch) => "its rows take more than they may".to_string(),
                Err(DatasetError::Unreadable { why, .. }) => why,
                Err(error) => return Err(error),
            };
            let nulls = Cells::nulls(&file, column, rows);
            cells.join(nulls.map_err(|why| unreadable(&file, why))?);
            for row in wanted.iter().cloned().flatten() {
                let place = (row - rows.start) as usize;
                let why = || format!("column `{column}`: {why}");
                cells.errors.entry(place).or_insert_with(why);
            }
        }
        self.finish(&file, rows, cells, &wanted).await
    }

    /// The wanted rows among `rows`, as row ranges of the file.
    fn wanted_of(&self, segment: usize, rows: &Range<u64>) -> Vec<Range<u64>> {
        let before: u64 = self.shard.segments[..segment].iter().map(Segment::taken).sum();
        let first = self.shard.first_row + before;
        let at = self.shard.segments[segment].first_row;
        if let Some(picks) = &self.shard.segments[segment].picks {
            let of_job = |row: u64| {
                self.wanted
                    .as_ref()
                    .is_none_or(|wanted| wanted.iter().any(|r| r.contains(&row)))
            };
            let picks = (first..).zip(picks).filter(|(row, _)| of_job(*row));
            let places = picks.map(|(_, pick)| at + u64::from(*pick));
            return ranges(places.filter(|place| rows.contains(place)));
        }
        let Some(wanted) = &self.wanted else {
            return vec![rows.clone()];
        };
        // The job's row `first` is the file's row `at`.
        let of_file = |row: u64| (row.max(first) - first).saturating_add(at);
        let wanted = wanted
            .iter()
            .map(|r| of_file(r.start).max(rows.start)..of_file(r.end).min(rows.end));
        wanted.filter(|r| !r.is_empty()).collect()
    }

    async fn read_rows(&mut self, input: &PinnedFile, segment: usize, rows: &Range<u64>) -> Result<Done, DatasetError> {
        if rows.is_empty() {
            return Ok(Done::Nothing);
        }
        let number = self.shard.segments[segment].input;
        let file = self.reader.table_file(input, number).await?;
        let columns = Columns::of(self.reader, &file);
        let wanted = self.wanted_of(segment, rows);
        if columns.all.is_empty() || wanted.is_empty() {
            return self.finish(&file, rows, Cells::none(rows), &wanted).await;
        }
        let asked = Wanted {
            rows: wanted.clone(),
            columns: columns.all.clone(),
            shown: columns.shown.clone(),
        };
        match file.read_rows(asked, Some(PIECE_BYTES_MAX)).await? {
            Read::Rows(batch, bad) => {
                let cells = Cells::of(batch, bad, rows, &wanted).map_err(|why| unreadable(&file, why))?;
                self.finish(&file, rows, cells, &wanted).await
            }
            Read::TooMuch => {
                let shown = row_costs(&file, rows, &columns.shown, &columns.shown).await?;
                let carried = row_costs(&file, rows, &columns.carried, &[]).await?;
                Ok(Done::Split(split(segment, rows, &shown, &carried)))
            }
        }
    }

    /// Reads rows column by column, so that only one column's pages are held at a time.
    async fn read_fitting(
        &mut self,
        input: &PinnedFile,
        segment: usize,
        rows: &Range<u64>,
        blanks: &Blanks,
    ) -> Result<Done, DatasetError> {
        let number = self.shard.segments[segment].input;
        let file = self.reader.table_file(input, number).await?;
        let columns = Columns::of(self.reader, &file);
        let wanted = self.wanted_of(segment, rows);
        let mut cells = Cells::none(rows);
        for (row, bytes) in blanks.shown.iter().chain(&blanks.carried) {
            let place = (row - rows.start) as usize;
            cells.errors.entry(place).or_insert_with(|| too_large(*bytes));
        }
        for column in &columns.all {
            let is_shown = columns.shown.contains(column);
            let is_carried = columns.carried.contains(column);
            let is_read = |row: &u64| {
                (is_shown && !blanks.shown.contains_key(row)) || (is_carried && !blanks.carried.contains_key(row))
            };
            let asked = Wanted {
                rows: ranges(wanted.iter().cloned().flatten().filter(is_read)),
                columns: vec![column.clone()],
                shown: Vec::new(),
            };
            let places = asked.rows.clone();
            let read = if places.is_empty() {
                Cells::nulls(&file, column, rows)
            } else {
                match file.read_rows(asked, None).await? {
                    Read::Rows(batch, bad) => Cells::of(batch, bad, rows, &places),
                    Read::TooMuch => Err("its rows take more than they may".into()),
                }
            };
            cells.join(read.map_err(|why| unreadable(&file, why))?);
        }
        self.finish(&file, rows, cells, &wanted).await
    }

    async fn finish(
        &mut self,
        file: &TableFile,
        rows: &Range<u64>,
        mut cells: Cells,
        wanted: &[Range<u64>],
    ) -> Result<Done, DatasetError> {
        let mut read = wanted.iter().cloned().flatten().peekable();
        for row in rows.clone() {
            if read.next_if_eq(&row).is_none() {
                let place = (row - rows.start) as usize;
                cells
                    .errors
                    .entry(place)
                    .or_insert_with(|| lines::reader::NOT_READ.into());
            }
        }
        let columns = Columns::of(self.reader, file);
        let (carry, name, first) = (
            self.reader.carry_of_files().clone(),
            file.name().to_string(),
            rows.start,
        );
        let made = tokio::task::spawn_blocking(move || cells.into_rows(&columns, carry, &name, first));
        let made = made.await.map_err(|e| e.to_string()).and_then(|r| r);
        Ok(Done::Rows(made.map_err(|why| unreadable(file, why))?))
    }

    async fn read_lines(&mut self, file: &PinnedFile, at: &LinesAt) -> Result<Done, DatasetError> {
        let segment = &self.shard.segments[at.segment];
        let unreadable = |why: String| DatasetError::unreadable(&file.name, why);
        let Some((start, end)) = segment.bytes else {
            return Err(unreadable("the plan has no byte range for its lines".into()));
        };
        let planned = &self.reader.pins().files()[segment.input as usize];
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
                let wanted = self.wanted_of(at.segment, &(at.from.row..u64::MAX));
                lines::reader::read(&self.reader.text(file, planned), reader, at.from.clone(), wanted)
            }
        };
        let (mut piece, mut next) = (LineRows::default(), at.clone());
        // At the end of the bytes the stream is polled once more: only a stream that is read to its
        // end keeps its decoder for the next shard.
        while (piece.bytes <= PIECE_BYTES_MAX / 2 && (piece.rows.len() as u64) < SPAN_ROWS_MAX)
            || next.from.bytes.is_empty()
        {
            let Some(block) = lines.next().await else {
                next.from.bytes.start = next.from.bytes.end;
                break;
            };
            let mut block = block?;
            next.from = next.from.behind(&block);
            piece.bytes = piece.bytes.saturating_add(block.bytes);
            let before = piece.rows.len();
            piece
                .kept
                .extend(block.kept.into_iter().map(|(number, row)| (before + number, row)));
            piece.rows.append(&mut block.rows);
        }
        if !next.from.bytes.is_empty() {
            self.todo.push_front(Task::Lines(next));
            self.lines = Some(lines);
        }
        if piece.rows.is_empty() {
            return Ok(Done::Nothing);
        }
        let (carry, columns) = (
            self.reader.carry_of_files().clone(),
            self.reader.columns().map(<[String]>::to_vec),
        );
        let made = tokio::task::spawn_blocking(move || piece.into_columns(carry, columns));
        let made = made.await.map_err(|e| e.to_string()).and_then(|r| r);
        let (rows, carry) = made.map_err(unreadable)?;
        Ok(Done::Rows(SegmentRows { rows, carry }))
    }
}

impl Pieces<'_> {
    fn line_reader(&self, input: u32) -> Result<LineReader, String> {
        match (self.reader.pins().files()[input as usize].format, self.reader.csv()) {
            (Format::Csv, None) => Err("the plan has no columns of its CSV".into()),
            (Format::Csv, Some(csv)) => Ok(LineReader::Csv(csv.clone())),
            (format, _) => Ok(LineReader::Lines(format)),
        }
    }
}

/// The cost of each of `rows` in these columns.
async fn row_costs(
    file: &TableFile,
    rows: &Range<u64>,
    columns: &[String],
    shown: &[String],
) -> Result<Vec<u64>, DatasetError> {
    if columns.is_empty() {
        return Ok(vec![0; (rows.end - rows.start) as usize]);
    }
    file.row_costs(rows.clone(), columns, shown).await
}

/// Splits `rows` into tasks that each fill a piece.
fn split(segment: usize, rows: &Range<u64>, shown: &[u64], carried: &[u64]) -> Vec<Task> {
    let (mut tasks, mut blanks) = (Vec::new(), Blanks::default());
    let (mut start, mut sum) = (rows.start, 0u64);
    let mut cut = |rows: Range<u64>, blanks: Blanks| {
        if !rows.is_empty() {
            tasks.push(Task::Fitting { segment, rows, blanks });
        }
    };
    for (row, (&shown, &carried)) in rows.clone().zip(shown.iter().zip(carried)) {
        let fitting = |bytes: u64| if bytes > ROW_BYTES_MAX { 0 } else { bytes };
        let bytes = fitting(shown).saturating_add(fitting(carried));
        if sum.saturating_add(bytes) > PIECE_BYTES_MAX {
            cut(start..row, std::mem::take(&mut blanks));
            (start, sum) = (row, 0);
        }
        sum = sum.saturating_add(bytes);
        if shown > ROW_BYTES_MAX {
            blanks.shown.insert(row, shown);
        }
        if carried > ROW_BYTES_MAX {
            blanks.carried.insert(row, carried);
        }
    }
    cut(start..rows.end, blanks);
    tasks
}

/// Splits `rows` at the boundaries of row groups.
fn by_group(file: &TableFile, rows: &Range<u64>) -> Vec<Range<u64>> {
    let mut start = 0;
    let groups = (0..file.group_count()).map(|group| {
        let group = start..start + file.group_rows(group);
        start = group.end;
        group.start.max(rows.start)..group.end.min(rows.end)
    });
    groups.filter(|rows| !rows.is_empty()).collect()
}

/// Sorted numbers as ranges.
fn ranges(rows: impl Iterator<Item = u64>) -> Vec<Range<u64>> {
    let mut out: Vec<Range<u64>> = Vec::new();
    for row in rows {
        match out.last_mut() {
            Some(last) if last.end == row => last.end += 1,
            _ => out.push(row..row + 1),
        }
    }
    out
}

fn unreadable(file: &TableFile, why: String) -> DatasetError {
    DatasetError::unreadable(file.name(), why)
}
