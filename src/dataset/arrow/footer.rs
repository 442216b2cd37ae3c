//! Decodes an Arrow file's footer and the heads of its blocks, with limits on their claims. A block
//! is a message with its buffers; its head is the message, its body the buffers.
//!
//! Claims are checked before memory is allocated for them: flatbuffer tables with repeated
//! references, byte ranges outside of the file, and the decompressed lengths that buffers claim.
//!
//! See docs/decisions/034-an-arrow-batch-is-measured-first.md.

use std::ops::Range;

use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use arrow::ipc::convert::try_fb_to_schema;
use arrow::ipc::{
    Block, CompressionType, Endianness, Message, MessageHeader, MetadataVersion, RecordBatch, root_as_footer_with_opts,
    root_as_message_with_opts,
};
use bytes::Bytes;
use std::sync::Arc;

use super::flatbuffer::{first_line, verifier_options};
use crate::dataset::error::DatasetError;
use crate::dataset::store::pinned_file::PinnedFile;

/// Magic bytes at both ends of an Arrow file.
pub const MAGIC: &[u8] = b"ARROW1";

/// Maximum size of a footer, in bytes.
const FOOTER_BYTES_MAX: u64 = 64 << 20;

/// Bytes that the first request reads at a file's end; usually they include the footer.
const TAIL_BYTES: u64 = 64 << 10;

/// Minimum size of a block's head, in bytes: a continuation marker and the message's length.
const HEAD_BYTES_MIN: i32 = 8;

/// Maximum total size of a file's block heads, in bytes: decoded heads are held while the file is
/// open.
const HEADS_BYTES_MAX: u64 = 64 << 20;

/// Maximum rows of one file, and of one block.
const ROWS_MAX: u64 = 1 << 32;
const BLOCK_ROWS_MAX: i64 = 1 << 26;

/// Maximum decompressed bytes of one block's columns in use, or of all dictionaries.
pub const BLOCK_BYTES_MAX: u64 = 512 << 20;

/// Bytes after the footer: its length, and the magic bytes.
const TRAILER_BYTES: u64 = 10;

/// Location of a block in the file; the body follows the head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockLocation {
    pub offset: u64,
    pub head_bytes: u64,
    pub body_bytes: u64,
}

impl BlockLocation {
    pub fn head_range(&self) -> Range<u64> {
        self.offset..self.body_start()
    }

    pub fn body_start(&self) -> u64 {
        self.offset + self.head_bytes
    }
}

/// A decoded footer.
#[derive(Debug, Clone)]
pub struct ArrowFooter {
    /// The file's own schema, with dictionary types.
    pub schema: SchemaRef,
    pub batches: Vec<BlockLocation>,
    pub dictionaries: Vec<BlockLocation>,
}

/// The footer's bytes.
pub async fn read_footer(pinned: &PinnedFile) -> Result<Bytes, DatasetError> {
    let size = pinned.size;
    let unreadable = |why: String| DatasetError::unreadable(&pinned.name, why);
    if size < TRAILER_BYTES + 8 {
        return Err(unreadable(format!("it has {size} bytes, too few for an Arrow file")));
    }
    let tail = pinned.bytes(size.saturating_sub(TAIL_BYTES)..size).await?;
    let trailer = &tail[tail.len() - TRAILER_BYTES as usize..];
    if &trailer[4..] != MAGIC {
        let why = "it is truncated, or no Arrow file: it does not end with `ARROW1`";
        return Err(unreadable(why.into()));
    }
    let length = u64::from(u32::from_le_bytes([trailer[0], trailer[1], trailer[2], trailer[3]]));
    if length > (size - TRAILER_BYTES - 8).min(FOOTER_BYTES_MAX) {
        let why = format!("its footer claims {length} bytes, more than the file has or than {FOOTER_BYTES_MAX}");
        return Err(unreadable(why));
    }
    let end = size - TRAILER_BYTES;
    if length + TRAILER_BYTES <= tail.len() as u64 {
        let end = tail.len() - TRAILER_BYTES as usize;
        return Ok(tail.slice(end - length as usize..end));
    }
    pinned.bytes(end - length..end).await
}

