//! Bodies of OpenAI's Responses API (`/v1/responses`) as bodies of chat requests, which `openai` reads.
//!
//! One request gives one text, so what belongs to conversations that a server keeps, to tools and
//! to other kinds of content is the row's error, which names the field.

use serde_json::{Map, Value, json};

use super::openai::{IGNORED_FIELDS, says_nothing};
use super::suggest;

/// Fields that mean the same in a chat request.
const SAME_FIELDS: [&str; 18] = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "guided_choice",
    "guided_json",
    "guided_regex",
    "structured_outputs",
    "chat_template_kwargs",
    "add_generation_prompt",
    "thinking_token_budget",
];

/// Fields that this module reads, or accepts with the value that changes nothing.
const USED_FIELDS: [&str; 10] = [
    "input",
    "instructions",
    "max_output_tokens",
    "text",
    "reasoning",
    "background",
    "truncation",
    "tools",
    "tool_choice",
    "top_logprobs",
];

/// Fields of the API that would change the answer, and that a text model cannot follow.
const UNSUPPORTED_FIELDS: [&str; 6] = [
    "previous_response_id",
    "conversation",
    "prompt",
    "include",
    "max_tool_calls",
    "context_management",
];

/// Names of fields of a chat request, and where a client of this API has written them.
const NAMES: [(&str, &str); 7] = [
    ("`max_completion_tokens`", "`max_output_tokens`"),
    ("`max_tokens`", "`max_output_tokens`"),
    ("`response_format.json_schema.schema`", "`text.format.schema`"),
    ("`response_format", "`text.format"),
    ("`reasoning_effort`", "`reasoning.effort`"),
    ("`body` sets `reasoning_effort`", "`body` sets `reasoning.effort`"),
    ("`messages`", "`input`"),
];

/// Whether a body of this API has a field of this name.
pub(super) fn is_field(name: &str) -> bool {
    let known = [&SAME_FIELDS[..], &USED_FIELDS, &UNSUPPORTED_FIELDS];
    known.iter().any(|names| names.contains(&name))
}

/// The chat request that asks for the same answer.
pub(super) fn chat_body(body: &Map<String, Value>) -> Result<Map<String, Value>, String> {
    let mut chat = Map::new();
    for (name, value) in body {
        if says_nothing(value) || IGNORED_FIELDS.contains(&name.as_str()) {
            continue;
        }
        let is_supported = match name.as_str() {
            "input" | "instructions" => true,
            "max_output_tokens" => {
                chat.insert("max_completion_tokens".into(), value.clone());
                true
            }
            "text" => {
                chat.extend(text_settings(value)?);
                true
            }
            "reasoning" => {
                chat.extend(reasoning_settings(value)?);
                true
            }
            "background" => value == false,
            "truncation" => value == "disabled",
            "tool_choice" => value == "none" || value == "auto",
            "top_logprobs" => *value == 0,
            name if SAME_FIELDS.contains(&name) => {
                chat.insert(name.into(), value.clone());
                true
            }
            name if USED_FIELDS.contains(&name) || UNSUPPORTED_FIELDS.contains(&name) => false,
            name => {
                let known = SAME_FIELDS.iter().chain(&USED_FIELDS).copied();
                return Err(format!("unknown field `{name}` in `body`{}", suggest(name, known)));
            }
        };
        if !is_supported {
            return Err(format!("`{name}` in `body` is not supported"));
        }
    }
    chat.insert("messages".into(), messages(body)?.into());
    Ok(chat)
}

/// An error of the chat request in the words of this API.
pub(super) fn in_its_words(error: String) -> String {
    let (chat, own) = match NAMES.iter().find(|(chat, _)| error.starts_with(chat)) {
        Some(names) => names,
        None => return error,
    };
    error.replacen(chat, own, 1)
}

