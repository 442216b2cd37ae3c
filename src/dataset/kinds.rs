//! The kinds of JSON values in a column, and the Arrow type that holds all of them.

use std::collections::BTreeMap;
use std::fmt;

use arrow::array::{ArrayRef, BooleanBuilder, Float64Builder, Int64Builder, StringBuilder};
use arrow::datatypes::{DataType, Field};
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};
use std::sync::Arc;

/// Maximum number of keys per line, and of distinct keys over all lines of a job. Further keys of a
/// job cannot be carried.
pub const KEYS_MAX: usize = 4096;

/// Integers up to this are exact as 64-bit floats.
const EXACT_IN_F64: u64 = 1 << 53;

/// Marks a column whose text is JSON, so that text and numbers in one column stay distinct.
const JSON_MARK: (&str, &str) = ("gristmill:content", "json");

/// A set of kinds of JSON values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Kinds(u8);

impl Kinds {
    pub const NULL: Kinds = Kinds(1);
    pub const BOOL: Kinds = Kinds(2);
    pub const INT: Kinds = Kinds(4);
    /// An int64 outside of the range in which float64 holds every integer exactly.
    pub const LONG_INT: Kinds = Kinds(8);
    pub const FLOAT: Kinds = Kinds(16);
    pub const TEXT: Kinds = Kinds(32);
    /// Lists, objects, and integers beyond int64.
    pub const OTHER: Kinds = Kinds(64);

    pub fn union(self, other: Kinds) -> Kinds {
        Kinds(self.0 | other.0)
    }

    /// Whether the set has no other kinds than `allowed` and null.
    fn has_only(self, allowed: &[Kinds]) -> bool {
        self.0 & !allowed.iter().fold(Kinds::NULL.0, |all, k| all | k.0) == 0
    }

    /// The names of the kinds, for a message, if no single Arrow type holds all of them. `None` for
    /// a column of lists and objects alone, which are always JSON text.
    pub fn mixed_names(self) -> Option<String> {
        let names = [
            (Kinds::BOOL, "booleans"),
            (Kinds(Kinds::INT.0 | Kinds::LONG_INT.0), "whole numbers"),
            (Kinds::FLOAT, "fractions"),
            (Kinds::TEXT, "texts"),
            (Kinds::OTHER, "lists, objects or very large numbers"),
        ];
        let found: Vec<&str> = names
            .iter()
            .filter(|(kind, _)| self.0 & kind.0 != 0)
            .map(|(_, name)| *name)
            .collect();
        let is_json = !self.field("").metadata().is_empty();
        (is_json && found.len() > 1).then(|| found.join(" and "))
    }

    /// The column for values of these kinds: int64, float64, bool or utf8; for mixed kinds, utf8
    /// that holds JSON text.
    pub fn field(self, name: &str) -> Field {
        let plain = |data_type| Field::new(name, data_type, true);
        if self.has_only(&[Kinds::TEXT]) {
            plain(DataType::Utf8)
        } else if self.has_only(&[Kinds::BOOL]) {
            plain(DataType::Boolean)
        } else if self.has_only(&[Kinds::INT, Kinds::LONG_INT]) {
            plain(DataType::Int64)
        } else if self.has_only(&[Kinds::INT, Kinds::FLOAT]) {
            plain(DataType::Float64)
        } else {
            plain(DataType::Utf8).with_metadata([JSON_MARK])
        }
    }
}

/// The kinds of one line's fields, and its `custom_id`, found without building the values. Parses
/// every line that the reader accepts, and a few invalid ones, since nested values are not checked.
#[derive(Debug, Default, PartialEq)]
pub struct LineKinds {
    pub kinds: BTreeMap<String, Kinds>,
    pub custom_id: Option<String>,
}

