//! `input` of a job file: the files that hold the rows, and how they are read.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::check::{FieldError, bad, check_length, check_text, checked_text};
use super::one_or_many::OneOrMany;
use crate::dataset::csv::layout::{CsvOptions, CsvType, check_delimiter, check_names};
use crate::dataset::kinds::KEYS_MAX;
use crate::dataset::options::{InputOptions, MissingColumns};
use crate::dataset::plan::Format;
use crate::dataset::plan::sample::Sample;

/// The rows to work on.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct InputFile {
    /// Paths (relative to this file) or URLs, with `*`, `?`, `[…]` and `**`; their rows follow one another in the
    /// order of this list and, within a pattern, of the names.
    pub uri: OneOrMany,
    /// Format of the files. By default it is detected from their content; CSV and text from their names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<Format>,
    /// CSV: the character between cells. A comma, in `.tsv` and `.tab` files a tab.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1))]
    pub delimiter: Option<String>,
    /// CSV without a header: the columns' names in the files' order. The first line is a row then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub columns: Option<Vec<String>>,
    /// CSV: types of columns. Others are numbers where each cell of the column in all files is written just as such a number is
    /// shown, and else text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub types: Option<BTreeMap<String, CsvType>>,
    /// Folders named `column=value` are columns, as Hive, Spark and pyarrow write them. True by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hive: Option<bool>,
    /// Only files in folders of these values: `{month: 11, day: {ge: 3, lt: 9}, city: [Graz, Wien]}`. It asks for columns that folders
    /// name; files that do not fit are never opened.
    #[serde(default, rename = "where", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<BTreeMap<String, Condition>>")]
    pub filter: Option<Map<String, Value>>,
    /// What becomes of a column that the job needs and a file lacks: `error` refuses the job, `nulls` makes it null in that file's rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub missing_columns: Option<MissingColumns>,
    /// Files that cannot be read (truncated Parquet, broken gzip) are left out, counted and named, and rows in damaged parts of tables end
    /// `errored`. By default the job is refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skip_unreadable: Option<bool>,
    /// Only the first so many rows, in the order of the inputs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub limit: Option<i64>,
    /// Only rows that are drawn from all: `{rows: 1000, seed: 7}` or `{fraction: 0.01}`. The same rows for the same inputs and seed; the
    /// output's column `input_row` says which of all they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sample: Option<Sample>,
}

/// For the schema: what a column of folders must be.
#[derive(JsonSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "it has no values, only a schema")]
enum Condition {
    One(FolderValue),
    AnyOf(Vec<FolderValue>),
    Range {
        ge: Option<FolderValue>,
        gt: Option<FolderValue>,
        le: Option<FolderValue>,
        lt: Option<FolderValue>,
    },
}

/// For the schema: a value in a folder's name.
#[derive(JsonSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "it has no values, only a schema")]
enum FolderValue {
    Number(i64),
    Text(String),
    Null(()),
}

/// A job's checked `input` block.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Input {
    /// As in the job file, at least one; an entry may be a glob.
    pub uris: Vec<String>,
    /// `None`: detected by content.
    pub format: Option<Format>,
    #[serde(default, skip_serializing_if = "CsvOptions::is_default")]
    pub csv: CsvOptions,
    #[serde(flatten)]
    pub options: InputOptions,
}

impl Input {
    pub(super) fn check(raw: InputFile) -> Result<Input, FieldError> {
        let uris = raw.uri.into_vec();
        let uris = uris.into_iter().map(|uri| checked_text("input.uri", uri));
        let delimiter = raw.delimiter.map(|text| {
            let mut characters = text.chars();
            match (characters.next(), characters.next()) {
                (Some(one), None) => Ok(one),
                _ => bad("input.delimiter", format!("is {text:?}; it must be one character")),
            }
        });
        let input = Input {
            uris: uris.collect::<Result<_, _>>()?,
            format: raw.format,
            csv: CsvOptions {
                delimiter: delimiter.transpose()?,
                columns: raw.columns,
                types: raw.types.unwrap_or_default(),
            },
            options: InputOptions {
                hive: raw.hive.unwrap_or(true),
                filter: raw.filter.unwrap_or_default(),
                missing_columns: raw.missing_columns.unwrap_or_default(),
                skip_unreadable: raw.skip_unreadable.unwrap_or(false),
                limit: raw.limit.map(|rows| at_least_one("input.limit", rows)).transpose()?,
                sample: raw.sample,
            },
        };
        input.validate()?;
        Ok(input)
    }

    /// Checks the values of an input that comes from a job file or from a record.
    pub(super) fn validate(&self) -> Result<(), FieldError> {
        if self.uris.is_empty() {
            return bad("input.uri", "is an empty list");
        }
        self.uris.iter().try_for_each(|uri| check_text("input.uri", uri))?;
        let CsvOptions {
            delimiter,
            columns,
            types,
        } = &self.csv;
        if let Some(delimiter) = *delimiter {
            check_delimiter(delimiter).or_else(|why| bad("input.delimiter", format!("cannot be taken: {why}")))?;
        }
        if let Some(columns) = columns {
            let checked = check_names(columns.iter().map(String::as_str));
            checked.or_else(|why| bad("input.columns", format!("names {why}")))?;
        }
        if types.len() > KEYS_MAX {
            return bad(
                "input.types",
                format!("has {} entries, more than {KEYS_MAX}", types.len()),
            );
        }
        types.keys().try_for_each(|name| check_length("input.types", name))?;
        self.options.check().map_err(|(field, why)| FieldError { field, why })?;
        match self.format {
            Some(format) if format != Format::Csv && !self.csv.is_default() => bad(
                "input",
                format!(
                    "has settings of CSV (`delimiter`, `columns` or `types`), and `input.format` says {}",
                    format.as_str()
                ),
            ),
            _ => Ok(()),
        }
    }
}

fn at_least_one(field: &str, rows: i64) -> Result<u64, FieldError> {
    match u64::try_from(rows) {
        Ok(rows) if rows > 0 => Ok(rows),
        _ => bad(field, format!("is {rows}; it must be at least 1")),
    }
}
