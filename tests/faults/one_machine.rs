//! `run` alone, over a local folder: extended while it stops, paused or killed at one row, its output closed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::{Run, arg, gristmill, python, root};

const WAIT_MAX: Duration = Duration::from_secs(60);

/// A job of `rows` short rows in shards of `shard_rows`; where its output lies.
fn job(folder: &Path, rows: u64, shard_rows: u64, budget: &str) -> (PathBuf, PathBuf) {
    let line = |row: u64| format!("{{\"id\": {row}, \"text\": \"ticket {row}\"}}\n");
    fs::write(folder.join("rows.jsonl"), (0..rows).map(line).collect::<String>()).unwrap();
    let text = format!(
        "name: small\nmodel: {}\nprecision: f32\ncontext: 128\ninput: {{uri: rows.jsonl}}\nprompt: {{text: '{{{{ text }}}} ->'}}\n\
         generate: {{max_tokens: 4, temperature: 0}}\noutput: {{uri: out, carry: [id]}}\nshards: {{rows: {shard_rows}}}\n{budget}\n",
        root().join("jobs/demo/model").display()
    );
    let file = folder.join("job.yaml");
    fs::write(&file, text).unwrap();
    (file, folder.join("out"))
}

/// `run` on a device that takes so long over a row.
fn run_on(job: &Path, ms_per_row: u64) -> Command {
    let mut command = gristmill(&["run", arg(job), "--json", "--quiet"]);
    command
        .env("GRISTMILL_KNOWN_DEVICE", "1")
        .env("GRISTMILL_KNOWN_MS_PER_ROW", ms_per_row.to_string());
    command
}

fn status(output: &Path) -> Value {
    Run::of(&mut gristmill(&["status", arg(output), "--json"]))
        .expect(0)
        .json()
}

