//! The tokenizer in a GGUF file's metadata: tokens with their types, and merges or scores.
//!
//! A `tokenizer.json` beside the file counts in its place: it says what the metadata do not (white space that
//! added tokens take with them, and where a space mark stands behind special tokens).

use std::path::Path;

use data_encoding::HEXLOWER;
use serde_json::{Map, Value as Json, json};
use sha2::{Digest, Sha256};

use super::added_token;
use super::sentencepiece::{Piece, Pieces, Prefix, UNKNOWN};
use super::splits::Split;
use crate::gguf::{GgufError, GgufSet, Header, Value};
use crate::tokenizer::config::read_limited;
use crate::tokenizer::{TOKENIZER_BYTES_MAX, Tokenizer, TokenizerConfig, TokenizerError};

const PREFIX: &str = "tokenizer.";
const TEMPLATE: &str = "tokenizer.chat_template";

// Types of tokens, as SentencePiece numbers them.
const NORMAL: u64 = 1;
const USER_DEFINED: u64 = 4;
const UNUSED: u64 = 5;
const BYTE: u64 = 6;

/// Keys below `tokenizer.ggml.` that are read, or say what no text depends on. So do ids of single tokens.
const KNOWN: [&str; 10] = [
    "model",
    "pre",
    "tokens",
    "token_type",
    "token_type_count",
    "scores",
    "merges",
    "add_bos_token",
    "add_eos_token",
    "add_space_prefix",
];

/// The tokenizer of a GGUF model. `None`: there is no such model.
pub(super) fn load(dir: &Path) -> Result<Option<Tokenizer>, TokenizerError> {
    let Some(set) = open(dir)? else { return Ok(None) };
    let broken = |why| TokenizerError::Broken {
        path: set.path().to_owned(),
        why,
    };
    let metadata = Metadata(set.metadata());
    let config = metadata.config().map_err(broken)?;
    let json = metadata.json().map_err(broken)?.to_string();
    let mut tokenizer = Tokenizer::build(json.as_bytes(), config).map_err(broken)?;
    // Of what the file says, not of what it became: another version of this program may write it otherwise.
    let mut hash = Sha256::new();
    for (key, place) in metadata.0.places(PREFIX) {
        hash.update((key.len() as u64).to_le_bytes());
        hash.update(key);
        hash.update((place.len() as u64).to_le_bytes());
        hash.update(&set.files[0].map[place]);
    }
    tokenizer.hash = HEXLOWER.encode(&hash.finalize());
    Ok(Some(tokenizer))
}

/// Special tokens, flags and chat templates of a GGUF model without a `tokenizer.json` beside it. `None`: there is
/// no such model.
pub(in crate::tokenizer) fn config(dir: &Path) -> Result<Option<TokenizerConfig>, TokenizerError> {
    let Some(set) = open(dir)? else { return Ok(None) };
    let config = Metadata(set.metadata()).config();
    config.map(Some).map_err(|why| TokenizerError::Broken {
        path: set.path().to_owned(),
        why,
    })
}

/// A warning if a `tokenizer.json` beside a GGUF model gives an id to another token than the file does: texts would be cut into
/// tokens that the model has not learned. Added tokens, whose texts are converted, are not compared.
/// Nor is there a warning where one of the two cannot be read, which is reported as such.
pub(in crate::tokenizer) fn warning(dir: &Path) -> Option<String> {
    let path = dir.join("tokenizer.json");
    if !path.exists() {
        return None;
    }
    let set = open_model(dir).ok()??;
    let bytes = read_limited(&path, TOKENIZER_BYTES_MAX).ok()?;
    let tokenizer: Json = serde_json::from_slice(&bytes).ok()?;
    let metadata = Metadata(set.metadata());
    let tokens = metadata.tokens().ok()?;
    let types = metadata.types(tokens.len()).ok()?;
    let vocabulary = tokenizer["model"]["vocab"].as_object();
    let mut other = vocabulary.into_iter().flatten().filter_map(|(token, id)| {
        let id = usize::try_from(id.as_u64()?).ok()?;
        let differs = match types.get(id) {
            None => true,
            Some(kind) => *kind == NORMAL && tokens[id] != token,
        };
        differs.then_some(id)
    });
    let first = other.next()?;
    let (differing, first) = other.fold((1, first), |(count, first), id| (count + 1, first.min(id)));
    Some(format!(
        "`{}` counts in place of the tokenizer of `{}`, and {differing} of its tokens are others there (the first is {first}): it may be \
         another model's, and answers wrong; without it, the GGUF file's own is read",
        path.display(),
        set.path().display()
    ))
}

