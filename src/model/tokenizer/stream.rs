//! Long texts are encoded part by part, as far as a limit of tokens.
//!
//! The tokenizers library makes a structure of 150 to 300 bytes for each byte of a text before the first token is there. Here its steps
//! follow each other in small parts: added tokens are cut out, what is between is normalized in blocks and cut by the pre-tokenizer's own
//! expressions, which run over all of it, and the model encodes one piece after the other. The token ids are the same. For that, only
//! tokenizers of known steps are read so:
//!
//! - a normalizer of one character after the other, or of Unicode's forms: a text may be cut before a character that no form joins with what
//!   stands before it;
//! - a pre-tokenizer whose pieces make up the whole text;
//! - BPE or Unigram. A piece of many kilobytes (a vocabulary without a pre-tokenizer makes one of each text) is cut where BPE can join
//!   nothing: between two characters that stand side by side in no token.
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

/// Longest stretch that is normalized or encoded at once where it cannot be cut, in bytes.
pub(super) const STRETCH_BYTES_MAX: usize = 2 << 20;
/// Shortest block that is normalized, in bytes, where it can be cut.
const BLOCK_BYTES: usize = if cfg!(test) { 12 } else { 16 << 10 };
/// Most bytes that a normalizer may make of a text.
const NORMALIZED_BYTES_MAX: usize = 128 << 20;
/// Pieces longer than this are cut where the model can join nothing.
const PIECE_BYTES: usize = if cfg!(test) { 6 } else { 4 << 10 };
/// A text takes as long at most.
const SECONDS_MAX: u64 = 20;

/// A tokenizer whose steps are known.
pub(super) struct Stream {
    /// Added tokens that are looked for in the text as it is written, and those that are looked for in the normalized one.
    written: Option<Trie<Vec<Token>>>,
    normalized: Option<Trie<Vec<Token>>>,
    /// For the beginning of a stretch, and for what follows: nothing is put in front of that.
    normalizer: Option<NormalizerWrapper>,
    normalizer_inside: Option<NormalizerWrapper>,
    metaspace: Option<Metaspace>,
    cuts: Vec<Cut>,
    byte_level: Option<[char; 256]>,
    joins: Option<Joins>,
}

/// An added token.
#[derive(Clone, Copy)]
struct Token {
    id: u32,
    lstrip: bool,
    rstrip: bool,
}

/// SentencePiece's mark for a space.
struct Metaspace {
    mark: char,
    prefix: Prefix,
    splits: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum Prefix {
    Never,
    First,
    Always,
}

/// A step of a pre-tokenizer. All of the text is in its pieces.
enum Cut {
    /// At both ends of each match.
    Around(Regex),
    /// Behind each occurrence.
    Behind(String),
    /// Around each digit, or around each run of them.
    Digits { each: bool },
}

/// Where BPE may join characters.
struct Joins {
    /// Characters that are tokens of their own.
    known: HashSet<char>,
    /// Those that stand side by side in a token.
    pairs: HashSet<(char, char)>,
}

/// Why encoding ended before the text did.
enum End {
    Enough,
    Failed(String),
}

/// One text on its way.
struct Run<'a> {
    stream: &'a Stream,
    model: &'a ModelWrapper,
    ids: Vec<u32>,
    limit: usize,
    until: Instant,
    /// A piece as byte-level vocabularies write it.
    buffer: String,
}

impl Stream {
    /// The token ids of `text`; where they are more than `limit`, those at its beginning, more than `limit` of them.
    ///
    /// # Errors
    /// It holds a stretch that cannot be cut and is too long, it takes too long, or the library gives up on it.
    pub(super) fn encode(&self, tokenizer: &Inner, text: &str, limit: usize) -> Result<Vec<u32>, String> {
        let mut run = Run {
            stream: self,
            model: tokenizer.get_model(),
            ids: Vec::new(),
            limit,
            until: Instant::now() + Duration::from_secs(SECONDS_MAX),
            buffer: String::new(),
        };
        match guarded(THIS_TEXT, || Ok(run.text(text)))? {
            Ok(()) | Err(End::Enough) => Ok(run.ids),
            Err(End::Failed(why)) => Err(why),
        }
    }

    /// The text as the normalizer leaves it.
    pub(super) fn normalize(&self, text: &str) -> Result<String, String> {
        let until = Instant::now() + Duration::from_secs(SECONDS_MAX);
        match guarded(THIS_TEXT, || Ok(self.normalized(text, until)))? {
            Ok(text) => Ok(text.into_owned()),
            Err(End::Failed(why)) => Err(why),
            Err(End::Enough) => Ok(String::new()),
        }
    }

    fn normalized<'a>(&self, text: &'a str, until: Instant) -> Result<Cow<'a, str>, End> {
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
            in_time(until)?;
            fits(end)?;
            let mut block = NormalizedString::from(&rest[..end]);
            let normalizer = if from == 0 { first } else { inside };
            normalizer.normalize(&mut block).map_err(failed)?;
            out.push_str(block.get());
            if out.len() > NORMALIZED_BYTES_MAX {
                let why =
                    format!("its tokenizer's normalizer makes more than {NORMALIZED_BYTES_MAX} bytes of this text");
                return Err(End::Failed(why));
            }
            from += end;
        }
        Ok(Cow::Owned(out))
    }
}

