//! JSON as Python writes it: with `NaN`, `Infinity` and `-Infinity`, which standard JSON parsers
//! refuse.

use serde::de::DeserializeOwned;

/// Number words of Python that become strings. A field that must be a number then refuses the
/// string by its type.
const WORDS: [&str; 3] = ["NaN", "Infinity", "-Infinity"];

/// Parses the JSON of a checkpoint's file. `NaN` and infinities become strings: `Infinity` is
/// `"Infinity"`.
///
/// # Errors
/// The bytes are not JSON, or the JSON has another type than `T`.
pub(crate) fn from_slice<T: DeserializeOwned>(bytes: &[u8]) -> serde_json::Result<T> {
    match serde_json::from_slice(bytes) {
        Err(error) if error.is_syntax() => match quoted(bytes) {
            Some(text) => serde_json::from_slice(&text),
            None => Err(error),
        },
        parsed => parsed,
    }
}

/// `bytes` with quotes around each of [`WORDS`] outside strings. `None`: there is no such word.
fn quoted(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(bytes.len() + 16);
    let (mut at, mut in_text, mut found) = (0, false, false);
    while let Some(&byte) = bytes.get(at) {
        let rest = &bytes[at..];
        let word = WORDS.iter().find(|word| !in_text && rest.starts_with(word.as_bytes()));
        let taken = match (word, byte) {
            (Some(word), _) => {
                found = true;
                out.push(b'"');
                out.extend(word.as_bytes());
                out.push(b'"');
                at += word.len();
                continue;
            }
            (None, b'"') => {
                in_text = !in_text;
                1
            }
            // A character after a backslash is escaped and does not end the string.
            (None, b'\\') if in_text => 2,
            _ => 1,
        };
        let end = (at + taken).min(bytes.len());
        out.extend(&bytes[at..end]);
        at = end;
    }
    found.then_some(out)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn numbers_that_are_none_are_texts() {
        let text = br#"{"a": [0.0, Infinity, -Infinity], "NaN": NaN, "b": "\"Infinity\\", "c": -1}"#;
        let parsed: Value = from_slice(text).unwrap();
        let expected = json!({"a": [0.0, "Infinity", "-Infinity"], "NaN": "NaN", "b": "\"Infinity\\", "c": -1});
        assert_eq!(parsed, expected);
    }

    #[test]
    fn what_is_no_json_stays_none() {
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
