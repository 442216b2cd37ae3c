//! Inputs without a row: one part without a row, which has the columns.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::readers::check_readers;
use crate::support::{Run, arg, gristmill, python, root};

/// A job over `input`, a file beside it, that carries `id` and `tags`; `more` goes to the output.
fn job_over(folder: &Path, input: &str, more: &str) -> (PathBuf, PathBuf) {
    let text = format!(
        "name: nothing\nmodel: {}\nprecision: f32\ncontext: 128\ninput: {{uri: {input}}}\n\
         prompt: {{text: '{{{{ text }}}} ->'}}\ngenerate: {{max_tokens: 1, temperature: 0}}\n\
         output: {{uri: out, carry: [id, tags]{more}}}\nbudget: {{usd_per_hour: 1.5}}\n",
        root().join("jobs/demo/model").display()
    );
    let job = folder.join("nothing.yaml");
    fs::write(&job, text).unwrap();
    (job, folder.join("out"))
}

fn run(arguments: &[&str]) -> Run {
    Run::of(&mut gristmill(arguments))
}

/// Runs Python with `arguments`.
fn look(script: &str, arguments: &[&str]) {
    Run::of(Command::new(python()).args(["-c", script]).args(arguments)).expect(0);
}

/// `id`, `tags` and `text`; in files without a row group, with an empty one, and with rows.
const WRITE_INPUTS: &str = r#"
import sys, pyarrow as pa, pyarrow.parquet as pq
folder = sys.argv[1]
schema = pa.schema([("id", pa.uint16()), ("text", pa.string()), ("tags", pa.list_(pa.float32()))])
pq.ParquetWriter(folder + "/none.parquet", schema).close()
with pq.ParquetWriter(folder + "/empty.parquet", schema) as writer:
    writer.write_table(schema.empty_table())
    writer.write_table(schema.empty_table())
assert pq.read_metadata(folder + "/none.parquet").num_row_groups == 0
assert pq.read_metadata(folder + "/empty.parquet").num_row_groups > 0
rows = pa.table([[1, 2], ["a", "b"], [[0.5], None]], schema=schema)
pq.write_table(rows, folder + "/some.parquet")
"#;

/// The empty part has the columns and types of a part with rows, for pyarrow and for DuckDB.
const SAME_COLUMNS: &str = r#"
import sys, duckdb, pyarrow.parquet as pq, pyarrow.dataset as ds
empty, full = sys.argv[1:3]
assert ds.dataset(empty, format="parquet").schema.equals(ds.dataset(full, format="parquet").schema)
assert pq.read_table(empty).num_rows == 0 and pq.read_table(full).num_rows == 2
types = [duckdb.sql(f"describe from '{folder}/*.parquet'").fetchall() for folder in (empty, full)]
assert types[0] == types[1], types
assert [t[:2] for t in types[0][:2]] == [("id", "USMALLINT"), ("tags", "FLOAT[]")], types[0]
assert duckdb.sql(f"from '{empty}/*.parquet'").fetchall() == []
assert pq.read_metadata(empty + "/part-00000.parquet").metadata[b"gristmill.shard"] == b"0"
"#;

fn no_negative_zero(run: &Run) {
    assert!(!run.stdout.contains("-0"), "{}", run.stdout);
}

#[test]
fn parquet_without_rows_becomes_one_part_without_rows() {
    let folder = tempfile::tempdir().unwrap();
    look(WRITE_INPUTS, &[arg(folder.path())]);
    let (job, full) = job_over(folder.path(), "some.parquet", "");
    run(&["run", arg(&job), "--quiet"]).expect(0);
    let mut read = Vec::new();
    for input in ["none", "empty"] {
        let own = folder.path().join(input);
        fs::create_dir(&own).unwrap();
        let (job, output) = job_over(&own, &format!("../{input}.parquet"), "");
        run(&["plan", arg(&job)]).expect(0);
        let first = run(&["run", arg(&job)]).expect(0);
        assert!(!first.stderr.contains("already done"), "{}", first.stderr);
        no_negative_zero(&first);
        for line in ["0 of 0 succeeded", "0 tokens/s over 0.0 s", "$0.0000"] {
            assert!(first.stdout.contains(line), "`{line}` is missing in:\n{}", first.stdout);
        }
        look(SAME_COLUMNS, &[arg(&output), arg(&full)]);
        let verified = run(&["verify", arg(&output), "--json"]).expect(0).json();
        assert_eq!(verified["parts"], 1, "{verified}");
        let again = run(&["run", arg(&job), "--json"]).expect(0);
        assert!(again.stderr.contains("already done"), "{}", again.stderr);
        assert_eq!(again.json()["rows"]["total"], 0);
        no_negative_zero(&again);
        let status = run(&["status", arg(&output)]).expect(0);
        assert!(
            status.stdout.contains("finished") && status.stdout.contains("1 of 1 done"),
            "{}",
            status.stdout
        );
        run(&["retry", arg(&output)]).expect(0);
        run(&["clean", arg(&output), "--yes"]).expect(0);
        run(&["verify", arg(&output)]).expect(0);
        read.push(format!("={}", own.display()));
    }
    check_readers(&read);
}

