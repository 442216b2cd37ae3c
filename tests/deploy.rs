//! What `deploy/` has for a cluster, rendered as users render it and held against schemas and against the program.

use std::process::Command;

use crate::skips::lacks;
use crate::support::{Run, python, root};

#[test]
fn kubernetes_folders_render_to_valid_objects() {
    let has = |program: &str| Command::new(program).arg("version").output().is_ok();
    if !has("kubectl") && !has("kustomize") {
        return lacks("kubernetes_folders_render_to_valid_objects", "kubectl");
    }
    let run = Run::of(
        Command::new(python())
            .arg(root().join("tests/kubernetes.py"))
            .arg(env!("CARGO_BIN_EXE_gristmill")),
    )
    .expect(0);
    let last = run.stdout.trim_end().lines().last().unwrap_or_default();
    assert_eq!(last, "6 of 6 folders right");
}
