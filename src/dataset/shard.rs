//! One shard → its rows: fields for the prompt, and the carried columns as an Arrow batch.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arrow::array::{Array, ArrayRef, Int64Array, RecordBatch, RecordBatchOptions, new_null_array};
use arrow::compute::{cast, concat_batches};
use arrow::datatypes::{DataType, Field, FieldRef, Schema, SchemaRef};

use super::arrow::reader::KeptBlock;
use super::csv::reader::CsvReading;
use super::error::DatasetError;
use super::layout::Layout;
use super::lines::text_file::{Kept, TextFile};
use super::pieces::{Pieces, SegmentRows};
use super::plan::tables::{same_type, wider};
use super::plan::{InputFile, Shard};
use super::row::ShardRows;
use super::store::pinned::PinnedFile;
use super::store::pins::Pins;
use super::table::TableFile;
use super::widths::check_room;

/// Maximum number of open files kept between shards.
const FOOTERS_MAX: usize = 32;

/// Maximum memory of open files kept between shards; the newest is always kept.
const FOOTER_BYTES_MAX: usize = 64 << 20;

/// Reads shards of one job.
#[derive(Debug)]
pub struct ShardReader {
    pins: Pins,
    carry: SchemaRef,
    /// The carried columns that come from the files, without partition columns.
    carry_of_files: SchemaRef,
    layout: Layout,
    /// The columns that the prompt uses; `None`: all.
    columns: Option<Vec<String>>,
    /// The CSV columns to read, for CSV inputs.
    csv: Option<Arc<CsvReading>>,
    /// Decoders of compressed inputs.
    kept: Kept,
    /// The last decoded block of Arrow inputs.
    kept_block: KeptBlock,
    /// Open table files by input index, newest last.
    footers: Mutex<VecDeque<(u32, TableFile)>>,
}

impl ShardReader {
    /// A reader of the planned `files`. `carry`: the plan's carried columns. `columns`: the columns
    /// that the prompt uses; `None`: all.
    pub fn new(files: Vec<InputFile>, carry: SchemaRef, columns: Option<Vec<String>>) -> ShardReader {
        ShardReader {
            pins: Pins::new(files),
            carry_of_files: carry.clone(),
            carry,
            layout: Layout::default(),
            columns,
            csv: None,
            kept: Kept::default(),
            kept_block: KeptBlock::default(),
            footers: Mutex::default(),
        }
    }

    /// The same reader, for inputs with this layout.
    pub fn of_layout(mut self, layout: Layout) -> ShardReader {
        let is_read = |name: &str| self.is_shown(name) || self.carry.field_with_name(name).is_ok();
        self.csv = layout
            .csv
            .clone()
            .map(|table| Arc::new(CsvReading::new(table, is_read)));
        let of_files = self
            .carry
            .fields()
            .iter()
            .filter(|field| !layout.is_added(field.name()));
        self.carry_of_files = Arc::new(Schema::new(of_files.cloned().collect::<Vec<_>>()));
        self.layout = layout;
        self
    }

    /// Whether the prompt uses this column.
    fn is_shown(&self, name: &str) -> bool {
        let columns = self.columns.as_ref();
        columns.is_none_or(|columns| columns.iter().any(|column| column == name))
    }

    /// The carried columns that come from the files.
    pub(super) fn carry_of_files(&self) -> &SchemaRef {
        &self.carry_of_files
    }

    /// Columns that are null in the files that lack them.
    pub(super) fn absent(&self) -> &[String] {
        &self.layout.absent
    }

    /// Whether undecodable rows become rows with an error instead of stopping the job.
    pub(super) fn skips_unreadable(&self) -> bool {
        self.layout.skip_unreadable
    }

