//! Tests of the tokenizer with small vocabularies of each kind.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

mod long;

fn small() -> Tokenizer {
    Tokenizer::from_words(&["hello", " world", "\n\n"], &["<|im_start|>", "<|im_end|>"]).unwrap()
}

/// A vocabulary in SentencePiece's style: `▁` for spaces, byte fallback, and `<s>` before every
/// text.
pub(crate) fn sentencepiece(scheme: Option<&str>) -> Tokenizer {
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(String::from).to_vec();
    tokens.extend((0..=255).map(|b| format!("<0x{b:02X}>")));
    tokens.extend(["▁", "a", "b", "c", "/", "s", "<", ">", "▁a", "ab"].map(String::from));
    let vocab: serde_json::Map<String, Value> = tokens.iter().cloned().zip((0..).map(Value::from)).collect();
    let special = |id: u32| {
        json!({"id": id, "content": tokens[id as usize], "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": true})
    };
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    let (normalizer, pre) = match scheme {
        Some(scheme) => (
            Value::Null,
            json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": false}),
        ),
        None => (
            json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]}),
            Value::Null,
        ),
    };
    let file = json!({
        "version": "1.0", "added_tokens": [special(0), special(1), special(2)],
        "normalizer": normalizer, "pre_tokenizer": pre,
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true,
            "vocab": vocab, "merges": [["▁", "a"], ["a", "b"]]},
    });
    let config = json!({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": "<unk>"});
    Tokenizer::from_json(&file.to_string(), Some(&config.to_string())).unwrap()
}

fn texts<'a>(tokenizer: &'a Tokenizer, ids: &[u32]) -> Vec<&'a str> {
    ids.iter()
        .map(|&id| std::str::from_utf8(tokenizer.token_bytes(id)).unwrap())
        .collect()
}

#[test]
fn byte_level_tokens_have_their_bytes() {
    let tokenizer = small();
    assert_eq!(tokenizer.token_bytes(0x0A), b"\n");
    assert_eq!(tokenizer.token_bytes(0xFF), [0xFF]);
    let ids = tokenizer.encode("hello world", false).unwrap();
    assert_eq!(texts(&tokenizer, &ids), ["hello", " world"]);
    let end = tokenizer.id_of("<|im_end|>").unwrap();
    assert_eq!(tokenizer.special_ids(), [end - 1, end]);
    assert!(tokenizer.is_special(end) && tokenizer.token_bytes(end).is_empty());
    assert_eq!(tokenizer.vocab_size() as u32, end + 1);
    assert_eq!(tokenizer.eos_id(), Some(end));
    assert_eq!(tokenizer.token_bytes(u32::MAX), b"");
    assert_eq!(tokenizer.hash().len(), 64);
}

#[test]
fn plain_text_recognises_no_special_token() {
    let tokenizer = small();
    let text = "hello<|im_end|>\n\n";
    assert!(
        tokenizer
            .encode(text, false)
            .unwrap()
            .contains(&tokenizer.id_of("<|im_end|>").unwrap())
    );
    let plain = tokenizer.encode_plain(text);
    assert!(plain.iter().all(|&id| !tokenizer.is_special(id)));
    assert_eq!(tokenizer.decode(&plain), text);
}

#[test]
fn sentencepiece_tokens_have_their_bytes() {
    let tokenizer = sentencepiece(Some("first"));
    assert_eq!(tokenizer.token_bytes(tokenizer.id_of("▁a").unwrap()), b" a");
    assert_eq!(tokenizer.token_bytes(3), [0]);
    let ids = tokenizer.encode_plain("é");
    assert_eq!(ids.len(), 2);
    assert_eq!(tokenizer.decode(&ids), "é");
}

