//! Cuts streamed CSV bytes into complete records with their offsets, in bounded memory, and splits
//! a record into cells.
//!
//! Quoting follows RFC 4180: a quoted cell may hold delimiters and line ends, and a quote within it
//! is doubled. A quote inside an unquoted cell is an ordinary character. Input is refused if the
//! end of a record is ambiguous, since all later records could be misread: text behind a closing
//! quote, a quote that is never closed, a carriage return without a line feed.
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
enum ParserState {
    RecordStart,
    /// At the start of a cell that is not the record's first.
    CellStart,
    /// In a cell without quotes.
    Unquoted,
    Quoted,
    /// Behind a quote in a quoted cell: the quote ends the cell, or is the first of a doubled
    /// quote.
    QuoteInQuoted,
    /// Behind a carriage return outside of quotes.
    CarriageReturn,
}

impl ParserState {
    fn step(self, byte: u8, delimiter: u8) -> Result<ParserState, &'static str> {
        use ParserState::*;
        match (self, byte) {
            (Quoted, b'"') => Ok(QuoteInQuoted),
            (Quoted, _) => Ok(Quoted),
            (CarriageReturn, b'\n') => Ok(RecordStart),
            (CarriageReturn, _) => Err(LONE_RETURN),
            (_, b'\n') => Ok(RecordStart),
            (_, b'\r') => Ok(CarriageReturn),
            (_, byte) if byte == delimiter => Ok(CellStart),
            (RecordStart | CellStart | QuoteInQuoted, b'"') => Ok(Quoted),
            (QuoteInQuoted, _) => Err(TEXT_AFTER_QUOTE),
            _ => Ok(Unquoted),
        }
    }
}

const LONE_RETURN: &str = "a carriage return that no line feed follows; end lines by `\\n` or `\\r\\n`";
const TEXT_AFTER_QUOTE: &str =
    "a quote that ends a cell is followed by more text; a quote within a quoted cell is written twice (\"\")";

/// Cuts pushed bytes into [`Piece`]s of complete records. Holds at most one block, one record of
/// the maximum length and one push.
#[derive(Debug)]
pub struct CsvCutter {
    delimiter: u8,
    state: ParserState,
    pending: BytesMut,
    /// Offset of the first pending byte; while a long record is skipped, of the next byte to
    /// arrive.
    start: u64,
    /// Number of pending bytes that form complete records.
    complete_bytes: usize,
    /// Number of cells in the pending bytes.
    cells: usize,
    /// Line of the next byte, from 1.
    line: u64,
    /// Line of the last opening quote.
    quote_line: u64,
    /// First line of the current record.
    record_line: u64,
    /// Number of bytes at the file's start that match a byte order mark so far.
    bom_matched: u64,
    /// Start of the long record that is being skipped.
    skipping: Option<u64>,
    record_max: usize,
    block_bytes: usize,
}

impl CsvCutter {
    /// Starts at byte `start` of the input, which begins a record on line `line`.
    pub fn new(start: u64, line: u64, delimiter: u8) -> CsvCutter {
        CsvCutter::with_limits(start, line, delimiter, LINE_BYTES_MAX, BLOCK_BYTES)
    }

    /// `record_max`: maximum bytes of a record. `block_bytes`: a piece of at least this size is
    /// emitted.
    fn with_limits(start: u64, line: u64, delimiter: u8, record_max: usize, block_bytes: usize) -> CsvCutter {
        CsvCutter {
            delimiter,
            state: ParserState::RecordStart,
            pending: BytesMut::new(),
            start,
            complete_bytes: 0,
            cells: 0,
            line,
            quote_line: line,
            record_line: line,
            bom_matched: 0,
            skipping: None,
            record_max,
            block_bytes,
        }
    }

