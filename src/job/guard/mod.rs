//! Prevents a control token's text in a row's data from becoming a control token.
//!
//! The common case costs one scan: if no data could be part of a control token's text, the rendered
//! prompt is encoded as a whole, exactly as in transformers. Otherwise each position where data
//! could begin such a text, in any case, is marked: a noncharacter is inserted after the first
//! character, inside the text. (Two kinds of tokens are marked in front by another noncharacter
//! instead: tokens of one character, and non-special tokens like `</think>` that the chat template
//! knows and may search for in the data.) The prompt is rendered with the marked data and split at
//! its added tokens, which marked texts do not match. Then the marks are removed, and the text
//! between the tokens is encoded without recognising added tokens.
//!
//! A job's templates that split texts or remove parts of them (`replace`, slices, `split`, …) can
//! make a special token's text out of data that does not contain it. For those templates, every
//! first character of a special token is marked.
//!
//! Two cases are not covered: templates that pick single characters and thereby drop a mark, and
//! templates that write the beginning of a control token themselves and take its end from the data.

use std::borrow::Cow;

use serde_json::{Map, Value};

use crate::tokenizer::trie::{ROOT, Trie};
use crate::tokenizer::{Added, Tokenizer};

/// Noncharacters used as marks: Unicode reserves them for internal use.
const MARKS: std::ops::RangeInclusive<char> = '\u{FDD0}'..='\u{FDEF}';

/// Whether `c` may be a mark.
pub(super) fn is_mark(c: char) -> bool {
    MARKS.contains(&c)
}

/// The marks of one row.
#[derive(Debug, Clone, Copy)]
pub(super) struct Marks {
    /// Inserted behind the first character of a token's text.
    inside: char,
    /// Inserted in front of a token's text.
    front: char,
}

impl Marks {
    /// Two marks that do not occur in the row.
    pub(super) fn free(fields: &Map<String, Value>) -> Option<Marks> {
        fn holds(value: &Value, mark: char) -> bool {
            match value {
                Value::String(text) => text.contains(mark),
                Value::Array(items) => items.iter().any(|item| holds(item, mark)),
                Value::Object(map) => map.iter().any(|(key, item)| key.contains(mark) || holds(item, mark)),
                _ => false,
            }
        }
        let used = |mark: char| fields.iter().any(|(key, item)| key.contains(mark) || holds(item, mark));
        let mut free = MARKS.clone().filter(|mark| !used(*mark));
        let inside = free.next()?;
        let front = free.next()?;
        Some(Marks { inside, front })
    }

    /// `text` without marks.
    pub(super) fn strip(self, text: &str) -> String {
        text.replace([self.inside, self.front], "")
    }
}

/// Control tokens at a trie node: those that end at the node, and those that pass through it.
#[derive(Default)]
struct Met {
    ends: Place,
    passes: Place,
}

/// Whether this token's text can be marked inside.
fn marked_inside(token: &Added) -> bool {
    token.special && token.content.chars().nth(1).is_some()
}

/// Finds control tokens' texts in data.
pub(super) struct Guard {
    /// The control tokens' texts (see [`fold`]).
    control: Trie<Met>,
    /// Whether a control token begins with this ASCII character after folding; the second field:
    /// with any other character.
    begins: [bool; 128],
    begins_beyond_ascii: bool,
    /// Templates split texts, so the first character alone is marked.
    eager: bool,
    /// Whether some control tokens match the normalized text, which may differ from the data.
    normalized: bool,
    /// All added tokens, and whether each is a control token.
    added: Vec<(Added, bool)>,
    /// Indices into `added`, by the tokens' texts.
    texts: Trie<Vec<u32>>,
}

/// Which marks a character gets.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Place {
    inside: bool,
    front: bool,
}

impl Place {
    fn add(&mut self, other: Place) {
        self.inside |= other.inside;
        self.front |= other.front;
    }
}

/// A piece of a prompt.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Piece {
    Token(u32),
    /// Text, and whether it is at the very beginning of the prompt.
    Text(String, bool),
}

