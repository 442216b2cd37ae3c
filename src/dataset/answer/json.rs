//! Parses an answer's JSON without loss: numbers keep all of their digits, and an object with a
//! duplicate key is refused.
//!
//! Other parsers may read 9007199254740993 as the float 9007199254740992, and keep the last of two
//! members with the same key. Neither error would be visible in the output.
//!
//! See docs/decisions/043-answers-are-read-stricter-than-parsers-do.md.

use std::collections::HashSet;
use std::fmt::Write;

use serde_json::Value;

/// Maximum length of a key or number in an error, in characters.
const QUOTED_CHARS_MAX: usize = 60;
/// Number of digits of the largest int64.
const INT64_DIGITS: i64 = 19;

/// A JSON value.
#[derive(Debug, Clone, PartialEq)]
pub enum Answer {
    Null,
    Bool(bool),
    /// The number's text, as written.
    Number(String),
    Text(String),
    List(Vec<Answer>),
    /// In the order written; keys are unique.
    Object(Vec<(String, Answer)>),
}

impl Answer {
    /// Reads JSON.
    ///
    /// # Errors
    /// One line with the reason: the text is not JSON, or an object has a duplicate key.
    pub fn parse(text: &str) -> Result<Answer, String> {
        // This parser refuses all text that is not JSON, including numbers out of float64's range
        // and lone surrogates.
        serde_json::from_str::<Value>(text).map_err(|e| format!("the completion is not JSON: {e}"))?;
        AnswerParser { text, offset: 0 }.value()
    }

    /// Compact JSON. A number has the form that serde_json writes, unless that form has another
    /// value.
    pub fn compact(&self) -> String {
        let mut out = String::new();
        self.write(&mut out);
        out
    }

    fn write(&self, out: &mut String) {
        match self {
            Answer::Null => out.push_str("null"),
            Answer::Bool(value) => out.push_str(if *value { "true" } else { "false" }),
            Answer::Number(number) => out.push_str(&number_text(number)),
            Answer::Text(text) => write_text(text, out),
            Answer::List(items) => {
                out.push('[');
                for (index, item) in items.iter().enumerate() {
                    if index > 0 {
                        out.push(',');
                    }
                    item.write(out);
                }
                out.push(']');
            }
            Answer::Object(members) => {
                out.push('{');
                for (index, (key, value)) in members.iter().enumerate() {
                    if index > 0 {
                        out.push(',');
                    }
                    write_text(key, out);
                    out.push(':');
                    value.write(out);
                }
                out.push('}');
            }
        }
    }

    /// The value as an int64, also if it is written as `1e3` or `1.0`; `None` if it is not a whole
    /// number in the range of int64.
    pub fn as_int64(&self) -> Option<i64> {
        let Answer::Number(number) = self else { return None };
        let Decimal {
            negative,
            digits,
            exponent,
        } = Decimal::of(number);
        if exponent < 0 || digits.len() as i64 + exponent > INT64_DIGITS {
            return None;
        }
        let sign = if negative { "-" } else { "" };
        let zeros = "0".repeat(exponent as usize);
        // The leading `0` makes an empty digit string parse as 0.
        format!("{sign}0{digits}{zeros}").parse().ok()
    }

    /// The nearest float64. `None` if the value is not a number, is too large, underflows to 0, or
    /// is a whole number in plain digits that float64 cannot represent exactly.
    pub fn as_float64(&self) -> Option<f64> {
        let Answer::Number(number) = self else { return None };
        let float: f64 = number.parse().ok()?;
        let exact = Decimal::of(number);
        let has_plain_digits = number.bytes().all(|byte| byte == b'-' || byte.is_ascii_digit());
        let is_underflow = float == 0.0 && !exact.digits.is_empty();
        let is_inexact_integer = has_plain_digits && Decimal::of(&format!("{float:.0}")) != exact;
        (float.is_finite() && !is_underflow && !is_inexact_integer).then_some(float)
    }
}

/// Quotes a text for an error message, cut to `QUOTED_CHARS_MAX` characters.
pub fn quoted(text: &str) -> String {
    match text.char_indices().nth(QUOTED_CHARS_MAX) {
        Some((end, _)) => format!("`{}…`", &text[..end]),
        None => format!("`{text}`"),
    }
}

fn write_text(text: &str, out: &mut String) {
    // Neither step fails: every text has a JSON form, and writing to a `String` cannot fail.
    let _ = write!(out, "{}", Value::from(text));
}

