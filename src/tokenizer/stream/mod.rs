//! Encodes long texts in parts, up to a limit of tokens.
//!
//! The tokenizers library builds a structure of 150 to 300 bytes per byte of text before it returns
//! the first token. Here its steps run one after the other on small parts. Added tokens are cut
//! out. The text between them is normalized in blocks and cut by the pre-tokenizer's own regular
//! expressions, which run over all of it. The model then encodes one piece after the other. The
//! token ids are the same as the library's. This needs a tokenizer whose steps are all of these
//! kinds:
//!
//! - A normalizer that works on one character after the other, or a Unicode normalization form. Its
//!   text is cut before a character that no form joins with the characters before it.
//! - A pre-tokenizer whose pieces together are the whole text.
//! - BPE or Unigram. A piece of many kilobytes (without a pre-tokenizer each text is one piece) is
//!   cut where BPE can join nothing: between two characters that are adjacent in no token.
//!
//! See docs/decisions/085-long-texts-are-tokenized-in-parts.md.

mod steps;

pub(super) use steps::flatten;

use std::borrow::Cow;
use std::collections::HashSet;
use std::time::{Duration, Instant};

use onig::{MatchParam, Regex, Region, SearchOptions};
use tokenizers::{Model, ModelWrapper, NormalizedString, Normalizer, NormalizerWrapper, Tokenizer as Inner};

use super::guarded::{THIS_TEXT, guarded};
use super::trie::{ROOT, Trie};

/// Maximum length in bytes of a stretch that is normalized or encoded at once where it cannot be
/// cut.
pub(super) const STRETCH_BYTES_MAX: usize = 2 << 20;
/// Minimum length in bytes of a normalized block where the text can be cut.
const BLOCK_BYTES: usize = if cfg!(test) { 12 } else { 16 << 10 };
/// Maximum bytes that a normalizer may make from a text.
const NORMALIZED_BYTES_MAX: usize = 128 << 20;
/// Longer pieces, in bytes, are cut where the model can join nothing.
const PIECE_BYTES: usize = if cfg!(test) { 6 } else { 4 << 10 };
/// Maximum time per text.
const SECONDS_MAX: u64 = 20;

/// The steps of a tokenizer that can encode in parts.
pub(super) struct StreamEncoder {
    /// Added tokens that are matched in the original text (`written`) and in the normalized text.
    written: Option<Trie<Vec<Token>>>,
    normalized: Option<Trie<Vec<Token>>>,
    /// The normalizer for the first block of a stretch, and the normalizer for later blocks, which
    /// adds no prefix.
    normalizer: Option<NormalizerWrapper>,
    normalizer_inside: Option<NormalizerWrapper>,
    metaspace: Option<Metaspace>,
    split_steps: Vec<SplitStep>,
    byte_level: Option<[char; 256]>,
    mergeable: Option<MergeablePairs>,
}

/// An added token.
#[derive(Clone, Copy)]
struct Token {
    id: u32,
    lstrip: bool,
    rstrip: bool,
}

/// SentencePiece's replacement of spaces by a mark.
struct Metaspace {
    mark: char,
    prefix: MarkPrefix,
    splits: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum MarkPrefix {
    Never,
    First,
    Always,
}

/// A step of a pre-tokenizer. Its pieces together are the whole text.
enum SplitStep {
    /// Cuts at both ends of each match.
    Around(Regex),
    /// Cuts after each occurrence.
    Behind(String),
    /// Cuts around each digit, or around each run of digits.
    Digits { each: bool },
}

/// Pairs of characters that BPE may join.
struct MergeablePairs {
    /// Characters that are tokens themselves.
    known: HashSet<char>,
    /// Pairs that are adjacent in a token.
    pairs: HashSet<(char, char)>,
}

/// The reason why encoding stopped before the end of the text.
enum EncodeStop {
    Enough,
    Failed(String),
}

/// The state of encoding one text.
struct Run<'a> {
    stream: &'a StreamEncoder,
    model: &'a ModelWrapper,
    ids: Vec<u32>,
    limit: usize,
    deadline: Instant,
    /// A piece in the spelling of byte-level vocabularies.
    buffer: String,
}

impl StreamEncoder {
    /// The token ids of `text`. If there are more than `limit`, at least `limit + 1` ids of the
    /// beginning are returned.
    ///
    /// # Errors
    /// The text holds a stretch that is too long and cannot be cut, encoding exceeds the time
    /// limit, or the library gives up on the text.
    pub(super) fn encode(&self, tokenizer: &Inner, text: &str, limit: usize) -> Result<Vec<u32>, String> {
        let mut run = Run {
            stream: self,
            model: tokenizer.get_model(),
            ids: Vec::new(),
            limit,
            deadline: Instant::now() + Duration::from_secs(SECONDS_MAX),
            buffer: String::new(),
        };
        match guarded(THIS_TEXT, || Ok(run.text(text)))? {
            Ok(()) | Err(EncodeStop::Enough) => Ok(run.ids),
            Err(EncodeStop::Failed(why)) => Err(why),
        }
    }

