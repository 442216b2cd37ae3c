//! Encodes long texts in parts, up to a limit of tokens.
//!
//! The tokenizers library builds a structure of 150 to 300 bytes per byte of text before it returns
//! the first token. Here the same steps run on small parts of the text. The text is split at added
//! tokens. The text between them (a *stretch*) is normalized in blocks and split into pieces by the
//! pre-tokenizer's own regular expressions, which run over the whole stretch. The model then
//! encodes one piece after the other. The token ids are the same as the library's. This needs a
//! tokenizer whose steps are all of these kinds:
//!
//! - A normalizer that works on one character after the other, or a Unicode normalization form. A
//!   stretch is cut into blocks before characters that no form combines with characters before
//!   them.
//! - A pre-tokenizer whose pieces together are the whole text.
//! - BPE or Unigram. A piece of many kilobytes (without a pre-tokenizer each stretch is one piece)
//!   is cut where BPE cannot merge: between two characters that are adjacent in no token.
//!
//! See docs/decisions/085-long-texts-are-tokenized-in-parts.md.

mod steps;

pub(super) use steps::flatten;

use std::borrow::Cow;
use std::collections::HashSet;
use std::time::{Duration, Instant};

use onig::{MatchParam, Regex, Region, SearchOptions};
use tokenizers::{Model, ModelWrapper, NormalizedString, Normalizer, NormalizerWrapper};

use super::guarded::{THIS_TEXT, guarded};
use super::shared::HfTokenizer;
use super::trie::{ROOT, Trie};

/// Maximum length in bytes of a part of a text that is normalized or encoded at once, because it
/// cannot be cut.
pub(super) const STRETCH_BYTES_MAX: usize = 2 << 20;
/// Minimum length in bytes of a block that is normalized, if the text can be cut.
const BLOCK_BYTES: usize = if cfg!(test) { 12 } else { 16 << 10 };
/// Maximum output bytes of a normalizer per text.
const NORMALIZED_BYTES_MAX: usize = 128 << 20;
/// Length in bytes above which a piece is cut where the model cannot merge.
const PIECE_BYTES: usize = if cfg!(test) { 6 } else { 4 << 10 };
/// Maximum time per text.
const SECONDS_MAX: u64 = 20;

/// The steps of a tokenizer that can encode in parts.
pub(super) struct StreamEncoder {
    /// Added tokens that are matched in the original text, and in the normalized text.
    original_added: Option<Trie<Vec<AddedTokenMatch>>>,
    normalized_added: Option<Trie<Vec<AddedTokenMatch>>>,
    /// The normalizer for the first block of a stretch, and the normalizer for later blocks, which
    /// adds no prefix.
    normalizer: Option<NormalizerWrapper>,
    later_normalizer: Option<NormalizerWrapper>,
    metaspace: Option<Metaspace>,
    split_steps: Vec<SplitStep>,
    byte_level: Option<[char; 256]>,
    mergeable: Option<MergeablePairs>,
}

/// An added token, as it is matched in a text.
#[derive(Clone, Copy)]
struct AddedTokenMatch {
    id: u32,
    lstrip: bool,
    rstrip: bool,
}

/// A pre-tokenizer that replaces spaces by a mark, as SentencePiece does.
struct Metaspace {
    mark: char,
    prefix: MarkPrefix,
    splits_at_marks: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum MarkPrefix {
    Never,
    First,
    Always,
}

/// A step of a pre-tokenizer, whose pieces together are the whole text.
enum SplitStep {
    /// Splits at both ends of each match.
    AroundMatches(Regex),
    /// Splits after each occurrence of this text.
    AfterText(String),
    /// Splits at both ends of each digit (`is_each`), or of each run of digits.
    Digits { is_each: bool },
}

/// Pairs of characters that BPE may merge.
struct MergeablePairs {
    /// Characters that are tokens.
    token_chars: HashSet<char>,
    /// Pairs that are adjacent in a token.
    pairs: HashSet<(char, char)>,
}

/// The reason why encoding stopped before the end of the text.
enum EncodeStop {
    LimitReached,
    Failed(String),
}

/// The state of encoding one text.
struct EncodeRun<'a> {
    stream: &'a StreamEncoder,
    model: &'a ModelWrapper,
    ids: Vec<u32>,
    limit: usize,
    deadline: Instant,
    /// Reused for a piece as characters of byte-level vocabularies.
    buffer: String,
}

