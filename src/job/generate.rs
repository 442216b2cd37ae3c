//! Checks generation parameters and converts a job's `generate` block or a batch line's body to the
//! engine's parameters.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::check::{FieldError, bad, check_length, integer_in, within};
use super::file::{GenerateFile, OneOrMany};
use super::sampling::{Defaults, Sources, sources};
use super::thinking::ThinkingSpec;
use crate::device::draw::Sampling;
use crate::engine::constraint::misspelt::misspelt;
use crate::engine::forbidden::Forbidden;
use crate::engine::params::{GenerationParams, OutputConstraint};

/// Maximum `max_tokens`, which exceeds any model's context.
pub const MAX_TOKENS_MAX: u32 = 1 << 20;
/// Maximum samples per row.
pub const SAMPLES_MAX: u32 = 1024;
/// Maximum number of texts in `choice`, and maximum bytes of all of them.
const CHOICES_MAX: usize = 10_000;
const CHOICE_BYTES_MAX: usize = 1 << 20;
/// Maximum number of entries of `stop` and of `stop_token_ids`.
const STOPS_MAX: usize = 64;
/// Maximum bytes of all texts in `stop`: each text is searched for at each token.
const STOP_BYTES_MAX: usize = 4 << 10;

/// Checked generation parameters, from the job and, for unset ones, from its checkpoint.
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
    pub shape: ShapeSpec,
    /// `None`: the model's whole output is its answer, as in records of a gristmill without support
    /// for thoughts.
    #[serde(default)]
    pub thinking: Option<ThinkingSpec>,
    /// Where unset values are taken from.
    #[serde(default)]
    pub defaults: Defaults,
    /// The source of each value. Empty in records of a gristmill that did not use the checkpoint's
    /// sampling settings.
    #[serde(default)]
    pub from: Sources,
    /// Tokens that the checkpoint forbids.
    #[serde(default)]
    pub forbidden: Forbidden,
    /// End-of-sequence ids in the checkpoint's files at planning; `None`: the files were not read.
    #[serde(default)]
    pub model_ends: Option<Vec<u32>>,
}

/// Constraint on a completion's form.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ShapeSpec {
    Free,
    Choice { choices: Vec<String>, probabilities: bool },
    JsonSchema(Value),
    Regex(String),
}

impl ShapeSpec {
    /// The choices whose probabilities are requested.
    pub fn with_probabilities(&self) -> Option<&[String]> {
        match self {
            ShapeSpec::Choice {
                choices,
                probabilities: true,
            } => Some(choices),
            _ => None,
        }
    }
}

