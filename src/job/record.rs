//! Reads a job back from its ledger's record. Whoever can write to the output can change the record,
//! so its values are checked like those of a job file.
//!
//! See docs/decisions/007-a-ledger-is-foreign-input.md.

use serde::Deserialize;
use serde_json::Value;

use super::JobError;
use super::check::{FieldError, bad, check_length, check_text, integer_in};
use super::file::OutputFormat;
use super::generate::{ConstraintSpec, Generate, MAX_TOKENS_MAX};
use super::spec::{
    CONTEXT_MAX, ChatTemplateChoice, DEADLINE_SECONDS_MAX, Job, Prompt, PromptKind, SHARD_ROWS_MAX, TEMPLATE_BYTES_MAX,
    check_combinations, check_dollars, check_name, check_typed_answers, checked_cache_salt,
};
use super::writing::check_writing;
use crate::dataset::answer::types::AnswerType;
use crate::dataset::output::{OutputColumns, OutputSchema};
use crate::dataset::plan::sample::INPUT_ROW;
use crate::engine::forbidden::ForbiddenTokens;
use crate::error_line::short_line;

/// Maximum number of stop texts from a checkpoint.
const CHECKPOINT_STOPS_MAX: usize = 4096;
/// Maximum number of forbidden tokens, and of end tokens, from a checkpoint; it exceeds the size of
/// any vocabulary.
const CHECKPOINT_IDS_MAX: usize = 1 << 20;
/// Maximum length of the path of a job file or of its folder, in bytes.
const PATH_BYTES_MAX: usize = 64 << 10;

impl Job {
    /// Reads a job written by [`Job::resolved`]; `location` names the record in the error.
    ///
    /// # Errors
    /// The record is malformed, uses features of a newer gristmill, or has values that a job file
    /// could not have.
    pub fn from_record(resolved: &Value, location: &str) -> Result<Job, JobError> {
        let invalid = |why: String| JobError::Invalid {
            location: location.to_string(),
            message: format!("the job in this record cannot be {why}"),
        };
        let job = Job::deserialize(resolved);
        let job = job.map_err(|error| invalid(format!("read: {}", short_line(&error.to_string()))))?;
        job.validate()
            .map_err(|error| invalid(format!("run: {}", short_line(&error.to_string()))))?;
        Ok(job)
    }

    /// The output's columns besides the carried ones. `thinking` says whether the model thinks.
    pub fn output_columns(&self, thinking: bool) -> OutputColumns {
        OutputColumns {
            samples: self.generate.n,
            sample_status: self.generate.n > 1 && self.output.format == OutputFormat::Parquet,
            thinking,
            token_ids: self.output.token_ids,
            logprobs: self.generate.logprobs,
            choices: self.generate.shape.scored_choices().map(<[String]>::to_vec),
            parsed: match &self.generate.shape {
                ConstraintSpec::JsonSchema(schema) if !self.output.parsed.is_text() => Some(AnswerType::of(schema).0),
                _ => None,
            },
        }
    }

    /// Input columns in the output:
    ///
    /// * the carried columns, and the gold column of the report;
    /// * for OpenAI batch lines `custom_id`, which identifies a result's line, and for results in
    ///   OpenAI's form `url`, which determines the form of each line;
    /// * for a sample, the row's number in the whole input.
    pub fn carried_columns(&self) -> Vec<String> {
        let mut carry = self.output.carry.clone();
        let is_batch = matches!(self.prompt.kind, PromptKind::Openai);
        let custom_id = is_batch.then(|| "custom_id".to_string());
        let url = (is_batch && self.output.format == OutputFormat::Openai).then(|| "url".to_string());
        let input_row = self.input.options.sample.map(|_| INPUT_ROW.to_string());
        for column in self.gold.iter().cloned().chain(custom_id).chain(url).chain(input_row) {
            if !carry.contains(&column) {
                carry.push(column);
            }
        }
        carry
    }

    /// Reads the output's columns from the ledger's record, and checks that they are those of this
    /// job. `location` names the record in the error.
    ///
    /// # Errors
    /// The recorded columns are not those of this job.
    pub fn recorded_columns(&self, columns: &Value, location: &str) -> Result<OutputSchema, JobError> {
        let carried_columns = self.carried_columns();
        // An older gristmill carried fewer columns of an OpenAI batch.
        let may_carry = |name: &str| self.output.carry_all || carried_columns.iter().any(|column| column == name);
        let requested = self.output_columns(false);
        let schema = OutputSchema::of_record(columns, &requested, &self.output.renamed, may_carry);
        schema.map_err(|why| JobError::Invalid {
            location: location.to_string(),
            message: format!("the job in this record cannot be run: {}", short_line(&why)),
        })
    }

