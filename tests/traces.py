#!/usr/bin/env python3
"""Takes the traces of gristmill as a collector would, and holds them against docs/traces.md; then takes none, in several ways.

    .venv/bin/python tests/traces.py PROGRAM [--only CASE]

The last line counts the cases.
"""

import collections
import contextlib
import http.server
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import cases
import httpx2 as httpx
import pyarrow.dataset as ds
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/serve"))
import run as serve  # noqa: E402

# Stands in each prompt, in the key and in a query, and nowhere in a span.
MARKER = "xylocopa"
ROWS, SHARD_ROWS = 40, 10
# What a job may take longer because of a collector that does not answer: the wait for it at the end, and some for a slow machine.
SECONDS_MORE = 12


class Collector:
    """Takes OTLP over HTTP. `answer`: a status; `None`: it never answers."""

    def __init__(self, answer=200):
        self.answer, self.requests, self.lock = answer, [], threading.Lock()
        self.closing = threading.Event()
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                if collector.answer is None:
                    collector.closing.wait()
                    return
                with collector.lock:
                    collector.requests.append((self.path, dict(self.headers), body, collector.answer))
                self.send_response(collector.answer)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server.server_port}"

    def close(self):
        self.closing.set()
        self.server.shutdown()
        self.server.server_close()

    def resources(self):
        """The batches of spans that were taken, each of one resource."""
        with self.lock:
            bodies = [body for _, _, body, answer in self.requests if answer == 200]
        return [resource for body in bodies for resource in ExportTraceServiceRequest.FromString(body).resource_spans]

    def spans(self):
        return [span for resource in self.resources() for scope in resource.scope_spans for span in scope.spans]

    def bytes(self):
        with self.lock:
            return b"".join(body + repr(headers).encode() + path.encode() for path, headers, body, _ in self.requests)


@contextlib.contextmanager
def collector(answer=200):
    one = Collector(answer)
    try:
        yield one
    finally:
        one.close()


def attributes(of):
    """The attributes of a span or a resource."""
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in of.attributes}


def traces(spans):
    """The spans of each trace: its first span, and the others by name."""
    found = collections.defaultdict(list)
    for span in spans:
        found[span.trace_id].append(span)
    for spans in found.values():
        roots = [span for span in spans if not span.parent_span_id]
        assert len(roots) == 1, [(span.name, bool(span.parent_span_id)) for span in spans]
        root, others = roots[0], collections.defaultdict(list)
        for span in spans:
            assert span.start_time_unix_nano <= span.end_time_unix_nano
            if span is root:
                continue
            assert span.parent_span_id == root.span_id
            assert root.start_time_unix_nano <= span.start_time_unix_nano, span.name
            assert span.end_time_unix_nano <= root.end_time_unix_nano, span.name
            others[span.name].append(span)
        yield root, others


