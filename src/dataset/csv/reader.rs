//! CSV rows: the header, planning's scan of a block, and the values of a block's rows.
//!
//! The first record is the header, unless the job names the columns. An empty line is skipped,
//! except in a table of one column, where it is a row whose cell is null. A record that does not
//! fit the table becomes a row with an error. Such a record has the wrong number of cells, more
//! bytes than [`crate::dataset::lines::cutter::LINE_BYTES_MAX`], or an invalid cell (not UTF-8, with a zero byte, or
//! not of its column's type).

use std::collections::BTreeMap;
use std::sync::Arc;

use futures::TryStreamExt;
use serde_json::{Map, Value};

use super::layout::{CsvColumn, CsvOptions, CsvTable, CsvType, cell_kind, check_names};
use super::records::{Cell, CsvCutter, cells, newlines, records};
use crate::dataset::error::DatasetError;
use crate::dataset::kinds::{KEYS_MAX, Kinds};
use crate::dataset::lines::cutter::Piece;
use crate::dataset::lines::reader::{BlockScan, Cutter, LineRows, NOT_READ, RowPlace, is_too_long, pieces, too_long};
use crate::dataset::lines::text_file::TextFile;
use crate::dataset::row_memory::{ENTRY_BYTES, VALUE_BYTES};

/// Maximum characters of a cell that an error shows.
const SHOWN_CHARS: usize = 60;

/// The table at the start of `file`, with columns that have no types yet; `None` if the file is
/// empty.
async fn table_of(text: &TextFile, options: &CsvOptions) -> Result<Option<CsvTable>, DatasetError> {
    let delimiter = options.delimiter.unwrap_or_else(|| usual_delimiter(text));
    let cutter = Cutter::Csv(CsvCutter::new(0, 1, delimiter as u8));
    let refused = |why: String| DatasetError::unreadable(&text.file.name, format!("line 1: {why}"));
    let Some(piece) = pieces(text, text.all(None), cutter).try_next().await? else {
        return Ok(None);
    };
    let first = first_cells(&piece, delimiter as u8);
    let names = match (&options.columns, first) {
        (_, Ok(None)) => return Ok(None),
        (Some(given), Ok(Some(first))) if *given == first => {
            return Err(refused(
                "it has the names that `input.columns` gives; leave that out where files have a header".into(),
            ));
        }
        (Some(given), _) => given.clone(),
        (None, Err(why)) => return Err(refused(format!("the header: {why}"))),
        (None, Ok(Some(first))) => {
            header(first, options.delimiter.is_none()).map_err(|why| refused(format!("the header: {why}")))?
        }
    };
    let column = |name| CsvColumn {
        name,
        kind: CsvType::default(),
    };
    Ok(Some(CsvTable {
        delimiter,
        columns: names.into_iter().map(column).collect(),
    }))
}

/// The first record's cells, at most one more than a table may have; `None` if the file is empty
/// except for a byte order mark.
fn first_cells(piece: &Piece, delimiter: u8) -> Result<Option<Vec<String>>, String> {
    let bytes = match piece {
        Piece::TooLong { start, end, .. } => return Err(too_long(end - start)),
        Piece::Lines { bytes, .. } => bytes,
    };
    let Some(record) = records(bytes, 0, delimiter).next() else {
        return Ok(None);
    };
    if record.text.is_empty() {
        return if record.place.len() == bytes.len() && !bytes.ends_with(b"\n") {
            Ok(None)
        } else {
            Err("an empty line".into())
        };
    }
    if is_too_long(&bytes[record.place]) {
        return Err(too_long(record.text.len() as u64));
    }
    let cells = cells(record.text, delimiter).take(KEYS_MAX + 1).zip(1..);
    let text = |(cell, place): (Cell, usize)| match text_of(&cell) {
        Ok(text) => Ok(text.to_string()),
        Err(why) => Err(format!("cell {place}: {why}")),
    };
    cells.map(text).collect::<Result<_, _>>().map(Some)
}

fn usual_delimiter(text: &TextFile) -> char {
    if text.is_named(&["tsv", "tab"]) { '\t' } else { ',' }
}

