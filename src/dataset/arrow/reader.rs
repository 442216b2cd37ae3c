//! Reads Arrow files (Feather V2): rows by range, a record batch at a time, with only the columns
//! in use.
//!
//! A record batch (a block of the file) is decoded whole, so the memory of its columns in use is
//! bounded. Each job caches its last decoded block for the next shard, which may continue in it.
//! The cached blocks of all jobs together take at most the memory limit of a single block.
//! Dictionaries are unpacked only for the rows that are read.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use arrow::array::{ArrayRef, RecordBatch, UInt64Array};
use arrow::buffer::{Buffer, MutableBuffer};
use arrow::compute::{cast, concat_batches, take};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use arrow::ipc::reader::{RecordBatchDecoder, read_dictionary};
use bytes::Bytes;

use super::cost::{check_type, value_cost};
use super::footer::{
    ArrowFooter, BLOCK_BYTES_MAX, BlockHead, BlockLocation, decode_dictionary_head, decode_footer, decode_head,
    decompressed_bytes, first_rows, message, read_footer,
};
use crate::dataset::error::DatasetError;
use crate::dataset::parquet::reader::{ReadOutcome, ReadRequest, unpacked_field};
use crate::dataset::store::pinned_file::PinnedFile;

/// Number of block heads fetched per call.
const HEADS_PER_CALL: usize = 32;

/// Maximum number of dictionary blocks.
const DICTIONARIES_MAX: usize = 4096;
/// Maximum number of delta dictionaries: each of them copies the values before it.
const DELTAS_MAX: usize = 64;

/// Estimated ratio of decompressed to compressed size, for blocks that are not read yet.
const DECOMPRESSION_RATIO: u64 = 4;

/// Maximum bytes of cached blocks over all jobs of the process.
const CACHED_BYTES_MAX: u64 = BLOCK_BYTES_MAX;

/// The last decoded block over all files of a job.
#[derive(Debug, Clone, Default)]
pub struct BlockCache(Arc<Mutex<Option<CachedBlock>>>);

#[derive(Debug, Clone)]
struct CachedBlock {
    /// Full URL.
    file: String,
    block: usize,
    /// Indices of the decoded columns.
    columns: Vec<usize>,
    batch: RecordBatch,
    bytes: u64,
}

impl BlockCache {
    /// The block with these columns, if it is cached with exactly these.
    fn find(&self, file: &str, block: usize, columns: &[usize]) -> Option<RecordBatch> {
        let cached = lock(&self.0);
        let found = cached
            .as_ref()
            .filter(|cached| cached.file == file && cached.block == block && cached.columns == columns);
        found.map(|found| found.batch.clone())
    }

    /// Replaces the cached block. If the cached blocks of all jobs exceed the limit, the oldest are
    /// dropped.
    fn replace(&self, decoded: CachedBlock) {
        /// The caches of all jobs; the cache that was replaced last is at the end.
        static ALL: Mutex<Vec<Weak<Mutex<Option<CachedBlock>>>>> = Mutex::new(Vec::new());
        let mut all = lock(&ALL);
        *lock(&self.0) = Some(decoded);
        all.retain(|other| other.strong_count() > 0 && !std::ptr::eq(other.as_ptr(), Arc::as_ptr(&self.0)));
        all.push(Arc::downgrade(&self.0));
        let mut sum = 0u64;
        for cache in all.iter().rev().filter_map(Weak::upgrade) {
            let mut cached = lock(&cache);
            sum = sum.saturating_add(cached.as_ref().map_or(0, |cached| cached.bytes));
            if sum > CACHED_BYTES_MAX {
                *cached = None;
            }
        }
    }
}

/// Locks and ignores poisoning. Every change is a single assignment, so a holder that panicked left
/// a consistent value, and a cached block may be missing or old.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An open Arrow file.
#[derive(Debug)]
pub struct ArrowFile {
    pinned: PinnedFile,
    footer: ArrowFooter,
    /// The columns as they are read, with dictionaries unpacked.
    schema: SchemaRef,
    heads: Vec<BlockHead>,
    /// The number of the first row of each block, followed by the file's row count.
    first_rows: Vec<u64>,
    /// Values of the dictionaries by their ids, loaded on first use.
    dictionaries: tokio::sync::OnceCell<Arc<HashMap<i64, ArrayRef>>>,
    block_cache: BlockCache,
}

