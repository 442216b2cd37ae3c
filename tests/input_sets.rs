//! Jobs over many files through the built binary: folders whose names are columns, files that are left out, columns that some files lack,
//! files that cannot be read, and the first rows of it all.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::commands::run;
use crate::support::{Run, arg, demo_job, py, python, record};

/// A job over `input` (the inside of a YAML mapping), which shows `template` and carries `carry`.
pub(crate) fn job(folder: &Path, input: &str, template: &str, carry: &str, shard_rows: usize) -> (PathBuf, PathBuf) {
    let rest = format!(
        "context: 256\ninput: {{{input}}}\nprompt: {{text: '{template}'}}\n\
         generate: {{max_tokens: 1, temperature: 0}}\noutput: {{uri: out, carry: [{carry}]}}\nshards: {{rows: {shard_rows}}}\n"
    );
    demo_job(folder, "sets", &rest)
}

/// Runs the job, and answers its rows by DuckDB as Python shows them.
#[track_caller]
fn rows_of(folder: &Path, job: &Path, columns: &str) -> String {
    run(&["run", arg(job), "--quiet"]).expect(0);
    run(&["verify", arg(&folder.join("out")), "--inputs"]).expect(0);
    let script = format!(
        "import duckdb\nfor row in duckdb.sql(\"select {columns} from 'out/*.parquet' order by row\").fetchall(): print(row)"
    );
    let found = py(folder, &script);
    fs::remove_dir_all(folder.join("out")).unwrap();
    found
}

/// What `plan` refuses the job for.
#[track_caller]
fn refused(job: &Path, says: &[&str]) {
    run(&["plan", arg(job)]).expect(2).one_line(says);
}

const PARTITIONED: &str = r#"
import pyarrow as pa, pyarrow.dataset as ds
table = pa.table({
    "id": list(range(8)), "text": [f"ticket {n}" for n in range(8)], "year": [2026] * 8, "month": [9, 9, 10, 10, 11, 11, 12, 12],
    "city": ["a/b c=d%", None, "Graz", "Graz", "Wien", "Wien", "7", "7"],
})
schema = pa.schema([("year", pa.int32()), ("month", pa.int32()), ("city", pa.string())])
ds.write_dataset(table, "data", format="parquet", partitioning=ds.partitioning(schema, flavor="hive"))
"#;

/// The rows of the output are those that pyarrow reads of the same folders.
const AS_PYARROW: &str = r#"
import pyarrow as pa, pyarrow.dataset as ds, pyarrow.parquet as pq
wanted = ds.dataset("data", format="parquet", partitioning="hive").to_table()
found = pa.concat_tables(pq.read_table(p, partitioning=None) for p in sorted(__import__("glob").glob("out/*.parquet")))
for name in ("id", "text", "year", "month", "city"):
    assert found.schema.field(name).type == wanted.schema.field(name).type, name
    key = lambda table: sorted(zip(table["id"].to_pylist(), table[name].to_pylist()))
    assert key(found) == key(wanted), name
print(found.num_rows)
"#;

#[test]
fn folders_that_name_columns_are_columns() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    py(folder, PARTITIONED);
    let template = "{{ year }}-{{ month }} {{ city }} {{ text }} ->";
    let carry = "id, text, city, month, year";
    let (path, output) = job(folder, "uri: data", template, carry, 3);
    let plan = run(&["plan", arg(&path), "--json", "--preview", "8"]).expect(0).json();
    // In the order of the keys: `month=10` comes before `month=9`.
    assert_eq!(plan["preview"][0]["text"], "2026-10 Graz ticket 2 ->");
    assert_eq!(plan["preview"][7]["text"], "2026-9 a/b c=d% ticket 0 ->", "{plan}");
    run(&["run", arg(&path), "--quiet"]).expect(0);
    assert_eq!(py(folder, AS_PYARROW), "8\n");
    run(&["verify", arg(&output), "--inputs"]).expect(0);
    let found = record(&output);
    // One that does not know them must say that the record is newer.
    assert_eq!(found["v"], 3);
    assert_eq!(found["partitions"][1]["type"], "int32");
    // A shard that lies in two files has the values of each, and so has one whose folders are seen another way.
    fs::remove_dir_all(&output).unwrap();
    let (path, _) = job(
        folder,
        "uri: \"data/year=2026/*/*/*.parquet\"",
        "{{ text }}",
        carry,
        4096,
    );
    run(&["run", arg(&path), "--quiet"]).expect(0);
    assert_eq!(py(folder, AS_PYARROW), "8\n");
    // Without them.
    fs::remove_dir_all(&output).unwrap();
    let (path, _) = job(folder, "uri: data, hive: false", "{{ month }}", "id", 4096);
    refused(&path, &["column `month`, used in `prompt.text`, does not exist"]);
    // The folders around a job file say nothing of its inputs.
    let inner = folder.join("data/year=2026/month=9");
    let (path, _) = job(&inner, "uri: \"*/*.parquet\"", "{{ month }}", "id", 4096);
    refused(&path, &["column `month`, used in `prompt.text`, does not exist"]);
}

