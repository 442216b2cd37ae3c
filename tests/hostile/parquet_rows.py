"""Parquet files of kilobytes whose rows take gigabytes once they are decoded, and cells that are no text."""

import pathlib
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
from case import DONE, FAILED_ROWS, Case, Step, answered, job, statuses

MIB = 1 << 20
SMALL_BYTES = 2 * MIB


def table(folder, columns, **options):
    """Writes `rows.parquet`, which must stay small, in one row group."""
    path = folder / "rows.parquet"
    names = list(columns)
    arrays = [value if isinstance(value, (pa.Array, pa.ChunkedArray)) else pa.array(value) for value in columns.values()]
    options = {"compression": "zstd", "write_statistics": False, "row_group_size": 1 << 20} | options
    pq.write_table(pa.table(arrays, names=names), path, **options)
    assert path.stat().st_size < SMALL_BYTES, f"{path.stat().st_size} bytes"


def texts(rows):
    return [f"ticket {row}" for row in range(rows)]


def made_elsewhere(name, folder, make):
    """Has a process of its own make the file: the memory that this takes would count as that of the commands started later."""
    if __name__ == "__main__":
        make(folder)
    else:
        subprocess.run([sys.executable, __file__, name, folder], check=True)


def runs(name, make, prompt="{{ text }}", carry=(), bad=(), of=8, check=None, codes=None, **fields):
    """A job over `rows.parquet`: rows `bad` are errored, all others are answered."""
    def files(folder):
        made_elsewhere(name, folder, make)
        job(folder, input={"uri": "rows.parquet"}, prompt={"messages": [{"role": "user", "content": prompt}]},
            output={"uri": "out", "carry": list(carry)}, **fields)
    codes = codes or ((FAILED_ROWS,) if bad else (DONE,))
    says = ("in memory, more than",) if bad and check is None else ()
    return Case(name, files, [Step(["run", "job.yaml", "--quiet"], codes=codes)], check or says_why(answered(set(bad), of), says))


def says_why(check, texts):
    """As `check`; the errors of the published rows hold `texts`, too."""
    def both(folder):
        check(folder)
        errors = [error for part in sorted((folder / "out").glob("part-*.parquet")) for error in pq.read_table(part)["error"].to_pylist()]
        for text in texts:
            assert any(error and text in error for error in errors), f"no error says `{text}`: {[e for e in errors if e][:3]}"
    return both


def one_large(value, rows=8, at=3, small=None):
    return [value if row == at else (small if small is not None else value[:0]) for row in range(rows)]


def list_of(item, lengths, values=None):
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    values = pa.nulls(offsets[-1], item) if values is None else values
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values)


def zeros(count, item=pa.int8()):
    width = pa.types.is_primitive(item) and item.bit_width // 8
    return pa.Array.from_buffers(item, count, [None, pa.py_buffer(bytes(count * width))])


def repeated(text, count):
    """The same text in `count` rows, in one place of memory."""
    return pa.DictionaryArray.from_arrays(zeros(count, pa.int32()), [text])


def some_answered(least, of):
    """At least so many rows are answered; the others are errored."""
    def check(folder):
        found = statuses(folder)
        assert len(found) == of and set(found) <= {"succeeded", "errored"}, (len(found), set(found))
        assert found.count("succeeded") >= least, f"{found.count('succeeded')} of {of} are answered"
    return check


def spoiled(folder, columns, text=b"spoiled", **options):
    """Writes a file in which `text` has a byte that no UTF-8 has."""
    table(folder, columns, compression="none", **options)
    path = folder / "rows.parquet"
    data = path.read_bytes()
    assert text in data
    path.write_bytes(data.replace(text, text[:2] + b"\xff" + text[3:]))


def with_text(at, rows=8, text="spoiled"):
    return [text if row == at else f"ticket {row}" for row in range(rows)]


def deep(levels, leaf):
    array = leaf
    for level in range(levels):
        array = pa.StructArray.from_arrays([array], [f"level {level}"])
    return array


