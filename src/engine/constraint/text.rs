//! Comparison of shapes, and shortening of messages.

use serde_json::Value;

use crate::engine::params::OutputConstraint;

/// Maximum characters of an external message or text that an error repeats.
pub(super) const QUOTED_CHARS_MAX: usize = 300;

/// Whether two shapes are the same. The order of a schema's members counts, since it is the order
/// of the output.
pub(super) fn same_shape(a: &OutputConstraint, b: &OutputConstraint) -> bool {
    match (a, b) {
        (OutputConstraint::JsonSchema(a), OutputConstraint::JsonSchema(b)) => same_json(a, b),
        _ => a == b,
    }
}

/// Equality that includes the order of members, without recursion.
fn same_json(a: &Value, b: &Value) -> bool {
    let mut stack = vec![(a, b)];
    while let Some(pair) = stack.pop() {
        match pair {
            (Value::Array(a), Value::Array(b)) if a.len() == b.len() => stack.extend(a.iter().zip(b)),
            (Value::Object(a), Value::Object(b)) if a.len() == b.len() && a.keys().eq(b.keys()) => {
                stack.extend(a.values().zip(b.values()));
            }
            (Value::Array(_) | Value::Object(_), _) => return false,
            (a, b) if a == b => {}
            _ => return false,
        }
    }
    true
}

/// An external message on one line, shortened, without the state dumps that llguidance puts between
/// angle brackets.
pub(super) fn one_line(message: &str) -> String {
    let lines = message.lines().map(str::trim).take_while(|line| !line.starts_with('<'));
    let words: Vec<&str> = lines
        .flat_map(str::split_whitespace)
        .filter(|word| !word.trim_matches('^').is_empty())
        .collect();
    let line = words.join(" ");
    match line.char_indices().nth(QUOTED_CHARS_MAX) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None if line.is_empty() => "no reason given".to_string(),
        None => line.trim_end_matches('.').to_string(),
    }
}
