//! How a model thinks: the job's settings, its vocabulary and its chat template.
//!
//! Thoughts are separated from answers by token ids, so a delimiter must begin with an added token
//! of the vocabulary, which ordinary text is never split into. A known pair of delimiters counts if
//! the vocabulary has it as such tokens and the chat template mentions it; any other pair counts if
//! the job names it. Delimiters that a vocabulary spells with ordinary tokens (Granite's `<think>`)
//! cannot be told from text.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::chat::ChatTemplate;
use super::check::{FieldError, bad, check_length, integer_in};
use super::generate::{Generate, MAX_TOKENS_MAX, ShapeSpec};
use super::sampling::Source;
use crate::engine::thinking::{Begin, Thinking};
use crate::report::summary::{counted, number};
use crate::tokenizer::Tokenizer;

/// Default maximum of tokens for thought and answer, if neither the job nor the checkpoint sets
/// one.
const MAX_TOKENS: u32 = 8192;
/// Default maximum of tokens for the answer, if the job limits only the thought.
const ANSWER_TOKENS: u32 = 256;
/// Texts that no template produces by itself.
const THOUGHT_PROBE: &str = "gristmill probe thought";
const ANSWER_PROBE: &str = "gristmill probe answer";

/// Whether thoughts are told from answers, and how.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    untagged,
    expecting = "expected `false`, or a mapping of `open`, `close`, `max_tokens` and `end_text`"
)]
pub enum ThinkingFile {
    Switch(bool),
    Settings(ThinkingSettings),
}

/// How thoughts are told from answers, and how long they may be.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ThinkingSettings {
    /// What a thought begins with, where it is none of the known: one or more tokens of the vocabulary.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub open: Option<String>,
    /// What ends it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub close: Option<String>,
    /// Most tokens of a thought; a longer one is ended by `end_text`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1_048_576))]
    pub max_tokens: Option<i64>,
    /// What ends a thought of `max_tokens` tokens; `close` is added where it does not hold it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end_text: Option<String>,
}

/// A job's settings for thoughts.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThinkingSpec {
    /// Whether the job requires thoughts: then a model that does not think is refused.
    pub asked: bool,
    /// The job's own delimiters.
    pub delimiters: Option<(String, String)>,
    /// Maximum tokens of a thought.
    pub max_tokens: Option<u32>,
    /// The text that ends a longer thought.
    pub end_text: Option<String>,
}

impl ThinkingSpec {
    /// Checks a job's settings; `None`: the model's whole output is its answer.
    pub(super) fn check(file: Option<&ThinkingFile>) -> Result<Option<ThinkingSpec>, FieldError> {
        let settings = match file {
            None => return Ok(Some(ThinkingSpec::default())),
            Some(ThinkingFile::Switch(false)) => return Ok(None),
            Some(ThinkingFile::Switch(true)) => ThinkingSettings::default(),
            Some(ThinkingFile::Settings(settings)) => settings.clone(),
        };
        let texts = [
            ("thinking.open", &settings.open),
            ("thinking.close", &settings.close),
            ("thinking.end_text", &settings.end_text),
        ];
        for (field, text) in texts
            .into_iter()
            .filter_map(|(field, text)| Some((field, text.as_ref()?)))
        {
            if text.is_empty() {
                return bad(field, "is empty");
            }
            check_length(field, text)?;
        }
        let delimiters = match (settings.open, settings.close) {
            (None, None) => None,
            (Some(open), Some(close)) if open == close => {
                return bad("thinking.close", format!("is `{close}`, as `thinking.open` is"));
            }
            (Some(open), Some(close)) => Some((open, close)),
            (Some(_), None) => return bad("thinking.close", "is missing beside `thinking.open`"),
            (None, Some(_)) => return bad("thinking.open", "is missing beside `thinking.close`"),
        };
        let max_tokens = settings
            .max_tokens
            .map(|tokens| integer_in("thinking.max_tokens", Some(tokens), 0, 0, MAX_TOKENS_MAX))
            .transpose()?;
        if settings.end_text.is_some() && max_tokens.is_none() {
            return bad(
                "thinking.end_text",
                "needs `thinking.max_tokens`, after which it ends a thought",
            );
        }
        Ok(Some(ThinkingSpec {
            asked: true,
            delimiters,
            max_tokens,
            end_text: settings.end_text,
        }))
    }

