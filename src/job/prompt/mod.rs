//! Rows to prompts: the job's templates, the checkpoint's chat template, and the tokenizer, in that order.

use std::collections::BTreeMap;
use std::sync::Arc;

use chrono::NaiveDateTime;
use serde_json::{Map, Value, json};

use super::chat::{ChatTemplate, Turn};
use super::file::Truncate;
use super::generate::Generate;
use super::guard::{Guard, Marks, Piece};
use super::openai::{self, Ask};
use super::spec::Job;
use super::template::column_context;
use super::thinking::Thinks;
use super::{JobError, one_line, sha256, suggest};
use crate::dataset::row::InputRow;
use crate::engine::params::GenerationParams;
use crate::report::summary::number;
use crate::tokenizer::{Encoded, Tokenizer};
use source::{CompiledMessage, Content, OfRow, Source, compile, named_columns, takes_apart};

/// Maximum nesting of a row's values, which is also the JSON reader's limit.
const ROW_DEPTH_MAX: usize = 128;

/// Inputs of rendering besides the job.
#[derive(Debug, Clone)]
pub struct RenderSetup {
    pub tokenizer: Arc<Tokenizer>,
    /// Number of token ids that the model knows, which may be fewer than the tokenizer's.
    pub model_vocabulary: usize,
    /// Longest sequence (prompt + completion) in tokens.
    pub context_tokens: u32,
    /// Default key of the random stream, if neither job nor row gives a seed; see [`Job::seed`].
    pub seed: u64,
    /// The time that chat templates see: the same for the whole job, so that a retried row gets the
    /// same prompt.
    pub now: NaiveDateTime,
    /// Minimum `max_tokens` of a row, if a retry raised it.
    pub max_tokens: Option<u32>,
}

/// A row, ready for the engine.
#[derive(Debug, Clone, PartialEq)]
pub struct RenderedRow {
    /// The prompt as text, for previews. For given or truncated token ids, the text that they
    /// decode to.
    pub text: String,
    /// At least one token, and at most the context less one.
    pub tokens: Vec<u32>,
    pub params: Arc<GenerationParams>,
}

/// Turns rows into prompts; created once per job, shared by threads.
pub struct Renderer {
    source: Source,
    chat: Result<ChatTemplate, String>,
    guard: Guard,
    setup: RenderSetup,
    /// Special tokens around a prompt that is not a conversation.
    around: (Vec<u32>, Vec<u32>),
    kwargs: Map<String, Value>,
    turn: Turn,
    truncate: Truncate,
    generate: Generate,
    thinks: Option<Thinks>,
    params: Arc<GenerationParams>,
    /// `params` with the `max_tokens` that a retry raised.
    raised: Option<Arc<GenerationParams>>,
    columns: Option<Vec<String>>,
    template_hash: String,
    named: Named,
    found: check::Found,
}

/// Columns that the job names, each with its field, and the names of files for error messages.
struct Named {
    columns: Vec<(String, String)>,
    /// Columns accessed as fields of `row`, which are columns unless a column is itself named
    /// `row`.
    of_row: OfRow,
    file: String,
    input: String,
}

