//! CSV, from files to rows: what a cell is, where a row begins, and every bad input with its one line.

use std::fs;
use std::path::Path;

use arrow::array::AsArray;
use arrow::datatypes::{DataType, Float64Type, Int64Type};
use gristmill::dataset::csv::layout::{CsvOptions, CsvType};
use gristmill::dataset::plan::Format;
use gristmill::dataset::{DatasetError, PlanRequest, plan_inputs};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::dataset_rows::{fields, read_all, request};

/// The rows of one file, as JSON.
async fn rows_of(name: &str, bytes: &[u8], csv: CsvOptions) -> Result<Vec<Result<Value, String>>, String> {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join(name), bytes).unwrap();
    let request = PlanRequest {
        csv,
        ..request(&[name], &[])
    };
    let plan = plan_inputs(&request, dir.path()).await.map_err(|e| e.to_string())?;
    assert!(bytes.is_empty() || plan.files[0].format == Format::Csv);
    let (rows, _) = read_all(&plan, None).await.map_err(|e| e.to_string())?;
    let place = format!("{}/", dir.path().canonicalize().unwrap().display());
    let named = |row: Result<Value, String>| row.map_err(|why| why.replace(&place, ""));
    Ok(fields(&rows).into_iter().map(named).collect())
}

async fn good(name: &str, bytes: &[u8]) -> Vec<Value> {
    let rows = rows_of(name, bytes, CsvOptions::default()).await.unwrap();
    rows.into_iter().map(Result::unwrap).collect()
}

fn types(given: &[(&str, CsvType)]) -> CsvOptions {
    CsvOptions {
        types: given.iter().map(|(name, kind)| (name.to_string(), *kind)).collect(),
        ..CsvOptions::default()
    }
}

#[tokio::test]
async fn a_cell_is_shown_as_it_stands() {
    let text = b"id,zip,price,sum,ok,note\n1,007,1.5,1e5,true,a\n-20,90210,20,2,false,\n";
    assert_eq!(
        good("a.csv", text).await,
        [
            json!({"id": 1, "zip": "007", "price": 1.5, "sum": "1e5", "ok": "true", "note": "a"}),
            json!({"id": -20, "zip": "90210", "price": 20, "sum": "2", "ok": "false", "note": null}),
        ]
    );
    // A hundred thousand numbers and one text: all are text, whatever a sample would say.
    let mut long = b"n\n".to_vec();
    (0..100_000).for_each(|n| long.extend(format!("{n}\n").bytes()));
    long.extend(b"007\n");
    assert_eq!(good("a.csv", &long).await[5], json!({"n": "5"}));
}

#[tokio::test]
async fn dialects_that_people_have() {
    // Excel: a byte order mark, Windows line ends, semicolons.
    let excel = "\u{feff}\"name\";\"note\"\r\n\"Zo\u{eb}\";\"a \"\"b\"\"\nc\"\r\n\r\nx;;\r\n";
    let semicolon = CsvOptions {
        delimiter: Some(';'),
        ..CsvOptions::default()
    };
    let rows = rows_of("a.csv", excel.as_bytes(), semicolon).await.unwrap();
    assert_eq!(rows[0], Ok(json!({"name": "Zo\u{eb}", "note": "a \"b\"\nc"})));
    assert_eq!(
        rows[1],
        Err("row 1 of `a.csv`: line 5: 3 cells where the table has 2 columns".into())
    );
    // pandas: the index has no name.
    assert_eq!(good("a.csv", b",t\n0,x\n").await, [json!({"column_1": 0, "t": "x"})]);
    // Tabs by the name; quotes within a cell are no quotes.
    assert_eq!(
        good("a.TSV", b"t\tu\n5\" pipe\ta,b\n").await,
        [json!({"t": "5\" pipe", "u": "a,b"})]
    );
    // An empty cell is null, an empty text is not; an empty line is a row where there is one column.
    assert_eq!(good("a.csv", b"t,u\n,\"\"\n\n").await, [json!({"t": null, "u": ""})]);
    assert_eq!(
        good("a.csv", b"t\nx\n\ny").await,
        [json!({"t": "x"}), json!({"t": null}), json!({"t": "y"})]
    );
    assert_eq!(good("a.csv", b"PARENT,x\n1,2\n").await, [json!({"PARENT": 1, "x": 2})]);
    // What stands in quotes is text.
    assert_eq!(
        good("a.csv", b"n\n\"1\"\n2\n").await,
        [json!({"n": "1"}), json!({"n": "2"})]
    );
    assert_eq!(good("a.csv", b"t,u\n").await, [] as [Value; 0]);
    assert_eq!(good("a.csv", b"").await, [] as [Value; 0]);
    assert_eq!(good("a.csv", b"\xef\xbb\xbf").await, [] as [Value; 0]);
    let named = CsvOptions {
        columns: Some(vec!["a".into(), "b".into()]),
        ..CsvOptions::default()
    };
    let rows = rows_of("a.csv", b"\xef\xbb\xbf1,x\n2,y\n", named).await.unwrap();
    assert_eq!(rows, [Ok(json!({"a": 1, "b": "x"})), Ok(json!({"a": 2, "b": "y"}))]);
}

