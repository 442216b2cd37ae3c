//! `output.carry`: the input columns that are carried to the output, and their names there.

use std::collections::{BTreeMap, HashSet};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::check::{FieldError, bad, check_length};
use super::spec::{Output, RESULT_COLUMNS};

const FIELD: &str = "output.carry";
/// The text that stands for all columns that are not listed.
pub(super) const ALL_COLUMNS: &str = "*";

/// As a job file has it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    untagged,
    expecting = "expected a list of columns, `\"*\"`, or a mapping of new names to columns"
)]
pub enum CarryFile {
    /// `*`: all columns, but those that have the name of a result column.
    All(String),
    /// Columns, under their own names.
    Named(Vec<String>),
    /// New names to columns; `"*": "*"` stands for all the others.
    Renamed(#[schemars(with = "BTreeMap<String, String>")] Map<String, Value>),
}

/// The checked `output.carry`; the fields are those of [`Output`].
#[derive(Debug, Default, PartialEq)]
pub(super) struct Carry {
    pub columns: Vec<String>,
    pub renamed: BTreeMap<String, String>,
    pub all: bool,
}

impl Carry {
    pub(super) fn check(file: Option<CarryFile>) -> Result<Carry, FieldError> {
        let mut carry = Carry::default();
        match file {
            None => {}
            Some(CarryFile::All(text)) if text == ALL_COLUMNS => carry.all = true,
            Some(CarryFile::All(text)) => {
                return bad(
                    FIELD,
                    format!("is `{text}`; it takes a list of columns, `\"*\"`, or a mapping of new names to columns"),
                );
            }
            Some(CarryFile::Named(columns)) => carry.columns = columns,
            Some(CarryFile::Renamed(names)) => {
                for (new, column) in names {
                    let Value::String(column) = column else {
                        return bad(FIELD, format!("gives the name `{new}` to {column}, which is no column"));
                    };
                    match (new.as_str(), column.as_str()) {
                        (ALL_COLUMNS, ALL_COLUMNS) => carry.all = true,
                        (ALL_COLUMNS, _) | (_, ALL_COLUMNS) => {
                            return bad(
                                FIELD,
                                "takes `*` as it is: `\"*\": \"*\"` stands for all the other columns",
                            );
                        }
                        _ => {
                            carry.columns.push(column.clone());
                            if new != column && carry.renamed.insert(column.clone(), new).is_some() {
                                return bad(FIELD, format!("holds `{column}` twice"));
                            }
                        }
                    }
                }
            }
        }
        check_carry(&carry.columns, &carry.renamed)?;
        Ok(carry)
    }
}

/// Checks that `columns` can be carried together; `renamed` maps columns to their output names.
fn check_carry(columns: &[String], renamed: &BTreeMap<String, String>) -> Result<(), FieldError> {
    let (mut columns_seen, mut names_seen) = (HashSet::new(), HashSet::new());
    for column in columns {
        let name = renamed.get(column).unwrap_or(column);
        for text in [column, name] {
            if text.is_empty() {
                return bad(FIELD, "holds an empty name");
            }
            check_length(FIELD, text)?;
        }
        if RESULT_COLUMNS.contains(&name.as_str()) {
            return bad(
                FIELD,
                format!(
                    "holds `{name}`, which is the name of a result column; a mapping gives another: `carry: {{input_{name}: {column}}}`"
                ),
            );
        }
        if !columns_seen.insert(column) {
            return bad(FIELD, format!("holds `{column}` twice"));
        }
        if !names_seen.insert(name) {
            return bad(FIELD, format!("gives two columns the name `{name}`"));
        }
    }
    match renamed.keys().find(|column| !columns_seen.contains(column)) {
        Some(column) => bad(FIELD, format!("renames `{column}`, which is not carried")),
        None => Ok(()),
    }
}

impl Output {
    /// Checks that a job file can carry these columns.
    pub(super) fn check_carry(&self) -> Result<(), FieldError> {
        check_carry(&self.carry, &self.renamed)
    }

    /// The output's name for an input column.
    pub fn output_name<'a>(&'a self, column: &'a str) -> &'a str {
        self.renamed.get(column).map_or(column, String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check(file: Value) -> Result<Carry, String> {
        let file = serde_json::from_value(file).map_err(|e| e.to_string())?;
        Carry::check(Some(file)).map_err(|e| e.to_string())
    }

    #[test]
    fn columns_are_carried_in_order_under_their_names() {
        let carry = check(json!({"z": "a", "b": "b", "input_status": "status", "*": "*"})).unwrap();
        assert_eq!((carry.columns.join(" "), carry.all), ("a b status".into(), true));
        let renamed: Vec<(&str, &str)> = carry.renamed.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
        assert_eq!(renamed, [("a", "z"), ("status", "input_status")]);
        assert_eq!(check(json!(["a", "*x"])).unwrap().columns, ["a", "*x"]);
        assert_eq!(
            check(json!("*")).unwrap(),
            Carry {
                all: true,
                ..Carry::default()
            }
        );
        // Columns may swap their names.
        assert_eq!(check(json!({"a": "b", "b": "a"})).unwrap().columns, ["b", "a"]);
    }

    #[test]
    fn invalid_carry_values_are_refused() {
        for (file, message) in [
            (json!("id"), "is `id`; it takes a list of columns"),
            (
                json!(["status"]),
                "a mapping gives another: `carry: {input_status: status}`",
            ),
            (json!({"row": "n"}), "holds `row`, which is the name of a result column"),
            (json!({"a": "x", "b": "x"}), "holds `x` twice"),
            (json!({"x": "x", "b": "x"}), "holds `x` twice"),
            (json!({"": "x"}), "holds an empty name"),
            (json!({"a": 1}), "gives the name `a` to 1"),
            (json!({"all": "*"}), "takes `*` as it is"),
            (json!({"*": "a"}), "takes `*` as it is"),
            (json!(7), "expected a list of columns"),
        ] {
            let error = check(file.clone()).unwrap_err();
            assert!(error.contains(message), "{file}: {error}");
        }
        let names = BTreeMap::from([("a".to_string(), "b".to_string())]);
        let two = ["a".to_string(), "b".to_string()];
        assert!(
            check_carry(&two, &names)
                .unwrap_err()
                .why
                .contains("two columns the name `b`")
        );
        assert!(
            check_carry(&two[1..], &names)
                .unwrap_err()
                .why
                .contains("which is not carried")
        );
    }
}
