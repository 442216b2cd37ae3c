//! Options of a job's inputs, besides their addresses and format.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::plan::filter;
use super::plan::sample::Sample;

/// Options of a job's inputs. Their names are those of the job file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct InputOptions {
    /// Whether folders named `column=value` are partition columns.
    #[serde(default = "default_true", skip_serializing_if = "is_true")]
    pub hive: bool,
    /// Conditions on the partition columns: see [`super::plan::filter`].
    #[serde(default, rename = "where", skip_serializing_if = "Map::is_empty")]
    pub filter: Map<String, Value>,
    #[serde(default, skip_serializing_if = "MissingColumns::is_error")]
    pub missing_columns: MissingColumns,
    /// Whether unreadable files are skipped.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub skip_unreadable: bool,
    /// Maximum number of rows of the job, from the first row on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
    /// A sample drawn from all rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sample: Option<Sample>,
}

/// What becomes of a column that the job needs and a file lacks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MissingColumns {
    /// The job is refused.
    #[default]
    Error,
    /// It is null in the rows of that file; one that no file has is refused all the same.
    Nulls,
}

impl MissingColumns {
    fn is_error(&self) -> bool {
        *self == MissingColumns::Error
    }
}

impl Default for InputOptions {
    fn default() -> InputOptions {
        InputOptions {
            hive: true,
            filter: Map::new(),
            missing_columns: MissingColumns::Error,
            skip_unreadable: false,
            limit: None,
            sample: None,
        }
    }
}

impl InputOptions {
    /// Checks the options. The error is the name of the invalid field, and the rest of the message,
    /// which follows that name.
    pub fn check(&self) -> Result<(), (String, String)> {
        filter::check(&self.filter)?;
        if !self.hive && !self.filter.is_empty() {
            let why = "asks for columns that folders name, and `input.hive` is false";
            return Err(("input.where".into(), why.into()));
        }
        if let Some(sample) = &self.sample {
            sample.check().map_err(|why| ("input.sample".to_string(), why))?;
            if self.limit.is_some() {
                let why = "draws from all rows, and `input.limit` takes the first; give one of them";
                return Err(("input.sample".into(), why.into()));
            }
        }
        match self.limit {
            Some(0) => Err(("input.limit".into(), "is 0; it must be at least 1".into())),
            _ => Ok(()),
        }
    }
}

fn default_true() -> bool {
    true
}

fn is_true(flag: &bool) -> bool {
    *flag
}
