//! Keeps row data from becoming control tokens if it contains their texts.
//!
//! In the common case, no data could be part of a control token's text. One scan shows this, and the
//! rendered prompt is encoded as a whole, exactly as in transformers.
//!
//! Otherwise, every position is marked where data could begin such a text, whether in upper or lower
//! case: a noncharacter is inserted after the text's first character. (Two kinds of tokens are
//! marked by another noncharacter in front instead: tokens of one character, and non-special tokens
//! like `</think>`, which the chat template may search for in the data.) The prompt is rendered with
//! the marked data and split at its added tokens; texts with marks do not match control tokens. Then
//! the marks are removed, and the text between the tokens is encoded without recognising added
//! tokens.
//!
//! A job's templates may split texts or remove parts of them (`replace`, slices, `split`, …), and so
//! make a special token's text out of data that does not contain it. With such templates, every
//! character that begins some special token is marked, whatever follows it.
//!
//! Two cases are not covered: templates that pick single characters and thereby drop a mark, and
//! templates that write the beginning of a control token themselves and take its end from the data.

use std::borrow::Cow;

use serde_json::{Map, Value};

use crate::tokenizer::trie::{ROOT, Trie};
use crate::tokenizer::{AddedToken, Tokenizer};

/// Noncharacters that serve as marks: Unicode reserves them for internal use.
const MARKS: std::ops::RangeInclusive<char> = '\u{FDD0}'..='\u{FDEF}';

/// Whether `c` may be a mark.
pub(super) fn is_mark(c: char) -> bool {
    MARKS.contains(&c)
}

/// The marks of one row.
#[derive(Debug, Clone, Copy)]
pub(super) struct Marks {
    /// Inserted after the first character of a token's text.
    inside: char,
    /// Inserted in front of a token's text.
    front: char,
}

impl Marks {
    /// Two marks that do not occur in the row; `None` if there are no two.
    pub(super) fn unused(fields: &Map<String, Value>) -> Option<Marks> {
        fn holds(value: &Value, mark: char) -> bool {
            match value {
                Value::String(text) => text.contains(mark),
                Value::Array(items) => items.iter().any(|item| holds(item, mark)),
                Value::Object(map) => map.iter().any(|(key, item)| key.contains(mark) || holds(item, mark)),
                _ => false,
            }
        }
        let is_used = |mark: char| fields.iter().any(|(key, item)| key.contains(mark) || holds(item, mark));
        let mut unused = MARKS.clone().filter(|mark| !is_used(*mark));
        let inside = unused.next()?;
        let front = unused.next()?;
        Some(Marks { inside, front })
    }

    /// `text` without marks.
    pub(super) fn strip(self, text: &str) -> String {
        text.replace([self.inside, self.front], "")
    }
}

/// The marks for control tokens at a trie node: for those whose texts end at the node, and for all
/// whose texts pass through it or end there.
#[derive(Default)]
struct NodeMarks {
    ends: CharMarks,
    passes: CharMarks,
}

/// Whether this control token's text is marked inside; otherwise it is marked in front.
fn is_marked_inside(token: &AddedToken) -> bool {
    token.special && token.content.chars().nth(1).is_some()
}

/// Finds and marks control tokens' texts in data.
pub(super) struct Guard {
    /// The control tokens' texts in the form of [`fold`].
    control_texts: Trie<NodeMarks>,
    /// For each ASCII character, whether the folded text of a control token begins with it.
    first_ascii: [bool; 128],
    /// Whether the folded text of a control token begins with a character beyond ASCII.
    first_beyond_ascii: bool,
    /// Whether every character that begins a special token is marked, whatever follows it.
    marks_first_chars: bool,
    /// Whether a control token is matched in the normalized text, which may differ from the data.
    normalized: bool,
    /// All added tokens, and whether each is a control token.
    added: Vec<(AddedToken, bool)>,
    /// Indices into `added`, by the tokens' texts.
    added_texts: Trie<Vec<u32>>,
}

/// The marks at a character: whether one follows it inside a token's text, and whether one precedes
/// it.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct CharMarks {
    inside: bool,
    front: bool,
}

impl CharMarks {
    fn add(&mut self, other: CharMarks) {
        self.inside |= other.inside;
        self.front |= other.front;
    }
}

