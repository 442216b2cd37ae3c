#!/usr/bin/env python3
"""Runs the DAGs of deploy/airflow/ and of dags.py beside this file in a real Airflow, over a real broker and, if there is one, a real S3 store.

    eval "$(tests/services/services.py env --dir DIR)"; .venv/bin/python tests/airflow/run.py PROGRAM [--only CASE]

Installs Airflow and the provider into `.airflow/` of the checkout, starts Airflow's own processes (API server, scheduler, DAG processor,
triggerer), a gristmill worker and for some cases `gristmill serve`, and kills some of them at bad moments. The last line counts the cases. It
is no part of the check, since Airflow takes longer to install and start than its share of the check's time.
"""

import argparse
import contextlib
import hashlib
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid

import pyarrow.fs as fs
import pyarrow.parquet as pq

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEMO = ROOT / "jobs/demo"
AIRFLOW = ROOT / ".airflow"
BIN = AIRFLOW / "bin"
# The broker: RabbitMQ, else Kafka.
BROKERS = ("GRISTMILL_TEST_RABBITMQ", "GRISTMILL_TEST_KAFKA")
SECONDS_MAX = 300
# A service's key, as a connection's password.
KEY = "airflow-key"
CONNECTIONS = {"gristmill_openai": "openai", "gristmill_llm": "pydanticai"}
ENDED = {"success", "failed", "skipped", "upstream_failed", "removed"}


