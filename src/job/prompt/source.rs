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
    /// The message with `data` in place of the row's data.
    pub(super) fn probe(&self, data: &str) -> Value {
        let text = |part: &Content| match part {
            Content::Fixed(text) => text.clone(),
            Content::Template(_) => data.to_string(),
        };
        let content: String = self.parts.iter().map(text).collect();
        json!({"role": self.role, "content": content})
    }
}

pub(super) enum Content {
    Fixed(String),
    Template(Box<Template>),
}

/// Compiles the job's own templates; also lists the columns that are named outside of templates.
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
        // System messages are usually the same for every row.
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
pub(super) struct OfRow {
    pub needed: Vec<(String, String)>,
    /// Fields whose existence a template tests.
    pub asked: Vec<(String, String)>,
}

/// Adds the columns that templates name to `named`, and the fields of `row` that they name to
/// `of_row`. Returns all columns that prompts use, or `None` if prompts may use any column.
pub(super) fn named_columns(
    source: &Source,
    named: &mut Vec<(String, String)>,
    of_row: &mut OfRow,
) -> Option<Vec<String>> {
    let mut any = false;
    let mut add = |template: &Template, field: String| {
        let columns = template.columns();
        let placed = |columns: BTreeSet<String>| columns.into_iter().map(|column| (column, field.clone()));
        named.extend(placed(columns.names));
        of_row.needed.extend(placed(columns.of_row));
        of_row.asked.extend(placed(columns.asked_of_row));
        any |= columns.any;
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
    (!any).then(|| columns.into_iter().cloned().collect())
}

/// Whether the job's templates split the texts of columns.
pub(super) fn takes_apart(kind: &PromptKind) -> bool {
    match kind {
        PromptKind::Messages(messages) => messages
            .iter()
            .flat_map(|m| &m.parts)
            .any(|part| guard::takes_apart(part)),
        PromptKind::Text(text) => guard::takes_apart(text),
        PromptKind::TokenIds(_) | PromptKind::Openai => false,
    }
}
