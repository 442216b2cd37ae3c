"""Records of a ledger that nobody wrote so: a job is run by the program, then its records are forged, and commands are run on them."""

import atexit
import base64
import functools
import hashlib
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile

import pyarrow as pa
import pyarrow.parquet as pq

from case import DONE, FAILURE, REFUSED, Case, Step, job, rows

ROWS = 8
HUGE = 1 << 60


@functools.cache
def begun():
    """A folder with a job of two shards that is done. It stays: the record names its input there."""
    program = pathlib.Path(sys.argv[sys.argv.index("--program") + 1]).resolve()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="hostile-records-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    rows(folder, [{"id": number, "text": f"my parcel {number} is late"} for number in range(ROWS)])
    job(folder, shards={"rows": 4}, output={"uri": "out", "carry": ["id"]})
    subprocess.run([program, "run", "job.yaml", "--quiet"], cwd=folder, check=True, capture_output=True)
    return folder


class Ledger:
    """The ledger of a copy of that job."""

    def __init__(self, folder):
        shutil.copytree(begun(), folder, dirs_exist_ok=True)
        self.out = folder / "out"
        self.job = self.out / "_gristmill/job.json"
        self.home = self.out / "_gristmill" / json.loads(self.job.read_text())["job"]

    def unpublish(self, *more):
        """Back to before the parts were published; with `shards`, to before the first row."""
        for path in [*self.out.glob("part-*"), self.out / "_SUCCESS"]:
            path.unlink()
        for name in ("commits", "digests", *more):
            shutil.rmtree(self.home / name)

    def log(self, shard=0):
        return self.home / f"shards/{shard:06}/log/000000.json"

    def data(self, shard=0):
        return next(path for path in (self.home / f"shards/{shard:06}/data").iterdir())

    def commit(self, shard=0):
        return self.home / f"commits/000000/{shard:06}.json"

    def edit(self, path, change):
        record = json.loads(path.read_text())
        change(record)
        path.write_text(json.dumps(record) + "\n")

    def write(self, path, record):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"v": 1, "job": self.home.name} | record) + "\n")


RUN = ["run", "job.yaml", "--quiet"]
REFUSALS = (FAILURE, REFUSED)


def case(name, forge, *steps, start="done", says=(), codes=REFUSALS):
    """`forge(ledger)` changes records of a job that is `done`, `logged` (no part is published) or `planned` (nothing is computed)."""
    def make(folder):
        ledger = Ledger(folder)
        if start != "done":
            ledger.unpublish(*(["shards"] if start == "planned" else []))
        forge(ledger)
    commands = [list(step) for step in steps] or [RUN]
    return Case(name, make, [Step(argv, codes, says) for argv in commands])


def at(record, place, value):
    *path, last = place.split("/")
    for key in path:
        record = record[int(key)] if isinstance(record, list) else record[key]
    if isinstance(record, list):
        record[int(last)] = value
    else:
        record[last] = value


def job_with(**places):
    """The job's record with values at places, `__` for `/`."""
    def forge(ledger):
        def change(record):
            for place, value in places.items():
                at(record, place.replace("__", "/"), value)
        ledger.edit(ledger.job, change)
    return forge


def shard(first_row, count, first):
    return {"first_row": first_row, "rows": count, "segments": [{"input": 0, "first_row": first, "rows": count, "bytes": [0, 10]}]}


def schema_of(field):
    return base64.b64encode(pa.schema([field]).serialize().to_pybytes()).decode()


def many_fields():
    """A schema of 2,000 fields within one, each with a text of its own."""
    field = pa.field("id", pa.int64(), metadata={"k": "x" * 1000})
    return schema_of(pa.field("id", pa.struct([field] * 2000)))


def bomb(path, columns=("row", "status", "completion")):
    """Parquet of some 30 KB whose texts are 8 GB."""
    text = pa.array(["x" * (1 << 20)])
    table = pa.table({name: pa.DictionaryArray.from_arrays(pa.array([0] * 8192, pa.int32()), text) for name in columns})
    pq.write_table(table, path, compression="zstd", use_dictionary=True, store_schema=False)
    return path.read_bytes()


def page_bomb(path):
    """Parquet of a list of 70 million numbers, all the same. Made by a process of its own: what this one takes counts as its children's."""
    made = """if True:
        import sys, pyarrow as pa, pyarrow.parquet as pq
        values = pa.repeat(pa.scalar(7, pa.int32()), 70_000_000)
        column = pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)
        pq.write_table(pa.table({"row": column}), sys.argv[1], compression="zstd", data_page_size=1 << 30, write_batch_size=1 << 28)
    """
    subprocess.run([sys.executable, "-c", made, path], check=True)
    return path.read_bytes()


