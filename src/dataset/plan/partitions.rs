//! Folders named `column=value`, as Hive, Spark and pyarrow write them: partition columns, whose
//! values are in a file's path instead of its contents.
//!
//! Names and values are percent-decoded once; `__HIVE_DEFAULT_PARTITION__` is null. A column is a
//! whole number if its value in every file consists of digits (so `month=01` is 1, as in pyarrow
//! and Spark), and else text. The type is decided over all files that the addresses match, before
//! `input.where`, and recorded in the job's record, so that every worker reads the same type.
//!
//! See docs/decisions/037-folder-columns-are-settled-over-all-files.md.

use std::sync::Arc;

use arrow::array::{ArrayRef, Int32Array, Int64Array, StringArray};
use arrow::datatypes::{DataType, Field};
use percent_encoding::percent_decode_str;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::dataset::error::DatasetError;

/// The folder value that means null.
const NULL_VALUE: &str = "__HIVE_DEFAULT_PARTITION__";

/// Maximum number of partition columns in a path.
pub const COLUMNS_MAX: usize = 64;

/// The partition columns in a file's path: each column's name and text, outermost first.
pub type FolderValues = Vec<(String, Option<String>)>;

/// A file's partition texts, in column order.
pub type PartitionTexts = Vec<Option<String>>;

/// The type of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PartitionType {
    String,
    Int32,
    Int64,
}

/// A column that the folders of all inputs name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PartitionColumn {
    pub name: String,
    #[serde(rename = "type")]
    pub kind: PartitionType,
}

impl PartitionType {
    /// The narrowest type that holds all values; nulls are ignored.
    fn of<'a>(values: impl Iterator<Item = &'a str>) -> PartitionType {
        let (mut kind, mut has_value) = (PartitionType::Int32, false);
        for value in values {
            has_value = true;
            if !is_digits(value) || value.parse::<i64>().is_err() {
                return PartitionType::String;
            }
            if value.parse::<i32>().is_err() {
                kind = PartitionType::Int64;
            }
        }
        if has_value { kind } else { PartitionType::String }
    }

    /// The type's name in messages.
    pub fn as_str(self) -> &'static str {
        match self {
            PartitionType::String => "text",
            PartitionType::Int32 | PartitionType::Int64 => "whole numbers",
        }
    }

    /// Whether `text` can be parsed as this type.
    fn holds(self, text: &str) -> bool {
        match self {
            PartitionType::String => true,
            PartitionType::Int32 => is_digits(text) && text.parse::<i32>().is_ok(),
            PartitionType::Int64 => is_digits(text) && text.parse::<i64>().is_ok(),
        }
    }
}

