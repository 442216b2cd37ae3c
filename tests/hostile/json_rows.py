"""Lines of JSON that take far more memory than their bytes, are nested without end, or are no JSON."""

from case import DONE, FAILED_ROWS, Case, Step, answered, job, rows

MIB = 1 << 20
GOOD = {"text": "a ticket", "items": []}


def field(value):
    """A line whose `items` are `value` as it stands."""
    return b'{"text": "a ticket", "items": ' + value + b"}"


def repeated(begin, item, end, size):
    """`item` so often that the line has about `size` bytes."""
    return begin + item * (size // len(item)) + end


def among(line, at=3, of=8):
    return [line if row == at else GOOD for row in range(of)]


def runs(name, values, prompt="{{ text }} {{ items | length }}", bad=(3,), of=8, says=(), **fields):
    def make(folder):
        rows(folder, values())
        job(folder, prompt={"messages": [{"role": "user", "content": prompt}]}, **fields)
    codes = (FAILED_ROWS,) if bad else (DONE,)
    return Case(name, make, [Step(["run", "job.yaml", "--quiet"], codes=codes, says=says)], answered(set(bad), of))


def batch_line(number, extra=b""):
    body = b'{"model": "any", "messages": [{"role": "user", "content": "a ticket"}], "max_tokens": 4' + extra + b"}"
    return b'{"custom_id": "%d", "method": "POST", "url": "/v1/chat/completions", "body": %b}' % (number, body)


def cases():
    size = 15 * MIB
    yield runs("numbers of one digit", lambda: among(field(repeated(b"[", b"0,", b"0]", size))))
    yield runs("empty lists", lambda: among(field(repeated(b"[", b"[],", b"0]", size))))
    yield runs("empty objects", lambda: among(field(repeated(b"[", b"{},", b"0]", size))))
    yield runs("objects of one entry", lambda: among(field(repeated(b"[", b'{"a":0},', b"0]", size))))
    yield runs("one key without end", lambda: among(field(repeated(b"{", b'"a":0,', b'"b":0}', size))))
    yield runs("empty texts", lambda: among(field(repeated(b"[", b'"",', b'""]', size))))
    yield runs("commas in a text are no items", lambda: among(field(repeated(b'["', b",", b'"]', size))), bad=())
    yield runs("quotes that are escaped end no text", lambda: among(field(repeated(b'["', b'\\",', b'"]', size))), bad=())
    yield runs("commas alone", lambda: among(repeated(b"{", b",", b"}", size)))
    yield runs("colons alone", lambda: among(repeated(b"{", b":", b"}", size)))
    yield runs("a text that never ends", lambda: among(b'{"text": "' + b"x" * size))
    yield runs("nested a hundred thousand deep", lambda: among(field(b"[" * 100_000 + b"]" * 100_000)))
    yield runs("objects nested a hundred thousand deep", lambda: among(field(b'{"a":' * 100_000 + b"0" + b"}" * 100_000)))
    yield runs("five thousand keys", lambda: among(b'{"text": "x", ' + b", ".join(b'"k%d": 0' % n for n in range(5000)) + b"}"))
    yield runs("a line of seventeen million bytes", lambda: among(field(b'["' + b"x" * (17 * MIB) + b'"]')))
    yield runs("a number of five million digits", lambda: among(field(b"[" + b"1" * (5 * MIB) + b"]")))
    yield runs("bytes that are no text", lambda: among(b'{"text": "\xff\xfe", "items": []}'))
    yield runs("zero bytes", lambda: among(bytes(MIB)))
    heavy = field(repeated(b"[", b"0,", b"0]", MIB))
    yield runs("many lines of half a million items are answered", lambda: [heavy] * 24, bad=(), of=24)
    yield runs("ten million blank lines are no rows", lambda: [b"\n" * (10 * MIB), GOOD, GOOD], bad=(), of=2)

    def batch(folder):
        extra = b', "metadata": {"a": ' + repeated(b"[", b"0,", b"0]", size) + b"}"
        rows(folder, [batch_line(n, extra if n == 3 else b"") for n in range(8)])
        job(folder, prompt=None)
    yield Case("a batch line of millions of items", batch, [Step(["run", "job.yaml", "--quiet"], codes=(FAILED_ROWS,))],
               answered({3}, 8))

    def planned(folder):
        rows(folder, among(field(repeated(b"[", b"0,", b"0]", size))))
        job(folder, prompt={"text": "{{ text }} {{ items | length }}"})
    yield Case("a plan over millions of items", planned, [Step(["plan", "job.yaml"], codes=(DONE,), says=("1 of them broken",))])