impl StreamEncoder {
    /// The token ids of `text`. If there are more than `limit`, at least `limit + 1` ids of the
    /// beginning are returned.
    ///
    /// # Errors
    /// The text contains a part that is too long and cannot be cut, encoding exceeds the time
    /// limit, or the library gives up on the text.
    pub(super) fn encode(&self, tokenizer: &HfTokenizer, text: &str, limit: usize) -> Result<Vec<u32>, String> {
        let mut run = EncodeRun {
            stream: self,
            model: tokenizer.get_model(),
            ids: Vec::new(),
            limit,
            deadline: Instant::now() + Duration::from_secs(SECONDS_MAX),
            buffer: String::new(),
        };
        match guarded(THIS_TEXT, || Ok(run.encode_text(text)))? {
            Ok(()) | Err(EncodeStop::LimitReached) => Ok(run.ids),
            Err(EncodeStop::Failed(why)) => Err(why),
        }
    }

    /// The normalized text.
    pub(super) fn normalize(&self, text: &str) -> Result<String, String> {
        let deadline = Instant::now() + Duration::from_secs(SECONDS_MAX);
        match guarded(THIS_TEXT, || Ok(self.normalized(text, deadline)))? {
            Ok(text) => Ok(text.into_owned()),
            Err(EncodeStop::Failed(why)) => Err(why),
            Err(EncodeStop::LimitReached) => Ok(String::new()),
        }
    }

    fn normalized<'a>(&self, text: &'a str, deadline: Instant) -> Result<Cow<'a, str>, EncodeStop> {
        let (Some(first), Some(later)) = (&self.normalizer, &self.later_normalizer) else {
            return Ok(Cow::Borrowed(text));
        };
        let mut out = String::with_capacity(text.len());
        let mut from = 0;
        while from < text.len() {
            let rest = &text[from..];
            let end = rest
                .char_indices()
                .skip_while(|(at, _)| *at < BLOCK_BYTES)
                .find(|(_, c)| is_normalization_boundary(*c))
                .map_or(rest.len(), |(at, _)| at);
            check_deadline(deadline)?;
            check_stretch_length(end)?;
            let mut block = NormalizedString::from(&rest[..end]);
            let normalizer = if from == 0 { first } else { later };
            normalizer.normalize(&mut block).map_err(encode_error)?;
            out.push_str(block.get());
            if out.len() > NORMALIZED_BYTES_MAX {
                let why =
                    format!("its tokenizer's normalizer makes more than {NORMALIZED_BYTES_MAX} bytes of this text");
                return Err(EncodeStop::Failed(why));
            }
            from += end;
        }
        Ok(Cow::Owned(out))
    }
}

