//! Parquet inputs from files to rows: layouts, types, and every bad input with its one line.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use arrow::array::*;
use arrow::datatypes::*;
use gristmill::dataset::{DatasetError, InputRow, PlanRequest, plan_inputs};
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use parquet::basic::Compression;
use parquet::file::metadata::{ParquetMetaData, ParquetMetaDataBuilder, ParquetMetaDataWriter};
use parquet::file::properties::{WriterProperties, WriterVersion};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::dataset_rows::{self, read_all};

fn request(uris: &[&str], carry: &[&str]) -> PlanRequest {
    PlanRequest {
        shard_rows: 100,
        ..dataset_rows::request(uris, carry)
    }
}

fn write(path: &Path, batch: &RecordBatch, group_rows: usize) {
    let properties = WriterProperties::builder()
        .set_max_row_group_row_count(Some(group_rows))
        .build();
    write_with(path, batch, properties);
}

fn write_with(path: &Path, batch: &RecordBatch, properties: WriterProperties) {
    let mut writer = ArrowWriter::try_new(fs::File::create(path).unwrap(), batch.schema(), Some(properties)).unwrap();
    writer.write(batch).unwrap();
    writer.close().unwrap();
}

fn numbered(rows: std::ops::Range<i64>) -> RecordBatch {
    let ids: ArrayRef = Arc::new(Int64Array::from_iter_values(rows.clone()));
    let texts: ArrayRef = Arc::new(StringArray::from_iter_values(rows.map(|n| format!("text {n}"))));
    RecordBatch::try_from_iter([("id", ids), ("text", texts)]).unwrap()
}

fn values(rows: &[InputRow]) -> Vec<Value> {
    rows.iter().map(|r| Value::Object(r.fields.clone().unwrap())).collect()
}

async fn plan_error(dir: &Path, request: &PlanRequest) -> String {
    let error = plan_inputs(request, dir).await.unwrap_err().to_string();
    assert!(!error.contains('\n'), "{error}");
    error
}

#[tokio::test]
async fn carried_columns_keep_their_types_and_dictionaries_are_unpacked() {
    let dir = tempfile::tempdir().unwrap();
    let words: DictionaryArray<Int8Type> = ["x", "y", "x"].into_iter().collect();
    let moments = TimestampMicrosecondArray::from(vec![Some(0), None, Some(1_000_000)]).with_timezone("UTC");
    let decimals = Decimal128Array::from(vec![1, 20, 300])
        .with_precision_and_scale(10, 2)
        .unwrap();
    let mut lists = ListBuilder::new(Int32Builder::new());
    for n in 0..3 {
        lists.values().append_value(n);
        lists.append(true);
    }
    let batch = RecordBatch::try_from_iter_with_nullable([
        ("word", Arc::new(words) as ArrayRef, true),
        ("at", Arc::new(moments) as ArrayRef, true),
        ("price", Arc::new(decimals) as ArrayRef, true),
        ("ids", Arc::new(lists.finish()) as ArrayRef, true),
        (
            "view",
            Arc::new(StringViewArray::from(vec!["a", "b", "a view that is long"])) as ArrayRef,
            true,
        ),
        (
            "raw",
            Arc::new(BinaryArray::from(vec![&b"\x00"[..], b"", b"ab"])) as ArrayRef,
            true,
        ),
        (
            "half",
            Arc::new(Float32Array::from(vec![0.5, f32::NAN, 0.1])) as ArrayRef,
            true,
        ),
    ])
    .unwrap();
    write(&dir.path().join("a.parquet"), &batch, 2);
    let names = ["half", "word", "at", "price", "ids", "view", "raw"];
    let plan = plan_inputs(&request(&["a.parquet"], &names), dir.path()).await.unwrap();
    let (rows, carry) = read_all(&plan, None).await.unwrap();
    assert_eq!(
        values(&rows)[2],
        json!({
            "word": "x", "at": "1970-01-01T00:00:01Z", "price": "3.00", "ids": [2], "view": "a view that is long",
            "raw": "YWI=", "half": 0.1,
        })
    );
    assert_eq!(values(&rows)[1]["at"], Value::Null);
    assert_eq!(values(&rows)[1]["half"], "NaN");
    for (field, name) in carry.schema().fields().iter().zip(names) {
        let original = batch.column_by_name(name).unwrap();
        let expected = match original.data_type() {
            DataType::Dictionary(..) => arrow::compute::cast(original, &DataType::Utf8).unwrap(),
            _ => original.clone(),
        };
        assert_eq!(field.name(), name);
        assert_eq!(
            carry.column_by_name(name).unwrap().to_data(),
            expected.to_data(),
            "{name}"
        );
    }
}

