//! Any text as a chat template: it is compiled and rendered, or refused in one line.
#![no_main]

use chrono::DateTime;
use gristmill::job::chat::{ChatTemplate, Turn};
use gristmill::job::spec::ChatTemplateChoice;
use gristmill::tokenizer::TokenizerConfig;
use libfuzzer_sys::fuzz_target;
use serde_json::{Map, json};

fuzz_target!(|text: &str| {
    let choice = ChatTemplateChoice::Source(text.to_string());
    let now = DateTime::UNIX_EPOCH.naive_utc();
    let messages = vec![
        json!({"role": "user", "content": "hello", "list": [[1, 2.5], {"a": null}]}),
        json!({"role": "assistant", "content": "x".repeat(1000)}),
    ];
    let rendered = ChatTemplate::choose(&TokenizerConfig::default(), Some(&choice), false, now)
        .and_then(|chat| chat.render(messages, &Map::new(), Turn::Generate));
    if let Err(error) = rendered {
        assert!(!error.contains('\n'), "{error}");
    }
});
