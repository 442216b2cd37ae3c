//! Encodes an Arrow schema as text for ledger records: the IPC schema message in base64. All types
//! are decoded exactly.

use std::sync::Arc;

use arrow::datatypes::{Schema, SchemaRef};
use arrow::ipc::convert::try_schema_from_ipc_buffer;
use arrow::ipc::root_as_message_with_opts;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Deserializer, Serializer};

use super::flatbuffer::{first_line, verifier_options};

/// Maximum length of a text that is decoded, in bytes.
const TEXT_BYTES_MAX: usize = 16 << 20;

/// The schema as one line of text.
pub fn encode(schema: &Schema) -> String {
    parquet::arrow::encode_arrow_schema(schema)
}

/// The schema of a text from [`encode`]; an error is one line.
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

/// Whether the memory for decoding this text is bounded in proportion to its length.
pub fn is_bounded(text: &str) -> bool {
    let bytes = STANDARD.decode(text);
    text.len() <= TEXT_BYTES_MAX && bytes.is_ok_and(|bytes| check_unfolded(&bytes).is_ok())
}

/// Checks the size of the message with all references unfolded: see [`super::flatbuffer`].
fn check_unfolded(bytes: &[u8]) -> Result<(), String> {
    // As in the decoder, the message comes after its length, which may have a continuation marker
    // before it.
    let start = if bytes.starts_with(&[0xff; 4]) { 8 } else { 4 };
    let message = bytes.get(start..).ok_or("not an Arrow schema: it ends too early")?;
    match root_as_message_with_opts(&verifier_options(message), message) {
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
    fn types_and_metadata_are_decoded_exactly() {
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