    /// Converts back to the input of [`ThinkingSpec::check`].
    pub(super) fn as_file(spec: Option<&ThinkingSpec>) -> Option<ThinkingFile> {
        let Some(spec) = spec else {
            return Some(ThinkingFile::Switch(false));
        };
        let (open, close) = spec.delimiters.clone().unzip();
        spec.asked.then(|| {
            ThinkingFile::Settings(ThinkingSettings {
                open,
                close,
                max_tokens: spec.max_tokens.map(i64::from),
                end_text: spec.end_text.clone(),
            })
        })
    }
}

/// A pair of delimiters as text.
#[derive(Debug, Clone, Copy)]
struct Pair<'a> {
    open: &'a str,
    close: &'a str,
    /// The start of an answer without a thought.
    header: &'a str,
    /// Text that models put between the thought and the closing delimiter, and between that and the
    /// answer.
    around: (&'a str, &'a str),
}

const fn pair(open: &'static str, close: &'static str, around: (&'static str, &'static str)) -> Pair<'static> {
    Pair {
        open,
        close,
        header: "",
        around,
    }
}

/// The known pairs.
const KNOWN: [Pair<'static>; 5] = [
    pair("<think>", "</think>", ("\n", "\n\n")),
    pair("[THINK]", "[/THINK]", ("", "")),
    pair("<thought>", "</thought>", ("\n", "\n\n")),
    pair("<seed:think>", "</seed:think>", ("", "")),
    Pair {
        open: "<|channel|>analysis<|message|>",
        close: "<|end|><|start|>assistant<|channel|>final<|message|>",
        header: "<|channel|>final<|message|>",
        around: ("", ""),
    },
];

/// How the model of a job thinks.
#[derive(Debug, Clone)]
pub struct Thinks {
    /// Settings of rows without settings of their own.
    thinking: Arc<Thinking>,
    /// The delimiters' texts.
    pub open: String,
    pub close: String,
    /// How the job's prompts begin completions; `None`: it differs between prompts.
    pub begin: Option<Begin>,
}

impl Thinks {
    /// How the model of a job thinks; `None` if it does not, or if its whole output is the answer.
    /// `probe`: a sample prompt of the job, if all prompts are alike.
    ///
    /// # Errors
    /// One line without a place: the job's request cannot be satisfied.
    pub(super) fn find(
        generate: &Generate,
        tokenizer: &Tokenizer,
        chat: Option<&ChatTemplate>,
        probe: Option<&str>,
    ) -> Result<Option<Thinks>, String> {
        let Some(spec) = &generate.thinking else {
            return Ok(None);
        };
        let source = chat.map(ChatTemplate::source).unwrap_or_default();
        let mentions = |pair: &&Pair<'_>| source.contains(pair.open) || source.contains(pair.close);
        let known = KNOWN.iter().filter(mentions).copied();
        let own = spec.delimiters.as_ref().map(|(open, close)| Pair {
            open,
            close,
            header: "",
            around: ("", ""),
        });
        // The job may name a known pair.
        let own = own.map(|own| {
            let same = |pair: &&Pair<'_>| (pair.open, pair.close) == (own.open, own.close);
            KNOWN.iter().find(same).copied().unwrap_or(own)
        });
        let found = match own {
            Some(pair) => Some((
                pair,
                ids_of_pair(&pair, tokenizer).map_err(|e| format!("`generate.thinking.{e}"))?,
            )),
            None => known
                .clone()
                .find_map(|pair| Some((pair, ids_of_pair(&pair, tokenizer).ok()?))),
        };
        let Some((pair, [open, close, header])) = found else {
            let spelled = known
                .clone()
                .find(|pair| probe.is_some_and(|text| text.contains(pair.open)));
            return without_ids(generate, spec.asked, spelled);
        };
        let (before, gap) = chat.and_then(|chat| around(chat, &pair)).unwrap_or_else(|| {
            let (before, gap) = pair.around;
            (
                before.to_string(),
                breaks_behind(source, pair.close).unwrap_or(gap.to_string()),
            )
        });
        let (end, end_gap) = end(spec, &pair, (before.as_str(), gap.as_str()), tokenizer)?;
        let thinking = Thinking {
            gap: tokenizer.encode_plain(&gap),
            control: control(source, tokenizer),
            max_tokens: spec.max_tokens,
            open,
            close,
            header,
            end,
            end_gap,
        };
        let begin = match probe {
            Some(text) => Some(thinking.begin(&tokenizer.encode(text, false)?)),
            None => None,
        };
        let thinks = Thinks {
            thinking: Arc::new(thinking),
            open: pair.open.to_string(),
            close: pair.close.to_string(),
            begin,
        };
        // An unset `max_tokens` is chosen later, with enough room.
        if generate.source("max_tokens") != Some(Source::Default) {
            thinks.check_room(generate).map_err(|e| format!("`generate.{e}"))?;
        }
        Ok(Some(thinks))
    }

