#!/usr/bin/env python3
"""Lints a crate of ours while cargo compiles it, and makes the docs while cargo tests their examples, with what is built anyway.

`cargo clippy` and `cargo doc` read nothing of what `cargo test` builds: they would check every dependency once more, for
minutes. So tests/check.sh has cargo call this file in the place of rustc for our crates (RUSTC_WORKSPACE_WRAPPER), and in the place of
rustdoc (RUSTDOC). All that rustc, clippy or rustdoc has to say of our crates is an error.

Test programs and benchmarks are compiled without optimization here, whatever the profile says.

Fault tests need a build with the feature `faults`. What users run has no such feature, so the library and the program are linted
without it, too.
"""

import os
import pathlib
import subprocess
import sys
import tempfile

FEATURE = 'feature="faults"'
CLIPPY = dict(os.environ, CLIPPY_ARGS="-Dwarnings__CLIPPY_HACKERY__")


def value(args, name):
    """What follows an option."""
    return args[args.index(name) + 1]


def lint_args(args, folder):
    """rustc's arguments, so that it reads as much, and writes nothing but the crate's metadata, to `folder`."""
    made = []
    for arg in args:
        if arg.startswith("--emit="):
            arg = "--emit=metadata"
        elif arg.startswith("--json="):
            # Cargo takes a note of metadata for the sign that crates that need it can be compiled.
            arg = "--json=diagnostic-rendered-ansi"
        elif arg.startswith("incremental="):
            made.pop()
            continue
        made.append(arg)
    made[made.index("--out-dir") + 1] = str(folder)
    return made


def without_faults(args, folder):
    """The same without the feature; the program links to the library that was linted without it."""
    made = []
    for arg in args:
        if arg == FEATURE:
            made.pop()
            continue
        if arg.startswith("gristmill="):
            name = pathlib.Path(arg.removeprefix("gristmill=")).with_suffix(".rmeta").name
            arg = f"gristmill={folder / name}"
        made.append(arg)
    return made


def compile_and_lint(rustc, args):
    if "--crate-name" not in args or not any(arg.startswith("--emit=") for arg in args):
        # Cargo asks what the compiler is.
        os.execvp(rustc, [rustc, *args])
    folder = pathlib.Path(value(args, "--out-dir")).parent / "lints"
    folder.mkdir(exist_ok=True)
    # Test programs and benchmarks hardly compute by themselves, and the library that they link to is optimized: without optimization they
    # are compiled in a quarter of the time. The last of two such arguments counts. Assertions stay off as in the profile: with level 0
    # alone, rustc would turn them on.
    plain = [] if value(args, "--crate-name") == "gristmill" else ["-Copt-level=0", "-Cdebug-assertions=off"]
    # Compiled beside: both begin with what takes one core. Cargo's open files tell both how many threads they may have.
    compiled = subprocess.Popen([rustc, *args, *plain], close_fds=False)
    with tempfile.TemporaryDirectory(dir=folder) as own:
        passes = [lint_args(args, own)]
        # The library and the program.
        if FEATURE in args and "--test" not in args and value(args, "--crate-name") == "gristmill":
            passes.append(without_faults(lint_args(args, folder), folder))
        lints = [subprocess.run(["clippy-driver", rustc, *made], env=CLIPPY, close_fds=False).returncode for made in passes]
    return max([compiled.wait(), *lints])


def docs_and_examples(args):
    rustdoc = "rustdoc"
    if "--test" in args:
        skip = {"--test": 1, "--test-run-directory": 2, "--test-args": 2}
        made, at = ["-D", "warnings"], 0
        while at < len(args):
            made += [] if args[at] in skip else [args[at]]
            at += skip.get(args[at], 1)
        with tempfile.TemporaryDirectory() as folder:
            failed = subprocess.run([rustdoc, *made, "--out-dir", folder]).returncode
        if failed:
            return failed
    os.execvp(rustdoc, [rustdoc, *args])


def main():
    args = sys.argv[1:]
    if args and pathlib.Path(args[0]).name == "rustc":
        return compile_and_lint(args[0], args[1:])
    return docs_and_examples(args)


sys.exit(main())
