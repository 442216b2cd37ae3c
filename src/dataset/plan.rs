//! The inputs of a job as they were planned, and its shards: plain data that goes into the ledger.

use serde::{Deserialize, Serialize};

/// How an input's bytes are read; told apart by content, not by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    Parquet,
    Jsonl,
    OpenaiBatch,
}

/// One input object, pinned to what it was when the job was planned.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InputFile {
    /// Full URL (`file:///…`, `s3://…`).
    pub url: String,
    pub format: Format,
    pub size: u64,
    /// ETag where the store has one (the local one is made of inode, size and modification time).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub etag: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    pub rows: u64,
}

/// A shard: a run of consecutive rows over the job's whole input.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shard {
    /// First row, 0-based over the job's whole input.
    pub first_row: u64,
    pub rows: u64,
    pub segments: Vec<Segment>,
}

/// The part of a shard that lies in one input.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Segment {
    /// Index into the job's inputs.
    pub input: u32,
    /// First row, 0-based in that input.
    pub first_row: u64,
    pub rows: u64,
    /// Lines only: the byte range that holds exactly these rows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<(u64, u64)>,
}
