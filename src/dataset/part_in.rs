//! Reads gristmill's own Parquet: parts and data objects. A writer to an output can place other
//! bytes there, and a record that names them. So the memory cost is bounded before decoding: a page
//! of a hundred bytes can hold a million repetitions of one text.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

use bytes::Bytes;
use parquet::arrow::arrow_reader::{ArrowReaderMetadata, ParquetRecordBatchReaderBuilder};
use parquet::basic::Type;
use parquet::column::reader::ColumnReader;
use parquet::file::metadata::{ColumnChunkMetaData, RowGroupMetaData};
use parquet::file::reader::{FileReader, RowGroupReader, SerializedFileReader};

use super::parquet::footer::{check_chunk, decode_footer};
use super::parquet::pages::{check_pages, parse_header};
use super::widths::check_room;

/// Maximum bytes of the values of one file. Shards are planned with an eighth of it.
const VALUES_BYTES_MAX: u64 = 512 << 20;
/// Maximum rows of one file, which is also the maximum of a shard.
const ROWS_MAX: u64 = 1_000_000;
/// Maximum number of texts in one column: measuring allocates an entry for each.
const TEXTS_MAX: u64 = 8 << 20;
/// Rows whose texts are measured at once.
const MEASURED_ROWS: usize = 1024;
/// Overhead of a text in a column, besides its own bytes.
const TEXT_PLACE_BYTES: u64 = 8;
/// Framing bytes of a file: `PAR1`, and the footer's length with `PAR1`.
const FRAME_BYTES: usize = 12;

/// A reader of `bytes` if their decoded size is within the limits; an error is one line.
pub fn open(bytes: &Bytes) -> Result<ParquetRecordBatchReaderBuilder<Bytes>, String> {
    quietly(|| checked(bytes))
}

/// Runs `read`, which decodes such bytes, and turns a panic into an error: the decoder panics on
/// some broken files. The panic message is not printed.
pub fn quietly<T>(read: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    static HOOKED: Once = Once::new();
    HOOKED.call_once(|| {
        let before = take_hook();
        set_hook(Box::new(move |panic| {
            if !IS_QUIET.get() {
                before(panic);
            }
        }));
    });
    let was = IS_QUIET.replace(true);
    // Unwind safety: partial results are dropped after a panic.
    let result = catch_unwind(AssertUnwindSafe(read));
    IS_QUIET.set(was);
    result.unwrap_or_else(|_| Err("its pages are broken: the decoder gives up on them".into()))
}

thread_local! {
    static IS_QUIET: Cell<bool> = const { Cell::new(false) };
}

fn checked(bytes: &Bytes) -> Result<ParquetRecordBatchReaderBuilder<Bytes>, String> {
    let footer = footer(bytes)?;
    let footer = decode_footer(&footer, bytes.len() as u64)?;
    let rows = footer.metadata().file_metadata().num_rows().unsigned_abs();
    if rows > ROWS_MAX {
        return Err(format!("it claims {rows} rows, more than {ROWS_MAX}"));
    }
    check_room(footer.schema(), rows)?;
    measure(bytes, &footer)?;
    Ok(ParquetRecordBatchReaderBuilder::new_with_metadata(
        bytes.clone(),
        footer,
    ))
}

fn footer(bytes: &Bytes) -> Result<Bytes, String> {
    if bytes.len() < FRAME_BYTES || !bytes.ends_with(b"PAR1") {
        return Err("it does not end with `PAR1`: it is cut off, or no Parquet file".into());
    }
    let end = bytes.len() - 8;
    let length = u32::from_le_bytes([bytes[end], bytes[end + 1], bytes[end + 2], bytes[end + 3]]) as usize;
    match end.checked_sub(length) {
        Some(start) if start >= 4 => Ok(bytes.slice(start..end)),
        _ => Err(format!(
            "its footer claims {length} bytes, the whole file has {}",
            bytes.len()
        )),
    }
}