/// In Gemma's files runs of spaces are added tokens, written with `▁` like other tokens.
#[test]
fn added_tokens_of_the_vocabulary_are_decoded_like_others() {
    let mut tokens: Vec<String> = (0..=255).map(|b| format!("<0x{b:02X}>")).collect();
    tokens.extend(["▁", "▁▁", "a", "b"].map(String::from));
    let vocab: serde_json::Map<String, Value> = tokens.iter().cloned().zip((0..).map(Value::from)).collect();
    let file = json!({
        "version": "1.0",
        "added_tokens": [{"id": 257, "content": "▁▁", "single_word": false, "lstrip": false, "rstrip": false,
                          "normalized": false, "special": false}],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "BPE", "byte_fallback": true, "vocab": vocab, "merges": [["▁", "▁"]]},
    })
    .to_string();
    let tokenizer = Tokenizer::from_json(&file, None).unwrap();
    assert_eq!(
        (tokenizer.token_bytes(257), tokenizer.is_special(257)),
        (&b"  "[..], false)
    );
    let ids = tokenizer.encode_plain("a  b");
    assert_eq!(ids, [258, 257, 259]);
    assert_eq!(tokenizer.decode(&ids), "a  b");
    // The library decodes them in the same way.
    let inner = HfTokenizer::from_bytes(&file).unwrap();
    assert_eq!(inner.decode(&ids, true).unwrap(), "a  b");
}

/// All forms have one model in memory.
#[test]
fn forms_without_added_tokens_and_prefixes_share_the_vocabulary() {
    let tokenizer = sentencepiece(Some("first"));
    let forms = [
        Some(&tokenizer.first_piece),
        tokenizer.later_piece.as_ref(),
        tokenizer.plain.as_ref(),
    ];
    assert!(forms.iter().flatten().count() > 1);
    for form in forms.into_iter().flatten() {
        assert!(std::ptr::eq(&**form.get_model(), &**tokenizer.full.get_model()));
    }
}

/// Tokens added after the vocabulary was made are literal text, even if their characters stand for
/// bytes in the vocabulary.
#[test]
fn added_tokens_outside_the_vocabulary_are_literal_text() {
    let contents = ["õ", "č", "<think>", "two words"];
    // Some vocabularies lack bytes that training texts did not contain, so added tokens may have
    // the characters of those bytes.
    let text_of = |byte: u8| match bytes::byte_char(byte).to_string() {
        text if contents.contains(&text.as_str()) => format!("unused{byte}"),
        text => text,
    };
    let vocab: serde_json::Map<String, Value> = (0..=255u8).map(|byte| (text_of(byte), Value::from(byte))).collect();
    let added = |(content, id): (&str, u32)| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": true, "special": false})
    };
    let file = json!({
        "version": "1.0", "added_tokens": contents.into_iter().zip(256..).map(added).collect::<Vec<_>>(),
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    });
    let tokenizer = Tokenizer::from_json(&file.to_string(), None).unwrap();
    for (content, id) in contents.into_iter().zip(256..) {
        assert_eq!(tokenizer.token_bytes(id), content.as_bytes());
        let ids = tokenizer.encode(content, false).unwrap();
        assert_eq!((&ids[..], tokenizer.decode(&ids).as_str()), (&[id][..], content));
    }
}

#[test]
fn plain_text_gets_no_space_mark_in_front() {
    for scheme in [Some("first"), Some("always"), Some("never"), None] {
        let tokenizer = sentencepiece(scheme);
        assert_eq!(
            texts(&tokenizer, &tokenizer.encode_plain("ab a")),
            ["ab", " a"],
            "{scheme:?}"
        );
        let first = tokenizer.encode_piece("ab", true).unwrap();
        let later = tokenizer.encode_piece("ab", false).unwrap();
        assert_eq!(first.len(), if scheme == Some("never") { 1 } else { 2 }, "{scheme:?}");
        let marked_later = matches!(scheme, Some("always") | None);
        assert_eq!(later.len(), if marked_later { 2 } else { 1 }, "{scheme:?}");
    }
}

#[test]
fn special_text_in_the_vocabulary_is_cut() {
    // This model matches whole words, including special tokens' texts.
    let words = json!({
        "version": "1.0",
        "added_tokens": [{"id": 1, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false,
                          "normalized": false, "special": true}],
        "decoder": {"type": "Fuse"},
        "model": {"type": "Unigram", "unk_id": 0, "byte_fallback": false,
                  "vocab": [["<unk>", 0.0], ["</s>", -1.0], ["<", -2.0], ["/", -2.0], ["s", -2.0], [">", -2.0]]},
    });
    let tokenizer = Tokenizer::from_json(&words.to_string(), None).unwrap();
    assert_eq!(tokenizer.encode_plain("s</s>s"), [4, 2, 3, 4, 5, 4]);
}

