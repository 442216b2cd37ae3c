//! Rows in and rows out: Parquet, JSONL, OpenAI batch lines and plain text.
//!
//! Reading order: [`discover`] (addresses → files), [`planner`] (files → shards), [`shard`] (one shard → rows),
//! [`output`] (results → record batches), [`part`] (record batches → the bytes that are published).
//!
//! Foreign bytes are limited in size, depth and count, and nothing here holds a whole dataset: a row that cannot be
//! read is a row that says so, an input that is not what was planned stops the job.

pub mod aws_profile;
mod carried;
pub mod discover;
pub mod error;
pub mod hosts;
mod hybrid;
mod json_cost;
pub mod kinds;
pub mod lines;
pub mod lines_in;
pub mod location;
pub mod output;
mod parquet_chunks;
mod parquet_cost;
pub mod parquet_footer;
pub mod parquet_in;
mod parquet_measure;
pub mod parquet_pages;
pub mod parquet_shape;
mod parquet_text;
mod parquet_walk;
pub mod part;
pub mod part_in;
mod pieces;
pub mod pinned;
pub mod pins;
pub mod plan;
pub mod planner;
pub mod row;
pub mod row_memory;
pub mod schema_text;
pub mod shard;
pub mod sniff;
pub mod store_error;
pub mod stores;
pub mod thrift;
pub mod value;
pub mod web;
pub mod widths;

pub use error::DatasetError;
pub use output::{OutputColumns, OutputSchema};
pub use pieces::Pieces;
pub use planner::{InputPlan, PlanRequest, plan_inputs};
pub use row::{InputRow, ShardRows};
pub use shard::ShardReader;