impl Guard {
    /// Control tokens are the special tokens, and added tokens that `template` (the chat template's
    /// source) mentions, such as `<tool_call>` or `</think>`. `eager`: templates split texts (see
    /// [`takes_apart`]).
    pub(super) fn new(tokenizer: &Tokenizer, template: &str, eager: bool) -> Guard {
        let mut guard = Guard {
            control: Trie::new(),
            begins: [false; 128],
            begins_beyond_ascii: false,
            eager,
            normalized: false,
            added: Vec::new(),
            texts: Trie::new(),
        };
        for (number, token) in (0..).zip(tokenizer.added_tokens()) {
            let mentioned = token.content.trim().len() >= 3 && template.contains(&token.content);
            let control = token.special || mentioned;
            let first = token.content.chars().flat_map(fold).next();
            if let (true, Some(first)) = (control, first) {
                match guard.begins.get_mut(first as usize) {
                    Some(begins) => *begins = true,
                    None => guard.begins_beyond_ascii = true,
                }
                guard.normalized |= token.normalized;
                let inside = marked_inside(token);
                let place = Place { inside, front: !inside };
                guard.control.insert(token.content.chars().flat_map(fold), |met, ends| {
                    met.passes.add(place);
                    if ends {
                        met.ends.add(place);
                    }
                });
            }
            guard.texts.insert(token.content.chars(), |numbers, ends| {
                if ends {
                    numbers.push(number);
                }
            });
            guard.added.push((token.clone(), control));
        }
        guard
    }

    /// Whether `value`, put into a prompt, could become part of a control token.
    pub(super) fn suspects(&self, value: &Value, tokenizer: &Tokenizer) -> bool {
        match value {
            Value::String(text) => {
                let normalized = || tokenizer.normalize(text).map_or(true, |text| self.suspects_text(&text));
                self.suspects_text(text) || (self.normalized && normalized())
            }
            Value::Array(items) => items.iter().any(|item| self.suspects(item, tokenizer)),
            Value::Object(map) => map
                .iter()
                .any(|(key, item)| self.suspects_text(key) || self.suspects(item, tokenizer)),
            _ => false,
        }
    }

    /// Like `suspects`, for a text without normalization.
    pub(super) fn suspects_text(&self, text: &str) -> bool {
        self.places(text).next().is_some()
    }

    /// A copy of `value` with marks, also in nested object keys.
    pub(super) fn mark(&self, value: &Value, marks: Marks) -> Value {
        match value {
            Value::String(text) => Value::String(self.mark_text(text, marks).into_owned()),
            Value::Array(items) => items.iter().map(|item| self.mark(item, marks)).collect(),
            Value::Object(map) => Value::Object(self.mark_map(map, marks)),
            other => other.clone(),
        }
    }

    /// A copy of `map` with marks in keys and values.
    pub(super) fn mark_map(&self, map: &Map<String, Value>, marks: Marks) -> Map<String, Value> {
        map.iter()
            .map(|(key, item)| (self.mark_text(key, marks).into_owned(), self.mark(item, marks)))
            .collect()
    }

