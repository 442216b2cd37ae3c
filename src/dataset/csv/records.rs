//! Cuts streamed CSV bytes into whole records with their offsets, in bounded memory, and splits a
//! record into cells.
//!
//! Quoting follows RFC 4180: a quoted cell may hold delimiters and line ends, and a quote within it
//! is doubled. A quote inside an unquoted cell is an ordinary character. Input is refused where the
//! end of a record is ambiguous, since everything after it could be misread: text behind a closing
//! quote, a quote that is never closed, a lone carriage return.
//!
//! See docs/decisions/035-one-state-machine-for-quotes.md.

use std::borrow::Cow;
use std::ops::Range;

use bytes::BytesMut;

use crate::dataset::lines::cutter::{BLOCK_BYTES, LINE_BYTES_MAX, Piece, strip_bom};

/// A block ends with the record that brings it to this many cells: a cell's value may take much
/// more memory than its bytes.
const BLOCK_CELLS: usize = 128 << 10;

const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Parser state between two bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    /// Before a record.
    Record,
    /// Before a cell other than the record's first.
    Cell,
    /// In a cell without quotes.
    Plain,
    Quoted,
    /// Behind a quote in a quoted cell: the quote ends the cell, or is the first of a doubled
    /// quote.
    Closing,
    /// Behind a carriage return outside of quotes.
    Return,
}

impl At {
    fn step(self, byte: u8, delimiter: u8) -> Result<At, &'static str> {
        match (self, byte) {
            (At::Quoted, b'"') => Ok(At::Closing),
            (At::Quoted, _) => Ok(At::Quoted),
            (At::Return, b'\n') => Ok(At::Record),
            (At::Return, _) => Err(LONE_RETURN),
            (_, b'\n') => Ok(At::Record),
            (_, b'\r') => Ok(At::Return),
            (_, byte) if byte == delimiter => Ok(At::Cell),
            (At::Record | At::Cell | At::Closing, b'"') => Ok(At::Quoted),
            (At::Closing, _) => Err(AFTER_QUOTE),
            _ => Ok(At::Plain),
        }
    }
}

const LONE_RETURN: &str = "a carriage return that no line feed follows; end lines by `\\n` or `\\r\\n`";
const AFTER_QUOTE: &str =
    "a quote that ends a cell is followed by more text; a quote within a quoted cell is written twice (\"\")";

/// Cuts pushed bytes into [`Piece`]s of whole records. Holds at most one block, one record of the
/// maximum length and one push.
#[derive(Debug)]
pub struct CsvCutter {
    delimiter: u8,
    at: At,
    pending: BytesMut,
    /// Offset of the first pending byte, or of the next byte to arrive while a long record is
    /// skipped.
    start: u64,
    /// Pending bytes that are whole records.
    whole: usize,
    /// Number of cells in the pending bytes.
    cells: usize,
    /// Line of the next byte, from 1.
    line: u64,
    /// Line of the open quote.
    opened: u64,
    /// Line of the open record.
    record: u64,
    /// Number of bytes matched so far of a byte order mark at the file's start.
    mark: u64,
    /// Start of the long record that is being skipped.
    skipping: Option<u64>,
    record_max: usize,
    block: usize,
}

impl CsvCutter {
    /// Starts at byte `start` of the input, which begins a record on line `line`.
    pub fn new(start: u64, line: u64, delimiter: u8) -> CsvCutter {
        CsvCutter::with_limits(start, line, delimiter, LINE_BYTES_MAX, BLOCK_BYTES)
    }

    fn with_limits(start: u64, line: u64, delimiter: u8, record_max: usize, block: usize) -> CsvCutter {
        CsvCutter {
            delimiter,
            at: At::Record,
            pending: BytesMut::new(),
            start,
            whole: 0,
            cells: 0,
            line,
            opened: line,
            record: line,
            mark: 0,
            skipping: None,
            record_max,
            block,
        }
    }

