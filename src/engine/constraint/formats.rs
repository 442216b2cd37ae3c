//! Bounds the digits of formats that allow any number of them: fractions of seconds, and the
//! numbers of durations.
//!
//! RFC 3339 sets no bound on these digits, and a model that has begun with `.000` may continue with
//! zeros until its tokens run out. Programs that read times read at most nine digits.

use serde_json::{Value, json};

use crate::engine::constraint::subschemas::{BY_NAME, DATA};

/// At most nine digits after a point.
const FRACTION: &str = r"^[^.]*(\.[0-9]{1,9}[^0-9.][^.]*)?$";
/// At most nine digits in a row, and some other character at the end.
const NUMBERS: &str = r"^[^0-9]*([0-9]{1,9}[^0-9]+)*$";

/// Bounds the digits of times and durations, wherever a schema asks for these formats.
pub(super) fn bound_digits(schema: &mut Value) {
    match schema {
        Value::Array(items) => items.iter_mut().for_each(bound_digits),
        Value::Object(members) => {
            let bound = match members.get("format").and_then(Value::as_str) {
                Some("date-time" | "time") => Some(FRACTION),
                Some("duration") => Some(NUMBERS),
                _ => None,
            };
            if let Some(pattern) = bound {
                let all = members.entry("allOf").or_insert_with(|| json!([]));
                if let Value::Array(all) = all {
                    all.push(json!({ "pattern": pattern }));
                }
            }
            for (name, value) in members.iter_mut() {
                match value {
                    Value::Object(named) if BY_NAME.contains(&name.as_str()) => {
                        named.values_mut().for_each(bound_digits);
                    }
                    _ if DATA.contains(&name.as_str()) => {}
                    value => bound_digits(value),
                }
            }
        }
        _ => {}
    }
}