#[track_caller]
fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < WAIT_MAX, "{what}: not within {WAIT_MAX:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// How `child` ended; a test that waits for ever says nothing.
#[track_caller]
fn end_of(mut child: Child) -> Run {
    let began = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if began.elapsed() > WAIT_MAX {
            child.kill().unwrap();
            panic!("it does not end: {:?}", child.wait_with_output());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let output = child.wait_with_output().unwrap();
    Run {
        code: output.status.code(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

/// Shards that wait are acknowledged as stopped, one that is slow to leave is still in hand when the order comes.
#[test]
fn a_run_that_is_extended_while_it_stops_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = job(folder.path(), 64, 4, "budget: {usd: 1, usd_per_hour: 3600}");
    let mut command = run_on(&job, 100);
    // The first log record of all is written when the job stops: until then, nothing is due.
    command
        .args(["--log-interval", "60"])
        .env(
            "GRISTMILL_FAILPOINTS",
            "device.before-step=pause:1@1;keeper.before-log=pause:6000@1",
        )
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let child = command.spawn().unwrap();
    until("that the budget stops it", || {
        output.join("_gristmill/job.json").exists() && status(&output)["state"] == "budget_reached"
    });
    // What waits in the queue has been seen as stopped by then.
    std::thread::sleep(Duration::from_secs(2));
    Run::of(&mut gristmill(&["extend", arg(&output), "--usd", "1000"])).expect(0);
    let ended = end_of(child).expect(0);
    assert_eq!(ended.json()["rows"]["succeeded"], 64);
    Run::of(&mut gristmill(&["verify", arg(&output)])).expect(0);
}

/// Runs of one job, each of them at its only row.
struct Runs {
    job: PathBuf,
    attempts: PathBuf,
    children: Vec<Child>,
}

impl Runs {
    fn new(job: PathBuf, output: &Path) -> Runs {
        // Planned first, so that the job's id is known.
        Run::of(&mut gristmill(&["submit", arg(&job), "--no-enqueue"])).expect(0);
        let record: Value = serde_json::from_slice(&fs::read(output.join("_gristmill/job.json")).unwrap()).unwrap();
        let home = output.join("_gristmill").join(record["job"].as_str().unwrap());
        Runs {
            job,
            attempts: home.join("shards/000000/attempts"),
            children: Vec::new(),
        }
    }

    /// Starts one more, and sends it `signal` when its row is on the device.
    fn hold(&mut self, signal: libc::c_int) {
        let begun = |attempts: &Path| fs::read_dir(attempts).map_or(0, Iterator::count);
        let before = begun(&self.attempts);
        let mut command = run_on(&self.job, 5_000);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        until("that its attempt begins", || begun(&self.attempts) > before);
        assert!(child.try_wait().unwrap().is_none());
        signal_to(&child, signal);
        if signal == libc::SIGKILL {
            child.wait().unwrap();
        }
        self.children.push(child);
    }
}

impl Drop for Runs {
    fn drop(&mut self) {
        for child in &mut self.children {
            // Those that are dead already need nothing.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn signal_to(child: &Child, signal: libc::c_int) {
    let sent = Command::new("kill")
        .args([format!("-{signal}"), child.id().to_string()])
        .status();
    assert!(sent.unwrap().success());
}

#[test]
fn paused_runs_accuse_no_row() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = job(folder.path(), 1, 1, "");
    let mut runs = Runs::new(job.clone(), &output);
    for _ in 0..5 {
        runs.hold(libc::SIGSTOP);
    }
    let ended = Run::of(&mut run_on(&job, 10)).expect(0);
    assert_eq!(ended.json()["rows"]["succeeded"], 1);
    // Who wakes late finds that all is done.
    for child in std::mem::take(&mut runs.children) {
        signal_to(&child, libc::SIGCONT);
        end_of(child).expect(0);
    }
    Run::of(&mut gristmill(&["verify", arg(&output)])).expect(0);
}

#[test]
fn a_row_at_which_runs_die_in_turn_is_accused_after_five() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = job(folder.path(), 1, 1, "");
    let mut runs = Runs::new(job.clone(), &output);
    for _ in 0..5 {
        runs.hold(libc::SIGKILL);
    }
    let ended = Run::of(&mut run_on(&job, 10)).expect(3);
    assert_eq!(ended.json()["rows"]["errored"], 1);
    Run::of(&mut gristmill(&["verify", arg(&output)])).expect(0);
}

/// Paused side by side and killed at once, three attempts are one death.
#[test]
fn runs_that_die_together_count_once() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = job(folder.path(), 1, 1, "");
    let mut runs = Runs::new(job.clone(), &output);
    for _ in 0..7 {
        runs.hold(libc::SIGSTOP);
    }
    for mut child in std::mem::take(&mut runs.children) {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    let ended = Run::of(&mut run_on(&job, 10)).expect(0);
    assert_eq!(ended.json()["rows"]["succeeded"], 1);
}

/// A row that ends every process that reads it, before it is on a device.
#[test]
fn a_row_that_cannot_be_read_is_accused_and_its_neighbours_finish() {
    const ROWS: u64 = 40;
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = job(folder.path(), ROWS, ROWS, "");
    let mut deaths = 0;
    let ended = loop {
        let run = Run::of(run_on(&job, 1).env("GRISTMILL_ABORT_AT_READING", "7"));
        match run.code {
            None => deaths += 1,
            Some(_) => break run.expect(3),
        }
        assert!(deaths <= 10, "it goes on for ever");
    };
    // The shard twice, in company; 40, 16 and 1 twice each; three times alone in all, and once for what it carries.
    assert_eq!(deaths, 10);
    let rows = &ended.json()["rows"];
    assert_eq!(
        (&rows["succeeded"], &rows["errored"]),
        (&Value::from(ROWS - 1), &Value::from(1))
    );
    let id = "import pyarrow.parquet as pq, sys; t = pq.read_table(sys.argv[1]); print([i for i in t['id'].to_pylist()][5:9])";
    let ids = Command::new(python())
        .args(["-c", id, arg(&output.join("part-00000.parquet"))])
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&ids.stdout), "[5, 6, None, 8]\n", "{ids:?}");
    // Nobody reads it to hold the output against its inputs, but who asks for that.
    Run::of(&mut gristmill(&["verify", arg(&output)])).expect(0);
}

/// Files of a file browser, in every folder that gristmill lists.
#[test]
fn stray_files_are_not_read() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = job(folder.path(), 8, 4, "budget: {usd: 100, usd_per_hour: 1}");
    let mut runs = Runs::new(job.clone(), &output);
    runs.hold(libc::SIGKILL);
    let home = runs.attempts.parent().unwrap().parent().unwrap().parent().unwrap();
    let stray = [
        "spend",
        "control",
        "gen",
        "commits",
        "commits/000000",
        "digests",
        "shards",
        "shards/000000",
    ];
    let below = ["shards/000000/log", "shards/000000/attempts", "shards/000000/data"];
    for folder in stray.iter().chain(&below) {
        fs::create_dir_all(home.join(folder)).unwrap();
        for name in [".DS_Store", "copy of 000000.json", "000000.json.swp"] {
            fs::write(home.join(folder).join(name), b"\0\0\0\x01Bud1").unwrap();
        }
    }
    assert_eq!(status(&output)["state"], "running");
    let ended = Run::of(&mut run_on(&job, 10)).expect(0);
    assert_eq!(ended.json()["rows"]["succeeded"], 8);
    Run::of(&mut gristmill(&["verify", arg(&output)])).expect(0);
    Run::of(&mut gristmill(&["retry", arg(&output), "--json"]));
    Run::of(&mut gristmill(&["clean", arg(&output)])).expect(0);
}