#[tokio::test]
async fn a_value_without_json_form_is_one_errored_row() {
    let dir = tempfile::tempdir().unwrap();
    let at: ArrayRef = Arc::new(TimestampSecondArray::from(vec![0, i64::MAX / 2000]));
    let batch = RecordBatch::try_from_iter([("at", at)]).unwrap();
    write(&dir.path().join("a.parquet"), &batch, 10);
    let plan = plan_inputs(&request(&["a.parquet"], &["at"]), dir.path())
        .await
        .unwrap();
    let (rows, carry) = read_all(&plan, None).await.unwrap();
    assert!(rows[0].fields.is_ok());
    let error = rows[1].fields.as_ref().unwrap_err();
    assert!(
        error.starts_with("row 1 of `") && error.ends_with("column `at`: a timestamp outside the calendar"),
        "{error}"
    );
    assert_eq!(carry.num_rows(), 2);
}

/// Shards of one row group far larger than themselves read only their pages, made out by the file's own index or by walking
/// the page headers.
#[tokio::test]
async fn large_row_groups_are_read_by_page() {
    let dir = tempfile::tempdir().unwrap();
    let noise = |n: u64| {
        (0..12)
            .map(|k| format!("{:x}", (n + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15 ^ k << 50)))
            .collect::<String>()
    };
    let texts: ArrayRef = Arc::new(StringArray::from_iter_values((0..40_000).map(noise)));
    let few: ArrayRef = Arc::new(StringArray::from_iter_values((0..40_000u64).map(|n| noise(n % 20_000))));
    let mut lists = ListBuilder::new(StringBuilder::new());
    for n in 0..40_000 {
        lists.values().append_value(noise(n));
        lists.append(n % 3 > 0);
    }
    let lists: ArrayRef = Arc::new(lists.finish());
    let batch = RecordBatch::try_from_iter([("text", texts), ("few", few), ("lists", lists)]).unwrap();
    let writers = [
        (WriterVersion::PARQUET_1_0, true, true),
        (WriterVersion::PARQUET_2_0, false, true),
        (WriterVersion::PARQUET_1_0, true, false),
        (WriterVersion::PARQUET_2_0, false, false),
    ];
    for (version, dictionary, without_index) in writers {
        let properties = WriterProperties::builder()
            .set_writer_version(version)
            .set_dictionary_enabled(dictionary)
            .set_offset_index_disabled(without_index)
            .set_compression(Compression::SNAPPY)
            .set_data_page_size_limit(1 << 16)
            .build();
        write_with(&dir.path().join("a.parquet"), &batch, properties);
        let request = PlanRequest {
            shard_rows: 7000,
            columns: Some(vec![]),
            ..request(&["a.parquet"], &["text", "few", "lists"])
        };
        let plan = plan_inputs(&request, dir.path()).await.unwrap();
        assert_eq!(plan.shards.len(), 6);
        let (_, carry) = read_all(&plan, Some(vec![])).await.unwrap();
        for (got, expected) in carry.columns().iter().zip(batch.columns()) {
            assert!(got.to_data() == expected.to_data(), "{version:?}");
        }
    }
}

#[tokio::test]
async fn what_does_not_fit_the_job_is_one_clear_line() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    write(&at("a.parquet"), &numbered(0..10), 4);
    let texts: ArrayRef = Arc::new(StringArray::from(vec!["7"]));
    write(
        &at("b.parquet"),
        &RecordBatch::try_from_iter([("id", texts.clone()), ("text", texts.clone())]).unwrap(),
        4,
    );
    write(
        &at("c.parquet"),
        &RecordBatch::try_from_iter([("text", texts)]).unwrap(),
        4,
    );
    fs::write(at("d.jsonl"), "{}\n").unwrap();
    let check = async |request: PlanRequest, expected: &str| {
        let error = plan_error(dir.path(), &request).await;
        assert!(error.contains(expected), "{error}");
    };
    let name = |file: &str| at(file).display().to_string();
    check(request(&["none/*.parquet"], &[]), "no input matches `none/*.parquet`: ").await;
    let expected = format!(
        "`output.carry` names column `di`, which `{}` does not have; did you mean `id`?",
        name("a.parquet")
    );
    check(request(&["a.parquet"], &["di"]), &expected).await;
    let columns = Some(vec!["subject".to_string()]);
    let expected = format!(
        "the prompt uses column `subject`, which `{}` does not have; it has `id`, `text`",
        name("a.parquet")
    );
    check(
        PlanRequest {
            columns,
            ..request(&["a.parquet"], &[])
        },
        &expected,
    )
    .await;
    let expected = format!(
        "column `id` is Int64 in `{}` and Utf8 in `{}`; make them one type, or run the files as separate jobs",
        name("a.parquet"),
        name("b.parquet")
    );
    check(request(&["a.parquet", "b.parquet"], &["id"]), &expected).await;
    check(
        request(&["a.parquet", "c.parquet"], &["id"]),
        &format!("which `{}` does not have", name("c.parquet")),
    )
    .await;
    check(request(&["a.parquet", "d.jsonl"], &[]), "the inputs mix formats").await;
    // A column that nobody uses may differ.
    let columns = Some(vec!["text".to_string()]);
    let fine = PlanRequest {
        columns,
        ..request(&["a.parquet", "b.parquet", "c.parquet"], &["text"])
    };
    assert_eq!(plan_inputs(&fine, dir.path()).await.unwrap().total_rows, 12);
}

