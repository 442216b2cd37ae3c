//! Converts rows to prompts with the job's templates, the checkpoint's chat template, and the
//! tokenizer, in that order.

use std::collections::BTreeMap;
use std::sync::Arc;

use chrono::NaiveDateTime;
use serde_json::{Map, Value, json};

use super::chat::{ChatTemplate, Turn};
use super::file::Truncate;
use super::generate::Generate;
use super::guard::{Guard, Marks, Piece};
use super::openai::{self, Endpoint, LinePrompt, RequestBody};
use super::responses;
use super::row_error::TRUNCATE_ADVICE;
use super::spec::Job;
use super::template::column_context;
use super::thinking::ModelThinking;
use super::{JobError, one_line, sha256_hex};
use crate::dataset::row::InputRow;
use crate::engine::params::GenerationParams;
use crate::report::summary::number;
use crate::tokenizer::{Encoded, Tokenizer};
use source::{PromptText, RowFields, Source, compile, named_columns, render_messages, splits_texts};

pub use preview::PromptPreview;

/// Maximum nesting of a row's values; the JSON reader has the same limit.
const ROW_DEPTH_MAX: usize = 128;

/// What [`Renderer::new`] needs besides the job.
#[derive(Debug, Clone)]
pub struct RenderSetup {
    pub tokenizer: Arc<Tokenizer>,
    /// Number of token ids in the model's vocabulary; the tokenizer's may be larger.
    pub model_vocabulary: usize,
    /// Maximum sequence length (prompt and completion) in tokens.
    pub context_tokens: u32,
    /// Key of the random stream of rows without a seed of their own; see [`Job::seed`].
    pub seed: u64,
    /// The time that chat templates see. It is the same for the whole job, so that a retried row
    /// gets the same prompt.
    pub now: NaiveDateTime,
    /// Minimum of the rows' `max_tokens`, if a retry raised it.
    pub retry_max_tokens: Option<u32>,
}

/// A row's prompt and parameters, ready for the engine.
#[derive(Debug, Clone, PartialEq)]
pub struct RenderedRow {
    /// The prompt as text, for previews. If the row gives token ids, or if the prompt was truncated,
    /// the text that the ids decode to.
    pub text: String,
    /// At least one token, and fewer than the context.
    pub tokens: Vec<u32>,
    pub params: Arc<GenerationParams>,
}

/// Converts rows to prompts. Created once per job and shared by threads.
pub struct Renderer {
    source: Source,
    chat: Result<ChatTemplate, String>,
    guard: Guard,
    setup: RenderSetup,
    /// Special tokens before and after a prompt that is not a conversation.
    special_prefix: Vec<u32>,
    special_suffix: Vec<u32>,
    kwargs: Map<String, Value>,
    turn: Turn,
    truncate: Truncate,
    generate: Generate,
    thinking: Option<ModelThinking>,
    params: Arc<GenerationParams>,
    /// `params` with the `max_tokens` of a retry.
    retry_params: Option<Arc<GenerationParams>>,
    columns: Option<Vec<String>>,
    template_hash: String,
    named: NamedColumns,
    findings: check::Findings,
}

/// Columns that the job names, each with the job's field that names it, and file names for error
/// messages.
struct NamedColumns {
    columns: Vec<(String, String)>,
    /// Fields of `row` in templates; they are columns unless the input has a column named `row`.
    row_fields: RowFields,
    job_file: String,
    input: String,
}