    /// The normalized text.
    pub(super) fn normalize(&self, text: &str) -> Result<String, String> {
        let deadline = Instant::now() + Duration::from_secs(SECONDS_MAX);
        match guarded(THIS_TEXT, || Ok(self.normalized(text, deadline)))? {
            Ok(text) => Ok(text.into_owned()),
            Err(EncodeStop::Failed(why)) => Err(why),
            Err(EncodeStop::Enough) => Ok(String::new()),
        }
    }

    fn normalized<'a>(&self, text: &'a str, deadline: Instant) -> Result<Cow<'a, str>, EncodeStop> {
        let (Some(first), Some(inside)) = (&self.normalizer, &self.normalizer_inside) else {
            return Ok(Cow::Borrowed(text));
        };
        let mut out = String::with_capacity(text.len());
        let mut from = 0;
        while from < text.len() {
            let rest = &text[from..];
            let end = rest
                .char_indices()
                .skip_while(|(at, _)| *at < BLOCK_BYTES)
                .find(|(_, c)| joins_nothing_before(*c))
                .map_or(rest.len(), |(at, _)| at);
            check_deadline(deadline)?;
            check_length(end)?;
            let mut block = NormalizedString::from(&rest[..end]);
            let normalizer = if from == 0 { first } else { inside };
            normalizer.normalize(&mut block).map_err(failed)?;
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

impl Run<'_> {
    fn text(&mut self, text: &str) -> Result<(), EncodeStop> {
        let stream = self.stream;
        cut_tokens(stream.written.as_ref(), text, |token, start, end| match token {
            Some(id) => self.push([id]),
            None => self.stretch(&text[start..end], start == 0),
        })
    }

    /// Encodes text between added tokens.
    fn stretch(&mut self, text: &str, begins_text: bool) -> Result<(), EncodeStop> {
        let stream = self.stream;
        let text = stream.normalized(text, self.deadline)?;
        cut_tokens(stream.normalized.as_ref(), &text, |token, start, end| match token {
            Some(id) => self.push([id]),
            None => self.pre_tokenize(&text[start..end], begins_text && start == 0),
        })
    }

    fn pre_tokenize(&mut self, text: &str, begins_text: bool) -> Result<(), EncodeStop> {
        let Some(Metaspace { mark, prefix, splits }) = &self.stream.metaspace else {
            return self.cut(0, text);
        };
        let mut marked = text.replace(' ', mark.encode_utf8(&mut [0; 4]));
        let prefixed = *prefix == MarkPrefix::Always || (*prefix == MarkPrefix::First && begins_text);
        if prefixed && !marked.starts_with(*mark) {
            marked.insert(0, *mark);
        }
        let mut from = 0;
        if *splits {
            for (at, _) in marked.match_indices(*mark) {
                self.piece(&marked[from..at])?;
                from = at;
            }
        }
        self.piece(&marked[from..])
    }

    /// Cuts by the pre-tokenizer's steps, beginning with number `step`.
    fn cut(&mut self, step: usize, text: &str) -> Result<(), EncodeStop> {
        if text.is_empty() {
            return Ok(());
        }
        let Some(cut) = self.stream.split_steps.get(step) else {
            return self.piece(text);
        };
        let mut from = 0;
        let mut cut_at = |run: &mut Self, at: usize| {
            let piece = &text[from..at];
            from = at;
            run.cut(step + 1, piece)
        };
        match cut {
            SplitStep::Around(regex) => {
                let mut matches = Matches::new(regex, text);
                while let Some((start, end)) = matches.next().map_err(EncodeStop::Failed)? {
                    check_deadline(self.deadline)?;
                    cut_at(self, start)?;
                    cut_at(self, end)?;
                }
            }
            SplitStep::Behind(pattern) => {
                for (at, found) in text.match_indices(pattern.as_str()) {
                    cut_at(self, at + found.len())?;
                }
            }
            SplitStep::Digits { each } => {
                let mut was_digit = None;
                for (at, c) in text.char_indices() {
                    let is_digit = c.is_numeric();
                    if (*each && is_digit) || was_digit.is_some_and(|was| was != is_digit) {
                        cut_at(self, at)?;
                    }
                    was_digit = Some(is_digit);
                }
            }
        }
        cut_at(self, text.len())
    }

    /// Encodes a piece of pre-tokenized text.
    fn piece(&mut self, text: &str) -> Result<(), EncodeStop> {
        if text.is_empty() {
            return Ok(());
        }
        check_deadline(self.deadline)?;
        let Some(chars) = &self.stream.byte_level else {
            return self.parts(text);
        };
        let mut written = std::mem::take(&mut self.buffer);
        written.clear();
        written.extend(text.bytes().map(|byte| chars[byte as usize]));
        let done = self.parts(&written);
        self.buffer = written;
        done
    }

    /// Encodes a long piece in parts across which the model joins nothing.
    fn parts(&mut self, piece: &str) -> Result<(), EncodeStop> {
        let mut from = 0;
        if let (Some(mergeable), true) = (&self.stream.mergeable, piece.len() > PIECE_BYTES) {
            let mut before = None;
            for (at, c) in piece.char_indices() {
                if at - from >= PIECE_BYTES && before.is_some_and(|before| mergeable.none(before, c)) {
                    self.part(&piece[from..at])?;
                    from = at;
                }
                before = Some(c);
            }
        }
        self.part(&piece[from..])
    }

    fn part(&mut self, part: &str) -> Result<(), EncodeStop> {
        check_length(match self.stream.byte_level {
            Some(_) => part.chars().count(),
            None => part.len(),
        })?;
        check_deadline(self.deadline)?;
        let tokens = self.model.tokenize(part).map_err(failed)?;
        self.push(tokens.iter().map(|token| token.id))
    }

    fn push(&mut self, ids: impl IntoIterator<Item = u32>) -> Result<(), EncodeStop> {
        self.ids.extend(ids);
        if self.ids.len() > self.limit {
            Err(EncodeStop::Enough)
        } else {
            Ok(())
        }
    }
}

