#!/usr/bin/env python3
"""Uses `gristmill serve` as its clients do: through OpenAI's own client, and by requests that no client would send.

    .venv/bin/python tests/serve/run.py PROGRAM [--only CASE] [--requests N] [--kills N]

The last line counts the cases. With GRISTMILL_TEST_RABBITMQ or GRISTMILL_TEST_KAFKA in the environment (`services.py env`), batches also go
through a broker to a worker of its own.
"""

import argparse
import collections
import contextlib
import hashlib
import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import uuid

import httpx2 as httpx
import openai
import pyarrow.parquet as pq
from openai.types import Batch, Completion, FileObject
from openai.types.chat import ChatCompletion

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEMO = ROOT / "jobs/demo"
BROKERS = ("GRISTMILL_TEST_RABBITMQ", "GRISTMILL_TEST_KAFKA")
SECONDS_MAX = 240
ENDED = {"completed", "failed", "expired", "cancelled"}
CATEGORIES = [
    "account_access", "account_closure", "billing", "refund", "shipping_delay", "shipping_damage", "defect", "technical",
    "feature_request", "other",
]
# The instruction that the demo model was trained with.
SYSTEM = (
    "You sort support tickets of an online shop. Read the subject and the body of the ticket, ignore quoted mail and small talk, and "
    "answer with exactly one category. The categories are: " + ", ".join(CATEGORIES) + "."
)


def until(what, found, seconds=SECONDS_MAX):
    """The first true value that `found()` gives."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := found():
            return value
        time.sleep(0.1)
    raise AssertionError(f"not within {seconds} s: {what}")


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def tickets(count):
    """The demo's tickets, repeated with other ids where more are wanted."""
    rows = pq.read_table(DEMO / "tickets.parquet").to_pylist()
    for number in range(count):
        row = rows[number % len(rows)]
        yield f"{row['ticket_id']}-{number}", f"{row['subject']}\n\n{row['body']}", row["category"]


