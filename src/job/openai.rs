//! Lines of OpenAI batch files: prompts and generation parameters from their bodies.
//!
//! Every field of a body is used or has no effect on the answer; any other field is the row's error,
//! which names it. `model` is ignored, since the job's model answers. `n` and `logprobs` must equal
//! the job's, since results have the same columns in all rows.

use std::borrow::Cow;

use serde_json::{Map, Value};

use super::chat::Turn;
use super::closed_schema::closed;
use super::file::{GenerateFile, OneOrMany, Role};
use super::generate::Generate;
use super::responses;
use super::suggest;
use super::thinking::{ThinkingFile, ThinkingSettings};

/// Fields that have no effect on the answer, in requests of any endpoint.
pub(super) const IGNORED_FIELDS: [&str; 13] = [
    "model",
    "user",
    "metadata",
    "store",
    "stream",
    "stream_options",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "parallel_tool_calls",
    "priority",
    "request_id",
];

/// Fields that this module reads, or accepts with the value that changes nothing.
const USED_FIELDS: [&str; 35] = [
    "messages",
    "prompt",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "n",
    "logprobs",
    "top_logprobs",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "response_format",
    "guided_choice",
    "guided_json",
    "guided_regex",
    "structured_outputs",
    "chat_template_kwargs",
    "reasoning_effort",
    "echo",
    "best_of",
    "suffix",
    "tool_choice",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "modalities",
    "thinking_token_budget",
    "prediction",
];

/// Fields that are refused whatever they hold, unless they say nothing.
const UNSUPPORTED_FIELDS: [&str; 7] = [
    "tools",
    "functions",
    "function_call",
    "logit_bias",
    "audio",
    "web_search_options",
    "verbosity",
];

/// Whether a name is that of a field of a body, or of a value within it, such as `messages[0].role`.
pub(super) fn is_field(name: &str) -> bool {
    let field = name.split(['.', '[']).next().unwrap_or_default();
    let known = [&USED_FIELDS[..], &IGNORED_FIELDS, &UNSUPPORTED_FIELDS];
    known.iter().any(|names| names.contains(&field)) || responses::is_field(field)
}

/// Fields that only chat requests may have: they concern the chat template.
const CHAT_FIELDS: [&str; 4] = [
    "chat_template_kwargs",
    "reasoning_effort",
    "add_generation_prompt",
    "continue_final_message",
];

/// The prompt of a line.
pub(super) enum LinePrompt {
    Chat {
        messages: Vec<Value>,
        kwargs: Map<String, Value>,
        /// `None`: the job's setting.
        turn: Option<Turn>,
    },
    Text(String),
    Tokens(Vec<Value>),
}

/// The endpoint that a line is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Endpoint {
    ChatCompletions,
    Completions,
    Responses,
}

/// The body of a line. That of a response is the body of an equal chat request.
#[derive(Debug)]
pub(super) struct RequestBody<'a> {
    pub fields: Cow<'a, Map<String, Value>>,
    pub endpoint: Endpoint,
}

impl RequestBody<'_> {
    pub(super) fn is_chat(&self) -> bool {
        self.endpoint != Endpoint::Completions
    }
}

/// Checks the fields around a line's body, and returns the body.
pub(super) fn request_body(fields: &Map<String, Value>) -> Result<RequestBody<'_>, String> {
    if let Some(method) = fields
        .get("method")
        .filter(|method| !method.is_null() && *method != "POST")
    {
        return Err(format!("`method` is {method}, and only \"POST\" is supported"));
    }
    let Some(Value::Object(body)) = fields.get("body") else {
        return Err("the line has no `body` object".into());
    };
    let endpoint = match fields.get("url").and_then(Value::as_str) {
        Some("/v1/chat/completions") => Endpoint::ChatCompletions,
        Some("/v1/completions") => Endpoint::Completions,
        Some("/v1/responses") => Endpoint::Responses,
        Some(other) => {
            return Err(format!(
                "`url` is `{other}`; supported are `/v1/chat/completions`, `/v1/completions` and `/v1/responses`"
            ));
        }
        None if body.contains_key("messages") => Endpoint::ChatCompletions,
        None => Endpoint::Completions,
    };
    let fields = match endpoint {
        Endpoint::Responses => Cow::Owned(responses::chat_body(body)?),
        Endpoint::ChatCompletions | Endpoint::Completions => Cow::Borrowed(body),
    };
    Ok(RequestBody { fields, endpoint })
}

