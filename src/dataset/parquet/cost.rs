//! Upper bounds of the memory of decoded Parquet values, computed from their types and page
//! headers.
//!
//! A few bytes of a file may decode to gigabytes: a run of thirty million items, a dictionary entry
//! to which each row refers, a null in a column of fixed-size lists. The sizes in the footer do not
//! show that. Page headers give the number of values in a page, and each type has a cost per value.
//! Only texts that share bytes (dictionaries, common prefixes) must be measured: see
//! [`measure`](super::measure).

use arrow::datatypes::{DataType, Schema};
use parquet::basic::Type as Physical;
use parquet::schema::types::SchemaDescriptor;

use super::pages::PageHeader;
use crate::dataset::row_memory::{ENTRY_BYTES, VALUE_BYTES};

/// Bytes per value of repetition and definition levels and validity bits.
const LEVEL_BYTES: u64 = 5;

/// Bytes of the JSON text of a date, time or decimal.
const JSON_TEXT_BYTES: u64 = 80;

/// Memory costs of a leaf column, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LeafCost {
    /// Per value, including nulls.
    pub per_value: u64,
    /// Per row, in addition to its values.
    pub per_row: u64,
    /// Per byte of text.
    pub per_byte: u64,
    /// Whether values have individual lengths.
    pub is_text: bool,
    /// Whether each row is one value.
    pub is_flat: bool,
}

impl LeafCost {
    /// The cost of `values` values in `rows` rows, with `bytes` bytes of text in total.
    pub(crate) fn total(&self, rows: u64, values: u64, bytes: u64) -> u64 {
        let texts = if self.is_text { bytes } else { 0 };
        let values = values.saturating_mul(self.per_value);
        let texts = texts.saturating_mul(self.per_byte);
        rows.saturating_mul(self.per_row)
            .saturating_add(values)
            .saturating_add(texts)
    }
}

/// The costs of all leaf columns. `json_columns`: columns that also become JSON.
pub(crate) fn leaf_costs(columns: &SchemaDescriptor, arrow: &Schema, json_columns: &[String]) -> Vec<LeafCost> {
    let cost = |leaf: usize| {
        let column = columns.column(leaf);
        let field = arrow.field(columns.get_column_root_idx(leaf));
        let is_json = json_columns.contains(field.name());
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
        if is_json {
            value = value.saturating_add(VALUE_BYTES);
            let names = column.path().parts().iter().skip(1);
            value += names.map(|name| name.len() as u64 + ENTRY_BYTES).sum::<u64>();
            if column.logical_type_ref().is_some() && !is_text || column.physical_type() == Physical::INT96 {
                value += JSON_TEXT_BYTES;
            }
            if is_fixed_text {
                value = value.saturating_add(length.saturating_mul(2));
            }
        }
        LeafCost {
            per_value: value.saturating_add(value_slots.saturating_mul(width)),
            per_row: row_slots.saturating_mul(width),
            // The text itself, and in JSON its escaped or base64 form.
            per_byte: if is_json { 3 } else { 1 },
            is_text,
            is_flat: column.max_rep_level() == 0,
        }
    };
    (0..columns.num_columns()).map(cost).collect()
}

