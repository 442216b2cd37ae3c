//! Chat templates of many styles render as Hugging Face transformers renders them.
//!
//! `tests/fixtures/make_chat_templates.py` wrote down what transformers makes of each template and conversation.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use chrono::NaiveDateTime;
use gristmill::job::chat::{ChatTemplate, Turn};
use gristmill::job::spec::ChatTemplateChoice;
use gristmill::tokenizer::TokenizerConfig;
use serde_json::{Value, json};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/chat_templates")
}

fn fixture() -> Value {
    let fixture = std::fs::read_to_string(folder().join("rendered.json")).unwrap();
    serde_json::from_str(&fixture).unwrap()
}

/// A template of the fixture, in a checkpoint with its tokens.
fn template(fixture: &Value, name: &str, has_tools: bool) -> Result<ChatTemplate, String> {
    let config = TokenizerConfig {
        bos_token: fixture["tokens"]["bos_token"].as_str().map(String::from),
        eos_token: fixture["tokens"]["eos_token"].as_str().map(String::from),
        ..Default::default()
    };
    let now: NaiveDateTime = fixture["now"].as_str().unwrap().parse().unwrap();
    let source = std::fs::read_to_string(folder().join(format!("{name}.jinja"))).unwrap();
    ChatTemplate::choose(&config, Some(&ChatTemplateChoice::Source(source)), has_tools, now)
}

/// The variables that a template reads are those that Jinja finds, less those that it always sets itself (Jinja counts what is set in
/// two branches); and nothing that it applies or calls is unknown.
#[test]
fn variables_are_those_that_jinja_finds() {
    let fixture = fixture();
    let reads = fixture["reads"].as_object().unwrap();
    let names = |of: &Value| -> BTreeSet<String> {
        let names = of.as_array().unwrap().iter();
        names.map(|name| name.as_str().unwrap().to_string()).collect()
    };
    let mut all: BTreeSet<String> = reads.values().flat_map(names).collect();
    assert!(all.len() > 10, "{all:?}");
    all.extend(["message", "ns", "loop", "enable_thinkin", "content", "debug"].map(String::from));
    // A switch is taken whether the template reads it or not.
    all.remove("add_generation_prompt");
    for (template_name, read) in reads {
        let chat = template(&fixture, template_name, false).unwrap();
        let read = names(read);
        for name in &all {
            let kwargs = json!({name: 1});
            let refused = chat.kwargs_error(kwargs.as_object().unwrap());
            let sets = read.contains(name) && chat.source().contains(&format!("set {name} = "));
            assert!(
                refused.is_none() == read.contains(name) || sets && refused.is_some(),
                "{template_name}, {name}: {refused:?}"
            );
        }
        assert_eq!(chat.unknown_name_messages(), Vec::<String>::new(), "{template_name}");
    }
    // What a template gives a value of its own only where it has none.
    for (template_name, name) in [
        ("llama3", "date_string"),
        ("dated", "custom_system"),
        ("qwen3", "enable_thinking"),
    ] {
        let kwargs = json!({name: 1});
        let chat = template(&fixture, template_name, false).unwrap();
        assert_eq!(chat.kwargs_error(kwargs.as_object().unwrap()), None);
    }
}

#[test]
fn templates_render_as_in_transformers() {
    let fixture = fixture();
    let cases = fixture["cases"].as_array().unwrap();
    let mut wrong = Vec::new();
    let mut templates = BTreeSet::new();
    for case in cases {
        let name = case["template"].as_str().unwrap();
        templates.insert(name);
        let kwargs = case["kwargs"].as_object().unwrap();
        let messages = case["messages"].as_array().unwrap().clone();
        let ours = template(&fixture, name, kwargs.contains_key("tools")).and_then(|chat| {
            let turn = Turn::from_switches([None; 2], kwargs)?.unwrap_or(Turn::Generate);
            chat.render(messages, kwargs, turn)
        });
        let agree = match (&ours, case["text"].as_str()) {
            (Ok(ours), Some(theirs)) => ours == theirs,
            (Err(_), None) => true,
            _ => false,
        };
        if !agree {
            let theirs = case["text"].as_str().or(case["error"].as_str()).unwrap_or_default();
            wrong.push(format!(
                "{name}, {}:\n  ours   {ours:?}\n  theirs {theirs:?}",
                case["name"]
            ));
        }
    }
    assert!(templates.len() >= 12 && cases.len() > 500, "the fixture is not whole");
    assert!(
        wrong.is_empty(),
        "{} of {} differ:\n{}",
        wrong.len(),
        cases.len(),
        wrong.join("\n")
    );
}
