//! The Arrow type of the column for answers to a JSON Schema; parts without an Arrow type become
//! JSON text.
//!
//! A type admits every answer that its schema does, except numbers that fit neither int64 nor
//! float64. Keywords that narrow an answer further (bounds, patterns, formats, required members)
//! are ignored, and a value that may have several types stays text. Null and missing values are
//! both null, so every part of a column is nullable.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::json::{Answer, quoted};

/// Deepest nesting of a type.
const LEVELS_MAX: usize = 16;
/// Maximum number of schemas visited: a schema of a kilobyte can refer to another one a million
/// times.
const SCHEMAS_MAX: usize = 4_000;
/// The field of a struct that holds, as a JSON object, the members that the schema allows without
/// naming them. Its name is the keyword's.
pub const OTHERS: &str = "additionalProperties";

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
        /// Whether the schema allows members that it does not name; these go to [`OTHERS`].
        others: bool,
    },
}

/// Why a part of an answer has no type. Messages show it after the part's path.
type Why = Cow<'static, str>;

/// A part of an answer that stays JSON text.
#[derive(Debug, PartialEq, Eq)]
pub struct Untyped {
    /// Path as a query would name it: `parsed.tags[]`.
    pub place: String,
    pub why: Why,
}

impl fmt::Display for Untyped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` {}", self.place, self.why)
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
                for (at, (name, of)) in fields.iter().enumerate() {
                    write!(f, "{}{name}: {of}", if at > 0 { ", " } else { "" })?;
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
        let mut reading = Reading {
            root: schema,
            left: SCHEMAS_MAX,
            within: vec!["#"],
            untyped: Vec::new(),
        };
        let of = reading.schema(schema, "parsed", 0);
        (of, reading.untyped)
    }

    /// Approximate maximum number of values that an answer of `tokens` tokens has in this type's
    /// columns. A list item takes at least a token, and has a value (possibly null) in each column
    /// below the list.
    pub fn values(&self, tokens: u64) -> u64 {
        let (own, of_an_item) = self.places();
        own.saturating_add(tokens.saturating_mul(of_an_item))
    }

    /// The number of columns outside of lists, and the maximum number of columns per list item.
    fn places(&self) -> (u64, u64) {
        match self {
            AnswerType::List(item) | AnswerType::Map(item) => {
                let (own, of_an_item) = item.places();
                (1, own.max(of_an_item))
            }
            AnswerType::Struct { fields, others } => {
                let places = fields.iter().map(|(_, of)| of.places());
                places.fold((u64::from(*others), 0), |(own, items), (more, of_an_item)| {
                    (own + more, items.max(of_an_item))
                })
            }
            _ => (1, 0),
        }
    }

    /// Checks that a column of this type can hold the answer.
    ///
    /// # Errors
    /// One line that names the part that does not fit, and why.
    pub fn check(&self, answer: &Answer) -> Result<(), String> {
        self.check_at(answer, "")
    }

    fn check_at(&self, answer: &Answer, place: &str) -> Result<(), String> {
        let misfit = |answer: &Answer| {
            let place = if place.is_empty() {
                String::new()
            } else {
                format!("`{place}` is ")
            };
            Err(format!(
                "{place}{}, and its column holds {self}",
                quoted(&answer.compact())
            ))
        };
        match (self, answer) {
            (AnswerType::Json, _) | (_, Answer::Null) => Ok(()),
            (AnswerType::Text, Answer::Text(_)) | (AnswerType::Boolean, Answer::Bool(_)) => Ok(()),
            (AnswerType::Int64, answer) if answer.int64().is_some() => Ok(()),
            (AnswerType::Float64, answer) if answer.float64().is_some() => Ok(()),
            (AnswerType::List(item), Answer::List(items)) => {
                let mut all = items.iter().enumerate();
                all.try_for_each(|(at, answer)| item.check_at(answer, &format!("{place}[{at}]")))
            }
            (AnswerType::Map(value), Answer::Object(members)) => {
                let mut all = members.iter();
                all.try_for_each(|(key, answer)| value.check_at(answer, &below(place, key)))
            }
            (AnswerType::Struct { fields, others }, Answer::Object(members)) => {
                members
                    .iter()
                    .try_for_each(|(key, answer)| match fields.iter().find(|(name, _)| name == key) {
                        Some((_, of)) => of.check_at(answer, &below(place, key)),
                        None if *others => Ok(()),
                        None => Err(format!("it has no field {}", quoted(key))),
                    })
            }
            (_, answer) => misfit(answer),
        }
    }
}

fn below(place: &str, key: &str) -> String {
    match place {
        "" => key.to_string(),
        place => format!("{place}.{key}"),
    }
}

/// A schema being read.
struct Reading<'a> {
    root: &'a Value,
    /// Number of schemas that may still be visited.
    left: usize,
    /// The `$ref`s being followed; a `$ref` that is already in the list is recursive.
    within: Vec<&'a str>,
    untyped: Vec<Untyped>,
}

impl<'a> Reading<'a> {
    fn schema(&mut self, schema: &'a Value, place: &str, level: usize) -> AnswerType {
        let (following, noted) = (self.within.len(), self.untyped.len());
        let read = if level > LEVELS_MAX {
            Err("is nested too deep for a type".into())
        } else {
            self.together(schema).and_then(|all| self.all(&all, place, level))
        };
        self.within.truncate(following);
        read.unwrap_or_else(|why| {
            // A part that is text as a whole is reported once, without its own parts.
            self.untyped.truncate(noted);
            self.untyped.push(Untyped {
                place: place.into(),
                why,
            });
            AnswerType::Json
        })
    }

    /// All schemas that apply to the same value as `schema`: its own keywords, its `$ref`'s target
    /// and its `allOf`.
    fn together(&mut self, schema: &'a Value) -> Result<Vec<&'a Map<String, Value>>, Why> {
        let mut all = Vec::new();
        let mut open = vec![schema];
        while let Some(schema) = open.pop() {
            self.left = self
                .left
                .checked_sub(1)
                .ok_or(Why::Borrowed("is of a schema too large for a type"))?;
            let Value::Object(members) = schema else {
                continue;
            };
            all.push(members);
            if let Some(Value::Array(of)) = members.get("allOf") {
                open.extend(of.iter().rev());
            }
            if let Some(Value::String(name)) = members.get("$ref") {
                if self.within.contains(&name.as_str()) {
                    return Err("is recursive".into());
                }
                self.within.push(name);
                open.push(self.target(name).ok_or(Why::Borrowed("refers to what is not found"))?);
            }
        }
        Ok(all)
    }

    /// The schema that a `$ref` names below the root; references with escapes are not resolved.
    fn target(&self, name: &str) -> Option<&'a Value> {
        let mut at = self.root;
        for segment in name.strip_prefix("#/")?.split('/') {
            at = match at {
                Value::Array(items) => items.get(segment.parse::<usize>().ok()?)?,
                other => other.get(segment)?,
            };
        }
        Some(at)
    }

    /// The type for values that satisfy all of these schemas. Each schema only narrows the values,
    /// so the type of any one of them is valid.
    fn all(&mut self, all: &[&'a Map<String, Value>], place: &str, level: usize) -> Result<AnswerType, Why> {
        for members in all {
            if let Some(value) = members.get("const") {
                return of_values([value]);
            }
            if let Some(Value::Array(values)) = members.get("enum") {
                return of_values(values);
            }
        }
        let types = all.iter().filter_map(|members| members.get("type")).map(names_of_types);
        let Some(types) = types.min_by_key(Vec::len) else {
            let options = ["anyOf", "oneOf"].map(|name| all.iter().find_map(|members| members.get(name)?.as_array()));
            return match options.into_iter().flatten().next() {
                Some(options) => {
                    let options = options.iter().filter(|option| !is_null(option));
                    self.one_of(options, place, level, "may be of different types")
                }
                None => Err("may be of any type".into()),
            };
        };
        match types[..] {
            ["string"] => Ok(AnswerType::Text),
            ["boolean"] => Ok(AnswerType::Boolean),
            ["integer"] => Ok(AnswerType::Int64),
            ["number"] | ["number", "integer"] | ["integer", "number"] => Ok(AnswerType::Float64),
            ["array"] => self.array(all, place, level),
            ["object"] => self.object(all, place, level),
            [] => Err("is always null".into()),
            _ => Err("may be of different types".into()),
        }
    }

    /// The common type of all options, if they agree.
    fn one_of(
        &mut self,
        options: impl Iterator<Item = &'a Value>,
        place: &str,
        level: usize,
        else_why: &'static str,
    ) -> Result<AnswerType, Why> {
        let mut found: Option<AnswerType> = None;
        for option in options {
            let next = self.schema(option, place, level + 1);
            found = Some(match found {
                None => next,
                Some(one) if one == next => one,
                Some(AnswerType::Int64 | AnswerType::Float64) if is_number(&next) => AnswerType::Float64,
                Some(_) => return Err(else_why.into()),
            });
        }
        match found {
            Some(AnswerType::Json) | None => Err(else_why.into()),
            Some(one) => Ok(one),
        }
    }

    fn array(&mut self, all: &[&'a Map<String, Value>], place: &str, level: usize) -> Result<AnswerType, Why> {
        let place = format!("{place}[]");
        let lists = |members: &&'a Map<String, Value>| {
            let lists = ["prefixItems", "items"].map(|name| members.get(name).and_then(Value::as_array));
            lists.into_iter().flatten().next()
        };
        let rest = |members: &&'a Map<String, Value>| {
            let items = members.get("items").filter(|items| !items.is_array());
            items.or_else(|| members.get("additionalItems"))
        };
        let first = all.iter().find_map(lists).into_iter().flatten();
        let rest = all.iter().find_map(rest);
        if rest.is_none() {
            return Err("is a list of any values".into());
        }
        let rest = rest.filter(|rest| **rest != Value::Bool(false));
        match self.one_of(first.chain(rest), &place, level, "") {
            Ok(item) => Ok(AnswerType::List(Box::new(item))),
            Err(_) => Err("is a list of values of different types".into()),
        }
    }

    fn object(&mut self, all: &[&'a Map<String, Value>], place: &str, level: usize) -> Result<AnswerType, Why> {
        let properties = |members: &'a Map<String, Value>| members.get("properties").and_then(Value::as_object);
        let is_closed = |members: &&'a Map<String, Value>| {
            members.get("additionalProperties") == Some(&Value::Bool(false))
                && !members.contains_key("patternProperties")
        };
        let others = !all.iter().any(is_closed);
        let mut named: Vec<(&'a String, &'a Value)> = Vec::new();
        let (mut known, mut seen) = (HashSet::new(), HashMap::new());
        for (name, schema) in all.iter().filter_map(|members| properties(members)).flatten() {
            if !known.insert(name) {
                continue;
            }
            // Engines that read columns by name ignore case, and their strings end at a zero byte.
            if name.is_empty() || name.chars().any(char::is_control) {
                let name = quoted(&name.escape_debug().to_string());
                return Err(format!("has the property {name}, a name that no column can have").into());
            }
            if let Some(other) = seen.insert(name.to_lowercase(), name) {
                let (name, other) = (quoted(name), quoted(other));
                let why = format!(
                    "has the properties {other} and {name}, which engines cannot tell apart: they differ by case alone"
                );
                return Err(why.into());
            }
            named.push((name, schema));
        }
        if named.is_empty() {
            return self.map(all, place, level);
        }
        if others && seen.contains_key(&OTHERS.to_lowercase()) {
            return Err("has a property named `additionalProperties`, and others beside".into());
        }
        let mut fields = Vec::with_capacity(named.len());
        for (name, schema) in named {
            fields.push((name.clone(), self.schema(schema, &format!("{place}.{name}"), level + 1)));
        }
        if others {
            self.untyped.push(Untyped {
                place: format!("{place}.{OTHERS}"),
                why: "holds the members that the schema allows without naming them".into(),
            });
        }
        Ok(AnswerType::Struct { fields, others })
    }

    /// The type of an object without named members.
    fn map(&mut self, all: &[&'a Map<String, Value>], place: &str, level: usize) -> Result<AnswerType, Why> {
        const FREE: &str = "is an object of any members";
        let by_pattern = all.iter().any(|members| members.contains_key("patternProperties"));
        let values = all.iter().find_map(|members| members.get("additionalProperties"));
        match values.filter(|values| values.is_object() && !by_pattern) {
            Some(values) => match self.schema(values, &format!("{place}[]"), level + 1) {
                AnswerType::Json => Err(FREE.into()),
                value => Ok(AnswerType::Map(Box::new(value))),
            },
            None => Err(FREE.into()),
        }
    }
}

/// The names in a `type`, without `null`.
fn names_of_types(names: &Value) -> Vec<&str> {
    let names: Vec<&str> = match names {
        Value::Array(names) => names.iter().filter_map(Value::as_str).collect(),
        name => name.as_str().into_iter().collect(),
    };
    names.into_iter().filter(|name| *name != "null").collect()
}

/// Whether a schema admits null alone.
fn is_null(schema: &Value) -> bool {
    schema["type"] == "null" || schema.get("const").is_some_and(Value::is_null)
}

fn is_number(of: &AnswerType) -> bool {
    matches!(of, AnswerType::Int64 | AnswerType::Float64)
}

/// The common type of an enum's values.
fn of_values<'a>(values: impl IntoIterator<Item = &'a Value>) -> Result<AnswerType, Why> {
    let mut found: Option<AnswerType> = None;
    for value in values.into_iter().filter(|value| !value.is_null()) {
        let next = match value {
            Value::String(_) => AnswerType::Text,
            Value::Bool(_) => AnswerType::Boolean,
            Value::Number(_) => match Answer::Number(value.to_string()).int64() {
                Some(_) => AnswerType::Int64,
                None => AnswerType::Float64,
            },
            _ => return Err("has lists or objects among its values".into()),
        };
        found = Some(match found {
            None => next,
            Some(one) if one == next => one,
            Some(one) if is_number(&one) && is_number(&next) => AnswerType::Float64,
            Some(_) => return Err("has values of different types".into()),
        });
    }
    found.ok_or(Why::Borrowed("is always null"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// The type's display text, and the parts that stay text.
    fn typed(schema: Value) -> (String, Vec<String>) {
        let (of, untyped) = AnswerType::of(&schema);
        (of.to_string(), untyped.iter().map(Untyped::to_string).collect())
    }

    fn object(properties: Value) -> Value {
        json!({"type": "object", "properties": properties, "additionalProperties": false})
    }

    #[test]
    fn schemas_have_the_types_that_arrow_has() {
        for (schema, of) in [
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
            assert_eq!(typed(schema.clone()), (of.to_string(), vec![]), "{schema}");
        }
    }

    #[test]
    fn what_has_no_type_is_text_and_says_why() {
        for (schema, of, untyped) in [
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
                (of.to_string(), vec![untyped.to_string()]),
                "{schema}"
            );
        }
    }

    #[test]
    fn large_and_deep_schemas_end() {
        let deep = (0..90).fold(json!({"type": "string"}), |inner, _| object(json!({"a": inner})));
        let (of, untyped) = typed(deep);
        assert!(
            of.ends_with(&format!("JSON text{}", ">".repeat(LEVELS_MAX + 1))),
            "{of}"
        );
        assert!(untyped[0].ends_with("is nested too deep for a type"), "{untyped:?}");
        // Each definition refers to the next one twice.
        let defs: Map<String, Value> = (0..30)
            .map(|n| {
                let next = json!({"$ref": format!("#/$defs/d{}", n + 1)});
                (format!("d{n}"), object(json!({"a": next, "b": next})))
            })
            .collect();
        let (of, untyped) = AnswerType::of(&json!({"$ref": "#/$defs/d0", "$defs": defs}));
        assert!(of.to_string().len() < 1 << 20 && !untyped.is_empty());
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let (of, _) = AnswerType::of(&object(json!({
            "n": {"type": "integer"}, "f": {"type": "number"}, "l": {"type": "array", "items": {"type": "integer"}},
            "m": {"type": "object", "additionalProperties": {"type": "boolean"}}, "s": {"type": "string"}})));
        let check = |text: &str| of.check(&Answer::parse(text).unwrap());
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
        let (of, _) = AnswerType::of(&object(
            json!({"n": {"type": "integer"}, "l": {"type": "array", "items": item}}),
        ));
        assert_eq!(of.values(100), 2 + 100 * 3);
        assert_eq!(AnswerType::Text.values(100), 1);
    }

    #[test]
    fn a_type_comes_back_from_a_record() {
        let (of, _) = AnswerType::of(&json!({"type": "object", "properties": {
            "a": {"type": "array", "items": {"type": "integer"}}, "b": {"type": "object", "additionalProperties": {"type": "string"}}}}));
        let text = serde_json::to_string(&of).unwrap();
        assert_eq!(serde_json::from_str::<AnswerType>(&text).unwrap(), of);
    }
}
