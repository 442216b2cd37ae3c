//! Number formats that a job file or an option requests.

use std::fmt::{self, Display, Formatter};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::check::{FieldError, bad};
use super::suggest;
use crate::device::Precision;

/// The name that leaves the choice to the device or, for keys and values, to the precision.
const AUTO: &str = "auto";
/// Names of formats that other programs have and gristmill does not support.
const UNSUPPORTED: [&str; 3] = ["f16", "fp4", "int4"];
/// The name for which `w4a8` is what is meant.
const FOUR_BITS: &str = "int4";

/// The requested number format of computation, or of keys and values.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum RequestedPrecision {
    #[default]
    Auto,
    Fixed(Precision),
}

impl RequestedPrecision {
    /// All names that job files, records and options may use.
    pub fn names() -> impl Iterator<Item = &'static str> {
        std::iter::once(AUTO).chain(Precision::ALL.map(Precision::name))
    }

    /// Those of keys and values: `w4a8` is a format of weights.
    pub fn kv_names() -> impl Iterator<Item = &'static str> {
        RequestedPrecision::names().filter(|name| *name != Precision::W4a8.name())
    }

    /// The requested format, or `default` for `auto`.
    pub fn or(self, default: Precision) -> Precision {
        match self {
            RequestedPrecision::Auto => default,
            RequestedPrecision::Fixed(precision) => precision,
        }
    }

    /// Checks `name`, the value of a job file's `field`.
    pub(super) fn check(field: &str, name: Option<&str>) -> Result<RequestedPrecision, FieldError> {
        let Some(name) = name else {
            return Ok(RequestedPrecision::Auto);
        };
        if field == "kv_cache" && name == Precision::W4a8.name() {
            return bad(field, format!("is `{name}`, which is a format of weights; take `int8`"));
        }
        name.parse().or_else(|_: UnknownPrecision| {
            bad(
                field,
                if name == FOUR_BITS && field == "precision" {
                    format!("is `{name}`; `w4a8` keeps weights in the 4 bits of a checkpoint, and rounds activations to 8 bits")
                } else if UNSUPPORTED.contains(&name) {
                    format!("is `{name}`, which this build does not support; it has `f32`, `bf16`, `int8` and `fp8`")
                } else {
                    format!("is `{name}`{}", suggest(name, RequestedPrecision::names()))
                },
            )
        })
    }
}

/// The error for a name that is no number format.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{name}` is not a number format; the formats are {}", RequestedPrecision::names().collect::<Vec<_>>().join(", "))]
pub struct UnknownPrecision {
    name: String,
}

impl FromStr for RequestedPrecision {
    type Err = UnknownPrecision;

    fn from_str(name: &str) -> Result<RequestedPrecision, UnknownPrecision> {
        if name == AUTO {
            return Ok(RequestedPrecision::Auto);
        }
        Precision::from_name(name)
            .map(RequestedPrecision::Fixed)
            .ok_or_else(|| UnknownPrecision { name: name.into() })
    }
}

impl TryFrom<String> for RequestedPrecision {
    type Error = UnknownPrecision;

    fn try_from(name: String) -> Result<RequestedPrecision, UnknownPrecision> {
        name.parse()
    }
}

impl Display for RequestedPrecision {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            RequestedPrecision::Auto => AUTO,
            RequestedPrecision::Fixed(precision) => precision.name(),
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
    fn names_round_trip() {
        for name in RequestedPrecision::names() {
            let json = format!("\"{name}\"");
            let read: RequestedPrecision = serde_json::from_str(&json).unwrap();
            assert_eq!(
                (read.to_string().as_str(), serde_json::to_string(&read).unwrap()),
                (name, json)
            );
            assert_eq!(RequestedPrecision::check("precision", Some(name)).unwrap(), read);
        }
        let refusal = |field: &str, name| format!("{:?}", RequestedPrecision::check(field, Some(name)).unwrap_err());
        assert!(refusal("kv_cache", "w4a8").contains("take `int8`"));
        assert!(refusal("precision", "int4").contains("`w4a8`"));
        let error = serde_json::from_str::<RequestedPrecision>("\"F32\"").unwrap_err();
        assert!(
            error.to_string().contains("auto, f32, bf16, int8, fp8, w4a8"),
            "{error}"
        );
    }
}
