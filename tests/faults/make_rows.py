#!/usr/bin/env python3
"""Makes the input of a fault run: Parquet files of prompts whose answers are known, with columns to carry.

    make_rows.py OUT --rows N [--files F] [--seed S] [--bad-percent P] [--abort A] [--upload s3://BUCKET/PREFIX]

OUT gets `rows-000.parquet` and so on: `id` (string, unique), `custom_id` (the same), `token_ids` (list<int32>), and to carry `note` (string, some
null, some long or not ASCII), `number` (int64, some null), `tags` (list<string>, some null or empty). The same seed makes
the same rows.

`--bad-percent` of the rows cannot be completed: the device has no value for their first id, or the list is empty, null,
or holds an id that no vocabulary has. `--abort` rows end the process that computes them. They are spread over the input.

With `--upload` the files are copied there as well; `--endpoint` and the usual AWS variables say how.
"""

import argparse
import os
import random
import sys

import pyarrow as pa
import pyarrow.parquet as pq

import known

ROW_GROUP_ROWS = 1000
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("custom_id", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("note", pa.string()),
        ("number", pa.int64()),
        ("tags", pa.list_(pa.string())),
    ]
)
NOTES = [None, "", "plain", "tab\tand\nline", "Grüße aus Köln", "日本語のメモ", "🙂 x", '"quoted", with comma', "long " * 40]


def prompt(random_, kind):
    ids = [random_.randrange(known.ORDINARY_IDS) for _ in range(random_.randint(1, 24))]
    if kind == "abort":
        return [known.ABORT_ID] + ids
    if kind == "bad":
        return random_.choice([[known.ERROR_ID] + ids, [], None, [-1] + ids, ids + [1 << 30]])
    return ids


def rows(count, seed, bad, abort):
    """Rows as dictionaries; `bad` and `abort` are row numbers."""
    random_ = random.Random(seed)
    for row in range(count):
        kind = "abort" if row in abort else "bad" if row in bad else "ordinary"
        tags = random_.choice([None, [], ["a"], ["b", None, "c"], [f"t{row}"] * 3])
        yield {
            "id": f"{seed:x}-{row}",
            "custom_id": f"{seed:x}-{row}",
            "token_ids": prompt(random_, kind),
            "note": random_.choice(NOTES),
            "number": None if random_.random() < 0.1 else random_.randrange(-(1 << 63), 1 << 63),
            "tags": tags,
        }


def write(out, count, files, seed, bad_percent, abort_count):
    """Writes the files and returns their paths."""
    random_ = random.Random(f"places {seed}")
    bad_count = round(count * bad_percent / 100)
    special = random_.sample(range(count), bad_count + abort_count)
    bad, abort = set(special[:bad_count]), set(special[bad_count:])
    os.makedirs(out, exist_ok=True)
    made = rows(count, seed, bad, abort)
    paths = []
    for number in range(files):
        end, begin = count * (number + 1) // files, count * number // files
        path = os.path.join(out, f"rows-{number:03}.parquet")
        table = pa.Table.from_pylist([next(made) for _ in range(end - begin)], schema=SCHEMA)
        pq.write_table(table, path, row_group_size=ROW_GROUP_ROWS)
        paths.append(path)
    return paths


def upload(paths, url, endpoint):
    filesystem, prefix = known.filesystem(url, endpoint)
    for path in paths:
        with open(path, "rb") as source, filesystem.open_output_stream(f"{prefix}/{os.path.basename(path)}") as target:
            target.write(source.read())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--files", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bad-percent", type=float, default=0.0)
    parser.add_argument("--abort", type=int, default=0)
    parser.add_argument("--upload", metavar="URL")
    parser.add_argument("--endpoint", help="http://host:port of the store")
    arguments = parser.parse_args()
    paths = write(
        arguments.out, arguments.rows, arguments.files, arguments.seed, arguments.bad_percent, arguments.abort
    )
    if arguments.upload:
        upload(paths, arguments.upload, arguments.endpoint)
    return 0


if __name__ == "__main__":
    sys.exit(main())
