//! Tests with small tokenizers of each kind, unchanged and with parts of another kind.

use serde_json::{Map, Value, json};

use super::super::bytes::byte_char;
use super::*;

/// Loads a file that consists of these parts.
fn load(file: &Value) -> Result<Tokenizer, String> {
    Tokenizer::from_json(&file.to_string(), None).map_err(|e| e.to_string())
}

fn file(model: Value, normalizer: Value, pre: Value, decoder: Value) -> Value {
    json!({"version": "1.0", "added_tokens": [], "model": model, "normalizer": normalizer, "pre_tokenizer": pre, "decoder": decoder})
}

/// A BPE model of these characters, and of words that are merged from left to right.
fn bpe(characters: impl IntoIterator<Item = String>, words: &[&str], more: Value) -> Value {
    let mut pieces: Vec<String> = characters.into_iter().collect();
    let mut merges = vec![];
    for word in words {
        let mut sofar = String::new();
        for next in word.chars().map(String::from) {
            let joined = format!("{sofar}{next}");
            if !pieces.contains(&joined) {
                merges.push(json!([sofar, next]));
                pieces.push(joined.clone());
            }
            sofar = joined;
        }
    }
    let vocab: Map<String, Value> = pieces.into_iter().zip((0..).map(Value::from)).collect();
    let mut model = json!({"type": "BPE", "vocab": vocab, "merges": merges});
    model.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    model
}

fn byte_level() -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true})
}

fn metaspace(scheme: &str) -> Value {
    json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": false})
}

/// A byte-level model, as in GPT-2.
fn bytes_model() -> Value {
    let bytes = (0..=255).map(|byte| byte_char(byte).to_string());
    bpe(bytes, &["Ġthe", "Ġbill", "Ġis", "Ġpaid", "Ġand"], json!({}))
}

/// A model with `▁` marks and byte fallback, as in Llama 2.
fn marks_model() -> Value {
    let bytes = (0..=255).map(|byte| format!("<0x{byte:02X}>"));
    let letters = "▁abcdefghijklmnopqrstuvwxyz.,Ġ".chars().map(String::from);
    let words = ["▁the", "▁bill", "▁is", "▁paid", "▁and"];
    bpe(
        ["<unk>".into()].into_iter().chain(bytes).chain(letters),
        &words,
        json!({"unk_token": "<unk>", "byte_fallback": true}),
    )
}

fn marks_to_spaces() -> Value {
    json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "})
}

fn spaces_to_marks() -> Value {
    json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})
}

fn marks_decoder() -> Value {
    json!({"type": "Sequence", "decoders": [marks_to_spaces(), {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0}]})
}

fn sequence(of: &str, parts: Value) -> Value {
    json!({"type": "Sequence", of: parts})
}

