//! Reads a shard's rows: the fields for the prompt, and the carried columns as an Arrow batch.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arrow::array::{Array, ArrayRef, Int64Array, RecordBatch, RecordBatchOptions, new_null_array};
use arrow::compute::{cast, concat_batches};
use arrow::datatypes::{DataType, Field, FieldRef, Schema, SchemaRef};

use super::arrow::reader::BlockCache;
use super::csv::reader::CsvRowReader;
use super::error::DatasetError;
use super::layout::Layout;
use super::lines::text_file::{DecoderPool, TextFile};
use super::pieces::{SegmentRows, ShardPieces};
use super::plan::tables::{common_type, same_type};
use super::plan::{InputFile, Shard};
use super::row::ShardRows;
use super::store::job_inputs::JobInputs;
use super::store::pinned_file::PinnedFile;
use super::table::TableFile;
use super::widths::check_fixed_memory;

/// Maximum number of table files that stay open between shards.
const OPEN_FILES_MAX: usize = 32;

/// Maximum memory of these open files, in bytes; the last used file always stays open.
const OPEN_FILES_BYTES_MAX: usize = 64 << 20;

/// Reads shards of one job.
#[derive(Debug)]
pub struct ShardReader {
    inputs: JobInputs,
    carry: SchemaRef,
    /// The carried columns that come from the files: neither partition columns nor the row number
    /// of a sampled row.
    carry_of_files: SchemaRef,
    layout: Layout,
    /// The columns that the prompt uses; `None`: all.
    columns: Option<Vec<String>>,
    /// The CSV columns to read, for CSV inputs.
    csv: Option<Arc<CsvRowReader>>,
    /// Decoders of compressed inputs.
    decoders: DecoderPool,
    /// The last decoded block of Arrow inputs.
    block_cache: BlockCache,
    /// Open table files with the indices of their inputs, last used last.
    open_files: Mutex<VecDeque<(u32, TableFile)>>,
}

impl ShardReader {
    /// A reader of the planned `files`. `carry`: the plan's carried columns. `columns`: the columns
    /// that the prompt uses; `None`: all.
    pub fn new(files: Vec<InputFile>, carry: SchemaRef, columns: Option<Vec<String>>) -> ShardReader {
        ShardReader {
            inputs: JobInputs::new(files),
            carry_of_files: carry.clone(),
            carry,
            layout: Layout::default(),
            columns,
            csv: None,
            decoders: DecoderPool::default(),
            block_cache: BlockCache::default(),
            open_files: Mutex::default(),
        }
    }

