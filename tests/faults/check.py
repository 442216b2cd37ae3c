#!/usr/bin/env python3
"""Checks the published output of a fault run by itself: every input row once, in order, with its known answer.

    check.py OUTPUT INPUT [--endpoint URL] [--allow cancelled,expired]

OUTPUT is a folder or an s3:// URL, INPUT a folder of Parquet files by make_rows.py. Reads nothing but the published files
and the input, and shares no code with gristmill. Checks:

- the parts are numbered without gaps, all of the job that `_SUCCESS` names, and nothing else lies beside them;
- the rows of all parts together are the rows of the input, each once, in order;
- carried columns (`id`, `note`, `number`, `tags`) are those of the input; of result lines, `custom_id` is;
- status, completion, token ids and counts are what the known function says; a row that it has no value for is `errored`
  with one line that says why, and no other row is (`--allow` names further statuses that a row may have);
- `_SUCCESS` counts what the parts hold.

Prints one line and exits 0 where all of it holds; else prints the first differences and exits 1.
"""

import argparse
import collections
import json
import os
import re
import sys

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

import known

CARRIED = {"parquet": ["id", "note", "number", "tags"], "jsonl": ["custom_id"]}
FINDINGS_MAX = 20
PART = re.compile(r"part-(\d{5,})\.(parquet|jsonl)")
LINE_ID = re.compile(r"batch_req_([0-9a-f]+)_(\d+)")
# What a line says, beside its `custom_id`.
LINES = pa.schema(
    [
        ("row", pa.int64()),
        ("custom_id", pa.string()),
        ("status", pa.string()),
        ("completion", pa.string()),
        ("error", pa.string()),
        ("prompt_tokens", pa.int64()),
        ("completion_tokens", pa.int64()),
    ]
)


class Findings:
    """Lines that say what is wrong; further ones are only counted."""

    def __init__(self):
        self.count = 0

    def add(self, line):
        self.count += 1
        if self.count <= FINDINGS_MAX:
            print(line)


def visible(path, root):
    names = path[len(root) :].strip("/").split("/")
    return not any(name[:1] in ("_", ".") for name in names)


def parts_of(store, root, findings):
    """Paths of the parts in order, and what they are."""
    infos = store.get_file_info(fs.FileSelector(root, recursive=True))
    parts, kinds = {}, set()
    for info in infos:
        if info.type != fs.FileType.File or not visible(info.path, root):
            continue
        found = PART.fullmatch(info.path[len(root) :].strip("/"))
        if found:
            parts[int(found[1])] = info.path
            kinds.add(found[2])
        else:
            findings.add(f"`{info.path}` lies beside the parts")
    if sorted(parts) != list(range(len(parts))):
        missing = sorted(set(range(max(parts))) - set(parts))
        findings.add(f"parts {missing[:10]} are missing")
    if len(kinds) > 1:
        findings.add(f"there are parts of {len(kinds)} kinds: {sorted(kinds)}")
    return [parts[number] for number in sorted(parts)], next(iter(kinds), "parquet")


def read_lines(path, text, job, findings):
    """The table that result lines are of."""
    if text and not text.endswith("\n"):
        findings.add(f"`{path}`: the last line has no end")
    rows = []
    for line in text.removesuffix("\n").split("\n") if text else []:
        line = json.loads(line)
        named = LINE_ID.fullmatch(line["id"])
        if named is None or (job is not None and named[1] != job):
            findings.add(f"`{path}` is foreign: a line has the id {line['id']}, the job is {job}")
        response, error = line["response"], line["error"]
        body = response and response["body"]
        if body and (response["status_code"], len(body["choices"])) != (200, 1):
            findings.add(f"`{path}`: {line['id']} has a response of another form")
        if body and body["usage"]["total_tokens"] != body["usage"]["prompt_tokens"] + body["usage"]["completion_tokens"]:
            findings.add(f"`{path}`: the usage of {line['id']} does not add up")
        rows.append(
            {
                "row": int(named[2]) if named else -1,
                "custom_id": line["custom_id"],
                "status": error["code"] if error else "succeeded",
                "completion": body and body["choices"][0]["message"]["content"],
                "error": error and error["message"],
                "prompt_tokens": body and body["usage"]["prompt_tokens"],
                "completion_tokens": body and body["usage"]["completion_tokens"],
            }
        )
    return pa.Table.from_pylist(rows, schema=LINES)


def read_parts(store, paths, job, findings):
    tables = []
    for number, path in enumerate(paths):
        with store.open_input_file(path) as source:
            if path.endswith(".jsonl"):
                tables.append(read_lines(path, source.read().decode(), job, findings))
                continue
            file = pq.ParquetFile(source)
            metadata = {k.decode(): v.decode() for k, v in (file.metadata.metadata or {}).items()}
            named = (metadata.get("gristmill.job"), metadata.get("gristmill.shard"))
            if job is not None and named != (job, str(number)):
                findings.add(f"`{path}` is foreign: it names job {named[0]}, shard {named[1]}")
            tables.append(file.read())
    return pa.concat_tables(tables) if tables else None


