//! JSON lines, OpenAI batch lines and plain text, from files to rows: good input, and every bad input with its one line.

use std::fs;
use std::path::Path;

use arrow::array::{Array, AsArray};
use arrow::datatypes::{DataType, Float64Type, Int64Type};
use gristmill::dataset::plan::Format;
use gristmill::dataset::{DatasetError, PlanRequest, plan_inputs};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::dataset_rows::{self, fields, read_shards as read_all};

fn request(uris: &[&str], carry: &[&str]) -> PlanRequest {
    PlanRequest {
        reserved: vec!["row".into(), "status".into()],
        ..dataset_rows::request(uris, carry)
    }
}

async fn plan_error(dir: &Path, request: &PlanRequest) -> String {
    plan_inputs(request, dir).await.unwrap_err().to_string()
}

#[tokio::test]
async fn bad_lines_are_errored_rows_and_their_neighbours_live() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("in.jsonl");
    let text = b"\xef\xbb\xbf{\"id\": 1, \"t\": \"a\"}\r\n\n{\"id\": 2, \"t\": \"\xff\"}\n[3]\n{\"id\": 4\n   \n{\"id\": 5, \"t\": null}";
    fs::write(&path, text).unwrap();
    let plan = plan_inputs(&request(&["in.jsonl"], &["id", "t"]), dir.path())
        .await
        .unwrap();
    assert_eq!(
        (plan.total_rows, plan.shards.len(), plan.files[0].format),
        (5, 3, Format::Jsonl)
    );
    assert_eq!(
        plan.columns
            .iter()
            .map(|c| (&c.name[..], &c.kind[..]))
            .collect::<Vec<_>>(),
        [("id", "Int64"), ("t", "Utf8")]
    );
    let (rows, carry) = read_all(&plan, None).await.unwrap();
    let name = path.canonicalize().unwrap().display().to_string();
    let bad = |row: u64, why: &str| Err(format!("row {row} of `{name}`: {why}"));
    assert_eq!(
        fields(&rows),
        [
            Ok(json!({"id": 1, "t": "a"})),
            bad(1, "not UTF-8 at byte 17 of the line"),
            bad(2, "not a JSON object"),
            bad(3, "not JSON: EOF while parsing an object at byte 8 of the line"),
            Ok(json!({"id": 5, "t": null})),
        ]
    );
    let ids: Vec<Option<i64>> = carry
        .iter()
        .flat_map(|b| b.column(0).as_primitive::<Int64Type>().iter().collect::<Vec<_>>())
        .collect();
    assert_eq!(ids, [Some(1), None, None, None, Some(5)]);
}

#[tokio::test]
async fn a_line_of_100_mb_is_one_errored_row_in_bounded_memory() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("in.jsonl");
    let mut text = b"{\"t\":\"first\"}\n{\"t\":\"".to_vec();
    text.resize(100 << 20, b'x');
    text.extend(b"\"}\n{\"t\":\"last\"}\n");
    fs::write(&path, &text).unwrap();
    drop(text);
    let before = peak_bytes();
    let plan = plan_inputs(&request(&["in.jsonl"], &["t"]), dir.path()).await.unwrap();
    let (rows, _) = read_all(&plan, None).await.unwrap();
    let rows = fields(&rows);
    assert_eq!(rows[0], Ok(json!({"t": "first"})));
    assert!(
        rows[1].as_ref().unwrap_err().ends_with("bytes, more than 16777216"),
        "{:?}",
        rows[1]
    );
    assert_eq!(rows[2], Ok(json!({"t": "last"})));
    let grown = peak_bytes() - before;
    assert!(grown < 90 << 20, "memory grew by {grown} bytes");
}

/// Highest resident set of this process so far.
pub(crate) fn peak_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

#[tokio::test]
async fn carried_types_are_inferred_over_all_files() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(
        dir.path().join("a.jsonl"),
        "{\"n\":1,\"f\":1,\"m\":1,\"b\":true,\"o\":{\"x\":[1]}}\n",
    )
    .unwrap();
    fs::write(
        dir.path().join("b.jsonl"),
        "{\"n\":9007199254740993,\"f\":2.5,\"m\":\"1\"}\n{\"b\":null}\n",
    )
    .unwrap();
    let plan = plan_inputs(&request(&["*.jsonl"], &["n", "f", "m", "b", "o"]), dir.path())
        .await
        .unwrap();
    let types: Vec<&DataType> = plan.carry_schema.fields().iter().map(|f| f.data_type()).collect();
    assert_eq!(
        types,
        [
            &DataType::Int64,
            &DataType::Float64,
            &DataType::Utf8,
            &DataType::Boolean,
            &DataType::Utf8
        ]
    );
    let (_, carry) = read_all(&plan, None).await.unwrap();
    let carry = arrow::compute::concat_batches(&plan.carry_schema, &carry).unwrap();
    let ints: Vec<_> = carry.column(0).as_primitive::<Int64Type>().iter().collect();
    assert_eq!(ints, [Some(1), Some(9007199254740993), None]);
    let floats: Vec<_> = carry.column(1).as_primitive::<Float64Type>().iter().collect();
    assert_eq!(floats, [Some(1.0), Some(2.5), None]);
    assert_eq!(
        carry.column(2).as_string::<i32>().iter().collect::<Vec<_>>(),
        [Some("1"), Some("\"1\""), None]
    );
    assert_eq!(carry.column(4).as_string::<i32>().value(0), "{\"x\":[1]}");
    assert_eq!(carry.column(4).null_count(), 2);
}

