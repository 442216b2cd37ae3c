//! Checks the field types of Parquet footers and page headers before the decoder sees the bytes.
//!
//! The decoder goes by a field's number and assumes its type. If the type differs, it misreads the
//! field and all bytes after it: for example, as a schema that claims gigabytes. [`check_footer`]
//! and [`check_page_header`] refuse such bytes, so the decoder and gristmill's own checks see the
//! same fields at the same offsets.
//!
//! The table follows
//! <https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift>. It must
//! hold each field that the decoder knows, even unused ones; unknown fields are skipped by their
//! encoded type, as in the decoder.

use self::FieldType::{Binary, Bool, Byte, Double, Int, List, Struct};
use super::thrift::{
    BINARY, BOOL_FALSE, BOOL_TRUE, BYTE, CompactReader, DOUBLE, I16, I32, I64, LIST, STRUCT, ThriftError,
};

/// A type of the format. No type contains itself, so recursion is bounded by the table.
enum FieldType {
    Bool,
    Byte,
    /// An integer of 16, 32 or 64 bits, which are encoded alike. fastparquet changes all integers
    /// to 64 bits when it edits another writer's footer.
    Int,
    Double,
    /// Bytes or text.
    Binary,
    List(&'static FieldType),
    /// The name for errors, and the fields by their numbers. A union is a struct with a single
    /// field; the decoder checks that there is only one.
    Struct(&'static str, &'static [(i64, FieldType)]),
}

const FILE: FieldType = Struct(
    "file metadata",
    &[
        (1, Int), // version
        (2, List(&SCHEMA)),
        (3, Int), // num_rows
        (4, List(&ROW_GROUP)),
        (5, List(&KEY_VALUE)),
        (6, Binary), // created_by
        (7, List(&COLUMN_ORDER)),
        (8, ENCRYPTION),
        (9, Binary), // footer_signing_key_metadata
    ],
);

const SCHEMA: FieldType = Struct(
    "a schema",
    &[
        (1, Int),    // type
        (2, Int),    // type_length
        (3, Int),    // repetition_type
        (4, Binary), // name
        (5, Int),    // num_children
        (6, Int),    // converted_type
        (7, Int),    // scale
        (8, Int),    // precision
        (9, Int),    // field_id
        (10, LOGICAL_TYPE),
    ],
);

const LOGICAL_TYPE: FieldType = Struct(
    "a logical type",
    &[
        (1, EMPTY),                                                 // STRING
        (2, EMPTY),                                                 // MAP
        (3, EMPTY),                                                 // LIST
        (4, EMPTY),                                                 // ENUM
        (5, Struct("a decimal type", &[(1, Int), (2, Int)])),       // scale, precision
        (6, EMPTY),                                                 // DATE
        (7, TIME),                                                  // TIME
        (8, TIME),                                                  // TIMESTAMP
        (10, Struct("an integer type", &[(1, Byte), (2, Bool)])),   // bitWidth, isSigned
        (11, EMPTY),                                                // UNKNOWN
        (12, EMPTY),                                                // JSON
        (13, EMPTY),                                                // BSON
        (14, EMPTY),                                                // UUID
        (15, EMPTY),                                                // FLOAT16
        (16, Struct("a variant type", &[(1, Byte)])),               // specification_version
        (17, Struct("a geometry type", &[(1, Binary)])),            // crs
        (18, Struct("a geography type", &[(1, Binary), (2, Int)])), // crs, algorithm
        (19, EMPTY),                                                // FILE
    ],
);

/// isAdjustedToUTC, and the unit: MILLIS, MICROS or NANOS.
const TIME: FieldType = Struct(
    "a time type",
    &[
        (1, Bool),
        (2, Struct("a time unit", &[(1, EMPTY), (2, EMPTY), (3, EMPTY)])),
    ],
);

const EMPTY: FieldType = Struct("an empty struct", &[]);

const KEY_VALUE: FieldType = Struct("key-value metadata", &[(1, Binary), (2, Binary)]);

const ROW_GROUP: FieldType = Struct(
    "a row group",
    &[
        (1, List(&COLUMN_CHUNK)),
        (2, Int), // total_byte_size
        (3, Int), // num_rows
        (4, List(&SORTING_COLUMN)),
        (5, Int), // file_offset
        (6, Int), // total_compressed_size
        (7, Int), // ordinal
    ],
);

/// column_idx, descending, nulls_first.
const SORTING_COLUMN: FieldType = Struct("a sorting column", &[(1, Int), (2, Bool), (3, Bool)]);

const COLUMN_CHUNK: FieldType = Struct(
    "a column chunk",
    &[
        (1, Binary), // file_path
        (2, Int),    // file_offset
        (3, COLUMN),
        (4, Int), // offset_index_offset
        (5, Int), // offset_index_length
        (6, Int), // column_index_offset
        (7, Int), // column_index_length
        (8, COLUMN_ENCRYPTION),
        (9, Binary), // encrypted_column_metadata
    ],
);

const COLUMN: FieldType = Struct(
    "column metadata",
    &[
        (1, Int),           // type
        (2, List(&Int)),    // encodings
        (3, List(&Binary)), // path_in_schema
        (4, Int),           // codec
        (5, Int),           // num_values
        (6, Int),           // total_uncompressed_size
        (7, Int),           // total_compressed_size
        (8, List(&KEY_VALUE)),
        (9, Int),  // data_page_offset
        (10, Int), // index_page_offset
        (11, Int), // dictionary_page_offset
        (12, STATISTICS),
        (13, List(&ENCODING_STATISTICS)),
        (14, Int), // bloom_filter_offset
        (15, Int), // bloom_filter_length
        (16, SIZE_STATISTICS),
        (17, GEOSPATIAL_STATISTICS),
    ],
);

const STATISTICS: FieldType = Struct(
    "statistics",
    &[
        (1, Binary), // max
        (2, Binary), // min
        (3, Int),    // null_count
        (4, Int),    // distinct_count
        (5, Binary), // max_value
        (6, Binary), // min_value
        (7, Bool),   // is_max_value_exact
        (8, Bool),   // is_min_value_exact
        (9, Int),    // nan_count
    ],
);

/// page_type, encoding, count.
const ENCODING_STATISTICS: FieldType = Struct("encoding statistics", &[(1, Int), (2, Int), (3, Int)]);

/// unencoded_byte_array_data_bytes, repetition_level_histogram, definition_level_histogram.
const SIZE_STATISTICS: FieldType = Struct("size statistics", &[(1, Int), (2, List(&Int)), (3, List(&Int))]);

/// bbox, geospatial_types.
const GEOSPATIAL_STATISTICS: FieldType = Struct("geospatial statistics", &[(1, BOUNDING_BOX), (2, List(&Int))]);

/// Minimum and maximum of x, y, z and m.
const BOUNDING_BOX: FieldType = Struct(
    "a bounding box",
    &[
        (1, Double),
        (2, Double),
        (3, Double),
        (4, Double),
        (5, Double),
        (6, Double),
        (7, Double),
        (8, Double),
    ],
);

/// TYPE_ORDER, IEEE_754_TOTAL_ORDER, INT96_TIMESTAMP_ORDER.
const COLUMN_ORDER: FieldType = Struct("a column order", &[(1, EMPTY), (2, EMPTY), (3, EMPTY)]);

/// AES_GCM_V1, AES_GCM_CTR_V1.
const ENCRYPTION: FieldType = Struct("an encryption algorithm", &[(1, AES), (2, AES)]);

/// aad_prefix, aad_file_unique, supply_aad_prefix.
const AES: FieldType = Struct("an encryption algorithm", &[(1, Binary), (2, Binary), (3, Bool)]);

/// ENCRYPTION_WITH_FOOTER_KEY, ENCRYPTION_WITH_COLUMN_KEY.
const COLUMN_ENCRYPTION: FieldType = Struct("a column's encryption", &[(1, EMPTY), (2, COLUMN_KEY)]);

/// path_in_schema, key_metadata.
const COLUMN_KEY: FieldType = Struct("a column's key", &[(1, List(&Binary)), (2, Binary)]);

const PAGE_HEADER: FieldType = Struct(
    "a page header",
    &[
        (1, Int), // type
        (2, Int), // uncompressed_page_size
        (3, Int), // compressed_page_size
        (4, Int), // crc
        (5, DATA_PAGE),
        (6, EMPTY), // index_page_header
        (7, DICTIONARY_PAGE),
        (8, DATA_PAGE_V2),
    ],
);

/// num_values, encoding, definition_level_encoding, repetition_level_encoding, statistics.
const DATA_PAGE: FieldType = Struct(
    "a data page's header",
    &[(1, Int), (2, Int), (3, Int), (4, Int), (5, STATISTICS)],
);

/// num_values, encoding, is_sorted.
const DICTIONARY_PAGE: FieldType = Struct("a dictionary page's header", &[(1, Int), (2, Int), (3, Bool)]);

const DATA_PAGE_V2: FieldType = Struct(
    "a data page's header",
    &[
        (1, Int),  // num_values
        (2, Int),  // num_nulls
        (3, Int),  // num_rows
        (4, Int),  // encoding
        (5, Int),  // definition_levels_byte_length
        (6, Int),  // repetition_levels_byte_length
        (7, Bool), // is_compressed
        (8, STATISTICS),
    ],
);

/// Refuses a footer with a field of another type, or with fields that are not in ascending order.
pub fn check_footer(footer: &[u8]) -> Result<(), String> {
    check_value(&mut CompactReader::new(footer), STRUCT, &FILE, "").map_err(|(within, error)| match error {
        ThriftError::Truncated => format!("its footer is broken: it ends within {within}"),
        ThriftError::Invalid(why) => format!("its footer is broken: it has {within} with {why}"),
    })
}

/// Like [`check_footer`], for the page header at the start of `bytes`.
pub fn check_page_header(bytes: &[u8]) -> Result<(), ThriftError> {
    check_value(&mut CompactReader::new(bytes), STRUCT, &PAGE_HEADER, "").map_err(|(_, error)| error)
}

/// Checks and skips a value of struct `within`. `kind` is its encoded type, and must fit
/// `expected`. Errors name the struct.
fn check_value(
    reader: &mut CompactReader,
    kind: u8,
    expected: &FieldType,
    within: &'static str,
) -> Result<(), (&'static str, ThriftError)> {
    match (expected, kind) {
        (Struct(name, fields), STRUCT) => {
            let (mut id, mut last) = (0, 0);
            while let Some(kind) = reader.field(&mut id).map_err(|e| (*name, e))? {
                // All writers use ascending order. If a field came twice, the check might use one
                // value, and the decoder the other.
                if id <= last {
                    return Err((name, ThriftError::Invalid("fields out of order")));
                }
                last = id;
                match fields.iter().find(|(known, _)| *known == id) {
                    Some((_, field)) => check_value(reader, kind, field, name)?,
                    None => reader.skip(kind).map_err(|e| (*name, e))?,
                }
            }
            Ok(())
        }
        // The element type of an empty list is not checked, since some writers give none. Each
        // element takes at least a byte, so the loop is bounded by the input's length.
        (List(element), LIST) => {
            let (kind, count) = reader.list().map_err(|e| (within, e))?;
            (0..count).try_for_each(|_| check_value(reader, kind, element, within))
        }
        (Bool, BOOL_TRUE | BOOL_FALSE)
        | (Byte, BYTE)
        | (Int, I16 | I32 | I64)
        | (Double, DOUBLE)
        | (Binary, BINARY) => reader.skip(kind).map_err(|e| (within, e)),
        _ => Err((within, ThriftError::Invalid("a field of another type"))),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parquet::basic::{
        Compression, EdgeInterpolationAlgorithm, Encoding, LogicalType, PageType, Repetition, TimeUnit,
        Type as Physical,
    };
    use parquet::data_type::ByteArray;
    use parquet::file::metadata::{
        ColumnChunkMetaData, FileMetaData, KeyValue, LevelHistogram, PageEncodingStats, ParquetMetaData,
        ParquetMetaDataReader, ParquetMetaDataWriter, RowGroupMetaData, SortingColumn,
    };
    use parquet::file::statistics::Statistics;
    use parquet::geospatial::bounding_box::BoundingBox;
    use parquet::geospatial::statistics::GeospatialStatistics;
    use parquet::schema::types::{SchemaDescriptor, Type as Node, TypePtr};

    use super::*;

    #[test]
    fn fields_that_the_decoder_would_misread_are_refused() {
        let check = |footer: &[u8], why: &str| {
            assert_eq!(
                check_footer(footer),
                Err(format!("its footer is broken: {why}")),
                "{footer:x?}"
            );
        };
        // A wrong type in a field before the schema, a schema that is no list, and a schema that is
        // a list of numbers.
        check(&[0x17], "it has file metadata with a field of another type");
        check(&[0x28], "it has file metadata with a field of another type");
        check(&[0x29, 0x15, 0x02], "it has file metadata with a field of another type");
        // Within logical types, field 10 of a schema's only element: a scale that is a double, a
        // sign that is a number, a width of 32 bits, a unit that is a text.
        let logical = |bytes: &[u8]| [&[0x29, 0x1c, 0xac][..], bytes].concat();
        check(
            &logical(&[0x5c, 0x17]),
            "it has a decimal type with a field of another type",
        );
        check(
            &logical(&[0xac, 0x25]),
            "it has an integer type with a field of another type",
        );
        check(
            &logical(&[0xac, 0x15]),
            "it has an integer type with a field of another type",
        );
        check(
            &logical(&[0x8c, 0x11, 0x18]),
            "it has a time type with a field of another type",
        );
        // Within a row group: a column's path that is a list of numbers.
        let path = [0x49, 0x1c, 0x19, 0x1c, 0x3c, 0x39, 0x15, 0x02];
        check(&path, "it has column metadata with a field of another type");
        // A schema after the row groups, and a version twice, by the long form of a field's head.
        let order = "it has file metadata with fields out of order";
        check(
            &[0x15, 0x02, 0x19, 0x0c, 0x16, 0x00, 0x19, 0x0c, 0x09, 0x04, 0x0c, 0x00],
            order,
        );
        check(&[0x15, 0x02, 0x05, 0x02, 0x02, 0x00], order);
        check(&[0x05, 0x01, 0x02, 0x00], order);
        // Unknown fields: booleans in a list, in a map; an end that has a number.
        check(
            &[0xa9, 0x11, 0x01, 0x00],
            "it has file metadata with booleans in a list",
        );
        check(
            &[0xab, 0x01, 0x81, 0x00, 0x01, 0x00],
            "it has file metadata with booleans in a list",
        );
        check(&[0xa0], "it has file metadata with an unknown type");
        check(&[], "it ends within file metadata");
        check(&[0x29, 0xfc, 0xff, 0xff, 0xff, 0xff, 0x0f], "it ends within a schema");
    }

    #[test]
    fn fields_that_the_decoder_reads_alike_pass() {
        // A version of 64 bits, an empty list without a type, field 10 (text), field 32767 (a list
        // of numbers), and trailing bytes.
        let version = [0x16, 0x02];
        let list = [0x19, 0x00];
        let text = [0x88, 0x01, 0x61];
        let numbers = [0x09, 0xfe, 0xff, 0x03, 0x25, 0x02, 0x04];
        let footer = [&version[..], &list, &text, &numbers, &[0x00, 0xff]].concat();
        assert_eq!(check_footer(&footer), Ok(()));
    }

    fn leaf(name: &str, logical: LogicalType, physical: Physical) -> TypePtr {
        let (length, scale, precision) = match logical {
            LogicalType::Uuid => (16, -1, -1),
            LogicalType::Float16 => (2, -1, -1),
            LogicalType::Decimal(_) => (-1, 2, 9),
            _ => (-1, -1, -1),
        };
        let node = Node::primitive_type_builder(name, physical)
            .with_repetition(Repetition::OPTIONAL)
            .with_logical_type(Some(logical))
            .with_length(length)
            .with_scale(scale)
            .with_precision(precision)
            .with_id(Some(7));
        Arc::new(node.build().unwrap())
    }

    /// A column of each logical type.
    fn schema() -> Arc<SchemaDescriptor> {
        let crs = || Some("OGC:CRS84".to_string());
        let leaves = [
            (LogicalType::String, Physical::BYTE_ARRAY),
            (LogicalType::Enum, Physical::BYTE_ARRAY),
            (LogicalType::Json, Physical::BYTE_ARRAY),
            (LogicalType::Bson, Physical::BYTE_ARRAY),
            (LogicalType::decimal(2, 9), Physical::INT32),
            (LogicalType::Date, Physical::INT32),
            (LogicalType::time(true, TimeUnit::MILLIS), Physical::INT32),
            (LogicalType::time(false, TimeUnit::MICROS), Physical::INT64),
            (LogicalType::timestamp(true, TimeUnit::MICROS), Physical::INT64),
            (LogicalType::timestamp(false, TimeUnit::NANOS), Physical::INT64),
            (LogicalType::integer(8, false), Physical::INT32),
            (LogicalType::integer(64, true), Physical::INT64),
            (LogicalType::Unknown, Physical::INT32),
            (LogicalType::Uuid, Physical::FIXED_LEN_BYTE_ARRAY),
            (LogicalType::Float16, Physical::FIXED_LEN_BYTE_ARRAY),
            (LogicalType::geometry(crs()), Physical::BYTE_ARRAY),
            (
                LogicalType::geography(crs(), Some(EdgeInterpolationAlgorithm::KARNEY)),
                Physical::BYTE_ARRAY,
            ),
        ];
        let groups = [
            LogicalType::Map,
            LogicalType::List,
            LogicalType::variant(Some(1)),
            LogicalType::File,
        ];
        let leaves = leaves.into_iter().enumerate();
        let mut nodes: Vec<TypePtr> = leaves
            .map(|(n, (logical, physical))| leaf(&n.to_string(), logical, physical))
            .collect();
        for logical in groups {
            let group = Node::group_type_builder("group")
                .with_repetition(Repetition::OPTIONAL)
                .with_logical_type(Some(logical))
                .with_fields(vec![leaf("uri", LogicalType::String, Physical::BYTE_ARRAY)]);
            nodes.push(Arc::new(group.build().unwrap()));
        }
        let root = Node::group_type_builder("root").with_fields(nodes).build().unwrap();
        Arc::new(SchemaDescriptor::new(Arc::new(root)))
    }

    /// A row group with all optional fields set; `old`: with the deprecated minimum and maximum
    /// statistics.
    fn row_group(schema: &Arc<SchemaDescriptor>, old: bool) -> RowGroupMetaData {
        let value = || Some(ByteArray::from(vec![0; 16]));
        let bounds = BoundingBox::new(0.0, 1.0, 2.0, 3.0)
            .with_zrange(4.0, 5.0)
            .with_mrange(6.0, 7.0);
        let pages = PageEncodingStats {
            page_type: PageType::DATA_PAGE,
            encoding: Encoding::PLAIN,
            count: 1,
        };
        let columns = schema.columns().iter().map(|column| {
            ColumnChunkMetaData::builder(column.clone())
                .set_file_path("elsewhere".into())
                .set_encodings(vec![Encoding::PLAIN, Encoding::RLE])
                .set_compression(Compression::SNAPPY)
                .set_num_values(1)
                .set_total_uncompressed_size(1 << 40)
                .set_total_compressed_size(9)
                .set_data_page_offset(4)
                .set_index_page_offset(Some(4))
                .set_dictionary_page_offset(Some(4))
                .set_statistics(Statistics::byte_array(value(), value(), Some(3), Some(1), old))
                .set_page_encoding_stats(vec![pages.clone()])
                .set_bloom_filter_offset(Some(4))
                .set_bloom_filter_length(Some(4))
                .set_unencoded_byte_array_data_bytes(Some(9))
                .set_repetition_level_histogram(LevelHistogram::try_new(1))
                .set_definition_level_histogram(LevelHistogram::try_new(1))
                .set_geo_statistics(Box::new(GeospatialStatistics::new(
                    Some(bounds.clone()),
                    Some(vec![1, 2]),
                )))
                .set_offset_index_offset(Some(4))
                .set_offset_index_length(Some(4))
                .set_column_index_offset(Some(4))
                .set_column_index_length(Some(4))
                .build()
                .unwrap()
        });
        let sorted = SortingColumn {
            column_idx: 0,
            descending: true,
            nulls_first: false,
        };
        RowGroupMetaData::builder(schema.clone())
            .set_column_metadata(columns.collect())
            .set_num_rows(1)
            .set_total_byte_size(9)
            .set_sorting_columns(Some(vec![sorted]))
            .set_file_offset(4)
            .set_ordinal(i32::from(!old))
            .build()
            .unwrap()
    }

    #[test]
    fn everything_that_the_parquet_crate_writes_passes() {
        let schema = schema();
        let said = vec![
            KeyValue::new("key".into(), "value".to_string()),
            KeyValue::new("none".into(), None::<String>),
        ];
        let file = FileMetaData::new(2, 2, Some("gristmill".into()), Some(said), schema.clone(), None);
        let groups = vec![row_group(&schema, true), row_group(&schema, false)];
        let metadata = ParquetMetaData::new(file, groups);
        let mut bytes = Vec::new();
        ParquetMetaDataWriter::new(&mut bytes, &metadata).finish().unwrap();
        let footer = &bytes[..bytes.len() - 8];
        let decoded = ParquetMetaDataReader::decode_metadata(footer).unwrap();
        assert_eq!(decoded.file_metadata().schema(), schema.root_schema());
        assert_eq!(decoded.num_row_groups(), 2);
        assert_eq!(check_footer(footer), Ok(()));
        for length in 0..footer.len() {
            let why = check_footer(&footer[..length]).unwrap_err();
            assert!(
                why.starts_with("its footer is broken: it ends within "),
                "{length}: {why}"
            );
        }
    }
}
