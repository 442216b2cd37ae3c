//! Closes the objects of a schema in an OpenAI request: those that list `properties` and say nothing
//! of others allow no others, as the structured outputs of other servers have it.
//!
//! A closed schema allows fewer answers than the client's own, and never another one: whoever checks
//! an answer with the schema that was sent finds it right. So a schema is taken literally if it
//! combines schemas in a way in which closing a part changes what the whole allows, and so is a job
//! file's own schema. An object that needs a property which it does not list is left open.

use serde_json::{Map, Value};

/// Keywords beside which, or below which, an object's properties may be listed elsewhere, or a
/// narrower part makes the whole wider. Of `oneOf`, a narrower branch lets another one hold alone.
const COMBINING: [&str; 10] = [
    "not",
    "if",
    "oneOf",
    "maxContains",
    "dependentSchemas",
    "dependencies",
    "unevaluatedProperties",
    "$dynamicRef",
    "$recursiveRef",
    "extends",
];
/// Keywords that add a schema to the one that they stand in.
const ADDING: [&str; 3] = ["allOf", "anyOf", "$ref"];
/// Keywords that may ask for properties, or say which ones there may be. Beside an added schema,
/// they speak of the properties that it lists.
const OF_PROPERTIES: [&str; 6] = [
    "properties",
    "patternProperties",
    "additionalProperties",
    "required",
    "minProperties",
    "dependentRequired",
];
/// Keywords whose value is one schema, or a list of them.
const SCHEMAS: [&str; 7] = [
    "items",
    "prefixItems",
    "additionalItems",
    "contains",
    "additionalProperties",
    "allOf",
    "anyOf",
];
/// Keywords whose value maps names to schemas.
const MAPS: [&str; 4] = ["properties", "patternProperties", "$defs", "definitions"];

/// The schema with its objects closed, or the schema itself.
pub(super) fn closed(mut schema: Value) -> Value {
    if combines(&schema) {
        return schema;
    }
    close(&mut schema);
    schema
}

/// Whether properties of one object may be listed in several places.
fn combines(schema: &Value) -> bool {
    let Value::Object(keywords) = schema else { return false };
    let has = |name: &str| keywords.contains_key(name);
    let is_conjunction = keywords
        .get("allOf")
        .and_then(Value::as_array)
        .is_some_and(|all| all.len() > 1);
    let adds = ADDING.iter().filter(|name| has(name)).count();
    COMBINING.iter().any(|name| has(name))
        || is_conjunction
        || adds > 1
        || (adds == 1 && OF_PROPERTIES.iter().any(|name| has(name)))
        || parts(keywords).any(combines)
}

fn parts(keywords: &Map<String, Value>) -> impl Iterator<Item = &Value> {
    let single = SCHEMAS.iter().filter_map(|name| keywords.get(*name));
    let single = single.flat_map(|value| match value {
        Value::Array(all) => all.iter().collect(),
        one => vec![one],
    });
    let named = MAPS.iter().filter_map(|name| keywords.get(*name)?.as_object());
    single.chain(named.flat_map(Map::values))
}

fn close(schema: &mut Value) {
    let Value::Object(keywords) = schema else { return };
    for (name, value) in keywords.iter_mut() {
        match value {
            Value::Array(all) if SCHEMAS.contains(&name.as_str()) => all.iter_mut().for_each(close),
            Value::Object(named) if MAPS.contains(&name.as_str()) => named.values_mut().for_each(close),
            one if SCHEMAS.contains(&name.as_str()) => close(one),
            _ => {}
        }
    }
    if lists_all(keywords) {
        keywords.insert("additionalProperties".into(), Value::Bool(false));
    }
}

