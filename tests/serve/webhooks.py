#!/usr/bin/env python3
"""Webhooks and limits of `gristmill serve`: receivers that use OpenAI's own client, that are down, hang or refuse; tenants at their limits.

    .venv/bin/python tests/serve/webhooks.py PROGRAM [--only CASE]

The last line counts the cases.
"""

import base64
import collections
import contextlib
import hashlib
import http.server
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time

import httpx2 as httpx
import openai

from run import Service, free_port, jsonl, persistent, refused, request, run_cases, submit, tickets, until, wait

SECRETS = {name: "whsec_" + base64.b64encode(hashlib.sha256(name.encode()).digest()).decode() for name in ("one", "two", "three")}
CHAT = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}


class Receiver:
    """A server that notes what it is sent. `answer(path)` gives a status; `None`: the sender waits until the receiver is closed."""

    def __init__(self, answer=lambda path: 200, port=None):
        self.posts, self.answer = [], answer
        self.closed = threading.Event()
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.posts.append((self.path, dict(self.headers.items()), body))
                status = receiver.answer(self.path)
                if status is None:
                    receiver.closed.wait()
                    return
                self.send_response(status)
                if status in (301, 302, 307, 308):
                    self.send_header("location", "/elsewhere")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        self.port = port or free_port()
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def url(self, path="/"):
        return f"http://127.0.0.1:{self.port}{path}"

    def close(self):
        self.closed.set()
        self.server.shutdown()
        self.server.server_close()

    def events(self, secret, path="/"):
        """The events at `path`, each verified by the official client."""
        client = openai.OpenAI(api_key="none", webhook_secret=SECRETS[secret])
        found = []
        for at, headers, body in list(self.posts):
            if at == path:
                event = client.webhooks.unwrap(body, headers)
                assert event.id == headers["webhook-id"] and event.object == "event", event
                found.append(event)
        return found

    def of(self, batch, secret, path="/"):
        return [event for event in self.events(secret, path) if event.data.id == batch.id]


class HookedService(Service):
    """A service with webhooks, and with keys that may have limits."""

    def __init__(self, folder, program, webhooks=(), keys=(), retry_first=0.05, extra=(), **options):
        self.extra = list(extra)
        if webhooks:
            lines = [f"- {{tenant: {tenant}, url: '{url}', secret_env: {secret.upper()}{more}}}\n" for tenant, url, secret, more in webhooks]
            (folder / "webhooks.yaml").write_text("webhooks:\n" + "".join(lines))
            self.extra += ["--webhooks", folder / "webhooks.yaml", "--webhook-retry-first", str(retry_first)]
        if keys:
            lines = [f"- {{tenant: {tenant}, sha256: {hashlib.sha256(key.encode()).hexdigest()}{more}}}\n" for key, tenant, more in keys]
            (folder / "keys.yaml").write_text("keys:\n" + "".join(lines))
            self.extra += ["--keys", folder / "keys.yaml"]
        env = {name.upper(): secret for name, secret in SECRETS.items()}
        super().__init__(folder, program, env=env, **options)

    def start(self):
        self.arguments, self.extra = self.arguments + self.extra, []
        super().start()

    def metric(self, result):
        """The value of the counter of tries."""
        text = httpx.get(f"http://127.0.0.1:{self.metrics_port}/metrics").text
        name = f'gristmill_serve_webhooks_total{{result="{result}"}} '
        return sum(float(line.removeprefix(name)) for line in text.splitlines() if line.startswith(name))

    def owed(self):
        return sorted(path.name for path in (self.folder / "store/owed").rglob("batch_*"))


@contextlib.contextmanager
def serving(program, **options):
    with tempfile.TemporaryDirectory(prefix="gristmill-hooks-") as folder:
        metrics_port = free_port()
        one = HookedService(pathlib.Path(folder), program, extra=["--metrics-port", str(metrics_port)], **options)
        one.metrics_port = metrics_port
        try:
            yield one
            log = (one.folder / "serve.log").read_text()
            assert not any(secret in log for secret in SECRETS.values()), "the log shows a secret"
        except BaseException:
            print((one.folder / "serve.log").read_text()[-4000:], file=sys.stderr)
            raise
        finally:
            if one.process.poll() is None:
                one.kill()


@contextlib.contextmanager
def receiving(*args, **options):
    one = Receiver(*args, **options)
    try:
        yield one
    finally:
        one.close()