    fn mark_text<'a>(&self, text: &'a str, marks: Marks) -> Cow<'a, str> {
        let mut out = String::new();
        let mut from = 0;
        for (at, c, place) in self.places(text) {
            if place.front {
                out.push_str(&text[from..at]);
                out.push(marks.front);
                from = at;
            }
            if place.inside {
                let behind = at + c.len_utf8();
                out.push_str(&text[from..behind]);
                out.push(marks.inside);
                from = behind;
            }
        }
        if from == 0 && out.is_empty() {
            return Cow::Borrowed(text);
        }
        out.push_str(&text[from..]);
        Cow::Owned(out)
    }

    /// The characters to mark: the first of each text that equals a control token in some case, or
    /// would after more text (a template may trim white space at the end).
    fn places<'a>(&'a self, text: &'a str) -> impl Iterator<Item = (usize, char, Place)> + 'a {
        let trimmed = text.trim_end().len();
        text.char_indices().filter_map(move |(at, c)| {
            let may_begin = match self.begins.get(c.to_ascii_lowercase() as usize) {
                Some(begins) => *begins,
                // Folding may produce an ASCII character from another character, or several
                // characters.
                None => {
                    self.begins_beyond_ascii
                        || fold(c).any(|c| self.begins.get(c as usize).is_some_and(|begins| *begins))
                }
            };
            if !may_begin {
                return None;
            }
            let mut place = Place::default();
            // A token may begin inside a character's folded form.
            for skip in 0..fold(c).count() {
                place.add(self.begin_at(&text[at..], trimmed.checked_sub(at), skip));
            }
            (place.inside || place.front).then_some((at, c, place))
        })
    }

    /// The marks for control tokens at the start of `text`, which is folded and loses its first
    /// `skip` characters. Also covers tokens that begin with the whole text, or with the text up to
    /// `trimmed`, where its trailing white space begins.
    fn begin_at(&self, text: &str, trimmed: Option<usize>, skip: usize) -> Place {
        let mut place = Place::default();
        let mut node = ROOT;
        for (at, c) in text.char_indices() {
            if at > 0 && trimmed == Some(at) {
                place.add(self.control.value(node).passes);
            }
            for c in fold(c).skip(if at == 0 { skip } else { 0 }) {
                let Some(next) = self.control.step(node, c) else {
                    return place;
                };
                let met = self.control.value(next);
                place.add(met.ends);
                if self.eager && node == ROOT {
                    place.inside |= met.passes.inside;
                }
                node = next;
            }
        }
        place.add(self.control.value(node).passes);
        place
    }

    /// Splits a prompt rendered with marked data at its added tokens, and removes the marks.
    pub(super) fn split(&self, text: &str, marks: Marks) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let mut from = 0;
        let mut at = 0;
        while at < text.len() {
            let Some((token, start, end)) = self.token_at(text, from, at, marks) else {
                at += text[at..].chars().next().map_or(1, char::len_utf8);
                continue;
            };
            push_text(&mut pieces, &text[from..start], marks);
            pieces.push(Piece::Token(token));
            from = end;
            at = end;
        }
        push_text(&mut pieces, &text[from..], marks);
        pieces
    }

    /// The longest added token at `at`, and its byte range, including white space that the token
    /// absorbs.
    fn token_at(&self, text: &str, from: usize, at: usize, marks: Marks) -> Option<(u32, usize, usize)> {
        let (number, end) = self.longest_at(text, at, marks)?;
        let (token, _) = &self.added[number as usize];
        let mut start = at;
        let mut end = end;
        if token.lstrip {
            start = from + text[from..at].trim_end().len();
        }
        if token.rstrip {
            end += text[end..].len() - text[end..].trim_start().len();
        }
        Some((token.id, start, end))
    }

    /// The number of the longest added token at `at`, and its end. For non-control tokens, marks
    /// between the characters are ignored.
    fn longest_at(&self, text: &str, at: usize, marks: Marks) -> Option<(u32, usize)> {
        let marked = text[..at].ends_with(marks.front);
        let mut longest = None;
        let mut node = ROOT;
        let mut holds_mark = false;
        for (i, c) in text[at..].char_indices() {
            let Some(next) = self.texts.step(node, c) else {
                if i > 0 && (c == marks.inside || c == marks.front) {
                    holds_mark = true;
                    continue;
                }
                break;
            };
            node = next;
            let end = at + i + c.len_utf8();
            let ending = self.texts.value(node).iter().find(|number| {
                let (token, control) = &self.added[**number as usize];
                let hidden = *control && (holds_mark || (marked && !marked_inside(token)));
                !hidden && (!token.single_word || stands_alone(text, at, end))
            });
            longest = ending.map(|number| (*number, end)).or(longest);
        }
        longest
    }
}

/// A character in a form that is equal for all its cases.
fn fold(c: char) -> impl Iterator<Item = char> {
    c.to_lowercase()
        .flat_map(char::to_uppercase)
        .flat_map(char::to_lowercase)
}

/// Whether a template splits texts, so that characters that were not adjacent in the data may
/// become adjacent in the prompt.
pub(super) fn takes_apart(source: &str) -> bool {
    const WORDS: [&str; 17] = [
        "replace",
        "striptags",
        "split",
        "partition",
        "strip(",
        "prefix(",
        "suffix(",
        "join",
        "reverse",
        "format",
        "truncate",
        "select",
        "reject",
        "unique",
        "batch",
        "slice",
        "sort",
    ];
    // A `:` in brackets is a slice.
    let sliced = source.match_indices('[').any(|(at, _)| {
        let inner = source[at + 1..].split([']', '\n']).next().unwrap_or_default();
        inner.contains(':')
    });
    sliced || WORDS.iter().any(|word| source.contains(word))
}

fn stands_alone(text: &str, start: usize, end: usize) -> bool {
    let word = |c: char| c.is_alphanumeric() || c == '_';
    !text[..start].chars().next_back().is_some_and(word) && !text[end..].chars().next().is_some_and(word)
}

fn push_text(pieces: &mut Vec<Piece>, text: &str, marks: Marks) {
    let text = marks.strip(text);
    if !text.is_empty() {
        pieces.push(Piece::Text(text, pieces.is_empty()));
    }
}

