#!/usr/bin/env python3
"""The mutation run: each one-line change of list.toml breaks gristmill in its own way; which test fails by it?

    .venv/bin/python tests/mutants/run.py [--only WORD]... [--rest] [--no-services] [--list]

All changes are built at once, in a copy of the checkout below target/mutants/, each behind a switch that a number in the environment
turns on. So there is one build, and what is tested is the same program each time. Each test that list.toml names must pass while no
switch is on, and fail while its change is. A change that no named test fails by is a survivor: a test is missing, or list.toml
says in `explained` why no test can tell.

A `from` is an expression, or a statement that ends in a semicolon; `at` is text around it that stands in the file once. A `test` is a
test program (lib, all, faults) and the beginning of a test's name. --no-services leaves out tests that need a broker or a store.
The result is written to tests/results/mutants.json; with --only or --rest, what other changes were found by stays there.
"""

import argparse
import bisect
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benches"))
from stamp import stamp  # noqa: E402

COPY = ROOT / "target/mutants/checkout"
RESULTS = ROOT / "tests/results/mutants.json"
SWITCH = "GRISTMILL_MUTANT"
# A change may make a test wait for ever.
LEAST_SECONDS = 120
TIMES_SLOWER = 4

MODULE = """
/// Switches of the mutation run (tests/mutants/run.py).
#[doc(hidden)]
pub mod mutants {
    pub fn on(number: u32) -> bool {
        static ON: std::sync::OnceLock<Option<u32>> = std::sync::OnceLock::new();
        *ON.get_or_init(|| std::env::var("GRISTMILL_MUTANT").ok()?.parse().ok()) == Some(number)
    }
}
"""


def switched(mutant, number):
    """The change behind its switch."""
    before, after = mutant["from"], mutant["to"]
    if before.endswith(";"):
        return f"if crate::mutants::on({number}) {{ {after} }} else {{ {before} }}"
    return f"(if crate::mutants::on({number}) {{ {after} }} else {{ {before} }})"


def with_change(text, mutant, number):
    at = mutant.get("at", mutant["from"])
    return text.replace(at, at.replace(mutant["from"], switched(mutant, number)))


def changed(mutants):
    """The files with all changes in them, by name."""
    texts, problems = {}, []
    for number, mutant in enumerate(mutants):
        file = mutant["file"]
        text = texts.get(file) or (ROOT / file).read_text()
        at = mutant.get("at", mutant["from"])
        if text.count(at) != 1 or at.count(mutant["from"]) != 1:
            problems.append(f"{mutant['name']}: `{at}` stands {text.count(at)} times in {file}")
            continue
        texts[file] = with_change(text, mutant, number)
    problems += unknown_tests(mutants)
    if problems:
        sys.exit("\n".join(problems))
    lib = "src/lib.rs"
    texts[lib] = texts.get(lib, (ROOT / lib).read_text()) + MODULE
    return texts


def check_syntax(mutants, texts):
    """Ends with the changes whose `from` or `to` is no whole expression or statement: behind a switch they would not build."""
    def errors(text):
        done = subprocess.run(["rustfmt", "--edition", "2024"], input=text, capture_output=True, text=True)
        return [line for line in done.stderr.splitlines() if line.startswith("error")]

    # rustfmt takes these for something else: a binding would end with the switch's block, `&&x` is a reference, `||x` a closure.
    parts = re.compile(r"\s*(let (?!_ )\w|&&|\|\|)")
    problems = [f"{mutant['name']}: `{mutant['from']}` is no whole expression" for mutant in mutants if parts.match(mutant["from"])]
    for file in sorted(texts):
        found = errors(texts[file])
        if not found:
            continue
        for number, mutant in enumerate(mutants):
            if mutant["file"] == file:
                alone = with_change((ROOT / file).read_text(), mutant, number)
                problems += [f"{mutant['name']} ({file}): {error}" for error in errors(alone)[:1]]
    if problems:
        sys.exit("\n".join(problems))


def unknown_tests(mutants):
    """Names of tests that nothing in the sources has."""
    sources = "\n".join(path.read_text() for folder in ("src", "tests") for path in (ROOT / folder).rglob("*.rs"))
    names = sorted(set(re.findall(r"\b(?:fn|mod) (\w+)", sources)))

    def known(part):
        at = bisect.bisect_left(names, part)
        return at < len(names) and names[at].startswith(part)

    wanted = {test for mutant in mutants for test in mutant["tests"]}
    return [f"no test is called `{test}`" for test in sorted(wanted)
            if not all(known(part) for part in test.split(" ")[1].split("::") if part)]


def copy_checkout(texts):
    """Brings the copy up to date; a file that is the same keeps its time, so that little is built again."""
    files = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True
    ).stdout
    wanted = {name for name in files.decode().split("\0") if name and (ROOT / name).is_file()}
    for name in wanted:
        new = texts[name].encode() if name in texts else (ROOT / name).read_bytes()
        target = COPY / name
        if not target.exists() or target.read_bytes() != new:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(new)
            shutil.copymode(ROOT / name, target)
    for path in COPY.rglob("*"):
        if path.is_file() and str(path.relative_to(COPY)) not in wanted and not path.is_symlink():
            path.unlink()
    for name in (".venv", ".services"):
        link = COPY / name
        if not link.exists() and (ROOT / name).exists():
            link.symlink_to(ROOT / name)


