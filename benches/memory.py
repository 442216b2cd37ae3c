"""Memory and time of `plan` and `run` over a large Parquet file.

Makes a dataset of 1,000,000 rows in 200 row groups (seeded), then runs `gristmill plan` and `gristmill run` over it with
the demo model and a one-word answer from a closed set, and prints wall seconds, processor seconds, rows per second and the
peak resident memory of each as a Markdown table.

    cargo build --release && .venv/bin/python benches/memory.py [--rows N] [--skip-run]
"""

import argparse
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time

import pyarrow as pa
import pyarrow.parquet as pq

ROOT = pathlib.Path(__file__).resolve().parent.parent
GROUPS = 200
WORDS = "parcel invoice refund login broken late charged twice password reset screen app crash address change order".split()

JOB = """\
name: memory
model: {model}
precision: f32
input: {{uri: {input}}}
prompt: {{text: "{{{{ text }}}} ->"}}
generate: {{max_tokens: 4, temperature: 0, choice: [billing, shipping]}}
output: {{uri: {output}, carry: [id]}}
"""


def make_input(path: pathlib.Path, rows: int) -> None:
    """Writes `rows` rows of 4 to 12 words in GROUPS row groups, a group at a time."""
    rng = random.Random(1)
    schema = pa.schema([("id", pa.int64()), ("text", pa.string()), ("padding", pa.string())])
    per_group = rows // GROUPS
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for group in range(GROUPS):
            ids = range(group * per_group, (group + 1) * per_group)
            texts = [" ".join(rng.choices(WORDS, k=rng.randint(4, 12))) for _ in ids]
            # A wide column that no template uses: it must not be read at all.
            padding = [f"{i:064x}" * 8 for i in ids]
            writer.write_table(pa.table([list(ids), texts, padding], schema=schema), row_group_size=per_group)


def measure(command: list[str]) -> tuple[float, float, int]:
    """Wall seconds, processor seconds and peak resident memory in MB of one command."""
    began = time.monotonic()
    pid = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    _, status, usage = os.wait4(pid.pid, 0)
    wall = time.monotonic() - began
    if status != 0:
        sys.exit(f"`{' '.join(command)}` ended with {os.waitstatus_to_exitcode(status)}: {pid.stderr.read()}")
    return wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss // 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--skip-run", action="store_true", help="measure `plan` only")
    options = parser.parse_args()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="gristmill-memory-"))
    try:
        make_input(folder / "input.parquet", options.rows)
        job = folder / "job.yaml"
        job.write_text(
            JOB.format(model=ROOT / "jobs/demo/model", input=folder / "input.parquet", output=folder / "out")
        )
        binary = str(ROOT / "target/release/gristmill")
        commands = [("plan", [binary, "plan", str(job), "--preview", "0"])]
        if not options.skip_run:
            commands.append(("run", [binary, "run", str(job), "--quiet"]))
        print("| command | rows | wall s | processor s | rows/s | peak memory MB |\n|---|---|---|---|---|---|")
        for name, command in commands:
            wall, cpu, peak = measure(command)
            print(f"| `{name}` | {options.rows:,} | {wall:.1f} | {cpu:.1f} | {options.rows / wall:,.0f} | {peak} |", flush=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
