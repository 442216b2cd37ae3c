//! JSON as Python writes it: with `NaN`, `Infinity` and `-Infinity`, which standard JSON parsers
//! refuse.

use serde::de::DeserializeOwned;

/// Numbers that JSON cannot hold. [`from_slice`] makes strings of them, so that a field that must
/// be a number refuses them by their type.
const NON_FINITE_NUMBERS: [&str; 3] = ["NaN", "Infinity", "-Infinity"];

/// Parses the JSON of a checkpoint's file. `NaN` and infinities become strings: `Infinity` is
/// `"Infinity"`.
///
/// # Errors
/// The bytes are not JSON, or the JSON has another type than `T`.
pub(crate) fn from_slice<T: DeserializeOwned>(bytes: &[u8]) -> serde_json::Result<T> {
    match serde_json::from_slice(bytes) {
        Err(error) if error.is_syntax() => match quote_non_finite_numbers(bytes) {
            Some(text) => serde_json::from_slice(&text),
            None => Err(error),
        },
        parsed => parsed,
    }
}

/// `bytes` with quotes around each of [`NON_FINITE_NUMBERS`] outside strings; `None` if there
/// are none.
fn quote_non_finite_numbers(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(bytes.len() + 16);
    let (mut offset, mut in_string, mut found) = (0, false, false);
    while let Some(&byte) = bytes.get(offset) {
        let rest = &bytes[offset..];
        let number = NON_FINITE_NUMBERS
            .iter()
            .find(|number| !in_string && rest.starts_with(number.as_bytes()));
        let length = match (number, byte) {
            (Some(number), _) => {
                found = true;
                out.push(b'"');
                out.extend(number.as_bytes());
                out.push(b'"');
                offset += number.len();
                continue;
            }
            (None, b'"') => {
                in_string = !in_string;
                1
            }
            // A character after a backslash is escaped and does not end the string.
            (None, b'\\') if in_string => 2,
            _ => 1,
        };
        let end = (offset + length).min(bytes.len());
        out.extend(&bytes[offset..end]);
        offset = end;
    }
    found.then_some(out)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn nan_and_infinities_become_strings() {
        let text = br#"{"a": [0.0, Infinity, -Infinity], "NaN": NaN, "b": "\"Infinity\\", "c": -1}"#;
        let parsed: Value = from_slice(text).unwrap();
        let expected = json!({"a": [0.0, "Infinity", "-Infinity"], "NaN": "NaN", "b": "\"Infinity\\", "c": -1});
        assert_eq!(parsed, expected);
    }

    #[test]
    fn other_invalid_json_is_refused() {
        for text in [
            "",
            "{",
            "{'a': 1}",
            "[Infinit]",
            "[Infinity",
            "\"\\",
            "[Infinity Infinity]",
            "[NaNa]",
        ] {
            assert!(from_slice::<Value>(text.as_bytes()).is_err(), "{text}");
        }
    }
}