impl Renderer {
    /// Compiles the job's templates for a model.
    #[expect(clippy::too_many_lines, reason = "checks need what others made")]
    pub fn new(job: &Job, setup: RenderSetup) -> Result<Renderer, JobError> {
        let invalid = |message: String| JobError::Invalid {
            place: job.file.clone(),
            message,
        };
        let template_error = |message: String| JobError::Template {
            place: job.file.clone(),
            message,
        };
        if job.generate.max_tokens >= setup.context_tokens {
            let whose = if job.generate.is_of_model("max_tokens") {
                " (the checkpoint's `max_new_tokens`)"
            } else {
                ""
            };
            return Err(invalid(format!(
                "`generate.max_tokens` is {}{whose}, which leaves no room for a prompt in the model's context of {} tokens: give less",
                number(job.generate.max_tokens.into()),
                number(setup.context_tokens.into())
            )));
        }
        check_stops(&job.generate, &setup.tokenizer).map_err(|e| invalid(format!("`generate.{e}")))?;
        let (source, mut named) = compile(job).map_err(template_error)?;
        let mut of_row = OfRow::default();
        let columns = named_columns(&source, &mut named, &mut of_row);
        named.extend(
            job.output
                .carry
                .iter()
                .map(|column| (column.clone(), "output.carry".to_string())),
        );
        named.extend(
            job.gold
                .iter()
                .map(|column| (column.clone(), "report.gold".to_string())),
        );

        let said = job.prompt.turn().map_err(|why| invalid(format!("`prompt` {why}")))?;
        let turn = said.unwrap_or(Turn::Generate);
        let config = setup.tokenizer.config();
        let kwargs = job.prompt.chat_template_kwargs.clone();
        let has_tools = kwargs.get("tools").is_some_and(|tools| !tools.is_null());
        let chat = ChatTemplate::choose(config, job.prompt.chat_template.as_ref(), has_tools, setup.now);
        let mut probe = None;
        if let (Source::Messages(messages), chat) = (&source, &chat) {
            let chat = chat.as_ref().map_err(|e| template_error(e.clone()))?;
            // Roles that the template refuses, and endless templates, are found here, before any
            // row is read.
            let messages = messages.iter().map(|message| message.probe("x")).collect();
            probe = Some(chat.render(messages, &kwargs, turn).map_err(template_error)?);
        }
        if job.prompt.chat_template.is_some() {
            chat.as_ref().map_err(|e| template_error(e.clone()))?;
        }
        let chat_source = chat.as_ref().map(ChatTemplate::source).unwrap_or_default();
        let thinks = Thinks::find(&job.generate, &setup.tokenizer, chat.as_ref().ok(), probe.as_deref());
        let thinks = thinks.map_err(invalid)?;
        let controls = Thinks::controls(thinks.as_ref(), chat_source);
        let guard = Guard::new(&setup.tokenizer, &controls, takes_apart(&job.prompt.kind));
        let around = setup.tokenizer.surrounding().map_err(invalid)?;
        let mut hashed = vec![json!(job.prompt.kind), json!(chat_source), json!(kwargs)];
        // Only set fields are hashed, so that jobs of older gristmills keep their hash.
        let switches = [job.prompt.add_generation_prompt, job.prompt.continue_final_message];
        if switches != [None, None] {
            hashed.push(json!(switches));
        }
        let input = job.input.uris.join("`, `");
        let params = params(&job.generate, job.deterministic, &setup, thinks.as_ref());
        // A retry's limit may exceed the context, which ends completions anyway.
        let raised = setup.max_tokens.map(|least| least.min(setup.context_tokens - 1));
        // A batch line may have a smaller limit than the job's default.
        let raised = raised.map(|max_tokens| GenerationParams {
            max_tokens,
            ..params.clone()
        });
        let mut renderer = Renderer {
            template_hash: sha256(Value::from(hashed).to_string()),
            params: Arc::new(params),
            raised: raised.map(Arc::new),
            thinks,
            generate: job.generate.clone(),
            truncate: job.prompt.truncate,
            named: Named {
                columns: named,
                of_row,
                file: job.file.clone(),
                input,
            },
            source,
            chat,
            guard,
            setup,
            around,
            kwargs,
            turn,
            columns,
            found: check::Found::default(),
        };
        renderer.found = renderer.look(job);
        Ok(renderer)
    }

    /// The columns that prompts use, sorted; `None` if they may use any column.
    pub fn columns(&self) -> Option<Vec<String>> {
        self.columns.clone()
    }

    /// Checks that all columns that the job names (in prompts, `carry` and `gold`) are among the
    /// input's columns.
    pub fn check_columns(&self, columns: &[String]) -> Result<(), JobError> {
        let has = |name: &str| columns.iter().any(|column| column == name);
        let lacking = ["custom_id", "method", "url", "body"]
            .into_iter()
            .find(|name| !has(name));
        if let (Source::Openai, Some(lacking)) = (&self.source, lacking) {
            return Err(JobError::Invalid {
                place: self.named.file.clone(),
                message: format!(
                    "`prompt` says none of `messages`, `text` and `token_ids`, and `{}` is no OpenAI batch file (it has \
                     no column `{lacking}`)",
                    self.named.input
                ),
            });
        }
        let of_row = self.named.of_row.needed.iter().filter(|_| !has("row"));
        match self.named.columns.iter().chain(of_row).find(|(column, _)| !has(column)) {
            None => Ok(()),
            Some((column, field)) => Err(JobError::Column {
                place: self.named.file.clone(),
                column: column.clone(),
                field: field.clone(),
                input: self.named.input.clone(),
                hint: suggest(column, columns.iter().map(String::as_str)),
            }),
        }
    }

    /// SHA-256, hexadecimal, of all templates that prompts use, for provenance.
    pub fn template_hash(&self) -> &str {
        &self.template_hash
    }