/// Number of items with which nulls in fixed-size lists are padded: per row, and per value of a
/// list.
fn padding(data_type: &DataType, in_list: bool) -> (u64, u64) {
    match data_type {
        DataType::FixedSizeList(item, size) => {
            let slots = u64::try_from(*size)
                .unwrap_or(0)
                .saturating_mul(null_items(item.data_type()));
            let (_, inside) = padding(item.data_type(), true);
            if in_list {
                (0, slots.max(inside))
            } else {
                (slots, nested_padding(item.data_type()))
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

/// Padding items per value below a fixed-size list whose own items are counted per row.
fn nested_padding(data_type: &DataType) -> u64 {
    match data_type {
        // These items are counted per row, too.
        DataType::FixedSizeList(item, _) => nested_padding(item.data_type()),
        DataType::Struct(fields) => fields
            .iter()
            .map(|field| nested_padding(field.data_type()))
            .max()
            .unwrap_or(0),
        other => padding(other, true).1,
    }
}

/// Number of leaf items that a null takes: the product of the sizes of nested fixed-size lists.
fn null_items(data_type: &DataType) -> u64 {
    match data_type {
        DataType::FixedSizeList(item, size) => u64::try_from(*size)
            .unwrap_or(0)
            .saturating_mul(null_items(item.data_type())),
        DataType::Struct(fields) => fields
            .iter()
            .map(|field| null_items(field.data_type()))
            .max()
            .unwrap_or(1),
        _ => 1,
    }
}

/// Sums of the claims in the headers of a leaf column's pages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct PageClaims {
    values: u64,
    /// Number of values that are indices into the dictionary.
    dictionary_values: u64,
    /// Maximum bytes of the texts that are stored in the pages themselves.
    text_bytes: u64,
    dictionary_bytes: u64,
    dictionaries: u64,
    largest_page_bytes: u64,
}

impl PageClaims {
    pub(crate) fn add(&mut self, header: &PageHeader) {
        // The decoder takes all bytes of a page that is stored uncompressed, even if the header
        // claims a smaller uncompressed size.
        let uncompressed = header.uncompressed_bytes.max(header.compressed_bytes).max(0) as u64;
        let values = header.values.max(0) as u64;
        if header.is_dictionary() {
            self.dictionary_bytes += uncompressed;
            self.dictionaries += 1;
            return;
        }
        self.largest_page_bytes = self.largest_page_bytes.max(uncompressed);
        self.values += values;
        if header.is_dictionary_encoded() {
            self.dictionary_values += values;
        } else if header.has_shared_prefixes() {
            // The prefix that a text shares may be as long as the whole page.
            self.text_bytes = self.text_bytes.saturating_add(uncompressed.saturating_mul(values));
        } else {
            self.text_bytes = self.text_bytes.saturating_add(uncompressed);
        }
    }

    /// Uncompressed bytes held while one page is decoded: the page, the dictionary and its decoded
    /// entries.
    pub(crate) fn decoding_bytes(&self) -> u64 {
        self.largest_page_bytes
            .saturating_add(self.dictionary_bytes.saturating_mul(2))
    }

    /// Whether texts refer to dictionary entries, so that the cost depends on the length of the
    /// longest entry.
    pub(crate) fn has_dictionary_texts(&self, cost: &LeafCost) -> bool {
        cost.is_text && self.dictionary_values > 0
    }

    /// Whether there is exactly one dictionary, as the format requires.
    pub(crate) fn has_one_dictionary(&self) -> bool {
        self.dictionaries == 1
    }

    /// Upper bound of the bytes of a dictionary entry: it may be the only one, and its length takes
    /// four bytes.
    pub(crate) fn entry_bytes_max(&self) -> u64 {
        self.dictionary_bytes.saturating_sub(4)
    }

    /// Upper bound of the memory cost of `rows` rows of these pages, with dictionary entries of at
    /// most `entry_bytes` bytes.
    pub(crate) fn cost_bound(&self, cost: &LeafCost, rows: u64, entry_bytes: u64) -> u64 {
        let values_max = |values: u64| if cost.is_flat { values.min(rows) } else { values };
        let bytes = self
            .text_bytes
            .saturating_add(values_max(self.dictionary_values).saturating_mul(entry_bytes));
        cost.total(rows, values_max(self.values), bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow::datatypes::Field;
    use parquet::arrow::ArrowSchemaConverter;
    use std::sync::Arc;

    fn costs(data_type: DataType, is_json: bool) -> Vec<LeafCost> {
        let schema = Schema::new(vec![Field::new("c", data_type, true)]);
        let columns = ArrowSchemaConverter::new().convert(&schema).unwrap();
        let json_columns = if is_json { vec!["c".to_string()] } else { Vec::new() };
        leaf_costs(&columns, &schema, &json_columns)
    }

    fn list_of(item: DataType, size: Option<i32>) -> DataType {
        let item = Arc::new(Field::new("item", item, true));
        size.map_or(DataType::List(item.clone()), |size| DataType::FixedSizeList(item, size))
    }

    #[test]
    fn json_costs_more_than_its_column() {
        assert_eq!(costs(DataType::Int32, false)[0].total(1, 1, 0), 9);
        assert_eq!(costs(DataType::Int32, true)[0].total(1, 1, 0), 97);
        let text = costs(DataType::Utf8, true)[0];
        assert_eq!(text.total(2, 2, 1000), 3000 + 2 * (21 + 88));
        let parts = DataType::Struct(vec![Field::new("abc", DataType::Int32, true)].into());
        assert_eq!(costs(parts, true)[0].per_value, 97 + 3 + 224);
    }

    #[test]
    fn padding_of_null_fixed_size_lists_is_counted() {
        let vectors = costs(list_of(DataType::Float32, Some(1000)), false)[0];
        assert_eq!((vectors.per_row, vectors.per_value), (4000, 9));
        let nested = costs(list_of(list_of(DataType::Float32, Some(1000)), None), false)[0];
        assert_eq!((nested.per_row, nested.per_value), (0, 4009));
        let bomb = costs(list_of(list_of(DataType::Int8, Some(1 << 20)), Some(1 << 20)), false)[0];
        assert_eq!(bomb.per_row, 4 << 40);
    }

    #[test]
    fn dictionary_entries_are_counted_once_per_possible_reference() {
        let text = costs(DataType::Utf8, false)[0];
        let claims = PageClaims {
            values: 1000,
            dictionary_values: 1000,
            dictionary_bytes: 1 << 20,
            dictionaries: 1,
            ..PageClaims::default()
        };
        assert_eq!(claims.entry_bytes_max(), (1 << 20) - 4);
        assert_eq!(
            claims.cost_bound(&text, 10, claims.entry_bytes_max()),
            10 * 21 + 10 * ((1 << 20) - 4)
        );
        assert_eq!(claims.cost_bound(&text, 5000, 7), 1000 * 21 + 7000);
    }
}