#[tokio::test]
async fn given_types_hold_or_their_cell_is_named() {
    let given = types(&[
        ("id", CsvType::String),
        ("n", CsvType::Int64),
        ("price", CsvType::Float64),
    ]);
    let text = b"id,n,price\n1,007,1e2\n2,x,1\n3,,nan\n4,5,\"2\n\"\n\xff,1,1\n6,1,\0\n7,8,9\n";
    let rows = rows_of("a.csv", text, given).await.unwrap();
    let bad = |row: u64, why: &str| Err(format!("row {row} of `a.csv`: {why}"));
    assert_eq!(
        rows,
        [
            Ok(json!({"id": "1", "n": 7, "price": 100.0})),
            bad(1, "line 3: column `n`: `x` is no int64"),
            bad(2, "line 4: column `price`: `nan` is no float64"),
            bad(3, "line 5: column `price`: `2\\n` is no float64"),
            bad(
                4,
                "line 7: column `id`: not UTF-8 at byte 1 of the cell; convert the file to UTF-8, as with `iconv -f LATIN1 -t UTF-8`"
            ),
            bad(5, "line 8: column `price`: a zero byte at byte 1 of the cell"),
            Ok(json!({"id": "7", "n": 8, "price": 9})),
        ]
    );
}

#[tokio::test]
async fn carried_columns_have_the_tables_types() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("a.csv"), "id,zip,price,n\n1,007,1.5,1\n2,,2,x\n").unwrap();
    fs::write(dir.path().join("b.csv"), "id,zip,price,n\n3,12345,3,2\n").unwrap();
    let request = PlanRequest {
        csv: types(&[("n", CsvType::Int64)]),
        ..request(&["*.csv"], &["price", "zip", "id", "n"])
    };
    let plan = plan_inputs(&request, dir.path()).await.unwrap();
    let found: Vec<&DataType> = plan.carry_schema.fields().iter().map(|f| f.data_type()).collect();
    assert_eq!(
        found,
        [&DataType::Float64, &DataType::Utf8, &DataType::Int64, &DataType::Int64]
    );
    let names: Vec<&str> = plan.columns.iter().map(|column| column.name.as_str()).collect();
    assert_eq!(names, ["id", "zip", "price", "n"]);
    // The prompt uses none of them.
    let (rows, carry) = read_all(&plan, Some(Vec::new())).await.unwrap();
    assert_eq!(fields(&rows)[0], Ok(json!({})));
    assert!(fields(&rows)[1].is_err());
    let floats: Vec<_> = carry.column(0).as_primitive::<Float64Type>().iter().collect();
    assert_eq!(
        floats,
        [Some(1.5), Some(2.0), Some(3.0)],
        "also of the row that has a bad cell"
    );
    let texts: Vec<_> = carry.column(1).as_string::<i32>().iter().collect();
    assert_eq!(texts, [Some("007"), None, Some("12345")]);
    let ints: Vec<_> = carry.column(2).as_primitive::<Int64Type>().iter().collect();
    assert_eq!(ints, [Some(1), Some(2), Some(3)]);
    let bad: Vec<_> = carry.column(3).as_primitive::<Int64Type>().iter().collect();
    assert_eq!(bad, [Some(1), None, Some(2)]);
}

