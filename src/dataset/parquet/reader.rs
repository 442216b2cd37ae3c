//! Reads ranges of rows from Parquet files, with only the columns in use.
//!
//! A read fetches column chunks of a row group, with at most two requests if the chunks lie close
//! together. If the row group is much larger than a shard, the read fetches only the pages that
//! hold the requested rows (see [`pages`](super::pages)). A dictionary column is unpacked to its
//! value type.
//!
//! An upper bound of the rows' memory is computed before a page is decoded. If the bound exceeds
//! the limit, the caller gets the cost of each row from [`ParquetFile::row_costs`], divides the
//! rows into smaller ranges, and reads each range column by column.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arrow::array::{Array, RecordBatch};
use arrow::compute::{cast, concat_batches};
use arrow::datatypes::{DataType, Field, FieldRef, Schema, SchemaRef};
use futures::TryStreamExt;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{ArrowReaderMetadata, RowSelection};
use parquet::arrow::async_reader::ParquetRecordBatchStreamBuilder;
use parquet::errors::ParquetError;
use parquet::file::metadata::page_index::PageIndexBuilder;
use parquet::file::metadata::{ColumnChunkMetaData, ParquetMetaData};
use parquet::file::page_index::offset_index::OffsetIndexMetaData;

use super::chunks::{CachedRanges, ChunkReader, LongestDictionaryEntries, MemoryBudget, OverLimit};
use super::cost::{LeafCost, leaf_costs};
use super::footer::{check_chunk, decode_footer, footer_with_metadata, read_footer};
use super::pages::{ChunkInfo, index_pages, parse_index};
use super::text::{BadCell, decode_texts, footer_with_bytes, has_text};
use crate::dataset::error::DatasetError;
use crate::dataset::store::pinned_file::PinnedFile;

/// Rows per decoded batch.
const BATCH_ROWS: usize = 1024;

/// Column chunks smaller than this are fetched whole.
pub(crate) const INDEXED_CHUNK_BYTES_MIN: u64 = 256 << 10;

/// Maximum size of a page index that is read.
const INDEX_BYTES_MAX: u64 = 16 << 20;

/// Maximum number of page indexes cached per file. Further ones are read or built again on demand.
const CACHED_INDEXES_MAX: usize = 256;

/// The rows and columns of one read.
#[derive(Debug, Clone, Default)]
pub struct ReadRequest {
    /// Row ranges of the file, in order.
    pub rows: Vec<Range<u64>>,
    pub columns: Vec<String>,
    /// Columns among `columns` that become JSON.
    pub json_columns: Vec<String>,
}

/// Result of a read.
#[derive(Debug)]
pub enum ReadOutcome {
    /// The requested rows, with columns in the file's order, and the unreadable cells.
    Rows(RecordBatch, Vec<BadCell>),
    /// The rows may take more memory than the limit.
    OverLimit,
}

/// The reason why rows were not read.
enum ReadFailure {
    OverLimit,
    /// The decoder reported an error.
    Decoding(DatasetError),
    Other(DatasetError),
}

impl From<DatasetError> for ReadFailure {
    fn from(error: DatasetError) -> ReadFailure {
        ReadFailure::Other(error)
    }
}

/// Parameters of decoding.
struct DecodeParams {
    /// The footer given to the decoder; its schema may have bytes in place of texts.
    footer: ArrowReaderMetadata,
    schema: SchemaRef,
    /// `None`: no limit.
    budget: Option<MemoryBudget>,
}

/// An open Parquet file.
#[derive(Debug)]
pub struct ParquetFile {
    pub(crate) pinned: PinnedFile,
    pub(crate) footer: ArrowReaderMetadata,
    schema: SchemaRef,
    /// The first row of each row group, followed by the total row count.
    pub(crate) group_starts: Vec<u64>,
    /// Cached page indexes, by row group and leaf column; `None` if a column chunk has no usable
    /// index.
    page_indexes: Mutex<HashMap<(usize, usize), Option<OffsetIndexMetaData>>>,
    /// Pages of the last read that the next one may need: see `ChunkReader::cache_ranges`.
    cache: CachedRanges,
    /// Lengths that were measured so far, for the memory bounds of later reads.
    longest_dictionary_entries: LongestDictionaryEntries,
}