def request(custom_id, text, **body):
    """A line of a batch's input that sorts a ticket."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
    body = {
        "model": "demo", "messages": messages, "max_completion_tokens": 8, "temperature": 0,
        "structured_outputs": {"choice": CATEGORIES}, **body,
    }
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def jsonl(lines):
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


class Service:
    """One `gristmill serve`, and further ones over the same store."""

    def __init__(self, folder, program, keys=None, queue=None, store=None, env=None, until_path="/readyz", reconcile_every=2):
        self.folder, self.program = folder, program
        self.port = free_port()
        self.env = os.environ | (env or {})
        self.until_path = until_path
        self.arguments = [
            program, "serve", "--store", store or folder / "store", "--models", folder / "models.yaml", "--listen", str(self.port),
            "--poll", "0.2", "--log-interval", "1", "--reconcile-every", str(reconcile_every),
        ]
        self.arguments += ["--queue", queue] if queue else ["--work", "--device", "cpu"]
        (folder / "models.yaml").write_text(f"models:\n- {{name: demo, model: {DEMO / 'model'}, precision: f32, shards: {{rows: 50}}}}\n")
        if keys:
            lines = [f"- {{tenant: {tenant}, sha256: {hashlib.sha256(key.encode()).hexdigest()}}}\n" for key, tenant in keys.items()]
            (folder / "keys.yaml").write_text("keys:\n" + "".join(lines))
            self.arguments += ["--keys", folder / "keys.yaml"]
        self.process = None
        self.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def start(self):
        log = open(self.folder / "serve.log", "ab")
        self.process = subprocess.Popen(self.arguments, stdout=log, stderr=log, env=self.env, start_new_session=True)
        until("the service answers", lambda: self.answers(self.until_path), 60)

    def answers(self, path):
        if self.process.poll() is not None:
            raise AssertionError(f"the service ended: {(self.folder / 'serve.log').read_text()[-2000:]}")
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(self.url + path, timeout=2).status_code == 200

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self):
        if self.process.poll() is None:
            self.process.terminate()
            assert self.process.wait(60) == 6, "a stopped service ends with the code for interrupted"

    def client(self, key="none", **options):
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, **options)


@contextlib.contextmanager
def service(program, **options):
    with tempfile.TemporaryDirectory(prefix="gristmill-serve-") as folder:
        one = Service(pathlib.Path(folder), program, **options)
        try:
            yield one
        except BaseException:
            print((one.folder / "serve.log").read_text()[-4000:], file=sys.stderr)
            raise
        finally:
            if one.process.poll() is None:
                one.kill()


def submit(client, lines, **options):
    file = client.files.create(file=("requests.jsonl", lines if isinstance(lines, bytes) else jsonl(lines)), purpose="batch")
    assert isinstance(file, FileObject)
    options = {"endpoint": "/v1/chat/completions", "completion_window": "24h"} | options
    return client.batches.create(input_file_id=file.id, **options)


def wait(client, batch, seconds=SECONDS_MAX):
    """The ended batch. Its states must come in the documented order."""
    seen = [batch.status]

    def ended():
        now = client.batches.retrieve(batch.id)
        assert isinstance(now, Batch)
        if now.status != seen[-1]:
            seen.append(now.status)
        return now if now.status in ENDED else None

    ended = until(f"batch {batch.id} ends", ended, seconds)
    order = ["validating", "in_progress", "finalizing", "cancelling"]
    places = [order.index(status) for status in seen[:-1]]
    assert places == sorted(places), seen
    return ended


def lines_of(client, file_id):
    content = client.files.content(file_id).read()
    size = client.files.retrieve(file_id).bytes
    assert len(content) == size, (len(content), size)
    return [json.loads(line) for line in content.splitlines()]


def check_answers(client, batch, lines):
    """Each request has one line in the two files, and each answer is valid by the client's own types. Returns both files' lines."""
    answers = lines_of(client, batch.output_file_id) if batch.output_file_id else []
    errors = lines_of(client, batch.error_file_id) if batch.error_file_id else []
    found = collections.Counter(line["custom_id"] for line in answers + errors)
    assert found == collections.Counter(line["custom_id"] for line in lines), "each custom_id once"
    for answer in answers:
        assert answer["error"] is None and answer["response"]["status_code"] == 200, answer
        kind = ChatCompletion if batch.endpoint.endswith("chat/completions") else Completion
        body = kind.model_validate(answer["response"]["body"], strict=True)
        assert body.model == "demo" and body.usage.total_tokens > 0, body
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (len(lines), len(answers), len(errors)), counts
    return answers, errors


def round_trip(program, args):
    """Uploads, waits and downloads with the official client; two answers to one request that is wrong within its body."""
    with service(program) as one:
        client = one.client()
        assert [model.id for model in client.models.list()] == ["demo"]
        assert client.models.retrieve("demo").id == "demo"
        rows = list(tickets(args.requests))
        lines = [request(id, text) for id, text, _ in rows]
        lines[3]["body"]["frequency"] = 1
        lines[5]["body"]["messages"][1]["content"] = "too long " * 5000
        batch = submit(client, lines, metadata={"night": "1"})
        assert batch.status == "validating" and batch.metadata == {"night": "1"}
        ended = wait(client, batch)
        assert ended.status == "completed" and ended.model == "demo", ended
        answers, errors = check_answers(client, ended, lines)
        wrong = {line["custom_id"]: line["response"] for line in errors}
        assert set(wrong) == {lines[3]["custom_id"], lines[5]["custom_id"]}
        assert all(response["status_code"] == 400 for response in wrong.values())
        assert "frequency" in wrong[lines[3]["custom_id"]]["body"]["error"]["message"]
        right = dict((id, category) for id, _, category in rows)
        equal = sum(right[line["custom_id"]] == line["response"]["body"]["choices"][0]["message"]["content"] for line in answers)
        assert equal / len(answers) > 0.9, f"{equal} of {len(answers)} are right"
        assert ended.usage.input_tokens == sum(line["response"]["body"]["usage"]["prompt_tokens"] for line in answers)
        assert ended.usage.output_tokens == sum(line["response"]["body"]["usage"]["completion_tokens"] for line in answers)
        times = [ended.created_at, ended.in_progress_at, ended.finalizing_at, ended.completed_at]
        assert times == sorted(times) and ended.expires_at == ended.created_at + 86400, times
        one.stop()
        return f"{len(answers)} answers, {equal} of them right, {len(errors)} errors"


def text_completions(program, args):
    """The other endpoint, and several answers per request."""
    with service(program) as one:
        client = one.client()
        body = {"model": "demo", "prompt": "Refund", "max_tokens": 4, "n": 2, "seed": 1, "temperature": 1}
        lines = [{"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": body} for n in range(5)]
        ended = wait(client, submit(client, lines, endpoint="/v1/completions"))
        answers, _ = check_answers(client, ended, lines)
        assert all(len(line["response"]["body"]["choices"]) == 2 for line in answers)


def broken_lines(program, args):
    """One broken line fails the whole batch before anything runs."""
    with service(program) as one:
        client = one.client()
        good = [request(id, text) for id, text, _ in tickets(3)]
        for content, code, line in [
            (jsonl(good) + b"{\n", "invalid_json_line", 4),
            (jsonl([*good, good[0]]), "duplicate_custom_id", 4),
            (jsonl([*good, request("x", "y", model="other")]), "model_mismatch", 4),
            (jsonl([request("x", "y", model="other")]), "model_not_found", 1),
            (jsonl([good[0] | {"url": "/v1/completions"}]), "url_mismatch", 1),
            (b"\n", "empty_file", None),
            (bytes(range(256)), "invalid_json_line", 1),
        ]:
            ended = wait(client, submit(client, content))
            assert ended.status == "failed" and ended.failed_at and not ended.output_file_id, ended
            assert [(error.code, error.line) for error in ended.errors.data][:1] == [(code, line)], ended.errors
        store = one.folder / "store/tenants/default/work"
        assert not list(store.glob("*/output")), "nothing ran"


def kept_lines(program, args):
    """With `invalid_lines: error`, broken lines are lines of the error file, and the others are answered."""
    with service(program) as one:
        client = one.client()
        good = [request(id, text) for id, text, _ in tickets(120)]
        wrong_url = request("w", "x") | {"url": "/v1/embeddings"}
        broken = [b"{\n", jsonl([wrong_url]), jsonl([good[0]]), jsonl([request("m", "x", model="other")]), b"\xff\n"]
        content = b"".join([broken[0], jsonl(good[:60]), *broken[1:4], jsonl(good[60:]), broken[4]])
        ended = wait(client, submit(client, content, extra_body={"invalid_lines": "error"}))
        counts = ended.request_counts
        assert ended.status == "completed" and (counts.total, counts.completed, counts.failed) == (125, 120, 5), ended
        answers = lines_of(client, ended.output_file_id)
        assert [line["custom_id"] for line in answers] == [line["custom_id"] for line in good]
        errors = [(line["custom_id"], line["response"]["body"]["error"]["code"]) for line in lines_of(client, ended.error_file_id)]
        assert errors == [
            (None, "invalid_json_line"), ("w", "url_mismatch"), (good[0]["custom_id"], "duplicate_custom_id"), ("m", "model_mismatch"),
            (None, "invalid_json_line"),
        ], errors
        size = len(client.files.content(ended.error_file_id).content)
        assert client.files.retrieve(ended.error_file_id).bytes == size
        # Nothing is good, nothing is broken.
        failed = wait(client, submit(client, b"{\n[\n", extra_body={"invalid_lines": "error"}))
        assert failed.status == "failed" and len(failed.errors.data) == 2, failed
        whole = wait(client, submit(client, good[:3], extra_body={"invalid_lines": "error"}))
        assert whole.status == "completed" and whole.error_file_id is None, whole
        assert not list((one.folder / f"store/tenants/default/work/{whole.id}").glob("*.jsonl")), "no copy without need"


def early_output(program, args):
    """With `early_output`, answers can be fetched while the batch runs, each byte once."""
    with service(program) as one:
        client = one.client()
        lines = [request(id, text) for id, text, _ in tickets(2_000)]
        batch = submit(client, lines, extra_body={"early_output": True})
        running = until("it has a file", lambda: (found := client.batches.retrieve(batch.id)).output_file_id and found)
        output, got, reads = running.output_file_id, b"", 0
        assert running.error_file_id and running.error_file_id != output
        while True:
            status = client.batches.retrieve(batch.id).status
            got_before = len(got)
            try:
                raw = client.files.with_raw_response.content(output, extra_headers={"Range": f"bytes={len(got)}-"})
                assert raw.status_code == 206, raw.status_code
                got += raw.content
            except openai.APIStatusError as error:
                assert error.status_code == 416, error
            reads += len(got) > got_before
            if status in ENDED:
                break
            time.sleep(0.3)
        ended = client.batches.retrieve(batch.id)
        assert ended.status == "completed" and ended.output_file_id == output and ended.error_file_id is None, ended
        assert got == client.files.content(output).content and client.files.retrieve(output).bytes == len(got)
        assert [json.loads(line)["custom_id"] for line in got.splitlines()] == [line["custom_id"] for line in lines]
        refused(openai.NotFoundError, lambda: client.files.content(running.error_file_id))
        assert reads > 1, "answers came before the end"
        part = client.files.with_raw_response.content(output, extra_headers={"Range": "bytes=5-9"})
        assert part.content == got[5:10] and part.headers["content-range"] == f"bytes 5-9/{len(got)}"
        source = client.files.with_raw_response.content(ended.input_file_id, extra_headers={"Range": "bytes=-7"})
        assert source.status_code == 206 and source.content == jsonl(lines)[-7:]
        # A batch that is refused has no files.
        failed = wait(client, submit(client, b"{", extra_body={"early_output": True}))
        assert failed.status == "failed" and failed.output_file_id is None
        return f"{reads} reads"


def cancel(program, args):
    """A batch is cancelled in the middle: finished answers stay, all other requests say so."""
    with service(program) as one:
        client = one.client()
        lines = [request(id, text) for id, text, _ in tickets(10_000)]
        batch = submit(client, lines)
        until("some are done", lambda: client.batches.retrieve(batch.id).request_counts.completed > 0)
        refused(openai.ConflictError, lambda: client.files.delete(batch.input_file_id))
        cancelling = client.batches.cancel(batch.id)
        assert cancelling.status in ("cancelling", "cancelled") and cancelling.cancelling_at
        ended = wait(client, cancelling)
        assert ended.status == "cancelled" and ended.cancelled_at, ended
        answers, errors = check_answers(client, ended, lines)
        assert answers and errors, (len(answers), len(errors))
        assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}
        refused(openai.ConflictError, lambda: client.batches.cancel(batch.id))
        # One that has not begun.
        file = client.files.create(file=("x.jsonl", jsonl(lines)), purpose="batch")
        other = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        client.batches.cancel(other.id)
        assert wait(client, other).status == "cancelled"
        return f"{len(answers)} answers before the cancellation"


def turns(program, args):
    """Batches take turns: a small one ends while a large one runs, and so does one that is cancelled."""
    with service(program) as one:
        client = one.client()
        large = submit(client, [request(id, text) for id, text, _ in tickets(40_000)])
        until("the large one runs", lambda: client.batches.retrieve(large.id).status == "in_progress")
        lines = [request(id, text) for id, text, _ in tickets(200)]
        ended = wait(client, submit(client, lines))
        assert ended.status == "completed", ended
        check_answers(client, ended, lines)
        small = submit(client, lines)
        client.batches.cancel(small.id)
        assert wait(client, small).status in ("cancelled", "completed")
        assert client.batches.retrieve(large.id).status == "in_progress", "it ended before the small ones"
        client.batches.cancel(large.id)
        assert wait(client, large).status == "cancelled"


def expiry(program, args):
    """What did not run within the completion window is `batch_expired`."""
    with service(program) as one:
        client = one.client()
        lines = [request(id, text) for id, text, _ in tickets(20 * args.requests)]
        ended = wait(client, submit(client, lines, completion_window="3s"))
        assert ended.status == "expired" and ended.expired_at, ended
        _, errors = check_answers(client, ended, lines)
        assert {line["error"]["code"] for line in errors} == {"batch_expired"}


def retries(program, args):
    """A repeated request creates one batch; two equal requests that are no repetition create two."""
    with service(program) as one:
        client = one.client(max_retries=0)
        file = client.files.create(file=("x.jsonl", jsonl([request("a", "b")])), purpose="batch")

        def create(**options):
            return client.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", **options
            ).id

        first, second = create(), create()
        assert first != second, "two requests"
        again = create(extra_headers={"x-stainless-retry-count": "1"})
        assert again == second, "a repeated request"
        other = create(metadata={"a": "b"}, extra_headers={"x-stainless-retry-count": "1"})
        assert other not in (first, second), "another body is no repetition"
        key = {"Idempotency-Key": "k1"}
        keyed = create(extra_headers=key)
        assert keyed not in (first, second) and create(extra_headers=key) == keyed
        refused(openai.ConflictError, lambda: create(metadata={"a": "c"}, extra_headers=key))
        # The client's own retry, after a response that was lost.
        lost = threading.Event()

        class LosesFirst(httpx.HTTPTransport):
            def handle_request(self, sent):
                response = super().handle_request(sent)
                if sent.url.path.endswith("/batches") and not lost.is_set():
                    lost.set()
                    response.read()
                    raise httpx.ReadTimeout("lost", request=sent)
                return response

        losing = one.client(max_retries=2, http_client=httpx.Client(transport=LosesFirst()))
        before = {batch.id for batch in client.batches.list(limit=100)}
        options = {"endpoint": "/v1/chat/completions", "completion_window": "48h"}
        created = losing.batches.create(input_file_id=file.id, **options).id
        after = {batch.id for batch in client.batches.list(limit=100)}
        assert lost.is_set() and after - before == {created}, (before, after, created)


def lists(program, args):
    """Pages, newest first; files by purpose and in the other order; deletion."""
    with service(program) as one:
        client = one.client()
        files = [client.files.create(file=(f"{n}.jsonl", jsonl([request("a", "b")])), purpose="batch").id for n in range(5)]
        assert [file.id for file in client.files.list()] == files[::-1]
        assert [file.id for file in client.files.list(order="asc", limit=2)] == files, "the client follows the pages"
        page = client.files.list(limit=2, after=files[4])
        assert [file.id for file in page.data] == [files[3], files[2]] and page.has_next_page()
        assert not client.files.list(purpose="vision").data
        options = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batches = [client.batches.create(input_file_id=file, **options).id for file in files]
        assert [batch.id for batch in client.batches.list(limit=2)] == batches[::-1]
        for batch in batches:
            wait(client, client.batches.retrieve(batch))
        assert len(client.files.list(purpose="batch_output").data) == 5
        assert client.files.content(files[0]).read() == jsonl([request("a", "b")])
        assert client.files.delete(files[0]).deleted
        assert not list((one.folder / "store").rglob(f"{files[0]}*")), "its content is gone, too"
        for gone in (client.files.retrieve, client.files.content, client.files.delete):
            refused(openai.NotFoundError, lambda gone=gone: gone(files[0]))


def uploads(program, args):
    """A file in parts, as the client's own helper sends it; a repeated completion, a wrong MD5, a cancelled upload."""
    with service(program) as one:
        client = one.client()
        lines = [request(id, text) for id, text, _ in tickets(max(args.requests, 100))]
        content = jsonl(lines)
        upload = client.uploads.upload_file_chunked(
            file=content, filename="requests.jsonl", bytes=len(content), mime_type="application/jsonl", purpose="batch",
            part_size=30_000, md5=hashlib.md5(content).hexdigest(),
        )
        assert upload.status == "completed" and upload.file.bytes == len(content), upload
        assert client.files.content(upload.file.id).read() == content
        batch = client.batches.create(input_file_id=upload.file.id, endpoint="/v1/chat/completions", completion_window="24h")
        check_answers(client, wait(client, batch), lines)

        def begin(size):
            return client.uploads.create(bytes=size, filename="x", mime_type="application/jsonl", purpose="batch").id

        one_upload = begin(4)
        parts = [client.uploads.parts.create(one_upload, data=half).id for half in (b"cd", b"ab")][::-1]
        for wrong in ({"part_ids": parts[:1]}, {"part_ids": parts, "md5": "0" * 32}, {"part_ids": [parts[0], "part_x"]}):
            refused(openai.BadRequestError, lambda wrong=wrong: client.uploads.complete(one_upload, **wrong))
        first = client.uploads.complete(one_upload, part_ids=parts, md5=hashlib.md5(b"abcd").hexdigest())
        assert client.uploads.complete(one_upload, part_ids=parts).file.id == first.file.id, "a repeated request"
        assert client.files.content(first.file.id).read() == b"abcd"
        refused(openai.ConflictError, lambda: client.uploads.complete(one_upload, part_ids=parts[::-1]))
        refused(openai.ConflictError, lambda: client.uploads.cancel(one_upload))
        refused(openai.ConflictError, lambda: client.uploads.parts.create(one_upload, data=b"x"))
        other = begin(2)
        part = client.uploads.parts.create(other, data=b"ab").id
        assert client.uploads.cancel(other).status == "cancelled"
        refused(openai.ConflictError, lambda: client.uploads.complete(other, part_ids=[part]))
        left = [path for path in (one.folder / "store/tenants/default/uploads").rglob("part_*")]
        assert not left, f"parts of ended uploads are removed: {left}"


