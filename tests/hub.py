#!/usr/bin/env python3
"""Fetches models from a hub and a bucket that misbehave in every way that is worth a sentence: cut connections, wrong bytes, gated and
missing repositories, no network, several processes at once. Both servers are doubles, written by their protocols' documentation.

    .venv/bin/python tests/hub.py PROGRAM [--only CASE]

The last line counts the cases.
"""

import contextlib
import email.utils
import hashlib
import http.server
import json
import os
import pathlib
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse

import cases

ROOT = pathlib.Path(__file__).resolve().parents[1]
DEMO = ROOT / "jobs/demo/model"
WEIGHTS = "model.safetensors"
REPOSITORY, TOKEN, OTHER_TOKEN = "org/tickets", "hf_right", "hf_other"
# What no model needs: code, and weights that are code.
FORBIDDEN = {"modeling_tickets.py": b"raise SystemExit", "pytorch_model.bin": b"\x80\x02.", "README.md": b"# Tickets"}


def demo_files():
    return {path.name: path.read_bytes() for path in DEMO.iterdir()}


def git_hash(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def is_large(name):
    return name.endswith((".safetensors", ".bin"))


def tree(files):
    """The listing of a commit, by which Hugging Face's own client learns hashes and sizes."""
    def entry(name, content):
        lfs = {"lfs": {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}} if is_large(name) else {}
        return {"type": "file", "oid": git_hash(content), "size": len(content), "path": name, **lfs}
    return [entry(name, content) for name, content in files.items()]


class Server:
    """A web server on a thread. `requests` holds (method, path, headers) of each request."""

    def __init__(self):
        self.requests, self.lock = [], threading.Lock()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one(self):
                with outer.lock:
                    headers = {name.lower(): value for name, value in self.headers.items()}
                    outer.requests.append((self.command, self.path, headers))
                outer.answer(self)

            do_GET = do_HEAD = handle_one

            def log_message(self, *_):
                pass

            def reply(self, status, headers=(), body=b"", length=None):
                self.send_response(status)
                for name, value in headers:
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body) if length is None else length))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def cut(self):
                """Ends the connection in the middle of an answer."""
                self.wfile.flush()
                self.close_connection = True
                self.connection.shutdown(2)

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def asked(self, part, method=None):
        with self.lock:
            return [one for one in self.requests if part in one[1] and method in (None, one[0])]

    def forget(self):
        with self.lock:
            self.requests.clear()


def send_range(handler, content, headers, after=None, pause=0.0, ignores_range=False):
    """Sends the content, or the part that is asked for; cuts the connection `after` so many bytes; returns how many were sent."""
    start, end = 0, len(content)
    asked = re.fullmatch(r"bytes=(\d+)-(\d*)", handler.headers.get("Range", ""))
    if asked and not ignores_range:
        start, end = int(asked[1]), int(asked[2]) + 1 if asked[2] else end
    rest = content[start:end]
    status = 206 if start else 200
    handler.send_response(status)
    for name, value in headers:
        handler.send_header(name, value)
    if start:
        handler.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
    handler.send_header("Content-Length", str(len(rest)))
    handler.end_headers()
    sent = 0
    with contextlib.suppress(OSError):
        for at in range(0, len(rest), 1 << 16):
            if after is not None and at >= after:
                handler.cut()
                break
            handler.wfile.write(rest[at:at + (1 << 16)])
            sent += len(rest[at:at + (1 << 16)])
            time.sleep(pause)
    return sent


def starts(requests):
    """The first byte that each request asks for."""
    return [int(headers.get("range", "bytes=0-")[6:].partition("-")[0]) for _, _, headers in requests]


class Cdn(Server):
    """Where the hub's large files lie. `cuts`: after how many bytes the next answers end."""

    def __init__(self):
        super().__init__()
        self.contents, self.sent, self.cuts, self.pause, self.ignores_range = {}, 0, [], 0.0, False

    def answer(self, handler):
        content = self.contents.get(handler.path.strip("/"))
        if content is None:
            return handler.reply(404)
        after = self.cuts.pop(0) if self.cuts else None
        sent = send_range(handler, content, [("ETag", '"of the cdn"')], after, self.pause, self.ignores_range)
        with self.lock:
            self.sent += sent