#[test]
fn where_leaves_out_files_before_they_are_opened() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    py(folder, PARTITIONED);
    // What is left out may be anything at all.
    fs::create_dir_all(folder.join("data/year=2025/month=1/city=x")).unwrap();
    fs::write(
        folder.join("data/year=2025/month=1/city=x/broken.parquet"),
        "no Parquet",
    )
    .unwrap();
    for (filter, ids) in [
        ("{year: 2026, month: {ge: 10, lt: 12}}", "(2,)\n(3,)\n(4,)\n(5,)\n"),
        ("{year: 2026, city: [\"7\", Graz]}", "(2,)\n(3,)\n(6,)\n(7,)\n"),
        ("{city: null}", "(1,)\n"),
        ("{month: {gt: 11}}", "(6,)\n(7,)\n"),
    ] {
        let (path, _) = job(folder, &format!("uri: data, where: {filter}"), "{{ text }}", "id", 3);
        assert_eq!(rows_of(folder, &path, "id"), ids, "{filter}");
    }
    for (filter, says) in [
        (
            "{id: 1}",
            "`input.where` asks for column `id`, and the folders of the inputs give `year`, `month`, `city`",
        ),
        (
            "{month: 13}",
            "none of the 6 files that `data` matches fits `input.where`",
        ),
        (
            "{month: x}",
            "`input.where.month` asks for \"x\", and the column is whole numbers",
        ),
        ("{city: 7}", "put it in quotes"),
        (
            "{month: {from: 1}}",
            "`input.where.month` has `from`; a range has `ge`, `gt`, `le` and `lt`",
        ),
    ] {
        let (path, _) = job(folder, &format!("uri: data, where: {filter}"), "{{ text }}", "id", 3);
        refused(&path, &[says]);
    }
    let (path, _) = job(
        folder,
        "uri: data, hive: false, where: {month: 1}",
        "{{ text }}",
        "id",
        3,
    );
    refused(
        &path,
        &["`input.where` asks for columns that folders name, and `input.hive` is false"],
    );
    // A file that comes into a folder that is left out is no new input.
    let (path, _) = job(folder, "uri: data, where: {year: 2026}", "{{ text }}", "id", 3);
    run(&["run", arg(&path), "--quiet"]).expect(0);
    fs::write(folder.join("data/year=2025/month=1/city=x/more.parquet"), "").unwrap();
    run(&["run", arg(&path), "--quiet"]).expect(0);
    let more = folder.join("data/year=2026/month=1/city=x");
    fs::create_dir_all(&more).unwrap();
    fs::write(more.join("more.parquet"), "").unwrap();
    run(&["run", arg(&path), "--quiet"])
        .expect(2)
        .one_line(&["more.parquet` has come since"]);
}

