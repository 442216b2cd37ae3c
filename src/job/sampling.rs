//! Takes sampling values that a job leaves unset from its checkpoint, and notes the source of each
//! value.
//!
//! The job's own value comes first, then the checkpoint's (unless `generate.defaults` is
//! `neutral`), then the neutral default. Values are fixed when the job is planned: workers use those
//! in the job's record.
//!
//! See docs/decisions/044-sampling-is-settled-when-a-job-is-planned.md.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::file::GenerateFile;
use super::generate::{ConstraintSpec, Generate};
use crate::engine::forbidden::ForbiddenTokens;
use crate::model::config::generation::{GenerationDefaults, Origin};

/// Source of the values that a job leaves out: the checkpoint, or neutral values, which do not change the model's distribution.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Defaults {
    #[default]
    Model,
    Neutral,
}

/// The source of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Source {
    #[serde(rename = "job")]
    Job,
    #[serde(rename = "generation_config.json")]
    GenerationConfig,
    /// For a checkpoint without `generation_config.json`.
    #[serde(rename = "config.json")]
    Config,
    #[serde(rename = "GGUF metadata")]
    Gguf,
    #[serde(rename = "default")]
    Default,
}

impl Source {
    /// The source's name in records.
    pub fn name(self) -> &'static str {
        match self {
            Source::Job => "job",
            Source::GenerationConfig => "generation_config.json",
            Source::Config => "config.json",
            Source::Gguf => "GGUF metadata",
            Source::Default => "default",
        }
    }

    fn is_checkpoint(self) -> bool {
        matches!(self, Source::GenerationConfig | Source::Config | Source::Gguf)
    }
}

/// The source of each sampling value, by its field in `generate`.
pub type Sources = BTreeMap<String, Source>;

/// The source of each value before the checkpoint is read.
pub(super) fn sources(file: &GenerateFile) -> Sources {
    let fields = [
        ("max_tokens", file.max_tokens.is_some()),
        ("temperature", file.temperature.is_some()),
        ("top_k", file.top_k.is_some()),
        ("top_p", file.top_p.is_some()),
        ("min_p", file.min_p.is_some()),
        ("repetition_penalty", file.repetition_penalty.is_some()),
        ("presence_penalty", file.presence_penalty.is_some()),
        ("frequency_penalty", file.frequency_penalty.is_some()),
        ("stop", file.stop.is_some()),
    ];
    let source = |is_set| if is_set { Source::Job } else { Source::Default };
    fields
        .into_iter()
        .map(|(name, is_set)| (name.to_string(), source(is_set)))
        .collect()
}

impl Generate {
    /// Takes the values that the job leaves unset, and the forbidden tokens, from the checkpoint.
    pub fn take_defaults(&mut self, model: &GenerationDefaults) {
        let source = match model.origin {
            Origin::GenerationConfig => Source::GenerationConfig,
            Origin::Config => Source::Config,
            Origin::Gguf => Source::Gguf,
        };
        let sources = &mut self.from;
        take_default(
            sources,
            source,
            "max_tokens",
            &mut self.max_tokens,
            model.max_new_tokens,
        );
        take_default(
            sources,
            source,
            "temperature",
            &mut self.sampling.temperature,
            model.temperature,
        );
        take_default(sources, source, "top_k", &mut self.sampling.top_k, model.top_k);
        take_default(sources, source, "top_p", &mut self.sampling.top_p, model.top_p);
        take_default(sources, source, "min_p", &mut self.sampling.min_p, model.min_p);
        let penalty = model.repetition_penalty;
        take_default(
            sources,
            source,
            "repetition_penalty",
            &mut self.sampling.repetition_penalty,
            penalty,
        );
        // With `choice`, an answer ends by itself, and stop texts are refused.
        let is_choice = matches!(self.shape, ConstraintSpec::Choice { .. });
        let stop = Some(model.stop_strings.clone()).filter(|texts| !texts.is_empty() && !is_choice);
        take_default(sources, source, "stop", &mut self.stop, stop);
        self.forbidden = ForbiddenTokens {
            tokens: model.suppress_tokens.clone(),
            first: model.begin_suppress_tokens.clone(),
            min_new_tokens: model.min_new_tokens,
            min_length: model.min_length,
        };
        if !self.forbidden.is_empty() {
            sources.insert("forbidden".into(), source);
        }
    }

    /// Replaces the values that a batch line cannot set by the job's.
    pub(super) fn with_job_values(self, job: &Generate) -> Generate {
        Generate {
            from: job.from.clone(),
            forbidden: job.forbidden.clone(),
            model_ends: job.model_ends.clone(),
            ..self
        }
    }

    /// The source of a value; `None` in records of an older gristmill.
    pub fn source(&self, name: &str) -> Option<Source> {
        self.from.get(name).copied()
    }

    /// Whether a value comes from the checkpoint.
    pub fn is_from_checkpoint(&self, name: &str) -> bool {
        self.source(name).is_some_and(Source::is_checkpoint)
    }