def install():
    if not BIN.exists():
        subprocess.run([sys.executable, "-m", "venv", AIRFLOW], check=True)
    pip = [BIN / "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "-r", ROOT / "tests/airflow/requirements.txt"], check=True)
    # A copy, since a build leaves files beside what it builds.
    with tempfile.TemporaryDirectory() as folder:
        source = shutil.copytree(ROOT / "deploy/airflow", pathlib.Path(folder) / "airflow")
        subprocess.run([*pip, "--force-reinstall", "--no-deps", source], check=True)


def until(what, found, seconds=SECONDS_MAX):
    """The first true value that `found()` gives."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := found():
            return value
        time.sleep(0.2)
    raise AssertionError(f"not within {seconds} s: {what}")


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Store:
    """Where jobs write and the batch service keeps its files: a bucket of S3 if there is one, else the folder."""

    def __init__(self, folder):
        self.env = {}
        if "GRISTMILL_TEST_S3" not in os.environ:
            self.files, self.base, self.scheme = fs.LocalFileSystem(), str(folder), "file://"
            return
        endpoint, key, secret, bucket = (os.environ[f"GRISTMILL_TEST_S3{name}"] for name in ("", "_KEY", "_SECRET", "_BUCKET"))
        self.env = {
            "AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": key,
            "AWS_SECRET_ACCESS_KEY": secret,
        }  # fmt: skip
        scheme, host = endpoint.split("://")
        self.files = fs.S3FileSystem(access_key=key, secret_key=secret, endpoint_override=host, scheme=scheme, region="us-east-1")
        self.base, self.scheme = f"{bucket}/airflow-{uuid.uuid4().hex[:8]}", "s3://"

    def url(self, path):
        """As gristmill prints it."""
        return f"{self.scheme}{self.base}/{path}"

    def paths(self, path):
        """Paths of all files below a path."""
        found = self.files.get_file_info(fs.FileSelector(f"{self.base}/{path}", allow_not_found=True, recursive=True))
        return [file.path.removeprefix(f"{self.base}/") for file in found if file.type == fs.FileType.File]

    def delete(self, path):
        for file in self.paths(path):
            self.files.delete_file(f"{self.base}/{file}")
        if self.scheme == "file://":
            shutil.rmtree(f"{self.base}/{path}", ignore_errors=True)

    def fetch(self, path, folder):
        fs.copy_files(f"{self.base}/{path}", str(folder), source_filesystem=self.files, destination_filesystem=fs.LocalFileSystem())


class Scene:
    """Airflow's processes, a worker of gristmill's, a batch service where a case asks for it, and the folder in which they work."""

    def __init__(self, folder, program):
        self.folder, self.program = folder, program
        self.store = Store(folder)
        self.processes = {}
        self.port, self.service_port = free_port(), free_port()
        self.token = None
        self.queue = self._queue()
        self._files()
        self.env = os.environ | self.store.env | {
            "AIRFLOW_HOME": str(folder / "airflow"),
            "AIRFLOW__CORE__DAGS_FOLDER": str(folder / "dags"),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
            "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"http://127.0.0.1:{self.port}/execution/",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
            "AIRFLOW__CORE__DEFAULT_TASK_RETRY_DELAY": "2",
            "AIRFLOW__CORE__PARALLELISM": "4",
            "AIRFLOW__API__PORT": str(self.port),
            "AIRFLOW__API__WORKERS": "1",
            "AIRFLOW__API_AUTH__JWT_SECRET": uuid.uuid4().hex * 2,
            "AIRFLOW__API__SECRET_KEY": uuid.uuid4().hex,
            "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "5",
            "AIRFLOW__TRIGGERER__JOB_HEARTBEAT_SEC": "2",
            "AIRFLOW__TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": "6",
            "GRISTMILL_QUEUE": self.queue,
            "GRISTMILL_JOBS": str(folder / "jobs"),
            "GRISTMILL_TABLE": str(folder / "table"),
            "GRISTMILL_LABELS": self.store.url("out/labels"),
            "GRISTMILL_MODEL": str(DEMO / "model"),
            "GRISTMILL_REQUESTS": str(folder / "requests.jsonl"),
            "GRISTMILL_TICKETS": str(folder / "tickets.jsonl"),
            "GRISTMILL_ANSWERS": str(folder / "answers"),
            "GRISTMILL_TEST_FOLDER": str(folder),
            "GRISTMILL_TEST_OUTPUTS": self.store.url("out"),
            # A DAG that fails to check its connection's host reaches nobody.
            "OPENAI_BASE_URL": "http://127.0.0.1:9/v1",
            "PATH": f"{program.parent}:{BIN}:{os.environ['PATH']}",
        }

    def _queue(self):
        found = [os.environ[name] for name in BROKERS if name in os.environ]
        if not found:
            raise SystemExit(f"set one of {' and '.join(BROKERS)}: see services.py")
        address = found[0] if "://" in found[0] else f"kafka://{found[0]}"
        return f"{address}/airflow-{uuid.uuid4().hex[:8]}"

    def _files(self):
        """Jobs whose addresses are of this folder, two days of a table, and nights for each date that a schedule may ask for."""
        (self.folder / "jobs").mkdir()
        text = (ROOT / "jobs/nightly.yaml").read_text().replace("demo/nightly/", f"{self.folder}/nights/").replace("demo/", f"{DEMO}/")
        text = text.replace("../out/", self.store.url("out/")).replace("rows: 64", "rows: 10")
        (self.folder / "jobs/nightly.yaml").write_text(text)
        for days in range(-2, 3):
            day = time.strftime("%Y-%m-%d", time.gmtime(time.time() + days * 86400))
            shutil.copytree(DEMO / "nightly/date=2026-11-24", self.folder / f"nights/date={day}")
        rows = pq.read_table(DEMO / "tickets.parquet")
        for number, day in enumerate(("2026-11-01", "2026-11-02")):
            (self.folder / f"table/date={day}").mkdir(parents=True)
            pq.write_table(rows.slice(number * 100, 100), self.folder / f"table/date={day}/tickets.parquet")
        (self.folder / "dags").mkdir()
        for file in [*(ROOT / "deploy/airflow/dags").glob("*.py"), ROOT / "tests/airflow/dags.py"]:
            shutil.copy(file, self.folder / "dags")
        categories = "account_access, account_closure, billing, refund, shipping_delay, shipping_damage, defect, technical, feature_request, other"
        system = (
            "You sort support tickets of an online shop. Read the subject and the body of the ticket, ignore quoted mail and small talk, and "
            f"answer with exactly one category. The categories are: {categories}."
        )
        job = {
            "model": str(DEMO / "model"),
            "precision": "f32",
            "input": {"uri": str(DEMO / "tickets.parquet")},
            "prompt": {"messages": [{"role": "system", "content": system}, {"role": "user", "content": "{{ subject }}\n\n{{ body }}"}]},
            "generate": {"max_tokens": 8, "temperature": 0, "choice": categories.split(", ")},
            "shards": {"rows": 50},
        }
        (self.folder / "label-tickets.json").write_text(json.dumps(job))
        self._batch_files(rows.slice(0, 200).to_pylist(), system, categories.split(", "))

    def _batch_files(self, tickets, system, categories):
        """What the batch service reads, and 200 tickets as lines and as requests."""
        models = f"models:\n- {{name: demo, model: {DEMO / 'model'}, precision: f32, shards: {{rows: 50}}}}\n"
        (self.folder / "models.yaml").write_text(models)
        key = hashlib.sha256(KEY.encode()).hexdigest()
        (self.folder / "keys.yaml").write_text(f"keys:\n- {{tenant: airflow, sha256: {key}}}\n")
        (self.folder / "tickets.jsonl").write_text("".join(json.dumps(ticket, default=str) + "\n" for ticket in tickets))
        with open(self.folder / "requests.jsonl", "w") as out:
            for ticket in tickets:
                text = f"{ticket['subject']}\n\n{ticket['body']}"
                messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
                body = {"model": "demo", "messages": messages, "max_completion_tokens": 8, "temperature": 0}
                body["structured_outputs"] = {"choice": categories}
                line = {"custom_id": ticket["ticket_id"], "method": "POST", "url": "/v1/chat/completions", "body": body}
                out.write(json.dumps(line) + "\n")

    def start(self, name, *command):
        log = open(self.folder / f"{name}.log", "ab")
        self.processes[name] = subprocess.Popen(list(map(str, command)), env=self.env, stdout=log, stderr=log, start_new_session=True)

    def start_airflow(self):
        subprocess.run([BIN / "airflow", "db", "migrate"], env=self.env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for name in ("api-server", "scheduler", "dag-processor", "triggerer"):
            self.start(name, BIN / "airflow", name)
        until("Airflow's API answers", self.reachable, 120)
        names = {"nightly_tickets", "use_tickets", "label_growing_table", "nightly_bash", "waits", "cancelled"}
        names |= {"openai_batch", "llm_batch", "nightly_kubernetes", "failed_batches", "structured", "marked_batch"}

        def all_read():
            errors = self.api("GET", "importErrors")["import_errors"]
            assert not errors, errors[0]["stack_trace"]
            return names <= {dag["dag_id"] for dag in self.api("GET", "dags?limit=100")["dags"]}

        until("all DAGs are there", all_read, 120)

    def start_worker(self):
        inputs = f"file://{DEMO},file://{self.folder}"
        options = ["--accept", self.store.url("out"), "--accept-inputs", inputs, "--accept-models", f"file://{DEMO}", "--log-interval", "0.5"]
        self.start("worker", self.program, "worker", "--queue", self.queue, "--precision", "f32", "--model", DEMO / "model", *options)

    def start_service(self):
        """The batch service, to which two connections lead. Its queue is one of its own, without a worker at first."""
        options = ["--store", self.store.url("store"), "--models", self.folder / "models.yaml", "--keys", self.folder / "keys.yaml"]
        options += ["--poll", "0.2", "--reconcile-every", "5", "--queue", f"{self.queue}-batches"]
        self.start("service", self.program, "serve", "--listen", self.service_port, *options)
        until("the service answers", lambda: self.batches() is not None, 60)
        for name in CONNECTIONS:
            self.connect(name, f"http://127.0.0.1:{self.service_port}/v1")

    def start_batch_worker(self):
        options = ["--queue", f"{self.queue}-batches", "--model", DEMO / "model", "--precision", "f32", "--log-interval", "0.5"]
        self.start("batch-worker", self.program, "worker", *options)

    def end_service(self):
        for name in ("service", "batch-worker"):
            if name in self.processes:
                self.kill(name)

    def batches(self):
        """The service's batches, or None while it is away."""
        url = f"http://127.0.0.1:{self.service_port}/v1/batches?limit=100"
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(urllib.request.Request(url, headers={"Authorization": f"Bearer {KEY}"}), timeout=5) as answer:
                return json.loads(answer.read())["data"]

    def connect(self, name, host):
        """Makes a connection anew."""
        with contextlib.suppress(OSError):
            self.api("DELETE", f"connections/{name}")
        self.api("POST", "connections", {"connection_id": name, "conn_type": CONNECTIONS[name], "host": host, "password": KEY})

    def kill(self, name, by=signal.SIGKILL):
        process = self.processes.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, by)
        process.wait()

    def end(self):
        for name in list(self.processes):
            self.kill(name)

    def reachable(self):
        try:
            self.api("GET", "version")
            return True
        except (OSError, urllib.error.URLError):
            return False

    def api(self, method, path, body=None, version="api/v2/"):
        if self.token is None and version:
            self.token = self.api("GET", "auth/token", version="")["access_token"]
        headers = {"Content-Type": "application/json"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        url = f"http://127.0.0.1:{self.port}/{version}{path}"
        request = urllib.request.Request(url, method=method, headers=headers, data=None if body is None else json.dumps(body).encode())
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            raise OSError(f"{method} {url}: {error.code} {error.read()[:300]}") from error

    def unpause(self, dag):
        self.api("PATCH", f"dags/{dag}", {"is_paused": False})

    def trigger(self, dag):
        self.unpause(dag)
        return self.api("POST", f"dags/{dag}/dagRuns", {"logical_date": None})["dag_run_id"]

    def latest(self, dag):
        """The id of the DAG's run, once there is one."""
        return until(f"a run of {dag}", lambda: [run["dag_run_id"] for run in self.api("GET", f"dags/{dag}/dagRuns")["dag_runs"]])[-1]

    def tasks(self, dag, run):
        return self.api("GET", f"dags/{dag}/dagRuns/{run}/taskInstances")["task_instances"]

    def wait(self, dag, run, of=1):
        """The task instances of a run, once all have ended, by task and map index."""

        def ended():
            found = self.tasks(dag, run)
            return len(found) >= of and all(task["state"] in ENDED for task in found) and found

        found = until(f"{dag} ends", ended)
        return {(task["task_id"], task["map_index"]): task for task in found}

    def until_state(self, dag, run, task, state):
        return until(f"{task} is {state}", lambda: [one for one in self.tasks(dag, run) if one["task_id"] == task and one["state"] == state])[0]

    def xcom(self, dag, run, task, index=-1):
        path = f"dags/{dag}/dagRuns/{run}/taskInstances/{task}/xcomEntries/return_value?map_index={index}"
        value = self.api("GET", path)["value"]
        return json.loads(value) if isinstance(value, str) and value.startswith("{") else value

    def logged(self, output):
        """Log records of a job's ledger."""
        return sum("/_gristmill/" in path and "/log/" in path for path in self.store.paths(output))

    def check(self, output, source, carry, codes=(0,)):
        """Each row once, by a checker that shares no code with gristmill."""
        with tempfile.TemporaryDirectory() as folder:
            self.store.fetch(output, folder)
            checker = [sys.executable, ROOT / "tests/check_output.py", folder, source, "--carry", carry]
            subprocess.run(checker, check=True, stdout=subprocess.DEVNULL)
        verified = subprocess.run([self.program, "verify", self.store.url(output)], capture_output=True, text=True, env=self.env)
        assert verified.returncode in codes, verified.stderr

    def children(self, words):
        """Processes whose command line holds all words: (process, its parent)."""
        found = []
        for entry in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if line.startswith(str(self.program)) or line.startswith("gristmill "):
                    if all(word in line for word in words):
                        found.append((int(entry.name), int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])))
        return found