    /// Text that mentions all control tokens besides the special ones: the chat template's source,
    /// and the delimiters.
    pub(super) fn controls(thinks: Option<&Thinks>, source: &str) -> String {
        match thinks {
            Some(thinks) => format!("{source} {} {}", thinks.open, thinks.close),
            None => source.to_string(),
        }
    }

    /// Checks the settings of a batch line that differ from the job's own.
    pub(super) fn check_line(thinks: Option<&Thinks>, line: &Generate, job: &Generate) -> Result<(), String> {
        match thinks {
            Some(thinks) => thinks.check_room(line).map_err(|e| format!("`{e}")),
            None if line.thinking != job.thinking => {
                Err("`thinking_token_budget` needs a thinking model, and this model is not known to be one".into())
            }
            None => Ok(()),
        }
    }

    /// The settings of a row with these parameters.
    pub(super) fn of(&self, generate: &Generate) -> Option<Arc<Thinking>> {
        let max_tokens = generate.thinking.as_ref()?.max_tokens;
        if max_tokens == self.thinking.max_tokens {
            return Some(self.thinking.clone());
        }
        Some(Arc::new(Thinking {
            max_tokens,
            ..(*self.thinking).clone()
        }))
    }

    /// Default maximum of tokens for thought and answer in a context of this size; `None` if
    /// prompts leave no room for a thought.
    pub fn max_tokens(&self, context: u32) -> Option<u32> {
        if self.begin == Some(Begin::Answer) {
            return None;
        }
        Some(match self.thinking.max_tokens {
            Some(most) => most + self.end_tokens() + ANSWER_TOKENS,
            None => MAX_TOKENS.min(context / 2).max(1),
        })
    }

    /// Number of tokens that end a thought by force.
    fn end_tokens(&self) -> u32 {
        (self.thinking.end.len() + self.thinking.end_gap.len()) as u32
    }

    /// Checks that thoughts leave room for an answer. The error names the fields, the first without
    /// its opening backtick.
    fn check_room(&self, generate: &Generate) -> Result<(), String> {
        let Some(most) = generate.thinking.as_ref().and_then(|spec| spec.max_tokens) else {
            return Ok(());
        };
        if most + self.end_tokens() < generate.max_tokens {
            Ok(())
        } else {
            Err(format!(
                "thinking.max_tokens` is {}, which with the {} tokens that end the thought leaves no room for an answer in \
             `max_tokens` of {}",
                number(most.into()),
                self.end_tokens(),
                number(generate.max_tokens.into())
            ))
        }
    }

    /// In words: the delimiters, and whether the prompt or the model opens a thought.
    pub fn words(&self) -> String {
        let who = match self.begin {
            Some(Begin::Thought) => "the prompt opens the thought",
            Some(Begin::Answer) => "the prompt closes it before the model begins",
            Some(Begin::Either) => "the model opens the thought, if it does",
            None => "each prompt says whether it opens the thought",
        };
        let most = match self.thinking.max_tokens {
            Some(most) => format!(", of {} at most", counted(most.into(), "token")),
            None => String::new(),
        };
        format!("`{}` … `{}`: {who}{most}", self.open, self.close)
    }

    /// As JSON, for programs.
    pub fn json(&self) -> Value {
        json!({
            "open": self.open,
            "close": self.close,
            "max_tokens": self.thinking.max_tokens,
            "begins": self.begin.map(|begin| match begin {
                Begin::Thought => "opened by the prompt",
                Begin::Answer => "closed by the prompt",
                Begin::Either => "left to the model",
            }),
        })
    }
}

