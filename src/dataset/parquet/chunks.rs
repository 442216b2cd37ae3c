//! Feeds column chunks to the decoder: fetches them in few requests, checks their page headers, and
//! bounds their memory cost.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use futures::FutureExt;
use futures::future::BoxFuture;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::ArrowReaderOptions;
use parquet::arrow::async_reader::AsyncFileReader;
use parquet::errors::ParquetError;
use parquet::file::metadata::{ColumnChunkMetaData, ParquetMetaData};

use super::cost::{Claims, LeafCost};
use super::measure::widest_entry;
use super::pages::{check_pages, pages_of};
use crate::dataset::error::DatasetError;
use crate::dataset::row_memory::PAGES_BYTES_MAX;
use crate::dataset::store::pinned::PinnedFile;

/// Maximum bytes of one read that are kept for the next shard of the same row group.
const KEPT_BYTES_MAX: usize = 4 << 20;

/// Cached bytes, by their ranges in the file.
pub(crate) type Kept = Arc<Mutex<Vec<(Range<u64>, Bytes)>>>;

/// The longest dictionary entries found so far, by row group and leaf column.
pub(crate) type Widest = Arc<Mutex<HashMap<(usize, usize), Option<u64>>>>;

/// The rows would take more memory than the limit.
#[derive(Debug, thiserror::Error)]
#[error("the rows take more memory than may be read at once")]
pub(crate) struct TooMuch;

/// The memory limit of a read, and the cost so far.
#[derive(Debug, Clone)]
pub(crate) struct Budget {
    pub costs: Arc<Vec<LeafCost>>,
    pub limit: u64,
    pub taken: Arc<AtomicU64>,
    /// Number of rows read from this row group.
    pub rows: u64,
    pub widest: Widest,
}

/// Feeds the decoder from the pinned file; pages have their headers checked on the way.
pub(crate) struct ChunkReader {
    pub pinned: PinnedFile,
    pub footer: Arc<ParquetMetaData>,
    pub group: usize,
    /// The projected columns.
    pub mask: ProjectionMask,
    /// Row counts that an index expects of pages, by page offset (columns without repetition only).
    pub page_rows: HashMap<u64, i64>,
    pub kept: Kept,
    /// `None`: the cost is known already.
    pub budget: Option<Budget>,
}

impl ChunkReader {
    /// The leaf, chunk and byte range of the chunk that contains `range`. Only projected chunks are
    /// searched, since the others' claims are unchecked.
    fn chunk_of(&self, range: &Range<u64>) -> Option<(usize, &ColumnChunkMetaData, Range<u64>)> {
        let chunks = self.footer.row_group(self.group).columns().iter();
        let read = chunks.enumerate().filter(|(leaf, _)| self.mask.leaf_included(*leaf));
        let mut places = read.filter_map(|(leaf, chunk)| {
            let data = chunk.data_page_offset();
            let start = u64::try_from(chunk.dictionary_page_offset().map_or(data, |d| d.min(data))).ok()?;
            let end = start.checked_add(u64::try_from(chunk.compressed_size()).ok()?)?;
            Some((leaf, chunk, start..end))
        });
        places.find(|(_, _, place)| place.start <= range.start && range.end <= place.end)
    }

    fn check(&self, ranges: &[Range<u64>], bodies: &[Bytes]) -> Result<(), DatasetError> {
        for (range, body) in ranges.iter().zip(bodies) {
            let Some((_, chunk, _)) = self.chunk_of(range) else {
                continue;
            };
            let rows = |at: usize| self.page_rows.get(&(range.start + at as u64)).copied();
            check_chunk_pages(&self.pinned.name, self.group, chunk, body, rows)?;
        }
        Ok(())
    }

    /// Whether the rows of these pages fit the budget, by the upper bound from their headers.
    fn fits(&self, budget: &Budget, ranges: &[Range<u64>], bodies: &[Bytes]) -> Result<bool, DatasetError> {
        let mut leaves: BTreeMap<usize, (Claims, &Bytes)> = BTreeMap::new();
        for (range, body) in ranges.iter().zip(bodies) {
            if let Some((leaf, _, _)) = self.chunk_of(range) {
                let (claims, _) = leaves.entry(leaf).or_insert_with(|| (Claims::default(), body));
                pages_of(body).for_each(|(header, _)| claims.add(&header));
            }
        }
        let held = leaves.values().map(|(claims, _)| claims.held());
        if held.fold(0, u64::saturating_add) > PAGES_BYTES_MAX {
            return Ok(false);
        }
        let mut sum = budget.taken.load(Ordering::Relaxed);
        for (leaf, (claims, first)) in &leaves {
            let cost = &budget.costs[*leaf];
            let most = claims.price(cost, budget.rows, claims.widest());
            let price = if claims.names_texts(cost) && sum.saturating_add(most) > budget.limit / 4 {
                let widest = self.widest(budget, *leaf, first)?;
                let widest = widest.filter(|_| claims.has_one_dictionary());
                claims.price(cost, budget.rows, widest.unwrap_or(claims.widest()))
            } else {
                most
            };
            sum = sum.saturating_add(price);
        }
        budget.taken.store(sum, Ordering::Relaxed);
        Ok(sum <= budget.limit)
    }

    /// The length of the longest dictionary entry, if `first` begins with a dictionary.
    fn widest(&self, budget: &Budget, leaf: usize, first: &Bytes) -> Result<Option<u64>, DatasetError> {
        let key = (self.group, leaf);
        let lock = || budget.widest.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = lock().get(&key).copied() {
            return Ok(known);
        }
        let chunk = self.footer.row_group(self.group).column(leaf);
        let widest = widest_entry(first, chunk).map_err(|why| {
            let column = chunk.column_path().string();
            let why = format!("row group {}, column `{column}`: {why}", self.group);
            DatasetError::unreadable(&self.pinned.name, why)
        })?;
        lock().insert(key, widest);
        Ok(widest)
    }

    /// Keeps each column's first range, which holds its dictionary, and its last range, whose rows
    /// may continue in the next shard.
    fn keep(&self, ranges: &[Range<u64>], bodies: &[Bytes]) {
        let column = |n: usize| Some(self.chunk_of(ranges.get(n)?)?.2);
        let (mut kept, mut bytes) = (Vec::new(), 0);
        for (n, (range, body)) in ranges.iter().zip(bodies).enumerate() {
            let is_first = n == 0 || column(n - 1) != column(n);
            let is_last = column(n + 1) != column(n);
            if (is_first || is_last) && bytes + body.len() <= KEPT_BYTES_MAX {
                bytes += body.len();
                // This is a copy: a slice would keep the whole response alive.
                kept.push((range.clone(), Bytes::copy_from_slice(body)));
            }
        }
        *self.kept.lock().unwrap_or_else(PoisonError::into_inner) = kept;
    }

    /// The bytes of the ranges, from those kept by the last read where possible.
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

/// Checks the page headers in the bytes of a column chunk; `rows` as in [`check_pages`].
pub(crate) fn check_chunk_pages(
    name: &str,
    group: usize,
    chunk: &ColumnChunkMetaData,
    body: &[u8],
    rows: impl Fn(usize) -> Option<i64>,
) -> Result<(), DatasetError> {
    check_pages(body, chunk.uncompressed_size().max(0) as u64, rows).map_err(|why| {
        let column = chunk.column_path().string();
        DatasetError::unreadable(name, format!("row group {group}, column `{column}`: {why}"))
    })
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
            if let Some(budget) = &self.budget
                && !self.fits(budget, &ranges, &bodies).map_err(external)?
            {
                return Err(ParquetError::External(Box::new(TooMuch)));
            }
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
