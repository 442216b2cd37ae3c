#!/usr/bin/env python3
"""Checks a gristmill output by itself: every input row exactly once, in input order, carried columns intact.

Reads nothing but the published parts and the input, and shares no code with gristmill. Needs pyarrow.

    check_output.py OUTPUT INPUT... --carry col[,col] [--rows N]

OUTPUT is a folder; INPUT are Parquet files in the order in which the job reads them (a folder: its *.parquet by name).
Prints one line and exits 0 where the output is right; prints findings and exits 1 where it is not or cannot be read.
"""

import argparse
import collections
import os
import re
import sys

import pyarrow as pa
import pyarrow.parquet as pq

STATUSES = {"succeeded", "invalid_output", "errored", "expired", "cancelled"}
FINDINGS_MAX = 50
BATCH_ROWS = 16384


class Findings:
    """Lines that say what is wrong; further ones are only counted."""

    def __init__(self):
        self.count = 0

    def add(self, line):
        self.count += 1
        if self.count <= FINDINGS_MAX:
            print(line)


def input_files(paths):
    for path in paths:
        if os.path.isdir(path):
            names = sorted(name for name in os.listdir(path) if name.endswith(".parquet"))
            yield from (os.path.join(path, name) for name in names)
        else:
            yield path


def part_files(output, findings):
    """The parts in the order of their names; anything else that a reader of the folder would see is a finding."""
    parts = []
    for folder, folders, names in os.walk(output):
        folders[:] = [name for name in folders if name[0] not in "_."]
        for name in names:
            if name[0] in "_.":
                continue
            if folder == output and re.fullmatch(r"part-\d{5,}\.parquet", name):
                parts.append(name)
            else:
                findings.add(f"`{os.path.join(folder, name)}` lies beside the parts")
    parts.sort()
    for number, name in enumerate(parts):
        if int(name[5:-8]) != number:
            findings.add(f"part {number} is missing, `{name}` stands in its place")
            break
    return [os.path.join(output, name) for name in parts]


def rows_of(files, columns):
    """Rows as (file, {column: value}), batch by batch."""
    for path in files:
        file = pq.ParquetFile(path)
        missing = [name for name in columns if name not in file.schema_arrow.names]
        if missing:
            raise KeyError(f"`{path}` has no column {', '.join(f'`{name}`' for name in missing)}")
        for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=columns):
            # Selected by name: files need not keep their columns in one order.
            lists = [batch.column(batch.schema.get_field_index(name)).to_pylist() for name in columns]
            if not columns:
                lists = [[None] * batch.num_rows]
            for values in zip(*lists):
                yield path, values


def input_rows(files, carry, limit):
    """Carried values of each input row; without carried columns, only their number."""
    count = 0
    if carry:
        for _, values in rows_of(files, carry):
            if count == limit:
                return
            count += 1
            yield values
        return
    for path in files:
        for _ in range(pq.ParquetFile(path).metadata.num_rows):
            if count == limit:
                return
            count += 1
            yield ()


def same(ours, theirs):
    """Equal values; NaN equals itself."""
    if isinstance(ours, float) and isinstance(theirs, float) and ours != ours and theirs != theirs:
        return True
    return ours == theirs


def check(output, inputs, carry, limit):
    findings = Findings()
    parts = part_files(output, findings)
    wanted = input_rows(inputs, carry, limit)
    statuses = collections.Counter()
    seen = set()
    row_count = 0
    for path, (row, status, *carried) in rows_of(parts, ["row", "status"] + carry):
        name = os.path.basename(path)
        if row in seen:
            findings.add(f"`{name}`: row {row} appears again")
        seen.add(row)
        if row != row_count:
            findings.add(f"`{name}`: row {row} stands where row {row_count} belongs")
        want = next(wanted, None)
        if want is None:
            findings.add(f"`{name}`: row {row} is more than the input has")
        else:
            for column, ours, theirs in zip(carry, carried, want):
                if not same(ours, theirs):
                    findings.add(f"`{name}`: row {row}: `{column}` is {ours!r}, the input has {theirs!r}")
        if status not in STATUSES:
            findings.add(f"`{name}`: row {row}: unknown status {status!r}")
        statuses[status] += 1
        row_count += 1
    missing = sum(1 for _ in wanted)
    if missing:
        findings.add(f"{missing} input rows are missing after row {row_count - 1}")
    if findings.count:
        print(f"wrong: {findings.count} findings over {row_count} rows in {len(parts)} parts")
        return 1
    tally = ", ".join(f"{count} {status}" for status, count in sorted(statuses.items()))
    print(f"right: {row_count} rows in {len(parts)} parts, each input row once and in order ({tally or 'none'})")
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output")
    parser.add_argument("inputs", nargs="+", metavar="INPUT")
    parser.add_argument("--carry", default="", help="carried columns, separated by commas")
    parser.add_argument("--rows", type=int, help="the job took only the first so many rows of the input")
    arguments = parser.parse_args()
    carry = [name for name in arguments.carry.split(",") if name]
    try:
        return check(arguments.output, list(input_files(arguments.inputs)), carry, arguments.rows)
    except (OSError, KeyError, pa.ArrowException) as error:
        print(f"wrong: cannot be read to the end: {error.args[0] if isinstance(error, KeyError) else error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