def small():
    return [request("a", "Refund, please")]


def ends(program):
    """Each end of a batch is told, with an event that the official client verifies, to all webhooks that want it."""
    with receiving() as receiver:
        webhooks = [
            ("default", receiver.url("/all"), "one", ""),
            ("default", receiver.url("/some"), "two", ", events: [batch.failed, batch.cancelled]"),
        ]
        with serving(program, webhooks=webhooks) as one:
            client = one.client()
            many = [request(id, text) for id, text, _ in tickets(10_000)]
            batches = {"completed": submit(client, small()), "failed": submit(client, b"{\n")}
            assert wait(client, batches["completed"]).status == "completed"
            assert wait(client, batches["failed"]).status == "failed"
            batches["cancelled"] = submit(client, many)
            client.batches.cancel(batches["cancelled"].id)
            assert wait(client, batches["cancelled"]).status == "cancelled"
            batches["expired"] = submit(client, many, completion_window="1s")
            assert wait(client, batches["expired"]).status == "expired"
            until("all have come", lambda: len(receiver.events("one", "/all")) >= 4, 20)
            until("nothing is owed", lambda: not one.owed(), 20)
            for status, batch in batches.items():
                [event] = receiver.of(batch, "one", "/all")
                ended = client.batches.retrieve(batch.id)
                assert event.type == f"batch.{status}" and event.created_at == getattr(ended, f"{status}_at"), (event, ended)
                assert event.id == batch.id.replace("batch_", "evt_"), event
            assert {event.type for event in receiver.events("two", "/some")} == {"batch.failed", "batch.cancelled"}
            assert len(receiver.events("two", "/some")) == 2
            # Another secret does not verify it.
            path, headers, body = receiver.posts[0]
            wrong = openai.OpenAI(api_key="none", webhook_secret=SECRETS["three"])
            refused(openai.InvalidWebhookSignatureError, lambda: wrong.webhooks.unwrap(body, headers))
            right = openai.OpenAI(api_key="none", webhook_secret=SECRETS["one" if path == "/all" else "two"])
            changed = body.replace(b"batch_", b"Batch_")
            refused(openai.InvalidWebhookSignatureError, lambda: right.webhooks.unwrap(changed, headers))
            assert one.metric("delivered") == 6, one.metric("delivered")
            one.stop()


def down_at_first(program):
    """A receiver that is down, then refuses, then redirects, gets the event once it takes it; one that says 410 gets it no more."""
    port = free_port()
    with serving(program, webhooks=[("default", f"http://127.0.0.1:{port}/", "one", "")]) as one:
        client = one.client()
        batch = submit(client, small())
        wait(client, batch)
        until("a try has failed", lambda: one.metric("failed") >= 1, 20)
        assert one.owed(), "the event is still owed"
        answers = collections.deque([503, 302, 200])
        with receiving(lambda path: answers.popleft(), port=port) as receiver:
            until("it was delivered", lambda: one.metric("delivered") == 1)
            events = receiver.of(batch, "one")
            assert len(events) == 3 and len({event.id for event in events}) == 1, events
            assert {path for path, _, _ in receiver.posts} == {"/"}, "no redirect is followed"
            until("nothing is owed", lambda: not one.owed(), 20)
            answers.append(410)
            gone = submit(client, small())
            wait(client, gone)
            until("it is gone", lambda: one.metric("gone") == 1, 20)
            until("nothing is owed", lambda: not one.owed(), 20)
            time.sleep(1)
            assert len(receiver.of(gone, "one")) == 1


def given_up(program):
    """After the last try, the event is given up with one line."""
    with receiving(lambda path: 500) as receiver:
        with serving(program, webhooks=[("default", receiver.url(), "one", "")], retry_first=0.0002) as one:
            client = one.client()
            batch = submit(client, small())
            wait(client, batch)
            until("it is given up", lambda: one.metric("given_up") == 1, 60)
            until("nothing is owed", lambda: not one.owed(), 20)
            assert len(receiver.of(batch, "one")) == 11
            lines = [line for line in (one.folder / "serve.log").read_text().splitlines() if "gets it no more" in line]
            assert len(lines) == 1 and batch.id in lines[0], lines
            return f"{one.metric('failed'):.0f} tries before the last one"


