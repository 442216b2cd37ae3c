//! Text of control tokens inside a row's data never becomes a control token.
//!
//! The common case costs one scan: where no data could be part of a control token's text, the rendered prompt is
//! encoded as a whole, exactly as transformers does. Else each place where data could begin such a text is marked, by
//! a noncharacter put before it, and the prompt is rendered with the marked data. The rendered prompt is then cut at
//! added tokens by hand, those right behind a mark left alone, the marks are taken out, and the stretches between are
//! encoded without recognising added tokens.

use std::borrow::Cow;

use serde_json::{Map, Value};

use crate::model::tokenizer::{Added, Tokenizer};

/// Noncharacters that may serve as mark: Unicode keeps them for a program's own use.
const MARKS: std::ops::RangeInclusive<char> = '\u{FDD0}'..='\u{FDEF}';

/// Could this be a mark?
pub(super) fn is_mark(c: char) -> bool {
    MARKS.contains(&c)
}

/// Finds control tokens in texts.
pub(super) struct Guard {
    /// Texts of control tokens by their first byte.
    control: Vec<Vec<String>>,
    longest: usize,
    /// Some control tokens match text after normalization, which may differ from the data's.
    normalized: bool,
    /// All added tokens, longest first, and whether each is a control token.
    added: Vec<(Added, bool)>,
}

/// A stretch of a prompt.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Piece {
    Token(u32),
    /// Text, and whether it stands at the very beginning.
    Text(String, bool),
}

impl Guard {
    /// Control tokens are the special ones, and any other added token that `template` (the chat template's source)
    /// mentions: `<tool_call>` or `</think>` are such.
    pub(super) fn new(tokenizer: &Tokenizer, template: &str) -> Guard {
        let mut guard = Guard {
            control: vec![Vec::new(); 256],
            longest: 0,
            normalized: false,
            added: Vec::new(),
        };
        for token in tokenizer.added_tokens() {
            let mentioned = token.content.trim().len() >= 3 && template.contains(&token.content);
            let control = token.special || mentioned;
            if let (true, Some(first)) = (control, token.content.bytes().next()) {
                guard.control[first as usize].push(token.content.clone());
                guard.longest = guard.longest.max(token.content.len());
                guard.normalized |= token.normalized;
            }
            guard.added.push((token.clone(), control));
        }
        guard
            .added
            .sort_by_key(|(token, _)| std::cmp::Reverse(token.content.len()));
        guard
    }

    /// Could `value`, put into a prompt, become part of a control token?
    pub(super) fn suspects(&self, value: &Value, tokenizer: &Tokenizer) -> bool {
        match value {
            Value::String(text) => {
                self.suspects_text(text) || (self.normalized && self.suspects_text(&tokenizer.normalize(text)))
            }
            Value::Array(items) => items.iter().any(|item| self.suspects(item, tokenizer)),
            Value::Object(map) => map
                .iter()
                .any(|(key, item)| self.suspects_text(key) || self.suspects(item, tokenizer)),
            _ => false,
        }
    }

    /// Like `suspects`, for a text as it stands.
    pub(super) fn suspects_text(&self, text: &str) -> bool {
        self.places(text).next().is_some()
    }

    /// A copy of `value` with marks; object keys inside it are marked as well.
    pub(super) fn mark(&self, value: &Value, mark: char) -> Value {
        match value {
            Value::String(text) => Value::String(self.mark_text(text, mark).into_owned()),
            Value::Array(items) => items.iter().map(|item| self.mark(item, mark)).collect(),
            Value::Object(map) => Value::Object(self.mark_map(map, mark)),
            other => other.clone(),
        }
    }

    /// A copy of `map` with marks in keys and values.
    pub(super) fn mark_map(&self, map: &Map<String, Value>, mark: char) -> Map<String, Value> {
        map.iter()
            .map(|(key, item)| (self.mark_text(key, mark).into_owned(), self.mark(item, mark)))
            .collect()
    }

