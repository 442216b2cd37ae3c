//! Parses a job file's text into the types of `file`, with parameters and included files filled in.
//!
//! See docs/decisions/011-the-job-hash-leaves-out-the-budget.md.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::file::JobFile;
use super::included::include;
use super::parameters::{Filled, Parameters};
use super::unknown::{unknown_field, unknown_message};
use super::wanted::{json_pointer, no_alternative_message, wrong_type_message};
use super::yaml_hint::advice;
use super::{JobError, one_line, sha256_hex};
use crate::regular;

/// Maximum size of a job file.
const FILE_BYTES_MAX: u64 = 4 << 20;
/// The path that stands for standard input.
const STDIN: &str = "-";
/// Maximum nesting in a job file.
const DEPTH_MAX: usize = 64;
/// Prefix of the `expecting` texts, which serde reports for a value that fits no alternative of its
/// type.
const EXPECTED_PREFIX: &str = "expected ";
/// Part of serde's message for a mapping where one of several names is expected.
const ENUM_MESSAGE: &str = "externally tagged enum";

/// A parsed job file, with the hash of its content.
#[derive(Debug, Clone)]
pub struct Parsed {
    pub file: JobFile,
    /// The hash that identifies the job, hexadecimal.
    pub hash: String,
    /// The content of the file, with parameters and included files filled in.
    pub content: Value,
}

impl JobFile {
    /// Reads a job file and fills in `parameters`. A `.json` file is JSON, any other is YAML; `-` is
    /// standard input.
    pub fn read(path: &Path, parameters: &Parameters) -> Result<Parsed, JobError> {
        let location = path.display().to_string();
        let path = if path == Path::new(STDIN) {
            Path::new("/dev/stdin")
        } else {
            path
        };
        let folder = base_dir(path);
        let read = |source| JobError::Read {
            path: path.to_path_buf(),
            source,
        };
        let size = std::fs::metadata(path).map_err(read)?.len();
        if size > FILE_BYTES_MAX {
            let message = format!("{size} bytes, more than the {FILE_BYTES_MAX} a job file may have");
            return Err(JobError::Invalid { location, message });
        }
        let bytes = regular::read(path, FILE_BYTES_MAX).map_err(read)?;
        let text = String::from_utf8(bytes).map_err(|_| JobError::Invalid {
            location: location.clone(),
            message: "not UTF-8 text".into(),
        })?;
        JobFile::parse_with(&text, &location, &folder, parameters)
    }

    /// Parses a job file's text. `name` is the file's name, for messages; if it ends in `.json`, the
    /// text is JSON.
    pub fn parse(text: &str, name: &str) -> Result<Parsed, JobError> {
        JobFile::parse_with(text, name, Path::new("."), &Parameters::default())
    }

    /// Like [`JobFile::parse`], with parameter values. Paths of included files are relative to
    /// `base_dir`.
    pub fn parse_with(text: &str, name: &str, base_dir: &Path, parameters: &Parameters) -> Result<Parsed, JobError> {
        let text = text.strip_prefix('\u{FEFF}').unwrap_or(text);
        let is_json = name.ends_with(".json");
        let mut content = if is_json {
            json_content(text, name)
        } else {
            yaml_content(text, name)
        }?;
        let filled = fill(&mut content, base_dir, parameters).map_err(|message| JobError::Invalid {
            location: name.to_string(),
            message,
        })?;
        let file = match (filled, is_json) {
            // Without parameters and included files, the types are parsed from the text itself, so
            // that errors have line numbers.
            (None, true) => typed_json(text, name, &content),
            (None, false) => typed_yaml(text, name, &content),
            (Some(filled), _) => typed_filled(&mut content, filled, name),
        }?;
        Ok(Parsed {
            file,
            hash: content_hash(&content),
            content,
        })
    }
}

/// The folder that a job file's paths are relative to: its own, or the working directory for
/// standard input.
pub(super) fn base_dir(path: &Path) -> PathBuf {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() && path != Path::new("/dev/stdin") => folder.to_path_buf(),
        _ => PathBuf::from("."),
    }
}

/// The content with an error, which is well-formed JSON or YAML, and the path to the error.
struct ErrorContext<'a> {
    content: &'a Value,
    /// For example `generate.stop[0]`; `.` for the whole content.
    path: String,
}

impl ErrorContext<'_> {
    /// Adds the path to a message about the value there; `None` if the content has no such path.
    fn message_at_path(&self, message: &str) -> Option<String> {
        self.content.pointer(&json_pointer(&self.path))?;
        if message.starts_with(EXPECTED_PREFIX) {
            no_alternative_message(&self.path, self.content, message)
        } else {
            Some(format!("`{}`: {message}", self.path))
        }
    }

    /// Converts serde's `message` about this path to a message for the user.
    fn user_message(&self, message: &str) -> String {
        let found = match unknown_field(message) {
            Some(field) => return unknown_message(field, self.content),
            None if is_type_error(message) => wrong_type_message(&self.path, self.content),
            None => self.message_at_path(&one_line(message)),
        };
        found.unwrap_or_else(|| one_line(message))
    }
}

