//! The Arrow type of the column for answers to a JSON Schema; parts of an answer without an Arrow
//! type become JSON text.
//!
//! A type admits every answer that its schema does, except numbers that its int64 or float64 cannot
//! hold. Keywords that narrow an answer further (bounds, patterns, formats, required members) are
//! ignored, and a value that may have several types becomes JSON text. Null and missing values are
//! both null, so every part of a column is nullable.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::json::{Answer, quoted};

/// Maximum nesting depth of a type.
const LEVELS_MAX: usize = 16;
/// Maximum number of schemas visited: the references in a schema of a kilobyte can lead to another
/// schema a million times.
const SCHEMAS_MAX: usize = 4_000;
/// The field of a struct that holds the members that the schema allows without naming them, as JSON
/// text of an object. Its name is that of the schema keyword.
pub const OTHERS_FIELD: &str = "additionalProperties";

/// The type of a column, or of a part of its values.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AnswerType {
    /// JSON text.
    Json,
    Text,
    Boolean,
    Int64,
    Float64,
    List(Box<AnswerType>),
    /// An object whose keys are data.
    Map(Box<AnswerType>),
    Struct {
        /// In the schema's order.
        fields: Vec<(String, AnswerType)>,
        /// Whether the schema allows members that it does not name; these go to [`OTHERS_FIELD`].
        others: bool,
    },
}

/// The reason why a part of an answer has no type. Messages show it after the part's path.
type Reason = Cow<'static, str>;

/// A part of an answer that stays JSON text.
#[derive(Debug, PartialEq, Eq)]
pub struct Untyped {
    /// Path as a query would name it: `parsed.tags[]`.
    pub path: String,
    pub why: Reason,
}

