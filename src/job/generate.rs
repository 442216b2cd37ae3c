//! Checked generation parameters: from a job's `generate` block or a batch line's body to the
//! engine's parameters.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::check::{FieldError, bad, check_length, integer_in, number_in};
use super::file::{GenerateFile, OneOrMany};
use super::sampling::{Defaults, Sources, sources};
use super::thinking::ThinkingSpec;
use crate::device::draw::Sampling;
use crate::engine::constraint::misspelt::misspelt_keyword;
use crate::engine::forbidden::ForbiddenTokens;
use crate::engine::params::{GenerationParams, OutputConstraint};
use crate::tokenizer::Tokenizer;

/// Maximum `max_tokens`, which exceeds any model's context.
pub const MAX_TOKENS_MAX: u32 = 1 << 20;
/// Maximum samples per row.
pub const SAMPLES_MAX: u32 = 1024;
/// Maximum number of texts in `choice`, and maximum bytes of all texts together.
const CHOICES_MAX: usize = 10_000;
const CHOICE_BYTES_MAX: usize = 1 << 20;
/// Maximum number of entries of `stop`, and of `stop_token_ids`.
const STOPS_MAX: usize = 64;
/// Maximum bytes of all texts in `stop` together; each text is searched for after every token.
const STOP_BYTES_MAX: usize = 4 << 10;

/// Checked generation parameters. Planning takes those that the job leaves unset from the
/// checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Generate {
    pub max_tokens: u32,
    #[serde(flatten)]
    pub sampling: Sampling,
    pub seed: Option<u64>,
    pub stop: Vec<String>,
    pub stop_token_ids: Vec<u32>,
    pub ignore_eos: bool,
    pub logprobs: bool,
    pub n: u32,
    pub shape: ConstraintSpec,
    /// `None`: the model's whole output is its answer. This is the case in records of a gristmill
    /// without support for thoughts.
    #[serde(default)]
    pub thinking: Option<ThinkingSpec>,
    /// Whether unset values are taken from the checkpoint.
    #[serde(default)]
    pub defaults: Defaults,
    /// The source of each sampling value. Empty in records of a gristmill that did not use the
    /// checkpoint's sampling settings.
    #[serde(default)]
    pub from: Sources,
    /// Tokens that the checkpoint forbids.
    #[serde(default)]
    pub forbidden: ForbiddenTokens,
    /// End-of-sequence ids in the checkpoint's files when the job was planned; `None`: the files
    /// were not read.
    #[serde(default)]
    pub model_ends: Option<Vec<u32>>,
}

/// A job's constraint on the form of answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ConstraintSpec {
    Free,
    Choice { choices: Vec<String>, probabilities: bool },
    JsonSchema(Value),
    Regex(String),
}

impl ConstraintSpec {
    /// The choices, if their probabilities are requested.
    pub fn scored_choices(&self) -> Option<&[String]> {
        match self {
            ConstraintSpec::Choice {
                choices,
                probabilities: true,
            } => Some(choices),
            _ => None,
        }
    }
}

impl Generate {
    /// The settings of a job that sets nothing, before it takes its checkpoint's.
    ///
    /// # Errors
    /// None: an empty block is valid.
    pub fn unset() -> Result<Generate, String> {
        Generate::check(&GenerateFile::default()).map_err(|error| error.to_string())
    }

