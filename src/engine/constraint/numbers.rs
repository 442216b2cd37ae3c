//! Numbers that a grammar cannot ask for: llguidance reads them as float64, and the bounds of integers as int64.
//!
//! A constant of 9007199254740993 would make every answer 9007199254740992, which looks as right as the other.

use serde_json::{Map, Number, Value};

/// 2 to the power of 63: the first number above int64.
const ABOVE_INT64: f64 = 9_223_372_036_854_775_808.0;

/// Checks the numbers of one schema's own keywords.
///
/// # Errors
/// One of them would be another in the answers: which one, and what to do.
pub(super) fn check_numbers(members: &Map<String, Value>) -> Result<(), String> {
    let values = [members.get("const"), members.get("enum")];
    let mut stack: Vec<&Value> = values.into_iter().flatten().collect();
    while let Some(value) = stack.pop() {
        match value {
            Value::Array(items) => stack.extend(items),
            Value::Object(members) => stack.extend(members.values()),
            Value::Number(number) if !is_exact(number) => {
                return Err(format!(
                    "its value {number} is no number of 64 bits in floating point, and answers would have the next one: make it a text"
                ));
            }
            _ => {}
        }
    }
    check_bounds(members, ["minimum", "exclusiveMinimum"], 1.0, |least| {
        least >= ABOVE_INT64
    })?;
    check_bounds(members, ["maximum", "exclusiveMaximum"], -1.0, |most| {
        most <= -ABOVE_INT64
    })
}

/// Checks a bound, and the one that its number is no part of, from which the next whole number is a `step` away.
///
/// Which schemas meet, and which of them asks for integers, is known to the compiler alone: so each bound is taken for one of integers.
fn check_bounds(
    members: &Map<String, Value>,
    names: [&str; 2],
    step: f64,
    leaves_none: fn(f64) -> bool,
) -> Result<(), String> {
    let [bound, beyond] = names.map(|name| members.get(name));
    // In draft 4, it says of the other bound that its number is out.
    let (bound, beyond) = match beyond {
        Some(Value::Bool(true)) => (None, bound),
        _ => (bound, beyond),
    };
    for (bound, step) in [(bound, 0.0), (beyond, step)] {
        let (Some(bound), Some(float)) = (bound, bound.and_then(Value::as_f64)) else {
            continue;
        };
        // Of integers they would be cut to int64; and the smallest of these as the one that is left makes the compiler overflow its stack.
        if leaves_none(float) {
            return Err("its bounds leave numbers of more than 64 bits alone".into());
        }
        // As the compiler reckons, to the bit; what it makes of a fraction is right.
        let reckoned = (float + step) as i64;
        if bound
            .as_i64()
            .is_some_and(|whole| i128::from(reckoned) != i128::from(whole) + step as i128)
        {
            return Err(format!(
                "its bound {bound} is no number of 64 bits in floating point, and answers would be held to another one: choose one below \
                 9007199254740992, or an even one"
            ));
        }
    }
    Ok(())
}

/// Below it, each whole number is a float64.
const EXACT_BELOW: f64 = 9_007_199_254_740_992.0;

/// Whether a number stays itself as a float64.
fn is_exact(number: &Number) -> bool {
    let whole = number.as_i64().map(i128::from).or(number.as_u64().map(i128::from));
    match whole {
        Some(whole) => whole as f64 as i128 == whole,
        // A whole number beyond 64 bits has become a float64 while it was read, and nobody knows from which one.
        None => number
            .as_f64()
            .is_some_and(|float| float.fract() != 0.0 || float.abs() < EXACT_BELOW),
    }
}
