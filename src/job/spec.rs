//! A valid job: what the job file says, checked, with all defaults filled in. Nothing downstream checks again.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use super::chat::Turn;
use super::check::{FieldError, bad, short, text, whole};
use super::file::{
    BudgetFile, ContentFile, JobFile, MessageFile, OutputFile, OutputFormat, Parsed, PromptFile, Role, Truncate,
    Unfinished, hashes_with_price,
};
use super::generate::{Generate, ShapeSpec};
use super::queue::JobQueue;
use super::recheck::Recheck;
use super::{JobError, suggest};
use crate::dataset::plan::Format;

/// Largest `chat_template` file, in bytes.
const TEMPLATE_BYTES_MAX: u64 = 4 << 20;
/// Rows of a shard where the job does not say.
const SHARD_ROWS: i64 = 4096;
const SHARD_ROWS_MAX: i64 = 1_000_000;
/// Largest `context`: longer than any model's.
const CONTEXT_MAX: u32 = 1 << 26;
const CACHE_SALT_CHARS_MAX: usize = 256;

/// Columns that results have besides the carried ones.
pub const RESULT_COLUMNS: [&str; 12] = [
    "row",
    "status",
    "completion",
    "parsed",
    "finish_reason",
    "error",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "token_ids",
    "logprobs",
    "choice_probabilities",
];

/// A checked job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Job {
    pub name: String,
    /// As written: a path relative to `base_dir`, `hf://…` or a URL.
    pub model: String,
    pub precision: Precision,
    /// Of keys and values; `Auto`: the precision's own.
    #[serde(default)]
    pub kv_cache: Precision,
    /// No bit of a row's answer may depend on what is computed beside it.
    #[serde(default)]
    pub deterministic: bool,
    /// Jobs with the same salt share computed prefixes; `None`: the job shares with itself alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_salt: Option<String>,
    /// Longest sequence in tokens, at least 2; `None`: what the checkpoint declares.
    pub context: Option<u32>,
    pub input: Input,
    pub prompt: Prompt,
    pub generate: Generate,
    pub output: Output,
    /// Rows of a shard, at least 1.
    pub shard_rows: u64,
    pub budget: Budget,
    /// Where `submit` enqueues. No part of the job's record: another queue does not make another job.
    #[serde(skip)]
    pub queue: Option<JobQueue>,
    /// The input column with right answers, for the report.
    pub gold: Option<String>,
    /// What the report runs again. No part of the job's record either: it changes no row.
    #[serde(skip)]
    pub recheck: Option<Recheck>,
    /// The job file's folder; paths without a scheme are relative to it.
    pub base_dir: PathBuf,
    /// The job file, for messages.
    pub file: String,
    /// SHA-256, hexadecimal, of the job file's content: a job with the same hash is the same job.
    pub hash: String,
    /// Of the job file as it was read; null where the job comes from a record.
    #[serde(skip)]
    pub content: Value,
}

/// Number format to compute in, or to keep keys and values in.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    #[default]
    Auto,
    F32,
    Bf16,
    Int8,
    /// On a GPU alone.
    Fp8,
}

/// The rows to work on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Input {
    /// As written, at least one; may hold wildcards.
    pub uris: Vec<String>,
    /// `None`: told apart by content.
    pub format: Option<Format>,
}

/// What the model is asked.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Prompt {
    pub kind: PromptKind,
    /// The chat template that the job gives; `None` takes the checkpoint's default.
    pub chat_template: Option<ChatTemplateChoice>,
    pub chat_template_kwargs: Map<String, Value>,
    /// With `continue_final_message`: what the job says of how prompts end; see [`Prompt::turn`].
    #[serde(default)]
    pub add_generation_prompt: Option<bool>,
    #[serde(default)]
    pub continue_final_message: Option<bool>,
    pub truncate: Truncate,
}

