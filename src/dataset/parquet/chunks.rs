//! Feeds column chunks to the decoder: fetches them in few requests, checks their page headers, and
//! stops if their rows could exceed the memory limit.

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

use super::cost::{LeafCost, PageClaims};
use super::measure::longest_entry;
use super::pages::{check_pages, page_headers};
use crate::dataset::error::DatasetError;
use crate::dataset::row_memory::PAGES_BYTES_MAX;
use crate::dataset::store::pinned_file::PinnedFile;

/// Maximum bytes of one read that are cached for the next shard of the same row group.
const CACHE_BYTES_MAX: usize = 4 << 20;

/// Cached bytes, by their ranges in the file.
pub(crate) type CachedRanges = Arc<Mutex<Vec<(Range<u64>, Bytes)>>>;

/// Lengths in bytes of the longest dictionary entries, by row group and leaf column; `None` if the
/// column has no dictionary.
pub(crate) type LongestDictionaryEntries = Arc<Mutex<HashMap<(usize, usize), Option<u64>>>>;

/// The rows would take more memory than the limit.
#[derive(Debug, thiserror::Error)]
#[error("the rows take more memory than may be read at once")]
pub(crate) struct OverLimit;

/// The memory limit of a read, and the memory that its rows take so far.
#[derive(Debug, Clone)]
pub(crate) struct MemoryBudget {
    pub costs: Arc<Vec<LeafCost>>,
    pub limit: u64,
    pub used: Arc<AtomicU64>,
    /// Number of rows read from this row group.
    pub rows: u64,
    pub longest_dictionary_entries: LongestDictionaryEntries,
}

/// Fetches the column chunks of one row group for the decoder, and checks their page headers.
pub(crate) struct ChunkReader {
    pub pinned: PinnedFile,
    pub footer: Arc<ParquetMetaData>,
    pub group: usize,
    /// The projected columns.
    pub mask: ProjectionMask,
    /// Row counts of pages according to the page index, by page offset; only for columns that are
    /// not repeated.
    pub page_rows: HashMap<u64, i64>,
    pub cache: CachedRanges,
    /// `None`: no limit.
    pub budget: Option<MemoryBudget>,
}

impl ChunkReader {
    /// The leaf index, metadata and byte range of the column chunk that contains `range`. Only
    /// projected columns are searched, since the claims of other chunks are unchecked.
    fn find_chunk(&self, range: &Range<u64>) -> Option<(usize, &ColumnChunkMetaData, Range<u64>)> {
        let chunks = self.footer.row_group(self.group).columns().iter();
        let read = chunks.enumerate().filter(|(leaf, _)| self.mask.leaf_included(*leaf));
        let mut chunks = read.filter_map(|(leaf, chunk)| {
            let data = chunk.data_page_offset();
            let start = u64::try_from(chunk.dictionary_page_offset().map_or(data, |d| d.min(data))).ok()?;
            let end = start.checked_add(u64::try_from(chunk.compressed_size()).ok()?)?;
            Some((leaf, chunk, start..end))
        });
        chunks.find(|(_, _, bytes)| bytes.start <= range.start && range.end <= bytes.end)
    }

    fn check_page_headers(&self, ranges: &[Range<u64>], bodies: &[Bytes]) -> Result<(), DatasetError> {
        for (range, body) in ranges.iter().zip(bodies) {
            let Some((_, chunk, _)) = self.find_chunk(range) else {
                continue;
            };
            let rows = |offset: usize| self.page_rows.get(&(range.start + offset as u64)).copied();
            check_chunk_pages(&self.pinned.name, self.group, chunk, body, rows)?;
        }
        Ok(())
    }

