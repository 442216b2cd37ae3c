//! Jobs over CSV and compressed lines through the built binary: tables that other tools write, and what other tools read of the results.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::commands::run;
use crate::support::{Run, arg, demo_job, gristmill, py, python, record};

/// A job over `input` (the inside of a YAML mapping), which shows `template` and carries `carry`.
fn job(folder: &Path, input: &str, template: &str, carry: &str, shard_rows: usize) -> (PathBuf, PathBuf) {
    let rest = format!(
        "context: 512\ninput: {{{input}}}\nprompt: {{text: '{template}'}}\n\
         generate: {{max_tokens: 1, temperature: 0}}\noutput: {{uri: out, carry: [{carry}]}}\nshards: {{rows: {shard_rows}}}\n"
    );
    demo_job(folder, "formats", &rest)
}

/// Kills the run once two parts stand, and ends it by another.
fn run_killed(job: &Path, output: &Path) {
    let parts = || {
        let names = fs::read_dir(output).into_iter().flatten();
        names
            .filter(|entry| arg(&entry.as_ref().unwrap().path()).ends_with(".parquet"))
            .count()
    };
    let mut child = gristmill(&["run", arg(job), "--quiet", "--log-interval", "0.05"])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    while parts() < 2 {
        assert!(child.try_wait().unwrap().is_none(), "it ended before its second part");
        std::thread::sleep(Duration::from_millis(2));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!output.join("_SUCCESS").exists(), "it was killed too late");
    run(&["run", arg(job), "--quiet"]).expect(0);
}

/// Two tables of one kind: by DuckDB, and by Python's csv module as pandas calls it, for Excel.
const TABLES: &str = r#"
import csv, duckdb
rows = [(f"{n:03}", n, n / 4 if n % 3 else None, ["plain", 'say "no"', "two\nlines", "a, b", "\u00e9\u4e16", ""][n % 6]) for n in range(60)]
duckdb.sql("create table t (code varchar, n bigint, price double, note varchar)")
duckdb.executemany("insert into t values (?, ?, ?, ?)", rows[:30])
duckdb.sql("copy (select * from t order by n) to 'a.csv' (header, delimiter ',')")
with open("b.csv", "w", newline="", encoding="utf-8-sig") as file:
    writer = csv.writer(file, quoting=csv.QUOTE_MINIMAL)
    writer.writerow(["code", "n", "price", "note"])
    writer.writerows(rows[30:])
"#;

/// The results are the rows, cell for cell, with their types.
const RESULTS: &str = r#"
import duckdb
found = duckdb.sql("select code, n, price, note, row, status from 'out/*.parquet' order by row").fetchall()
assert len(found) == 60, len(found)
types = [str(t) for t in duckdb.sql("select * from 'out/*.parquet'").types[:4]]
assert types == ["VARCHAR", "BIGINT", "DOUBLE", "VARCHAR"], types
for n, row in enumerate(found):
    note = ["plain", 'say "no"', "two\nlines", "a, b", "\u00e9\u4e16", ""][n % 6]
    # Python writes an empty text as an empty cell.
    notes = (note, None) if n >= 30 and note == "" else (note,)
    assert row[:3] == (f"{n:03}", n, n / 4 if n % 3 else None) and row[3] in notes, row
    assert row[4:] == (n, "succeeded"), row
"#;

#[test]
fn csv_of_other_tools_is_read_as_it_stands() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    py(folder, TABLES);
    let (job, output) = job(
        folder,
        "uri: \"*.csv\"",
        "{{ code }}|{{ n }}|{{ price }}|{{ note }} ->",
        "code, n, price, note",
        7,
    );
    let plan = run(&["plan", arg(&job), "--json", "--preview", "60"]).expect(0).json();
    assert_eq!((&plan["rows"], &plan["broken_rows"]), (&60.into(), &0.into()));
    assert_eq!(plan["preview"][1]["text"], "001|1|0.25|say \"no\" ->");
    assert_eq!(plan["preview"][2]["text"], "002|2|0.5|two\nlines ->");
    run_killed(&job, &output);
    py(folder, RESULTS);
    run(&["verify", arg(&output), "--inputs"]).expect(0);
    let record = record(&output);
    // One that knows no CSV must say that the record is newer.
    assert_eq!(record["v"], 2);
    assert_eq!(record["csv"]["columns"][0]["type"], "string");
    // A shard that begins behind quoted line ends: its first row's line.
    let lines: Vec<u64> = record["shards"]
        .as_array()
        .unwrap()
        .iter()
        .map(|shard| shard["segments"][0]["line"].as_u64().unwrap())
        .collect();
    assert_eq!(lines[..3], [2, 10, 18], "{lines:?}");
}

