//! Reads JSON lines, OpenAI batch lines, plain text and CSV: planning scans each file once, then
//! shards are read by byte range.
//!
//! A blank line is skipped, except in plain text, where it is a row. A byte order mark at the
//! file's start is skipped, `\r\n` ends a line like `\n`, and the last line needs no line end. An
//! unreadable line (bad UTF-8, no JSON object, nested deeper than 128, longer than
//! [`LINE_BYTES_MAX`]) becomes a row with an error. For CSV, see [`crate::dataset::csv::reader`].

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use arrow::array::{ArrayRef, RecordBatch, RecordBatchOptions};
use arrow::datatypes::SchemaRef;
use bytes::Bytes;
use futures::stream::BoxStream;
use futures::{Stream, StreamExt, TryStreamExt, stream};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use super::cutter::{LINE_BYTES_MAX, LineCutter, Piece, is_blank, lines_of, strip_bom};
use super::json_cost::json_cost;
use super::text_file::TextFile;
use crate::dataset::csv;
use crate::dataset::csv::layout::CsvTable;
use crate::dataset::csv::reader::CsvRowReader;
use crate::dataset::csv::records::CsvCutter;
use crate::dataset::error::DatasetError;
use crate::dataset::kinds;
use crate::dataset::kinds::{KEYS_MAX, Kinds, LineKinds};
use crate::dataset::plan::Format;
use crate::dataset::row_memory::{ENTRY_BYTES, ROW_BYTES_MAX, too_large};
use crate::dataset::store::pinned_file::hex;

/// The one column of plain text.
pub const TEXT_COLUMN: &str = "text";

/// Maximum decompressed length of a line that is skipped as too long, since a few compressed bytes
/// can decompress to an endless line.
const SKIPPED_LINE_BYTES_MAX: u64 = 256 << 20;

/// Planning's scan of a block of lines.
#[derive(Debug, Default)]
pub struct BlockScan {
    pub rows: Vec<RowLocation>,
    /// Number of lines, including blank ones.
    pub lines: u64,
    /// Hashes of the `custom_id`s, each with its 0-based line in this block.
    pub custom_ids: Vec<(u128, u64)>,
    pub kinds: BTreeMap<String, Kinds>,
}

impl BlockScan {
    /// The scan of one row that is too long to be read.
    pub fn of_long_row(bytes: Range<u64>, lines: u64) -> BlockScan {
        BlockScan {
            rows: vec![RowLocation { bytes, line: 0 }],
            lines,
            ..BlockScan::default()
        }
    }
}

/// Location of a row in its file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowLocation {
    /// Byte range in the decompressed file.
    pub bytes: Range<u64>,
    /// Number of the block's lines before the row.
    pub line: u64,
}

/// Hashes the `custom_id`s of a whole job to 128 bits, so that collisions do not happen in
/// practice. The keys are random, so that an input cannot provoke collisions either.
#[derive(Debug, Clone, Default)]
pub struct IdHasher(RandomState, RandomState);

impl IdHasher {
    fn hash(&self, id: &str) -> u128 {
        (u128::from(self.0.hash_one(id)) << 64) | u128::from(self.1.hash_one(id))
    }
}

/// Finds duplicate `custom_id`s. Takes about 40 bytes per row.
#[derive(Debug, Default)]
pub struct DuplicateIds {
    /// The input and the 0-based line of each hash.
    seen: HashMap<u128, (u32, u64)>,
}

impl DuplicateIds {
    /// Adds the hash of the id at `input` and the 0-based `line`. If the id has been added before,
    /// returns the earlier input and line.
    pub fn add(&mut self, hash: u128, input: u32, line: u64) -> Option<(u32, u64)> {
        match self.seen.entry(hash) {
            Entry::Occupied(entry) => Some(*entry.get()),
            Entry::Vacant(entry) => {
                entry.insert((input, line));
                None
            }
        }
    }

    /// Forgets the ids of an input.
    pub fn forget(&mut self, input: u32) {
        self.seen.retain(|_, (seen_in, _)| *seen_in != input);
    }
}

/// Hashes a file's stored bytes while planning scans the file.
#[derive(Debug, Clone, Default)]
pub struct StoredHash(Arc<Mutex<Sha256>>);

