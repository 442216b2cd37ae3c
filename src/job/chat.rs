//! The checkpoint's chat template: its selection, and the rendering of conversations.

use chrono::NaiveDateTime;
use serde_json::{Map, Value, json};

use super::spec::ChatTemplateChoice;
use super::suggest;
use super::template::Template;
use crate::tokenizer::{Tokenizer, TokenizerConfig};

/// A text that no template produces by itself.
const PROBE: &str = "gristmill probe text";

/// Marker behind the content to be continued while it is rendered. Its space shows whether the
/// template keeps spaces there. It is as long as transformers' own, for templates that count
/// characters.
const CONTINUED: &str = "GRISTMILL_CONTINUES_BEHIND ";

/// How a rendered conversation ends. The names in the variants' docs are those of transformers'
/// `apply_chat_template`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// `add_generation_prompt`: opens the model's turn. This is the default.
    Generate,
    /// Neither flag: ends with the last message, as the template closes it.
    Closed,
    /// `continue_final_message`: ends right behind the last message's content.
    Continue,
}

impl Turn {
    /// The variables of `chat_template_kwargs` that also set the turn.
    pub const SWITCHES: [&str; 2] = ["add_generation_prompt", "continue_final_message"];

    /// The turn set by `fields` (the two switches themselves) and by `kwargs`; `None` if neither
    /// sets it. The error goes behind the name of the enclosing block.
    pub fn of(fields: [Option<&Value>; 2], kwargs: &Map<String, Value>) -> Result<Option<Turn>, String> {
        let mut said = [None; 2];
        for (i, name) in Turn::SWITCHES.into_iter().enumerate() {
            for value in [fields[i], kwargs.get(name)].into_iter().flatten() {
                match (value, said[i]) {
                    (Value::Null, _) => {}
                    (Value::Bool(flag), Some(other)) if *flag != other => {
                        return Err(format!("sets `{name}` to true and to false"));
                    }
                    (Value::Bool(flag), _) => said[i] = Some(*flag),
                    _ => return Err(format!("sets `{name}` to {value}, neither true nor false")),
                }
            }
        }
        match said {
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
    /// Whether contents may be lists of parts; otherwise parts are joined to one text.
    takes_parts: bool,
}

impl ChatTemplate {
    /// Selects and compiles the template: the job's choice, else `tool_use` if the checkpoint has
    /// it and there are tools, else `default`. `now` is the time that `strftime_now` returns.
    ///
    /// The error is one line without a place.
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
        let roles = [
            ("bos_token", &config.bos_token),
            ("eos_token", &config.eos_token),
            ("unk_token", &config.unk_token),
            ("pad_token", &config.pad_token),
        ];
        let tokens = roles
            .into_iter()
            .filter_map(|(name, token)| Some((name.to_string(), Value::from(token.clone()?))))
            .collect();
        let mut chat = ChatTemplate {
            template,
            source,
            tokens,
            takes_parts: false,
        };
        let parts = json!([{"role": "user", "content": [{"type": "text", "text": PROBE}]}]);
        chat.takes_parts = chat.render_with(parts, &Map::new(), true).is_ok_and(|text| {
            // A template that expects texts prints the list itself, or nothing.
            text.contains(PROBE) && !text.contains("'type'") && !text.contains("\"type\"")
        });
        Ok(chat)
    }

    /// The template's source.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders a conversation up to the model's answer. `kwargs` are further variables.
    pub fn render(&self, mut messages: Vec<Value>, kwargs: &Map<String, Value>, turn: Turn) -> Result<String, String> {
        for message in &mut messages {
            self.adapt(message);
        }
        let continued = match turn {
            Turn::Continue => Some(mark_end(&mut messages)?),
            Turn::Generate | Turn::Closed => None,
        };
        let text = self
            .render_with(Value::Array(messages), kwargs, turn == Turn::Generate)
            .map_err(|e| format!("chat template: {e}"))?;
        match continued {
            Some(content) => cut_behind(text, &content),
            None => Ok(text),
        }
    }

    /// Why the template cannot use `kwargs`; the text continues the name of their field.
    pub fn refuses(&self, kwargs: &Map<String, Value>) -> Option<String> {
        let reads = self.template.reads();
        for name in kwargs.keys() {
            if self.template.has_function(name) {
                return Some(format!("sets `{name}`, which is a function of chat templates"));
            }
            if !reads.contains(name) && !Turn::SWITCHES.contains(&name.as_str()) {
                let given = |name: &str| name == "messages" || self.tokens.contains_key(name);
                let known = reads.iter().map(String::as_str).filter(|name| !given(name));
                let hint = suggest(name, known.filter(|name| !self.template.has_function(name)));
                return Some(format!("sets `{name}`, which the chat template never reads{hint}"));
            }
        }
        None
    }

    /// A variable that the template reads and nothing sets, if its name is similar to a variable
    /// that is set. `kwargs` are the job's.
    pub fn misspells(&self, kwargs: &Map<String, Value>) -> Option<String> {
        const GIVEN: [&str; 8] = [
            "messages",
            "tools",
            "documents",
            "add_generation_prompt",
            "bos_token",
            "eos_token",
            "unk_token",
            "pad_token",
        ];
        let reads = self.template.reads();
        let is_set =
            |name: &str| GIVEN.contains(&name) || kwargs.contains_key(name) || self.template.has_function(name);
        reads.iter().filter(|name| !is_set(name)).find_map(|name| {
            let hint = suggest(name, GIVEN);
            hint.contains("did you mean")
                .then(|| format!("it reads `{name}`, which nobody sets{hint}"))
        })
    }

    /// Unknown filters, tests, methods and functions, a line each.
    pub fn unknown(&self) -> Vec<String> {
        self.template.unknown()
    }

    /// Whether the template tells the model the date.
    pub fn tells_time(&self) -> bool {
        self.template.calls("strftime_now")
    }

    fn render_with(&self, messages: Value, kwargs: &Map<String, Value>, ask: bool) -> Result<String, String> {
        let mut context = self.tokens.clone();
        // These are set to none, as in transformers: templates test them for none.
        for name in ["tools", "documents"] {
            context.insert(name.to_string(), Value::Null);
        }
        context.extend(kwargs.clone());
        // This switch is not a template variable, as in transformers.
        context.remove("continue_final_message");
        context.insert("add_generation_prompt".into(), ask.into());
        context.insert("messages".into(), messages);
        self.template
            .render(minijinja::Value::from(minijinja::value::Serde(&context)))
    }

    /// Converts a message into the form that this template expects.
    fn adapt(&self, message: &mut Value) {
        let Value::Object(message) = message else { return };
        message.retain(|_, value| !value.is_null());
        if message.get("role").is_some_and(|role| role == "developer") && !self.source.contains("developer") {
            message.insert("role".into(), "system".into());
        }
        // The assistant's thought has several names; each template reads one of them.
        let names = ["reasoning_content", "thinking", "reasoning"];
        let thought = names
            .iter()
            .find_map(|name| message.get(*name).filter(|value| !value.is_null()).cloned());
        if let Some(thought) = thought {
            message.entry("thinking").or_insert_with(|| thought.clone());
            message.insert("reasoning_content".into(), thought);
        }
        if self.takes_parts {
            return;
        }
        if let Some(Value::Array(parts)) = message.get("content") {
            let texts: Vec<&str> = parts.iter().filter_map(|part| part["text"].as_str()).collect();
            let joined = texts.join("\n");
            message.insert("content".into(), joined.into());
        }
    }

    /// How the template renders an answer with a thought before it.
    pub(super) fn with_thought(&self, thought: &str, answer: &str) -> Option<String> {
        let mut said = json!({"role": "assistant", "content": answer, "reasoning_content": thought});
        self.adapt(&mut said);
        let conversation = json!([{"role": "user", "content": "a"}, said]);
        self.render_with(conversation, &Map::new(), false).ok()
    }

    /// The token that the template puts after the assistant's content, if it is a special token: it
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

/// Puts the marker behind the content of the last message; returns the content.
fn mark_end(messages: &mut [Value]) -> Result<String, String> {
    let content = messages.last_mut().and_then(|message| message.get_mut("content"));
    let text = match content {
        Some(Value::Array(parts)) => parts.iter_mut().rev().find_map(|part| part.get_mut("text")),
        other => other,
    };
    match text {
        Some(Value::String(text)) => {
            let content = text.clone();
            text.push_str(CONTINUED);
            Ok(content)
        }
        _ => Err("`continue_final_message`: the last message has no text to continue".into()),
    }
}

/// Cuts a rendering behind the marked `content`, by transformers' rule: if the template trims
/// spaces behind a content, spaces before the marker are cut as well.
fn cut_behind(mut text: String, content: &str) -> Result<String, String> {
    let end = text
        .rfind(CONTINUED.trim_end())
        .filter(|_| text.contains(content.trim()));
    let Some(end) = end else {
        return Err(
            "`continue_final_message`: the chat template leaves out (part of) the last message, so there is \
                    nothing to continue"
                .into(),
        );
    };
    // In this case transformers leaves its own marker in the prompt.
    if text[..end].contains(CONTINUED.trim_end()) {
        return Err(
            "`continue_final_message`: the chat template writes the last message more than once, so there is no \
                    one place to continue"
                .into(),
        );
    }
    let keeps_spaces = text[end..].starts_with(CONTINUED);
    text.truncate(end);
    if !keeps_spaces {
        text.truncate(text.trim_end().len());
    }
    Ok(text)
}
