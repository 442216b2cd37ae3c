"""Arrow files of kilobytes that claim gigabytes, name what is not there, or hold what is no value."""

import random
import struct

import pyarrow as pa
from case import DONE, FAILED_ROWS, REFUSED, Case, Step, answered, job

MIB = 1 << 20


def table(rows=8, **columns):
    return pa.table({"id": list(range(rows)), "text": [f"ticket {n}" for n in range(rows)]} | columns)


def write(path, data, compression=None, chunk=None, stream=False):
    options = pa.ipc.IpcWriteOptions(compression=compression)
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with make(path, data.schema, options=options) as writer:
        writer.write_table(data, max_chunksize=chunk)


def over(name, make, steps, prompt="{{ text }}", carry=(), check=None, uri="rows.arrow"):
    def files(folder):
        make(folder / uri)
        job(folder, input={"uri": uri}, prompt={"text": prompt}, output={"uri": "out", "carry": list(carry)})
    return Case(name, files, steps, check)


def refused(name, make, says, **more):
    return over(name, make, [Step(["run", "job.yaml", "--quiet"], codes=(REFUSED,), says=(says,), seconds=60.0)], **more)


def runs(name, make, bad=(), of=8, says=(), **more):
    codes = (FAILED_ROWS,) if bad else (DONE,)
    return over(name, make, [Step(["run", "job.yaml", "--quiet"], codes=codes, says=says, seconds=120.0)], check=answered(set(bad), of), **more)


def changed(change, **options):
    """A good file after `change` of its bytes."""
    def make(path):
        write(path, table(), **options)
        data = bytearray(path.read_bytes())
        path.write_bytes(bytes(change(data)))
    return make


def claims(length):
    """The first compressed buffer says that it becomes so many bytes."""
    def change(data):
        # An LZ4 frame's magic follows the length.
        at = data.index(struct.pack("<I", 0x184D2204))
        data[at - 8 : at] = struct.pack("<q", length)
        return data
    return change


def footer_claims(length):
    def change(data):
        data[-10:-6] = struct.pack("<i", length)
        return data
    return change


def block_elsewhere(data):
    """The footer's first block lies far behind the file."""
    footer = struct.unpack("<i", data[-10:-6])[0]
    start = len(data) - 10 - footer
    # A block is its offset, the length of its head, padding, and the length of its body.
    for at in range(start, len(data) - 34, 8):
        offset, head, pad, body = struct.unpack_from("<qiiq", data, at)
        if 8 <= offset < start and 0 < head < 4096 and pad == 0 and 0 < body < start:
            struct.pack_into("<q", data, at, 1 << 60)
            return data
    raise AssertionError("no block in the footer")


def words(path):
    """A word of 20 MB that a hundred rows name."""
    text = pa.DictionaryArray.from_arrays(pa.array([0] * 100, pa.int32()), pa.array(["x" * (20 * MIB)]))
    write(path, pa.table({"id": list(range(100)), "text": ["a ticket"] * 100, "long": text}), compression="zstd")


def one_word_too_large(path):
    text = pa.DictionaryArray.from_arrays(pa.array([1, 1, 1, 0, 1, 1, 1, 1], pa.int32()), pa.array(["x" * (200 * MIB), "a ticket"]))
    write(path, pa.table({"id": list(range(8)), "text": text}), compression="zstd")


def nulls(path):
    """A list of a billion nulls, which are no bytes at all."""
    lists = pa.ListArray.from_arrays(pa.array([0, 0, 0, 0, 1 << 30, 1 << 30, 1 << 30, 1 << 30, 1 << 30], pa.int32()), pa.nulls(1 << 30))
    write(path, pa.table({"text": [f"ticket {n}" for n in range(8)], "empty": lists}))


def no_text(path):
    """Bytes of a text that are not UTF-8: the batch is none."""
    bad = pa.StringArray.from_buffers(8, pa.array(range(9), pa.int32()).buffers()[1], pa.py_buffer(b"abc\xffdefg"))
    write(path, pa.table({"id": list(range(8)), "text": bad}))


def offsets_outside(path):
    bad = pa.StringArray.from_buffers(8, pa.array([0, 1, 2, 3, 1 << 30, 5, 6, 7, 8], pa.int32()).buffers()[1], pa.py_buffer(b"abcdefgh"))
    write(path, pa.table({"id": list(range(8)), "text": bad}))


def keys_outside(path):
    keys = pa.array([0, 1, 1 << 30, 0, 0, 0, 0, 0], pa.int32())
    bad = pa.DictionaryArray.from_arrays(keys, pa.array(["a", "b"]), safe=False)
    write(path, pa.table({"id": list(range(8)), "text": bad}))


