"""Time and memory of `plan` and `submit` over inputs that are many, or that can only be read from their start.

Makes 1,000,000 JSON lines in one gzip file, and 10,000 Parquet files of 100 rows in Hive folders (`day=0` and so on, with 40 columns that no
template uses), then runs `gristmill plan` and `gristmill submit --no-enqueue` over each with the demo model, and over three of the
folders by `input.where`; prints wall seconds, processor seconds and peak resident memory as a Markdown table.

    cargo build --release && .venv/bin/python benches/inputs.py [--rows N] [--files N] [--binary PATH]
"""

import argparse
import gzip
import json
import pathlib
import shutil
import tempfile

import pyarrow as pa
import pyarrow.parquet as pq

from submit import ROOT, measure

FILE_ROWS = 100
SPARE_COLUMNS = 40

JOB = """\
name: inputs
model: {model}
precision: f32
input: {{{input}}}
prompt: {{text: "{{{{ text }}}} ->"}}
generate: {{max_tokens: 4, temperature: 0, choice: [billing, shipping]}}
output: {{uri: {output}, carry: [id]}}
"""


def make_lines(path: pathlib.Path, rows: int) -> None:
    with gzip.open(path, "wt", compresslevel=1) as file:
        for row in range(rows):
            file.write(json.dumps({"id": row, "text": f"ticket {row}" + " word" * 30}) + "\n")


def make_folders(folder: pathlib.Path, files: int) -> None:
    """The same file in every folder."""
    columns = {f"c{n}": pa.array(range(FILE_ROWS)) for n in range(SPARE_COLUMNS)}
    columns |= {"id": pa.array(range(FILE_ROWS)), "text": pa.array(["a ticket"] * FILE_ROWS)}
    one = folder.parent / "one.parquet"
    pq.write_table(pa.table(columns), one)
    data = one.read_bytes()
    for day in range(files):
        place = folder / f"day={day}"
        place.mkdir(parents=True)
        (place / "part.parquet").write_bytes(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--binary", default=str(ROOT / "target/release/gristmill"))
    options = parser.parse_args()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="gristmill-inputs-"))
    try:
        make_lines(folder / "lines.jsonl.gz", options.rows)
        make_folders(folder / "folders", options.files)
        every = options.files * FILE_ROWS
        print("| inputs | command | rows | files | wall s | processor s | peak memory MB |\n|---|---|---|---|---|---|---|")
        for name, input, rows, commands in [
            ("gzip lines", "uri: lines.jsonl.gz", options.rows, ("plan", "submit")),
            ("Hive folders", "uri: folders", every, ("plan", "submit")),
            ("three of the folders", "uri: folders, where: {day: {lt: 3}}", 3 * FILE_ROWS, ("plan",)),
        ]:
            job, output = folder / "job.yaml", folder / "out"
            job.write_text(JOB.format(model=ROOT / "jobs/demo/model", input=input, output=output))
            for command in commands:
                more = ["--preview", "0"] if command == "plan" else ["--no-enqueue"]
                wall, cpu, peak, found = measure([options.binary, command, str(job), "--json", *more])
                assert found["rows"] == rows, found
                print(
                    f"| {name} | `{command}` | {rows:,} | {found['inputs']:,} | {wall:.1f} | {cpu:.1f} | {peak} |",
                    flush=True,
                )
            shutil.rmtree(output, ignore_errors=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