/// Nobody reads on: the command finishes its work, and ends as a filter does.
#[test]
fn a_closed_stdout_ends_quietly_and_nothing_is_half_done() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = job(folder.path(), 8, 4, "");
    let closed = |arguments: &[&str]| {
        let mut command = gristmill(arguments);
        command.env("GRISTMILL_KNOWN_DEVICE", "1");
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = command.stdout(writer).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let quietly = (Some(141), String::new());
    assert_eq!(closed(&["plan", arg(&job)]), quietly);
    assert_eq!(closed(&["submit", arg(&job), "--no-enqueue"]), quietly);
    assert_eq!(status(&output)["state"], "running");
    assert_eq!(closed(&["status", arg(&output)]), quietly);
    assert_eq!(closed(&["watch", arg(&output), "--every", "0.1"]), quietly);
    assert_eq!(closed(&["run", arg(&job), "--quiet"]), quietly);
    assert_eq!(status(&output)["state"], "finished");
    Run::of(&mut gristmill(&["verify", arg(&output)])).expect(0);
    // What went wrong is worth more than that nobody read it.
    assert_eq!(closed(&["status", "no-such-folder"]).0, Some(2));
    // Nor does a closed stderr end anything.
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = gristmill(&["run", arg(&job)]);
    assert_eq!(command.stderr(writer).output().unwrap().status.code(), Some(0));
}

/// Killed after a record of its only shard's log: what the record covers is not computed, nor paid for, again.
#[test]
fn rows_that_are_logged_are_not_computed_again() {
    const ROWS: u64 = 400;
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = job(folder.path(), ROWS, ROWS, "");
    let mut first = run_on(&job, 10);
    first
        .args(["--log-interval", "1"])
        .env("GRISTMILL_FAILPOINTS", "keeper.after-log=abort@1");
    let died = Run::of(&mut first);
    assert_eq!(died.code, None, "{died:?}");
    let logged = status(&output)["rows"]["succeeded"].as_u64().unwrap();
    assert!((1..ROWS).contains(&logged), "{logged}");
    let trace = folder.path().join("trace");
    let ended = Run::of(run_on(&job, 1).env("GRISTMILL_KNOWN_TRACE", &trace)).expect(0);
    assert_eq!(ended.json()["rows"]["succeeded"], ROWS);
    let computed = fs::read_to_string(&trace).unwrap().lines().count() as u64;
    assert_eq!(computed, ROWS - logged);
    Run::of(&mut gristmill(&["verify", arg(&output)])).expect(0);
}
