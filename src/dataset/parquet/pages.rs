//! Page headers of a Parquet column chunk: finds the pages' positions, and checks the sizes that
//! the headers claim.
//!
//! Many writers put a million rows into one row group. Without a page index, each shard of such a
//! group would fetch the whole column. The file's own offset index is used if it exists and fits
//! the chunk; it is parsed here, since the decoder's parser trusts list lengths. Without an index,
//! all headers are read once, and large pages are skipped without being fetched. In both cases the
//! headers of the pages that are fetched later must agree with the index.
//!
//! A page header is a Thrift struct in compact protocol:
//! <https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift>.
//!
//! See docs/decisions/041-a-shard-reads-its-own-pages.md.

use std::ops::Range;

use bytes::BytesMut;
use parquet::file::metadata::OffsetIndexBuilder;
use parquet::file::page_index::offset_index::OffsetIndexMetaData;

use super::thrift::{CompactReader, I32, I64, LIST, STRUCT, ThriftError};
use super::thrift_check::check_page_header;
use crate::dataset::error::DatasetError;
use crate::dataset::store::pinned_file::PinnedFile;

/// Maximum uncompressed size of a page, in bytes.
pub const PAGE_BYTES_MAX: i32 = 256 << 20;

/// Maximum bytes of a page header, which may hold statistics.
const HEADER_BYTES_MAX: usize = 1 << 20;

/// Pages of at least this size are skipped without being fetched. Smaller pages are fetched
/// together with their headers.
const SKIPPED_PAGE_BYTES_MIN: u64 = 64 << 10;

/// Bytes fetched for the header of a large page. Most headers are far shorter.
const HEADER_READ_BYTES: u64 = 4 << 10;

/// Bytes fetched per request while pages are small.
const SMALL_PAGES_READ_BYTES: u64 = 256 << 10;

const DATA_PAGE: i32 = 0;
const DICTIONARY_PAGE: i32 = 2;
const DATA_PAGE_V2: i32 = 3;

const PLAIN_DICTIONARY: i32 = 2;
const DELTA_BYTE_ARRAY: i32 = 7;
const RLE_DICTIONARY: i32 = 8;

/// The fields of a page header that are used here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PageHeader {
    kind: i32,
    pub(crate) uncompressed_bytes: i32,
    pub(crate) compressed_bytes: i32,
    /// Number of values; for a dictionary page, its entries.
    pub(crate) values: i32,
    encoding: i32,
    /// The row count, which only the headers of version 2 data pages have.
    rows: Option<i32>,
}

impl PageHeader {
    /// Uncompressed bytes, compressed bytes and number of values (entries of a dictionary).
    pub fn claims(&self) -> (u64, u64, u64) {
        let [uncompressed, compressed, values] =
            [self.uncompressed_bytes, self.compressed_bytes, self.values].map(i32::unsigned_abs);
        (uncompressed.into(), compressed.into(), values.into())
    }

    pub fn is_dictionary(&self) -> bool {
        self.kind == DICTIONARY_PAGE
    }

    /// Whether the values are indices into the dictionary.
    pub fn is_dictionary_encoded(&self) -> bool {
        [PLAIN_DICTIONARY, RLE_DICTIONARY].contains(&self.encoding)
    }

    /// Whether texts are encoded as the length of a prefix shared with the text before, and a
    /// suffix.
    pub fn has_shared_prefixes(&self) -> bool {
        self.encoding == DELTA_BYTE_ARRAY
    }
}

/// Parses the header at the start of `bytes`; also returns the header's length.
pub fn parse_header(bytes: &[u8]) -> Result<(PageHeader, usize), ThriftError> {
    check_page_header(bytes)?;
    let mut reader = CompactReader::new(bytes);
    let mut header = PageHeader {
        kind: -1,
        uncompressed_bytes: -1,
        compressed_bytes: -1,
        ..PageHeader::default()
    };
    let mut id = 0;
    while let Some(kind) = reader.field(&mut id)? {
        match id {
            1 => header.kind = reader.int()?,
            2 => header.uncompressed_bytes = reader.int()?,
            3 => header.compressed_bytes = reader.int()?,
            // The nested headers of other page types are skipped.
            5 if header.kind != DATA_PAGE => reader.skip(kind)?,
            7 if header.kind != DICTIONARY_PAGE => reader.skip(kind)?,
            8 if header.kind != DATA_PAGE_V2 => reader.skip(kind)?,
            5 | 7 | 8 => {
                let is_v2 = id == 8;
                let mut inner = 0;
                while let Some(kind) = reader.field(&mut inner)? {
                    match inner {
                        1 => header.values = reader.int()?,
                        2 if !is_v2 => header.encoding = reader.int()?,
                        3 if is_v2 => header.rows = Some(reader.int()?),
                        4 if is_v2 => header.encoding = reader.int()?,
                        _ => reader.skip(kind)?,
                    }
                }
            }
            _ => reader.skip(kind)?,
        }
    }
    if header.kind < 0 || header.uncompressed_bytes < 0 || header.compressed_bytes < 0 || header.values < 0 {
        return Err(ThriftError::Invalid("negative or missing sizes"));
    }
    Ok((header, reader.position()))
}

