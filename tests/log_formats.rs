//! Lines on stderr through the built program: with `--log-format json` each is one JSON object, which names its job and shard,
//! whatever a name holds; as text each is a sentence.

use std::collections::BTreeSet;
use std::process::Command;

use serde_json::Value;

use crate::commands::small_job;
use crate::support::{Run, arg, gristmill};

/// Names that would steer a terminal.
const HOSTILE: &str = "\u{1b}[2J\u{9b}\u{202e}\u{2066}";

/// The objects on stderr: every line is one, and shows no character that acts on a terminal.
#[track_caller]
fn events(ran: &Run) -> Vec<Value> {
    let parsed = |line: &str| {
        let event: Value = serde_json::from_str(line).unwrap_or_else(|e| panic!("not JSON ({e}): {line}"));
        for name in ["timestamp", "level", "message", "target"] {
            assert!(event[name].is_string(), "no `{name}`: {line}");
        }
        event
    };
    for c in HOSTILE.chars().filter(|&c| c != '[' && c != '2' && c != 'J') {
        assert!(!ran.stderr.contains(c), "{:?}", ran.stderr);
    }
    ran.stderr.lines().map(parsed).collect()
}

fn in_json(arguments: &[&str]) -> Command {
    let mut command = gristmill(arguments);
    command.args(["--log-format", "json"]).env("RUST_LOG", "gristmill=info");
    command
}

/// The shards whose end is told, each with the fields of its job.
#[track_caller]
fn shards_done(events: &[Value], job: &str, worker: Option<&str>) -> BTreeSet<u64> {
    let done = events
        .iter()
        .filter(|event| event["message"].as_str().unwrap().ends_with(" is done"));
    let shard = |event: &Value| {
        assert_eq!(event["job"], job, "{event}");
        for name in ["job_id", "attempt", "output", "worker"] {
            assert!(event[name].is_string(), "no `{name}`: {event}");
        }
        assert!(
            event["worker"]
                .as_str()
                .unwrap()
                .starts_with(worker.unwrap_or_default())
        );
        event["shard"].as_u64().unwrap()
    };
    done.map(shard).collect()
}

#[test]
fn each_line_of_a_run_is_an_object_and_a_shards_has_its_job() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = small_job(folder.path(), &[7]);
    let ran = Run::of(&mut in_json(&["run", arg(&job)])).expect(3);
    assert_eq!(shards_done(&events(&ran), "small", None), (0..10).collect());
    assert!(ran.stdout.contains("rows"), "the report stays as it is: {}", ran.stdout);
    // The environment says it, too, and the end of a command that fails is an error of the log.
    let again = gristmill(&["retry", arg(&output), "--queue", "nonsense://x"])
        .env("GRISTMILL_LOG_FORMAT", "json")
        .env("RUST_LOG", "off")
        .output()
        .unwrap();
    let again = Run {
        code: again.status.code(),
        stdout: String::from_utf8(again.stdout).unwrap(),
        stderr: String::from_utf8(again.stderr).unwrap(),
    };
    let told = events(&again.expect(2));
    let last = told.last().unwrap();
    assert_eq!(last["level"], "ERROR", "{last}");
    assert!(
        last["message"]
            .as_str()
            .unwrap()
            .contains("a queue address begins with"),
        "{last}"
    );
}

#[test]
fn a_hostile_name_stays_in_one_valid_line() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = small_job(folder.path(), &[]);
    let text = std::fs::read_to_string(&job).unwrap();
    let named = text.replace("name: small", "name: \"small\\u202e\\u2066\"");
    std::fs::write(&job, named).unwrap();
    let ran = Run::of(&mut in_json(&["run", arg(&job)])).expect(0);
    assert_eq!(
        shards_done(&events(&ran), "small\u{202e}\u{2066}", None),
        (0..10).collect()
    );
    let missing = format!("{}{HOSTILE}", arg(&output));
    let ran = Run::of(&mut in_json(&["status", &missing])).expect(2);
    let told = events(&ran);
    assert_eq!((told.len(), &told[0]["level"]), (1, &"ERROR".into()), "{told:?}");
    let again = Run::of(&mut in_json(&["run", &format!("{}{HOSTILE}", arg(&job))])).expect(2);
    assert_eq!(events(&again).last().unwrap()["level"], "ERROR", "{again:?}");
}

#[test]
fn a_text_line_names_its_shard_once() {
    let folder = tempfile::tempdir().unwrap();
    let (job, _) = small_job(folder.path(), &[]);
    let ran = Run::of(gristmill(&["run", arg(&job), "--quiet"]).env("RUST_LOG", "gristmill=info")).expect(0);
    let lines: Vec<&str> = ran.stderr.lines().filter(|line| line.ends_with(" is done")).collect();
    assert_eq!(lines.len(), 10, "{}", ran.stderr);
    for line in lines {
        let named = |word: &str| line.matches(word).count();
        assert_eq!((named("shard "), named("small"), named("shard=")), (1, 1, 0), "{line}");
        assert!(line.contains(" INFO "), "{line}");
    }
}
