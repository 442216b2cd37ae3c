//! The rows of one shard, in pieces that fit in memory.
//!
//! Ordinary rows come in one piece. Where they may take more than [`PIECE_BYTES_MAX`], it is found out what each of them takes, and they come
//! in pieces of so many rows as fit; a row that fits alone in none is not read and says so. Of a shard that is tried in parts, only the rows
//! that are tried are read: one that ends the process must not end it for its neighbours.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use arrow::array::{ArrayRef, RecordBatch, RecordBatchOptions, UInt64Array, new_null_array};
use arrow::compute::take;
use arrow::datatypes::{Field, Schema, SchemaRef};
use futures::StreamExt;
use futures::stream::BoxStream;
use serde_json::{Map, Value};

use super::carried::{blank_from, fitting_rows, memory};
use super::error::DatasetError;
use super::kinds;
use super::lines_in::{self, LineRows};
use super::parquet_in::{ParquetFile, Read, Wanted};
use super::parquet_text::BadCell;
use super::pinned::{PinnedFile, display_name};
use super::plan::{Format, Segment, Shard};
use super::row::{InputRow, ShardRows};
use super::row_memory::{CARRY_BYTES_MAX, PIECE_BYTES_MAX, ROW_BYTES_MAX, carries_too_much, too_large};
use super::shard::{ShardReader, fit};
use super::value::row_at;

/// Reads a shard piece by piece.
pub struct Pieces<'a> {
    reader: &'a ShardReader,
    shard: &'a Shard,
    /// The rows that are read, by their places in the job's input; `None`: all.
    wanted: Option<Vec<Range<u64>>>,
    todo: VecDeque<Task>,
    /// Of the lines that are being read.
    lines: Option<BoxStream<'static, Result<LineRows, DatasetError>>>,
    /// Rows that have been handed out.
    given: u64,
    /// Bytes of their carried columns.
    carried: usize,
}

#[derive(Debug, Clone)]
enum Task {
    Lines(LinesAt),
    /// Rows of a Parquet file; nobody knows yet what they take.
    Rows {
        segment: usize,
        rows: Range<u64>,
    },
    /// Rows that fit in one piece, but for those that fit in none.
    Fitting {
        segment: usize,
        rows: Range<u64>,
        blanks: Blanks,
    },
}

/// Lines of a segment that are still to be read.
#[derive(Debug, Clone)]
struct LinesAt {
    segment: usize,
    bytes: Range<u64>,
    /// The first one's row in the file.
    row: u64,
}

/// Rows of a file that take too much alone, and how much: in columns that become JSON, and in carried ones.
#[derive(Debug, Clone, Default)]
struct Blanks {
    shown: BTreeMap<u64, u64>,
    carried: BTreeMap<u64, u64>,
}

/// What came of a task.
enum Done {
    Rows(SegmentRows),
    /// They are to be read in other pieces.
    Split(Vec<Task>),
    /// There were none.
    Nothing,
}

/// Some of one input's rows.
struct SegmentRows {
    rows: Vec<Result<Map<String, Value>, String>>,
    carry: RecordBatch,
}