class Hub(Server):
    """One repository, as the hub answers: it sends large files from another server, and small ones from a cache of its own, to which
    it redirects. `commits`: the files of each commit; `gated`: who may read it."""

    def __init__(self):
        super().__init__()
        self.cdn = Cdn()
        self.commits, self.refs = {}, {}
        self.gated, self.claims = False, {}
        self.push({**demo_files(), **FORBIDDEN})

    def close(self):
        super().close()
        self.cdn.close()

    def push(self, files, branch="main"):
        names = json.dumps({name: git_hash(content) for name, content in files.items()}, sort_keys=True)
        commit = hashlib.sha1(names.encode()).hexdigest()
        self.commits[commit] = files
        self.refs[branch] = commit
        for name, content in files.items():
            if is_large(name):
                self.cdn.contents[hashlib.sha256(content).hexdigest()] = content
        return commit

    def answer(self, handler):
        path = urllib.parse.unquote(handler.path)
        path = path.partition("?")[0]
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(?:revision|tree)/(.+)", path)
        file = re.fullmatch(r"(?:/api/resolve-cache/models)?/([^/]+/[^/]+)/(?:resolve/)?([^/]+)/(.+)", path)
        token = handler.headers.get("Authorization")
        if token not in (None, f"Bearer {TOKEN}", f"Bearer {OTHER_TOKEN}"):
            return handler.reply(401, [("X-Error-Message", "Invalid credentials in Authorization header")])
        if not (api or file) or (api or file)[1] != REPOSITORY:
            # The hub tells nobody without a token whether a private repository is there.
            return handler.reply(401, [("X-Error-Code", "RepoNotFound")])
        if self.gated and file:
            if token != f"Bearer {TOKEN}":
                return handler.reply(403 if token else 401, [("X-Error-Code", "GatedRepo")])
        commit = self.refs.get((api or file)[2], (api or file)[2])
        if commit not in self.commits:
            return handler.reply(404, [("X-Error-Code", "RevisionNotFound")])
        files = self.commits[commit]
        if api and "/tree/" in path:
            return handler.reply(200, [("Content-Type", "application/json")], json.dumps(tree(files)).encode())
        if api:
            answer = {"id": REPOSITORY, "sha": commit, "gated": self.gated, "siblings": [{"rfilename": name} for name in files]}
            return handler.reply(200, [("Content-Type", "application/json")], json.dumps(answer).encode())
        content = files.get(file[3])
        if content is None:
            return handler.reply(404, [("X-Error-Code", "EntryNotFound")])
        common = [("X-Repo-Commit", commit)]
        if is_large(file[3]):
            name = hashlib.sha256(content).hexdigest()
            size = self.claims.get(file[3], len(content))
            headers = [*common, ("X-Linked-Etag", f'"{name}"'), ("X-Linked-Size", str(size)), ("Location", f"{self.cdn.url}/{name}")]
            return handler.reply(302, headers)
        if "/resolve/" in path:
            # The redirect names no size.
            cached = f"/api/resolve-cache/models/{REPOSITORY}/{commit}/{file[3]}?etag=%22{git_hash(content)}%22"
            return handler.reply(307, [*common, ("X-Linked-Etag", f'"{git_hash(content)}"'), ("Location", cached)])
        if handler.command == "HEAD":
            return handler.reply(200, [*common, ("ETag", f'"{git_hash(content)}"')], length=len(content))
        send_range(handler, content, [*common, ("ETag", f'"{git_hash(content)}"')])