#[test]
fn folders_of_lines_and_csv_are_columns_and_clashes_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for (place, name, text) in [
        ("lines/day=01", "a.jsonl", "{\"id\": 1}\n{\"id\": 2}\nnot JSON\n"),
        ("lines/day=02", "b.jsonl", "{\"id\": 3}\n"),
        ("tables/day=01", "a.csv", "id,n\n1,x\n"),
        ("tables/day=x", "b.csv", "id,n\n2,y\n"),
        ("clash/day=1", "a.jsonl", "{\"id\": 1}\n{\"id\": 2, \"day\": 7}\n"),
        ("clash/id=1", "a.csv", "id,n\n1,x\n"),
        ("clash/text=1", "a.txt", "x\n"),
        ("odd/day=1", "a.jsonl", "{\"id\": 1}\n"),
        ("odd", "b.jsonl", "{\"id\": 2}\n"),
        ("odd/_day=2/month=2", "c.jsonl", "{\"id\": 3}\n"),
        ("twice/day=1/day=2", "c.jsonl", "{\"id\": 3}\n"),
    ] {
        fs::create_dir_all(folder.join(place)).unwrap();
        fs::write(folder.join(place).join(name), text).unwrap();
    }
    let (path, _) = job(folder, "uri: lines", "{{ day }} {{ id }}", "day, id", 2);
    run(&["run", arg(&path), "--quiet"]).expect(3);
    run(&["verify", arg(&folder.join("out")), "--inputs"]).expect(0);
    let found = py(
        folder,
        "import duckdb\nprint(duckdb.sql(\"select day, id, status from 'out/*.parquet' order by row\").fetchall())",
    );
    // A row that cannot be read lies in its folder all the same.
    assert_eq!(
        found,
        "[(1, 1, 'succeeded'), (1, 2, 'succeeded'), (1, None, 'errored'), (2, 3, 'succeeded')]\n"
    );
    fs::remove_dir_all(folder.join("out")).unwrap();
    // One folder that is no number makes all texts, as they stand.
    let (path, _) = job(folder, "uri: tables", "{{ day }} {{ id }}", "day, id", 2);
    assert_eq!(rows_of(folder, &path, "day, id"), "('01', 1)\n('x', 2)\n");
    for (uri, says) in [
        (
            "clash/day=1",
            "a.jsonl` has a column `day`, and so has its folder `day=…`",
        ),
        ("clash/id=1", "a.csv` has a column `id`, and so has its folder `id=…`"),
        (
            "clash/text=1",
            "a.txt` has a column `text`, and so has its folder `text=…`",
        ),
        ("odd", "is in no folder `"),
        ("odd/_day=2", "column `nothing`"),
        ("twice", "two of its folders give column `day`"),
    ] {
        let (path, _) = job(folder, &format!("uri: {uri}"), "{{ nothing }}", "", 2);
        refused(&path, &[says]);
    }
    let (path, _) = job(
        folder,
        "uri: clash/day=1, hive: false",
        "{{ day }} {{ id }}",
        "day, id",
        2,
    );
    assert_eq!(rows_of(folder, &path, "day, id"), "(None, 1)\n(7, 2)\n");
}

const SCHEMAS: &str = r#"
import pyarrow as pa, pyarrow.parquet as pq
pq.write_table(pa.table({"id": pa.array([1, 2], pa.int32()), "text": ["a", "b"], "note": ["x", None]}), "a.parquet")
pq.write_table(pa.table({"text": ["c"], "id": pa.array([1 << 40], pa.int64()), "extra": [7]}), "b.parquet")
pq.write_table(pa.table({"id": pa.nulls(1), "text": ["d"], "note": ["y"]}), "c.parquet")
pq.write_table(pa.table({"id": ["four"], "text": ["e"], "note": ["z"]}), "text_id.parquet")
"#;

