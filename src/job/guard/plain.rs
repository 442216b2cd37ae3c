//! Reference implementation of the guard, which compares every token at every position of a text.

use proptest::prelude::*;
use serde_json::json;

use super::{AddedToken, CharMarks, Guard, Marks, Piece, fold, is_marked_inside, is_single_word, push_text};
use crate::tokenizer::{Tokenizer, byte_char};

const MARKS: Marks = Marks {
    inside: '\u{FDD0}',
    front: '\u{FDD1}',
};

/// Whether `text` after folding, without its first `skip` characters, begins with `token`, or is a
/// prefix of `token`.
fn begins_with_or_within(text: &str, skip: usize, token: &[char]) -> bool {
    let mut folded = text.chars().flat_map(fold).skip(skip);
    let mut token = token.iter();
    loop {
        match (token.next(), folded.next()) {
            (Some(wanted), Some(c)) if *wanted != c => return false,
            (Some(_), Some(_)) => {}
            (None, _) | (_, None) => return true,
        }
    }
}

fn marked_chars(guard: &Guard, text: &str) -> Vec<(usize, char, CharMarks)> {
    let trimmed = text.trim_end().len();
    let control = guard.added.iter().filter(|(_, is_control)| *is_control);
    let control: Vec<(Vec<char>, bool)> = control
        .map(|(token, _)| (token.content.chars().flat_map(fold).collect(), is_marked_inside(token)))
        .collect();
    let char_marks = |(at, c): (usize, char)| {
        let trimmed_text = text.get(at..trimmed).filter(|trimmed_text| !trimmed_text.is_empty());
        let mut char_marks = CharMarks::default();
        for skip in 0..fold(c).count() {
            let first = fold(c).nth(skip);
            for (folded, inside) in control.iter().filter(|(folded, _)| folded.first().copied() == first) {
                let found = (guard.marks_first_chars && *inside)
                    || begins_with_or_within(&text[at..], skip, folded)
                    || trimmed_text.is_some_and(|trimmed_text| begins_with_or_within(trimmed_text, skip, folded));
                char_marks.inside |= found && *inside;
                char_marks.front |= found && !inside;
            }
        }
        (char_marks != CharMarks::default()).then_some((at, c, char_marks))
    };
    text.char_indices().filter_map(char_marks).collect()
}

/// The length of `token` at the beginning of `text`; `marks`, if given, may stand between its
/// characters.
fn length_at(text: &str, token: &str, marks: Option<Marks>) -> Option<usize> {
    let Some(marks) = marks else {
        return text.starts_with(token).then_some(token.len());
    };
    let mut wanted = token.chars().peekable();
    for (at, c) in text.char_indices() {
        match wanted.peek() {
            None => return Some(at),
            Some(next) if *next == c => drop(wanted.next()),
            Some(_) if at > 0 && (c == marks.inside || c == marks.front) => {}
            Some(_) => return None,
        }
    }
    wanted.peek().is_none().then_some(text.len())
}

fn split(guard: &Guard, text: &str, marks: Marks) -> Vec<Piece> {
    let mut added: Vec<&(AddedToken, bool)> = guard.added.iter().collect();
    added.sort_by_key(|(token, _)| std::cmp::Reverse(token.content.len()));
    let mut pieces = Vec::new();
    let (mut from, mut at) = (0, 0);
    while at < text.len() {
        let is_marked_in_front = text[..at].ends_with(marks.front);
        let found = added.iter().find_map(|(token, is_control)| {
            if is_marked_in_front && *is_control && !is_marked_inside(token) {
                return None;
            }
            let end = at + length_at(&text[at..], &token.content, (!is_control).then_some(marks))?;
            (!token.single_word || is_single_word(text, at, end)).then_some((token, end))
        });
        let Some((token, mut end)) = found else {
            at += text[at..].chars().next().map_or(1, char::len_utf8);
            continue;
        };
        let mut start = at;
        if token.lstrip {
            start = from + text[from..at].trim_end().len();
        }
        if token.rstrip {
            end += text[end..].len() - text[end..].trim_start().len();
        }
        push_text(&mut pieces, &text[from..start], marks);
        pieces.push(Piece::Token(token.id));
        (from, at) = (end, end);
    }
    push_text(&mut pieces, &text[from..], marks);
    pieces
}

/// A tokenizer of bytes and these added tokens. The flags of a token are, in this order: special,
/// single word, lstrip, rstrip.
fn tokenizer(tokens: &[(String, [bool; 4])]) -> Tokenizer {
    let vocab: serde_json::Map<_, _> = (0..=255u8)
        .map(|byte| (byte_char(byte).to_string(), json!(byte)))
        .collect();
    let mut added: Vec<serde_json::Value> = Vec::new();
    for (content, [special, single_word, lstrip, rstrip]) in tokens {
        let known = vocab.contains_key(content) || added.iter().any(|token| token["content"] == content.as_str());
        if !known {
            added.push(
                json!({"id": 256 + added.len(), "content": content, "special": special, "normalized": false,
                              "single_word": single_word, "lstrip": lstrip, "rstrip": rstrip}),
            );
        }
    }
    let json = json!({
        "version": "1.0", "added_tokens": added,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    });
    Tokenizer::from_json(&json.to_string(), None).unwrap()
}

proptest! {
    #[test]
    fn trie_and_pairwise_comparison_agree(
        tokens in proptest::collection::vec(("[<|/>aSs\u{DF}\u{17F}\u{130}\u{20AC} ]{1,4}", any::<[bool; 4]>()), 1..9),
        texts in proptest::collection::vec("[<|/>aSs\u{DF}\u{17F}\u{130}\u{20AC}i \n]{0,9}", 1..5),
        marks_first_chars in any::<bool>(),
    ) {
        let tokenizer = tokenizer(&tokens);
        let template: String = tokens.iter().step_by(2).map(|(token, _)| token.as_str()).collect();
        let guard = Guard::new(&tokenizer, &template, marks_first_chars);
        let mut marked = String::new();
        // The tokens' own texts are tested too, whole and without their ends.
        let cut = |text: &str| text.chars().take(2).collect::<String>();
        let own = tokens.iter().flat_map(|(token, _)| [token.clone(), cut(token), format!("{} ", cut(token))]);
        for text in texts.into_iter().chain(own) {
            prop_assert_eq!(guard.marked_chars(&text).collect::<Vec<_>>(), marked_chars(&guard, &text), "{:?}", &text);
            prop_assert_eq!(split(&guard, &text, MARKS), guard.split(&text, MARKS), "{:?}", &text);
            marked.push_str(&guard.mark_text(&text, MARKS));
        }
        prop_assert_eq!(split(&guard, &marked, MARKS), guard.split(&marked, MARKS), "{:?}", marked);
    }
}
