//! Misspelt keywords of a JSON Schema.
//!
//! JSON Schema ignores unknown keywords, so `minlength` would have no effect and cause no error.
//! Unknown keywords that resemble no known keyword are annotations of other tools, and are ignored.

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
/// Minimum length of a name that is compared: shorter names are one letter away from many words.
const CHECKED_CHARS_MIN: usize = 5;

/// Describes the first keyword that is nearly a known keyword, if there is one. The text continues
/// a message that begins with the field's name.
pub fn misspelt_keyword(schema: &Value) -> Option<String> {
    let subschemas = SubSchemas::of(schema);
    subschemas.iter().find_map(|(number, members)| {
        let (name, meant) = members.keys().find_map(|name| Some((name, intended_keyword(name)?)))?;
        Some(format!(
            "has `{name}` at {}, which is no keyword of JSON Schema; did you mean `{meant}`?",
            subschemas.json_pointer(number)
        ))
    })
}

/// The known keyword that `name` resembles. `None` if `name` is itself known, or resembles none.
fn intended_keyword(name: &str) -> Option<&'static str> {
    if KEYWORDS.contains(&name) {
        return None;
    }
    let normalize = |name: &str| name.to_ascii_lowercase().replace(['_', '-'], "");
    let normalized = normalize(name);
    KEYWORDS.into_iter().find(|known| {
        let known = normalize(known);
        known == normalized
            || (normalized.len() >= CHECKED_CHARS_MIN
                && known.len().abs_diff(normalized.len()) <= 1
                && strsim::damerau_levenshtein(&known, &normalized) == 1)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn misspelt_keywords_are_reported_with_their_location() {
        for (schema, words) in [
            (
                json!({"type": "object", "properties": {"a": {"type": "string", "minlength": 3}}}),
                "has `minlength` at `/properties/a`, which is no keyword of JSON Schema; did you mean `minLength`?",
            ),
            (json!({"type": "string", "max_length": 3}), "did you mean `maxLength`?"),
            (json!({"type": "object", "requried": ["a"]}), "did you mean `required`?"),
            (json!({"items": {"anyof": []}}), "did you mean `anyOf`?"),
        ] {
            let line = misspelt_keyword(&schema).unwrap_or_else(|| panic!("{schema}"));
            assert!(line.contains(words), "{line}");
        }
    }

    #[test]
    fn unknown_keywords_and_property_names_are_accepted() {
        for schema in [
            json!({"type": "object", "properties": {"minlength": {"type": "string"}}, "x-order": 1}),
            json!({"$defs": {"requierd": {"type": "string"}}, "examples": [{"tpye": 1}], "nullable": true}),
            json!({"type": "string", "enum": [{"tittle": 1}], "label": "x", "order": 3, "tags": []}),
        ] {
            assert_eq!(misspelt_keyword(&schema), None, "{schema}");
        }
    }
}
