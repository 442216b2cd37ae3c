//! Helpers for checks of a job file: the error for a field's value, and limits of texts and
//! numbers.

/// Maximum length of names, columns, stops and choices, in bytes.
const TEXT_BYTES_MAX: usize = 16 << 10;

/// An invalid value of a field; `field` is its path in the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FieldError {
    pub field: String,
    pub why: String,
}

impl std::fmt::Display for FieldError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "`{}` {}", self.field, self.why)
    }
}

/// Fails with an invalid value of `field`.
pub(super) fn bad<T>(field: impl Into<String>, why: impl Into<String>) -> Result<T, FieldError> {
    Err(FieldError {
        field: field.into(),
        why: why.into(),
    })
}

/// Checks a name or address: not empty, and within the length limit.
pub(super) fn text(field: &str, value: String) -> Result<String, FieldError> {
    filled(field, &value)?;
    Ok(value)
}

/// Like [`text`], for a borrowed value.
pub(super) fn filled(field: &str, value: &str) -> Result<(), FieldError> {
    if value.trim().is_empty() {
        return bad(field, "is empty");
    }
    check_length(field, value)
}

/// Checks the length limit of names and phrases.
pub(super) fn check_length(field: &str, value: &str) -> Result<(), FieldError> {
    match value.len() {
        0..=TEXT_BYTES_MAX => Ok(()),
        len => bad(
            field,
            format!("holds a text of {len} bytes, more than {TEXT_BYTES_MAX}"),
        ),
    }
}

/// A whole number from `low` to `high`.
pub(super) fn integer_in(
    field: &str,
    value: Option<i64>,
    default: u32,
    low: u32,
    high: u32,
) -> Result<u32, FieldError> {
    let value = value.unwrap_or(default.into());
    match u32::try_from(value) {
        Ok(value) if (low..=high).contains(&value) => Ok(value),
        _ => bad(field, format!("is {value}; it must be from {low} to {high}")),
    }
}

/// A number from `low` to `high`.
pub(super) fn within(field: &str, value: Option<f64>, default: f64, low: f64, high: f64) -> Result<f32, FieldError> {
    let value = value.unwrap_or(default);
    // NaN is in no range.
    if (low..=high).contains(&value) {
        Ok(value as f32)
    } else {
        bad(field, format!("is {value}; it must be from {low} to {high}"))
    }
}