#[tokio::test]
async fn only_the_prompts_columns_are_kept_and_missing_keys_are_null() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("a.jsonl"), "{\"a\":1,\"b\":2}\n{\"b\":3}\n").unwrap();
    let columns = Some(vec!["a".to_string()]);
    let plan = plan_inputs(
        &PlanRequest {
            columns: columns.clone(),
            ..request(&["a.jsonl"], &[])
        },
        dir.path(),
    )
    .await
    .unwrap();
    let (rows, carry) = read_all(&plan, columns).await.unwrap();
    assert_eq!(fields(&rows), [Ok(json!({"a": 1})), Ok(json!({"a": null}))]);
    assert_eq!((carry[0].num_columns(), carry[0].num_rows()), (0, 2));
}

#[tokio::test]
async fn batch_lines_with_the_same_custom_id_name_both_lines() {
    let dir = tempfile::tempdir().unwrap();
    let line = |id: &str| {
        format!("{{\"custom_id\":\"{id}\",\"method\":\"POST\",\"url\":\"/v1/chat/completions\",\"body\":{{}}}}\n")
    };
    fs::write(dir.path().join("a.jsonl"), line("x") + "\n" + &line("y")).unwrap();
    let plan = plan_inputs(&request(&["a.jsonl"], &["custom_id"]), dir.path())
        .await
        .unwrap();
    assert_eq!((plan.files[0].format, plan.total_rows), (Format::OpenaiBatch, 2));
    let (rows, _) = read_all(&plan, None).await.unwrap();
    assert_eq!(rows[1].fields.as_ref().unwrap()["custom_id"], "y");
    fs::write(dir.path().join("b.jsonl"), line("z") + "\n" + &line("z")).unwrap();
    let error = plan_error(dir.path(), &request(&["b.jsonl"], &[])).await;
    let name = |file: &str| dir.path().join(file).display().to_string();
    assert_eq!(
        error,
        format!(
            "line 3 of `{}` has the `custom_id` of line 1; each must be there once",
            name("b.jsonl")
        )
    );
    fs::write(dir.path().join("b.jsonl"), line("y")).unwrap();
    let error = plan_error(dir.path(), &request(&["*.jsonl"], &[])).await;
    let expected = format!(
        "line 1 of `{}` has the `custom_id` of line 3 of `{}`; each must be there once",
        name("b.jsonl"),
        name("a.jsonl")
    );
    assert_eq!(error, expected);
}

#[tokio::test]
async fn text_is_a_row_a_line() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("a.txt"), "one\r\n\nthree").unwrap();
    let plan = plan_inputs(&request(&["a.txt"], &["text"]), dir.path()).await.unwrap();
    assert_eq!((plan.files[0].format, plan.total_rows), (Format::Text, 3));
    let (rows, _) = read_all(&plan, None).await.unwrap();
    assert_eq!(
        fields(&rows),
        [
            Ok(json!({"text": "one"})),
            Ok(json!({"text": ""})),
            Ok(json!({"text": "three"}))
        ]
    );
    fs::write(dir.path().join("b.md"), "# a\n").unwrap();
    assert!(
        plan_error(dir.path(), &request(&["b.md"], &[]))
            .await
            .contains("none of its 1 lines is a JSON object")
    );
    let told = PlanRequest {
        format: Some(Format::Text),
        ..request(&["b.md"], &[])
    };
    assert_eq!(plan_inputs(&told, dir.path()).await.unwrap().total_rows, 1);
}