#[tokio::test]
async fn a_column_that_nobody_uses_spoils_no_row() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("a.csv"), b"t,blob\nx,\xff\xfe\n").unwrap();
    let plan = plan_inputs(&request(&["a.csv"], &[]), dir.path()).await.unwrap();
    let (rows, _) = read_all(&plan, Some(vec!["t".into()])).await.unwrap();
    assert_eq!(fields(&rows), [Ok(json!({"t": "x"}))]);
}

#[tokio::test]
async fn what_cannot_be_planned_is_one_clear_line() {
    let check = async |bytes: &[u8], csv: CsvOptions, expected: &str| {
        let error = rows_of("a.csv", bytes, csv).await.unwrap_err();
        assert!(error.contains(expected) && !error.contains('\n'), "{error}");
    };
    let none = CsvOptions::default;
    check(
        b"a,b\n1,\"x\n2,y\n",
        none(),
        "a.csv` cannot be read: line 2: a quote that is never closed",
    )
    .await;
    check(
        b"a,b\n1,\"x\" y\n",
        none(),
        "line 2: a quote that ends a cell is followed by more text",
    )
    .await;
    check(
        b"a,b\r1,2\r",
        none(),
        "line 1: a carriage return that no line feed follows",
    )
    .await;
    check(b"a,b,a\n1,2,3\n", none(), "line 1: the header: it has two columns `a`").await;
    check(b"\na,b\n", none(), "line 1: the header: an empty line").await;
    check(b"a,\xff\n", none(), "line 1: the header: cell 2: not UTF-8").await;
    check(b"a,\0\n", none(), "line 1: the header: cell 2: a zero byte").await;
    check(b"a;b\n1;2\n", none(), "for example `input.delimiter: \";\"`").await;
    check(b"\xff\xfea\0", none(), "it is UTF-16 text; convert it to UTF-8").await;
    check(
        &[vec![b'a'; 17 << 20], b"\n".to_vec()].concat(),
        none(),
        "the header: a line of 17825793 bytes",
    )
    .await;
    check(
        &b"a,".repeat(5000),
        none(),
        "the header: it has 4097 columns; a table has 1 to 4096",
    )
    .await;
    check(
        b"price\n1\n",
        types(&[("prize", CsvType::Int64)]),
        "`input.types` names column `prize`, which `",
    )
    .await;
    check(
        b"price\n1\n",
        types(&[("prize", CsvType::Int64)]),
        "did you mean `price`?",
    )
    .await;
    let named = CsvOptions {
        columns: Some(vec!["a".into()]),
        ..CsvOptions::default()
    };
    check(b"a\n1\n", named, "line 1: it has the names that `input.columns` gives").await;

    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("a.csv"), "a,b\n1,2\n").unwrap();
    fs::write(dir.path().join("b.csv"), "b,a\n1,2\n").unwrap();
    fs::write(dir.path().join("c.jsonl"), "{}\n").unwrap();
    let refused = async |request: &PlanRequest, expected: &str| {
        let error = plan_inputs(request, dir.path()).await.unwrap_err().to_string();
        assert!(error.contains(expected) && !error.contains('\n'), "{error}");
    };
    refused(
        &request(&["*.csv"], &[]),
        "a.csv` has the columns `a`, `b` between ',', `",
    )
    .await;
    refused(&request(&["a.csv"], &["c"]), "`output.carry` names column `c`, which `").await;
    refused(&request(&["a.csv", "c.jsonl"], &[]), "the inputs mix formats").await;
    let told = PlanRequest {
        csv: types(&[("a", CsvType::Int64)]),
        ..request(&["c.jsonl"], &[])
    };
    refused(&told, "are for CSV, and the inputs are JSON lines").await;
}

#[tokio::test]
async fn a_long_record_is_one_errored_row_and_its_lines_count() {
    let mut text = b"n,t\n1,\"".to_vec();
    text.extend(b"x\n".repeat(20 << 20));
    text.extend(b"\"\nx,\n3,c\n");
    let rows = rows_of("a.csv", &text, types(&[("n", CsvType::Int64)])).await.unwrap();
    let first = rows[0].as_ref().unwrap_err();
    assert!(
        first.starts_with("row 0 of `a.csv`: line 2: a line of 41943045 bytes"),
        "{first}"
    );
    let second = rows[1].as_ref().unwrap_err();
    assert_eq!(
        second,
        &format!("row 1 of `a.csv`: line {}: column `n`: `x` is no int64", 3 + (20 << 20))
    );
    assert_eq!(rows[2], Ok(json!({"n": 3, "t": "c"})));
}