    /// Processes the next bytes; finished pieces go to `out`.
    ///
    /// # Errors
    /// The end of a record is ambiguous; the error is one line with the line number and the reason.
    pub fn push(&mut self, bytes: &[u8], out: &mut Vec<Piece>) -> Result<(), String> {
        // Number of pushed bytes that are already in `pending`, in a piece or skipped.
        let mut processed = 0;
        let mut offset = self.start + self.pending.len() as u64;
        for (n, &byte) in bytes.iter().enumerate() {
            let may_be_bom = offset == self.bom_matched;
            let is_bom_byte = may_be_bom && BYTE_ORDER_MARK.get(offset as usize) == Some(&byte);
            offset += 1;
            if is_bom_byte {
                self.bom_matched += 1;
                continue;
            }
            if may_be_bom && (1..BYTE_ORDER_MARK.len() as u64).contains(&self.bom_matched) {
                // The partial match was no byte order mark, so it is text.
                self.state = ParserState::Unquoted;
            }
            let next = self.state.step(byte, self.delimiter);
            let next = next.map_err(|why| self.error_line(why))?;
            if byte == b'\n' {
                self.line += 1;
            }
            match next {
                ParserState::CellStart => self.cells += 1,
                ParserState::Quoted
                    if self.state == ParserState::RecordStart || self.state == ParserState::CellStart =>
                {
                    self.quote_line = self.line;
                }
                ParserState::RecordStart => {
                    self.cells += 1;
                    let rest = &bytes[processed..=n];
                    match self.skipping.take() {
                        Some(start) => {
                            self.start = offset;
                            self.cells = 0;
                            processed = n + 1;
                            out.push(Piece::TooLong {
                                start,
                                end: offset,
                                lines: self.line - self.record_line,
                            });
                        }
                        None => {
                            self.complete_bytes = self.pending.len() + rest.len();
                            if self.complete_bytes >= self.block_bytes || self.cells >= BLOCK_CELLS {
                                self.pending.extend_from_slice(rest);
                                processed = n + 1;
                                self.emit(self.complete_bytes, out);
                            }
                        }
                    }
                    self.record_line = self.line;
                }
                _ => {}
            }
            self.state = next;
        }
        if self.skipping.is_some() {
            self.start = offset;
            return Ok(());
        }
        self.pending.extend_from_slice(&bytes[processed..]);
        if self.pending.len() - self.complete_bytes > self.record_max {
            if self.complete_bytes > 0 {
                self.emit(self.complete_bytes, out);
            }
            self.skipping = Some(self.start);
            self.start = offset;
            self.pending = BytesMut::new();
        }
        Ok(())
    }

    /// Emits the remaining bytes at the end of the input.
    ///
    /// # Errors
    /// The last record is incomplete.
    pub fn finish(mut self, out: &mut Vec<Piece>) -> Result<(), String> {
        match self.state {
            ParserState::Quoted => return Err(format!("line {}: a quote that is never closed", self.quote_line)),
            ParserState::CarriageReturn => return Err(self.error_line(LONE_RETURN)),
            _ => {}
        }
        if let Some(start) = self.skipping {
            out.push(Piece::TooLong {
                start,
                end: self.start,
                lines: self.line - self.record_line,
            });
        } else if !self.pending.is_empty() {
            self.emit(self.pending.len(), out);
        }
        Ok(())
    }

    /// Bytes so far of the long record that is being skipped; 0 if none is.
    pub fn skipped_bytes(&self) -> u64 {
        self.skipping.map_or(0, |start| self.start - start)
    }

    fn error_line(&self, why: &str) -> String {
        match self.state {
            ParserState::QuoteInQuoted if self.quote_line < self.line => {
                format!("line {}: {why}; the cell begins on line {}", self.line, self.quote_line)
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
        self.complete_bytes = 0;
        self.cells = 0;
    }
}

/// A record of a block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CsvRecord<'a> {
    /// Byte range in the block, including the line end.
    pub range: Range<usize>,
    /// Number of the block's lines before the record.
    pub line: u64,
    /// The record's bytes, without its line end and without the byte order mark of the file.
    pub text: &'a [u8],
}

/// The records of a block, which begins at byte `start` of the file and holds complete records.
pub fn records(block: &[u8], start: u64, delimiter: u8) -> impl Iterator<Item = CsvRecord<'_>> {
    let (mut offset, mut line) = (0, 0);
    std::iter::from_fn(move || {
        let rest = block.get(offset..).filter(|rest| !rest.is_empty())?;
        let is_first = start == 0 && offset == 0;
        let bom_length = if is_first {
            rest.len() - strip_bom(rest).len()
        } else {
            0
        };
        let length = bom_length + record_length(&rest[bom_length..], delimiter);
        let text = &rest[bom_length..length];
        let text = text.strip_suffix(b"\n").unwrap_or(text);
        let record = CsvRecord {
            range: offset..offset + length,
            line,
            text: text.strip_suffix(b"\r").unwrap_or(text),
        };
        offset += length;
        line += count_newlines(&rest[..length]);
        Some(record)
    })
}

