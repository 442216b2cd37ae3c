//! Texts to token ids.

use std::sync::{Mutex, OnceLock, PoisonError};

use tokenizers::{NormalizedString, Normalizer, Tokenizer as Inner};

use super::Tokenizer;
use super::guarded::{THIS_TEXT, guarded};
use super::stream::{STRETCH_BYTES_MAX, Stream};
use super::trie::{ROOT, Trie};

/// Longer texts, in bytes, are encoded part by part.
const LONG_BYTES: usize = 64 << 10;
/// Most bytes of a text, as normalizer and pre-tokenizer write it, that are encoded at once.
pub(super) const WRITTEN_BYTES_MAX: usize = 2 * STRETCH_BYTES_MAX;
/// A text is normalized in blocks of so many bytes to see how long it becomes.
const MEASURED_BYTES: usize = 4 << 10;
/// Bytes that may be encoded again because of special tokens' texts, besides four times the text.
const AGAIN_BYTES: usize = 1 << 20;

/// The token ids of a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Encoded {
    pub ids: Vec<u32>,
    /// They are more than the limit, and not all: the text goes on.
    pub is_cut: bool,
}

/// How long texts are encoded, each found at its first: see [`Stream`].
#[derive(Default)]
pub(super) struct Streams {
    full: OnceLock<Option<Stream>>,
    first: OnceLock<Option<Stream>>,
    later: OnceLock<Option<Stream>>,
    plain: OnceLock<Option<Stream>>,
}

/// What may be encoded at once.
pub(super) struct Bounds {
    /// Longest text, in bytes, that cannot become too long.
    pub whole_bytes_max: usize,
    /// Most bytes that the pre-tokenizer makes of one.
    pub pre_tokenizer_growth: usize,
}

/// Which of a tokenizer's encoders.
#[derive(Clone, Copy)]
enum Which {
    Full,
    First,
    Later,
    Plain,
}