    /// Processes the next bytes; finished pieces go to `out`.
    ///
    /// # Errors
    /// The end of a record is ambiguous; the error line says where and why.
    pub fn push(&mut self, bytes: &[u8], out: &mut Vec<Piece>) -> Result<(), String> {
        let mut taken = 0;
        let mut place = self.start + self.pending.len() as u64;
        for (n, &byte) in bytes.iter().enumerate() {
            let is_next = place == self.mark;
            let is_mark = is_next && BYTE_ORDER_MARK.get(place as usize) == Some(&byte);
            place += 1;
            if is_mark {
                self.mark += 1;
                continue;
            }
            if is_next && (1..BYTE_ORDER_MARK.len() as u64).contains(&self.mark) {
                // The partial match was no byte order mark, so it is text.
                self.at = At::Plain;
            }
            let next = self.at.step(byte, self.delimiter).map_err(|why| self.refused(why))?;
            if byte == b'\n' {
                self.line += 1;
            }
            match next {
                At::Cell => self.cells += 1,
                At::Quoted if self.at == At::Record || self.at == At::Cell => self.opened = self.line,
                At::Record => {
                    self.cells += 1;
                    let rest = &bytes[taken..=n];
                    match self.skipping.take() {
                        Some(start) => {
                            self.start = place;
                            self.cells = 0;
                            taken = n + 1;
                            out.push(Piece::TooLong {
                                start,
                                end: place,
                                lines: self.line - self.record,
                            });
                        }
                        None => {
                            self.whole = self.pending.len() + rest.len();
                            if self.whole >= self.block || self.cells >= BLOCK_CELLS {
                                self.pending.extend_from_slice(rest);
                                taken = n + 1;
                                self.emit(self.whole, out);
                            }
                        }
                    }
                    self.record = self.line;
                }
                _ => {}
            }
            self.at = next;
        }
        if self.skipping.is_some() {
            self.start = place;
            return Ok(());
        }
        self.pending.extend_from_slice(&bytes[taken..]);
        if self.pending.len() - self.whole > self.record_max {
            if self.whole > 0 {
                self.emit(self.whole, out);
            }
            self.skipping = Some(self.start);
            self.start = place;
            self.pending = BytesMut::new();
        }
        Ok(())
    }

    /// Emits the remaining bytes at the end of the input.
    ///
    /// # Errors
    /// The last record is incomplete.
    pub fn finish(mut self, out: &mut Vec<Piece>) -> Result<(), String> {
        match self.at {
            At::Quoted => return Err(format!("line {}: a quote that is never closed", self.opened)),
            At::Return => return Err(self.refused(LONE_RETURN)),
            _ => {}
        }
        if let Some(start) = self.skipping {
            out.push(Piece::TooLong {
                start,
                end: self.start,
                lines: self.line - self.record,
            });
        } else if !self.pending.is_empty() {
            self.emit(self.pending.len(), out);
        }
        Ok(())
    }

    /// Bytes of the long record that is being skipped.
    pub fn skipped(&self) -> u64 {
        self.skipping.map_or(0, |start| self.start - start)
    }

    fn refused(&self, why: &str) -> String {
        match self.at {
            At::Closing if self.opened < self.line => {
                format!("line {}: {why}; the cell begins on line {}", self.line, self.opened)
            }
            _ => format!("line {}: {why}", self.line),
        }
    }

    fn emit(&mut self, bytes: usize, out: &mut Vec<Piece>) {
        let block = self.pending.split_to(bytes).freeze();
        out.push(Piece::Lines {
            start: self.start,
            bytes: block,
        });
        self.start += bytes as u64;
        self.whole = 0;
        self.cells = 0;
    }
}

/// A record of a block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record<'a> {
    /// Byte range in the block, including the line end.
    pub place: Range<usize>,
    /// Number of the block's lines before the record.
    pub line: u64,
    /// The record's bytes without its line end and without a byte order mark at the file's start.
    pub text: &'a [u8],
}

/// The records of a block of whole records that begins at byte `start` of the file.
pub fn records(block: &[u8], start: u64, delimiter: u8) -> impl Iterator<Item = Record<'_>> {
    let (mut at, mut line) = (0, 0);
    std::iter::from_fn(move || {
        let rest = block.get(at..).filter(|rest| !rest.is_empty())?;
        let is_first = start == 0 && at == 0;
        let mark = if is_first {
            rest.len() - strip_bom(rest).len()
        } else {
            0
        };
        let length = mark + record_length(&rest[mark..], delimiter);
        let text = &rest[mark..length];
        let text = text.strip_suffix(b"\n").unwrap_or(text);
        let record = Record {
            place: at..at + length,
            line,
            text: text.strip_suffix(b"\r").unwrap_or(text),
        };
        at += length;
        line += newlines(&rest[..length]);
        Some(record)
    })
}

