//! Memory cost of each row of a Parquet column, measured from the pages' levels and lengths without
//! decoding values.
//!
//! One page is decompressed at a time. Runs are counted value by value and never expanded in
//! memory, so measuring a decompression bomb costs only time.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use parquet::basic::{Encoding, Type as Physical};
use parquet::column::page::{Page, PageReader};
use parquet::file::metadata::ColumnChunkMetaData;
use parquet::file::serialized_reader::SerializedPageReader;

use super::cost::LeafCost;
use super::hybrid::{DeltaDecoder, HybridDecoder};

/// Pages of a column chunk: its dictionary page, if any, and then consecutive data pages. The first
/// data page begins with a new row.
#[derive(Debug, Clone)]
pub(crate) struct Pages {
    pub bytes: Bytes,
    /// First row of the data pages, within the row group.
    pub first_row: u64,
}

/// Adds the cost of each row in this column to `row_costs`, which has an entry per row of `rows`.
pub(crate) fn add_row_costs(
    pages: &Pages,
    chunk: &ColumnChunkMetaData,
    cost: &LeafCost,
    rows: &Range<u64>,
    row_costs: &mut [u64],
) -> Result<(), String> {
    let mut reader = page_reader(&pages.bytes, chunk)?;
    let column = chunk.column_descr();
    let mut walker = PageWalker {
        cost,
        is_text: cost.is_text,
        max_rep_level: u32::from(column.max_rep_level().unsigned_abs()),
        max_def_level: u32::from(column.max_def_level().unsigned_abs()),
        entries: Vec::new(),
        row: None,
        first_row: pages.first_row,
        rows: rows.clone(),
    };
    while let Some(page) = reader.get_next_page().map_err(|e| e.to_string())? {
        if !walker.add_page(&page, row_costs)? {
            break;
        }
    }
    Ok(())
}

/// Bytes of the longest entry of the dictionary at the start of `bytes`; `None` if there is no
/// dictionary.
pub(crate) fn longest_entry(bytes: &Bytes, chunk: &ColumnChunkMetaData) -> Result<Option<u64>, String> {
    if chunk.column_type() != Physical::BYTE_ARRAY {
        return Ok(None);
    }
    match page_reader(bytes, chunk)?.get_next_page().map_err(|e| e.to_string())? {
        Some(Page::DictionaryPage { buf, num_values, .. }) => {
            let longest = entry_lengths(&buf, num_values)?.into_iter().max();
            Ok(Some(longest.unwrap_or(0).into()))
        }
        _ => Ok(None),
    }
}

fn page_reader(bytes: &Bytes, chunk: &ColumnChunkMetaData) -> Result<SerializedPageReader<Bytes>, String> {
    let metadata = chunk
        .clone()
        .into_builder()
        .set_dictionary_page_offset(None)
        .set_index_page_offset(None)
        .set_data_page_offset(0)
        .set_total_compressed_size(i64::try_from(bytes.len()).map_err(|e| e.to_string())?)
        .build()
        .map_err(|e| e.to_string())?;
    SerializedPageReader::new(Arc::new(bytes.clone()), &metadata, 0, None).map_err(|e| e.to_string())
}

/// The lengths of a dictionary's entries.
fn entry_lengths(bytes: &[u8], count: u32) -> Result<Vec<u32>, String> {
    // Each entry takes at least four bytes, so the claimed count is bounded by the available bytes.
    let count = usize::try_from(count).unwrap_or(usize::MAX).min(bytes.len() / 4);
    let mut plain = PlainTexts { bytes, offset: 0 };
    (0..count).map(|_| Ok(plain.next_length()? as u32)).collect()
}

/// PLAIN texts: before each text, its length in four bytes.
struct PlainTexts<'a> {
    bytes: &'a [u8],
    offset: usize,
}

