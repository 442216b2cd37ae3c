#!/usr/bin/env python3
"""Jobs that an older gristmill began, finished by this one.

    tests/upgrade.py OLD NEW [--only WORD]      (two programs; brokers from the environment, as `services.py env` prints it)

For each way of working, OLD begins a job and is killed or stopped in the middle of it; then NEW reads the ledger, finishes the job, and
verifies it. Where brokers run, OLD also submits the job, so that NEW reads its messages, and workers of both versions share one job, as in a
rolling upgrade. check_output.py, which shares no code with either, sees that each row was written once. The last line counts the cases.
"""

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import uuid

ROOT = pathlib.Path(__file__).resolve().parents[1]
DEMO = ROOT / "jobs/demo"
# How long a program may take to get to where it is stopped, or to finish a job.
SECONDS_MAX = 600
BROKERS = {"kafka": "GRISTMILL_TEST_KAFKA", "rabbitmq": "GRISTMILL_TEST_RABBITMQ"}


class Job:
    """A job of jobs/, with its output in a folder of its own. `edits` are replacements in its text."""

    def __init__(self, folder, name, rows, carry, table, edits=()):
        text = (ROOT / "jobs" / f"{name}.yaml").read_text().replace("demo/", f"{DEMO}/")
        self.output = folder / "out"
        for before, after in ((f"../out/{name}", str(self.output)), *edits):
            if before not in text:
                raise SystemExit(f"jobs/{name}.yaml has no `{before}`")
            text = text.replace(before, after)
        self.file = folder / f"{name}.yaml"
        self.file.write_text(text)
        self.rows, self.carry, self.table = rows, carry, DEMO / table

    def logged(self):
        """Log records of the ledger: each is the end of a group of rows."""
        return len(list(self.output.glob("_gristmill/**/log/*")))

    def status(self, program):
        return json.loads(call(program, "status", self.output, "--json").splitlines()[-1])

    def check(self, new):
        """NEW finds the job done and each row in its place."""
        status = self.status(new)
        assert status["state"] == "finished", status
        done = status["rows"]["succeeded"] + status["rows"]["invalid_output"]
        assert done == self.rows, status["rows"]
        call(new, "verify", self.output, "--inputs", "--accept-inputs", f"file://{DEMO}")
        checker = [sys.executable, ROOT / "tests/check_output.py", self.output, self.table, "--carry", self.carry]
        subprocess.run(checker, check=True, stdout=subprocess.DEVNULL)


def tickets(folder):
    return Job(folder, "label-tickets", 2000, "ticket_id", "tickets.parquet", [("rows: 256", "rows: 50")])


def written(folder, max_tokens=160):
    edits = [("max_tokens: 160", f"max_tokens: {max_tokens}"), ("rows: 64", "rows: 10"), ("budget: {usd_per_hour: 0.10}", BUDGET)]
    # Parameters of each kind that a record holds.
    edits.append(("  seed: 7\n", "  seed: 7\n  top_k: 40\n  min_p: 0.01\n  presence_penalty: 0.1\n  frequency_penalty: 0.1\n"))
    return Job(folder, "write-tickets", 400, "brief_id", "briefs.parquet", edits)


BUDGET = "budget: {usd_per_hour: 0.10, usd: 5}"


