//! The layout of a job's inputs, in the job's record: how every reader must read them.

use std::path::Path as FsPath;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::csv::layout::CsvTable;
use super::plan::InputFile;
use super::plan::partitions;
use super::plan::partitions::PartitionColumn;
use super::plan::sample::{INPUT_ROW, Sample};
use super::store::location::{Location, LocationError};
use super::store::pinned_file::{PinnedFile, display_name};

/// Maximum number of skipped files that a message names.
const NAMED_FILES_MAX: usize = 3;

/// Maximum length of a URL, a reason or a column name in a record, in bytes.
const TEXT_BYTES_MAX: usize = 16 << 10;

/// Maximum length of the reason why a file was skipped, in characters; a longer one is cut.
const WHY_CHARS_MAX: usize = 500;

/// How the inputs of a job are read.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Layout {
    /// Of CSV that is not empty: the table that all inputs are parts of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub csv: Option<CsvTable>,
    /// Columns that the inputs' folders name; each input has its values.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub partitions: Vec<PartitionColumn>,
    /// Columns that some of the inputs lack, and that are null there.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub absent: Vec<String>,
    /// Files that could not be read when the job was planned, and are no inputs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub skipped: Vec<SkippedFile>,
    /// Rows of tables that lie where a file cannot be decoded say so; without it, such a file stops the job.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub skip_unreadable: bool,
    /// Of a job that takes only the first so many rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
    /// Of a job that takes a sample of the rows: how they were drawn. Which ones they are, its shards say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sample: Option<Sample>,
}

/// A file that could not be read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SkippedFile {
    /// Full URL.
    pub url: String,
    pub size: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etag: Option<String>,
    pub why: String,
}

impl SkippedFile {
    pub(super) fn new(file: &PinnedFile, why: &str) -> SkippedFile {
        SkippedFile {
            url: file.location.url.to_string(),
            size: file.size,
            etag: file.etag.clone(),
            why: why.chars().take(WHY_CHARS_MAX).collect(),
        }
    }

    /// The file in the state in which it was skipped.
    pub fn pinned_file(&self) -> Result<PinnedFile, LocationError> {
        Ok(PinnedFile {
            location: Location::parse(&self.url, FsPath::new("/"))?,
            size: self.size,
            etag: self.etag.clone(),
            version: None,
            name: display_name(&self.url),
        })
    }

    pub fn name_and_reason(&self) -> String {
        format!("`{}`: {}", display_name(&self.url), self.why)
    }

    /// One line with the number of skipped files and the first few of them; `None` if `files` is
    /// empty.
    pub fn summary(files: &[SkippedFile]) -> Option<String> {
        let first: Vec<String> = files
            .iter()
            .take(NAMED_FILES_MAX)
            .map(SkippedFile::name_and_reason)
            .collect();
        let more = match files.len() - first.len() {
            0 => String::new(),
            more => format!("; and {more} more"),
        };
        let (noun, are) = if files.len() == 1 {
            ("input", "is")
        } else {
            ("inputs", "are")
        };
        (!first.is_empty()).then(|| {
            format!(
                "{} {noun} cannot be read and {are} left out: {}{more}",
                files.len(),
                first.join("; ")
            )
        })
    }
}

impl Layout {
    /// Whether a job with this layout must not be read by versions that know no layout except CSV
    /// tables.
    pub fn needs_newest_version(&self) -> bool {
        let Layout {
            csv: _,
            partitions,
            absent,
            skipped,
            skip_unreadable,
            limit,
            sample,
        } = self;
        let reads_all_rows = !skip_unreadable && limit.is_none() && sample.is_none();
        !(partitions.is_empty() && absent.is_empty() && skipped.is_empty() && reads_all_rows)
    }

    /// Whether `name` is a column that no file has: a partition column, or the row number of a
    /// sampled row.
    pub fn is_added_column(&self, name: &str) -> bool {
        let is_input_row = self.sample.is_some() && name == INPUT_ROW;
        is_input_row || self.partitions.iter().any(|column| column.name == name)
    }

    /// Checks the constraints that the types do not express, for a layout in a record with these
    /// inputs. The error is one line.
    pub fn check(&self, inputs: &[InputFile]) -> Result<(), String> {
        if let Some(table) = &self.csv {
            table.check().map_err(|why| format!("its CSV table has {why}"))?;
        }
        if self.partitions.len() > partitions::COLUMNS_MAX {
            return Err(format!("it has {} columns in folders", self.partitions.len()));
        }
        let is_long = |file: &SkippedFile| file.url.len() > TEXT_BYTES_MAX || file.why.len() > TEXT_BYTES_MAX;
        if self.skipped.iter().any(is_long) || self.absent.iter().any(|name| name.len() > TEXT_BYTES_MAX) {
            return Err(format!(
                "it names a file or a column by more than {TEXT_BYTES_MAX} bytes"
            ));
        }
        let checked = inputs
            .iter()
            .map(|input| partitions::check_texts(&self.partitions, &input.partition));
        checked
            .zip(0..)
            .try_for_each(|(checked, number)| checked.map_err(|why: String| format!("input {number} has {why}")))
    }
}