def cases():
    few = [3 if row != 5 else 30_000_000 for row in range(8)]
    yield runs("zeros in a text", lambda f: table(f, {"text": one_large("\0" * (200 * MIB), small="x")}), "{{ text[:20] }}", bad=[3])
    yield runs("zeros in bytes that are carried", lambda f: table(f, {"text": texts(8), "blob": one_large(bytes(200 * MIB))}), carry=["blob"],
               bad=[3])
    yield runs("one list of thirty million", lambda f: table(f, {"items": list_of(pa.int8(), [30_000_000], zeros(30_000_000))}),
               "{{ items | length }}", bad=[0], of=1, codes=(2,), check=lambda folder: None)
    yield runs("a list of thirty million among others", lambda f: table(f, {"items": list_of(pa.int8(), few, zeros(sum(few)))}),
               "{{ items | length }}", bad=[5])
    yield runs("a list of thirty million nulls", lambda f: table(f, {"items": list_of(pa.int32(), few)}), "{{ items | length }}", bad=[5])
    yield runs("a list of empty lists", lambda f: table(f, {"items": list_of(None, few[:5] + [10_000_000] + few[6:], list_of(
        pa.int8(), [0] * 10_000_021))}), "{{ items | length }}", bad=[5])
    yield runs("a list of structs", lambda f: table(f, {"items": list_of(None, [1] * 5 + [3_000_000, 1, 1], pa.StructArray.from_arrays(
        [zeros(3_000_007), zeros(3_000_007, pa.int64())], ["a", "b"]))}), "{{ items | length }}", bad=[5])
    yield runs("a map of a million entries", lambda f: table(f, {"items": pa.MapArray.from_arrays(
        pa.array([0, 1, 2, 1_000_002, 1_000_003], pa.int32()), zeros(1_000_003, pa.int32()), zeros(1_000_003))}),
        "{{ items | length }}", bad=[2], of=4)
    yield runs("a long list that is carried", lambda f: table(f, {"text": texts(8), "items": list_of(
        pa.int64(), few[:5] + [25_000_000] + few[6:], zeros(25_000_021, pa.int64()))}), carry=["items"], bad=[5])
    large = "x" * MIB
    yield runs("a dictionary's entry in four thousand rows", lambda f: table(f, {"text": repeated(large, 4000)}),
               "{{ text[:20] }}", of=4000, generate={"max_tokens": 1, "temperature": 0})
    yield runs("a carried entry of a dictionary in a thousand rows", lambda f: table(f, {
        "text": texts(1000), "large": repeated(large, 1000)}), carry=["large"], check=some_answered(200, 1000),
        codes=(DONE, FAILED_ROWS), generate={"max_tokens": 1, "temperature": 0})
    yield runs("a dictionary's entry in a list of thousands", lambda f: table(f, {"text": texts(8), "items": list_of(
        None, [1] * 5 + [3000, 1, 1], repeated(large, 3007))}),
        "{{ text }}: {{ items | length }}", bad=[5])
    yield runs("texts that share a long beginning", lambda f: table(f, {"text": [large] * 1000}, use_dictionary=False,
               column_encoding={"text": "DELTA_BYTE_ARRAY"}), "{{ text[:20] }}", of=1000, generate={"max_tokens": 1, "temperature": 0})
    yield runs("null lists of a fixed size", lambda f: table(f, {"text": texts(3), "items": pa.array(
        [None] * 3, pa.list_(pa.int8(), 170_000_000))}), "{{ text }}: {{ items }}", bad=[0, 1, 2], of=3, codes=(2,),
        check=lambda folder: None)
    yield runs("null bytes of a fixed size", lambda f: table(f, {"text": texts(8), "items": pa.array([None] * 8, pa.binary(20_000_000))}),
               "{{ text }}: {{ items }}")
    yield runs("a struct of two thousand fields", lambda f: table(f, {"items": pa.StructArray.from_arrays(
        [pa.nulls(200, pa.int8())] * 2000, [f"field {n}" for n in range(2000)])}), "{{ items | length }}", of=200)
    yield runs("structs sixty deep in a list", lambda f: table(f, {"items": list_of(None, [1, 30_000, 1, 1], deep(58, zeros(30_003)))}),
               "{{ items | length }}", bad=[1], of=4)
    yield runs("twelve columns of thirty million", lambda f: table(f, {"text": texts(8)} | {
        f"c{n}": one_large("\0" * (30 * MIB), small="x") for n in range(12)}),
        "{{ text }} " + " ".join("{{ c%d[:2] }}" % n for n in range(12)), bad=[3])
    yield runs("twenty pages of zeros side by side", lambda f: table(f, {"text": texts(8)} | {
        f"c{n}": one_large("\0" * (48 * MIB), at=n % 8, small="x") for n in range(20)}, data_page_size=1 << 30),
        "{{ text }} " + " ".join("{{ c%d[:2] }}" % n for n in range(20)), bad=list(range(8)), codes=(2,), check=lambda folder: None)
    yield runs("texts of three million are answered", lambda f: table(f, {"text": ["ab" * 1_500_000] * 30}), "{{ text[:20] }}", of=30)

    def planned(folder):
        made_elsewhere("a plan over a dictionary's entry", folder, lambda f: table(f, {"text": repeated(large, 1000)}))
        job(folder, input={"uri": "rows.parquet"}, prompt={"text": "{{ text[:20] }}"})
    yield Case("a plan over a dictionary's entry", planned, [Step(["plan", "job.yaml"], codes=(DONE,), says=("1,000",))])

    for kind, options in [("dictionary", {}), ("plain", {"use_dictionary": False}), ("newer pages", {"data_page_version": "2.0"})]:
        yield runs(f"a cell that is no UTF-8, {kind}", lambda f, options=options: spoiled(f, {"text": with_text(3)}, **options), bad=[3],
                   check=says_why(answered({3}, 8), ["not UTF-8"]))
    yield runs("a text in a list that is no UTF-8", lambda f: spoiled(f, {"text": texts(8), "items": [[t, "b"] for t in with_text(6)]}),
               "{{ text }}: {{ items[0] }}", bad=[6], check=says_why(answered({6}, 8), ["not UTF-8"]))
    yield runs("a carried text that is no UTF-8", lambda f: spoiled(f, {"text": texts(8), "note": pa.array(with_text(2), pa.large_string())}),
               carry=["note"], bad=[2], check=says_why(answered({2}, 8), ["not UTF-8"]))


if __name__ == "__main__":
    next(case for case in cases() if case.name == sys.argv[1]).make(pathlib.Path(sys.argv[2]))
