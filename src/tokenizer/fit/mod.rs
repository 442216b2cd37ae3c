//! Checks that a tokenizer fits its own vocabulary.
//!
//! A tokenizer with a pre-tokenizer or decoder of another kind than its vocabulary loads and runs
//! without error. But prompts are then cut into pieces that the model has never seen together, and
//! answers are unreadable.
//!
//! There are two checks. The vocabulary, the pre-tokenized text and the decoder must write a space
//! alike. And a few sentences must be equal after encoding and decoding. Intended changes are
//! accepted: by a normalizer, by white space that only separates words, by unknown tokens, and by
//! characters that the vocabulary lacks.
//!
//! See docs/decisions/084-a-tokenizer-is-checked-when-it-is-loaded.md.

use tokenizers::{Decoder, Model, Normalizer, PreTokenizer};
use tokenizers::{NormalizedString, OffsetReferential, OffsetType, PreTokenizedString, Tokenizer as Inner};

use super::bytes::byte_of_char_table;
use super::guarded::{THIS_TEXT, guarded};
use super::{Tokenizer, encode_with};

/// The characters for a space in byte-level vocabularies, and in SentencePiece's.
const MARKS: [char; 2] = ['Ġ', '▁'];
/// A mark prevails in a vocabulary if at least one in this many pieces begins with it. Published
/// vocabularies have one in two to ten. A rarer mark may be a letter: `Ġ` is one in Maltese.
const PREVAILS_PIECES: usize = 50;
/// A mark prevails only if the other mark is this many times rarer.
const PREVAILS_TIMES: usize = 10;
/// Maximum characters of a text in an error message.
const SHOWN_CHARS: usize = 60;

/// Sentences for the round trip. Each is short enough to be shown in an error. Each tests one
/// aspect of its own, since a sentence with an unknown token is skipped.
const SENTENCES: [&str; 8] = [
    "The bill (no. 7) isn't paid, is it?",
    "the bill is paid",
    "12.5 % of 1,234,567 = 0x1F",
    "two  spaces,   three",
    "one line\nand the next\n\n\tindented",
    "na\u{EF}ve caf\u{E9}, Stra\u{DF}e",
    "\u{4E2D}\u{6587}\u{FF0C}\u{65E5}\u{672C}\u{8A9E}",
    "so \u{1F600} and \u{1F44D}\u{1F3FD}",
];

const WHAT_TO_DO: &str = "some releases of transformers 5 wrote such files; take the `tokenizer.json` of the original checkpoint, or save it again \
                          with another release";

/// Refuses a tokenizer that does not fit its vocabulary.
pub(super) fn check(tokenizer: &Tokenizer) -> Result<(), String> {
    check_spaces(tokenizer)?;
    let trip = RoundTrip::new(tokenizer);
    SENTENCES.iter().try_for_each(|sentence| trip.check(sentence))
}

/// Checks that vocabulary, pre-tokenized text and decoder write a space alike.
fn check_spaces(tokenizer: &Tokenizer) -> Result<(), String> {
    let cut = &tokenizer.first_piece;
    let Some((mark, prevails)) = mark_of_pieces(tokenizer) else {
        return Ok(());
    };
    let other = if mark == MARKS[0] { MARKS[1] } else { MARKS[0] };
    let text = space_in(cut);
    let reads = |mark: char| {
        let text = decoded(cut, &["a", &format!("{mark}b")]);
        text.is_some_and(|text| text.contains(' ') && !text.contains(mark))
    };
    let fits = if prevails {
        text == Some(mark) && reads(mark)
    } else {
        // The vocabulary's mark may be a letter, so refuse only a text that has the other mark.
        text != Some(other)
    };
    if fits {
        return Ok(());
    }
    let text = match text {
        Some(' ') => "its normalizer and pre-tokenizer leave it a plain space".to_string(),
        Some(mark) => format!("its normalizer and pre-tokenizer as {}", in_words(mark)),
        None => "its normalizer and pre-tokenizer as neither mark".into(),
    };
    let decoder = match [mark, other].into_iter().find(|mark| reads(*mark)) {
        _ if cut.get_decoder().is_none() => "it has no decoder".to_string(),
        Some(mark) => format!("its decoder as {}", in_words(mark)),
        None => "its decoder as neither mark".into(),
    };
    Err(format!(
        "its vocabulary writes a space as {}, {text}, {decoder}: {WHAT_TO_DO}",
        in_words(mark)
    ))
}

