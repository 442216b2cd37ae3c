//! Helpers for checks of a job: the error for an invalid field, and limits of texts and numbers.

/// Maximum length of names, columns, stops and choices, in bytes.
const TEXT_BYTES_MAX: usize = 16 << 10;

/// An invalid value of a field.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FieldError {
    /// The field's path in the job file.
    pub field: String,
    /// Continues the field's name: `is empty`.
    pub why: String,
}

impl std::fmt::Display for FieldError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "`{}` {}", self.field, self.why)
    }
}

/// Returns the error that the value of `field` is invalid; `why` continues the field's name.
pub(super) fn bad<T>(field: impl Into<String>, why: impl Into<String>) -> Result<T, FieldError> {
    Err(FieldError {
        field: field.into(),
        why: why.into(),
    })
}

/// Returns a name or address that is not blank and is within the length limit.
pub(super) fn checked_text(field: &str, value: String) -> Result<String, FieldError> {
    check_text(field, &value)?;
    Ok(value)
}

/// Like [`checked_text`], for a borrowed value.
pub(super) fn check_text(field: &str, value: &str) -> Result<(), FieldError> {
    if value.trim().is_empty() {
        return bad(field, "is empty");
    }
    check_length(field, value)
}

/// Checks the length of a text, which may be empty.
pub(super) fn check_length(field: &str, value: &str) -> Result<(), FieldError> {
    match value.len() {
        0..=TEXT_BYTES_MAX => Ok(()),
        len => bad(
            field,
            format!("holds a text of {len} bytes, more than {TEXT_BYTES_MAX}"),
        ),
    }
}

/// Returns `value`, or `default` if it is unset, as a whole number from `low` to `high`.
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

/// Like [`integer_in`], for a number with a fraction.
pub(super) fn number_in(field: &str, value: Option<f64>, default: f64, low: f64, high: f64) -> Result<f32, FieldError> {
    let value = value.unwrap_or(default);
    // NaN is refused here: it is in no range.
    if (low..=high).contains(&value) {
        Ok(value as f32)
    } else {
        bad(field, format!("is {value}; it must be from {low} to {high}"))
    }
}