def nightly_tickets(scene):
    """A scheduled run over a queue; the asset's event starts the second DAG, which reads what the first made."""
    scene.unpause("use_tickets")
    scene.unpause("nightly_tickets")
    run = scene.latest("nightly_tickets")
    tasks = scene.wait("nightly_tickets", run)
    assert tasks["write_tickets", -1]["state"] == "success", tasks
    result = scene.xcom("nightly_tickets", run, "write_tickets")
    assert result["rows"]["total"] == pq.read_metadata(DEMO / "nightly/date=2026-11-24/briefs.parquet").num_rows, result
    output = result["output"].removeprefix(scene.store.url(""))
    scene.check(output, DEMO / "nightly/date=2026-11-24/briefs.parquet", "brief_id")
    used = scene.latest("use_tickets")
    scene.wait("use_tickets", used)
    event = scene.xcom("use_tickets", used, "use")
    assert event["output"] == result["output"] and event["rows"] == result["rows"], event
    # The next case runs the same night by other means.
    scene.store.delete(output)


def nightly_bash(scene):
    """The task's process is killed, its program lives on, and the retry works beside it: each row once."""
    scene.unpause("nightly_bash")
    run = scene.latest("nightly_bash")
    until("the job has begun", lambda: scene.logged("out/nightly"))
    ((program, task),) = scene.children(["run", "nightly.yaml"])
    os.kill(task, signal.SIGKILL)
    tasks = scene.wait("nightly_bash", run)
    assert tasks["write_tickets", -1]["state"] == "success" and tasks["write_tickets", -1]["try_number"] == 2, tasks
    (night,) = {path.split("/")[2] for path in scene.store.paths("out/nightly")}
    night = f"out/nightly/{night}"
    assert scene.xcom("nightly_bash", run, "write_tickets")["output"] == scene.store.url(night)
    until("the old program has ended", lambda: not os.path.exists(f"/proc/{program}"))
    scene.check(night, DEMO / "nightly/date=2026-11-24/briefs.parquet", "brief_id")


