//! The job file as it is written: the types that YAML or JSON is read into, before anything is checked.
//!
//! The doc comments of fields become the descriptions in `schemas/job.schema.json`, which editors show.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::carry::CarryFile;
use super::input::InputFile;
pub use super::one_or_many::OneOrMany;
use super::precision::{RequestedKvFormat, RequestedPrecision};
use super::recheck::Recheck;
use super::sampling::Defaults;
use super::thinking::ThinkingFile;
use crate::dataset::writing::PartCodec;
use crate::device::Precision;

/// Allowed values of a field that names a number format, for the JSON Schema.
fn precision_names() -> Vec<Option<&'static str>> {
    RequestedPrecision::names().map(Some).chain([None]).collect()
}

/// The same for the format of keys and values.
fn kv_names() -> Vec<Option<&'static str>> {
    RequestedKvFormat::names().map(Some).chain([None]).collect()
}

/// The same for a recheck.
fn recheck_precision_names() -> Vec<Option<&'static str>> {
    Recheck::PRECISIONS
        .map(Precision::name)
        .map(Some)
        .into_iter()
        .chain([None])
        .collect()
}

/// One job: a dataset, a prompt for each of its rows, and where the answers go.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(title = "gristmill job")]
pub struct JobFile {
    /// Name of the job, for reports.
    pub name: String,
    /// The checkpoint in the Hugging Face layout: a folder (relative to this file), `hf://organisation/name@revision`, or a folder in a bucket.
    pub model: String,
    /// A LoRA adapter of this model in PEFT's layout (`adapter_config.json`, `adapter_model.safetensors`), with addresses as the model's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adapter: Option<String>,
    /// Number format to compute in. `auto` is what suits the device: `f32` on a CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("enum" = precision_names()))]
    pub precision: Option<String>,
    /// Number format of keys and values. `auto`: that of `precision`. `int4` is for CPUs, `fp8` for GPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("enum" = kv_names()))]
    pub kv_cache: Option<String>,
    /// Whether a row's answer is the same to the bit whatever else is in its batch, on a GPU, too, which is then a little slower.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deterministic: Option<bool>,
    /// Jobs with the same salt share computed prompt prefixes within a worker; without it, a job shares with itself alone. Whoever
    /// knows the salt can find out by `cached_tokens` how another job's prompts begin, so it is a secret between tenants.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_salt: Option<String>,
    /// Longest sequence (prompt and completion) in tokens; by default what the checkpoint declares, at most what
    /// its RoPE scaling supports (`dynamic` scaling is computed once, for this length).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context: Option<i64>,
    /// The rows to work on.
    pub input: InputFile,
    /// What the model is asked about each row. Left out for OpenAI batch input, whose lines hold their own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt: Option<PromptFile>,
    /// How completions are generated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generate: Option<GenerateFile>,
    /// Where results go.
    pub output: OutputFile,
    /// How the input is cut up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shards: Option<ShardsFile>,
    /// What the job may cost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub budget: Option<BudgetFile>,
    /// Where `submit` enqueues the job's shards; `--queue` and `--kafka` take its place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<QueueFile>,
    /// What the final report compares.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub report: Option<ReportFile>,
    /// What happens when the job is done. It does not affect answers, so it may be changed after the job has begun.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_finish: Option<OnFinishFile>,
}

/// What the model is asked: exactly one of `messages`, `text` and `token_ids`.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PromptFile {
    /// A conversation, put into the checkpoint's chat template. Contents are templates over the row's columns:
    /// `{{ subject }}`, or `{{ row["two words"] }}`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub messages: Option<Vec<MessageFile>>,
    /// A template over the row's columns; no chat template is applied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<OrFile<String>>")]
    pub text: Option<String>,
    /// The column (a list of integers) that holds ready token ids.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<String>,
    /// Takes the place of the checkpoint's chat template: the name of another one of the checkpoint's, a `.jinja`
    /// file (relative to this file), or a template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chat_template: Option<String>,
    /// Further variables for the chat template, such as `enable_thinking: false`. It must read each of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chat_template_kwargs: Option<Map<String, Value>>,
    /// Whether the chat template opens the model's turn; as in transformers. True, unless `continue_final_message` is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub add_generation_prompt: Option<bool>,
    /// The prompt ends right behind the last message's content, and the model goes on with it; as in transformers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub continue_final_message: Option<bool>,
    /// What becomes of prompts that are longer than the model's context: `none` makes the row an error, `left` drops
    /// tokens at the beginning, `right` at the end, so that `max_tokens` more fit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub truncate: Option<Truncate>,
}

