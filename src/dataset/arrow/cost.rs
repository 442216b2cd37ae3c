//! Bounds the memory of rows that are copied out of decoded Arrow columns, as columns and as the
//! JSON that templates see.
//!
//! Small files can hold huge rows: all rows may refer to the same dictionary value of a megabyte,
//! and a list may be a long run of nulls. So the memory is counted before the rows are copied.

use arrow::array::{Array, ArrayRef, AsArray};
use arrow::datatypes::{ArrowDictionaryKeyType, DataType};
use arrow::downcast_dictionary_array;

use crate::dataset::row_memory::{ENTRY_BYTES, ROW_BYTES_MAX, VALUE_BYTES};

/// Overhead per value, in bytes: offsets, views and validity bits.
const VALUE_OVERHEAD_BYTES: u64 = 17;

/// Maximum JSON text of a value of fixed size (number, date, time or decimal), in bytes.
const FIXED_VALUE_TEXT_BYTES: u64 = 80;

/// Checks that a column of this type can be read. The error is the reason, which follows the
/// column's name in the message.
pub(crate) fn check_type(data_type: &DataType, is_dictionary_value: bool) -> Result<(), String> {
    let check_nesting = || {
        if is_dictionary_value {
            Err(format!("is a dictionary of {data_type}, which is not supported"))
        } else {
            Ok(())
        }
    };
    match data_type {
        DataType::Union(..) | DataType::RunEndEncoded(..) | DataType::ListView(_) | DataType::LargeListView(_) => Err(
            format!("is of type {data_type}, which is not supported; write it as another type"),
        ),
        DataType::Dictionary(_, values) => check_nesting().and_then(|()| check_type(values, true)),
        DataType::List(item)
        | DataType::LargeList(item)
        | DataType::FixedSizeList(item, _)
        | DataType::Map(item, _) => {
            check_nesting()?;
            check_type(item.data_type(), false)
        }
        DataType::Struct(fields) => {
            check_nesting()?;
            fields.iter().try_for_each(|field| check_type(field.data_type(), false))
        }
        _ => Ok(()),
    }
}

/// Memory of the value at `row`, in bytes; `as_json`: including its JSON form. Counting stops once
/// the sum exceeds [`ROW_BYTES_MAX`].
pub(crate) fn value_cost(column: &ArrayRef, row: usize, as_json: bool) -> u64 {
    let json_bytes = if as_json { VALUE_BYTES } else { 0 };
    let text_cost = |bytes: usize| VALUE_OVERHEAD_BYTES + (bytes as u64).saturating_mul(if as_json { 3 } else { 1 });
    let bytes = match column.data_type() {
        DataType::Null => 1,
        DataType::Struct(fields) => {
            let children = column.as_struct().columns();
            let mut sum = 1u64;
            for (field, child) in fields.iter().zip(children) {
                let entry = if as_json {
                    ENTRY_BYTES + field.name().len() as u64
                } else {
                    0
                };
                sum = sum
                    .saturating_add(entry)
                    .saturating_add(value_cost(child, row, as_json));
                if sum > ROW_BYTES_MAX {
                    break;
                }
            }
            sum
        }
        DataType::FixedSizeList(_, length) => {
            let items = column.as_fixed_size_list();
            let length = usize::try_from(*length).unwrap_or(0);
            items_cost(items.values(), items.value_offset_at(row), length, as_json)
        }
        // A null costs its overhead, but has no items.
        _ if column.is_null(row) => VALUE_OVERHEAD_BYTES,
        DataType::Utf8 => text_cost(column.as_string::<i32>().value_length(row) as usize),
        DataType::LargeUtf8 => text_cost(column.as_string::<i64>().value_length(row) as usize),
        DataType::Binary => text_cost(column.as_binary::<i32>().value_length(row) as usize),
        DataType::LargeBinary => text_cost(column.as_binary::<i64>().value_length(row) as usize),
        DataType::Utf8View => text_cost(column.as_string_view().value(row).len()),
        DataType::BinaryView => text_cost(column.as_binary_view().value(row).len()),
        DataType::FixedSizeBinary(length) => text_cost(usize::try_from(*length).unwrap_or(0)),
        DataType::List(_) => {
            let list = column.as_list::<i32>();
            let from = list.value_offsets()[row] as usize;
            VALUE_OVERHEAD_BYTES + items_cost(list.values(), from, list.value_length(row) as usize, as_json)
        }
        DataType::LargeList(_) => {
            let list = column.as_list::<i64>();
            let from = list.value_offsets()[row] as usize;
            VALUE_OVERHEAD_BYTES + items_cost(list.values(), from, list.value_length(row) as usize, as_json)
        }
        DataType::Map(..) => {
            let map = column.as_map();
            let entries: ArrayRef = std::sync::Arc::new(map.entries().clone());
            let (from, count) = (map.value_offsets()[row] as usize, map.value_length(row) as usize);
            let json_entries = if as_json {
                (count as u64).saturating_mul(ENTRY_BYTES)
            } else {
                0
            };
            VALUE_OVERHEAD_BYTES + json_entries.saturating_add(items_cost(&entries, from, count, as_json))
        }
        DataType::Dictionary(..) => dictionary_value_cost(column, row, as_json),
        other => {
            let width = other.primitive_width().unwrap_or(1) as u64;
            width + if as_json { FIXED_VALUE_TEXT_BYTES } else { 0 }
        }
    };
    bytes.saturating_add(json_bytes)
}