/// Sums the decoded size of all values: from page headers for fixed-size values, one by one for
/// texts.
fn measure(bytes: &Bytes, footer: &ArrowReaderMetadata) -> Result<(), String> {
    let mut pages = 0u64;
    let mut values = 0u64;
    let mut texts = Vec::new();
    for (group, metadata) in footer.metadata().row_groups().iter().enumerate() {
        for (column, chunk) in metadata.columns().iter().enumerate() {
            let of_chunk = claims(bytes, metadata, chunk)
                .map_err(|why| format!("row group {group}, column `{}` {why}", chunk.column_path().string()))?;
            pages = pages.saturating_add(of_chunk.bytes);
            let width = match chunk.column_type() {
                Type::BYTE_ARRAY => {
                    texts.push((group, column));
                    TEXT_PLACE_BYTES
                }
                Type::FIXED_LEN_BYTE_ARRAY => u64::try_from(chunk.column_descr().type_length()).unwrap_or(0).max(1),
                Type::INT96 => 12,
                _ => 8,
            };
            values = values.saturating_add(of_chunk.values.saturating_mul(width));
        }
    }
    within(pages)?;
    within(values)?;
    let reader = SerializedFileReader::new(bytes.clone()).map_err(|error| error.to_string())?;
    for (group, column) in texts {
        let group = reader.get_row_group(group).map_err(|error| error.to_string())?;
        values = text_bytes(group.as_ref(), column, values)?;
    }
    Ok(())
}

fn within(bytes: u64) -> Result<(), String> {
    match bytes {
        0..=VALUES_BYTES_MAX => Ok(()),
        _ => Err(format!(
            "its values take {bytes} bytes, more than {VALUES_BYTES_MAX}: gristmill did not write it"
        )),
    }
}

/// Sums of the claims of a column chunk's pages.
struct Claims {
    /// Decompressed bytes of all pages.
    bytes: u64,
    values: u64,
}

fn claims(bytes: &Bytes, group: &RowGroupMetaData, chunk: &ColumnChunkMetaData) -> Result<Claims, String> {
    check_chunk(chunk, group.num_rows(), bytes.len() as u64)?;
    let (start, length) = chunk.byte_range();
    let end = start.saturating_add(length);
    let pages = bytes
        .get(start as usize..end as usize)
        .ok_or_else(|| format!("claims bytes {start} to {end}"))?;
    let claimed = chunk.uncompressed_size().unsigned_abs();
    check_pages(pages, claimed, |_| None).map_err(|why| format!("is broken: {why}"))?;
    let mut of_chunk = Claims { bytes: 0, values: 0 };
    let mut at = 0;
    while let Some(rest) = pages.get(at..).filter(|rest| !rest.is_empty()) {
        let (header, length) = parse_header(rest).map_err(|_| "has a broken page header")?;
        let (uncompressed, compressed, values) = header.claims();
        of_chunk.bytes = of_chunk.bytes.saturating_add(uncompressed);
        of_chunk.values = of_chunk.values.saturating_add(values);
        at = at.saturating_add(length).saturating_add(compressed as usize);
    }
    if chunk.column_type() == Type::BYTE_ARRAY && of_chunk.values > TEXTS_MAX {
        Err(format!("claims {} texts, more than {TEXTS_MAX}", of_chunk.values))
    } else {
        Ok(of_chunk)
    }
}

