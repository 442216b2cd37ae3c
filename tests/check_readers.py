#!/usr/bin/env python3
"""Reads outputs with other tools, by the very lines that docs/output.md shows.

    check_readers.py ROWS=FOLDER...

Each FOLDER holds an output called `out`. Every line of the first block of Python in docs/output.md must give the rows ROWS, each
once; every line of the second must be refused. ROWS: how many rows are published in whole parts, as `row` numbers them,
`0-64,128-192` (ends excluded), or nothing. Needs tests/requirements.txt. Prints a line an output; exits 1 at the first that is
wrong.
"""

import os
import re
import sys
import tempfile
from pathlib import Path

# Before `datasets` is imported: it asks no server for anything, and leaves nothing behind.
SCRATCH = tempfile.TemporaryDirectory()
os.environ.update(HF_HOME=SCRATCH.name, HF_DATASETS_OFFLINE="1", HF_HUB_OFFLINE="1")

import datasets
import duckdb
import pandas
import polars
import pyarrow
import pyarrow.dataset
import pyarrow.parquet

TOOLS = {"duckdb": duckdb, "polars": polars, "pandas": pandas, "pyarrow": pyarrow, "datasets": datasets}


def lines_shown():
    """The lines that read the output, and those that are refused."""
    text = (Path(__file__).parent.parent / "docs/output.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2, f"docs/output.md has {len(blocks)} blocks of Python"
    return [block.splitlines() for block in blocks]


def rows_of(found):
    """The column `row` of whatever a tool gives, sorted."""
    if isinstance(found, polars.LazyFrame):
        found = found.collect()
    if isinstance(found, pyarrow.dataset.Dataset):
        found = found.to_table()
    if isinstance(found, duckdb.DuckDBPyRelation):
        return sorted(row for (row,) in found.select("row").fetchall())
    if isinstance(found, pyarrow.Table):
        return sorted(found.column("row").to_pylist())
    return sorted(found["row"])


def ranges(text):
    """`0-64,128-192` as row numbers."""
    rows = []
    for part in filter(None, text.split(",")):
        start, end = part.split("-")
        rows.extend(range(int(start), int(end)))
    return rows


def check(folder, wanted):
    reads, refused = lines_shown()
    os.chdir(folder)
    for line in reads:
        # Another cache for each: it is keyed by names and times, and tests make folders quickly.
        datasets.config.HF_DATASETS_CACHE = tempfile.mkdtemp(dir=SCRATCH.name)
        try:
            rows = rows_of(eval(line, dict(TOOLS)))
        except ValueError as error:
            # As docs/output.md says, it takes no rows for an error.
            if wanted or "corresponds to no data" not in str(error):
                raise
            rows = []
        if rows != wanted:
            sys.exit(f"{folder}: {line} gives {len(rows)} rows ({len(set(rows))} different), not {len(wanted)}")
    for line in refused:
        try:
            found = eval(line, dict(TOOLS))
            rows = rows_of(found.get("train", found) if isinstance(found, dict) else found)
        except Exception:
            continue
        sys.exit(f"{folder}: {line} is not refused: it gives {len(rows)} rows")
    print(f"{folder}: {len(reads)} ways of reading give {len(wanted)} rows, {len(refused)} are refused")


def main():
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    start = os.getcwd()
    for argument in sys.argv[1:]:
        rows, folder = argument.split("=", 1)
        check(folder, ranges(rows))
        os.chdir(start)


if __name__ == "__main__":
    main()