impl StoredHash {
    pub(crate) fn add(&self, bytes: &[u8]) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).update(bytes);
    }

    /// SHA-256 of all bytes, in lower-case hex.
    pub fn finish(&self) -> String {
        hex(self.0.lock().unwrap_or_else(PoisonError::into_inner).clone())
    }
}

/// How planning scans lines.
#[derive(Debug, Clone)]
pub enum Scanner {
    Lines(Format, IdHasher),
    Csv { table: Arc<CsvTable>, has_header: bool },
}

impl Scanner {
    /// Scans one piece.
    pub fn scan(&self, piece: Piece) -> BlockScan {
        match self {
            Scanner::Lines(format, hasher) => scan_piece(piece, *format, hasher),
            Scanner::Csv { table, has_header } => csv::reader::scan_piece(piece, table, *has_header),
        }
    }

    fn cutter(&self) -> Cutter {
        match self {
            Scanner::Lines(..) => Cutter::Lines(LineCutter::new(0)),
            Scanner::Csv { table, .. } => Cutter::Csv(CsvCutter::new(0, 1, table.delimiter_byte())),
        }
    }
}

/// Scans a file's lines, several pieces in parallel. Returns the pieces in order, each with its
/// scan.
pub fn scan(
    text: &TextFile,
    scanner: Scanner,
    hash: &StoredHash,
) -> impl Stream<Item = Result<(Piece, BlockScan), DatasetError>> + use<> {
    let parallel_scans = std::thread::available_parallelism().map_or(2, usize::from) + 1;
    let name = text.file.name.clone();
    cut_pieces(text, text.read_all(Some(hash.clone())), scanner.cutter())
        .map(move |piece| {
            let (scanner, name) = (scanner.clone(), name.clone());
            async move {
                let piece = piece?;
                tokio::task::spawn_blocking(move || (piece.clone(), scanner.scan(piece)))
                    .await
                    .map_err(|e| DatasetError::unreadable(&name, e))
            }
        })
        .buffered(parallel_scans)
}

/// Cuts a byte stream into pieces of whole rows.
pub(crate) enum Cutter {
    Lines(LineCutter),
    Csv(CsvCutter),
}

impl Cutter {
    fn push(&mut self, bytes: &[u8], out: &mut Vec<Piece>) -> Result<(), String> {
        match self {
            Cutter::Lines(cutter) => {
                cutter.push(bytes, out);
                Ok(())
            }
            Cutter::Csv(cutter) => cutter.push(bytes, out),
        }
    }

    /// Bytes of the long line that is being skipped.
    fn skipped_bytes(&self) -> u64 {
        match self {
            Cutter::Lines(cutter) => cutter.skipped_bytes(),
            Cutter::Csv(cutter) => cutter.skipped_bytes(),
        }
    }

    fn finish(self, out: &mut Vec<Piece>) -> Result<(), String> {
        match self {
            Cutter::Lines(cutter) => {
                cutter.finish(out);
                Ok(())
            }
            Cutter::Csv(cutter) => cutter.finish(out),
        }
    }
}

/// Cuts a stream of the file's bytes into pieces; the stream begins at the start of a line.
pub(crate) fn cut_pieces(
    text: &TextFile,
    bytes: BoxStream<'static, Result<Bytes, DatasetError>>,
    cutter: Cutter,
) -> BoxStream<'static, Result<Piece, DatasetError>> {
    let name = text.file.name.clone();
    let skipped_max = text.codec.map_or(u64::MAX, |_| SKIPPED_LINE_BYTES_MAX);
    bytes
        .map(Some)
        .chain(stream::once(async { None }))
        .scan(Some(cutter), move |cutter, bytes| {
            let mut out = Vec::new();
            let cut = match bytes {
                Some(Ok(bytes)) => match cutter {
                    Some(cutter) => cutter.push(&bytes, &mut out).and_then(|()| {
                        if cutter.skipped_bytes() > skipped_max {
                            Err(format!("decompressed, it has a line of more than {skipped_max} bytes"))
                        } else {
                            Ok(())
                        }
                    }),
                    None => Ok(()),
                },
                Some(Err(e)) => {
                    *cutter = None;
                    return futures::future::ready(Some(Err(e)));
                }
                None => cutter.take().map_or(Ok(()), |cutter| cutter.finish(&mut out)),
            };
            let cut = cut.map_err(|why| DatasetError::unreadable(&name, why));
            if cut.is_err() {
                *cutter = None;
            }
            futures::future::ready(Some(cut.map(|()| out)))
        })
        .map_ok(|pieces| stream::iter(pieces.into_iter().map(Ok)))
        .try_flatten()
        .boxed()
}