/// Whether an object may have the properties that it lists and no others, and still be whole.
fn lists_all(keywords: &Map<String, Value>) -> bool {
    let Some(Value::Object(listed)) = keywords.get("properties") else {
        return false;
    };
    let says_more = ["additionalProperties", "patternProperties"]
        .iter()
        .any(|name| keywords.contains_key(*name));
    let dependent = keywords.get("dependentRequired").and_then(Value::as_object);
    let needed = keywords
        .get("required")
        .into_iter()
        .chain(dependent.into_iter().flat_map(Map::values))
        .filter_map(Value::as_array);
    let least = keywords.get("minProperties").and_then(Value::as_f64).unwrap_or(0.0);
    !says_more
        && least <= listed.len() as f64
        && needed
            .flatten()
            .all(|name| name.as_str().is_some_and(|name| listed.contains_key(name)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn objects_that_list_their_properties_are_closed() {
        let one = json!({"type": "object", "properties": {"x": {"type": "string"}}});
        let mut shut = one.clone();
        shut["additionalProperties"] = json!(false);
        for (open, expected) in [
            (one.clone(), shut.clone()),
            (
                json!({"$defs": {"A": one.clone()}, "type": "array", "items": {"$ref": "#/$defs/A"}}),
                json!({"$defs": {"A": shut.clone()}, "type": "array", "items": {"$ref": "#/$defs/A"}}),
            ),
            (
                json!({"anyOf": [one.clone(), {"type": "null"}]}),
                json!({"anyOf": [shut.clone(), {"type": "null"}]}),
            ),
            (
                json!({"allOf": [one.clone()], "title": "t"}),
                json!({"allOf": [shut.clone()], "title": "t"}),
            ),
            (
                json!({"type": "object", "properties": {"properties": one.clone()}}),
                json!({"type": "object", "properties": {"properties": shut.clone()}, "additionalProperties": false}),
            ),
            (
                json!({"type": "object", "properties": {"x": {}}, "required": ["x"], "minProperties": 1}),
                json!({
                    "type": "object", "properties": {"x": {}}, "required": ["x"], "minProperties": 1,
                    "additionalProperties": false,
                }),
            ),
            (
                json!({"prefixItems": [one.clone()], "items": one.clone()}),
                json!({"prefixItems": [shut.clone()], "items": shut.clone()}),
            ),
        ] {
            assert_eq!(closed(open), expected);
        }
    }

    #[test]
    fn what_says_more_is_taken_literally() {
        let one = json!({"type": "object", "properties": {"x": {}}});
        let with = |name: &str, value: Value| {
            let mut schema = one.clone();
            schema[name] = value;
            schema
        };
        for schema in [
            json!({"type": "object"}),
            json!(true),
            with("additionalProperties", json!(true)),
            with("additionalProperties", json!({"type": "string"})),
            with("patternProperties", json!({"^y": {}})),
            with("unevaluatedProperties", json!(false)),
            // Closed, no answer could be whole.
            with("required", json!(["x", "y"])),
            with("dependentRequired", json!({"x": ["y"]})),
            with("minProperties", json!(2)),
            json!({"$defs": {"A": one.clone()}, "$ref": "#/$defs/A", "required": ["y"]}),
            json!({"anyOf": [one.clone()], "minProperties": 2}),
            // Closed, `{"x": 1}` fits the first branch alone; as the client wrote it, it fits both.
            json!({"oneOf": [
                {"type": "object", "properties": {"x": {}}, "required": ["x"]},
                {"type": "object", "properties": {"y": {}}},
            ]}),
            json!({"type": "array", "contains": one.clone(), "maxContains": 1}),
            with("allOf", json!([{"required": ["y"]}])),
            with("anyOf", json!([{"required": ["x"]}, {"required": ["y"]}])),
            with("$ref", json!("#/$defs/y")),
            with("not", json!({"required": ["y"]})),
            with("if", json!({})),
            json!({"allOf": [one.clone(), {"type": "object", "properties": {"y": {}}}]}),
            json!({"enum": [{"properties": {"x": 1}}]}),
            json!({"const": {"properties": {}}, "default": one.clone(), "examples": [one.clone()]}),
            // One place that combines is enough: what it refers to may stand anywhere.
            json!({
                "$defs": {"A": one.clone()},
                "items": {"allOf": [{"$ref": "#/$defs/A"}, {"properties": {"y": {}}}]},
            }),
        ] {
            assert_eq!(closed(schema.clone()), schema);
        }
    }
}