#[test]
fn files_with_other_columns_are_refused_or_have_nulls() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    py(folder, SCHEMAS);
    // The template names it, and the second file lacks it.
    let (path, _) = job(folder, "uri: \"?.parquet\"", "{{ note }} {{ text }}", "id", 2);
    refused(
        &path,
        &[
            "column `note`, used in `prompt.text`, does not exist in `",
            "b.parquet`, and does in others",
        ],
    );
    // The first one lacks it.
    let (path, _) = job(folder, "uri: \"?.parquet\"", "{{ extra }} {{ text }}", "id", 2);
    refused(
        &path,
        &[
            "column `extra`, used in `prompt.text`, does not exist in `",
            "a.parquet`, and does in others",
        ],
    );
    let (path, _) = job(folder, "uri: \"?.parquet\"", "{{ text }}", "id, note", 2);
    refused(
        &path,
        &[
            "`output.carry` names column `note`, which `",
            "b.parquet` does not have",
        ],
    );
    let (path, _) = job(folder, "uri: [b.parquet, a.parquet]", "{{ text }}", "note", 2);
    refused(
        &path,
        &[
            "`output.carry` names column `note`, which `",
            "b.parquet` does not have",
        ],
    );
    // What the job does not use may be lacking, or have another type.
    let (path, _) = job(folder, "uri: \"*.parquet\"", "{{ text }}", "text", 2);
    assert_eq!(
        rows_of(folder, &path, "text"),
        "('a',)\n('b',)\n('c',)\n('d',)\n('e',)\n"
    );
    // A template that asks whether it is there needs none.
    let (path, _) = job(
        folder,
        "uri: \"?.parquet\"",
        "{{ row.note | default(row.text) }} ->",
        "text",
        2,
    );
    assert_eq!(rows_of(folder, &path, "text"), "('a',)\n('b',)\n('c',)\n('d',)\n");
    let nulls = "uri: \"?.parquet\", missing_columns: nulls";
    let (path, output) = job(
        folder,
        nulls,
        "{{ note }}|{{ extra }}|{{ text }}|{{ id }} ->",
        "id, note, extra",
        2,
    );
    let plan = run(&["plan", arg(&path), "--json", "--preview", "9"]).expect(0);
    let (said, plan) = (plan.stderr.clone(), plan.json());
    // The wider type is named.
    assert!(
        said.contains("column `id` is Int32 in `") && said.contains("it is read as Int64"),
        "{said}"
    );
    assert_eq!(plan["warnings"].as_array().unwrap().len(), 4, "{plan}");
    for column in ["extra", "note"] {
        assert!(said.contains(&format!("column `{column}` is not in `")), "{said}");
    }
    let shown: Vec<&str> = (0..4).map(|n| plan["preview"][n]["text"].as_str().unwrap()).collect();
    assert_eq!(shown, ["x||a|1 ->", "||b|2 ->", "|7|c|1099511627776 ->", "y||d| ->"]);
    run(&["run", arg(&path), "--quiet"]).expect(0);
    assert_eq!(record(&output)["absent"], serde_json::json!(["extra", "note"]));
    assert_eq!(record(&output)["v"], 3);
    fs::remove_dir_all(&output).unwrap();
    let found = rows_of(folder, &path, "id, note, extra, row");
    assert_eq!(
        found,
        "(1, 'x', None, 0)\n(2, None, None, 1)\n(1099511627776, None, 7, 2)\n(None, 'y', None, 3)\n"
    );
    // No file has it.
    let (path, _) = job(folder, nulls, "{{ text }}", "notes", 2);
    refused(
        &path,
        &["`output.carry` names column `notes`, which no input has; did you mean `note`?"],
    );
    let (path, _) = job(folder, nulls, "{{ texts }}", "note", 2);
    refused(&path, &["column `texts`, used in `prompt.text`, does not exist"]);
    // Types that have no wider one.
    let (path, _) = job(folder, "uri: [a.parquet, text_id.parquet]", "{{ id }}", "", 2);
    refused(
        &path,
        &[
            "column `id` is Int32 in `",
            "a.parquet` and Utf8 in `",
            "text_id.parquet`; make them one type",
        ],
    );
}

#[test]
fn columns_of_lines_whose_types_mix_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    fs::write(
        folder.join("a.jsonl"),
        "{\"n\": 1, \"l\": [1]}\n{\"n\": \"1\", \"l\": {}}\n",
    )
    .unwrap();
    let (path, _) = job(folder, "uri: a.jsonl", "{{ n }}", "n, l", 2);
    for command in [&["plan"][..], &["run", "--quiet"], &["submit", "--no-enqueue"]] {
        let mut arguments = vec![command[0], arg(&path)];
        arguments.extend(&command[1..]);
        let said = run(&arguments).expect(0).stderr;
        assert_eq!(
            said.matches("column `n` holds whole numbers and texts: it is carried as JSON text")
                .count(),
            1,
            "{said}"
        );
        assert!(!said.contains("column `l`"), "{said}");
        let _ = fs::remove_dir_all(folder.join("out"));
    }
    assert_eq!(rows_of(folder, &path, "n, l"), "('1', '[1]')\n('\"1\"', '{}')\n");
}

#[test]
fn files_that_cannot_be_read_are_refused_or_left_out_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let write = r#"
import gzip, os, random, pyarrow as pa, pyarrow.parquet as pq
os.mkdir("tables"), os.mkdir("lines")
for n in range(4):
    pq.write_table(pa.table({"id": [n * 2, n * 2 + 1], "text": ["x", "y"]}), f"tables/{n}.parquet")
    open(f"lines/{n}.jsonl.gz", "wb").write(gzip.compress(b"".join(b'{"id": %d, "text": "x", "n": 1}\n' % (n * 2 + at) for at in range(2))))
