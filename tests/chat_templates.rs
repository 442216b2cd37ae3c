//! Chat templates of many styles render as Hugging Face transformers renders them.
//!
//! `tests/fixtures/make_chat_templates.py` wrote down what transformers makes of each template and conversation.

use std::path::Path;

use chrono::NaiveDateTime;
use gristmill::job::chat::ChatTemplate;
use gristmill::job::spec::ChatTemplateChoice;
use gristmill::model::tokenizer::TokenizerConfig;
use serde_json::Value;

#[test]
fn templates_render_as_in_transformers() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/chat_templates");
    let fixture = std::fs::read_to_string(folder.join("rendered.json")).unwrap();
    let fixture: Value = serde_json::from_str(&fixture).unwrap();
    let config = TokenizerConfig {
        bos_token: fixture["tokens"]["bos_token"].as_str().map(String::from),
        eos_token: fixture["tokens"]["eos_token"].as_str().map(String::from),
        ..Default::default()
    };
    let now: NaiveDateTime = fixture["now"].as_str().unwrap().parse().unwrap();
    let cases = fixture["cases"].as_array().unwrap();
    let mut wrong = Vec::new();
    let mut templates = std::collections::BTreeSet::new();
    for case in cases {
        let name = case["template"].as_str().unwrap();
        templates.insert(name);
        let source = std::fs::read_to_string(folder.join(format!("{name}.jinja"))).unwrap();
        let choice = ChatTemplateChoice::Source(source);
        let kwargs = case["kwargs"].as_object().unwrap();
        let messages = case["messages"].as_array().unwrap().clone();
        let ours = ChatTemplate::choose(&config, Some(&choice), kwargs.contains_key("tools"), now)
            .and_then(|chat| chat.render(messages, kwargs));
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
    assert!(templates.len() >= 12 && cases.len() > 100, "the fixture is not whole");
    assert!(
        wrong.is_empty(),
        "{} of {} differ:\n{}",
        wrong.len(),
        cases.len(),
        wrong.join("\n")
    );
}
