//! Parquet in: footers with limits, and rows by range with only the columns in use.
//!
//! Reads fetch the wanted column chunks of a row group with at most two requests where they lie near each other; of
//! groups that are much larger than a shard, only the pages that hold the wanted rows (see
//! [`parquet_pages`](super::parquet_pages)). Dictionaries are unpacked: a dictionary column reads as its value type.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arrow::array::{Array, RecordBatch};
use arrow::compute::{cast, concat_batches};
use arrow::datatypes::{DataType, Field, FieldRef, Schema, SchemaRef};
use bytes::Bytes;
use futures::future::BoxFuture;
use futures::{FutureExt, TryStreamExt};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{ArrowReaderMetadata, ArrowReaderOptions, RowSelection, RowSelector};
use parquet::arrow::async_reader::{AsyncFileReader, ParquetRecordBatchStreamBuilder};
use parquet::errors::ParquetError;
use parquet::file::metadata::page_index::PageIndexBuilder;
use parquet::file::metadata::{ColumnChunkMetaData, ParquetMetaData};
use parquet::file::page_index::offset_index::OffsetIndexMetaData;

use super::error::DatasetError;
use super::parquet_footer::{arrow_footer, check_chunk, decode_footer, read_footer};
use super::parquet_pages::{Chunk, check_pages, index_pages, parse_index};
use super::pinned::PinnedFile;

/// Rows decoded at once.
const BATCH_ROWS: usize = 1024;

/// Most decoded bytes of one read; dictionaries may unfold to far more than the file's size.
const READ_BYTES_MAX: usize = 1 << 30;

/// Column chunks smaller than this are fetched whole.
const INDEX_BYTES_MIN: u64 = 256 << 10;

/// Largest page index that is read.
const INDEX_BYTES_MAX: u64 = 16 << 20;

/// Most bytes kept of one read for the next shard of the same row group.
const KEPT_BYTES_MAX: usize = 4 << 20;

/// Page indexes kept of one file, of about so many pages each: the rest is found again when it is wanted.
const INDEXES_MAX: usize = 256;

/// Bytes at hand, by where they lie in the file.
type Kept = Arc<Mutex<Vec<(Range<u64>, Bytes)>>>;

/// An open Parquet file.
#[derive(Debug)]
pub struct ParquetFile {
    pinned: PinnedFile,
    footer: ArrowReaderMetadata,
    schema: SchemaRef,
    /// First row of each row group, and of the end.
    starts: Vec<u64>,
    /// Page indexes made so far, by row group and leaf column; `None` where there can be none.
    pages: Mutex<HashMap<(usize, usize), Option<OffsetIndexMetaData>>>,
    /// Pages that the last read shares with the next one: see [`ChunkReader::keep`].
    kept: Kept,
}

impl ParquetFile {
    /// Reads and checks the footer.
    pub async fn open(pinned: PinnedFile) -> Result<ParquetFile, DatasetError> {
        let footer = read_footer(&pinned).await?;
        let name = pinned.name.clone();
        let size = pinned.size;
        // A thread of its own: what a hostile footer makes the decoder panic about ends there.
        let decoded = tokio::task::spawn_blocking(move || decode_footer(&footer, size)).await;
        let footer = decoded.map_err(|e| e.to_string()).and_then(|r| r);
        let footer = footer.map_err(|why| DatasetError::unreadable(&name, why))?;
        let fields: Vec<FieldRef> = footer.schema().fields().iter().map(unpacked_field).collect();
        let mut starts = vec![0];
        for group in footer.metadata().row_groups() {
            starts.push(starts.last().copied().unwrap_or(0) + group.num_rows() as u64);
        }
        Ok(ParquetFile {
            pinned,
            footer,
            schema: Arc::new(Schema::new(fields)),
            starts,
            pages: Mutex::default(),
            kept: Arc::default(),
        })
    }

    /// The columns as they are read: dictionaries unpacked.
    pub fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    pub fn rows(&self) -> u64 {
        self.starts.last().copied().unwrap_or(0)
    }

    pub fn name(&self) -> &str {
        &self.pinned.name
    }

    pub fn pinned(&self) -> &PinnedFile {
        &self.pinned
    }

    /// Memory that the footer holds, in bytes.
    pub fn memory_bytes(&self) -> usize {
        self.footer.metadata().memory_size()
    }

    /// Row groups in order.
    pub fn group_count(&self) -> usize {
        self.footer.metadata().num_row_groups()
    }

    /// Rows of group `group`.
    pub fn group_rows(&self, group: usize) -> u64 {
        self.starts[group + 1] - self.starts[group]
    }