impl PlainTexts<'_> {
    fn next_length(&mut self) -> Result<u64, &'static str> {
        let short = "a page ends within its texts";
        let four = self.bytes.get(self.offset..self.offset + 4).ok_or(short)?;
        let length = u32::from_le_bytes([four[0], four[1], four[2], four[3]]);
        self.offset += 4 + length as usize;
        if self.offset <= self.bytes.len() {
            Ok(length.into())
        } else {
            Err(short)
        }
    }
}

/// The lengths of a page's texts, in order.
enum Lengths<'a> {
    /// Values have no individual lengths.
    None,
    Plain(PlainTexts<'a>),
    /// Indices into the dictionary, and the lengths of its entries.
    Dictionary(HybridDecoder<'a>, &'a [u32]),
    Delta(DeltaDecoder<'a>),
    /// Lengths of the prefixes shared with the previous text, and lengths of the suffixes.
    DeltaPrefix(DeltaDecoder<'a>, DeltaDecoder<'a>),
}

impl<'a> Lengths<'a> {
    fn of(bytes: &'a [u8], encoding: Encoding, entries: &'a [u32], values: u32) -> Result<Lengths<'a>, String> {
        let deltas = |bytes: &'a [u8]| {
            let deltas = DeltaDecoder::new(bytes)?;
            if deltas.remaining() <= values.into() {
                Ok(deltas)
            } else {
                Err(String::from("a page has more lengths than values"))
            }
        };
        let lengths = match encoding {
            Encoding::PLAIN => Lengths::Plain(PlainTexts { bytes, offset: 0 }),
            // The page holds only nulls.
            _ if bytes.is_empty() => Lengths::Plain(PlainTexts { bytes, offset: 0 }),
            Encoding::PLAIN_DICTIONARY | Encoding::RLE_DICTIONARY => {
                Lengths::Dictionary(HybridDecoder::new(&bytes[1..], bytes[0].into())?, entries)
            }
            Encoding::DELTA_LENGTH_BYTE_ARRAY => Lengths::Delta(deltas(bytes)?),
            Encoding::DELTA_BYTE_ARRAY => {
                let shared = deltas(bytes)?;
                let suffixes_offset = shared.clone().skip_to_end()?;
                Lengths::DeltaPrefix(shared, deltas(&bytes[suffixes_offset..])?)
            }
            other => return Err(format!("its texts are encoded as {other}, which they cannot be")),
        };
        Ok(lengths)
    }

    fn next_length(&mut self) -> Result<u64, &'static str> {
        let positive = |length: i64| u64::try_from(length).map_err(|_| "a page has a negative length");
        match self {
            Lengths::None => Ok(0),
            Lengths::Plain(plain) => plain.next_length(),
            Lengths::Dictionary(indices, entries) => {
                let entry = entries.get(indices.next_value()? as usize);
                entry
                    .copied()
                    .map(u64::from)
                    .ok_or("a page names an entry that its dictionary does not have")
            }
            Lengths::Delta(lengths) => positive(lengths.next_value()?),
            Lengths::DeltaPrefix(shared, rest) => {
                let (shared, rest) = (positive(shared.next_value()?)?, positive(rest.next_value()?)?);
                Ok(shared.saturating_add(rest))
            }
        }
    }
}

/// The levels and the encoded values of a data page.
struct PageValues<'a> {
    /// Number of values, including nulls.
    count: u32,
    rep_levels: HybridDecoder<'a>,
    def_levels: HybridDecoder<'a>,
    bytes: &'a [u8],
    encoding: Encoding,
}

/// Adds up the costs of rows while the pages of a column chunk are walked.
struct PageWalker<'c> {
    cost: &'c LeafCost,
    is_text: bool,
    max_rep_level: u32,
    max_def_level: u32,
    /// The lengths of the dictionary's entries.
    entries: Vec<u32>,
    /// The row of the last value, within the row group.
    row: Option<u64>,
    first_row: u64,
    rows: Range<u64>,
}