impl<'de> Deserialize<'de> for LineKinds {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<LineKinds, D::Error> {
        struct LineVisitor;
        impl<'de> Visitor<'de> for LineVisitor {
            type Value = LineKinds;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a JSON object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<LineKinds, A::Error> {
                let mut line = LineKinds::default();
                while let Some(key) = map.next_key::<String>()? {
                    let kinds = if key == "custom_id" {
                        let ValueKind { kinds, text } = map.next_value()?;
                        line.custom_id = text;
                        kinds
                    } else {
                        map.next_value::<ValueKind>()?.kinds
                    };
                    let entry = line.kinds.entry(key).or_default();
                    *entry = entry.union(kinds);
                    if line.kinds.len() > KEYS_MAX {
                        return Err(serde::de::Error::custom("too many keys"));
                    }
                }
                Ok(line)
            }
        }
        deserializer.deserialize_map(LineVisitor)
    }
}

/// Maximum bytes of a `custom_id` that is checked for duplicates.
const CUSTOM_ID_BYTES_MAX: usize = 4096;

/// The kind of one value, and its text if it is a text of at most [`CUSTOM_ID_BYTES_MAX`] bytes.
struct ValueKind {
    /// Exactly one kind.
    kinds: Kinds,
    text: Option<String>,
}

