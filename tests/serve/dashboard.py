#!/usr/bin/env python3
"""Uses the dashboard's API as its page does: of `gristmill serve`, and of `gristmill dashboard` over a folder.

    .venv/bin/python tests/serve/dashboard.py PROGRAM [--only CASE]

The last line counts the cases.
"""

import contextlib
import json
import os
import pathlib
import re
import subprocess
import tempfile
import time

import httpx2 as httpx

from run import DEMO, free_port, request, run_cases, service, submit, tickets, until, wait

COUNTS = ["succeeded", "invalid_output", "errored", "expired", "cancelled"]
FIELDS = {
    "id", "object", "kind", "name", "model", "output", "state", "note", "created_at", "ended_at", "generation", "rows", "tokens", "seconds",
    "usd", "usd_to_come", "eta_seconds", "tokens_per_second", "actions",
}
DETAIL = {
    "shards", "open_shards", "workers", "queue_lag", "budget", "lost_parts", "throughput", "prompt_tokens_histogram",
    "completion_tokens_histogram", "errors",
}


def ended_rows(job):
    return sum(job["rows"][count] for count in COUNTS)


def got(http, path, status=200, **options):
    found = http.get(path, **options)
    assert found.status_code == status, (path, found.status_code, found.text[:500])
    return found.json()


def posted(http, path, body=None, status=200, **options):
    found = http.post(path, json={} if body is None else body, **options)
    assert found.status_code == status, (path, found.status_code, found.text[:500])
    answer = found.json()
    if status >= 400:
        assert set(answer["error"]) == {"message", "type", "param", "code"} and answer["error"]["message"], answer
    return answer


def events(http, path, seconds=240):
    """The events of a stream, until it ends."""
    with http.stream("GET", path, timeout=seconds) as response:
        assert response.status_code == 200, (path, response.status_code)
        assert response.headers["content-type"] == "text/event-stream"
        name = None
        for line in response.iter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                yield name, json.loads(line.removeprefix("data: "))


def client(url, key=None):
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.Client(base_url=url, headers=headers, timeout=60)


def check_page(http):
    """The page comes without a key, and may load nothing else."""
    page = http.get("/", headers={"Authorization": ""})
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html"), page
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'sha256-" in policy and "unsafe" not in policy, policy
    assert not re.search(r"""(src|href)=["']?https?:""", page.text), "nothing from elsewhere"