/// Refuses pages that claim more than the decompression limits. `claimed_bytes` is the chunk's
/// uncompressed size according to the footer. `rows` returns the row count of the page at an offset
/// according to the page index, if it has one.
pub fn check_pages(chunk: &[u8], claimed_bytes: u64, rows: impl Fn(usize) -> Option<i64>) -> Result<(), String> {
    let mut offset = 0;
    let mut total = 0;
    while offset < chunk.len() {
        let (header, length) = match parse_header(&chunk[offset..]) {
            Ok(parsed) => parsed,
            Err(ThriftError::Truncated) => return Err("a page header is cut off".into()),
            Err(ThriftError::Invalid(why)) => return Err(format!("a page header has {why}")),
        };
        check_size(&header, &mut total, claimed_bytes)?;
        if let Some(expected) = rows(offset)
            && i64::from(header.rows.unwrap_or(header.values)) != expected
        {
            return Err("its page index and its page headers differ in the rows of a page".into());
        }
        offset = offset
            .saturating_add(length)
            .saturating_add(header.compressed_bytes as usize);
        if offset > chunk.len() {
            return Err(format!(
                "a page claims {} bytes, more than its column has",
                header.compressed_bytes
            ));
        }
    }
    Ok(())
}

/// The headers of a chunk's pages in order, each with the byte range of its page, which includes
/// the header. The chunk must have passed [`check_pages`].
pub fn page_headers(chunk: &[u8]) -> impl Iterator<Item = (PageHeader, Range<usize>)> {
    let mut offset = 0;
    std::iter::from_fn(move || {
        let (header, length) = parse_header(chunk.get(offset..).filter(|rest| !rest.is_empty())?).ok()?;
        let start = offset;
        offset = offset
            .saturating_add(length)
            .saturating_add(header.compressed_bytes as usize);
        Some((header, start..offset.min(chunk.len())))
    })
}

fn check_size(header: &PageHeader, total: &mut u64, claimed_bytes: u64) -> Result<(), String> {
    if header.uncompressed_bytes > PAGE_BYTES_MAX {
        return Err(format!(
            "a page claims {} bytes uncompressed, more than {PAGE_BYTES_MAX}",
            header.uncompressed_bytes
        ));
    }
    *total += header.uncompressed_bytes as u64;
    // Some writers count a little differently. A decompression bomb exceeds this margin by far.
    if *total > claimed_bytes.saturating_mul(4).saturating_add(16 << 20) {
        return Err(format!(
            "the pages of a column claim {total} bytes uncompressed where the footer claims {claimed_bytes}"
        ));
    }
    Ok(())
}

/// The properties of a column chunk that [`index_pages`] needs.
#[derive(Debug, Clone)]
pub struct ChunkInfo {
    pub range: Range<u64>,
    /// Uncompressed bytes according to the footer.
    pub claimed_bytes: u64,
    /// Whether each value is a row: the column is not repeated.
    pub is_flat: bool,
    /// Rows of the row group.
    pub rows: u64,
}

/// Builds an offset index from the headers of the chunk's data pages; `None` if the headers give no
/// row counts.
pub async fn index_pages(file: &PinnedFile, chunk: &ChunkInfo) -> Result<Option<OffsetIndexMetaData>, DatasetError> {
    let mut walker = HeaderWalker::new(chunk.clone());
    loop {
        let from = walker.skip_page();
        if from >= chunk.range.end {
            return Ok(walker.finish());
        }
        let to = (from + walker.read_bytes()).min(chunk.range.end);
        let bytes = file.bytes(from..to).await?;
        if !walker
            .push(&bytes)
            .map_err(|why| DatasetError::unreadable(&file.name, why))?
        {
            return Ok(None);
        }
    }
}