impl<'a> Pieces<'a> {
    pub(super) fn new(reader: &'a ShardReader, shard: &'a Shard, wanted: Option<Vec<Range<u64>>>) -> Pieces<'a> {
        let files = reader.pins().files();
        let task = |(segment, at): (usize, &Segment)| match (files[at.input as usize].format, at.bytes) {
            (Format::Parquet, _) => Task::Rows {
                segment,
                rows: at.first_row..at.first_row + at.rows,
            },
            (_, bytes) => Task::Lines(LinesAt {
                segment,
                bytes: bytes.map_or(0..0, |(start, end)| start..end),
                row: at.first_row,
            }),
        };
        Pieces {
            reader,
            shard,
            wanted,
            todo: shard.segments.iter().enumerate().map(task).collect(),
            lines: None,
            given: 0,
            carried: 0,
        }
    }

    /// The next rows; `None`: these were all. A line that cannot be read is a row that says so; an input that changed stops the job.
    pub async fn next(&mut self) -> Result<Option<ShardRows>, DatasetError> {
        self.reader.check_room(self.shard)?;
        while let Some(task) = self.todo.pop_front() {
            match self.settled(&task).await {
                Ok(Done::Nothing) => {}
                Ok(Done::Split(tasks)) => tasks.into_iter().rev().for_each(|task| self.todo.push_front(task)),
                Ok(Done::Rows(rows)) => return self.hand_out(rows).map(Some),
                Err(error) => {
                    // Whoever asks again goes on where this ended.
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
        let carry = match fitting < rows.len() {
            true => {
                let taken = self.carried + memory(&carry.slice(0, fitting));
                for row in &mut rows[fitting..] {
                    *row = Err(carries_too_much(taken));
                }
                self.carried = CARRY_BYTES_MAX;
                blank_from(&carry, fitting).map_err(output)?
            }
            false => {
                self.carried = self.carried.saturating_add(memory(&carry));
                carry
            }
        };
        let rows = rows.into_iter().zip(first_row..);
        Ok(ShardRows {
            first_row,
            rows: rows.map(|(fields, row)| InputRow { row, fields }).collect(),
            carry,
        })
    }

    /// Does a task. Where the input is not the object that was planned, its bytes decide.
    async fn settled(&mut self, task: &Task) -> Result<Done, DatasetError> {
        let segment = match task {
            Task::Lines(at) => at.segment,
            Task::Rows { segment, .. } | Task::Fitting { segment, .. } => *segment,
        };
        let number = self.shard.segments[segment].input;
        let input = self.reader.pins().open(number).await?;
        match self.read(&input, task).await {
            Err(DatasetError::InputChanged { .. }) => {}
            // A version that was removed says nothing of what lies there now.
            Err(DatasetError::InputMissing { .. }) if input.version.is_some() => {}
            read => return read,
        }
        self.reader.settle(number, &input).await?;
        let input = self.reader.pins().open(number).await?;
        self.read(&input, task).await
    }

    async fn read(&mut self, input: &PinnedFile, task: &Task) -> Result<Done, DatasetError> {
        match task {
            Task::Lines(at) => self.read_lines(input, at).await,
            Task::Rows { segment, rows } => self.read_rows(input, *segment, rows).await,
            Task::Fitting { segment, rows, blanks } => self.read_fitting(input, *segment, rows, blanks).await,
        }
    }

    /// The rows of a file that are read, of `rows`.
    fn wanted_of(&self, segment: usize, rows: &Range<u64>) -> Vec<Range<u64>> {
        let Some(wanted) = &self.wanted else {
            return vec![rows.clone()];
        };
        let before: u64 = self.shard.segments[..segment].iter().map(|s| s.rows).sum();
        let first = self.shard.first_row + before;
        let at = self.shard.segments[segment].first_row;
        // A job's row `first` is the file's row `at`.
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
        let file = self.reader.parquet_file(input, number).await?;
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

    /// Reads rows column by column: pages of different columns are not held side by side.
    async fn read_fitting(
        &mut self,
        input: &PinnedFile,
        segment: usize,
        rows: &Range<u64>,
        blanks: &Blanks,
    ) -> Result<Done, DatasetError> {
        let number = self.shard.segments[segment].input;
        let file = self.reader.parquet_file(input, number).await?;
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
            let read = match places.is_empty() {
                true => Cells::nulls(&file, column, rows),
                false => match file.read_rows(asked, None).await? {
                    Read::Rows(batch, bad) => Cells::of(batch, bad, rows, &places),
                    Read::TooMuch => Err("its rows take more than they may".into()),
                },
            };
            cells.join(read.map_err(|why| unreadable(&file, why))?);
        }
        self.finish(&file, rows, cells, &wanted).await
    }

    async fn finish(
        &mut self,
        file: &Arc<ParquetFile>,
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
                    .or_insert_with(|| "it was not to be read".into());
            }
        }
        let columns = Columns::of(self.reader, file);
        let (carry, name, first) = (self.reader.carry().clone(), file.name().to_string(), rows.start);
        let made = tokio::task::spawn_blocking(move || cells.into_rows(&columns.shown, carry, &name, first));
        let made = made.await.map_err(|e| e.to_string()).and_then(|r| r);
        Ok(Done::Rows(made.map_err(|why| unreadable(file, why))?))
    }

    async fn read_lines(&mut self, file: &PinnedFile, at: &LinesAt) -> Result<Done, DatasetError> {
        let segment = &self.shard.segments[at.segment];
        let unreadable = |why: String| DatasetError::unreadable(&file.name, why);
        let Some((start, end)) = segment.bytes else {
            return Err(unreadable("the plan has no byte range for its lines".into()));
        };
        if start > end || end > file.size {
            let why = format!("the plan names bytes {start} to {end}, it has {}", file.size);
            return Err(unreadable(why));
        }
        // Taken: after an error they are read from this place again.
        let mut lines = match self.lines.take() {
            Some(lines) => lines,
            None => {
                let format = self.reader.pins().files()[segment.input as usize].format;
                let wanted = self.wanted_of(at.segment, &(at.row..u64::MAX));
                lines_in::read(file, format, at.bytes.clone(), at.row, wanted)
            }
        };
        let (mut piece, mut next) = (LineRows::default(), at.clone());
        while piece.bytes <= PIECE_BYTES_MAX / 2 {
            let Some(block) = lines.next().await else {
                next.bytes.start = next.bytes.end;
                break;
            };
            let mut block = block?;
            next.bytes.start = block.end;
            next.row += block.rows.len() as u64;
            piece.bytes = piece.bytes.saturating_add(block.bytes);
            piece.rows.append(&mut block.rows);
        }
        if !next.bytes.is_empty() {
            self.todo.push_front(Task::Lines(next));
            self.lines = Some(lines);
        }
        if piece.rows.is_empty() {
            return Ok(Done::Nothing);
        }
        let (carry, columns) = (
            self.reader.carry().clone(),
            self.reader.columns().map(<[String]>::to_vec),
        );
        let made = tokio::task::spawn_blocking(move || line_rows(piece.rows, carry, columns));
        let made = made.await.map_err(|e| e.to_string()).and_then(|r| r);
        Ok(Done::Rows(made.map_err(unreadable)?))
    }
}