/// `sum` plus the bytes of a column's texts. Texts are not copied: dictionary entries are shared,
/// however often rows refer to them.
fn text_bytes(group: &dyn RowGroupReader, column: usize, mut sum: u64) -> Result<u64, String> {
    let text = |error: parquet::errors::ParquetError| error.to_string();
    let ColumnReader::ByteArrayColumnReader(mut reader) = group.get_column_reader(column).map_err(text)? else {
        return Ok(sum);
    };
    let (mut definitions, mut repetitions, mut values) = (Vec::new(), Vec::new(), Vec::new());
    loop {
        definitions.clear();
        repetitions.clear();
        values.clear();
        let read = reader.read_records(
            MEASURED_ROWS,
            Some(&mut definitions),
            Some(&mut repetitions),
            &mut values,
        );
        let (records, _, levels) = read.map_err(text)?;
        sum = values
            .iter()
            .fold(sum, |sum, value| sum.saturating_add(value.len() as u64));
        within(sum)?;
        if records == 0 && levels == 0 {
            return Ok(sum);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{
        ArrayRef, BooleanArray, FixedSizeBinaryArray, Int32Builder, ListArray, ListBuilder, RecordBatch, StringArray,
    };
    use arrow::buffer::OffsetBuffer;
    use arrow::datatypes::{DataType, Field};
    use parquet::arrow::ArrowWriter;
    use parquet::basic::{Compression, ZstdLevel};
    use parquet::file::properties::WriterProperties;

    use super::*;

    fn written(columns: Vec<(&str, ArrayRef)>, times: usize) -> Bytes {
        let batch = RecordBatch::try_from_iter(columns).unwrap();
        let properties = WriterProperties::builder()
            .set_compression(Compression::ZSTD(ZstdLevel::try_new(1).unwrap()))
            .build();
        let mut writer = ArrowWriter::try_new(Vec::new(), batch.schema(), Some(properties)).unwrap();
        for _ in 0..times {
            writer.write(&batch).unwrap();
        }
        Bytes::from(writer.into_inner().unwrap())
    }

    fn texts(text: &str, rows: usize) -> ArrayRef {
        Arc::new(StringArray::from(vec![text; rows]))
    }

    fn refused(bytes: &Bytes) -> String {
        open(bytes).expect_err("it is refused")
    }

    #[test]
    fn a_dictionary_that_unfolds_is_refused_before_it_does() {
        let half = "x".repeat(1 << 19);
        let bytes = written(vec![("a", texts(&half, 64))], 17);
        assert!(bytes.len() < 64 << 10, "{} bytes", bytes.len());
        let error = refused(&bytes);
        assert!(
            error.contains("its values take 5") && error.contains("more than 536870912"),
            "{error}"
        );
        let fits = written(vec![("a", texts(&half, 64))], 15);
        let batches: Vec<RecordBatch> = open(&fits).unwrap().build().unwrap().collect::<Result<_, _>>().unwrap();
        assert_eq!(batches.iter().map(RecordBatch::num_rows).sum::<usize>(), 64 * 15);
    }

    #[test]
    fn lists_and_fixed_sizes_are_counted() {
        let mut lists = ListBuilder::new(Int32Builder::new());
        for _ in 0..2 {
            lists.values().append_slice(&vec![7; 40 << 20]);
            lists.append(true);
        }
        let bytes = written(vec![("a", Arc::new(lists.finish()) as ArrayRef)], 1);
        assert!(refused(&bytes).contains("more than 536870912"));
        let wide = vec![0u8; 1 << 20];
        let wide = FixedSizeBinaryArray::try_from_iter(std::iter::repeat_n(wide.as_slice(), 64)).unwrap();
        let bytes = written(vec![("a", Arc::new(wide) as ArrayRef)], 17);
        let error = refused(&bytes);
        assert!(
            error.contains("1048576 bytes a row") || error.contains("536870912"),
            "{error}"
        );
    }

    #[test]
    fn rows_and_texts_are_counted_before_they_are_read() {
        let none = |rows: usize| -> ArrayRef { Arc::new(BooleanArray::from(vec![None; rows])) };
        let error = refused(&written(vec![("a", none(ROWS_MAX as usize + 1))], 1));
        assert!(error.contains("claims 1000001 rows, more than 1000000"), "{error}");
        assert!(open(&written(vec![("a", none(ROWS_MAX as usize))], 1)).is_ok());
        let of = |texts: usize| {
            let values = StringArray::from_iter_values(std::iter::repeat_n("", texts));
            let field = Arc::new(Field::new("item", DataType::Utf8, false));
            let list = ListArray::new(field, OffsetBuffer::from_lengths([texts]), Arc::new(values), None);
            written(vec![("a", Arc::new(list) as ArrayRef)], 1)
        };
        let error = refused(&of(TEXTS_MAX as usize + 1));
        assert!(error.contains(" texts, more than 8388608"), "{error}");
        assert!(open(&of(1000)).is_ok());
    }

    #[test]
    fn every_byte_changed_is_read_or_refused() {
        let good = written(vec![("row", texts("1", 3)), ("status", texts("succeeded", 3))], 2);
        assert!(open(&good).is_ok());
        for at in 0..good.len() {
            for new in [0, 0x7f, 0xff, good[at] ^ 1] {
                let mut bytes = good.to_vec();
                bytes[at] = new;
                if let Ok(reader) = open(&bytes.into()) {
                    assert_eq!(reader.metadata().file_metadata().num_rows(), 6);
                    let read = |reader: ParquetRecordBatchReaderBuilder<Bytes>| -> Result<usize, String> {
                        let batches = reader.build().map_err(|error| error.to_string())?;
                        Ok(batches.take_while(Result::is_ok).count())
                    };
                    let _ = quietly(|| read(reader));
                }
            }
            assert!(open(&good.slice(..at)).is_err(), "cut at {at}");
        }
    }
}
