//! Memory limits of rows while they are read.
//!
//! Rows are read in pieces. The memory of a piece is bounded before the piece is decoded: for
//! Parquet by page headers or a walk through levels and lengths, for lines by their JSON nodes. A
//! piece is dropped before the next one is read. A row that alone exceeds [`ROW_BYTES_MAX`] is not
//! read and becomes a row with an error; its neighbours are read.
//!
//! See docs/decisions/033-memory-of-rows-is-known-before-decoding.md.

/// Maximum bytes of one row, as columns and as the JSON that templates see.
pub const ROW_BYTES_MAX: u64 = 160 << 20;

/// Maximum bytes of the rows in one piece.
pub const PIECE_BYTES_MAX: u64 = 192 << 20;

/// Maximum bytes of the carried columns of one shard, which are held until it is published.
pub const CARRY_BYTES_MAX: usize = 256 << 20;

/// Maximum uncompressed bytes of the pages that are decoded at the same time. Dictionaries count
/// twice, since they are held encoded and decoded.
pub const PAGES_BYTES_MAX: u64 = 448 << 20;

/// Bytes of a JSON value, including the allocator's overhead.
pub const VALUE_BYTES: u64 = 88;

/// Overhead of an entry of a JSON object, in bytes, without its key and value.
pub const ENTRY_BYTES: u64 = 224;

/// The error of a row that is too large to be read.
pub fn too_large(bytes: u64) -> String {
    format!("the row takes {bytes} bytes in memory, more than {ROW_BYTES_MAX}")
}

/// The error of a row whose carried columns do not fit beside those of the rows before it.
pub fn carries_too_much(before: usize) -> String {
    format!(
        "its carried columns, and those of the rows before it in its shard ({before} bytes), take more than {CARRY_BYTES_MAX} bytes; carry \
         fewer columns, or set fewer `shards.rows` in a new job"
    )
}