impl Prompt {
    /// How rendered conversations end, by the job's fields and its `chat_template_kwargs`; `None`: nothing is said. The
    /// error goes behind the name of the block.
    pub fn turn(&self) -> Result<Option<Turn>, String> {
        let fields = [self.add_generation_prompt, self.continue_final_message].map(|flag| flag.map(Value::Bool));
        Turn::of([fields[0].as_ref(), fields[1].as_ref()], &self.chat_template_kwargs)
    }
}

/// Where a row's prompt comes from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PromptKind {
    /// A conversation of column templates, at least one.
    Messages(Vec<Message>),
    /// A column template, without chat template.
    Text(String),
    /// A column of token ids.
    TokenIds(String),
    /// The row is a line of an OpenAI batch file.
    Openai,
}

/// One message, its content a column template.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Message {
    pub role: Role,
    /// One template; or several, for content that is written as a list of parts.
    pub parts: Vec<String>,
    pub is_list: bool,
}

/// A job's own chat template.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChatTemplateChoice {
    /// One of the checkpoint's, by name.
    Named(String),
    Source(String),
}

/// Where results go.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Output {
    /// As written.
    pub uri: String,
    pub carry: Vec<String>,
    pub format: OutputFormat,
    pub token_ids: bool,
}

/// What the job may cost.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Budget {
    pub usd: Option<f64>,
    pub usd_per_hour: Option<f64>,
    pub deadline_seconds: Option<u64>,
    /// What becomes of the rows that are left when a limit is reached.
    #[serde(default)]
    pub unfinished: Unfinished,
}

impl Job {
    /// Reads and checks a job file.
    pub fn load(path: &Path) -> Result<Job, JobError> {
        let parsed = JobFile::read(path)?;
        let base_dir = match path.parent() {
            Some(dir) if !dir.as_os_str().is_empty() => dir.to_path_buf(),
            _ => PathBuf::from("."),
        };
        Job::check(parsed, &path.display().to_string(), &base_dir)
    }

    /// Checks a parsed job file. `file` names it in messages; relative paths start from `base_dir`.
    pub fn check(parsed: Parsed, file: &str, base_dir: &Path) -> Result<Job, JobError> {
        build(parsed, file, base_dir).map_err(|error| JobError::Invalid {
            place: file.to_string(),
            message: error.to_string(),
        })
    }

    /// SHA-256, hexadecimal, of the job file's content.
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// Whether `hash` is this job's, or was while the price `usd_per_hour` was part of it.
    pub fn hashes_to(&self, hash: &str, usd_per_hour: Option<f64>) -> bool {
        let earlier = usd_per_hour.map(|price| hashes_with_price(&self.content, price));
        hash == self.hash || earlier.into_iter().flatten().any(|earlier| earlier == hash)
    }

    /// The job with all defaults filled in, for the ledger: [`Job::of_record`] reads it back on any machine, so the
    /// folder that relative paths start from is absolute.
    pub fn resolved(&self) -> Value {
        let base_dir = std::path::absolute(&self.base_dir).unwrap_or_else(|_| self.base_dir.clone());
        let job = Job {
            base_dir,
            ..self.clone()
        };
        // A job holds only what JSON can: numbers were checked to be finite.
        serde_json::to_value(&job).unwrap_or(Value::Null)
    }

    /// The job that [`Job::resolved`] wrote down; `place` says where, for the message.
    ///
    /// # Errors
    /// The record is no job, or one of a gristmill whose jobs can be what this one's cannot.
    pub fn of_record(resolved: &Value, place: &str) -> Result<Job, JobError> {
        Job::deserialize(resolved).map_err(|error| JobError::Invalid {
            place: place.to_string(),
            message: format!(
                "the job in this record cannot be read: {}",
                super::one_line(&error.to_string())
            ),
        })
    }

    /// The key of the job's random stream: the given seed, or one derived from the job's id.
    pub fn seed(&self, job_id: &str) -> u64 {
        self.generate.seed.unwrap_or_else(|| {
            let digest = Sha256::digest(format!("gristmill seed {job_id}"));
            digest.iter().take(8).fold(0, |seed, byte| seed << 8 | u64::from(*byte))
        })
    }
}