#[tokio::test]
async fn what_cannot_be_planned_is_one_clear_line() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str, bytes: &[u8]| fs::write(dir.path().join(name), bytes).unwrap();
    at("ok.jsonl", b"{\"subject\":1}\n");
    at("list.json", b"[{\"a\":1}]");
    at("x.dat", b"a,b\n1,2\n");
    at("x.gz", b"\x1f\x8b\x08\x00rest of a header, and no data behind it");
    at("utf16.jsonl", b"\xff\xfe{\x00}\x00");
    at("text.txt", b"hello\n");
    let check = async |request: PlanRequest, expected: &str| {
        let error = plan_error(dir.path(), &request).await;
        assert!(error.contains(expected) && !error.contains('\n'), "{error}");
    };
    check(
        request(&["list.json"], &[]),
        "list.json` cannot be read: it is a JSON list, not JSON lines",
    )
    .await;
    check(
        request(&["x.dat"], &[]),
        "x.dat` cannot be read: it is neither Parquet nor JSON lines",
    )
    .await;
    check(
        request(&["x.gz"], &[]),
        "x.gz` cannot be read: its gzip data is damaged near byte ",
    )
    .await;
    check(request(&["utf16.jsonl"], &[]), "it is UTF-16 text; convert it to UTF-8").await;
    check(request(&["ok.jsonl", "text.txt"], &[]), "the inputs mix formats: `").await;
    check(
        request(&["ok.jsonl"], &["subjekt"]),
        "`output.carry` names column `subjekt`, which no line of `",
    )
    .await;
    check(request(&["ok.jsonl"], &["subjekt"]), "did you mean `subject`?").await;
    check(
        request(&["ok.jsonl"], &["row"]),
        "carried column `row` has the name of an output column",
    )
    .await;
    check(request(&["ok.jsonl"], &["a", "a"]), "column `a` is carried twice").await;
    let columns = Some(vec!["body".to_string()]);
    check(
        PlanRequest {
            columns,
            ..request(&["ok.jsonl"], &[])
        },
        "the prompt uses column `body`, which no line of `",
    )
    .await;
    let told = PlanRequest {
        format: Some(Format::Parquet),
        ..request(&["ok.jsonl"], &[])
    };
    check(told, "it is no Parquet file: it does not begin with `PAR1`").await;
}

#[tokio::test]
async fn an_input_that_changed_stops_the_job() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.jsonl");
    fs::write(&path, "{\"a\":1}\n").unwrap();
    let plan = plan_inputs(&request(&["a.jsonl"], &[]), dir.path()).await.unwrap();
    fs::write(&path, "{\"a\":22}\n").unwrap();
    let error = read_all(&plan, None).await.unwrap_err();
    assert!(matches!(error, DatasetError::InputChanged { .. }), "{error}");
    assert!(
        error
            .to_string()
            .contains("a.jsonl` is not what it was when the job was planned: "),
        "{error}"
    );
    fs::remove_file(&path).unwrap();
    let error = read_all(&plan, None).await.unwrap_err();
    assert!(error.to_string().contains("is not there"), "{error}");
}

#[tokio::test]
async fn rows_behind_the_limit_decide_nothing() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(
        dir.path().join("a.jsonl"),
        "{\"a\":1}\n\n{\"a\":2}\n{\"a\":\"x\",\"b\":1}\n",
    )
    .unwrap();
    let plan = plan_inputs(
        &PlanRequest {
            limit: Some(2),
            ..request(&["a.jsonl"], &["a"])
        },
        dir.path(),
    )
    .await
    .unwrap();
    assert_eq!(
        (plan.total_rows, plan.carry_schema.field(0).data_type()),
        (2, &DataType::Int64)
    );
    assert_eq!(plan.columns.len(), 1);
    assert_eq!(read_all(&plan, None).await.unwrap().0.len(), 2);
}

#[tokio::test]
async fn empty_inputs_are_one_shard_without_rows() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("a.jsonl"), "").unwrap();
    fs::write(dir.path().join("b.jsonl"), "\n \n").unwrap();
    let plan = plan_inputs(&request(&["*.jsonl"], &["id"]), dir.path()).await.unwrap();
    assert_eq!((plan.total_rows, plan.shards.len()), (0, 1));
    let (rows, carry) = read_all(&plan, None).await.unwrap();
    assert!(rows.is_empty() && carry[0].schema() == plan.carry_schema);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]
    #[test]
    fn shards_give_every_row_once(
        files in prop::collection::vec(prop::collection::vec(prop::sample::select(vec![0usize, 1, 2, 300]), 0..12), 1..4),
        shard_rows in 1u64..9,
        limit in prop::option::of(0u64..40),
        ended: bool,
    ) {
        let dir = tempfile::tempdir().unwrap();
        let mut expected = Vec::new();
        for (n, lines) in files.iter().enumerate() {
            let mut text = String::new();
            for &pad in lines {
                // 0: a blank line.
                if pad > 0 {
                    let value = json!({"n": expected.len(), "pad": "x".repeat(pad)});
                    text += &value.to_string();
                    expected.push(value);
                }
                text.push('\n');
            }
            if !ended {
                text.pop();
            }
            fs::write(dir.path().join(format!("{n}.jsonl")), text).unwrap();
        }
        expected.truncate(limit.map_or(usize::MAX, |l| l as usize));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let rows = runtime.block_on(async {
            let request = PlanRequest { shard_rows, limit, ..request(&["*.jsonl"], &[]) };
            let plan = plan_inputs(&request, dir.path()).await.unwrap();
            assert!(plan.shards.iter().all(|s| s.rows <= shard_rows));
            assert_eq!(plan.files.iter().map(|f| f.rows).sum::<u64>(), plan.total_rows);
            read_all(&plan, None).await.unwrap().0
        });
        let rows: Vec<Value> = fields(&rows).into_iter().map(Result::unwrap).collect();
        prop_assert_eq!(rows, expected);
    }
}