def refused(error, call):
    """The call must end with this error."""
    try:
        call()
    except error:
        return
    raise AssertionError(f"no {error.__name__}")


def tenants(program, args):
    """Keys: an unknown one is refused, and what another tenant has is not there."""
    with service(program, keys={"sk-a": "a", "sk-b": "b"}) as one:
        first, second = one.client("sk-a"), one.client("sk-b")
        batch = wait(first, submit(first, [request("a", "b")]))
        for call in (
            lambda: second.batches.retrieve(batch.id),
            lambda: second.batches.cancel(batch.id),
            lambda: second.files.content(batch.output_file_id),
            lambda: second.files.delete(batch.input_file_id),
        ):
            refused(openai.NotFoundError, call)
        assert not second.batches.list().data and not second.files.list().data
        file = batch.input_file_id
        refused(
            openai.BadRequestError,
            lambda: second.batches.create(input_file_id=file, endpoint="/v1/chat/completions", completion_window="24h"),
        )
        for key in ("sk-c", "", "sk-"):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            found = httpx.get(f"{one.url}/v1/batches", headers=headers)
            assert found.status_code == 401, (key, found.text)


def odd_requests(program, args):
    """Requests that no client sends are answered in the API's own form, and never with a 5xx."""
    with service(program) as one:
        answers = 0
        form = "multipart/form-data; boundary=b"
        part = b'--b\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\n{}\r\n'
        purpose = b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        with httpx.Client(base_url=one.url, timeout=60) as http:
            for method, path, content, kind, status in [
                ("GET", "/", None, None, 200),
                ("POST", "/", None, None, 405),
                ("GET", "/v1", None, None, 404),
                ("GET", "/v1/files/..%2f..%2fetc%2fpasswd", None, None, 404),
                ("GET", "/v1/files/file-%00", None, None, 404),
                ("GET", "/v1/files/%ff", None, None, 404),
                ("GET", "/v1/files/" + "x" * 5000, None, None, 404),
                ("GET", "/v1/batches/batch_00000000000000000000000000", None, None, 404),
                ("PATCH", "/v1/files", None, None, 405),
                ("DELETE", "/v1/batches", None, None, 405),
                ("GET", "/v1/batches?limit=0", None, None, 400),
                ("GET", "/v1/batches?limit=1e9", None, None, 400),
                ("GET", "/v1/batches?after=x", None, None, 400),
                ("GET", "/v1/files?order=up", None, None, 400),
                ("GET", "/v1/files?x=%ff", None, None, 400),
                ("POST", "/v1/batches", b"", "application/json", 400),
                ("POST", "/v1/batches", b"{", "application/json", 400),
                ("POST", "/v1/batches", b"[" * 100_000, "application/json", 400),
                ("POST", "/v1/batches", b"{}" + b" " * 1_000_000, "application/json", 413),
                ("POST", "/v1/files", b"", "application/json", 400),
                ("POST", "/v1/files", b"", form, 400),
                ("POST", "/v1/files", part + b"--b--\r\n", form, 400),
                ("POST", "/v1/files", purpose + b"--b--\r\n", form, 400),
                ("POST", "/v1/files", part + purpose, form, 400),
                ("POST", "/v1/files", part + part + purpose + b"--b--\r\n", form, 400),
                ("POST", "/v1/files", part.replace(b'"file"', b'"other"') + purpose + b"--b--\r\n", form, 400),
                ("POST", "/v1/files", part + purpose.replace(b"batch", b"vision") + b"--b--\r\n", form, 400),
                ("POST", "/v1/files", part + purpose + b"--b--\r\n", form, 200),
                ("POST", "/v1/files", purpose + part + b"--b--\r\n", form, 200),
            ]:
                headers = {"content-type": kind} if kind else {}
                found = http.request(method, path, content=content, headers=headers)
                assert found.status_code == status, (method, path[:60], content and content[:60], found.status_code, found.text[:300])
                assert found.headers["x-request-id"].startswith("req_"), found.headers
                if status >= 400:
                    error = found.json()["error"]
                    assert set(error) == {"message", "type", "param", "code"} and error["message"], error
                answers += 1
            # A field's headers without an end, and a part that is larger than OpenAI allows.
            endless = b'--b\r\ncontent-disposition: form-data; name="' + b"x" * (40 << 20)
            found = http.post("/v1/files", content=endless, headers={"content-type": form})
            assert found.status_code == 400 and "ended early" in found.text, found.text
            upload = http.post("/v1/uploads", json={"bytes": 9, "filename": "x", "mime_type": "x", "purpose": "batch"}).json()["id"]
            large = part.replace(b'"file"', b'"data"').replace(b"{}", b"x" * ((64 << 20) + 1)) + b"--b--\r\n"
            found = http.post(f"/v1/uploads/{upload}/parts", content=large, headers={"content-type": form})
            assert found.status_code == 413, found.text
        content = list((one.folder / "store/tenants/default/content").iterdir())
        assert len(content) == 2, f"refused uploads leave nothing: {content}"
        # Bytes that are no HTTP, a request that ends early, and a body that stays away.
        for sent in (b"\x00\xff" * 100 + b"\r\n\r\n", b"GET /v1/files HTTP/1.1\r\nhost", b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 10_000):
            with socket.create_connection(("127.0.0.1", one.port), 5) as raw:
                with contextlib.suppress(OSError):
                    raw.sendall(sent)
                    raw.shutdown(socket.SHUT_WR)
                    raw.settimeout(40)
                    raw.recv(65536)
        assert one.answers("/readyz")
        return f"{answers} requests"