    /// Uncompressed bytes of the named columns in row group `group`.
    pub fn group_bytes(&self, group: usize, columns: &[String]) -> u64 {
        let metadata = self.footer.metadata();
        let mask = self.mask(columns);
        let chunks = metadata.row_group(group).columns().iter().enumerate();
        chunks
            .filter(|(leaf, _)| mask.leaf_included(*leaf))
            .map(|(_, chunk)| {
                // Where the writer says what the values take without their dictionary, that is what reading costs.
                let unencoded = chunk.unencoded_byte_array_data_bytes().unwrap_or(0);
                chunk.uncompressed_size().max(unencoded).max(0) as u64
            })
            .sum()
    }

    /// Checks what the footer claims of the named columns; one line per fault.
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

    /// Reads rows `first..first + rows` of the named columns, in the file's column order, as one batch.
    pub async fn read(
        self: &Arc<Self>,
        first: u64,
        rows: u64,
        columns: &[String],
    ) -> Result<RecordBatch, DatasetError> {
        let this = self.clone();
        let columns = columns.to_vec();
        // A task of its own: decoding leaves this one free, and a panic over broken pages ends there.
        let read = tokio::spawn(async move { this.read_batches(first, rows, &columns).await }).await;
        read.map_err(|e| DatasetError::unreadable(&self.pinned.name, e))
            .and_then(|r| r)
    }

    async fn read_batches(&self, first: u64, rows: u64, columns: &[String]) -> Result<RecordBatch, DatasetError> {
        let end = first.checked_add(rows).filter(|&end| end <= self.rows());
        let Some(end) = end else {
            let why = format!(
                "rows {first} to {} are wanted, it has {}",
                first.saturating_add(rows),
                self.rows()
            );
            return Err(DatasetError::unreadable(&self.pinned.name, why));
        };
        let schema = self.projected_schema(columns);
        let mut batches = Vec::new();
        let first_group = self.starts.partition_point(|&start| start <= first).saturating_sub(1);
        for group in first_group..self.group_count() {
            let (from, to) = (first.max(self.starts[group]), end.min(self.starts[group + 1]));
            if from < to {
                let within = from - self.starts[group]..to - self.starts[group];
                self.read_group(group, within, columns, &schema, &mut batches).await?;
            } else if self.starts[group] >= end {
                break;
            }
        }
        let batch = concat_batches(&schema, &batches).map_err(|e| DatasetError::unreadable(&self.pinned.name, e))?;
        if batch.num_rows() as u64 != rows {
            let why = format!("{} rows came where {rows} were asked for", batch.num_rows());
            return Err(DatasetError::unreadable(&self.pinned.name, why));
        }
        Ok(batch)
    }

    async fn read_group(
        &self,
        group: usize,
        rows: Range<u64>,
        columns: &[String],
        schema: &SchemaRef,
        batches: &mut Vec<RecordBatch>,
    ) -> Result<(), DatasetError> {
        if columns.is_empty() {
            return Err(DatasetError::unreadable(&self.pinned.name, "no column is asked for"));
        }
        let mask = self.mask(columns);
        let group_rows = self.group_rows(group);
        let whole = rows.start == 0 && rows.end == group_rows;
        let (footer, page_rows) = if whole {
            (self.footer.clone(), HashMap::new())
        } else {
            self.indexed_footer(group, &rows, &mask).await?
        };
        let reader = ChunkReader {
            pinned: self.pinned.clone(),
            footer: footer.metadata().clone(),
            group,
            mask: mask.clone(),
            page_rows,
            kept: self.kept.clone(),
        };
        let mut builder = ParquetRecordBatchStreamBuilder::new_with_metadata(reader, footer)
            .with_row_groups(vec![group])
            .with_projection(mask)
            .with_batch_size(BATCH_ROWS);
        if !whole {
            builder = builder.with_row_selection(RowSelection::from(vec![
                RowSelector::skip(rows.start as usize),
                RowSelector::select((rows.end - rows.start) as usize),
                RowSelector::skip((group_rows - rows.end) as usize),
            ]));
        }
        let fail = |e: ParquetError| self.read_error(group, e);
        let mut stream = builder.build().map_err(fail)?;
        let mut bytes: usize = batches.iter().map(RecordBatch::get_array_memory_size).sum();
        while let Some(batch) = stream.try_next().await.map_err(fail)? {
            let batch = unpack(&batch, schema).map_err(|why| DatasetError::unreadable(&self.pinned.name, why))?;
            bytes = bytes.saturating_add(batch.get_array_memory_size());
            if bytes > READ_BYTES_MAX {
                let why = format!(
                    "row group {group}: the rows of one shard take more than {READ_BYTES_MAX} bytes; set fewer `shards.rows`"
                );
                return Err(DatasetError::unreadable(&self.pinned.name, why));
            }
            batches.push(batch);
        }
        Ok(())
    }

