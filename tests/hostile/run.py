#!/usr/bin/env python3
"""Runs the hostile suite: every case of every module of this folder, each under a limit of address space and of time.

    .venv/bin/python tests/hostile/run.py --program target/release/gristmill [--only WORD] [--jobs 2] [--slower N] [--keep DIR]

A command is wrong where it ends by a signal or a panic, takes too long or too much memory, ends with another exit code than its case
says, or does not say what it should. Failed cases are printed, those that this machine cannot show, and at the end how many of each; the exit
code is 1 where one failed.
"""

import argparse
import concurrent.futures
import dataclasses
import importlib
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import case  # noqa: E402
from case import DONE, NotShown, Step, job, rows  # noqa: E402

# Address space is reserved beyond what is touched (threads' stacks, arenas, mapped weights), hence wider than the bound on memory in use.
ADDRESS_SPACE = 6 << 30


def modules():
    here = pathlib.Path(__file__).resolve().parent
    return sorted(path.stem for path in here.glob("*.py") if path.stem not in ("case", "run"))


def environment(folder):
    # The switch of the mutation run must reach the program.
    ours = lambda name: name.startswith(("GRISTMILL", "AWS_", "RUST_")) and name != "GRISTMILL_MUTANT"  # noqa: E731
    kept = {name: value for name, value in os.environ.items() if not ours(name)}
    return kept | {"GRISTMILL_CACHE": str(folder / ".cache"), "RUST_BACKTRACE": "0"}


def run(program, folder, step):
    """(exit code, output, seconds, peak resident MiB) of one command."""
    out = open(folder / ".output", "w+b")
    limit = lambda: resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))  # noqa: E731
    start = time.monotonic()
    command = [*step.through, *([] if step.runs_copy else [program]), *step.argv]
    process = subprocess.Popen(command, cwd=folder, env=environment(folder) | step.env, stdin=subprocess.DEVNULL,
                               stdout=out, stderr=subprocess.STDOUT, preexec_fn=limit, start_new_session=True)
    # wait4 tells this child's own peak; a plain wait with a limit of time does not.
    used = None
    while used is None:
        pid, status, found = os.wait4(process.pid, os.WNOHANG)
        if pid:
            used = found
        elif time.monotonic() - start > step.seconds:
            os.killpg(process.pid, signal.SIGKILL)
            _, status, used = os.wait4(process.pid, 0)
            break
        else:
            time.sleep(0.005)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.monotonic() - start
    out.seek(0)
    return process.returncode, out.read(), seconds, used.ru_maxrss / 1024


def wrong(program, folder, step, healthy_mib):
    """What is wrong with how a command ended, or None."""
    code, output, seconds, mib = run(program, folder, step)
    text = output.decode(errors="backslashreplace")
    shown = f"{' '.join(step.argv)}: exit code {code} after {seconds:.1f} s with {mib:.0f} MiB\n{text[:1500]}"
    if seconds > step.seconds:
        return f"took longer than {step.seconds:.0f} s: {shown}"
    if code < 0 or code == 101 or "panicked at" in text:
        return f"ended by a signal or a panic: {shown}"
    if mib > healthy_mib + step.memory_mib:
        return f"took more than {healthy_mib:.0f} + {step.memory_mib} MiB: {shown}"
    if code not in step.codes:
        return f"not one of the exit codes {step.codes}: {shown}"
    for words in step.says:
        if words not in text:
            return f"does not say `{words}`: {shown}"
    for words in step.silent:
        if words.encode() in output:
            return f"says {words!r}: {shown}"
    return None


def outcome(program, case, root, healthy_mib, slower):
    """None where the case passed, else what is wrong; a NotShown where this machine cannot show it."""
    folder = root / case.name
    folder.mkdir(parents=True)
    try:
        case.make(folder)
        for step in case.steps:
            if step.before:
                step.before(folder)
            step = dataclasses.replace(step, seconds=step.seconds * slower)
            if found := wrong(program, folder, step, healthy_mib):
                return found
        if case.check:
            case.check(folder)
    except NotShown as why:
        return why
    except AssertionError as error:
        return str(error) or traceback.format_exc()
    except Exception:
        return traceback.format_exc()
    shutil.rmtree(folder, ignore_errors=True)
    return None


def healthy(program, root):
    """Peak MiB of a small job with nothing hostile in it."""
    folder = root / ".healthy"
    folder.mkdir()
    job(folder)
    rows(folder, [{"text": f"ticket {number}"} for number in range(64)])
    code, output, _, mib = run(program, folder, Step(["run", "job.yaml"], (DONE,)))
    assert code == 0, f"a healthy job fails: {output.decode(errors='replace')}"
    return mib


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--program", required=True, type=lambda path: str(pathlib.Path(path).resolve()))
    arguments.add_argument("--only", default="", help="cases whose area or name holds this")
    arguments.add_argument("--jobs", type=int, default=2)
    arguments.add_argument("--slower", type=float, default=1, help="factor of all limits of time, where other programs share the cores")
    arguments.add_argument("--keep", type=pathlib.Path, help="an empty folder for the cases; those that failed stay")
    chosen = arguments.parse_args()
    cases = [(area, one) for area in modules() for one in importlib.import_module(area).cases()
             if chosen.only in f"{area}/{one.name}"]
    names = [(area, one.name) for area, one in cases]
    assert len(set(names)) == len(names), "two cases of one name"
    case.PROGRAM = chosen.program
    failed = not_shown = 0
    with tempfile.TemporaryDirectory() as temporary:
        root = chosen.keep or pathlib.Path(temporary)
        healthy_mib = healthy(chosen.program, root)
        with concurrent.futures.ThreadPoolExecutor(chosen.jobs) as pool:
            ends = [(area, one, pool.submit(outcome, chosen.program, one, root / area, healthy_mib, chosen.slower)) for area, one in cases]
            for area, one, end in ends:
                found = end.result()
                if isinstance(found, NotShown):
                    not_shown += 1
                    print(f"{area}/{one.name} is not shown: {found}", flush=True)
                elif found is not None:
                    failed += 1
                    print(f"{area}/{one.name} FAILED: {found}", flush=True)
    print(f"hostile: {len(cases) - failed - not_shown} passed, {failed} failed, {not_shown} not shown")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
