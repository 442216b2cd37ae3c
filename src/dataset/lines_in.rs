//! JSON lines, OpenAI batch lines and plain text: scanned once at planning, then read a byte range at a time.
//!
//! A blank line is no row (in plain text it is one). A byte order mark at the file's start is skipped, `\r\n` ends a
//! line like `\n`, and the last line needs no end. A line that cannot be read (bad UTF-8, no JSON object, nested more
//! than 128 deep, longer than [`LINE_BYTES_MAX`]) is a row that says so.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use futures::stream::BoxStream;
use futures::{Stream, StreamExt, TryStreamExt, stream};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use super::error::DatasetError;
use super::json_cost::json_cost;
use super::kinds::{KEYS_MAX, Kinds, LineKinds};
use super::lines::{LINE_BYTES_MAX, LineCutter, Piece, is_blank, lines_of, strip_bom};
use super::pinned::{PinnedFile, hex};
use super::plan::Format;
use super::row_memory::{ENTRY_BYTES, ROW_BYTES_MAX, too_large};

/// The one column of plain text.
pub const TEXT_COLUMN: &str = "text";

/// What a block of lines holds, for planning.
#[derive(Debug, Default)]
pub struct BlockScan {
    /// Each row's place in the file.
    pub rows: Vec<Range<u64>>,
    /// Lines, blank ones included.
    pub lines: u64,
    /// Row of this block that each hash of a `custom_id` lies in, with its line in this block.
    pub custom_ids: Vec<(u128, u64)>,
    pub kinds: BTreeMap<String, Kinds>,
}

/// Hashes `custom_id`s of a whole job: 128 bits, keyed, so that two different ids never meet in practice.
#[derive(Debug, Clone, Default)]
pub struct IdHasher(RandomState, RandomState);

impl IdHasher {
    fn hash(&self, id: &str) -> u128 {
        (u128::from(self.0.hash_one(id)) << 64) | u128::from(self.1.hash_one(id))
    }
}

/// Finds `custom_id`s that two lines share. Holds about 40 bytes a row.
#[derive(Debug, Default)]
pub struct IdCheck {
    seen: HashMap<u128, (u32, u64)>,
}

impl IdCheck {
    /// Adds an id at (input, 0-based line); answers where it was before.
    pub fn add(&mut self, hash: u128, input: u32, line: u64) -> Option<(u32, u64)> {
        match self.seen.entry(hash) {
            Entry::Occupied(entry) => Some(*entry.get()),
            Entry::Vacant(entry) => {
                entry.insert((input, line));
                None
            }
        }
    }
}

/// Hashes a file's bytes as they pass by on their way to be scanned.
#[derive(Debug, Clone, Default)]
pub struct LinesHash(Arc<Mutex<Sha256>>);

impl LinesHash {
    fn add(&self, bytes: &[u8]) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).update(bytes);
    }

    /// Of all bytes that came, SHA-256 in lower-case hex.
    pub fn finish(&self) -> String {
        hex(self.0.lock().unwrap_or_else(PoisonError::into_inner).clone())
    }
}

/// Scans a file's lines in order, a block at a time, several blocks at once; each comes with what it was made from.
pub fn scan(
    file: &PinnedFile,
    format: Format,
    hasher: IdHasher,
    hash: &LinesHash,
) -> impl Stream<Item = Result<(Piece, BlockScan), DatasetError>> + use<> {
    let at_once = std::thread::available_parallelism().map_or(2, usize::from) + 1;
    let name = file.name.clone();
    pieces(file.clone(), 0..file.size, Some(hash.clone()))
        .map(move |piece| {
            let (hasher, name) = (hasher.clone(), name.clone());
            async move {
                let piece = piece?;
                tokio::task::spawn_blocking(move || (piece.clone(), scan_piece(piece, format, &hasher)))
                    .await
                    .map_err(|e| DatasetError::unreadable(&name, e))
            }
        })
        .buffered(at_once)
}

/// The pieces of a byte range that begins with a line.
fn pieces(
    file: PinnedFile,
    range: Range<u64>,
    hash: Option<LinesHash>,
) -> BoxStream<'static, Result<Piece, DatasetError>> {
    let start = range.start;
    stream::once(async move { file.stream(range).await })
        .try_flatten()
        .inspect_ok(move |bytes| {
            if let Some(hash) = &hash {
                hash.add(bytes);
            }
        })
        .map(Some)
        .chain(stream::once(async { None }))
        .scan(Some(LineCutter::new(start)), |cutter, bytes| {
            let mut out = Vec::new();
            let result = match bytes {
                Some(Ok(bytes)) => {
                    if let Some(cutter) = cutter {
                        cutter.push(&bytes, &mut out);
                    }
                    Ok(out)
                }
                Some(Err(e)) => {
                    *cutter = None;
                    Err(e)
                }
                None => {
                    if let Some(cutter) = cutter.take() {
                        cutter.finish(&mut out);
                    }
                    Ok(out)
                }
            };
            futures::future::ready(Some(result))
        })
        .map_ok(|pieces| stream::iter(pieces.into_iter().map(Ok)))
        .try_flatten()
        .boxed()
}