impl Generate {
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
            // A choice ends by itself.
            for (field, given) in [
                ("stop", !stop.is_empty()),
                ("stop_token_ids", !stop_token_ids.is_empty()),
                ("ignore_eos", file.ignore_eos == Some(true)),
            ] {
                if given {
                    return bad(
                        field,
                        "cannot stand beside `choice`: an answer ends where its choice is whole",
                    );
                }
            }
        }
        let top_p = within("top_p", file.top_p, 1.0, 0.0, 1.0)?;
        if top_p == 0.0 {
            return bad(
                "top_p",
                "is 0, and at 0 no token is left; it must be above 0 and at most 1",
            );
        }
        Ok(Generate {
            max_tokens: integer_in("max_tokens", file.max_tokens, 256, 1, MAX_TOKENS_MAX)?,
            sampling: Sampling {
                temperature: within("temperature", file.temperature, 1.0, 0.0, 100.0)?,
                top_k: integer_in("top_k", file.top_k, 0, 0, i32::MAX as u32)?,
                top_p,
                min_p: within("min_p", file.min_p, 0.0, 0.0, 1.0)?,
                repetition_penalty: within("repetition_penalty", file.repetition_penalty, 1.0, 0.01, 100.0)?,
                presence_penalty: within("presence_penalty", file.presence_penalty, 0.0, -100.0, 100.0)?,
                frequency_penalty: within("frequency_penalty", file.frequency_penalty, 0.0, -100.0, 100.0)?,
            },
            seed: file.seed,
            stop,
            stop_token_ids,
            ignore_eos: file.ignore_eos.unwrap_or(false),
            logprobs: file.logprobs.unwrap_or(false),
            n: integer_in("n", file.n, 1, 1, SAMPLES_MAX)?,
            shape: shape(file)?,
            thinking: ThinkingSpec::check(file.thinking.as_ref())?,
            defaults: file.defaults.unwrap_or_default(),
            from: sources(file),
            forbidden: Forbidden::default(),
            model_ends: None,
        })
    }

    /// The engine's parameters; `seed` is the default seed. `deterministic` is the job's setting.
    pub fn params(&self, seed: u64, deterministic: bool) -> GenerationParams {
        GenerationParams {
            max_tokens: self.max_tokens,
            sampling: self.sampling,
            seed: self.seed.unwrap_or(seed),
            stop: self.stop.clone(),
            stop_token_ids: self.stop_token_ids.clone(),
            ignore_eos: self.ignore_eos,
            forbidden: self.forbidden.clone(),
            logprobs: self.logprobs,
            samples: self.n,
            deterministic,
            // Set once the vocabulary is known.
            thinking: None,
            shape: match &self.shape {
                ShapeSpec::Free => OutputConstraint::Free,
                ShapeSpec::Choice { choices, probabilities } => OutputConstraint::Choice {
                    choices: choices.clone(),
                    probabilities: *probabilities,
                },
                ShapeSpec::JsonSchema(schema) => OutputConstraint::JsonSchema(schema.clone()),
                ShapeSpec::Regex(regex) => OutputConstraint::Regex(regex.clone()),
            },
        }
    }

    /// Converts back to the input of [`Generate::check`], so that a batch line can override parts
    /// of it.
    pub(super) fn as_file(&self) -> GenerateFile {
        let mut file = GenerateFile {
            max_tokens: Some(self.max_tokens.into()),
            temperature: Some(exact(self.sampling.temperature)),
            top_k: Some(self.sampling.top_k.into()),
            top_p: Some(exact(self.sampling.top_p)),
            min_p: Some(exact(self.sampling.min_p)),
            repetition_penalty: Some(exact(self.sampling.repetition_penalty)),
            presence_penalty: Some(exact(self.sampling.presence_penalty)),
            frequency_penalty: Some(exact(self.sampling.frequency_penalty)),
            seed: self.seed,
            stop: Some(OneOrMany::Many(self.stop.clone())),
            stop_token_ids: Some(self.stop_token_ids.clone()),
            ignore_eos: Some(self.ignore_eos),
            logprobs: Some(self.logprobs),
            n: Some(self.n.into()),
            thinking: ThinkingSpec::as_file(self.thinking.as_ref()),
            defaults: Some(self.defaults),
            ..Default::default()
        };
        match &self.shape {
            ShapeSpec::Free => {}
            ShapeSpec::Choice { choices, probabilities } => {
                file.choice = Some(choices.clone());
                file.choice_probabilities = Some(*probabilities);
            }
            ShapeSpec::JsonSchema(schema) => file.json_schema = Some(schema.clone()),
            ShapeSpec::Regex(regex) => file.regex = Some(regex.clone()),
        }
        file
    }
}

/// A checked `f32` as the `f64` that the file has; limits are compared in `f64`.
fn exact(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(f64::from(value))
}

fn shape(file: &GenerateFile) -> Result<ShapeSpec, FieldError> {
    let given = [
        ("choice", file.choice.is_some()),
        ("json_schema", file.json_schema.is_some()),
        ("regex", file.regex.is_some()),
    ];
    let given: Vec<&str> = given
        .iter()
        .filter(|(_, given)| *given)
        .map(|(name, _)| *name)
        .collect();
    if let [first, second, ..] = given[..] {
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
        return choice(choices, probabilities);
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
        if let Some(why) = misspelt(schema) {
            return bad("json_schema", why);
        }
        return Ok(ShapeSpec::JsonSchema(schema.clone()));
    }
    match &file.regex {
        Some(regex) if regex.is_empty() => bad("regex", "is empty"),
        Some(regex) => Ok(ShapeSpec::Regex(regex.clone())),
        None => Ok(ShapeSpec::Free),
    }
}

fn choice(choices: &[String], probabilities: bool) -> Result<ShapeSpec, FieldError> {
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
    Ok(ShapeSpec::Choice {
        choices: choices.to_vec(),
        probabilities,
    })
}
