//! Checks of a job's templates and columns when the job starts. They are skipped once it has begun,
//! so that a job begun by an older gristmill continues unchanged.

use serde_json::json;

use super::source::{CompiledMessage, Content};
use super::{Renderer, Source};
use crate::job::chat::ChatTemplate;
use crate::job::file::Role;
use crate::job::spec::{ChatTemplateChoice, Job};
use crate::job::template::Template;
use crate::job::{JobError, suggest};

/// Findings about a job's templates.
#[derive(Debug, Default)]
pub(super) struct Findings {
    /// Reasons why the job cannot begin; only the first is reported.
    refusals: Vec<String>,
    warnings: Vec<String>,
}

impl Renderer {
    /// Checks that all names in the job's templates (filters, functions, …) exist, and that the chat
    /// template reads all variables of `chat_template_kwargs`.
    pub fn check_templates(&self) -> Result<(), JobError> {
        match self.findings.refusals.first() {
            None => Ok(()),
            Some(message) => Err(JobError::Template {
                location: self.named.job_file.clone(),
                message: message.clone(),
            }),
        }
    }

    /// Checks that the input has all columns that the job names (in prompts, `carry` and `gold`).
    pub fn check_columns(&self, columns: &[String]) -> Result<(), JobError> {
        let has = |name: &str| columns.iter().any(|column| column == name);
        let missing = ["custom_id", "method", "url", "body"]
            .into_iter()
            .find(|name| !has(name));
        if let (Source::Openai, Some(missing)) = (&self.source, missing) {
            return Err(JobError::Invalid {
                location: self.named.job_file.clone(),
                message: format!(
                    "`prompt` says none of `messages`, `text` and `token_ids`, and `{}` is no OpenAI batch file (it has \
                     no column `{missing}`)",
                    self.named.input
                ),
            });
        }
        let row_fields = self.named.row_fields.needed.iter().filter(|_| !has("row"));
        match self
            .named
            .columns
            .iter()
            .chain(row_fields)
            .find(|(column, _)| !has(column))
        {
            None => Ok(()),
            Some((column, field)) => Err(JobError::Column {
                location: self.named.job_file.clone(),
                column: column.clone(),
                field: field.clone(),
                input: self.named.input.clone(),
                hint: suggest(column, columns.iter().map(String::as_str)),
            }),
        }
    }

    /// Checks, for an input with a column named `row`, that templates do not read other columns
    /// through `row`: the name means that column.
    pub fn check_row(&self, columns: &[String]) -> Result<(), JobError> {
        let row_fields = &self.named.row_fields;
        let mut fields = row_fields.needed.iter().chain(&row_fields.tested);
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
            location: self.named.job_file.clone(),
            message: format!(
                "template `{field}`: the input has a column `row`, so `row` means that one, and its `{column}` is not the column `{column}`: \
                 {advice}"
            ),
        })
    }

    /// Warnings for the person who starts the job, one line each.
    pub fn warnings(&self) -> &[String] {
        &self.findings.warnings
    }

    /// Whether prompts may contain the current date.
    pub fn shows_date(&self) -> bool {
        matches!(self.source, Source::Messages(_) | Source::Openai)
            && self.chat.as_ref().is_ok_and(|chat| chat.shows_date())
    }

    /// Checks the names in the job's templates.
    pub(super) fn check_names(&self, job: &Job) -> Findings {
        let mut findings = Findings::default();
        let mut check_template = |template: &Template, field: &str| {
            let unknown = template.unknown_name_messages().into_iter();
            findings
                .refusals
                .extend(unknown.map(|e| format!("template `{field}`: {e}")));
        };
        match &self.source {
            Source::Text(template) => check_template(template, "prompt.text"),
            Source::Messages(messages) => {
                for (i, message) in messages.iter().enumerate() {
                    for part in &message.parts {
                        if let Content::Template(template) = part {
                            check_template(template, &format!("prompt.messages[{i}].content"));
                        }
                    }
                }
            }
            Source::TokenIds(_) | Source::Openai => {}
        }
        if matches!(self.source, Source::Messages(_) | Source::Openai) {
            self.check_chat_template(job, &mut findings);
        }
        findings
    }

    fn check_chat_template(&self, job: &Job, findings: &mut Findings) {
        // `Renderer::new` refuses a conversation without a chat template.
        let Ok(chat) = &self.chat else { return };
        let kwargs_error = chat.kwargs_error(&self.kwargs);
        findings
            .refusals
            .extend(kwargs_error.map(|why| format!("`prompt.chat_template_kwargs` {why}")));
        let unknown = chat.unknown_name_messages();
        let is_own = matches!(job.prompt.chat_template, Some(ChatTemplateChoice::Source(_)));
        // A checkpoint's template may use unknown names in branches that this job's prompts never
        // take (tools, images).
        let is_reached = !unknown.is_empty() && {
            let hello = vec![json!({"role": "user", "content": "x"})];
            matches!(self.source, Source::Openai) && chat.render(hello, &self.kwargs, self.turn).is_err()
        };
        let messages_of_unknown = unknown.into_iter().map(|e| format!("chat template: {e}"));
        if is_own || is_reached {
            findings.refusals.extend(messages_of_unknown)
        } else {
            findings
                .warnings
                .extend(messages_of_unknown.map(|e| format!("{e}; prompts that come to it are errors")))
        }
        if let (true, Some(why)) = (is_own, chat.misspelling_message(&self.kwargs)) {
            findings.refusals.push(format!("chat template: {why}"));
        }
        if let Source::Messages(messages) = &self.source {
            for i in self.omitted_messages(chat, messages) {
                let why = format!("the chat template leaves out what `prompt.messages[{i}]` says");
                if is_own {
                    findings.refusals.push(why)
                } else {
                    findings.warnings.push(format!("{why}: the model does not see it"))
                }
            }
        }
        let last = match &self.source {
            Source::Messages(messages) => messages.last().map(|message| message.role),
            _ => None,
        };
        if last == Some(Role::Assistant.as_str()) && job.prompt.turn() == Ok(None) {
            findings.warnings.push(
                "the last message is the assistant's, and the model begins a new turn after it: \
                 `prompt.continue_final_message: true` has it continued, `false` says that this is meant"
                    .into(),
            );
        }
    }

    /// The indices of messages whose content the chat template leaves out.
    fn omitted_messages(&self, chat: &ChatTemplate, messages: &[CompiledMessage]) -> Vec<usize> {
        let probes: Vec<_> = (0..)
            .zip(messages)
            .map(|(i, message)| message.probe(&row_data_probe(i)))
            .collect();
        let Ok(text) = chat.render(probes.clone(), &self.kwargs, self.turn) else {
            return Vec::new();
        };
        let text = text.to_lowercase();
        let is_present = |i: usize| {
            let has_row_data = messages[i]
                .parts
                .iter()
                .any(|part| matches!(part, Content::Template(_)));
            let content = probes[i]["content"].as_str().unwrap_or_default();
            let expected = if has_row_data {
                row_data_probe(i)
            } else {
                content.split_whitespace().next().unwrap_or_default().to_lowercase()
            };
            text.contains(&expected)
        };
        (0..messages.len()).filter(|i| !is_present(*i)).collect()
    }
}

/// Placeholder for the row data in message `i`: lower case, and different for each message.
fn row_data_probe(i: usize) -> String {
    format!("gristmill row data {i};")
}