    /// Adds the columns that no file holds to rows of `input`; `places` gives their row numbers.
    pub(super) fn with_added(
        &self,
        input: u32,
        mut piece: SegmentRows,
        places: impl Iterator<Item = u64>,
    ) -> Result<SegmentRows, DatasetError> {
        if self.layout.partitions.is_empty() && self.layout.sample.is_none() {
            return Ok(piece);
        }
        let texts = &self.pins.files()[input as usize].partition;
        let columns = || self.layout.partitions.iter().zip(texts);
        for (column, text) in columns().filter(|(column, _)| self.is_shown(&column.name)) {
            let value = column.value(text.as_deref());
            for row in piece.rows.iter_mut().flatten() {
                row.insert(column.name.clone(), value.clone());
            }
        }
        let count = piece.rows.len();
        let before: u64 = self.pins.files()[..input as usize].iter().map(|file| file.rows).sum();
        let place: ArrayRef = Arc::new(Int64Array::from_iter_values(places.map(|row| (before + row) as i64)));
        let carried = self.carry.fields().iter().map(|field| {
            let of_folder = columns().find(|(column, _)| column.name == *field.name());
            match of_folder {
                Some((column, text)) => Ok(column.array(text.as_deref(), count)),
                None if self.layout.is_added(field.name()) => Ok(place.clone()),
                None => piece.carry.column_by_name(field.name()).cloned().ok_or(field.name()),
            }
        });
        let carried = carried.collect::<Result<Vec<ArrayRef>, _>>();
        let carried = carried.map_err(|name| DatasetError::Output(format!("carried column `{name}` is gone")))?;
        let options = RecordBatchOptions::new().with_row_count(Some(count));
        piece.carry = RecordBatch::try_new_with_options(self.carry.clone(), carried, &options)
            .map_err(|e| DatasetError::Output(format!("carried columns: {e}")))?;
        Ok(piece)
    }

    /// Bytes decompressed so far for compressed inputs, including skipped ones.
    pub fn decompressed(&self) -> u64 {
        self.kept.made()
    }

    /// The bytes of a text input.
    pub(super) fn text(&self, file: &PinnedFile, planned: &InputFile) -> TextFile {
        TextFile {
            file: file.clone(),
            codec: planned.compressed.as_ref().map(|compressed| compressed.codec),
            kept: Some(self.kept.clone()),
        }
    }

    pub(super) fn csv(&self) -> Option<&Arc<CsvReading>> {
        self.csv.as_ref()
    }

    /// The inputs and their known states.
    pub fn pins(&self) -> &Pins {
        &self.pins
    }

    /// A shard's carried columns as nulls, for inputs that are gone.
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

    /// Bounds the memory that column types alone can require, since a record can name any type.
    fn check_room(&self, shard: &Shard) -> Result<(), DatasetError> {
        check_room(&self.carry, shard.rows).map_err(|why| DatasetError::Output(format!("carried columns: {why}")))
    }

    /// The carried columns.
    pub fn carry(&self) -> &SchemaRef {
        &self.carry
    }

    /// The columns that the prompt uses; `None`: all.
    pub fn columns(&self) -> Option<&[String]> {
        self.columns.as_deref()
    }

    /// The rows of a shard, in pieces that fit in memory. `wanted`: the row ranges of the job's
    /// input to read; `None`: all. Other rows are returned as unread rows with null carried
    /// columns.
    ///
    /// # Errors
    /// The carried columns would exceed the memory limit.
    pub fn pieces<'a>(&'a self, shard: &'a Shard, wanted: Option<Vec<Range<u64>>>) -> Result<Pieces<'a>, DatasetError> {
        self.check_room(shard)?;
        Ok(Pieces::new(self, shard, wanted))
    }

    /// Reads a whole shard at once; the caller is responsible for its memory.
    pub async fn read(&self, shard: &Shard) -> Result<ShardRows, DatasetError> {
        let (mut rows, mut carries) = (Vec::new(), Vec::new());
        let mut pieces = self.pieces(shard, None)?;
        while let Some(piece) = pieces.next().await? {
            rows.extend(piece.rows);
            carries.push(piece.carry);
        }
        Ok(ShardRows {
            first_row: shard.first_row,
            carry: self.joined(&carries, rows.len())?,
            rows,
        })
    }