/// Whether serde's message is about a value of the wrong type.
fn is_type_error(message: &str) -> bool {
    // serde_json reports a wrong value of an enum in the last form. It cannot mean invalid JSON: the
    // text was parsed before.
    let prefixes = ["invalid type", "invalid value", "unknown variant", "expected value"];
    prefixes.iter().any(|prefix| message.starts_with(prefix))
}

fn json_error(error: &serde_json::Error, name: &str, context: Option<&ErrorContext>) -> JobError {
    let full = error.to_string();
    let message = full.split(" at line ").next().unwrap_or(&full);
    let location = format!("{name}:{}", error.line());
    let message = context.map_or_else(|| one_line(message), |context| context.user_message(message));
    JobError::Invalid { location, message }
}

fn json_content(text: &str, name: &str) -> Result<Value, JobError> {
    serde_json::from_str(text).map_err(|error| json_error(&error, name, None))
}

fn typed_json(text: &str, name: &str, content: &Value) -> Result<JobFile, JobError> {
    let mut json = serde_json::Deserializer::from_str(text);
    serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = error.path().to_string();
        json_error(error.inner(), name, Some(&ErrorContext { content, path }))
    })
}

fn yaml_error(error: &serde_saphyr::Error, name: &str, context: Option<&ErrorContext>) -> JobError {
    let location = match error.location() {
        Some(start) if start.line() > 0 => format!("{name}:{}", start.line()),
        _ => name.to_string(),
    };
    let message = error
        .without_snippet()
        .render_with_formatter(&serde_saphyr::DefaultMessageFormatter);
    let message = one_line(message.split(" at line ").next().unwrap_or(&message));
    let message = match (error.without_snippet(), context) {
        (serde_saphyr::Error::SerdeUnknownField { field, .. }, Some(context)) => {
            unknown_message(field, context.content)
        }
        (serde_saphyr::Error::DuplicateMappingKey { key: Some(key), .. }, _) => format!("`{key}` is given twice"),
        (_, Some(context)) if message.contains(ENUM_MESSAGE) => {
            wrong_type_message(&context.path, context.content).unwrap_or(message)
        }
        (
            serde_saphyr::Error::InvalidScalar { .. }
            | serde_saphyr::Error::InvalidBooleanStrict { .. }
            | serde_saphyr::Error::Unexpected { .. }
            | serde_saphyr::Error::NullIntoString { .. }
            | serde_saphyr::Error::SerdeUnknownVariant { .. }
            | serde_saphyr::Error::SerdeInvalidType { .. }
            | serde_saphyr::Error::ExternallyTaggedEnumExpectedScalarOrMapping { .. },
            Some(context),
        ) => wrong_type_message(&context.path, context.content).unwrap_or(message),
        (_, Some(context)) => context.message_at_path(&message).unwrap_or(message),
        (_, None) => message,
    };
    JobError::Invalid { location, message }
}

fn yaml_content(text: &str, name: &str) -> Result<Value, JobError> {
    let content: Value = serde_saphyr::from_str_with_options(text, yaml_options()).map_err(|error| {
        let line = error.location().map_or(0, |start| start.line() as usize);
        let advice = line.checked_sub(1).and_then(|index| advice(text.lines().nth(index)?));
        match (yaml_error(&error, name, None), advice) {
            (JobError::Invalid { location, .. }, Some(message)) => JobError::Invalid { location, message },
            (error, _) => error,
        }
    })?;
    if !content.is_object() {
        let message = "a job file is a mapping of fields such as `name`, `model`, `input`".into();
        return Err(JobError::Invalid {
            location: name.to_string(),
            message,
        });
    }
    Ok(content)
}

fn typed_yaml(text: &str, name: &str, content: &Value) -> Result<JobFile, JobError> {
    let mut path = String::new();
    let read = serde_saphyr::with_deserializer_from_str_with_options(text, yaml_options(), |yaml| {
        serde_path_to_error::deserialize(yaml).map_err(|error| {
            path = error.path().to_string();
            error.into_inner()
        })
    });
    read.map_err(|error| yaml_error(&error, name, Some(&ErrorContext { content, path })))
}

/// Fills included files and parameters into `content`; `None` if it has neither.
fn fill(content: &mut Value, base_dir: &Path, parameters: &Parameters) -> Result<Option<Filled>, String> {
    let mut filler = parameters.filler();
    let has_included_files = include(content, base_dir, &mut filler)?;
    filler.fill_value(content, "")?;
    let filled = filler.finish()?;
    Ok((has_included_files || !filled.fields.is_empty()).then_some(filled))
}