/// A piece of a prompt.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Piece {
    /// The id of an added token.
    Token(u32),
    /// Text between added tokens, and whether it begins the prompt.
    Text(String, bool),
}

impl Guard {
    /// Control tokens are the special tokens, and added tokens that `template` (the chat template's
    /// source) mentions, such as `<tool_call>` or `</think>`. `marks_first_chars` is needed if the
    /// job's templates split texts (see [`splits_texts`]).
    pub(super) fn new(tokenizer: &Tokenizer, template: &str, marks_first_chars: bool) -> Guard {
        let mut guard = Guard {
            control_texts: Trie::new(),
            first_ascii: [false; 128],
            first_beyond_ascii: false,
            marks_first_chars,
            normalized: false,
            added: Vec::new(),
            added_texts: Trie::new(),
        };
        for (index, token) in (0..).zip(tokenizer.added_tokens()) {
            let is_mentioned = token.content.trim().len() >= 3 && template.contains(&token.content);
            let is_control = token.special || is_mentioned;
            let first = token.content.chars().flat_map(fold).next();
            if let (true, Some(first)) = (is_control, first) {
                match guard.first_ascii.get_mut(first as usize) {
                    Some(begins) => *begins = true,
                    None => guard.first_beyond_ascii = true,
                }
                guard.normalized |= token.normalized;
                let inside = is_marked_inside(token);
                let char_marks = CharMarks { inside, front: !inside };
                guard
                    .control_texts
                    .insert(token.content.chars().flat_map(fold), |node_marks, ends| {
                        node_marks.passes.add(char_marks);
                        if ends {
                            node_marks.ends.add(char_marks);
                        }
                    });
            }
            guard.added_texts.insert(token.content.chars(), |indices, ends| {
                if ends {
                    indices.push(index);
                }
            });
            guard.added.push((token.clone(), is_control));
        }
        guard
    }

    /// Whether `value` in a prompt could become part of a control token's text.
    pub(super) fn may_form_token(&self, value: &Value, tokenizer: &Tokenizer) -> bool {
        match value {
            Value::String(text) => {
                let normalized = || {
                    tokenizer
                        .normalize(text)
                        .map_or(true, |text| self.text_may_form_token(&text))
                };
                self.text_may_form_token(text) || (self.normalized && normalized())
            }
            Value::Array(items) => items.iter().any(|item| self.may_form_token(item, tokenizer)),
            Value::Object(map) => map
                .iter()
                .any(|(key, item)| self.text_may_form_token(key) || self.may_form_token(item, tokenizer)),
            _ => false,
        }
    }

    /// Like `may_form_token`, for a text and without its normalized form.
    pub(super) fn text_may_form_token(&self, text: &str) -> bool {
        self.marked_chars(text).next().is_some()
    }