    /// The special token with which the chat template ends the assistant's turn.
    pub fn end_of_turn(&self) -> Option<u32> {
        match self.source {
            Source::Messages(_) | Source::Openai => self.chat.as_ref().ok()?.end_of_turn(&self.setup.tokenizer),
            Source::Text(_) | Source::TokenIds(_) => None,
        }
    }

    /// Maximum sequence length that its prompts assume, in tokens.
    pub fn context_tokens(&self) -> u32 {
        self.setup.context_tokens
    }

    /// End-of-sequence ids of the checkpoint at planning, if the record has them.
    pub fn model_ends(&self) -> Option<&[u32]> {
        self.generate.model_ends.as_deref()
    }

    /// How the model thinks; `None`: its whole output is the answer.
    pub fn thinks(&self) -> Option<&Thinks> {
        self.thinks.as_ref()
    }

    /// Parameters of rows without settings of their own.
    pub fn params(&self) -> &Arc<GenerationParams> {
        &self.params
    }

    /// Renders and encodes a row. The error is one line for the row's `error` column.
    pub fn render(&self, row: &InputRow) -> Result<RenderedRow, String> {
        let mut rendered = self.render_as_asked(row)?;
        // The prompt is unchanged: truncation leaves room for the job's own `max_tokens`.
        if let Some(raised) = &self.raised
            && rendered.params.max_tokens < raised.max_tokens
        {
            rendered.params = if Arc::ptr_eq(&rendered.params, &self.params) {
                raised.clone()
            } else {
                Arc::new(GenerationParams {
                    max_tokens: raised.max_tokens,
                    ..GenerationParams::clone(&rendered.params)
                })
            };
        }
        Ok(rendered)
    }

    fn render_as_asked(&self, row: &InputRow) -> Result<RenderedRow, String> {
        let fields = row.fields.as_ref().map_err(Clone::clone)?;
        if let Some((column, _)) = fields.iter().find(|(_, value)| is_deeper(value, ROW_DEPTH_MAX)) {
            let why = format!("column `{column}` nests values more than {ROW_DEPTH_MAX} levels deep");
            return Err(one_line(&why));
        }
        match &self.source {
            Source::Messages(_) | Source::Text(_) => {
                let (text, tokens) = self.encode(fields, &self.params, |fields| self.own_prompt(fields))?;
                self.finish(Some(text), tokens, &self.params)
            }
            Source::TokenIds(column) => {
                let value = fields
                    .get(column)
                    .ok_or_else(|| format!("the row has no column `{column}`"))?;
                let Value::Array(items) = value else {
                    return Err(format!(
                        "column `{column}` holds {}, not a list of token ids",
                        kind_of(value)
                    ));
                };
                self.ready_tokens(items, &format!("column `{column}`"), &self.params)
            }
            Source::Openai => self.openai(fields),
        }
    }

    fn openai(&self, fields: &Map<String, Value>) -> Result<RenderedRow, String> {
        let (body, is_chat) = openai::body(fields)?;
        let generate = openai::generate(body, &self.generate)?;
        let params = if generate == self.generate {
            self.params.clone()
        } else {
            check_stops(&generate, &self.setup.tokenizer).map_err(|e| format!("`{e}"))?;
            let thinks = self.thinks.as_ref();
            Thinks::check_line(thinks, &generate, &self.generate)?;
            Arc::new(params(&generate, self.params.deterministic, &self.setup, thinks))
        };
        if params.max_tokens >= self.setup.context_tokens {
            return Err(format!(
                "`max_tokens` is {}, which leaves no room for a prompt in the model's context of {} tokens",
                number(params.max_tokens.into()),
                number(self.setup.context_tokens.into())
            ));
        }
        if let Ask::Tokens(items) = openai::ask(body, is_chat)? {
            return self.ready_tokens(&items, "`prompt`", &params);
        }
        let (text, tokens) = self.encode(body, &params, |body| match openai::ask(body, is_chat)? {
            Ask::Chat { messages, kwargs, turn } => {
                let chat = self.chat.as_ref().map_err(Clone::clone)?;
                if let Some(why) = chat.refuses(&kwargs) {
                    return Err(format!("`body` {why}"));
                }
                let mut all = self.kwargs.clone();
                all.extend(kwargs);
                Ok((chat.render(messages, &all, turn.unwrap_or(self.turn))?, false))
            }
            Ask::Text(text) => Ok((text, true)),
            Ask::Tokens(_) => Err("`prompt` changed its form".into()),
        })?;
        self.finish(Some(text), tokens, &params)
    }

