//! Determines how a model thinks, from the job's settings, the vocabulary and the chat template.
//!
//! Thoughts are separated from answers by token ids. So a delimiter must begin with an added token
//! of the vocabulary, which encoding ordinary text never yields. A known pair of delimiters is used
//! if the vocabulary has such tokens for it and the chat template mentions it. Another pair is used
//! if the job names it. Delimiters that a vocabulary splits into ordinary tokens (Granite's
//! `<think>`) cannot be distinguished from text.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::chat::ChatTemplate;
use super::check::{FieldError, bad, check_length, integer_in};
use super::generate::{ConstraintSpec, Generate, MAX_TOKENS_MAX};
use super::sampling::Source;
use crate::engine::thinking::{CompletionStart, Thinking};
use crate::report::summary::{counted, number};
use crate::tokenizer::Tokenizer;

/// Default maximum of tokens for thought and answer together, if neither the job nor the checkpoint
/// sets a maximum.
const DEFAULT_MAX_TOKENS: u32 = 8192;
/// Default maximum of tokens for the answer, if the job limits only the thought.
const DEFAULT_ANSWER_TOKENS: u32 = 256;
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
    /// Opening delimiter of a thought, if gristmill does not know the model's: one or more tokens of the vocabulary.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub open: Option<String>,
    /// Closing delimiter of a thought.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub close: Option<String>,
    /// Maximum number of tokens of a thought; `end_text` ends a longer thought.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1_048_576))]
    pub max_tokens: Option<i64>,
    /// Text that ends a thought of `max_tokens` tokens; `close` is appended if the text does not contain it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end_text: Option<String>,
}

/// A job's settings for thoughts.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThinkingSpec {
    /// Whether the job has settings for thoughts. If so, a model that does not think is refused.
    pub asked: bool,
    /// The job's own delimiters, opening and closing.
    pub delimiters: Option<(String, String)>,
    /// Maximum tokens of a thought.
    pub max_tokens: Option<u32>,
    /// The text that ends a thought of `max_tokens` tokens.
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
    pub(super) fn to_file(spec: Option<&ThinkingSpec>) -> Option<ThinkingFile> {
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

/// The texts of a pair of delimiters.
#[derive(Debug, Clone, Copy)]
struct Delimiters<'a> {
    open: &'a str,
    close: &'a str,
    /// The text that begins an answer without a thought.
    header: &'a str,
    /// The usual text between a thought and the closing delimiter.
    before_close: &'a str,
    /// The usual text between the closing delimiter and the answer.
    after_close: &'a str,
}

impl<'a> Delimiters<'a> {
    /// Delimiters without other texts.
    const fn new(open: &'a str, close: &'a str) -> Delimiters<'a> {
        Delimiters {
            open,
            close,
            header: "",
            before_close: "",
            after_close: "",
        }
    }

    /// Delimiters on lines of their own.
    const fn on_lines(open: &'a str, close: &'a str) -> Delimiters<'a> {
        Delimiters {
            before_close: "\n",
            after_close: "\n\n",
            ..Delimiters::new(open, close)
        }
    }
}

/// Delimiters of known models.
const KNOWN_DELIMITERS: [Delimiters<'static>; 5] = [
    Delimiters::on_lines("<think>", "</think>"),
    Delimiters::new("[THINK]", "[/THINK]"),
    Delimiters::on_lines("<thought>", "</thought>"),
    Delimiters::new("<seed:think>", "</seed:think>"),
    Delimiters {
        header: "<|channel|>final<|message|>",
        ..Delimiters::new(
            "<|channel|>analysis<|message|>",
            "<|end|><|start|>assistant<|channel|>final<|message|>",
        )
    },
];

/// How the model of a job thinks.
#[derive(Debug, Clone)]
pub struct ModelThinking {
    /// The engine's settings for rows without settings of their own.
    thinking: Arc<Thinking>,
    /// The texts of the delimiters.
    pub open: String,
    pub close: String,
    /// What completions of the job's prompts begin with; `None`: it differs between prompts.
    pub begin: Option<CompletionStart>,
}

