//! An Arrow schema as text for ledger records: the IPC schema message, base64. Types come back exactly.

use std::sync::Arc;

use arrow::datatypes::{Schema, SchemaRef};
use arrow::ipc::convert::try_schema_from_ipc_buffer;
use arrow::ipc::root_as_message_with_opts;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Deserializer, Serializer};

use super::flatbuffer::{bounds, first_line};

/// Longest text that is decoded, in bytes.
const TEXT_BYTES_MAX: usize = 16 << 20;

/// The schema as one line of text.
pub fn encode(schema: &Schema) -> String {
    parquet::arrow::encode_arrow_schema(schema)
}

/// The schema that [`encode`] was given, or one line that says why there is none.
pub fn decode(text: &str) -> Result<SchemaRef, String> {
    if text.len() > TEXT_BYTES_MAX {
        return Err(format!("a schema of {} bytes, more than {TEXT_BYTES_MAX}", text.len()));
    }
    let bytes = STANDARD
        .decode(text)
        .map_err(|e| format!("schema is not base64: {e}"))?;
    check_unfolded(&bytes)?;
    let schema = try_schema_from_ipc_buffer(&bytes).map_err(|e| format!("not an Arrow schema: {e}"))?;
    Ok(Arc::new(schema))
}

/// Whether decoding this text takes memory in proportion to its length.
pub fn is_sound(text: &str) -> bool {
    let bytes = STANDARD.decode(text);
    text.len() <= TEXT_BYTES_MAX && bytes.is_ok_and(|bytes| check_unfolded(&bytes).is_ok())
}

/// Checks that the decoded message stays within the memory limit.
fn check_unfolded(bytes: &[u8]) -> Result<(), String> {
    // The message begins behind the continuation marker, if any, and the length, as in the decoder.
    let start = if bytes.starts_with(&[0xff; 4]) { 8 } else { 4 };
    let message = bytes.get(start..).ok_or("not an Arrow schema: it ends too early")?;
    match root_as_message_with_opts(&bounds(message), message) {
        Ok(_) => Ok(()),
        Err(error) => Err(format!("not an Arrow schema: {}", first_line(error))),
    }
}

/// For `#[serde(with = "schema_text")]`.
pub fn serialize<S: Serializer>(schema: &SchemaRef, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&encode(schema))
}

/// For `#[serde(with = "schema_text")]`.
pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SchemaRef, D::Error> {
    decode(&String::deserialize(deserializer)?).map_err(serde::de::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow::datatypes::{DataType, Field, TimeUnit};

    #[test]
    fn types_and_metadata_come_back_exactly() {
        let item = Field::new("item", DataType::Decimal128(12, 3), true);
        let schema = Schema::new(vec![
            Field::new("a", DataType::Utf8View, false),
            Field::new(
                "t",
                DataType::Timestamp(TimeUnit::Nanosecond, Some("Europe/Vienna".into())),
                true,
            ),
            Field::new("l", DataType::LargeList(Arc::new(item)), true).with_metadata([("k", "v")]),
        ]);
        assert_eq!(*decode(&encode(&schema)).unwrap(), schema);
    }

    #[test]
    fn foreign_text_is_refused() {
        assert!(decode("no base64!").is_err());
        assert!(decode("").is_err());
        assert!(decode("AAAAAAAAAAAAAAAA").is_err());
        assert!(decode("/////wAAAH8AAAAA").is_err());
    }
}
