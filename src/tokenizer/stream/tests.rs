//! Tests that token ids are equal to the library's for tokenizers of each kind, and that encoding
//! stops early at limits.

use proptest::prelude::*;
use serde_json::{Map, Value, json};

use super::*;
use crate::tokenizer::bytes::byte_char;
use crate::tokenizer::encode::encode_with;

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Parts of the test texts, besides added tokens.
const WORDS: [&str; 18] = [
    "the",
    " the",
    "  ",
    "\n\n",
    "\r\n",
    "a",
    "aaa",
    "ab",
    "1234",
    "'s",
    "é",
    "e\u{301}",
    "\u{301}",
    "\u{4E2D}\u{6587}",
    "\u{1F600}",
    "<",
    ", ",
    "\u{2581}",
];

fn split(pattern: Value, behavior: &str) -> Value {
    json!({"type": "Split", "pattern": pattern, "behavior": behavior, "invert": false})
}

fn byte_level(use_regex: bool) -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex})
}

/// A BPE model that joins these words from left to right.
fn bpe(chars: &[String], words: &[String], more: Value) -> Value {
    let mut vocab: Map<String, Value> = Map::new();
    let mut merges = Vec::new();
    let mut add = |text: &str| {
        let id = vocab.len();
        vocab.entry(text).or_insert(json!(id)).as_u64() == Some(id as u64)
    };
    for c in chars {
        add(c);
    }
    for word in words {
        let mut ends = word.char_indices().map(|(at, c)| at + c.len_utf8());
        let mut from = ends.next().unwrap();
        for end in ends {
            if add(&word[..end]) {
                merges.push(json!([&word[..from], &word[from..end]]));
            }
            from = end;
        }
    }
    let mut model = json!({"type": "BPE", "vocab": vocab, "merges": merges});
    model.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    model
}

fn byte_bpe(more: Value) -> Value {
    let written = |text: &str| text.bytes().map(byte_char).collect::<String>();
    let chars: Vec<String> = (0..=255).map(|byte| byte_char(byte).to_string()).collect();
    bpe(&chars, &WORDS.map(written), more)
}

/// Characters and bytes, as in SentencePiece vocabularies.
fn sentence_bpe() -> Value {
    let mut chars = vec!["<unk>".to_string()];
    chars.extend((0..=255).map(|byte| format!("<0x{byte:02X}>")));
    chars.extend(
        "\u{2581}\u{E9}\u{4E2D}<',."
            .chars()
            .chain('a'..='z')
            .chain('0'..='9')
            .map(String::from),
    );
    let words = [
        "\u{2581}the",
        "the",
        "\u{2581}\u{2581}\u{2581}",
        "aaa",
        "ab",
        "123",
        ",\u{2581}",
    ]
    .map(String::from);
    bpe(
        &chars,
        &words,
        json!({"unk_token": "<unk>", "byte_fallback": true, "fuse_unk": true}),
    )
}

fn unigram() -> Value {
    let chars = "\u{2581}\u{E9}\u{4E2D}<'."
        .chars()
        .chain('a'..='z')
        .map(|c| json!([c.to_string(), -9.0]));
    let words = ["\u{2581}the", "the", "\u{2581}\u{2581}", "aaa", "ab"].map(|word| json!([word, -3.0]));
    let vocab: Vec<Value> = [json!(["<unk>", 0.0])].into_iter().chain(chars).chain(words).collect();
    json!({"type": "Unigram", "unk_id": 0, "vocab": vocab})
}

