//! One shard → its rows: fields for the prompt, and the carried columns as an Arrow batch.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arrow::array::{ArrayRef, RecordBatch, RecordBatchOptions, new_null_array};
use arrow::compute::{cast, concat_batches};
use arrow::datatypes::SchemaRef;
use serde_json::{Map, Value};

use super::error::DatasetError;
use super::kinds;
use super::lines_in;
use super::parquet_in::ParquetFile;
use super::pinned::{PinnedFile, display_name};
use super::pins::Pins;
use super::plan::{Format, InputFile, Segment, Shard};
use super::planner::same_type;
use super::row::{InputRow, ShardRows};
use super::value::rows_of;
use super::widths::check_room;

/// Most footers kept between shards.
const FOOTERS_MAX: usize = 32;

/// Most memory of footers kept between shards; the newest is always kept.
const FOOTER_BYTES_MAX: usize = 64 << 20;

/// Reads shards of one job.
#[derive(Debug)]
pub struct ShardReader {
    pins: Pins,
    carry: SchemaRef,
    /// The columns that the prompt uses; `None`: all.
    columns: Option<Vec<String>>,
    /// Open Parquet files by input, the newest last.
    footers: Mutex<VecDeque<(u32, Arc<ParquetFile>)>>,
}

/// One segment's rows.
struct SegmentRows {
    rows: Vec<Result<Map<String, Value>, String>>,
    carry: RecordBatch,
}

impl ShardReader {
    /// A reader of the planned `files`. `carry`: the plan's carried columns. `columns`: what the prompt uses, `None` = all.
    pub fn new(files: Vec<InputFile>, carry: SchemaRef, columns: Option<Vec<String>>) -> ShardReader {
        ShardReader {
            pins: Pins::new(files),
            carry,
            columns,
            footers: Mutex::default(),
        }
    }

    /// The inputs and what is known of them.
    pub fn pins(&self) -> &Pins {
        &self.pins
    }

    /// A shard's carried columns without their values: of inputs that are gone.
    pub fn no_carry(&self, shard: &Shard) -> Result<RecordBatch, DatasetError> {
        self.check_room(shard)?;
        let rows = shard.rows as usize;
        let nulls = self
            .carry
            .fields()
            .iter()
            .map(|field| new_null_array(field.data_type(), rows));
        let options = RecordBatchOptions::new().with_row_count(Some(rows));
        RecordBatch::try_new_with_options(self.carry.clone(), nulls.collect(), &options)
            .map_err(|e| DatasetError::Output(format!("carried columns: {e}")))
    }

    /// Types alone can ask for any amount of memory, and a record can name any of them.
    fn check_room(&self, shard: &Shard) -> Result<(), DatasetError> {
        check_room(&self.carry, shard.rows).map_err(|why| DatasetError::Output(format!("carried columns: {why}")))
    }

    /// Reads a shard. A line that cannot be read is a row that says so; an input that changed stops the job.
    pub async fn read(&self, shard: &Shard) -> Result<ShardRows, DatasetError> {
        self.check_room(shard)?;
        let mut rows = Vec::new();
        let mut batches = Vec::new();
        for segment in &shard.segments {
            let part = self.read_segment(segment).await?;
            let first = shard.first_row + rows.len() as u64;
            rows.extend(
                part.rows
                    .into_iter()
                    .zip(first..)
                    .map(|(fields, row)| InputRow { row, fields }),
            );
            batches.push(part.carry);
        }
        if rows.len() as u64 != shard.rows {
            let why = format!(
                "its shard at row {} has {} rows, the plan says {}",
                shard.first_row,
                rows.len(),
                shard.rows
            );
            let files = self.pins.files();
            let file = shard.segments.first().and_then(|s| files.get(s.input as usize));
            return Err(DatasetError::unreadable(
                &file.map_or(String::new(), |f| display_name(&f.url)),
                why,
            ));
        }
        let carry = match self.carry.fields().is_empty() {
            true => self.empty_carry(rows.len()),
            false => concat_batches(&self.carry, &batches),
        };
        let carry = carry.map_err(|e| DatasetError::Output(format!("carried columns: {e}")))?;
        Ok(ShardRows {
            first_row: shard.first_row,
            rows,
            carry,
        })
    }

