//! Parquet: footers and page headers with limits on their claims, the memory that rows will take once
//! decoded, and rows by range.

pub(crate) mod chunks;
pub(crate) mod cost;
pub mod footer;
pub(crate) mod hybrid;
pub(crate) mod measure;
pub mod pages;
pub mod reader;
pub mod shape;
pub(crate) mod text;
pub mod thrift;
pub(crate) mod walk;
