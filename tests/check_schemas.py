#!/usr/bin/env python3
"""Holds what a job wrote to the files in schemas/. Needs jsonschema and pyarrow.

    check_schemas.py OUTPUT            every record of the ledger in a local output folder, and every row of its parts
    check_schemas.py --message FILE    a message as a broker carries it

Prints how many records and rows conform and exits 0; prints what does not and exits 1.
"""

import json
import os
import sys

import jsonschema
import pyarrow.parquet as pq

SCHEMAS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "schemas")


def validator(name):
    with open(os.path.join(SCHEMAS, f"{name}.schema.json")) as file:
        schema = json.load(file)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def said(errors, what):
    return [f"{what}: {'/'.join(map(str, error.absolute_path))}: {error.message[:300]}" for error in errors]


def ledger(output):
    records = {}
    for folder, _, names in os.walk(output):
        for name in names:
            if name == "_SUCCESS" or name.endswith(".json"):
                path = os.path.join(folder, name)
                with open(path) as file:
                    records[os.path.relpath(path, output)] = json.load(file)
    return records


def main():
    if sys.argv[1] == "--message":
        with open(sys.argv[2]) as file:
            found = said(validator("message").iter_errors(json.load(file)), "message")
        print("\n".join(found) or "1 message")
        return bool(found)
    output = sys.argv[1]
    records = ledger(output)
    found = said(validator("ledger").iter_errors(records), "ledger")
    rows, check = 0, validator("output")
    for name in sorted(os.listdir(output)):
        if name.endswith(".parquet"):
            for row in pq.read_table(os.path.join(output, name)).to_pylist():
                rows += 1
                found += said(check.iter_errors(row), f"{name}, row {row['row']}")
    print("\n".join(found) or f"{len(records)} records and {rows} rows conform")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
