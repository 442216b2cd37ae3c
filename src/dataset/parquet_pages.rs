//! Page headers of a Parquet column chunk: where the pages lie, and whether they claim sizes that may be read.
//!
//! Many writers put a million rows into one row group and write no page index. Without one, each shard of such a group
//! would fetch the whole column. So the headers are walked once, streaming, and the index is made here.
//! (The file's own index is not read: its decoder trusts list lengths.)
//!
//! A page header is a Thrift struct in compact protocol:
//! <https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift>,
//! <https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md>.

use std::ops::Range;

use bytes::BytesMut;
use futures::TryStreamExt;
use parquet::file::metadata::OffsetIndexBuilder;
use parquet::file::page_index::offset_index::OffsetIndexMetaData;

use super::error::DatasetError;
use super::pinned::PinnedFile;

/// Largest page that is decompressed, in bytes.
pub const PAGE_BYTES_MAX: i32 = 256 << 20;

/// Longest page header (it may hold statistics).
const HEADER_BYTES_MAX: usize = 1 << 20;

/// Deepest nesting within a header.
const DEPTH_MAX: u32 = 16;

const DATA_PAGE: i32 = 0;
const DATA_PAGE_V2: i32 = 3;

/// What is needed of a page header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PageHeader {
    kind: i32,
    uncompressed: i32,
    compressed: i32,
    values: i32,
    /// Only newer data pages say how many rows they hold.
    rows: Option<i32>,
}

/// Why a header could not be read.
#[derive(Debug, PartialEq, Eq)]
pub enum HeaderError {
    /// The bytes end within it.
    Short,
    Bad(&'static str),
}

/// Reads the header at the start of `bytes`; answers its length too.
pub fn parse_header(bytes: &[u8]) -> Result<(PageHeader, usize), HeaderError> {
    let mut reader = Compact { bytes, at: 0 };
    let mut header = PageHeader {
        kind: -1,
        uncompressed: -1,
        compressed: -1,
        ..PageHeader::default()
    };
    let mut id = 0;
    while let Some(kind) = reader.field(&mut id)? {
        match (id, kind) {
            (1, I32) => header.kind = reader.int()?,
            (2, I32) => header.uncompressed = reader.int()?,
            (3, I32) => header.compressed = reader.int()?,
            (5 | 8, STRUCT) => {
                let is_v2 = id == 8;
                let mut inner = 0;
                while let Some(kind) = reader.field(&mut inner)? {
                    match (inner, kind) {
                        (1, I32) => header.values = reader.int()?,
                        (3, I32) if is_v2 => header.rows = Some(reader.int()?),
                        _ => reader.skip(kind, DEPTH_MAX)?,
                    }
                }
            }
            _ => reader.skip(kind, DEPTH_MAX)?,
        }
    }
    if header.kind < 0 || header.uncompressed < 0 || header.compressed < 0 || header.values < 0 {
        return Err(HeaderError::Bad("a page header with negative or missing sizes"));
    }
    Ok((header, reader.at))
}

const BOOL_TRUE: u8 = 1;
const BOOL_FALSE: u8 = 2;
const BYTE: u8 = 3;
const I16: u8 = 4;
const I32: u8 = 5;
const I64: u8 = 6;
const DOUBLE: u8 = 7;
const BINARY: u8 = 8;
const LIST: u8 = 9;
const SET: u8 = 10;
const MAP: u8 = 11;
const STRUCT: u8 = 12;

/// A reader of Thrift's compact protocol.
struct Compact<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Compact<'_> {
    fn byte(&mut self) -> Result<u8, HeaderError> {
        let byte = *self.bytes.get(self.at).ok_or(HeaderError::Short)?;
        self.at += 1;
        Ok(byte)
    }