def label_growing_table(scene):
    """A job a folder, by mapped tasks; a second run finds them done; a new folder is the only one that is computed."""
    days = ["2026-11-01", "2026-11-02"]
    for number in range(2):
        run = scene.trigger("label_growing_table")
        tasks = scene.wait("label_growing_table", run, of=1 + len(days))
        assert [tasks["label", index]["state"] for index in range(len(days))] == ["success"] * len(days), tasks
        for index, day in enumerate(days):
            result = scene.xcom("label_growing_table", run, "label", index)
            assert result["rows"]["succeeded"] == 100 and result["output"].endswith(day), result
            scene.check(f"out/labels/{day}", scene.folder / f"table/date={day}/tickets.parquet", "ticket_id")
        if number == 0:
            days.append("2026-11-03")
            shutil.copytree(scene.folder / "table/date=2026-11-01", scene.folder / "table/date=2026-11-03")


def killed_in_task(scene):
    """The task's process is killed while it computes: its program ends, and the retry goes on with the same job."""
    run = scene.trigger("killed_in_task")
    output = "out/killed_in_task"
    until("the job has begun", lambda: scene.logged(output) > 0)
    ((program, task),) = scene.children(["run", "/gristmill-"])
    os.kill(task, signal.SIGKILL)
    until("the program ends with its task", lambda: not os.path.exists(f"/proc/{program}"), 60)
    logged = scene.logged(output)
    tasks = scene.wait("killed_in_task", run)
    assert tasks["run", -1]["state"] == "success" and tasks["run", -1]["try_number"] == 2, tasks
    assert scene.logged(output) > logged > 0
    scene.check(output, DEMO / "tickets.parquet", "ticket_id")


