//! Rows that take far more memory than their bytes: what each takes is known before it is decoded, and its neighbours are read.

use std::fs;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use arrow::array::*;
use arrow::datatypes::*;
use gristmill::dataset::parquet::reader::ParquetFile;
use gristmill::dataset::plan::{Segment, Shard};
use gristmill::dataset::row_memory::{PIECE_BYTES_MAX, ROW_BYTES_MAX};
use gristmill::dataset::store::pinned_file::PinnedFile;
use gristmill::dataset::{InputPlan, InputRow, PlanRequest, ShardReader, plan_inputs};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, Encoding};
use parquet::file::properties::{WriterProperties, WriterPropertiesBuilder, WriterVersion};
use serde_json::Value;

fn write(path: &Path, columns: Vec<(&str, ArrayRef)>, properties: WriterPropertiesBuilder) {
    let batch = RecordBatch::try_from_iter_with_nullable(columns.into_iter().map(|(n, c)| (n, c, true))).unwrap();
    let file = fs::File::create(path).unwrap();
    let mut writer = ArrowWriter::try_new(file, batch.schema(), Some(properties.build())).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
}

fn small() -> WriterPropertiesBuilder {
    WriterProperties::builder().set_compression(Compression::ZSTD(Default::default()))
}

async fn plan(dir: &Path, carry: &[&str]) -> InputPlan {
    let request = PlanRequest {
        uris: vec!["a.*".into()],
        format: None,
        csv: Default::default(),
        options: Default::default(),
        used_columns: None,
        columns: None,
        carry: carry.iter().map(|name| name.to_string()).collect(),
        reserved: Vec::new(),
        shard_rows: 4096,
        output_row_bytes: 100,
        limit: None,
        output: None,
    };
    plan_inputs(&request, dir).await.unwrap()
}

/// All rows of the first shard, its carried columns, and the number of pieces they came in.
async fn read(
    plan: &InputPlan,
    columns: Option<&[&str]>,
    wanted: Option<Vec<Range<u64>>>,
) -> (Vec<InputRow>, RecordBatch, usize) {
    let columns = columns.map(|columns| columns.iter().map(|name| name.to_string()).collect());
    let reader = ShardReader::new(plan.files.clone(), plan.carry_schema.clone(), columns);
    let mut pieces = reader.pieces(&plan.shards[0], wanted).unwrap();
    let (mut rows, mut carries) = (Vec::new(), Vec::new());
    while let Some(piece) = pieces.next().await.unwrap() {
        assert_eq!(piece.first_row, rows.len() as u64);
        let json = |row: &InputRow| {
            row.fields
                .as_ref()
                .map_or(0, |fields| Value::Object(fields.clone()).to_string().len())
        };
        let bytes: usize = piece.rows.iter().map(json).sum();
        assert!(bytes as u64 <= PIECE_BYTES_MAX, "{bytes} bytes of JSON in one piece");
        rows.extend(piece.rows);
        carries.push(piece.carry);
    }
    let carry = reader.concat_carry(&carries, rows.len()).unwrap();
    (rows, carry, carries.len())
}

fn errors(rows: &[InputRow]) -> Vec<(u64, String)> {
    let error = |row: &InputRow| Some((row.row, row.fields.clone().err()?));
    rows.iter().filter_map(error).collect()
}

#[tokio::test]
async fn a_long_entry_of_a_dictionary_comes_in_pieces() {
    let dir = tempfile::tempdir().unwrap();
    let words: ArrayRef = Arc::new(StringArray::from_iter_values(
        (0..400).map(|n| "x".repeat((1 << 20) + n % 2)),
    ));
    let ids: ArrayRef = Arc::new(Int64Array::from_iter_values(0..400));
    let properties = small().set_dictionary_page_size_limit(8 << 20);
    write(
        &dir.path().join("a.parquet"),
        vec![("id", ids), ("text", words)],
        properties,
    );
    assert!(fs::metadata(dir.path().join("a.parquet")).unwrap().len() < 20_000);
    let mut plan = plan(dir.path(), &["id"]).await;
    // Whatever sizes the footer claims, as of a file that has none.
    let rows = 400;
    plan.shards.truncate(1);
    (plan.shards[0].rows, plan.shards[0].segments[0].rows) = (rows, rows);
    let (read_rows, carry, pieces) = read(&plan, None, None).await;
    assert!(pieces > 4, "{pieces} pieces");
    assert_eq!(errors(&read_rows), []);
    for row in &read_rows {
        let fields = row.fields.as_ref().unwrap();
        assert_eq!(fields["id"], row.row);
        assert_eq!(fields["text"].as_str().unwrap().len() as u64, (1 << 20) + row.row % 2);
    }
    assert_eq!(
        carry.column(0).as_primitive::<Int64Type>().values(),
        &(0..400).collect::<Vec<i64>>()[..]
    );
}

