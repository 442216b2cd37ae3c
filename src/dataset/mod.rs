//! Rows in and rows out: Parquet, JSONL, OpenAI batch lines and plain text.
//!
//! Reading order: [`discover`] (addresses → files), [`planner`] (files → shards), [`shard`] (one shard → rows),
//! [`output`] (results → record batches), [`part`] (record batches → the bytes that are published).
//!
//! Foreign bytes are limited in size, depth and count, and nothing here holds a whole dataset: a row that cannot be
//! read is a row that says so, an input that is not what was planned stops the job.

pub mod aws_profile;
pub mod discover;
pub mod error;
pub mod hosts;
pub mod kinds;
pub mod lines;
pub mod lines_in;
pub mod location;
pub mod output;
pub mod parquet_footer;
pub mod parquet_in;
pub mod parquet_pages;
pub mod parquet_shape;
pub mod part;
pub mod pinned;
pub mod pins;
pub mod plan;
pub mod planner;
pub mod row;
pub mod schema_text;
pub mod shard;
pub mod sniff;
pub mod store_error;
pub mod stores;
pub mod thrift;
pub mod value;
pub mod web;

pub use error::DatasetError;
pub use output::{OutputColumns, OutputSchema};
pub use planner::{InputPlan, PlanRequest, plan_inputs};
pub use row::{InputRow, ShardRows};
pub use shard::ShardReader;