def kills(program, args):
    """The service and its worker die again and again: each request is answered once, and nothing is computed twice beyond a log interval."""
    with service(program) as one:
        client = one.client(max_retries=10)
        lines = [request(id, text) for id, text, _ in tickets(args.requests)]
        done = threading.Event()
        killed = []

        def killer():
            rng = random.Random(7)
            while len(killed) < args.kills and not done.is_set():
                time.sleep(rng.uniform(0.05, 1.5))
                one.kill()
                killed.append(time.monotonic())
                one.start()

        thread = threading.Thread(target=killer)
        thread.start()
        try:
            batches = []
            for _ in range(3):
                batches.append(persistent(lambda: submit(client, lines)))
            ended = [persistent(lambda batch=batch: wait(client, batch)) for batch in batches]
            thread.join()
        finally:
            done.set()
            thread.join()
        assert all(batch.status == "completed" for batch in ended), ended
        for batch in ended:
            check_answers(client, batch, lines)
        found = {batch.id for batch in client.batches.list(limit=100)}
        assert {batch.id for batch in batches} <= found
        until("no batch is open", lambda: not list((one.folder / "store/open").rglob("batch_*")))
        return f"{len(killed)} kills, {len(found)} batches"


def persistent(call, seconds=SECONDS_MAX):
    """Repeats a call whose connection breaks, as a client's own loop would."""
    end = time.monotonic() + seconds
    while True:
        try:
            return call()
        except (openai.APIConnectionError, openai.InternalServerError, httpx.HTTPError):
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