/// Pure: scans one piece.
pub fn scan_piece(piece: Piece, format: Format, hasher: &IdHasher) -> BlockScan {
    let (start, bytes) = match piece {
        Piece::TooLong { start, end, lines } => return BlockScan::of_long_row(start..end, lines),
        Piece::Lines { start, bytes } => (start, bytes),
    };
    let mut scan = BlockScan::default();
    for (range, line) in lines_of(&bytes) {
        let line_number = scan.lines;
        scan.lines += 1;
        let row = RowLocation {
            bytes: start + range.start as u64..start + range.end as u64,
            line: line_number,
        };
        let line = if row.bytes.start == 0 { strip_bom(line) } else { line };
        if format == Format::Text {
            // A file that holds only a byte order mark has no line.
            if !line.is_empty() || bytes[range].ends_with(b"\n") {
                scan.rows.push(row);
            }
            continue;
        }
        if is_blank(line) {
            continue;
        }
        scan.rows.push(row);
        if is_too_long(&bytes[range]) {
            continue;
        }
        // A malformed line counts as a row without kinds, and gets its error on reading.
        let Ok(fields) = serde_json::from_slice::<LineKinds>(line) else {
            continue;
        };
        if format == Format::OpenaiBatch
            && let Some(id) = &fields.custom_id
        {
            scan.custom_ids.push((hasher.hash(id), line_number));
        }
        merge_kinds(&mut scan.kinds, fields.kinds);
    }
    scan
}

/// Adds `new` to `kinds`, up to [`KEYS_MAX`] keys.
pub fn merge_kinds(kinds: &mut BTreeMap<String, Kinds>, new: BTreeMap<String, Kinds>) {
    for (key, new_kinds) in new {
        if kinds.len() < KEYS_MAX || kinds.contains_key(&key) {
            let entry = kinds.entry(key).or_default();
            *entry = entry.union(new_kinds);
        }
    }
}

pub(crate) fn is_too_long(line_with_end: &[u8]) -> bool {
    line_with_end.strip_suffix(b"\n").unwrap_or(line_with_end).len() > LINE_BYTES_MAX
}

/// The fields of each row, or one line with the reason why the row is unreadable.
pub type Rows = Vec<Result<Map<String, Value>, String>>;

/// Rows of one piece of lines.
#[derive(Debug, Default)]
pub struct LineRows {
    pub rows: Rows,
    /// The readable fields of rows with an unreadable field, by index in `rows`.
    pub partial_rows: Vec<(usize, Map<String, Value>)>,
    /// Upper bound of the rows' memory.
    pub bytes: u64,
    /// End offset of the piece in the file.
    pub end: u64,
    /// Number of lines in the piece (CSV only).
    pub lines: u64,
}

impl LineRows {
    /// The shown fields of each row (all fields if `columns` is `None`), and the carried columns.
    pub fn into_columns(self, carry: SchemaRef, columns: Option<Vec<String>>) -> Result<(Rows, RecordBatch), String> {
        let (mut objects, errors): (Vec<_>, Vec<_>) = self
            .rows
            .into_iter()
            .map(|row| match row {
                Ok(object) => (Some(object), None),
                Err(why) => (None, Some(why)),
            })
            .unzip();
        for (index, row) in self.partial_rows {
            objects[index] = Some(row);
        }
        let carried = carry.fields().iter().map(|field| kinds::column(field, &objects));
        let carried = carried.collect::<Result<Vec<ArrayRef>, String>>()?;
        let options = RecordBatchOptions::new().with_row_count(Some(objects.len()));
        let carry = RecordBatch::try_new_with_options(carry, carried, &options).map_err(|e| e.to_string())?;
        let rows = objects
            .into_iter()
            .zip(errors)
            .map(|(object, error)| match (object, error) {
                (Some(mut object), None) => {
                    if let Some(columns) = &columns {
                        object.retain(|key, _| columns.contains(key));
                        // A key that only other lines have is null, so that a template can use it.
                        for column in columns {
                            object.entry(column.clone()).or_insert(Value::Null);
                        }
                    }
                    Ok(object)
                }
                (_, error) => Err(error.unwrap_or_default()),
            });
        Ok((rows.collect(), carry))
    }
}

