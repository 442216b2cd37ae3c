//! A file that states its columns, in any such format: its row groups for planning, and rows by
//! range.

use std::ops::Range;
use std::sync::Arc;

use arrow::datatypes::SchemaRef;

use super::arrow::reader::{ArrowFile, KeptBlock};
use super::error::DatasetError;
use super::parquet::reader::{ParquetFile, Read, Wanted};
use super::plan::Format;
use super::store::pinned::PinnedFile;

/// An open file.
#[derive(Debug, Clone)]
pub enum TableFile {
    Parquet(Arc<ParquetFile>),
    Arrow(Arc<ArrowFile>),
}

impl TableFile {
    /// Opens a file of `format`; `kept`: the job's last decoded block of Arrow files.
    pub async fn open(pinned: PinnedFile, format: Format, kept: KeptBlock) -> Result<TableFile, DatasetError> {
        Ok(match format {
            Format::Arrow => TableFile::Arrow(Arc::new(ArrowFile::open(pinned, kept).await?)),
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

    /// Its row groups or record batches, in order.
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

    /// Uncompressed bytes of the named columns in a group, as far as known.
    pub fn group_bytes(&self, group: usize, columns: &[String]) -> u64 {
        match self {
            TableFile::Parquet(file) => file.group_bytes(group, columns),
            TableFile::Arrow(file) => file.group_bytes(group, columns),
        }
    }

    /// Reads rows, unless they cost more than `limit` bytes.
    pub async fn read_rows(&self, wanted: Wanted, limit: Option<u64>) -> Result<Read, DatasetError> {
        match self {
            TableFile::Parquet(file) => file.read_rows(wanted, limit).await,
            TableFile::Arrow(file) => file.read_rows(wanted, limit).await,
        }
    }

    /// The cost of each of `rows` in these columns; `shown`: columns that become JSON.
    pub async fn row_costs(
        &self,
        rows: Range<u64>,
        columns: &[String],
        shown: &[String],
    ) -> Result<Vec<u64>, DatasetError> {
        match self {
            TableFile::Parquet(file) => file.row_costs(rows, columns, shown).await,
            TableFile::Arrow(file) => file.row_costs(rows, columns, shown).await,
        }
    }
}
