#!/usr/bin/env python3
"""Answers the dashboard's page like a server whose jobs are in every state, also in those that a real one rarely shows.

    python3 tests/serve/dashboard_mock.py [--port 8681] [--key KEY] [--folder src/dashboard]

For work on the page: it is read from the folder for each request, with the policy that the program sends. browser.py uses it, too. A job
named `answers-STATUS` answers with that status; jobs move while somebody looks.
"""

import argparse
import base64
import hashlib
import http.server
import json
import pathlib
import re
import threading
import time
import urllib.parse

ROOT = pathlib.Path(__file__).resolve().parents[2]
COUNTS = ("succeeded", "invalid_output", "errored", "expired", "cancelled")
HOSTILE = "<img src=x onerror='document.title=1'></pre><script>document.title=2</script>\u202egnp.exe\u0007 \u200bfine"
REASONS = [
    ("the prompt has 5012 tokens, and the context 4096", 812), (HOSTILE, 31), ("the answer is no JSON: expected `,` at line 3", 7),
]
PAGE_MAX, EVENTS_EVERY = 100, 0.4


def made(id, state="running", name=None, rows=None, **fields):
    """A job as the list shows it."""
    counts = dict.fromkeys(COUNTS, 0) | (rows or {"total": 0})
    return {
        "id": id, "object": "job", "kind": "job", "name": id if name is None else name, "model": "demo", "output": f"s3://grain/out/{id}/",
        "state": state, "note": None, "created_at": int(time.time()) - 3_600, "ended_at": None, "generation": 0, "rows": counts,
        "tokens": {"prompt": 0, "cached": 0, "completion": 0}, "seconds": 0.0, "usd": None, "usd_to_come": None, "eta_seconds": None,
        "tokens_per_second": None, "actions": [],
    } | fields


def empty_detail(**fields):
    return {
        "shards": {"total": 0, "open": 0, "committed": 0}, "open_shards": [], "workers": [], "queue_lag": None,
        "budget": {"usd": None, "usd_per_hour": None, "deadline_at": None}, "lost_parts": [], "throughput": [],
        "prompt_tokens_histogram": None, "completion_tokens_histogram": None, "errors": [],
    } | fields


def histogram(counts):
    edges = [0] + [16 << step for step in range(len(counts))]
    return {"edges": edges, "counts": counts, "sampled_rows": sum(counts)}