    /// Whether the rows of these pages fit into the budget. Their cost is an upper bound, computed
    /// from the page headers. Dictionaries are only measured if the bound is a large part of the
    /// limit.
    fn fits_budget(
        &self,
        budget: &MemoryBudget,
        ranges: &[Range<u64>],
        bodies: &[Bytes],
    ) -> Result<bool, DatasetError> {
        let mut leaves: BTreeMap<usize, (PageClaims, &Bytes)> = BTreeMap::new();
        for (range, body) in ranges.iter().zip(bodies) {
            if let Some((leaf, _, _)) = self.find_chunk(range) {
                let (claims, _) = leaves.entry(leaf).or_insert_with(|| (PageClaims::default(), body));
                page_headers(body).for_each(|(header, _)| claims.add(&header));
            }
        }
        let decoding_bytes = leaves.values().map(|(claims, _)| claims.decoding_bytes());
        if decoding_bytes.fold(0, u64::saturating_add) > PAGES_BYTES_MAX {
            return Ok(false);
        }
        let mut sum = budget.used.load(Ordering::Relaxed);
        for (leaf, (claims, first)) in &leaves {
            let leaf_cost = &budget.costs[*leaf];
            let bound = claims.cost_bound(leaf_cost, budget.rows, claims.entry_bytes_max());
            let cost = if claims.has_dictionary_texts(leaf_cost) && sum.saturating_add(bound) > budget.limit / 4 {
                let longest = self.longest_entry(budget, *leaf, first)?;
                let longest = longest.filter(|_| claims.has_one_dictionary());
                claims.cost_bound(leaf_cost, budget.rows, longest.unwrap_or(claims.entry_bytes_max()))
            } else {
                bound
            };
            sum = sum.saturating_add(cost);
        }
        budget.used.store(sum, Ordering::Relaxed);
        Ok(sum <= budget.limit)
    }

    /// The length of the longest dictionary entry; `None` if `first`, the first bytes of the chunk,
    /// has no dictionary.
    fn longest_entry(&self, budget: &MemoryBudget, leaf: usize, first: &Bytes) -> Result<Option<u64>, DatasetError> {
        let key = (self.group, leaf);
        let entries = &budget.longest_dictionary_entries;
        let lock = || entries.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = lock().get(&key).copied() {
            return Ok(known);
        }
        let chunk = self.footer.row_group(self.group).column(leaf);
        let longest = longest_entry(first, chunk).map_err(|why| {
            let column = chunk.column_path().string();
            let why = format!("row group {}, column `{column}`: {why}", self.group);
            DatasetError::unreadable(&self.pinned.name, why)
        })?;
        lock().insert(key, longest);
        Ok(longest)
    }

    /// Caches each column's first range, which holds its dictionary, and its last range, whose
    /// pages may hold rows of the next shard, too.
    fn cache_ranges(&self, ranges: &[Range<u64>], bodies: &[Bytes]) {
        let column = |n: usize| Some(self.find_chunk(ranges.get(n)?)?.2);
        let (mut cached, mut bytes) = (Vec::new(), 0);
        for (n, (range, body)) in ranges.iter().zip(bodies).enumerate() {
            let is_first = n == 0 || column(n - 1) != column(n);
            let is_last = column(n + 1) != column(n);
            if (is_first || is_last) && bytes + body.len() <= CACHE_BYTES_MAX {
                bytes += body.len();
                // This is a copy: a slice would keep the whole response alive.
                cached.push((range.clone(), Bytes::copy_from_slice(body)));
            }
        }
        *self.cache.lock().unwrap_or_else(PoisonError::into_inner) = cached;
    }

    /// The bytes of the ranges, from the cache of the last read where possible.
    async fn fetch(&self, ranges: &[Range<u64>]) -> Result<Vec<Bytes>, DatasetError> {
        let cached = self.cache.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let known = |range: &Range<u64>| {
            cached
                .iter()
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
            self.check_page_headers(&ranges, &bodies).map_err(external)?;
            if let Some(budget) = &self.budget
                && !self.fits_budget(budget, &ranges, &bodies).map_err(external)?
            {
                return Err(ParquetError::External(Box::new(OverLimit)));
            }
            self.cache_ranges(&ranges, &bodies);
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
