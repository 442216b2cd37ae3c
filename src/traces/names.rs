//! The names of spans and attributes: OpenTelemetry's own, those of its conventions for generative
//! AI and for HTTP, and gristmill's. The conventions for generative AI are still in development, so
//! a change of theirs is a change of this file alone. docs/traces.md lists the names.

/// Spans of a shard.
pub(crate) const SHARD: &str = "shard";
pub(crate) const OPEN: &str = "open";
pub(crate) const READ: &str = "read";
pub(crate) const LOG: &str = "log";
pub(crate) const PUBLISH: &str = "publish";
/// Spans of the service's driver.
pub(crate) const BATCH_STEP: &str = "batch step";

pub(crate) const JOB: &str = "gristmill.job";
pub(crate) const JOB_ID: &str = "gristmill.job_id";
pub(crate) const GENERATION: &str = "gristmill.generation";
pub(crate) const SHARD_NUMBER: &str = "gristmill.shard";
pub(crate) const ATTEMPT: &str = "gristmill.attempt";
pub(crate) const WORKER: &str = "gristmill.worker";
pub(crate) const ROWS: &str = "gristmill.rows";
pub(crate) const OUTCOME: &str = "gristmill.outcome";
pub(crate) const BATCH: &str = "gristmill.batch";

pub(crate) const OPERATION_NAME: &str = "gen_ai.operation.name";
pub(crate) const PROVIDER_NAME: &str = "gen_ai.provider.name";
pub(crate) const REQUEST_MODEL: &str = "gen_ai.request.model";
pub(crate) const INPUT_TOKENS: &str = "gen_ai.usage.input_tokens";
pub(crate) const CACHED_TOKENS: &str = "gen_ai.usage.cache_read.input_tokens";
pub(crate) const OUTPUT_TOKENS: &str = "gen_ai.usage.output_tokens";
/// The value of [`PROVIDER_NAME`].
pub(crate) const PROVIDER: &str = "gristmill";

pub(crate) const REQUEST_METHOD: &str = "http.request.method";
pub(crate) const ROUTE: &str = "http.route";
pub(crate) const STATUS_CODE: &str = "http.response.status_code";
/// The value of [`REQUEST_METHOD`] for methods that HTTP does not define.
pub(crate) const OTHER_METHOD: &str = "_OTHER";

pub(crate) const ERROR_TYPE: &str = "error.type";
/// The value of [`ERROR_TYPE`] for errors without a kind of their own.
pub(crate) const OTHER_ERROR: &str = "_OTHER";

/// The value of [`OPERATION_NAME`]. `is_chat`: whether prompts are conversations; `None`: lines of
/// one job may be either.
pub(crate) fn operation(is_chat: Option<bool>) -> &'static str {
    match is_chat {
        Some(true) => "chat",
        Some(false) => "text_completion",
        None => "generate_content",
    }
}