impl MergeablePairs {
    /// Whether BPE can join nothing across these adjacent characters. Every token that BPE makes is
    /// in the vocabulary, so such a token would contain the pair.
    fn none(&self, before: char, c: char) -> bool {
        self.known.contains(&before) && self.known.contains(&c) && !self.pairs.contains(&(before, c))
    }
}

/// The matches of a regular expression, the same as those of the library's own iterator.
pub(super) struct Matches<'a> {
    regex: &'a Regex,
    text: &'a str,
    region: Region,
    at: usize,
    last: Option<usize>,
}

impl<'a> Matches<'a> {
    pub(super) fn new(regex: &'a Regex, text: &'a str) -> Matches<'a> {
        Matches {
            regex,
            text,
            region: Region::new(),
            at: 0,
            last: None,
        }
    }

    pub(super) fn next(&mut self) -> Result<Option<(usize, usize)>, String> {
        while self.at <= self.text.len() {
            self.region.clear();
            let (options, param) = (SearchOptions::SEARCH_OPTION_NONE, MatchParam::default());
            let region = Some(&mut self.region);
            let found = self
                .regex
                .search_with_param(self.text, self.at, self.text.len(), options, region, param);
            let found = found.map_err(|e| format!("an expression of the tokenizer gives up on this text: {e}"))?;
            let Some((start, end)) = found.and_then(|_| self.region.pos(0)) else {
                return Ok(None);
            };
            // An empty match at the end of the last match would be found again forever.
            if start == end && self.last == Some(end) {
                self.at += self.text[self.at..].chars().next().map_or(1, char::len_utf8);
                continue;
            }
            self.at = end;
            self.last = Some(end);
            return Ok(Some((start, end)));
        }
        Ok(None)
    }
}

/// Calls `each` for the added tokens in `text` and for the text between them. The leftmost token is
/// taken first, and the longest at each position.
fn cut_tokens(
    tokens: Option<&Trie<Vec<Token>>>,
    text: &str,
    mut each: impl FnMut(Option<u32>, usize, usize) -> Result<(), EncodeStop>,
) -> Result<(), EncodeStop> {
    let mut from = 0;
    let mut at = 0;
    while let (Some(tokens), true) = (tokens, at < text.len()) {
        let Some((token, end)) = longest_at(tokens, &text[at..]) else {
            at += text[at..].chars().next().map_or(1, char::len_utf8);
            continue;
        };
        let (mut start, mut stop) = (at, at + end);
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

fn longest_at(tokens: &Trie<Vec<Token>>, text: &str) -> Option<(Token, usize)> {
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

/// Whether no Unicode normalization form joins this character with one before it. True for ASCII
/// and the common ideographs.
fn joins_nothing_before(c: char) -> bool {
    c.is_ascii() || ('\u{4E00}'..='\u{9FFF}').contains(&c)
}

fn check_length(bytes: usize) -> Result<(), EncodeStop> {
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

fn failed(error: tokenizers::Error) -> EncodeStop {
    EncodeStop::Failed(super::one_line(&error.to_string()))
}

#[cfg(test)]
mod tests;