def union(path):
    values = pa.UnionArray.from_sparse(pa.array([0, 1] * 4, pa.int8()), [pa.array(range(8)), pa.array([str(n) for n in range(8)])])
    write(path, pa.table({"text": [f"ticket {n}" for n in range(8)], "u": values}))


def deep(path):
    kind = pa.int8()
    for _ in range(60):
        kind = pa.list_(kind)
    write(path, pa.table({"text": [f"ticket {n}" for n in range(8)], "d": pa.nulls(8, kind)}))


def dictionaries(count):
    """A column of words, and many others that have a dictionary each."""
    def make(path):
        words = pa.DictionaryArray.from_arrays(pa.array(range(8), pa.int8()), pa.array([f"ticket {n}" for n in range(8)]))
        write(path, pa.table({"text": words} | {f"c{n}": words for n in range(count - 1)}))
    return make


def deltas(count):
    """A dictionary that each batch adds a word to."""
    def make(path):
        words = [f"ticket {n}" for n in range(count + 1)]
        options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
        batches = [pa.record_batch({"text": pa.DictionaryArray.from_arrays(pa.array([n], pa.int16()), pa.array(words[:n + 1]))})
                   for n in range(count + 1)]
        with pa.ipc.new_file(path, batches[0].schema, options=options) as writer:
            for batch in batches:
                writer.write_batch(batch)
    return make


def flipped(seed):
    """Bytes here and there are others; whatever comes of it, the process ends by itself."""
    def change(data):
        dice = random.Random(seed)
        for _ in range(dice.choice([1, 3, 20])):
            data[dice.randrange(len(data))] = dice.randrange(256)
        return data
    return change


def cases():
    gigabytes, both = "more than 536870912", "{{ id }} {{ text }}"
    for length in (1 << 34, 1 << 62):
        yield refused(f"Arrow: a buffer that claims {length} bytes", changed(claims(length), compression="lz4"), gigabytes, prompt=both)
    yield refused("Arrow: a buffer of a negative length", changed(claims(-7), compression="lz4"), "claims -7 bytes", prompt=both)
    yield refused("Arrow: a buffer that is longer than it says", changed(claims(8), compression="lz4"), "cannot be read", prompt=both)
    yield refused("Arrow: a footer of two gigabytes", changed(footer_claims(2**31 - 1)), "its footer claims 2147483647 bytes")
    yield refused("Arrow: a footer of a negative length", changed(footer_claims(-1)), "its footer claims 4294967295 bytes")
    yield refused("Arrow: a block behind the file", changed(block_elsewhere), "that does not lie in it")
    yield refused("Arrow: cut off", changed(lambda data: data[:-40]), "it is truncated, or no Arrow file")
    yield refused("Arrow: the mark alone", changed(lambda data: b"ARROW1"), "too few for an Arrow file")
    yield refused("Arrow: a stream", lambda path: write(path, table(), stream=True), "it is a stream of Arrow messages", uri="rows.arrows")
    yield refused("Arrow: a stream by another name", lambda path: write(path, table(), stream=True), "it is a stream of Arrow messages")
    yield refused("Arrow: bytes that are no text", no_text, "cannot be read")
    yield refused("Arrow: offsets outside of a text", offsets_outside, "cannot be read")
    yield refused("Arrow: keys that no dictionary has", keys_outside, "cannot be read")
    yield refused("Arrow: a union that is carried", union, "it has a column of a union", carry=("u",))
    step = Step(["run", "job.yaml", "--quiet"], codes=(DONE, REFUSED, FAILED_ROWS), seconds=60.0)
    yield over("Arrow: types nested sixty deep", deep, [step], prompt="{{ text }} {{ d }}")
    yield runs("Arrow: a word of 20 MB that a hundred rows name and nobody reads", words, of=100)
    yield runs("Arrow: a word of 20 MB that a hundred rows show", words, of=100, prompt="{{ text }} {{ long | length }}")
    yield runs("Arrow: a word of 200 MB in one row", one_word_too_large, bad=(3,))
    yield runs("Arrow: a list of a billion nulls", nulls, bad=(3,), prompt="{{ text }} {{ empty }}")
    yield runs("Arrow: as many dictionaries as may be", dictionaries(4096))
    yield refused("Arrow: more dictionaries than may be", dictionaries(4097), "it has 4097 blocks of dictionaries, more than 4096")
    yield runs("Arrow: a dictionary that grows as often as it may", deltas(64), of=65)
    yield refused("Arrow: a dictionary that grows too often", deltas(65), "more than 64 dictionaries that add to others")
    for seed in range(24):
        for compression in ("lz4", "zstd"):
            yield over(f"Arrow: flipped bytes {seed}, {compression}", changed(flipped(seed), compression=compression, chunk=3), [step], prompt=both)
