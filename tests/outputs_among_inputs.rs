//! Outputs of jobs that lie where the inputs do, through the built program: answers become no prompts because a folder holds both.

use std::fs;
use std::path::{Path, PathBuf};

use crate::commands::run;
use crate::support::{arg, demo_job, py};

/// Three rows in two folders, by days and by hive's names, with the columns that answers carry on.
const WRITE: &str = r#"
import os, pyarrow as pa, pyarrow.parquet as pq
for folder in ("data/mon", "data/tue", "hive/day=1", "hive/day=2"):
    os.makedirs(folder)
    first = 2 * folder.endswith(("tue", "2"))
    pq.write_table(pa.table({"id": [first, first + 1][: 2 - first // 2], "text": ["a", "b"][: 2 - first // 2]}), f"{folder}/rows.parquet")
"#;

/// A job whose answers look like its inputs.
fn job(folder: &Path, input: &str, output: &str) -> (PathBuf, PathBuf) {
    let rest = format!(
        "context: 256\ninput: {{uri: {input}}}\nprompt: {{text: '{{{{ text }}}}'}}\n\
         generate: {{max_tokens: 1, temperature: 0}}\noutput: {{uri: {output}, carry: [id, text]}}\n"
    );
    let (job, _) = demo_job(folder, "among", &rest);
    (job, folder.join(output))
}

/// The ids in an output, as DuckDB finds them.
#[track_caller]
fn ids(folder: &Path, output: &str) -> String {
    py(
        folder,
        &format!(
            "import duckdb\nprint([r[0] for r in duckdb.sql(\"select id from '{output}/*.parquet' order by row\").fetchall()])"
        ),
    )
}

#[test]
fn an_output_below_its_inputs_is_none_of_them() {
    for (input, output) in [
        ("data", "data/out"),
        ("data/", "data/deep/er/out"),
        ("\"data/**/*.parquet\"", "data/out"),
        ("\"data/*/*.parquet\"", "data/out"),
        ("hive", "hive/out"),
        ("hive/", "hive/day=1/out"),
        ("\"hive/*/*.parquet\"", "hive/out"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        py(folder, WRITE);
        let (path, place) = job(folder, input, output);
        // Nothing is there yet, and nothing is said.
        assert_eq!(run(&["plan", arg(&path)]).expect(0).stderr, "", "{input}");
        run(&["run", arg(&path), "--quiet"]).expect(0);
        assert_eq!(ids(folder, output), "[0, 1, 2]\n", "{input}");
        run(&["verify", arg(&place), "--inputs"]).expect(0);
        // It is done, not changed; and planned anew it is the same rows.
        let again = run(&["run", arg(&path)]).expect(0);
        assert!(again.stderr.contains("already done"), "{input}: {}", again.stderr);
        let plan = run(&["plan", arg(&path), "--json"]).expect(0);
        plan.one_line(&["their files are not read", output]);
        assert_eq!(plan.json()["rows"], 3, "{input}");
        // So it is for the next job over the folder.
        let (path, _) = job(folder, input, &format!("{output}2"));
        run(&["run", arg(&path), "--quiet"])
            .expect(0)
            .one_line(&["their files are not read", output]);
        assert_eq!(ids(folder, &format!("{output}2")), "[0, 1, 2]\n", "{input}");
        // What comes besides is seen.
        let more = folder.join(if input.contains("hive") {
            "hive/day=2"
        } else {
            "data/tue"
        });
        fs::copy(more.join("rows.parquet"), more.join("more.parquet")).unwrap();
        run(&["run", arg(&path), "--quiet"])
            .expect(2)
            .one_line(&["more.parquet` has come since"]);
    }
}

#[test]
fn no_input_lies_in_the_jobs_own_output() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    py(folder, WRITE);
    for (input, output) in [
        ("data", "data"),
        ("data", "data/mon"),
        ("data/mon/rows.parquet", "data"),
        ("\"data/mon/*.parquet\"", "data/mon"),
        ("\"data/*/*.parquet\"", "data/tue"),
    ] {
        let (path, _) = job(folder, input, output);
        for command in [
            &["plan"][..],
            &["run"],
            &["submit", "--no-enqueue"],
            &["run", "--limit", "1"],
        ] {
            let arguments = [&command[..1], &[arg(&path)], &command[1..]].concat();
            run(&arguments).expect(2).one_line(&[
                "rows.parquet` is in the job's own output (`output.uri`)",
                "a folder without inputs",
            ]);
        }
    }
    assert!(!folder.join("data/_gristmill").exists());
}

#[test]
fn answers_are_inputs_where_an_address_means_them() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    py(folder, WRITE);
    for (input, output) in [("data/mon", "answers/mon"), ("data/tue", "answers/tue")] {
        run(&["run", arg(&job(folder, input, output).0), "--quiet"]).expect(0);
    }
    // By its name, and by wildcards that stand for names of outputs.
    for (input, rows, said) in [
        ("answers/mon", 2, ""),
        ("answers/mon/", 2, ""),
        ("\"answers/mon/*.parquet\"", 2, ""),
        ("answers/tue/part-00000.parquet", 1, ""),
        (
            "\"answers/*/*.parquet\"",
            3,
            "the inputs are answers of other jobs, from their outputs: `",
        ),
    ] {
        let (path, _) = job(folder, input, "answers/all");
        let plan = run(&["plan", arg(&path), "--json"]).expect(0);
        assert!(
            plan.stderr.contains(said) && plan.stderr.is_empty() == said.is_empty(),
            "{}",
            plan.stderr
        );
        assert_eq!(plan.json()["rows"], rows, "{input}");
    }
    // A job over all of them stays what it was once its own output lies beside them.
    let (path, _) = job(folder, "\"answers/*/*.parquet\"", "answers/all");
    run(&["run", arg(&path), "--quiet"]).expect(0);
    assert_eq!(ids(folder, "answers/all"), "[0, 1, 2]\n");
    run(&["run", arg(&path), "--quiet"]).expect(0);
    assert_eq!(run(&["plan", arg(&path), "--json"]).expect(0).json()["rows"], 3);
    // A folder, or `**`, that comes across nothing else means none of them.
    for input in ["answers", "\"answers/**\"", "\"answers/**/*.parquet\""] {
        let (path, _) = job(folder, input, "next");
        run(&["plan", arg(&path)]).expect(2).one_line(&[
            "all files that match are in outputs of jobs, such as `",
            "give the address of such an output",
        ]);
    }
    // Beside other files they are left out.
    fs::rename(folder.join("data/mon"), folder.join("answers/raw")).unwrap();
    let (path, _) = job(folder, "\"answers/*/*.parquet\"", "next");
    let plan = run(&["plan", arg(&path), "--json"]).expect(0);
    plan.one_line(&["their files are not read", "answers/all", "answers/mon", "answers/tue"]);
    assert_eq!(plan.json()["rows"], 2);
}
