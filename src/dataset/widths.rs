//! Bytes that a value takes whatever it holds, which bounds the memory that column types alone can
//! require.

use arrow::datatypes::{DataType, Schema};

/// Maximum bytes of a batch's carried columns that their types alone require.
const BATCH_BYTES_MAX: u64 = 1 << 30;
/// Approximate overhead of a variable-size value in its column.
const PLACE_BYTES: u64 = 16;

/// Checks that `rows` rows of these columns can be held. An error is one line.
pub fn check_room(schema: &Schema, rows: u64) -> Result<(), String> {
    let mut sum = 0u64;
    for field in schema.fields() {
        let width = width(field.data_type()).map_err(|why| format!("column `{}` {why}", field.name()))?;
        sum = sum.saturating_add(width);
    }
    match sum.saturating_mul(rows) {
        0..=BATCH_BYTES_MAX => Ok(()),
        bytes => Err(format!(
            "the carried columns take {sum} bytes a row whatever they hold: {bytes} for {rows} rows, more than {BATCH_BYTES_MAX}"
        )),
    }
}

/// Bytes of a value, or one line with the reason why the type has no values; it goes behind a
/// column's name.
fn width(kind: &DataType) -> Result<u64, String> {
    let size = |n: i32| u64::try_from(n).map_err(|_| format!("has values of {n} entries"));
    Ok(match kind {
        DataType::FixedSizeBinary(n) => size(*n)?,
        DataType::FixedSizeList(item, n) => size(*n)?.saturating_mul(width(item.data_type())?),
        DataType::Struct(fields) => {
            let mut sum = 1u64;
            for field in fields {
                sum = sum.saturating_add(width(field.data_type())?);
            }
            sum
        }
        DataType::List(item)
        | DataType::LargeList(item)
        | DataType::ListView(item)
        | DataType::LargeListView(item)
        | DataType::Map(item, _) => width(item.data_type()).map(|_| PLACE_BYTES)?,
        DataType::Dictionary(_, value) => width(value).map(|_| PLACE_BYTES)?,
        DataType::RunEndEncoded(_, value) => width(value.data_type()).map(|_| PLACE_BYTES)?,
        DataType::Union(..) => return Err("is of a union, which no column can carry".into()),
        other => other.primitive_width().map_or(PLACE_BYTES, |width| width as u64),
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::datatypes::Field;

    use super::*;

    #[test]
    fn what_types_alone_can_ask_for_is_bounded() {
        let of = |kind: DataType, rows| check_room(&Schema::new(vec![Field::new("a", kind, true)]), rows);
        let item = |kind| Arc::new(Field::new("item", kind, true));
        let embedding = DataType::FixedSizeList(item(DataType::Float32), 4096);
        assert_eq!(of(embedding.clone(), 4096), Ok(()));
        assert!(of(embedding, 1_000_000).unwrap_err().contains("16384 bytes a row"));
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
            let error = of(kind.clone(), 1).unwrap_err();
            assert!(error.contains(word), "{kind}: {error}");
        }
    }
}
