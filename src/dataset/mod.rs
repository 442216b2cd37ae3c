//! Rows in and rows out: Parquet, JSONL and OpenAI batch lines.

pub mod location;
pub mod plan;
pub mod row;