def batches(program):
    """Batches of a tenant: progress by events, rows, and nothing for another tenant."""
    with service(program, keys={"sk-a": "a", "sk-b": "b"}) as one:
        openai, mine, other = one.client("sk-a"), client(one.url, "sk-a"), client(one.url, "sk-b")
        check_page(mine)
        got(client(one.url), "/v1/jobs", 401)
        got(client(one.url, "sk-c"), "/v1/jobs", 401)
        assert got(mine, "/v1/jobs")["data"] == []
        lines = [request(id, text) for id, text, _ in tickets(5_000)]
        lines[7]["body"]["messages"][1]["content"] = "<b>too long</b> " * 5_000
        first = submit(openai, lines[:3], metadata={"name": "three tickets"})
        wait(openai, first)
        batch = submit(openai, lines)
        seen, ends = [], 0
        for name, job in events(mine, f"/v1/jobs/{batch.id}/events"):
            if name == "end":
                ends += 1
                continue
            assert name == "job" and set(job) == FIELDS | {"detail"} and set(job["detail"]) == DETAIL, (name, job)
            seen.append(job)
        assert ends == 1 and seen[-1]["state"] == "finished", seen[-1]
        counts = [ended_rows(job) for job in seen]
        assert counts == sorted(counts) and counts[-1] == 5_000, counts
        between = [job for job in seen if 0 < ended_rows(job) < 5_000]
        assert between, f"progress was seen: {counts}"
        assert any(job["detail"]["workers"] for job in between), between
        assert any(job["tokens_per_second"] for job in between if len(between) > 2) or len(between) <= 2, between
        assert all("cancel" in job["actions"] for job in between if job["state"] == "running")

        job = got(mine, f"/v1/jobs/{batch.id}")
        assert job["rows"] == {
            "total": 5_000, "succeeded": 4_999, "invalid_output": 0, "errored": 1, "expired": 0, "cancelled": 0,
        }, job["rows"]
        assert job["kind"] == "batch" and job["model"] == "demo" and job["actions"] == [] and job["ended_at"], job
        detail = job["detail"]
        assert detail["shards"] == {"total": 100, "open": 0, "committed": 100} and not detail["lost_parts"], detail
        assert [error["rows"] for error in detail["errors"]] == [1] and "tokens" in detail["errors"][0]["reason"], detail
        for histogram in (detail["prompt_tokens_histogram"], detail["completion_tokens_histogram"]):
            assert len(histogram["edges"]) == len(histogram["counts"]) + 1, histogram
            assert sum(histogram["counts"]) == histogram["sampled_rows"] > 0, histogram
        times = [at for at, _ in detail["throughput"]]
        assert times and times == sorted(times) and len(times) <= 300, detail["throughput"]

        failed = got(mine, f"/v1/jobs/{batch.id}/rows")
        assert [row["row"] for row in failed["data"]] == [7] and not failed["has_more"], failed
        row = failed["data"][0]
        assert (row["custom_id"], row["status"]) == (lines[7]["custom_id"], "errored") and "tokens" in row["reason"], row
        assert "user: <b>too long</b> " in row["prompt"] and row["prompt_cut"] and len(row["prompt"]) == 4_000, row
        assert row["answer"] is None and "hidden" not in row, row
        numbers, after = [], ""
        while True:
            page = got(mine, f"/v1/jobs/{batch.id}/rows?kind=answers&limit=30{after}")
            numbers += [row["row"] for row in page["data"]]
            assert all(row["answer"] and lines[row["row"]]["body"]["messages"][1]["content"][:80] in row["prompt"] for row in page["data"])
            after = f"&after={numbers[-1]}"
            if len(numbers) > 100 or not page["has_more"]:
                break
        assert numbers == [n for n in range(5_000) if n != 7][: len(numbers)] and len(numbers) == 120, numbers
        assert not got(mine, f"/v1/jobs/{batch.id}/rows?kind=answers&after=4999")["data"]

        listed = got(mine, "/v1/jobs")
        assert [job["id"] for job in listed["data"]] == [batch.id, first.id] and not listed["has_more"], listed
        assert listed["data"][1]["name"] == "three tickets" and all(set(job) == FIELDS for job in listed["data"])
        page = got(mine, "/v1/jobs?limit=1")
        assert page["has_more"] and page["last_id"] == batch.id
        assert [job["id"] for job in got(mine, f"/v1/jobs?limit=1&after={batch.id}")["data"]] == [first.id]
        name, data = next(events(mine, "/v1/jobs/events"))
        assert name == "jobs" and [job["id"] for job in data["data"]] == [batch.id, first.id]
        for query in ("limit=0", "limit=101", "after=x", "order=asc"):
            got(mine, f"/v1/jobs?{query}", 400)
        for query in ("kind=all", "limit=0", "after=x", "x=1"):
            got(mine, f"/v1/jobs/{batch.id}/rows?{query}", 400)

        # What another tenant has is not there, and neither is anything else.
        for id in (batch.id, "batch_00000000000000000000000000", "x", "..%2f..%2fb", "%ff"):
            for path in ("", "/rows", "/events"):
                got(other, f"/v1/jobs/{id}{path}", 404)
            for path in ("cancel", "retry"):
                posted(other, f"/v1/jobs/{id}/{path}", status=404)
            posted(other, f"/v1/jobs/{id}/extend", {"usd": 1}, 404)
        assert got(other, "/v1/jobs")["data"] == []
        assert next(events(other, "/v1/jobs/events"))[1] == {"data": []}
        for path, body in (("cancel", {}), ("retry", {}), ("extend", {"usd": 1})):
            posted(mine, f"/v1/jobs/{batch.id}/{path}", body, 409)
        assert "new batch" in posted(mine, f"/v1/jobs/{batch.id}/retry", status=409)["error"]["message"]
        paths = got(mine, "/openapi.json")["paths"]
        assert "get" in paths["/v1/jobs"] and "post" in paths["/v1/jobs/{id}/cancel"], paths.keys()
        one.stop()
        return f"{len(seen)} events, {len(between)} of them while it ran"