def waits(scene):
    """Worker, triggerer and scheduler are killed while the task waits: one job, each row once, one try."""
    scene.kill("worker")
    run = scene.trigger("waits")
    scene.until_state("waits", run, "run", "deferred")
    output = "out/waits"
    scene.start_worker()
    until("the job has begun", lambda: scene.logged(output) > 0)
    scene.kill("worker")
    for name in ("triggerer", "scheduler"):
        scene.kill(name)
        scene.start(name, BIN / "airflow", name)
    assert scene.tasks("waits", run)[0]["state"] == "deferred"
    scene.start_worker()
    tasks = scene.wait("waits", run)
    assert tasks["run", -1]["state"] == "success" and tasks["run", -1]["try_number"] == 1, tasks
    assert scene.xcom("waits", run, "run")["rows"]["succeeded"] == 2000
    scene.check(output, DEMO / "tickets.parquet", "ticket_id")


def sensed(scene):
    """Sensors of a job that has ended, and of an output where none is: the latter fails at its first try."""
    run = scene.trigger("sensed")
    tasks = scene.wait("sensed", run, of=3)
    assert {name: task["state"] for (name, _), task in tasks.items()} == {"wait": "success", "poke": "success", "nothing_there": "failed"}, tasks
    assert tasks["nothing_there", -1]["try_number"] == 1
    assert scene.xcom("sensed", run, "wait")["rows"]["succeeded"] == 2000
    assert scene.xcom("sensed", run, "poke")["rows"]["succeeded"] == 2000


