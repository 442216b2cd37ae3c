//! What OpenAI's API calls the errors of rows: a code, and the field of the request's body.
//!
//! Reasons are texts for people, as outputs have them. They begin with the field that they are
//! about, or have one of the forms below, from which the code follows. So parts of older jobs have
//! codes, too.

use super::openai;
use crate::device::draw::DrawError;

/// Begins the reason of a row that stopped its workers.
pub const DEADLY_ROW: &str = "the process died";
/// Ends the reason of a row that other rows kept from being compiled.
const BUSY: &str = "still busy with schemas of earlier rows that timed out";
/// Advice for whoever writes the job file, at the end of a reason.
pub(super) const TRUNCATE_ADVICE: &str = " or set `prompt.truncate`";

/// A row's error, as the API has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowError {
    pub message: String,
    pub code: Option<&'static str>,
    /// The field of the request's body.
    pub param: Option<String>,
    /// Whether the request is not to blame.
    pub is_internal: bool,
}

impl RowError {
    /// Reads a row's reason. `prompt_field`: the field of the body with the prompt.
    pub fn of(reason: &str, prompt_field: &str) -> RowError {
        let error = |code, param: Option<&str>| RowError {
            // The client has no job file.
            message: reason.replacen(TRUNCATE_ADVICE, "", 1),
            code,
            param: param.map(str::to_string),
            is_internal: false,
        };
        let text = without_sample(reason);
        if text.starts_with(DEADLY_ROW) || text == DrawError::NotFinite.to_string() || text.ends_with(BUSY) {
            return RowError {
                is_internal: true,
                ..error(Some("server_error"), None)
            };
        }
        if let Some(rest) = text.strip_prefix("the prompt ") {
            let is_long =
                rest.starts_with("has ") && rest.contains("together more than") || rest.contains("model's context");
            let code = if is_long {
                "context_length_exceeded"
            } else {
                "invalid_value"
            };
            return error(Some(code), Some(prompt_field));
        }
        if let Some(name) = text.strip_prefix("unknown field ").and_then(first_name) {
            return error(Some("unknown_parameter"), Some(name));
        }
        // The engine compiles what the body has asked for in one of several fields.
        if text.starts_with("`json_schema` ") {
            return error(Some("invalid_json_schema"), None);
        }
        let named = text.strip_prefix("`body` sets ").unwrap_or(text);
        let Some(param) = first_name(named).filter(|name| openai::is_field(name)) else {
            return error(None, None);
        };
        error(Some(value_code(text)), Some(param))
    }
}

/// The code of an error about a field's value.
fn value_code(text: &str) -> &'static str {
    let has = |part: &str| text.contains(part);
    if has("no keyword of JSON Schema") {
        "invalid_json_schema"
    } else if has("in `body` is not supported") || has("which the chat template never reads") {
        "unsupported_parameter"
    } else if has("supported") {
        "unsupported_value"
    } else if has("` is missing") {
        "missing_required_parameter"
    } else if [", not a ", " is no ", " is not a ", " neither "].into_iter().any(has) {
        "invalid_type"
    } else {
        "invalid_value"
    }
}

/// A reason without the number of its sample.
fn without_sample(reason: &str) -> &str {
    let numbered = reason.strip_prefix("sample ").and_then(|rest| rest.split_once(": "));
    match numbered {
        Some((number, rest)) if number.bytes().all(|b| b.is_ascii_digit()) => rest,
        _ => reason,
    }
}