def cancelled(program):
    """A batch is cancelled by the dashboard. A failed one says why."""
    with service(program) as one:
        openai, http = one.client(), client(one.url)
        batch = submit(openai, [request(id, text) for id, text, _ in tickets(10_000)])
        until("some are done", lambda: ended_rows(got(http, f"/v1/jobs/{batch.id}")) > 0)
        job = posted(http, f"/v1/jobs/{batch.id}/cancel")
        assert job["state"] in ("cancelling", "cancelled") and "cancel" not in job["actions"], job
        assert list(events(http, f"/v1/jobs/{batch.id}/events"))[-2][1]["state"] == "cancelled"
        assert wait(openai, batch).status == "cancelled"
        job = got(http, f"/v1/jobs/{batch.id}")
        assert job["rows"]["cancelled"] > 0 and ended_rows(job) == 10_000, job["rows"]
        failed = submit(openai, b"{\n")
        assert wait(openai, failed).status == "failed"
        job = got(http, f"/v1/jobs/{failed.id}")
        assert job["state"] == "failed" and job["note"] and not job["actions"], job
        assert got(http, f"/v1/jobs/{failed.id}/rows")["data"] == []
        refuse_other_sites(http, f"/v1/jobs/{failed.id}/cancel", ["/v1/files", "/v1/batches"])


def refuse_other_sites(http, path, other_paths=()):
    """Without keys, requests of pages of other sites are refused. `other_paths` take bodies of any type."""
    for host in ("evil.example", "evil.example:80", "10.0.0.1"):
        got(http, "/v1/jobs", 403, headers={"Host": host})
        posted(http, path, status=403, headers={"Host": host})
        for other in other_paths:
            got(http, other, 403, headers={"Host": host})
    for headers in (
        {"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"},
    ):
        posted(http, path, status=403, headers=headers)
        for other in other_paths:
            posted(http, other, status=403, headers=headers)
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        found = http.post(path, content="{}", headers={"Content-Type": kind})
        assert found.status_code == 403, found.text
    found = http.post(path)
    assert found.status_code == 403, found.text


def listeners(program):
    """So many may listen, and no more; a stopped service does not wait for them."""
    with service(program) as one, contextlib.ExitStack() as open_streams:
        http = httpx.Client(base_url=one.url, timeout=60, limits=httpx.Limits(max_connections=200))
        for _ in range(64):
            stream = open_streams.enter_context(http.stream("GET", "/v1/jobs/events"))
            assert stream.status_code == 200
        assert "Retry-After" in http.get("/v1/jobs/events").headers
        got(http, "/v1/jobs/events", 503)
        got(http, "/v1/jobs")
        begun = time.monotonic()
        one.stop()
        assert time.monotonic() - begun < 15, "the listeners were let go"


def job_file(folder, name, rows, long_rows=()):
    """A job over the demo model; `long_rows` do not fit its context."""
    texts = ["word " * 600 if row in long_rows else f"ticket {row}" for row in range(rows)]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps({"id": row, "text": text}) + "\n" for row, text in enumerate(texts)))
    path = folder / f"{name}.yaml"
    path.write_text(
        f"name: {name}\nmodel: {DEMO / 'model'}\nprecision: f32\ncontext: 128\ninput: {{uri: {name}.jsonl}}\n"
        "prompt: {messages: [{role: user, content: 'Sort: {{ text }}'}]}\n"
        f"generate: {{max_tokens: 4, temperature: 0}}\noutput: {{uri: out/{name}, carry: [id]}}\nshards: {{rows: 8}}\n"
        "budget: {usd_per_hour: 3.6}\n"
    )
    return path