    /// Checks a job's `generate` block, or a batch line's body.
    pub(super) fn check(file: &GenerateFile) -> Result<Generate, FieldError> {
        let stop = file.stop.clone().map(|stop| stop.into_vec()).unwrap_or_default();
        for text in &stop {
            if text.is_empty() {
                return bad("stop", "holds an empty text, which would end every completion at once");
            }
            check_length("stop", text)?;
        }
        let stop_token_ids = file.stop_token_ids.clone().unwrap_or_default();
        for (field, count) in [("stop", stop.len()), ("stop_token_ids", stop_token_ids.len())] {
            if count > STOPS_MAX {
                return bad(field, format!("has {count} entries, more than {STOPS_MAX}"));
            }
        }
        let bytes: usize = stop.iter().map(String::len).sum();
        if bytes > STOP_BYTES_MAX {
            return bad(
                "stop",
                format!("has {bytes} bytes together, more than {STOP_BYTES_MAX}"),
            );
        }
        if file.choice.is_some() {
            // With `choice`, an answer ends by itself.
            for (field, is_set) in [
                ("stop", !stop.is_empty()),
                ("stop_token_ids", !stop_token_ids.is_empty()),
                ("ignore_eos", file.ignore_eos == Some(true)),
            ] {
                if is_set {
                    return bad(
                        field,
                        "cannot stand beside `choice`: an answer ends where its choice is whole",
                    );
                }
            }
        }
        let top_p = number_in("top_p", file.top_p, 1.0, 0.0, 1.0)?;
        if top_p == 0.0 {
            return bad(
                "top_p",
                "is 0, and at 0 no token is left; it must be above 0 and at most 1",
            );
        }
        Ok(Generate {
            max_tokens: integer_in("max_tokens", file.max_tokens, 256, 1, MAX_TOKENS_MAX)?,
            sampling: Sampling {
                temperature: number_in("temperature", file.temperature, 1.0, 0.0, 100.0)?,
                top_k: integer_in("top_k", file.top_k, 0, 0, i32::MAX as u32)?,
                top_p,
                min_p: number_in("min_p", file.min_p, 0.0, 0.0, 1.0)?,
                repetition_penalty: number_in("repetition_penalty", file.repetition_penalty, 1.0, 0.01, 100.0)?,
                presence_penalty: number_in("presence_penalty", file.presence_penalty, 0.0, -100.0, 100.0)?,
                frequency_penalty: number_in("frequency_penalty", file.frequency_penalty, 0.0, -100.0, 100.0)?,
            },
            seed: file.seed,
            stop,
            stop_token_ids,
            ignore_eos: file.ignore_eos.unwrap_or(false),
            logprobs: file.logprobs.unwrap_or(false),
            n: integer_in("n", file.n, 1, 1, SAMPLES_MAX)?,
            shape: output_constraint(file)?,
            thinking: ThinkingSpec::check(file.thinking.as_ref())?,
            defaults: file.defaults.unwrap_or_default(),
            from: sources(file),
            forbidden: ForbiddenTokens::default(),
            model_ends: None,
        })
    }

    /// Checks that all stop token ids are in the vocabulary. The error begins inside the field's
    /// backticks.
    pub(super) fn check_stop_ids(&self, tokenizer: &Tokenizer) -> Result<(), String> {
        let vocabulary = tokenizer.vocab_size();
        match self.stop_token_ids.iter().find(|id| **id as usize >= vocabulary) {
            None => Ok(()),
            Some(id) => Err(format!(
                "stop_token_ids` holds {id}, no id of the vocabulary (0 to {})",
                vocabulary - 1
            )),
        }
    }

    /// Converts to the engine's parameters. `default_seed` applies if the job gives no seed;
    /// `deterministic` is the job's setting.
    pub fn params(&self, default_seed: u64, deterministic: bool) -> GenerationParams {
        GenerationParams {
            max_tokens: self.max_tokens,
            sampling: self.sampling,
            seed: self.seed.unwrap_or(default_seed),
            stop: self.stop.clone(),
            stop_token_ids: self.stop_token_ids.clone(),
            ignore_eos: self.ignore_eos,
            forbidden: self.forbidden.clone(),
            logprobs: self.logprobs,
            samples: self.n,
            deterministic,
            // The caller sets this: it depends on the vocabulary.
            thinking: None,
            shape: match &self.shape {
                ConstraintSpec::Free => OutputConstraint::Free,
                ConstraintSpec::Choice { choices, probabilities } => OutputConstraint::Choice {
                    choices: choices.clone(),
                    probabilities: *probabilities,
                },
                ConstraintSpec::JsonSchema(schema) => OutputConstraint::JsonSchema(schema.clone()),
                ConstraintSpec::Regex(regex) => OutputConstraint::Regex(regex.clone()),
            },
        }
    }

