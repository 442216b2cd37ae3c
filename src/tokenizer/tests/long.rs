//! Tests of long texts, and of files that exceed the limits.

use serde_json::{Value, json};

use super::super::encode::encode_with;
use super::{Tokenizer, sentencepiece, small};

/// More bytes than are encoded at once.
const LONG_BYTES: usize = 70_000;

#[test]
fn long_texts_have_the_same_tokens() {
    let word = "hello world, \n\n<|im_end|>ab 123 e\u{301}\u{4E2D}</s> ";
    let text = word.repeat(LONG_BYTES / word.len() + 1);
    for tokenizer in [
        small(),
        sentencepiece(None),
        sentencepiece(Some("first")),
        sentencepiece(Some("always")),
    ] {
        for add_special in [false, true] {
            let whole = encode_with(&tokenizer.full, &text, add_special).unwrap();
            assert_eq!(tokenizer.encode(&text, add_special).unwrap(), whole);
            let cut = tokenizer.encode_within(&text, add_special, 100).unwrap();
            assert!(cut.is_cut && cut.ids.len() > 100 && cut.ids.len() < 300 && whole.starts_with(&cut.ids));
        }
        let pieces = [
            &tokenizer.first_piece,
            tokenizer.later_piece.as_ref().unwrap_or(&tokenizer.first_piece),
        ];
        for (first, encoder) in [true, false].into_iter().zip(pieces) {
            let whole = encode_with(encoder, &text, false).unwrap();
            assert_eq!(tokenizer.encode_piece(&text, first).unwrap(), whole);
        }
    }
}

/// A Unigram vocabulary that contains a special token's text. The model finds it in plain text, so
/// the text is cut.
fn with_special_text() -> Tokenizer {
    let special = json!({"id": 1, "content": "<s>", "special": true, "normalized": false, "single_word": false, "lstrip": false, "rstrip": false});
    let vocab = [
        ("<unk>", 0.0),
        ("<s>", -1.0),
        ("<", -5.0),
        ("s", -5.0),
        (">", -5.0),
        ("a", -5.0),
    ];
    let json = json!({"version": "1.0", "added_tokens": [special], "decoder": {"type": "Fuse"},
                      "model": {"type": "Unigram", "unk_id": 0, "vocab": vocab.map(|(text, score)| json!([text, score]))}});
    Tokenizer::from_json(&json.to_string(), None).unwrap()
}

#[test]
fn many_special_tokens_in_plain_text_are_cut_in_bounded_time() {
    let tokenizer = with_special_text();
    assert_eq!(
        tokenizer.encode_piece("a<s>a<s>", true).unwrap(),
        [5, 2, 3, 4, 5, 2, 3, 4]
    );
    let text = "a<s>".repeat(200_000);
    let ids = tokenizer.encode_piece(&text, true).unwrap();
    assert_eq!(ids, [5, 2, 3, 4].repeat(200_000));
    let cut = tokenizer.encode_piece_within(&text, true, 9).unwrap();
    assert!(cut.is_cut && cut.ids.starts_with(&ids[..10]), "{:?}", cut.ids.len());
}

/// The file of a small tokenizer, with a change.
fn changed(change: impl FnOnce(&mut Value)) -> Result<Tokenizer, String> {
    let vocab = json!({"a": 0, "b": 1, "ab": 2});
    let mut json = json!({"version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null, "decoder": {"type": "Fuse"},
                          "model": {"type": "BPE", "vocab": vocab, "merges": [["a", "b"]]}});
    change(&mut json);
    Tokenizer::from_json(&json.to_string(), None).map_err(|e| e.to_string())
}

fn splitting(regex: &str) -> Value {
    json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false})
}

#[test]
fn files_beyond_a_limit_are_refused() {
    let replace = |content: &str| json!({"type": "Replace", "pattern": {"String": "a"}, "content": content});
    let bert = json!({"type": "WordPiece", "vocab": {"[UNK]": 0, "a": 1}, "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                      "max_input_chars_per_word": 201});
    let added = |content: String| {
        json!({"id": 3, "content": content, "special": true, "normalized": false, "single_word": false,
                                         "lstrip": false, "rstrip": false})
    };
    let chain = (1..300).map(|count| json!(["a".repeat(count), -1.0]));
    let chain: Vec<Value> = [json!(["<unk>", 0.0])].into_iter().chain(chain).collect();
    assert!(changed(|_| {}).is_ok());
    for (path, value, words) in [
        ("/pre_tokenizer", splitting("(x+x+)+y|a"), "too slow"),
        (
            "/pre_tokenizer",
            splitting(&"a".repeat(17_000)),
            "bytes in an expression: 17000, more than 16384",
        ),
        (
            "/normalizer",
            json!({"type": "Sequence", "normalizers": vec![replace("aa"); 10]}),
            "for one input byte: 1024, more than 512",
        ),
        (
            "/normalizer",
            json!({"type": "Sequence", "normalizers": vec![json!({"type": "NFC"}); 65]}),
            "steps in its normalizer: 65",
        ),
        ("/normalizer", replace(&"b".repeat(513)), "for one input byte: 513"),
        ("/model", bert, "`max_input_chars_per_word` is 201, more than 200"),
        (
            "/model",
            json!({"type": "Unigram", "unk_id": 0, "vocab": chain}),
            "that are prefixes of other tokens",
        ),
        (
            "/added_tokens",
            json!([added("x".repeat(513))]),
            "bytes in an added token: 513, more than 512",
        ),
    ] {
        let refused = changed(|json| *json.pointer_mut(path).unwrap() = value).unwrap_err();
        assert!(refused.contains(words), "{words}: {refused}");
    }
    let long = changed(|json| {
        drop(
            json["model"]["vocab"]
                .as_object_mut()
                .unwrap()
                .insert("c".repeat(4097), json!(3)),
        )
    });
    assert!(
        long.unwrap_err()
            .contains("bytes in a token of its vocabulary: 4097, more than 4096")
    );
    let dropout = changed(|json| json["model"]["dropout"] = json!(0.6));
    assert!(dropout.unwrap_err().contains("`dropout` is 0.6"));
}

#[test]
fn published_expressions_are_fast_enough() {
    for regex in [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        concat!(
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
            r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
        r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+",
    ] {
        if let Err(error) = changed(|json| json["pre_tokenizer"] = splitting(regex)) {
            panic!("{regex}: {error}");
        }
    }
}
