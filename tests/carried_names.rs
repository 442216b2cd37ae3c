//! `output.carry` through the built program: all columns at once, other names, and names that the output has already.

use std::fs;
use std::path::{Path, PathBuf};

use crate::commands::run;
use crate::support::{arg, demo_job, py, record};

/// A table whose columns have names of the output's, and one that is nested.
const WRITE: &str = r#"
import pyarrow as pa, pyarrow.parquet as pq
rows = pa.table({"status": ["open", "closed", None], "id": pa.array([7, 8, 9], pa.int16()), "text": ["a", "b", "c"],
                 "tags": [["x"], [], None], "completion": ["old"] * 3})
pq.write_table(rows, "rows.parquet")
with open("rows.jsonl", "w") as file:
    for row in rows.to_pylist():
        file.write(__import__("json").dumps(row) + "\n")
rows.to_pandas()[["status", "id", "text"]].to_csv("rows.csv", index=False)
"#;

fn job(folder: &Path, input: &str, carry: &str) -> (PathBuf, PathBuf) {
    if !folder.join("rows.parquet").exists() {
        py(folder, WRITE);
    }
    let rest = format!(
        "context: 128\ninput: {{uri: {input}}}\nprompt: {{text: '{{{{ text }}}} ->'}}\n\
         generate: {{max_tokens: 1, temperature: 0}}\noutput: {{uri: out, carry: {carry}}}\nshards: {{rows: 2}}\n"
    );
    let (path, output) = demo_job(folder, "names", &rest);
    let _ = fs::remove_dir_all(&output);
    (path, output)
}

#[test]
fn all_columns_come_along_but_those_whose_names_are_taken() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for (input, columns) in [
        ("rows.parquet", "['id', 'text', 'tags']"),
        // Keys of lines have no order of their own.
        ("rows.jsonl", "['id', 'tags', 'text']"),
        ("rows.csv", "['id', 'text']"),
    ] {
        let (path, output) = job(folder, input, "'*'");
        let ran = run(&["run", arg(&path), "--quiet"]).expect(0);
        assert!(ran.stderr.contains("leaves `status` out"), "{}", ran.stderr);
        let look = format!(
            "import pyarrow.parquet as pq, duckdb\nt = pq.read_table('out')\nn = len({columns})\nassert t.column_names[:n] == {columns} and \
             t.column_names[n] == 'row', t.column_names\nassert set(t['status'].to_pylist()) == {{'succeeded'}}\n\
             assert duckdb.sql(\"select id, text from 'out/*.parquet' order by row\").fetchall() == [(7, 'a'), (8, 'b'), (9, 'c')]"
        );
        py(folder, &look);
        assert_eq!(record(&output)["v"], 3);
        run(&["verify", arg(&output), "--inputs"]).expect(0);
    }
}

#[test]
fn columns_have_other_names_in_the_output() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for (carry, columns) in [
        ("{input_status: status, key: id}", "['input_status', 'key', 'row']"),
        (
            "{input_status: status, '*': '*', completion_before: completion}",
            "['input_status', 'completion_before', 'id', 'text', 'tags', 'row']",
        ),
        (
            "{text: id, id: text, input_status: status}",
            "['text', 'id', 'input_status', 'row']",
        ),
    ] {
        let (path, output) = job(folder, "rows.parquet", carry);
        let ran = run(&["run", arg(&path), "--quiet"]).expect(0);
        assert!(!ran.stderr.contains("leaves"), "{}", ran.stderr);
        let look = format!(
            "import duckdb, pyarrow.parquet as pq\nnames = {columns}\nt = pq.read_table('out')\nassert t.column_names[:len(names)] == names, \
             t.column_names\nassert t['input_status'].to_pylist() == ['open', 'closed', None] and set(t['status'].to_pylist()) == {{'succeeded'}}\n\
             assert duckdb.sql(\"select count(*) from 'out/*.parquet' where input_status = 'open' and status = 'succeeded'\").fetchall() == [(1,)]"
        );
        py(folder, &look);
        assert_eq!(record(&output)["v"], 3);
        run(&["verify", arg(&output), "--inputs"]).expect(0);
        // A value that is another row's is found under its new name.
        if columns.contains("key") {
            py(
                folder,
                "import pyarrow as pa, pyarrow.parquet as pq\nt = pq.read_table('out/part-00000.parquet')\nat = t.schema.get_field_index('key')\n\
                 pq.write_table(t.set_column(at, t.schema.field('key'), pa.array([8, 7], pa.int16())), 'out/part-00000.parquet')",
            );
            let found = run(&["verify", arg(&output), "--inputs"]).expect(1).stderr;
            assert!(found.contains("column `key` of row 0 is not its input's"), "{found}");
        }
    }
    // The report's gold column by its own name, which the output does not have.
    let (path, _) = job(folder, "rows.parquet", "{label: text}");
    let text = fs::read_to_string(&path).unwrap() + "report: {gold: text}\n";
    fs::write(&path, text.replace("temperature: 0", "choice: [a, b]")).unwrap();
    let json = run(&["run", arg(&path), "--quiet", "--json"]).expect(0).json();
    assert_eq!(json["agreement"]["rows"], 3, "{json}");
}

