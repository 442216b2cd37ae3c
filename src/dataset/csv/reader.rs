//! Reads the header of CSV files, scans blocks for planning, and parses the rows of blocks.
//!
//! The first record is the header, unless the job names the columns. An empty line is skipped,
//! except in a table of one column, where it is a row whose cell is null. A record becomes a row
//! with an error if it has the wrong number of cells, more bytes than
//! [`crate::dataset::lines::cutter::LINE_BYTES_MAX`], or an invalid cell: not UTF-8, with a zero
//! byte, or not of its column's type.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures::TryStreamExt;
use serde_json::{Map, Value};

use super::layout::{CsvColumn, CsvOptions, CsvTable, CsvType, cell_kind, check_names};
use super::records::{CsvCell, CsvCutter, cells, count_newlines, records};
use crate::dataset::error::DatasetError;
use crate::dataset::kinds::{KEYS_MAX, Kinds};
use crate::dataset::lines::cutter::Piece;
use crate::dataset::lines::reader::{
    BlockScan, Cutter, LineRows, NOT_READ, RowLocation, cut_pieces, is_too_long, too_long,
};
use crate::dataset::lines::text_file::TextFile;
use crate::dataset::row_memory::{ENTRY_BYTES, VALUE_BYTES};

/// Maximum characters of a cell that an error shows.
const SHOWN_CHARS_MAX: usize = 60;

