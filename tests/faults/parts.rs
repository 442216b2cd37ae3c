//! The suite's own parts: the checker finds each way of being wrong, and every failpoint stands in the code.

use std::process::Command;

use gristmill::faults::points::POINTS;

use super::suite::Random;
use crate::support::{Run, python, root};

#[test]
fn the_checker_finds_each_way_of_being_wrong() {
    let run = Run::of(Command::new(python()).arg(root().join("tests/faults/check_test.py"))).expect(0);
    assert!(run.stdout.lines().count() >= 20, "{}", run.stdout);
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let of = |seed| {
        let mut random = Random::new(seed);
        (0..5).map(|_| random.within(0..1000)).collect::<Vec<_>>()
    };
    assert_eq!(of(1), of(1));
    assert_ne!(of(1), of(2));
}

#[test]
fn every_failpoint_stands_once_in_the_code() {
    let mut text = String::new();
    let mut open = vec![root().join("src")];
    while let Some(folder) = open.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() && !path.ends_with("faults") {
                open.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") && !path.ends_with("failpoint.rs") {
                text.push_str(&std::fs::read_to_string(path).unwrap());
            }
        }
    }
    let calls = text.matches("failpoint!(").count();
    let wrong: Vec<&&str> = POINTS
        .iter()
        .filter(|name| {
            let times = |call: String| text.matches(&call).count();
            times(format!("failpoint!(\"{name}\")")) + times(format!("failpoint!(blocking \"{name}\")")) != 1
        })
        .collect();
    assert!(wrong.is_empty(), "not once in the code: {wrong:?}");
    assert_eq!(calls, POINTS.len(), "a point that the table does not have");
}
