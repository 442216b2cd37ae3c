#!/usr/bin/env python3
"""The example jobs, each run once into an empty output: the result's own figures as a Markdown table.

    cargo build --release && python3 benches/examples.py [JOB.yaml…]

Without arguments jobs/label-tickets.yaml and jobs/write-tickets.yaml. Their outputs are written to a temporary folder.
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
JOBS = [ROOT / "jobs/label-tickets.yaml", ROOT / "jobs/write-tickets.yaml"]


def run(job: pathlib.Path, folder: pathlib.Path) -> dict:
    """The result of a run of the job, whose output goes to `folder`."""
    text = job.read_text()
    moved, times = re.subn(r"^(output: \{uri: )[^,}]+", rf"\g<1>{folder / 'out'}", text, flags=re.MULTILINE)
    if times != 1:
        sys.exit(f"{job}: no line `output: {{uri: …`")
    # Other paths of the file are relative to where it stands.
    copy = job.with_name(f".{job.stem}.benchmark.yaml")
    copy.write_text(moved)
    try:
        done = subprocess.run([ROOT / "target/release/gristmill", "run", copy, "--quiet", "--json"], capture_output=True, text=True)
    finally:
        copy.unlink()
    if done.returncode:
        sys.exit(f"{job} ended with {done.returncode}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    print("| job | rows | prompt tokens | cached | completion tokens | device s | tokens/s |\n|---|---|---|---|---|---|---|")
    for job in map(pathlib.Path, sys.argv[1:] or JOBS):
        with tempfile.TemporaryDirectory() as folder:
            found = run(job, pathlib.Path(folder))
        tokens = found["tokens"]
        print(f"| {found['job']} | {found['rows']['total']:,} | {tokens['prompt']:,} | {tokens['cached'] / tokens['prompt']:.1%} | "
              f"{tokens['completion']:,} | {found['seconds']:.1f} | {found['tokens_per_second']:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
