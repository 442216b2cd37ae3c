//! Reads Arrow files (Feather V2): rows by range, a record batch at a time, with only the columns
//! in use.
//!
//! A record batch is decoded whole, so the memory of its columns in use is bounded. Each job keeps
//! its last decoded batch for the next shard that continues in it; together, all jobs keep no more
//! than the limit of a single batch. Dictionaries are unpacked only for the rows that are read.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use arrow::array::{ArrayRef, RecordBatch, UInt64Array};
use arrow::buffer::{Buffer, MutableBuffer};
use arrow::compute::{cast, concat_batches, take};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use arrow::ipc::reader::{RecordBatchDecoder, read_dictionary};
use bytes::Bytes;

use super::cost::{check_type, cost};
use super::footer::{
    ArrowFooter, BLOCK_BYTES_MAX, BlockHead, BlockPlace, decode_dictionary, decode_footer, decode_head, decoded_bytes,
    message, read_footer, starts,
};
use crate::dataset::error::DatasetError;
use crate::dataset::parquet::reader::{Read, Wanted, unpacked_field};
use crate::dataset::store::pinned::PinnedFile;

/// Number of block heads fetched per call.
const HEADS_AT_ONCE: usize = 32;

/// Maximum number of dictionary blocks, and of delta dictionaries: each delta copies the values
/// before it.
const DICTIONARIES_MAX: usize = 4096;
const DELTAS_MAX: usize = 64;

/// Estimated ratio of decompressed to compressed size, until a block is read.
const UNPACKED_TIMES: u64 = 4;

/// Maximum bytes of kept blocks over all jobs of the process.
const KEPT_BYTES_MAX: u64 = BLOCK_BYTES_MAX;

/// The last decoded block over all files of a job.
#[derive(Debug, Clone, Default)]
pub struct KeptBlock(Arc<Mutex<Option<Decoded>>>);

#[derive(Debug, Clone)]
struct Decoded {
    file: String,
    block: usize,
    columns: Vec<usize>,
    batch: RecordBatch,
    bytes: u64,
}

impl KeptBlock {
    /// The columns of a block, if it is the kept block.
    fn find(&self, file: &str, block: usize, columns: &[usize]) -> Option<RecordBatch> {
        let kept = locked(&self.0);
        let kept = kept
            .as_ref()
            .filter(|k| k.file == file && k.block == block && k.columns == columns);
        kept.map(|kept| kept.batch.clone())
    }

    /// Replaces the kept block. If the blocks of all jobs exceed the limit together, the oldest are
    /// dropped.
    fn keep(&self, decoded: Decoded) {
        /// The kept blocks of all jobs, newest last.
        static ALL: Mutex<Vec<Weak<Mutex<Option<Decoded>>>>> = Mutex::new(Vec::new());
        let mut all = locked(&ALL);
        *locked(&self.0) = Some(decoded);
        all.retain(|other| other.strong_count() > 0 && !std::ptr::eq(other.as_ptr(), Arc::as_ptr(&self.0)));
        all.push(Arc::downgrade(&self.0));
        let mut sum = 0u64;
        for one in all.iter().rev().filter_map(Weak::upgrade) {
            let mut kept = locked(&one);
            sum = sum.saturating_add(kept.as_ref().map_or(0, |kept| kept.bytes));
            if sum > KEPT_BYTES_MAX {
                *kept = None;
            }
        }
    }
}

/// Locks and ignores poisoning: a kept block may be missing or old, and every change is a single
/// step, so a holder that panicked left a consistent value.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
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
    starts: Vec<u64>,
    /// Loaded on first use.
    dictionaries: tokio::sync::OnceCell<Arc<HashMap<i64, ArrayRef>>>,
    kept: KeptBlock,
}

