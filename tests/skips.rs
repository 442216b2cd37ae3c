//! Tests that could check nothing: unit tests and integration tests note them alike.

use std::fs::OpenOptions;
use std::io::Write;

/// Notes that the test `name` checked nothing, and why. `tests/check.sh` takes such tests out of those that passed and
/// lists them before its closing line; with `--no-skips` they fail the run.
pub(crate) fn skip(name: &str, why: &str) {
    eprintln!("skipped: {name}: {why}");
    if let Some(list) = std::env::var_os("GRISTMILL_TEST_SKIPS") {
        let mut list = OpenOptions::new()
            .append(true)
            .create(true)
            .open(list)
            .expect("the list of skipped tests");
        // One write a line: tests run side by side.
        list.write_all(format!("{name}: {why}\n").as_bytes())
            .expect("a line in the list of skipped tests");
    }
}

/// The same where the processor lacks `what`: no other set-up of this machine would help. `tests/check.sh` knows such a line by
/// its first words, and `--no-skips` lets it pass.
pub(crate) fn lacks(name: &str, what: &str) {
    skip(name, &format!("this machine has no {what}"));
}
