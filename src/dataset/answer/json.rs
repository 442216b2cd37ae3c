//! An answer's JSON as it was written: numbers keep all of their digits, and an object with a
//! duplicate key is refused.
//!
//! A usual parser reads 9007199254740993 as the float 9007199254740992, and keeps the last of two
//! members with the same key. Both results look right.
//!
//! See docs/decisions/043-answers-are-read-stricter-than-parsers-do.md.

use std::collections::HashSet;
use std::fmt::Write;

use serde_json::Value;

/// Longest key or number in an error, in characters.
const QUOTED_CHARS_MAX: usize = 60;
/// Digits of the largest whole number in 64 bits.
const INT64_DIGITS: i64 = 19;

/// A value of JSON.
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
        Walk { text, at: 0 }.value()
    }

    /// Compact JSON. Numbers have serde_json's usual form, unless that form would change their
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
            Answer::Number(number) => out.push_str(&shown(number)),
            Answer::Text(text) => write_text(text, out),
            Answer::List(items) => {
                out.push('[');
                for (at, item) in items.iter().enumerate() {
                    if at > 0 {
                        out.push(',');
                    }
                    item.write(out);
                }
                out.push(']');
            }
            Answer::Object(members) => {
                out.push('{');
                for (at, (key, value)) in members.iter().enumerate() {
                    if at > 0 {
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

    /// The value as an int64, however it is written (`1e3`, `1.0`); `None` if it is not a whole
    /// number of 64 bits.
    pub fn int64(&self) -> Option<i64> {
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

    /// The nearest float64. `None` if this is not a number, is too large, underflows to 0, or is a
    /// whole number in plain digits that float64 cannot represent exactly.
    pub fn float64(&self) -> Option<f64> {
        let Answer::Number(number) = self else { return None };
        let float: f64 = number.parse().ok()?;
        let exact = Decimal::of(number);
        let is_whole = number.bytes().all(|byte| byte == b'-' || byte.is_ascii_digit());
        let is_lost = float == 0.0 && !exact.digits.is_empty();
        let is_other = is_whole && Decimal::of(&format!("{float:.0}")) != exact;
        (float.is_finite() && !is_lost && !is_other).then_some(float)
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

/// A number in serde_json's usual form, or as written where that form would change its value.
fn shown(number: &str) -> String {
    match serde_json::from_str::<Value>(number).map(|value| value.to_string()) {
        Ok(usual) if Decimal::of(&usual) == Decimal::of(number) => usual,
        _ => number.to_string(),
    }
}

/// A number as decimal digits and exponent. Two values are equal where their numbers are.
#[derive(Debug, PartialEq)]
struct Decimal {
    negative: bool,
    /// Without zeros at either end; empty for 0.
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
        let (mantissa, power) = number.split_once(['e', 'E']).unwrap_or((number, "0"));
        let power: i64 = match power.parse() {
            Ok(power) if i64::abs(power) < i64::from(i32::MAX) => power,
            // An exponent beyond every representable number, whatever the mantissa's length.
            _ if power.starts_with('-') => -(1 << 40),
            _ => 1 << 40,
        };
        let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
        let all = format!("{whole}{fraction}");
        let ended = all.trim_end_matches('0');
        let digits = ended.trim_start_matches('0');
        let exponent = match digits {
            "" => 0,
            _ => power - fraction.len() as i64 + (all.len() - ended.len()) as i64,
        };
        Decimal {
            negative,
            digits: digits.into(),
            exponent,
        }
    }
}

/// Parses a text that is known to be valid JSON. The nesting depth is bounded by the parser that
/// validated it.
struct Walk<'a> {
    text: &'a str,
    at: usize,
}

impl Walk<'_> {
    fn value(&mut self) -> Result<Answer, String> {
        match self.next() {
            b'{' => self.object(),
            b'[' => self.list(),
            b'"' => Ok(Answer::Text(self.string()?)),
            _ => {
                let end = self.text[self.at..].find([',', ']', '}', ' ', '\n', '\r', '\t']);
                let end = end.map_or(self.text.len(), |length| self.at + length);
                let word = &self.text[self.at..end];
                self.at = end;
                Ok(match word {
                    "null" => Answer::Null,
                    "true" => Answer::Bool(true),
                    "false" => Answer::Bool(false),
                    number => Answer::Number(number.into()),
                })
            }
        }
    }

    /// The next byte after white space; 0 at the end.
    fn next(&mut self) -> u8 {
        let rest = &self.text[self.at..];
        self.at += rest.len() - rest.trim_start_matches([' ', '\n', '\r', '\t']).len();
        self.text.as_bytes().get(self.at).copied().unwrap_or(0)
    }

    /// Consumes `byte` if it comes next, and returns whether it did.
    fn takes(&mut self, byte: u8) -> bool {
        let comes = self.next() == byte;
        self.at += usize::from(comes);
        comes
    }

    fn string(&mut self) -> Result<String, String> {
        let rest = &self.text[self.at..];
        let mut stream = serde_json::Deserializer::from_str(rest).into_iter::<String>();
        let read = stream.next().and_then(Result::ok).ok_or("the completion is not JSON")?;
        self.at += stream.byte_offset();
        Ok(read)
    }

    fn list(&mut self) -> Result<Answer, String> {
        self.at += 1;
        let mut items = Vec::new();
        if self.takes(b']') {
            return Ok(Answer::List(items));
        }
        loop {
            items.push(self.value()?);
            if !self.takes(b',') {
                self.at += 1;
                return Ok(Answer::List(items));
            }
        }
    }

    fn object(&mut self) -> Result<Answer, String> {
        self.at += 1;
        let mut members: Vec<(String, Answer)> = Vec::new();
        if self.takes(b'}') {
            return Ok(Answer::Object(members));
        }
        let mut seen = HashSet::new();
        loop {
            self.next();
            let key = self.string()?;
            if !seen.insert(key.clone()) {
                return Err(format!("the answer has the key {} twice in one object", quoted(&key)));
            }
            self.takes(b':');
            members.push((key, self.value()?));
            if !self.takes(b',') {
                self.at += 1;
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
    fn numbers_become_none_that_they_are_not() {
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
            assert_eq!((number(text).int64(), number(text).float64()), (whole, float), "{text}");
        }
        let zero = number("-0.0");
        assert_eq!(
            (zero.int64(), zero.float64().map(f64::to_bits)),
            (Some(0), Some((-0.0f64).to_bits()))
        );
        assert_eq!((number("\"1\"").int64(), number("true").float64()), (None, None));
    }

    #[test]
    fn no_key_counts_twice() {
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
    fn escapes_are_read_and_halves_of_surrogates_are_none() {
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
        fn compact_json_is_that_of_another_parser(value in any_value()) {
            for text in [value.to_string(), format!("{value:#}")] {
                prop_assert_eq!(Answer::parse(&text).unwrap().compact(), value.to_string());
            }
        }
    }
}