def broker_queue():
    """An address of a new queue; `None`: there is no broker."""
    found = [os.environ[name] for name in BROKERS if name in os.environ]
    if not found:
        return None
    address = found[0] if "://" in found[0] else f"kafka://{found[0]}"
    return f"{address}/serve-{uuid.uuid4().hex[:8]}"


class Worker:
    """A `gristmill worker` of the demo model."""

    def __init__(self, program, queue, folder, env=None, extra=()):
        self.command = [program, "worker", "--queue", queue, "--model", DEMO / "model", "--precision", "f32", "--device", "cpu"]
        self.command += ["--log-interval", "1", "--quiet", *extra]
        self.folder, self.env = folder, os.environ | (env or {})
        self.start()

    def start(self):
        log = open(self.folder / "worker.log", "ab")
        self.process = subprocess.Popen(self.command, stdout=log, stderr=log, env=self.env, start_new_session=True)

    def kill(self):
        self.process.kill()
        self.process.wait()


def broker(program, args):
    """Two services over one store and a broker, with a worker elsewhere."""
    queue = broker_queue()
    if not queue:
        return "skipped: no broker"
    with service(program, queue=queue) as one, contextlib.ExitStack() as ends:
        second = Service(one.folder, program, queue=queue)
        ends.callback(second.kill)
        lines = [request(id, text) for id, text, _ in tickets(args.requests)]
        batch = submit(one.client(), lines)
        worker = Worker(program, queue, one.folder)
        ends.callback(worker.kill)
        one.kill()
        client = second.client()
        until("some are done", lambda: client.batches.retrieve(batch.id).request_counts.completed > 0)
        worker.kill()
        worker.start()
        ended = wait(client, batch)
        assert ended.status == "completed", ended
        check_answers(client, ended, lines)


