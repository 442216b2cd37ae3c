//! Texts and schemas that a job file includes from other files: `{file: PATH}` in place of a
//! prompt's text or of `json_schema`.
//!
//! Included content counts as the job file's own: parameters are filled in, and the job's hash
//! covers it.

use std::path::Path;

use serde_json::Value;

use super::parameters::ParameterFiller;
use crate::regular;

/// Maximum size of an included file.
const FILE_BYTES_MAX: u64 = 4 << 20;

const BYTE_ORDER_MARK: char = '\u{FEFF}';

/// Replaces references to files in `content` by the files' contents; paths are relative to
/// `base_dir`. Returns whether there were any references.
///
/// # Errors
/// A field names a file that cannot be read. The message follows the job file's name.
pub(super) fn include(content: &mut Value, base_dir: &Path, filler: &mut ParameterFiller) -> Result<bool, String> {
    let mut includer = Includer {
        base_dir,
        filler,
        found_any: false,
    };
    if let Some(prompt) = content.get_mut("prompt") {
        if let Some(text) = prompt.get_mut("text") {
            includer.include_text(text, "prompt.text")?;
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
                            includer.include_text(text, &format!("{field}[{part}].text"))?;
                        }
                    }
                }
                content => includer.include_text(content, &field)?,
            }
        }
    }
    if let Some(schema) = content.pointer_mut("/generate/json_schema") {
        includer.include_json(schema, "generate.json_schema")?;
    }
    Ok(includer.found_any)
}

struct Includer<'a, 'b> {
    base_dir: &'a Path,
    filler: &'a mut ParameterFiller<'b>,
    found_any: bool,
}

impl Includer<'_, '_> {
    fn include_text(&mut self, value: &mut Value, field: &str) -> Result<(), String> {
        if let Some((_, text)) = self.read_reference(value, field)? {
            let mut text = text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(&text).to_string();
            // Editors write a line break at a file's end; it is removed.
            let end = text
                .strip_suffix('\n')
                .map(|text| text.strip_suffix('\r').unwrap_or(text));
            let length = end.map_or(text.len(), str::len);
            text.truncate(length);
            *value = Value::String(text);
        }
        Ok(())
    }

    fn include_json(&mut self, value: &mut Value, field: &str) -> Result<(), String> {
        if let Some((path, text)) = self.read_reference(value, field)? {
            let text = text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(&text);
            *value =
                serde_json::from_str(text).map_err(|error| format!("`{field}.file`: `{path}` is no JSON: {error}"))?;
        }
        Ok(())
    }

    /// Path and text of the file that `value` refers to; `None` if it is no reference to a file.
    fn read_reference(&mut self, value: &Value, field: &str) -> Result<Option<(String, String)>, String> {
        let Some(path_text) = value
            .as_object()
            .filter(|map| map.len() == 1)
            .and_then(|map| map.get("file"))
        else {
            return Ok(None);
        };
        let path_text = path_text
            .as_str()
            .ok_or_else(|| format!("`{field}.file` is not a path"))?;
        let (path_text, _) = self
            .filler
            .fill_text(path_text)
            .map_err(|why| format!("`{field}.file`: {why}"))?;
        let path = self.base_dir.join(&path_text);
        let text = regular::read_text(&path, FILE_BYTES_MAX)
            .map_err(|error| format!("`{field}.file`: cannot read `{}`: {error}", path.display()))?;
        self.found_any = true;
        Ok(Some((path_text, text)))
    }
}
