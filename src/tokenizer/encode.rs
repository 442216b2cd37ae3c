//! Encodes texts to token ids.

use std::sync::{Mutex, OnceLock, PoisonError};

use tokenizers::{NormalizedString, Normalizer};

use super::Tokenizer;
use super::guarded::{THIS_TEXT, guarded};
use super::shared::HfTokenizer;
use super::stream::{STRETCH_BYTES_MAX, StreamEncoder};
use super::trie::{ROOT, Trie};

/// Texts above this length in bytes are encoded in parts.
const LONG_TEXT_BYTES: usize = 64 << 10;
/// Maximum bytes that the model encodes at once, counted after the normalizer and pre-tokenizer.
pub(super) const MODEL_INPUT_BYTES_MAX: usize = 2 * STRETCH_BYTES_MAX;
/// Size in bytes of the blocks in which the length of a normalized text is measured.
const MEASURED_BLOCK_BYTES: usize = 4 << 10;
/// Minimum bytes of text that may be encoded again because it contains special tokens' texts. Four
/// times the text's length are added.
const RETRY_BYTES_MIN: usize = 1 << 20;

/// The token ids of a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Encoded {
    pub ids: Vec<u32>,
    /// Whether `ids` are more than the limit. If so, they may cover only the beginning of the text.
    pub is_cut: bool,
}

/// Encoders for long texts, each built at its first use; see [`StreamEncoder`]. The inner `None`
/// means that the tokenizer cannot encode in parts.
#[derive(Default)]
pub(super) struct StreamEncoders {
    full: OnceLock<Option<StreamEncoder>>,
    first: OnceLock<Option<StreamEncoder>>,
    later: OnceLock<Option<StreamEncoder>>,
    plain: OnceLock<Option<StreamEncoder>>,
}

/// Limits for texts that are encoded at once.
pub(super) struct EncodeBounds {
    /// Maximum length in bytes of a text that certainly stays within the limits after
    /// normalization.
    pub whole_bytes_max: usize,
    /// Maximum output bytes of the pre-tokenizer per input byte.
    pub pre_tokenizer_growth: usize,
}

/// Selects an encoder of the tokenizer.
#[derive(Clone, Copy)]
enum EncoderKind {
    Full,
    First,
    Later,
    Plain,
}