/// What each of `rows` takes of these columns.
async fn row_costs(
    file: &Arc<ParquetFile>,
    rows: &Range<u64>,
    columns: &[String],
    shown: &[String],
) -> Result<Vec<u64>, DatasetError> {
    match columns.is_empty() {
        true => Ok(vec![0; (rows.end - rows.start) as usize]),
        false => file.row_costs(rows.clone(), columns, shown).await,
    }
}

/// `rows`, cut where they fill a piece.
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

fn unreadable(file: &ParquetFile, why: String) -> DatasetError {
    DatasetError::unreadable(file.name(), why)
}

/// The columns of a file that are read.
struct Columns {
    all: Vec<String>,
    /// Those that the prompt uses.
    shown: Vec<String>,
    carried: Vec<String>,
}

impl Columns {
    fn of(reader: &ShardReader, file: &ParquetFile) -> Columns {
        let names = file.schema().fields().iter().map(|f| f.name());
        let shown: Vec<String> = match reader.columns() {
            Some(columns) => names.filter(|name| columns.contains(name)).cloned().collect(),
            None => names.cloned().collect(),
        };
        let carried: Vec<String> = reader.carry().fields().iter().map(|f| f.name().clone()).collect();
        let mut all = shown.clone();
        all.extend(carried.iter().filter(|name| !shown.contains(name)).cloned());
        Columns { all, shown, carried }
    }
}

/// Cells of some rows, and why some of these have none.
struct Cells {
    rows: usize,
    columns: Vec<(Field, ArrayRef)>,
    /// By place.
    errors: BTreeMap<usize, String>,
    bad: Vec<BadCell>,
}

impl Cells {
    fn none(rows: &Range<u64>) -> Cells {
        Cells {
            rows: (rows.end - rows.start) as usize,
            columns: Vec::new(),
            errors: BTreeMap::new(),
            bad: Vec::new(),
        }
    }

    /// A column none of whose cells is read.
    fn nulls(file: &ParquetFile, column: &str, rows: &Range<u64>) -> Result<Cells, String> {
        let field = file.schema().field_with_name(column).map_err(|e| e.to_string())?;
        let mut cells = Cells::none(rows);
        let nulls = new_null_array(field.data_type(), cells.rows);
        cells.columns.push((field.clone().with_nullable(true), nulls));
        Ok(cells)
    }