/// A number in the form that serde_json writes, or unchanged if that form has another value.
fn number_text(number: &str) -> String {
    match serde_json::from_str::<Value>(number).map(|value| value.to_string()) {
        Ok(text) if Decimal::of(&text) == Decimal::of(number) => text,
        _ => number.to_string(),
    }
}

/// A number as decimal digits and exponent, in a unique form: two values are equal if and only if
/// their numbers are equal.
#[derive(Debug, PartialEq)]
struct Decimal {
    negative: bool,
    /// Without leading and trailing zeros; empty for 0.
    digits: String,
    /// The power of ten of the last digit.
    exponent: i64,
}

impl Decimal {
    /// Parses a number in JSON's form.
    fn of(number: &str) -> Decimal {
        let (negative, number) = match number.strip_prefix('-') {
            Some(rest) => (true, rest),
            None => (false, number),
        };
        let (mantissa, exponent) = number.split_once(['e', 'E']).unwrap_or((number, "0"));
        let written_exponent: i64 = match exponent.parse() {
            Ok(exponent) if i64::abs(exponent) < i64::from(i32::MAX) => exponent,
            // Beyond int64 and float64, whatever the mantissa's length.
            _ if exponent.starts_with('-') => -(1 << 40),
            _ => 1 << 40,
        };
        let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
        let all_digits = format!("{whole}{fraction}");
        let trimmed = all_digits.trim_end_matches('0');
        let digits = trimmed.trim_start_matches('0');
        let exponent = match digits {
            "" => 0,
            _ => written_exponent - fraction.len() as i64 + (all_digits.len() - trimmed.len()) as i64,
        };
        Decimal {
            negative,
            digits: digits.into(),
            exponent,
        }
    }
}

/// Parses a text that serde_json has validated before, with its limit on the nesting depth.
struct AnswerParser<'a> {
    text: &'a str,
    offset: usize,
}

