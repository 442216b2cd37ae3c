//! A first byte names a tokenizer's file other than `tokenizer.json`, and the rest is the file: reading it never panics and never
//! believes a size, and what is read encodes and decodes texts.
#![no_main]

use gristmill::tokenizer::Tokenizer;
use libfuzzer_sys::fuzz_target;

const FILES: [&str; 3] = ["tekken.json", "tokenizer.model", "a.tiktoken"];

fuzz_target!(|data: &[u8]| {
    let Some((&which, bytes)) = data.split_first() else { return };
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join(FILES[which as usize % FILES.len()]), bytes).unwrap();
    std::fs::write(folder.path().join("tokenizer_config.json"), r#"{"tokenizer_class": "LlamaTokenizer"}"#).unwrap();
    let Ok(tokenizer) = Tokenizer::load(folder.path()) else { return };
    for text in ["", " a\u{301}\n\n  <s>", "\u{2581}\u{10FFFD}1234"] {
        let _ = tokenizer.encode(text, true);
        let _ = tokenizer.decode(&tokenizer.encode_plain(text));
    }
});
