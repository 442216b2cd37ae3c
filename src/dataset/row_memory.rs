//! How much memory rows may take while they are read.
//!
//! Rows are read in pieces: what the next piece takes is known before it is decoded (of Parquet by its pages' headers, or by a walk
//! through their levels and lengths; of lines by their nodes), and a piece is dropped before the next one is read. A row that is more than
//! [`ROW_BYTES_MAX`] alone is not read at all and says so; its neighbours are.

/// Most bytes of one row, as columns and as the JSON that templates see.
pub const ROW_BYTES_MAX: u64 = 160 << 20;

/// Most bytes of the rows that are read at once.
pub const PIECE_BYTES_MAX: u64 = 192 << 20;

/// Most bytes of the carried columns of one shard, which are held until it is published.
pub const CARRY_BYTES_MAX: usize = 256 << 20;

/// Most uncompressed bytes of the pages that are decoded side by side, dictionaries counted twice: as they are, and decoded.
pub const PAGES_BYTES_MAX: u64 = 448 << 20;

/// A value of JSON, with what the allocator adds.
pub const VALUE_BYTES: u64 = 88;

/// An entry of a JSON object, without the bytes of its name.
pub const ENTRY_BYTES: u64 = 224;

/// The line of a row that is not read.
pub fn too_large(bytes: u64) -> String {
    format!("the row takes {bytes} bytes in memory, more than {ROW_BYTES_MAX}")
}

/// The line of a row whose carried columns do not fit beside those of the rows before it.
pub fn carries_too_much(before: usize) -> String {
    format!(
        "its carried columns and those of the rows before it in its shard, which take {before} bytes, take more than {CARRY_BYTES_MAX}; carry \
         fewer columns, or set fewer `shards.rows` in a new job"
    )
}