fn is_digits(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

impl PartitionColumn {
    /// The field of the carried column.
    pub fn field(&self) -> Field {
        let data_type = match self.kind {
            PartitionType::String => DataType::Utf8,
            PartitionType::Int32 => DataType::Int32,
            PartitionType::Int64 => DataType::Int64,
        };
        Field::new(&self.name, data_type, true)
    }

    /// The value for templates if the folder's value is `text`.
    pub fn value(&self, text: Option<&str>) -> Value {
        match (text, self.kind) {
            (None, _) => Value::Null,
            (Some(text), PartitionType::String) => text.into(),
            (Some(text), _) => text.parse::<i64>().map_or(Value::Null, Value::from),
        }
    }

    /// The carried column of `rows` rows with this value.
    pub fn array(&self, text: Option<&str>, rows: usize) -> ArrayRef {
        match self.kind {
            PartitionType::String => Arc::new(StringArray::from(vec![text; rows])),
            PartitionType::Int32 => Arc::new(Int32Array::from(vec![text.and_then(|text| text.parse().ok()); rows])),
            PartitionType::Int64 => Arc::new(Int64Array::from(vec![text.and_then(|text| text.parse().ok()); rows])),
        }
    }
}

/// The partition columns in the folders of `key`. The first `skipped_parts` folders are skipped. An
/// error is one line.
pub fn parse_folders(key: &str, skipped_parts: usize) -> Result<FolderValues, String> {
    let mut found = FolderValues::new();
    let parts: Vec<&str> = key.split('/').collect();
    let folders = parts
        .get(skipped_parts..parts.len().saturating_sub(1))
        .unwrap_or_default();
    for folder in folders {
        let Some((name, value)) = folder.split_once('=').filter(|(name, _)| !name.is_empty()) else {
            continue;
        };
        let decoded = |text: &str| match percent_decode_str(text).decode_utf8() {
            Ok(text) => Ok(text.into_owned()),
            Err(_) => Err(format!("the folder `{folder}` is not UTF-8 once it is decoded")),
        };
        let (name, value) = (decoded(name)?, decoded(value)?);
        if found.iter().any(|(before, _)| *before == name) {
            return Err(format!("two of its folders give column `{name}`"));
        }
        found.push((name, (value != NULL_VALUE).then_some(value)));
    }
    if found.len() > COLUMNS_MAX {
        Err(format!(
            "its folders give {} columns, more than {COLUMNS_MAX}",
            found.len()
        ))
    } else {
        Ok(found)
    }
}

/// The partition columns that all files share, and each file's texts in column order.
///
/// # Errors
/// The folders of two files name different columns.
pub fn partition_columns(
    files: &[(String, FolderValues)],
) -> Result<(Vec<PartitionColumn>, Vec<PartitionTexts>), DatasetError> {
    let Some((first, folders)) = files.first() else {
        return Ok((Vec::new(), Vec::new()));
    };
    let names: Vec<&String> = folders.iter().map(|(name, _)| name).collect();
    let mut rows = Vec::with_capacity(files.len());
    for (file, folders) in files {
        let text = |name: &&String| {
            folders
                .iter()
                .find(|(folder, _)| folder == *name)
                .map(|(_, text)| text.clone())
        };
        let missing = |name: &String, file: &str, other_file: &str| {
            DatasetError::Refused(format!(
                "`{file}` is in no folder `{name}=…`, but `{other_file}` is; move one of them, or set `input.hive: false` to ignore the names of \
                 folders"
            ))
        };
        if let Some((name, _)) = folders.iter().find(|(name, _)| !names.contains(&name)) {
            return Err(missing(name, first, file));
        }
        let row: Vec<Option<Option<String>>> = names.iter().map(text).collect();
        if let Some(index) = row.iter().position(Option::is_none) {
            return Err(missing(names[index], file, first));
        }
        rows.push(row.into_iter().flatten().collect::<Vec<_>>());
    }
    let column = |(index, name): (usize, &&String)| PartitionColumn {
        name: name.to_string(),
        kind: PartitionType::of(rows.iter().filter_map(|row| row[index].as_deref())),
    };
    Ok((names.iter().enumerate().map(column).collect(), rows))
}

/// Checks, for a job's record, that a file's `texts` are values of `columns`.
pub fn check_texts(columns: &[PartitionColumn], texts: &[Option<String>]) -> Result<(), String> {
    if texts.len() != columns.len() {
        return Err(format!(
            "{} values of {} columns in folders",
            texts.len(),
            columns.len()
        ));
    }
    let is_wrong = |(column, text): (&PartitionColumn, &Option<String>)| {
        let wrong = text.as_deref().is_some_and(|text| !column.kind.holds(text));
        wrong.then(|| {
            format!(
                "a value of column `{}` that is none of {}",
                column.name,
                column.kind.as_str()
            )
        })
    };
    columns.iter().zip(texts).find_map(is_wrong).map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(values: &[&str]) -> PartitionType {
        PartitionType::of(values.iter().copied())
    }

    #[test]
    fn columns_of_digits_are_whole_numbers_and_others_text() {
        assert_eq!(kind(&["1", "02", "2147483647"]), PartitionType::Int32);
        assert_eq!(kind(&["1", "2147483648"]), PartitionType::Int64);
        for text in [
            &["1", "x"][..],
            &["-1"],
            &["1.5"],
            &[""],
            &["9223372036854775808"],
            &["+1"],
            &[],
        ] {
            assert_eq!(kind(text), PartitionType::String, "{text:?}");
        }
    }

    #[test]
    fn folders_are_decoded_once_and_may_be_null() {
        let found = parse_folders(
            "in=side/data/a%20b=x%2Fy/c=__HIVE_DEFAULT_PARTITION__/=3/d=/e=f=g/plain/z=1.parquet",
            1,
        );
        let pairs = |pairs: &[(&str, Option<&str>)]| -> FolderValues {
            pairs
                .iter()
                .map(|(name, text)| (name.to_string(), text.map(String::from)))
                .collect()
        };
        let expected = pairs(&[("a b", Some("x/y")), ("c", None), ("d", Some("")), ("e", Some("f=g"))]);
        assert_eq!(found.unwrap(), expected);
        assert!(
            parse_folders("a=1/a=2/f", 0)
                .unwrap_err()
                .contains("two of its folders give column `a`")
        );
        assert!(parse_folders("a=%FF/f", 0).unwrap_err().contains("not UTF-8"));
        assert_eq!(parse_folders("f", 3).unwrap(), FolderValues::new());
    }

    #[test]
    fn all_files_have_the_same_columns() {
        let files = |keys: &[&str]| -> Vec<(String, FolderValues)> {
            keys.iter()
                .map(|key| (key.to_string(), parse_folders(key, 0).unwrap()))
                .collect()
        };
        let (columns, rows) = partition_columns(&files(&["a=1/b=x/f", "b=y/a=02/f"])).unwrap();
        assert_eq!(columns[0].kind, PartitionType::Int32);
        assert_eq!(columns[1].kind, PartitionType::String);
        assert_eq!(rows[1], [Some("02".to_string()), Some("y".to_string())]);
        assert_eq!(columns[0].value(Some("02")), Value::from(2));
        for keys in [["a=1/f", "f"], ["f", "a=1/f"], ["a=1/b=2/f", "a=1/f"]] {
            let error = partition_columns(&files(&keys)).unwrap_err().to_string();
            assert!(error.contains("is in no folder"), "{error}");
        }
        assert!(check_texts(&columns, &rows[1]).is_ok());
        assert!(check_texts(&columns, &rows[1][..1]).is_err());
        assert!(check_texts(&columns, &[Some("x".into()), None]).is_err());
    }
}
