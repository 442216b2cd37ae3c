//! Reads input rows (Parquet, Arrow files, JSONL, OpenAI batch lines, plain text, CSV) and builds
//! the parts of the output.
//!
//! Reading order: [`plan`] (addresses → files → shards, in `discover`, `inputs` and `planner`),
//! [`shard`] (one shard → rows), [`output`] (results → record batches), [`part`] (record batches →
//! the bytes that are published). Each input format has a folder; `store/` accesses object stores,
//! web servers and local files.
//!
//! Inputs are untrusted, so the size, depth and count of their values are limited. No code here
//! holds a whole dataset. An unreadable row is returned as a row with an error; an input that
//! differs from the plan stops the job.

pub mod answer;
pub mod arrow;
pub mod carried;
mod cells;
pub mod csv;
pub mod error;
pub mod kinds;
pub mod layout;
pub mod lines;
pub mod options;
pub mod output;
pub mod parquet;
pub mod part;
pub mod part_in;
mod pieces;
pub mod plan;
mod read_tasks;
pub mod row;
pub mod row_memory;
pub mod shard;
pub mod sniff;
pub mod store;
pub mod table;
pub mod value;
pub mod widths;
pub mod writing;

pub use crate::dataset::plan::planner::{InputPlan, PlanRequest, plan_inputs};
pub use error::DatasetError;
pub use output::{OutputColumns, OutputSchema};
pub use pieces::ShardPieces;
pub use row::{InputRow, ShardRows};
pub use shard::ShardReader;