def killed_worker(program, args):
    """One of two workers is killed in the middle: nothing is lost or doubled, and only what it had not logged is computed again."""
    queue = broker_queue()
    if not queue:
        return "skipped: no broker"
    # The broker gives a dead worker's shards to others. Within 2 s, the service would take each waiting shard for a lost one, and
    # some would be in two hands.
    with service(program, queue=queue, reconcile_every=60) as one, contextlib.ExitStack() as ends:
        client = one.client()
        lines = [request(id, text) for id, text, _ in tickets(args.requests)]
        ports = [free_port() for _ in range(2)]
        workers = [Worker(program, queue, one.folder, extra=["--liveness-port", str(port)]) for port in ports]
        for worker in workers:
            ends.callback(worker.kill)
        until("both workers are ready", lambda: all("gristmill_ready 1" in scraped(port) for port in ports))
        # Finished rows of each process, by time.
        seen, done = [collections.deque() for _ in ports], threading.Event()

        def scraper():
            while not done.is_set():
                for port, values in zip(ports, seen):
                    found = re.findall(r"^gristmill_rows_total\{.*\} (\d+)", scraped(port), re.M)
                    if found:
                        values.append((time.monotonic(), sum(map(int, found))))
                time.sleep(0.1)

        thread = threading.Thread(target=scraper)
        thread.start()
        ends.callback(lambda: (done.set(), thread.join()))
        batch = submit(client, lines)
        until("a third is done", lambda: client.batches.retrieve(batch.id).request_counts.completed > len(lines) / 3, 1800)
        killed_at = time.monotonic()
        workers[0].kill()
        time.sleep(0.5)
        before_kill = list(seen[0])
        workers[0].start()
        ended = wait(client, batch, 3600)
        done.set()
        thread.join()
        assert ended.status == "completed", ended
        check_answers(client, ended, lines)
        computed = before_kill[-1][1] + seen[0][-1][1] + seen[1][-1][1]
        again = computed - len(lines)
        # What the killed worker finished within a log interval, with a second for the write and the scrape.
        recent = [rows for at, rows in before_kill if at <= killed_at - 2]
        limit = before_kill[-1][1] - (recent[-1] if recent else 0)
        # Rows that it finished after the last scrape are counted by nobody, so a few may be missing.
        assert -limit <= again <= limit, (computed, len(lines), limit)
        return f"{len(lines)} answers, {again} rows computed twice, at most {limit} within a log interval of 1 s and a second"