#[test]
fn csv_rows_that_do_not_fit_are_named_and_others_are_answered() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    fs::write(
        folder.join("a.tsv"),
        "id\ttext\n1\t\"x\ny\"\n2\tz\tmore\nfour\tw\n5\tv\n",
    )
    .unwrap();
    let (path, _) = job(folder, "uri: a.tsv, types: {id: int64}", "{{ id }} {{ text }}", "id", 2);
    run(&["run", arg(&path), "--quiet"]).expect(3);
    let found = py(
        folder,
        "import duckdb\nfor r in duckdb.sql(\"select row, status, error, id from 'out/*.parquet' order by row\").fetchall(): print(r)",
    );
    let place = folder.canonicalize().unwrap().join("a.tsv");
    let expected = format!(
        "(0, 'succeeded', None, 1)\n(1, 'errored', 'row 1 of `{0}`: line 4: 3 cells where the table has 2 columns', None)\n\
         (2, 'errored', 'row 2 of `{0}`: line 5: column `id`: `four` is no int64', None)\n(3, 'succeeded', None, 5)\n",
        place.display()
    );
    assert_eq!(found, expected);
    // A bad cell leaves the others of its row as they are, and the inputs say the same.
    fs::write(folder.join("b.csv"), "id,n\n007,1\n008,four\n").unwrap();
    let (path, output) = job(folder, "uri: b.csv, types: {n: int64}", "{{ n }} ->", "id", 2);
    fs::remove_dir_all(&output).unwrap();
    run(&["run", arg(&path), "--quiet"]).expect(3);
    let found = py(
        folder,
        "import duckdb\nprint(duckdb.sql(\"select id, status from 'out/*.parquet' order by row\").fetchall())",
    );
    assert_eq!(found, "[('007', 'succeeded'), ('008', 'errored')]\n");
    run(&["verify", arg(&output), "--inputs"]).expect(0);
    // Settings of CSV where there is none.
    fs::write(folder.join("a.jsonl"), "{\"id\": 1, \"text\": \"x\"}\n").unwrap();
    let (path, _) = job(folder, "uri: a.jsonl, delimiter: \";\"", "{{ id }}", "id", 2);
    run(&["plan", arg(&path)])
        .expect(2)
        .one_line(&["are for CSV, and the inputs are JSON lines"]);
    let (path, _) = job(folder, "uri: a.tsv, delimiter: \"ab\"", "{{ id }}", "id", 2);
    run(&["plan", arg(&path)])
        .expect(2)
        .one_line(&["`input.delimiter` is \"ab\"; it must be one character"]);
    let (path, _) = job(folder, "uri: a.tsv, types: {id: integer}", "{{ id }}", "id", 2);
    run(&["plan", arg(&path)]).expect(2).one_line(&["integer", "int64"]);
}

