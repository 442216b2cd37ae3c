//! Each form against its original library (`tests/fixtures/make_tokenizers.py`), and what is refused.

use std::fs;
use std::path::PathBuf;

use prost::Message as _;
use serde_json::{Value, json};

use super::*;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizers")
}

fn file(name: &str) -> Vec<u8> {
    fs::read(folder().join(name)).unwrap()
}

fn llama() -> TokenizerConfig {
    TokenizerConfig {
        tokenizer_class: Some("LlamaTokenizer".into()),
        ..TokenizerConfig::default()
    }
}

fn tokenizer(name: &str) -> Tokenizer {
    let bytes = file(name);
    let converted = match name {
        "small.tiktoken" => small_tiktoken(&bytes),
        "tekken.json" => convert(Format::Tekken, &bytes, &llama()),
        _ => convert(Format::SentencePiece, &bytes, &llama()),
    };
    build(converted.unwrap(), llama(), &bytes).unwrap()
}

/// No published vocabulary, so its expression is given.
fn small_tiktoken(bytes: &[u8]) -> Result<Converted, String> {
    Ok(Converted {
        json: of_ranks(&tiktoken::ranks(bytes)?, tiktoken::LLAMA3, &[])?,
        names: SpecialNames::default(),
    })
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

#[test]
fn ids_are_those_of_the_original_libraries() {
    let expected: Value = serde_json::from_slice(&file("expected.json")).unwrap();
    let texts: Vec<&str> = expected["texts"]
        .as_array()
        .unwrap()
        .iter()
        .map(|text| text.as_str().unwrap())
        .collect();
    assert!(texts.len() > 300, "{}", texts.len());
    let repeats = expected["long_repeats"].as_u64().unwrap() as usize;
    let long = expected["long"].as_str().unwrap().repeat(repeats);
    assert!(long.len() > 64 << 10);
    for (name, of) in expected["tokenizers"].as_object().unwrap() {
        let tokenizer = tokenizer(name);
        for (text, want) in texts.iter().zip(of["ids"].as_array().unwrap()) {
            let got = tokenizer.encode_piece(text, true).unwrap();
            assert_eq!(got, ids(want), "{name}: {text:?}");
            let is_special = tokenizer
                .added_tokens()
                .iter()
                .any(|token| text.contains(&token.content));
            if !is_special {
                assert_eq!(tokenizer.encode(text, false).unwrap(), got, "{name}: {text:?}");
            }
            // What is written is read back, unknown characters aside.
            let unknown = got.iter().any(|id| tokenizer.is_special(*id));
            let read = tokenizer.decode(&got);
            let read = if tokenizer.prefixes_space() {
                &read[1.min(read.len())..]
            } else {
                &read[..]
            };
            assert!(
                unknown || read == text.replace('\u{2581}', if name.ends_with("model") { " " } else { "\u{2581}" }),
                "{name}: {text:?} {read:?}"
            );
        }
        let got = tokenizer.encode_piece(&long, true).unwrap();
        let (count, end) = (of["long_ids"].as_u64().unwrap() as usize, ids(&of["long_end"]));
        assert_eq!((got.len(), &got[count - end.len()..]), (count, &end[..]), "{name}");
    }
}

/// Also ids whose bytes are no text: each token's bytes are what streamed answers are put together from.
#[test]
fn bytes_are_those_of_the_original_libraries() {
    let expected: Value = serde_json::from_slice(&file("expected.json")).unwrap();
    let mut invalid = 0;
    for name in ["small.tiktoken", "tekken.json"] {
        let tokenizer = tokenizer(name);
        for sequence in expected["tokenizers"][name]["sequences"].as_array().unwrap() {
            let ids = ids(&sequence[0]);
            let bytes: Vec<u8> = ids.iter().flat_map(|id| tokenizer.token_bytes(*id)).copied().collect();
            assert_eq!(
                data_encoding::HEXLOWER.encode(&bytes),
                sequence[1].as_str().unwrap(),
                "{name}: {ids:?}"
            );
            invalid += usize::from(str::from_utf8(&bytes).is_err());
            assert_eq!(tokenizer.decode(&ids), String::from_utf8_lossy(&bytes), "{name}");
        }
    }
    assert!(invalid > 20, "{invalid}");
}

#[test]
fn prompts_begin_with_the_files_token() {
    for (name, bos, eos) in [("tekken.json", 1, 2), ("prefixed.model", 1, 2), ("plain.model", 1, 2)] {
        let tokenizer = tokenizer(name);
        assert_eq!(tokenizer.surrounding_ids().unwrap(), (vec![bos], vec![]), "{name}");
        assert_eq!(tokenizer.eos_id(), Some(eos), "{name}");
        assert!(
            tokenizer.is_special(bos) && tokenizer.encode("</s>", false).unwrap() == [eos],
            "{name}"
        );
    }
    // Text of a special token is that token in templates alone, even where it is a whole piece.
    let mut file: Value = serde_json::from_slice(&file("tekken.json")).unwrap();
    file["special_tokens"] = json!([{"rank": 0, "token_str": "abc", "is_control": true}]);
    let bytes = file.to_string().into_bytes();
    let converted = convert(Format::Tekken, &bytes, &llama()).unwrap();
    let special = build(converted, llama(), &bytes).unwrap();
    assert_eq!(special.encode("abc", false).unwrap(), [0]);
    assert!(!special.encode_plain("abc").contains(&0) && !special.encode_piece(" abc abc", true).unwrap().contains(&0));
    let tekken = tokenizer("tekken.json");
    assert_eq!(
        (
            tekken.vocab_size(),
            tekken.id_of("[/INST]"),
            tekken.id_of("<SPECIAL_29>")
        ),
        (1030, Some(4), Some(29))
    );
    assert_eq!(tokenizer("prefixed.model").id_of("[INST]"), Some(3));
    assert_eq!(tokenizer("small.tiktoken").surrounding_ids().unwrap(), (vec![], vec![]));
}

#[track_caller]
fn refused(format: Format, bytes: &[u8], config: &TokenizerConfig, words: &str) {
    let built = convert(format, bytes, config).and_then(|converted| build(converted, config.clone(), bytes));
    let error = built.expect_err(words);
    assert!(error.contains(words) && !error.contains('\n'), "{error}");
}

#[test]
fn tekken_files_that_are_not_understood() {
    let whole: Value = serde_json::from_slice(&file("tekken.json")).unwrap();
    for (pointer, value, words) in [
        ("/config/version", json!("v99"), "version `v99` is not known"),
        ("/config/version", json!("v11"), "lists no `special_tokens`"),
        (
            "/config/default_vocab_size",
            json!(99_999),
            "`default_vocab_size` of 99999",
        ),
        ("/config/default_vocab_size", json!(3), "`default_vocab_size` of 3"),
        (
            "/config/default_num_special_tokens",
            json!(5),
            "lists 20 special tokens",
        ),
        (
            "/config/default_num_special_tokens",
            json!(1_000_000),
            "more than 65536",
        ),
        ("/config/pattern", json!("("), "it"),
        ("/config/lowercase", json!(true), "unknown field `lowercase`"),
        ("/normalizer", json!("nfc"), "unknown field `normalizer`"),
        ("/vocab/7/rank", json!(8), "its token 7 has the rank 8"),
        ("/vocab/7/token_bytes", json!("?"), "not in Base64"),
        ("/vocab/300/token_bytes", json!(""), "is empty"),
        ("/vocab/7/token_bytes", json!("AAE="), "lacks the byte"),
        (
            "/vocab/300/token_bytes",
            whole["vocab"][301]["token_bytes"].clone(),
            "occurs twice",
        ),
        (
            "/special_tokens",
            json!([{"rank": 0, "token_str": "<unk>", "is_control": false}]),
            "`is_control` is false",
        ),
        (
            "/special_tokens",
            json!([{"rank": 1, "token_str": "<s>", "is_control": true}]),
            "rank 1, and 0 is the next",
        ),
        (
            "/special_tokens",
            json!([{"rank": 0, "token_str": "a", "is_control": true}]),
            "is a token of its vocabulary",
        ),
    ] {
        let mut file = whole.clone();
        let (parent, key) = pointer.rsplit_once('/').unwrap();
        let parent = file.pointer_mut(parent).unwrap();
        match parent {
            Value::Array(list) => list[key.parse::<usize>().unwrap()] = value,
            parent => parent[key] = value,
        }
        refused(
            Format::Tekken,
            file.to_string().as_bytes(),
            &TokenizerConfig::default(),
            words,
        );
    }
}

#[test]
fn rank_files_that_are_not_understood() {
    let bytes = file("small.tiktoken");
    refused(
        Format::Tiktoken,
        &bytes,
        &llama(),
        "1001 ranks of tiktoken's and not the expression",
    );
    refused(Format::Tiktoken, b"IQ== 0\nIg== x\n", &llama(), "line 2 is not a token");
    // As many ranks as Llama 3 has are not enough.
    let many: String = (0..128_000u32)
        .map(|rank| format!("{} {rank}\n", data_encoding::BASE64.encode(&rank.to_le_bytes())))
        .collect();
    refused(
        Format::Tiktoken,
        many.as_bytes(),
        &llama(),
        "128000 ranks of tiktoken's and not the expression",
    );
    let twice = [&bytes[..], b"AAAAAA== 5\n"].concat();
    let error = small_tiktoken(&twice).unwrap_err();
    assert!(error.contains("two of its tokens have the rank 5"), "{error}");
    for text in [&b"IQ== 0\nIg== 1\n"[..], b"IQ== 0\r\n", b"IQ== 12"] {
        assert!(tiktoken::is_ranks(text), "{text:?}");
    }
    for text in [
        &b"\x0a\x0e\x0a\x05<unk>\x15"[..],
        b"",
        b"x",
        b" 0",
        b"IQ== ",
        b"IQ== a",
        b"a b c\n",
        b"IQ== 99999999999",
    ] {
        assert!(!tiktoken::is_ranks(text), "{text:?}");
    }
}

/// A file that passes for Llama 3's; its special tokens stand in the configuration.
#[test]
fn llama3s_ranks_are_read() {
    let token = |rank: u32| match rank {
        0..256 => vec![rank as u8],
        1917 => b" world".to_vec(),
        9906 => b"Hello".to_vec(),
        _ => rank.to_be_bytes().to_vec(),
    };
    let line = |rank| format!("{} {rank}\n", data_encoding::BASE64.encode(&token(rank)));
    let dir = tempfile::tempdir().unwrap();
    fs::write(
        dir.path().join("tokenizer.model"),
        (0..128_000).map(line).collect::<String>(),
    )
    .unwrap();
    let load = |config: Value| {
        fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        Tokenizer::load(dir.path())
    };
    let error = load(json!({})).unwrap_err().to_string();
    assert!(error.contains("has no `added_tokens_decoder`"), "{error}");
    let special = |content| json!({"content": content, "special": true});
    let added = json!({"128000": special("<|begin_of_text|>"), "128001": special("<|eot_id|>")});
    let config = json!({"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "added_tokens_decoder": added});
    let tokenizer = load(config).unwrap();
    assert_eq!(
        tokenizer.encode("Hello world<|eot_id|>", true).unwrap(),
        [128_000, 9906, 1917, 128_001]
    );
    assert_eq!((tokenizer.eos_id(), tokenizer.vocab_size()), (Some(128_001), 128_002));
    let gap =
        json!({"bos_token": "<|begin_of_text|>", "added_tokens_decoder": {"128005": special("<|begin_of_text|>")}});
    let error = load(gap).unwrap_err().to_string();
    assert!(error.contains("which is not the next free one"), "{error}");
}

#[test]
fn sentencepiece_files_that_are_not_understood() {
    use sentencepiece::{Model, Normalizer};
    let changed = |change: &dyn Fn(&mut Model)| {
        let mut model = Model::decode(&file("prefixed.model")[..]).unwrap();
        change(&mut model);
        model.encode_to_vec()
    };
    let normalizer = |model: &mut Model, change: &dyn Fn(&mut Normalizer)| change(model.normalizer.as_mut().unwrap());
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (b"x".to_vec(), "not a model of SentencePiece"),
        (Vec::new(), "not a model of SentencePiece"),
        (changed(&|m| m.trainer = None), "no `trainer_spec`"),
        (
            changed(&|m| m.trainer.as_mut().unwrap().model_type = Some(1)),
            "a model of Unigram is not supported",
        ),
        (
            changed(&|m| m.trainer.as_mut().unwrap().treat_whitespace_as_suffix = Some(true)),
            "`treat_whitespace_as_suffix`",
        ),
        (
            changed(&|m| m.trainer.as_mut().unwrap().byte_fallback = Some(false)),
            "256 tokens of bytes",
        ),
        (
            changed(&|m| normalizer(m, &|n| n.precompiled_charsmap = Some(vec![1]))),
            "the normalization `identity`",
        ),
        (
            changed(&|m| normalizer(m, &|n| n.normalization_rule_tsv = Some(vec![1]))),
            "the normalization `identity`",
        ),
        (
            changed(&|m| normalizer(m, &|n| n.remove_extra_whitespaces = None)),
            "`remove_extra_whitespaces`",
        ),
        (
            changed(&|m| normalizer(m, &|n| n.escape_whitespaces = Some(false))),
            "`escape_whitespaces: false`",
        ),
        (
            changed(&|m| m.pieces[500].kind = Some(4)),
            "is of the kind user-defined",
        ),
        (changed(&|m| m.pieces[500].kind = Some(5)), "is of the kind unused"),
        (changed(&|m| m.pieces[500].kind = Some(9)), "is of the kind unknown"),
        (changed(&|m| m.pieces[500].kind = Some(2)), "2 unknown tokens"),
        (changed(&|m| m.pieces[500].text = None), "piece 500 is empty"),
        (
            changed(&|m| m.pieces[500].text = m.pieces[501].text.clone()),
            "occurs twice",
        ),
        (
            changed(&|m| m.pieces[500].text = Some("\u{10FFFD}a".into())),
            "which is no piece",
        ),
        (
            changed(&|m| m.pieces[500].score = m.pieces[501].score),
            "have the same score",
        ),
        (changed(&|m| m.pieces[500].score = Some(f32::NAN)), "has no score"),
    ];
    for (bytes, words) in cases {
        refused(Format::SentencePiece, &bytes, &llama(), words);
    }
    let class = |class: Option<&str>| TokenizerConfig {
        tokenizer_class: class.map(String::from),
        ..TokenizerConfig::default()
    };
    let bytes = file("prefixed.model");
    refused(
        Format::SentencePiece,
        &bytes,
        &class(None),
        "names no `tokenizer_class`",
    );
    refused(
        Format::SentencePiece,
        &bytes,
        &class(Some("T5Tokenizer")),
        "has `T5Tokenizer` as its `tokenizer_class`",
    );
}

/// `legacy: false`: what stands behind a special token gets no space mark.
#[test]
fn the_prefix_behind_special_tokens_is_the_configurations() {
    let bytes = file("prefixed.model");
    let of = |legacy| {
        let config = TokenizerConfig { legacy, ..llama() };
        let converted = convert(Format::SentencePiece, &bytes, &config).unwrap();
        build(converted, config, &bytes).unwrap()
    };
    let (always, first) = (of(None), of(Some(false)));
    assert_eq!(
        always.encode("the mill", false).unwrap(),
        first.encode("the mill", false).unwrap()
    );
    let behind = |tokenizer: &Tokenizer| tokenizer.decode(&tokenizer.encode("[INST]the", false).unwrap());
    assert_eq!((behind(&always), behind(&first)), (" the".to_owned(), "the".to_owned()));
}

#[test]
fn the_file_that_is_read_is_told_by_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let found = || find(dir.path()).map(|path| path.file_name().unwrap().to_string_lossy().into_owned());
    assert_eq!(found(), None);
    for name in ["a.tiktoken", "tiktoken.model", "tokenizer.model", "tekken.json"] {
        fs::write(dir.path().join(name), "").unwrap();
        assert_eq!(found().unwrap(), name);
    }
    let ranks = tempfile::tempdir().unwrap();
    for name in ["a.tiktoken", "b.tiktoken"] {
        fs::write(ranks.path().join(name), "").unwrap();
    }
    assert_eq!(find(ranks.path()), None);
}
