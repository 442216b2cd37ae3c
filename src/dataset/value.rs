//! Converts a cell of an Arrow column to the JSON value that templates see.
//!
//! | column | value |
//! |---|---|
//! | integers, floats, booleans, strings | the same value; a float that is not finite is the text `NaN`, `Infinity`, `-Infinity` |
//! | decimals | exact text: `"12.50"` |
//! | dates | `"2026-11-21"` |
//! | timestamps | ISO 8601: in UTC with `Z` if the column has a time zone, else without an offset |
//! | times | `"12:30:00.5"` |
//! | durations | seconds as text: `"1.5"` |
//! | binary | standard base64 text |
//! | lists, structs, maps | nested JSON (keys of a map as text) |
//! | null | `null` |

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch};
use arrow::datatypes::*;
use arrow::temporal_conversions as temporal;
use arrow::util::display::{ArrayFormatter, FormatOptions};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chrono::NaiveDateTime;
use serde_json::{Map, Number, Value};

/// The rows of `batch` as JSON objects, fields in column order; `Err`: the row has a value without
/// a JSON form.
pub fn rows_of(batch: &RecordBatch) -> Vec<Result<Map<String, Value>, String>> {
    (0..batch.num_rows()).map(|row| row_at(batch, row)).collect()
}

/// One row of `batch`, as [`rows_of`] gives it.
pub fn row_at(batch: &RecordBatch, row: usize) -> Result<Map<String, Value>, String> {
    let schema = batch.schema_ref();
    let mut object = Map::with_capacity(batch.num_columns());
    for (field, column) in schema.fields().iter().zip(batch.columns()) {
        let value = cell(column, row).map_err(|why| format!("column `{}`: {why}", field.name()))?;
        object.insert(field.name().clone(), value);
    }
    Ok(object)
}

/// The value at `row` of `column`; see the module's table.
pub fn cell(column: &ArrayRef, row: usize) -> Result<Value, String> {
    if column.is_null(row) {
        return Ok(Value::Null);
    }
    macro_rules! int {
        ($t:ty) => {
            Value::from(column.as_primitive::<$t>().value(row))
        };
    }
    Ok(match column.data_type() {
        DataType::Null => Value::Null,
        DataType::Boolean => Value::Bool(column.as_boolean().value(row)),
        DataType::Int8 => int!(Int8Type),
        DataType::Int16 => int!(Int16Type),
        DataType::Int32 => int!(Int32Type),
        DataType::Int64 => int!(Int64Type),
        DataType::UInt8 => int!(UInt8Type),
        DataType::UInt16 => int!(UInt16Type),
        DataType::UInt32 => int!(UInt32Type),
        DataType::UInt64 => int!(UInt64Type),
        DataType::Float16 => short_float(column.as_primitive::<Float16Type>().value(row).to_f32()),
        DataType::Float32 => short_float(column.as_primitive::<Float32Type>().value(row)),
        DataType::Float64 => float(column.as_primitive::<Float64Type>().value(row)),
        DataType::Decimal32(..) => column.as_primitive::<Decimal32Type>().value_as_string(row).into(),
        DataType::Decimal64(..) => column.as_primitive::<Decimal64Type>().value_as_string(row).into(),
        DataType::Decimal128(..) => column.as_primitive::<Decimal128Type>().value_as_string(row).into(),
        DataType::Decimal256(..) => column.as_primitive::<Decimal256Type>().value_as_string(row).into(),
        DataType::Utf8 => column.as_string::<i32>().value(row).into(),
        DataType::LargeUtf8 => column.as_string::<i64>().value(row).into(),
        DataType::Utf8View => column.as_string_view().value(row).into(),
        DataType::Binary => STANDARD.encode(column.as_binary::<i32>().value(row)).into(),
        DataType::LargeBinary => STANDARD.encode(column.as_binary::<i64>().value(row)).into(),
        DataType::BinaryView => STANDARD.encode(column.as_binary_view().value(row)).into(),
        DataType::FixedSizeBinary(_) => STANDARD.encode(column.as_fixed_size_binary().value(row)).into(),
        DataType::Date32 | DataType::Date64 | DataType::Timestamp(..) => date_or_timestamp(column, row)?,
        DataType::Duration(unit) => duration(column, row, *unit).into(),
        DataType::Dictionary(..) => {
            let dictionary = column.as_any_dictionary();
            let key =
                arrow::compute::cast(&dictionary.keys().slice(row, 1), &DataType::UInt64).map_err(|e| e.to_string())?;
            cell(dictionary.values(), key.as_primitive::<UInt64Type>().value(0) as usize)?
        }
        DataType::Struct(fields) => {
            let columns = column.as_struct().columns();
            let mut object = Map::with_capacity(fields.len());
            for (field, column) in fields.iter().zip(columns) {
                object.insert(field.name().clone(), cell(column, row)?);
            }
            Value::Object(object)
        }
        DataType::Map(..) => {
            let entries = column.as_map().value(row);
            let mut object = Map::with_capacity(entries.len());
            for i in 0..entries.len() {
                let key = match cell(entries.column(0), i)? {
                    Value::String(key) => key,
                    other => other.to_string(),
                };
                object.insert(key, cell(entries.column(1), i)?);
            }
            Value::Object(object)
        }
        DataType::List(_) => list(&column.as_list::<i32>().value(row))?,
        DataType::LargeList(_) => list(&column.as_list::<i64>().value(row))?,
        DataType::FixedSizeList(..) => list(&column.as_fixed_size_list().value(row))?,
        DataType::ListView(_) => list(&column.as_list_view::<i32>().value(row))?,
        DataType::LargeListView(_) => list(&column.as_list_view::<i64>().value(row))?,
        DataType::Time32(_) | DataType::Time64(_) | DataType::Interval(_) => formatted(column, row)?,
        other => return Err(format!("type {other} has no JSON form")),
    })
}