def killed(program):
    """Events survive SIGKILL: with the receiver down, and within a post. The event that comes twice has one id."""
    port = free_port()
    with serving(program, webhooks=[("default", f"http://127.0.0.1:{port}/", "one", "")]) as one:
        client = one.client(max_retries=10)
        down = submit(client, small())
        wait(client, down)
        one.kill()
        with receiving(lambda path: None, port=port) as hanging:
            one.start()
            until("it is posted", lambda: hanging.posts, 60)
            first = hanging.of(down, "one")[0]
            within = persistent(lambda: submit(client, small()))
            persistent(lambda: wait(client, within))
            until("it is posted, too", lambda: hanging.of(within, "one"), 60)
            one.kill()
        with receiving(port=port) as receiver:
            one.start()
            for batch in (down, within):
                until("it is delivered", lambda batch=batch: receiver.of(batch, "one"), 60)
            assert receiver.of(down, "one")[0].id == first.id
            until("nothing is owed", lambda: not one.owed(), 20)
            before = len(receiver.posts)
            one.kill()
            one.start()
            time.sleep(2)
            assert len(receiver.posts) == before, "what was delivered is not sent again"


def kills(program):
    """Services die again and again while batches end: each batch's end is told."""
    with receiving() as receiver, serving(program, webhooks=[("default", receiver.url(), "one", "")]) as one:
        client = one.client(max_retries=10)
        done, count = threading.Event(), [0]

        def killer():
            while not done.is_set():
                time.sleep(0.3 + 0.17 * (count[0] % 5))
                one.kill()
                count[0] += 1
                one.start()

        thread = threading.Thread(target=killer)
        thread.start()
        try:
            batches = [persistent(lambda: submit(client, content)) for content in [small(), b"{\n"] * 6]
            until("some kills", lambda: count[0] >= 6)
        finally:
            done.set()
            thread.join()
        ended = [persistent(lambda batch=batch: wait(client, batch)) for batch in batches]
        until("nothing is owed", lambda: not one.owed(), 60)
        for batch in ended:
            found = receiver.of(batch, "one")
            assert found and {event.type for event in found} == {f"batch.{batch.status}"}, (batch, found)
        return f"{count[0]} kills, {len(receiver.posts)} posts for {len(batches)} batches"


def two_services(program):
    """Of two services over one store, one makes each try."""
    with receiving() as receiver:
        webhooks = [("default", receiver.url(), "one", "")]
        with serving(program, webhooks=webhooks) as one, tempfile.TemporaryDirectory() as other, contextlib.ExitStack() as stack:
            second = HookedService(pathlib.Path(other), program, webhooks=webhooks, store=one.folder / "store")
            stack.callback(second.kill)
            clients = [one.client(), second.client()]
            batches = [submit(clients[n % 2], b"{\n") for n in range(20)]
            for batch in batches:
                wait(clients[0], batch)
            until("nothing is owed", lambda: not one.owed(), 60)
            for batch in batches:
                assert len(receiver.of(batch, "one")) == 1, batch
            return f"{len(receiver.posts)} posts for {len(batches)} batches"


def hanging(program):
    """Receivers that hang hold up no other tenant."""
    keys = [("sk-a", "a", ""), ("sk-b", "b", "")]
    hangs = lambda path: 200 if path == "/b" else None
    with receiving(hangs) as receiver:
        webhooks = [("a", receiver.url(f"/a{n}"), "one", "") for n in range(5)] + [("b", receiver.url("/b"), "two", "")]
        with serving(program, webhooks=webhooks, keys=keys) as one:
            first, second = one.client("sk-a"), one.client("sk-b")
            for _ in range(8):
                wait(first, submit(first, b"{\n"))
            until("some hang", lambda: len(receiver.posts) >= 12)
            # A receiver that is not known to hang may have several tries, until the first one has failed.
            until("their tries fail", lambda: one.metric("failed") >= 5)
            slowest = 0
            for _ in range(5):
                batch = submit(second, b"{\n")
                wait(second, batch)
                begun = time.monotonic()
                until("it is delivered", lambda: receiver.of(batch, "two", "/b"), 5)
                slowest = max(slowest, time.monotonic() - begun)
            return f"{slowest:.1f} s at most beside {len(receiver.posts)} posts"