fn tokenizer(normalizer: Value, pre_tokenizer: Value, model: Value, normalized: bool) -> HfTokenizer {
    let base = model["vocab"]
        .as_array()
        .map_or_else(|| model["vocab"].as_object().unwrap().len(), Vec::len);
    let added = [
        ("<s>", false, false),
        ("<s>x", false, false),
        ("<|end|>", false, true),
        ("<mask>", true, false),
    ];
    let added: Vec<Value> = (base..)
        .zip(added)
        .map(|(id, (content, lstrip, rstrip))| {
            json!({"id": id, "content": content, "special": true, "normalized": normalized && content == "<s>x",
               "single_word": false, "lstrip": lstrip, "rstrip": rstrip})
        })
        .collect();
    let json = json!({"version": "1.0", "added_tokens": added, "normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "model": model});
    HfTokenizer::from_bytes(json.to_string()).unwrap()
}

fn tokenizers() -> Vec<(&'static str, HfTokenizer)> {
    let regex = |regex: &str| split(json!({"Regex": regex}), "Isolated");
    let sequence = |steps: Value| json!({"type": "Sequence", "pretokenizers": steps});
    let metaspace = |scheme: &str, split: bool| json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": scheme, "split": split});
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"});
    let prepend = json!({"type": "Prepend", "prepend": "\u{2581}"});
    let sentence = json!({"type": "Sequence", "normalizers": [prepend, replace]});
    let none = || json!({});
    vec![
        (
            "gpt2",
            tokenizer(Value::Null, byte_level(true), byte_bpe(none()), false),
        ),
        (
            "llama3",
            tokenizer(
                Value::Null,
                sequence(json!([regex(LLAMA3), byte_level(false)])),
                byte_bpe(json!({"ignore_merges": true})),
                false,
            ),
        ),
        (
            "qwen",
            tokenizer(
                json!({"type": "NFC"}),
                sequence(json!([regex(LLAMA3), byte_level(false)])),
                byte_bpe(none()),
                true,
            ),
        ),
        (
            "deepseek",
            tokenizer(
                json!({"type": "Sequence", "normalizers": []}),
                sequence(json!([
                    regex(r"\p{N}{1,3}"),
                    regex("[一-龥]+"),
                    regex(LLAMA3),
                    byte_level(false)
                ])),
                byte_bpe(none()),
                false,
            ),
        ),
        (
            "starcoder",
            tokenizer(
                Value::Null,
                sequence(json!([{"type": "Digits", "individual_digits": true}, byte_level(true)])),
                byte_bpe(none()),
                true,
            ),
        ),
        (
            "digits",
            tokenizer(
                json!({"type": "NFKD"}),
                sequence(json!([{"type": "Digits", "individual_digits": false}, byte_level(false)])),
                byte_bpe(none()),
                false,
            ),
        ),
        (
            "gemma",
            tokenizer(
                replace.clone(),
                split(json!({"String": " "}), "MergedWithPrevious"),
                sentence_bpe(),
                false,
            ),
        ),
        (
            "merged_with_previous",
            tokenizer(
                Value::Null,
                split(json!({"String": "a"}), "MergedWithPrevious"),
                sentence_bpe(),
                false,
            ),
        ),
        ("llama2", tokenizer(sentence, Value::Null, sentence_bpe(), true)),
        (
            "mistral",
            tokenizer(Value::Null, metaspace("first", false), sentence_bpe(), false),
        ),
        (
            "unigram",
            tokenizer(Value::Null, metaspace("always", true), unigram(), true),
        ),
        (
            "lower",
            tokenizer(
                json!({"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}, replace]}),
                Value::Null,
                unigram(),
                false,
            ),
        ),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn the_ids_are_the_librarys(words in proptest::collection::vec(
        prop_oneof![proptest::sample::select(&WORDS[..]), proptest::sample::select(&["<s>", "<s>x", "<|end|>", "<mask>", "AT", " x"][..])], 0..24),
        limit in 0..40usize,
    ) {
        let text = words.concat();
        for (name, tokenizer) in tokenizers() {
            let stream = StreamEncoder::of(&tokenizer).unwrap_or_else(|| panic!("{name}"));
            let whole = encode_with(&tokenizer, &text, false).unwrap();
            prop_assert_eq!(&stream.encode(&tokenizer, &text, usize::MAX).unwrap(), &whole, "{} {:?}", name, &text);
            let cut = stream.encode(&tokenizer, &text, limit).unwrap();
            prop_assert!(whole.starts_with(&cut) && (cut.len() > limit || cut == whole), "{} {:?} {}", name, &text, limit);
            if let Some(normalizer) = tokenizer.get_normalizer() {
                let mut normalized = NormalizedString::from(text.as_str());
                normalizer.normalize(&mut normalized).unwrap();
                prop_assert_eq!(stream.normalize(&text).unwrap(), normalized.get());
            }
        }
    }
}

#[test]
fn tokenizers_with_other_steps_cannot_encode_in_parts() {
    let model = || byte_bpe(json!({}));
    let replace = |pattern: Value, content: &str| json!({"type": "Replace", "pattern": pattern, "content": content});
    let removed = split(json!({"String": " "}), "Removed");
    let prefixed = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
    let forms_last =
        json!({"type": "Sequence", "normalizers": [replace(json!({"String": " "}), "\u{301}"), {"type": "NFC"}]});
    for (normalizer, pre_tokenizer, model) in [
        (Value::Null, removed, model()),
        (Value::Null, prefixed, model()),
        (Value::Null, json!({"type": "Whitespace"}), model()),
        (replace(json!({"Regex": " +"}), "x"), Value::Null, model()),
        (replace(json!({"String": "ab"}), "x"), Value::Null, model()),
        (replace(json!({"String": " "}), ""), Value::Null, model()),
        (
            json!({"type": "Strip", "strip_left": true, "strip_right": true}),
            Value::Null,
            model(),
        ),
        (forms_last, Value::Null, model()),
        (Value::Null, Value::Null, byte_bpe(json!({"dropout": 0.1}))),
        (
            Value::Null,
            Value::Null,
            json!({"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}),
        ),
    ] {
        assert!(StreamEncoder::of(&tokenizer(normalizer, pre_tokenizer, model, false)).is_none());
    }
}

#[test]
fn a_long_text_that_cannot_be_cut_is_an_error() {
    let long = "a".repeat(STRETCH_BYTES_MAX + 1);
    for (name, tokenizer) in tokenizers() {
        let stream = StreamEncoder::of(&tokenizer).unwrap();
        let encoded = stream.encode(&tokenizer, &long, 1_000);
        match name {
            // This pre-tokenizer splits after each `a`.
            "merged_with_previous" => assert_eq!(encoded.unwrap().len(), 1_001),
            _ => assert!(
                encoded.unwrap_err().contains("bytes that the tokenizer cannot split"),
                "{name}"
            ),
        }
        // The limit is reached before the long stretch.
        let text = format!("{}{long}", "the, ".repeat(1_000));
        if name != "unigram" && tokenizer.get_normalizer().is_none() {
            assert!(
                stream.encode(&tokenizer, &text, 500).is_ok_and(|ids| ids.len() > 500),
                "{name}"
            );
        }
    }
}

#[test]
fn too_much_backtracking_is_an_error_of_the_text() {
    let slow = split(json!({"Regex": "(x+x+)+y|a"}), "Isolated");
    let tokenizer = tokenizer(Value::Null, slow, sentence_bpe(), false);
    let stream = StreamEncoder::of(&tokenizer).unwrap();
    assert_eq!(stream.encode(&tokenizer, "aaa", 9).unwrap().len(), 3);
    let error = stream.encode(&tokenizer, &"x".repeat(64), 9).unwrap_err();
    assert!(error.contains("gives up on this text"), "{error}");
}
