//! The job's own templates, compiled, and the columns that they name.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::job::guard;
use crate::job::spec::{Job, Message, PromptKind};
use crate::job::template::Template;

/// Compiled form of [`PromptKind`].
pub(super) enum Source {
    Messages(Vec<CompiledMessage>),
    Text(Box<Template>),
    TokenIds(String),
    Openai,
}

pub(super) struct CompiledMessage {
    pub role: &'static str,
    pub parts: Vec<Content>,
    pub is_list: bool,
}

impl CompiledMessage {
    /// Renders the message with `data` in place of each template.
    pub(super) fn probe(&self, data: &str) -> Value {
        let text = |part: &Content| match part {
            Content::Fixed(text) => text.clone(),
            Content::Template(_) => data.to_string(),
        };
        let content: String = self.parts.iter().map(text).collect();
        json!({"role": self.role, "content": content})
    }
}

/// Renders the messages of a conversation, in the form that chat templates expect.
pub(super) fn render_messages(messages: &[CompiledMessage], context: &minijinja::Value) -> Result<Vec<Value>, String> {
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
    Ok(rendered)
}

/// A rendered prompt, not yet encoded.
pub(super) struct PromptText {
    pub text: String,
    /// Whether the tokenizer's special tokens are added around the text. A chat template writes its
    /// own.
    pub adds_special_tokens: bool,
}

pub(super) enum Content {
    Fixed(String),
    Template(Box<Template>),
}

/// Compiles the job's own templates. Also returns the columns that the job names outside of
/// templates, each with the naming field.
pub(super) fn compile(job: &Job) -> Result<(Source, Vec<(String, String)>), String> {
    let mut named = Vec::new();
    let source = match &job.prompt.kind {
        PromptKind::Messages(messages) => {
            let compile = |(i, message)| compile_message(i, message);
            Source::Messages(messages.iter().enumerate().map(compile).collect::<Result<_, _>>()?)
        }
        PromptKind::Text(text) => {
            let template = Template::for_columns("prompt.text", text);
            Source::Text(Box::new(template.map_err(|e| format!("template `prompt.text`: {e}"))?))
        }
        PromptKind::TokenIds(column) => {
            named.push((column.clone(), "prompt.token_ids".to_string()));
            Source::TokenIds(column.clone())
        }
        PromptKind::Openai => Source::Openai,
    };
    Ok((source, named))
}

fn compile_message(i: usize, message: &Message) -> Result<CompiledMessage, String> {
    let compile = |part: &String| {
        // A text without templates, as system messages usually are, needs no rendering.
        if !part.contains('{') {
            return Ok(Content::Fixed(part.clone()));
        }
        let field = format!("prompt.messages[{i}].content");
        Template::for_columns(&field, part)
            .map(|template| Content::Template(Box::new(template)))
            .map_err(|e| format!("template `{field}`: {e}"))
    };
    let parts = message.parts.iter().map(compile).collect::<Result<_, _>>()?;
    Ok(CompiledMessage {
        role: message.role.as_str(),
        parts,
        is_list: message.is_list,
    })
}

/// Fields of `row` that templates name, each with the job's field that holds the template.
#[derive(Default)]
pub(super) struct RowFields {
    pub needed: Vec<(String, String)>,
    /// Fields whose existence a template tests.
    pub tested: Vec<(String, String)>,
}

/// Adds the columns that templates name to `named`, and the fields of `row` that they name to
/// `row_fields`. Returns all columns that prompts use, or `None` if prompts may use any column.
pub(super) fn named_columns(
    source: &Source,
    named: &mut Vec<(String, String)>,
    row_fields: &mut RowFields,
) -> Option<Vec<String>> {
    let mut may_use_any = false;
    let mut add = |template: &Template, field: String| {
        let columns = template.columns();
        let with_field = |columns: BTreeSet<String>| columns.into_iter().map(|column| (column, field.clone()));
        named.extend(with_field(columns.names));
        row_fields.needed.extend(with_field(columns.row_fields));
        row_fields.tested.extend(with_field(columns.tested_row_fields));
        may_use_any |= columns.may_use_any;
    };
    match source {
        Source::Messages(messages) => {
            for (i, message) in messages.iter().enumerate() {
                for part in &message.parts {
                    if let Content::Template(template) = part {
                        add(template, format!("prompt.messages[{i}].content"));
                    }
                }
            }
        }
        Source::Text(template) => add(template, "prompt.text".to_string()),
        Source::TokenIds(_) => {}
        Source::Openai => return None,
    }
    let columns: BTreeSet<&String> = named.iter().map(|(column, _)| column).collect();
    (!may_use_any).then(|| columns.into_iter().cloned().collect())
}

/// Whether a template of the job splits texts; see [`guard::splits_texts`].
pub(super) fn splits_texts(kind: &PromptKind) -> bool {
    match kind {
        PromptKind::Messages(messages) => messages
            .iter()
            .flat_map(|m| &m.parts)
            .any(|part| guard::splits_texts(part)),
        PromptKind::Text(text) => guard::splits_texts(text),
        PromptKind::TokenIds(_) | PromptKind::Openai => false,
    }
}