class Bucket(Server):
    """An S3 bucket of one folder. `cuts` as for the Cdn; `replace` is called when weights are asked for."""

    def __init__(self):
        super().__init__()
        self.files, self.cuts, self.sent, self.replace = demo_files(), [], 0, None

    def answer(self, handler):
        url = urllib.parse.urlsplit(handler.path)
        query = urllib.parse.parse_qs(url.query)
        if "list-type" in query:
            prefix = query.get("prefix", [""])[0]
            found = [name for name in self.files if f"tickets/{name}".startswith(prefix)]
            items = "".join(
                f"<Contents><Key>tickets/{name}</Key><LastModified>2026-01-02T03:04:05.000Z</LastModified>"
                f"<ETag>&quot;{hashlib.md5(self.files[name]).hexdigest()}&quot;</ETag><Size>{len(self.files[name])}</Size></Contents>"
                for name in found)
            body = ('<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>models</Name>'
                    f"<Prefix>{prefix}</Prefix><KeyCount>{len(found)}</KeyCount><IsTruncated>false</IsTruncated>{items}</ListBucketResult>")
            return handler.reply(200, [("Content-Type", "application/xml")], body.encode())
        name = url.path.rpartition("/")[2]
        if name == WEIGHTS and self.replace:
            self.replace()
        content = self.files.get(name)
        if content is None:
            return handler.reply(404)
        etag = f'"{hashlib.md5(content).hexdigest()}"'
        if handler.headers.get("If-Match", etag) != etag:
            return handler.reply(412)
        headers = [("ETag", etag), ("Last-Modified", email.utils.formatdate(1767323045, usegmt=True))]
        after = self.cuts.pop(0) if self.cuts and name == WEIGHTS else None
        sent = send_range(handler, content, headers, after)
        with self.lock:
            self.sent += sent if name == WEIGHTS else 0