/// The columns' names; an empty name is replaced by the column's position.
fn header(names: Vec<String>, is_usual: bool) -> Result<Vec<String>, String> {
    if let [one] = &names[..]
        && is_usual
        && let Some(other) = one.chars().find(|c| matches!(c, ';' | '\t' | '|' | ','))
    {
        return Err(format!(
            "it is one column, `{}`; say what its cells are separated by, as in `input.delimiter: {}`",
            shorten(one),
            serde_json::Value::from(other.to_string())
        ));
    }
    let named = names.into_iter().zip(1..).map(|(name, place)| {
        if name.is_empty() {
            format!("column_{place}")
        } else {
            name
        }
    });
    let names: Vec<String> = named.collect();
    let checked = check_names(names.iter().map(String::as_str));
    checked.map_err(|why| format!("it has {why}; rename them, or remove the header and give `input.columns`"))?;
    Ok(names)
}

/// Pure: scans one piece of the table's file. A header is not counted as a row.
pub fn scan_piece(piece: Piece, table: &CsvTable, has_header: bool) -> BlockScan {
    let (start, bytes) = match piece {
        Piece::TooLong { start, end, lines } => return BlockScan::of_long(start..end, lines),
        Piece::Lines { start, bytes } => (start, bytes),
    };
    let mut scan = BlockScan::default();
    let delimiter = table.delimiter_byte();
    let mut kinds = vec![Kinds::default(); table.columns.len()];
    for record in records(&bytes, start, delimiter) {
        let is_header = has_header && start == 0 && record.place.start == 0;
        if is_header || !is_row(record.text, table) {
            continue;
        }
        let whole = &bytes[record.place.clone()];
        scan.rows.push(RowPlace {
            bytes: start + record.place.start as u64..start + record.place.end as u64,
            line: record.line,
        });
        if is_too_long(whole) || cells(record.text, delimiter).take(kinds.len() + 1).count() != kinds.len() {
            continue;
        }
        for (kinds, cell) in kinds.iter_mut().zip(cells(record.text, delimiter)) {
            *kinds = kinds.with(cell_kind(&cell.text, cell.quoted));
        }
    }
    scan.lines = newlines(&bytes);
    let names = table.columns.iter().map(|column| column.name.clone());
    scan.kinds = names.zip(kinds).collect();
    scan
}

/// An empty line is a row only in a table of one column.
fn is_row(text: &[u8], table: &CsvTable) -> bool {
    !text.is_empty() || table.columns.len() == 1
}

/// A table, with the set of columns to read.
#[derive(Debug)]
pub struct CsvReading {
    table: CsvTable,
    is_read: Vec<bool>,
}

impl CsvReading {
    /// A reader of the columns for which `is_read` is true.
    pub fn new(table: CsvTable, is_read: impl Fn(&str) -> bool) -> CsvReading {
        CsvReading {
            is_read: table.columns.iter().map(|column| is_read(&column.name)).collect(),
            table,
        }
    }

    pub fn table(&self) -> &CsvTable {
        &self.table
    }

    /// Pure: the rows of a piece that begins on line `line` of its file.
    pub fn rows(&self, piece: &Piece, line: u64, is_wanted: impl Fn(u64) -> bool) -> LineRows {
        let (start, bytes) = match piece {
            Piece::TooLong { start, end, lines } => {
                return LineRows {
                    rows: vec![Err(format!("line {line}: {}", too_long(end - start)))],
                    end: *end,
                    lines: *lines,
                    ..LineRows::default()
                };
            }
            Piece::Lines { start, bytes } => (*start, bytes),
        };
        let mut read = LineRows {
            end: start + bytes.len() as u64,
            lines: newlines(bytes),
            ..LineRows::default()
        };
        for record in records(bytes, start, self.table.delimiter_byte()) {
            if !is_row(record.text, &self.table) {
                continue;
            }
            let whole = &bytes[record.place];
            let row = if is_too_long(whole) {
                Err(too_long(whole.len() as u64))
            } else if !is_wanted(read.rows.len() as u64) {
                Err(NOT_READ.into())
            } else {
                self.row(record.text, &mut read)
            };
            read.rows
                .push(row.map_err(|why| format!("line {}: {why}", line + record.line)));
        }
        read
    }