impl EncodeRun<'_> {
    fn encode_text(&mut self, text: &str) -> Result<(), EncodeStop> {
        let stream = self.stream;
        split_at_added_tokens(stream.original_added.as_ref(), text, |token, start, end| match token {
            Some(id) => self.push_ids([id]),
            None => self.encode_stretch(&text[start..end], start == 0),
        })
    }

    /// Encodes a stretch: text between added tokens.
    fn encode_stretch(&mut self, text: &str, begins_text: bool) -> Result<(), EncodeStop> {
        let stream = self.stream;
        let text = stream.normalized(text, self.deadline)?;
        split_at_added_tokens(
            stream.normalized_added.as_ref(),
            &text,
            |token, start, end| match token {
                Some(id) => self.push_ids([id]),
                None => self.pre_tokenize(&text[start..end], begins_text && start == 0),
            },
        )
    }

    fn pre_tokenize(&mut self, text: &str, begins_text: bool) -> Result<(), EncodeStop> {
        let Some(Metaspace {
            mark,
            prefix,
            splits_at_marks,
        }) = &self.stream.metaspace
        else {
            return self.split_from_step(0, text);
        };
        let mut marked = text.replace(' ', mark.encode_utf8(&mut [0; 4]));
        let prefixed = *prefix == MarkPrefix::Always || (*prefix == MarkPrefix::First && begins_text);
        if prefixed && !marked.starts_with(*mark) {
            marked.insert(0, *mark);
        }
        let mut from = 0;
        if *splits_at_marks {
            for (at, _) in marked.match_indices(*mark) {
                self.encode_piece(&marked[from..at])?;
                from = at;
            }
        }
        self.encode_piece(&marked[from..])
    }

    /// Splits by the pre-tokenizer's steps from index `step` on, and encodes the pieces.
    fn split_from_step(&mut self, step: usize, text: &str) -> Result<(), EncodeStop> {
        if text.is_empty() {
            return Ok(());
        }
        let Some(split_step) = self.stream.split_steps.get(step) else {
            return self.encode_piece(text);
        };
        let mut from = 0;
        let mut split_at = |run: &mut Self, at: usize| {
            let piece = &text[from..at];
            from = at;
            run.split_from_step(step + 1, piece)
        };
        match split_step {
            SplitStep::AroundMatches(regex) => {
                let mut matches = Matches::new(regex, text);
                while let Some((start, end)) = matches.next().map_err(EncodeStop::Failed)? {
                    check_deadline(self.deadline)?;
                    split_at(self, start)?;
                    split_at(self, end)?;
                }
            }
            SplitStep::AfterText(pattern) => {
                for (at, found) in text.match_indices(pattern.as_str()) {
                    split_at(self, at + found.len())?;
                }
            }
            SplitStep::Digits { is_each } => {
                let mut was_digit = None;
                for (at, c) in text.char_indices() {
                    let is_digit = c.is_numeric();
                    if (*is_each && is_digit) || was_digit.is_some_and(|was| was != is_digit) {
                        split_at(self, at)?;
                    }
                    was_digit = Some(is_digit);
                }
            }
        }
        split_at(self, text.len())
    }

    /// Encodes a piece of pre-tokenized text.
    fn encode_piece(&mut self, text: &str) -> Result<(), EncodeStop> {
        if text.is_empty() {
            return Ok(());
        }
        check_deadline(self.deadline)?;
        let Some(chars) = &self.stream.byte_level else {
            return self.encode_in_parts(text);
        };
        let mut byte_level = std::mem::take(&mut self.buffer);
        byte_level.clear();
        byte_level.extend(text.bytes().map(|byte| chars[byte as usize]));
        let result = self.encode_in_parts(&byte_level);
        self.buffer = byte_level;
        result
    }

    /// Encodes a piece. A long piece is cut where the model cannot merge.
    fn encode_in_parts(&mut self, piece: &str) -> Result<(), EncodeStop> {
        let mut from = 0;
        if let (Some(mergeable), true) = (&self.stream.mergeable, piece.len() > PIECE_BYTES) {
            let mut before = None;
            for (at, c) in piece.char_indices() {
                if at - from >= PIECE_BYTES && before.is_some_and(|before| mergeable.cannot_merge(before, c)) {
                    self.encode_part(&piece[from..at])?;
                    from = at;
                }
                before = Some(c);
            }
        }
        self.encode_part(&piece[from..])
    }

    fn encode_part(&mut self, part: &str) -> Result<(), EncodeStop> {
        check_stretch_length(match self.stream.byte_level {
            Some(_) => part.chars().count(),
            None => part.len(),
        })?;
        check_deadline(self.deadline)?;
        let tokens = self.model.tokenize(part).map_err(encode_error)?;
        self.push_ids(tokens.iter().map(|token| token.id))
    }

    fn push_ids(&mut self, ids: impl IntoIterator<Item = u32>) -> Result<(), EncodeStop> {
        self.ids.extend(ids);
        if self.ids.len() > self.limit {
            Err(EncodeStop::LimitReached)
        } else {
            Ok(())
        }
    }
}

impl MergeablePairs {
    /// Whether BPE cannot merge across these adjacent characters. Every token that BPE makes is in
    /// the vocabulary, so a token that spans the two characters would contain the pair.
    fn cannot_merge(&self, before: char, c: char) -> bool {
        self.token_chars.contains(&before) && self.token_chars.contains(&c) && !self.pairs.contains(&(before, c))
    }
}