/// How lines become rows.
#[derive(Debug, Clone)]
pub enum LineReader {
    Lines(Format),
    Csv(Arc<CsvRowReader>),
}

impl LineReader {
    fn cutter(&self, position: &LinesPosition) -> Cutter {
        let start = position.bytes.start;
        match self {
            LineReader::Lines(_) => Cutter::Lines(LineCutter::new(start)),
            LineReader::Csv(csv) => {
                let delimiter = csv.table().delimiter_byte();
                Cutter::Csv(CsvCutter::new(start, position.line, delimiter))
            }
        }
    }

    /// The rows of a piece whose first line is number `line`. `is_wanted` gets a row's index in the
    /// piece.
    fn rows(&self, piece: &Piece, line: u64, is_wanted: impl Fn(u64) -> bool) -> LineRows {
        match self {
            LineReader::Lines(format) => parse_rows(piece, *format, is_wanted),
            LineReader::Csv(csv) => csv.rows(piece, line, is_wanted),
        }
    }
}

/// The lines that are still to be read.
#[derive(Debug, Clone)]
pub struct LinesPosition {
    /// Bytes that hold these lines, in the decompressed file.
    pub bytes: Range<u64>,
    /// The first line's row number in the file.
    pub row: u64,
    /// The first line's number, from 1 (CSV only).
    pub line: u64,
}

impl LinesPosition {
    /// The position after these rows.
    pub fn after(&self, read: &LineRows) -> LinesPosition {
        LinesPosition {
            bytes: read.end..self.bytes.end,
            row: self.row + read.rows.len() as u64,
            line: self.line + read.lines,
        }
    }
}

/// Reads lines piece by piece. `wanted`: row ranges of the file; other rows become rows with the
/// error `NOT_READ`.
pub fn read(
    text: &TextFile,
    reader: LineReader,
    position: LinesPosition,
    wanted: Vec<Range<u64>>,
) -> BoxStream<'static, Result<LineRows, DatasetError>> {
    let (name, wanted) = (text.file.name.clone(), Arc::new(wanted));
    let bytes = text.read_range(position.bytes.clone(), None);
    let pieces = cut_pieces(text, bytes, reader.cutter(&position));
    stream::try_unfold((pieces, position), move |(mut pieces, position)| {
        let (name, wanted, reader, start) = (name.clone(), wanted.clone(), reader.clone(), position.clone());
        async move {
            let Some(piece) = pieces.try_next().await? else {
                return Ok(None);
            };
            let file = name.clone();
            let parsed = tokio::task::spawn_blocking(move || parse_wanted(&piece, &reader, &start, &wanted, &file));
            let read = parsed.await.map_err(|e| DatasetError::unreadable(&name, e))?;
            let next = position.after(&read);
            Ok(Some((read, (pieces, next))))
        }
    })
    .boxed()
}

/// The rows of a piece that begins at `start`; errors name their row or line.
fn parse_wanted(
    piece: &Piece,
    reader: &LineReader,
    start: &LinesPosition,
    wanted: &[Range<u64>],
    name: &str,
) -> LineRows {
    let mut read = reader.rows(piece, start.line, |index| {
        let row = start.row + index;
        wanted
            .get(wanted.partition_point(|range| range.end <= row))
            .is_some_and(|range| range.contains(&row))
    });
    for (row, number) in read.rows.iter_mut().zip(start.row..) {
        if let Err(why) = row {
            *why = format!("row {number} of `{name}`: {why}");
        }
    }
    read
}