    /// A copy of `value` with marks, also in the keys of nested objects.
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
        for (at, c, char_marks) in self.marked_chars(text) {
            if char_marks.front {
                out.push_str(&text[from..at]);
                out.push(marks.front);
                from = at;
            }
            if char_marks.inside {
                let after = at + c.len_utf8();
                out.push_str(&text[from..after]);
                out.push(marks.inside);
                from = after;
            }
        }
        if from == 0 && out.is_empty() {
            return Cow::Borrowed(text);
        }
        out.push_str(&text[from..]);
        Cow::Owned(out)
    }

    /// The characters to mark, with their byte offsets: the first of each text that equals a control
    /// token in upper or lower case, or that could if more text followed. (A template may trim white
    /// space at the end before it appends text.)
    fn marked_chars<'a>(&'a self, text: &'a str) -> impl Iterator<Item = (usize, char, CharMarks)> + 'a {
        let trimmed_len = text.trim_end().len();
        text.char_indices().filter_map(move |(at, c)| {
            let may_begin = match self.first_ascii.get(c.to_ascii_lowercase() as usize) {
                Some(begins) => *begins,
                // The folded form of this character may have ASCII characters in it.
                None => {
                    self.first_beyond_ascii
                        || fold(c).any(|c| self.first_ascii.get(c as usize).is_some_and(|begins| *begins))
                }
            };
            if !may_begin {
                return None;
            }
            let mut char_marks = CharMarks::default();
            // A token may begin within the folded form of a character.
            for skip in 0..fold(c).count() {
                char_marks.add(self.marks_at(&text[at..], trimmed_len.checked_sub(at), skip));
            }
            (char_marks.inside || char_marks.front).then_some((at, c, char_marks))
        })
    }

    /// The marks for control tokens at the start of `text` after folding and without the first
    /// `skip` folded characters. This includes tokens of which the whole text is a prefix, or the
    /// text without its trailing white space (`trimmed_len` bytes).
    fn marks_at(&self, text: &str, trimmed_len: Option<usize>, skip: usize) -> CharMarks {
        let mut char_marks = CharMarks::default();
        let mut node = ROOT;
        for (at, c) in text.char_indices() {
            if at > 0 && trimmed_len == Some(at) {
                char_marks.add(self.control_texts.value(node).passes);
            }
            for c in fold(c).skip(if at == 0 { skip } else { 0 }) {
                let Some(next) = self.control_texts.step(node, c) else {
                    return char_marks;
                };
                let node_marks = self.control_texts.value(next);
                char_marks.add(node_marks.ends);
                if self.marks_first_chars && node == ROOT {
                    char_marks.inside |= node_marks.passes.inside;
                }
                node = next;
            }
        }
        char_marks.add(self.control_texts.value(node).passes);
        char_marks
    }

    /// Splits a prompt with marked data at its added tokens, and removes the marks.
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

    /// The id of the longest added token at byte `at`, and its byte range, which includes white
    /// space that the token absorbs. `from` is the end of the token before it.
    fn token_at(&self, text: &str, from: usize, at: usize, marks: Marks) -> Option<(u32, usize, usize)> {
        let (index, end) = self.longest_at(text, at, marks)?;
        let (token, _) = &self.added[index as usize];
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

    /// The index of the longest added token at byte `at`, and the token's end. Marks within a token
    /// are ignored, except for control tokens.
    fn longest_at(&self, text: &str, at: usize, marks: Marks) -> Option<(u32, usize)> {
        let is_marked_in_front = text[..at].ends_with(marks.front);
        let mut longest = None;
        let mut node = ROOT;
        let mut holds_mark = false;
        for (i, c) in text[at..].char_indices() {
            let Some(next) = self.added_texts.step(node, c) else {
                if i > 0 && (c == marks.inside || c == marks.front) {
                    holds_mark = true;
                    continue;
                }
                break;
            };
            node = next;
            let end = at + i + c.len_utf8();
            let ending = self.added_texts.value(node).iter().find(|index| {
                let (token, is_control) = &self.added[**index as usize];
                let is_hidden = *is_control && (holds_mark || (is_marked_in_front && !is_marked_inside(token)));
                !is_hidden && (!token.single_word || is_single_word(text, at, end))
            });
            longest = ending.map(|index| (*index, end)).or(longest);
        }
        longest
    }
}

/// Folds a character to a form that is the same for its upper and lower case.
fn fold(c: char) -> impl Iterator<Item = char> {
    c.to_lowercase()
        .flat_map(char::to_uppercase)
        .flat_map(char::to_lowercase)
}

/// Whether a template's source has filters, methods or slices that split texts. Characters that are
/// not adjacent in the data may then be adjacent in the prompt.
pub(super) fn splits_texts(source: &str) -> bool {
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
    let has_slice = source.match_indices('[').any(|(at, _)| {
        let inner = source[at + 1..].split([']', '\n']).next().unwrap_or_default();
        inner.contains(':')
    });
    has_slice || WORDS.iter().any(|word| source.contains(word))
}

/// Whether no character of a word adjoins the range: a token may require this (`single_word`).
fn is_single_word(text: &str, start: usize, end: usize) -> bool {
    let is_word_char = |c: char| c.is_alphanumeric() || c == '_';
    !text[..start].chars().next_back().is_some_and(is_word_char)
        && !text[end..].chars().next().is_some_and(is_word_char)
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
            assert!(guard.may_form_token(&json!({"a": ["", text]}), &tokenizer), "{text}");
        }
        assert!(guard.may_form_token(&json!({"<|im_end|>": 1}), &tokenizer));
        for text in ["", "a < b", "im_end|>", "<|im_ends>", "<s>", "x<<y"] {
            assert!(!guard.may_form_token(&json!(text), &tokenizer), "{text}");
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
        // Two columns form a control token's text only together.
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
    fn marks_do_not_split_other_added_tokens() {
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
        fn marked_data_never_becomes_a_control_token(
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
