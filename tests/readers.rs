//! What other tools see of an output, by the lines that docs/output.md shows: tests/check_readers.py runs them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::support::{Run, arg, gristmill, job_in, python, root};

/// Of [`tickets_job`].
pub(crate) const ROWS: u64 = 1000;
pub(crate) const SHARD_ROWS: u64 = 50;

/// The labelling job over the first 1,000 tickets in 20 shards, and its output: a few seconds of work.
pub(crate) fn tickets_job(folder: &Path) -> (PathBuf, PathBuf) {
    let cut = format!(
        "import pyarrow.parquet as pq\npq.write_table(pq.read_table(r'{}').slice(0, {ROWS}), r'{}', row_group_size=250)",
        root().join("jobs/demo/tickets.parquet").display(),
        folder.join("tickets.parquet").display()
    );
    Run::of(Command::new(python()).args(["-c", &cut])).expect(0);
    job_in(folder, "label-tickets.yaml", |text| {
        let whole = root().join("jobs/demo/tickets.parquet");
        text.replace(arg(&whole), arg(&folder.join("tickets.parquet")))
            .replace("rows: 256", &format!("rows: {SHARD_ROWS}"))
    })
}

/// Runs the job until two parts of `output` stand, then ends it by SIGTERM.
pub(crate) fn run_halfway(arguments: &[&str], output: &Path) {
    let mut child = gristmill(arguments)
        .args(["--quiet", "--log-interval", "0.05"])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    while parts(output) < 2 {
        assert!(child.try_wait().unwrap().is_none(), "it ended before its second part");
        std::thread::sleep(Duration::from_millis(5));
    }
    Run::of(Command::new("kill").args(["-TERM", &child.id().to_string()])).expect(0);
    assert_eq!(child.wait().unwrap().code(), Some(6), "it was interrupted");
    assert!(!output.join("_SUCCESS").exists());
}

/// How many parts stand: which ones come first is not said.
fn parts(output: &Path) -> usize {
    let names = fs::read_dir(output).into_iter().flatten();
    names
        .filter(|entry| arg(&entry.as_ref().unwrap().path()).ends_with(".parquet"))
        .count()
}

/// Every file below `folder`.
pub(crate) fn files_below(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(files_below(&path))
        } else {
            files.push(path)
        }
    }
    files
}

fn copy(from: &Path, to: &Path) {
    for file in files_below(from) {
        let copied = to.join(file.strip_prefix(from).unwrap());
        fs::create_dir_all(copied.parent().unwrap()).unwrap();
        fs::copy(&file, copied).unwrap();
    }
}

/// The rows of the parts that stand, for check_readers.py.
fn published(output: &Path) -> String {
    let stands = |shard: &u64| output.join(format!("part-{shard:05}.parquet")).exists();
    let shards = (0..ROWS / SHARD_ROWS).filter(stands);
    let rows: Vec<String> = shards
        .map(|n| format!("{}-{}", n * SHARD_ROWS, (n + 1) * SHARD_ROWS))
        .collect();
    rows.join(",")
}

/// Runs the lines of docs/output.md over outputs, each `ROWS=FOLDER`.
pub(crate) fn check_readers(outputs: &[String]) {
    let script = root().join("tests/check_readers.py");
    let said = Run::of(Command::new(python()).arg(script).args(outputs)).expect(0);
    assert_eq!(said.stdout.lines().count(), outputs.len(), "{}", said.stdout);
}

#[test]
fn others_read_each_published_row_once() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = tickets_job(folder.path());
    let tried = Run::of(&mut gristmill(&["run", arg(&job), "--quiet", "--limit", "40"])).expect(0);
    run_halfway(&["run", arg(&job)], &output);
    let unfinished = tempfile::tempdir().unwrap();
    copy(&output, &unfinished.path().join("out"));
    let waiting = files_below(&output);
    assert!(
        waiting
            .iter()
            .any(|file| file.extension().is_some_and(|ext| ext == "rows")),
        "finished rows wait in the ledger: {waiting:?}"
    );
    let some = published(&output);
    Run::of(&mut gristmill(&["run", arg(&job), "--quiet"])).expect(0);
    let all = published(&output);
    assert!(some.len() < all.len(), "it was unfinished: {some}");

    // A trial is an output like any other, beside this one.
    let limited = folder.path().join("_limit");
    let trial = fs::read_dir(&limited).unwrap().next().unwrap().unwrap().path();
    assert!(arg(&trial).starts_with(arg(&limited.join("out-40-"))), "{trial:?}");
    assert!(
        tried.stdout.contains(arg(&trial)),
        "the report says where it is: {}",
        tried.stdout
    );
    Run::of(&mut gristmill(&["verify", arg(&trial)])).expect(0);
    let alone = tempfile::tempdir().unwrap();
    copy(&trial, &alone.path().join("out"));

    let outputs = [
        (all, folder.path()),
        (some, unfinished.path()),
        ("0-40".into(), alone.path()),
    ];
    check_readers(&outputs.map(|(rows, folder)| format!("{rows}={}", folder.display())));
    // Whatever else readers take for data.
    let names = files_below(&output.join("_gristmill"));
    let readable = [".parquet", ".jsonl", ".csv", ".arrow", ".txt"];
    let as_data: Vec<_> = names
        .iter()
        .filter(|f| readable.iter().any(|ext| arg(f).ends_with(ext)))
        .collect();
    assert!(as_data.is_empty(), "{as_data:?}");
}

#[test]
fn a_trial_needs_a_place_beside_the_output() {
    let folder = tempfile::tempdir().unwrap();
    let (job, _) = job_in(folder.path(), "label-tickets.yaml", |text| {
        text.replace(arg(&folder.path().join("out")), "/")
    });
    Run::of(&mut gristmill(&["run", arg(&job), "--limit", "5"]))
        .expect(2)
        .one_line(&["label-tickets.yaml", "--limit", "output.uri", "beside"]);
}
