//! A valid job: the checked content of a job file, with all defaults filled in. Nothing downstream
//! checks it again.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use super::JobError;
use super::carry::Carry;
use super::chat::Turn;
use super::check::{FieldError, bad, checked_text, integer_in};
use super::file::{
    BudgetFile, ContentFile, JobFile, MessageFile, OutputFile, OutputFormat, ParsedForm, PromptFile, Role, Truncate,
    Unfinished,
};
use super::generate::{ConstraintSpec, Generate};
use super::input::Input;
use super::on_finish::OnFinish;
use super::parameters::Parameters;
use super::parse::{Parsed, base_dir, hashes_of_older_versions};
use super::precision::{RequestedKvFormat, RequestedPrecision};
use super::queue::JobQueue;
use super::recheck::Recheck;
use super::writing::checked_writing;
use crate::dataset::plan::Format;
use crate::dataset::writing::WriteOptions;

/// Maximum size of a `chat_template` file.
pub(super) const TEMPLATE_BYTES_MAX: u64 = 4 << 20;
/// Default rows per shard.
const DEFAULT_SHARD_ROWS: i64 = 4096;
pub(super) const SHARD_ROWS_MAX: i64 = 1_000_000;
/// Maximum `context` in tokens; it exceeds that of any model.
pub(super) const CONTEXT_MAX: u32 = 1 << 26;

/// Maximum `budget.deadline`: ten years.
pub const DEADLINE_SECONDS_MAX: u64 = 315_360_000;
/// Maximum length of `cache_salt`, in characters.
const CACHE_SALT_CHARS_MAX: usize = 256;

/// Names of result columns; no carried column may have such a name.
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
    /// As in the job file: a path relative to `base_dir`, `hf://…` or a URL.
    pub model: String,
    /// The adapter that changes the model; an address as the model's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adapter: Option<String>,
    pub precision: RequestedPrecision,
    /// Format of keys and values; `Auto`: the same format as the precision.
    #[serde(default)]
    pub kv_cache: RequestedKvFormat,
    /// Whether a row's answer must be bit-identical whatever else is in its batch.
    #[serde(default)]
    pub deterministic: bool,
    /// Jobs with the same salt share cached prefixes; `None`: prefixes are shared only within this
    /// job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_salt: Option<String>,
    /// Maximum sequence length in tokens, at least 2; `None`: the checkpoint's.
    pub context: Option<u32>,
    pub input: Input,
    pub prompt: Prompt,
    pub generate: Generate,
    pub output: Output,
    /// Maximum rows per shard, at least 1.
    pub shard_rows: u64,
    pub budget: Budget,
    /// The queue that `submit` uses. It is not recorded: a job stays the same with another queue.
    #[serde(skip)]
    pub queue: Option<JobQueue>,
    /// The input column with the correct answers, for the report.
    pub gold: Option<String>,
    /// The report's recheck settings. They are not recorded, since they change no row.
    #[serde(skip)]
    pub recheck: Option<Recheck>,
    /// Actions at the end of the job. Only their address is recorded.
    #[serde(default, skip_serializing_if = "OnFinish::is_record_empty")]
    pub on_finish: OnFinish,
    /// The job file's folder; paths without a scheme are relative to it.
    pub base_dir: PathBuf,
    /// Path of the job file, for messages.
    pub file: String,
    /// SHA-256, hexadecimal, of the fields of the job file that can change an answer. Jobs with the
    /// same hash are the same job.
    pub hash: String,
    /// The job file's content, with parameters and included files filled in; null if the job comes
    /// from a record.
    #[serde(skip)]
    pub content: Value,
}

/// The job's prompt settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Prompt {
    pub kind: PromptKind,
    /// The chat template that the job gives; `None`: the checkpoint's.
    pub chat_template: Option<ChatTemplateChoice>,
    pub chat_template_kwargs: Map<String, Value>,
    /// This and `continue_final_message` determine how prompts end; see [`Prompt::turn`].
    #[serde(default)]
    pub add_generation_prompt: Option<bool>,
    #[serde(default)]
    pub continue_final_message: Option<bool>,
    pub truncate: Truncate,
}

impl Prompt {
    /// How rendered conversations end, by the job's fields and its `chat_template_kwargs`; `None`
    /// if unset. The error continues the block's name.
    pub fn turn(&self) -> Result<Option<Turn>, String> {
        let fields = [self.add_generation_prompt, self.continue_final_message].map(|flag| flag.map(Value::Bool));
        Turn::from_switches([fields[0].as_ref(), fields[1].as_ref()], &self.chat_template_kwargs)
    }
}

