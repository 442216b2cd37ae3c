//! Reads a Parquet file's footer, and checks its claims.

use std::sync::Arc;

use bytes::Bytes;
use parquet::arrow::ARROW_SCHEMA_META_KEY;
use parquet::arrow::arrow_reader::{ArrowReaderMetadata, ArrowReaderOptions};
use parquet::file::metadata::{
    ColumnChunkMetaData, ParquetMetaData, ParquetMetaDataOptions, ParquetMetaDataReader, ParquetStatisticsPolicy,
};

use super::thrift::{CompactReader, ThriftError};
use super::thrift_check::check_footer;
use crate::dataset::arrow::schema_text;
use crate::dataset::error::DatasetError;
use crate::dataset::store::pinned_file::PinnedFile;

/// Largest footer, in bytes.
const FOOTER_BYTES_MAX: u64 = 64 << 20;

/// Bytes that the first request reads from the end of a file. Usually they include the footer.
const TAIL_BYTES: u64 = 64 << 10;

/// Maximum rows of one file.
const ROWS_MAX: i64 = 1 << 40;

/// Maximum uncompressed bytes of one column chunk.
const CHUNK_BYTES_MAX: i64 = 8 << 30;

/// Maximum nesting depth of a schema.
const SCHEMA_DEPTH_MAX: usize = 64;

/// Maximum bytes of the paths of all columns together: the decoder keeps each path with the names
/// of all enclosing groups.
const SCHEMA_PATHS_MAX: u64 = 64 << 20;

/// Framing bytes of a file besides its data: `PAR1`, and the footer's length with `PAR1`.
const FRAME_BYTES: u64 = 12;

/// The footer's bytes.
pub async fn read_footer(pinned: &PinnedFile) -> Result<Bytes, DatasetError> {
    let size = pinned.size;
    let unreadable = |why: String| DatasetError::unreadable(&pinned.name, why);
    if size < FRAME_BYTES {
        return Err(unreadable(format!("it has {size} bytes, too few for a Parquet file")));
    }
    let tail = pinned.bytes(size.saturating_sub(TAIL_BYTES)..size).await?;
    let frame = &tail[tail.len() - 8..];
    match &frame[4..] {
        b"PAR1" => {}
        b"PARE" => return Err(unreadable("it is encrypted Parquet, which is not supported".into())),
        _ => {
            return Err(unreadable(
                "it is truncated, or no Parquet file: it does not end with `PAR1`".into(),
            ));
        }
    }
    let length = u64::from(u32::from_le_bytes([frame[0], frame[1], frame[2], frame[3]]));
    if length > size - FRAME_BYTES {
        return Err(unreadable(format!(
            "its footer claims {length} bytes, the whole file has {size}"
        )));
    }
    if length > FOOTER_BYTES_MAX {
        return Err(unreadable(format!(
            "its footer claims {length} bytes, more than {FOOTER_BYTES_MAX}"
        )));
    }
    let from = size - 8 - length;
    if length + 8 <= tail.len() as u64 {
        let start = tail.len() - 8 - length as usize;
        return Ok(tail.slice(start..tail.len() - 8));
    }
    pinned.bytes(from..size - 8).await
}

/// Decodes the footer of a file of `size` bytes, and checks its claims. Reads nothing from the
/// file.
pub fn decode_footer(footer: &[u8], size: u64) -> Result<ArrowReaderMetadata, String> {
    check_footer(footer)?;
    check_schema(footer)?;
    let options = ParquetMetaDataOptions::new()
        .with_encoding_stats_as_mask(true)
        .with_column_stats_policy(ParquetStatisticsPolicy::SkipAll);
    let metadata = ParquetMetaDataReader::decode_metadata_with_options(footer, Some(&options))
        .map_err(|e| format!("its footer is broken: {e}"))?;
    check_rows(&metadata)?;
    let columns = metadata.file_metadata().schema_descr().num_columns();
    if let Some(n) = metadata
        .row_groups()
        .iter()
        .position(|group| group.num_columns() != columns)
    {
        return Err(format!(
            "its row group {n} does not have the {columns} columns of its schema"
        ));
    }
    if size < FRAME_BYTES {
        return Err(format!("it has {size} bytes, too few for a Parquet file"));
    }
    arrow_footer(Arc::new(metadata))
}

