//! Bounds the memory of a job record before it is deserialized: a few bytes of JSON can become a
//! hundred bytes in memory.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::job::{MAX_INPUTS, MAX_SHARDS};

/// Maximum number of JSON values in a record, besides its shards and inputs. A job file has fewer
/// than half a million values, and a vocabulary about as many.
const VALUES_MAX: usize = 4 << 20;
/// Size in bytes up to which records are not counted: they stay small in memory.
const SMALL_BYTES: usize = 4 << 20;

/// Refuses a record that is too large for a job. The error text follows the name of the record.
pub(super) fn check(bytes: &[u8]) -> Result<(), String> {
    if bytes.len() <= SMALL_BYTES {
        return Ok(());
    }
    let Bulk = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    Ok(())
}

struct Bulk;

impl<'de> Deserialize<'de> for Bulk {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Bulk, D::Error> {
        deserializer.deserialize_map(BulkVisitor)
    }
}

struct BulkVisitor;

impl<'de> Visitor<'de> for BulkVisitor {
    type Value = Bulk;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a job's record")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Bulk, A::Error> {
        let mut values = 0usize;
        while let Some(key) = map.next_key::<Cow<'de, str>>()? {
            match &*key {
                "shards" => map.next_value::<Entries<MAX_SHARDS>>().map(|_| ())?,
                "inputs" => map.next_value::<Entries<MAX_INPUTS>>().map(|_| ())?,
                _ => values += map.next_value::<Values>()?.0,
            }
            if values > VALUES_MAX {
                return Err(A::Error::custom(format!(
                    "its job has more than {VALUES_MAX} values, which none has"
                )));
            }
        }
        Ok(Bulk)
    }
}

/// A list of at most `MOST` entries of any type.
struct Entries<const MOST: usize>;

impl<'de, const MOST: usize> Deserialize<'de> for Entries<MOST> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(Entries)
    }
}

impl<'de, const MOST: usize> Visitor<'de> for Entries<MOST> {
    type Value = Entries<MOST>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self, A::Error> {
        let mut count = 0;
        while list.next_element::<IgnoredAny>()?.is_some() {
            count += 1;
            if count > MOST {
                return Err(A::Error::custom(format!("it has a list of more than {MOST} entries")));
            }
        }
        Ok(Entries)
    }
}

/// Number of JSON values in one value, itself included.
struct Values(usize);

impl<'de> Deserialize<'de> for Values {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Values, D::Error> {
        deserializer.deserialize_any(ValuesVisitor)
    }
}

struct ValuesVisitor;

impl<'de> Visitor<'de> for ValuesVisitor {
    type Value = Values;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_bool<E>(self, _: bool) -> Result<Values, E> {
        Ok(Values(1))
    }

    fn visit_u64<E>(self, _: u64) -> Result<Values, E> {
        Ok(Values(1))
    }

    fn visit_i64<E>(self, _: i64) -> Result<Values, E> {
        Ok(Values(1))
    }

    fn visit_f64<E>(self, _: f64) -> Result<Values, E> {
        Ok(Values(1))
    }

    fn visit_str<E>(self, _: &str) -> Result<Values, E> {
        Ok(Values(1))
    }

    fn visit_unit<E>(self) -> Result<Values, E> {
        Ok(Values(1))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Values, A::Error> {
        let mut count = 1usize;
        while let Some(Values(more)) = list.next_element()? {
            count = count.saturating_add(more);
        }
        Ok(Values(count))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Values, A::Error> {
        let mut count = 1usize;
        while map.next_key::<IgnoredAny>()?.is_some() {
            count = count.saturating_add(1).saturating_add(map.next_value::<Values>()?.0);
        }
        Ok(Values(count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_that_would_be_much_in_memory_is_refused_unmade() {
        let pad = |text: String| format!("{text}{}", " ".repeat(SMALL_BYTES)).into_bytes();
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