    /// Reads the rows of one input. Where it is not the object that was planned, its bytes decide.
    async fn read_segment(&self, segment: &Segment) -> Result<SegmentRows, DatasetError> {
        let input = self.pins.open(segment.input).await?;
        match self.read_pinned(&input, segment).await {
            Err(DatasetError::InputChanged { .. }) => self.read_settled(&input, segment).await,
            // A version that was removed says nothing of what lies there now.
            Err(DatasetError::InputMissing { .. }) if input.version.is_some() => {
                self.read_settled(&input, segment).await
            }
            read => read,
        }
    }

    async fn read_settled(&self, input: &PinnedFile, segment: &Segment) -> Result<SegmentRows, DatasetError> {
        self.pins.settle(segment.input, input).await?;
        self.footers().retain(|(number, _)| *number != segment.input);
        let input = self.pins.open(segment.input).await?;
        self.read_pinned(&input, segment).await
    }

    async fn read_pinned(&self, input: &PinnedFile, segment: &Segment) -> Result<SegmentRows, DatasetError> {
        match self.pins.files()[segment.input as usize].format {
            Format::Parquet => self.read_parquet(input, segment).await,
            format => self.read_lines(input, format, segment).await,
        }
    }

    fn footers(&self) -> MutexGuard<'_, VecDeque<(u32, Arc<ParquetFile>)>> {
        self.footers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn empty_carry(&self, rows: usize) -> Result<RecordBatch, arrow::error::ArrowError> {
        let options = RecordBatchOptions::new().with_row_count(Some(rows));
        RecordBatch::try_new_with_options(self.carry.clone(), Vec::new(), &options)
    }

    async fn read_parquet(&self, input: &PinnedFile, segment: &Segment) -> Result<SegmentRows, DatasetError> {
        let file = self.parquet_file(input, segment.input).await?;
        let names = file.schema().fields().iter().map(|f| f.name());
        let shown: Vec<String> = match &self.columns {
            Some(columns) => names.filter(|name| columns.contains(name)).cloned().collect(),
            None => names.cloned().collect(),
        };
        let mut wanted = shown.clone();
        wanted.extend(
            self.carry
                .fields()
                .iter()
                .map(|f| f.name().clone())
                .filter(|name| !shown.contains(name)),
        );
        let unreadable = |why: String| DatasetError::unreadable(file.name(), why);
        if wanted.is_empty() {
            let rows = (0..segment.rows).map(|_| Ok(Map::new())).collect::<Vec<_>>();
            let carry = self.empty_carry(rows.len()).map_err(|e| unreadable(e.to_string()))?;
            return Ok(SegmentRows { rows, carry });
        }
        let batch = file.read(segment.first_row, segment.rows, &wanted).await?;
        let (schema, carry_schema) = (batch.schema(), self.carry.clone());
        let (name, first_row) = (file.name().to_string(), segment.first_row);
        let made = tokio::task::spawn_blocking(move || {
            let carried = carry_schema.fields().iter().map(|field| {
                let column = batch
                    .column_by_name(field.name())
                    .ok_or(format!("column `{}` is gone", field.name()))?;
                fit(column, field.data_type()).map_err(|why| format!("column `{}`: {why}", field.name()))
            });
            let carried = carried.collect::<Result<Vec<ArrayRef>, String>>()?;
            let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
            let carry =
                RecordBatch::try_new_with_options(carry_schema, carried, &options).map_err(|e| e.to_string())?;
            let fields = schema.fields().iter().enumerate();
            let shown: Vec<usize> = fields
                .filter(|(_, f)| shown.contains(f.name()))
                .map(|(i, _)| i)
                .collect();
            let shown = batch.project(&shown).map_err(|e| e.to_string())?;
            let rows = rows_of(&shown).into_iter().zip(first_row..);
            let rows = rows
                .map(|(row, n)| row.map_err(|why| format!("row {n} of `{name}`: {why}")))
                .collect();
            Ok::<_, String>(SegmentRows { rows, carry })
        });
        made.await
            .map_err(|e| e.to_string())
            .and_then(|r| r)
            .map_err(unreadable)
    }

