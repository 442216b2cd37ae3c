#!/usr/bin/env python3
"""Tests of make_rows.py and check.py: a right output passes, and each way of being wrong is found.

Prints one line a case and exits 1 where the checker said something else than it should. Needs no gristmill.
"""

import contextlib
import io
import json
import os
import sys
import tempfile

import pyarrow as pa
import pyarrow.parquet as pq

import check
import known
import make_rows

ROWS, SHARD_ROWS, JOB = 700, 100, "0123456789abcdef0123"


def answers(given):
    """The output's own columns for the rows of a table."""
    out = {
        name: []
        for name in ["row", "status", "completion", "error", "prompt_tokens", "completion_tokens", "token_ids"]
    }
    for row, ids in enumerate(given.column("token_ids").to_pylist()):
        value = known.value(ids, 4)
        died = bool(ids) and ids[0] == known.ABORT_ID
        error = "the process died three times" if died else "no value"
        for name, entry in {
            "row": row,
            "status": "succeeded" if value else "errored",
            "completion": value and value[0],
            "error": None if value else error,
            "prompt_tokens": len(ids) if value else None,
            "completion_tokens": 4 if value else None,
            "token_ids": value and value[1],
        }.items():
            out[name].append(entry)
    return out


def right(folder, given):
    """A whole right output, as tables by part, and its `_SUCCESS`."""
    own = answers(given)
    table = pa.table(
        {name: given.column(name) for name in check.CARRIED["parquet"]}
        | {
            name: pa.array(values, pa.list_(pa.int32()) if name == "token_ids" else None)
            for name, values in own.items()
        }
    )
    parts = [table.slice(first, SHARD_ROWS) for first in range(0, ROWS, SHARD_ROWS)]
    success = dict.fromkeys(["invalid_output", "expired", "cancelled"], 0) | {
        "job": JOB,
        "rows": ROWS,
        "parts": len(parts),
        "succeeded": own["status"].count("succeeded"),
        "errored": own["status"].count("errored"),
        "completion_tokens": sum(count or 0 for count in own["completion_tokens"]),
    }
    return parts, success


def write(folder, parts, success, job=JOB):
    os.makedirs(folder)
    for number, part in enumerate(parts):
        if part is None:
            continue
        metadata = {"gristmill.job": job, "gristmill.shard": str(number)}
        pq.write_table(part.replace_schema_metadata(metadata), os.path.join(folder, f"part-{number:05}.parquet"))
    if success is not None:
        with open(os.path.join(folder, "_SUCCESS"), "w") as target:
            json.dump(success, target)


def lines_of(part, given, job=JOB):
    """The result lines of a part's rows."""
    lines = []
    for row in part.to_pylist():
        usage = {name: row[name] for name in ["prompt_tokens", "completion_tokens"]}
        body = {
            "choices": [{"index": 0, "message": {"role": "assistant", "content": row["completion"]}}],
            "usage": usage | {"total_tokens": sum(count or 0 for count in usage.values())},
        }
        line = {
            "id": f"batch_req_{job}_{row['row']}",
            "custom_id": given.column("custom_id")[row["row"]].as_py(),
            "response": {"status_code": 200, "body": body} if row["completion"] else None,
            "error": {"code": row["status"], "message": row["error"]} if row["error"] else None,
        }
        lines.append(json.dumps(line) + "\n")
    return lines


def write_lines(folder, parts, success):
    """Parts as lists of lines."""
    os.makedirs(folder)
    for number, lines in enumerate(parts):
        with open(os.path.join(folder, f"part-{number:05}.jsonl"), "w") as target:
            target.write("".join(lines))
    with open(os.path.join(folder, "_SUCCESS"), "w") as target:
        json.dump(success, target)


def cases_of_lines(parts, foreign):
    """Name, parts, words that a finding must have."""

    def swap(number, part):
        return [part if i == number else p for i, p in enumerate(parts)]

    def changed_line(change):
        at = next(at for at, line in enumerate(parts[2]) if json.loads(line)["response"])
        line = json.loads(parts[2][at])
        change(line)
        return swap(2, [*parts[2][:at], json.dumps(line) + "\n", *parts[2][at + 1 :]])

    yield "lines: right", parts, None
    yield "lines: a line missing", swap(2, parts[2][1:]), "1 rows are missing: [200]"
    yield "lines: a line twice", swap(3, parts[3] + parts[3][-1:]), "1 rows appear twice: [399]"
    yield "lines: two exchanged", swap(0, [parts[0][1], parts[0][0], *parts[0][2:]]), "row 1 stands"
    yield "lines: another job's", swap(1, foreign), "is foreign"
    yield "lines: cut off", swap(6, [*parts[6][:-1], parts[6][-1][:-9]]), "the last line has no end"
    yield "lines: another custom_id", changed_line(lambda line: line.update(custom_id="x")), "`custom_id` is 'x'"
    answer = lambda line: line["response"]["body"]["choices"][0]["message"].update(content="k-0")  # noqa: E731
    yield "lines: a wrong answer", changed_line(answer), "'k-0'"
    usage = lambda line: line["response"]["body"]["usage"].update(total_tokens=1)  # noqa: E731
    yield "lines: a wrong sum", changed_line(usage), "does not add up"


def changed(part, name, place, value):
    """A table with one entry changed."""
    column = part.column(name)
    values = column.to_pylist()
    values[place] = value
    return part.set_column(part.schema.get_field_index(name), name, pa.array(values, column.type))