fn messages(body: &Map<String, Value>) -> Result<Vec<Value>, String> {
    let mut messages = Vec::new();
    match body.get("instructions") {
        None | Some(Value::Null) => {}
        Some(Value::String(text)) => messages.push(json!({"role": "system", "content": text})),
        Some(_) => return Err("`instructions` is no text".into()),
    }
    match body.get("input") {
        Some(Value::String(text)) => messages.push(json!({"role": "user", "content": text})),
        Some(Value::Array(items)) if !items.is_empty() => {
            for (i, item) in items.iter().enumerate() {
                messages.push(message(i, item)?);
            }
        }
        Some(Value::Array(_)) => return Err("`input` is empty".into()),
        None | Some(Value::Null) => return Err("`input` is missing".into()),
        Some(_) => return Err("`input` is neither a text nor a list of messages".into()),
    }
    Ok(messages)
}

/// An item of `input` as a chat message.
fn message(i: usize, item: &Value) -> Result<Value, String> {
    match item.get("type").filter(|kind| !kind.is_null()) {
        None => {}
        Some(kind) if kind == "message" => {}
        Some(kind) => {
            return Err(format!(
                "`input[{i}]` is of type {kind}, and only messages are supported"
            ));
        }
    }
    let role = item.get("role").and_then(Value::as_str).unwrap_or_default();
    if !["system", "developer", "user", "assistant"].contains(&role) {
        return Err(format!(
            "`input[{i}].role` is `{role}`, not `user`, `assistant`, `system` or `developer`"
        ));
    }
    let content = match item.get("content") {
        Some(Value::String(text)) => json!(text),
        Some(Value::Array(parts)) => {
            let texts = parts.iter().enumerate().map(|(j, part)| {
                let kind = part["type"].as_str().unwrap_or_default();
                match (kind, &part["text"]) {
                    ("input_text" | "output_text" | "text", Value::String(text)) => {
                        Ok(json!({"type": "text", "text": text}))
                    }
                    _ => Err(format!(
                        "`input[{i}].content[{j}]` is of type `{kind}`, and only `input_text` and `output_text` are supported"
                    )),
                }
            });
            texts.collect::<Result<Value, String>>()?
        }
        _ => return Err(format!("`input[{i}].content` is neither a text nor a list of parts")),
    };
    Ok(json!({"role": role, "content": content}))
}

/// The fields of a chat request for `text`: the form of the answer.
fn text_settings(text: &Value) -> Result<Map<String, Value>, String> {
    let Value::Object(text) = text else {
        return Err("`text` is no object".into());
    };
    let mut fields = Map::new();
    for (name, value) in text.iter().filter(|(_, value)| !value.is_null()) {
        if name != "format" {
            return Err(format!("`text.{name}` is not supported"));
        }
        let format = match value["type"].as_str() {
            Some("json_schema") => json!({"type": "json_schema", "json_schema": {"schema": value["schema"]}}),
            _ => value.clone(),
        };
        fields.insert("response_format".into(), format);
    }
    Ok(fields)
}

