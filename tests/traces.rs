//! Traces as a collector takes them, and as it does not: `traces.py` says what a case shows.

use crate::support::cases_of;

fn cases(names: &[&str]) {
    cases_of("traces.py", names, &[]);
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
