//! Checks that a tokenizer fits its own vocabulary.
//!
//! A tokenizer whose pre-tokenizer or decoder is of another kind than its vocabulary loads and runs
//! without an error. But it cuts prompts into pieces that the model has never seen together, and
//! its answers are unreadable.
//!
//! There are two checks. First, the vocabulary, the pre-tokenized text and the decoder must
//! represent a space by the same character. Second, a few sentences must be equal after encoding
//! and decoding, except for changes that a normalizer makes, white space that only separates words,
//! unknown tokens, and characters that the vocabulary lacks.
//!
//! Both checks concern the vocabulary's own pieces, so they use the tokenizer without added tokens
//! (`Tokenizer::first_piece`). The second check also compares the decoded sentences with those of
//! the library's decoder (`Tokenizer::full`).
//!
//! See docs/decisions/084-a-tokenizer-is-checked-when-it-is-loaded.md.

use tokenizers::{Decoder, Model, Normalizer, PreTokenizer};
use tokenizers::{NormalizedString, OffsetReferential, OffsetType, PreTokenizedString};

use super::bytes::byte_of_char_table;
use super::guarded::{THIS_TEXT, guarded};
use super::shared::HfTokenizer;
use super::{Tokenizer, encode_with};

/// The characters that stand for a space in byte-level and in SentencePiece vocabularies.
const SPACE_MARKS: [char; 2] = ['Ġ', '▁'];
/// A mark prevails in a vocabulary if at least 1 in this many pieces begins with it. In published
/// vocabularies it is 1 in 2 to 1 in 10. A rarer mark may be a letter: `Ġ` is a letter in Maltese.
const PREVAILING_DIVISOR: usize = 50;
/// A mark prevails only if it is more than this many times as frequent as the other mark.
const PREVAILING_RATIO: usize = 10;
/// Maximum characters of a text in an error message.
const QUOTED_CHARS: usize = 60;

/// Sentences for the round trip. Each is short enough to be quoted in an error. A sentence with an
/// unknown token is skipped, so each tests one aspect: a skipped sentence leaves only that aspect
/// untested.
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

const REMEDY: &str = "some releases of transformers 5 wrote such files; take the `tokenizer.json` of the original checkpoint, or save it again \
                          with another release";

/// Refuses a tokenizer that does not fit its vocabulary.
pub(super) fn check(tokenizer: &Tokenizer) -> Result<(), String> {
    check_spaces(tokenizer)?;
    let round_trip = RoundTrip::new(tokenizer);
    SENTENCES.iter().try_for_each(|sentence| round_trip.check(sentence))
}

/// Checks that vocabulary, pre-tokenized text and decoder represent a space by the same character.
fn check_spaces(tokenizer: &Tokenizer) -> Result<(), String> {
    let without_added = &tokenizer.first_piece;
    let Some((mark, prevails)) = vocabulary_mark(tokenizer) else {
        return Ok(());
    };
    let other = if mark == SPACE_MARKS[0] {
        SPACE_MARKS[1]
    } else {
        SPACE_MARKS[0]
    };
    let space = pre_tokenized_space(without_added);
    let decodes_to_space = |mark: char| {
        let text = decode_pieces(without_added, &["a", &format!("{mark}b")]);
        text.is_some_and(|text| text.contains(' ') && !text.contains(mark))
    };
    let fits = if prevails {
        space == Some(mark) && decodes_to_space(mark)
    } else {
        // The vocabulary's mark may be a letter, so only a text with the other mark is refused.
        space != Some(other)
    };
    if fits {
        return Ok(());
    }
    let text = match space {
        Some(' ') => "its normalizer and pre-tokenizer leave it a plain space".to_string(),
        Some(mark) => format!("its normalizer and pre-tokenizer as {}", describe_mark(mark)),
        None => "its normalizer and pre-tokenizer as neither mark".into(),
    };
    let decoder = match [mark, other].into_iter().find(|mark| decodes_to_space(*mark)) {
        _ if without_added.get_decoder().is_none() => "it has no decoder".to_string(),
        Some(mark) => format!("its decoder as {}", describe_mark(mark)),
        None => "its decoder as neither mark".into(),
    };
    Err(format!(
        "its vocabulary writes a space as {}, {text}, {decoder}: {REMEDY}",
        describe_mark(mark)
    ))
}

