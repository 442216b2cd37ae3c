//! Attacks on the built program: rows, templates, checkpoints, records and files that somebody made to end a worker, to hold it or to
//! make it touch what it was not told to. The cases are made by the scripts in `tests/hostile/`, where `case.py` says what one is. Each
//! script is a test here, so that a failure names its area and an area can be run alone.

use std::process::Command;

use crate::support::{Run, python, root};

/// Runs the cases of one script. Fewer than `least` is a failure: an area that yields nothing is no success. Raise it with the area.
#[track_caller]
fn check(area: &str, least: u32) {
    let run = Run::of(
        Command::new(python())
            .arg(root().join("tests/hostile/run.py"))
            .args(["--program", env!("CARGO_BIN_EXE_gristmill")])
            .args(["--only", &format!("{area}/")])
            // All other tests run beside them.
            .args(["--jobs", "1", "--slower", "4"]),
    )
    .expect(0);
    let last = run.stdout.trim_end().lines().last().unwrap_or_default();
    let counts: Vec<u32> = last
        .strip_prefix("hostile: ")
        .unwrap_or_else(|| panic!("no counts in `{last}`"))
        .split(|c: char| !c.is_ascii_digit())
        .filter_map(|count| count.parse().ok())
        .collect();
    // Passed, failed, and not shown: what this machine cannot show, as `case.py` has it.
    let &[passed, 0, not_shown] = &counts[..] else {
        panic!("`{last}`");
    };
    assert!(
        passed + not_shown >= least,
        "only {passed} cases of {area} ran, and {not_shown} could not"
    );
}

#[test]
fn every_script_is_a_test() {
    let source = include_str!("hostile.rs");
    for entry in std::fs::read_dir(root().join("tests/hostile")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if let Some(area) = name.strip_suffix(".py").filter(|area| !["case", "run"].contains(area)) {
            assert!(source.contains(&format!("fn hostile_{area}()")), "{area}");
        }
    }
}

#[test]
fn hostile_arrow_rows() {
    check("arrow_rows", 72);
}

#[test]
fn hostile_deputy() {
    check("deputy", 41);
}

#[test]
fn hostile_grammars() {
    check("grammars", 61);
}

#[test]
fn hostile_json_rows() {
    check("json_rows", 22);
}

#[test]
fn hostile_local_files() {
    check("local_files", 63);
}

#[test]
fn hostile_parquet_rows() {
    check("parquet_rows", 26);
}

#[test]
fn hostile_queue_settings() {
    check("queue_settings", 54);
}

#[test]
fn hostile_records() {
    check("records", 48);
}

#[test]
fn hostile_rights() {
    check("rights", 2);
}

#[test]
fn hostile_signed() {
    check("signed", 48);
}

#[test]
fn hostile_tables() {
    check("tables", 19);
}

#[test]
fn hostile_templates() {
    check("templates", 72);
}

#[test]
fn hostile_terminal() {
    check("terminal", 17);
}

#[test]
fn hostile_texts() {
    check("texts", 23);
}

#[test]
fn hostile_tokenizers() {
    check("tokenizers", 29);
}