impl ArrowFile {
    /// Reads and checks the footer and the heads of all blocks.
    pub async fn open(pinned: PinnedFile, block_cache: BlockCache) -> Result<ArrowFile, DatasetError> {
        let bytes = read_footer(&pinned).await?;
        let (name, size) = (pinned.name.clone(), pinned.size);
        let footer = run_blocking(&name, move || decode_footer(&bytes, size)).await?;
        let mut heads = Vec::with_capacity(footer.batches.len());
        for locations in footer.batches.chunks(HEADS_PER_CALL) {
            let ranges: Vec<Range<u64>> = locations.iter().map(BlockLocation::head_range).collect();
            let encoded = pinned.ranges(&ranges).await?;
            let (locations, schema) = (locations.to_vec(), footer.schema.clone());
            let decoded = run_blocking(&name, move || {
                let heads = encoded.iter().zip(&locations);
                heads
                    .map(|(head, location)| decode_head(head, location, &schema))
                    .collect::<Result<Vec<_>, _>>()
            });
            heads.extend(decoded.await?);
        }
        let fields = footer.schema.fields().iter().map(unpacked_field);
        Ok(ArrowFile {
            schema: Arc::new(Schema::new(fields.collect::<Vec<_>>())),
            first_rows: first_rows(&heads).map_err(|why| DatasetError::unreadable(&name, why))?,
            heads,
            footer,
            pinned,
            dictionaries: tokio::sync::OnceCell::new(),
            block_cache,
        })
    }

    pub fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    pub fn name(&self) -> &str {
        &self.pinned.name
    }

    pub fn pinned(&self) -> &PinnedFile {
        &self.pinned
    }

    /// Memory held while the file is open, in bytes.
    pub fn memory_bytes(&self) -> usize {
        let heads: usize = self.heads.iter().map(|head| 64 + head.columns.len() * 64).sum();
        let dictionaries = self.dictionaries.get().into_iter().flat_map(|all| all.values());
        heads + dictionaries.map(|values| values.get_array_memory_size()).sum::<usize>()
    }

    /// Number of blocks, which are the row groups of an Arrow file.
    pub fn group_count(&self) -> usize {
        self.heads.len()
    }

    pub fn group_rows(&self, group: usize) -> u64 {
        self.heads[group].rows
    }

    /// Approximate decompressed bytes of the named columns in a block.
    pub fn group_bytes(&self, group: usize, columns: &[String]) -> u64 {
        let head = &self.heads[group];
        let stored = self
            .column_indices(columns)
            .into_iter()
            .map(|column| head.stored_bytes(column));
        let ratio = if head.is_compressed { DECOMPRESSION_RATIO } else { 1 };
        stored.fold(0u64, u64::saturating_add).saturating_mul(ratio)
    }

    /// Checks that the named columns can be read.
    pub fn check_columns(&self, columns: &[String]) -> Result<(), DatasetError> {
        let unreadable = |why: String| Err(DatasetError::unreadable(&self.pinned.name, why));
        let indices = self.column_indices(columns);
        for column in &indices {
            let field = self.footer.schema.field(*column);
            if let Err(why) = check_type(field.data_type(), false) {
                return unreadable(format!("its column `{}` {why}", field.name()));
            }
        }
        for (block, head) in self.heads.iter().enumerate() {
            let stored: u64 = indices
                .iter()
                .map(|column| head.stored_bytes(*column))
                .fold(0, u64::saturating_add);
            if stored > BLOCK_BYTES_MAX {
                return unreadable(too_large(block, stored));
            }
        }
        Ok(())
    }

    /// The indices of the named columns.
    fn column_indices(&self, columns: &[String]) -> Vec<usize> {
        let fields = self.footer.schema.fields().iter().enumerate();
        fields
            .filter(|(_, field)| columns.contains(field.name()))
            .map(|(index, _)| index)
            .collect()
    }