    /// The fields of a row. If a cell is unreadable, the other fields are kept in `read`, since
    /// they may be carried.
    fn row(&self, text: &[u8], read: &mut LineRows) -> Result<Map<String, Value>, String> {
        let columns = &self.table.columns;
        let found = cells(text, self.table.delimiter_byte()).count();
        if found != columns.len() {
            return Err(format!(
                "{} where the table has {} columns",
                counted(found),
                columns.len()
            ));
        }
        let mut row = Map::new();
        let mut wrong = None;
        let cells = cells(text, self.table.delimiter_byte());
        for ((column, cell), _) in columns
            .iter()
            .zip(cells)
            .zip(&self.is_read)
            .filter(|(_, is_read)| **is_read)
        {
            let value = text_of(&cell).and_then(|text| {
                let value = column.kind.value(text, cell.quoted);
                value.ok_or_else(|| format!("`{}` is no {}", shorten(text), column.kind.as_str()))
            });
            match value {
                Ok(value) => {
                    read.bytes += VALUE_BYTES + ENTRY_BYTES + (column.name.len() + cell.text.len()) as u64;
                    row.insert(column.name.clone(), value);
                }
                Err(why) => {
                    wrong.get_or_insert_with(|| format!("column `{}`: {why}", shorten(&column.name)));
                }
            }
        }
        match wrong {
            None => Ok(row),
            Some(why) => {
                read.kept.push((read.rows.len(), row));
                Err(why)
            }
        }
    }
}

fn counted(cells: usize) -> String {
    match cells {
        1 => "1 cell".into(),
        cells => format!("{cells} cells"),
    }
}

fn text_of<'a>(cell: &'a Cell<'_>) -> Result<&'a str, String> {
    let text = std::str::from_utf8(&cell.text);
    let text = text.map_err(|e| {
        format!(
            "not UTF-8 at byte {} of the cell; convert the file to UTF-8, as with `iconv -f LATIN1 -t UTF-8`",
            e.valid_up_to() + 1
        )
    })?;
    match text.find('\0') {
        Some(at) => Err(format!("a zero byte at byte {} of the cell", at + 1)),
        None => Ok(text),
    }
}

/// The beginning of a text, on one line.
fn shorten(text: &str) -> String {
    let mut shown = String::new();
    for (n, c) in text.chars().enumerate() {
        match c {
            _ if n == SHOWN_CHARS => return shown + "…",
            c if c.is_control() => shown.extend(c.escape_default()),
            c => shown.push(c),
        }
    }
    shown
}

/// The table that all files of a job must share.
#[derive(Debug, Default)]
pub struct OneTable {
    /// The table, with the name of the file that it was found in.
    first: Option<(String, Arc<CsvTable>)>,
}

impl OneTable {
    /// Whether some file had a table.
    pub fn is_found(&self) -> bool {
        self.first.is_some()
    }

    /// Records the first file's table, and checks that later files have the same; `None` if the
    /// file is empty.
    pub async fn of(&mut self, text: &TextFile, options: &CsvOptions) -> Result<Option<Arc<CsvTable>>, DatasetError> {
        let Some(table) = table_of(text, options).await? else {
            return Ok(None);
        };
        let (name, first) = match &self.first {
            None => {
                let first = Arc::new(table);
                self.first = Some((text.file.name.clone(), first.clone()));
                return Ok(Some(first));
            }
            Some((name, first)) => (name, first),
        };
        if **first == table {
            return Ok(Some(first.clone()));
        }
        let why = format!(
            "the inputs are no one table: `{name}` has {}, `{}` has {}; give them one header and one delimiter, or run them as separate jobs",
            in_words(first),
            text.file.name,
            in_words(&table)
        );
        Err(DatasetError::Refused(why))
    }

    /// The table with the types that hold over all files.
    pub fn typed(self, options: &CsvOptions, kinds: &BTreeMap<String, Kinds>) -> Option<CsvTable> {
        let (_, table) = self.first?;
        Some(CsvTable::clone(&table).typed(&options.types, kinds))
    }
}

fn in_words(table: &CsvTable) -> String {
    let names: Vec<String> = table
        .columns
        .iter()
        .take(12)
        .map(|c| format!("`{}`", shorten(&c.name)))
        .collect();
    let more = if table.columns.len() > names.len() { ", …" } else { "" };
    format!("the columns {}{more} between {:?}", names.join(", "), table.delimiter)
}