def environment(**variables):
    """The environment without OpenTelemetry's variables, and with these."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_") and name != "RUST_LOG"}
    return own | variables


def write_job(folder, rows=ROWS, shard_rows=SHARD_ROWS, max_tokens=12):
    lines = [{"id": n, "text": f"{MARKER} ticket {n}"} for n in range(rows)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    fields = {
        "name": "traced", "model": str(ROOT / "jobs/demo/model"), "precision": "f32", "input": {"uri": "rows.jsonl"},
        "prompt": {"text": "{{ text }} ->"}, "generate": {"max_tokens": max_tokens, "temperature": 0},
        "output": {"uri": "out", "carry": ["id"]}, "shards": {"rows": shard_rows},
    }
    (folder / "job.json").write_text(json.dumps(fields))
    return folder / "job.json"


class Ran:
    """A job that was run in a folder of its own: its exit code, report, lines on stderr, answers, and time."""

    def __init__(self, program, *options, **variables):
        with tempfile.TemporaryDirectory(prefix="gristmill-traces-") as folder:
            folder = pathlib.Path(folder)
            command = [program, "run", write_job(folder), "--json", "--quiet", "--log-interval", "1", *options]
            began = time.monotonic()
            ran = subprocess.run(command, env=environment(**variables), capture_output=True, text=True, timeout=300)
            self.seconds = time.monotonic() - began
            self.code, self.stderr = ran.returncode, ran.stderr
            self.report = json.loads(ran.stdout.splitlines()[-1]) if ran.stdout else None
            self.answers = None
            if (folder / "out").exists():
                table = ds.dataset(folder / "out", format="parquet").to_table(columns=["row", "id", "status", "completion"])
                self.answers = sorted(table.to_pylist(), key=lambda row: row["row"])


def shards(program):
    """Each shard is a trace, whose spans and attributes are those of docs/traces.md, and no text is among them."""
    with collector() as one:
        ran = Ran(program, "--otlp-endpoint", one.url, OTEL_EXPORTER_OTLP_HEADERS="x-team=labels,x-tier=2")
        assert ran.code == 0 and ran.stderr == "", (ran.code, ran.stderr)
        for path, headers, _, _ in one.requests:
            headers = {name.lower(): value for name, value in headers.items()}
            assert path == "/v1/traces" and headers["content-type"] == "application/x-protobuf", (path, headers)
            assert (headers["x-team"], headers["x-tier"]) == ("labels", "2"), headers
        resources = [attributes(resource.resource) for resource in one.resources()]
        assert all(of["service.name"] == "gristmill" and of["service.version"] for of in resources), resources
        found = list(traces(one.spans()))
        assert len(found) == ROWS // SHARD_ROWS, len(found)
        tokens, seen = collections.Counter(), set()
        for root, children in found:
            of = attributes(root)
            assert root.name == "shard" and root.status.code == Status.STATUS_CODE_UNSET, root
            expected = {"gristmill.job": "traced", "gristmill.generation": 0, "gristmill.rows": SHARD_ROWS, "gristmill.outcome": "committed"}
            assert expected.items() <= of.items(), of
            assert re.fullmatch("[0-9a-f]+", of["gristmill.job_id"]) and of["gristmill.attempt"], of
            assert of["gristmill.worker"].startswith("run-"), of
            seen.add(of["gristmill.shard"])
            counts = {name: len(spans) for name, spans in children.items()}
            assert counts.pop("log") >= 1, counts
            assert counts == {"open": 1, "read": 1, "text_completion model": 1, "publish": 1}, counts
            model = attributes(children["text_completion model"][0])
            expected = {
                "gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "gristmill", "gen_ai.request.model": "model",
                "gristmill.rows": SHARD_ROWS,
            }
            assert expected.items() <= model.items(), model
            tokens.update({name: model[f"gen_ai.usage.{name}"] for name in ["input_tokens", "cache_read.input_tokens", "output_tokens"]})
        assert seen == set(range(ROWS // SHARD_ROWS)), seen
        report = ran.report["tokens"]
        assert tokens["input_tokens"] == report["prompt"] > 0, (tokens, report)
        assert tokens["cache_read.input_tokens"] == report["cached"], (tokens, report)
        assert tokens["output_tokens"] == report["completion"] > 0, (tokens, report)
        check_names(one.spans())
        sent = one.bytes()
        assert MARKER.encode() not in sent, "a prompt was sent"
        for answer in ran.answers:
            text = answer["completion"].strip()
            assert len(text) < 8 or text.encode() not in sent, text
        return f"{len(one.spans())} spans of {len(found)} shards"


def check_names(spans):
    """docs/traces.md lists each attribute."""
    page = (ROOT / "docs/traces.md").read_text()
    names = {name for span in spans for name in attributes(span)}
    missing = [name for name in sorted(names) if f"`{name}`" not in page]
    assert names and not missing, missing


def settings(program):
    """The environment names collector, service and sampler; the log's level changes nothing; what is wrong is one line."""
    with collector() as one:
        ran = Ran(
            program, OTEL_EXPORTER_OTLP_ENDPOINT=one.url + "/", OTEL_SERVICE_NAME="labels", OTEL_RESOURCE_ATTRIBUTES="team=a,service.name=no",
            RUST_LOG="off",
        )
        assert ran.code == 0 and ran.stderr == "", (ran.code, ran.stderr)
        assert len(list(traces(one.spans()))) == ROWS // SHARD_ROWS
        of = attributes(one.resources()[0].resource)
        assert (of["service.name"], of["team"]) == ("labels", "a"), of
    with collector() as one:
        for variables in [
            {"OTEL_TRACES_SAMPLER": "always_off"}, {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0"},
            {"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_EXPORTER": "none"},
        ]:
            ran = Ran(program, "--otlp-endpoint", one.url, **variables)
            assert ran.code == 0 and ran.stderr == "" and not one.requests, (variables, ran.stderr, len(one.requests))
    for options, variables, words in [
        (["--otlp-endpoint", "collector:4317"], {}, ["--otlp-endpoint", "http://collector:4318"]),
        ([], {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://me:hunter2@collector:4318"}, ["OTEL_EXPORTER_OTLP_HEADERS"]),
        (["--otlp-endpoint", "http://c:1"], {"OTEL_TRACES_SAMPLER": "sometimes"}, ["OTEL_TRACES_SAMPLER", "always_on"]),
    ]:
        ran = Ran(program, *options, **variables)
        assert ran.code == 2 and ran.answers is None, (ran.code, ran.stderr)
        assert ran.stderr.count("\n") == 1 and all(word in ran.stderr for word in words), ran.stderr
        assert "hunter2" not in ran.stderr, ran.stderr
    # The log of the most talkative level holds no line of the library that sends spans.
    with collector() as one:
        ran = Ran(program, "--otlp-endpoint", one.url, RUST_LOG="opentelemetry=trace,opentelemetry_sdk=trace,opentelemetry_otlp=trace")
        assert ran.code == 0 and ran.stderr == "" and one.requests, ran.stderr


def troubles(program):
    """A collector that is away, hangs or fails costs a line and a few seconds, and no answer."""
    plain = Ran(program)
    assert plain.code == 0 and plain.stderr == "", plain.stderr
    with socket.socket() as taken:
        # Nobody listens.
        taken.bind(("127.0.0.1", 0))
        with collector(None) as hanging, collector(503) as failing:
            for address, why in [
                (f"http://127.0.0.1:{taken.getsockname()[1]}", "refused"), (hanging.url, "no answer within 5 s|timed out"), (failing.url, "503"),
            ]:
                # A small queue and a short pause: spans are lost while the job runs, too.
                ran = Ran(
                    program, "--otlp-endpoint", address, OTEL_BSP_SCHEDULE_DELAY="100", OTEL_BSP_MAX_QUEUE_SIZE="4",
                    OTEL_BSP_MAX_EXPORT_BATCH_SIZE="2",
                )
                assert ran.code == 0, (why, ran.code, ran.stderr)
                assert ran.stderr.count("\n") == 1 and "takes no spans" in ran.stderr, (why, ran.stderr)
                assert re.search(why, ran.stderr) and address in ran.stderr, (why, ran.stderr)
                assert ran.answers == plain.answers, why
                assert ran.report["tokens"] == plain.report["tokens"], why
                assert ran.seconds < plain.seconds + SECONDS_MORE, (why, ran.seconds, plain.seconds)
    return f"{plain.seconds:.1f} s without a collector"


def service(program):
    """Requests and steps of batches are spans; no key, query or id of a client is; a collector that comes back is told of once."""
    with collector(503) as one:
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": one.url, "OTEL_BSP_SCHEDULE_DELAY": "200"}
        with serve.service(program, keys={MARKER: "default"}, env=variables) as served:
            log = served.folder / "serve.log"
            lines = lambda words: [line for line in log.read_text().splitlines() if words in line]  # noqa: E731
            client = served.client(MARKER)
            client.models.list()
            serve.until("the collector's failure is told", lambda: lines("takes no spans"))
            client.models.list()
            one.answer = 200
            serve.until("its return is told", lambda: client.models.list() and lines("takes spans again"))
            requests = [serve.request(str(n), f"{MARKER} {n}") for n in range(100)]
            parent = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
            batch = serve.submit(client, requests, extra_headers=parent)
            ended = serve.wait(client, batch)
            serve.check_answers(client, ended, requests)
            with httpx.Client(base_url=served.url, headers={"authorization": f"Bearer {MARKER}"}) as plain:
                assert plain.get(f"/v1/files/file-{MARKER}").status_code == 404
                assert plain.get(f"/v1/files?limit={MARKER}").status_code == 400
                assert plain.get(f"/{MARKER}?{MARKER}={MARKER}").status_code == 404
                assert plain.request(MARKER.upper(), "/v1/files").status_code == 405
            assert httpx.get(f"{served.url}/v1/files", headers={"authorization": f"Bearer {MARKER}?"}).status_code == 401
            assert "OpenTelemetry.T" in threads(served.process.pid), threads(served.process.pid)
            served.stop()
            assert (len(lines("takes no spans")), len(lines("takes spans again"))) == (1, 1), log.read_text()
        spans = one.spans()
        check_requests(spans, batch.id)
        check_names(spans)
        work = [span for span in spans if span.name == "shard"]
        assert len(work) == 2 and all(attributes(span)["gristmill.job"] == batch.id for span in work), work
        assert sum(span.name == "generate_content model" for span in spans) == 2
        sent = one.bytes().lower()
        assert MARKER.encode() not in sent, sent[max(sent.index(MARKER.encode()) - 300, 0):][:600]
        return f"{len(spans)} spans"


def check_requests(spans, batch):
    requests = [span for span in spans if span.kind == Span.SPAN_KIND_SERVER]
    codes = collections.Counter()
    for span in requests:
        of = attributes(span)
        code = of["http.response.status_code"]
        codes[span.name, code] += 1
        assert span.name == " ".join(filter(None, [of["http.request.method"], of.get("http.route")])), (span.name, of)
        expected = Status.STATUS_CODE_ERROR if code >= 500 else Status.STATUS_CODE_UNSET
        assert span.status.code == expected, (span.name, code, span.status)
    for expected in [
        ("POST /v1/files", 200), ("POST /v1/batches", 200), ("GET /v1/batches/{id}", 200), ("GET /v1/files/{id}/content", 200),
        ("GET /v1/files/{id}", 404), ("GET /v1/files", 400), ("GET", 404), ("_OTHER /v1/files", 405), ("GET /v1/files", 401),
    ]:
        assert codes[expected], (expected, codes)
    assert not any("healthz" in name or "readyz" in name for name, _ in codes), codes
    created = [span for span in requests if span.name == "POST /v1/batches"]
    assert created[0].trace_id.hex() == "0af7651916cd43dd8448eb211c80319c", created
    assert created[0].parent_span_id.hex() == "b7ad6b7169203331", created
    steps = [attributes(span) for span in spans if span.name == "batch step"]
    outcomes = collections.Counter(of["gristmill.outcome"] for of in steps if of["gristmill.batch"] == batch)
    assert outcomes["ended"] == 1 and outcomes["changed"] >= 1, outcomes


def threads(pid):
    """The names of a process's threads, of which Linux keeps 15 characters."""
    return {path.read_text().strip() for path in pathlib.Path(f"/proc/{pid}/task").glob("*/comm")}


def nothing(program):
    """Without a collector there is no thread that sends spans."""
    with serve.service(program, env={"OTEL_EXPORTER_OTLP_ENDPOINT": ""}) as served:
        served.client().models.list()
        assert not any(name.startswith("OpenTel") for name in threads(served.process.pid)), threads(served.process.pid)
        served.stop()


def interrupted(program):
    """A job that is interrupted sends the spans of its open shards, too."""
    with collector() as one, tempfile.TemporaryDirectory(prefix="gristmill-traces-") as folder:
        folder = pathlib.Path(folder)
        job = write_job(folder, rows=8000, shard_rows=1000, max_tokens=100)
        command = [program, "run", job, "--quiet", "--log-interval", "1", "--otlp-endpoint", one.url]
        with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) as ran:
            serve.until("it has begun", lambda: list(folder.glob("out/_gristmill/**/*attempt*")) or ran.poll() is not None)
            time.sleep(1)
            ran.send_signal(signal.SIGTERM)
            stderr = ran.communicate(timeout=60)[1]
        assert ran.returncode == 6, (ran.returncode, stderr)
        roots = [span for span in one.spans() if span.name == "shard"]
        assert roots and any(attributes(root).get("gristmill.outcome") == "given_back" for root in roots), roots
        assert "spans" not in stderr, stderr


CASES = [shards, settings, troubles, service, nothing, interrupted]


if __name__ == "__main__":
    cases.main(__doc__, CASES)
