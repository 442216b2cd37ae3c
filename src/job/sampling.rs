//! Fills sampling settings that a job leaves unset from its checkpoint, and records each value's
//! source.
//!
//! A job's own value takes precedence, then the checkpoint's (unless `generate.defaults` is
//! `neutral`), then the neutral default. This happens once, when the job is planned: workers use
//! the values in the job's record.
//!
//! See docs/decisions/044-sampling-is-settled-when-a-job-is-planned.md.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::file::GenerateFile;
use super::generate::{Generate, ShapeSpec};
use crate::engine::forbidden::Forbidden;
use crate::model::config::generation::GenerationDefaults;

/// Whose values are taken where a job gives none: the checkpoint's, or those that change nothing of its distribution.
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
    #[serde(rename = "default")]
    Default,
}

impl Source {
    /// The source's name in records.
    pub fn word(self) -> &'static str {
        match self {
            Source::Job => "job",
            Source::GenerationConfig => "generation_config.json",
            Source::Config => "config.json",
            Source::Default => "default",
        }
    }

    fn is_model(self) -> bool {
        matches!(self, Source::GenerationConfig | Source::Config)
    }
}

/// The source of each sampling value, by field of `generate`.
pub type Sources = BTreeMap<String, Source>;

/// The source of each value before the checkpoint is read.
pub(super) fn sources(file: &GenerateFile) -> Sources {
    let given = [
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
    let source = |given| if given { Source::Job } else { Source::Default };
    given
        .into_iter()
        .map(|(name, given)| (name.to_string(), source(given)))
        .collect()
}

impl Generate {
    /// Takes values that the job left unset, and forbidden tokens, from the checkpoint.
    pub fn take_defaults(&mut self, model: &GenerationDefaults) {
        let source = if model.from_config_json {
            Source::Config
        } else {
            Source::GenerationConfig
        };
        let from = &mut self.from;
        take(from, source, "max_tokens", &mut self.max_tokens, model.max_new_tokens);
        take(
            from,
            source,
            "temperature",
            &mut self.sampling.temperature,
            model.temperature,
        );
        take(from, source, "top_k", &mut self.sampling.top_k, model.top_k);
        take(from, source, "top_p", &mut self.sampling.top_p, model.top_p);
        take(from, source, "min_p", &mut self.sampling.min_p, model.min_p);
        let penalty = model.repetition_penalty;
        take(
            from,
            source,
            "repetition_penalty",
            &mut self.sampling.repetition_penalty,
            penalty,
        );
        // A choice ends by itself.
        let is_choice = matches!(self.shape, ShapeSpec::Choice { .. });
        let stop = Some(model.stop_strings.clone()).filter(|texts| !texts.is_empty() && !is_choice);
        take(from, source, "stop", &mut self.stop, stop);
        self.forbidden = Forbidden {
            tokens: model.suppress_tokens.clone(),
            first: model.begin_suppress_tokens.clone(),
            min_new_tokens: model.min_new_tokens,
            min_length: model.min_length,
        };
        if !self.forbidden.is_empty() {
            from.insert("forbidden".into(), source);
        }
    }

    /// Copies from the job the settings that a batch line cannot change.
    pub(super) fn of_line(self, job: &Generate) -> Generate {
        Generate {
            from: job.from.clone(),
            forbidden: job.forbidden.clone(),
            model_ends: job.model_ends.clone(),
            ..self
        }
    }

    /// The source of a value; records of an older gristmill have none.
    pub fn source(&self, name: &str) -> Option<Source> {
        self.from.get(name).copied()
    }

    /// Whether a value comes from the checkpoint.
    pub fn is_of_model(&self, name: &str) -> bool {
        self.source(name).is_some_and(Source::is_model)
    }

    /// The values filled in here, by name.
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

    /// Each value with its source, for programs.
    pub fn sampling_json(&self) -> Value {
        let values = self.values().into_iter().map(|(name, value)| {
            let from = self.source(name).unwrap_or(Source::Default).word();
            (name.to_string(), json!({"value": value, "from": from}))
        });
        Value::Object(values.collect())
    }

    /// The values that are not defaults, grouped by source, the checkpoint's first; `None` if the
    /// checkpoint gives none.
    pub fn sampling_line(&self) -> Option<String> {
        let of = |source: Source| {
            let values = self.values().into_iter();
            let values = values.filter(|(name, _)| self.source(name) == Some(source));
            let values: Vec<String> = values
                .map(|(name, value)| said(name, &value, &self.forbidden))
                .collect();
            (!values.is_empty()).then(|| format!("{} ({})", values.join(", "), source.word()))
        };
        self.from.values().any(|source| source.is_model()).then(|| {
            let sources = [Source::GenerationConfig, Source::Config, Source::Job];
            let parts: Vec<String> = sources.into_iter().filter_map(of).collect();
            parts.join("; ")
        })
    }

    /// All values in words.
    pub fn words(&self) -> String {
        let values = self.values().into_iter();
        let values: Vec<String> = values
            .map(|(name, value)| said(name, &value, &self.forbidden))
            .collect();
        values.join(", ")
    }

    /// The values that differ between `self` and `other`, in words for each of the two.
    pub fn differences(&self, other: &Generate) -> Option<(String, String)> {
        let pairs = self.values().into_iter().zip(other.values());
        let (mut here, mut there): (Vec<String>, Vec<String>) = pairs
            // A default is skipped if both sides have it: it may depend on how the model thinks,
            // which is settled later.
            .filter(|((name, _), _)| [self, other].iter().any(|of| of.source(name) != Some(Source::Default)))
            .filter(|((_, a), (_, b))| a != b)
            .map(|((name, a), (_, b))| (said(name, &a, &self.forbidden), said(name, &b, &other.forbidden)))
            .unzip();
        if let (Some(a), Some(b)) = (&self.model_ends, &other.model_ends)
            && a != b
        {
            here.push(format!("the ends {a:?}"));
            there.push(format!("the ends {b:?}"));
        }
        (!here.is_empty()).then(|| (here.join(", "), there.join(", ")))
    }
}

/// Takes the checkpoint's value if the current one is a default.
fn take<T>(from: &mut Sources, source: Source, name: &str, own: &mut T, models: Option<T>) {
    if let (Some(value), Some(at)) = (models, from.get_mut(name))
        && *at == Source::Default
    {
        *own = value;
        *at = source;
    }
}

/// The number's shortest decimal form instead of the nearest `f64`.
fn number(value: f32) -> Value {
    value
        .to_string()
        .parse::<f64>()
        .map_or(Value::Null, |value| json!(value))
}

/// A value in words.
fn said(name: &str, value: &Value, forbidden: &Forbidden) -> String {
    if name != "forbidden" {
        let whole = value.as_f64().filter(|x| x.fract() == 0.0);
        return match whole {
            Some(whole) => format!("{name} {whole}"),
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
    let lists: Vec<String> = lists.map(|(what, count)| format!("{count} {what}")).collect();
    if lists.is_empty() {
        "nothing forbidden".into()
    } else {
        lists.join(", ")
    }
}
