//! Counts the contents of a `tokenizer.json` without keeping them.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

use super::check_max;

/// Maximum tokens in a vocabulary, and maximum merges of BPE. The largest known ones have 262,144
/// tokens and 514,906 merges.
const VOCABULARY_MAX: u64 = 1 << 20;
const MERGES_MAX: u64 = 1 << 21;
/// Maximum length of a token's text, and of all texts together, in bytes.
const TOKEN_BYTES_MAX: usize = 4 << 10;
const VOCABULARY_BYTES_MAX: u64 = 16 << 20;
/// Maximum number of JSON values in the rest of the file.
const OTHER_VALUES_MAX: u64 = 4 << 20;

/// The size of each part of the file, without its contents.
#[derive(serde::Deserialize)]
pub(super) struct Sizes {
    #[serde(default)]
    added_tokens: JsonCounts,
    #[serde(default)]
    normalizer: JsonCounts,
    #[serde(default)]
    pre_tokenizer: JsonCounts,
    #[serde(default)]
    post_processor: JsonCounts,
    #[serde(default)]
    decoder: JsonCounts,
    model: ModelSizes,
}

impl Sizes {
    pub(super) fn check(&self) -> Result<(), String> {
        let ModelSizes { vocab, merges, rest } = &self.model;
        check_max(
            "tokens in its vocabulary",
            vocab.items as usize,
            VOCABULARY_MAX as usize,
        )?;
        check_max("merges", merges.items as usize, MERGES_MAX as usize)?;
        check_max("bytes in a token of its vocabulary", vocab.longest, TOKEN_BYTES_MAX)?;
        // Unigram keeps a table per byte, so its limit is a quarter of that of other models. It is
        // the only model that writes its vocabulary as a list.
        let bytes = if vocab.is_list {
            VOCABULARY_BYTES_MAX / 4
        } else {
            VOCABULARY_BYTES_MAX
        };
        check_max("bytes in its vocabulary", vocab.bytes as usize, bytes as usize)?;
        let parts = [
            &self.added_tokens,
            &self.normalizer,
            &self.pre_tokenizer,
            &self.post_processor,
            &self.decoder,
            rest,
        ];
        let total: u64 = parts.iter().map(|part| part.values).sum();
        check_max(
            "values besides its vocabulary",
            total as usize,
            OTHER_VALUES_MAX as usize,
        )?;
        // The limits above bound the texts of vocabulary and merges. These limits bound all other
        // values in them.
        check_max(
            "values in its vocabulary",
            vocab.values as usize,
            4 * VOCABULARY_MAX as usize,
        )?;
        check_max("values in its merges", merges.values as usize, 4 * MERGES_MAX as usize)
    }
}

/// Sizes of a JSON value.
#[derive(Default)]
struct JsonCounts {
    /// Number of values at any depth, including the value itself.
    values: u64,
    /// Number of direct items.
    items: u64,
    /// Bytes of all strings and field names.
    bytes: u64,
    /// Bytes of the longest string or field name.
    longest: usize,
    is_list: bool,
}

impl JsonCounts {
    fn add_text(&mut self, text: &str) {
        self.bytes += text.len() as u64;
        self.longest = self.longest.max(text.len());
    }

    fn add(&mut self, item: JsonCounts) {
        self.items += 1;
        self.values += item.values;
        self.bytes += item.bytes;
        self.longest = self.longest.max(item.longest);
    }
}

impl<'de> Deserialize<'de> for JsonCounts {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<JsonCounts, D::Error> {
        from.deserialize_any(JsonCounter)
    }
}

struct JsonCounter;

const ONE_VALUE: JsonCounts = JsonCounts {
    values: 1,
    items: 0,
    bytes: 0,
    longest: 0,
    is_list: false,
};

impl<'de> Visitor<'de> for JsonCounter {
    type Value = JsonCounts;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_unit<E>(self) -> Result<JsonCounts, E> {
        Ok(ONE_VALUE)
    }

    fn visit_bool<E>(self, _: bool) -> Result<JsonCounts, E> {
        Ok(ONE_VALUE)
    }

    fn visit_i64<E>(self, _: i64) -> Result<JsonCounts, E> {
        Ok(ONE_VALUE)
    }

    fn visit_u64<E>(self, _: u64) -> Result<JsonCounts, E> {
        Ok(ONE_VALUE)
    }

    fn visit_f64<E>(self, _: f64) -> Result<JsonCounts, E> {
        Ok(ONE_VALUE)
    }

    fn visit_str<E>(self, text: &str) -> Result<JsonCounts, E> {
        let mut counts = ONE_VALUE;
        counts.add_text(text);
        Ok(counts)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<JsonCounts, A::Error> {
        let mut counts = JsonCounts {
            is_list: true,
            ..ONE_VALUE
        };
        while let Some(item) = seq.next_element()? {
            counts.add(item);
        }
        Ok(counts)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<JsonCounts, A::Error> {
        let mut counts = ONE_VALUE;
        while let Some(name) = map.next_key::<String>()? {
            counts.add_text(&name);
            counts.add(map.next_value()?);
        }
        Ok(counts)
    }
}

/// The size of a model, with its two large parts counted separately.
#[derive(Default)]
struct ModelSizes {
    vocab: JsonCounts,
    merges: JsonCounts,
    rest: JsonCounts,
}

impl<'de> Deserialize<'de> for ModelSizes {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<ModelSizes, D::Error> {
        struct ModelVisitor;
        impl<'de> Visitor<'de> for ModelVisitor {
            type Value = ModelSizes;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a model")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<ModelSizes, A::Error> {
                let mut sizes = ModelSizes::default();
                while let Some(name) = map.next_key::<String>()? {
                    match name.as_str() {
                        "vocab" => sizes.vocab = map.next_value()?,
                        "merges" => sizes.merges = map.next_value()?,
                        _ => sizes.rest.add(map.next_value()?),
                    }
                }
                Ok(sizes)
            }
        }
        from.deserialize_map(ModelVisitor)
    }
}