fn open(dir: &Path) -> Result<Option<GgufSet>, TokenizerError> {
    if dir.join("tokenizer.json").exists() {
        return Ok(None);
    }
    open_model(dir)
}

fn open_model(dir: &Path) -> Result<Option<GgufSet>, TokenizerError> {
    GgufSet::open(dir).map_err(|error| match error {
        GgufError::Read { path, source } => TokenizerError::Read { path, source },
        GgufError::File { path, problem } => TokenizerError::Broken {
            path,
            why: problem.message().to_owned(),
        },
    })
}

/// A file's metadata.
struct Metadata<'a>(&'a Header);

impl Metadata<'_> {
    fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(&format!("{PREFIX}ggml.{key}"))
    }

    fn text(&self, key: &str) -> Option<&str> {
        self.get(key).and_then(Value::text)
    }

    fn flag(&self, key: &str) -> Result<Option<bool>, String> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let flag = value.flag();
        flag.map(Some)
            .ok_or_else(|| format!("`tokenizer.ggml.{key}` is neither true nor false"))
    }

    /// A list of as many values as there are tokens.
    fn list(&self, key: &str, length: Option<usize>) -> Result<Option<&[Value]>, String> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let list = value
            .list()
            .filter(|list| length.is_none_or(|length| list.len() == length));
        list.map(Some)
            .ok_or_else(|| format!("`tokenizer.ggml.{key}` is no list with a value for each token"))
    }

    fn tokens(&self) -> Result<Vec<&str>, String> {
        let tokens = self.list("tokens", None)?.ok_or("it has no `tokenizer.ggml.tokens`")?;
        let texts: Option<Vec<&str>> = tokens.iter().map(Value::text).collect();
        texts.ok_or_else(|| "`tokenizer.ggml.tokens` holds a value that is no text".into())
    }

    /// The types of all tokens; without any, all are normal.
    fn types(&self, tokens: usize) -> Result<Vec<u64>, String> {
        let Some(types) = self.list("token_type", Some(tokens))? else {
            return Ok(vec![NORMAL; tokens]);
        };
        let known = |kind: &Value| kind.whole().filter(|kind| (NORMAL..=BYTE).contains(kind));
        let types: Option<Vec<u64>> = types.iter().map(known).collect();
        types.ok_or_else(|| "`tokenizer.ggml.token_type` holds a type that is not known".into())
    }

    fn id(&self, key: &str) -> Result<Option<usize>, String> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let id = value.whole().filter(|id| *id < u64::from(u32::MAX));
        id.map(|id| Some(id as usize))
            .ok_or_else(|| format!("`tokenizer.ggml.{key}` is no token id"))
    }

    /// Whether pieces are merged by scores, as SentencePiece does.
    fn is_scored(&self) -> Result<bool, String> {
        match self.text("model") {
            Some("llama") => Ok(true),
            Some("gpt2") => Ok(false),
            None => Err("it has no tokenizer (`tokenizer.ggml.model`)".into()),
            Some(other) => Err(format!(
                "its tokenizer is of the kind `{}` (`tokenizer.ggml.model`), which is not read; gpt2 and llama are: put the \
                 `tokenizer.json` of the model beside the file, in a folder of their own, and give the folder",
                other.escape_debug()
            )),
        }
    }

    fn split(&self) -> Result<Split, String> {
        Split::of(self.text("pre").unwrap_or("default"))
    }

    /// Special tokens, flags and templates.
    fn config(&self) -> Result<TokenizerConfig, String> {
        let is_scored = self.is_scored()?;
        let tokens = self.tokens()?;
        let named = |key: &str, default: Option<usize>| -> Result<Option<String>, String> {
            let Some(id) = self.id(key)?.or(default) else {
                return Ok(None);
            };
            let token = tokens
                .get(id)
                .ok_or_else(|| format!("`tokenizer.ggml.{key}` is {id}, and there are {} tokens", tokens.len()))?;
            Ok(Some((*token).to_owned()).filter(|token| !token.is_empty()))
        };
        // Files of scored pieces may leave out the ids that all of the first ones had.
        let default = |id: usize| is_scored.then_some(id).filter(|id| *id < tokens.len());
        let adds_bos = if is_scored { true } else { self.split()?.adds_bos };
        let mut config = TokenizerConfig {
            bos_token: named("bos_token_id", default(1))?,
            eos_token: named("eos_token_id", default(2))?,
            unk_token: named("unknown_token_id", default(0))?,
            pad_token: named("padding_token_id", None)?,
            ..TokenizerConfig::default()
        };
        let adds_bos = self.flag("add_bos_token")?.unwrap_or(adds_bos);
        if adds_bos && config.bos_token.is_none() {
            return Err(
                "each prompt begins with a token (`tokenizer.ggml.add_bos_token`), and none is named for it".into(),
            );
        }
        config.add_bos_token = Some(adds_bos);
        config.add_eos_token = Some(self.flag("add_eos_token")?.unwrap_or(false));
        for (key, value) in self.0.keys() {
            let name = match key.strip_prefix(TEMPLATE) {
                Some("") => "default",
                Some(name) => match name.strip_prefix('.') {
                    Some(name) => name,
                    None => continue,
                },
                None => continue,
            };
            let text = value
                .text()
                .ok_or_else(|| format!("`{}` is no text", key.escape_debug()))?;
            config.set_template(name, text.to_owned());
        }
        Ok(config)
    }

    /// Refuses keys that are set and not known.
    fn check_keys(&self) -> Result<(), String> {
        let prefix = format!("{PREFIX}ggml.");
        for (key, value) in self.0.keys() {
            let Some(name) = key.strip_prefix(&prefix) else {
                continue;
            };
            let is_set = match value {
                Value::Bool(flag) => *flag,
                Value::List(list) => !list.is_empty(),
                Value::Text(text) => !text.is_empty(),
                value => value.number() != Some(0.0),
            };
            if is_set && !KNOWN.contains(&name) && !name.ends_with("_token_id") {
                return Err(format!("`{}` is not supported", key.escape_debug()));
            }
        }
        Ok(())
    }

    /// The tokenizer as a `tokenizer.json`.
    fn json(&self) -> Result<Json, String> {
        let is_scored = self.is_scored()?;
        self.check_keys()?;
        let tokens = self.tokens()?;
        let types = self.types(tokens.len())?;
        if is_scored {
            self.of_scores(&tokens, &types)
        } else {
            self.of_merges(&tokens, &types)
        }
    }

    fn of_merges(&self, tokens: &[&str], types: &[u64]) -> Result<Json, String> {
        let split = self.split()?;
        let merges = self.list("merges", None)?.ok_or("it has no `tokenizer.ggml.merges`")?;
        let pair = |merge: &Value| {
            let text = merge.text()?;
            // The first part may begin with a space.
            let at = text.char_indices().skip(1).find(|(_, char)| *char == ' ')?.0;
            Some(json!([text[..at], text[at + 1..]]))
        };
        let merges: Option<Vec<Json>> = merges.iter().map(pair).collect();
        let merges = merges.ok_or("`tokenizer.ggml.merges` holds a value that is no pair")?;
        let (mut vocab, mut added) = (Map::new(), Vec::new());
        for ((text, kind), id) in tokens.iter().zip(types).zip(0u32..) {
            if text.is_empty() || *kind == UNUSED {
                continue;
            }
            // Added tokens are among the others, or the first of them would get the first id that is free.
            if vocab.insert((*text).to_owned(), json!(id)).is_some() {
                return Err(format!("its token `{}` occurs twice", text.escape_debug()));
            }
            if ![NORMAL, BYTE].contains(kind) {
                added.push(added_token(id, text, *kind != USER_DEFINED));
            }
        }
        let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
        Ok(json!({
            "version": "1.0",
            "added_tokens": added,
            "normalizer": split.normalizer(),
            "pre_tokenizer": split.pre_tokenizer(),
            "decoder": bytes,
            "model": {"type": "BPE", "ignore_merges": split.ignores_merges, "vocab": vocab, "merges": merges},
        }))
    }

    fn of_scores(&self, tokens: &[&str], types: &[u64]) -> Result<Json, String> {
        let scores = self.list("scores", Some(tokens.len()))?;
        let scores = scores.ok_or("it has no `tokenizer.ggml.scores`")?;
        let unknown = self.id("unknown_token_id")?.unwrap_or(0);
        let piece = |(id, ((text, kind), score)): (usize, ((&&str, &u64), &Value))| {
            // A file may have the unknown token as a control token, and names its id.
            let kind = if id == unknown { UNKNOWN } else { *kind as i32 };
            let score = score.number().map(|score| score as f32);
            Piece {
                text: Some((**text).to_owned()),
                score: Some(score.unwrap_or(f32::NAN)),
                kind: Some(kind),
            }
        };
        let all = tokens.iter().zip(types).zip(scores).enumerate();
        let pieces: Vec<Piece> = all.map(piece).collect();
        let byte_fallback = types.contains(&BYTE);
        let prefix = if self.flag("add_space_prefix")?.unwrap_or(true) {
            Prefix::Always
        } else {
            Prefix::Never
        };
        let mut json = Pieces::of(&pieces, byte_fallback, true)?.written(prefix, byte_fallback)?;
        if self.0.get("general.architecture").and_then(Value::text) == Some("phi3") {
            strip_behind(&mut json);
        }
        Ok(json)
    }
}