    /// The footer with a page index for the large columns of `group`, where only a part of it is wanted, and the rows of
    /// each page by where it begins.
    async fn indexed_footer(
        &self,
        group: usize,
        rows: &Range<u64>,
        mask: &ProjectionMask,
    ) -> Result<(ArrowReaderMetadata, HashMap<u64, i64>), DatasetError> {
        let metadata = self.footer.metadata();
        let group_metadata = metadata.row_group(group);
        let mut page_rows = HashMap::new();
        if (rows.end - rows.start).saturating_mul(2) >= self.group_rows(group) {
            return Ok((self.footer.clone(), page_rows));
        }
        let mut builder = PageIndexBuilder::default();
        builder.allocate_offset_indexes(metadata.num_row_groups(), group_metadata.num_columns());
        let mut any = false;
        for (leaf, chunk) in group_metadata.columns().iter().enumerate() {
            let (start, length) = chunk.byte_range();
            if !mask.leaf_included(leaf) || length < INDEX_BYTES_MIN {
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
                any = true;
            }
        }
        if !any {
            return Ok((self.footer.clone(), page_rows));
        }
        let metadata = ParquetMetaData::clone(metadata)
            .into_builder()
            .set_page_index(Some(Arc::new(builder.build())))
            .build();
        let footer = arrow_footer(Arc::new(metadata));
        let footer = footer.map_err(|why| DatasetError::unreadable(&self.pinned.name, why))?;
        Ok((footer, page_rows))
    }

    /// The page index of one column chunk: as it was found before, as the file has it, or by the pages' headers.
    async fn page_index(
        &self,
        group: usize,
        leaf: usize,
        metadata: &ColumnChunkMetaData,
        range: Range<u64>,
    ) -> Result<Option<OffsetIndexMetaData>, DatasetError> {
        let known = self.indexes().get(&(group, leaf)).cloned();
        if let Some(index) = known {
            return Ok(index);
        }
        let chunk = Chunk {
            range,
            claimed: metadata.uncompressed_size().max(0) as u64,
            flat: metadata.column_descr().max_rep_level() == 0,
            rows: self.group_rows(group),
        };
        let index = match self.index_of_file(metadata, &chunk).await? {
            Some(index) => Some(index),
            None => index_pages(&self.pinned, &chunk).await?,
        };
        let mut indexes = self.indexes();
        if indexes.len() >= INDEXES_MAX {
            indexes.clear();
        }
        indexes.insert((group, leaf), index.clone());
        Ok(index)
    }

    async fn index_of_file(
        &self,
        metadata: &ColumnChunkMetaData,
        chunk: &Chunk,
    ) -> Result<Option<OffsetIndexMetaData>, DatasetError> {
        let (Some(offset), Some(length)) = (metadata.offset_index_offset(), metadata.offset_index_length()) else {
            return Ok(None);
        };
        let place = u64::try_from(offset).ok().zip(u64::try_from(length).ok());
        let range = place.and_then(|(offset, length)| Some(offset..offset.checked_add(length)?));
        match range.filter(|range| range.end <= self.pinned.size && range.end - range.start <= INDEX_BYTES_MAX) {
            Some(range) => Ok(parse_index(&self.pinned.bytes(range).await?, chunk)),
            None => Ok(None),
        }
    }

