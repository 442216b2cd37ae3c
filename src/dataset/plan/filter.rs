//! `input.where`: selects input files by the partition columns that their folders name.
//!
//! A condition is a value (`month: 11`), a list of values (`month: [10, 11]`) or a range
//! (`day: {ge: 3, lt: 9}`; also `gt` and `le`). All conditions must hold. Whole numbers are
//! compared as numbers, texts by their bytes. Null equals only null, and is in no range.

use std::cmp::Ordering;

use serde_json::{Map, Value};

use super::partitions::{PartitionColumn, PartitionType};
use crate::dataset::error::DatasetError;

/// Maximum number of values in a condition.
const VALUES_MAX: usize = 10_000;

/// The comparison operators of a range.
const COMPARISONS: [&str; 4] = ["ge", "gt", "le", "lt"];

/// Checks the conditions. The error is the invalid field's name, and the rest of the message, which
/// follows that name.
pub fn check(conditions: &Map<String, Value>) -> Result<(), (String, String)> {
    for (column, condition) in conditions {
        let bad = |why: String| Err((format!("input.where.{column}"), why));
        match condition {
            Value::Array(values) if values.is_empty() => return bad("is an empty list, which no file fits".into()),
            Value::Array(values) if values.len() > VALUES_MAX => {
                return bad(format!("has {} values, more than {VALUES_MAX}", values.len()));
            }
            Value::Array(values) => {
                if let Some(invalid) = values.iter().find(|value| !is_value(value)) {
                    return bad(not_a_value(invalid));
                }
            }
            Value::Object(range) if range.is_empty() => {
                return bad("is an empty range; give `ge`, `gt`, `le` or `lt`".into());
            }
            Value::Object(range) => {
                for (name, bound) in range {
                    if !COMPARISONS.contains(&name.as_str()) {
                        return bad(format!("has `{name}`; a range has `ge`, `gt`, `le` and `lt`"));
                    }
                    if bound.is_null() || !is_value(bound) {
                        return bad(format!("has `{name}: {bound}`; a bound is a whole number or a text"));
                    }
                }
            }
            value if is_value(value) => {}
            invalid => return bad(not_a_value(invalid)),
        }
    }
    Ok(())
}

fn is_value(value: &Value) -> bool {
    value.is_null() || value.is_string() || value.is_i64()
}

fn not_a_value(invalid: &Value) -> String {
    format!("is {invalid}; a folder's value is a whole number, a text (in quotes) or null")
}

/// Conditions on existing partition columns.
#[derive(Debug)]
pub struct Filter {
    conditions: Vec<Condition>,
}

#[derive(Debug)]
struct Condition {
    /// Index of `column` in the partition columns.
    column_index: usize,
    column: PartitionColumn,
    predicate: Predicate,
}

#[derive(Debug)]
enum Predicate {
    AnyOf(Vec<Value>),
    Range(Vec<(String, Value)>),
}

impl Filter {
    /// The filter with `conditions`, whose values must fit the types of `columns`.
    ///
    /// # Errors
    /// A column does not exist, or a value is of another type than its column.
    pub fn new(conditions: &Map<String, Value>, columns: &[PartitionColumn]) -> Result<Filter, DatasetError> {
        let condition = |(name, condition): (&String, &Value)| {
            let column_index = columns.iter().position(|column| column.name == *name);
            let column_index = column_index.ok_or_else(|| DatasetError::Refused(unknown_column(name, columns)))?;
            let column = &columns[column_index];
            let in_column_type = |value: &Value| in_column_type(value, column);
            let predicate = match condition {
                Value::Array(values) => Predicate::AnyOf(values.iter().map(in_column_type).collect::<Result<_, _>>()?),
                Value::Object(range) => {
                    let bounds = range
                        .iter()
                        .map(|(name, bound)| Ok((name.clone(), in_column_type(bound)?)));
                    Predicate::Range(bounds.collect::<Result<_, DatasetError>>()?)
                }
                value => Predicate::AnyOf(vec![in_column_type(value)?]),
            };
            Ok(Condition {
                column_index,
                column: column.clone(),
                predicate,
            })
        };
        let conditions = conditions.iter().map(condition).collect::<Result<_, DatasetError>>()?;
        Ok(Filter { conditions })
    }

    /// Whether a file with these partition texts is an input.
    pub fn accepts(&self, texts: &[Option<String>]) -> bool {
        self.conditions.iter().all(|condition| {
            let value = condition.column.value(texts[condition.column_index].as_deref());
            match &condition.predicate {
                Predicate::AnyOf(values) => values.contains(&value),
                Predicate::Range(bounds) => bounds.iter().all(|(name, bound)| satisfies(&value, name, bound)),
            }
        })
    }
}