fn describe_mark(mark: char) -> &'static str {
    match mark {
        'Ġ' => "`Ġ` (byte-level)",
        _ => "`▁` (SentencePiece)",
    }
}

/// The space mark with which more of the vocabulary's own pieces begin, and whether the mark
/// prevails. A mark that does not prevail is returned only if the other mark is absent.
fn vocabulary_mark(tokenizer: &Tokenizer) -> Option<(char, bool)> {
    let vocabulary = tokenizer.first_piece.get_vocab(false);
    let is_added = |id: &u32| tokenizer.added.binary_search_by_key(id, |token| token.id).is_ok();
    let (mut pieces, mut marked) = (0, [0, 0]);
    for (piece, _) in vocabulary.iter().filter(|(_, id)| !is_added(id)) {
        pieces += 1;
        for (count, mark) in marked.iter_mut().zip(SPACE_MARKS) {
            *count += usize::from(piece.starts_with(mark));
        }
    }
    let [byte_level, sentence_piece] = marked;
    let (mark, more, fewer) = if byte_level > sentence_piece {
        (SPACE_MARKS[0], byte_level, sentence_piece)
    } else {
        (SPACE_MARKS[1], sentence_piece, byte_level)
    };
    let prevails = more * PREVAILING_DIVISOR >= pieces && more > fewer * PREVAILING_RATIO;
    (more > 0 && (prevails || fewer == 0)).then_some((mark, prevails))
}

/// The character that stands for a space in pre-tokenized text. `None` if it is unknown or missing.
fn pre_tokenized_space(tokenizer: &HfTokenizer) -> Option<char> {
    let spaces = [SPACE_MARKS[0], SPACE_MARKS[1], ' '];
    let text = pre_tokenize(tokenizer, "a b").ok()?;
    // A mark at either end is a prefix or suffix.
    let text = text.trim_matches(spaces);
    spaces.into_iter().find(|space| text.contains(*space))
}

/// The text that the model cuts into pieces, after normalizer and pre-tokenizer.
fn pre_tokenize(tokenizer: &HfTokenizer, text: &str) -> Result<String, String> {
    guarded(THIS_TEXT, || {
        let mut normalized = NormalizedString::from(text);
        if let Some(normalizer) = tokenizer.get_normalizer() {
            normalizer.normalize(&mut normalized)?;
        }
        let mut pieces = PreTokenizedString::from(normalized);
        if let Some(pre) = tokenizer.get_pre_tokenizer() {
            pre.pre_tokenize(&mut pieces)?;
        }
        let splits = pieces.get_splits(OffsetReferential::Normalized, OffsetType::Byte);
        Ok(splits.into_iter().map(|(text, ..)| text).collect())
    })
}

/// The text that the library decodes from these pieces. `None` if the library fails.
fn decode_pieces(tokenizer: &HfTokenizer, pieces: &[&str]) -> Option<String> {
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
    /// Whether the tokens do not contain the white space between words, so that decoding may change
    /// it.
    drops_white_space: bool,
}