    /// The values that a checkpoint may give, and the penalties, by name.
    fn values(&self) -> [(&'static str, Value); 10] {
        [
            ("temperature", number(self.sampling.temperature)),
            ("top_p", number(self.sampling.top_p)),
            ("top_k", json!(self.sampling.top_k)),
            ("min_p", number(self.sampling.min_p)),
            ("repetition_penalty", number(self.sampling.repetition_penalty)),
            ("presence_penalty", number(self.sampling.presence_penalty)),
            ("frequency_penalty", number(self.sampling.frequency_penalty)),
            ("max_tokens", json!(self.max_tokens)),
            ("stop", json!(self.stop)),
            ("forbidden", json!(self.forbidden)),
        ]
    }

    /// Each value with its source, as JSON for programs.
    pub fn sampling_json(&self) -> Value {
        let values = self.values().into_iter().map(|(name, value)| {
            let from = self.source(name).unwrap_or(Source::Default).name();
            (name.to_string(), json!({"value": value, "from": from}))
        });
        Value::Object(values.collect())
    }

    /// A line with the values that are not defaults, grouped by source, the checkpoint's first;
    /// `None` if the checkpoint gives no value.
    pub fn sampling_line(&self) -> Option<String> {
        let values_of = |source: Source| {
            let values = self.values().into_iter();
            let values = values.filter(|(name, _)| self.source(name) == Some(source));
            let values: Vec<String> = values
                .map(|(name, value)| describe_value(name, &value, &self.forbidden))
                .collect();
            (!values.is_empty()).then(|| format!("{} ({})", values.join(", "), source.name()))
        };
        self.from.values().any(|source| source.is_checkpoint()).then(|| {
            let sources = [Source::GenerationConfig, Source::Config, Source::Job];
            let parts: Vec<String> = sources.into_iter().filter_map(values_of).collect();
            parts.join("; ")
        })
    }

    /// A line with all values.
    pub fn describe_sampling(&self) -> String {
        let values = self.values().into_iter();
        let values: Vec<String> = values
            .map(|(name, value)| describe_value(name, &value, &self.forbidden))
            .collect();
        values.join(", ")
    }

    /// The values that differ, as a line for `self` and a line for `other`; `None` if none differ.
    pub fn sampling_differences(&self, other: &Generate) -> Option<(String, String)> {
        let pairs = self.values().into_iter().zip(other.values());
        let (mut own_values, mut other_values): (Vec<String>, Vec<String>) = pairs
            // A value that is a default on both sides is skipped: the default of `max_tokens` may
            // depend on how the model thinks, which is determined later.
            .filter(|((name, _), _)| {
                [self, other]
                    .iter()
                    .any(|generate| generate.source(name) != Some(Source::Default))
            })
            .filter(|((_, a), (_, b))| a != b)
            .map(|((name, a), (_, b))| {
                (
                    describe_value(name, &a, &self.forbidden),
                    describe_value(name, &b, &other.forbidden),
                )
            })
            .unzip();
        if let (Some(a), Some(b)) = (&self.model_ends, &other.model_ends)
            && a != b
        {
            own_values.push(format!("the ends {a:?}"));
            other_values.push(format!("the ends {b:?}"));
        }
        (!own_values.is_empty()).then(|| (own_values.join(", "), other_values.join(", ")))
    }
}

/// Replaces `value` by the checkpoint's `default`, if there is one and the job leaves `value` unset.
fn take_default<T>(sources: &mut Sources, checkpoint: Source, name: &str, value: &mut T, default: Option<T>) {
    if let (Some(default), Some(source)) = (default, sources.get_mut(name))
        && *source == Source::Default
    {
        *value = default;
        *source = checkpoint;
    }
}

/// Converts to JSON with the shortest decimal form, which `f64::from` would not keep.
fn number(value: f32) -> Value {
    value
        .to_string()
        .parse::<f64>()
        .map_or(Value::Null, |value| json!(value))
}

/// A value with its name, for messages.
fn describe_value(name: &str, value: &Value, forbidden: &ForbiddenTokens) -> String {
    if name != "forbidden" {
        let integer = value.as_f64().filter(|x| x.fract() == 0.0);
        return match integer {
            Some(integer) => format!("{name} {integer}"),
            None => format!("{name} {value}"),
        };
    }
    let lists = [
        ("tokens never drawn", forbidden.tokens.len()),
        ("tokens never drawn first", forbidden.first.len()),
        ("tokens at least", forbidden.min_new_tokens as usize),
        ("tokens at least with the prompt", forbidden.min_length as usize),
    ];
    let lists = lists.iter().filter(|(_, count)| *count > 0);
    let lists: Vec<String> = lists.map(|(label, count)| format!("{count} {label}")).collect();
    if lists.is_empty() {
        "nothing forbidden".into()
    } else {
        lists.join(", ")
    }
}