def files(program):
    """What a file of webhooks must not say is refused with one line, which shows no secret."""
    with tempfile.TemporaryDirectory() as folder:
        path, hidden = pathlib.Path(folder) / "webhooks.yaml", SECRETS["one"]
        for line, why in [
            (f"{{tenant: default, url: 'https://a.example', secret: '{hidden}'}}", "secret"),
            (f"{{tenant: default, url: 'https://a.example', secret_env: '{hidden}'}}", "secret_env"),
            ("{tenant: default, url: 'http://a.example', secret_env: ONE}", "allow_http"),
            ("{tenant: other, url: 'https://a.example', secret_env: ONE}", "no tenant `other`"),
            ("{tenant: default, url: 'https://a.example', secret_env: SHORT}", "24"),
        ]:
            path.write_text(f"webhooks:\n- {line}\n")
            command = [program, "serve", "--store", folder, "--models", "none.yaml", "--work", "--webhooks", path]
            run = subprocess.run(command, env=os.environ | {"ONE": hidden, "SHORT": "whsec_AAEC"}, capture_output=True, text=True, timeout=60)
            assert run.returncode == 2 and why in run.stderr and hidden[6:] not in run.stderr, (run.returncode, run.stderr)
            assert len(run.stderr.strip().splitlines()) == 1, run.stderr


def open_batches(program):
    """Beyond `max_open_batches`, creation is refused with 429, and what is repeated still gets its batch."""
    keys = [("sk-a", "a", ", max_open_batches: 2"), ("sk-a2", "a", ""), ("sk-b", "b", "")]
    with serving(program, keys=keys) as one:
        client, same, other = (one.client(key, max_retries=0) for key in ("sk-a", "sk-a2", "sk-b"))
        many = jsonl([request(id, text) for id, text, _ in tickets(10_000)])
        file = client.files.create(file=("x.jsonl", many), purpose="batch").id
        headers = {"idempotency-key": "first"}
        first = client.batches.create(input_file_id=file, **CHAT, extra_headers=headers)
        second = same.batches.create(input_file_id=file, **CHAT)
        for one_client in (client, same):
            try:
                one_client.batches.create(input_file_id=file, **CHAT)
                raise AssertionError("no limit")
            except openai.RateLimitError as error:
                assert error.code == "rate_limit_exceeded" and int(error.response.headers["retry-after"]) > 0, error
        assert {batch.id for batch in client.batches.list()} == {first.id, second.id}, "no batch was made"
        assert client.batches.create(input_file_id=file, **CHAT, extra_headers=headers).id == first.id
        # It waits behind the others' requests, so it ends after they were cancelled.
        beside = submit(other, small())
        client.batches.cancel(first.id)
        wait(client, first)
        third = client.batches.create(input_file_id=file, **CHAT)
        assert {batch.id for batch in client.batches.list()} == {first.id, second.id, third.id}
        assert wait(other, beside).status == "completed"


def estimate(lines):
    """Tokens of requests as the documentation has them: one for every 4 bytes of a text, and the maximum of the answer."""
    texts = [text for line in lines for message in line["body"]["messages"] for text in message.values()]
    return sum(-(-len(text.encode()) // 4) for text in texts) + sum(line["body"]["max_completion_tokens"] for line in lines)


def queued(program):
    """Beyond the limits of requests and tokens that wait, a batch fails; once the others have ended, it runs."""
    many, few = ([request(id, text) for id, text, _ in tickets(count)] for count in (10_000, 20))
    keys = [("sk-a", "a", f", max_queued_requests: {len(many)}"), ("sk-b", "b", f", max_queued_tokens: {estimate(many)}")]
    with serving(program, keys=keys) as one:
        for key, word in (("sk-a", "request"), ("sk-b", "token")):
            client = one.client(key)
            first = submit(client, many)
            until("it runs", lambda: client.batches.retrieve(first.id).status == "in_progress")
            over = wait(client, submit(client, few))
            assert over.status == "failed" and not over.output_file_id, over
            [error] = over.errors.data
            assert error.code == "token_limit_exceeded" and error.message.startswith(f"Enqueued {word} limit reached"), error
            client.batches.cancel(first.id)
            wait(client, first)
            assert wait(client, submit(client, few)).status == "completed"
        alone = wait(client, submit(client, [*many, request("x", "y")]))
        assert alone.status == "failed" and "smaller batches" in alone.errors.data[0].message, alone


CASES = [ends, down_at_first, given_up, killed, kills, two_services, hanging, files, open_batches, queued]


if __name__ == "__main__":
    run_cases(__doc__, CASES)