    fn varint(&mut self) -> Result<u64, HeaderError> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(HeaderError::Bad("a page header with an endless number"))
    }

    fn zigzag(&mut self) -> Result<i64, HeaderError> {
        let value = self.varint()?;
        Ok((value >> 1) as i64 ^ -((value & 1) as i64))
    }

    fn int(&mut self) -> Result<i32, HeaderError> {
        i32::try_from(self.zigzag()?).map_err(|_| HeaderError::Bad("a page header with a number out of range"))
    }

    /// The next field's type, `None` at the struct's end; `id` goes from the last field's id to this one's.
    fn field(&mut self, id: &mut i64) -> Result<Option<u8>, HeaderError> {
        let byte = self.byte()?;
        if byte == 0 {
            return Ok(None);
        }
        *id = match byte >> 4 {
            0 => self.zigzag()?,
            delta => id.wrapping_add(i64::from(delta)),
        };
        Ok(Some(byte & 0x0f))
    }

    fn advance(&mut self, bytes: u64) -> Result<(), HeaderError> {
        let end = usize::try_from(bytes)
            .ok()
            .and_then(|n| self.at.checked_add(n))
            .ok_or(HeaderError::Short)?;
        if end > self.bytes.len() {
            return Err(HeaderError::Short);
        }
        self.at = end;
        Ok(())
    }

    fn skip(&mut self, kind: u8, depth: u32) -> Result<(), HeaderError> {
        let depth = depth
            .checked_sub(1)
            .ok_or(HeaderError::Bad("a page header nested too deep"))?;
        match kind {
            BOOL_TRUE | BOOL_FALSE => Ok(()),
            BYTE => self.advance(1),
            I16 | I32 | I64 => self.varint().map(|_| ()),
            DOUBLE => self.advance(8),
            BINARY => {
                let length = self.varint()?;
                self.advance(length)
            }
            LIST | SET => {
                let byte = self.byte()?;
                let count = if byte >> 4 == 15 {
                    self.varint()?
                } else {
                    u64::from(byte >> 4)
                };
                self.skip_elements(count, &[byte & 0x0f], depth)
            }
            MAP => match self.varint()? {
                0 => Ok(()),
                count => {
                    let kinds = self.byte()?;
                    self.skip_elements(count, &[kinds >> 4, kinds & 0x0f], depth)
                }
            },
            STRUCT => {
                let mut id = 0;
                while let Some(kind) = self.field(&mut id)? {
                    self.skip(kind, depth)?;
                }
                Ok(())
            }
            _ => Err(HeaderError::Bad("a page header with an unknown type")),
        }
    }

    fn skip_elements(&mut self, count: u64, kinds: &[u8], depth: u32) -> Result<(), HeaderError> {
        if count > HEADER_BYTES_MAX as u64 {
            return Err(HeaderError::Bad("a page header with an absurd list"));
        }
        for _ in 0..count {
            for &kind in kinds {
                // Within a collection a boolean takes a byte.
                let kind = if matches!(kind, BOOL_TRUE | BOOL_FALSE) {
                    BYTE
                } else {
                    kind
                };
                self.skip(kind, depth)?;
            }
        }
        Ok(())
    }
}

/// Refuses a chunk whose pages claim more than may be decompressed; `claimed`: the footer's size of the chunk.
pub fn check_pages(chunk: &[u8], claimed: u64) -> Result<(), String> {
    let mut at = 0;
    let mut total = 0;
    while at < chunk.len() {
        let (header, length) = match parse_header(&chunk[at..]) {
            Ok(parsed) => parsed,
            Err(HeaderError::Short) => return Err("a page header is cut off".into()),
            Err(HeaderError::Bad(why)) => return Err(why.into()),
        };
        check_size(&header, &mut total, claimed)?;
        at = at.saturating_add(length).saturating_add(header.compressed as usize);
        if at > chunk.len() {
            return Err(format!(
                "a page claims {} bytes, more than its column has",
                header.compressed
            ));
        }
    }
    Ok(())
}