#[tokio::test]
async fn lines_are_counted_over_blocks() {
    let dir = tempfile::tempdir().unwrap();
    let row = format!("1,\"two\nlines {}\"\n", "x".repeat(100));
    fs::write(
        dir.path().join("a.csv"),
        "n,t\n".to_string() + &row.repeat(30_000) + "1,x,y\n",
    )
    .unwrap();
    let request = PlanRequest {
        shard_rows: 100_000,
        ..request(&["a.csv"], &[])
    };
    let plan = plan_inputs(&request, dir.path()).await.unwrap();
    assert_eq!((plan.total_rows, plan.shards.len()), (30_001, 1));
    let (rows, _) = read_all(&plan, None).await.unwrap();
    let error = rows[30_000].fields.as_ref().unwrap_err();
    assert!(
        error.ends_with("line 60002: 3 cells where the table has 2 columns"),
        "{error}"
    );
}

#[tokio::test]
async fn rows_behind_the_limit_decide_nothing() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("a.csv"), "a\n1\n2\nx\n").unwrap();
    let request = PlanRequest {
        limit: Some(2),
        ..request(&["a.csv"], &["a"])
    };
    let plan = plan_inputs(&request, dir.path()).await.unwrap();
    assert_eq!(
        (plan.total_rows, plan.carry_schema.field(0).data_type()),
        (2, &DataType::Int64)
    );
    assert_eq!(read_all(&plan, None).await.unwrap().0.len(), 2);
}

#[tokio::test]
async fn an_input_that_changed_stops_the_job() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.csv");
    fs::write(&path, "a\n1\n").unwrap();
    let plan = plan_inputs(&request(&["a.csv"], &[]), dir.path()).await.unwrap();
    fs::write(&path, "a\n22\n").unwrap();
    let error = read_all(&plan, None).await.unwrap_err();
    assert!(matches!(error, DatasetError::InputChanged { .. }), "{error}");
}

/// Writes a table as Python's csv module does.
fn write(path: &Path, names: &[&str], rows: &[Vec<String>], end: &str) {
    let quote = |cell: &str| {
        if cell.contains(['"', ',', '\n', '\r']) || cell.is_empty() {
            format!("\"{}\"", cell.replace('"', "\"\""))
        } else {
            cell.to_string()
        }
    };
    let mut text = names.join(",") + end;
    for row in rows {
        text += &(row.iter().map(|cell| quote(cell)).collect::<Vec<_>>().join(",") + end);
    }
    fs::write(path, text).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]
    #[test]
    fn shards_give_every_row_once_whatever_its_quotes_hold(
        files in prop::collection::vec(prop::collection::vec(prop::collection::vec("[a0-2\",\n\r .]{0,5}", 3), 0..12), 1..4),
        shard_rows in 1u64..9,
        windows: bool,
    ) {
        let dir = tempfile::tempdir().unwrap();
        let names = ["a", "b", "c"];
        for (n, rows) in files.iter().enumerate() {
            write(&dir.path().join(format!("{n}.csv")), &names, rows, if windows { "\r\n" } else { "\n" });
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let rows = runtime.block_on(async {
            let request = PlanRequest { shard_rows, ..request(&["*.csv"], &[]) };
            let plan = plan_inputs(&request, dir.path()).await.unwrap();
            assert!(plan.shards.iter().all(|s| s.rows <= shard_rows));
            read_all(&plan, None).await.unwrap().0
        });
        // Whatever their types, they are shown as they stand.
        let shown = |value: &Value| value.as_str().map_or_else(|| value.to_string(), String::from);
        let rows: Vec<Vec<String>> = fields(&rows).into_iter().map(|row| {
            let row = row.unwrap();
            names.iter().map(|name| shown(&row[*name])).collect()
        }).collect();
        prop_assert_eq!(rows, files.concat());
    }
}
