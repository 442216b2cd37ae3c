//! The checkpoint's chat template: its selection, and the rendering of conversations.

use chrono::NaiveDateTime;
use serde_json::{Map, Value, json};

use super::spec::ChatTemplateChoice;
use super::suggest;
use super::template::Template;
use crate::tokenizer::{Tokenizer, TokenizerConfig};

/// A text that no template produces by itself.
const PROBE: &str = "gristmill probe text";

/// Marker that is appended to the content to be continued, and shows where the rendering continues.
/// The space at its end shows whether the template keeps spaces there. The marker is as long as
/// transformers' own, since some templates count characters.
const CONTINUATION_MARKER: &str = "GRISTMILL_CONTINUES_BEHIND ";

/// How a rendered conversation ends. The names in the variants' docs are those of transformers'
/// `apply_chat_template`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// `add_generation_prompt`: opens the model's turn. This is the default.
    Generate,
    /// Neither flag: ends with the last message, as the template closes it.
    Closed,
    /// `continue_final_message`: ends right after the last message's content.
    Continue,
}

impl Turn {
    /// The names of the two fields that set the turn; `chat_template_kwargs` may have them, too.
    pub const SWITCHES: [&str; 2] = ["add_generation_prompt", "continue_final_message"];

    /// The turn that `fields` (the values of [`Turn::SWITCHES`]) and `kwargs` set; `None` if neither
    /// sets one. The error continues the name of the enclosing block.
    pub fn from_switches(fields: [Option<&Value>; 2], kwargs: &Map<String, Value>) -> Result<Option<Turn>, String> {
        let mut switches = [None; 2];
        for (i, name) in Turn::SWITCHES.into_iter().enumerate() {
            for value in [fields[i], kwargs.get(name)].into_iter().flatten() {
                match (value, switches[i]) {
                    (Value::Null, _) => {}
                    (Value::Bool(flag), Some(other)) if *flag != other => {
                        return Err(format!("sets `{name}` to true and to false"));
                    }
                    (Value::Bool(flag), _) => switches[i] = Some(*flag),
                    _ => return Err(format!("sets `{name}` to {value}, neither true nor false")),
                }
            }
        }
        match switches {
            [None, None] => Ok(None),
            [Some(true), Some(true)] => Err(
                "sets both `add_generation_prompt` and `continue_final_message`: the model \
                                             either begins a turn of its own or continues the last message"
                    .into(),
            ),
            [_, Some(true)] => Ok(Some(Turn::Continue)),
            [Some(false), _] => Ok(Some(Turn::Closed)),
            _ => Ok(Some(Turn::Generate)),
        }
    }
}

/// A chat template, ready to render.
pub struct ChatTemplate {
    template: Template,
    source: String,
    /// `bos_token`, `eos_token`, …: the variables that transformers sets.
    tokens: Map<String, Value>,
    /// Whether the template accepts contents that are lists of parts; else parts are joined to one
    /// text.
    accepts_parts: bool,
}

/// Texts by which a chat template's form is known, and the form's name. The first one that a
/// template's source holds decides: some templates mention other forms' texts, too.
const FORMS: [(&str, &str); 11] = [
    ("<|start_header_id|>", "Llama 3"),
    ("<|im_start|>", "ChatML"),
    ("<start_of_turn>", "Gemma"),
    ("<|channel|>", "Harmony"),
    ("[SYSTEM_PROMPT]", "Mistral with system prompts"),
    ("[INST]", "Llama 2 or Mistral"),
    ("<｜Assistant｜>", "DeepSeek"),
    ("<|START_OF_TURN_TOKEN|>", "Command R"),
    ("<|start_of_role|>", "Granite"),
    ("[gMASK]", "GLM"),
    ("<|assistant|>", "roles as tokens (Phi 3, Zephyr)"),
];

/// The name of the form of conversations that a chat template writes. `None`: it is no known one.
pub fn form_of(source: &str) -> Option<&'static str> {
    FORMS
        .iter()
        .find(|(mark, _)| source.contains(mark))
        .map(|(_, name)| *name)
}

