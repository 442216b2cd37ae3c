//! Escapes text for a terminal or a log: characters that would move the cursor, set the title,
//! clear the screen, or show letters in another order than stored.
//!
//! Rows, templates, names and foreign errors reach a person's terminal through `say` and the log,
//! and both escape them here. The form is JSON's (`\u001b`), so an escaped line of JSON has the
//! same meaning. Line ends and tabs are kept.
//!
//! See docs/decisions/032-printed-text-is-escaped-at-one-place.md.

use std::fmt::{self, Write as _};
use std::io;

/// Writes text to the inner writer, escaped.
pub(crate) struct Printable<W>(pub W);

impl<W: fmt::Write> fmt::Write for Printable<W> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        if !text.bytes().any(may_begin_control) {
            return self.0.write_str(text);
        }
        for c in text.chars() {
            match c {
                '\r' => self.0.write_str("\\r")?,
                c if is_control(c) => write!(self.0, "\\u{:04x}", c as u32)?,
                c => self.0.write_char(c)?,
            }
        }
        Ok(())
    }
}

/// The displayed value as escaped text.
pub(crate) fn printable(text: impl fmt::Display) -> String {
    let mut out = Printable(String::new());
    // Writing to a string never fails.
    let _ = write!(out, "{text}");
    out.0
}

/// Maximum length of a foreign name in a message, in characters.
const NAME_CHARS_MAX: usize = 120;

/// A name or another text from a file, escaped and cut so that it fits on one line.
pub(crate) fn printable_name(text: &str) -> String {
    let text: String = text
        .chars()
        .take(NAME_CHARS_MAX + 1)
        .flat_map(char::escape_debug)
        .collect();
    match text.char_indices().nth(NAME_CHARS_MAX) {
        None => text,
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}

/// First bytes of characters that may need escaping: a fast check for texts without any.
fn may_begin_control(byte: u8) -> bool {
    (byte < 0x20 && !matches!(byte, b'\n' | b'\t')) || matches!(byte, 0x7F | 0xC2 | 0xD8 | 0xE2 | 0xEF)
}

/// Whether to escape `c`: control characters (C0 without line ends and tabs, DEL, C1), marks that
/// change the writing direction, and separators that some terminals take for line ends.
fn is_control(c: char) -> bool {
    match c {
        '\n' | '\t' => false,
        '\u{61C}' | '\u{200E}' | '\u{200F}' | '\u{2028}'..='\u{202E}' | '\u{2066}'..='\u{2069}' | '\u{FEFF}' => true,
        c => c.is_control(),
    }
}

/// Writes log lines to stderr, escaped. With `colours`, colour sequences are kept.
pub(crate) struct Log {
    pub colours: bool,
}

impl io::Write for Log {
    /// The log passes whole lines.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(line);
        let escaped = if self.colours {
            escape_except_colours(&text)
        } else {
            printable(text)
        };
        io::Write::write_all(&mut io::stderr().lock(), escaped.as_bytes())?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

/// Escapes everything except colour sequences (`ESC [ … m`), which only change colours.
fn escape_except_colours(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('\u{1b}') {
        out.push_str(&printable(&rest[..at]));
        rest = &rest[at..];
        let parameters = rest.strip_prefix("\u{1b}[").unwrap_or_default();
        let digits = parameters.find(|c: char| !c.is_ascii_digit() && c != ';');
        let length = match digits {
            Some(end) if parameters[end..].starts_with('m') => {
                out.push_str(&rest[..end + 3]);
                end + 3
            }
            _ => {
                out.push_str("\\u001b");
                1
            }
        };
        rest = &rest[length..];
    }
    out.push_str(&printable(rest));
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped() {
        let cases = [
            ("plain, ä, 日本, 🙂, “quoted”", "plain, ä, 日本, 🙂, “quoted”"),
            ("line\n\tnext", "line\n\tnext"),
            ("\u{1b}]0;title\u{7}", "\\u001b]0;title\\u0007"),
            ("a\rb\u{8}\u{7f}\u{9b}2J", "a\\rb\\u0008\\u007f\\u009b2J"),
            (
                "\u{202e}\u{2066}\u{2069}\u{200e}\u{200f}\u{61c}\u{2028}\u{2029}\u{feff}",
                "\\u202e\\u2066\\u2069\\u200e\\u200f\\u061c\\u2028\\u2029\\ufeff",
            ),
        ];
        for (text, expected) in cases {
            assert_eq!(printable(text), expected);
        }
    }

    #[test]
    fn escaped_json_parses_to_the_same_value() {
        let value = serde_json::json!({"text": "\u{1b}[2J\u{9b}\u{202e}\r\u{7f}"});
        let shown = printable(&value);
        assert!(!shown.contains(is_control), "{shown}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&shown).unwrap(), value);
    }

    #[test]
    fn only_colour_sequences_are_kept() {
        assert_eq!(
            escape_except_colours("\u{1b}[33m WARN\u{1b}[0m x"),
            "\u{1b}[33m WARN\u{1b}[0m x"
        );
        assert_eq!(
            escape_except_colours("\u{1b}[2J\u{1b}]0;t\u{7}\u{1b}[1;31"),
            "\\u001b[2J\\u001b]0;t\\u0007\\u001b[1;31"
        );
    }
}
