//! Attacks on the built program: rows, templates, checkpoints, records and files that somebody made to end a worker, to hold it or to
//! make it touch what it was not told to. The cases are made by the scripts in `tests/hostile/`, where `case.py` says what one is.

use std::process::Command;

use crate::support::{Run, python, root};

#[test]
fn hostile_cases_end_in_a_row_a_refusal_or_success() {
    let run = Run::of(
        Command::new(python())
            .arg(root().join("tests/hostile/run.py"))
            .args(["--program", env!("CARGO_BIN_EXE_gristmill")])
            // All other tests run beside them.
            .args(["--slower", "4"]),
    )
    .expect(0);
    let last = run.stdout.trim_end().lines().last().unwrap_or_default();
    let passed: u32 = last
        .strip_prefix("hostile: ")
        .and_then(|rest| rest.split(' ').next())
        .and_then(|count| count.parse().ok())
        .unwrap_or_else(|| panic!("no count in `{last}`"));
    assert!(passed >= CASES_MIN, "only {passed} cases ran");
}

/// So that an area that yields nothing is no success. Raise it with the suite.
const CASES_MIN: u32 = 460;