impl<'de> Deserialize<'de> for ValueKind {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<ValueKind, D::Error> {
        struct ValueVisitor;
        fn without_text<E>(kinds: Kinds) -> Result<ValueKind, E> {
            Ok(ValueKind { kinds, text: None })
        }
        impl<'de> Visitor<'de> for ValueVisitor {
            type Value = ValueKind;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a JSON value")
            }
            fn visit_unit<E>(self) -> Result<ValueKind, E> {
                without_text(Kinds::NULL)
            }
            fn visit_bool<E>(self, _: bool) -> Result<ValueKind, E> {
                without_text(Kinds::BOOL)
            }
            fn visit_i64<E>(self, v: i64) -> Result<ValueKind, E> {
                without_text(if v.unsigned_abs() <= EXACT_IN_F64 {
                    Kinds::INT
                } else {
                    Kinds::LONG_INT
                })
            }
            fn visit_u64<E>(self, v: u64) -> Result<ValueKind, E> {
                without_text(match v {
                    v if v <= EXACT_IN_F64 => Kinds::INT,
                    v if v <= i64::MAX as u64 => Kinds::LONG_INT,
                    _ => Kinds::OTHER,
                })
            }
            fn visit_f64<E>(self, _: f64) -> Result<ValueKind, E> {
                without_text(Kinds::FLOAT)
            }
            fn visit_str<E>(self, v: &str) -> Result<ValueKind, E> {
                Ok(ValueKind {
                    kinds: Kinds::TEXT,
                    text: (v.len() <= CUSTOM_ID_BYTES_MAX).then(|| v.to_string()),
                })
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<ValueKind, A::Error> {
                while seq.next_element::<IgnoredAny>()?.is_some() {}
                without_text(Kinds::OTHER)
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<ValueKind, A::Error> {
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                without_text(Kinds::OTHER)
            }
        }
        deserializer.deserialize_any(ValueVisitor)
    }
}

/// The values of `field` in `rows`, as a column of the type that [`Kinds::field`] chose at
/// planning. `None`: an unreadable row.
pub fn column(field: &Field, rows: &[Option<Map<String, Value>>]) -> Result<ArrayRef, String> {
    let values = rows
        .iter()
        .map(|row| match row.as_ref().and_then(|row| row.get(field.name())) {
            None | Some(Value::Null) => None,
            value => value,
        });
    let type_error = |v: &Value| {
        format!(
            "column `{}` was planned as {} and holds `{}`",
            field.name(),
            field.data_type(),
            shorten(&v.to_string())
        )
    };
    Ok(match field.data_type() {
        DataType::Boolean => {
            let mut out = BooleanBuilder::with_capacity(rows.len());
            for v in values {
                out.append_option(v.map(|v| v.as_bool().ok_or_else(|| type_error(v))).transpose()?);
            }
            Arc::new(out.finish())
        }
        DataType::Int64 => {
            let mut out = Int64Builder::with_capacity(rows.len());
            for v in values {
                out.append_option(v.map(|v| v.as_i64().ok_or_else(|| type_error(v))).transpose()?);
            }
            Arc::new(out.finish())
        }
        DataType::Float64 => {
            let mut out = Float64Builder::with_capacity(rows.len());
            for v in values {
                out.append_option(v.map(|v| v.as_f64().ok_or_else(|| type_error(v))).transpose()?);
            }
            Arc::new(out.finish())
        }
        DataType::Utf8
            if field
                .metadata()
                .get(JSON_MARK.0)
                .is_some_and(|mark| mark == JSON_MARK.1) =>
        {
            let mut out = StringBuilder::new();
            for v in values {
                out.append_option(v.map(Value::to_string));
            }
            Arc::new(out.finish())
        }
        DataType::Utf8 => {
            let mut out = StringBuilder::new();
            for v in values {
                out.append_option(v.map(|v| v.as_str().ok_or_else(|| type_error(v))).transpose()?);
            }
            Arc::new(out.finish())
        }
        other => {
            return Err(format!(
                "column `{}` has type {other}, which lines never have",
                field.name()
            ));
        }
    })
}

fn shorten(text: &str) -> String {
    if text.chars().count() <= 60 {
        text.to_string()
    } else {
        text.chars().take(60).chain(['…']).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow::array::AsArray;
    use serde_json::json;

    fn field_of(values: &[&str]) -> Field {
        let mut kinds = Kinds::default();
        for value in values {
            let line: LineKinds = serde_json::from_str(&format!("{{\"k\": {value}}}")).unwrap();
            kinds = kinds.union(line.kinds["k"]);
        }
        kinds.field("k")
    }

    #[test]
    fn the_type_holds_all_values_exactly() {
        assert_eq!(
            field_of(&["1", "null", "-9223372036854775808"]).data_type(),
            &DataType::Int64
        );
        assert_eq!(field_of(&["1", "2.5"]).data_type(), &DataType::Float64);
        assert_eq!(field_of(&["true", "null"]).data_type(), &DataType::Boolean);
        assert_eq!(field_of(&["\"a\""]), Field::new("k", DataType::Utf8, true));
        assert_eq!(field_of(&["null"]), Field::new("k", DataType::Utf8, true));
        for mixed in [
            &["1", "\"1\""][..],
            &["9007199254740993", "0.5"],
            &["[1]"],
            &["18446744073709551615"],
            &["true", "0"],
        ] {
            let field = field_of(mixed);
            assert_eq!(field.data_type(), &DataType::Utf8, "{mixed:?}");
            assert!(!field.metadata().is_empty(), "{mixed:?}");
            let rows: Vec<_> = mixed
                .iter()
                .map(|v| {
                    json!({"k": serde_json::from_str::<Value>(v).unwrap()})
                        .as_object()
                        .cloned()
                })
                .collect();
            let texts = column(&field, &rows).unwrap();
            let texts: Vec<&str> = texts.as_string::<i32>().iter().map(Option::unwrap).collect();
            assert_eq!(texts, mixed);
        }
    }

    #[test]
    fn missing_null_and_unreadable_are_null() {
        let rows = [
            json!({"k": "a"}).as_object().cloned(),
            json!({}).as_object().cloned(),
            json!({"k": null}).as_object().cloned(),
            None,
        ];
        let texts = column(&Field::new("k", DataType::Utf8, true), &rows).unwrap();
        assert_eq!(
            texts.as_string::<i32>().iter().collect::<Vec<_>>(),
            [Some("a"), None, None, None]
        );
        let error = column(&Field::new("k", DataType::Int64, true), &rows).unwrap_err();
        assert_eq!(error, "column `k` was planned as Int64 and holds `\"a\"`");
    }

    #[test]
    fn custom_ids_are_found_and_lines_that_are_no_object_are_rejected() {
        let line: LineKinds = serde_json::from_str(r#"{"custom_id": "a\n", "n": {"x": [1]}}"#).unwrap();
        assert_eq!(line.custom_id.as_deref(), Some("a\n"));
        assert!(serde_json::from_str::<LineKinds>("[1]").is_err());
        assert!(serde_json::from_str::<LineKinds>("{} x").is_err());
        let keys: Vec<String> = (0..=KEYS_MAX).map(|n| format!("\"{n}\":0")).collect();
        assert!(serde_json::from_str::<LineKinds>(&format!("{{{}}}", keys.join(","))).is_err());
    }
}
