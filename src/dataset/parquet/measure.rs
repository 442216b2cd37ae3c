//! Memory cost of each row of a Parquet column, measured by walking the pages' levels and lengths
//! without decoding values.
//!
//! One page is decompressed at a time. Runs are counted value by value and never expanded, so
//! measuring a decompression bomb costs only time.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use parquet::basic::{Encoding, Type as Physical};
use parquet::column::page::{Page, PageReader};
use parquet::file::metadata::ColumnChunkMetaData;
use parquet::file::serialized_reader::SerializedPageReader;

use super::cost::LeafCost;
use super::hybrid::{Deltas, Hybrid};

/// Consecutive pages of a column chunk: its dictionary page, if any, and then data pages, the first
/// of which begins with a new row.
#[derive(Debug, Clone)]
pub(crate) struct Pages {
    pub bytes: Bytes,
    /// First row of the data pages, within the row group.
    pub first_row: u64,
}

/// Adds to `sums`, which has an entry per row of `rows`, the rows' costs in this column.
pub(crate) fn add_row_costs(
    pages: &Pages,
    chunk: &ColumnChunkMetaData,
    cost: &LeafCost,
    rows: &Range<u64>,
    sums: &mut [u64],
) -> Result<(), String> {
    let mut reader = page_reader(&pages.bytes, chunk)?;
    let column = chunk.column_descr();
    let mut walk = Walk {
        cost,
        is_text: cost.is_text,
        rep: u32::from(column.max_rep_level().unsigned_abs()),
        def: u32::from(column.max_def_level().unsigned_abs()),
        entries: Vec::new(),
        at: None,
        first_row: pages.first_row,
        rows: rows.clone(),
    };
    while let Some(page) = reader.get_next_page().map_err(|e| e.to_string())? {
        if !walk.page(&page, sums)? {
            break;
        }
    }
    Ok(())
}

/// Bytes of the longest entry of the dictionary at the start of `bytes`; `None` if there is no
/// dictionary.
pub(crate) fn widest_entry(bytes: &Bytes, chunk: &ColumnChunkMetaData) -> Result<Option<u64>, String> {
    if chunk.column_type() != Physical::BYTE_ARRAY {
        return Ok(None);
    }
    match page_reader(bytes, chunk)?.get_next_page().map_err(|e| e.to_string())? {
        Some(Page::DictionaryPage { buf, num_values, .. }) => {
            let longest = entries(&buf, num_values)?.into_iter().max();
            Ok(Some(longest.unwrap_or(0).into()))
        }
        _ => Ok(None),
    }
}

fn page_reader(bytes: &Bytes, chunk: &ColumnChunkMetaData) -> Result<SerializedPageReader<Bytes>, String> {
    let alone = chunk
        .clone()
        .into_builder()
        .set_dictionary_page_offset(None)
        .set_index_page_offset(None)
        .set_data_page_offset(0)
        .set_total_compressed_size(i64::try_from(bytes.len()).map_err(|e| e.to_string())?)
        .build()
        .map_err(|e| e.to_string())?;
    SerializedPageReader::new(Arc::new(bytes.clone()), &alone, 0, None).map_err(|e| e.to_string())
}

/// The lengths of a dictionary's entries.
fn entries(bytes: &[u8], count: u32) -> Result<Vec<u32>, String> {
    // Each entry takes at least four bytes, so the claimed count is bounded by the available bytes.
    let count = usize::try_from(count).unwrap_or(usize::MAX).min(bytes.len() / 4);
    let mut plain = Plain { bytes, at: 0 };
    (0..count).map(|_| Ok(plain.next_length()? as u32)).collect()
}

