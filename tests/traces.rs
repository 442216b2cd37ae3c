//! Traces as a collector takes them, and as it does not: `traces.py` says what a case shows.

use std::process::Command;

use crate::support::{Run, python, root};

fn cases(names: &[&str]) {
    let only = names.iter().flat_map(|name| ["--only", name]);
    let run = Run::of(
        Command::new(python())
            .arg(root().join("tests/traces.py"))
            .arg(env!("CARGO_BIN_EXE_gristmill"))
            .args(only),
    )
    .expect(0);
    println!("{}", run.stdout);
    let last = run.stdout.trim_end().lines().last().unwrap_or_default();
    assert_eq!(last, format!("{0} of {0} cases right", names.len()));
}

#[test]
fn each_shard_is_a_trace_without_texts() {
    cases(&["shards", "interrupted"]);
}

#[test]
fn traces_are_set_up_by_option_and_environment() {
    cases(&["settings", "nothing"]);
}

#[test]
fn a_collector_that_is_away_costs_a_line() {
    cases(&["troubles"]);
}

#[test]
fn requests_and_steps_of_batches_are_traced() {
    cases(&["service"]);
}
