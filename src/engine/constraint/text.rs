//! Shapes and messages as texts.

use serde_json::Value;

use crate::engine::params::OutputConstraint;

/// Longest part of a foreign message or text that an error repeats, in characters.
pub(super) const QUOTED_CHARS_MAX: usize = 300;

/// Are these the same, the order of members in a schema (which is the order of the output) included?
pub(super) fn same_shape(a: &OutputConstraint, b: &OutputConstraint) -> bool {
    match (a, b) {
        (OutputConstraint::JsonSchema(a), OutputConstraint::JsonSchema(b)) => same_json(a, b),
        _ => a == b,
    }
}

/// Equality that minds the order of members, without recursion.
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

/// A foreign message on one line and not too long, without the state dumps that llguidance puts between angle brackets.
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
