//! Messages of `plan`, `run` and `submit` about the column with the answers to a JSON Schema.

use serde_json::{Value, json};

use crate::cli::prepare::PreparedJob;
use crate::dataset::answer::types::{AnswerType, Untyped};
use crate::job::file::OutputFormat;
use crate::job::generate::ShapeSpec;

/// Maximum number of an answer's parts that a message names.
const NAMED_MAX: usize = 8;

impl PreparedJob {
    /// The type of the answers, and the parts that stay JSON text; `None` without a JSON Schema or
    /// for an output of result lines.
    fn parsed(&self) -> Option<(AnswerType, Vec<Untyped>)> {
        match (&self.job.generate.shape, self.job.output.format) {
            (ShapeSpec::JsonSchema(schema), OutputFormat::Parquet) => Some(AnswerType::of(schema)),
            _ => None,
        }
    }

    /// The lines for the terminal.
    pub(super) fn parsed_lines(&self) -> Vec<String> {
        let Some((of, untyped)) = self.parsed() else {
            return Vec::new();
        };
        if self.job.output.parsed.is_text() {
            return match of {
                AnswerType::Json => Vec::new(),
                of => vec![format!("JSON text; `output.parsed: typed` makes {of} of it")],
            };
        }
        [of.to_string()].into_iter().chain(named(&untyped)).collect()
    }

    /// For a job with typed answers: lines about parts that stay text.
    pub(super) fn untyped_lines(&self) -> Vec<String> {
        let parsed = self.parsed().filter(|_| !self.job.output.parsed.is_text());
        parsed.map_or(Vec::new(), |(_, untyped)| named(&untyped))
    }

    /// The same as JSON; null if `parsed` is text.
    pub(super) fn parsed_json(&self) -> Value {
        match self.parsed().filter(|_| !self.job.output.parsed.is_text()) {
            None => Value::Null,
            Some((of, untyped)) => {
                let untyped: Vec<Value> = untyped
                    .iter()
                    .map(|one| json!({"column": one.place, "why": one.why}))
                    .collect();
                json!({"type": of.to_string(), "json_text": untyped})
            }
        }
    }
}

fn named(untyped: &[Untyped]) -> Vec<String> {
    let lines = untyped.iter().take(NAMED_MAX).map(|one| format!("JSON text: {one}"));
    let more = untyped.len().saturating_sub(NAMED_MAX);
    lines.chain((more > 0).then(|| format!("… and {more} more"))).collect()
}