impl PageWalker<'_> {
    /// Adds the costs of a page's values; false if all wanted rows have been counted.
    fn add_page(&mut self, page: &Page, row_costs: &mut [u64]) -> Result<bool, String> {
        match page {
            Page::DictionaryPage { buf, num_values, .. } => {
                if self.is_text {
                    self.entries = entry_lengths(buf, *num_values)?;
                }
                Ok(true)
            }
            Page::DataPage {
                buf,
                num_values,
                encoding,
                def_level_encoding,
                rep_level_encoding,
                ..
            } => {
                let mut rest: &[u8] = buf;
                let rep = take_levels(&mut rest, self.max_rep_level, *rep_level_encoding)?;
                let def = take_levels(&mut rest, self.max_def_level, *def_level_encoding)?;
                let values = PageValues {
                    count: *num_values,
                    rep_levels: rep,
                    def_levels: def,
                    bytes: rest,
                    encoding: *encoding,
                };
                self.add_values(values, row_costs)
            }
            Page::DataPageV2 {
                buf,
                num_values,
                encoding,
                def_levels_byte_len,
                rep_levels_byte_len,
                ..
            } => {
                let ends = (*rep_levels_byte_len as usize, *def_levels_byte_len as usize);
                let cut = || String::from("a page ends within its levels");
                let (rep, rest) = buf.split_at_checked(ends.0).ok_or_else(cut)?;
                let (def, rest) = rest.split_at_checked(ends.1).ok_or_else(cut)?;
                let values = PageValues {
                    count: *num_values,
                    rep_levels: HybridDecoder::new(rep, level_bits(self.max_rep_level))?,
                    def_levels: HybridDecoder::new(def, level_bits(self.max_def_level))?,
                    bytes: rest,
                    encoding: *encoding,
                };
                self.add_values(values, row_costs)
            }
        }
    }

    /// Adds the costs of a data page's values; false if all wanted rows have been counted.
    fn add_values(&mut self, values: PageValues, row_costs: &mut [u64]) -> Result<bool, String> {
        let PageValues {
            count,
            mut rep_levels,
            mut def_levels,
            bytes,
            encoding,
        } = values;
        let entries = std::mem::take(&mut self.entries);
        let mut lengths = if self.is_text {
            Lengths::of(bytes, encoding, &entries, count)?
        } else {
            Lengths::None
        };
        for _ in 0..count {
            let is_new = rep_levels.next_value()? == 0;
            let row = match self.row {
                Some(row) => row + u64::from(is_new),
                None => self.first_row,
            };
            self.row = Some(row);
            // The rest of the page belongs to later rows.
            if row >= self.rows.end {
                return Ok(false);
            }
            let bytes = if self.is_text && def_levels.next_value()? == self.max_def_level {
                lengths.next_length()?
            } else {
                0
            };
            if row >= self.rows.start
                && let Some(sum) = row_costs.get_mut((row - self.rows.start) as usize)
            {
                *sum = sum.saturating_add(self.cost.total(0, 1, bytes));
            }
        }
        self.entries = entries;
        Ok(true)
    }
}

/// Bits per level, for levels from 0 to `max_level`.
fn level_bits(max_level: u32) -> u32 {
    u32::BITS - max_level.leading_zeros()
}

/// Takes the levels at the start of a version 1 data page, which have a length prefix of four
/// bytes, off `rest`.
fn take_levels<'a>(rest: &mut &'a [u8], max_level: u32, encoding: Encoding) -> Result<HybridDecoder<'a>, String> {
    if max_level == 0 {
        return Ok(HybridDecoder::new(&[], 0)?);
    }
    if encoding != Encoding::RLE {
        return Err(format!("its levels are encoded as {encoding}, which is not supported"));
    }
    let cut = || String::from("a page ends within its levels");
    let (length, after) = rest.split_at_checked(4).ok_or_else(cut)?;
    let length = u32::from_le_bytes([length[0], length[1], length[2], length[3]]);
    let (levels, after) = after.split_at_checked(length as usize).ok_or_else(cut)?;
    *rest = after;
    Ok(HybridDecoder::new(levels, level_bits(max_level))?)
}
