//! Messages about a value of the wrong type in a job file, with its path and the types that the
//! schema allows.

use serde_json::Value;

use super::file::JobFile;
use super::unknown::unknown_message;

/// Maximum length of a value in a message, in characters.
const SHOWN_CHARS_MAX: usize = 40;
/// Maximum nesting of alternatives that is searched.
const DEPTH_MAX: usize = 8;
/// Maximum number of fields of a mapping that a message lists.
const FIELDS_MAX: usize = 8;

/// The message about a value of the wrong type at `path`, in one line; `None` if the schema has no
/// such field, or allows any value there.
pub(super) fn wrong_type_message(path: &str, content: &Value) -> Option<String> {
    let schema = JobFile::schema();
    let mut allowed = Vec::new();
    for schema_at_path in schemas_at(path, &schema) {
        add_type_names(schema_at_path, &schema, 0, &mut allowed);
    }
    let is_single_type = allowed.len() == 1;
    let last = allowed.pop()?;
    let allowed = if allowed.is_empty() {
        last
    } else {
        format!("{} or {last}", allowed.join(", "))
    };
    let value = content.pointer(&json_pointer(path));
    let found = value.map_or("missing".into(), shown_value);
    let advice = match (only_field(path, &schema), value) {
        (Some(field), Some(Value::Number(number))) if is_single_type => {
            format!(": write `{path}: {{{field}: {number}}}`")
        }
        _ => String::new(),
    };
    Some(format!("`{path}` is {found}, not {allowed}{advice}"))
}

/// The message about a value at `path` that fits no alternative of its type; `expecting` describes
/// the alternatives. If a part of the value is wrong in every alternative, the message is about that
/// part.
pub(super) fn no_alternative_message(path: &str, content: &Value, expecting: &str) -> Option<String> {
    let value = content.pointer(&json_pointer(path))?;
    let parts: Vec<String> = match value {
        Value::Array(items) => (0..items.len()).map(|index| format!("{path}[{index}]")).collect(),
        Value::Object(fields) => fields.keys().map(|key| format!("{path}.{key}")).collect(),
        _ => Vec::new(),
    };
    let schema = JobFile::schema();
    let unknown = |field: &&String| schemas_at(&format!("{path}.{field}"), &schema).is_empty();
    if let Some(field) = value.as_object().and_then(|fields| fields.keys().find(unknown)) {
        return Some(unknown_message(field, content));
    }
    let wrong = parts.iter().find(|part| {
        let (part, value) = (schemas_at(part, &schema), content.pointer(&json_pointer(part)));
        !part.is_empty() && value.is_some_and(|value| !part.iter().any(|part| is_of_type(value, part, &schema)))
    });
    if let Some(line) = wrong.and_then(|part| wrong_type_message(part, content)) {
        return Some(line);
    }
    Some(format!("`{path}` is {}: {expecting}", shown_value(value)))
}

/// Whether `schema` or one of its alternatives has the value's type. A schema without a type allows
/// any type.
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

/// The field's name, if the schema at `path` allows only mappings with a single field.
fn only_field(path: &str, root: &Value) -> Option<String> {
    let mut fields = Vec::new();
    for schema_at_path in schemas_at(path, root) {
        alternatives(schema_at_path, root, 0, &mut |schema| fields.extend(fields_of(schema)));
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

/// Converts a path such as `a.b[0]` to a JSON pointer.
pub(super) fn json_pointer(path: &str) -> String {
    format!("/{}", path.replace(['.', '['], "/").replace(']', ""))
}

fn shown_value(value: &Value) -> String {
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

/// The schemas of the values at `path`: several if a field on the path has alternatives.
fn schemas_at<'a>(path: &str, root: &'a Value) -> Vec<&'a Value> {
    let pointer = json_pointer(path);
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
                // The schemas `false` and `true` describe no type.
                below.extend(next.filter(|next| next.is_object()));
            });
        }
        found = below;
    }
    found
}

/// Calls `visit` for `schema`, its references and its alternatives.
pub(super) fn alternatives<'a>(schema: &'a Value, root: &'a Value, depth: usize, visit: &mut dyn FnMut(&'a Value)) {
    if depth > DEPTH_MAX {
        return;
    }
    visit(schema);
    let target = schema.get("$ref").and_then(Value::as_str);
    let target = target.and_then(|target| root.pointer(target.strip_prefix('#')?));
    let lists = ["anyOf", "oneOf", "allOf"].map(|word| schema.get(word).and_then(Value::as_array));
    for one in target.into_iter().chain(lists.into_iter().flatten().flatten()) {
        alternatives(one, root, depth + 1, visit);
    }
}

/// The range of numbers that a schema allows, for messages.
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

/// The fields that a mapping may have, for messages; empty if there are many.
fn field_list(schema: &Value) -> String {
    let fields: Vec<String> = fields_of(schema).map(|field| format!("`{field}`")).collect();
    match fields.len() {
        1..=FIELDS_MAX => format!(" of {}", fields.join(", ")),
        _ => String::new(),
    }
}

/// Adds the types that `schema` allows, for messages, to `out`.
fn add_type_names(schema: &Value, root: &Value, depth: usize, out: &mut Vec<String>) {
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
            "object" => Some(format!("a mapping{}", field_list(schema))),
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
    fn messages_name_the_allowed_types() {
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
            assert_eq!(wrong_type_message(path, &content).as_deref(), Some(message));
        }
        let formats = wrong_type_message("input.format", &content).unwrap();
        assert!(formats.contains("`parquet`") && formats.contains(" or `"), "{formats}");
        let long = wrong_type_message("shards", &content).unwrap();
        assert!(
            long.ends_with("x…`, not a mapping of `rows`") && long.len() < 100,
            "{long}"
        );
        assert_eq!(wrong_type_message("no.such.field", &content), None);
    }

    #[test]
    fn messages_name_the_part_that_fits_no_alternative() {
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
            assert_eq!(
                no_alternative_message(path, &other, "expected it").as_deref(),
                Some(line)
            );
        }
        for (path, line) in [
            ("input.uri", "`input.uri` is `5`: expected it"),
            ("output.carry", "`output.carry[1]` is `5`, not a text"),
            (
                "generate.thinking",
                "`generate.thinking.max_tokens` is `a`, not a whole number from 0 to 1048576",
            ),
        ] {
            assert_eq!(
                no_alternative_message(path, &content, "expected it").as_deref(),
                Some(line)
            );
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
            assert_eq!(wrong_type_message(path, &content).as_deref(), Some(line));
        }
    }
}
