//! Reads the fields of a JSON object and checks their types.

use std::path::Path;

use serde_json::{Map, Value};

use crate::model::error::ModelError;
use crate::model::read_limited;
use crate::python_json;

/// Maximum size of `config.json`. Label names may need some MB.
const CONFIG_BYTES_MAX: u64 = 32 << 20;

/// Reads a file that holds one JSON object.
///
/// # Errors
/// The file cannot be read, is too large, or holds something other than an object.
pub(super) fn read_json(path: &Path) -> Result<Map<String, Value>, ModelError> {
    parse(path, &read_limited(path, CONFIG_BYTES_MAX)?)
}

/// Parses `bytes` as a JSON object. Errors name `path`.
pub(super) fn parse(path: &Path, bytes: &[u8]) -> Result<Map<String, Value>, ModelError> {
    match python_json::from_slice(bytes) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(ModelError::broken(path, "not a JSON object")),
        Err(e) => Err(ModelError::broken(path, format!("not valid JSON: {e}"))),
    }
}

/// A JSON object and the file that it comes from.
pub(super) struct Reader<'a> {
    pub path: &'a Path,
    pub map: &'a Map<String, Value>,
}

impl Reader<'_> {
    pub(super) fn broken(&self, message: String) -> ModelError {
        ModelError::broken(self.path, message)
    }

    pub(super) fn unsupported(&self, message: String) -> ModelError {
        ModelError::unsupported(self.path, message)
    }

    /// The value of a field that is present and not null.
    pub(super) fn get(&self, name: &str) -> Option<&Value> {
        self.map.get(name).filter(|v| !v.is_null())
    }

    pub(super) fn is_zero(&self, name: &str) -> bool {
        self.get(name).is_some_and(|value| value.as_u64() == Some(0))
    }

    /// As [`size`](Self::size), where 0 is allowed, too.
    pub(super) fn size_or_zero(&self, name: &str, max: usize) -> Result<Option<usize>, ModelError> {
        if self.is_zero(name) {
            return Ok(Some(0));
        }
        self.size(name, max)
    }

    pub(super) fn size(&self, name: &str, max: usize) -> Result<Option<usize>, ModelError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match value.as_u64() {
            Some(n) if n >= 1 && n <= max as u64 => Ok(Some(n as usize)),
            _ => Err(self.broken(format!(
                "`{name}` is {}, not a whole number from 1 to {max}",
                short(value)
            ))),
        }
    }

    pub(super) fn required_size(&self, name: &str, max: usize) -> Result<usize, ModelError> {
        self.size_or(name, max, None)
    }

    /// A size, or its family's default. Without a default the field is required.
    pub(super) fn size_or(&self, name: &str, max: usize, default: Option<usize>) -> Result<usize, ModelError> {
        self.size(name, max)?
            .or(default)
            .ok_or_else(|| self.broken(format!("`{name}` is missing")))
    }

    /// A soft cap. An absent field takes the default; null means no cap.
    pub(super) fn soft_cap(&self, name: &str, default: Option<f32>) -> Result<Option<f32>, ModelError> {
        if !self.map.contains_key(name) {
            return Ok(default);
        }
        Ok(self.number_in(name, 1e-6, 1e6)?.map(|cap| cap as f32))
    }

    pub(super) fn flag(&self, name: &str) -> Result<Option<bool>, ModelError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        value
            .as_bool()
            .map(Some)
            .ok_or_else(|| self.broken(format!("`{name}` is {}, not true or false", short(value))))
    }

    pub(super) fn number(&self, name: &str) -> Result<Option<f64>, ModelError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match value.as_f64() {
            Some(x) if x.is_finite() => Ok(Some(x)),
            _ => Err(self.broken(format!("`{name}` is {}, not a number", short(value)))),
        }
    }

    pub(super) fn number_in(&self, name: &str, min: f64, max: f64) -> Result<Option<f64>, ModelError> {
        match self.number(name)? {
            Some(x) if x < min || x > max => Err(self.broken(format!("`{name}` is {x}, not from {min} to {max}"))),
            x => Ok(x),
        }
    }

    pub(super) fn text(&self, name: &str) -> Result<Option<&str>, ModelError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        value
            .as_str()
            .map(Some)
            .ok_or_else(|| self.broken(format!("`{name}` is {}, not a text", short(value))))
    }
}

/// A value as text for an error message, cut to fit on a line.
pub(super) fn short(value: &Value) -> String {
    cut(&value.to_string())
}

pub(super) fn cut(text: &str) -> String {
    match text.char_indices().nth(60) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}
