//! Whole jobs through the built binary, looked at through other programs' eyes.

use std::process::Command;

use crate::support::{Run, arg, check_output, gristmill, job_in, python, root};

/// Reads the output with pyarrow and with DuckDB, as a user would.
const READ_WITH_BOTH: &str = r#"
import sys, duckdb, pyarrow.dataset as ds
folder, rows = sys.argv[1], int(sys.argv[2])
table = ds.dataset(folder, format="parquet").to_table()
assert table.num_rows == rows, table.num_rows
assert table.column("row").to_pylist() == list(range(rows)), "not in input order"
relation = duckdb.sql(f"select row from '{folder}/*.parquet'").fetchall()
assert [r[0] for r in relation] == list(range(rows)), "DuckDB sees another order"
meta = ds.dataset(folder, format="parquet").schema.metadata or {}
import pyarrow.parquet as pq, glob
for part in glob.glob(folder + "/part-*.parquet"):
    keys = pq.read_metadata(part).metadata
    for key in (b"gristmill.job", b"gristmill.model_hash", b"gristmill.tokenizer_hash", b"gristmill.template_hash",
                b"gristmill.job_hash", b"gristmill.precision", b"gristmill.version"):
        assert keys.get(key), (part, key, keys.keys())
"#;

#[test]
fn labels_the_demo_dataset() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = job_in(folder.path(), "label-tickets.yaml", |text| text);
    let run = Run::of(&mut gristmill(&["run", arg(&job), "--json"])).expect(0);
    let json = run.json();
    assert_eq!(json["job"], "label-tickets");
    assert_eq!(json["rows"]["total"], 2000);
    assert_eq!(json["rows"]["succeeded"], 2000);
    assert!(
        json["tokens"]["cached"].as_u64() > Some(0),
        "the instruction is shared: {json}"
    );
    assert!(
        json["tokens_per_second"].as_f64() > Some(0.0) && json["usd"].as_f64() > Some(0.0),
        "{json}"
    );
    let (equal, rows) = (
        json["agreement"]["equal"].as_u64().unwrap(),
        json["agreement"]["rows"].as_u64().unwrap(),
    );
    assert_eq!(rows, 2000);
    assert!(equal * 100 >= rows * 95, "{equal} of {rows} categories are right");

    check_output(&output, &root().join("jobs/demo/tickets.parquet"), "ticket_id");
    Run::of(Command::new(python()).args(["-c", READ_WITH_BOTH, arg(&output), "2000"])).expect(0);
    Run::of(&mut gristmill(&["verify", arg(&output)])).expect(0);
    let status = Run::of(&mut gristmill(&["status", arg(&output), "--json"]))
        .expect(0)
        .json();
    assert_eq!(status["rows"]["succeeded"], 2000, "{status}");

    // Once more: nothing is done, and that is said.
    let before = part_times(&output);
    let again = Run::of(&mut gristmill(&["run", arg(&job), "--json"])).expect(0);
    assert!(again.stderr.contains("already done"), "{}", again.stderr);
    assert_eq!(again.json()["rows"]["succeeded"], 2000);
    assert_eq!(part_times(&output), before, "no part was touched");
}

fn part_times(output: &std::path::Path) -> Vec<(std::path::PathBuf, std::time::SystemTime)> {
    let mut times: Vec<_> = std::fs::read_dir(output)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_file())
        .map(|path| (path.clone(), path.metadata().unwrap().modified().unwrap()))
        .collect();
    times.sort();
    times
}

/// Every completion of the writing job is JSON with the schema's fields; the same seed gives the same texts.
const READ_TICKETS: &str = r#"
import sys, json, pyarrow.dataset as ds
first, second = (ds.dataset(f, format="parquet").to_table().to_pylist() for f in sys.argv[1:3])
assert [r["completion"] for r in first] == [r["completion"] for r in second], "not reproducible"
good = [r for r in first if r["status"] == "succeeded"]
assert len(good) >= 0.9 * len(first), (len(good), len(first))
for row in good:
    ticket = json.loads(row["parsed"])
    assert set(ticket) == {"subject", "body", "urgency"}, ticket
    assert ticket["urgency"] in ("low", "normal", "high"), ticket
for row in first:
    assert row["status"] == "succeeded" or (row["status"] == "invalid_output" and row["error"]), row
assert len({r["completion"] for r in first}) > len(first) // 2, "sampled texts vary"
"#;

#[test]
fn writes_tickets_that_fit_the_schema_and_the_seed() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut folders = Vec::new();
    for (folder, sequences) in [(&one, "64"), (&two, "7")] {
        let (job, output) = job_in(folder.path(), "write-tickets.yaml", |text| text);
        let run = Run::of(&mut gristmill(&[
            "run",
            arg(&job),
            "--limit",
            "80",
            "--sequences",
            sequences,
            "--json",
        ]));
        assert!(matches!(run.code, Some(0 | 3)), "{run:?}");
        folders.push(output.join("_limit/80"));
        assert_eq!(run.json()["rows"]["total"], 80);
    }
    Run::of(Command::new(python()).args(["-c", READ_TICKETS, arg(&folders[0]), arg(&folders[1])])).expect(0);
}

#[test]
fn plan_reads_everything_and_runs_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = job_in(folder.path(), "label-tickets.yaml", |text| text);
    let run = Run::of(&mut gristmill(&["plan", arg(&job), "--preview", "2", "--json"])).expect(0);
    let json = run.json();
    assert_eq!(json["rows"], 2000);
    assert_eq!(json["broken_rows"], 0);
    assert!(json["prompt_tokens"].as_u64() > Some(2000 * 20), "{json}");
    assert!(!output.exists(), "plan writes nothing");
}