/// The prompt of a body.
pub(super) fn prompt(body: &Map<String, Value>, is_chat: bool) -> Result<LinePrompt, String> {
    if !is_chat {
        let chat_field = CHAT_FIELDS
            .into_iter()
            .find(|name| body.get(*name).is_some_and(|value| !value.is_null()));
        if let Some(name) = chat_field {
            return Err(format!(
                "`{name}` in `body` is for chat completions; a completion uses no chat template"
            ));
        }
        return match body.get("prompt") {
            Some(Value::String(text)) => Ok(LinePrompt::Text(text.clone())),
            Some(Value::Array(items)) if items.iter().all(Value::is_number) => Ok(LinePrompt::Tokens(items.clone())),
            Some(Value::Array(items)) if items.len() == 1 && items[0].is_string() => {
                Ok(LinePrompt::Text(items[0].as_str().unwrap_or_default().to_string()))
            }
            Some(Value::Array(_)) => Err("`prompt` is a list of prompts; a line takes one".into()),
            None | Some(Value::Null) => Err("`prompt` is missing".into()),
            Some(_) => Err("`prompt` is neither a text nor token ids".into()),
        };
    }
    let items = match body.get("messages") {
        Some(Value::Array(items)) if !items.is_empty() => items,
        Some(Value::Array(_)) => return Err("`messages` is empty".into()),
        None | Some(Value::Null) => return Err("`messages` is missing".into()),
        Some(_) => return Err("`messages` is no list".into()),
    };
    let messages = items
        .iter()
        .enumerate()
        .map(|(i, item)| message(i, item))
        .collect::<Result<Vec<_>, _>>()?;
    let mut kwargs = match body.get("chat_template_kwargs") {
        Some(Value::Object(kwargs)) if kwargs.contains_key("messages") => {
            return Err("`chat_template_kwargs` cannot set `messages`".into());
        }
        Some(Value::Object(kwargs)) => kwargs.clone(),
        None | Some(Value::Null) => Map::new(),
        Some(_) => return Err("`chat_template_kwargs` is no object".into()),
    };
    if let Some(effort) = body.get("reasoning_effort").filter(|effort| !effort.is_null()) {
        kwargs.insert("reasoning_effort".into(), effort.clone());
    }
    let turn = Turn::from_switches(Turn::SWITCHES.map(|name| body.get(name)), &kwargs)
        .map_err(|why| format!("`body` {why}"))?;
    Ok(LinePrompt::Chat { messages, kwargs, turn })
}

/// Checks one message and converts it to the form that chat templates expect.
fn message(i: usize, item: &Value) -> Result<Value, String> {
    let Value::Object(item) = item else {
        return Err(format!("`messages[{i}]` is no object"));
    };
    let role = item.get("role").and_then(Value::as_str).unwrap_or_default();
    if Role::from_name(role).is_none() {
        let known = ["system", "developer", "user", "assistant", "tool"];
        return Err(format!("`messages[{i}].role` is `{role}`{}", suggest(role, known)));
    }
    let has_calls = item.get("tool_calls").is_some_and(Value::is_array);
    match item.get("content") {
        Some(Value::String(_)) => {}
        Some(Value::Array(parts)) => {
            for (j, part) in parts.iter().enumerate() {
                let kind = part["type"].as_str().unwrap_or_default();
                if kind != "text" || !part["text"].is_string() {
                    return Err(format!(
                        "`messages[{i}].content[{j}]` is of type `{kind}`, and only `text` is supported"
                    ));
                }
            }
        }
        None | Some(Value::Null) if has_calls => {}
        _ => return Err(format!("`messages[{i}].content` is neither a text nor a list of parts")),
    }
    let mut item = item.clone();
    // Chat templates expect a call's arguments as an object instead of as JSON text.
    for call in item
        .get_mut("tool_calls")
        .and_then(Value::as_array_mut)
        .into_iter()
        .flatten()
    {
        if let Some(arguments) = call.pointer_mut("/function/arguments") {
            let parsed = arguments
                .as_str()
                .and_then(|text| serde_json::from_str::<Map<String, Value>>(text).ok());
            if let Some(parsed) = parsed {
                *arguments = Value::Object(parsed);
            }
        }
    }
    Ok(Value::Object(item))
}

