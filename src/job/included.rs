//! Texts and schemas that a job file includes from other files: `{file: PATH}` in place of a
//! prompt's text or of `json_schema`.
//!
//! The included content is treated like the job file's own: parameters are filled in, and the
//! content is part of the job's hash.

use std::path::Path;

use serde_json::Value;

use super::parameters::Filling;
use crate::regular;

/// Largest file, in bytes.
const FILE_BYTES_MAX: u64 = 4 << 20;

const BYTE_ORDER_MARK: char = '\u{FEFF}';

/// Replaces references to files in `content` by the files' contents; paths are relative to
/// `base_dir`. Returns whether there were any.
///
/// # Errors
/// A field names a file that cannot be read; the message goes behind the job file's name.
pub(super) fn include(content: &mut Value, base_dir: &Path, filling: &mut Filling) -> Result<bool, String> {
    let mut include = Include {
        base_dir,
        filling,
        any: false,
    };
    if let Some(prompt) = content.get_mut("prompt") {
        if let Some(text) = prompt.get_mut("text") {
            include.text(text, "prompt.text")?;
        }
        let messages = prompt.get_mut("messages").and_then(Value::as_array_mut);
        for (i, message) in messages.into_iter().flatten().enumerate() {
            let Some(content) = message.get_mut("content") else {
                continue;
            };
            let field = format!("prompt.messages[{i}].content");
            match content {
                Value::Array(parts) => {
                    for (part, value) in parts.iter_mut().enumerate() {
                        if let Some(text) = value.get_mut("text") {
                            include.text(text, &format!("{field}[{part}].text"))?;
                        }
                    }
                }
                content => include.text(content, &field)?,
            }
        }
    }
    if let Some(schema) = content.pointer_mut("/generate/json_schema") {
        include.json(schema, "generate.json_schema")?;
    }
    Ok(include.any)
}

struct Include<'a, 'b> {
    base_dir: &'a Path,
    filling: &'a mut Filling<'b>,
    any: bool,
}

impl Include<'_, '_> {
    fn text(&mut self, value: &mut Value, field: &str) -> Result<(), String> {
        if let Some((_, text)) = self.read(value, field)? {
            let mut text = text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(&text).to_string();
            // Editors end a file with a line break, which is removed.
            let end = text
                .strip_suffix('\n')
                .map(|text| text.strip_suffix('\r').unwrap_or(text));
            let length = end.map_or(text.len(), str::len);
            text.truncate(length);
            *value = Value::String(text);
        }
        Ok(())
    }

    fn json(&mut self, value: &mut Value, field: &str) -> Result<(), String> {
        if let Some((path, text)) = self.read(value, field)? {
            let text = text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(&text);
            *value =
                serde_json::from_str(text).map_err(|error| format!("`{field}.file`: `{path}` is no JSON: {error}"))?;
        }
        Ok(())
    }

    /// Path and text of the file that `value` names; `None` if it is no file reference.
    fn read(&mut self, value: &Value, field: &str) -> Result<Option<(String, String)>, String> {
        let Some(named) = value
            .as_object()
            .filter(|map| map.len() == 1)
            .and_then(|map| map.get("file"))
        else {
            return Ok(None);
        };
        let named = named.as_str().ok_or_else(|| format!("`{field}.file` is not a path"))?;
        let (named, _) = self
            .filling
            .text(named)
            .map_err(|why| format!("`{field}.file`: {why}"))?;
        let path = self.base_dir.join(&named);
        let text = regular::read_text(&path, FILE_BYTES_MAX)
            .map_err(|error| format!("`{field}.file`: cannot read `{}`: {error}", path.display()))?;
        self.any = true;
        Ok(Some((named, text)))
    }
}