/// Phi-3's tokens take the white space behind them, but for those that are older than the model. No key says so.
fn strip_behind(json: &mut Json) {
    for token in json["added_tokens"].as_array_mut().into_iter().flatten() {
        let strips = !["<unk>", "<s>", "<|endoftext|>"]
            .iter()
            .any(|text| token["content"] == *text);
        token["rstrip"] = json!(strips);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use super::*;
    use crate::gguf::testing::{Writer, text, texts};

    fn fixture(name: &str) -> PathBuf {
        PathBuf::from(env!("CARGO_MANIFEST_DIR"))
            .join("tests/fixtures/tokenizers")
            .join(name)
    }

    fn json(name: &str) -> Json {
        serde_json::from_slice(&fs::read(fixture(name)).unwrap()).unwrap()
    }

    /// What the digits of a text's ids are in the expected file.
    fn digest(ids: &[u32]) -> String {
        let list: Vec<String> = ids.iter().map(u32::to_string).collect();
        HEXLOWER.encode(&Sha256::digest(list.join(",")))[..8].to_owned()
    }

    /// Whether a text holds the text of a token that scored models tell apart from it.
    fn names_special(tokenizer: &Tokenizer, text: &str) -> bool {
        tokenizer
            .added_tokens()
            .iter()
            .any(|token| text.contains(&token.content))
    }

    #[test]
    fn ids_are_those_of_transformers_and_of_sentencepiece() {
        let expected = json("expected_gguf.json");
        let (first, more) = (json("expected.json"), expected["more_texts"].as_array().unwrap());
        let all: Vec<&Json> = first["texts"].as_array().unwrap().iter().chain(more).collect();
        let mut compared = 0;
        for (name, digests) in expected["ids"].as_object().unwrap() {
            let tokenizer = Tokenizer::load(&fixture(&format!("{name}.gguf"))).unwrap();
            let digests = digests.as_array().unwrap();
            assert_eq!(digests.len(), all.len(), "{name}");
            for (text, want) in all.iter().zip(digests) {
                let text = text.as_str().unwrap();
                if name == "scored" && names_special(&tokenizer, text) {
                    continue;
                }
                let ids = tokenizer.encode(text, true).unwrap();
                assert_eq!(digest(&ids), want.as_str().unwrap(), "{name}: {text:?}: {ids:?}");
                compared += 1;
            }
        }
        assert!(compared > 3300, "{compared}");
    }

    #[test]
    fn special_tokens_and_templates_are_the_files() {
        let llama = Tokenizer::load(&fixture("llama-bpe.gguf")).unwrap();
        let bos = llama.id_of("<s>").unwrap();
        assert_eq!(llama.surrounding_ids().unwrap(), (vec![bos], vec![]));
        assert_eq!(llama.eos_id(), llama.id_of("</s>"));
        let template = llama.config().chat_template("default").unwrap();
        assert!(template.starts_with("{{ bos_token }}"), "{template}");
        for (text, is_special) in [("<s>", true), ("[INST]", true), ("<pad>", true), ("<think>", false)] {
            let id = llama.id_of(text).unwrap();
            assert_eq!(llama.encode(text, false).unwrap(), [id], "{text}");
            assert_eq!(llama.is_special(id), is_special, "{text}");
        }
        let gpt2 = Tokenizer::load(&fixture("gpt-2.gguf")).unwrap();
        assert_eq!(gpt2.surrounding_ids().unwrap(), (vec![], vec![]));
        assert_ne!(gpt2.hash(), llama.hash());
        let scored = Tokenizer::load(&fixture("scored.gguf")).unwrap();
        assert_eq!(
            (scored.surrounding_ids().unwrap(), scored.eos_id()),
            ((vec![1], vec![]), Some(2))
        );
        assert!(scored.prefixes_space());
    }

    /// A `tokenizer.json` beside the file counts in its place.
    #[test]
    fn a_tokenizer_beside_the_file_counts() {
        let dir = tempfile::tempdir().unwrap();
        fs::copy(fixture("gpt-2.gguf"), dir.path().join("model.gguf")).unwrap();
        let of_file = Tokenizer::load(dir.path()).unwrap();
        let demo = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("jobs/demo/model");
        fs::copy(demo.join("tokenizer.json"), dir.path().join("tokenizer.json")).unwrap();
        let beside = Tokenizer::load(dir.path()).unwrap();
        assert_ne!(beside.vocab_size(), of_file.vocab_size());
        assert!(TokenizerConfig::load(dir.path()).unwrap().chat_templates.is_empty());
    }

    /// Keys of a small tokenizer of merges, without those of `changes`, and with these.
    fn small(changes: &[(&str, u32, Vec<u8>)]) -> Result<Tokenizer, String> {
        let kinds = [
            &5u32.to_le_bytes()[..],
            &3u64.to_le_bytes(),
            &[1, 0, 0, 0, 1, 0, 0, 0, 3, 0, 0, 0],
        ]
        .concat();
        let keys = [
            ("model", 8, text("gpt2")),
            ("pre", 8, text("gpt-2")),
            ("tokens", 9, texts(&["a", "b", "</s>"])),
            ("token_type", 9, kinds),
            ("merges", 9, texts(&[])),
            ("eos_token_id", 4, 2u32.to_le_bytes().to_vec()),
        ];
        let mut writer = Writer::new(3);
        let changed = |name: &str| changes.iter().any(|(key, ..)| *key == name);
        let kept = keys.iter().filter(|(name, ..)| !changed(name));
        for (name, kind, value) in kept.chain(changes.iter().filter(|(_, _, value)| !value.is_empty())) {
            let is_general = name.starts_with("general.");
            let prefix = if is_general { "" } else { "tokenizer.ggml." };
            writer.key(&format!("{prefix}{name}"), *kind, value);
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.gguf");
        fs::write(&path, writer.bytes()).unwrap();
        Tokenizer::load(&path).map_err(|error| error.to_string())
    }

    #[test]
    fn what_is_not_understood_is_refused_by_name() {
        let id = |id: u32| id.to_le_bytes().to_vec();
        let numbers = |list: &[u32]| {
            let bytes: Vec<u8> = list.iter().flat_map(|number| number.to_le_bytes()).collect();
            [&4u32.to_le_bytes()[..], &(list.len() as u64).to_le_bytes(), &bytes].concat()
        };
        let tokenizer = small(&[]).unwrap();
        assert_eq!(tokenizer.encode("ab</s>", false).unwrap(), [0, 1, 2]);
        // Ids that are not used lie before one that is.
        let gap = [
            ("tokens", 9, texts(&["a", "[PAD1]", "", "b", "<t>", "</s>"])),
            ("token_type", 9, numbers(&[1, 5, 1, 1, 4, 3])),
            ("eos_token_id", 4, id(5)),
        ];
        let tokenizer = small(&gap).unwrap();
        assert_eq!(tokenizer.encode("b<t>a</s>", false).unwrap(), [3, 4, 0, 5]);
        assert_eq!((tokenizer.unused_ids(), tokenizer.eos_id()), (&[1, 2][..], Some(5)));
        for (changes, words) in [
            (vec![("pre", 8, text("own"))], "`tokenizer.ggml.pre`: `own`"),
            (vec![("pre", 8, vec![])], "`tokenizer.ggml.pre`: `default`"),
            (vec![("model", 8, text("t5"))], "of the kind `t5`"),
            (vec![("model", 8, text("gemma4"))], "of the kind `gemma4`"),
            (vec![("model", 8, vec![])], "no tokenizer"),
            (vec![("tokens", 9, vec![])], "no `tokenizer.ggml.tokens`"),
            (vec![("tokens", 9, numbers(&[1, 2, 3]))], "no text"),
            (
                vec![("tokens", 9, texts(&["a", "a", "</s>"]))],
                "token `a` occurs twice",
            ),
            (vec![("token_type", 9, numbers(&[1, 1]))], "a value for each token"),
            (vec![("token_type", 9, numbers(&[1, 1, 7]))], "a type that is not known"),
            (vec![("merges", 9, vec![])], "no `tokenizer.ggml.merges`"),
            (vec![("merges", 9, texts(&["ab"]))], "no pair"),
            (vec![("merges", 9, texts(&["a c"]))], "`c`"),
            (vec![("eos_token_id", 4, id(9))], "is 9, and there are 3 tokens"),
            (vec![("add_bos_token", 7, vec![1])], "none is named for it"),
            (vec![("add_bos_token", 4, id(1))], "neither true nor false"),
            (
                vec![("add_sep_token", 7, vec![1])],
                "`tokenizer.ggml.add_sep_token` is not supported",
            ),
            (
                vec![("remove_extra_whitespaces", 7, vec![1])],
                "remove_extra_whitespaces",
            ),
            (vec![("precompiled_charsmap", 9, numbers(&[1]))], "precompiled_charsmap"),
            (vec![("model", 8, text("llama"))], "no `tokenizer.ggml.scores`"),
        ] {
            let error = small(&changes).expect_err(words);
            assert!(
                error.contains(words) && error.contains("m.gguf") && !error.contains('\n'),
                "{error}"
            );
        }
        for (key, value) in [("add_sep_token", vec![0]), ("remove_extra_whitespaces", vec![0])] {
            small(&[(key, 7, value)]).unwrap();
        }
        small(&[("fim_pre_token_id", 4, id(1))]).unwrap();
    }

    /// Pieces that all have one score say nothing of the order of merges.
    #[test]
    fn scores_that_say_nothing_are_refused() {
        let floats = |list: &[f32]| {
            let bytes: Vec<u8> = list.iter().flat_map(|number| number.to_le_bytes()).collect();
            [&6u32.to_le_bytes()[..], &(list.len() as u64).to_le_bytes(), &bytes].concat()
        };
        let kinds = |list: &[i32]| {
            let bytes: Vec<u8> = list.iter().flat_map(|number| number.to_le_bytes()).collect();
            [&5u32.to_le_bytes()[..], &(list.len() as u64).to_le_bytes(), &bytes].concat()
        };
        let tokens = ["<unk>", "<s>", "</s>", "\u{2581}", "a", "b", "ab", "ba", "zz", "  "];
        let with = |scores: &[f32], more: &[(&str, u32, Vec<u8>)]| {
            let keys = [
                ("model", 8, text("llama")),
                ("pre", 8, vec![]),
                ("merges", 9, vec![]),
                ("tokens", 9, texts(&tokens)),
                ("token_type", 9, kinds(&[2, 3, 3, 1, 1, 1, 1, 1, 5, 4])),
                ("scores", 9, floats(scores)),
            ];
            small(&[&keys[..], more].concat())
        };
        let of = |scores: &[f32]| with(scores, &[]);
        let tokenizer = of(&[0.0, 0.0, 0.0, -9.0, -7.0, -8.0, -1.0, -2.0, -1000.0, -1000.0]).unwrap();
        assert_eq!(tokenizer.encode("aba", true).unwrap(), [1, 3, 6, 4]);
        // A text that is a token wherever it occurs, and one that is not used.
        assert_eq!(tokenizer.encode("a  b", false).unwrap(), [3, 4, 9, 3, 5]);
        assert_eq!(tokenizer.id_of("zz"), None);
        let scores = [0.0, 0.0, 0.0, -9.0, -7.0, -8.0, -1.0, -2.0, -1000.0, -1000.0];
        let bare = with(&scores, &[("add_space_prefix", 7, vec![0])]).unwrap();
        assert_eq!(bare.encode("aba", true).unwrap(), [1, 6, 4]);
        assert!(!bare.prefixes_space());
        // Phi-3's tokens take the space behind them.
        let phi = with(&scores, &[("general.architecture", 8, text("phi3"))]).unwrap();
        let (taken, kept) = (
            phi.encode("</s> ab", false).unwrap(),
            phi.encode("<s> ab", false).unwrap(),
        );
        assert_eq!((taken, kept), (vec![2, 3, 6], vec![1, 3, 3, 6]));
        let error = of(&[-1000.0; 10]).unwrap_err();
        assert!(error.contains("have the same score"), "{error}");
    }
}