/// Pure: the rows of one piece.
pub fn parse_piece(piece: &Piece, format: Format) -> Vec<Result<Map<String, Value>, String>> {
    parse_rows(piece, format, |_| true).rows
}

fn parse_rows(piece: &Piece, format: Format, is_wanted: impl Fn(u64) -> bool) -> LineRows {
    match piece {
        Piece::TooLong { start, end, .. } => LineRows {
            rows: vec![Err(too_long(end - start))],
            end: *end,
            ..LineRows::default()
        },
        Piece::Lines { start, bytes } => parse_lines(*start, bytes, format, is_wanted),
    }
}

fn parse_lines(start: u64, bytes: &Bytes, format: Format, is_wanted: impl Fn(u64) -> bool) -> LineRows {
    let mut read = LineRows {
        end: start + bytes.len() as u64,
        ..LineRows::default()
    };
    for (range, line) in lines_of(bytes) {
        let line = if start == 0 && range.start == 0 {
            strip_bom(line)
        } else {
            line
        };
        let line_with_end = &bytes[range];
        let is_row = match format {
            Format::Text => !line.is_empty() || line_with_end.ends_with(b"\n"),
            _ => !is_blank(line),
        };
        if !is_row {
            continue;
        }
        let row = match format {
            _ if is_too_long(line_with_end) => Err(too_long(line_with_end.len() as u64)),
            _ if !is_wanted(read.rows.len() as u64) => Err(NOT_READ.into()),
            Format::Text => {
                read.bytes += line.len() as u64 + ENTRY_BYTES;
                utf8(line).map(|text| [(TEXT_COLUMN.to_string(), text.into())].into_iter().collect())
            }
            _ => match json_cost(line) {
                cost if cost > ROW_BYTES_MAX => Err(too_large(cost)),
                cost => {
                    read.bytes += cost;
                    parse_object(line, format)
                }
            },
        };
        read.rows.push(row);
    }
    read
}

/// The error of a row outside of the wanted ranges.
pub(crate) const NOT_READ: &str = "it was not to be read";

pub(crate) fn too_long(bytes: u64) -> String {
    format!("a line of {bytes} bytes, more than {LINE_BYTES_MAX}")
}

fn utf8(line: &[u8]) -> Result<&str, String> {
    std::str::from_utf8(line).map_err(|e| format!("not UTF-8 at byte {} of the line", e.valid_up_to() + 1))
}

