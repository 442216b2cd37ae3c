//! Reading a job file: from its text, with parameters and files filled in, to the types of `file`.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::file::JobFile;
use super::included::include;
use super::parameters::{Filled, Parameters};
use super::unknown::{unknown_field, unknown_message};
use super::wanted::{no_alternative, pointer, wrong_type};
use super::{JobError, one_line, sha256};
use crate::regular;

/// Largest job file, in bytes.
const FILE_BYTES_MAX: u64 = 4 << 20;
/// The path of a job file that comes on standard input.
const STDIN: &str = "-";
/// Deepest nesting in a job file.
const DEPTH_MAX: usize = 64;
/// How types with alternatives say what they are where a value fits none.
const EXPECTED: &str = "expected ";

/// A job file that was read, with what its content is known by.
#[derive(Debug, Clone)]
pub struct Parsed {
    pub file: JobFile,
    /// What the job is known by, hexadecimal.
    pub hash: String,
    /// As it was read, with parameters and files filled in.
    pub content: Value,
}

impl JobFile {
    /// Reads a job file, and fills `parameters` in. `.json` is JSON, all else YAML; `-` is standard input.
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

    /// As [`JobFile::parse`], with values for its parameters. Files that it names lie in `base_dir`.
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
            // Typed from the text itself, errors know their line.
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

/// The folder that paths of a job file start from: its own, or the working directory's for one on standard input.
pub(super) fn base_dir(path: &Path) -> PathBuf {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() && path != Path::new("/dev/stdin") => folder.to_path_buf(),
        _ => PathBuf::from("."),
    }
}

/// Where in a content that is sound JSON or YAML something is wrong.
struct In<'a> {
    content: &'a Value,
    /// As `generate.stop[0]`; `.` where it is the whole.
    path: String,
}

impl In<'_> {
    /// Of a message that says what is wrong with a value: the same with its place; `None`: it has none.
    fn at(&self, message: &str) -> Option<String> {
        self.content.pointer(&pointer(&self.path))?;
        match message.starts_with(EXPECTED) {
            true => no_alternative(&self.path, self.content, message),
            false => Some(format!("`{}`: {message}", self.path)),
        }
    }

    /// What a user is told of serde's `message` about this place.
    fn said(&self, message: &str) -> String {
        let told = match unknown_field(message) {
            Some(field) => return unknown_message(field, self.content),
            None if is_of_type(message) => wrong_type(&self.path, self.content),
            None => self.at(&one_line(message)),
        };
        told.unwrap_or_else(|| one_line(message))
    }
}

/// Whether serde's message is about a value of another type than its field's.
fn is_of_type(message: &str) -> bool {
    // The last is what serde_json says of an enum: the text as a whole is JSON by then.
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
    let content: Value =
        serde_saphyr::from_str_with_options(text, yaml_options()).map_err(|error| yaml_error(&error, name, None))?;
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

/// Fills files and parameters into `content`; `None`: there were none.
fn fill(content: &mut Value, base_dir: &Path, parameters: &Parameters) -> Result<Option<Filled>, String> {
    let mut filling = parameters.filling();
    let any = include(content, base_dir, &mut filling)?;
    filling.value(content, "")?;
    let filled = filling.end()?;
    Ok((any || !filled.fields.is_empty()).then_some(filled))
}

/// The job file of a content that no longer is its text. A text that was one parameter becomes a number or a truth value where its field
/// wants one, and where the field takes any value.
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

/// Makes the text at `path` the number or truth value that it spells; false: it spells none.
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

/// YAML 1.2 (`yes` and `no` are texts), with bounds: job files come from anywhere.
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
    // Not-a-number reaches the checks, which name the field.
    options.non_finite_float_policy = serde_saphyr::NonFiniteFloatPolicy::PassThrough;
    options
}

/// The hashes that older gristmills gave a job of this `content`: with all that makes no other job now, and, where the job was begun at
/// a price of `usd_per_hour`, with that in `budget`.
pub(super) fn earlier_hashes(content: &Value, usd_per_hour: Option<f64>) -> Vec<String> {
    let content = without_limits(content);
    let price = usd_per_hour.into_iter().flat_map(|price| {
        // `5` and `5.0` are one price and were two texts.
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

/// What a job of this `content` is known by: SHA-256, hexadecimal, of all that can change an answer. Its name, the rows of a shard and the
/// place of its output can not; model and number formats are compared by themselves, wherever the model lies.
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

/// `content` without `queue`, `on_finish`, `report.recheck` and `budget`: more money or time for a job, another price or way to its workers,
/// a look at its answers afterwards, or who is told of its end never made another job of it.
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

/// Of `content`, written compactly with sorted keys.
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