def scraped(port):
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=2).text
    return ""


def broker_away(program, args):
    """A service whose broker is away takes files and batches; they begin when the broker comes."""
    queue = broker_queue()
    if not queue or not queue.startswith("amqp"):
        return "skipped: no RabbitMQ"
    parts = urllib.parse.urlsplit(queue)
    gate = Gate((parts.hostname, parts.port or 5672))
    user = parts.netloc.rpartition("@")[0]
    behind_gate = parts._replace(netloc=f"{user}@127.0.0.1:{gate.port}" if user else f"127.0.0.1:{gate.port}").geturl()
    with service(program, queue=behind_gate, until_path="/healthz") as one, contextlib.ExitStack() as ends:
        lines = [request(id, text) for id, text, _ in tickets(60)]
        batch = submit(one.client(), lines)
        broken = submit(one.client(), b"{")
        assert wait(one.client(), broken).status == "failed", "what needs no worker does not wait"
        assert httpx.get(f"{one.url}/readyz").status_code == 503
        assert one.client().batches.retrieve(batch.id).status == "validating"
        until("it is logged", lambda: "batches wait until it answers" in (one.folder / "serve.log").read_text())
        gate.open()
        until("it is ready", lambda: httpx.get(f"{one.url}/readyz").status_code == 200)
        ends.callback(Worker(program, queue, one.folder).kill)
        ended = wait(one.client(), batch)
        assert ended.status == "completed", ended
        check_answers(one.client(), ended, lines)
        one.stop()
    with service(program, queue="amqp://127.0.0.1:9/q", until_path="/healthz") as one:
        one.stop()