def data_is(make):
    def forge(ledger):
        new = make(ledger.data())
        ledger.edit(ledger.log(), lambda record: record["data"].update(size=len(new), sha256=hashlib.sha256(new).hexdigest()))
    return forge


def part_is(make):
    def forge(ledger):
        new = make(ledger.out / "part-00000.parquet")
        described = {"size": len(new), "sha256": hashlib.sha256(new).hexdigest()}
        ledger.edit(ledger.commit(), lambda record: record["part"].update(described))
    return forge


def padded(ledger):
    text = ledger.job.read_text().rstrip().removesuffix("}")
    ledger.job.write_text(text + ', "unknown": [' + ",".join(["0"] * 30_000_000) + "]}\n")


def log_with(**places):
    def forge(ledger):
        def change(record):
            for place, value in places.items():
                at(record, place.replace("__", "/"), value)
        ledger.edit(ledger.log(), change)
    return forge


def jobs():
    """The job's own fields, where nothing is computed yet."""
    for name, places, words in (
        ("n-of-four-billion", {"resolved__generate__n": 4_000_000_000}, "`generate.n` is 4000000000"),
        ("n-of-zero", {"resolved__generate__n": 0}, "`generate.n` is 0"),
        ("n-of-2-to-the-36", {"resolved__generate__n": 1 << 36, "columns__columns__samples": 1 << 36}, "job.json"),
        ("temperature-1e300", {"resolved__generate__temperature": 1e300}, "`generate.temperature` is inf"),
        ("max-tokens-of-zero", {"resolved__generate__max_tokens": 0}, "`generate.max_tokens` is 0"),
        ("top-p-of-zero", {"resolved__generate__top_p": 0}, "`generate.top_p` is 0"),
        ("min-length-huge", {"resolved__generate__forbidden__min_length": 4_294_967_295}, "min_length"),
        ("stop-of-nothing", {"resolved__generate__stop": [""]}, "`generate.stop` holds an empty text"),
        ("shards-of-2-to-the-63-rows", {"resolved__shard_rows": 1 << 63}, "`shards.rows`"),
        ("no-messages", {"resolved__prompt__kind": {"messages": []}}, "`prompt.messages` is an empty list"),
        ("samples-of-the-columns", {"columns__columns__samples": 4_000_000_000}, "columns are not those"),
    ):
        yield case(name, job_with(**places), start="planned", says=(words,))
    wide = pa.field("id", pa.binary(2**31 - 1))
    deep = pa.field("id", pa.list_(pa.binary(2**31 - 1), 2**31 - 1))
    for name, text in (("carried-2-gb-a-row", schema_of(wide)), ("carried-4-exabytes-a-row", schema_of(deep))):
        yield case(name, job_with(columns__carry=text), start="planned", says=("bytes a row",))
    yield case("carried-schema-is-no-base64", job_with(columns__carry="%" * 100_000), start="planned", says=("base64",))
    yield case("carried-schema-of-many-fields", job_with(columns__carry=many_fields()), start="planned", says=("id",))
    yield case("thirty-million-zeros", padded, ["status", "out"], RUN, start="planned", says=("job.json",))


def tables():
    """The shard table."""
    for name, table, words in (
        ("overlapping", [shard(0, 4, 0), shard(4, 4, 0)], "does not go on in input 0"),
        ("unsorted", [shard(4, 4, 4), shard(0, 4, 0)], "does not continue"),
        ("a-shard-of-2-to-the-60-rows", [shard(0, HUGE, 0)], "more than 1000000"),
        ("of-another-input", [shard(0, 4, 0) | {"segments": [{"input": 7, "first_row": 0, "rows": 4}]}], "no input"),
        ("negative", [shard(-1, 4, 0)], "job.json"),
        ("rows-that-do-not-match", [shard(0, 4, 0) | {"rows": 5}], "does not continue"),
    ):
        yield case(name, job_with(shards=table), ["status", "out"], ["verify", "out"], RUN, start="planned", says=(words,))
    huge = [shard(0, 1_000_000, 0)]
    forged = job_with(shards=huge, inputs__0__rows=1_000_000)
    yield case("a-million-rows-of-ten-bytes", forged, start="planned", says=("rows",))
    yield case("an-input-of-2-to-the-62-bytes", job_with(inputs__0__size=1 << 62), start="planned")
    backwards = job_with(shards__0__segments__0__bytes=[1 << 40, 3])
    yield case("bytes-that-end-before-they-begin", backwards, start="planned", says=("bytes",))


