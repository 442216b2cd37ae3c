//! `tokenizer.model`, SentencePiece's model of the kind that Llama and Mistral use: BPE over a text as it is.

use std::collections::HashSet;

use prost::Message;
use serde_json::{Value, json};

use super::merges::RankedTokens;
use super::{Converted, SpecialNames, added_token};
use crate::tokenizer::TokenizerConfig;

/// Classes of transformers whose tokenizer is this file and a token before each prompt.
const CLASSES: [&str; 2] = ["LlamaTokenizer", "LlamaTokenizerFast"];
/// What stands for a space.
const MARK: &str = "\u{2581}";

// The messages of SentencePiece's format, as far as they say how a text is encoded.

#[derive(Clone, PartialEq, Message)]
pub(super) struct Model {
    #[prost(message, repeated, tag = "1")]
    pub(super) pieces: Vec<Piece>,
    #[prost(message, optional, tag = "2")]
    pub(super) trainer: Option<Trainer>,
    #[prost(message, optional, tag = "3")]
    pub(super) normalizer: Option<Normalizer>,
    #[prost(message, optional, tag = "5")]
    pub(super) denormalizer: Option<Normalizer>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Piece {
    #[prost(string, optional, tag = "1")]
    pub(super) text: Option<String>,
    #[prost(float, optional, tag = "2")]
    pub(super) score: Option<f32>,
    #[prost(int32, optional, tag = "3", default = "1")]
    pub(super) kind: Option<i32>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Trainer {
    #[prost(int32, optional, tag = "3", default = "1")]
    pub(super) model_type: Option<i32>,
    #[prost(bool, optional, tag = "24")]
    pub(super) treat_whitespace_as_suffix: Option<bool>,
    #[prost(bool, optional, tag = "35")]
    pub(super) byte_fallback: Option<bool>,
    #[prost(string, optional, tag = "46", default = "<s>")]
    pub(super) bos_piece: Option<String>,
    #[prost(string, optional, tag = "47", default = "</s>")]
    pub(super) eos_piece: Option<String>,
    #[prost(string, optional, tag = "48", default = "<pad>")]
    pub(super) pad_piece: Option<String>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Normalizer {
    #[prost(string, optional, tag = "1")]
    pub(super) name: Option<String>,
    #[prost(bytes = "vec", optional, tag = "2")]
    pub(super) precompiled_charsmap: Option<Vec<u8>>,
    #[prost(bool, optional, tag = "3", default = "true")]
    pub(super) add_dummy_prefix: Option<bool>,
    #[prost(bool, optional, tag = "4", default = "true")]
    pub(super) remove_extra_whitespaces: Option<bool>,
    #[prost(bool, optional, tag = "5", default = "true")]
    pub(super) escape_whitespaces: Option<bool>,
    #[prost(bytes = "vec", optional, tag = "6")]
    pub(super) normalization_rule_tsv: Option<Vec<u8>>,
}

const NORMAL: i32 = 1;
pub(super) const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;
const BPE: i32 = 2;

pub(super) fn convert(bytes: &[u8], config: &TokenizerConfig) -> Result<Converted, String> {
    let model = Model::decode(bytes).map_err(|_| "it is not a model of SentencePiece".to_owned())?;
    if model.pieces.is_empty() {
        return Err("it is not a model of SentencePiece".into());
    }
    check_class(config)?;
    let trainer = model.trainer.as_ref().ok_or("it has no `trainer_spec`")?;
    let normalizer = model.normalizer.as_ref().ok_or("it has no `normalizer_spec`")?;
    check_options(trainer, normalizer, model.denormalizer.as_ref())?;
    let pieces = Pieces::of(&model.pieces, trainer.byte_fallback(), false)?;
    // `legacy` says whether text behind a special token gets the prefix, too; transformers takes it as set where it is absent.
    let prefix = match (normalizer.add_dummy_prefix(), config.legacy) {
        (false, _) => Prefix::Never,
        (true, Some(false)) => Prefix::First,
        (true, _) => Prefix::Always,
    };
    let named = |name: &str| {
        pieces
            .specials
            .iter()
            .any(|(text, _)| text == name)
            .then(|| name.to_owned())
    };
    Ok(Converted {
        json: pieces.written(prefix, trainer.byte_fallback())?,
        names: SpecialNames {
            bos: named(trainer.bos_piece()),
            eos: named(trainer.eos_piece()),
            unk: named(&pieces.unknown),
            pad: named(trainer.pad_piece()),
        },
    })
}

/// Which texts get a space mark in front.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Prefix {
    Never,
    /// A prompt's first text, unless a special token stands before it.
    First,
    /// Each text between special tokens.
    Always,
}

/// The file does not say which tokens stand around a prompt; the class does.
fn check_class(config: &TokenizerConfig) -> Result<(), String> {
    let class = config.tokenizer_class.as_deref();
    if class.is_some_and(|class| CLASSES.contains(&class)) {
        return Ok(());
    }
    let says = class.map_or("names no".to_owned(), |class| format!("has `{class}` as its"));
    Err(format!(
        "`tokenizer_config.json` beside it {says} `tokenizer_class`, and which tokens stand around a prompt is known for {}: write \
         a `tokenizer.json` with transformers",
        CLASSES.join(", ")
    ))
}

fn check_options(trainer: &Trainer, normalizer: &Normalizer, denormalizer: Option<&Normalizer>) -> Result<(), String> {
    let is_set = |bytes: &Option<Vec<u8>>| bytes.as_ref().is_some_and(|bytes| !bytes.is_empty());
    let rules = |spec: &Normalizer| is_set(&spec.precompiled_charsmap) || is_set(&spec.normalization_rule_tsv);
    let unsupported = if trainer.model_type() != BPE {
        let kinds = ["", "Unigram", "", "words", "characters"];
        let kind = usize::try_from(trainer.model_type())
            .ok()
            .and_then(|kind| kinds.get(kind));
        format!("a model of {}", kind.unwrap_or(&"an unknown kind"))
    } else if trainer.treat_whitespace_as_suffix() {
        "`treat_whitespace_as_suffix`".into()
    } else if rules(normalizer) {
        format!("the normalization `{}`", normalizer.name())
    } else if normalizer.remove_extra_whitespaces() {
        "`remove_extra_whitespaces`".into()
    } else if !normalizer.escape_whitespaces() {
        "`escape_whitespaces: false`".into()
    } else if denormalizer.is_some_and(rules) {
        "a `denormalizer_spec`".into()
    } else {
        return Ok(());
    };
    Err(format!(
        "{unsupported} is not supported: write a `tokenizer.json` with transformers"
    ))
}

/// The pieces by what they are.
pub(super) struct Pieces {
    /// The text of each id that has one.
    all: Vec<(String, u32)>,
    unknown: String,
    /// Control tokens and the unknown one.
    specials: Vec<(String, u32)>,
    /// Texts that are tokens wherever they occur, and are shown.
    added: Vec<(String, u32)>,
    /// Pieces of text with their scores.
    normal: Vec<(f32, String)>,
}

impl Pieces {
    /// `by_others`: of a file that another program made of the model, in which pieces of any kind may be.
    pub(super) fn of(list: &[Piece], byte_fallback: bool, by_others: bool) -> Result<Pieces, String> {
        let mut pieces = Pieces {
            all: Vec::with_capacity(list.len()),
            unknown: String::new(),
            specials: Vec::new(),
            added: Vec::new(),
            normal: Vec::new(),
        };
        let (mut unknowns, mut bytes, mut seen) = (0, 0, HashSet::new());
        for (piece, id) in list.iter().zip(0u32..) {
            let text = piece.text().to_owned();
            match piece.kind() {
                NORMAL if piece.score().is_nan() => return Err(format!("its piece {id} has no score")),
                NORMAL => pieces.normal.push((piece.score(), text.clone())),
                UNKNOWN => {
                    unknowns += 1;
                    pieces.unknown.clone_from(&text);
                    pieces.specials.push((text.clone(), id));
                }
                CONTROL => pieces.specials.push((text.clone(), id)),
                BYTE => bytes += 1,
                USER_DEFINED if by_others => pieces.added.push((text.clone(), id)),
                UNUSED if by_others => continue,
                kind => {
                    let kinds = ["", "", "", "", "user-defined", "unused"];
                    let kind = usize::try_from(kind).ok().and_then(|kind| kinds.get(kind));
                    return Err(format!(
                        "its piece {id}, `{}`, is of the kind {}, which is not supported: write a `tokenizer.json` with \
                         transformers",
                        text.escape_debug(),
                        kind.unwrap_or(&"unknown"),
                    ));
                }
            }
            if text.is_empty() {
                return Err(format!("its piece {id} is empty"));
            }
            if !seen.insert(text.clone()) {
                return Err(format!("its piece {id}, `{}`, occurs twice", text.escape_debug()));
            }
            pieces.all.push((text, id));
        }
        if unknowns != 1 {
            return Err(format!("it has {unknowns} unknown tokens, and one is expected"));
        }
        if bytes != if byte_fallback { 256 } else { 0 } {
            return Err(format!(
                "it has {bytes} tokens of bytes, and `byte_fallback` is {byte_fallback}"
            ));
        }
        Ok(pieces)
    }

    /// The tokenizer as a `tokenizer.json`.
    pub(super) fn written(&self, prefix: Prefix, byte_fallback: bool) -> Result<Value, String> {
        let merges = self.merges()?;
        let space = json!({"type": "Replace", "pattern": {"String": " "}, "content": MARK});
        let (normalizer, pre_tokenizer) = match prefix {
            Prefix::Never => (space, Value::Null),
            Prefix::First => (
                Value::Null,
                json!({"type": "Metaspace", "replacement": MARK, "prepend_scheme": "first", "split": false}),
            ),
            Prefix::Always => (
                json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": MARK}, space]}),
                Value::Null,
            ),
        };
        let mut decoders = vec![
            json!({"type": "Replace", "pattern": {"String": MARK}, "content": " "}),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
        ];
        if prefix != Prefix::Never {
            decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        let vocab: serde_json::Map<String, Value> =
            self.all.iter().map(|(text, id)| (text.clone(), json!(id))).collect();
        let specials = self.specials.iter().map(|(text, id)| added_token(*id, text, true));
        let added = self.added.iter().map(|(text, id)| added_token(*id, text, false));
        let mut all: Vec<Value> = specials.chain(added).collect();
        all.sort_by_key(|token| token["id"].as_u64());
        Ok(json!({
            "version": "1.0",
            "added_tokens": all,
            "normalizer": normalizer,
            "pre_tokenizer": pre_tokenizer,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": {"type": "BPE", "unk_token": self.unknown, "fuse_unk": true, "byte_fallback": byte_fallback,
                      "vocab": vocab, "merges": merges},
        }))
    }

    /// Pairs by descending score. A piece of one character needs none, so its score does not count.
    fn merges(&self) -> Result<Vec<(String, String)>, String> {
        let mut singles = Vec::new();
        let mut merged: Vec<(f32, &String)> = Vec::new();
        for (score, text) in &self.normal {
            match text.chars().nth(1) {
                None => singles.push(text.clone()),
                Some(_) => merged.push((*score, text)),
            }
        }
        merged.sort_by(|a, b| b.0.total_cmp(&a.0));
        // Llama's and Mistral's runs of spaces all have one score. Of others with one score, which comes first could show.
        let is_run = |text: &str| text.chars().all(|char| MARK.contains(char));
        let tie = |pair: &&[(f32, &String)]| pair[0].0 == pair[1].0 && !(is_run(pair[0].1) && is_run(pair[1].1));
        if let Some(pair) = merged.windows(2).find(tie) {
            return Err(format!(
                "its pieces `{}` and `{}` have the same score",
                pair[0].1.escape_debug(),
                pair[1].1.escape_debug()
            ));
        }
        let known: HashSet<&str> = singles.iter().map(String::as_str).collect();
        let mut buffer = [0; 4];
        for (_, text) in &merged {
            if let Some(char) = text
                .chars()
                .find(|char| !known.contains(&*char.encode_utf8(&mut buffer)))
            {
                return Err(format!(
                    "its piece `{}` has the character `{}`, which is no piece",
                    text.escape_debug(),
                    char.escape_debug()
                ));
            }
        }
        let texts = singles
            .into_iter()
            .chain(merged.into_iter().map(|(_, text)| text.clone()));
        let ranked = RankedTokens::of_texts(texts.collect())?;
        let merges = ranked.merges()?;
        Ok(merges.into_iter().map(|(a, b)| (a.to_owned(), b.to_owned())).collect())
    }
}