/// Parses a filled content; the file's text no longer applies. A value that was a single parameter
/// becomes a number or boolean if its field needs one, or if it is in `chat_template_kwargs`, where
/// any value is allowed.
fn typed_filled(content: &mut Value, filled: Filled, name: &str) -> Result<JobFile, JobError> {
    let mut single_parameter_fields = filled.single_parameter_fields;
    single_parameter_fields
        .retain(|path| !(path.starts_with("prompt.chat_template_kwargs.") && replace_by_scalar(content, path)));
    loop {
        let error = match serde_path_to_error::deserialize::<_, JobFile>(&*content) {
            Ok(file) => return Ok(file),
            Err(error) => error,
        };
        let path = error.path().to_string();
        if let Some(index) = single_parameter_fields.iter().position(|field| *field == path) {
            single_parameter_fields.swap_remove(index);
            if replace_by_scalar(content, &path) {
                continue;
            }
        }
        return Err(JobError::Invalid {
            location: name.to_string(),
            message: ErrorContext { content, path }.user_message(&error.inner().to_string()),
        });
    }
}

/// Replaces the text at `path` by the number or boolean that it spells. Returns whether it spells
/// one.
fn replace_by_scalar(content: &mut Value, path: &str) -> bool {
    let Some(value) = content.pointer_mut(&json_pointer(path)) else {
        return false;
    };
    let scalar = value.as_str().and_then(|text| serde_json::from_str::<Value>(text).ok());
    match scalar {
        Some(scalar @ (Value::Number(_) | Value::Bool(_))) => {
            *value = scalar;
            true
        }
        _ => false,
    }
}

/// YAML 1.2 (`yes` and `no` are texts), with resource limits, since job files may be untrusted.
fn yaml_options() -> serde_saphyr::Options {
    let mut budget = serde_saphyr::Budget::default();
    budget.max_depth = DEPTH_MAX;
    budget.flow_nesting_limit = DEPTH_MAX;
    budget.max_documents = 1;
    budget.max_nodes = 500_000;
    budget.max_events = 1_000_000;
    budget.max_aliases = 1_000;
    budget.max_anchors = 1_000;
    budget.max_total_scalar_bytes = FILE_BYTES_MAX as usize;
    let mut options = serde_saphyr::Options::default();
    options.budget = Some(budget);
    options.strict_booleans = true;
    options.with_snippet = false;
    // NaN is not refused here: the checks refuse it, and their message names the field.
    options.non_finite_float_policy = serde_saphyr::NonFiniteFloatPolicy::PassThrough;
    options
}

/// The hashes that older gristmills gave a job with this `content`. They cover fields that today's
/// hash leaves out and, if the job was begun at a price of `usd_per_hour`, that price in `budget`.
pub(super) fn hashes_of_older_versions(content: &Value, usd_per_hour: Option<f64>) -> Vec<String> {
    let content = without_changeable_fields(content);
    let prices = usd_per_hour.into_iter().flat_map(|price| {
        // `5` and `5.0` are the same price, but have different hashes.
        let integer = (price.fract() == 0.0 && price < 1e15).then(|| Value::from(price as u64));
        [Some(Value::from(price)), integer].into_iter().flatten()
    });
    let hashes_with_price = prices.map(|price| {
        let mut content = content.clone();
        if let Value::Object(fields) = &mut content {
            fields.insert("budget".into(), serde_json::json!({"usd_per_hour": price}));
        }
        sorted_hash(&content)
    });
    [sorted_hash(&content)].into_iter().chain(hashes_with_price).collect()
}

/// The hash that identifies a job: SHA-256, hexadecimal, of all fields that can change an answer.
/// The name, the rows per shard and the output's location are left out. The model, its adapter and the
/// number formats are left out too: they are compared separately, so that the model may move.
fn content_hash(content: &Value) -> String {
    let mut content = without_changeable_fields(content);
    if let Value::Object(fields) = &mut content {
        for field in ["name", "model", "adapter", "precision", "kv_cache", "shards"] {
            fields.shift_remove(field);
        }
        if let Some(Value::Object(output)) = fields.get_mut("output") {
            output.shift_remove("uri");
            if output.is_empty() {
                fields.shift_remove("output");
            }
        }
    }
    sorted_hash(&content)
}

/// `content` without `queue`, `on_finish`, `report.recheck` and `budget`: jobs that differ only in
/// these fields are the same job.
fn without_changeable_fields(content: &Value) -> Value {
    let mut content = content.clone();
    if let Value::Object(fields) = &mut content {
        fields.shift_remove("queue");
        fields.shift_remove("on_finish");
        if fields.get("budget").is_some_and(Value::is_object) {
            fields.shift_remove("budget");
        }
        let only_recheck = match fields.get_mut("report") {
            Some(Value::Object(report)) => report.shift_remove("recheck").is_some() && report.is_empty(),
            _ => false,
        };
        if only_recheck {
            fields.shift_remove("report");
        }
    }
    content
}

/// SHA-256 of `content`, written compactly with sorted keys.
fn sorted_hash(content: &Value) -> String {
    fn sorted(value: &Value) -> Value {
        match value {
            Value::Object(map) => {
                let mut entries: Vec<_> = map.iter().collect();
                entries.sort_by_key(|(key, _)| key.as_str());
                let entries = entries.into_iter().map(|(key, value)| (key.clone(), sorted(value)));
                Value::Object(entries.collect())
            }
            Value::Array(items) => items.iter().map(sorted).collect(),
            other => other.clone(),
        }
    }
    sha256_hex(sorted(content).to_string())
}
