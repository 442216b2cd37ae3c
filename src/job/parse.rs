//! Parses a job file's text into the types of `file`, with parameters and included files filled in.
//!
//! See docs/decisions/011-the-job-hash-leaves-out-the-budget.md.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::file::JobFile;
use super::included::include;
use super::parameters::{Filled, Parameters};
use super::unknown::{unknown_field, unknown_message};
use super::wanted::{no_alternative, pointer, wrong_type};
use super::yaml_hint::advice;
use super::{JobError, one_line, sha256};
use crate::regular;

/// Largest job file, in bytes.
const FILE_BYTES_MAX: u64 = 4 << 20;
/// The path that stands for standard input.
const STDIN: &str = "-";
/// Deepest nesting in a job file.
const DEPTH_MAX: usize = 64;
/// Prefix of the messages of types with alternatives, for a value that fits none of them.
const EXPECTED: &str = "expected ";
/// Part of the message for a mapping in place of one of several words.
const OF_ENUM: &str = "externally tagged enum";

/// A parsed job file, with the hash of its content.
#[derive(Debug, Clone)]
pub struct Parsed {
    pub file: JobFile,
    /// The hash that identifies the job, hexadecimal.
    pub hash: String,
    /// The content as read, with parameters and files filled in.
    pub content: Value,
}

impl JobFile {
    /// Reads a job file, and fills in `parameters`. `.json` files are JSON, all others YAML; `-` is
    /// standard input.
    pub fn read(path: &Path, parameters: &Parameters) -> Result<Parsed, JobError> {
        let place = path.display().to_string();
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
            return Err(JobError::Invalid { place, message });
        }
        let bytes = regular::read(path, FILE_BYTES_MAX).map_err(read)?;
        let text = String::from_utf8(bytes).map_err(|_| JobError::Invalid {
            place: place.clone(),
            message: "not UTF-8 text".into(),
        })?;
        JobFile::parse_with(&text, &place, &folder, parameters)
    }

    /// Parses a job file's text. `name` is its file name, for messages; `.json` at its end means JSON.
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
            place: name.to_string(),
            message,
        })?;
        let file = match (filled, is_json) {
            // Errors then have line numbers, since the types are parsed from the text itself.
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

/// The base folder of a job file's relative paths: its own folder, or the working directory for
/// standard input.
pub(super) fn base_dir(path: &Path) -> PathBuf {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() && path != Path::new("/dev/stdin") => folder.to_path_buf(),
        _ => PathBuf::from("."),
    }
}

/// The location of an error in a content that is well-formed JSON or YAML.
struct In<'a> {
    content: &'a Value,
    /// Such as `generate.stop[0]`; `.` for the whole content.
    path: String,
}

impl In<'_> {
    /// A message about a value, with the value's path added; `None` if the path does not exist.
    fn at(&self, message: &str) -> Option<String> {
        self.content.pointer(&pointer(&self.path))?;
        if message.starts_with(EXPECTED) {
            no_alternative(&self.path, self.content, message)
        } else {
            Some(format!("`{}`: {message}", self.path))
        }
    }

    /// The user's message for serde's `message` about this path.
    fn said(&self, message: &str) -> String {
        let told = match unknown_field(message) {
            Some(field) => return unknown_message(field, self.content),
            None if is_of_type(message) => wrong_type(&self.path, self.content),
            None => self.at(&one_line(message)),
        };
        told.unwrap_or_else(|| one_line(message))
    }
}

/// Whether serde's message is about a value of the wrong type.
fn is_of_type(message: &str) -> bool {
    // serde_json reports an enum in the last form: the text is known to be JSON at this point.
    let words = ["invalid type", "invalid value", "unknown variant", "expected value"];
    words.iter().any(|word| message.starts_with(word))
}

fn json_error(error: &serde_json::Error, name: &str, within: Option<&In>) -> JobError {
    let full = error.to_string();
    let message = full.split(" at line ").next().unwrap_or(&full);
    let place = format!("{name}:{}", error.line());
    let message = within.map_or_else(|| one_line(message), |within| within.said(message));
    JobError::Invalid { place, message }
}

fn json_content(text: &str, name: &str) -> Result<Value, JobError> {
    serde_json::from_str(text).map_err(|error| json_error(&error, name, None))
}

fn typed_json(text: &str, name: &str, content: &Value) -> Result<JobFile, JobError> {
    let mut json = serde_json::Deserializer::from_str(text);
    serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = error.path().to_string();
        json_error(error.inner(), name, Some(&In { content, path }))
    })
}

