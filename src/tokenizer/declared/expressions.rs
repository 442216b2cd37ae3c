//! Tests a tokenizer's regular expressions on texts that provoke slow matching.
//!
//! An expression whose time grows with the square of a text's length, or exponentially, shows this
//! on repetitive texts. The test texts repeat characters that expressions commonly match, and the
//! expression's own characters. All searches have limits besides (see `guarded`).

use std::time::{Duration, Instant};

use onig::Regex;
use serde_json::Value;

use super::super::guarded::limit_searches;
use super::super::stream::Matches;
use super::check_max;

/// Maximum number of regular expressions, and maximum length of one in bytes.
const EXPRESSIONS_MAX: usize = 64;
const EXPRESSION_BYTES_MAX: usize = 16 << 10;
/// Length of the first test text, and its time limit. The text normally needs well under a
/// millisecond. A slower expression is tested again with [`LONG`].
const SHORT: (usize, Duration) = (2 << 10, Duration::from_millis(8));
/// Eight times the length of the first test text, and the time limit that must hold.
const LONG: (usize, Duration) = (16 << 10, Duration::from_millis(400));
/// Maximum number of texts that are repeated.
const UNITS_MAX: usize = 32;

/// Refuses regular expressions in these parts, at any depth, that are too slow for their text's
/// length.
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
    // An invalid expression is refused later, by the tokenizers library.
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
    for text in units.iter().flat_map(|unit| [(unit, ""), (unit, "!")]) {
        // Measured twice, since other work on the machine may have slowed the first run.
        let is_slow = || Ok::<_, String>(takes(&regex, text, LONG.0)? > LONG.1);
        let why = match takes(&regex, text, SHORT.0) {
            Ok(time) if time > SHORT.1 => is_slow().and_then(|slow| Ok(slow && is_slow()?)),
            done => done.map(|_| false),
        };
        if why != Ok(false) {
            let shown: String = expression.chars().take(60).collect();
            let how = why
                .err()
                .unwrap_or_else(|| format!("takes over {} ms for {} of them", LONG.1.as_millis(), LONG.0));
            return Err(format!(
                "its expression {shown:?} is too slow for texts of {:?}: it {how}",
                text.0
            ));
        }
    }
    Ok(())
}

/// The time to find all matches in a text of `bytes` bytes that repeats `unit` and ends with `end`.
fn takes(regex: &Regex, (unit, end): (&String, &str), bytes: usize) -> Result<Duration, String> {
    let text = unit.repeat(bytes / unit.len()) + end;
    let begin = Instant::now();
    let mut matches = Matches::new(regex, &text);
    loop {
        match matches.next() {
            Ok(Some(_)) if begin.elapsed() < 2 * LONG.1 => {}
            Ok(_) => return Ok(begin.elapsed()),
            Err(_) => return Err("gives up".into()),
        }
    }
}