/// Pure: what one piece holds.
pub fn scan_piece(piece: Piece, format: Format, hasher: &IdHasher) -> BlockScan {
    let mut scan = BlockScan::default();
    let (start, bytes) = match piece {
        Piece::TooLong { start, end } => {
            scan.lines = 1;
            scan.rows.push(start..end);
            return scan;
        }
        Piece::Lines { start, bytes } => (start, bytes),
    };
    for (place, line) in lines_of(&bytes) {
        let number = scan.lines;
        scan.lines += 1;
        let row = start + place.start as u64..start + place.end as u64;
        let line = if row.start == 0 { strip_bom(line) } else { line };
        if format == Format::Text {
            // A file that is nothing but a byte order mark has no line.
            if !line.is_empty() || bytes[place].ends_with(b"\n") {
                scan.rows.push(row);
            }
            continue;
        }
        if is_blank(line) {
            continue;
        }
        scan.rows.push(row);
        if is_too_long(&bytes[place]) {
            continue;
        }
        // A line that is not JSON ends as an errored row when it is read; it has no kinds.
        let Ok(found) = serde_json::from_slice::<LineKinds>(line) else {
            continue;
        };
        if format == Format::OpenaiBatch
            && let Some(id) = &found.custom_id
        {
            scan.custom_ids.push((hasher.hash(id), number));
        }
        merge_kinds(&mut scan.kinds, found.kinds);
    }
    scan
}

/// Adds `more` to `kinds`, up to [`KEYS_MAX`] keys.
pub fn merge_kinds(kinds: &mut BTreeMap<String, Kinds>, more: BTreeMap<String, Kinds>) {
    for (key, seen) in more {
        if kinds.len() < KEYS_MAX || kinds.contains_key(&key) {
            let entry = kinds.entry(key).or_default();
            *entry = entry.with(seen);
        }
    }
}

fn is_too_long(line_with_end: &[u8]) -> bool {
    line_with_end.strip_suffix(b"\n").unwrap_or(line_with_end).len() > LINE_BYTES_MAX
}

/// Rows of one piece of lines.
#[derive(Debug, Default)]
pub struct LineRows {
    /// The fields of each, or one line that says why there are none.
    pub rows: Vec<Result<Map<String, Value>, String>>,
    /// The most that they take in memory.
    pub bytes: u64,
    /// Where the piece ends in the file.
    pub end: u64,
}

/// Reads the rows of a byte range, which begins with row `first_row` of the file, piece by piece; those outside of `wanted` only to count them.
pub fn read(
    file: &PinnedFile,
    format: Format,
    range: Range<u64>,
    first_row: u64,
    wanted: Vec<Range<u64>>,
) -> BoxStream<'static, Result<LineRows, DatasetError>> {
    let (name, wanted) = (file.name.clone(), Arc::new(wanted));
    let pieces = pieces(file.clone(), range, None);
    stream::try_unfold((pieces, first_row), move |(mut pieces, at)| {
        let (name, wanted) = (name.clone(), wanted.clone());
        async move {
            let Some(piece) = pieces.try_next().await? else {
                return Ok(None);
            };
            let of = name.clone();
            let parsed = tokio::task::spawn_blocking(move || number_rows(&piece, format, at, &wanted, &of));
            let read = parsed.await.map_err(|e| DatasetError::unreadable(&name, e))?;
            let next = at + read.rows.len() as u64;
            Ok(Some((read, (pieces, next))))
        }
    })
    .boxed()
}

/// The rows of a piece whose first one is row `first`; errors name them.
fn number_rows(piece: &Piece, format: Format, first: u64, wanted: &[Range<u64>], name: &str) -> LineRows {
    let mut read = parse_rows(piece, format, |n| {
        let row = first + n;
        wanted.iter().any(|range| range.contains(&row))
    });
    for (row, number) in read.rows.iter_mut().zip(first..) {
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
        Piece::TooLong { start, end } => LineRows {
            rows: vec![Err(too_long(end - start))],
            bytes: 0,
            end: *end,
        },
        Piece::Lines { start, bytes } => parse_lines(*start, bytes, format, is_wanted),
    }
}

fn parse_lines(start: u64, bytes: &Bytes, format: Format, is_wanted: impl Fn(u64) -> bool) -> LineRows {
    let mut read = LineRows {
        end: start + bytes.len() as u64,
        ..LineRows::default()
    };
    for (place, line) in lines_of(bytes) {
        let line = if start == 0 && place.start == 0 {
            strip_bom(line)
        } else {
            line
        };
        let whole = &bytes[place];
        let is_row = match format {
            Format::Text => !line.is_empty() || whole.ends_with(b"\n"),
            _ => !is_blank(line),
        };
        if !is_row {
            continue;
        }
        let row = match format {
            _ if is_too_long(whole) => Err(too_long(whole.len() as u64)),
            _ if !is_wanted(read.rows.len() as u64) => Err("it was not to be read".into()),
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

fn too_long(bytes: u64) -> String {
    format!("a line of {bytes} bytes, more than {LINE_BYTES_MAX}")
}

fn utf8(line: &[u8]) -> Result<&str, String> {
    std::str::from_utf8(line).map_err(|e| format!("not UTF-8 at byte {} of the line", e.valid_up_to() + 1))
}

/// One line's object.
pub fn parse_object(line: &[u8], format: Format) -> Result<Map<String, Value>, String> {
    let text = utf8(line)?;
    if !text.trim_start().starts_with('{') {
        return Err("not a JSON object".into());
    }
    let object: Map<String, Value> = serde_json::from_str(text).map_err(|e| {
        let what = e.to_string();
        let what = what.split(" at line ").next().unwrap_or_default();
        format!("not JSON: {what} at byte {} of the line", e.column())
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
    fn each_bad_line_is_a_row_that_says_why() {
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
    fn text_has_a_row_a_line() {
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
            for (place, row) in scan.rows.iter().zip(rows) {
                let bytes = Bytes::copy_from_slice(&text.as_bytes()[place.start as usize..place.end as usize]);
                let alone = parse_piece(&Piece::Lines { start: place.start, bytes }, format);
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