/// The source of a row's prompt.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PromptKind {
    /// A conversation of at least one message; contents are column templates.
    Messages(Vec<Message>),
    /// A column template; no chat template is applied.
    Text(String),
    /// A column of token ids.
    TokenIds(String),
    /// The row is a line of an OpenAI batch file.
    Openai,
}

/// One message of the job's conversation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Message {
    pub role: Role,
    /// Column templates: one, or several if the content is a list of parts.
    pub parts: Vec<String>,
    /// Whether the content is a list of parts.
    pub is_list: bool,
}

/// The chat template that a job gives.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChatTemplateChoice {
    /// The name of a template of the checkpoint.
    Named(String),
    /// The template's source.
    Source(String),
}

/// The job's output settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Output {
    /// As in the job file.
    pub uri: String,
    /// Input columns that are copied to the output.
    pub carry: Vec<String>,
    /// Input columns that get another name, and the output's names for them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub renamed: BTreeMap<String, String>,
    /// Whether all other columns are carried as well.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub carry_all: bool,
    pub format: OutputFormat,
    /// Records of a gristmill without typed answers have `Text`.
    #[serde(default, skip_serializing_if = "ParsedForm::is_text")]
    pub parsed: ParsedForm,
    #[serde(default, skip_serializing_if = "WriteOptions::is_default")]
    pub writing: WriteOptions,
    pub token_ids: bool,
}

/// The job's budget.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Budget {
    pub usd: Option<f64>,
    pub usd_per_hour: Option<f64>,
    pub deadline_seconds: Option<u64>,
    /// What happens to the remaining rows when a limit is reached.
    #[serde(default)]
    pub unfinished: Unfinished,
}

impl Job {
    /// Reads and checks a job file, and fills in `parameters`.
    pub fn load(path: &Path, parameters: &Parameters) -> Result<Job, JobError> {
        let parsed = JobFile::read(path, parameters)?;
        Job::check(parsed, &path.display().to_string(), &base_dir(path))
    }

    /// Checks a parsed job file. `file` names it in messages; paths are relative to `base_dir`.
    pub fn check(parsed: Parsed, file: &str, base_dir: &Path) -> Result<Job, JobError> {
        check_file(parsed, file, base_dir).map_err(|error| JobError::Invalid {
            location: file.to_string(),
            message: error.to_string(),
        })
    }

    /// The hash that identifies the job.
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// Whether `hash` is this job's, or the one that an older gristmill gave it: those covered the
    /// name, the paths, and the price `usd_per_hour` at which the job was begun.
    pub fn has_hash(&self, hash: &str, usd_per_hour: Option<f64>) -> bool {
        hash == self.hash
            || hashes_of_older_versions(&self.content, usd_per_hour)
                .iter()
                .any(|earlier| earlier == hash)
    }

    /// The job with all defaults filled in, for the ledger; [`Job::from_record`] reads it back.
    /// `base_dir` becomes absolute, since the record may be read in another working directory.
    pub fn resolved(&self) -> Value {
        let base_dir = std::path::absolute(&self.base_dir).unwrap_or_else(|_| self.base_dir.clone());
        let job = Job {
            base_dir,
            ..self.clone()
        };
        // Serialization succeeds, since all numbers were checked to be finite.
        serde_json::to_value(&job).unwrap_or(Value::Null)
    }

    /// The key of the job's random stream: the job's seed, else one that is derived from its id.
    pub fn seed(&self, job_id: &str) -> u64 {
        self.generate.seed.unwrap_or_else(|| {
            let digest = Sha256::digest(format!("gristmill seed {job_id}"));
            digest.iter().take(8).fold(0, |seed, byte| seed << 8 | u64::from(*byte))
        })
    }
}