    /// The prompt of a row by the job's own templates, and whether special tokens are added around
    /// it.
    fn own_prompt(&self, fields: &Map<String, Value>) -> Result<(String, bool), String> {
        let context = column_context(fields);
        match &self.source {
            Source::Text(template) => Ok((
                template
                    .render(context)
                    .map_err(|e| format!("template `prompt.text`: {e}"))?,
                true,
            )),
            Source::Messages(messages) => {
                let mut rendered = Vec::with_capacity(messages.len());
                for (i, message) in messages.iter().enumerate() {
                    let mut parts = Vec::with_capacity(message.parts.len());
                    for part in &message.parts {
                        parts.push(match part {
                            Content::Fixed(text) => text.clone(),
                            Content::Template(template) => template
                                .render(context.clone())
                                .map_err(|e| format!("template `prompt.messages[{i}].content`: {e}"))?,
                        });
                    }
                    let content = if message.is_list {
                        parts
                            .into_iter()
                            .map(|text| json!({"type": "text", "text": text}))
                            .collect()
                    } else {
                        Value::from(parts.concat())
                    };
                    rendered.push(json!({"role": message.role, "content": content}));
                }
                Ok((
                    self.chat
                        .as_ref()
                        .map_err(Clone::clone)?
                        .render(rendered, &self.kwargs, self.turn)?,
                    false,
                ))
            }
            // Rows of these kinds have their own prompts, and are handled elsewhere.
            Source::TokenIds(_) | Source::Openai => Err("the job has no template".into()),
        }
    }

    /// Renders with `prompt` and encodes, keeping control tokens out of the data (see `guard`).
    fn encode(
        &self,
        fields: &Map<String, Value>,
        params: &GenerationParams,
        prompt: impl Fn(&Map<String, Value>) -> Result<(String, bool), String>,
    ) -> Result<(String, Encoded), String> {
        let tokenizer = &self.setup.tokenizer;
        let context = self.setup.context_tokens as usize;
        // Tokens beyond this limit have no effect.
        let limit = match self.truncate {
            Truncate::None => context - 1,
            Truncate::Right => context - params.max_tokens as usize,
            Truncate::Left => usize::MAX,
        };
        let used = |name: &str| match &self.columns {
            Some(columns) => columns.iter().any(|column| column == name),
            None => true,
        };
        let suspect = fields
            .iter()
            .any(|(name, value)| used(name) && self.guard.suspects(value, tokenizer));
        // Templates that may use the whole row can also put column names into the prompt.
        let names = self.columns.is_none() && fields.keys().any(|name| self.guard.suspects_text(name));
        if !suspect && !names {
            let (text, surround) = prompt(fields)?;
            let tokens = tokenizer.encode_within(&text, surround, limit)?;
            return Ok((text, tokens));
        }
        let marks = Marks::free(fields).ok_or("the row holds control tokens and every noncharacter of Unicode")?;
        let marked = if names {
            self.guard.mark_map(fields, marks)
        } else {
            fields
                .iter()
                .map(|(name, value)| (name.clone(), self.guard.mark(value, marks)))
                .collect()
        };
        let (text, surround) = prompt(&marked)?;
        let mut tokens = Vec::new();
        let mut is_cut = false;
        if surround {
            tokens.extend(&self.around.0);
        }
        for piece in self.guard.split(&text, marks) {
            match piece {
                Piece::Token(id) => tokens.push(id),
                Piece::Text(text, first) => {
                    let piece = tokenizer.encode_piece_within(&text, first, limit.saturating_sub(tokens.len()))?;
                    tokens.extend(piece.ids);
                    is_cut = piece.is_cut;
                }
            }
            if is_cut {
                break;
            }
        }
        if surround && !is_cut {
            tokens.extend(&self.around.1);
        }
        Ok((marks.strip(&text), Encoded { ids: tokens, is_cut }))
    }

    fn ready_tokens(&self, items: &[Value], what: &str, params: &Arc<GenerationParams>) -> Result<RenderedRow, String> {
        let known = self.setup.tokenizer.vocab_size() as u64;
        let mut tokens = Vec::with_capacity(items.len());
        for (i, item) in items.iter().enumerate() {
            match item.as_u64() {
                Some(id) if id < known => tokens.push(id as u32),
                _ => {
                    let why = format!(
                        "{what} holds {item} at index {i}, no id of the vocabulary (0 to {})",
                        known - 1
                    );
                    return Err(one_line(&why));
                }
            }
        }
        let tokens = Encoded {
            ids: tokens,
            is_cut: false,
        };
        self.finish(None, tokens, params)
    }