/// The generation parameters of a body; `job` gives the defaults.
pub(super) fn generate(body: &Map<String, Value>, job: &Generate) -> Result<Generate, String> {
    let fields = Fields(body);
    check_fields(body)?;
    let mut file = job.to_file();
    replace_if_some(&mut file.max_tokens, fields.integer("max_tokens")?);
    replace_if_some(&mut file.max_tokens, fields.integer("max_completion_tokens")?);
    replace_if_some(&mut file.temperature, fields.number("temperature")?);
    replace_if_some(&mut file.top_p, fields.number("top_p")?);
    replace_if_some(&mut file.min_p, fields.number("min_p")?);
    replace_if_some(&mut file.repetition_penalty, fields.number("repetition_penalty")?);
    replace_if_some(&mut file.presence_penalty, fields.number("presence_penalty")?);
    replace_if_some(&mut file.frequency_penalty, fields.number("frequency_penalty")?);
    // For some servers, -1 means no limit.
    replace_if_some(
        &mut file.top_k,
        fields.integer("top_k")?.map(|k| if k == -1 { 0 } else { k }),
    );
    replace_if_some(&mut file.seed, fields.seed()?);
    replace_if_some(&mut file.ignore_eos, fields.flag("ignore_eos")?);
    replace_if_some(
        &mut file.stop,
        fields.read::<OneOrMany>("stop", "a text or a list of texts")?,
    );
    replace_if_some(
        &mut file.stop_token_ids,
        fields.read("stop_token_ids", "a list of token ids")?,
    );
    set_thought_limit(fields.integer("thinking_token_budget")?, &mut file)?;
    let logprobs = match body.get("logprobs") {
        None | Some(Value::Null) => job.logprobs,
        Some(Value::Bool(requested)) => *requested,
        // The value of a completion request is the number of alternatives per token; only the
        // chosen token's log probability is available.
        Some(Value::Number(count)) if count.as_u64().is_some_and(|n| n <= 1) => true,
        Some(other) => {
            return Err(format!(
                "`logprobs` is {other}; log probabilities of other tokens are not supported"
            ));
        }
    };
    // All rows of the results have this column, or none has. The same holds for lists of samples.
    if logprobs != job.logprobs {
        return Err(format!(
            "`logprobs` is {}, but `generate.logprobs` of all rows is {}; they must agree",
            body["logprobs"], job.logprobs
        ));
    }
    if let Some(n) = fields.integer("n")?
        && n != i64::from(job.n)
    {
        return Err(format!(
            "`n` is {n}, but `generate.n` of all rows is {}; they must agree",
            job.n
        ));
    }
    replace_constraint(body, &mut file)?;
    let checked = Generate::check(&file).map_err(|error| in_its_words(body, error.to_string()))?;
    Ok(checked.with_job_values(job))
}

/// Fields of a job file, and those of a body that set them. The first one that is there has set it.
const JOB_NAMES: [(&str, &[&str]); 5] = [
    ("`max_tokens`", &["max_completion_tokens"]),
    ("`thinking.max_tokens`", &["thinking_token_budget"]),
    ("`choice`", &["guided_choice", "structured_outputs.choice"]),
    (
        "`json_schema`",
        &[
            "response_format.json_schema.schema",
            "guided_json",
            "structured_outputs.json",
        ],
    ),
    ("`regex`", &["guided_regex", "structured_outputs.regex"]),
];

