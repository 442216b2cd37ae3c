//! Any text as a JSON Schema: it compiles within its time, or is refused in one line.
#![no_main]

use std::sync::{Arc, LazyLock};

use gristmill::engine::constraint::{Constraint, GrammarState};
use gristmill::engine::params::OutputConstraint;
use gristmill::tokenizer::Tokenizer;
use libfuzzer_sys::fuzz_target;

static TOKENIZER: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| {
    let words = ["name", "{\"", "\":", "true", "12"];
    Arc::new(Tokenizer::from_words(&words, &["<eos>"]).expect("a tokenizer"))
});

fuzz_target!(|text: &str| {
    let Ok(schema) = serde_json::from_str(text) else { return };
    let eos = TOKENIZER.eos_id().expect("an end");
    match Constraint::compile(&OutputConstraint::JsonSchema(schema), &TOKENIZER, &[eos]) {
        Ok(Constraint::Grammar(grammar)) => {
            let mut state = GrammarState::new(grammar);
            state.prepare();
            let _ = state.mask();
        }
        Ok(other) => panic!("no grammar: {other:?}"),
        Err(refused) => assert!(!refused.to_string().contains('\n'), "{refused}"),
    }
});