/// The fields of a chat request for `reasoning`.
fn reasoning_settings(reasoning: &Value) -> Result<Map<String, Value>, String> {
    let Value::Object(reasoning) = reasoning else {
        return Err("`reasoning` is no object".into());
    };
    let mut fields = Map::new();
    for (name, value) in reasoning.iter().filter(|(_, value)| !value.is_null()) {
        if name != "effort" {
            return Err(format!("`reasoning.{name}` is not supported"));
        }
        fields.insert("reasoning_effort".into(), value.clone());
    }
    Ok(fields)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chat(body: Value) -> Result<Value, String> {
        chat_body(body.as_object().unwrap()).map(Value::Object)
    }

    #[test]
    fn requests_have_an_equal_chat_request() {
        let body = json!({
            "model": "m", "instructions": "Sort.", "input": "Refund", "max_output_tokens": 5, "temperature": 0, "store": true,
            "tools": [], "tool_choice": "auto", "background": false, "truncation": "disabled", "metadata": {"a": "b"},
            "reasoning": {"effort": "low", "summary": null}, "previous_response_id": null, "top_logprobs": 0,
            "text": {"format": {"type": "json_schema", "name": "x", "strict": true, "schema": {"type": "object"}}},
        });
        let expected = json!({
            "messages": [{"role": "system", "content": "Sort."}, {"role": "user", "content": "Refund"}],
            "max_completion_tokens": 5, "temperature": 0, "reasoning_effort": "low",
            "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
        });
        assert_eq!(chat(body), Ok(expected));
        let input = json!([
            {"role": "developer", "content": "a"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "b"}]},
            {"type": "message", "role": "assistant", "id": "msg_1", "content": [{"type": "output_text", "text": "c", "annotations": []}]},
        ]);
        let messages = json!([
            {"role": "developer", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "b"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "c"}]},
        ]);
        assert_eq!(chat(json!({"input": input})), Ok(json!({"messages": messages})));
        let plain = json!({"input": "x", "text": {"format": {"type": "text"}}});
        assert_eq!(chat(plain).unwrap()["response_format"], json!({"type": "text"}));
    }

    #[test]
    fn what_has_no_chat_request_is_named() {
        for (fields, message) in [
            (json!({"input": null}), "`input` is missing"),
            (json!({"input": []}), "`input` is empty"),
            (json!({"input": 3}), "`input` is neither"),
            (
                json!({"input": [{"type": "reasoning"}]}),
                "`input[0]` is of type \"reasoning\"",
            ),
            (json!({"input": ["x"]}), "`input[0].role` is ``"),
            (
                json!({"input": [{"role": "tool", "content": "x"}]}),
                "`input[0].role` is `tool`",
            ),
            (json!({"input": [{"role": "user"}]}), "`input[0].content` is neither"),
            (
                json!({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
                "`input[0].content[0]` is of type `input_image`",
            ),
            (json!({"instructions": 1}), "`instructions` is no text"),
            (
                json!({"tools": [{"type": "web_search"}]}),
                "`tools` in `body` is not supported",
            ),
            (
                json!({"previous_response_id": "resp_1"}),
                "`previous_response_id` in `body`",
            ),
            (json!({"conversation": "c"}), "`conversation` in `body`"),
            (json!({"background": true}), "`background` in `body`"),
            (json!({"truncation": "auto"}), "`truncation` in `body`"),
            (json!({"top_logprobs": 2}), "`top_logprobs` in `body`"),
            (
                json!({"text": {"verbosity": "low"}}),
                "`text.verbosity` is not supported",
            ),
            (
                json!({"reasoning": {"summary": "auto"}}),
                "`reasoning.summary` is not supported",
            ),
            (json!({"max_tokens": 3}), "unknown field `max_tokens` in `body`"),
            (json!({"messages": []}), ""),
            (json!({"messages": [1]}), "unknown field `messages`"),
        ] {
            let mut body = json!({"input": "x"});
            body.as_object_mut()
                .unwrap()
                .extend(fields.as_object().unwrap().clone());
            match chat(body) {
                Ok(_) => assert_eq!(message, "", "{fields}"),
                Err(error) => assert!(!message.is_empty() && error.starts_with(message), "{fields}: {error}"),
            }
        }
    }

    #[test]
    fn errors_name_what_the_client_wrote() {
        let own = |error: &str| in_its_words(error.into());
        assert_eq!(
            own("`max_tokens` is 0; it must be"),
            "`max_output_tokens` is 0; it must be"
        );
        assert_eq!(own("`response_format.type` is 3"), "`text.format.type` is 3");
        assert_eq!(
            own("`response_format.json_schema.schema` is no object"),
            "`text.format.schema` is no object"
        );
        assert_eq!(
            own("`body` sets `reasoning_effort`, which the chat template never reads"),
            "`body` sets `reasoning.effort`, which the chat template never reads"
        );
        assert_eq!(own("`temperature` is -1"), "`temperature` is -1");
        assert_eq!(own("the prompt has `max_tokens`"), "the prompt has `max_tokens`");
    }
}