def build():
    """Builds all test programs; where they lie, by name."""
    command = ["cargo", "test", "--profile", "checked", "--locked", "--features", "faults", "--no-run", "--message-format", "json",
               "--lib", "--bins", "--test", "all", "--test", "faults"]
    environment = os.environ | {"CARGO_TARGET_DIR": str(ROOT / "target/mutants/target")}
    done = subprocess.run(command, cwd=COPY, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        for line in done.stdout.splitlines():
            message = json.loads(line).get("message") or {}
            if isinstance(message, dict) and message.get("level") == "error":
                print(message["rendered"])
        sys.exit("the changed checkout does not build")
    programs = {}
    for line in done.stdout.splitlines():
        found = json.loads(line)
        if found.get("executable") and found.get("profile", {}).get("test"):
            kind = found["target"]["kind"][0]
            programs[kind if kind == "lib" else found["target"]["name"]] = found["executable"]
    return programs


def run(programs, test, number=None, limit=None):
    """Runs a test: (passed, seconds, how many tests). None for passed: nothing ran by that name, or it noted itself as skipped."""
    program, name = test.split(" ")
    skips = ROOT / "target/mutants/skips"
    skips.write_text("")
    environment = os.environ | {"GRISTMILL_TEST_SKIPS": str(skips), "PYTHON": str(ROOT / ".venv/bin/python")}
    if number is not None:
        environment[SWITCH] = str(number)
    began = time.monotonic()
    # A group of its own, so that workers which a test has started end with it.
    child = subprocess.Popen([programs[program], name, "--test-threads=2"], cwd=COPY, env=environment, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, text=True, start_new_session=True)
    try:
        output, _ = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, 9)
        child.communicate()
        return False, time.monotonic() - began, 1
    seconds = time.monotonic() - began
    ran = sum(line.startswith("test ") and " ... " in line for line in output.splitlines())
    if child.returncode == 0 and (ran == 0 or skips.read_text()):
        return None, seconds, ran
    return child.returncode == 0, seconds, ran


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help="changes whose name or file holds the word")
    parser.add_argument("--rest", action="store_true", help="changes that no test was found for yet, by tests/results/mutants.json")
    parser.add_argument("--no-services", action="store_true")
    parser.add_argument("--list", action="store_true", help="print the list, run nothing")
    options = parser.parse_args()
    mutants = tomllib.loads((pathlib.Path(__file__).parent / "list.toml").read_text())["mutant"]
    texts = changed(mutants)
    check_syntax(mutants, texts)
    chosen = [(number, mutant) for number, mutant in enumerate(mutants)
              if not options.only or any(word in mutant["name"] or word in mutant["file"] for word in options.only)]
    if options.rest:
        done = {one["name"] for one in results() if one["found_by"]}
        chosen = [(number, mutant) for number, mutant in chosen if mutant["name"] not in done]
    if options.no_services:
        chosen = [(number, mutant) for number, mutant in chosen if not mutant.get("services")]
    if options.list:
        for number, mutant in chosen:
            print(f"{number:3} {mutant['file']}: {mutant['name']} ({', '.join(mutant['tests'])})")
        return
    copy_checkout(texts)
    programs = build()
    services = None
    if any(mutant.get("services") for _, mutant in chosen):
        services = str(ROOT / "target/mutants/services")
        script = [sys.executable, str(ROOT / "tests/services/services.py")]
        subprocess.run([*script, "up", "--dir", services], check=True)
        for line in subprocess.run([*script, "env", "--dir", services], check=True, capture_output=True, text=True).stdout.splitlines():
            name, _, value = line.removeprefix("export ").partition("=")
            os.environ[name] = value.strip("'\"")
    try:
        found = hunt(programs, chosen, [mutant["name"] for mutant in mutants])
    finally:
        if services:
            subprocess.run([*script, "down", "--dir", services])
    survivors = [one for one in found if one["found_by"] is None and one["explained"] is None]
    explained = sum(one["found_by"] is None and one["explained"] is not None for one in found)
    print(f"\n{len(found)} changes, {len(found) - len(survivors) - explained} found, {explained} explained, {len(survivors)} survived")
    sys.exit(1 if survivors else 0)


def results():
    return json.loads(RESULTS.read_text())["mutants"] if RESULTS.exists() else []


def keep(names, found):
    """Writes what was found to the results; of changes that were not chosen, what an earlier run found stays. Each says its commit."""
    now = stamp(ROOT)
    known = {one["name"]: one for one in results()} | {one["name"]: one | {"commit": now["commit"]} for one in found}
    RESULTS.write_text(json.dumps(now | {"mutants": [known[name] for name in names if name in known]}, indent=1) + "\n")


def hunt(programs, chosen, names):
    """For each change the test that fails by it, kept at once: a run that is ended has not worked in vain."""
    clean = {}
    found = []
    for number, mutant in chosen:
        by = None
        began = time.monotonic()
        for test in mutant["tests"]:
            if test not in clean:
                passed, seconds, _ = run(programs, test)
                if not passed:
                    print(f"`{test}` {'runs nothing or is skipped' if passed is None else 'fails'} without any change", flush=True)
                clean[test] = seconds if passed else None
            if clean[test] is None:
                continue
            passed, _, _ = run(programs, test, number, max(LEAST_SECONDS, TIMES_SLOWER * clean[test]))
            if passed is False:
                by = test
                break
        word = by or ("explained" if mutant.get("explained") else "SURVIVED")
        print(f"{number:3} {time.monotonic() - began:6.1f} s  {mutant['file']}: {mutant['name']}: {word}", flush=True)
        found.append({"name": mutant["name"], "file": mutant["file"], "found_by": by, "explained": mutant.get("explained")})
        keep(names, found)
    return found


if __name__ == "__main__":
    main()