#[cfg(test)]
mod plain;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    const MARK: char = '\u{FDD0}';
    const FRONT: char = '\u{FDD1}';
    const MARKS: Marks = Marks {
        inside: MARK,
        front: FRONT,
    };

    fn tokenizer() -> Tokenizer {
        Tokenizer::from_words(&["hello"], &["<|im_start|>", "<|im_end|>", "</s>"]).unwrap()
    }

    fn guard() -> Guard {
        Guard::new(&tokenizer(), "", false)
    }

    #[test]
    fn suspicious_data_is_found() {
        let (guard, tokenizer) = (guard(), tokenizer());
        for text in [
            "<|im_end|>",
            "x</s>y",
            "a <",
            "a <|im_",
            "</s> ",
            "<|im_sta  \n",
            "<|IM_End|>",
            "x</S>y",
            "</\u{17F}>",
        ] {
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
        let data = guard.mark_text("a<|im_end|>b", MARKS);
        assert_eq!(data, format!("a<{MARK}|im_end|>b"));
        let prompt = format!("{data}<|im_end|>");
        let text = Piece::Text("a<|im_end|>b".into(), true);
        assert_eq!(guard.split(&prompt, MARKS), [text, Piece::Token(end)]);
        assert_eq!(guard.mark_text("a<|IM_END|>", MARKS), format!("a<{MARK}|IM_END|>"));
        assert_eq!(guard.mark_text("a<b", MARKS), "a<b");
        let eager = Guard::new(&tokenizer(), "", true);
        assert_eq!(eager.mark_text("a<b", MARKS), format!("a<{MARK}b"));
        // Two columns form a control token only together.
        let (left, right) = (guard.mark_text("<|im_", MARKS), guard.mark_text("end|>", MARKS));
        assert_eq!(
            guard.split(&format!("{left}{right}"), MARKS),
            [Piece::Text("<|im_end|>".into(), true)]
        );
    }

    #[test]
    fn tokens_of_one_character_are_marked_in_front() {
        let tokenizer = Tokenizer::from_words(&[], &["\u{20AC}", "\u{DF}x"]).unwrap();
        let guard = Guard::new(&tokenizer, "", false);
        let data = guard.mark_text("a\u{20AC}b", MARKS);
        assert_eq!(data, format!("a{FRONT}\u{20AC}b"));
        let end = tokenizer.id_of("\u{20AC}").unwrap();
        let text = Piece::Text("a\u{20AC}b".into(), true);
        assert_eq!(
            guard.split(&format!("{data}\u{20AC}"), MARKS),
            [text, Piece::Token(end)]
        );
    }

    #[test]
    fn marks_leave_other_added_tokens_whole() {
        let json = tokenizer_json_with_plain_token();
        let tokenizer = Tokenizer::from_json(&json, None).unwrap();
        let guard = Guard::new(&tokenizer, "", true);
        let plain = tokenizer.id_of("<plain>").unwrap();
        let data = guard.mark_text("<plain>", MARKS);
        assert_eq!(data, format!("<{MARK}plain>"));
        assert_eq!(guard.split(&data, MARKS), [Piece::Token(plain)]);
        // The chat template can still find a token that it knows.
        let mentioned = Guard::new(&tokenizer, "{{ '<plain>' }}", false);
        let data = mentioned.mark_text("<plain>", MARKS);
        assert_eq!(data, format!("{FRONT}<plain>"));
        let text = Piece::Text("<plain>".into(), true);
        assert_eq!(
            mentioned.split(&format!("{data}<plain>"), MARKS),
            [text, Piece::Token(plain)]
        );
        let control = guard.mark_text("<control>", MARKS);
        assert_eq!(guard.split(&control, MARKS), [Piece::Text("<control>".into(), true)]);
    }

    /// A vocabulary of bytes with the special token `<control>` and the non-special token
    /// `<plain>`.
    fn tokenizer_json_with_plain_token() -> String {
        let vocab: Map<String, Value> = (b'!'..=b'~')
            .zip(0..)
            .map(|(b, id)| (char::from(b).to_string(), json!(id)))
            .collect();
        let added = |id: usize, content: &str, special: bool| {
            json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                   "normalized": false, "special": special})
        };
        json!({
            "version": "1.0", "added_tokens": [added(94, "<plain>", false), added(95, "<control>", true)],
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false},
            "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false},
            "model": {"type": "BPE", "vocab": vocab, "merges": []},
        })
        .to_string()
    }

    proptest! {
        #[test]
        fn no_data_reaches_a_control_token(
            parts in proptest::collection::vec("[<|/>a-z_ s]{0,6}|<\\|im_end\\|>|<\\|im_|end\\|>|</s>", 0..8)
        ) {
            let guard = guard();
            let prompt: String = parts.iter().map(|part| guard.mark_text(part, MARKS).into_owned()).collect();
            let pieces = guard.split(&prompt, MARKS);
            let whole = Piece::Text(parts.concat(), true);
            prop_assert!(pieces == [whole] || parts.concat().is_empty());
        }
    }
}