def run_program(program, *arguments, exits=(0,)):
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=240)
    assert done.returncode in exits, (arguments, done.returncode, done.stderr[-2000:])
    return done


@contextlib.contextmanager
def dashboard(program, *arguments):
    """A dashboard's address while it runs."""
    port = free_port()
    command = [program, "dashboard", *map(str, arguments), "--listen", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env=os.environ, text=True)
    try:
        url = f"http://127.0.0.1:{port}"

        def answers():
            assert process.poll() is None, process.stderr.read()
            with contextlib.suppress(httpx.HTTPError):
                return httpx.get(url + "/", timeout=2).status_code == 200

        until("the dashboard answers", answers, 60)
        yield url
        process.terminate()
        assert process.wait(30) == 6, process.returncode
    finally:
        if process.poll() is None:
            process.kill()


def outputs(program):
    """A finished and a running job below a folder, and what can be done to them."""
    with tempfile.TemporaryDirectory(prefix="gristmill-dashboard-") as folder:
        folder = pathlib.Path(folder)
        finished, going = job_file(folder, "finished", 40, long_rows=(3, 30)), job_file(folder, "going", 400)
        run_program(program, "run", finished, "--quiet", exits=(3,))
        run_program(program, "run", job_file(folder, "reasons", 40, long_rows=(3, 30)), "--quiet", exits=(3,))
        run_program(program, "submit", going, "--no-enqueue")
        with dashboard(program, folder / "out") as url, client(url) as http:
            check_page(http)
            listed = got(http, "/v1/jobs")["data"]
            assert sorted(job["name"] for job in listed) == ["finished", "going", "reasons"], listed
            times = [job["created_at"] for job in listed]
            assert times == sorted(times, reverse=True), times
            ids = {job["name"]: f"/v1/jobs/{job['id']}" for job in listed}
            job = got(http, ids["finished"])
            assert job["state"] == "finished" and job["kind"] == "job" and job["actions"] == ["retry"], job
            assert (job["rows"]["succeeded"], job["rows"]["errored"]) == (38, 2) and job["usd"] > 0 and job["ended_at"], job
            assert job["model"] == "model" and job["output"].startswith("file://") and not job["detail"]["open_shards"], job
            assert job["detail"]["budget"]["usd_per_hour"] == 3.6 and job["detail"]["errors"][0]["rows"] == 2, job
            rows = got(http, ids["finished"] + "/rows?limit=1")
            assert rows["has_more"] and rows["data"][0]["row"] == 3 and rows["data"][0]["custom_id"] is None, rows
            assert rows["data"][0]["prompt"].startswith("user: Sort: word word") and rows["data"][0]["status"] == "errored", rows
            assert [row["row"] for row in got(http, ids["finished"] + "/rows?after=3")["data"]] == [30]
            answers = got(http, ids["finished"] + "/rows?kind=answers&limit=100")["data"]
            assert [row["prompt"] for row in answers] == [f"user: Sort: ticket {n}" for n in range(40) if n not in (3, 30)], answers[:3]
            assert all(row["answer"] is not None and row["finish_reason"] for row in answers), answers[:3]

            job = got(http, ids["going"])
            assert job["state"] == "running" and sorted(job["actions"]) == ["cancel", "extend"] and ended_rows(job) == 0, job
            refuse_other_sites(http, ids["going"] + "/cancel")
            assert got(http, ids["going"])["state"] == "running", "nobody has cancelled it"
            job = posted(http, ids["going"] + "/extend", {"usd": 12.5, "deadline_seconds": 7200})
            assert job["detail"]["budget"]["usd"] == 12.5, job
            assert job["detail"]["budget"]["deadline_at"] == job["created_at"] + 7200, job
            status = json.loads(run_program(program, "status", folder / "out/going", "--json").stdout)
            assert (status["budget"]["usd"], status["budget"]["from"]) == (12.5, "extend"), status
            for body, code in (({}, 400), ({"usd": 0}, 400), ({"usd": "1"}, 400), ({"x": 1}, 400), ({"usd": 1e-9}, 200)):
                posted(http, ids["going"] + "/extend", body, code)
            posted(http, ids["going"] + "/extend", {"usd": 100})
            posted(http, ids["going"] + "/retry", status=409)
            posted(http, ids["finished"] + "/cancel", status=409)

            # The page sees the job being worked off.
            worked = subprocess.Popen([program, "run", going, "--quiet", "--log-interval", "1"], stderr=subprocess.DEVNULL)
            seen = [(name, job) for name, job in events(http, ids["going"] + "/events")]
            assert worked.wait(240) == 0
            assert seen[-1][0] == "end" and seen[-2][1]["state"] == "finished" and ended_rows(seen[-2][1]) == 400, seen[-2:]
            assert ended_rows(seen[0][1]) < 400, "it began before the job's end"

            job = posted(http, ids["finished"] + "/retry")
            assert (job["state"], job["generation"]) == ("running", 1) and job["rows"]["errored"] == 0, job
            assert "retry" not in job["actions"], job
            job = posted(http, ids["finished"] + "/cancel")
            assert job["state"] == "cancelled" and job["actions"] == [], job
            posted(http, ids["finished"] + "/extend", {"usd": 99}, 409)
        with dashboard(program, folder / "out/reasons", "--prompts", "false") as url, client(url) as http:
            [job] = got(http, "/v1/jobs")["data"]
            job = got(http, f"/v1/jobs/{job['id']}")
            assert job["rows"]["errored"] == 2 and not job["detail"]["errors"], job
            rows = got(http, f"/v1/jobs/{job['id']}/rows")["data"]
            assert len(rows) == 2 and all(row["hidden"] and row["reason"] is None and row["prompt"] is None for row in rows), rows
        with dashboard(program, folder / "out/going", "--read-only", "--prompts", "false") as url, client(url) as http:
            [job] = got(http, "/v1/jobs")["data"]
            assert job["actions"] == [], job
            posted(http, f"/v1/jobs/{job['id']}/cancel", status=403)
            rows = got(http, f"/v1/jobs/{job['id']}/rows?kind=answers")["data"]
            assert rows and all(row["hidden"] and row["prompt"] is None and row["answer"] is None for row in rows), rows[:2]


