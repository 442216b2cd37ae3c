"""What an attack of the hostile suite is: files, commands, and how each command must end.

Each module of this folder (but this one and run.py) has a function `cases()` that yields `Case`s of one area. run.py makes a folder for
each case, writes its files there, runs its commands in that folder, and holds how they ended against what the case says.
"""

import dataclasses
import json
import os
import pathlib
import shutil
from collections.abc import Callable

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL = ROOT / "jobs/demo/model"

# Exit codes of README.md.
DONE, FAILURE, REFUSED, FAILED_ROWS = 0, 1, 2, 3


class NotShown(Exception):
    """Raised by a case's `make` where this machine cannot show the attack; it says why."""


@dataclasses.dataclass
class Step:
    """One command. `codes` are the exit codes that are right; `says` are texts that stderr or stdout must hold, `silent` texts that
    neither may."""
    argv: list[str]
    codes: tuple[int, ...] = (REFUSED,)
    says: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    seconds: float = 30.0
    # What is run in place of the program: its path is put behind, unless it runs a copy.
    through: tuple[str, ...] = ()
    runs_copy: bool = False
    # Called with the case's folder before the command.
    before: Callable[[pathlib.Path], None] | None = None
    # Memory beyond what the same command takes for a small healthy job, in MiB.
    memory_mib: int = 1024


@dataclasses.dataclass
class Case:
    """An attack: `make(folder)` writes its files, `steps` run in the folder, `check(folder)` raises AssertionError where what was
    left behind is wrong."""
    name: str
    make: Callable[[pathlib.Path], None]
    steps: list[Step]
    check: Callable[[pathlib.Path], None] | None = None


def model(folder, **changed):
    """A copy of the demo model in `folder/model`, small files copied, weights linked. `changed` maps a file's name, `.` as `__`
    (`tokenizer__json`), to its new text or bytes, or to a function of its parsed JSON."""
    into = folder / "model"
    into.mkdir()
    for path in MODEL.iterdir():
        if path.suffix == ".safetensors":
            os.symlink(path, into / path.name)
        else:
            shutil.copy(path, into / path.name)
    for name, new in changed.items():
        path = into / name.replace("__", ".")
        if callable(new):
            new = json.dumps(new(json.loads(path.read_text())))
        path.write_bytes(new if isinstance(new, bytes) else new.encode())
    return into


def job(folder, name="job.yaml", **fields):
    """A job file. JSON is YAML. Left out: the demo model, F32, `rows.jsonl`, a user message of column `text`, 4 greedy tokens, `out`."""
    whole = {
        "name": "hostile", "model": str(MODEL), "precision": "f32", "input": {"uri": "rows.jsonl"},
        "prompt": {"messages": [{"role": "user", "content": "{{ text }}"}]},
        "generate": {"max_tokens": 4, "temperature": 0}, "output": {"uri": "out"},
    } | fields
    (folder / name).write_text(json.dumps({key: value for key, value in whole.items() if value is not None}))


def rows(folder, values, name="rows.jsonl"):
    """JSON lines; bytes are written as they are."""
    with open(folder / name, "wb") as file:
        for value in values:
            file.write((value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n")


def statuses(folder, out="out"):
    """The status of each row of a job's Parquet parts, in order of `row`."""
    import pyarrow.parquet as pq
    parts = sorted((folder / out).glob("part-*.parquet"))
    found = {}
    for part in parts:
        table = pq.read_table(part, columns=["row", "status"])
        for row, status in zip(table["row"].to_pylist(), table["status"].to_pylist()):
            assert row not in found, f"row {row} is there twice"
            found[row] = status
    return [found[row] for row in sorted(found)]


def answered(bad, of, out="out", allowed=("errored", "invalid_output")):
    """A check: rows `bad` ended with one of the `allowed` statuses, all others of the `of` rows succeeded."""
    def check(folder):
        found = statuses(folder, out)
        assert len(found) == of, f"{len(found)} of {of} rows are published"
        for row, status in enumerate(found):
            right = status in allowed if row in bad else status == "succeeded"
            assert right, f"row {row} is {status}; all: {found[:64]}"
    return check