fn dictionary_value_cost(column: &ArrayRef, row: usize, as_json: bool) -> u64 {
    fn typed<K: ArrowDictionaryKeyType>(array: &arrow::array::DictionaryArray<K>, row: usize, as_json: bool) -> u64 {
        match array.key(row) {
            Some(key) => value_cost(array.values(), key, as_json),
            None => VALUE_OVERHEAD_BYTES,
        }
    }
    downcast_dictionary_array!(
        column => typed(column, row, as_json),
        _ => VALUE_OVERHEAD_BYTES
    )
}

/// Memory of `count` items of a list from index `from` on, in bytes.
fn items_cost(items: &ArrayRef, from: usize, count: usize, as_json: bool) -> u64 {
    let json_bytes = if as_json {
        VALUE_BYTES + FIXED_VALUE_TEXT_BYTES
    } else {
        0
    };
    // Fixed-width types cost the same per item.
    let fixed = match items.data_type() {
        DataType::Null => Some(1),
        other => other.primitive_width().map(|width| width as u64),
    };
    if let Some(width) = fixed {
        return (count as u64).saturating_mul(width + json_bytes);
    }
    let mut sum = 0u64;
    for item in from..from.saturating_add(count) {
        sum = sum.saturating_add(value_cost(items, item, as_json));
        if sum > ROW_BYTES_MAX {
            break;
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    use arrow::array::{DictionaryArray, Int64Array, ListArray, StringArray};
    use arrow::datatypes::{Field, Int32Type};

    #[test]
    fn a_dictionary_value_counts_for_each_row() {
        let long = "x".repeat(1000);
        let dictionary: DictionaryArray<Int32Type> =
            [Some(long.as_str()), None, Some(long.as_str())].into_iter().collect();
        let dictionary: ArrayRef = Arc::new(dictionary);
        assert_eq!(value_cost(&dictionary, 0, false), value_cost(&dictionary, 2, false));
        assert!(value_cost(&dictionary, 0, true) > 3000 && value_cost(&dictionary, 1, true) < 200);
        let lists = ListArray::from_iter_primitive::<Int32Type, _, _>([Some(vec![Some(1); 1000]), Some(vec![]), None]);
        let lists: ArrayRef = Arc::new(lists);
        assert!(value_cost(&lists, 0, false) >= 4000 && value_cost(&lists, 0, true) > 88_000);
        assert!(value_cost(&lists, 2, true) < 200);
        let texts: ArrayRef = Arc::new(StringArray::from(vec!["abc", ""]));
        assert_eq!(value_cost(&texts, 0, false) - value_cost(&texts, 1, false), 3);
        let numbers: ArrayRef = Arc::new(Int64Array::from(vec![1]));
        assert_eq!(value_cost(&numbers, 0, false), 8);
    }

    #[test]
    fn unsupported_types_are_refused() {
        let item = |kind| Arc::new(Field::new("item", kind, true));
        let dictionary = DataType::Dictionary(Box::new(DataType::Int32), Box::new(DataType::Utf8));
        for (kind, fine) in [
            (DataType::List(item(dictionary.clone())), true),
            (DataType::ListView(item(DataType::Utf8)), false),
            (
                DataType::Dictionary(Box::new(DataType::Int8), Box::new(DataType::List(item(DataType::Int8)))),
                false,
            ),
            (
                DataType::Dictionary(Box::new(DataType::Int8), Box::new(dictionary)),
                false,
            ),
        ] {
            assert_eq!(check_type(&kind, false).is_ok(), fine, "{kind}");
        }
    }
}