def keys(program):
    """With keys, each request to the API needs one; without, only this machine may ask."""
    with tempfile.TemporaryDirectory(prefix="gristmill-dashboard-") as folder:
        folder = pathlib.Path(folder)
        (folder / "keys.yaml").write_text(
            "keys:\n- {tenant: a, sha256: 2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae}\n"
        )
        refused = run_program(program, "dashboard", folder, "--listen", "0.0.0.0:0", exits=(2,))
        assert "--keys" in refused.stderr, refused.stderr
        missing = run_program(program, "dashboard", folder / "nowhere", exits=(2,))
        assert "is no folder" in missing.stderr, missing.stderr
        with dashboard(program, folder, "--keys", folder / "keys.yaml") as url:
            check_page(client(url))
            got(client(url), "/v1/jobs", 401)
            got(client(url, "bar"), "/v1/jobs", 401)
            found = client(url, "foo")
            assert got(found, "/v1/jobs", headers={"Host": "jobs.example"})["data"] == []
            got(found, "/v1/jobs/0123456789abcdef0123", 404)
            got(found, "/v1/batches", 404)
            posted(found, "/v1/jobs", status=405)


CASES = [batches, cancelled, listeners, outputs, keys]


if __name__ == "__main__":
    run_cases(__doc__, CASES)
