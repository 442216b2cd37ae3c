//! Misspelt keywords of a JSON Schema.
//!
//! JSON Schema ignores unknown keywords, so that `minlength` would bound nothing, without an error.
//! Unknown keywords that resemble no known keyword are notes of other tools, and are ignored.

use serde_json::Value;

use crate::engine::constraint::subschemas::SubSchemas;

/// The keywords of drafts 4 to 2020-12, and OpenAPI's additions.
const KEYWORDS: [&str; 71] = [
    "$anchor",
    "$comment",
    "$defs",
    "$dynamicAnchor",
    "$dynamicRef",
    "$id",
    "$recursiveAnchor",
    "$recursiveRef",
    "$ref",
    "$schema",
    "$vocabulary",
    "additionalItems",
    "additionalProperties",
    "allOf",
    "anyOf",
    "const",
    "contains",
    "contentEncoding",
    "contentMediaType",
    "contentSchema",
    "default",
    "definitions",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "deprecated",
    "description",
    "discriminator",
    "else",
    "enum",
    "example",
    "examples",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "externalDocs",
    "format",
    "id",
    "if",
    "items",
    "maxContains",
    "maxItems",
    "maxLength",
    "maxProperties",
    "maximum",
    "minContains",
    "minItems",
    "minLength",
    "minProperties",
    "minimum",
    "multipleOf",
    "not",
    "nullable",
    "oneOf",
    "pattern",
    "patternProperties",
    "prefixItems",
    "properties",
    "propertyNames",
    "propertyOrdering",
    "readOnly",
    "required",
    "strict",
    "then",
    "title",
    "type",
    "unevaluatedItems",
    "unevaluatedProperties",
    "uniqueItems",
    "writeOnly",
    "x-guidance",
    "xml",
];
/// Shorter names are a letter away from many words.
const CHARS_MIN: usize = 5;

/// The first keyword that is nearly a known one, for a message behind the field's name.
pub fn misspelt(schema: &Value) -> Option<String> {
    let subschemas = SubSchemas::of(schema);
    subschemas.iter().find_map(|(number, members)| {
        let (name, meant) = members.keys().find_map(|name| Some((name, meant(name)?)))?;
        Some(format!(
            "has `{name}` at {}, which is no keyword of JSON Schema; did you mean `{meant}`?",
            subschemas.json_pointer(number)
        ))
    })
}

/// The known keyword that `name` is nearly; `None` if it is one, or resembles none.
fn meant(name: &str) -> Option<&'static str> {
    if KEYWORDS.contains(&name) {
        return None;
    }
    let plain = |name: &str| name.to_ascii_lowercase().replace(['_', '-'], "");
    let written = plain(name);
    KEYWORDS.into_iter().find(|known| {
        let known = plain(known);
        known == written
            || (written.len() >= CHARS_MIN
                && known.len().abs_diff(written.len()) <= 1
                && strsim::damerau_levenshtein(&known, &written) == 1)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_keyword_that_is_nearly_right_is_told_with_its_place() {
        for (schema, words) in [
            (
                json!({"type": "object", "properties": {"a": {"type": "string", "minlength": 3}}}),
                "has `minlength` at `/properties/a`, which is no keyword of JSON Schema; did you mean `minLength`?",
            ),
            (json!({"type": "string", "max_length": 3}), "did you mean `maxLength`?"),
            (json!({"type": "object", "requried": ["a"]}), "did you mean `required`?"),
            (json!({"items": {"anyof": []}}), "did you mean `anyOf`?"),
        ] {
            let line = misspelt(&schema).unwrap_or_else(|| panic!("{schema}"));
            assert!(line.contains(words), "{line}");
        }
    }

    #[test]
    fn notes_of_other_tools_and_names_of_properties_are_none() {
        for schema in [
            json!({"type": "object", "properties": {"minlength": {"type": "string"}}, "x-order": 1}),
            json!({"$defs": {"requierd": {"type": "string"}}, "examples": [{"tpye": 1}], "nullable": true}),
            json!({"type": "string", "enum": [{"tittle": 1}], "label": "x", "order": 3, "tags": []}),
        ] {
            assert_eq!(misspelt(&schema), None, "{schema}");
        }
    }
}
