//! Number formats that a job file or an option requests: of the computation, and of keys and values.

use std::fmt::{self, Display, Formatter};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::check::{FieldError, bad};
use super::suggest;
use crate::device::{KvFormat, Precision};

/// The name that leaves the choice to the device or, for keys and values, to the precision.
const AUTO: &str = "auto";

/// A number format with a name in job files and records.
pub trait NumberFormat: Copy + 'static {
    const ALL: &'static [Self];
    /// Why a name of another program's format, or of another field's, is refused. `None`: it is no such name.
    fn refusal(name: &str) -> Option<String>;
    fn name(self) -> &'static str;
}

impl NumberFormat for Precision {
    const ALL: &'static [Precision] = &Precision::ALL;

    fn refusal(name: &str) -> Option<String> {
        match name {
            "int4" => {
                Some("`w4a8` keeps weights in the 4 bits of a checkpoint, and rounds activations to 8 bits".into())
            }
            "f16" | "fp4" => Some(unsupported::<Precision>()),
            _ => None,
        }
    }

    fn name(self) -> &'static str {
        Precision::name(self)
    }
}

impl NumberFormat for KvFormat {
    const ALL: &'static [KvFormat] = &KvFormat::ALL;

    fn refusal(name: &str) -> Option<String> {
        match name {
            "w4a8" => Some("it is a format of weights; take `int4` or `int8`".into()),
            "f16" | "fp4" => Some(unsupported::<KvFormat>()),
            _ => None,
        }
    }

    fn name(self) -> &'static str {
        KvFormat::name(self)
    }
}

fn unsupported<F: NumberFormat>() -> String {
    let names: Vec<String> = F::ALL.iter().map(|format| format!("`{}`", format.name())).collect();
    format!("this build does not support it; it has {}", names.join(", "))
}

/// A requested number format.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String", bound = "F: NumberFormat")]
pub enum Requested<F> {
    #[default]
    Auto,
    Fixed(F),
}

/// The requested format of computation.
pub type RequestedPrecision = Requested<Precision>;
/// The requested format of keys and values.
pub type RequestedKvFormat = Requested<KvFormat>;

impl<F: NumberFormat> Requested<F> {
    /// All names that job files, records and options may use.
    pub fn names() -> impl Iterator<Item = &'static str> {
        std::iter::once(AUTO).chain(F::ALL.iter().map(|format| format.name()))
    }

    /// The requested format, or `default` for `auto`.
    pub fn or(self, default: F) -> F {
        match self {
            Requested::Auto => default,
            Requested::Fixed(format) => format,
        }
    }

    /// Checks `name`, the value of a job file's `field`.
    pub(super) fn check(field: &str, name: Option<&str>) -> Result<Requested<F>, FieldError> {
        let Some(name) = name else {
            return Ok(Requested::Auto);
        };
        name.parse().or_else(|_: UnknownFormat| {
            bad(
                field,
                match F::refusal(name) {
                    Some(why) => format!("is `{name}`; {why}"),
                    None => format!("is `{name}`{}", suggest(name, Self::names())),
                },
            )
        })
    }
}

/// The error for a name that is no number format.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{name}` is not a number format; the formats are {formats}")]
pub struct UnknownFormat {
    name: String,
    formats: String,
}

impl<F: NumberFormat> FromStr for Requested<F> {
    type Err = UnknownFormat;

    fn from_str(name: &str) -> Result<Requested<F>, UnknownFormat> {
        if name == AUTO {
            return Ok(Requested::Auto);
        }
        let format = F::ALL.iter().find(|format| format.name() == name);
        format
            .map(|format| Requested::Fixed(*format))
            .ok_or_else(|| UnknownFormat {
                name: name.into(),
                formats: Self::names().collect::<Vec<_>>().join(", "),
            })
    }
}

impl<F: NumberFormat> TryFrom<String> for Requested<F> {
    type Error = UnknownFormat;

    fn try_from(name: String) -> Result<Requested<F>, UnknownFormat> {
        name.parse()
    }
}

impl<F: NumberFormat> Display for Requested<F> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Requested::Auto => AUTO,
            Requested::Fixed(format) => format.name(),
        })
    }
}

impl<F: NumberFormat> From<Requested<F>> for String {
    fn from(requested: Requested<F>) -> String {
        requested.to_string()
    }
}

impl<F> From<F> for Requested<F> {
    fn from(format: F) -> Requested<F> {
        Requested::Fixed(format)
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
        for name in RequestedKvFormat::names() {
            assert_eq!(name.parse::<RequestedKvFormat>().unwrap().to_string(), name);
        }
        let weights = RequestedKvFormat::check("kv_cache", Some("w4a8")).unwrap_err();
        assert!(format!("{weights:?}").contains("take `int4` or `int8`"));
        let codes = RequestedPrecision::check("precision", Some("int4")).unwrap_err();
        assert!(format!("{codes:?}").contains("`w4a8`"));
        let error = serde_json::from_str::<RequestedPrecision>("\"F32\"").unwrap_err();
        assert!(
            error.to_string().contains("auto, f32, bf16, int8, fp8, w4a8"),
            "{error}"
        );
    }
}