impl ParquetFile {
    /// Reads and checks the footer.
    pub async fn open(pinned: PinnedFile) -> Result<ParquetFile, DatasetError> {
        let footer = read_footer(&pinned).await?;
        let name = pinned.name.clone();
        let size = pinned.size;
        // This runs on a blocking thread, so that the decoder's panic on a hostile footer becomes
        // an error.
        let decoded = tokio::task::spawn_blocking(move || decode_footer(&footer, size)).await;
        let footer = decoded.map_err(|e| e.to_string()).and_then(|r| r);
        let footer = footer.map_err(|why| DatasetError::unreadable(&name, why))?;
        let fields: Vec<FieldRef> = footer.schema().fields().iter().map(unpacked_field).collect();
        let mut group_starts = vec![0];
        for group in footer.metadata().row_groups() {
            group_starts.push(group_starts.last().copied().unwrap_or(0) + group.num_rows() as u64);
        }
        Ok(ParquetFile {
            pinned,
            footer,
            schema: Arc::new(Schema::new(fields)),
            group_starts,
            page_indexes: Mutex::default(),
            cache: Arc::default(),
            longest_dictionary_entries: Arc::default(),
        })
    }

    /// The columns as they are read, with dictionaries unpacked.
    pub fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    pub fn rows(&self) -> u64 {
        self.group_starts.last().copied().unwrap_or(0)
    }

    pub fn name(&self) -> &str {
        &self.pinned.name
    }

    pub fn pinned(&self) -> &PinnedFile {
        &self.pinned
    }

    /// Memory of the footer, in bytes.
    pub fn memory_bytes(&self) -> usize {
        self.footer.metadata().memory_size()
    }

    /// Number of row groups.
    pub fn group_count(&self) -> usize {
        self.footer.metadata().num_row_groups()
    }

    /// Rows of group `group`.
    pub fn group_rows(&self, group: usize) -> u64 {
        self.group_starts[group + 1] - self.group_starts[group]
    }

    /// Uncompressed bytes of the named columns in row group `group`.
    pub fn group_bytes(&self, group: usize, columns: &[String]) -> u64 {
        let metadata = self.footer.metadata();
        let mask = self.mask(columns);
        let chunks = metadata.row_group(group).columns().iter().enumerate();
        chunks
            .filter(|(leaf, _)| mask.leaf_included(*leaf))
            .map(|(_, chunk)| {
                // The size of the decoded values, if the writer gives it: a dictionary may make
                // their encoded size far smaller.
                let unencoded = chunk.unencoded_byte_array_data_bytes().unwrap_or(0);
                chunk.uncompressed_size().max(unencoded).max(0) as u64
            })
            .sum()
    }

    /// Checks the footer's claims about the named columns. The error is one line.
    pub fn check_columns(&self, columns: &[String]) -> Result<(), DatasetError> {
        let metadata = self.footer.metadata();
        let mask = self.mask(columns);
        for (n, group) in metadata.row_groups().iter().enumerate() {
            let chunks = group
                .columns()
                .iter()
                .enumerate()
                .filter(|(leaf, _)| mask.leaf_included(*leaf));
            for (_, chunk) in chunks {
                check_chunk(chunk, group.num_rows(), self.pinned.size).map_err(|why| {
                    let column = chunk.column_path().string();
                    DatasetError::unreadable(&self.pinned.name, format!("row group {n}, column `{column}` {why}"))
                })?;
            }
        }
        Ok(())
    }

    /// Reads rows `first..first + rows` of the named columns, in the file's column order, as one
    /// batch without a memory limit.
    pub async fn read(
        self: &Arc<Self>,
        first: u64,
        rows: u64,
        columns: &[String],
    ) -> Result<RecordBatch, DatasetError> {
        let request = ReadRequest {
            rows: std::iter::once(first..first.saturating_add(rows)).collect(),
            columns: columns.to_vec(),
            json_columns: Vec::new(),
        };
        match self.read_rows(request, None).await? {
            ReadOutcome::Rows(batch, bad) if bad.is_empty() => Ok(batch),
            _ => Err(DatasetError::unreadable(&self.pinned.name, "a text is not UTF-8")),
        }
    }

    /// Reads rows, unless the upper bound of their memory exceeds `limit` bytes.
    pub async fn read_rows(
        self: &Arc<Self>,
        request: ReadRequest,
        limit: Option<u64>,
    ) -> Result<ReadOutcome, DatasetError> {
        let this = self.clone();
        // This is a separate task, so that decoding does not block the caller's task, and a panic
        // on broken pages becomes an error.
        let read = tokio::spawn(async move { this.read_request(&request, limit).await }).await;
        read.map_err(|e| DatasetError::unreadable(&self.pinned.name, e))
            .and_then(|r| r)
    }

