//! Messages of `plan`, `run` and `submit` about the column with the answers to a JSON Schema.

use serde_json::{Value, json};

use crate::cli::prepare::PreparedJob;
use crate::dataset::answer::types::{AnswerType, Untyped};
use crate::job::file::OutputFormat;
use crate::job::generate::ConstraintSpec;

/// Maximum number of untyped properties that a message names.
const UNTYPED_SHOWN_MAX: usize = 8;

impl PreparedJob {
    /// The type of the answers, and the properties that stay JSON text; `None` without a JSON
    /// Schema or for an output of result lines.
    fn answer_type(&self) -> Option<(AnswerType, Vec<Untyped>)> {
        match (&self.job.generate.shape, self.job.output.format) {
            (ConstraintSpec::JsonSchema(schema), OutputFormat::Parquet) => Some(AnswerType::of(schema)),
            _ => None,
        }
    }

    /// Lines for the terminal about the column `parsed`.
    pub(super) fn parsed_lines(&self) -> Vec<String> {
        let Some((answer_type, untyped)) = self.answer_type() else {
            return Vec::new();
        };
        if self.job.output.parsed.is_text() {
            return match answer_type {
                AnswerType::Json => Vec::new(),
                answer_type => vec![format!("JSON text; `output.parsed: typed` makes {answer_type} of it")],
            };
        }
        [answer_type.to_string()]
            .into_iter()
            .chain(untyped_descriptions(&untyped))
            .collect()
    }

    /// For a job with typed answers: lines about properties that stay JSON text.
    pub(super) fn untyped_lines(&self) -> Vec<String> {
        let parsed = self.answer_type().filter(|_| !self.job.output.parsed.is_text());
        parsed.map_or(Vec::new(), |(_, untyped)| untyped_descriptions(&untyped))
    }

    /// The type and the untyped properties as JSON; null if the column `parsed` is text.
    pub(super) fn parsed_json(&self) -> Value {
        match self.answer_type().filter(|_| !self.job.output.parsed.is_text()) {
            None => Value::Null,
            Some((answer_type, untyped)) => {
                let untyped: Vec<Value> = untyped
                    .iter()
                    .map(|field| json!({"column": field.path, "why": field.why}))
                    .collect();
                json!({"type": answer_type.to_string(), "json_text": untyped})
            }
        }
    }
}

fn untyped_descriptions(untyped: &[Untyped]) -> Vec<String> {
    let lines = untyped
        .iter()
        .take(UNTYPED_SHOWN_MAX)
        .map(|field| format!("JSON text: {field}"));
    let more = untyped.len().saturating_sub(UNTYPED_SHOWN_MAX);
    lines.chain((more > 0).then(|| format!("… and {more} more"))).collect()
}
