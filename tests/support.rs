//! Shared by the end-to-end tests: the binary, job files in temporary folders, the checker.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Instant;

use serde_json::{Value, json};

/// The repository's root.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A command of the built binary with `arguments`.
pub(crate) fn gristmill(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gristmill"));
    command.args(arguments).env_remove("RUST_LOG");
    command
}

/// A finished process, with its output as text.
#[derive(Debug)]
pub(crate) struct Run {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Run {
    pub(crate) fn of(command: &mut Command) -> Run {
        let Output { status, stdout, stderr } = command.output().expect("the process starts");
        Run {
            code: status.code(),
            stdout: String::from_utf8(stdout).expect("stdout is UTF-8"),
            stderr: String::from_utf8(stderr).expect("stderr is UTF-8"),
        }
    }

    /// Fails the test unless the exit code is `code`, and then shows the whole output.
    #[track_caller]
    pub(crate) fn expect(self, code: i32) -> Run {
        assert_eq!(
            self.code,
            Some(code),
            "stdout:\n{}\nstderr:\n{}",
            self.stdout,
            self.stderr
        );
        self
    }

    /// Fails the test unless stderr is one line that contains all of `words`.
    #[track_caller]
    pub(crate) fn one_line(&self, words: &[&str]) {
        let lines = self.stderr.trim_end().lines().count();
        assert_eq!(lines, 1, "not one line:\n{}", self.stderr);
        for word in words {
            assert!(self.stderr.contains(word), "`{word}` is missing in: {}", self.stderr);
        }
    }

    /// The JSON object on the last line of stdout.
    #[track_caller]
    pub(crate) fn json(&self) -> serde_json::Value {
        let last = self.stdout.lines().last().unwrap_or_default();
        serde_json::from_str(last).unwrap_or_else(|e| panic!("last line is not JSON ({e}): {last}"))
    }
}

/// Python with pyarrow and DuckDB, as `tests/check.sh` sets it up.
pub(crate) fn python() -> PathBuf {
    let python = match std::env::var_os("PYTHON") {
        Some(python) => PathBuf::from(python),
        None => root().join(".venv/bin/python"),
    };
    assert!(
        python.exists(),
        "`{}` is missing: run tests/check.sh once, it makes it",
        python.display()
    );
    python
}

/// Runs the named cases of a script of `tests/` with the built program, and `more` arguments.
#[track_caller]
pub(crate) fn cases_of(script: &str, names: &[&str], more: &[&str]) {
    let only = names.iter().flat_map(|name| ["--only", name]);
    let run = Run::of(
        Command::new(python())
            .arg(root().join("tests").join(script))
            .arg(env!("CARGO_BIN_EXE_gristmill"))
            .args(only)
            .args(more),
    )
    .expect(0);
    println!("{}", run.stdout);
    let last = run.stdout.trim_end().lines().last().unwrap_or_default();
    assert_eq!(last, format!("{0} of {0} cases right", names.len()));
}

/// Runs Python with pyarrow, pandas and DuckDB in `folder`; returns its output.
#[track_caller]
pub(crate) fn py(folder: &Path, script: &str) -> String {
    Run::of(Command::new(python()).current_dir(folder).args(["-c", script]))
        .expect(0)
        .stdout
}

/// Writes a job file for the demo model with the output `folder/out`; `rest`: the other fields.
pub(crate) fn demo_job(folder: &Path, name: &str, rest: &str) -> (PathBuf, PathBuf) {
    let model = root().join("jobs/demo/model");
    let path = folder.join("job.yaml");
    let text = format!("name: {name}\nmodel: {}\nprecision: f32\n{rest}", model.display());
    std::fs::write(&path, text).expect("the job file is written");
    (path, folder.join("out"))
}

/// Writes a JSON Lines file of this many rows with an `id` and a short `text`.
pub(crate) fn write_tickets(folder: &Path, count: u32) {
    let line = |n: u32| format!("{{\"id\": {n}, \"text\": \"ticket {n}\"}}\n");
    std::fs::write(folder.join("rows.jsonl"), (0..count).map(line).collect::<String>()).expect("the rows are written");
}

/// Runs the separate checker over published files.
#[track_caller]
pub(crate) fn check_output(output: &Path, input: &Path, carry: &str) {
    let mut command = Command::new(python());
    command
        .arg(root().join("tests/check_output.py"))
        .arg(output)
        .arg(input)
        .args(["--carry", carry]);
    Run::of(&mut command).expect(0);
}

/// Writes one of `jobs/*.yaml` into `folder` with absolute inputs and its output in `folder/out`; `edit` changes the text.
pub(crate) fn job_in(folder: &Path, name: &str, edit: impl Fn(String) -> String) -> (PathBuf, PathBuf) {
    let text = std::fs::read_to_string(root().join("jobs").join(name)).expect("the example job is there");
    let demo = root().join("jobs/demo");
    let text = text.replace("demo/", &format!("{}/", demo.display()));
    let output = folder.join("out");
    let start = text.find("uri: ../out/").expect("the example writes below ../out");
    let end = start + text[start..].find([',', '}', '\n']).expect("the uri ends");
    let text = format!("{}uri: {}{}", &text[..start], output.display(), &text[end..]);
    let path = folder.join(name);
    std::fs::write(&path, edit(text)).expect("the job file is written");
    (path, output)
}

/// Copies the files of a folder into another, which need not be there.
pub(crate) fn copy_folder(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

/// The record of the job in `output`.
pub(crate) fn record(output: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(output.join("_gristmill/job.json")).unwrap()).unwrap()
}

/// Whether to run all tests in full; otherwise the shorter part that every CI run does.
pub(crate) fn is_full() -> bool {
    match std::env::var("GRISTMILL_FAULTS").as_deref() {
        Ok("full") => true,
        Ok("ci") | Err(_) => false,
        Ok(other) => panic!("GRISTMILL_FAULTS is `{other}`: give `ci` or `full`"),
    }
}

/// Everything that the test `name`, a section of `tests/faults.sh`, asked for held: says so, with `figures`, and writes the
/// result where `GRISTMILL_FAULTS_RESULT` names a file. `seed`: where its faults follow from one.
pub(crate) fn passed(name: &str, seed: Option<u64>, began: Instant, figures: Value) {
    let line = json!({
        "test": name,
        "passed": true,
        "scale": if is_full() { "full" } else { "ci" },
        "seed": seed,
        "seconds": began.elapsed().as_secs_f64().round(),
        "figures": figures,
    });
    println!("{line}");
    if let Some(path) = std::env::var_os("GRISTMILL_FAULTS_RESULT") {
        let mut file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .expect("the file of results");
        writeln!(file, "{line}").expect("a line in the file of results");
    }
}

/// A path as an argument.
pub(crate) fn arg(path: &Path) -> &str {
    path.to_str().expect("test paths are UTF-8")
}