#[tokio::test]
async fn truncated_and_foreign_files_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.parquet");
    write(&path, &numbered(0..1000), 400);
    let whole = fs::read(&path).unwrap();
    for length in [0, 3, 4, 11, 12, 100, whole.len() / 2, whole.len() - 1] {
        fs::write(&path, &whole[..length]).unwrap();
        let error = plan_error(dir.path(), &request(&["a.parquet"], &[])).await;
        assert!(
            error.starts_with(&format!("`{}` cannot be read: it ", path.display())),
            "{length}: {error}"
        );
    }
    fs::write(&path, b"<html>not found</html>").unwrap();
    let error = plan_error(dir.path(), &request(&["a.parquet"], &[])).await;
    assert!(
        error.ends_with("it is no Parquet file: it does not begin with `PAR1`"),
        "{error}"
    );
    let mut lying = whole.clone();
    let at = lying.len() - 8;
    lying[at..at + 4].copy_from_slice(&u32::MAX.to_le_bytes());
    fs::write(&path, &lying).unwrap();
    let error = plan_error(dir.path(), &request(&["a.parquet"], &[])).await;
    assert!(
        error.ends_with(&format!(
            "its footer claims 4294967295 bytes, the whole file has {}",
            lying.len()
        )),
        "{error}"
    );
}

/// The file with its footer replaced by what `change` makes of it.
fn with_footer(path: &Path, change: impl Fn(ParquetMetaData) -> ParquetMetaData) {
    let bytes = bytes::Bytes::from(fs::read(path).unwrap());
    let footer = ParquetRecordBatchReaderBuilder::try_new(bytes.clone())
        .unwrap()
        .metadata()
        .clone();
    let changed = change(ParquetMetaData::clone(&footer));
    let length = u32::from_le_bytes(bytes[bytes.len() - 8..bytes.len() - 4].try_into().unwrap()) as usize;
    let mut out = bytes[..bytes.len() - 8 - length].to_vec();
    ParquetMetaDataWriter::new(&mut out, &changed).finish().unwrap();
    fs::write(path, out).unwrap();
}

#[tokio::test]
async fn absurd_claims_of_a_footer_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.parquet");
    let check = async |change: &dyn Fn(ParquetMetaDataBuilder) -> ParquetMetaDataBuilder, expected: &str| {
        write(&path, &numbered(0..10), 10);
        with_footer(&path, |footer| change(footer.into_builder()).build());
        let error = plan_error(dir.path(), &request(&["a.parquet"], &[])).await;
        assert!(
            error.starts_with(&format!("`{}` cannot be read: ", path.display())) && error.contains(expected),
            "{error}"
        );
    };
    let group = |rows: i64| {
        move |builder: ParquetMetaDataBuilder| {
            let mut builder = builder;
            let groups = builder.take_row_groups();
            let groups = groups
                .into_iter()
                .map(|g| g.into_builder().set_num_rows(rows).build().unwrap());
            builder.set_row_groups(groups.collect())
        }
    };
    check(&group(11), "row group 0, column `id` claims 10 values for 11 rows").await;
    check(&group(i64::MAX), "its row group 0 claims 9223372036854775807 rows").await;
    check(&group(-1), "its row group 0 claims -1 rows").await;
    type ChunkBuilder = parquet::file::metadata::ColumnChunkMetaDataBuilder;
    let chunk = |change: fn(ChunkBuilder) -> ChunkBuilder| {
        move |builder: ParquetMetaDataBuilder| {
            let mut builder = builder;
            let groups = builder.take_row_groups().into_iter().map(|group| {
                let columns = group
                    .columns()
                    .iter()
                    .map(|c| change(c.clone().into_builder()).build().unwrap())
                    .collect();
                group.into_builder().set_column_metadata(columns).build().unwrap()
            });
            let groups = groups.collect();
            builder.set_row_groups(groups)
        }
    };
    let place = "row group 0, column `id` claims ";
    check(
        &chunk(|c| c.set_total_compressed_size(1 << 40)),
        &format!("{place}1099511627776 bytes at 4, the file has "),
    )
    .await;
    check(&chunk(|c| c.set_total_compressed_size(-5)), &format!("{place}-5 bytes")).await;
    check(&chunk(|c| c.set_data_page_offset(-5)), place).await;
    check(
        &chunk(|c| c.set_total_uncompressed_size(1 << 50)),
        &format!("{place}1125899906842624 bytes uncompressed"),
    )
    .await;
    check(
        &chunk(|c| c.set_num_values(1 << 40)),
        &format!("{place}1099511627776 values for 10 rows"),
    )
    .await;
}