fn yaml_error(error: &serde_saphyr::Error, name: &str, within: Option<&In>) -> JobError {
    let place = match error.location() {
        Some(at) if at.line() > 0 => format!("{name}:{}", at.line()),
        _ => name.to_string(),
    };
    let message = error
        .without_snippet()
        .render_with_formatter(&serde_saphyr::DefaultMessageFormatter);
    let message = one_line(message.split(" at line ").next().unwrap_or(&message));
    let message = match (error.without_snippet(), within) {
        (serde_saphyr::Error::SerdeUnknownField { field, .. }, Some(within)) => unknown_message(field, within.content),
        (serde_saphyr::Error::DuplicateMappingKey { key: Some(key), .. }, _) => format!("`{key}` is given twice"),
        (_, Some(within)) if message.contains(OF_ENUM) => wrong_type(&within.path, within.content).unwrap_or(message),
        (
            serde_saphyr::Error::InvalidScalar { .. }
            | serde_saphyr::Error::InvalidBooleanStrict { .. }
            | serde_saphyr::Error::Unexpected { .. }
            | serde_saphyr::Error::NullIntoString { .. }
            | serde_saphyr::Error::SerdeUnknownVariant { .. }
            | serde_saphyr::Error::SerdeInvalidType { .. }
            | serde_saphyr::Error::ExternallyTaggedEnumExpectedScalarOrMapping { .. },
            Some(within),
        ) => wrong_type(&within.path, within.content).unwrap_or(message),
        (_, Some(within)) => within.at(&message).unwrap_or(message),
        (_, None) => message,
    };
    JobError::Invalid { place, message }
}

fn yaml_content(text: &str, name: &str) -> Result<Value, JobError> {
    let content: Value = serde_saphyr::from_str_with_options(text, yaml_options()).map_err(|error| {
        let line = error.location().map_or(0, |at| at.line() as usize);
        let advice = line.checked_sub(1).and_then(|at| advice(text.lines().nth(at)?));
        match (yaml_error(&error, name, None), advice) {
            (JobError::Invalid { place, .. }, Some(message)) => JobError::Invalid { place, message },
            (error, _) => error,
        }
    })?;
    if !content.is_object() {
        let message = "a job file is a mapping of fields such as `name`, `model`, `input`".into();
        return Err(JobError::Invalid {
            place: name.to_string(),
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
    read.map_err(|error| yaml_error(&error, name, Some(&In { content, path })))
}

/// Fills files and parameters into `content`; `None` if there are none.
fn fill(content: &mut Value, base_dir: &Path, parameters: &Parameters) -> Result<Option<Filled>, String> {
    let mut filling = parameters.filling();
    let any = include(content, base_dir, &mut filling)?;
    filling.value(content, "")?;
    let filled = filling.end()?;
    Ok((any || !filled.fields.is_empty()).then_some(filled))
}

/// Parses a filled content, which no longer has a text. A text that consisted of a single parameter
/// becomes a number or boolean if its field requires one, or if the field accepts any value.
fn typed_filled(content: &mut Value, filled: Filled, name: &str) -> Result<JobFile, JobError> {
    let mut whole = filled.whole;
    whole.retain(|path| !(path.starts_with("prompt.chat_template_kwargs.") && read_scalar(content, path)));
    loop {
        let error = match serde_path_to_error::deserialize::<_, JobFile>(&*content) {
            Ok(file) => return Ok(file),
            Err(error) => error,
        };
        let path = error.path().to_string();
        if let Some(at) = whole.iter().position(|one| *one == path) {
            whole.swap_remove(at);
            if read_scalar(content, &path) {
                continue;
            }
        }
        return Err(JobError::Invalid {
            place: name.to_string(),
            message: In { content, path }.said(&error.inner().to_string()),
        });
    }
}

/// Replaces the text at `path` by the number or boolean that it spells; false if it spells neither.
fn read_scalar(content: &mut Value, path: &str) -> bool {
    let Some(value) = content.pointer_mut(&pointer(path)) else {
        return false;
    };
    let spelt = value.as_str().and_then(|text| serde_json::from_str::<Value>(text).ok());
    match spelt {
        Some(spelt @ (Value::Number(_) | Value::Bool(_))) => {
            *value = spelt;
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
    // NaN is passed on to the checks, which name the field.
    options.non_finite_float_policy = serde_saphyr::NonFiniteFloatPolicy::PassThrough;
    options
}

/// The hashes that older gristmills gave a job of this `content`. They include fields that no
/// longer make it another job and, if the job was begun at a price of `usd_per_hour`, that price in
/// `budget`.
pub(super) fn earlier_hashes(content: &Value, usd_per_hour: Option<f64>) -> Vec<String> {
    let content = without_limits(content);
    let price = usd_per_hour.into_iter().flat_map(|price| {
        // `5` and `5.0` are the same price with different texts.
        let whole = (price.fract() == 0.0 && price < 1e15).then(|| Value::from(price as u64));
        [Some(Value::from(price)), whole].into_iter().flatten()
    });
    let priced = price.map(|price| {
        let mut content = content.clone();
        if let Value::Object(fields) = &mut content {
            fields.insert("budget".into(), serde_json::json!({"usd_per_hour": price}));
        }
        sorted_hash(&content)
    });
    [sorted_hash(&content)].into_iter().chain(priced).collect()
}

/// The hash that identifies a job: SHA-256, hexadecimal, of all fields that can change an answer.
/// The name, the rows per shard and the output's location are excluded. The model and the number
/// formats are excluded too, since they are compared separately, wherever the model is stored.
fn content_hash(content: &Value) -> String {
    let mut content = without_limits(content);
    if let Value::Object(fields) = &mut content {
        for field in ["name", "model", "precision", "kv_cache", "shards"] {
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

/// `content` without `queue`, `on_finish`, `report.recheck` and `budget`. Another limit, price,
/// queue, recheck or receiver of the result never made it another job.
fn without_limits(content: &Value) -> Value {
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
    sha256(sorted(content).to_string())
}