def others():
    """Log entries, data, commits and all other records."""
    for name, places, words in (
        ("counts-of-2-to-the-60-rows", {"counts": [[0, HUGE]], "tally__succeeded": HUGE}, "log/000000.json"),
        ("counts-that-overlap", {"counts": [[0, 4], [2, 4]]}, "log/000000.json"),
        ("tokens-of-2-to-the-64", {"tally__prompt_tokens": 2**64 - 1}, "log/000000.json"),
        ("data-of-2-to-the-60-bytes", {"data__size": HUGE}, "`data.size`"),
        ("data-elsewhere", {"data__name": "../../../../job.json"}, "`data.name`"),
        ("another-index", {"index": 4_294_967_295}, "log/000000.json"),
    ):
        yield case(name, log_with(**places), ["status", "out"], RUN, start="logged", says=(words,))
    yield case("data-that-unfolds", data_is(bomb), start="logged", says=(".rows", "more than 536870912"))
    yield case("data-of-one-long-list", data_is(page_bomb), start="logged", says=(".rows", "more than 536870912"))
    yield case("data-that-is-no-parquet", data_is(lambda path: path.write_bytes(b"PAR1" * 9) and path.read_bytes()), start="logged",
               says=(".rows",))
    yield case("a-part-that-unfolds", part_is(bomb), ["verify", "out"], says=("part-00000.parquet",), codes=(FAILURE,))
    commit = lambda **places: lambda ledger: ledger.edit(ledger.commit(), lambda r: [at(r, p.replace("__", "/"), v) for p, v in places.items()])  # noqa: E731
    yield case("a-commit-of-2-to-the-60-tokens", commit(tally__cached_tokens=HUGE), ["verify", "out"], says=("000000.json",), codes=(FAILURE,))
    yield case("a-commit-of-another-part", commit(part__name="../../../etc/passwd"), ["verify", "out"], says=("000000",), codes=(FAILURE,))
    forever = {"order": "extend", "index": 0, "nonce": "0" * 20, "budget_usd": None, "deadline_seconds": 2**64 - 1}
    yield case("a-deadline-of-2-to-the-64", lambda ledger: ledger.write(ledger.home / "control/000.json", forever), ["status", "out"], RUN,
               start="logged", says=("control/000.json",))
    note = {"order": "stop", "index": 0, "nonce": "0" * 20, "why": "budget", "note": "x" * (2 << 20)}
    yield case("a-note-of-two-megabytes", lambda ledger: ledger.write(ledger.home / "control/000.json", note), ["status", "out"], RUN,
               start="logged", says=("control/000.json",))
    spend = {"worker": "w", "device_seconds": 1e300}
    yield case("device-time-of-1e300", lambda ledger: ledger.write(ledger.home / "spend/w.json", spend), ["status", "out"], start="logged",
               says=("spend/w.json",))
    attempt = {"shard": 0, "attempt": "0" * 20, "worker": "w", "rows": [[0, HUGE]], "alone": True, "signs_every": 1e300}
    yield case("an-attempt-with-signs-every-1e300",
               lambda ledger: ledger.write(ledger.home / f"shards/000000/attempts/{'0' * 20}.json", attempt), ["status", "out"], RUN,
               start="logged", says=("attempts/",))
    tally = {name: 0 for name in ("succeeded", "invalid_output", "errored", "expired", "cancelled", "prompt_tokens", "cached_tokens",
                                  "completion_tokens")}
    retry = {"generation": 1, "nonce": "0" * 20, "shards": [{"shard": 4_294_967_295, "rows": [[0, HUGE]], "tally": tally | {"errored": HUGE}}]}
    yield case("a-retry-of-2-to-the-60-rows", lambda ledger: ledger.write(ledger.home / "gen/001.json", retry), ["status", "out"],
               ["retry", "out"], RUN, says=("gen/001.json",))
    success = lambda ledger: ledger.edit(ledger.out / "_SUCCESS", lambda record: record.update(seconds=-1e300))  # noqa: E731
    yield case("a-result-after-less-than-no-time", success, ["status", "out"], says=("_SUCCESS",))
    yield case("a-name-that-clears-the-screen", job_with(name="a\x1b[2J\nb"), ["status", "out"], says=("`name` holds control characters",))
    # Nothing is forged: what the cases above begin with is sound.
    yield case("nothing-forged-logged", lambda _: None, RUN, ["verify", "out"], start="logged", codes=(DONE,))
    yield case("nothing-forged-planned", lambda _: None, RUN, ["verify", "out"], start="planned", codes=(DONE,))


def cases():
    yield from jobs()
    yield from tables()
    yield from others()
    for name, url in (("a_web_server", "http://127.0.0.1:9/rows.jsonl"), ("no_bucket", "s3://../rows.jsonl")):
        forge = job_with(inputs__0__url=url)
        yield case(f"verify_reads_{name}", forge, ["verify", "out", "--inputs"], says=(url, ), codes=(REFUSED,))
