#!/usr/bin/env python3
"""A long job: the memory of one worker from its first to its last rows, and how long `status` takes.

Makes 2,000,000 short prompts in the test store, plans them as 10,000 shards, and lets one worker of the fault build, whose
device answers at once, work them off through Kafka. Prints resident memory over the first and the last tenth of the rows,
and the wall seconds of `gristmill status` at half of the job (the worker runs on meanwhile) and at its end.

    tests/services/services.py up --dir /tmp/gm && eval "$(tests/services/services.py env --dir /tmp/gm)"
    cargo build --release --features faults && .venv/bin/python benches/long_job.py [--rows N] [--shards N]
"""

import argparse
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
import uuid

import pyarrow as pa
import pyarrow.parquet as pq

import overhead

GROUPS = 200
LOOK_SECONDS = 0.5


def make_input(rows: int) -> str:
    """Puts the dataset into the test store, a row group at a time; its address."""
    store, bucket = overhead.store()
    folder = f"{bucket}/long-in-{uuid.uuid4().hex[:8]}"
    rng = random.Random(1)
    texts = pa.array([" ".join(rng.choices(overhead.WORDS, k=rng.randint(4, 12))) for _ in range(1000)])
    schema = pa.schema([("id", pa.int64()), ("text", pa.string())])
    per_group = rows // GROUPS
    with store.open_output_stream(f"{folder}/rows.parquet") as out, pq.ParquetWriter(out, schema) as writer:
        for group in range(GROUPS):
            picks = pa.array([rng.randrange(1000) for _ in range(per_group)])
            ids = pa.array(range(group * per_group, (group + 1) * per_group))
            writer.write_table(pa.table([ids, texts.take(picks)], schema=schema), row_group_size=per_group)
    return f"s3://{folder}/*.parquet"


def resident_mb(pid: int) -> float:
    """Resident memory of the process."""
    with open(f"/proc/{pid}/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["VmRSS"].split()[0]) / 1024


def mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--shards", type=int, default=10_000)
    options = parser.parse_args()
    source = make_input(options.rows)
    name = f"long-{uuid.uuid4().hex[:8]}"
    output = f"s3://{os.environ['GRISTMILL_TEST_S3_BUCKET']}/{name}"
    queue = f"kafka://{os.environ['GRISTMILL_TEST_KAFKA']}/{name}"
    with tempfile.TemporaryDirectory() as work:
        job, trace = pathlib.Path(work) / "job.yaml", pathlib.Path(work) / "trace"
        job.write_text(overhead.job_text(source, output, -(-options.rows // options.shards)))
        run = {"env": overhead.environment(str(trace)), "stdout": subprocess.DEVNULL}
        subprocess.run([overhead.GRISTMILL, "submit", str(job), "--queue", queue], check=True, **run)

        def status() -> float:
            began = time.monotonic()
            subprocess.run([overhead.GRISTMILL, "status", output], check=True, **run)
            return time.monotonic() - began

        began = time.monotonic()
        command = [overhead.GRISTMILL, "worker", "--queue", queue, "--until-idle", "--quiet", "--job", output]
        worker = subprocess.Popen(command, **run)
        looks, half = [], None
        while worker.poll() is None:
            time.sleep(LOOK_SECONDS)
            try:
                looks.append((trace.stat().st_size if trace.exists() else 0, resident_mb(worker.pid)))
            except (KeyError, ProcessLookupError, FileNotFoundError):
                break
            if half is None and looks[-1][0] > 0:
                with trace.open("rb") as lines:
                    line = len(lines.readline())
                if looks[-1][0] > line * options.rows / 2:
                    half = status()
        if worker.wait() != 0:
            sys.exit(f"the worker ended with {worker.returncode}")
        wall, end = time.monotonic() - began, status()
        subprocess.run([overhead.GRISTMILL, "verify", output], check=True, **run)
        rows = sum(chunk.count(b"\n") for chunk in iter(lambda f=trace.open("rb"): f.read(1 << 20), b""))
        size = trace.stat().st_size
    first = [memory for at, memory in looks if 0 < at <= size / 10]
    last = [memory for at, memory in looks if size * 9 / 10 <= at < size]
    print("| rows | shards | computed twice | wall s | first tenth MB | last tenth MB | most MB | `status` at half s | at the end s |")
    print("|---|---|---|---|---|---|---|---|---|")
    asked = "not asked" if half is None else f"{half:.2f}"
    print(
        f"| {options.rows:,} | {options.shards:,} | {rows - options.rows} | {wall:.0f} | {mean(first):.0f} | {mean(last):.0f} "
        f"| {max(memory for _, memory in looks):.0f} | {asked} | {end:.2f} |"
    )


if __name__ == "__main__":
    main()