#[tokio::test]
async fn a_row_that_is_too_large_says_so_and_its_neighbours_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let mut lists = ListBuilder::new(Int8Builder::new());
    for n in 0..5 {
        let items = if n == 2 { 3_000_000 } else { n };
        (0..items).for_each(|_| lists.values().append_value(7));
        lists.append(true);
    }
    let texts = (0..5).map(|n| {
        if n == 3 {
            "y".repeat(100 << 20)
        } else {
            format!("text {n}")
        }
    });
    let texts: ArrayRef = Arc::new(StringArray::from_iter_values(texts));
    let ids: ArrayRef = Arc::new(Int64Array::from_iter_values(0..5));
    let columns = vec![
        ("id", ids),
        ("items", Arc::new(lists.finish()) as ArrayRef),
        ("text", texts),
    ];
    write(&dir.path().join("a.parquet"), columns, small());
    let mut plan = plan(dir.path(), &["id"]).await;
    plan.shards.truncate(1);
    (plan.shards[0].rows, plan.shards[0].segments[0].rows) = (5, 5);
    let (rows, carry, _) = read(&plan, None, None).await;
    let errors = errors(&rows);
    assert_eq!(errors.iter().map(|(row, _)| *row).collect::<Vec<_>>(), [2, 3]);
    let bound = format!("bytes in memory, more than {ROW_BYTES_MAX}");
    assert!(errors.iter().all(|(_, why)| why.contains(&bound)), "{errors:?}");
    assert_eq!(rows[4].fields.as_ref().unwrap()["items"].as_array().unwrap().len(), 4);
    assert_eq!(rows[4].fields.as_ref().unwrap()["text"], "text 4");
    // What such a row carries is there: it takes nothing.
    assert_eq!(carry.column(0).as_primitive::<Int64Type>().values(), &[0, 1, 2, 3, 4]);
    assert_eq!(carry.column(0).null_count(), 0);
}

#[tokio::test]
async fn only_rows_that_are_wanted_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let ids: ArrayRef = Arc::new(Int64Array::from_iter_values(0..50));
    write(
        &dir.path().join("a.parquet"),
        vec![("id", ids)],
        small().set_max_row_group_row_count(Some(20)),
    );
    let plan = plan(dir.path(), &["id"]).await;
    let (rows, carry, _) = read(&plan, None, Some(vec![3..5, 19..22, 49..50])).await;
    let there = [3, 4, 19, 20, 21, 49];
    for row in &rows {
        let is_there = there.contains(&row.row);
        assert_eq!(row.fields.is_ok(), is_there, "row {}", row.row);
        assert_eq!(carry.column(0).is_valid(row.row as usize), is_there);
    }
    assert_eq!(rows[21].fields.as_ref().unwrap()["id"], 21);
    fs::remove_file(dir.path().join("a.parquet")).unwrap();
    fs::write(dir.path().join("a.jsonl"), "{\"id\": 0}\n\n{\"id\": 1}\n{\"id\": 2}\n").unwrap();
    let plan = self::plan(dir.path(), &["id"]).await;
    let (rows, _, _) = read(&plan, None, Some(std::iter::once(1..2).collect())).await;
    assert_eq!(
        rows.iter().map(|row| row.fields.is_ok()).collect::<Vec<_>>(),
        [false, true, false]
    );
}