/// Bytes up to the first record's end.
fn record_length(bytes: &[u8], delimiter: u8) -> usize {
    let mut at = At::Record;
    for (n, &byte) in bytes.iter().enumerate() {
        // The cutter lets only well-formed records through, so this step succeeds.
        at = at.step(byte, delimiter).unwrap_or(At::Plain);
        if at == At::Record {
            return n + 1;
        }
    }
    bytes.len()
}

/// Line ends in `bytes`.
pub fn newlines(bytes: &[u8]) -> u64 {
    memchr::memchr_iter(b'\n', bytes).count() as u64
}

/// A cell of a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cell<'a> {
    pub text: Cow<'a, [u8]>,
    pub quoted: bool,
}

/// The cells of a record's text.
pub fn cells(text: &[u8], delimiter: u8) -> impl Iterator<Item = Cell<'_>> {
    let mut rest = Some(text);
    std::iter::from_fn(move || {
        let bytes = rest?;
        let (cell, length) = match bytes.strip_prefix(b"\"") {
            Some(inner) => quoted(inner),
            None => {
                let length = memchr::memchr(delimiter, bytes).unwrap_or(bytes.len());
                let text = Cow::Borrowed(&bytes[..length]);
                (Cell { text, quoted: false }, length)
            }
        };
        let behind = &bytes[length..];
        rest = memchr::memchr(delimiter, behind).map(|at| &behind[at + 1..]);
        Some(cell)
    })
}

/// The cell after the opening quote (`inner` starts behind it), and its length including both
/// quotes.
fn quoted(inner: &[u8]) -> (Cell<'_>, usize) {
    let (mut text, mut from, mut at) = (Cow::Borrowed(&[][..]), 0, 0);
    loop {
        let Some(found) = memchr::memchr(b'"', &inner[at..]) else {
            join(&mut text, &inner[from..]);
            return (Cell { text, quoted: true }, inner.len() + 1);
        };
        at += found + 1;
        if inner.get(at) != Some(&b'"') {
            join(&mut text, &inner[from..at - 1]);
            return (Cell { text, quoted: true }, at + 1);
        }
        // The first quote of a doubled one belongs to the text.
        join(&mut text, &inner[from..at]);
        at += 1;
        from = at;
    }
}