    async fn read_request(&self, request: &ReadRequest, limit: Option<u64>) -> Result<ReadOutcome, DatasetError> {
        let schema = self.projected_schema(&request.columns);
        let params = |footer: &ArrowReaderMetadata, schema: &SchemaRef| DecodeParams {
            footer: footer.clone(),
            schema: schema.clone(),
            budget: limit.map(|limit| self.budget(&request.json_columns, limit)),
        };
        let error = match self.read_batches(request, &params(&self.footer, &schema)).await {
            Ok(batch) => return Ok(ReadOutcome::Rows(batch, Vec::new())),
            Err(ReadFailure::OverLimit) => return Ok(ReadOutcome::OverLimit),
            Err(ReadFailure::Other(error)) => return Err(error),
            Err(ReadFailure::Decoding(error)) => error,
        };
        if !schema.fields().iter().any(|field| has_text(field.data_type())) {
            return Err(error);
        }
        // The cause may be a single text that is not UTF-8. Any other error occurs again on the
        // second read.
        let Ok(footer) = footer_with_bytes(&self.footer) else {
            return Err(error);
        };
        let as_read = footer.schema().fields().iter();
        let as_read = as_read.filter(|field| request.columns.contains(field.name())).cloned();
        let bytes = Arc::new(Schema::new(as_read.collect::<Vec<_>>()));
        match self.read_batches(request, &params(&footer, &bytes)).await {
            Ok(batch) => {
                let (batch, bad) =
                    decode_texts(&batch, &schema).map_err(|why| DatasetError::unreadable(&self.pinned.name, why))?;
                Ok(ReadOutcome::Rows(batch, bad))
            }
            Err(ReadFailure::Other(other)) => Err(other),
            Err(_) => Err(error),
        }
    }

    fn budget(&self, json_columns: &[String], limit: u64) -> MemoryBudget {
        MemoryBudget {
            costs: Arc::new(self.costs(json_columns)),
            limit,
            used: Arc::new(AtomicU64::new(0)),
            rows: 0,
            longest_dictionary_entries: self.longest_dictionary_entries.clone(),
        }
    }

    pub(crate) fn costs(&self, json_columns: &[String]) -> Vec<LeafCost> {
        leaf_costs(self.footer.parquet_schema(), self.footer.schema(), json_columns)
    }

    async fn read_batches(&self, request: &ReadRequest, params: &DecodeParams) -> Result<RecordBatch, ReadFailure> {
        let unreadable = |why: String| ReadFailure::Other(DatasetError::unreadable(&self.pinned.name, why));
        if let Some(last) = request.rows.last().filter(|last| last.end > self.rows()) {
            let why = format!("rows {} to {} are wanted, it has {}", last.start, last.end, self.rows());
            return Err(unreadable(why));
        }
        if request.columns.is_empty() {
            return Err(unreadable("no column is asked for".into()));
        }
        let mut batches = Vec::new();
        for group in self.groups_with_rows(&request.rows) {
            let (start, end) = (self.group_starts[group], self.group_starts[group + 1]);
            let in_group = request.rows.iter().map(|r| r.start.max(start)..r.end.min(end));
            let in_group = in_group
                .filter(|r| !r.is_empty())
                .map(|r| r.start - start..r.end - start);
            let in_group: Vec<Range<u64>> = in_group.collect();
            if !in_group.is_empty() {
                self.read_group(group, &in_group, &request.columns, params, &mut batches)
                    .await?;
            }
        }
        let batch = concat_batches(&params.schema, &batches).map_err(|e| unreadable(e.to_string()))?;
        let rows: u64 = request.rows.iter().map(|r| r.end - r.start).sum();
        if batch.num_rows() as u64 != rows {
            let why = format!("{} rows came where {rows} were asked for", batch.num_rows());
            return Err(unreadable(why));
        }
        Ok(batch)
    }

    /// The row groups that may contain these rows.
    pub(crate) fn groups_with_rows(&self, rows: &[Range<u64>]) -> Range<usize> {
        let (Some(first), Some(last)) = (rows.first(), rows.last()) else {
            return 0..0;
        };
        let from = self
            .group_starts
            .partition_point(|&start| start <= first.start)
            .saturating_sub(1);
        let to = self.group_starts.partition_point(|&start| start < last.end);
        from..to.min(self.group_count())
    }