/// Handles delimiters that cannot be detected by ids. `spelled`: a pair that prompts mention and
/// the vocabulary splits like text.
fn without_ids(generate: &Generate, asked: bool, spelled: Option<Pair<'_>>) -> Result<Option<Thinks>, String> {
    match spelled {
        Some(pair) if asked || generate.shape != ShapeSpec::Free => Err(format!(
            "prompts hold `{}`, which this model's vocabulary has not as a token of its own, so that its thoughts cannot be told \
             from its answers by token ids; `generate.thinking: false` takes all that the model writes as its answer",
            pair.open
        )),
        None if asked => Err(
            "`generate.thinking` is set, and this model is not known to think: its chat template mentions no delimiters of \
             thoughts that its vocabulary has as tokens; give `generate.thinking.open` and `close`"
                .into(),
        ),
        _ => Ok(None),
    }
}

/// The ids of the opening and closing delimiters and of the header. The error begins inside the
/// field's backticks.
fn ids_of_pair(pair: &Pair<'_>, tokenizer: &Tokenizer) -> Result<[Vec<u32>; 3], String> {
    let ids = |field: &str, text: &str| {
        let ids = tokenizer.encode(text, false)?;
        let first = tokenizer
            .added_tokens()
            .iter()
            .find(|token| Some(&token.id) == ids.first());
        match first.filter(|token| text.starts_with(&token.content)) {
            Some(_) => Ok(ids),
            None => Err(format!(
                "{field}` is `{text}`, which this model's vocabulary spells by ordinary pieces: it cannot be told from text by its \
                 token ids"
            )),
        }
    };
    let header = match pair.header {
        "" => Vec::new(),
        header => ids("open", header)?,
    };
    Ok([ids("open", pair.open)?, ids("close", pair.close)?, header])
}

/// The text that the chat template puts between a thought and the closing delimiter, and between
/// that and the answer. `None` if it shows no thoughts, or if the text is more than white space.
fn around(chat: &ChatTemplate, pair: &Pair<'_>) -> Option<(String, String)> {
    let text = chat.with_thought(THOUGHT_PROBE, ANSWER_PROBE)?;
    let (_, after) = text.split_once(THOUGHT_PROBE)?;
    let (between, _) = after.split_once(ANSWER_PROBE)?;
    let (before, gap) = between.split_once(pair.close)?;
    let blank = before.trim().is_empty() && gap.trim().is_empty();
    blank.then(|| (before.to_string(), gap.to_string()))
}

/// The line breaks behind a closing delimiter in a template's source, for prompts that close a
/// thought.
fn breaks_behind(source: &str, close: &str) -> Option<String> {
    let breaks = |(at, _): (usize, &str)| {
        let mut rest = &source[at + close.len()..];
        let mut count = 0;
        while let Some(behind) = rest.strip_prefix("\\n").or(rest.strip_prefix('\n')) {
            (rest, count) = (behind, count + 1);
        }
        count
    };
    let most = source.match_indices(close).map(breaks).max()?;
    (most > 0).then(|| "\n".repeat(most))
}

/// The ids that end a thought by force: up to and including the closing delimiter, and behind it.
fn end(
    spec: &ThinkingSpec,
    pair: &Pair<'_>,
    (before, gap): (&str, &str),
    tokenizer: &Tokenizer,
) -> Result<(Vec<u32>, Vec<u32>), String> {
    let own = spec.end_text.as_deref().unwrap_or_default();
    if own.contains(pair.open) || own.matches(pair.close).count() > 1 {
        return Err(format!(
            "`generate.thinking.end_text` holds `{}`, or `{}` more than once: it ends one thought",
            pair.open, pair.close
        ));
    }
    let (text, gap) = match own.split_once(pair.close) {
        Some((text, behind)) if !behind.is_empty() => (text.to_string(), behind),
        Some((text, _)) => (text.to_string(), gap),
        None => (format!("{own}{before}"), gap),
    };
    let mut end = tokenizer.encode_plain(&text);
    end.extend(tokenizer.encode(pair.close, false)?);
    Ok((end, tokenizer.encode_plain(gap)))
}

/// Ids of control tokens, ascending: special tokens, and other added tokens that the template
/// mentions.
fn control(source: &str, tokenizer: &Tokenizer) -> Vec<u32> {
    let added = tokenizer.added_tokens().iter();
    let is_control =
        added.filter(|token| token.special || (token.content.trim().len() >= 3 && source.contains(&token.content)));
    let mut ids: Vec<u32> = is_control.map(|token| token.id).collect();
    ids.sort_unstable();
    ids
}
