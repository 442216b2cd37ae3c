//! Cells of a table's rows, read column by column, and the rows built from them.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use arrow::array::{ArrayRef, RecordBatch, RecordBatchOptions, UInt64Array, new_null_array};
use arrow::compute::take;
use arrow::datatypes::{Field, Schema, SchemaRef};
use serde_json::Value;

use super::parquet::text::BadCell;
use super::pieces::SegmentRows;
use super::shard::{ShardReader, to_planned_type};
use super::table::TableFile;
use super::value::row_at;

/// The columns to read from a file.
pub(super) struct FileColumns {
    /// Shown and carried columns that the file has.
    pub(super) to_read: Vec<String>,
    /// Columns that the prompt uses.
    pub(super) shown: Vec<String>,
    pub(super) carried: Vec<String>,
    /// Shown or carried columns that this file lacks; their values are null.
    absent: Vec<String>,
    /// The subset of `absent` that the prompt uses.
    absent_shown: Vec<String>,
}

impl FileColumns {
    pub(super) fn of(reader: &ShardReader, file: &TableFile) -> FileColumns {
        let names = file.schema().fields().iter().map(|f| f.name());
        let shown: Vec<String> = match reader.columns() {
            Some(columns) => names.filter(|name| columns.contains(name)).cloned().collect(),
            None => names.cloned().collect(),
        };
        let lacks = |name: &String| file.schema().field_with_name(name).is_err();
        let absent: Vec<String> = reader
            .absent_columns()
            .iter()
            .filter(|name| lacks(name))
            .cloned()
            .collect();
        let carried = reader.carry_of_files().fields().iter().map(|f| f.name().clone());
        let carried: Vec<String> = carried.filter(|name| !absent.contains(name)).collect();
        let mut to_read = shown.clone();
        to_read.extend(carried.iter().filter(|name| !shown.contains(name)).cloned());
        let is_shown = |name: &&String| reader.columns().is_none_or(|columns| columns.contains(name));
        FileColumns {
            absent_shown: absent.iter().filter(is_shown).cloned().collect(),
            to_read,
            shown,
            carried,
            absent,
        }
    }
}

/// Cells of a range of rows, and the errors of unreadable rows.
pub(super) struct Cells {
    rows: usize,
    columns: Vec<(Field, ArrayRef)>,
    /// By index within the range.
    pub(super) errors: BTreeMap<usize, String>,
    bad_cells: Vec<BadCell>,
}

impl Cells {
    /// No columns yet, for the rows `rows` of the file.
    pub(super) fn empty(rows: &Range<u64>) -> Cells {
        Cells {
            rows: (rows.end - rows.start) as usize,
            columns: Vec::new(),
            errors: BTreeMap::new(),
            bad_cells: Vec::new(),
        }
    }

    /// One column of nulls, for a column of which no cell is read.
    pub(super) fn null_column(file: &TableFile, column: &str, rows: &Range<u64>) -> Result<Cells, String> {
        let field = file.schema().field_with_name(column).map_err(|e| e.to_string())?;
        let mut cells = Cells::empty(rows);
        let nulls = new_null_array(field.data_type(), cells.rows);
        cells.columns.push((field.clone().with_nullable(true), nulls));
        Ok(cells)
    }

    /// `batch` holds the rows `read_rows` out of `rows`; the other rows become null.
    pub(super) fn of(
        batch: RecordBatch,
        bad_cells: Vec<BadCell>,
        rows: &Range<u64>,
        read_rows: &[Range<u64>],
    ) -> Result<Cells, String> {
        let mut cells = Cells::empty(rows);
        let schema = batch.schema();
        let all_are_read = read_rows.len() == 1 && read_rows[0] == *rows;
        let indices: Vec<usize> = if all_are_read {
            (0..cells.rows).collect()
        } else {
            read_rows
                .iter()
                .cloned()
                .flatten()
                .map(|row| (row - rows.start) as usize)
                .collect()
        };
        let mut batch_rows: Vec<Option<u64>> = vec![None; cells.rows];
        for (batch_row, index) in indices.iter().enumerate() {
            *batch_rows.get_mut(*index).ok_or("rows came that were not asked for")? = Some(batch_row as u64);
        }
        let batch_rows = UInt64Array::from(batch_rows);
        for (field, column) in schema.fields().iter().zip(batch.columns()) {
            let column = if all_are_read {
                column.clone()
            } else {
                take(column, &batch_rows, None).map_err(|e| e.to_string())?
            };
            cells.columns.push((Field::clone(field).with_nullable(true), column));
        }
        let in_range = |cell: BadCell| BadCell {
            row: indices[cell.row],
            ..cell
        };
        cells.bad_cells = bad_cells.into_iter().map(in_range).collect();
        Ok(cells)
    }

    /// Adds the columns of `other`, which has the same rows.
    pub(super) fn append(&mut self, other: Cells) {
        self.columns.extend(other.columns);
        self.bad_cells.extend(other.bad_cells);
    }

    /// Builds the shown fields and the carried columns. `file_name` stands in errors; `first_row`
    /// is the first row's number in the file.
    pub(super) fn into_rows(
        mut self,
        columns: &FileColumns,
        carry: SchemaRef,
        file_name: &str,
        first_row: u64,
    ) -> Result<SegmentRows, String> {
        for cell in std::mem::take(&mut self.bad_cells) {
            let why = format!("column `{}`: {}", cell.column, cell.why);
            self.errors.entry(cell.row).or_insert(why);
        }
        let options = RecordBatchOptions::new().with_row_count(Some(self.rows));
        let carried = carry.fields().iter().map(|field| {
            let column = self.columns.iter().find(|(f, _)| f.name() == field.name());
            if columns.absent.contains(field.name()) {
                return Ok(new_null_array(field.data_type(), self.rows));
            }
            let (_, column) = column.ok_or(format!("column `{}` is gone", field.name()))?;
            to_planned_type(column, field.data_type()).map_err(|why| format!("column `{}`: {why}", field.name()))
        });
        let carried = if self.columns.is_empty() {
            carry
                .fields()
                .iter()
                .map(|f| new_null_array(f.data_type(), self.rows))
                .collect()
        } else {
            carried.collect::<Result<Vec<ArrayRef>, String>>()?
        };
        let carry = RecordBatch::try_new_with_options(carry, carried, &options).map_err(|e| e.to_string())?;
        // The file's column order, whatever the order of reading.
        let (fields, arrays): (Vec<Field>, Vec<ArrayRef>) = self
            .columns
            .into_iter()
            .filter(|(field, _)| columns.shown.contains(field.name()))
            .unzip();
        let shown = RecordBatch::try_new_with_options(Arc::new(Schema::new(fields)), arrays, &options)
            .map_err(|e| e.to_string())?;
        let rows = (0..self.rows).map(|index| {
            let row = match self.errors.remove(&index) {
                Some(why) => Err(why),
                None => row_at(&shown, index).map(|mut row| {
                    row.extend(columns.absent_shown.iter().map(|name| (name.clone(), Value::Null)));
                    row
                }),
            };
            row.map_err(|why| format!("row {} of `{file_name}`: {why}", first_row + index as u64))
        });
        Ok(SegmentRows {
            rows: rows.collect(),
            carry,
        })
    }
}