impl AnswerParser<'_> {
    fn value(&mut self) -> Result<Answer, String> {
        match self.peek() {
            b'{' => self.object(),
            b'[' => self.list(),
            b'"' => Ok(Answer::Text(self.string()?)),
            _ => {
                let end = self.text[self.offset..].find([',', ']', '}', ' ', '\n', '\r', '\t']);
                let end = end.map_or(self.text.len(), |length| self.offset + length);
                let word = &self.text[self.offset..end];
                self.offset = end;
                Ok(match word {
                    "null" => Answer::Null,
                    "true" => Answer::Bool(true),
                    "false" => Answer::Bool(false),
                    number => Answer::Number(number.into()),
                })
            }
        }
    }

    /// Skips white space and returns the next byte without consuming it; 0 at the end.
    fn peek(&mut self) -> u8 {
        let rest = &self.text[self.offset..];
        self.offset += rest.len() - rest.trim_start_matches([' ', '\n', '\r', '\t']).len();
        self.text.as_bytes().get(self.offset).copied().unwrap_or(0)
    }

    /// Consumes `byte` if it is the next byte after white space, and returns whether it was.
    fn consume(&mut self, byte: u8) -> bool {
        let is_next = self.peek() == byte;
        self.offset += usize::from(is_next);
        is_next
    }

    fn string(&mut self) -> Result<String, String> {
        let rest = &self.text[self.offset..];
        let mut stream = serde_json::Deserializer::from_str(rest).into_iter::<String>();
        let read = stream.next().and_then(Result::ok).ok_or("the completion is not JSON")?;
        self.offset += stream.byte_offset();
        Ok(read)
    }

    fn list(&mut self) -> Result<Answer, String> {
        self.offset += 1;
        let mut items = Vec::new();
        if self.consume(b']') {
            return Ok(Answer::List(items));
        }
        loop {
            items.push(self.value()?);
            if !self.consume(b',') {
                self.offset += 1;
                return Ok(Answer::List(items));
            }
        }
    }

    fn object(&mut self) -> Result<Answer, String> {
        self.offset += 1;
        let mut members: Vec<(String, Answer)> = Vec::new();
        if self.consume(b'}') {
            return Ok(Answer::Object(members));
        }
        let mut seen = HashSet::new();
        loop {
            self.peek();
            let key = self.string()?;
            if !seen.insert(key.clone()) {
                return Err(format!("the answer has the key {} twice in one object", quoted(&key)));
            }
            self.consume(b':');
            members.push((key, self.value()?));
            if !self.consume(b',') {
                self.offset += 1;
                return Ok(Answer::Object(members));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn number(text: &str) -> Answer {
        Answer::parse(text).unwrap()
    }

    #[test]
    fn numbers_keep_their_digits() {
        for (text, compact) in [
            ("12345678901234567890123", "12345678901234567890123"),
            ("9007199254740993", "9007199254740993"),
            ("0.12345678901234567890", "0.12345678901234567890"),
            ("1e-400", "1e-400"),
            ("1.50", "1.5"),
            ("1E2", "100.0"),
            ("-0", "-0.0"),
            ("[ 1 , -2.0 ]", "[1,-2.0]"),
        ] {
            assert_eq!(number(text).compact(), compact, "{text}");
        }
        assert!(Answer::parse("1e400").unwrap_err().contains("out of range"));
    }

    #[test]
    fn inexact_conversions_are_refused() {
        for (text, whole, float) in [
            ("9223372036854775807", Some(i64::MAX), None),
            ("-9223372036854775808", Some(i64::MIN), Some(i64::MIN as f64)),
            ("9223372036854775808", None, Some(9_223_372_036_854_775_808.0)),
            ("9007199254740993", Some(9_007_199_254_740_993), None),
            (
                "9007199254740992",
                Some(9_007_199_254_740_992),
                Some(9_007_199_254_740_992.0),
            ),
            ("1e3", Some(1000), Some(1000.0)),
            ("1.0", Some(1), Some(1.0)),
            ("12.50e1", Some(125), Some(125.0)),
            ("1.5", None, Some(1.5)),
            ("0.1", None, Some(0.1)),
            ("6.02e23", None, Some(6.02e23)),
            ("1e-400", None, None),
            ("0e99999999999999999999", Some(0), Some(0.0)),
            ("0.000", Some(0), Some(0.0)),
        ] {
            assert_eq!(
                (number(text).as_int64(), number(text).as_float64()),
                (whole, float),
                "{text}"
            );
        }
        let zero = number("-0.0");
        assert_eq!(
            (zero.as_int64(), zero.as_float64().map(f64::to_bits)),
            (Some(0), Some((-0.0f64).to_bits()))
        );
        assert_eq!((number("\"1\"").as_int64(), number("true").as_float64()), (None, None));
    }

    #[test]
    fn duplicate_keys_are_refused() {
        for (text, key) in [
            (r#"{"a": 1, "a": 1}"#, "`a`"),
            (r#"[{"b": {"x": [], "\u0078": {}}}]"#, "`x`"),
        ] {
            let error = Answer::parse(text).unwrap_err();
            assert_eq!(error, format!("the answer has the key {key} twice in one object"));
        }
        let fine = r#"{"a":{"a":1},"A":[{"a":2},{"a":3}],"":4}"#;
        assert_eq!(Answer::parse(fine).unwrap().compact(), fine);
        let long = format!("{{\"{0}\":1,\"{0}\":2}}", "k".repeat(1000));
        assert!(Answer::parse(&long).unwrap_err().len() < 200);
    }

    #[test]
    fn escapes_are_read_and_lone_surrogates_are_refused() {
        let text = Answer::parse(r#"" \ud83d\ude00\u00e9\n\"/""#).unwrap();
        assert_eq!(text, Answer::Text(" 😀é\n\"/".into()));
        assert_eq!(text.compact(), "\" 😀é\\n\\\"/\"");
        for half in [r#""\ud83d""#, r#""\ude00""#, r#"{"\ud83dx": 1}"#] {
            assert!(
                Answer::parse(half)
                    .unwrap_err()
                    .starts_with("the completion is not JSON"),
                "{half}"
            );
        }
        for other in ["", "{", "[1,]", "nul", "1 2", "{\"a\" 1}"] {
            assert!(Answer::parse(other).is_err(), "{other}");
        }
    }

    fn any_value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<u64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            any::<String>().prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 32, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::vec((any::<String>(), inner), 0..4)
                    .prop_map(|members| Value::Object(members.into_iter().collect())),
            ]
        })
    }

    proptest! {
        /// The text column holds serde_json's output, as in earlier versions.
        #[test]
        fn compact_json_is_the_same_as_serde_jsons(value in any_value()) {
            for text in [value.to_string(), format!("{value:#}")] {
                prop_assert_eq!(Answer::parse(&text).unwrap().compact(), value.to_string());
            }
        }
    }
}
