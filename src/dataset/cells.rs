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
use super::shard::{ShardReader, fit};
use super::table::TableFile;
use super::value::row_at;

/// The columns of a file that are read.
pub(super) struct Columns {
    pub(super) all: Vec<String>,
    /// Columns that the prompt uses.
    pub(super) shown: Vec<String>,
    pub(super) carried: Vec<String>,
    /// Shown or carried columns that this file lacks; their values are null.
    absent: Vec<String>,
    /// The subset of `absent` that the prompt uses.
    absent_shown: Vec<String>,
}

impl Columns {
    pub(super) fn of(reader: &ShardReader, file: &TableFile) -> Columns {
        let names = file.schema().fields().iter().map(|f| f.name());
        let shown: Vec<String> = match reader.columns() {
            Some(columns) => names.filter(|name| columns.contains(name)).cloned().collect(),
            None => names.cloned().collect(),
        };
        let lacks = |name: &String| file.schema().field_with_name(name).is_err();
        let absent: Vec<String> = reader.absent().iter().filter(|name| lacks(name)).cloned().collect();
        let carried = reader.carry_of_files().fields().iter().map(|f| f.name().clone());
        let carried: Vec<String> = carried.filter(|name| !absent.contains(name)).collect();
        let mut all = shown.clone();
        all.extend(carried.iter().filter(|name| !shown.contains(name)).cloned());
        let is_shown = |name: &&String| reader.columns().is_none_or(|columns| columns.contains(name));
        Columns {
            absent_shown: absent.iter().filter(is_shown).cloned().collect(),
            all,
            shown,
            carried,
            absent,
        }
    }
}

/// Cells of a range of rows, and the errors of rows without cells.
pub(super) struct Cells {
    rows: usize,
    columns: Vec<(Field, ArrayRef)>,
    /// By index within the range.
    pub(super) errors: BTreeMap<usize, String>,
    bad: Vec<BadCell>,
}

impl Cells {
    pub(super) fn none(rows: &Range<u64>) -> Cells {
        Cells {
            rows: (rows.end - rows.start) as usize,
            columns: Vec::new(),
            errors: BTreeMap::new(),
            bad: Vec::new(),
        }
    }

    /// A column of nulls, for a column of which no cell is read.
    pub(super) fn nulls(file: &TableFile, column: &str, rows: &Range<u64>) -> Result<Cells, String> {
        let field = file.schema().field_with_name(column).map_err(|e| e.to_string())?;
        let mut cells = Cells::none(rows);
        let nulls = new_null_array(field.data_type(), cells.rows);
        cells.columns.push((field.clone().with_nullable(true), nulls));
        Ok(cells)
    }

    /// `batch` holds the rows `read` out of `rows`; the other rows become null.
    pub(super) fn of(
        batch: RecordBatch,
        bad: Vec<BadCell>,
        rows: &Range<u64>,
        read: &[Range<u64>],
    ) -> Result<Cells, String> {
        let mut cells = Cells::none(rows);
        let fields = batch.schema();
        let all = read.len() == 1 && read[0] == *rows;
        let places: Vec<usize> = if all {
            (0..cells.rows).collect()
        } else {
            read.iter()
                .cloned()
                .flatten()
                .map(|row| (row - rows.start) as usize)
                .collect()
        };
        let mut from: Vec<Option<u64>> = vec![None; cells.rows];
        for (n, place) in places.iter().enumerate() {
            *from.get_mut(*place).ok_or("rows came that were not asked for")? = Some(n as u64);
        }
        let from = UInt64Array::from(from);
        for (field, column) in fields.fields().iter().zip(batch.columns()) {
            let column = if all {
                column.clone()
            } else {
                take(column, &from, None).map_err(|e| e.to_string())?
            };
            cells.columns.push((Field::clone(field).with_nullable(true), column));
        }
        let place = |cell: BadCell| BadCell {
            row: places[cell.row],
            ..cell
        };
        cells.bad = bad.into_iter().map(place).collect();
        Ok(cells)
    }

    pub(super) fn join(&mut self, other: Cells) {
        self.columns.extend(other.columns);
        self.bad.extend(other.bad);
    }

    /// Builds the shown fields and the carried columns; `first`: the first row's number in the
    /// file.
    pub(super) fn into_rows(
        mut self,
        of: &Columns,
        carry: SchemaRef,
        name: &str,
        first: u64,
    ) -> Result<SegmentRows, String> {
        for cell in std::mem::take(&mut self.bad) {
            let why = format!("column `{}`: {}", cell.column, cell.why);
            self.errors.entry(cell.row).or_insert(why);
        }
        let options = RecordBatchOptions::new().with_row_count(Some(self.rows));
        let carried = carry.fields().iter().map(|field| {
            let column = self.columns.iter().find(|(f, _)| f.name() == field.name());
            if of.absent.contains(field.name()) {
                return Ok(new_null_array(field.data_type(), self.rows));
            }
            let (_, column) = column.ok_or(format!("column `{}` is gone", field.name()))?;
            fit(column, field.data_type()).map_err(|why| format!("column `{}`: {why}", field.name()))
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
        let (fields, columns): (Vec<Field>, Vec<ArrayRef>) = self
            .columns
            .into_iter()
            .filter(|(field, _)| of.shown.contains(field.name()))
            .unzip();
        let shown = RecordBatch::try_new_with_options(Arc::new(Schema::new(fields)), columns, &options)
            .map_err(|e| e.to_string())?;
        let rows = (0..self.rows).map(|place| {
            let row = match self.errors.remove(&place) {
                Some(why) => Err(why),
                None => row_at(&shown, place).map(|mut row| {
                    row.extend(of.absent_shown.iter().map(|name| (name.clone(), Value::Null)));
                    row
                }),
            };
            row.map_err(|why| format!("row {} of `{name}`: {why}", first + place as u64))
        });
        Ok(SegmentRows {
            rows: rows.collect(),
            carry,
        })
    }
}