impl Tokenizer {
    /// Encodes a whole prompt. Added tokens in it are recognised; with `add_special`, those that the tokenizer puts
    /// around every text (such as a begin-of-sequence token) are added.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, String> {
        Ok(self.encode_within(text, add_special, usize::MAX)?.ids)
    }

    /// Like [`encode`](Self::encode). Of a text with more tokens than `limit`, encoding may end once that is known.
    pub fn encode_within(&self, text: &str, add_special: bool, limit: usize) -> Result<Encoded, String> {
        if !self.is_long(text) {
            let ids = encode_with(&self.full, text, add_special)?;
            return Ok(Encoded { ids, is_cut: false });
        }
        let ids = self.encode_as(Which::Full, text, limit)?;
        let is_cut = ids.len() > limit;
        let (before, after) = match add_special {
            true => self.surrounding()?,
            false => Default::default(),
        };
        let after = if is_cut { Vec::new() } else { after };
        Ok(Encoded {
            ids: [before, ids, after].concat(),
            is_cut,
        })
    }

    /// Encodes a stretch of a prompt in which no added token is recognised. `first`: the prompt begins with it.
    pub fn encode_piece(&self, text: &str, first: bool) -> Result<Vec<u32>, String> {
        Ok(self.encode_piece_within(text, first, usize::MAX)?.ids)
    }

    /// Like [`encode_piece`](Self::encode_piece). Of a text with more tokens than `limit`, encoding may end once that is known.
    pub fn encode_piece_within(&self, text: &str, first: bool, limit: usize) -> Result<Encoded, String> {
        let which = if first { Which::First } else { Which::Later };
        self.encode_without_specials(which, text, limit)
    }

    /// Encodes `text` as it would stand in the middle of a prompt: no special tokens are added, none are recognised.
    pub fn encode_plain(&self, text: &str) -> Vec<u32> {
        // Loading has proved that characters outside the vocabulary encode; what is left is a text at which the regex
        // engine gives up: it has no tokens of its own, and the caller spells it from the vocabulary.
        self.encode_without_specials(Which::Plain, text, usize::MAX)
            .map(|encoded| encoded.ids)
            .unwrap_or_default()
    }

    /// The text as the tokenizer's normalizer leaves it.
    pub fn normalize(&self, text: &str) -> Result<String, String> {
        let Some(normalizer) = self.full.get_normalizer() else {
            return Ok(text.to_string());
        };
        if self.is_long(text) {
            if let (_, Some(stream)) = self.encoder(Which::Full) {
                return stream.normalize(text);
            }
            self.check_whole(text)?;
        }
        let mut normalized = NormalizedString::from(text);
        guarded(THIS_TEXT, || normalizer.normalize(&mut normalized))?;
        Ok(normalized.get().to_string())
    }

    /// Encodes with an encoder that knows no added tokens, so that no special token comes out.
    ///
    /// Models that match whole words (Unigram, word pieces, BPE that ignores its merges) can still find a special
    /// token's text in their vocabulary; such text is cut after its first character until they do not.
    fn encode_without_specials(&self, which: Which, text: &str, limit: usize) -> Result<Encoded, String> {
        let mut out: Vec<u32> = Vec::new();
        // What is left to encode, the next last.
        let mut left = vec![(text, which)];
        let mut again = text.len().saturating_mul(4).saturating_add(AGAIN_BYTES);
        while let Some((text, which)) = left.pop() {
            let ids = self.encode_as(which, text, limit - out.len())?;
            let culprit = ids.iter().find(|id| self.is_offending(**id));
            let cut = culprit.and_then(|culprit| self.cut_inside(*culprit, text));
            match cut {
                Some(cut) if again >= text.len() => {
                    again -= text.len();
                    left.extend([(&text[cut..], Which::Plain), (&text[..cut], which)]);
                    continue;
                }
                // Too many of them to look for one after the other.
                Some(_) => self.encode_cut(which, text, limit, &mut out)?,
                None => out.extend(ids.into_iter().filter(|id| !self.is_offending(*id))),
            }
            if out.len() > limit {
                return Ok(Encoded { ids: out, is_cut: true });
            }
        }
        Ok(Encoded {
            ids: out,
            is_cut: false,
        })
    }

    /// Is it a special token that plain text must not yield?
    fn is_offending(&self, id: u32) -> bool {
        self.is_special(id) && Some(id) != self.unknown
    }

    /// A place inside the first text of this token in `text`.
    fn cut_inside(&self, culprit: u32, text: &str) -> Option<usize> {
        let token = self.added.iter().find(|token| token.id == culprit)?;
        let at = text.find(token.content.as_str())?;
        let first = text[at..].chars().next()?.len_utf8();
        (at + first < text.len()).then_some(at + first)
    }

    /// Encodes `text` cut inside every text of a special token.
    fn encode_cut(&self, mut which: Which, text: &str, limit: usize, out: &mut Vec<u32>) -> Result<(), String> {
        let mut specials = Trie::<bool>::new();
        for token in self.added.iter().filter(|token| token.special) {
            specials.insert(token.content.chars(), |is_text, ends| *is_text |= ends);
        }
        let mut from = 0;
        for (at, c) in text.char_indices() {
            let end = at + c.len_utf8();
            if end < text.len() && !begins_with_any(&specials, &text[at..]) {
                continue;
            }
            let ids = self.encode_as(which, &text[from..end], limit - out.len())?;
            out.extend(ids.into_iter().filter(|id| !self.is_offending(*id)));
            if out.len() > limit {
                return Ok(());
            }
            (from, which) = (end, Which::Plain);
        }
        Ok(())
    }

    /// Where the ids are more than `limit`, they may be those of the beginning alone.
    fn encode_as(&self, which: Which, text: &str, limit: usize) -> Result<Vec<u32>, String> {
        if !self.is_long(text) {
            return encode_with(self.inner(which), text, false);
        }
        match self.encoder(which) {
            (inner, Some(stream)) => stream.encode(inner, text, limit),
            (inner, None) => {
                self.check_whole(text)?;
                // One at a time: a long text takes hundreds of megabytes.
                static LONG: Mutex<()> = Mutex::new(());
                let _one = LONG.lock().unwrap_or_else(PoisonError::into_inner);
                encode_with(inner, text, false)
            }
        }
    }

    /// Is it too long to be encoded at once without a look?
    fn is_long(&self, text: &str) -> bool {
        text.len() > LONG_BYTES.min(self.bounds.whole_bytes_max)
    }

    /// May a text be encoded at once?
    fn check_whole(&self, text: &str) -> Result<(), String> {
        let bounds = &self.bounds;
        if text.len() > bounds.whole_bytes_max {
            let mut written = 0;
            let mut left = text;
            while !left.is_empty() && written <= WRITTEN_BYTES_MAX {
                let end = left.floor_char_boundary(MEASURED_BYTES);
                let (block, rest) = left.split_at(end);
                let mut block = NormalizedString::from(block);
                if let Some(normalizer) = self.full.get_normalizer() {
                    guarded(THIS_TEXT, || normalizer.normalize(&mut block))?;
                }
                written += block.get().len() * bounds.pre_tokenizer_growth;
                left = rest;
            }
            if written > WRITTEN_BYTES_MAX || text.len() > STRETCH_BYTES_MAX {
                return Err(format!(
                    "this text has {} bytes, more than its tokenizer, of a kind that cuts no text in parts, encodes at once",
                    text.len()
                ));
            }
        }
        Ok(())
    }

    fn inner(&self, which: Which) -> &Inner {
        match which {
            Which::Full => &self.full,
            Which::First => &self.first_piece,
            Which::Later => self.later_piece.as_ref().unwrap_or(&self.first_piece),
            Which::Plain => self.plain.as_ref().unwrap_or(&self.first_piece),
        }
    }

    fn encoder(&self, which: Which) -> (&Inner, Option<&Stream>) {
        let streams = &self.streams;
        let stream = match which {
            Which::Full => &streams.full,
            Which::Later if self.later_piece.is_some() => &streams.later,
            Which::Plain if self.plain.is_some() => &streams.plain,
            Which::First | Which::Later | Which::Plain => &streams.first,
        };
        let inner = self.inner(which);
        (inner, stream.get_or_init(|| Stream::of(inner)).as_ref())
    }
}

pub(super) fn encode_with(encoder: &Inner, text: &str, add_special: bool) -> Result<Vec<u32>, String> {
    let encoding = guarded(THIS_TEXT, || encoder.encode_fast(text, add_special))?;
    Ok(encoding.get_ids().to_vec())
}

fn begins_with_any(texts: &Trie<bool>, text: &str) -> bool {
    let mut node = ROOT;
    for c in text.chars() {
        match texts.step(node, c) {
            Some(next) => node = next,
            None => return false,
        }
        if *texts.value(node) {
            return true;
        }
    }
    false
}