/// Parses an offset index of the file; `None` if it is invalid or does not fit the chunk.
pub fn parse_index(bytes: &[u8], chunk: &ChunkInfo) -> Option<OffsetIndexMetaData> {
    let pages = parse_entries(bytes).ok()?;
    let mut index = OffsetIndexBuilder::new();
    let mut last_end = i64::try_from(chunk.range.start).ok()?;
    let chunk_end = i64::try_from(chunk.range.end).ok()?;
    let next_rows = pages.iter().skip(1).map(|page| page.first_row);
    let next_rows = next_rows.chain([chunk.rows as i64]);
    if pages.first()?.first_row != 0 {
        return None;
    }
    for (page, next_row) in pages.iter().zip(next_rows) {
        if page.offset < last_end || page.size <= 0 || next_row <= page.first_row {
            return None;
        }
        last_end = page.offset.checked_add(page.size.into())?;
        index.append_row_count(next_row - page.first_row);
        index.append_offset_and_size(page.offset, page.size);
    }
    (last_end <= chunk_end).then(|| index.build())
}

/// A page in an offset index; -1 for missing fields.
struct IndexEntry {
    offset: i64,
    /// Bytes of the page including its header.
    size: i32,
    first_row: i64,
}

/// Parses an offset index: a struct whose field 1 lists the pages.
fn parse_entries(bytes: &[u8]) -> Result<Vec<IndexEntry>, ThriftError> {
    let mut reader = CompactReader::new(bytes);
    let (mut id, mut pages) = (0, Vec::new());
    while let Some(kind) = reader.field(&mut id)? {
        if id != 1 || kind != LIST {
            reader.skip(kind)?;
            continue;
        }
        let (STRUCT, count) = reader.list()? else {
            return Err(ThriftError::Invalid("a page index whose entries are no structs"));
        };
        for _ in 0..count {
            let mut page = IndexEntry {
                offset: -1,
                size: -1,
                first_row: -1,
            };
            let mut inner = 0;
            while let Some(kind) = reader.field(&mut inner)? {
                match (inner, kind) {
                    (1, I64) => page.offset = reader.long()?,
                    (2, I32) => page.size = reader.int()?,
                    (3, I64) => page.first_row = reader.long()?,
                    _ => reader.skip(kind)?,
                }
            }
            pages.push(page);
        }
    }
    Ok(pages)
}

/// Indexes the pages of a column chunk whose bytes arrive in pieces.
struct HeaderWalker {
    chunk: ChunkInfo,
    offset: u64,
    pending: BytesMut,
    /// Remaining bytes of the current page.
    page_bytes_left: u64,
    /// Size of the last page.
    last_page_bytes: u64,
    claimed_total: u64,
    rows: u64,
    index: OffsetIndexBuilder,
}

impl HeaderWalker {
    fn new(chunk: ChunkInfo) -> HeaderWalker {
        let offset = chunk.range.start;
        HeaderWalker {
            chunk,
            offset,
            pending: BytesMut::new(),
            page_bytes_left: 0,
            last_page_bytes: 0,
            claimed_total: 0,
            rows: 0,
            index: OffsetIndexBuilder::new(),
        }
    }

    /// Skips the rest of the current page, and returns the offset of the next bytes to fetch.
    fn skip_page(&mut self) -> u64 {
        self.offset = self.offset.saturating_add(std::mem::take(&mut self.page_bytes_left));
        self.offset.saturating_add(self.pending.len() as u64)
    }

    /// Number of bytes to fetch next: enough for one header if the last page was large, else enough
    /// for many small pages.
    fn read_bytes(&self) -> u64 {
        if self.last_page_bytes >= SKIPPED_PAGE_BYTES_MIN {
            HEADER_READ_BYTES.max(self.pending.len() as u64)
        } else {
            SMALL_PAGES_READ_BYTES
        }
    }

    /// Processes the next bytes; false if the chunk cannot be indexed.
    fn push(&mut self, bytes: &[u8]) -> Result<bool, String> {
        let joined;
        let mut rest = if self.pending.is_empty() {
            bytes
        } else {
            self.pending.extend_from_slice(bytes);
            joined = std::mem::take(&mut self.pending);
            &joined[..]
        };
        loop {
            let skipped = self.page_bytes_left.min(rest.len() as u64);
            self.page_bytes_left -= skipped;
            self.offset += skipped;
            rest = &rest[skipped as usize..];
            if rest.is_empty() {
                return Ok(true);
            }
            let (header, length) = match parse_header(rest) {
                Ok(parsed) => parsed,
                Err(ThriftError::Truncated) if rest.len() < HEADER_BYTES_MAX => {
                    self.pending.extend_from_slice(rest);
                    return Ok(true);
                }
                Err(_) => return Ok(false),
            };
            check_size(&header, &mut self.claimed_total, self.chunk.claimed_bytes)?;
            if !self.add_page(&header, length) {
                return Ok(false);
            }
            self.offset += length as u64;
            self.page_bytes_left = header.compressed_bytes as u64;
            self.last_page_bytes = self.page_bytes_left;
            rest = &rest[length..];
        }
    }