    /// The open file of an input, from the cache where it is there.
    async fn parquet_file(&self, input: &PinnedFile, number: u32) -> Result<Arc<ParquetFile>, DatasetError> {
        {
            let mut footers = self.footers();
            if let Some(at) = footers.iter().position(|(n, _)| *n == number)
                && let Some(entry) = footers.remove(at)
            {
                let file = entry.1.clone();
                footers.push_back(entry);
                return Ok(file);
            }
        }
        let file = Arc::new(ParquetFile::open(input.clone()).await?);
        let mut used: Vec<String> = self.carry.fields().iter().map(|f| f.name().clone()).collect();
        match &self.columns {
            Some(columns) => used.extend(columns.iter().cloned()),
            None => used.extend(file.schema().fields().iter().map(|f| f.name().clone())),
        }
        file.check_columns(&used)?;
        let mut footers = self.footers();
        footers.push_back((number, file.clone()));
        let memory =
            |footers: &VecDeque<(u32, Arc<ParquetFile>)>| footers.iter().map(|(_, f)| f.memory_bytes()).sum::<usize>();
        while footers.len() > 1 && (footers.len() > FOOTERS_MAX || memory(&footers) > FOOTER_BYTES_MAX) {
            footers.pop_front();
        }
        Ok(file)
    }

    async fn read_lines(
        &self,
        file: &PinnedFile,
        format: Format,
        segment: &Segment,
    ) -> Result<SegmentRows, DatasetError> {
        let unreadable = |why: String| DatasetError::unreadable(&file.name, why);
        let (start, end) = segment
            .bytes
            .ok_or_else(|| unreadable("the plan has no byte range for its lines".into()))?;
        if start > end || end > file.size {
            return Err(unreadable(format!(
                "the plan names bytes {start} to {end}, it has {}",
                file.size
            )));
        }
        let rows = lines_in::read(file, format, start..end, segment.first_row).await?;
        let (carry_schema, columns) = (self.carry.clone(), self.columns.clone());
        let made = tokio::task::spawn_blocking(move || {
            let (objects, errors): (Vec<_>, Vec<_>) = rows
                .into_iter()
                .map(|row| match row {
                    Ok(object) => (Some(object), None),
                    Err(why) => (None, Some(why)),
                })
                .unzip();
            let carried = carry_schema.fields().iter().map(|field| kinds::column(field, &objects));
            let carried = carried.collect::<Result<Vec<ArrayRef>, String>>()?;
            let options = RecordBatchOptions::new().with_row_count(Some(objects.len()));
            let carry = RecordBatch::try_new_with_options(carry_schema.clone(), carried, &options)
                .map_err(|e| e.to_string())?;
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
            Ok::<_, String>(SegmentRows {
                rows: rows.collect(),
                carry,
            })
        });
        made.await
            .map_err(|e| e.to_string())
            .and_then(|r| r)
            .map_err(unreadable)
    }
}

fn fit(column: &ArrayRef, to: &arrow::datatypes::DataType) -> Result<ArrayRef, String> {
    if column.data_type() == to {
        return Ok(column.clone());
    }
    if !same_type(column.data_type(), to) {
        return Err(format!("planned as {to}, it is {}", column.data_type()));
    }
    cast(column, to).map_err(|e| e.to_string())
}
