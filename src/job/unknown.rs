//! Messages about an unknown field of a job file, with its path and a similar known field.

use serde_json::Value;

use super::file::JobFile;
use super::suggest;
use super::wanted::alternatives;

/// Maximum nesting of mappings that is searched.
const DEPTH_MAX: usize = 12;

/// The field's name in serde's message about an unknown field.
pub(super) fn unknown_field(message: &str) -> Option<&str> {
    message.strip_prefix("unknown field `")?.split('`').next()
}

/// The message about an unknown field; `content` is the job file's.
pub(super) fn unknown_message(field: &str, content: &Value) -> String {
    let schema = JobFile::schema();
    let root = schema.clone();
    match find_unknown(field, content, &schema, &root, "") {
        Some((path, known)) => {
            let path = if path.is_empty() {
                String::new()
            } else {
                format!(" in `{path}`")
            };
            let suggestion = suggest(field, known.iter().map(String::as_str));
            let other_mappings = mappings_with_field(field, &schema, &root, "", 0);
            let hint = if other_mappings.is_empty() || suggestion.contains("did you mean") {
                suggestion
            } else {
                format!("; it is a field of `{}`", other_mappings.join("`, `"))
            };
            format!("unknown field `{field}`{path}{hint}")
        }
        None => format!("unknown field `{field}`"),
    }
}

/// Paths of all mappings in the schema that have this field.
fn mappings_with_field(field: &str, schema: &Value, root: &Value, path: &str, depth: usize) -> Vec<String> {
    if depth > DEPTH_MAX {
        return Vec::new();
    }
    let mut found = Vec::new();
    alternatives(schema, root, 0, &mut |schema| {
        let fields = schema.get("properties").and_then(Value::as_object);
        for (name, schema) in fields.into_iter().flatten() {
            if name == field && !path.is_empty() {
                found.push(path.to_string());
            }
            found.extend(mappings_with_field(
                field,
                schema,
                root,
                &child_path(path, name),
                depth + 1,
            ));
        }
    });
    found
}

/// The path of the field `field` in the mapping at `path`.
fn child_path(path: &str, field: &str) -> String {
    match path {
        "" => field.to_string(),
        path => format!("{path}.{field}"),
    }
}

/// Walks content and schema together, and finds the object that has the field `field` although its
/// schema does not. Returns the object's path and the fields that its schema allows.
fn find_unknown(
    field: &str,
    content: &Value,
    schema: &Value,
    root: &Value,
    path: &str,
) -> Option<(String, Vec<String>)> {
    if let Some(target) = schema.get("$ref").and_then(Value::as_str) {
        let target = root.pointer(target.strip_prefix('#')?)?;
        return find_unknown(field, content, target, root, path);
    }
    for alternative in schema.get("anyOf").and_then(Value::as_array).into_iter().flatten() {
        if let Some(found) = find_unknown(field, content, alternative, root, path) {
            return Some(found);
        }
    }
    match content {
        Value::Object(map) => {
            let known = schema.get("properties")?.as_object()?;
            if map.contains_key(field) && !known.contains_key(field) && schema["additionalProperties"] == false {
                return Some((path.to_string(), known.keys().cloned().collect()));
            }
            map.iter()
                .find_map(|(key, value)| find_unknown(field, value, known.get(key)?, root, &child_path(path, key)))
        }
        Value::Array(items) => {
            let schema = schema.get("items")?;
            items
                .iter()
                .enumerate()
                .find_map(|(i, item)| find_unknown(field, item, schema, root, &format!("{path}[{i}]")))
        }
        _ => None,
    }
}
