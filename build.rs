//! Tells the program which commit and which target it was built from, for `gristmill --version`.
//!
//! Cargo builds the crate again whenever this script has run. So the script runs again only if the
//! checked-out commit changes, and builds of tests do not ask git at all: a commit after the tests
//! would have them compile everything once more.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=GRISTMILL_COMMIT");
    let given = std::env::var("GRISTMILL_COMMIT").ok();
    let commit = given.filter(|commit| !commit.is_empty()).or_else(commit_of_checkout);
    println!("cargo::rustc-env=GRISTMILL_BUILD_COMMIT={}", commit.unwrap_or_default());
    let target = std::env::var("TARGET").unwrap_or_default();
    println!("cargo::rustc-env=GRISTMILL_BUILD_TARGET={target}");
}

/// The commit of this checkout; none for tests, for sources that are not a checkout, and where git
/// is missing.
fn commit_of_checkout() -> Option<String> {
    // A copy of the sources may lie in somebody else's checkout.
    if std::env::var_os("CARGO_FEATURE_FAULTS").is_some() || !Path::new(".git").exists() {
        return None;
    }
    // The log of HEAD has a line for each change of the commit. A checkout without logs has the
    // file of its branch. Cargo would take a missing file for a changed one.
    let branch = git(&["rev-parse", "--symbolic-full-name", "HEAD"]);
    let files: Vec<String> = ["logs/HEAD", "HEAD"]
        .into_iter()
        .chain(branch.as_deref())
        .filter_map(|name| git(&["rev-parse", "--git-path", name]))
        .filter(|path| Path::new(path).exists())
        .collect();
    for path in &files {
        println!("cargo::rerun-if-changed={path}");
    }
    git(&["rev-parse", "--short", "HEAD"])
}

/// What git prints; none if it fails.
fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?.trim().to_string();
    (output.status.success() && !text.is_empty()).then_some(text)
}
