//! Upper bounds of the decoded memory of Parquet values, from their types and page headers.
//!
//! A few bytes of a file may decode to gigabytes: a run of thirty million items, a dictionary entry
//! that each row refers to, a null in a column of fixed-size lists. The footer's sizes do not
//! include that. Page headers state the number of values in a page, and each type has a cost per
//! value. Only texts that share bytes (dictionaries, common prefixes) must be measured, by
//! [`parquet_measure`](super::measure).

use arrow::datatypes::{DataType, Schema};
use parquet::basic::Type as Physical;
use parquet::schema::types::SchemaDescriptor;

use super::pages::PageHeader;
use crate::dataset::row_memory::{ENTRY_BYTES, VALUE_BYTES};

/// Repetition and definition levels, and validity bits.
const LEVEL_BYTES: u64 = 5;

/// JSON text of a date, time or decimal.
const TEXT_BYTES: u64 = 80;

/// Memory costs of a leaf column, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LeafCost {
    /// Per value, including nulls.
    pub value: u64,
    /// Per row, whatever it holds.
    pub row: u64,
    /// Per byte of text.
    pub byte: u64,
    /// Whether values have individual lengths.
    pub is_text: bool,
    /// Whether each row is one value.
    pub is_flat: bool,
}

impl LeafCost {
    /// The cost of `values` values in `rows` rows, with `bytes` bytes of text in total.
    pub(crate) fn of(&self, rows: u64, values: u64, bytes: u64) -> u64 {
        let texts = if self.is_text { bytes } else { 0 };
        let values = values.saturating_mul(self.value);
        let texts = texts.saturating_mul(self.byte);
        rows.saturating_mul(self.row)
            .saturating_add(values)
            .saturating_add(texts)
    }
}

/// The costs of all leaf columns; `shown`: columns that also become JSON.
pub(crate) fn leaf_costs(columns: &SchemaDescriptor, arrow: &Schema, shown: &[String]) -> Vec<LeafCost> {
    let cost = |leaf: usize| {
        let column = columns.column(leaf);
        let field = arrow.field(columns.get_column_root_idx(leaf));
        let json = shown.contains(field.name());
        let length = u64::try_from(column.type_length()).unwrap_or(0);
        let width = match column.physical_type() {
            Physical::BOOLEAN => 1,
            Physical::INT32 | Physical::FLOAT => 4,
            Physical::INT64 | Physical::DOUBLE => 8,
            // Offsets or views.
            Physical::INT96 | Physical::BYTE_ARRAY => 16,
            Physical::FIXED_LEN_BYTE_ARRAY => length.max(8),
        };
        let is_text = column.physical_type() == Physical::BYTE_ARRAY;
        let is_fixed_text = column.physical_type() == Physical::FIXED_LEN_BYTE_ARRAY;
        let (row_slots, value_slots) = padding(field.data_type(), false);
        let mut value = LEVEL_BYTES.saturating_add(width);
        if json {
            value = value.saturating_add(VALUE_BYTES);
            let names = column.path().parts().iter().skip(1);
            value += names.map(|name| name.len() as u64 + ENTRY_BYTES).sum::<u64>();
            if column.logical_type_ref().is_some() && !is_text || column.physical_type() == Physical::INT96 {
                value += TEXT_BYTES;
            }
            if is_fixed_text {
                value = value.saturating_add(length.saturating_mul(2));
            }
        }
        LeafCost {
            value: value.saturating_add(value_slots.saturating_mul(width)),
            row: row_slots.saturating_mul(width),
            // A text's own bytes; with JSON, the text or its base64 form besides.
            byte: if json { 3 } else { 1 },
            is_text,
            is_flat: column.max_rep_level() == 0,
        }
    };
    (0..columns.num_columns()).map(cost).collect()
}

/// Items that null fixed-size lists are padded with: per row, and per value within another list.
fn padding(data_type: &DataType, in_list: bool) -> (u64, u64) {
    match data_type {
        DataType::FixedSizeList(item, size) => {
            let slots = u64::try_from(*size)
                .unwrap_or(0)
                .saturating_mul(slots(item.data_type()));
            let (_, inside) = padding(item.data_type(), true);
            if in_list {
                (0, slots.max(inside))
            } else {
                (slots, nested_only(item.data_type()))
            }
        }
        DataType::List(item) | DataType::LargeList(item) | DataType::ListView(item) | DataType::LargeListView(item) => {
            padding(item.data_type(), true)
        }
        DataType::Map(entries, _) => padding(entries.data_type(), true),
        DataType::Struct(fields) => fields
            .iter()
            .map(|field| padding(field.data_type(), in_list))
            .fold((0, 0), |a, b| (a.0.max(b.0), a.1.max(b.1))),
        _ => (0, 0),
    }
}

/// Padding within a fixed-size list whose own items are already counted per row.
fn nested_only(data_type: &DataType) -> u64 {
    match data_type {
        // These items are part of the same row's count.
        DataType::FixedSizeList(item, _) => nested_only(item.data_type()),
        DataType::Struct(fields) => fields
            .iter()
            .map(|field| nested_only(field.data_type()))
            .max()
            .unwrap_or(0),
        other => padding(other, true).1,
    }
}

