//! Limits on Arrow's flatbuffer messages: a message may refer to the same text or table any number
//! of times, and the decoder copies it each time.

use flatbuffers::VerifierOptions;

/// Maximum size of a message with all references unfolded, as a multiple of its own size. Schemas
/// that Arrow wrote stay below 8.
const UNFOLDED_FACTOR_MAX: usize = 32;
/// Size with all references unfolded that is allowed for every message, in bytes.
const UNFOLDED_BYTES_ALLOWED: usize = 64 << 10;

/// Options for the verifier, which checks the message before it is decoded.
pub(crate) fn verifier_options(message: &[u8]) -> VerifierOptions {
    let limit = message.len().saturating_mul(UNFOLDED_FACTOR_MAX);
    VerifierOptions {
        max_apparent_size: limit.max(UNFOLDED_BYTES_ALLOWED),
        ..VerifierOptions::default()
    }
}

/// The first line of an error, which is the reason; the other lines are a trace within the
/// flatbuffer.
pub(crate) fn first_line(error: impl ToString) -> String {
    error.to_string().lines().next().unwrap_or_default().to_string()
}

#[cfg(test)]
mod tests {
    use arrow::ipc::{Field, Footer, Int, Message, Schema};
    use arrow::ipc::{FieldArgs, FooterArgs, IntArgs, MessageArgs, MessageHeader, MetadataVersion, SchemaArgs, Type};
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;
    use flatbuffers::{FlatBufferBuilder, WIPOffset};

    use super::super::schema_text;
    use crate::dataset::arrow::footer::decode_footer;

    /// A schema that refers to one column `times` times.
    fn schema<'a>(buffer: &mut FlatBufferBuilder<'a>, name: &str, times: usize) -> WIPOffset<Schema<'a>> {
        let name = buffer.create_string(name);
        let int = IntArgs {
            bitWidth: 64,
            is_signed: true,
        };
        let int = Int::create(buffer, &int);
        let children = buffer.create_vector::<WIPOffset<Field>>(&[]);
        let column = FieldArgs {
            name: Some(name),
            type_type: Type::Int,
            type_: Some(int.as_union_value()),
            children: Some(children),
            ..FieldArgs::default()
        };
        let column = Field::create(buffer, &column);
        let fields = buffer.create_vector(&vec![column; times]);
        let schema = SchemaArgs {
            fields: Some(fields),
            ..SchemaArgs::default()
        };
        Schema::create(buffer, &schema)
    }

    fn footer(name: &str, times: usize) -> Vec<u8> {
        let mut buffer = FlatBufferBuilder::new();
        let schema = schema(&mut buffer, name, times);
        let footer = FooterArgs {
            version: MetadataVersion::V5,
            schema: Some(schema),
            ..FooterArgs::default()
        };
        let footer = Footer::create(&mut buffer, &footer);
        buffer.finish(footer, None);
        buffer.finished_data().to_vec()
    }

    fn text(name: &str, times: usize) -> String {
        let mut buffer = FlatBufferBuilder::new();
        let schema = schema(&mut buffer, name, times);
        let message = MessageArgs {
            version: MetadataVersion::V5,
            header_type: MessageHeader::Schema,
            header: Some(schema.as_union_value()),
            ..MessageArgs::default()
        };
        let message = Message::create(&mut buffer, &message);
        buffer.finish(message, None);
        let bytes = buffer.finished_data();
        let framed = [&[0xff; 4], &(bytes.len() as u32).to_le_bytes()[..], bytes].concat();
        STANDARD.encode(framed)
    }

    /// A message of eight kilobytes that refers to a column of four kilobytes a thousand times.
    #[test]
    fn repeated_references_are_refused_before_they_are_copied() {
        let long = "x".repeat(4096);
        let columns = |times: usize| {
            let footer = decode_footer(&footer(&long, times), 1 << 30)?;
            let text = schema_text::decode(&text(&long, times))?;
            assert_eq!(footer.schema, text);
            Ok::<usize, String>(text.fields().len())
        };
        assert_eq!(columns(10), Ok(10));
        assert!(columns(1000).is_err());
        let size = 1 << 30;
        assert!(
            decode_footer(&footer(&long, 1000), size)
                .unwrap_err()
                .contains("its footer is broken")
        );
        let text = text(&long, 1000);
        assert!(schema_text::decode(&text).unwrap_err().contains("not an Arrow schema"));
        assert!(!schema_text::is_bounded(&text));
    }
}