    /// Reads rows, unless they take more than `limit` bytes of memory.
    pub async fn read_rows(&self, request: ReadRequest, limit: Option<u64>) -> Result<ReadOutcome, DatasetError> {
        let name = &self.pinned.name;
        let end = self.first_rows.last().copied().unwrap_or(0);
        if let Some(last) = request.rows.last().filter(|last| last.end > end) {
            let why = format!("rows {} to {} are wanted, it has {end}", last.start, last.end);
            return Err(DatasetError::unreadable(name, why));
        }
        let columns = self.column_indices(&request.columns);
        let fields = columns.iter().map(|index| self.schema.field(*index).clone());
        let schema = Arc::new(Schema::new(fields.collect::<Vec<Field>>()));
        let (mut batches, mut read_bytes) = (Vec::new(), 0u64);
        for (block, block_rows) in self.blocks_of(&request.rows) {
            let batch = self.block(block, &columns).await?;
            let (schema, json_columns) = (schema.clone(), request.json_columns.clone());
            let limit = limit.map(|limit| limit.saturating_sub(read_bytes));
            let read = run_blocking(name, move || {
                let costs = block_rows
                    .iter()
                    .cloned()
                    .flatten()
                    .map(|row| row_cost(&batch, row as usize, &json_columns));
                let bytes = costs.fold(0u64, u64::saturating_add);
                if limit.is_some_and(|limit| bytes > limit) {
                    return Ok(None);
                }
                Ok(Some((copy_rows(&batch, block_rows, &schema)?, bytes)))
            });
            let Some((batch, bytes)) = read.await? else {
                return Ok(ReadOutcome::OverLimit);
            };
            batches.push(batch);
            read_bytes = read_bytes.saturating_add(bytes);
        }
        let batch = concat_batches(&schema, &batches).map_err(|e| DatasetError::unreadable(name, e))?;
        Ok(ReadOutcome::Rows(batch, Vec::new()))
    }

    /// The memory in bytes that each of `rows` takes in these columns; `json_columns`:
    /// columns that become JSON.
    pub async fn row_costs(
        &self,
        rows: Range<u64>,
        columns: &[String],
        json_columns: &[String],
    ) -> Result<Vec<u64>, DatasetError> {
        let indices = self.column_indices(columns);
        let mut costs = Vec::with_capacity((rows.end - rows.start) as usize);
        for (block, block_rows) in self.blocks_of(&[rows]) {
            let batch = self.block(block, &indices).await?;
            let json_columns = json_columns.to_vec();
            let block_costs = run_blocking(&self.pinned.name, move || {
                let rows = block_rows.into_iter().flatten();
                Ok(rows
                    .map(|row| row_cost(&batch, row as usize, &json_columns))
                    .collect::<Vec<_>>())
            });
            costs.extend(block_costs.await?);
        }
        Ok(costs)
    }

    /// The blocks that hold these rows of the file, each with row ranges counted from its first
    /// row.
    fn blocks_of(&self, rows: &[Range<u64>]) -> Vec<(usize, Vec<Range<u64>>)> {
        let (Some(first), Some(last)) = (rows.first(), rows.last()) else {
            return Vec::new();
        };
        let first_block = self
            .first_rows
            .partition_point(|&start| start <= first.start)
            .saturating_sub(1);
        let end_block = self
            .first_rows
            .partition_point(|&start| start < last.end)
            .min(self.heads.len());
        let with_rows = |block: usize| {
            let (start, end) = (self.first_rows[block], self.first_rows[block + 1]);
            let block_rows = rows
                .iter()
                .map(|r| r.start.max(start)..r.end.min(end))
                .filter(|r| r.start < r.end)
                .map(|r| r.start - start..r.end - start);
            (block, block_rows.collect::<Vec<_>>())
        };
        (first_block..end_block)
            .map(with_rows)
            .filter(|(_, rows)| !rows.is_empty())
            .collect()
    }

