//! What `deploy/` has: folders for a cluster, rendered as users render them and held against schemas and against the
//! program; packages, made of the program and used.

use std::fs;
use std::process::Command;

use crate::commands::run;
use crate::skips::{lacks, skip};
use crate::support::{Run, arg, python, root};

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
    assert_eq!(last, "9 of 9 folders right");
}

#[test]
fn the_image_and_the_compose_file_hold_what_they_need() {
    let run = Run::of(
        Command::new(python())
            .arg(root().join("tests/containers.py"))
            .arg(env!("CARGO_BIN_EXE_gristmill")),
    )
    .expect(0);
    let name = "the_image_and_the_compose_file_hold_what_they_need";
    let mut lines = run.stdout.lines();
    let skipped = lines.find_map(|line| line.split_once(": skipped for want of "));
    match skipped {
        Some((_, why)) if why.starts_with("services: ") => skip(name, why),
        Some((_, why)) => lacks(name, why),
        None => assert!(run.stdout.ends_with("4 of 4 cases right\n"), "{}", run.stdout),
    }
}

#[test]
fn the_wheel_installs_and_runs_the_demo() {
    let run = Run::of(
        Command::new(python())
            .arg(root().join("tests/python_package.py"))
            .arg(env!("CARGO_BIN_EXE_gristmill")),
    )
    .expect(0);
    let last = run.stdout.trim_end().lines().last().unwrap_or_default();
    assert_eq!(last, "9 of 9 cases right");
}

#[test]
fn the_debian_package_holds_program_pages_completions_and_unit() {
    if !Command::new("dpkg-shlibdeps")
        .arg("--version")
        .output()
        .is_ok_and(|output| output.status.success())
    {
        return lacks(
            "the_debian_package_holds_program_pages_completions_and_unit",
            "dpkg-dev",
        );
    }
    let folder = tempfile::tempdir().unwrap();
    let built = Run::of(Command::new(root().join("deploy/debian/build.sh")).args([
        env!("CARGO_BIN_EXE_gristmill"),
        arg(folder.path()),
        "0",
    ]))
    .expect(0);
    let package = built.stdout.split(" (").next().unwrap();
    let field = |name: &str| {
        Run::of(Command::new("dpkg-deb").args(["--field", package, name]))
            .expect(0)
            .stdout
    };
    assert_eq!(field("Version").trim(), env!("CARGO_PKG_VERSION"));
    assert!(field("Depends").contains("libc6 (>= "), "{}", field("Depends"));
    let unpacked = folder.path().join("unpacked");
    Run::of(Command::new("dpkg-deb").args(["-x", package, arg(&unpacked)])).expect(0);
    for path in [
        "lib/systemd/system/gristmill-worker@.service",
        "share/bash-completion/completions/gristmill",
        "share/doc/gristmill/copyright",
        "share/fish/vendor_completions.d/gristmill.fish",
        "share/man/man1/gristmill.1.gz",
        "share/man/man1/gristmill-worker.1.gz",
        "share/zsh/vendor-completions/_gristmill",
    ] {
        let bytes = fs::metadata(unpacked.join("usr").join(path)).map_or(0, |metadata| metadata.len());
        assert!(bytes > 100, "{path}: {bytes} bytes");
    }
    let version = Run::of(Command::new(unpacked.join("usr/bin/gristmill")).arg("--version")).expect(0);
    assert_eq!(version.stdout, run(&["--version"]).expect(0).stdout);
}

#[test]
fn completions_are_scripts_that_name_commands_and_options() {
    let folder = tempfile::tempdir().unwrap();
    for shell in ["bash", "zsh", "fish"] {
        let script = run(&["completions", shell]).expect(0).stdout;
        for word in ["reconcile", "until-idle", "completions"] {
            assert!(script.contains(word), "{shell}: {word}");
        }
        let file = folder.path().join(shell);
        fs::write(&file, script).unwrap();
        // Each shell reads a script without running it by `-n`; those that are not here are left out.
        if let Ok(read) = Command::new(shell).arg("-n").arg(&file).output() {
            assert!(
                read.status.success(),
                "{shell}: {}",
                String::from_utf8_lossy(&read.stderr)
            );
        }
    }
    run(&["completions", "tcsh"]).expect(2);
}

#[test]
fn every_command_has_a_man_page() {
    let folder = tempfile::tempdir().unwrap();
    let pages = folder.path().join("man1");
    run(&["man", arg(&pages)]).expect(0);
    let help = run(&["--help"]).expect(0).stdout;
    let listed = help.split("Commands:\n").nth(1).unwrap().split("\n\n").next().unwrap();
    let names = listed.lines().filter_map(|line| line.strip_prefix("  "));
    let names = names
        .filter(|line| !line.starts_with([' ', '\t']))
        .filter_map(|line| line.split(' ').next());
    let names: Vec<&str> = names.filter(|name| *name != "help").collect();
    assert!(names.len() >= 20, "{help}");
    for name in names {
        let page = fs::read_to_string(pages.join(format!("gristmill-{name}.1"))).unwrap();
        assert!(page.contains(&format!(".TH gristmill-{name} 1")), "{page}");
    }
    let main = fs::read_to_string(pages.join("gristmill.1")).unwrap();
    assert_eq!(run(&["man"]).expect(0).stdout.trim_end(), main.trim_end());
    for name in ["run", "plan", "submit", "worker", "serve"] {
        let examples = format!("\nExamples:\n  gristmill {name} ");
        assert!(run(&[name, "--help"]).expect(0).stdout.contains(&examples), "{name}");
        let page = fs::read_to_string(pages.join(format!("gristmill-{name}.1"))).unwrap();
        assert!(page.contains(&format!(".SH EXAMPLES\n  gristmill {name} ")), "{page}");
    }
}

#[test]
fn the_version_says_what_was_built() {
    let short = run(&["-V"]).expect(0).stdout;
    assert_eq!(short, concat!("gristmill ", env!("CARGO_PKG_VERSION"), "\n"));
    let long = run(&["--version"]).expect(0).stdout;
    assert!(long.starts_with(&format!("{} (", short.trim_end())), "{long}");
    assert!(
        long.contains(std::env::consts::ARCH) && long.contains("cuda, cpu: "),
        "{long}"
    );
}