    fn indexes(&self) -> MutexGuard<'_, HashMap<(usize, usize), Option<OffsetIndexMetaData>>> {
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn mask(&self, columns: &[String]) -> ProjectionMask {
        let roots = self.schema.fields().iter().enumerate();
        let wanted = roots
            .filter(|(_, field)| columns.contains(field.name()))
            .map(|(i, _)| i);
        ProjectionMask::roots(self.footer.parquet_schema(), wanted)
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

    /// An error of the store comes through the decoder as it was.
    fn read_error(&self, group: usize, error: ParquetError) -> DatasetError {
        match error {
            ParquetError::External(source) => match source.downcast::<DatasetError>() {
                Ok(ours) => *ours,
                Err(other) => DatasetError::unreadable(&self.pinned.name, format!("row group {group}: {other}")),
            },
            other => DatasetError::unreadable(&self.pinned.name, format!("row group {group}: {other}")),
        }
    }
}

fn unpacked_field(field: &FieldRef) -> FieldRef {
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

/// Feeds the decoder from the pinned file; pages have their headers checked on the way.
struct ChunkReader {
    pinned: PinnedFile,
    footer: Arc<ParquetMetaData>,
    group: usize,
    /// The columns that are read.
    mask: ProjectionMask,
    /// Rows of each page whose header tells them, by where it begins.
    page_rows: HashMap<u64, i64>,
    kept: Kept,
}

impl ChunkReader {
    /// The column chunk that a range lies in, with its own range; of those that are read, since others may claim anything.
    fn chunk_of(&self, range: &Range<u64>) -> Option<(&ColumnChunkMetaData, Range<u64>)> {
        let chunks = self.footer.row_group(self.group).columns().iter();
        let read = chunks.enumerate().filter(|(leaf, _)| self.mask.leaf_included(*leaf));
        let mut places = read.filter_map(|(_, chunk)| {
            let data = chunk.data_page_offset();
            let start = u64::try_from(chunk.dictionary_page_offset().map_or(data, |d| d.min(data))).ok()?;
            let end = start.checked_add(u64::try_from(chunk.compressed_size()).ok()?)?;
            Some((chunk, start..end))
        });
        places.find(|(_, place)| place.start <= range.start && range.end <= place.end)
    }

    fn check(&self, ranges: &[Range<u64>], bodies: &[Bytes]) -> Result<(), DatasetError> {
        for (range, body) in ranges.iter().zip(bodies) {
            let Some((chunk, _)) = self.chunk_of(range) else {
                continue;
            };
            let rows = |at: usize| self.page_rows.get(&(range.start + at as u64)).copied();
            check_pages(body, chunk.uncompressed_size().max(0) as u64, rows).map_err(|why| {
                let (group, column) = (self.group, chunk.column_path().string());
                DatasetError::unreadable(
                    &self.pinned.name,
                    format!("row group {group}, column `{column}`: {why}"),
                )
            })?;
        }
        Ok(())
    }

    /// Of each column the first range, which holds its dictionary, and the last, whose rows may go on in the next shard.
    fn keep(&self, ranges: &[Range<u64>], bodies: &[Bytes]) {
        let column = |n: usize| Some(self.chunk_of(ranges.get(n)?)?.1);
        let (mut kept, mut bytes) = (Vec::new(), 0);
        for (n, (range, body)) in ranges.iter().zip(bodies).enumerate() {
            let is_first = n == 0 || column(n - 1) != column(n);
            let is_last = column(n + 1) != column(n);
            if (is_first || is_last) && bytes + body.len() <= KEPT_BYTES_MAX {
                bytes += body.len();
                // A copy: a slice would keep all that came with the same request.
                kept.push((range.clone(), Bytes::copy_from_slice(body)));
            }
        }
        *self.kept.lock().unwrap_or_else(PoisonError::into_inner) = kept;
    }

    /// The ranges, from what the last read has left where they are there.
    async fn fetch(&self, ranges: &[Range<u64>]) -> Result<Vec<Bytes>, DatasetError> {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let known = |range: &Range<u64>| {
            kept.iter()
                .find(|(known, _)| known == range)
                .map(|(_, body)| body.clone())
        };
        let missing: Vec<Range<u64>> = ranges.iter().filter(|range| known(range).is_none()).cloned().collect();
        let mut fetched = self.pinned.ranges(&missing).await?.into_iter();
        let bodies = ranges
            .iter()
            .filter_map(|range| known(range).or_else(|| fetched.next()));
        Ok(bodies.collect())
    }
}

fn external(error: DatasetError) -> ParquetError {
    ParquetError::External(Box::new(error))
}

impl AsyncFileReader for ChunkReader {
    fn get_bytes(&mut self, range: Range<u64>) -> BoxFuture<'_, parquet::errors::Result<Bytes>> {
        async move { self.pinned.bytes(range).await.map_err(external) }.boxed()
    }

    fn get_byte_ranges(&mut self, ranges: Vec<Range<u64>>) -> BoxFuture<'_, parquet::errors::Result<Vec<Bytes>>> {
        async move {
            let bodies = self.fetch(&ranges).await.map_err(external)?;
            self.check(&ranges, &bodies).map_err(external)?;
            self.keep(&ranges, &bodies);
            Ok(bodies)
        }
        .boxed()
    }

    fn get_metadata<'a>(
        &'a mut self,
        _: Option<&'a ArrowReaderOptions>,
    ) -> BoxFuture<'a, parquet::errors::Result<Arc<ParquetMetaData>>> {
        let footer = self.footer.clone();
        async move { Ok(footer) }.boxed()
    }
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
