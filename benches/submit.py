"""Time and memory of `submit` over a very large dataset.

Makes a Parquet dataset of 10,000,000 rows (40 files of 5 row groups, in `--data DIR`, kept there for the next time), then runs
`gristmill submit` over it with the demo model and prints wall seconds, processor seconds, peak resident memory, shards, and
the size of the ledger's `job.json` as a Markdown table: with the ledger in a local folder, and in the test store where
`services.py env` has set its variables. Where a broker of it runs the shards are enqueued, too (Kafka before RabbitMQ); else
the ledger is all that is written.

    cargo build --release && .venv/bin/python benches/submit.py [--rows N] [--files N] [--shard-rows N] [--lines]
"""

import argparse
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time
import uuid

import pyarrow as pa
import pyarrow.parquet as pq

ROOT = pathlib.Path(__file__).resolve().parent.parent
GROUPS = 5
WORDS = "parcel invoice refund login broken late charged twice password reset screen app crash address change order".split()

JOB = """\
name: submit
model: {model}
precision: f32
input: {{uri: "{input}"}}
prompt: {{text: "{{{{ text }}}} ->"}}
generate: {{max_tokens: 4, temperature: 0, choice: [billing, shipping]}}
output: {{uri: "{output}", carry: [id]}}
shards: {{rows: {shard_rows}}}
"""


def make_input(folder: pathlib.Path, rows: int, files: int, lines: bool) -> None:
    """Writes the dataset: ids that count, and texts drawn from 1,000 different ones."""
    rng = random.Random(1)
    texts = pa.array([" ".join(rng.choices(WORDS, k=rng.randint(4, 12))) for _ in range(1000)])
    folder.mkdir(parents=True, exist_ok=True)
    per_file = rows // files
    picks = pa.array([rng.randrange(1000) for _ in range(per_file)])
    text = texts.take(picks)
    for number in range(files):
        name = f"part-{number:05}.{'jsonl' if lines else 'parquet'}"
        ids = pa.array(range(number * per_file, (number + 1) * per_file))
        if lines:
            each = (f'{{"id": {i}, "text": "{t}"}}\n' for i, t in zip(ids.to_pylist(), text.to_pylist()))
            (folder / name).write_text("".join(each))
        else:
            table = pa.table({"id": ids, "text": text})
            pq.write_table(table, folder / name, compression="zstd", row_group_size=max(1, per_file // GROUPS))


def measure(command: list[str]) -> tuple[float, float, int, dict]:
    """Wall seconds, processor seconds, peak resident memory in MB and the JSON result of one command."""
    began = time.monotonic()
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out = child.stdout.read()
    err = child.stderr.read()
    _, status, usage = os.wait4(child.pid, 0)
    wall = time.monotonic() - began
    if status != 0:
        sys.exit(f"`{' '.join(command)}` ended with {os.waitstatus_to_exitcode(status)}: {err}")
    return wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss // 1024, json.loads(out.splitlines()[-1])


def queue_of_environment() -> list[str]:
    """Where to enqueue, with a topic or queue of this run's own."""
    for variable, scheme in (("GRISTMILL_TEST_KAFKA", "kafka://"), ("GRISTMILL_TEST_RABBITMQ", "")):
        if address := os.environ.get(variable):
            return ["--queue", f"{scheme}{address}/submit-{uuid.uuid4().hex[:8]}"]
    return ["--no-enqueue"]


def store_of_environment() -> str | None:
    """A folder of this run's own in the test store, which child processes then find by the `AWS_` variables."""
    if not (endpoint := os.environ.get("GRISTMILL_TEST_S3")):
        return None
    os.environ.update(
        AWS_ENDPOINT_URL=endpoint,
        AWS_ALLOW_HTTP="true",
        AWS_REGION="us-east-1",
        AWS_ACCESS_KEY_ID=os.environ["GRISTMILL_TEST_S3_KEY"],
        AWS_SECRET_ACCESS_KEY=os.environ["GRISTMILL_TEST_S3_SECRET"],
    )
    return f"s3://{os.environ['GRISTMILL_TEST_S3_BUCKET']}/submit-{uuid.uuid4().hex[:8]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--files", type=int, default=40)
    parser.add_argument("--shard-rows", type=int, default=4096)
    parser.add_argument("--lines", action="store_true", help="JSON lines instead of Parquet: they have no footers")
    parser.add_argument("--data", type=pathlib.Path, help="keep the dataset here, and take it from here the next time")
    parser.add_argument("--binary", default=str(ROOT / "target/release/gristmill"))
    options = parser.parse_args()
    scratch = pathlib.Path(tempfile.mkdtemp(prefix="gristmill-submit-"))
    try:
        kind = "lines" if options.lines else "parquet"
        data = (options.data or scratch) / f"{kind}-{options.rows}-{options.files}"
        if not data.exists():
            make_input(data, options.rows, options.files, options.lines)
        outputs = [("local folder", str(scratch / "out"))]
        if store := store_of_environment():
            outputs.append(("S3", store))
        queue = queue_of_environment()
        enqueued = "no" if queue == ["--no-enqueue"] else queue[1].split(":")[0]
        print("| ledger | rows | files | shards | enqueued | wall s | processor s | peak memory MB | job.json MB |")
        print("|---|---|---|---|---|---|---|---|---|")
        for name, output in outputs:
            job = scratch / "job.yaml"
            job.write_text(
                JOB.format(model=ROOT / "jobs/demo/model", input=data, output=output, shard_rows=options.shard_rows)
            )
            wall, cpu, peak, result = measure([options.binary, "submit", str(job), "--json", *queue])
            assert result["rows"] == options.rows // options.files * options.files, result
            record = scratch / "out/_gristmill/job.json"
            size = f"{record.stat().st_size / 1e6:.1f}" if name == "local folder" else ""
            print(
                f"| {name} | {result['rows']:,} | {result['inputs']:,} | {result['shards']:,} | {enqueued} | {wall:.2f} | "
                f"{cpu:.2f} | {peak} | {size} |",
                flush=True,
            )
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
