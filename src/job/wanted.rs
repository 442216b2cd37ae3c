//! A value of the wrong type in a job file: its path, its type, and the types that the schema
//! allows.

use serde_json::Value;

use super::file::JobFile;
use super::unknown::unknown_message;

/// Maximum length of a value in a message, in characters.
const SHOWN_CHARS_MAX: usize = 40;
/// Maximum nesting of alternatives that is searched.
const DEPTH_MAX: usize = 8;
/// Maximum number of a mapping's fields that a message lists.
const FIELDS_MAX: usize = 8;

/// The message in one line; `None` if the schema has no such field, or allows any value there.
pub(super) fn wrong_type(path: &str, content: &Value) -> Option<String> {
    let schema = JobFile::schema();
    let mut wanted = Vec::new();
    for place in places(path, &schema) {
        kinds(place, &schema, 0, &mut wanted);
    }
    let is_one = wanted.len() == 1;
    let last = wanted.pop()?;
    let wanted = if wanted.is_empty() {
        last
    } else {
        format!("{} or {last}", wanted.join(", "))
    };
    let value = content.pointer(&pointer(path));
    let found = value.map_or("missing".into(), shown);
    let advice = match (only_field(path, &schema), value) {
        (Some(field), Some(Value::Number(number))) if is_one => format!(": write `{path}: {{{field}: {number}}}`"),
        _ => String::new(),
    };
    Some(format!("`{path}` is {found}, not {wanted}{advice}"))
}

/// The message for a value at `path` that fits none of its alternatives; `expecting` describes
/// them. If a part of the value is wrong in every alternative, the message is about that part.
pub(super) fn no_alternative(path: &str, content: &Value, expecting: &str) -> Option<String> {
    let value = content.pointer(&pointer(path))?;
    let parts: Vec<String> = match value {
        Value::Array(items) => (0..items.len()).map(|at| format!("{path}[{at}]")).collect(),
        Value::Object(fields) => fields.keys().map(|key| format!("{path}.{key}")).collect(),
        _ => Vec::new(),
    };
    let schema = JobFile::schema();
    let unknown = |field: &&String| places(&format!("{path}.{field}"), &schema).is_empty();
    if let Some(field) = value.as_object().and_then(|fields| fields.keys().find(unknown)) {
        return Some(unknown_message(field, content));
    }
    let wrong = parts.iter().find(|part| {
        let (part, value) = (places(part, &schema), content.pointer(&pointer(part)));
        !part.is_empty() && value.is_some_and(|value| !part.iter().any(|part| is_of_type(value, part, &schema)))
    });
    if let Some(line) = wrong.and_then(|part| wrong_type(part, content)) {
        return Some(line);
    }
    Some(format!("`{path}` is {}: {expecting}", shown(value)))
}

/// Whether the schema at a path, or one of its alternatives, has the value's type; a schema without
/// a type allows any.
fn is_of_type(value: &Value, schema: &Value, root: &Value) -> bool {
    let mut types = Vec::new();
    alternatives(schema, root, 0, &mut |schema| match schema.get("type") {
        Some(Value::Array(names)) => types.extend(names.iter().filter_map(Value::as_str)),
        Some(Value::String(name)) => types.push(name),
        _ => {}
    });
    let fits = |name: &str| match name {
        "string" => value.is_string(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        _ => value.is_null(),
    };
    types.is_empty() || types.into_iter().any(fits)
}

/// The field's name, if a path allows only a mapping with a single field.
fn only_field(path: &str, root: &Value) -> Option<String> {
    let mut fields = Vec::new();
    for place in places(path, root) {
        alternatives(place, root, 0, &mut |schema| fields.extend(fields_of(schema)));
    }
    match &fields[..] {
        [one] => Some(one.to_string()),
        _ => None,
    }
}

fn fields_of(schema: &Value) -> impl Iterator<Item = &String> {
    let fields = schema.get("properties").and_then(Value::as_object);
    fields.into_iter().flat_map(|fields| fields.keys())
}

/// `a.b[0]` as a JSON pointer.
pub(super) fn pointer(path: &str) -> String {
    format!("/{}", path.replace(['.', '['], "/").replace(']', ""))
}

fn shown(value: &Value) -> String {
    match value {
        Value::Null => "empty".into(),
        Value::Array(_) => "a list".into(),
        Value::Object(_) => "a mapping".into(),
        scalar => {
            let text = scalar.as_str().map_or_else(|| scalar.to_string(), String::from);
            match text.char_indices().nth(SHOWN_CHARS_MAX) {
                Some((end, _)) => format!("`{}…`", &text[..end]),
                None => format!("`{text}`"),
            }
        }
    }
}

/// The schemas of a path: several if a field has alternatives.
fn places<'a>(path: &str, root: &'a Value) -> Vec<&'a Value> {
    let pointer = pointer(path);
    let mut found = vec![root];
    for part in pointer.split('/').filter(|part| !part.is_empty()) {
        let mut below = Vec::new();
        for schema in found {
            alternatives(schema, root, 0, &mut |schema| {
                let next = match part.parse::<usize>() {
                    Ok(_) => schema.get("items"),
                    Err(_) => schema.get("properties").and_then(|fields| fields.get(part)),
                };
                let next = next.or(schema.get("additionalProperties"));
                // `false` and `true` are not descriptions.
                below.extend(next.filter(|next| next.is_object()));
            });
        }
        found = below;
    }
    found
}