def cases(parts, success):
    """Name, parts, `_SUCCESS`, words that a finding must have."""
    succeeded = parts[1].column("status").to_pylist().index("succeeded")
    errored = next(i for i, s in enumerate(parts[1].column("status").to_pylist()) if s == "errored")

    def swap(number, part):
        return [part if i == number else p for i, p in enumerate(parts)]

    yield "no _SUCCESS", parts, None, "_SUCCESS` is missing"
    yield "a part missing", swap(2, None), success, "[2] are missing"
    yield "the last part missing", parts[:-1], success, "100 rows are missing"
    yield "a row missing", swap(2, parts[2].slice(1)), success, "1 rows are missing: [200]"
    yield "a row twice", swap(3, pa.concat_tables([parts[3], parts[3].slice(99)])), success, "1 rows appear twice: [399]"
    yield "another order", swap(0, pa.concat_tables([parts[0].slice(1), parts[0].slice(0, 1)])), success, "row 1 stands"
    yield "two parts exchanged", [parts[1], parts[0], *parts[2:]], success, "row 100 stands where row 0"
    yield "a carried value changed", swap(4, changed(parts[4], "number", 7, 42)), success, "row 407: `number`"
    yield "a carried list changed", swap(4, changed(parts[4], "tags", 7, ["zz"])), success, "row 407: `tags`"
    yield "a carried column missing", [p.drop_columns(["note"]) for p in parts], success, "no column `note`"
    yield "a wrong answer", swap(1, changed(parts[1], "completion", succeeded, "k-0")), success, "'k-0'"
    yield "wrong token ids", swap(1, changed(parts[1], "token_ids", succeeded, [1, 2, 3, 4])), success, "token ids"
    yield "a row failed for nothing", swap(1, changed(parts[1], "status", succeeded, "errored")), success, "is errored"
    yield "a bad row answered", swap(1, changed(parts[1], "completion", errored, "k-1")), success, "has no value"
    accused = changed(parts[1], "error", errored, "the process died three times")
    yield "a bad row accused", swap(1, accused), success, "wrongly accused"
    yield "wrong counts", parts, success | {"succeeded": success["succeeded"] - 1}, "`_SUCCESS` counts"
    yield "wrong number of parts", parts, success | {"parts": 8}, "`_SUCCESS` counts"
    yield "another job's parts", parts, success | {"job": "f" * 20}, "is foreign"


def run(output, folder):
    """Exit code and findings of the checker."""
    said = io.StringIO()
    arguments = sys.argv
    sys.argv = ["check.py", output, folder]
    try:
        with contextlib.redirect_stdout(said):
            return check.main(), said.getvalue()
    finally:
        sys.argv = arguments


def main():
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        data = os.path.join(folder, "input")
        make_rows.write(data, ROWS, 3, 7, 5.0, 3)
        again = os.path.join(folder, "again")
        make_rows.write(again, ROWS, 3, 7, 5.0, 3)
        given = check.read_input(data)
        prompts = given.column("token_ids").to_pylist()
        made = {
            "the same seed makes the same rows": given.equals(check.read_input(again)),
            "bad rows are as many as asked for": sum(known.value(ids, 4) is None for ids in prompts) == 35 + 3,
            "abort rows too": sum(bool(ids) and ids[0] == known.ABORT_ID for ids in prompts) == 3,
        }
        for what, holds in made.items():
            print(f"{'ok' if holds else 'WRONG'}: {what}")
            failures += not holds
        parts, success = right(folder, given)
        write(os.path.join(folder, "right"), parts, success)
        code, said = run(os.path.join(folder, "right"), data)
        print(f"{'ok' if code == 0 else 'WRONG'}: a right output: {said.strip()}")
        failures += code != 0
        for number, (name, case_parts, case_success, words) in enumerate(cases(parts, success)):
            output = os.path.join(folder, f"case-{number}")
            write(output, case_parts, case_success)
            code, said = run(output, data)
            found = code == 1 and words in said
            print(f"{'ok' if found else 'WRONG'}: {name}: {said.splitlines()[0] if said else ''}")
            failures += not found
        lines = [lines_of(part, given) for part in parts]
        for number, (name, case_parts, words) in enumerate(cases_of_lines(lines, lines_of(parts[1], given, "f" * 20))):
            output = os.path.join(folder, f"lines-{number}")
            write_lines(output, case_parts, success)
            code, said = run(output, data)
            found = code == 0 if words is None else code == 1 and words in said
            print(f"{'ok' if found else 'WRONG'}: {name}: {said.splitlines()[0] if said else ''}")
            failures += not found
        write(os.path.join(folder, "mixed"), parts[:-1], success)
        with open(os.path.join(folder, "mixed", "part-00006.jsonl"), "w") as target:
            target.write("".join(lines[-1]))
        code, said = run(os.path.join(folder, "mixed"), data)
        found = code == 1 and "parts of 2 kinds" in said
        print(f"{'ok' if found else 'WRONG'}: parts of two kinds")
        failures += not found
        write(os.path.join(folder, "beside"), parts, success)
        open(os.path.join(folder, "beside", "part-00003.parquet#1"), "w").close()
        code, said = run(os.path.join(folder, "beside"), data)
        print(f"{'ok' if code == 1 and 'lies beside' in said else 'WRONG'}: a stage left beside the parts")
        failures += not (code == 1 and "lies beside" in said)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