/// An error of a check that a job file's fields have, too, with the name that the body has for the
/// field.
pub(super) fn in_its_words(body: &Map<String, Value>, error: String) -> String {
    let Some((name, fields)) = JOB_NAMES.iter().find(|(name, _)| error.starts_with(name)) else {
        return error;
    };
    let is_given = |field: &&&str| {
        let field = field.split('.').next().unwrap_or_default();
        body.get(field).is_some_and(|value| !value.is_null())
    };
    match fields.iter().find(is_given) {
        Some(field) => error.replacen(name, &format!("`{field}`"), 1),
        None => error,
    }
}

/// Sets the maximum tokens of a thought from vLLM's `thinking_token_budget`; -1 means no limit.
fn set_thought_limit(tokens: Option<i64>, file: &mut GenerateFile) -> Result<(), String> {
    let Some(tokens) = tokens else { return Ok(()) };
    let mut settings = match file.thinking.take() {
        None | Some(ThinkingFile::Switch(true)) => ThinkingSettings::default(),
        Some(ThinkingFile::Settings(settings)) => settings,
        Some(ThinkingFile::Switch(false)) => {
            return Err("`thinking_token_budget` needs a job whose `generate.thinking` is not false".into());
        }
    };
    settings.max_tokens = (tokens != -1).then_some(tokens);
    if settings.max_tokens.is_none() {
        settings.end_text = None;
    }
    file.thinking = Some(ThinkingFile::Settings(settings));
    Ok(())
}

/// Whether a field is there without a value.
pub(super) fn says_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    }
}

/// Refuses unsupported fields by name.
fn check_fields(body: &Map<String, Value>) -> Result<(), String> {
    for (name, value) in body {
        if says_nothing(value) || IGNORED_FIELDS.contains(&name.as_str()) {
            continue;
        }
        let is_supported = match name.as_str() {
            name if UNSUPPORTED_FIELDS.contains(&name) => false,
            "echo" => value == false,
            "best_of" => *value == 1,
            "suffix" => value == "",
            "modalities" => *value == serde_json::json!(["text"]),
            "tool_choice" => value == "none" || value == "auto",
            "top_logprobs" => *value == 0,
            "add_special_tokens" => value == true,
            name if USED_FIELDS.contains(&name) => true,
            name => return Err(format!("unknown field `{name}` in `body`{}", field_hint(name))),
        };
        if !is_supported {
            return Err(format!("`{name}` in `body` is not supported"));
        }
    }
    Ok(())
}

/// The end of the message about an unknown field: a similar known field, if any.
fn field_hint(name: &str) -> String {
    suggest(name, USED_FIELDS.iter().chain(&IGNORED_FIELDS).copied())
}