/// Of a sample, what lies between two drawn rows is passed over, never held beside them.
#[tokio::test]
async fn rows_between_drawn_ones_are_not_held() {
    let rows = 160_000u64;
    for name in ["a.parquet", "a.txt"] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        let text = |n: u64| format!("row {n:016}");
        match name {
            "a.parquet" => {
                let texts: ArrayRef = Arc::new(StringArray::from_iter_values((0..rows).map(text)));
                write(&path, vec![("text", texts)], small());
            }
            _ => fs::write(&path, (0..rows).map(|n| text(n) + "\n").collect::<String>()).unwrap(),
        }
        let mut plan = plan(dir.path(), &[]).await;
        let segment = Segment {
            input: 0,
            first_row: 0,
            rows,
            bytes: (name == "a.txt").then(|| (0, fs::metadata(&path).unwrap().len())),
            line: None,
            picks: Some(vec![0, 1, 150_000]),
        };
        plan.shards = vec![Shard {
            first_row: 0,
            rows: 3,
            segments: vec![segment],
        }];
        let (found, _, pieces) = read(&plan, None, None).await;
        let texts: Vec<&str> = found
            .iter()
            .map(|row| row.fields.as_ref().unwrap()["text"].as_str().unwrap())
            .collect();
        assert_eq!(texts, [text(0), text(1), text(150_000)], "{name}");
        assert_eq!(pieces, 2, "{name}: what is far from the others comes by itself");
    }
}

#[tokio::test]
async fn carried_columns_of_a_shard_have_a_bound() {
    let dir = tempfile::tempdir().unwrap();
    let words: ArrayRef = Arc::new(StringArray::from_iter_values((0..300).map(|_| "x".repeat(1 << 20))));
    write(&dir.path().join("a.parquet"), vec![("text", words)], small());
    let mut plan = plan(dir.path(), &["text"]).await;
    plan.shards.truncate(1);
    (plan.shards[0].rows, plan.shards[0].segments[0].rows) = (300, 300);
    let (rows, carry, _) = read(&plan, Some(&[]), None).await;
    let errors = errors(&rows);
    assert_eq!(errors.first().map(|(row, _)| *row), Some(255));
    assert_eq!(errors.len(), 45);
    assert!(errors[0].1.contains("set fewer `shards.rows`"), "{}", errors[0].1);
    assert_eq!((carry.column(0).len(), carry.column(0).null_count()), (300, 45));
}

/// Text, lists of text, and lists of numbers, some null; the bytes of text and the values of lists in each row.
fn columns() -> (Vec<(&'static str, ArrayRef)>, Vec<[u64; 3]>) {
    let (mut flat, mut lists) = (StringBuilder::new(), ListBuilder::new(StringBuilder::new()));
    let mut numbers = ListBuilder::new(Int32Builder::new());
    let mut costs = Vec::new();
    for n in 0..700usize {
        let text = (n % 5 != 0).then(|| format!("{}{n}", "common beginning ".repeat(n % 7)));
        flat.append_option(text.as_deref());
        let items = n % 4;
        (0..items).for_each(|i| lists.values().append_option((i != 1).then(|| "ab".repeat(n % 11))));
        lists.append(n % 6 != 0);
        let items = if n % 6 == 0 { 0 } else { items };
        // An item that was built counts for the list that holds it.
        (0..n % 3).for_each(|i| numbers.values().append_value(i as i32));
        numbers.append(true);
        let listed = (0..items).filter(|i| *i != 1).count() * 2 * (n % 11);
        costs.push([
            text.map_or(0, |text| text.len() as u64),
            listed as u64,
            (n % 3).max(1) as u64,
        ]);
    }
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("flat", Arc::new(flat.finish())),
        ("lists", Arc::new(lists.finish())),
        ("numbers", Arc::new(numbers.finish())),
    ];
    (columns, costs)
}

