//! Bounds the digits of formats that do not limit them: fractions of seconds, and the numbers of
//! durations.
//!
//! RFC 3339 sets no bound on these digits, and a model that has begun with `.000` may continue with
//! zeros until its tokens run out. Programs that read times read at most nine digits.

use serde_json::{Value, json};

use crate::engine::constraint::subschemas::{DATA_KEYWORDS, SCHEMA_MAP_KEYWORDS};

/// At most nine digits after a point.
const FRACTION_PATTERN: &str = r"^[^.]*(\.[0-9]{1,9}[^0-9.][^.]*)?$";
/// At most nine digits in a row, and another character at the end.
const DURATION_PATTERN: &str = r"^[^0-9]*([0-9]{1,9}[^0-9]+)*$";

/// Bounds the digits of times and durations, wherever a schema asks for these formats.
pub(super) fn bound_digits(schema: &mut Value) {
    match schema {
        Value::Array(items) => items.iter_mut().for_each(bound_digits),
        Value::Object(members) => {
            let bound = match members.get("format").and_then(Value::as_str) {
                Some("date-time" | "time") => Some(FRACTION_PATTERN),
                Some("duration") => Some(DURATION_PATTERN),
                _ => None,
            };
            if let Some(pattern) = bound {
                let all_of = members.entry("allOf").or_insert_with(|| json!([]));
                if let Value::Array(all_of) = all_of {
                    all_of.push(json!({ "pattern": pattern }));
                }
            }
            for (name, value) in members.iter_mut() {
                match value {
                    Value::Object(named) if SCHEMA_MAP_KEYWORDS.contains(&name.as_str()) => {
                        named.values_mut().for_each(bound_digits);
                    }
                    _ if DATA_KEYWORDS.contains(&name.as_str()) => {}
                    value => bound_digits(value),
                }
            }
        }
        _ => {}
    }
}