def ends(scene, dag, expected):
    run = scene.trigger(dag)
    tasks = scene.wait(dag, run, of=len(expected))
    assert {name: task["state"] for (name, _), task in tasks.items()} == expected, tasks
    # None of these ends is retried: another try would end the same way.
    assert all(task["try_number"] == 1 for task in tasks.values()), tasks
    return run


def budget(scene):
    """A budget that is reached skips the task, or fails it where the DAG says so."""
    ends(scene, "budget", {"skipped": "skipped", "failed": "failed"})


def failed_rows(scene):
    """Rows that did not succeed fail the task, or are kept where the DAG says so."""
    run = ends(scene, "failed_rows", {"failed": "failed", "kept": "success"})
    rows = scene.xcom("failed_rows", run, "kept")["rows"]
    assert rows["total"] == 200 and 0 < rows["errored"] < 200, rows


def refused(scene):
    """A job that gristmill refuses fails at its first try."""
    ends(scene, "refused", {"run": "failed"})


def cancelled(scene):
    """Marking a waiting task cancels its job only where the DAG says so."""
    run = scene.trigger("cancelled")
    for task in ("kept", "cancelled"):
        scene.until_state("cancelled", run, task, "deferred")
        # Airflow tells a trigger of such a mark only once it runs.
        log = f"airflow/logs/dag_id=cancelled/run_id={run}/task_id={task}/*.trigger.*"
        until("the trigger runs", lambda: any("rows are done" in file.read_text() for file in scene.folder.glob(log)), 60)
        scene.api("PATCH", f"dags/cancelled/dagRuns/{run}/taskInstances/{task}", {"new_state": "failed"})

    def state(name):
        status = [scene.program, "status", scene.store.url(f"out/{name}"), "--json"]
        status = subprocess.run(status, capture_output=True, text=True, check=True, env=scene.env)
        return json.loads(status.stdout)["state"]

    until("the job is cancelled", lambda: state("cancelled") == "cancelled", 60)
    assert state("kept") == "running"


def openai_batch(scene):
    """Triggerer and service are killed while the task waits: its retry waits for the same batch, and each request is answered once."""
    scene.start_service()
    scene.unpause("openai_batch")
    run = scene.latest("openai_batch")
    scene.until_state("openai_batch", run, "answer", "deferred")
    scene.kill("triggerer")
    scene.start("triggerer", BIN / "airflow", "triggerer")
    # This operator's trigger gives up at the first poll that fails.
    scene.kill("service")

    def try_ended():
        return any(task["task_id"] == "answer" and task["state"] == "up_for_retry" for task in scene.tasks("openai_batch", run))

    until("the trigger gives up", try_ended)
    scene.start_service()
    scene.start_batch_worker()
    tasks = scene.wait("openai_batch", run, of=3)
    assert {task["state"] for task in tasks.values()} == {"success"}, tasks
    assert tasks["answer", -1]["try_number"] > 1, tasks
    (batch,) = scene.batches()
    assert batch["id"] == scene.xcom("openai_batch", run, "answer"), batch
    result = scene.xcom("openai_batch", run, "download")
    assert (result["answered"], result["failed"]) == (200, 0), result
    answers = [json.loads(line) for line in (pathlib.Path(result["folder"].removeprefix("file://")) / "answers.jsonl").open()]
    rows = pq.read_table(DEMO / "tickets.parquet").slice(0, 200).to_pylist()
    assert [answer["custom_id"] for answer in answers] == [row["ticket_id"] for row in rows]
    given = [answer["response"]["body"]["choices"][0]["message"]["content"] for answer in answers]
    assert sum(answer == row["category"] for answer, row in zip(given, rows)) > 180