/// Calls `each` for `schema`, its references and its alternatives.
pub(super) fn alternatives<'a>(schema: &'a Value, root: &'a Value, depth: usize, each: &mut dyn FnMut(&'a Value)) {
    if depth > DEPTH_MAX {
        return;
    }
    each(schema);
    let target = schema.get("$ref").and_then(Value::as_str);
    let target = target.and_then(|target| root.pointer(target.strip_prefix('#')?));
    let lists = ["anyOf", "oneOf", "allOf"].map(|word| schema.get(word).and_then(Value::as_array));
    for one in target.into_iter().chain(lists.into_iter().flatten().flatten()) {
        alternatives(one, root, depth + 1, each);
    }
}

/// The numbers that a schema allows, in words.
fn range(schema: &Value) -> String {
    let [low, high] = ["minimum", "maximum"].map(|name| schema.get(name).and_then(Value::as_f64));
    let high = high.map(|high| high.to_string());
    let high = high.or_else(|| match schema.get("format")?.as_str()? {
        "uint32" => Some(u32::MAX.to_string()),
        "uint64" => Some(u64::MAX.to_string()),
        _ => None,
    });
    match (low, high) {
        (Some(low), Some(high)) => format!(" from {low} to {high}"),
        (Some(low), None) => format!(" from {low} on"),
        _ => String::new(),
    }
}

/// The fields that a mapping may have, in words, unless there are many.
fn listed(schema: &Value) -> String {
    let fields: Vec<String> = fields_of(schema).map(|field| format!("`{field}`")).collect();
    match fields.len() {
        1..=FIELDS_MAX => format!(" of {}", fields.join(", ")),
        _ => String::new(),
    }
}

/// Adds the types that `schema` allows, in words.
fn kinds(schema: &Value, root: &Value, depth: usize, out: &mut Vec<String>) {
    let mut found = Vec::new();
    alternatives(schema, root, depth, &mut |schema| {
        let named = |value: &Value| value.as_str().map(|name| format!("`{name}`"));
        if let Some(names) = schema.get("enum").and_then(Value::as_array) {
            found.extend(names.iter().filter_map(named));
            return;
        }
        if let Some(name) = schema.get("const") {
            found.extend(named(name));
            return;
        }
        let types = match schema.get("type") {
            Some(Value::Array(types)) => types.iter().filter_map(Value::as_str).collect(),
            Some(Value::String(one)) => vec![one.as_str()],
            _ => Vec::new(),
        };
        let words = types.into_iter().filter_map(|one| match one {
            "string" => Some("a text".to_string()),
            "integer" => Some(format!("a whole number{}", range(schema))),
            "number" => Some(format!("a number{}", range(schema))),
            "boolean" => Some("`true` or `false`".into()),
            "array" => Some("a list".into()),
            "object" => Some(format!("a mapping{}", listed(schema))),
            _ => None,
        });
        found.extend(words);
    });
    for word in found {
        if !out.contains(&word) {
            out.push(word);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_value_is_named_with_what_may_stand_there() {
        let content = json!({"name": {"a": 1}, "generate": {"max_tokens": [1], "stop": {}}, "input": {"columns": [[2]], "format": [3]},
            "deterministic": "wrong", "shards": "x".repeat(100)});
        for (path, message) in [
            ("name", "`name` is a mapping, not a text"),
            (
                "generate.max_tokens",
                "`generate.max_tokens` is a list, not a whole number from 1 to 1048576",
            ),
            ("input.columns[0]", "`input.columns[0]` is a list, not a text"),
            ("deterministic", "`deterministic` is `wrong`, not `true` or `false`"),
            ("generate.stop", "`generate.stop` is a mapping, not a text or a list"),
        ] {
            assert_eq!(wrong_type(path, &content).as_deref(), Some(message));
        }
        let formats = wrong_type("input.format", &content).unwrap();
        assert!(formats.contains("`parquet`") && formats.contains(" or `"), "{formats}");
        let long = wrong_type("shards", &content).unwrap();
        assert!(
            long.ends_with("x…`, not a mapping of `rows`") && long.len() < 100,
            "{long}"
        );
        assert_eq!(wrong_type("no.such.field", &content), None);
    }

    #[test]
    fn what_fits_no_alternative_is_named_by_its_wrong_part() {
        let content = json!({"input": {"uri": 5}, "output": {"carry": ["a", 5]}, "generate": {"thinking": {"max_tokens": "a"}, "seed": -1},
            "shards": 100});
        let other = json!({"generate": {"thinking": {"end_test": "a"}}, "prompt": {"messages": [{"content": [5]}]}});
        for (path, line) in [
            (
                "generate.thinking",
                "unknown field `end_test` in `generate.thinking`; did you mean `end_text`?",
            ),
            (
                "prompt.messages[0].content",
                "`prompt.messages[0].content[0]` is `5`, not a mapping of `type`, `text`",
            ),
        ] {
            assert_eq!(no_alternative(path, &other, "expected it").as_deref(), Some(line));
        }
        for (path, line) in [
            ("input.uri", "`input.uri` is `5`: expected it"),
            ("output.carry", "`output.carry[1]` is `5`, not a text"),
            (
                "generate.thinking",
                "`generate.thinking.max_tokens` is `a`, not a whole number from 0 to 1048576",
            ),
        ] {
            assert_eq!(no_alternative(path, &content, "expected it").as_deref(), Some(line));
        }
        for (path, line) in [
            (
                "generate.seed",
                "`generate.seed` is `-1`, not a whole number from 0 to 18446744073709551615",
            ),
            (
                "shards",
                "`shards` is `100`, not a mapping of `rows`: write `shards: {rows: 100}`",
            ),
        ] {
            assert_eq!(wrong_type(path, &content).as_deref(), Some(line));
        }
    }
}