impl Renderer {
    /// Compiles the job's templates for a model.
    #[expect(clippy::too_many_lines, reason = "checks need what others made")]
    pub fn new(job: &Job, setup: RenderSetup) -> Result<Renderer, JobError> {
        let invalid = |message: String| JobError::Invalid {
            location: job.file.clone(),
            message,
        };
        let template_error = |message: String| JobError::Template {
            location: job.file.clone(),
            message,
        };
        if job.generate.max_tokens >= setup.context_tokens {
            let source_note = if job.generate.is_from_checkpoint("max_tokens") {
                " (the checkpoint's `max_new_tokens`)"
            } else {
                ""
            };
            return Err(invalid(format!(
                "`generate.max_tokens` is {}{source_note}, which leaves no room for a prompt in the model's context of {} tokens: give less",
                number(job.generate.max_tokens.into()),
                number(setup.context_tokens.into())
            )));
        }
        job.generate
            .check_stop_ids(&setup.tokenizer)
            .map_err(|e| invalid(format!("`generate.{e}")))?;
        let (source, mut named) = compile(job).map_err(template_error)?;
        let mut row_fields = RowFields::default();
        let columns = named_columns(&source, &mut named, &mut row_fields);
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

        let job_turn = job.prompt.turn().map_err(|why| invalid(format!("`prompt` {why}")))?;
        let turn = job_turn.unwrap_or(Turn::Generate);
        let config = setup.tokenizer.config();
        let kwargs = job.prompt.chat_template_kwargs.clone();
        let has_tools = kwargs.get("tools").is_some_and(|tools| !tools.is_null());
        let chat = ChatTemplate::choose(config, job.prompt.chat_template.as_ref(), has_tools, setup.now);
        let mut probe = None;
        if let (Source::Messages(messages), chat) = (&source, &chat) {
            let chat = chat.as_ref().map_err(|e| template_error(e.clone()))?;
            // This finds roles that the template refuses, and endless templates, before any row is
            // read.
            let messages = messages.iter().map(|message| message.probe("x")).collect();
            probe = Some(chat.render(messages, &kwargs, turn).map_err(template_error)?);
        }
        if job.prompt.chat_template.is_some() {
            chat.as_ref().map_err(|e| template_error(e.clone()))?;
        }
        let chat_source = chat.as_ref().map(ChatTemplate::source).unwrap_or_default();
        let thinking = ModelThinking::detect(&job.generate, &setup.tokenizer, chat.as_ref().ok(), probe.as_deref());
        let thinking = thinking.map_err(invalid)?;
        let controls = ModelThinking::control_source(thinking.as_ref(), chat_source);
        let guard = Guard::new(&setup.tokenizer, &controls, splits_texts(&job.prompt.kind));
        let (special_prefix, special_suffix) = setup.tokenizer.surrounding_ids().map_err(invalid)?;
        let mut hashed_parts = vec![json!(job.prompt.kind), json!(chat_source), json!(kwargs)];
        // Unset fields are not hashed, so that jobs of older gristmills keep their hash.
        let switches = [job.prompt.add_generation_prompt, job.prompt.continue_final_message];
        if switches != [None, None] {
            hashed_parts.push(json!(switches));
        }
        let input = job.input.uris.join("`, `");
        let params = params(&job.generate, job.deterministic, &setup, thinking.as_ref());
        // A retry's limit may exceed the context, where completions end anyway.
        let retry_params = setup.retry_max_tokens.map(|least| least.min(setup.context_tokens - 1));
        // A batch line may have a smaller limit than the job's default.
        let retry_params = retry_params.map(|max_tokens| GenerationParams {
            max_tokens,
            ..params.clone()
        });
        let mut renderer = Renderer {
            template_hash: sha256_hex(Value::from(hashed_parts).to_string()),
            params: Arc::new(params),
            retry_params: retry_params.map(Arc::new),
            thinking,
            generate: job.generate.clone(),
            truncate: job.prompt.truncate,
            named: NamedColumns {
                columns: named,
                row_fields,
                job_file: job.file.clone(),
                input,
            },
            source,
            chat,
            guard,
            setup,
            special_prefix,
            special_suffix,
            kwargs,
            turn,
            columns,
            findings: check::Findings::default(),
        };
        renderer.findings = renderer.check_names(job);
        Ok(renderer)
    }

