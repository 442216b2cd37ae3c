//! Rewrites llguidance's refusals of a JSON Schema in the schema's terms: the keyword, its
//! location, and what to do.

use serde_json::{Map, Value};

use crate::engine::constraint::subschemas::SubSchemas;

/// The message for llguidance's `message` about `schema`; `None` if the refusal cannot be located.
pub(super) fn placed(message: &str, schema: &Value) -> Option<String> {
    let subschemas = SubSchemas::of(schema);
    let find = |fits: &dyn Fn(&Map<String, Value>) -> bool| {
        let (number, members) = subschemas.iter().find(|(_, members)| fits(members))?;
        Some((subschemas.json_pointer(number), members))
    };
    let is = |members: &Map<String, Value>, keyword: &str, text: &str| match members.get(keyword) {
        Some(Value::Array(all)) => all.iter().any(|one| one == text),
        Some(one) => one == text,
        None => false,
    };
    if let Some((_, rest)) = message.split_once("Unimplemented keys: ") {
        let keys: Vec<String> = serde_json::from_str(&rest[..=rest.find(']')?]).ok()?;
        let (place, members) = find(&|members| keys.iter().any(|key| members.contains_key(key)))?;
        let there: Vec<String> = keys
            .iter()
            .filter(|key| members.contains_key(*key))
            .map(|key| format!("`{key}`"))
            .collect();
        let (verb, it) = if there.len() == 1 {
            ("is", "it")
        } else {
            ("are", "them")
        };
        return Some(format!(
            "it has {} at {place}, which {verb} not supported: leave {it} out, and check the answers against {it} afterwards",
            there.join(" and ")
        ));
    }
    if let Some((_, format)) = message.split_once("Unknown format: ") {
        let (place, _) = find(&|members| is(members, "format", format))?;
        return Some(format!(
            "it has the `format` `{format}` at {place}, which is unknown: leave it out, or use a `pattern`"
        ));
    }
    if let Some((_, kind)) = message.split_once("Invalid type: ") {
        let (place, _) = find(&|members| is(members, "type", kind))?;
        return Some(format!(
            "it has the `type` `{kind}` at {place}; types are `string`, `number`, `integer`, `boolean`, `object`, `array` and `null`"
        ));
    }
    let (_, name) = message
        .split_once(" not found in '")
        .or_else(|| message.split_once("; ref '"))?;
    let name = name.split('\'').next()?;
    let (place, _) = find(&|members| is(members, "$ref", name))?;
    Some(if name.starts_with("#/") {
        format!("its `$ref` at {place} names `{name}`, which does not exist")
    } else {
        format!(
            "its `$ref` at {place} names `{name}`: a `$ref` can only point into the same schema, as in `#/$defs/NAME`"
        )
    })
}