/// Checks the schema before the decoder sees it. The decoder recurses into its nesting, allocates
/// by its child counts, and keeps its columns' paths.
///
/// The schema is field 2 of the footer, a list of elements in preorder. In each element, field 4 is
/// the name and field 5 the number of children.
fn check_schema(footer: &[u8]) -> Result<(), String> {
    let (depth, paths) = schema_size(footer).map_err(|e| match e {
        ThriftError::Truncated => "its footer is broken: it ends within its schema".to_string(),
        ThriftError::Invalid(why) => format!("its footer is broken: it has {why}"),
    })?;
    if depth > SCHEMA_DEPTH_MAX {
        return Err(format!(
            "its schema is nested {depth} deep, more than {SCHEMA_DEPTH_MAX}"
        ));
    }
    if paths > SCHEMA_PATHS_MAX {
        return Err(format!(
            "the paths of its columns take {paths} bytes together, more than {SCHEMA_PATHS_MAX}"
        ));
    }
    Ok(())
}

/// The nesting depth of a footer's schema, and the total bytes of its columns' paths. The footer
/// must have passed [`check_footer`]. Counting stops above the depth limit.
fn schema_size(footer: &[u8]) -> Result<(usize, u64), ThriftError> {
    let mut reader = CompactReader::new(footer);
    let (mut id, mut depth_max, mut paths) = (0, 0, 0u64);
    while let Some(kind) = reader.field(&mut id)? {
        if id != 2 {
            reader.skip(kind)?;
            continue;
        }
        let (_, count) = reader.list()?;
        // For each element with remaining children: their number, and the bytes of its path.
        // `announced` counts all elements that are still to come.
        let mut open_elements: Vec<(u64, u64)> = Vec::new();
        let mut announced = 0u64;
        for element in 0..count {
            let (mut inner, mut children) = (0, 0);
            let from = reader.position();
            while let Some(kind) = reader.field(&mut inner)? {
                match inner {
                    5 => children = u64::try_from(reader.int()?).unwrap_or(0),
                    _ => reader.skip(kind)?,
                }
            }
            // The element's encoded size is an upper bound of its name's length.
            let bytes = (reader.position() - from) as u64;
            announced = announced.saturating_sub(1) + children;
            if announced > count - element - 1 {
                return Err(ThriftError::Invalid("a schema that claims more elements than it has"));
            }
            while open_elements
                .last()
                .is_some_and(|(children_left, _)| *children_left == 0)
            {
                open_elements.pop();
            }
            let mut path = bytes;
            if let Some((children_left, parent_path)) = open_elements.last_mut() {
                *children_left -= 1;
                path += *parent_path;
            }
            match children {
                0 => paths += path,
                _ => open_elements.push((children, path)),
            }
            depth_max = depth_max.max(open_elements.len());
            if depth_max > SCHEMA_DEPTH_MAX {
                return Ok((depth_max, paths));
            }
        }
        break;
    }
    Ok((depth_max, paths))
}

/// The footer with its Arrow schema.
pub fn arrow_footer(metadata: Arc<ParquetMetaData>) -> Result<ArrowReaderMetadata, String> {
    // An embedded Arrow schema is ignored if it does not fit the columns, or if it would take far
    // more memory decoded than encoded.
    let pairs = metadata.file_metadata().key_value_metadata();
    let embedded = pairs
        .into_iter()
        .flatten()
        .find(|pair| pair.key == ARROW_SCHEMA_META_KEY);
    let embedded = embedded.and_then(|pair| pair.value.as_deref());
    let is_bomb = embedded.is_some_and(|text| !schema_text::is_bounded(text));
    ArrowReaderMetadata::try_new(
        metadata.clone(),
        ArrowReaderOptions::new().with_skip_arrow_metadata(is_bomb),
    )
    .or_else(|_| ArrowReaderMetadata::try_new(metadata, ArrowReaderOptions::new().with_skip_arrow_metadata(true)))
    .map_err(|e| format!("its schema cannot be read: {e}"))
}