#[test]
fn a_batch_of_lines_is_told_by_any_column() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (path, output) = job(folder, "rows.parquet", "{custom_id: id}");
    let text = fs::read_to_string(&path)
        .unwrap()
        .replace("uri: out", "format: openai, uri: out");
    fs::write(&path, text).unwrap();
    run(&["run", arg(&path), "--quiet"]).expect(0);
    py(
        folder,
        "import glob, json\nassert [json.loads(l)['custom_id'] for p in sorted(glob.glob('out/*.jsonl')) for l in open(p)] == [7, 8, 9]",
    );
    run(&["verify", arg(&output), "--inputs"]).expect(0);
}

#[test]
fn names_that_cannot_be_say_how_they_can() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for (carry, words) in [
        ("[status]", "a mapping gives another: `carry: {input_status: status}`"),
        ("{row: id}", "holds `row`, which is the name of a result column"),
        ("{a: id, b: id}", "holds `id` twice"),
        ("{key: nothing}", "`output.carry` names column `nothing`"),
        (
            "{text: id, '*': '*'}",
            "two columns of the output would have the name `text`",
        ),
        ("all", "is `all`; it takes a list of columns"),
    ] {
        let (path, output) = job(folder, "rows.parquet", carry);
        let refused = run(&["run", arg(&path)]).expect(2).stderr;
        assert!(refused.lines().last().unwrap().contains(words), "{carry}: {refused}");
        assert!(!output.exists());
    }
    let (path, _) = job(folder, "rows.parquet", "[id]");
    fs::write(&path, fs::read_to_string(&path).unwrap() + "report: {gold: nothing}\n").unwrap();
    run(&["plan", arg(&path)])
        .expect(2)
        .one_line(&["job.yaml: column `nothing`, used in `report.gold`, does not exist in `rows.parquet`"]);
    let (path, _) = job(folder, "rows.parquet", "{key: custom_id}");
    let text = fs::read_to_string(&path)
        .unwrap()
        .replace("uri: out", "format: openai, uri: out");
    fs::write(&path, text).unwrap();
    run(&["run", arg(&path)])
        .expect(2)
        .one_line(&["result lines are told by it"]);
}

/// DuckDB and Spark pass over the case of names: what they would hide is refused, and comes along under another name.
#[test]
fn names_that_differ_by_case_alone_are_refused_or_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    py(
        folder,
        "import pyarrow as pa, pyarrow.parquet as pq\npq.write_table(pa.table({'Status': ['open', 'closed'], 'text': ['a', 'b']}), \
         'one.parquet')\npq.write_table(pa.table({'id': [1, 2], 'Id': [3, 4], 'text': ['a', 'b']}), 'two.parquet')",
    );
    for (input, carry, words) in [
        (
            "one.parquet",
            "[Status]",
            [
                "`Status` and `status`, the output's own,",
                "`carry: {input_Status: Status}`",
            ],
        ),
        (
            "one.parquet",
            "{Row: text}",
            ["`Row` and `row`", "`carry: {input_Row: text}`"],
        ),
        ("two.parquet", "[id, Id]", ["`Id` and `id`", "`carry: {input_Id: Id}`"]),
        ("two.parquet", "'*'", ["`Id` and `id`", "`carry: {input_Id: Id}`"]),
    ] {
        let (path, output) = job(folder, input, carry);
        for command in ["plan", "run"] {
            run(&[command, arg(&path)]).expect(2).one_line(&words);
        }
        assert!(!output.exists());
    }
    for (input, carry, look) in [
        (
            "one.parquet",
            "'*'",
            "select status, count(*) from 'out/*.parquet' group by all",
        ),
        (
            "one.parquet",
            "{input_status: Status}",
            "select status, count(*) from 'out/*.parquet' where input_status in ('open', 'closed') group by all",
        ),
        (
            "two.parquet",
            "{'*': '*', other_id: Id}",
            "select status, count(*) from 'out/*.parquet' where id < 3 and other_id > 2 group by all",
        ),
    ] {
        let (path, output) = job(folder, input, carry);
        let ran = run(&["run", arg(&path), "--quiet"]).expect(0);
        assert_eq!(
            ran.stderr
                .contains("leaves `Status` out: `status` is the name of a result column"),
            carry == "'*'",
            "{}",
            ran.stderr
        );
        py(
            folder,
            &format!(
                "import duckdb\nfound = duckdb.sql(\"{look}\").fetchall()\nassert found == [('succeeded', 2)], found"
            ),
        );
        run(&["verify", arg(&output), "--inputs"]).expect(0);
    }
}

/// Another `carry` is another job, told in the job file's words.
#[test]
fn what_was_carried_is_told_as_the_job_file_said_it() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (path, _) = job(folder, "rows.parquet", "'*'");
    run(&["submit", arg(&path), "--no-enqueue"]).expect(0);
    let text = fs::read_to_string(&path).unwrap();
    for (carry, words) in [
        ("[id]", "`output.carry` was \"*\" and is [\"id\"]"),
        ("{key: id}", "`output.carry` was \"*\" and is {\"key\":\"id\"}"),
    ] {
        fs::write(&path, text.replace("carry: '*'", &format!("carry: {carry}"))).unwrap();
        run(&["run", arg(&path)]).expect(2).one_line(&[words]);
    }
}
