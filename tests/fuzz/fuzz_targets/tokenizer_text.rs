//! Any bytes as a `tokenizer.json` and, behind a byte 0xFF, a text: encoding it, short and repeated until it is long, never panics, and
//! a limit of tokens changes no token before it.
#![no_main]

use gristmill::tokenizer::Tokenizer;
use libfuzzer_sys::fuzz_target;

/// Longer than what is encoded at once.
const LONG_BYTES: usize = 70_000;
const LIMIT: usize = 50;

fuzz_target!(|data: &[u8]| {
    let Some(at) = data.iter().position(|byte| *byte == 0xFF) else { return };
    let (Ok(json), Ok(text)) = (str::from_utf8(&data[..at]), str::from_utf8(&data[at + 1..])) else { return };
    let Ok(tokenizer) = Tokenizer::from_json(json, None) else { return };
    let long = text.repeat(LONG_BYTES.div_ceil(text.len().max(1)));
    for text in [text, &long] {
        for first in [true, false] {
            let _ = tokenizer.encode_piece_within(text, first, LIMIT);
        }
        let _ = tokenizer.encode_plain(text);
        if let (Ok(whole), Ok(cut)) = (tokenizer.encode(text, false), tokenizer.encode_within(text, false, LIMIT)) {
            assert!(whole.starts_with(&cut.ids) && (cut.is_cut || cut.ids == whole));
        }
    }
});