/// The footer with `metadata` in place of its own; the columns must have the same types.
pub fn footer_with_metadata(
    footer: &ArrowReaderMetadata,
    metadata: Arc<ParquetMetaData>,
) -> Result<ArrowReaderMetadata, String> {
    if metadata.file_metadata().key_value_metadata().is_some() {
        return arrow_footer(metadata);
    }
    // Without key-value metadata there is no embedded Arrow schema, so the footer's is reused.
    let options = ArrowReaderOptions::new().with_schema(footer.schema().clone());
    ArrowReaderMetadata::try_new(metadata, options).map_err(|e| format!("its schema cannot be read: {e}"))
}

fn check_rows(metadata: &ParquetMetaData) -> Result<(), String> {
    let mut total = 0i64;
    for (n, group) in metadata.row_groups().iter().enumerate() {
        if !(0..=ROWS_MAX).contains(&group.num_rows()) {
            return Err(format!("its row group {n} claims {} rows", group.num_rows()));
        }
        total = total.saturating_add(group.num_rows());
    }
    let claimed = metadata.file_metadata().num_rows();
    if total > ROWS_MAX || claimed > ROWS_MAX {
        return Err(format!("it claims {} rows, more than {ROWS_MAX}", claimed.max(total)));
    }
    if claimed != total {
        return Err(format!("it claims {claimed} rows, its row groups hold {total}"));
    }
    Ok(())
}

/// Checks the claims of a column chunk in a file of `size` bytes. The error follows the text
/// "column `x`" in the message.
pub fn check_chunk(chunk: &ColumnChunkMetaData, rows: i64, size: u64) -> Result<(), String> {
    let start = chunk
        .dictionary_page_offset()
        .map_or(chunk.data_page_offset(), |d| d.min(chunk.data_page_offset()));
    let length = chunk.compressed_size();
    let end = u64::try_from(start)
        .ok()
        .zip(u64::try_from(length).ok())
        .and_then(|(s, l)| s.checked_add(l));
    match end {
        Some(end) if end <= size => {}
        _ => return Err(format!("claims {length} bytes at {start}, the file has {size}")),
    }
    let uncompressed = chunk.uncompressed_size();
    if !(0..=CHUNK_BYTES_MAX).contains(&uncompressed) {
        return Err(format!(
            "claims {uncompressed} bytes uncompressed, more than {CHUNK_BYTES_MAX}"
        ));
    }
    let values = chunk.num_values();
    let is_flat = chunk.column_descr().max_rep_level() == 0;
    if values < 0 || (is_flat && values != rows) {
        return Err(format!("claims {values} values for {rows} rows"));
    }
    if chunk.file_path().is_some_and(|path| !path.is_empty()) {
        return Err("lies in another file, which is not supported".into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use parquet::file::metadata::FileMetaData;
    use parquet::schema::parser::parse_message_type;
    use parquet::schema::types::SchemaDescriptor;

    #[test]
    fn rows_of_file_and_groups_must_agree() {
        let schema = parse_message_type("message m { required int32 a; }").unwrap();
        let schema = Arc::new(SchemaDescriptor::new(Arc::new(schema)));
        let file =
            |rows| ParquetMetaData::new(FileMetaData::new(1, rows, None, None, schema.clone(), None), Vec::new());
        assert_eq!(check_rows(&file(0)), Ok(()));
        assert_eq!(
            check_rows(&file(7)).unwrap_err(),
            "it claims 7 rows, its row groups hold 0"
        );
        assert_eq!(
            check_rows(&file(-1)).unwrap_err(),
            "it claims -1 rows, its row groups hold 0"
        );
        assert!(
            check_rows(&file(i64::MAX))
                .unwrap_err()
                .contains("it claims 9223372036854775807 rows, more than")
        );
    }
}