fn check_size(header: &PageHeader, total: &mut u64, claimed: u64) -> Result<(), String> {
    if header.uncompressed > PAGE_BYTES_MAX {
        return Err(format!(
            "a page claims {} bytes uncompressed, more than {PAGE_BYTES_MAX}",
            header.uncompressed
        ));
    }
    *total += header.uncompressed as u64;
    // Some writers count a little differently; a bomb is far beyond that.
    if *total > claimed.saturating_mul(4).saturating_add(16 << 20) {
        return Err(format!(
            "the pages of a column claim {total} bytes uncompressed where the footer claims {claimed}"
        ));
    }
    Ok(())
}

/// What [`index_pages`] needs to know of a column chunk.
#[derive(Debug, Clone)]
pub struct Chunk {
    pub range: Range<u64>,
    /// Uncompressed bytes as the footer claims them.
    pub claimed: u64,
    /// No repetition: a value is a row.
    pub flat: bool,
    /// Rows of the row group.
    pub rows: u64,
}

/// Streams the chunk once and indexes its data pages; `None` where the headers do not tell rows.
pub async fn index_pages(file: &PinnedFile, chunk: &Chunk) -> Result<Option<OffsetIndexMetaData>, DatasetError> {
    let mut walker = Walker::new(chunk.clone());
    let mut stream = file.stream(chunk.range.clone()).await?;
    while let Some(bytes) = stream.try_next().await? {
        if !walker
            .push(&bytes)
            .map_err(|why| DatasetError::unreadable(&file.name, why))?
        {
            return Ok(None);
        }
    }
    Ok(walker.finish())
}

/// Walks the headers of a chunk that comes in pieces.
struct Walker {
    chunk: Chunk,
    at: u64,
    pending: BytesMut,
    /// Bytes of the current page still to come.
    skip: u64,
    total: u64,
    rows: u64,
    index: OffsetIndexBuilder,
}

impl Walker {
    fn new(chunk: Chunk) -> Walker {
        let at = chunk.range.start;
        Walker {
            chunk,
            at,
            pending: BytesMut::new(),
            skip: 0,
            total: 0,
            rows: 0,
            index: OffsetIndexBuilder::new(),
        }
    }

    /// False: this chunk cannot be indexed.
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
            let skipped = self.skip.min(rest.len() as u64);
            self.skip -= skipped;
            self.at += skipped;
            rest = &rest[skipped as usize..];
            if rest.is_empty() {
                return Ok(true);
            }
            let (header, length) = match parse_header(rest) {
                Ok(parsed) => parsed,
                Err(HeaderError::Short) if rest.len() < HEADER_BYTES_MAX => {
                    self.pending.extend_from_slice(rest);
                    return Ok(true);
                }
                Err(_) => return Ok(false),
            };
            check_size(&header, &mut self.total, self.chunk.claimed)?;
            if !self.add(&header, length) {
                return Ok(false);
            }
            self.at += length as u64;
            self.skip = header.compressed as u64;
            rest = &rest[length..];
        }
    }

    fn add(&mut self, header: &PageHeader, length: usize) -> bool {
        if header.kind != DATA_PAGE && header.kind != DATA_PAGE_V2 {
            return true;
        }
        let rows = match header.rows {
            Some(rows) => rows,
            None if self.chunk.flat => header.values,
            None => return false,
        };
        let Ok(size) = i32::try_from(length as i64 + i64::from(header.compressed)) else {
            return false;
        };
        if rows <= 0 {
            return false;
        }
        self.rows += rows as u64;
        self.index.append_row_count(i64::from(rows));
        self.index.append_offset_and_size(self.at as i64, size);
        true
    }

    fn finish(self) -> Option<OffsetIndexMetaData> {
        let complete = self.at == self.chunk.range.end && self.skip == 0 && self.rows == self.chunk.rows;
        complete.then(|| self.index.build())
    }
}
