//! Regular expressions of a tokenizer are tried on texts that make slow ones slow.
//!
//! An expression that takes the square of a text's length, or an exponential of it, does so where a part of it repeats. The texts repeat what
//! expressions commonly match, and the expression's own characters. Every search has limits besides (see `guarded`).

use std::time::{Duration, Instant};

use onig::Regex;
use serde_json::Value;

use super::super::guarded::guarded;
use super::super::stream::Matches;
use super::most;

/// Longest regular expression, in bytes.
const EXPRESSION_BYTES_MAX: usize = 16 << 10;
/// A text of so many bytes takes about a millisecond. One that takes longer than this is tried again at
const SHORT: (usize, Duration) = (4 << 10, Duration::from_millis(20));
/// four times the length, where it must take no longer than this.
const LONG: (usize, Duration) = (16 << 10, Duration::from_millis(400));
/// Most texts that are repeated.
const UNITS_MAX: usize = 32;

/// Refuses expressions, at any depth, that take longer than the text is long.
pub(super) fn check_expressions(part: &Value) -> Result<(), String> {
    match part {
        Value::Object(fields) => {
            if let Some(expression) = fields.get("Regex").and_then(Value::as_str) {
                check_expression(expression)?;
            }
            fields.values().try_for_each(check_expressions)
        }
        Value::Array(items) => items.iter().try_for_each(check_expressions),
        _ => Ok(()),
    }
}

fn check_expression(expression: &str) -> Result<(), String> {
    most("bytes in an expression", expression.len(), EXPRESSION_BYTES_MAX)?;
    // What is no expression, the library says in its own words.
    let Ok(regex) = Regex::new(expression) else {
        return Ok(());
    };
    let mut units: Vec<String> = [
        "a", "A", "0", " ", "\n", "\r\n", ".", "'", "\u{E9}", "\u{4E2D}", "\u{301}", "a ", "aB", " \n",
    ]
    .map(String::from)
    .to_vec();
    let own = expression.chars().filter(|c| !r"\()[]{}|?*+^$".contains(*c));
    for unit in own.map(String::from) {
        if units.len() < UNITS_MAX && !units.contains(&unit) {
            units.push(unit);
        }
    }
    for unit in &units {
        for end in ["", "!", "z"] {
            let takes = |bytes: usize| -> Result<Duration, String> {
                let text = unit.repeat(bytes / unit.len()) + end;
                let begin = Instant::now();
                guarded("its expression", || {
                    let mut matches = Matches::new(&regex, &text);
                    while matches.next()?.is_some() && begin.elapsed() < Duration::from_secs(1) {}
                    Ok(())
                })?;
                Ok(begin.elapsed())
            };
            let is_slow = takes(SHORT.0)? > SHORT.1 && takes(LONG.0)? > LONG.1;
            if is_slow {
                let shown: String = expression.chars().take(60).collect();
                return Err(format!(
                    "its expression {shown:?} takes far longer than a text is long: over {} ms for {} bytes of {unit:?}",
                    LONG.1.as_millis(),
                    LONG.0
                ));
            }
        }
    }
    Ok(())
}