fn list(items: &ArrayRef) -> Result<Value, String> {
    // The exact capacity is reserved, since a vector that grows may take twice the memory.
    let mut list = Vec::with_capacity(items.len());
    for i in 0..items.len() {
        list.push(cell(items, i)?);
    }
    Ok(Value::Array(list))
}

fn float(value: f64) -> Value {
    match Number::from_f64(value) {
        Some(number) => Value::Number(number),
        None if value.is_nan() => "NaN".into(),
        None if value > 0.0 => "Infinity".into(),
        None => "-Infinity".into(),
    }
}

/// A float32 or float16 as the float64 with the same shortest decimal form: 0.1, not
/// 0.10000000149011612.
fn short_float(value: f32) -> Value {
    float(value.to_string().parse().unwrap_or(f64::from(value)))
}

fn date_or_timestamp(column: &ArrayRef, row: usize) -> Result<Value, String> {
    let (time, has_time_zone): (Option<NaiveDateTime>, bool) = match column.data_type() {
        DataType::Date32 => {
            let day = column.as_primitive::<Date32Type>().value(row);
            return match temporal::date32_to_datetime(day) {
                Some(time) => Ok(time.format("%Y-%m-%d").to_string().into()),
                None => Err(format!("day {day} since 1970 is no date")),
            };
        }
        DataType::Date64 => (
            temporal::date64_to_datetime(column.as_primitive::<Date64Type>().value(row)),
            false,
        ),
        DataType::Timestamp(unit, zone) => {
            let time = match unit {
                TimeUnit::Second => {
                    temporal::timestamp_s_to_datetime(column.as_primitive::<TimestampSecondType>().value(row))
                }
                TimeUnit::Millisecond => {
                    temporal::timestamp_ms_to_datetime(column.as_primitive::<TimestampMillisecondType>().value(row))
                }
                TimeUnit::Microsecond => {
                    temporal::timestamp_us_to_datetime(column.as_primitive::<TimestampMicrosecondType>().value(row))
                }
                TimeUnit::Nanosecond => {
                    temporal::timestamp_ns_to_datetime(column.as_primitive::<TimestampNanosecondType>().value(row))
                }
            };
            (time, zone.is_some())
        }
        other => return Err(format!("{other} is no moment")),
    };
    let time = time.ok_or("a timestamp outside the calendar")?;
    Ok(time
        .format(if has_time_zone {
            "%Y-%m-%dT%H:%M:%S%.fZ"
        } else {
            "%Y-%m-%dT%H:%M:%S%.f"
        })
        .to_string()
        .into())
}

/// Seconds in exact decimal form, without trailing zeros.
fn duration(column: &ArrayRef, row: usize, unit: TimeUnit) -> String {
    let (count, digits) = match unit {
        TimeUnit::Second => (column.as_primitive::<DurationSecondType>().value(row), 0),
        TimeUnit::Millisecond => (column.as_primitive::<DurationMillisecondType>().value(row), 3),
        TimeUnit::Microsecond => (column.as_primitive::<DurationMicrosecondType>().value(row), 6),
        TimeUnit::Nanosecond => (column.as_primitive::<DurationNanosecondType>().value(row), 9),
    };
    let per_second = 10u64.pow(digits);
    let magnitude = count.unsigned_abs();
    let sign = if count < 0 { "-" } else { "" };
    let fraction = format!("{:0width$}", magnitude % per_second, width = digits as usize);
    let fraction = if digits == 0 {
        ""
    } else {
        fraction.trim_end_matches('0')
    };
    let point = if fraction.is_empty() { "" } else { "." };
    format!("{sign}{}{point}{fraction}", magnitude / per_second)
}