    /// These columns of one block, from the cache or decoded.
    async fn block(&self, block: usize, columns: &[usize]) -> Result<RecordBatch, DatasetError> {
        let file = self.pinned.location.url.as_str();
        if let Some(batch) = self.block_cache.find(file, block, columns) {
            return Ok(batch);
        }
        let name = &self.pinned.name;
        let location = self.footer.batches[block];
        let head = self.heads[block].clone();
        let buffers = columns.iter().flat_map(|column| head.columns[*column].iter().cloned());
        let (encoded_head, body) = self.fetch(&location, buffers.collect()).await?;
        let bytes = decompressed_bytes(&head, columns, &body)
            .map_err(|why| DatasetError::unreadable(name, format!("record batch {block}: {why}")))?;
        if bytes > BLOCK_BYTES_MAX {
            return Err(DatasetError::unreadable(name, too_large(block, bytes)));
        }
        let needs_dictionaries = columns
            .iter()
            .any(|column| has_dictionary(self.footer.schema.field(*column).data_type()));
        let dictionaries = if needs_dictionaries {
            self.dictionaries
                .get_or_try_init(|| self.read_dictionaries())
                .await?
                .clone()
        } else {
            Arc::default()
        };
        let (schema, projection) = (self.footer.schema.clone(), columns.to_vec());
        let batch = run_blocking(name, move || {
            let message = message(&encoded_head)?;
            let batch = message.header_as_record_batch().ok_or("it is no record batch")?;
            let version = message.version();
            let decoder = RecordBatchDecoder::try_new(&body, batch, schema, &dictionaries, &version);
            decoder
                .and_then(|decoder| decoder.with_projection(Some(&projection)).read_record_batch())
                .map_err(|e| e.to_string())
        });
        let batch = batch.await.map_err(|error| match error {
            DatasetError::Unreadable { file, why } => DatasetError::Unreadable {
                file,
                why: format!("record batch {block}: {why}"),
            },
            error => error,
        })?;
        self.block_cache.replace(CachedBlock {
            file: file.to_string(),
            block,
            columns: columns.to_vec(),
            batch: batch.clone(),
            bytes,
        });
        Ok(batch)
    }

    /// Fetches a block's head, and its body with only these buffers. The gaps stay zeroed, so they
    /// take no physical memory. `buffers`: byte ranges in the body.
    async fn fetch(&self, location: &BlockLocation, buffers: Vec<Range<u64>>) -> Result<(Bytes, Buffer), DatasetError> {
        let start = location.body_start();
        let buffers: Vec<Range<u64>> = buffers.into_iter().filter(|buffer| !buffer.is_empty()).collect();
        let mut ranges = vec![location.head_range()];
        ranges.extend(buffers.iter().map(|buffer| start + buffer.start..start + buffer.end));
        let fetched = self.pinned.ranges(&ranges).await?;
        let length = usize::try_from(location.body_bytes);
        let length = length.map_err(|e| DatasetError::unreadable(&self.pinned.name, e))?;
        let body = MutableBuffer::try_from_len_zeroed(length);
        let mut body = body.map_err(|e| DatasetError::unreadable(&self.pinned.name, e))?;
        for (buffer, bytes) in buffers.iter().zip(&fetched[1..]) {
            body[buffer.start as usize..buffer.end as usize].copy_from_slice(bytes);
        }
        Ok((fetched[0].clone(), body.into()))
    }

    async fn read_dictionaries(&self) -> Result<Arc<HashMap<i64, ArrayRef>>, DatasetError> {
        let name = &self.pinned.name;
        let unreadable = |why: String| DatasetError::unreadable(name, why);
        if self.footer.dictionaries.len() > DICTIONARIES_MAX {
            let count = self.footer.dictionaries.len();
            return Err(unreadable(format!(
                "it has {count} blocks of dictionaries, more than {DICTIONARIES_MAX}"
            )));
        }
        let mut dictionaries: HashMap<i64, ArrayRef> = HashMap::new();
        let (mut total_bytes, mut deltas) = (0u64, 0);
        for location in &self.footer.dictionaries {
            let encoded_head = self.pinned.bytes(location.head_range()).await?;
            let schema = self.footer.schema.clone();
            let (encoded, block) = (encoded_head.clone(), *location);
            let (head, is_delta) = run_blocking(name, move || {
                decode_dictionary_head(&encoded, &block, |id| {
                    #[expect(deprecated)]
                    let fields = schema.fields_with_dict_id(id);
                    match fields.first().map(|field| field.data_type()) {
                        Some(DataType::Dictionary(_, values)) => Some(DataType::clone(values)),
                        _ => None,
                    }
                })
            })
            .await?;
            let stored = head.stored_bytes(0);
            deltas += usize::from(is_delta);
            if deltas > DELTAS_MAX {
                return Err(unreadable(format!(
                    "it has more than {DELTAS_MAX} dictionaries that add to others"
                )));
            }
            if stored > BLOCK_BYTES_MAX {
                return Err(unreadable(format!(
                    "a dictionary takes {stored} bytes, more than {BLOCK_BYTES_MAX}"
                )));
            }
            let (_, body) = self.fetch(location, head.columns[0].clone()).await?;
            let bytes = decompressed_bytes(&head, &[0], &body).map_err(unreadable)?;
            total_bytes = total_bytes.saturating_add(bytes);
            if total_bytes > BLOCK_BYTES_MAX {
                return Err(unreadable(format!(
                    "its dictionaries take {total_bytes} bytes, more than {BLOCK_BYTES_MAX}"
                )));
            }
            let schema = self.footer.schema.clone();
            dictionaries = run_blocking(name, move || {
                let message = message(&encoded_head)?;
                let batch = message.header_as_dictionary_batch().ok_or("a block is no dictionary")?;
                let mut dictionaries = dictionaries;
                let read = read_dictionary(&body, batch, &schema, &mut dictionaries, &message.version());
                read.map(|()| dictionaries).map_err(|e| format!("a dictionary: {e}"))
            })
            .await?;
        }
        Ok(Arc::new(dictionaries))
    }
}

