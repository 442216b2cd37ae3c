//! Rows in and rows out: Parquet, Arrow files, JSONL, OpenAI batch lines, plain text and CSV.
//!
//! Reading order: [`discover`] (addresses → files), [`inputs`] (the files that are read),
//! [`planner`] (files → shards), [`shard`] (one shard → rows), [`output`] (results → record
//! batches), [`part`] (record batches → the bytes that are published).
//!
//! Foreign bytes are limited in size, depth and count, and nothing here holds a whole dataset. An
//! unreadable row is returned as a row with an error; an input that differs from the plan stops the
//! job.

pub mod answer;
mod answer_column;
pub mod answer_type;
mod arrow_cost;
pub mod arrow_footer;
pub mod arrow_in;
pub mod aws_profile;
pub mod carried;
mod cells;
pub mod compression;
pub mod credentials;
pub mod csv;
pub mod csv_in;
pub mod csv_records;
pub mod discover;
pub mod error;
pub mod filter;
mod flatbuffer;
pub mod folders;
pub mod hosts;
mod hybrid;
pub mod inputs;
mod json_cost;
pub mod kinds;
pub mod layout;
pub mod lines;
pub mod lines_in;
pub mod location;
pub mod options;
pub mod output;
pub mod outputs;
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
pub mod partitions;
mod pieces;
pub mod pinned;
pub mod pins;
pub mod plan;
mod plan_lines;
mod plan_tables;
pub mod planner;
pub mod row;
pub mod row_memory;
pub mod sample;
pub mod schema_text;
pub mod shard;
pub mod sniff;
pub mod store_error;
pub mod stores;
pub mod table;
pub mod text_file;
pub mod thrift;
pub mod value;
pub mod web;
pub mod widths;
pub mod writing;

pub use error::DatasetError;
pub use output::{OutputColumns, OutputSchema};
pub use pieces::Pieces;
pub use planner::{InputPlan, PlanRequest, plan_inputs};
pub use row::{InputRow, ShardRows};
pub use shard::ShardReader;
