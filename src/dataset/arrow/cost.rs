//! Memory cost of rows of decoded Arrow columns, both as columns of their own and as the JSON that
//! templates see.
//!
//! Small files can hold huge rows: each row may refer to the same dictionary value of a megabyte,
//! and a list may be a long run of nulls. So the cost is counted before a row is built.

use arrow::array::{Array, ArrayRef, AsArray};
use arrow::datatypes::{ArrowDictionaryKeyType, DataType};
use arrow::downcast_dictionary_array;

use crate::dataset::row_memory::{ENTRY_BYTES, ROW_BYTES_MAX, VALUE_BYTES};

/// Overhead per value: offsets, views and validity bits.
const PLACE_BYTES: u64 = 17;

/// JSON text of a date, time or decimal.
const TEXT_BYTES: u64 = 80;

/// Checks that a column of this type can be read. The error is the reason, which goes behind the
/// column's name.
pub(crate) fn check_type(data_type: &DataType, within_dictionary: bool) -> Result<(), String> {
    let nested = || {
        if within_dictionary {
            Err(format!("is a dictionary of {data_type}, which is not supported"))
        } else {
            Ok(())
        }
    };
    match data_type {
        DataType::Union(..) | DataType::RunEndEncoded(..) | DataType::ListView(_) | DataType::LargeListView(_) => Err(
            format!("is of type {data_type}, which is not supported; write it as another type"),
        ),
        DataType::Dictionary(_, values) => nested().and_then(|()| check_type(values, true)),
        DataType::List(item)
        | DataType::LargeList(item)
        | DataType::FixedSizeList(item, _)
        | DataType::Map(item, _) => {
            nested()?;
            check_type(item.data_type(), false)
        }
        DataType::Struct(fields) => {
            nested()?;
            fields.iter().try_for_each(|field| check_type(field.data_type(), false))
        }
        _ => Ok(()),
    }
}

/// Bytes of one value; `shown`: including its JSON form. Counting stops once the sum exceeds a
/// row's maximum.
pub(crate) fn cost(column: &ArrayRef, row: usize, shown: bool) -> u64 {
    let json = if shown { VALUE_BYTES } else { 0 };
    let text = |bytes: usize| PLACE_BYTES + (bytes as u64).saturating_mul(if shown { 3 } else { 1 });
    let own = match column.data_type() {
        DataType::Null => 1,
        DataType::Struct(fields) => {
            let parts = column.as_struct();
            let mut sum = 1u64;
            for (field, part) in fields.iter().zip(parts.columns()) {
                let name = if shown {
                    ENTRY_BYTES + field.name().len() as u64
                } else {
                    0
                };
                sum = sum.saturating_add(name).saturating_add(cost(part, row, shown));
                if sum > ROW_BYTES_MAX {
                    break;
                }
            }
            sum
        }
        DataType::FixedSizeList(_, length) => {
            let items = column.as_fixed_size_list();
            let length = usize::try_from(*length).unwrap_or(0);
            items_cost(items.values(), items.value_offset_at(row), length, shown)
        }
        // A null costs its overhead, but has no items.
        _ if column.is_null(row) => PLACE_BYTES,
        DataType::Utf8 => text(column.as_string::<i32>().value_length(row) as usize),
        DataType::LargeUtf8 => text(column.as_string::<i64>().value_length(row) as usize),
        DataType::Binary => text(column.as_binary::<i32>().value_length(row) as usize),
        DataType::LargeBinary => text(column.as_binary::<i64>().value_length(row) as usize),
        DataType::Utf8View => text(column.as_string_view().value(row).len()),
        DataType::BinaryView => text(column.as_binary_view().value(row).len()),
        DataType::FixedSizeBinary(length) => text(usize::try_from(*length).unwrap_or(0)),
        DataType::List(_) => {
            let list = column.as_list::<i32>();
            let from = list.value_offsets()[row] as usize;
            PLACE_BYTES + items_cost(list.values(), from, list.value_length(row) as usize, shown)
        }
        DataType::LargeList(_) => {
            let list = column.as_list::<i64>();
            let from = list.value_offsets()[row] as usize;
            PLACE_BYTES + items_cost(list.values(), from, list.value_length(row) as usize, shown)
        }
        DataType::Map(..) => {
            let map = column.as_map();
            let entries: ArrayRef = std::sync::Arc::new(map.entries().clone());
            let (from, count) = (map.value_offsets()[row] as usize, map.value_length(row) as usize);
            let names = if shown {
                (count as u64).saturating_mul(ENTRY_BYTES)
            } else {
                0
            };
            PLACE_BYTES + names.saturating_add(items_cost(&entries, from, count, shown))
        }
        DataType::Dictionary(..) => of_dictionary(column, row, shown),
        other => {
            let width = other.primitive_width().unwrap_or(1) as u64;
            width + if shown { TEXT_BYTES } else { 0 }
        }
    };
    own.saturating_add(json)
}

