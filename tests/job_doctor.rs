//! `gristmill doctor JOB.yaml`: model, store and queue, each with what to do.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::commands::{queues, run, small_job};
use crate::services::S3;
use crate::support::{Run, arg, gristmill};

fn check<'a>(seen: &'a Value, what: &str) -> &'a Value {
    let checks = seen["checks"].as_array().unwrap();
    checks.iter().find(|check| check["what"] == what).unwrap()
}

#[test]
fn a_sound_job_is_all_right_and_nothing_is_left_behind() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = small_job(folder.path(), &[]);
    let seen = run(&["doctor", arg(&job), "--json"]).expect(0).json();
    assert_eq!((&seen["right"], &seen["job"]), (&true.into(), &"small".into()));
    for (what, says) in [
        ("model", "tokens of context"),
        ("store", "conditional create"),
        ("queue", "none is named"),
    ] {
        let check = check(&seen, what);
        assert_eq!(check["right"], true, "{seen}");
        assert!(check["said"].as_str().unwrap().contains(says), "{seen}");
    }
    assert!(!output.exists(), "the folder was made by the trial");
    let text = run(&["doctor", arg(&job)]).expect(0).stdout;
    assert_eq!(text.lines().count(), 3, "{text}");
    run(&["submit", arg(&job), "--no-enqueue"]).expect(0);
    let begun = run(&["doctor", arg(&job), "--json"]).expect(0).json();
    assert!(
        check(&begun, "store")["said"]
            .as_str()
            .unwrap()
            .contains("holds job `small`"),
        "{begun}"
    );
    assert_eq!(warnings(&job), "[]");
    // The same output with another job file: what `run` would say of it.
    let text = fs::read_to_string(&job).unwrap();
    fs::write(&job, text.replace("max_tokens: 1", "max_tokens: 2")).unwrap();
    let other = run(&["doctor", arg(&job), "--json"]).expect(1).json();
    let refused = run(&["run", arg(&job)]).expect(2);
    for said in [
        check(&other, "store")["said"].as_str().unwrap(),
        &warnings(&job),
        &refused.stderr,
    ] {
        for words in ["belongs to job `small`", "`generate.max_tokens` was"] {
            assert!(said.contains(words), "{said}");
        }
    }
}

/// What `plan` warns of.
fn warnings(job: &Path) -> String {
    run(&["plan", arg(job), "--json"]).expect(0).json()["warnings"].to_string()
}

#[test]
fn what_is_wrong_is_named_and_hides_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = small_job(folder.path(), &[]);
    fs::create_dir(&output).unwrap();
    fs::write(output.join("mine.csv"), "x").unwrap();
    let text = fs::read_to_string(&job).unwrap();
    let model = text.lines().find(|line| line.starts_with("model:")).unwrap();
    fs::write(&job, text.replace(model, "model: Qwen/Qwen3-8B")).unwrap();
    let wrong = run(&["doctor", arg(&job), "--queue", "kafka://127.0.0.1:1/t"]).expect(1);
    let lines: Vec<&str> = wrong.stdout.lines().collect();
    assert_eq!(lines.len(), 3, "{}", wrong.stdout);
    for (line, words) in lines.iter().zip([
        ["model", "WRONG", "hf://Qwen/Qwen3-8B"],
        ["store", "WRONG", "mine.csv"],
        ["queue", "WRONG", "kafka://127.0.0.1:1/t"],
    ]) {
        assert!(words.iter().all(|word| line.contains(word)), "{words:?}: {line}");
    }
    // A job file that cannot be read, and options that do not go together.
    fs::write(&job, "name: x\n").unwrap();
    run(&["doctor", arg(&job)]).expect(2).one_line(&["small.yaml"]);
    run(&["doctor", "--queue", "kafka://h/t"])
        .expect(2)
        .one_line(&["doctor JOB.yaml"]);
    assert!(
        run(&["doctor", arg(&job), "--quick"])
            .expect(2)
            .stderr
            .contains("cannot be used with")
    );
}

#[test]
fn brokers_are_asked_and_nothing_is_made() {
    for url in queues("brokers_are_asked_and_nothing_is_made") {
        let folder = tempfile::tempdir().unwrap();
        let (job, _) = small_job(folder.path(), &[]);
        let doctor = || run(&["doctor", arg(&job), "--queue", &url, "--json"]).expect(0).json();
        for _ in 0..2 {
            let seen = doctor();
            assert!(
                check(&seen, "queue")["said"]
                    .as_str()
                    .unwrap()
                    .contains("is not there yet"),
                "{seen}"
            );
        }
        // Nor does a worker wait for one that works once.
        let once = run(&["worker", "--queue", &url, "--once", "--json"]).expect(0);
        assert!(
            once.stderr.contains("is not there, so there is nothing to do"),
            "{}",
            once.stderr
        );
        assert_eq!(once.json()["shards"], 0);
        run(&["submit", arg(&job), "--queue", &url]).expect(0);
        let seen = doctor();
        assert!(
            check(&seen, "queue")["said"].as_str().unwrap().contains("is there, "),
            "{seen}"
        );
    }
}

#[test]
fn a_store_that_is_not_there_is_one_short_line() {
    let Some(s3) = S3::need("a_store_that_is_not_there_is_one_short_line") else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let (job, _) = small_job(folder.path(), &[]);
    let text = fs::read_to_string(&job).unwrap();
    let at_store = |arguments: &[&str]| Run::of(gristmill(arguments).envs(s3.variables(&s3.endpoint)));
    fs::write(
        &job,
        text.replace("uri: out", &format!("uri: '{}'", s3.folder("doctor"))),
    )
    .unwrap();
    let seen = at_store(&["doctor", arg(&job), "--json"]).expect(0).json();
    assert_eq!(check(&seen, "store")["right"], true, "{seen}");
    fs::write(&job, text.replace("uri: out", "uri: 's3://no-such-bucket-here/out'")).unwrap();
    let seen = at_store(&["doctor", arg(&job), "--json"]).expect(1).json();
    let said = check(&seen, "store")["said"].as_str().unwrap();
    assert!(said.contains("there is no such bucket"), "{said}");
    assert!(said.len() < 300, "{said}");
    let began = std::time::Instant::now();
    let refused = at_store(&["submit", arg(&job), "--no-enqueue"]);
    assert!(
        refused.stderr.lines().count() == 1 && refused.stderr.len() < 300,
        "{}",
        refused.stderr
    );
    assert!(
        began.elapsed() < std::time::Duration::from_secs(20),
        "{:?}",
        began.elapsed()
    );
}
