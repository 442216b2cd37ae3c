//! Reads gristmill's own Parquet: parts and data objects. Anybody who may write to an output can
//! replace their bytes, and the record that names them. So the decoded size is checked before
//! decoding: a page of a hundred bytes can hold a million repetitions of one text.

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
use super::widths::check_fixed_memory;

/// Maximum decoded bytes of one file. Shards are planned with an eighth of this limit.
const DECODED_BYTES_MAX: u64 = 512 << 20;
/// Maximum rows of one file, which is also the maximum of a shard.
const ROWS_MAX: u64 = 1_000_000;
/// Maximum number of texts in one column: measuring allocates an entry for each.
const TEXTS_MAX: u64 = 8 << 20;
/// Rows per batch when texts are measured.
const MEASURE_BATCH_ROWS: usize = 1024;
/// Overhead of a text in a column, besides its own bytes.
const TEXT_OVERHEAD_BYTES: u64 = 8;
/// Framing bytes of a file: `PAR1`, and the footer's length with `PAR1`.
const FRAME_BYTES: usize = 12;

/// A reader of `bytes`, after a check of their decoded size; an error is one line.
pub fn open(bytes: &Bytes) -> Result<ParquetRecordBatchReaderBuilder<Bytes>, String> {
    catch_panics(|| check_and_open(bytes))
}

/// Runs `decode` and turns a panic into an error: the Parquet decoder panics on some broken files.
/// The panic message is not printed.
pub fn catch_panics<T>(decode: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    static HOOK_IS_SET: Once = Once::new();
    HOOK_IS_SET.call_once(|| {
        let previous_hook = take_hook();
        set_hook(Box::new(move |panic| {
            if !IS_QUIET.get() {
                previous_hook(panic);
            }
        }));
    });
    let was_quiet = IS_QUIET.replace(true);
    // Unwind safety: partial results are dropped after a panic.
    let result = catch_unwind(AssertUnwindSafe(decode));
    IS_QUIET.set(was_quiet);
    result.unwrap_or_else(|_| Err("its pages are broken: the decoder gives up on them".into()))
}

thread_local! {
    /// Whether the panic hook prints nothing on this thread.
    static IS_QUIET: Cell<bool> = const { Cell::new(false) };
}

fn check_and_open(bytes: &Bytes) -> Result<ParquetRecordBatchReaderBuilder<Bytes>, String> {
    let footer = decode_footer(&footer_bytes(bytes)?, bytes.len() as u64)?;
    let rows = footer.metadata().file_metadata().num_rows().unsigned_abs();
    if rows > ROWS_MAX {
        return Err(format!("it claims {rows} rows, more than {ROWS_MAX}"));
    }
    check_fixed_memory(footer.schema(), rows)?;
    check_decoded_size(bytes, &footer)?;
    Ok(ParquetRecordBatchReaderBuilder::new_with_metadata(
        bytes.clone(),
        footer,
    ))
}

