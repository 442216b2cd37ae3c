//! Memory of a column that is fixed by its type: a record can name a type whose values take
//! gigabytes even if all of them are null.

use arrow::datatypes::{DataType, Schema};

/// Maximum fixed memory of a batch's carried columns, in bytes.
const BATCH_BYTES_MAX: u64 = 1 << 30;
/// Approximate overhead of a variable-size value in its column.
const VALUE_OVERHEAD_BYTES: u64 = 16;

/// Checks that the fixed memory of `rows` rows of these columns is within the limit. An error is
/// one line.
pub fn check_fixed_memory(schema: &Schema, rows: u64) -> Result<(), String> {
    let mut row_bytes = 0u64;
    for field in schema.fields() {
        let bytes = value_bytes(field.data_type()).map_err(|why| format!("column `{}` {why}", field.name()))?;
        row_bytes = row_bytes.saturating_add(bytes);
    }
    match row_bytes.saturating_mul(rows) {
        0..=BATCH_BYTES_MAX => Ok(()),
        bytes => Err(format!(
            "the types of the carried columns alone require {row_bytes} bytes a row: {bytes} for {rows} rows, more than {BATCH_BYTES_MAX}"
        )),
    }
}

/// Fixed bytes of a value. The error is the reason why the type has no values; it follows a
/// column's name in the message.
fn value_bytes(data_type: &DataType) -> Result<u64, String> {
    let length = |n: i32| u64::try_from(n).map_err(|_| format!("has values of {n} entries"));
    Ok(match data_type {
        DataType::FixedSizeBinary(n) => length(*n)?,
        DataType::FixedSizeList(item, n) => length(*n)?.saturating_mul(value_bytes(item.data_type())?),
        DataType::Struct(fields) => {
            let mut sum = 1u64;
            for field in fields {
                sum = sum.saturating_add(value_bytes(field.data_type())?);
            }
            sum
        }
        DataType::List(item)
        | DataType::LargeList(item)
        | DataType::ListView(item)
        | DataType::LargeListView(item)
        | DataType::Map(item, _) => value_bytes(item.data_type()).map(|_| VALUE_OVERHEAD_BYTES)?,
        DataType::Dictionary(_, value) => value_bytes(value).map(|_| VALUE_OVERHEAD_BYTES)?,
        DataType::RunEndEncoded(_, value) => value_bytes(value.data_type()).map(|_| VALUE_OVERHEAD_BYTES)?,
        DataType::Union(..) => return Err("is of a union, which no column can carry".into()),
        other => other
            .primitive_width()
            .map_or(VALUE_OVERHEAD_BYTES, |width| width as u64),
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::datatypes::Field;

    use super::*;

    #[test]
    fn fixed_memory_is_bounded() {
        let check = |kind: DataType, rows| check_fixed_memory(&Schema::new(vec![Field::new("a", kind, true)]), rows);
        let item = |kind| Arc::new(Field::new("item", kind, true));
        let embedding = DataType::FixedSizeList(item(DataType::Float32), 4096);
        assert_eq!(check(embedding.clone(), 4096), Ok(()));
        assert!(check(embedding, 1_000_000).unwrap_err().contains("16384 bytes a row"));
        for (kind, word) in [
            (DataType::FixedSizeBinary(i32::MAX), "more than"),
            (DataType::FixedSizeBinary(-1), "`a` has values of -1 entries"),
            (
                DataType::FixedSizeList(item(DataType::FixedSizeBinary(1 << 20)), 1 << 20),
                "more than",
            ),
            (DataType::List(item(DataType::FixedSizeBinary(-1))), "-1 entries"),
            (
                DataType::Struct(vec![item(DataType::FixedSizeBinary(i32::MAX))].into()),
                "more than",
            ),
        ] {
            let error = check(kind.clone(), 1).unwrap_err();
            assert!(error.contains(word), "{kind}: {error}");
        }
    }
}
