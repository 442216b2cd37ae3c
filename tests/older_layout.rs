//! Jobs that an older gristmill began: its data objects were called `*.parquet`, its trials lay below the output.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::readers::{files_below, run_halfway, tickets_job};
use crate::support::{Run, arg, check_output, gristmill};

/// Makes of the ledger in `output` what an older gristmill would have written, but for ids and hashes; returns the data objects.
fn make_older(output: &Path) -> Vec<PathBuf> {
    let mut data = Vec::new();
    for file in files_below(&output.join("_gristmill")) {
        match arg(&file).strip_suffix(".rows") {
            Some(stem) => {
                let older = PathBuf::from(format!("{stem}.parquet"));
                fs::rename(&file, &older).unwrap();
                data.push(older);
            }
            None if file.parent().unwrap().ends_with("log") => {
                let record = fs::read_to_string(&file).unwrap();
                let older = record.replacen(".rows\"", ".parquet\"", 1);
                assert_ne!(record, older, "a log record names its data object");
                fs::write(&file, older).unwrap();
            }
            None => {}
        }
    }
    data
}

/// The shards that have a log and no part.
fn waiting(output: &Path) -> usize {
    let shards: Vec<String> = files_below(&output.join("_gristmill"))
        .iter()
        .filter(|file| file.parent().unwrap().ends_with("log"))
        .map(|file| file.iter().rev().nth(2).unwrap().to_str().unwrap().to_string())
        .collect();
    let no_part = |shard: &&String| !output.join(format!("part-{}.parquet", &shard[1..])).exists();
    shards.iter().filter(no_part).count()
}

#[test]
fn a_trial_of_the_older_layout_goes_on_and_finishes() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = tickets_job(folder.path());
    // Tried with a place of its own, to know its name.
    let place = Run::of(&mut gristmill(&[
        "submit",
        arg(&job),
        "--no-enqueue",
        "--limit",
        "900",
        "--json",
    ]))
    .expect(0);
    let place = PathBuf::from(
        place.json()["output"]
            .as_str()
            .unwrap()
            .strip_prefix("file://")
            .unwrap(),
    );
    let name = place
        .file_name()
        .unwrap()
        .to_str()
        .unwrap()
        .strip_prefix("out-")
        .unwrap();
    run_halfway(&["run", arg(&job), "--limit", "900"], &place);
    let older = output.join("_limit").join(name);
    fs::create_dir_all(older.parent().unwrap()).unwrap();
    fs::rename(&place, &older).unwrap();
    let data = make_older(&older);
    assert!(data.len() > 2, "{data:?}");
    assert!(waiting(&older) > 0, "no shard is half done");

    let again = Run::of(&mut gristmill(&[
        "run",
        arg(&job),
        "--quiet",
        "--limit",
        "900",
        "--json",
    ]))
    .expect(0);
    let said = &again.stderr;
    assert!(said.contains("older gristmill") && said.contains(arg(&older)), "{said}");
    assert_eq!(again.json()["rows"]["succeeded"], 900);
    assert!(
        again.json()["output"].as_str().unwrap().ends_with(arg(&older)),
        "{}",
        again.stdout
    );
    assert!(!place.exists());
    Run::of(&mut gristmill(&["verify", arg(&older)])).expect(0);
    // `plan` reckons by it.
    let plan: Value = Run::of(&mut gristmill(&["plan", arg(&job), "--json"])).expect(0).json();
    assert!(plan["seconds"].as_f64() > Some(0.0), "{plan}");
    assert!(data.iter().all(|object| object.exists()));
    Run::of(&mut gristmill(&["clean", arg(&older), "--yes"])).expect(0);
    assert!(data.iter().all(|object| !object.exists()));
}

#[test]
fn a_job_of_the_older_layout_goes_on_and_finishes() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = tickets_job(folder.path());
    run_halfway(&["run", arg(&job)], &output);
    let data = make_older(&output);
    assert!(waiting(&output) > 0, "no shard is half done");
    let before = Run::of(&mut gristmill(&["status", arg(&output), "--json"]))
        .expect(0)
        .json();
    let finished = before["rows"]["succeeded"].as_u64().unwrap();
    assert!((100..1000).contains(&finished), "{before}");
    Run::of(&mut gristmill(&["run", arg(&job), "--quiet"])).expect(0);
    check_output(&output, &folder.path().join("tickets.parquet"), "ticket_id");
    Run::of(&mut gristmill(&["verify", arg(&output)])).expect(0);
    // What was finished was not done anew: its objects are those that count.
    let all = files_below(&output.join("_gristmill"));
    let logged = |object: &PathBuf| {
        let name = object.file_name().unwrap().to_str().unwrap();
        let log = object.parent().unwrap().with_file_name("log");
        let named = |file: &PathBuf| file.starts_with(&log) && fs::read_to_string(file).unwrap().contains(name);
        all.iter().any(named)
    };
    assert!(data.iter().all(logged));
    assert!(
        all.iter().any(|file| arg(file).ends_with(".rows")),
        "the rest is called as now"
    );
}