impl ModelThinking {
    /// Determines how the model of a job thinks; `None` if it does not, or if its whole output is
    /// the answer. `probe` is a sample prompt, if one template renders all prompts of the job.
    ///
    /// # Errors
    /// The model cannot think as the job requires. The error is one line without a location.
    pub fn detect(
        generate: &Generate,
        tokenizer: &Tokenizer,
        chat: Option<&ChatTemplate>,
        probe: Option<&str>,
    ) -> Result<Option<ModelThinking>, String> {
        let Some(spec) = &generate.thinking else {
            return Ok(None);
        };
        let source = chat.map(ChatTemplate::source).unwrap_or_default();
        let known = known_delimiters(source);
        let own = spec
            .delimiters
            .as_ref()
            .map(|(open, close)| Delimiters::new(open, close));
        // The job's delimiters may be a known pair, with the known texts around them.
        let own = own.map(|own| {
            let is_same = |pair: &&Delimiters<'_>| (pair.open, pair.close) == (own.open, own.close);
            KNOWN_DELIMITERS.iter().find(is_same).copied().unwrap_or(own)
        });
        let found = match own {
            Some(pair) => Some((
                pair,
                delimiter_ids(&pair, tokenizer).map_err(|e| format!("`generate.thinking.{e}"))?,
            )),
            None => known
                .clone()
                .find_map(|pair| Some((pair, delimiter_ids(&pair, tokenizer).ok()?))),
        };
        let Some((pair, [open, close, header])) = found else {
            let split_pair = known
                .clone()
                .find(|pair| probe.is_some_and(|text| text.contains(pair.open)));
            return none_detected(generate, spec.asked, split_pair);
        };
        let rendered = chat.and_then(|chat| rendered_gaps(chat, &pair));
        let (before_close, after_close) = rendered.unwrap_or_else(|| {
            (
                pair.before_close.to_string(),
                line_breaks_after(source, pair.close).unwrap_or(pair.after_close.to_string()),
            )
        });
        let (forced_close, forced_gap) = end_ids(spec, &pair, &before_close, &after_close, tokenizer)?;
        let thinking = Thinking {
            gap: tokenizer.encode_plain(&after_close),
            control_ids: control_ids(source, tokenizer),
            max_tokens: spec.max_tokens,
            open,
            close,
            header,
            forced_close,
            forced_gap,
        };
        let begin = match probe {
            Some(text) => Some(thinking.completion_start(&tokenizer.encode(text, false)?)),
            None => None,
        };
        let thinking = ModelThinking {
            thinking: Arc::new(thinking),
            open: pair.open.to_string(),
            close: pair.close.to_string(),
            begin,
        };
        // An unset `max_tokens` is chosen later, so that an answer has enough tokens left.
        if generate.source("max_tokens") != Some(Source::Default) {
            thinking
                .check_answer_room(generate)
                .map_err(|e| format!("`generate.{e}"))?;
        }
        Ok(Some(thinking))
    }

    /// Text that mentions all control tokens besides the special ones: the chat template's source
    /// and the delimiters. [`Guard::new`](super::guard::Guard::new) searches it.
    pub(super) fn control_source(thinking: Option<&ModelThinking>, source: &str) -> String {
        match thinking {
            Some(thinking) => format!("{source} {} {}", thinking.open, thinking.close),
            None => source.to_string(),
        }
    }

    /// Checks a batch line's settings for thoughts, which may differ from the job's.
    pub(super) fn check_line(thinking: Option<&ModelThinking>, line: &Generate, job: &Generate) -> Result<(), String> {
        match thinking {
            Some(thinking) => thinking.check_answer_room(line).map_err(|e| format!("`{e}")),
            None if line.thinking != job.thinking => {
                Err("`thinking_token_budget` needs a thinking model, and this model is not known to be one".into())
            }
            None => Ok(()),
        }
    }