impl Run<'_> {
    fn text(&mut self, text: &str) -> Result<(), End> {
        let stream = self.stream;
        cut_tokens(stream.written.as_ref(), text, |token, start, end| match token {
            Some(id) => self.push([id]),
            None => self.stretch(&text[start..end], start == 0),
        })
    }

    /// Text between added tokens.
    fn stretch(&mut self, text: &str, begins_text: bool) -> Result<(), End> {
        let stream = self.stream;
        let text = stream.normalized(text, self.until)?;
        cut_tokens(stream.normalized.as_ref(), &text, |token, start, end| match token {
            Some(id) => self.push([id]),
            None => self.pre_tokenize(&text[start..end], begins_text && start == 0),
        })
    }

    fn pre_tokenize(&mut self, text: &str, begins_text: bool) -> Result<(), End> {
        let Some(Metaspace { mark, prefix, splits }) = &self.stream.metaspace else {
            return self.cut(0, text);
        };
        let mut marked = text.replace(' ', mark.encode_utf8(&mut [0; 4]));
        let prefixed = *prefix == Prefix::Always || (*prefix == Prefix::First && begins_text);
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

    /// Cuts by the pre-tokenizer's steps from number `step` on.
    fn cut(&mut self, step: usize, text: &str) -> Result<(), End> {
        if text.is_empty() {
            return Ok(());
        }
        let Some(cut) = self.stream.cuts.get(step) else {
            return self.piece(text);
        };
        let mut from = 0;
        let mut cut_at = |run: &mut Self, at: usize| {
            let piece = &text[from..at];
            from = at;
            run.cut(step + 1, piece)
        };
        match cut {
            Cut::Around(regex) => {
                let mut matches = Matches::new(regex, text);
                while let Some((start, end)) = matches.next().map_err(End::Failed)? {
                    in_time(self.until)?;
                    cut_at(self, start)?;
                    cut_at(self, end)?;
                }
            }
            Cut::Behind(pattern) => {
                for (at, found) in text.match_indices(pattern.as_str()) {
                    cut_at(self, at + found.len())?;
                }
            }
            Cut::Digits { each } => {
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

    /// What the model encodes as a whole.
    fn piece(&mut self, text: &str) -> Result<(), End> {
        if text.is_empty() {
            return Ok(());
        }
        in_time(self.until)?;
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

    /// A long piece in parts that the model does not join.
    fn parts(&mut self, piece: &str) -> Result<(), End> {
        let mut from = 0;
        if let (Some(joins), true) = (&self.stream.joins, piece.len() > PIECE_BYTES) {
            let mut before = None;
            for (at, c) in piece.char_indices() {
                if at - from >= PIECE_BYTES && before.is_some_and(|before| joins.none(before, c)) {
                    self.part(&piece[from..at])?;
                    from = at;
                }
                before = Some(c);
            }
        }
        self.part(&piece[from..])
    }

    fn part(&mut self, part: &str) -> Result<(), End> {
        fits(match self.stream.byte_level {
            Some(_) => part.chars().count(),
            None => part.len(),
        })?;
        in_time(self.until)?;
        let tokens = self.model.tokenize(part).map_err(failed)?;
        self.push(tokens.iter().map(|token| token.id))
    }

    fn push(&mut self, ids: impl IntoIterator<Item = u32>) -> Result<(), End> {
        self.ids.extend(ids);
        match self.ids.len() > self.limit {
            true => Err(End::Enough),
            false => Ok(()),
        }
    }
}

impl Joins {
    /// Can BPE join nothing across these two, side by side? A token that it makes is in the vocabulary, and holds both.
    fn none(&self, before: char, c: char) -> bool {
        self.known.contains(&before) && self.known.contains(&c) && !self.pairs.contains(&(before, c))
    }
}

/// The matches of an expression, as the library's own iterator has them.
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
            // An empty match at the end of the last one would be found again for ever.
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

/// Calls `each` for the added tokens in `text` and for what is between them: the leftmost, and of those the longest.
fn cut_tokens(
    tokens: Option<&Trie<Vec<Token>>>,
    text: &str,
    mut each: impl FnMut(Option<u32>, usize, usize) -> Result<(), End>,
) -> Result<(), End> {
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
    match from < text.len() {
        true => each(None, from, text.len()),
        false => Ok(()),
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

/// Does no form of Unicode join this character with one before it? True of ASCII and of the common ideographs.
fn joins_nothing_before(c: char) -> bool {
    c.is_ascii() || ('\u{4E00}'..='\u{9FFF}').contains(&c)
}

fn fits(bytes: usize) -> Result<(), End> {
    match bytes > STRETCH_BYTES_MAX {
        true => Err(End::Failed(format!(
            "this text holds a stretch of {bytes} bytes that the tokenizer cannot cut, and {STRETCH_BYTES_MAX} are the most that are encoded at once"
        ))),
        false => Ok(()),
    }
}

fn in_time(until: Instant) -> Result<(), End> {
    match Instant::now() > until {
        true => Err(End::Failed(format!(
            "its tokenizer takes more than {SECONDS_MAX} seconds for this text"
        ))),
        false => Ok(()),
    }
}

fn failed(error: tokenizers::Error) -> End {
    End::Failed(super::one_line(&error.to_string()))
}

#[cfg(test)]
mod tests;