impl RoundTrip<'_> {
    fn new(tokenizer: &Tokenizer) -> RoundTrip<'_> {
        let without_added = &tokenizer.first_piece;
        let table = byte_of_char_table();
        let text = pre_tokenize(without_added, "\u{E9}\u{4E2D}\u{1F600}").unwrap_or_default();
        let is_byte_level = text
            .trim_start_matches(SPACE_MARKS[1])
            .chars()
            .all(|c| byte_of(&table, c).is_some());
        RoundTrip {
            tokenizer,
            bytes: is_byte_level.then_some(table),
            drops_white_space: pre_tokenized_space(without_added).is_none()
                || decode_pieces(without_added, &["a", "b"]).is_none_or(|text| text.contains(' ')),
        }
    }

    /// Checks that encoding and decoding preserve `sentence`, both with the table of tokens' bytes
    /// and with the library's decoder.
    fn check(&self, sentence: &str) -> Result<(), String> {
        let tokenizer = self.tokenizer;
        let without_added = &tokenizer.first_piece;
        // Later, a text that cannot be encoded fails only its row.
        let Ok(text) = pre_tokenize(without_added, sentence) else {
            return Ok(());
        };
        let Ok(ids) = encode_with(without_added, sentence, false) else {
            return Ok(());
        };
        // Special tokens have no text to compare.
        if ids
            .iter()
            .any(|id| tokenizer.is_special(*id) || tokenizer.unknown_id == Some(*id))
        {
            return Ok(());
        }
        let expected = self.expected_bytes(&text);
        let ignores_space = self.drops_white_space || expected.iter().any(|(_, is_known)| !is_known);
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| tokenizer.token_bytes(id)).copied().collect();
        let decoded = tokenizer.decode(&ids);
        if !matches_expected(&expected, &bytes, ignores_space) {
            return Err(format!(
                "encoding and decoding change texts: {} becomes {}; vocabulary, pre-tokenizer and decoder are not of one kind: {REMEDY}",
                quoted(sentence),
                quoted(&decoded)
            ));
        }
        // The table and the library show missing bytes differently, so their texts cannot be
        // compared.
        if decoded.contains('\u{FFFD}') {
            return Ok(());
        }
        let Ok(decoded_by_library) = guarded(THIS_TEXT, || tokenizer.full.decode(&ids, true)) else {
            return Ok(());
        };
        let is_equal = if ignores_space {
            without_spaces(decoded_by_library.as_bytes()) == without_spaces(decoded.as_bytes())
        } else {
            decoded_by_library.trim_matches(' ') == decoded.trim_matches(' ')
        };
        if is_equal {
            Ok(())
        } else {
            Err(format!(
                "its decoder gives different texts for a whole answer and for its single tokens, which is not supported: {} and {}",
                quoted(&decoded_by_library),
                quoted(&decoded)
            ))
        }
    }

    /// The expected bytes of the tokens of the pre-tokenized `text`. Each comes with whether the
    /// vocabulary has its character.
    fn expected_bytes(&self, text: &str) -> Vec<(u8, bool)> {
        let model = self.tokenizer.first_piece.get_model();
        let mut expected = Vec::new();
        let mut utf8 = [0; 4];
        for c in text.chars() {
            let is_known = model.token_to_id(c.encode_utf8(&mut utf8)).is_some();
            match self.bytes.as_ref().and_then(|table| byte_of(table, c)) {
                Some(byte) => expected.push((byte, is_known)),
                // Every mark stands for a space, because no sentence contains a mark.
                None if SPACE_MARKS.contains(&c) => expected.push((b' ', is_known)),
                None => expected.extend(c.encode_utf8(&mut utf8).bytes().map(|byte| (byte, is_known))),
            }
        }
        expected
    }
}

/// Whether `bytes` are the expected bytes. Characters that the vocabulary lacks may be missing,
/// since a model without an unknown token drops them.
fn matches_expected(expected: &[(u8, bool)], bytes: &[u8], ignores_space: bool) -> bool {
    if !ignores_space {
        let expected: Vec<u8> = expected.iter().map(|(byte, _)| *byte).collect();
        return trim_spaces(&expected) == trim_spaces(bytes);
    }
    let mut remaining = without_spaces(bytes).into_iter().peekable();
    for (byte, is_known) in expected.iter().filter(|(byte, _)| !byte.is_ascii_whitespace()) {
        if remaining.next_if_eq(byte).is_none() && *is_known {
            return false;
        }
    }
    remaining.next().is_none()
}

/// Strips spaces at both ends: a tokenizer may put one before a text, and a decoder one after it.
fn trim_spaces(mut bytes: &[u8]) -> &[u8] {
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

/// A text for an error message, escaped onto one line and shortened.
fn quoted(text: &str) -> String {
    match text.chars().nth(QUOTED_CHARS) {
        None => format!("{text:?}"),
        Some(_) => format!("{:?}…", text.chars().take(QUOTED_CHARS).collect::<String>()),
    }
}

#[cfg(test)]
mod tests;