impl ChatTemplate {
    /// Selects and compiles the template: the job's choice, else `tool_use` if the checkpoint has
    /// it and the job gives tools, else `default`. `now` is the time that `strftime_now` returns.
    ///
    /// The error is one line without a location.
    pub fn choose(
        config: &TokenizerConfig,
        choice: Option<&ChatTemplateChoice>,
        has_tools: bool,
        now: NaiveDateTime,
    ) -> Result<ChatTemplate, String> {
        let names = || config.chat_templates.iter().map(|t| t.name.as_str());
        let source = match choice {
            Some(ChatTemplateChoice::Source(source)) => source.clone(),
            Some(ChatTemplateChoice::Named(name)) => match config.chat_template(name) {
                Some(source) => source.to_string(),
                None => {
                    let hint = suggest(name, names());
                    return Err(format!("the checkpoint has no chat template named `{name}`{hint}"));
                }
            },
            None => {
                let tools = config.chat_template("tool_use").filter(|_| has_tools);
                match tools.or(config.chat_template("default")) {
                    Some(source) => source.to_string(),
                    None if config.chat_templates.is_empty() => {
                        return Err(
                            "the checkpoint has no chat template: give `prompt.chat_template`, or use \
                                    `prompt.text`"
                                .into(),
                        );
                    }
                    None => {
                        let names = names().collect::<Vec<_>>().join("`, `");
                        return Err(format!(
                            "the checkpoint has no default chat template: set `prompt.chat_template` to one of `{names}`"
                        ));
                    }
                }
            }
        };
        ChatTemplate::compile(config, source, now)
    }

    fn compile(config: &TokenizerConfig, source: String, now: NaiveDateTime) -> Result<ChatTemplate, String> {
        let template = Template::for_chat("chat_template", &source, now).map_err(|e| format!("chat template: {e}"))?;
        let token_variables = [
            ("bos_token", &config.bos_token),
            ("eos_token", &config.eos_token),
            ("unk_token", &config.unk_token),
            ("pad_token", &config.pad_token),
        ];
        let tokens = token_variables
            .into_iter()
            .filter_map(|(name, token)| Some((name.to_string(), Value::from(token.clone()?))))
            .collect();
        let mut chat = ChatTemplate {
            template,
            source,
            tokens,
            accepts_parts: false,
        };
        let parts = json!([{"role": "user", "content": [{"type": "text", "text": PROBE}]}]);
        chat.accepts_parts = chat.render_with(parts, &Map::new(), true).is_ok_and(|text| {
            // A template that expects texts prints the whole list, or nothing.
            text.contains(PROBE) && !text.contains("'type'") && !text.contains("\"type\"")
        });
        Ok(chat)
    }

    /// The template's source.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders a conversation up to the model's answer. `kwargs` are further template variables.
    pub fn render(&self, mut messages: Vec<Value>, kwargs: &Map<String, Value>, turn: Turn) -> Result<String, String> {
        for message in &mut messages {
            self.adapt_message(message);
        }
        let marked_content = match turn {
            Turn::Continue => Some(append_marker(&mut messages)?),
            Turn::Generate | Turn::Closed => None,
        };
        let text = self
            .render_with(Value::Array(messages), kwargs, turn == Turn::Generate)
            .map_err(|e| format!("chat template: {e}"))?;
        match marked_content {
            Some(content) => cut_at_marker(text, &content),
            None => Ok(text),
        }
    }

    /// Why the template cannot use `kwargs`, if it cannot. The text continues the field's name.
    pub fn kwargs_error(&self, kwargs: &Map<String, Value>) -> Option<String> {
        let reads = self.template.variables_read();
        for name in kwargs.keys() {
            if self.template.has_function(name) {
                return Some(format!("sets `{name}`, which is a function of chat templates"));
            }
            if !reads.contains(name) && !Turn::SWITCHES.contains(&name.as_str()) {
                let is_standard = |name: &str| name == "messages" || self.tokens.contains_key(name);
                let known = reads.iter().map(String::as_str).filter(|name| !is_standard(name));
                let hint = suggest(name, known.filter(|name| !self.template.has_function(name)));
                return Some(format!("sets `{name}`, which the chat template never reads{hint}"));
            }
        }
        None
    }

    /// A message about a variable that the template reads, that nothing sets, and whose name is
    /// similar to a standard variable. `kwargs` are the job's.
    pub fn misspelling_message(&self, kwargs: &Map<String, Value>) -> Option<String> {
        const STANDARD_VARIABLES: [&str; 8] = [
            "messages",
            "tools",
            "documents",
            "add_generation_prompt",
            "bos_token",
            "eos_token",
            "unk_token",
            "pad_token",
        ];
        let reads = self.template.variables_read();
        let is_set = |name: &str| {
            STANDARD_VARIABLES.contains(&name) || kwargs.contains_key(name) || self.template.has_function(name)
        };
        reads.iter().filter(|name| !is_set(name)).find_map(|name| {
            let hint = suggest(name, STANDARD_VARIABLES);
            hint.contains("did you mean")
                .then(|| format!("it reads `{name}`, which nobody sets{hint}"))
        })
    }

    /// Messages about unknown filters, tests, methods and functions, one line each.
    pub fn unknown_name_messages(&self) -> Vec<String> {
        self.template.unknown_name_messages()
    }