fn footer_bytes(bytes: &Bytes) -> Result<Bytes, String> {
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

/// Checks the decoded size of all values. For fixed-size values, it is counted from page headers;
/// the bytes of texts are counted text by text.
fn check_decoded_size(bytes: &Bytes, footer: &ArrowReaderMetadata) -> Result<(), String> {
    let mut page_bytes = 0u64;
    let mut value_bytes = 0u64;
    let mut text_chunks = Vec::new();
    for (group, metadata) in footer.metadata().row_groups().iter().enumerate() {
        for (column, chunk) in metadata.columns().iter().enumerate() {
            let claims = chunk_claims(bytes, metadata, chunk)
                .map_err(|why| format!("row group {group}, column `{}` {why}", chunk.column_path().string()))?;
            page_bytes = page_bytes.saturating_add(claims.bytes);
            let width = match chunk.column_type() {
                Type::BYTE_ARRAY => {
                    text_chunks.push((group, column));
                    TEXT_OVERHEAD_BYTES
                }
                Type::FIXED_LEN_BYTE_ARRAY => u64::try_from(chunk.column_descr().type_length()).unwrap_or(0).max(1),
                Type::INT96 => 12,
                _ => 8,
            };
            value_bytes = value_bytes.saturating_add(claims.values.saturating_mul(width));
        }
    }
    check_limit(page_bytes)?;
    check_limit(value_bytes)?;
    let reader = SerializedFileReader::new(bytes.clone()).map_err(|error| error.to_string())?;
    for (group, column) in text_chunks {
        let group = reader.get_row_group(group).map_err(|error| error.to_string())?;
        value_bytes = add_text_bytes(group.as_ref(), column, value_bytes)?;
    }
    Ok(())
}

fn check_limit(bytes: u64) -> Result<(), String> {
    match bytes {
        0..=DECODED_BYTES_MAX => Ok(()),
        _ => Err(format!(
            "its values take {bytes} bytes, more than {DECODED_BYTES_MAX}: gristmill did not write it"
        )),
    }
}

/// Totals over the page headers of a column chunk.
struct ChunkClaims {
    /// Decompressed bytes of all pages.
    bytes: u64,
    /// Number of values in all pages.
    values: u64,
}

fn chunk_claims(bytes: &Bytes, group: &RowGroupMetaData, chunk: &ColumnChunkMetaData) -> Result<ChunkClaims, String> {
    check_chunk(chunk, group.num_rows(), bytes.len() as u64)?;
    let (start, length) = chunk.byte_range();
    let end = start.saturating_add(length);
    let pages = bytes
        .get(start as usize..end as usize)
        .ok_or_else(|| format!("claims bytes {start} to {end}"))?;
    let claimed = chunk.uncompressed_size().unsigned_abs();
    check_pages(pages, claimed, |_| None).map_err(|why| format!("is broken: {why}"))?;
    let mut claims = ChunkClaims { bytes: 0, values: 0 };
    let mut offset = 0;
    while let Some(rest) = pages.get(offset..).filter(|rest| !rest.is_empty()) {
        let (header, length) = parse_header(rest).map_err(|_| "has a broken page header")?;
        let (uncompressed, compressed, values) = header.claims();
        claims.bytes = claims.bytes.saturating_add(uncompressed);
        claims.values = claims.values.saturating_add(values);
        offset = offset.saturating_add(length).saturating_add(compressed as usize);
    }
    if chunk.column_type() == Type::BYTE_ARRAY && claims.values > TEXTS_MAX {
        Err(format!("claims {} texts, more than {TEXTS_MAX}", claims.values))
    } else {
        Ok(claims)
    }
}

/// Adds the bytes of a column's texts to `sum`, and checks the limit after each batch. The reader
/// does not copy texts: rows share a dictionary entry, however often they refer to it.
fn add_text_bytes(group: &dyn RowGroupReader, column: usize, mut sum: u64) -> Result<u64, String> {
    let to_text = |error: parquet::errors::ParquetError| error.to_string();
    let ColumnReader::ByteArrayColumnReader(mut reader) = group.get_column_reader(column).map_err(to_text)? else {
        return Ok(sum);
    };
    let (mut definitions, mut repetitions, mut values) = (Vec::new(), Vec::new(), Vec::new());
    loop {
        definitions.clear();
        repetitions.clear();
        values.clear();
        let read = reader.read_records(
            MEASURE_BATCH_ROWS,
            Some(&mut definitions),
            Some(&mut repetitions),
            &mut values,
        );
        let (records, _, levels) = read.map_err(to_text)?;
        sum = values
            .iter()
            .fold(sum, |sum, value| sum.saturating_add(value.len() as u64));
        check_limit(sum)?;
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

    /// A Parquet file with `times` copies of a batch.
    fn parquet_of(columns: Vec<(&str, ArrayRef)>, times: usize) -> Bytes {
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
    fn a_dictionary_of_long_texts_is_refused_before_it_is_decoded() {
        let half = "x".repeat(1 << 19);
        let bytes = parquet_of(vec![("a", texts(&half, 64))], 17);
        assert!(bytes.len() < 64 << 10, "{} bytes", bytes.len());
        let error = refused(&bytes);
        assert!(
            error.contains("its values take 5") && error.contains("more than 536870912"),
            "{error}"
        );
        let fits = parquet_of(vec![("a", texts(&half, 64))], 15);
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
        let bytes = parquet_of(vec![("a", Arc::new(lists.finish()) as ArrayRef)], 1);
        assert!(refused(&bytes).contains("more than 536870912"));
        let wide = vec![0u8; 1 << 20];
        let wide = FixedSizeBinaryArray::try_from_iter(std::iter::repeat_n(wide.as_slice(), 64)).unwrap();
        let bytes = parquet_of(vec![("a", Arc::new(wide) as ArrayRef)], 17);
        let error = refused(&bytes);
        assert!(
            error.contains("1048576 bytes a row") || error.contains("536870912"),
            "{error}"
        );
    }

    #[test]
    fn rows_and_texts_are_counted_before_they_are_read() {
        let none = |rows: usize| -> ArrayRef { Arc::new(BooleanArray::from(vec![None; rows])) };
        let error = refused(&parquet_of(vec![("a", none(ROWS_MAX as usize + 1))], 1));
        assert!(error.contains("claims 1000001 rows, more than 1000000"), "{error}");
        assert!(open(&parquet_of(vec![("a", none(ROWS_MAX as usize))], 1)).is_ok());
        let file_with = |texts: usize| {
            let values = StringArray::from_iter_values(std::iter::repeat_n("", texts));
            let field = Arc::new(Field::new("item", DataType::Utf8, false));
            let list = ListArray::new(field, OffsetBuffer::from_lengths([texts]), Arc::new(values), None);
            parquet_of(vec![("a", Arc::new(list) as ArrayRef)], 1)
        };
        let error = refused(&file_with(TEXTS_MAX as usize + 1));
        assert!(error.contains(" texts, more than 8388608"), "{error}");
        assert!(open(&file_with(1000)).is_ok());
    }

    #[test]
    fn changed_bytes_are_read_or_refused_without_a_panic() {
        let good = parquet_of(vec![("row", texts("1", 3)), ("status", texts("succeeded", 3))], 2);
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
                    let _ = catch_panics(|| read(reader));
                }
            }
            assert!(open(&good.slice(..at)).is_err(), "cut at {at}");
        }
    }
}