fn build(parsed: Parsed, file: &str, base_dir: &Path) -> Result<Job, FieldError> {
    let Parsed {
        file: raw,
        hash,
        content,
    } = parsed;
    let name = text("name", raw.name)?;
    if name.chars().any(char::is_control) {
        return bad("name", "holds control characters");
    }
    let model = text("model", raw.model)?;
    let uris = raw.input.uri.into_vec();
    if uris.is_empty() {
        return bad("input.uri", "is an empty list");
    }
    let uris = uris
        .into_iter()
        .map(|uri| text("input.uri", uri))
        .collect::<Result<Vec<_>, _>>()?;
    let generate = Generate::check(&raw.generate.unwrap_or_default()).map_err(|e| FieldError {
        field: format!("generate.{}", e.field),
        why: e.why,
    })?;
    let report = raw.report.unwrap_or_default();
    let gold = report.gold.map(|gold| text("report.gold", gold)).transpose()?;
    let recheck = report.recheck.map(Recheck::check).transpose()?;
    let output = output(raw.output)?;
    check_together(&generate, &output, gold.is_some(), recheck.is_some())?;
    let rows = raw.shards.and_then(|shards| shards.rows).unwrap_or(SHARD_ROWS);
    if !(1..=SHARD_ROWS_MAX).contains(&rows) {
        return bad(
            "shards.rows",
            format!("is {rows}; it must be from 1 to {SHARD_ROWS_MAX}"),
        );
    }
    Ok(Job {
        name,
        model,
        precision: precision("precision", raw.precision.as_deref())?,
        kv_cache: precision("kv_cache", raw.kv_cache.as_deref())?,
        deterministic: raw.deterministic.unwrap_or(false),
        cache_salt: raw.cache_salt.map(cache_salt).transpose()?,
        context: raw
            .context
            .map(|tokens| whole("context", Some(tokens), 2, 2, CONTEXT_MAX))
            .transpose()?,
        input: Input {
            uris,
            format: raw.input.format,
        },
        prompt: prompt(raw.prompt, raw.input.format, base_dir)?,
        generate,
        output,
        shard_rows: rows.unsigned_abs(),
        budget: budget(raw.budget.unwrap_or_default())?,
        queue: raw.queue.map(JobQueue::check).transpose()?,
        gold,
        recheck,
        base_dir: base_dir.to_path_buf(),
        file: file.to_string(),
        hash,
        content,
    })
}

/// What each is fine alone and cannot be had together.
fn check_together(generate: &Generate, output: &Output, gold: bool, recheck: bool) -> Result<(), FieldError> {
    let openai = output.format == OutputFormat::Openai;
    // The report reads answers from Parquet parts; with a gold column it compares one a row.
    for (field, asked) in [("report.gold", gold), ("report.recheck", recheck)] {
        if asked && openai {
            return bad(field, "needs `output.format` to be `parquet`");
        }
    }
    if gold && generate.n > 1 {
        return bad(
            "report.gold",
            "needs `generate.n` to be 1: it compares one answer a row",
        );
    }
    let probabilities = matches!(
        generate.shape,
        ShapeSpec::Choice {
            probabilities: true,
            ..
        }
    );
    for (field, asked) in [
        ("generate.logprobs", generate.logprobs),
        ("generate.choice_probabilities", probabilities),
        ("output.token_ids", output.token_ids),
    ] {
        if asked && openai {
            return bad(
                field,
                "needs `output.format` to be `parquet`: result lines in OpenAI's form have no place for it",
            );
        }
    }
    Ok(())
}

fn cache_salt(salt: String) -> Result<String, FieldError> {
    match salt.chars().count() {
        1..=CACHE_SALT_CHARS_MAX => Ok(salt),
        count => bad(
            "cache_salt",
            format!("has {count} characters; it must have 1 to {CACHE_SALT_CHARS_MAX}"),
        ),
    }
}

