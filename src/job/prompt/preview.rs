//! A row's prompt for people to read: the job's own templates are rendered, and neither a checkpoint
//! nor its chat template is needed. A conversation is shown message by message.

use serde_json::{Map, Value, json};

use super::source::{RowFields, Source, compile, named_columns, render_messages};
use super::{ROW_DEPTH_MAX, is_deeper};
use crate::dataset::row::InputRow;
use crate::job::spec::Job;
use crate::job::template::column_context;

/// Shows prompts of one job's rows.
pub struct PromptPreview {
    source: Source,
    columns: Option<Vec<String>>,
}

impl PromptPreview {
    /// Compiles the job's templates.
    ///
    /// # Errors
    /// A template is invalid.
    pub fn new(job: &Job) -> Result<PromptPreview, String> {
        let (source, mut named) = compile(job)?;
        let columns = named_columns(&source, &mut named, &mut RowFields::default());
        Ok(PromptPreview { source, columns })
    }

    /// The columns that prompts use, sorted; `None` if prompts may use any column.
    pub fn columns(&self) -> Option<Vec<String>> {
        self.columns.clone()
    }

    /// The prompt of a row.
    ///
    /// # Errors
    /// The row is unreadable, or a template refuses it; one line says why.
    pub fn text(&self, row: &InputRow) -> Result<String, String> {
        let fields = row.fields.as_ref().map_err(Clone::clone)?;
        if fields.values().any(|value| is_deeper(value, ROW_DEPTH_MAX)) {
            return Err(format!("a value nests more than {ROW_DEPTH_MAX} levels deep"));
        }
        match &self.source {
            Source::Text(template) => template.render(column_context(fields)),
            Source::Messages(messages) => {
                let messages = render_messages(messages, &column_context(fields))?;
                Ok(conversation(&messages))
            }
            Source::TokenIds(column) => match fields.get(column) {
                Some(ids) => Ok(ids.to_string()),
                None => Err(format!("the row has no column `{column}`")),
            },
            Source::Openai => Ok(line_text(fields)),
        }
    }
}

/// The prompt of a line of an OpenAI batch file. The line may have failed for its form, so nothing
/// is expected of it.
fn line_text(fields: &Map<String, Value>) -> String {
    let body = fields.get("body").unwrap_or(&Value::Null);
    let instructions = &body["instructions"];
    if instructions.is_string() || body.get("input").is_some() {
        let first = instructions
            .as_str()
            .map(|text| json!({"role": "system", "content": text}));
        let rest = match &body["input"] {
            Value::Array(items) => items.clone(),
            input => vec![json!({"role": "user", "content": input})],
        };
        let all: Vec<Value> = first.into_iter().chain(rest).collect();
        return conversation(&all);
    }
    match (&body["messages"], &body["prompt"]) {
        (Value::Array(messages), _) => conversation(messages),
        (_, Value::String(text)) => text.clone(),
        (_, Value::Null) => body.to_string(),
        (_, prompt) => prompt.to_string(),
    }
}

fn conversation(messages: &[Value]) -> String {
    let shown = messages.iter().map(|message| match message["role"].as_str() {
        Some(role) => format!("{role}: {}", content_text(&message["content"])),
        None => message.to_string(),
    });
    shown.collect::<Vec<_>>().join("\n\n")
}

fn content_text(content: &Value) -> String {
    let part_text = |part: &Value| match part["text"].as_str() {
        Some(text) => text.to_string(),
        None => part.to_string(),
    };
    match content {
        Value::String(text) => text.clone(),
        Value::Array(parts) => parts.iter().map(part_text).collect(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_any_form_are_shown() {
        let shown = |body: Value| line_text(json!({"body": body}).as_object().unwrap());
        let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, 7]);
        let messages = json!([{"role": "system", "content": "Sort."}, {"role": "user", "content": parts}, "odd"]);
        assert_eq!(
            shown(json!({"messages": messages})),
            "system: Sort.\n\nuser: ab7\n\n\"odd\""
        );
        let response = json!({"instructions": "Sort.", "input": "Refund"});
        assert_eq!(shown(response), "system: Sort.\n\nuser: Refund");
        assert_eq!(
            shown(json!({"input": [{"role": "user", "content": "x"}, 3]})),
            "user: x\n\n3"
        );
        assert_eq!(shown(json!({"prompt": "Refund"})), "Refund");
        assert_eq!(shown(json!({"prompt": [1, 2]})), "[1,2]");
        assert_eq!(shown(json!({"messages": 3})), "{\"messages\":3}");
        assert_eq!(line_text(&Map::new()), "null");
    }
}
