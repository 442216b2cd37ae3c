//! Any text as a regular expression: it compiles within its time, or is refused in one line.
#![no_main]

use std::sync::{Arc, LazyLock};

use gristmill::engine::constraint::{Constraint, GrammarState};
use gristmill::engine::params::OutputConstraint;
use gristmill::tokenizer::Tokenizer;
use libfuzzer_sys::fuzz_target;

static TOKENIZER: LazyLock<Arc<Tokenizer>> =
    LazyLock::new(|| Arc::new(Tokenizer::from_words(&["ab", "12"], &["<eos>"]).expect("a tokenizer")));

fuzz_target!(|text: &str| {
    let eos = TOKENIZER.eos_id().expect("an end");
    match Constraint::compile(&OutputConstraint::Regex(text.into()), &TOKENIZER, &[eos]) {
        Ok(Constraint::Grammar(grammar)) => {
            let mut state = GrammarState::new(grammar);
            for _ in 0..4 {
                state.prepare();
                let Ok(mask) = state.mask() else { return };
                let first = mask.iter().position(|word| *word != 0);
                let Some(word) = first else { return };
                let token = word as u32 * 32 + mask[word].trailing_zeros();
                if token == eos || state.consume(token).unwrap_or(true) {
                    return;
                }
            }
        }
        Ok(other) => panic!("no grammar: {other:?}"),
        Err(refused) => assert!(!refused.to_string().contains('\n'), "{refused}"),
    }
});