    /// Converts back to the input of [`Generate::check`], so that a batch line can override some
    /// values.
    pub(super) fn to_file(&self) -> GenerateFile {
        let mut file = GenerateFile {
            max_tokens: Some(self.max_tokens.into()),
            temperature: Some(shortest_f64(self.sampling.temperature)),
            top_k: Some(self.sampling.top_k.into()),
            top_p: Some(shortest_f64(self.sampling.top_p)),
            min_p: Some(shortest_f64(self.sampling.min_p)),
            repetition_penalty: Some(shortest_f64(self.sampling.repetition_penalty)),
            presence_penalty: Some(shortest_f64(self.sampling.presence_penalty)),
            frequency_penalty: Some(shortest_f64(self.sampling.frequency_penalty)),
            seed: self.seed,
            stop: Some(OneOrMany::Many(self.stop.clone())),
            stop_token_ids: Some(self.stop_token_ids.clone()),
            ignore_eos: Some(self.ignore_eos),
            logprobs: Some(self.logprobs),
            n: Some(self.n.into()),
            thinking: ThinkingSpec::to_file(self.thinking.as_ref()),
            defaults: Some(self.defaults),
            ..Default::default()
        };
        match &self.shape {
            ConstraintSpec::Free => {}
            ConstraintSpec::Choice { choices, probabilities } => {
                file.choice = Some(choices.clone());
                file.choice_probabilities = Some(*probabilities);
            }
            ConstraintSpec::JsonSchema(schema) => file.json_schema = Some(schema.clone()),
            ConstraintSpec::Regex(regex) => file.regex = Some(regex.clone()),
        }
        file
    }
}

/// The `f64` with the same shortest decimal form, as a job file has it. (The exact value may be
/// beyond its limit: as `f32`, 0.01 is a little less.)
fn shortest_f64(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(f64::from(value))
}

fn output_constraint(file: &GenerateFile) -> Result<ConstraintSpec, FieldError> {
    let constraints = [
        ("choice", file.choice.is_some()),
        ("json_schema", file.json_schema.is_some()),
        ("regex", file.regex.is_some()),
    ];
    let set_fields: Vec<&str> = constraints
        .iter()
        .filter(|(_, is_set)| *is_set)
        .map(|(name, _)| *name)
        .collect();
    if let [first, second, ..] = set_fields[..] {
        return bad(
            second,
            format!("cannot stand beside `{first}`: an answer has one shape"),
        );
    }
    let probabilities = file.choice_probabilities.unwrap_or(false);
    if probabilities && file.choice.is_none() {
        return bad("choice_probabilities", "needs `choice`");
    }
    if probabilities && file.n.unwrap_or(1) > 1 {
        return bad(
            "choice_probabilities",
            "needs `n` to be 1: the probabilities are the same for every sample",
        );
    }
    if let Some(choices) = &file.choice {
        return check_choice(choices, probabilities);
    }
    if let Some(schema) = &file.json_schema {
        match schema {
            Value::Object(_) => {}
            Value::String(path) if path.ends_with(".json") => {
                return bad(
                    "json_schema",
                    format!("is a text; a schema in a file is `json_schema: {{file: {path}}}`"),
                );
            }
            _ => return bad("json_schema", "is no JSON Schema: it must be a mapping"),
        }
        if let Some(why) = misspelt_keyword(schema) {
            return bad("json_schema", why);
        }
        return Ok(ConstraintSpec::JsonSchema(schema.clone()));
    }
    match &file.regex {
        Some(regex) if regex.is_empty() => bad("regex", "is empty"),
        Some(regex) => Ok(ConstraintSpec::Regex(regex.clone())),
        None => Ok(ConstraintSpec::Free),
    }
}

fn check_choice(choices: &[String], probabilities: bool) -> Result<ConstraintSpec, FieldError> {
    if choices.is_empty() || choices.len() > CHOICES_MAX {
        return bad(
            "choice",
            format!("has {} texts; it takes from 1 to {CHOICES_MAX}", choices.len()),
        );
    }
    let bytes: usize = choices.iter().map(String::len).sum();
    if bytes > CHOICE_BYTES_MAX {
        return bad(
            "choice",
            format!("has {bytes} bytes together, more than {CHOICE_BYTES_MAX}"),
        );
    }
    let mut seen = std::collections::HashSet::new();
    for choice in choices {
        if choice.is_empty() {
            return bad("choice", "holds an empty text");
        }
        check_length("choice", choice)?;
        if !seen.insert(choice) {
            return bad("choice", format!("holds `{choice}` twice"));
        }
    }
    Ok(ConstraintSpec::Choice {
        choices: choices.to_vec(),
        probabilities,
    })
}
