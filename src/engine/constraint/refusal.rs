//! Rewrites llguidance's refusals of a JSON Schema in the schema's terms: the keyword, its
//! location, and a remedy.

use serde_json::{Map, Value};

use crate::engine::constraint::subschemas::SubSchemas;

/// The message for llguidance's `message` about `schema`; `None` if the refusal cannot be located.
pub(super) fn located_refusal(message: &str, schema: &Value) -> Option<String> {
    let subschemas = SubSchemas::of(schema);
    let find = |matches: &dyn Fn(&Map<String, Value>) -> bool| {
        let (index, members) = subschemas.iter().find(|(_, members)| matches(members))?;
        Some((subschemas.json_pointer(index), members))
    };
    let has_value = |members: &Map<String, Value>, keyword: &str, text: &str| match members.get(keyword) {
        Some(Value::Array(values)) => values.iter().any(|value| value == text),
        Some(value) => value == text,
        None => false,
    };
    if let Some((_, rest)) = message.split_once("Unimplemented keys: ") {
        let keys: Vec<String> = serde_json::from_str(&rest[..=rest.find(']')?]).ok()?;
        let (location, members) = find(&|members| keys.iter().any(|key| members.contains_key(key)))?;
        let present: Vec<String> = keys
            .iter()
            .filter(|key| members.contains_key(*key))
            .map(|key| format!("`{key}`"))
            .collect();
        let (verb, pronoun) = if present.len() == 1 {
            ("is", "it")
        } else {
            ("are", "them")
        };
        return Some(format!(
            "it has {} at {location}, which {verb} not supported: leave {pronoun} out, and check the answers against {pronoun} afterwards",
            present.join(" and ")
        ));
    }
    if let Some((_, format)) = message.split_once("Unknown format: ") {
        let (location, _) = find(&|members| has_value(members, "format", format))?;
        return Some(format!(
            "it has the `format` `{format}` at {location}, which is unknown: leave it out, or use a `pattern`"
        ));
    }
    if let Some((_, kind)) = message.split_once("Invalid type: ") {
        let (location, _) = find(&|members| has_value(members, "type", kind))?;
        return Some(format!(
            "it has the `type` `{kind}` at {location}; types are `string`, `number`, `integer`, `boolean`, `object`, `array` and `null`"
        ));
    }
    let (_, name) = message
        .split_once(" not found in '")
        .or_else(|| message.split_once("; ref '"))?;
    let name = name.split('\'').next()?;
    let (location, _) = find(&|members| has_value(members, "$ref", name))?;
    Some(if name.starts_with("#/") {
        format!("its `$ref` at {location} names `{name}`, which does not exist")
    } else {
        format!(
            "its `$ref` at {location} names `{name}`: a `$ref` can only point into the same schema, as in `#/$defs/NAME`"
        )
    })
}