def llm_batch(scene):
    """The triggerer is killed while the task waits, and the worker while it computes: one batch, one try, each request answered once."""
    scene.start_service()
    before = len(scene.batches())
    scene.unpause("llm_batch")
    run = scene.latest("llm_batch")
    scene.until_state("llm_batch", run, "label", "deferred")
    scene.kill("triggerer")
    scene.start_batch_worker()
    until("some are done", lambda: scene.batches()[0]["request_counts"]["completed"] > 0)
    scene.kill("batch-worker")
    scene.start("triggerer", BIN / "airflow", "triggerer")
    scene.start_batch_worker()
    tasks = scene.wait("llm_batch", run, of=3)
    assert {task["state"] for task in tasks.values()} == {"success"}, tasks
    assert tasks["label", -1]["try_number"] == 1 and len(scene.batches()) == before + 1, tasks
    manifest = scene.xcom("llm_batch", run, "label")
    assert manifest["counts"]["succeeded"] == manifest["request_count"] == 200, manifest
    assert manifest["duplicate_result_count"] == 0, manifest
    counts = scene.xcom("llm_batch", run, "count")
    rows = pq.read_table(DEMO / "tickets.parquet").slice(0, 200).to_pylist()
    assert sum(counts.values()) == 200 and set(counts) <= {row["category"] for row in rows} | {"other"}, counts


def structured(scene):
    """Answers by a Pydantic model, through this provider's adapter."""
    scene.start_service()
    scene.start_batch_worker()
    run = scene.trigger("structured")
    tasks = scene.wait("structured", run)
    assert tasks["label", -1]["state"] == "success", tasks
    manifest = scene.xcom("structured", run, "label")
    assert manifest["adapter"] == "gristmill" and manifest["counts"]["succeeded"] == 20, manifest
    rows = [json.loads(line) for line in open(manifest["result_uri"].removeprefix("file://"))]
    assert all(set(row["output"]) == {"category", "urgent"} for row in rows), rows


def failed_batches(scene):
    """A batch that fails fails its task, whichever operator waits; so do requests that fail, where the DAG says so."""
    scene.start_service()
    scene.start_batch_worker()
    run = scene.trigger("failed_batches")
    tasks = scene.wait("failed_batches", run, of=5)
    states = {name: task["state"] for (name, _), task in tasks.items()}
    expected = {"upload": "success", "broken_line": "failed", "unknown_model": "failed", "partial": "failed", "kept": "success"}
    assert states == expected, states
    counts = scene.xcom("failed_batches", run, "kept")["counts"]
    assert (counts["succeeded"], counts["errored"]) == (1, 1), counts
    logs = scene.folder / f"airflow/logs/dag_id=failed_batches/run_id={run}"

    def logged(task, text):
        return any(text in file.read_text() for file in (logs / f"task_id={task}").iterdir())

    assert logged("unknown_model", "model_not_found") and logged("broken_line", "Batch failed") and logged("partial", "errored=1")


def no_host(scene):
    """No DAG sends anything by a connection without a host, which the openai package takes for OpenAI's."""
    scene.start_service()
    before = scene.batches()
    for name in CONNECTIONS:
        scene.connect(name, "")
    for dag, task in (("openai_batch", "upload"), ("llm_batch", "label"), ("structured", "label")):
        run = scene.trigger(dag)
        tasks = scene.wait(dag, run)
        assert tasks[task, -1]["state"] == "failed" and tasks[task, -1]["try_number"] == 1, tasks
        logs = scene.folder / f"airflow/logs/dag_id={dag}/run_id={run}/task_id={task}"
        assert any("as in http://gristmill:8000/v1" in file.read_text() for file in logs.iterdir()), logs
    assert scene.batches() == before


