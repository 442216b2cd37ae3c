//! The checkpoint's chat template: which one, and how a conversation goes through it.

use chrono::NaiveDateTime;
use serde_json::{Map, Value, json};

use super::spec::ChatTemplateChoice;
use super::template::Template;
use crate::model::tokenizer::{Tokenizer, TokenizerConfig};

/// A text that no template produces by itself.
const PROBE: &str = "gristmill probe text";

/// A chat template, ready to render.
pub struct ChatTemplate {
    template: Template,
    source: String,
    /// `bos_token`, `eos_token`, …: the variables that transformers sets.
    tokens: Map<String, Value>,
    /// Takes contents that are lists of parts; else they are joined to one text.
    takes_parts: bool,
}

impl ChatTemplate {
    /// Picks and compiles the template: the job's choice, else `tool_use` where the checkpoint has one and there are
    /// tools, else `default`. `now` is the time that `strftime_now` tells.
    ///
    /// The error is one line without place.
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
                    let hint = super::suggest(name, names());
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
            // A template that knows only texts prints the list itself, or nothing.
            text.contains(PROBE) && !text.contains("'type'") && !text.contains("\"type\"")
        });
        Ok(chat)
    }

    /// The template's source.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders a conversation up to where the model answers. `kwargs` are further variables.
    pub fn render(&self, mut messages: Vec<Value>, kwargs: &Map<String, Value>) -> Result<String, String> {
        for message in &mut messages {
            self.adapt(message);
        }
        self.render_with(Value::Array(messages), kwargs, true)
            .map_err(|e| format!("chat template: {e}"))
    }

    fn render_with(&self, messages: Value, kwargs: &Map<String, Value>, ask: bool) -> Result<String, String> {
        let mut context = self.tokens.clone();
        // Set to nothing, as transformers does: templates ask whether they are none.
        for name in ["tools", "documents"] {
            context.insert(name.to_string(), Value::Null);
        }
        context.insert("add_generation_prompt".into(), ask.into());
        context.extend(kwargs.clone());
        context.insert("messages".into(), messages);
        self.template
            .render(minijinja::Value::from(minijinja::value::Serde(&context)))
    }

    /// Brings a message into the form that this template takes.
    fn adapt(&self, message: &mut Value) {
        let Value::Object(message) = message else { return };
        if message.get("role").is_some_and(|role| role == "developer") && !self.source.contains("developer") {
            message.insert("role".into(), "system".into());
        }
        // What the assistant thought has several names; templates read one or the other.
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

    /// The token that the template puts after what the assistant says, where it is a special one: it ends the
    /// model's turn as an end-of-sequence token does.
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