fn check_file(parsed: Parsed, file: &str, base_dir: &Path) -> Result<Job, FieldError> {
    let Parsed {
        file: raw,
        hash,
        content,
    } = parsed;
    let name = checked_text("name", raw.name)?;
    check_name(&name)?;
    let model = checked_text("model", raw.model)?;
    let adapter = raw
        .adapter
        .map(|adapter| checked_text("adapter", adapter))
        .transpose()?;
    let input = Input::check(raw.input)?;
    let generate = Generate::check(&raw.generate.unwrap_or_default()).map_err(|e| FieldError {
        field: format!("generate.{}", e.field),
        why: e.why,
    })?;
    let report = raw.report.unwrap_or_default();
    let gold = report.gold.map(|gold| checked_text("report.gold", gold)).transpose()?;
    let recheck = report.recheck.map(Recheck::check).transpose()?;
    let output = output(raw.output)?;
    check_combinations(&generate, &output, gold.is_some(), recheck.is_some())?;
    let prompt = prompt(raw.prompt, input.format, base_dir)?;
    check_typed_answers(&generate, &output, &prompt)?;
    let rows = raw.shards.and_then(|shards| shards.rows).unwrap_or(DEFAULT_SHARD_ROWS);
    if !(1..=SHARD_ROWS_MAX).contains(&rows) {
        return bad(
            "shards.rows",
            format!("is {rows}; it must be from 1 to {SHARD_ROWS_MAX}"),
        );
    }
    Ok(Job {
        name,
        model,
        adapter,
        precision: RequestedPrecision::check("precision", raw.precision.as_deref())?,
        kv_cache: RequestedKvFormat::check("kv_cache", raw.kv_cache.as_deref())?,
        deterministic: raw.deterministic.unwrap_or(false),
        cache_salt: raw.cache_salt.map(checked_cache_salt).transpose()?,
        context: raw
            .context
            .map(|tokens| integer_in("context", Some(tokens), 2, 2, CONTEXT_MAX))
            .transpose()?,
        prompt,
        input,
        generate,
        output,
        shard_rows: rows.unsigned_abs(),
        budget: budget(raw.budget.unwrap_or_default())?,
        queue: raw.queue.map(JobQueue::check).transpose()?,
        gold,
        recheck,
        on_finish: raw.on_finish.map(OnFinish::check).transpose()?.unwrap_or_default(),
        base_dir: base_dir.to_path_buf(),
        file: file.to_string(),
        hash,
        content,
    })
}

/// Checks that a job's name has no control characters: it is printed within a line.
pub(super) fn check_name(name: &str) -> Result<(), FieldError> {
    if name.chars().any(char::is_control) {
        bad("name", "holds control characters")
    } else {
        Ok(())
    }
}

/// Checks combinations of settings, each of which is valid alone.
pub(super) fn check_combinations(
    generate: &Generate,
    output: &Output,
    has_gold: bool,
    has_recheck: bool,
) -> Result<(), FieldError> {
    let is_openai = output.format == OutputFormat::Openai;
    // The report reads answers from Parquet parts.
    for (field, is_set) in [("report.gold", has_gold), ("report.recheck", has_recheck)] {
        if is_set && is_openai {
            return bad(field, "needs `output.format` to be `parquet`");
        }
    }
    if has_gold && generate.n > 1 {
        return bad(
            "report.gold",
            "needs `generate.n` to be 1: it compares one answer a row",
        );
    }
    let probabilities = matches!(
        generate.shape,
        ConstraintSpec::Choice {
            probabilities: true,
            ..
        }
    );
    for (field, is_set) in [
        ("generate.logprobs", generate.logprobs),
        ("generate.choice_probabilities", probabilities),
        ("output.token_ids", output.token_ids),
    ] {
        if is_set && is_openai {
            return bad(
                field,
                "needs `output.format` to be `parquet`: result lines in OpenAI's form have no place for it",
            );
        }
    }
    Ok(())
}

/// Checks that typed answers have a JSON Schema and an output with columns.
pub(super) fn check_typed_answers(generate: &Generate, output: &Output, prompt: &Prompt) -> Result<(), FieldError> {
    let why = if output.parsed.is_text() {
        return Ok(());
    } else if output.format == OutputFormat::Openai {
        "needs `output.format` to be `parquet`: result lines in OpenAI's form hold the answer's text"
    } else if !matches!(generate.shape, ConstraintSpec::JsonSchema(_)) {
        "needs `generate.json_schema`, whose types the column has"
    } else if matches!(prompt.kind, PromptKind::Openai) {
        "is for prompts of the job: a line of a batch file can ask for a schema of its own"
    } else {
        return Ok(());
    };
    bad("output.parsed", format!("is `typed`, which {why}"))
}

pub(super) fn checked_cache_salt(salt: String) -> Result<String, FieldError> {
    match salt.chars().count() {
        1..=CACHE_SALT_CHARS_MAX => Ok(salt),
        count => bad(
            "cache_salt",
            format!("has {count} characters; it must have 1 to {CACHE_SALT_CHARS_MAX}"),
        ),
    }
}