/// Pure: decodes the footer's bytes and checks them against a file of `size` bytes.
pub fn decode_footer(bytes: &[u8], size: u64) -> Result<ArrowFooter, String> {
    let footer = root_as_footer_with_opts(&verifier_options(bytes), bytes);
    let footer = footer.map_err(|e| format!("its footer is broken: {}", first_line(e)))?;
    check_version(footer.version())?;
    let schema = footer.schema().ok_or("its footer has no schema")?;
    if schema.endianness() != Endianness::Little {
        return Err("its numbers are big-endian, which is not supported".into());
    }
    let schema = try_fb_to_schema(schema).map_err(|e| format!("its schema cannot be read: {}", first_line(e)))?;
    let end = size.saturating_sub(TRAILER_BYTES + bytes.len() as u64);
    let locations = |blocks: Vec<Block>| {
        blocks
            .iter()
            .map(|block| block_location(block, end))
            .collect::<Result<Vec<_>, String>>()
    };
    let decoded = ArrowFooter {
        schema: Arc::new(schema),
        batches: locations(
            footer
                .recordBatches()
                .map(|b| b.iter().copied().collect())
                .unwrap_or_default(),
        )?,
        dictionaries: locations(
            footer
                .dictionaries()
                .map(|b| b.iter().copied().collect())
                .unwrap_or_default(),
        )?,
    };
    check_head_sizes(decoded.batches.iter().chain(&decoded.dictionaries))?;
    Ok(decoded)
}

/// Checks the total size of the heads, which may exceed that of the file: several blocks may name
/// the same bytes, and each decoded head is held.
fn check_head_sizes<'a>(blocks: impl Iterator<Item = &'a BlockLocation>) -> Result<(), String> {
    let total = blocks.fold(0u64, |sum, block| sum.saturating_add(block.head_bytes));
    if total <= HEADS_BYTES_MAX {
        Ok(())
    } else {
        Err(format!(
            "the heads of its blocks take {total} bytes, more than {HEADS_BYTES_MAX}: write it with larger record batches"
        ))
    }
}

fn check_version(version: MetadataVersion) -> Result<(), String> {
    match version {
        MetadataVersion::V4 | MetadataVersion::V5 => Ok(()),
        other => Err(format!(
            "it has Arrow's metadata of version {other:?}; V4 and V5 are read"
        )),
    }
}

/// The location of a block, which must end before byte `end` of the file.
fn block_location(block: &Block, end: u64) -> Result<BlockLocation, String> {
    let outside = || {
        format!(
            "its footer names a block at byte {} that does not lie in it",
            block.offset()
        )
    };
    let unsigned = |n: i64| u64::try_from(n).map_err(|_| outside());
    if block.metaDataLength() < HEAD_BYTES_MIN {
        return Err(format!("a block's head has {} bytes, too few", block.metaDataLength()));
    }
    let location = BlockLocation {
        offset: unsigned(block.offset())?,
        head_bytes: unsigned(block.metaDataLength().into())?,
        body_bytes: unsigned(block.bodyLength())?,
    };
    let block_end = location
        .offset
        .checked_add(location.head_bytes)
        .and_then(|body_start| body_start.checked_add(location.body_bytes));
    if block_end.is_some_and(|block_end| block_end <= end) {
        Ok(location)
    } else {
        Err(outside())
    }
}

/// The layout of a block, as its head states it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockHead {
    pub rows: u64,
    /// For each root column, the byte ranges of its buffers in the body.
    pub columns: Vec<Vec<Range<u64>>>,
    pub is_compressed: bool,
}

impl BlockHead {
    /// Stored bytes of a column, by its index.
    pub fn stored_bytes(&self, column: usize) -> u64 {
        let buffers = self.columns.get(column).into_iter().flatten();
        buffers.fold(0, |sum, buffer| sum.saturating_add(buffer.end - buffer.start))
    }
}

/// The message in the head of a block.
pub fn message(head: &[u8]) -> Result<Message<'_>, String> {
    let start = if head.starts_with(&[0xff; 4]) { 8 } else { 4 };
    let bytes = head.get(start..).ok_or("a block's head is too short")?;
    let message = root_as_message_with_opts(&verifier_options(bytes), bytes);
    let message = message.map_err(|e| format!("a block's head is broken: {}", first_line(e)))?;
    check_version(message.version())?;
    Ok(message)
}

/// Pure: decodes the head of the record batch at `location`, whose columns are those of `schema`.
pub fn decode_head(head: &[u8], location: &BlockLocation, schema: &Schema) -> Result<BlockHead, String> {
    let message = message(head)?;
    let batch = match message.header_type() {
        MessageHeader::RecordBatch => message.header_as_record_batch(),
        _ => None,
    };
    let batch = batch.ok_or("a block that its footer calls a record batch is none")?;
    decode_batch(&batch, location, schema.fields().iter().map(|field| &**field))
}

/// Pure: decodes the head of a dictionary batch. `value_type` gives a dictionary's value type by
/// its id. Also returns whether the batch is a delta, whose values are appended to the dictionary.
pub fn decode_dictionary_head(
    head: &[u8],
    location: &BlockLocation,
    value_type: impl Fn(i64) -> Option<DataType>,
) -> Result<(BlockHead, bool), String> {
    let message = message(head)?;
    let batch = match message.header_type() {
        MessageHeader::DictionaryBatch => message.header_as_dictionary_batch(),
        _ => None,
    };
    let batch = batch.ok_or("a block that its footer calls a dictionary is none")?;
    let id = batch.id();
    let value_type = value_type(id).ok_or_else(|| format!("no column uses dictionary {id}"))?;
    let values = batch.data().ok_or_else(|| format!("dictionary {id} has no values"))?;
    let field = Field::new("", value_type, true);
    let head = decode_batch(&values, location, std::iter::once(&field))?;
    Ok((head, batch.isDelta()))
}