fn precision(field: &str, name: Option<&str>) -> Result<Precision, FieldError> {
    match name.unwrap_or("auto") {
        "auto" => Ok(Precision::Auto),
        "f32" => Ok(Precision::F32),
        "bf16" => Ok(Precision::Bf16),
        "int8" => Ok(Precision::Int8),
        "fp8" => Ok(Precision::Fp8),
        known @ ("f16" | "fp4" | "int4") => bad(
            field,
            format!("is `{known}`, which this build does not support; it has `f32`, `bf16`, `int8` and `fp8`"),
        ),
        other => bad(
            field,
            format!("is `{other}`{}", suggest(other, ["auto", "f32", "bf16", "int8", "fp8"])),
        ),
    }
}

fn prompt(raw: Option<PromptFile>, format: Option<Format>, base_dir: &Path) -> Result<Prompt, FieldError> {
    let openai_possible = matches!(format, None | Some(Format::OpenaiBatch));
    let missing = raw.is_none();
    let raw = raw.unwrap_or_default();
    let given = [raw.messages.is_some(), raw.text.is_some(), raw.token_ids.is_some()];
    let kind = match given.iter().filter(|given| **given).count() {
        // An OpenAI batch file brings its own prompts; the block may still set a chat template or truncation.
        0 if openai_possible => PromptKind::Openai,
        0 if missing => return bad("prompt", "is missing; only OpenAI batch input goes without"),
        0 => {
            return bad(
                "prompt",
                "says none of `messages`, `text` and `token_ids`; it needs one",
            );
        }
        1 => match (raw.messages, raw.text, raw.token_ids) {
            (Some(messages), _, _) => PromptKind::Messages(conversation(messages)?),
            (_, Some(template), _) if template.is_empty() => return bad("prompt.text", "is empty"),
            (_, Some(template), _) => PromptKind::Text(template),
            (_, _, column) => PromptKind::TokenIds(text("prompt.token_ids", column.unwrap_or_default())?),
        },
        _ => {
            return bad(
                "prompt",
                "says more than one of `messages`, `text` and `token_ids`; it takes one",
            );
        }
    };
    let chat = matches!(kind, PromptKind::Messages(_) | PromptKind::Openai);
    for (name, given) in [
        ("chat_template", raw.chat_template.is_some()),
        ("chat_template_kwargs", raw.chat_template_kwargs.is_some()),
        ("add_generation_prompt", raw.add_generation_prompt.is_some()),
        ("continue_final_message", raw.continue_final_message.is_some()),
    ] {
        if given && !chat {
            return bad(
                format!("prompt.{name}"),
                "is for `messages`; `text` and `token_ids` use no chat template",
            );
        }
    }
    let kwargs = raw.chat_template_kwargs.unwrap_or_default();
    if kwargs.contains_key("messages") {
        return bad("prompt.chat_template_kwargs", "cannot set `messages`");
    }
    let prompt = Prompt {
        kind,
        chat_template: raw
            .chat_template
            .map(|choice| chat_template(choice, base_dir))
            .transpose()?,
        chat_template_kwargs: kwargs,
        add_generation_prompt: raw.add_generation_prompt,
        continue_final_message: raw.continue_final_message,
        truncate: raw.truncate.unwrap_or_default(),
    };
    prompt.turn().or_else(|why| bad("prompt", why))?;
    Ok(prompt)
}

fn conversation(messages: Vec<MessageFile>) -> Result<Vec<Message>, FieldError> {
    if messages.is_empty() {
        return bad("prompt.messages", "is an empty list");
    }
    let mut out = Vec::with_capacity(messages.len());
    for (i, MessageFile { role, content }) in messages.into_iter().enumerate() {
        let (parts, is_list) = match content {
            ContentFile::Text(text) => (vec![text], false),
            ContentFile::Parts(parts) if parts.is_empty() => {
                return bad(format!("prompt.messages[{i}].content"), "is an empty list");
            }
            ContentFile::Parts(parts) => (parts.into_iter().map(|part| part.text).collect(), true),
        };
        out.push(Message { role, parts, is_list });
    }
    Ok(out)
}