/// Number of items that a null takes, through all levels of fixed-size lists.
fn slots(data_type: &DataType) -> u64 {
    match data_type {
        DataType::FixedSizeList(item, size) => u64::try_from(*size)
            .unwrap_or(0)
            .saturating_mul(slots(item.data_type())),
        DataType::Struct(fields) => fields.iter().map(|field| slots(field.data_type())).max().unwrap_or(1),
        _ => 1,
    }
}

/// Sums of the claims in the headers of a leaf column's pages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Claims {
    values: u64,
    /// Values that are indices into the dictionary.
    named: u64,
    /// Maximum bytes of the texts that are stored in the pages themselves.
    bytes: u64,
    dictionary_bytes: u64,
    dictionaries: u64,
    largest: u64,
}

impl Claims {
    pub(crate) fn add(&mut self, header: &PageHeader) {
        // An uncompressed page has its stored size, whatever uncompressed size it claims.
        let uncompressed = header.uncompressed.max(header.compressed).max(0) as u64;
        let values = header.values.max(0) as u64;
        if header.is_dictionary() {
            self.dictionary_bytes += uncompressed;
            self.dictionaries += 1;
            return;
        }
        self.largest = self.largest.max(uncompressed);
        self.values += values;
        if header.names_entries() {
            self.named += values;
        } else if header.shares_prefixes() {
            // Each text may share a prefix as long as all bytes before it.
            self.bytes = self.bytes.saturating_add(uncompressed.saturating_mul(values));
        } else {
            self.bytes = self.bytes.saturating_add(uncompressed);
        }
    }

    /// Uncompressed bytes held while one page is decoded: the page, and the dictionary together
    /// with its decoded entries.
    pub(crate) fn held(&self) -> u64 {
        self.largest.saturating_add(self.dictionary_bytes.saturating_mul(2))
    }

    /// Whether the cost depends on the length of the longest dictionary entry.
    pub(crate) fn names_texts(&self, cost: &LeafCost) -> bool {
        cost.is_text && self.named > 0
    }

    /// Whether there is exactly one dictionary, as the format requires.
    pub(crate) fn has_one_dictionary(&self) -> bool {
        self.dictionaries == 1
    }

    /// Maximum bytes of a dictionary entry, whatever number of entries the page claims.
    pub(crate) fn widest(&self) -> u64 {
        self.dictionary_bytes.saturating_sub(4)
    }

    /// Upper bound of the cost of `rows` rows of these pages, with dictionary entries of at most
    /// `widest` bytes.
    pub(crate) fn price(&self, cost: &LeafCost, rows: u64, widest: u64) -> u64 {
        let most = |values: u64| if cost.is_flat { values.min(rows) } else { values };
        let bytes = self.bytes.saturating_add(most(self.named).saturating_mul(widest));
        cost.of(rows, most(self.values), bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow::datatypes::Field;
    use parquet::arrow::ArrowSchemaConverter;
    use std::sync::Arc;

    fn costs(data_type: DataType, shown: bool) -> Vec<LeafCost> {
        let schema = Schema::new(vec![Field::new("c", data_type, true)]);
        let columns = ArrowSchemaConverter::new().convert(&schema).unwrap();
        let shown = if shown { vec!["c".to_string()] } else { Vec::new() };
        leaf_costs(&columns, &schema, &shown)
    }

    fn list_of(item: DataType, size: Option<i32>) -> DataType {
        let item = Arc::new(Field::new("item", item, true));
        size.map_or(DataType::List(item.clone()), |size| DataType::FixedSizeList(item, size))
    }

    #[test]
    fn json_costs_more_than_its_column() {
        assert_eq!(costs(DataType::Int32, false)[0].of(1, 1, 0), 9);
        assert_eq!(costs(DataType::Int32, true)[0].of(1, 1, 0), 97);
        let text = costs(DataType::Utf8, true)[0];
        assert_eq!(text.of(2, 2, 1000), 3000 + 2 * (21 + 88));
        let parts = DataType::Struct(vec![Field::new("abc", DataType::Int32, true)].into());
        assert_eq!(costs(parts, true)[0].value, 97 + 3 + 224);
    }

    #[test]
    fn what_is_null_in_a_list_of_a_fixed_size_is_paid_for() {
        let vectors = costs(list_of(DataType::Float32, Some(1000)), false)[0];
        assert_eq!((vectors.row, vectors.value), (4000, 9));
        let nested = costs(list_of(list_of(DataType::Float32, Some(1000)), None), false)[0];
        assert_eq!((nested.row, nested.value), (0, 4009));
        let bomb = costs(list_of(list_of(DataType::Int8, Some(1 << 20)), Some(1 << 20)), false)[0];
        assert_eq!(bomb.row, 4 << 40);
    }

    #[test]
    fn entries_of_a_dictionary_are_paid_for_as_often_as_they_may_be_named() {
        let text = costs(DataType::Utf8, false)[0];
        let claims = Claims {
            values: 1000,
            named: 1000,
            dictionary_bytes: 1 << 20,
            dictionaries: 1,
            ..Claims::default()
        };
        assert_eq!(claims.widest(), (1 << 20) - 4);
        assert_eq!(claims.price(&text, 10, claims.widest()), 10 * 21 + 10 * ((1 << 20) - 4));
        assert_eq!(claims.price(&text, 5000, 7), 1000 * 21 + 7000);
    }
}