    /// The engine's settings for a row with these parameters; `None`: its whole output is the
    /// answer.
    pub(super) fn for_row(&self, generate: &Generate) -> Option<Arc<Thinking>> {
        let max_tokens = generate.thinking.as_ref()?.max_tokens;
        if max_tokens == self.thinking.max_tokens {
            return Some(self.thinking.clone());
        }
        Some(Arc::new(Thinking {
            max_tokens,
            ..(*self.thinking).clone()
        }))
    }

    /// Default maximum of tokens for thought and answer together, with a context of `context`
    /// tokens; `None` if the prompts have ended the thought already.
    pub fn default_max_tokens(&self, context: u32) -> Option<u32> {
        if self.begin == Some(CompletionStart::Answer) {
            return None;
        }
        Some(match self.thinking.max_tokens {
            Some(max_tokens) => max_tokens + self.end_tokens() + DEFAULT_ANSWER_TOKENS,
            None => DEFAULT_MAX_TOKENS.min(context / 2).max(1),
        })
    }

    /// Number of tokens that are appended to end a thought of maximum length.
    fn end_tokens(&self) -> u32 {
        (self.thinking.forced_close.len() + self.thinking.forced_gap.len()) as u32
    }

    /// Checks that a thought of maximum length leaves tokens for an answer. The error begins with
    /// a field's name and a closing backtick: the caller writes the opening backtick and the names
    /// of outer fields.
    fn check_answer_room(&self, generate: &Generate) -> Result<(), String> {
        let Some(max_tokens) = generate.thinking.as_ref().and_then(|spec| spec.max_tokens) else {
            return Ok(());
        };
        if max_tokens + self.end_tokens() < generate.max_tokens {
            Ok(())
        } else {
            Err(format!(
                "thinking.max_tokens` is {}, which with the {} tokens that end the thought leaves no room for an answer in \
             `max_tokens` of {}",
                number(max_tokens.into()),
                self.end_tokens(),
                number(generate.max_tokens.into())
            ))
        }
    }

    /// Describes the delimiters, and whether the prompt or the model opens a thought.
    pub fn describe(&self) -> String {
        let opener = match self.begin {
            Some(CompletionStart::Thought) => "the prompt opens the thought",
            Some(CompletionStart::Answer) => "the prompt closes it before the model begins",
            Some(CompletionStart::Either) => "the model opens the thought, if it does",
            None => "each prompt says whether it opens the thought",
        };
        let max_tokens = match self.thinking.max_tokens {
            Some(max_tokens) => format!(", of {} at most", counted(max_tokens.into(), "token")),
            None => String::new(),
        };
        format!("`{}` … `{}`: {opener}{max_tokens}", self.open, self.close)
    }

    /// The same as JSON, for programs.
    pub fn to_json(&self) -> Value {
        json!({
            "open": self.open,
            "close": self.close,
            "max_tokens": self.thinking.max_tokens,
            "begins": self.begin.map(|begin| match begin {
                CompletionStart::Thought => "opened by the prompt",
                CompletionStart::Answer => "closed by the prompt",
                CompletionStart::Either => "left to the model",
            }),
        })
    }
}

/// The known pairs that a chat template mentions.
fn known_delimiters(source: &str) -> impl Iterator<Item = Delimiters<'static>> + Clone {
    let mentions = |pair: &&Delimiters<'_>| source.contains(pair.open) || source.contains(pair.close);
    KNOWN_DELIMITERS.iter().filter(mentions).copied()
}

/// The first known pair of delimiters that a chat template mentions: what can be said of a model
/// without its vocabulary.
pub fn mentioned_delimiters(source: &str) -> Option<(&'static str, &'static str)> {
    known_delimiters(source).map(|pair| (pair.open, pair.close)).next()
}