/// A template's source, a file that holds one, or the name of one of the checkpoint's.
fn chat_template(choice: String, base_dir: &Path) -> Result<ChatTemplateChoice, FieldError> {
    const FIELD: &str = "prompt.chat_template";
    if choice.contains("{{") || choice.contains("{%") {
        return Ok(ChatTemplateChoice::Source(choice));
    }
    if !choice.ends_with(".jinja") && !choice.ends_with(".j2") {
        return Ok(ChatTemplateChoice::Named(text(FIELD, choice)?));
    }
    let path = base_dir.join(&choice);
    let unreadable = |e: std::io::Error| FieldError {
        field: FIELD.into(),
        why: format!("names `{choice}`: {e}"),
    };
    let size = std::fs::metadata(&path).map_err(unreadable)?.len();
    if size > TEMPLATE_BYTES_MAX {
        return bad(
            FIELD,
            format!("names `{choice}`, which has {size} bytes, more than {TEMPLATE_BYTES_MAX}"),
        );
    }
    Ok(ChatTemplateChoice::Source(
        std::fs::read_to_string(&path).map_err(unreadable)?,
    ))
}

fn output(raw: OutputFile) -> Result<Output, FieldError> {
    let carry = raw.carry.unwrap_or_default();
    let mut seen = std::collections::HashSet::new();
    for column in &carry {
        if column.is_empty() {
            return bad("output.carry", "holds an empty name");
        }
        short("output.carry", column)?;
        if RESULT_COLUMNS.contains(&column.as_str()) {
            return bad(
                "output.carry",
                format!("holds `{column}`, which is the name of a result column"),
            );
        }
        if !seen.insert(column) {
            return bad("output.carry", format!("holds `{column}` twice"));
        }
    }
    Ok(Output {
        uri: text("output.uri", raw.uri)?,
        carry,
        format: raw.format.unwrap_or_default(),
        token_ids: raw.token_ids.unwrap_or(false),
    })
}

fn budget(raw: BudgetFile) -> Result<Budget, FieldError> {
    for (field, value) in [("budget.usd", raw.usd), ("budget.usd_per_hour", raw.usd_per_hour)] {
        if value.is_some_and(|usd| !usd.is_finite() || usd < 0.0) {
            return bad(
                field,
                format!("is {}; it must be a number of dollars", value.unwrap_or_default()),
            );
        }
    }
    if raw.usd.is_some() && raw.usd_per_hour.is_none_or(|price| price == 0.0) {
        return bad(
            "budget.usd",
            "needs `budget.usd_per_hour`, what a worker's machine costs",
        );
    }
    let deadline_seconds = match raw.deadline {
        Some(text) => Some(duration_seconds(&text).map_err(|why| FieldError {
            field: "budget.deadline".into(),
            why: format!("is `{text}`: {why}"),
        })?),
        None => None,
    };
    Ok(Budget {
        usd: raw.usd,
        usd_per_hour: raw.usd_per_hour,
        deadline_seconds,
        unfinished: raw.unfinished.unwrap_or_default(),
    })
}

/// Seconds of `6h`, `90m`, `45s`, `2d` and their sums (`1h30m`); else one line that says what is wrong.
pub fn duration_seconds(text: &str) -> Result<u64, String> {
    const FORM: &str = "a time looks like `6h`, `90m` or `1h30m`";
    let mut total: u64 = 0;
    let mut rest = text.trim();
    if rest.is_empty() {
        return Err(FORM.into());
    }
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).ok_or(FORM)?;
        let count: u64 = rest[..digits].parse().map_err(|_| FORM)?;
        let mut chars = rest[digits..].chars();
        let unit = match chars.next() {
            Some('s') => 1,
            Some('m') => 60,
            Some('h') => 3_600,
            Some('d') => 86_400,
            _ => return Err(FORM.into()),
        };
        total = count
            .checked_mul(unit)
            .and_then(|seconds| total.checked_add(seconds))
            .ok_or("it is too long")?;
        rest = chars.as_str().trim_start();
    }
    match total {
        0 => Err("it is no time at all".into()),
        1..=315_360_000 => Ok(total),
        _ => Err("it is longer than ten years".into()),
    }
}