/// The name in backticks that a text begins with.
fn first_name(text: &str) -> Option<&str> {
    let (name, _) = text.strip_prefix('`')?.split_once('`')?;
    (!name.is_empty()).then_some(name)
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, Value, json};

    use super::super::file::GenerateFile;
    use super::super::generate::Generate;
    use super::*;
    use crate::engine::constraint::ConstraintError;

    fn found(reason: &str) -> (Option<&'static str>, Option<String>) {
        let error = RowError::of(reason, "messages");
        (error.code, error.param)
    }

    /// Each reason is made by the code that refuses the request.
    #[test]
    fn refusals_have_codes_and_fields() {
        let job = Generate::check(&GenerateFile::default()).unwrap();
        for (body, code, param) in [
            (json!({"tools": [{}]}), "unsupported_parameter", "tools"),
            (json!({"foo": 1}), "unknown_parameter", "foo"),
            (json!({"temprature": 1}), "unknown_parameter", "temprature"),
            (json!({"temperature": -1}), "invalid_value", "temperature"),
            (json!({"temperature": "x"}), "invalid_type", "temperature"),
            (json!({"max_tokens": 1.5}), "invalid_type", "max_tokens"),
            (json!({"logprobs": true}), "invalid_value", "logprobs"),
            (json!({"logprobs": 20}), "unsupported_value", "logprobs"),
            (json!({"n": 9}), "invalid_value", "n"),
            (
                json!({"response_format": {"type": "x"}}),
                "unsupported_value",
                "response_format.type",
            ),
            (
                json!({"response_format": {"type": "json_schema"}}),
                "invalid_type",
                "response_format.json_schema.schema",
            ),
            (json!({"guided_choice": 1}), "invalid_type", "guided_choice"),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {"schema": {"proprties": {}}}}}),
                "invalid_json_schema",
                "response_format.json_schema.schema",
            ),
            (
                json!({"max_completion_tokens": 0}),
                "invalid_value",
                "max_completion_tokens",
            ),
            (
                json!({"guided_choice": ["a"], "guided_regex": "b"}),
                "invalid_value",
                "guided_regex",
            ),
            (json!({"stop": [1]}), "invalid_type", "stop"),
        ] {
            let error = openai::generate(body.as_object().unwrap(), &job).unwrap_err();
            assert_eq!(found(&error), (Some(code), Some(param.into())), "{error}");
        }
        let prompt = |body: Value| openai::prompt(body.as_object().unwrap(), true).err().unwrap();
        for (body, code, param) in [
            (json!({}), "missing_required_parameter", "messages"),
            (json!({"messages": []}), "invalid_value", "messages"),
            (json!({"messages": "x"}), "invalid_type", "messages"),
            (json!({"messages": [3]}), "invalid_type", "messages[0]"),
            (
                json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
                "unsupported_value",
                "messages[0].content[0]",
            ),
        ] {
            let error = prompt(body);
            assert_eq!(found(&error), (Some(code), Some(param.into())), "{error}");
        }
        let nothing = openai::request_body(&Map::new()).unwrap_err();
        assert_eq!(found(&nothing), (None, None));
    }

    #[test]
    fn other_reasons_have_them_where_one_fits() {
        let long = "the prompt has 1,212 tokens, and the model's context of 128 must hold it and at least one more; \
                    shorten it or set `prompt.truncate`";
        let error = RowError::of(long, "prompt");
        assert_eq!(
            (error.code, error.param.as_deref()),
            (Some("context_length_exceeded"), Some("prompt"))
        );
        assert!(error.message.ends_with("; shorten it"), "{}", error.message);
        let sample =
            "sample 2: the prompt has 9 tokens, and an answer up to 9: together more than the KV pool's 12 tokens";
        assert_eq!(found(sample).0, Some("context_length_exceeded"));
        assert_eq!(found("the prompt has no tokens").0, Some("invalid_value"));
        assert_eq!(
            found("`body` sets `reasoning.effort`, which the chat template never reads"),
            (Some("unsupported_parameter"), Some("reasoning.effort".into()))
        );
        let schema = ConstraintError::Unsatisfiable { field: "json_schema" };
        assert_eq!(found(&schema.to_string()), (Some("invalid_json_schema"), None));
        // A field of the job file is none of the request.
        assert_eq!(found("`choice` has 10001 texts"), (None, None));
        assert_eq!(found("the chat template fails: x"), (None, None));
        let internal = RowError::of(
            "the process died three times while this row was alone on the device",
            "prompt",
        );
        assert!(internal.is_internal && internal.code == Some("server_error"));
        let busy = ConstraintError::ThreadsBusy {
            field: "json_schema",
            threads: 4,
        };
        for reason in [busy.to_string(), DrawError::NotFinite.to_string()] {
            assert!(RowError::of(&reason, "prompt").is_internal, "{reason}");
            assert!(RowError::of(&format!("sample 2: {reason}"), "prompt").is_internal);
        }
        assert!(!error.is_internal);
    }
}