/// PLAIN texts, each behind its length in four bytes.
struct Plain<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Plain<'_> {
    fn next_length(&mut self) -> Result<u64, &'static str> {
        let short = "a page ends within its texts";
        let four = self.bytes.get(self.at..self.at + 4).ok_or(short)?;
        let length = u32::from_le_bytes([four[0], four[1], four[2], four[3]]);
        self.at += 4 + length as usize;
        if self.at <= self.bytes.len() {
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
    Plain(Plain<'a>),
    Named(Hybrid<'a>, &'a [u32]),
    Own(Deltas<'a>),
    /// Lengths of the prefix shared with the previous text, and of the suffix.
    Shared(Deltas<'a>, Deltas<'a>),
}

impl<'a> Lengths<'a> {
    fn of(bytes: &'a [u8], encoding: Encoding, entries: &'a [u32], values: u32) -> Result<Lengths<'a>, String> {
        let deltas = |bytes: &'a [u8]| {
            let deltas = Deltas::new(bytes)?;
            if deltas.left() <= values.into() {
                Ok(deltas)
            } else {
                Err(String::from("a page has more lengths than values"))
            }
        };
        let lengths = match encoding {
            Encoding::PLAIN => Lengths::Plain(Plain { bytes, at: 0 }),
            // The page holds only nulls.
            _ if bytes.is_empty() => Lengths::Plain(Plain { bytes, at: 0 }),
            Encoding::PLAIN_DICTIONARY | Encoding::RLE_DICTIONARY => {
                Lengths::Named(Hybrid::new(&bytes[1..], bytes[0].into())?, entries)
            }
            Encoding::DELTA_LENGTH_BYTE_ARRAY => Lengths::Own(deltas(bytes)?),
            Encoding::DELTA_BYTE_ARRAY => {
                let shared = deltas(bytes)?;
                let behind = shared.clone().end()?;
                Lengths::Shared(shared, deltas(&bytes[behind..])?)
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
            Lengths::Named(names, entries) => {
                let entry = entries.get(names.next_value()? as usize);
                entry
                    .copied()
                    .map(u64::from)
                    .ok_or("a page names an entry that its dictionary does not have")
            }
            Lengths::Own(lengths) => positive(lengths.next_value()?),
            Lengths::Shared(shared, rest) => {
                let (shared, rest) = (positive(shared.next_value()?)?, positive(rest.next_value()?)?);
                Ok(shared.saturating_add(rest))
            }
        }
    }
}

struct Walk<'c> {
    cost: &'c LeafCost,
    is_text: bool,
    /// The maximum levels.
    rep: u32,
    def: u32,
    /// The lengths of the dictionary's entries.
    entries: Vec<u32>,
    /// The row of the last value.
    at: Option<u64>,
    first_row: u64,
    rows: Range<u64>,
}

impl Walk<'_> {
    /// Processes a page; false if all wanted rows have been counted.
    fn page(&mut self, page: &Page, sums: &mut [u64]) -> Result<bool, String> {
        match page {
            Page::DictionaryPage { buf, num_values, .. } => {
                if self.is_text {
                    self.entries = entries(buf, *num_values)?;
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
                let rep = first_levels(&mut rest, self.rep, *rep_level_encoding)?;
                let def = first_levels(&mut rest, self.def, *def_level_encoding)?;
                self.values(*num_values, (rep, def), (rest, *encoding), sums)
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
                let levels = (Hybrid::new(rep, width(self.rep))?, Hybrid::new(def, width(self.def))?);
                self.values(*num_values, levels, (rest, *encoding), sums)
            }
        }
    }

    fn values(
        &mut self,
        count: u32,
        (mut rep, mut def): (Hybrid, Hybrid),
        (bytes, encoding): (&[u8], Encoding),
        sums: &mut [u64],
    ) -> Result<bool, String> {
        let entries = std::mem::take(&mut self.entries);
        let mut lengths = if self.is_text {
            Lengths::of(bytes, encoding, &entries, count)?
        } else {
            Lengths::None
        };
        for _ in 0..count {
            let is_new = rep.next_value()? == 0;
            let row = match self.at {
                Some(at) => at + u64::from(is_new),
                None => self.first_row,
            };
            self.at = Some(row);
            // The rest of the page belongs to later rows.
            if row >= self.rows.end {
                return Ok(false);
            }
            let bytes = if self.is_text && def.next_value()? == self.def {
                lengths.next_length()?
            } else {
                0
            };
            if row >= self.rows.start
                && let Some(sum) = sums.get_mut((row - self.rows.start) as usize)
            {
                *sum = sum.saturating_add(self.cost.of(0, 1, bytes));
            }
        }
        self.entries = entries;
        Ok(true)
    }
}

fn width(highest: u32) -> u32 {
    u32::BITS - highest.leading_zeros()
}

/// The levels at the start of a version 1 data page, which have a length prefix of four bytes.
fn first_levels<'a>(rest: &mut &'a [u8], highest: u32, encoding: Encoding) -> Result<Hybrid<'a>, String> {
    if highest == 0 {
        return Ok(Hybrid::new(&[], 0)?);
    }
    if encoding != Encoding::RLE {
        return Err(format!("its levels are encoded as {encoding}, which is not supported"));
    }
    let cut = || String::from("a page ends within its levels");
    let (length, behind) = rest.split_at_checked(4).ok_or_else(cut)?;
    let length = u32::from_le_bytes([length[0], length[1], length[2], length[3]]);
    let (levels, behind) = behind.split_at_checked(length as usize).ok_or_else(cut)?;
    *rest = behind;
    Ok(Hybrid::new(levels, width(highest))?)
}
