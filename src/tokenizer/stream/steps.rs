//! Reads the steps of a tokenizer, if all of them can run on parts of a text.

use std::collections::HashSet;

use onig::Regex;
use serde_json::Value;
use tokenizers::{ModelWrapper, NormalizedString, Normalizer};

use super::super::bytes::byte_char;
use super::super::prefix::{StripPrefix, without_prefix};
use super::super::shared::HfTokenizer;
use super::super::trie::Trie;
use super::{AddedTokenMatch, MarkPrefix, MergeablePairs, Metaspace, SplitStep, StreamEncoder};

/// The default regular expression of byte-level pre-tokenizers.
const GPT2_SPLIT_REGEX: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

impl StreamEncoder {
    /// The steps of `tokenizer`. `None` if a step is of an unknown kind.
    pub(in super::super) fn of(tokenizer: &HfTokenizer) -> Option<StreamEncoder> {
        let normalizer = tokenizer.get_normalizer();
        let later_normalizer = match normalizer {
            Some(normalizer) => {
                is_blockwise(&serde_json::to_value(normalizer).ok()?).then_some(())?;
                let without = without_prefix(tokenizer, StripPrefix::All).ok()?;
                without.as_ref().unwrap_or(tokenizer).get_normalizer().cloned()
            }
            None => None,
        };
        let mut stream = StreamEncoder {
            original_added: None,
            normalized_added: None,
            normalizer: normalizer.cloned(),
            later_normalizer,
            metaspace: None,
            split_steps: Vec::new(),
            byte_level: None,
            mergeable: None,
        };
        if let Some(pre) = tokenizer.get_pre_tokenizer() {
            stream.add_pre_tokenizer(&serde_json::to_value(pre).ok()?)?;
        }
        stream.add_tokens(tokenizer)?;
        stream.mergeable = match &**tokenizer.get_model() {
            ModelWrapper::BPE(bpe) if bpe.dropout.is_none_or(|dropout| dropout == 0.0) => {
                let affixes = [&bpe.continuing_subword_prefix, &bpe.end_of_word_suffix];
                let plain = affixes.iter().all(|affix| affix.as_ref().is_none_or(String::is_empty));
                (plain && !bpe.ignore_merges)
                    .then(|| MergeablePairs::of(tokenizer))
                    .flatten()
            }
            ModelWrapper::Unigram(unigram) if unigram.alpha.is_none() => None,
            _ => return None,
        };
        Some(stream)
    }

    fn add_pre_tokenizer(&mut self, value: &Value) -> Option<()> {
        let mut steps = Vec::new();
        flatten(value, "pretokenizers", &mut steps);
        let count = steps.len();
        for (number, step) in steps.into_iter().enumerate() {
            match step["type"].as_str()? {
                "Split" if step["invert"] == false => self.split_steps.push(parse_split(step)?),
                "Digits" => self.split_steps.push(SplitStep::Digits {
                    is_each: step["individual_digits"].as_bool()?,
                }),
                // Steps after `ByteLevel` would get other characters, and its prefix would precede
                // each piece. So it must be the last step and have no prefix.
                "ByteLevel" if number + 1 == count && step["add_prefix_space"] == false => {
                    if step["use_regex"] != false {
                        self.split_steps
                            .push(SplitStep::AroundMatches(Regex::new(GPT2_SPLIT_REGEX).ok()?));
                    }
                    self.byte_level = Some(std::array::from_fn(|byte| byte_char(byte as u8)));
                }
                "Metaspace" if count == 1 => self.metaspace = Some(parse_metaspace(step)?),
                _ => return None,
            }
        }
        Some(())
    }