/// The result if no delimiters can be detected by ids. `split_pair` is a pair that prompts contain
/// and that the vocabulary splits like text.
fn none_detected(
    generate: &Generate,
    is_required: bool,
    split_pair: Option<Delimiters<'_>>,
) -> Result<Option<ModelThinking>, String> {
    match split_pair {
        Some(pair) if is_required || generate.shape != ConstraintSpec::Free => Err(format!(
            "prompts contain `{}`, which is not a token of this model's vocabulary, so its thoughts cannot be told \
             from its answers by token ids; `generate.thinking: false` takes all that the model writes as its answer",
            pair.open
        )),
        None if is_required => Err(
            "`generate.thinking` is set, and this model is not known to think: its chat template mentions no delimiters of \
             thoughts that its vocabulary has as tokens; give `generate.thinking.open` and `close`"
                .into(),
        ),
        _ => Ok(None),
    }
}

/// The ids of the opening delimiter, the closing delimiter and the header. The error begins with
/// `open` or `close` and a closing backtick: the caller writes the opening backtick and the names
/// of outer fields.
fn delimiter_ids(pair: &Delimiters<'_>, tokenizer: &Tokenizer) -> Result<[Vec<u32>; 3], String> {
    let ids = |field: &str, text: &str| {
        let ids = tokenizer.encode(text, false).map_err(|e| format!("{field}`: {e}"))?;
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

/// The white space that the chat template writes before the closing delimiter, and between it and
/// the answer. `None` if the template writes no thoughts, or more than white space.
fn rendered_gaps(chat: &ChatTemplate, pair: &Delimiters<'_>) -> Option<(String, String)> {
    let text = chat.render_thought(THOUGHT_PROBE, ANSWER_PROBE)?;
    let (_, after) = text.split_once(THOUGHT_PROBE)?;
    let (between, _) = after.split_once(ANSWER_PROBE)?;
    let (before_close, after_close) = between.split_once(pair.close)?;
    let is_blank = before_close.trim().is_empty() && after_close.trim().is_empty();
    is_blank.then(|| (before_close.to_string(), after_close.to_string()))
}

/// The most line breaks that follow a closing delimiter in a template's source; `None` if none do.
/// A template without thoughts in its output may still close an empty thought in the prompt.
fn line_breaks_after(source: &str, close: &str) -> Option<String> {
    let breaks = |(at, _): (usize, &str)| {
        let mut rest = &source[at + close.len()..];
        let mut count = 0;
        while let Some(after) = rest.strip_prefix("\\n").or(rest.strip_prefix('\n')) {
            (rest, count) = (after, count + 1);
        }
        count
    };
    let count = source.match_indices(close).map(breaks).max()?;
    (count > 0).then(|| "\n".repeat(count))
}

/// The ids that end a thought of maximum length: those up to and including the closing delimiter,
/// and those after it. `before_close` and `after_close` are the texts around the delimiter.
fn end_ids(
    spec: &ThinkingSpec,
    pair: &Delimiters<'_>,
    before_close: &str,
    after_close: &str,
    tokenizer: &Tokenizer,
) -> Result<(Vec<u32>, Vec<u32>), String> {
    let own = spec.end_text.as_deref().unwrap_or_default();
    if own.contains(pair.open) || own.matches(pair.close).count() > 1 {
        return Err(format!(
            "`generate.thinking.end_text` holds `{}`, or `{}` more than once: it ends one thought",
            pair.open, pair.close
        ));
    }
    let (text, after_close) = match own.split_once(pair.close) {
        Some((text, after)) if !after.is_empty() => (text.to_string(), after),
        Some((text, _)) => (text.to_string(), after_close),
        None => (format!("{own}{before_close}"), after_close),
    };
    let mut end = tokenizer.encode_plain(&text);
    end.extend(tokenizer.encode(pair.close, false)?);
    Ok((end, tokenizer.encode_plain(after_close)))
}

/// Ids of control tokens, ascending: special tokens, and other added tokens that the template's
/// source mentions.
fn control_ids(source: &str, tokenizer: &Tokenizer) -> Vec<u32> {
    let added = tokenizer.added_tokens().iter();
    let control_tokens =
        added.filter(|token| token.special || (token.content.trim().len() >= 3 && source.contains(&token.content)));
    let mut ids: Vec<u32> = control_tokens.map(|token| token.id).collect();
    ids.sort_unstable();
    ids
}
