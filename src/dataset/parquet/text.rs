//! Texts that are not UTF-8: only their own rows fail, not the other rows of the batch.
//!
//! The decoder checks all texts of a batch, and all entries of a dictionary. If one is invalid, the
//! rows are read again as bytes, and each cell is checked by itself.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch, UInt64Array};
use arrow::compute::{CastOptions, cast_with_options, take};
use arrow::datatypes::{DataType, Field, FieldRef, Schema, SchemaRef};
use parquet::arrow::arrow_reader::{ArrowReaderMetadata, ArrowReaderOptions};
use parquet::basic::Type as Physical;
use parquet::errors::ParquetError;
use parquet::file::metadata::{
    ColumnChunkMetaData, FileMetaData, ParquetMetaData, ParquetMetaDataBuilder, RowGroupMetaData,
};
use parquet::schema::types::{SchemaDescPtr, SchemaDescriptor, Type, TypePtr};

/// An unreadable cell. Its value is null, and the reason becomes the error of its row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadCell {
    /// Row index in the batch.
    pub row: usize,
    pub column: String,
    pub why: String,
}

/// Whether a column holds texts, at any depth.
pub(crate) fn has_text(data_type: &DataType) -> bool {
    as_bytes(data_type) != *data_type
}

/// The footer of the same file, with byte columns in place of text columns.
pub(crate) fn footer_with_bytes(footer: &ArrowReaderMetadata) -> Result<ArrowReaderMetadata, ParquetError> {
    let metadata = footer.metadata();
    let file = metadata.file_metadata();
    let root = without_text(file.schema_descr().root_schema())?;
    let columns: SchemaDescPtr = Arc::new(SchemaDescriptor::new(Arc::new(root)));
    let groups = metadata.row_groups().iter().map(|group| rebuild_group(group, &columns));
    let groups = groups.collect::<Result<Vec<_>, _>>()?;
    let file = FileMetaData::new(file.version(), file.num_rows(), None, None, columns, None);
    let metadata: ParquetMetaData = ParquetMetaDataBuilder::new(file).set_row_groups(groups).build();
    let fields = footer.schema().fields().iter().map(as_bytes_field);
    let schema = Schema::new_with_metadata(fields.collect::<Vec<_>>(), footer.schema().metadata().clone());
    let options = ArrowReaderOptions::new().with_schema(Arc::new(schema));
    ArrowReaderMetadata::try_new(Arc::new(metadata), options)
}

/// Converts the byte columns of a batch to the types of `schema`, and returns the cells that are no
/// valid texts.
pub(crate) fn decode_texts(batch: &RecordBatch, schema: &SchemaRef) -> Result<(RecordBatch, Vec<BadCell>), String> {
    let mut bad = Vec::new();
    let mut columns = Vec::new();
    let mut fields = Vec::new();
    for (column, field) in batch.columns().iter().zip(schema.fields()) {
        let before = bad.len();
        let read = if column.data_type() == field.data_type() {
            column.clone()
        } else {
            text_column(column, field, &mut bad)?
        };
        // Unreadable cells are null.
        let nullable = field.is_nullable() || bad.len() > before;
        fields.push(Arc::new(Field::clone(field).with_nullable(nullable)));
        columns.push(read);
    }
    let schema = Schema::new_with_metadata(fields, schema.metadata().clone());
    let batch = RecordBatch::try_new(Arc::new(schema), columns).map_err(|e| e.to_string())?;
    Ok((batch, bad))
}

fn text_column(column: &ArrayRef, field: &FieldRef, bad: &mut Vec<BadCell>) -> Result<ArrayRef, String> {
    let strict = CastOptions {
        safe: false,
        ..CastOptions::default()
    };
    let cast = |column: &ArrayRef| cast_with_options(column, field.data_type(), &strict).map_err(|e| e.to_string());
    if let Ok(read) = cast(column) {
        return Ok(read);
    }
    let mut rows_or_null: Vec<Option<u64>> = Vec::with_capacity(column.len());
    for row in 0..column.len() {
        let is_text = cast(&column.slice(row, 1)).is_ok();
        rows_or_null.push(is_text.then_some(row as u64));
        if !is_text {
            bad.push(BadCell {
                row,
                column: field.name().clone(),
                why: utf8_error(column, row),
            });
        }
    }
    let valid = take(column, &UInt64Array::from(rows_or_null), None).map_err(|e| e.to_string())?;
    cast(&valid)
}

