//! Refuses numbers that llguidance would change: it reads numbers as float64, and the bounds of
//! integers as int64.
//!
//! A constant of 9007199254740993 would make every answer 9007199254740992, and nothing in the
//! output would show the error.

use serde_json::{Map, Number, Value};

/// 2^63: the first number above int64.
const ABOVE_INT64: f64 = 9_223_372_036_854_775_808.0;

/// Checks the numbers in one schema's own keywords.
///
/// # Errors
/// A number would be changed in the answers. The error names the number and a remedy.
pub(super) fn check_numbers(members: &Map<String, Value>) -> Result<(), String> {
    let values = [members.get("const"), members.get("enum")];
    let mut stack: Vec<&Value> = values.into_iter().flatten().collect();
    while let Some(value) = stack.pop() {
        match value {
            Value::Array(items) => stack.extend(items),
            Value::Object(members) => stack.extend(members.values()),
            Value::Number(number) if !is_exact(number) => {
                return Err(format!(
                    "its value {number} has no exact 64-bit floating-point form, and answers would hold the nearest one: write it as a string"
                ));
            }
            _ => {}
        }
    }
    check_bounds(members, ["minimum", "exclusiveMinimum"], 1.0, |minimum| {
        minimum >= ABOVE_INT64
    })?;
    check_bounds(members, ["maximum", "exclusiveMaximum"], -1.0, |maximum| {
        maximum <= -ABOVE_INT64
    })
}

/// Checks an inclusive and an exclusive bound. `step` is the distance from an exclusive bound that
/// is a whole number to the nearest whole number that it allows: 1 or −1.
///
/// Only the compiler knows which schemas are combined, and whether one of them requires integers.
/// So every bound is checked as a bound of integers.
fn check_bounds(
    members: &Map<String, Value>,
    names: [&str; 2],
    step: f64,
    is_out_of_range: fn(f64) -> bool,
) -> Result<(), String> {
    let [bound, exclusive] = names.map(|name| members.get(name));
    // In draft 4, `"exclusiveMinimum": true` makes `minimum` exclusive; likewise for the maximum.
    let (bound, exclusive) = match exclusive {
        Some(Value::Bool(true)) => (None, bound),
        _ => (bound, exclusive),
    };
    for (bound, step) in [(bound, 0.0), (exclusive, step)] {
        let (Some(bound), Some(float)) = (bound, bound.and_then(Value::as_f64)) else {
            continue;
        };
        // For integers, the compiler would clamp these bounds to int64. If only the smallest int64
        // is left, the compiler overflows its stack.
        if is_out_of_range(float) {
            return Err("its bounds allow only numbers that have no 64-bit floating-point form".into());
        }
        // This repeats the compiler's computation bit for bit. Bounds with a fraction need no
        // check.
        let computed = (float + step) as i64;
        if bound
            .as_i64()
            .is_some_and(|whole| i128::from(computed) != i128::from(whole) + step as i128)
        {
            return Err(format!(
                "its bound {bound} has no exact 64-bit floating-point form, so another bound would apply: choose one below \
                 9007199254740992, or an even one"
            ));
        }
    }
    Ok(())
}

/// 2^53: each whole number below it is exact as a float64.
const EXACT_BELOW: f64 = 9_007_199_254_740_992.0;

/// Whether a number is unchanged as a float64.
fn is_exact(number: &Number) -> bool {
    let whole = number.as_i64().map(i128::from).or(number.as_u64().map(i128::from));
    match whole {
        Some(whole) => whole as f64 as i128 == whole,
        // A whole number beyond 64 bits became a float64 when the schema was parsed, and its
        // original value is lost.
        None => number
            .as_f64()
            .is_some_and(|float| float.fract() != 0.0 || float.abs() < EXACT_BELOW),
    }
}