def call(program, *arguments, codes=(0,)):
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=SECONDS_MAX)
    if done.returncode not in codes:
        raise AssertionError(f"{program} {' '.join(map(str, arguments))}: code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def halfway(job, program, *arguments, records=5, by=signal.SIGKILL, codes=(-signal.SIGKILL,)):
    """Runs a program until it has logged so many more records of the job, and ends it by a signal."""
    before = job.logged()
    child = subprocess.Popen([program, *map(str, arguments), "--log-interval", "0.1"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + SECONDS_MAX
    while job.logged() < before + records:
        if child.poll() is not None or time.monotonic() > until:
            child.kill()
            raise AssertionError(f"{program} did not get far enough: {child.communicate()[1]}")
        time.sleep(0.02)
    child.send_signal(by)
    said = child.communicate(timeout=SECONDS_MAX)[1]
    assert child.returncode in codes, (child.returncode, said)
    assert job.status(program)["state"] == "running", "the job ended before it was stopped"


def killed_run(old, new, folder):
    job = tickets(folder)
    halfway(job, old, "run", job.file, "--quiet")
    logged = job.logged()
    call(new, "run", job.file, "--quiet")
    assert job.logged() > logged
    job.check(new)


def stopped_run(old, new, folder):
    job = written(folder)
    halfway(job, old, "run", job.file, "--quiet", by=signal.SIGTERM, codes=(6, -signal.SIGTERM))
    call(new, "run", job.file, "--quiet", codes=(0, 3))
    job.check(new)


def killed_retry(old, new, folder):
    job = written(folder, max_tokens=20)
    call(old, "run", job.file, "--quiet", codes=(0, 3))
    call(old, "retry", job.output, "--truncated", "--max-tokens", 160)
    halfway(job, old, "run", job.file, "--quiet", "--threads", 1, records=1)
    call(new, "run", job.file, "--quiet", codes=(0, 3))
    job.check(new)


def finished_job(old, new, folder):
    """NEW reads, repeats nothing of, and retries a job that OLD finished."""
    job = written(folder, max_tokens=20)
    call(old, "run", job.file, "--quiet", codes=(0, 3))
    job.check(new)
    call(new, "run", job.file, "--quiet", codes=(0, 3))
    job.check(new)
    call(new, "retry", job.output, "--truncated", "--max-tokens", 160)
    call(new, "run", job.file, "--quiet", codes=(0, 3))
    job.check(new)


def new_queue(broker):
    """The address of a queue that is not there yet."""
    address = os.environ[BROKERS[broker]]
    return f"{address if '://' in address else f'kafka://{address}'}/upgrade-{uuid.uuid4().hex[:12]}"


def worker_command(folder, queue):
    accepted = ["--accept", f"file://{folder}", "--accept-inputs", f"file://{DEMO}", "--accept-models", f"file://{DEMO}"]
    return ["worker", "--queue", queue, *accepted]


def killed_worker(old, new, folder, broker):
    job, queue = tickets(folder), new_queue(broker)
    call(old, "submit", job.file, "--queue", queue)
    worker = worker_command(folder, queue)
    halfway(job, old, *worker)
    call(new, *worker, "--job", job.output, "--until-idle")
    job.check(new)


def rolling_workers(old, new, folder, broker):
    job, queue = tickets(folder), new_queue(broker)
    call(old, "submit", job.file, "--queue", queue)
    worker = worker_command(folder, queue)
    worker += ["--job", str(job.output), "--until-idle", "--threads", "1"]
    children = [subprocess.Popen([program, *worker], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for program in (old, new)]
    for child in children:
        said = child.communicate(timeout=SECONDS_MAX)[1]
        assert child.returncode == 0, said
    job.check(new)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=pathlib.Path)
    parser.add_argument("new", type=pathlib.Path)
    parser.add_argument("--only", help="cases whose name holds this")
    asked = parser.parse_args()
    old, new = asked.old.resolve(strict=True), asked.new.resolve(strict=True)
    cases = [(case.__name__, case, ()) for case in (killed_run, stopped_run, killed_retry, finished_job)]
    skipped = [broker for broker, name in BROKERS.items() if name not in os.environ]
    for broker in BROKERS.keys() - set(skipped):
        cases += [(f"{case.__name__}, {broker}", case, (broker,)) for case in (killed_worker, rolling_workers)]
    cases = [case for case in cases if not asked.only or asked.only in case[0]]
    failed = 0
    for name, case, arguments in cases:
        with tempfile.TemporaryDirectory(prefix="gristmill-upgrade-") as folder:
            try:
                case(old, new, pathlib.Path(folder), *arguments)
                print(f"{name}: right", flush=True)
            except (AssertionError, subprocess.SubprocessError) as why:
                failed += 1
                print(f"{name}: WRONG: {why}", flush=True)
    for broker in skipped:
        print(f"skipped: workers over {broker}, since {BROKERS[broker]} is not set")
    print(f"{len(cases) - failed} of {len(cases)} cases right")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