#[tokio::test]
async fn a_schema_without_end_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.parquet");
    let check = async |footer: &[u8], end: &str| {
        let mut file = b"PAR1".to_vec();
        file.extend(footer);
        file.extend((footer.len() as u32).to_le_bytes());
        file.extend(b"PAR1");
        fs::write(&path, file).unwrap();
        let error = plan_error(dir.path(), &request(&["a.parquet"], &[])).await;
        assert!(error.ends_with(end), "{error}");
    };
    // Field 1 (version) = 1; field 2: a list of 200,000 groups, each with one child and the empty name.
    let version = [0x15, 0x02];
    let deep = [0x48, 0x00, 0x15, 0x02, 0x00].repeat(200_000);
    let footer = [&version, &[0x19, 0xfc, 0xc0, 0x9a, 0x0c][..], &deep, &[0]].concat();
    check(&footer, "its schema is nested 65 deep, more than 64").await;
    // One group, which claims a billion children.
    let footer = [
        &version,
        &[0x19, 0x1c, 0x48, 0x00, 0x15, 0x80, 0xa8, 0xd6, 0xb9, 0x07, 0x00, 0x00][..],
    ]
    .concat();
    check(&footer, "it has a schema that claims more elements than it has").await;
    // Four elements, of which the second claims two children where the first has left it one.
    let elements = [
        0x48, 0x00, 0x15, 0x06, 0x00, 0x48, 0x00, 0x15, 0x04, 0x00, 0x48, 0x00, 0x00, 0x48, 0x00, 0x00,
    ];
    let footer = [&version, &[0x19, 0x4c][..], &elements, &[0]].concat();
    check(&footer, "it has a schema that claims more elements than it has").await;
    // Its number of children as text.
    let footer = [&version, &[0x19, 0x1c, 0x48, 0x00, 0x18, 0x01, 0x61, 0x00, 0x00][..]].concat();
    check(&footer, "it has a schema with a field of another type").await;
    // The version as a double. The decoder would read a number that is shorter, and an element with a billion children behind it.
    let footer = [
        0x17, 0x04, 0x19, 0x6c, 0x35, 0x00, 0x18, 0x06, 0x69, 0x63, 0x00, 0x15, 0x04, 0x25, 0x02, 0x18, 0x01, 0x61,
        0x00, 0x15, 0x0c, 0x25, 0x02, 0x18, 0x00, 0x00, 0x31, 0x02, 0x18, 0x01, 0x6c, 0x15, 0xff, 0xff, 0xff, 0xff,
        0xff, 0x69, 0x63, 0x68, 0x65, 0x41, 0x61, 0x15, 0x0c, 0x25, 0x02, 0x18, 0x00, 0x00, 0x33, 0x02, 0x18, 0x00,
        0x00, 0x32, 0x02, 0x18, 0x01, 0x6c, 0x15, 0xff, 0xff, 0xff, 0xff, 0xff, 0x0c, 0x25, 0x02, 0x18, 0x00, 0x00,
        0x32, 0x02, 0x18, 0x01, 0x6c, 0x15, 0xff, 0xff, 0xff, 0xff, 0x5a, 0x00, 0x00, 0x32, 0x02, 0xb3, 0x01, 0x6c,
        0x01, 0x6c, 0x15, 0xff, 0xff, 0xff, 0xff, 0xff, 0x0c, 0x25, 0x02, 0x18, 0x00, 0x00, 0x32, 0x02, 0x18, 0x01,
        0x6c, 0xff, 0xff, 0xff, 0xff, 0xff, 0x15, 0xff, 0xff, 0xff, 0xff, 0x00,
    ];
    check(&footer, "it has file metadata with a field of another type").await;
    // 5,000 columns in a group whose name has 50,000 bytes, which each of their paths has.
    let varint = |n: u32| [n as u8 | 0x80, (n >> 7) as u8 | 0x80, (n >> 14) as u8];
    let footer = [
        &version[..],
        &[0x19, 0xfc],
        &varint(5002),
        &[0x48, 0x00, 0x15, 0x02, 0x00],
        &[0x48],
        &varint(50_000),
        &[b'a'; 50_000],
        &[0x15],
        &varint(2 * 5000),
        &[0x00],
        &[0x48, 0x01, b'b', 0x00].repeat(5000),
        &[0x00],
    ]
    .concat();
    let end = "the paths of its columns take 250090000 bytes together, more than 67108864";
    check(&footer, end).await;
}

