//! Number formats that a job file or an option asks for.

use std::fmt::{self, Display, Formatter};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::check::{FieldError, bad};
use super::suggest;
use crate::device::Precision;

/// The word that leaves the choice to the device or, for keys and values, to the precision.
const AUTO: &str = "auto";
/// Formats that other programs know by these names.
const UNSUPPORTED: [&str; 3] = ["f16", "fp4", "int4"];

/// Number format to compute in, or to keep keys and values in, as asked for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum RequestedPrecision {
    #[default]
    Auto,
    Fixed(Precision),
}

impl RequestedPrecision {
    /// All names that job files, records and options may use.
    pub fn words() -> impl Iterator<Item = &'static str> {
        std::iter::once(AUTO).chain(Precision::ALL.map(Precision::word))
    }

    /// The requested format, or `default` for `auto`.
    pub fn or(self, default: Precision) -> Precision {
        match self {
            RequestedPrecision::Auto => default,
            RequestedPrecision::Fixed(precision) => precision,
        }
    }

    /// Checks `word`, the value of a job file's `field`.
    pub(super) fn check(field: &str, word: Option<&str>) -> Result<RequestedPrecision, FieldError> {
        let Some(word) = word else {
            return Ok(RequestedPrecision::Auto);
        };
        word.parse().or_else(|_: UnknownPrecision| {
            bad(
                field,
                if UNSUPPORTED.contains(&word) {
                    format!("is `{word}`, which this build does not support; it has `f32`, `bf16`, `int8` and `fp8`")
                } else {
                    format!("is `{word}`{}", suggest(word, RequestedPrecision::words()))
                },
            )
        })
    }
}

/// A word that names no number format.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{word}` is not a number format; the formats are {}", RequestedPrecision::words().collect::<Vec<_>>().join(", "))]
pub struct UnknownPrecision {
    word: String,
}

impl FromStr for RequestedPrecision {
    type Err = UnknownPrecision;

    fn from_str(word: &str) -> Result<RequestedPrecision, UnknownPrecision> {
        if word == AUTO {
            return Ok(RequestedPrecision::Auto);
        }
        Precision::named(word)
            .map(RequestedPrecision::Fixed)
            .ok_or_else(|| UnknownPrecision { word: word.into() })
    }
}

impl TryFrom<String> for RequestedPrecision {
    type Error = UnknownPrecision;

    fn try_from(word: String) -> Result<RequestedPrecision, UnknownPrecision> {
        word.parse()
    }
}

impl Display for RequestedPrecision {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            RequestedPrecision::Auto => AUTO,
            RequestedPrecision::Fixed(precision) => precision.word(),
        })
    }
}

impl From<RequestedPrecision> for String {
    fn from(requested: RequestedPrecision) -> String {
        requested.to_string()
    }
}

impl From<Precision> for RequestedPrecision {
    fn from(precision: Precision) -> RequestedPrecision {
        RequestedPrecision::Fixed(precision)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_is_read_as_what_it_is_written_from() {
        for word in RequestedPrecision::words() {
            let json = format!("\"{word}\"");
            let read: RequestedPrecision = serde_json::from_str(&json).unwrap();
            assert_eq!(
                (read.to_string().as_str(), serde_json::to_string(&read).unwrap()),
                (word, json)
            );
            assert_eq!(RequestedPrecision::check("precision", Some(word)).unwrap(), read);
        }
        let error = serde_json::from_str::<RequestedPrecision>("\"F32\"").unwrap_err();
        assert!(error.to_string().contains("auto, f32, bf16, int8, fp8"), "{error}");
    }
}