    async fn read_group(
        &self,
        group: usize,
        rows: &[Range<u64>],
        columns: &[String],
        params: &DecodeParams,
        batches: &mut Vec<RecordBatch>,
    ) -> Result<(), ReadFailure> {
        let mask = self.mask(columns);
        let group_rows = self.group_rows(group);
        let is_whole_group = rows.len() == 1 && rows[0] == (0..group_rows);
        let (footer, page_rows) = if is_whole_group {
            (params.footer.clone(), HashMap::new())
        } else {
            self.indexed_footer(&params.footer, group, rows, &mask).await?
        };
        let count = rows.iter().map(|r| r.end - r.start).sum();
        let reader = ChunkReader {
            pinned: self.pinned.clone(),
            footer: footer.metadata().clone(),
            group,
            mask: mask.clone(),
            page_rows,
            cache: self.cache.clone(),
            budget: params
                .budget
                .clone()
                .map(|budget| MemoryBudget { rows: count, ..budget }),
        };
        let mut builder = ParquetRecordBatchStreamBuilder::new_with_metadata(reader, footer)
            .with_row_groups(vec![group])
            .with_projection(mask)
            .with_batch_size(BATCH_ROWS);
        if !is_whole_group {
            let rows = rows.iter().map(|r| r.start as usize..r.end as usize);
            builder = builder.with_row_selection(RowSelection::from_consecutive_ranges(rows, group_rows as usize));
        }
        let fail = |e: ParquetError| self.read_error(group, e);
        let mut stream = builder.build().map_err(fail)?;
        while let Some(batch) = stream.try_next().await.map_err(fail)? {
            let batch =
                unpack(&batch, &params.schema).map_err(|why| DatasetError::unreadable(&self.pinned.name, why))?;
            batches.push(batch);
        }
        Ok(())
    }

    /// The footer with a page index for the large columns of `group` if only part of the group is
    /// read, and the row count of each indexed page by its offset.
    async fn indexed_footer(
        &self,
        footer: &ArrowReaderMetadata,
        group: usize,
        rows: &[Range<u64>],
        mask: &ProjectionMask,
    ) -> Result<(ArrowReaderMetadata, HashMap<u64, i64>), DatasetError> {
        let metadata = self.footer.metadata();
        let group_metadata = metadata.row_group(group);
        let mut page_rows = HashMap::new();
        let span = rows.last().map_or(0, |r| r.end) - rows.first().map_or(0, |r| r.start);
        if span.saturating_mul(2) >= self.group_rows(group) {
            return Ok((footer.clone(), page_rows));
        }
        let mut builder = PageIndexBuilder::default();
        builder.allocate_offset_indexes(metadata.num_row_groups(), group_metadata.num_columns());
        let mut has_index = false;
        for (leaf, chunk) in group_metadata.columns().iter().enumerate() {
            let (start, length) = chunk.byte_range();
            if !mask.leaf_included(leaf) || length < INDEXED_CHUNK_BYTES_MIN {
                continue;
            }
            let index = self.page_index(group, leaf, chunk, start..start + length).await?;
            if let Some(index) = index {
                if chunk.column_descr().max_rep_level() == 0 {
                    let pages = index.page_locations();
                    let ends = pages.iter().skip(1).map(|page| page.first_row_index);
                    let ends = ends.chain([self.group_rows(group) as i64]);
                    let rows = pages.iter().zip(ends);
                    page_rows.extend(rows.map(|(page, end)| (page.offset as u64, end - page.first_row_index)));
                }
                builder.put_offset_index(index, group, leaf);
                has_index = true;
            }
        }
        if !has_index {
            return Ok((footer.clone(), page_rows));
        }
        let metadata = ParquetMetaData::clone(footer.metadata())
            .into_builder()
            .set_page_index(Some(Arc::new(builder.build())))
            .build();
        let indexed = footer_with_metadata(footer, Arc::new(metadata));
        let indexed = indexed.map_err(|why| DatasetError::unreadable(&self.pinned.name, why))?;
        Ok((indexed, page_rows))
    }

    /// The page index of one column chunk: from the cache, from the file, or built from the page
    /// headers.
    pub(crate) async fn page_index(
        &self,
        group: usize,
        leaf: usize,
        metadata: &ColumnChunkMetaData,
        range: Range<u64>,
    ) -> Result<Option<OffsetIndexMetaData>, DatasetError> {
        let known = self.lock_indexes().get(&(group, leaf)).cloned();
        if let Some(index) = known {
            return Ok(index);
        }
        let chunk = ChunkInfo {
            range,
            claimed_bytes: metadata.uncompressed_size().max(0) as u64,
            is_flat: metadata.column_descr().max_rep_level() == 0,
            rows: self.group_rows(group),
        };
        let index = match self.stored_index(metadata, &chunk).await? {
            Some(index) => Some(index),
            None => index_pages(&self.pinned, &chunk).await?,
        };
        let mut indexes = self.lock_indexes();
        if indexes.len() >= CACHED_INDEXES_MAX {
            indexes.clear();
        }
        indexes.insert((group, leaf), index.clone());
        Ok(index)
    }