    /// The columns that prompts use, sorted; `None` if prompts may use any column.
    pub fn columns(&self) -> Option<Vec<String>> {
        self.columns.clone()
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

    /// Whether prompts are conversations; `None`: each line says it itself.
    pub fn is_chat(&self) -> Option<bool> {
        match self.source {
            Source::Messages(_) => Some(true),
            Source::Text(_) | Source::TokenIds(_) => Some(false),
            Source::Openai => None,
        }
    }

    /// Maximum sequence length (prompt and completion) in tokens.
    pub fn context_tokens(&self) -> u32 {
        self.setup.context_tokens
    }

    /// End-of-sequence ids of the checkpoint when the job was planned, if the record has them.
    pub fn model_ends(&self) -> Option<&[u32]> {
        self.generate.model_ends.as_deref()
    }

    /// How the model thinks; `None`: the model's whole output is its answer.
    pub fn thinking(&self) -> Option<&ModelThinking> {
        self.thinking.as_ref()
    }

    /// Parameters of rows without settings of their own.
    pub fn params(&self) -> &Arc<GenerationParams> {
        &self.params
    }

    /// Renders and encodes a row. The error is one line for the row's `error` column.
    pub fn render(&self, row: &InputRow) -> Result<RenderedRow, String> {
        let mut rendered = self.render_unraised(row)?;
        // A retry does not change the prompt: truncation went by the row's own `max_tokens`.
        if let Some(retry_params) = &self.retry_params
            && rendered.params.max_tokens < retry_params.max_tokens
        {
            rendered.params = if Arc::ptr_eq(&rendered.params, &self.params) {
                retry_params.clone()
            } else {
                Arc::new(GenerationParams {
                    max_tokens: retry_params.max_tokens,
                    ..GenerationParams::clone(&rendered.params)
                })
            };
        }
        Ok(rendered)
    }

    /// Renders and encodes a row, without the `max_tokens` of a retry.
    fn render_unraised(&self, row: &InputRow) -> Result<RenderedRow, String> {
        let fields = row.fields.as_ref().map_err(Clone::clone)?;
        if let Some((column, _)) = fields.iter().find(|(_, value)| is_deeper(value, ROW_DEPTH_MAX)) {
            let why = format!("column `{column}` nests values more than {ROW_DEPTH_MAX} levels deep");
            return Err(one_line(&why));
        }
        match &self.source {
            Source::Messages(_) | Source::Text(_) => {
                let (text, tokens) = self.encode(fields, &self.params, |fields| self.job_prompt(fields))?;
                self.fit_to_context(Some(text), tokens, &self.params)
            }
            Source::TokenIds(column) => {
                let value = fields
                    .get(column)
                    .ok_or_else(|| format!("the row has no column `{column}`"))?;
                let Value::Array(items) = value else {
                    return Err(format!(
                        "column `{column}` holds {}, not a list of token ids",
                        type_name(value)
                    ));
                };
                self.render_token_ids(items, &format!("column `{column}`"), &self.params)
            }
            Source::Openai => self.render_line(fields),
        }
    }

    fn render_line(&self, fields: &Map<String, Value>) -> Result<RenderedRow, String> {
        let request = openai::request_body(fields)?;
        let rendered = self.render_request(&request);
        match request.endpoint {
            Endpoint::Responses => rendered.map_err(responses::in_its_words),
            Endpoint::ChatCompletions | Endpoint::Completions => rendered,
        }
    }

    fn render_request(&self, request: &RequestBody<'_>) -> Result<RenderedRow, String> {
        let (body, is_chat) = (&*request.fields, request.is_chat());
        if request.endpoint == Endpoint::Responses && self.generate.n != 1 {
            return Err(format!(
                "`/v1/responses` gives one answer, and `generate.n` of all rows is {}; they must agree",
                self.generate.n
            ));
        }
        let generate = openai::generate(body, &self.generate)?;
        let params = if generate == self.generate {
            self.params.clone()
        } else {
            generate
                .check_stop_ids(&self.setup.tokenizer)
                .map_err(|e| format!("`{e}"))?;
            let thinking = self.thinking.as_ref();
            ModelThinking::check_line(thinking, &generate, &self.generate)
                .map_err(|why| openai::in_its_words(body, why))?;
            Arc::new(params(&generate, self.params.deterministic, &self.setup, thinking))
        };
        if params.max_tokens >= self.setup.context_tokens {
            let why = format!(
                "`max_tokens` is {}, which leaves no room for a prompt in the model's context of {} tokens",
                number(params.max_tokens.into()),
                number(self.setup.context_tokens.into())
            );
            return Err(openai::in_its_words(body, why));
        }
        if let LinePrompt::Tokens(items) = openai::prompt(body, is_chat)? {
            return self.render_token_ids(&items, "`prompt`", &params);
        }
        let (text, tokens) = self.encode(body, &params, |body| match openai::prompt(body, is_chat)? {
            LinePrompt::Chat { messages, kwargs, turn } => {
                let chat = self.chat.as_ref().map_err(Clone::clone)?;
                if let Some(why) = chat.kwargs_error(&kwargs) {
                    return Err(format!("`body` {why}"));
                }
                let mut all = self.kwargs.clone();
                all.extend(kwargs);
                Ok(PromptText {
                    text: chat.render(messages, &all, turn.unwrap_or(self.turn))?,
                    adds_special_tokens: false,
                })
            }
            LinePrompt::Text(text) => Ok(PromptText {
                text,
                adds_special_tokens: true,
            }),
            LinePrompt::Tokens(_) => Err("`prompt` changed its form".into()),
        })?;
        self.fit_to_context(Some(text), tokens, &params)
    }

    /// Renders a row's prompt with the job's own templates.
    fn job_prompt(&self, fields: &Map<String, Value>) -> Result<PromptText, String> {
        let context = column_context(fields);
        match &self.source {
            Source::Text(template) => Ok(PromptText {
                text: template
                    .render(context)
                    .map_err(|e| format!("template `prompt.text`: {e}"))?,
                adds_special_tokens: true,
            }),
            Source::Messages(messages) => {
                let rendered = render_messages(messages, &context)?;
                let chat = self.chat.as_ref().map_err(Clone::clone)?;
                Ok(PromptText {
                    text: chat.render(rendered, &self.kwargs, self.turn)?,
                    adds_special_tokens: false,
                })
            }
            // Rows of these jobs hold their prompts: `render_unraised` does not call this function.
            Source::TokenIds(_) | Source::Openai => Err("the job has no template".into()),
        }
    }

    /// Calls `prompt` to render the row, and encodes the text. The row's data cannot become control
    /// tokens (see `guard`).
    fn encode(
        &self,
        fields: &Map<String, Value>,
        params: &GenerationParams,
        prompt: impl Fn(&Map<String, Value>) -> Result<PromptText, String>,
    ) -> Result<(String, Encoded), String> {
        let tokenizer = &self.setup.tokenizer;
        let context = self.setup.context_tokens as usize;
        // Tokens beyond this number do not change the result, so they are not encoded.
        let limit = match self.truncate {
            Truncate::None => context - 1,
            Truncate::Right => context - params.max_tokens as usize,
            Truncate::Left => usize::MAX,
        };
        let is_used = |name: &str| match &self.columns {
            Some(columns) => columns.iter().any(|column| column == name),
            None => true,
        };
        let values_may_form_token = fields
            .iter()
            .any(|(name, value)| is_used(name) && self.guard.may_form_token(value, tokenizer));
        // A template that may use the whole row can also put column names into the prompt.
        let names_may_form_token =
            self.columns.is_none() && fields.keys().any(|name| self.guard.text_may_form_token(name));
        if !values_may_form_token && !names_may_form_token {
            let PromptText {
                text,
                adds_special_tokens,
            } = prompt(fields)?;
            let tokens = tokenizer.encode_within(&text, adds_special_tokens, limit)?;
            return Ok((text, tokens));
        }
        let marks = Marks::unused(fields).ok_or("the row holds control tokens and every noncharacter of Unicode")?;
        let marked = if names_may_form_token {
            self.guard.mark_map(fields, marks)
        } else {
            fields
                .iter()
                .map(|(name, value)| (name.clone(), self.guard.mark(value, marks)))
                .collect()
        };
        let PromptText {
            text,
            adds_special_tokens,
        } = prompt(&marked)?;
        let mut tokens = Vec::new();
        let mut is_cut = false;
        if adds_special_tokens {
            tokens.extend(&self.special_prefix);
        }
        for piece in self.guard.split(&text, marks) {
            match piece {
                Piece::Token(id) => tokens.push(id),
                Piece::Text(text, is_first) => {
                    let piece = tokenizer.encode_piece_within(&text, is_first, limit.saturating_sub(tokens.len()))?;
                    tokens.extend(piece.ids);
                    is_cut = piece.is_cut;
                }
            }
            if is_cut {
                break;
            }
        }
        if adds_special_tokens && !is_cut {
            tokens.extend(&self.special_suffix);
        }
        Ok((marks.strip(&text), Encoded { ids: tokens, is_cut }))
    }

    fn render_token_ids(
        &self,
        items: &[Value],
        what: &str,
        params: &Arc<GenerationParams>,
    ) -> Result<RenderedRow, String> {
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
        self.fit_to_context(None, tokens, params)
    }

    /// The text that token ids decode to, including the texts of special tokens.
    fn decode_with_specials(&self, tokens: &[u32]) -> String {
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

    /// Checks a prompt against the model's context, and truncates it if the job says so. Without a
    /// `text`, or after truncation, the text is decoded from the tokens.
    fn fit_to_context(
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
        // This cannot underflow: `max_tokens` was checked to be less than the context.
        let prompt_max = context - params.max_tokens as usize;
        match self.truncate {
            Truncate::None if tokens.len() >= context => {
                let count = if is_cut {
                    format!("at least {}", number(context as u64))
                } else {
                    number(tokens.len() as u64)
                };
                return Err(format!(
                    "the prompt has {count} tokens, and the model's context of {} must hold it and at least one more; shorten \
                     it{TRUNCATE_ADVICE}",
                    number(context as u64)
                ));
            }
            Truncate::Left if tokens.len() > prompt_max => {
                let bos = self.setup.tokenizer.config().bos_token.as_deref();
                let bos = bos.and_then(|bos| self.setup.tokenizer.id_of(bos));
                // The begin-of-sequence token stays: models that have one were trained with it.
                let kept = usize::from(Some(tokens[0]) == bos && prompt_max > 1);
                let dropped = tokens.len() - prompt_max;
                tokens.drain(kept..kept + dropped);
                text = None;
            }
            Truncate::Right if tokens.len() > prompt_max => {
                tokens.truncate(prompt_max);
                text = None;
            }
            Truncate::None | Truncate::Left | Truncate::Right => {}
        }
        Ok(RenderedRow {
            text: text.unwrap_or_else(|| self.decode_with_specials(&tokens)),
            tokens,
            params: params.clone(),
        })
    }
}

/// Converts to the engine's parameters. A stop text that is the text of a special token becomes a
/// stop token, since special tokens never appear in a completion's text.
fn params(
    generate: &Generate,
    deterministic: bool,
    setup: &RenderSetup,
    thinking: Option<&ModelThinking>,
) -> GenerationParams {
    let mut params = generate.params(setup.seed, deterministic);
    params.thinking = thinking.and_then(|thinking| thinking.for_row(generate));
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
    let item_is_deeper = |item: &Value| levels == 0 || is_deeper(item, levels - 1);
    match value {
        Value::Array(items) => items.iter().any(item_is_deeper),
        Value::Object(fields) => fields.values().any(item_is_deeper),
        _ => false,
    }
}

/// The type of a value, for messages.
fn type_name(value: &Value) -> &'static str {
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
mod preview;
mod source;

#[cfg(test)]
mod tests;