    fn mark_text<'a>(&self, text: &'a str, mark: char) -> Cow<'a, str> {
        let places: Vec<usize> = self.places(text).collect();
        if places.is_empty() {
            return Cow::Borrowed(text);
        }
        let mut out = String::with_capacity(text.len() + 3 * places.len());
        let mut from = 0;
        for at in places {
            out.push_str(&text[from..at]);
            out.push(mark);
            from = at;
        }
        out.push_str(&text[from..]);
        Cow::Owned(out)
    }

    /// Where a control token's text begins, or could begin, were more text to follow (white space at the end may be
    /// trimmed by a template).
    fn places<'a>(&'a self, text: &'a str) -> impl Iterator<Item = usize> + 'a {
        let trimmed = text.trim_end();
        text.bytes()
            .enumerate()
            .filter(|&(_, byte)| !self.control[byte as usize].is_empty())
            .filter_map(move |(at, byte)| {
                let rest = text.get(at..)?;
                let trimmed = trimmed.get(at..).filter(|t| !t.is_empty());
                let begins = |token: &String| {
                    rest.starts_with(token.as_str())
                        || (rest.len() < token.len() && token.starts_with(rest))
                        || trimmed.is_some_and(|t| t.len() < token.len() && token.starts_with(t))
                };
                self.control[byte as usize].iter().any(begins).then_some(at)
            })
    }

    /// Cuts a prompt rendered with marked data at its added tokens, and takes the marks out.
    pub(super) fn split(&self, text: &str, mark: char) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let mut from = 0;
        let mut at = 0;
        while at < text.len() {
            let Some((token, start, end)) = self.token_at(text, from, at, mark) else {
                at += text[at..].chars().next().map_or(1, char::len_utf8);
                continue;
            };
            push_text(&mut pieces, &text[from..start], mark);
            pieces.push(Piece::Token(token));
            from = end;
            at = end;
        }
        push_text(&mut pieces, &text[from..], mark);
        pieces
    }

    /// The longest added token at `at`, with the stretch that it takes, white space it swallows included.
    fn token_at(&self, text: &str, from: usize, at: usize, mark: char) -> Option<(u32, usize, usize)> {
        let rest = &text[at..];
        let marked = text[..at].ends_with(mark);
        let (token, _) = self.added.iter().find(|(token, control)| {
            let refused = token.content.is_empty() || (marked && *control);
            !refused
                && rest.starts_with(&token.content)
                && (!token.single_word || stands_alone(text, at, at + token.content.len()))
        })?;
        let mut start = at;
        let mut end = at + token.content.len();
        if token.lstrip {
            start = from + text[from..at].trim_end().len();
        }
        if token.rstrip {
            end += text[end..].len() - text[end..].trim_start().len();
        }
        Some((token.id, start, end))
    }
}

fn stands_alone(text: &str, start: usize, end: usize) -> bool {
    let word = |c: char| c.is_alphanumeric() || c == '_';
    !text[..start].chars().next_back().is_some_and(word) && !text[end..].chars().next().is_some_and(word)
}

fn push_text(pieces: &mut Vec<Piece>, text: &str, mark: char) {
    let text = text.replace(mark, "");
    if !text.is_empty() {
        pieces.push(Piece::Text(text, pieces.is_empty()));
    }
}

/// A mark that occurs nowhere in the row.
pub(super) fn free_mark(fields: &Map<String, Value>) -> Option<char> {
    fn holds(value: &Value, mark: char) -> bool {
        match value {
            Value::String(text) => text.contains(mark),
            Value::Array(items) => items.iter().any(|item| holds(item, mark)),
            Value::Object(map) => map.iter().any(|(key, item)| key.contains(mark) || holds(item, mark)),
            _ => false,
        }
    }
    MARKS.clone().find(|mark| {
        !fields
            .iter()
            .any(|(key, item)| key.contains(*mark) || holds(item, *mark))
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    const MARK: char = '\u{FDD0}';

    fn tokenizer() -> Tokenizer {
        Tokenizer::from_words(&["hello"], &["<|im_start|>", "<|im_end|>", "</s>"]).unwrap()
    }

    fn guard() -> Guard {
        Guard::new(&tokenizer(), "")
    }

    #[test]
    fn suspicious_data_is_found() {
        let (guard, tokenizer) = (guard(), tokenizer());
        for text in ["<|im_end|>", "x</s>y", "a <", "a <|im_", "</s> ", "<|im_sta  \n"] {
            assert!(guard.suspects(&json!({"a": ["", text]}), &tokenizer), "{text}");
        }
        assert!(guard.suspects(&json!({"<|im_end|>": 1}), &tokenizer));
        for text in ["", "a < b", "im_end|>", "<|im_ends>", "<s>", "x<<y"] {
            assert!(!guard.suspects(&json!(text), &tokenizer), "{text}");
        }
    }

    #[test]
    fn marked_text_yields_no_token() {
        let guard = guard();
        let end = tokenizer().id_of("<|im_end|>").unwrap();
        let data = guard.mark_text("a<|im_end|>b", MARK);
        assert_eq!(data, format!("a{MARK}<|im_end|>b"));
        let prompt = format!("{data}<|im_end|>");
        let text = Piece::Text("a<|im_end|>b".into(), true);
        assert_eq!(guard.split(&prompt, MARK), [text, Piece::Token(end)]);
        // Two columns that form a control token only together.
        let (left, right) = (guard.mark_text("<|im_", MARK), guard.mark_text("end|>", MARK));
        assert_eq!(
            guard.split(&format!("{left}{right}"), MARK),
            [Piece::Text("<|im_end|>".into(), true)]
        );
    }

    proptest! {
        #[test]
        fn no_data_reaches_a_control_token(
            parts in proptest::collection::vec("[<|/>a-z_ s]{0,6}|<\\|im_end\\|>|<\\|im_|end\\|>|</s>", 0..8)
        ) {
            let guard = guard();
            let prompt: String = parts.iter().map(|part| guard.mark_text(part, MARK).into_owned()).collect();
            let pieces = guard.split(&prompt, MARK);
            let whole = Piece::Text(parts.concat(), true);
            prop_assert!(pieces == [whole] || parts.concat().is_empty());
        }
    }
}
