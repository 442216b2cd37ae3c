//! Bounds the memory of a job record before it is deserialized: a few bytes of JSON can become a
//! hundred bytes in memory.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::job::{MAX_INPUTS, MAX_SHARDS};

/// Maximum number of JSON values in a record, shards and inputs excluded. A job file has fewer than
/// half a million values, and a vocabulary about as many.
const VALUES_MAX: usize = 4 << 20;
/// Maximum size of a record that needs no check: it stays small in memory.
const UNCHECKED_BYTES_MAX: usize = 4 << 20;

/// Refuses a job record that would take too much memory. The text of the error continues a sentence
/// that begins with the name of the record.
pub(super) fn check(bytes: &[u8]) -> Result<(), String> {
    if bytes.len() <= UNCHECKED_BYTES_MAX {
        return Ok(());
    }
    let BoundedJob = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    Ok(())
}

/// A job record without content: deserializing it only checks the bounds.
struct BoundedJob;

impl<'de> Deserialize<'de> for BoundedJob {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<BoundedJob, D::Error> {
        deserializer.deserialize_map(BoundedJobVisitor)
    }
}

struct BoundedJobVisitor;

impl<'de> Visitor<'de> for BoundedJobVisitor {
    type Value = BoundedJob;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a job's record")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<BoundedJob, A::Error> {
        let mut values = 0usize;
        while let Some(key) = map.next_key::<Cow<'de, str>>()? {
            match &*key {
                "shards" => map.next_value::<EntryList<MAX_SHARDS>>().map(|_| ())?,
                "inputs" => map.next_value::<EntryList<MAX_INPUTS>>().map(|_| ())?,
                _ => values += map.next_value::<ValueCount>()?.0,
            }
            if values > VALUES_MAX {
                return Err(A::Error::custom(format!(
                    "its job has more than {VALUES_MAX} values, which none has"
                )));
            }
        }
        Ok(BoundedJob)
    }
}

/// A list of at most `MAX` entries of any type.
struct EntryList<const MAX: usize>;

impl<'de, const MAX: usize> Deserialize<'de> for EntryList<MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(EntryList)
    }
}

impl<'de, const MAX: usize> Visitor<'de> for EntryList<MAX> {
    type Value = EntryList<MAX>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self, A::Error> {
        let mut count = 0;
        while list.next_element::<IgnoredAny>()?.is_some() {
            count += 1;
            if count > MAX {
                return Err(A::Error::custom(format!("it has a list of more than {MAX} entries")));
            }
        }
        Ok(EntryList)
    }
}

/// Number of JSON values in one value, itself included.
struct ValueCount(usize);

impl<'de> Deserialize<'de> for ValueCount {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<ValueCount, D::Error> {
        deserializer.deserialize_any(ValueCountVisitor)
    }
}

struct ValueCountVisitor;

impl<'de> Visitor<'de> for ValueCountVisitor {
    type Value = ValueCount;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_bool<E>(self, _: bool) -> Result<ValueCount, E> {
        Ok(ValueCount(1))
    }

    fn visit_u64<E>(self, _: u64) -> Result<ValueCount, E> {
        Ok(ValueCount(1))
    }

    fn visit_i64<E>(self, _: i64) -> Result<ValueCount, E> {
        Ok(ValueCount(1))
    }

    fn visit_f64<E>(self, _: f64) -> Result<ValueCount, E> {
        Ok(ValueCount(1))
    }

    fn visit_str<E>(self, _: &str) -> Result<ValueCount, E> {
        Ok(ValueCount(1))
    }

    fn visit_unit<E>(self) -> Result<ValueCount, E> {
        Ok(ValueCount(1))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<ValueCount, A::Error> {
        let mut count = 1usize;
        while let Some(ValueCount(more)) = list.next_element()? {
            count = count.saturating_add(more);
        }
        Ok(ValueCount(count))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<ValueCount, A::Error> {
        let mut count = 1usize;
        while map.next_key::<IgnoredAny>()?.is_some() {
            count = count
                .saturating_add(1)
                .saturating_add(map.next_value::<ValueCount>()?.0);
        }
        Ok(ValueCount(count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_too_large_in_memory_are_refused_before_decoding() {
        let pad = |text: String| format!("{text}{}", " ".repeat(UNCHECKED_BYTES_MAX)).into_bytes();
        let zeros = |count: usize| format!("[0{}]", ",0".repeat(count - 1));
        for (text, word) in [
            (format!("{{\"resolved\":{}}}", zeros(VALUES_MAX)), "values"),
            (format!("{{\"unknown\":{{\"a\":{}}}}}", zeros(VALUES_MAX)), "values"),
            (format!("{{\"shards\":{}}}", zeros(MAX_SHARDS + 1)), "entries"),
            (format!("{{\"inputs\":{}}}", zeros(MAX_INPUTS + 1)), "entries"),
            ("[]".into(), "a job's record"),
            ("{".into(), "EOF"),
        ] {
            let start: String = text.chars().take(20).collect();
            let error = check(&pad(text)).unwrap_err();
            assert!(error.contains(word), "{start}: {error}");
        }
        let good = format!(
            "{{\"resolved\":{},\"shards\":{},\"inputs\":{},\"s\":\"t\",\"n\":null,\"f\":[true,-1,0.5]}}",
            zeros(VALUES_MAX / 2),
            zeros(MAX_SHARDS),
            zeros(MAX_INPUTS)
        );
        check(&pad(good)).unwrap();
        check(b"{\"small\":").unwrap();
    }
}