    fn add_page(&mut self, header: &PageHeader, length: usize) -> bool {
        if header.kind != DATA_PAGE && header.kind != DATA_PAGE_V2 {
            return true;
        }
        let rows = match header.rows {
            Some(rows) => rows,
            None if self.chunk.is_flat => header.values,
            None => return false,
        };
        let Ok(size) = i32::try_from(length as i64 + i64::from(header.compressed_bytes)) else {
            return false;
        };
        if rows <= 0 {
            return false;
        }
        self.rows += rows as u64;
        self.index.append_row_count(i64::from(rows));
        self.index.append_offset_and_size(self.offset as i64, size);
        true
    }

    fn finish(self) -> Option<OffsetIndexMetaData> {
        let is_complete =
            self.offset == self.chunk.range.end && self.page_bytes_left == 0 && self.rows == self.chunk.rows;
        is_complete.then(|| self.index.build())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A data page header: type 0, sizes, `num_values`, and `num_rows` in version 2.
    fn header(uncompressed: i32, compressed: i32, values: i32, rows: Option<i32>) -> Vec<u8> {
        let zigzag = |v: i32| {
            let mut out = Vec::new();
            let mut rest = ((v << 1) ^ (v >> 31)) as u32;
            while rest >= 0x80 {
                out.push(rest as u8 | 0x80);
                rest >>= 7;
            }
            out.push(rest as u8);
            out
        };
        let mut out = vec![0x15];
        out.extend(zigzag(if rows.is_some() { DATA_PAGE_V2 } else { DATA_PAGE }));
        out.push(0x15);
        out.extend(zigzag(uncompressed));
        out.push(0x15);
        out.extend(zigzag(compressed));
        out.push(if rows.is_some() { 0x5c } else { 0x2c });
        out.push(0x15);
        out.extend(zigzag(values));
        if let Some(rows) = rows {
            out.push(0x25);
            out.extend(zigzag(rows));
        }
        out.extend([0, 0]);
        out
    }

    fn chunk(pages: &[(i32, i32, Option<i32>)]) -> Vec<u8> {
        let page = |&(compressed, values, rows): &(i32, i32, Option<i32>)| {
            let mut page = header(compressed * 2, compressed, values, rows);
            page.extend(vec![0xff; compressed as usize]);
            page
        };
        pages.iter().flat_map(page).collect()
    }

    fn index(bytes: &[u8], step: usize, is_flat: bool, rows: u64) -> Option<Vec<(i64, i32, i64)>> {
        let chunk = ChunkInfo {
            range: 100..100 + bytes.len() as u64,
            claimed_bytes: 1 << 20,
            is_flat,
            rows,
        };
        let mut walker = HeaderWalker::new(chunk);
        for part in bytes.chunks(step) {
            if !walker.push(part).unwrap() {
                return None;
            }
        }
        let index = walker.finish()?;
        Some(
            index
                .page_locations()
                .iter()
                .map(|p| (p.offset, p.compressed_page_size, p.first_row_index))
                .collect(),
        )
    }

    #[test]
    fn a_field_of_another_type_is_refused() {
        let right = header(100, 50, 7, None);
        assert_eq!(parse_header(&right).unwrap().0.uncompressed_bytes, 100);
        // The uncompressed size as a double: a parser that follows the type skips eight bytes, one
        // that follows the field's number reads a short integer.
        let mut wrong = right.clone();
        assert_eq!(wrong[2], 0x15);
        wrong[2] = 0x17;
        wrong.extend([0; 16]);
        assert_eq!(
            parse_header(&wrong).unwrap_err(),
            ThriftError::Invalid("a field of another type")
        );
        // The compressed size twice.
        let mut twice = right;
        twice.pop();
        twice.extend([0x05, 0x06, 0x02, 0x00]);
        assert_eq!(
            parse_header(&twice).unwrap_err(),
            ThriftError::Invalid("fields out of order")
        );
    }

    #[test]
    fn the_index_has_the_positions_of_the_pages() {
        let first = header(600, 300, 10, None).len() as i64;
        let bytes = chunk(&[(300, 10, None), (20, 5, Some(5))]);
        let expected = vec![
            (100, first as i32 + 300, 0),
            (100 + first + 300, (bytes.len() as i64 - first - 300) as i32, 10),
        ];
        for step in [1, 7, 4096] {
            assert_eq!(index(&bytes, step, true, 15), Some(expected.clone()), "step {step}");
        }
        assert_eq!(
            index(&bytes, 9, true, 16),
            None,
            "pages that do not add up to the group's rows"
        );
        assert_eq!(
            index(&bytes, 9, false, 15),
            None,
            "values are not rows in a repeated column"
        );
        assert_eq!(index(&bytes[..bytes.len() - 1], 9, true, 15), None, "cut off");
    }

    /// A Thrift offset index of these pages.
    fn written(pages: &[(i64, i32, i64)]) -> Vec<u8> {
        let zigzag = |out: &mut Vec<u8>, v: i64| {
            let mut rest = ((v << 1) ^ (v >> 63)) as u64;
            while rest >= 0x80 {
                out.push(rest as u8 | 0x80);
                rest >>= 7;
            }
            out.push(rest as u8);
        };
        assert!(pages.len() < 15);
        let mut out = vec![0x19, (pages.len() as u8) << 4 | STRUCT];
        for &(offset, size, row) in pages {
            for (kind, value) in [(I64, offset), (I32, size.into()), (I64, row)] {
                out.push(0x10 | kind);
                zigzag(&mut out, value);
            }
            out.push(0);
        }
        out.push(0);
        out
    }

    #[test]
    fn an_index_that_does_not_fit_its_chunk_is_ignored() {
        let chunk = ChunkInfo {
            range: 100..200,
            claimed_bytes: 1000,
            is_flat: true,
            rows: 30,
        };
        let parse = |pages: &[(i64, i32, i64)]| {
            let index = parse_index(&written(pages), &chunk)?;
            let pages = index.page_locations().iter();
            Some(
                pages
                    .map(|p| (p.offset, p.compressed_page_size, p.first_row_index))
                    .collect::<Vec<_>>(),
            )
        };
        let right = [(110, 40, 0), (150, 50, 10)];
        assert_eq!(parse(&right), Some(right.to_vec()));
        for (wrong, why) in [
            (vec![], "no page"),
            (vec![(110, 40, 5), (150, 50, 10)], "it begins within the rows"),
            (vec![(110, 40, 0), (150, 50, 0)], "a page without rows"),
            (vec![(110, 40, 0), (150, 50, 30)], "a page behind the last row"),
            (vec![(90, 40, 0), (150, 50, 10)], "a page before the chunk"),
            (vec![(110, 41, 0), (150, 50, 10)], "pages that overlap"),
            (vec![(110, 40, 0), (150, 51, 10)], "a page that ends behind the chunk"),
            (vec![(110, 0, 0), (150, 50, 10)], "a page without bytes"),
        ] {
            assert_eq!(parse(&wrong), None, "{why}");
        }
        let whole = written(&right);
        for end in 0..whole.len() {
            assert!(parse_index(&whole[..end], &chunk).is_none(), "cut off at {end}");
        }
    }

    #[test]
    fn pages_whose_row_counts_differ_from_their_index_are_refused() {
        let bytes = chunk(&[(30, 7, None), (20, 5, Some(5))]);
        let second = chunk(&[(30, 7, None)]).len();
        let rows = |first: i64| move |at: usize| [(0, first), (second, 5)].iter().find(|p| p.0 == at).map(|p| p.1);
        assert_eq!(check_pages(&bytes, 1000, rows(7)), Ok(()));
        assert!(check_pages(&bytes, 1000, rows(8)).unwrap_err().contains("page index"));
    }

    #[test]
    fn absurd_pages_are_refused() {
        assert_eq!(
            check_pages(&chunk(&[(30, 1, None), (20, 1, Some(1))]), 100, |_| None),
            Ok(())
        );
        let bomb = header(i32::MAX, 0, 1, None);
        assert!(
            check_pages(&bomb, u64::MAX, |_| None)
                .unwrap_err()
                .contains("claims 2147483647 bytes uncompressed")
        );
        let many = header(PAGE_BYTES_MAX, 0, 1, None).repeat(3);
        assert!(
            check_pages(&many, 1000, |_| None)
                .unwrap_err()
                .contains("the footer claims 1000")
        );
        assert!(
            check_pages(&header(1, 7, 1, None), 100, |_| None)
                .unwrap_err()
                .contains("claims 7 bytes")
        );
        assert!(
            check_pages(&header(-1, 7, 1, None), 100, |_| None)
                .unwrap_err()
                .contains("negative")
        );
        assert!(check_pages(&[0x15], 100, |_| None).unwrap_err().contains("cut off"));
    }

    proptest! {
        #[test]
        fn foreign_headers_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), step in 1usize..50) {
            let _ = check_pages(&bytes, 1000, |_| None);
            let _ = index(&bytes, step, true, 10);
        }
    }
}