def running(now):
    """A job of half a million rows that is done after ten minutes, and then begins anew."""
    share = 0.02 + 0.98 * (now % 600) / 600
    total = 500_000
    done = int(total * share)
    failed = {"errored": done // 600, "invalid_output": done // 2_000}
    speed = 41_800 + 2_600 * ((now * 7) % 10) / 10
    usd = 38.4 * share
    return made(
        "5f0c1d2e3a4b5c6d7e8f", name="labels of the week", rows={"total": total, "succeeded": done - sum(failed.values())} | failed,
        tokens={"prompt": done * 612, "cached": done * 420, "completion": done * 48}, seconds=usd * 1_000, usd=usd, usd_to_come=38.4 - usd,
        eta_seconds=int(600 * (1 - share)), tokens_per_second=speed, actions=["cancel", "extend"], created_at=int(now - 600 * share),
        model="qwen2.5-7b-instruct",
    )


def running_detail(now):
    job = running(now)
    done, total = sum(job["rows"][count] for count in COUNTS), job["rows"]["total"]
    committed = done // 2_000
    shards = [
        {
            "shard": committed + n, "rows_done": int((now * 90 + n * 371) % 2_000), "rows": 2_000, "worker": f"gpu-{n % 12:02}-node-{n % 4}",
            "attempts": 3 if n < 3 else 1, "last_progress": int(now) - (900 if n < 3 else n % 7), "stuck": n < 3,
        }
        for n in range(200)
    ]
    workers = [
        {"name": f"gpu-{n:02}-node-{n % 4}", "shards": [committed + n, committed + n + 12], "last_seen": int(now) - (400 if n == 11 else n)}
        for n in range(12)
    ]
    points = [[int(now) - 2 * (299 - n), 40_000 + 6_000 * ((n * 37) % 17) / 17 - (30_000 if 120 < n < 140 else 0)] for n in range(300)]
    return empty_detail(
        shards={"total": total // 2_000, "open": 200, "committed": committed}, open_shards=shards, workers=workers, queue_lag=86,
        budget={"usd": 60.0, "usd_per_hour": 3.6, "deadline_at": job["created_at"] + 7_200}, throughput=points,
        prompt_tokens_histogram=histogram([0, 4, 61, 320, 812, 1_904, 733, 120, 9]),
        completion_tokens_histogram=histogram([210, 1_620, 1_204, 800, 129]),
        errors=[{"reason": reason, "rows": rows} for reason, rows in REASONS],
    )


def jobs_at(now):
    """All jobs, newest first, each with what only its own view has."""
    day = 86_400
    ended = {"created_at": int(now) - 3 * day, "ended_at": int(now) - 3 * day + 5_000}
    odd = [
        (running(now), running_detail(now)),
        (made("batch_validating", "validating", name="", kind="batch", output=None, actions=["cancel"], created_at=int(now) - 4), None),
        (
            made("batch_failed", "failed", name="", kind="batch", output=None, note="line 7 of the input is no JSON: expected `}`", **ended),
            empty_detail(),
        ),
        (
            made(
                "finished", "finished", name="reviews, second half", actions=["retry"], usd=4.217, seconds=4_217.0,
                rows={"total": 40_000, "succeeded": 39_150, "errored": 843, "invalid_output": 7},
                tokens={"prompt": 24_000_000, "cached": 0, "completion": 1_900_000}, **ended,
            ),
            running_detail(now) | {"open_shards": [], "workers": [], "queue_lag": None, "shards": {"total": 20, "open": 0, "committed": 20}},
        ),
        (
            made(
                "budget", "budget_reached", actions=["cancel", "extend"], usd=25.0, ended_at=None,
                rows={"total": 1_000, "succeeded": 400}, note="the budget of $25.00 is spent",
            ),
            empty_detail(budget={"usd": 25.0, "usd_per_hour": 3.6, "deadline_at": None}, shards={"total": 10, "open": 0, "committed": 4}),
        ),
        (
            made(
                "huge", name="every page of the web", rows={"total": 9_007_199_254_740_991, "succeeded": 8_123_456_789_012},
                tokens={"prompt": 4_611_686_018_427_387_904, "cached": 1, "completion": 123_456_789_012}, usd=1_234_567_890.12,
                usd_to_come=98_765_432_109.5, eta_seconds=9_999_999_999, tokens_per_second=123_456_789.4, seconds=9e12,
                actions=["cancel", "extend"],
            ),
            empty_detail(shards={"total": 4_294_967_295, "open": 200, "committed": 12}, lost_parts=[f"part-{n:05}.parquet" for n in range(9)]),
        ),
        (made("odd-name", name="long-" * 60 + HOSTILE, note=HOSTILE, model=HOSTILE, output=HOSTILE), empty_detail()),
        (made("unknown-state", "resting_at_night", generation=3), empty_detail()),
        (
            made("short", "finished", rows={"total": 4, "succeeded": 4}, **ended),
            empty_detail(throughput=[[ended["ended_at"], 0.0], [ended["ended_at"], 6_086.0]]),
        ),
        (made("unreadable", "unreadable", note="its store does not answer at the moment", created_at=0), None),
        (made("answers-409", actions=["cancel", "extend"]), empty_detail()),
        (made("answers-403", actions=["cancel"]), empty_detail()),
        (made("answers-500", actions=["cancel"]), empty_detail()),
        (made("hidden", "finished", rows={"total": 10, "succeeded": 9, "errored": 1}, **ended), empty_detail()),
    ]
    plain = [
        (made(f"night-{n:03}", "finished" if n % 9 else "cancelled", usd=n / 7, rows={"total": 1_000, "succeeded": 1_000 if n % 9 else 0}, **ended), None)
        for n in range(120)
    ]
    return odd + plain


def rows_of(job, kind, after):
    """Rows after number `after`, without an end for those that are many."""
    count = job["rows"]["succeeded"] if kind == "answers" else job["rows"]["errored"] + job["rows"]["invalid_output"]
    for number in range(count):
        row = number * 40 + 7
        if row <= after:
            continue
        reason = None if kind == "answers" else REASONS[number % len(REASONS)][0]
        texts = {"reason": reason, "prompt": f"user: {HOSTILE}\n\n" + "word " * 30, "answer": "refund\n" if kind == "answers" else None}
        if job["id"] == "hidden":
            texts = dict.fromkeys(texts) | {"hidden": True}
        yield {
            "row": row, "custom_id": None if number % 2 else f"id-{HOSTILE}-{row}", "status": "errored" if reason else "succeeded",
            "finish_reason": None if reason else "stop", **texts,
        }


def policy(page):
    """The policy of src/dashboard/page.rs for this page."""
    def sources(element):
        inline = re.findall(rf"<{element}(?:\s[^>]*)?>(.*?)</{element}>", page, re.S)
        hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in inline]
        return " ".join(f"'sha256-{one}'" for one in hashes)

    return (
        f"default-src 'none'; script-src {sources('script')}; style-src {sources('style')}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class Refusal(Exception):
    def __init__(self, status, message):
        super().__init__(message)
        self.status = status


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        """The page's requests are no news."""

    def answer(self, status, text, kind="application/json", headers=()):
        body = text.encode()
        self.send_response(status)
        for name, value in [("Content-Type", kind), ("Content-Length", str(len(body))), *headers]:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.respond(self.get)

    def do_POST(self):
        self.respond(self.post)

    def respond(self, act):
        url = urllib.parse.urlsplit(self.path)
        parts = [urllib.parse.unquote(part) for part in url.path.split("/")[1:]]
        try:
            if parts == [""]:
                page = (self.server.folder / "page.html").read_text()
                return self.answer(200, page, "text/html; charset=utf-8", [("Content-Security-Policy", policy(page))])
            key = self.server.key
            if key and self.headers.get("Authorization") != f"Bearer {key}":
                raise Refusal(401, "the key is unknown")
            if parts[:2] != ["v1", "jobs"]:
                raise Refusal(404, f"no such endpoint: {url.path}")
            act(parts[2:], dict(urllib.parse.parse_qsl(url.query)))
        except Refusal as refusal:
            error = {"message": str(refusal), "type": "invalid_request_error", "param": None, "code": None}
            self.answer(refusal.status, json.dumps({"error": error}))
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def jobs(self):
        """The jobs, with what was done to them."""
        found = jobs_at(time.time())[: self.server.jobs_max]
        return [(job | self.server.changes.get(job["id"], {}), detail) for job, detail in found]

    def job(self, id):
        for job, detail in self.jobs():
            if job["id"] == id:
                return job | {"detail": detail or empty_detail()}
        raise Refusal(404, f"no such job: `{id[:80]}`")

    def get(self, parts, query):
        match parts:
            case []:
                jobs = [job for job, _ in self.jobs()]
                ids = [job["id"] for job in jobs]
                begin = ids.index(query["after"]) + 1 if "after" in query else 0
                end = begin + int(query.get("limit", 20))
                page = jobs[begin:end]
                listed = {"object": "list", "data": page, "has_more": end < len(jobs)}
                self.answer(200, json.dumps(listed | {"first_id": ids[begin], "last_id": page[-1]["id"]} if page else listed))
            case ["events"]:
                self.stream("jobs", lambda: {"data": [job for job, _ in self.jobs()[:20]]})
            case [id]:
                self.answer(200, json.dumps(self.job(id)))
            case [id, "events"]:
                self.stream("job", lambda: self.job(id))
            case [id, "rows"]:
                if id == "answers-500":
                    raise Refusal(500, "what is stored cannot be read; the log says why")
                limit = min(int(query.get("limit", 20)), PAGE_MAX)
                rows = []
                for row in rows_of(self.job(id), query.get("kind", "failed"), int(query.get("after", -1))):
                    rows.append(row)
                    if len(rows) > limit:
                        break
                self.answer(200, json.dumps({"object": "list", "data": rows[:limit], "has_more": len(rows) > limit}))
            case _:
                raise Refusal(404, "no such endpoint")

    def stream(self, name, look):
        """Events until the job has ended, or the server is stopped."""
        sent = None
        look()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        while not self.server.is_stopped.is_set():
            data = look()
            if data != sent:
                self.wfile.write(f"event: {name}\ndata: {json.dumps(data)}\n\n".encode())
                sent = data
                self.server.events_sent += 1
            if name == "job" and data["ended_at"]:
                self.wfile.write(b"event: end\ndata: {}\n\n")
                return
            self.server.is_stopped.wait(EVENTS_EVERY)

    def post(self, parts, _query):
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        [id, action] = parts
        job = self.job(id)
        self.server.asked.append((id, action, body))
        if found := re.fullmatch(r"answers-(\d+)", id):
            raise Refusal(int(found[1]), f"this job refuses to {action}")
        if action not in job["actions"]:
            raise Refusal(409, f"the job is {job['state']}")
        change = {
            "cancel": {"state": "cancelling", "actions": []}, "extend": {"state": "running"},
            "retry": {"state": "running", "actions": ["cancel"], "ended_at": None, "generation": job["generation"] + 1},
        }[action]
        self.server.changes[id] = self.server.changes.get(id, {}) | change
        self.answer(200, json.dumps({key: value for key, value in self.job(id).items() if key != "detail"}))


class Mock:
    """A server that is stopped and started again at the same port."""

    def __init__(self, port=0, key=None, folder=ROOT / "src/dashboard", jobs_max=None):
        self.key, self.folder, self.jobs_max = key, folder, jobs_max
        self.asked, self.changes = [], {}
        self.port = port
        self.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def start(self):
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.port = self.server.server_port
        vars(self.server).update(
            daemon_threads=True, key=self.key, folder=self.folder, jobs_max=self.jobs_max, asked=self.asked, changes=self.changes,
            is_stopped=threading.Event(), events_sent=0,
        )
        threading.Thread(target=self.server.serve_forever, args=(0.1,), daemon=True).start()

    def stop(self):
        self.server.is_stopped.set()
        self.server.shutdown()
        self.server.server_close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=8681)
    parser.add_argument("--key")
    parser.add_argument("--folder", type=pathlib.Path, default=ROOT / "src/dashboard")
    args = parser.parse_args()
    with Mock(args.port, args.key, args.folder) as mock:
        print(f"{mock.url} answers until it is interrupted", flush=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            print("stopped")


if __name__ == "__main__":
    main()