    /// `batch` holds the rows `read` of the `rows`; what was not read is null.
    fn of(batch: RecordBatch, bad: Vec<BadCell>, rows: &Range<u64>, read: &[Range<u64>]) -> Result<Cells, String> {
        let mut cells = Cells::none(rows);
        let fields = batch.schema();
        let all = read.len() == 1 && read[0] == *rows;
        let places: Vec<usize> = match all {
            true => (0..cells.rows).collect(),
            false => read
                .iter()
                .cloned()
                .flatten()
                .map(|row| (row - rows.start) as usize)
                .collect(),
        };
        let mut from: Vec<Option<u64>> = vec![None; cells.rows];
        for (n, place) in places.iter().enumerate() {
            *from.get_mut(*place).ok_or("rows came that were not asked for")? = Some(n as u64);
        }
        let from = UInt64Array::from(from);
        for (field, column) in fields.fields().iter().zip(batch.columns()) {
            let column = match all {
                true => column.clone(),
                false => take(column, &from, None).map_err(|e| e.to_string())?,
            };
            cells.columns.push((Field::clone(field).with_nullable(true), column));
        }
        let place = |cell: BadCell| BadCell {
            row: places[cell.row],
            ..cell
        };
        cells.bad = bad.into_iter().map(place).collect();
        Ok(cells)
    }

    fn join(&mut self, other: Cells) {
        self.columns.extend(other.columns);
        self.bad.extend(other.bad);
    }

    /// The fields that are shown, and the carried columns; `first`: the first row's number in the file.
    fn into_rows(mut self, shown: &[String], carry: SchemaRef, name: &str, first: u64) -> Result<SegmentRows, String> {
        for cell in std::mem::take(&mut self.bad) {
            let why = format!("column `{}`: {}", cell.column, cell.why);
            self.errors.entry(cell.row).or_insert(why);
        }
        let options = RecordBatchOptions::new().with_row_count(Some(self.rows));
        let carried = carry.fields().iter().map(|field| {
            let column = self.columns.iter().find(|(f, _)| f.name() == field.name());
            let (_, column) = column.ok_or(format!("column `{}` is gone", field.name()))?;
            fit(column, field.data_type()).map_err(|why| format!("column `{}`: {why}", field.name()))
        });
        let carried = match self.columns.is_empty() {
            true => carry
                .fields()
                .iter()
                .map(|f| new_null_array(f.data_type(), self.rows))
                .collect(),
            false => carried.collect::<Result<Vec<ArrayRef>, String>>()?,
        };
        let carry = RecordBatch::try_new_with_options(carry, carried, &options).map_err(|e| e.to_string())?;
        // In the file's order, whatever the order in which they were read.
        let (fields, columns): (Vec<Field>, Vec<ArrayRef>) = self
            .columns
            .into_iter()
            .filter(|(field, _)| shown.contains(field.name()))
            .unzip();
        let shown = RecordBatch::try_new_with_options(Arc::new(Schema::new(fields)), columns, &options)
            .map_err(|e| e.to_string())?;
        let rows = (0..self.rows).map(|place| {
            let row = match self.errors.remove(&place) {
                Some(why) => Err(why),
                None => row_at(&shown, place),
            };
            row.map_err(|why| format!("row {} of `{name}`: {why}", first + place as u64))
        });
        Ok(SegmentRows {
            rows: rows.collect(),
            carry,
        })
    }
}

fn line_rows(
    rows: Vec<Result<Map<String, Value>, String>>,
    carry: SchemaRef,
    columns: Option<Vec<String>>,
) -> Result<SegmentRows, String> {
    let (objects, errors): (Vec<_>, Vec<_>) = rows
        .into_iter()
        .map(|row| match row {
            Ok(object) => (Some(object), None),
            Err(why) => (None, Some(why)),
        })
        .unzip();
    let carried = carry.fields().iter().map(|field| kinds::column(field, &objects));
    let carried = carried.collect::<Result<Vec<ArrayRef>, String>>()?;
    let options = RecordBatchOptions::new().with_row_count(Some(objects.len()));
    let carry = RecordBatch::try_new_with_options(carry, carried, &options).map_err(|e| e.to_string())?;
    let rows = objects
        .into_iter()
        .zip(errors)
        .map(|(object, error)| match (object, error) {
            (Some(mut object), _) => {
                if let Some(columns) = &columns {
                    object.retain(|key, _| columns.contains(key));
                    // A key that other lines have is null here, not an unknown name.
                    for column in columns {
                        object.entry(column.clone()).or_insert(Value::Null);
                    }
                }
                Ok(object)
            }
            (None, error) => Err(error.unwrap_or_default()),
        });
    Ok(SegmentRows {
        rows: rows.collect(),
        carry,
    })
}