    /// The same reader, for inputs with this layout.
    pub fn with_layout(mut self, layout: Layout) -> ShardReader {
        let is_read = |name: &str| self.is_shown(name) || self.carry.field_with_name(name).is_ok();
        self.csv = layout
            .csv
            .clone()
            .map(|table| Arc::new(CsvRowReader::new(table, is_read)));
        let file_columns = self
            .carry
            .fields()
            .iter()
            .filter(|field| !layout.is_added_column(field.name()));
        self.carry_of_files = Arc::new(Schema::new(file_columns.cloned().collect::<Vec<_>>()));
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
    pub(super) fn absent_columns(&self) -> &[String] {
        &self.layout.absent
    }

    /// Whether undecodable rows become rows with an error instead of stopping the job.
    pub(super) fn skips_unreadable(&self) -> bool {
        self.layout.skip_unreadable
    }

    /// Adds the columns that no file holds to rows of `input`: partition columns, and row numbers
    /// for a sample. `row_numbers`: the rows' numbers in the file.
    pub(super) fn with_added_columns(
        &self,
        input: u32,
        mut piece: SegmentRows,
        row_numbers: impl Iterator<Item = u64>,
    ) -> Result<SegmentRows, DatasetError> {
        if self.layout.partitions.is_empty() && self.layout.sample.is_none() {
            return Ok(piece);
        }
        let texts = &self.inputs.files()[input as usize].partition;
        let columns = || self.layout.partitions.iter().zip(texts);
        for (column, text) in columns().filter(|(column, _)| self.is_shown(&column.name)) {
            let value = column.value(text.as_deref());
            for row in piece.rows.iter_mut().flatten() {
                row.insert(column.name.clone(), value.clone());
            }
        }
        let count = piece.rows.len();
        let rows_before: u64 = self.inputs.files()[..input as usize].iter().map(|file| file.rows).sum();
        let input_rows = row_numbers.map(|row| (rows_before + row) as i64);
        let input_rows: ArrayRef = Arc::new(Int64Array::from_iter_values(input_rows));
        let carried = self.carry.fields().iter().map(|field| {
            let partition = columns().find(|(column, _)| column.name == *field.name());
            match partition {
                Some((column, text)) => Ok(column.array(text.as_deref(), count)),
                None if self.layout.is_added_column(field.name()) => Ok(input_rows.clone()),
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

    /// Number of bytes decompressed so far for compressed inputs, including bytes before a shard.
    pub fn decompressed_bytes(&self) -> u64 {
        self.decoders.decompressed_bytes()
    }

    /// The text file of an input, whose decoders are kept between shards.
    pub(super) fn text_file(&self, file: &PinnedFile, planned: &InputFile) -> TextFile {
        TextFile {
            file: file.clone(),
            codec: planned.compressed.as_ref().map(|compressed| compressed.codec),
            decoders: Some(self.decoders.clone()),
        }
    }

    pub(super) fn csv(&self) -> Option<&Arc<CsvRowReader>> {
        self.csv.as_ref()
    }

    /// The inputs and their known states.
    pub fn inputs(&self) -> &JobInputs {
        &self.inputs
    }

    /// A shard's carried columns as nulls, for inputs that cannot be read any more.
    pub fn null_carry(&self, shard: &Shard) -> Result<RecordBatch, DatasetError> {
        self.check_fixed_memory(shard)?;
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

    /// Checks the memory that the types of the carried columns require, whatever their values are.
    fn check_fixed_memory(&self, shard: &Shard) -> Result<(), DatasetError> {
        let checked = check_fixed_memory(&self.carry, shard.rows);
        checked.map_err(|why| DatasetError::Output(format!("carried columns: {why}")))
    }

    /// The carried columns.
    pub fn carry(&self) -> &SchemaRef {
        &self.carry
    }

    /// The columns that the prompt uses; `None`: all.
    pub fn columns(&self) -> Option<&[String]> {
        self.columns.as_deref()
    }

    /// The rows of a shard, in pieces that fit in memory. `wanted`: the rows to read, as row ranges
    /// of the job's input; `None`: all. Other rows are returned as rows with an error and null
    /// carried columns.
    ///
    /// # Errors
    /// The types of the carried columns alone require more memory than the limit.
    pub fn pieces<'a>(
        &'a self,
        shard: &'a Shard,
        wanted: Option<Vec<Range<u64>>>,
    ) -> Result<ShardPieces<'a>, DatasetError> {
        self.check_fixed_memory(shard)?;
        Ok(ShardPieces::new(self, shard, wanted))
    }

    /// Reads a whole shard at once, without a limit on its memory.
    pub async fn read(&self, shard: &Shard) -> Result<ShardRows, DatasetError> {
        let (mut rows, mut carries) = (Vec::new(), Vec::new());
        let mut pieces = self.pieces(shard, None)?;
        while let Some(piece) = pieces.next().await? {
            rows.extend(piece.rows);
            carries.push(piece.carry);
        }
        Ok(ShardRows {
            first_row: shard.first_row,
            carry: self.concat_carry(&carries, rows.len())?,
            rows,
        })
    }

    /// Concatenates the carried columns of a shard's pieces.
    pub fn concat_carry(&self, carries: &[RecordBatch], rows: usize) -> Result<RecordBatch, DatasetError> {
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

    /// Checks by its hash that an input whose ETag or version differs from the plan still has the
    /// planned bytes.
    pub(super) async fn verify_current(&self, number: u32, input: &PinnedFile) -> Result<(), DatasetError> {
        self.inputs.verify_current(number, input).await?;
        self.open_files().retain(|(open, _)| *open != number);
        Ok(())
    }

    fn open_files(&self) -> MutexGuard<'_, VecDeque<(u32, TableFile)>> {
        self.open_files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The table file of an input, which stays open for later shards.
    pub(super) async fn table_file(&self, input: &PinnedFile, number: u32) -> Result<TableFile, DatasetError> {
        {
            let mut open_files = self.open_files();
            if let Some(index) = open_files.iter().position(|(open, _)| *open == number)
                && let Some(entry) = open_files.remove(index)
            {
                let file = entry.1.clone();
                open_files.push_back(entry);
                return Ok(file);
            }
        }
        let format = self.inputs.files()[number as usize].format;
        let file = TableFile::open(input.clone(), format, self.block_cache.clone()).await?;
        let mut used: Vec<String> = self.carry.fields().iter().map(|f| f.name().clone()).collect();
        match &self.columns {
            Some(columns) => used.extend(columns.iter().cloned()),
            None => used.extend(file.schema().fields().iter().map(|f| f.name().clone())),
        }
        file.check_columns(&used)?;
        let mut open_files = self.open_files();
        open_files.push_back((number, file.clone()));
        let memory_bytes =
            |files: &VecDeque<(u32, TableFile)>| files.iter().map(|(_, file)| file.memory_bytes()).sum::<usize>();
        while open_files.len() > 1
            && (open_files.len() > OPEN_FILES_MAX || memory_bytes(&open_files) > OPEN_FILES_BYTES_MAX)
        {
            open_files.pop_front();
        }
        Ok(file)
    }
}

/// The column as its planned type; its values are copied if they are views into other buffers.
pub(super) fn to_planned_type(column: &ArrayRef, planned: &DataType) -> Result<ArrayRef, String> {
    let common = common_type(column.data_type(), planned);
    let is_wider = common.is_some_and(|common| same_type(&common, planned));
    if column.data_type() != planned && !is_wider {
        return Err(format!("planned as {planned}, it is {}", column.data_type()));
    }
    let owned_type = without_views(column.data_type());
    // Views keep whole pages alive.
    let column = if owned_type == *column.data_type() {
        column.clone()
    } else {
        cast(column, &owned_type).map_err(|e| e.to_string())?
    };
    if column.data_type() == planned {
        Ok(column)
    } else {
        cast(&column, planned).map_err(|e| e.to_string())
    }
}

/// The corresponding type whose values own their bytes.
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
