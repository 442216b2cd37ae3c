//! A job read back from its ledger. Anyone who can write to an output can change the record, so it
//! is checked against the same limits as a job file before it is used.
//!
//! See docs/decisions/007-a-ledger-is-foreign-input.md.

use serde::Deserialize;
use serde_json::Value;

use super::JobError;
use super::check::{FieldError, bad, check_length, filled, integer_in};
use super::file::OutputFormat;
use super::generate::{Generate, MAX_TOKENS_MAX, ShapeSpec};
use super::spec::{
    CONTEXT_MAX, ChatTemplateChoice, Job, Prompt, PromptKind, SECONDS_MAX, SHARD_ROWS_MAX, TEMPLATE_BYTES_MAX,
    cache_salt, check_dollars, check_name, check_together, check_typed,
};
use super::writing::check_writing;
use crate::dataset::answer::types::AnswerType;
use crate::dataset::output::{OutputColumns, OutputSchema};
use crate::dataset::plan::sample::INPUT_ROW;
use crate::engine::forbidden::Forbidden;
use crate::error_line::in_short;

/// Maximum number of stop texts from a checkpoint.
const MODEL_STOPS_MAX: usize = 4096;
/// Maximum number of tokens that a checkpoint forbids or ends a completion at: more than any
/// vocabulary has.
const MODEL_IDS_MAX: usize = 1 << 20;
/// Longest path of a job file or its folder, in bytes.
const PATH_BYTES_MAX: usize = 64 << 10;

impl Job {
    /// Reads a job written by [`Job::resolved`]; `place` names the record in the error.
    ///
    /// # Errors
    /// The record is malformed, uses features of a newer gristmill, or has values that a job file
    /// could not have.
    pub fn of_record(resolved: &Value, place: &str) -> Result<Job, JobError> {
        let invalid = |why: String| JobError::Invalid {
            place: place.to_string(),
            message: format!("the job in this record cannot be {why}"),
        };
        let read = Job::deserialize(resolved);
        let job = read.map_err(|error| invalid(format!("read: {}", in_short(&error.to_string()))))?;
        job.check_again()
            .map_err(|error| invalid(format!("run: {}", in_short(&error.to_string()))))?;
        Ok(job)
    }

    /// The output's columns besides the carried ones. `thinking`: whether its model thinks.
    pub fn output_columns(&self, thinking: bool) -> OutputColumns {
        OutputColumns {
            samples: self.generate.n,
            sample_status: self.generate.n > 1 && self.output.format == OutputFormat::Parquet,
            thinking,
            token_ids: self.output.token_ids,
            logprobs: self.generate.logprobs,
            choices: self.generate.shape.with_probabilities().map(<[String]>::to_vec),
            parsed: match &self.generate.shape {
                ShapeSpec::JsonSchema(schema) if !self.output.parsed.is_text() => Some(AnswerType::of(schema).0),
                _ => None,
            },
        }
    }

    /// Input columns in the output: the carried columns and the gold column of the report. For
    /// OpenAI batch lines, which always have both columns, also `custom_id`, which identifies a
    /// result's line, and `url`, which determines a result line's form. For a sample, also each
    /// row's number.
    pub fn carried(&self) -> Vec<String> {
        let mut carry = self.output.carry.clone();
        let batch = matches!(self.prompt.kind, PromptKind::Openai);
        let custom_id = batch.then(|| "custom_id".to_string());
        let url = (batch && self.output.format == OutputFormat::Openai).then(|| "url".to_string());
        let place = self.input.options.sample.map(|_| INPUT_ROW.to_string());
        for column in self.gold.iter().cloned().chain(custom_id).chain(url).chain(place) {
            if !carry.contains(&column) {
                carry.push(column);
            }
        }
        carry
    }

    /// The output's columns in its ledger's record, checked against the columns that this job
    /// requests. `place` names the record in the error.
    ///
    /// # Errors
    /// The columns are not those of this job.
    pub fn recorded_columns(&self, columns: &Value, place: &str) -> Result<OutputSchema, JobError> {
        let carried = self.carried();
        // An older gristmill carried fewer columns of an OpenAI batch.
        let may_carry = |name: &str| self.output.carry_all || carried.iter().any(|carried| carried == name);
        let wanted = (&self.output_columns(false), &self.output.renamed);
        let read = OutputSchema::of_record(columns, wanted, may_carry);
        read.map_err(|why| JobError::Invalid {
            place: place.to_string(),
            message: format!("the job in this record cannot be run: {}", in_short(&why)),
        })
    }