class Place:
    """A folder with a job, a cache of its own, and the program."""

    def __init__(self, program, folder, endpoint, model=f"hf://{REPOSITORY}"):
        self.program, self.folder, self.model = program, pathlib.Path(folder), model
        self.cache = self.folder / "hf/hub"
        names = ("PATH", "TMPDIR", "GRISTMILL_MUTANT")
        self.env = {name: os.environ[name] for name in names if name in os.environ}
        self.env |= {"HOME": str(self.folder / "home"), "HF_HOME": str(self.folder / "hf"), "HF_ENDPOINT": endpoint}
        self.job = self.write_job("job.yaml", "out")

    def write_job(self, name, output, model=None):
        text = (ROOT / "jobs/label-tickets.yaml").read_text().replace("demo/model", model or self.model)
        text = text.replace("demo/", f"{ROOT}/jobs/demo/").replace("../out/label-tickets", str(self.folder / output))
        text = text.replace("tickets.parquet}", "tickets.parquet, limit: 40}")
        assert "limit: 40" in text
        path = self.folder / name
        path.write_text(text)
        return path

    def start(self, *arguments, **env):
        command = [self.program, *map(str, arguments)]
        return subprocess.Popen(command, env=self.env | env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def run(self, *arguments, code=0, **env):
        process = self.start(*arguments, **env)
        stdout, stderr = process.communicate(timeout=120)
        assert process.returncode == code, (process.returncode, stdout, stderr)
        return stdout, stderr

    def refused(self, *arguments, says, code=2, **env):
        """The command fails with one line, besides those about progress."""
        stderr = self.run(*arguments, code=code, **env)[1]
        lines = [line for line in stderr.splitlines() if not line.startswith(("gristmill: fetches", "gristmill: fetched"))]
        assert len(lines) == 1, stderr
        for word in says:
            assert word in lines[0], (word, lines[0])

    def record(self, output="out"):
        return json.loads((self.folder / output / "_gristmill/job.json").read_text())

    @property
    def repository(self):
        return self.cache / f"models--{REPOSITORY.replace('/', '--')}"

    def partial(self):
        found = list(self.repository.glob("blobs/*.incomplete"))
        return found[0] if found else None


@contextlib.contextmanager
def hub_place(program, **settings):
    with tempfile.TemporaryDirectory(prefix="gristmill-hub-") as folder:
        hub = Hub()
        for name, value in settings.items():
            setattr(hub, name, value)
        try:
            yield hub, Place(program, folder, hub.url)
        finally:
            hub.close()


def until(what, condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} never came"
        time.sleep(0.02)


def fetched(program):
    """A job fetches its model, records the commit, and goes on without the hub."""
    with hub_place(program) as (hub, place):
        place.run("run", place.job, "--limit", "20", "--quiet", HF_TOKEN=TOKEN)
        commit = hub.refs["main"]
        output = next((place.folder / "_limit").iterdir())
        recorded = json.loads((output / "_gristmill/job.json").read_text())["resolved"]["model"]
        assert recorded == f"hf://{REPOSITORY}@{commit}", recorded
        for name in FORBIDDEN:
            assert not hub.asked(name), f"{name} was asked for"
        assert hub.asked("config.json")[0][2]["authorization"] == f"Bearer {TOKEN}"
        assert hub.cdn.requests and all("authorization" not in headers for _, _, headers in hub.cdn.requests)
        # The layout of Hugging Face's own cache.
        assert (place.repository / "refs/main").read_text() == commit
        snapshot = place.repository / "snapshots" / commit
        assert {path.name for path in snapshot.iterdir()} == set(demo_files())
        for name, content in demo_files().items():
            link = snapshot / name
            hashed = hashlib.sha256(content).hexdigest() if name == WEIGHTS else git_hash(content)
            assert os.readlink(link) == f"../../blobs/{hashed}" and link.read_bytes() == content, name
        assert not list(place.repository.glob("blobs/*.incomplete"))
        hub.forget()
        place.run("plan", place.job, "--limit", "3", HF_HUB_OFFLINE="1")
        pinned = place.write_job("pinned.yaml", "pinned", f"hf://{REPOSITORY}@{commit}")
        place.run("plan", pinned, "--limit", "3")
        assert not hub.requests, hub.requests
        # Of a branch, the hub is asked where it is by now, and nothing else.
        place.run("plan", place.job, "--limit", "3")
        assert [one[1] for one in hub.requests] == [f"/api/models/{REPOSITORY}/revision/main"], hub.requests


def resumed(program):
    """Cut connections and killed processes cost no byte twice."""
    size = len(demo_files()[WEIGHTS])
    with hub_place(program) as (hub, place):
        hub.cdn.cuts = [1 << 20, 1 << 20]
        place.run("plan", place.job, "--limit", "3")
        # What was on its way when a connection ended comes again, and no more.
        asked = starts(hub.cdn.requests)
        assert len(asked) == 3 and all(1 << 19 < b - a <= 1 << 20 for a, b in zip(asked, asked[1:])), asked
        assert size <= hub.cdn.sent < size + (1 << 20), (hub.cdn.sent, size)
    with hub_place(program) as (hub, place):
        hub.cdn.pause = 0.05
        process = place.start("plan", place.job, "--limit", "3")
        until("a part of the weights", lambda: place.partial() and place.partial().stat().st_size > 1 << 19)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        left, hub.cdn.pause = place.partial().stat().st_size, 0.0
        hub.cdn.forget()
        place.run("plan", place.job, "--limit", "3")
        ranges = [headers.get("range") for _, _, headers in hub.cdn.requests]
        assert ranges == [f"bytes={left}-"], (left, ranges)
    # A server that knows no ranges sends all of it again.
    with hub_place(program) as (hub, place):
        hub.cdn.cuts, hub.cdn.ignores_range = [1 << 20], True
        place.run("plan", place.job, "--limit", "3")
        assert len(hub.cdn.requests) == 2, hub.cdn.requests


def corrupted(program):
    """Bytes that are not those of the hash are refused, and never become a model."""
    with hub_place(program) as (hub, place):
        name = hashlib.sha256(demo_files()[WEIGHTS]).hexdigest()
        content = bytearray(demo_files()[WEIGHTS])
        content[-1] ^= 1
        hub.cdn.contents[name] = bytes(content)
        place.refused("plan", place.job, "--limit", "3", code=1, says=["are not those that the server names", WEIGHTS])
        assert not list(place.repository.glob(f"blobs/{name}*")), "the wrong bytes are still there"
        hub.cdn.contents[name] = demo_files()[WEIGHTS]
        # What an earlier process left is damaged: it is fetched anew.
        blob = place.repository / f"blobs/{name}.incomplete"
        blob.write_bytes(b"x" * 5000)
        hub.cdn.forget()
        place.run("plan", place.job, "--limit", "3")
        ranges = [headers.get("range") for _, _, headers in hub.cdn.requests]
        assert ranges == ["bytes=5000-", None], ranges
    # Small files are verified, too, and one that has another size than the hub says.
    for change in (lambda text: text.replace(b"192", b"193"), lambda text: text + b" "):
        with hub_place(program) as (hub, place):
            files, commit = demo_files(), hub.refs["main"]
            right = files["config.json"]
            answer = hub.answer

            def wrong(handler, answer=answer, hub=hub, commit=commit, right=right, change=change):
                is_read = handler.command == "GET" and "/config.json" in handler.path
                hub.commits[commit]["config.json"] = change(right) if is_read else right
                answer(handler)

            hub.answer = wrong
            place.refused("plan", place.job, "--limit", "3", code=1, says=["config.json", "are not those"])


def gated(program):
    with hub_place(program, gated=True) as (hub, place):
        plan = ("plan", place.job, "--limit", "3")
        place.refused(*plan, says=["is gated", f"huggingface.co/{REPOSITORY}", "HF_TOKEN", "job.yaml"])
        place.refused(*plan, says=["is gated", "does not give access"], HF_TOKEN=OTHER_TOKEN)
        place.refused(*plan, says=["the hub does not know the token"], HF_TOKEN="hf_expired")
        # The token that `hf auth login` stores.
        (place.folder / "hf").mkdir(exist_ok=True)
        (place.folder / "hf/token").write_text(f"{TOKEN}\n")
        place.run(*plan)
        (place.folder / "home").mkdir(exist_ok=True)
        (place.folder / "home/token").write_text(TOKEN)
        (place.folder / "hf/token").unlink()
        place.run("inspect", place.model, HF_TOKEN_PATH="~/token", HF_HUB_CACHE="~/cache")
        assert (place.folder / f"home/cache/{place.repository.name}").is_dir()
        (place.folder / "hf/token").write_text(TOKEN)
        # A token is not sent where everybody can read it.
        place.refused(*plan, says=["`HF_ENDPOINT` is not encrypted"], HF_ENDPOINT="http://hub.example")
        assert hub.requests


def missing(program):
    with hub_place(program) as (hub, place):
        for model, says in [
            ("hf://org/nothing", ["no such repository, or it is private"]),
            (f"hf://{REPOSITORY}@v9", ["has no revision `v9`"]),
            (f"hf://{REPOSITORY}/x", ["is no model on the hub", "hf://organisation/name"]),
            (f"https://huggingface.co/{REPOSITORY}", ["hf://organisation/name"]),
            (REPOSITORY, ["there is no such folder", f"hf://{REPOSITORY}"]),
        ]:
            place.refused("plan", place.write_job("other.yaml", "other", model), "--limit", "3", says=says)
        place.refused("inspect", "hf://org/nothing", says=["no such repository"])
        # No model, or none that runs: nothing large is fetched.
        for change, says in [
            ({WEIGHTS: None}, ["neither `model.safetensors`", "pytorch_model.bin"]),
            ({"config.json": None}, ["no `config.json`"]),
            ({"config.json": b'{"architectures": ["BloomForCausalLM"]}'}, ["BloomForCausalLM"]),
            ({"hf_quant_config.json": b'{"quantization": 4}'}, ["hf_quant_config.json", "quantized"]),
            ({"adapter_config.json": b"{}"}, ["adapter"]),
        ]:
            files = {**demo_files(), **FORBIDDEN, **change}
            hub.push({name: content for name, content in files.items() if content is not None})
            place.refused("plan", place.job, "--limit", "3", says=says)
            assert not hub.cdn.requests, change


def offline(program):
    with hub_place(program) as (hub, place):
        plan = ("plan", place.job, "--limit", "3")
        place.refused(*plan, says=["does not have this revision", "HF_HUB_OFFLINE"], HF_HUB_OFFLINE="1")
        assert not hub.requests
        place.refused(*plan, code=1, says=["the hub cannot be asked", "HF_HUB_OFFLINE=1"], HF_ENDPOINT="http://127.0.0.1:1")
        # Another program fetched the configuration alone.
        place.run("inspect", place.model)
        place.refused(*plan, says=["does not have all files"], HF_HUB_OFFLINE="1")
        place.run(*plan)
        place.run(*plan, HF_HUB_OFFLINE="1")
        # Without our mark, as another program leaves it: it runs, and says what is not known.
        shutil.rmtree(place.repository / ".gristmill")
        stderr = place.run(*plan, HF_HUB_OFFLINE="1")[1]
        assert "another program has fetched these files" in stderr, stderr


PYTHON_CLIENT = """
import json, sys
from huggingface_hub import hf_hub_download, scan_cache_dir, snapshot_download
from huggingface_hub.utils import WeakFileLock
what, repository, *names = sys.argv[1:]
if what == "all":
    print(snapshot_download(repository, ignore_patterns=["*.bin", "*.py"]))
elif what == "files":
    print(json.dumps([hf_hub_download(repository, name) for name in names]))
elif what == "scan":
    found = scan_cache_dir()
    print(json.dumps({"warnings": [str(one) for one in found.warnings], "files": [len(list(found.repos)[0].revisions), sorted(
        file.file_name for repo in found.repos for revision in repo.revisions for file in revision.files)]}))
elif what == "lock":
    with WeakFileLock(repository):
        print("held", flush=True)
        sys.stdin.read()
"""


def shared(program):
    """Hugging Face's own client reads what we fetched, and we what it fetched; each waits while the other fetches a file."""
    def client(place, *arguments, **env):
        run = subprocess.run([sys.executable, "-c", PYTHON_CLIENT, *arguments], env=place.env | env, capture_output=True, text=True,
                             timeout=120)
        assert run.returncode == 0, run.stderr
        return run.stdout.splitlines()[-1]

    plan = ("--limit", "3")
    names = sorted(demo_files())
    with hub_place(program) as (hub, place):
        place.run("plan", place.job, *plan)
        hub.cdn.forget()
        for env in ({}, {"HF_HUB_OFFLINE": "1"}):
            found = json.loads(client(place, "files", REPOSITORY, *names, **env))
            assert [pathlib.Path(path).read_bytes() for path in found] == [demo_files()[name] for name in names], env
            assert all(hub.refs["main"] in path for path in found), found
        assert client(place, "all", REPOSITORY, HF_HUB_OFFLINE="1") == str(place.repository / "snapshots" / hub.refs["main"])
        assert json.loads(client(place, "scan", REPOSITORY)) == {"warnings": [], "files": [1, names]}
        assert not hub.cdn.requests, "the weights were fetched again"
    with hub_place(program) as (hub, place):
        client(place, "all", REPOSITORY)
        assert len(hub.cdn.requests) == 1
        stderr = place.run("plan", place.job, *plan, HF_HUB_OFFLINE="1")[1]
        assert "another program has fetched these files" in stderr, stderr
        assert "another program" not in place.run("plan", place.job, *plan)[1]
        assert "another program" not in place.run("plan", place.job, *plan, HF_HUB_OFFLINE="1")[1]
        assert len(hub.cdn.requests) == 1, "the weights were fetched again"
    with hub_place(program) as (hub, place):
        lock = place.cache / f".locks/{place.repository.name}/{hashlib.sha256(demo_files()[WEIGHTS]).hexdigest()}.lock"
        lock.parent.mkdir(parents=True)
        holder = subprocess.Popen([sys.executable, "-c", PYTHON_CLIENT, "lock", str(lock)], env=place.env, stdin=subprocess.PIPE,
                                  stdout=subprocess.PIPE, text=True)
        assert holder.stdout.readline() == "held\n"
        process = place.start("plan", place.job, *plan)
        line = ""
        while "waits for another process" not in line:
            line = process.stderr.readline()
            assert line, "it did not wait"
        assert not hub.cdn.requests
        holder.communicate("")
        stdout, stderr = process.communicate(timeout=120)
        assert process.returncode == 0 and len(hub.cdn.requests) == 1, (stdout, stderr)


def together(program):
    """Of several processes at once, one fetches and the others wait for it."""
    with hub_place(program) as (hub, place):
        hub.cdn.pause = 0.01
        jobs = [place.write_job(f"{n}.yaml", f"out-{n}") for n in range(4)]
        processes = [place.start("plan", job, "--limit", "3") for job in jobs]
        told = [process.communicate(timeout=120)[1] for process in processes]
        assert [process.returncode for process in processes] == [0] * 4, told
        assert len(hub.cdn.requests) == 1 and hub.cdn.sent == len(demo_files()[WEIGHTS]), hub.cdn.requests
        assert any("waits for another process" in stderr for stderr in told), told


def full(program):
    with hub_place(program) as (hub, place):
        hub.claims[WEIGHTS] = 10 ** 17
        place.refused("plan", place.job, "--limit", "3", code=1, says=["100000000.0 GB", "free", "HF_HUB_CACHE"])


def moved(program):
    """A branch that moves changes no job that has begun."""
    with hub_place(program) as (hub, place):
        first = hub.refs["main"]
        place.run("submit", place.job, "--no-enqueue")
        files = demo_files()
        files["generation_config.json"] = b'{"eos_token_id": [2, 0], "temperature": 0.5}'
        second = hub.push(files)
        place.run("run", place.job, "--quiet")
        assert place.record()["resolved"]["model"] == f"hf://{REPOSITORY}@{first}"
        assert not (place.repository / "snapshots" / second).exists()
        other = place.write_job("other.yaml", "other")
        place.run("submit", other, "--no-enqueue")
        assert place.record("other")["resolved"]["model"] == f"hf://{REPOSITORY}@{second}"


def inspected(program):
    """`inspect` fetches what describes a model, and no weights."""
    with hub_place(program) as (hub, place):
        found = json.loads(place.run("inspect", place.model, "--json")[0].splitlines()[-1])
        assert found["runs"] and not found["weights"] and found["tokenizer"], found
        assert found["model"] == f"hf://{REPOSITORY}@{hub.refs['main']}", found
        assert found["architecture"]["parameters"] == 2755008 and found["sampling"], found
        assert not hub.cdn.requests
        # Other commands take such an address, too.
        bench = ("bench", "--model", place.model, "--requests", "2", "--input-len", "8", "--output-len", "2")
        place.run(*bench)
        assert len(hub.cdn.requests) == 1, hub.cdn.requests


def bucket(program):
    """A model in a bucket is fetched once, resumed, and of one version."""
    size = len(demo_files()[WEIGHTS])
    with tempfile.TemporaryDirectory(prefix="gristmill-hub-") as folder:
        store = Bucket()
        place = Place(program, folder, "http://127.0.0.1:1", "s3://models/tickets")
        place.env |= {"AWS_ENDPOINT": store.url, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "here", "AWS_ACCESS_KEY_ID": "a",
                      "AWS_SECRET_ACCESS_KEY": "b", "GRISTMILL_CACHE": str(place.folder / "cache")}
        plan = ("plan", place.job, "--limit", "3")
        store.cuts = [1 << 20]
        place.run(*plan)
        # What was on its way when the connection ended comes again, and no more.
        asked = starts(store.asked(WEIGHTS))
        assert asked[0] == 0 < 1 << 19 < asked[1] <= 1 << 20 and asked == sorted(set(asked)), asked
        assert size <= store.sent < size + (1 << 20), (store.sent, size)
        fetched = [path.read_bytes() for path in (place.folder / "cache/models").glob(f"*/*/{WEIGHTS}")]
        assert fetched == [store.files[WEIGHTS]], [len(content) for content in fetched]
        store.forget()
        place.run("run", place.job, "--limit", "20", "--quiet")
        assert not store.asked(WEIGHTS), store.requests
        # Other weights are another state of the folder.
        weights = bytearray(store.files[WEIGHTS])
        weights[-1] ^= 1
        store.files[WEIGHTS] = bytes(weights)
        place.run(*plan)
        assert len(store.asked(WEIGHTS)) == 1
        # Weights that are replaced while they are fetched are no model.
        store.files[WEIGHTS] = bytes(demo_files()[WEIGHTS][:-1]) + b"\x07"
        store.replace = lambda: store.files.update({WEIGHTS: bytes(weights[:-1]) + b"\x09"})
        place.refused(*plan, code=1, says=["`model.safetensors` was replaced or removed"])
        place.refused("plan", place.write_job("other.yaml", "other", "s3://models/nothing"), "--limit", "3",
                      says=["s3://models/nothing", "no such folder"])
        store.close()
        place.refused("plan", place.job, "--limit", "3", code=1, says=["s3://models/tickets", "cannot be listed"])


def adapter_files(value):
    """A LoRA adapter of the demo model in PEFT's layout: rank 1, of the queries of the first layer."""
    numbers = [struct.pack("<192f", *[value] * 192), struct.pack("<192f", *range(192))]
    ends = [("lora_A", [1, 192]), ("lora_B", [192, 1])]
    header = {
        f"base_model.model.model.layers.0.self_attn.q_proj.{end}.weight":
            {"dtype": "F32", "shape": shape, "data_offsets": [768 * i, 768 * (i + 1)]}
        for i, (end, shape) in enumerate(ends)
    }
    header = json.dumps(header).encode()
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
    weights = struct.pack("<Q", len(header)) + header + b"".join(numbers)
    return {"adapter_config.json": json.dumps(config).encode(), "adapter_model.safetensors": weights, "README.md": b"# Adapter",
            "training_args.bin": b"\x80\x02."}


def adapter(program):
    """A job with an adapter of the hub: the adapter alone is fetched, its commit recorded, and another one refused."""
    with hub_place(program) as (hub, place):
        first = hub.push(adapter_files(0.01))
        job = place.write_job("adapted.yaml", "adapted", "demo/model")
        job.write_text(job.read_text().replace("input:", f"adapter: hf://{REPOSITORY}\ninput:", 1))
        assert "adapter: hf" in job.read_text()
        place.run("run", job, "--quiet")
        assert place.record("adapted")["resolved"]["adapter"] == f"hf://{REPOSITORY}@{first}"
        snapshot = place.repository / "snapshots" / first
        assert {path.name for path in snapshot.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
        # It is no model by itself.
        place.refused("plan", place.job, "--limit", "3", says=["it is an adapter", "`adapter`"])
        # What was fetched is enough, also without our mark; the job goes on with the commit that it began with.
        second = hub.push(adapter_files(0.02))
        place.run("run", job, "--quiet")
        assert place.record("adapted")["resolved"]["adapter"] == f"hf://{REPOSITORY}@{first}"
        hub.forget()
        shutil.rmtree(place.repository / ".gristmill")
        stderr = place.run("run", job, "--quiet", HF_HUB_OFFLINE="1")[1]
        assert "another program has fetched these files" in stderr and not hub.requests, stderr
        # Another adapter makes another model, and no adapter, too.
        text = job.read_text()
        job.write_text(text.replace(f"hf://{REPOSITORY}", f"hf://{REPOSITORY}@{second}"))
        place.refused("run", job, "--quiet", says=["began with another model"])
        job.write_text(text.replace(f"adapter: hf://{REPOSITORY}\n", ""))
        place.refused("run", job, "--quiet", says=["began with another model"])


CASES = [fetched, resumed, corrupted, gated, missing, offline, shared, together, full, moved, inspected, bucket, adapter]


if __name__ == "__main__":
    cases.main(__doc__, CASES)