    /// The text that token ids decode to, including the texts of special tokens.
    fn shown(&self, tokens: &[u32]) -> String {
        let tokenizer = &self.setup.tokenizer;
        let specials = tokenizer.added_tokens().iter().filter(|token| token.special);
        let specials: BTreeMap<u32, &str> = specials.map(|token| (token.id, token.content.as_str())).collect();
        let pieces = tokens.chunk_by(|a, b| !specials.contains_key(a) && !specials.contains_key(b));
        pieces
            .map(|piece| match specials.get(&piece[0]) {
                Some(token) => token.to_string(),
                None => tokenizer.decode(piece),
            })
            .collect()
    }

    /// Checks a prompt against the model's context. Without a text, its tokens are decoded.
    fn finish(
        &self,
        mut text: Option<String>,
        Encoded {
            ids: mut tokens,
            is_cut,
        }: Encoded,
        params: &Arc<GenerationParams>,
    ) -> Result<RenderedRow, String> {
        if tokens.is_empty() {
            return Err("the prompt is empty: it has no tokens".into());
        }
        let vocabulary = self.setup.model_vocabulary;
        if let Some(id) = tokens.iter().find(|id| **id as usize >= vocabulary) {
            return Err(format!(
                "the prompt holds token {id}, and the model's vocabulary has {}",
                number(vocabulary as u64)
            ));
        }
        let context = self.setup.context_tokens as usize;
        // `max_tokens` was checked to be less than the context.
        let room = context - params.max_tokens as usize;
        match self.truncate {
            Truncate::None if tokens.len() >= context => {
                let count = if is_cut {
                    format!("at least {}", number(context as u64))
                } else {
                    number(tokens.len() as u64)
                };
                return Err(format!(
                    "the prompt has {count} tokens, and the model's context of {} must hold it and at least one more; shorten \
                     it or set `prompt.truncate`",
                    number(context as u64)
                ));
            }
            Truncate::Left if tokens.len() > room => {
                let bos = self.setup.tokenizer.config().bos_token.as_deref();
                let bos = bos.and_then(|bos| self.setup.tokenizer.id_of(bos));
                // The begin-of-sequence token is kept for models that were trained with one.
                let keep = usize::from(Some(tokens[0]) == bos && room > 1);
                let drop = tokens.len() - room;
                tokens.drain(keep..keep + drop);
                text = None;
            }
            Truncate::Right if tokens.len() > room => {
                tokens.truncate(room);
                text = None;
            }
            Truncate::None | Truncate::Left | Truncate::Right => {}
        }
        Ok(RenderedRow {
            text: text.unwrap_or_else(|| self.shown(&tokens)),
            tokens,
            params: params.clone(),
        })
    }
}

/// Checks that all stop token ids are in the vocabulary. The error begins inside the field's
/// backticks.
fn check_stops(generate: &Generate, tokenizer: &Tokenizer) -> Result<(), String> {
    let known = tokenizer.vocab_size();
    match generate.stop_token_ids.iter().find(|id| **id as usize >= known) {
        None => Ok(()),
        Some(id) => Err(format!(
            "stop_token_ids` holds {id}, no id of the vocabulary (0 to {})",
            known - 1
        )),
    }
}

/// The engine's parameters. A stop text that is a special token's text becomes a stop token, since
/// special tokens never appear in a completion's text.
fn params(generate: &Generate, deterministic: bool, setup: &RenderSetup, thinks: Option<&Thinks>) -> GenerationParams {
    let mut params = generate.params(setup.seed, deterministic);
    params.thinking = thinks.and_then(|thinks| thinks.of(generate));
    for text in &generate.stop {
        let specials = setup.tokenizer.added_tokens().iter().filter(|token| token.special);
        for token in specials.filter(|token| token.content == *text) {
            if !params.stop_token_ids.contains(&token.id) {
                params.stop_token_ids.push(token.id);
            }
        }
    }
    params
}

/// Whether lists and structs nest deeper than `levels`.
fn is_deeper(value: &Value, levels: usize) -> bool {
    let inside = |item: &Value| levels == 0 || is_deeper(item, levels - 1);
    match value {
        Value::Array(items) => items.iter().any(inside),
        Value::Object(fields) => fields.values().any(inside),
        _ => false,
    }
}

/// The kind of a JSON value, in words.
fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "a struct",
    }
}

mod check;
mod source;

#[cfg(test)]
mod tests;
