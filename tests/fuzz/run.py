#!/usr/bin/env python3
"""Runs fuzz targets for a time each, and adds what they did to tests/results/fuzz.json.

    .venv/bin/python tests/fuzz/run.py --seconds 3600 [TARGET]...      (all targets where none is named)

Needs a nightly compiler and cargo-fuzz. Builds below target/fuzz/, where the corpora stay too, so that a later run goes on from what an
earlier one found. What is added is processor time, which says the same on a busy machine. A run that ends before its time, by a crash,
a hang or too much memory, is not added: the input is kept in tests/fuzz/artifacts/ and this ends with an error that names it.
`--jobs N` runs so many targets at a time. `--input-seconds N` is the longest that one input may take by the clock; give more where
other programs take most of the processor.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benches"))
from stamp import stamp  # noqa: E402

RESULTS = ROOT / "tests/results/fuzz.json"
FUZZ = ROOT / "tests/fuzz"
# Targets run in this folder, so that what one leaves there stays out of the checkout.
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target/fuzz")).resolve()
# An input that takes more memory breaks the target.
MEMORY_MB_MAX = 4096


def all_targets():
    return sorted(path.stem for path in (FUZZ / "fuzz_targets").glob("*.rs"))


def build(targets):
    # C libraries are built with the address sanitizer; librdkafka's configure links its trials against one of them.
    environment = os.environ | {"CARGO_TARGET_DIR": str(TARGET), "LDFLAGS": "-fsanitize=address"}
    for target in targets:
        subprocess.run(["cargo", "+nightly", "fuzz", "build", "--fuzz-dir", FUZZ, target], cwd=ROOT, check=True, env=environment)


def program(target):
    found = sorted(TARGET.glob(f"*/release/{target}"))
    if not found:
        raise SystemExit(f"no program of {target} below {TARGET}")
    return found[0]


def run(target, seconds, input_seconds):
    """Runs a target; what it did, or an error's text."""
    corpus, seeds, artifacts = TARGET / "corpus" / target, TARGET / "seeds" / target, FUZZ / "artifacts" / target
    for folder in (corpus, seeds, artifacts):
        folder.mkdir(parents=True, exist_ok=True)
    command = [program(target), corpus, seeds, f"-artifact_prefix={artifacts}/", f"-max_total_time={seconds}"]
    command += [f"-timeout={input_seconds}", f"-rss_limit_mb={MEMORY_MB_MAX}"]
    # The leak check counts the exit handlers of threads that are about to end. Memory has its own limit.
    command.append("-detect_leaks=0")
    log = TARGET / f"{target}.log"
    with open(log, "wb") as out:
        child = subprocess.Popen(command, cwd=TARGET, stdout=out, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(child.pid, 0)
    code = child.returncode = os.waitstatus_to_exitcode(status)
    text = log.read_text(errors="replace")
    done = re.search(r"^Done (\d+) runs in (\d+) second", text, re.M)
    if code or not done:
        return f"{target} ended with code {code}; its log is {log}, the input lies in {artifacts}"
    # Edges of the program that inputs have reached.
    covered = re.findall(r"cov: (\d+)", text)
    return {"seconds": round(used.ru_utime + used.ru_stime), "inputs": int(done[1]), "edges": int(covered[-1]) if covered else 0}


def add(target, found):
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"targets": {}}
    before = results["targets"].get(target, {"seconds": 0, "inputs": 0})
    for name in ("seconds", "inputs"):
        found[name] += before[name]
    now = stamp(ROOT)
    results["targets"][target] = found | {"last": now["commit"]}
    RESULTS.write_text(json.dumps(now | {"targets": dict(sorted(results["targets"].items()))}, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, required=True)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--input-seconds", type=int, default=25)
    parser.add_argument("targets", nargs="*")
    asked = parser.parse_args()
    targets = asked.targets or all_targets()
    unknown = set(targets) - set(all_targets())
    if unknown:
        raise SystemExit(f"no such target: {', '.join(sorted(unknown))}; there are {', '.join(all_targets())}")
    subprocess.run([sys.executable, FUZZ / "seeds.py", TARGET / "seeds"], check=True)
    build(targets)
    broken = []
    with concurrent.futures.ThreadPoolExecutor(asked.jobs) as pool:
        running = {pool.submit(run, target, asked.seconds, asked.input_seconds): target for target in targets}
        for ended in concurrent.futures.as_completed(running):
            target, found = running[ended], ended.result()
            if isinstance(found, str):
                broken.append(found)
                print(found, file=sys.stderr, flush=True)
                continue
            add(target, found)
            print(f"{target}: {found['inputs']:,} inputs in {found['seconds']:,} s in all, {found['edges']:,} edges", flush=True)
    if broken:
        raise SystemExit(f"{len(broken)} of {len(targets)} targets broke")


if __name__ == "__main__":
    main()