whole = open("tables/1.parquet", "rb").read()
open("tables/1.parquet", "wb").write(whole[:-9])
open("tables/3.parquet", "wb").write(b"")
# It holds rows, and a column of another type, before its end is missing.
# So many that rows were planned before.
bits = random.Random(1)
bad = gzip.compress(b"".join(b'{"id": "%d", "text": "%s"}\n' % (at, bits.randbytes(400).hex().encode()) for at in range(12000)), 1)
open("lines/1.jsonl.gz", "wb").write(bad[:-10])
open("tables/notes.md", "w"), open("tables/b.txt", "w"), open("tables/_SUCCESS", "w")
"#;
    py(folder, write);
    let (path, _) = job(folder, "uri: tables", "{{ text }}", "id", 3);
    let said = run(&["plan", arg(&path)]).expect(2).stderr;
    assert!(said.contains(".parquet` cannot be read: it is "), "{said}");
    let (path, output) = job(folder, "uri: tables, skip_unreadable: true", "{{ text }}", "id", 3);
    let plan = run(&["plan", arg(&path), "--json"]).expect(0);
    assert!(
        plan.stderr.contains("2 inputs cannot be read and are left out: `"),
        "{}",
        plan.stderr
    );
    assert!(
        plan.stderr
            .contains("files that are not read because of their names: `")
            && plan.stderr.contains("notes.md"),
        "{}",
        plan.stderr
    );
    assert!(
        plan.stderr.contains("b.txt") && !plan.stderr.contains("_SUCCESS"),
        "{}",
        plan.stderr
    );
    let json = plan.json();
    assert_eq!((&json["rows"], &json["inputs"]), (&4.into(), &2.into()));
    assert_eq!(json["skipped_inputs"].as_array().unwrap().len(), 2);
    let report = run(&["run", arg(&path), "--quiet", "--json"]).expect(0).json();
    assert!(
        report["skipped_inputs"]
            .to_string()
            .contains("1.parquet`: it is truncated"),
        "{report}"
    );
    let shown = run(&["status", arg(&output)]).expect(0).stdout;
    assert!(shown.contains("2 inputs that cannot be read"), "{shown}");
    assert_eq!(record(&output)["v"], 3);
    // It is done, and a file that was left out is no new one.
    run(&["run", arg(&path), "--quiet"]).expect(0);
    fs::remove_dir_all(&output).unwrap();
    assert_eq!(rows_of(folder, &path, "id, row"), "(0, 0)\n(1, 1)\n(4, 2)\n(5, 3)\n");
    let (path, _) = job(folder, "uri: lines, skip_unreadable: true", "{{ text }}", "id", 3);
    assert_eq!(
        rows_of(folder, &path, "id, row"),
        "(0, 0)\n(1, 1)\n(4, 2)\n(5, 3)\n(6, 4)\n(7, 5)\n"
    );
    let (path, _) = job(folder, "uri: lines", "{{ text }}", "id", 3);
    refused(
        &path,
        &["1.jsonl.gz` cannot be read: it ends in the middle of its gzip data"],
    );
    let (path, _) = job(
        folder,
        "uri: tables/1.parquet, skip_unreadable: true",
        "{{ text }}",
        "id",
        3,
    );
    refused(
        &path,
        &["the only input cannot be read: `", "1.parquet`: it is truncated"],
    );
}

#[test]
fn the_first_rows_are_those_of_the_inputs_order() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let write = r#"
import pyarrow as pa, pyarrow.parquet as pq
for n in range(3):
    pq.write_table(pa.table({"id": list(range(n * 5, n * 5 + 5)), "text": ["x"] * 5}), f"{n}.parquet", row_group_size=2)
    open(f"{n}.jsonl", "w").writelines('{"id": %d, "text": "x"}\n' % (n * 5 + at) for at in range(5))
open("3.jsonl", "w").write('{"id": "not a number", "text": "x"}\n')
"#;
    py(folder, write);
    let ids: String = (0..7).map(|id| format!("({id}, {id})\n")).collect();
    for uri in ["*.parquet", "*.jsonl"] {
        let (path, output) = job(folder, &format!("uri: \"{uri}\", limit: 7"), "{{ text }}", "id", 3);
        assert_eq!(rows_of(folder, &path, "id, row"), ids, "{uri}");
        run(&["run", arg(&path), "--quiet"]).expect(0);
        let found = record(&output);
        assert_eq!((&found["v"], &found["limit"]), (&3.into(), &7.into()));
        assert_eq!(found["inputs"].as_array().unwrap().len(), 2);
        // All of a file is held to what it was.
        assert!(found["inputs"][1]["sha256"].is_string());
        let whole = folder.join(format!("1{}", &uri[1..]));
        fs::write(folder.join("copy"), fs::read(&whole).unwrap()).unwrap();
        fs::rename(folder.join("copy"), &whole).unwrap();
        run(&["run", arg(&path), "--quiet"]).expect(0);
        // Other files than the first ones make it no other job, another number does.
        fs::write(folder.join(format!("4{}", &uri[1..])), "").unwrap();
        run(&["run", arg(&path), "--quiet"]).expect(0);
        fs::remove_file(folder.join(format!("4{}", &uri[1..]))).unwrap();
        let (path, _) = job(folder, &format!("uri: \"{uri}\", limit: 8"), "{{ text }}", "id", 3);
        run(&["run", arg(&path), "--quiet"])
            .expect(2)
            .one_line(&["`input.limit` was 7 and is 8"]);
        fs::remove_dir_all(&output).unwrap();
    }
    let (path, _) = job(folder, "uri: \"*.jsonl\", limit: 0", "{{ text }}", "id", 3);
    refused(&path, &["`input.limit` is 0; it must be at least 1"]);
    let (path, _) = job(folder, "uri: gone.jsonl", "{{ text }}", "id", 3);
    refused(&path, &["no input matches `gone.jsonl`"]);
    let (path, _) = job(folder, "uri: \"gone/*.jsonl\"", "{{ text }}", "id", 3);
    refused(&path, &["no input matches `gone/*.jsonl`"]);
}