    fn add_tokens(&mut self, tokenizer: &HfTokenizer) -> Option<()> {
        let (mut original, mut normalized) = (Trie::new(), Trie::new());
        let (mut any_original, mut any_normalized) = (false, false);
        for (id, token) in tokenizer.get_added_vocabulary().get_added_tokens_decoder() {
            if token.single_word {
                return None;
            }
            let mut text = NormalizedString::from(token.content.as_str());
            if let (true, Some(normalizer)) = (token.normalized, tokenizer.get_normalizer()) {
                normalizer.normalize(&mut text).ok()?;
            }
            let (tokens, any) = if token.normalized {
                (&mut normalized, &mut any_normalized)
            } else {
                (&mut original, &mut any_original)
            };
            *any = true;
            let known = AddedTokenMatch {
                id: *id,
                lstrip: token.lstrip,
                rstrip: token.rstrip,
            };
            tokens.insert(text.get().chars(), |ending: &mut Vec<AddedTokenMatch>, ends| {
                if ends {
                    ending.push(known);
                }
            });
        }
        // After a normalizer, the text behind such a token might count as the beginning of the
        // text.
        if any_normalized && self.metaspace.is_some() && self.normalizer.is_some() {
            return None;
        }
        self.original_added = any_original.then_some(original);
        self.normalized_added = any_normalized.then_some(normalized);
        Some(())
    }
}

impl MergeablePairs {
    /// `None` if two texts share an id, because the pairs then do not follow from the vocabulary.
    fn of(tokenizer: &HfTokenizer) -> Option<MergeablePairs> {
        let vocabulary = tokenizer.get_vocab(false);
        let ids: HashSet<u32> = vocabulary.values().copied().collect();
        if ids.len() != vocabulary.len() {
            return None;
        }
        let mut mergeable = MergeablePairs {
            token_chars: HashSet::new(),
            pairs: HashSet::new(),
        };
        for text in vocabulary.keys() {
            let mut before = None;
            for c in text.chars() {
                mergeable.pairs.extend(before.map(|before| (before, c)));
                before = Some(c);
            }
            let mut chars = text.chars();
            if let (Some(c), None) = (chars.next(), chars.next()) {
                mergeable.token_chars.insert(c);
            }
        }
        Some(mergeable)
    }
}

/// The steps of nested sequences, in order.
pub(in super::super) fn flatten<'a>(value: &'a Value, list: &str, steps: &mut Vec<&'a Value>) {
    match (value["type"] == "Sequence", value[list].as_array()) {
        (true, Some(parts)) => parts.iter().for_each(|part| flatten(part, list, steps)),
        _ => steps.push(value),
    }
}

/// Whether a normalizer gives the same text when it runs on blocks, each of which begins with a
/// character that no Unicode form combines with characters before it.
fn is_blockwise(normalizer: &Value) -> bool {
    let mut steps = Vec::new();
    flatten(normalizer, "normalizers", &mut steps);
    let mut has_replaced = false;
    steps.into_iter().all(|step| match step["type"].as_str() {
        Some("NFC" | "NFD" | "NFKC" | "NFKD") => !has_replaced,
        Some("Lowercase") => true,
        Some("Prepend") => {
            has_replaced = true;
            true
        }
        Some("Replace") => {
            has_replaced = true;
            let pattern = step["pattern"]["String"].as_str();
            pattern.is_some_and(|text| text.chars().count() == 1) && step["content"] != ""
        }
        _ => false,
    })
}

fn parse_split(step: &Value) -> Option<SplitStep> {
    let (pattern, behavior) = (&step["pattern"], step["behavior"].as_str()?);
    match (pattern["Regex"].as_str(), pattern["String"].as_str(), behavior) {
        (Some(regex), _, "Isolated") => Some(SplitStep::AroundMatches(Regex::new(regex).ok()?)),
        (_, Some(text), "MergedWithPrevious") if !text.is_empty() => Some(SplitStep::AfterText(text.into())),
        _ => None,
    }
}

fn parse_metaspace(step: &Value) -> Option<Metaspace> {
    let prefix = match step["prepend_scheme"].as_str()? {
        "never" => MarkPrefix::Never,
        "first" => MarkPrefix::First,
        "always" => MarkPrefix::Always,
        _ => return None,
    };
    Some(Metaspace {
        mark: step["replacement"].as_str()?.chars().next()?,
        prefix,
        splits_at_marks: step["split"].as_bool()?,
    })
}