fn join<'a>(text: &mut Cow<'a, [u8]>, more: &'a [u8]) {
    match text.is_empty() {
        true => *text = Cow::Borrowed(more),
        false if more.is_empty() => {}
        false => text.to_mut().extend_from_slice(more),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The pieces of an input that arrives in chunks of `sizes` bytes.
    fn cut(input: &[u8], sizes: &[usize], record_max: usize, block: usize) -> Result<Vec<Piece>, String> {
        let mut cutter = CsvCutter::with_limits(0, 1, b',', record_max, block);
        let (mut pieces, mut at) = (Vec::new(), 0);
        for &size in sizes.iter().cycle() {
            let end = (at + size).min(input.len());
            cutter.push(&input[at..end], &mut pieces)?;
            assert!(cutter.pending.len() <= record_max + block + size);
            at = end;
            if at == input.len() {
                break;
            }
        }
        cutter.finish(&mut pieces)?;
        Ok(pieces)
    }

    /// Offset, first line and cells of every record; `None` for skipped records.
    type Rows = Vec<(u64, u64, Option<Vec<String>>)>;

    fn rows(pieces: &[Piece]) -> Rows {
        let (mut out, mut line) = (Vec::new(), 1);
        for piece in pieces {
            match piece {
                Piece::TooLong { start, lines, .. } => {
                    out.push((*start, line, None));
                    line += lines;
                }
                Piece::Lines { start, bytes } => {
                    for record in records(bytes, *start, b',') {
                        let text = |cell: Cell| String::from_utf8_lossy(&cell.text).into_owned();
                        let cells = cells(record.text, b',').map(text).collect();
                        out.push((start + record.place.start as u64, line + record.line, Some(cells)));
                    }
                    line += newlines(bytes);
                }
            }
        }
        out
    }

    fn all(input: &[u8]) -> Result<Rows, String> {
        cut(input, &[7], 1000, 16).map(|pieces| rows(&pieces))
    }

    #[test]
    fn quotes_hold_delimiters_line_ends_and_quotes() {
        let input = b"\xef\xbb\xbf\"a\",b\r\n\"x\ny, \"\"z\"\"\",5\" pipe\n,\"\"\n\n\"last\r\n\"";
        let cells: Vec<_> = all(input)
            .unwrap()
            .into_iter()
            .map(|(_, line, cells)| (line, cells.unwrap().join("|")))
            .collect();
        let expected = [
            (1, "a|b"),
            (2, "x\ny, \"z\"|5\" pipe"),
            (4, "|"),
            (5, ""),
            (6, "last\r\n"),
        ];
        assert_eq!(cells, expected.map(|(line, cells)| (line, cells.to_string())));
    }

    #[test]
    fn what_leaves_records_open_names_its_line() {
        let error = |input: &[u8]| all(input).unwrap_err();
        assert_eq!(error(b"a\n\"b\nc\n"), "line 2: a quote that is never closed");
        assert!(error(b"a\n\"b\"c\n").starts_with("line 2: a quote that ends a cell is followed by more text"));
        assert!(error(b"a\n\"b\nc\" d\n").ends_with("; the cell begins on line 2"));
        assert!(error(b"a\n\"say \\\"x\\\"\"\n").starts_with("line 2: a quote that ends a cell"));
        assert!(error(b"a\rb\n").starts_with("line 1: a carriage return"));
        assert!(error(b"a\n1\r").starts_with("line 2: a carriage return"));
        assert!(all(b"a\n\"x\ry\"\n").is_ok());
    }

    #[test]
    fn a_long_record_is_skipped_in_bounded_memory_and_its_lines_count() {
        let mut input = b"a\n\"".to_vec();
        input.extend(b"x\n".repeat(50_000));
        input.extend(b"\",\nb\n");
        let found = cut(&input, &[1000], 5000, 2000).map(|pieces| rows(&pieces)).unwrap();
        assert_eq!(found[1], (2, 2, None));
        assert_eq!(found[2], (100_006, 50_003, Some(vec!["b".into()])));
        input.truncate(90_000);
        assert_eq!(
            cut(&input, &[1000], 5000, 2000),
            Err("line 2: a quote that is never closed".into())
        );
    }

    #[test]
    fn what_begins_like_a_byte_order_mark_is_text() {
        for start in [&b"\xef"[..], b"\xef\xbb"] {
            let input = [start, b"\"a\nb,c\n\"d\ne\",f\n"].concat();
            for sizes in [&[1000][..], &[1]] {
                let pieces = cut(&input, sizes, 1000, 1).unwrap();
                assert_eq!(rows(&pieces).len(), 3, "{start:?}");
            }
        }
    }

    proptest! {
        #[test]
        fn any_pieces_and_any_block_give_the_same_records(
            cells in prop::collection::vec(prop::collection::vec("[a\u{e9}\",\n\r ]{0,4}", 1..4), 0..12),
            sizes in prop::collection::vec(1usize..20, 1..4),
            block in 1usize..40,
            bom: bool, ended: bool, windows: bool,
        ) {
            // Quotes like Python's csv module.
            let end = if windows { "\r\n" } else { "\n" };
            let quote = |cell: &String| if cell.contains(['"', ',', '\n', '\r']) || cell.is_empty() { format!("\"{}\"", cell.replace('"', "\"\"")) } else { cell.clone() };
            let lines: Vec<String> = cells.iter().map(|row| row.iter().map(quote).collect::<Vec<_>>().join(",")).collect();
            let mut text = if bom { "\u{feff}".to_string() } else { String::new() };
            text += &lines.join(end);
            if ended && !lines.is_empty() {
                text += end;
            }
            let found = cut(text.as_bytes(), &sizes, 1000, block).map(|pieces| rows(&pieces)).unwrap();
            let found: Vec<Vec<String>> = found.into_iter().map(|(_, _, cells)| cells.unwrap()).collect();
            // A lone byte order mark is parsed as a record without text.
            let found = if cells.is_empty() { Vec::new() } else { found };
            prop_assert_eq!(found, cells);
        }

        #[test]
        fn any_bytes_are_cut_the_same_however_they_come(
            input in prop::collection::vec(prop::sample::select(b"a,\"\n\r\xef\xbb\xbf".to_vec()), 0..60),
            sizes in prop::collection::vec(1usize..20, 1..4),
            record_max in 8usize..40,
        ) {
            let whole = cut(&input, &[1000], 1000, 1).map(|pieces| rows(&pieces));
            let parts = cut(&input, &sizes, 1000, 1).map(|pieces| rows(&pieces));
            prop_assert_eq!(&whole, &parts);
            let short = cut(&input, &sizes, record_max, 8).map(|pieces| rows(&pieces));
            prop_assert_eq!(whole.map(|rows| rows.len()), short.map(|rows| rows.len()));
        }
    }
}