#[test]
fn lines_without_a_line_become_one_part_without_rows() {
    let folder = tempfile::tempdir().unwrap();
    for (input, text) in [("rows.jsonl", ""), ("blank.jsonl", "\n\n")] {
        fs::write(folder.path().join(input), text).unwrap();
        let (job, output) = job_over(folder.path(), input, "");
        // As `submit` leaves it to workers: one shard.
        let submitted = run(&["submit", arg(&job), "--no-enqueue", "--preflight", "--json"])
            .expect(0)
            .json();
        assert_eq!(
            (&submitted["rows"], &submitted["shards"], &submitted["uncommitted"]),
            (&0.into(), &1.into(), &1.into())
        );
        assert!(!output.join("_SUCCESS").exists());
        let status = run(&["status", arg(&output), "--json"]).expect(0).json();
        assert_eq!(status["state"], "running", "{status}");
        no_negative_zero(&run(&["status", arg(&output)]).expect(0));
        let ran = run(&["run", arg(&job), "--quiet"]).expect(0);
        assert!(!ran.stderr.contains("already done"), "{}", ran.stderr);
        look(
            "import sys, pyarrow.parquet as pq; t = pq.read_table(sys.argv[1]); assert (t.num_rows, t.column_names[:3]) == \
             (0, ['id', 'tags', 'row']) and str(t.schema.field('tags').type) == 'string', t",
            &[arg(&output)],
        );
        run(&["verify", arg(&output)]).expect(0);
        let success: Value = serde_json::from_slice(&fs::read(output.join("_SUCCESS")).unwrap()).unwrap();
        assert_eq!((&success["rows"], &success["parts"]), (&0.into(), &1.into()));
        fs::remove_dir_all(&output).unwrap();
    }
    // A key that no line has is still refused where there are lines.
    fs::write(folder.path().join("rows.jsonl"), "{\"text\": \"a\"}\n").unwrap();
    let (job, _) = job_over(folder.path(), "rows.jsonl", "");
    run(&["run", arg(&job)]).expect(2).one_line(&["`id`", "rows.jsonl"]);
}

#[test]
fn openai_batches_without_a_line_become_an_empty_file() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("batch.jsonl"), "").unwrap();
    let (job, output) = job_over(folder.path(), "batch.jsonl", ", format: openai");
    let text = fs::read_to_string(&job).unwrap();
    let text = text
        .replace("prompt: {text: '{{ text }} ->'}\n", "")
        .replace("carry: [id, tags], ", "");
    fs::write(&job, text).unwrap();
    run(&["run", arg(&job), "--quiet"]).expect(0);
    assert_eq!(fs::read(output.join("part-00000.jsonl")).unwrap(), b"");
    run(&["verify", arg(&output)]).expect(0);
    let again = run(&["run", arg(&job)]).expect(0);
    assert!(again.stderr.contains("already done"), "{}", again.stderr);
    look(
        "import sys, duckdb; assert duckdb.sql(f\"from read_json('{sys.argv[1]}/*.jsonl')\").fetchall() == []",
        &[arg(&output)],
    );
}

/// An older gristmill planned no shard at all, published no part and counted `-0.0` seconds.
#[test]
fn a_job_without_shards_that_is_done_stays_done() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("rows.jsonl"), "").unwrap();
    let (job, output) = job_over(folder.path(), "rows.jsonl", "");
    run(&["run", arg(&job), "--quiet"]).expect(0);
    let edit = |name: &str, edit: &dyn Fn(&mut Value)| {
        let mut record: Value = serde_json::from_slice(&fs::read(output.join(name)).unwrap()).unwrap();
        edit(&mut record);
        fs::write(output.join(name), record.to_string()).unwrap();
    };
    edit("_gristmill/job.json", &|record| record["shards"] = json!([]));
    edit("_SUCCESS", &|record| {
        record["parts"] = 0.into();
        record["parts_sha256"] = gristmill::ledger::keys::sha256(b"").into();
        (record["seconds"], record["usd"]) = (json!(-0.0), json!(-0.0));
    });
    fs::remove_file(output.join("part-00000.parquet")).unwrap();
    for entry in fs::read_dir(output.join("_gristmill")).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && !path.ends_with("tmp") {
            fs::remove_dir_all(path).unwrap();
        }
    }
    let again = run(&["run", arg(&job)]).expect(0);
    assert!(again.stderr.contains("already done"), "{}", again.stderr);
    no_negative_zero(&again);
    run(&["verify", arg(&output)]).expect(0);
    assert!(!output.join("part-00000.parquet").exists());
}
