//! Checks at the start of a job that are skipped once it has begun: a job begun by an older
//! gristmill continues unchanged.

use serde_json::json;

use super::{CompiledMessage, Content, Renderer, Source};
use crate::job::JobError;
use crate::job::chat::ChatTemplate;
use crate::job::file::Role;
use crate::job::spec::{ChatTemplateChoice, Job};
use crate::job::template::Template;

/// Findings about a job's templates.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// Reasons why the job cannot begin; the first is reported.
    refusals: Vec<String>,
    warnings: Vec<String>,
}

impl Renderer {
    /// Checks that all filters and functions in the job's templates exist, and that the chat
    /// template reads the variables that it is given.
    pub fn check_templates(&self) -> Result<(), JobError> {
        match self.found.refusals.first() {
            None => Ok(()),
            Some(message) => Err(JobError::Template {
                place: self.named.file.clone(),
                message: message.clone(),
            }),
        }
    }

    /// For an input with a column named `row`: checks that templates do not use that column as if
    /// it held all columns.
    pub fn check_row(&self, columns: &[String]) -> Result<(), JobError> {
        let of_row = &self.named.of_row;
        let mut fields = of_row.needed.iter().chain(&of_row.asked);
        let Some((column, field)) = fields.find(|(column, _)| columns.contains(column)) else {
            return Ok(());
        };
        let is_name = |c: char| c == '_' || c.is_ascii_alphanumeric();
        let advice = if column.chars().all(is_name) && !column.starts_with(|c: char| c.is_ascii_digit()) {
            format!("write `{column}`")
        } else {
            "call that column otherwise in the input".to_string()
        };
        Err(JobError::Template {
            place: self.named.file.clone(),
            message: format!(
                "template `{field}`: the input has a column `row`, so `row` means that one, and its `{column}` is not the column `{column}`: \
                 {advice}"
            ),
        })
    }

    /// Warnings for the person who starts the job, a line each.
    pub fn warnings(&self) -> &[String] {
        &self.found.warnings
    }

    /// Whether prompts contain the date.
    pub fn tells_time(&self) -> bool {
        matches!(self.source, Source::Messages(_) | Source::Openai)
            && self.chat.as_ref().is_ok_and(|chat| chat.tells_time())
    }

    pub(super) fn look(&self, job: &Job) -> Found {
        let mut found = Found::default();
        let mut columns = |template: &Template, field: &str| {
            let unknown = template.unknown().into_iter();
            found
                .refusals
                .extend(unknown.map(|e| format!("template `{field}`: {e}")));
        };
        match &self.source {
            Source::Text(template) => columns(template, "prompt.text"),
            Source::Messages(messages) => {
                for (i, message) in messages.iter().enumerate() {
                    for part in &message.parts {
                        if let Content::Template(template) = part {
                            columns(template, &format!("prompt.messages[{i}].content"));
                        }
                    }
                }
            }
            Source::TokenIds(_) | Source::Openai => {}
        }
        if matches!(self.source, Source::Messages(_) | Source::Openai) {
            self.look_at_chat(job, &mut found);
        }
        found
    }

    fn look_at_chat(&self, job: &Job, found: &mut Found) {
        // A conversation without a chat template is refused elsewhere.
        let Ok(chat) = &self.chat else { return };
        let refused = chat.refuses(&self.kwargs);
        found
            .refusals
            .extend(refused.map(|why| format!("`prompt.chat_template_kwargs` {why}")));
        let unknown = chat.unknown();
        let is_own = matches!(job.prompt.chat_template, Some(ChatTemplateChoice::Source(_)));
        // A checkpoint's template may use names unknown to us in branches that this job's prompts
        // never take (tools, images).
        let reached = !unknown.is_empty() && {
            let hello = vec![json!({"role": "user", "content": "x"})];
            matches!(self.source, Source::Openai) && chat.render(hello, &self.kwargs, self.turn).is_err()
        };
        let told = unknown.into_iter().map(|e| format!("chat template: {e}"));
        if is_own || reached {
            found.refusals.extend(told)
        } else {
            found
                .warnings
                .extend(told.map(|e| format!("{e}; prompts that come to it are errors")))
        }
        if let (true, Some(why)) = (is_own, chat.misspells(&self.kwargs)) {
            found.refusals.push(format!("chat template: {why}"));
        }
        if let Source::Messages(messages) = &self.source {
            for i in self.left_out(chat, messages) {
                let why = format!("the chat template leaves out what `prompt.messages[{i}]` says");
                if is_own {
                    found.refusals.push(why)
                } else {
                    found.warnings.push(format!("{why}: the model does not see it"))
                }
            }
        }
        let last = match &self.source {
            Source::Messages(messages) => messages.last().map(|message| message.role),
            _ => None,
        };
        if last == Some(Role::Assistant.as_str()) && job.prompt.turn() == Ok(None) {
            found.warnings.push(
                "the last message is the assistant's, and the model begins a new turn after it: \
                 `prompt.continue_final_message: true` has it continued, `false` says that this is meant"
                    .into(),
            );
        }
    }

    /// Indices of messages whose content is missing from the prompt.
    fn left_out(&self, chat: &ChatTemplate, messages: &[CompiledMessage]) -> Vec<usize> {
        let probes: Vec<_> = (0..)
            .zip(messages)
            .map(|(i, message)| message.probe(&probe(i)))
            .collect();
        let Ok(text) = chat.render(probes.clone(), &self.kwargs, self.turn) else {
            return Vec::new();
        };
        let text = text.to_lowercase();
        let is_there = |i: usize| {
            let brings_data = messages[i]
                .parts
                .iter()
                .any(|part| matches!(part, Content::Template(_)));
            let content = probes[i]["content"].as_str().unwrap_or_default();
            let said = if brings_data {
                probe(i)
            } else {
                content.split_whitespace().next().unwrap_or_default().to_lowercase()
            };
            text.contains(&said)
        };
        (0..messages.len()).filter(|i| !is_there(*i)).collect()
    }
}

/// Placeholder for a message's row data: lower case, and unique per message.
fn probe(i: usize) -> String {
    format!("gristmill row data {i};")
}