def marked_batch(scene):
    """Marking a task that waits in `LLMBatchOperator` cancels its batch."""
    scene.start_service()
    run = scene.trigger("marked_batch")
    scene.until_state("marked_batch", run, "label", "deferred")
    log = f"airflow/logs/dag_id=marked_batch/run_id={run}/task_id=label/*.trigger.*"
    until("the trigger runs", lambda: any("HTTP Request" in file.read_text() for file in scene.folder.glob(log)), 60)
    scene.api("PATCH", f"dags/marked_batch/dagRuns/{run}/taskInstances/label", {"new_state": "failed"})
    work = f"store/tenants/airflow/work/{scene.batches()[0]['id']}"
    until("the job's workers are told", lambda: any("/control/" in path for path in scene.store.paths(work)), 60)
    # A worker ends the requests.
    scene.start_batch_worker()
    until("the batch is cancelled", lambda: scene.batches()[0]["status"] == "cancelled", 60)


def nightly_kubernetes(scene):
    """The pod fits the schema of Kubernetes; its command, run here, leaves a result, an exit code and a message, and gets signals."""
    pod_file = ROOT / "tests/airflow/pod.py"
    made = subprocess.run([BIN / "python", pod_file, scene.folder / "dags/nightly_kubernetes.py"], env=scene.env, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[-2000:]
    pod = json.loads(made.stdout.splitlines()[-1])
    container = next(one for one in pod["spec"]["containers"] if one["name"] == "base")
    (text,) = container["args"]
    xcom = scene.folder / "return.json"
    text = text.replace("/airflow/xcom/return.json", str(xcom)).replace("/jobs/", f"{scene.folder}/jobs/")
    assert str(xcom) in text and container["command"] == ["/bin/sh", "-c"]
    (night, *_) = sorted(path.name.removeprefix("date=") for path in (scene.folder / "nights").iterdir())

    def start(date):
        env = scene.env | {"DATE": date}
        return subprocess.Popen([*container["command"], text], env=env, stderr=subprocess.PIPE, text=True, start_new_session=True)

    # No such night: the message is what Kubernetes would take from the end of the log.
    gone = start("2020-01-01")
    _, message = gone.communicate(timeout=120)
    assert gone.returncode in (1, 2) and "2020-01-01" in message and xcom.read_text() == "", (gone.returncode, message)
    output = f"out/nightly/{night}"
    scene.store.delete(output)
    stopped = start(night)
    until("the job has begun", lambda: any("/_gristmill/" in path for path in scene.store.paths(output)))
    # Kubernetes signals the container's first process alone.
    os.kill(stopped.pid, signal.SIGTERM)
    assert stopped.wait(40) == 6, stopped.returncode
    ended = start(night)
    _, message = ended.communicate(timeout=SECONDS_MAX)
    result = json.loads(xcom.read_text())
    assert ended.returncode in (0, 3) and result["output"] == scene.store.url(output), (ended.returncode, message)
    scene.check(output, DEMO / "nightly/date=2026-11-24/briefs.parquet", "brief_id")
    scene.store.delete(output)


CASES = [
    nightly_tickets, nightly_bash, nightly_kubernetes, label_growing_table, killed_in_task, waits, sensed, budget, failed_rows, refused,
    cancelled, openai_batch, llm_batch, structured, failed_batches, marked_batch, no_host,
]  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=pathlib.Path)
    parser.add_argument("--only", action="append", choices=[case.__name__ for case in CASES])
    parser.add_argument("--keep", action="store_true", help="keep the folder with Airflow's logs")
    asked = parser.parse_args()
    if asked.program.name != "gristmill":
        parser.error("the DAGs call the program by its name: PROGRAM must be a file named `gristmill`")
    install()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="gristmill-airflow-"))
    scene = Scene(folder, asked.program.resolve(strict=True))
    cases = [case for case in CASES if asked.only is None or case.__name__ in asked.only]
    failed = 0
    try:
        scene.start_airflow()
        scene.start_worker()
        for case in cases:
            began = time.monotonic()
            try:
                case(scene)
                print(f"{case.__name__}: right, {time.monotonic() - began:.0f} s", flush=True)
            except (AssertionError, OSError, ValueError, KeyError, subprocess.SubprocessError) as why:
                failed += 1
                print(f"{case.__name__}: WRONG: {type(why).__name__}: {why}", flush=True)
            scene.end_service()
    finally:
        scene.end()
        if failed or asked.keep:
            print(f"logs: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    print(f"{len(cases) - failed} of {len(cases)} cases right")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
