//! The house's rules, as tests.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::{Run, python, root};

/// All files below `folder` with this extension.
fn files(folder: &str, extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut open = vec![root().join(folder)];
    while let Some(folder) = open.pop() {
        for entry in fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display())) {
            let path = entry.unwrap().path();
            if path.is_dir() {
                open.push(path);
            } else if path.extension().is_some_and(|e| e == extension) {
                found.push(path);
            }
        }
    }
    found.sort();
    assert!(!found.is_empty(), "no .{extension} below {folder}");
    found
}

fn name(path: &Path) -> String {
    path.strip_prefix(root()).unwrap().display().to_string()
}

#[test]
fn every_source_file_says_what_it_is() {
    let mute: Vec<String> = [files("src", "rs"), files("tests", "rs")]
        .concat()
        .into_iter()
        .filter(|path| !fs::read_to_string(path).unwrap().starts_with("//! "))
        .map(|path| name(&path))
        .collect();
    assert!(mute.is_empty(), "no module doc: {mute:?}");
}

/// Longer files want a reason, written here.
const LONG_FILES: &[(&str, &str)] = &[];

#[test]
fn files_stay_short() {
    let long: Vec<String> = files("src", "rs")
        .into_iter()
        .filter(|path| !LONG_FILES.iter().any(|(file, _)| *file == name(path)))
        .filter_map(|path| {
            let text = fs::read_to_string(&path).unwrap();
            let code = text.split("#[cfg(test)]").next().unwrap().lines().count();
            (code > 600).then(|| format!("{} has {code} lines before its tests", name(&path)))
        })
        .collect();
    assert!(long.is_empty(), "{long:#?}");
}

/// The compiler refuses `unsafe_code` unless a file lifts that: these may.
#[test]
fn unsafe_stands_only_where_it_may() {
    let allowed = [
        "src/device/cpu/",
        "src/device/cuda/cublaslt.rs",
        "src/device/cuda/driver.rs",
        "src/device/cuda/nvrtc.rs",
        "src/device/cuda/libraries.rs",
        "src/device/cuda/mod.rs",
        "src/tokenizer/guarded.rs",
        "src/mapped.rs",
        "src/model/weights.rs",
    ];
    let found: Vec<String> = files("src", "rs")
        .into_iter()
        .filter(|path| !allowed.iter().any(|a| name(path).starts_with(a)))
        .filter(|path| fs::read_to_string(path).unwrap().contains("unsafe_code"))
        .map(|path| name(&path))
        .collect();
    assert!(found.is_empty(), "{found:?}");
}

/// "`engine/` never names a queue, a ledger, a dataset or a store", and its like: folder → crate modules it must not use.
const NEVER_NAMES: &[(&str, &[&str])] = &[
    (
        "src/engine",
        &[
            "crate::queue",
            "crate::ledger",
            "crate::dataset",
            "crate::worker",
            "crate::cli",
            "object_store",
        ],
    ),
    (
        "src/device",
        &[
            "crate::queue",
            "crate::ledger",
            "crate::dataset",
            "crate::worker",
            "crate::job",
            "crate::engine",
        ],
    ),
    (
        "src/ledger",
        &[
            "crate::engine",
            "crate::model",
            "crate::device",
            "crate::worker",
            "crate::cli",
        ],
    ),
    (
        "src/dataset",
        &[
            "crate::engine",
            "crate::model",
            "crate::device",
            "crate::worker",
            "crate::ledger",
            "crate::cli",
        ],
    ),
    (
        "src/queue",
        &["crate::engine", "crate::model", "crate::dataset", "crate::worker"],
    ),
    (
        "src/report",
        &["crate::engine", "crate::worker", "crate::queue", "crate::cli"],
    ),
];