#[tokio::test]
async fn what_rows_take_is_told_in_every_encoding() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.parquet");
    for version in [WriterVersion::PARQUET_1_0, WriterVersion::PARQUET_2_0] {
        for encoding in [
            None,
            Some(Encoding::PLAIN),
            Some(Encoding::DELTA_LENGTH_BYTE_ARRAY),
            Some(Encoding::DELTA_BYTE_ARRAY),
        ] {
            let mut properties = small()
                .set_writer_version(version)
                .set_data_page_row_count_limit(100)
                .set_write_batch_size(50);
            for name in ["flat", "lists.list.item"] {
                let column = parquet::schema::types::ColumnPath::new(name.split('.').map(str::to_string).collect());
                properties = match encoding {
                    Some(encoding) => properties
                        .set_column_dictionary_enabled(column.clone(), false)
                        .set_column_encoding(column, encoding),
                    None => properties,
                };
            }
            let (columns, costs) = columns();
            write(&path, columns, properties);
            let plan = plan(dir.path(), &[]).await;
            let file = Arc::new(
                ParquetFile::open(PinnedFile::open(&plan.files[0]).unwrap())
                    .await
                    .unwrap(),
            );
            for rows in [0..700u64, 250..390] {
                for (n, name) in ["flat", "numbers"].into_iter().enumerate() {
                    let told = file.row_costs(rows.clone(), &[name.to_string()], &[]).await.unwrap();
                    let at = |row: u64| costs[row as usize][2 * n];
                    let price = if n == 0 { 1 } else { 9 };
                    let base = told[1] - at(rows.start + 1) * price;
                    let expected: Vec<u64> = rows.clone().map(|row| base + at(row) * price).collect();
                    assert_eq!(told, expected, "{name} in {encoding:?}, {version:?}, rows {rows:?}");
                }
                let shown = file
                    .row_costs(rows.clone(), &["lists".into()], &["lists".into()])
                    .await
                    .unwrap();
                let bare = file.row_costs(rows.clone(), &["lists".into()], &[]).await.unwrap();
                for (row, (shown, bare)) in rows.clone().zip(shown.iter().zip(&bare)) {
                    let bytes = costs[row as usize][1];
                    assert!(
                        *bare >= bytes && shown - bare >= 2 * bytes,
                        "row {row}: {bare}, {shown} for {bytes}"
                    );
                }
            }
        }
    }
}

/// Replaces `from` by bytes of the same length that are no UTF-8, wherever it stands in the file.
fn spoil(path: &Path, from: &str) {
    let mut bytes = fs::read(path).unwrap();
    let places: Vec<usize> = (0..bytes.len() - from.len())
        .filter(|at| bytes[*at..].starts_with(from.as_bytes()))
        .collect();
    assert!(!places.is_empty(), "`{from}` does not stand in the file");
    places.iter().for_each(|at| bytes[at + 2] = 0xff);
    fs::write(path, bytes).unwrap();
}

#[tokio::test]
async fn a_text_that_is_not_utf8_fails_its_row_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.parquet");
    for dictionary in [true, false] {
        let texts = || {
            (0..30).map(|n| {
                if n == 7 {
                    "spoiled text".to_string()
                } else {
                    format!("text {n}")
                }
            })
        };
        let flat: ArrayRef = Arc::new(StringArray::from_iter_values(texts()));
        let mut lists = ListBuilder::new(LargeStringBuilder::new());
        for n in 0..30 {
            lists
                .values()
                .append_value(if n == 9 { "spoiled item" } else { "an item" });
            lists.append(true);
        }
        let ids: ArrayRef = Arc::new(Int64Array::from_iter_values(0..30));
        let other: ArrayRef = Arc::new(LargeStringArray::from_iter_values(
            (0..30).map(|n| if n == 11 { "spoiled other" } else { "other" }),
        ));
        let columns = vec![
            ("id", ids),
            ("flat", flat),
            ("lists", Arc::new(lists.finish()) as ArrayRef),
            ("other", other),
        ];
        let properties = WriterProperties::builder()
            .set_dictionary_enabled(dictionary)
            .set_statistics_enabled(parquet::file::properties::EnabledStatistics::None);
        write(&path, columns, properties);
        ["spoiled text", "spoiled item", "spoiled other"]
            .iter()
            .for_each(|text| spoil(&path, text));
        let plan = plan(dir.path(), &["id", "other"]).await;
        let (rows, carry, _) = read(&plan, Some(&["flat", "lists", "id"]), None).await;
        let errors = errors(&rows);
        let said: Vec<(u64, bool)> = errors.iter().map(|(row, why)| (*row, why.contains("UTF-8"))).collect();
        assert_eq!(said, [(7, true), (9, true), (11, true)], "{errors:?}");
        assert!(
            errors[0].1.ends_with("column `flat`: not UTF-8 at byte 3 of the text"),
            "{}",
            errors[0].1
        );
        assert_eq!(rows[8].fields.as_ref().unwrap()["flat"], "text 8");
        // Only the carried cell that cannot be read is null.
        assert_eq!((carry.column(0).null_count(), carry.column(1).null_count()), (0, 1));
        assert!(carry.column(1).is_null(11));
    }
}