/// Which end of a too long prompt is dropped.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Truncate {
    #[default]
    None,
    Left,
    Right,
}

/// For the schema: a value that may come from a file beside the job file. `included` inserts the content before deserialization.
#[derive(JsonSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "it has no values, only a schema")]
enum OrFile<T> {
    Here(T),
    InFile(FileReference),
}

/// The content of a file.
#[derive(JsonSchema)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "it has no values, only a schema")]
struct FileReference {
    /// Its path, relative to the job file. A final line break is no part of a text.
    file: String,
}

/// One message of a conversation.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MessageFile {
    pub role: Role,
    /// A template over the row's columns, or a list of `{type: text, text: …}` parts.
    #[schemars(with = "OrFile<ContentFile>")]
    pub content: ContentFile,
}

/// Who speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    System,
    Developer,
    User,
    Assistant,
    Tool,
}

impl Role {
    /// The role's name in chat templates.
    pub fn as_str(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::Developer => "developer",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => "tool",
        }
    }

    /// The role of this name.
    pub fn from_name(name: &str) -> Option<Role> {
        [Role::System, Role::Developer, Role::User, Role::Assistant, Role::Tool]
            .into_iter()
            .find(|role| role.as_str() == name)
    }
}

/// A message's content.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(
    untagged,
    expecting = "expected a text or a list of parts, each `{type: text, text: …}`"
)]
pub enum ContentFile {
    Text(String),
    Parts(Vec<PartFile>),
}

/// One part of a message's content.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PartFile {
    #[serde(rename = "type")]
    pub kind: PartKind,
    #[schemars(with = "OrFile<String>")]
    pub text: String,
}

/// Kinds of content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PartKind {
    Text,
}

/// How completions are generated. At most one of `choice`, `json_schema` and `regex`.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GenerateFile {
    /// Where values come from that are left out here: `model` takes the checkpoint's `generation_config.json`, `neutral` does
    /// not (model).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub defaults: Option<Defaults>,
    /// Most tokens of a completion, thought and answer together (the checkpoint's `max_new_tokens`, else 256; more for models that
    /// think).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_048_576))]
    pub max_tokens: Option<i64>,
    /// 0 always takes the likeliest token; 1 samples the model's own distribution (the checkpoint's, else 1).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 100.0))]
    pub temperature: Option<f64>,
    /// Sample among this many likeliest tokens; 0 among all (the checkpoint's, else 0).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub top_k: Option<i64>,
    /// Sample among the likeliest tokens that together reach this probability (the checkpoint's, else 1).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 1.0))]
    pub top_p: Option<f64>,
    /// Sample among tokens at least this fraction as likely as the likeliest (the checkpoint's, else 0).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 1.0))]
    pub min_p: Option<f64>,
    /// Above 1, makes tokens of prompt and completion less likely (the checkpoint's, else 1).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.01, max = 100.0))]
    pub repetition_penalty: Option<f64>,
    /// Subtracted once from the logits of tokens that the completion holds (0).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = -100.0, max = 100.0))]
    pub presence_penalty: Option<f64>,
    /// Subtracted per occurrence from the logits of tokens that the completion holds (0).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = -100.0, max = 100.0))]
    pub frequency_penalty: Option<f64>,
    /// Makes sampling repeatable; derived from the job's id where it is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    /// Texts that end a completion; they are not part of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop: Option<OneOrMany>,
    /// Token ids that end a completion, besides the model's own end of sequence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop_token_ids: Option<Vec<u32>>,
    /// Go on at the model's end of sequence, up to `max_tokens` (false).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ignore_eos: Option<bool>,
    /// Return the log probability of each token of the completion (false).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<bool>,
    /// How the thoughts of a model that thinks before it answers are treated: `false` takes all that it writes as its answer, a
    /// mapping has settings.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub thinking: Option<ThinkingFile>,
    /// Completions a row (1). Above 1, result columns become lists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1024))]
    pub n: Option<i64>,
    /// The answer is one of these texts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub choice: Option<Vec<String>>,
    /// With `choice`: return the probability of each (false).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub choice_probabilities: Option<bool>,
    /// The answer is JSON that fits this JSON Schema; `{file: PATH}` takes it from a file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub json_schema: Option<Value>,
    /// The whole answer fits this regular expression.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub regex: Option<String>,
}