/// `cargo test --profile checked --test all ten_thousand_partitions -- --ignored --nocapture`
#[test]
#[ignore = "makes ten thousand files"]
fn ten_thousand_partitions_are_planned_within_memory() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let write = r#"
import os, pyarrow as pa, pyarrow.parquet as pq
columns = {f"c{n}": pa.array(range(100)) for n in range(40)} | {"id": pa.array(range(100)), "text": pa.array(["a ticket"] * 100)}
pq.write_table(pa.table(columns), "one.parquet")
data = open("one.parquet", "rb").read()
for day in range(10000):
    os.makedirs(f"data/year=2026/day={day}")
    open(f"data/year=2026/day={day}/part.parquet", "wb").write(data)
"#;
    py(folder, write);
    for (filter, rows) in [("{year: 2026}", 1_000_000), ("{day: {lt: 3}}", 300)] {
        let (path, output) = job(
            folder,
            &format!("uri: data, where: {filter}"),
            "{{ text }}",
            "id, day",
            4096,
        );
        let script = "import resource, subprocess, sys, time\nbegan = time.time()\nsubprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)\n\
                      used = resource.getrusage(resource.RUSAGE_CHILDREN)\nprint(used.ru_maxrss, time.time() - began, used.ru_utime + used.ru_stime)";
        let mut command = Command::new(python());
        command.args([
            "-c",
            script,
            env!("CARGO_BIN_EXE_gristmill"),
            "submit",
            arg(&path),
            "--no-enqueue",
        ]);
        let said = Run::of(&mut command).expect(0).stdout;
        println!("{rows} rows: KB, seconds, seconds of all cores: {said}");
        let peak: u64 = said.split_whitespace().next().unwrap().parse().unwrap();
        assert!(peak < 600 << 10, "it took {peak} KB");
        assert_eq!(
            record(&output)["shards"]
                .as_array()
                .unwrap()
                .iter()
                .map(|s| s["rows"].as_u64().unwrap())
                .sum::<u64>(),
            rows
        );
        fs::remove_dir_all(&output).unwrap();
    }
}

const ARROW: &str = r#"
import pyarrow as pa, pyarrow.feather as feather, decimal, datetime
table = pa.table({
    "id": pa.array(range(50), pa.int32()), "text": [f"ticket {n}" for n in range(50)],
    "kind": pa.array([["a", "bb", None][n % 3] for n in range(50)]).dictionary_encode(),
    "tags": [[str(at) for at in range(n % 4)] if n % 5 else None for n in range(50)],
    "part": [{"n": n, "w": None} if n % 7 else None for n in range(50)], "price": [decimal.Decimal(n) / 4 for n in range(50)],
    "day": [datetime.date(2026, 11, 1 + n % 30) for n in range(50)], "view": pa.array([f"a long text that is no prefix {n}" for n in range(50)], pa.string_view()),
    "empty": pa.nulls(50), "flag": [n % 2 == 0 for n in range(50)],
})
feather.write_feather(table.slice(0, 20), "0.feather", compression="zstd", chunksize=6)
feather.write_feather(table.slice(20, 20), "1.arrow", compression="lz4", chunksize=100)
with pa.ipc.new_file("2.ipc", table.schema) as writer:
    writer.write_table(table.slice(40, 7), max_chunksize=3)
    writer.write_batch(table.slice(0, 1).to_batches()[0].slice(0, 0))
    writer.write_table(table.slice(47), max_chunksize=2)