fn unknown_column(name: &str, columns: &[PartitionColumn]) -> String {
    let known: Vec<String> = columns.iter().map(|column| format!("`{}`", column.name)).collect();
    let which = if known.is_empty() {
        "the inputs lie in no folders `column=value`".to_string()
    } else {
        format!("the folders of the inputs give {}", known.join(", "))
    };
    format!("`input.where` asks for column `{name}`, and {which}; rows cannot be chosen by columns in the files")
}

/// Converts `value` to the type of its column.
fn in_column_type(value: &Value, column: &PartitionColumn) -> Result<Value, DatasetError> {
    let refused = |what: &str| {
        let why = format!(
            "`input.where.{}` asks for {value}, and the column is {}{what}",
            column.name,
            column.kind.as_str()
        );
        Err(DatasetError::Refused(why))
    };
    match (column.kind, value) {
        (_, Value::Null) | (PartitionType::String, Value::String(_)) => Ok(value.clone()),
        (PartitionType::String, _) => {
            refused(" (some folder's value is more than digits); put it in quotes, as it stands in the folder's name")
        }
        (_, Value::Number(_)) => Ok(value.clone()),
        // Values from parameters are texts.
        (_, Value::String(text)) => match text.parse::<i64>() {
            Ok(number) => Ok(number.into()),
            Err(_) => refused(""),
        },
        _ => refused(""),
    }
}

/// Whether `value` is within `bound`; `name` is one of [`COMPARISONS`].
fn satisfies(value: &Value, name: &str, bound: &Value) -> bool {
    let order = match (value, bound) {
        (Value::Number(value), Value::Number(bound)) => value.as_i64().cmp(&bound.as_i64()),
        (Value::String(value), Value::String(bound)) => value.cmp(bound),
        _ => return false,
    };
    match name {
        "ge" => order != Ordering::Less,
        "gt" => order == Ordering::Greater,
        "le" => order != Ordering::Greater,
        _ => order == Ordering::Less,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn columns() -> Vec<PartitionColumn> {
        let column = |name: &str, kind| PartitionColumn {
            name: name.into(),
            kind,
        };
        vec![
            column("day", PartitionType::Int32),
            column("city", PartitionType::String),
        ]
    }

    /// The indices of the files that the filter admits.
    fn accepted(conditions: Value) -> Result<Vec<usize>, String> {
        let Value::Object(conditions) = conditions else {
            panic!()
        };
        check(&conditions).map_err(|(field, why)| format!("{field} {why}"))?;
        let filter = Filter::new(&conditions, &columns()).map_err(|e| e.to_string())?;
        let files = [
            ("01", Some("Graz")),
            ("2", None),
            ("10", Some("Wien")),
            ("11", Some("")),
        ];
        let accepts = |(day, city): (&str, Option<&str>)| filter.accepts(&[Some(day.into()), city.map(String::from)]);
        Ok((0..files.len()).filter(|&n| accepts(files[n])).collect())
    }

    #[test]
    fn values_lists_and_ranges_select_files() {
        let all = [
            (json!({"day": 1}), vec![0]),
            (json!({"day": [1, 11]}), vec![0, 3]),
            (json!({"day": {"ge": 2, "lt": 11}}), vec![1, 2]),
            (json!({"day": {"gt": 2, "le": 11}}), vec![2, 3]),
            (json!({"day": {"ge": "10"}}), vec![2, 3]),
            (json!({"city": null}), vec![1]),
            (json!({"city": {"ge": "Graz"}}), vec![0, 2]),
            (json!({"city": "", "day": {"ge": 3}}), vec![3]),
            (json!({"city": {"lt": "A"}}), vec![3]),
            (json!({}), vec![0, 1, 2, 3]),
        ];
        for (conditions, expected) in all {
            assert_eq!(accepted(conditions.clone()).unwrap(), expected, "{conditions}");
        }
    }

    #[test]
    fn invalid_conditions_are_refused_in_one_line() {
        let all = [
            (json!({"day": "x"}), "asks for \"x\", and the column is whole numbers"),
            (json!({"city": 1}), "put it in quotes"),
            (json!({"id": 1}), "the folders of the inputs give `day`, `city`"),
            (json!({"day": {"eq": 1}}), "input.where.day has `eq`"),
            (json!({"day": {}}), "is an empty range"),
            (json!({"day": []}), "is an empty list"),
            (json!({"day": 1.5}), "is 1.5; a folder's value"),
            (json!({"day": {"ge": null}}), "a bound is a whole number or a text"),
            (json!({"day": [[1]]}), "is [1]; a folder's value"),
            (json!({"city": true}), "is true; a folder's value"),
        ];
        for (conditions, says) in all {
            let error = accepted(conditions).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
    }
}
