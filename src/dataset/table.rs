//! A file whose format states its columns (Parquet, Arrow): its row groups for planning, and rows
//! by range.

use std::ops::Range;
use std::sync::Arc;

use arrow::datatypes::SchemaRef;

use super::arrow::reader::{ArrowFile, BlockCache};
use super::error::DatasetError;
use super::parquet::reader::{ParquetFile, ReadOutcome, ReadRequest};
use super::plan::Format;
use super::store::pinned_file::PinnedFile;

/// An open file.
#[derive(Debug, Clone)]
pub enum TableFile {
    Parquet(Arc<ParquetFile>),
    Arrow(Arc<ArrowFile>),
}

impl TableFile {
    /// Opens a file of `format`. `block_cache`: the job's last decoded block of Arrow files.
    pub async fn open(pinned: PinnedFile, format: Format, block_cache: BlockCache) -> Result<TableFile, DatasetError> {
        Ok(match format {
            Format::Arrow => TableFile::Arrow(Arc::new(ArrowFile::open(pinned, block_cache).await?)),
            _ => TableFile::Parquet(Arc::new(ParquetFile::open(pinned).await?)),
        })
    }

    /// The columns as they are read, with dictionaries unpacked.
    pub fn schema(&self) -> &SchemaRef {
        match self {
            TableFile::Parquet(file) => file.schema(),
            TableFile::Arrow(file) => file.schema(),
        }
    }

    pub fn name(&self) -> &str {
        match self {
            TableFile::Parquet(file) => file.name(),
            TableFile::Arrow(file) => file.name(),
        }
    }

    /// Memory held while the file is open, in bytes.
    pub fn memory_bytes(&self) -> usize {
        match self {
            TableFile::Parquet(file) => file.memory_bytes(),
            TableFile::Arrow(file) => file.memory_bytes(),
        }
    }

    /// Checks the file's claims about the named columns.
    pub fn check_columns(&self, columns: &[String]) -> Result<(), DatasetError> {
        match self {
            TableFile::Parquet(file) => file.check_columns(columns),
            TableFile::Arrow(file) => file.check_columns(columns),
        }
    }

    /// Number of its row groups or record batches.
    pub fn group_count(&self) -> usize {
        match self {
            TableFile::Parquet(file) => file.group_count(),
            TableFile::Arrow(file) => file.group_count(),
        }
    }

    pub fn group_rows(&self, group: usize) -> u64 {
        match self {
            TableFile::Parquet(file) => file.group_rows(group),
            TableFile::Arrow(file) => file.group_rows(group),
        }
    }

    /// Uncompressed bytes of the named columns in a group: an estimate for compressed Arrow files.
    pub fn group_bytes(&self, group: usize, columns: &[String]) -> u64 {
        match self {
            TableFile::Parquet(file) => file.group_bytes(group, columns),
            TableFile::Arrow(file) => file.group_bytes(group, columns),
        }
    }

    /// Reads rows, unless they take more than `limit` bytes of memory.
    pub async fn read_rows(&self, request: ReadRequest, limit: Option<u64>) -> Result<ReadOutcome, DatasetError> {
        match self {
            TableFile::Parquet(file) => file.read_rows(request, limit).await,
            TableFile::Arrow(file) => file.read_rows(request, limit).await,
        }
    }

    /// The memory in bytes that each of `rows` takes in these columns; `json_columns`: columns that
    /// become JSON.
    pub async fn row_costs(
        &self,
        rows: Range<u64>,
        columns: &[String],
        json_columns: &[String],
    ) -> Result<Vec<u64>, DatasetError> {
        match self {
            TableFile::Parquet(file) => file.row_costs(rows, columns, json_columns).await,
            TableFile::Arrow(file) => file.row_costs(rows, columns, json_columns).await,
        }
    }
}