fn in_words(mark: char) -> &'static str {
    match mark {
        'Ġ' => "`Ġ` (byte-level)",
        _ => "`▁` (SentencePiece)",
    }
}

/// The space mark with which more of the vocabulary's own pieces begin, and whether it prevails. A
/// mark that does not prevail is returned only if the other mark is absent.
fn mark_of_pieces(tokenizer: &Tokenizer) -> Option<(char, bool)> {
    let vocabulary = tokenizer.first_piece.get_vocab(false);
    let is_added = |id: &u32| tokenizer.added.binary_search_by_key(id, |token| token.id).is_ok();
    let (mut pieces, mut begin) = (0, [0, 0]);
    for (piece, _) in vocabulary.iter().filter(|(_, id)| !is_added(id)) {
        pieces += 1;
        for (count, mark) in begin.iter_mut().zip(MARKS) {
            *count += usize::from(piece.starts_with(mark));
        }
    }
    let [bytes, sentence_pieces] = begin;
    let (mark, most, least) = if bytes > sentence_pieces {
        (MARKS[0], bytes, sentence_pieces)
    } else {
        (MARKS[1], sentence_pieces, bytes)
    };
    let prevails = most * PREVAILS_PIECES >= pieces && most > least * PREVAILS_TIMES;
    (most > 0 && (prevails || least == 0)).then_some((mark, prevails))
}

/// The character for a space in pre-tokenized text. `None`: an unknown character, or none at all.
fn space_in(tokenizer: &Inner) -> Option<char> {
    let spaces = [MARKS[0], MARKS[1], ' '];
    let text = written(tokenizer, "a b").ok()?;
    // A mark at either end is a prefix or suffix, not a space.
    let text = text.trim_matches(spaces);
    spaces.into_iter().find(|space| text.contains(*space))
}

/// The text that the model cuts into pieces, after normalizer and pre-tokenizer.
fn written(tokenizer: &Inner, text: &str) -> Result<String, String> {
    guarded(THIS_TEXT, || {
        let mut normalized = NormalizedString::from(text);
        if let Some(normalizer) = tokenizer.get_normalizer() {
            normalizer.normalize(&mut normalized)?;
        }
        let mut cut = PreTokenizedString::from(normalized);
        if let Some(pre) = tokenizer.get_pre_tokenizer() {
            pre.pre_tokenize(&mut cut)?;
        }
        let splits = cut.get_splits(OffsetReferential::Normalized, OffsetType::Byte);
        Ok(splits.into_iter().map(|(text, ..)| text).collect())
    })
}

/// The text that the library decodes from these pieces. `None` where it fails.
fn decoded(tokenizer: &Inner, pieces: &[&str]) -> Option<String> {
    match tokenizer.get_decoder() {
        Some(decoder) => {
            let pieces = pieces.iter().map(|piece| piece.to_string()).collect();
            guarded(THIS_TEXT, || decoder.decode(pieces)).ok()
        }
        None => Some(pieces.join(" ")),
    }
}

/// Encodes sentences and decodes them again.
struct RoundTrip<'a> {
    tokenizer: &'a Tokenizer,
    /// The byte of each character of pre-tokenized text, if the tokenizer is byte-level.
    bytes: Option<Vec<Option<u8>>>,
    /// Whether white space between words is absent from the tokens, so that decoding may change it.
    parts_words: bool,
}