fn of_dictionary(column: &ArrayRef, row: usize, shown: bool) -> u64 {
    fn value<K: ArrowDictionaryKeyType>(of: &arrow::array::DictionaryArray<K>, row: usize, shown: bool) -> u64 {
        match of.key(row) {
            Some(key) => cost(of.values(), key, shown),
            None => PLACE_BYTES,
        }
    }
    downcast_dictionary_array!(
        column => value(column, row, shown),
        _ => PLACE_BYTES
    )
}

/// Bytes of `count` items from index `from` on.
fn items_cost(items: &ArrayRef, from: usize, count: usize, shown: bool) -> u64 {
    let json = if shown { VALUE_BYTES + TEXT_BYTES } else { 0 };
    // Fixed-width types cost the same per item.
    let fixed = match items.data_type() {
        DataType::Null => Some(1),
        other => other.primitive_width().map(|width| width as u64),
    };
    if let Some(width) = fixed {
        return (count as u64).saturating_mul(width + json);
    }
    let mut sum = 0u64;
    for item in from..from.saturating_add(count) {
        sum = sum.saturating_add(cost(items, item, shown));
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
    fn what_rows_name_counts_as_often_as_they_name_it() {
        let long = "x".repeat(1000);
        let words: DictionaryArray<Int32Type> = [Some(long.as_str()), None, Some(long.as_str())].into_iter().collect();
        let words: ArrayRef = Arc::new(words);
        assert_eq!(cost(&words, 0, false), cost(&words, 2, false));
        assert!(cost(&words, 0, true) > 3000 && cost(&words, 1, true) < 200);
        let lists = ListArray::from_iter_primitive::<Int32Type, _, _>([Some(vec![Some(1); 1000]), Some(vec![]), None]);
        let lists: ArrayRef = Arc::new(lists);
        assert!(cost(&lists, 0, false) >= 4000 && cost(&lists, 0, true) > 88_000);
        assert!(cost(&lists, 2, true) < 200);
        let texts: ArrayRef = Arc::new(StringArray::from(vec!["abc", ""]));
        assert_eq!(cost(&texts, 0, false) - cost(&texts, 1, false), 3);
        let numbers: ArrayRef = Arc::new(Int64Array::from(vec![1]));
        assert_eq!(cost(&numbers, 0, false), 8);
    }

    #[test]
    fn types_without_rows_of_their_own_are_refused() {
        let item = |kind| Arc::new(Field::new("item", kind, true));
        let words = DataType::Dictionary(Box::new(DataType::Int32), Box::new(DataType::Utf8));
        for (kind, fine) in [
            (DataType::List(item(words.clone())), true),
            (DataType::ListView(item(DataType::Utf8)), false),
            (
                DataType::Dictionary(Box::new(DataType::Int8), Box::new(DataType::List(item(DataType::Int8)))),
                false,
            ),
            (DataType::Dictionary(Box::new(DataType::Int8), Box::new(words)), false),
        ] {
            assert_eq!(check_type(&kind, false).is_ok(), fine, "{kind}");
        }
    }
}