    /// Applies the checks of a job file to a job from a record.
    fn check_again(&self) -> Result<(), FieldError> {
        filled("name", &self.name)?;
        check_name(&self.name)?;
        filled("model", &self.model)?;
        if let Some(tokens) = self.context {
            integer_in("context", Some(tokens.into()), 2, 2, CONTEXT_MAX)?;
        }
        self.cache_salt.clone().map(cache_salt).transpose()?;
        self.input.check_again()?;
        self.prompt.check_again()?;
        self.generate.check_again().map_err(|error| FieldError {
            field: format!("generate.{}", error.field),
            ..error
        })?;
        filled("output.uri", &self.output.uri)?;
        self.output.check_carry()?;
        check_writing(&self.output.writing)?;
        self.gold.iter().try_for_each(|gold| filled("report.gold", gold))?;
        check_together(&self.generate, &self.output, self.gold.is_some(), false)?;
        check_typed(&self.generate, &self.output, &self.prompt)?;
        if !(1..=SHARD_ROWS_MAX.unsigned_abs()).contains(&self.shard_rows) {
            let why = format!("is {}; it must be from 1 to {SHARD_ROWS_MAX}", self.shard_rows);
            return bad("shards.rows", why);
        }
        check_dollars(self.budget.usd, self.budget.usd_per_hour)?;
        if let Some(seconds) = self.budget.deadline_seconds.filter(|seconds| *seconds > SECONDS_MAX) {
            return bad(
                "budget.deadline",
                format!("is {seconds} s; it is longer than ten years"),
            );
        }
        self.on_finish.check_again()?;
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
    fn check_again(&self) -> Result<(), FieldError> {
        match &self.kind {
            PromptKind::Messages(messages) if messages.is_empty() => return bad("prompt.messages", "is an empty list"),
            PromptKind::Messages(messages) => {
                if let Some(at) = messages.iter().position(|message| message.parts.is_empty()) {
                    return bad(format!("prompt.messages[{at}].content"), "is an empty list");
                }
            }
            PromptKind::Text(template) if template.is_empty() => return bad("prompt.text", "is empty"),
            PromptKind::TokenIds(column) => filled("prompt.token_ids", column)?,
            PromptKind::Text(_) | PromptKind::Openai => {}
        }
        match &self.chat_template {
            Some(ChatTemplateChoice::Named(name)) => filled("prompt.chat_template", name)?,
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
    /// Checks that a job file, with additions from a checkpoint, can have these values.
    fn check_again(&self) -> Result<(), FieldError> {
        let mut file = self.as_file();
        let of_model = self.is_of_model("stop");
        if of_model {
            file.stop = None;
            check_model_stops(&self.stop)?;
        }
        let mut checked = Generate::check(&file)?.of_line(self);
        if of_model {
            checked.stop = self.stop.clone();
        }
        if checked.thinking != self.thinking {
            return bad("thinking", "has settings, and nobody asked for it");
        }
        if checked != *self {
            return bad("shape", "is none that a job can ask for");
        }
        let Forbidden {
            tokens,
            first,
            min_new_tokens,
            min_length,
        } = &self.forbidden;
        let ends = self.model_ends.as_ref().map_or(0, Vec::len);
        for (field, count) in [
            ("forbidden.tokens", tokens.len()),
            ("forbidden.first", first.len()),
            ("model_ends", ends),
        ] {
            if count > MODEL_IDS_MAX {
                return bad(field, format!("has {count} entries, more than {MODEL_IDS_MAX}"));
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

fn check_model_stops(stops: &[String]) -> Result<(), FieldError> {
    if stops.len() > MODEL_STOPS_MAX {
        return bad(
            "stop",
            format!("has {} entries, more than {MODEL_STOPS_MAX}", stops.len()),
        );
    }
    if stops.iter().any(String::is_empty) {
        bad("stop", "holds an empty text, which would end every completion at once")
    } else {
        Ok(())
    }
}