fn formatted(column: &ArrayRef, row: usize) -> Result<Value, String> {
    let options = FormatOptions::default().with_display_error(false);
    let formatter = ArrayFormatter::try_new(column.as_ref(), &options).map_err(|e| e.to_string())?;
    Ok(formatter.value(row).try_to_string().map_err(|e| e.to_string())?.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow::array::*;
    use arrow::buffer::OffsetBuffer;
    use serde_json::json;
    use std::sync::Arc;

    fn all(column: impl Array + 'static) -> Value {
        let column: ArrayRef = Arc::new(column);
        (0..column.len()).map(|i| cell(&column, i).unwrap()).collect()
    }

    #[test]
    fn numbers_and_texts_are_json_values() {
        assert_eq!(all(Int8Array::from(vec![Some(-3), None])), json!([-3, null]));
        assert_eq!(all(UInt64Array::from(vec![u64::MAX])), json!([u64::MAX]));
        assert_eq!(all(Float32Array::from(vec![0.1, f32::NAN])), json!([0.1, "NaN"]));
        let floats = Float64Array::from(vec![1.5, f64::INFINITY, f64::NEG_INFINITY]);
        assert_eq!(all(floats), json!([1.5, "Infinity", "-Infinity"]));
        assert_eq!(all(LargeStringArray::from(vec!["ä"])), json!(["ä"]));
        assert_eq!(
            all(StringViewArray::from(vec!["long enough to lie outside the view"]))
                .as_array()
                .unwrap()
                .len(),
            1
        );
        assert_eq!(all(BooleanArray::from(vec![true])), json!([true]));
        assert_eq!(all(NullArray::new(1)), json!([null]));
        assert_eq!(all(BinaryArray::from(vec![&b"\xff\x00a"[..]])), json!(["/wBh"]));
    }

    #[test]
    fn decimals_are_exact_text() {
        let decimals = Decimal128Array::from(vec![1250, -5, 0])
            .with_precision_and_scale(38, 2)
            .unwrap();
        assert_eq!(all(decimals), json!(["12.50", "-0.05", "0.00"]));
    }

    #[test]
    fn dates_and_timestamps_are_iso_8601() {
        assert_eq!(
            all(Date32Array::from(vec![20_778, -1])),
            json!(["2026-11-21", "1969-12-31"])
        );
        let naive = TimestampMillisecondArray::from(vec![1_500, 0]);
        assert_eq!(all(naive), json!(["1970-01-01T00:00:01.500", "1970-01-01T00:00:00"]));
        let zoned = TimestampMicrosecondArray::from(vec![1]).with_timezone("Europe/Vienna");
        assert_eq!(all(zoned), json!(["1970-01-01T00:00:00.000001Z"]));
        assert_eq!(all(Time32SecondArray::from(vec![61])), json!(["00:01:01"]));
        assert_eq!(
            all(DurationMillisecondArray::from(vec![-1_500, 2_000])),
            json!(["-1.5", "2"])
        );
        let absurd: ArrayRef = Arc::new(TimestampSecondArray::from(vec![i64::MAX]));
        assert!(cell(&absurd, 0).is_err());
    }

    #[test]
    fn nested_columns_are_nested_json() {
        let field = Arc::new(Field::new("item", DataType::Int32, true));
        let values = Arc::new(Int32Array::from(vec![Some(1), None, Some(3)]));
        let lists = ListArray::new(field, OffsetBuffer::new(vec![0, 2, 2, 3].into()), values, None);
        let parts = StructArray::from(vec![(
            Arc::new(Field::new("ids", lists.data_type().clone(), true)),
            Arc::new(lists) as ArrayRef,
        )]);
        assert_eq!(all(parts), json!([{"ids": [1, null]}, {"ids": []}, {"ids": [3]}]));
        let dictionary: DictionaryArray<Int32Type> = vec![Some("a"), None, Some("a")].into_iter().collect();
        assert_eq!(all(dictionary), json!(["a", null, "a"]));
        let mut maps = MapBuilder::new(None, Int32Builder::new(), StringBuilder::new());
        maps.keys().append_value(7);
        maps.values().append_value("seven");
        maps.append(true).unwrap();
        assert_eq!(all(maps.finish()), json!([{"7": "seven"}]));
    }
}