/// Where results go.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OutputFile {
    /// A folder, relative to this file or in object storage. It belongs to this job alone.
    pub uri: String,
    /// Input columns that results keep: a list, `"*"` for all, or a mapping of new names to columns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub carry: Option<CarryFile>,
    /// `parquet`, or `openai` for OpenAI batch result lines (parquet).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<OutputFormat>,
    /// What pages of the parts are compressed with (zstd).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compression: Option<PartCodec>,
    /// Level of the compression: 1 to 22 for zstd (3), 1 to 9 for gzip (6).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 22))]
    pub compression_level: Option<i64>,
    /// Rows of a part's row group at most (65536).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 100, max = 1_000_000))]
    pub row_group_rows: Option<i64>,
    /// With `json_schema`: what the column `parsed` holds, `text` (the JSON) or `typed` (a column for each property) (text).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parsed: Option<ParsedForm>,
    /// Write the completions' token ids, too (false).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<bool>,
}

/// How results are written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OutputFormat {
    #[default]
    Parquet,
    /// OpenAI batch result lines.
    Openai,
}

/// What the column `parsed` holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ParsedForm {
    #[default]
    Text,
    /// Values of the types of the JSON Schema.
    Typed,
}

impl ParsedForm {
    /// Whether this is the default, which older records imply.
    pub fn is_text(&self) -> bool {
        *self == ParsedForm::Text
    }
}

/// How the input is cut up.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ShardsFile {
    /// Rows of a shard, which becomes one output file (4096).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000))]
    pub rows: Option<i64>,
}

/// What the job may cost. Reaching a limit stops it; it can be extended and goes on where it stopped.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BudgetFile {
    /// Dollars; needs `usd_per_hour`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usd: Option<f64>,
    /// What one worker's machine costs an hour.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usd_per_hour: Option<f64>,
    /// Time from the job's start, such as `6h`, `90m` or `1h30m`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline: Option<String>,
    /// What becomes of the rows that are left when a limit is reached: `keep` leaves them for a job that can be extended,
    /// `expire` ends the job with them as `expired` rows (keep).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unfinished: Option<Unfinished>,
}

/// What becomes of unfinished rows when budget or deadline is reached.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Unfinished {
    #[default]
    Keep,
    Expire,
}

/// Where `submit` enqueues. Never holds a secret: those come from the environment or from files.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct QueueFile {
    /// `kafka://host:port,host:port/topic`, `amqp://host:port/vhost/queue` or `amqps://…`, without a password.
    pub url: String,
    /// Properties of librdkafka that tune the client, such as `compression.type: zstd`; docs/queues.md lists them. What says how a broker
    /// is trusted, or loads code, belongs to the environment or `--kafka`. They hold for `url` alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kafka: Option<Map<String, Value>>,
}

/// What happens when the job is done.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OnFinishFile {
    /// A program and its arguments, which `gristmill run` starts without a shell, with the result as one JSON object on its standard
    /// input. Workers start none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<Vec<String>>,
    /// A web address to which the result is posted as one JSON object, signed with `GRISTMILL_ON_FINISH_KEY`. Workers post to what their
    /// `--accept-on-finish` lists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
}

/// What the final report compares.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ReportFile {
    /// The input column that holds the right answer; the report says how many completions agree.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gold: Option<String>,
    /// Runs a sample of the finished job's rows again in a higher precision; the report says how many answers stay the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recheck: Option<RecheckFile>,
}

/// The sample that is run again, and in what. Changes no row of the output.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RecheckFile {
    /// How many rows, from all over the job; all where it has fewer (200).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub rows: Option<i64>,
    /// Number format to compute in, higher than the job's own (f32).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("enum" = recheck_precision_names()))]
    pub precision: Option<String>,
}

impl JobFile {
    /// The JSON Schema of job files, as `schemas/job.schema.json` holds it.
    pub fn schema() -> Value {
        schemars::schema_for!(JobFile).to_value()
    }
}
