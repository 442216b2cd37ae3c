#!/usr/bin/env python3
"""Runs a benchmark, shows what it prints, and keeps its tables for benches/README.md.

    benches/keep.py NAME COMMAND…     e.g. benches/keep.py engine cargo bench --bench engine

Every Markdown table that COMMAND prints goes to benches/results/NAME.json, beside the command, commit, date, processor and memory.
In the README a table of it stands under `<!-- table: NAME N -->`, N from 0; `tests/tables.py --write` puts it there.
"""

import json
import pathlib
import subprocess
import sys

from stamp import stamp

ROOT = pathlib.Path(__file__).resolve().parents[1]


def tables(text):
    found, rows = [], []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip().strip("|").split("|")])
        elif rows:
            # The second line is the rule below the head.
            found.append([row for at, row in enumerate(rows) if at != 1])
            rows = []
    return found


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    name, *command = sys.argv[1:]
    # What it was measured by is what stood there before.
    result = stamp(ROOT) | {"command": " ".join(command)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        lines = []
        for line in child.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    if child.returncode:
        sys.exit(child.returncode)
    result["tables"] = tables("".join(lines))
    if not result["tables"]:
        sys.exit("it printed no table")
    (ROOT / f"benches/results/{name}.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
