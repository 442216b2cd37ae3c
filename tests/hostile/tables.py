"""CSV whose quotes, cells or columns have no end, and files that are a thousand times larger once decompressed."""

import bz2
import gzip

from case import DONE, FAILED_ROWS, REFUSED, Case, Step, answered, job

MIB = 1 << 20


def runs(name, write, bad=(), of=8, says=(), prompt="{{ text }}", seconds=60.0, uri="rows.csv"):
    """`write(file)` writes the table; all rows but the `bad` ones are answered."""
    def make(folder):
        with open(folder / uri, "wb") as file:
            write(file)
        job(folder, input={"uri": uri}, prompt={"text": prompt})
    codes = (FAILED_ROWS,) if bad else (DONE,)
    return Case(name, make, [Step(["run", "job.yaml", "--quiet"], codes=codes, says=says, seconds=seconds)], answered(set(bad), of))


def refused(name, write, says, uri="rows.csv", seconds=60.0):
    def make(folder):
        with open(folder / uri, "wb") as file:
            write(file)
        job(folder, input={"uri": uri}, prompt={"text": "{{ text }}"})
    return Case(name, make, [Step(["plan", "job.yaml"], codes=(REFUSED,), says=(says,), seconds=seconds)])


def among(row, at=3, of=8):
    """A table of one bad row among good ones."""
    return lambda file: file.write(b"id,text\n" + b"".join((row if n == at else b"%d,a ticket" % n) + b"\n" for n in range(of)))


def never_closed(file):
    file.write(b'text\n"')
    file.truncate(1 << 30)


def bomb(pack, times):
    """Members of 16 MB of zeros, one behind the other: one line of `times` times as much."""
    member = pack(bytes(16 * MIB))
    return lambda file: file.writelines([pack(b'{"text": "a ticket"}\n')] + [member] * times)


def cases():
    yield refused("a quote that is never closed over a gigabyte", never_closed, "line 2: a quote that is never closed", seconds=240.0)
    yield refused("zero bytes alone", lambda file: file.truncate(64 * MIB), "the header: a line of")
    yield refused("a header of a hundred thousand columns", lambda file: file.write(b"c," * 100_000 + b"d\n"), "a table has 1 to 4096")
    yield refused("a header of 200 MB", lambda file: file.write(b"x" * (200 * MIB) + b"\n1\n"), "the header: a line of")
    yield refused("quotes alone", lambda file: file.write(b"text\n" + b'"' * (16 * MIB + 1)), "a quote that is never closed")
    yield refused("carriage returns alone", lambda file: file.write(b"text\r" * 1000), "a carriage return that no line feed follows")
    yield runs("a cell of 200 MB", among(b'3,"' + b"x" * (200 * MIB) + b'"'), bad=(3,))
    yield runs("a cell of a hundred million line ends", among(b'3,"' + b"\n" * (100 * MIB) + b'"'), bad=(3,))
    yield runs("a row of a million cells", among(b"," * 1_000_000), bad=(3,))
    yield runs("zero bytes in a cell", among(b"3,a\0b"), bad=(3,))
    yield runs("bytes that are no text", among(b"3,\xff\xfe"), bad=(3,))
    yield runs("quotes that are doubled without end", among(b'3,"' + b'""' * (4 * MIB) + b'"'), bad=(3,), prompt="{{ text }}")
    names = b",".join(b"c%d" % n for n in range(4095)) + b",text\n"
    yield runs("four thousand empty cells a row", lambda file: file.write(names + (b"," * 4095 + b"a\n") * 2000), of=2000,
               prompt="{{ text }} {{ row | length }}", seconds=120.0)
    yield runs("ten million empty lines are no rows", among(b"\n" * (10 * MIB) + b"3,a"), of=8)
    line = "decompressed, it has a line of more than"
    yield refused("a gigabyte in a megabyte of gzip", bomb(lambda text: gzip.compress(text, 9), 64), line, uri="rows.jsonl.gz")
    yield refused("a gigabyte in a kilobyte of bzip2", bomb(bz2.compress, 64), line, uri="rows.jsonl.bz2", seconds=120.0)
    yield refused("a gigabyte of CSV in a megabyte of gzip", bomb(lambda text: gzip.compress(text, 9), 64), line, uri="rows.csv.gz")
    yield refused("gzip that ends in its middle", lambda file: file.write(gzip.compress(b'{"text": "a"}\n' * 9999)[:-20]),
                  "it ends in the middle of its gzip data", uri="rows.jsonl.gz")
    yield refused("text behind gzip", lambda file: file.write(gzip.compress(b'{"text": "a"}\n') + b"more"), "its gzip data",
                  uri="rows.jsonl.gz")