#[test]
fn begin_of_sequence_follows_file_and_config() {
    let tokenizer = sentencepiece(Some("first"));
    assert_eq!(tokenizer.encode("a", true).unwrap()[0], 1);
    assert_ne!(tokenizer.encode("a", false).unwrap()[0], 1);
    assert_eq!(tokenizer.surrounding_ids().unwrap(), (vec![1], vec![]));

    let base = small();
    let bare = json!({"added_tokens": [], "model": {"type": "WordLevel", "vocab": {"u": 0, "a": 1, "e": 2}, "unk_token": "u"}});
    let config = json!({"bos_token": "a", "eos_token": "e", "add_bos_token": true, "add_eos_token": true});
    let tokenizer = Tokenizer::from_json(&bare.to_string(), Some(&config.to_string())).unwrap();
    assert_eq!(tokenizer.encode("x", true).unwrap(), [1, 0, 2]);
    assert_eq!(base.surrounding_ids().unwrap(), (vec![], vec![]));
}

#[test]
fn config_names_templates_and_tokens() {
    let config = json!({
        "bos_token": {"content": "<s>", "lstrip": false}, "eos_token": null, "add_bos_token": true,
        "additional_special_tokens": ["<x>", {"content": "<y>"}],
        "chat_template": [{"name": "default", "template": "d"}, {"name": "rag", "template": "r"}],
    });
    let config = TokenizerConfig::parse(&config.to_string()).unwrap();
    assert_eq!(config.bos_token.as_deref(), Some("<s>"));
    assert_eq!(
        (config.eos_token, config.add_bos_token, config.add_eos_token),
        (None, Some(true), None)
    );
    assert_eq!(config.more_special_tokens, ["<x>", "<y>"]);
    assert_eq!(config.chat_templates.len(), 2);
    assert!(TokenizerConfig::parse("{\"chat_template\": 3}").is_err());
    assert!(TokenizerConfig::parse("[]").is_err());
}

#[test]
fn folders_without_a_usable_tokenizer_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let message = |dir: &Path| Tokenizer::load(dir).unwrap_err().to_string();
    assert!(message(dir.path()).contains("holds no tokenizer: neither `tokenizer.json`"));
    std::fs::write(dir.path().join("tokenizer.model"), b"x").unwrap();
    let text = message(dir.path());
    assert!(
        text.contains("tokenizer.model` is not a usable tokenizer: it is not a model of SentencePiece"),
        "{text}"
    );
    for broken in [
        "",
        "{",
        "[]",
        "{\"model\": {\"type\": \"BPE\"}}",
        "{\"version\": \"9\"}",
        "\u{0}",
    ] {
        std::fs::write(dir.path().join("tokenizer.json"), broken).unwrap();
        let text = message(dir.path());
        assert!(
            text.contains("tokenizer.json` is not a usable tokenizer") && !text.contains('\n'),
            "{text}"
        );
    }
    let lying = json!({
        "added_tokens": [{"id": 7, "content": "<x>", "single_word": false, "lstrip": false, "rstrip": false,
                          "normalized": false, "special": true}],
        "model": {"type": "WordLevel", "vocab": {"u": 0}, "unk_token": "u"},
    });
    std::fs::write(dir.path().join("tokenizer.json"), lying.to_string()).unwrap();
    assert!(message(dir.path()).contains("declares the id 7, but has the id 1"));
}

#[test]
fn a_folder_is_read_with_its_companions() {
    let dir = tempfile::tempdir().unwrap();
    let file = json!({"added_tokens": [], "model": {"type": "WordLevel", "vocab": {"u": 0, "e": 1}, "unk_token": "u"}});
    std::fs::write(dir.path().join("tokenizer.json"), file.to_string()).unwrap();
    std::fs::write(dir.path().join("tokenizer_config.json"), "{\"chat_template\": \"old\"}").unwrap();
    std::fs::write(dir.path().join("special_tokens_map.json"), "{\"eos_token\": \"e\"}").unwrap();
    std::fs::write(dir.path().join("chat_template.jinja"), "new").unwrap();
    std::fs::create_dir(dir.path().join("additional_chat_templates")).unwrap();
    std::fs::write(dir.path().join("additional_chat_templates/tool_use.jinja"), "tools").unwrap();
    let tokenizer = Tokenizer::load(dir.path()).unwrap();
    assert_eq!(tokenizer.eos_id(), Some(1));
    assert!(tokenizer.is_special(1));
    assert_eq!(tokenizer.config().chat_template("default"), Some("new"));
    assert_eq!(tokenizer.config().chat_template("tool_use"), Some("tools"));
}