import pyarrow.parquet as pq
pq.write_table(table.drop(["view"]), "wanted.parquet")
"#;

const AS_ARROW: &str = r#"
import glob, pyarrow as pa, pyarrow.parquet as pq
wanted = pq.read_table("wanted.parquet")
found = pa.concat_tables(pq.read_table(p) for p in sorted(glob.glob("out/*.parquet")))
assert found["row"].to_pylist() == list(range(50))
for name in wanted.column_names:
    assert found[name].to_pylist() == wanted[name].to_pylist(), name
assert found["view"].to_pylist() == [f"a long text that is no prefix {n}" for n in range(50)]
types = {field.name: str(field.type) for field in found.schema}
assert types["id"] == "int32" and types["kind"] == "string" and types["price"].startswith("decimal128"), types
"#;

#[test]
fn arrow_files_are_read_as_pyarrow_writes_them() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    py(folder, ARROW);
    let template =
        "{{ id }}|{{ kind }}|{{ tags }}|{{ part }}|{{ price }}|{{ day }}|{{ view }}|{{ empty }}|{{ flag }} ->";
    let carry = "id, text, kind, tags, part, price, day, view, empty, flag";
    for (shard_rows, uri) in [(4, "[0.feather, 1.arrow, 2.ipc]"), (4096, ".")] {
        let (path, output) = job(folder, &format!("uri: {uri}"), template, carry, shard_rows);
        fs::rename(folder.join("wanted.parquet"), folder.join("_wanted.parquet")).unwrap();
        let plan = run(&["plan", arg(&path), "--json", "--preview", "50"]).expect(0).json();
        let shown =
            "3|a|[\"0\",\"1\",\"2\"]|{\"n\":3,\"w\":null}|0.75|2026-11-04|a long text that is no prefix 3||false ->";
        assert_eq!(plan["preview"][3]["text"], shown);
        run(&["run", arg(&path), "--quiet"]).expect(0);
        run(&["verify", arg(&output), "--inputs"]).expect(0);
        fs::rename(folder.join("_wanted.parquet"), folder.join("wanted.parquet")).unwrap();
        py(folder, AS_ARROW);
        let found = record(&output);
        // One that knows no Arrow must say that the record is newer.
        assert_eq!(
            (&found["v"], &found["inputs"][0]["format"]),
            (&3.into(), &"arrow".into())
        );
        fs::remove_dir_all(&output).unwrap();
    }
    // In folders, with nulls for what a file lacks, and the first rows alone.
    py(
        folder,
        "import os, pyarrow as pa, pyarrow.feather as f\n\
         for n in range(3):\n os.makedirs(f'parts/day={n}')\n f.write_feather(pa.table({'id': [n, n + 10]} | ({'more': ['x', 'y']} if n else {})), \
         f'parts/day={n}/a.feather')",
    );
    let input = "uri: parts, where: {day: {lt: 2}}, missing_columns: nulls, limit: 3";
    let (path, _) = job(folder, input, "{{ more }} ->", "id, more, day", 2);
    assert_eq!(
        rows_of(folder, &path, "id, more, day"),
        "(0, None, 0)\n(10, None, 0)\n(1, 'x', 1)\n"
    );
    // What is no Arrow file is said in a line.
    for (name, bytes, says) in [
        ("v1.feather", &b"FEA1 and more"[..], "it is Feather V1"),
        (
            "s.arrows",
            b"\xff\xff\xff\xff\x10\0\0\0",
            "it is a stream of Arrow messages",
        ),
        ("e.arrow", b"", "it is empty (0 bytes)"),
        ("x.arrow", b"{\"id\": 1}\n", "it does not begin with `ARROW1`"),
        (
            "c.arrow",
            b"ARROW1\0\0 and little more",
            "it is truncated, or no Arrow file",
        ),
    ] {
        fs::write(folder.join(name), bytes).unwrap();
        let (path, _) = job(folder, &format!("uri: {name}"), "{{ id }}", "", 2);
        refused(&path, &[says]);
    }
    let (path, _) = job(folder, "uri: 0.feather, format: csv", "{{ id }}", "", 2);
    refused(&path, &["it is Arrow, and the job says CSV"]);
    let (path, _) = job(folder, "uri: [0.feather, wanted.parquet]", "{{ id }}", "", 2);
    refused(&path, &["the inputs mix formats: `", "is Arrow, `"]);
}