    /// Checks the values of a job from a record like those of a job file.
    fn validate(&self) -> Result<(), FieldError> {
        check_text("name", &self.name)?;
        check_name(&self.name)?;
        check_text("model", &self.model)?;
        self.adapter
            .iter()
            .try_for_each(|adapter| check_text("adapter", adapter))?;
        if let Some(tokens) = self.context {
            integer_in("context", Some(tokens.into()), 2, 2, CONTEXT_MAX)?;
        }
        self.cache_salt.clone().map(checked_cache_salt).transpose()?;
        self.input.validate()?;
        self.prompt.validate()?;
        self.generate.validate().map_err(|error| FieldError {
            field: format!("generate.{}", error.field),
            ..error
        })?;
        check_text("output.uri", &self.output.uri)?;
        self.output.check_carry()?;
        check_writing(&self.output.writing)?;
        self.gold.iter().try_for_each(|gold| check_text("report.gold", gold))?;
        check_combinations(&self.generate, &self.output, self.gold.is_some(), false)?;
        check_typed_answers(&self.generate, &self.output, &self.prompt)?;
        if !(1..=SHARD_ROWS_MAX.unsigned_abs()).contains(&self.shard_rows) {
            let why = format!("is {}; it must be from 1 to {SHARD_ROWS_MAX}", self.shard_rows);
            return bad("shards.rows", why);
        }
        check_dollars(self.budget.usd, self.budget.usd_per_hour)?;
        if let Some(seconds) = self
            .budget
            .deadline_seconds
            .filter(|seconds| *seconds > DEADLINE_SECONDS_MAX)
        {
            return bad(
                "budget.deadline",
                format!("is {seconds} s; it is longer than ten years"),
            );
        }
        self.on_finish.validate()?;
        check_length("hash", &self.hash)?;
        for (field, length) in [("file", self.file.len()), ("base_dir", self.base_dir.as_os_str().len())] {
            if length > PATH_BYTES_MAX {
                return bad(field, format!("has {length} bytes, more than {PATH_BYTES_MAX}"));
            }
        }
        Ok(())
    }
}

impl Prompt {
    fn validate(&self) -> Result<(), FieldError> {
        match &self.kind {
            PromptKind::Messages(messages) if messages.is_empty() => return bad("prompt.messages", "is an empty list"),
            PromptKind::Messages(messages) => {
                if let Some(index) = messages.iter().position(|message| message.parts.is_empty()) {
                    return bad(format!("prompt.messages[{index}].content"), "is an empty list");
                }
            }
            PromptKind::Text(template) if template.is_empty() => return bad("prompt.text", "is empty"),
            PromptKind::TokenIds(column) => check_text("prompt.token_ids", column)?,
            PromptKind::Text(_) | PromptKind::Openai => {}
        }
        match &self.chat_template {
            Some(ChatTemplateChoice::Named(name)) => check_text("prompt.chat_template", name)?,
            Some(ChatTemplateChoice::Source(source)) if source.len() as u64 > TEMPLATE_BYTES_MAX => {
                let why = format!("has {} bytes, more than {TEMPLATE_BYTES_MAX}", source.len());
                return bad("prompt.chat_template", why);
            }
            Some(ChatTemplateChoice::Source(_)) | None => {}
        }
        if self.chat_template_kwargs.contains_key("messages") {
            return bad("prompt.chat_template_kwargs", "cannot set `messages`");
        }
        self.turn().map(|_| ()).or_else(|why| bad("prompt", why))
    }
}

impl Generate {
    /// Checks that a job file, with values from a checkpoint, could have these values.
    fn validate(&self) -> Result<(), FieldError> {
        let mut file = self.to_file();
        let has_checkpoint_stops = self.is_from_checkpoint("stop");
        if has_checkpoint_stops {
            file.stop = None;
            check_checkpoint_stops(&self.stop)?;
        }
        let mut checked = Generate::check(&file)?.with_job_values(self);
        if has_checkpoint_stops {
            checked.stop = self.stop.clone();
        }
        if checked.thinking != self.thinking {
            return bad("thinking", "has settings, and nobody asked for it");
        }
        if checked != *self {
            return bad("shape", "is none that a job can ask for");
        }
        let ForbiddenTokens {
            tokens,
            first,
            min_new_tokens,
            min_length,
        } = &self.forbidden;
        let end_count = self.model_ends.as_ref().map_or(0, Vec::len);
        for (field, count) in [
            ("forbidden.tokens", tokens.len()),
            ("forbidden.first", first.len()),
            ("model_ends", end_count),
        ] {
            if count > CHECKPOINT_IDS_MAX {
                return bad(field, format!("has {count} entries, more than {CHECKPOINT_IDS_MAX}"));
            }
        }
        integer_in(
            "forbidden.min_new_tokens",
            Some((*min_new_tokens).into()),
            0,
            0,
            MAX_TOKENS_MAX,
        )?;
        integer_in("forbidden.min_length", Some((*min_length).into()), 0, 0, MAX_TOKENS_MAX)?;
        Ok(())
    }
}

fn check_checkpoint_stops(stops: &[String]) -> Result<(), FieldError> {
    if stops.len() > CHECKPOINT_STOPS_MAX {
        return bad(
            "stop",
            format!("has {} entries, more than {CHECKPOINT_STOPS_MAX}", stops.len()),
        );
    }
    if stops.iter().any(String::is_empty) {
        bad("stop", "holds an empty text, which would end every completion at once")
    } else {
        Ok(())
    }
}