/// The error for a cell, with the first byte that is not UTF-8.
fn utf8_error(column: &ArrayRef, row: usize) -> String {
    let bytes = match column.data_type() {
        DataType::Binary => Some(column.as_binary::<i32>().value(row)),
        DataType::LargeBinary => Some(column.as_binary::<i64>().value(row)),
        DataType::BinaryView => Some(column.as_binary_view().value(row)),
        _ => None,
    };
    match bytes.and_then(|bytes| std::str::from_utf8(bytes).err()) {
        Some(error) => format!("not UTF-8 at byte {} of the text", error.valid_up_to() + 1),
        None => "a text in it is not UTF-8".into(),
    }
}

fn as_bytes_field(field: &FieldRef) -> FieldRef {
    Arc::new(Field::clone(field).with_data_type(as_bytes(field.data_type())))
}

/// The type with bytes in place of texts, at any depth; dictionaries are unpacked.
fn as_bytes(data_type: &DataType) -> DataType {
    match data_type {
        DataType::Utf8 => DataType::Binary,
        DataType::LargeUtf8 => DataType::LargeBinary,
        DataType::Utf8View => DataType::BinaryView,
        DataType::Dictionary(_, values) => as_bytes(values),
        DataType::List(item) => DataType::List(as_bytes_field(item)),
        DataType::LargeList(item) => DataType::LargeList(as_bytes_field(item)),
        DataType::FixedSizeList(item, n) => DataType::FixedSizeList(as_bytes_field(item), *n),
        DataType::Struct(fields) => DataType::Struct(fields.iter().map(as_bytes_field).collect()),
        DataType::Map(entries, sorted) => DataType::Map(as_bytes_field(entries), *sorted),
        other => other.clone(),
    }
}

/// The type without text annotations. The recursion is bounded, since the depth of the schema was
/// checked with the footer.
fn without_text(column_type: &Type) -> Result<Type, ParquetError> {
    let info = column_type.get_basic_info();
    let id = info.has_id().then(|| info.id());
    if column_type.is_group() {
        let fields = column_type.get_fields().iter();
        let fields = fields.map(|field| Ok::<TypePtr, ParquetError>(Arc::new(without_text(field)?)));
        let mut group = Type::group_type_builder(column_type.name())
            .with_converted_type(info.converted_type())
            .with_logical_type(info.logical_type_ref().cloned())
            .with_fields(fields.collect::<Result<Vec<_>, _>>()?)
            .with_id(id);
        if info.has_repetition() {
            group = group.with_repetition(info.repetition());
        }
        return group.build();
    }
    if column_type.get_physical_type() != Physical::BYTE_ARRAY || !is_text(column_type) {
        return Ok(column_type.clone());
    }
    Type::primitive_type_builder(column_type.name(), Physical::BYTE_ARRAY)
        .with_repetition(info.repetition())
        .with_id(id)
        .build()
}

fn is_text(column_type: &Type) -> bool {
    use parquet::basic::{ConvertedType, LogicalType};
    let info = column_type.get_basic_info();
    match info.logical_type_ref() {
        Some(logical) => matches!(logical, LogicalType::String | LogicalType::Json | LogicalType::Enum),
        None => matches!(
            info.converted_type(),
            ConvertedType::UTF8 | ConvertedType::JSON | ConvertedType::ENUM
        ),
    }
}

fn rebuild_group(group: &RowGroupMetaData, columns: &SchemaDescPtr) -> Result<RowGroupMetaData, ParquetError> {
    let chunks = group.columns().iter().enumerate().map(|(leaf, chunk)| {
        let builder = ColumnChunkMetaData::builder(columns.column(leaf))
            .set_num_values(chunk.num_values())
            .set_compression_codec(chunk.compression_codec())
            .set_total_compressed_size(chunk.compressed_size())
            .set_total_uncompressed_size(chunk.uncompressed_size())
            .set_data_page_offset(chunk.data_page_offset())
            .set_dictionary_page_offset(chunk.dictionary_page_offset());
        builder.build()
    });
    RowGroupMetaData::builder(columns.clone())
        .set_num_rows(group.num_rows())
        .set_total_byte_size(group.total_byte_size())
        .set_column_metadata(chunks.collect::<Result<Vec<_>, _>>()?)
        .build()
}