impl RoundTrip<'_> {
    fn new(tokenizer: &Tokenizer) -> RoundTrip<'_> {
        let cut = &tokenizer.first_piece;
        let table = byte_of_char_table();
        let text = written(cut, "\u{E9}\u{4E2D}\u{1F600}").unwrap_or_default();
        let is_byte_level = text
            .trim_start_matches(MARKS[1])
            .chars()
            .all(|c| byte_of(&table, c).is_some());
        RoundTrip {
            tokenizer,
            bytes: is_byte_level.then_some(table),
            parts_words: space_in(cut).is_none() || decoded(cut, &["a", "b"]).is_none_or(|text| text.contains(' ')),
        }
    }

    /// Checks that decoding gives `sentence` again, by the table of tokens' bytes and by the
    /// library.
    fn check(&self, sentence: &str) -> Result<(), String> {
        let tokenizer = self.tokenizer;
        let cut = &tokenizer.first_piece;
        // A text that cannot be encoded is an error of its row later.
        let Ok(text) = written(cut, sentence) else {
            return Ok(());
        };
        let Ok(ids) = encode_with(cut, sentence, false) else {
            return Ok(());
        };
        // Special tokens have no text to compare.
        if ids
            .iter()
            .any(|id| tokenizer.is_special(*id) || tokenizer.unknown == Some(*id))
        {
            return Ok(());
        }
        let expected = self.expected(&text);
        let any_space = self.parts_words || expected.iter().any(|(_, has)| !has);
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| tokenizer.token_bytes(id)).copied().collect();
        let back = tokenizer.decode(&ids);
        if !comes_back(&expected, &bytes, any_space) {
            return Err(format!(
                "texts do not come back from its tokens: {} as {}; vocabulary, pre-tokenizer and decoder are not of one kind: {WHAT_TO_DO}",
                shown(sentence),
                shown(&back)
            ));
        }
        // The table and the library show missing bytes differently, so their texts cannot be
        // compared.
        if back.contains('\u{FFFD}') {
            return Ok(());
        }
        let Ok(whole) = guarded(THIS_TEXT, || tokenizer.full.decode(&ids, true)) else {
            return Ok(());
        };
        let alike = if any_space {
            without_spaces(whole.as_bytes()) == without_spaces(back.as_bytes())
        } else {
            whole.trim_matches(' ') == back.trim_matches(' ')
        };
        if alike {
            Ok(())
        } else {
            Err(format!(
                "its decoder gives different texts for a whole answer and for its single tokens, which is not supported: {} and {}",
                shown(&whole),
                shown(&back)
            ))
        }
    }

    /// The bytes that the tokens of the pre-tokenized `text` should have, each with whether the
    /// vocabulary has its character.
    fn expected(&self, text: &str) -> Vec<(u8, bool)> {
        let model = self.tokenizer.first_piece.get_model();
        let mut expected = Vec::new();
        let mut utf8 = [0; 4];
        for c in text.chars() {
            let has = model.token_to_id(c.encode_utf8(&mut utf8)).is_some();
            match self.bytes.as_ref().and_then(|table| byte_of(table, c)) {
                Some(byte) => expected.push((byte, has)),
                // A mark is a space here, because no sentence contains a mark.
                None if MARKS.contains(&c) => expected.push((b' ', has)),
                None => expected.extend(c.encode_utf8(&mut utf8).bytes().map(|byte| (byte, has))),
            }
        }
        expected
    }
}

/// Whether `bytes` are the expected bytes. Characters that the vocabulary lacks may be missing,
/// since a model without an unknown token drops them.
fn comes_back(expected: &[(u8, bool)], bytes: &[u8], any_space: bool) -> bool {
    if !any_space {
        let expected: Vec<u8> = expected.iter().map(|(byte, _)| *byte).collect();
        return trimmed(&expected) == trimmed(bytes);
    }
    let mut left = without_spaces(bytes).into_iter().peekable();
    for (byte, has) in expected.iter().filter(|(byte, _)| !byte.is_ascii_whitespace()) {
        if left.next_if_eq(byte).is_none() && *has {
            return false;
        }
    }
    left.next().is_none()
}

/// Strips the spaces that a tokenizer puts before a text, or a decoder after it.
fn trimmed(mut bytes: &[u8]) -> &[u8] {
    while let [b' ', rest @ ..] | [rest @ .., b' '] = bytes {
        bytes = rest;
    }
    bytes
}

fn without_spaces(bytes: &[u8]) -> Vec<u8> {
    bytes
        .iter()
        .copied()
        .filter(|byte| !byte.is_ascii_whitespace())
        .collect()
}

fn byte_of(table: &[Option<u8>], c: char) -> Option<u8> {
    table.get(c as usize).copied().flatten()
}

/// A text for an error message, escaped onto one line and cut.
fn shown(text: &str) -> String {
    match text.chars().nth(SHOWN_CHARS) {
        None => format!("{text:?}"),
        Some(_) => format!("{:?}…", text.chars().take(SHOWN_CHARS).collect::<String>()),
    }
}

#[cfg(test)]
mod tests;