impl fmt::Display for Untyped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` {}", self.path, self.why)
    }
}

impl fmt::Display for AnswerType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AnswerType::Json => f.write_str("JSON text"),
            AnswerType::Text => f.write_str("string"),
            AnswerType::Boolean => f.write_str("boolean"),
            AnswerType::Int64 => f.write_str("int64"),
            AnswerType::Float64 => f.write_str("float64"),
            AnswerType::List(item) => write!(f, "list<{item}>"),
            AnswerType::Map(value) => write!(f, "map<string, {value}>"),
            AnswerType::Struct { fields, others } => {
                f.write_str("struct<")?;
                for (index, (name, field_type)) in fields.iter().enumerate() {
                    write!(f, "{}{name}: {field_type}", if index > 0 { ", " } else { "" })?;
                }
                f.write_str(if *others {
                    ", additionalProperties: JSON text>"
                } else {
                    ">"
                })
            }
        }
    }
}

impl AnswerType {
    /// The type for a JSON Schema, and the parts that stay text.
    pub fn of(schema: &Value) -> (AnswerType, Vec<Untyped>) {
        let mut reader = SchemaReader {
            root: schema,
            schemas_left: SCHEMAS_MAX,
            open_refs: vec!["#"],
            untyped: Vec::new(),
        };
        let answer_type = reader.type_of(schema, "parsed", 0);
        (answer_type, reader.untyped)
    }

    /// Approximate maximum number of values that an answer of `tokens` tokens has in this type's
    /// columns. A list item takes at least a token, and has a value (possibly null) in each column
    /// below the list.
    pub fn max_values(&self, tokens: u64) -> u64 {
        let columns = self.column_counts();
        let in_lists = tokens.saturating_mul(columns.per_list_item);
        columns.outside_lists.saturating_add(in_lists)
    }

    fn column_counts(&self) -> ColumnCounts {
        match self {
            AnswerType::List(item) | AnswerType::Map(item) => {
                let columns = item.column_counts();
                ColumnCounts {
                    outside_lists: 1,
                    per_list_item: columns.outside_lists.max(columns.per_list_item),
                }
            }
            AnswerType::Struct { fields, others } => {
                let none = ColumnCounts {
                    outside_lists: u64::from(*others),
                    per_list_item: 0,
                };
                let counts = fields.iter().map(|(_, field_type)| field_type.column_counts());
                counts.fold(none, |sum, field| ColumnCounts {
                    outside_lists: sum.outside_lists + field.outside_lists,
                    per_list_item: sum.per_list_item.max(field.per_list_item),
                })
            }
            _ => ColumnCounts {
                outside_lists: 1,
                per_list_item: 0,
            },
        }
    }

    /// Checks that a column of this type can hold the answer.
    ///
    /// # Errors
    /// One line that names the part that does not fit, and why.
    pub fn check(&self, answer: &Answer) -> Result<(), String> {
        self.check_at(answer, "")
    }

    /// `path`: the path of `answer` within the whole answer.
    fn check_at(&self, answer: &Answer, path: &str) -> Result<(), String> {
        let type_error = |answer: &Answer| {
            let subject = if path.is_empty() {
                String::new()
            } else {
                format!("`{path}` is ")
            };
            Err(format!(
                "{subject}{}, and its column holds {self}",
                quoted(&answer.compact())
            ))
        };
        match (self, answer) {
            (AnswerType::Json, _) | (_, Answer::Null) => Ok(()),
            (AnswerType::Text, Answer::Text(_)) | (AnswerType::Boolean, Answer::Bool(_)) => Ok(()),
            (AnswerType::Int64, answer) if answer.as_int64().is_some() => Ok(()),
            (AnswerType::Float64, answer) if answer.as_float64().is_some() => Ok(()),
            (AnswerType::List(item), Answer::List(items)) => {
                let mut items = items.iter().enumerate();
                items.try_for_each(|(index, answer)| item.check_at(answer, &format!("{path}[{index}]")))
            }
            (AnswerType::Map(value), Answer::Object(members)) => {
                let mut members = members.iter();
                members.try_for_each(|(key, answer)| value.check_at(answer, &child_path(path, key)))
            }
            (AnswerType::Struct { fields, others }, Answer::Object(members)) => {
                members
                    .iter()
                    .try_for_each(|(key, answer)| match fields.iter().find(|(name, _)| name == key) {
                        Some((_, field_type)) => field_type.check_at(answer, &child_path(path, key)),
                        None if *others => Ok(()),
                        None => Err(format!("it has no field {}", quoted(key))),
                    })
            }
            (_, answer) => type_error(answer),
        }
    }
}

/// Number of columns of a type.
struct ColumnCounts {
    outside_lists: u64,
    /// Maximum over the lists and maps.
    per_list_item: u64,
}

fn child_path(path: &str, key: &str) -> String {
    match path {
        "" => key.to_string(),
        path => format!("{path}.{key}"),
    }
}

/// Finds the type for a schema. `path` names a part of the answer for messages, `level` is its
/// nesting depth.
struct SchemaReader<'a> {
    root: &'a Value,
    /// Number of schemas that may still be visited.
    schemas_left: usize,
    /// The `$ref`s being followed; a `$ref` that is already in the list is recursive.
    open_refs: Vec<&'a str>,
    untyped: Vec<Untyped>,
}

impl<'a> SchemaReader<'a> {
    fn type_of(&mut self, schema: &'a Value, path: &str, level: usize) -> AnswerType {
        let (open_refs, untyped) = (self.open_refs.len(), self.untyped.len());
        let found = if level > LEVELS_MAX {
            Err("is nested too deep for a type".into())
        } else {
            self.applicable_schemas(schema)
                .and_then(|schemas| self.type_of_all(&schemas, path, level))
        };
        self.open_refs.truncate(open_refs);
        found.unwrap_or_else(|why| {
            // A part that is text as a whole is reported once, without its own parts.
            self.untyped.truncate(untyped);
            self.untyped.push(Untyped { path: path.into(), why });
            AnswerType::Json
        })
    }

    /// All schemas that apply to the same value as `schema`: its own keywords, its `$ref`'s target
    /// and its `allOf`.
    fn applicable_schemas(&mut self, schema: &'a Value) -> Result<Vec<&'a Map<String, Value>>, Reason> {
        let mut schemas = Vec::new();
        let mut to_visit = vec![schema];
        while let Some(schema) = to_visit.pop() {
            self.schemas_left = self
                .schemas_left
                .checked_sub(1)
                .ok_or(Reason::Borrowed("is of a schema too large for a type"))?;
            let Value::Object(members) = schema else {
                continue;
            };
            schemas.push(members);
            if let Some(Value::Array(all_of)) = members.get("allOf") {
                to_visit.extend(all_of.iter().rev());
            }
            if let Some(Value::String(name)) = members.get("$ref") {
                if self.open_refs.contains(&name.as_str()) {
                    return Err("is recursive".into());
                }
                self.open_refs.push(name);
                let target = self.target(name);
                to_visit.push(target.ok_or(Reason::Borrowed("refers to what is not found"))?);
            }
        }
        Ok(schemas)
    }

    /// The schema that a `$ref` names below the root; references with escapes are not resolved.
    fn target(&self, name: &str) -> Option<&'a Value> {
        let mut value = self.root;
        for segment in name.strip_prefix("#/")?.split('/') {
            value = match value {
                Value::Array(items) => items.get(segment.parse::<usize>().ok()?)?,
                other => other.get(segment)?,
            };
        }
        Some(value)
    }

    /// The type for values that satisfy all of these schemas. Each schema only narrows the values,
    /// so the type of any one of them is valid.
    fn type_of_all(
        &mut self,
        schemas: &[&'a Map<String, Value>],
        path: &str,
        level: usize,
    ) -> Result<AnswerType, Reason> {
        for members in schemas {
            if let Some(value) = members.get("const") {
                return type_of_values([value]);
            }
            if let Some(Value::Array(values)) = members.get("enum") {
                return type_of_values(values);
            }
        }
        let types = schemas.iter().filter_map(|members| members.get("type"));
        let Some(types) = types.map(type_names).min_by_key(Vec::len) else {
            let find = |keyword: &str| schemas.iter().find_map(|members| members.get(keyword)?.as_array());
            return match find("anyOf").or_else(|| find("oneOf")) {
                Some(options) => {
                    let options = options.iter().filter(|option| !is_only_null(option));
                    self.common_type(options, path, level, "may be of different types")
                }
                None => Err("may be of any type".into()),
            };
        };
        match types[..] {
            ["string"] => Ok(AnswerType::Text),
            ["boolean"] => Ok(AnswerType::Boolean),
            ["integer"] => Ok(AnswerType::Int64),
            ["number"] | ["number", "integer"] | ["integer", "number"] => Ok(AnswerType::Float64),
            ["array"] => self.array_type(schemas, path, level),
            ["object"] => self.object_type(schemas, path, level),
            [] => Err("is always null".into()),
            _ => Err("may be of different types".into()),
        }
    }

    /// The type that all options have in common. The error is `else_why`.
    fn common_type(
        &mut self,
        options: impl Iterator<Item = &'a Value>,
        path: &str,
        level: usize,
        else_why: &'static str,
    ) -> Result<AnswerType, Reason> {
        let mut common: Option<AnswerType> = None;
        for option in options {
            let next = self.type_of(option, path, level + 1);
            common = Some(match common {
                None => next,
                Some(one) if one == next => one,
                Some(AnswerType::Int64 | AnswerType::Float64) if is_number(&next) => AnswerType::Float64,
                Some(_) => return Err(else_why.into()),
            });
        }
        match common {
            Some(AnswerType::Json) | None => Err(else_why.into()),
            Some(one) => Ok(one),
        }
    }

    fn array_type(
        &mut self,
        schemas: &[&'a Map<String, Value>],
        path: &str,
        level: usize,
    ) -> Result<AnswerType, Reason> {
        let item_path = format!("{path}[]");
        // Schemas of the first items by position, and the schema of the other items.
        let by_position = |members: &&'a Map<String, Value>| {
            let list = |keyword: &str| members.get(keyword).and_then(Value::as_array);
            list("prefixItems").or_else(|| list("items"))
        };
        let of_others = |members: &&'a Map<String, Value>| {
            let items = members.get("items").filter(|items| !items.is_array());
            items.or_else(|| members.get("additionalItems"))
        };
        let first_items = schemas.iter().find_map(by_position).into_iter().flatten();
        let Some(other_items) = schemas.iter().find_map(of_others) else {
            return Err("is a list of any values".into());
        };
        let other_items = Some(other_items).filter(|items| **items != Value::Bool(false));
        match self.common_type(first_items.chain(other_items), &item_path, level, "") {
            Ok(item) => Ok(AnswerType::List(Box::new(item))),
            Err(_) => Err("is a list of values of different types".into()),
        }
    }

    fn object_type(
        &mut self,
        schemas: &[&'a Map<String, Value>],
        path: &str,
        level: usize,
    ) -> Result<AnswerType, Reason> {
        let properties = |members: &'a Map<String, Value>| members.get("properties").and_then(Value::as_object);
        let is_closed = |members: &&'a Map<String, Value>| {
            members.get("additionalProperties") == Some(&Value::Bool(false))
                && !members.contains_key("patternProperties")
        };
        let others = !schemas.iter().any(is_closed);
        let mut named: Vec<(&'a String, &'a Value)> = Vec::new();
        let (mut names, mut by_lowercase) = (HashSet::new(), HashMap::new());
        for (name, schema) in schemas.iter().filter_map(|members| properties(members)).flatten() {
            if !names.insert(name) {
                continue;
            }
            // Engines that read columns by name ignore case, and their strings end at a zero byte.
            if name.is_empty() || name.chars().any(char::is_control) {
                let name = quoted(&name.escape_debug().to_string());
                return Err(format!("has the property {name}, a name that no column can have").into());
            }
            if let Some(other) = by_lowercase.insert(name.to_lowercase(), name) {
                let (name, other) = (quoted(name), quoted(other));
                let why = format!(
                    "has the properties {other} and {name}, which engines cannot tell apart: they differ by case alone"
                );
                return Err(why.into());
            }
            named.push((name, schema));
        }
        if named.is_empty() {
            return self.map_type(schemas, path, level);
        }
        if others && by_lowercase.contains_key(&OTHERS_FIELD.to_lowercase()) {
            return Err("has a property named `additionalProperties`, and others beside".into());
        }
        let mut fields = Vec::with_capacity(named.len());
        for (name, schema) in named {
            let field_type = self.type_of(schema, &format!("{path}.{name}"), level + 1);
            fields.push((name.clone(), field_type));
        }
        if others {
            self.untyped.push(Untyped {
                path: format!("{path}.{OTHERS_FIELD}"),
                why: "holds the members that the schema allows without naming them".into(),
            });
        }
        Ok(AnswerType::Struct { fields, others })
    }

    /// The type of an object without named members.
    fn map_type(&mut self, schemas: &[&'a Map<String, Value>], path: &str, level: usize) -> Result<AnswerType, Reason> {
        const ANY_MEMBERS: &str = "is an object of any members";
        let has_patterns = schemas.iter().any(|members| members.contains_key("patternProperties"));
        let values = schemas.iter().find_map(|members| members.get("additionalProperties"));
        match values.filter(|values| values.is_object() && !has_patterns) {
            Some(values) => match self.type_of(values, &format!("{path}[]"), level + 1) {
                AnswerType::Json => Err(ANY_MEMBERS.into()),
                value => Ok(AnswerType::Map(Box::new(value))),
            },
            None => Err(ANY_MEMBERS.into()),
        }
    }
}

/// The names in a schema's `type`, without `null`.
fn type_names(names: &Value) -> Vec<&str> {
    let names: Vec<&str> = match names {
        Value::Array(names) => names.iter().filter_map(Value::as_str).collect(),
        name => name.as_str().into_iter().collect(),
    };
    names.into_iter().filter(|name| *name != "null").collect()
}

/// Whether a schema admits no value but null.
fn is_only_null(schema: &Value) -> bool {
    schema["type"] == "null" || schema.get("const").is_some_and(Value::is_null)
}

fn is_number(answer_type: &AnswerType) -> bool {
    matches!(answer_type, AnswerType::Int64 | AnswerType::Float64)
}

/// The common type of an enum's values.
fn type_of_values<'a>(values: impl IntoIterator<Item = &'a Value>) -> Result<AnswerType, Reason> {
    let mut common: Option<AnswerType> = None;
    for value in values.into_iter().filter(|value| !value.is_null()) {
        let next = match value {
            Value::String(_) => AnswerType::Text,
            Value::Bool(_) => AnswerType::Boolean,
            Value::Number(_) => match Answer::Number(value.to_string()).as_int64() {
                Some(_) => AnswerType::Int64,
                None => AnswerType::Float64,
            },
            _ => return Err("has lists or objects among its values".into()),
        };
        common = Some(match common {
            None => next,
            Some(one) if one == next => one,
            Some(one) if is_number(&one) && is_number(&next) => AnswerType::Float64,
            Some(_) => return Err("has values of different types".into()),
        });
    }
    common.ok_or(Reason::Borrowed("is always null"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// The type's display text, and the parts that stay text.
    fn typed(schema: Value) -> (String, Vec<String>) {
        let (answer_type, untyped) = AnswerType::of(&schema);
        (
            answer_type.to_string(),
            untyped.iter().map(Untyped::to_string).collect(),
        )
    }

    fn object(properties: Value) -> Value {
        json!({"type": "object", "properties": properties, "additionalProperties": false})
    }

    #[test]
    fn schemas_get_arrow_types() {
        for (schema, answer_type) in [
            (json!({"type": "string", "format": "date-time"}), "string"),
            (json!({"enum": ["a", "b", null]}), "string"),
            (json!({"const": true}), "boolean"),
            (json!({"enum": [1, 2]}), "int64"),
            (json!({"enum": [1, 2.5]}), "float64"),
            (json!({"type": ["integer", "null"]}), "int64"),
            (json!({"type": ["integer", "number"]}), "float64"),
            (json!({"anyOf": [{"type": "integer"}, {"type": "null"}]}), "int64"),
            (
                json!({"oneOf": [{"type": "integer"}, {"type": "number"}, {"const": null}]}),
                "float64",
            ),
            (json!({"type": "array", "items": {"type": "boolean"}}), "list<boolean>"),
            (
                json!({"type": "array", "prefixItems": [{"type": "string"}, {"enum": ["x"]}], "items": false}),
                "list<string>",
            ),
            (
                json!({"type": "object", "additionalProperties": {"type": "number"}}),
                "map<string, float64>",
            ),
            (
                object(
                    json!({"a": {"type": "string"}, "b": object(json!({"c": {"type": "array", "items": {"type": "integer"}}}))}),
                ),
                "struct<a: string, b: struct<c: list<int64>>>",
            ),
            (
                json!({"$ref": "#/$defs/a", "$defs": {"a": object(json!({"x": {"$ref": "#/$defs/b"}, "y": {"$ref": "#/$defs/b"}})),
                    "b": {"type": "integer", "minimum": 0}}}),
                "struct<x: int64, y: int64>",
            ),
            (
                json!({"allOf": [object(json!({"a": {"type": "string"}})), {"type": "object", "required": ["a"]}]}),
                "struct<a: string>",
            ),
        ] {
            assert_eq!(typed(schema.clone()), (answer_type.to_string(), vec![]), "{schema}");
        }
    }

    #[test]
    fn parts_without_a_type_are_text_with_a_reason() {
        for (schema, answer_type, untyped) in [
            (
                json!({"type": "object"}),
                "JSON text",
                "`parsed` is an object of any members",
            ),
            (json!({}), "JSON text", "`parsed` may be of any type"),
            (json!(true), "JSON text", "`parsed` may be of any type"),
            (
                json!({"properties": {"a": {"type": "string"}}}),
                "JSON text",
                "`parsed` may be of any type",
            ),
            (
                json!({"enum": ["a", 1]}),
                "JSON text",
                "`parsed` has values of different types",
            ),
            (
                json!({"type": ["string", "integer"]}),
                "JSON text",
                "`parsed` may be of different types",
            ),
            (
                json!({"anyOf": [{"type": "string"}, {"type": "array", "items": {}}]}),
                "JSON text",
                "`parsed` may be of different types",
            ),
            (
                json!({"type": "array"}),
                "JSON text",
                "`parsed` is a list of any values",
            ),
            (json!({"type": "null"}), "JSON text", "`parsed` is always null"),
            (
                object(
                    json!({"a": {"type": "array", "items": {"type": ["string", "boolean"]}}, "b": {"type": "string"}}),
                ),
                "struct<a: JSON text, b: string>",
                "`parsed.a` is a list of values of different types",
            ),
            (
                object(json!({"a": {"type": "object", "additionalProperties": {}}, "b": {"type": "string"}})),
                "struct<a: JSON text, b: string>",
                "`parsed.a` is an object of any members",
            ),
            (
                json!({"type": "object", "properties": {"a": {"type": "string"}}}),
                "struct<a: string, additionalProperties: JSON text>",
                "`parsed.additionalProperties` holds the members that the schema allows without naming them",
            ),
            (
                object(json!({"a": {"type": "string"}, "A": {"type": "string"}})),
                "JSON text",
                "`parsed` has the properties `a` and `A`, which engines cannot tell apart: they differ by case alone",
            ),
            (
                object(json!({"a\u{0}b": {"type": "string"}})),
                "JSON text",
                "`parsed` has the property `a\\0b`, a name that no column can have",
            ),
            (
                json!({"type": "object", "properties": {"additionalproperties": {"type": "string"}}}),
                "JSON text",
                "`parsed` has a property named `additionalProperties`, and others beside",
            ),
            (
                json!({"$ref": "#/$defs/n", "$defs": {"n": object(json!({"v": {"type": "integer"}, "next": {"$ref": "#/$defs/n"}}))}}),
                "struct<v: int64, next: JSON text>",
                "`parsed.next` is recursive",
            ),
            (
                object(json!({"a": {"$ref": "#"}, "b": {"type": "string"}})),
                "struct<a: JSON text, b: string>",
                "`parsed.a` is recursive",
            ),
            (
                json!({"$ref": "#/$defs/a~1b"}),
                "JSON text",
                "`parsed` refers to what is not found",
            ),
        ] {
            assert_eq!(
                typed(schema.clone()),
                (answer_type.to_string(), vec![untyped.to_string()]),
                "{schema}"
            );
        }
    }

    #[test]
    fn large_and_deep_schemas_are_cut_off() {
        let deep = (0..90).fold(json!({"type": "string"}), |inner, _| object(json!({"a": inner})));
        let (answer_type, untyped) = typed(deep);
        assert!(
            answer_type.ends_with(&format!("JSON text{}", ">".repeat(LEVELS_MAX + 1))),
            "{answer_type}"
        );
        assert!(untyped[0].ends_with("is nested too deep for a type"), "{untyped:?}");
        // Each definition refers to the next one twice.
        let defs: Map<String, Value> = (0..30)
            .map(|n| {
                let next = json!({"$ref": format!("#/$defs/d{}", n + 1)});
                (format!("d{n}"), object(json!({"a": next, "b": next})))
            })
            .collect();
        let (answer_type, untyped) = AnswerType::of(&json!({"$ref": "#/$defs/d0", "$defs": defs}));
        assert!(answer_type.to_string().len() < 1 << 20 && !untyped.is_empty());
    }

    #[test]
    fn errors_name_the_part_that_does_not_fit() {
        let (answer_type, _) = AnswerType::of(&object(json!({
            "n": {"type": "integer"}, "f": {"type": "number"}, "l": {"type": "array", "items": {"type": "integer"}},
            "m": {"type": "object", "additionalProperties": {"type": "boolean"}}, "s": {"type": "string"}})));
        let check = |text: &str| answer_type.check(&Answer::parse(text).unwrap());
        for fits in [
            "null",
            "{}",
            r#"{"n": null, "f": 1, "l": [1, null], "m": {"a": true}, "s": "x"}"#,
        ] {
            assert_eq!(check(fits), Ok(()), "{fits}");
        }
        for (text, why) in [
            (
                r#"{"n": 9223372036854775808}"#,
                "`n` is `9223372036854775808`, and its column holds int64",
            ),
            (
                r#"{"f": 9007199254740993}"#,
                "`f` is `9007199254740993`, and its column holds float64",
            ),
            (r#"{"l": [1, 1.5]}"#, "`l[1]` is `1.5`, and its column holds int64"),
            (r#"{"m": {"k": 1}}"#, "`m.k` is `1`, and its column holds boolean"),
            (r#"{"s": 1}"#, "`s` is `1`, and its column holds string"),
            (r#"{"other": 1}"#, "it has no field `other`"),
            (
                "[]",
                "`[]`, and its column holds struct<n: int64, f: float64, l: list<int64>, m: map<string, boolean>, s: string>",
            ),
        ] {
            assert_eq!(check(text), Err(why.to_string()), "{text}");
        }
    }

    #[test]
    fn values_of_items_are_counted_with_all_their_columns() {
        let item = object(
            json!({"a": {"type": "string"}, "b": {"type": "string"}, "c": {"type": "array", "items": {"type": "string"}}}),
        );
        let (answer_type, _) = AnswerType::of(&object(
            json!({"n": {"type": "integer"}, "l": {"type": "array", "items": item}}),
        ));
        assert_eq!(answer_type.max_values(100), 2 + 100 * 3);
        assert_eq!(AnswerType::Text.max_values(100), 1);
    }

    #[test]
    fn types_are_read_back_from_records() {
        let (answer_type, _) = AnswerType::of(&json!({"type": "object", "properties": {
            "a": {"type": "array", "items": {"type": "integer"}}, "b": {"type": "object", "additionalProperties": {"type": "string"}}}}));
        let text = serde_json::to_string(&answer_type).unwrap();
        assert_eq!(serde_json::from_str::<AnswerType>(&text).unwrap(), answer_type);
    }
}
