//! Files that cannot be read, or not all of them, through the built program: left out for good, or row by row.

use std::fs;

use crate::commands::run;
use crate::input_sets::job;
use crate::support::{arg, py, record};

#[test]
fn a_file_that_was_left_out_stays_out_and_that_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let write = r#"
import os, pyarrow as pa, pyarrow.parquet as pq
os.mkdir("data")
for n in range(2):
    pq.write_table(pa.table({"id": [n * 2, n * 2 + 1], "text": ["x", "y"]}), f"data/{n}.parquet")
whole = open("data/1.parquet", "rb").read()
open("whole", "wb").write(whole)
open("data/1.parquet", "wb").write(whole[:-9])
"#;
    py(folder, write);
    let (path, output) = job(folder, "uri: data, skip_unreadable: true", "{{ text }}", "id", 1);
    run(&["submit", arg(&path), "--no-enqueue"]).expect(0);
    // As it was: a job that goes on says once more what it lacks.
    let left_out = "the job goes on as it was planned: 1 input cannot be read and is left out: `";
    let again = run(&["submit", arg(&path), "--no-enqueue"]).expect(0);
    again.one_line(&[left_out, "1.parquet`: it is truncated"]);
    assert!(!again.stderr.contains("changed since"), "{}", again.stderr);
    // It is whole now, and the plan stands.
    fs::copy(folder.join("whole"), folder.join("data/1.parquet")).unwrap();
    let changed = "1.parquet` could not be read when the job was planned, and has changed since";
    for command in [&["submit", "--no-enqueue"][..], &["run", "--quiet"]] {
        let arguments = [&command[..1], &[arg(&path)], &command[1..]].concat();
        run(&arguments)
            .expect(0)
            .one_line(&[left_out, changed, "another `output.uri`"]);
    }
    assert_eq!(record(&output)["inputs"].as_array().unwrap().len(), 1);
    let ids = "import duckdb\nprint(duckdb.sql(\"select id from 'out/*.parquet' order by row\").fetchall())";
    assert_eq!(py(folder, ids), "[(0,), (1,)]\n");
    run(&["verify", arg(&output), "--inputs"]).expect(0);
    // Nobody shall take it for a job of all that is there.
    for command in [&["submit", "--no-enqueue"][..], &["run", "--quiet"]] {
        let arguments = [&command[..1], &[arg(&path)], &command[1..]].concat();
        run(&arguments)
            .expect(2)
            .one_line(&["is done, but not of its inputs as they are now", changed]);
    }
    // A job that is not done is planned anew in the preview alone. The damaged file is as long as the whole one.
    fs::remove_dir_all(&output).unwrap();
    let mut damaged = fs::read(folder.join("whole")).unwrap();
    damaged.splice(damaged.len() - 4.., *b"1RAP");
    fs::write(folder.join("data/1.parquet"), damaged).unwrap();
    run(&["submit", arg(&path), "--no-enqueue"]).expect(0);
    fs::copy(folder.join("whole"), folder.join("data/1.parquet")).unwrap();
    run(&["plan", arg(&path)])
        .expect(0)
        .one_line(&[changed, "stays without its rows"]);
}

/// Three files of three groups of ten rows; of the second file, `text` in its second group is not what it was.
const DAMAGED: &str = r#"
import os, pyarrow as pa, pyarrow.feather as feather, pyarrow.parquet as pq
os.mkdir("parquet"), os.mkdir("arrow")
FRAME = b"\x28\xb5\x2f\xfd"
def table(n):
    ids = list(range(n * 30, n * 30 + 30))
    return pa.table({"id": ids, "text": [f"ticket {id} " + "word " * (id % 7) for id in ids], "spare": ["s" * 9] * 30})
def damage(path, start):
    """Of the compressed bytes that begin there."""
    whole = bytearray(open(path, "rb").read())
    assert whole[start : start + 4] == FRAME
    whole[start : start + 6] = b"damage"
    open(path, "wb").write(whole)
for n in range(3):
    pq.write_table(table(n), f"parquet/{n}.parquet", compression="zstd", use_dictionary=False, row_group_size=10)
    feather.write_feather(table(n), f"arrow/{n}.arrow", compression="zstd", chunksize=10)
chunk = pq.read_metadata("parquet/1.parquet").row_group(1).column(1)
damage("parquet/1.parquet", open("parquet/1.parquet", "rb").read().index(FRAME, chunk.data_page_offset))
# Of each batch five compressed buffers: ids, where texts end, texts, and so on.
whole, frames, at = open("arrow/1.arrow", "rb").read(), [], 0
while (at := whole.find(FRAME, at)) >= 0:
    frames.append(at)
    at += 4
a_batch = len(frames) // 3
assert a_batch == 5, frames
damage("arrow/1.arrow", frames[a_batch + 2])
"#;

const ROWS: &str = r#"
import duckdb
rows = duckdb.sql("select row, id, text, status, error from 'out/*.parquet' order by row").fetchall()
assert [r[:2] for r in rows] == [(n, n) for n in range(90)], rows
for row, id, text, status, error in rows:
    if 40 <= row < 50:
        assert (text, status) == (None, "errored"), (row, text, status)
        assert "column `text`" in error and f"row {row - 30} of `" in error, error
    else:
        assert text.startswith(f"ticket {id} ") and status == "succeeded" and error is None, (row, text, status, error)
"#;

#[test]
fn damaged_pages_cost_their_own_rows_or_stop_the_job_with_the_files_name() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    py(folder, DAMAGED);
    for (uri, name, place) in [
        ("parquet", "1.parquet", "row group 1"),
        ("arrow", "1.arrow", "record batch 1"),
    ] {
        // A shard lies in several groups, and in several files.
        for shard_rows in [7, 4096] {
            let (path, output) = job(folder, &format!("uri: {uri}"), "{{ text }}", "id, text", shard_rows);
            let name = format!("{name}` cannot be read: ");
            let says = [&name, place, "`input.skip_unreadable: true`"];
            run(&["plan", arg(&path)]).expect(2).one_line(&says);
            run(&["run", arg(&path), "--quiet"]).expect(2).one_line(&says);
            // What the others hold can be had.
            if output.exists() {
                run(&["cancel", arg(&output), "--finish"]).expect(0);
                run(&["run", arg(&path), "--quiet"]).expect(3);
                run(&["verify", arg(&output)]).expect(0);
                fs::remove_dir_all(&output).unwrap();
            }
            let input = format!("uri: {uri}, skip_unreadable: true");
            let (path, output) = job(folder, &input, "{{ text }}", "id, text", shard_rows);
            let plan = run(&["plan", arg(&path), "--json"]).expect(0).json();
            assert_eq!(
                (&plan["rows"], &plan["broken_rows"]),
                (&90.into(), &10.into()),
                "{plan}"
            );
            run(&["run", arg(&path), "--quiet"]).expect(3);
            py(folder, ROWS);
            run(&["verify", arg(&output), "--inputs"]).expect(0);
            let found = record(&output);
            assert_eq!((&found["v"], &found["skip_unreadable"]), (&3.into(), &true.into()));
            run(&["retry", arg(&output)]).expect(0);
            run(&["run", arg(&path), "--quiet"]).expect(3);
            py(folder, ROWS);
            fs::remove_dir_all(&output).unwrap();
            // Columns that the job does not use may be anything.
            let (path, output) = job(folder, &format!("uri: {uri}"), "{{ spare }}", "id", shard_rows);
            run(&["run", arg(&path), "--quiet"]).expect(0);
            fs::remove_dir_all(&output).unwrap();
        }
    }
}