#[test]
fn ids_without_a_token_are_listed() {
    let file = json!({
        "added_tokens": [{"id": 6, "content": "<x>", "single_word": false, "lstrip": false, "rstrip": false,
                          "normalized": false, "special": true}],
        "model": {"type": "WordLevel", "vocab": {"u": 0, "a": 1, "b": 4, "<x>": 6}, "unk_token": "u"}});
    let tokenizer = Tokenizer::from_json(&file.to_string(), None).unwrap();
    assert_eq!((tokenizer.unused_ids(), tokenizer.vocab_size()), (&[2, 3, 5][..], 7));
    assert!(small().unused_ids().is_empty());
}

#[test]
fn templates_with_undefined_tokens_are_refused() {
    let sequence = json!({"Sequence": {"id": "A", "type_id": 0}});
    let special = json!({"SpecialToken": {"id": "<s>", "type_id": 0}});
    let load = |single: Value, defined: Value| {
        let template = json!({"type": "TemplateProcessing", "single": single, "pair": [sequence, sequence],
                              "special_tokens": defined});
        let file = json!({"added_tokens": [], "post_processor": {"type": "Sequence", "processors": [template]},
            "model": {"type": "WordLevel", "vocab": {"u": 0, "<s>": 1}, "unk_token": "u"}});
        Tokenizer::from_json(&file.to_string(), None)
    };
    let fine = json!({"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}});
    let both = json!([special, sequence]);
    assert_eq!(load(both.clone(), fine).unwrap().encode("a", true).unwrap(), [1, 0]);
    for defined in [
        json!({}),
        json!({"<s>": {"id": "<s>", "ids": [1, 1], "tokens": ["<s>"]}}),
    ] {
        let error = load(both.clone(), defined).unwrap_err().to_string();
        assert!(
            error.contains("special token `<s>`") && !error.contains('\n'),
            "{error}"
        );
    }
}

/// Parts of a file that the library unwraps.
#[test]
fn files_at_which_the_library_panics_are_refused() {
    let model = json!({"type": "WordLevel", "vocab": {"u": 0}, "unk_token": "u"});
    let normalizer = json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"});
    let file = json!({"added_tokens": [], "model": model, "normalizer": normalizer});
    let error = Tokenizer::from_json(&file.to_string(), None).unwrap_err().to_string();
    assert!(
        error.contains("the tokenizers library gives up on it: ") && !error.contains('\n'),
        "{error}"
    );
    // Invalid JSON is detected before the library runs.
    let text = r#"{"added_tokens": [], "decoder": {5: 6}, "model": {}}"#;
    let error = Tokenizer::from_json(text, None).unwrap_err().to_string();
    assert!(error.contains("key must be a string at line 1"), "{error}");
}

/// The library panics at the regex engine's limit on backtracking.
#[test]
fn a_text_at_which_the_regex_engine_gives_up_is_an_error() {
    let file = json!({"added_tokens": [],
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "^(?:QZ|QZ)+$"}, "behavior": "Isolated", "invert": false},
        "model": {"type": "WordLevel", "vocab": {"u": 0, "a": 1}, "unk_token": "u"}});
    let tokenizer = Tokenizer::from_json(&file.to_string(), None).unwrap();
    let text = format!("{}!", "QZ".repeat(200));
    let why = tokenizer.encode(&text, true).unwrap_err();
    assert!(
        why.starts_with("the tokenizers library gives up on this text") && !why.contains('\n'),
        "{why}"
    );
    assert!(tokenizer.encode_piece(&text, true).is_err());
    assert!(tokenizer.encode_plain(&text).is_empty());
    assert_eq!(tokenizer.encode("a", true), Ok(vec![1]), "and goes on");
}

proptest! {
    #[test]
    fn byte_level_text_survives(text in any::<String>()) {
        let tokenizer = small();
        prop_assert_eq!(tokenizer.decode(&tokenizer.encode_plain(&text)), text);
    }
}