#[test]
fn compressed_lines_and_csv_are_read_as_they_were() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let write = r#"
import bz2, duckdb, gzip, json
duckdb.sql("copy (select range as id, 'ticket ' || range as text from range(100)) to 'duck.csv.gz' (header, compression gzip)")
duckdb.sql("copy (select range + 100 as id, 'ticket ' || range as text from range(100)) to 'duck.csv.zst' (header, compression zstd)")
lines = [json.dumps({"id": n, "text": f"ticket {n}"}) + "\n" for n in range(200)]
open("a.jsonl.gz", "wb").write(b"".join(gzip.compress("".join(lines[n : n + 30]).encode()) for n in range(0, 200, 30)))
open("b.jsonl.bz2", "wb").write(bz2.compress("".join(lines).encode()))
body = {"model": "m", "messages": [{"role": "user", "content": "a ticket"}], "max_tokens": 1}
batch = [json.dumps({"custom_id": f"c{n}", "method": "POST", "url": "/v1/chat/completions", "body": body}) + "\n" for n in range(40)]
open("batch.jsonl.gz", "wb").write(gzip.compress("".join(batch).encode()))
"#;
    py(folder, write);
    let ids = "import duckdb\nprint([r[0] for r in duckdb.sql(\"select id from 'out/*.parquet' order by row\").fetchall()] == list(range(200)))";
    for uri in ["\"*.csv.*\"", "a.jsonl.gz", "b.jsonl.bz2"] {
        let (job, output) = job(folder, &format!("uri: {uri}"), "{{ text }} ->", "id", 10);
        run_killed(&job, &output);
        assert_eq!(py(folder, ids), "True\n", "{uri}");
        run(&["verify", arg(&output), "--inputs"]).expect(0);
        let record = record(&output);
        assert_eq!(record["v"], 2);
        assert!(
            record["inputs"][0]["compressed"]["bytes"].as_u64() > record["inputs"][0]["size"].as_u64(),
            "{uri}"
        );
        fs::remove_dir_all(&output).unwrap();
    }
    let text = fs::read_to_string(folder.join("job.yaml")).unwrap();
    let text = text
        .replace("b.jsonl.bz2", "batch.jsonl.gz")
        .replace("carry: [id]", "format: openai");
    let text: String = text
        .lines()
        .filter(|line| !line.starts_with("prompt"))
        .map(|line| format!("{line}\n"))
        .collect();
    fs::write(folder.join("job.yaml"), text).unwrap();
    run(&["run", arg(&folder.join("job.yaml")), "--quiet"]).expect(0);
    let found = "import glob, json\nids = [json.loads(l)['custom_id'] for p in sorted(glob.glob('out/*.jsonl')) for l in open(p)]\n\
                 print(ids == [f'c{n}' for n in range(40)])";
    assert_eq!(py(folder, found), "True\n");
}

#[test]
fn compressed_data_that_is_damaged_is_refused_before_anything_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    py(
        folder,
        "import gzip\nopen('a.jsonl.gz', 'wb').write(gzip.compress(b'{\"id\": 1, \"text\": \"x\"}\\n' * 1000)[:-5])",
    );
    let (job, output) = job(folder, "uri: a.jsonl.gz", "{{ text }}", "id", 10);
    let name = folder.canonicalize().unwrap().join("a.jsonl.gz");
    let says = format!(
        "`{}` cannot be read: it ends in the middle of its gzip data, behind byte ",
        name.display()
    );
    run(&["run", arg(&job)]).expect(2).one_line(&[&says]);
    assert!(!output.exists());
}

/// `GRISTMILL_LINES=1000000 cargo test --profile checked --test all a_million -- --ignored --nocapture` for the full size.
#[test]
#[ignore = "takes minutes at its full size"]
fn a_million_gzip_lines_are_planned_within_memory() {
    let rows: u64 = std::env::var("GRISTMILL_LINES").map_or(1_000_000, |text| text.parse().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let write = format!(
        "import duckdb\nduckdb.sql(\"copy (select range as id, 'ticket ' || range || repeat(' word', 30) as text from range({rows})) to \
         'a.jsonl.gz' (format json, compression gzip)\")"
    );
    py(folder, &write);
    let (job, _) = job(folder, "uri: a.jsonl.gz", "{{ text }}", "id", 4096);
    let began = std::time::Instant::now();
    let script = "import resource, subprocess, sys\nsubprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)\n\
                  print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)";
    let mut command = Command::new(python());
    command.args([
        "-c",
        script,
        env!("CARGO_BIN_EXE_gristmill"),
        "submit",
        arg(&job),
        "--no-enqueue",
    ]);
    let peak: u64 = Run::of(&mut command).expect(0).stdout.trim().parse().unwrap();
    println!("submit: {} s, {} MB at most", began.elapsed().as_secs_f64(), peak >> 10);
    assert!(peak < 600 << 10, "it took {peak} KB");
    let began = std::time::Instant::now();
    let mut command = Command::new(python());
    command.args(["-c", script, env!("CARGO_BIN_EXE_gristmill"), "plan", arg(&job)]);
    let peak: u64 = Run::of(&mut command).expect(0).stdout.trim().parse().unwrap();
    println!("plan: {} s, {} MB at most", began.elapsed().as_secs_f64(), peak >> 10);
    assert!(peak < 600 << 10, "it took {peak} KB");
}