    async fn stored_index(
        &self,
        metadata: &ColumnChunkMetaData,
        chunk: &ChunkInfo,
    ) -> Result<Option<OffsetIndexMetaData>, DatasetError> {
        let (Some(offset), Some(length)) = (metadata.offset_index_offset(), metadata.offset_index_length()) else {
            return Ok(None);
        };
        let position = u64::try_from(offset).ok().zip(u64::try_from(length).ok());
        let range = position.and_then(|(offset, length)| Some(offset..offset.checked_add(length)?));
        match range.filter(|range| range.end <= self.pinned.size && range.end - range.start <= INDEX_BYTES_MAX) {
            Some(range) => Ok(parse_index(&self.pinned.bytes(range).await?, chunk)),
            None => Ok(None),
        }
    }

    fn lock_indexes(&self) -> MutexGuard<'_, HashMap<(usize, usize), Option<OffsetIndexMetaData>>> {
        self.page_indexes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn mask(&self, columns: &[String]) -> ProjectionMask {
        let roots = self.schema.fields().iter().enumerate();
        let included = roots
            .filter(|(_, field)| columns.contains(field.name()))
            .map(|(i, _)| i);
        ProjectionMask::roots(self.footer.parquet_schema(), included)
    }

    fn projected_schema(&self, columns: &[String]) -> SchemaRef {
        let fields = self
            .schema
            .fields()
            .iter()
            .filter(|f| columns.contains(f.name()))
            .cloned();
        Arc::new(Schema::new(fields.collect::<Vec<_>>()))
    }

    /// Maps a decoder error. A store error that passed through the decoder is returned unchanged.
    fn read_error(&self, group: usize, error: ParquetError) -> ReadFailure {
        let unreadable = |why: String| DatasetError::unreadable(&self.pinned.name, format!("row group {group}: {why}"));
        match error {
            ParquetError::External(source) if source.is::<OverLimit>() => ReadFailure::OverLimit,
            ParquetError::External(source) => match source.downcast::<DatasetError>() {
                Ok(ours) => ReadFailure::Other(*ours),
                Err(other) => ReadFailure::Other(unreadable(other.to_string())),
            },
            other => ReadFailure::Decoding(unreadable(other.to_string())),
        }
    }
}

pub(crate) fn unpacked_field(field: &FieldRef) -> FieldRef {
    Arc::new(Field::clone(field).with_data_type(unpacked(field.data_type())))
}

/// The type without dictionaries, at any depth.
fn unpacked(data_type: &DataType) -> DataType {
    match data_type {
        DataType::Dictionary(_, values) => unpacked(values),
        DataType::List(item) => DataType::List(unpacked_field(item)),
        DataType::LargeList(item) => DataType::LargeList(unpacked_field(item)),
        DataType::FixedSizeList(item, n) => DataType::FixedSizeList(unpacked_field(item), *n),
        DataType::Struct(fields) => DataType::Struct(fields.iter().map(unpacked_field).collect()),
        DataType::Map(entries, sorted) => DataType::Map(unpacked_field(entries), *sorted),
        other => other.clone(),
    }
}

fn unpack(batch: &RecordBatch, schema: &SchemaRef) -> Result<RecordBatch, String> {
    let columns = batch.columns().iter().zip(schema.fields()).map(|(column, field)| {
        if column.data_type() == field.data_type() {
            Ok(column.clone())
        } else {
            cast(column, field.data_type())
        }
    });
    let columns = columns.collect::<Result<Vec<_>, _>>().map_err(|e| e.to_string())?;
    RecordBatch::try_new(schema.clone(), columns).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dictionaries_are_unpacked_at_any_depth() {
        let words = DataType::Dictionary(Box::new(DataType::Int8), Box::new(DataType::Utf8));
        let lists = DataType::List(Arc::new(Field::new("item", words, true)));
        let parts = DataType::Struct(vec![Field::new("words", lists, true)].into());
        let expected =
            DataType::Struct(vec![Field::new("words", DataType::new_list(DataType::Utf8, true), true)].into());
        assert_eq!(unpacked(&parts), expected);
    }
}
