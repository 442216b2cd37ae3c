#!/usr/bin/env python3
"""What a worker costs besides the model: processor time from S3 Parquet to S3 Parquet, with a device that answers at once.

Makes a dataset of text prompts (about 200 tokens each), puts it into the test store, and

1. tokenizes the texts alone, with Hugging Face's `tokenizers` from PyPI (the library that gristmill tokenizes with);
2. runs `gristmill plan` over it: reads, renders and tokenizes every row, in one process;
3. submits it and runs 1, 2 and 4 workers on it, each round with a fresh output and topic;

then prints wall seconds, processor seconds of all workers, their ratios to the first two, and rows that were computed more
than once. The workers are of the fault build, whose device can answer at once; nothing else is armed.

    tests/services/services.py up --dir /tmp/gm && eval "$(tests/services/services.py env --dir /tmp/gm)"
    cargo build --release --features faults && .venv/bin/pip install tokenizers
    .venv/bin/python benches/overhead.py [--rows N] [--shards N]
"""

import argparse
import collections
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
import uuid

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq

ROOT = pathlib.Path(__file__).resolve().parent.parent
GRISTMILL = str(ROOT / "target/release/gristmill")
WORDS = "my parcel has not come and the invoice shows the wrong amount please refund it or send a new one thank you".split()

JOB = """\
name: overhead
model: {model}
precision: f32
input: {{uri: "{input}"}}
prompt: {{text: "{{{{ text }}}}"}}
generate: {{max_tokens: 4, temperature: 0}}
output: {{uri: "{output}", carry: [id]}}
shards: {{rows: {shard_rows}}}
"""


def store() -> tuple[pyarrow.fs.S3FileSystem, str]:
    """The test store and its bucket."""
    scheme, host = os.environ["GRISTMILL_TEST_S3"].split("://")
    opened = pyarrow.fs.S3FileSystem(
        access_key=os.environ["GRISTMILL_TEST_S3_KEY"],
        secret_key=os.environ["GRISTMILL_TEST_S3_SECRET"],
        endpoint_override=host,
        scheme=scheme,
    )
    return opened, os.environ["GRISTMILL_TEST_S3_BUCKET"]


def make_input(rows: int, words: int) -> tuple[str, pa.Table]:
    """Puts the dataset into the test store; its address, and its rows."""
    opened, bucket = store()
    rng = random.Random(1)
    folder = f"{bucket}/overhead-in-{uuid.uuid4().hex[:8]}"
    texts = pa.array([" ".join(rng.choices(WORDS, k=words)) for _ in range(1000)])
    picks = pa.array([rng.randrange(1000) for _ in range(rows)])
    table = pa.table({"id": pa.array(range(rows)), "text": texts.take(picks)})
    with opened.open_output_stream(f"{folder}/rows.parquet") as out:
        pq.write_table(table, out, compression="zstd", row_group_size=20_000)
    return f"s3://{folder}/*.parquet", table


def job_text(source: str, output: str, shard_rows: int) -> str:
    return JOB.format(model=ROOT / "jobs/demo/model", input=source, output=output, shard_rows=shard_rows)


def tokenize(table: pa.Table) -> tuple[float, float, int]:
    """Wall and processor seconds of tokenizing the rows with the `tokenizers` package, and tokens a row; nothing else."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(ROOT / "jobs/demo/model/tokenizer.json"))
    tokens, wall, processor = 0, 0.0, 0.0
    texts = table.column("text").to_pylist()
    for at in range(0, len(texts), 1000):
        began, used = time.monotonic(), time.process_time()
        encoded = tokenizer.encode_batch_fast(texts[at : at + 1000])
        wall, processor = wall + time.monotonic() - began, processor + time.process_time() - used
        tokens += sum(len(one) for one in encoded)
    return wall, processor, tokens // table.num_rows


def environment(trace: str) -> dict:
    return os.environ | {
        "AWS_ENDPOINT_URL": os.environ["GRISTMILL_TEST_S3"],
        "AWS_ACCESS_KEY_ID": os.environ["GRISTMILL_TEST_S3_KEY"],
        "AWS_SECRET_ACCESS_KEY": os.environ["GRISTMILL_TEST_S3_SECRET"],
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
        "GRISTMILL_KNOWN_DEVICE": "1",
        "GRISTMILL_KNOWN_MS_PER_ROW": "0",
        "GRISTMILL_KNOWN_TRACE": trace,
    }


def finish(children: list[subprocess.Popen]) -> tuple[float, int]:
    """Waits; processor seconds of all, and the largest resident memory of one in MB."""
    processor, memory = 0.0, 0
    for child in children:
        _, status, usage = os.wait4(child.pid, 0)
        if status != 0:
            sys.exit(f"`{' '.join(child.args)}` ended with {os.waitstatus_to_exitcode(status)}")
        processor += usage.ru_utime + usage.ru_stime
        memory = max(memory, usage.ru_maxrss // 1024)
    return processor, memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--shards", type=int, default=200)
    parser.add_argument("--words", type=int, default=190)
    args = parser.parse_args()
    source, table = make_input(args.rows, args.words)
    wall, tokenizing, tokens = tokenize(table)
    print("| what | workers | wall s | processor s | of `tokenizers` | of `plan` | peak MB | rows computed twice |")
    print("|---|---|---|---|---|---|---|---|")
    print(f"| `tokenizers`, {tokens} tokens a row | | {wall:.1f} | {tokenizing:.1f} | 1.00 | | | |", flush=True)
    del table
    with tempfile.TemporaryDirectory() as work:
        job = pathlib.Path(work) / "job.yaml"

        def write(output: str) -> None:
            job.write_text(job_text(source, output, -(-args.rows // args.shards)))

        bucket = os.environ["GRISTMILL_TEST_S3_BUCKET"]
        write(f"s3://{bucket}/overhead-plan")
        quiet = {"env": environment(os.devnull), "stdout": subprocess.DEVNULL}
        began = time.monotonic()
        alone, memory = finish([subprocess.Popen([GRISTMILL, "plan", str(job)], **quiet)])
        wall = time.monotonic() - began
        print(f"| `plan` | | {wall:.1f} | {alone:.1f} | {alone / tokenizing:.2f} | 1.00 | {memory} | |", flush=True)
        for workers in (1, 2, 4):
            name = f"overhead-{uuid.uuid4().hex[:8]}"
            write(f"s3://{bucket}/{name}")
            trace = f"{work}/trace-{workers}"
            run = {"env": environment(trace), "stdout": subprocess.DEVNULL}
            queue = f"kafka://{os.environ['GRISTMILL_TEST_KAFKA']}/{name}"
            subprocess.run([GRISTMILL, "submit", str(job), "--queue", queue], check=True, **run)
            began = time.monotonic()
            command = [GRISTMILL, "worker", "--queue", queue, "--until-idle", "--quiet", "--log-interval", "10"]
            command += ["--job", f"s3://{bucket}/{name}"]
            processor, memory = finish([subprocess.Popen(command, **run) for _ in range(workers)])
            wall = time.monotonic() - began
            counts = collections.Counter(pathlib.Path(trace).read_text().split())
            twice = sum(counts.values()) - args.rows
            subprocess.run([GRISTMILL, "verify", f"s3://{bucket}/{name}"], check=True, **run)
            print(
                f"| worker | {workers} | {wall:.1f} | {processor:.1f} | {processor / tokenizing:.2f} | {processor / alone:.2f} "
                f"| {memory} | "
                f"{twice:,} ({100 * twice / args.rows:.2f} %) |",
                flush=True,
            )


if __name__ == "__main__":
    main()