fn decode_batch<'a>(
    batch: &RecordBatch<'_>,
    location: &BlockLocation,
    fields: impl Iterator<Item = &'a Field>,
) -> Result<BlockHead, String> {
    let rows = batch.length();
    if !(0..=BLOCK_ROWS_MAX).contains(&rows) {
        return Err(format!("a block claims {rows} rows, more than {BLOCK_ROWS_MAX}"));
    }
    if let Some(compression) = batch.compression()
        && !matches!(compression.codec(), CompressionType::LZ4_FRAME | CompressionType::ZSTD)
    {
        return Err(format!(
            "its buffers are compressed with {:?}; LZ4 and ZSTD are read",
            compression.codec()
        ));
    }
    let range = |buffer: &arrow::ipc::Buffer| {
        let start = u64::try_from(buffer.offset()).ok()?;
        let end = start.checked_add(u64::try_from(buffer.length()).ok()?)?;
        (end <= location.body_bytes).then_some(start..end)
    };
    let buffers = batch.buffers().ok_or("a block has no buffers")?;
    let mut buffers = buffers
        .iter()
        .map(|buffer| range(buffer).ok_or("a block names bytes outside of it"));
    let mut nodes = batch.nodes().ok_or("a block has no columns")?.iter();
    let mut variadic_counts = batch
        .variadicBufferCounts()
        .into_iter()
        .flat_map(|counts| counts.iter());
    let mut columns = Vec::new();
    for field in fields {
        let mut column = ColumnShape::default();
        column.add(field.data_type(), &mut variadic_counts)?;
        for _ in 0..column.nodes {
            let node = nodes.next().ok_or("a block has fewer columns than its file")?;
            if node.length() < 0 || node.null_count() < 0 || node.null_count() > node.length() {
                return Err(format!(
                    "a column of a block claims {} values, {} of them null",
                    node.length(),
                    node.null_count()
                ));
            }
        }
        let mut ranges = Vec::new();
        for _ in 0..column.buffers {
            ranges.push(
                buffers
                    .next()
                    .ok_or("a block has fewer buffers than its columns need")??,
            );
        }
        columns.push(ranges);
    }
    Ok(BlockHead {
        rows: rows.unsigned_abs(),
        columns,
        is_compressed: batch.compression().is_some(),
    })
}

/// The number of nodes and buffers that a column has in each block.
#[derive(Debug, Default, PartialEq, Eq)]
struct ColumnShape {
    nodes: usize,
    buffers: usize,
}

impl ColumnShape {
    /// Adds a column of this type. `variadic_counts`: the number of variadic buffers of each view
    /// column, in order.
    fn add(&mut self, data_type: &DataType, variadic_counts: &mut impl Iterator<Item = i64>) -> Result<(), String> {
        self.nodes += 1;
        match data_type {
            DataType::Null => {}
            DataType::Utf8 | DataType::LargeUtf8 | DataType::Binary | DataType::LargeBinary => self.buffers += 3,
            DataType::Utf8View | DataType::BinaryView => {
                let count = variadic_counts
                    .next()
                    .and_then(|n| usize::try_from(n).ok())
                    .filter(|n| *n <= 1 << 20);
                self.buffers += 2 + count.ok_or("a block does not say how many buffers its texts have")?;
            }
            DataType::List(item) | DataType::LargeList(item) | DataType::Map(item, _) => {
                self.buffers += 2;
                self.add(item.data_type(), variadic_counts)?;
            }
            DataType::ListView(item) | DataType::LargeListView(item) => {
                self.buffers += 3;
                self.add(item.data_type(), variadic_counts)?;
            }
            DataType::FixedSizeList(item, _) => {
                self.buffers += 1;
                self.add(item.data_type(), variadic_counts)?;
            }
            DataType::Struct(fields) => {
                self.buffers += 1;
                fields
                    .iter()
                    .try_for_each(|field| self.add(field.data_type(), variadic_counts))?;
            }
            DataType::RunEndEncoded(ends, values) => {
                self.add(ends.data_type(), variadic_counts)?;
                self.add(values.data_type(), variadic_counts)?;
            }
            DataType::Union(..) => return Err("it has a column of a union, which is not supported".into()),
            _ => self.buffers += 2,
        }
        Ok(())
    }
}

