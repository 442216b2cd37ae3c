//! Parquet: checks of the claims in footers and page headers, the memory that rows take once
//! decoded, and reads of row ranges.

pub(crate) mod chunks;
pub(crate) mod cost;
pub mod footer;
pub(crate) mod hybrid;
pub(crate) mod measure;
pub mod pages;
pub mod reader;
pub(crate) mod row_costs;
pub(crate) mod text;
pub mod thrift;
pub mod thrift_check;