#[tokio::test]
async fn an_input_that_changed_stops_the_job() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.parquet");
    write(&path, &numbered(0..10), 4);
    let plan = plan_inputs(&request(&["a.parquet"], &["id"]), dir.path())
        .await
        .unwrap();
    assert!(read_all(&plan, None).await.is_ok());
    write(&path, &numbered(10..30), 4);
    let error = read_all(&plan, None).await.unwrap_err();
    assert!(
        matches!(&error, DatasetError::InputChanged { file, .. } if *file == path.display().to_string()),
        "{error}"
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]
    #[test]
    fn shards_give_every_row_once(
        files in prop::collection::vec((0i64..60, 1usize..20), 1..4),
        shard_rows in 1u64..50,
        limit in prop::option::of(0u64..100),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let mut total = 0;
        for (n, (rows, group_rows)) in files.iter().enumerate() {
            write(&dir.path().join(format!("{n}.parquet")), &numbered(total..total + rows), *group_rows);
            total += rows;
        }
        let expected = total.min(limit.unwrap_or(u64::MAX) as i64).max(0);
        let expected = if limit.is_none() { total } else { expected };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (rows, carry) = runtime.block_on(async {
            let request = PlanRequest { shard_rows, limit, ..request(&["*.parquet"], &["id"]) };
            let plan = plan_inputs(&request, dir.path()).await.unwrap();
            assert!(plan.shards.iter().all(|s| s.rows <= shard_rows));
            read_all(&plan, Some(vec!["text".to_string()])).await.unwrap()
        });
        let texts: Vec<Value> = (0..expected).map(|n| json!({"text": format!("text {n}")})).collect();
        prop_assert_eq!(values(&rows), texts);
        let ids: Vec<i64> = carry.column(0).as_primitive::<Int64Type>().values().to_vec();
        prop_assert_eq!(ids, (0..expected).collect::<Vec<_>>());
    }
}

/// A small file with the encodings in use: text, dictionary, lists, compression.
fn small_file(path: &Path, compressed: bool) {
    let words: ArrayRef = Arc::new(StringArray::from_iter_values(
        (0..50).map(|n| ["red", "green", "blue"][n % 3]),
    ));
    let mut lists = ListBuilder::new(Float64Builder::new());
    for n in 0..50 {
        lists.values().append_value(f64::from(n) / 3.0);
        lists.append(n % 5 > 0);
    }
    let numbers = numbered(0..50);
    let columns = [
        ("id", numbers.column(0).clone()),
        ("word", words),
        ("lists", Arc::new(lists.finish()) as ArrayRef),
    ];
    let compression = if compressed {
        Compression::SNAPPY
    } else {
        Compression::UNCOMPRESSED
    };
    let properties = WriterProperties::builder()
        .set_max_row_group_row_count(Some(20))
        .set_compression(compression)
        .build();
    write_with(path, &RecordBatch::try_from_iter(columns).unwrap(), properties);
}

proptest! {
    #[test]
    fn broken_bytes_never_panic(
        compressed: bool,
        footer: bool,
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.parquet");
        small_file(&path, compressed);
        let mut bytes = fs::read(&path).unwrap();
        let length = u32::from_le_bytes(bytes[bytes.len() - 8..bytes.len() - 4].try_into().unwrap()) as usize;
        let from = if footer { bytes.len() - 8 - length } else { 0 };
        for (at, value) in flips {
            let at = from + at.index(bytes.len() - from);
            bytes[at] = value;
        }
        fs::write(&path, bytes).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            if let Ok(plan) = plan_inputs(&PlanRequest { shard_rows: 7, ..request(&["a.parquet"], &[]) }, dir.path()).await {
                let _ = read_all(&plan, None).await;
            }
        });
    }
}