def check_order(rows, count, findings):
    seen = collections.Counter(rows)
    twice = [row for row, times in seen.items() if times > 1]
    missing = [row for row in range(count) if row not in seen]
    beyond = [row for row in seen if not 0 <= row < count]
    for what, which in [("appear twice", twice), ("are missing", missing), ("are none of the input", beyond)]:
        if which:
            findings.add(f"{len(which)} rows {what}: {sorted(which)[:10]}")
    for place, row in enumerate(rows):
        if row != place:
            findings.add(f"row {row} stands where row {place} belongs")
            break


def check_carried(output, given, kind, findings):
    """Both tables have the same rows."""
    for name in CARRIED[kind]:
        if name not in output.column_names:
            findings.add(f"the output has no column `{name}`")
            continue
        ours, theirs = output.column(name), given.column(name)
        if ours.type != theirs.type:
            findings.add(f"`{name}` is {ours.type}, the input has {theirs.type}")
        if ours.combine_chunks() == theirs.combine_chunks():
            continue
        for row, (mine, want) in enumerate(zip(ours.to_pylist(), theirs.to_pylist())):
            if mine != want:
                findings.add(f"row {row}: `{name}` is {mine!r}, the input has {want!r}")


def check_answers(output, given, allow, findings):
    """Returns the rows by status and the sum of completion tokens."""
    columns = ["status", "completion", "error", "prompt_tokens", "completion_tokens"]
    lists = [output.column(name).to_pylist() for name in columns]
    tokens = output.column("token_ids").to_pylist() if "token_ids" in output.column_names else None
    tally = collections.Counter()
    for row, (ids, status, text, error, prompt_tokens, completion_tokens) in enumerate(
        zip(given.column("token_ids").to_pylist(), *lists)
    ):
        tally[status] += 1
        tally["completion_tokens"] += completion_tokens or 0
        if status in allow and status != "succeeded":
            if text is not None:
                findings.add(f"row {row} is {status} and has the completion {text!r}")
            continue
        want = known.value(ids, completion_tokens or 0)
        if want is None:
            if status != "errored" or text is not None or not error or "\n" in error:
                findings.add(f"row {row} has no value and is {status}: {text!r}, {error!r}")
            accused = "process died" in (error or "")
            if accused != (bool(ids) and ids[0] == known.ABORT_ID):
                findings.add(f"row {row} ({ids}) is wrongly {'accused' if accused else 'pardoned'}: {error!r}")
        elif (status, text, error, prompt_tokens) != ("succeeded", want[0], None, len(ids)):
            findings.add(f"row {row} ({ids}) is {status}: {text!r}, {error!r}, {prompt_tokens}, not {want[0]!r}")
        elif tokens is not None and tokens[row] != want[1]:
            findings.add(f"row {row} ({ids}) has the token ids {tokens[row]}, not {want[1]}")
    return tally


def check_success(success, tally, rows, parts, findings):
    if success.get("rows") != rows or success.get("parts") != parts:
        findings.add(f"`_SUCCESS` counts {success.get('rows')} rows in {success.get('parts')} parts, not {rows} in {parts}")
    for name in ["succeeded", "invalid_output", "errored", "expired", "cancelled", "completion_tokens"]:
        if success.get(name) != tally[name]:
            findings.add(f"`_SUCCESS` counts {success.get(name)} {name}, the parts have {tally[name]}")


def read_input(folder):
    names = sorted(name for name in os.listdir(folder) if name.endswith(".parquet"))
    return pa.concat_tables([pq.read_table(os.path.join(folder, name)) for name in names])


def check(arguments):
    findings = Findings()
    store, root = known.filesystem(arguments.output, arguments.endpoint)
    given = read_input(arguments.input)
    try:
        with store.open_input_file(f"{root}/_SUCCESS") as source:
            success = json.loads(source.read())
    except FileNotFoundError:
        findings.add("`_SUCCESS` is missing")
        success = None
    paths, kind = parts_of(store, root, findings)
    output = read_parts(store, paths, success and success.get("job"), findings)
    if output is None:
        findings.add("there are no parts")
        output = pa.table({"row": pa.array([], pa.int64())})
    check_order(output.column("row").to_pylist(), len(given), findings)
    tally = collections.Counter()
    # Where rows are missing or stand elsewhere, comparing the rest place by place says nothing.
    if not findings.count:
        check_carried(output, given, kind, findings)
        tally = check_answers(output, given, set(arguments.allow.split(",")), findings)
        if success is not None:
            check_success(success, tally, len(given), len(paths), findings)
    if findings.count:
        print(f"wrong: {findings.count} findings over {len(output)} rows in {len(paths)} parts")
        return 1
    counts = ", ".join(f"{count} {name}" for name, count in sorted(tally.items()))
    print(f"right: {len(output)} rows in {len(paths)} parts ({counts})")
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output")
    parser.add_argument("input")
    parser.add_argument("--endpoint", help="http://host:port of the store")
    parser.add_argument("--allow", default="", help="statuses that any row may have, separated by commas")
    arguments = parser.parse_args()
    try:
        return check(arguments)
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        print(f"wrong: cannot be read to the end: {type(error).__name__}: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
