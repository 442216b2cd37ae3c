//! Reads text files by lines: decompression, lines with their offsets, the memory that a JSON line
//! will take, and rows by byte range.

pub mod compression;
pub mod cutter;
pub(crate) mod json_cost;
pub mod reader;
pub mod text_file;