    /// Concatenates the carried columns of a shard's pieces.
    pub fn joined(&self, carries: &[RecordBatch], rows: usize) -> Result<RecordBatch, DatasetError> {
        let carry = match (self.carry.fields().is_empty(), carries) {
            (true, _) => {
                let options = RecordBatchOptions::new().with_row_count(Some(rows));
                RecordBatch::try_new_with_options(self.carry.clone(), Vec::new(), &options)
            }
            (false, [one]) => Ok(one.clone()),
            (false, _) => concat_batches(&self.carry, carries),
        };
        carry.map_err(|e| DatasetError::Output(format!("carried columns: {e}")))
    }

    /// Handles an input whose state differs from the plan: succeeds if its bytes are the planned
    /// ones.
    pub(super) async fn settle(&self, number: u32, input: &PinnedFile) -> Result<(), DatasetError> {
        self.pins.settle(number, input).await?;
        self.footers().retain(|(of, _)| *of != number);
        Ok(())
    }

    fn footers(&self) -> MutexGuard<'_, VecDeque<(u32, TableFile)>> {
        self.footers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The open file of an input, from the cache if possible.
    pub(super) async fn table_file(&self, input: &PinnedFile, number: u32) -> Result<TableFile, DatasetError> {
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
        let format = self.pins.files()[number as usize].format;
        let file = TableFile::open(input.clone(), format, self.kept_block.clone()).await?;
        let mut used: Vec<String> = self.carry.fields().iter().map(|f| f.name().clone()).collect();
        match &self.columns {
            Some(columns) => used.extend(columns.iter().cloned()),
            None => used.extend(file.schema().fields().iter().map(|f| f.name().clone())),
        }
        file.check_columns(&used)?;
        let mut footers = self.footers();
        footers.push_back((number, file.clone()));
        let memory =
            |footers: &VecDeque<(u32, TableFile)>| footers.iter().map(|(_, f)| f.memory_bytes()).sum::<usize>();
        while footers.len() > 1 && (footers.len() > FOOTERS_MAX || memory(&footers) > FOOTER_BYTES_MAX) {
            footers.pop_front();
        }
        Ok(file)
    }
}

/// The column in its planned type, without other data that its buffers hold.
pub(super) fn fit(column: &ArrayRef, to: &DataType) -> Result<ArrayRef, String> {
    let is_wider = wider(column.data_type(), to).is_some_and(|wide| same_type(&wide, to));
    if column.data_type() != to && !is_wider {
        return Err(format!("planned as {to}, it is {}", column.data_type()));
    }
    let owned = without_views(column.data_type());
    // Views keep whole pages alive.
    let column = if owned == *column.data_type() {
        column.clone()
    } else {
        cast(column, &owned).map_err(|e| e.to_string())?
    };
    if column.data_type() == to {
        Ok(column)
    } else {
        cast(&column, to).map_err(|e| e.to_string())
    }
}

/// The type whose values own their bytes.
fn without_views(data_type: &DataType) -> DataType {
    let field = |field: &FieldRef| Arc::new(Field::clone(field).with_data_type(without_views(field.data_type())));
    match data_type {
        DataType::Utf8View => DataType::LargeUtf8,
        DataType::BinaryView => DataType::LargeBinary,
        DataType::List(item) => DataType::List(field(item)),
        DataType::LargeList(item) => DataType::LargeList(field(item)),
        DataType::FixedSizeList(item, n) => DataType::FixedSizeList(field(item), *n),
        DataType::Struct(fields) => DataType::Struct(fields.iter().map(field).collect()),
        DataType::Map(entries, sorted) => DataType::Map(field(entries), *sorted),
        other => other.clone(),
    }
}
