//! The guard's reference implementation, which compares each position of a text with each token.

use proptest::prelude::*;
use serde_json::json;

use super::{Added, Guard, Marks, Piece, Place, fold, marked_inside, push_text, stands_alone};
use crate::tokenizer::{Tokenizer, byte_char};

const MARKS: Marks = Marks {
    inside: '\u{FDD0}',
    front: '\u{FDD1}',
};

/// Whether `text` (folded, without its first `skip` characters) begins with `token`, or is a prefix
/// of it.
fn begins(text: &str, skip: usize, token: &[char]) -> bool {
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

fn places(guard: &Guard, text: &str) -> Vec<(usize, char, Place)> {
    let trimmed = text.trim_end().len();
    let control = guard.added.iter().filter(|(_, control)| *control);
    let control: Vec<(Vec<char>, bool)> = control
        .map(|(token, _)| (token.content.chars().flat_map(fold).collect(), marked_inside(token)))
        .collect();
    let place = |(at, c): (usize, char)| {
        let short = text.get(at..trimmed).filter(|short| !short.is_empty());
        let mut place = Place::default();
        for skip in 0..fold(c).count() {
            let first = fold(c).nth(skip);
            for (folded, inside) in control.iter().filter(|(folded, _)| folded.first().copied() == first) {
                let found = (guard.eager && *inside)
                    || begins(&text[at..], skip, folded)
                    || short.is_some_and(|short| begins(short, skip, folded));
                place.inside |= found && *inside;
                place.front |= found && !inside;
            }
        }
        (place != Place::default()).then_some((at, c, place))
    };
    text.char_indices().filter_map(place).collect()
}

/// The length of `token` at the beginning of `text`; marks, if given, are allowed between its
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
    let mut added: Vec<&(Added, bool)> = guard.added.iter().collect();
    added.sort_by_key(|(token, _)| std::cmp::Reverse(token.content.len()));
    let mut pieces = Vec::new();
    let (mut from, mut at) = (0, 0);
    while at < text.len() {
        let marked = text[..at].ends_with(marks.front);
        let found = added.iter().find_map(|(token, control)| {
            if marked && *control && !marked_inside(token) {
                return None;
            }
            let end = at + length_at(&text[at..], &token.content, (!control).then_some(marks))?;
            (!token.single_word || stands_alone(text, at, end)).then_some((token, end))
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

/// A tokenizer of bytes and these tokens; the flags of each token are special, single word, lstrip
/// and rstrip.
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
    fn a_walk_finds_what_holding_each_place_against_each_token_does(
        tokens in proptest::collection::vec(("[<|/>aSs\u{DF}\u{17F}\u{130}\u{20AC} ]{1,4}", any::<[bool; 4]>()), 1..9),
        texts in proptest::collection::vec("[<|/>aSs\u{DF}\u{17F}\u{130}\u{20AC}i \n]{0,9}", 1..5),
        eager in any::<bool>(),
    ) {
        let tokenizer = tokenizer(&tokens);
        let template: String = tokens.iter().step_by(2).map(|(token, _)| token.as_str()).collect();
        let guard = Guard::new(&tokenizer, &template, eager);
        let mut marked = String::new();
        // The tokens' own texts are tested too, whole and without their ends.
        let cut = |text: &str| text.chars().take(2).collect::<String>();
        let own = tokens.iter().flat_map(|(token, _)| [token.clone(), cut(token), format!("{} ", cut(token))]);
        for text in texts.into_iter().chain(own) {
            prop_assert_eq!(guard.places(&text).collect::<Vec<_>>(), places(&guard, &text), "{:?}", &text);
            prop_assert_eq!(split(&guard, &text, MARKS), guard.split(&text, MARKS), "{:?}", &text);
            marked.push_str(&guard.mark_text(&text, MARKS));
        }
        prop_assert_eq!(split(&guard, &marked, MARKS), guard.split(&marked, MARKS), "{:?}", marked);
    }
}