impl ArrowFile {
    /// Reads and checks the footer and the heads of all blocks.
    pub async fn open(pinned: PinnedFile, kept: KeptBlock) -> Result<ArrowFile, DatasetError> {
        let bytes = read_footer(&pinned).await?;
        let (name, size) = (pinned.name.clone(), pinned.size);
        let footer = apart(&name, move || decode_footer(&bytes, size)).await?;
        let mut heads = Vec::with_capacity(footer.batches.len());
        for places in footer.batches.chunks(HEADS_AT_ONCE) {
            let ranges: Vec<Range<u64>> = places.iter().map(BlockPlace::head_range).collect();
            let found = pinned.ranges(&ranges).await?;
            let (places, schema) = (places.to_vec(), footer.schema.clone());
            let decoded = apart(&name, move || {
                let heads = found.iter().zip(&places);
                heads
                    .map(|(head, place)| decode_head(head, place, &schema))
                    .collect::<Result<Vec<_>, _>>()
            });
            heads.extend(decoded.await?);
        }
        let fields = footer.schema.fields().iter().map(unpacked_field);
        Ok(ArrowFile {
            schema: Arc::new(Schema::new(fields.collect::<Vec<_>>())),
            starts: starts(&heads).map_err(|why| DatasetError::unreadable(&name, why))?,
            heads,
            footer,
            pinned,
            dictionaries: tokio::sync::OnceCell::new(),
            kept,
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

    pub fn group_count(&self) -> usize {
        self.heads.len()
    }

    pub fn group_rows(&self, group: usize) -> u64 {
        self.heads[group].rows
    }

    /// Approximate decompressed bytes of the named columns in a block.
    pub fn group_bytes(&self, group: usize, columns: &[String]) -> u64 {
        let head = &self.heads[group];
        let stored = self.places(columns).into_iter().map(|column| head.bytes(column));
        let times = if head.is_compressed { UNPACKED_TIMES } else { 1 };
        stored.fold(0u64, u64::saturating_add).saturating_mul(times)
    }

    /// Checks that the named columns can be read.
    pub fn check_columns(&self, columns: &[String]) -> Result<(), DatasetError> {
        let unreadable = |why: String| Err(DatasetError::unreadable(&self.pinned.name, why));
        for column in self.places(columns) {
            let field = self.footer.schema.field(column);
            if let Err(why) = check_type(field.data_type(), false) {
                return unreadable(format!("its column `{}` {why}", field.name()));
            }
        }
        let used = self.places(columns);
        for (number, head) in self.heads.iter().enumerate() {
            let stored: u64 = used
                .iter()
                .map(|column| head.bytes(*column))
                .fold(0, u64::saturating_add);
            if stored > BLOCK_BYTES_MAX {
                return unreadable(too_large(number, stored));
            }
        }
        Ok(())
    }

    /// The indices of the named columns.
    fn places(&self, columns: &[String]) -> Vec<usize> {
        let fields = self.footer.schema.fields().iter().enumerate();
        fields
            .filter(|(_, field)| columns.contains(field.name()))
            .map(|(at, _)| at)
            .collect()
    }

    /// Reads rows, unless they cost more than `limit` bytes.
    pub async fn read_rows(&self, wanted: Wanted, limit: Option<u64>) -> Result<Read, DatasetError> {
        let name = &self.pinned.name;
        let end = self.starts.last().copied().unwrap_or(0);
        if let Some(last) = wanted.rows.last().filter(|last| last.end > end) {
            let why = format!("rows {} to {} are wanted, it has {end}", last.start, last.end);
            return Err(DatasetError::unreadable(name, why));
        }
        let columns = self.places(&wanted.columns);
        let fields = columns.iter().map(|at| self.schema.field(*at).clone());
        let schema = Arc::new(Schema::new(fields.collect::<Vec<Field>>()));
        let (mut batches, mut taken) = (Vec::new(), 0u64);
        for (block, within) in self.blocks_of(&wanted.rows) {
            let batch = self.block(block, &columns).await?;
            let (schema, shown) = (schema.clone(), wanted.shown.clone());
            let left = limit.map(|limit| limit.saturating_sub(taken));
            let read = apart(name, move || {
                let bytes = within
                    .iter()
                    .cloned()
                    .flatten()
                    .map(|row| row_cost(&batch, row as usize, &shown));
                let bytes = bytes.fold(0u64, u64::saturating_add);
                if left.is_some_and(|left| bytes > left) {
                    return Ok(None);
                }
                Ok(Some((unpack(&batch, within, &schema)?, bytes)))
            });
            let Some((batch, bytes)) = read.await? else {
                return Ok(Read::TooMuch);
            };
            batches.push(batch);
            taken = taken.saturating_add(bytes);
        }
        let batch = concat_batches(&schema, &batches).map_err(|e| DatasetError::unreadable(name, e))?;
        Ok(Read::Rows(batch, Vec::new()))
    }

    /// The cost of each of `rows` in these columns, in bytes.
    pub async fn row_costs(
        &self,
        rows: Range<u64>,
        columns: &[String],
        shown: &[String],
    ) -> Result<Vec<u64>, DatasetError> {
        let places = self.places(columns);
        let mut costs = Vec::with_capacity((rows.end - rows.start) as usize);
        for (block, within) in self.blocks_of(&[rows]) {
            let batch = self.block(block, &places).await?;
            let shown = shown.to_vec();
            let found = apart(&self.pinned.name, move || {
                let rows = within.into_iter().flatten();
                Ok(rows
                    .map(|row| row_cost(&batch, row as usize, &shown))
                    .collect::<Vec<_>>())
            });
            costs.extend(found.await?);
        }
        Ok(costs)
    }

    /// The blocks that hold these rows, each with the row ranges within it.
    fn blocks_of(&self, rows: &[Range<u64>]) -> Vec<(usize, Vec<Range<u64>>)> {
        let (Some(first), Some(last)) = (rows.first(), rows.last()) else {
            return Vec::new();
        };
        let from = self
            .starts
            .partition_point(|&start| start <= first.start)
            .saturating_sub(1);
        let to = self
            .starts
            .partition_point(|&start| start < last.end)
            .min(self.heads.len());
        let within = |block: usize| {
            let (start, end) = (self.starts[block], self.starts[block + 1]);
            let own = rows
                .iter()
                .map(|r| r.start.max(start)..r.end.min(end))
                .filter(|r| r.start < r.end);
            (block, own.map(|r| r.start - start..r.end - start).collect::<Vec<_>>())
        };
        (from..to).map(within).filter(|(_, rows)| !rows.is_empty()).collect()
    }

    /// The given columns of one block, from the kept block or decoded.
    async fn block(&self, block: usize, columns: &[usize]) -> Result<RecordBatch, DatasetError> {
        let file = self.pinned.location.url.as_str();
        if let Some(batch) = self.kept.find(file, block, columns) {
            return Ok(batch);
        }
        let name = &self.pinned.name;
        let place = self.footer.batches[block];
        let head = self.heads[block].clone();
        let buffers = columns.iter().flat_map(|column| head.columns[*column].iter().cloned());
        let (bytes, body) = self.fetch(&place, buffers.collect()).await?;
        let decoded = decoded_bytes(&head, columns, &body)
            .map_err(|why| DatasetError::unreadable(name, format!("record batch {block}: {why}")))?;
        if decoded > BLOCK_BYTES_MAX {
            return Err(DatasetError::unreadable(name, too_large(block, decoded)));
        }
        let with_dictionaries = columns
            .iter()
            .any(|column| has_dictionary(self.footer.schema.field(*column).data_type()));
        let dictionaries = if with_dictionaries {
            self.dictionaries
                .get_or_try_init(|| self.read_dictionaries())
                .await?
                .clone()
        } else {
            Arc::default()
        };
        let (schema, projection) = (self.footer.schema.clone(), columns.to_vec());
        let batch = apart(name, move || {
            let message = message(&bytes)?;
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
        self.kept.keep(Decoded {
            file: file.to_string(),
            block,
            columns: columns.to_vec(),
            batch: batch.clone(),
            bytes: decoded,
        });
        Ok(batch)
    }

    /// A block's head, and its body with only these buffers filled in. The gaps stay zeroed, so
    /// they take no physical memory.
    async fn fetch(&self, place: &BlockPlace, buffers: Vec<Range<u64>>) -> Result<(Bytes, Buffer), DatasetError> {
        let start = place.offset + place.head;
        let buffers: Vec<Range<u64>> = buffers.into_iter().filter(|buffer| !buffer.is_empty()).collect();
        let mut ranges = vec![place.head_range()];
        ranges.extend(buffers.iter().map(|buffer| start + buffer.start..start + buffer.end));
        let found = self.pinned.ranges(&ranges).await?;
        let length = usize::try_from(place.body).map_err(|e| DatasetError::unreadable(&self.pinned.name, e))?;
        let body = MutableBuffer::try_from_len_zeroed(length);
        let mut body = body.map_err(|e| DatasetError::unreadable(&self.pinned.name, e))?;
        for (buffer, bytes) in buffers.iter().zip(&found[1..]) {
            body[buffer.start as usize..buffer.end as usize].copy_from_slice(bytes);
        }
        Ok((found[0].clone(), body.into()))
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
        let mut all: HashMap<i64, ArrayRef> = HashMap::new();
        let (mut taken, mut deltas) = (0u64, 0);
        for place in &self.footer.dictionaries {
            let head = self.pinned.bytes(place.head_range()).await?;
            let schema = self.footer.schema.clone();
            let of = head.clone();
            let at = *place;
            let (found, is_delta) = apart(name, move || {
                decode_dictionary(&of, &at, |id| {
                    #[expect(deprecated)]
                    let fields = schema.fields_with_dict_id(id);
                    match fields.first().map(|field| field.data_type()) {
                        Some(DataType::Dictionary(_, values)) => Some(DataType::clone(values)),
                        _ => None,
                    }
                })
            })
            .await?;
            let stored = found.bytes(0);
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
            let (_, body) = self.fetch(place, found.columns[0].clone()).await?;
            taken = taken.saturating_add(decoded_bytes(&found, &[0], &body).map_err(unreadable)?);
            if taken > BLOCK_BYTES_MAX {
                return Err(unreadable(format!(
                    "its dictionaries take {taken} bytes, more than {BLOCK_BYTES_MAX}"
                )));
            }
            let schema = self.footer.schema.clone();
            all = apart(name, move || {
                let message = message(&head)?;
                let batch = message.header_as_dictionary_batch().ok_or("a block is no dictionary")?;
                let mut all = all;
                let read = read_dictionary(&body, batch, &schema, &mut all, &message.version());
                read.map(|()| all).map_err(|e| format!("a dictionary: {e}"))
            })
            .await?;
        }
        Ok(Arc::new(all))
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

fn row_cost(batch: &RecordBatch, row: usize, shown: &[String]) -> u64 {
    let schema = batch.schema_ref();
    let columns = schema.fields().iter().zip(batch.columns());
    columns.fold(0u64, |sum, (field, column)| {
        sum.saturating_add(cost(column, row, shown.contains(field.name())))
    })
}

/// Copies rows of a block with their dictionaries unpacked; a slice would keep the whole block
/// alive.
fn unpack(batch: &RecordBatch, rows: Vec<Range<u64>>, schema: &SchemaRef) -> Result<RecordBatch, String> {
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
async fn apart<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> Result<T, String> + Send + 'static,
) -> Result<T, DatasetError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|e| e.to_string())
        .and_then(|done| done)
        .map_err(|why| DatasetError::unreadable(name, why))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_that_are_kept_are_bounded_over_all_jobs() {
        let decoded = |block: usize, mebibytes: u64| Decoded {
            file: "a.arrow".into(),
            block,
            columns: vec![0],
            batch: RecordBatch::new_empty(Arc::new(Schema::empty())),
            bytes: mebibytes << 20,
        };
        let jobs: [KeptBlock; 3] = Default::default();
        let kept = || {
            jobs.each_ref()
                .map(|job| locked(&job.0).as_ref().map(|kept| kept.block))
        };
        jobs[0].keep(decoded(0, 150));
        jobs[1].keep(decoded(1, 150));
        jobs[2].keep(decoded(2, 150));
        assert_eq!(kept(), [Some(0), Some(1), Some(2)]);
        jobs[0].keep(decoded(3, 300));
        assert_eq!(kept(), [Some(3), None, Some(2)], "the oldest goes");
        jobs[1].keep(decoded(4, 512));
        assert_eq!(kept(), [None, Some(4), None], "the newest stays whatever it takes");
        assert!(jobs[1].find("a.arrow", 4, &[0]).is_some());
        assert!(jobs[1].find("a.arrow", 4, &[1]).is_none() && jobs[1].find("b.arrow", 4, &[0]).is_none());
    }
}