/// The table of a file, from its first record; the columns have no types yet. `None` if the file is
/// empty.
async fn read_table(text: &TextFile, options: &CsvOptions) -> Result<Option<CsvTable>, DatasetError> {
    let delimiter = options.delimiter.unwrap_or_else(|| default_delimiter(text));
    let cutter = Cutter::Csv(CsvCutter::new(0, 1, delimiter as u8));
    let refused = |why: String| DatasetError::unreadable(&text.file.name, format!("line 1: {why}"));
    let Some(piece) = cut_pieces(text, text.read_all(None), cutter).try_next().await? else {
        return Ok(None);
    };
    let first_record = first_cells(&piece, delimiter as u8);
    let names = match (&options.columns, first_record) {
        (_, Ok(None)) => return Ok(None),
        (Some(job_columns), Ok(Some(header))) if *job_columns == header => {
            return Err(refused(
                "it has the names that `input.columns` gives; remove `input.columns` if the files have a header".into(),
            ));
        }
        (Some(job_columns), _) => job_columns.clone(),
        (None, Err(why)) => return Err(refused(format!("the header: {why}"))),
        (None, Ok(Some(header))) => {
            let names = column_names(header, options.delimiter.is_none());
            names.map_err(|why| refused(format!("the header: {why}")))?
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

/// The first record's cells, at most one more than a table may have; `None` if the file has at most
/// a byte order mark.
fn first_cells(piece: &Piece, delimiter: u8) -> Result<Option<Vec<String>>, String> {
    let bytes = match piece {
        Piece::TooLong { start, end, .. } => return Err(too_long(end - start)),
        Piece::Lines { bytes, .. } => bytes,
    };
    let Some(record) = records(bytes, 0, delimiter).next() else {
        return Ok(None);
    };
    if record.text.is_empty() {
        return if record.range.len() == bytes.len() && !bytes.ends_with(b"\n") {
            Ok(None)
        } else {
            Err("an empty line".into())
        };
    }
    if is_too_long(&bytes[record.range]) {
        return Err(too_long(record.text.len() as u64));
    }
    let cells = cells(record.text, delimiter).take(KEYS_MAX + 1).zip(1..);
    let text = |(cell, number): (CsvCell, usize)| match cell_text(&cell) {
        Ok(text) => Ok(text.to_string()),
        Err(why) => Err(format!("cell {number}: {why}")),
    };
    cells.map(text).collect::<Result<_, _>>().map(Some)
}

fn default_delimiter(text: &TextFile) -> char {
    if text.has_extension(&["tsv", "tab"]) { '\t' } else { ',' }
}

/// The column names for the header's cells: an empty cell gives `column_N`. A header of one cell
/// that holds another delimiter is refused if the delimiter is the default one.
fn column_names(header: Vec<String>, is_default_delimiter: bool) -> Result<Vec<String>, String> {
    if let [one] = &header[..]
        && is_default_delimiter
        && let Some(other) = one.chars().find(|c| matches!(c, ';' | '\t' | '|' | ','))
    {
        return Err(format!(
            "it is one column, `{}`; set the delimiter, for example `input.delimiter: {}`",
            shorten(one),
            serde_json::Value::from(other.to_string())
        ));
    }
    let names = header.into_iter().zip(1..).map(|(name, number)| {
        if name.is_empty() {
            format!("column_{number}")
        } else {
            name
        }
    });
    let names: Vec<String> = names.collect();
    let checked = check_names(names.iter().map(String::as_str));
    checked.map_err(|why| format!("it has {why}; rename them, or remove the header and give `input.columns`"))?;
    Ok(names)
}

/// Pure: scans one piece of a CSV file. The header is not counted as a row.
pub fn scan_piece(piece: Piece, table: &CsvTable, has_header: bool) -> BlockScan {
    let (start, bytes) = match piece {
        Piece::TooLong { start, end, lines } => return BlockScan::of_long_row(start..end, lines),
        Piece::Lines { start, bytes } => (start, bytes),
    };
    let mut scan = BlockScan::default();
    let delimiter = table.delimiter_byte();
    let mut kinds = vec![Kinds::default(); table.columns.len()];
    for record in records(&bytes, start, delimiter) {
        let is_header = has_header && start == 0 && record.range.start == 0;
        if is_header || !is_row(record.text, table) {
            continue;
        }
        scan.rows.push(RowLocation {
            bytes: start + record.range.start as u64..start + record.range.end as u64,
            line: record.line,
        });
        let cell_count = cells(record.text, delimiter).take(kinds.len() + 1).count();
        if is_too_long(&bytes[record.range]) || cell_count != kinds.len() {
            continue;
        }
        for (kinds, cell) in kinds.iter_mut().zip(cells(record.text, delimiter)) {
            *kinds = kinds.union(cell_kind(&cell.text, cell.is_quoted));
        }
    }
    scan.lines = count_newlines(&bytes);
    let names = table.columns.iter().map(|column| column.name.clone());
    scan.kinds = names.zip(kinds).collect();
    scan
}

/// Whether a record is a row. An empty line is a row only in a table of one column.
fn is_row(text: &[u8], table: &CsvTable) -> bool {
    !text.is_empty() || table.columns.len() == 1
}

/// Parses rows of a table; only some of the columns are read.
#[derive(Debug)]
pub struct CsvRowReader {
    table: CsvTable,
    /// Whether a column is read, by its index in the table.
    is_read: Vec<bool>,
}

impl CsvRowReader {
    /// A reader of the columns for which `is_read` is true.
    pub fn new(table: CsvTable, is_read: impl Fn(&str) -> bool) -> CsvRowReader {
        CsvRowReader {
            is_read: table.columns.iter().map(|column| is_read(&column.name)).collect(),
            table,
        }
    }

    pub fn table(&self) -> &CsvTable {
        &self.table
    }

    /// Pure: the rows of a piece that begins on line `line` of its file. `is_wanted` gets a row's
    /// index in the piece; other rows become rows with the error `NOT_READ`.
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
            lines: count_newlines(bytes),
            ..LineRows::default()
        };
        for record in records(bytes, start, self.table.delimiter_byte()) {
            if !is_row(record.text, &self.table) {
                continue;
            }
            let record_bytes = &bytes[record.range];
            let row = if is_too_long(record_bytes) {
                Err(too_long(record_bytes.len() as u64))
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

    /// The fields of a row. If a cell is unreadable, the other fields are added to
    /// `read.partial_rows`, since they may be carried.
    fn row(&self, text: &[u8], read: &mut LineRows) -> Result<Map<String, Value>, String> {
        let columns = &self.table.columns;
        let cell_count = cells(text, self.table.delimiter_byte()).count();
        if cell_count != columns.len() {
            return Err(format!(
                "{} where the table has {} columns",
                number_of_cells(cell_count),
                columns.len()
            ));
        }
        let mut row = Map::new();
        let mut first_error = None;
        let cells = cells(text, self.table.delimiter_byte());
        for ((column, cell), _) in columns
            .iter()
            .zip(cells)
            .zip(&self.is_read)
            .filter(|(_, is_read)| **is_read)
        {
            let value = cell_text(&cell).and_then(|text| {
                let value = column.kind.value(text, cell.is_quoted);
                value.ok_or_else(|| format!("`{}` is no {}", shorten(text), column.kind.as_str()))
            });
            match value {
                Ok(value) => {
                    read.bytes += VALUE_BYTES + ENTRY_BYTES + (column.name.len() + cell.text.len()) as u64;
                    row.insert(column.name.clone(), value);
                }
                Err(why) => {
                    first_error.get_or_insert_with(|| format!("column `{}`: {why}", shorten(&column.name)));
                }
            }
        }
        match first_error {
            None => Ok(row),
            Some(why) => {
                read.partial_rows.push((read.rows.len(), row));
                Err(why)
            }
        }
    }
}

fn number_of_cells(cells: usize) -> String {
    match cells {
        1 => "1 cell".into(),
        cells => format!("{cells} cells"),
    }
}

fn cell_text<'a>(cell: &'a CsvCell<'_>) -> Result<&'a str, String> {
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

/// The beginning of a text, with control characters escaped.
fn shorten(text: &str) -> String {
    let mut shown = String::new();
    for (n, c) in text.chars().enumerate() {
        match c {
            _ if n == SHOWN_CHARS_MAX => return shown + "…",
            c if c.is_control() => shown.extend(c.escape_default()),
            c => shown.push(c),
        }
    }
    shown
}

/// The table that all CSV files of a job must share.
#[derive(Debug, Default)]
pub struct SharedTable {
    /// The first file's name and table.
    first: Option<(String, Arc<CsvTable>)>,
}

impl SharedTable {
    /// Whether a file that is not empty has been added.
    pub fn is_known(&self) -> bool {
        self.first.is_some()
    }

    /// Keeps the first file's table, and checks that each later file has the same table. `None` if
    /// the file is empty.
    pub async fn add_file(
        &mut self,
        text: &TextFile,
        options: &CsvOptions,
    ) -> Result<Option<Arc<CsvTable>>, DatasetError> {
        let Some(table) = read_table(text, options).await? else {
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
            "the inputs have different columns or delimiters: `{name}` has {}, `{}` has {}; give them one header and one delimiter, or run them as separate jobs",
            describe(first),
            text.file.name,
            describe(&table)
        );
        Err(DatasetError::Refused(why))
    }

    /// The table with the types that fit the cells of all files.
    pub fn typed(self, options: &CsvOptions, kinds: &BTreeMap<String, Kinds>) -> Option<CsvTable> {
        let (_, table) = self.first?;
        Some(CsvTable::clone(&table).typed(&options.types, kinds))
    }
}

fn describe(table: &CsvTable) -> String {
    let names: Vec<String> = table
        .columns
        .iter()
        .take(12)
        .map(|c| format!("`{}`", shorten(&c.name)))
        .collect();
    let more = if table.columns.len() > names.len() { ", …" } else { "" };
    format!("the columns {}{more} between {:?}", names.join(", "), table.delimiter)
}
