//! Tests a tokenizer's regular expressions on texts that provoke slow matching.
//!
//! An expression whose time grows with the square of a text's length, or exponentially, is slow on
//! repetitive texts. The test texts repeat characters that expressions commonly match, and the
//! expression's own characters. In addition, all searches have limits (see `guarded`).

use std::time::{Duration, Instant};

use onig::Regex;
use serde_json::Value;

use super::super::guarded::limit_searches;
use super::super::stream::Matches;
use super::check_max;

/// Maximum number of regular expressions, and maximum length of one in bytes.
const EXPRESSIONS_MAX: usize = 64;
const EXPRESSION_BYTES_MAX: usize = 16 << 10;
/// A test: the length of its text, and the time limit of the search for all matches.
struct Trial {
    text_bytes: usize,
    limit: Duration,
}

/// The first test, which normally needs well under a millisecond. A slower expression is tested
/// again with [`LONG`].
const SHORT: Trial = Trial {
    text_bytes: 2 << 10,
    limit: Duration::from_millis(8),
};
/// The test that decides.
const LONG: Trial = Trial {
    text_bytes: 16 << 10,
    limit: Duration::from_millis(400),
};
/// Maximum number of units, the texts that are repeated.
const UNITS_MAX: usize = 32;

/// Refuses regular expressions in these parts, at any depth, that are too slow.
pub(super) fn check_expressions(parts: &[&Value]) -> Result<(), String> {
    let mut expressions = Vec::new();
    parts.iter().for_each(|part| collect(part, &mut expressions));
    check_max("expressions", expressions.len(), EXPRESSIONS_MAX)?;
    limit_searches();
    expressions.into_iter().try_for_each(check_expression)
}

fn collect<'a>(part: &'a Value, expressions: &mut Vec<&'a str>) {
    match part {
        Value::Object(fields) => {
            expressions.extend(fields.get("Regex").and_then(Value::as_str));
            fields.values().for_each(|value| collect(value, expressions));
        }
        Value::Array(items) => items.iter().for_each(|item| collect(item, expressions)),
        _ => {}
    }
}

fn check_expression(expression: &str) -> Result<(), String> {
    check_max("bytes in an expression", expression.len(), EXPRESSION_BYTES_MAX)?;
    // The tokenizers library refuses an invalid expression later.
    let Ok(regex) = Regex::new(expression) else {
        return Ok(());
    };
    let mut units: Vec<String> = [
        "a", "A", "0", " ", "\n", "\r\n", ".", "'", "\u{E9}", "\u{4E2D}", "\u{301}", "a ", "aB", " \n",
    ]
    .map(String::from)
    .to_vec();
    let own_chars = expression.chars().filter(|c| !r"\()[]{}|?*+^$".contains(*c));
    for unit in own_chars.map(String::from) {
        if units.len() < UNITS_MAX && !units.contains(&unit) {
            units.push(unit);
        }
    }
    for (unit, end) in units.iter().flat_map(|unit| [(unit, ""), (unit, "!")]) {
        // The long test runs twice, since other work on the machine may have slowed the first run.
        let exceeds = |trial: &Trial| Ok::<_, String>(search_time(&regex, unit, end, trial.text_bytes)? > trial.limit);
        let is_too_slow = exceeds(&SHORT).and_then(|slow| Ok(slow && exceeds(&LONG)? && exceeds(&LONG)?));
        if is_too_slow != Ok(false) {
            let shown: String = expression.chars().take(60).collect();
            let reason = is_too_slow
                .err()
                .unwrap_or_else(|| format!("takes over {} ms for {} bytes", LONG.limit.as_millis(), LONG.text_bytes));
            return Err(format!(
                "its expression {shown:?} is too slow: a search in a text that repeats {unit:?} {reason}"
            ));
        }
    }
    Ok(())
}

/// The time to find all matches in a text of `text_bytes` bytes that repeats `unit` and ends with
/// `end`. The search stops at twice the limit of [`LONG`].
fn search_time(regex: &Regex, unit: &str, end: &str, text_bytes: usize) -> Result<Duration, String> {
    let text = unit.repeat(text_bytes / unit.len()) + end;
    let begin = Instant::now();
    let mut matches = Matches::new(regex, &text);
    loop {
        match matches.next() {
            Ok(Some(_)) if begin.elapsed() < 2 * LONG.limit => {}
            Ok(_) => return Ok(begin.elapsed()),
            Err(_) => return Err("gives up".into()),
        }
    }
}