/// Parses one line as a JSON object, and checks the fields that its format requires.
pub fn parse_object(line: &[u8], format: Format) -> Result<Map<String, Value>, String> {
    let text = utf8(line)?;
    if !text.trim_start().starts_with('{') {
        return Err("not a JSON object".into());
    }
    let object: Map<String, Value> = serde_json::from_str(text).map_err(|e| {
        let why = e.to_string();
        let why = why.split(" at line ").next().unwrap_or_default();
        format!("not JSON: {why} at byte {} of the line", e.column())
    })?;
    if object.len() > KEYS_MAX {
        return Err(format!("an object with {} keys, more than {KEYS_MAX}", object.len()));
    }
    if format == Format::OpenaiBatch {
        for key in ["custom_id", "method", "url"] {
            match object.get(key) {
                Some(Value::String(_)) => {}
                Some(_) => return Err(format!("`{key}` is not a string")),
                None => return Err(format!("no `{key}`")),
            }
        }
        match object.get("body") {
            Some(Value::Object(_)) => {}
            Some(_) => return Err("`body` is not an object".into()),
            None => return Err("no `body`".into()),
        }
    }
    Ok(object)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn block(text: &[u8]) -> Piece {
        Piece::Lines {
            start: 0,
            bytes: Bytes::copy_from_slice(text),
        }
    }

    fn parse(text: &[u8], format: Format) -> Vec<Result<String, String>> {
        parse_piece(&block(text), format)
            .into_iter()
            .map(|r| r.map(|o| Value::Object(o).to_string()))
            .collect()
    }

    #[test]
    fn bad_lines_are_rows_with_an_error() {
        let text = b"\xef\xbb\xbf{\"a\":1}\r\n\n  \t\r\n{\"a\":\n[1]\n\"x\"\n{\"a\":\"\xff\"}\n{\"a\":1} x\n{\"b\":2}";
        assert_eq!(
            parse(text, Format::Jsonl),
            [
                Ok(r#"{"a":1}"#.into()),
                Err("not JSON: EOF while parsing a value at byte 5 of the line".into()),
                Err("not a JSON object".into()),
                Err("not a JSON object".into()),
                Err("not UTF-8 at byte 7 of the line".into()),
                Err("not JSON: trailing characters at byte 9 of the line".into()),
                Ok(r#"{"b":2}"#.into()),
            ]
        );
        let deep = format!("{{\"a\":{}{}}}", "[".repeat(200), "]".repeat(200));
        assert!(
            parse(deep.as_bytes(), Format::Jsonl)[0]
                .as_ref()
                .unwrap_err()
                .contains("recursion limit")
        );
        let long = [b"{\"a\":\"".to_vec(), vec![b'x'; LINE_BYTES_MAX], b"\"}\n{}".to_vec()].concat();
        let rows = parse(&long, Format::Jsonl);
        assert_eq!(rows.len(), 2);
        assert!(
            rows[0].as_ref().unwrap_err().ends_with("bytes, more than 16777216"),
            "{rows:?}"
        );
        assert_eq!(rows[1], Ok("{}".into()));
    }

    #[test]
    fn batch_lines_need_their_fields() {
        let good = r#"{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{}}"#;
        let line = |from: &str, to: &str| parse(good.replace(from, to).as_bytes(), Format::OpenaiBatch).remove(0);
        assert!(line("x", "x").is_ok());
        assert_eq!(line("\"a\"", "7"), Err("`custom_id` is not a string".into()));
        assert_eq!(line("custom_id", "id"), Err("no `custom_id`".into()));
        assert_eq!(line("{}", "[]"), Err("`body` is not an object".into()));
    }

    #[test]
    fn each_line_of_text_is_a_row() {
        assert_eq!(
            parse(b"\xef\xbb\xbfa \"q\"\r\n\n b", Format::Text),
            [
                Ok(r#"{"text":"a \"q\""}"#.into()),
                Ok(r#"{"text":""}"#.into()),
                Ok(r#"{"text":" b"}"#.into()),
            ]
        );
        assert_eq!(parse(b"a\n", Format::Text).len(), 1);
        assert_eq!(parse(b"\xef\xbb\xbf", Format::Text).len(), 0);
        assert!(parse(b"\xffx", Format::Text)[0].is_err());
    }

    proptest! {
        #[test]
        fn scanning_and_reading_see_the_same_rows(
            lines in prop::collection::vec(prop::sample::select(vec![
                "{}", "{\"a\":1}", "", " ", "x", "{\"a\":\"\u{e4}\"}", "[1]", "\r", "{\"custom_id\":\"1\"}",
            ]), 0..20),
            bom: bool,
            ended: bool,
            format in prop::sample::select(vec![Format::Jsonl, Format::OpenaiBatch, Format::Text]),
        ) {
            let mut text = if bom { "\u{feff}".to_string() } else { String::new() };
            text += &lines.join("\n");
            if ended {
                text.push('\n');
            }
            let scan = scan_piece(block(text.as_bytes()), format, &IdHasher::default());
            let rows = parse_piece(&block(text.as_bytes()), format);
            prop_assert_eq!(scan.rows.len(), rows.len());
            // A row's own bytes, read alone, give that row.
            for (location, row) in scan.rows.iter().zip(rows) {
                let start = location.bytes.start;
                let bytes = Bytes::copy_from_slice(&text.as_bytes()[start as usize..location.bytes.end as usize]);
                let alone = parse_piece(&Piece::Lines { start, bytes }, format);
                prop_assert_eq!(alone, vec![row]);
            }
        }

        #[test]
        fn foreign_lines_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            for format in [Format::Jsonl, Format::OpenaiBatch, Format::Text] {
                let scan = scan_piece(block(&bytes), format, &IdHasher::default());
                prop_assert_eq!(scan.rows.len(), parse_piece(&block(&bytes), format).len());
            }
        }
    }
}