/// Length of the first record, including its line end.
fn record_length(bytes: &[u8], delimiter: u8) -> usize {
    let mut state = ParserState::RecordStart;
    for (n, &byte) in bytes.iter().enumerate() {
        // The cutter has refused malformed records, so this step succeeds.
        state = state.step(byte, delimiter).unwrap_or(ParserState::Unquoted);
        if state == ParserState::RecordStart {
            return n + 1;
        }
    }
    bytes.len()
}

pub fn count_newlines(bytes: &[u8]) -> u64 {
    memchr::memchr_iter(b'\n', bytes).count() as u64
}

/// A cell of a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CsvCell<'a> {
    /// The cell's content, without quotes around it and with doubled quotes undone.
    pub text: Cow<'a, [u8]>,
    pub is_quoted: bool,
}

/// The cells of a record's text.
pub fn cells(text: &[u8], delimiter: u8) -> impl Iterator<Item = CsvCell<'_>> {
    let mut rest = Some(text);
    std::iter::from_fn(move || {
        let bytes = rest?;
        let (cell, length) = match bytes.strip_prefix(b"\"") {
            Some(inner) => quoted_cell(inner),
            None => {
                let length = memchr::memchr(delimiter, bytes).unwrap_or(bytes.len());
                let text = Cow::Borrowed(&bytes[..length]);
                (CsvCell { text, is_quoted: false }, length)
            }
        };
        let after_cell = &bytes[length..];
        rest = memchr::memchr(delimiter, after_cell).map(|at| &after_cell[at + 1..]);
        Some(cell)
    })
}

/// The cell whose opening quote comes just before `inner`, and its length including both quotes.
fn quoted_cell(inner: &[u8]) -> (CsvCell<'_>, usize) {
    // `copied`: up to where `inner` is in `text`. `next`: the byte behind the last quote.
    let (mut text, mut copied, mut next) = (Cow::Borrowed(&[][..]), 0, 0);
    loop {
        let Some(quote) = memchr::memchr(b'"', &inner[next..]) else {
            append(&mut text, &inner[copied..]);
            return (CsvCell { text, is_quoted: true }, inner.len() + 1);
        };
        next += quote + 1;
        if inner.get(next) != Some(&b'"') {
            append(&mut text, &inner[copied..next - 1]);
            return (CsvCell { text, is_quoted: true }, next + 1);
        }
        // The first quote of a doubled one belongs to the text.
        append(&mut text, &inner[copied..next]);
        next += 1;
        copied = next;
    }
}

/// Appends without copying if `text` is empty.
fn append<'a>(text: &mut Cow<'a, [u8]>, bytes: &'a [u8]) {
    match text.is_empty() {
        true => *text = Cow::Borrowed(bytes),
        false if bytes.is_empty() => {}
        false => text.to_mut().extend_from_slice(bytes),
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

    /// Offset, first line and cells of each record; the cells are `None` for a skipped record.
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
                        let text = |cell: CsvCell| String::from_utf8_lossy(&cell.text).into_owned();
                        let cells = cells(record.text, b',').map(text).collect();
                        out.push((start + record.range.start as u64, line + record.line, Some(cells)));
                    }
                    line += count_newlines(bytes);
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
    fn unclosed_quotes_are_refused_with_their_line() {
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
    fn a_partial_byte_order_mark_is_text() {
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
        fn chunk_and_block_sizes_do_not_change_the_records(
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
        fn chunk_sizes_do_not_change_how_any_bytes_are_cut(
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