class Gate:
    """A port that refuses connections until it is opened; then it forwards them."""

    def __init__(self, target):
        self.port, self.target = free_port(), target

    def open(self):
        listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self.accept, args=[listener], daemon=True).start()

    def accept(self, listener):
        while True:
            near = listener.accept()[0]
            far = socket.create_connection(self.target)
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self.forward, args=[source, sink], daemon=True).start()

    def forward(self, source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


def no_worker(program, args):
    """Without a worker, too, a cancelled batch ends, with a line for each request; so does one whose window is over."""
    queue = broker_queue()
    if not queue:
        return "skipped: no broker"
    with service(program, queue=queue) as one:
        client = one.client()
        lines = [request(id, text) for id, text, _ in tickets(60)]
        batches = [submit(client, lines), submit(client, lines, completion_window="4s")]
        until("it has begun", lambda: client.batches.retrieve(batches[0].id).status == "in_progress")
        client.batches.cancel(batches[0].id)
        for batch, status in zip(batches, ("cancelled", "expired")):
            # Workers have 20 s.
            ended = wait(client, batch, 60)
            assert ended.status == status, ended
            _, errors = check_answers(client, ended, lines)
            assert {line["error"]["code"] for line in errors} == {f"batch_{status}"}, errors[0]


def storm(program, args):
    """Services, workers, broker and an S3 store die in turn; a batch is lost, doubled or answered twice by none of it."""
    queue, services = broker_queue(), os.environ.get("GRISTMILL_TEST_SERVICES_DIR")
    if not (queue and services and "GRISTMILL_TEST_S3" in os.environ):
        return "skipped: no broker and S3 store"
    env = {
        "AWS_ENDPOINT_URL": os.environ["GRISTMILL_TEST_S3"], "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": os.environ["GRISTMILL_TEST_S3_KEY"], "AWS_SECRET_ACCESS_KEY": os.environ["GRISTMILL_TEST_S3_SECRET"],
    }
    store = f"s3://{os.environ['GRISTMILL_TEST_S3_BUCKET']}/serve-{uuid.uuid4().hex[:8]}"

    def service_of_set(command, name):
        script = ROOT / "tests/services/services.py"
        subprocess.run([sys.executable, script, command, name, "--dir", services], check=True, stdout=subprocess.DEVNULL)

    with service(program, queue=queue, store=store, env=env) as one, contextlib.ExitStack() as ends:
        second = Service(one.folder, program, queue=queue, store=store, env=env)
        ends.callback(second.kill)
        workers = [Worker(program, queue, one.folder, env) for _ in range(2)]
        for worker in workers:
            ends.callback(worker.kill)
        done, killed, rng = threading.Event(), [], random.Random(11)
        rabbit = "rabbitmq" if queue.startswith("amqp") else "kafka"

        def restart(victim):
            if isinstance(victim, str):
                service_of_set("kill", victim)
                service_of_set("start", victim)
            else:
                victim.kill()
                victim.start()

        def killer():
            while len(killed) < args.kills and not done.is_set():
                time.sleep(rng.uniform(0.5, 3))
                victim = [one, second, *workers, rabbit, "minio"][len(killed) % 6]
                restart(victim)
                killed.append(victim)

        lines = [request(id, text) for id, text, _ in tickets(args.requests)]
        thread = threading.Thread(target=killer)
        thread.start()
        try:
            clients = [one.client(max_retries=10), second.client(max_retries=10)]
            batches = [persistent(lambda client=client: submit(client, lines)) for client in clients * 2]
            ended = [persistent(lambda batch=batch: wait(clients[0], batch, 900), 900) for batch in batches]
            thread.join()
        finally:
            done.set()
            thread.join()
        assert all(batch.status == "completed" for batch in ended), ended
        for batch in ended:
            check_answers(clients[1], batch, lines)
        seconds = sum(verified_seconds(program, f"{store}/tenants/default/work/{batch.id}/output", env) for batch in ended)
        return f"{len(killed)} kills, {len(ended) * len(lines)} requests, {seconds:.1f} device seconds"


def verified_seconds(program, output, env):
    """The device seconds of a batch's job, whose parts `verify` finds right."""
    run = subprocess.run([program, "verify", output, "--json"], env=os.environ | env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    status = subprocess.run([program, "status", output, "--json"], env=os.environ | env, capture_output=True, text=True)
    return json.loads(status.stdout)["seconds"]


CASES = [round_trip, text_completions, broken_lines, kept_lines, early_output, cancel, turns, expiry, retries, lists, uploads, tenants, odd_requests, kills, broker, killed_worker, broker_away, no_worker, storm]


def run_cases(doc, cases, settings=()):
    """The command line of a file of cases: runs those that are asked for, and counts them. `settings`: further options, with their defaults."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("program", type=lambda path: str(pathlib.Path(path).resolve()))
    parser.add_argument("--only", action="append", choices=[case.__name__ for case in cases])
    for name, default, help in settings:
        parser.add_argument(f"--{name}", type=int, default=default, help=help)
    args = parser.parse_args()
    chosen = [case for case in cases if not args.only or case.__name__ in args.only]
    for case in chosen:
        begun = time.monotonic()
        said = case(args.program, args) if settings else case(args.program)
        print(f"{case.__name__}: right in {time.monotonic() - begun:.1f} s{f': {said}' if said else ''}", flush=True)
    print(f"{len(chosen)} of {len(chosen)} cases right")


if __name__ == "__main__":
    run_cases(__doc__, CASES, [("requests", 500, "requests of a batch"), ("kills", 5, None)])