fn prompt(raw: Option<PromptFile>, format: Option<Format>, base_dir: &Path) -> Result<Prompt, FieldError> {
    let may_be_openai = matches!(format, None | Some(Format::OpenaiBatch));
    let is_missing = raw.is_none();
    let raw = raw.unwrap_or_default();
    let prompts = [raw.messages.is_some(), raw.text.is_some(), raw.token_ids.is_some()];
    let kind = match prompts.iter().filter(|is_set| **is_set).count() {
        // The lines of an OpenAI batch file hold the prompts. The block, if any, may set a chat
        // template or truncation.
        0 if may_be_openai => PromptKind::Openai,
        0 if is_missing => return bad("prompt", "is missing; only OpenAI batch input goes without"),
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
            (_, _, column) => PromptKind::TokenIds(checked_text("prompt.token_ids", column.unwrap_or_default())?),
        },
        _ => {
            return bad(
                "prompt",
                "says more than one of `messages`, `text` and `token_ids`; it takes one",
            );
        }
    };
    let uses_chat_template = matches!(kind, PromptKind::Messages(_) | PromptKind::Openai);
    for (name, is_set) in [
        ("chat_template", raw.chat_template.is_some()),
        ("chat_template_kwargs", raw.chat_template_kwargs.is_some()),
        ("add_generation_prompt", raw.add_generation_prompt.is_some()),
        ("continue_final_message", raw.continue_final_message.is_some()),
    ] {
        if is_set && !uses_chat_template {
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

/// Reads `prompt.chat_template`: a template, a file with one, or the name of one of the checkpoint's.
fn chat_template(choice: String, base_dir: &Path) -> Result<ChatTemplateChoice, FieldError> {
    const FIELD: &str = "prompt.chat_template";
    if choice.contains("{{") || choice.contains("{%") {
        return Ok(ChatTemplateChoice::Source(choice));
    }
    if !choice.ends_with(".jinja") && !choice.ends_with(".j2") {
        return Ok(ChatTemplateChoice::Named(checked_text(FIELD, choice)?));
    }
    let path = base_dir.join(&choice);
    let unreadable = |e: std::io::Error| FieldError {
        field: FIELD.into(),
        why: format!("names `{choice}`: {e}"),
    };
    let source = crate::regular::read_text(&path, TEMPLATE_BYTES_MAX);
    Ok(ChatTemplateChoice::Source(source.map_err(unreadable)?))
}

fn output(raw: OutputFile) -> Result<Output, FieldError> {
    let writing = checked_writing(&raw)?;
    let Carry { columns, renamed, all } = Carry::check(raw.carry)?;
    if raw.format == Some(OutputFormat::Openai)
        && let Some(column) = ["custom_id", "url"]
            .into_iter()
            .find(|name| renamed.contains_key(*name))
    {
        let why = format!("gives `{column}` another name, and result lines are told by it");
        return bad("output.carry", why);
    }
    Ok(Output {
        uri: checked_text("output.uri", raw.uri)?,
        carry: columns,
        renamed,
        carry_all: all,
        format: raw.format.unwrap_or_default(),
        parsed: raw.parsed.unwrap_or_default(),
        writing,
        token_ids: raw.token_ids.unwrap_or(false),
    })
}

/// Checks `budget.usd` and `budget.usd_per_hour`.
pub(super) fn check_dollars(usd: Option<f64>, usd_per_hour: Option<f64>) -> Result<(), FieldError> {
    for (field, value) in [("budget.usd", usd), ("budget.usd_per_hour", usd_per_hour)] {
        if value.is_some_and(|usd| !usd.is_finite() || usd < 0.0) {
            return bad(
                field,
                format!("is {}; it must be a number of dollars", value.unwrap_or_default()),
            );
        }
    }
    Ok(())
}

fn budget(raw: BudgetFile) -> Result<Budget, FieldError> {
    check_dollars(raw.usd, raw.usd_per_hour)?;
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

/// Parses `6h`, `90m`, `45s`, `2d` or a sum of them (`1h30m`) to seconds. The error is one line.
pub fn duration_seconds(text: &str) -> Result<u64, String> {
    const EXPECTED_FORM: &str = "a time looks like `6h`, `90m` or `1h30m`";
    let mut total: u64 = 0;
    let mut rest = text.trim();
    if rest.is_empty() {
        return Err(EXPECTED_FORM.into());
    }
    while !rest.is_empty() {
        let Some(digits) = rest.find(|c: char| !c.is_ascii_digit()) else {
            return Err(format!(
                "`{rest}` has no unit: write `{rest}h` for hours, or `{rest}s`, `{rest}m`, `{rest}d`"
            ));
        };
        let count: u64 = rest[..digits].parse().map_err(|_| EXPECTED_FORM)?;
        let mut chars = rest[digits..].chars();
        let unit = match chars.next() {
            Some('s') => 1,
            Some('m') => 60,
            Some('h') => 3_600,
            Some('d') => 86_400,
            _ => return Err(EXPECTED_FORM.into()),
        };
        total = count
            .checked_mul(unit)
            .and_then(|seconds| total.checked_add(seconds))
            .ok_or("it is too long")?;
        rest = chars.as_str().trim_start();
    }
    match total {
        0 => Err("it is no time at all".into()),
        1..=DEADLINE_SECONDS_MAX => Ok(total),
        _ => Err("it is longer than ten years".into()),
    }
}