/// Replaces the job's output constraint by the body's, if the body has one.
fn replace_constraint(body: &Map<String, Value>, file: &mut GenerateFile) -> Result<(), String> {
    let mut constraints: Vec<(&str, GenerateFile)> = Vec::new();
    if let Some(format) = body.get("response_format").filter(|format| !format.is_null()) {
        constraints.push(("response_format", response_format(format)?));
    }
    let mut add_constraint = |name: &'static str, kind: &str, value: &Value| -> Result<(), String> {
        let mut constraint = GenerateFile::default();
        match (kind, value) {
            ("choice", value) => {
                let choices = serde_json::from_value(value.clone());
                constraint.choice = Some(choices.map_err(|_| format!("`{name}` is no list of texts"))?);
            }
            ("regex", Value::String(regex)) => constraint.regex = Some(regex.clone()),
            ("json", Value::Object(_)) => constraint.json_schema = Some(closed(value.clone())),
            ("json", Value::String(text)) => {
                let schema = serde_json::from_str(text).map_err(|e| format!("`{name}` is no JSON: {e}"))?;
                constraint.json_schema = Some(closed(schema));
            }
            _ => return Err(format!("`{name}` asks for `{kind}` in a form that is not supported")),
        }
        constraints.push((name, constraint));
        Ok(())
    };
    for (name, kind) in [
        ("guided_choice", "choice"),
        ("guided_json", "json"),
        ("guided_regex", "regex"),
    ] {
        if let Some(value) = body.get(name).filter(|value| !value.is_null()) {
            add_constraint(name, kind, value)?;
        }
    }
    match body.get("structured_outputs") {
        None | Some(Value::Null) => {}
        Some(Value::Object(kinds)) => {
            for (kind, value) in kinds.iter().filter(|(_, value)| !value.is_null()) {
                add_constraint("structured_outputs", kind, value)?;
            }
        }
        Some(_) => return Err("`structured_outputs` is no object".into()),
    }
    if let [(first, _), (second, _), ..] = &constraints[..] {
        return Err(format!(
            "`{second}` cannot stand beside `{first}`: an answer has one shape"
        ));
    }
    if let Some((_, constraint)) = constraints.pop() {
        if constraint.choice.is_some() {
            // The job's stops, for free answers, do not apply to a choice. A line's own stops
            // remain, so that the checks refuse them beside a choice.
            let given = |name: &str| body.get(name).is_some_and(|value| !value.is_null());
            file.stop.take_if(|_| !given("stop"));
            file.stop_token_ids.take_if(|_| !given("stop_token_ids"));
            file.ignore_eos.take_if(|_| !given("ignore_eos"));
        }
        file.choice = constraint.choice;
        file.choice_probabilities = None;
        file.json_schema = constraint.json_schema;
        file.regex = constraint.regex;
    }
    Ok(())
}

fn response_format(format: &Value) -> Result<GenerateFile, String> {
    let json_schema = match format["type"].as_str() {
        Some("text") => None,
        Some("json_object") => Some(serde_json::json!({"type": "object"})),
        Some("json_schema") => {
            let schema = format["json_schema"]["schema"].clone();
            if !schema.is_object() {
                return Err("`response_format.json_schema.schema` is no object".into());
            }
            Some(closed(schema))
        }
        _ => {
            return Err(format!(
                "`response_format.type` is {}, which is not supported",
                format["type"]
            ));
        }
    };
    Ok(GenerateFile {
        json_schema,
        ..Default::default()
    })
}

fn replace_if_some<T>(slot: &mut Option<T>, value: Option<T>) {
    if value.is_some() {
        *slot = value;
    }
}

/// A whole number; `100.0` is one, too.
pub(crate) fn whole_number(value: &Value) -> Option<i64> {
    let float = || {
        value
            .as_f64()
            .filter(|v| v.fract() == 0.0 && v.abs() < 9e15)
            .map(|v| v as i64)
    };
    value.as_i64().or_else(float)
}

/// Typed access to a body; null counts as missing.
struct Fields<'a>(&'a Map<String, Value>);