impl Tokenizer {
    /// Encodes a whole prompt, in which added tokens are recognised. `add_special` adds the tokens
    /// that the tokenizer puts around every text, such as a begin-of-sequence token.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, String> {
        Ok(self.encode_within(text, add_special, usize::MAX)?.ids)
    }

    /// Like [`encode`](Self::encode), but encoding may stop once a text is known to have more
    /// tokens than `limit`.
    pub fn encode_within(&self, text: &str, add_special: bool, limit: usize) -> Result<Encoded, String> {
        if !self.is_long(text) {
            let ids = encode_with(&self.full, text, add_special)?;
            return Ok(Encoded { ids, is_cut: false });
        }
        let ids = self.encode_as(EncoderKind::Full, text, limit)?;
        let is_cut = ids.len() > limit;
        let (before, after) = if add_special {
            self.surrounding_ids()?
        } else {
            Default::default()
        };
        let after = if is_cut { Vec::new() } else { after };
        Ok(Encoded {
            ids: [before, ids, after].concat(),
            is_cut,
        })
    }

    /// Encodes a section of a prompt in which no added token is recognised. `first`: the prompt
    /// begins with this section.
    pub fn encode_piece(&self, text: &str, first: bool) -> Result<Vec<u32>, String> {
        Ok(self.encode_piece_within(text, first, usize::MAX)?.ids)
    }

    /// Like [`encode_piece`](Self::encode_piece), but encoding may stop once a text is known to
    /// have more tokens than `limit`.
    pub fn encode_piece_within(&self, text: &str, first: bool, limit: usize) -> Result<Encoded, String> {
        let kind = if first { EncoderKind::First } else { EncoderKind::Later };
        self.encode_without_specials(kind, text, limit)
    }

    /// Encodes `text` as if in the middle of a prompt: special tokens are neither added nor
    /// recognised.
    pub fn encode_plain(&self, text: &str) -> Vec<u32> {
        // Loading has checked that characters outside the vocabulary can be encoded. The only other
        // error is a text on which the regex engine gives up. Such a text gets no tokens here, and
        // the caller spells it from the vocabulary.
        self.encode_without_specials(EncoderKind::Plain, text, usize::MAX)
            .map(|encoded| encoded.ids)
            .unwrap_or_default()
    }

    /// Applies the tokenizer's normalizer.
    pub fn normalize(&self, text: &str) -> Result<String, String> {
        let Some(normalizer) = self.full.get_normalizer() else {
            return Ok(text.to_string());
        };
        if self.is_long(text) {
            if let (_, Some(stream)) = self.encoder(EncoderKind::Full) {
                return stream.normalize(text);
            }
            self.check_whole_text(text)?;
        }
        let mut normalized = NormalizedString::from(text);
        guarded(THIS_TEXT, || normalizer.normalize(&mut normalized))?;
        Ok(normalized.get().to_string())
    }

    /// Encodes with an encoder that knows no added tokens, so that no special token results.
    ///
    /// Models that match whole words (Unigram, word pieces, BPE that ignores its merges) can still
    /// find a special token's text in their vocabulary. Such text is cut after its first character
    /// until no special token results.
    fn encode_without_specials(&self, kind: EncoderKind, text: &str, limit: usize) -> Result<Encoded, String> {
        let mut out: Vec<u32> = Vec::new();
        // A stack of the remaining texts; the last one is encoded next.
        let mut pending = vec![(text, kind)];
        let mut retry_budget = text.len().saturating_mul(4).saturating_add(RETRY_BYTES_MIN);
        while let Some((text, kind)) = pending.pop() {
            let ids = self.encode_as(kind, text, limit - out.len())?;
            let offending_id = ids.iter().find(|id| self.is_offending(**id));
            let cut = offending_id.and_then(|offending_id| self.offset_inside(*offending_id, text));
            match cut {
                Some(cut) if retry_budget >= text.len() => {
                    retry_budget -= text.len();
                    pending.extend([(&text[cut..], EncoderKind::Plain), (&text[..cut], kind)]);
                    continue;
                }
                // The budget for encoding again is spent, so cut inside all special texts at once.
                Some(_) => self.encode_cut_at_specials(kind, text, limit, &mut out)?,
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

    /// Whether `id` is a special token that must not result from plain text.
    fn is_offending(&self, id: u32) -> bool {
        self.is_special(id) && Some(id) != self.unknown_id
    }

    /// An offset inside the first occurrence in `text` of this token's text.
    fn offset_inside(&self, offending_id: u32, text: &str) -> Option<usize> {
        let token = self.added.iter().find(|token| token.id == offending_id)?;
        let at = text.find(token.content.as_str())?;
        let first_char_bytes = text[at..].chars().next()?.len_utf8();
        (at + first_char_bytes < text.len()).then_some(at + first_char_bytes)
    }

    /// Encodes `text`, cut inside every occurrence of a special token's text.
    fn encode_cut_at_specials(
        &self,
        mut kind: EncoderKind,
        text: &str,
        limit: usize,
        out: &mut Vec<u32>,
    ) -> Result<(), String> {
        let mut specials = Trie::<bool>::new();
        for token in self.added.iter().filter(|token| token.special) {
            specials.insert(token.content.chars(), |is_token, ends| *is_token |= ends);
        }
        let mut from = 0;
        for (at, c) in text.char_indices() {
            let end = at + c.len_utf8();
            if end < text.len() && !begins_with_any(&specials, &text[at..]) {
                continue;
            }
            let ids = self.encode_as(kind, &text[from..end], limit - out.len())?;
            out.extend(ids.into_iter().filter(|id| !self.is_offending(*id)));
            if out.len() > limit {
                return Ok(());
            }
            (from, kind) = (end, EncoderKind::Plain);
        }
        Ok(())
    }

    /// Encodes `text` with this encoder. If the text has more than `limit` tokens, the result may
    /// cover only its beginning.
    fn encode_as(&self, kind: EncoderKind, text: &str, limit: usize) -> Result<Vec<u32>, String> {
        if !self.is_long(text) {
            return encode_with(self.hf_tokenizer(kind), text, false);
        }
        match self.encoder(kind) {
            (hf_tokenizer, Some(stream)) => stream.encode(hf_tokenizer, text, limit),
            (hf_tokenizer, None) => {
                self.check_whole_text(text)?;
                // One text at a time, since a long text needs hundreds of megabytes.
                static LONG_TEXT: Mutex<()> = Mutex::new(());
                let _guard = LONG_TEXT.lock().unwrap_or_else(PoisonError::into_inner);
                encode_with(hf_tokenizer, text, false)
            }
        }
    }

    /// Whether a text is too long to be encoded at once without a check.
    fn is_long(&self, text: &str) -> bool {
        text.len() > LONG_TEXT_BYTES.min(self.bounds.whole_bytes_max)
    }

    /// Checks that a text can be encoded at once within the limits.
    fn check_whole_text(&self, text: &str) -> Result<(), String> {
        let bounds = &self.bounds;
        if text.len() > bounds.whole_bytes_max {
            let mut input_bytes = 0;
            let mut remaining = text;
            while !remaining.is_empty() && input_bytes <= MODEL_INPUT_BYTES_MAX {
                let end = remaining.floor_char_boundary(MEASURED_BLOCK_BYTES);
                let (block, rest) = remaining.split_at(end);
                let mut block = NormalizedString::from(block);
                if let Some(normalizer) = self.full.get_normalizer() {
                    guarded(THIS_TEXT, || normalizer.normalize(&mut block))?;
                }
                input_bytes += block.get().len() * bounds.pre_tokenizer_growth;
                remaining = rest;
            }
            if input_bytes > MODEL_INPUT_BYTES_MAX || text.len() > STRETCH_BYTES_MAX {
                return Err(format!(
                    "this text has {} bytes: its tokenizer cannot encode so many at once, and cannot encode a text in parts",
                    text.len()
                ));
            }
        }
        Ok(())
    }

    fn hf_tokenizer(&self, kind: EncoderKind) -> &HfTokenizer {
        match kind {
            EncoderKind::Full => &self.full,
            EncoderKind::First => &self.first_piece,
            EncoderKind::Later => self.later_piece.as_ref().unwrap_or(&self.first_piece),
            EncoderKind::Plain => self.plain.as_ref().unwrap_or(&self.first_piece),
        }
    }

    fn encoder(&self, kind: EncoderKind) -> (&HfTokenizer, Option<&StreamEncoder>) {
        let streams = &self.stream_encoders;
        let stream = match kind {
            EncoderKind::Full => &streams.full,
            EncoderKind::Later if self.later_piece.is_some() => &streams.later,
            EncoderKind::Plain if self.plain.is_some() => &streams.plain,
            EncoderKind::First | EncoderKind::Later | EncoderKind::Plain => &streams.first,
        };
        let hf_tokenizer = self.hf_tokenizer(kind);
        (
            hf_tokenizer,
            stream.get_or_init(|| StreamEncoder::of(hf_tokenizer)).as_ref(),
        )
    }
}

pub(super) fn encode_with(encoder: &HfTokenizer, text: &str, add_special: bool) -> Result<Vec<u32>, String> {
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