    /// Whether the template can put the date into prompts.
    pub fn shows_date(&self) -> bool {
        self.template.calls("strftime_now")
    }

    fn render_with(
        &self,
        messages: Value,
        kwargs: &Map<String, Value>,
        add_generation_prompt: bool,
    ) -> Result<String, String> {
        let mut context = self.tokens.clone();
        // As in transformers, these variables exist and are none: templates test them for none.
        for name in ["tools", "documents"] {
            context.insert(name.to_string(), Value::Null);
        }
        context.extend(kwargs.clone());
        // As in transformers, this switch is no template variable.
        context.remove("continue_final_message");
        context.insert("add_generation_prompt".into(), add_generation_prompt.into());
        context.insert("messages".into(), messages);
        self.template
            .render(minijinja::Value::from(minijinja::value::Serde(&context)))
    }

    /// Converts a message into the form that this template expects.
    fn adapt_message(&self, message: &mut Value) {
        let Value::Object(message) = message else { return };
        message.retain(|_, value| !value.is_null());
        if message.get("role").is_some_and(|role| role == "developer") && !self.source.contains("developer") {
            message.insert("role".into(), "system".into());
        }
        // Inputs name the assistant's thought differently, and each template reads one of the names.
        let names = ["reasoning_content", "thinking", "reasoning"];
        let thought = names
            .iter()
            .find_map(|name| message.get(*name).filter(|value| !value.is_null()).cloned());
        if let Some(thought) = thought {
            message.entry("thinking").or_insert_with(|| thought.clone());
            message.insert("reasoning_content".into(), thought);
        }
        if self.accepts_parts {
            return;
        }
        if let Some(Value::Array(parts)) = message.get("content") {
            let texts: Vec<&str> = parts.iter().filter_map(|part| part["text"].as_str()).collect();
            let joined = texts.join("\n");
            message.insert("content".into(), joined.into());
        }
    }

    /// Renders an assistant message with this thought and answer; `None` if the template fails.
    pub(super) fn render_thought(&self, thought: &str, answer: &str) -> Option<String> {
        let mut message = json!({"role": "assistant", "content": answer, "reasoning_content": thought});
        self.adapt_message(&mut message);
        let conversation = json!([{"role": "user", "content": "a"}, message]);
        self.render_with(conversation, &Map::new(), false).ok()
    }

    /// The special token, if any, that the template writes right after the assistant's content. It
    /// ends the model's turn like an end-of-sequence token.
    pub fn end_of_turn(&self, tokenizer: &Tokenizer) -> Option<u32> {
        let conversation = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": PROBE}]);
        let text = self.render_with(conversation, &Map::new(), false).ok()?;
        let after = text[text.rfind(PROBE)? + PROBE.len()..].trim_start();
        let next = tokenizer
            .added_tokens()
            .iter()
            .filter(|token| after.starts_with(&token.content));
        next.max_by_key(|token| token.content.len())
            .filter(|token| token.special)
            .map(|token| token.id)
    }
}

/// Appends the marker to the content of the last message. Returns the content without the marker.
fn append_marker(messages: &mut [Value]) -> Result<String, String> {
    let content = messages.last_mut().and_then(|message| message.get_mut("content"));
    let text = match content {
        Some(Value::Array(parts)) => parts.iter_mut().rev().find_map(|part| part.get_mut("text")),
        other => other,
    };
    match text {
        Some(Value::String(text)) => {
            let content = text.clone();
            text.push_str(CONTINUATION_MARKER);
            Ok(content)
        }
        _ => Err("`continue_final_message`: the last message has no text to continue".into()),
    }
}

/// Cuts a rendering at the marker that follows `content`. If the template trims spaces after
/// contents, spaces before the marker are cut as well, as in transformers.
fn cut_at_marker(mut text: String, content: &str) -> Result<String, String> {
    let end = text
        .rfind(CONTINUATION_MARKER.trim_end())
        .filter(|_| text.contains(content.trim()));
    let Some(end) = end else {
        return Err(
            "`continue_final_message`: the chat template leaves out (part of) the last message, so there is \
                    nothing to continue"
                .into(),
        );
    };
    // With two markers, transformers would leave one in the prompt.
    if text[..end].contains(CONTINUATION_MARKER.trim_end()) {
        return Err(
            "`continue_final_message`: the chat template writes the last message more than once, so there is no \
                    one place to continue"
                .into(),
        );
    }
    let keeps_spaces = text[end..].starts_with(CONTINUATION_MARKER);
    text.truncate(end);
    if !keeps_spaces {
        text.truncate(text.trim_end().len());
    }
    Ok(text)
}