#[test]
fn tokenizers_of_each_kind_fit() {
    let llama3 = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    let split = json!({"type": "Split", "pattern": {"Regex": llama3}, "behavior": "Isolated", "invert": false});
    let prefixed = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
    let bert = json!({"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null, "lowercase": true});
    let pieces = "thebilspadon(.7,)?'#:12345%60=xf"
        .chars()
        .flat_map(|c| [c.to_string(), format!("##{c}")]);
    let pieces: Map<String, Value> = ["[UNK]".to_string()]
        .into_iter()
        .chain(pieces)
        .zip((0..).map(Value::from))
        .collect();
    let scores = |words: &[&str]| words.iter().map(|word| json!([word, -1.0])).collect::<Vec<_>>();
    let unigram = json!({"type": "Unigram", "unk_id": 0, "byte_fallback": false,
        "vocab": scores(&["<unk>", "▁", "▁the", "▁bill", "▁is", "▁paid", "t", "h", "e"])});
    let suffixed = bpe(
        "thebilspadon(.7,)?'"
            .chars()
            .flat_map(|c| [c.to_string(), format!("{c}</w>")]),
        &[],
        json!({"unk_token": null, "end_of_word_suffix": "</w>"}),
    );
    let words = json!({"type": "WordLevel", "unk_token": "[UNK]", "vocab": {"[UNK]": 0, "the": 1, "bill": 2, "is": 3, "paid": 4}});
    let lower = sequence(
        "normalizers",
        json!([{"type": "NFD"}, {"type": "StripAccents"}, {"type": "Lowercase"}]),
    );
    let none = Value::Null;
    for (name, file) in [
        ("GPT-2", file(bytes_model(), none.clone(), byte_level(), byte_level())),
        (
            "GPT-2 with a space in front",
            file(bytes_model(), none.clone(), prefixed, byte_level()),
        ),
        (
            "Llama 3",
            file(
                bytes_model(),
                none.clone(),
                sequence("pretokenizers", json!([split, byte_level()])),
                byte_level(),
            ),
        ),
        (
            "bytes in small letters",
            file(bytes_model(), lower.clone(), byte_level(), byte_level()),
        ),
        (
            "bytes by a normalizer",
            file(bytes_model(), json!({"type": "ByteLevel"}), none.clone(), byte_level()),
        ),
        (
            "Llama 2",
            file(
                marks_model(),
                sequence(
                    "normalizers",
                    json!([{"type": "Prepend", "prepend": "▁"}, spaces_to_marks()]),
                ),
                none.clone(),
                marks_decoder(),
            ),
        ),
        (
            "Mistral",
            file(marks_model(), none.clone(), metaspace("first"), marks_decoder()),
        ),
        (
            "Gemma",
            file(
                marks_model(),
                spaces_to_marks(),
                json!({"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false}),
                sequence(
                    "decoders",
                    json!([marks_to_spaces(), {"type": "ByteFallback"}, {"type": "Fuse"}]),
                ),
            ),
        ),
        (
            "Unigram",
            file(
                unigram.clone(),
                json!({"type": "NFKC"}),
                metaspace("always"),
                metaspace("always"),
            ),
        ),
        (
            "T5, which parts words",
            file(
                unigram,
                none.clone(),
                sequence(
                    "pretokenizers",
                    json!([{"type": "WhitespaceSplit"}, metaspace("always")]),
                ),
                metaspace("always"),
            ),
        ),
        (
            "BERT",
            file(
                json!({"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
                    "vocab": pieces}),
                bert.clone(),
                json!({"type": "BertPreTokenizer"}),
                json!({"type": "WordPiece", "prefix": "##", "cleanup": true}),
            ),
        ),
        (
            "words that end in a mark",
            file(
                suffixed,
                bert,
                json!({"type": "BertPreTokenizer"}),
                json!({"type": "BPEDecoder", "suffix": "</w>"}),
            ),
        ),
        (
            "words without a decoder",
            file(words, none.clone(), json!({"type": "Whitespace"}), none.clone()),
        ),
        (
            "characters",
            file(
                bpe("thebilspadno ".chars().map(String::from), &[], json!({})),
                lower,
                none.clone(),
                json!({"type": "Fuse"}),
            ),
        ),
        (
            "marks without a fallback",
            file(
                bpe("▁thebilspadno".chars().map(String::from), &[], json!({})),
                none,
                metaspace("always"),
                metaspace("always"),
            ),
        ),
    ] {
        if let Err(why) = load(&file) {
            panic!("{name}: {why}");
        }
    }
}

#[test]
fn a_vocabulary_with_parts_of_another_kind_is_refused() {
    let none = Value::Null;
    let prepend = sequence(
        "normalizers",
        json!([{"type": "Prepend", "prepend": "▁"}, spaces_to_marks()]),
    );
    let bytes = "its vocabulary writes a space as `Ġ` (byte-level)";
    let marks = "its vocabulary writes a space as `▁` (SentencePiece)";
    for (file, words) in [
        (
            file(bytes_model(), none.clone(), metaspace("first"), marks_decoder()),
            &[
                bytes,
                "pre-tokenizer as `▁` (SentencePiece)",
                "decoder as `▁` (SentencePiece)",
                "transformers 5",
                "original checkpoint",
            ][..],
        ),
        (
            file(bytes_model(), prepend.clone(), none.clone(), marks_decoder()),
            &[bytes, "pre-tokenizer as `▁`", "decoder as `▁`"],
        ),
        (
            file(bytes_model(), none.clone(), byte_level(), marks_decoder()),
            &[bytes, "pre-tokenizer as `Ġ`", "decoder as `▁`"],
        ),
        (
            file(bytes_model(), none.clone(), metaspace("first"), byte_level()),
            &[bytes, "pre-tokenizer as `▁`", "decoder as `Ġ`"],
        ),
        (
            file(bytes_model(), prepend, byte_level(), byte_level()),
            &[bytes, "pre-tokenizer as neither", "decoder as `Ġ`"],
        ),
        (
            file(bytes_model(), none.clone(), none.clone(), byte_level()),
            &[bytes, "leave it a plain space", "decoder as `Ġ`"],
        ),
        (
            file(bytes_model(), none.clone(), byte_level(), none.clone()),
            &[bytes, "it has no decoder"],
        ),
        (
            file(marks_model(), none.clone(), byte_level(), byte_level()),
            &[marks, "pre-tokenizer as `Ġ` (byte-level)", "decoder as `Ġ`"],
        ),
        (
            file(marks_model(), none.clone(), metaspace("first"), byte_level()),
            &[marks, "pre-tokenizer as `▁`", "decoder as `Ġ`"],
        ),
    ] {
        let error = load(&file).expect_err(words[0]);
        assert!(!error.contains('\n'), "{error}");
        for word in words {
            assert!(error.contains(word), "`{word}` is missing in: {error}");
        }
    }
}

/// Too few pieces begin with a mark for it to prevail, but no piece begins with the other mark.
#[test]
fn a_vocabulary_of_single_bytes_is_refused_with_sentencepiece_parts() {
    let model = bpe((0..=255).map(|byte| byte_char(byte).to_string()), &[], json!({}));
    let error = load(&file(model, Value::Null, metaspace("first"), marks_decoder())).unwrap_err();
    assert!(error.contains("its vocabulary writes a space as `Ġ`"), "{error}");
}

#[test]
fn decoders_that_change_texts_are_refused() {
    let none = Value::Null;
    // This decoder leaves byte tokens such as `<0x0A>` as they are written.
    let without_bytes = sequence("decoders", json!([marks_to_spaces(), {"type": "Fuse"}]));
    let error = load(&file(marks_model(), none.clone(), metaspace("first"), without_bytes)).unwrap_err();
    assert!(
        error.contains("encoding and decoding change texts") && error.contains("<0x"),
        "{error}"
    );
    // This decoder replaces one word by another.
    let swaps = json!({"type": "Replace", "pattern": {"String": "paid"}, "content": "owed"});
    let swaps = sequence("decoders", json!([swaps, byte_level()]));
    let error = load(&file(bytes_model(), none.clone(), byte_level(), swaps)).unwrap_err();
    let sentence = "\"The bill (no. 7) isn't paid, is it?\" becomes \"The bill (no. 7) isn't owed, is it?\"";
    assert!(error.contains(sentence) && !error.contains('\n'), "{error}");
    // On whole answers, this decoder gives text that no single token gives.
    let across = json!({"type": "Replace", "pattern": {"String": "is paid"}, "content": "is owed"});
    let across = sequence(
        "decoders",
        json!([marks_to_spaces(), {"type": "ByteFallback"}, {"type": "Fuse"}, across]),
    );
    let error = load(&file(marks_model(), none, metaspace("never"), across)).unwrap_err();
    assert!(
        error.contains("for a whole answer and for its single tokens")
            && error.contains("is owed")
            && !error.contains('\n'),
        "{error}"
    );
}

/// Without an unknown token, the library drops characters that the vocabulary lacks. Encoding and
/// decoding must preserve all other text.
#[test]
fn only_characters_outside_the_vocabulary_may_be_missing() {
    let expected: Vec<(u8, bool)> = b"a b".iter().map(|byte| (*byte, *byte != b'b')).collect();
    for (bytes, ignores_space, is_right) in [
        (&b"a b"[..], false, true),
        (b"  a b ", false, true),
        (b"a  b", false, false),
        (b"a ", false, false),
        (b"ab", true, true),
        (b"a", true, true),
        (b"b", true, false),
        (b"abc", true, false),
        (b"", true, false),
    ] {
        assert_eq!(matches_expected(&expected, bytes, ignores_space), is_right, "{bytes:?}");
    }
}

#[test]
fn normalizers_that_grow_texts_too_much_are_refused() {
    let grow = |times: usize| json!({"type": "Replace", "pattern": {"String": "7"}, "content": "7".repeat(times)});
    let with = |times| load(&file(bytes_model(), grow(times), byte_level(), byte_level()));
    assert_eq!(with(256).err(), None);
    let error = with(257).unwrap_err();
    assert!(error.contains("for one input byte: 514, more than 512"), "{error}");
}

#[test]
fn errors_quote_a_short_line() {
    assert_eq!(quoted("a\nb"), "\"a\\nb\"");
    assert_eq!(
        quoted(&"x".repeat(QUOTED_CHARS + 1)),
        format!("\"{}\"…", "x".repeat(QUOTED_CHARS))
    );
}