fn too_large(block: usize, bytes: u64) -> String {
    format!(
        "the columns in use of its record batch {block} take {bytes} bytes, more than {BLOCK_BYTES_MAX}: write it in smaller batches (pyarrow: \
         `write_feather(…, chunksize=65536)`)"
    )
}

fn has_dictionary(data_type: &DataType) -> bool {
    match data_type {
        DataType::Dictionary(..) => true,
        DataType::List(item)
        | DataType::LargeList(item)
        | DataType::FixedSizeList(item, _)
        | DataType::Map(item, _) => has_dictionary(item.data_type()),
        DataType::Struct(fields) => fields.iter().any(|field| has_dictionary(field.data_type())),
        _ => false,
    }
}

/// Memory of a row of the batch, in bytes; `json_columns`: columns that become JSON.
fn row_cost(batch: &RecordBatch, row: usize, json_columns: &[String]) -> u64 {
    let schema = batch.schema_ref();
    let columns = schema.fields().iter().zip(batch.columns());
    columns.fold(0u64, |sum, (field, column)| {
        sum.saturating_add(value_cost(column, row, json_columns.contains(field.name())))
    })
}

/// Copies rows of a block, and unpacks their dictionaries. A slice would keep the whole block in
/// memory.
fn copy_rows(batch: &RecordBatch, rows: Vec<Range<u64>>, schema: &SchemaRef) -> Result<RecordBatch, String> {
    let rows = UInt64Array::from_iter_values(rows.into_iter().flatten());
    let columns = batch.columns().iter().zip(schema.fields());
    let columns = columns.map(|(column, field)| {
        let column = take(column, &rows, None).map_err(|e| e.to_string())?;
        if column.data_type() == field.data_type() {
            Ok(column)
        } else {
            cast(&column, field.data_type()).map_err(|e| e.to_string())
        }
    });
    let columns = columns.collect::<Result<Vec<_>, String>>()?;
    RecordBatch::try_new(schema.clone(), columns).map_err(|e| e.to_string())
}

/// Runs `work` on a blocking thread, so that a decoder's panic on foreign bytes becomes an error.
async fn run_blocking<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> Result<T, String> + Send + 'static,
) -> Result<T, DatasetError> {
    let result = tokio::task::spawn_blocking(work).await;
    result
        .map_err(|e| e.to_string())
        .and_then(|result| result)
        .map_err(|why| DatasetError::unreadable(name, why))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cached_blocks_are_bounded_over_all_jobs() {
        let decoded = |block: usize, mebibytes: u64| CachedBlock {
            file: "a.arrow".into(),
            block,
            columns: vec![0],
            batch: RecordBatch::new_empty(Arc::new(Schema::empty())),
            bytes: mebibytes << 20,
        };
        let jobs: [BlockCache; 3] = Default::default();
        let cached = || {
            jobs.each_ref()
                .map(|job| lock(&job.0).as_ref().map(|cached| cached.block))
        };
        jobs[0].replace(decoded(0, 150));
        jobs[1].replace(decoded(1, 150));
        jobs[2].replace(decoded(2, 150));
        assert_eq!(cached(), [Some(0), Some(1), Some(2)]);
        jobs[0].replace(decoded(3, 300));
        assert_eq!(cached(), [Some(3), None, Some(2)], "the oldest goes");
        jobs[1].replace(decoded(4, 512));
        assert_eq!(cached(), [None, Some(4), None], "the newest stays whatever it takes");
        assert!(jobs[1].find("a.arrow", 4, &[0]).is_some());
        assert!(jobs[1].find("a.arrow", 4, &[1]).is_none() && jobs[1].find("b.arrow", 4, &[0]).is_none());
    }
}