/// Decompressed bytes of these columns, as their buffers claim; `body` is the block's body.
pub fn decompressed_bytes(head: &BlockHead, columns: &[usize], body: &[u8]) -> Result<u64, String> {
    let mut sum = 0u64;
    for buffer in columns.iter().filter_map(|column| head.columns.get(*column)).flatten() {
        let stored = buffer.end - buffer.start;
        let bytes = body
            .get(buffer.start as usize..buffer.end as usize)
            .ok_or("a block names bytes outside of it")?;
        let bytes = match (head.is_compressed, bytes.first_chunk::<8>()) {
            (false, _) => stored,
            (true, None) if bytes.is_empty() => 0,
            (true, None) => return Err("a compressed buffer does not say how long it is".into()),
            (true, Some(length)) => match i64::from_le_bytes(*length) {
                -1 => stored,
                length => u64::try_from(length).map_err(|_| format!("a compressed buffer claims {length} bytes"))?,
            },
        };
        sum = sum.saturating_add(bytes);
    }
    Ok(sum)
}

/// The number of the first row of each block, followed by the file's row count.
pub fn first_rows(heads: &[BlockHead]) -> Result<Vec<u64>, String> {
    let mut first_rows = vec![0u64];
    for head in heads {
        let next = first_rows[first_rows.len() - 1].saturating_add(head.rows);
        if next > ROWS_MAX {
            return Err(format!("it claims more than {ROWS_MAX} rows"));
        }
        first_rows.push(next);
    }
    Ok(first_rows)
}

#[cfg(test)]
mod tests {
    use arrow::ipc::{FieldNode, MessageArgs, RecordBatchArgs};
    use flatbuffers::FlatBufferBuilder;

    use super::*;

    #[test]
    fn heads_are_bounded_together() {
        // A single head may have any size that its file has room for.
        assert!(block_location(&Block::new(8, i32::MAX, 0), 1 << 40).is_ok());
        let block = BlockLocation {
            offset: 8,
            head_bytes: 16 << 20,
            body_bytes: 0,
        };
        assert!(check_head_sizes([block; 4].iter()).is_ok());
        assert!(
            check_head_sizes([block; 5].iter())
                .unwrap_err()
                .contains("larger record batches")
        );
    }

    #[test]
    fn a_block_lies_within_its_file() {
        assert!(block_location(&Block::new(8, 16, 100), 124).is_ok());
        for (offset, head, body) in [
            (8, 16, 101),
            (8, 4, 100),
            (8, -16, 100),
            (-8, 16, 100),
            (8, 16, -1),
            (i64::MAX, 16, 100),
        ] {
            assert!(
                block_location(&Block::new(offset, head, body), 124).is_err(),
                "{offset} {head} {body}"
            );
        }
    }

    /// The head of a block of one column without bytes, which claims `rows` rows.
    fn head_claiming(rows: i64) -> Result<BlockHead, String> {
        let mut buffer = FlatBufferBuilder::new();
        let nodes = buffer.create_vector(&[FieldNode::new(rows, rows)]);
        let buffers = buffer.create_vector::<arrow::ipc::Buffer>(&[]);
        let batch = RecordBatchArgs {
            length: rows,
            nodes: Some(nodes),
            buffers: Some(buffers),
            ..RecordBatchArgs::default()
        };
        let batch = RecordBatch::create(&mut buffer, &batch);
        let message = MessageArgs {
            version: MetadataVersion::V5,
            header_type: MessageHeader::RecordBatch,
            header: Some(batch.as_union_value()),
            ..MessageArgs::default()
        };
        let message = Message::create(&mut buffer, &message);
        buffer.finish(message, None);
        let head = [&[0xff; 4], &[0; 4], buffer.finished_data()].concat();
        let location = BlockLocation {
            offset: 8,
            head_bytes: head.len() as u64,
            body_bytes: 0,
        };
        let schema = Schema::new(vec![Field::new("nothing", DataType::Null, true)]);
        decode_head(&head, &location, &schema)
    }

    #[test]
    fn rows_that_a_file_claims_are_bounded() {
        let rows = |rows: i64| head_claiming(rows).map(|head| head.rows);
        assert_eq!(rows(BLOCK_ROWS_MAX), Ok(1 << 26));
        for bad in [BLOCK_ROWS_MAX + 1, i64::MAX, -1, i64::MIN] {
            assert!(rows(bad).unwrap_err().contains("a block claims"), "{bad}");
        }
        let block = head_claiming(BLOCK_ROWS_MAX).unwrap();
        assert_eq!(first_rows(&vec![block.clone(); 64]).map(|all| all.len()), Ok(65));
        assert!(
            first_rows(&vec![block; 65])
                .unwrap_err()
                .contains("more than 4294967296 rows")
        );
    }
}