#[test]
fn folders_do_not_name_what_they_must_not() {
    let mut found = Vec::new();
    for (folder, forbidden) in NEVER_NAMES {
        for path in files(folder, "rs") {
            let text = fs::read_to_string(&path).unwrap();
            for word in *forbidden {
                if text.contains(word) {
                    found.push(format!("{} names {word}", name(&path)));
                }
            }
        }
    }
    assert!(found.is_empty(), "{found:#?}");
}

/// The top-level module of a source file: `engine` for `src/engine/run.rs`, `signing` for `src/signing.rs`.
fn module(path: &Path) -> String {
    let name = name(path);
    let below = name.strip_prefix("src/").unwrap_or(&name);
    below.split(['/', '.']).next().unwrap_or_default().to_string()
}

#[test]
fn top_level_modules_form_no_circle() {
    let mut needs: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for path in files("src", "rs") {
        let text = fs::read_to_string(&path).unwrap();
        let code = text.split("#[cfg(test)]").next().unwrap();
        let of = needs.entry(module(&path)).or_default();
        for line in code.lines().map(|line| line.split("//").next().unwrap()) {
            for rest in line.split("crate::").skip(1) {
                let end = rest
                    .find(|c: char| !c.is_alphanumeric() && c != '_')
                    .unwrap_or(rest.len());
                of.insert(rest[..end].to_string());
            }
        }
    }
    // The root of the crate names all of them.
    needs.remove("lib");
    let modules: BTreeSet<String> = needs.keys().cloned().collect();
    for (own, of) in &mut needs {
        of.retain(|other| other != own && modules.contains(other));
    }
    // Modules that need nothing else are taken away, until none is left or all others form circles.
    while let Some(free) = needs.iter().find(|(_, of)| of.is_empty()).map(|(free, _)| free.clone()) {
        needs.remove(&free);
        for of in needs.values_mut() {
            of.remove(&free);
        }
    }
    assert!(needs.is_empty(), "these need each other: {needs:#?}");
}

/// A closure is compiled for the instructions of the kernel around it. A function of the library is not, so the compiler cannot inline the
/// closure there. In the tests' builds, `map` on an array then was a chain of calls for every four numbers: INT8 took ten times as long.
#[test]
fn kernels_give_no_closures_to_the_library() {
    let mut found = Vec::new();
    for path in files("src/device/cpu", "rs") {
        let text = fs::read_to_string(&path).unwrap();
        // The last line of the kernel, while it lasts.
        let mut end: Option<String> = None;
        for (number, line) in text.lines().enumerate() {
            let indent = &line[..line.len() - line.trim_start().len()];
            let calls = [".map(", "from_fn(", "for_each(", ".fold("];
            if line.trim_start().starts_with("#[target_feature") {
                end = Some(format!("{indent}}}"));
            } else if end.as_deref() == Some(line) {
                end = None;
            } else if end.is_some() && calls.iter().any(|call| line.contains(call)) {
                found.push(format!("{}:{}: {}", name(&path), number + 1, line.trim()));
            }
        }
    }
    assert!(found.is_empty(), "{found:#?}");
}

#[test]
fn the_demo_model_stays_small() {
    let bytes: u64 = fs::read_dir(root().join("jobs/demo/model"))
        .unwrap()
        .map(|entry| entry.unwrap().metadata().unwrap().len())
        .sum();
    assert!(bytes <= 8_000_000, "{bytes} bytes");
}

/// Tables in benches/README.md and tests/README.md are made of files of results, and what the pages promise is carried by tests.
#[test]
fn tables_and_claims_have_what_carries_them() {
    Run::of(Command::new(python()).arg(root().join("tests/tables.py"))).expect(0);
}

/// The mutation run itself takes too long for every run of the tests.
#[test]
fn the_list_of_mutations_fits_the_sources() {
    let run = root().join("tests/mutants/run.py");
    let listed = Run::of(Command::new(python()).arg(run).arg("--list")).expect(0);
    assert!(listed.stdout.lines().count() >= 60);
}