#[test]
fn a_sample_is_the_same_rows_however_it_is_cut() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let write = r#"
import gzip, json, os, pyarrow as pa, pyarrow.feather as f, pyarrow.parquet as pq
for n in range(3):
    table = pa.table({"id": list(range(n * 100, n * 100 + 100)), "text": ["x"] * 100})
    pq.write_table(table, f"{n}.parquet", row_group_size=30)
    f.write_feather(table, f"{n}.arrow", chunksize=40)
    rows = "".join(json.dumps({"id": n * 100 + at, "text": "x"}) + "\n\n" for at in range(100))
    open(f"{n}.jsonl", "w").write(rows)
    open(f"{n}.ndjson.gz", "wb").write(gzip.compress(rows.encode()))
    os.makedirs(f"parts/day={n}")
    open(f"parts/day={n}/{n}.csv", "w").write("id,text\n" + "".join(f"{n * 100 + at},\"x\ny\"\n" for at in range(100)))
"#;
    py(folder, write);
    let sample = "sample: {rows: 20, seed: 3}";
    let mut seen = Vec::new();
    for (uri, shard_rows) in [
        ("*.parquet", 7),
        ("*.parquet", 50),
        ("*.arrow", 7),
        ("*.jsonl", 50),
        ("*.ndjson.gz", 7),
        ("parts", 7),
    ] {
        let (path, output) = job(
            folder,
            &format!("uri: \"{uri}\", {sample}"),
            "{{ text }} {{ id }}",
            "id",
            shard_rows,
        );
        let plan = run(&["plan", arg(&path), "--json"]).expect(0).json();
        assert_eq!((&plan["rows"], &plan["broken_rows"]), (&20.into(), &0.into()), "{uri}");
        run(&["run", arg(&path), "--quiet"]).expect(0);
        run(&["verify", arg(&output), "--inputs"]).expect(0);
        let found = record(&output);
        assert_eq!((&found["v"], &found["sample"]["rows"]), (&3.into(), &20.into()));
        run(&["run", arg(&path), "--quiet"]).expect(0);
        // Each drawn row is the one that its place says.
        let script = "import duckdb\nfound = duckdb.sql(\"select row, input_row, id from 'out/*.parquet' order by row\").fetchall()\n\
                      assert [r[0] for r in found] == list(range(20)) and all(r[1] == r[2] for r in found), found\nprint([r[1] for r in found])";
        seen.push(py(folder, script));
        // Failed rows of a sample are tried again by their own numbers.
        run(&["retry", arg(&output), "--truncated", "--max-tokens", "2"]).expect(0);
        run(&["run", arg(&path), "--quiet"]).expect(0);
        run(&["verify", arg(&output), "--inputs"]).expect(0);
        seen.push(py(folder, script));
        fs::remove_dir_all(&output).unwrap();
    }
    assert!(seen.iter().all(|ids| *ids == seen[0]), "{seen:?}");
    // A trial of a sample is of its first rows, and a fraction of all is about so many.
    let (path, _) = job(folder, &format!("uri: \"*.parquet\", {sample}"), "{{ id }}", "id", 7);
    let plan = run(&["plan", arg(&path), "--json", "--limit", "3"]).expect(0).json();
    assert_eq!(plan["rows"], 3);
    let (path, _) = job(
        folder,
        "uri: \"*.parquet\", sample: {fraction: 0.2}",
        "{{ id }}",
        "id",
        7,
    );
    let rows = run(&["plan", arg(&path), "--json"]).expect(0).json()["rows"]
        .as_u64()
        .unwrap();
    assert!((40..80).contains(&rows), "{rows}");
    for (sample, says) in [
        ("{rows: 0}", "`input.sample` has `rows: 0`; it must be at least 1"),
        ("{fraction: 1.5}", "`input.sample` has `fraction: 1.5`"),
        ("{seed: 1}", "`input.sample` needs one of `rows` and `fraction`"),
        (
            "{rows: 1}, limit: 5",
            "`input.sample` draws from all rows, and `input.limit` takes the first",
        ),
    ] {
        let (path, _) = job(
            folder,
            &format!("uri: \"*.parquet\", sample: {sample}"),
            "{{ id }}",
            "id",
            7,
        );
        refused(&path, &[says]);
    }
    fs::write(folder.join("clash.jsonl"), "{\"id\": 1, \"input_row\": 2}\n").unwrap();
    let (path, _) = job(folder, "uri: clash.jsonl, sample: {rows: 1}", "{{ id }}", "id", 7);
    refused(&path, &["the inputs have a column `input_row`"]);
}