/// The matches of a regular expression, the same as those of the library's own iterator.
pub(super) struct Matches<'a> {
    regex: &'a Regex,
    text: &'a str,
    region: Region,
    offset: usize,
    last_end: Option<usize>,
}

impl<'a> Matches<'a> {
    pub(super) fn new(regex: &'a Regex, text: &'a str) -> Matches<'a> {
        Matches {
            regex,
            text,
            region: Region::new(),
            offset: 0,
            last_end: None,
        }
    }

    pub(super) fn next(&mut self) -> Result<Option<(usize, usize)>, String> {
        while self.offset <= self.text.len() {
            self.region.clear();
            let (options, param) = (SearchOptions::SEARCH_OPTION_NONE, MatchParam::default());
            let region = Some(&mut self.region);
            let found = self
                .regex
                .search_with_param(self.text, self.offset, self.text.len(), options, region, param);
            let found = found.map_err(|e| format!("an expression of the tokenizer gives up on this text: {e}"))?;
            let Some((start, end)) = found.and_then(|_| self.region.pos(0)) else {
                return Ok(None);
            };
            // An empty match at the end of the last match would be found again and again.
            if start == end && self.last_end == Some(end) {
                self.offset += self.text[self.offset..].chars().next().map_or(1, char::len_utf8);
                continue;
            }
            self.offset = end;
            self.last_end = Some(end);
            return Ok(Some((start, end)));
        }
        Ok(None)
    }
}

/// Calls `each` for the added tokens in `text` and for the text between them: with the token's id,
/// if it is one, and with start and end. At each position from left to right, the longest token
/// matches.
fn split_at_added_tokens(
    tokens: Option<&Trie<Vec<AddedTokenMatch>>>,
    text: &str,
    mut each: impl FnMut(Option<u32>, usize, usize) -> Result<(), EncodeStop>,
) -> Result<(), EncodeStop> {
    let mut from = 0;
    let mut at = 0;
    while let (Some(tokens), true) = (tokens, at < text.len()) {
        let Some((token, length)) = longest_at(tokens, &text[at..]) else {
            at += text[at..].chars().next().map_or(1, char::len_utf8);
            continue;
        };
        let (mut start, mut stop) = (at, at + length);
        at = stop;
        if token.lstrip {
            start = text[..start].trim_end().len().max(from);
        }
        if token.rstrip {
            stop += text[stop..].len() - text[stop..].trim_start().len();
        }
        if from < start {
            each(None, from, start)?;
        }
        each(Some(token.id), start, stop)?;
        from = stop;
    }
    if from < text.len() {
        each(None, from, text.len())
    } else {
        Ok(())
    }
}

/// The longest added token at the beginning of `text`, with its length in bytes.
fn longest_at(tokens: &Trie<Vec<AddedTokenMatch>>, text: &str) -> Option<(AddedTokenMatch, usize)> {
    let mut node = ROOT;
    let mut longest = None;
    for (at, c) in text.char_indices() {
        let Some(next) = tokens.step(node, c) else { break };
        node = next;
        longest = tokens
            .value(node)
            .first()
            .map(|token| (*token, at + c.len_utf8()))
            .or(longest);
    }
    longest
}

/// Whether no Unicode normalization form combines this character with characters before it. True
/// only for ASCII and the common ideographs.
fn is_normalization_boundary(c: char) -> bool {
    c.is_ascii() || ('\u{4E00}'..='\u{9FFF}').contains(&c)
}

fn check_stretch_length(bytes: usize) -> Result<(), EncodeStop> {
    if bytes > STRETCH_BYTES_MAX {
        Err(EncodeStop::Failed(format!(
            "this text has {bytes} bytes that the tokenizer cannot split, and at most {STRETCH_BYTES_MAX} are encoded at once"
        )))
    } else {
        Ok(())
    }
}

fn check_deadline(deadline: Instant) -> Result<(), EncodeStop> {
    if Instant::now() > deadline {
        Err(EncodeStop::Failed(format!(
            "its tokenizer takes more than {SECONDS_MAX} seconds for this text"
        )))
    } else {
        Ok(())
    }
}

fn encode_error(error: tokenizers::Error) -> EncodeStop {
    EncodeStop::Failed(super::one_line(&error.to_string()))
}

#[cfg(test)]
mod tests;