impl Fields<'_> {
    fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    fn integer(&self, name: &str) -> Result<Option<i64>, String> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match whole_number(value) {
            Some(integer) => Ok(Some(integer)),
            None => Err(format!("`{name}` is {value}, not a whole number")),
        }
    }

    /// Any 64-bit whole number; a negative number counts as the unsigned number with the same bits.
    fn seed(&self) -> Result<Option<u64>, String> {
        match self.get("seed").and_then(Value::as_u64) {
            Some(seed) => Ok(Some(seed)),
            None => Ok(self.integer("seed")?.map(|seed| seed as u64)),
        }
    }

    fn number(&self, name: &str) -> Result<Option<f64>, String> {
        let Some(value) = self.get(name) else { return Ok(None) };
        value
            .as_f64()
            .map(Some)
            .ok_or_else(|| format!("`{name}` is {value}, not a number"))
    }

    fn flag(&self, name: &str) -> Result<Option<bool>, String> {
        let Some(value) = self.get(name) else { return Ok(None) };
        value
            .as_bool()
            .map(Some)
            .ok_or_else(|| format!("`{name}` is {value}, neither true nor false"))
    }

    fn read<T: serde::de::DeserializeOwned>(&self, name: &str, form: &str) -> Result<Option<T>, String> {
        let Some(value) = self.get(name) else { return Ok(None) };
        serde_json::from_value(value.clone())
            .map(Some)
            .map_err(|_| format!("`{name}` is not {form}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// A line is checked like a job's own `generate` block.
    #[test]
    fn lines_are_checked_like_jobs() {
        let job = Generate::check(&GenerateFile::default()).unwrap();
        let labels = |count: usize| -> Vec<String> { (0..count).map(|i| format!("label {i}")).collect() };
        let long =
            |count: usize| -> Vec<String> { (0..count).map(|i| format!("{i} {}", "x".repeat(15_000))).collect() };
        for (body, message) in [
            (
                json!({"n": 4_000_000_000_u64}),
                "`n` is 4000000000, but `generate.n` of all rows is 1",
            ),
            (json!({"n": 0}), "`n` is 0"),
            (
                json!({"max_tokens": 0}),
                "`max_tokens` is 0; it must be from 1 to 1048576",
            ),
            (
                json!({"max_completion_tokens": 1_u64 << 40}),
                "must be from 1 to 1048576",
            ),
            (json!({"max_tokens": 1.5}), "not a whole number"),
            (json!({"logprobs": true}), "must agree"),
            (json!({"logprobs": 20}), "not supported"),
            (
                json!({"temperature": -0.1}),
                "`temperature` is -0.1; it must be from 0 to 100",
            ),
            (json!({"top_p": 0}), "`top_p` is 0"),
            (json!({"min_p": 1.1}), "`min_p` is 1.1"),
            (json!({"top_k": -2}), "`top_k` is -2"),
            (
                json!({"repetition_penalty": 0}),
                "`repetition_penalty` is 0; it must be from 0.01 to 100",
            ),
            (json!({"frequency_penalty": 1e300}), "`frequency_penalty`"),
            (json!({"seed": 0.5}), "`seed` is 0.5"),
            (json!({"stop": vec!["x"; 65]}), "`stop` has 65 entries, more than 64"),
            (
                json!({"stop": vec!["y".repeat(100); 41]}),
                "`stop` has 4100 bytes together, more than 4096",
            ),
            (json!({"stop": ""}), "holds an empty text"),
            (
                json!({"stop_token_ids": vec![1; 65]}),
                "`stop_token_ids` has 65 entries",
            ),
            (json!({"stop_token_ids": [-1]}), "is not a list of token ids"),
            (json!({"max_completion_tokens": 0}), "`max_completion_tokens` is 0"),
            (
                json!({"guided_choice": labels(10_001)}),
                "`guided_choice` has 10001 texts",
            ),
            (
                json!({"structured_outputs": {"choice": []}}),
                "`structured_outputs.choice` has 0 texts",
            ),
            (json!({"guided_regex": ""}), "`guided_regex` is empty"),
            (json!({"guided_choice": long(70)}), "bytes together, more than 1048576"),
            (json!({"guided_choice": ["a", "a"]}), "holds `a` twice"),
            (
                json!({"guided_choice": ["a"], "stop": "b"}),
                "cannot stand beside `choice`",
            ),
        ] {
            let error = generate(body.as_object().unwrap(), &job).unwrap_err();
            assert!(error.contains(message) && !error.contains('\n'), "{message}: {error}");
        }
        let stops = json!({"stop": vec!["y".repeat(64); 64], "n": 1, "logprobs": false, "top_k": -1});
        assert!(generate(stops.as_object().unwrap(), &job).is_ok());
    }

    /// A name as long as the whole line is not compared with known names.
    #[test]
    fn long_names_are_refused_quickly() {
        let began = std::time::Instant::now();
        let name = "t".repeat(4 << 20);
        assert_eq!(
            suggest(&name, ["tools", "temperature"]),
            "; known are `tools`, `temperature`"
        );
        assert!(suggest("temprature", ["tools", "temperature"]).contains("did you mean `temperature`"));
        assert!(message(0, &json!({"role": name, "content": ""})).is_err());
        assert!(began.elapsed() < std::time::Duration::from_secs(5));
    }
}
